"""Forwards that ask autograd for gradients, and others that torch.export follows by bytecode alone."""

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
from conversion import gradients_agree  # noqa: E402


class Energy(nn.Module):
    """A network of positions, and what `ask` makes of its energy."""

    def __init__(self, ask: Callable) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 1))
        self.ask = ask

    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return self.ask(self.net(x).squeeze(-1), x)


def grad(energy: Any, x: Any, **options: Any) -> Any:
    return torch.autograd.grad(energy.sum(), x, **options)[0]


def twice(energy: Any, x: Any) -> Any:
    first = grad(energy, x, create_graph=True)
    return first, grad(first[:, 0], x, create_graph=True)


ASKED: dict[str, Callable] = {
    "differentiated again": lambda e, x: (e, grad(e, x, create_graph=True) * e[:, None]),
    "cut off": lambda e, x: grad(e, x, retain_graph=True) * e[:, None],
    "twice": twice,
    "weights of the sum": lambda e, x: torch.autograd.grad(e, x, e.detach() * 2, create_graph=True)[0],
}


def test_forward_derivatives() -> None:
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

        def forward(self, x: Any) -> Any:
            return torch.func.jvp(lambda v: self.net(v).sin(), (x,), (x * 2,))

    model, x = Slopes().eval(), torch.randn(4, 3)
    net = torch2needle.convert(model, (x,))
    for given in (x, torch.randn(6, 3)):
        for got, want in zip(net(given), model(given), strict=True):
            np.testing.assert_allclose(got.numpy(), want.detach().numpy(), atol=1e-5)
    gradients_agree(model, net, (x,), 1e-4)


def test_linearize() -> None:
    class Linearized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))

        def forward(self, x: Any) -> Any:
            y, along = torch.func.linearize(lambda a, b: self.net(a) * b, x, x * 2)
            return y + along(x.flip(1), x)

    model, x = Linearized().eval(), torch.randn(4, 3)
    net = torch2needle.convert(model, (x,))
    for given in (x, torch.randn(6, 3)):
        np.testing.assert_allclose(net(given).numpy(), model(given).detach().numpy(), rtol=1e-5, atol=1e-5)


def traced(hessian: Callable) -> Callable:
    return lambda f: lambda v: hessian(f)(v).diagonal(0, -2, -1).sum(-1)


FORWARD: dict[str, Callable] = {
    "jacfwd": lambda f: torch.func.jacfwd(f),
    "jacfwd of two": lambda f: lambda v: torch.func.jacfwd(lambda a, b: f(a * b), argnums=(0, 1))(v, v * 2)[1],
    "jacfwd beside the result": lambda f: lambda v: torch.func.jacfwd(lambda u: (f(u), u), has_aux=True)(v)[0],
    "hessian": lambda f: torch.func.hessian(lambda v: f(v)[0]),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(lambda v: f(v).square().sum())),
    "laplacian": lambda f: traced(torch.func.hessian)(lambda v: f(v).sum()),
    "along itself": lambda f: lambda v: torch.func.jvp(torch.func.grad(lambda u: f(u).sum()), (v,), (v,))[1],
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_derivatives_of_any_batch(name: str) -> None:
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Softplus())

        def forward(self, x: Any) -> Any:
            return torch.func.vmap(FORWARD[name](self.net))(x)

    model, x = Slopes().eval(), torch.randn(4, 3)
    net = torch2needle.convert(model, (x,))
    for batch in (4, 1, 7):
        assert torch2needle.verify(model, net, (torch.randn(batch, 3),))
    gradients_agree(model, net, (x,), 1e-4)


def beside_the_result(f: Callable, v: Any) -> Any:
    out, pull = torch.func.vjp(f, v)
    return out + pull(out)[0][:, :2]


def and_more(f: Callable, v: Any) -> Any:
    _, pull, also = torch.func.vjp(lambda u: (f(u), u * 2), v, has_aux=True)
    return also * pull(v[:, :2])[0]


def pulled_twice(f: Callable, v: Any) -> Any:
    pull = torch.func.vjp(f, v)[1]
    return pull(v[:, :2])[0] + pull(v[:, 1:])[0]


