"""Programs that load weights from files into a sharded model, rightly, and with each published error."""

from __future__ import annotations

import pathlib

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_doctor

from .entries import publish
from .program import Training


class Load(Training):
    """Loads a checkpoint of another run from files, and compares fingerprints with the files."""

    command = "fingerprints"

    def run(self) -> None:
        file = self.directory / "model.safetensors"
        net = self.make_net(2)
        if self.rank == 0:
            state = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
            if self.tied:
                del state["lm_head.weight"]
            save_file(state, file)
        dist.barrier()
        self.before_load()
        self.load(file)
        self.use_model()
        loaded = fsdp_doctor.fingerprint(self.model)
        self.report(
            fsdp_doctor.compare_fingerprints(
                loaded, fsdp_doctor.fingerprint_checkpoint(file), called=("the model", "the file")
            )
        )

    def before_load(self) -> None:
        """Runs what the job does before the load: nothing, unless a subclass overrides this method."""

    def load(self, file: pathlib.Path) -> None:
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in load_file(file).items():
                target = own[name]
                if isinstance(target, DTensor):
                    tensor = distribute_tensor(tensor, target.device_mesh, target.placements)
                target.copy_(tensor)

    def use_model(self) -> None:
        self.model.eval()
        self.model(torch.arange(4))
        self.model.reshard()


@publish("NVIDIA-NeMo/Automodel#2682", names=("down_proj",))
class LoaderFillsACopy(Load):
    """A cast on the way makes a copy, which is filled; the tensor counts as loaded."""

    def load(self, file: pathlib.Path) -> None:
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in load_file(file).items():
                target = own[name].double() if "down_proj" in name else own[name]
                if isinstance(target, DTensor):
                    tensor = distribute_tensor(tensor, target.device_mesh, target.placements)
                target.copy_(tensor)


@publish("PrimeIntellect-ai/prime-rl#3486", names=("gate_up_proj",))
class LoaderFillsPartsOfASplit(Load):
    """A split along the sharded dimension gives replicated copies, and a load fills these."""

    experts = 2

    def load(self, file: pathlib.Path) -> None:
        own, given = self.model.state_dict(), load_file(file)
        kept = {name: given.pop(name) for name in list(given) if "gate_up_proj" in name}
        with torch.no_grad():
            for name, tensor in given.items():
                target = own[name]
                whole = isinstance(target, DTensor)
                target.copy_(distribute_tensor(tensor, target.device_mesh, target.placements) if whole else tensor)
            for name, tensor in kept.items():
                for part, values in zip(own[name].split(1), tensor.split(1), strict=True):
                    part.copy_(distribute_tensor(values, part.device_mesh, part.placements))


@publish("ISEEKYAN/Megatron-LM#104", names=("q_proj.weight",))
class ShardsAreNotRefreshed(Load):
    """The unsharded parameters are filled, and the shards are not."""

    def load(self, file: pathlib.Path) -> None:
        given = load_file(file)
        self.model.eval()
        for module in (self.model, *self.model.layers):
            module.unshard()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(given[name])
        for module in (self.model, *self.model.layers):
            module.reshard()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(given[name])


@publish("pytorch/pytorch#153350", names=("k_proj",))
class MissingKeyIsNotReported(Load):
    """The dictionary lacks a parameter, and the load says that all keys matched."""

    def load(self, file: pathlib.Path) -> None:
        given = {name: tensor for name, tensor in load_file(file).items() if "layers.1.k_proj" not in name}
        options = StateDictOptions(full_state_dict=True, strict=False)
        assert not set_model_state_dict(self.model, given, options=options).missing_keys


class CheckedLoad(Load):
    """Loads after a first forward, and calls examine before the next forward."""

    command = "examine"

    def before_load(self) -> None:
        super().use_model()

    def use_model(self) -> None:
        fsdp_doctor.examine(self.model, raise_on_bad=True)
        super().use_model()


@publish("NVIDIA/Megatron-LM#6203", "NVIDIA/Megatron-LM#6203", names=("q_proj.weight", "lm_head.weight"))
class ParametersAreReplacedAfterWrapping(CheckedLoad):
    """A load assigns new parameters to a wrapped model, which goes on with the memory of the old ones."""

    def load(self, file: pathlib.Path) -> None:
        for name, tensor in load_file(file).items():
            place, _, last = name.rpartition(".")
            old = getattr(self.model.get_submodule(place), last)
            if isinstance(old, DTensor):
                new = nn.Parameter(distribute_tensor(tensor, old.device_mesh, old.placements))
                setattr(self.model.get_submodule(place), last, new)


@publish("huggingface/transformers#45662", names=("experts.gate_up_proj", "experts.down_proj"))
class ExpertsOfRankZeroEverywhere(Load):
    """A load broadcasts the part of rank 0 to ranks that hold other experts."""

    experts = 4

    def load(self, file: pathlib.Path) -> None:
        super().load(file)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".experts." in name:
                    dist.broadcast(parameter.to_local(), src=0)
