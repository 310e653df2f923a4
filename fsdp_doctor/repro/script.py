"""Fills in the template of a script with one case, its expected outcome, and the exact code of its method."""

from __future__ import annotations

import ast
import functools
import pathlib
import sys
import textwrap

import jinja2
from typing_extensions import assert_never

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import signatures
from fsdp_doctor.matrix.axes import CheckpointFit, Context, Model, OffloadWay, Optimizer, Sharding
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.methods import MatrixMethod, explain_impossible, find_method, is_user_method
from fsdp_doctor.repro.expectation import Expectation

_ROOM = pathlib.Path(__file__).parent
_METHODS = _ROOM.parent / "case" / "methods"
_WIDTH = 100
_TEMPLATE: dict[Direction, str] = {"out": "extraction.py.jinja", "in": "loading.py.jinja"}
_TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(_ROOM), undefined=jinja2.StrictUndefined)


def render_script(case: Case, expectation: Expectation, name: str = "repro.py", *, as_test: bool = False) -> str:
    """Renders a script that runs ``case`` under torchrun, and ends with 0 if the case ends as expected.

    Raises UsageError for a case that only fsdp-doctor can run.

    name: the script's file name, for the command in its docstring.
    as_test: whether the script ends with 1 if the case fails in any way, and with 0 if it does not.
    """
    method = locate_method(case)
    function = method.function.partition(":")[2]
    method_module = read_method_module(method)
    scenario = case.scenario
    packages = ("torch", "transformers", "peft")[: 2 + scenario.model.has_adapters]
    packages += ("torchao",) if scenario.optimizer is Optimizer.ADAMW_8BIT else ()
    num_ranks, mesh = choose_mesh(case)
    text = _TEMPLATES.get_template(_TEMPLATE[method.direction]).render(
        case=case,
        scenario=scenario,
        CheckpointFit=CheckpointFit,
        OffloadWay=OffloadWay,
        contract=method.contract,
        as_test=as_test,
        num_ranks=num_ranks,
        mesh=mesh,
        config=_name_config(scenario.model),
        optimizer=_write_optimizer(scenario.optimizer, "1e-3" if method.contract.loads == "model" else "lr"),
        state_keys=_write_state_keys(scenario.optimizer),
        with_mesh=not method.without_mesh,
        offloads=method.offloads,
        optimizer_first=method.optimizer_first,
        trains_within=method.trains,
        method_module=method_module,
        call=_call(method_module, function, method.direction, scenario.context),
        compares=_needs_comparison(case, method, expectation),
        asks_others=_needs_other_ranks(case, expectation),
        expected=expectation,
        message=_format_literal(expectation.message.replace(signatures.DEVICE, r"\S+?")),
        file_name=name,
        version=__version__,
        versions=", ".join(f"{package} {expectation.versions.get(package, 'any')}" for package in packages),
    )
    return prune(text)


def locate_method(case: Case) -> MatrixMethod:
    """Returns the method of the case. Raises UsageError if no script can be written for it."""
    scenario = case.scenario
    if is_user_method(case.method):
        raise UsageError(f"case {case.id!r}: {case.method} is your own; a script has only torch's functions")
    if scenario.consumer.needs_sender:
        raise UsageError(
            f"case {case.id!r}: no script can be written for a case with a consumer, because a script reads each "
            "entry when it comes"
        )
    if scenario.checkpoint is CheckpointFit.HUB:
        raise UsageError(f"case {case.id!r}: a script saves its checkpoint itself, not with save_pretrained")
    if scenario.model.is_custom:
        raise UsageError(f"case {case.id!r} has a model of your own; a script has only built-in models")
    if scenario.model.is_quantized or scenario.model.is_of_torchao:
        raise UsageError(f"case {case.id!r}: no script can be written for the model {scenario.model}")
    if scenario.offload.way in (OffloadWay.MOVED, OffloadWay.BY_PHASE, OffloadWay.BY_PARAMETER):
        raise UsageError(f"case {case.id!r}: no script can be written for the offload {scenario.offload}")
    if scenario.offload.way is OffloadWay.PARTIAL and scenario.init.is_meta:
        raise UsageError(f"case {case.id!r}: no script can be written for a partly offloaded model on the meta device")
    method = find_method(case.method, scenario.version)
    if method.is_fix:
        raise UsageError(f"case {case.id!r}: {method.name} is fsdp-doctor's own; a script has only torch's functions")
    choose_mesh(case)
    if reason := explain_impossible(method, scenario):
        raise UsageError(f"case {case.id!r} cannot be tried: {reason}")
    # A file for each rank holds optimizer.state_dict(). Any other form holds the result of get_optimizer_state_dict.
    moments_by_name = method.contract.loads != "model" and method.contract.given != "rank_files"
    if moments_by_name and scenario.version == 1 and not scenario.sharding.has_one_mesh:
        raise UsageError(f"case {case.id!r}: torch cannot save the optimizer's state of FSDP1's replicas")
    return method


