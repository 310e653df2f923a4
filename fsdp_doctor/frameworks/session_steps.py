"""Steps of the cases that run a framework's own code.

The framework's own code builds the session, which is examined between two training steps. A case prepares, extracts,
rolls back, saves or resumes, according to its kind. After a load, the weights, every value of the optimizer and the
next two steps must equal those of the run that was not interrupted.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import pathlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import assert_never

from fsdp_doctor.case import local_pieces, reference, runtime, yielded
from fsdp_doctor.case.case_steps import CaseSteps, R
from fsdp_doctor.case.extraction import ExtractionCheck
from fsdp_doctor.case.findings import Findings, compare, join_first_names
from fsdp_doctor.case.loaded_state import count_optimized, find_optimizer_problems, read_options
from fsdp_doctor.case.local_pieces import Full, LocalPiece
from fsdp_doctor.case.lora_reference import compute_merged_weights
from fsdp_doctor.case.models import Weights
from fsdp_doctor.case.recorder import Recorder
from fsdp_doctor.case.reference import Reference
from fsdp_doctor.case.trainer import Unsupported
from fsdp_doctor.case.training_state import StepOutcome, digest_outcome, find_differences, use_deterministic_algorithms
from fsdp_doctor.errors import CannotRun
from fsdp_doctor.fixes.applying import AppliedFix, hold_fix
from fsdp_doctor.frameworks.adapter import STEPS_BEFORE, FrameworkSession, NotInStandInError, PlainModel, SavedFiles
from fsdp_doctor.frameworks.built_session import find_mismatches
from fsdp_doctor.frameworks.framework_worker import FrameworkWorker, describe_version, find_adapter
from fsdp_doctor.frameworks.saved_files import read_weights
from fsdp_doctor.matrix.frameworks.adapters import locate_adapter
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMethodKind
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.text import format_count, read_first_line
from fsdp_doctor.verdict.records import Stage
from fsdp_doctor.weights.fsdp import private

_STEPS_AFTER = 2
_ORDINAL = ("next", "second")
_ROOM = pathlib.Path(__file__).parent
# The beginnings of torch's errors for `.cuda()` and `device="cuda"` on a machine without a GPU.
_CUDA_MISSING = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")


class _AbandonedError(Exception):
    """Error that ends a framework's training loop early. The record says why."""


