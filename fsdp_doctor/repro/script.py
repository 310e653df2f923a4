"""Puts a script together: the docstring, the path, the scenario, what values are held against, the cycle, the start."""

from __future__ import annotations

import re
import textwrap

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import signatures
from fsdp_doctor.matrix.cases import Case, Scenario
from fsdp_doctor.matrix.paths import Path, find_path, impossible, is_user_path
from fsdp_doctor.repro import scenario as of
from fsdp_doctor.repro.cycle import cycle, problem
from fsdp_doctor.repro.expectation import Expectation
from fsdp_doctor.repro.lift import Lifted, import_lines, lift
from fsdp_doctor.repro.scenario import Block

_WIDTH = 100
_CITED = 2
_FINISH = """\
def finish(store, rank, world, kind, why):
    print(f"[rank{rank}] {kind}: {why}\\n", end="", flush=True)
    expected = kind == EXPECTED and re.search(MESSAGE, " ".join(why.split()))
    worse = kind in ("crash", "hang") and EXPECTED not in ("crash", "hang")
    store.add("as expected", 1 if expected else -world if worse else 0)
    store.add("ended", 1)
    end = time.monotonic() + 20
    while store.add("ended", 0) < world and time.monotonic() < end:
        time.sleep(0.1)
    os._exit(store.add("as expected", 0) < (world if EXPECTED == "ok" else 1))  # past threads that hang

if __name__ == "__main__":
    store, rank, world = next(dist.rendezvous("env://"))
"""
_ON_ACCELERATORS = """\
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator and world == RANKS, "start it on RANKS accelerators"
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.get_device_module(device).set_device(device)
    backend = dist.get_default_backend_for_device(device.type)
"""
_ANYWHERE = """\
    assert world == RANKS, "start it on RANKS ranks"
    device = torch.device("cpu")
    if accelerator := torch.accelerator.current_accelerator():
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(device).set_device(device)
    backend = dist.get_default_backend_for_device(device.type)
"""
_BOTH_BACKENDS = """\
    backend = backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
"""
_START = """\
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world)
LATE
    finish(store, rank, world, *cycle(device))
"""
# A hang that is expected ends well; any other ends with every thread's stack.
_EXPECTED_HANG = """\
    late = threading.Timer(60, finish, (store, rank, world, "hang", "no end after 60 s"))
    late.daemon = True  # an exception of this thread ends the process
    late.start()"""
_UNEXPECTED_HANG = "    faulthandler.dump_traceback_later(60, exit=True)"
_IMPORTS = ("os", "re", "time", "torch", "torch.distributed as dist")


def script(case: Case, expectation: Expectation, name: str = "repro.py") -> str:
    """The text of a script that runs ``case`` under torchrun, and ends with 0 if the case ends as expected.

    name: the script's own, for the command in its docstring. Raises UsageError for what cannot stand alone.
    """
    path = _standing_alone(case)
    module, _, function = path.function.partition(":")
    lifted = Lifted()
    lift(f"case.paths.{module}", function, lifted)
    compares = _needs_values(case.scenario, path, expectation)
    blocks = [
        *(Block(text + "\n") for text in lifted.functions.values()),
        *of.build(case.scenario, path, apart=_needs_plain(case.scenario, path) and compares),
        of.step(case.scenario),
        *of.moves(case.scenario),
        *([of.weights(case.scenario)] if compares and path.contract.form != "optimizer" else []),
        *([problem(path.contract)] if compares else []),
        cycle(case.scenario, path, _entries(lifted, function), expectation.kind, compares=compares),
        _main(case.scenario, expectation),
    ]
    imports = {pair: None for block in blocks for pair in block.imports} | lifted.imports
    imports |= {("gc", ""): None} if expectation.kind == "leak" else {}
    text = "\n".join(block.text for block in blocks)
    scratch = "SCRATCH" in text
    imports |= {("tempfile", ""): None} if scratch else {}
    constants = _constants(expectation, scratch=scratch)
    return "\n\n".join([_docstring(case, expectation, name), import_lines(imports), constants]) + f"\n\n{text}"


def _entries(lifted: Lifted, function: str) -> str:
    """A path yields its entries, or returns a mapping."""
    yields = re.search(r"^ +yield\b", lifted.functions[function], re.MULTILINE)
    return f"{function}(model, optimizer, device)" + ("" if yields else ".items()")


