"""`fuse` and `explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from needle.graph import Graph, GraphModule, Node, symbolic
from needle.graph.engine import Fusion, Rewriting, Rules
from needle.graph.report import FusionReport, Vertex
from needle.graph.steps import Step, Steps, count_calls, find_steps, passes_on
from needle.nn import Module

from .measure import deltas

REGISTRY = Rules()


def register(fusion: Fusion) -> Fusion:
    """Add a fusion to those that `fuse` uses by default."""
    return REGISTRY.register(fusion)


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
    original = symbolic(net)
    chosen, other = REGISTRY.select(patterns, disable), original.in_other_mode
    fused = fused_graph(original, chosen, dry_run, example)
    return fused.with_modes(None if other is None else fused_graph(other, chosen, dry_run))


def fused_graph(original: GraphModule, chosen: Sequence[Fusion], dry_run: bool, example: Any = None) -> GraphModule:
    """`fuse` of a net in its present mode."""
    source = original.with_graph(without_identities(original))
    plan = Rewriting(find_steps(source), chosen)
    graph, fired = plan.rewrite()
    fused = source.with_graph(graph)
    if example is not None:
        inputs = example if isinstance(example, tuple | list | dict) else (example,)
        fired = [dataclasses.replace(f, delta=d) for f, d in zip(fired, deltas(fused, fired, inputs), strict=True)]
    if dry_run:
        fused = original.with_graph(original.graph.copy())
    calls = count_calls(original.graph), count_calls(graph)
    rows = describe(find_steps(original))
    graphs = vertices(original.graph, rows), vertices(graph, rows)
    fused.fusion_report = FusionReport(fired, plan.misses, *calls, rows, dry_run, graphs, source._title)
    return fused


def without_identities(net: GraphModule) -> Graph:
    """The graph in which what reads an identity, such as a dropout that a library left out, reads the identity's input."""

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        layer = net.get_submodule(node.target) if node.kind == "module" else None
        return done[node.args[0]] if passes_on(node, layer) else None

    return net.graph.copy(replace)


def vertices(graph: Graph, rows: Mapping[str, tuple[str, str, str]]) -> list[Vertex]:
    """What a drawing shows of a graph: its calls, inputs and results, without parameters and sizes."""
    found: dict[str, Vertex] = {}
    for node in graph:
        if node.kind not in ("param", "scalar"):
            op = node.target.label if node.kind == "op" else rows[node.name][1] if node.name in rows else node.kind
            path, read = (node.target if node.kind == "module" else ""), dict.fromkeys(n.name for n in node.inputs())
            found[node.name] = Vertex(node.name, op, path, tuple(n for n in read if n in found))
    return list(found.values())


def describe(steps: Steps) -> dict[str, tuple[str, str, str]]:
    """For `explain`: node name -> (module path, what it is, what reads it)."""

    def kind(node: Node) -> str:
        step: Step | None = steps.get(node)
        if step is not None:
            return step.op.name
        return type(layer).__name__ if (layer := steps.layer(node)) else node.kind

    rows = {}
    for node in steps.graph:
        path = node.target if node.kind == "module" else ""
        rows[node.name] = (path, kind(node), ", ".join(kind(u) for u in steps.users[node]))
    return rows


def explain(net: Module, name: str) -> str:
    """What fusion did with one node or module path of `net`, and why not more; of a net not fused, what it would do.

    KeyError for a name that is neither.
    """
    report = getattr(net, "fusion_report", None)
    return (report or fuse(net, dry_run=True).fusion_report).explain(name)
