"""Optimizers that step by ops, one's own among them, in plans as eagerly; L-BFGS beside torch's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import nn, optim
from needle.optim.adaptive import both
from needle.optim.composed import Composed

torch = pytest.importorskip("torch")

STREAM = np.random.default_rng(0)
BATCHES = [(STREAM.normal(size=(6, 8)).astype("float32"), STREAM.integers(0, 3, 6)) for _ in range(12)]


class Shrinking(Composed):
    """One's own: signs of a mean, and rates that fall."""

    rules = both({"lr": 0.05, "decay": 0.5})
    arguments = both(("lr", "decay"))
    slots = required = ("mean",)
    names = ("rate", "decay")

    def rates(self, group: Any, p: Any, state: Mapping[str, Any]) -> tuple[float, ...]:
        return group["lr"] / state["step"], group["decay"]

    def update(self, group: Any, p: Any, grad: Any, state: dict[str, Any], n: Mapping[str, Any]) -> Any:
        mean = state["mean"] * n["decay"] + grad
        return p - ndl.ops.tanh(mean) * n["rate"], {"mean": mean}


KINDS: dict[str, Any] = {
    "Rprop": lambda p: optim.Rprop(p, 0.01),
    "ASGD": lambda p: optim.ASGD(p, 0.1, lambd=0.1, t0=3),
    "Adafactor": lambda p: optim.Adafactor(p, 0.05, weight_decay=0.1),
    "Shrinking": Shrinking,
    "Muon": lambda p: optim.Muon([q for q in p if q.ndim == 2 and 1 not in q.shape], 0.02),
    "Muon of one shape": lambda p: optim.Muon([q for q in p if 1 not in q.shape][:1], nesterov=False),
}


# Muon's rounds make small singular values, and their roundings, hundreds of times as large.
TOLERANCE = {"Muon": 1e-3, "Muon of one shape": 1e-3}


def net_of() -> nn.Module:
    ndl.init.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))


def eager(net: nn.Module, optimizer: Any, batches: Any, after: Any = None) -> list[float]:
    losses = []
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = ndl.ops.cross_entropy(net(ndl.Tensor(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after(optimizer, i)
    return losses


def compiled(net: nn.Module, optimizer: Any, batches: Any, after: Any = None, **options: Any) -> list[float]:
    step = ndl.compile_step(net, ndl.ops.cross_entropy, optimizer, batches[0], **options)
    losses = []
    for i, (x, y) in enumerate(batches):
        losses.append(float(step(x, y)))
        if after is not None:
            after(optimizer, i)
    return losses


def halve(optimizer: Any, number: int) -> None:
    if number % 3 == 2:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize("after", [None, halve], ids=["", "rates change"])
@pytest.mark.parametrize("kind", KINDS)
def test_plans_step_as_eager_ones(kind: str, after: Any) -> None:
    """Losses, parameters, state and what other executables of the net give."""
    nets = [net_of(), net_of()]
    optimizers = [KINDS[kind](net.parameters()) for net in nets]
    run = ndl.compile(nets[1].eval(), BATCHES[0][0])
    before = run(BATCHES[0][0]).copy()
    for net in nets:
        net.train()
    want = eager(nets[0], optimizers[0], BATCHES, after)
    np.testing.assert_allclose(compiled(nets[1], optimizers[1], BATCHES, after), want, rtol=TOLERANCE.get(kind, 1e-5))
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-4, atol=TOLERANCE.get(kind, 1e-5))
    states = [o.state_dict()["state"] for o in optimizers]
    assert states[0].keys() == states[1].keys() and len(states[0]) > 0
    for number, arrays in states[0].items():
        for slot, a in arrays.items():
            np.testing.assert_allclose(states[1][number][slot], a, rtol=1e-3, atol=TOLERANCE.get(kind, 1e-5))
    x = ndl.Tensor(BATCHES[0][0])
    nets[1].eval()
    assert not np.allclose(run(BATCHES[0][0]), before)
    np.testing.assert_allclose(run(BATCHES[0][0]), nets[1](x).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.1}, {"accumulate": 3}, {"clip_grad_value": 0.01}], ids=str)
