"""Compares the uninterrupted (straight) run and the resumed run of one rank.

For a wrong value, the comparison finds the step, parameter or rank of the straight run that has this value.

The state that a checkpoint restores can be seen at the first step after the load: weights, optimizer, schedule, scaler,
averages. The straight run saved this state itself, so the resumed run must start from equal bits, even if the program
is not repeatable. Batches, generators and gradients are drawn or computed, so they can be compared only if the program
is repeatable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fsdp_doctor.resume.records import Digests, RecordedValues, StepRecord
from fsdp_doctor.text import join_some

StateKind: TypeAlias = Literal[
    "run",
    "weights",
    "optimizer",
    "options",
    "schedule",
    "scaler",
    "average",
    "buffers",
    "data",
    "generators",
    "gradients",
    "later",
]
"""Kinds of state that can differ. A difference can cause differences of the later kinds."""
# What a run that does not repeat itself cannot be asked for; all else was loaded from what the straight run saved.
NOT_LOADED: tuple[StateKind, ...] = ("data", "generators", "gradients", "later")
# What depends on how kernels compute.
COMPUTED: tuple[StateKind, ...] = ("gradients", "later")

ResumeSymptom: TypeAlias = Literal[
    "no-step",
    "from-the-beginning",
    "weights-not-loaded",
    "weights-of-another-step",
    "weights-partly-of-another-step",
    "weights-of-another-parameter",
    "weights-rounded",
    "weights-are-the-average",
    "masters-not-loaded",
    "weights-of-no-step",
    "frozen-weights",
    "state-missing",
    "state-not-loaded",
    "state-of-a-dummy-step",
    "step-counters",
    "state-of-another-step",
    "state-of-another-parameter",
    "moments",
    "options",
    "options-not-loaded",
    "parameter-in-another-group",
    "rate-initial",
    "rate-ahead",
    "rate-behind",
    "rate-of-no-step",
    "schedule-changed",
    "scaler-new",
    "scaler-changed",
    "average-new",
    "average",
    "buffers",
    "data-from-the-beginning",
    "data-shifted",
    "data-of-another-epoch",
    "data-unknown",
    "data-first-batch",
    "data-order",
    "generators-of-the-start",
    "generators-of-another-rank",
    "generators",
    "gradients",
    "step-differs",
    "later",
]
"""Differences that a comparison can show; ``causes.toml`` has their known causes."""

# What a scheduler keeps for warnings, and its steps under another count.
_IGNORED_OF_SCHEDULERS = ("_step_count", "_get_lr_called_within_step", "_is_initial", "verbose")
# The sum of batches of a state's moments.
_COUNTERS = ("step", "steps", "_step")


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """A difference between two runs on one rank.

    names: the names of all parameters or other values that differ.
    """

    kind: StateKind
    symptom: ResumeSymptom
    text: str
    names: tuple[str, ...] = ()


def find_unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]


class RankComparison:
    """Compares the records of two runs of one rank.

    straight: the rank's steps in the uninterrupted run, from the first step on.
    resumed: the rank's steps in the run that resumed from the save after step ``at`` of the straight run.
    elsewhere: the generator states of the other ranks at the same step of the straight run, by rank.
    """

    def __init__(
        self,
        straight: Sequence[StepRecord],
        resumed: Sequence[StepRecord],
        at: int,
        elsewhere: Mapping[int, Digests] | None = None,
    ) -> None:
        self._straight, self._resumed, self._at = straight, resumed, at
        self._elsewhere = elsewhere or {}
        self._expected = straight[at]
        self._first = straight[0]

    def list_differences(self) -> list[RunDifference]:
        """Lists the differences at the first step after the save, in the order of ``StateKind``.

        If nothing or only generators differ at this step, the first difference at a later step is added.
        """
        if not self._resumed:
            text = f"the resumed run took no training step; step {self._expected.step} was expected"
            return [RunDifference(kind="run", symptom="no-step", text=text)]
        if self._is_from_beginning():
            text = "everything is as before step 1, and the first batch is batch 1: nothing was resumed"
            return [RunDifference(kind="run", symptom="from-the-beginning", text=text)]
        found = [
            *self._compare_weights(),
            *self._compare_state(),
            *self._compare_options(),
            *self._compare_objects(),
            *self._compare_buffers(),
            *self._compare_data(),
            *self._compare_generators(),
            *self._compare_gradients(),
        ]
        if all(each.kind == "generators" for each in found):
            found += self._compare_later()
        return found

    @property
    def _begun(self) -> StepRecord:
        return self._resumed[0]

    def _is_from_beginning(self) -> bool:
        parts = [(each.weights, each.state, each.batches) for each in (self._begun, self._first)]
        return self._at > 0 and parts[0] == parts[1] and self._begun.weights != self._expected.weights

    def _compare_weights(self) -> Iterator[RunDifference]:
        expected, begun = self._expected, self._begun
        if wrong := find_unlike(expected.others, begun.others):
            yield _make(
                "weights", "frozen-weights", wrong, f"{join_some(wrong)}, which the optimizer does not have, differ"
            )
        wrong = find_unlike(expected.weights, begun.weights)
        if not wrong:
            return
        count = f"{len(wrong)} of {len(expected.weights)} weights"
        whole = self._find_step(lambda record: record.weights == begun.weights)
        part = self._find_step(
            lambda record: all(record.weights.get(name) == begun.weights.get(name) for name in wrong)
        )
        if all(expected.rounded.get(name) == begun.weights.get(name) for name in wrong):
            text = f"the weights before step {self._expected.step} rounded to bfloat16"
            yield _make("weights", "weights-rounded", wrong, f"{count} are {text}: {join_some(wrong, 3)}")
        elif set(wrong) == set(expected.weights) and expected.others and all(" parameter " in name for name in wrong):
            text = "the optimizer's own copies of the weights differ from the model's weights, which are right"
            theirs = f": the copies are from before step {whole.step}" if whole is not None else ""
            yield _make("weights", "masters-not-loaded", wrong, f"{text}{theirs}")
        elif whole is not None:
            symptom: ResumeSymptom = "weights-not-loaded" if whole is self._first else "weights-of-another-step"
            nothing = ": nothing was loaded" if whole is self._first else ""
            text = f"the weights are from before step {whole.step}, not from before step {self._expected.step}{nothing}"
            yield _make("weights", symptom, wrong, text)
        elif average := self._find_average(wrong):
            yield _make("weights", "weights-are-the-average", wrong, f"{count} are those of {average}")
        elif owners := self._find_weights(wrong):
            pairs = join_some([f"{name} is {other}" for name, other in owners.items()], 3)
            yield _make("weights", "weights-of-another-parameter", wrong, f"{count} are another parameter's: {pairs}")
        elif part is not None:
            step = self._expected.step
            text = f"{count} are from before step {part.step}, not from before step {step}: {join_some(wrong, 3)}"
            yield _make("weights", "weights-partly-of-another-step", wrong, text)
        else:
            text = f"{count} do not occur at any step of the straight run: {join_some(wrong, 3)}"
            yield _make("weights", "weights-of-no-step", wrong, text)

    def _find_weights(self, wrong: Sequence[str]) -> dict[str, str]:
        """Maps each wrong weight to the weight whose values it has.

        Returns an empty mapping unless every wrong weight has another weight's values.
        """
        names = {digest: name for name, digest in self._expected.weights.items() if digest != "empty"}
        owners = {name: names.get(self._begun.weights.get(name, ""), name) for name in wrong}
        return owners if all(name != other for name, other in owners.items()) else {}

    def _find_step(self, matches: Any) -> StepRecord | None:
        return next((record for record in self._straight if matches(record)), None)

    def _find_average(self, wrong: Sequence[str]) -> str:
        """Returns the name of the average whose values the wrong weights have; empty if there is none."""
        for name, values in self._expected.averages.items():
            flat = _flatten(values)
            if all(
                any(
                    key == weight or key.endswith("." + weight)
                    for key in flat
                    if flat[key] == self._begun.weights[weight]
                )
                for weight in wrong
                if self._begun.weights.get(weight) not in (None, "empty")
            ):
                return name
        return ""

    def _compare_state(self) -> Iterator[RunDifference]:
        expected, begun = self._expected.state, self._begun.state
        having = [name for name, state in expected.items() if state]
        missing = [name for name in having if not begun.get(name)]
        if missing:
            text = f"{len(missing)} of {len(having)} parameters have no optimizer state"
            groups = {self._begun.groups[name] for name in missing if name in self._begun.groups}
            if groups and all(map(self._is_not_loaded, groups)):
                text += ", and the resumed run did not call load_state_dict of their optimizer"
                yield _make("optimizer", "state-not-loaded", missing, text)
            else:
                yield _make("optimizer", "state-missing", missing, text)
        wrong = [name for name in having if name not in missing and expected[name] != begun[name]]
        if not wrong:
            return
        another = self._find_step(lambda record: all(record.state.get(name) == begun[name] for name in wrong))
        counters = [key for key in _COUNTERS if key in expected[wrong[0]]]
        moments = sorted({key for name in wrong for key in find_unlike(expected[name], begun[name])} - {*counters})
        was, now = ([state[wrong[0]].get(key) for key in counters] for state in (expected, begun))
        text = f"{len(wrong)} of {len(having)} parameters"
        if another is not None:
            yield _make(
                "optimizer",
                "state-of-another-step",
                wrong,
                f"the optimizer's state of {text} is of step {another.step}",
            )
        elif moments and all(begun[name].get(key) in ("zeros", "empty", 0) for name in wrong for key in moments):
            made = f", and their {counters[0]} is {now[0]}, not {was[0]}" if counters else ""
            yield _make("optimizer", "state-of-a-dummy-step", wrong, f"{', '.join(moments)} of {text} are zero{made}")
        elif moments and (whose := self._find_owners(wrong, moments)):
            pairs = join_some([f"{name} has the state of {other}" for name, other in whose.items()], 3)
            text = f"the optimizer's state of {text} is another parameter's: {pairs}"
            yield _make("optimizer", "state-of-another-parameter", wrong, text)
        elif moments:
            yield _make("optimizer", "moments", wrong, f"{', '.join(moments)} of {text} differ: {join_some(wrong, 3)}")
        else:
            yield _make("optimizer", "step-counters", wrong, f"{counters[0]} of {text} is {now[0]}, not {was[0]}")

    def _is_not_loaded(self, group: str) -> bool:
        """Returns whether the resumed run did not call load_state_dict of a group's optimizer.

        group: the name of the group, such as ``optimizer 0 group 1``.
        """
        return group.split()[1] in map(str, self._begun.not_loaded)

    def _find_owners(self, wrong: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
        """Maps each wrong parameter to the parameter whose optimizer state it has.

        Returns an empty mapping unless every wrong parameter has another parameter's state.

        keys: the keys of the optimizer state that are compared.
        """
        expected, begun = self._expected.state, self._begun.state
        owners = {}
        for name in wrong:
            mine = [begun[name].get(key) for key in keys]
            others = (each for each in expected if each != name)
            owner = next((each for each in others if [expected[each].get(key) for key in keys] == mine), None)
            if owner is None:
                return {}
            owners[name] = owner
        return owners

    def _compare_options(self) -> Iterator[RunDifference]:
        """Yields the differences between the options of the same parameters, whatever the order of the parameter
        groups.
        """
        schedules = find_unlike(*self._read_schedules())
        members: dict[tuple[str, str], list[str]] = {}
        for name, group in self._expected.groups.items():
            if (other := self._begun.groups.get(name)) is not None:
                members.setdefault((group, other), []).append(name)
        for (group, other), names in sorted(members.items()):
            was, now = self._expected.options[group], self._begun.options[other]
            wrong = find_unlike(was, now)
            if "lr" in wrong and not schedules:
                yield self._describe_rate(group, was["lr"], now.get("lr"), self._is_not_loaded(other))
            # What a scheduler writes into the group follows from the schedule.
            scheduled = ("lr", "initial_lr", "momentum") if schedules else ("lr", "initial_lr")
            rest = [key for key in wrong if key not in scheduled]
            if rest:
                values = ", ".join(f"{key} is {now.get(key)}, not {was.get(key)}" for key in rest)
                is_moved = group != other and self._expected.options.get(other) == now
                symptom: ResumeSymptom = "parameter-in-another-group" if is_moved else "options"
                where = group if group == other else f"{join_some(names, 3)}, of {group}, now of {other}"
                yield _make("options", symptom, [f"{group} {key}" for key in rest], f"{where}: {values}")

    def _describe_rate(self, group: str, was: Any, now: Any, is_not_loaded: bool) -> RunDifference:
        steps = [each.step for each in self._straight if each.options.get(group, {}).get("lr") == now]
        text = f"the learning rate of {group} is {now}, not {was}"
        if is_not_loaded:
            # For example, dcp.load has filled the tensors of the optimizer's state in place.
            text += ", and the resumed run did not call load_state_dict of this optimizer"
            return _make("options", "options-not-loaded", [group], text)
        if not steps:
            return _make(
                "options", "rate-of-no-step", [group], f"{text}, and no step of the straight run has this rate"
            )
        symptom: ResumeSymptom = (
            "rate-initial"
            if steps[0] == self._first.step
            else "rate-ahead"
            if steps[0] > self._expected.step
            else "rate-behind"
        )
        return _make("options", symptom, [group], f"{text}: it is the rate of step {steps[0]}")

    def _read_schedules(self) -> tuple[RecordedValues, RecordedValues]:
        """Returns the states of the schedulers that both runs have, as (straight run, resumed run).

        Keys that do not affect the learning rate are left out.
        """
        kept = [
            {
                name: {key: value for key, value in values.items() if key not in _IGNORED_OF_SCHEDULERS}
                for name, values in record.schedulers.items()
                if name in self._expected.schedulers and name in self._begun.schedulers
            }
            for record in (self._expected, self._begun)
        ]
        return kept[0], kept[1]

    def _compare_objects(self) -> Iterator[RunDifference]:
        were, are = self._read_schedules()
        for name in find_unlike(were, are):
            yield self._describe_schedule(name, were[name], are[name])
        for name in sorted({*self._expected.scalers} & {*self._begun.scalers}):
            was, now = self._expected.scalers[name], self._begun.scalers[name]
            if wrong := find_unlike(was, now):
                new = self._first.scalers.get(name) == now
                values = ", ".join(f"{key} is {now.get(key)}, not {was.get(key)}" for key in wrong)
                text = f"{name}: {values}" + (", as of a new one" if new else "")
                yield _make("scaler", "scaler-new" if new else "scaler-changed", wrong, text)
        for name in sorted({*self._expected.averages} & {*self._begun.averages}):
            was, now = _flatten(self._expected.averages[name]), _flatten(self._begun.averages[name])
            wrong = find_unlike(was, now)
            if not wrong:
                continue
            before = _flatten(self._first.averages.get(name, {}))
            weights = [*self._begun.weights.values(), *self._begun.buffers.values()]
            if all(now.get(key) in weights or before.get(key) == now.get(key) for key in wrong):
                text = "are the weights themselves, or as before step 1: the average was created again"
                yield _make("average", "average-new", wrong, f"{name}: {join_some(wrong, 3)} {text}")
            else:
                yield _make("average", "average", wrong, f"{name}: {join_some(wrong, 3)} differ")

    def _describe_schedule(self, name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> RunDifference:
        wrong = find_unlike(was, now)
        # Which follows from the others.
        wrong = [key for key in wrong if key != "_last_lr"] or wrong
        values = ", ".join(f"{key} is {now.get(key)}, not {was.get(key)}" for key in wrong)
        symptom: ResumeSymptom = "schedule-changed"
        more = ""
        if {*wrong} & {"last_epoch"}:
            step, right = int(now.get("last_epoch") or 0), int(was["last_epoch"])
            first = self._first.schedulers.get(name, {}).get("last_epoch")
            symptom = "rate-initial" if step == first else "rate-ahead" if step > right else "rate-behind"
            if step == 2 * right:
                more = ": it was counted twice"
        elif {*wrong} == {"_last_lr"}:
            symptom = "rate-of-no-step"
        return _make("schedule", symptom, wrong, f"{name}: {values}{more}")

    def _compare_buffers(self) -> Iterator[RunDifference]:
        if wrong := find_unlike(self._expected.buffers, self._begun.buffers):
            yield _make("buffers", "buffers", wrong, f"{len(wrong)} buffers differ: {join_some(wrong, 3)}")

    def _compare_data(self) -> Iterator[RunDifference]:
        straight = [batch for record in self._straight for batch in record.batches]
        resumed = [batch for record in self._resumed for batch in record.batches]
        begin = sum(len(record.batches) for record in self._straight[: self._at])
        wanted = straight[begin:]
        length = min(len(wanted), len(resumed))
        if self._begun.batches == self._expected.batches or not length or not any(resumed):
            return
        first = resumed[0]
        if first == wanted[0]:
            yield _make("data", "data-order", (), f"the batches after batch {begin + 1} come in another order")
        elif first in straight:
            yield self._describe_place(straight.index(first), begin)
        elif length > 1 and resumed[1:length] == wanted[1:length]:
            text = f"batch {begin + 1} has other values, but the later batches are right"
            yield _make("data", "data-first-batch", (), text)
        else:
            known = any(batch in straight for batch in resumed)
            text = "come in another order" if known else "do not occur in the straight run"
            yield _make("data", "data-unknown", (), f"the batches from batch {begin + 1} on {text}")

    def _describe_place(self, index: int, wanted: int) -> RunDifference:
        """Describes a resumed run that starts with the wrong batch.

        index: the batch of the straight run with which the resumed run starts, counted from 0.
        wanted: the batch with which it should start, counted from 0.
        """
        text = f"the first batch is batch {index + 1} of the straight run, not batch {wanted + 1}"
        for length in self._expected.epochs:
            if wanted >= length and (wanted - index) % length == 0:
                text += f": the same position in another epoch of {length} batches"
                return _make("data", "data-of-another-epoch", (), text)
        symptom: ResumeSymptom = "data-from-the-beginning" if index == 0 else "data-shifted"
        return _make("data", symptom, (), text)

    def _compare_generators(self) -> Iterator[RunDifference]:
        symptom: ResumeSymptom
        was, now = self._expected.generators, self._begun.generators
        after = self._straight[max(self._at - 1, 0) :]
        for name in sorted({*was} & {*now}):
            # Only one that the straight run draws from after the save says something.
            drawn = {record.generators[name] for record in after if name in record.generators}
            if was[name] == now[name] or len(drawn) <= 1:
                continue
            text, symptom = f"the generator of {name} is in another state at the first forward", "generators"
            ranks = [rank for rank, states in self._elsewhere.items() if states.get(name) == now[name]]
            if now[name] == self._first.generators.get(name):
                text, symptom = f"the generator of {name} is as before step 1", "generators-of-the-start"
            elif ranks:
                text, symptom = f"the generator of {name} is that of rank {ranks[0]}", "generators-of-another-rank"
            yield _make("generators", symptom, [name], text)

    def _compare_gradients(self) -> Iterator[RunDifference]:
        if wrong := find_unlike(self._expected.gradients, self._begun.gradients):
            count = f"{len(wrong)} of {len(self._expected.gradients)} gradients differ"
            text = f"{count} at step {self._expected.step}, from equal weights, batches and generators"
            yield _make("gradients", "gradients", wrong, text)

    def _compare_later(self) -> Iterator[RunDifference]:
        """Yields at most one difference: the first difference after the first step."""
        for was, now in zip(self._straight[self._at + 1 :], self._resumed[1:], strict=False):
            for name in ("weights", "state", "batches", "options_of", "schedulers", "scalers", "averages", "gradients"):
                if (was.ended and name != "weights") or (now.ended and name != "weights"):
                    continue
                if getattr(was, name) == getattr(now, name):
                    continue
                if name == "weights" and was.step == self._expected.step + 1:
                    wrong = find_unlike(was.weights, now.weights)
                    text = (
                        f"step {was.step - 1} computes other weights from equal weights, gradients and optimizer state"
                    )
                    yield _make("later", "step-differs", wrong, f"{text}: {join_some(wrong, 3)}")
                else:
                    yield _make("later", "later", (), f"{name.partition('_')[0]} first differ at step {was.step}")
                return


def _make(kind: StateKind, symptom: ResumeSymptom, names: Sequence[str], text: str) -> RunDifference:
    return RunDifference(kind=kind, symptom=symptom, text=text, names=tuple(names))


def _flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flattens nested mappings into one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def find_unrepeatable(one: Sequence[StepRecord], other: Sequence[StepRecord]) -> str:
    """Describes the first difference between two runs of the same command on one rank; empty if there is none."""
    for was, now in zip(one, other, strict=False):
        for name in ("weights", "batches", "gradients"):
            if getattr(was, name) != getattr(now, name):
                return f"{name} at step {was.step}"
    return ""
