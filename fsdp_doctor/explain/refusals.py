"""Reads failures from the form of their tracebacks: a refused call, a failed lookup, versions that do not match."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.places import JobCall, find_function, find_package, find_who, shorten
from fsdp_doctor.explain.versions import find_package as find_distribution

_DELIBERATE = re.compile(r"(?:raise\b|assert\b|_?p_assert\(|torch\._check|self\._fail|fail\()")
_OF_CHECKS = frozenset(
    {"ValueError", "TypeError", "NotImplementedError", "AssertionError", "MisconfigurationException"}
)
_OF_OPERATIONS = frozenset({"RuntimeError", "NotImplementedError", "TypeError", "ValueError", "IndexError"})
# Failures that are raised wherever the program happens to be.
_ANYWHERE = re.compile(
    r"CUDA|NCCL|nccl|out of memory|cuDNN|CUBLAS|[Tt]ime[ds]? ?out|Connection|socket|hipError|device-side"
)
_OF_TENSORS = re.compile(
    r"(?i)\b(?:tensors?|shapes?|sizes?|strides?|dtypes?|storage|grad\w*|elements?|scalar\w*|leaf|views?)\b"
)
_LOOKUPS = frozenset({"KeyError", "IndexError", "AttributeError", "StopIteration"})
# Phases of a job: a failure in one of them is due to a state, not to an argument of the call.
_PHASES = re.compile(r"^(?:forward|backward|step|training_step|_call_impl|fit|train|_?engine_run_backward|zero_grad)$")
# Parts of torch that check the tensors of a model, which `examine` lists.
_OF_SHARDED = ("torch's FSDP1", "torch's FSDP2", "torch's DTensor", "torch's tensor parallelism")
# Limit for the number of frames below the caller in which a function still checks the arguments of the call.
_MAX_DEPTH = 8
# The same for a message that names an argument that the call left at its default.
_MAX_DEPTH_OF_DEFAULTS = 3
_WORD = re.compile(r"`(\w+)`|\b([a-z][a-z0-9]*(?:_[a-z0-9]+)+)\b")
_KEYWORD = re.compile(r"\b([a-z]\w*)=(?!=)")
# Words of a message about an argument that was not given.
_ABSENT = re.compile(
    r"(?i)explicit specification|(?:must|needs? to|has to|should) be (?:specified|given|provided|passed)|\bmissing\b"
    r"|(?:is|are|was) (?:required|not (?:given|specified|provided|passed))"
)
_OPTIMIZER = re.compile(r"(?i)optim|param_group|fqn")

# Messages about a name that one package looks for in another package, whose version does not have it.
_IMPORTED = (
    re.compile(
        r"^ImportError: cannot import name '(?P<name>\w+)' from (?:partially initialized module )?'(?P<owner>[\w.]+)'"
    ),
    re.compile(
        r"^AttributeError: (?:partially initialized )?module '(?P<owner>[\w.]+)' has no attribute '(?P<name>\w+)'"
    ),
    re.compile(r"^ModuleNotFoundError: No module named '(?P<owner>\w+(?:\.\w+)*)\.(?P<name>\w+)'"),
)
_INSIDE = re.compile(
    r"^AttributeError: (?:type object )?'(?P<owner>FSDP\w+|FlatParam\w*|FullyShardedDataParallel|DeviceMesh"
    r"|_MeshEnv|DTensor\w*"
    r"|ProcessGroup\w*|\w*Placement|Shard|Replicate|\w*ParallelDims|\w*(?:Saver|Loader|Planner|Storage(?:Reader|Writer)))'"
    r" (?:object )?has no attribute '(?P<name>\w+)'"
)
_SIGNATURE = re.compile(
    r"^TypeError: (?P<owner>(?:\w+\.)?)(?P<name>\w+)\(\) (?P<what>"
    r"missing \d+ required (?:positional|keyword-only) arguments?: .{1,80}"
    r"|takes .{0,30}positional arguments? but .{1,40})"
)
# Messages about a release that a package or a feature requires.
_REQUIRED = re.compile(
    r"(?P<what>[\w`'\" -]{2,60}?) (?:requires|needs|depends on|is only (?:available|supported) (?:with|in|from|for))"
    r" (?P<owner>pytorch|torch|transformers|accelerate|peft|trl|vllm|torchao|bitsandbytes|triton|torchdata|deepspeed)\b"
    r"(?: version)? ?(?P<release>(?:>=|>|==|=|<=|<|~=)? ?v?\d[\w.+-]*\w)",
    re.IGNORECASE,
)
# Functions of torch. In a log without a traceback, such a name in a message shows which function refused.
_NAMED_FUNCTION = re.compile(
    r"\b(?:fully_shard|init_device_mesh|distribute_(?:tensor|module)|parallelize_module|replicate|clip_grad_norm_"
    r"|[gs]et_(?:model_|optimizer_)?state_dict|summon_full_params|full_tensor|redistribute|from_local)\b"
    r"(?=\(|`| (?:does|do|is|can|only|must|expects|requires|should))"
)
_ATTRIBUTE = re.compile(r"^AttributeError: '(?P<owner>\w+)' object has no attribute '(?P<name>\w+)'")
_DTENSOR_NAMES = frozenset({"to_local", "full_tensor", "redistribute", "placements", "device_mesh", "from_local"})
_FSDP1_NAMES = frozenset({
    *("_fsdp_wrapped_module", "_flat_param", "_handle", "flat_param", "summon_full_params", "no_sync", "module"),
    *("clip_grad_norm_", "set_state_dict_type", "optim_state_dict", "sharded_optim_state_dict"),
    "full_optim_state_dict",
})  # fmt: skip


# Messages of Python for an expression whose values have the wrong type.
_OF_PYTHON = re.compile(
    r"^TypeError: (?:argument of type '[\w.]+' is not iterable"
    r"|'[\w.]+' object is not (?:iterable|subscriptable|callable)"
    r"|unsupported operand type|cannot unpack|can only concatenate|object of type '[\w.]+' has no len)"
)
_CONTAINERS = frozenset({"list", "tuple", "dict", "set", "generator"})


def read_versions(raised: Raised, versions: Mapping[str, str]) -> tuple[str, str] | None:
    """Reads a failed import or lookup of a name in another package, or a call with arguments that do not fit.

    Returns the contradiction and the deciding step; None for any other failure.
    """
    if required := _REQUIRED.search(raised.message):
        return _read_required(required, versions)
    match = next((match for pattern in _IMPORTED if (match := pattern.match(raised.text))), None)
    inside = None if match else _INSIDE.match(raised.text)
    if match is not None:
        owner, name = match["owner"].split(".", 1)[0], f"{match['owner']}.{match['name']}"
    elif inside is not None and inside["name"] not in _FSDP1_NAMES and not _is_of_wrapped_class(inside):
        owner, name = "torch", f"{inside['owner']}.{inside['name']}"
    elif (
        raised.frames
        and (signature := _SIGNATURE.match(raised.text))
        and (asker := find_package(raised.frames[-1])) not in ("", "python")
    ):
        clash = (
            f"{_name_asker(asker, versions)} calls {signature['name']} with other arguments than it takes "
            f"({signature['what']})"
        )
        return clash, (
            f"Does {asker} fit the package that defines {signature['name']}? `fsdp-doctor env` prints all versions: "
            "caller and callee may be of different releases."
        )
    else:
        return None
    # The frame that asks is the innermost one, or the last before Python's own import machinery.
    asking = next((frame for frame in reversed(raised.frames) if find_package(frame) not in ("python",)), "")
    package = find_package(asking) if asking else ""
    if package == owner and asking:
        asking = next((frame for frame in reversed(raised.frames) if find_package(frame) not in ("python", owner)), "")
        package = find_package(asking) if asking else ""
    asker = _name_asker(package, versions, asking)
    clash = f"{asker} asks for {name}, which {_name_with_version(owner, versions)} does not have"
    decide = _decide_versions(package, owner)
    if raised.type == "ModuleNotFoundError" and "." in name and owner != package:
        decide += (
            f" Or the installed {owner} leaves this part out, and the source in its repository has it: does any wheel "
            f"of {owner} have `{name.replace('.', '/')}`? If not, put the source on PYTHONPATH, or take a release of "
            "the caller that does not import it."
        )
    return clash, decide


def _read_required(required: re.Match[str], versions: Mapping[str, str]) -> tuple[str, str]:
    owner = find_distribution(required["owner"])
    what, release = required["what"].strip(), required["release"].strip()
    clash = f"{what} needs {owner} {release}, and {_name_with_version(owner, versions)} is another"
    return clash, (
        f"Which version of {owner} is installed? `fsdp-doctor env` prints it: install {owner} {release}, or a release "
        "of the caller that fits the installed one."
    )


def _is_of_wrapped_class(asked: re.Match[str]) -> bool:
    """Returns whether a DTensor is asked for a name that belongs to the class of the tensor inside of it."""
    return asked["owner"] == "DTensor" and not asked["name"].startswith("_") and asked["name"] not in _DTENSOR_NAMES


def _name_with_version(package: str, versions: Mapping[str, str]) -> str:
    return f"{package} {versions[package]}" if versions.get(package) else f"the installed {package}"


def _name_asker(package: str, versions: Mapping[str, str], frame: str = "") -> str:
    if package:
        return f"{package} {versions[package]}" if versions.get(package) else package
    place = _write_place(frame)
    return f"the job's own code ({place})" if place else "the program"


def _decide_versions(package: str, owner: str) -> str:
    asker = package or "the code that asks"
    return (
        f"Which versions of {asker} and {owner} are installed? `fsdp-doctor env` prints both: {asker} was written for "
        f"a {owner} that is older or newer than the installed one, so change one of the two to a release that names "
        "the other."
    )


def _write_place(frame: str) -> str:
    parts = frame.split('"')
    return f"{parts[1]}{parts[2].split(', in ')[0]}" if len(parts) > 2 else ""


def read_refusal(raised: Raised, call: JobCall | None) -> tuple[str, str] | None:
    """Reads from the form of the traceback which function refused what, and which line of the job called it.

    Returns the contradiction and the deciding step; None if the traceback has none of the known forms.
    """
    if not raised.frames:
        return _read_bare_refusal(raised)
    innermost = raised.frames[-1]
    if mistake := _read_mistake(raised, innermost):
        return mistake
    if call is None and _ATTRIBUTE.match(raised.text) and find_package(innermost) not in ("torch", "python"):
        # The log has no frame outside of the package that asks.
        call = JobCall(_write_place(innermost), raised.code_of.get(innermost, ""), "", find_package(innermost), 0)
    if call is None:
        return _read_own_operation(raised)
    code = raised.code_of.get(innermost, "")
    is_deliberate = bool(_DELIBERATE.match(code)) or (not code and raised.type in _OF_CHECKS)
    inside = find_function(innermost)
    if attribute := _ATTRIBUTE.match(raised.text):
        return _read_attribute(attribute["owner"], attribute["name"], raised, call)
    if not is_deliberate:
        if raised.type in _LOOKUPS:
            return _read_lookup(raised, call, inside, code)
        return _read_operation(raised, call, inside, code)
    said = shorten(raised.asserted if raised.asserted and not raised.message else raised.message)
    where = call.where
    if call.depth > _MAX_DEPTH or _PHASES.match(call.function) or (raised.asserted and not raised.message):
        who = find_who(raised.frames) or "the library"
        clash = f"a check in `{inside}` of {who} fails: {said}"
        return (
            clash,
            f"Which state does the check mean? Call `fsdp_doctor.examine(model, optimizer)` right before {where}.",
        )
    function = call.function or inside
    argument = _find_argument(call, raised.message)
    named = f"the argument `{argument}`" if argument else "the call"
    examine = ""
    if find_who(raised.frames) in _OF_SHARDED:
        examine = " `fsdp_doctor.examine(model)` right before it lists units, dtypes, devices and meshes."
    if argument and _ABSENT.search(raised.message):
        return (
            f"`{function}` lacks the argument `{argument}`: {said}",
            f"Is `{argument}`, or what the message accepts instead of it, given in {where}?{examine}",
        )
    clash = f"`{function}` refuses {named}: {said}" if said else f"`{function}` refuses {named}"
    asked = f"Which value has `{argument}`" if argument else f"Which arguments does `{function}` get"
    return clash, f"{asked} in {where}? Compare it with what the message asks for.{examine}"


def _read_mistake(raised: Raised, innermost: str) -> tuple[str, str] | None:
    """Reads a Python error that a line of a package raises by itself, whatever the tensors are.

    The package is neither torch nor the standard library. Returns the contradiction and the deciding step; None for any
    other error.
    """
    package, code = find_package(innermost), raised.code_of.get(innermost, "")
    if package in ("", "torch", "python") or not code or not _OF_PYTHON.search(raised.text):
        return None
    return (
        f"the line `{shorten(code)}` of {package} fails by itself: {shorten(raised.message)}",
        f"Is it a mistake of this release, or a value that the line does not expect (None, a setting of another kind)? "
        f"`fsdp-doctor env` prints the version of {package}: look whether a newer release has another line there "
        f"({_write_place(innermost)}), and print the value right before it.",
    )


def _read_operation(raised: Raised, call: JobCall, inside: str, code: str) -> tuple[str, str] | None:
    """Returns the contradiction and the deciding step for an operation that C++ refused; None for another failure.

    code: the line that called the operation.
    """
    if raised.type not in _OF_OPERATIONS or not code or _ANYWHERE.search(raised.message):
        return None
    clash = f"the operation `{shorten(code)}` in `{inside}` fails: {shorten(raised.message)}"
    if not _OF_TENSORS.search(raised.message):
        return clash, f"Which values does it get? The call is {call.where}."
    return clash, (
        "Which tensors does it get: their shapes, dtypes, devices and placements? Call `fsdp_doctor.examine(model, "
        f"optimizer)` right before {call.where}."
    )


def _read_own_operation(raised: Raised) -> tuple[str, str] | None:
    """Returns the same as ``_read_operation`` for an operation that a line of the job itself called on tensors."""
    frame = raised.frames[-1]
    code = raised.code_of.get(frame, "")
    if find_package(frame) or _DELIBERATE.match(code) or not _OF_TENSORS.search(raised.message):
        return None
    call = JobCall(_write_place(frame), code, "", "", 0)
    return _read_operation(raised, call, find_function(frame), code)


def _read_bare_refusal(raised: Raised) -> tuple[str, str] | None:
    """Reads a message without a traceback that names the function which refused a call.

    Returns the contradiction and the deciding step; None for any other message.
    """
    if raised.type not in _OF_CHECKS or (named := _NAMED_FUNCTION.search(raised.message)) is None:
        return None
    clash = f"`{named[0]}` refuses the call: {shorten(raised.message)}"
    return clash, (
        f"Which line of the job calls `{named[0]}`, and with which arguments? The traceback above the message has it."
    )


def _read_attribute(owner: str, name: str, raised: Raised, call: JobCall) -> tuple[str, str]:
    if name in _FSDP1_NAMES:
        return (
            f"the code expects FSDP1's wrapper ({name}), but {owner} does not have it: it is under FSDP2, or not "
            "wrapped",
            f"Which FSDP does the job use? {call.where} is written for FSDP1: under FSDP2 the module is its own "
            "wrapper.",
        )
    asking = next(
        (frame for frame in reversed(raised.frames) if find_function(frame) != "__getattr__"), raised.frames[-1]
    )
    code = raised.code_of.get(asking, "")
    asked = f" (`{shorten(code)}`)" if code else ""
    if owner in _CONTAINERS:
        inside = find_function(asking)
        return (
            f"a {owner} stands where `{inside}` takes one object: it is asked for {name}{asked}",
            f"Who passes several at once, or the container of them ({call.where})? Pass one, or loop over them; or use "
            "a release of the function that takes several (`fsdp-doctor env` prints the versions).",
        )
    if owner == "NoneType":
        inside = find_function(asking)
        return (
            f"a value that `{inside}` takes for an object is None: it is asked for {name}{asked}",
            f"Which step should have set it: a load, a wrap, a setting, another rank's part? The call is {call.where}; "
            "print the value there on every rank.",
        )
    return (
        f"{find_package(asking) or 'the job'} asks an object of the class {owner} for {name}{asked}, which it does "
        "not have",
        f"Is {name} of another version of the class (`fsdp-doctor env` prints the versions), or set only by a step "
        f"that the job left out? The call is {call.where}.",
    )


def _read_lookup(raised: Raised, call: JobCall, inside: str, code: str) -> tuple[str, str]:
    where = call.where
    looked = f"`{shorten(code)}` in `{inside}`" if code else f"a lookup in `{inside}`"
    clash = f"{looked} finds nothing: {raised.type} {shorten(raised.message)}".rstrip()
    if _OPTIMIZER.search(f"{inside} {call.function} {code}"):
        return f"the optimizer and the model do not have the same parameters: {clash}", (
            "Was the optimizer made from the parameters of this model, after the wrap? `fsdp_doctor.examine(model, "
            f"optimizer)` right before {where} names parameters of the optimizer that are not the model's."
        )
    return (
        clash,
        f"Which object does `{call.function or inside}` get in {where}? Compare its keys or attributes with the one "
        "that is missing.",
    )


def _find_argument(call: JobCall, message: str) -> str:
    """Finds the argument that a message is about: a keyword of the call, or a name in the message; else empty."""
    folded = message.lower().replace("_", "")
    names: list[str] = [first or second for first, second in _WORD.findall(message)]
    keywords = _KEYWORD.findall(call.code)
    named = [name for name in names if name in keywords]
    meant = [name for name in keywords if len(name) > 3 and name.lower().replace("_", "") in folded]
    if named or meant:
        return (named or meant)[0]
    # A name that the line of the call does not have may be an argument of a function further below.
    words = set(re.findall(r"\w+", call.code))
    is_near = call.depth <= _MAX_DEPTH_OF_DEFAULTS
    called = set(re.findall(r"([A-Za-z_]\w*)\(", call.code))
    for name in names:
        if name not in called and f"{name}(" not in message and (name in words or is_near):
            return name
    return ""
