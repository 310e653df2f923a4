"""The life of a framework's case on one rank: a session is built and trained, and examined between its steps."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist

from fsdp_doctor.case import runtime
from fsdp_doctor.case.models import Weights
from fsdp_doctor.case.recorder import Recorder
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Unsupported
from fsdp_doctor.frameworks.adapter import FrameworkSession, NotInStandInError, PlainModel
from fsdp_doctor.frameworks.built_session import find_mismatches
from fsdp_doctor.frameworks.framework_worker import FrameworkWorker, describe_version, find_adapter
from fsdp_doctor.matrix.frameworks.adapters import locate_adapter
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.text import read_first_line

_ROOM = pathlib.Path(__file__).parent


# Trains the session and examines it. The flag says whether a case before this one has trained it.
Train: TypeAlias = "Callable[[FrameworkRun, FrameworkSession, bool], None]"


@dataclass(frozen=True, kw_only=True)
class MethodSteps:
    """A kind of method. weights: of the plain model that its session is given.

    takes_kept: whether it can use a session that was trained.
    """

    train: Train
    weights: Weights = "own"
    takes_kept: bool = True


@dataclass(frozen=True, kw_only=True)
class BuiltSession:
    """A session, and its ranks' control group, which is made after the framework has made its own groups."""

    session: FrameworkSession
    runtime: Runtime


# The beginnings of what torch says to `.cuda()` and `device="cuda"` where there is no GPU.
_CUDA_MISSING = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")


class _AbandonedError(Exception):
    """Ends a framework's training loop; the record says why."""


class FrameworkRun:
    """One case of a framework while it runs. directory: the case's own, the same on every rank, not yet made."""

    runtime: Runtime

    def __init__(self, case: FrameworkCase, worker: FrameworkWorker, recorder: Recorder) -> None:
        self.case = case
        self.recorder = recorder
        self.directory = worker.scratch / case.id.replace("/", "-").replace(":", "-")
        self._worker = worker
        self._stopped = False

    def run(self, steps: MethodSteps, kept: BuiltSession | None) -> BuiltSession | None:
        """Builds the session unless one was kept, and trains it. Returns it if another case may use it."""
        recorder, built = self.recorder, kept
        with self._record_exceptions():
            built = built or self._build(steps)
            self.runtime = built.runtime
            steps.train(self, built.session, kept is not None)
        if built is None:
            # There is no group yet over which the ranks could agree.
            recorder.add(healthy=False)
        elif not self._stopped:
            recorder.agree(self.runtime)
        record = recorder.record
        whole = recorder.unbroken and record.healthy and not record.problems
        reusable = whole and built is not None and built.session.goes_on
        if not reusable:
            recorder.add(retire="a framework's session, of which a process has one")
        recorder.add(done=True)
        recorder.report()
        return built if reusable else None

    def _build(self, steps: MethodSteps) -> BuiltSession:
        self.recorder.enter("build")
        worker, scenario = self._worker, self.case.scenario
        if worker.unavailable:
            raise Unsupported(worker.unavailable)
        plain = PlainModel(
            name=scenario.values["model"],
            weights=steps.weights,
            device=worker.device,
            place=worker.place,
            workspace=self.directory / f"workspace-{steps.weights}",
        )
        plain.workspace.mkdir(parents=True, exist_ok=True)
        session = find_adapter(scenario.framework).build(scenario.values, plain)
        if not dist.is_initialized():
            made = f"{describe_version(scenario.framework)} made no process group"
            raise Unsupported(f"{made}, so nothing is sharded: ranks {worker.place.world_size}")
        return BuiltSession(
            session=session, runtime=runtime.make_for_present_group(worker.place, worker.device, worker.scratch)
        )

    def train(
        self,
        session: FrameworkSession,
        num_steps: int,
        at: Callable[[int], None],
        resume_from: pathlib.Path | None = None,
    ) -> None:
        """Trains the session, which is compared with its configuration first; see :meth:`FrameworkSession.train`.

        An exception of ``at`` is recorded before the framework sees one.
        """

        def call_hook(number: int) -> None:
            with self._record_exceptions():
                if number == 0:
                    self._check_built(session)
                at(number)
            if not self.recorder.unbroken or self._stopped:
                raise _AbandonedError

        session.train(num_steps, call_hook, resume_from)

    def _check_built(self, session: FrameworkSession) -> None:
        """Raises Unsupported if the framework built something else than the configuration asks for."""
        scenario = self.case.scenario
        if mismatches := list(find_mismatches(session, scenario.matrix.list_builds(scenario.values))):
            built = f"{describe_version(scenario.framework)} built something else than {scenario.configuration}"
            raise Unsupported(f"{built}: {'; '.join(mismatches)}")

    def agree_or_stop(self) -> None:
        """Ends the case on every rank if it failed on one: the next step is a collective."""
        self._stopped = not self.recorder.agree(self.runtime).works
        if self._stopped:
            raise _AbandonedError

    @contextlib.contextmanager
    def _record_exceptions(self) -> Iterator[None]:
        """Makes the first exception part of the record; exceptions that it caused in the framework's loop are
        dropped.
        """
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
        """Names a package or a name that the framework turns out to lack; empty if the error is another one."""
        framework = describe_version(self.case.scenario.framework)
        if isinstance(error, ModuleNotFoundError) and self.recorder.record.stage == "build":
            return f"{framework} needs a package that is not installed: {error}"
        if isinstance(error, ImportError):
            reason = str(error).removesuffix(f" ({error.path})")
            return f"{framework} does not fit a package that is installed beside it: {reason}"
        if isinstance(error, NotInStandInError):
            return f"{framework}: {error}"
        if self._worker.device.type == "emulated" and str(error).startswith(_CUDA_MISSING):
            return f"{framework} asks for CUDA itself, which the emulated device is not: {read_first_line(error)}"
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        file = pathlib.Path(where.tb_frame.f_code.co_filename if where is not None else "")
        # An adapter may use another one's functions.
        of_adapters = (locate_adapter(self.case.scenario.framework).file.parent, _ROOM)
        by_adapter = file.with_suffix(".toml").exists() and file.parent in of_adapters
        if not isinstance(error, (AttributeError, ImportError, TypeError)) or not by_adapter:
            return ""
        return f"the adapter does not fit {framework}: {error}"
