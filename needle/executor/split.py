"""A graph with calls of other libraries: plans, between which those calls run on the plans' own arrays, without copies."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from needle.autograd import Op
from needle.backend_ndarray import Device, NDArray
from needle.backend_ndarray.device import device_named
from needle.backend_ndarray.ndarray import call, itemsize
from needle.graph import Graph, Node, map_structure

from .builder import PlanInfo
from .constants import ConstantPool, eager
from .planner import Planner, parameter
from .settings import Choice, Measured, Option, unmeasured


def plan_graph(
    graph: Graph, pool: ConstantPool, choice: Choice, device: Device, measured: Measured = unmeasured
) -> PlanInfo | SplitPlan:
    """One plan, or several where other libraries run some of the graph's ops."""
    if any(is_foreign(n) for n in graph):
        return SplitPlan(graph, pool, choice, device, measured)
    return Planner(graph, pool, choice, device, measured).plan()


def in_numpy(op: Op, inputs: Sequence[Any]) -> bool:
    """True for an op that eager calls compute in numpy, for want of kernels for float64."""
    return op.float32_only and any(s.dtype == "float64" for s in inputs)


def is_foreign(node: Node) -> bool:
    """A call of another library, or of numpy."""
    if node.kind != "op":
        return False
    return node.target.library != "needle" or in_numpy(node.target, [a.meta["spec"] for a in node.args])


class Stage:
    """Number `index` of the plans (None where it would be empty) and the foreign calls right after it."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.done: dict[Node, Node] = {}  # of the whole graph -> of this stage's
        self.inputs: list[Node] = []  # of the whole graph
        self.outputs: dict[Node, None] = {}
        self.calls: list[Node] = []
        self.info: PlanInfo | None = None

    def add(self, node: Node, constant: set[Node]) -> Node:
        """The stage's node for one of the whole graph: a copy of a constant and what is under it, else an input."""
        if node not in self.done:
            if node in constant:
                for a in node.inputs():
                    self.add(a, constant)
                self.done[node] = self.graph.copy_node(node, self.done)
            else:
                self.inputs.append(node)
                self.done[node] = self.graph.add("input", node.name, (), node.name)
                self.done[node].meta["spec"] = node.meta["spec"]
        return self.done[node]


