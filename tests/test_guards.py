"""Conditions on values: the example decides, and nets, plans and files check the same of every input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from needle.nn.functional import GuardError  # noqa: E402

ONES = torch.ones(3, 4)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor(x)

    def factor(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


class Truth(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        if x.mean() > 0:
            return 2.0
        return -1.0


class Asserts(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        assert (x > -5).all(), "too small"
        return 3.0


class Item(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return sum(range((x > 0).sum(1).max().item()))


class Whole(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return int(x.max() * 3)


class Listed(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return sum(n for n in (x[0] > 0).long().tolist())


class While(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        n = 1
        while x.abs().sum() > n:
            n *= 2
        return n


KINDS = [Truth, Asserts, Item, Whole, Listed, While]


@pytest.mark.parametrize("kind", KINDS)
def test_a_guard_holds_and_is_violated(kind: type[Asks], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    net = torch2needle.convert(model, example=(ONES,))
    exe = ndl.compile(net, (ONES.numpy(),))
    for x in (ONES, ONES * 1.01):
        want = model(x).detach().numpy()
        np.testing.assert_allclose(net(x).numpy(), want, atol=1e-5)
        np.testing.assert_allclose(exe(x.numpy()), want, atol=1e-5)
        np.testing.assert_allclose(exe(x).numpy(), want, atol=1e-5)
    asked = [n for n in net.report.notes if "it holds for inputs that answer" in n]
    assert asked
    assert all("test_guards.py:" in n for n in asked)
    ndl.save(net, tmp_path / "net")
    bad = ONES * -9
    for f in (net, exe, ndl.load(tmp_path / "net")):
        for x in (bad, bad.numpy()):
            with pytest.raises(GuardError, match=r"\[convert\] the model holds for inputs that answer `.*test_guards"):
                f(x)


def test_large_whole_numbers_are_told_apart() -> None:
    class Counts(Asks):
        def factor(self, x: torch.Tensor) -> Any:
            return float(x.long().sum().item() % 2)

    net = torch2needle.convert(Counts().eval(), example=(ONES * 100_000,))
    bad = ONES * 100_000
    bad[0, 0] += 1
    with pytest.raises(GuardError, match="with 1200000, got 1200001"):
        net(bad)


def test_real_numbers_are_no_guards() -> None:
    class Scaled(Asks):
        def factor(self, x: torch.Tensor) -> Any:
            return x.abs().mean().item()

    model = Scaled().eval()
    net = torch2needle.convert(model, example=(ONES,))
    for x in (ONES, torch.randn(3, 4), torch.randn(5, 4)):
        np.testing.assert_allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-5)


def test_a_buffer_that_is_asked() -> None:
    class Steps(Asks):
        def factor(self, x: torch.Tensor) -> Any:
            return 2.0 ** int(self.steps) if self.steps > 1 else 0.0

    model = Steps().eval()
    net = torch2needle.convert(model, example=(ONES,))
    x = torch.randn(6, 4)
    np.testing.assert_allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-5)
    net.steps.data = ndl.Tensor(np.array(3), dtype="int64")  # the graph is another one now
    with pytest.raises(GuardError, match="with 2, got 3"):
        net(x)


def test_fused_nets_keep_their_guards() -> None:
    import operator_fusion

    net = operator_fusion.fuse(torch2needle.convert(Truth().eval(), example=(ONES,)))
    exe = ndl.compile(net, (ONES.numpy(),))
    with pytest.raises(GuardError):
        exe(-ONES.numpy())
    with pytest.raises(ndl.autograd.Unsupported, match="gives its results by a call"):
        exe.run_into(np.empty((3, 4), "float32"), ONES.numpy())


def test_what_is_no_inference_refuses() -> None:
    net = torch2needle.convert(Truth().train(), example=(ONES,))
    adam = ndl.optim.Adam(net.parameters())
    loss = lambda y, t: ((y - t) ** 2).sum()  # noqa: E731
    with pytest.raises(ndl.autograd.Unsupported, match="holds for some inputs alone"):
        ndl.compile_step(net, loss, adam, (ONES.numpy(), ONES.numpy()))


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.mean() > 0, lambda v: self.high(v).relu(), lambda v: self.low(v).tanh(), (x,))


def test_both_branches_of_cond_are_there() -> None:
    model = Conditional().eval()
    net = torch2needle.convert(model, example=(ONES,))
    exe = ndl.compile(net, (ONES.numpy(),))
    for x in (ONES, -ONES, torch.randn(3, 4)):
        chosen = model.high(x).relu() if x.mean() > 0 else model.low(x).tanh()
        for y in (net(x).numpy(), exe(x.numpy())):
            np.testing.assert_allclose(y, chosen.detach().numpy(), atol=1e-6)
