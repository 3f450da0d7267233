"""Arrays that numpy's functions take and that record tensor expressions: an op's numpy `reference` run on them gives its `te`.

`Element` is one value at symbolic indices, `Array` a whole te.Tensor. Arithmetic is written once, for elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import te, tirx, topi

from needle.op import Unsupported


def plain(shape: Sequence[Any]) -> tuple[Any, ...]:
    """A shape with ints where TVM holds constants."""
    return tuple(int(s) if isinstance(s, int | np.integer | tirx.IntImm) else s for s in shape)


def constant(value: Any, dtype: Any) -> Any:
    dtype = np.dtype(dtype)
    value = value.item() if isinstance(value, np.ndarray | np.generic) else value
    return tirx.const(
        bool(value) if dtype.kind == "b" else int(value) if dtype.kind == "i" else float(value), str(dtype)
    )


def dtype_of(expression: Any) -> str:
    """dtype of an expression of TIR or Relax."""
    return str(expression.ty.dtype)


def converted(x: Any, dtype: Any) -> Any:
    """A TIR expression as another dtype; true is what differs from zero."""
    dtype = str(np.dtype(dtype))
    if dtype_of(x) == dtype:
        return x
    return tirx.NE(x, tirx.const(0, dtype_of(x))) if dtype == "bool" else x.astype(dtype)


def powered(a: Any, b: Any) -> Any:
    """a ** b, by products where b is a small whole constant."""
    value = getattr(b, "value", None)
    if value in (0.5, -0.5):
        root = tirx.sqrt(a)
        return root if value > 0 else tirx.const(1, dtype_of(a)) / root
    if value is None or not float(value).is_integer() or abs(value) > 64:
        return tirx.power(a, b)
    product, factor, left = tirx.const(1, dtype_of(a)), a, abs(int(value))
    while left:
        product = product * factor if left % 2 else product
        factor, left = factor * factor, left // 2
    return product if value >= 0 else tirx.const(1, dtype_of(a)) / product


def sign(a: Any) -> Any:
    zero, one = tirx.const(0, dtype_of(a)), tirx.const(1, dtype_of(a))
    return tirx.Select(a > zero, one, tirx.Select(a < zero, zero - one, a))


def log_of_sum(a: Any, b: Any) -> Any:
    """log(e ** a + e ** b)."""
    return tirx.max(a, b) + tirx.log(tirx.const(1, dtype_of(a)) + tirx.exp(-tirx.abs(a - b)))


def logarithm_near_one(x: Any) -> Any:
    """log(1 + x) by Kahan's correction."""
    one = tirx.const(1, dtype_of(x))
    u = x + one
    return tirx.Select(tirx.EQ(u, one), x, tirx.log(u) * x / tirx.Select(tirx.EQ(u, one), one, u - one))


def exponential_near_zero(x: Any) -> Any:
    """e ** x - 1, which keeps the digits of a small x; where e ** x leaves the range, tanh is one."""
    half, one = tirx.const(0.5, dtype_of(x)), tirx.const(1, dtype_of(x))
    return tirx.tanh(x * half) * (tirx.exp(x) + one)


# numpy's functions by name, on TIR expressions of one dtype.
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")
UFUNCS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: tirx.Div(a, b),
    "negative": lambda a: tirx.const(0, dtype_of(a)) - a if "int" in dtype_of(a) else -a,
    "absolute": tirx.abs,
    "reciprocal": lambda a: tirx.const(1, dtype_of(a)) / a,
    "maximum": tirx.max,
    "minimum": tirx.min,
    "power": powered,
    "hypot": lambda a, b: tirx.hypot(a, b),
    "sign": sign,
    "logaddexp": log_of_sum,
    "log1p": logarithm_near_one,
    "expm1": exponential_near_zero,
    "rint": tirx.nearbyint,
    **dict(zip(COMPARISONS, (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE), strict=True)),
    **{name: getattr(tirx, name) for name in BITS},
    **{name: getattr(tirx, name) for name in ("exp", "log", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "erf")},
}
# numpy's names, TIR's
ARCS = {f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "tan2")}
NAMED = {**ARCS, **{name: name for name in ("tan", "sinh", "cosh", "exp2", "log2", "log10")}}
UFUNCS |= {name: getattr(tirx, own) for name, own in NAMED.items()}
REAL = {
    "divide",
    "exp",
    "log",
    "sqrt",
    "sin",
    "cos",
    "tanh",
    "erf",
    "logaddexp",
    "log1p",
    "expm1",
    "reciprocal",
    "hypot",
} | set(NAMED)


METHODS = {"amax": "max", "amin": "min"} | {
    name: name for name in ("sum", "mean", "prod", "max", "min")
}  # of numpy's functions


