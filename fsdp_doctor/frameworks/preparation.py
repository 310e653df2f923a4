"""Whether a framework wraps a model rightly: it holds the plain model's weights, and a step changes what trains."""

from __future__ import annotations

from torch import nn

from fsdp_doctor.case import held_pieces, reference
from fsdp_doctor.case.findings import Findings, compare
from fsdp_doctor.case.loaded_state import num_optimized
from fsdp_doctor.case.reference import Reference
from fsdp_doctor.frameworks.adapter import FrameworkSession
from fsdp_doctor.frameworks.framework_run import FrameworkRun
from fsdp_doctor.verdict.records import Problem


class PreparationRun(FrameworkRun):
    """The path ``prepare``: the first step is a part of building, so that one which fails is a crash of it."""

    takes_kept = False

    def _train(self, session: FrameworkSession, kept: bool) -> None:
        before = Reference()

        def at(number: int) -> None:
            nonlocal before
            self._recorder.enter("reference")
            now = reference.take(session.model, None, self._runtime)
            self._recorder.enter("verify")
            if number == 0:
                before = now
                self._check_weights_of(session)
                self._recorder.enter("build")
            else:
                self._check_training(session, before, now)

        session.train(1, self._between_steps(at))

    def _check_weights_of(self, session: FrameworkSession) -> None:
        found = Findings()
        plain = session.plain.module().state_dict()
        held = held_pieces.of_model(session.model, plain)
        for piece in held:
            if piece.expected is None:
                found.note("incomplete", "not a name of the plain model", piece.name)
            elif difference := compare(piece.held.cpu(), piece.expected):
                found.note("wrong", f"not the plain model's: {difference}", piece.name)
        for piece in held:
            promised = session.shards_on if isinstance(piece.shown, nn.Parameter) else None
            if promised is not None and piece.held.device != promised:
                found.note("misplaced", f"on {piece.held.device} where {promised} was asked for", piece.name)
        names = {name for piece in held for name in piece.names}
        for name in sorted(plain.keys() - names):
            found.note("incomplete", "of the plain model, not in the wrapped one", name)
        self._recorder.add(problems=found.problems(), num_tensors=len(held))

    def _check_training(self, session: FrameworkSession, before: Reference, now: Reference) -> None:
        """What trains must be other values after a step, on some rank at least, and nothing else may be."""
        trains = {name for name, parameter in session.plain.module().named_parameters() if parameter.requires_grad}
        found = Findings()
        for name, values in now.full.items():
            changed = bool(compare(values, before.full[name]))
            if name in trains and not changed:
                found.note("poisoned", "a training step did not change", name)
            elif name not in trains and changed and not _is_tied_to(name, trains, now):
                found.note("poisoned", "a training step changed what is frozen", name)
        self._recorder.add(problems=found.problems())
        held, total = num_optimized(session.optimizer, session.model)
        if trains and not held:
            detail = f"the optimizer holds {held} of the model's {total} parameters"
            self._recorder.add(problems=(Problem(kind="poisoned", detail=detail),))


def _is_tied_to(name: str, trains: set[str], now: Reference) -> bool:
    return any(now.full[other] is now.full[name] for other in trains)
