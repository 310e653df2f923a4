"""TRL: a trainer of its own, and the class by which its online trainers give vLLM their weights."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fsdp_doctor.frameworks.adapter import Adapter, Extraction, FrameworkSession, SavedFiles
from fsdp_doctor.frameworks.on_trainer import TrainerSession, training_arguments
from fsdp_doctor.frameworks.on_trainer import ADAPTER as TRAINER_ADAPTER
from fsdp_doctor.frameworks.plain_model import PlainModel
from fsdp_doctor.frameworks.shimming import Shimming
from fsdp_doctor.matrix.frameworks.trl_matrix import TRL

_NUM_SEQUENCES = 64
