"""One cycle of the framework as the text of a function: training, offload, extraction, the next training step."""

from __future__ import annotations

import textwrap

from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.paths import Path
from fsdp_doctor.repro import scenario as of
from fsdp_doctor.repro.scenario import Block, function
from fsdp_doctor.verdict.classification import VerdictKind

_CYCLE = """\
model, optimizer = build(device)
{trained}
{truth}
{offloaded}
{gathering}
try:
    for {entry} in {entries}:
{checked}
except Exception as error:
    return "crash", f"{{type(error).__name__}}: {{error}}"
{judged}
{goes_on}
return "ok", "PASS"
"""
_NEXT_STEP = """\
try:
{loaded}
    step(model, optimizer, device)
except Exception as error:
    return "poisoned", f"{{type(error).__name__}}: {{error}}"
"""
_DEPTHS = {"trained": 0, "truth": 0, "offloaded": 0, "gathering": 0, "checked": 2, "judged": 0, "goes_on": 0}
_AFTER_EXTRACTION = ("ok", "poisoned")
# The severest kind, and the entries that have it.
_WORST = (
    "if problems:",
    "    severity, kind = min(problems)[:2]",
    "    names = [found[2] for found in problems if found[0] == severity]",
    "    return kind, f\"{len(names)} entries: {', '.join(names[:3])}\"",
)


def cycle(scenario: Scenario, path: Path, entries: str, kind: VerdictKind, *, compares: bool) -> Block:
    """``cycle(device)`` returns (verdict, why) on this rank.

    entries: the expression that the path's entries come from. kind: the expected verdict; one on the extraction itself
    needs no next training step, and for a leak memory alone is looked at, because whatever else gathers would leave
    memory of its own. compares: values are held against the true ones.
    """
    contract = path.contract
    lost = _lost(scenario) if compares else []
    slots = {"trained": _trained(scenario), "offloaded": of.before(scenario), "checked": ["pass"]}
    if compares:
        slots["truth"] = _truth(scenario, contract) + (["before = dict(truth)"] if lost else [])
        slots["gathering"] = [*_places(contract), "problems = []"]
        slots["checked"] = _checked(contract)
        slots["judged"] = [*_missing(contract), *_WORST]
    elif kind == "leak":
        slots["gathering"] = ["allocated = torch.get_device_module(device).memory_allocated()", "problems = []"]
        slots["checked"] = _watched() if path.offloads else ["pass"]
        slots["judged"] = [*([] if path.offloads else _LEAKED), *_WORST]
    if kind in _AFTER_EXTRACTION:
        loaded = textwrap.indent("\n".join([*of.after(scenario), *lost]), "    ")
        slots["goes_on"] = [_NEXT_STEP.format(loaded=loaded)]
    filled = {name: textwrap.indent("\n".join(slots.get(name, [])), "    " * depth) for name, depth in _DEPTHS.items()}
    entry = "name, value" if compares or kind == "leak" else "_"
    text = _CYCLE.format(entry=entry, entries=entries, **filled)
    return function("cycle(device)", Block("\n".join(line for line in text.split("\n") if line.strip()) + "\n"))


def problem(contract: Contract) -> Block:
    """``problem(value, want, place)``: (severity, verdict) of one entry, or nothing."""
    imports = [("torch.distributed.tensor", "DTensor")]
    lines = []
    where = "value.device"
    match contract.form:
        case "info":
            text = 'return None if value == (want.size(), want.dtype) else (0, "wrong")\n'
            return function("problem(value, want, place)", Block(text))
        case "optimizer":
            text = 'return (2, "misplaced") if value.ndim and value.device != place else None\n'
            return function("problem(value, want, place)", Block(text))
        case "full":
            lines.append('if isinstance(value, DTensor):  # a full tensor is promised\n    return 0, "wrong"')
        case _:
            imports.append(("torch.distributed.tensor", "distribute_tensor"))
            lines.append(
                "where = value.device\n"
                "if isinstance(value, DTensor):\n"
                "    mesh, placements, where = value.device_mesh, value.placements, value.to_local().device\n"
                "    value = value.to_local().cpu().clone()  # before anything waits for the device\n"
                "    want = distribute_tensor(want.to(mesh.device_type), mesh, placements).to_local().cpu()"
            )
            where = "where"
    lines += ["want = want.to(torch.bfloat16)"] if contract.dtype == "compute" else []
    equal = "allclose(value.cpu(), want, atol=1e-5)" if contract.weights == "merged" else "equal(value.cpu(), want)"
    lines += [
        f'if value.shape != want.shape or not torch.{equal}:\n    return 0, "wrong"',
        f'return (2, "misplaced") if {where} != place else None',
    ]
    return function("problem(value, want, place)", Block("\n".join(lines) + "\n", imports))


