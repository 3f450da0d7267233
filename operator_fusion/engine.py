"""The engine: finds where patterns apply, refuses what is not safe, and writes the new graph."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from needle.autograd import Op
from needle.graph import Graph, GraphModule, Node, symbolic
from needle.nn import Module, Parameter
from needle.ops import TupleGetItem

from .matcher import Match, Pattern
from .measure import deltas
from .report import Fired, FusionReport, NearMiss
from .steps import Step, find_steps, of_parameters

Condition = Callable[[Match], "str | None"]


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One op that stands for several steps.

    pattern: a chain of steps (`Pattern`), or any object with a length and `matches(root, steps)`
    why: what makes the fused op equal to the steps, in one sentence
    replacement: Match -> (the fused op, its input nodes: nodes of the graph, inputs of steps, or new `Node`s over them)
    conditions: each returns None, or the reason why this match may not be fused
    family: a second name, shared by the variants of one table, for `disable`
    sample: () -> (module, input shape) with one match, for the generic test
    """

    name: str
    pattern: Pattern | Any
    replacement: Callable[[Match], tuple[Op, list[Node]]]
    conditions: tuple[Condition, ...] = ()
    family: str = ""
    why: str = ""
    sample: Callable[[], tuple[Module, tuple[int, ...]]] | None = None


REGISTRY: dict[str, Fusion] = {}


def register(fusion: Fusion) -> Fusion:
    """Add a fusion to those that `fuse` uses by default."""
    if not isinstance(fusion, Fusion):
        raise TypeError(f"[fuse] register expects a Fusion, got {type(fusion).__name__}.")
    if fusion.name in REGISTRY:
        raise ValueError(f"[fuse] pattern names are unique, got a second {fusion.name}.")
    REGISTRY[fusion.name] = fusion
    return fusion


def select(patterns: Iterable[Fusion | str] | None, disable: Iterable[str]) -> list[Fusion]:
    """The fusions to use, largest pattern first, then in declaration order."""
    for names in (patterns, disable):
        if isinstance(names, str):
            raise TypeError(f"[fuse] patterns and disable expect lists of names, got {names!r}.")
    wanted = list(REGISTRY.values()) if patterns is None else [f for p in patterns for f in resolve(p)]
    off = {f.name for name in disable for f in resolve(name)}
    kept = {f.name: f for f in wanted if f.name not in off}
    return sorted(kept.values(), key=lambda f: -len(f.pattern))


def resolve(pattern: Fusion | str) -> list[Fusion]:
    """The fusions that a name, a family's name or a Fusion stands for."""
    if isinstance(pattern, Fusion):
        return [pattern]
    found = [f for f in REGISTRY.values() if pattern in (f.name, f.family)]
    if not found:
        families = dict.fromkeys(f.family or f.name for f in REGISTRY.values())
        raise ValueError(f"[fuse] a pattern expects a registered name or one of {', '.join(families)}, got {pattern}.")
    return found