def _needs_values(scenario: Scenario, path: Path, expectation: Expectation) -> bool:
    """Whether values decide: not where it raises, but where a racing copy may have lost the weights."""
    if path.contract.form == "flat":
        return False
    if expectation.kind == "poisoned":
        return scenario.transfer == "nonblocking"
    return expectation.kind not in ("leak", "crash", "oom", "died")


def _needs_plain(scenario: Scenario, path: Path) -> bool:
    """Whether the true weights come from the model before it is sharded."""
    contract = path.contract
    flat = scenario.version == 1 and contract.keys == "parameters"
    return scenario.phase == "fresh" or contract.weights != "own" or contract.form == "optimizer" or flat


def _standing_alone(case: Case) -> Path:
    if is_user_path(case.path):
        raise UsageError(f"case {case.id!r}: {case.path} is your own; a script has torch's functions alone")
    if case.scenario.model == "custom":
        raise UsageError(f"case {case.id!r} is of a model of your own; a script has the built-in ones alone")
    path = find_path(case.path, case.scenario.version)
    if path.is_fix:
        raise UsageError(f"case {case.id!r}: {path.name} is fsdp-doctor's own; a script has torch's functions alone")
    if reason := impossible(path, case.scenario):
        raise UsageError(f"case {case.id!r} cannot be tried: {reason}")
    return path


def _docstring(case: Case, expectation: Expectation, name: str) -> str:
    ranks = _ranks(case.scenario)
    packages = ("torch", "transformers", "peft") if case.scenario.model == "qwen3-lora" else ("torch", "transformers")
    versions = ", ".join(f"{package} {expectation.versions.get(package, 'any')}" for package in packages)
    cited = ", ".join(expectation.references[:_CITED])
    references = f" References: {cited}." if cited else ""
    how = "Each rank prints PASS or how it fails; exit code 0 only if it ends as EXPECTED, with MESSAGE."
    origin = f"Case {case.id} of fsdp-doctor {__version__}, from {expectation.source}; {versions}.{references}"
    lines = [f"{expectation.title or case.path}: {expectation.kind}.", "", *_wrapped(f"{origin} {how}"), ""]
    lines.append(f"    torchrun --nproc-per-node {ranks} {name}")
    return '"""' + "\n".join(lines) + '\n"""'


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False, break_long_words=False)


def _constants(expectation: Expectation, *, scratch: bool) -> str:
    # In a script any word will do for a device.
    message = expectation.message.replace(signatures.DEVICE, r"\S+?")
    lines = [f'EXPECTED = "{expectation.kind}"', f"MESSAGE = {_literal(message)}"]
    # The same on every rank, and nobody else's.
    lines += ["SCRATCH = f\"{tempfile.gettempdir()}/repro-{os.environ['MASTER_PORT']}\""] * scratch
    return "\n".join(lines)


def _literal(pattern: str) -> str:
    """Raw strings, over several lines where they are long."""
    pieces = textwrap.wrap(
        pattern, _WIDTH, break_long_words=False, drop_whitespace=False, break_on_hyphens=False, replace_whitespace=False
    )
    literals = [_raw(piece) for piece in pieces] or ['""']
    return literals[0] if len(literals) == 1 else "(\n    " + "\n    ".join(literals) + "\n)"


def _raw(text: str) -> str:
    quote = next((quote for quote in ('"', "'") if quote not in text), "")
    return f"r{quote}{text}{quote}" if quote and not text.endswith("\\") else repr(text)


def _main(scenario: Scenario, expectation: Expectation) -> Block:
    """An assertion says what a run needs, so that nothing is judged on a machine where it cannot show."""
    needs_accelerator = scenario.version == 1 or scenario.offload != "none" or scenario.backend == "device-only"
    hangs = expectation.kind == "hang"
    text = (
        _FINISH
        + (_ON_ACCELERATORS if needs_accelerator else _ANYWHERE).replace("RANKS", str(_ranks(scenario)))
        + ("" if scenario.backend == "device-only" else _BOTH_BACKENDS)
        + _START.replace("LATE", _EXPECTED_HANG if hangs else _UNEXPECTED_HANG)
    )
    return Block(text, [(module, "") for module in (*_IMPORTS, "threading" if hangs else "faulthandler")])


def _ranks(scenario: Scenario) -> int:
    return 4 if scenario.sharding == "hsdp" else 2