def _trained(scenario: Scenario) -> list[str]:
    if scenario.phase == "fresh":
        return []
    lines = ["for _ in range(2):", "    step(model, optimizer, device)"]
    if scenario.optimizer_offload:
        lines.append("move_optimizer(optimizer, device)  # Adam's step counters too, as after every load")
    return lines


def _truth(scenario: Scenario, contract: Contract) -> list[str]:
    """``truth``: by name what the path promises. Of an optimizer's state the names alone are known beforehand."""
    if contract.form == "optimizer":
        return [
            "trained = [n for n, p in plain().named_parameters(remove_duplicate=False) if p.requires_grad]",
            'truth = {f"{name}.{key}": True for name in trained for key in ("step", "exp_avg", "exp_avg_sq")}',
        ]
    lines = ["truth = dict(plain().state_dict())" if scenario.phase == "fresh" else "truth = weights(model, device)"]
    match contract.weights:
        case "own" if contract.keys == "parameters":
            names = "model" if scenario.version == 2 else "plain()"
            lines.append(f"truth = {{name: truth[name] for name, _ in {names}.named_parameters()}}")
        case "merged":
            lines += [
                "whole = plain()",
                "whole.load_state_dict(truth)",
                "truth = whole.merge_and_unload().state_dict()",
            ]
        case "adapter":
            lines += [
                "whole = plain()",
                "whole.load_state_dict(truth)",
                "truth = peft.get_peft_model_state_dict(whole)",
            ]
    return lines


def _places(contract: Contract) -> list[str]:
    """Where each parameter says that it is, for a path that promises to leave it there."""
    if contract.device != "parameter":
        return []
    return ["places = {name: parameter.device for name, parameter in model.named_parameters()}"]


def _checked(contract: Contract) -> list[str]:
    place = {"cpu": 'torch.device("cpu")', "parameter": "places.get(name, device)"}.get(contract.device, "device")
    return [
        "want = truth.pop(name, None)",
        f'found = problem(value, want, {place}) if want is not None else (1, "incomplete")',
        "problems += [(*found, name)] if found else []",
    ]


def _watched() -> list[str]:
    """A path that offloads the model itself must have given the shards' memory back by the first entry."""
    return [
        "now = torch.get_device_module(device).memory_allocated()",
        'problems += [(0, "leak", f"{now} of {allocated} bytes")] if 2 * now > allocated and not problems else []',
    ]


def _missing(contract: Contract) -> list[str]:
    """What is left of ``truth`` did not come; a rank that is promised nothing may get nothing."""
    everywhere = 'problems += [(1, "incomplete", name) for name in truth]'
    return ["if dist.get_rank() == 0:", f"    {everywhere}"] if contract.ranks == "rank0" else [everywhere]


_LEAKED = (
    "value = None",
    "gc.collect()",
    "now = torch.get_device_module(device).memory_allocated()",
    'problems += [(0, "leak", f"{now - allocated} bytes")] if now > allocated else []',
)


def _lost(scenario: Scenario) -> list[str]:
    """A non-blocking offload can lose the weights themselves; nothing else of a scenario does."""
    if scenario.transfer == "blocking" or scenario.version == 1:
        return []
    return [
        "now = weights(model, device)",
        "if not all(torch.equal(now[name], before[name]) for name in before):",
        '    return "poisoned", "training would go on from other weights"',
    ]