class SessionSteps(CaseSteps[FrameworkSession]):
    """The actions that all kinds of cases share: the framework builds and trains, and calls back after training steps.

    weights: the weights of the plain model that the framework is given.
    takes_kept: whether this kind of case can use a session that another case has already trained.
    directory: the directory of the case, the same on every rank; it does not exist yet.
    """

    weights: ClassVar[Weights] = "own"
    takes_kept: ClassVar[bool] = True
    # The number of steps that :meth:`look_ahead` trains.
    steps_ahead: ClassVar[int] = 0
    # Whether the function that a fix replaces runs when the session is built or begins to train.
    begins_with_fix: ClassVar[bool] = False
    # The directory of the checkpoint with which the session begins; None if it begins without a load.
    resumes_from: pathlib.Path | None = None

    def __init__(
        self, case: FrameworkCase, worker: FrameworkWorker, recorder: Recorder, kept: runtime.Runtime | None
    ) -> None:
        super().__init__(recorder, kept)
        self.case = case
        self.directory = worker.scratch / case.id.replace("/", "-").replace(":", "-")
        self._worker = worker
        if kept is not None:
            self.steps_before = 0
        # The stack is never closed, because the process ends with the case.
        self._lasting = contextlib.ExitStack()
        self._fixes_of_session: list[AppliedFix] = []
        self._raised_before: BaseException | None = None
        self._until_method_ends = contextlib.ExitStack()
        self._fixes_of_method: list[AppliedFix] = []
        # The fixes whose calls the ranks must tell each other, because only some ranks make them.
        self._fixes_of_some_ranks: Sequence[AppliedFix] = ()
        # Whether a replacement has run in the processes that wrote the checkpoint.
        self._was_saved_with_fix = False

    def build(self) -> FrameworkSession:
        self.recorder.enter("build")
        worker, scenario = self._worker, self.case.scenario
        if worker.unavailable:
            raise Unsupported(worker.unavailable)
        plain = PlainModel(
            name=scenario.values["model"],
            weights=self.weights,
            device=worker.device,
            place=worker.place,
            workspace=self.directory / f"workspace-{self.weights}",
        )
        plain.workspace.mkdir(parents=True, exist_ok=True)
        if self.begins_with_fix:
            self._fixes_of_session = self._enter_fixes(self._lasting)
        session = find_adapter(scenario.framework).build(scenario.values, plain)
        if not dist.is_initialized():
            made = f"{describe_version(scenario.framework)} made no process group"
            ranks = format_count(worker.place.world_size, "rank")
            raise Unsupported(f"{made}, so nothing is sharded: the job has {ranks}")
        # The control group is made after the framework has made its own groups.
        self.runtime = runtime.make_for_present_group(worker.place, worker.device, worker.scratch)
        return session

    def drive(self, trainer: FrameworkSession, life: Generator[None, None, R]) -> R:
        """Runs the framework's own training loop for all steps, and continues ``life`` after each training step.

        Returns the result of ``life``. An error of the loop is thrown into ``life``.
        """
        num_steps = self.steps_before + self.steps_ahead + self.steps_after
        results: list[R] = []

        def live_on(number: int) -> None:
            try:
                next(life)
            except StopIteration as end:
                results.append(end.value)
                if number < num_steps:
                    raise _AbandonedError from None

        try:
            if self.resumes_from is not None:
                self.recorder.enter("load")
            with self._enter_training():
                trainer.train(num_steps, live_on, self.resumes_from)
            if not results:
                raise RuntimeError(f"the framework ended its training before step {num_steps}")
        except BaseException as error:
            if not results:
                try:
                    if inspect.getgeneratorstate(life) == inspect.GEN_CREATED:
                        # The load of a resume raised before it called back.
                        self._raised_before = error
                        next(life)
                    else:
                        life.throw(error)
                except StopIteration as end:
                    results.append(end.value)
            elif not isinstance(error, _AbandonedError):
                # The ranks have already agreed on the outcome, so the process is not used again.
                self.recorder.add(healthy=False)
                with self.record_exceptions():
                    raise
        return results[0]

    def _enter_training(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def check_built(self, trainer: FrameworkSession) -> None:
        """Raises Unsupported if the session does not match its configuration.

        Raises the exception of a load that failed before the first callback, so that it is recorded for the case.
        """
        if self._raised_before is not None:
            raise self._raised_before
        scenario = self.case.scenario
        if mismatches := list(find_mismatches(trainer, scenario.matrix.list_builds(scenario.values))):
            built = f"{describe_version(scenario.framework)} built something else than {scenario.configuration}"
            raise Unsupported(f"{built}: {'; '.join(mismatches)}")

    def begin_fixes(self) -> None:
        """Replaces the framework's functions by fsdp-doctor's fixes until :meth:`end_fixes`, if the case asks for a
        fix.

        After an exception in between, the functions stay replaced, because the process ends with the case.
        """
        self._fixes_of_method = self._enter_fixes(self._until_method_ends)

    @contextlib.contextmanager
    def end_fixes(self) -> Iterator[None]:
        """Puts the framework's functions back at the end of the ``with`` block in which the method under test runs."""
        with self._until_method_ends:
            yield
            self._check_fixes(self._fixes_of_method)

    def _enter_fixes(self, stack: contextlib.ExitStack) -> list[AppliedFix]:
        """Replaces the framework's functions until the stack is closed.

        Replaces none if the case does not ask for a fix. Returns the fixes that were applied.
        """
        applied: list[AppliedFix] = []
        refused: list[CannotRun] = []
        for id in self.case.definition.fix.split() if self.case.is_fixed else ():
            try:
                applied.append(stack.enter_context(hold_fix(id)))
            except CannotRun as reason:
                refused.append(reason)
        if refused and not applied:
            raise Unsupported(str(refused[0])) from None
        return applied

    def _check_fixes(self, applied: Sequence[AppliedFix]) -> None:
        """Raises Unsupported if the framework's own functions ran instead of the replacements.

        If only some ranks call a function, :meth:`recover` raises Unsupported instead, after all ranks have compared.
        """
        if not all(each.fix.on_every_rank for each in applied):
            self._fixes_of_some_ranks = applied
        elif applied and not self._has_run(applied):
            raise self._make_unfixed(applied)

    def _has_run(self, applied: Iterable[AppliedFix]) -> bool:
        """Returns whether a replacement, and never the original, has run on this rank or in the run that saved."""
        return self._was_saved_with_fix or any(each.num_calls and not each.num_left for each in applied)

    def _make_unfixed(self, applied: Sequence[AppliedFix]) -> Unsupported:
        ids = " and ".join(each.fix.id for each in applied)
        return Unsupported(f"fix {ids} left the call to {self.case.scenario.framework}'s own function")

    def recover(self, trainer: FrameworkSession) -> bool:
        """Raises Unsupported if the replacement of a function that only some ranks call has run on no rank.

        Otherwise returns True.
        """
        if applied := self._fixes_of_some_ranks:
            has_run = torch.tensor(int(self._has_run(applied)), device="cpu")
            dist.all_reduce(has_run, dist.ReduceOp.MAX, group=self.present_runtime.control)
            if not has_run:
                raise self._make_unfixed(applied)
        return True

    def call_method(self, trainer: FrameworkSession) -> Any:
        """Does nothing: for most kinds of cases, the method is the framework's own build, save or load."""

    def is_reusable(self, trainer: FrameworkSession) -> bool:
        record = self.recorder.record
        return not self._fixes_of_session and record.healthy and not record.problems and trainer.goes_on

    def explain_retirement(self) -> str:
        return "a process can have only one session of a framework"

    @contextlib.contextmanager
    def record_exceptions(self) -> Iterator[None]:
        """Records the first exception, and drops the exceptions that it caused in the framework's loop."""
        with self.recorder.record_exceptions():
            try:
                yield
            except (SystemExit, Unsupported):
                raise
            except BaseException as error:
                if isinstance(error, _AbandonedError) or not self.recorder.unbroken:
                    return
                if reason := self._name_lacking_package(error):
                    raise Unsupported(reason) from error
                raise

    def _name_lacking_package(self, error: BaseException) -> str:
        """Explains an error that shows that the framework or its adapter does not fit the installed packages.

        Returns an empty string for any other error.
        """
        framework = describe_version(self.case.scenario.framework)
        if isinstance(error, ModuleNotFoundError) and self.recorder.record.stage == "build":
            return f"{framework} needs a package that is not installed: {error}"
        if isinstance(error, ImportError):
            reason = str(error).removesuffix(f" ({error.path})")
            return f"{framework} does not work with another installed package: {reason}"
        if isinstance(error, NotInStandInError):
            return f"{framework}: {error}"
        if self._worker.device.type == "emulated" and str(error).startswith(_CUDA_MISSING):
            return f"{framework} asks for CUDA itself, but the emulated device is not CUDA: {read_first_line(error)}"
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        file = pathlib.Path(where.tb_frame.f_code.co_filename if where is not None else "")
        # An adapter may use functions of another adapter.
        of_adapters = (locate_adapter(self.case.scenario.framework).file.parent, _ROOM)
        by_adapter = file.with_suffix(".toml").exists() and file.parent in of_adapters
        if not isinstance(error, (AttributeError, ImportError, TypeError)) or not by_adapter:
            return ""
        return f"the adapter does not fit {framework}: {error}"


class PreparationSteps(SessionSteps):
    """Wraps the model and trains one step. The step counts as building: if it fails, the build has crashed."""

    takes_kept = False
    begins_with_fix = True
    step_stage: ClassVar[Stage] = "build"

    def take_reference(self, trainer: FrameworkSession) -> None:
        self.recorder.enter("reference")
        self._before = reference.take(trainer.model, None, self.present_runtime)

    def run_method(self, trainer: FrameworkSession, call: Callable[[], Any], owned: bool) -> None:
        """Checks that the wrapped model has the plain model's names and weights, on the promised device."""
        self._check_fixes(self._fixes_of_session)
        self.recorder.enter("verify")
        plain = trainer.plain.build_module().state_dict()
        pieces, findings = _compare_pieces(trainer, plain, "the plain model", "the plain model's")
        for piece in pieces:
            promised = trainer.shards_on if isinstance(piece.shown, nn.Parameter) else None
            if promised is not None and piece.held.device != promised:
                findings.note("misplaced", f"on {piece.held.device} where {promised} was asked for", piece.name)
        names = {name for piece in pieces for name in piece.names}
        for name in sorted(plain.keys() - names):
            findings.note("incomplete", "of the plain model, not in the wrapped one", name)
        self.recorder.add(problems=findings.list_problems(), num_tensors=len(pieces))

    def check_trained(self, trainer: FrameworkSession, number: int) -> None:
        """Checks that the step changed every trainable parameter, on at least one rank, and changed no other.

        Also checks that the optimizer holds parameters of the model.
        """
        self.recorder.enter("reference")
        before, now = self._before, reference.take(trainer.model, None, self.present_runtime)
        self.recorder.enter("verify")
        parameters = trainer.plain.build_module().named_parameters()
        trains = {name for name, parameter in parameters if parameter.requires_grad}
        findings = Findings()
        for name, values in now.full.items():
            changed = bool(compare(values, before.full[name]))
            is_tied = any(now.full[other] is now.full[name] for other in trains)
            if name in trains and not changed:
                findings.note("poisoned", "a training step did not change", name)
            elif name not in trains and changed and not is_tied:
                findings.note("poisoned", "a training step changed what is frozen", name)
        self.recorder.add(problems=findings.list_problems())
        optimized, total = count_optimized((trainer.optimizer,), trainer.model)
        if trains and not optimized:
            self.recorder.note("poisoned", f"the optimizer holds {optimized} of the model's {total} parameters")


class SessionExtractionSteps(SessionSteps):
    """Takes a reference, offloads, runs the method, and trains the next step."""

    steps_before = STEPS_BEFORE

    def take_reference(self, trainer: FrameworkSession) -> None:
        self.recorder.enter("reference")
        self._truth = reference.take(trainer.model, None, self.present_runtime)

    def offload(self, trainer: FrameworkSession) -> None:
        self.recorder.enter("offload")
        self.begin_fixes()
        trainer.offload()

    def note_state(self, trainer: FrameworkSession) -> None:
        self._check = ExtractionCheck(
            self.recorder, self.present_runtime, trainer.model, trainer.optimizer, self._truth
        )

    def call_method(self, trainer: FrameworkSession) -> Any:
        """Calls the method. If it writes files, every rank waits for all ranks to write, and then reads all files."""
        result = trainer.list_extractions()[self.case.plain_method](self.directory)
        if not isinstance(result, SavedFiles):
            return result
        dist.barrier(group=self.present_runtime.control)
        return read_weights(result)

    def run_method(self, trainer: FrameworkSession, call: Callable[[], Any], owned: bool) -> None:
        here, truth = self.present_runtime, self._truth
        expected = yielded.ExpectedYield(
            contract=self.case.definition.contract,
            reference=truth,
            rank=here.rank,
            compute_device=here.device,
            compute_dtype=torch.bfloat16,
            parameter_devices=yielded.read_parameter_devices(trainer.model),
            shard_group_of_one=here.world_size == 1,
            merged_weights=compute_merged_weights(trainer.model, truth.full),
        )
        with self.end_fixes():
            self._check.run(call, expected, live_tensors=_list_tensor_ids(trainer), owned=owned)

    def resume(self, trainer: FrameworkSession) -> None:
        trainer.onload()
        self._check.check_weights("the next training step would start from other weights")

    def check_trained(self, trainer: FrameworkSession, number: int) -> None:
        """Waits for the device, so that an error of the training step is raised here."""
        self.present_runtime.synchronize()


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The state of a run when it was saved. Tensors are unsharded and on the host.

    options: a dict of options for each parameter group of the optimizer.
    """

    weights: Full
    moments: Full
    options: list[dict[str, Any]]


class _LoadSteps(SessionSteps):
    """The steps of a load into a session.

    The two steps after the load are compared with those of the run that was not interrupted.
    """

    steps_after = _STEPS_AFTER
    _saved: SavedState
    _outcomes: list[StepOutcome]

    def _enter_training(self) -> contextlib.AbstractContextManager[object]:
        return use_deterministic_algorithms()

    def _save(self, trainer: FrameworkSession) -> None:
        """Makes the framework save, and keeps the state that a load must restore."""
        self.recorder.enter("reference")
        truth: Reference = reference.take(trainer.model, trainer.optimizer, self.present_runtime)
        options = copy.deepcopy(read_options(trainer.optimizer))
        self.recorder.enter("save")
        trainer.save(self.directory / "saved")
        self._saved = SavedState(weights=truth.full, moments=truth.optimizer, options=options)

    def look_ahead(self, trainer: FrameworkSession) -> Iterator[None]:
        """Trains further after the save, and keeps the outcome of each step."""
        self._outcomes = []
        for _ in range(self.steps_ahead):
            self.recorder.enter("next step")
            yield
            self._outcomes.append(self._digest_step(trainer))

    def _digest_step(self, trainer: FrameworkSession) -> StepOutcome:
        self.present_runtime.synchronize()
        return digest_outcome(trainer.model, trainer.optimizer)

    def _check_loaded(self, trainer: FrameworkSession) -> None:
        self.recorder.enter("verify")
        self.present_runtime.synchronize()
        saved = self._saved
        pieces, findings = _compare_pieces(trainer, saved.weights, "the model that was saved", "what was saved")
        self.recorder.add(problems=findings.list_problems(), num_tensors=len(pieces))
        problems = find_optimizer_problems(trainer.model, trainer.optimizer, saved.moments, saved.options)
        self.recorder.add(problems=problems)

    def check_trained(self, trainer: FrameworkSession, number: int) -> None:
        """Compares a step after the load with the same step of the uninterrupted run.

        Only the first difference is recorded.
        """
        names = find_differences(self._digest_step(trainer), self._outcomes[number])
        if names and not self.recorder.record.problems:
            what = f"the {_ORDINAL[number]} training step ends otherwise than that of the run that went on"
            self.recorder.note("poisoned", f"{what}: {join_first_names(names)}")


class RollbackSteps(_LoadSteps):
    """Saves, trains further, and loads into the same session."""

    agrees_on_reference = True
    steps_before = STEPS_BEFORE
    steps_ahead = _STEPS_AFTER

    def take_reference(self, trainer: FrameworkSession) -> None:
        self.begin_fixes()
        self._save(trainer)
        self._saved_at = trainer.num_steps

    def run_method(self, trainer: FrameworkSession, call: Callable[[], Any], owned: bool) -> None:
        self.recorder.enter("load")
        with self.end_fixes():
            trainer.load(self.directory / "saved")
        trainer.num_steps = self._saved_at
        self._check_loaded(trainer)


class ResumeSteps(_LoadSteps):
    """Loads a checkpoint of other processes into a session with other weights, and trains further."""

    weights = "other"
    takes_kept = False
    begins_with_fix = True

    def __init__(
        self, case: FrameworkCase, worker: FrameworkWorker, recorder: Recorder, kept: runtime.Runtime | None
    ) -> None:
        super().__init__(case, worker, recorder, kept)
        self.resumes_from = self.directory / "saved"

    def take_reference(self, trainer: FrameworkSession) -> None:
        self._saved = torch.load(self.directory / "state.pt", weights_only=False)
        self._outcomes, self._was_saved_with_fix = torch.load(
            self.directory / f"outcomes_{self.present_runtime.rank}.pt"
        )

    def look_ahead(self, trainer: FrameworkSession) -> Iterator[None]:
        """Trains nothing: the outcomes come from the run that saved."""
        return iter(())

    def run_method(self, trainer: FrameworkSession, call: Callable[[], Any], owned: bool) -> None:
        """Compares the state that the framework has loaded with the saved state."""
        self._check_fixes(self._fixes_of_session)
        self._check_loaded(trainer)


class SavingSteps(_LoadSteps):
    """First half of a resume case, which runs in separate processes.

    It saves, trains further, and writes the outcomes of these steps to disk.
    """

    takes_kept = False
    begins_with_fix = True
    agrees_on_reference = True
    steps_before = STEPS_BEFORE
    steps_ahead = _STEPS_AFTER
    steps_after = 0

    def take_reference(self, trainer: FrameworkSession) -> None:
        self._save(trainer)

    def run_method(self, trainer: FrameworkSession, call: Callable[[], Any], owned: bool) -> None:
        """Writes the saved state and the outcomes of the next steps, for the comparison with the resumed run."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.present_runtime.rank == 0:
            torch.save(self._saved, self.directory / "state.pt")
        outcomes = self._outcomes, self._has_run(self._fixes_of_session)
        torch.save(outcomes, self.directory / f"outcomes_{self.present_runtime.rank}.pt")


def choose_steps(kind: FrameworkMethodKind) -> type[SessionSteps]:
    match kind:
        case "prepare":
            return PreparationSteps
        case "extraction":
            return SessionExtractionSteps
        case "rollback":
            return RollbackSteps
        case "resume":
            return ResumeSteps
        case _:
            assert_never(kind)


def _compare_pieces(
    session: FrameworkSession, expected: Full, of: str, whose: str
) -> tuple[list[LocalPiece], Findings]:
    """Compares each piece of the model on this rank with the expected tensor of the same name."""
    findings = Findings()
    pieces = local_pieces.list_model_pieces(session.model, expected)
    for piece in pieces:
        if piece.expected is None:
            findings.note("incomplete", f"not a name of {of}", piece.name)
        elif difference := compare(piece.held.cpu(), piece.expected):
            findings.note("wrong", f"not {whose}: {difference}", piece.name)
    return pieces, findings


def _list_tensor_ids(session: FrameworkSession) -> set[int]:
    """Returns the ids of the tensors that live as long as the session."""
    state = (value for values in session.optimizer.state.values() for value in values.values())
    tensors = [*session.model.parameters(), *session.model.buffers(), *state]
    shards = (private.read_local_tensor(tensor) for tensor in tensors if isinstance(tensor, DTensor))
    return {id(tensor) for tensor in itertools.chain(tensors, shards)}