PULLED: dict[str, Callable] = {
    "vjp": lambda f, v: torch.func.vjp(f, v)[1](torch.ones(4, 2))[0],
    "vjp beside the result": beside_the_result,
    "vjp and more": and_more,
    "vjp of two": lambda f, v: torch.func.vjp(lambda a, b: f(a * b), v, v + 1)[1](v[:, :2])[1],
    "pulled twice": pulled_twice,
    "along each row": lambda f, v: torch.func.jacrev(lambda u: f(u).sum(0))(v),
    "of a loss": lambda f, v: torch.func.grad(lambda u: F.mse_loss(f(u), v[:, :2]))(v.detach()),
    "autograd's jacobian": lambda f, v: torch.autograd.functional.jacobian(
        lambda u: f(u).sum(0), v.detach(), create_graph=True
    ),
}


@pytest.mark.parametrize("name", PULLED)
def test_pulled_back(name: str) -> None:
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Softplus())

        def forward(self, x: Any) -> Any:
            return PULLED[name](self.net, x)

    model, x = Slopes().eval(), torch.randn(4, 3)
    net = torch2needle.convert(model, (x,))
    for batch in (4, 7):
        free = name != "vjp"  # its ones are of the example's batch
        assert torch2needle.verify(model, net, (torch.randn(batch if free else 4, 3),))
    gradients_agree(model, net, (x,), 1e-4)


IMAGE, VOLUME, LINE, ROWS = (2, 3, 6, 6), (1, 2, 4, 5, 4), (2, 3, 9), (4, 6)
LABELS, PLACES = torch.tensor([1, 0, 5, 2]), torch.rand(2, 3, 4, 2) * 2 - 1
DIFFERENTIATED: dict[str, tuple[tuple, Callable]] = {
    "cross entropy": (ROWS, lambda v: F.cross_entropy(v, LABELS, ignore_index=2, label_smoothing=0.1)),
    "of images": (IMAGE, lambda v: F.cross_entropy(v, torch.ones(2, 6, 6, dtype=torch.int64))),
    "prelu, logsigmoid": (ROWS, lambda v: F.logsigmoid(F.prelu(v, torch.full((1,), 0.2).to(v)))),
    "distances": (LINE, lambda v: torch.cdist(v, v.flip(1) + 1)),
    "pairs of rows": (ROWS, F.pdist),
    "spectrum": (LINE, lambda v: torch.fft.fft(v).abs()),
    "convolution of sequences": (LINE, lambda v: F.conv1d(v, torch.ones(4, 3, 2).to(v), stride=2)),
    "convolution of volumes": (VOLUME, lambda v: F.conv3d(v, torch.ones(3, 2, 2, 3, 2).to(v))),
    "pools of volumes": (VOLUME, lambda v: F.max_pool3d(v, 2, 1) + F.avg_pool3d(v, 2, 1)),
    "adaptive pools": (IMAGE, lambda v: F.adaptive_max_pool2d(v, 2) + F.adaptive_avg_pool2d(v, 2)),
    "replicated edges": (IMAGE, lambda v: F.pad(v, (1, 2, 0, 1), mode="replicate")),
    "reflected edges": (LINE, lambda v: F.pad(v, (2, 1), mode="reflect")),
    "sampled": (IMAGE, lambda v: F.grid_sample(v, PLACES.to(v), align_corners=False)),
    "enlarged": (IMAGE, lambda v: F.interpolate(v, scale_factor=2, mode="bilinear")),
    "attention": (LINE, lambda v: F.scaled_dot_product_attention(v, v, v, is_causal=True)),
    "bilinear": (ROWS, lambda v: F.bilinear(v, v, torch.ones(3, 6, 6).to(v))),
}
ONCE = {"distances", "pairs of rows"}  # torch has no second derivative of these


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_calls(name: str) -> None:
    shape, function = DIFFERENTIATED[name]

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Any) -> Any:
            return torch.func.grad(lambda v: (function(v * self.scale) ** 2).sum())(x)

    model, x = Slope().eval(), torch.randn(shape)
    net = torch2needle.convert(model, (x,))
    exact, got = Slope().double()(x.double()), ndl.compile(net, x)(x)
    assert float((got - exact).abs().max()) <= 1e-5 * float(exact.abs().max())
    if name not in ONCE:
        gradients_agree(model, net, (x,), 1e-4)


