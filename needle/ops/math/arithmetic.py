"""Arithmetic composed of other ops: whole quotients and remainders, one-sided limits, exact small values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Spec, Tensor, one_of, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, dtype_name, promote_scalar
from needle.backend_ndarray.kernels import call_map
from needle.ops.common import Elementwise, ScalarOp, Unary, as_operand, unbroadcast
from needle.ops.dtypes import cast_array, fits_attribute, result_dtype
from needle.ops.families import family, function_of, no_gradient
from needle.ops.math.activation import tanh
from needle.ops.math.comparison import eq, ge, le, lt
from needle.ops.math.elementwise import (
    Clamp,
    at_least,
    at_most,
    cast,
    is_limit,
    maximum,
    where,
)
from needle.ops.math.logic import isnan, logical_or
from needle.ops.math.maths import Rounding, absolute, ceil, exp, floor, log

__all__ = [
    "clamp",
    "clamp_max",
    "clamp_min",
    "expm1",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "log1p",
    "logaddexp",
    "remainder",
    "trunc",
]

# -- limits --------------------------------------------------------------------------------------------------------------


class Limit(ScalarOp):
    """x limited on one side by the scalar; of two zeros x, whatever its sign."""

    beyond: ClassVar[Any]  # numpy's: where x is over the limit
    within: ClassVar[Any]  # ours: where it is not, or on the limit

    def formula(self, x: np.ndarray) -> Any:
        limit = np.asarray(self.scalar, x.dtype)
        return np.where(self.beyond(x, limit), limit, x)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return where(self.within(node.inputs[0], self.scalar), out_grad, 0.0)


@op
class ClampMin(Limit):
    """The larger of x and the scalar; the gradient is 1 on the limit."""

    kernel = "maximum_scalar"
    ufunc, beyond, within = np.maximum, np.less, staticmethod(ge)


@op
class ClampMax(Limit):
    """The smaller of x and the scalar; the gradient is 1 on the limit."""

    kernel = "minimum_scalar"
    ufunc, beyond, within = np.minimum, np.greater, staticmethod(le)


@tensor_method()
def clamp_min(a: Tensor, low: Any) -> Tensor:
    """Elements below `low` replaced by it, a number or a tensor that broadcasts. As torch.clamp_min: on the limit the gradient
    is 1.
    """
    return ClampMin(low)(a) if is_limit(low) else at_least(a, low)


@tensor_method()
def clamp_max(a: Tensor, high: Any) -> Tensor:
    """Elements above `high` replaced by it, a number or a tensor that broadcasts. As torch.clamp_max: on the limit the
    gradient is 1.
    """
    return ClampMax(high)(a) if is_limit(high) else at_most(a, high)


@tensor_method("clamp", "clip")
def clamp(a: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """a limited to [min, max]; None leaves a side open."""
    if min is not None and max is not None and is_limit(min) and is_limit(max):
        return Clamp(min, max)(a)
    low = a if min is None else clamp_min(a, min)
    return low if max is None else clamp_max(low, max)


@tensor_method()
def fmax(a: Tensor, b: Any) -> Tensor:
    """The larger of a and b, a where they are equal; what is no number loses."""
    b = as_operand(b, a)
    return where(logical_or(ge(a, b), isnan(b)), a, b)


@tensor_method()
def fmin(a: Tensor, b: Any) -> Tensor:
    """The smaller of a and b, a where they are equal; what is no number loses."""
    b = as_operand(b, a)
    return where(logical_or(le(a, b), isnan(b)), a, b)


# -- whole quotients -----------------------------------------------------------------------------------------------------


@op
class Trunc(Rounding):
    """x without its fraction; integers keep their dtype."""

    kernel = "trunc"
    ufunc = np.trunc

    def decompose(self, x: Tensor) -> Tensor:
        return where(lt(x, 0.0), ceil(x), floor(x))


trunc = function_of(Trunc, "trunc")


@op
class Frac(Unary):
    """What `Trunc` drops; of infinities NaN."""

    kernel = "frac"

    def decompose(self, x: Tensor) -> Tensor:
        return x - trunc(x)

    def formula(self, x: np.ndarray) -> Any:
        return x - np.trunc(x)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return out_grad


frac = function_of(Frac, "frac")


@family
class Whole(Elementwise):
    """Of a tensor with a second one, or with attribute `scalar`; `rounding` is floor or trunc.

    Decomposed in float64, where the quotient of two float32 numbers or of integers below 2 ** 52 never rounds up to a whole one.
    """

    rounding: str
    scalar: Any = None
    kernels: ClassVar[dict[str, str]]
    compute_infers = False
    checks = one_of(rounding=("floor", "trunc"))

    @classmethod
    def has_kernel(cls) -> bool:
        return True

    def operand_dtype(self, *inputs: Any) -> str:
        dtype = result_dtype(*inputs) if len(inputs) > 1 else promote_scalar(dtype_name(inputs[0].dtype), self.scalar)
        return "int64" if dtype == "bool" else dtype

    def second(self, a: NDArray, b: Sequence[NDArray], dtype: str) -> NDArray:
        """The divisor, as an array."""
        if b:
            return b[0]
        made = NDArray.empty((), dtype, a.device)
        made.fill(self.scalar)
        return made

    def compute(self, a: NDArray, *b: NDArray) -> Any:
        dtype = self.operand_dtype(a, *b)
        divisor = self.second(a, b, dtype)
        check_divisor(self.label, divisor.read(), dtype)
        return a.ewise(self.kernels[self.rounding], (divisor,), (), dtype, dtype)

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        a, *b = inputs
        operands = [x.fitted(out.shape, out.dtype) for x in (a, self.second(a, b, out.dtype))]
        call_map(self.kernels[self.rounding], out, operands)

    def reference(self, a: np.ndarray, *b: np.ndarray) -> Any:
        dtype = self.operand_dtype(a, *b)
        x, y = cast_array(a, dtype), cast_array(b[0], dtype) if b else np.asarray(self.scalar, dtype)
        check_divisor(self.label, y, dtype)
        return self.formula(x, y)

    def operands(self, a: Tensor, *b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a and b as float64, and their whole quotient."""
        x, y = cast(a, "float64"), cast(b[0] if b else as_operand(self.scalar, a), "float64")
        quotient = x / y
        return x, y, floor(quotient) if self.rounding == "floor" else trunc(quotient)

    @classmethod
    def samples(cls) -> list:
        two = [(4, 33), (33,)]
        return [({"rounding": r}, two) for r in ("floor", "trunc")] + [
            ({"rounding": "floor", "scalar": -0.7}, [(4, 33)]),
            ({"rounding": "trunc", "scalar": 2}, [Spec((4, 5), "int64")]),
        ]


