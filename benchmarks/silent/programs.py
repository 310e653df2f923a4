"""Programs that send, save and load weights on two ranks, rightly, and with each published error.

A base class is a program as a user writes it, with the call of fsdp-doctor that the documentation names for it. A
published error is that program with one function replaced; a clean program is a base class, or one with other settings.
"""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Iterable
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_doctor

from .entries import publish

Weights = Iterable[tuple[str, torch.Tensor]]


class Experts(nn.Module):
    """Experts in one tensor for each of their matrices."""

    def __init__(self, number: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(number, 2 * inner, width) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(number, width, inner) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("bd,eid->ebi", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebi,edi->bd", torch.nn.functional.silu(gate) * up, self.down_proj)


class Block(nn.Module):
    score_bias: torch.Tensor

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.register_buffer("score_bias", torch.zeros(width))
        self.experts = Experts(experts, width, inner) if experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.k_proj(torch.tanh(self.q_proj(self.norm(x)))) + self.score_bias.to(x.dtype)
        if self.experts is not None:
            x = x + self.experts(x)
        if self.training:  # as a router counts its tokens
            self.score_bias.add_(0.125)
        out: torch.Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return x + out


class Net(nn.Module):
    def __init__(self, width: int, inner: int, vocabulary: int, experts: int, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, inner, experts) for _ in range(2))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


def make_whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


class Program:
    """A sharded model that is trained, and a directory of its own."""

    width, inner, vocabulary = 16, 24, 33
    experts = 0
    tied = False
    dtype = torch.float32
    lora = False
    precision: torch.dtype | None = None
    reshard = True

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory, self.rank = directory, dist.get_rank()
        self.findings: list[str] = []
        self.model = self.make_model(0)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)

    def make_net(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return Net(self.width, self.inner, self.vocabulary, self.experts, self.tied).to(self.dtype)

    def make_model(self, seed: int) -> Any:
        net = self.make_net(seed)
        model: Any = self.add_adapters(net) if self.lora else net
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self.precision)
        for layer in net.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)
        return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)

    def add_adapters(self, net: Any) -> Any:
        return peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"]))

    def train(self) -> None:
        tokens = torch.arange(8).add(self.rank) % 33
        self.model(tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self, findings: Iterable[object]) -> None:
        self.findings += map(str, findings)

    def commands(self) -> list[list[str]]:
        """The commands of ours to run when the program has ended."""
        return []

    def run(self) -> None:
        raise NotImplementedError


class Sync(Program):
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
    """Sends to an engine that has the gate and the projection up in one tensor for each of two ranks."""

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


class Load(Program):
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
        """Does nothing in a job that loads first."""

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
    """Loads after a first forward, and asks examine before the next one."""

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


class ExpertGroups(Program):
    """Divides experts among the ranks, shards the rest, and compares fingerprints of what a save would write."""

    command = "fingerprints"
    experts = 4

    def make_model(self, seed: int) -> Any:
        net = self.make_net(seed)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        for layer in net.layers:
            self.divide(layer.experts)
        ignored = {p for layer in net.layers for p in layer.experts.parameters()}
        return fully_shard(net, mesh=self.mesh, ignored_params=ignored)

    def divide(self, experts: Any) -> None:
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.detach().chunk(2)[self.rank].clone()))

    def run(self) -> None:
        self.train()
        trained = fsdp_doctor.fingerprint(self.model, experts=self.mesh["ep"])
        self.report(fsdp_doctor.compare_fingerprints(trained, fsdp_doctor.fingerprint_tensors(dict(self.collect()))))

    def collect(self) -> Weights:
        return fsdp_doctor.full_tensors(self.model, experts=self.mesh["ep"])


@publish("modelscope/twinkle#116", "modelscope/twinkle#116", names=("experts.gate_up_proj", "experts.down_proj"))
class ExpertsOfOneGroupAreSaved(ExpertGroups):
    """A save gathers a tensor's own mesh, and so has the experts of rank 0."""

    def collect(self) -> Weights:
        for name, tensor in self.model.state_dict().items():
            yield name, make_whole(tensor)


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


