"""Reads from a traceback which library raised the exception, in which phase, and which line of the job led to it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_doctor.explain.exceptions import Raised

_FRAMEWORKS = (
    "verl|trl|nemo_rl|nemo_automodel|nemo|axolotl|llamafactory|unsloth_zoo|unsloth|swift|slime|openrlhf|skyrl_train|skyrl"
    "|skyrl_gym|areal|prime_rl|torchtune|torchtitan|oumi|megatron|lightning|pytorch_lightning|accelerate|transformers"
    "|diffusers|peft|deepspeed|ray|roll|rllm|composer|llmfoundry|fairscale|olmo_core|mbridge"
)
# Packages that call what they are given: the code of a command line, of a process, of a data set's examples.
_WRAPPERS = frozenset({
    *("fire", "click", "typer", "hydra", "absl", "tyro", "jsonargparse", "simple_parsing", "argbind", "invoke"),
    *("datasets", "multiprocess", "dill", "joblib", "tqdm", "wrapt", "decorator", "backoff", "tenacity"),
})  # fmt: skip
# By the innermost frame that says it. Who raised it, and in which phase of a job.
_WHO = (
    (r"\bbitsandbytes/", "bitsandbytes"),
    (r"\bsafetensors/", "safetensors"),
    (r"/(?:vllm|sglang)/", "the inference engine"),
    (r"\btorch/distributed/checkpoint/", "torch's distributed checkpoint"),
    (r"\btorch/distributed/(?:fsdp/_fully_shard|_composable)/", "torch's FSDP2"),
    (r"\btorch/distributed/fsdp/", "torch's FSDP1"),
    (r"\btorch/distributed/tensor/parallel/", "torch's tensor parallelism"),
    (r"\btorch/distributed/_?tensor/", "torch's DTensor"),
    (r"\btorch/distributed/pipelining/", "torch's pipeline parallelism"),
    (r"\btorch/optim/", "torch's optimizer"),
    (r"\btorch/utils/checkpoint\.py", "torch's activation checkpointing"),
    (r"\btorch/nn/utils/clip_grad\.py", "torch's gradient clipping"),
    (r"\btorch/amp/grad_scaler\.py", "torch's gradient scaler"),
    (r"\btorch/nn/modules/module\.py.* in load_state_dict", "the module's load_state_dict"),
    (r"/src/(?P<name>(?!torch\b)[a-z]\w+)/[\w/]+\.py", ""),
    (rf"/(?P<name>{_FRAMEWORKS})/(?!site-packages)[\w/]+\.py", ""),
    (rf"-packages/(?!(?:torch|{'|'.join(sorted(_WRAPPERS))})/)(?P<name>\w+)/", ""),
)
# Parts of torch that its other parts call: one of these counts if no part of torch called it.
_WHO_BELOW = (
    (r"\btorch/distributed/(?:device_mesh|_mesh_layout)\.py", "torch's device mesh"),
    (r"\btorch/distributed/(?:distributed_c10d|_functional_collectives|rendezvous)\w*\.py", "torch's process groups"),
    (r"\btorch/(?:serialization|_weights_only_unpickler|_utils_internal)\.py", "torch's load and save of files"),
    (r"\btorch/(?:_dynamo|_inductor|_functorch|_higher_order_ops)/", "torch.compile"),
)
_WHEN = (
    (r"model_merger|in \w*(?:merge_(?:and|fsdp|weights)|consolidate)\w*", "a merge of saved shards"),
    (
        r"in __setstate__|\btorch/optim/.* in load_state_dict|in from_pretrained|in (?:_?set|_load)_\w*state_dict",
        "a load",
    ),
    (r"optim\w*\.py.* in state_dict", "a state dict of the optimizer"),
    (
        r"(?:optim|adam|shampoo|muon)\w*(?:/\w+)?\.py.* in (?:__init__|_instantiate\w*|add_param_group)",
        "the construction of the optimizer",
    ),
    (r"in \w*clip_grad\w*|in get_total_norm", "gradient clipping"),
    (r"\btorch/optim/|optim\w*\.py.*in (?:update_)?step|in optimizer_step", "the optimizer's step"),
    (r"in (?:_?save\w*|async_save)|state_dict_saver", "a save"),
    (r"in (?:preprocess|handle|convert)_\w*state_dict", "a save or a load"),
    (r"in (?:prepare|_prepare_\w+|fsdp2_prepare_\w+)$", "the preparation of model and optimizer"),
    (r"in \w*(?:load_state_dict|load_checkpoint|restore|resume)\w*|state_dict_loader|in create_\w*load_plan", "a load"),
    (r"in \w*(?:update_weight|sync_weight|send_weight|load_weights)\w*", "a sync of weights to an engine"),
    (r"in \w*(?:state_dict(?!_report)|full_tensor|summon_full_params)\w*", "a gather of the model"),
    (r"in backward|in _engine_run_backward|in _post_backward", "the backward"),
    (
        r"in (?:init_device_mesh|_init_mesh\w*)$|device_mesh\.py.* in __(?:init|getitem)__",
        "the construction of the device mesh",
    ),
    (r"in (?:fully_shard|parallelize_module|_init_\w*|__init__|wrap|build\w*)$", "the construction of the model"),
    (r"in forward|in _call_impl", "the forward"),
)
_RECOMPUTED = re.compile(r"\btorch/utils/checkpoint\.py.* in (?:recompute_fn|unpack_hook|backward)")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_PACKAGE = re.compile(rf"-packages/(?P<package>\w+)|(?:^|/)(?P<source>torch|{_FRAMEWORKS})/(?=[\w/]+\.py$)")
_STANDARD = re.compile(r"^<|(?:^|/)(?:lib(?:64)?/)?python\d[\d.]*/(?!site-packages|dist-packages)|/lib/python[\d.]+/")
# Functions between a call and what it calls, which say nothing.
_PASSING = frozenset({
    *("wrapper", "wrapped", "inner", "decorate_context", "new_func", "_fn", "fn", "call", "run", "<lambda>"),
    "__call__",
    *("_call_impl", "_wrapped_call_impl", "wrapped_func", "decorator", "_compile_wrapper", "auto_init_wrapper"),
})  # fmt: skip
_WRAPPER = re.compile(r"wrapper$|wrapped$|_decorator$")
_LONGEST = 220
_CALLED = re.compile(r"([A-Za-z_]\w*)\(")


@dataclass(frozen=True)
class JobCall:
    """The call that led to a failure: the innermost call from outside the package that raised the exception.

    place: the file and the number of the calling line.
    code: the calling line; empty if the log does not have it.
    function: the called function, as far as the frames show it.
    package: the package of the calling code; empty for a script.
    depth: the number of frames below the call.
    """

    place: str
    code: str
    function: str
    package: str
    depth: int

    @property
    def where(self) -> str:
        """Describes the call by its place and, if it is known, its line of code."""
        return f"{self.place} (`{shorten(self.code)}`)" if self.code else self.place


def find_who(frames: Sequence[str]) -> str:
    """Names the library that raised an exception, by its frames; empty if no frame shows it."""
    below = ""
    for frame in reversed(frames):
        if below and find_package(frame) not in ("torch", "python"):
            return below
        if who := _match_place(_WHO, frame):
            return who
        if not find_package(frame):
            # The packages further out only called this script.
            return ""
        below = below or _match_place(_WHO_BELOW, frame)
    return below


def find_when(frames: Sequence[str]) -> str:
    """Names the phase of the job, by the frames; empty if no frame shows it."""
    when = next((when for frame in reversed(frames) if (when := _match_place(_WHEN, frame))), "")
    if when == "the forward" and any(map(_RECOMPUTED.search, frames)):
        return "the backward, which recomputes a forward"
    return when


def _match_place(table: Sequence[tuple[str, str]], frame: str) -> str:
    for pattern, words in table:
        if match := re.search(pattern, frame):
            return words or match["name"]
    return ""


def find_package(frame: str) -> str:
    """Returns the package of a frame: "python" for the standard library, empty for a script."""
    match = _FRAME.search(frame)
    file = match["file"].replace("\\", "/") if match else ""
    if package := _PACKAGE.search(file):
        return package["package"] or package["source"]
    return "python" if _STANDARD.search(file) else ""


@dataclass(frozen=True)
class RaisingPlace:
    """The place where an exception was raised: names of files and numbers of lines.

    Directories are left out, because a package may be in another directory on another node.

    innermost: the place of the innermost frame, and of the innermost frame of the job.
    lines: the places of all frames.
    """

    innermost: tuple[str, ...]
    lines: frozenset[str]


def is_same_place(place: RaisingPlace, other: RaisingPlace | None) -> bool:
    """Returns whether two tracebacks may end at the same place; one traceback may be a part of the other."""
    if other is None:
        return True
    return place.innermost == other.innermost or place.lines <= other.lines or place.lines >= other.lines


def find_raising_place(frames: Sequence[str]) -> RaisingPlace | None:
    """Returns the place where an exception with these frames was raised; None if there are no frames."""
    if not frames:
        return None
    of_job = next((frame for frame in reversed(frames) if find_package(frame) not in ("torch", "python")), frames[-1])
    innermost = _name_line(frames[-1]), _name_line(of_job)
    return RaisingPlace(innermost, frozenset(map(_name_line, frames)))


@functools.lru_cache(maxsize=4096)
def _name_line(frame: str) -> str:
    match = _FRAME.search(frame)
    if match is None:
        return frame
    return f"{match['file'].replace(chr(92), '/').rpartition('/')[2]}:{match['line']}"


def find_function(frame: str) -> str:
    match = _FRAME.search(frame)
    return (match["function"] or "").split("(")[0].rsplit(".", 1)[-1] if match else ""


def find_call(raised: Raised) -> JobCall | None:
    """Finds the call that led from other code into the package that raised the exception; None if no frame shows it."""
    frames = raised.frames
    if not frames:
        return None
    raising = next((package for frame in reversed(frames) if (package := find_package(frame)) != "python"), "")
    if not raising:
        return None
    for at in range(len(frames) - 1, -1, -1):
        package = find_package(frames[at])
        if package in (raising, "python") or package in _WRAPPERS:
            continue
        match = _FRAME.search(frames[at])
        code = raised.code_of.get(frames[at], "")
        function = name_called_function(frames[at + 1 :], code)
        place = f"{match['file']}, line {match['line']}" if match else ""
        return JobCall(place, code, function, package, len(frames) - 1 - at)
    return None


def name_called_function(below: Sequence[str], code: str) -> str:
    """Names the function that a call reached, by the frames below the call.

    If these frames do not name a function, as for a call of a class, names the last function that the line of code
    calls.
    """
    called = _CALLED.findall(code)
    for frame in below:
        function = find_function(frame)
        if function in called:
            return function
        if (
            function in _PASSING
            or _WRAPPER.search(function)
            or find_package(frame) == "python"
            or function.startswith("<")
        ):
            continue
        if not (function.startswith("__") and function.endswith("__")):
            return function
        break
    return called[-1] if called else ""


def shorten(text: str) -> str:
    """Returns the text in one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
