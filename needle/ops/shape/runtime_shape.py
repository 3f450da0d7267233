"""Rearrangements that need the real shape: each runs as views and copies of other ops, so that models keep sizes free."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS, NDArray
from needle.backend_ndarray.ndarray import resolve_shape
from needle.ops.common import as_axes, check_axis, constant
from needle.ops.dtypes import kind, result_dtype
from needle.ops.families import named, no_gradient, op_class, samples_of, unary
from needle.ops.math.elementwise import cast, where
from needle.ops.reduce.basic import Summation, summation
from needle.ops.shape.basic import Pad, broadcast_to, flatten, permute, reshape, unsqueeze
from needle.ops.shape.creation import triangle_mask_like
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import along, concat

__all__ = [
    "broadcast_like",
    "cast_like",
    "diagonal",
    "moveaxis",
    "repeat_interleave",
    "reshape_like",
    "roll",
    "scaled",
    "stop_gradient",
    "stored_like",
    "straight_through",
    "tile",
    "triangle",
    "unflatten",
]

MAX_RANK = 8  # axes of an array, kMaxRank of csrc/core/call.h


@op
class Unflatten(Op):
    """One axis as several of the given sizes, of which one may be -1."""

    axis: int
    sizes: tuple

    def infer(self, x: Any) -> Any:
        axis = check_axis("unflatten", self.axis, x.shape)
        sizes = resolve_shape(self.sizes, (x.shape[axis],))
        return Spec((*x.shape[:axis], *sizes, *x.shape[axis + 1 :]), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        return reshape(x, self.infer(x).shape)

    samples = samples_of(({"axis": -2, "sizes": (2, -1)}, [(3, 6, 4)]))


@tensor_method()
def unflatten(a: Tensor, axis: int, sizes: Any) -> Tensor:
    """One axis as several of the given `sizes`, of which one may be -1: (2, 6) with axis 1 and (3, -1) is (2, 3, 2). As
    torch.unflatten.
    """
    return Unflatten(axis, tuple(sizes))(a)


@op
class MoveAxis(Op):
    """Axes `source` moved to the places `target`; the others keep their order."""

    source: Any
    target: Any

    def _order(self, x: Any) -> tuple[int, ...]:
        pairs = [(v,) if isinstance(v, int) else v for v in (self.source, self.target)]
        source, target = ([check_axis("moveaxis", a, x.shape) for a in p] for p in pairs)
        rest = iter([i for i in range(len(x.shape)) if i not in source])
        place = dict(zip(target, source, strict=True))
        return tuple(place[i] if i in place else next(rest) for i in range(len(x.shape)))

    def infer(self, x: Any) -> Any:
        return Spec(tuple(x.shape[i] for i in self._order(x)), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        return permute(x, self._order(x))

    samples = samples_of(
        ({"source": 1, "target": -1}, [(2, 3, 4)]), ({"source": (0, -1), "target": (1, 0)}, [(2, 3, 4)])
    )


@tensor_method("moveaxis", "movedim")
def moveaxis(a: Tensor, source: Any, target: Any) -> Tensor:
    """Axes `source`, one or several, at the places `target`; the others keep their order. As torch.moveaxis."""
    return MoveAxis(as_axes(source), as_axes(target))(a)


@op
class SummedOut(Op):
    """Sums over axes; those of size 1 are dropped, which keeps the dtype of integers and bools, as in torch.einsum."""

    axes: tuple

    def _summed(self, x: Any) -> tuple[int, ...]:
        return tuple(a for a in self.axes if x.shape[a] != 1)

    def infer(self, x: Any) -> Any:
        shape = tuple(n for a, n in enumerate(x.shape) if a not in self.axes)
        summed = self._summed(x)
        return Spec(shape, Summation(summed).infer(x).dtype if summed else str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        summed = self._summed(x)
        return reshape(summation(x, summed) if summed else x, self.infer(x).shape)

    samples = samples_of(*(({"axes": a}, [(3, 1, 4)]) for a in ((1,), (0, 1))))


def summed_out(a: Tensor, axes: tuple) -> Tensor:
    return SummedOut(axes)(a)


@op
class Tile(Op):
    """x repeated `times` along each of its last axes; more numbers than axes add axes in front."""

    times: tuple

    def infer(self, x: Any) -> Any:
        rank = max(len(x.shape), len(self.times))
        shape = (1,) * (rank - len(x.shape)) + tuple(x.shape)
        times = (1,) * (rank - len(self.times)) + tuple(self.times)
        return Spec(tuple(int(s * t) for s, t in zip(shape, times, strict=True)), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        out = self.infer(x).shape
        shape = (1,) * (len(out) - len(x.shape)) + tuple(x.shape)
        times = (1,) * (len(out) - len(self.times)) + tuple(int(t) for t in self.times)
        grows = [a for a, t in enumerate(times) if t != 1]
        room = max(1, MAX_RANK - len(out))  # for axes of their own, which as many repeats take at a time
        for first in range(0, len(grows), room):
            some = grows[first : first + room]
            x = reshape(x, [n for a, s in enumerate(shape) for n in ((1, s) if a in some else (s,))])
            x = broadcast_to(x, [n for a, s in enumerate(shape) for n in ((times[a], s) if a in some else (s,))])
            shape = tuple(s * times[a] if a in some else s for a, s in enumerate(shape))
            x = reshape(x, shape)
        return reshape(x, out)

    samples = samples_of(
        ({"times": (2, 1, 3)}, [(3, 4)]),
        ({"times": (2,)}, [(2, 3)]),
        ({"times": (1, 0, 1, 1, 2)}, [(2, 1, 2, 1, 3)]),
        ({"times": (2, 1, 2, 2, 2)}, [(2, 1, 3, 2, 2)]),
    )


@tensor_method("tile", "repeat")
def tile(a: Tensor, times: Any) -> Tensor:
    """numpy.tile; torch's repeat where `times` has a number for every axis."""
    return Tile(tuple(times))(a)


