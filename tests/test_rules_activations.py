"""Activations and dropout: every spelling against torch, at ordinary values and at the corners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import torch2needle
from conversion import Calls, close, converts
from gpu_devices import everywhere
from needle.autograd import Tensor

THRESHOLD_: Any = F.threshold_  # type: ignore[attr-defined]
MATRIX, ROWS, IMAGE, VOLUME = (3, 8), (2, 6, 5), (2, 6, 5, 3), (2, 4, 3, 2, 3)
MODULES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.ReLU(inplace=True), MATRIX),
    (lambda: nn.ReLU6(True), MATRIX),
    (lambda: nn.LeakyReLU(0.2), MATRIX),
    (lambda: nn.LeakyReLU(inplace=True), MATRIX),
    (lambda: nn.ELU(0.7), MATRIX),
    (lambda: nn.ELU(inplace=True), IMAGE),
    (nn.SELU, MATRIX),
    (lambda: nn.SELU(True), IMAGE),
    (nn.CELU, MATRIX),
    (lambda: nn.CELU(0.3, True), IMAGE),
    (nn.GELU, MATRIX),
    (lambda: nn.GELU("tanh"), MATRIX),
    (nn.SiLU, MATRIX),
    (nn.Mish, MATRIX),
    (lambda: nn.Mish(True), MATRIX),
    (nn.Sigmoid, MATRIX),
    (nn.LogSigmoid, MATRIX),
    (nn.Hardsigmoid, MATRIX),
    (nn.Hardswish, MATRIX),
    (nn.Hardtanh, MATRIX),
    (lambda: nn.Hardtanh(-0.3, 0.7, inplace=True), IMAGE),
    (nn.Tanh, MATRIX),
    (nn.Tanhshrink, MATRIX),
    (nn.Hardshrink, MATRIX),
    (lambda: nn.Hardshrink(0.2), MATRIX),
    (nn.Softshrink, MATRIX),
    (lambda: nn.Softshrink(0.1), IMAGE),
    (nn.Softplus, MATRIX),
    (lambda: nn.Softplus(2.5, 1.0), MATRIX),
    (lambda: nn.Softplus(0.5, 30.0), MATRIX),
    (nn.Softsign, MATRIX),
    (lambda: nn.Threshold(0.1, -2.0), MATRIX),
    (lambda: nn.Threshold(-0.1, 20.0, True), IMAGE),
    (nn.PReLU, MATRIX),
    (lambda: nn.PReLU(8), MATRIX),
    (lambda: nn.PReLU(6), IMAGE),
    (lambda: nn.PReLU(4), VOLUME),
    (nn.GLU, MATRIX),
    (lambda: nn.GLU(1), IMAGE),
    (lambda: nn.Softmax(1), MATRIX),
    (lambda: nn.Softmax(dim=None), ROWS),
    (lambda: nn.Softmax(dim=None), IMAGE),
    (lambda: nn.Softmin(-1), MATRIX),
    (lambda: nn.LogSoftmax(-1), MATRIX),
    (lambda: nn.LogSoftmax(2), IMAGE),
    (nn.Softmax2d, IMAGE),
    (nn.Softmax2d, ROWS),
]
# f(x) and what its name is in torch.nn.functional
FUNCTIONS: dict[str, Callable] = {
    "relu": lambda x: F.relu(x) + torch.relu(x) * x.relu(),
    "relu_": lambda x: F.relu_(x * 2) + torch.relu_(x * 3) + (x * 4).relu_(),
    "relu6": lambda x: F.relu6(x) - F.relu6(x * 9, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3) + F.leaky_relu_(x * 2, negative_slope=0.1),
    "prelu": lambda x: F.prelu(x, x[0, :1]) + torch.prelu(x, x[0]) + x.prelu(x[1]),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.5) + torch.rrelu(x) + F.rrelu_(x * 2) + torch.rrelu_(x * 2, 0.2, 0.3),
    "elu": lambda x: F.elu(x) + F.elu_(x * 2, 0.3) + F.elu(x * 1, inplace=True),
    "selu": lambda x: F.selu(x) + F.selu_(x * 2) + torch.selu(x) + torch.selu_(x * 3) + F.selu(x * 1, inplace=True),
    "celu": lambda x: F.celu(x, 0.4) + F.celu_(x * 2) + torch.celu(x, alpha=2) + torch.celu_(x * 3, 0.1),
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x) * F.silu(x * 2, inplace=True),
    "mish": lambda x: F.mish(x) * F.mish(x * 2, inplace=True),
    "sigmoid": lambda x: torch.sigmoid(x) + x.sigmoid() + torch.sigmoid_(x * 2) + (x * 3).sigmoid_() + F.sigmoid(x),
    "expit": lambda x: torch.special.expit(x),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "hardsigmoid": lambda x: F.hardsigmoid(x) + F.hardsigmoid(x * 2, inplace=True),
    "hardswish": lambda x: F.hardswish(x) + F.hardswish(x * 2, True),
    "hardtanh": lambda x: F.hardtanh(x) + F.hardtanh_(x * 2, -0.2, 0.4) + F.hardtanh(x, max_val=0.5),
    "tanh": lambda x: torch.tanh(x) + x.tanh() + torch.tanh_(x * 2) + (x * 3).tanh_() + F.tanh(x),
    "tanhshrink": lambda x: F.tanhshrink(x),
    "hardshrink": lambda x: F.hardshrink(x, 0.3) + torch.hardshrink(x) + x.hardshrink(0.1),
    "softshrink": lambda x: F.softshrink(x) + F.softshrink(x, 0.1),
    "softplus": lambda x: F.softplus(x) + F.softplus(x, 3, 2) + F.softplus(x, beta=0.2),
    "softsign": lambda x: F.softsign(x),
    "threshold": lambda x: F.threshold(x, 0.2, 3.0) + torch.threshold(x, 0, 1),
    "threshold_": lambda x: F.threshold(x * 2, 0.1, 0.2, inplace=True) + THRESHOLD_(x * 3, 0.3, 0.4),
    "glu": lambda x: F.glu(x) * F.glu(x, dim=1),
    "softmax": lambda x: F.softmax(x, dim=1) + x.softmax(1) + torch.softmax(x, -1) + torch.special.softmax(x, 0),
    "log_softmax": lambda x: F.log_softmax(x, 1) + x.log_softmax(-1) + torch.log_softmax(x, 0),
    "special_log_softmax": lambda x: torch.special.log_softmax(x, 1),
    "softmin": lambda x: F.softmin(x, 1),
    "dropout": lambda x: F.dropout(x, 0.5, training=False) + torch.dropout(x, 0.5, False) + F.dropout(x, 0.0),
    "dropout_": lambda x: torch.dropout_(x * 2, 0.5, False) + F.dropout(x * 3, 0.5, False, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x) + torch.alpha_dropout(x, 0.3, False),
    "feature_dropout": lambda x: F.feature_alpha_dropout(x) + torch.feature_dropout(x, 0.3, False),
    "feature_alpha_dropout": lambda x: torch.feature_alpha_dropout(x, 0.3, train=False),
}


@everywhere
@pytest.mark.parametrize(
    ("make", "shape"), MODULES, ids=[f"{i}-{type(m()).__name__}" for i, (m, _) in enumerate(MODULES)]
)
def test_module(make: Callable, shape: tuple[int, ...]) -> None:
    converts(nn.Sequential(make()), shape, batch=len(shape) != 3 or type(make()) is not nn.Softmax)


@everywhere
@pytest.mark.parametrize("example", [False, True], ids=["free", "example"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str, example: bool) -> None:
    converts(Calls(FUNCTIONS[name]), MATRIX, example=example)


@everywhere
@pytest.mark.parametrize("shape", [MATRIX, ROWS, IMAGE], ids=str)
def test_softmax_without_dim_needs_the_rank(shape: tuple[int, ...]) -> None:
    f = Calls(lambda x: F.softmax(x) + F.log_softmax(x) + F.softmin(x))
    converts(f, shape, example=True)
    with pytest.raises(torch2needle.ConversionError, match="pass example="):
        torch2needle.convert(f)


def grad_of(x: Any) -> np.ndarray:
    assert x.grad is not None
    return x.grad.numpy()


# -- corners -------------------------------------------------------------------------------------------------------------

CORNERS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 1e-30, -1e-30, 25.0, -25.0, 90.0, -90.0, 3e4, -3e4]
EXTREMES = [float("inf"), float("-inf"), float("nan")]
# Their value at an infinity is another in the kernels of fused ops: 0 * infinity, or a limit.
FINITE = {
    "GELU",
    "SiLU",
    "Mish",
    "Hardswish",
    "ELU",
    "SELU",
    "CELU",
    "Softmax",
    "Softmin",
    "LogSoftmax",
    "Softmax2d",
    "GLU",
}
UNARY = [(m, type(m())) for m, shape in MODULES if shape == MATRIX and not list(m().parameters())]


@pytest.mark.parametrize("make", [m for m, _ in UNARY], ids=[f"{i}-{c.__name__}" for i, (_, c) in enumerate(UNARY)])
def test_corners(make: Callable) -> None:
    """Values and gradients at zeros, limits of the pieces and large numbers; NaN stays NaN."""
    module = make()
    module.inplace = False
    name = type(module).__name__
    values = CORNERS + ([float("nan")] if name in FINITE else EXTREMES)
    if "oftm" in name or name == "GLU":
        values = CORNERS[: len(CORNERS) // 2 * 2]
    net = torch2needle.convert(nn.Sequential(module))
    theirs = torch.tensor([values], requires_grad=True)
    ours = Tensor(np.array([values], "float32"))
    want, got = module(theirs), net(ours)
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=2e-6, atol=1e-6)
    compiled = ndl.compile(net.eval(), (theirs.detach(),))(theirs.detach())
    np.testing.assert_allclose(compiled.numpy(), want.detach().numpy(), rtol=2e-6, atol=1e-6)
    # At 3 hardswish has two slopes, of which its kernel takes the other one.
    finite = [i for i, v in enumerate(values) if np.isfinite(v) and not (name == "Hardswish" and abs(v) == 3)]
    want.backward(torch.ones_like(want))
    got.backward()
    np.testing.assert_allclose(grad_of(ours)[0, finite], grad_of(theirs)[0, finite], rtol=2e-6, atol=1e-6)


REFUSED: dict[str, Callable] = {
    r"\[celu\] alpha expects a positive number, got -1\.0": lambda x: F.celu(x, -1.0),
    r"\[softshrink\] lambd expects a number of at least 0, got -1": lambda x: F.softshrink(x, -1),
    "training=True holds in evaluation, too": lambda x: F.rrelu(x, training=True),
    "pass training=self.training": lambda x: F.dropout2d(x),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(torch2needle.ConversionError, match=message):
        torch2needle.convert(Calls(REFUSED[message]))


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"^\[glu\] axis -1 expects an even size, got shape \(2, 3\)\.$"):
        ndl.ops.glu(Tensor(np.ones((2, 3))))
    with pytest.raises(ValueError, match=r"^\[prelu\] weight expects shape \(1,\) or \(3,\), got \(2,\)\.$"):
        ndl.ops.prelu(Tensor(np.ones((4, 3))), Tensor(np.ones(2)))


# -- random in training --------------------------------------------------------------------------------------------------


class Follows(nn.Module):
    """A function of x and of the module's own flag."""

    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x, self.training)


