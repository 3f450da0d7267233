"""Nets that hold for one mode of training say so where they are switched; parameters that a forward masks; gradients of its own
in models that are not trained; inputs of `compile` by name."""

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
from conversion import close, gradients_agree  # noqa: E402
from gpu_devices import compiles  # noqa: E402

X = torch.randn(3, 4)
ONLY_TRAINING = r"captured in training mode and stays so; what the model does in evaluation alone is not in it\.$"
ONLY_EVALUATION = r"captured in evaluation mode and stays so; what the model does in training alone is not in it\.$"


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return (self.a(x), self.b(x)) if self.training else self.a(x)


@pytest.mark.parametrize("example", [None, (X,)], ids=["fx", "example"])
def test_a_net_of_one_mode_warns(example: Any) -> None:
    model = Auxiliary()
    net = torch2needle.convert(model, example)
    close(net(X), model(X))
    with pytest.warns(UserWarning, match=rf"^\[eval\] .*{ONLY_TRAINING}"):
        net.eval()
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused = operator_fusion.fuse(torch2needle.convert(model, example)).eval()
        torch2needle.convert(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)), example).eval().train()
    close(fused(X), model(X))
    for made in (fused, copy.deepcopy(fused)):
        with pytest.warns(UserWarning, match=rf"^\[train\] .*{ONLY_EVALUATION}"):
            made.train()


class Masked(nn.Conv2d):
    """PixelCNN's (van den Oord et al., arXiv 1601.06759)."""

    def __init__(self, way: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.way = way
        self.register_buffer("mask", torch.ones_like(self.weight))
        self.mask[:, :, 1, 2:] = 0
        self.mask[:, :, 2:] = 0

    def forward(self, x: Any) -> Any:
        if self.way == "data":
            self.weight.data *= self.mask
        elif self.way == "mul_":
            self.weight.data.mul_(self.mask)
        elif self.way == "no_grad":
            with torch.no_grad():
                self.weight.mul_(self.mask)
        elif self.way == "copy_":
            with torch.no_grad():
                self.weight.copy_(self.weight * self.mask)
        elif self.way == "renorm_":
            with torch.no_grad():
                self.weight.renorm_(2, 0, 1.0)
        elif self.way == "half":
            self.weight.data *= self.mask * 0.5
        else:
            self.weight.data = self.weight.data * self.mask
        return super().forward(x)


@pytest.mark.parametrize("way", ["data", "mul_", "no_grad"])
def test_masked_weights(way: str) -> None:
    model = nn.Sequential(Masked(way, 1, 3, 3, padding=1), nn.ReLU(), Masked(way, 3, 1, 3, padding=1)).eval()
    x = torch.randn(2, 1, 6, 5)
    net = torch2needle.convert(model, (x,))
    assert any("multiplied by its mask" in note for note in net.report.notes)
    wider = torch.randn(3, 1, 6, 5)
    close(net(wider), model(wider))
    gradients_agree(copy.deepcopy(model), net, (x,), 1e-5)
    if not compiles():
        return
    exe = ndl.compile(net, (x,))
    theirs = torch.optim.SGD(model.train().parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    ours = ndl.optim.SGD(net.train().parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    step = ndl.compile_step(net, ndl.ops.mse_loss, ours, (x, x))
    for _ in range(4):
        theirs.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        theirs.step()
        assert abs(float(step(x, x).detach()) - float(loss.detach())) < 1e-5
    net.eval()
    close(exe(x), model(x))


@pytest.mark.parametrize("way", ["half", "swap", "copy_", "renorm_"])
def test_other_writes_to_weights_are_refused(way: str) -> None:
    model = nn.Sequential(Masked(way, 1, 3, 3)).eval()
    with pytest.raises(torch2needle.ConversionError, match=r"writes 0.weight in place .* out of place"):
        torch2needle.convert(model, (torch.randn(2, 1, 6, 5),))


class Through(torch.autograd.Function):
    """Rounds, with the gradient of what does not."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


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
