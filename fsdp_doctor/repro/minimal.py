"""Writes a case as a script that a maintainer can read from top to bottom.

The script has at most 25 lines, and uses as few ranks as possible.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import assert_never

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import CheckpointFit, Context, Dims, Model, Offload, Phase, Pinning, Precision, Staging
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.methods import explain_impossible, find_method
from fsdp_doctor.repro.expectation import Expectation, find_expected
from fsdp_doctor.repro.script import (
    choose_mesh,
    describe_exit,
    list_used_names,
    locate_method,
    read_method_module,
    read_node_text,
    select_imports,
    tell_outcome,
)
from fsdp_doctor.verdict.classification import VerdictKind

MOST_LINES = 25
_WIDTH = 100
_IMPORTS = """
import os, pathlib, traceback
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.tensor import DTensor, distribute_tensor
"""


def render_minimal(case: Case, name: str = "repro.py", *, as_test: bool = False) -> str:
    """Renders a script of at most 25 lines that shows the failure that the catalogue expects of ``case``.

    The last line of its output is ``shown``, with exit code 0, or ``not shown``. Raises UsageError for a case that
    needs a longer script.

    name: the script's file name, for the command in its docstring.
    as_test: whether the script ends with 1 if the case fails, and with 0 if it does not. The script of a case without a
        known failure always ends in this way.
    """
    method = locate_method(case)
    simple = _simplify(case)
    expected = find_expected(simple)
    if reason := _explain_too_large(simple, method.contract, expected.kind):
        raise UsageError(f"case {case.id!r}: {reason}; leave out --minimal")
    script = _Script(
        case=simple,
        contract=method.contract,
        expected=expected,
        module=read_method_module(method),
        function=method.function.partition(":")[2],
        holds=method.offloads,
    )
    text = script.render(name, as_test=as_test or expected.kind == "ok", case_id=case.id)
    if (count := count_lines(text)) > MOST_LINES:
        raise UsageError(f"case {case.id!r} takes {count} lines, more than a short script has; leave out --minimal")
    return text


def count_lines(script: str) -> int:
    """Counts the lines of a script without its docstring and empty lines."""
    docstring = ast.parse(script).body[0].end_lineno or 0
    return sum(bool(line.strip()) for line in script.splitlines()[docstring:])


def _simplify(case: Case) -> Case:
    """Returns the simplest case near ``case`` for which the catalogue expects the same failure."""
    expected = find_expected(case)
    for change in _PLAINER:
        plainer = dataclasses.replace(case, scenario=dataclasses.replace(case.scenario, **change))
        if plainer.scenario.contradiction or explain_impossible(
            find_method(case.method, case.scenario.version), plainer.scenario
        ):
            continue
        with contextlib.suppress(UsageError):
            if find_expected(plainer) == expected:
                case = plainer
    return case


# The changes are tried in this order. Features that need the most lines in a script come last.
_PLAINER: tuple[dict[str, Any], ...] = (
    {"precision": Precision.FP32_COMPUTE},
    {"pinning": Pinning.PINNED},
    {"phase": Phase.FRESH},
    {"dims": Dims.EVEN},
    *({"offload": Offload.parse(offload)} for offload in ("param", "policy", "none")),
    {"staging": Staging.UNSTAGED},
)


def _explain_too_large(case: Case, contract: Contract, kind: VerdictKind) -> str:
    """Explains why no short script can show the failure; empty if a short script can."""
    scenario = case.scenario
    match scenario.model:
        case Model.QWEN3_MOE:
            return "it needs a model with experts"
        case Model.QWEN3_LORA:
            return "it needs peft"
        case Model.QWEN3_QLORA | Model.QWEN3_QLORA_BF16:
            return "it needs peft and bitsandbytes"
        case Model.QWEN3_FLOAT8 | Model.QWEN3_MXFP8:
            return "it needs torchao"
        case Model.QWEN3_5:
            return "it needs a model with linear attention"
        case Model.CUSTOM | Model.QWEN2 | Model.QWEN3 | Model.QWEN3_TIED | Model.QWEN3_BUFFERS:
            pass
        case _:
            assert_never(scenario.model)
    if scenario.offload.way is not None:
        return f"it needs the offload {scenario.offload}"
    if scenario.checkpoint in (CheckpointFit.OTHER_RUN, CheckpointFit.OTHER_WORLD):
        return "it needs the checkpoint of another run"
    match kind:
        case "hang" | "stuck":
            return "a hang needs the watchdog of the full script"
        case "race" | "order" | "died":
            return "it shows only in some runs, or only while another process works"
        case "poisoned" if not scenario.transfer.is_blocking:
            return "only the full script waits for copies that come too late"
    cast = scenario.checkpoint in (CheckpointFit.FP32, CheckpointFit.BF16)
    moments_or_files = contract.given != "full" or contract.loads != "model"
    if contract.direction == "in" and scenario.version == 1 and cast and moments_or_files:
        return "a checkpoint of FSDP1 in another dtype needs a second run, which a short script does not have"
    if kind == "wrong" and contract.form in ("flat", "local", "optimizer"):
        return f"a short script cannot say which values are right for a method that yields {contract.form} tensors"
    return ""


@dataclass(frozen=True, kw_only=True)
class _Script:
    """The parts of the script of one case.

    module: the source of the module with the method's function.
    holds: whether the method promises that no shard is on the device while it yields (``MatrixMethod.offloads``).
    """

    case: Case
    contract: Contract
    expected: Expectation
    module: str
    function: str
    holds: bool

    @property
    def loads(self) -> bool:
        return self.contract.direction == "in"

    @property
    def fsdp1(self) -> bool:
        return self.case.scenario.version == 1

    @property
    def kind(self) -> VerdictKind:
        return self.expected.kind

    @property
    def on_cpu(self) -> bool:
        scenario = self.case.scenario
        return self.expected.on_cpu and not (self.fsdp1 or scenario.offload) and scenario.backend.has_cpu_collectives

    @property
    def num_ranks(self) -> int:
        """1 if the catalogue says that one rank shows the failure, else the number of ranks in the mesh of the case."""
        on_one = self.expected.on_one_rank and self.case.scenario.sharding.has_one_mesh
        return 1 if on_one else choose_mesh(self.case)[0]

    @property
    def loads_moments(self) -> bool:
        return self.loads and self.contract.loads != "model"

    @property
    def has_optimizer(self) -> bool:
        extracts_moments = self.contract.form == "optimizer" and not self.loads
        steps = self.kind == "poisoned" or self.case.scenario.phase.raised is not None
        return self.case.scenario.optimizer_offload or self.loads_moments or extracts_moments or steps

    def render(self, name: str, *, as_test: bool, case_id: str) -> str:
        body = [*self._start(), *self._build(), *self._prepare()]
        shown = "\n".join([*self._call(), *self._train_on()])
        # torch's CheckpointException is derived from BaseException, not from Exception.
        caught = "BaseException" if self.contract.given == "dcp" and self.loads else "Exception"
        body.append(tell_outcome(shown, as_test=as_test, caught=caught))
        # Only some methods and checks need the device on the CPU; on an accelerator every script needs it.
        if self.on_cpu and any("device" in list_used_names(node) for node in ast.parse("\n".join(body)).body):
            body.insert(0, 'device = torch.device("cpu")')
        return _put_together(self._introduce(name, as_test, case_id), self.module, "\n".join(body))

    def _introduce(self, name: str, as_test: bool, case_id: str) -> str:
        expected, num_ranks = self.expected, self.num_ranks
        where = "the CPU" if self.on_cpu else "an accelerator" if num_ranks == 1 else f"{num_ranks} accelerators"
        plainer = f", shown in {self.case.id}," if self.case.id != case_id else ""
        parts = [
            f"Case {case_id}{plainer} of fsdp-doctor {__version__}; torch {expected.versions.get('torch', 'any')}.",
            f"References: {', '.join(expected.references[:2])}." if expected.references else "",
            describe_exit(as_test=as_test),
        ]
        title = f"{expected.title or case_id}: {self.kind}."
        text = textwrap.fill(" ".join(filter(None, parts)), _WIDTH, break_long_words=False, break_on_hyphens=False)
        command = f"torchrun --nproc-per-node {num_ranks} {name}    # on {where}"
        return f'"""{textwrap.fill(title, _WIDTH)}\n\n{text}\n\n    {command}\n"""\n'

    def _start(self) -> Iterator[str]:
        scenario = self.case.scenario
        accelerator = "torch.accelerator.current_accelerator()"
        if self.on_cpu:
            yield 'dist.init_process_group("gloo")'
        else:
            if self.num_ranks > 1:
                yield f'device = torch.device({accelerator}.type, int(os.environ["LOCAL_RANK"]))'
                yield "torch.accelerator.set_device_index(device.index)"
            else:
                yield f"device = {accelerator}"
            # If no backend is named, torch uses one for the CPU and one for the accelerator.
            backend = "dist.get_default_backend_for_device(device.type)"
            yield f"dist.init_process_group({'' if scenario.backend.has_cpu_collectives else backend})"
        if self._has_mesh:
            mesh = choose_mesh(self.case)[1] if not scenario.sharding.has_one_mesh else f"({self.num_ranks},)"
            device = '"cpu"' if self.on_cpu else "device.type"
            yield f"mesh = init_device_mesh({device}, {mesh})"

    @property
    def _has_mesh(self) -> bool:
        """Returns whether the script makes a device mesh.

        On the CPU it must, because torch would otherwise use an accelerator if the machine has one.
        """
        return self.on_cpu or not self.case.scenario.sharding.has_one_mesh

    @property
    def _builds_twice(self) -> bool:
        """Returns whether the script builds a model that trains and saves its moments, and another that loads them."""
        return self.loads_moments and not self.case.scenario.phase.is_trained

    @property
    def _made_as(self) -> tuple[str, str, str]:
        """(parameter of ``build``, its value for the run that is saved, its value for the model that loads)."""
        if self.case.scenario.init.is_meta:
            return "device", '"cpu"', '"meta"'
        if self.case.scenario.checkpoint is CheckpointFit.FP32:
            return "dtype", "torch.float32", "torch.bfloat16"
        return "", "", ""

    def _build(self) -> Iterator[str]:
        """Writes the code that builds the model, makes the weights that it has or will load, and shards the model."""
        if self._builds_twice:
            yield f"def build({self._made_as[0]}):"
            yield from (f"    {line}" for line in (*self._make_plain(), *self._shard()))
            yield "    return model, torch.optim.AdamW(model.parameters(), lr=0)"
            yield f"model, optimizer = build({self._made_as[1]})"
            return
        if self._compares_values and self.num_ranks > 1:
            yield "torch.manual_seed(0)"
        yield from self._make_plain()
        if self.loads and self.contract.given == "full":
            yield f"state = {{name: {self._ones} for name, tensor in model.state_dict().items()}}"
            if self._gives_rank0_alone:
                yield "state = state if dist.get_rank() == 0 else {}"
            yield from self._misfit("state")
        elif self._compares_values or (self.kind == "incomplete" and not self.loads):
            yield "truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}"
        yield from self._shard()
        if self.has_optimizer:
            yield "optimizer = torch.optim.AdamW(model.parameters(), lr=0)"
        if self._steps:
            yield from ("def step():", *(f"    {line}" for line in (*_STEP, "optimizer.zero_grad()")))

    @property
    def _gives_rank0_alone(self) -> bool:
        return self.contract.ranks == "rank0" and self.num_ranks > 1

    @property
    def _ones(self) -> str:
        """The expression for a tensor of ones in the checkpoint's dtype. No weights of the model consist of ones."""
        dtype = ", dtype=torch.bfloat16" if self.case.scenario.checkpoint is CheckpointFit.BF16 else ""
        return f"torch.ones(tensor.shape{dtype})"

    def _misfit(self, state: str) -> Iterator[str]:
        """Writes the lines that make the checkpoint in the variable ``state`` differ from the model's state dict."""
        match self.case.scenario.checkpoint:
            case CheckpointFit.EXTRA_KEY:
                yield f'{state}["extra.weight"] = torch.ones(8, 8)'
            case CheckpointFit.MISSING_KEY | CheckpointFit.TIED_ONCE:
                yield f'{state}.pop("1.weight", None)'

    @property
    def _compares_values(self) -> bool:
        return self.kind in ("ok", "wrong") and not self.loads and self.contract.form in ("full", "sharded", "info")

    def _make_plain(self) -> Iterator[str]:
        scenario = self.case.scenario
        width = 8 if scenario.dims.is_even or scenario.model.is_tied else 7
        model = f"model = nn.Sequential(nn.Linear(8, {width}), nn.Linear({width}, 8))"
        if self._builds_twice:
            yield model + (f".to({self._made_as[0]})" if self._made_as[0] else "")
        elif scenario.init.is_meta:
            yield 'with torch.device("meta"):'
            yield f"    {model}"
        elif scenario.checkpoint is CheckpointFit.FP32:
            yield f"{model}.bfloat16()"
        else:
            yield model
        if scenario.model.has_buffers or scenario.init.is_meta:
            place = ', device="meta"' if scenario.init.is_meta and not self._builds_twice else ""
            kept = "" if scenario.model.has_buffers else ", persistent=False"
            yield f'model.register_buffer("kept", torch.ones(2{place}){kept})'
        if scenario.model.is_tied:
            yield "model[1].weight = model[0].weight"

    def _shard(self) -> Iterator[str]:
        scenario = self.case.scenario
        mesh = self._has_mesh
        if self.fsdp1:
            options = [
                "device_id=device",
                "use_orig_params=True" * scenario.strategy.uses_original_parameters,
                "device_mesh=mesh" * mesh,
                "sharding_strategy=ShardingStrategy.HYBRID_SHARD" * (not scenario.sharding.has_one_mesh),
                "cpu_offload=CPUOffload(offload_params=True)" * scenario.policy,
                "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)" * scenario.precision.casts,
            ]
            yield f"model = FullyShardedDataParallel(model, {', '.join(filter(None, options))})"
            return
        pins = "" if scenario.pinning.is_pinned else "pin_memory=False"
        options = [
            "mesh=mesh" * mesh,
            f"offload_policy=CPUOffloadPolicy({pins})" * scenario.policy,
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)" * scenario.precision.casts,
        ]
        yield f"fully_shard({', '.join(filter(None, ['model', *options]))})"

    @property
    def _steps(self) -> bool:
        """Returns whether the script has more than one training step."""
        phase, later = self.case.scenario.phase, self.kind == "poisoned"
        return not self._builds_twice and (phase.raised is not None or (phase.is_trained and later))

    def _prepare(self) -> Iterator[str]:
        """Writes the code that brings the model into the scenario's state: trained, after a step that raised,
        offloaded, staged.
        """
        scenario = self.case.scenario
        if self._builds_twice:
            yield from (*_STEP, *self._save(), f"model, optimizer = build({self._made_as[2]})")
        elif scenario.phase.is_trained:
            yield from ["step()"] if self._steps else _STEP if self.has_optimizer else _STEP[:1]
        if self.loads and not self._builds_twice and (self.contract.given != "full" or self.loads_moments):
            yield from self._save()
        yield from self._raise_in_step()
        if scenario.param_offload:
            yield from self._move('"cpu"')
        if scenario.optimizer_offload:
            yield "for moments in optimizer.state.values():"
            blocking = "" if scenario.transfer.is_blocking else ", non_blocking=True"
            yield f'    moments.update({{key: value.to("cpu"{blocking}) for key, value in moments.items()}})'
        if scenario.staging.is_staged:
            yield from self._move("device")
        if self.kind == "misplaced" and not self.loads and self.contract.device == "parameter":
            yield "places = {name: parameter.device for name, parameter in model.named_parameters()}"
        if self.kind == "misplaced" and self.loads:
            yield "places = [(parameter.device, parameter.dtype) for parameter in model.parameters()]"
        if self.kind == "leak":
            yield "allocated = torch.get_device_module(device).memory_allocated()"
        if "buffers" in self._arguments:
            yield 'buffers = {"kept": torch.ones(2)}'

    def _save(self) -> Iterator[str]:
        """Writes the checkpoint in the form that the method is given."""
        contract = self.contract
        moments = "get_optimizer_state_dict(model, optimizer%s)" % (
            ", options=StateDictOptions(full_state_dict=True)" if contract.given == "full" else ""
        )
        if contract.loads == "optimizer":
            yield f"state = {moments}{' if dist.get_rank() == 0 else {}' if self._gives_rank0_alone else ''}"
            return
        saved = "get_model_state_dict(model)"
        saved = "get_model_state_dict(model)"
        if contract.loads != "both" and not self.fsdp1 and self._needs_values:
            cut = f"distribute_tensor({self._ones.replace('tensor', 'own')}, own.device_mesh, own.placements)"
            cut += " if isinstance(own, DTensor) else own" if self.case.scenario.model.has_buffers else ""
            saved = "state" if contract.given == "sharded" else "weights"
            yield f"{saved} = model.state_dict()"
            yield f"for name, own in {saved}.items():"
            yield f"    {saved}[name] = {cut}"
            yield from self._misfit(saved)
        elif contract.given == "sharded" or list(self._misfit("")):
            weights, saved = saved, "state" if contract.given == "sharded" else "weights"
            yield f"{saved} = dict({weights})"
            yield from self._misfit(saved)
        match contract.given:
            case "dcp":
                both = f', "optimizer": {moments}' if contract.loads == "both" else ""
                yield 'state = "/tmp/checkpoint"'
                yield f'dcp.save({{"model": {saved}{both}}}, checkpoint_id=state)'
            case "rank_files":
                suffix = "world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
                yield 'state = pathlib.Path("/tmp")'
                yield f'torch.save({saved}, state / f"model_{suffix}")'
                if contract.loads == "both":
                    yield f'torch.save(optimizer.state_dict(), state / f"optim_{suffix}")'
            case "full" | "sharded":
                pass
            case _:
                assert_never(contract.given)

    @property
    def _needs_values(self) -> bool:
        """Returns whether the checkpoint's tensors must differ from the model's.

        They need not differ if the load raises.
        """
        ends_in_error = self.kind in ("crash", "refused", "poisoned") and self.case.scenario.checkpoint.must_load
        return not ends_in_error or self.case.scenario.init.is_meta or self._assigns

    def _raise_in_step(self) -> Iterator[str]:
        match self.case.scenario.phase.raised:
            case "forward":
                yield "hook = model[1].register_forward_hook(lambda *_: 1 / 0)"
            case "backward":
                yield "hook = model[1].register_full_backward_pre_hook(lambda *_: 1 / 0)"
            case None:
                return
        yield "try:"
        yield "    step()"
        yield "except ZeroDivisionError:"
        yield "    hook.remove()"
        yield "model.zero_grad()"

    def _move(self, place: str) -> Iterator[str]:
        """Writes the move of the weights to a place. FSDP1's weights are moved unit by unit, as in verl.

        place: the expression for the place.
        """
        late = "" if self.case.scenario.transfer.is_blocking else ", non_blocking=True"
        if not self.fsdp1:
            yield f"model.to({place}{late})"
            return
        if not self.case.scenario.phase.is_trained:
            yield "_lazy_init(model, model)"
        yield f"model._handle.flat_param_to(torch.device({place}){late})"
        yield "model._handle.flat_param._local_shard = model._handle.flat_param.data"

    @property
    def _arguments(self) -> list[str]:
        definition = _find_function(self.module, self.function)
        return [argument.arg for argument in definition.args.args]

    def _call(self) -> Iterator[str]:
        """Writes the method's own code, with the check of each entry that the failure needs."""
        checks = list(self._check_entry())
        needs_result = bool(checks) or "result" in " ".join(self._check_load())
        lines = _inline(self.module, self.function, checks, needs_result=needs_result)
        if self.kind == "incomplete" and not self.loads:
            lines = ["names = set()", *lines]
        match self.case.scenario.context:
            case Context.ORDINARY:
                yield from lines
            case Context.NO_GRAD | Context.INFERENCE as context:
                mode = "no_grad" if context is Context.NO_GRAD else "inference_mode"
                yield f"with torch.{mode}():"
                yield from (f"    {line}" for line in lines)
            case _:
                assert_never(self.case.scenario.context)
        yield from self._check_load() if self.loads else self._check_names()

    def _check_entry(self) -> Iterator[str]:
        """Writes the lines that compare one entry, ``name`` and ``value``, with the right value."""
        contract = self.contract
        if self.loads:
            return
        match self.kind:
            case "ok" | "wrong" if contract.form == "info":
                yield 'assert value == (truth[name].size(), truth[name].dtype), f"{name}: {value}"'
            case "ok" | "wrong" if contract.form == "sharded":
                yield "full = value.to(device).full_tensor() if isinstance(value, DTensor) else value"
                yield 'assert torch.equal(full.cpu(), truth[name]), f"{name} has other values"'
            case "ok" | "wrong" if contract.form == "full":
                cast = ".bfloat16()" if contract.dtype == "compute" and self.case.scenario.precision.casts else ""
                yield f"right = not isinstance(value, DTensor) and torch.equal(value.cpu(), truth[name]{cast})"
                yield 'assert right, f"wrong: {name}, a {type(value).__name__}"'
            case "misplaced":
                place = {"cpu": 'torch.device("cpu")', "parameter": "places.get(name, device)"}.get(
                    contract.device, "device"
                )
                condition = "not value.ndim or " if contract.form == "optimizer" else ""
                yield f'assert {condition}value.device.type == {place}.type, f"{{name}} is on {{value.device}}"'
            case "incomplete":
                yield "names.add(name)"
            case "leak" if self.holds:
                yield "held = torch.get_device_module(device).memory_allocated()"
                yield 'assert 2 * held <= allocated, f"{held} of {allocated} bytes are still allocated"'

    def _check_names(self) -> Iterator[str]:
        if self.kind == "incomplete":
            yield 'assert names >= set(truth), f"missing: {set(truth) - names}"'
        if self.kind == "leak" and not self.holds:
            yield "held = torch.get_device_module(device).memory_allocated() - allocated"
            yield 'assert held <= 0, f"{held} bytes are still allocated"'

    def _check_load(self) -> Iterator[str]:
        """Writes the lines that compare the model with the checkpoint after a load."""
        scenario = self.case.scenario
        match self.kind:
            case "incomplete" if scenario.init.is_meta:
                yield "tensors = dict(model.named_parameters()) | dict(model.named_buffers())"
                yield "meta = [name for name, tensor in tensors.items() if tensor.is_meta]"
                yield 'assert not meta, f"{meta} are still on the meta device"'
            case "incomplete" if scenario.checkpoint is CheckpointFit.EXTRA_KEY:
                yield 'raise AssertionError("extra.weight was dropped in silence")'
            case "incomplete" if scenario.checkpoint is CheckpointFit.MISSING_KEY:
                yield 'assert "1.weight" in result.missing_keys, f"1.weight was not loaded, and the result is {result}"'
            case "incomplete" if self.loads_moments:
                yield "loaded, wanted = len(optimizer.state), len(list(model.parameters()))"
                yield 'assert loaded == wanted, f"moments of {loaded} of {wanted} parameters"'
            case "wrong" if scenario.model.is_tied:
                yield 'assert model[0].weight is model[1].weight, "the weights are no longer tied"'
            case "ok" if self.loads_moments:
                yield "loaded, wanted = len(optimizer.state), len(list(model.parameters()))"
                yield 'assert loaded == wanted, f"moments of {loaded} of {wanted} parameters"'
            case "ok" | "wrong" | "incomplete":
                yield "full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
                yield 'assert all(tensor.eq(1).all() for tensor in full.values()), f"not loaded: {full}"'
            case "misplaced" if scenario.checkpoint is CheckpointFit.FP32 and self.loads_moments:
                yield "dtypes = {moments['exp_avg'].dtype for moments in optimizer.state.values()}"
                yield 'assert dtypes == {torch.float32}, f"rounded to {dtypes}"'
            case "misplaced" if scenario.checkpoint is CheckpointFit.FP32:
                yield 'assert all(p.dtype == torch.float32 for p in model.parameters()), "rounded to bfloat16"'
            case "misplaced":
                yield "now = [(parameter.device, parameter.dtype) for parameter in model.parameters()]"
                yield 'assert now == places, f"{now[0]}, and it was {places[0]}"'

    @property
    def _assigns(self) -> bool:
        """Returns whether the load puts the checkpoint's own tensors into the model."""
        return any("assign=True" in line for line in _inline(self.module, self.function, [], needs_result=False))

    def _train_on(self) -> Iterator[str]:
        """Writes the next training step if this is the step that fails.

        Before the step, all tensors are brought back to the device.
        """
        scenario = self.case.scenario
        if self.kind != "poisoned":
            return
        if scenario.staging.is_staged and scenario.param_offload:
            yield from self._move('"cpu"')
        if scenario.param_offload:
            yield from self._move("device")
        if scenario.optimizer_offload:
            yield "for moments in optimizer.state.values():"
            yield "    moments.update({key: value.to(device) for key, value in moments.items()})"
        if self._assigns:
            yield _STEP[0]
            yield 'held = sum(id(p) in map(id, optimizer.param_groups[0]["params"]) for p in model.parameters())'
            yield """assert held == 4, f"the optimizer holds {held} of the model's 4 parameters\""""
        else:
            yield from ["step()"] if self._steps else _STEP


