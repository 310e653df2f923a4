"""Prints the table of docs/plan.md: models of 7 billion to a trillion parameters on 8 to 4,096 ranks, without a GPU.

    python benchmarks/plan_on_paper.py [--ranks 8 64 512 4096] [--model qwen2.5-7b ...]

The jobs use FSDP2 on nodes of eight devices, one sequence of 4,096 tokens, activation checkpointing and AdamW. The
table is in Markdown, and has GiB of the first rank's device at the peak of a step, without an offload and under
CPUOffloadPolicy, and GiB of a node's host.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fsdp_doctor.errors import UsageError
from fsdp_doctor.examination.memory_records import StageMemory
from fsdp_doctor.matrix.axes import Offload, Staging, Strategy
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.plan.job import RoleSetup
from fsdp_doctor.plan.stages import Predictor

MODELS = ("qwen2.5-7b", "qwen3-32b", "llama-3.1-70b", "qwen3-235b-a22b", "llama-3.1-405b", "deepseek-v3", "kimi-k2")
RANKS = (8, 64, 512, 4096)
A_NODE = 8
_GIB = 1 << 30
_HEAD = (
    *("model", "ranks", "step, no offload", "step, policy", "host: pinned", "as it is taken"),
    *("AdamW", "rank 0's full state dict", "with AdamW", "every rank loads bf16"),
)


def trained(predictor: Predictor, ranks: int, offload: Offload) -> StageMemory:
    scenario = Scenario(strategy=Strategy.FSDP2, offload=offload, staging=Staging.UNSTAGED)
    setup = RoleSetup(
        role="model", scenario=scenario, shard_ranks=ranks, sequences=1, length=4096, checkpointing=True, method=""
    )
    return next(memory for memory in predictor.predict_stages(setup) if memory.stage == "trained")


def row(name: str, predictor: Predictor, ranks: int) -> list[str]:
    try:
        plain, policy = trained(predictor, ranks, Offload()), trained(predictor, ranks, Offload.from_flags(policy=True))
    except UsageError as error:
        return [name, f"{ranks:,}", str(error), *[""] * (len(_HEAD) - 3)]
    assert plain.device is not None
    assert policy.device is not None
    host, numel = policy.host, predictor.shape.numel
    numbers = (
        *(plain.device.peak, policy.device.peak, A_NODE * host.pinned, A_NODE * host.pinned_reserved),
        *(A_NODE * host.pageable, 4 * numel, 3 * 4 * numel, A_NODE * 2 * numel),
    )
    return [name, f"{ranks:,}", *(f"{nbytes / _GIB:,.0f}" for nbytes in numbers)]


def rows(models: list[str], ranks: list[int]) -> Iterator[list[str]]:
    for model in models:
        predictor = Predictor(model)
        name = f"{model}, {predictor.shape.numel / 1e9:,.0f} B"
        yield from (row(name, predictor, number) for number in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    options = parser.parse_args()
    print(f"| {' | '.join(_HEAD)} |\n|{'---|' * len(_HEAD)}")
    for cells in rows(options.model, options.ranks):
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
