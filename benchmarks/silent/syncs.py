"""Programs that send weights to an engine between training steps, rightly, and with each published error.

A base class is a program as a user writes it, with the call of fsdp-doctor that the documentation names for it. A
published error is that program with one function replaced; a clean program is a base class, or one with other settings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fsdp_doctor

from .entries import publish
from .program import Training, Weights, make_whole


class Sync(Training):
    """Sends the weights to an engine after each of two steps, and compares fingerprints."""

    command = "fingerprints"

    def run(self) -> None:
        self.engine = self.make_net(1)
        history = []
        for _ in range(2):
            self.train()
            self.receive(self.send())
            self.use_engine()
            history.append(fsdp_doctor.fingerprint(self.model, **self.choose_adapters()))
        base = fsdp_doctor.fingerprint(self.model, lora="base") if self.lora else None
        held = fsdp_doctor.fingerprint_tensors(self.engine.state_dict())
        self.report(fsdp_doctor.compare_fingerprints(history[-1], held, history=history[:-1], base=base))

    def choose_adapters(self) -> dict[str, Any]:
        return {"lora": "merged"} if self.lora else {}

    def send(self) -> Weights:
        for name, tensor in self.model.state_dict().items():
            yield name, make_whole(tensor)

    def receive(self, weights: Weights) -> None:
        own = self.engine.state_dict()
        for name, tensor in weights:
            own[name].copy_(tensor)

    def use_engine(self) -> None:
        self.engine.eval()
        self.engine(torch.arange(4))


class MergedSync(Sync):
    """Sends the weights with the adapters merged."""

    lora = True

    def send(self) -> Weights:
        with torch.no_grad():
            merged = [(name, tensor.clone()) for name, tensor in fsdp_doctor.full_tensors(self.model, lora="merged")]
        yield from merged


@publish("verl-project/verl#6782", "verl-project/verl#7014", names=("up_proj", "down_proj"))
class MergeIsUndoneBeforeTheSend(MergedSync):
    """The state dict is taken while adapters are merged, and read after they were taken out."""

    def send(self) -> Weights:
        self.model.merge_adapter()
        state = self.model.state_dict()
        self.model.unmerge_adapter()
        for name, tensor in state.items():
            if "lora_" not in name:
                yield name.replace("base_model.model.", "").replace(".base_layer", ""), make_whole(tensor)


@publish("verl-project/verl#7495", names=("up_proj", "down_proj"))
class AdapterIsNeverSent(MergedSync):
    """Every sync sends the frozen base weights."""

    def send(self) -> Weights:
        return fsdp_doctor.full_tensors(self.model, lora="base")


class BaseSync(MergedSync):
    """Sends base weights to an engine that adds the adapters itself."""

    def choose_adapters(self) -> dict[str, Any]:
        return {"lora": "base"}

    def send(self) -> Weights:
        return fsdp_doctor.full_tensors(self.model, lora="base")


@publish("radixark/miles#1087", "radixark/miles#1087", names=("up_proj", "down_proj"))
class BaseIsSentMerged(BaseSync):
    """An engine that adds the adapters itself is sent base weights into which they are merged."""

    def send(self) -> Weights:
        return fsdp_doctor.full_tensors(self.model, lora="merged")


@publish("verl-project/verl#5688", "verl-project/verl#5801", names=("score_bias",))
class BuffersAreNotSent(Sync):
    """Parameters are sent, and buffers that the training changes are not."""

    def send(self) -> Weights:
        for name, tensor in self.model.named_parameters():
            yield name, make_whole(tensor)


@publish("modelscope/ms-swift#10204", "modelscope/ms-swift#10207", names=("q_proj.weight",))
class BucketIsReusedUnderViews(Sync):
    """The receiver keeps views of a shared buffer, into which the sender packs the next tensor."""

    def send(self) -> Weights:
        buffer = torch.empty(1024)
        for name, tensor in super().send():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    def receive(self, weights: Weights) -> None:
        self.engine.load_state_dict(dict(weights))


@publish("vllm-project/vllm#48312", names=("up_proj",))
class PartArrivesTwice(Sync):
    """An engine counts elements and not places: the gate arrives twice, the projection up never."""

    def send(self) -> Weights:
        last: tuple[str, torch.Tensor] | None = None
        for name, tensor in super().send():
            yield last if last is not None and ".up_proj." in name else (name, tensor)
            last = name, tensor


@publish("huggingface/trl#7104", names=("layers.0",))
class WrappedNamesAreSkipped(Sync):
    """Names have the prefix of a checkpoint wrapper, and the engine skips what it does not know."""

    def send(self) -> Weights:
        for name, tensor in super().send():
            yield name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."), tensor

    def receive(self, weights: Weights) -> None:
        own = self.engine.state_dict()
        super().receive((name, tensor) for name, tensor in weights if name in own)


@publish("huggingface/trl#5312", "huggingface/trl#5313", names=("embed_tokens.weight", "q_proj"))
class SleepDropsTheWeights(Sync):
    """The engine sleeps and drops its weights after they were sent; nothing sends them again."""

    def use_engine(self) -> None:
        super().use_engine()
        for tensor in self.engine.state_dict().values():
            tensor.copy_(torch.zeros_like(tensor))


@publish("verl-project/verl#7834", "verl-project/verl#7835", names=("lm_head",))
class TieIsLost(Sync):
    """A tied head is made anew from the meta device, and sent untied with what its memory held."""

    tied = True

    def make_model(self, seed: int) -> Any:
        model = super().make_model(seed)
        self.head = torch.randn(model.lm_head.weight.shape)
        return model

    def send(self) -> Weights:
        for name, tensor in super().send():
            yield name, self.head if name == "lm_head.weight" else tensor

    def receive(self, weights: Weights) -> None:
        self.engine.lm_head.weight = nn.Parameter(torch.empty_like(self.engine.lm_head.weight))
        super().receive(weights)


class FusedSync(Sync):
    """Sends to an engine of two ranks, each of which has its parts of the gate and the projection up in one tensor."""

    def fuse(self, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
        gates, ups = gate.chunk(2), up.chunk(2)
        return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]

    def receive(self, weights: Weights) -> None:
        arrived = dict(weights)
        own = self.engine.state_dict()
        for name, tensor in arrived.items():
            if ".gate_proj." in name:
                up = name.replace("gate_proj", "up_proj")
                halves = [part.chunk(2) for part in self.fuse(tensor, arrived[up])]
                own[name].copy_(torch.cat([gate for gate, _ in halves]))
                own[up].copy_(torch.cat([up for _, up in halves]))
            elif ".up_proj." not in name:
                own[name].copy_(tensor)


@publish("NVIDIA/Megatron-LM#2769", names=("gate_proj", "up_proj"))
class FusedTensorIsCutAsOne(FusedSync):
    """A gate and a projection up in one tensor are cut among ranks as if they were one matrix."""

    def fuse(self, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.cat((gate, up)).chunk(2))


@publish("vllm-project/vllm#51130", names=("experts",))
class ExpertsOfAnotherRank(Sync):
    """The first and the last expert of a rank are swapped, so it loads other experts or none."""

    experts = 4

    def send(self) -> Weights:
        for name, tensor in super().send():
            yield name, tensor.roll(2, 0) if ".experts." in name else tensor


class Guarded(Training):
    """Runs code that must not change a weight within ``unchanged``."""

    command = "unchanged"

    def run(self) -> None:
        self.train()
        self.train()
        try:
            with fsdp_doctor.unchanged(self.model, self.optimizer):
                self.generate()
        except fsdp_doctor.WeightsChanged as error:
            self.report([error])

    def generate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.arange(4))
        self.model.train()


@publish("huggingface/trl#6688", names=("up_proj", "down_proj"))
class MergeAndUnmergeRound(Guarded):
    """Adapters are merged into bfloat16 weights for each sync and taken out again, and leave their rounding."""

    lora, dtype = True, torch.bfloat16

    def generate(self) -> None:
        with torch.no_grad():
            self.model.merge_adapter()
            self.model.unmerge_adapter()
