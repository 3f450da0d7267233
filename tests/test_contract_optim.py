"""Optimizers over twenty steps against torch, schedules against torch's, clipping, and state that can be saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle import autograd, nn, optim

BACKENDS = [pytest.param(ndl.cpu_numpy(), id="numpy"), pytest.param(ndl.cpu(), id="cpu")]
SHAPES = [(3, 5), (7,), (17, 11), ()]
STEPS = 20

PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sgd": (
        lambda p: torch.optim.SGD(p, 0.05, 0.9, 0.2, 0.01),
        lambda p: optim.SGD(p, 0.05, 0.9, weight_decay=0.01, dampening=0.2, rule="torch"),
    ),
    "sgd_nesterov": (
        lambda p: torch.optim.SGD(p, 0.05, 0.8, weight_decay=0.1, nesterov=True),
        lambda p: optim.SGD(p, 0.05, 0.8, weight_decay=0.1, nesterov=True, rule="torch"),
    ),
    "sgd_plain": (lambda p: torch.optim.SGD(p, 0.1), lambda p: optim.SGD(p, 0.1)),
    "adam": (
        lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.95), 1e-6, 0.1),
        lambda p: optim.Adam(p, 0.02, 0.8, 0.95, 1e-6, 0.1),
    ),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1), lambda p: optim.AdamW(p, 0.02, weight_decay=0.1)),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 0.01), lambda p: optim.RMSprop(p, 0.01)),
    "rmsprop_momentum": (
        lambda p: torch.optim.RMSprop(p, 0.01, 0.9, 1e-6, 0.1, 0.8),
        lambda p: optim.RMSprop(p, 0.01, 0.9, 1e-6, 0.1, 0.8),
    ),
    "rmsprop_centered": (
        lambda p: torch.optim.RMSprop(p, 0.01, 0.9, momentum=0.5, centered=True),
        lambda p: optim.RMSprop(p, 0.01, 0.9, momentum=0.5, centered=True),
    ),
}
MAKERS = {name: ours for name, (_, ours) in PAIRS.items()} | {"needle_sgd": lambda p: optim.SGD(p, 0.1, 0.9, 0.01)}


def parameters(device: Any) -> list[nn.Parameter]:
    return [nn.Parameter(np.asarray(np.random.randn(*s), dtype="float32"), device=device) for s in SHAPES]


def give_gradients(params: list[nn.Parameter]) -> list[np.ndarray]:
    grads = [np.asarray(np.random.randn(*p.shape), dtype="float32") for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = ndl.Tensor(g, device=p.device, requires_grad=False)
    return grads


def values(params: list[nn.Parameter]) -> list[np.ndarray]:
    return [p.numpy() for p in params]


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", PAIRS)
def test_twenty_steps_agree_with_torch(name: str, device: Any) -> None:
    ours = parameters(device)
    theirs = [torch.tensor(p.numpy(), requires_grad=True) for p in ours]
    make_theirs, make_ours = PAIRS[name]
    a, b = make_ours(ours), make_theirs(theirs)
    for _ in range(STEPS):
        for t, g in zip(theirs, give_gradients(ours), strict=True):
            t.grad = torch.tensor(g)
        a.step()
        b.step()
    for p, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), t.detach().numpy(), rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", ["needle_sgd", "adam"])
def test_twenty_steps_of_the_courses_rules(name: str, device: Any) -> None:
    params = parameters(device)
    want = [p.numpy().astype("float64") for p in params]
    first, second = [np.zeros_like(w) for w in want], [np.zeros_like(w) for w in want]
    opt = MAKERS[name](params)
    for t in range(1, STEPS + 1):
        for i, gradient in enumerate(give_gradients(params)):
            g = gradient + opt.weight_decay * want[i]
            if name == "needle_sgd":
                first[i] = 0.9 * first[i] + (1 - 0.9) * g
                want[i] = want[i] - 0.1 * first[i]
                continue
            first[i] = 0.8 * first[i] + 0.2 * g
            second[i] = 0.95 * second[i] + 0.05 * g**2
            m, v = first[i] / (1 - 0.8**t), second[i] / (1 - 0.95**t)
            want[i] = want[i] - 0.02 * m / (np.sqrt(v) + 1e-6)
        opt.step()
    for p, w in zip(params, want, strict=True):
        np.testing.assert_allclose(p.numpy(), w, rtol=5e-5, atol=5e-6)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", MAKERS)
def test_steps_count_no_tensors_and_leave_gradients(name: str, device: Any) -> None:
    params = parameters(device)
    opt = MAKERS[name](params)
    grads = give_gradients(params)
    opt.step()
    before = autograd.TENSOR_COUNTER
    for _ in range(5):
        opt.step()
    assert autograd.TENSOR_COUNTER == before
    equal([p.grad.numpy() for p in params if p.grad is not None], grads)
    opt.clip_grad_norm(0.1)
    assert autograd.TENSOR_COUNTER == before
    opt.reset_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_without_a_gradient_stay(name: str) -> None:
    params = parameters(ndl.default_device())
    give_gradients(params)
    params[1].grad = None
    before = values(params)
    MAKERS[name](params).step()
    moved = [not np.array_equal(a, b) for a, b in zip(before, values(params), strict=True)]
    assert moved == [True, False, True, True]


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_state_goes_on_bit_for_bit(name: str, device: Any) -> None:
    params = parameters(device)
    opt = MAKERS[name](params)
    opt.lr = 0.03
    for _ in range(3):
        give_gradients(params)
        opt.step()
    state, copies = opt.state_dict(), [nn.Parameter(v, device=device) for v in values(params)]
    kept = [a.copy() for slots in state["state"].values() for a in slots.values()]
    other = MAKERS[name](copies)
    other.load_state_dict(state)
    assert other.lr == 0.03
    for _ in range(3):
        grads = give_gradients(params)
        for p, g in zip(copies, grads, strict=True):
            p.grad = ndl.Tensor(g, device=device)
        opt.step()
        other.step()
    equal(values(params), values(copies))
    equal(kept, [a for slots in state["state"].values() for a in slots.values()])


def change(state: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value
    return state


BAD_STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "kind": (lambda s: change(s, "kind", value="SGD"), "got SGD"),
    "options": (lambda s: change(s, "options", value={}), r"got \(\)"),
    "place": (lambda s: change(s, "state", 9, value=s["state"][0]), "4 parameters, got number 9"),
    "slots": (lambda s: change(s, "state", 0, value={}), r"got \(\)"),
    "shape": (lambda s: change(s, "state", 0, "mean", value=np.zeros(3)), r"expects shape \(3, 5\), got \(3,\)"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_does_not_fit_changes_nothing(name: str) -> None:
    params = parameters(ndl.default_device())
    opt = optim.Adam(params, 0.1)
    give_gradients(params)
    opt.step()
    spoil, text = BAD_STATES[name]
    state = opt.state_dict()
    state["options"]["lr"] = 7.0
    spoil(state)
    with pytest.raises(ValueError, match=rf"^\[Adam\] .*{text}.*\.$"):
        opt.load_state_dict(state)
    assert opt.lr == 0.1 and opt.t == 1


def test_bad_arguments() -> None:
    for make in (
        lambda: optim.SGD([], rule="other"),
        lambda: optim.SGD([], nesterov=True),
        lambda: optim.OneCycleLR(optim.SGD([]), 0.1, 10, anneal_strategy="cube"),
        lambda: optim.SequentialLR(optim.SGD([]), [], [1]),
    ):
        with pytest.raises(ValueError, match=r"^\[\w+\] .*\.$"):
            make()


# -- schedules -------------------------------------------------------------------------------------------------------

T, O = torch.optim.lr_scheduler, optim
SCHEDULES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "step": (lambda o: T.StepLR(o, 4, 0.5), lambda o: O.StepLR(o, 4, 0.5)),
    "multi_step": (lambda o: T.MultiStepLR(o, [3, 9, 9], 0.3), lambda o: O.MultiStepLR(o, [9, 3, 9], 0.3)),
    "exponential": (lambda o: T.ExponentialLR(o, 0.9), lambda o: O.ExponentialLR(o, 0.9)),
    "cosine": (lambda o: T.CosineAnnealingLR(o, 12, 0.01), lambda o: O.CosineAnnealingLR(o, 12, 0.01)),
    "linear": (lambda o: T.LinearLR(o, 0.1, 0.9, 7), lambda o: O.LinearLR(o, 0.1, 0.9, 7)),
    "one_cycle": (
        lambda o: T.OneCycleLR(o, 0.5, 30, cycle_momentum=False),
        lambda o: O.OneCycleLR(o, 0.5, 30),
    ),
    "one_cycle_linear": (
        lambda o: T.OneCycleLR(o, 0.5, 30, None, None, 0.2, "linear", False, div_factor=10, final_div_factor=100),
        lambda o: O.OneCycleLR(o, 0.5, 30, None, None, 0.2, "linear", False, div_factor=10, final_div_factor=100),
    ),
    "one_cycle_three_phases": (
        lambda o: T.OneCycleLR(o, 0.5, 31, pct_start=0.4, cycle_momentum=False, three_phase=True),
        lambda o: O.OneCycleLR(o, 0.5, 31, pct_start=0.4, three_phase=True),
    ),
    "warm_up_then_cosine": (
        lambda o: T.SequentialLR(o, [T.LinearLR(o, 0.1, 1.0, 5), T.CosineAnnealingLR(o, 25)], [5]),
        lambda o: O.SequentialLR(o, [O.LinearLR(o, 0.1, 1.0, 5), O.CosineAnnealingLR(o, 25)], [5]),
    ),
}


@pytest.mark.filterwarnings("ignore:.*scheduler.*")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_agree_with_torch(name: str) -> None:
    ours = optim.SGD(parameters(ndl.default_device()), 0.2)
    theirs = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.2)
    make_theirs, make_ours = SCHEDULES[name]
    b, a = make_theirs(theirs), make_ours(ours)
    rates = []
    for _ in range(30):
        assert type(ours.lr) is float
        assert ours.lr == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-9, abs=1e-12)
        rates.append(ours.lr)
        theirs.step(), a.step(), b.step()
    assert len(set(rates)) > 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loaded_schedule_goes_on(name: str) -> None:
    make = SCHEDULES[name][1]
    opt = optim.SGD([], 0.2)
    schedule = make(opt)
    for _ in range(8):
        schedule.step()
    again = optim.SGD([], 3.0)
    resumed = make(again)
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(12):
        assert again.lr == opt.lr
        schedule.step(), resumed.step()
    with pytest.raises(ValueError, match="got Other"):
        resumed.load_state_dict({"kind": "Other", "epoch": 0, "base_lr": 0.1})


# -- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clip_grad_norm(limit: float, order: float, device: Any) -> None:
    params = parameters(device)
    grads = give_gradients(params)
    held = [p.grad for p in params]
    theirs = [torch.zeros(s, requires_grad=True) for s in SHAPES]
    for t, g in zip(theirs, grads, strict=True):
        t.grad = torch.tensor(g)
    want = torch.nn.utils.clip_grad_norm_(theirs, limit, order)
    assert optim.clip_grad_norm(params, limit, order) == pytest.approx(want.item(), rel=1e-5)
    for p, t in zip(params, theirs, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), t.grad.numpy(), rtol=1e-5)
    equal([h.numpy() for h in held], grads)


@pytest.mark.parametrize("device", BACKENDS)
def test_clip_grad_norm_of_an_infinite_gradient_shows(device: Any) -> None:
    params = parameters(device)
    give_gradients(params)
    params[1].grad = ndl.Tensor(np.full(7, np.nan, "float32"), device=device)
    assert math.isnan(optim.clip_grad_norm(params, 1.0))
    assert all(np.isnan(p.grad.numpy()).all() for p in params if p.grad is not None)


@pytest.mark.parametrize("device", BACKENDS)
def test_the_optimizer_clips_its_own(device: Any) -> None:
    params = parameters(device)
    grads = give_gradients(params)
    norm = math.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in grads))
    assert optim.SGD(params).clip_grad_norm(max_norm=0.25) == pytest.approx(norm, rel=1e-6)
    for p, g in zip(params, grads, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), g * 0.25 / norm, rtol=1e-4)


@pytest.mark.parametrize("device", BACKENDS)
def test_clip_grad_value(device: Any) -> None:
    params = parameters(device)
    grads = give_gradients(params)
    params[2].grad = None
    held = params[0].grad
    optim.clip_grad_value(params, 0.3)
    for i in (0, 1, 3):
        np.testing.assert_allclose(params[i].grad.numpy(), grads[i].clip(-0.3, 0.3), rtol=1e-6)
    assert params[2].grad is None
    np.testing.assert_array_equal(held.numpy(), grads[0])


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_is_one_kernel_call_for_all_parameters_of_a_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(ndl.cpu())
    params += [
        nn.Parameter(np.random.randn(n), device=ndl.cpu(), dtype=d) for n, d in ((3000, "float64"), (70000, "float32"))
    ]
    opt, calls = MAKERS[name](params), []
    alone = [nn.Parameter(p, device=p.device, dtype=p.dtype) for p in params]
    singly = [MAKERS[name]([p]) for p in alone]
    run = optim.base.call_groups
    monkeypatch.setattr(optim.base, "call_groups", lambda *args, **attrs: (calls.append(args[0]), run(*args, **attrs)))
    for _ in range(3):
        give_gradients(params)
        for p, q, single in zip(params, alone, singly, strict=True):
            p.grad = ndl.Tensor(p.grad, device=p.device, dtype=p.dtype, requires_grad=False)
            q.grad = ndl.Tensor(p.grad, device=p.device, dtype=p.dtype, requires_grad=False)
            single.step()
        calls.clear()
        opt.step()
        assert len(calls) == 2
    equal(values(params), values(alone))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_gradient_of_another_shape_is_an_error(name: str, device: Any) -> None:
    params = parameters(device)
    give_gradients(params)
    params[1].grad = ndl.Tensor(np.ones(3, "float32"), device=device)
    before = values(params)
    with pytest.raises(ValueError, match=r"gradient of parameter 1 expects shape \(7,\), got \(3,\)"):
        MAKERS[name](params).step()
    equal(before, values(params))


@pytest.mark.parametrize("device", BACKENDS)
def test_a_parameter_given_twice_is_stepped_twice(device: Any) -> None:
    (p,) = parameters(device)[:1]
    before = p.numpy()
    (grad,) = give_gradients([p])
    optim.SGD([p, p], 0.5).step()
    np.testing.assert_allclose(p.numpy(), before - grad, rtol=1e-6, atol=1e-6)


def test_gradients_of_any_strides() -> None:
    p = nn.Parameter(np.zeros((5, 3), "float32"), device=ndl.cpu())
    grad = np.random.randn(3, 5).astype("float32")
    p.grad = ndl.Tensor(grad, requires_grad=False, device=ndl.cpu()).transpose().detach()
    optim.SGD([p], 1.0).step()
    np.testing.assert_array_equal(p.numpy(), -grad.T)