_STEP = ("model(torch.ones(2, 8)).sum().backward()", "optimizer.step()")


def _find_function(module: str, name: str) -> ast.FunctionDef:
    return next(node for node in ast.parse(module).body if isinstance(node, ast.FunctionDef) and node.name == name)


def _list_body_lines(module: str, definition: ast.FunctionDef) -> list[str]:
    """Returns the lines of a function without its docstring, as they are in the module."""
    first = definition.body[1 if ast.get_docstring(definition) else 0]
    text = "\n".join(module.splitlines()[first.lineno - 1 : definition.end_lineno])
    return textwrap.dedent(text).splitlines()


def _inline(module: str, function: str, checks: list[str], *, needs_result: bool) -> list[str]:
    """Returns the lines of a method's body, to use instead of a call of the method.

    checks: the lines that check each entry that the method yields, or returns in a mapping.
    needs_result: whether the lines store the returned value in ``result``.
    """
    definition = _find_function(module, function)
    yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(definition))
    lines: list[str] = []
    for line in _list_body_lines(module, definition):
        code = line.lstrip()
        indent = line[: len(line) - len(code)]
        if code.startswith("yield from "):
            lines += [f"{indent}for name, value in {code.removeprefix('yield from ')}:"]
            lines += [f"{indent}    {check}" for check in checks or ["pass"]]
        elif code.startswith("yield "):
            node = ast.parse(code).body[0]
            assert isinstance(node, ast.Expr)
            assert isinstance(node.value, ast.Yield)
            assert isinstance(node.value.value, ast.Tuple)
            name, value = (ast.get_source_segment(code, part) or "" for part in node.value.value.elts)
            if checks and name != "name":
                lines.append(f"{indent}name = {name}")
            lines += [f"{indent}value = {value}", *(f"{indent}{check}" for check in checks)]
        elif code.startswith("return "):
            lines.append(indent + ("result = " if needs_result else "") + code.removeprefix("return "))
        else:
            lines.append(line)
    if not yields and checks:
        lines += ["for name, value in result.items():", *(f"    {check}" for check in checks)]
    return lines


def _put_together(docstring: str, module: str, body: str) -> str:
    """Joins the script: docstring, imports, the module's functions that the body calls, and the body."""
    definitions = {node.name: node for node in ast.parse(module).body if isinstance(node, ast.FunctionDef)}
    body_tree = ast.parse(body)
    used = more = {name for node in body_tree.body for name in list_used_names(node)}
    while (
        more := {
            other
            for name in more & definitions.keys()
            for statement in definitions[name].body
            for other in list_used_names(statement)
        }
        - used
    ):
        used |= more
    imports = [node for source in (_IMPORTS, module) for node in ast.parse(source).body]
    functions = []
    for name, node in definitions.items():
        if name in used:
            arguments = ", ".join(argument.arg for argument in node.args.args)
            lines = [f"    {line}" for line in _list_body_lines(module, node)]
            functions.append("\n".join([f"def {name}({arguments}):", *lines, ""]))
    own = "\n".join(
        (f"\n{text}\n" if isinstance(node, ast.FunctionDef) else text)
        for node in body_tree.body
        for text in [read_node_text(body, node)]
    )
    return "\n".join([docstring, select_imports(imports, used).strip(), "", *functions, own]) + "\n"
