"""Autograd functions in forwards convert where their gradients are the derivatives of what they compute, or what comes in times a
slope by element; else they are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, converts, gradients_agree  # noqa: E402
from gpu_devices import compiles  # noqa: E402
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


class Scaled(torch.autograd.Function):
    """All elements count for each gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * gradient.abs().sum() / gradient.abs().sum().clamp(min=1e-9) + gradient.flip(-1)


class Spike(torch.autograd.Function):
    """A neuron that fires, with a surrogate gradient (Neftci et al., arXiv 1901.09948)."""

    @staticmethod
    def forward(ctx: Any, x: Any, width: float) -> Any:
        ctx.save_for_backward(x)
        ctx.width = width
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient / (1 + ctx.width * x.abs()) ** 2, None


class Quantised(torch.autograd.Function):
    """In the form of two methods; two results, one of them without gradients."""

    @staticmethod
    def forward(x: Any, low: Any) -> Any:
        return torch.maximum(x, low).round(), x < low

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        x, low = ctx.saved_tensors
        return gradient * (x >= low), gradient * (x < low) * 2


class Reversed(torch.autograd.Function):
    """A domain classifier's (Ganin & Lempitsky, arXiv 1409.7495)."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.neg() * 0.3


class Sloped(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        y = self.first(x) * 2
        if self.what == "spike":
            return self.last(Spike.apply(y, 2.0) * 0.5 + y)
        if self.what == "quantised":
            kept, below = Quantised.apply(y, Rounded.apply(self.first.bias.expand_as(y)))
            return self.last(kept), below
        if self.what == "reversed":
            return self.last(y), self.last(Reversed.apply(y))
        return F.linear(Rounded.apply(y), Rounded.apply(self.last.weight * 4) / 4, Fivefold.apply(self.last.bias))


@pytest.mark.parametrize("what", ["spike", "quantised", "reversed", "rounded"])
def test_slopes_by_element(what: str) -> None:
    converts(Sloped(what), (3, 3), example=True)


@pytest.mark.parametrize("function", [Fivefold, Rounded])
def test_slopes_in_a_step(function: type[torch.autograd.Function]) -> None:
    model, x, y = OwnGradient(function), torch.randn(5, 3), torch.randn(5, 4)
    net = torch2needle.convert(model, x)
    assert f"the gradients of {function.__name__} are the model's, as compared" in net.report.notes
    ours, theirs = ndl.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
    step = ndl.compile_step(net, ndl.ops.mse_loss, ours, (x, y)) if compiles() else None
    for _ in range(3):
        theirs.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        theirs.step()
        if step is not None:
            step(x, y)
        else:
            net.reset_grad()
            ndl.ops.mse_loss(net(x), ndl.Tensor(y.numpy())).backward()
            ours.step()
    for name, p in net.named_parameters():
        close(p, dict(model.named_parameters())[name])


ROUNDED, CLIPPED = Rounded.apply, Clipped.apply  # as most name them, before any conversion


def test_functions_under_names_of_their_own() -> None:
    model, x = OwnGradient(Rounded), torch.randn(2, 3)
    model.function = SimpleNamespace(apply=ROUNDED)
    gradients_agree(model, torch2needle.convert(model, x), (x,), 1e-5)
    model.function = SimpleNamespace(apply=CLIPPED)
    assert "gradients of its own (Clipped)" in refusal(model, x)


@pytest.mark.parametrize("function", [Scaled, Clipped, NoGradient])
def test_other_gradients_than_derivatives(function: type[torch.autograd.Function]) -> None:
    assert f"gradients of its own ({function.__name__})" in refusal(OwnGradient(function), torch.randn(2, 3))


def test_other_gradients_where_nothing_takes_any() -> None:
    model, x = OwnGradient(Clipped), torch.tensor([[1, 2, 3], [4, 5, 6]])
    model.linear = nn.Embedding(7, 4)
    assert refusal(model, x).count("convert model.requires_grad_(False)")
    net = torch2needle.convert(model.requires_grad_(False), x)
    assert (
        "the gradients of Clipped are the derivatives of what they compute, not theirs: no parameter takes any"
        in net.report.notes
    )
    assert torch.equal(torch.from_numpy(net(x).numpy()), model(x))


@pytest.mark.parametrize("function", [Swish, Halved])
def test_gradients_that_are_derivatives(function: type[torch.autograd.Function]) -> None:
    model, x = OwnGradient(function), torch.randn(2, 3)
    net = torch2needle.convert(model, x)
    assert f"the gradients of {function.__name__} are the model's, as compared" in net.report.notes
    model(x).square().sum().backward()
    y = net(ndl.Tensor(x.numpy()))
    (y * y).sum().backward()
    grads = {n: p.grad.numpy() for n, p in net.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad is not None and np.allclose(grads[name], p.grad.numpy(), rtol=1e-5, atol=1e-6)


class StepSize(torch.autograd.Function):
    """Learned step size quantisation (Esser et al., arXiv 1902.08153): a scale for all elements, whose gradient is a sum."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, low: int, high: int) -> Any:
        ctx.save_for_backward(x, scale)
        ctx.ends = low, high
        return (x / scale).round().clamp(low, high) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x, scale), (low, high) = ctx.saved_tensors, ctx.ends
        q = x / scale
        inside = (q >= low) & (q <= high)
        of_scale = torch.where(inside, q.round() - q, q.clamp(low, high))
        return gradient * inside, (gradient * of_scale).sum().reshape(scale.shape) / q.numel() ** 0.5, None, None