class Recorded(np.lib.mixins.NDArrayOperatorsMixin):
    """What elements and arrays share: numpy's functions by name."""

    dtype: np.dtype

    def apply(self, name: str, *operands: Any) -> Any:
        raise NotImplementedError

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return self.apply(ufunc.__name__, *inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        own = getattr(self, f"numpy_{func.__name__}", None)
        if own is not None:
            return own(*args, **kwargs)
        method = getattr(args[0], METHODS.get(func.__name__, ""), None)
        return NotImplemented if method is None else method(*args[1:], **kwargs)

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        return self if np.dtype(dtype) == self.dtype else self.apply(f"as {np.dtype(dtype)}", self)

    def erf(self) -> Any:
        return self.apply("erf", self)

    def numpy_where(self, condition: Any, a: Any, b: Any) -> Any:
        return self.apply("where", condition, a, b)

    def numpy_clip(self, x: Any, low: Any, high: Any) -> Any:
        for name, limit in (("maximum", low), ("minimum", high)):
            x = x if isinstance(limit, float) and math.isinf(limit) else self.apply(name, x, limit)
        return x


def evaluate(name: str, operands: Sequence[Element | Any]) -> Element:
    """One function of numpy on elements and numbers, in the dtype that numpy gives it."""
    if name.startswith("as "):
        return Element(converted(operands[0].expression, name[3:]))
    values = operands[1:] if name == "where" else operands
    dtype = np.result_type(*[v.dtype if isinstance(v, Recorded) else v for v in values])
    if name in REAL and dtype.kind != "f":
        dtype = np.dtype("float64")
    made = [converted(v.expression, dtype) if isinstance(v, Element) else constant(v, dtype) for v in values]
    if name == "where":
        condition = operands[0].expression if isinstance(operands[0], Element) else constant(operands[0], bool)
        return Element(tirx.Select(condition, *made))
    if name not in UFUNCS:
        raise Unsupported(f"[tvm] numpy's {name} has no tensor expression.")
    if dtype.kind == "b" and name in COMPARISONS + BITS:
        made = [converted(v, "int8") for v in made]
    return Element(UFUNCS[name](*made))


class Element(Recorded):
    """One element as a TIR expression."""

    ndim = 0
    shape = ()

    def __init__(self, expression: Any) -> None:
        self.expression, self.dtype = expression, np.dtype(dtype_of(expression))

    def apply(self, name: str, *operands: Any) -> Element:
        return evaluate(name, operands)


def broadcast(shapes: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The shape under which arrays meet, where sizes may be expressions: one of them counts unless it is 1."""
    rank = max(map(len, shapes))
    wide = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(
        next((s for s in sizes if not (isinstance(s, int) and s == 1)), 1) for sizes in zip(*wide, strict=True)
    )


def own_indices(shape: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
    """An array's indices at those of a result that it is broadcast to."""
    own = indices[len(indices) - len(shape) :]
    return [tirx.const(0, "int32") if s == 1 else i for s, i in zip(plain(shape), own, strict=True)]


def elementwise(f: Callable[..., Any], shape: Sequence[Any], xs: Sequence[Any], dtype: str | None = None) -> Any:
    """te.Tensor of `shape` with f of the elements of xs (te.Tensors, broadcast) as its elements."""

    def compute(*indices: Any) -> Any:
        out = f(*(Element(x(*own_indices(x.shape, indices))) for x in xs))
        return out.expression if dtype is None else converted(out.expression, dtype)

    return te.compute(tuple(shape), compute, name="compute")


def whole_index(index: tuple, rank: int) -> tuple:
    """A basic index with the slices that its ..., or its end, stands for."""
    used = sum(i is not None and i is not Ellipsis for i in index)
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    return (*index[:at], *(slice(None),) * (rank - used), *index[at + 1 :])


class Array(Recorded):
    """A te.Tensor as numpy sees an array."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.shape, self.dtype = tensor, plain(tensor.shape), np.dtype(str(tensor.dtype))

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    T = property(lambda self: self.transpose())

    def apply(self, name: str, *operands: Any) -> Array:
        if name == "matmul":
            return Array(matmul(*(o.tensor for o in operands)))
        arrays = [o for o in operands if isinstance(o, Array)]

        def f(*elements: Element) -> Element:
            given = iter(elements)
            return evaluate(name, [next(given) if isinstance(o, Array) else o for o in operands])

        return Array(elementwise(f, broadcast([a.shape for a in arrays]), [a.tensor for a in arrays]))

    # -- rearranging -----------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> Array:
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        known = math.prod(s for s in shape if not (isinstance(s, int) and s == -1))
        rest = self.size // known if any(isinstance(s, int) and s == -1 for s in shape) else 1
        return Array(topi.reshape(self.tensor, [rest if isinstance(s, int) and s == -1 else s for s in shape]))

    def transpose(self, *axes: Any) -> Array:
        axes = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = [a % self.ndim for a in (axes or reversed(range(self.ndim)))]
        return Array(topi.transpose(self.tensor, order))

    def swapaxes(self, a: int, b: int) -> Array:
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self.transpose(order)

    def __getitem__(self, index: Any) -> Array:
        index = index if isinstance(index, tuple) else (index,)
        shape: list[Any] = []
        places: list[tuple[int | None, Any, int]] = []  # per own axis: the result's, its step, the start
        sizes = iter(self.shape)
        for i in whole_index(index, self.ndim):
            if i is None:
                shape.append(1)
                continue
            size = next(sizes)
            if isinstance(i, slice):
                start, count, step = (0, size, 1) if i == slice(None) else self._span(i, size)
                places.append((len(shape), step, start))
                shape.append(count)
            else:
                places.append((None, 0, i if i >= 0 else size + i))

        def compute(*out: Any) -> Any:
            return self.tensor(*[start if d is None else out[d] * step + start for d, step, start in places])

        return Array(te.compute(tuple(shape), compute, name="slice"))

    @staticmethod
    def _span(part: slice, size: Any) -> tuple[int, int, int]:
        if not isinstance(size, int):
            raise Unsupported(f"[tvm] an axis of free size cannot be sliced by {part.start}:{part.stop}:{part.step}.")
        start, stop, step = part.indices(size)
        return start, len(range(start, stop, step)), step

    def numpy_flip(self, x: Array, axis: Any) -> Array:
        return Array(functools.reduce(topi.flip, axis if isinstance(axis, tuple) else (axis,), x.tensor))

    def numpy_concatenate(self, xs: Sequence[Array], axis: int = 0) -> Array:
        return Array(topi.concatenate(tuple(x.tensor for x in xs), axis % xs[0].ndim))

    def numpy_stack(self, xs: Sequence[Array], axis: int = 0) -> Array:
        return Array(topi.stack(tuple(x.tensor for x in xs), axis % (xs[0].ndim + 1)))

    def numpy_diagonal(self, x: Array, offset: int, axis1: int, axis2: int) -> Array:
        down, right = max(0, -offset), max(0, offset)
        count = max(0, min(x.shape[-2] - down, x.shape[-1] - right))
        shape = (*x.shape[:-2], count)
        return Array(te.compute(shape, lambda *i: x.tensor(*i[:-1], i[-1] + down, i[-1] + right), name="diagonal"))

    # -- reductions ------------------------------------------------------------------------------------------------------

    def _reduce(self, reducer: Callable[..., Any], axis: Any, keepdims: bool) -> Array:
        axes = (
            range(self.ndim) if axis is None else [a % self.ndim for a in ((axis,) if isinstance(axis, int) else axis)]
        )
        if not axes:
            return self
        return Array(reducer(self.tensor, list(axes), keepdims))

    def _largest(self, reducer: Callable[..., Any], axis: Any, keepdims: bool) -> Array:
        if self.dtype.kind == "b":
            return self.astype("int8")._reduce(reducer, axis, keepdims).astype(bool)
        return self._reduce(reducer, axis, keepdims)

    def sum(self, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Array:
        return self.astype(dtype or self.dtype)._reduce(topi.sum, axis, keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Array:
        total = self.sum(axis, dtype, keepdims=keepdims)
        count = self.size // math.prod(total.shape)
        if isinstance(count, int):
            return total / count
        return total / Array(te.compute((), lambda: count.astype(str(total.dtype)), name="count"))

    def prod(self, axis: Any = None, keepdims: bool = False) -> Array:
        return self._reduce(topi.prod, axis, keepdims)

    def var(self, axis: Any = None, keepdims: bool = False) -> Array:
        centred = self - self.mean(axis, keepdims=True)
        return (centred * centred).mean(axis, keepdims=keepdims)

    def max(self, axis: Any = None, out: None = None, keepdims: bool = False, initial: float | None = None) -> Array:
        return self._largest(topi.max, axis, keepdims)

    def min(self, axis: Any = None, out: None = None, keepdims: bool = False) -> Array:
        return self._largest(topi.min, axis, keepdims)

    numpy_sum, numpy_mean, numpy_prod = staticmethod(sum), staticmethod(mean), staticmethod(prod)
    numpy_max, numpy_min = numpy_amax, numpy_amin = staticmethod(max), staticmethod(min)

    def numpy_argmax(self, x: Array, axis: int, keepdims: bool = False) -> Array:
        return Array(topi.argmax(x.tensor, axis % x.ndim, keepdims)).astype("int64")


def matmul(a: Any, b: Any) -> Any:
    """numpy's a @ b for operands of one dtype."""
    rows, inner = a.shape[-2:] if len(a.shape) > 1 else (None, a.shape[0])
    columns = b.shape[-1] if len(b.shape) > 1 else None
    batch = broadcast([plain(a.shape[:-2]), plain(b.shape[:-2])])
    k = te.reduce_axis((0, inner), name="k")
    shape = (*batch, *(s for s in (rows, columns) if s is not None))

    def compute(*out: Any) -> Any:
        lead, rest = out[: len(batch)], list(out[len(batch) :])
        row, column = ([] if s is None else [rest.pop(0)] for s in (rows, columns))
        left, right = (own_indices(x.shape[:-2], lead) for x in (a, b))
        return te.sum(a(*left, *row, k) * b(*right, k, *column), axis=k)

    return te.compute(shape, compute, name="matmul")
