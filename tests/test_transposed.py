"""Arrays that lie in another order than their axes: maps and chains of them, and what plans make of tokens of images."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import needle as ndl
import torch2needle
from needle import ops
from needle.backend_ndarray import NDArray, call
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="kernels and plans")

SHAPES = [(1, 1, 1), (2, 3, 4), (1, 5, 130), (2, 129, 17), (3, 16, 64), (2, 33, 260)]
ORDERS = list(itertools.permutations(range(3)))


def lying(values: np.ndarray, order: tuple[int, ...]) -> NDArray:
    """The values in an array whose axes lie in this order in memory."""
    return NDArray(np.ascontiguousarray(values.transpose(order)), dtype=str(values.dtype)).permute(
        tuple(np.argsort(order))
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_maps_of_operands_in_any_order(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b, c = ((rng.standard_normal(shape) * 9).astype(dtype) for _ in range(3))
    row, column = a[:1, :1], b[:, :, :1]
    for one, two, out in itertools.product(ORDERS, ORDERS, ORDERS[:2]):
        x, y = lying(a, one), lying(b, two)
        for kernel, ins, want in (
            ("relu", {"x": x}, np.maximum(a, 0)),
            ("sub", {"x": x, "y": y}, a - b),
            ("mul", {"x": x, "y": NDArray(row, dtype=dtype).broadcast_to(shape)}, a * row),
            ("add", {"x": NDArray(column, dtype=dtype).broadcast_to(shape), "y": y}, column + b),
            ("where", {"x": x, "y": y, "z": NDArray(c, dtype=dtype)}, np.where(a != 0, b, c)),
        ):
            made = NDArray.empty([shape[i] for i in out], dtype).permute(tuple(np.argsort(out)))
            call(kernel, [made], **ins)
            np.testing.assert_array_equal(made.numpy(), want, f"{kernel} {one} {two} {out}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chains_of_operands_in_any_order(shape: tuple[int, ...]) -> None:
    class Net(ndl.nn.Module):
        def __init__(self, order: tuple[int, ...]) -> None:
            super().__init__()
            self.order = order

        def forward(self, x: ndl.Tensor, y: ndl.Tensor, z: ndl.Tensor) -> ndl.Tensor:
            t = ops.permute(y, self.order)
            return (t * x + x) * t - z + ops.relu(t) * 0.5

    rng = np.random.default_rng(0)
    x, t, z = (rng.standard_normal(s).astype("float32") for s in (shape, shape, (shape[1], 1)))
    for order in ORDERS:
        y = np.ascontiguousarray(t.transpose(np.argsort(order)))
        exe = ndl.compile(Net(order), tuple(map(ndl.Tensor, (x, y, z))))
        want = (t * x + x) * t - z + np.maximum(t, 0) * np.float32(0.5)
        np.testing.assert_allclose(exe(*map(ndl.Tensor, (x, y, z))).numpy(), want, rtol=1e-6, atol=1e-6)


class Tokens(nn.Module):
    """A network of tokens with an image inside, as Segformer's and PVTv2's."""

    def __init__(self, dim: int, hidden: int, seen: str, behind: nn.Module) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.image = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.seen, self.behind = seen, behind

    def forward(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        n, length, _ = x.shape
        y = self.first(self.norm(x))
        y = self.image(y.transpose(1, 2).reshape(n, -1, height, width))
        if self.seen == "flat":
            y = y.flatten(2).transpose(1, 2)
        elif self.seen == "permuted":
            y = y.permute(0, 2, 3, 1).reshape(n, length, -1)
        else:
            y = y.unsqueeze(1).reshape(n, -1, length).permute(0, 2, 1)
        return x + self.last(self.behind(y))


class Net(nn.Module):
    def __init__(self, size: tuple[int, int], **given: Any) -> None:
        super().__init__()
        self.size = size
        self.tokens, self.more = Tokens(**given), nn.LayerNorm(given["dim"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.tokens(x, *self.size))


class Twice(nn.Module):
    """What is read twice stays as it is."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return F.gelu(y) + y


@pytest.mark.parametrize(
    "behind",
    [nn.GELU(), nn.Sigmoid(), nn.Sequential(nn.ReLU(), nn.Softplus()), Twice(), nn.Softmax(-1), nn.Identity()],
    ids=str,
)
@pytest.mark.parametrize("seen", ["flat", "permuted", "squeezed"])
def test_maps_of_tokens_are_done_on_the_image(seen: str, behind: nn.Module) -> None:
    for n, size, hidden in ((1, (1, 1), 16), (2, (7, 9), 5), (3, (4, 17), 40), (1, (14, 14), 64)):
        torch.manual_seed(0)
        net = Net(size, dim=12, hidden=hidden, seen=seen, behind=behind).eval()
        x = torch.randn(n, size[0] * size[1], 12)
        exe: Any = ndl.compile(torch2needle.convert(net, x, dynamic=False), x)
        want = copy.deepcopy(net).double()(x.double()).detach().numpy()
        assert np.abs(exe(x).numpy() - want).max() <= 4e-6 * np.abs(want).max()
        kernels = list(exe.plan.names)
        if isinstance(behind, nn.GELU):
            assert "gelu" not in kernels, kernels
        if size != (1, 1):
            assert "copy" not in kernels, kernels


def test_images_leave_blocks_in_the_order_of_their_readers() -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 32, 3, padding=1)
    for read, copies in (
        (lambda y: y.permute(0, 2, 3, 1).softmax(-1), 0),
        (lambda y: y.softmax(-1), 0),
        (lambda y: y.softmax(-1) + y.permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2), 1),
        (lambda y: y.permute(0, 2, 3, 1), 0),
        (lambda y: (y, y.permute(0, 2, 3, 1)), 1),
    ):

        class Read(nn.Module):
            def __init__(self, read: Any) -> None:
                super().__init__()
                self.first, self.read = first, read

            def forward(self, x: torch.Tensor) -> Any:
                return self.read(self.first(x))

        net, x = Read(read), torch.randn(2, 3, 9, 6)
        exe: Any = ndl.compile(torch2needle.convert(net, x, dynamic=False), x)
        got, want = exe(x), net(x)
        for g, w in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, want)), strict=True):
            np.testing.assert_allclose(g.numpy(), w.detach().numpy(), rtol=1e-5, atol=1e-6)
        assert list(exe.plan.names).count("copy") == copies, exe.plan.names
