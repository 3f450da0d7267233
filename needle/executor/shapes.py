"""Plans for further shapes of a model that has some: not planned, but the numbers of one whose sizes were traced put into it.

When a second shape comes, its plan is made as the first one's, and then once more with traced sizes
(needle/backend_ndarray/sizes.py): every offset, shape, stride and attribute as a number that is computed from the free sizes, and
whatever planning decided by a size as a condition. For sizes that meet all conditions planning would go the same way and come to
these numbers; others are planned, and traced anew. What was traced has to be the plan that was made, number by number.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from needle.autograd import Spec
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.ndarray import itemsize
from needle.backend_ndarray.sizes import Size, Trace, has_sizes, map_sizes, plain
from needle.graph import Graph, Node, map_structure

from .builder import ARENA, CONSTANT, Buffer, Builder, PlanInfo, guarded, zone_of
from .compiled import CompiledPlan, Origin, origins
from .constants import Constant, ConstantPool, SizedConstant, Untraceable
from .memory import Lifetime
from .planner import Planner
from .ranges import Range
from .settings import Choice
from .split import is_foreign
from .target import target_of
from .verify_plan import PlanError

KEPT = 8  # templates of one kind of arguments
SAME = ("device", "writes", "guards", "decomposed", "modules", "_rewritten", "_fused")  # of plans for all shapes
TRIES = 4  # traces that may be of no use, one after the other
SEEN = 16  # shapes that are remembered to tell which sizes are free

LEAVES = (Node, Size, int, float, bool, str)  # of results
KINDS = 64  # kinds of arguments that are remembered

Dims = tuple[int, ...]


class Traced(CompiledPlan):
    """Planned with traced sizes, as far as the steps."""

    trace: Trace
    builder: Builder

    def __init__(
        self, trace: Trace, fn: Callable, example: Any, pool: ConstantPool, choice: Choice, device: Any
    ) -> None:
        self.trace = trace
        super().__init__(fn, example, pool, choice, [], device)

    def planned(self, graph: Graph, pool: ConstantPool, choice: Choice, inputs: list[NDArray]) -> Any:
        if any(map(is_foreign, graph)):
            raise Untraceable("another library runs some of its ops")
        planner = Planner(graph, pool, choice, self.device, trace=self.trace)
        self.builder = planner.builder
        self.borders = planner.lower()
        self.arena, self.packed = self.builder.settle()
        return SimpleNamespace(core=None, fired=self.builder.fired, misses=self.builder.misses)


class Numbers:
    """Traced numbers as places in a trace's values, to be looked up at once."""

    def __init__(self, trace: Trace, numbers: Sequence[Any], dtype: str) -> None:
        places = [trace.number(n).index for n in numbers]  # type: ignore[union-attr]
        self.distinct, self.places = np.unique(np.array(places, "int64"), return_inverse=True)
        self.dtype = dtype

    def at(self, values: Sequence[Any]) -> np.ndarray:
        return np.array([values[i] for i in self.distinct.tolist()], self.dtype)[self.places]


