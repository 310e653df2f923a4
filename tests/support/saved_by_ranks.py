"""Saves a sharded Llama and its optimizer in every format that ranks write. Run on two ranks, with a directory."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard, init_from_local_shards
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=513,
    hidden_size=66,
    intermediate_size=97,
    num_hidden_layers=3,
    num_attention_heads=3,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Trains a step, so that the optimizer has state. A norm's 66 rows and a width of 97 divide unevenly."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(512)[None], labels=torch.arange(512)[None]).loss.backward()
    optimizer.step()
    return model, optimizer


def save_as_verl(state: dict[str, Any], optimizer: Any, directory: pathlib.Path, rank: int) -> None:
    """Saves the files of verl's FSDPCheckpointManager and of SkyRL's strategy."""
    (directory / "huggingface").mkdir(parents=True, exist_ok=True)
    extra = {"lr_scheduler": {"last_epoch": 1, "_step_count": 2}, "rng": {"cpu": torch.get_rng_state()}}
    for kind, value in (("model", state), ("optim", optimizer.state_dict()), ("extra_state", extra)):
        torch.save(value, directory / f"{kind}_world_size_2_rank_{rank}.pt")
    CONFIG.save_pretrained(directory / "huggingface")
    (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))


def main(directory: pathlib.Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = trained()
    save_as_verl(model.state_dict(), optimizer, directory / "verl", rank)
    weights, of_optimizer = get_state_dict(model, optimizer)
    nested = {"model": weights, "optim": of_optimizer, "step": 1}
    dcp.save(nested, checkpoint_id=directory / "dcp")
    dcp.async_save(nested, checkpoint_id=directory / "async").result()
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    counters = {"train_state": {"step": torch.tensor(1), "ntokens_seen": torch.tensor(512)}}
    dcp.save(weights | flat | counters, checkpoint_id=directory / "torchtitan" / "step-1")
    for name, options in (("threads", {"thread_count": 2}), ("files", {"single_file_per_rank": False})):
        dcp.save(nested, storage_writer=dcp.FileSystemWriter(directory / name, **options))
    dcp.save(nested, storage_writer=dcp.FileSystemWriter(directory / "alone"), use_collectives=False)
    # The format of accelerate's SHARDED_STATE_DICT
    for name, key, state in (("pytorch_model_fsdp_0", "model", weights), ("optimizer_0", "optimizer", of_optimizer)):
        dcp.save({key: state}, checkpoint_id=directory / "accelerate" / name)
    as_safetensors = dcp.FileSystemWriter(
        directory / "dcp_safetensors", serialization_format=SerializationFormat.SAFETENSORS
    )
    dcp.save(weights, storage_writer=as_safetensors)
    dcp.save(weights, storage_writer=HuggingFaceStorageWriter(str(directory / "shards"), save_distributed=True))
    consolidated = HuggingFaceStorageWriter(
        str(directory / "consolidated"), save_distributed=True, enable_consolidation=True
    )
    dcp.save(weights, storage_writer=consolidated)
    CONFIG.save_pretrained(directory / "consolidated")
    save_unusual(weights, directory, rank)
    dist.barrier()
    dist.destroy_process_group()


def save_unusual(weights: dict[str, Any], directory: pathlib.Path, rank: int) -> None:
    """Saves columns of each rank, replicas, a one-row matrix, FSDP1's ShardedTensor, and names without world size."""
    mesh, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "fsdp"))
    torch.manual_seed(1)
    matrix, small = torch.randn(40, 51), torch.randn(1, 7)
    placed = {"columns": distribute_tensor(matrix, mesh, [Shard(1)]), "row": distribute_tensor(small, mesh, [Shard(0)])}
    dcp.save(placed, checkpoint_id=directory / "columns")
    replicas = fully_shard(torch.nn.Linear(7, 5), mesh=grid).state_dict()
    for name in ("item", "hsdp", "sharded_tensor", "buffers"):
        (directory / name).mkdir(exist_ok=True)
    torch.save(placed, directory / "item" / f"weights_{rank}.pt")
    torch.save(replicas, directory / "hsdp" / f"model_world_size_2_rank_{rank}.pt")
    statistics = {"running_mean": torch.full((3,), float(rank)), **{k: v for k, v in placed.items() if k == "row"}}
    torch.save(statistics, directory / "buffers" / f"model_world_size_2_rank_{rank}.pt")
    rows = torch.randn(5 - rank, 8)
    sharded = init_from_local_shards([LocalShard.from_tensor_and_offsets(rows, [5 * rank, 0], rank)], 9, 8)
    torch.save({"w": sharded}, directory / "sharded_tensor" / f"model_world_size_2_rank_{rank}.pt")
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in weights.items()}
    if rank == 0:
        (directory / "whole").mkdir()
        torch.save(whole, directory / "whole" / "pytorch_model_fsdp.bin")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
