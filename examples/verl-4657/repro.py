"""FSDP1 unshards flat parameters that a manual offload left on the CPU: crash.

Case fsdp1/param/unstaged/weights_info of fsdp-doctor 0.1.0, from its catalogue; torch 2.13.0+cpu,
transformers 5.23.0. References: verl-project/verl#181, verl-project/verl#4657. Each rank prints
PASS or how it fails; the last line is "shown" only if it fails as EXPECTED, with MESSAGE. Exit code
1: it ends otherwise than EXPECTED. It needs 2 accelerators.

    torchrun --nproc-per-node 2 repro.py
"""

import faulthandler
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers import AutoModelForCausalLM, Qwen3Config

EXPECTED = "crash"
MESSAGE = r"Expects tensor to be on the compute device \S+?, was on \S+?"

def read_weights_info(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, tensor in model.state_dict().items():
        yield name, (tensor.size(), tensor.dtype)

def plain():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    return model

def build(model, device):
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("fsdp",))
    is_unit = lambda module: type(module).__name__.endswith("DecoderLayer")
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32, cast_forward_inputs=False
    )
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=CustomPolicy(is_unit), device_id=device, mixed_precision=precision,
        use_orig_params=False, device_mesh=mesh,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def step(model, optimizer, device):
    tokens = torch.randint(0, 256, (2, 16)).to(device)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

@torch.no_grad()
def move_units(model, device):
    _lazy_init(model, model)
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is not None and not handle._offload_params:
            handle.flat_param_to(torch.device(device), non_blocking=False)
            handle.flat_param._local_shard = handle.flat_param.data

def move(model, optimizer, device):
    move_units(model, device)

def cycle(device):
    model, optimizer = build(plain(), device)
    for _ in range(2):
        step(model, optimizer, device)
    move(model, optimizer, "cpu")
    try:
        for name, value in read_weights_info(model):
            pass
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    return "ok", "PASS"

def finish(store, rank, world, kind, why):
    print(f"[rank{rank}] {kind}: {why}\n", end="", flush=True)
    expected = kind == EXPECTED and re.search(MESSAGE, " ".join(why.split()))
    worse = kind in ("crash", "hang") and EXPECTED not in ("crash", "hang")
    store.add("as expected", 1 if expected else -world if worse else 0)
    store.add("ended", 1)
    end = time.monotonic() + (20 if EXPECTED in ("ok", "refused") else 5)  # some may wait for one that raised
    while store.add("ended", 0) < world and time.monotonic() < end:
        time.sleep(0.1)
    as_expected = store.add("as expected", 0) > 0
    if rank == 0:
        print("shown" if as_expected else "not shown", flush=True)
    os._exit(not as_expected)  # past threads that hang

if __name__ == "__main__":
    store, rank, world = next(dist.rendezvous("env://"))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert accelerator and world == 2, "start it on 2 accelerators"
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"])) if accelerator else torch.device("cpu")
    torch.get_device_module(device).set_device(device)
    backend = dist.get_default_backend_for_device(device.type)
    backend = backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world)
    faulthandler.dump_traceback_later(60, exit=True)
    finish(store, rank, world, *cycle(device))
