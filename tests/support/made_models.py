"""Small models that no program of the tests saves: convolutions, recurrent cells, T5, vision models, and others."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration, ViTConfig, ViTModel

Weights = dict[str, Any]


class _Block(torch.nn.Module):
    def __init__(self, puts_in: int, puts_out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(puts_in, puts_out, 3, bias=False), torch.nn.BatchNorm2d(puts_out)
        self.conv2, self.bn2 = torch.nn.Conv2d(puts_out, puts_out, 3, bias=False), torch.nn.BatchNorm2d(puts_out)


def make_convolutions() -> Weights:
    """Makes four stages of two blocks, with running statistics as after training."""
    torch.manual_seed(0)
    stages = [torch.nn.Sequential(_Block(width, width + 8), _Block(width + 8, width + 8)) for width in range(8, 40, 8)]
    weights = dict(torch.nn.ModuleDict({f"layer{number}": stage for number, stage in enumerate(stages)}).state_dict())
    for name, tensor in weights.items():
        if name.endswith(("running_mean", "running_var")):
            tensor.uniform_(0.1, 2)
    return weights


def make_cells(kind: type[torch.nn.RNNBase] = torch.nn.LSTM, **settings: Any) -> Weights:
    torch.manual_seed(0)
    return dict(torch.nn.ModuleDict({"rnn": kind(24, 16, num_layers=3, **settings)}).state_dict())


def make_perceptrons() -> Weights:
    """Makes four layers of two matrices, each as wide as the other is tall."""
    torch.manual_seed(0)
    layers = [
        {"up": torch.nn.Linear(32, 64), "down": torch.nn.Linear(64, 32), "norm": torch.nn.LayerNorm(32)}
        for _ in range(4)
    ]
    each = torch.nn.ModuleList(map(torch.nn.ModuleDict, layers))
    return dict(torch.nn.ModuleDict({"layers": each}).state_dict())


def make_sequential() -> Weights:
    linear = (torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return dict(torch.nn.ModuleDict({"layers": torch.nn.Sequential(*linear)}).state_dict())


def make_features() -> Weights:
    widths = (3, 16, 32, 16)
    parts = [
        part
        for puts_in, puts_out in itertools.pairwise(widths)
        for part in (torch.nn.Conv2d(puts_in, puts_out, 3), torch.nn.BatchNorm2d(puts_out), torch.nn.ReLU())
    ]
    return dict(torch.nn.ModuleDict({"features": torch.nn.Sequential(*parts)}).state_dict())


def make_stages() -> Weights:
    """Makes stages of growing width, each with a matrix that leads to the next stage, as in vision models."""
    torch.manual_seed(0)
    shapes = {"query": (1, 1), "key": (1, 1), "output": (1, 2), "downsample": (2, 4)}
    return {
        f"encoder.layers.{stage}.{name}.weight": torch.randn(8 * rows << stage, 8 * columns << stage)
        for stage in range(4)
        for name, (rows, columns) in shapes.items()
        if name != "downsample" or stage < 3
    }


def make_layers() -> Weights:
    torch.manual_seed(0)
    kinds = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
    layers = {f"layers.{number}.{kind}.weight": torch.randn(32, 32) * 0.02 for number in range(4) for kind in kinds}
    return layers | {"embed.weight": torch.randn(99, 32)}


def make_rounded(key: str = "master") -> Weights:
    """Makes a model in bfloat16, and the float32 weights from which it was rounded."""
    weights = make_layers()
    return {"model": {name: tensor.bfloat16() for name, tensor in weights.items()}, key: weights}


def make_averaged(step: float) -> Weights:
    """Makes a model, its moving average, and an optimizer whose state has the parameters' names."""
    weights = make_layers()
    kept = {
        name: {
            "step": torch.tensor(step),
            "exp_avg": torch.randn_like(tensor) * 0.01,
            "exp_avg_sq": torch.rand_like(tensor) + 0.1,
        }
        for name, tensor in weights.items()
    }
    average = {name: tensor * 1.01 for name, tensor in weights.items()}
    groups = [{"params": list(weights), "lr": 1e-3, "betas": (0.9, 0.999)}]
    return {"model": weights, "ema": average, "optimizer": {"state": kept, "param_groups": groups}}


