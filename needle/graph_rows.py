"""Nodes of a graph as rows of JSON, and back. Values are numbers, strings, null, lists, and one-key objects for the rest."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container
from dataclasses import Field, fields
from typing import Any

import numpy as np

from .autograd import OPS, Deferred, Op, Tensor
from .complex_numbers import Complex
from .graph import Dim, Graph, Mode, Node
from .graph.graph import KINDS, SCALAR_OPERATORS
from .graph.inputs import META, check_meta
from .graph.structure import as_record, is_record, members
from .nn.module import Module


class Encoder:
    def __init__(self, taken: Container[str]) -> None:
        self.index: dict[Node, int] = {}
        self.taken = taken  # names that the module's tensors have
        self.constants: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}  # of constants, by identity

    def rows(self, graph: Graph) -> list[dict[str, Any]]:
        self.index = {n: i for i, n in enumerate(graph)}
        return [self.node(n) for n in graph]

    def constant(self, t: Tensor) -> str:
        if id(t) not in self.names:
            free = (f"constant {i}" for i in itertools.count(len(self.names)))
            name = next(n for n in free if n not in self.taken and n not in self.constants)
            self.names[id(t)], self.constants[name] = name, t
        return self.names[id(t)]

    def value(self, v: Any) -> Any:
        v = v.item() if isinstance(v, np.generic) else v
        if v is None or isinstance(v, bool | int | float | str):
            return v
        if isinstance(v, Node):
            return {"node": self.index[v]}
        if isinstance(v, Dim):
            return {"dim": self.index[v.node]}
        if isinstance(v, Mode):
            return {"mode": v.path}
        if isinstance(v, Op):
            return {"op": [v.name, {k: self.value(x) for k, x in v.attributes().items()}]}
        if hasattr(v, "_make") and not any(n.startswith("_") for n in v._fields):
            return {"fields": ["tuple", type(v).__name__, [[k, self.value(x)] for k, x in v._asdict().items()]]}
        if isinstance(v, Complex):
            return {"complex": [self.value(v.real), self.value(v.imag)]}
        if isinstance(v, tuple):
            return {"tuple": [self.value(x) for x in v]}
        if is_record(v):
            kind = "dict" if isinstance(v, dict) else "class"
            return {"fields": [kind, type(v).__name__, [[k, self.value(x)] for k, x in members(v).items()]]}
        if isinstance(v, list):
            return [self.value(x) for x in v]
        if isinstance(v, dict):
            return {"dict": [[k, self.value(x)] for k, x in v.items()]}
        if isinstance(v, slice):
            return {"slice": [self.value(x) for x in (v.start, v.stop, v.step)]}
        if v is Ellipsis:
            return {"ellipsis": 0}
        raise ValueError(f"[save] a graph holds a value that cannot be written, got {type(v).__name__}.")

    def node(self, n: Node) -> dict[str, Any]:
        target: Any = n.target
        if isinstance(target, Op):
            if target.library != "needle":
                raise ValueError(
                    f"[save] expects ops of needle alone, got {target.label}, which {target.library} runs ({n.name})."
                )
            target = self.value(target)["op"]
        elif isinstance(target, Tensor):
            target = {"constant": self.constant(target)}
        row = {"kind": n.kind, "target": target, "args": self.value(n.args), "name": n.name}
        return row | {k: self.value(n.meta[k]) for k in META if k in n.meta}


TYPES: dict[str, Any] = {"int": int, "float": int | float, "bool": bool, "str": str, "tuple": tuple}


def checked_attribute(cls: type[Op], field: Field, value: Any) -> Any:
    """An attribute of an op, which is what the op's class says it is, or is known only when the op runs."""
    value = tuple(value) if field.type == "tuple" and isinstance(value, list) else value
    kind = TYPES.get(str(field.type), object)
    if not isinstance(value, kind | Deferred) or (isinstance(value, bool) and kind is TYPES["int"]):
        raise ValueError(f"{cls.__name__} expects {field.type} as {field.name} and got {value}")
    return value


FUSED_BEFORE = re.compile(r"Fused(?:BatchNormActivation|(\w+?)(?:2d)?(?:Activation|BatchNorm(?:2d)?))")


