"""Rules of arithmetic, comparison, reductions and casts: every spelling against torch, without and with an example."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from conversion import converts, leaves, placed  # noqa: E402
from gpu_devices import everywhere  # noqa: E402

X = (3, 8)
XY = ((3, 8), (3, 8))
INTS = torch.tensor([[5, -7, 3, 0], [2, 9, -4, 1]])
MASK = torch.tensor([[True, False, True, True], [False, False, True, False]])


class Takes(nn.Module):
    """A module around a function of several inputs."""

    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.f = f
        self.count = f.__code__.co_argcount

    def forward(self, x: Any, y: Any = None, z: Any = None) -> Any:
        return self.f(*(x, y, z)[: self.count])


class One(Takes):
    def forward(self, x: Any) -> Any:
        return self.f(x)


class Two(Takes):
    def forward(self, x: Any, y: Any) -> Any:
        return self.f(x, y)


class Three(Takes):
    def forward(self, x: Any, y: Any, z: Any) -> Any:
        return self.f(x, y, z)


def agrees(f: Callable, *shapes: Any, example: Any = (False, True), **options: Any) -> None:
    """`converts`, without and with an example; dtypes too, and numbers that are no floats exactly."""
    model = (One, Two, Three)[len(shapes) - 1](f)
    for known in example:
        net = converts(model, *shapes, example=known, **options)
        inputs = tuple(torch.randn(s) if isinstance(s, tuple) else s for s in shapes)
        got, want = leaves(net(*placed(inputs))), leaves(model(*inputs))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == str(w.dtype).removeprefix("torch.")
            if not w.dtype.is_floating_point:
                np.testing.assert_array_equal(g.numpy(), w.numpy())


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.abs() + 0.5


ARITHMETIC: list[tuple[Callable, tuple]] = [
    (lambda x: 2 - x + 3 * x - x / 4, (X,)),
    (lambda x: 1 / (x * x + 1) + (-x) ** 2, (X,)),
    (lambda x: torch.add(x, x, alpha=2) - torch.sub(x, 1, alpha=3), (X,)),
    (lambda x: torch.rsub(x, 3, alpha=2) + torch.subtract(x, 1) + x.multiply(2), (X,)),
    (lambda x: torch.div(x, 0.3, rounding_mode="floor") + torch.div(x, 2, rounding_mode="trunc") + x, (X,)),
    (
        lambda x, y: (
            torch.div(x, y, rounding_mode="floor")
            + x * y
            + x.detach() // (y.detach() + 3)
            + torch.floor_divide(x.detach(), 0.1)
        ),
        XY,
    ),
    (lambda x: x // 2 + x % 3 + torch.fmod(x, 3) + torch.remainder(x, -3), (INTS,)),
    (lambda x, y: x % y + torch.remainder(x, 0.7) + torch.fmod(x, y) + x.remainder(2), XY),
    (lambda x: 7 // x.detach() + 5 % x.detach(), (torch.tensor([[2.0, 3.0], [-4.0, 0.3]]),)),
    (lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.addcdiv(x, x, y.abs() + 1, value=2), XY),
    (lambda x, y: torch.lerp(x, y, 0.3) + torch.lerp(x, y, torch.sigmoid(x)) + torch.square(x), XY),
    (lambda x, y: (x.abs() + 0.5) ** y + 2**x + torch.pow(0.5, y) + positive(x).pow(-1.5), XY),
    (lambda x: torch.exp(x) + torch.exp2(x) + torch.expm1(x) + x.exp(), (X,)),
    (lambda x: torch.expm1(x * 1e-4), (X,)),
    (lambda x: torch.log1p(x.abs() * 1e-5), (X,)),
    (lambda x: torch.log(positive(x)) + positive(x).log2() + torch.log10(positive(x)) + torch.log1p(x.abs()), (X,)),
    (lambda x: positive(x).sqrt() + torch.rsqrt(positive(x)) + torch.reciprocal(positive(x)), (X,)),
    (lambda x: torch.sin(x) + x.cos() + torch.tan(x) + torch.erf(x), (X,)),
    (lambda x: x + torch.sign(x) + torch.floor(x) + x.ceil() + torch.trunc(x) + torch.frac(x), (X,)),
    (lambda x: x + torch.round(x * 3) + torch.round(x, decimals=2), (X,)),
    (lambda x: abs(x) + torch.neg(x) + torch.negative(x) + torch.positive(x) + (+x), (X,)),
    (lambda x: x.clamp(-0.5, 0.5) + torch.clamp(x, min=0.1) + torch.clamp(x, max=0.2) + x.clip(min=-1), (X,)),
    (lambda x, y: x.clamp_min(0.1) + torch.clamp_max(x, 0.3) + x.clamp(min=y) + torch.clamp(x, max=y), XY),
    (lambda x: x.clamp(min=1) + torch.clamp(x, -2, 3), (INTS,)),
    (lambda x, y: torch.maximum(x, y) + torch.minimum(x, y) + torch.max(x, y) * x.min(y), XY),
    (lambda x: x.clone().add_(1).mul_(2).div_(3).sub_(x).pow_(2).clamp_(0.1, 2).sqrt_(), (X,)),
]
PRODUCTS: list[tuple[Callable, tuple]] = [
    (lambda x: torch.matmul(x, x.transpose(0, 1)) + x @ x.permute(1, 0) + torch.mm(x, x.t()) + x.mm(x.T), (X,)),
    (lambda x, y: torch.bmm(x, y) + x.bmm(y) + torch.baddbmm(x @ y, x, y, beta=0.5, alpha=2), ((2, 3, 4), (2, 4, 5))),
    (lambda x, y: torch.addmm(x @ y, x, y, beta=2, alpha=0.5) + torch.addmm(y[0], x, y), ((3, 4), (4, 5))),
    (lambda x, y: torch.addbmm(x[0] @ y[0], x, y), ((2, 3, 4), (2, 4, 5))),
    (lambda x: torch.mv(x, x[0]) + x.mv(x[1]) + torch.dot(x[0], x[1]) + x @ x[2], (X,)),
    (lambda x: torch.outer(x[0], x[1]) + torch.ger(x[1], x[0]) + torch.inner(x, x)[0, 0], (X,)),
    (lambda x, y, z: F.bilinear(x, y, z), ((3, 4), (3, 5), (6, 4, 5))),
]
EINSUMS: list[tuple[str, tuple]] = [
    ("ij,jk->ik", ((3, 4), (4, 5))),
    ("bij,bjk", ((2, 3, 4), (2, 4, 5))),
    ("bhid,bhjd->bhij", ((2, 3, 4, 5), (2, 3, 6, 5))),
    ("bhij,bhjd->bihd", ((2, 3, 4, 6), (2, 3, 6, 5))),
    ("bchw,hkc->bkwh", ((2, 3, 4, 5), (4, 6, 3))),
    ("nchw,nc->nhw", ((2, 3, 4, 5), (2, 3))),
    ("i,j->ij", ((3,), (4,))),
    ("bi,bi->b", ((3, 4), (3, 4))),
    ("ij->ji", ((3, 4),)),
    ("ij->j", ((3, 4),)),
    ("ij->", ((3, 4),)),
    ("bn,anm,bm->ba", ((3, 4), (5, 4, 6), (3, 6))),
    ("ij,kl->jl", ((3, 4), (5, 6))),
    ("bij,ij->bji", ((2, 3, 4), (3, 4))),
    ("ii->i", ((4, 4),)),
    ("bii->b", ((2, 4, 4),)),
]
COMPARISONS: list[tuple[Callable, tuple]] = [
    (lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y), XY),
    (lambda x: (x == 0, x != 3, x < 1, x <= 2, x > 0.5, x >= 1, 1 < x, 2 >= x), (INTS,)),
    (lambda x: (x > 0, x.eq(0), torch.ne(x, 1), x.ge(0.5), torch.lt(x, 0), 0.5 <= x), (X,)),
    (lambda x, y: (x & y, x | y, x ^ y, ~x, torch.logical_and(x, y), x.logical_or(y)), (MASK, MASK[:, :1])),
    (lambda x: (torch.logical_not(x), x.logical_and(x > 2), torch.logical_xor(x, x < 0), ~x), (INTS,)),
    (lambda x: (x > 0) & (x < 1) | ~(x > -1), (X,)),
    (
        lambda x: torch.isnan(x / x) | torch.isinf(1 / x) | ~torch.isfinite(x),
        (torch.tensor([[0.0, 1.0], [-2.0, 0.0]]),),
    ),
    (lambda x, y: torch.where(x > 0, x, y) + torch.where(x > 0, x, 0.5) + torch.where(x < 0, 1, y), XY),
    (lambda x: (torch.where(x > 2, x, 0), torch.where(x > 2, x, 0.5), torch.where(x > 2, 1, 0)), (INTS,)),
    (lambda x, y: x.where(y > 0, y) + torch.where(y > 0, 1.0, 0.0) * x, XY),
    (lambda x: x.masked_fill(x > 0.5, -math.inf).softmax(-1) + torch.masked_fill(x, x < 0, 2), (X,)),
    (lambda x: x.masked_fill(x > 2, 0) * 2, (INTS,)),
    (lambda x: x.clone().masked_fill_(x > 0.5, 0.25), (X,)),
]
REDUCTIONS: list[tuple[Callable, tuple]] = [
    (lambda x: x.mean(1, keepdim=True) + x.sum(dim=-1, keepdim=True) + x.sum() + torch.mean(x), (X,)),
    (lambda x: x.mean([2, 3]) + torch.mean(x, (2, 3)) + x.sum(axis=(2, 3)), ((2, 4, 5, 3),)),
    (lambda x: (x.sum(1), x.sum(), (x > 1).sum(0), x.prod(1), x.amax(0)), (INTS,)),
    (lambda x: torch.prod(x, 1) + x.prod(-1, keepdim=True).squeeze(-1) + torch.prod(x), (X,)),
    (lambda x: torch.amax(x, 1) + x.amin((0, 1)) + x.amax(dim=(0, 2)).sum() + x.amax(), ((2, 4, 5),)),
    (lambda x: x.max() + x.min() + torch.max(x) - torch.min(x), (X,)),
    (lambda x: x.max(1).values + torch.max(x, dim=1)[0] - x.min(-1)[0] + torch.min(x, 1, True).values[:, 0], (X,)),
    (lambda x: (x.max(1), torch.min(x, 0, keepdim=True)), (X,)),
    (lambda x: F.relu(x).max(0).values, (X,)),
    (lambda x: (x.argmax(), torch.argmax(x, 1), x.argmin(dim=0, keepdim=True), x.argmin()), (X,)),
    (lambda x: (x.max(1)[1], x.argmax(0)), (INTS,)),
    (lambda x: torch.var(x, 1) + x.var(1, unbiased=False) + x.var(dim=1, correction=2) + torch.std(x, -1), (X,)),
    (lambda x: x.var() + x.std() + torch.var(x, (0, 1), keepdim=True) + x.std(False), (X,)),
    (lambda x: torch.var_mean(x, 1, keepdim=True), (X,)),
    (lambda x: torch.logsumexp(x, 1) + x.logsumexp(-1, keepdim=True).squeeze(1) + x.logsumexp((0, 1)), (X,)),
    (lambda x: torch.logsumexp(x, (-1, -3), keepdim=True), ((2, 4, 5),)),
    (lambda x: (torch.all(x > -1), (x > 0).any(1), x.gt(0).all(dim=1, keepdim=True), torch.any(x > 2)), (X,)),
    (lambda x: torch.cumsum(x, 1) + x.cumsum(dim=0) + x.cumsum(-1), (X,)),
    (lambda x: (x.cumsum(1), (x > 0).cumsum(0), torch.count_nonzero(x, 1)), (INTS,)),
    (lambda x: (x.diff(), torch.diff(x, n=2, dim=0), x.diff(n=9), x.diff(n=0, dim=1)), (X,)),
    (lambda x: (x.diff(dim=0, prepend=x[:1]), torch.diff(x, 1, -1, x, x)), (INTS,)),
    (lambda x: torch.sort(x, 1).values + x.sort(dim=-1, descending=True)[0], (X,)),
    (lambda x: (x.argsort(), torch.topk(x, 3).indices, x.topk(2, dim=0, largest=False)[1]), (X,)),
    (lambda x: torch.topk(x, 3, 1)[0] + x.topk(3, largest=False).values, (X,)),
    (lambda x: torch.sort(x, dim=1, descending=True, stable=True), (torch.tensor([[2, 1, 2, 0, 1]]),)),
    (lambda x: torch.norm(x) + x.norm(2, 1) + x.norm(p=1, dim=-1) + torch.linalg.vector_norm(x, math.inf, 1), (X,)),
    (lambda x: torch.linalg.vector_norm(x) + torch.linalg.norm(x, dim=1) + x.norm(3.0, 1, True).squeeze(1), (X,)),
    (lambda x: (x * 0).norm(dim=1) + x.sum(), (X,)),
    (lambda x, y: F.cosine_similarity(x, y) + torch.cosine_similarity(x, y, dim=-1, eps=0.1), XY),
    (lambda x, y: F.pairwise_distance(x, y), XY),
]
CASTS: list[tuple[Callable, tuple]] = [
    (lambda x: x.float() + x.half().float() * 0 + x.to(torch.float32) + x.to("cpu") + x.type_as(x), (X,)),
    (lambda x: (x * 3).long() + (x * 3).int() + (x > 0).to(torch.int64) + (x > 0).type(torch.int32), (X,)),
    (lambda x: ((x * 3).int(), x.bool(), (x > 0).float(), (x > 0).type("torch.LongTensor")), (X,)),
    (lambda x, y: x.to(y) + x.type_as(y) + x.to(y.dtype) + x.to(dtype=torch.float32), (INTS, (2, 4))),
    (lambda x: x.to(x.device, torch.float32, non_blocking=True) * (x > 0).to(x.dtype), (X,)),
    (lambda x: x / 2 + x.float().mean() + x.double().float(), (INTS,)),
]


@everywhere
@pytest.mark.parametrize(("f", "shapes"), ARITHMETIC)
def test_arithmetic(f: Callable, shapes: tuple) -> None:
    agrees(f, *shapes, example=(True,) if shapes[0] is not X and len(shapes) == 1 else (False, True))


@everywhere
@pytest.mark.parametrize(("f", "shapes"), PRODUCTS)
def test_products(f: Callable, shapes: tuple) -> None:
    agrees(f, *shapes, batch=False)


@everywhere
@pytest.mark.parametrize(("equation", "shapes"), EINSUMS, ids=[e for e, _ in EINSUMS])
def test_einsum(equation: str, shapes: tuple) -> None:
    functions = [
        lambda x: torch.einsum(equation, x),
        lambda x, y: torch.einsum(equation, x, y),
        lambda x, y, z: torch.einsum(equation, [x, y, z]),
    ]
    agrees(functions[len(shapes) - 1], *shapes, batch=False)


def test_einsum_with_an_order_of_its_products() -> None:
    """As torch.export has it where opt_einsum is installed."""
    aten, others = torch.ops.aten.einsum.default, (torch.ones(3, 4), torch.ones(4, 5))
    agrees(lambda x, y, z: aten("ij,jk,kl->il", [x, y, z], path=[1, 2, 0, 1]), (2, 3), *others, batch=False)


@everywhere
@pytest.mark.parametrize("equation", ["...ij,...jk->...ik", "b...d,de->b...e", "...hd,hd"])
def test_einsum_with_an_ellipsis(equation: str) -> None:
    shapes = {"...hd,hd": ((2, 3, 4, 5), (4, 5)), "b...d,de->b...e": ((2, 3, 4), (4, 5))}
    f = lambda x, y: torch.einsum(equation, x, y)  # noqa: E731
    agrees(f, *shapes.get(equation, ((2, 3, 4, 5), (5, 6))), batch=False, example=(True,))


@everywhere
@pytest.mark.parametrize(("f", "shapes"), COMPARISONS)
def test_comparison(f: Callable, shapes: tuple) -> None:
    agrees(f, *shapes)


@everywhere
@pytest.mark.parametrize(("f", "shapes"), REDUCTIONS)
def test_reduction(f: Callable, shapes: tuple) -> None:
    agrees(f, *shapes)


@everywhere
def test_diff_of_masks() -> None:
    """Comparisons are masks without an example, too; where nothing tells, their differences are refused, not wrong."""
    agrees(lambda x: (x > 0).diff(append=x[:, :1] > 1), INTS)
    net = torch2needle.convert(One(lambda x: x.diff()))
    with pytest.raises(TypeError, match=r"\[negate\] expects numbers, got bools"):
        net(*placed((MASK,)))


@everywhere
@pytest.mark.parametrize(("f", "shapes"), CASTS)
def test_cast(f: Callable, shapes: tuple) -> None:
    agrees(f, *shapes)


def test_half_precision_is_noted() -> None:
    net = torch2needle.convert(One(lambda x: x.half() + x.to(torch.bfloat16)))
    assert sum("16-bit" in n for n in net.report.notes) >= 1


REFUSED: dict[str, tuple[Callable, str]] = {
    "uint32": (lambda x: x.to(torch.uint32), "uint32"),
    "rounding mode": (lambda x: torch.div(x, 2, rounding_mode="up"), "rounding_mode expects"),
    "where of one": (lambda x: torch.where(x > 0)[0], "as many results"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    f, text = REFUSED[name]
    with pytest.raises(torch2needle.ConversionError, match=text):
        torch2needle.convert(One(f))
