"""Programs of views and in-place writes, captured by torch.fx and torch.export: exactly torch's values, or refused."""

from __future__ import annotations

import copy
import operator
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import torch2needle

from .frame import Wrong

NAME, SAMPLE, FULL, SECONDS = "writes", 600, 20_000, 60
CAPTURES = ("fx", "fx", "fx", "example", "export", "program")
MAKING = ("make", "layer")
SOURCES = ("x", "x * 2", "buffer", "parameter", "constant", "attribute", "ones", "row")


# -- programs ------------------------------------------------------------------------------------------------------------

# A step is (name, number of the tensor that it reads, its arguments). Views and copies add a tensor; writes do not.


def assign(x: Any, index: Any, value: Any) -> None:
    x[key(index)] = value


def add_at(x: Any, index: Any, value: Any) -> None:
    x[key(index)] += value


def key(index: Any) -> Any:
    """An index is written as between brackets."""
    return eval(f"np.s_[{index}]") if isinstance(index, str) else index


def to_data(x: Any, y: Any) -> None:
    x.data = y


def piece(name: str) -> Callable[..., Any]:
    return lambda x, n, dim, i: getattr(x, name)(n, dim)[i]


MAKES: dict[str, Callable[..., Any]] = {
    "reshape": lambda x, shape: x.reshape(shape),
    "torch.reshape": lambda x, shape: torch.reshape(x, shape),
    "view": lambda x, shape: x.view(shape),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(0, (1, -1)),
    "unsqueeze": lambda x, d: x.unsqueeze(d),
    "squeeze": lambda x: x.squeeze(),
    "squeeze(d)": lambda x, d: x.squeeze(d),
    "transpose": lambda x, d, e: x.transpose(d, e),
    "swapaxes": lambda x, d, e: torch.swapaxes(x, d, e),
    "movedim": lambda x, d, e: x.movedim(d, e),
    "permute": lambda x, order: x.permute(order),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "expand": lambda x, n: x.expand(n, *x.shape),
    "expand_as": lambda x: x.expand_as(x),
    "[]": lambda x, index: x[key(index)],
    "select": lambda x, d, i: x.select(d, i),
    "narrow": lambda x, d, i, n: x.narrow(d, i, n),
    "chunk": piece("chunk"),
    "split": piece("split"),
    "tensor_split": piece("tensor_split"),
    "unbind": lambda x, d, i: x.unbind(d)[i],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x, d: x.unfold(d, 2, 1),
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "type_as": lambda x: x.type_as(x),
    "positive": lambda x: +x,
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "einsum": lambda x: torch.einsum("...ij->...ji", x),
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "real": lambda x: x.real,
    "view_as": lambda x: x.view_as(x),
    "flip": lambda x: x.flip(0),
    "relu": lambda x: x.relu(),
    "neg": lambda x: -x,
    "cat": lambda x: torch.cat([x, x]),
    "index_select": lambda x, i: x.index_select(0, torch.tensor([i])),
    "comparison": lambda x: x > 1,
}

WRITES: dict[str, Callable[..., Any]] = {
    "add_": lambda x, k: x.add_(k),
    "mul_": lambda x, k: x.mul_(k),
    "sub_": lambda x, k: x.sub_(k),
    "+=": lambda x, k: operator.iadd(x, k),
    "*=": lambda x, k: operator.imul(x, k),
    "neg_": lambda x: x.neg_(),
    "fill_": lambda x, k: x.fill_(k),
    "zero_": lambda x: x.zero_(),
    "relu_": lambda x: torch.relu_(x),
    "F.relu": lambda x: F.relu(x, inplace=True),
    "clamp_": lambda x, k: x.clamp_(-k, k),
    "gt_": lambda x, k: x.gt_(k),
    "masked_fill_": lambda x, k: x.masked_fill_(x > 0, k),
    "[mask] =": lambda x, k: assign(x, x > 0, k),
    "[mask] +=": lambda x, k: add_at(x, x > 0, k),
    "[] =": assign,
    "[] +=": add_at,
    "detach_": lambda x: x.detach_(),
    "data.add_": lambda x, k: x.data.add_(k),
    "unsqueeze_": lambda x, d: x.unsqueeze_(d),
    "squeeze_": lambda x: x.squeeze_(),
    "t_": lambda x: x.t_(),
    "transpose_": lambda x, d, e: x.transpose_(d, e),
    "swapaxes_": lambda x, d, e: x.swapaxes_(d, e),
    "resize_": lambda x, shape: x.resize_(shape),
    "dropout": lambda x: F.dropout(x, 0.5, False, True),
}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Flatten": lambda: nn.Flatten(0),
    "Identity": nn.Identity,
    "Dropout": nn.Dropout,
    "ReLU in place": lambda: nn.ReLU(True),
}

