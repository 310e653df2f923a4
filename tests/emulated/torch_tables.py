"""PyTorch's own tables of operators, modules, optimizers and errors, on the emulated device against the CPU.

    python -m tests.emulated.torch_tables [--dtypes float32,bfloat16] [--one-in 10] [--samples 1]

Every sample runs on both, forward, backward and in place, and is compared bit for bit, strides too. Prints the counts
by table and dtype, and a line for each entry that is not equal; exit code 1 if one of them is not among the
exceptions in ``torch_tables.toml``, which says why each is as it is. It needs ``expecttest``, as torch's tables do.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import fsdp_doctor.emulated  # noqa: F401, which registers the device

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEVICE = "emulated"
DTYPES = (
    *("float32", "float64", "bfloat16", "float16"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("complex32", "complex64", "complex128"),
)
EXCEPTIONS = pathlib.Path(__file__).with_name("torch_tables.toml")

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
Table = Literal["forward", "backward", "in place", "sparse", "sparse backward", "error", "module", "optimizer"]
# skipped: the CPU raises too, or the entry is not for this dtype.
Outcome = Literal["equal", "rounding", "differs", "raises", "skipped"]
_WORST: tuple[Outcome, ...] = ("skipped", "equal", "rounding", "differs", "raises")


@dataclasses.dataclass(frozen=True)
class Entry:
    table: Table
    name: str
    dtype: str
    outcome: Outcome
    detail: str = ""

    @property
    def is_unequal(self) -> bool:
        return self.outcome in ("rounding", "differs", "raises")


# Comparing


def copied(value: Any, device: str) -> Any:
    """Copies the tensors to the device, as leaves of their own, with the strides and the memory that they have."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _copied_tensor(leaf.detach(), device).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return torch.device(device)
        return leaf

    return tree_map(move, value)


def _copied_tensor(tensor: Tensor, device: str) -> Tensor:
    if tensor.layout != torch.strided:
        return tensor.to(device, copy=True)
    if tensor.is_conj() or tensor.is_neg():
        undone = tensor.conj() if tensor.is_conj() else torch._neg_view(tensor)
        again = _copied_tensor(undone, device)
        return again.conj() if tensor.is_conj() else torch._neg_view(again)
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return memory.to(device, copy=True).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().flatten()
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _parts(sparse: Tensor) -> tuple[Any, ...]:
    """The dense tensors of a sparse one, and what is beside them."""
    if sparse.layout == torch.sparse_coo:
        return sparse._indices(), sparse._values(), sparse.is_coalesced()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


def compared(actual: Any, expected: Any) -> tuple[Outcome, str]:
    ours, theirs = tree_leaves(actual), tree_leaves(expected)
    if len(ours) != len(theirs):
        return "differs", f"{len(ours)} results, not {len(theirs)}"
    worst: tuple[Outcome, str] = ("equal", "")
    for one, other in zip(ours, theirs, strict=True):
        outcome = _compared_leaf(one, other)
        worst = max(worst, outcome, key=lambda each: _WORST.index(each[0]))
    return worst


def _compared_leaf(one: Any, other: Any) -> tuple[Outcome, str]:
    if not isinstance(other, Tensor):
        same = type(one) is type(other) and (one == other or one != one)
        return ("equal", "") if same else ("differs", f"{one} is not {other}"[:80])
    for what in ("dtype", "shape", "layout"):
        if getattr(one, what) != getattr(other, what):
            return "differs", f"{what} {getattr(one, what)}, not {getattr(other, what)}"
    if other.layout != torch.strided:
        return compared(_parts(one), _parts(other))
    if one.stride() != other.stride():
        return "differs", f"strides {one.stride()}, not {other.stride()}"
    if torch.equal(_bits(one), _bits(other)):
        return "equal", ""
    close = torch.allclose(one.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)
    return ("rounding", "") if close else ("differs", "values")


def outcome_of(run: Callable[[str], Any]) -> tuple[Outcome, str]:
    """``run`` gets a device, and is seeded alike on both."""
    try:
        torch.manual_seed(0)
        expected = run("cpu")
    except Exception:
        return "skipped", "the CPU raises"
    try:
        torch.manual_seed(0)
        actual = run(DEVICE)
    except Exception as error:
        return "raises", f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return compared(actual, expected)


# The tables


