"""A plan with what it was made from, and the structure of what it gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from needle.autograd import Unsupported, no_grad
from needle.backend_ndarray import Device, NDArray
from needle.graph import Graph, GraphModule, Node, Recorder, map_structure, trace
from needle.graph.report import FusionReport
from needle.graph.steps import count_calls
from needle.interop import array_kind, mirror_whole, mirrored
from needle.nn.functional import GuardError
from needle.nn.module import Module

from .arguments import check_arrays, check_floats, positional
from .builder import PlanInfo
from .constants import ConstantPool, eager, taken_back
from .effects import Write, changes
from .passes import optimize
from .planner import constant_nodes, parameter
from .settings import Choice, unmeasured
from .split import SplitPlan, plan_graph
from .step import JOIN
from .target import target_of
from .tuner import tuned


class Origin(NamedTuple):
    """The op that a plan's steps come from."""

    path: str  # the module of its first parameter, "" where it has none
    flops: int


def origins(graph: Graph, fn: Callable, at: Callable[[Any], Any] = lambda x: x) -> dict[str, Origin]:
    """Every op of a traced graph by its node's name, which labels the plan's steps; at: what sizes, shapes and ops stand for."""
    paths = {id(t): p for p, t in fn.named_tensors()} if isinstance(fn, Module) else {}
    owner: dict[Node, str] = {}  # nodes computed from parameters alone -> module
    found: dict[str, Origin] = {}
    for n in graph:
        if n.kind == "param":
            owner[n] = paths.get(id(n.meta["tensor"]), "").rpartition(".")[0]
        elif n.kind == "op":
            path = next((owner[a] for a in n.args if a in owner), "")
            if all(a in owner for a in n.args):
                owner[n] = path
            out, *inputs = (at(x.meta["spec"]) for x in (n, *n.args))
            found[n.name] = Origin(path, at(n.target).flops(out, *inputs))
    return found


def answered(model: Any, values: Sequence[Any], refused: GuardError) -> Any:
    """What a net gives otherwise for inputs that a guard refuses, in arrays of their library, or its error."""
    if not isinstance(model, GraphModule):
        raise refused
    with no_grad():
        return mirrored(model.answer(list(values), refused), array_kind(values[0]) if values else "needle")