class Signed(torch.autograd.Function):
    """A layer of binary weights: the gradient of the weights is that of others."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.sign(), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        assert ctx.needs_input_grad[1]
        return gradient @ weight, gradient.T @ x * (weight.abs() < 0.5), gradient.sum(0) * 2


class Ends(torch.autograd.Function):
    """Two results, and a gradient wider than its argument, which is summed."""

    @staticmethod
    def forward(x: Any, bound: Any) -> Any:
        return torch.minimum(x, bound), x.sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.x, ctx.bound = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_sum: Any) -> Any:
        over = ctx.x >= ctx.bound
        return gradient * 3 + of_sum.flip(0), (gradient * over).sum().reshape(1)


class Linear(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.first, self.last = what, nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        if self.what == "step size":
            weight = StepSize.apply(self.last.weight, self.scale, -2, 1)
            return F.linear(StepSize.apply(y, self.scale * 2, -4, 3), weight, self.last.bias)
        if self.what == "signed":
            return Signed.apply(y, self.last.weight, self.last.bias)
        return [self.last(t) for t in Ends.apply(y, self.scale)]


@pytest.mark.parametrize("what", ["step size", "signed", "ends"])
def test_gradients_that_mix_elements(what: str) -> None:
    torch.manual_seed(0)
    converts(Linear(what), (3, 3), example=True)
    model, x = Linear(what), torch.randn(5, 3)
    net = torch2needle.convert(model, x)
    assert "are the model's, as compared" in net.report.notes[-1]


class Signs(Rounded):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.sign(x)


def test_gradients_go_straight_through_infinite_values() -> None:
    torch.manual_seed(0)
    far = torch.zeros(3, 4)
    far[1, 2], far[0, 0] = -torch.inf, torch.inf

    class Added(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return Signs.apply(a * 2 + far)

    a, factors = torch.randn(3, 4, requires_grad=True), torch.arange(12.0).reshape(3, 4)
    want = Added()(a)
    (want * factors).sum().backward()
    ours, net = ndl.Tensor(a.detach().numpy()), torch2needle.convert(Added(), (torch.randn(3, 4),))
    got = net(ours)
    ndl.ops.summation(got * ndl.Tensor(factors.numpy())).backward()
    close(got, want)
    close(ours.grad, a.grad)


class Kept:
    """As caches of transformers, which are no containers to torch."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids: Any) -> Any:
        keys = self.linear(self.embedding(ids))
        return {"values": Swish.apply(keys), "cache": Kept(keys)}


@pytest.mark.parametrize("training", [False, True])
def test_results_that_are_objects(training: bool) -> None:
    """What they hold is compared, and takes gradients, on both sides."""
    model, ids = Caching().train(training), torch.randint(0, 9, (2, 3))
    net = torch2needle.convert(model, ids)
    got, want = net(ids), model(ids)
    close(got["values"], want["values"])
    want["values"].square().sum().backward()
    (got["values"] ** 2).sum().backward()
    close(net.embedding.weight.grad, model.embedding.weight.grad)
