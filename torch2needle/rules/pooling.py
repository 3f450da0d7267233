"""Rules of pooling over one, two and three axes: modules and functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import ops
from needle.nn.pool import unpooled
from needle.ops.nn.spatial import per_axis

from .registry import rule
from .tables import functions, layers

AVERAGE = "kernel_size stride padding ceil_mode count_include_pad"

layers("kernel_size stride padding dilation ceil_mode return_indices", nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
layers("kernel_size stride padding", nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)
layers(AVERAGE, nn.AvgPool1d)
layers(f"{AVERAGE} divisor_override", nn.AvgPool2d, nn.AvgPool3d)
layers("output_size", nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
layers("output_size return_indices", nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)

aten = torch.ops.aten


def windows(f: Callable) -> Callable:
    """f(input, kernel_size, stride, ...), where aten writes an absent stride as an empty list."""
    return lambda input, kernel_size, stride, *rest: f(input, kernel_size, stride or None, *rest)


def with_places(f: Callable, places: Callable) -> Callable:
    """The pool f, and where its maxima lie where the last argument asks for that."""

    def pool(input: Any, *arguments: Any) -> Any:
        *window, wanted = arguments
        values = f(input, *window)
        return (values, places(input, *window)) if wanted else values

    return pool


WINDOWS = "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False"


def maxima(signature: str, f: Callable, places: Callable, table: dict[Any, str]) -> None:
    """The rules of a pool's torch functions, which give places always, never, or where they are asked for."""
    both = windows(with_places(f, places)) if "kernel_size" in signature else with_places(f, places)
    for target, when in table.items():
        if when == "never":
            functions(signature, {(target,): lambda *given: both(*given, False)})
        else:
            pool = both if when == "asked" else lambda *given: both(*given[:-1], True)
            functions(f"{signature}, return_indices=False", {(target,): pool})


for _n in (1, 2, 3):
    _name, _pool, _adaptive = f"max_pool{_n}d", getattr(ops, f"max_pool{_n}d"), f"adaptive_max_pool{_n}d"
    _targets = {
        getattr(F, _name): "asked",
        getattr(F, f"{_name}_with_indices"): "always",
        getattr(torch, _name): "never",
    }
    _places = f"{_name}_with_indices"
    _targets[torch.max_pool1d_with_indices if _n == 1 else getattr(aten, _places).default] = "always"
    maxima(WINDOWS, _pool, partial(ops.max_pool_places, axes=_n), _targets)
    _targets = {getattr(F, _adaptive): "asked", getattr(F, f"{_adaptive}_with_indices"): "always"}
    _targets[torch.adaptive_max_pool1d if _n == 1 else getattr(aten, _adaptive).default] = "always"
    maxima("input, output_size", getattr(ops, _adaptive), partial(ops.adaptive_max_pool_places, axes=_n), _targets)
    functions(
        "input, indices, kernel_size, stride=None, padding=0, output_size=None",
        {(getattr(F, f"max_unpool{_n}d"),): partial(unpooled, _n)},
    )
functions("input, indices, output_size", {(aten.max_unpool2d.default,): ops.max_unpool})
functions(
    "input, indices, output_size, stride, padding",
    {(aten.max_unpool3d.default,): lambda input, indices, size, *_: ops.max_unpool(input, indices, size)},
)


functions(
    "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True",
    {(F.avg_pool1d, torch.avg_pool1d): windows(ops.avg_pool1d)},
)
functions(
    "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None",
    {(F.avg_pool2d,): windows(ops.avg_pool2d), (F.avg_pool3d,): windows(ops.avg_pool3d)},
)
functions(
    "input, output_size",
    {
        (F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d): ops.adaptive_avg_pool1d,
        (F.adaptive_avg_pool2d,): ops.adaptive_avg_pool2d,
        (F.adaptive_avg_pool3d,): ops.adaptive_avg_pool3d,
    },
)


def fractional(n: int, wanted: bool | None) -> Callable:
    def pool(
        input: Any,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = False,
        _random_samples: Any = None,
    ) -> Any:
        if _random_samples is None:
            lead = tuple(input.shape[i] for i in range(max(input.ndim - n, 0)))
            _random_samples = ops.rand_like(input, (1,) * (2 - len(lead)) + (*lead, n))
        if output_size is None:
            ratios = per_axis("fractional_max_pool", output_ratio, n)
            sizes = (input.shape[i - n] for i in range(n))
            output_size = tuple(math.floor(s * r) for s, r in zip(sizes, ratios, strict=True))
        values, places = ops.fractional_max_pool(input, kernel_size, output_size, _random_samples, axes=n)
        return (values, places) if return_indices or wanted else values

    return pool


for _n in (2, 3):
    rule(getattr(F, f"fractional_max_pool{_n}d"))(fractional(_n, None))
    rule(getattr(F, f"fractional_max_pool{_n}d_with_indices"))(fractional(_n, True))
    functions(
        "input, kernel_size, output_size, random_samples",
        {(getattr(aten, f"fractional_max_pool{_n}d").default,): partial(ops.fractional_max_pool, axes=_n)},
    )
