"""What became of every captured call, as data and as a table; filled while the rules run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from needle.autograd import Op, Tensor
from needle.complex_numbers import Complex
from needle.graph import Symbol
from needle.nn.module import Module

from ..capture.cells import Cell
from ..capture.flags import TrainingFlag
from ..capture.interpret import Interpreter
from ..capture.nodes import node_location
from ..report import Call, table
from ..rules.registry import COMPLEX_RULES, find_function_rule, find_module_rule, target_name

ARGS_WIDTH = 48  # characters of a call's arguments in the table


class TraceLog(list[Call]):
    """One `Call` per captured node, in order; printed as a table."""

    def __str__(self) -> str:
        head = ["step", "op", "name", "target", "args", "needle"]
        rows = [[str(c.step), c.kind, c.name, c.target, c.args, c.needle] for c in self]
        if any(c.shape is not None for c in self if c.kind != "get_attr"):
            head.append("shape")
            rows = [[*r, "" if c.shape is None else str(c.shape)] for r, c in zip(rows, self, strict=True)]
        return "\n".join(table(head, rows))

    __repr__ = __str__


def short_text(value: Any) -> str:
    """An argument as it is shown: nodes by name, tensors by shape."""
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(short_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(short_text, value))}]"
    if isinstance(value, slice):
        return ":".join("" if v is None else short_text(v) for v in (value.start, value.stop, value.step)).removesuffix(
            ":"
        )
    if isinstance(value, TrainingFlag):
        return "training"
    return str(value) if isinstance(value, fx.Node) else repr(value)


def arguments(node: fx.Node) -> str:
    text = ", ".join([*map(short_text, node.args), *(f"{k}={short_text(v)}" for k, v in node.kwargs.items())])
    return text if len(text) <= ARGS_WIDTH else text[: ARGS_WIDTH - 3] + "..."


class LoggingInterpreter(Interpreter):
    """Adds a `Call` to the report for every node; `done` is called after each."""

    def __init__(self, *args: Any, root: Module, done: Callable[[], Any]) -> None:
        super().__init__(*args)
        self.root, self.done = root, done

    def run(self, inputs: dict[str, Any]) -> Any:
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                self.log(node, f"input {node.target}", inputs[str(node.target)], [])
        result = super().run(inputs)
        last = self.captured.graph.output_node()
        if self.report.calls[-1].name != last.name:  # else it failed, and fail() logged it
            self.log(last, "output", None, [])
        return result

    def call(self, node: fx.Node) -> Cell:
        first = len(self.recorder.graph.nodes)
        cell = super().call(node)
        made = self.recorder.graph.nodes[first:]
        names = [n.target.name for n in made if isinstance(n.target, Op)]
        names += [type(self.root.get_submodule(n.target)).__name__ for n in made if n.kind == "module"]
        names = names or list(dict.fromkeys(n.target for n in made if n.kind == "scalar"))
        nodes = [n.name for n in made if n.kind != "param"]
        what = ", ".join(names) or ("unchanged" if isinstance(cell.value, Tensor | Complex) else "Python")
        self.log(node, what, cell.value, nodes)
        return cell

    def get_attr(self, node: fx.Node) -> Cell:
        cell = super().get_attr(node)
        parts = [cell.value.real, cell.value.imag] if isinstance(cell.value, Complex) else [cell.value]
        names = [p.node.name for p in parts if isinstance(p, Symbol)]
        self.log(node, "parameter" if names else "Python", cell.value, names)
        return cell

    def fail(self, node: fx.Node, e: Exception) -> None:
        super().fail(node, e)
        self.log(node, "unsupported", None, [])

    def rule_name(self, node: fx.Node) -> str:
        if node.op == "call_module":
            rule = find_module_rule(self.module(node))
        else:
            complex_ones = any(isinstance(self.env[n].value, Complex) for n in node.all_input_nodes if n in self.env)
            rules = COMPLEX_RULES if complex_ones else None
            rule = find_function_rule(self.target(node), rules) if node.op.startswith("call") else None
        return f"{rule.__module__}.{rule.__qualname__}" if rule else ""

    def log(self, node: fx.Node, needle: str, value: Any, nodes: list[str]) -> None:
        spec = value.spec if isinstance(value, Symbol) else None
        self.report.calls.append(
            Call(
                step=len(self.report.calls),
                kind=node.op,
                name=node.name,
                target=target_name(self.target(node)) if node.op.startswith("call") else str(node.target),
                args=arguments(node),
                needle=needle,
                shape=None if spec is None else tuple(spec.shape),
                path=self.path(node),
                location=node_location(node) if node.op.startswith("call") else "",
                rule=self.rule_name(node),
                nodes=nodes,
            )
        )
        self.done()
