"""Names of a transformers model's tensors on the Hub, as ``save_pretrained`` would write them, from transformers
itself.

transformers 5.0.0 and newer converts a checkpoint when it loads it (for example, tensors of single experts into one
fused tensor), and ``revert_weight_conversion`` reverts this when it saves (read in 5.0.0 and 5.23.0). This module runs
the reversion on meta tensors with the model's names and shapes, and replaces each copy of a tensor by the tensor
itself. Each result is then a view of a tensor of the model, and shows which part of this tensor it is. No table of
model families is needed.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import assert_never

from fsdp_doctor.checkpoints.hub_parts import HubPart
from fsdp_doctor.checkpoints.names import WRAPPER_NAMES, strip_adapters
from fsdp_doctor.checkpoints.optimizer import ParameterOrder
from fsdp_doctor.text import join_some, read_first_line
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.decorators import disable_autograd
from fsdp_doctor.weights.names.views import NamesError, TensorView, check_one_to_one, find_box

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NameChoice = Literal["auto", "model", "hub"]
Names: TypeAlias = NameChoice | Mapping[str, TensorView]
"""``model``: the model's own names. ``hub``: the names in files of ``save_pretrained``. ``auto``:
the names that fit. Or a mapping in the form of :func:`read_hub_view`."""

_MOST_NAMES = 10


class HubNamesUnknown(NamesError):
    """Error for a model whose names on the Hub cannot be determined."""


class ModelClassUnknown(HubNamesUnknown):
    """Error for a checkpoint or configuration that does not say which class of transformers has the weights."""


@dataclass(frozen=True, eq=False)
class HubNames:
    """Names to use instead of the model's own: the Hub's, or names that the caller gave.

    views: for each name, the part of a tensor of the model that the name stands for.
    """

    views: Mapping[str, TensorView]

    @functools.cached_property
    def _by_tensor(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name, view in self.views.items():
            names.setdefault(view.name, []).append(name)
        return names

    def list_parts(self, names: Sequence[str]) -> list[tuple[tuple[str, ...], TensorView]]:
        """Returns (names of the part, view) for each part of one tensor.

        names: all names that the tensor has in the model.
        """
        parts: dict[TensorView, list[str]] = collections.defaultdict(list)
        for name in itertools.chain.from_iterable(self._by_tensor.get(name, ()) for name in names):
            parts[TensorView(names[0], *self.views[name][1:])].append(name)
        return [(tuple(its_names), view) for view, its_names in parts.items()]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the names and of the parts that they stand for."""
        lines = (f"{name} = {view}\n" for name, view in self.views.items())
        return hashlib.blake2b("".join(lines).encode(), digest_size=8).hexdigest()


def read_hub_view(model: nn.Module) -> dict[str, TensorView]:
    """Maps the Hub's name of each tensor that ``save_pretrained`` would write to a part of one of the model's tensors.

    A fused ``experts.gate_up_proj`` has a view for each projection of each expert. The result has all names of a tied
    tensor. Only attributes are read: any rank may call it alone, for a model under FSDP in any state, also on the meta
    device.

    Raises HubNamesUnknown (NamesError) if the model is not one of transformers, if transformers is older than 5.0.0,
    and for a quantized model. Raises NamesError (ValueError), with the names, for tensors that are not views of one of
    the model's tensors, such as a projection that is fused on the Hub but not in the model.
    """
    return revert_names(model, list_shapes(reader.read(model)))


