"""Optimizers: five steps against torch (its own rule) and against the course's formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle import autograd, nn, optim

BACKENDS = [pytest.param(ndl.cpu_numpy(), id="numpy"), pytest.param(ndl.cpu(), id="cpu")]

PAIRS: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.1), lambda p: optim.SGD(p, 0.1, rule="torch")),
    "sgd_momentum": (
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.3, 0.01),
        lambda p: optim.SGD(p, 0.1, 0.9, weight_decay=0.01, dampening=0.3, rule="torch"),
    ),
    "sgd_nesterov": (
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
        lambda p: optim.SGD(p, 0.1, 0.9, nesterov=True, rule="torch"),
    ),
    "adam": (
        lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.95), 1e-6, 0.1),
        lambda p: optim.Adam(p, 0.02, 0.8, 0.95, 1e-6, 0.1),
    ),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1), lambda p: optim.AdamW(p, 0.02, weight_decay=0.1)),
}

SHAPES = [(3, 5), (7,), (37, 11)]


def parameters(device: Any) -> list[nn.Parameter]:
    return [nn.Parameter(np.random.randn(*s).astype("float32"), device=device) for s in SHAPES]


def give_gradients(params: list[nn.Parameter], device: Any) -> list[np.ndarray]:
    grads = [np.random.randn(*p.shape).astype("float32") for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = ndl.Tensor(g, device=device, requires_grad=False)
    return grads


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", PAIRS)
def test_five_steps_agree_with_torch(name: str, device: Any) -> None:
    ours = parameters(device)
    theirs = [torch.tensor(p.numpy(), requires_grad=True) for p in ours]
    make_theirs, make_ours = PAIRS[name]
    a, b = make_ours(ours), make_theirs(theirs)
    for _ in range(5):
        for t, g in zip(theirs, give_gradients(ours, device), strict=True):
            t.grad = torch.tensor(g)
        a.step(), b.step()
    for p, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), t.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("device", BACKENDS)
def test_needle_sgd_is_dampened(device: Any) -> None:
    params = parameters(device)
    want, u = [p.numpy().astype("float64") for p in params], [0.0] * len(params)
    opt = optim.SGD(params, 0.1, momentum=0.8, weight_decay=0.02)
    for _ in range(5):
        for i, g in enumerate(give_gradients(params, device)):
            u[i] = 0.8 * u[i] + 0.2 * (g + 0.02 * want[i])
            want[i] = want[i] - 0.1 * u[i]
        opt.step()
    for p, w in zip(params, want, strict=True):
        np.testing.assert_allclose(p.numpy(), w, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("make", [optim.SGD, optim.Adam])
def test_step_leaves_gradients_and_tensor_count(make: Any, device: Any) -> None:
    params = parameters(device)
    opt = make(params, 0.1)
    grads = give_gradients(params, device)
    opt.step()
    before = autograd.TENSOR_COUNTER
    for _ in range(3):
        opt.step()
    assert autograd.TENSOR_COUNTER == before
    for p, g in zip(params, grads, strict=True):
        np.testing.assert_array_equal(p.grad.numpy(), g)
    opt.reset_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("device", BACKENDS)
def test_clip_grad_norm(device: Any) -> None:
    params = parameters(device)
    grads = give_gradients(params, device)
    norm = np.sqrt(sum((g.astype("float64") ** 2).sum() for g in grads))
    assert optim.clip_grad_norm(params, 1.0) == pytest.approx(norm, rel=1e-5)
    for p, g in zip(params, grads, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), g / norm, rtol=1e-4)


def test_named_parameters_and_closures() -> None:
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), np.ones((2, 4), "float32")
    plain, named = ndl.optim.SGD(net.parameters(), lr=0.01), ndl.optim.SGD(net.named_parameters(), lr=0.01)
    assert [id(p) for p in named.params] == [id(p) for p in plain.params]
    groups = ndl.optim.SGD([{"params": net[0].named_parameters()}, {"params": net[1].parameters(), "lr": 1.0}], lr=0.01)
    assert [len(g["params"]) for g in groups.param_groups] == [2, 2]

    def closure() -> ndl.Tensor:
        named.zero_grad()
        loss = (net(ndl.Tensor(x)) ** 2).sum()
        loss.backward()
        return loss

    losses = [named.step(closure).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert named.step() is None