def with_output(graph: Graph, args: tuple, meta: dict[str, Any]) -> Graph:
    """A copy of a graph that gives something else."""

    def output(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node is not graph.output:
            return None
        made = new.add("output", "", map_structure(args, lambda x: done[x] if isinstance(x, Node) else x), "output")
        made.meta = dict(meta)
        return made

    return graph.copy(output)


def evaluated(graph: Graph, arrays: Sequence[NDArray]) -> Iterator[tuple[Node, list, Any]]:
    """Every node of a graph for these inputs, op by op: (node, its inputs' values, its value)."""
    values: dict[Node, Any] = dict(zip(graph.inputs, arrays, strict=True))
    for node in graph:
        given = [values[a] for a in node.args] if node.kind == "op" else []
        if node.kind == "param":
            values[node] = parameter(node).cached_data
        elif node.kind == "op":
            values[node] = eager(node.target, given)
        if node in values:
            yield node, given, values[node]


class CompiledPlan:
    """A plan with the structure of the outputs it computes."""

    specs: Any = ()  # the arguments, with a Spec for every array
    guards: Sequence[Any] = ()  # layers that check values which the plan computes beside its results
    conditions: Graph | None = None  # those values, where the plan writes: nothing may be written before they agree
    condition_plan: PlanInfo | SplitPlan | None = None

    def __init__(
        self, fn: Callable, example: Any, pool: ConstantPool, choice: Choice, inputs: list[NDArray], device: Device
    ) -> None:
        self.device = device
        target_of(device).check(choice, device)
        traced = self.traced(fn, example)
        self.writes = tuple(traced.output.meta["effects"])  # what it does beside its results
        places = [n.meta["tensor"].device for n in traced if n.kind == "param"]
        if any(place != device for place in places):
            other = next(p for p in places if p != device)
            raise ValueError(f"[compile] expects parameters on {device}, got one on {other}.")
        self.modules: list[Module] = traced.output.meta["modules"]
        check_floats(traced, constant_nodes(traced))
        graph, plan, fired = optimize(traced, device, choice.disable)
        self.decomposed = {f"{op} on {device.name}": n for op, n in graph.output.meta["decomposed"].items()}
        self.structure = graph.output.args[0]
        if self.conditions is not None:
            self.condition_plan = plan_graph(optimize(self.conditions, device, choice.disable)[0], pool, choice, device)
        elif self.guards:
            self.structure = self.structure[0]
        self.info = self.planned(graph, pool, choice, inputs)
        if self.writes and isinstance(self.info, SplitPlan):
            raise Unsupported(
                "[compile] a model that writes its buffers expects ops of needle alone, got one that runs elsewhere."
            )
        self._planned = graph, fn
        self.core = self.info.core
        self._rewritten = traced, [*fired, *self.info.fired], [*plan.misses, *self.info.misses]
        fused = getattr(fn, "fusion_report", None)
        self._fused = None if fused is None or fused.dry_run else fused  # a dry run changed nothing

    def planned(self, graph: Graph, pool: ConstantPool, choice: Choice, inputs: list[NDArray]) -> PlanInfo | SplitPlan:
        make = lambda measured: plan_graph(graph, pool, choice, self.device, measured)  # noqa: E731
        if not choice.tune:
            return make(unmeasured)
        with taken_back(pool) if self.writes else nullcontext():
            return tuned(make, inputs, self.device)

    def traced(self, fn: Callable, example: Any) -> Graph:
        """A call of `fn` as a graph, with the buffers that it writes as effects."""
        if not hasattr(fn, "bind"):
            positional(fn, example, {})
        recorder = Recorder(static=True, device=self.device)

        def call(*inputs: Any) -> Any:
            result = map_structure(fn(*inputs), recorder.to_node)
            recorder.effects += [(Write(tensor), value) for tensor, value in recorder.pop_writes()]
            return self.beside(result, recorder)

        try:
            graph = trace(call, *example, recorder=recorder)
        except (AttributeError, TypeError):
            check_arrays(example)
            raise
        changes(graph, (effect.tensor for effect, _ in recorder.effects))
        return self.apart(graph)

    def beside(self, result: Any, recorder: Recorder) -> Any:
        """The result of a recorded call with the values that its guards look at, where there are guards."""
        guards = recorder.pop_guards()
        self.guards = [guard for guard, _ in guards]
        return (result, [recorder.to_node(value) for _, value in guards]) if guards else result

    def apart(self, graph: Graph) -> Graph:
        """The graph without what guards look at where it has effects; that becomes `conditions`."""
        if not self.guards or not graph.output.meta["effects"]:
            return graph
        (result, values), *effects = graph.output.args
        self.conditions = with_output(graph, (values,), {**graph.output.meta, "effects": []}).prune()
        return with_output(graph, (result, *effects), graph.output.meta)

    @functools.cached_property
    def origins(self) -> dict[str, Origin]:
        return origins(*self._planned)

    @property
    def report(self) -> FusionReport:
        """Every rule that fired or nearly did: of `fuse` where that made the model, over the graph, and over the plan."""
        graph, fired, misses = self._rewritten
        users, paths = graph.users(), {k: o.path for k, o in self.origins.items()}
        nodes = {
            n.name: (paths.get(n.name, ""), n.target.label, ", ".join(u.name for u in users[n]))
            for n in graph
            if n.kind == "op"
        }
        before = count_calls(graph)
        if self._fused is not None:
            before, nodes = self._fused.nodes_before, self._fused.nodes | nodes
            fired, misses = [*self._fused.fired, *fired], [*self._fused.near_misses, *misses]
        return FusionReport(fired, misses, before, len(self.info.names), nodes)

    @property
    def infos(self) -> list[PlanInfo | SplitPlan]:
        return [self.info] if self.condition_plan is None else [self.info, self.condition_plan]

    def check_inputs(self, arrays: Sequence[NDArray]) -> None:
        """Raise where guards refuse the inputs of a plan that writes."""
        if self.condition_plan is not None:
            self._check(self.condition_plan.core.run_new([a._ref for a in arrays]))

    def run_new(self, arrays: Sequence[NDArray]) -> list:
        """A run's results in new arrays. Of inputs that a kernel refuses a guard before it may say more."""
        given = [a._ref for a in arrays]
        try:
            return self.core.run_new(given)
        except (IndexError, ValueError):
            if self.guards and self.condition_plan is None:
                traced = self._rewritten[0]
                ((_, looked_at),) = traced.output.args
                graph = with_output(traced, (looked_at,), traced.output.meta).prune()
                found = {node: value for node, _, value in evaluated(graph, arrays)}
                self._check([found[n].numpy() for n in graph.output.args[0]])
            raise

    def check_guards(self, results: list) -> list:
        """A run's results without those that come last, the values that guards look at."""
        if not self.guards or self.condition_plan is not None:
            return results
        count = len(results) - len(self.guards)
        self._check(results[count:])
        return results[:count]

    def _check(self, values: list) -> None:
        for guard, value in zip(self.guards, values, strict=True):
            guard.check(value if isinstance(value, np.ndarray) else NDArray.wrap(value, self.device).numpy())

    def outputs(self, results: list) -> Any:
        """A run's results in the structure that the model returns."""
        if isinstance(self.structure, Node):
            return results[0]
        left = iter(results)
        return map_structure(self.structure, lambda n: next(left) if isinstance(n, Node) else n, mirror_whole)

    def node(self, label: str) -> str:
        """The module that a step's label stands for, or the label."""
        origins = [self.origins.get(part) for part in label.split(JOIN)]
        return JOIN.join(o.path if o and o.path else part for o, part in zip(origins, label.split(JOIN), strict=True))
