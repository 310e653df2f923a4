"""Loading an adapter as peft does it; see matrix/methods.toml.

Nothing of ours is imported: ``fsdp-doctor repro`` copies a function of this module into a script as it stands.
"""

from __future__ import annotations

from typing import Any

import peft
import torch


def set_peft_model_state_dict(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    return peft.set_peft_model_state_dict(model, state)
