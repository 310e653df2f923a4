"""Detects tensors whose memory does not hold their values, so that they cannot be read.

A tensor is unreadable if it is not dense in memory, or if its elements are codes of a quantization, from which a weight
is computed with scales that are stored elsewhere. With ``bnb_4bit_quant_storage`` codes can have the dtype of a weight,
and ``fully_shard`` replaces the parameter by a DTensor, so only the class of the module shows that they are codes.
Nothing is imported for this: modules of bitsandbytes exist only if bitsandbytes was imported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp.private import ModuleTensors

_LAZY = (nn.UninitializedParameter, nn.UninitializedBuffer)
# Read in bitsandbytes 0.50, whose other modules have plain weights.
_CLASSES_OF_BITSANDBYTES = {"Linear4bit", "Linear8bitLt", "Embedding4bit", "Embedding8bit"}
# Names of codes in HQQ, GPTQ and AWQ, compressed-tensors and AQLM, whatever their modules are called.
_NAMES_OF_CODES = {
    "W_q": "HQQ",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "weight_packed": "compressed-tensors",
}
# Names of scales by which a neighbouring tensor of one byte an element is multiplied, in bitsandbytes, EETQ, FBGEMM and
# DeepSeek's float8.
_SCALES = ("{}_scale", "{}_scales", "{}_scale_inv", "SCB")


class UnreadableTensors(RuntimeError):
    """Error for tensors whose memory does not hold their values: codes of a quantization, or a form that is not dense.

    forms: a description of each tensor's form, by the tensor's name.
    """

    def __init__(self, forms: Mapping[str, str]) -> None:
        names_of: dict[str, list[str]] = {}
        for name, form in forms.items():
            names_of.setdefault(form, []).append(name)
        described = "; ".join(f"{join_some(names)}: {form}" for form, names in names_of.items())
        super().__init__(
            f"the values of {len(forms)} of the model's tensors cannot be read or written: {described}. If the "
            'model trains adapters over such weights, lora="adapter" reads the adapters. For the weights, replace them '
            "by dense tensors, as a quantizer's dequantize does, before the model is sharded"
        )
        self.forms = dict(forms)


def refuse(forms: Mapping[str, str]) -> None:
    """Raises UnreadableTensors if ``forms``, the forms of unreadable tensors by name, is not empty."""
    if forms:
        raise UnreadableTensors(forms)


def describe_form(tensor: torch.Tensor) -> str:
    """Describes why a tensor cannot be read or filled in place; empty if it can. The meta device is no such reason."""
    lazy_view = "a view that is conjugated or negated when it is read"
    return _describe_layout(tensor) or (lazy_view if tensor.is_conj() or tensor.is_neg() else "")


def describe_unless_dense(tensor: torch.Tensor) -> str:
    """Describes the form of a tensor that is not dense or is on the meta device; empty for any other tensor."""
    return _describe_layout(tensor) or ("on the meta device" if tensor.is_meta else "")


def _describe_layout(tensor: torch.Tensor) -> str:
    """Describes the form of a tensor that is not dense; empty for a dense tensor.

    Sparse, nested and quantized tensors, uninitialized tensors of lazy modules, and subclasses that wrap other tensors
    (with a ``__torch_dispatch__``) are not dense. Subclasses that only carry attributes, such as parameters, are dense.
    """
    if _is_wrapper(type(tensor)):
        return f"a {type(tensor).__name__}"
    if isinstance(tensor, _LAZY):
        return "not initialized, as in a lazy module before its first forward"
    if tensor.layout != torch.strided:
        return f"in the layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else ""


def has_strides(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's shape and strides can be read: False for uninitialized, sparse or nested tensors."""
    return not isinstance(tensor, _LAZY) and tensor.layout == torch.strided and not tensor.is_nested


@functools.cache
def _is_wrapper(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


class CodeFinder:
    """Finds the tensors of a model that are codes of a quantization.

    modules: all modules of the model.
    """

    def __init__(self, modules: Iterable[ModuleTensors]) -> None:
        quantizers = (vars(owner.module).get("hf_quantizer") for owner in modules)
        # A PreTrainedModel's, which says how all of it was quantized.
        quantizer = next((one for one in quantizers if one is not None), None)
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
        self._method = "" if quantizer is None else str(getattr(method, "value", method) or type(quantizer).__name__)

    def describe(self, owner: ModuleTensors, key: str, tensor: torch.Tensor, shape: torch.Size | None = None) -> str:
        """Describes the codes in the module's tensor ``key``, such as ``codes of HQQ``; empty if the tensor holds
        values.

        shape: the shape of a parameter in an FSDP1 unit; ``tensor`` is the flat parameter in this case.
        """
        if method := _NAMES_OF_CODES.get(key):
            return f"codes of {method}"
        class_of_module: type = type(owner.module)
        if kind := _find_kind_of_bitsandbytes(class_of_module):
            is_weight = _is_weight_of(owner.module, tensor.dtype, tensor.shape if shape is None else shape)
            return "" if key != "weight" or is_weight else f"codes of bitsandbytes ({kind})"
        if key == "original" and any(_is_of_bitsandbytes(type(child)) for child in owner.module.children()):
            return "codes of bitsandbytes (a parametrization)"
        if _is_of_bitsandbytes(type(tensor)) and getattr(tensor, "bnb_quantized", False):
            return f"codes of bitsandbytes ({type(tensor).__name__})"
        if key == "codes" and _has(owner, "codebooks"):
            return "codes of AQLM"
        if key.endswith("_blocks") and _has(owner, f"{key.removesuffix('_blocks')}_scales"):
            return "codes with a scale for each block"
        is_small = tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool
        if is_small and any(_has(owner, scale.format(key)) for scale in _SCALES):
            return "codes with a separate scale"
        is_code = is_small or tensor.dtype in (torch.int16, torch.int32, torch.int64)
        return f"codes of {self._method}" if self._method and is_code and isinstance(tensor, nn.Parameter) else ""


def _has(owner: ModuleTensors, name: str) -> bool:
    return name in owner.parameters or name in owner.buffers


def _is_of_bitsandbytes(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "bitsandbytes"


@functools.cache
def _find_kind_of_bitsandbytes(kind: type) -> str:
    """Returns the name of the bitsandbytes class with quantized weights that ``kind`` is or derives from; empty if
    none.

    Base classes are searched because ``fully_shard`` derives a class from the module's.
    """
    names = (base.__name__ for base in kind.__mro__ if _is_of_bitsandbytes(base))
    return next((name for name in names if name in _CLASSES_OF_BITSANDBYTES), "")


def _is_weight_of(module: nn.Module, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Returns whether a tensor of this dtype and shape is a weight of the module that is not (yet) quantized.

    Codes have another shape, or take one byte each.
    """
    sides = (("out_features", "in_features"), ("num_embeddings", "embedding_dim"))
    shapes = [tuple(getattr(module, side, None) for side in both) for both in sides]
    return dtype.is_floating_point and dtype.itemsize > 1 and tuple(shape) in shapes
