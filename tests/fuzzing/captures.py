"""Small torch modules full of what capture may misread: each converts to what torch computes at every size, or is refused."""

from __future__ import annotations

import builtins
import collections
import copy
import dataclasses
import functools
import operator
import random
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import torch2needle

from .frame import Wrong

NAME, SAMPLE, FULL, SECONDS = "captures", 150, 20_000, 60
WIDTH = 3
BATCHES = (1, 2, 3, 6)
TOLERANCE = 2e-5
Pair = collections.namedtuple("Pair", "first second")
T = torch.Tensor


@dataclasses.dataclass
class Output:
    value: Any
    more: Any = None


# -- steps of a forward: functions of the module, the value and numbers ------------------------------------------------------


def without(s: Block, x: T, mode: Callable) -> T:
    with mode():
        y = s.one(x)
    return y


def caught(s: Block, x: T, f: Callable) -> T:
    try:
        return f(s, x)
    except Exception:
        return x * 100


def count(s: Block, x: T) -> T:
    s.calls += 1
    return x * s.calls


def log_only(s: Block, x: T) -> T:
    s.seen.append(1)
    return x + 1


def remember(s: Block, x: T) -> T:
    before, s.last = s.last, x.detach()
    return x if before is None or before.shape != x.shape else x + before


def cached(s: Block, x: T) -> T:
    if "scale" not in s.cache:
        s.cache["scale"] = torch.arange(WIDTH) * 0.5
    return x * s.cache["scale"]


def written(s: Block, x: T) -> T:
    s.plain += 1
    return x * s.plain


def buffer_written(s: Block, x: T) -> T:
    s.steps.add_(1)
    return x * s.steps


def norm_written(s: Block, x: T) -> T:
    with torch.no_grad():
        s.norm.running_mean.add_(1)
    return s.norm(x)


def weight_written(s: Block, x: T) -> T:
    with torch.no_grad():
        s.one.weight.mul_(0.5)
    return s.one(x)


def value_written(s: Block, x: T) -> T:
    y = s.one(x)
    with torch.no_grad():
        y.mul_(2)
    return y


def loop(s: Block, x: T) -> T:
    for layer in s.layers:
        x = layer(x)
    return x


def looked_up(s: Block, x: T) -> T:
    return {2: s.one, 3: s.two}.get(x.ndim, s.two)(x)


def unpacked(s: Block, x: T) -> T:
    rows, width = x.shape
    return x.reshape(rows * width).reshape(rows, width)


def row_written(s: Block, x: T) -> T:
    y = x * 1
    y[0].mul_(2)
    return y


def own_forward(m: nn.Module) -> None:
    forward = m.forward
    m.forward = lambda x: forward(x) * 3  # type: ignore[method-assign]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: T) -> T:
        return grad