def read_hub_parts(config: str) -> dict[str, HubPart]:
    """Returns the parts of :func:`read_hub_view` for a model of which only the configuration is given.

    Tensors that have the same name and form on the Hub as in the model are left out. The model is built on the meta
    device; without ``architectures`` its class is that of ``AutoModelForCausalLM``. Raises ModelClassUnknown
    (HubNamesUnknown) if the model is not a model of transformers, and the errors of :func:`read_hub_view`.

    config: a directory with a ``config.json``, or the name of a model on the Hub.
    """
    model = _build_on_meta(config)
    if getattr(model.config, "quantization_config", None) is not None:
        raise HubNamesUnknown(f"the model of {config} is quantized: the Hub's tensors are not parts of its tensors")
    shapes = list_shapes(reader.read(model))
    parts = {}
    for name, view in revert_names(model, shapes).items():
        whole = tuple(shapes[view.name])
        if name != view.name or not view.is_whole(whole):
            box = find_box(view, whole)
            assert box is not None  # as revert_names has checked
            parts[name] = HubPart(view.name, whole, box.begins, box.lengths, box.dims, view.shape)
    return parts


def read_parameter_order(config: str) -> ParameterOrder:
    """Returns a model's parameters in the order of ``named_parameters``, by which optimizers number them.

    The result also has the parameters that ``Trainer`` in the installed transformers decays, or None if these cannot be
    determined (``get_decay_parameter_names``; read in 4.57.6 and 5.23.0).

    config, errors: see :func:`read_hub_parts`.
    """
    model = _build_on_meta(config)
    names = tuple(name for name, _ in model.named_parameters())
    try:
        from transformers import Trainer

        return ParameterOrder(names, frozenset(Trainer.get_decay_parameter_names(cast(Any, None), model)))
    except Exception:  # transformers may raise anything: its Trainer needs accelerate
        return ParameterOrder(names, None)


def _build_on_meta(config: str) -> PreTrainedModel:
    named: list[str] = []
    try:
        import transformers

        named = transformers.PretrainedConfig.get_config_dict(config)[0].get("architectures") or []
        settings = transformers.AutoConfig.from_pretrained(config, attn_implementation="eager")
        with torch.device("meta"):
            if settings.architectures:
                (architecture,) = settings.architectures
                model = getattr(transformers, architecture)(settings)
            else:
                model = transformers.AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # transformers may raise anything
        # If transformers has the class, only the settings are wrong.
        has_class = bool(named) and all(hasattr(transformers, each) for each in named)
        unknown = HubNamesUnknown if has_class else ModelClassUnknown
        raise unknown(f"transformers cannot build the model of {config}: {read_first_line(error)}") from error
    return model


def list_shapes(contents: reader.ModelContents) -> dict[str, torch.Size]:
    """Lists the shape of each parameter and buffer of a state dict, by all of its names."""
    shapes = {name: tensor.tensor.shape for tensor in contents.list_tensors() for name in tensor.names}
    for unit in contents.fsdp1_units:
        shapes |= {name: shape for names, shape in zip(unit.names, unit.shapes, strict=True) for name in names}
    return shapes


def choose_names(names: Names, model: nn.Module, shapes: Mapping[str, torch.Size]) -> HubNames | None:
    """Chooses the names of the tensors; returns None for the model's own.

    shapes: the shapes of the model's tensors, by all names that they have without adapters.

    Raises NamesError for a mapping that does not fit, HubNamesUnknown if ``names`` is ``hub`` and the Hub's names are
    unknown, and ValueError for any other value of ``names``.
    """
    if isinstance(names, Mapping):
        given = {name: TensorView(*view) for name, view in names.items()}
        check_one_to_one(given, shapes)
        return HubNames(given)
    check_names(names)
    match names:
        case "model":
            return None
        case "hub":
            try:
                return HubNames(revert_names(model, shapes))
            except HubNamesUnknown as error:
                raise HubNamesUnknown(f'{error}; names="model" uses the model\'s own names') from None
        case "auto":
            try:
                return HubNames(revert_names(model, shapes))
            except HubNamesUnknown:
                return None
        case _:
            assert_never(names)


def check_names(names: Names) -> None:
    """Raises ValueError unless ``names`` is a mapping or one of the three allowed words."""
    if not isinstance(names, Mapping) and names not in get_args(NameChoice):
        raise ValueError(f"names must be one of {', '.join(get_args(NameChoice))}, or a mapping, not {names!r}")


