"""`fallback="torch"` of models that no capture converts: one call of the whole model."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import torch2needle

torch.manual_seed(0)


class Straight(torch.autograd.Function):
    """A gradient of the user's, which no capture sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.flip(-1).abs() * 3  # not of the same element, nor linear


def rounded(x: torch.Tensor) -> torch.Tensor:
    return Straight.apply(x)


class Pair(NamedTuple):
    first: Any
    rest: Any


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.a.weight  # tied
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> Any:
        if self.training:
            self.calls.add_(1)
        y = rounded(self.norm(self.a(x)) * scale)
        return {"pair": Pair(self.head(y), [x, None]), "n": self.calls}


class ByValues(nn.Module):
    """Numbers that numpy computes, and as many rows as values say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[torch.from_numpy(x.detach().numpy().sum(1) > 0)]
        return rounded(kept * 4) / float(x.detach().numpy().max())


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([100, 27, -128], dtype=torch.int8))
        self.gain = nn.Parameter(torch.tensor([1 + 2j, 3j]))

    def forward(self, images: dict[str, torch.Tensor]) -> Any:
        wraps = images["x"] * 2 + images["x"]
        return rounded(wraps.float()), self.table + self.table, (self.gain * self.gain).abs().half()


def converted(model: nn.Module, *example: Any) -> Any:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        net = torch2needle.convert(model, example, fallback="torch")
    assert net.report.capture == "torch itself"
    name = type(model).__name__
    assert any(f"1 calls run in torch: {name} (1x, test_whole.py" in str(w.message) for w in said)
    return net


def close(ours: Any, theirs: torch.Tensor) -> None:
    got = ours.numpy()
    np.testing.assert_allclose(got, theirs.detach().numpy().astype(got.dtype), rtol=1e-5, atol=1e-6)


def test_structure_state_and_modes() -> None:
    model, x = Own().eval(), torch.randn(3, 4)
    net = converted(model, x)
    assert list(net.state_dict()) == list(model.state_dict()) and int(model.calls) == 0
    exe = ndl.compile(net, (x,))
    for given in (x, torch.randn(5, 4), torch.randn(1, 4)):
        want, got = model(given), net(given)
        assert type(got["pair"]) is Pair and got["pair"].rest[1] is None
        close(got["pair"].first, want["pair"].first)
        close(got["pair"].rest[0], given)
        close(got["n"], want["n"])
        close(exe(given)["pair"].first, want["pair"].first)
    model.train(), net.train()
    for _ in range(2):
        given = torch.randn(6, 4)
        close(net(given)["pair"].first, model(given)["pair"].first)
    for name, t in torch2needle.to_torch(net).items():
        torch.testing.assert_close(t, model.state_dict()[name])


def test_gradients_and_steps() -> None:
    model, x = Own().eval(), torch.randn(3, 4)
    net = converted(model, x)
    given = ndl.Tensor(x.numpy())
    leaf = x.clone().requires_grad_()
    ndl.ops.summation(net(given)["pair"].first ** 2).backward()
    (model(leaf)["pair"].first ** 2).sum().backward()
    close(given.grad, leaf.grad)
    theirs = dict(model.named_parameters())
    for name, p in net.named_parameters():
        close(p.grad, theirs[name].grad)
    ndl.optim.SGD(net.parameters(), lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    close(net(x)["pair"].first, model(x)["pair"].first)
    close(ndl.compile(net, (x,))(x)["pair"].first, model(x)["pair"].first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes_by_values(dtype: torch.dtype) -> None:
    x = torch.randn(6, 3, dtype=dtype)
    net = converted(ByValues(), x)
    for given in (x, -x, torch.randn(2, 3, dtype=dtype), x.T.contiguous().T):
        for f in (net, ndl.compile(net, (x,))):
            close(f(given), ByValues()(given))


def test_numbers_of_other_dtypes() -> None:
    images = {"x": torch.tensor([[200, 100]], dtype=torch.uint8)}
    net = converted(Narrow().eval(), images)
    for f in (net, ndl.compile(net, (images,))):
        for ours, theirs in zip(f(images), Narrow()(images), strict=True):
            close(ours, theirs)


class Refused(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.last = what, None
        self.part = nn.Dropout()
        self.register_buffer("small", torch.zeros(2, dtype=torch.int8))

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        y = rounded(x)
        if self.what == "state":
            self.last = y
        if self.what == "input":
            x.add_(1)
        if self.what == "buffer" or (self.what == "small" and self.training):
            self.small += 1
        return {"number": (y, float(y.detach().numpy().sum())), "complex": torch.complex(y, y)}.get(self.what, y)


REFUSED = {
    "state": "changes attributes of the model",
    "input": "writes its input in place",
    "buffer": "writes a buffer in evaluation",
    "small": "writes a buffer of a dtype that needle lacks",
    "number": "a result is a float",
    "complex": "a result is complex numbers",
    "mode": "some modules are in training",
    "inputs": "as many inputs as a call gives",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_may_not_answer(what: str) -> None:
    model = Refused(what).eval()
    if what == "small":
        model.train()
    elif what == "mode":
        model.part.train()
    example = (torch.randn(2), torch.randn(2)) if what == "inputs" else (torch.randn(2),)
    with pytest.raises(torch2needle.ConversionError, match=REFUSED[what]):
        torch2needle.convert(model, example, fallback="torch")