class Template:
    """A traced plan. groups: for each free size the places that have it among the sizes of the arguments; fixed: the others."""

    def __init__(self, base: CompiledPlan, traced: Traced, groups: list[list[int]], dims: Dims) -> None:
        self.traced, self.trace, self.groups = traced, traced.trace, groups
        core: Any = base.core
        self.core = core.like(*core.numbers, base.info.arena_bytes)  # which has no constants, and holds none
        self.same = {name: getattr(base, name) for name in SAME}
        self.names, self.labels, self.constants = base.info.names, base.info.labels, base.info.constants
        free = {i for group in groups for i in group}
        self.fixed = [(i, n) for i, n in enumerate(dims) if i not in free]
        self.kernels = [(s.kernel, s.label) for s in traced.builder.steps]
        self.form: list[tuple] = []
        numbers: list[Any] = []
        attributes: list[Any] = []
        moves: list[tuple[int, int]] = []  # (place of an offset, which buffer of the arena)
        bases: list[tuple[int, int, int]] = []  # (place of an offset, which constant, bytes of an element)
        where = {id(b): i for i, b in enumerate(traced.arena)}
        for s in traced.builder.steps:
            kernel = traced.device.kernels[s.kernel]
            operands: list[Any] = []
            for a in [*s.outs, *(s.inputs.get(n) for n in kernel.inputs)]:
                if a is None:
                    operands.append(None)
                    continue
                b = a._handle
                if b.space == ARENA:
                    moves.append((len(numbers), where[id(b)]))
                if isinstance(b.constant, SizedConstant):
                    bases.append((len(numbers), b.index, itemsize(a.dtype)))
                operands.append((b.space, b.index, len(a.shape), a.dtype))
                numbers += [a._offset * itemsize(a.dtype), *a.shape, *a.strides]
            self.form.append((s.kernel, operands))
            attributes += [s.attrs[n] for n in kernel.attrs]
        for borders in traced.borders:
            for shape, _ in borders:
                numbers += shape
        self.numbers = Numbers(self.trace, numbers, "int64")
        self.attributes = Numbers(self.trace, attributes, "float64")
        sized = ((b.index, b.constant) for b in traced.packed)
        self.sized = [(i, c) for i, c in sized if isinstance(c, SizedConstant)]
        self.bytes = Numbers(self.trace, [b.nbytes for b in traced.arena], "int64")
        self.moves, self.bases = np.array(moves, "int64").reshape(-1, 2).T, bases
        traced.builder.values.clear()

    def needed(self) -> Iterator[Constant]:
        """The constants that its plans use or make theirs from."""
        left: list[Any] = [*self.constants, *(c for _, c in self.sized)]
        for c in left:
            if isinstance(c, SizedConstant):
                left += c.inputs
            elif isinstance(c, Constant):
                yield c

    def at(self, dims: Dims, pool: ConstantPool) -> Instance | None:
        """The plan for other sizes; None where planning would make another one."""
        values = self.values(dims)
        return None if values is None else Instance(self, values, pool)

    def values(self, dims: Dims) -> list[Any] | None:
        builder = self.traced.builder
        if (
            builder.zone != zone_of(builder.target)
            or any(dims[i] != n for i, n in self.fixed)
            or any(dims[i] != dims[group[0]] for group in self.groups for i in group)
        ):
            return None
        return self.trace.at([dims[group[0]] for group in self.groups])


class Instance(CompiledPlan):
    """A template's plan for some sizes: the values of its trace."""

    def __init__(self, template: Template, values: list[Any], pool: ConstantPool) -> None:
        vars(self).update(template.same)
        self.template, self.value = template, value_of(values)
        self.structure = map_structure(template.traced.structure, self.value)
        self.info = InstanceInfo(template, values, pool)
        self.core = self.info.core

    @functools.cached_property
    def origins(self) -> dict[str, Origin]:  # type: ignore[override]
        return origins(*self.template.traced._planned, lambda x: map_sizes(x, self.value))


def value_of(values: list[Any]) -> Callable[[Any], Any]:
    """What a number stands for among a trace's values."""
    return lambda x: values[x.index] if type(x) is Size else x


class InstanceInfo(PlanInfo):
    """What people want to know about it is found when they ask."""

    def __init__(self, template: Template, values: list[Any], pool: ConstantPool) -> None:
        self.template, self.value, traced = template, value_of(values), template.traced
        self.device, self.names, self.labels = traced.device, template.names, template.labels
        self.shared, self.constants = template.constants, template.constants.copy()
        for i, c in template.sized:
            self.constants[i] = self._of_sizes(c, pool)
        numbers = template.numbers.at(values)
        zone = traced.builder.zone
        spans = zip(template.bytes.at(values).tolist(), traced.arena, strict=True)
        self.lifetimes = [Lifetime(nbytes, b.first, b.last) for nbytes, b in spans]
        self.offsets, self.arena_bytes = traced.builder.placed(self.lifetimes)
        places, buffers = template.moves
        numbers[places] += np.array(self.offsets, "int64")[buffers]
        for place, index, size in template.bases:
            numbers[place] += self.constants[index].array._offset * size
        attributes = template.attributes.at(values)
        self.core = template.core.like(numbers.tolist(), attributes.tolist(), self.arena_bytes)
        if zone:
            traced.builder.guard(self.core, self.lifetimes, self.offsets)
        self.refresh()

    @property
    def own(self) -> list[Constant]:
        return [self.constants[i] for i, _ in self.template.sized]

    def _of_sizes(self, c: Any, pool: ConstantPool) -> Constant:
        if not isinstance(c, SizedConstant):
            return c
        value = self.value
        op = map_sizes(c.op, value)
        if op.ignores_values:
            made = pool.of_specs(op, map_sizes(list(c.inputs), value))
        else:
            made = pool.of_op(op, c.item, [self._of_sizes(i, pool) for i in c.inputs])
        if (made.array.shape, made.array.dtype) != map_sizes(tuple(c.spec), value):
            raise PlanError(f"[plan] {c.op.label} of constants made another shape than it was planned for.")
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "precisions" in vars(self):
            raise AttributeError(name)
        PlanInfo.__init__(self, self.core, self.constants, self._drawn(), self._buffers, self.offsets, self.arena_bytes)  # type: ignore[attr-defined]
        return getattr(self, name)

    def _drawn(self) -> Any:
        """The steps with these numbers, as the builder has those of its plan."""
        value, builder = self.value, self.template.traced.builder
        handles: dict[int, Buffer] = {}
        arrays: dict[int, NDArray] = {}

        def handle(b: Buffer) -> Buffer:
            if id(b) not in handles:
                constant = self.constants[b.index] if b.space == CONSTANT and b.first >= 0 else None
                handles[id(b)] = b.copy(value(b.nbytes), constant)
            return handles[id(b)]

        def array(a: NDArray) -> NDArray:
            if id(a) not in arrays:
                shape, strides = map_sizes((a.shape, a.strides), value)
                arrays[id(a)] = NDArray.make(shape, strides, a.device, handle(a._handle), value(a._offset), a.dtype)
            return arrays[id(a)]

        steps = [
            s._replace(
                outs=[array(a) for a in s.outs],
                inputs={n: array(a) for n, a in s.inputs.items()},
                attrs={n: float(value(v)) for n, v in s.attrs.items()},
            )
            for s in builder.steps
        ]
        self._buffers = [handle(b) for b in self.template.traced.arena]
        options = [o._replace(sizes=map_sizes(o.sizes, value)) for o in builder.options]
        return SimpleNamespace(
            steps=steps, options=options, device=self.device, fired=builder.fired, misses=builder.misses
        )


