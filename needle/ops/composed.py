"""torch's functions that are a line of ops each, by the same names and arguments: what losses and modules that are written
against needle find as they would find it in torch."""

from __future__ import annotations

import math
from typing import Any

from needle.autograd import Tensor, tensor_method

from .linalg.basic import matmul
from .math.arithmetic import clamp_min, log1p
from .math.comparison import eq, le, lt, ne
from .math.elementwise import where
from .math.logic import isfinite, isnan, logical_not
from .math.maths import absolute, log
from .reduce.basic import every, summation, vector_norm
from .reduce.softmax import softmax
from .reduce.sorting import argmax
from .shape.basic import flatten, squeeze, transpose, unsqueeze
from .shape.drawn import rand_like
from .shape.gather import take, take_along
from .shape.indexing import getitem
from .shape.join import concat
from .shape.masked import masked_fill
from .shape.runtime_shape import broadcast_like, cast_like, diagonal, stop_gradient, straight_through, triangle
from .shape.scatter import scatter

__all__ = [
    "addcdiv",
    "addcmul",
    "addmm",
    "allclose",
    "baddbmm",
    "bilinear",
    "bmm",
    "cosine_similarity",
    "count_nonzero",
    "diff",
    "dot",
    "equal",
    "gumbel_softmax",
    "index_select",
    "isclose",
    "lerp",
    "mm",
    "mv",
    "nanmean",
    "nansum",
    "narrow",
    "outer",
    "pairwise_distance",
    "scatter_add",
    "select",
    "softmin",
    "square",
    "take_along_dim",
    "trace",
    "tril",
    "triu",
    "unbind",
]


# -- products ------------------------------------------------------------------------------------------------------------


SHAPES = {
    (1, 1): "(N,) and (N,), which gives ()",
    (2, 1): "(N, K) and (K,), which gives (N,)",
    (2, 2): "(N, K) and (K, M), which gives (N, M)",
    (3, 3): "(B, N, K) and (B, K, M), which gives (B, N, M)",
}


def product(name: str, ranks: tuple[int, int]) -> Any:
    """matmul of operands of these ranks alone."""

    def multiplied(a: Tensor, b: Tensor) -> Tensor:
        if (a.ndim, b.ndim) != ranks:
            raise ValueError(
                f"[{name}] expects operands of {ranks[0]} and {ranks[1]} axes, got {a.shape} and {b.shape}."
            )
        return matmul(a, b)

    multiplied.__name__ = multiplied.__qualname__ = name
    multiplied.__doc__ = f"matmul of {SHAPES[ranks]}; raises ValueError for operands of other ranks."
    return tensor_method()(multiplied)


dot, mv, mm, bmm = product("dot", (1, 1)), product("mv", (2, 1)), product("mm", (2, 2)), product("bmm", (3, 3))


@tensor_method()
def outer(a: Tensor, b: Tensor) -> Tensor:
    """Products of all pairs: (N,) and (M,) give (N, M)."""
    return unsqueeze(a, 1) * unsqueeze(b, 0)


