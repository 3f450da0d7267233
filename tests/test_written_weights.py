"""Weights that a forward writes: masks, max-norm constraints, momentum encoders; values, training and files as torch's."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, gradients_agree, saved_and_loaded  # noqa: E402
from gpu_devices import compiles  # noqa: E402

SETTLING = (
    "data",
    "mul_",
    "no_grad",
    "copy_",
    "renorm_",
    "swap",
    "constrained",
    "row",
)  # a second call changes nothing
CHANGING = ("half", "added")


class Masked(nn.Conv2d):
    """PixelCNN's (van den Oord et al., arXiv 1601.06759)."""

    def __init__(self, way: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.way = way
        self.register_buffer("mask", torch.ones_like(self.weight))
        self.mask[:, :, 1, 2:] = 0
        self.mask[:, :, 2:] = 0

    def forward(self, x: Any) -> Any:
        if self.way == "data":
            self.weight.data *= self.mask
        elif self.way == "mul_":
            self.weight.data.mul_(self.mask)
        elif self.way == "no_grad":
            with torch.no_grad():
                self.weight.mul_(self.mask)
        elif self.way == "copy_":
            with torch.no_grad():
                self.weight.copy_(self.weight * self.mask)
        elif self.way == "renorm_":
            with torch.no_grad():
                self.weight.renorm_(2, 0, 1.0)
        elif self.way == "half":
            self.weight.data *= self.mask * 0.5
        elif self.way == "added":
            with torch.no_grad():
                self.weight.add_(0.01)
        elif self.way == "row":
            self.weight.data[:, :, 0] = 0.0
        elif self.way == "constrained":  # of EEGNet (Lawhern et al., arXiv 1611.08024)
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        else:
            self.weight.data = self.weight.data * self.mask
        return super().forward(x)


def masked(way: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Masked(way, 1, 3, 3, padding=1), nn.ReLU(), Masked(way, 3, 1, 3, padding=1)).eval()


def states_agree(net: Any, model: nn.Module, tolerance: float = 1e-5) -> None:
    state = net.state_dict()
    for name, value in model.state_dict().items():
        close(state[name], value, tolerance)


@pytest.mark.parametrize("way", SETTLING)
def test_constraints_in_evaluation(way: str) -> None:
    """Plans leave the parameters as they are, and hold the product as weights."""
    model, x = masked(way), torch.randn(2, 1, 6, 5)
    kept = copy.deepcopy(model.state_dict())
    memory = model[0].weight.data_ptr()
    net = torch2needle.convert(model, (x,))
    assert model[0].weight.data_ptr() == memory
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name])
    wider = torch.randn(3, 1, 6, 5)
    want = copy.deepcopy(model)(wider)
    if compiles():
        exe = ndl.compile(net, (x,))
        close(exe(wider), want)
        assert not exe.plan.names.count("copy")
    for made in (net, operator_fusion.fuse(net)):
        with ndl.no_grad():
            close(made(wider), want)
    for name, value in kept.items():
        close(net.state_dict()[name], value, 0)
    saved_and_loaded(net, (x,))
    gradients_agree(copy.deepcopy(model), net, (x,), 1e-5)


@pytest.mark.parametrize("way", CHANGING)
@pytest.mark.parametrize("compiled", [False, True])
def test_changes_in_evaluation(way: str, compiled: bool) -> None:
    model, x = masked(way), torch.randn(2, 1, 6, 5)
    net = torch2needle.convert(model, (x,))
    run = ndl.compile(net, (x,)) if compiled and compiles() else net
    for _ in range(3):
        close(run(x), model(x))
        states_agree(net, model)


