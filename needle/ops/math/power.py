"""Functions of two tensors: powers, of integers, too; angles."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Deferred, Op, Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, call, dtype_name, promote_scalar
from needle.backend_ndarray.kernels import call_map
from needle.ops.common import Binary, ScalarOp, as_operand, unbroadcast
from needle.ops.dtypes import result_dtype
from needle.ops.families import op_class
from needle.ops.math.comparison import eq, ge
from needle.ops.math.elementwise import where, with_scalar
from needle.ops.math.maths import log

__all__ = ["atan2", "hypot", "power", "power_scalar"]


@op
class EWisePow(Binary):
    """a ** b. At base 0 the gradient of an exponent that is not negative is 0, as torch has it."""

    kernel = "power"
    ufunc = np.power
    zero_is_safe = False
    domain = (0.3, 2.0)

    def operand_dtype(self, *inputs: Any) -> str:
        dtype = result_dtype(*inputs)
        return "int64" if dtype == "bool" else dtype

    def formula(self, a: np.ndarray, b: np.ndarray) -> Any:
        """Of integers with a negative exponent only 1 and -1 are left."""
        if a.dtype.kind == "f":
            return np.power(a, b)
        units = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b % 2), 0)).astype(a.dtype)
        return np.where(b < 0, units, np.power(a, np.maximum(b, 0)))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, b = node.inputs
        grad_a = None
        if a.requires_grad:
            slope = b * power(a, b - 1.0)
            grad_a = out_grad * where(eq(b, 0.0), 0.0, slope)  # not 0 times what 1 / 0 is
        grad_b = None
        if b.requires_grad:
            by_log = out_grad * (node * log(a))
            at_zero = where(ge(b, 0.0), 0.0, by_log)
            grad_b = unbroadcast(where(eq(a, 0.0), at_zero, by_log), b.shape)
        return (unbroadcast(grad_a, a.shape) if grad_a is not None else None), grad_b


@tensor_method("power", "pow", "__pow__")
def power(a: Tensor, b: Any) -> Tensor:
    """a to the power of b, element by element; b may be a number."""
    return EWisePow()(a, b) if isinstance(b, Tensor) else with_scalar(a, b, PowerScalar, EWisePow)


@tensor_method("__rpow__")
def rpower(a: Tensor, b: Any) -> Tensor:
    """b ** a for a b that is no Tensor."""
    return EWisePow()(as_operand(b, a), a)


@op
class PowerScalar(ScalarOp):
    """x ** scalar."""

    kernel = "power_scalar"
    ufunc = np.power
    zero_is_safe = False
    domain = (0.3, 3.0)

    def operand_dtype(self, *inputs: Any) -> str:
        dtype = promote_scalar(dtype_name(inputs[0].dtype), self.scalar)
        if dtype not in FLOATS and not isinstance(self.scalar, Deferred) and self.scalar < 0:
            raise ValueError(f"[power] the exponent of integers expects a number of at least 0, got {self.scalar}.")
        return dtype

    def formula(self, x: np.ndarray) -> Any:
        return super().formula(x).astype(x.dtype)  # numpy makes int8 of bools

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        special = {2: "square", 0.5: "sqrt", -1: "reciprocal", -0.5: "rsqrt"}.get(self.scalar)
        x = inputs[0].as_dtype(out.dtype)
        if special is not None:  # many times faster than the general power
            call_map(special, out, [x])
        elif out.dtype in FLOATS and self.scalar in (3, -2):
            square = NDArray.empty(out.shape, out.dtype)
            call_map("square", square, [x])
            if self.scalar == 3:
                call_map("mul", out, [square, x])
            else:
                call_map("reciprocal", out, [square])
        elif out.dtype in FLOATS:
            call_map("power_scalar", out, [x], (self.scalar,))
        else:
            self._by_squares(x, out)

    def _by_squares(self, x: NDArray, out: NDArray) -> None:
        """Whole powers of integers, which wrap as products do."""
        left, factor = int(self.scalar), x
        if left == 1:  # all that a bool may have beside 0; bools have no products
            call("copy", [out], x=x)
            return
        product = NDArray.empty(out.shape, out.dtype)
        product.fill(1.0)
        while left:
            if left % 2:
                call_map("mul", product, [product, factor])
            left //= 2
            if left:
                square = NDArray.empty(out.shape, out.dtype)
                call_map("square", square, [factor])
                factor = square
        call("copy", [out], x=product)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        if self.scalar == 0:
            return out_grad * 0.0
        x = node.inputs[0]
        slope = x if self.scalar == 2 else power_scalar(x, self.scalar - 1)
        return out_grad * (slope * self.scalar)


def power_scalar(a: Tensor, scalar: Any) -> Tensor:
    """Elements to the power of a number, in the dtype that both promote to. As torch.pow with a number: integers raise
    ValueError for a negative one.
    """
    return PowerScalar(scalar)(a)


def quotient_or_zero(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0: what gradients of lengths and angles are taken to be at the origin."""
    none = eq(b, 0.0)
    return where(none, 0.0, a / where(none, 1.0, b))


def of_angle(self: Op, out_grad: Tensor, node: Tensor) -> Any:
    y, x = node.inputs
    over = quotient_or_zero(out_grad, x * x + y * y)
    return unbroadcast(over * x, y.shape), unbroadcast(-(over * y), x.shape)


class Angle(Binary):
    """In the dtype of its floats; of integers in float32."""

    def operand_dtype(self, *inputs: Any) -> str:
        dtype = result_dtype(*inputs)
        return dtype if dtype in FLOATS else "float32"


Atan2 = op_class(
    __name__,
    "Atan2",
    Angle,
    "The angle of the point (b, a) in radians, in all four quadrants; the gradient at (0, 0) is 0.",
    kernel="atan2",
    ufunc=np.arctan2,
    gradient=of_angle,
    zero_is_safe=False,
    domain=(0.3, 2.0),
)


@tensor_method()
def atan2(a: Tensor, b: Tensor) -> Tensor:
    """The angle of the point (b, a), in (-pi, pi]."""
    return Atan2()(a, b)


def of_length(self: Op, out_grad: Tensor, node: Tensor) -> Any:
    over = quotient_or_zero(out_grad, node)
    return tuple(unbroadcast(over * x, x.shape) for x in node.inputs)


Hypot = op_class(
    __name__,
    "Hypot",
    Angle,
    "sqrt(a ** 2 + b ** 2) without overflow; the gradient at (0, 0) is 0.",
    kernel="hypot",
    ufunc=np.hypot,
    gradient=of_length,
    domain=(0.3, 2.0),
)


@tensor_method()
def hypot(a: Tensor, b: Tensor) -> Tensor:
    """Length of the hypotenuse of sides a and b."""
    return Hypot()(a, b)
