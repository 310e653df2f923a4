"""Programs that save weights, whole, by rank or in a thread, rightly, and with each published error."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_doctor

from .entries import publish
from .program import Training, Weights, make_whole


class ExpertGroups(Training):
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


class AsyncSave(Training):
    """Saves in a thread while the training goes on, and compares the file with the weights that the save began with."""

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


class Save(Training):
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
