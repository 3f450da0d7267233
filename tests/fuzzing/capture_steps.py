"""Models full of what capture may misread: steps of a forward, results, signatures and hooks, by name."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 3
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


def matched(s: Block, x: T) -> T:
    match x, s.number:
        case torch.Tensor(), int():
            return x * 2
    return x


def matched_shape(s: Block, x: T) -> T:
    match x.shape:
        case (_, width):
            return x * width
    return x


@functools.singledispatch
def dispatched(x: Any) -> Any:
    return x


@dispatched.register
def _(x: torch.Tensor) -> Any:
    return x * 2


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
    "class": lambda s, x: x * 2 if x.__class__ is torch.Tensor else x,
    "match": matched,
    "match shape": matched_shape,
    "dispatch": lambda s, x: dispatched(x),
    "callable": lambda s, x: x if callable(x) else s.one(x),
    "legacy type": lambda s, x: s.one(x) if isinstance(x, torch.FloatTensor) else x,
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
