"""Nothing is shared between tests but the helpers in program.py and the functions in faults/."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