class SplitPlan:
    """Runs stages in turn; has what the users of a PlanInfo and of its core ask for."""

    def __init__(self, graph: Graph, pool: ConstantPool, choice: Choice, device: Device, measured: Measured) -> None:
        self.graph, self.core = graph, self
        self.constant: set[Node] = set()
        for node in graph:
            if node.kind == "param" or (
                node.kind == "op" and not is_foreign(node) and self.constant.issuperset(node.inputs())
            ):
                self.constant.add(node)
        self.stages: list[Stage] = []
        self.results: list[Node] = []
        map_structure(graph.output.args[0], lambda n: self.results.append(n) if isinstance(n, Node) else None)
        self.place: dict[Node, int] = {}  # stage of every value that is no constant
        for node in graph:
            self._assign(node)
        for stage in self.stages:
            for node in stage.calls:
                for a in node.args:
                    self._export(a)
        for node in self.results:
            self._export(node, borders=True)
        for stage in self.stages:
            if stage.outputs:
                stage.graph.add("output", "", (tuple(stage.done[n] for n in stage.outputs),), "output")
                stage.info = Planner(stage.graph, pool, choice, device, measured).plan()
        self.parts = [s.info for s in self.stages if s.info]

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _stage(self, index: int) -> Stage:
        while len(self.stages) <= index:
            self.stages.append(Stage())
        return self.stages[index]

    def _assign(self, node: Node) -> None:
        """An op runs in the first plan after everything that it reads."""
        if node.kind != "op" or node in self.constant:
            if node.kind == "input":
                self.place[node] = 0
            return
        read = [n for n in node.inputs() if n not in self.constant]
        before = [self.place[n] + (is_call(n) and not is_call(node)) for n in read]
        index = self.place[node] = max(before, default=0)
        stage = self._stage(index)
        if is_call(node):
            stage.calls.append(node)
            return
        for a in node.inputs():
            if a not in stage.done and a not in self.constant:
                self._export(a)
            stage.add(a, self.constant)
        stage.done[node] = stage.graph.copy_node(node, stage.done)

    def _export(self, node: Node, borders: bool = False) -> None:
        """Make the value of `node` an output of its plan. borders: also parameters and inputs, whose copies are results."""
        if is_call(node) or (node.kind in ("param", "input") and not borders):
            return
        stage = self._stage(self.place.get(node, 0))
        if node.kind != "op" or node in self.constant:
            stage.add(node, self.constant)
        stage.outputs[node] = None

    # -- running -----------------------------------------------------------------------------------------------------

    def _run(self, ins: Sequence[Any], times: list[float] | None = None) -> list[NDArray]:
        env: dict[Node, Any] = {n: wrap(a) for n, a in zip(self.graph.inputs, ins, strict=True)}
        copies: dict[Node, Any] = {}  # results that are inputs
        for stage in self.stages:
            if stage.info is not None:
                refs = [env[n]._ref for n in stage.inputs]
                outs = stage.info.core.run_new(refs)
                if times is not None:
                    times += stage.info.core.profile(outs, refs)
                for n, o in zip(stage.outputs, outs, strict=True):
                    (copies if n.kind == "input" else env)[n] = wrap(o)
            for n in stage.calls:
                start = time.perf_counter()
                arrays = [env[a] if a in env else parameter(a).cached_data for a in n.args]
                env[n] = n.target.compute(*arrays) if n.target.library != "needle" else eager(n.target, arrays)
                if times is not None and is_foreign(n):
                    times.append(time.perf_counter() - start)
        env.update(copies)
        return [env[n] for n in self.results]

    def run_new(self, ins: Sequence[Any]) -> list[Any]:
        return [a._ref for a in self._run(ins)]

    def run(self, outs: Sequence[Any], ins: Sequence[Any]) -> None:
        for out, a in zip(outs, self._run(ins), strict=True):
            call("copy", [wrap(out)], x=a)

    def profile(self, outs: Sequence[Any], ins: Sequence[Any]) -> list[float]:
        times: list[float] = []
        self._run(ins, times)
        return times

    def refresh(self) -> None:
        for p in self.parts:
            p.refresh()

    # -- facts: those of the plans in turn, with one step for every foreign call -----------------------------------------

    def _steps(self) -> list[tuple[PlanInfo | None, Node | None]]:
        found: list[tuple[PlanInfo | None, Node | None]] = []
        for stage in self.stages:
            found += [(stage.info, None)] if stage.info else []
            found += [(None, n) for n in stage.calls if is_foreign(n)]
        return found

    def _join(self, of_plan: str, of_call: Any) -> list[Any]:
        rows: list[Any] = []
        for info, node in self._steps():
            rows += getattr(info, of_plan) if info else [of_call(node)]
        return rows

    @property
    def names(self) -> list[str]:
        return self._join("names", lambda n: n.target.label)

    @property
    def fired(self) -> list[Any]:
        return [line for p in self.parts for line in p.fired]

    @property
    def misses(self) -> list[Any]:
        return [line for p in self.parts for line in p.misses]

    @property
    def labels(self) -> list[str]:
        return self._join("labels", lambda n: n.name)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return self._join("shapes", lambda n: specs(n)[0].shape)

    @property
    def traffic(self) -> list[tuple[int, int]]:
        return self._join("traffic", lambda n: (sum(map(nbytes, n.args)), nbytes(n)))

    @property
    def buffers(self) -> list[Any]:
        """All arenas as one, each behind the one before it."""
        rows, step, offset = [], 0, 0
        for info, _ in self._steps():
            if info is not None:
                moved = (
                    b._replace(first=b.first + step, last=b.last + step, offset=b.offset + offset) for b in info.buffers
                )
                rows += list(moved)
                offset += info.arena_bytes
            step += len(info.names) if info else 1
        return rows

    @property
    def options(self) -> list[Option]:
        rows, step = [], 0
        for info, _ in self._steps():
            rows += [o._replace(step=o.step + step) for o in info.options] if info else []
            step += len(info.names) if info else 1
        return rows

    @property
    def constants(self) -> list[Any]:
        return list({id(c): c for p in self.parts for c in p.constants}.values())

    shared: Sequence[Any] = ()
    own = constants
    arena_bytes = property(lambda self: sum(p.arena_bytes for p in self.parts))
    lower_bound = property(lambda self: sum(p.lower_bound for p in self.parts))
    arenas = property(lambda self: max((p.core.arenas for p in self.parts), default=0))

    def __str__(self) -> str:
        return "\n".join(
            str(info) if node is None else f"{node.target.label}  {node.name}" for info, node in self._steps()
        )


def is_call(node: Node) -> bool:
    """A foreign call, or an item of its results."""
    return is_foreign(node) or (node.kind == "op" and node.target.is_item and is_foreign(node.args[0]))


def wrap(ref: Any) -> NDArray:
    """An NDArray on the device where the core's array is."""
    return NDArray.wrap(ref, device_named(ref.device))


def specs(node: Node) -> list[Any]:
    spec = node.meta["spec"]
    return [spec] if hasattr(spec, "dtype") else list(spec)


def nbytes(node: Node) -> int:
    return sum(math.prod(s.shape) * itemsize(s.dtype) for s in specs(node))
