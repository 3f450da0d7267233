"""A converted model beside its own: a wrong rule is found, and rounding is no fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from test_capture_traps import Linear, T  # noqa: E402
from torch2needle.capture import differences  # noqa: E402


def test_results_of_deep_models_may_round_otherwise() -> None:
    ours, theirs = torch.tensor([1.0, 1.001]), torch.tensor([1.0, 1.0])
    assert differences.difference(ours, theirs) and not differences.difference(ours, theirs, differences.NET_TOLERANCE)


def doubled(x: T) -> T:
    return x * 2


torch.fx.wrap("doubled")


@torch2needle.rule(doubled)
def wrong(x: Any) -> Any:
    return x * 3


def test_a_rule_that_computes_something_else_is_found() -> None:
    """The other capture goes around it, here; where none does, the model is refused."""
    model, x = Linear(lambda s, x: doubled(s.linear(x))).eval(), torch.ones(2, 3)
    net = torch2needle.convert(model, (x,))
    assert "torch.fx capture: the converted model's output 0 is off by" in net.report.capture
    assert np.allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-6)


class Volume(nn.Module):
    """The logarithm of the volume that an orthogonal matrix changes, by its diagonal: 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        upper = torch.linalg.lu(torch.linalg.qr(torch.randn(4, 4))[0])[2]
        self.logs = nn.Parameter(upper.diagonal().abs().log())

    def forward(self, x: T) -> T:
        return self.logs.sum().expand(x.shape[0])


def test_a_sum_that_cancels_is_as_exact_as_rounding_lets_it() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = Volume().eval(), torch.randn(3, 4)
        assert abs(torch2needle.convert(model, (x,))(x).numpy() - model(x).detach().numpy()).max() < 1e-5


def rough(x: T) -> T:
    return x * 2


torch.fx.wrap("rough")


@torch2needle.rule(rough)
def roughly(x: Any) -> Any:
    return x * 2 + 1e9 - 1e9


class Amplified(nn.Module):
    """What rounding leaves of a sum, made large: in float64 it is nothing."""

    def __init__(self, amplified: bool, step: Callable, branch: bool) -> None:
        super().__init__()
        self.amplified, self.step, self.branch = amplified, step, branch

    def forward(self, x: T, more: T) -> list[T]:
        if self.branch and not more.is_cuda:  # which torch.fx does not follow
            more = more + 1
        noise = (x.sum(-1) - x.flip(-1).sum(-1)) * (1e6 if self.amplified else 1)
        return [noise + more[0], self.step(more)]


@pytest.mark.parametrize("branch", [False, True])
def test_results_that_only_rounding_sets_apart(branch: bool) -> None:
    torch.manual_seed(0)
    model, given = Amplified(True, torch.tanh, branch).eval(), (torch.randn(16, 1001), torch.randn(3, 16))
    net = torch2needle.convert(model, given)
    assert any("rounding decides there" in n for n in net.report.notes)
    assert net.report.capture.startswith("torch.export" if branch else "torch.fx")
    exact = [t.double() for t in given]
    for got, want in zip(net.to("float64")(*exact), model(*exact), strict=True):
        assert np.allclose(got.numpy(), want.numpy(), atol=1e-6)


class Inverted(nn.Module):
    """What is left of an inverse behind its function: nothing but rounding, as of a flow that is tried backwards."""

    def __init__(self, step: Callable) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: T) -> list[T]:
        y = torch.sinh(x / 3) * x.exp().sum(-1, keepdim=True)
        return [torch.asinh(y / x.exp().sum(-1, keepdim=True)) * 3 - x, self.step(y)]


def test_results_that_are_nothing_but_rounding() -> None:
    torch.manual_seed(0)
    model, x = Inverted(torch.tanh).eval(), torch.randn(16, 101)
    net = torch2needle.convert(model, (x,))
    left, _ = net(x)
    assert abs(left.numpy()).max() < 1e-5
    net = torch2needle.convert(Inverted(lambda y: doubled(y)).eval(), (x,))
    assert "torch.fx capture: the converted model's output" in net.report.capture


@pytest.mark.parametrize(("amplified", "step"), [(True, lambda x: doubled(x)), (False, lambda x: rough(x))])
def test_rounding_excuses_no_other_fault(amplified: bool, step: Callable) -> None:
    """Of a rule that is wrong in float64, too, or in float32 where torch is exact; torch.export goes around it."""
    given = torch.randn(16, 1001), torch.randn(3, 16)
    net = torch2needle.convert(Amplified(amplified, step, False).eval(), given)
    assert "torch.fx capture: the converted model's output" in net.report.capture