def operators(dtype: torch.dtype, *, one_in: int = 1, samples: int | None = None) -> Iterator[Entry]:
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db[::one_in]:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        given = _samples(op.sample_inputs, dtype, samples)
        yield _of_samples("forward", name, dtype, given, lambda s, op=op: _forward(op.op, s))
        has_backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        if has_backward:
            graded = _samples(op.sample_inputs, dtype, samples, requires_grad=True)
            yield _of_samples("backward", name, dtype, graded, lambda s, op=op: _backward(op, s))
        if op.inplace_variant is not None:
            yield _of_samples("in place", name, dtype, given, lambda s, op=op: _in_place(op, s))
        for layout in LAYOUTS:
            named, make = f"{name} {str(layout)[6:]}", partial(op.sample_inputs_sparse, layout)
            if given := _samples(make, dtype, samples):
                yield _of_samples("sparse", named, dtype, given, lambda s, op=op: _forward(op.op, s))
                graded = _samples(make, dtype, samples, requires_grad=True) if has_backward else []
                yield _of_samples("sparse backward", named, dtype, graded, lambda s, op=op: _backward(op, s))


Sample = Any  # torch's SampleInput: input, args, kwargs
Runs = Callable[[Sample], Callable[[str], Any]]


def _samples(
    make: Callable[..., Iterable[Sample]], dtype: torch.dtype, most: int | None, requires_grad: bool = False
) -> list[Sample]:
    try:
        torch.manual_seed(0)
        return list(islice(make("cpu", dtype, requires_grad=requires_grad), most))
    except Exception:
        return []


def _of_samples(table: Table, name: str, dtype: torch.dtype, samples: Sequence[Sample], runs: Runs) -> Entry:
    outcomes = [outcome_of(runs(sample)) for sample in samples]
    worst = max(outcomes, key=lambda each: _WORST.index(each[0]), default=("skipped", "no samples"))
    return Entry(table, name, str(dtype)[6:], *worst)


