"""One case of a framework on one rank: a session is built and trained, and looked at between its steps."""

from __future__ import annotations

import abc
import contextlib
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsdp_doctor.case import models, runtime
from fsdp_doctor.case.recorder import Recorder, RecordSink
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Unsupported
from fsdp_doctor.frameworks.adapter import FrameworkSession, PlainModel
from fsdp_doctor.frameworks.framework_worker import FrameworkWorker, adapter_of, name_and_version, why_unavailable
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase

_ROOM = pathlib.Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class BuiltSession:
    """A session and its ranks' control group, made after the framework had made its own."""

    session: FrameworkSession
    runtime: Runtime


class _AbandonedError(Exception):
    """Unwinds a framework's training loop: what happened is in the record."""


class FrameworkRun(abc.ABC):
    """A case of a framework.

    weights: of the plain model that its session is given. takes_kept: whether it can use a session that was trained.
    """

    weights: models.Weights = "own"
    takes_kept = True
    _runtime: Runtime

    def __init__(self, case: FrameworkCase, worker: FrameworkWorker, report: RecordSink) -> None:
        self._recorder = Recorder(case.id, report)
        self._case = case
        self._worker = worker
        self._stopped = False

    @abc.abstractmethod
    def _train(self, session: FrameworkSession, kept: bool) -> None:
        """Trains the session, and looks at it. ``kept``: it has been trained, by a case before this one."""

    @property
    def _directory(self) -> pathlib.Path:
        """The case's own, the same on every rank, not yet made."""
        return self._worker.scratch / self._case.id.replace("/", "-").replace(":", "-")

    def run(self, kept: BuiltSession | None) -> BuiltSession | None:
        """Returns the session, between two steps, if another case may use it."""
        built = kept
        with self._catching():
            built = built or self._build()
            self._runtime = built.runtime
            self._train(built.session, kept=kept is not None)
        if built is None:
            # There are no groups of ours yet over which the ranks could tell one another.
            self._recorder.add(healthy=False)
        elif not self._stopped:
            self._recorder.agree(self._runtime)
        record = self._recorder.record
        whole = self._recorder.unbroken and record.healthy and not record.problems
        reusable = whole and built is not None and built.session.goes_on
        if not reusable:
            self._recorder.add(retire="a framework's session, of which a process has one")
        self._recorder.add(done=True)
        self._recorder.report()
        return built if reusable else None

    def _build(self) -> BuiltSession:
        self._recorder.enter("build")
        worker, scenario = self._worker, self._case.scenario
        if reason := self._why_not():
            raise Unsupported(reason)
        plain = PlainModel(
            name=scenario.values["model"],
            weights=self.weights,
            device=worker.device,
            place=worker.place,
            workspace=self._directory / f"workspace-{self.weights}",
        )
        plain.workspace.mkdir(parents=True, exist_ok=True)
        session = adapter_of(scenario.framework).build(scenario.values, plain)
        return BuiltSession(
            session=session, runtime=runtime.of_present_group(worker.place, worker.device, worker.scratch)
        )

    def _why_not(self) -> str:
        """Why the framework cannot be tried here; empty if it can."""
        if reason := why_unavailable(self._case.scenario.framework):
            return reason
        if self._worker.device.type == "cpu":
            return "frameworks are run on an accelerator or on the emulated device"
        if self._worker.place.num_nodes > 1:
            return "the directories that a framework saves to are not shared between the nodes"
        return ""

    def _between_steps(self, at: Callable[[int], None]) -> Callable[[int], None]:
        """``at`` for a framework's loop: what it raises is in the record before the framework sees it."""

        def hook(number: int) -> None:
            with self._catching():
                at(number)
            if not self._recorder.unbroken or self._stopped:
                raise _AbandonedError

        return hook

    def _agree_or_stop(self) -> None:
        """For between the path and the next step, which is a collective: no rank goes on if another does not."""
        self._stopped = not self._recorder.agree(self._runtime).works
        if self._stopped:
            raise _AbandonedError

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """Makes the first exception part of the record; those that it caused in the framework's loop are dropped."""
        with self._recorder.catching():
            try:
                yield
            except (SystemExit, Unsupported):
                raise
            except BaseException as error:
                if isinstance(error, _AbandonedError) or not self._recorder.unbroken:
                    return
                if reason := self._lacking(error):
                    raise Unsupported(reason) from error
                raise

    def _lacking(self, error: BaseException) -> str:
        """What the installed framework lacks: a package that it imports, or a name for its adapter. Else empty."""
        own = name_and_version(self._case.scenario.framework)
        if isinstance(error, ModuleNotFoundError) and self._recorder.record.stage == "build":
            return f"{own} needs what is not installed: {error}"
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        file = pathlib.Path(where.tb_frame.f_code.co_filename if where is not None else "")
        by_adapter = file.parent == _ROOM and file.name.startswith("on_")
        if not isinstance(error, (AttributeError, ImportError, TypeError)) or not by_adapter:
            return ""
        return f"the adapter does not fit {own}: {error}"
