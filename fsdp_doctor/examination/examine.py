"""``examine`` reads the facts of a live model on one rank, and finds what is wrong with the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import RenderableType
from torch import nn

from fsdp_doctor.examination.display import render, render_plain_text
from fsdp_doctor.examination.facts import (
    Facts,
    FsdpUnit,
    Mesh,
    NameFacts,
    OptimizerFacts,
    TensorFacts,
    TensorState,
    read_facts,
)
from fsdp_doctor.examination.findings import Finding, find_in_places
from fsdp_doctor.examination.model_findings import (
    find_after_load,
    find_in_gradients,
    find_in_memory,
    find_in_step,
    find_unreadable,
)
from fsdp_doctor.weights.fsdp import reader
from fsdp_doctor.weights.fsdp.decorators import defer_garbage_collection, run_for_model

__all__ = [
    "Examination",
    "Facts",
    "Finding",
    "FsdpUnit",
    "Mesh",
    "ModelIsBad",
    "NameFacts",
    "OptimizerFacts",
    "TensorFacts",
    "TensorState",
    "examine",
]


@dataclass(frozen=True)
class Examination:
    """The result of ``examine`` on this rank. ``print`` and rich show it as a short table.

    facts: the state of the model, with equal tensors grouped.
    findings: all findings, the bad ones first.
    """

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def parameters(self) -> tuple[TensorFacts, ...]:
        """Lists each parameter under each of its names; an FSDP1 unit is listed as its flat parameter."""
        return self.facts.parameters

    @property
    def buffers(self) -> tuple[TensorFacts, ...]:
        """Lists each buffer under each of its names, including non-persistent buffers."""
        return self.facts.buffers

    @property
    def optimizer(self) -> tuple[OptimizerFacts, ...]:
        """Lists the tensors of the optimizer's state, with equal tensors grouped; empty without an optimizer."""
        return self.facts.optimizer

    @property
    def bad(self) -> tuple[Finding, ...]:
        """Lists the findings that make ``raise_on_bad`` raise."""
        return tuple(finding for finding in self.findings if finding.bad)

    def __str__(self) -> str:
        return render_plain_text(self.facts, self.findings)

    def __rich__(self) -> RenderableType:
        return render(self.facts, self.findings)


class ModelIsBad(RuntimeError):
    """Raised for a model whose next use fails or gives wrong values; ``examination`` has the facts and all findings."""

    def __init__(self, examination: Examination) -> None:
        first, *more = examination.bad
        also = f" Also: {', '.join(finding.kind for finding in more)}." if more else ""
        super().__init__(f"{first.kind}: {first.sentence}{also}")
        self.examination = examination


@run_for_model
def examine(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, raise_on_bad: bool = False
) -> Examination:
    """Reads the device of each parameter and buffer of a live model on this rank, and finds what is wrong.

    Any single rank may call ``examine``, at any time between two calls of the model. It reads attributes and asks the
    current stream whether it is idle; it changes, communicates and copies nothing, and never waits. The model may be
    FSDP2 or FSDP1 in any state, also on the meta device and before the first forward. For a model without FSDP, a
    finding says so.

    model: the FSDP module, or a module around it. Only this rank's part is read; other ranks may be in another state.
        For a transformers model, the examination also lists the tensors that have a different name on the Hub.
    optimizer: the optimizer; pass it only if ``optimizer.step()`` comes next. State on another device than its
        parameter is reported as bad, although a framework may keep the state offloaded between two steps.
    raise_on_bad: whether to raise ModelIsBad, which carries the examination, if a finding is ``bad``. Use it as a guard
        before a forward or an extraction. If only one rank raises, the others wait in their next collective until its
        timeout.

    The severity ``bad`` means that torch fails or gives wrong values when it next uses the model. A ``hazard`` depends
    on the next call, or on something unknown, such as a copy on another stream than the current one. A ``note`` is not
    wrong. An FSDP2 model that is offloaded by hand is a ``note``, because torch can read its shards on the host. An
    FSDP1 model that is offloaded by hand is ``bad``, because every unshard fails an assertion (verl PR 4726).
    """
    examination = _examine(model, optimizer)
    if raise_on_bad and examination.bad:
        raise ModelIsBad(examination)
    return examination


@defer_garbage_collection
def _examine(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Examination:
    everything = reader.read(model)
    contents = everything.drop_without_strides()
    facts = read_facts(model, contents, optimizer)
    findings = [
        *find_unreadable(everything),
        *find_after_load(model, contents, facts, optimizer),
        *find_in_places(facts),
        *find_in_step(contents, facts),
        *find_in_gradients(model, contents),
        *find_in_memory(contents, facts),
    ]
    return Examination(facts, tuple(sorted(findings, key=lambda one: ("bad", "hazard", "note").index(one.severity))))
