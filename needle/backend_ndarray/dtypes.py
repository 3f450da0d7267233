"""Element types: their names, and the type of an operation on two of them."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")  # in the order of promotion


class _Names(dict):
    """Names by dtype; those that are not listed are looked up."""

    def __missing__(self, dtype: Any) -> str:
        if isinstance(dtype, str):
            return dtype
        try:
            return np.dtype(dtype).name
        except TypeError:  # another library's
            raise TypeError(f"[array] dtype expects a name such as 'float32', or numpy's, got {dtype}.") from None


KEPT = ("float32", "float64", "int32", "int64", "bool")
# Name of a dtype given as its name, a numpy dtype or a numpy type. Every op asks for it: hence no function.
dtype_name = _Names({key: name for name in KEPT for key in (name, np.dtype(name))}).__getitem__
# Types without kernels of their own are kept in the next larger one that has them.
WIDER = {
    "float16": "float32",
    "int8": "int32",
    "uint8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
}


def itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def dtype_of(values: Any, dtype: Any = None) -> str:
    """dtype of an array made of `values`: the one asked for, else that of `values`; numbers and sequences are float32."""
    if getattr(getattr(values, "dtype", None), "kind", "") == "c":
        raise TypeError(f"[array] expects real numbers, got {values.dtype}; needle.Complex holds two arrays of them.")
    if dtype is not None:
        return dtype_name(dtype)
    name = dtype_name(values.dtype) if hasattr(values, "dtype") else "float32"
    return WIDER.get(name, name)


def promote(a: str, b: str) -> str:
    """dtype of an operation on two dtypes: torch's rule, under which a float wins over every integer."""
    if a == b:
        return a
    if a in FLOATS or b in FLOATS:
        return max((d for d in (a, b) if d in FLOATS), key=FLOATS.index)
    return str(np.promote_types(a, b))


def promote_scalar(dtype: str, scalar: Any) -> str:
    """dtype of an operation on an array and a number: a fraction makes integers float32, a number makes bools int64."""
    if dtype in FLOATS:
        return dtype
    if isinstance(scalar, float | np.floating):
        return "float32"
    if dtype == "int32" and isinstance(scalar, int) and not -(2**31) <= scalar < 2**31:
        raise ValueError(f"[scalar] expects a whole number that int32 can hold, got {scalar}.")
    return "int64" if dtype == "bool" and not isinstance(scalar, bool | np.bool_) else dtype
