"""Crafted .pt2 archives: records of a good one changed, and pickles and words that leave a folder behind where they run."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CANARY = "ran"  # the folder, in the current one
CODE = f"__import__('os').mkdir('{CANARY}')"
Edit = Callable[[bytes], bytes]


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (CANARY,))


def evil_pickle(content: bytes = b"") -> bytes:
    """What torch.save writes of an object whose unpickling runs code."""
    buffer = io.BytesIO()
    torch.save(((Evil(),), {}), buffer)
    return buffer.getvalue()


class Two(torch.nn.Module):
    """Two inputs of a free size, a buffer, a constant, and a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(3, 4), torch.arange(4.0)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor, *, y: dict[str, torch.Tensor]) -> torch.Tensor:
        z = self.linear(x) * self.scale + self.shift
        return torch.cat([z, y["a"]]).reshape(x.shape[0] + y["a"].shape[0], -1)


def save_good(path: Path | str) -> tuple[tuple, dict[str, Any]]:
    """Writes a program; returns inputs for it."""
    args, kwargs = (torch.randn(3, 3),), {"y": {"a": torch.randn(5, 4)}}
    auto = torch.export.Dim.AUTO
    program = torch.export.export(Two().eval(), args, kwargs, dynamic_shapes={"x": {0: auto}, "y": {"a": {0: auto}}})
    torch.export.save(program, path)
    return args, kwargs


def rewrite(
    source: Path | str, target: Path | str, edits: dict[str, Edit], more: dict[str, bytes] | None = None
) -> None:
    """Copies an archive; `edits` by the end of a record's name, `more` records by their names below the root folder."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            content = old.read(name)
            for end, edit in edits.items():
                content = edit(content) if name.endswith(end) else content
            new.writestr(name, content)
        root = old.namelist()[0].split("/")[0]
        for name, content in (more or {}).items():
            new.writestr(f"{root}/{name}", content)


def changed(change: Callable[[Any], None]) -> Edit:
    """An edit of a record's JSON in place."""

    def edit(content: bytes) -> bytes:
        value = json.loads(content)
        change(value)
        return json.dumps(value).encode()

    return edit


def renamed(old: str, new: str) -> Edit:
    """Another name for a value, wherever it stands."""
    return lambda content: content.replace(json.dumps(old).encode(), json.dumps(new).encode())


def graph(program: Any) -> Any:
    return program["graph_module"]["graph"]


def call(target: str, *texts: str) -> Callable[[Any], None]:
    """A first node that calls `target` with texts."""
    inputs = [{"name": "", "arg": {"as_string": t}, "kind": 1} for t in texts]
    node = {"target": target, "inputs": inputs, "outputs": [], "metadata": {}, "name": "made"}
    return lambda program: graph(program)["nodes"].insert(0, node)


def size_of(program: Any) -> dict[str, Any]:
    """The expression of a free size."""
    return next(s["as_expr"] for v in graph(program)["tensor_values"].values() for s in v["sizes"] if "as_expr" in s)


def structure(program: Any, context: Any, kind: str = "builtins.dict") -> None:
    spec = json.dumps([1, {"type": kind, "context": context, "children_spec": []}])
    program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = spec


def pickled(config: Any) -> None:
    for payload in config["config"].values():
        payload.update(use_pickle=True)


MODEL, WEIGHTS, CONSTANTS = "models/model.json", "model_weights_config.json", "model_constants_config.json"
FACTORY = {"default_factory_module": "antigravity", "default_factory_name": "webbrowser", "dict_context": []}

# What the file holds that could run: (edits, further records, a part of the refusal; "" where the record is not read at all).
ATTACKS: dict[str, tuple[dict[str, Edit], dict[str, bytes], str]] = {
    "sample inputs": ({"sample_inputs/model.pt": evil_pickle}, {}, ""),
    "weights": ({WEIGHTS: changed(pickled), "weight_0": evil_pickle}, {}, "a pickled object"),
    "constants": ({CONSTANTS: changed(pickled), "tensor_0": evil_pickle}, {}, "a pickled object"),
    "opaque constant": (
        {CONSTANTS: lambda c: c.replace(b"tensor_0", b"opaque_obj_0")},
        {"data/constants/opaque_obj_0": evil_pickle()},
        "a pickled object",
    ),
    "old weights": ({}, {"data/weights/model.pt": evil_pickle()}, "pickled weights that are more"),
    "old constants": ({}, {"data/constants/model.pt": evil_pickle()}, "pickled weights that are more"),
    "compiled library": ({}, {"data/aotinductor/model/model.so": b"\x7fELF"}, ""),
    "expression": ({MODEL: changed(lambda p: size_of(p).update(expr_str=CODE))}, {}, "could run code"),
    "expression in a symbol": (
        {MODEL: changed(lambda p: size_of(p).update(expr_str=f'Symbol("{CODE}")'))},
        {},
        "could run code",
    ),
    "power": ({MODEL: changed(lambda p: size_of(p).update(expr_str="9**9**9**9"))}, {}, "a huge power"),
    "guard": ({MODEL: changed(lambda p: p["guards_code"].append(f"{CODE} is None"))}, {}, "could run code"),
    "guard's attribute": (
        {MODEL: changed(lambda p: p["guards_code"].append("L['x'].__class__() is None"))},
        {},
        "could run code",
    ),
    "call": ({MODEL: changed(call("torch.os.mkdir", CANARY))}, {}, "which is no operator"),
    "file operator": ({MODEL: changed(call("torch.ops.aten.from_file.default", CANARY))}, {}, "not taken from a file"),
    "library loader": ({MODEL: changed(call("torch.ops.load_library", CANARY))}, {}, "which is no"),
    "operator argument": (
        {MODEL: changed(lambda p: graph(p)["nodes"][0]["inputs"][0].update(arg={"as_operator": "torch.hub.load"}))},
        {},
        "which is no operator",
    ),
    "name": ({MODEL: renamed("x", f"x={CODE}")}, {}, "a name that is none"),
    "parameter": ({MODEL: renamed("linear.weight", f'a", {CODE}, "')}, {}, "a name that is none"),
    "assigned name": ({MODEL: renamed("linear", "torch.relu")}, {}, "a name that is none"),
    "metadata's name": (
        {
            MODEL: changed(
                lambda p: graph(p)["tensor_values"].update(metadata={"sizes": [{"as_expr": {"expr_str": CODE}}]})
            )
        },
        {},
        "",
    ),
    "factory": (
        {MODEL: changed(lambda p: structure(p, FACTORY, "collections.defaultdict"))},
        {},
        "inputs of a kind",
    ),
    "enumeration": (
        {MODEL: changed(lambda p: structure(p, json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "y"}])))},
        {},
        "inputs of a kind",
    ),
    "two programs": ({}, {"models/other.json": b"{}"}, "2 programs"),
}