def stochastic_depth(input: torch.Tensor, p: float, mode: str, training: bool = True) -> torch.Tensor:
    """torchvision's function, which need not be installed: whole samples are dropped, or in mode "batch" all at once."""
    if not training or p == 0:
        return input
    size = [input.shape[0] if mode == "row" else 1] + [1] * (input.ndim - 1)
    return input * torch.empty(size).bernoulli_(1 - p).div_(1 - p)


stochastic_depth.__module__ = "torchvision.ops.stochastic_depth"
torch.fx.wrap("stochastic_depth")

DROPOUTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # ..., axes of what is dropped as one
    "Dropout": (lambda: nn.Dropout(0.3), (40, 50), 0),
    "Dropout inplace": (lambda: nn.Dropout(0.3, True), (40, 50), 0),
    "Dropout1d": (lambda: nn.Dropout1d(0.3), (40, 50, 3), 1),
    "Dropout1d one sample": (lambda: nn.Dropout1d(0.3), (2000, 3), 1),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), (40, 50, 2, 3), 2),
    "Dropout2d three axes": (lambda: nn.Dropout2d(0.3), (40, 50, 3), 1),
    "Dropout3d": (lambda: nn.Dropout3d(0.3), (40, 50, 2, 1, 2), 3),
    "Dropout3d one sample": (lambda: nn.Dropout3d(0.3), (2000, 2, 1, 2), 3),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), (40, 50), 0),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), (40, 50, 2, 3), 2),
    "F.dropout": (lambda: Follows(lambda x, t: F.dropout(x, 0.3, t)), (40, 50), 0),
    "F.dropout1d": (lambda: Follows(lambda x, t: F.dropout1d(x, 0.3, t)), (40, 50, 3), 1),
    "F.dropout2d": (lambda: Follows(lambda x, t: F.dropout2d(x, p=0.3, training=t)), (40, 50, 2, 3), 2),
    "F.dropout3d": (lambda: Follows(lambda x, t: F.dropout3d(x, 0.3, t)), (40, 50, 2, 1, 2), 3),
    "F.alpha_dropout": (lambda: Follows(lambda x, t: F.alpha_dropout(x, 0.3, t)), (40, 50), 0),
    "F.feature_alpha_dropout": (lambda: Follows(lambda x, t: F.feature_alpha_dropout(x, 0.3, t)), (40, 50, 3), 1),
    "stochastic_depth": (lambda: Follows(lambda x, t: stochastic_depth(x, 0.3, "row", t)), (2000, 3, 2), 2),
    "torch.dropout": (lambda: Follows(lambda x, t: torch.dropout(x, 0.3, t)), (40, 50), 0),
    "torch.feature_dropout": (lambda: Follows(lambda x, t: torch.feature_dropout(x, 0.3, t)), (40, 50, 3), 1),
    "torch.alpha_dropout": (lambda: Follows(lambda x, t: torch.alpha_dropout(x, 0.3, t)), (40, 50), 0),
}


