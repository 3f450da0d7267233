"""Schedules and clipping beside torch's, and gradients that add up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
import operator_fusion
import torch2needle
from needle import nn, optim
from test_optimizer_rules import BACKENDS, give, model, twins

# -- schedules -----------------------------------------------------------------------------------------------------------

S = torch.optim.lr_scheduler
EPOCHS = 30
CHAINS: dict[str, tuple[Callable[[Any, Any], list[Any]], int]] = {
    "two-at-once": (lambda s, o: [s.LinearLR(o, 0.2, 1.0, 6), s.ExponentialLR(o, 0.9)], 0),
    "cosine-and-steps": (lambda s, o: [s.CosineAnnealingLR(o, 5, 0.01), s.StepLR(o, 4, 0.5)], 0),
    "by-hand": (lambda s, o: [s.MultiStepLR(o, [0, 3, 9], 0.5)], 6),
    "cosine-by-hand": (lambda s, o: [s.CosineAnnealingLR(o, 5, 0.02)], 5),
    "linear-by-hand": (lambda s, o: [s.LinearLR(o, 0.5, 0.9, 8)], 3),
    "one-cycle-by-hand": (lambda s, o: [s.OneCycleLR(o, 0.4, 15)], 6),
    "one-cycle-of-epochs": (lambda s, o: [s.OneCycleLR(o, max_lr=[0.4, 0.8], epochs=3, steps_per_epoch=5)], 0),
    "one-cycle-warm": (lambda s, o: [s.OneCycleLR(o, 0.4, 15, pct_start=1.0, max_momentum=0.7)], 0),
    "one-cycle-of-three-phases": (
        lambda s, o: [s.OneCycleLR(o, [0.4, 0.2], 30, pct_start=0.4, base_momentum=0.5, three_phase=True)],
        0,
    ),
    "constant": (lambda s, o: [s.ConstantLR(o)], 0),
    "constant-by-hand": (lambda s, o: [s.ConstantLR(o, 0.1, 7)], 3),
    "polynomial": (lambda s, o: [s.PolynomialLR(o, 20, 0.9)], 0),
    "polynomial-by-hand": (lambda s, o: [s.PolynomialLR(o, 12, 2.0)], 5),
    "polynomial-and-constant": (lambda s, o: [s.PolynomialLR(o, 40), s.ConstantLR(o, 0.2, 5)], 0),
    "restarts": (lambda s, o: [s.CosineAnnealingWarmRestarts(o, 4)], 0),
    "longer-restarts": (lambda s, o: [s.CosineAnnealingWarmRestarts(o, 3, 2, 0.01)], 6),
    "lambda": (lambda s, o: [s.LambdaLR(o, lambda epoch: 0.95**epoch)], 4),
    "lambdas": (lambda s, o: [s.LambdaLR(o, [lambda epoch: 1 / (1 + epoch), lambda epoch: 0.5 + epoch % 3])], 0),
    "multiplicative": (lambda s, o: [s.MultiplicativeLR(o, [lambda epoch: 0.9, lambda epoch: 1 + 1 / epoch])], 5),
    "cyclic": (lambda s, o: [s.CyclicLR(o, 0.01, 0.2, 4)], 0),
    "cyclic-halving": (
        lambda s, o: [s.CyclicLR(o, [0.01, 0.1], [0.2, 0.3], 3, 5, "triangular2", base_momentum=0.6)],
        0,
    ),
    "cyclic-fading": (lambda s, o: [s.CyclicLR(o, 0.01, 0.2, 3, 2, "exp_range", 0.9, cycle_momentum=False)], 6),
    "cyclic-scaled": (
        lambda s, o: [s.CyclicLR(o, 0.01, 0.2, 3, scale_fn=lambda i: 1 / (1 + i), scale_mode="iterations")],
        0,
    ),
    "cyclic-after-another": (lambda s, o: [s.PolynomialLR(o, 40), s.CyclicLR(o, 0.01, 0.2, 3)], 0),
    "cyclic-before-another": (lambda s, o: [s.CyclicLR(o, 0.01, 0.2, 3), s.StepLR(o, 4)], 0),
    "restarts-after-another": (lambda s, o: [s.ConstantLR(o), s.CosineAnnealingWarmRestarts(o, 5)], 0),
    "chained": (
        lambda s, o: [s.ChainedScheduler([s.ConstantLR(o, 0.1, 5), s.ExponentialLR(o, 0.9), s.StepLR(o, 6)])],
        7,
    ),
    "constant-then-fading": (
        lambda s, o: [s.SequentialLR(o, [s.ConstantLR(o, 0.1, 8), s.ExponentialLR(o, 0.9)], [6])],
        0,
    ),
    "warm-up-then-restarts": (
        lambda s, o: [
            s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 4), s.CosineAnnealingWarmRestarts(o, 5, 2, 0.02)], [4])
        ],
        0,
    ),
    "warm-up-then-polynomial": (
        lambda s, o: [s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 4), s.PolynomialLR(o, 20, 2.0)], [4])],
        0,
    ),
    "warm-up-by-hand": (
        lambda s, o: [s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 4), s.CosineAnnealingLR(o, 8)], [4])],
        2,
    ),
    "warm-up-of-zero": (
        lambda s, o: [s.SequentialLR(o, [s.ExponentialLR(o, 0.5), s.OneCycleLR(o, 0.3, 14), s.StepLR(o, 2)], [0, 3])],
        0,
    ),
}


@pytest.mark.filterwarnings("ignore:.*scheduler.*")
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("name", CHAINS)
def test_schedules_of_groups_agree_with_torch(name: str, kind: str) -> None:
    ours, theirs = twins(ndl.cpu())
    options = {"momentum": 0.9} if kind == "SGD" else {}
    a, b = (
        getattr(lib, kind)([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1, **options)
        for lib, p in ((optim, ours), (torch.optim, theirs))
    )
    make, changed = CHAINS[name]
    x, y = make(optim, a), make(S, b)
    for epoch in range(14 if "one-cycle-" in name or name == "warm-up-of-zero" else EPOCHS):
        for g, h in zip(a.param_groups, b.param_groups, strict=True):
            assert g["lr"] == pytest.approx(h["lr"], rel=1e-9, abs=1e-14), epoch
            for option in ("momentum", "betas"):
                assert g.get(option, 0.0) == pytest.approx(h.get(option, 0.0), rel=1e-12)
        if epoch == changed and epoch:
            for opt in (a, b):
                opt.param_groups[1]["lr"] *= 0.3
        b.step()
        for schedule in (*x, *y):
            schedule.step()
    state = [schedule.state_dict() for schedule in x]
    again = optim.SGD([{"params": ours[:1], "lr": 5.0}, {"params": ours[1:]}], momentum=0.9) if kind == "SGD" else None
    if again is not None:
        resumed = make(optim, again)
        for schedule, saved in zip(resumed, state, strict=True):
            schedule.load_state_dict(saved)
        assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in a.param_groups]
        for schedule in (*resumed, *x):
            schedule.step()
        assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in a.param_groups]


PLATEAUS: dict[str, dict[str, Any]] = {
    "default": {"patience": 1},
    "best": {"mode": "max", "patience": 0, "factor": 0.5},
    "absolute": {"threshold_mode": "abs", "threshold": 0.2, "patience": 2},
    "absolute-best": {"mode": "max", "threshold_mode": "abs", "threshold": 0.2, "patience": 1, "cooldown": 2},
    "least": {"patience": 0, "factor": 0.3, "min_lr": [0.03, 0.002], "cooldown": 1},
    "unchanged": {"patience": 0, "factor": 0.9, "eps": 0.015},
}


@pytest.mark.parametrize("name", PLATEAUS)
def test_rates_that_follow_a_measure_agree_with_torch(name: str) -> None:
    ours, theirs = twins(ndl.cpu())
    a, b = (
        lib.SGD([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1)
        for lib, p in ((optim, ours), (torch.optim, theirs))
    )
    x, y = optim.ReduceLROnPlateau(a, **PLATEAUS[name]), S.ReduceLROnPlateau(b, **PLATEAUS[name])
    np.random.seed(1)
    for epoch in range(EPOCHS):
        if epoch == 15:
            state, x = x.state_dict(), optim.ReduceLROnPlateau(a, **PLATEAUS[name])
            x.load_state_dict(json.loads(json.dumps(state)))
        measure = float(np.random.randn() - 0.05 * epoch)
        (
            x.step(ndl.Tensor(np.asarray(measure, dtype="float64"), dtype="float64") if epoch % 2 else measure),
            y.step(measure),
        )
        assert x.get_last_lr() == pytest.approx(y.get_last_lr(), rel=1e-12)
        assert x.last_epoch == y.last_epoch
    assert (name == "unchanged") or x.get_last_lr()[0] < 0.2


def test_restarts_between_epochs_agree_with_torch() -> None:
    ours, theirs = twins(ndl.cpu())
    a, b = optim.SGD(ours, 0.1), torch.optim.SGD(theirs, 0.1)
    for mult in (1, 2):
        x, y = optim.CosineAnnealingWarmRestarts(a, 3, mult), S.CosineAnnealingWarmRestarts(b, 3, mult)
        for epoch in [*np.arange(0, 25, 0.3), 7, None, None, 2.5, None, None]:
            x.step(epoch), y.step(epoch)
            assert a.lr == pytest.approx(b.param_groups[0]["lr"], rel=1e-9, abs=1e-12), epoch
        again = optim.CosineAnnealingWarmRestarts(a, 3, mult)
        again.load_state_dict(x.state_dict())
        assert again.epoch == x.epoch and again.last_epoch == y.last_epoch


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "constant": (lambda o: optim.ConstantLR(o, 1.5), r"\[ConstantLR\] factor expects a number from 0 to 1, got 1\.5\."),
    "groups": (lambda o: optim.LambdaLR(o, [float, float]), r"\[LambdaLR\] lr_lambda expects one for each of 1 groups"),
    "mode": (lambda o: optim.CyclicLR(o, 0.1, 0.2, mode="square"), r"\[CyclicLR\] mode expects triangular or"),
    "momentum": (
        lambda o: optim.CyclicLR(optim.Adagrad(o.params), 0.1, 0.2, cycle_momentum=True),
        r"\[CyclicLR\] cycle_momentum expects an optimizer with momentum or betas, got Adagrad\.",
    ),
    "plateau": (lambda o: optim.ReduceLROnPlateau(o, "least"), r"\[ReduceLROnPlateau\] mode expects min or max"),
    "no-schedules": (lambda o: optim.ChainedScheduler([]), r"\[ChainedScheduler\] expects at least one schedule"),
    "measured": (
        lambda o: optim.ChainedScheduler([optim.ReduceLROnPlateau(o)]),
        r"\[ChainedScheduler\] expects schedules that step without a measure, got ReduceLROnPlateau\.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_schedules_refuse(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make(optim.SGD([nn.Parameter(np.ones(2))], 0.1))


def test_a_schedule_that_follows_a_measure_wants_one() -> None:
    with pytest.raises(
        TypeError, match=r"^\[ReduceLROnPlateau\] step expects the measure that it follows, got none\.$"
    ):
        optim.ReduceLROnPlateau(optim.SGD([nn.Parameter(np.ones(2))], 0.1)).step()


def test_the_courses_momentum_does_not_cycle_by_itself() -> None:
    opt = optim.SGD([nn.Parameter(np.ones(2))], 0.1, momentum=0.9)
    optim.OneCycleLR(opt, 0.4, 10).step()
    assert opt.momentum == 0.9


# -- clipping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [None, math.inf, math.nan])
@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, math.inf, -math.inf, "inf"], ids=str)
@pytest.mark.parametrize("place", [0, 2])
def test_clipping_by_any_norm_agrees_with_torch(order: Any, spoilt: float | None, place: int) -> None:
    ours, theirs = twins(ndl.cpu())
    give(ours, theirs)
    if spoilt is not None:
        theirs[place].grad.view(-1)[1] = spoilt
        ours[place].grad = ndl.Tensor(theirs[place].grad.numpy(), device=ndl.cpu())
    want = torch.nn.utils.clip_grad_norm_(theirs, 0.5, order).item()
    assert optim.clip_grad_norm(ours, 0.5, order) == pytest.approx(want, rel=1e-5, nan_ok=True)
    for p, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), t.grad.numpy(), rtol=1e-5, atol=1e-12)


def test_clipping_refuses_what_is_not_finite_if_asked() -> None:
    p = nn.Parameter(np.ones(2))
    assert optim.clip_grad_norm([p], 1.0) == 0.0
    p.grad = ndl.Tensor(np.array([np.inf, 1.0]))
    with pytest.raises(RuntimeError, match=r"\[clip_grad_norm\] expects a finite norm of order 2.0, got inf\."):
        optim.clip_grad_norm(p, 1.0, error_if_nonfinite=True)
    assert p.grad.numpy()[1] == 1.0


# -- gradients that add up -----------------------------------------------------------------------------------------------


def test_gradients_of_batches_add_up_in_parameters() -> None:
    theirs = model().eval()
    net = torch2needle.convert(theirs)
    fused = operator_fusion.fuse(net)
    for number in range(3):
        x = torch.randn(5, 4)
        (theirs(x) ** 2).sum().backward()
        ((net if number else fused)(x) ** 2).sum().backward()
    own = dict(net.named_parameters())
    for name, p in theirs.named_parameters():
        np.testing.assert_allclose(own[name].grad.numpy(), p.grad.numpy(), rtol=1e-5, atol=1e-6)
        assert own[name].grad.op is None  # a sum keeps no batch alive
    net.zero_grad(set_to_none=False), theirs.zero_grad(set_to_none=False)
    assert all(not p.grad.numpy().any() for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in fused.parameters())


def test_a_net_that_was_moved_is_fused_where_it_is() -> None:
    """The gain that a batch norm without one has is a constant of the fused graph."""
    source = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, affine=False))
    fused = operator_fusion.fuse(torch2needle.convert(source).to(ndl.cpu_numpy(), "float64"))
    x = torch.randn(3, 4)
    got = fused(ndl.Tensor(x.numpy(), device=ndl.cpu_numpy(), dtype="float64"))
    np.testing.assert_allclose(got.numpy(), source(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_second_backward_adds_and_plain_tensors_are_set() -> None:
    p, x = nn.Parameter(np.array([2.0, 3.0])), ndl.Tensor(np.array([5.0, 7.0]))
    y = (p * p * x).sum()
    y.backward()
    assert p.grad.op is not None  # differentiable again
    held = p.grad
    y.backward()
    np.testing.assert_allclose(p.grad.numpy(), [40, 84])
    np.testing.assert_allclose(held.numpy(), [20, 42])
    np.testing.assert_allclose(x.grad.numpy(), [4, 9])
    with ndl.no_grad():
        y.backward()
    np.testing.assert_allclose(p.grad.numpy(), [60, 126])
    p.grad = None
    y.backward()
    np.testing.assert_allclose(p.grad.numpy(), [20, 42])


def test_a_tied_parameter_has_one_gradient() -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    theirs[2].weight = theirs[0].weight
    net = torch2needle.convert(theirs)
    for _ in range(2):
        x = torch.randn(3, 4)
        theirs(x).sum().backward(), net(x).sum().backward()
    own = dict(net.named_parameters())
    assert len(net.parameters()) == 3
    np.testing.assert_allclose(own["0.weight"].grad.numpy(), theirs[0].weight.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_does_not_fit_the_held_one_is_refused() -> None:
    p = nn.Parameter(np.ones((2, 3), "float32"))
    p.grad = ndl.Tensor(np.ones((1, 3), "float32"))
    with pytest.raises(ValueError, match=r"\[backward\] expects to add .* got float32 \(1, 3\)"):
        p.sum().backward()


def test_backward_of_what_needs_no_gradient_is_refused() -> None:
    p = nn.Parameter(np.ones(2))
    with ndl.no_grad():
        y = (p * 2).sum()
    for t in (y, p.detach().sum(), ndl.Tensor(np.ones(2), requires_grad=False)):
        with pytest.raises(ValueError, match=r"^\[backward\] expects a result of tensors that need a gradient"):
            t.backward()


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")])
@pytest.mark.parametrize("device", BACKENDS)
def test_gradients_have_the_dtype_of_their_tensor(device: Any, dtypes: tuple[str, str]) -> None:
    a, b = (nn.Parameter(np.ones((2, 2)), device=device, dtype=d) for d in dtypes)
    for y in (a * b, a + b, a - b, a / b, ndl.ops.maximum(a, b), ndl.ops.where(a > 0, a, b)):
        a.grad = b.grad = None
        y.sum().backward()
        assert [t.grad.dtype for t in (a, b) if t.grad is not None] == list(dtypes)
