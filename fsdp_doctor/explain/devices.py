"""Reads a table of nvidia-smi: which processes have memory on which device."""

from __future__ import annotations

import re

from fsdp_doctor.explain.rank_lines import MAX_TRACKED, SHOWN, Found

_DEVICE_ROW = re.compile(
    r"^\W*(?P<device>\d{1,2})\s+(?:N/A\s+N/A\s+)?(?P<pid>\d{2,9})\s+(?:C(?:\+G)?\s+)?\S.*?(?P<memory>\d+) ?MiB"
)


class DeviceReader:
    """Finds processes of other devices that have memory on device 0, too."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[str, int]] = {}

    def read(self, number: int, text: str) -> bool:
        """Reads the next line, and returns whether it is a row of the table."""
        row = _DEVICE_ROW.match(text) if "MiB" in text else None
        if row is None or len(self._devices) >= MAX_TRACKED:
            return False
        self._devices.setdefault(row["device"], {})[row["pid"]] = number
        return True

    def end(self) -> Found | None:
        """Returns, after the end of the log, the symptom that device 0 holds memory of other devices' processes.

        Returns None if the log does not show this symptom.
        """
        first = self._devices.get("0", {})
        strange = [pid for pid in first if any(pid in pids for device, pids in self._devices.items() if device != "0")]
        if not strange:
            return None
        clash = (
            f"GPU 0 holds memory of {len(strange)} processes of other devices (pid {', '.join(strange[:SHOWN])}) "
            "next to that of rank 0"
        )
        decide = (
            "Does each rank call `torch.cuda.set_device(local_rank)` before anything else, and load with "
            "`map_location` (cpu, or its own device)? Otherwise every rank loads a file of cuda:0 onto cuda:0."
        )
        return Found(clash, decide, tuple(sorted(first[pid] for pid in strange[:2])))
