"""The engine: finds where patterns apply, refuses what is not safe, and writes the new graph."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from needle.nn.module import Module, Parameter
from needle.ops.shape.join import TupleGetItem

from .graph import Graph, Node
from .matcher import Match, Pattern
from .report import Fired, NearMiss
from .steps import Steps

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
    suffix: of the new node's name, after that of the first step
    """

    name: str
    pattern: Pattern | Any
    replacement: Callable[[Match], Any]
    conditions: tuple[Condition, ...] = ()
    family: str = ""
    why: str = ""
    sample: Callable[[], tuple[Module, tuple[int, ...]]] | None = None
    suffix: str = "_fused"


class Rules(dict[str, Fusion]):
    """The rules that a room contributes, by name; label: what errors are called by."""

    def __init__(self, label: str = "fuse") -> None:
        super().__init__()
        self.label = label

    def register(self, fusion: Fusion) -> Fusion:
        if not isinstance(fusion, Fusion):
            raise TypeError(f"[{self.label}] register expects a Fusion, got {type(fusion).__name__}.")
        if fusion.name in self:
            raise ValueError(f"[{self.label}] pattern names are unique, got a second {fusion.name}.")
        self[fusion.name] = fusion
        return fusion

    def select(self, patterns: Iterable[Fusion | str] | None = None, disable: Iterable[str] = ()) -> list[Fusion]:
        """The rules to use, largest pattern first, then in declaration order."""
        for names in (patterns, disable):
            if isinstance(names, str):
                raise TypeError(f"[{self.label}] patterns and disable expect lists of names, got {names!r}.")
        wanted = list(self.values()) if patterns is None else [f for p in patterns for f in self.resolve(p)]
        off = {f.name for name in disable for f in self.resolve(name)}
        kept = {f.name: f for f in wanted if f.name not in off}
        return sorted(kept.values(), key=lambda f: -len(f.pattern))

    def resolve(self, pattern: Fusion | str) -> list[Fusion]:
        """The rules that a name, a family's name or a Fusion stands for."""
        if isinstance(pattern, Fusion):
            return [pattern]
        found = [f for f in self.values() if pattern in (f.name, f.family)]
        if not found:
            families = dict.fromkeys(f.family or f.name for f in self.values())
            raise ValueError(
                f"[{self.label}] a pattern expects a registered name or one of {', '.join(families)}, got {pattern}."
            )
        return found


class Rewriting:
    """Which matches of which fusions a graph gets. A match that is found but refused becomes a near miss."""

    def __init__(self, steps: Steps, fusions: Collection[Fusion]) -> None:
        self.steps, self.graph = steps, steps.graph
        self.users, self.order = steps.users, steps.order
        self.taken: dict[Node, tuple[Fusion, Match]] = {}
        steps.taken = self.taken
        self.fired: list[tuple[Fusion, Match]] = []
        self.misses: list[NearMiss] = []
        calls = [n for n in self.graph if n.kind in ("op", "module")]
        for fusion in fusions:
            for node in calls:
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
        hooked = [n.name for n in match.nodes if (layer := self.steps.layer(n)) and layer.has_hooks]
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
            tensors = map(self.steps.tensor, step.inputs)
            written = {id(t) for t in tensors if t is not None and not isinstance(t, Parameter)}
            between = self.graph.nodes[self.order[step.node] + 1 : self.order[match.root]] if step.mode else []
            for node in between:
                if node not in match.nodes and written & self.steps.touched(node):
                    return f"{node.name} uses the statistics of {step.node.name} before {match.root.name}"
        return None

    def _size_for_taken(self, node: Node) -> bool:
        """A size that only fused steps asked for."""
        return node.kind == "scalar" and bool(self.users[node]) and self._size_for(node, set(self.taken))

    def lines(self, made: dict[Node, tuple[str, str]]) -> list[Fired]:
        """What fired; `made`: by a match's last node, the new node's name and its op's label."""
        return [
            Fired(
                fusion.name,
                [n.name for n in match.nodes],
                *made[match.root],
                match.paths,
                fusion.why,
                [c.__name__.replace("_", " ") for c in fusion.conditions],
            )
            for fusion, match in self.fired
        ]

    def rewrite(self, static: bool = False) -> tuple[Graph, list[Fired]]:
        """The new graph, and a line for each fusion; static: shapes are known, and new nodes get theirs."""
        new, names = Graph(), {}
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
                if static and node.kind == "op" and "spec" not in made.meta:
                    made.meta["spec"] = made.target.infer(*(a.meta["spec"] for a in made.args))
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
                fused = Node("op", op, tuple(inputs), match.nodes[0].name + fusion.suffix)
                fused.meta = {**node.meta, "pattern": fusion.name, "covers": [n.name for n in match.nodes]}
                made = emit(fused)
                names[node] = (made.name, op.label)
                for i, n in enumerate(match.outputs):
                    done[n] = made if len(match.outputs) == 1 else emit(Node("op", TupleGetItem(i), (fused,), n.name))
        return new, self.lines(names)
