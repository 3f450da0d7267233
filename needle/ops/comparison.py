"""Comparisons: bool tensors, no gradient. A tensor compares with a tensor, an array or a number."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, dtype_name
from needle.backend_ndarray.kernels import call_map

from .common import Binary, ScalarOp, as_operand, fits_attribute, promote_scalar, result_dtype


class Comparison(Binary):
    """Of two tensors."""

    result = "bool"

    def operand_dtype(self, *inputs: Any) -> str:
        return result_dtype(*inputs)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return None, None


class ScalarComparison(ScalarOp):
    """Of a tensor with one number, attribute `scalar`."""

    result = "bool"

    def operand_dtype(self, *inputs: Any) -> str:
        return promote_scalar(dtype_name(inputs[0].dtype), self.attributes()["scalar"])

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return None


def compare(a: Tensor, b: Any, with_tensor: Any, with_scalar: Any) -> Tensor:
    if isinstance(b, Tensor | NDArray) or np.ndim(b) > 0 or not fits_attribute(b):
        return with_tensor()(a, as_operand(b, a))
    return with_scalar(b)(a)


@op
class Equal(Comparison):
    """a == b."""

    kernel = "eq"
    ufunc = np.equal


@op
class EqualScalar(ScalarComparison):
    """x == scalar."""

    scalar: Any
    kernel = "eq_scalar"
    ufunc = np.equal


@tensor_method()
def eq(a: Tensor, b: Any) -> Tensor:
    return compare(a, b, Equal, EqualScalar)


@op
class NotEqual(Comparison):
    """a != b."""

    kernel = "ne"
    ufunc = np.not_equal


@op
class NotEqualScalar(ScalarComparison):
    """x != scalar."""

    scalar: Any
    kernel = "eq_scalar"  # and the opposite of what it finds
    ufunc = np.not_equal

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        call_map("eq_scalar", out, [inputs[0].as_dtype(self.operand_dtype(*inputs))], (self.scalar,))
        call_map("eq_scalar", out, [out], (0,))


@tensor_method()
def ne(a: Tensor, b: Any) -> Tensor:
    return compare(a, b, NotEqual, NotEqualScalar)


@op
class GreaterEqual(Comparison):
    """a >= b."""

    kernel = "ge"
    ufunc = np.greater_equal


@op
class GreaterEqualScalar(ScalarComparison):
    """x >= scalar."""

    scalar: Any
    kernel = "ge_scalar"
    ufunc = np.greater_equal


@tensor_method()
def ge(a: Tensor, b: Any) -> Tensor:
    return compare(a, b, GreaterEqual, GreaterEqualScalar)


@op
class Greater(Comparison):
    """a > b."""

    kernel = "gt"
    ufunc = np.greater


@op
class GreaterScalar(ScalarComparison):
    """x > scalar."""

    scalar: Any
    kernel = "gt_scalar"
    ufunc = np.greater


@tensor_method()
def gt(a: Tensor, b: Any) -> Tensor:
    return compare(a, b, Greater, GreaterScalar)


@op
class LessEqual(Comparison):
    """a <= b."""

    kernel = "le"
    ufunc = np.less_equal


@op
class LessEqualScalar(ScalarComparison):
    """x <= scalar."""

    scalar: Any
    kernel = "le_scalar"
    ufunc = np.less_equal


@tensor_method()
def le(a: Tensor, b: Any) -> Tensor:
    return compare(a, b, LessEqual, LessEqualScalar)


@op
class Less(Comparison):
    """a < b."""

    kernel = "lt"
    ufunc = np.less


@op
class LessScalar(ScalarComparison):
    """x < scalar."""

    scalar: Any
    kernel = "lt_scalar"
    ufunc = np.less


@tensor_method()
def lt(a: Tensor, b: Any) -> Tensor:
    return compare(a, b, Less, LessScalar)