class Kind:
    """What is known of arguments that differ in their sizes alone."""

    def __init__(self) -> None:
        self.seen: list[Dims] = []
        self.templates: list[Template] = []
        self.tries, self.faults = TRIES, list[str]()  # why traces were of no use


def ranks_of(specs: Any) -> list[int]:
    ranks: list[int] = []
    map_structure(specs, lambda s: ranks.append(len(s.shape)) if isinstance(s, Spec) else None)
    return ranks


class Shapes:
    """The templates of one model."""

    def __init__(self, choice: Choice, ranges: Sequence[Range] = (), ranks: Sequence[int] = ()) -> None:
        """ranges: what was told of free sizes, for arrays of these ranks."""
        self.choice, self.ranges, self.ranks = choice, ranges, ranks
        self.kinds: dict[str, Kind] = {}

    def constants(self) -> Iterator[Constant]:
        """What later plans may need."""
        for kind in self.kinds.values():
            for template in kind.templates:
                yield from template.needed()

    def find(self, specs: Any, pool: ConstantPool, scratch: Callable[[], CompiledPlan]) -> CompiledPlan:
        """The plan for some arguments, by a template or by `scratch()`."""
        kind, dims = self._kind(specs)
        if self.ranges and (ranks := ranks_of(specs)) != self.ranks:
            raise ValueError(f"[compile] sizes expects inputs of {self.ranks} axes, got {ranks}.")
        for known in self.ranges:
            known.check(dims)
        for template in kind.templates:
            made = template.at(dims, pool)
            if made is not None:
                if guarded() and (fault := difference(made, scratch())):
                    raise PlanError(f"[plan] the plan for other sizes is another one than a new one: {fault}.")
                kind.templates.remove(template)
                kind.templates.insert(0, template)
                kind.tries = TRIES
                return made
        plan = scratch()
        if (kind.seen or self.ranges) and kind.tries and self._traceable(plan):
            self._learn(kind, plan, specs, dims, pool)
        kind.seen = [*[d for d in kind.seen if d != dims][-SEEN + 1 :], dims]
        return plan

    def unknown(self, specs: Sequence[Spec]) -> Iterator[tuple[Spec, ...]]:
        """Arguments of sizes in the ranges, the others as here, whose plan no template has; as many as there may be templates."""
        dims, found = [n for s in specs for n in s.shape], 1
        for known in self.ranges:
            for n in known.probes():
                left = iter([n if i in known.places else size for i, size in enumerate(dims)])
                probe = tuple(s._replace(shape=tuple(itertools.islice(left, len(s.shape)))) for s in specs)
                kind, sizes = self._kind(probe)
                if any(template.values(sizes) is not None for template in kind.templates):
                    kind.tries = TRIES
                elif found < KEPT and kind.tries:
                    found += 1
                    yield probe

    def _kind(self, specs: Any) -> tuple[Kind, Dims]:
        dims: list[int] = []

        def enter(s: Any) -> Any:
            if not isinstance(s, Spec):
                return s
            dims.extend(s.shape)
            return len(s.shape), s.dtype

        key = repr(map_structure(specs, enter))
        if key not in self.kinds and len(self.kinds) == KINDS:
            self.kinds.clear()
        return self.kinds.setdefault(key, Kind()), tuple(dims)

    def _traceable(self, plan: CompiledPlan) -> bool:
        traces = target_of(plan.device).traces_sizes and not (self.choice.tune or plan.writes)
        return traces and type(plan.info) is PlanInfo

    def _learn(self, kind: Kind, plan: CompiledPlan, specs: Any, dims: Dims, pool: ConstantPool) -> None:
        """A template like `plan`, whose free sizes are those that were seen to differ."""
        columns: dict[Dims, list[int]] = {}
        for i, column in enumerate(zip(*kind.seen, dims, strict=True)):
            if any(n != dims[i] for n in column):
                columns.setdefault(column, []).append(i)
        known_ones = [r.places for r in self.ranges] or columns.values()
        groups = [g for g in known_ones if dims[g[0]] > 1]
        if not groups:
            return
        kind.tries -= 1
        known = len(pool.constants)
        try:
            trace = Trace([dims[group[0]] for group in groups])
            place = {i: trace.sizes[g] for g, group in enumerate(groups) for i in group}
            at = iter(range(len(dims)))

            def traced_spec(s: Any) -> Any:
                sizes: Any = (
                    [place.get(i, dims[i]) for i in itertools.islice(at, len(s.shape))] if isinstance(s, Spec) else ()
                )
                return s._replace(shape=tuple(sizes)) if isinstance(s, Spec) else s

            with trace:
                traced = Traced(
                    trace, plan._planned[1], map_structure(specs, traced_spec), pool, self.choice, plan.device
                )
                template = Template(plan, traced, groups, dims)
            for module in traced.modules:  # what a forward keeps of sizes is numbers
                kept = {name: map_sizes(v, plain) for name, v in vars(module).items() if has_sizes(v)}
                vars(module).update(kept)
            if any(s.index in trace.tied for s in trace.sizes):
                raise Untraceable("planning needs its sizes themselves")
            map_structure(traced.structure, check_leaf)
            if fault := template_fault(template, plan):
                raise Untraceable(fault)
            made = template.at(dims, pool)
            if fault := "other conditions" if made is None else difference(made, plan):
                raise Untraceable(fault)
        except Exception as e:  # planned from scratch it works: what cannot be traced is planned one shape at a time
            kind.faults = [*kind.faults[-TRIES:], f"{type(e).__name__}: {e}"]
            return
        else:
            kind.templates = [template, *kind.templates[: KEPT - 1]]
        finally:
            needed = {id(c) for t in kind.templates for c in t.needed()}
            for key in list(pool.constants)[known:]:
                if id(pool.constants[key]) not in needed:
                    del pool.constants[key]