@pytest.mark.parametrize("kind", ["Adafactor", "Shrinking"])
def test_clipping_and_accumulation(kind: str, options: dict[str, Any]) -> None:
    nets = [net_of().train(), net_of().train()]
    optimizers = [KINDS[kind](net.parameters()) for net in nets]
    got = compiled(nets[1], optimizers[1], BATCHES, **options)
    every, want = options.get("accumulate", 1), []
    for i, (x, y) in enumerate(BATCHES):
        loss = ndl.ops.cross_entropy(nets[0](ndl.Tensor(x)), y)
        (loss / every).backward()
        want.append(loss.item())
        if i % every == every - 1:
            if "clip_grad_norm" in options:
                optim.clip_grad_norm(nets[0].parameters(), 0.1)
            if "clip_grad_value" in options:
                optim.clip_grad_value(nets[0].parameters(), 0.01)
            optimizers[0].step()
            optimizers[0].zero_grad()
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_from_its_state(kind: str) -> None:
    whole = net_of().train()
    want = compiled(whole, KINDS[kind](whole.parameters()), BATCHES)
    first, second = net_of().train(), net_of().train()
    optimizer = KINDS[kind](first.parameters())
    losses = eager(first, optimizer, BATCHES[:5])
    second.load_state_dict(first.state_dict())
    again = KINDS[kind](second.parameters())
    again.load_state_dict(optimizer.state_dict())
    np.testing.assert_allclose(losses + compiled(second, again, BATCHES[5:]), want, rtol=TOLERANCE.get(kind, 1e-5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_trains_nothing(kind: str) -> None:
    nets = [net_of().train(), net_of().train()]
    optimizers = [KINDS[kind](net.parameters()) for net in nets]
    step = ndl.compile_step(nets[1], ndl.ops.cross_entropy, optimizers[1], BATCHES[0])
    assert all(seconds >= 0 for *_, seconds in step.profile(*BATCHES[0], rounds=2))
    want = eager(nets[0], optimizers[0], BATCHES[:3])
    np.testing.assert_allclose([float(step(*b)) for b in BATCHES[:3]], want, rtol=TOLERANCE.get(kind, 1e-5))


def test_a_step_that_fails_leaves_everything() -> None:
    net = net_of().train()
    optimizer = optim.Adafactor(net.parameters())
    step = ndl.compile_step(net, ndl.ops.cross_entropy, optimizer, BATCHES[0])
    step(*BATCHES[0])
    before = [p.numpy() for p in net.parameters()]
    with pytest.raises(IndexError):
        step(BATCHES[0][0], np.full(6, 7))
    for a, p in zip(before, net.parameters(), strict=True):
        np.testing.assert_array_equal(p.numpy(), a)
    assert all(s["step"] == 1 for s in optimizer.state.values())


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (1, 3), (6, 1)])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}], ids=str
)
def test_muon_is_its_formula(shape: tuple[int, int], options: dict[str, Any]) -> None:
    """In float64 numpy, to rounding; torch's rounds are of bfloat16."""
    start, grads = STREAM.normal(size=shape), [STREAM.normal(size=shape) for _ in range(4)]
    ours = nn.Parameter(start, device=ndl.cpu(), dtype="float64")
    theirs = torch.tensor(start.astype("float32"), requires_grad=True)
    a, b = optim.Muon([ours], 0.05, 0.2, **options), torch.optim.Muon([theirs], 0.05, 0.2, **options)
    want, mean = start.copy(), np.zeros(shape)
    tall, rows, columns = shape[0] > shape[1], *shape
    matched = options.get("adjust_lr_fn") == "match_rms_adamw"
    scale = 0.2 * max(rows, columns) ** 0.5 if matched else max(1, rows / columns) ** 0.5
    for g in grads:
        ours.grad = ndl.Tensor(g, device=ndl.cpu(), dtype="float64", requires_grad=False)
        theirs.grad = torch.tensor(g.astype("float32"))
        a.step(), b.step()
        mean = 0.95 * mean + 0.05 * g
        x = 0.05 * g + 0.95 * mean if options.get("nesterov", True) else mean
        x = x.T if tall else x
        x = x / np.linalg.norm(x)
        for _ in range(options.get("ns_steps", 5)):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        want = want * (1 - 0.05 * 0.2) - 0.05 * scale * (x.T if tall else x)
    np.testing.assert_allclose(ours.numpy(), want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ours.numpy(), theirs.detach(), atol=0.02)


@pytest.mark.parametrize("kind", ["Rprop", "ASGD", "Adafactor"])
def test_parameters_of_all_ranks(kind: str) -> None:
    """Convolutions' weights, sizes of one, and none, with which torch's Adafactor divides by zero."""
    ours, theirs = [], []
    for shape in [(), (1,), (1, 1), (4, 1, 3, 3), (2, 3, 5)]:
        start = np.asarray(STREAM.normal(size=shape))
        ours.append(nn.Parameter(start, device=ndl.cpu(), dtype="float64"))
        theirs.append(torch.tensor(start, requires_grad=True))
    empty = nn.Parameter(np.zeros((0, 3)), device=ndl.cpu(), dtype="float64")
    a, b = getattr(optim, kind)([*ours, empty]), getattr(torch.optim, kind)(theirs)
    empty.grad = ndl.Tensor(np.zeros((0, 3)), device=ndl.cpu(), dtype="float64", requires_grad=False)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.tensor(np.asarray(STREAM.normal(size=tuple(q.shape))))
            p.grad = ndl.Tensor(q.grad.numpy(), device=ndl.cpu(), dtype="float64", requires_grad=False)
        a.step(), b.step()
    for p, q in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), q.detach(), rtol=1e-6, atol=1e-8)  # torch keeps ASGD's rates in float32
    assert empty.shape == (0, 3)


