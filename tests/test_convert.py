"""Conversion rules, one sample each, and the cases that other converters get wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from conversion import Calls, close, converts  # noqa: E402
from gpu_devices import everywhere  # noqa: E402
from torch2needle.models import randomize  # noqa: E402
from torch2needle.rules import registry  # noqa: E402

IMAGE, MATRIX = (2, 4, 9, 7), (3, 8)
MODULES: list[tuple[Callable, tuple[int, ...]]] = [
    (lambda: nn.Linear(8, 5), MATRIX),
    (lambda: nn.Linear(8, 5, bias=False), (2, 3, 8)),
    (nn.Identity, MATRIX),
    (nn.Flatten, IMAGE),
]


@everywhere
@pytest.mark.parametrize(
    ("make", "shape"), MODULES, ids=[f"{i}-{type(m()).__name__}" for i, (m, _) in enumerate(MODULES)]
)
def test_module_rule(make: Callable, shape: tuple[int, ...]) -> None:
    converts(nn.Sequential(make()), shape)


ADVERSARIAL: dict[str, tuple[Callable, list[Callable]]] = {
    "conv used twice": (lambda x, c, b: c(x) + b(c(x)), [lambda: nn.Conv2d(4, 4, 1), lambda: nn.BatchNorm2d(4)]),
    "conv read twice": (
        lambda x, c, b: (lambda y: y + b(y))(c(x)),
        [lambda: nn.Conv2d(4, 4, 1), lambda: nn.BatchNorm2d(4)],
    ),
    "relu_ before skip": (lambda x, c: (lambda y: (F.relu_(y), y + x)[1])(c(x)), [lambda: nn.Conv2d(4, 4, 1)]),
    "inplace module": (
        lambda x, c, r: (lambda y: (r(y), y + x)[1])(c(x)),
        [lambda: nn.Conv2d(4, 4, 1), lambda: nn.ReLU(True)],
    ),
    "inplace keyword": (lambda x: (lambda y: (F.relu(y, inplace=True), y)[1])(x * 2), []),
    "add_ seen by a view": (lambda x: (lambda y: (lambda v: (y.add_(1), v + 0)[1])(y.view(2, -1)))(x * 2), []),
    "output is input": (lambda x: x, []),
}


@everywhere
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial(name: str) -> None:
    f, children = ADVERSARIAL[name]
    converts(Calls(f, *(c() for c in children)), IMAGE)


@everywhere
def test_iadd_changes_the_alias() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y
        z += 1
        return y

    converts(Calls(f), MATRIX)


def test_write_through_what_may_be_a_copy_is_refused() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.reshape(-1).add_(1)
        return y

    with pytest.raises(torch2needle.Unsupported, match="through a view"):
        torch2needle.convert(Calls(f))


@everywhere
def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    net = converts(model, MATRIX)
    assert len(net.parameters()) == 3


class Functional(nn.Module):
    """BatchNorm and dropout as functions of the module's own flag and tensors, under names that begin with underscores."""

    def __init__(self) -> None:
        super().__init__()
        self._scale = nn.Parameter(torch.ones(4))
        self.register_buffer("_mean", torch.zeros(4))
        self.register_buffer("_var", torch.ones(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        y = F.batch_norm(x, self._mean, self._var, self._scale, None, self.training, 0.2)
        y = F.dropout(y, 0.0 if mask is None else 0.5, self.training)
        return {"y": y, "pair": (x, None), "scale": self._scale * 2}


def test_functional_flags_inputs_and_outputs() -> None:
    model = Functional()
    net = torch2needle.convert(randomize(model))
    assert any("batch_norm" in t for t in net.report.follows_mode)
    for mode in (False, True):
        model.train(mode), net.train(mode)
        x = torch.randn(IMAGE)
        ours, theirs = net(x), model(x)
        close(ours["y"], theirs["y"])
        close(ours["scale"], theirs["scale"])
        close(ours["pair"][0], x)
        assert ours["pair"][1] is None
        close(net.state_dict()["_mean"], model._mean)
    assert net.input_names == ["x"]
    twin = copy.deepcopy(net)
    close(twin(x)["y"], model(x)["y"])


def test_gradients() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(True), nn.Flatten(), nn.Linear(120, 3))
    net = torch2needle.convert(randomize(model))
    x = torch.randn(IMAGE)
    (model(x) ** 2).sum().backward()
    y = net(x)
    (y * y).sum().backward()
    for (name, p), q in zip(model.named_parameters(), net.parameters(), strict=True):
        assert np.abs(q.grad.numpy() - p.grad.numpy()).max() < 1e-4 * max(1.0, float(p.grad.abs().max())), name


@pytest.mark.usefixtures("without_rules")
def test_the_error_lists_everything() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(2, return_indices=True)
            self.table = nn.Embedding(3, 3, max_norm=1.0)

        def forward(self, x: torch.Tensor) -> Any:
            return torch.igamma(self.pool(x)[0], x) + self.table(x) + torch.relu(x).renorm(2, 0, 1.0)

    with pytest.raises(torch2needle.ConversionError) as e:
        torch2needle.convert(Bad())
    text = str(e.value)
    for part in (
        "torch.igamma",
        "torch.nn.Embedding",
        "torch.Tensor.renorm",
        "test_convert.py:",
        "@torch2needle.rule",
    ):
        assert part in text, part
    report = torch2needle.check(Bad())
    assert not report.ok and len(report.unsupported) == 3
    assert torch2needle.check(nn.Sequential(nn.ReLU())).ok


def test_control_flow_names_the_line() -> None:
    with pytest.raises(torch2needle.ConversionError, match=r"control flow .*|test_convert.py"):
        torch2needle.convert(Calls(lambda x: x if x.sum() > 0 else -x))


def test_duplicate_rules_are_errors() -> None:
    with pytest.raises(ValueError, match="has a rule already"):
        registry.rule(torch.relu)(lambda input: input)


def test_torch_model_is_untouched() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model[1].eval()
    before = [(n, m.training) for n, m in model.named_modules()]
    net = torch2needle.convert(model)
    assert [(n, m.training) for n, m in model.named_modules()] == before
    assert [m.training for m in net.modules()] == [t for _, t in before]


def test_share_uses_torch_memory() -> None:
    model = nn.Sequential(nn.Linear(8, 5))
    net = torch2needle.convert(model, share=True)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert (net.state_dict()["0.weight"].numpy() == 0.5).all()
