"""Layers that packages and users write on top of torch's batch norms, and drop paths of their own, follow the mode."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle

torch.manual_seed(0)


class Activated(nn.BatchNorm2d):
    """What users write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x))


class Activated1d(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class SpeltOut(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: branches on the mode, arguments by name."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=0.3)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        training = True if self.training else self.running_mean is None and self.running_var is None
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            training=training,
            eps=self.eps,
            momentum=self.momentum,
            bias=self.bias,
            weight=self.weight,
        )
        return self.act(y)


class Uncounted(nn.BatchNorm2d):
    """Counts nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = (self.weight, self.bias, self.training, self.momentum, self.eps)
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, *rest))


class Net(nn.Module):
    """shared: one norm for all calls."""

    def __init__(self, norm: type[nn.Module], shared: bool = False) -> None:
        super().__init__()
        flat = issubclass(norm, nn.BatchNorm1d)
        self.first = nn.Conv1d(3, 5, 3) if flat else nn.Conv2d(3, 5, 3)
        self.norm = norm(5)
        self.second = nn.Conv1d(5, 5, 1) if flat else nn.Conv2d(5, 5, 1)
        self.again = self.norm if shared else norm(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.second(self.norm(self.first(x))))
        y = self.norm(self.second(y)) if self.again is self.norm else y
        return self.head(y.flatten(2).mean(-1))


def batch(net: Net) -> torch.Tensor:
    return torch.randn(6, 3, 9) if isinstance(net.norm, nn.BatchNorm1d) else torch.randn(6, 3, 8, 9)


def near(net: nn.Module, ours: Any) -> None:
    """Tensors of the model by name, the counts among them."""
    theirs, found = net.state_dict(), ours.state_dict()
    assert theirs.keys() == found.keys()
    for name, t in theirs.items():
        np.testing.assert_allclose(np.asarray(found[name]), t.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


CASES = [
    (norm, shared, training, given)
    for norm in (nn.BatchNorm2d, Activated, Activated1d, SpeltOut, Uncounted)
    for shared, training, given in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize(("norm", "shared", "training", "given"), CASES)
def test_batch_norms_that_are_inherited(norm: type[nn.Module], shared: bool, training: bool, given: bool) -> None:
    """Converted in either mode, they train and evaluate as torch's, eager and in a compiled step of the fused net."""
    model = Net(norm, shared).train(training)
    x = batch(model)
    converted = torch2needle.convert(model, example=(x,) if given else None)
    assert not any("stays so" in note for note in converted.report.notes), converted.report.notes
    assert "num_batches_tracked" in str(list(converted.state_dict()))
    assert "counted" not in str(converted.report)  # the user called torch's batch_norm
    y = torch.arange(6) % 4
    for fused in (False, True):
        theirs, ours = copy.deepcopy(model).train(), copy.deepcopy(converted)
        ours.train()
        ours = operator_fusion.fuse(ours) if fused else ours
        torch_step = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
        optimizer = ndl.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        loss, data = ndl.nn.CrossEntropyLoss(), (ndl.Tensor(x.numpy()), ndl.Tensor(y.numpy()))
        step = ndl.compile_step(ours, loss, optimizer, data) if fused else None
        for _ in range(3):
            torch_step.zero_grad()
            want = F.cross_entropy(theirs(x), y)
            want.backward()
            torch_step.step()
            if step is None:
                optimizer.reset_grad()
                got = loss(ours(data[0]), data[1])
                got.backward()
                optimizer.step()
            else:
                got = step(*data)
            np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-4)
        near(theirs, ours)
        theirs.eval(), ours.eval()
        with torch.no_grad():
            np.testing.assert_allclose(ours(data[0]).numpy(), theirs(x).numpy(), rtol=1e-3, atol=1e-4)
        near(theirs, ours)  # evaluation counts nothing
        compiled = ndl.compile(ours, (data[0],))
        np.testing.assert_allclose(compiled(data[0]).numpy(), ours(data[0]).numpy(), rtol=1e-3, atol=1e-4)


