"""`save` and `load`: a model as one safetensors file, the graph as JSON in its metadata. Nothing in it is executed.

Metadata key "needle": {"version", "graph": [node...], "modules": {path: [class, arguments]}, "tree": [module paths],
"tensors": [paths], "training": [paths], "aliases": {path: path}, "parameters": [paths], "torch_rule": [paths],
"frozen": [paths], "pairs": [paths], "constants": [names]}. Constants are tensors of the graph alone; parameters under torch_rule
are trained by torch's rules, those under frozen not at all; tensors under pairs hold complex numbers as (..., 2).
Values: numbers, strings, null, lists, and one-key objects for the rest.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
from collections.abc import Callable, Container, Set
from dataclasses import Field, fields
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from . import nn
from .autograd import OPS, Deferred, Op, Tensor
from .backend_ndarray import NDArray, cpu_numpy
from .backend_selection import default_device
from .complex_numbers import Complex
from .files import DTYPES, existing, map_tensors, write_tensors
from .graph import Dim, Graph, GraphModule, Mode, Node, symbolic
from .graph.graph import KINDS, SCALAR_OPERATORS
from .graph.inputs import META, check_meta
from .graph.structure import as_record, is_record, members
from .init import no_drawing
from .nn.module import BOOKKEEPING, Module, Parameter, Tree, expose, set_submodule
from .op import kind_of, on

VERSION = 2
KEYS = {"version", "graph", "modules", "tree", "tensors", "training", "aliases", "parameters", "constants"}
LATER_KEYS = {"torch_rule", "frozen", "pairs", "only", "other"}  # that files of this version may lack
MAX_MESSAGE = 300  # characters of a reason, which may quote the file


class _Encoder:
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


def save(model: Module, path: str | os.PathLike) -> None:
    """Write a GraphModule (or any module that `needle.graph.symbolic` takes) to `path`; OSError where that cannot be."""
    if not isinstance(model, Module):
        raise TypeError(f"[save] expects a needle Module, such as torch2needle.convert gives, got {kind_of(model)}.")
    net = symbolic(model)
    tensors: dict[str, Tensor] = dict(net.named_tensors())
    encoder = _Encoder(tensors.keys())
    other = net.in_other_mode
    graphs = [net.graph, *([] if other is None else [other.graph])]
    rows = [encoder.rows(g) for g in graphs]
    layers = {n.target: net.get_submodule(n.target) for g in graphs for n in g if n.kind == "module"}
    modules = {
        path: [type(layer).__name__, {k: encoder.value(v) for k, v in arguments_of(layer).items()}]
        for path, layer in layers.items()
    }
    first: dict[int, str] = {}
    aliases = {}
    for name, t in tensors.items():
        if id(t) in first:
            aliases[name] = first[id(t)]
        first.setdefault(id(t), name)
    document = {
        "version": VERSION,
        "graph": rows[0],
        "modules": modules,
        "tree": [p for p, _ in net.named_modules() if p],
        "tensors": list(tensors),
        "training": [p for p, m in net.named_modules() if m.training],
        "aliases": aliases,
        "parameters": [k for k, t in tensors.items() if isinstance(t, Parameter)],
        "torch_rule": [k for k, t in tensors.items() if isinstance(t, Parameter) and t.rule == "torch"],
        "frozen": [k for k, t in tensors.items() if isinstance(t, Parameter) and not t.requires_grad],
        "pairs": [k for k, t in tensors.items() if t.of_pairs],
        "constants": list(encoder.constants),
        "only": net.holds_for,
    }
    if other is not None:
        document["other"] = rows[1]
    written = {k: t for k, t in tensors.items() if k not in aliases} | encoder.constants
    text = _checked(document, written, layers)
    arrays = {k: np.ascontiguousarray(t.numpy()).reshape(t.shape) for k, t in written.items()}
    try:
        write_tensors(path, arrays, {"needle": text})
    except (OSError, SafetensorError) as e:
        raise OSError(f"[save] cannot write {os.fspath(path)}: {reason(e)}.") from None


def arguments_of(layer: Module) -> dict[str, Any]:
    """What a layer's constructor was given, and what its attributes of these names were set to since."""
    now = {k: vars(layer)[k] for k in inspect.signature(type(layer).__init__).parameters if k in vars(layer)}
    own = {k: v for k, v in now.items() if isinstance(v, bool | int | float | str | tuple)}
    if isinstance(now.get("bias", 0), Tensor | None):
        own["bias"] = now["bias"] is not None
    return {**layer._config, **own}


