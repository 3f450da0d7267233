"""Training steps of nets in which values say how many rows there are, `x[mask] = f(x[mask])` and what `nonzero` finds: a step
has all rows that there may be, those that are not counted being copies of one that is, and they go nowhere.

What reads such rows has to treat each by itself, as ops say (`Op.sources`) or is said here: sums and means leave out what
is not counted, and so does what is written. All else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from needle import ops
from needle.autograd import Op, Spec, Tensor, Unsupported
from needle.backend_ndarray import FLOATS
from needle.nn.functional import Guard
from needle.ops.linalg.basic import MatMul
from needle.ops.nn.class_loss import ClassLoss
from needle.ops.nn.embedding import Embedding
from needle.ops.nn.loss import Loss
from needle.ops.reduce.basic import Reduction
from needle.ops.reduce.softmax import RowOp
from needle.ops.reduce.sorting import ArgMax, ArgSort, CumSum, MaxAlong
from needle.ops.shape.basic import BroadcastTo, Padding, Reshape, View
from needle.ops.shape.counted import Bincount, MaskedRows, MaskedSelect, Nonzero
from needle.ops.shape.gather import Gather, IndexTensors, Take, TakeAlong, Wrapped
from needle.ops.shape.indexing import GetItem
from needle.ops.shape.join import Concat, Stack
from needle.ops.shape.runtime_shape import StopGradient

from .counted_rules import RULES, Alike, Beside, Count, Rows, ones_but
from .graph import Node
from .record import Recorder, Symbol
from .structure import map_structure


def of_no_use(self: Any, *_: Any) -> Any:
    raise Unsupported("[compile_step] how many rows values count is no number in a step; train it eagerly.")


def numbers_below(limit: int, numbers: Any, weights: Any = None) -> Any:
    """As bincount, of numbers below the limit, which the step checks: in a plan the result has one size."""
    dtype = "int64" if weights is None else "float32" if weights.dtype == "float32" else "float64"
    source = ops.full_like(numbers, 1, None, dtype) if weights is None else ops.cast(weights, dtype)
    held = ops.logical_and(ops.ge(numbers, 0), ops.lt(numbers, limit))
    Guard((1.0,), f"bincount: numbers from 0 to {limit - 1}")(ops.every(held))
    zeros = ops.full_like(numbers, 0, (limit,), dtype)
    return ops.scatter(zeros, 0, ops.cast(ops.clamp(numbers, 0, limit - 1), "int64"), source, "sum")


class RowCount(int):
    """The size of an axis of counted rows. Shapes may hold it; what is computed of it would be of all rows."""

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = of_no_use
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __float__ = of_no_use


class CountedRows:
    """What a recorder asks for every op while the forward of a step is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.known, self.counts = recorder, dict[Node, Rows](), dict[int, Count]()
        self.alike = Alike()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, rows are those of any array."""
        self.recorder.rows = None
        try:
            yield
        finally:
            self.recorder.rows = self

    def shape(self, symbol: Any) -> tuple[int, ...]:
        rows = self.known.get(symbol.node)
        shape = symbol.spec.shape
        return shape if rows is None else tuple(RowCount(s) if i == rows.axis else s for i, s in enumerate(shape))

    def end(self, value: Any) -> None:
        """The forward is recorded; raises where one of its results has as many rows as values say."""
        found: list[Any] = []
        map_structure(value, found.append)
        found += [v for _, v in self.recorder.writes.values()] + [v for _, v in self.recorder.effects]
        if any(isinstance(v, Symbol) and v.node in self.known for v in found):
            raise Unsupported("[compile_step] values say how many rows a result has; train it eagerly.")
        self.recorder.rows = None

    def record(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        """The result of an op that counts or reads counted rows; None for others."""
        symbols: list[Any] = [t if t.recorder is self.recorder else self.recorder.param(t) for t in inputs]
        rows = [self.known.get(s.node) for s in symbols]
        if op.counts:
            return self.counted(op, symbols, rows)
        if not self.known or not (any(rows) or has_count(op.attributes())):
            return None
        if has_count(op.attributes()):
            if not isinstance(op, Reshape | BroadcastTo) or not any(rows):
                of_no_use(op)
            op = type(op)(tuple(map(int, op.shape)))  # type: ignore[attr-defined, call-arg]
        counts = {id(r.of.valid.node): r.of for r in rows if r}
        if len(counts) > 1:
            self.refuse(op, "rows of one mask")
        count = next(iter(counts.values()))
        with self.away():
            rule = next((RULES[c] for c in type(op).__mro__ if c in RULES), None)
            made = rule(op, symbols, rows, count) if rule else NotImplemented
            if isinstance(made, Beside):
                self.known[made.value.node] = Rows(count, made.axis)
                return made.value
            if made is not NotImplemented:
                return made
            axis = self.along(op, symbols, rows)
            if axis is not None:
                takes = isinstance(op, Take | IndexTensors | Embedding)
                if takes:  # where none is counted their numbers may be any
                    own = [r and s.dtype not in FLOATS for s, r in zip(symbols, rows, strict=True)]
                    symbols = [ops.where(count.some, s, 0) if o else s for s, o in zip(symbols, own, strict=True)]
                made = self.recorder.record(op, symbols)
                made = ops.where(count.some, made, 1.0) if takes and made.dtype in FLOATS else made
                self.known[made.node] = Rows(count, axis, column_of(op, rows[0]))
                return made
        if op.n_out == 1 and type(op).decompose is not Op.decompose:
            return op.decompose(*symbols)
        self.refuse(op, "each row by itself")

    def refuse(self, op: Op, wanted: str) -> Any:
        raise Unsupported(f"[compile_step] {op.label} expects {wanted}, got rows that values count; train it eagerly.")

    def counted(self, op: Op, symbols: list[Any], rows: list[Rows | None]) -> Any:
        if isinstance(op, Bincount) and op.minlength and not any(rows):
            with self.away():
                return numbers_below(op.minlength, *symbols)
        if any(rows) or not isinstance(op, Nonzero | MaskedRows | MaskedSelect):
            raise Unsupported(f"[compile_step] values say how large the result of {op.label} is; train it eagerly.")
        if isinstance(op, MaskedSelect):
            return op.decompose(*symbols)
        op.infer(*(s.spec for s in symbols))
        with self.away():
            mask = symbols[-1]
            count = self.count_of(mask if mask.dtype == "bool" else ops.ne(mask, 0))
            if isinstance(op, Nonzero):
                places = np.argwhere(np.ones(mask.shape, bool)).astype("int64").reshape(-1, len(mask.shape))
                made = ops.take(Tensor(places, requires_grad=False), count.safe)
            else:
                x = symbols[0]
                made = ops.take(ops.reshape(x, (math.prod(mask.shape), *x.shape[len(mask.shape) :])), count.safe)
                made = ops.where(count.some, made, 1.0) if made.dtype in FLOATS else made
        self.known[made.node] = Rows(count, 0)
        return made

    def count_of(self, mask: Any) -> Count:
        key = self.alike(mask.node)
        if key not in self.counts:
            number = math.prod(mask.shape)
            if not number:
                raise Unsupported("[compile_step] a mask without elements counts nothing; train it eagerly.")
            valid = ops.reshape(mask, (number,))
            places = Tensor(np.arange(number), dtype="int64", requires_grad=False)
            first = ops.argmax(valid.astype("int32"), 0)
            self.counts[key] = Count(self.alike, mask, valid, ops.some(valid), ops.where(valid, places, first))
        return self.counts[key]

    def along(self, op: Op, symbols: list[Any], rows: list[Rows | None]) -> int | None:
        """The axis of counted rows in the result of an op that treats each of them by itself."""
        specs = [s.spec for s in symbols]
        out = op.infer(*specs)
        if op.n_out > 1 or out is None:
            return None
        place = next((PLACES[c] for c in type(op).__mro__ if c in PLACES), None)
        if place is not None:
            return place(op, out, specs, [r and r.axis for r in rows])
        for axis in range(len(out.shape)):
            found = op.sources(axis, out, *specs)
            if found is not None and all(
                at == r.axis if r else at is None or x.shape[at] == 1
                for at, r, x in zip(found, rows, specs, strict=True)
            ):
                return axis
        return None


def has_count(value: Any) -> bool:
    if isinstance(value, dict | tuple | list):
        return any(map(has_count, value.values() if isinstance(value, dict) else value))
    return isinstance(value, RowCount)


def column_of(op: Op, rows: Rows | None) -> int | None:
    """Which column of nonzero's result an op takes."""
    index = op.index if isinstance(op, GetItem) else ()
    return index[1] if rows and len(index) == 2 and isinstance(index[1], int) else None