STEPS: dict[str, Callable] = {
    "one": lambda s, x: s.one(x),
    "two": lambda s, x: s.two(torch.relu(x)),
    "norm": lambda s, x: s.norm(x),
    "drop": lambda s, x: s.drop(x),
    "loop": loop,
    "named": lambda s, x: s.layers[len(s.layers) - 1](x),
    "shape is": lambda s, x: x * 2 if x.shape[0] == s.number else s.one(x),
    "shape above": lambda s, x: x * 2 if x.shape[0] > s.number else s.one(x),
    "even": lambda s, x: x * 2 if x.size(0) % 2 == 0 else x,
    "len": lambda s, x: x * len(x),
    "len is": lambda s, x: x * 2 if len(x) == s.number else x,
    "squeeze": lambda s, x: x.squeeze(0).reshape(-1, WIDTH),
    "view": lambda s, x: x.view(x.size(0), -1) + x.shape[0],
    "unpack": unpacked,
    "is tensor": lambda s, x: x * 2 if isinstance(x, torch.Tensor) else x,
    "is no tensor": lambda s, x: x if not torch.is_tensor(x) else s.one(x),
    "type": lambda s, x: x * 2 if type(x) is torch.Tensor else x,
    "type is not": lambda s, x: x if type(x) != torch.Tensor else s.two(x),  # noqa: E721
    "is int": lambda s, x: x * 2 if isinstance(x.shape[0], int) else x,
    "has": lambda s, x: x * 2 if hasattr(x, "nothing") else s.one(x),
    "has shape": lambda s, x: x * 2 if hasattr(x, "shape") else x,
    "get": lambda s, x: x * 2 if getattr(x, "nothing", None) is None else x,
    "grad_fn": lambda s, x: x * 2 if x.grad_fn is None else x,
    "is_leaf": lambda s, x: x * 2 if x.is_leaf else x,
    "is_cuda": lambda s, x: x * 2 if x.is_cuda is False else x,
    "dtype": lambda s, x: x * 2 if x.dtype == torch.float32 else x,
    "dtype is": lambda s, x: x * 2 if x.dtype is torch.float32 else x,
    "dtype in": lambda s, x: x * 2 if x.dtype in {torch.float32, torch.float64} else x,
    "device": lambda s, x: x * 2 if x.device.type == "cpu" else x,
    "ndim": looked_up,
    "value": lambda s, x: x * 2 if x.sum() > 0 else x,
    "caught value": lambda s, x: caught(s, x, lambda s, x: x * 2 if x.sum() > 0 else x * 3),
    "caught shape": lambda s, x: caught(s, x, lambda s, x: x * 2 if x.shape[0] > 1 else x * 3),
    "caught float": lambda s, x: caught(s, x, lambda s, x: x * float(x.mean())),
    "caught name": lambda s, x: caught(s, x, lambda s, x: x * x.nothing),
    "caught index": lambda s, x: caught(s, x, lambda s, x: x[s.number :][0] + x),
    "no_grad": lambda s, x: x + without(s, x, torch.no_grad),
    "inference": lambda s, x: x + without(s, x, torch.inference_mode),
    "grad off": lambda s, x: x * without(s, x, lambda: torch.set_grad_enabled(False)),
    "detach": lambda s, x: s.one(x).detach() + x,
    "data": lambda s, x: s.two(x).data * x,
    "straight": lambda s, x: Straight.apply(s.one(x)),
    "random": lambda s, x: x + torch.randn(WIDTH),
    "random rows": lambda s, x: x + torch.rand(x.shape[0], 1),
    "random like": lambda s, x: x + torch.rand_like(x),
    "random ints": lambda s, x: x * torch.randint(0, 9, (WIDTH,)),
    "filled": lambda s, x: x + torch.empty(WIDTH).normal_(),
    "python random": lambda s, x: x * random.random(),
    "numpy random": lambda s, x: x * float(np.random.rand()),
    "dropout": lambda s, x: F.dropout(x),
    "dropout off": lambda s, x: F.dropout(x, 0.5, False),
    "dropout flag": lambda s, x: F.dropout(x, 0.5, s.training),
    "training": lambda s, x: x * 3 if s.training else x,
    "count": count,
    "log": log_only,
    "remember": remember,
    "cache": cached,
    "plain written": written,
    "buffer written": buffer_written,
    "norm written": norm_written,
    "weight written": weight_written,
    "value written": value_written,
    "plain": lambda s, x: x * s.plain,
    "in list": lambda s, x: x + s.tensors[0] * s.tensors[1],
    "in dict": lambda s, x: x * s.table["a"],
    "set data": lambda s, x: (setattr(x, "data", x * 2), x + 1)[1],
    "set attribute": lambda s, x: (setattr(x, "mark", 1), x + 1)[1],
    "in place": lambda s, x: (x * 1).add_(1).mul_(2),
    "in place row": row_written,
}
OUTPUTS: dict[str, Callable] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x * 2),
    "list": lambda x: [x, [x + 1]],
    "dict": lambda x: {"a": x, "b": (x * 2, None)},
    "named": lambda x: Pair(x, x * 2),
    "dataclass": lambda x: Output(x),
    "size": lambda x: (x, x.shape[0]),
    "shape": lambda x: (x, x.shape),
    "constant": lambda x: (x, 3, "text"),
    "item": lambda x: (x, x.sum().item()),
    "lists": lambda x: (x, x.tolist()),
    "cache": lambda x: (x, types.SimpleNamespace(key=x * 2, count=3)),
}
HOOKS: dict[str, Callable] = {
    "forward": lambda m: m.register_forward_hook(lambda m, i, o: o * 2),
    "pre": lambda m: m.register_forward_pre_hook(lambda m, i: (i[0] + 1,)),
    "silent": lambda m: m.register_forward_hook(lambda m, i, o: None),
    "backward": lambda m: m.register_full_backward_hook(lambda m, i, o: (i[0] * 2,) if i[0] is not None else None),
    "own forward": own_forward,
    "gradient": lambda m: [p.register_hook(lambda g: g * 2) for p in m.parameters(recurse=False)],
}