def _checked(document: dict[str, Any], written: dict[str, Tensor], layers: dict[str, Module]) -> str:
    """The document as text, of which `load` makes the same net; ValueError where it would not."""
    foreign = {k: t.dtype for k, t in written.items() if t.dtype not in DTYPES.values()}
    if foreign:
        name, dtype = min(foreign.items())
        raise ValueError(f"[save] expects tensors of {', '.join(DTYPES.values())}, got {name} of {dtype}.")
    try:
        text = json.dumps(document)
        again = _build(json.loads(text), written.keys(), lambda name: written[name])
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"[save] expects layers as they were made, which load would refuse: {reason(e)}.") from None
    for path, layer in layers.items():
        name = changed(layer, again.get_submodule(path))
        if name:
            raise ValueError(
                f"[save] expects layers as they were made, got {path} ({type(layer).__name__}) with another {name}."
            )
    return text


def changed(layer: Module, made: Module) -> str:
    """An attribute or hook of a layer that the same layer, newly made, has not; "" for none."""
    ours, theirs = ({k: v for k, v in vars(m).items() if not isinstance(v, Tensor | Module)} for m in (layer, made))
    if layer._hooks or layer._pre_hooks:
        return "hook"
    names = [n for n in dict.fromkeys([*ours, *theirs]) if n not in BOOKKEEPING]
    return next((n for n in names if repr(ours.get(n)) != repr(theirs.get(n))), "")


TYPES: dict[str, Any] = {"int": int, "float": int | float, "bool": bool, "str": str, "tuple": tuple}


def _attribute(cls: type[Op], field: Field, value: Any) -> Any:
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


class _Decoder:
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
            known = {f.name: _attribute(cls, f, given[f.name]) for f in fields(cls) if f.name in given}  # type: ignore[arg-type]
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


