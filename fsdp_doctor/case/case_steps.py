"""Interface for one kind of case: the actions that ``CaseRun`` calls at each point of a run."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from fsdp_doctor.case.recorder import Recorder
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.verdict.records import Stage

T = TypeVar("T")
R = TypeVar("R")


class CaseSteps(ABC, Generic[T]):
    """Actions of one kind of case at each point of a run. :class:`case_run.CaseRun` calls them in order.

    T is the object that trains: fsdp-doctor's trainer, or a framework's session. Every rank calls every method, in the
    same order.

    runtime: the rank's device and process groups; None before a framework has made its process group.
    steps_before: the number of training steps between the build and the method.
    steps_after: the number of training steps after the method, each of which is checked.
    step_stage: the record's stage name for the steps after the method.
    agrees_on_reference: whether the ranks tell each other if taking the reference succeeded, because it can fail on
        only one rank.
    keeps_settings: whether the method must leave the settings of the process unchanged.
    """

    steps_before: int = 0
    agrees_on_reference: ClassVar[bool] = False
    keeps_settings: ClassVar[bool] = False
    steps_after: ClassVar[int] = 1
    step_stage: ClassVar[Stage] = "next step"

    def __init__(self, recorder: Recorder, runtime: Runtime | None) -> None:
        self.recorder = recorder
        self.runtime = runtime

    @property
    def present_runtime(self) -> Runtime:
        """Runtime of the rank; it exists once the trainer is built."""
        assert self.runtime is not None
        return self.runtime

    def check_possible(self) -> None:
        """Raises Unsupported if the method cannot be tried."""

    @abstractmethod
    def build(self) -> T:
        """Builds the object that trains. Raises Unsupported if that is impossible."""

    @abstractmethod
    def drive(self, trainer: T, life: Generator[None, None, R]) -> R:
        """Trains a step each time the generator ``life`` yields, and throws an error of the step into the generator.

        Returns the generator's result.
        """

    def check_built(self, trainer: T) -> None:
        """Raises Unsupported if the trainer differs from the scenario of the case."""

    @abstractmethod
    def take_reference(self, trainer: T) -> None:
        """Records the values that the method must deliver or restore."""

    def look_ahead(self, trainer: T) -> Iterator[None]:
        """Records the outcomes that the next training steps have without the method. Yields each time a step must be
        trained.
        """
        return iter(())

    def offload(self, trainer: T) -> None:
        """Brings the model into the state in which the method is called."""

    def note_state(self, trainer: T) -> None:
        """Records the state that the method must not change."""

    @abstractmethod
    def run_method(self, trainer: T, call: Callable[[], Any], owned: bool) -> None:
        """Runs the method through ``call``, and verifies its effects.

        call: a function that runs the method and returns its result.
        owned: whether only ``call`` refers to the method's result, so that the result's memory can be measured.
        """

    @abstractmethod
    def call_method(self, trainer: T) -> Any:
        """Calls the method of the case as its user would."""

    def recover(self, trainer: T) -> bool:
        """Makes the job recover from a step that raised before the method; returns whether it can train on."""
        return True

    def resume(self, trainer: T) -> None:
        """Makes the model ready for the next training step, and checks that the step starts from the right weights."""

    def measure_step(self, trainer: T) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which the next training step runs."""
        return contextlib.nullcontext()

    @abstractmethod
    def check_trained(self, trainer: T, number: int) -> None:
        """Checks the outcome of a step after the method; ``number`` is 0 for the first."""

    @abstractmethod
    def is_reusable(self, trainer: T) -> bool:
        """Returns whether the next case can use the trainer after this case's last training step."""

    def take_back(self, trainer: T) -> None:
        """Restores the trainer, for the next case, to the state that it had at the beginning of this case."""

    def calls_again(self) -> bool:
        """Returns whether the method is called a second time, to find stale values from the first call."""
        return False

    def explain_retirement(self) -> str:
        """Explains why the process must end after a case whose trainer is not kept; empty if the process may go on."""
        return ""

    @contextlib.contextmanager
    def record_exceptions(self) -> Iterator[None]:
        """Context that records an exception instead of raising it."""
        with self.recorder.record_exceptions():
            yield
