"""A scenario as the text of functions: ``build``, ``step``, the framework's moves, and the weights as they should be.

What trainer.py, fsdp/fsdp1.py and fsdp/fsdp2.py do for any scenario, written out for one.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.paths import Path

_CONFIGURATIONS = {
    "qwen2": ("Qwen2Config", ""),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "head_dim=16,\n    num_experts={experts}, num_experts_per_tok=2, moe_intermediate_size=32",
    ),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        "head_dim=16,\n    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,\n"
        '    linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"]',
    ),
}
_SIZES = {
    "even": {"vocabulary": 256, "intermediate": 128, "experts": 4},
    "uneven": {"vocabulary": 257, "intermediate": 131, "experts": 5},
}


@dataclass
class Block:
    """Lines of a script, and the (module, name) pairs that they import."""

    text: str
    imports: list[tuple[str, str]] = field(default_factory=list)


def build(scenario: Scenario, path: Path, *, apart: bool) -> list[Block]:
    """``build(device)`` returns the sharded model and its optimizer. apart: beside it ``plain()``, not sharded."""
    plain = _model(scenario)
    sharded = Block("model = plain()\n" if apart else "")
    _add(sharded, Block("") if apart else plain)
    _add(sharded, _mesh(scenario, path))
    _add(sharded, _fsdp2(scenario) if scenario.version == 2 else _fsdp1(scenario, path))
    sharded.text += "return model, torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
    plain.text += "return model\n"
    return [*([function("plain()", plain)] if apart else []), function("build(device)", sharded)]


def step(scenario: Scenario) -> Block:
    """``step(model, optimizer, device)``: forward, backward, AdamW."""
    vocabulary = _SIZES[scenario.dims]["vocabulary"]
    finite = scenario.transfer == "nonblocking"
    lines = [
        f"tokens = torch.randint(0, {vocabulary}, (2, 16)).to(device)",
        "loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss",
        "loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
        *(['assert torch.isfinite(loss), f"the loss is {float(loss)}"'] if finite else []),
    ]
    return function("step(model, optimizer, device)", Block("\n".join(lines) + "\n"))


def moves(scenario: Scenario) -> list[Block]:
    """``move_units`` and ``move_optimizer`` where the scenario moves FSDP1's units and the optimizer's state."""
    blocks = []
    blocking = scenario.transfer == "blocking"
    if scenario.version == 1 and (scenario.param_offload or scenario.staging == "staged"):
        blocks.append(_move_units(blocking))
    if scenario.optimizer_offload:
        how = "" if blocking else ", non_blocking=True"
        text = (
            "for state in optimizer.state.values():\n"
            f"    state |= {{key: value.to(device{how}) for key, value in state.items()}}\n"
        )
        blocks.append(function("move_optimizer(optimizer, device)", Block(text)))
    return blocks


def weights(scenario: Scenario) -> Block:
    """``weights(model, device)``: every entry on the host, read while it is where torch put it."""
    if scenario.version == 1:
        lines = [
            "with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):",
            "    return {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}",
        ]
        imports = [("torch.distributed.fsdp", name) for name in ("FullyShardedDataParallel", "StateDictType")]
    else:
        lines = [
            "full = lambda t: t.detach().to(device).full_tensor() if isinstance(t, DTensor) else t",
            "return {name: full(tensor).cpu().clone() for name, tensor in model.state_dict().items()}",
        ]
        imports = [("torch.distributed.tensor", "DTensor")]
    return function("weights(model, device)", Block("\n".join(lines) + "\n", imports))


def before(scenario: Scenario) -> list[str]:
    """The statements that bring a trained model to the state in which it is extracted."""
    return _offload(scenario) + ([_move_model(scenario, "device")] if scenario.staging == "staged" else [])


def after(scenario: Scenario) -> list[str]:
    """The statements between the extraction and the next training step."""
    lines = _offload(scenario) if scenario.staging == "staged" and scenario.param_offload else []
    if scenario.param_offload:
        lines.append(_move_model(scenario, "device"))
    if scenario.optimizer_offload:
        lines.append("move_optimizer(optimizer, device)")
    return lines


def _offload(scenario: Scenario) -> list[str]:
    lines = [_move_model(scenario, '"cpu"')] if scenario.param_offload else []
    return lines + ['move_optimizer(optimizer, "cpu")'] * scenario.optimizer_offload


def _move_model(scenario: Scenario, device: str) -> str:
    if scenario.version == 1:
        return f"move_units(model, {device})"
    return f"model.to({device}{'' if scenario.transfer == 'blocking' else ', non_blocking=True'})"


def _add(block: Block, other: Block) -> None:
    block.text += other.text
    block.imports += other.imports


def function(head: str, body: Block) -> Block:
    """A function of that name and arguments around the block."""
    return Block(f"def {head}:\n" + textwrap.indent(body.text, "    "), body.imports)


def _model(scenario: Scenario) -> Block:
    sizes = _SIZES[scenario.dims]
    name, own = _CONFIGURATIONS.get(scenario.model, ("Qwen3Config", "head_dim=16"))
    tied = scenario.model == "qwen3-tied"
    own = f", {own.format(**sizes)}" if own else ""
    text = (
        "torch.manual_seed(0)\n"
        f"config = {name}(\n"
        f"    vocab_size={sizes['vocabulary']}, hidden_size=64, intermediate_size={sizes['intermediate']},"
        " num_hidden_layers=2, num_attention_heads=4,\n"
        f"    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings={tied}{own},\n"
        ")\n"
        "model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()\n"
    )
    block = Block(text, [("torch", ""), ("transformers", name), ("transformers", "AutoModelForCausalLM")])
    if scenario.model == "qwen3-buffers":
        block.text += (
            "for layer in model.model.layers:\n"
            '    layer.register_buffer("score_bias", torch.arange(5, dtype=torch.float32))\n'
        )
    if scenario.model == "qwen3-lora":
        block.text += (
            'lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)\n'
            "model = peft.get_peft_model(model, lora)\n"
        )
        block.imports.append(("peft", ""))
    return block


def _mesh(scenario: Scenario, path: Path) -> Block:
    if path.without_mesh:
        return Block("")
    world = "dist.get_world_size()"
    shape = {"full": f"({world},)", "hsdp": f"({world} // 2, 2)", "size1": f"({world}, 1)"}[scenario.sharding]
    names = '("fsdp",)' if scenario.sharding == "full" else '("ddp", "fsdp")'
    return Block(
        f"mesh = init_device_mesh(device.type, {shape}, mesh_dim_names={names})\n",
        [("torch.distributed.device_mesh", "init_device_mesh")],
    )


def _fsdp2(scenario: Scenario) -> Block:
    names = ["MixedPrecisionPolicy", "fully_shard"]
    policy = ""
    if scenario.policy:
        names.append("CPUOffloadPolicy")
        pin = 'device.type != "cpu"' if scenario.pinning == "pinned" else "False"
        policy = f", offload_policy=CPUOffloadPolicy(pin_memory={pin})"
    embedding = "" if scenario.model == "qwen3-tied" else " model.get_input_embeddings(),"
    text = (
        "precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
        f"how = dict(mesh=mesh, mp_policy=precision{policy})\n"
        'layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]\n'
        f"for module in (*layers,{embedding} model):\n"
        "    fully_shard(module, **how)\n"
    )
    return Block(text, [("torch.distributed.fsdp", name) for name in names])


def _fsdp1(scenario: Scenario, path: Path) -> Block:
    lora = scenario.model == "qwen3-lora"
    names = ["FullyShardedDataParallel", "MixedPrecision"]
    more = []
    if scenario.policy:
        names.append("CPUOffload")
        more.append("cpu_offload=CPUOffload(offload_params=True)")
    if scenario.sharding != "full" and not path.without_mesh:
        names.append("ShardingStrategy")
        more.append("sharding_strategy=ShardingStrategy.HYBRID_SHARD")
    if not path.without_mesh:
        more.append("device_mesh=mesh")
    text = (
        "precision = MixedPrecision(\n"
        "    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32"
        + (", cast_forward_inputs=True" if lora else "")
        + "\n)\n"
        + (_LORA_UNITS if lora else "")
        + "model = FullyShardedDataParallel(\n"
        f"    model, auto_wrap_policy=CustomPolicy({'is_unit' if lora else f'lambda m: {_IS_LAYER}'}),\n"
        f"    device_id=device, mixed_precision=precision, use_orig_params={scenario.strategy == 'fsdp1-orig'},\n"
        + (f"    {', '.join(more)},\n" if more else "")
        + ")\n"
    )
    imports = [("torch.distributed.fsdp", name) for name in names]
    return Block(text, [*imports, ("torch.distributed.fsdp.wrap", "CustomPolicy")])


_IS_LAYER = 'type(m).__name__.endswith("DecoderLayer")'
_LORA_UNITS = (
    "# A flat parameter trains as a whole or not at all: each leaf that trains is a unit.\n"
    "trains = lambda module: any(p.requires_grad for p in module.parameters(recurse=False))\n"
    f"is_unit = lambda m: {_IS_LAYER} or (trains(m) and not any(m.children()))\n"
)


def _move_units(blocking: bool) -> Block:
    return Block(
        textwrap.dedent(f"""\
        @torch.no_grad()
        def move_units(model, device):
            _lazy_init(model, model)
            for module in FullyShardedDataParallel.fsdp_modules(model):
                handle = module._handle
                if handle is not None and not handle._offload_params:
                    handle.flat_param_to(torch.device(device), non_blocking={not blocking})
                    handle.flat_param._local_shard = handle.flat_param.data
        """),
        [("torch.distributed.fsdp._runtime_utils", "_lazy_init")],
    )
