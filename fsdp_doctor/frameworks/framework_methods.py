"""The steps of each kind of method over a framework's session: prepare, extract, roll back, save and resume.

Each kind trains the session, examines it between two steps, and records what is wrong. After a load the weights, every
value of the optimizer and the next two steps must be those of the run that was not interrupted.
"""

from __future__ import annotations

import copy
import itertools
import pathlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from typing_extensions import assert_never

from fsdp_doctor.case import local_pieces, reference, yielded
from fsdp_doctor.case.extraction import ExtractionCheck
from fsdp_doctor.case.findings import Findings, compare, join_first_names
from fsdp_doctor.case.loaded_state import count_optimized, find_optimizer_problems, read_options
from fsdp_doctor.case.local_pieces import Full, LocalPiece
from fsdp_doctor.case.lora_reference import compute_merged_weights
from fsdp_doctor.case.reference import Reference
from fsdp_doctor.case.training_state import StepOutcome, digest_outcome, find_differences, use_deterministic_algorithms
from fsdp_doctor.frameworks.adapter import STEPS_BEFORE, FrameworkSession, SavedFiles
from fsdp_doctor.frameworks.framework_run import FrameworkRun, MethodSteps
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMethodKind
from fsdp_doctor.weights.fsdp import private

_STEPS_AFTER = 2
_ORDINAL = ("next", "second")
_PATTERNS = ("*.bin", "*.pt", "*.pth")


def choose_steps(kind: FrameworkMethodKind) -> MethodSteps:
    match kind:
        case "prepare":
            return MethodSteps(train=_prepare, takes_kept=False)
        case "extraction":
            return MethodSteps(train=_extract)
        case "rollback":
            return MethodSteps(train=_roll_back)
        case "resume":
            return MethodSteps(train=_resume, weights="other", takes_kept=False)
        case _:
            assert_never(kind)


def _prepare(run: FrameworkRun, session: FrameworkSession, kept: bool) -> None:
    """Wraps and trains one step, which is a part of building: a step that fails is a crash of it."""
    before = Reference()

    def act_at(number: int) -> None:
        nonlocal before
        run.recorder.enter("reference")
        now = reference.take(session.model, None, run.runtime)
        run.recorder.enter("verify")
        if number == 0:
            before = now
            _check_wrapped(run, session)
            run.recorder.enter("build")
        else:
            _check_training(run, session, before, now)

    run.train(session, 1, act_at)


def _compare_pieces(
    session: FrameworkSession, expected: Full, of: str, whose: str
) -> tuple[list[LocalPiece], Findings]:
    """Compares each piece of the model on this rank with the expected tensor of its name."""
    findings = Findings()
    pieces = local_pieces.list_model_pieces(session.model, expected)
    for piece in pieces:
        if piece.expected is None:
            findings.note("incomplete", f"not a name of {of}", piece.name)
        elif difference := compare(piece.held.cpu(), piece.expected):
            findings.note("wrong", f"not {whose}: {difference}", piece.name)
    return pieces, findings


def _check_wrapped(run: FrameworkRun, session: FrameworkSession) -> None:
    """Checks that the wrapped model has the plain model's names and weights, where they were asked for."""
    plain = session.plain.build_module().state_dict()
    pieces, findings = _compare_pieces(session, plain, "the plain model", "the plain model's")
    for piece in pieces:
        promised = session.shards_on if isinstance(piece.shown, nn.Parameter) else None
        if promised is not None and piece.held.device != promised:
            findings.note("misplaced", f"on {piece.held.device} where {promised} was asked for", piece.name)
    names = {name for piece in pieces for name in piece.names}
    for name in sorted(plain.keys() - names):
        findings.note("incomplete", "of the plain model, not in the wrapped one", name)
    run.recorder.add(problems=findings.list_problems(), num_tensors=len(pieces))


