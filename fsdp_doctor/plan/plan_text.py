"""Renders a plan as text and as a JSON file of memory ledgers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fsdp_doctor.examination.memory_records import MemoryFile, format_memory_file
from fsdp_doctor.examination.memory_views import render_memory_table
from fsdp_doctor.machine.terminal import wrap_all
from fsdp_doctor.plan.job import BF16, RoleSetup
from fsdp_doctor.plan.job_plan import (
    ASLEEP_BYTES,
    CONTEXT_BYTES,
    NCCL_BYTES,
    PROCESS_BYTES,
    Advice,
    JobMoment,
    JobPlan,
    RolePlan,
)
from fsdp_doctor.text import format_count

_GIB = 1 << 30

ASSUMPTIONS = (
    "the FSDP units are the decoder layers, the input embedding if it is not tied, and the root with the rest",
    "float32 shards unless configured otherwise, bfloat16 computation, gradients reduced in float32; AdamW over lists "
    "of tensors, two moments",
    "attention by a fused kernel, if the model can have one; the loss as transformers has it: logits of all tokens "
    "cast to float32, their log-softmax, and the gradients of both",
    "a critic has a head of one output for each token instead of the vocabulary's head",
    "while a model is built, it is moved to the device unsharded, unit by unit, as fully_shard and FSDP1 do with a "
    "model on the host",
    f"outside torch's allocator, each process has {CONTEXT_BYTES / _GIB:.2f} GiB of CUDA context and "
    f"{NCCL_BYTES / _GIB:.2f} GiB of NCCL's buffers; a sleeping engine keeps {ASLEEP_BYTES / _GIB:.2f} GiB; a "
    f"process takes {PROCESS_BYTES / _GIB:g} GiB of the host",
    (
        "only bytes of tensors are counted, without the additional memory that the caching allocator reserves "
        "because of fragmentation"
    ),
)
NOT_MODELLED = (
    "tensor, pipeline, context and expert parallelism of the trainer; adapters, quantized weights, torch.compile; "
    "fused losses and offloaded activations, which take less",
    (
        "TRL's value head in addition to the vocabulary's head, which verl uses if transformers has no token "
        "classification"
    ),
    (
        "the computation of an image tower, and the tokens of images: the tower's parameters, gradients and "
        "moments are in the plan"
    ),
    (
        "kernels for linear attention and state spaces, which take less memory than transformers' computation "
        "without such kernels"
    ),
    "an engine's own peak, which is within the engine's share",
    "tokens that are padded or distributed unevenly among the ranks",
)


def render_plan_text(plan: JobPlan, advices: Sequence[Advice], width: int) -> str:
    """Renders the plan as text, with the verdict first.

    width: the width of the text in characters.
    """
    return wrap_all(_render_lines(plan, advices, width), width).rstrip() + "\n"


def render_plan_json(plan: JobPlan) -> str:
    """Renders the ledgers of the first and the last rank in the JSON format of measured ledgers."""
    machines = plan.job.machines
    memories = [led for role in plan.roles for led in (*role.first, *(role.last if role.last != role.first else ()))]
    return format_memory_file(
        MemoryFile(
            origin="predicted",
            command="fsdp-doctor " + " ".join(sys.argv[1:]),
            device=f"{machines.ranks} x {_format_gib(machines.gpu_memory)} GiB",
            ledgers=tuple(memories),
            notes=(*ASSUMPTIONS, *(f"not modelled: {sentence}" for sentence in NOT_MODELLED)),
        )
    )


def _render_lines(plan: JobPlan, advices: Sequence[Advice], width: int) -> Iterator[str]:
    job, machines = plan.job, plan.job.machines
    yield from _describe_verdict(plan, advices)
    devices = f"{format_count(machines.gpus, 'device')} of {_format_gib(machines.gpu_memory)} GiB"
    yield ""
    yield f"{job.framework}: {format_count(machines.nodes, 'node')} with {devices}"
    for role in plan.roles:
        setup = role.setup
        yield f"  {setup.role}: {setup.model}, {role.numel / 1e9:.2f} billion parameters; {_describe_role(setup)}"
    if job.engine:
        engine, share = job.engine, job.engine.utilization * machines.gpu_memory
        where = ", on separate devices" if engine.is_apart else ""
        awake = "" if engine.sleeps or engine.is_apart else ", awake while the trainer works"
        yield (
            f"  engine{where}: {engine.utilization:g} of a device, {_format_gib(share)} GiB; tensor parallel in "
            f"{engine.tensor_parallel}, a bucket of {engine.bucket_bytes >> 20} MiB{awake}"
        )
    yield from _list_sentences(job.unread)
    yield ""
    for role in plan.roles:
        offloads = bool(role.setup.scenario.offload)
        shown = [memory for memory in role.first if offloads or memory.stage not in ("offloaded", "offloaded again")]
        yield render_memory_table(shown, width).rstrip()
        yield _describe_last_rank(role)
    yield "What shares a device at once, GiB:"
    for moment in plan.moments:
        yield from _describe_moment(moment, "does not fit", f" of {_format_gib(machines.gpu_memory)}")
    limit = f", of {_format_gib(machines.host_memory)}:" if machines.host_memory else ":"
    yield ""
    yield f"What a node's host holds, GiB{limit}"
    for moment in plan.host:
        if moment.is_certain:
            yield from _describe_moment(moment, "does not fit")
    yield "Additional memory, if the job loads or saves in this way (the configuration does not say):"
    for moment in plan.host:
        if not moment.is_certain:
            yield from _describe_moment(moment, "would not fit")
    yield from ("", "Assumed:", *_list_sentences(ASSUMPTIONS), "Not modelled:", *_list_sentences(NOT_MODELLED))


def _describe_last_rank(role: RolePlan) -> str:
    """Returns a sentence on the memory of the last rank, since the table shows only the first rank."""
    rank = role.last[-1].rank
    first, last = (
        next(memory.peak for memory in memories if memory.stage == "trained") for memories in (role.first, role.last)
    )
    if rank and first - last >= _GIB // 100:
        return (
            f" The figures are for rank 0 of a shard group; rank {rank} has {_format_gib(first - last)} GiB less "
            "at the peak of a step.\n\n"
        )
    return " Every rank of a shard group holds the same amount.\n\n" if rank else ""


def _describe_role(setup: RoleSetup) -> str:
    shards = f"in {setup.shard_ranks} shard(s)" + (f", {setup.replicas} replicas" if setup.replicas > 1 else "")
    shards += ", bfloat16" if setup.dtypes.master == BF16 else ""
    batch = f"{setup.sequences} x {setup.length} tokens at once"
    kept = ", activation checkpointing" if setup.checkpointing and setup.trains else ""
    extracted = f"; taken out by {setup.method}" if setup.method else ""
    return f"{setup.scenario.strategy}, offload {setup.scenario.offload}, {shards}; {batch}{kept}{extracted}"


def _describe_moment(moment: JobMoment, too_much: str, of_limit: str = "") -> Iterator[str]:
    mark = "" if moment.fits else f"  {too_much}"
    yield f"  {_format_gib(moment.total):>8}{of_limit}  {moment.name}{mark}"
    yield f"{'':12}{', '.join(f'{name} {_format_gib(nbytes)}' for name, nbytes in moment.parts.items())}"


def _describe_verdict(plan: JobPlan, advices: Sequence[Advice]) -> Iterator[str]:
    """Yields the lines of the verdict: whether the job fits, then the settings to change if it does not."""
    limit = plan.job.machines.gpu_memory
    room = limit - plan.highest.total
    left = f"{_format_gib(room)} GiB are left" if room >= 0 else f"{_format_gib(-room)} GiB are missing"
    device = f"{plan.highest.name} takes {_format_gib(plan.highest.total)} of {_format_gib(limit)} GiB; {left}."
    if plan.fits:
        yield f"The job fits: {device}"
        return
    if not plan.highest.fits:
        yield f"The job does not fit: {device}"
    if not (host := plan.highest_of_host).fits:
        yield f"The job does not fit on the host: {host.name} takes {_format_gib(host.total)} GiB of it."
    enough = any(advice.plan.fits for advice in advices)
    yield (
        "Each of these settings alone makes the job fit:"
        if enough
        else ("No single setting makes the job fit; the nearest are:")
    )
    # Of several values of one setting the first is nearest to the configured one.
    first: dict[str, Advice] = {}
    for advice in advices:
        first.setdefault(advice.name, advice)
    for advice in first.values():
        name, nbytes = advice.highest
        yield f"  {advice.setting}: then {_format_gib(nbytes)} GiB in {name}; its cost: {advice.cost}"


def _format_gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:,.1f}" if nbytes >= _GIB / 10 or not nbytes else f"{nbytes / _GIB:,.3f}"


def _list_sentences(sentences: Sequence[str]) -> Iterator[str]:
    return (f"  - {sentence}" for sentence in sentences)
