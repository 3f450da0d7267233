"""Optimizers beside those of the course: Lion against its paper, all of them in groups, resumed, cycled and in compiled steps."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
import torch2needle
from needle import nn, optim
from test_optimizer_rules import BACKENDS, close, give, model, twins

STEPS = 20
OPTIONS: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "Adadelta": {"lr": 0.5, "eps": 1e-3},
    "Adamax": {"lr": 0.02, "weight_decay": 0.1},
    "NAdam": {"lr": 0.02, "weight_decay": 0.1},
    "RAdam": {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True},
    "Lion": {"lr": 0.01, "weight_decay": 0.1},
}
ALL = OPTIONS | {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}, "RMSprop": {"lr": 0.01, "momentum": 0.5}}


def lion(
    w: np.ndarray, m: np.ndarray, g: np.ndarray, lr: float, betas: tuple[float, float], weight_decay: float
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 2 of arXiv 2302.06675."""
    c = betas[0] * m + (1 - betas[0]) * g
    return w - lr * (np.sign(c) + weight_decay * w), betas[1] * m + (1 - betas[1]) * g


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("device", BACKENDS)
def test_lion_is_the_papers(device: Any, dtype: str, maximize: bool) -> None:
    ours, _ = twins(device, dtype)
    groups: list[dict[str, Any]] = [
        {"params": ours[:2], "betas": (0.7, 0.9), "weight_decay": 0.2},
        {"params": ours[2:], "lr": 0.1},
    ]
    opt = optim.Lion(groups, 0.02, maximize=maximize)
    want = [(p.numpy().astype("float64"), np.zeros(p.shape)) for p in ours]
    options = [(0.02, (0.7, 0.9), 0.2)] * 2 + [(0.1, (0.9, 0.99), 0.0)] * 2
    for _ in range(STEPS):
        grads = [np.asarray(np.random.randn(*p.shape)).astype(dtype) for p in ours]
        for p, g in zip(ours, grads, strict=True):
            p.grad = ndl.Tensor(g, device=device, dtype=dtype, requires_grad=False)
        opt.step()
        signed = [g * (-1 if maximize else 1) for g in grads]
        want = [lion(w, m, g, *o) for (w, m), g, o in zip(want, signed, options, strict=True)]
    for p, (w, _) in zip(ours, want, strict=True):
        np.testing.assert_allclose(p.numpy(), w, rtol=1e-5, atol=2e-6)


def test_lion_stands_still_where_nothing_pulls_and_shows_what_is_not_a_number() -> None:
    w = nn.Parameter(np.array([1.0, 2.0, 3.0], dtype="float32"))
    w.grad = ndl.Tensor(np.array([0.0, np.nan, -5.0], dtype="float32"), requires_grad=False)
    optim.Lion([w], 0.5).step()
    np.testing.assert_array_equal(w.numpy(), np.array([1.0, np.nan, 3.5], "float32"))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("kind", [k for k in OPTIONS if k != "Lion"])