def dropped(y: np.ndarray, axes: int) -> np.ndarray:
    """Which units are dropped; all elements of a unit are, or none. Dropped elements have one and the same value."""
    values, counts = np.unique(y, return_counts=True)
    gone = y == values[counts.argmax()]
    units = gone.reshape(*gone.shape[: gone.ndim - axes], -1)
    assert (units.all(-1) == units.any(-1)).all()
    return units.all(-1)


@pytest.mark.filterwarnings("ignore:dropout")
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_in_training(name: str) -> None:
    """The rate, the pattern, and for the kept and the dropped elements torch's own values."""
    make, shape, axes = DROPOUTS[name]
    model = nn.Sequential(make())
    net = torch2needle.convert(model)
    converts(model, tuple(min(s, 6) for s in shape), modes=(False,))
    x = torch.randn(shape)
    np.random.seed(1), torch.manual_seed(1)
    net.train(), model.train()
    leaf = Tensor(x.numpy())
    out = net(leaf)
    ours, theirs = out.numpy(), model(x.clone()).numpy()
    here, there = dropped(ours, axes), dropped(theirs, axes)
    assert 0.25 < here.mean() < 0.35
    assert 0.25 < there.mean() < 0.35
    both_kept = ~here & ~there
    np.testing.assert_allclose(ours[both_kept], theirs[both_kept], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours[here].max(), theirs[there].max(), atol=1e-6)
    out.backward()
    slope = np.abs(grad_of(leaf))
    assert not slope[here].any()
    assert (slope[~here] > 0.5).all()
    np.random.seed(1)
    np.testing.assert_array_equal(net(leaf).numpy(), ours)


