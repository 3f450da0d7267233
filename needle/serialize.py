"""`save` and `load`: a model as one safetensors file, the graph as JSON in its metadata. Nothing in it is executed.

Metadata key "needle": {"version", "graph": [node...], "modules": {path: [class, arguments]}, "tree": [module paths],
"tensors": [paths], "training": [paths], "aliases": {path: path}, "parameters": [paths]}. Values: numbers, strings, null,
lists, and one-key objects for the rest.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from . import _core, nn
from .autograd import OPS, Op, Tensor
from .backend_ndarray import NDArray, cpu_numpy
from .backend_selection import default_device
from .graph import Dim, Graph, GraphModule, Mode, Node, symbolic
from .graph.graph import KINDS, SCALAR_OPERATORS
from .init import no_drawing
from .nn.module import Module, Parameter, Tree, set_submodule

VERSION = 1


class _Encoder:
    def __init__(self, graph: Graph, literals: dict[str, Tensor]) -> None:
        self.index = {n: i for i, n in enumerate(graph)}
        self.literals = literals

    def value(self, v: Any) -> Any:
        if v is None or isinstance(v, bool | int | float | str):
            return v
        if isinstance(v, Node):
            return {"node": self.index[v]}
        if isinstance(v, Dim):
            return {"dim": self.index[v.node]}
        if isinstance(v, Mode):
            return {"mode": v.path}
        if isinstance(v, tuple):
            return {"tuple": [self.value(x) for x in v]}
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
            target = [target.name, {k: self.value(v) for k, v in target.attributes().items()}]
        elif isinstance(target, Tensor):
            path = f"constants.{n.name}"
            self.literals[path] = target
            target = path
        row = {"kind": n.kind, "target": target, "args": self.value(n.args), "name": n.name}
        if "default" in n.meta:
            row["default"] = self.value(n.meta["default"])
        return row


def save(model: Module, path: str | os.PathLike) -> None:
    """Write a GraphModule (or any module that `needle.graph.symbolic` takes) to `path`."""
    net = symbolic(model)
    tensors: dict[str, Tensor] = dict(net.named_tensors())
    encoder = _Encoder(net.graph, tensors)
    rows = [encoder.node(n) for n in net.graph]
    modules = {}
    for name in dict.fromkeys(n.target for n in net.graph if n.kind == "module"):
        layer = net.get_submodule(name)
        modules[name] = [type(layer).__name__, {k: encoder.value(v) for k, v in layer._config.items()}]
    first: dict[int, str] = {}
    aliases = {}
    for name, t in tensors.items():
        if id(t) in first:
            aliases[name] = first[id(t)]
        first.setdefault(id(t), name)
    document = {
        "version": VERSION,
        "graph": rows,
        "modules": modules,
        "tree": [p for p, _ in net.named_modules() if p],
        "tensors": list(tensors),
        "training": [p for p, m in net.named_modules() if m.training],
        "aliases": aliases,
        "parameters": [k for k, t in tensors.items() if isinstance(t, Parameter)],
    }
    arrays = {k: np.ascontiguousarray(t.numpy()).reshape(t.shape) for k, t in tensors.items() if k not in aliases}
    # Beside it, then in its place: models that were loaded from the file still read the old one.
    beside = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        save_file(arrays, beside, metadata={"needle": json.dumps(document)})
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.remove(beside)


class _Decoder:
    def __init__(self, root: Module) -> None:
        self.graph, self.root = Graph(), root
        self.tensors: dict[str, Tensor] = {}

    def value(self, v: Any) -> Any:
        if isinstance(v, list):
            return [self.value(x) for x in v]
        if not isinstance(v, dict):
            return v
        ((key, x),) = v.items()
        if key == "node":
            return self.graph.nodes[x]
        if key == "dim":
            return Dim(self.graph.nodes[x], self.graph)
        if key == "mode":
            return Mode(self.root.get_submodule(x), x)
        if key == "tuple":
            return tuple(self.value(i) for i in x)
        if key == "dict":
            return {k: self.value(i) for k, i in x}
        if key == "slice":
            return slice(*(self.value(i) for i in x))
        if key == "ellipsis":
            return Ellipsis
        raise KeyError(key)

    def node(self, row: dict[str, Any]) -> None:
        kind, target = row["kind"], row["target"]
        if kind not in KINDS:
            raise KeyError(kind)
        if kind == "op":
            name, attributes = target
            target = OPS[name](**{k: self.value(v) for k, v in attributes.items()})
        elif kind == "param":
            self.tensors[target]
        elif kind == "scalar" and target != "size" and target not in SCALAR_OPERATORS:
            raise KeyError(target)
        node = self.graph.add(kind, target, self.value(row["args"]), row["name"])
        if "default" in row:
            node.meta["default"] = self.value(row["default"])


DTYPES = {"F32": "float32", "F64": "float64", "I32": "int32", "I64": "int64", "BOOL": "bool"}


def map_tensors(path: str | os.PathLike) -> dict[str, NDArray]:
    """The tensors of a safetensors file as arrays in its pages."""
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
    header.pop("__metadata__", None)
    file = _core.FileMap(os.fspath(path))
    rows = {k: (8 + length + row["data_offsets"][0], row["shape"], row["dtype"]) for k, row in header.items()}
    unknown = {dtype for *_, dtype in rows.values()} - DTYPES.keys()
    if unknown:
        raise ValueError(f"it holds tensors of dtype {min(unknown)}")
    return {k: NDArray.wrap(file.array(at, shape, DTYPES[dtype])) for k, (at, shape, dtype) in rows.items()}


def load(path: str | os.PathLike) -> GraphModule:
    """Read a model that `save` wrote. Raises ValueError for a file that is truncated, foreign or inconsistent.

    Weights stay in the file's pages until they are read, and get memory of their own when they are written; the file never
    changes. While the model lives, replace the file (as `save` does) rather than write into it.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"[load] there is no file {os.fspath(path)}.")
    try:
        with safe_open(path, framework="numpy") as f:
            metadata = f.metadata() or {}  # opening has checked the header and the file's size
        arrays = map_tensors(path)
    except (SafetensorError, OSError, ValueError, TypeError, MemoryError) as e:
        raise ValueError(f"[load] {os.fspath(path)} is not a complete safetensors file: {e}.") from None
    if "needle" not in metadata:
        raise ValueError(f"[load] {os.fspath(path)} holds tensors but no needle graph.")
    try:
        document = json.loads(metadata["needle"])
        version = document["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"[load] the graph in {os.fspath(path)} is not readable.") from None
    if version != VERSION:
        raise ValueError(f"[load] expects format version {VERSION}, got {version!r}.")
    try:
        return _build(document, arrays)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise ValueError(
            f"[load] the graph in {os.fspath(path)} does not fit this version or its tensors: {e}."
        ) from None


def _layer(row: list[Any], decoder: _Decoder) -> Module:
    """The needle layer of a row [class, arguments], made as it was made before saving."""
    name, arguments = row
    layer = getattr(nn, name)
    if not (isinstance(layer, type) and issubclass(layer, Module)):
        raise KeyError(name)
    with no_drawing():
        return layer(**{k: decoder.value(v) for k, v in arguments.items()})


def _build(document: dict[str, Any], arrays: dict[str, NDArray]) -> GraphModule:
    root, decoder = Tree(), _Decoder(Tree())
    decoder.root = root
    modules = document["modules"]
    for path in dict.fromkeys([*document["tree"], *modules]):  # in the order in which state_dict lists them
        set_submodule(root, path, _layer(modules[path], decoder) if path in modules else Tree())
    parameters = set(document["parameters"])
    made: dict[str, Tensor] = {}
    for path in sorted(arrays, key=document["tensors"].index):
        kind = Parameter if path in parameters else Tensor
        data = arrays[path].numpy() if default_device() == cpu_numpy() else arrays[path]
        made[path] = kind.make_const(data, requires_grad=path in parameters)
        set_tensor(root, path, made[path])
    for path, first in document["aliases"].items():
        set_tensor(root, path, made[first])
    training = set(document["training"])
    for path, m in root.named_modules():
        m.training = path in training
    decoder.tensors = dict(root.named_tensors())
    missing = decoder.tensors.keys() - made.keys() - document["aliases"].keys()
    if missing:
        raise ValueError(f"it holds no tensor {min(missing)}")
    for row in document["graph"]:
        decoder.node(row)
    if not decoder.graph.nodes or decoder.graph.output.kind != "output":
        raise ValueError("the graph has no output")
    net = GraphModule(decoder.graph, root)
    net.training = "" in training
    return net


def set_tensor(root: Module, path: str, value: Tensor) -> None:
    """Put `value` at `path`; it must have the shape of the tensor that a layer made there."""
    *parents, last = path.split(".")
    for part in parents:
        root = root.__dict__.setdefault(part, Tree())
        if not isinstance(root, Module):
            raise ValueError(f"{path} is below something that is not a module")
    old = root.__dict__.get(last)
    if isinstance(old, Tensor) and tuple(old.shape) != tuple(value.shape):
        raise ValueError(f"{path} has shape {tuple(value.shape)}, the layer expects {tuple(old.shape)}")
    root.__dict__[last] = value


__all__ = ["VERSION", "load", "save"]
