"""Layers over an axis in front of others, which plans compute without moving it, beside torch in float64."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="plans")


class Between(nn.Module):
    """Layers of an axis that is the last one for them."""

    def __init__(self, axis: int, *layers: nn.Module) -> None:
        super().__init__()
        self.axis, self.layers = axis, nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        others = [d for d in range(x.ndim) if d != self.axis]
        back = [others.index(d) if d != self.axis else x.ndim - 1 for d in range(x.ndim)]
        return self.layers(x.permute(*others, self.axis)).permute(back)


class Heads(nn.Module):
    """Attention whose heads are mixed before and behind the softmax, by convolutions or by linear layers."""

    def __init__(self, heads: int, linear: bool) -> None:
        super().__init__()
        made = [Between(1, nn.Linear(heads, heads)) if linear else nn.Conv2d(heads, heads, 1) for _ in range(2)]
        self.before, self.behind = made

    def forward(self, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.behind((self.before(a) + mask).softmax(-1))


def kernels(net: nn.Module, *inputs: torch.Tensor, fuse: bool = False) -> list[str]:
    """Of the net's plan, which is compared with torch."""
    made: Any = torch2needle.convert(net.eval(), inputs, dynamic=False)
    exe: Any = ndl.compile(operator_fusion.fuse(made) if fuse else made, inputs)
    want = copy.deepcopy(net).double()(*(x.double() for x in inputs)).detach().numpy()
    got = exe(*inputs).numpy()
    assert got.shape == want.shape and np.abs(got - want).max() <= 4e-6 * np.abs(want).max()
    return list(exe.plan.names)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 4, 23), (2, 8, 16), (3, 1, 17), (1, 12, 33)])
def test_heads_are_mixed_in_place(batch: int, heads: int, length: int, linear: bool, fuse: bool) -> None:
    a, mask = torch.randn(batch, heads, length, length), torch.randn(length, length)
    names = kernels(Heads(heads, linear), a, mask, fuse=fuse)
    assert names.count("matmul") == 2 and not {"copy", "to_blocked", "matmul_packed"} & set(names)


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 20, 300), 1), ((20, 300), 0), ((3, 20, 16, 17), 1), ((2, 3, 20, 257), 2)]
)
@pytest.mark.parametrize("layers", [1, 2])
def test_linear_layers_between_a_permutation_and_its_inverse(shape: tuple[int, ...], axis: int, layers: int) -> None:
    stack = [nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 20, bias=False)] if layers == 2 else [nn.Linear(20, 33)]
    names = kernels(Between(axis, *stack), torch.randn(shape), fuse=True)
    assert names.count("matmul") == layers and "copy" not in names


def test_other_permutations_stay_and_few_columns_are_packed() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 2, 1)

    assert "matmul_packed" in kernels(Other(), torch.randn(2, 20, 17, 18))
    assert "matmul_packed" in kernels(Between(1, nn.Linear(20, 20)), torch.randn(2, 20, 9))


def test_read_twice_the_rows_are_packed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x.permute(0, 2, 1))
            return y.permute(0, 2, 1) + y.sum()

    assert "matmul_packed" in kernels(Twice(), torch.randn(2, 4, 300))


@pytest.mark.parametrize("after", [nn.Identity, nn.ReLU, nn.BatchNorm2d, lambda o: nn.Conv2d(o, 3, 3)])
@pytest.mark.parametrize(("channels", "outputs"), [(3, 8), (20, 1), (5, 40)])
def test_convolutions_of_single_pixels(channels: int, outputs: int, after: Any) -> None:
    """Images in blocks stay such."""
    behind = after(outputs) if after in (nn.BatchNorm2d,) or not isinstance(after, type) else after()
    for fuse, batch in itertools.product((False, True), (1, 2)):
        x = torch.randn(batch, channels, 9, 11)
        names = kernels(nn.Sequential(nn.Conv2d(channels, outputs, 1), behind), x, fuse=fuse)
        assert ("matmul" in names) == (outputs < 16 and not isinstance(behind, nn.Conv2d))
        kernels(nn.Sequential(nn.Conv2d(channels, 16, 3), nn.Conv2d(16, outputs, 1), behind), x, fuse=fuse)