def _check_training(run: FrameworkRun, session: FrameworkSession, before: Reference, now: Reference) -> None:
    """Checks that a step changed every parameter that trains, on some rank at least, and nothing else."""
    trains = {name for name, parameter in session.plain.build_module().named_parameters() if parameter.requires_grad}
    findings = Findings()
    for name, values in now.full.items():
        changed = bool(compare(values, before.full[name]))
        is_tied = any(now.full[other] is now.full[name] for other in trains)
        if name in trains and not changed:
            findings.note("poisoned", "a training step did not change", name)
        elif name not in trains and changed and not is_tied:
            findings.note("poisoned", "a training step changed what is frozen", name)
    run.recorder.add(problems=findings.list_problems())
    optimized, total = count_optimized(session.optimizer, session.model)
    if trains and not optimized:
        run.recorder.note("poisoned", f"the optimizer holds {optimized} of the model's {total} parameters")


def _extract(run: FrameworkRun, session: FrameworkSession, kept: bool) -> None:
    """Takes a reference, offloads, runs the method, and trains the next step."""
    first = 0 if kept else STEPS_BEFORE

    def act_at(number: int) -> None:
        if number == first:
            _check_extraction(run, session)
        elif number > first:
            run.runtime.synchronize()

    run.train(session, first + 1, act_at)


def _check_extraction(run: FrameworkRun, session: FrameworkSession) -> None:
    recorder, model = run.recorder, session.model
    recorder.enter("reference")
    truth = reference.take(model, None, run.runtime)
    recorder.enter("offload")
    session.offload()
    check = ExtractionCheck(recorder, run.runtime, model, session.optimizer, truth)
    expected = yielded.ExpectedYield(
        contract=run.case.definition.contract,
        reference=truth,
        rank=run.runtime.rank,
        compute_device=run.runtime.device,
        compute_dtype=torch.bfloat16,
        parameter_devices=yielded.read_parameter_devices(model),
        shard_group_of_one=run.runtime.world_size == 1,
        merged_weights=compute_merged_weights(model, truth.full),
    )
    check.run(lambda: _iterate_entries(run, session), expected, live_tensors=_list_tensor_ids(session))
    run.agree_or_stop()
    recorder.enter("next step")
    session.onload()
    check.check_weights("the next training step would start from other weights")


def _iterate_entries(run: FrameworkRun, session: FrameworkSession) -> Iterator[tuple[str, Any]]:
    """Calls the method; of files, every rank reads all, once every rank has written its own."""
    result = session.list_extractions()[run.case.method](run.directory)
    if not isinstance(result, SavedFiles):
        return yielded.iterate_entries(result)
    dist.barrier(group=run.runtime.control)
    return _read_weights(result)


