"""Gradients that come in infinite, as behind `sqrt(clamp(x, 0))` at 0: elements that were not chosen have none, not NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402

CHOOSING: dict[str, Callable] = {
    "clamp": lambda x: x.clamp(0, 2),
    "clamp_min": lambda x: x.clamp(min=0),
    "clamp_max": lambda x: x.clamp(max=0) + 2,
    "clamp by a tensor": lambda x: torch.clamp(x, min=torch.zeros(4)),
    "maximum": lambda x: torch.maximum(x, torch.zeros(4)),
    "minimum": lambda x: torch.minimum(x, torch.ones(4)) + 1,
    "fmax": lambda x: torch.fmax(x, torch.zeros(4)),
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, 0, 2),
    "threshold": lambda x: F.threshold(x, 0.5, 0.0),
    "hardsigmoid": F.hardsigmoid,
    "softshrink": lambda x: F.softshrink(x, 0.3).abs(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "max along": lambda x: x.max(-1)[0],
    "min along": lambda x: x.min(0)[0] + 2,
    "max of all": lambda x: x.max().reshape(1),
    "topk": lambda x: x.topk(2, -1)[0],
    "median": lambda x: x.median(-1)[0],
    "cummax": lambda x: x.cummax(-1)[0],
    "max_pool1d": lambda x: F.max_pool1d(x.unsqueeze(0), 2)[0],
    "triu": torch.triu,
    "atan2 at the origin": lambda x: torch.atan2(x * 0, x * 0),
    "angle of 0": lambda x: torch.complex(x * 0, x * 0).angle(),
}


class Weighted(nn.Module):
    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.f = f
        self.weight = nn.Parameter(
            torch.tensor([[-1.0, 0.0, 1.0, 4.0], [2.5, -0.25, 0.5, -3.0], [0.25, 0.75, -2.0, -1.5]])
        )

    def forward(self, x: Any) -> Any:
        return self.f(self.weight * x)


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize("place", [None, 0, -1])
def test_only_what_was_chosen(name: str, place: int | None) -> None:
    model, x = Weighted(CHOOSING[name]), torch.ones(3, 4)
    slope = torch.ones_like(model(x))
    if place is not None and "origin" not in name and "angle" not in name:
        slope.view(-1)[place] = torch.inf
    (model(x) * slope).sum().backward()
    net = torch2needle.convert(Weighted(CHOOSING[name]), (x,))
    step = ndl.compile_step(net, lambda out, g: (out * g).sum(), ndl.optim.SGD(net.parameters(), lr=1.0), ((x,), slope))
    (net(x) * ndl.Tensor(slope.numpy(), requires_grad=False)).sum().backward()
    want = model.weight.grad.numpy()
    np.testing.assert_allclose(net.weight.grad.numpy(), want, rtol=1e-5)
    net.reset_grad()
    before = net.weight.numpy().copy()
    step((x,), slope)
    np.testing.assert_allclose(before - net.weight.numpy(), want, rtol=1e-5, atol=1e-6)
