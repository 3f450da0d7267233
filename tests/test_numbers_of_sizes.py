"""Numbers that Python makes of sizes: fixed where the model takes no others, so that torch.fx captures it, and free else."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close  # noqa: E402
from needle.nn.functional import GuardError  # noqa: E402


def root(x: Any) -> Any:
    side = int(math.sqrt(x.shape[1]))
    return x.reshape(x.shape[0], side, side, -1)


def half(x: Any) -> Any:
    return x[:, : int(x.shape[1] / 2)]


def counted(x: Any) -> Any:
    return sum(x[:, i] * (i + 1) for i in range(x.shape[1]))


def scaled(x: Any) -> Any:
    return x / float(x.size(1))


def listed(x: Any) -> Any:
    return torch.stack([x[:, 0], x[:, 1]], 1) * [1.0, 2.0, 3.0, 4.0][x.shape[1] // 8]


def several(x: Any) -> Any:
    n, c = x.shape[1:]
    return F.pad(x, (int(c / 3), 0)) * range(n + c)[-1] + int(n * 1.5)


FORWARDS = (root, half, counted, scaled, listed, several)


class Net(nn.Module):
    """fixed: it takes one length alone, as models of one image size do."""

    def __init__(self, forward: Any, fixed: bool) -> None:
        super().__init__()
        self.layer, self.f = nn.Linear(6, 6), forward
        self.place = nn.Parameter(torch.randn(1, 16, 6)) if fixed else None

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return self.f(y if self.place is None else y + self.place)


@pytest.mark.parametrize("f", FORWARDS)
@pytest.mark.parametrize("training", [False, True])
def test_models_of_one_size(f: Any, training: bool) -> None:
    model, x = Net(f, True).train(training), torch.randn(2, 16, 6)
    net = torch2needle.convert(model, example=(x,))
    assert net.report.capture == "torch.fx", net.report.capture
    for batch in (2, 1, 5):
        given = torch.randn(batch, 16, 6)
        close(net(given), model(given))
    close(ndl.compile(net.eval(), (x,))(x), model(x))


@pytest.mark.parametrize("f", FORWARDS)
def test_models_of_any_size(f: Any) -> None:
    """Every size that the net takes gives what the model gives; both captures leave those free that they can."""
    model, x = Net(f, False).eval(), torch.randn(2, 16, 6)
    net = torch2needle.convert(model, example=(x,))
    by = "torch.fx" if f in (root, half, scaled) else "torch.export"
    assert net.report.capture.startswith(by), net.report.capture
    taken = 0
    for length in (4, 8, 9, 16, 36):
        given = torch.randn(3, length, 6)
        try:
            got = net(given)
        except (ValueError, GuardError):
            continue
        close(got, model(given))
        taken += 1
    assert taken >= (4 if f in (half, scaled) else 3 if f is root else 1)
