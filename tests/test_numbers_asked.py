"""Numbers that a forward makes of values by Python's functions: `float(t)`, `math.sqrt(t)`, `round(float(t), 2)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import log1p
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle  # noqa: E402
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


# Calls that take plain numbers alone in torch, here a float of a parameter and one of the input.
TAKING_NUMBERS: dict[str, Callable] = {
    "leaky_relu": lambda x, v: F.leaky_relu(x, v),
    "leaky_relu in place": lambda x, v: F.leaky_relu(x.clone(), negative_slope=v, inplace=True),
    "elu": lambda x, v: F.elu(x * 40, alpha=v),
    "celu": lambda x, v: F.celu(x * 40, v),
    "hardtanh": lambda x, v: F.hardtanh(x, -v, v) + F.hardtanh(x, max_val=v),
    "threshold": lambda x, v: F.threshold(x, v, 2.0) + F.threshold(x, 0.1, v),
    "softplus": lambda x, v: F.softplus(x * 40, v) + F.softplus(x, 1, v),
    "softshrink": lambda x, v: F.softshrink(x, v),
    "hardshrink": lambda x, v: F.hardshrink(x, v) + x.hardshrink(v),
    "add": lambda x, v: torch.add(x, 1, alpha=v) + x.sub(x * 3, alpha=v),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v) + x.addcdiv(x, x.exp(), value=v),
    "addmm": lambda x, v: torch.addmm(x[:, :3] @ x[:, :3].mT, x, x.mT, beta=v, alpha=2 * v),
    "addmv": lambda x, v: torch.addmv(x[:, 0], x, x[0], alpha=v),
    "baddbmm": lambda x, v: torch.baddbmm(x @ x.mT, x[None], x.mT[None], beta=v),
    "nan_to_num": lambda x, v: torch.nan_to_num(torch.where(x > 0, torch.nan, x), nan=v),
    "pad": lambda x, v: F.pad(x, (1, 2), value=v),
    "attention": lambda x, v: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=v),
    "huber": lambda x, v: F.huber_loss(x, 2 * x, delta=v) + F.huber_loss(x, -x, "none", v),
    "smooth_l1": lambda x, v: F.smooth_l1_loss(x, 2 * x, beta=v) + F.smooth_l1_loss(x, -x, reduction="sum", beta=v),
}


class TakesNumbers(nn.Module):
    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.call, self.bound = call, nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, float(self.bound)) + self.call(x, x.abs().clamp(max=2).mean().item())


@pytest.mark.parametrize("name", TAKING_NUMBERS)
def test_numbers_of_tensors_are_taken_where_torch_wants_plain_ones(name: str) -> None:
    model = TakesNumbers(TAKING_NUMBERS[name]).eval()
    net = torch2needle.convert(model, example=(torch.randn(4, 4),))
    values = torch.randn(4, 4), torch.randn(3, 4), torch.tensor([[0.0, torch.inf, -torch.inf, 1.0]] * 2)
    for x in values[: 3 if name in ("leaky_relu", "elu", "celu", "hardtanh", "softshrink", "hardshrink") else 2]:
        given = x.clone().requires_grad_()
        want = model(given)
        np.testing.assert_allclose(net(x).numpy(), want.detach().numpy(), rtol=1e-5, atol=1e-5)
        if torch.isfinite(want).all():
            want.sum().backward()
            ours = needle.Tensor(x.numpy(), requires_grad=True)
            net(ours).sum().backward()
            np.testing.assert_allclose(ours.grad.numpy(), given.grad.numpy(), rtol=1e-4, atol=1e-5)


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