ARGUMENTS = [
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
    {"momentum": 1.0, "eps": 1e-2},
    {"momentum": None},
]
SHAPES = {
    nn.BatchNorm1d: ((4, 3), (4, 3, 1)),
    nn.BatchNorm2d: ((4, 3, 5, 2), (1, 3, 4, 4)),
    nn.BatchNorm3d: ((2, 3, 1, 2, 4),),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize(("base", "shape"), [(b, s) for b, shapes in SHAPES.items() for s in shapes])
def test_arguments_of_inherited_norms(base: Any, shape: tuple, arguments: dict[str, Any], training: bool) -> None:
    """In every mode that a net holds for; an average over all batches may be refused, its momentum is a value."""

    class Rectified(base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(super().forward(x))

    model = nn.Sequential(Rectified(3, **arguments)).train(training)
    x = torch.randn(shape)
    try:
        converted = torch2needle.convert(model, example=(x,))
    except torch2needle.ConversionError:
        assert training and arguments == {"momentum": None}
        return
    for mode in (False, True) if converted._only is None else (converted._only,):
        theirs, ours = copy.deepcopy(model).train(mode), operator_fusion.fuse(copy.deepcopy(converted).train(mode))
        for _ in range(2):
            np.testing.assert_allclose(ours(ndl.Tensor(x.numpy())).numpy(), theirs(x).detach().numpy(), atol=1e-4)
        near(theirs, ours)


class CountsTwice(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        return super().forward(x)


class CountsAlways(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.num_batches_tracked.add_(1)
        return super().forward(x)


class ScalesByCount(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.num_batches_tracked)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", [CountsTwice, CountsAlways, ScalesByCount])
def test_counts_of_another_kind(norm: type[nn.Module], training: bool) -> None:
    """What counts otherwise is right in the mode that it was captured in, and says so, or is refused."""
    model = Net(norm).train(training)
    x = batch(model)
    try:
        ours = torch2needle.convert(model, example=(x,))
    except torch2needle.ConversionError:
        return
    for _ in range(2):
        with torch.no_grad():
            want = model(x).numpy()
        np.testing.assert_allclose(ours(ndl.Tensor(x.numpy())).numpy(), want, rtol=1e-3, atol=1e-4)
    near(model, ours)


class DropPath(nn.Module):
    """As packages write it."""

    def __init__(self, drop_prob: float = 0.0, scale: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale = drop_prob, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        drawn = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * (drawn.div_(keep) if self.scale else drawn)


class MyDropPath(DropPath):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1)) + (1 - self.drop_prob)
        return x.div(1 - self.drop_prob) * kept.floor() if self.training else x


class ElementsDropPath(DropPath):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.drop_prob, self.training)


class RareDropPath(DropPath):  # half as often as it says
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (torch.rand(x.shape[0], *[1] * (x.dim() - 1)) + 1 - self.drop_prob / 2).floor()
        return x / (1 - self.drop_prob) * kept if self.training else x


class PairDropPath(DropPath):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


class Block(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.body, self.drop = nn.Linear(8, 8), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.body(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("drop", [DropPath(0.25), MyDropPath(0.25), DropPath(0.0)])
def test_drop_paths(drop: nn.Module, given: bool, training: bool) -> None:
    model = Block(drop).train(training)
    x = torch.randn(400, 8)
    before = torch.random.get_rng_state()
    ours = torch2needle.convert(model, example=(x,) if given else None)
    assert torch.equal(torch.random.get_rng_state(), before) and model.drop.training is training
    assert type(ours.drop) is ndl.nn.StochasticDepth and not ours.report.notes
    for mode in (False, True):
        ours.train(mode)
        added = ours(ndl.Tensor(x.numpy())).numpy() - x.numpy()
        body = model.body(x).detach().numpy()
        kept = np.abs(added).max(1) > 1e-6
        p = drop.drop_prob if mode else 0.0
        np.testing.assert_allclose(added, body * kept[:, None] / (1 - p), rtol=1e-3, atol=1e-5)
        assert abs(kept.mean() - (1 - p)) <= 5 * (p * (1 - p) / 400) ** 0.5


class First(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[0]


NONE = [
    DropPath(0.25, scale=False),
    ElementsDropPath(0.25),
    RareDropPath(0.25),
    nn.Sequential(PairDropPath(0.25), First()),
]


@pytest.mark.parametrize("drop", NONE)
def test_what_is_no_drop_path(drop: nn.Module) -> None:
    """The name alone makes none."""
    ours = torch2needle.convert(Block(drop).eval(), example=(torch.randn(4, 8),))
    assert not any(type(m) is ndl.nn.StochasticDepth for m in ours.modules())