def trains(model: nn.Module, *inputs: torch.Tensor, compiled: bool) -> None:
    """Some steps as torch's, of results, parameters and buffers; then evaluation."""
    example = tuple(inputs)
    net = torch2needle.convert(model, example)
    states_agree(net, model)
    y = torch.randn(copy.deepcopy(model)(*inputs).shape)
    theirs = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1, momentum=0.9, weight_decay=0.01)
    ours = ndl.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9, weight_decay=0.01)
    step = ndl.compile_step(net, ndl.ops.mse_loss, ours, (example, y)) if compiled and compiles() else None
    for _ in range(4):
        theirs.zero_grad()
        loss = F.mse_loss(model(*inputs), y)
        loss.backward()
        theirs.step()
        if step is None:
            ours.reset_grad()
            value = ndl.ops.mse_loss(net(*inputs), ndl.Tensor(y.numpy()))
            value.backward()
            ours.step()
        else:
            value = step(example, y)
        assert abs(float(value.detach().numpy()) - float(loss.detach())) < 1e-5
        states_agree(net, model, 1e-4)


@pytest.mark.parametrize("way", SETTLING + CHANGING)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_constraints_in_steps(way: str, compiled: bool, mode: bool) -> None:
    """In evaluation, too, as of a model whose norms are frozen."""
    trains(masked(way).train(mode), torch.randn(2, 1, 6, 5), compiled=compiled)


class Words(nn.Module):
    def __init__(self, norm: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 4, padding_idx=0, max_norm=1.0, norm_type=norm)
        self.bag, self.out = nn.EmbeddingBag(9, 4, max_norm=0.7), nn.Linear(4, 3)

    def forward(self, ids: Any) -> Any:
        rows = F.embedding(ids % 3, self.out.weight.detach() * 3, max_norm=0.5)
        return self.out(self.words(ids).sum(1) + self.bag(ids) + rows.sum(1))


@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_norms_of_the_embeddings_that_are_read(norm: float, compiled: bool) -> None:
    """Other rows stay as long as they are."""
    model = Words(norm)
    ids = torch.tensor([[0, 1, 1], [2, 2, 0]])
    net = torch2needle.convert(copy.deepcopy(model).eval(), (ids,))
    run = ndl.compile(net, (ids,)) if compiled and compiles() else net
    for given in (ids, ids + 1, torch.tensor([[2, 2, 2]])):
        close(run(given), copy.deepcopy(model)(given))
    trains(model, ids, compiled=compiled)


class Twice(nn.Linear):
    def forward(self, x: Any) -> Any:
        self.weight.data = F.normalize(self.weight.data, dim=1)
        with torch.no_grad():
            self.weight[:2].clamp_(min=0.0)
            self.bias.sub_(self.bias.mean())
        return super().forward(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_two_writes_of_a_weight(compiled: bool, mode: bool) -> None:
    torch.manual_seed(4)
    trains(nn.Sequential(Twice(3, 4), nn.Tanh(), Twice(4, 2)).train(mode), torch.randn(5, 3), compiled=compiled)


class Momentum(nn.Module):
    """A teacher that follows its student in the forward (He et al., arXiv 1911.05722)."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)  # which it equals at first
        self.way = way

    @torch.no_grad()
    def follow(self) -> None:
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            if self.way == "data":
                q.data = q.data * 0.9 + p.data * 0.1
            elif self.way == "lerp_":
                q.lerp_(p, 0.1)
            else:
                q.mul_(0.9).add_(p, alpha=0.1)

    def forward(self, x: Any) -> Any:
        if self.way != "always":
            if self.training:
                self.follow()
        else:
            self.follow()
        with torch.no_grad():
            z = self.teacher(x)
        return self.student(x) - z * 2


@pytest.mark.parametrize("way", ["data", "lerp_", "mul_", "always"])
@pytest.mark.parametrize("compiled", [False, True])
def test_momentum_encoders(way: str, compiled: bool) -> None:
    trains(Momentum(way), torch.randn(5, 4), compiled=compiled)


def test_a_teacher_that_moves_in_evaluation() -> None:
    model, x = Momentum("always").eval(), torch.randn(3, 4)
    with torch.no_grad():
        model.student[0].weight.mul_(2)
    net = torch2needle.convert(model, (x,))
    for _ in range(3):
        close(net(x), model(x))
        states_agree(net, model)


def test_tied_weights_are_refused() -> None:
    model = nn.Sequential(Masked("data", 1, 1, 3, padding=1), Masked("data", 1, 1, 3, padding=1)).eval()
    model[1].weight = model[0].weight
    with pytest.raises(torch2needle.ConversionError, match=r"writes 1\.weight in place, which 0\.weight may share"):
        torch2needle.convert(model, (torch.randn(2, 1, 6, 5),))


# -- what the forward does in training alone ---------------------------------------------------------------------------------


class Codebook(nn.Module):
    """Codes that follow what they stand for (van den Oord et al., arXiv 1711.00937); no loop of which torch.fx could trace."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.norm, self.decode = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4)
        self.register_buffer("codes", torch.randn(6, 3))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: Any) -> Any:
        z = self.norm(self.encode(x))
        near, *_ = torch.cdist(z, self.codes).min(-1)[1].unsqueeze(0)
        q = self.codes[near]
        if self.training:
            chosen = F.one_hot(near, 6).to(z.dtype)
            self.counts.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(chosen.t() @ z.detach(), alpha=0.1)
            self.codes.data.copy_(self.sums / self.counts.unsqueeze(1))
        return self.decode(z + (q - z).detach())


