"""Planner: from a traced graph to a plan. Decides whose memory a value lives in, then lowers node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needle.autograd import Op, Spec, Unsupported
from needle.backend_ndarray import FLOATS, Device, NoKernel
from needle.backend_ndarray.ndarray import NDArray, call, itemsize
from needle.backend_ndarray.sizes import Trace
from needle.graph import Graph, Node, map_structure

from .builder import ARENA, INPUT, OUTPUT, Builder, PlanInfo
from .constants import ConstantPool, SizedConstant
from .effects import updated_in_place
from .settings import Choice, Measured, unmeasured
from .target import target_of
from .verify_plan import Value

Border = tuple[tuple[int, ...], str]  # shape and dtype of an input or output


class Planner:
    """Plans one graph at its traced shapes."""

    def __init__(
        self,
        graph: Graph,
        pool: ConstantPool,
        choice: Choice,
        device: Device,
        measured: Measured = unmeasured,
        trace: Trace | None = None,
    ) -> None:
        self.graph, self.builder = graph, Builder(pool, device, choice, measured, trace)
        self.layout = self.builder.target.layout(self)
        self.order = {n: i for i, n in enumerate(graph)}
        self.users = graph.users()
        self.constant = constant_nodes(graph)
        self.updated = updated_in_place(graph)
        self.is_native: dict[Node, bool] = {}  # made in the target's layout
        self.home: dict[Node, Node] = {}  # the node whose memory a value lives in
        self.group: dict[Node, set[Node]] = {}  # home -> every value in the same memory
        self.borrowed: set[Node] = set()  # views of memory that nobody may write: inputs, constants, plain copies
        self.plain: dict[Node, NDArray] = {}
        self.native: dict[Node, NDArray] = {}
        self.born: dict[tuple[Node, bool], int] = {}  # the step after which a value is there, plain or native

    def plan(self) -> PlanInfo:
        return self.builder.finish(*self.lower())

    def lower(self) -> tuple[list[Border], list[Border]]:
        """Make the builder's steps; the plan's inputs and outputs."""
        for node in self.graph:
            if node.kind == "op" and node not in self.constant:
                self.is_native[node] = self.layout.wants(node)
                self._choose_home(node)
        with self.builder.active():
            inputs = [self._enter(n, i) for i, n in enumerate(self.graph.inputs)]
            for node in self.graph:
                if node.kind == "param":
                    tensor = parameter(node)
                    constant = tensor if isinstance(tensor, SizedConstant) else self.builder.pool.parameter(tensor)
                    self.plain[node] = self.builder.constant(constant, is_state(node))
                elif node.kind == "op":
                    self.builder.label = node.name
                    self._lower(node)
            outputs = self._leave()
            self._finish()
        return inputs, outputs

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _choose_home(self, node: Node) -> None:
        """Place the value of `node` in the memory of an input, or in memory of its own."""
        op = node.target
        self.home[node], self.group[node] = node, {node}
        if node in self.updated:
            home = self.home[node] = self.updated[node]
            self.group[node] = self.group.setdefault(home, set())
            self.group[node].add(node)
            self.borrowed.add(node)
        elif op.aliases(node.meta["spec"], *(n.meta["spec"] for n in node.args)):
            self._join(node, node.args[0])
            if node.args[0] not in self.home:
                self.borrowed.add(node)
        elif op.is_view and not self.is_native[node]:
            for x in node.args:
                self._share(node, x)
        elif op.in_place or op.updates:
            # The latest first: then what is added to a layer's input can become part of the layer, which may not write there.
            for x in node.args[:1] if op.updates else sorted(node.args, key=self.order.__getitem__, reverse=True):
                if self._can_overwrite(x, node):
                    self._join(node, x)
                    break
        if self.is_native[node]:
            self.layout.place(node)

    def _join(self, node: Node, x: Node) -> None:
        if x in self.home and self.is_native.get(x) == self.is_native[node]:
            home = self.home[x]
            self.home[node] = home
            self.group[home].add(node)
            self.group[node] = self.group[home]

    def _share(self, node: Node, x: Node) -> None:
        """A view lives in its input's memory, in a shape of its own."""
        if x not in self.home or self.is_native.get(x):
            self.borrowed.add(node)
            return
        merged = self.group[self.home[x]] | {node}
        for m in merged:
            self.group[m] = merged

    def _can_overwrite(self, x: Node, node: Node) -> bool:
        if x not in self.home or self.is_native.get(x) != self.is_native[node]:
            return False
        if x.meta["spec"] != node.meta["spec"] or node.args.count(x) > 1:
            return False
        here, group = self.order[node], self.group[self.home[x]]
        if not self.borrowed.isdisjoint(group) or any(a in group for a in node.args if a is not x):
            return False
        return all(self.order[u] <= here for m in group for u in self.users[m])

    # -- lowering ----------------------------------------------------------------------------------------------------

    def _enter(self, node: Node, index: int) -> Border:
        spec = node.meta["spec"]
        if spec is None:
            raise Unsupported(f"input {node.name} is not an array")
        self.plain[node] = self.builder.border(INPUT, index, spec.shape, spec.dtype)
        return (tuple(spec.shape), spec.dtype)

    def _lower(self, node: Node) -> None:
        op = node.target
        if node in self.constant:
            if isinstance(node.meta["spec"], Spec):  # items of a tuple are derived one by one
                self.plain[node] = self._derive(node)
            return
        spec = self.builder.result = node.meta["spec"]
        self.builder.given = [n.meta["spec"] for n in node.args]
        native = self.is_native[node]
        reads = self.layout.reads(node)
        ins = [self._as_native(n) if r else self._as_plain(n) for n, r in zip(node.args, reads, strict=True)]
        self.builder.halos = {id(x): self.layout.around(node, i) for i, x in enumerate(ins) if reads[i]}
        home, first = self.home[node], len(self.builder.steps)
        if home is not node and op.aliases(spec, *(n.meta["spec"] for n in node.args)):
            (self.native if native else self.plain)[node] = ins[0]
        elif native:
            out = self.native[node] = self.native[home] if home is not node else self.layout.allocate(node)
            lower_into(self.builder, op, self.layout.operands(node, ins), out)
        else:
            leaves = all(u.kind == "output" for u in self.users[node])
            place = None if home is node else self.plain[home]
            self.plain[node] = lower_plain(self.builder, op, spec, ins, place, leaves)
        self.builder.halos = {}
        if len(self.builder.steps) > first:
            for n, r in zip(node.args, reads, strict=True):
                self._read(n, r, first)
            self._made(node, native)
        else:  # a view reads nothing, and is there since what it views is
            born = (self.born.get((n, r), -1) for n, r in zip(node.args, reads, strict=True))
            self.born[node, native] = max(born, default=-1)

    def _made(self, node: Node, native: bool) -> None:
        """The value of `node` is there after the steps so far."""
        self.born[node, native] = len(self.builder.steps) - 1

    def _read(self, node: Node, native: bool, by: int | None = None) -> None:
        """A step reads the value of `node`: the next one, unless its number is given."""
        value = (self.native if native else self.plain)[node]
        if isinstance(value, NDArray) and value._handle.is_made:
            by = len(self.builder.steps) if by is None else by
            self.builder.values.append(Value(value, self.born.get((node, native), -1), by))

    def _derive(self, node: Node) -> NDArray:
        """The value of a node that depends on parameters only."""
        op, args, item = node.target, node.args, None
        if op.is_item:
            op, args, item = args[0].target, args[0].args, op.index
        return self.builder.derive_op(node.meta["spec"], op, item, *(self.plain[n] for n in args))

    def _as_plain(self, node: Node) -> NDArray:
        """The value as a plain array."""
        if node not in self.plain:
            self.plain[node] = self.layout.leave(node)
            self._read(node, True)
            self.layout.store(self.plain[node], self.native[node])
            self._made(node, False)
        return self.plain[node]

    def _as_native(self, node: Node) -> NDArray:
        """The value in the target's layout."""
        if node not in self.native and self.builder.is_constant(self.plain[node]):
            made = self.layout.constant(node, self.plain[node])
            if made is not None:
                self.native[node] = made
        if node not in self.native:
            self.native[node] = out = self.layout.enter(node)
            self._read(node, False)
            self.layout.load(out, self.plain[node])
            self._made(node, True)
        return self.native[node]

    def _leave(self) -> list[Border]:
        """Write the graph's outputs; a value whose memory is all its own becomes the output without a copy."""
        borders: list[Border] = []
        taken: set[int] = set()
        self.builder.label = "output"

        def write(node: Node) -> None:
            spec, index = node.meta["spec"], len(borders)
            borders.append((tuple(spec.shape), spec.dtype))
            value = self.plain.get(node)
            self._read(node, value is None)
            buffer: Any = None if value is None else value._handle
            own = buffer is not None and buffer.space == ARENA and id(buffer) not in taken
            if value is not None and own and value.is_compact() and buffer.nbytes == value.size * itemsize(spec.dtype):
                buffer.space, buffer.index = OUTPUT, index
                taken.add(id(buffer))
                return
            out = self.builder.border(OUTPUT, index, spec.shape, spec.dtype)
            if value is not None:
                call("copy", [out], x=value)
            else:
                self.layout.store(out, self.native[node])

        map_structure(self.graph.output.args[0], lambda n: write(n) if isinstance(n, Node) else None)
        return borders

    def _finish(self) -> None:
        """What the graph does beside its results: as soon as nothing reads the old state any more, or at the end."""
        effects = self.graph.output.meta.get("effects", ())
        values = [self._as_plain(n) for n in self.graph.output.args[1]] if effects else []
        for i, value in enumerate(values):
            of_its_own = self.graph.output.args[1][i] in self.updated
            if getattr(value._handle, "is_state", False) and not of_its_own:  # as it was before the effects before it
                self.builder.label = effects[i].label
                values[i] = NDArray.empty(value.shape, value.dtype)
                call("copy", [values[i]], x=value)
        begin = len(self.builder.steps)
        for early in (True, False):
            for effect, value in zip(effects, values, strict=True):
                if effect.early == early:
                    self.builder.label = effect.label
                    effect.plan(self.builder, value)
            if early:
                self.builder.early = range(begin, len(self.builder.steps))


