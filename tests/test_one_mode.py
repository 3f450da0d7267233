"""Nets that hold for one mode of training say so where they are switched; gradients of its own in models that are not trained;
inputs of `compile` by name."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close  # noqa: E402

X = torch.randn(3, 4)
ONLY_TRAINING = r"captured in training mode and stays so; what the model does in evaluation alone is not in it\.$"
ONLY_EVALUATION = r"captured in evaluation mode and stays so; what the model does in training alone is not in it\.$"


class Prepared(nn.Module):
    """Runs in a mode only after something was prepared for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.prepared = nn.Linear(4, 2), True

    def forward(self, x: Any) -> Any:
        if self.training is not self.prepared:
            raise RuntimeError("not prepared")
        return self.a(x)


@pytest.mark.parametrize("example", [None, (X,)], ids=["fx", "example"])
def test_a_net_of_one_mode_warns(example: Any) -> None:
    model = Prepared()
    net = torch2needle.convert(model, example)
    close(net(X), model(X))
    with pytest.warns(UserWarning, match=rf"^\[eval\] .*{ONLY_TRAINING}"):
        net.eval()
    model.prepared = False
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused = operator_fusion.fuse(torch2needle.convert(model, example)).eval()
        torch2needle.convert(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)), example).eval().train()
    close(fused(X), model(X))
    for made in (fused, copy.deepcopy(fused)):
        with pytest.warns(UserWarning, match=rf"^\[train\] .*{ONLY_EVALUATION}"):
            made.train()


class Through(torch.autograd.Function):
    """Rounds, with a gradient that is no linear function of what comes in."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.flip(-1).abs()


class Rounded(nn.Linear):
    def forward(self, x: Any) -> Any:
        return F.linear(Through.apply(x), Through.apply(self.weight), self.bias)


def test_gradients_of_its_own_in_a_model_that_is_not_trained() -> None:
    model = Rounded(4, 3).eval()
    with pytest.raises(
        torch2needle.ConversionError, match=r"for inference alone, convert model\.requires_grad_\(False\)"
    ):
        torch2needle.convert(model, (X,))
    net = torch2needle.convert(model.requires_grad_(False), (X,))
    close(net(X), model(X))
    with pytest.warns(UserWarning, match=r"^\[train\] "):
        net.train()


def test_inputs_by_name() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Any, *, mask: Any = None, scale: float = 2.0) -> Any:
            return x * scale if mask is None else x * scale * mask

    inputs = {"x": X, "mask": X.sigmoid()}
    net = torch2needle.convert(Scaled().eval(), inputs)
    close(ndl.compile(net, inputs)(X, X.sigmoid()), Scaled()(**inputs))
    with pytest.raises(TypeError, match=r"expects inputs x, mask, got scale"):
        ndl.compile(net, {**inputs, "scale": 3.0})

    class Held(nn.Module):
        def forward(self, x: Any) -> Any:
            return x["x"] * 2

    net = torch2needle.convert(Held().eval(), ({"x": X},))
    close(ndl.compile(net, {"x": X})({"x": X}), X * 2)