# -- L-BFGS --------------------------------------------------------------------------------------------------------------

POINTS = STREAM.normal(size=(64, 2)).astype("float32")
HEIGHTS = (np.sin(2 * POINTS[:, :1]) * POINTS[:, 1:]).astype("float32")
SEARCHES: dict[str, dict[str, Any]] = {
    "": {},
    "short": {"lr": 0.1, "max_iter": 5},
    "few evaluations": {"max_eval": 4},
    "search": {"line_search_fn": "strong_wolfe"},
    "search, short history": {"line_search_fn": "strong_wolfe", "history_size": 2, "max_iter": 7},
    "search of a large step": {"line_search_fn": "strong_wolfe", "lr": 10.0},
}


def fitted(library: Any, net: Any, x: Any, y: Any, options: dict[str, Any], rounds: int = 6) -> tuple[list[float], int]:
    optimizer, calls = library.LBFGS(net.parameters(), **options), []

    def closure() -> Any:
        calls.append(1)
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(rounds)], len(calls)


@pytest.mark.parametrize("name", SEARCHES)
def test_lbfgs_finds_what_torchs_finds(name: str) -> None:
    torch2needle = pytest.importorskip("torch2needle")
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    net = torch2needle.convert(theirs).train()
    want, calls = fitted(torch.optim, theirs, torch.tensor(POINTS), torch.tensor(HEIGHTS), SEARCHES[name])
    got, ours = fitted(optim, net, ndl.Tensor(POINTS), ndl.Tensor(HEIGHTS), SEARCHES[name])
    np.testing.assert_allclose(got[:2], want[:2], rtol=2e-2)  # roundings part them later
    assert abs(ours - calls) <= max(2, calls // 5)
    assert got[-1] <= 1.5 * want[-1] and got[-1] < got[0] / 2


@pytest.mark.parametrize("device", [ndl.cpu_numpy(), ndl.cpu()], ids=["numpy", "cpu"])
def test_lbfgs_finds_the_valleys_end(device: Any) -> None:
    """Rosenbrock's, in float64; the loss of its last step there is torch's within a few digits."""
    p = nn.Parameter(np.array([-1.2, 1.0]), device=device, dtype="float64")
    optimizer = optim.LBFGS([p], line_search_fn="strong_wolfe", max_iter=100, tolerance_change=1e-15)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2
        loss.backward()
        return loss

    optimizer.step(closure)
    np.testing.assert_allclose(p.numpy(), [1, 1], rtol=1e-7)


def test_lbfgs_goes_on_from_its_state_and_refuses_plans() -> None:
    def part(p: Any, optimizer: Any, rounds: int) -> list[float]:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = ((p - 1) ** 4).sum()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(rounds)]

    p = nn.Parameter(np.arange(3.0), device=ndl.cpu(), dtype="float64")
    want = part(p, optim.LBFGS([p], max_iter=3), 6)
    q = nn.Parameter(np.arange(3.0), device=ndl.cpu(), dtype="float64")
    first = optim.LBFGS([q], max_iter=3)
    losses = part(q, first, 2)
    second = optim.LBFGS([q], max_iter=3)
    second.load_state_dict(first.state_dict())
    np.testing.assert_allclose(losses + part(q, second, 4), want, rtol=1e-12)
    net = net_of().train()
    with pytest.raises(ndl.Unsupported, match=r"\[LBFGS\] computes the loss several times in a step"):
        ndl.compile_step(net, ndl.ops.cross_entropy, optim.LBFGS(net.parameters()), BATCHES[0])
    with pytest.raises(ValueError, match=r"expects the history of needle's LBFGS, got none"):
        second.load_state_dict(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(3))]).state_dict())


def test_no_gradient_no_step(tmp_path: Path) -> None:
    p = nn.Parameter(np.zeros(2), device=ndl.cpu(), dtype="float64")
    optimizer = optim.LBFGS([p])

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 0.0
    np.testing.assert_array_equal(p.numpy(), 0.0)
