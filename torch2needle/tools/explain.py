"""`explain`: what became of one module, node or captured call."""

from __future__ import annotations

import difflib
from typing import Any

from needle.executor import Executable
from needle.graph import GraphModule, Node
from needle.graph.graph import describe_target
from needle.nn.module import Module

from ..report import Call, Report


def report_of(net: Any) -> Report:
    report = getattr(net, "report", None)
    return report if isinstance(report, Report) else Report()


def source_line(net: Any, node: Node) -> str:
    """The user's file:line that a node, or the last call that a fused node covers, comes from; "" where unknown."""
    names = {node.name, *node.meta.get("covers", ())[-1:]}
    return next((c.location for c in report_of(net).calls if names.intersection(c.nodes)), "")


def below(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def explain(net: Any, name: str) -> str:
    """What became of a module's path (and all below it), a node of the graph, or a captured call, of a converted net.

    For each call: torch's operation, the user's line, the rule, the needle layer or ops, training flags; and what fusion did
    with it, or would do where `net` is not fused, and why not more. Raises KeyError for a name that is none of these.
    """
    net = net.model if isinstance(net, Executable) else net
    if not isinstance(net, GraphModule):
        raise TypeError(f"[explain] expects a converted GraphModule or its Executable, got {type(net).__name__}.")
    report = report_of(net)
    node = next((n for n in net.graph if n.name == name), None)
    names = {name, *(node.meta.get("covers", ()) if node else ())}
    calls = [
        c for c in report.calls if c.kind.startswith("call") and (names & {c.name, *c.nodes} or below(c.path, name))
    ]
    found = [call_text(c, net, report) for c in calls]
    if not found:  # no call of a conversion: a loaded net, an input or a parameter
        nodes = [n for n in net.graph if n.name == name or below(n.target if n.kind == "module" else "", name)]
        found = [node_text(n, net) for n in nodes]
    found += fusion_text(net, [name, *(n for c in calls for n in c.nodes)])
    if not found:
        raise KeyError(f"[explain] expects a module's path or a node's name, got {name}{nearest(net, report, name)}.")
    return "\n".join(found)


def call_text(call: Call, net: GraphModule, report: Report) -> str:
    where = f" at {call.location}" if call.location else ""
    made = f" (node {', '.join(call.nodes)})" if call.nodes else ""
    rule = f" by {call.rule}" if call.rule else ""
    label = call.path if call.kind == "call_module" else f"{call.name} in {call.path or 'the model'}"
    lines = [f"{label}: {call.target}({call.args}){where} became {layer_text(call, net)}{rule}{made}"]
    if call.shape is not None:
        lines.append(f"  shape {call.shape} in the example")
    paths = [n.meta["path"] for n in net.graph if n.name in call.nodes and "path" in n.meta]
    for path in dict.fromkeys([*paths, *([call.path] if call.kind == "call_module" else [])]):
        layer = find_layer(net, path)
        if layer is not None and layer.mode_dependent:
            lines.append(
                f"  {path} follows train() and eval(); it is in {'training' if layer.training else 'evaluation'}"
            )
    flags = [
        f for f in report.follows_mode + report.constant_flags if f.startswith(f"{call.target} at {call.location}")
    ]
    return "\n".join(lines + [f"  {f}" for f in dict.fromkeys(flags)])


def layer_text(call: Call, net: GraphModule) -> str:
    layer = find_layer(net, call.path) if call.kind == "call_module" else None
    return repr(layer) if layer is not None and type(layer).__name__ == call.needle else call.needle


def find_layer(net: Module, path: str) -> Any:
    try:
        return net.get_submodule(path)
    except KeyError:
        return None


def node_text(node: Node, net: GraphModule) -> str:
    users = ", ".join(u.name for u in net.graph.users()[node]) or "nothing"
    what = repr(net.get_submodule(node.target)) if node.kind == "module" else describe_target(node)
    return f"{node.name}: {node.kind} {what}, read by {users}"


def fusion_text(net: GraphModule, names: list[str]) -> list[str]:
    """What fusion did, or would do where the net is not fused, with the first of `names` that it knows."""
    import operator_fusion

    for name in names:
        try:
            return ["fusion: " + line for line in operator_fusion.explain(net, name).splitlines()]
        except KeyError:
            continue
    return []


def nearest(net: GraphModule, report: Report, name: str) -> str:
    known = {p for p, _ in net.named_modules() if p} | {n.name for n in net.graph}
    known |= {n for c in report.calls for n in (c.name, *c.nodes)}
    close = difflib.get_close_matches(name, sorted(known), n=3)
    return f"; nearest: {', '.join(close)}" if close else ""