EINSUMS = {
    "bhij,hg->bgij": ((2, 8, 5, 6), (8, 3)),
    "ij,bjd->bid": ((7, 5), (3, 5, 20)),
    "vw,nctw->nctv": ((5, 5), (2, 3, 4, 5)),
    "bld,nl->bnd": ((2, 6, 17), (9, 6)),
    "bchw,oc->bohw": ((2, 3, 4, 5), (6, 3)),
    "gh,ahbijh->abgij": ((3, 4), (2, 4, 3, 4, 5, 4)),
}


@pytest.mark.parametrize("equation", EINSUMS)
@pytest.mark.parametrize("free", [False, True])
def test_sums_come_in_the_order_of_the_result(equation: str, free: bool) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.einsum(equation, x, y)

    inputs = [torch.randn(s) for s in EINSUMS[equation]]
    net: Any = torch2needle.convert(Sum(), tuple(inputs), dynamic="auto" if free else False)
    exe: Any = ndl.compile(net, tuple(inputs))
    want = torch.einsum(equation, *(x.double() for x in inputs)).numpy()
    assert np.allclose(exe(*inputs).numpy(), want, rtol=1e-5, atol=1e-5)
    assert np.allclose(net(*inputs).numpy(), want, rtol=1e-5, atol=1e-5)
    assert "copy" not in exe.plan.names or "ahbijh" in equation


@pytest.mark.parametrize(
    ("shape", "axis", "outputs"), [((1, 1, 300), 1, 1), ((0, 4, 300), 1, 5), ((1, 5, 1, 400), 1, 3)]
)
def test_axes_of_one_element_and_batches_of_none(shape: tuple[int, ...], axis: int, outputs: int) -> None:
    x, net = torch.randn(shape), Between(axis, nn.Linear(shape[axis], outputs), nn.ReLU()).eval()
    exe: Any = ndl.compile(torch2needle.convert(net, (x,), dynamic=False), (x,))
    want = copy.deepcopy(net).double()(x.double()).detach().numpy()
    got = exe(x).numpy()
    assert got.shape == want.shape and np.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_heads_of_other_lengths() -> None:
    """One plan each; short ones are packed."""
    net = Heads(4, linear=True).eval()
    exe: Any = torch2needle.compile(net, (torch.randn(1, 4, 23, 23), torch.randn(23, 23)))
    for batch, n in ((1, 23), (2, 40), (1, 5), (2, 1)):
        a, mask = torch.randn(batch, 4, n, n), torch.randn(n, n)
        want = copy.deepcopy(net).double()(a.double(), mask.double()).detach().numpy()
        assert np.abs(exe(a, mask).numpy() - want).max() <= 1e-6


def test_steps_of_training() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), Between(1, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    exact, x, y = copy.deepcopy(net).double(), torch.randn(4, 2, 3, 16, 17), torch.randn(4, 2, 4, 16, 17)
    made: Any = torch2needle.convert(net, (x[0],))
    optimizer = ndl.optim.SGD(made.train().parameters(), lr=0.1)
    step: Any = ndl.compile_step(made, ndl.nn.MSELoss(), optimizer, (x[0].numpy(), y[0].numpy()))
    theirs = torch.optim.SGD(exact.parameters(), lr=0.1)
    for inputs, target in zip(x, y, strict=True):
        theirs.zero_grad()
        loss = nn.functional.mse_loss(exact(inputs.double()), target.double())
        loss.backward()
        theirs.step()
        assert abs(float(step(inputs.numpy(), target.numpy())) - loss.item()) <= 1e-5 * loss.item()