@everywhere
@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_at_its_ends(layer: Any, p: float) -> None:
    converts(nn.Sequential(layer(p)), IMAGE)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    np.random.seed(0)
    y = ndl.nn.AlphaDropout(0.4)(Tensor(np.random.randn(400, 500))).numpy()
    assert abs(y.mean()) < 0.01
    assert abs(y.std() - 1) < 0.01


@pytest.mark.parametrize(
    "make",
    [lambda: nn.RReLU(0.1, 0.4), lambda: Follows(lambda x, t: F.rrelu(x, 0.1, 0.4, t))],
    ids=["module", "function"],
)
def test_rrelu_draws_slopes_in_training(make: Callable) -> None:
    model = nn.Sequential(make())
    net = converts(model, MATRIX, modes=(False,))
    net.train()
    x = Tensor(np.random.randn(30, 40))
    y = net(x)
    positive = x.numpy() > 0
    np.testing.assert_array_equal(y.numpy()[positive], x.numpy()[positive])
    slopes = (y.numpy() / x.numpy())[~positive]
    assert 0.0999 < slopes.min() < 0.12
    assert 0.38 < slopes.max() < 0.4001
    assert abs(slopes.mean() - 0.25) < 0.02
    y.backward()
    np.testing.assert_allclose(grad_of(x)[~positive], slopes, rtol=1e-5)


def test_stochastic_depth_of_a_batch_drops_all_or_nothing() -> None:
    net = torch2needle.convert(Follows(lambda x, t: stochastic_depth(x, 0.5, "batch", t))).train()
    seen = {float(v) for _ in range(40) for v in np.unique(net(torch.ones(3, 4, 2)).numpy())}
    assert seen == {0.0, 2.0}
    assert all(np.unique(net(torch.ones(3, 4, 2)).numpy()).size == 1 for _ in range(10))


def test_the_flag_of_a_functional_dropout_is_reported() -> None:
    net = torch2needle.convert(Follows(lambda x, t: F.dropout2d(x, 0.3, t)))
    assert any("dropout2d" in line for line in net.report.follows_mode)
    close(net.eval()(torch.ones(2, 3, 4)), torch.ones(2, 3, 4))
