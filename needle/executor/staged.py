"""Executables of nets in which values say how large some results are: plans of what lies between, by the sizes that come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from needle.autograd import Tensor, Unsupported
from needle.graph import Dim, Graph, GraphModule, Mode, Node, map_structure
from needle.graph.graph import SCALAR_OPERATORS
from needle.graph.kept import state_kept
from needle.interop import array_kind, as_ndarray, mirror, mirror_whole
from needle.nn.functional import GuardError
from needle.shown import Shown

from .compiled import answered


class Stage(NamedTuple):
    """What is computed up to the next ops that count: `run` gives `results` from `inputs`; then come the ops of `counted`."""

    run: Any
    inputs: list[Node]
    results: list[Node]
    counted: list[Node]


def counts(node: Node) -> bool:
    """Whether a node is the result of an op that counts, or one of its results."""
    return node.kind == "op" and (node.target.counts or (node.target.is_item and counts(node.args[0])))


def levels(graph: Graph) -> dict[Node, int]:
    """How many ops that count lie before each node."""
    found: dict[Node, int] = {}
    for n in graph:
        inner = counts(n) and not n.target.counts  # one of several results, with its op
        found[n] = max((found[i] + (counts(i) and not inner) for i in n.inputs()), default=0)
    return found


def stages(net: GraphModule, make: Callable[[GraphModule], Any]) -> list[Stage]:
    graph, level = net.graph, levels(net.graph)
    result, *effects = graph.output.args
    given = {i for n in leaves(result) for i in (tensors_of(n) if n.kind == "scalar" else [n])}
    beside = list(effects[0]) if effects else []
    own = {n: n.kind in ("op", "module") and not counts(n) for n in graph}
    readers: dict[Node, list[Node]] = {n: [] for n in graph}
    for n in graph:
        for i in tensors_of(n):
            readers[i].append(n)
    made = []
    for k in range(max(level.values()) + 1):
        inside = [n for n in graph if own[n] and level[n] == k]
        chosen = set(inside)
        results = [n for n in inside if any(r not in chosen and (r.kind != "output" or n in given) for r in readers[n])]
        extra = [n for n in beside if n in chosen]
        part, inputs = stage_graph(inside, results, extra)
        counted = [n for n in graph if counts(n) and level[n] == k]
        piece = net.with_graph(part)
        piece.otherwise = None  # which answers for the whole
        made.append(Stage(make(piece) if inside else None, inputs, results, counted))
    return made


def leaves(value: Any) -> list[Node]:
    """The nodes of a result, those of sizes among them."""
    found: list[Node] = []

    def visit(n: Any) -> None:
        if isinstance(n, Node | Dim):
            found.append(n.node if isinstance(n, Dim) else n)

    map_structure(value, visit)
    return found


def tensors_of(node: Node) -> list[Node]:
    """The tensors that a node reads, for their values or their sizes."""
    found = []
    for i in node.inputs():
        found += tensors_of(i) if i.kind == "scalar" else [i]
    return found


def stage_graph(nodes: Sequence[Node], results: Sequence[Node], effects: Sequence[Node]) -> tuple[Graph, list[Node]]:
    """The graph of some nodes, with what they read of others as inputs."""
    graph, done = Graph(), dict[Node, Node]()
    chosen = set(nodes)
    read = dict.fromkeys(i for n in nodes for i in tensors_of(n))
    inputs = [i for i in read if i not in chosen and i.kind != "param"]
    for i in inputs:
        done[i] = graph.add("input", i.name, (), i.name)
        done[i].meta = {k: v for k, v in i.meta.items() if k == "spec"}

    def copied(n: Node) -> None:
        for i in n.inputs():
            if i not in done:
                copied(i)
        done[n] = graph.copy_node(n, done)

    for n in nodes:
        copied(n)
    args = ([done[n] for n in results], [done[n] for n in effects]) if effects else ([done[n] for n in results],)
    graph.add("output", "", args, "output")
    return graph, inputs


class Staged(Shown):
    """Runs such a net as an Executable does; `stages` has the executables, one for what lies between ops that count."""

    def __init__(self, net: GraphModule, make: Callable[[GraphModule], Any]) -> None:
        self.model = net
        self.stages = stages(net, make)

    def prepare(self, example: tuple) -> None:
        """Makes the plans by a first run, which leaves what it writes as it was."""
        with state_kept(self.model):
            self(*example)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.model.bind(args, kwargs)
        kind = array_kind(given[0]) if given else "needle"
        try:
            return self._run(given, kind)
        except GuardError as e:
            return answered(self.model, given, e)

    def __str__(self) -> str:
        runs = [str(s.run) for s in self.stages if s.run is not None]
        return "\n".join([f"{type(self.model).__name__} in {len(self.stages)} stages", *runs])

    def _run(self, given: list[Any], kind: str, seen: Callable[[Any, list[Any]], Any] = lambda run, given: None) -> Any:
        """The result of a call; `seen(executable, inputs)` is called before each stage."""
        env: dict[Node, Any] = {
            n: Tensor.make_const(as_ndarray(v)) for n, v in zip(self.model.graph.inputs, given, strict=True)
        }
        for stage in self.stages:
            if stage.run is not None:
                inputs = [env[n] for n in stage.inputs]
                seen(stage.run, inputs)
                found = stage.run(*inputs)
                env.update((n, Tensor.make_const(as_ndarray(v))) for n, v in zip(stage.results, found, strict=True))
            for n in stage.counted:
                values = [self.value(env, a) for a in n.args]
                env[n] = values[0][n.target.index] if n.target.is_item else n.target.resolve(known(env))(*values)
        size = known(env)
        return map_structure(
            self.model.graph.output.args[0],
            lambda n: mirror(self.value(env, n).realize_cached_data(), kind) if isinstance(n, Node) else size(n),
            mirror_whole,
        )

    def value(self, env: dict[Node, Any], node: Node) -> Any:
        return self.model.constant(node) if node.kind == "param" else env[node]

    def export(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Refused: a file holds one plan for a shape."""
        raise Unsupported("[export] expects results whose sizes are known without values, got a net that counts.")

    def profile(self, *args: Any, rounds: int = 10, **kwargs: Any) -> list[tuple[str, str, float]]:
        """(kernel, node, median seconds) for every step of every stage's plan; what the runs write is taken back."""
        rows: list[tuple[str, str, float]] = []
        with state_kept(self.model):
            bound = self.model.bind(args, kwargs)
            self._run(bound, "needle", lambda run, given: rows.extend(run.profile(*given, rounds=rounds)))
        return rows

    def refresh(self) -> None:
        for stage in self.stages:
            if stage.run is not None:
                stage.run.refresh()


def known(env: dict[Node, Any]) -> Callable[[Any], Any]:
    """The sizes and flags that ops keep open."""

    def size(d: Any) -> Any:
        if not isinstance(d, Dim):
            return d.value() if isinstance(d, Mode) else d
        a, b = d.node.args
        return env[a].shape[b] if d.node.target == "size" else SCALAR_OPERATORS[d.node.target](size(a), size(b))

    return size