def test_steps_inside() -> None:
    """A network that learns in its forward: the batch that it learns from is free."""

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

        def forward(self, x: Any, y: Any, query: Any) -> Any:
            weights = dict(self.net.named_parameters())

            def loss(weights: Any) -> Any:
                return F.mse_loss(torch.func.functional_call(self.net, weights, (x,)), y)

            for _ in range(2):
                slopes = torch.func.grad(loss)(weights)
                weights = {k: w - 0.1 * slopes[k] for k, w in weights.items()}
            return torch.func.functional_call(self.net, weights, query)

    model, given = Learner().eval(), (torch.randn(4, 3), torch.randn(4, 1), torch.randn(5, 3))
    net = torch2needle.convert(model, given)
    for batch in (4, 9):
        assert torch2needle.verify(model, net, (torch.randn(batch, 3), torch.randn(batch, 1), torch.randn(5, 3)))
    gradients_agree(model, net, given, 1e-4)


class Residual(Energy):
    """As networks of differential equations are written: of its input, and in a branch by its values."""

    def forward(self, x: Any) -> Any:
        x = x.requires_grad_(True)
        slope = self.ask(self.net(x).squeeze(-1), x)
        return slope * 2 if x.max() > 100 else slope


@pytest.mark.parametrize("name", ["differentiated again", "twice"])
def test_gradients_of_an_input(name: str) -> None:
    model, x = Residual(ASKED[name]).eval(), torch.randn(4, 3)
    net = torch2needle.convert(model, (x.clone(),))
    assert torch2needle.verify(model, net, (torch.randn(7, 3),))
    gradients_agree(model, net, (x,), 2e-5)
    with pytest.raises(ndl.nn.functional.GuardError, match=r"x\.max"):
        net(x + 200)


@pytest.mark.parametrize("name", ASKED)
def test_gradients_in_the_forward(name: str) -> None:
    torch.manual_seed(0)
    model, x = Energy(ASKED[name]).eval(), torch.randn(4, 3)
    net = torch2needle.convert(model, (x,))
    assert torch2needle.verify(model, net, (x,))
    assert torch2needle.verify(model, net, (torch.randn(7, 3),))
    gradients_agree(model, net, (x,), 2e-5)


def test_gradients_beside_no_grad_are_refused() -> None:
    def ask(energy: Any, x: Any) -> Any:
        with torch.no_grad():
            scale = energy * 2
        return grad(energy, x, create_graph=True) * scale[:, None]

    with pytest.raises(torch2needle.ConversionError, match=r"asks for gradients, and calls torch\.no_grad"):
        torch2needle.convert(Energy(ask), (torch.randn(4, 3),))


class Forward(nn.Module):
    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.layer, self.f = nn.Linear(3, 3), f

    def forward(self, x: Any) -> Any:
        return self.f(self.layer(x))


def above_the_mean(y: Any) -> Any:
    values = y.detach().numpy()
    return y * torch.from_numpy((values > values.mean(1, keepdims=True)).astype(np.float32))


def softened(y: Any) -> Any:
    values = y.detach().numpy()
    scale = np.exp(-np.abs(values)).max(axis=0)
    return y / torch.from_numpy(scale + 1)


BY_BYTECODE: dict[str, Callable] = {
    "numpy's mask": above_the_mean,
    "numpy's functions": softened,
    ".data of a result": lambda y: y * y.data.sigmoid(),
}


@pytest.mark.parametrize("name", BY_BYTECODE)
def test_values_out_of_the_graph(name: str) -> None:
    torch.manual_seed(0)
    model, x = Forward(BY_BYTECODE[name]).eval(), torch.randn(4, 3)
    net = torch2needle.convert(model, (x,))
    assert torch2needle.verify(model, net, (x,))
    gradients_agree(model, net, (x,), 2e-5)
    other = torch.randn(4, 3)
    np.testing.assert_allclose(ndl.compile(net, (x,))(other).numpy(), model(other).detach(), atol=1e-6)


def test_the_first_failure_is_told() -> None:
    model = Forward(lambda y: y[:, : int(y.detach().numpy().argmax()) % 2 + 1])
    with pytest.raises(torch2needle.ConversionError, match=r"\.numpy\(\) is not supported"):
        torch2needle.convert(model, (torch.randn(4, 3),))
