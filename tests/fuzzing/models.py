"""Random networks: eager, planned, fused, saved and loaded agree with numpy in float64; plans run with guards.

A network is a list of (name, numbers). The numbers choose operands and attributes among those that are possible, so that a list
stays a network when some of it is taken away.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import needle as ndl
from needle import nn
from needle.graph import symbolic

from .frame import Wrong
from .model_nodes import CHANNELS, NODES, Draw, Made

NAME, SAMPLE, FULL, SECONDS = "models", 1000, 20_000, 60
ENVIRONMENT = {"NEEDLE_GUARD": "1"}
NUMBERS = 9  # of a node
LIMIT = 1e4  # values beyond are not for comparing
ROUNDING = {"float32": 2e-5, "float64": 1e-11}


class Net(nn.Module):
    """Calls its steps in turn; returns some of the values. `layers` are the steps that are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self._steps: list[tuple[Any, Sequence[int]]] = []  # a function or a layer's number
        self._results: list[int] = []

    def forward(self, x: Any) -> Any:
        return self.run(x)

    def run(self, *inputs: Any) -> Any:
        values = list(inputs)
        for f, operands in self._steps:
            f = self.layers[f] if isinstance(f, int) else f
            values.append(f(*(values[i] for i in operands)))
        return tuple(values[i] for i in self._results)


class Net2(Net):
    def forward(self, x: Any, y: Any) -> Any:
        return self.run(x, y)


def build(case: dict, inputs: Sequence[np.ndarray]) -> Net:
    """The network with random parameters; nodes that cannot be, or whose values are too large, are left out."""
    np.random.seed(case["weights"])
    net = (Net if len(inputs) == 1 else Net2)().eval()
    values = [ndl.Tensor(x, dtype=str(x.dtype)) for x in inputs]
    for name, numbers in case["nodes"]:
        d = Draw(numbers)
        shapes = [(tuple(v.shape), v.dtype) for v in values]
        try:
            made = repeated(d, net, shapes) if name == "again" else NODES[name][1](d, shapes)
            if made is None:
                continue
            f, operands = made
            layer = net.layers[f] if isinstance(f, int) else f
            if isinstance(layer, nn.Module):
                layer.eval()
                if not isinstance(f, int):
                    randomize(layer)
            out = layer(*(values[i] for i in operands))
        except ValueError as e:
            if str(e).startswith("["):
                continue
            raise
        array = out.numpy()
        if array.size > 60_000 or array.ndim > 6 or (array.size and not np.abs(array).max() < LIMIT):
            continue
        if isinstance(f, nn.Module):
            net.layers.append(f)
            f = len(net.layers) - 1
        net._steps.append((f, operands))
        values.append(out)
    net._results = [i % len(values) for i in case["outputs"]] or [len(values) - 1]
    return net


def repeated(d: Draw, net: Net, shapes: list[Any]) -> Made | None:
    """A layer that has been used, on another value of the same shape but for the batch."""
    used = [(f, operands) for f, operands in net._steps if isinstance(f, int)]
    if not used:
        return None
    f, operands = d(used[::-1])
    wanted = shapes[operands[0]]
    fits = [
        i
        for i, s in enumerate(shapes)
        if s[1] == wanted[1] and s[0][1:2] == wanted[0][1:2] and len(s[0]) == len(wanted[0])
    ]
    return f, [d(fits[::-1])]


def randomize(layer: nn.Module) -> None:
    for name, t in layer.named_tensors():
        if t.dtype == "float32" and len(t.shape) < 2:
            a = np.random.randn(*t.shape).astype("float32") * 0.5
            t.data = ndl.Tensor(np.abs(a) + 0.5 if "var" in name else a + 0.1)


