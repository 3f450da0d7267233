"""Whose rules and defaults optimizers follow, torch's arguments, parameter groups."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
import operator_fusion
import torch2needle
from needle import nn, optim

BACKENDS = [pytest.param(ndl.cpu_numpy(), id="numpy"), pytest.param(ndl.cpu(), id="cpu")]
SHAPES = [(3, 5), (7,), (17, 11), ()]
STEPS = 20


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 3))


def twins(device: Any, dtype: str = "float32", rule: str = "torch") -> tuple[list[Any], list[torch.Tensor]]:
    """Parameters of the same values here and in torch."""
    ours = [nn.Parameter(np.random.randn(*s), device=device, dtype=dtype) for s in SHAPES]
    for p in ours:
        p.rule = rule
    return ours, [torch.tensor(p.numpy(), requires_grad=True) for p in ours]


def give(ours: list[Any], theirs: list[torch.Tensor]) -> None:
    for p, t in zip(ours, theirs, strict=True):
        t.grad = torch.tensor(np.asarray(np.random.randn(*p.shape), dtype=p.dtype))
        p.grad = ndl.Tensor(t.grad.numpy(), device=p.device, dtype=p.dtype, requires_grad=False)


def close(ours: list[Any], theirs: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    for p, t in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), t.detach().numpy(), rtol=tolerance, atol=tolerance / 10)


# -- the same arguments as in torch ------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "sgd": ("SGD", (), {}),
    "sgd-momentum": ("SGD", (0.1,), {"momentum": 0.9}),
    "sgd-dampened": ("SGD", (0.1, 0.9), {"dampening": 0.4, "weight_decay": 0.1}),
    "sgd-dampening-alone": ("SGD", (0.1,), {"dampening": 0.4}),
    "sgd-nesterov": ("SGD", (0.1, 0.9), {"nesterov": True, "maximize": True}),
    "sgd-hints": ("SGD", (0.1,), {"foreach": True, "differentiable": False, "fused": None}),
    "adam": ("Adam", (), {}),
    "adam-by-position": ("Adam", (0.02, (0.7, 0.95), 1e-3, 0.2, True), {}),
    "adam-amsgrad": ("Adam", (0.1,), {"betas": (0.5, 0.6), "amsgrad": True, "weight_decay": 0.1}),
    "adam-maximize": ("Adam", (0.1,), {"maximize": True, "eps": 0.1}),
    "adam-decoupled": ("Adam", (0.1,), {"decoupled_weight_decay": True, "weight_decay": 0.3}),
    "adamw": ("AdamW", (), {}),
    "adamw-arguments": ("AdamW", (0.05,), {"betas": [0.8, 0.9], "weight_decay": 0.5, "amsgrad": True}),
    "rmsprop": ("RMSprop", (), {}),
    "rmsprop-by-position": ("RMSprop", (0.02, 0.9, 1e-3, 0.1, 0.8, True), {}),
    "rmsprop-maximize": ("RMSprop", (0.02,), {"maximize": True, "momentum": 0.9}),
    "adagrad": ("Adagrad", (), {}),
    "adagrad-by-position": ("Adagrad", (0.05, 0.1, 0.2, 0.3, 1e-5), {}),
    "adagrad-maximize": ("Adagrad", (0.05,), {"maximize": True, "lr_decay": 0.2}),
    "adadelta": ("Adadelta", (), {}),
    "adadelta-by-position": ("Adadelta", (0.5, 0.8, 1e-3, 0.1), {"maximize": True}),
    "adamax": ("Adamax", (), {}),
    "adamax-by-position": ("Adamax", (0.05, (0.7, 0.9), 1e-3, 0.1), {"maximize": True}),
    "nadam": ("NAdam", (), {}),
    "nadam-by-position": ("NAdam", (0.02, (0.7, 0.9), 1e-3, 0.1, 0.01, True), {}),
    "nadam-maximize": ("NAdam", (0.02,), {"weight_decay": 0.1, "maximize": True, "momentum_decay": 0.0}),
    "radam": ("RAdam", (), {}),
    "radam-by-position": ("RAdam", (0.02, (0.7, 0.9), 1e-3, 0.1, True), {}),
    "rprop": ("Rprop", (), {}),
    "rprop-by-position": ("Rprop", (0.02, (0.4, 1.3), (1e-3, 0.1)), {"maximize": True}),
    "asgd": ("ASGD", (), {}),
    "asgd-by-position": ("ASGD", (0.1, 0.1, 0.5, 6, 0.1), {"maximize": True}),
    "adafactor": ("Adafactor", (), {}),
    "adafactor-by-position": ("Adafactor", (0.05, -0.5, (1e-5, 1e-2), 1.5, 0.1), {"maximize": True}),
    "radam-maximize": ("RAdam", (0.02,), {"weight_decay": 0.1, "maximize": True, "betas": (0.8, 0.95)}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_same_arguments_make_the_same_steps(name: str, device: Any, dtype: str) -> None:
    kind, args, options = ARGUMENTS[name]
    ours, theirs = twins(device, dtype)
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    a, b = getattr(optim, kind)(ours, *args, **options), getattr(torch.optim, kind)(theirs, *args, **tuples)
    for number in range(STEPS):
        give(ours, theirs)
        if number < 3:  # a parameter that comes later counts its own steps
            ours[1].grad = theirs[1].grad = None
        a.step(), b.step()
    # torch multiplies NAdam's momenta in float32, and keeps ASGD's rates so.
    close(ours, theirs, 2e-5 if dtype == "float32" else {"NAdam": 1e-7, "ASGD": 1e-6}.get(kind, 1e-12))


OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "amsgrad", "alpha", "centered")
OPTIONS += ("lr_decay", "initial_accumulator_value", "rho", "momentum_decay", "etas", "step_sizes", "lambd", "t0")
OPTIONS += ("beta2_decay", "d")
KINDS = [
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "Rprop",
    "ASGD",
    "Adafactor",
]


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_torchs_for_converted_models(kind: str) -> None:
    source = model()
    opt = getattr(optim, kind)(torch2needle.convert(source).parameters())
    theirs = getattr(torch.optim, kind)(source.parameters()).param_groups[0]
    assert opt.rule == "torch"
    assert "rule='torch'" in repr(opt) and f"lr={opt.lr}" in repr(opt)
    names = [name for name in (*OPTIONS, "maximize", "decoupled_weight_decay") if name in theirs]
    assert {name: opt.param_groups[0][name] for name in names} == {name: theirs[name] for name in names}


def test_defaults_are_the_courses_for_its_modules() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    sgd, adam = optim.SGD(net.parameters(), momentum=0.9), optim.Adam(net.parameters())
    assert (sgd.rule, sgd.lr, sgd.weight_decay) == ("needle", 0.01, 0.0)
    assert (adam.rule, adam.lr, adam.beta1, adam.beta2, adam.weight_decay) == ("needle", 0.01, 0.9, 0.999, 0.0)
    assert "rule='needle'" in repr(sgd)


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "converted": lambda net, path: net,
    "fused": lambda net, path: operator_fusion.fuse(net),
    "copied": lambda net, path: copy.deepcopy(net),
    "loaded": lambda net, path: (ndl.save(net, path), ndl.load(path))[1],
    "moved": lambda net, path: net.to("float64"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_model_stays_one(way: str, tmp_path: Path) -> None:
    net = WAYS[way](torch2needle.convert(model()), tmp_path / "net")
    assert optim.SGD(net.parameters(), 0.1).rule == "torch"


def test_a_frozen_parameter_stays_frozen_in_a_file(tmp_path: Path) -> None:
    source = model()
    source[0].bias.requires_grad = False
    ndl.save(torch2needle.convert(source), tmp_path / "net")
    assert [k for k, p in ndl.load(tmp_path / "net").named_parameters() if not p.requires_grad] == ["0.bias"]


def test_files_of_before_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lists of rules and frozen parameters, the layers' layout says whose rules they follow."""
    write = json.dumps
    monkeypatch.setattr(
        json, "dumps", lambda d: write({k: v for k, v in d.items() if k not in ("torch_rule", "frozen")})
    )
    for net, rule in ((torch2needle.convert(model()), "torch"), (nn.Sequential(nn.Linear(2, 2)), "needle")):
        ndl.save(net, tmp_path / "net")
        assert optim.SGD(ndl.load(tmp_path / "net").parameters()).rule == rule


