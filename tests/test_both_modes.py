"""Models that compute something else in training than in evaluation: the net has a graph for each mode over the same layers."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle
from conversion import close, leaves

torch.manual_seed(0)
X = torch.randn(4, 3, 8, 8)


class Base(nn.Module):
    exports = False  # whether torch.fx does not follow it

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, 4)

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        x = x if not self.exports or x.is_cuda else x * 1.0
        return self.body(x).mean((2, 3))


class Auxiliary(Base):
    """As GoogLeNet: more results in training."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.pooled(x)
        return (self.head(y), self.extra(y)) if self.training else self.head(y)


class Detector(Base):
    """As YOLO's heads: raw maps in training, boxes in evaluation."""

    def forward(self, x: torch.Tensor) -> Any:
        raw = self.head(self.body(x).permute(0, 2, 3, 1))
        if self.training:
            return raw
        boxes = raw.sigmoid() * 2
        return {"boxes": boxes[..., :2].flatten(1, 2), "scores": boxes[..., 2:].flatten(1, 2)}


class Frozen(Base):
    """Its loss in training needs gradients through a part alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pooled(x)
        return self.head(y.detach()) if self.training else self.head(y).softmax(-1)


class Functional(Base):
    """Flags of functions inside of branches; the whole is dropped, so that training is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pooled(x)
        if self.training:
            y = F.batch_norm(y, self.mean, self.var, None, None, self.training) + F.dropout(y, 1.0, self.training)
            return self.head(y)
        return self.head(F.batch_norm(y, self.mean, self.var)) * 2


class Counting(Base):
    """A buffer that training alone writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pooled(x)
        if self.training:
            self.center.mul_(0.5).add_(y.detach().mean(0) * 0.5)
        return self.head(y - self.center)


class Noisy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.0  # no noise: training is exact

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pooled(x)
        if self.training:
            y = y + torch.randn_like(y) * self.scale
        return self.head(y)


class Constants(Base):
    """Constants and shapes of each mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pooled(x)
        factors = torch.tensor([1.0, 2.0, 3.0, 4.0]) if self.training else torch.tensor([4.0, 3.0])
        return self.head(y)[:, : len(factors)] * factors


class Asking(Base):
    """Each mode asks something of sizes: checks of one name with different texts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pooled(x)
        if self.training:
            return self.head(y) if x.shape[2] % 2 == 0 else self.head(y) * 2
        return self.head(y) * 3 if x.shape[2] % 4 == 0 else self.head(y) * 4


class Both(Base):
    """Each mode writes the buffer, and functional norms of other numbers stand in other orders."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pooled(x)
        if self.training:
            self.seen.add_(y.detach().mean(0))
            once = F.batch_norm(y, self.mean, self.var, None, None, self.training, 0.3, 1e-2)
            return self.head(F.batch_norm(once, self.mean, self.var, None, None, self.training, 0.1, 1e-3) + self.seen)
        self.seen.mul_(0.5)
        return self.head(F.batch_norm(y * 2, self.mean, self.var, None, None, self.training, 0.2, 1e-1) * self.seen)