def describe_exit(*, as_test: bool) -> str:
    """Returns the sentence of a script's docstring about its last line and its exit code."""
    return f'Its last line is "shown" or "not shown"{"; exit code 1: it fails" if as_test else ""}.'


def tell_outcome(code: str, *, as_test: bool, caught: str = "Exception") -> str:
    """Returns code that runs ``code`` and prints the last line of all scripts: ``shown`` if it raises, else ``not
    shown``.

    as_test: whether the exception ends the script, and with it torchrun.
    caught: the exceptions that show the failure.
    """
    code = f'{code}\nprint("not shown")'
    if as_test:
        return code
    return f'try:\n{textwrap.indent(code, "    ")}\nexcept {caught}:\n    traceback.print_exc()\n    print("shown")'


def read_method_module(method: MatrixMethod) -> str:
    """Reads the source of the module with the method's function. The module is not imported, because it needs torch."""
    return (_METHODS / f"{method.function.partition(':')[0]}.py").read_text(encoding="utf-8")


def choose_mesh(case: Case) -> tuple[int, str]:
    """Returns the number of ranks, and the arguments of ``init_device_mesh``.

    Raises UsageError if no template has the mesh.
    """
    match sharding := case.scenario.sharding:
        case Sharding.FULL:
            return 2, '(2,), mesh_dim_names=("fsdp",)'
        case Sharding.SIZE1:
            return 2, '(2, 1), mesh_dim_names=("ddp", "fsdp")'
        case Sharding.HSDP:
            return 4, '(2, 2), mesh_dim_names=("ddp", "fsdp")'
        case Sharding.TP | Sharding.REPLICATE | Sharding.EXPERTS | Sharding.EXPERTS_2D | Sharding.HIDDEN_EXPERTS:
            raise UsageError(f"case {case.id!r}: no script can be written for the sharding {sharding}")
        case _:
            assert_never(sharding)


def _name_config(model: Model) -> str:
    """Returns the class name of the model's configuration in transformers.

    Raises ValueError for a model without a script.
    """
    match model:
        case Model.QWEN3 | Model.QWEN3_TIED | Model.QWEN3_BUFFERS | Model.QWEN3_LORA:
            return "Qwen3Config"
        case Model.QWEN2:
            return "Qwen2Config"
        case Model.QWEN3_MOE:
            return "Qwen3MoeConfig"
        case Model.QWEN3_5:
            return "Qwen3_5TextConfig"
        case Model.CUSTOM | Model.QWEN3_QLORA | Model.QWEN3_QLORA_BF16 | Model.QWEN3_FLOAT8 | Model.QWEN3_MXFP8:
            raise ValueError(f"the model {model} has no script")
        case _:
            assert_never(model)


def _write_optimizer(optimizer: Optimizer, lr: str) -> str:
    """Writes the expression that makes the optimizer. Muon trains only the matrices; other parameters are unchanged."""
    match optimizer:
        case Optimizer.ADAMW:
            return f"torch.optim.AdamW(model.parameters(), lr={lr})"
        case Optimizer.SGD:
            # The model that loads has the lower learning rate, and gets another weight decay than the run that saved.
            decay = ", weight_decay=0.1 * (lr < 1e-3)" if lr == "lr" else ""
            return f"torch.optim.SGD(model.parameters(), momentum=0.9, lr={lr}{decay})"
        case Optimizer.MUON:
            return f"torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr={lr})"
        case Optimizer.ADAFACTOR:
            return f"torch.optim.Adafactor(model.parameters(), lr={lr})"
        case Optimizer.ADAMW_FUSED:
            return f"torch.optim.AdamW(model.parameters(), fused=True, lr={lr})"
        case Optimizer.ADAMW_CAPTURABLE:
            return f"torch.optim.AdamW(model.parameters(), capturable=True, lr={lr})"
        case Optimizer.ADAMW_8BIT:
            return f"AdamW8bit(model.parameters(), lr={lr})"
        case Optimizer.TENSOR_LR:
            return f"torch.optim.AdamW(model.parameters(), lr=torch.tensor({lr}))"
        case _:
            assert_never(optimizer)


def _write_state_keys(optimizer: Optimizer) -> str:
    """Writes the tuple of keys in the state that the optimizer makes for each parameter."""
    match optimizer:
        case Optimizer.SGD | Optimizer.MUON:
            return '("momentum_buffer",)'
        case Optimizer.ADAFACTOR:
            return '("step", "variance")'
        case Optimizer.ADAMW | Optimizer.ADAMW_FUSED | Optimizer.ADAMW_CAPTURABLE:
            return '("step", "exp_avg", "exp_avg_sq")'
        case Optimizer.ADAMW_8BIT | Optimizer.TENSOR_LR:
            return '("step", "exp_avg", "exp_avg_sq")'
        case _:
            assert_never(optimizer)