def test_groups_step_as_in_torch(kind: str, device: Any) -> None:
    ours, theirs = twins(device)
    a, b = (
        getattr(lib, kind)([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.2}], **OPTIONS[kind])
        for lib, p in ((optim, ours), (torch.optim, theirs))
    )
    for number in range(STEPS):
        give(ours, theirs)
        if number % 3 == 1:
            ours[2].grad = theirs[2].grad = None
        for opt in (a, b):
            opt.param_groups[1]["lr"] = 0.05 / (1 + number)
            opt.step()
    close(ours, theirs)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_loaded_state_goes_on(kind: str, device: Any) -> None:
    make = getattr(optim, kind)
    ours, theirs = twins(device)
    opt = make(ours, **OPTIONS[kind])
    for _ in range(5):
        give(ours, theirs)
        opt.step()
    others = [nn.Parameter(p.numpy(), device=device, dtype=p.dtype) for p in ours]
    again = make(others, rule="torch")
    state = opt.state_dict()
    arrays = state.pop("state")
    again.load_state_dict(json.loads(json.dumps(state)) | {"state": arrays})
    for _ in range(5):
        give(ours, theirs)
        for p, q in zip(ours, others, strict=True):
            q.grad = p.grad
        opt.step(), again.step()
    assert opt.param_groups[0].options() == again.param_groups[0].options()
    for p, q in zip(ours, others, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
    with pytest.raises(ValueError, match=r"state expects arrays"):
        again.load_state_dict(state | {"state": {0: {"other": np.ones(ours[0].shape)}}})


@pytest.mark.parametrize("kind", ["NAdam", "RAdam", "Adamax"])
@pytest.mark.parametrize("device", BACKENDS)
def test_cycled_betas_count_as_in_torch(kind: str, device: Any) -> None:
    ours, theirs = twins(device, "float64")
    a, b = getattr(optim, kind)(ours), getattr(torch.optim, kind)(theirs)
    x, y = optim.OneCycleLR(a, 0.1, STEPS), torch.optim.lr_scheduler.OneCycleLR(b, 0.1, STEPS)
    for number in range(STEPS):
        give(ours, theirs)
        if number % 4 == 1:  # each parameter has its own past
            ours[number % 3].grad = theirs[number % 3].grad = None
        a.step(), b.step(), x.step(), y.step()
    close(ours, theirs, 1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_a_compiled_step_is_the_eager_one(kind: str) -> None:
    source = model()
    nets = [torch2needle.convert(copy.deepcopy(source)).train() for _ in range(2)]
    lists = [list(net.parameters()) for net in nets]
    opts = [
        getattr(optim, kind)([{"params": p[:2]}, {"params": p[2:], "lr": 0.02}], **ALL[kind] | {"maximize": True})
        for p in lists
    ]
    rates = [optim.ExponentialLR(opt, 0.95) for opt in opts]
    np.random.seed(0)
    loss = nn.SoftmaxLoss()
    x, y = np.random.randn(STEPS, 8, 4).astype("float32"), np.random.randint(0, 3, (STEPS, 8))
    step = ndl.compile_step(
        nets[0], lambda out, labels: -loss(out, labels), opts[0], (ndl.Tensor(x[0]), ndl.Tensor(y[0]))
    )
    for i in range(STEPS):
        inputs, labels = ndl.Tensor(x[i], requires_grad=False), ndl.Tensor(y[i], requires_grad=False)
        got = step(inputs, labels)
        opts[1].reset_grad()
        want = -loss(nets[1](inputs), labels)
        want.backward()
        opts[1].step()
        for rate in rates:
            rate.step()
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=2e-4, atol=2e-5)
    for p, q in zip(*lists, strict=True):
        np.testing.assert_allclose(p.numpy(), q.numpy(), rtol=2e-3, atol=2e-4)
    a, b = (opt.state_dict() for opt in opts)
    assert a["options"] == b["options"] and a["step"] == b["step"] == STEPS
    assert {k: sorted(v) for k, v in a["state"].items()} == {k: sorted(v) for k, v in b["state"].items()}
    opts[1].load_state_dict(a)


WRONG: dict[str, tuple[Any, str]] = {
    "rho": (lambda p: optim.Adadelta(p, rho=1.5), r"\[Adadelta\] rho expects a number from 0 to 1, got 1\.5\."),
    "betas": (lambda p: optim.Lion(p, betas=(1.0, 0.9)), r"\[Lion\] betas expects a number in \[0, 1\), got 1\.0\."),
    "lr": (lambda p: optim.Adagrad(p, -1), r"\[Adagrad\] lr expects a number of at least 0, got -1\."),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_are_checked(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(np.ones(2))])


def test_options_that_are_not_known() -> None:
    with pytest.raises(
        TypeError, match=r"^\[Lion\] has no option eps; rule needle has lr, betas, weight_decay, maximize\.$"
    ):
        optim.Lion([nn.Parameter(np.ones(2))], eps=1.0)
