"""Averages of parameters beside torch's, and stopping early."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import needle as ndl
import torch2needle
from needle import nn, optim
from needle.training import EarlyStopping
from test_optimizer_rules import BACKENDS, model

# -- averages ----------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, Any]] = {
    "ema": (lambda net, **o: optim.EMA(net, 0.9, **o), get_ema_multi_avg_fn(0.9)),
    "swa": (optim.SWA, None),
}


def moved(ours: nn.Module, theirs: torch.nn.Module) -> None:
    """Both models with the same other values."""
    state = {k: torch.randn(t.shape) if t.is_floating_point() else t for k, t in theirs.state_dict().items()}
    theirs.load_state_dict(state)
    again = torch2needle.convert(theirs)
    ours.load_state_dict({k: t.numpy() for k, t in again.state_dict().items()})


def equal(ours: nn.Module, theirs: torch.nn.Module) -> None:
    want = torch2needle.convert(theirs).state_dict()
    for name, t in ours.state_dict().items():
        np.testing.assert_allclose(t.numpy(), want[name].numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_averages_are_torchs(kind: str, use_buffers: bool) -> None:
    make, rule = KINDS[kind]
    theirs = model()
    ours = torch2needle.convert(theirs)
    a = make(ours, use_buffers=use_buffers)
    b = AveragedModel(theirs, multi_avg_fn=rule, use_buffers=use_buffers)
    for step in range(20):
        moved(ours, theirs)
        a.update(), b.update_parameters(theirs)
        if step == 7:
            state = a.state_dict()
            a = make(ours, use_buffers=use_buffers)
            a.load_state_dict(state)
    before = {k: t.numpy() for k, t in ours.state_dict().items()}
    with a.apply() as net:
        assert net is ours
        equal(ours, b.module)
        with pytest.raises(RuntimeError, match="the averages are in the model already"):
            a.apply().__enter__()
        with pytest.raises(RuntimeError, match="update expects the model's own parameters"):
            a.update()
    for name, t in ours.state_dict().items():
        np.testing.assert_array_equal(t.numpy(), before[name])


@pytest.mark.parametrize("device", BACKENDS)
def test_what_is_averaged_keeps_its_kind(device: Any) -> None:
    net = nn.Linear(3, 2, device=device)
    ema = optim.EMA(net, 0.5)
    first = net.weight.numpy()
    ema.update()
    net.weight.data = ndl.Tensor(first + 2, device=device)
    memory = net.weight.cached_data
    ema.update()
    with ema.apply():
        assert net.weight.device == device and net.weight.dtype == "float32"
        np.testing.assert_allclose(net.weight.numpy(), first + 1, rtol=1e-6)
    assert net.weight.cached_data is memory
    with pytest.raises(RuntimeError, match="in the middle"), ema.apply():
        raise RuntimeError("in the middle")
    np.testing.assert_array_equal(net.weight.numpy(), first + 2)
    net.to("float64")
    ema.update()
    with ema.apply():
        assert net.weight.dtype == "float64"


def test_averages_beside_plans() -> None:
    """Plans read the averages inside the block, and a compiled step goes on with its own values after it."""
    np.random.seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt, ema = optim.Adam(net.parameters(), 0.05), optim.EMA(net, 0.9)
    x, y = ndl.Tensor(np.random.randn(16, 4).astype("float32")), ndl.Tensor(np.random.randint(0, 3, 16))
    step = ndl.compile_step(net, nn.SoftmaxLoss(), opt, (x, y))
    plan = ndl.compile(net, (x,))
    for _ in range(5):
        step(x, y)
        ema.update()
    own = plan(x).numpy()
    with ema.apply():
        averaged = plan(x).numpy()
        np.testing.assert_allclose(averaged, net(x).numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(averaged - own).max() > 1e-3
    np.testing.assert_array_equal(plan(x).numpy(), own)
    loss = float(nn.SoftmaxLoss()(net(x), y).numpy())
    assert float(step(x, y).numpy()) == pytest.approx(loss, rel=1e-5)


def test_averages_refuse() -> None:
    net = nn.Linear(3, 2)
    ema = optim.EMA(net)
    state = ema.state_dict()
    with pytest.raises(ValueError, match=r"^\[EMA\] decay expects a number from 0 to 1, got 1\.5\.$"):
        optim.EMA(net, 1.5)
    with pytest.raises(TypeError, match=r"^\[EMA\] expects a needle module, got list\.$"):
        optim.EMA([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^\[SWA\] the state expects to be of this kind, got EMA\.$"):
        optim.SWA(net).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"^\[EMA\] the state expects the model's parameters, got another set: bias\.$"
    ):
        ema.load_state_dict(state | {"values": {"weight": state["values"]["weight"]}})
    with pytest.raises(ValueError, match=r"^\[EMA\] weight expects shape \(3, 2\), got \(2, 3\)\.$"):
        ema.load_state_dict(state | {"values": {**state["values"], "weight": np.ones((2, 3))}})
    net.more = nn.Parameter(np.ones(2))
    with pytest.raises(ValueError, match=r"^\[EMA\] expects the parameters it was made for, got a change of more\.$"):
        ema.update()


# -- stopping early ------------------------------------------------------------------------------------------------------


def test_it_stops_once_nothing_improves_and_the_best_weights_return() -> None:
    net = nn.Linear(2, 2)
    stopping = EarlyStopping(3, model=net)
    answers = []
    for i, loss in enumerate([5.0, 4.0, 4.5, 4.2, 3.0, 3.0, 3.5, 9.0]):
        net.weight.data = ndl.Tensor(np.full((2, 2), i, "float32"))
        answers.append(stopping.step(ndl.Tensor(loss) if i % 2 else loss))
    assert answers == [False] * 7 + [True]
    assert (stopping.best, stopping.best_step, stopping.stopped) == (3.0, 5, True)
    assert (net.weight.numpy() == 4).all()


@pytest.mark.parametrize(
    ("options", "values", "steps"),
    [
        ({"patience": 2}, [1, 1, 1], 3),
        ({"patience": 0}, [1, 0.5, 0.6], 3),
        ({"patience": 1, "min_delta": 0.5}, [3, 2, 1.6], 3),
        ({"patience": 1, "mode": "max"}, [1, 2, 3, 2], 4),
        ({"patience": 2, "mode": "max", "min_delta": 1}, [0, 0.6, 1.2, 1.4, 2.1], 5),
        ({"patience": 2}, [1, float("nan"), float("nan")], 3),
    ],
)
def test_what_counts_as_better(options: dict[str, Any], values: list[float], steps: int) -> None:
    stopping = EarlyStopping(**options)
    assert next(i for i, v in enumerate(values, 1) if stopping.step(v)) == steps


def test_stopping_resumes() -> None:
    net = nn.Linear(2, 2)
    stopping = EarlyStopping(2, model=net)
    for loss in (3.0, 2.0, 2.5):
        stopping.step(loss)
    state = stopping.state_dict()
    json.dumps({k: v for k, v in state.items() if k != "kept"})
    other = copy.deepcopy(net)
    other.weight.data = other.weight.data + 1
    again = EarlyStopping(2, model=other)
    again.load_state_dict(state)
    assert again.step(2.1) and again.best == 2.0
    np.testing.assert_array_equal(other.weight.numpy(), net.weight.numpy())


def test_stopping_refuses() -> None:
    with pytest.raises(
        ValueError, match=r"^\[EarlyStopping\] patience expects a whole number of at least 0, got -1\.$"
    ):
        EarlyStopping(-1)
    with pytest.raises(ValueError, match=r"^\[EarlyStopping\] mode expects min or max, got 'least'\.$"):
        EarlyStopping(mode="least")
