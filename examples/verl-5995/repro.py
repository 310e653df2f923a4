"""state_dict() crashes after model.to(device) on an FSDP2 model under CPUOffloadPolicy: crash.

Case fsdp2/policy/staged/state_dict of fsdp-doctor 0.1.0, from its catalogue; torch 2.13.0+cpu,
transformers 5.23.0. References: verl-project/verl#5995, verl-project/verl#6188. Each rank prints
PASS or how it fails; the last line is "shown" only if it fails as EXPECTED, with MESSAGE. Exit code
1: it ends otherwise than EXPECTED. It needs 2 accelerators.

    torchrun --nproc-per-node 2 repro.py
"""

import faulthandler
import os
import re
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

EXPECTED = "crash"
MESSAGE = r'Attempted to set the storage of a tensor on device "\S+?" to a storage on different device "\S+?"'

def read_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    return model.state_dict()

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
    how = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    how["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    for module in (*layers, model.get_input_embeddings(), model):
        fully_shard(module, **how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def step(model, optimizer, device):
    tokens = torch.randint(0, 256, (2, 16)).to(device)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def cycle(device):
    model, optimizer = build(plain(), device)
    for _ in range(2):
        step(model, optimizer, device)
    model.to(device)
    try:
        for name, value in read_state_dict(model).items():
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
