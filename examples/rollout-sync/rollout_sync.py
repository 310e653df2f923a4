"""An FSDP2 model with CPU offload trains, and streams its weights into a rollout process on the same node at each step.

torchrun --standalone --nproc-per-node=2 rollout_sync.py [--model DIR] [--bucket-mib N] [--steps N]
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
    parser.add_argument("--steps", type=int, default=2, help="training steps, each with a sync after it")
    options = parser.parse_args()

    device = start()
    config = AutoConfig.from_pretrained(options.model) if options.model else Qwen3Config(**SMALL, **HEADS)
    model = sharded(config, options.model, device)

    prompt = torch.randint(config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    worker = start_worker(model, config, device, prompt) if dist.get_rank() == 0 else None
    history: list[fsdp_doctor.Fingerprints] = []
    differ = False
    for step in range(options.steps):
        train_step(model, config.vocab_size, device, step)
        sent = send_weights(model, worker, options.bucket_mib << 20)
        differ |= prove(model, worker, sent, history)
        history.append(sent)
    # Once, from the shards themselves: each step compares with what was sent, which costs no second read of them.
    whole = fsdp_doctor.fingerprint(model, dtype=torch.bfloat16)
    if worker is not None:
        worker.send(None)
        differ |= report(fsdp_doctor.compare_fingerprints(whole, history[-1]), "what was sent, and the shards")

    own = logits(model, prompt.to(device))
    state = fsdp_doctor.full_state_dict(model, dtype=torch.bfloat16)
    dist.destroy_process_group()
    if worker is None:
        return 0
    reference = unsharded(config, device)
    reference.load_state_dict(state)
    return 1 if compare(worker, logits(reference, prompt.to(device)), own) or differ else 0


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


def train_step(model: nn.Module, vocab_size: int, device: torch.device, step: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(vocab_size, (2, 64), generator=generator).to(device)
    model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


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


def send_weights(model: nn.Module, worker: Connection | None, bucket_bytes: int) -> fsdp_doctor.Fingerprints:
    """Every rank gathers, rank 0 sends: handles of the tensors' memory, which lives until they are acknowledged.

    What is sent is summed as it passes.
    """
    began = time.perf_counter()
    bucket: list[tuple[str, torch.Tensor]] = []
    held = total = number = buckets = 0
    sums = fsdp_doctor.FingerprintSums()
    tensors = fsdp_doctor.full_tensors(model, dtype=torch.bfloat16, bucket_bytes=bucket_bytes)
    for name, tensor in sums.watch(tensors) if worker is not None else tensors:
        if worker is None:
            continue
        if bucket and held + tensor.nbytes > bucket_bytes:
            deliver(worker, bucket)
            held, buckets = 0, buckets + 1
        bucket.append((name, tensor))
        held, total, number = held + tensor.nbytes, total + tensor.nbytes, number + 1
    if worker is not None:
        deliver(worker, bucket)
        worker.send([])
        seconds = time.perf_counter() - began
        print(f"sent {number} tensors, {total / 2**20:.1f} MiB, in {buckets + 1} buckets, {seconds:.2f} s")
    return sums.fingerprints()


def prove(
    model: nn.Module,
    worker: Connection | None,
    sent: fsdp_doctor.Fingerprints,
    history: list[fsdp_doctor.Fingerprints],
) -> bool:
    """Whether what the rollout process holds differs from what was sent. Every rank helps to say how it does."""
    held = fsdp_doctor.Fingerprints.from_json(worker.recv()) if worker is not None else sent
    differences = fsdp_doctor.compare_fingerprints(sent, held, history=history)
    names = [[one.name for one in differences if one.kind in ("values", "shape")]]
    dist.broadcast_object_list(names, src=0)
    if names[0]:
        variants = fsdp_doctor.fingerprint_variants(model, names[0], dtype=torch.bfloat16)
        differences = fsdp_doctor.compare_fingerprints(sent, held, history=history, variants=variants)
    return report(differences, f"what was sent, and the {len(held.tensors)} tensors of the rollout process")


def report(differences: list[fsdp_doctor.FingerprintDifference], what: str) -> bool:
    if dist.get_rank() == 0:
        print(f"{what}: {'DIFFERENT' if differences else 'equal'}", *differences, sep="\n  ")
    return bool(differences)


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
    while (bucket := trainer.recv()) is not None:
        if bucket:
            missing -= receive(bucket, targets, device)
            del bucket
            trainer.send("done")
        else:  # the end of a sync
            trainer.send(fsdp_doctor.fingerprint_tensors(targets).to_json())
    trainer.send((sorted(missing), logits(model, prompt.to(device)).numpy()))  # by value: this process ends here


def receive(bucket: list[tuple[str, torch.Tensor]], targets: dict[str, torch.Tensor], device: torch.device) -> set[str]:
    """The bucket's names. When it returns the copies are made."""
    for name, tensor in bucket:
        load(targets, name, tensor)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return {name for name, _ in bucket}


def load(targets: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    targets[name].copy_(tensor)


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
