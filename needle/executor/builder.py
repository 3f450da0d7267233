"""Builder: collects the steps of a plan while ops run on virtual memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from needle import _core
from needle.autograd import Op, Spec, Unsupported
from needle.backend_ndarray import Device
from needle.backend_ndarray.kernels import PLANNING, on_device
from needle.backend_ndarray.ndarray import NDArray, itemsize
from needle.backend_ndarray.sizes import Trace, has_sizes, map_sizes, real
from needle.shown import Shown

from .constants import Constant, ConstantPool, SizedConstant, as_constant
from .memory import Lifetime, PlannedBuffer, distinct_bytes, lower_bound, plan_offsets
from .order import hoisted
from .rewriting import merge
from .settings import DEFAULT, PRECISIONS, Choice, Measured, Option, unmeasured
from .step import ZERO_HALO, Halo, Step
from .target import Target, target_of
from .verify_plan import Value, verify_plan, verify_steps

ARENA, CONSTANT, INPUT, OUTPUT = range(4)  # the memory spaces of csrc/core/plan.h


class Buffer:
    """Virtual memory: what an NDArray's `_handle` is while planning."""

    def __init__(
        self, nbytes: int, space: int = ARENA, index: int = 0, constant: Any = None, state: bool = False
    ) -> None:
        self.nbytes, self.space, self.index, self.constant = nbytes, space, index, constant
        self.is_state = state  # memory of a constant that steps write
        self.first, self.last = -1, -1
        self.native = False  # holds the target's own layout

    def copy(self, nbytes: int, constant: Any) -> Buffer:
        """The same of another plan."""
        made = Buffer(nbytes, self.space, self.index, constant, self.is_state)
        made.first, made.last, made.native = self.first, self.last, self.native
        return made

    is_made = property(lambda self: self.space == ARENA or self.space == OUTPUT)  # steps write it
    is_output = property(lambda self: self.space == OUTPUT)

    def __getattr__(self, name: str) -> Any:
        raise Unsupported("the value of an array is not known while its plan is built")


