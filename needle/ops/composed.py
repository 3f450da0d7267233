"""torch's functions that are a line of ops each, and torch's other methods of tensors, by the same names and arguments: what
losses and modules that are written against needle find as they would find it in torch."""

from __future__ import annotations

import math
from typing import Any

from needle.autograd import Tensor, tensor_method

from .linalg.basic import matmul
from .math.arithmetic import clamp_min, isfinite, isnan
from .math.comparison import eq, le, lt, ne
from .math.elementwise import where
from .math.maths import absolute
from .reduce.basic import every, summation, vector_norm
from .shape.basic import broadcast_to, reshape, transpose, unsqueeze
from .shape.gather import take
from .shape.indexing import getitem
from .shape.join import concat
from .shape.runtime_shape import broadcast_like, triangle

__all__ = [
    "addmm",
    "allclose",
    "bmm",
    "cosine_similarity",
    "count_nonzero",
    "diff",
    "dot",
    "index_select",
    "isclose",
    "lerp",
    "mm",
    "mv",
    "narrow",
    "outer",
    "pairwise_distance",
    "select",
    "square",
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
    made = mm(b, c) * alpha
    return made if beta == 0 else a * beta + made


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


def cosine_similarity(a: Tensor, b: Tensor, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """a . b / (max(|a|, eps) max(|b|, eps)) along an axis, which goes; shapes broadcast."""
    shape = a * b
    a, b = broadcast_like(a, shape), broadcast_like(b, shape)
    lengths = [clamp_min(vector_norm(x, 2.0, axis, True), eps) for x in (a, b)]
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
def t(a: Tensor) -> Tensor:
    """A matrix (N, M) transposed; fewer axes as they are, more raise ValueError."""
    if a.ndim > 2:
        raise ValueError(f"[t] expects at most two axes, got shape {a.shape}.")
    return transpose(a, (0, 1)) if a.ndim == 2 else a


# -- methods alone -------------------------------------------------------------------------------------------------------


def as_dtype(dtype: str) -> Any:
    return lambda a: a.astype(dtype)


for name, dtype in {"float": "float32", "double": "float64", "long": "int64", "int": "int32", "bool": "bool"}.items():
    tensor_method(name)(as_dtype(dtype))
tensor_method("expand_as")(lambda a, b: broadcast_to(a, shape=b.shape))
tensor_method("view_as", "reshape_as")(lambda a, b: reshape(a, shape=b.shape))
tensor_method("type_as")(lambda a, b: a.astype(b.dtype))
tensor_method("contiguous")(lambda a: a)
tensor_method("ravel")(lambda a: reshape(a, (-1,)))
tensor_method("numel")(lambda a: a.size)
tensor_method("dim")(lambda a: a.ndim)
tensor_method("swapaxes", "swapdims")(lambda a, first, second: transpose(a, (first, second)))