def check_leaf(x: Any) -> None:
    """That a result is none that may hold sizes unseen."""
    if not (x is None or type(x) in LEAVES):
        raise Untraceable(f"the results hold a {type(x).__name__}")


def template_fault(template: Template, plan: CompiledPlan) -> str:
    """In what a template differs from the plan that it was made beside, except in numbers."""
    core: Any = plan.core
    if template.form != core.form:
        return "another form of steps"
    if template.kernels != list(zip(plan.info.names, plan.info.labels, strict=True)):
        return "other labels"
    for buffer, constant in zip(template.traced.packed, plan.info.constants, strict=True):
        c = buffer.constant
        if not (isinstance(c, SizedConstant) or c is constant or same_literal(c, constant)):
            return "another constant"
    return ""


def same_literal(a: Constant, b: Constant) -> bool:
    """Whether two constants have the same values; for those that are made anew for each plan."""
    x, y = a.array.numpy(), b.array.numpy()
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def difference(one: CompiledPlan, other: CompiledPlan) -> str:
    """In what two plans differ, "" where they are the same."""
    a: Any = one.info
    b: Any = other.info
    if type(b) is not PlanInfo and not isinstance(b, InstanceInfo):
        return "one is split"
    if a.core.form != b.core.form or a.names != b.names or a.labels != b.labels:
        return "steps"
    if a.core.numbers != b.core.numbers or a.arena_bytes != b.arena_bytes:
        return "numbers"
    if not all(c is d or same_literal(c, d) for c, d in zip(a.constants, b.constants, strict=True)):
        return "constants"
    return "" if repr(one.structure) == repr(other.structure) else "results"