class Guarded(Program):
    """Wraps what must not change a weight into ``unchanged``."""

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


class AsyncSave(Program):
    """Saves in a thread while the training goes on, and compares the file with the weights of the save."""

    command = "fingerprints"

    def run(self) -> None:
        self.train()
        saved = fsdp_doctor.fingerprint(self.model)
        go = threading.Event()
        staged = self.stage()

        def write() -> None:
            go.wait()
            torch.save(staged, self.directory / f"model_world_size_2_rank_{self.rank}.pt")

        thread = threading.Thread(target=write)
        thread.start()
        self.train()
        go.set()
        thread.join()
        dist.barrier()
        self.report(fsdp_doctor.compare_fingerprints(saved, fsdp_doctor.fingerprint_checkpoint(self.directory)))

    def stage(self) -> dict[str, Any]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


@publish("pytorch/pytorch#144657", "pytorch/pytorch#145408", names=("q_proj.weight",))
class StagedCopyIsNoCopy(AsyncSave):
    """An asynchronous save of weights on the CPU stages what the next step writes to."""

    def stage(self) -> dict[str, Any]:
        return {name: tensor.to("cpu") for name, tensor in self.model.state_dict().items()}


class Save(Program):
    """Saves a distributed checkpoint, and exports it; the export must be the checkpoint."""

    command = "checkpoint verify"
    against = True

    def run(self) -> None:
        for _ in range(2):
            self.train()
        state = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        if self.against:
            dcp.save({"model": state}, checkpoint_id=self.directory / "checkpoint")
        (self.directory / "export").mkdir(exist_ok=True)
        dist.barrier()
        self.export(state)
        dist.barrier()

    def export(self, state: dict[str, Any]) -> None:
        full = {name: make_whole(tensor).contiguous() for name, tensor in state.items()}
        if self.rank == 0:
            self.write(full)

    def write(self, full: dict[str, torch.Tensor]) -> None:
        save_file(full, self.directory / "export" / "model.safetensors")

    def commands(self) -> list[list[str]]:
        against = ["--against", str(self.directory / "checkpoint")] if self.against else []
        return [["checkpoint", "verify", str(self.directory / "export"), *against]]


@publish("verl-project/verl#7610", "verl-project/verl#7610", names=("score_bias",))
class MergeJoinsReplicatedBuffers(Save):
    """A merger joins the copies of a buffer that every rank has."""

    def export(self, state: dict[str, Any]) -> None:
        full = {}
        for name, tensor in state.items():
            if isinstance(tensor, DTensor):
                full[name] = tensor.full_tensor()
            else:
                parts = [torch.empty_like(tensor) for _ in range(2)]
                dist.all_gather(parts, tensor)
                full[name] = torch.cat(parts)
        if self.rank == 0:
            self.write(full)


