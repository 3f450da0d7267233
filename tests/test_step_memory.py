"""Memory of compiled training steps: gradients that share it, parameters that lie in one, forward passes computed twice."""

import copy

import numpy as np
import pytest
import torch

import needle as ndl
from needle import nn, optim
from test_compile_step import KINDS, OPTIMIZERS, assert_same, batch, ce, eager_step, pair


def test_parameters_move_as_soon_as_nothing_reads_them():
    layers = [part for _ in range(8) for part in (nn.Linear(128, 128, bias=False), nn.ReLU())]
    x, y = batch(0, 4, 128)
    net, opt, other, planned = pair(make=lambda: nn.Sequential(*layers, nn.Linear(128, 5)))
    step = ndl.compile_step(other, ce, planned, (x, y))
    assert step.memory["arena"] < 4 * 128 * 128 * 4  # of eight gradients
    losses = [eager_step(net, ce, opt, x, y) for _ in range(4)]
    np.testing.assert_allclose([float(step(x, y)) for _ in range(4)], losses, rtol=1e-5)
    assert_same(net, other)


class Overlapping(nn.Module):
    """Two parameters, and a constant that lies over the end of the first and the beginning of the second."""

    def __init__(self, numbers):
        super().__init__()
        memory = ndl.Tensor(numbers).cached_data
        self.first, self.second = nn.Parameter(np.zeros((4, 4))), nn.Parameter(np.zeros((4, 4)))
        self.first.cached_data, self.second.cached_data = memory[:4], memory[4:]
        self.between = ndl.Tensor.make_const(memory[2:6])

    def forward(self, x):
        return (ndl.ops.tanh(x @ self.between @ self.first) @ self.between @ self.second).sum()


def test_parameters_in_one_memory_move_when_nothing_reads_it():
    x, numbers = batch(0, 6, 4)[0], batch(1, 8, 4)[0]
    net = Overlapping(numbers)
    step = ndl.compile_step(net, lambda out: out, optim.SGD(net.parameters(), 0.05), (x,))
    memory = torch.tensor(numbers)
    first, second = (part.detach().requires_grad_() for part in (memory[:4], memory[4:]))
    theirs = torch.optim.SGD([first, second], 0.05)
    for _ in range(3):
        theirs.zero_grad()
        loss = (torch.tanh(torch.tensor(x) @ memory[2:6] @ first) @ memory[2:6] @ second).sum()
        loss.backward()
        theirs.step()
        assert float(step(x)) == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(net.first.numpy(), first.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(net.second.numpy(), second.detach().numpy(), atol=1e-5)


def chain(depth):
    layers = [part for _ in range(depth) for part in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2))]
    return nn.Sequential(*layers, nn.Linear(16, 5))


def test_recomputed_steps_take_little_memory_and_equal_the_others_to_the_bit():
    x, y = batch(0, 200, 16)
    net = chain(24)
    losses, arenas = {}, {}
    for recompute in ("none", "auto", "full"):
        other = copy.deepcopy(net)
        step = ndl.compile_step(other, ce, optim.Adam(other.parameters(), 0.01), (x, y), recompute=recompute)
        np.random.seed(0)
        losses[recompute] = [float(step(x, y)) for _ in range(3)]
        arenas[recompute] = step.memory["arena"]
        assert (step.last.recomputed > 0) == (recompute == "full")
    assert losses["full"] == losses["none"] == losses["auto"]
    assert arenas["full"] < 0.4 * arenas["none"] == 0.4 * arenas["auto"]


@pytest.mark.parametrize("memory, count", [(0, 0), (1 << 40, 0), (1 << 10, 1)])
def test_steps_too_large_for_the_device_are_recomputed(monkeypatch, memory, count):
    x, y = batch(0, 8, 16)
    net = chain(6)
    monkeypatch.setattr("needle.executor.training.memory_of", lambda device: memory)
    step = ndl.compile_step(net, ce, optim.SGD(net.parameters(), 0.01), (x, y))
    assert (step.last.recomputed > 0) == count


@pytest.mark.parametrize("seed", range(12))
def test_accumulated_batches_of_several_sizes_and_several_results(seed):
    draw = np.random.RandomState(100 + seed)
    net, (x, y) = KINDS[seed % len(KINDS)](draw)
    make = OPTIMIZERS[draw.randint(len(OPTIMIZERS))]
    shorter = (x[:-1], y[:-1]) if 2 < len(x) == len(y) else (x, y)
    found = []
    for recompute in ("none", "full"):
        other = copy.deepcopy(net)
        step = ndl.compile_step(
            other,
            lambda out, y: (ce(out, y), {"out": out}),
            make(list(other.parameters())),
            (x, y),
            accumulate=2,
            clip_grad_norm=1.0,
            recompute=recompute,
        )
        np.random.seed(3)
        results = [step(*given) for given in ((x, y), shorter, shorter, (x, y), (x, y))]
        found.append((other, [float(loss) for loss, _ in results], [more["out"].tolist() for _, more in results]))
    (plain, *results), (frugal, *again) = found
    assert repr(again) == repr(results)
    assert_same(plain, frugal, 0)


def test_recomputed_steps_on_gpus(gpu):
    x, y = batch(0, 40, 16)
    net = chain(8)
    losses, arenas = [], []
    for recompute in ("none", "full"):
        other = copy.deepcopy(net).to(gpu)
        step = ndl.compile_step(other, ce, optim.SGD(other.parameters(), 0.1), (x, y), recompute=recompute)
        np.random.seed(0)
        losses.append([float(step(x, y)) for _ in range(3)])
        arenas.append(step.memory["arena"])
    assert losses[0] == losses[1] and arenas[1] < arenas[0]
