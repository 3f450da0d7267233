"""A plan is checked before it runs: every step reads what earlier steps wrote, and nothing is overwritten that is still read.

What steps touch is compared exactly, in the largest unit of bytes that fits all views of a buffer; beyond MAX_UNITS by
intervals.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from needle.backend_ndarray import sizes
from needle.backend_ndarray.ndarray import NDArray, itemsize
from needle.backend_ndarray.sizes import cached

from .step import NO_HALO, ZERO_HALO, Halo, Step

MAX_UNITS = 1 << 20  # of a buffer whose bytes are told apart one by one


class PlanError(RuntimeError):
    """A plan that would compute something else than its graph: a defect of the planner, not of the model."""


class Region(NamedTuple):
    """Bytes of a buffer from `start` to `stop`: `run` of them, repeated by `axes` of (count, stride), which grow outwards."""

    start: int
    stop: int
    run: int
    axes: tuple[tuple[int, int], ...] = ()

    @property
    def reach(self) -> int:
        """From the first to the last byte of one turn of the outermost axis."""
        count, stride = self.axes[-1] if self.axes else (1, 0)
        return self.stop - self.start - (count - 1) * stride


class Value(NamedTuple):
    """What a step leaves for later ones."""

    array: NDArray
    born: int  # the step after which it is there, -1 for inputs
    read: int  # the first step of a later op that reads it


@cached(maxsize=4096)
def bytes_of(
    start: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, halo: Halo = NO_HALO
) -> Region | None:
    """The bytes of a view of elements of `size`, with a ring around a blocked image; None where there are none."""
    if halo != NO_HALO:
        top, left, bottom, right = halo
        n, blocks, h, w, block = shape
        shape = (n, blocks, h + top + bottom, w + left + right, block)
        start -= top * strides[2] + left * strides[3]
    if 0 in shape:
        return None
    run = 1
    axes: list[tuple[int, int]] = []
    for stride, n in sorted((abs(s), n) for n, s in zip(shape, strides, strict=True) if s and n != 1):
        if not axes and stride == run:
            run *= n
        elif axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0] * n, axes[-1][1])
        else:
            axes.append((n, stride))
    start += sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    stop = start + run + sum((n - 1) * s for n, s in axes)
    return Region(start * size, stop * size, run * size, tuple((n, s * size) for n, s in axes))


def whole(nbytes: int) -> Region:
    return Region(0, nbytes, nbytes)


def region(array: NDArray, halo: Halo = NO_HALO) -> Region | None:
    find = bytes_of if sizes.TRACES else bytes_of.known  # type: ignore[attr-defined]
    return find(array._offset, array._shape, array._strides, itemsize(array._dtype), halo)


def ring(image: NDArray, halo: dict[str, float]) -> list[Region | None]:
    """What `zero_halo` writes: rows above and below, columns at the sides."""
    top, bottom, left, right = (int(halo[side]) for side in ("top", "bottom", "left", "right"))
    n, blocks, h, w, block = image.shape
    _, _, row, pixel, _ = image.strides
    width = left + w + right
    parts = ((-top, top, -left, width), (h, bottom, -left, width), (0, h, -left, left), (0, h, w, right))
    return [
        bytes_of(image._offset + y * row + x * pixel, (n, blocks, rows, columns, block), image.strides, 4)
        for y, rows, x, columns in parts
    ]


def written(step: Step) -> Iterable[tuple[Any, Region]]:
    """(buffer, bytes) that a step writes."""
    for a in step.outs:
        if not (a._handle.is_made or a._handle.is_state):
            raise PlanError(f"[plan] {step.kernel} of {step.label} writes to an input or a constant.")
        for part in ring(a, step.attrs) if step.kernel == ZERO_HALO else [region(a)]:
            if part is not None:
                yield a._handle, part


def read(step: Step) -> Iterable[tuple[Any, Region]]:
    """(buffer, bytes) that a step reads of what steps have written."""
    for name, a in step.inputs.items():
        if a._handle.is_made:
            part = region(a, step.halos.get(name, NO_HALO))
            if part is not None:
                yield a._handle, part


class Memory:
    """What has been written to one buffer so far."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.unit = nbytes, nbytes
        self.parts: dict[Region, None] = {}
        self.mask: np.ndarray | None = None
        self.painted = 0

    def meet(self, part: Region) -> None:
        """Choose a unit in which this region is whole numbers."""
        unit = math.gcd(self.unit, part.start, part.run, *(stride for _, stride in part.axes))
        if unit != self.unit:
            self.unit, self.mask, self.painted = unit, None, 0

    def within(self, mask: np.ndarray, part: Region) -> np.ndarray:
        """The units of a region, as a view of a mask of the buffer."""
        shape, strides = [n for n, _ in part.axes], [stride // self.unit for _, stride in part.axes]
        return np.lib.stride_tricks.as_strided(
            mask[part.start // self.unit :], (*shape, part.run // self.unit), (*strides, 1)
        )

    def blank(self) -> np.ndarray | None:
        """No unit marked; None where there are too many."""
        units = self.nbytes // self.unit
        return np.zeros(units, bool) if units <= MAX_UNITS else None

    def holds(self, part: Region) -> bool:
        """Whether every byte of a region has been written."""
        if part in self.parts or whole(self.nbytes) in self.parts:
            return True
        if self.mask is None:
            self.mask = self.blank()
        if self.mask is None:
            return self._reaches(part)
        for made in list(self.parts)[self.painted :]:
            self.within(self.mask, made)[...] = True
        self.painted = len(self.parts)
        return bool(self.within(self.mask, part).all())

    def _reaches(self, part: Region) -> bool:
        """`holds` by intervals: whether the written ones leave no gap."""
        at = part.start
        for start, stop in sorted((p.start, p.stop) for p in self.parts):
            if start > at:
                break
            at = max(at, stop)
        return at >= part.stop

    def meets(self, a: Region, b: Region) -> bool:
        """Whether two regions share a byte; where that is too much to compare, whether they are the same."""
        if a == b:
            return True
        if a.stop <= b.start or b.stop <= a.start:
            return False
        mask = self.blank()
        if mask is None:
            return False
        self.within(mask, a)[...] = True
        return bool(self.within(mask, b).any())


def verify_plan(
    steps: Sequence[Step],
    values: Sequence[Value],
    offsets: dict[int, int],
    outputs: Sequence[tuple[tuple[int, ...], str]],
) -> None:
    """Raise PlanError where `verify_steps` does, two buffers in use lie on each other, or an output stays unwritten. offsets: of
    the arena's buffers by id.
    """
    memory, writers = verify_steps(steps, values)
    check_outputs(writers, memory, steps, outputs)
    check_arena(steps, offsets)


def verify_steps(
    steps: Sequence[Step], values: Sequence[Value]
) -> tuple[dict[int, Memory], dict[int, list[tuple[int, Region]]]]:
    """Raise PlanError where a step reads bytes that nothing has written, or a value is overwritten before its last reader;
    returns what was written to every buffer, and by which steps.
    """
    writes = [list(written(s)) for s in steps]
    reads = [list(read(s)) for s in steps]
    memory: dict[int, Memory] = {}
    for i, step in enumerate(steps):
        for buffer, part in (*writes[i], *reads[i]):
            if part.start < 0 or part.stop > buffer.nbytes:
                raise PlanError(f"[plan] {told(steps, step)} reaches outside its buffer of {buffer.nbytes} bytes.")
            memory.setdefault(id(buffer), Memory(buffer.nbytes)).meet(part)
    writers: dict[int, list[tuple[int, Region]]] = defaultdict(list)
    for i, step in enumerate(steps):
        for buffer, part in reads[i]:
            if not memory[id(buffer)].holds(part):
                raise PlanError(f"[plan] {told(steps, step)} reads what no step before it writes.")
        for buffer, part in writes[i]:
            for other, source in reads[i]:
                if other is buffer and source != part and memory[id(buffer)].meets(source, part):
                    raise PlanError(f"[plan] {told(steps, step)} writes over a part of what it reads.")
            memory[id(buffer)].parts[part] = None
            writers[id(buffer)].append((i, part))
    check_values(steps, values, memory, writers)
    return memory, writers


def check_values(
    steps: Sequence[Step],
    values: Sequence[Value],
    memory: dict[int, Memory],
    writers: dict[int, list[tuple[int, Region]]],
) -> None:
    for v in values:
        key = id(v.array._handle)
        between = [(i, part) for i, part in writers.get(key, ()) if v.born < i < v.read]
        wanted = region(v.array) if between else None
        for i, part in between:
            memory[key].meet(part)
            if wanted is not None:
                memory[key].meet(wanted)
                if memory[key].meets(part, wanted):
                    raise PlanError(f"[plan] {told(steps, steps[i])} overwrites what step {v.read} still reads.")


def check_outputs(
    writers: dict[int, list[tuple[int, Region]]],
    memory: dict[int, Memory],
    steps: Sequence[Step],
    outputs: Sequence[tuple[tuple[int, ...], str]],
) -> None:
    found: dict[int, Any] = {a._handle.index: a._handle for s in steps for a in s.outs if a._handle.is_output}
    for i, (shape, dtype) in enumerate(outputs):
        nbytes = math.prod(shape) * itemsize(dtype)
        buffer = found.get(i)
        if nbytes and (buffer is None or buffer.nbytes != nbytes or not memory[id(buffer)].holds(whole(nbytes))):
            raise PlanError(f"[plan] output {i} is not written whole.")


def check_arena(steps: Sequence[Step], offsets: dict[int, int]) -> None:
    """Buffers that are in use at the same step lie apart."""
    used: dict[int, list[int]] = {}  # first and last step, offset and end
    for i, s in enumerate(steps):
        for a in (*s.outs, *s.ins):
            key = id(a._handle)
            if key in offsets:
                used.setdefault(key, [i, i, offsets[key], offsets[key] + a._handle.nbytes])[1] = i
    first, last, start, stop = np.array(list(used.values()) or [[0] * 4]).T
    clash = (first[:, None] <= last) & (first <= last[:, None]) & (start[:, None] < stop) & (start < stop[:, None])
    np.fill_diagonal(clash, False)
    if clash.any():
        one, other = (int(first[k]) for k in np.argwhere(clash)[0])
        raise PlanError(f"[plan] the buffers that {told(steps, steps[one])} and step {other} make lie on each other.")


def told(steps: Sequence[Step], step: Step) -> str:
    i = next(i for i, s in enumerate(steps) if s is step)
    return f"step {i} ({step.kernel} of {step.label or 'the plan'})"