def lower_into(builder: Builder, op: Op, ins: list[NDArray], out: NDArray) -> None:
    """Plan an op that writes to memory given to it."""
    found = builder.target.lowering(op)
    if found is None:
        op.into(out, *ins)
    else:
        found[0](builder, op, ins, out)


def lower_plain(
    builder: Builder, op: Op, spec: Any, ins: list[NDArray], home: NDArray | None = None, leaves: bool = False
) -> Any:
    """Plan an op on plain arrays and return its value. home: memory of an input that it may overwrite; leaves: only the
    plan's outputs read it.
    """
    target = builder.target
    lower, makes = target.lowering(op) or (None, not op.has_into())
    if not makes:
        if home is None or not target.holds(op, home, ins, leaves):
            home = target.memory(op, spec, ins, leaves)
        lower_into(builder, op, ins, home)
        return home
    result = op.compute(*ins) if lower is None else lower(builder, op, ins)
    made = result if isinstance(result, tuple | list) else (result,)
    specs = spec if isinstance(spec, tuple) and not isinstance(spec, Spec) else (spec,)
    if result is None or any(a.dtype != s.dtype for a, s in zip(made, specs, strict=False)):
        raise NoKernel(f"[{op.label}] has no kernel for dtype {', '.join(dict.fromkeys(a.dtype for a in ins))}.")
    return result


