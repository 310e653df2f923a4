"""The frameworks whose own code can be run, and what there is to try of each; read without any of them."""

from __future__ import annotations

from fsdp_doctor.matrix.frameworks.accelerate_matrix import ACCELERATE
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix, FrameworkName
from fsdp_doctor.matrix.frameworks.lightning_matrix import LIGHTNING
from fsdp_doctor.matrix.frameworks.skyrl_matrix import SKYRL
from fsdp_doctor.matrix.frameworks.torchtitan_matrix import TORCHTITAN
from fsdp_doctor.matrix.frameworks.trainer_matrix import TRAINER
from fsdp_doctor.matrix.frameworks.trl_matrix import TRL
from fsdp_doctor.matrix.frameworks.verl_matrix import VERL

# In the order of their users.
_MATRICES = (ACCELERATE, TRAINER, VERL, TRL, LIGHTNING, TORCHTITAN, SKYRL)
FRAMEWORKS: dict[FrameworkName, FrameworkMatrix] = {matrix.name: matrix for matrix in _MATRICES}
