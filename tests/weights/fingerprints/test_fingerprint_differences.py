"""Every kind of mistake is named, and fingerprints that cannot be compared are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from fsdp_doctor import (
    FingerprintError,
    Fingerprints,
    FingerprintSums,
    TensorPart,
    combine_fingerprints,
    compare_fingerprints,
    fingerprint,
    fingerprint_tensors,
    fingerprint_variants,
    full_tensors,
)

Tensors = dict[str, torch.Tensor]


class Layer(nn.Module):
    """gate_up: fused, both halves of its first dim. experts, deep: of three dims. head and embed are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.gate = nn.Linear(6, 10, bias=False)
        self.up = nn.Linear(6, 10, bias=False)
        self.gate_up = nn.Parameter(torch.randn(20, 6))
        self.experts = nn.Parameter(torch.randn(3, 4, 6))
        self.square = nn.Linear(8, 8)
        self.norm = nn.Parameter(torch.randn(7))
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.embed.weight
        self.deep = nn.Parameter(torch.randn(3, 4, 5))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Layer()


@pytest.fixture
def held(model: nn.Module) -> Tensors:
    """Returns what an engine holds if all went well."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def kinds(model: nn.Module, held: Tensors, **options: object) -> dict[str, str]:
    found = compare_fingerprints(fingerprint(model), fingerprint_tensors(held), **options)  # type: ignore[arg-type]
    return {difference.name: difference.kind for difference in found}


MISTAKES: dict[str, tuple[Callable[[Tensors], object], dict[str, str]]] = {
    "none": (lambda held: None, {}),
    "another name": (lambda held: held.update(rotary=held.pop("norm")), {"norm": "missing", "rotary": "superfluous"}),
    "a tied name is missing": (lambda held: held.pop("head.weight"), {}),
    "a tied name differs": (lambda held: held.update({"head.weight": torch.randn(20, 6)}), {"head.weight": "untied"}),
    "both tied names are missing": (
        lambda held: (held.pop("head.weight"), held.pop("embed.weight")),
        {"embed.weight": "missing", "head.weight": "missing"},
    ),
    "swapped slices of a fused tensor": (
        lambda held: held.update({"gate.weight": held["up.weight"], "up.weight": held["gate.weight"]}),
        {"gate.weight": "swapped", "up.weight": "swapped"},
    ),
    "another dtype": (lambda held: held.update(norm=held["norm"].bfloat16()), {"norm": "dtype"}),
    "another shape": (lambda held: held.update(experts=held["experts"].view(4, 3, 6)), {"experts": "shape"}),
    "fewer rows": (lambda held: held.update({"up.weight": held["up.weight"][:9]}), {"up.weight": "shape"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_tensors(name: str, model: nn.Module, held: Tensors) -> None:
    make, expected = MISTAKES[name]
    make(held)
    assert kinds(model, held) == expected


CHANGES: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda t: t.view(-1).view(torch.int32)[3:4].bitwise_xor_(1),
    lambda t: t.view(-1).view(torch.int32)[3:4].bitwise_xor_(-(1 << 31)),
    lambda t: t.view(-1)[:2].copy_(t.view(-1)[:2].flip(0)),
    lambda t: t.copy_(t.flip(0)),
    lambda t: t.neg_(),
    lambda t: t.copy_(t.roll(1)),
)


def test_changed_bits_swapped_elements_and_permuted_rows_are_detected(model: nn.Module, held: Tensors) -> None:
    for name, change in itertools.product(("gate.weight", "experts", "norm"), CHANGES):
        changed = {key: tensor.clone() for key, tensor in held.items()}
        change(changed[name])
        assert kinds(model, changed) == {name: "values"}


def test_shards_that_changed_places_are_seen(held: Tensors) -> None:
    whole = held["gate.weight"]
    first, second = whole[:5], whole[5:]
    for parts, equal in (((first, second), True), ((second, first), False)):
        found = combine_fingerprints(
            fingerprint_tensors([("gate.weight", TensorPart(part, whole.shape, (5 * rank, 0)))])
            for rank, part in enumerate(parts)
        )
        assert (found.tensors == fingerprint_tensors({"gate.weight": whole}).tensors) == equal


def test_weights_that_the_engine_ties_and_the_trainer_does_not_are_named(model: nn.Module, held: Tensors) -> None:
    model.head.weight = nn.Parameter(torch.randn(20, 6))
    held["head.weight"] = held["embed.weight"]
    assert kinds(model, held) == {"head.weight": "tied"}


def test_stale_tensors_are_known_by_the_step_that_they_are_of(model: nn.Module, held: Tensors) -> None:
    history = [fingerprint(model)]
    for step in range(2):
        with torch.no_grad():
            model.gate.weight += 1
            model.norm += step
        history.append(fingerprint(model))
    found = compare_fingerprints(history[-1], fingerprint_tensors(held), history=history[:-1])
    assert {one.name: (one.kind, one.detail[-14:]) for one in found} == {
        "gate.weight": ("stale", "2 steps before"),
        "norm": ("stale", " 1 step before"),  # the first step did not change it
    }


def test_a_base_weight_is_told_from_a_merged_one(model: nn.Module, held: Tensors) -> None:
    base = fingerprint(model)
    with torch.no_grad():
        model.gate.weight += 1
    assert kinds(model, held, base=base) == {"gate.weight": "base"}


def test_with_variants_from_the_trainer_the_mistake_is_named(model: nn.Module, held: Tensors) -> None:
    held["gate_up"] = held["gate_up"].roll(10, 0)
    held["square.weight"] = held["square.weight"].t().contiguous()
    held["experts"] = held["experts"].transpose(1, 2).contiguous()
    held["deep"] = held["deep"].roll(2, 1)
    held["norm"] = held["norm"].bfloat16().float()
    held["up.weight"] = held["up.weight"].to(torch.float8_e4m3fn).float()
    held["gate.weight"] = torch.randn(10, 6)
    plain = kinds(model, held)
    assert set(plain.values()) == {"values", "shape"}
    variants = fingerprint_variants(model, plain)
    found = compare_fingerprints(fingerprint(model), fingerprint_tensors(held), variants=variants)
    assert {str(one) for one in found} == {
        "gate_up: the halves of dim 0 are swapped",
        "square.weight: transposed",
        "experts: transposed",
        "deep: the halves of dim 1 are swapped",
        "norm: cast twice: to bfloat16 and back",
        "up.weight: cast twice: to float8_e4m3fn and back",
        "gate.weight: the values are different",
    }


def test_trailing_zeros_are_distinguished_from_equal_values_in_another_shape() -> None:
    rows, norm = torch.randn(5, 4), torch.ones(3)
    wanted = fingerprint_tensors({"head": rows, "norm": norm})
    padded = fingerprint_tensors({"head": torch.cat([rows, torch.zeros(3, 4)]), "norm": norm})
    reshaped = fingerprint_tensors({"head": rows.view(4, 5), "norm": norm})
    (of_padding,), (of_shape,) = compare_fingerprints(wanted, padded), compare_fingerprints(wanted, reshaped)
    assert str(of_padding) == "head: the same values, except zeros at the end, in the shape [8, 4], not [5, 4]"
    assert str(of_shape) == "head: the same values in the shape [4, 5], not [5, 4]"


def test_zeros_that_are_shorter_or_of_another_dtype_differ() -> None:
    assert compare_fingerprints(*(fingerprint_tensors({"a": torch.zeros(n), "b": torch.ones(1)}) for n in (3, 4)))
    of_dtypes = (fingerprint_tensors({"a": torch.zeros(3, dtype=dtype)}) for dtype in (torch.float32, torch.int32))
    assert compare_fingerprints(*of_dtypes)


def test_fingerprints_of_another_model_are_refused(model: nn.Module, held: Tensors) -> None:
    with pytest.raises(FingerprintError, match="different models"):
        kinds(model, {f"model.{name}": tensor for name, tensor in held.items()})
    with pytest.raises(FingerprintError, match="none of the 10 common tensors has the same size"):
        kinds(model, {name: torch.zeros(tensor.numel() + 1) for name, tensor in held.items()})


def test_fingerprints_of_a_part_of_the_ranks_are_refused(model: nn.Module, held: Tensors) -> None:
    part = fingerprint_tensors(list((held | {"head.weight": TensorPart(held["head.weight"][:7], (20, 6))}).items()))
    with pytest.raises(FingerprintError, match=r"only 42 of 120 elements of head.weight were summed"):
        compare_fingerprints(fingerprint(model), part)
    with pytest.raises(FingerprintError, match="parts of the tensor overlap"):
        combine_fingerprints([part, fingerprint_tensors({"head.weight": held["head.weight"]})])


def test_fingerprints_that_are_summed_otherwise_are_refused(model: nn.Module) -> None:
    own = fingerprint(model)
    older = dataclasses.replace(own, version=own.version + 1)
    for compare in (
        lambda: compare_fingerprints(own, older),
        lambda: compare_fingerprints(own, own, history=[older]),
        lambda: combine_fingerprints([own, older]),
        lambda: Fingerprints.from_json(older.to_json()),
    ):
        with pytest.raises(FingerprintError, match="make both with the same fsdp-doctor"):
            compare()


def test_what_is_written_is_read_again(model: nn.Module) -> None:
    own = fingerprint(model)
    assert Fingerprints.from_json(own.to_json()) == own
    for text, words in (
        ("{", "truncated"),
        ("{}", "`format`"),
        (own.to_json().replace("fsdp-doctor fingerprints", "other"), r"\$\.format"),
        (own.to_json().replace('"sum": "', '"sum": "0'), r"\.sum"),
        (own.to_json().replace('"dtype"', '"other"'), "`dtype`"),
    ):
        with pytest.raises(FingerprintError, match=words):
            Fingerprints.from_json(text)


def test_a_part_that_does_not_lie_in_its_tensor_is_refused() -> None:
    for part in (
        TensorPart(torch.ones(3), (2,)),
        TensorPart(torch.ones(3), (4,), (2,)),
        TensorPart(torch.ones(3), (1, 3)),
    ):
        with pytest.raises(FingerprintError, match="part"):
            fingerprint_tensors({"a": part})


def test_an_unknown_name_has_no_variants(model: nn.Module) -> None:
    with pytest.raises(FingerprintError, match="the model has no other"):
        fingerprint_variants(model, ["other"])


def test_watched_tensors_with_tied_names_are_noted_but_reused_buffers_are_not(model: nn.Module) -> None:
    sums = FingerprintSums()
    assert len(list(sums.watch(full_tensors(model)))) == 10
    assert sums.fingerprints() == fingerprint(model)
    buffer = torch.zeros(3)

    def filled() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in (("a", 1.0), ("b", 2.0)):
            yield name, buffer.fill_(value)

    sums = FingerprintSums()
    assert len(list(sums.watch(filled()))) == 2
    found = sums.fingerprints()
    assert found.tied == ()
    assert found.tensors == fingerprint_tensors({"a": torch.ones(3), "b": torch.full((3,), 2.0)}).tensors


def test_the_number_of_elements_reveals_duplicate_and_partial_arrivals(model: nn.Module, held: Tensors) -> None:
    trainer = fingerprint(model)
    whole, twice, part = FingerprintSums(), FingerprintSums(), FingerprintSums()
    whole.add_bucket(held.items())
    assert compare_fingerprints(trainer, whole.fingerprints()) == []
    twice.add_bucket(held.items())
    twice.add_bucket([("gate.weight", torch.zeros_like(held["gate.weight"]))])
    with pytest.raises(FingerprintError, match=r"gate.weight has .* elements, but .* were summed"):
        twice.fingerprints()
    rows = {name: TensorPart(tensor[:1], tensor.shape) for name, tensor in held.items() if name == "gate.weight"}
    part.add_bucket((held | rows).items())
    with pytest.raises(FingerprintError, match=r"only \d+ of \d+ elements of gate.weight were summed"):
        compare_fingerprints(trainer, part.fingerprints())


def test_what_has_no_counterpart_is_neither_equal_nor_missing(model: nn.Module, held: Tensors) -> None:
    trainer = fingerprint(model)
    reasons = {"gate.weight": "swizzled for a kernel", "norm": "quantized"}
    del held["gate.weight"]
    found = compare_fingerprints(trainer, fingerprint_tensors(held), not_comparable=reasons)
    assert {one.name: one.kind for one in found} == dict.fromkeys(reasons, "not comparable")
    with pytest.raises(FingerprintError, match="other"):
        compare_fingerprints(trainer, fingerprint_tensors(held), not_comparable={"other": "quantized"})


def test_a_cast_on_the_way_to_another_dtype_is_named(model: nn.Module, held: Tensors) -> None:
    held = {name: tensor.to(torch.bfloat16) for name, tensor in held.items()}
    held["gate.weight"] = model.gate.weight.detach().half().bfloat16()
    held["norm"] = model.norm.detach().to(torch.float8_e5m2).bfloat16()
    assert not torch.equal(held["gate.weight"], model.gate.weight.bfloat16())
    trainer = fingerprint(model, dtype=torch.bfloat16)
    variants = fingerprint_variants(model, ["gate.weight", "norm"], dtype=torch.bfloat16)
    assert {str(one) for one in compare_fingerprints(trainer, fingerprint_tensors(held), variants=variants)} == {
        "gate.weight: cast twice: to float16 first",
        "norm: cast twice: to float8_e5m2 first",
    }


def test_no_parts_do_not_combine_to_a_fingerprint() -> None:
    """The fingerprint would be that of any other model without tensors."""
    for nothing in ([], iter(())):
        with pytest.raises(FingerprintError, match="there are no fingerprints to combine"):
            combine_fingerprints(nothing)


def test_a_conjugate_view_has_its_own_fingerprint_and_no_tie() -> None:
    tensor = torch.randn(4, 6, dtype=torch.complex64)
    lazy, values = {"a": tensor, "b": tensor.conj()}, {"a": tensor, "b": tensor.conj().resolve_conj()}
    assert fingerprint_tensors(lazy) == fingerprint_tensors(values)
    assert fingerprint_tensors({"a": tensor.conj().imag}) == fingerprint_tensors({"a": -tensor.imag})
    part = TensorPart(tensor.conj()[1:2], shape=(4, 6), offsets=(1, 0))
    assert fingerprint_tensors({"b": part}) == fingerprint_tensors(
        {"b": TensorPart(values["b"][1:2], shape=(4, 6), offsets=(1, 0))}
    )


def test_one_memory_that_is_read_as_two_dtypes_is_not_tied() -> None:
    tensor = torch.ones(4)
    assert fingerprint_tensors({"a": tensor, "b": tensor.view(torch.int32)}).tied == ()
    assert fingerprint_tensors({"a": tensor, "b": tensor.view(4)}).tied == (("a", "b"),)


_ONE = fingerprint_tensors({"a": torch.ones(2)})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: compare_fingerprints(None, _ONE), "the fingerprints of the trainer are not Fingerprints: NoneType"),
        (lambda: compare_fingerprints(_ONE, {}), "the fingerprints of the engine are not Fingerprints: dict"),
        (lambda: compare_fingerprints(_ONE, _ONE, history=[None]), "of 1 steps before are not Fingerprints"),
        (lambda: compare_fingerprints(_ONE, _ONE, history=_ONE), "a history is a sequence of Fingerprints"),
        (lambda: compare_fingerprints(_ONE, _ONE, base={}), "the fingerprints of the base are not Fingerprints: dict"),
        (lambda: combine_fingerprints([_ONE, None]), "fingerprints to be combined are not Fingerprints: NoneType"),
        (lambda: combine_fingerprints(_ONE), "the fingerprints of several ranks, not of one"),
        (lambda: fingerprint_tensors({"a": "b"}), "a is not a tensor: str"),
        (lambda: fingerprint_tensors({"a": TensorPart("b", shape=(2,), offsets=(0,))}), "a is not a tensor: str"),
        (lambda: fingerprint_tensors([torch.ones(2)]), "the name of a tensor must be a string, not Tensor"),
        (lambda: fingerprint_tensors(nn.Linear(2, 2)), "a mapping or pairs of a name and a tensor, not Linear"),
    ],
)
def test_what_is_no_fingerprint_and_no_tensor_is_refused_with_a_sentence(
    call: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        call()