def check_divisor(label: str, divisor: np.ndarray, dtype: str) -> None:
    if dtype not in FLOATS and not np.all(divisor):
        raise ValueError(f"[{label}] an integer divisor expects numbers other than 0, got 0.")


@op
class WholeQuotient(Whole):
    """a / b rounded down, or towards zero."""

    kernels = {"floor": "floor_divide", "trunc": "trunc_divide"}

    def formula(self, a: np.ndarray, b: np.ndarray) -> Any:
        if self.rounding == "floor":
            return np.floor_divide(a, b)
        return np.trunc(a / b) if a.dtype.kind == "f" else np.floor_divide(a - np.fmod(a, b), b)

    def decompose(self, a: Tensor, *b: Tensor) -> Tensor:
        return cast(self.operands(a, *b)[2], self.infer(a, *b).dtype)

    gradient = no_gradient


@op
class Remainder(Whole):
    """What the whole quotient leaves of a: with the sign of b for floor, of a for trunc."""

    kernels = {"floor": "remainder", "trunc": "fmod"}

    def formula(self, a: np.ndarray, b: np.ndarray) -> Any:
        left = np.fmod(a, b)
        if self.rounding == "trunc":
            return left
        across = (left != 0) & ((left < 0) != (b < 0))
        return np.where(across, left + b, left)  # -0 leaves -0, as in C; np.remainder loses the sign

    def decompose(self, a: Tensor, *b: Tensor) -> Tensor:
        x, y, quotient = self.operands(a, *b)
        return cast(x - quotient * y, self.infer(a, *b).dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, *b = node.inputs
        grads = [unbroadcast(out_grad, a.shape)]
        if b:
            times = WholeQuotient(self.rounding)(a.detach(), b[0].detach())
            grads.append(unbroadcast(-(out_grad * times), b[0].shape))
        return tuple(grads)


def _whole(cls: Any, a: Any, b: Any, rounding: str) -> Tensor:
    if not isinstance(a, Tensor):
        a = as_operand(a, b)
    by_tensor = isinstance(b, Tensor) or not fits_attribute(b)
    return cls(rounding)(a, as_operand(b, a)) if by_tensor else cls(rounding, b)(a)


@tensor_method("floor_divide", "__floordiv__")
def floor_divide(a: Any, b: Any, rounding: str = "floor") -> Tensor:
    """The whole quotient of two tensors, or of a tensor and a number."""
    return _whole(WholeQuotient, a, b, rounding)


@tensor_method("remainder", "__mod__")
def remainder(a: Any, b: Any) -> Tensor:
    """a modulo b, with the sign of b, as Python has it."""
    return _whole(Remainder, a, b, "floor")


@tensor_method()
def fmod(a: Any, b: Any) -> Tensor:
    """a modulo b, with the sign of a, as C has it."""
    return _whole(Remainder, a, b, "trunc")


# -- exact near zero -----------------------------------------------------------------------------------------------------


class OwnGradient(Unary):
    """A function whose value is a composition and whose gradient is its own."""

    def value(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @classmethod
    def has_kernel(cls) -> bool:
        return True

    @classmethod
    def has_into(cls) -> bool:
        return False

    def compute(self, x: NDArray) -> Any:
        return self.value(Tensor.make_const(x.as_dtype(self.operand_dtype(x)))).cached_data

    def formula(self, x: np.ndarray) -> Any:
        return self.ufunc(x)


@op
class Log1p(OwnGradient):
    """log(1 + x), also where 1 + x rounds (W. Kahan's correction by (1 + x) - 1)."""

    ufunc = np.log1p
    domain = (-0.6, 3.0)

    def value(self, x: Tensor) -> Tensor:
        u = x + 1.0
        done = eq(u, 1.0)
        exact = log(u) * (x / where(done, u, u - 1.0))
        return where(eq(u, math.inf), u, where(done, x, exact))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad / (node.inputs[0] + 1.0)


log1p = function_of(Log1p, "log1p")


@tensor_method()
def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(e ** a + e ** b), without overflow."""
    apart = where(eq(a, b), 0.0, -absolute(a - b))  # of two infinities the difference would be NaN
    return maximum(a, b) + log1p(exp(apart))


@op
class Expm1(OwnGradient):
    """e ** x - 1, as tanh(x / 2) (e ** x + 1), which keeps the digits of a small x."""

    ufunc = np.expm1

    def value(self, x: Tensor) -> Tensor:
        return tanh(x * 0.5) * (exp(x) + 1.0)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad * (node + 1.0)


expm1 = function_of(Expm1, "expm1")
