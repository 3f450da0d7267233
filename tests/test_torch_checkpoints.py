"""A training begun in torch goes on in needle, and the other way: weights, and the state of every optimizer that both have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import torch2needle  # noqa: E402

STREAM = np.random.default_rng(0)
BATCHES = [(STREAM.normal(size=(6, 8)).astype("float32"), STREAM.integers(0, 3, 6)) for _ in range(9)]
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD, Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": ("Adam", {"betas": (0.8, 0.99), "weight_decay": 0.01}),
    "Adam, AMSGrad": ("Adam", {"amsgrad": True}),
    "AdamW": ("AdamW", {}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop, all": ("RMSprop", {"momentum": 0.5, "centered": True}),
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "Adadelta": ("Adadelta", {}),
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {"momentum_decay": 0.01}),
    "Rprop": ("Rprop", {}),
    "ASGD": ("ASGD", {"lambd": 0.1, "t0": 4}),
    "Adafactor": ("Adafactor", {"weight_decay": 0.1}),
    "RAdam": ("RAdam", {"weight_decay": 0.01, "decoupled_weight_decay": True}),
}


def net_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))


def groups(model: Any, frozen: bool) -> list[dict[str, Any]]:
    """Two groups with rates of their own; `frozen`: the first weight never moves, so it has no state."""
    named = dict(model.named_parameters())
    if frozen:
        named["0.weight"].requires_grad = False
    first = [p for n, p in named.items() if n.startswith("0.")]
    return [
        {"params": first, "lr": 1e-2},
        {"params": [p for n, p in named.items() if not n.startswith("0.")], "lr": 3e-3},
    ]


def torch_steps(model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def needle_steps(net: Any, optimizer: Any, batches: Any, compiled: bool) -> list[float]:
    step = ndl.compile_step(net, ndl.ops.cross_entropy, optimizer, batches[0]) if compiled else None
    losses = []
    for x, y in batches:
        if step is not None:
            losses.append(float(step(x, y)))
            continue
        optimizer.zero_grad()
        loss = ndl.ops.cross_entropy(net(ndl.Tensor(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_there_and_back(name: str, frozen: bool, compiled: bool) -> None:
    """Three steps in torch, three in needle, three in torch: the losses of nine in torch."""
    kind, options = OPTIMIZERS[name]
    alone = net_of()
    want = torch_steps(alone, getattr(torch.optim, kind)(groups(alone, frozen), lr=1e-3, **options), BATCHES)
    model = net_of()
    optimizer = getattr(torch.optim, kind)(groups(model, frozen), lr=1e-3, **options)
    found = torch_steps(model, optimizer, BATCHES[:3])

    net = torch2needle.convert(model).train()
    ours = getattr(ndl.optim, kind)(groups(net, frozen), lr=0.5)  # its options come with the state
    ours.load_state_dict(optimizer.state_dict())
    found += needle_steps(net, ours, BATCHES[3:6], compiled)

    again = net_of(1)
    again.load_state_dict(torch2needle.to_torch(net))
    optimizer = getattr(torch.optim, kind)(groups(again, frozen), lr=0.5)
    optimizer.load_state_dict(torch2needle.to_torch(ours))
    found += torch_steps(again, optimizer, BATCHES[6:])
    np.testing.assert_allclose(found, want, rtol=2e-5)


def after_a_step(kind: str, **options: Any) -> dict[str, Any]:
    model = net_of()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options)
    torch_steps(model, optimizer, BATCHES[:1])
    return optimizer.state_dict()


def test_of_schedules_and_names() -> None:
    """Rates, and those before a schedule, come with the state; what torch's schedules and names keep in groups goes."""
    model = net_of()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    torch_steps(model, optimizer, BATCHES[:1])
    schedule.step()
    ours = ndl.optim.AdamW(torch2needle.convert(model).parameters())
    ours.load_state_dict(optimizer.state_dict())
    assert ours.lr == optimizer.param_groups[0]["lr"]
    assert (ours.beta1, ours.beta2) == optimizer.param_groups[0]["betas"]
    assert ours.t == 1


