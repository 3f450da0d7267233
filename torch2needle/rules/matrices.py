"""Rules of matrices: diagonals, products of several, small vectors, joining and cutting by named axes."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from needle import ops
from needle.autograd import Unsupported
from needle.ops.linalg.basic import product

from .indexing import setitem
from .linalg import PLU
from .registry import rule
from .shapes import at, tensor_split
from .tables import functions

T = torch.Tensor
L = torch.linalg


# -- products ------------------------------------------------------------------------------------------------------------


def cross_product(input: Any, other: Any, dim: int) -> Any:
    a, b = ([ops.getitem(t, at(dim, slice(i, i + 1))) for i in range(3)] for t in (input, other))
    return ops.concat([a[i - 2] * b[i - 1] - a[i - 1] * b[i - 2] for i in range(3)], dim)


functions("input, other, *, dim=-1", {(L.cross,): cross_product})


@rule(torch.cross, T.cross)
def cross(input: Any, other: Any, dim: int | None = None) -> Any:
    if dim is None:  # the first axis of size 3
        dim = input.spec.shape.index(3) if input.ndim else 0
    return cross_product(input, other, dim)


@rule(L.vecdot)
def vecdot(x: Any, y: Any, *, dim: int = -1) -> Any:
    return ops.summation(x * y, dim)


@rule(torch.addr, T.addr, T.addr_)
def addr(input: Any, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = ops.unsqueeze(vec1, 1) * vec2
    product = product if alpha == 1 else product * alpha
    if not beta:
        return product
    return (input if beta == 1 else input * beta) + product


functions("input, tensor", {(torch.vdot, T.vdot): ops.matmul})
functions("input", {(torch.trace, T.trace): lambda x: ops.summation(ops.diagonal(x))})
functions("tensors", {(L.multi_dot,): lambda tensors: functools.reduce(product, tensors)})


@rule(torch.chain_matmul)
def chain_matmul(*matrices: Any, out: Any = None) -> Any:
    return functools.reduce(product, matrices[0] if isinstance(matrices[0], tuple | list) else matrices)


@rule(torch.lu_unpack)
def lu_unpack(LU_data: Any, LU_pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """What is not unpacked is empty."""
    none = ops.full_like(LU_data, 0, (0,))
    order = ops.pivot_order(LU_pivots, LU_data.shape[-2])
    data = ops.lu_parts(LU_data) if unpack_data else (none, none)
    return PLU(ops.permutation(order, LU_data) if unpack_pivots else none, data[0], data[1])


@rule(torch.ops.aten.tensordot.default)
def aten_tensordot(input: Any, other: Any, dims_self: Any, dims_other: Any) -> Any:
    return tensordot(input, other, (dims_self, dims_other))


@rule(torch.tensordot)
def tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Any:
    left, right = a.ndim, b.ndim
    if isinstance(dims, int):
        dims = (range(left - dims, left), range(dims))
    first, second = ([d % n for d in given] for given, n in zip(dims, (left, right), strict=True))
    names = [chr(97 + i) for i in range(left + right)]
    of_a, of_b = names[:left], names[left:]
    for i, k in zip(first, second, strict=True):
        of_b[k] = of_a[i]
    kept = [n for i, n in enumerate(of_a) if i not in first] + [n for k, n in enumerate(of_b) if k not in second]
    return ops.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept)}", a, b)


@rule(torch.kron, T.kron)
def kron(input: Any, other: Any) -> Any:
    rank = max(input.ndim, other.ndim)
    shapes = [(1,) * (rank - t.ndim) + tuple(t.shape) for t in (input, other)]
    a = ops.reshape(input, tuple(n for s in shapes[0] for n in (s, 1)))
    b = ops.reshape(other, tuple(n for s in shapes[1] for n in (1, s)))
    return ops.reshape(a * b, tuple(x * y for x, y in zip(*shapes, strict=True)))


# -- diagonals -----------------------------------------------------------------------------------------------------------


def off_diagonal(size: Any, offset: int, like: Any) -> Any:
    """A bool matrix of that size, which may be free, that holds but for a diagonal."""
    places = ops.arange_like(like, 0, size)
    return ops.ne(ops.unsqueeze(places, 1) + offset, places)


@rule(torch.diagonal_scatter, T.diagonal_scatter)
def diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    step = ops.arange_like(input, 0, src.shape[-1])
    place = (step + max(-offset, 0), step + max(offset, 0))
    if (dim1, dim2) == (0, 1):  # of any rank
        return setitem(input, place, ops.moveaxis(src, -1, 0))
    if (dim1, dim2) == (-2, -1):
        return setitem(input, (Ellipsis, *place), src)
    rank = input.ndim
    last = [d % rank for d in (dim1, dim2)]
    order = [d for d in range(rank) if d not in last] + last
    moved = setitem(ops.permute(input, tuple(order)), (Ellipsis, *place), src)
    return ops.permute(moved, tuple(map(order.index, range(rank))))


functions(
    "input, offset=0, dim1=0, dim2=1", {(torch.diagonal, T.diagonal): ops.diagonal}, view="always", put=diagonal_scatter
)


@rule(torch.linalg.diagonal, view="always", put=lambda base, value, **where: diagonal_scatter(base, value, **where))
def diagonal(A: Any, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return ops.diagonal(A, offset, dim1, dim2)


@rule(torch.diag_embed, T.diag_embed)
def diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    rank, size = input.ndim + 1, input.shape[-1] + abs(offset)
    wide = ops.unsqueeze(ops.pad(input, (max(offset, 0), max(-offset, 0))), -2)  # its columns
    wide = ops.masked_fill(wide, off_diagonal(size, offset, input), 0)
    first, second = dim1 % rank, dim2 % rank
    if first > second:
        wide, first, second = ops.transpose(wide), second, first
    return wide if (first, second) == (rank - 2, rank - 1) else ops.moveaxis(wide, (-2, -1), (first, second))


@rule(torch.diag, T.diag)
def diag(input: Any, diagonal: int = 0) -> Any:
    return diag_embed(input, diagonal) if input.ndim == 1 else ops.diagonal(input, diagonal)


@rule(torch.diagflat, T.diagflat)
def diagflat(input: Any, offset: int = 0) -> Any:
    return diag_embed(ops.flatten(input), offset)


@rule(T.fill_diagonal_)
def fill_diagonal(input: Any, fill_value: Any, wrap: bool = False) -> Any:
    if input.ndim != 2 or wrap:
        raise Unsupported("fill_diagonal_ expects a matrix, without wrap")
    rows, columns = input.shape
    row, column = (ops.arange_like(input, 0, n) for n in (rows, columns))
    return ops.masked_fill(input, ops.eq(ops.unsqueeze(row, 1), column), fill_value)


@rule(torch.block_diag)
def block_diag(*tensors: Any) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], list | tuple):  # aten's
        (tensors,) = tensors
    shapes = [(1, *t.shape)[-2:] for t in tensors if t.ndim in (1, 2)]
    if len(shapes) < len(tensors):
        raise Unsupported("block_diag expects vectors and matrices")
    rows, height, width = [], sum(s[0] for s in shapes), sum(s[1] for s in shapes)
    top = left = 0
    for t, (h, w) in zip(tensors, shapes, strict=True):
        rows.append(ops.pad(ops.reshape(t, (h, w)), (left, width - left - w, top, height - top - h)))
        top, left = top + h, left + w
    return functools.reduce(operator.add, rows)


# -- joining and cutting -------------------------------------------------------------------------------------------------


def at_least(count: int, t: Any) -> Any:
    """torch.atleast_3d puts its axes around the others."""
    rank = t.ndim
    if count == 3:
        places = {0: (0, 0, 0), 1: (0, -1), 2: (-1,)}.get(rank, ())
        return functools.reduce(ops.unsqueeze, places, t)
    return functools.reduce(ops.unsqueeze, (0,) * max(0, count - rank), t)


def each(count: int) -> Any:
    def convert(*tensors: Any) -> Any:
        given = tensors[0] if isinstance(tensors[0], tuple | list) else tensors
        made = tuple(at_least(count, t) for t in given)
        return made if len(made) > 1 or isinstance(tensors[0], tuple | list) else made[0]

    return convert


for _count, _f in ((1, torch.atleast_1d), (2, torch.atleast_2d), (3, torch.atleast_3d)):
    rule(_f, view="maybe")(each(_count))


@rule(torch.column_stack)
def column_stack(tensors: Any) -> Any:
    columns = [ops.reshape(t, (-1, 1)) if t.ndim < 2 else t for t in tensors]
    return ops.concat(columns, 1)


functions("tensors", {(torch.dstack,): lambda tensors: ops.concat([at_least(3, t) for t in tensors], 2)})


def cut(axis: Any) -> Any:
    def convert(input: Any, indices_or_sections: Any) -> Any:
        dim = (0 if input.ndim == 1 else 1) if axis is None else axis
        return tensor_split(input, indices_or_sections, dim)

    return convert


functions(
    "input, indices_or_sections",
    {(torch.hsplit, T.hsplit): cut(None), (torch.vsplit, T.vsplit): cut(0), (torch.dsplit, T.dsplit): cut(2)},
    view="always",
)


@rule(torch.rot90, T.rot90)
def rot90(input: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    first, second = dims
    if k % 4 == 2:
        return ops.flip(input, (first, second))
    if k % 2 == 0:
        return input
    turned = ops.transpose(input, (first, second))
    return ops.flip(turned, first if k % 4 == 1 else second)


@rule(torch.select_scatter, T.select_scatter)
def select_scatter(input: Any, src: Any, dim: int, index: Any) -> Any:
    return ops.setitem(input, at(dim, index), src)


functions(
    "input",
    {(torch.adjoint, T.adjoint): ops.transpose},
    view="always",
    put=lambda base, value: ops.transpose(value),
)