@tensor_method()
def addmm(a: Tensor, b: Tensor, c: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta a + alpha (b @ c) of b (N, K), c (K, M) and an `a` that broadcasts to (N, M); with beta 0, `a` plays no part."""
    return plus_product(a, mm(b, c), beta, alpha)


@tensor_method()
def baddbmm(a: Tensor, b: Tensor, c: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`addmm` of batches: beta a + alpha (b @ c) of b (B, N, K), c (B, K, M) and an `a` that broadcasts to (B, N, M)."""
    return plus_product(a, bmm(b, c), beta, alpha)


def plus_product(a: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    return product * alpha if beta == 0 else a * beta + product * alpha


def bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """a^T W b + bias of a (*, N), b (*, M), weight (K, N, M) and bias (K,): (*, K)."""
    left = matmul(unsqueeze(unsqueeze(a, -2), -2), weight)  # (*, K, 1, M)
    y = squeeze(matmul(left, unsqueeze(unsqueeze(b, -2), -1)), (-2, -1))
    return y if bias is None else y + bias


# -- numbers -------------------------------------------------------------------------------------------------------------


@tensor_method()
def square(a: Tensor) -> Tensor:
    """a * a."""
    return a**2


@tensor_method()
def lerp(a: Tensor, end: Tensor, weight: Any) -> Tensor:
    """a + weight (end - a) of shapes that broadcast, from the nearer end, so that each is met exactly."""
    from_start, from_end = a + (end - a) * weight, end - (end - a) * (1 - weight)
    if isinstance(weight, Tensor):
        return where(lt(absolute(weight), 0.5), from_start, from_end)
    return from_start if abs(weight) < 0.5 else from_end


@tensor_method()
def addcmul(a: Tensor, b: Tensor, c: Tensor, *, value: Any = 1) -> Tensor:
    """a + value b c of shapes that broadcast."""
    return a + b * c * value


@tensor_method()
def addcdiv(a: Tensor, b: Tensor, c: Tensor, *, value: Any = 1) -> Tensor:
    """a + value b / c of shapes that broadcast."""
    return a + b / c * value


def softmin(a: Tensor, axis: int) -> Tensor:
    """softmax(-a) along an axis."""
    return softmax(-a, axis)


def gumbel_softmax(logits: Tensor, tau: float = 1.0, hard: bool = False, axis: int = -1) -> Tensor:
    """Softmax of (logits + Gumbel noise) / tau along an axis (Jang, Gu and Poole, arXiv 1611.01144).

    hard: 1 at the largest and 0 elsewhere, with the gradient of the soft numbers.
    """
    noise = log(clamp_min(-log1p(-rand_like(logits)), 1e-38))
    soft = softmax((logits - noise) / tau, axis)
    if not hard:
        return soft
    return scatter(soft * 0, axis, argmax(soft, axis, True), 1.0) - stop_gradient(soft) + soft


@tensor_method()
def isclose(a: Tensor, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Where |a - b| <= atol + rtol |b|; equal infinities are close, NaNs where `equal_nan` says so."""
    b = b if isinstance(b, Tensor) else Tensor(b, device=a.device, dtype=a.dtype, requires_grad=False)
    near = le(absolute(a - b), atol + rtol * absolute(b)) & isfinite(b) | eq(a, b)
    return near | isnan(a) & isnan(b) if equal_nan else near


@tensor_method()
def allclose(a: Tensor, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether all are close, as of `isclose`, of two shapes that broadcast; a bool of Python."""
    return bool(every(isclose(a, b, rtol, atol, equal_nan)))


# -- reductions ----------------------------------------------------------------------------------------------------------


@tensor_method()
def count_nonzero(a: Tensor, axes: Any = None) -> Tensor:
    """How many numbers are not 0 along axes, which go; int64."""
    return summation(ne(a, 0), axes)


@tensor_method()
def nansum(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    """The sum of what is no NaN along axes, which go unless `keepdims`."""
    return summation(masked_fill(a, isnan(a), 0), axes, keepdims)


@tensor_method()
def nanmean(a: Tensor, axes: Any = None, keepdims: bool = False) -> Tensor:
    """The mean of what is no NaN along axes, which go unless `keepdims`."""
    return nansum(a, axes, keepdims) / summation(cast_like(logical_not(isnan(a)), a), axes, keepdims)


@tensor_method()
def trace(a: Tensor) -> Tensor:
    """The sum of the diagonal of a matrix (N, M): ()."""
    return summation(diagonal(a))


@tensor_method()
def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape and the same elements; a bool of Python."""
    return tuple(a.shape) == tuple(b.shape) and bool(every(eq(a, b)))


def cosine_similarity(a: Tensor, b: Tensor, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """a . b / (max(|a|, eps) max(|b|, eps)) along an axis, which goes; shapes broadcast. The gradients are those of |a| and |b|
    below `eps`, too, as torch's."""
    shape = a * b
    a, b = broadcast_like(a, shape), broadcast_like(b, shape)
    norms = [vector_norm(x, 2.0, axis, True) for x in (a, b)]
    lengths = [straight_through(clamp_min(n, eps), n) for n in norms]
    return summation((a / lengths[0]) * (b / lengths[1]), axis)


def pairwise_distance(a: Tensor, b: Tensor, p: float = 2.0, eps: float = 1e-6, keepdims: bool = False) -> Tensor:
    """The p-norm of a - b + eps, which broadcast, along the last axis: (*, N) give (*)."""
    return vector_norm(a - b + eps, math.inf if p == math.inf else float(p), -1, keepdims)


@tensor_method()
def diff(a: Tensor, n: int = 1, axis: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Tensor:
    """Differences of neighbours along an axis, which is shorter by `n`, of `a` between what is prepended and appended."""
    a = concat([t for t in (prepend, a, append) if t is not None], axis) if (prepend, append) != (None, None) else a
    for _ in range(n):
        a = along(a, axis, slice(1, None)) - along(a, axis, slice(None, -1))
    return a


# -- parts ---------------------------------------------------------------------------------------------------------------


@tensor_method()
def tril(a: Tensor, diagonal: Any = 0) -> Tensor:
    """(*, N, M) with zeros above a diagonal."""
    return triangle(a, False, diagonal)


@tensor_method()
def triu(a: Tensor, diagonal: Any = 0) -> Tensor:
    """(*, N, M) with zeros below a diagonal."""
    return triangle(a, True, diagonal)


def along(a: Tensor, axis: int, item: Any) -> Tensor:
    if not -a.ndim <= axis < a.ndim:
        raise IndexError(f"[getitem] axis expects {-a.ndim} to {a.ndim - 1}, got {axis}.")
    return getitem(a, (*(slice(None),) * (axis % a.ndim), item))


@tensor_method()
def narrow(a: Tensor, axis: int, start: int, length: int) -> Tensor:
    """`length` places of an axis from `start` on: its size is `length`."""
    size = a.shape[axis]
    first = start + size if start < 0 else start
    if not 0 <= first <= first + length <= size:
        raise IndexError(f"[narrow] start and length expect places of {size}, got {start} and {length}.")
    return along(a, axis, slice(first, first + length))


@tensor_method()
def select(a: Tensor, axis: int, index: int) -> Tensor:
    """One place of an axis, which goes: (3, 4) gives (3,) along the last."""
    return along(a, axis, index)


@tensor_method()
def unbind(a: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    """The places of an axis, each without it: (3, 4) gives 3 of (4,)."""
    return tuple(along(a, axis, i) for i in range(a.shape[axis]))


@tensor_method()
def index_select(a: Tensor, axis: int, index: Tensor) -> Tensor:
    """The places of an axis that numbers (K,) say: its size is K."""
    return take(a, index, axis)


@tensor_method()
def take_along_dim(a: Tensor, indices: Tensor, axis: int | None = None) -> Tensor:
    """The elements that numbers say along an axis, for shapes that broadcast elsewhere; of all elements, (K,), without one."""
    return take(flatten(a), flatten(indices)) if axis is None else take_along(a, indices, axis)


@tensor_method()
def scatter_add(a: Tensor, axis: int, index: Tensor, source: Tensor) -> Tensor:
    """a with the elements of `source` added at the numbers of `index` along an axis: see `scatter`."""
    return scatter(a, axis, index, source, "sum")


@tensor_method()
def t(a: Tensor) -> Tensor:
    """A matrix (N, M) transposed; fewer axes as they are, more raise ValueError."""
    if a.ndim > 2:
        raise ValueError(f"[t] expects at most two axes, got shape {a.shape}.")
    return transpose(a, (0, 1)) if a.ndim == 2 else a
