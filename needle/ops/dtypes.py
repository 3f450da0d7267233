"""Dtypes of results: torch's rules for several arrays, for numbers beside them, and for kernels of real numbers."""

from __future__ import annotations

from functools import reduce
from typing import Any

from needle.backend_ndarray import FLOATS, dtype_name, promote
from needle.backend_ndarray.kernels import DTYPES
from needle.complex_numbers import Complex


def float_dtype(dtype: Any) -> str:
    """`dtype`, or float32 for integers and bools."""
    return dtype_name(dtype) if dtype in FLOATS else "float32"


def real_dtype(kernel: str | None, dtype: str) -> str:
    """`dtype`, or float32 for the integers and bools that meet a kernel for real numbers."""
    return dtype if dtype in FLOATS or "int64" in DTYPES.get(str(kernel), ()) else "float32"


def result_dtype(*operands: Any) -> str:
    """dtype of an operation on several arrays: torch's rule, under which those without axes count only where they are of a
    higher kind (bool, integer, float).
    """
    full = [dtype_name(x.dtype) for x in operands if x.shape != ()]
    lone = [dtype_name(x.dtype) for x in operands if x.shape == ()]
    dtype = reduce(promote, full or lone)
    return dtype if not full else reduce(promote, (d for d in lone if kind(d) > kind(dtype)), dtype)


def kind(dtype: str) -> int:
    """Bools, whole numbers and floats in torch's order."""
    return 2 if dtype in FLOATS else int(dtype != "bool")


def lacks_float64(kernel: str) -> bool:
    """Whether a kernel's row takes float32, not float64: for `float32_only` of an op."""
    return "float64" not in DTYPES[kernel]


def fits_attribute(scalar: Any) -> bool:
    """Whether a kernel can take a number as an attribute, a double: larger whole numbers lose digits there."""
    if isinstance(scalar, int):
        if not -(2**63) <= scalar < 2**63:
            raise ValueError(f"[scalar] expects whole numbers of at most 64 bits, got {scalar}.")
        return -(2**53) <= scalar <= 2**53
    if isinstance(scalar, float):
        return True
    if isinstance(scalar, list | tuple | str | complex | Complex | None):
        raise TypeError(f"[scalar] expects a number or an array, got {type(scalar).__name__}.")
    return not hasattr(scalar, "__dlpack__")  # an array of another library


def check_value(label: str, value: Any, dtype: Any) -> None:
    """Raises where a number is to become an element of a dtype of whole numbers that cannot hold it."""
    limit = {"int32": 2**31, "int64": 2**63}.get(str(dtype))
    if limit is not None and isinstance(value, int | float) and not -limit <= value < limit:
        raise ValueError(f"[{label}] value expects a number that {dtype} can hold, got {value}.")


def cast_array(x: Any, dtype: str) -> Any:
    """numpy array or NDArray as `dtype`, itself where it has it already."""
    return x if dtype_name(x.dtype) == dtype else x.astype(dtype)
