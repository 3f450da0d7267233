"""Damaged needle files: each is refused in one sentence or loads whole, in a process with little memory and no torch.

What loads is run twice, over memory that was filled with other bytes before: no result may depend on them.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import needle as ndl
from needle import nn, ops
from needle.graph import Graph, GraphModule, symbolic
from needle.nn.tree import Tree
from needle.op import OPS, Spec

from . import file_damage
from .file_damage import MUTATIONS, places
from .frame import Wrong
from .layer_arguments import BY_NAME, ROWS, arguments

NAME, SAMPLE, FULL, SECONDS = "files", 2000, 20_000, 20
MEMORY, NO_TORCH = 1 << 30, True
ENVIRONMENT = {"NEEDLE_GUARD": "1"}  # writes outside of a plan's buffers are errors, and what is not written is NaN
SENTENCE_START, SENTENCE_END = "[load] ", "."


# -- files to damage -----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Free sizes, ties, a constant, a flag that follows the mode, nested outputs, an input with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 6, padding_idx=1), nn.BatchNorm1d(6)
        self.one, self.two = nn.Linear(6, 6, layout="torch"), nn.Linear(6, 6, layout="torch")
        self.two.weight = self.one.weight
        self.fixed = (ndl.Tensor(np.arange(6, dtype="float32"), requires_grad=False),)

    def forward(self, x: Any) -> Any:
        y = ops.reshape(self.two(ops.relu(self.one(x))), (x.shape[0], 6))
        return {"y": (self.norm(y) + self.fixed[0], None), "n": x.shape[0], "x": x}


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        )

    def forward(self, x: Any) -> Any:
        return self.body(x)


NETS = ("bound", "fused", "image", "recurrent", "wide")


def samples() -> list[str]:
    """Names of nets of one op each: its name and the number of its sample."""
    return [f"op {n} {i}" for n in sorted(OPS) if OPS[n].library == "needle" for i in range(len(OPS[n].samples()))]


def values(spec: Any, op: Any, rng: np.random.RandomState) -> np.ndarray:
    spec = spec if isinstance(spec, Spec) else Spec(spec)
    if spec.dtype == "bool":
        return rng.rand(*spec.shape) < 0.5
    if spec.dtype.startswith("int"):
        return rng.randint(0, 2, spec.shape).astype(spec.dtype)
    return np.asarray(rng.uniform(*getattr(op, "domain", (-2.0, 2.0)), spec.shape)).astype(spec.dtype)


def net_of_op(name: str) -> tuple[nn.Module, list[np.ndarray]]:
    """A graph of one op; the inputs of its sample."""
    _, name, i = name.split()
    attributes, shapes = OPS[name].samples()[int(i)]
    graph, op = Graph(), OPS[name](**attributes)
    inputs = tuple(graph.add("input", f"x{k}", (), f"x{k}") for k in range(len(shapes)))
    result: Any = graph.add("op", op, inputs, op.label)
    if op.n_out > 1:
        result = tuple(graph.add("op", OPS["TupleGetItem"](k), (result,), "item") for k in range(op.n_out))
    graph.add("output", "", (result,), "output")
    rng = np.random.RandomState(0)
    return GraphModule(graph, Tree()), [values(s, op, rng) for s in shapes]


def net_of_layer(name: str) -> tuple[nn.Module, list[np.ndarray]]:
    _, name, number = name.split()
    row, rng = BY_NAME[name], random.Random(int(number))
    while True:
        given = arguments(row, rng, 0.0)
        shape = row.shape(given, rng)
        x = np.asarray(np.random.RandomState(0).randn(*shape), "float32")
        x = np.zeros(shape, "int64") if row.kind == "index" else x
        try:
            net = nn.Sequential(getattr(nn, row.needle or name)(**row.needles(given))).eval()
            net(ndl.Tensor(x))
            return net, [x]
        except (ValueError, TypeError, IndexError):  # arguments that do not go together
            continue


def nets() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Models with the shape of an input each."""
    import operator_fusion

    np.random.seed(0)
    image = Image().eval()
    recurrent = nn.Sequential(nn.Linear(6, 6), nn.LSTM(6, 4, 2)).eval()
    bound = symbolic(Wide().eval())
    bound.graph.inputs[0].meta.update(place=("batch", "x", 0), sizes=((1, None, "n"), (6, 6, "")))
    bound.graph.output.meta["arguments"] = {"batch": None, "flag": True, "scale": 0.5}
    return {
        "wide": (Wide().eval(), (5, 6)),
        "bound": (bound, (5, 6)),
        "image": (image, (2, 3, 6, 6)),
        "fused": (operator_fusion.fuse(image), (2, 3, 6, 6)),
        "recurrent": (recurrent, (3, 2, 6)),
    }


# -- the check -----------------------------------------------------------------------------------------------------------


def whole(net: Any) -> None:
    """All of what was loaded is there: values can be read, the graph printed, and saved again."""
    str(net.graph), repr(net)
    for t in net.state_dict().values():
        t.numpy()
    net.input_names, net.parameters()


def one(path: Path, xs: list[np.ndarray]) -> str:
    """What became of one file; raises where that may not be."""
    try:
        net = ndl.load(path)
    except ValueError as e:
        text = str(e)
        if not (text.startswith(SENTENCE_START) and text.endswith(SENTENCE_END)) or "\n" in text or len(text) > 600:
            raise Wrong(f"not one sentence: {text!r}") from None
        return "refused"
    whole(net)
    first, second = (results(path, xs, byte) for byte in (0x2A, 0xD5))
    for form, a, b in zip(("eager", "compiled"), first, second, strict=True):
        if not same(a, b):
            raise Wrong(f"{form} depends on what was in memory before")
    eager, compiled = first
    if isinstance(eager, str) or isinstance(compiled, str):
        return f"loaded, {'does not run' if isinstance(eager, str) else 'does not compile'}"
    if not extreme(path) and not all(map(alike, eager, compiled)):
        raise Wrong("compiled differs from eager")
    return "loaded, runs"