class Doubled(nn.Linear):
    def __call__(self, x: T) -> T:
        return super().__call__(x) * 2


class Block(nn.Module):
    def __init__(self, steps: list[str], number: int, inner: tuple | None, linear: str) -> None:
        super().__init__()
        self.one = Doubled(WIDTH, WIDTH) if linear == "call" else nn.Linear(WIDTH, WIDTH)
        self.two, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        if linear == "tied":
            self.two.weight = self.one.weight
        if linear == "plain":
            weight = self.one.weight.detach().clone()
            del self.one.weight
            self.one.weight = weight
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH)), self.two]
        )
        self.register_buffer("steps", torch.zeros(WIDTH))
        self.plain, self.tensors = torch.rand(WIDTH), [torch.rand(WIDTH), torch.rand(WIDTH)]
        self.table, self.cache = {"a": torch.rand(WIDTH)}, dict[str, T]()
        self.calls, self.last, self.seen, self.number = 1, None, list[int](), number
        self.names = list(steps)
        self.inner = Block(*inner) if inner else None

    def forward(self, x: T) -> T:
        for name in self.names:
            x = STEPS[name](self, x)
        return x if self.inner is None else self.inner(x)


class Model(nn.Module):
    """A block with one of several signatures and forms of its result."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.block, self.output = Block(*case["block"]), case["output"]
        self.head = nn.Linear(WIDTH, WIDTH)

    def finish(self, x: T) -> Any:
        return OUTPUTS[self.output](self.head(x))


class Plain(Model):
    def forward(self, x: T) -> Any:
        return self.finish(self.block(x))


class Masked(Model):
    def forward(self, x: T, mask: T | None = None, scale: float = 1.5) -> Any:
        x = self.block(x) * scale
        return self.finish(x if mask is None else x * mask)


class Named(Model):
    def forward(self, x: T, *, other: T, flag: bool = True) -> Any:
        return self.finish(self.block(x) + (other if flag else 2 * other))


class Nested(Model):
    def forward(self, batch: dict[str, Any]) -> Any:
        return self.finish(self.block(batch["x"]) + batch["more"][0])


class Frozen(Model):
    @torch.no_grad()
    def forward(self, x: T) -> Any:
        return self.finish(self.block(x))


SIGNATURES: dict[str, tuple[type[Model], Callable]] = {
    "plain": (Plain, lambda x: ((x,), {})),
    "masked": (Masked, lambda x: ((x,), {})),
    "mask given": (Masked, lambda x: ((x, x * 0 + 2), {})),
    "named": (Named, lambda x: ((), {"x": x, "other": x + 1})),
    "nested": (Nested, lambda x: (({"x": x, "more": [x * 2]},), {})),
    "frozen": (Frozen, lambda x: ((x,), {})),
}


# -- cases -----------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random) -> dict[str, Any]:
    def block(depth: int) -> tuple:
        steps = [rng.choice(list(STEPS)) for _ in range(rng.randint(1, 3))]
        inner = block(depth + 1) if depth < 1 and rng.random() < 0.3 else None
        return steps, rng.choice((1, 2, 4, 6)), inner, rng.choice(("", "", "", "tied", "plain", "call"))

    return {
        "block": block(0),
        "output": rng.choice(list(OUTPUTS)) if rng.random() < 0.5 else "tensor",
        "signature": rng.choice(list(SIGNATURES)) if rng.random() < 0.5 else "plain",
        "hook": (rng.choice(list(HOOKS)), rng.choice(("", "block", "block.one", "block.norm")))
        if rng.random() < 0.2
        else None,
        "batch": rng.choice((1, 1, 2, 3)),
        "training": rng.random() < 0.25,
        "example": rng.random() < 0.7,
    }


def smaller(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    steps, number, inner, linear = case["block"]
    if inner:
        yield case | {"block": inner}
        yield case | {"block": (steps, number, None, linear)}
    for i in range(len(steps)):
        if len(steps) > 1:
            yield case | {"block": (steps[:i] + steps[i + 1 :], number, inner, linear)}
    for key, simple in (("output", "tensor"), ("signature", "plain"), ("hook", None), ("training", False)):
        if case[key] != simple:
            yield case | {key: simple}
    if linear:
        yield case | {"block": (steps, number, inner, "")}


def make(case: dict[str, Any]) -> Model:
    """The same model at each call."""
    torch.manual_seed(0)
    model = SIGNATURES[case["signature"]][0](case)
    for name, b in model.named_buffers():
        if "running" in name:
            b.uniform_(0.5, 1.5)
    model.train(case["training"])
    if case["hook"]:
        what, where = case["hook"]
        HOOKS[what](model.get_submodule(where))
    return model


# -- checks ----------------------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> str:
    """All that a model holds, as text."""

    def text(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return (v.detach().tolist(), v.requires_grad, v.grad is None)
        if isinstance(v, dict):
            return {str(k): text(x) for k, x in v.items() if not isinstance(x, nn.Module)}
        return (
            [text(x) for x in v] if isinstance(v, list | tuple) else repr(v) if isinstance(v, int | str | None) else ""
        )

    return repr({name: text(vars(m)) for name, m in model.named_modules()})


def surroundings() -> list[Any]:
    names = ("zeros", "ones", "full", "arange", "tensor", "is_tensor")
    patched = [
        n for n in ("len", "type", "isinstance") if n in globals() or getattr(builtins, n).__module__ != "builtins"
    ]
    generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    calls = [nn.Module.__call__, nn.Module.__getattr__, torch.Tensor.__getattribute__, torch.autograd.Function.apply]
    return [[getattr(torch, n) for n in names], patched, generators, calls, torch.is_grad_enabled()]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Output):
        value = {"value": value.value, "more": value.more}
    if isinstance(value, types.SimpleNamespace):
        value = {"key": value.key}
    if isinstance(value, dict):
        return [x for v in value.values() for x in leaves(v)]
    if isinstance(value, tuple | list):
        return [x for v in value for x in leaves(v)]
    return [value]


def same(got: Any, want: Any) -> bool:
    ours, theirs = leaves(got), leaves(want)
    return len(ours) == len(theirs) and all(map(alike, ours, theirs))


def alike(a: Any, b: Any) -> bool:
    if not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    if not isinstance(a, ndl.Tensor) or tuple(a.shape) != tuple(b.shape):
        return False
    b = b.detach().double().numpy()
    size = float(np.abs(b).max()) if b.size else 0.0
    return bool(np.allclose(a.numpy(), b, rtol=0, atol=TOLERANCE * max(size, 1e-3), equal_nan=True))


def is_random(case: dict[str, Any], call: Callable, x: T) -> bool:
    """Whether two first calls differ when only the generators go on."""
    values = []
    for seed in (1, 2):
        model = make(case)
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        args, kwargs = call(x.clone())
        values.append([v for v in leaves(model(*args, **kwargs)) if isinstance(v, torch.Tensor)])
    return any(not torch.equal(a, b) for a, b in zip(*values, strict=True))


def gradients(result: Any, tensors: Iterable[tuple[str, Any]]) -> dict[str, np.ndarray]:
    outs = [v for v in leaves(result) if hasattr(v, "requires_grad") and v.requires_grad]
    if outs:
        total(outs).backward()
    found = {n: t.grad for n, t in tensors if getattr(t, "grad", None) is not None}
    return {
        n: np.asarray(g.detach().numpy(), "float64") for n, g in found.items() if np.abs(g.detach().numpy()).max() > 0
    }


def total(outs: list[Any]) -> Any:
    """Of squares."""
    sums = [ndl.ops.summation(o * o) if isinstance(o, ndl.Tensor) else (o * o).sum() for o in outs]
    return functools.reduce(operator.add, sums)


def compare(case: dict[str, Any], net: Any, call: Callable) -> None:
    """Values of two calls in a row at every batch, and gradients at the example's."""
    for batch in (case["batch"], *BATCHES):
        twin, ours = make(case).train(net.training), copy.deepcopy(net)
        for time in ("first", "second"):
            x = torch.randn(batch, WIDTH)
            args, kwargs = call(x)
            try:
                want = twin(*args, **kwargs)
            except Exception:
                break
            args, kwargs = call(x)
            try:
                got = ours(*args, **kwargs)
            except (ValueError, IndexError, TypeError) as e:
                if not str(e).startswith("["):
                    raise
                if batch == case["batch"] and case["example"]:
                    raise Wrong(f"the net refuses its own example: {e}") from None
                if batch == case["batch"]:
                    return
                break
            if not same(got, want):
                raise Wrong(f"other values than torch's at the {time} call of batch {batch}")
    x = torch.randn(case["batch"], WIDTH)
    if case["signature"] == "mask given" and not case["example"]:
        return  # the mask is fixed to None, and a call with one is refused
    twin, ours = make(case).train(net.training), copy.deepcopy(net)
    args, kwargs = call(x)
    theirs = gradients(twin(*args, **kwargs), twin.named_parameters())
    args, kwargs = call(x)
    mine = gradients(ours(*args, **kwargs), ours.named_tensors())
    for name, g in theirs.items():
        if name not in mine or not np.allclose(mine[name], g, rtol=0, atol=1e-3 * np.abs(g).max()):
            raise Wrong(f"another gradient of {name}" if name in mine else f"no gradient of {name}")
    seen = dict(twin.named_parameters(remove_duplicate=False))
    for name in mine.keys() - theirs.keys():
        if not any(seen[name] is seen[other] for other in theirs):
            raise Wrong(f"a gradient of {name}, which has none in torch")