# -- where rows are in a result ------------------------------------------------------------------------------------------
# (op, its Spec, its inputs' Specs, their axes of rows or None) -> the result's axis, None where rows depend on others

Axes = list[int | None]


def in_view(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    """Of an op that only moves elements: where the numbers of rows are afterwards."""
    axis, shape = axes[0], specs[0].shape
    if len(specs) > 1 or axis is None:
        return None
    if isinstance(op, Reshape):  # whose numbers would be copied
        return next(
            (
                k
                for k, s in enumerate(out.shape)
                if (math.prod(out.shape[:k]), s) == (math.prod(shape[:axis]), shape[axis])
            ),
            None,
        )
    numbers = ones_but(np.arange(shape[axis]), axis, len(shape))
    moved = op.reference(np.broadcast_to(numbers, shape))
    for k, size in enumerate(moved.shape):
        if size == shape[axis] and 0 not in moved.shape:
            first = moved[tuple(slice(None) if i == k else slice(1) for i in range(moved.ndim))]
            if (first.ravel() == np.arange(size)).all() and (moved == first).all():
                return k
    return None


def beside(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    """Of an op along its own axis: rows on another one, which all inputs have."""
    shape = specs[0].shape
    alike = len(set(axes)) == 1 and axes[0] is not None and axes[0] != op.axis % max(len(shape), 1)
    return axes[0] if alike else None


def reduced(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    gone, keep = op._arguments(specs[0])
    axis: Any = axes[0]
    return None if axis in gone else axis if keep else axis - sum(g < axis for g in gone)


def stacked(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    axis: Any = axes[0]
    return axis + (axis >= op.axis % len(out.shape)) if len(set(axes)) == 1 else None


def in_product(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    """Rows of the first operand, or of both where they are batches."""
    (a, b), (i, j) = specs, axes
    if len(a.shape) < 2 or len(b.shape) < 2:
        return (0 if i == 0 and j is None and len(a.shape) == 2 else None) if len(b.shape) == 1 else None
    from_end = [None if k is None else k - len(x.shape) for k, x in zip(axes, specs, strict=True)]
    at = from_end[0] if from_end[0] is not None else from_end[1]
    if at == -2 and j is None:
        return len(out.shape) - 2
    if at is None or at > -3 or at < -len(out.shape):
        return None
    fits = all(k == at or len(x.shape) < -at or x.shape[at] == 1 for k, x in zip(from_end, specs, strict=True))
    return len(out.shape) + at if fits else None


def taken(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    """Slices of a table: by counted numbers, or of counted rows."""
    x, axis = specs[0].shape, op.axis % max(len(specs[0].shape), 1)
    if axes[0] is None:
        return axis + axes[1] if axes[1] is not None else None
    if axes[1] is not None or axes[0] == axis or not x:
        return None
    return axes[0] if axes[0] < axis else axes[0] + len(specs[1].shape) - 1


def indexed(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    axis = op.axis % len(specs[0].shape)
    alike = all(len(s.shape) == 1 and at == 0 for s, at in zip(specs[1:], axes[1:], strict=True))
    return axis if alike and axes[0] is None else None


def padded(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    axis: Any = axes[0]
    return axis if tuple(op.all_pads(specs[0])[axis]) == (0, 0) else None


def embedded(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    return axes[0] if axes[1] is None else None


def elementwise(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    """Of operands that broadcast: those without rows are the same for all."""
    places = {at + len(out.shape) - len(s.shape) for s, at in zip(specs, axes, strict=True) if at is not None}
    place = places.pop()
    if places:
        return None
    others = [s.shape for s, at in zip(specs, axes, strict=True) if at is None]
    return place if all(len(s) < len(out.shape) - place or s[place - len(out.shape)] == 1 for s in others) else None


def classes(op: Any, out: Spec, specs: list[Spec], axes: Axes) -> int | None:
    """Losses of each row, not reduced, of x (N, C, *) and labels (N, *)."""
    return 0 if out.shape and axes[:2] == [0, 0] and set(axes[2:]) <= {None} and len(specs[0].shape) > 1 else None


PLACES: dict[type, Callable[[Any, Spec, list[Spec], Axes], int | None]] = {
    View: in_view,
    StopGradient: in_view,
    Reduction: reduced,
    Stack: stacked,
    MatMul: in_product,
    Take: taken,
    IndexTensors: indexed,
    Embedding: embedded,
    Loss: elementwise,
    Wrapped: elementwise,
    Padding: padded,
    **dict.fromkeys((RowOp, ArgMax, ArgSort, CumSum, MaxAlong, Concat, Gather, TakeAlong), beside),
    ClassLoss: classes,
}
