"""Rules of rarer functions against torch: divisors, floats by bits, modes, held norms, incomplete gammas, copies of views."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, leaves  # noqa: E402
from gpu_devices import compiles  # noqa: E402
from test_rules_arithmetic import Two  # noqa: E402

torch.manual_seed(0)
WHOLE = torch.tensor([[0, 4, -6, 0], [2**40, 13, 9, -27]]), torch.tensor([[0, -6], [3 * 2**20, 27]])[:, :1]
HARD = torch.tensor([[0.0, -0.0, 1.0, -4.0, 0.75], [float("inf"), float("nan"), 3.4e38, 1e-37, -1.0]])
FEW = torch.randint(0, 3, (6, 5, 4))
X = torch.rand(4, 6) + 0.1
PAIR = torch.rand(2, 3, 5)


class Weighted(nn.Module):
    """f of the first input, times a parameter where it is of floats, and of the others."""

    def __init__(self, f: Callable, x: Any) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.ones_like(x)) if x.is_floating_point() else None

    def forward(self, *args: Any) -> Any:
        first = args[0] if self.w is None else args[0] * self.w
        return self.f(first, *args[1:])


CALLS: dict[str, tuple] = {
    "gcd": (torch.gcd, *WHOLE),
    "gcd of int32": (torch.gcd, WHOLE[0].int(), torch.tensor(6, dtype=torch.int32)),
    "lcm": (torch.lcm, WHOLE[0] % 1000, WHOLE[1] % 1000),
    "frexp": (torch.frexp, HARD),
    "frexp of float64": (torch.Tensor.frexp, HARD.double() * 2.0**-800),
    "mode": (lambda x: tuple(torch.mode(x, 1)), FEW),
    "mode of floats": (lambda x: tuple(x.mode(-1, keepdim=True)), FEW.float()),
    "mode of one": (lambda x: tuple(torch.mode(x)), torch.rand(3, 1)),
    **{f"renorm {p}": (lambda x, p=p: torch.renorm(x, p, 1, 1.0), X) for p in (1, 2, 3.5, float("inf"))},
    "sum_to_size": (lambda x: (x.sum_to_size(6), x.sum_to_size((4, 1)), x.sum_to_size(4, 6)), X),
    "igamma": (lambda x, a: torch.igamma(a, x), X * 40, X.flip(0) * 40),
    "igammac": (lambda x, a: torch.special.gammaincc(a, x), X * 40, X.flip(0) * 40),
    "lu_unpack": (lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x @ x.mT + x.mean())), PAIR),
    "lu_unpack of a wide one": (lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x.detach())), PAIR),
    "lu_unpack of a high one": (lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x.detach().mT))[0], PAIR),
    "combinations": (lambda x: torch.combinations(x[:, 0], 2), X),
    "combinations again": (lambda x: torch.combinations(x[:, 0], 3, with_replacement=True), X),
    "combinations of too few": (lambda x: torch.combinations(x[:2, 0], 3), X),
    "cartesian_prod": (lambda x: torch.cartesian_prod(x[0], x[1, :2]), X),
    "tensordot": (lambda x: torch.tensordot(x, x + 1, dims=([0], [0])), X),
    "H": (lambda x: x.H, X),
    "permute_copy": (lambda x: torch.permute_copy(x, (1, 0)), X),
    "slice_copy": (lambda x: torch.slice_copy(x, 1, 1, 5, 2), X),
    "split_copy": (lambda x: torch.split_with_sizes_copy(x, [1, 3]), X),
    "unfold_copy": (lambda x: torch.unfold_copy(x, 1, 2, 2), X),
    "a write to a copy": (lambda x: torch.view_copy(x, (6, 4)).mul_(3).sum(0) * x.view(6, 4), X),
    "fake_quantize": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.07, 2, -8, 7), X),
    "fake_quantize per channel": (
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.tensor([0.1, 0.2, 0.05, 1.0]), torch.tensor([0, 1, -2, 3], dtype=torch.int32), 0, -8, 7
        ),
        X,
    ),
    "histogram": (lambda x: tuple(torch.histogram(x.detach(), 5)), X),
    "histogram of a range": (
        lambda x, w: tuple(x.detach().histogram(4, range=(0.25, 0.75), weight=w, density=True)),
        *(X, torch.rand(4, 6)),
    ),
    "histogram of edges": (lambda x, b: tuple(torch.histogram(x.detach(), b)), X, torch.tensor([0.0, 0.3, 0.4, 1.1])),
    "histogram of one value": (lambda x: tuple(torch.histogram(x.detach(), 3)), torch.ones(4)),
    "nonzero_static": (lambda x: torch.nonzero_static(x, size=13), FEW[0]),
    "nonzero_static of few": (lambda x: x.nonzero_static(size=40, fill_value=7), FEW[0].float()),
    "nonzero_static of none": (lambda x: torch.nonzero_static(x, size=2), torch.ones(0, 3)),
    **{
        f"segment_reduce {r}": (lambda x, n, r=r: torch.segment_reduce(x, r, lengths=n), X, torch.tensor([1, 0, 3]))
        for r in ("sum", "mean", "max", "min", "prod")
    },
    "segment_reduce with offsets": (
        lambda x, n: torch.segment_reduce(x, "max", offsets=n, initial=0.5),
        *(X, torch.tensor([0, 2, 2, 4])),
    ),
    **{
        f"ormqr {left} {t}": (
            lambda x, a, tau, left=left, t=t: torch.ormqr(a, tau, x if left else x.mT, left, t),
            *(X, *torch.geqrf(torch.rand(4, 3))),
        )
        for left in (True, False)
        for t in (True, False)
    },
    "native_batch_norm": (lambda x: torch.native_batch_norm(x, X[0], None, None, None, True, 0.1, 1e-3), X),
    "view_as_complex_copy": (lambda x: torch.view_as_complex_copy(x.detach().view(4, 3, 2)).abs(), X),
    "new_empty_strided": (lambda x: x.new_empty_strided((2, 3), (1, 2)).fill_(2) * x[:2, :3], X),
    "pad_sequence": (lambda x, y: nn.utils.rnn.pad_sequence([x, y], padding_value=-1.0), X, torch.rand(7, 6)),
    "pad_sequence left": (lambda x, y: nn.utils.rnn.pad_sequence([x, y], True, 0.0, "left"), X, torch.rand(2, 6)),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_torch(name: str) -> None:
    f, *inputs = CALLS[name]
    model = Weighted(f, inputs[0]).eval()
    net = torch2needle.convert(model, tuple(inputs))
    theirs = model(*inputs)
    mine = net(*inputs)
    for got in (mine, ndl.compile(net, tuple(inputs))(*inputs)) if compiles() else (mine,):
        close(got, theirs)
        assert [str(t.dtype).removeprefix("torch.") for t in leaves(got)] == [str(t.dtype)[6:] for t in leaves(theirs)]
    grown = [(a, b) for a, b in zip(leaves(mine), leaves(theirs), strict=True) if b.requires_grad]
    if grown and not name.startswith("frexp"):  # which has infinities
        sum((b**3).sum() for _, b in grown).backward()
        total: Any = 0
        for a, _ in grown:
            total = ndl.ops.summation(a * a * a) + total
        total.backward()
        close(net.w.grad, model.w.grad, 1e-4)


def test_incomplete_gammas_far_out() -> None:
    a = torch.tensor([0.0, 2.0, 2.0, 0.0, -1.0, 1e-3, 30.0, 300.0, 1e4, 1e4, float("inf"), 2.0], dtype=torch.float64)
    x = torch.tensor(
        [2.0, 0.0, float("inf"), 0.0, 1.0, 5.0, 29.0, 330.0, 9.9e3, 1.01e4, 3.0, -1.0], dtype=torch.float64
    )
    for f in (torch.igamma, torch.igammac):
        net = torch2needle.convert(Weighted(f, torch.tensor(0)).eval(), (a, x))
        np.testing.assert_allclose(net(a, x).numpy(), f(a, x).numpy(), rtol=1e-8, atol=1e-12)


def test_the_logarithm_of_gamma_is_zero_at_one_and_two() -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.lgamma(x)

    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([1.0, 2.0, 1.5, 0.0, -1.0, math.inf, math.nan, -0.5], dtype=dtype)
        given = ndl.Tensor(x.numpy(), dtype=str(dtype).removeprefix("torch."), requires_grad=True)
        got = torch2needle.convert(Log(), x)(given)
        np.testing.assert_allclose(got.numpy(), torch.lgamma(x).numpy(), rtol=1e-6, atol=0)
        assert got.numpy()[0] == got.numpy()[1] == 0
        got.sum().backward()
        np.testing.assert_allclose(given.grad.numpy()[:3], torch.digamma(x[:3]).numpy(), rtol=1e-5)


def test_zeta_of_every_two_corners() -> None:
    corners = [
        math.inf,
        -math.inf,
        math.nan,
        1.0,
        0.0,
        -0.0,
        2.0,
        1e308,
        -1e308,
        5e-324,
        -1.0,
        -2.0,
        -2.5,
        0.5,
        3.0,
        1.5,
    ]
    s, q = (t.flatten() for t in torch.meshgrid(*[torch.tensor(corners, dtype=torch.float64)] * 2, indexing="ij"))
    model = Two(lambda s, q: torch.special.zeta(s, q))
    got = torch2needle.convert(model, (s, q))(s, q)
    np.testing.assert_allclose(got.numpy(), model(s, q).numpy(), rtol=1e-12)
