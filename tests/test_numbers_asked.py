"""Numbers that a forward makes of values by Python's functions: `float(t)`, `math.sqrt(t)`, `round(float(t), 2)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import log1p
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from needle.nn.functional import GuardError  # noqa: E402
from test_guards import ONES, Asks  # noqa: E402


class Scaled(Asks):
    def __init__(self, number: Callable) -> None:
        super().__init__()
        self.number = number

    def factor(self, x: torch.Tensor) -> Any:
        return self.number(x)


REALS: dict[str, Callable] = {
    "item": lambda x: x.abs().mean().item(),
    "float": lambda x: float(x.abs().mean()) * 2,
    "float of a count": lambda x: float((x > 0).sum()) / 4,
    "sqrt": lambda x: math.sqrt(x.abs().sum()),
    "imported": lambda x: log1p(x.abs().sum().item()),
    "exp": lambda x: -math.exp(-float(x.abs().mean())),
    "round": lambda x: round(float(x.sum()), 2) + round(x.mean().item(), 1),
    "full": lambda x: (
        torch.full((4,), float(x.double()[0, 0])) + torch.full((4,), x[0, 1].item(), dtype=torch.float64).float()
    ),
    "a list": lambda x: torch.tensor([float(x[0, 0]), x[0, 1].item(), 2.0, 3.0]),
    "full_like": lambda x: torch.full_like(x[0], float(x[0, 0])) * x.sum().tolist(),
    "linspace": lambda x: torch.linspace(0, float(x.abs().sum()), 4),
    "of two": lambda x: (
        math.hypot(float(x[0, 0]), 2.0) + math.log(float(x.abs().sum()), 2) + math.pow(x[0, 0].item(), 2)
    ),
    "text": lambda x: len(f"{float(x[0, 0]):.2f}") and x[0, 0].item(),
    "class": lambda x: float(x.sum()) if isinstance(1.5, float) and {float: 1}[type(x.ndim * 0.5)] else 0,
}


@pytest.mark.parametrize("name", REALS)
def test_real_numbers_are_no_guards(name: str) -> None:
    model = Scaled(REALS[name]).eval()
    net = torch2needle.convert(model, example=(ONES,))
    for x in (ONES, torch.randn(3, 4), torch.randn(5, 4)):
        np.testing.assert_allclose(net(x).numpy(), model(x).detach().numpy(), rtol=1e-5, atol=1e-5)
    assert "float" not in globals() and math.sqrt(4) == 2


def test_real_numbers_are_compared_with_a_guard() -> None:
    model = Scaled(lambda x: 2.0 if math.sqrt(x.abs().sum()) > 1 else -1.0).eval()
    net = torch2needle.convert(model, example=(ONES,))
    np.testing.assert_allclose(net(ONES * 3).numpy(), model(ONES * 3).detach().numpy(), atol=1e-5)
    with pytest.raises(GuardError, match=r"math\.sqrt"):
        net(ONES / 100)


ANSWERED: dict[str, Callable] = {
    "floor": lambda x: math.floor(x.sum()) + math.ceil(x[0, 0].item()) + math.trunc(float(x[0, 0])),
    "round": lambda x: round(float(x.sum())) + round(x[0, 0].item()),
    "isnan": lambda x: 0 if math.isnan(float(x.sum())) or math.isinf(x.sum().item()) else x.sum().item(),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_whole_numbers_and_truths_of_real_ones_are_guards(name: str) -> None:
    model = Scaled(ANSWERED[name]).eval()
    net = torch2needle.convert(model, example=(ONES * 2.2,))
    np.testing.assert_allclose(net(ONES * 2.203).numpy(), model(ONES * 2.203).detach().numpy(), rtol=1e-5)
    with pytest.raises(GuardError):
        net(ONES * (torch.nan if name == "isnan" else 7.0))


def test_numbers_where_tensors_are_not_taken_are_the_examples() -> None:
    """Of a constant: the capture that leaves it a tensor fails."""
    scale = torch.tensor(2.0)
    model = Scaled(lambda x: nn.functional.interpolate(x[None], scale_factor=float(scale))[0, :, :4]).eval()
    net = torch2needle.convert(model, example=(ONES,))
    np.testing.assert_allclose(net(-ONES).numpy(), model(-ONES).detach().numpy(), atol=1e-5)
