"""Measures the host time of one call of full_tensors, for a model with the shape of Qwen3-4B (398 tensors).

torchrun --nproc-per-node 2 benchmarks/host_time.py [--device cuda] [--hidden 2560]

The rows are the plan, new and kept, 11 exchanges of the ranks over the store, and whole calls with a new and with a
kept plan. With ``--profile``, the functions that take the most time of one call are printed, too. Times are medians
of rank 0 in milliseconds; processor times do not include waiting.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pathlib
import pstats
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from fsdp_doctor import full_tensors
from fsdp_doctor.weights.extract import plan
from fsdp_doctor.weights.extract.plan import Arguments, get_plan
from fsdp_doctor.weights.transport.agreement import Agreement, ComparedPlan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=80)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--profile", type=int, default=0, help="so many functions of one call")
    options = parser.parse_args()
    if options.device != "cpu":
        torch.get_device_module(options.device).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    model = sharded(options.device, options.hidden)
    arguments = Arguments.check()
    ranks = tuple(range(dist.get_world_size()))

    def anew() -> None:
        plan._kept.pop(model, None)
        get_plan(model, arguments)

    def conversations() -> None:
        agreement = Agreement(ranks)
        agreement.expect(lambda: ComparedPlan(["benchmark"]))
        for _ in range(10):
            agreement.promise(1000, one_only=True)
        agreement.finish()

    def call() -> None:
        for _ in full_tensors(model):
            pass

    def call_anew() -> None:
        plan._kept.pop(model, None)
        call()

    rows = {
        "plan made anew": medians(anew, options),
        "plan kept": medians(lambda: get_plan(model, arguments), options),
        "11 conversations": medians(conversations, options),
        "call, plan made anew": medians(call_anew, options),
        "call, plan kept": medians(call, options),
    }
    profile = cProfile.Profile()
    dist.barrier()
    profile.runcall(call)
    dist.barrier()
    if dist.get_rank() == 0:
        buckets = get_plan(model, arguments)[0].buckets
        print(f"{len(list(model.named_parameters()))} tensors, {len(buckets)} buckets, {dist.get_world_size()} ranks")
        for name, (wall, processor) in rows.items():
            print(f"{name:22} {wall:8.2f} ms   processor {processor:8.2f} ms")
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
    dist.destroy_process_group()


def sharded(device: str, hidden: int) -> transformers.PreTrainedModel:
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=hidden * 19 // 5,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=hidden // 20 or 1,
        vocab_size=151936 if hidden > 1000 else 256,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    model.tie_weights()
    return model


def medians(run: Callable[[], object], options: argparse.Namespace) -> tuple[float, float]:
    """Returns (milliseconds of the clock, milliseconds of the processor).

    The first run, which warms up, does not count.
    """
    walls, processors = [], []
    for _ in range(options.repeat + 1):
        dist.barrier()
        start, used = time.perf_counter(), time.thread_time()
        run()
        processors.append(time.thread_time() - used)
        if options.device != "cpu":
            torch.get_device_module(options.device).synchronize()
        walls.append(time.perf_counter() - start)
    return statistics.median(walls[1:]) * 1e3, statistics.median(processors[1:]) * 1e3


if __name__ == "__main__":
    main()
