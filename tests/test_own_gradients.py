"""Autograd functions in forwards convert where their gradients are the derivatives of what they compute, else are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from test_capture_traps import refusal  # noqa: E402


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 5


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (gradient * 2).clamp(-100, 100)


class NoGradient(Fivefold):
    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None


class Swish(torch.autograd.Function):
    """What saves memory has the gradient of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * s * (1 + x * (1 - s))


class Halved(torch.autograd.Function):
    """What it writes inside itself is kept by the ops before: torch's graph of them would refuse a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.softmax(x, -1)
        y.mul_(0.5)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (y,) = ctx.saved_tensors
        return y * (gradient - 2 * (y * gradient).sum(-1, keepdim=True))


class OwnGradient(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(3, 4), function

    def forward(self, x: Any) -> Any:
        return self.function.apply(self.linear(x))


@pytest.mark.parametrize("function", [Fivefold, Rounded, Clipped, NoGradient])
def test_other_gradients_than_derivatives(function: type[torch.autograd.Function]) -> None:
    assert f"gradients of its own ({function.__name__})" in refusal(OwnGradient(function), torch.randn(2, 3))


def test_other_gradients_where_nothing_takes_any() -> None:
    model, x = OwnGradient(Fivefold), torch.tensor([[1, 2, 3], [4, 5, 6]])
    model.linear = nn.Embedding(7, 4)
    assert refusal(model, x).count("convert model.requires_grad_(False)")
    net = torch2needle.convert(model.requires_grad_(False), x)
    assert (
        "the gradients of Fivefold are the derivatives of what they compute, not theirs: no parameter takes any"
        in net.report.notes
    )
    assert torch.equal(torch.from_numpy(net(x).numpy()), model(x))


@pytest.mark.parametrize("function", [Swish, Halved])
def test_gradients_that_are_derivatives(function: type[torch.autograd.Function]) -> None:
    model, x = OwnGradient(function), torch.randn(2, 3)
    net = torch2needle.convert(model, x)
    assert any(f"{function.__name__} are the derivatives" in note for note in net.report.notes)
    model(x).square().sum().backward()
    y = net(ndl.Tensor(x.numpy()))
    (y * y).sum().backward()
    grads = {n: p.grad.numpy() for n, p in net.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad is not None and np.allclose(grads[name], p.grad.numpy(), rtol=1e-5, atol=1e-6)
