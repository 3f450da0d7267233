"""torch's initialisers by its names: moments and properties, the same for both layouts; the stream and what is drawn."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle import init, nn
from needle.init import in_place
from test_optimizer_rules import BACKENDS

SHAPE = (64, 48, 3, 3)
NAMES = [n for n in in_place.__all__ if n != "calculate_gain"]


def make(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(np.full(shape, 7.0), **{"dtype": "float32"} | options)


FILLS: dict[str, Callable[[Any, Any], Any]] = {
    "uniform": lambda i, t: i.uniform_(t, -2.0, 3.0),
    "normal": lambda i, t: i.normal_(t, 1.0, 0.5),
    "trunc_normal": lambda i, t: i.trunc_normal_(t, 0.5, 1.5, -1.0, 2.0),
    "trunc_normal-wide": lambda i, t: i.trunc_normal_(t, std=0.02),
    "trunc_normal-one-side": lambda i, t: i.trunc_normal_(t, 0.0, 1.0, 0.5, 50.0),
    "xavier_uniform": lambda i, t: i.xavier_uniform_(t, 1.5),
    "xavier_normal": lambda i, t: i.xavier_normal_(t),
    "kaiming_uniform": lambda i, t: i.kaiming_uniform_(t, 0.3, "fan_out"),
    "kaiming_uniform-default": lambda i, t: i.kaiming_uniform_(t, math.sqrt(5)),
    "kaiming_normal": lambda i, t: i.kaiming_normal_(t, mode="fan_in", nonlinearity="relu"),
    "orthogonal": lambda i, t: i.orthogonal_(t, 1.5),
}


@pytest.mark.parametrize("shape", [SHAPE, (200, 150)])
@pytest.mark.parametrize("name", FILLS)
def test_moments_are_torchs(name: str, shape: tuple[int, ...]) -> None:
    ndl.manual_seed(0), torch.manual_seed(0)
    ours, theirs = make(*shape), torch.empty(shape)
    assert FILLS[name](init, ours) is ours
    got, want = ours.numpy().astype("float64"), FILLS[name](torch.nn.init, theirs).double().numpy()
    spread = want.std()
    assert ours.dtype == "float32" and ours.requires_grad
    assert got.mean() == pytest.approx(want.mean(), abs=0.03 * spread)
    assert got.std() == pytest.approx(spread, rel=0.02)
    if name != "orthogonal":
        quantiles = np.linspace(0.02, 0.98, 13)
        np.testing.assert_allclose(np.quantile(got, quantiles), np.quantile(want, quantiles), atol=0.06 * spread)
        assert (got.min() < want.mean()) and got.min() == pytest.approx(want.min(), abs=spread)


@pytest.mark.parametrize("window", [(-2.0, 2.0), (-0.1, 0.3), (3.0, 40.0), (-9.0, -4.0), (-30.0, 30.0), (2.0, 2.001)])
def test_truncated_numbers_lie_in_their_window(window: tuple[float, float]) -> None:
    ndl.manual_seed(1)
    got = init.trunc_normal_(make(4000), 0.0, 1.0, *window).numpy()
    low, high = window
    assert low - 1e-6 <= got.min() and got.max() <= high + 1e-6

    def mass(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2 if x < 0 else 1 - math.erfc(x / math.sqrt(2)) / 2

    for x in np.linspace(low, min(high, low + 4), 5)[1:-1] if low < 3 else ():
        part = (mass(x) - mass(low)) / (mass(high) - mass(low))
        assert (got < x).mean() == pytest.approx(part, abs=0.03)
    assert init.trunc_normal_(make(0)).shape == (0,)


@pytest.mark.parametrize(
    "shape, columns", [((40, 30), False), ((30, 40), True), ((16, 8, 3, 3), True), ((100, 4, 2, 2), False)]
)
def test_orthogonal(shape: tuple[int, ...], columns: bool) -> None:
    a = init.orthogonal_(make(*shape, dtype="float64"), 2.0).numpy().reshape(shape[0], -1)
    a = a if columns else a.T
    np.testing.assert_allclose(a @ a.T, 4 * np.eye(len(a)), atol=1e-12)


EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "constant": lambda i, t: i.constant_(t, 0.3),
    "ones": lambda i, t: i.ones_(t),
    "zeros": lambda i, t: i.zeros_(t),
    "dirac": lambda i, t: i.dirac_(t),
    "dirac-groups": lambda i, t: i.dirac_(t, 2),
    "eye": lambda i, t: i.eye_(t),
}


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", EXACT)
def test_constants_are_torchs(name: str, device: Any) -> None:
    shapes = [(4, 6), (6, 4)] if name == "eye" else [(4, 3, 5), (4, 6, 3, 3), (8, 2, 2, 4, 3)]
    for shape in shapes:
        ours = make(*shape, device=device, dtype="float64")
        EXACT[name](init, ours)
        assert ours.device == device
        np.testing.assert_array_equal(ours.numpy(), EXACT[name](torch.nn.init, torch.empty(shape).double()).numpy())


def test_sparse() -> None:
    a = init.sparse_(make(50, 40), 0.33, 0.1).numpy()
    assert ((a == 0).sum(0) == math.ceil(0.33 * 50)).all()
    assert a[a != 0].std() == pytest.approx(0.1, rel=0.1)
    assert len({tuple(np.flatnonzero(column)) for column in a.T}) == 40


@pytest.mark.parametrize("name", ["xavier_uniform_", "kaiming_normal_", "orthogonal_", "dirac_", "sparse_"])
def test_the_courses_layout_is_the_same_turned(name: str) -> None:
    shape, order = ((12, 10), (1, 0)) if name == "sparse_" else ((12, 10, 3, 5), (2, 3, 1, 0))
    args = (0.4,) if name == "sparse_" else ()
    ndl.manual_seed(3)
    want = getattr(init, name)(make(*shape), *args).numpy().transpose(order)
    ndl.manual_seed(3)
    got = getattr(init, name)(make(*want.shape), *args, layout="needle").numpy()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", [n for n in NAMES if hasattr(torch.nn.init, n)])
def test_arguments_are_torchs(name: str) -> None:
    own, theirs = (inspect.signature(getattr(i, name)).parameters for i in (nn.init, torch.nn.init))
    assert [n for n in own if n != "layout"] == [n for n in theirs if n != "generator"]
    assert all(own[n].default == theirs[n].default for n in own if n != "layout")


def test_every_name_is_torchs() -> None:
    assert all(hasattr(torch.nn.init, name) for name in in_place.__all__)
    assert nn.init.__all__ == in_place.__all__ and nn.init.zeros_ is init.zeros_


@pytest.mark.parametrize("name", [*in_place.GAINS, *in_place.PLAIN, "leaky_relu"])
def test_gains(name: str) -> None:
    assert init.calculate_gain(name) == pytest.approx(torch.nn.init.calculate_gain(name))
    assert init.calculate_gain("leaky_relu", 0.3) == pytest.approx(torch.nn.init.calculate_gain("leaky_relu", 0.3))


WRONG: dict[str, tuple[Callable[[], Any], type, str]] = {
    "a vector": (
        lambda: init.xavier_normal_(make(3)),
        ValueError,
        r"\[xavier_normal_\] expects 2 or more axes, got shape \(3,\)\.",
    ),
    "no matrix": (lambda: init.eye_(make(3, 3, 3)), ValueError, r"\[eye_\] expects 2 axes, got shape \(3, 3, 3\)\."),
    "groups": (
        lambda: init.dirac_(make(3, 3, 3), 2),
        ValueError,
        r"\[dirac_\] groups expects to divide 3 output channels, got 2\.",
    ),
    "mode": (
        lambda: init.kaiming_normal_(make(3, 3), mode="fan"),
        ValueError,
        r"\[kaiming_normal_\] mode expects fan_in or fan_out, got 'fan'\.",
    ),
    "gain": (
        lambda: init.calculate_gain("gelu"),
        ValueError,
        r"\[calculate_gain\] nonlinearity expects one of tanh, .*, got 'gelu'\.",
    ),
    "layout": (
        lambda: init.orthogonal_(make(3, 3), layout="NHWC"),
        ValueError,
        r"\[orthogonal_\] layout expects torch or needle, got 'NHWC'\.",
    ),
    "window": (
        lambda: init.trunc_normal_(make(3), a=2.0, b=1.0),
        ValueError,
        r"\[trunc_normal_\] expects a below b and std above 0, got 2\.0, 1\.0 and 1\.0\.",
    ),
    "an array": (
        lambda: init.zeros_(np.ones(3)),
        TypeError,
        r"\[zeros_\] expects a parameter or another tensor of its own, got ndarray\.",
    ),
    "a result": (
        lambda: init.zeros_(make(3) + 1),
        TypeError,
        r"\[zeros_\] expects a parameter or another tensor of its own, got the result of an op\.",
    ),
    "whole numbers": (
        lambda: init.uniform_(ndl.Tensor(np.ones((2, 3), "int64"))),
        TypeError,
        r"\[uniform_\] expects a dtype of floats for numbers with fractions, got int64\.",
    ),
    "whole numbers, made": (
        lambda: init.randn(3, dtype="int32"),
        TypeError,
        r"\[init\] expects a dtype of floats for numbers with fractions, got int32\.",
    ),
    "no DLPack": (
        lambda: ndl.from_dlpack([1.0]),
        TypeError,
        r"\[from_dlpack\] expects an object with __dlpack__, got list\.",
    ),
    "a seed": (
        lambda: ndl.manual_seed("0"),  # type: ignore[arg-type]
        TypeError,
        r"\[manual_seed\] expects a whole number, got str\.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name: str) -> None:
    f, kind, message = WRONG[name]
    with pytest.raises(kind, match=rf"^{message}$"):
        f()


def test_the_stream_is_numpys() -> None:
    for seed in (3, 2**32 + 3, -(2**32) + 3):
        ndl.manual_seed(seed)
        got = init.uniform_(make(5)).numpy()
        np.random.seed(3)
        np.testing.assert_array_equal(got, np.random.rand(5).astype("float32"))


def test_nothing_is_drawn_where_weights_are_about_to_be_loaded() -> None:
    np.random.seed(0)
    state = np.random.get_state()[1].tolist()
    with init.no_drawing():
        init.kaiming_uniform_(make(3, 3))
    assert np.random.get_state()[1].tolist() == state


def test_plans_read_what_was_filled() -> None:
    layer, x = nn.Linear(3, 2), ndl.Tensor(np.ones((1, 3), "float32"))
    plan = ndl.compile(layer, (x,))
    plan(x)
    nn.init.constant_(layer.weight, 2.0), nn.init.zeros_(layer.bias)
    np.testing.assert_array_equal(plan(x).numpy(), [[6.0, 6.0]])


def test_requires_grad_() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert net.modules[0].requires_grad_(False) is net.modules[0]
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]
    x = ndl.Tensor(np.ones((2, 3), "float32"), requires_grad=False)
    assert x.requires_grad_() is x and x.requires_grad
    net(x).sum().backward()
    assert [p.grad is None for p in net.parameters()] == [True, True, False, False]
    assert x.grad is not None
