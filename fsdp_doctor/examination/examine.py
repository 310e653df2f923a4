"""``examine``: the facts of a live model on one rank, and its findings."""

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
    """The result of ``examine`` on this rank, which ``print`` and rich show as a short table.

    facts: the state of the model, with the tensors that are alike together. findings: the bad ones first.
    """

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def parameters(self) -> tuple[TensorFacts, ...]:
        """Lists each parameter under each of its names; those of FSDP1 units as flat parameters."""
        return self.facts.parameters

    @property
    def buffers(self) -> tuple[TensorFacts, ...]:
        """Lists each buffer under each of its names, including buffers that no state dict has."""
        return self.facts.buffers

    @property
    def optimizer(self) -> tuple[OptimizerFacts, ...]:
        """The tensors of the optimizer's state, grouped where they are alike; empty without an optimizer."""
        return self.facts.optimizer

    @property
    def bad(self) -> tuple[Finding, ...]:
        """The findings for which ``raise_on_bad`` raises."""
        return tuple(finding for finding in self.findings if finding.bad)

    def __str__(self) -> str:
        return render_plain_text(self.facts, self.findings)

    def __rich__(self) -> RenderableType:
        return render(self.facts, self.findings)


class ModelIsBad(RuntimeError):
    """The model is in a state in which it fails; ``examination`` has the facts and all findings."""

    def __init__(self, examination: Examination) -> None:
        first, *more = examination.bad
        also = f" Also: {', '.join(finding.kind for finding in more)}." if more else ""
        super().__init__(f"{first.kind}: {first.sentence}{also}")
        self.examination = examination


@run_for_model
def examine(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, raise_on_bad: bool = False
) -> Examination:
    """Reads where each parameter and buffer of a live model lies on this rank, and finds what is wrong with that.

    Any one rank may call it alone, at any time between two calls of the model: it reads attributes and asks the current
    stream whether it is idle; nothing is changed, communicated, copied or waited for. The model may be FSDP2 or FSDP1
    in any state, also on the meta device and before the first forward; of another model it says that it is not FSDP.

    model: FSDP's module, or one around it. Another rank's part of it may be in another state.
    For a transformers model it says which names the Hub would have for its tensors, if these are others.

    optimizer: pass it if ``optimizer.step()`` comes next: state on another device than its parameter is bad then, and
        fine where a framework keeps it offloaded between two steps.
    raise_on_bad: raises ModelIsBad, which carries the examination, if a finding is ``bad``: torch fails or gives other
        values when it next uses the model. For a guard before a forward or an extraction. A rank that raises alone
        leaves the others in their next collective until its timeout.

    An FSDP2 model that is offloaded by hand is a ``note``: its shards can be read where they are. An FSDP1 model that
    is offloaded by hand is ``bad``: every unshard asserts (verl PR 4726). A ``hazard`` depends on what comes next, or
    on something unknown: whether a copy is under way is known for this thread's current stream alone.
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
