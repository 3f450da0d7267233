"""Element-wise arithmetic, comparison and maths; the operators of Tensor."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray, call, dtype_name, promote, promote_scalar
from needle.backend_ndarray.kernels import call_map
from needle.backend_ndarray.sizes import real
from needle.complex_numbers import Complex
from needle.ops.common import Binary, Elementwise, ScalarOp, Unary, as_operand, broadcast_shape, unbroadcast
from needle.ops.dtypes import cast_array, fits_attribute, result_dtype
from needle.ops.families import function_of, op_class, samples_of
from needle.ops.math.comparison import eq, gt, lt

__all__ = [
    "add",
    "add_scalar",
    "at_least",
    "at_most",
    "cast",
    "divide",
    "divide_scalar",
    "maximum",
    "minimum",
    "mul_scalar",
    "multiply",
    "negate",
    "subtract",
    "where",
]

# -- arithmetic ----------------------------------------------------------------------------------------------------------


def arithmetic(words: str, sign: str, ufunc: Any, gradient: Any, slope: Any, **facts: Any) -> tuple[Any, Any]:
    """The ops EWise`words` and `words`Scalar. gradient(self, dy, node) and `facts` are of the first, slope(dy, scalar) of the
    second."""
    kernel, facts = words.lower(), {"ufunc": ufunc, "gradient": gradient, **facts}
    alone = {"ufunc": ufunc, "gradient": lambda self, out_grad, node: slope(out_grad, self.scalar)}
    return (
        op_class(__name__, f"EWise{words}", Binary, f"a {sign} b.", kernel=kernel, **facts),
        op_class(__name__, f"{words}Scalar", ScalarOp, f"x {sign} scalar.", kernel=f"{kernel}_scalar", **alone),
    )


def of_sum(self: Op, out_grad: Tensor, node: Tensor) -> Any:
    return tuple(unbroadcast(out_grad, x.shape) for x in node.inputs)


EWiseAdd, AddScalar = arithmetic("Add", "+", np.add, of_sum, lambda dy, scalar: dy)


@tensor_method("add", "__add__", "__radd__")
def add(a: Tensor, b: Any) -> Tensor:
    """Sum of two tensors of broadcasting shapes, or of a tensor and a number."""
    return EWiseAdd()(a, b) if isinstance(b, Tensor) else with_scalar(a, b, AddScalar, EWiseAdd)


def add_scalar(a: Tensor, scalar: Any) -> Tensor:
    """Elements plus a number, in the dtype that both promote to. As `a + scalar` in torch."""
    return AddScalar(scalar)(a)


@op
class Total(Op):
    """The sum of several tensors of one shape and dtype, from the first to the last; graphs hold additions."""

    mixes_floats = True

    def must_decompose(self, *inputs: Any) -> bool:
        like = [(t.shape, t.dtype) for t in inputs]
        return like.count(like[0]) < len(like) or any(t.recorder is not None for t in inputs)

    def infer(self, *xs: Any) -> Any:
        return Spec(tuple(xs[0].shape), str(xs[0].dtype))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        first, second, *rest = inputs
        call_map("add", out, [first, second])
        for x in rest:
            call_map("add", out, [out, x])

    def reference(self, *xs: np.ndarray) -> Any:
        return sum(xs[1:], xs[0])

    def decompose(self, *xs: Tensor) -> Tensor:
        return functools.reduce(add, xs)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return (out_grad,) * len(node.inputs)

    samples = samples_of(({}, [(4, 33)] * 3), ({}, [(2, 5)] * 2))


@tensor_method("_total")
def total(first: Tensor, *others: Tensor) -> Tensor:
    return Total()(first, *others)


def of_product(self: Op, out_grad: Tensor, node: Tensor) -> Any:
    a, b = node.inputs
    return (
        unbroadcast(multiply(out_grad, b), a.shape) if a.requires_grad else None,
        unbroadcast(multiply(out_grad, a), b.shape) if b.requires_grad else None,
    )


EWiseMul, MulScalar = arithmetic("Mul", "*", np.multiply, of_product, lambda dy, scalar: mul_scalar(dy, scalar))


@tensor_method("multiply", "mul", "__mul__", "__rmul__")
def multiply(a: Tensor, b: Any) -> Tensor:
    """Product of two tensors of broadcasting shapes, or of a tensor and a number."""
    return EWiseMul()(a, b) if isinstance(b, Tensor) else with_scalar(a, b, MulScalar, EWiseMul)


def mul_scalar(a: Tensor, scalar: Any) -> Tensor:
    """Elements times a number, in the dtype that both promote to. As `a * scalar` in torch."""
    return MulScalar(scalar)(a)


@op
class Negate(Unary):
    """-x."""

    kernel = "neg"
    ufunc = np.negative

    def operand_dtype(self, *inputs: Any) -> str:
        if inputs[0].dtype == "bool":
            raise TypeError("[negate] expects numbers, got bools; != tells where two differ, ~ turns one around.")
        return super().operand_dtype(*inputs)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return -out_grad


negate = function_of(Negate, "negate", "negate", "neg", "__neg__")


@tensor_method("subtract", "sub", "__sub__")
def subtract(a: Tensor, b: Any) -> Tensor:
    """a - b, as add(a, negate(b))."""
    return add(a, opposite(b, a)) if isinstance(b, Tensor) else add(a, -b)


def opposite(a: Tensor, other: Any) -> Tensor:
    """-a, to be added to `other`."""
    try:
        dtype = opposite_dtype(a, other)
    except Unsupported:  # until the graph runs
        return Opposite()(a, other) if isinstance(other, Tensor) else Opposite(other)(a)
    return negate(a if dtype == a.dtype else cast(a, dtype))


def opposite_dtype(a: Any, other: Any) -> str:
    """That of the sum where it is a larger one: the smallest integer has no opposite."""
    dtype = result_dtype(a, other) if isinstance(other, Tensor | Spec) else promote_scalar(a.dtype, other)
    return str(a.dtype) if a.dtype in FLOATS or promote(str(a.dtype), dtype) != dtype else dtype


@op
class Opposite(Op):
    """-x, to be added to a second tensor or attribute `number`, whose value plays no part."""

    number: Any = None
    mixes_floats = True

    def infer(self, x: Any, *other: Any) -> Any:
        return Spec(tuple(x.shape), opposite_dtype(x, *(other or (self.number,))))

    def decompose(self, x: Tensor, *other: Tensor) -> Tensor:
        return opposite(x, *(other or (self.number,)))

    samples = samples_of(({}, [(3, 4), (4,)]), ({"number": 1.5}, [(3, 4)]))


@tensor_method("__rsub__")
def rsubtract(a: Tensor, b: Any) -> Tensor:
    return add(opposite(a, b), b)


def of_quotient(self: Op, out_grad: Tensor, node: Tensor) -> Any:
    a, b = node.inputs
    over_b = divide(out_grad, b)
    grad_b = unbroadcast(negate(multiply(over_b, node)), b.shape) if b.requires_grad else None
    return unbroadcast(over_b, a.shape), grad_b


POLE = {"zero_is_safe": False, "domain": (0.3, 3.0)}
EWiseDiv, DivScalar = arithmetic(
    "Div", "/", np.divide, of_quotient, lambda dy, scalar: divide_scalar(dy, scalar), **POLE
)


@tensor_method("divide", "div", "__truediv__")
def divide(a: Tensor, b: Any) -> Tensor:
    """Quotient of two tensors of broadcasting shapes, or of a tensor and a number."""
    return EWiseDiv()(a, b) if isinstance(b, Tensor) else with_scalar(a, b, DivScalar, EWiseDiv)


def divide_scalar(a: Tensor, scalar: Any) -> Tensor:
    """Elements over a number; integers and bools become float32. As `a / scalar` in torch."""
    return DivScalar(_real(scalar))(a)


@op
class WeightedSum(Binary):
    """of_x x + of_y y."""

    of_x: float
    of_y: float
    kernel = "weighted_sum"

    def formula(self, x: np.ndarray, y: np.ndarray) -> Any:
        return x * np.asarray(self.of_x, x.dtype) + y * np.asarray(self.of_y, y.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, y = node.inputs
        return unbroadcast(out_grad * self.of_x, x.shape), unbroadcast(out_grad * self.of_y, y.shape)

    samples = samples_of(
        ({"of_x": 0.9, "of_y": -0.3}, [(4, 33), (4, 33)]), ({"of_x": 2.0, "of_y": 0.1}, [(2, 1, 5), (3, 1)])
    )


@op
class RDivScalar(ScalarOp):
    """scalar / x."""

    kernel = "rdiv_scalar"
    zero_is_safe = False
    domain = (0.3, 3.0)

    def formula(self, x: np.ndarray) -> Any:
        return np.asarray(self.scalar, x.dtype) / x

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return negate(multiply(out_grad, divide(node, node.inputs[0])))


@tensor_method("__rtruediv__")
def rdivide(a: Tensor, b: Any) -> Tensor:
    """b / a for a number or array b."""
    return EWiseDiv()(as_operand(b, a), a) if np.ndim(b) else RDivScalar(_real(b))(a)


# -- selection -----------------------------------------------------------------------------------------------------------


class Extremum(Binary):
    """Element-wise maximum or minimum; equal elements share the gradient by halves, beside NaN both have it, as in torch.
    The other element has none, not 0 times it: behind `sqrt(maximum(x, 0))` it may be infinite.
    """

    def beaten(self, a: Tensor, b: Tensor) -> Tensor:
        """Where the first of two is not the result."""
        raise NotImplementedError

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, b = node.inputs
        shared = where(eq(a, b), out_grad * 0.5, out_grad)
        return tuple(unbroadcast(where(self.beaten(x, other), 0.0, shared), x.shape) for x, other in ((a, b), (b, a)))


@op
class EWiseMaximum(Extremum):
    """The larger of a and b."""

    kernel = "maximum"
    ufunc = np.maximum

    def beaten(self, a: Tensor, b: Tensor) -> Tensor:
        return lt(a, b)


@tensor_method()
def maximum(a: Tensor, b: Any) -> Tensor:
    """The larger of two elements, broadcast; nan where either is nan, and half the gradient each where they are equal. As
    torch.maximum.
    """
    return EWiseMaximum()(a, as_operand(b, a))


@op
class EWiseMinimum(Extremum):
    """The smaller of a and b."""

    kernel = "minimum"
    ufunc = np.minimum

    def beaten(self, a: Tensor, b: Tensor) -> Tensor:
        return gt(a, b)


@tensor_method()
def minimum(a: Tensor, b: Any) -> Tensor:
    """The smaller of two elements, broadcast; nan where either is nan, and half the gradient each where they are equal. As
    torch.minimum.
    """
    return EWiseMinimum()(a, as_operand(b, a))


@op
class AtLeast(EWiseMaximum):
    """a, or the limit b where a is below it: a has the gradient where they are equal, as in torch.clamp with tensors."""

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return limit_gradient(out_grad, node, lt(*node.inputs))


def at_least(a: Tensor, low: Any) -> Tensor:
    """a, or `low` where a is below it, a number or a tensor that broadcasts: as torch.clamp with tensors, the whole gradient
    is a's where both are equal.
    """
    return AtLeast()(a, as_operand(low, a))


@op
class AtMost(EWiseMinimum):
    """a, or the limit b where a is above it: gradient as AtLeast."""

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return limit_gradient(out_grad, node, gt(*node.inputs))


def at_most(a: Tensor, high: Any) -> Tensor:
    """a, or `high` where a is above it, a number or a tensor that broadcasts: as torch.clamp with tensors, the whole gradient
    is a's where both are equal.
    """
    return AtMost()(a, as_operand(high, a))


def limit_gradient(out_grad: Tensor, node: Tensor, beyond: Tensor) -> tuple[Tensor, Tensor]:
    """Of a number and its limit; what is no number has none."""
    a, b = node.inputs
    kept = where(eq(node, node), out_grad, 0.0)
    return unbroadcast(where(beyond, 0.0, kept), a.shape), unbroadcast(where(beyond, out_grad, 0.0), b.shape)


@op
class Clamp(Unary):
    """x limited to [low, high]; the gradient is 1 inside and on the limits."""

    low: Any
    high: Any
    kernel = "clamp"

    def operand_dtype(self, *inputs: Any) -> str:
        return promote_scalar(dtype_name(inputs[0].dtype), sum((self.low, self.high)))

    def formula(self, x: np.ndarray) -> Any:
        return np.clip(x, self.low, self.high).astype(x.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return where(eq(node, node.inputs[0]), out_grad, 0.0)

    samples = samples_of(({"low": -1.0, "high": 1.5}, [(4, 33)]))


def is_limit(scalar: Any) -> bool:
    """Whether a kernel can take a number as a limit: one that is no number makes everything that."""
    return fits_attribute(scalar) and scalar == scalar


@op
class Where(Elementwise):
    """a where the condition (bool) holds, else b."""

    kernel = "where"

    def infer(self, condition: Any, a: Any, b: Any) -> Any:
        if condition.dtype != "bool":
            raise ValueError(f"[where] condition expects dtype bool, got {condition.dtype}.")
        return Spec(broadcast_shape("where", condition.shape, a.shape, b.shape), result_dtype(a, b))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        ins = [inputs[0], *(cast_array(x, out.dtype) for x in inputs[1:])]
        call_map("where", out, [x.broadcast_to(out.shape) for x in ins])

    def reference(self, condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> Any:
        return np.where(condition, *(cast_array(x, result_dtype(a, b)) for x in (a, b)))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        condition, a, b = node.inputs
        return (
            None,
            unbroadcast(where(condition, out_grad, 0.0), a.shape) if a.requires_grad else None,
            unbroadcast(where(condition, 0.0, out_grad), b.shape) if b.requires_grad else None,
        )

    samples = samples_of(({}, [Spec((4, 33), "bool"), (4, 33), (33,)]))


def where(condition: Tensor, a: Any, b: Any) -> Tensor:
    """a where `condition` (a bool tensor) holds, else b; a and b may be numbers."""
    like = next((t for t in (a, b) if isinstance(t, Tensor)), condition)
    return Where()(condition, as_operand(a, like), as_operand(b, like))


@op
class Cast(Unary):
    """x as another dtype."""

    dtype: str
    kernel = "copy"

    def infer(self, x: Any) -> Any:
        return Spec(x.shape, self.dtype)

    def aliases(self, out: Any, *inputs: Any) -> bool:
        return bool(out.dtype == inputs[0].dtype)

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        call("copy", [out], x=inputs[0])

    def reference(self, x: np.ndarray) -> Any:
        return x.astype(self.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return cast(out_grad, node.inputs[0].dtype)

    samples = samples_of(({"dtype": "int32"}, [(4, 33)]))


@tensor_method("cast", "astype")
def cast(a: Tensor, dtype: str) -> Tensor:
    """In another dtype, by its name; without a copy where it has that one. As torch's `to`; gradients come back in a's dtype."""
    return Cast(dtype)(a)


def _real(scalar: Any) -> Any:
    """Integers as floats: division of integer tensors gives floats, as in torch."""
    return real(scalar) if isinstance(scalar, int | np.number) else scalar


def with_scalar(a: Tensor, b: Any, by_scalar: Any, by_array: Any) -> Tensor:
    """`a` op `b` for a b that is no Tensor: a number (or symbolic size), else an array."""
    if isinstance(b, Complex):
        return NotImplemented  # whose operators know both
    if isinstance(b, np.ndarray | NDArray) or not fits_attribute(b):
        return by_array()(a, as_operand(b, a))
    return by_scalar(_real(b) if by_scalar is DivScalar else b)(a)
