"""What a job holds, on this rank's device and host, by class.

``ledger`` looks at a live job; ``stage_watch`` watches the stages of one, by what ``tracker`` sees of every operator.
``census`` says whose memory a tensor is, ``counters`` what the allocator and the driver count.
"""

from __future__ import annotations

from fsdp_doctor.memory.live_ledger import ledger

__all__ = ["ledger"]
