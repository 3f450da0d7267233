"""Calls that the search of gradients draws from: families of torch functions and layers with odd arguments and shapes.

A family returns call (a name), inputs ((shape, values) each), and args and kwargs where "x0" stands for the first input.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from torch2needle.rules.registry import FUNCTION_RULES, target_name

Call = dict[str, Any]
VALUES = ("normal", "normal", "normal", "normal", "zeros", "ties", "ties", "rows", "positive", "large", "tiny", "nan")
SMOOTH = ("normal", "normal", "normal", "ties", "zeros", "rows")


def shape_of(rng: random.Random, least: int = 0, most: int = 4) -> tuple:
    return tuple(rng.choice((1, 1, 2, 3, 4, 5, 17)) for _ in range(rng.randint(least, most)))


def any_axis(rng: random.Random, rank: int) -> int:
    return rng.randrange(-rank, rank) if rank else rng.choice((0, -1))


def some_axes(rng: random.Random, rank: int) -> Any:
    """An axis, several, all by None, or an empty list."""
    if rng.random() < 0.3:
        return any_axis(rng, rank)
    axes = rng.sample(range(rank), rng.randint(1, rank)) if rank else []
    return rng.choice((None, axes, [a - rank for a in axes]))


def maybe(rng: random.Random, **choices: Any) -> Call:
    """Some of the keywords, each with one of its choices."""
    return {k: rng.choice(v) for k, v in choices.items() if rng.random() < 0.6}


# -- element by element: whatever has a rule and takes one or two tensors ---------------------------------------------------


@functools.cache
def maps(count: int) -> list[str]:
    """Functions with a rule that take `count` tensors of one shape to a tensor of that shape with a gradient."""
    found = []
    for target in FUNCTION_RULES:
        name = target_name(target).replace("torch.nn.functional", "F").replace("torch.Tensor.", "Tensor.")
        inner = name.rpartition(".")[2].startswith("_")  # torch's own, which does not check what it is given
        if (
            inner
            or "aten" in name
            or "dropout" in name
            or "rrelu" in name
            or "gumbel" in name
            or name == "torch.normal"
            or name.endswith("_")
            or not callable(target)
        ):
            continue
        try:
            out = target(*(torch.rand(2, 3, requires_grad=True) for _ in range(count)))
        except Exception:  # it takes something else
            continue
        if isinstance(out, torch.Tensor) and out.shape == (2, 3) and out.requires_grad and out.dtype == torch.float32:
            found.append(name)
    return sorted(found)


def unary(rng: random.Random) -> Call:
    return {"call": rng.choice(maps(1)), "args": ["x0"], "inputs": [(shape_of(rng), rng.choice(VALUES))]}


def binary(rng: random.Random) -> Call:
    shape = shape_of(rng)
    others = [tuple(1 if rng.random() < 0.3 else n for n in shape), shape[rng.randint(0, len(shape)) :], shape]
    shapes = [shape, rng.choice(others)]
    rng.shuffle(shapes)
    inputs = [(s, rng.choice(VALUES)) for s in shapes]
    return {"call": rng.choice(maps(2)), "args": ["x0", "x1"], "inputs": inputs}


def with_number(rng: random.Random) -> Call:
    """Functions of a tensor and numbers."""
    n = lambda *more: rng.choice((0.0, 0.5, 1.0, 2.0, -0.7, 3.0, *more))  # noqa: E731
    name, rest = rng.choice(
        [
            *((f, lambda: [n()]) for f in ("F.elu", "F.celu", "F.leaky_relu", "F.hardshrink", "F.softshrink")),
            *((f, lambda: [n(0, 1, 2, 3, -1)]) for f in ("torch.pow", "torch.fmod", "torch.remainder", "torch.div")),
            *(
                (f, lambda: [n(1, 2)])
                for f in ("torch.add", "torch.mul", "torch.rsub", "torch.sub", "torch.true_divide")
            ),
            *((f, lambda: [rng.choice((None, -0.5, 0.0)), n()]) for f in ("torch.clamp", "torch.clip")),
            ("F.softplus", lambda: [n() or 1.0, rng.choice((20, 1, 0, 0.5))]),
            ("F.threshold", lambda: [n(), n()]),
            ("F.hardtanh", lambda: [rng.choice((-1, 0, -0.5)), n()]),
        ]
    )
    if rng.random() < 0.1:
        return {"call": "torch.pow", "args": [n(), "x0"], "inputs": [(shape_of(rng), rng.choice(VALUES))]}
    if rng.random() < 0.1:
        kwargs = maybe(rng, approximate=("none", "tanh"))
        return {"call": "F.gelu", "args": ["x0"], "kwargs": kwargs, "inputs": [(shape_of(rng), rng.choice(VALUES))]}
    return {"call": name, "args": ["x0", *rest()], "inputs": [(shape_of(rng), rng.choice(VALUES))]}


def of_three(rng: random.Random) -> Call:
    shape = shape_of(rng)
    xs = [(shape if rng.random() < 0.7 else shape[-1:], rng.choice(VALUES)) for _ in range(3)]
    name = rng.choice(("torch.where", "torch.lerp", "torch.addcmul", "torch.addcdiv", "Tensor.masked_fill"))
    if name == "torch.where":
        return {"call": name, "args": ["x0", "x1", "x2"], "inputs": [(xs[0][0], "mask"), *xs[1:]]}
    if name == "Tensor.masked_fill":
        fill = rng.choice((0.0, -1e9, float("-inf")))
        return {"call": name, "args": ["x0", "x1", fill], "inputs": [(shape, xs[0][1]), (xs[1][0], "mask")]}
    if name == "torch.lerp" and rng.random() < 0.5:
        return {"call": name, "args": ["x0", "x1", rng.choice((0.0, 0.3, 1.0, 1.5))], "inputs": xs[:2]}
    kwargs = {} if name == "torch.lerp" else maybe(rng, value=(0.5, 2, 0))
    return {"call": name, "args": ["x0", "x1", "x2"], "kwargs": kwargs, "inputs": xs}


def gated(rng: random.Random) -> Call:
    shape = shape_of(rng, 1)
    axis = any_axis(rng, len(shape))
    shape = tuple(2 * n if i == axis % len(shape) else n for i, n in enumerate(shape))
    if rng.random() < 0.5:
        return {"call": "F.glu", "args": ["x0", axis], "inputs": [(shape, rng.choice(VALUES))]}
    channels = shape[1] if len(shape) > 1 else 1
    weight = ((rng.choice((1, channels)),), "normal")
    return {"call": "F.prelu", "args": ["x0", "x1"], "inputs": [(shape, rng.choice(VALUES)), weight]}


# -- reductions, norms -----------------------------------------------------------------------------------------------------

ONE_AXIS = ("max", "min", "prod", "cumsum", "argmax", "softmax", "log_softmax", "aminmax")
PAIRS = ("max", "min", "aminmax", "std_mean", "var_mean")  # give two tensors
MANY_AXES = ("sum", "mean", "amax", "amin", "logsumexp")


def reduction(rng: random.Random) -> Call:
    shape = shape_of(rng)
    x, rank = (shape, rng.choice(VALUES)), len(shape)
    kind = rng.randrange(4)
    if kind == 0:
        name = rng.choice(ONE_AXIS)
        if name in ("max", "min", "prod") and rng.random() < 0.2:
            return {"call": f"torch.{name}", "args": ["x0"], "inputs": [x]}
        kwargs = maybe(rng, keepdim=(True, False)) if name in ("max", "min", "prod") else {}
        kwargs["dim"] = any_axis(rng, rank)
        results = 2 * (name in PAIRS)
        return {"call": f"torch.{name}", "args": ["x0"], "kwargs": kwargs, "inputs": [x], "results": results}
    kwargs = {"dim": some_axes(rng, rank)} if rng.random() < 0.8 else {}
    kwargs |= maybe(rng, keepdim=(True, False)) if kwargs else {}
    if kind == 1:
        return {"call": f"torch.{rng.choice(MANY_AXES)}", "args": ["x0"], "kwargs": kwargs, "inputs": [x]}
    if kind == 2:
        kwargs |= maybe(rng, correction=(0, 1)) if rng.random() < 0.8 else maybe(rng, unbiased=(True, False))
        name = rng.choice(("std", "var", "std_mean", "var_mean"))
        results = 2 * (name in PAIRS)
        return {"call": f"torch.{name}", "args": ["x0"], "kwargs": kwargs, "inputs": [x], "results": results}
    name, p = rng.choice((("linalg.vector_norm", "ord"), ("norm", "p")))
    kwargs |= maybe(rng, **{p: (0, 1, 2, 2.0, 3, 0.5, float("inf"), float("-inf"))})
    return {"call": f"torch.{name}", "args": ["x0"], "kwargs": kwargs, "inputs": [x]}


def similarity(rng: random.Random) -> Call:
    shape = shape_of(rng, 1)
    axis, x = any_axis(rng, len(shape)), (shape, rng.choice(SMOOTH))
    kind = rng.randrange(3)
    if kind == 0:
        kwargs = maybe(rng, p=(1, 2, 3.0, float("inf")), dim=(axis,), eps=(1e-12, 1e-3))
        return {"call": "F.normalize", "args": ["x0"], "kwargs": kwargs, "inputs": [x]}
    other = (shape if rng.random() < 0.7 else tuple(rng.choice((1, n)) for n in shape), rng.choice(SMOOTH))
    if kind == 1:
        kwargs = maybe(rng, dim=(axis,), eps=(1e-8, 1e-2))
        return {"call": "F.cosine_similarity", "args": ["x0", "x1"], "kwargs": kwargs, "inputs": [x, other]}
    kwargs = maybe(rng, p=(1.0, 2.0, 3.0), eps=(1e-6, 0.1), keepdim=(True,))
    return {"call": "F.pairwise_distance", "args": ["x0", "x1"], "kwargs": kwargs, "inputs": [x, other]}


def norm_layer(rng: random.Random) -> Call:
    name = rng.choice(
        ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "BatchNorm", "InstanceNorm", "LocalResponseNorm")
    )
    kind = rng.choice((*SMOOTH, "shifted", "large", "tiny"))
    if name in ("LayerNorm", "RMSNorm"):
        shape = shape_of(rng, 1)
        kwargs = maybe(rng, eps=(1e-5, 1e-12, 0.1), elementwise_affine=(True, False))
        kwargs |= maybe(rng, bias=(True, False)) if name == "LayerNorm" else {}
        normalized = list(shape[rng.randrange(len(shape)) :])
        return {"call": f"nn.{name}", "args": [normalized], "kwargs": kwargs, "inputs": [(shape, kind)]}
    n = rng.choice((1, 2, 3))
    channels = rng.choice((1, 2, 3, 4, 16, 18))
    sizes = tuple(rng.choice((1, 1, 2, 3, 5)) for _ in range(n))
    shape = (rng.choice((1, 2, 3)), channels, *sizes)
    if name == "LocalResponseNorm":
        kwargs = maybe(rng, alpha=(1e-4, 1.0), beta=(0.75, 0.5, 1.0), k=(1.0, 2.0))
        return {
            "call": "nn.LocalResponseNorm",
            "args": [rng.randint(1, 5)],
            "kwargs": kwargs,
            "inputs": [(shape, kind)],
        }
    if name == "GroupNorm":
        groups = rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
        kwargs = maybe(rng, eps=(1e-5, 1e-12, 0.1), affine=(True, False))
        return {"call": "nn.GroupNorm", "args": [groups, channels], "kwargs": kwargs, "inputs": [(shape, kind)]}
    kwargs = maybe(rng, affine=(True, False), track_running_stats=(True, False), eps=(1e-5, 0.1))
    kwargs |= maybe(rng, momentum=(0.1, 0.9, 0.0, 1.0, *([None] if name == "BatchNorm" else [])))
    shape = shape[:2] if name == "BatchNorm" and n == 1 and rng.random() < 0.5 else shape
    return {"call": f"nn.{name}{n}d", "args": [channels], "kwargs": kwargs, "inputs": [(shape, kind)]}


# -- windows ---------------------------------------------------------------------------------------------------------------


def axes(rng: random.Random, n: int, *choices: int) -> list:
    return [rng.choice(choices) for _ in range(n)]


def convolution(rng: random.Random) -> Call:
    n = rng.choice((1, 2, 2, 2, 3))
    few = n == 3
    size = axes(rng, n, 1, 1, 2, 3, 4) if few else axes(rng, n, 1, 1, 2, 3, 3, 4, 5, 7, 9)
    kernel = axes(rng, n, 1, 2, 3) if few else axes(rng, n, 1, 1, 2, 3, 3, 4, 5)
    groups = rng.choice((1, 1, 1, 1, 2, 3, 16))
    i, o = (groups * rng.choice((1, 1, 2, 3, *(() if groups == 16 else (16, 17)))) for _ in range(2))
    stride, dilation = axes(rng, n, 1, 1, 2, 3, 4), axes(rng, n, 1, 1, 2, 3, 4)
    kwargs = {**maybe(rng, stride=(stride,), dilation=(dilation,), bias=(True, False)), "groups": groups}
    if rng.random() < 0.7:
        kwargs["padding"] = axes(rng, n, 0, 1, 1, 2, 3, 4)
    transposed = rng.random() < 0.4
    if transposed and rng.random() < 0.5:
        most = [max(s, d) for s, d in zip(kwargs.get("stride", [1] * n), kwargs.get("dilation", [1] * n), strict=True)]
        kwargs["output_padding"] = [rng.randrange(m) for m in most]
    elif not transposed and rng.random() < 0.2:
        kwargs["padding"] = rng.choice(("same", "valid"))
    if not transposed and rng.random() < 0.2:
        kwargs["padding_mode"] = rng.choice(("reflect", "replicate", "circular"))
    x = (
        (rng.choice((1, 1, 2, 3, 5)), i, *size),
        rng.choice(("normal", "normal", "zeros", "nan" if groups == 1 else "ties")),
    )
    x = (x[0][1:], x[1]) if rng.random() < 0.05 else x
    name = f"nn.Conv{'Transpose' if transposed else ''}{n}d"
    return {"call": name, "args": [i, o, kernel], "kwargs": kwargs, "inputs": [x]}


def pool(rng: random.Random) -> Call:
    n = rng.choice((1, 2, 2, 2, 3))
    few = n == 3
    size = axes(rng, n, 1, 1, 2, 3, 4) if few else axes(rng, n, 1, 1, 2, 3, 3, 4, 5, 7, 9)
    x = ((rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3, 16, 17)), *size), rng.choice((*SMOOTH, "nan", "-inf")))
    kind = rng.randrange(4)
    if kind == 0:
        name = rng.choice(("Avg", "Max"))
        sizes = axes(rng, n, 1, 1, 2, 3, 5, *((None,) if n > 1 else ()))  # type: ignore[arg-type]
        return {"call": f"nn.Adaptive{name}Pool{n}d", "args": [sizes if n > 1 else sizes[0]], "inputs": [x]}
    kernel = axes(rng, n, 1, 2, 3) if few else axes(rng, n, 1, 1, 2, 3, 3, 4, 5)
    kwargs = maybe(rng, stride=(axes(rng, n, 1, 1, 2, 3),), ceil_mode=(True, False))
    if rng.random() < 0.6:
        kwargs["padding"] = [rng.randint(0, k // 2) for k in kernel]
    if kind == 1:
        kwargs |= maybe(rng, count_include_pad=(True, False))
        kwargs |= maybe(rng, divisor_override=(1, 3, 7)) if n > 1 and rng.random() < 0.3 else {}
        return {"call": f"nn.AvgPool{n}d", "args": [kernel], "kwargs": kwargs, "inputs": [x]}
    if not kwargs.get("ceil_mode"):  # torch's gradient writes out of bounds where a window has no pixel
        kwargs |= maybe(rng, dilation=(axes(rng, n, 1, 1, 2, 3),))
        padding, dilation = kwargs.get("padding", [0] * n), kwargs.get("dilation", [1] * n)
        if any(d > 1 and d * (k - 1) >= s + p for s, k, p, d in zip(size, kernel, padding, dilation, strict=True)):
            kwargs.pop("dilation", None)
    return {"call": f"nn.MaxPool{n}d", "args": [kernel], "kwargs": kwargs, "inputs": [x]}


MODES = {
    1: ("nearest", "linear", "area"),
    2: ("nearest", "bilinear", "bicubic", "area"),
    3: ("nearest", "trilinear", "area"),
}


def resize(rng: random.Random) -> Call:
    n = rng.choice((1, 2, 2, 2, 3))
    size = axes(rng, n, 1, 1, 2, 3, 4, 5)
    mode = rng.choice((*MODES[n], "nearest-exact"))
    kwargs: Call = {"mode": mode}
    if rng.random() < 0.5:
        kwargs["size"] = axes(rng, n, 1, 2, 3, 5, 8)
    else:
        factors = [rng.choice((0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0, 2.5, 3.0)) for _ in range(n)]
        kwargs |= {
            "scale_factor": rng.choice((factors, factors[0])),
            **maybe(rng, recompute_scale_factor=(True, False)),
        }
    if mode in ("linear", "bilinear", "bicubic", "trilinear"):
        kwargs |= maybe(rng, align_corners=(True, False))
    if mode == "bicubic" and "scale_factor" in kwargs:  # torch copies the gradient where the size stays the same
        kwargs["recompute_scale_factor"] = True
    x = (
        (rng.choice((1, 2)), rng.choice((1, 2, 16, 17)), *size),
        rng.choice(("normal", "normal", "ties", "nan" if "linear" in mode else "zeros")),
    )
    return {"call": "F.interpolate", "args": ["x0"], "kwargs": kwargs, "inputs": [x]}


def patches(rng: random.Random) -> Call:
    size, kernel = axes(rng, 2, 1, 2, 3, 4, 5, 7), axes(rng, 2, 1, 1, 2, 3)
    kwargs: Call = {
        "dilation": axes(rng, 2, 1, 1, 2, 3),
        "padding": axes(rng, 2, 0, 0, 1, 2),
        "stride": axes(rng, 2, 1, 2, 3),
    }
    batch, channels = rng.choice((1, 2)), rng.choice((1, 2, 17))
    if rng.random() < 0.5:
        shape = (batch, channels, *size)
        return {"call": "F.unfold", "args": ["x0", kernel], "kwargs": kwargs, "inputs": [(shape, rng.choice(VALUES))]}
    blocks = 1
    for s, k, d, p, t in zip(size, kernel, kwargs["dilation"], kwargs["padding"], kwargs["stride"], strict=True):
        blocks *= max(0, (s + 2 * p - d * (k - 1) - 1) // t + 1)
    shape = (batch, channels * kernel[0] * kernel[1], blocks)
    return {"call": "F.fold", "args": ["x0", size, kernel], "kwargs": kwargs, "inputs": [(shape, "normal")]}


def padding(rng: random.Random) -> Call:
    mode = rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    n = rng.randint(1, 3)
    shape = tuple(axes(rng, n if mode == "constant" and rng.random() < 0.3 else n + 2, 1, 2, 3, 4, 5))
    pads = [rng.choice((0, 0, 1, 2, 3, -1, -2)) for _ in range(2 * n)]
    kwargs = {"mode": mode, **(maybe(rng, value=(0.0, 0.5, float("-inf"))) if mode == "constant" else {})}
    return {"call": "F.pad", "args": ["x0", pads], "kwargs": kwargs, "inputs": [(shape, rng.choice(VALUES))]}