def test_of_half_precision() -> None:
    state = after_a_step("Adam")
    for held in state["state"].values():
        held["exp_avg"] = held["exp_avg"].bfloat16()
    ours = ndl.optim.Adam(torch2needle.convert(net_of()).parameters())
    ours.load_state_dict(state)
    np.testing.assert_array_equal(ours.state_dict()["state"][0]["mean"], state["state"][0]["exp_avg"].float())


REFUSALS: list[tuple[str, Callable[[], Any], str]] = [
    ("SGD", lambda: after_a_step("Adam"), r"\[SGD\] the state of torch expects momentum_buffer, got step"),
    ("Adam", lambda: after_a_step("RMSprop"), r"\[Adam\] the state of torch expects step, exp_avg, .* got square_avg"),
    ("Lion", lambda: after_a_step("Adam"), r"\[Lion\] the state of torch expects nothing, got step"),
    (
        "AdamW",
        lambda: {"state": {}, "param_groups": []},
        r"\[AdamW\] the state expects groups of \[6\] parameters, got \[\]",
    ),
]


@pytest.mark.parametrize(("kind", "state", "message"), REFUSALS)
def test_refusals(kind: str, state: Callable[[], Any], message: str) -> None:
    ours = getattr(ndl.optim, kind)(torch2needle.convert(net_of()).parameters())
    before = str(ours.state_dict())
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(state())
    assert str(ours.state_dict()) == before


def test_rules_of_needle_are_refused() -> None:
    ours = ndl.optim.SGD(ndl.nn.Linear(8, 3).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"\[SGD\] the state expects rule needle, got torch"):
        ours.load_state_dict(after_a_step("SGD"))
    with pytest.raises(
        ValueError, match=r"\[SGD\] torch's state expects an optimizer of torch's by its rule, got rule needle"
    ):
        torch2needle.to_torch(ours)


class Tied(nn.Module):
    """Parameters registered in another order than they are used in, one of them twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x)) * self.scale


@pytest.mark.parametrize("given", [False, True], ids=["torch.fx", "example"])
def test_parameters_are_counted_as_in_torch(given: bool) -> None:
    model = Tied()
    net = torch2needle.convert(model, (torch.ones(2, 8),) if given else None)
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_of_a_parameter_of_one_number_and_one_of_none() -> None:
    """Shapes () and (0, 3): their state has these shapes, too, and every digit."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Any) -> Any:
            return (x * self.scale).sum() + self.none.sum()

    model = Odd()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(4)).backward()
    optimizer.step()
    ours = ndl.optim.Adam(torch2needle.convert(model).parameters())
    ours.load_state_dict(optimizer.state_dict())
    found, want = torch2needle.to_torch(ours)["state"], optimizer.state_dict()["state"]
    for number, held in want.items():
        for name, value in held.items():
            assert torch.equal(found[number][name], value)


SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 5]},
    "ConstantLR": {},
    "LinearLR": {"total_iters": 7},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 8, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 8, "eta_min": 1e-3},
    "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda epoch: 1 - 0.01 * epoch},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "ReduceLROnPlateau": {"patience": 1},
}


def made(space: Any, name: str, optimizer: Any, options: dict[str, Any]) -> Any:
    return getattr(getattr(space, "lr_scheduler", space), name)(optimizer, **options)


def rates_of(schedule: Any, steps: range) -> list[list[float]]:
    """The groups' rates after each epoch; those that follow a measure see one that stays."""
    measured = ([1.0],) if type(schedule).__name__ == "ReduceLROnPlateau" else ([],)
    return [schedule.step(*measured[0]) or [g["lr"] for g in schedule.optimizer.param_groups] for _ in steps]