def _arguments(sample: Sample, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return copied(((sample.input, *sample.args), dict(sample.kwargs)), device)


def _forward(op: Callable[..., Any], sample: Sample) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        args, kwargs = _arguments(sample, device)
        with torch.no_grad():
            return op(*args, **kwargs)

    return run


def _in_place(op: Any, sample: Sample) -> Callable[[str], Any]:
    return _forward(op.inplace_variant, sample)


def _backward(op: Any, sample: Sample) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        args, kwargs = _arguments(sample, device)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        output = op.op(*args, **kwargs)
        output = sample.output_process_fn_grad(output)
        outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        ones = [torch.ones_like(each) for each in outputs]
        return torch.autograd.grad(outputs, leaves, ones, allow_unused=True)

    return run


def errors(*, one_in: int = 1) -> Iterator[Entry]:
    """Tells of each error that torch expects of an operator whether it is raised, with that text."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in [op for op in op_db if op.error_inputs_func is not None][::one_in]:
        for index, expected in enumerate(op.error_inputs(DEVICE)):
            sample = (expected.sample_input.input, *expected.sample_input.args), expected.sample_input.kwargs
            error = _error_of(op, sample)
            outcome: tuple[Outcome, str]
            if error is not None:
                outcome = _as_expected(error, expected)
            elif _error_of(op, tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, sample)) is None:
                outcome = ("skipped", "the CPU raises nothing either")
            else:
                outcome = ("differs", f"nothing raised, not {expected.error_regex}"[:120])
            yield Entry("error", f"{op.name}[{index}]", "", *outcome)


def _error_of(op: Any, sample: tuple[Any, Any]) -> Exception | None:
    args, kwargs = sample
    try:
        op.op(*args, **kwargs)
    except Exception as error:
        return error
    return None


def _as_expected(error: Exception, expected: Any) -> tuple[Outcome, str]:
    import re

    if isinstance(error, expected.error_type) and re.search(expected.error_regex, str(error)):
        return "equal", ""
    return "differs", f"{type(error).__name__}: {str(error)[:80]}, not {expected.error_regex[:60]}".replace("\n", " ")


def modules(dtype: torch.dtype, *, one_in: int = 1, samples: int | None = None) -> Iterator[Entry]:
    from torch.testing._internal.common_modules import module_db

    for info in [info for info in module_db if dtype in info.dtypes][::one_in]:
        for training in (False, True):
            given = info.module_inputs_func(info, "cpu", dtype, requires_grad=False, training=training)
            outcomes = [outcome_of(_module(info, each, training, dtype)) for each in islice(given, samples)]
            worst = max(outcomes, key=lambda each: _WORST.index(each[0]), default=("skipped", "no samples"))
            yield Entry("module", f"{info.name}{' training' if training else ''}", str(dtype)[6:], *worst)


def _module(info: Any, given: Any, training: bool, dtype: torch.dtype) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        made = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).train(training)
        inputs = (given.forward_input.args, given.forward_input.kwargs)
        args, kwargs = copied(inputs, device)
        torch.manual_seed(0)
        output = made.to(device, dtype)(*args, **kwargs)
        graded = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        wanted = [parameter for parameter in made.parameters() if parameter.requires_grad]
        ones = [torch.ones_like(each) for each in graded]
        gradients = torch.autograd.grad(graded, wanted, ones, allow_unused=True) if graded and wanted else ()
        return output, gradients

    return run


def optimizers() -> Iterator[Entry]:
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        # The default of the CPU is one tensor after the other, that of the device is foreach: each is asked for.
        for kind in [kind for kind in ("", "foreach", "fused") if not kind or kind in info.supported_impls]:
            given = info.optim_inputs_func(device="cpu")
            outcomes = [outcome_of(_optimizer(info, each, kind)) for each in given]
            worst = max(outcomes, key=lambda each: _WORST.index(each[0]), default=("skipped", "no samples"))
            yield Entry("optimizer", f"{info.name} {kind}".strip(), "float32", *worst)


def _optimizer(info: Any, given: Any, kind: str) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        made = torch.nn.Linear(4, 3).to(device)
        inputs = torch.randn(5, 4).to(device)
        options = copied(given.kwargs, device)
        if "foreach" in info.supported_impls:
            options |= {"foreach": False} | ({kind: True} if kind else {})
        optimizer = info.optim_cls(made.parameters(), **options)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = made(inputs).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return list(made.parameters())

    return run


# The command


def exceptions() -> dict[str, str]:
    """Returns why an entry is not equal, by ``table name``, or by ``name`` for every table."""
    return {name: why for reasons in tomllib.loads(EXCEPTIONS.read_text()).values() for name, why in reasons.items()}


def unexpected(entries: Sequence[Entry], known: dict[str, str]) -> list[Entry]:
    def is_known(entry: Entry) -> bool:
        names = (entry.name, f"{entry.table} {entry.name}", f"{entry.name} {entry.dtype}")
        return any(name in known for name in names)

    return [entry for entry in entries if entry.is_unequal and not is_known(entry)]


def run_tables(dtypes: Sequence[str], one_in: int, samples: int | None) -> Iterator[Entry]:
    for dtype in dtypes:
        yield from operators(getattr(torch, dtype), one_in=one_in, samples=samples)
        yield from modules(getattr(torch, dtype), one_in=one_in, samples=samples)
    yield from errors(one_in=one_in)
    yield from optimizers()


def summary(entries: Sequence[Entry]) -> str:
    counts = Counter((entry.table, entry.dtype, entry.outcome) for entry in entries)
    outcomes: tuple[Outcome, ...] = ("equal", "rounding", "differs", "raises", "skipped")
    lines = [f"{'table':15} {'dtype':10} " + " ".join(f"{outcome:>9}" for outcome in outcomes)]
    for table, dtype in dict.fromkeys((entry.table, entry.dtype) for entry in entries):
        numbers = " ".join(f"{counts[table, dtype, outcome]:9}" for outcome in outcomes)
        lines.append(f"{table:15} {dtype:10} {numbers}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of the operators and modules; all by default")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="every Nth entry of a table")
    parser.add_argument("--samples", type=int, help="at most so many of an entry")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the samples are small
    known = exceptions()
    entries = []
    for entry in run_tables(options.dtypes.split(","), options.one_in, options.samples):
        entries.append(entry)
        if entry.is_unequal:
            mark = "NEW " if unexpected([entry], known) else "    "
            print(
                f"{mark}{entry.table:15} {entry.name:44} {entry.dtype:10} {entry.outcome:9} {entry.detail}",
                flush=True,
            )
    print(summary(entries))
    return 1 if unexpected(entries, known) else 0


if __name__ == "__main__":
    sys.exit(main())
