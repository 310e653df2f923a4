"""A correct job on GPUs: a small transformer with dropout in bfloat16 under FSDP2, saved with DCP.

fsdp-doctor resume --resume '--resume {dir}/checkpoint-{n}' -- \\
    torchrun --nproc-per-node 2 benchmarks/resumed_job.py --directory {dir} --after {n}

The expected verdict is ``same``, exit code 0. With ``--attention flash`` the gradients may differ between two runs of
the same command, and the verdict may also be ``not repeatable``, exit code 3. With ``--forget`` the job resumes without
a part of its state, and the expected verdict is ``wrong``, exit code 1.
"""

from __future__ import annotations

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

_WIDTH, _HEADS, _WORDS, _LENGTH = 512, 8, 1000, 1024


_ATTENTION = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


class Block(nn.Module):
    def __init__(self, attention: SDPBackend) -> None:
        super().__init__()
        self.attention = attention
        self.norm, self.qkv, self.out = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(2, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.attention):
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return torch.add(x, self.mlp(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    parser.add_argument("--after", type=int, required=True)
    parser.add_argument("--resume", type=pathlib.Path)
    parser.add_argument("--attention", choices=list(_ATTENTION), default="math")
    parser.add_argument("--forget", choices=["schedule", "generator", "optimizer"], help="is not loaded in a resume")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    blocks = [Block(_ATTENTION[options.attention]) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(_WORDS, _WIDTH), *blocks, nn.Linear(_WIDTH, _WORDS)).cuda()
    for module in (*blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    data = torch.randint(_WORDS, (100, 8, _LENGTH + 1), generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    first = 0
    if options.resume:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(state, checkpoint_id=options.resume)
        if options.forget == "optimizer":
            set_model_state_dict(model, state["model"])
        else:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        rest = torch.load(options.resume / f"rest-{dist.get_rank()}.pt")
        if options.forget != "schedule":
            schedule.load_state_dict(rest["schedule"])
        torch.set_rng_state(rest["cpu"])
        if options.forget != "generator":
            torch.cuda.set_rng_state(rest["cuda"])
        first = rest["step"]
    for step in range(first, len(data)):
        words = data[step].cuda()
        scores = model(words[:, :-1]).flatten(0, 1).float()
        nn.functional.cross_entropy(scores, words[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % options.after == 0:
            directory = options.directory / f"checkpoint-{step + 1}"
            of_model, of_optimizer = get_state_dict(model, optimizer)
            dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory)
            rest = {"schedule": schedule.state_dict(), "step": step + 1}
            rest |= {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}
            torch.save(rest, directory / f"rest-{dist.get_rank()}.pt")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