def missing_kernel(op: Op, inputs: Sequence[Any], device: Device) -> str:
    """Why a plan of the device cannot run an op on inputs of these shapes and dtypes, or ""; found by planning the op alone."""
    complete = target_of(device).complete
    if not all(isinstance(s, Spec) for s in inputs) or (complete and all(s.dtype in complete for s in inputs)):
        return ""
    inputs = filled(op, inputs)
    builder = Builder(ConstantPool(), device)
    with builder.active():
        arrays = [builder.border(INPUT, i, s.shape, s.dtype) for i, s in enumerate(inputs)]
        try:
            lower_plain(builder, op, op.infer(*inputs), arrays)
        except NoKernel as e:
            return str(e)
        except (
            TypeError
        ) as e:  # a lowering that thinks of one dtype; two that never meet are said when the graph is planned
            return "" if len({s.dtype for s in inputs} & set(FLOATS)) > 1 else str(e)
        except Unsupported:  # said with its place when the graph is planned
            pass
    return ""


def filled(op: Op, inputs: Sequence[Spec]) -> Sequence[Spec]:
    """Inputs with elements where the op takes such: for empty ones no kernel is asked, whatever the dtype."""
    full = [Spec(tuple(s or 1 for s in x.shape), x.dtype) for x in inputs]
    try:
        return inputs if all(0 not in x.shape for x in inputs) or op.infer(*full) is None else full
    except Exception:  # sizes among its attributes are of the empty ones
        return inputs


def parameter(node: Node) -> Any:
    return node.meta["tensor"] if isinstance(node.target, str) else node.target


def is_state(node: Node) -> bool:
    """Whether a parameter is written by the graph's effects."""
    return bool(node.meta.get("state"))


def constant_nodes(graph: Graph) -> set[Node]:
    """Parameters that stay as they are, and what is computed from them alone."""
    constant: set[Node] = set()
    for n in graph:
        if (n.kind == "param" and not is_state(n)) or (n.kind == "op" and all(i in constant for i in n.inputs())):
            constant.add(n)
    return constant