class Ranks(Base):
    """A number in training, a row and all rows in evaluation."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.head(self.pooled(x))
        return y.sum() if self.training else (y[:1], y)


MODELS = (Auxiliary, Detector, Frozen, Functional, Counting, Noisy, Constants, Asking, Both, Ranks)
EXPORTED = tuple(
    type(f"Exported{m.__name__}", (m,), {"exports": True}) for m in (Auxiliary, Functional, Counting, Constants)
)
CASES = [(m, t, True) for m in MODELS for t in (False, True)] + [
    (m, False, False) for m in (Auxiliary, Frozen, Counting)
]
CASES += [(m, True, True) for m in EXPORTED]


def loss_of(result: Any) -> Any:
    found = leaves(result)
    return sum(((t - 1.0) ** 2).mean() for t in found[1:]) + ((found[0] - 1.0) ** 2).mean()


def converted(kind: type[Base], training: bool, given: bool) -> tuple[Base, Any]:
    model = kind().train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = torch2needle.convert(model, example=(X,) if given else None)
    assert net.report.capture.startswith("torch.export") is kind.exports
    assert any("train() and eval() choose" in note for note in net.report.notes), net.report.notes
    assert not any("stays so" in note for note in net.report.notes)
    return model, net


@pytest.mark.parametrize(("kind", "training", "given"), CASES)
def test_modes_have_graphs_of_their_own(kind: type[Base], training: bool, given: bool, tmp_path: Path) -> None:
    """Values, gradients, buffers, copies, files and plans of both modes, however often the net is switched."""
    model, net = converted(kind, training, given)
    ndl.save(net, tmp_path / "net.safetensors")
    nets = {"net": net, "fused": operator_fusion.fuse(net), "copy": copy.deepcopy(net)}
    nets["loaded"] = ndl.load(tmp_path / "net.safetensors")
    nets["fused copy"] = copy.deepcopy(nets["fused"])
    assert nets["loaded"].training is training
    for name, ours in nets.items():
        if name == "fused":  # which has the parameters of the net
            ours.load_state_dict(model.state_dict())
        theirs = copy.deepcopy(model)
        for mode in (not training, training, training, not training, False, True):
            theirs.train(mode), ours.train(mode)
            given_x, taken = X.clone().requires_grad_(), ndl.Tensor(X.numpy(), requires_grad=True)
            want, got = theirs(given_x), ours(taken)
            close(got, want, 1e-4)
            theirs.zero_grad(), ours.reset_grad()
            loss_of(want).backward(), loss_of(got).backward()
            grads = [(taken.grad, given_x.grad)]
            grads += [(p.grad, dict(theirs.named_parameters())[n].grad) for n, p in ours.named_parameters()]
            for got, want in grads:
                close(got, want, 1e-2) if want is not None else None
                assert want is not None or got is None or not np.any(got.numpy())
            for n, t in theirs.state_dict().items():
                close(ours.state_dict()[n], t, 1e-4)


@pytest.mark.parametrize("kind", [*MODELS, *EXPORTED])
@pytest.mark.parametrize("fused", [False, True])
def test_training_and_evaluation_in_turns(kind: type[Base], fused: bool) -> None:
    """Compiled steps train by the graph of training, executables evaluate by the other, and each sees what the other left."""
    model, net = converted(kind, True, True)
    ours = operator_fusion.fuse(net) if fused else net
    with pytest.raises(ValueError, match=r"training mode"):
        ndl.compile(ours, (X,))
    optimizer = ndl.optim.SGD(ours.parameters(), lr=0.05)
    theirs = torch.optim.SGD(model.parameters(), lr=0.05)
    step = ndl.compile_step(ours, lambda out, _: loss_of(out), optimizer, (X, X[:, 0]))
    executable = ndl.compile(ours.eval(), (X,))
    for _, n in itertools.product(range(2), (4, 3)):
        ours.train(), model.train()
        for _ in range(2):
            theirs.zero_grad()
            want = loss_of(model(X))
            want.backward()
            theirs.step()
            close(step(X, X[:, 0]), want, 1e-4)
        with pytest.raises(ValueError, match=r"training mode"):
            executable(X[: n - 1])
        ours.eval(), model.eval()
        for exe in (executable, ours):
            close(exe(X[:n]), model(X[:n]), 1e-4)


def test_exports_are_of_the_mode(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model, net = converted(Detector, True, True)
    net.eval()
    ndl.to_onnx(net, tmp_path / "net.onnx", X)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    made = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    want = model.eval()(X)
    for a, b in zip(made, want.values(), strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=1e-5)


class ByHand(ndl.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = ndl.nn.Linear(8, 8), ndl.nn.Dropout(0.0), ndl.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.drop(ndl.ops.relu(self.body(x)))
        return (self.head(y), y) if self.training else self.head(y)


@pytest.mark.parametrize("training", [False, True])
def test_nets_by_hand(training: bool, tmp_path: Path) -> None:
    own = ByHand().train(training)
    x = ndl.Tensor(np.random.default_rng(0).standard_normal((2, 8)).astype("float32"))
    ndl.save(own, tmp_path / "net.safetensors")
    for made in (operator_fusion.fuse(own), ndl.load(tmp_path / "net.safetensors")):
        for mode in (training, not training, training):
            own.train(mode), made.train(mode)
            close(made(x), own(x), 1e-6)
    own.train(), own.head.eval()
    with pytest.raises(ndl.Unsupported, match="call train\\(\\) or eval\\(\\) of the whole"):
        operator_fusion.fuse(own)