class Builder:
    """Steps, buffers and constants of one plan."""

    def __init__(
        self,
        pool: ConstantPool,
        device: Device,
        choice: Choice = DEFAULT,
        measured: Measured = unmeasured,
        trace: Trace | None = None,
    ) -> None:
        self.pool, self.choice, self.measured = pool, choice, measured
        self.trace = trace  # where the sizes are traced
        self.device, self.target = device, target_of(device)
        self.precision = PRECISIONS[choice.precision]
        self.options: list[Option] = []  # the layers with a choice of algorithms
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self._sized: dict[Any, SizedConstant] = {}
        self._constant_arrays: dict[int, NDArray] = {}
        self.label = ""
        self.result: Any = None  # what the present op makes: a Spec, or a tuple of them
        self.given: list[Any] = []  # the specs of what it reads
        self.halos: dict[int, Halo] = {}  # what the present op reads around its images, by id
        self.values: list[Value] = []  # what ops read, for the verifier
        self.zone = zone_of(self.target)
        self.early = range(0)  # steps that may run before those in front of them

    @contextmanager
    def active(self, on: bool = True) -> Iterator[None]:
        before, PLANNING.builder = PLANNING.builder, self if on else None
        try:
            with on_device(self.device):
                yield
        finally:
            PLANNING.builder = before

    # -- memory ------------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Buffer:
        b = Buffer(nbytes)
        self.buffers.append(b)
        return b

    def border(self, space: int, index: int, shape: Sequence[int], dtype: str) -> NDArray:
        """Input or output number `index` as a contiguous array."""
        n = itemsize(dtype)
        for s in shape:
            n *= s
        return NDArray.make(shape, handle=Buffer(n, space, index), dtype=dtype)

    # -- constants ---------------------------------------------------------------------------------------------------

    def constant(self, c: Constant | SizedConstant, state: bool = False) -> NDArray:
        """The array of a constant; state: steps may write it, and nothing is derived from it but in the run."""
        if id(c) not in self._constant_arrays:
            if isinstance(c, SizedConstant):
                shape, strides, offset, dtype, nbytes = c.spec.shape, None, 0, c.spec.dtype, 0
            else:
                a = c.array
                shape, offset, dtype, nbytes = a.shape, a._offset, a.dtype, a._handle.nbytes
                strides = None if a.is_compact() else a.strides
            handle = Buffer(nbytes, CONSTANT, constant=c, state=state)
            self._constant_arrays[id(c)] = NDArray.make(shape, strides, handle=handle, offset=offset, dtype=dtype)
        return self._constant_arrays[id(c)]

    def is_constant(self, array: NDArray) -> bool:
        return array._handle.constant is not None and not array._handle.is_state

    def derive(self, key: Hashable, make: Callable[..., NDArray], *arrays: NDArray) -> NDArray:
        """`make(*arrays)`: of constants one computed now and again whenever a parameter under it changes, else steps."""
        if not all(map(self.is_constant, arrays)):
            return make(*arrays)
        with self.active(False):
            return self.constant(self.pool.derive(key, make, [as_constant(a._handle.constant) for a in arrays]))

    def derive_op(self, spec: Spec, op: Op, item: int | None, *arrays: NDArray) -> NDArray:
        """What an op computes of constants; item: which of its results."""
        inputs = [a._handle.constant for a in arrays]
        if self.trace is not None and (has_sizes(op) or any(isinstance(c, SizedConstant) for c in inputs)):
            key = (op.name, repr(map_sizes(op.attributes(), lambda s: (Trace, s.index))), item, *map(id, inputs))
            return self.constant(self._sized.setdefault(key, SizedConstant(spec, op, item, tuple(inputs))))
        with self.active(False):
            return self.constant(self.pool.of_op(op, item, inputs))

    def has_derived(self, key: Hashable, *arrays: NDArray) -> Any:
        """Whether plans that there are have `derive`d this of constants."""
        if not all(map(self.is_constant, arrays)):
            return False
        inputs = [as_constant(a._handle.constant) for a in arrays]
        has = functools.partial(self.pool.has, key, inputs)
        return has() if self.trace is None else self.trace.ask(has)

    # -- steps -------------------------------------------------------------------------------------------------------

    def call(self, name: str, outs: Sequence[NDArray], named: dict[str, Any]) -> None:
        if name != ZERO_HALO and not any(a.size for a in outs):  # of an empty batch; images of no rows have a halo
            self.options = [o for o in self.options if o.step < len(self.steps)]  # none for the step that is left out
            return
        name, named = self.target.row(self, name, named)
        kernel = self.device.kernels[name]
        ins, values = kernel.order(named)
        kernel.check([a.dtype for a in outs], [None if a is None else a.dtype for a in ins])
        inputs = {n: self._known(a) for n, a in zip(kernel.inputs, ins, strict=True) if a is not None}
        attrs = dict(zip(kernel.attrs, map(real, values), strict=True))
        halos = {n: self.halos[id(a)] for n, a in inputs.items() if id(a) in self.halos}
        self.steps.append(Step(name, list(outs), inputs, attrs, self.label, halos))

    def _known(self, array: NDArray) -> NDArray:
        """An array of the plan: that of an operand, or what an op or rule made by itself while planning, not from a parameter."""
        if isinstance(array._handle, Buffer):
            return array
        return self.constant(self.pool.derive(("literal", id(array)), lambda: array, ()))

    def _arrange(self) -> None:
        """Steps that the target has one kernel for as one, and the early ones where they can run."""
        rules = self.target.rules.select(disable=self.choice.disable)
        with self.active(False):
            self.steps, number, self.fired, self.misses = merge(self.steps, {o.step for o in self.options}, rules)
        number.append(len(self.steps))
        self.steps = [s._replace(inputs={n: self._known(a) for n, a in s.inputs.items()}) for s in self.steps]
        order = hoisted(self.steps, range(number[self.early.start], number[self.early.stop]))
        self.steps = [self.steps[i] for i in order]
        place = {old: new for new, old in enumerate([*order, len(order)])}
        number = [place[i] for i in number]
        self.options = [o._replace(step=number[o.step]) for o in self.options]
        self.values = [v._replace(born=number[v.born] if v.born >= 0 else -1, read=number[v.read]) for v in self.values]

    def settle(self) -> tuple[list[Buffer], list[Buffer]]:
        """The steps as they will run; the buffers of the arena and the constants that they use, which know when."""
        self._arrange()
        for i, step in enumerate(self.steps):
            for a in (*step.outs, *step.ins):
                b = a._handle
                b.first = i if b.first < 0 else b.first
                b.last = i
        arena = [b for b in self.buffers if b.space == ARENA and b.first >= 0]
        packed = [a._handle for a in self._constant_arrays.values() if a._handle.first >= 0]
        for i, b in enumerate(packed):
            b.index = i
        return arena, packed

    def placed(self, lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
        """Offsets of buffers in the arena, and its bytes."""
        zone = self.zone
        offsets, total = plan_offsets(
            [b._replace(nbytes=b.nbytes + 2 * zone) for b in lifetimes] if zone else lifetimes
        )
        return [o + zone for o in offsets] if zone else offsets, total

    def guard(self, plan: Any, lifetimes: Sequence[Lifetime], offsets: Sequence[int]) -> None:
        plan.guard([(o, *b) for b, o in zip(lifetimes, offsets, strict=True)])

    def finish(self, inputs: Sequence[Any], outputs: Sequence[Any], verify: bool = True) -> PlanInfo:
        """verify: False for a plan of steps whose values do not matter, such as one that is only timed."""
        if verify:
            verify_steps(self.steps, self.values)  # what is wrong between two steps is not seen where they are one
        arena, packed = self.settle()
        constants = [b.constant for b in packed]
        lifetimes = [Lifetime(b.nbytes, b.first, b.last) for b in arena]
        offsets, total = self.placed(lifetimes)
        where = {id(b): o for b, o in zip(arena, offsets, strict=True)}
        if verify:
            verify_plan(self.steps, self.values, where, outputs)

        def ref(a: NDArray) -> tuple:
            b = a._handle
            offset = a._offset * itemsize(a.dtype) + where.get(id(b), 0)
            return (b.space, b.index, offset, a.shape, a.strides, a.dtype)

        def row(s: Step) -> tuple:
            kernel = self.device.kernels[s.kernel]
            ins = [ref(s.inputs[n]) if n in s.inputs else None for n in kernel.inputs]
            return (kernel, [ref(a) for a in s.outs], ins, [s.attrs[a] for a in kernel.attrs])

        steps = [row(s) for s in self.steps]
        plan = _core.Plan(self.device.core, steps, total, inputs, outputs, self.pool.arenas)
        if self.zone:
            self.guard(plan, lifetimes, offsets)
        info = PlanInfo(plan, constants, self, arena, offsets, total)
        info.refresh()
        return info


def guarded() -> bool:
    """Whether plans made now look for what steps write outside of their buffers, or read before it is written; slow."""
    return os.environ.get("NEEDLE_GUARD", "0") not in ("", "0")


def zone_of(target: Target) -> int:
    """Bytes before and behind every buffer of plans made now."""
    return target.guard_zone if guarded() else 0


def halo_bytes(image: NDArray, halo: dict[str, float]) -> int:
    """Bytes of the ring around a blocked image."""
    n, blocks, h, w, block = image.shape
    rows, columns = h + halo["top"] + halo["bottom"], w + halo["left"] + halo["right"]
    return int(n * blocks * block * (rows * columns - h * w) * itemsize(image.dtype))


def step_precision(step: Step) -> str:
    """What a step multiplies in, "" where that is what its arrays hold."""
    code = step.attrs.get("precision", 0)
    return next(name for name, number in PRECISIONS.items() if number == code) if code else ""


class PlanInfo(Shown):
    """A finished plan and what people want to know about it."""

    shared: Sequence[Constant] = ()  # constants that are those of other plans, too, as one list

    def __init__(
        self,
        plan: Any,
        constants: list[Constant],
        builder: Builder,
        buffers: list[Buffer],
        offsets: list[int],
        arena: int,
    ) -> None:
        self.core, self.constants = plan, constants
        self.names = [s.kernel for s in builder.steps]
        self.options, self.device = builder.options, builder.device
        self.fired, self.misses = builder.fired, builder.misses  # of the rules over steps
        self.precisions = [step_precision(s) for s in builder.steps]
        self.labels, self.shapes = [s.label for s in builder.steps], [s.outs[0].shape for s in builder.steps]
        self.traffic = [
            (
                distinct_bytes(s.ins),
                halo_bytes(s.outs[0], s.attrs) if s.kernel == ZERO_HALO else distinct_bytes(s.outs),
            )
            for s in builder.steps
        ]  # bytes read and written by every step
        self.arena_bytes = arena
        self.lower_bound = lower_bound([Lifetime(b.nbytes, b.first, b.last) for b in buffers])
        filled: dict[int, int] = {}  # buffer -> the first step that writes data to it, not only a halo
        for i, s in enumerate(builder.steps):
            if s.ins:
                for a in s.outs:
                    filled.setdefault(id(a._handle), i)
        self.buffers = [
            PlannedBuffer(self.labels[i], self.names[i], b.first, b.last, offset, b.nbytes)
            for b, offset in zip(buffers, offsets, strict=True)
            for i in [filled.get(id(b), b.first)]
        ]

    @property
    def own(self) -> Sequence[Constant]:
        """The constants that are not in `shared`."""
        return self.constants

    def refresh(self) -> None:
        """Hand the constants' present arrays to the core."""
        self.core.set_constants([c.array._ref for c in self.constants])

    def __str__(self) -> str:
        rows = [
            f"{i:3}  {f'{n} {p}':<24}{'x'.join(map(str, s)):<24}{l}"
            for i, (n, p, s, l) in enumerate(zip(self.names, self.precisions, self.shapes, self.labels, strict=True))
        ]
        head = f"{len(rows)} steps, arena {self.arena_bytes / 1e6:.2f} MB (lower bound {self.lower_bound / 1e6:.2f} MB)"
        return "\n".join([head + target_of(self.device).describe(self), *rows])