def as_today(name: str, attributes: dict[str, Any], inputs: int) -> tuple[str, dict[str, Any]]:
    """The name and attributes of an op of an earlier release, which had a class for each fused layer: FusedConv2dActivation,
    FusedLinearBatchNorm, ... A file gives it this number of inputs.
    """
    found = None if name in OPS else FUSED_BEFORE.fullmatch(name)
    if found is None:
        return name, attributes
    base = OPS.get(f"{found[1]}2d") or OPS.get(str(found[1]))
    own = {f.name for f in fields(base)} if base else set()  # type: ignore[arg-type]
    rest = {k: v for k, v in attributes.items() if k not in own}
    layer = base(**{k: v for k, v in attributes.items() if k in own}) if base else None
    return "FusedLayer", {"base": layer, "has_bias": base is not None and inputs == 3, **rest}


class Decoder:
    """Rows of the file as nodes of a graph. What it is given may be anything that JSON can hold."""

    def __init__(self, root: Module, tensors: Container[str], constants: dict[str, Tensor]) -> None:
        self.graph, self.root = Graph(), root
        self.tensors, self.constants = tensors, constants

    def earlier(self, index: Any) -> Node:
        if type(index) is not int or not 0 <= index < len(self.graph.nodes):
            raise ValueError(f"node {len(self.graph.nodes)} reads node {index!r}")
        return self.graph.nodes[index]

    def value(self, v: Any) -> Any:
        if isinstance(v, list):
            return [self.value(x) for x in v]
        if not isinstance(v, dict):
            return v
        ((key, x),) = v.items()
        if key == "node":
            return self.earlier(x)
        if key == "dim":
            if self.earlier(x).kind != "scalar":
                raise ValueError(f"node {x} is no size")
            return Dim(self.earlier(x), self.graph)
        if key == "mode":
            return Mode(self.root.get_submodule(x), x)
        if key == "op":
            return self.target("op", x)
        if key == "complex":
            real, imag = (self.value(i) for i in x)
            return Complex(real, imag)
        if key == "tuple":
            return tuple(self.value(i) for i in x)
        if key == "dict":
            return {k: self.value(i) for k, i in x}
        if key == "fields":
            return as_record(x[0], x[1], {k: self.value(i) for k, i in x[2]})
        if key == "slice":
            return slice(*(self.value(i) for i in x))
        if key == "ellipsis":
            return Ellipsis
        raise ValueError(f"there is no kind of value named {key}")

    def target(self, kind: str, target: Any, inputs: int = 0) -> Any:
        if kind == "op":
            name, attributes = target
            name, given = as_today(name, {k: self.value(v) for k, v in attributes.items()}, inputs)
            cls = OPS[name]
            known = {f.name: checked_attribute(cls, f, given[f.name]) for f in fields(cls) if f.name in given}  # type: ignore[arg-type]
            return cls(**given | known)
        if kind == "param" and isinstance(target, dict):
            return self.constants[target["constant"]]
        known = {
            "param": self.tensors,
            "module": [p for p, m in self.root.named_modules() if m.is_leaf],
            "scalar": ["size", *SCALAR_OPERATORS],
            "output": [""],
        }
        if not isinstance(target, str) or target not in known.get(kind, [target]):
            raise ValueError(f"there is no {kind} {target!r}")
        return target

    def node(self, row: dict[str, Any]) -> None:
        kind, name = row["kind"], row["name"]
        if kind not in KINDS or not isinstance(name, str) or row.keys() - {"kind", "target", "args", "name", *META}:
            raise ValueError(f"row {len(self.graph.nodes)} is no node")
        args = self.value(row["args"])
        if not isinstance(args, tuple):
            raise ValueError(f"{name} has no arguments")
        if kind == "op" and not all(isinstance(a, Node) for a in args):
            raise ValueError(f"{name} is an op whose inputs are not all nodes")
        if kind == "scalar" and (len(args) != 2 or (row["target"] == "size" and not isinstance(args[0], Node))):
            raise ValueError(f"{name} is no size")
        node = self.graph.add(kind, self.target(kind, row["target"], len(args)), args, name)
        node.meta |= {k: self.value(row[k]) for k in META if k in row}

    def read(self, rows: list[dict[str, Any]]) -> Graph:
        for row in rows:
            self.node(row)
        nodes = self.graph.nodes
        if not nodes or [n for n in nodes if n.kind == "output"] != nodes[-1:]:
            raise ValueError("the graph has no single output at its end")
        args = self.graph.output.args  # the result, and in nets that write buffers a list of what else is computed
        effects = args[1] if len(args) == 2 else []
        if len(args) not in (1, 2) or type(effects) is not list or not all(isinstance(n, Node) for n in effects):
            raise ValueError("the output is no result")
        names = [n.target for n in nodes if n.kind == "input"]
        if len(set(names)) != len(names):
            raise ValueError("two inputs have one name")
        check_meta(self.graph)
        return self.graph