def both(frozen: bool = False) -> tuple[Any, Any]:
    model = net_of()
    net = torch2needle.convert(model)
    return (
        torch.optim.SGD(groups(model, frozen), lr=0.1, momentum=0.9),
        ndl.optim.SGD(groups(net, frozen), lr=0.1, momentum=0.9),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on(name: str) -> None:
    theirs, ours = both()
    schedule, again = (made(s, name, o, SCHEDULES[name]) for s, o in ((torch.optim, theirs), (ndl.optim, ours)))
    theirs.step()
    rates_of(schedule, range(4))
    ours.load_state_dict(theirs.state_dict())
    again.load_state_dict(schedule.state_dict())
    assert again.last_epoch == 4
    np.testing.assert_allclose(rates_of(again, range(9)), rates_of(schedule, range(9)), rtol=1e-7)
    if name in ("OneCycleLR", "CyclicLR"):
        found, want = ([g["momentum"] for g in o.param_groups] for o in (ours, theirs))
        np.testing.assert_allclose(found, want, rtol=1e-7)


@pytest.mark.parametrize("name", ["SequentialLR", "ChainedScheduler"])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_schedules_of_several_go_on(name: str, steps: int) -> None:
    def several(space: Any, optimizer: Any) -> Any:
        parts = [
            made(space, n, optimizer, o)
            for n, o in (("ConstantLR", {"factor": 0.1}), ("ExponentialLR", {"gamma": 0.8}))
        ]
        space = getattr(space, "lr_scheduler", space)
        if name == "ChainedScheduler":
            return space.ChainedScheduler(parts)
        return space.SequentialLR(optimizer, parts, milestones=[3])

    theirs, ours = both()
    schedule, again = several(torch.optim, theirs), several(ndl.optim, ours)
    theirs.step()
    for _ in range(steps):
        schedule.step()
    ours.load_state_dict(theirs.state_dict())
    again.load_state_dict(schedule.state_dict())
    for _ in range(6):
        schedule.step()
        again.step()
        found, want = ([g["lr"] for g in o.param_groups] for o in (ours, theirs))
        np.testing.assert_allclose(found, want, rtol=1e-7)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("StepLR", {"step_size": 4}, r"\[StepLR\] the state of torch expects step_size 4, got 3"),
        (
            "MultiStepLR",
            {"milestones": [2, 6]},
            r"\[MultiStepLR\] the state of torch expects milestones \[2, 6\], got \[2, 5\]",
        ),
        ("ReduceLROnPlateau", {"patience": 2}, r"\[ReduceLROnPlateau\] the state of torch expects patience 2, got 1"),
    ],
)
def test_schedules_of_other_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    theirs, ours = both()
    state = made(torch.optim, name, theirs, SCHEDULES[name]).state_dict()
    with pytest.raises(ValueError, match=message):
        made(ndl.optim, name, ours, options).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_weights_of_other_dtypes_and_with_gradients(dtype: Any) -> None:
    model, net = net_of(1), torch2needle.convert(net_of(0))
    net.load_state_dict({n: p.to(dtype) for n, p in model.named_parameters()})  # tensors that require a gradient
    for name, p in model.named_parameters():
        np.testing.assert_array_equal(net.state_dict()[name].numpy(), p.detach().to(dtype).float())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("CyclicLR", {"mode": mode, "gamma": 0.9}) for mode in ("triangular", "triangular2", "exp_range")),
        ("CyclicLR", {"cycle_momentum": False, "step_size_down": 2}),
        ("OneCycleLR", {"three_phase": True, "anneal_strategy": "linear"}),
        ("ReduceLROnPlateau", {"mode": "max", "threshold_mode": "abs", "cooldown": 1, "min_lr": 1e-3}),
    ],
)
def test_schedules_with_other_options_go_on(name: str, options: dict[str, Any]) -> None:
    theirs, ours = both()
    options = SCHEDULES[name] | options
    schedule, again = (made(s, name, o, options) for s, o in ((torch.optim, theirs), (ndl.optim, ours)))
    theirs.step()
    rates_of(schedule, range(4))
    ours.load_state_dict(theirs.state_dict())
    again.load_state_dict(schedule.state_dict())
    np.testing.assert_allclose(rates_of(again, range(9)), rates_of(schedule, range(9)), rtol=1e-7)