def _call(module: str, function: str, direction: Direction, context: Context) -> str:
    """Writes the expression that loads or, for an extraction, the expression that gives (name, value) pairs.

    A method yields the pairs, or returns them in a mapping. torch's contexts decorate the method's function; each step
    of a generator function runs in the context.
    """
    definition = next(node for node in _list_functions(module) if node.name == function)
    yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(definition))
    arguments = ", ".join(argument.arg for argument in definition.args.args)
    match context:
        case Context.ORDINARY:
            called = function
        case Context.NO_GRAD:
            called = f"torch.no_grad()({function})"
        case Context.INFERENCE:
            called = f"torch.inference_mode()({function})"
        case _:
            assert_never(context)
    return f"{called}({arguments})" + ("" if yields or direction == "in" else ".items()")


@functools.cache
def _list_functions(module: str) -> tuple[ast.FunctionDef, ...]:
    return tuple(node for node in ast.parse(module).body if isinstance(node, ast.FunctionDef))


def _needs_comparison(case: Case, method: MatrixMethod, expectation: Expectation) -> bool:
    """Returns whether the script compares values with the true values.

    A case that raises before it has values needs no comparison.
    """
    kind = expectation.kind
    if method.contract.form == "flat":
        return False
    if method.direction == "in":
        # If the next step fails with a known message, the message is compared instead.
        has_message = kind == "poisoned" and bool(expectation.message)
        return kind in ("ok", "wrong", "incomplete", "misplaced", "poisoned") and not has_message
    if kind == "poisoned":
        return not case.scenario.transfer.is_blocking
    return kind not in ("leak", "crash", "oom", "died")


def _needs_other_ranks(case: Case, expectation: Expectation) -> bool:
    """Returns whether the script must know if every rank raised, which is a refusal, or only some ranks."""
    crash = expectation.kind == "crash" and not expectation.by_every_rank
    return not case.scenario.must_load and (crash or expectation.kind in ("ok", "refused"))


def _format_literal(pattern: str) -> str:
    """Formats a regular expression as raw string literals, over several lines if it is long."""
    pieces = textwrap.wrap(
        pattern, _WIDTH, break_long_words=False, drop_whitespace=False, break_on_hyphens=False, replace_whitespace=False
    )
    literals = []
    for piece in pieces:
        quote = next((quote for quote in ('"', "'") if quote not in piece), "")
        literals.append(f"r{quote}{piece}{quote}" if quote and not piece.endswith("\\") else repr(piece))
    literals = literals or ['""']
    return literals[0] if len(literals) == 1 else "(\n    " + "\n    ".join(literals) + "\n)"


def prune(source: str) -> str:
    """Removes the functions, constants and imports that the main block of ``source`` does not need.

    The rest is put into the usual order: docstring, imports, constants, functions, main block. Empty lines inside
    functions are removed.
    """
    docstring, *body = ast.parse(source).body
    (main,) = (node for node in body if isinstance(node, ast.If))
    definitions: dict[str, ast.stmt] = {}
    for node in body:
        if (name := _find_defined_name(node)) in definitions:
            raise ValueError(f"defined twice: {name}")
        definitions |= {name: node} if name else {}
    used = more = list_used_names(main)
    while more := {other for name in more & definitions.keys() for other in list_used_names(definitions[name])} - used:
        used |= more
    needed = [node for name, node in definitions.items() if name in used]
    constants = [_read_dense_text(source, node) for node in needed if isinstance(node, ast.Assign)]
    functions = [_read_dense_text(source, node) for node in needed if isinstance(node, ast.FunctionDef)]
    head = [read_node_text(source, docstring), select_imports(body, used), "\n".join(constants)]
    return "\n\n".join([*head, *functions, _read_dense_text(source, main)]) + "\n"


def _find_defined_name(node: ast.stmt) -> str:
    """Returns the name of a function or a constant; empty for any other statement."""
    match node:
        case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def list_used_names(node: ast.stmt) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def select_imports(body: list[ast.stmt], used: set[str]) -> str:
    """Writes one import statement for each module that is used, first for modules of the standard library."""
    members: dict[str, set[str]] = {}
    for node in body:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            if (alias.asname or alias.name.partition(".")[0]) not in used:
                continue
            if isinstance(node, ast.ImportFrom):
                members.setdefault(f"from {node.module} import ", set()).add(ast.unparse(alias))
            else:
                members[f"import {ast.unparse(alias)}"] = set()
    statements = [head + ", ".join(sorted(names)) for head, names in members.items()]
    statements.sort(key=lambda statement: (statement.startswith("from"), statement))
    standard = [line for line in statements if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    return "\n".join([*standard, "", *(line for line in statements if line not in standard)])


def read_node_text(source: str, node: ast.stmt) -> str:
    """Returns the lines of a statement, including its decorators."""
    first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _read_dense_text(source: str, node: ast.stmt) -> str:
    return "\n".join(line for line in read_node_text(source, node).splitlines() if line.strip())