def test_a_saved_model_of_the_course_stays_one(tmp_path: Path) -> None:
    ndl.save(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), tmp_path / "net")
    assert optim.SGD(ndl.load(tmp_path / "net").parameters()).rule == "needle"


def test_a_converted_model_trains_as_in_torch() -> None:
    theirs = model()
    net = torch2needle.convert(theirs).train()
    a = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    b = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    for _ in range(30):
        a.zero_grad(), b.zero_grad()
        ndl.ops.cross_entropy(net(x), y).backward()
        torch.nn.functional.cross_entropy(theirs(x), y).backward()
        a.step(), b.step()
    own = dict(net.named_parameters())
    close([own[k] for k, _ in theirs.named_parameters()], list(theirs.parameters()), 2e-4)


# -- rules, and what is refused ----------------------------------------------------------------------------------------


def test_a_rule_decides_for_mixed_parameters() -> None:
    mixed = torch2needle.convert(model()).parameters() + nn.Linear(3, 3).parameters()
    with pytest.raises(
        ValueError, match=r"\[SGD\] expects rule='torch' or rule='needle' .* 6 of converted models and 2"
    ):
        optim.SGD(mixed)
    assert optim.SGD(mixed, rule="torch").lr == 0.001
    assert optim.SGD(mixed, rule="needle").lr == 0.01
    opt = optim.SGD(mixed[:6])
    with pytest.raises(ValueError, match=r"steps by rule torch, got parameters of rule needle"):
        opt.add_param_group({"params": mixed[6:]})
    assert len(opt.param_groups) == 1