def _read_weights(saved: SavedFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor in the files, on the CPU, under its name in the plain model."""
    for name, value in _read_files(saved):
        renamed = saved.renamed(name)
        if renamed is not None and isinstance(value, torch.Tensor):
            yield renamed, value


def _read_files(saved: SavedFiles) -> Iterator[tuple[str, Any]]:
    match saved.format:
        case "safetensors":
            from safetensors.torch import load_file

            for file in sorted(saved.directory.glob("*.safetensors")):
                yield from load_file(file).items()
        case "torch.save":
            for pattern in _PATTERNS:
                for file in sorted(saved.directory.glob(pattern)):
                    yield from _read_part(file, saved)
        case "dcp":
            with tempfile.TemporaryDirectory() as temporary:
                whole = pathlib.Path(temporary) / "whole.pt"
                dcp_to_torch_save(saved.directory, whole)
                yield from _read_part(whole, saved)
        case _:
            assert_never(saved.format)


def _read_part(file: pathlib.Path, saved: SavedFiles) -> Iterator[tuple[str, Any]]:
    nested: Any = torch.load(file, weights_only=False)
    for key in saved.part:
        nested = nested[key]
    yield from nested.items()


def _list_tensor_ids(session: FrameworkSession) -> set[int]:
    """The ids of the tensors that live as long as the session."""
    state = (value for values in session.optimizer.state.values() for value in values.values())
    tensors = [*session.model.parameters(), *session.model.buffers(), *state]
    shards = (private.read_local_tensor(tensor) for tensor in tensors if isinstance(tensor, DTensor))
    return {id(tensor) for tensor in itertools.chain(tensors, shards)}


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A run where it was saved. Tensors are on the host, unsharded. options: of each of the optimizer's groups."""

    weights: Full
    moments: Full
    options: list[dict[str, Any]]


def _save(run: FrameworkRun, session: FrameworkSession) -> SavedState:
    """Has the framework save. Returns the state that a load must restore."""
    run.recorder.enter("reference")
    truth = reference.take(session.model, session.optimizer, run.runtime)
    options = copy.deepcopy(read_options(session.optimizer))
    run.recorder.enter("save")
    session.save(run.directory / "saved")
    return SavedState(weights=truth.full, moments=truth.optimizer, options=options)


def _digest_step(run: FrameworkRun, session: FrameworkSession) -> StepOutcome:
    run.runtime.synchronize()
    return digest_outcome(session.model, session.optimizer)


def _check_loaded(run: FrameworkRun, session: FrameworkSession, saved: SavedState) -> None:
    run.recorder.enter("verify")
    run.runtime.synchronize()
    pieces, findings = _compare_pieces(session, saved.weights, "the model that was saved", "what was saved")
    run.recorder.add(problems=findings.list_problems(), num_tensors=len(pieces))
    run.recorder.add(problems=find_optimizer_problems(session.model, session.optimizer, saved.moments, saved.options))
    run.agree_or_stop()
    run.recorder.enter("next step")


def _check_step(run: FrameworkRun, session: FrameworkSession, number: int, expected: StepOutcome) -> None:
    """Compares a step after a load; ``number`` is 0 for the first. Only the first step that differs is recorded."""
    names = find_differences(_digest_step(run, session), expected)
    if names and not run.recorder.record.problems:
        what = f"the {_ORDINAL[number]} training step ends otherwise than that of the run that went on"
        run.recorder.note("poisoned", f"{what}: {join_first_names(names)}")


def _roll_back(run: FrameworkRun, session: FrameworkSession, kept: bool) -> None:
    """Saves, trains on, and loads into the same session."""
    first = 0 if kept else STEPS_BEFORE
    began_at = session.num_steps
    saved: SavedState | None = None
    outcomes: list[StepOutcome] = []

    def act_at(number: int) -> None:
        nonlocal saved
        after = number - first
        if after == 0:
            saved = _save(run, session)
            run.agree_or_stop()
            run.recorder.enter("next step")
        elif 0 < after <= _STEPS_AFTER:
            outcomes.append(_digest_step(run, session))
        elif after > _STEPS_AFTER:
            number = after - _STEPS_AFTER - 1
            _check_step(run, session, number, outcomes[number])
        if after == _STEPS_AFTER:
            assert saved is not None
            run.recorder.enter("load")
            session.load(run.directory / "saved")
            session.num_steps = began_at + first
            _check_loaded(run, session, saved)

    with use_deterministic_algorithms():
        run.train(session, first + 2 * _STEPS_AFTER, act_at)


def _save_for_resume(run: FrameworkRun, session: FrameworkSession, kept: bool) -> None:
    """Saves, and writes down the state that a load must restore, and the outcomes of the next steps."""
    saved: SavedState | None = None
    outcomes: list[StepOutcome] = []

    def act_at(number: int) -> None:
        nonlocal saved
        if number == STEPS_BEFORE:
            saved = _save(run, session)
        elif number > STEPS_BEFORE:
            run.recorder.enter("next step")
            outcomes.append(_digest_step(run, session))

    with use_deterministic_algorithms():
        run.train(session, STEPS_BEFORE + _STEPS_AFTER, act_at)
    run.directory.mkdir(parents=True, exist_ok=True)
    if run.runtime.rank == 0:
        torch.save(saved, run.directory / "state.pt")
    torch.save(outcomes, run.directory / f"outcomes_{run.runtime.rank}.pt")


def _resume(run: FrameworkRun, session: FrameworkSession, kept: bool) -> None:
    """Loads the checkpoint of other processes into a session with other weights, and trains on."""
    saved: SavedState = torch.load(run.directory / "state.pt", weights_only=False)
    outcomes: list[StepOutcome] = torch.load(run.directory / f"outcomes_{run.runtime.rank}.pt")

    def act_at(number: int) -> None:
        if number == 0:
            _check_loaded(run, session, saved)
        else:
            _check_step(run, session, number - 1, outcomes[number - 1])

    run.recorder.enter("load")
    with use_deterministic_algorithms():
        run.train(session, _STEPS_AFTER, act_at, resume_from=run.directory / "saved")


# The first half of a resume, in processes of its own.
SAVING = MethodSteps(train=_save_for_resume, takes_kept=False)