@op
class RepeatInterleave(Op):
    """Every element `times` times in a row along an axis."""

    times: Any
    axis: int

    def infer(self, x: Any) -> Any:
        axis = check_axis("repeat_interleave", self.axis, x.shape)
        return Spec((*x.shape[:axis], x.shape[axis] * self.times, *x.shape[axis + 1 :]), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        out = self.infer(x).shape
        axis = self.axis % len(x.shape)
        apart = unsqueeze(x, axis + 1)
        shape = (*x.shape[: axis + 1], self.times, *x.shape[axis + 1 :])
        return reshape(broadcast_to(apart, shape), out)

    samples = samples_of(*(({"times": 3, "axis": a}, [(2, 3, 4)]) for a in (1, -1)))


@tensor_method()
def repeat_interleave(a: Tensor, times: Any, axis: int | None = None) -> Tensor:
    """Every element `times` times in a row along `axis`, whose size grows by as much; None: of all elements, flat. As
    torch.repeat_interleave with one number.
    """
    return RepeatInterleave(times, 0)(flatten(a)) if axis is None else RepeatInterleave(times, axis)(a)


@op
class Roll(Op):
    """Axes turned by `shifts`: what leaves at the end enters at the front."""

    shifts: tuple
    axes: tuple

    def infer(self, x: Any) -> Any:
        for a in self.axes:
            check_axis("roll", a, x.shape)
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        for shift, axis in zip(self.shifts, self.axes, strict=True):
            size = x.shape[axis]
            cut = size - int(shift) % size if size else 0
            if cut != size and size:
                parts = [slice(cut, size), slice(0, cut)]
                x = concat([getitem(x, along(axis, len(x.shape), p)) for p in parts], axis)
        return x

    samples = samples_of(({"shifts": (2, -1), "axes": (0, -1)}, [(5, 4)]), ({"shifts": (7,), "axes": (1,)}, [(2, 3)]))


@tensor_method()
def roll(a: Tensor, shifts: Any, axes: Any = None) -> Tensor:
    """torch.roll; without axes the elements of all of a."""
    shifts = as_axes(shifts)
    if axes is None:
        return reshape_like(Roll((shifts,) if not isinstance(shifts, tuple) else shifts, (0,))(flatten(a)), a)
    both = [v if isinstance(v, tuple) else (v,) for v in (shifts, as_axes(axes))]
    return Roll(*both)(a)


class Like(Op):
    """Of x and a second tensor, of which only the shape or the dtype counts."""

    mixes_floats = True


def like(words: str, name: str, doc: str, infer: Any, run: Any, shapes: list) -> Any:
    """The op `words`, from its `infer`, which also checks, and its decomposition run(x, like), and its function."""

    def decompose(self: Op, x: Tensor, like: Tensor) -> Tensor:
        self.infer(x, like)
        return run(x, like)

    facts = {"infer": infer, "decompose": decompose, "samples": samples_of(({}, shapes))}
    made = op_class(__name__, words, Like, f"{doc}.", **facts)

    def function(a: Tensor, like: Tensor) -> Tensor:
        return made()(a, like)

    return made, named(function, name, made.__doc__)


BroadcastLike, broadcast_like = like(
    "BroadcastLike",
    "broadcast_like",
    "x stretched to the shape of a second tensor, whose values play no part",
    lambda self, x, like: Spec(tuple(like.shape), str(x.dtype)),
    lambda x, like: x.broadcast_to(tuple(like.shape)),
    [(3, 1), (2, 3, 4)],
)
ReshapeLike, reshape_like = like(
    "ReshapeLike",
    "reshape_like",
    "x in the shape of a second tensor, whose values play no part",
    lambda self, x, like: Spec(resolve_shape(tuple(like.shape), tuple(x.shape)), str(x.dtype)),
    lambda x, like: x.reshape(tuple(like.shape)),
    [(3, 4), (2, 6)],
)


def cast_as(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dtype == like.dtype else cast(x, like.dtype)


CastLike, cast_like = like(
    "CastLike",
    "cast_like",
    "x in the dtype of a second tensor, whose values play no part",
    lambda self, x, like: Spec(tuple(x.shape), str(like.dtype)),
    cast_as,
    [(3, 4), Spec((2,), "int64")],
)


def stored(self: Op, x: Any, like: Any) -> Any:
    if kind(str(x.dtype)) > kind(str(like.dtype)):
        raise ValueError(f"[write] expects a result that a tensor of {like.dtype} can hold, got {x.dtype}.")
    return Spec(tuple(x.shape), str(like.dtype))


StoredLike, stored_like = like(
    "StoredLike",
    "stored_like",
    "x as a write into a second tensor leaves it: in its dtype, which must not be of a lower kind",
    stored,
    cast_as,
    [(3, 4), Spec((2,), "float64")],
)


@op
class Scaled(Op):
    """x times a number, both in the dtype of an operation on x and the other tensors, whose values play no part."""

    number: Any
    mixes_floats = True

    def infer(self, x: Any, *others: Any) -> Any:
        return Spec(tuple(x.shape), result_dtype(x, *others))

    def decompose(self, x: Tensor, *others: Tensor) -> Tensor:
        dtype = self.infer(x, *others).dtype
        x = x if x.dtype == dtype else cast(x, dtype)
        number = self.number if dtype in FLOATS else bool(self.number) if dtype == "bool" else int(self.number)
        return x if number == 1 else x * number

    samples = samples_of(({"number": 1.5}, [(3, 4), Spec((2,), "float64")]), ({"number": -2}, [(3, 4)]))


def scaled(a: Tensor, number: Any, *others: Tensor) -> Tensor:
    """a times `number` as torch scales by alpha, beta and value: in the result's dtype, for integers by the whole part."""
    return Scaled(number)(a, *others)


@op
class Triangle(Op):
    """The last two axes with zeros above (upper False) or below the diagonal of a number."""

    upper: bool
    diagonal: Any = 0

    def infer(self, x: Any) -> Any:
        if len(x.shape) < 2:
            raise ValueError(f"[triangle] expects at least two axes, got shape {tuple(x.shape)}.")
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        rows, columns = self.infer(x).shape[-2:]
        return where(triangle_mask_like(x, rows, columns, self.upper, self.diagonal), x, constant(0, x))

    samples = samples_of(*(({"upper": u, "diagonal": d}, [(2, 4, 5)]) for u, d in ((False, 0), (True, 1), (False, -1))))


def triangle(a: Tensor, upper: bool, diagonal: Any = 0) -> Tensor:
    """torch.triu (upper) and torch.tril."""
    return Triangle(upper, diagonal)(a)


@op
class Diagonal(Op):
    """The diagonal number `offset` of the last two axes, as the last axis."""

    offset: int = 0
    is_view = True

    def infer(self, x: Any) -> Any:
        rows, columns = x.shape[-2:]
        n = min(rows - max(0, -self.offset), columns - max(0, self.offset))
        return Spec((*x.shape[:-2], max(0, n)), str(x.dtype))

    def compute(self, x: NDArray) -> Any:
        start = x[..., max(0, -self.offset) :, max(0, self.offset) :]
        return start.strided(self.infer(x).shape, (*start.strides[:-2], start.strides[-2] + start.strides[-1]))

    def reference(self, x: np.ndarray) -> Any:
        return np.diagonal(x, self.offset, -2, -1)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        rows, columns = x.shape[-2:]
        full = [(0, 0)] * (len(x.shape) - 2)
        mask = np.eye(rows, columns, self.offset, dtype=bool)
        before, after = max(0, -self.offset), rows - max(0, -self.offset) - out_grad.shape[-1]
        column = unsqueeze(Pad((*full[1:], (before, after)))(out_grad), -1)
        return where(constant(mask, x, "bool"), broadcast_to(column, x.shape), constant(0, x))

    samples = samples_of(*(({"offset": o}, [(2, 4, 5)]) for o in (0, 1, -2)))


@tensor_method()
def diagonal(a: Tensor, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """torch.diagonal."""
    if (axis1, axis2) != (-2, -1):
        a = moveaxis(a, (axis1, axis2), (-2, -1))
    return Diagonal(offset)(a)


@op
class StopGradient(Op):
    """x as a constant: the gradient ends here."""

    is_view = True
    gradient = no_gradient

    def infer(self, x: Any) -> Any:
        return Spec(tuple(x.shape), str(x.dtype))

    def compute(self, *arrays: Any) -> Any:
        return arrays[0]

    reference = compute

    def __call__(self, *inputs: Tensor) -> Any:
        out = Op.__call__(self, *inputs)
        if out.recorder is None:
            return out.detach()
        out.op, out.inputs, out.requires_grad = None, (), False
        return out

    samples = samples_of(({}, [(4, 3)]))


stop_gradient = unary(StopGradient, "stop_gradient")


@op
class StraightThrough(Op):
    """The first input as it is; its gradient goes to the second, of the same shape, unchanged."""

    is_view = like_first = True

    def infer(self, value: Any, x: Any) -> Any:
        if tuple(value.shape) != tuple(x.shape) or value.dtype != x.dtype:
            raise ValueError(
                f"[{self.label}] x expects {value.dtype} {tuple(value.shape)}, got {x.dtype} {tuple(x.shape)}."
            )
        return Spec(tuple(value.shape), str(value.dtype))

    def compute(self, *arrays: Any) -> Any:
        return arrays[0]

    reference = compute

    def aliases(self, out: Any, *inputs: Any) -> bool:
        return True

    def decompose(self, value: Tensor, x: Tensor) -> Tensor:
        return stop_gradient(value)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return None, out_grad

    samples = samples_of(({}, [(4, 3), (4, 3)]))


def straight_through(value: Tensor, x: Tensor) -> Tensor:
    """`value`, whose gradients go to `x` as though it were that (Bengio et al., arXiv 1308.3432), where x is infinite, too."""
    return StraightThrough()(value, x)
