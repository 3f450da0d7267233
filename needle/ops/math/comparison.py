"""Comparisons: bool tensors, no gradient. A tensor compares with a tensor, an array or a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Tensor, tensor_method
from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.kernels import call_map
from needle.ops.common import Binary, ScalarOp, as_operand
from needle.ops.dtypes import fits_attribute
from needle.ops.families import named, no_gradient, op_class

__all__ = ["eq", "ge", "gt", "le", "lt", "ne"]


class Comparison(Binary):
    """Of two tensors."""

    result = "bool"
    gradient = no_gradient


class ScalarComparison(ScalarOp):
    """Of a tensor with one number, attribute `scalar`."""

    result = "bool"
    gradient = no_gradient


class Unequal(ScalarComparison):
    """By the kernel that finds equal ones; bools that are not 0 are themselves."""

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        if inputs[0].dtype == "bool" and self.scalar == 0:
            return call("copy", [out], x=inputs[0])
        call_map("eq_scalar", out, [inputs[0].as_dtype(self.operand_dtype(*inputs))], (self.scalar,))
        call_map("eq_scalar", out, [out], (0,))


def comparison(name: str, words: str, ufunc: Any) -> Callable[[Tensor, Any], Tensor]:
    """The ops of two tensors and of a tensor and a number, by the names `words` and `words`Scalar, and their function."""
    sign = SIGNS[name]
    doc = f"a {sign} b."
    with_tensor = op_class(__name__, words, Comparison, doc, kernel=name, ufunc=ufunc)
    base, kernel = (Unequal, "eq_scalar") if name == "ne" else (ScalarComparison, f"{name}_scalar")
    with_scalar = op_class(__name__, f"{words}Scalar", base, f"x {sign} scalar.", kernel=kernel, ufunc=ufunc)

    def compare(a: Tensor, b: Any) -> Tensor:
        if isinstance(b, Tensor | NDArray) or np.ndim(b) > 0 or not fits_attribute(b):
            return with_tensor()(a, as_operand(b, a))
        return with_scalar(b)(a)

    return tensor_method()(named(compare, name, doc))


SIGNS = {"eq": "==", "ne": "!=", "ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
eq = comparison("eq", "Equal", np.equal)
ne = comparison("ne", "NotEqual", np.not_equal)
ge = comparison("ge", "GreaterEqual", np.greater_equal)
gt = comparison("gt", "Greater", np.greater)
le = comparison("le", "LessEqual", np.less_equal)
lt = comparison("lt", "Less", np.less)
