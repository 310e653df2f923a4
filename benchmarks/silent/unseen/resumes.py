"""The two unseen programs whose errors only a resumed run shows: ``resumes.py NAME --dir DIR [--mended] [--resume]``.

This file runs as a user's job, outside of this package.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class ResumeTemplateWithoutMoments:
    """A distributed checkpoint loads into the state dict of a fresh optimizer, which asks for no moments."""

    at, last = 3, 6

    def __init__(self, directory: str, mended: bool) -> None:
        self.path, self.mended = os.path.join(directory, "step-3"), mended
        config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)
        self.model: Any = Qwen3ForCausalLM(config)
        shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def save(self) -> None:
        if self.mended:
            state = {
                "model": get_model_state_dict(self.model),
                "optimizer": get_optimizer_state_dict(self.model, self.opt),
            }
        else:
            state = {"model": self.model.state_dict(), "optimizer": self.opt.state_dict()}
        dcp.save(state, checkpoint_id=self.path)

    def load(self) -> None:
        if self.mended:
            state: dict[str, Any] = {
                "model": get_model_state_dict(self.model),
                "optimizer": get_optimizer_state_dict(self.model, self.opt),
            }
            dcp.load(state, checkpoint_id=self.path)
            set_model_state_dict(self.model, state["model"])
            set_optimizer_state_dict(self.model, self.opt, state["optimizer"])
        else:
            state = {"model": self.model.state_dict(), "optimizer": self.opt.state_dict()}
            dcp.load(state, checkpoint_id=self.path)
            self.model.load_state_dict(state["model"])
            self.opt.load_state_dict(state["optimizer"])

    def finish_save(self) -> None:
        """Does nothing: the save has ended."""


class AsyncWorkerAliasedStep:
    """A worker is handed AdamW's step counters as they are, and writes those of a later step."""

    at, last = 2, 5

    def __init__(self, directory: str, mended: bool) -> None:
        self.directory, self.mended = directory, mended
        context = mp.get_context("fork")
        self.queue, self.go = context.JoinableQueue(), context.Event()
        context.Process(target=write, args=(self.queue, self.go), daemon=True).start()
        self.model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
        shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def file(self) -> str:
        return os.path.join(self.directory, f"model_optim_rank_{dist.get_rank()}_of_{dist.get_world_size()}.pt")

    def snapshot(self) -> dict[str, Any]:
        """Stages what lives on the device; host tensors are handed over as they are."""
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        for name, p in self.model.named_parameters():
            state["model"][name] = make_local(p.detach()).clone()
            state["optimizer"][name] = entry = {}
            for key, value in self.opt.state[p].items():
                on_device = value.dim() > 0
                value = make_local(value)
                entry[key] = value.clone() if on_device or self.mended else value
        return state

    def save(self) -> None:
        self.queue.put((self.file(), self.snapshot()))

    def finish_save(self) -> None:
        self.go.set()
        self.queue.join()

    def load(self) -> None:
        """Loads what the worker wrote. The author's program ends before a resume."""
        saved = torch.load(self.file())
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                make_local(p).copy_(saved["model"][name])
                entry = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                for key, value in entry.items():
                    make_local(value).copy_(saved["optimizer"][name][key])
                self.opt.state[p] = {"step": saved["optimizer"][name]["step"].clone(), **entry}


def write(queue: Any, go: Any) -> None:
    """Writes the states in the queue, late as if the storage were slow, until the rank ends."""
    rank = os.getppid()
    while os.getppid() == rank:
        if go.wait(0.2):
            path, state = queue.get()
            torch.save(state, path)
            queue.task_done()
            go.clear()


def make_local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def shard(model: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


JOBS: dict[str, Any] = {each.__name__: each for each in (ResumeTemplateWithoutMoments, AsyncWorkerAliasedStep)}


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("name", choices=JOBS)
    ap.add_argument("--dir", required=True)
    ap.add_argument("--mended", action="store_true")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1 if args.resume else 0)
    job = JOBS[args.name](args.dir, args.mended)
    if args.resume:
        job.load()
    for step in range(job.at + 1 if args.resume else 1, job.last + 1):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, 128, (2, 16), generator=generator)
        job.model(input_ids=ids, labels=ids).loss.backward()
        job.opt.step()
        job.opt.zero_grad()
        if step == job.at:
            job.save()
        if step == job.at + 1 and not args.resume:
            job.finish_save()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