@disable_autograd
def revert_names(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, TensorView]:
    """Returns what :func:`read_hub_view` returns, for tensors with the given names and shapes instead of the
    model's.
    """
    revert, pretrained = _find_reversion(model)
    if any(name != strip_adapters(name) for name in shapes):
        raise HubNamesUnknown("the model has adapters: its tensors differ from the Hub's tensors of the base model")
    own = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    name_of = {private.storage_key(tensor): name for name, tensor in own.items()}
    try:
        with _CopiesAreViews():  # type: ignore[no-untyped-call]
            reverted = revert(_copy_unwrapped(pretrained, {}), dict(own))
    except Exception as error:  # transformers may raise anything
        raise NamesError(
            f"transformers cannot convert the model's tensors for the Hub: {read_first_line(error)}"
        ) from error
    if copies := [name for name, tensor in reverted.items() if private.storage_key(tensor) not in name_of]:
        raise NamesError(
            f"{len(copies)} tensors of the Hub are not part of a tensor of the model: {join_some(copies, _MOST_NAMES)}"
        )
    views = {
        name: TensorView(
            name_of[private.storage_key(tensor)], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )
        for name, tensor in reverted.items()
    }
    check_one_to_one(views, shapes)
    return views


def _find_reversion(model: nn.Module) -> tuple[Any, Any]:
    """Returns (transformers' ``revert_weight_conversion``, the transformers model)."""
    transformers, pretrained = sys.modules.get("transformers"), find_pretrained(model)
    if transformers is None or pretrained is None:
        raise HubNamesUnknown("the model is not a model of transformers, and only transformers knows the Hub's names")
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        raise HubNamesUnknown(
            f"transformers {transformers.__version__} does not say which names the Hub has: use 5.0.0 or newer"
        ) from None
    if getattr(pretrained, "hf_quantizer", None) is not None:
        raise HubNamesUnknown("the model is quantized: the Hub's tensors are not parts of its tensors")
    return revert_weight_conversion, pretrained


def find_pretrained(model: nn.Module) -> Any:
    """Returns the transformers model inside all wrappers; None if there is none."""
    transformers, inner = sys.modules.get("transformers"), next(_unwrapped(model))
    return inner if transformers is not None and isinstance(inner, transformers.PreTrainedModel) else None


def find_original_class(module: nn.Module) -> Any:
    """Returns the class that a module had before ``fully_shard`` replaced it by a derived class."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model inside all wrappers: FSDP1, DDP, checkpointing, torch.compile and peft."""
    while True:
        model = reader.find_innermost(model)
        children = private.child_modules(model)
        inner = [children[name] for key in WRAPPER_NAMES if (name := key[:-1]) in children]
        get_base_model: Any = getattr(model, "get_base_model", None)  # of a PeftModel
        if not inner and get_base_model is not None:
            inner = [get_base_model()]
        if not inner or inner[0] is None:
            yield model
        else:
            model = inner[0]


def _copy_unwrapped(module: nn.Module, copied: dict[int, nn.Module]) -> nn.Module:
    """Copies the modules into a tree without wrappers, each with the class that it had before ``fully_shard``.

    transformers looks at the modules' positions in the tree and at the names of their classes.
    """
    inner = next(_unwrapped(module))
    if id(inner) not in copied:
        original = find_original_class(inner)
        copy = copied[id(inner)] = original.__new__(original)
        children = {
            name: None if child is None else _copy_unwrapped(child, copied)
            for name, child in private.child_modules(inner).items()
        }
        copy.__dict__.update(inner.__dict__ | {"_modules": children})
    return copied[id(inner)]


class _CopiesAreViews(private.OperatorMode):
    """Dispatch mode that replaces copies by their sources, so that ``chunk(...).contiguous()`` stays a view."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.clone.default:
            return args[0].detach()
        if function is private.UNSAFE_VIEW:
            # Of what reshape has cloned because it is no view.
            return torch.empty(args[1], device="meta")
        return function(*args, **(kwargs or {}))