def results(path: Path, xs: list[np.ndarray], byte: int) -> tuple[Any, Any]:
    """What the net gives, eager and compiled, where fresh memory is filled with a byte; the name of an error for a failure."""
    ctypes.CDLL(None).mallopt(-6, byte)  # M_PERTURB
    net, found = ndl.load(path), []
    for form in ("eager", "compiled"):
        np.random.seed(0)
        try:
            out = net(*map(ndl.Tensor, xs)) if form == "eager" else ndl.compile(net, tuple(xs))(*xs)
            found.append([np.array(o if isinstance(o, np.ndarray) else o.numpy()) for o in leaves(out)])
        except Exception as e:  # a changed graph may do anything but end the process
            if "outside" in str(e) and "[plan]" in str(e):
                raise Wrong(f"{form}: {e}") from None
            found.append(type(e).__name__)
    return found[0], found[1]


def leaves(value: Any) -> list[Any]:
    """The tensors of a nested result, in order."""
    if isinstance(value, tuple | list | dict):
        return [x for v in (value.values() if isinstance(value, dict) else value) for x in leaves(v)]
    return [value] if hasattr(value, "shape") else []


def same(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return len(a) == len(b) and all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in zip(a, b, strict=True)
    )


def extreme(path: Path) -> bool:
    """Whether attributes are so large that results overflow, in one order of computation or in another."""
    data = path.read_bytes()
    document = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["needle"])
    numbers = [c[k] for c, k in places(document, []) if isinstance(c[k], int | float)]
    return any(not abs(n) < 1e15 for n in numbers)


def alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal within the rounding of a computation in another order."""
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return False
    if a.dtype.kind != "f":
        return bool((a == b).all())
    finite = np.isfinite(a) & np.isfinite(b)
    scale = np.abs(a[finite]).max(initial=1e-30)
    return bool((np.isfinite(a) == np.isfinite(b)).all() and (np.abs(a - b)[finite] <= 1e-3 * scale).all())


@functools.cache
def folder() -> Path:
    """Of this process, for the damaged file and for what a pickle in it would leave behind."""
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.environ["FUZZ_CANARY"] = str(place / "canary")
    return place


@functools.cache
def saved(name: str) -> tuple[bytes, list[np.ndarray]] | None:
    """A net as a file's bytes, with inputs; None where it cannot be saved."""
    path = folder() / "net"
    if name in NETS:
        net, shape = nets()[name]
        xs = [np.random.RandomState(0).randn(*shape).astype("float32")]
    else:
        net, xs = net_of_op(name) if name.startswith("op ") else net_of_layer(name)
    try:
        ndl.save(net, path)
    except ValueError:  # such as an op whose attribute is another op
        return None
    return path.read_bytes(), xs


def other_shapes(xs: list[np.ndarray], rng: random.Random) -> list[np.ndarray]:
    """Inputs that need not go together: one or two with another size, rank or dtype, or in another's place."""
    made = list(xs)
    for _ in range(rng.choice((1, 1, 2))):
        i = rng.randrange(len(made))
        x, how = made[i], rng.randrange(6)
        if how == 0:
            j = rng.randrange(len(made))
            made[i], made[j] = made[j], made[i]
        elif how == 1:
            made[i] = x.astype(rng.choice(("float32", "float64", "int64", "int32", "bool")))
        elif how == 2 and x.ndim:
            made[i] = x.max(rng.choice((0, -1)), initial=0)
        elif how == 3 and x.ndim < 6:
            made[i] = x[None] if rng.random() < 0.5 else x[..., None]
        elif x.ndim:
            axis = rng.randrange(x.ndim)
            size = rng.choice((0, 1, x.shape[axis] + 1, max(x.shape[axis] - 1, 0), 2 * x.shape[axis]))
            made[i] = np.resize(x, (*x.shape[:axis], size, *x.shape[axis + 1 :]))
    return [np.asarray(x) for x in made]


def draw(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.4:
        return (rng.choice(MUTATIONS).__name__, rng.choice(NETS), rng.getrandbits(32))
    name = rng.choice(samples()) if kind < 0.75 else f"layer {rng.choice(LAYERS)} {rng.randrange(10)}"
    return (rng.choice(("edit_arguments", "edit_arguments", "shapes")), name, rng.getrandbits(32))


LAYERS = [row.torch for row in ROWS if row.kind != "attention"]


def check(case: Any) -> str:
    mutation, name, seed = case
    if (found := saved(name)) is None:
        return "cannot be saved"
    data, xs = found
    path = folder() / "damaged"
    rng = random.Random(seed)
    if mutation == "shapes":
        path.write_bytes(data)
        xs = other_shapes(xs, rng)
        if "SearchSorted" in name:  # which nothing says of numbers in no order
            xs[0] = np.sort(xs[0], -1)
    else:
        path.write_bytes(getattr(file_damage, mutation)(bytearray(data), rng))
    how = one(path, xs)
    if (folder() / "canary").exists():
        (folder() / "canary").rmdir()
        raise Wrong("code in the file ran")
    return f"{name.split()[0]}: {how}" if name not in NETS else how


def smaller(case: Any) -> Iterable[Any]:
    return ()
