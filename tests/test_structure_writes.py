"""Forwards that write in place, branch on the mode or checkpoint, on the models of test_structure.py."""

# ruff: noqa: PLC3002 (its tables of models are one-line lambdas)
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, converts, leaves  # noqa: E402
from gpu_devices import everywhere  # noqa: E402
from test_structure import MATRIX, model, writes_list  # noqa: E402
from torch2needle.models import randomize  # noqa: E402

# -- writes --------------------------------------------------------------------------------------------------------------


def input_write(self: Any, x: Any) -> Any:
    x += self.scale
    x[:, 0] = 1.0
    return self.fc(x) * x


WRITING: dict[str, Any] = {
    "input": input_write,
    "del": lambda self, x: (lambda d: (d.pop("a"), d)[1]["b"])({"a": x, "b": self.fc(x)}),
    "relu_ before a skip": lambda self, x: (lambda y: F.relu_(y) + y)(self.fc(x)),
    "input by keyword": lambda self, x: (lambda y: (F.relu(input=y, inplace=True), y * 2)[1])(self.fc(x)),
    "permuted by keyword": lambda self, x: (lambda y: (y.permute(dims=(1, 0))[0].mul_(3), y * 2)[1])(self.fc(x)),
    "swap": lambda self, x: (lambda y: (y[:, :4].copy_(y[:, 4:].clone()), y)[1])(self.fc(x)),
    "bool assignment": lambda self, x: (lambda m: (m.__ior__(x < -1), x * m)[1])(x > 1),
}


@everywhere
@pytest.mark.parametrize("name", WRITING)
def test_writes(name: str) -> None:
    converts(model(WRITING[name]), MATRIX, gradient=name != "input")


@everywhere
def test_writes_through_chains_of_views() -> None:
    def chain(self: Any, x: Any) -> Any:
        y = self.fc(x)
        halves = y.view(-1, 2, 4)
        first = halves[:, 0]
        first.mul_(2).add_(1)
        halves[:, 1].neg_()
        y += x
        y[:, 3] = first[:, 0] * 2
        return y, halves * 1, first + 0

    converts(model(chain), MATRIX)


@pytest.mark.parametrize("part", [Ellipsis, 0])
def test_writes_to_buffers_last(part: Any) -> None:
    theirs = model(lambda self, x: (self.offset[part].add_(1), x + self.offset)[1])
    ours = torch2needle.convert(theirs)
    for _ in range(2):
        x = torch.randn(MATRIX)
        close(ours(x), theirs(x))
        close(ours.state_dict()["offset"], theirs.offset)


def test_writes_to_parameters_are_refused() -> None:
    for write in (
        lambda self, x: (self.fc.bias.add_(1), self.fc(x))[1],
        lambda self, x: (self.fc.bias[0].add_(1), self.fc(x))[1],
    ):
        with pytest.raises(torch2needle.ConversionError, match="belongs to the model"):
            torch2needle.convert(model(write))


# -- modes ---------------------------------------------------------------------------------------------------------------


def test_branches_on_the_mode_are_noted() -> None:
    def branch(self: Any, x: Any) -> Any:
        return self.fc(x) * 2 if self.training else self.fc(x)

    net = model(branch).eval()
    ours = torch2needle.convert(net)
    assert any("differs between training and evaluation" in n for n in ours.report.notes)
    x = torch.randn(MATRIX)
    close(ours(x), net(x))


def test_checkpoint_is_inlined() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        net = model(lambda self, x, r=reentrant: checkpoint(self.fc, x, use_reentrant=r) + x)
        ours = torch2needle.convert(net)
        x = torch.randn(MATRIX)
        close(ours(x), net(x))


def test_results_are_the_same_twice() -> None:
    net = torch2needle.convert(randomize(model(writes_list)))
    x = np.random.randn(*MATRIX).astype("float32")
    a, b = net(x), net(x)
    for p, q in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())


class Scaled(ndl.nn.Module):
    """A needle module that computes with its parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = ndl.nn.Parameter(np.ones(3, "float32"))

    def forward(self, x: Any) -> Any:
        return x + ndl.ops.exp(self.weight * 2) * ndl.ops.reshape(self.weight, (3,))


def test_what_is_made_of_parameters_follows_them_when_compiled() -> None:
    net, x = Scaled(), np.zeros((2, 3), "float32")
    exe = ndl.compile(net, (x,))
    net.weight.data = ndl.Tensor(np.full(3, 0.5, "float32"))
    np.testing.assert_allclose(exe(x)[0], net(ndl.Tensor(x)).numpy()[0], rtol=1e-6)
