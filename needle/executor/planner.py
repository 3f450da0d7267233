"""Planner: from a traced graph to a plan. Decides layout, in-place ops and concat slices, then lowers node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needle.autograd import Op, Spec, Tensor, TensorTuple, Unsupported
from needle.backend_ndarray import FLOATS, Device, NoKernel, cpu
from needle.backend_ndarray.ndarray import NDArray, call, itemsize
from needle.graph import Graph, Node, map_structure
from needle.ops.algorithms import Choice, Measured, unmeasured
from needle.ops.join import TupleGetItem

from .builder import ARENA, BLOCK, INPUT, OUTPUT, Builder, PlanInfo
from .constants import ConstantPool
from .merge import NO_HALO, Halo
from .verify_plan import Value


class Planner:
    """Plans one graph at its traced shapes."""

    def __init__(
        self,
        graph: Graph,
        pool: ConstantPool,
        choice: Choice,
        measured: Measured = unmeasured,
        device: Device | None = None,
    ) -> None:
        self.graph, self.builder = graph, Builder(pool, choice, measured, device)
        self.order = {n: i for i, n in enumerate(graph)}
        self.users = graph.users()
        self.constant = constant_nodes(graph)
        self.is_blocked: dict[Node, bool] = {}
        self.home: dict[Node, Node] = {}  # the node whose memory a value lives in
        self.slot: dict[Node, tuple[Node, int]] = {}  # home -> (concat, first channel)
        self.group: dict[Node, set[Node]] = {}  # home -> every value in the same memory
        self.borrowed: set[Node] = set()  # views of memory that nobody may write: inputs, constants, plain copies
        self.plain: dict[Node, NDArray] = {}
        self.blocked: dict[Node, NDArray] = {}
        self.born: dict[tuple[Node, bool], int] = {}  # the step after which a value is there, plain or blocked

    def plan(self) -> PlanInfo:
        for node in self.graph:
            if node.kind == "op" and node not in self.constant:
                self.is_blocked[node] = self._wants_blocked(node)
                self._choose_home(node)
        with self.builder.active():
            inputs = [self._enter(n, i) for i, n in enumerate(self.graph.inputs)]
            for node in self.graph:
                if node.kind == "param":
                    self.plain[node] = self.builder.constant(self.builder.pool.parameter(parameter(node)))
                elif node.kind == "op":
                    self.builder.label = node.name
                    self._lower(node)
            outputs = self._leave()
        return self.builder.finish(inputs, outputs)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _wants_blocked(self, node: Node) -> bool:
        """True where the value of `node` should be nChw16c."""
        op, spec = node.target, node.meta["spec"]
        if not self.builder.packs or op.layout == "plain" or (isinstance(spec, tuple) and not isinstance(spec, Spec)):
            return False
        if spec.ndim != 4 or any(n.meta["spec"].dtype != "float32" for n in (node, *node.args)):
            return False
        if op.layout == "blocked":
            return all(n in self.constant for i, n in enumerate(node.args) if op.is_weight(i))
        if not any(self.is_blocked.get(n) for n in node.args):
            return False
        channels = spec.shape[1]
        if not op.zero_is_safe and channels % BLOCK:
            return False
        return op.accepts_blocked(*(n.meta["spec"] for n in node.args))

    def _choose_home(self, node: Node) -> None:
        """Place the value of `node` in the memory of an input, in a concat's slice, or in memory of its own."""
        op = node.target
        self.home[node], self.group[node] = node, {node}
        if op.aliases(node.meta["spec"], *(n.meta["spec"] for n in node.args)):
            self._join(node, node.args[0])
            if node.args[0] not in self.home:
                self.borrowed.add(node)
        elif op.is_view:
            for x in node.args:
                self._share(node, x)
        elif op.in_place:
            for x in node.args:
                if self._can_overwrite(x, node):
                    self._join(node, x)
                    break
        if op.joins_channels and self.is_blocked[node]:
            self._place_slices(node)

    def _join(self, node: Node, x: Node) -> None:
        if x in self.home and self.is_blocked.get(x) == self.is_blocked[node]:
            home = self.home[x]
            self.home[node] = home
            self.group[home].add(node)
            self.group[node] = self.group[home]

    def _share(self, node: Node, x: Node) -> None:
        """A view lives in its input's memory, in a shape of its own."""
        if x not in self.home or self.is_blocked.get(x):
            self.borrowed.add(node)
            return
        merged = self.group[self.home[x]] | {node}
        for m in merged:
            self.group[m] = merged

    def _can_overwrite(self, x: Node, node: Node) -> bool:
        if x not in self.home or self.is_blocked.get(x) != self.is_blocked[node]:
            return False
        if x.meta["spec"] != node.meta["spec"] or node.args.count(x) > 1:
            return False
        here, group = self.order[node], self.group[self.home[x]]
        if not self.borrowed.isdisjoint(group) or any(a in group for a in node.args if a is not x):
            return False
        return all(self.order[u] <= here for m in group for u in self.users[m])

    def _place_slices(self, concat: Node) -> None:
        offset = 0
        for x in concat.args:
            home = self.home.get(x)
            free = home not in self.slot and concat.args.count(x) == 1
            # A value may live in the slice only if all of its memory has the concat's height and width.
            aligned = x.meta["spec"].shape[1] % BLOCK == 0 and offset % BLOCK == 0
            if home is not None and free and aligned and self.is_blocked.get(home):
                self.slot[home] = (concat, offset)
                merged = self.group[home] | self.group[concat]
                for m in merged:
                    self.group[m] = merged
            offset += x.meta["spec"].shape[1]

    def _halo(self, node: Node) -> Halo:
        """The zero ring that the readers of a value, and of everything that shares its memory, need around it."""
        halo = NO_HALO
        for member in self.group.get(node, {node}):
            for user in self.users[member]:
                if self.is_blocked.get(user):
                    for i, x in enumerate(user.args):
                        if x is member:
                            need = user.target.halo(i, user.meta["spec"], *(a.meta["spec"] for a in user.args))
                            halo = tuple(map(max, halo, need))  # type: ignore[assignment]
        return halo

    # -- lowering ----------------------------------------------------------------------------------------------------

    def _enter(self, node: Node, index: int) -> tuple[tuple[int, ...], str]:
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
        spec = node.meta["spec"]
        blocked = self.is_blocked[node]
        if blocked:
            images = [n.meta["spec"].ndim == 4 and not op.is_weight(i) for i, n in enumerate(node.args)]
            ins = [self._as_blocked(n) if b else self.plain[n] for n, b in zip(node.args, images, strict=True)]
            specs = [n.meta["spec"] for n in node.args]
            self.builder.halos = {id(x): op.halo(i, spec, *specs) for i, x in enumerate(ins) if images[i]}
        else:
            images = [False] * len(node.args)
            ins = [self._as_plain(n) for n in node.args]
        for n, image in zip(node.args, images, strict=True):
            self._read(n, image)
        home = self.home[node]
        if home is not node and op.aliases(spec, *(n.meta["spec"] for n in node.args)):
            (self.blocked if blocked else self.plain)[node] = ins[0]
        elif blocked:
            out = self.blocked[home] if home is not node else self._allocate(node)
            self.blocked[node] = out
            op.lower(self.builder, ins, out)
        else:
            leaves = all(u.kind == "output" for u in self.users[node])
            place = None if home is node else self.plain[home]
            self.plain[node] = lower_plain(self.builder, op, spec, ins, place, leaves)
        self.builder.halos = {}
        self._made(node, blocked)

    def _made(self, node: Node, blocked: bool) -> None:
        """The value of `node` is there after the steps so far."""
        self.born[node, blocked] = len(self.builder.steps) - 1

    def _read(self, node: Node, blocked: bool) -> None:
        """The next step reads the value of `node`."""
        value = (self.blocked if blocked else self.plain)[node]
        if isinstance(value, NDArray) and value._handle.is_made:
            self.builder.values.append(Value(value, self.born.get((node, blocked), -1), len(self.builder.steps)))

    def _derive(self, node: Node) -> NDArray:
        """The value of a node that depends on parameters only."""
        op, args = node.target, node.args
        key: tuple = ("op", op.name, repr(op.attributes()))
        make = lambda *arrays: eager(op, arrays)  # noqa: E731
        if isinstance(op, TupleGetItem):
            whole, args = args[0].target, args[0].args
            key = (*key, whole.name, repr(whole.attributes()))
            make = lambda *arrays: eager(whole, arrays)[op.index]  # noqa: E731
        return self.builder.derive(key, make, *(self.plain[n] for n in args))

    def _allocate(self, node: Node) -> NDArray:
        """Memory for a blocked value, its halo zeroed: its slice of a concat, or a buffer of its own."""
        if node in self.blocked:
            return self.blocked[node]
        spec = node.meta["spec"]
        if node in self.slot:
            concat, channel = self.slot[node]
            whole = self._allocate(self.home[concat])
            return whole[:, channel // BLOCK : (channel + spec.shape[1]) // BLOCK]
        halo = self._halo(node)
        out = self.builder.blocked(spec.shape, halo)
        self.blocked[node] = out
        self._zero(out, halo)
        return out

    def _zero(self, out: NDArray, halo: Halo) -> None:
        if any(halo):
            top, left, bottom, right = halo
            call("zero_halo", [out], top=top, bottom=bottom, left=left, right=right)

    def _as_plain(self, node: Node) -> NDArray:
        """The value as a plain (N, C, H, W) array."""
        if node not in self.plain:
            self.plain[node] = NDArray.empty(node.meta["spec"].shape)
            self._read(node, True)
            call("from_blocked", [self.plain[node]], x=self.blocked[node])
            self._made(node, False)
        return self.plain[node]

    def _as_blocked(self, node: Node) -> NDArray:
        """The value as nChw16c (or one block of C < 16 channels) with the halo that its readers need."""
        if node not in self.blocked:
            spec, halo = node.meta["spec"], self._halo(node)
            block = spec.shape[1] if self._stem(node) else BLOCK
            self.blocked[node] = out = self.builder.blocked(spec.shape, halo, block)
            self._zero(out, halo)
            self._read(node, False)
            call("to_blocked", [out], x=self.plain[node])
            self._made(node, True)
        return self.blocked[node]

    def _stem(self, node: Node) -> bool:
        """Few channels and read as a convolution's image only: one narrow block instead of zero-padded channels."""
        readers = [u for u in self.users[node] if self.is_blocked.get(u)]
        return node.meta["spec"].shape[1] < BLOCK and all(
            node not in u.args[1:] and u.target.reads_narrow_blocks(*(a.meta["spec"] for a in u.args)) for u in readers
        )

    def _leave(self) -> list[tuple[tuple[int, ...], str]]:
        """Write the graph's outputs; a value whose memory is all its own becomes the output without a copy."""
        borders: list[tuple[tuple[int, ...], str]] = []
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
                call("from_blocked", [out], x=self.blocked[node])

        map_structure(self.graph.output.args[0], lambda n: write(n) if isinstance(n, Node) else None)
        return borders


def lower_plain(
    builder: Builder, op: Op, spec: Any, ins: list[NDArray], home: NDArray | None = None, leaves: bool = False
) -> Any:
    """Plan an op on plain arrays and return its value. home: memory of an input that it may overwrite; leaves: only the
    plan's outputs read it.
    """
    if op.has_own_lowering() and not (op.layout == "blocked" and builder.packs):
        if home is None or not (home.is_compact() or (op.layout == "any" and is_channels_last(home))):
            home = plain_memory(builder, op, spec, ins, leaves)
        op.lower(builder, ins, home)
        return home
    result = op.plan(builder, ins)
    made = result if isinstance(result, tuple | list) else (result,)
    specs = spec if isinstance(spec, tuple) and not isinstance(spec, Spec) else (spec,)
    if result is None or any(a.dtype != s.dtype for a, s in zip(made, specs, strict=False)):
        raise NoKernel(f"[{op.label}] has no kernel for dtype {', '.join(dict.fromkeys(a.dtype for a in ins))}.")
    return result


def plain_memory(builder: Builder, op: Op, spec: Any, ins: list[NDArray], leaves: bool) -> NDArray:
    """Memory for a result. From a convolution on, images of GPUs lie in the order (N, H, W, C), in which their kernels read
    four channels at once.
    """
    follows = op.layout == "any" and any(map(is_channels_last, ins))
    if builder.packs or spec.ndim != 4 or leaves or not (op.layout == "blocked" or follows):
        return NDArray.empty(spec.shape, spec.dtype)
    n, c, h, w = spec.shape
    return NDArray.empty((n, h, w, c), spec.dtype).permute((0, 3, 1, 2))


def is_channels_last(array: NDArray) -> bool:
    """An image (N, C, H, W) that lies in memory as (N, H, W, C), not as (N, C, H, W)."""
    return array.ndim == 4 and not array.is_compact() and array.permute((0, 2, 3, 1)).is_compact()


def missing_kernel(op: Op, inputs: Sequence[Any], device: Device) -> str:
    """Why a plan of the device cannot run an op on inputs of these shapes and dtypes, or ""; found by planning the op alone.
    The CPU lacks nothing for float32.
    """
    if not all(isinstance(s, Spec) for s in inputs) or (device == cpu() and all(s.dtype == "float32" for s in inputs)):
        return ""
    builder = Builder(ConstantPool(), device=device)
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


def parameter(node: Node) -> Tensor:
    return node.meta["tensor"] if isinstance(node.target, str) else node.target


def constant_nodes(graph: Graph) -> set[Node]:
    """Parameters and what is computed from them alone."""
    constant: set[Node] = set()
    for n in graph:
        if n.kind == "param" or (n.kind == "op" and all(i in constant for i in n.inputs())):
            constant.add(n)
    return constant


def eager(op: Op, arrays: Sequence[NDArray]) -> Any:
    make = lambda a: TensorTuple._from_data(a) if isinstance(a, tuple) else Tensor.make_const(a)  # noqa: E731
    return op(*map(make, arrays)).cached_data
