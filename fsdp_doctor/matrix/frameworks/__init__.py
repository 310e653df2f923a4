"""The frameworks whose own code can be run, and what there is to try of each: a table ``NAME.toml`` for each."""

from __future__ import annotations

from typing import get_args

from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix, FrameworkName, read_matrix

FRAMEWORKS: dict[FrameworkName, FrameworkMatrix] = {name: read_matrix(name) for name in get_args(FrameworkName)}
