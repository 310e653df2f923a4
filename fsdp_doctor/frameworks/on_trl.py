"""Adapter for TRL. It runs a trainer of TRL, and TRL's class that sends weights from online trainers to vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.frameworks.adapter import (
    Adapter,
    Extractor,
    FrameworkSession,
    NotInStandInError,
    PlainModel,
    Shims,
    StandIn,
)
from fsdp_doctor.frameworks.on_trainer import ADAPTER as TRAINER, TrainerSession, make_training_arguments

_NUM_SEQUENCES = 64


class TrlSession(TrainerSession):
    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        FrameworkSession.__init__(self, plain)
        from datasets import Dataset
        from trl import SFTTrainer

        self._version = configuration["version"]
        of_trainer = {**configuration, "state_dict_type": "full", "ddp_backend": "mixed-backend"}
        arguments = make_training_arguments(of_trainer, plain.workspace / "output")
        if self._version == "fsdp1":
            arguments.fsdp_config["use_orig_params"] = False
            arguments.fsdp_plugin_args["use_orig_params"] = False
        self._trainer = SFTTrainer(
            model=plain.build_module(),
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": plain.make_sequences(_NUM_SEQUENCES).tolist()}),
            processing_class=_make_tokenizer(),
        )
        if configuration["offload"] != "none":
            self.shards_on = torch.device("cpu")

    def list_extractions(self) -> Mapping[str, Extractor]:
        return {
            "sync_weights.colocate": lambda directory: self._sync("colocate"),
            "sync_weights.merged": lambda directory: self._sync("colocate"),
            "sync_weights.server": lambda directory: self._sync("server"),
            "save_model": self._save_model,
        }

    def _sync(self, mode: str) -> dict[str, torch.Tensor]:
        """Returns copies of the weights that TRL would send to vLLM.

        The weights are copied because TRL frees each tensor after it has sent the next tensor.
        """
        from trl.generation.vllm_generation import VLLMGeneration

        given: dict[str, torch.Tensor] = {}

        def load_weights(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            given.update((name, tensor.detach().clone()) for name, tensor in pairs)

        class Generation(VLLMGeneration):  # type: ignore[misc]
            def _init_vllm(self) -> None:
                """Starts no vLLM engine, and connects to no server."""

        generation: Any = Generation(self.model, self._trainer.accelerator, _make_tokenizer(), mode=mode)
        model = StandIn("vLLM's model", load_weights=load_weights)
        worker = StandIn("vLLM's worker", model_runner=StandIn("vLLM's model runner", model=model))
        engine = StandIn("vLLM's engine", model_executor=StandIn("vLLM's executor", driver_worker=worker))
        generation.llm = StandIn("vLLM's LLM", llm_engine=engine, reset_prefix_cache=lambda: None)
        generation.vllm_client = StandIn(
            "TRL's client",
            update_named_params=lambda metadata, pairs: load_weights(pairs),
            update_named_param=lambda name, weights: load_weights([(name, weights)]),
            reset_prefix_cache=lambda: None,
        )
        generation.sync_weights()
        return given if mode == "colocate" or dist.get_rank() == 0 else {}


def _make_tokenizer() -> Any:
    """Makes a tokenizer because SFTTrainer requires one, although the data are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"end": 0}, unk_token="end")), eos_token="end", pad_token="end"
    )


class TrlAdapter(Adapter):
    modules = (*TRAINER.modules, "trl.trainer.sft_trainer", "trl.generation.vllm_generation")

    def prepare_emulated_device(self, shims: Shims) -> None:
        TRAINER.prepare_emulated_device(shims)
        shims.note("vllm:LLM, trl.generation.vllm_client:VLLMClient")

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        from trl.trainer import utils

        # In TRL 1.15, this Triton kernel is the only loss of SFTTrainer.
        if getattr(utils, "_ChunkedLogProbFunction", self) is None:
            raise NotInStandInError("its loss is a kernel of Triton's, and Triton is not installed")
        return TrlSession(configuration, plain)


ADAPTER = TrlAdapter()