class Plan:
    """Which matches of which fusions a graph gets. A match that is found but refused becomes a near miss."""

    def __init__(self, net: GraphModule, fusions: list[Fusion]) -> None:
        self.net, self.graph = net, net.graph
        self.steps = find_steps(net)
        self.users, self.order = self.steps.users, self.steps.order
        self.taken: dict[Node, tuple[Fusion, Match]] = {}
        self.fired: list[tuple[Fusion, Match]] = []
        self.misses: list[NearMiss] = []
        for fusion in fusions:
            for node in self.graph:
                self._try(fusion, node)
        self.fired.sort(key=lambda f: self.order[f[1].root])

    def _try(self, fusion: Fusion, node: Node) -> None:
        first = None
        for match in fusion.pattern.matches(node, self.steps):
            reason = self._refusal(fusion, match)
            if reason is None:
                self.fired.append((fusion, match))
                self.taken.update(dict.fromkeys(match.nodes, (fusion, match)))
                return
            first = first or (match, reason)
        if first and not self._inside_one(first[0]):
            self.misses.append(NearMiss(fusion.name, node.name, [n.name for n in first[0].nodes], first[1]))

    def _inside_one(self, match: Match) -> bool:
        """True when a larger fusion covers all of the match, which is no miss."""
        return len({id(self.taken.get(n)) for n in match.nodes}) == 1 and match.root in self.taken

    def _refusal(self, fusion: Fusion, match: Match) -> str | None:
        for node in match.nodes:
            if node in self.taken:
                other, at = self.taken[node]
                return f"{node.name} is part of {other.name} at {at.root.name}"
        reason = match.problem or self._hooked(match) or self._used_outside(match)
        if reason:
            return reason
        for condition in fusion.conditions:
            reason = condition(match)
            if reason:
                return reason
        return self._overtaken(match)

    def _hooked(self, match: Match) -> str | None:
        """A fused op calls no layer, so that a layer's hooks would not run."""
        hooked = [n.name for n in match.nodes if n.kind == "module" and self.net.get_submodule(n.target).has_hooks]
        return f"{hooked[0]} has hooks" if hooked else None

    def _used_outside(self, match: Match) -> str | None:
        """What a step computes may not be needed once it is part of the fused op."""
        inside, outputs = set(match.nodes), match.outputs
        for node in (n for n in match.nodes if n not in outputs):
            users = self.users[node]
            if any(u.kind == "output" for u in users):
                return f"{node.name} is an output of the graph"
            others = [u for u in users if u not in inside and not self._size_for(u, inside)]
            if others if match.closed else users[1:]:
                return f"{node.name} has {len(users)} users: {', '.join(u.name for u in users)}"
        if not match.closed:
            for before, step in itertools.pairwise(match.steps.values()):
                if step.inputs.count(before.node) > 1:
                    return f"{step.node.name} reads {before.node.name} twice"
        return None

    def _size_for(self, node: Node, inside: set[Node]) -> bool:
        """A size that only steps of the match use."""
        return node.kind == "scalar" and all(u in inside or self._size_for(u, inside) for u in self.users[node])

    def _overtaken(self, match: Match) -> str | None:
        """The fused op runs where the match ends: nobody in between may use the buffers that a step writes in training."""
        for step in match.steps.values():
            written = {id(t) for t in map(self._tensor, step.inputs) if t is not None and not isinstance(t, Parameter)}
            between = self.graph.nodes[self.order[step.node] + 1 : self.order[match.root]] if step.mode else []
            for node in between:
                if node not in match.nodes and written & self._touched(node):
                    return f"{node.name} uses the statistics of {step.node.name} before {match.root.name}"
        return None

    def _tensor(self, node: Node) -> Any:
        if node.kind != "param":
            return None
        return self.net.tensor(node.target) if isinstance(node.target, str) else node.target

    def _touched(self, node: Node) -> set[int]:
        """Identities of the tensors that a node reads or writes besides its data inputs."""
        own = self.net.get_submodule(node.target).named_tensors() if node.kind == "module" else ()
        return {id(t) for _, t in own} | {id(t) for t in map(self._tensor, node.inputs()) if t is not None}

    def _size_for_taken(self, node: Node) -> bool:
        """A size that only fused steps asked for."""
        return node.kind == "scalar" and bool(self.users[node]) and self._size_for(node, set(self.taken))

    def rewrite(self) -> tuple[Graph, list[Fired]]:
        """The new graph, and a line for each fusion."""
        new, fired = Graph(), []
        done: dict[Node, Node] = {}
        params: dict[Any, Node] = {}  # by path, or by identity of a constant

        def emit(node: Node) -> Node:
            """The new graph's node for one of the old graph, of a layer's recording, or made by a replacement."""
            if node in done:
                return done[node]
            key = None if node.kind != "param" else node.target if isinstance(node.target, str) else id(node.target)
            if key is None or key not in params:
                for i in node.inputs():
                    emit(i)
                made = new.copy_node(node, done)
                if key is not None:
                    params[key] = made
                done[node] = made
            else:
                done[node] = params[key]
            return done[node]

        for node in self.graph:
            if node not in self.taken:
                if not self._size_for_taken(node):
                    emit(node)
                continue
            fusion, match = self.taken[node]
            if node is match.root:
                op, inputs = fusion.replacement(match)
                fused = Node("op", op, tuple(inputs), f"{match.nodes[0].name}_fused")
                covers = [n.name for n in match.nodes]
                fused.meta = {**node.meta, "pattern": fusion.name, "covers": covers}
                made = emit(fused)
                for i, n in enumerate(match.outputs):
                    done[n] = made if len(match.outputs) == 1 else emit(Node("op", TupleGetItem(i), (fused,), n.name))
                checks = [c.__name__.replace("_", " ") for c in fusion.conditions]
                fired.append(Fired(fusion.name, covers, made.name, op.name, match.paths, fusion.why, checks))
        return new, fired


def fuse(
    net: Module,
    patterns: Iterable[Fusion | str] | None = None,
    dry_run: bool = False,
    disable: Iterable[str] = (),
    example: Any = None,
) -> GraphModule:
    """A GraphModule that computes what `net` computes with one op in place of several; `net` is untouched.

    It has the same submodules and Parameter objects (so the same state_dict keys, and one `train()` flag for both), and
    trains exactly as `net` does. A layer's eps and momentum are read now. `.fusion_report` tells what fired and what nearly
    did; with dry_run the graph is not fused. patterns: Fusions or names, default all registered; disable: names.
    A name is a pattern's or a family's. example: inputs on which every fused op is compared with the steps it stands for; the
    largest differences then stand in the report.
    """
    if not isinstance(net, Module):
        raise TypeError(f"[fuse] expects a needle Module, got {type(net).__name__}.")
    source = symbolic(net)
    plan = Plan(source, select(patterns, disable))
    graph, fired = plan.rewrite()
    fused = source.with_graph(graph)
    if example is not None:
        inputs = example if isinstance(example, tuple | list | dict) else (example,)
        fired = [dataclasses.replace(f, delta=d) for f, d in zip(fired, deltas(fused, fired, inputs), strict=True)]
    if dry_run:
        fused = source.with_graph(source.graph.copy())
    calls = count_calls(source.graph), count_calls(graph)
    fused.fusion_report = FusionReport(fired, plan.misses, *calls, describe(plan), dry_run)
    return fused


def count_calls(graph: Graph) -> int:
    """Nodes that compute; what a weight goes through before it is packed is not counted."""
    return sum(n.kind == "module" or (n.kind == "op" and not of_parameters(n)) for n in graph)


def describe(plan: Plan) -> dict[str, tuple[str, str, str]]:
    """For `explain`: node name -> (module path, what it is, what reads it)."""

    def kind(node: Node) -> str:
        step: Step | None = plan.steps.get(node)
        if step is not None:
            return step.op.name
        return type(plan.net.get_submodule(node.target)).__name__ if node.kind == "module" else node.kind

    rows = {}
    for node in plan.graph:
        path = node.target if node.kind == "module" else ""
        rows[node.name] = (path, kind(node), ", ".join(kind(u) for u in plan.users[node]))
    return rows


def explain(net: Module, name: str) -> str:
    """What fusion did with one node or module path of `net`, and why not more; of a net not fused, what it would do."""
    report = getattr(net, "fusion_report", None)
    return (report or fuse(net, dry_run=True).fusion_report).explain(name)