@pytest.mark.parametrize("compiled", [False, True])
def test_branches_of_training(compiled: bool) -> None:
    torch.manual_seed(1)
    model, x = Codebook(), torch.randn(7, 4)
    trains(model, x, compiled=compiled)
    net = torch2needle.convert(model.eval(), (x,))
    close(net(x), model(x))


@pytest.mark.parametrize("make", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("compiled", [False, True])
def test_power_iterations(make: Any, compiled: bool) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        model = nn.Sequential(make(nn.Conv2d(2, 3, 3)), nn.ReLU(), nn.Flatten(), make(nn.Linear(12, 2)))
    trains(model, torch.randn(3, 2, 4, 4), compiled=compiled)


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_plan_of_what_counts_writes_once_a_call(kind: str) -> None:
    """Values say how many elements are written: such plans are made by a run, which writes nothing."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            start = torch.arange(12.0).reshape(2, 3, 2) - 5
            if kind == "buffer":
                self.register_buffer("kept", start)
            else:
                self.kept = nn.Parameter(start, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = self.kept.mT
            seen[seen > 2] += 1.0
            torch.relu_(seen)
            return self.kept + x

    model, x = Model().eval(), torch.zeros(1)
    net = torch2needle.convert(copy.deepcopy(model), (x,))
    exe = ndl.compile(net, (x,))
    for _ in range(3):
        assert np.array_equal(exe(x).numpy(), model(x).detach().numpy())
    assert np.array_equal(dict(net.named_tensors())["kept"].numpy(), model.kept.detach().numpy())


class Magnitudes(nn.Module):
    """Weights that training normalises by way of a cast to the dtype that they have, as EDM2 (arXiv 2312.02696)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Any) -> Any:
        weight = self.weight.to(torch.float32)
        if self.training:
            with torch.no_grad():
                weight.copy_(weight / weight.norm(dim=1, keepdim=True))
        return x @ (weight / weight.norm(dim=1, keepdim=True)).t()


class Routed(nn.Module):
    """What a region without gradients casts to the dtype that it has passes gradients outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 4)

    def forward(self, x: Any) -> Any:
        assert x.shape[0] < 50  # which torch.fx cannot follow
        scores = self.router(x)
        with torch.no_grad():
            best = scores.float().exp().argmax(1, keepdim=True)
        return scores.sigmoid().gather(1, best)


@pytest.mark.parametrize("family", [Magnitudes, Routed])
@pytest.mark.parametrize("training", [False, True])
def test_casts_to_the_same_dtype(family: Any, training: bool) -> None:
    model, x = family().train(training), torch.randn(5, 3)
    net = torch2needle.convert(copy.deepcopy(model), (x,))
    for _ in range(2):
        net.reset_grad()
        model.zero_grad()
        theirs, mine = model(x), net(x)
        close(mine, theirs)
        theirs.pow(2).sum().backward()
        (mine * mine).sum().backward()
        for name, p in model.named_parameters():
            close(dict(net.named_parameters())[name], p)
            close(dict(net.named_parameters())[name].grad, p.grad, 1e-5)