def arrays(case: dict, batch: int | None = None, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(case["weights"] + seed)
    made = []
    for shape, dtype in case["inputs"]:
        shape = shape if batch is None else (batch, *shape[1:])
        made.append(rng.integers(0, 8, shape) if dtype == "int64" else rng.standard_normal(shape).astype(case["dtype"]))
    return made


def draw(rng: random.Random) -> dict:
    names = [n for n, (weight, _) in NODES.items() for _ in range(weight)]
    batch = rng.choice([0, 1, 1, 1, 2, 2, 3])
    image = (batch, rng.choice(CHANNELS), rng.randint(1, 12), rng.randint(1, 12))
    kinds = [(image, "float")] * 4 + [((batch, rng.randint(1, 6), rng.choice(CHANNELS)), "float")]
    kinds += [((batch, rng.choice(CHANNELS)), "float"), ((batch, rng.randint(1, 5)), "int64")]
    inputs = [rng.choice(kinds) for _ in range(rng.choice([1, 1, 1, 2]))]
    nodes = [(rng.choice(names), tuple(rng.randrange(120) for _ in range(NUMBERS))) for _ in range(rng.randint(1, 16))]
    outputs = [rng.choice([-1, -1, -2, -3, rng.randrange(40)]) for _ in range(rng.choice([1, 1, 2, 3]))]
    return {
        "inputs": inputs,
        "nodes": nodes,
        "outputs": outputs,
        "dtype": rng.choice(["float32"] * 6 + ["float64"]),
        "weights": rng.randrange(1000),
    }


# -- forms ---------------------------------------------------------------------------------------------------------------


def forms(net: Net, case: dict) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """(name, what computes the network, what is to be compiled or None)."""
    import operator_fusion

    graph = symbolic(net, tuple(arrays(case)))
    yield "plan", net, net
    yield "graph", graph, graph
    fused = operator_fusion.fuse(graph)
    yield "fused", fused, fused
    with tempfile.TemporaryDirectory() as folder:
        ndl.save(fused, path := Path(folder) / "net.needle")
        yield "loaded", (loaded := ndl.load(path).eval()), loaded


def differs(label: str, got: Sequence[Any], want: Sequence[np.ndarray], close: Sequence[float]) -> None:
    for i, (g, w, tolerance) in enumerate(zip(got, want, close, strict=True)):
        g = np.asarray(g)
        if g.shape != w.shape:
            raise Wrong(f"{label}: output {i} has shape {g.shape}, not {w.shape}")
        if not w.size:
            continue
        if not np.array_equal(np.isnan(g), np.isnan(w)):
            raise Wrong(f"{label}: output {i} is NaN elsewhere")
        error = np.nanmax(np.abs(g - w), initial=0)
        if not error <= tolerance:
            raise Wrong(f"{label}: output {i} differs by {error:.1e}, {tolerance:.1e} allowed")


def check(case: dict) -> str:
    inputs = arrays(case)
    net = build(case, arrays(case | {"dtype": "float32"}))
    if not net._steps:
        return "empty"
    if case["dtype"] == "float64":
        net.to("float64")
    judge = copy.deepcopy(net).to(ndl.cpu_numpy(), "float64")

    def wanted(inputs: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[float]]:
        """The judge's values, and how far off they may be: rounding, or what eager's is, since some networks amplify it."""
        exact = [x if x.dtype == "int64" else x.astype("float64") for x in inputs]
        out = [t.numpy() for t in judge(*(ndl.Tensor(x, device=ndl.cpu_numpy(), dtype=str(x.dtype)) for x in exact))]
        eager = [t.numpy() for t in net(*(ndl.Tensor(x, dtype=str(x.dtype)) for x in inputs))]
        close = []
        for g, w in zip(eager, out, strict=True):
            size = np.nanmax(np.abs(w), initial=0) * ROUNDING[case["dtype"]] + 1e-12
            differs("eager", [g], [w], [100 * size + 1e-5 * (case["dtype"] == "float32")])
            close.append(size + 10 * np.nanmax(np.abs(g - w), initial=0))
        return out, close

    want, close = wanted(inputs)
    calls = [inputs]
    if len({s[0] for s, _ in case["inputs"]}) == 1 and not fixes_batch(case):
        calls += [arrays(case, batch, 1) for batch in (1, 2)]
    results = [wanted(c) for c in calls]
    for label, _, model in forms(net, case):
        exe = ndl.compile(model, tuple(inputs))
        for given, (want, close) in zip(calls, results, strict=True):
            differs(f"{label} batch {given[0].shape[0]}", exe(*given), want, close)
    return f"agrees, {case['dtype']}"


def fixes_batch(case: dict) -> bool:
    """Whether something in the network holds a size of its inputs' batch."""
    return any(
        n in ("view", "concat", "binary", "parameter", "attention", "norm", "matmul", "again", "reduce", "linear")
        for n, _ in case["nodes"]
    )


def smaller(case: dict) -> Iterable[dict]:
    nodes = case["nodes"]
    for size in (8, 4, 2, 1):
        for i in range(0, len(nodes), size):
            if len(nodes) > size:
                yield case | {"nodes": nodes[:i] + nodes[i + size :]}
    for i in range(len(case["outputs"])):
        if len(case["outputs"]) > 1:
            yield case | {"outputs": case["outputs"][:i] + case["outputs"][i + 1 :]}
    for i in range(len(case["inputs"])):
        if len(case["inputs"]) > 1:
            yield case | {"inputs": case["inputs"][:i] + case["inputs"][i + 1 :]}
    for i, (shape, dtype) in enumerate(case["inputs"]):
        for axis, n in enumerate(shape):
            if n > 1:
                less = (*shape[:axis], n // 2 if axis != 1 else max(1, n - 1), *shape[axis + 1 :])
                yield case | {"inputs": [*case["inputs"][:i], (less, dtype), *case["inputs"][i + 1 :]]}
    if case["dtype"] != "float32":
        yield case | {"dtype": "float32"}
    for i, (name, numbers) in enumerate(nodes):
        if any(numbers):
            yield case | {"nodes": [*nodes[:i], (name, (0,) * NUMBERS), *nodes[i + 1 :]]}
            for k, n in enumerate(numbers):
                if n:
                    yield case | {"nodes": [*nodes[:i], (name, (*numbers[:k], 0, *numbers[k + 1 :])), *nodes[i + 1 :]]}
