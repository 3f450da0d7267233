"""Nodes of random networks: each takes its choices and the shapes of the values so far.

It gives a function with its operands, or None where it cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from needle import nn, ops

CHANNELS = (1, 2, 3, 5, 8, 16, 16, 16, 17, 24, 32, 32, 48)
Shape = tuple[int, ...]
Made = tuple[Callable[..., Any], Sequence[int]]  # a function or layer, and the values that it takes


class Draw:
    """The numbers of a node as choices."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = iter(numbers)

    def __call__(self, options: Sequence[Any]) -> Any:
        if not options:
            raise ValueError("[draw] there is nothing to choose from.")
        return options[next(self.numbers, 0) % len(options)]


def image(d: Draw, shapes: list[Any]) -> tuple[int, Shape] | None:
    """A value of four axes."""
    found = [i for i, (s, t) in enumerate(shapes) if len(s) == 4 and s[1] and t.startswith("float")]
    if not found:
        return None
    i = d(latest(found))
    return i, shapes[i][0]


def latest(values: list[int]) -> list[int]:
    """Half of the choices are the last value: what runs fuse and finish stands one behind the other."""
    return [values[-1]] * len(values) + values[::-1]


def rows(d: Draw, shapes: list[Any], least: int = 1, most: int = 8) -> tuple[int, Shape] | None:
    """A value with this many axes."""
    found = [i for i, (s, t) in enumerate(shapes) if least <= len(s) <= most and t.startswith("float")]
    if not found:
        return None
    i = d(latest(found))
    return i, shapes[i][0]


def divisors(*numbers: int) -> list[int]:
    return [g for g in range(1, min(numbers) + 1) if all(n % g == 0 for n in numbers)]


def conv(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := image(d, shapes)) is None:
        return None
    i, (_, c, h, w) = x
    kernel, stride, dilation = d([1, 3, 3, 3, (3, 2), 5, (1, 3)]), d([1, 1, 1, 2, (2, 1)]), d([1, 1, 1, 2])
    out = d(CHANNELS)
    groups = d([1, 1, 1, c, *divisors(c, out)])
    out = c * d([1, 1, 2]) if groups == c else out
    groups = groups if out % groups == 0 else 1
    padding = d([0, 1, 1, (1, 2), 2, (0, 1)])
    size = lambda n, k, p: n + 2 * p - dilation * (k - 1)  # noqa: E731
    pair = lambda v: v if isinstance(v, tuple) else (v, v)  # noqa: E731
    if min(size(n, k, p) for n, k, p in zip((h, w), pair(kernel), pair(padding), strict=True)) < 1:
        kernel, padding, dilation = 1, 0, 1
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return nn.Conv(c, out, kernel, bias=d([True, True, False]), layout="torch", **options), [i]


def transposed(d: Draw, shapes: list[Any]) -> Made | None:
    x = image(d, shapes)
    if x is None or max(x[1][2:]) > 10:
        return None
    i, (_, c, _, _) = x
    out, kernel, stride = d(CHANNELS), d([2, 3, 4, (2, 3)]), d([1, 2, 2, (1, 2)])
    options = {"padding": d([0, 0, 1]), "groups": d([1, 1, *divisors(c, out)]), "dilation": d([1, 1, 1, 2])}
    return nn.ConvTranspose2d(c, out, kernel, stride=stride, bias=d([True, False]), **options), [i]


def batch_norm(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := rows(d, shapes, 2, 4)) is None or len(x[1]) == 3:
        return None
    i, shape = x
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    return kind(shape[1], eps=d([1e-5, 1e-3]), affine=d([True, True, False])), [i]


def other_norm(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := rows(d, shapes, 2, 4)) is None:
        return None
    i, shape = x
    if len(shape) == 4 and d([True, False]):
        return nn.GroupNorm(d(divisors(shape[1])), shape[1], eps=0.1), [i]
    return nn.LayerNorm(shape[-1], eps=0.1), [i]


ACTIVATIONS: list[Callable[[], Callable]] = [
    nn.ReLU,
    nn.ReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    nn.SiLU,
    nn.ReLU6,
    nn.Hardswish,
    nn.LeakyReLU,
    nn.ELU,
    lambda: ops.relu,
    lambda: ops.softplus,
    lambda: lambda x: ops.exp(-ops.abs(x)),
    lambda: lambda x: ops.sqrt(ops.abs(x) + 0.5),
    lambda: lambda x: x * 2.0 - 1.0,
    lambda: lambda x: ops.clamp(x, -0.5, 1.5),
    lambda: ops.negate,
]