def load(path: str | os.PathLike) -> GraphModule:
    """Read a model that `save` wrote. Raises ValueError for a file that is truncated, foreign or inconsistent.

    Weights come to the default device. On the CPU they stay in the file's pages until they are read, and get memory of their own
    when they are written; the file never changes. While the model lives, replace the file (as `save` does) rather than write
    into it.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"[load] expects a path, got {kind_of(path)}.")
    name = existing("load", path)
    try:
        with safe_open(path, framework="numpy") as f:
            metadata = f.metadata() or {}  # opening has checked the header and the file's size
        arrays = map_tensors(path)
    except Exception as e:  # a file may be wrong in any way, and what it is told about must be one sentence
        with open(path, "rb") as f:
            exported = f.read(5) == b"\x89ndlc"
        why = "was exported for libneedle.so; load what `ndl.save` wrote" if exported else ""
        raise ValueError(f"[load] {name} {why or f'is not a complete safetensors file: {reason(e)}'}.") from None
    if "needle" not in metadata:
        raise ValueError(f"[load] {name} holds tensors but no needle graph.")
    try:
        document = json.loads(metadata["needle"])
        version = document["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"[load] the graph in {name} is not readable.") from None
    if type(version) is not int or version != VERSION:
        raise ValueError(f"[load] expects format version {VERSION}, got {short(repr(version))}.")
    try:
        net = _loaded(document, arrays)
        net._title = os.path.basename(name)
        return net
    except Exception as e:
        raise ValueError(f"[load] the graph in {name} does not fit this version or its tensors: {reason(e)}.") from None


def reason(e: Exception) -> str:
    """What went wrong, as part of one sentence."""
    text = (
        f"there is no {e.args[0]}"
        if type(e) is KeyError and e.args
        else getattr(e, "strerror", None) or str(e) or type(e).__name__
    )
    return short(text).rstrip(".")


def short(text: str) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def _layer(row: list[Any], decoder: _Decoder) -> Module:
    """The needle layer of a row [class, arguments], made as it was made before saving."""
    name, arguments = row
    layer = getattr(nn, name)
    if not (isinstance(layer, type) and issubclass(layer, Module)) or layer.container:
        raise ValueError(f"{name} is not a layer")
    with no_drawing():
        return layer(**{k: decoder.value(v) for k, v in arguments.items()})


def _loaded(document: dict[str, Any], arrays: dict[str, NDArray]) -> GraphModule:
    parameters, device = set(document["parameters"]), default_device()
    converted = any(arguments.get("layout") == "torch" for _, arguments in document["modules"].values())
    torch_rule = set(document.get("torch_rule", parameters if converted else ()))
    trained, pairs = parameters.difference(document.get("frozen", ())), set(document.get("pairs", ()))

    def tensor(path: str) -> Tensor:
        kind = Parameter if path in parameters else Tensor
        data = arrays[path].numpy() if device == cpu_numpy() else on(device, arrays[path])
        made = kind.make_const(data, requires_grad=path in trained)
        if path in torch_rule:
            made.rule = "torch"
        if path in pairs:
            made.of_pairs = True
        return made

    return _build(document, arrays.keys(), tensor)


def _build(document: dict[str, Any], names: Set[str], tensor: Callable[[str], Tensor]) -> GraphModule:
    if document.keys() - LATER_KEYS != KEYS:
        raise ValueError(f"its keys differ in {', '.join(sorted(document.keys() ^ KEYS))}")
    root, modules = Tree(), document["modules"]
    constants = {name: tensor(name) for name in document["constants"]}
    given = (root, document["tensors"], constants)
    decoder = _Decoder(*given)
    for path in dict.fromkeys([*document["tree"], *modules]):  # in the order in which state_dict lists them
        set_submodule(root, path, _layer(modules[path], decoder) if path in modules else Tree())
    aliases = document["aliases"]
    made = {path: tensor(path) for path in document["tensors"] if path not in aliases}
    left = names - made.keys() - constants.keys()
    if left:
        raise ValueError(f"nothing reads tensor {min(left)}")
    for path, t in (made | {path: made[first] for path, first in aliases.items()}).items():
        set_tensor(root, path, t)
    differ = {path for path, _ in root.named_tensors()} ^ set(document["tensors"])
    if differ:
        raise ValueError(f"tensor {min(differ)} is in the file or in the layers alone")
    in_order(root, document["tensors"])
    training = set(document["training"])
    for path, m in root.named_modules():
        m.training = path in training
    net = GraphModule(decoder.read(document["graph"]), root)
    other = GraphModule(_Decoder(*given).read(document["other"]), root) if "other" in document else None
    only = document.get("only")
    if only not in (None, True, False) or (only is None and other is not None):
        raise ValueError(f"only expects a mode of training, got {only!r}")
    net.training = "" in training
    return net.with_modes(other, only)


def set_tensor(root: Module, path: str, value: Tensor) -> None:
    """Put `value` at `path`; it must have the shape of the tensor that a layer made there."""
    *parents, last = path.split(".")
    for part in parents:
        if part not in root.__dict__:
            set_submodule(root, part, Tree())
        root = root.__dict__[part]
        if not isinstance(root, Module):
            raise ValueError(f"{path} is below something that is not a module")
    old = root.__dict__.get(last)
    if isinstance(old, Tensor) and tuple(old.shape) != tuple(value.shape):
        raise ValueError(f"{path} has shape {tuple(value.shape)}, the layer expects {tuple(old.shape)}")
    if isinstance(old, Tensor) and old.dtype.startswith("float") != value.dtype.startswith("float"):
        raise ValueError(f"{path} has dtype {value.dtype}, the layer expects {old.dtype}")
    if old is not None and not isinstance(old, Tensor):
        raise ValueError(f"{path} is a tensor and something else")
    expose(root, last)
    root.__dict__[last] = value


def in_order(root: Module, paths: list[str]) -> None:
    """List members as the saved model did: optimizers number parameters in this order."""
    seen = set()
    for path in paths:
        module: Any = root
        for part in path.split("."):
            members = module.__dict__
            if part not in members:  # inside a list of a layer's own
                break
            if (id(module), part) not in seen:
                seen.add((id(module), part))
                members[part] = members.pop(part)
            module = members[part]
