"""Adapter for transformers' Trainer, which owns its training loop: callbacks examine the session between its steps."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from fsdp_doctor.frameworks.adapter import (
    STEPS_BEFORE,
    Adapter,
    Extractor,
    FrameworkSession,
    PlainModel,
    SavedFiles,
    Shims,
)
from fsdp_doctor.frameworks.on_accelerate import read_state_dict_type, see_accelerator
from fsdp_doctor.machine.versions import is_at_least, read_installed_versions

_NUM_SEQUENCES = 64


def make_training_arguments(configuration: Mapping[str, str], directory: pathlib.Path) -> Any:
    """Makes the transformers.TrainingArguments of a configuration, with saving, logging and reporting turned off."""
    from transformers import TrainingArguments

    version = "2" if configuration["version"] == "fsdp2" else "1"
    state_dict_type = f"{configuration['state_dict_type'].upper()}_STATE_DICT"
    fsdp: str | bool = True
    fsdp_config: dict[str, Any] = {"version": int(version), "state_dict_type": state_dict_type}
    if configuration["offload"] != "none":
        fsdp_config[configuration["offload"]] = True
    if not is_at_least(read_installed_versions(["transformers"])["transformers"], "5"):
        # transformers 4 leaves these to accelerate, which reads them as `accelerate launch` sets them.
        os.environ |= {"FSDP_VERSION": version, "FSDP_STATE_DICT_TYPE": state_dict_type}
        if version == "2":
            os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"
        fsdp, fsdp_config = "full_shard auto_wrap", {}
        if configuration["offload"] != "none":
            fsdp += " offload"
    return TrainingArguments(
        output_dir=str(directory),
        fsdp=fsdp,
        fsdp_config=fsdp_config,
        ddp_backend="cuda:nccl,cpu:gloo" if configuration["ddp_backend"] == "mixed-backend" else None,
        bf16=True,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class TrainerSession(FrameworkSession):
    goes_on = False

    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        super().__init__(plain)
        from transformers import Trainer

        self._version = configuration["version"]
        sequences = plain.make_sequences(_NUM_SEQUENCES)
        self._trainer = Trainer(
            model=plain.build_module(),
            args=make_training_arguments(configuration, plain.workspace / "output"),
            train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in sequences],
        )
        if configuration["offload"] != "none":
            self.shards_on = torch.device("cpu")

    def train(self, num_steps: int, at: Callable[[int], None], resume_from: pathlib.Path | None = None) -> None:
        from transformers import TrainerCallback

        before = 0 if resume_from is None else STEPS_BEFORE
        session, wrapping = self, self._trainer

        class LookIn(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                session.model = wrapping.model if session._version == "fsdp2" else wrapping.model_wrapped
                session.optimizer = wrapping.optimizer.optimizer
                session.state_dict_type = read_state_dict_type(wrapping.accelerator)
                at(0)

            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                at(state.global_step - before)

        self._trainer.args.max_steps = before + num_steps
        self._trainer.add_callback(LookIn())
        checkpoint = str(resume_from / f"checkpoint-{STEPS_BEFORE}") if resume_from is not None else None
        self._trainer.train(resume_from_checkpoint=checkpoint)

    def save(self, directory: pathlib.Path) -> None:
        """Requests a checkpoint, which Trainer writes after its callbacks have returned."""
        self._trainer.args.output_dir = str(directory)
        self._trainer.control.should_save = True

    def list_extractions(self) -> Mapping[str, Extractor]:
        return {"save_model": self._save_model, "save_model.adapter": self._save_model}

    def _save_model(self, directory: pathlib.Path) -> SavedFiles:
        self._trainer.save_model(str(directory))
        return SavedFiles(directory=directory, format="safetensors")


class TrainerAdapter(Adapter):
    modules: ClassVar[tuple[str, ...]] = (
        "transformers.trainer",
        "accelerate.utils.fsdp_utils",
        "transformers.models.qwen3.modeling_qwen3",
    )

    def prepare_emulated_device(self, shims: Shims) -> None:
        see_accelerator(shims)
        shims.replace("transformers.training_args:is_torch_bf16_gpu_available", lambda: True)

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        return TrainerSession(configuration, plain)


ADAPTER = TrainerAdapter()