def activation(d: Draw, shapes: list[Any]) -> Made | None:
    x = rows(d, shapes, 0)
    return None if x is None else (d(ACTIVATIONS)(), [x[0]])


def pool(d: Draw, shapes: list[Any]) -> Made | None:
    x = image(d, shapes)
    if x is None or min(x[1][2:]) < 2:
        return None
    kernel, stride, padding = d([2, 2, (2, 1), 3]), d([2, 2, 1, (1, 2)]), d([0, 0, 1])
    kernel = 2 if min(x[1][2:]) < 3 else kernel
    padding = 0 if kernel == (2, 1) else padding
    ceil = d([False, False, True])
    if d([True, False]):
        return (lambda x: ops.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil)), [x[0]]
    count = d([True, False])
    return (lambda x: ops.avg_pool2d(x, kernel, stride, padding, ceil, count)), [x[0]]


def reduce(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := rows(d, shapes, 2)) is None or 0 in x[1]:
        return None
    i, shape = x
    if len(shape) == 4 and (size := d([1, 1, 2, (1, 3), None])) is not None:
        return (lambda x: ops.adaptive_avg_pool2d(x, size)), [i]
    axes, keep = d([(-1,), (1,), (-1, -2)] if len(shape) > 2 else [(1,), (-1,)]), d([True, False])
    kind = d([ops.mean, ops.summation, ops.amax])
    return (lambda x: kind(x, axes, keep)), [i]


def resize(d: Draw, shapes: list[Any]) -> Made | None:
    x = image(d, shapes)
    if x is None or max(x[1][2:]) > 10:
        return None
    options: dict[str, Any] = d([{"scale_factor": 2}, {"scale_factor": 2}, {"size": (5, 7)}, {"size": (3, 3)}])
    mode = d([{"mode": "nearest"}, {"mode": "bilinear"}, {"mode": "bilinear", "align_corners": True}])
    return (lambda x: ops.interpolate(x, **options, **mode)), [x[0]]


def concat(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := rows(d, shapes, 1, 4)) is None:
        return None
    i, shape = x
    axis = d([1, 1, 1, 0, -1] if len(shape) > 1 else [0]) % len(shape)
    alike = [
        k
        for k, (s, t) in enumerate(shapes)
        if len(s) == len(shape)
        and t == shapes[i][1]
        and all(a == b or j == axis for j, (a, b) in enumerate(zip(s, shape, strict=True)))
    ]
    parts = [d([i, *alike[::-1]]) for _ in range(d([2, 2, 2, 3, 4]))]
    if sum(shapes[p][0][axis] for p in parts) > 120:
        return None
    return (lambda *xs: ops.concat(xs, axis)), parts


def binary(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := rows(d, shapes)) is None:
        return None
    i, shape = x
    fits = lambda s: len(s) <= len(shape) and all(a in (1, b) for a, b in zip(s[::-1], shape[::-1], strict=False))  # noqa: E731
    alike = [k for k, (s, t) in enumerate(shapes) if t.startswith("float") and fits(s)]
    k = d([*alike[::-1]])
    f = d([ops.add, ops.add, ops.add, ops.multiply, ops.maximum, lambda a, b: a - b, lambda a, b: ops.relu(a + b)])
    return f, d([[i, k], [k, i]])


def linear(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := rows(d, shapes, 1)) is None or not x[1][-1]:
        return None
    i, shape = x
    return nn.Linear(shape[-1], d(CHANNELS), bias=d([True, True, False]), layout=d(["torch", "needle"])), [i]


def embedding(d: Draw, shapes: list[Any]) -> Made | None:
    found = [i for i, (_, t) in enumerate(shapes) if t == "int64"]
    return (nn.Embedding(8, d(CHANNELS)), [d(found)]) if found else None


def attention(d: Draw, shapes: list[Any]) -> Made | None:
    x = rows(d, shapes, 3, 4)
    if x is None or 0 in x[1] or x[1][-1] > 48:
        return None
    i, shape = x
    causal = d([False, True])
    if len(shape) == 3 and d([True, False]):
        return Attention(shape[-1], d(divisors(shape[-1])), causal), [i]
    return (lambda x: ops.scaled_dot_product_attention(x, x * 0.5, x, causal=causal)), [i]