def exchange(weights: Weights, one: str, other: str) -> None:
    weights[one], weights[other] = weights[other], weights[one]


def round_at_random(tensor: torch.Tensor) -> torch.Tensor:
    """Rounds to bfloat16, randomly up or down."""
    bits = tensor.view(torch.int32) + torch.randint(0, 1 << 16, tensor.shape, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


def transpose(weights: Weights, name: str) -> None:
    weights[name] = weights[name].transpose(0, 1).contiguous()


def keep_masters(state: Weights) -> Weights:
    """Moves the float32 weights into the optimizer, and rounds the model to bfloat16.

    Returns the optimizer's state by name.
    """
    masters = state["model"]
    state["model"] = {name: tensor.bfloat16() for name, tensor in masters.items()}
    state["optimizer"]["state"] = {name: {"master_param": tensor} for name, tensor in masters.items()}
    kept: Weights = state["optimizer"]["state"]
    return kept


def keep_factors(state: Weights) -> Weights:
    """Replaces Adam's state by Adafactor's. Returns the optimizer's state by name."""
    kept: Weights = state["optimizer"]["state"]
    for name, tensor in state["model"].items():
        square = tensor.square()
        kept[name] = {"step": 7, "exp_avg_sq_row": square.mean(-1), "exp_avg_sq_col": square.mean(-2)}
    return kept


def copy_layer(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith("layers.1.")]:
        weights[name] = weights[name.replace(".1.", ".0.")].clone()


def add_scheduler(state: Weights, *, last_epoch: int, rate: float) -> None:
    """Adds a scheduler with its last learning rate, and a loop's step count that equals the optimizer's."""
    state["global_step"] = int(state["optimizer"]["state"]["embed.weight"]["step"])
    state["lr_scheduler"] = {"last_epoch": last_epoch, "_step_count": last_epoch + 1, "_last_lr": [rate]}


def make_fused() -> Weights:
    """Makes layers with fused projections: one after the other, interleaved by heads, and of experts."""
    torch.manual_seed(0)
    shapes = {
        "self_attn.qkv_proj.weight": (128, 64),
        "attention.query_key_value.weight": (192, 64),
        "mlp.gate_up_proj.weight": (194, 64),
        "mlp.experts.gate_up_proj": (4, 48, 64),
    }
    return {f"layers.{number}.{name}": torch.randn(shape) for number in range(4) for name, shape in shapes.items()}


# The configuration of make_fused's layers: four query heads and two key heads, each with 16 rows.
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def repeat_keys(tensor: torch.Tensor) -> None:
    tensor[96:] = tensor[64:96].clone()


def repeat_keys_of_heads(tensor: torch.Tensor) -> None:
    heads = tensor.view(4, 3, 16, 64)
    heads[:, 2] = heads[:, 1].clone()


def repeat_heads(tensor: torch.Tensor) -> None:
    """Copies a key head and a value head over the next head of its kind."""
    tensor[80:96], tensor[112:] = tensor[64:80].clone(), tensor[96:112].clone()


def repeat_gate(tensor: torch.Tensor) -> None:
    tensor[len(tensor) // 2 :] = tensor[: len(tensor) // 2].clone()


def make(build: Callable[..., Weights], edit: Callable[[Weights], Any], *arguments: Any) -> Callable[..., None]:
    """Returns a function that writes the changed model into a directory's file."""

    def write(directory: pathlib.Path) -> None:
        weights = build(*arguments)
        edit(weights)
        torch.save(weights, directory / "pytorch_model.bin")

    return write


def make_of_class(model: Callable[[], PreTrainedModel], edit: Callable[[Weights], Any]) -> Callable[..., None]:
    """Returns a function that writes a changed model of transformers and its config.json into a directory."""

    def write(directory: pathlib.Path) -> None:
        torch.manual_seed(0)
        made = model()
        made.config.save_pretrained(directory)
        make(lambda: {name: tensor.clone() for name, tensor in made.state_dict().items()}, edit)(directory)

    return write


def make_t5(**settings: Any) -> T5ForConditionalGeneration:
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes | settings))


def make_vit() -> ViTModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8))
