"""`save` and `load`: a model as one safetensors file, the graph as JSON in its metadata. Nothing in it is executed.

Metadata key "needle": {"version", "graph": [node...], "modules": {path: [class, arguments]}, "tree": [module paths],
"tensors": [paths], "training": [paths], "aliases": {path: path}, "parameters": [paths], "torch_rule": [paths],
"frozen": [paths], "pairs": [paths], "constants": [names], "only": mode, "other": [node...]}. Constants are tensors of the graph
alone; parameters under torch_rule are trained by torch's rules, those under frozen not at all; tensors under pairs hold complex
numbers as (..., 2). only: the one mode of training that the graph holds for, or null; other: the graph of the other mode, where
it has one.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Set
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from . import nn
from .autograd import Tensor
from .backend_ndarray import NDArray, cpu_numpy
from .backend_selection import default_device
from .files import DTYPES, existing, map_tensors, write_tensors
from .graph import GraphModule, symbolic
from .graph_rows import Decoder, Encoder
from .init import no_drawing
from .nn.module import BOOKKEEPING, Module, Parameter, expose
from .nn.tree import Tree, set_submodule
from .op import kind_of, on

VERSION = 2
KEYS = {"version", "graph", "modules", "tree", "tensors", "training", "aliases", "parameters", "constants"}
LATER_KEYS = {"torch_rule", "frozen", "pairs", "only", "other"}  # that files of this version may lack
MAX_MESSAGE = 300  # characters of a reason, which may quote the file


def save(model: Module, path: str | os.PathLike) -> None:
    """Write a GraphModule (or any module that `needle.graph.symbolic` takes) to `path`; OSError where that cannot be."""
    if not isinstance(model, Module):
        raise TypeError(f"[save] expects a needle Module, such as torch2needle.convert gives, got {kind_of(model)}.")
    net = symbolic(model)
    tensors: dict[str, Tensor] = dict(net.named_tensors())
    encoder = Encoder(tensors.keys())
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


def _layer(row: list[Any], decoder: Decoder) -> Module:
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
    decoder = Decoder(*given)
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
    other = GraphModule(Decoder(*given).read(document["other"]), root) if "other" in document else None
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