class Attention(nn.Module):
    """As the models of torch write it: three projections, heads by reshape and transpose, one more projection."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, layout="torch") for _ in range(4))
        self.heads, self.causal = heads, causal

    def forward(self, x: Any) -> Any:
        n, length, width = x.shape
        split = lambda t: t.reshape((n, length, self.heads, width // self.heads)).transpose(1, 2)  # noqa: E731
        y = ops.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), causal=self.causal)
        return self.out(y.transpose(1, 2).reshape((n, length, width)))


def view(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := rows(d, shapes, 2)) is None:
        return None
    i, shape = x
    n = len(shape)
    half = max(1, shape[1] // 2)
    order = d([(0, 2, 3, 1), (1, 0, 2, 3), (0, 1, 3, 2)]) if n == 4 else tuple(reversed(range(n)))
    kinds: list[Callable] = [
        lambda x: x[:, :half],
        lambda x: x[:, half:] if shape[1] > half else x[:, -1:],
        lambda x: ops.flip(x, (1,)),
        lambda x: ops.permute(x, order),
        lambda x: ops.flatten(x, 1),
        lambda x: ops.reshape(x, shape),
        lambda x: x[:, ::2],
        lambda x: ops.unsqueeze(x, 1)[:, 0],
        lambda x: ops.stack([x, x], 1)[:, 1],
    ]
    if n == 4:
        kinds += [
            lambda x: ops.pad(x, (1, 0, 2, 1)),
            lambda x: ops.flatten(x, 2),
            lambda x: ops.pad(x, (0, 0, 0, 0, 0, 1)),
        ]
    if n == 4 and shape[1] % 4 == 0:
        kinds += [lambda x: ops.pixel_shuffle(x, 2)]
    if n < 4:
        kinds += [lambda x: ops.unsqueeze(ops.unsqueeze(x, -1), -1) if n == 2 else ops.unsqueeze(x, -1)]
    return d(kinds), [i]


def softmax(d: Draw, shapes: list[Any]) -> Made | None:
    if (x := rows(d, shapes)) is None or 0 in x[1]:
        return None
    axis, kind = d([-1, 0, 1 % len(x[1])]), d([ops.softmax, ops.log_softmax])
    return (lambda x: kind(x, axis)), [x[0]]


def matmul(d: Draw, shapes: list[Any]) -> Made | None:
    x = rows(d, shapes, 2, 4)
    if x is None or x[1][-1] > 64:
        return None
    return (lambda x: ops.matmul(x, ops.transpose(x)) * 0.1), [x[0]]


def choose(d: Draw, shapes: list[Any]) -> Made | None:
    x = rows(d, shapes, 0)
    return None if x is None else ((lambda x: ops.where(x > 0.0, x * 0.5, x * 0.25)), [x[0]])


def parameter(d: Draw, shapes: list[Any]) -> Made | None:
    x = rows(d, shapes, 1)
    if x is None:
        return None
    i, shape = x
    of_channels = len(shape) > 1 and d([True, False])
    kept = [axis == 1 if of_channels else d([True, False]) for axis in range(len(shape))]
    held = tuple(n if k else 1 for n, k in zip(shape, kept, strict=True))
    return Beside(held, d([ops.add, ops.add, ops.multiply])), [i]


class Beside(nn.Module):
    """x with a parameter, of which some axes are one number."""

    def __init__(self, shape: Shape, join: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.join = nn.Parameter(np.random.standard_normal(shape).astype("float32")), join

    def forward(self, x: Any) -> Any:
        return self.join(x, self.weight)


NODES: dict[str, tuple[int, Callable[[Draw, list[Any]], Made | None]]] = {
    "conv": (6, conv),
    "transposed": (1, transposed),
    "batch_norm": (3, batch_norm),
    "norm": (1, other_norm),
    "activation": (5, activation),
    "pool": (2, pool),
    "reduce": (1, reduce),
    "resize": (1, resize),
    "concat": (5, concat),
    "binary": (4, binary),
    "linear": (2, linear),
    "embedding": (1, embedding),
    "attention": (1, attention),
    "view": (3, view),
    "softmax": (1, softmax),
    "matmul": (1, matmul),
    "choose": (1, choose),
    "parameter": (3, parameter),
    "again": (2, lambda d, shapes: None),  # an earlier layer once more
}