@publish("ByteDance-Seed/VeOmni#1190", "ByteDance-Seed/VeOmni#1190", names=("lm_head.weight",))
class SecondNameHasOneShard(Save):
    """A parameter with two names is saved whole under the first, and as the shard of one rank under the second."""

    tied = True

    def write(self, full: dict[str, torch.Tensor]) -> None:
        head = full["lm_head.weight"]
        super().write({**full, "lm_head.weight": head[: (len(head) + 1) // 2].contiguous()})


@publish("verl-project/verl#7285", names=("down_proj.weight",))
class MergeWritesTheBase(Save):
    """A merger leaves the adapters out: what it writes is the base model."""

    against = False

    def write(self, full: dict[str, torch.Tensor]) -> None:
        base = {name: tensor.contiguous() for name, tensor in self.make_net(0).state_dict().items()}
        (self.directory / "base").mkdir()
        save_file(base, self.directory / "base" / "model.safetensors")
        super().write(base)

    def commands(self) -> list[list[str]]:
        return [["checkpoint", "verify", str(self.directory / "export"), "--base", str(self.directory / "base")]]


@publish("pytorch/torchtitan#2622", names=("_orig_mod",))
class NamesOfCompiledModules(Save):
    """Names in the checkpoint have the prefix of compiled modules."""

    against = False

    def write(self, full: dict[str, torch.Tensor]) -> None:
        super().write({name.replace("layers.0.", "layers.0._orig_mod."): tensor for name, tensor in full.items()})


class SaveAdapter(Save):
    """Saves the adapters alone, beside the state of the training, as Trainer does."""

    lora, against = True, False

    def export(self, state: dict[str, Any]) -> None:
        full = {name: make_whole(tensor) for name, tensor in state.items() if "lora_" in name}
        if self.rank == 0:
            config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj", "down_proj"]}
            (self.directory / "export" / "adapter_config.json").write_text(json.dumps(config))
            (self.directory / "export" / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
            self.write({name.replace(".default", ""): tensor.contiguous() for name, tensor in full.items()})

    def write(self, full: dict[str, torch.Tensor]) -> None:
        save_file(full, self.directory / "export" / "adapter_model.safetensors")


@publish("huggingface/accelerate#4206", "huggingface/accelerate#4206", names=("one rank's shards",))
class AdapterOfRankZero(SaveAdapter):
    """The adapter's file has the rows of rank 0 as a DTensor, and no others."""

    def export(self, state: dict[str, Any]) -> None:
        if self.rank == 0:
            adapter = {name.replace(".default", ""): tensor for name, tensor in state.items() if "lora_" in name}
            torch.save(adapter, self.directory / "export" / "adapter_model.bin")


@publish("axolotl-ai-cloud/axolotl#3772", names=("lora_B",))
class AdapterHasTheRowsOfOneRank(SaveAdapter):
    """The file has one rank's rows of each lora_B, and zeros instead of the others."""

    width, inner = 256, 512

    def write(self, full: dict[str, torch.Tensor]) -> None:
        for name, tensor in full.items():
            if "lora_B" in name:
                tensor[len(tensor) // 2 :] = 0
        super().write(full)


@publish("MakazhanAlpamys/Soup#335", names=("lora_B",))
class AdapterNeverTrained(SaveAdapter):
    """Every lora_B in the file is zero."""

    def write(self, full: dict[str, torch.Tensor]) -> None:
        super().write({name: torch.zeros_like(t) if "lora_B" in name else t for name, t in full.items()})


class SaveExperts(Save):
    """Exports a model with a module for each expert, beside its configuration."""

    against = False
    experts = 4
    saved_experts = 4

    def write(self, full: dict[str, torch.Tensor]) -> None:
        written = {}
        for name, tensor in full.items():
            if ".experts." not in name:
                written[name] = tensor
                continue
            for number in range(self.saved_experts):
                if "gate_up" in name:
                    gate, up = tensor[number].chunk(2)
                    written[name.replace("experts.gate_up_proj", f"experts.{number}.gate_proj.weight")] = gate
                    written[name.replace("experts.gate_up_proj", f"experts.{number}.up_proj.weight")] = up
                else:
                    written[name.replace("experts.down_proj", f"experts.{number}.down_proj.weight")] = tensor[number]
        (self.directory / "export" / "config.json").write_text(json.dumps({"num_experts": 4, "num_hidden_layers": 2}))
        super().write({name: tensor.contiguous().clone() for name, tensor in written.items()})


@publish("KempnerInstitute/KempnerForge#202", names=("experts",))
class ExpertsAreNumberedAnew(SaveExperts):
    """Each group numbers its experts from 0, and the file has those of one group."""

    saved_experts = 2


class DictionaryOfOptions(Save):
    """Exports with torch's get_model_state_dict."""

    def export(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full: dict[str, Any] = dict(get_model_state_dict(self.model, options=options))
        if self.rank == 0:
            self.write({name: tensor.contiguous() for name, tensor in full.items()})
