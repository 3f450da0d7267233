"""Comparisons: bool tensors, no gradient. A tensor compares with a tensor, an array or a number."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, call

from .common import Binary, as_operand, cast_array, promote


class Comparison(Binary):
    def operand_dtype(self, a: Any, b: Any) -> str:
        dtype = promote(str(a.dtype), str(b.dtype))
        return "int32" if dtype == "bool" else dtype

    def infer(self, a: Any, b: Any) -> Any:
        return Spec(Binary.infer(self, a, b).shape, "bool")

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        dtype = self.operand_dtype(*inputs)
        ones = NDArray.empty(out.shape, dtype)  # the kernels write 0 and 1 in their operands' dtype
        call(str(self.kernel), [ones], [cast_array(x, dtype).broadcast_to(out.shape) for x in inputs])
        call("copy", [out], [ones])

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return None, None


@op
class Equal(Comparison):
    """a == b."""

    kernel = "eq"
    ufunc = np.equal


@tensor_method()
def eq(a: Tensor, b: Any) -> Tensor:
    return Equal()(a, as_operand(b, a))


@op
class NotEqual(Comparison):
    """a != b."""

    kernel = "ne"
    ufunc = np.not_equal


@tensor_method()
def ne(a: Tensor, b: Any) -> Tensor:
    return NotEqual()(a, as_operand(b, a))


@op
class GreaterEqual(Comparison):
    """a >= b."""

    kernel = "ge"
    ufunc = np.greater_equal


@tensor_method("ge", "__ge__")
def ge(a: Tensor, b: Any) -> Tensor:
    return GreaterEqual()(a, as_operand(b, a))


@op
class Greater(Comparison):
    """a > b."""

    kernel = "gt"
    ufunc = np.greater


@tensor_method("gt", "__gt__")
def gt(a: Tensor, b: Any) -> Tensor:
    return Greater()(a, as_operand(b, a))


@op
class LessEqual(Comparison):
    """a <= b."""

    kernel = "le"
    ufunc = np.less_equal


@tensor_method("le", "__le__")
def le(a: Tensor, b: Any) -> Tensor:
    return LessEqual()(a, as_operand(b, a))


@op
class Less(Comparison):
    """a < b."""

    kernel = "lt"
    ufunc = np.less


@tensor_method("lt", "__lt__")
def lt(a: Tensor, b: Any) -> Tensor:
    return Less()(a, as_operand(b, a))
