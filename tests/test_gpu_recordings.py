"""Graphs of plans: recorded where a call's arrays lie, or over copies of them; the values of the call in any case."""

from __future__ import annotations

import numpy as np
import pytest

import needle as ndl
from gpu_nets import image
from needle import nn
from needle.autograd import Tensor
from needle.backend_ndarray import Device, NDArray


def made(gpu: Device) -> tuple[ndl.Executable, nn.Module]:
    np.random.seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    net.to(gpu)
    return ndl.compile(net, NDArray(image(2, 6), gpu)), net


@pytest.mark.parametrize("places", [1, 2, 3, 4, 7])
def test_places_that_come_again(gpu: Device, places: int) -> None:
    """Their contents change from call to call; beyond four places calls are copied."""
    exe, net = made(gpu)
    ins = [NDArray.empty((2, 6), "float32", gpu) for _ in range(places)]
    outs = [NDArray.empty((2, 3), "float32", gpu) for _ in range(places)]
    for turn in range(6):
        for i in range(places):
            x = image(2, 6) + 10 * turn + i
            ins[i][:] = NDArray(x, gpu)
            outs[i].fill(np.nan)
            exe.run_into(outs[i], ins[i])
            assert np.allclose(outs[i].numpy(), net(Tensor(x, device=gpu)).numpy(), rtol=1e-5, atol=1e-5), (turn, i)
    assert exe.plan.core.graphs == 1, exe.plan.core.graph_error


def test_results_that_are_kept(gpu: Device) -> None:
    """A graph at old places does not touch what still lies there."""
    exe, net = made(gpu)
    x = NDArray(image(2, 6), gpu)
    first = exe(x)
    kept = [exe(x) for _ in range(9)]
    x[:] = NDArray(image(2, 6) + 1, gpu)
    later = exe(x).numpy()
    assert all(np.array_equal(a.numpy(), first.numpy()) for a in kept)
    assert np.allclose(later, net(Tensor(x)).numpy(), rtol=1e-5, atol=1e-5) and not np.allclose(later, first.numpy())


def test_new_parameters(gpu: Device) -> None:
    exe, net = made(gpu)
    x, out = NDArray(image(2, 6), gpu), NDArray.empty((2, 3), "float32", gpu)
    for scale in (1, 2, 3):
        for p in net.parameters():
            p.data = p * scale
        for _ in range(4):
            exe.run_into(out, x)
            assert np.allclose(out.numpy(), net(Tensor(x)).numpy(), rtol=1e-5, atol=1e-5)
