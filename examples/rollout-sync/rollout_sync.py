"""An FSDP2 model with CPU offload trains one step and streams its weights into a rollout process on the same node.

torchrun --standalone --nproc-per-node=2 rollout_sync.py [--model DIR] [--bucket-mib N]
"""

from __future__ import annotations

import argparse
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3Config

import fsdp_doctor

SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; by default a small Qwen3 with random weights")
    parser.add_argument("--bucket-mib", type=int, default=256, help="what is sent at once")
    options = parser.parse_args()

    device = start()
    config = AutoConfig.from_pretrained(options.model) if options.model else Qwen3Config(**SMALL, **HEADS)
    model = sharded(config, options.model, device)
    train_step(model, config.vocab_size, device)

    prompt = torch.randint(config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    worker = start_worker(model, config, device, prompt) if dist.get_rank() == 0 else None
    send_weights(model, worker, options.bucket_mib << 20)

    own = logits(model, prompt.to(device))
    state = fsdp_doctor.full_state_dict(model, dtype=torch.bfloat16)
    dist.destroy_process_group()
    if worker is None:
        return 0
    reference = unsharded(config, device)
    reference.load_state_dict(state)
    return compare(worker, logits(reference, prompt.to(device)), own)


def start() -> torch.device:
    """This rank's device: the accelerator where there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator else "cpu"
    dist.init_process_group(dist.get_default_backend_for_device(kind))
    if kind == "cpu":
        return torch.device("cpu")
    index = dist.get_node_local_rank()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def sharded(config: PretrainedConfig, directory: str | None, device: torch.device) -> nn.Module:
    """In fp32 on the host, the same on each rank, then sharded: the masters stay there, bf16 is computed with."""
    torch.manual_seed(0)
    model: nn.Module
    if directory:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for module in (*model.get_submodule("model.layers").children(), model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return model


def train_step(model: nn.Module, vocab_size: int, device: torch.device) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(vocab_size, (2, 64), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


def unsharded(config: PretrainedConfig, device: torch.device) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(device)


@torch.no_grad()
def logits(model: nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """bf16 as it is computed; fp32, on the host, holds it exactly."""
    found: torch.Tensor = model.eval()(input_ids=prompt, use_cache=False).logits
    return found.float().cpu()


def start_worker(model: nn.Module, config: PretrainedConfig, device: torch.device, prompt: torch.Tensor) -> Connection:
    """The rollout process, once it has the same names, shapes and dtypes as what it is going to get."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=rollout, args=(theirs, config, device, prompt), daemon=True).start()
    theirs.close()  # so that either process sees the end of the other
    ours.send(fsdp_doctor.weights_info(model, dtype=torch.bfloat16))
    if different := ours.recv():
        raise RuntimeError(f"the rollout model has other tensors: {', '.join(different)}")
    return ours


def send_weights(model: nn.Module, worker: Connection | None, bucket_bytes: int) -> None:
    """Every rank gathers, rank 0 sends: handles of the tensors' memory, which lives until they are acknowledged."""
    began = time.perf_counter()
    bucket: list[tuple[str, torch.Tensor]] = []
    held = total = tensors = buckets = 0
    for name, tensor in fsdp_doctor.full_tensors(model, dtype=torch.bfloat16, bucket_bytes=bucket_bytes):
        if worker is None:
            continue
        if bucket and held + tensor.nbytes > bucket_bytes:
            deliver(worker, bucket)
            held, buckets = 0, buckets + 1
        bucket.append((name, tensor))
        held, total, tensors = held + tensor.nbytes, total + tensor.nbytes, tensors + 1
    if worker is not None:
        deliver(worker, bucket)
        worker.send([])
        seconds = time.perf_counter() - began
        print(f"sent {tensors} tensors, {total / 2**20:.1f} MiB, in {buckets + 1} buckets, {seconds:.2f} s")


def deliver(worker: Connection, bucket: list[tuple[str, torch.Tensor]]) -> None:
    worker.send(bucket)
    worker.recv()
    bucket.clear()


def rollout(trainer: Connection, config: PretrainedConfig, device: torch.device, prompt: torch.Tensor) -> None:
    """The other process. Its weights are random first, so that one that does not arrive is noticed."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    model = unsharded(config, device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    targets = model.state_dict()  # the parameters' own memory
    own = {name: fsdp_doctor.WeightInfo(tensor.shape, tensor.dtype) for name, tensor in targets.items()}
    coming = trainer.recv()
    trainer.send(sorted(name for name in own.keys() | coming.keys() if own.get(name) != coming.get(name)))
    missing = set(targets)
    while arrived := receive(trainer, targets, device):
        missing -= arrived
        trainer.send("done")
    trainer.send((sorted(missing), logits(model, prompt.to(device)).numpy()))  # by value: this process ends here


def receive(trainer: Connection, targets: dict[str, torch.Tensor], device: torch.device) -> set[str]:
    """One bucket's names. When it returns the copies are made, and nothing here refers to the trainer's memory."""
    bucket = trainer.recv()
    for name, tensor in bucket:
        targets[name].copy_(tensor)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return {name for name, _ in bucket}


def compare(worker: Connection, expected: torch.Tensor, own: torch.Tensor) -> int:
    missing, array = worker.recv()
    found = torch.from_numpy(array)
    if missing:
        print(f"never arrived: {', '.join(missing)}")
    away = (found - own).abs().max()
    equal = torch.equal(found, expected)
    print(f"logits of the rollout process and of the unsharded weights: {'equal' if equal else 'DIFFERENT'}")
    print(f"largest difference to the sharded model's own forward: {away:.3g}")
    return 1 if missing or not equal else 0


if __name__ == "__main__":
    raise SystemExit(main())
