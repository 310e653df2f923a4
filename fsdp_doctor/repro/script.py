"""Fills in the template of a script: one case, what it is expected to show, and the very code of its path."""

from __future__ import annotations

import ast
import pathlib
import textwrap

import jinja2

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import signatures
from fsdp_doctor.matrix.axes import Context
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.paths import Path, find_path, impossible, is_user_path
from fsdp_doctor.repro.expectation import Expectation
from fsdp_doctor.repro.pruning import prune

_ROOM = pathlib.Path(__file__).parent
_PATHS = _ROOM.parent / "case" / "paths"
_WIDTH = 100
_IN_CONTEXT: dict[Context, str] = {
    Context.ORDINARY: "{}",
    Context.NO_GRAD: "torch.no_grad()({})",
    Context.INFERENCE: "torch.inference_mode()({})",
}
_TEMPLATE: dict[Direction, str] = {"out": "extraction.py.jinja", "in": "loading.py.jinja"}
_SEEN_IN_VALUES = ("ok", "wrong", "incomplete", "misplaced", "poisoned")
_TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(_ROOM), undefined=jinja2.StrictUndefined)


def script(case: Case, expectation: Expectation, name: str = "repro.py") -> str:
    """The text of a script that runs ``case`` under torchrun, and ends with 0 if the case ends as expected.

    name: the script's own, for the command in its docstring. Raises UsageError for what cannot stand alone.
    """
    path = _standing_alone(case)
    module, _, function = path.function.partition(":")
    # Read, not imported: that would take torch. What of it the path does not use is pruned.
    path_module = (_PATHS / f"{module}.py").read_text(encoding="utf-8")
    packages = ("torch", "transformers", *(("peft",) if case.scenario.model == "qwen3-lora" else ()))
    text = _TEMPLATES.get_template(_TEMPLATE[path.direction]).render(
        case=case,
        scenario=case.scenario,
        contract=path.contract,
        with_mesh=not path.without_mesh,
        offloads=path.offloads,
        optimizer_first=path.optimizer_first,
        path_module=path_module,
        call=_call(path_module, function, path.direction, case.scenario.context),
        compares=_compares(case, path, expectation),
        asks_others=_asks_others(case, expectation),
        expected=expectation,
        message=_literal(expectation.message.replace(signatures.DEVICE, r"\S+?")),
        file_name=name,
        version=__version__,
        versions=", ".join(f"{package} {expectation.versions.get(package, 'any')}" for package in packages),
    )
    return prune(text)


def _call(module: str, function: str, direction: Direction, context: Context) -> str:
    """The expression that loads; or that (name, value) pairs come from: a path yields them, or returns a mapping.

    torch's contexts decorate a function; of one that yields, each step runs in the context.
    """
    definitions = [node for node in ast.parse(module).body if isinstance(node, ast.FunctionDef)]
    definition = next(node for node in definitions if node.name == function)
    yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(definition))
    arguments = ", ".join(argument.arg for argument in definition.args.args)
    called = _IN_CONTEXT[context].format(function)
    return f"{called}({arguments})" + ("" if yields or direction == "in" else ".items()")


def _compares(case: Case, path: Path, expectation: Expectation) -> bool:
    """Whether values are held against the true ones: not where the case raises, but where a copy may have lost them."""
    if path.contract.form == "flat":
        return False
    if path.direction == "in":
        # A message says enough: of what the next step dies.
        told = expectation.kind == "poisoned" and bool(expectation.message)
        return expectation.kind in _SEEN_IN_VALUES and not told
    if expectation.kind == "poisoned":
        return case.scenario.transfer == "nonblocking"
    return expectation.kind not in ("leak", "crash", "oom", "died")


def _asks_others(case: Case, expectation: Expectation) -> bool:
    """Whether an exception that every rank raises is another end than one that some raise: a refusal."""
    crash = expectation.kind == "crash" and not expectation.by_every_rank
    return not case.scenario.checkpoint.must_load and (crash or expectation.kind in ("ok", "refused"))


def _standing_alone(case: Case) -> Path:
    if is_user_path(case.path):
        raise UsageError(f"case {case.id!r}: {case.path} is your own; a script has torch's functions alone")
    if case.scenario.model == "custom":
        raise UsageError(f"case {case.id!r} is of a model of your own; a script has the built-in ones alone")
    path = find_path(case.path, case.scenario.version)
    if path.is_fix:
        raise UsageError(f"case {case.id!r}: {path.name} is fsdp-doctor's own; a script has torch's functions alone")
    if case.scenario.sharding in ("tp", "experts", "replicate"):
        raise UsageError(f"case {case.id!r}: there is no script of a model that is sharded as {case.scenario.sharding}")
    if reason := impossible(path, case.scenario):
        raise UsageError(f"case {case.id!r} cannot be tried: {reason}")
    if _needs_moments_by_name(path) and case.scenario.version == 1 and case.scenario.sharding != "full":
        raise UsageError(f"case {case.id!r}: torch cannot save the optimizer's state of FSDP1's replicas")
    return path


def _needs_moments_by_name(path: Path) -> bool:
    """Whether what it is given takes ``get_optimizer_state_dict``, rather than each rank's ``state_dict()``."""
    return path.contract.loads != "model" and path.contract.given != "rank_files"


def _literal(pattern: str) -> str:
    """A regular expression as raw strings, over several lines where it is long."""
    pieces = textwrap.wrap(
        pattern, _WIDTH, break_long_words=False, drop_whitespace=False, break_on_hyphens=False, replace_whitespace=False
    )
    literals = [_raw(piece) for piece in pieces] or ['""']
    return literals[0] if len(literals) == 1 else "(\n    " + "\n    ".join(literals) + "\n)"


def _raw(text: str) -> str:
    quote = next((quote for quote in ('"', "'") if quote not in text), "")
    return f"r{quote}{text}{quote}" if quote and not text.endswith("\\") else repr(text)