PAIRS: dict[str, Callable[..., Any]] = {  # of two tensors; the first is written
    "add_": lambda x, y: x.add_(y),
    "+=": operator.iadd,
    "copy_": lambda x, y: x.copy_(y),
    "[...] =": lambda x, y: assign(x, "...", y),
    "[0] =": lambda x, y: assign(x, "0", y),
    "[0] +=": lambda x, y: add_at(x, "0", y),
    "out=": lambda x, y: torch.add(y, 1, out=x),
    "set_": lambda x, y: x.set_(y),
    "data =": to_data,
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 3.0),
    "[mask] =": lambda x, y: assign(x, y > 0, 3.0),
}


class Program(nn.Module):
    """The case as a module; its forward returns every tensor that `results` names."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case = case
        numbers = torch.arange(24, dtype=torch.float32)[: np.prod(case["shape"])].reshape(case["shape"]) % 5 - 1
        self.register_buffer("buffer", numbers.clone())
        self.register_buffer("row", self.buffer[:1])
        self.parameter = nn.Parameter(numbers.clone())
        self.attribute = numbers.clone()
        self.layers = nn.ModuleDict({k: make() for k, make in LAYERS.items()}).eval()

    def source(self, name: str, x: Any) -> Any:
        if name.startswith("x"):
            return x * 2 if name == "x * 2" else x
        if name == "ones":
            return torch.ones(self.case["shape"])
        return torch.full(self.case["shape"], 2.0) if name == "constant" else getattr(self, name)

    def forward(self, x: Any) -> Any:
        if self.case["capture"] == "export" and x.shape[0] > 100:  # which torch.fx cannot capture
            return x
        values = [self.source(name, x) for name in self.case["sources"]]
        for kind, name, place, *arguments in self.case["steps"]:
            if kind == "layer":
                values.append(self.layers[name](values[place]))
            elif kind == "make":
                values.append(MAKES[name](values[place], *arguments))
            elif kind == "write":
                WRITES[name](values[place], *arguments)
            else:
                PAIRS[name](values[place], values[arguments[0]])
        return tuple(values[i] for i in self.case["results"])


# -- drawing -------------------------------------------------------------------------------------------------------------


def index(rng: random.Random, rank: int) -> str:
    """Numbers, slices, new axes, an ellipsis, or a list."""
    if rng.random() < 0.15:
        return rng.choice(("[0]", "[1, 0]", "True"))
    items = [
        rng.choice(("0", "-1", ":1", "1:", "::2", "None", "...", "-1:")) for _ in range(rng.randint(1, max(1, rank)))
    ]
    return ", ".join(items) + "," * (rng.random() < 0.3)


def drawn_arguments(rng: random.Random, f: Callable, t: torch.Tensor) -> tuple:
    """Arguments for the parameters of `f` after the first, by their names."""
    rank, size = t.ndim, t.numel()
    shapes = [(-1,), (size,), tuple(reversed(t.shape)), (1, *t.shape), (2, -1), (-1, 2)]
    made: dict[str, Callable[[], Any]] = {
        "shape": lambda: rng.choice(shapes),
        "d": lambda: rng.randint(-rank, max(0, rank - 1)),
        "e": lambda: rng.randint(-rank, max(0, rank - 1)),
        "dim": lambda: rng.randint(0, max(0, rank - 1)),
        "order": lambda: tuple(rng.sample(range(rank), rank)),
        "n": lambda: rng.randint(1, 2),
        "i": lambda: rng.randint(0, 1),
        "index": lambda: index(rng, rank),
        "k": lambda: float(rng.randint(-2, 3)),
        "value": lambda: float(rng.randint(-2, 3)),
    }
    return tuple(made[p]() for p in f.__code__.co_varnames[1 : f.__code__.co_argcount])


def draw(rng: random.Random) -> dict[str, Any]:
    """A program that torch runs, grown step by step."""
    shape = rng.choice([(2, 3), (2, 3), (3, 3), (1, 4), (2, 3, 2), (4,), (2, 1)])
    sources = [rng.choice(SOURCES) for _ in range(rng.randint(1, 2))]
    case: dict[str, Any] = {"capture": rng.choice(CAPTURES), "shape": shape, "sources": sources, "steps": []}
    values = list(ran(case, None))
    for _ in range(rng.randint(2, 7)):
        place = rng.randrange(len(values))
        t = values[place]
        kind = rng.choice(("make", "make", "write", "write", "pair", "layer"))
        table = {"make": MAKES, "write": WRITES, "pair": PAIRS, "layer": LAYERS}[kind]
        name = rng.choice(list(table))
        arguments = (rng.randrange(len(values)),) if kind == "pair" else ()
        if kind in ("make", "write"):
            arguments = drawn_arguments(rng, table[name], t)
        more = case | {"steps": [*case["steps"], (kind, name, place, *arguments)]}
        try:
            values = list(ran(more, None))
        except Exception:
            continue
        case = more
    keep = [i for i in range(len(values)) if rng.random() < 0.8] or [0]
    return case | {"results": keep}


def ran(case: dict[str, Any], results: Any) -> Any:
    """What torch gives; every tensor where `results` is None."""
    count = len(case["sources"]) + sum(s[0] in MAKING for s in case["steps"])
    model = Program(case | {"results": range(count) if results is None else results})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model(numbers(case["shape"]))
    if any(not isinstance(t, torch.Tensor) for t in found):
        raise ValueError("a step gives no tensor")
    return found


def numbers(shape: Any, first: int = 0) -> torch.Tensor:
    return ((torch.arange(np.prod(shape)) + first) % 7 - 2).float().reshape(shape)


def smaller(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for i, (kind, *_) in enumerate(case["steps"]):
        steps = case["steps"][:i] + case["steps"][i + 1 :]
        if kind not in MAKING:
            yield case | {"steps": steps}
            continue
        made = len(case["sources"]) + sum(s[0] in MAKING for s in case["steps"][:i])

        def moved(n: int, made: int = made) -> int:
            return n - (n > made)

        kept = [(k, n, moved(p), *(map(moved, a) if k == "pair" else a)) for k, n, p, *a in steps]
        used = {s[2] for s in steps} | {s[3] for s in steps if s[0] == "pair"}
        if made not in used:
            results = [moved(r) for r in case["results"] if r != made] or [0]
            yield case | {"steps": kept, "results": results}
    for r in case["results"]:
        if len(case["results"]) > 1:
            yield case | {"results": [k for k in case["results"] if k != r]}
    if case["capture"] != "fx":
        yield case | {"capture": "fx"}


# -- checking ------------------------------------------------------------------------------------------------------------


def nets(case: dict[str, Any], model: nn.Module, x: torch.Tensor) -> Iterator[Any]:
    """The converted nets of a capture; raises what conversion refuses with."""
    if case["capture"] == "fx":
        yield torch2needle.convert(model)
    elif case["capture"] == "program":
        try:
            program = torch.export.export(model, (x,))
        except Exception as e:
            raise torch2needle.Unsupported(f"torch.export raises {type(e).__name__}") from None
        with torch.no_grad():
            try:
                theirs, own = program.module()(x.clone()), copy.deepcopy(model)(x.clone())
            except Exception as e:  # a program that torch itself cannot run, or a model that export has changed
                raise torch2needle.Unsupported(f"torch raises {type(e).__name__} after torch.export") from None
            if not all(map(torch.equal, theirs, own)):
                raise torch2needle.Unsupported("torch.export's program differs from the model")
        yield torch2needle.convert(program)
    else:
        yield torch2needle.convert(model, (x,))


def check(case: dict[str, Any]) -> str:
    warnings.simplefilter("ignore")
    model = Program(case).eval()
    x = numbers(case["shape"])
    try:
        ran(case, case["results"])  # a smaller case may be none that torch runs
    except Exception:
        return "torch raises"
    checked = 0
    try:
        for net in nets(case, copy.deepcopy(model), x.clone()):
            compare(case, model, net)
            checked += 1
    except (ValueError, IndexError) as e:
        if not re.match(r"\[[a-z_]+\] ", str(e)):
            raise
        return f"refused in the call: {e}"
    except (torch2needle.ConversionError, torch2needle.Unsupported) as e:
        report = getattr(e, "report", None)
        why = report.unsupported[0].reason if report else str(e)
        return f"agrees, then refused: {why}" if checked else f"refused: {why}"
    return "agrees"


def compare(case: dict[str, Any], model: nn.Module, net: Any) -> None:
    """Two calls each of the net and of its compiled form, with the buffers that they leave."""
    exe = ndl.compile(copy.deepcopy(net), (numbers(case["shape"]),))
    for form, call in (("eager", net), ("compiled", exe)):
        twin = copy.deepcopy(model)
        for turn in range(2):
            x = numbers(case["shape"], turn)
            with torch.no_grad():
                want = twin(x.clone())
            got = call(x.clone())
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                same(f"{form}, call {turn}, result {i}", a, b)
        if form == "eager":
            state = net.state_dict()
            for name, t in twin.state_dict().items():
                if name in state:
                    same(f"{form}, {name}", state[name], t)


def same(where: str, ours: Any, theirs: torch.Tensor) -> None:
    a, b = np.asarray(ours.detach().numpy()), theirs.detach().numpy()
    if a.shape != b.shape or a.dtype != b.dtype or not np.array_equal(a, b):
        raise Wrong(f"{where}: {a.dtype}{list(a.shape)} {a.tolist()} instead of {b.dtype}{list(b.shape)} {b.tolist()}")