def check(case: dict[str, Any]) -> str:
    warnings.simplefilter("ignore")
    model, (_, call) = make(case), SIGNATURES[case["signature"]]
    example = torch.randn(case["batch"], WIDTH)
    args, kwargs = call(example)
    before, around = snapshot(model), surroundings()
    try:
        net = torch2needle.convert(model, *((kwargs or args,) if case["example"] else ()))
    except torch2needle.Unsupported as e:
        net, text = None, str(e)
    if surroundings() != around:
        raise Wrong("convert leaves torch, Python or a generator changed")
    if snapshot(model) != before:
        raise Wrong("convert changes the model")
    if net is None:
        if not text.startswith("[convert] "):
            raise Wrong(f"no sentence: {text}")
        return "refused"
    try:
        drawing = is_random(case, call, example)
    except Exception:
        return "torch fails"
    if drawing and case["signature"] != "mask given":
        a, b = (leaves(net(*args, **kwargs))[0].numpy() for _ in range(2))
        if np.array_equal(a, b):
            raise Wrong("random numbers are frozen")
        return "random in both"
    compare(case, net, call)
    if snapshot(model) != before:
        raise Wrong("a call of the net changes the model")
    if not any("differs between training and evaluation" in n for n in net.report.notes):
        compare(case, net.eval(), call)
    return f"agrees ({net.report.capture[:12].rstrip(',')})"