REFUSED: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "unknown": (lambda p: optim.SGD(p, learning_rate=0.1), "has no option learning_rate; rule needle has lr, momentum"),
    "unknown-in-group": (lambda p: optim.Adam([{"params": p, "beta": 1}]), "has no option beta;"),
    "unknown-later": (lambda p: optim.Adam(p).param_groups[0].update(step=1), "has no option step;"),
    "unknown-by-or": (lambda p: optim.Adam(p).param_groups[0].__ior__({"lr": -1}), "lr expects a number of at least 0"),
    "other-rule": (lambda p: optim.SGD(p, dampening=0.1), "dampening belongs to rule torch, got rule needle"),
    "third-by-position": (lambda p: optim.SGD(p, 0.1, 0.9, 0.01, rule="torch"), "takes lr, momentum by position"),
    "too-many": (lambda p: optim.RMSprop(p, 0.1, 0.9, 0.1, 0.1, 0.1, True, True), "the rest by name, got 7 values"),
    "twice": (lambda p: optim.SGD(p, 0.1, lr=0.2), "lr is given twice"),
    "both-betas": (lambda p: optim.Adam(p, beta1=0.1, betas=(0.1, 0.2)), "expects betas or beta1 and beta2, got both"),
    "torch-order": (lambda p: optim.Adam(p, 0.1, (0.9, 0.99)), "beta1 expects a number, got tuple"),
    "course-order": (lambda p: optim.Adam(p, 0.1, 0.9, rule="torch"), "betas expects 2 numbers, got 0.9"),
    "rate": (lambda p: optim.SGD(p, -0.1), "lr expects a number of at least 0, got -0.1"),
    "nan": (lambda p: optim.SGD(p, math.nan), "lr expects a number of at least 0, got nan"),
    "text": (lambda p: optim.SGD(p, "0.1"), "lr expects a number, got str"),
    "tensor-rate": (lambda p: optim.SGD(p, torch.tensor(0.1)), "lr expects a number, got Tensor"),
    "beta": (lambda p: optim.Adam(p, betas=(0.9, 1.0)), r"betas expects a number in \[0, 1\), got 1.0"),
    "flag": (lambda p: optim.Adam(p, amsgrad="no"), "amsgrad expects True or False, got 'no'"),
    "nesterov": (lambda p: optim.SGD(p, nesterov=True, rule="torch"), "nesterov expects momentum and no dampening"),
    "differentiable": (lambda p: optim.SGD(p, differentiable=True), "differentiable expects False"),
    "one-parameter": (lambda p: optim.SGD(p[0]), "expects a list of parameters or of groups, got one Parameter"),
    "etas": (lambda p: optim.Rprop(p, etas=(0.5, 1.2, 1.0)), "etas expects 2 numbers, got"),
    "eps": (lambda p: optim.Adafactor(p, eps=(1e-3, None)), "eps expects a number, got NoneType"),
    "vectors": (lambda p: optim.Muon(p), r"expects matrices, got a parameter of shape \(2,\)"),
    "word": (lambda p: optim.Muon([], adjust_lr_fn="adam"), "adjust_lr_fn expects original or match_rms_adamw"),
    "search": (lambda p: optim.LBFGS(p, line_search_fn="wolfe"), "line_search_fn expects strong_wolfe, got 'wolfe'"),
    "searches": (
        lambda p: optim.LBFGS([{"params": p[:1]}, {"params": p[1:]}]),
        "expects one group of parameters, got 2",
    ),
    "no-closure": (lambda p: optim.LBFGS(p).step(), "step expects a function that computes the loss"),
    "a-net": (
        lambda p: optim.SGD(nn.Sequential(nn.ReLU())),
        r"expects a list of parameters \(net.parameters\(\)\), got the net: Sequential",
    ),
    "a-set": (lambda p: optim.SGD(set(p)), "expects a list of parameters, got set"),
    "of-torch": (
        lambda p: optim.SGD(model().parameters()),
        "expects needle's parameters .* got torch.nn.parameter.Param",
    ),
    "named": (lambda p: optim.SGD([(p[0], "weight")]), "got builtins.tuple"),
    "a-result": (lambda p: optim.SGD([p[0] + 1]), "expects parameters, got the result of "),
    "group-without": (lambda p: optim.SGD([{"lr": 1}]), "expects every group to be a dict with params"),
    "in-two-groups": (
        lambda p: optim.SGD([{"params": p}, {"params": p[:1]}]),
        "a parameter in one group, got one in two",
    ),
    "twice-in-a-group": (lambda p: optim.SGD([p[0], p[0]], rule="torch"), "a parameter once in a group"),
    "differing": (lambda p: optim.SGD([{"params": p[:1], "lr": 1.0}, {"params": p[1:]}]).lr, "the groups differ in lr"),
    "another-schedule": (
        lambda p: optim.StepLR(torch.optim.SGD(model().parameters()), 1),
        "expects a needle optimizer",
    ),
    "step-size": (lambda p: optim.StepLR(optim.SGD(p), 0), "step_size expects a whole number of at least 1, got 0"),
    "period": (lambda p: optim.CosineAnnealingLR(optim.SGD(p), 0), "T_max expects a whole number"),
    "warm-up": (lambda p: optim.LinearLR(optim.SGD(p), 0.0), "expects factors of at most 1, the first above 0"),
    "cycle": (lambda p: optim.OneCycleLR(optim.SGD(p), 0.1), "expects total_steps, or epochs and steps_per_epoch"),
    "cycle-by-another-order": (lambda p: optim.OneCycleLR(optim.SGD(p), 0.1, 30, 0.3), "epochs expects a whole number"),
    "others-schedules": (
        lambda p: optim.SequentialLR(optim.SGD(p), [optim.StepLR(optim.SGD(p), 1)], []),
        "expects schedules of its optimizer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_optimizer_cannot_follow_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=rf"(?s)^\[\w+\] .*{text}.*\.$"):
        make([nn.Parameter(np.ones(2)), nn.Parameter(np.ones(3))])


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_a_gradient_of_another_dtype_is_refused(dtype: str) -> None:
    p = nn.Parameter(np.ones(3, "float32"), device=ndl.cpu(), dtype="float32")
    p.grad = ndl.Tensor(np.ones(3), device=ndl.cpu(), dtype=dtype)
    with pytest.raises(ValueError, match=rf"gradient of parameter 0 expects dtype float32, got {dtype}"):
        optim.SGD([p]).step()
    p.grad = np.ones(3, "float32")
    with pytest.raises(TypeError, match="gradient of parameter 0 expects a Tensor, got ndarray"):
        optim.SGD([p]).step()


# -- groups --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_groups_step_with_options_of_their_own(kind: str, device: Any) -> None:
    ours, theirs = twins(device)
    own = {"SGD": {"momentum": 0.8}, "RMSprop": {"momentum": 0.8, "centered": True}}.get(kind, {"betas": (0.5, 0.6)})

    def make(library: Any, p: list[Any]) -> Any:
        opt = getattr(library, kind)([{"params": p[:1], "lr": 0.2, **own}, {"params": p[1]}], lr=0.05)
        opt.add_param_group({"params": p[2:3], "weight_decay": 0.3})
        return opt

    a, b = make(optim, ours), make(torch.optim, theirs)
    for number in range(STEPS):
        if number == 3:
            for opt, last in ((a, ours[3:]), (b, theirs[3:])):
                opt.add_param_group({"params": last, "lr": 0.5})
                opt.param_groups[1]["lr"] *= 3
        if number == 5:
            for opt in (a, b):
                opt.param_groups[0]["maximize"] = True
        give(ours, theirs)
        a.step(), b.step()
    close(ours, theirs)
    assert [len(g["params"]) for g in a.param_groups] == [1, 1, 1, 1]


def test_momentum_that_comes_later_starts_at_the_gradient() -> None:
    ours, theirs = twins(ndl.cpu())
    a, b = optim.SGD(ours, 0.1), torch.optim.SGD(theirs, 0.1)
    for number in range(STEPS):
        for opt in (a, b):
            opt.param_groups[0]["momentum"] = 0.9 if number in (2, 3, 6) else 0.0
        give(ours, theirs)
        a.step(), b.step()
    close(ours, theirs)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop"])
@pytest.mark.parametrize("target", ["float64", ndl.cpu_numpy()], ids=str)
def test_the_state_follows_a_model_that_moves(target: Any, kind: str) -> None:
    # eps: the gradient of a bias before a batch norm is rounding alone, which must not be blown up
    options: dict[str, Any] = {"lr": 0.1} | {"SGD": {"momentum": 0.9}}.get(kind, {"eps": 0.1})
    theirs, nets = model(), [torch2needle.convert(model()).to(d) for d in (ndl.cpu(), target)]
    runs = [getattr(optim, kind)(net.parameters(), **options) for net in nets]
    other = getattr(torch.optim, kind)(theirs.parameters(), **options)
    for number in range(4):
        if number == 2:
            nets[0].to(target)
        x = torch.randn(5, 4)
        other.zero_grad(), (theirs(x) ** 2).mean().backward(), other.step()
        for net, opt in zip(nets, runs, strict=True):
            p = net.parameters()[0]
            opt.zero_grad()
            (net(ndl.Tensor(x.numpy(), device=p.device, dtype=p.dtype, requires_grad=False)) ** 2).mean().backward()
            opt.step()
    for net in nets:
        own = dict(net.named_parameters())
        close([own[k] for k, _ in theirs.named_parameters()], list(theirs.parameters()), 1e-3)


def test_an_option_set_on_the_optimizer_is_set_in_all_groups() -> None:
    ours, _ = twins(ndl.cpu())
    opt = optim.Adam([{"params": ours[:1], "lr": 1.0}, {"params": ours[1:]}])
    opt.lr, opt.beta1 = 0.3, 0.4
    assert [g["lr"] for g in opt.param_groups] == [0.3, 0.3]
    assert [g["betas"] for g in opt.param_groups] == [(0.4, 0.999)] * 2
    assert opt.param_groups[1]["beta2"] == opt.beta2 == 0.999


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop"])
def test_a_state_of_groups_goes_on(kind: str) -> None:
    options = {"amsgrad": True} if kind == "Adam" else {"momentum": 0.9}
    ours, theirs = twins(ndl.cpu())

    def make(p: list[Any]) -> Any:
        return getattr(optim, kind)([{"params": p[:2], "lr": 0.2}, {"params": p[2:]}], **options)

    opt = make(ours)
    for _ in range(3):
        give(ours, theirs)
        ours[0].grad = None if opt.t < 2 else ours[0].grad
        opt.step()
    state, copies = opt.state_dict(), [nn.Parameter(p, device=p.device) for p in ours]
    for p in copies:
        p.rule = "torch"
    again = make(copies)
    again.lr = 7.0
    again.load_state_dict(state)
    both = copy.deepcopy((opt, ours))
    for some, params in ((opt, ours), (again, copies), both):
        for p, t in zip(params, theirs, strict=True):
            p.grad = ndl.Tensor(t.grad.numpy(), device=p.device)
        some.step()
    for p, q, r in zip(ours, copies, both[1], strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
        np.testing.assert_array_equal(p.numpy(), r.numpy())
    with pytest.raises(ValueError, match=r"expects groups of \[4\] parameters, got \[2, 2\]"):
        getattr(optim, kind)(copies, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="the state expects rule needle, got torch"):
        getattr(optim, kind)(copies, rule="needle").load_state_dict(state)


class Signs(optim.Optimizer):
    """An optimizer as programs write their own: a step of its own and no options."""

    def __init__(self, params: list[Any], lr: float) -> None:
        super().__init__(params)
        self.lr = lr

    def step(self) -> None:
        for p in self.params:
            p.data = p.data - self.lr * ndl.ops.sign(p.grad.detach())


def test_an_optimizer_of_a_programs_own() -> None:
    p = nn.Parameter(np.array([1.0, 2.0]))
    opt = Signs([p], 0.5)
    schedule = optim.ExponentialLR(opt, 0.5)
    for _ in range(2):
        opt.reset_grad()
        (p * p).sum().backward()
        opt.step(), schedule.step()
    np.testing.assert_allclose(p.numpy(), [0.25, 1.25])
    assert opt.lr == 0.125
