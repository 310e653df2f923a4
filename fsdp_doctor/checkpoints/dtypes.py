"""The dtypes of checkpoints, by their names in torch, with the size of an element and the name in safetensors."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """Size of an element in bytes, and the code in safetensors headers; empty if safetensors lacks the dtype."""

    itemsize: int
    code: str = ""


DTYPES: dict[str, Dtype] = {
    "bool": Dtype(1, "BOOL"),
    "uint8": Dtype(1, "U8"),
    "int8": Dtype(1, "I8"),
    "float8_e4m3fn": Dtype(1, "F8_E4M3"),
    "float8_e5m2": Dtype(1, "F8_E5M2"),
    "float8_e4m3fnuz": Dtype(1, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": Dtype(1, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": Dtype(1, "F8_E8M0"),
    "int16": Dtype(2, "I16"),
    "uint16": Dtype(2, "U16"),
    "float16": Dtype(2, "F16"),
    "bfloat16": Dtype(2, "BF16"),
    "int32": Dtype(4, "I32"),
    "uint32": Dtype(4, "U32"),
    "float32": Dtype(4, "F32"),
    "complex32": Dtype(4),
    "int64": Dtype(8, "I64"),
    "uint64": Dtype(8, "U64"),
    "float64": Dtype(8, "F64"),
    "complex64": Dtype(8, "C64"),
    "complex128": Dtype(16),
}


def is_floating_point(dtype: str) -> bool:
    return "float" in dtype


NAME_OF_CODE = {dtype.code: name for name, dtype in DTYPES.items() if dtype.code}
# A dtype without a storage class of its own (float8, uint16) is pickled with an untyped storage.
DTYPE_OF_STORAGE = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
