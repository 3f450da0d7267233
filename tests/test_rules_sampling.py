"""Rules of grids, windows, distances and bags of embeddings, of rarer functions, orders and matrices, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import converts  # noqa: E402
from test_rules_arithmetic import One, agrees  # noqa: E402
from torch2needle.capture.calls import shuffled  # noqa: E402

torch.manual_seed(0)
MATRIX, CUBE, SQUARE, LINE = (5, 4), (3, 5, 3), (4, 4), (6,)
S, L = torch.special, torch.linalg
KNOWN = (True,)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grids(mode: str, padding: str, align: bool) -> None:
    f = lambda x, g: F.grid_sample(x, g * 1.3, mode, padding, align)  # noqa: E731
    agrees(f, (2, 3, 5, 4), (2, 3, 7, 2), tolerance=2e-5)
    agrees(f, (1, 2, 1, 6), (1, 4, 1, 2), example=KNOWN, tolerance=2e-5)
    if mode != "bicubic":
        agrees(f, (2, 2, 3, 4, 5), (2, 2, 3, 4, 3), example=KNOWN, tolerance=2e-5)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_grids_read_nothing_beside_the_image(mode: str, padding: str, rank: int) -> None:
    """NaN at the edges stays out of what lies beside them, in results and gradients, dense and through strides."""
    x, grid = torch.randn(2, 3, *(6, 5, 4)[:rank]), torch.rand(2, *(9, 8, 5)[:rank], rank) * 4 - 2
    x[0, 1].view(-1)[[0, -1]] = x[1, 2].view(-1)[-1] = math.nan
    dy = torch.randn(2, 3, *grid.shape[1:-1])
    for given in ((x, grid), (x.flip(1).transpose(-1, -2), grid.transpose(1, 2))):
        theirs = [t.detach().clone().requires_grad_() for t in given]
        ours = [ndl.Tensor(t.numpy(), requires_grad=True) for t in given]
        want = F.grid_sample(*theirs, mode, padding, False)
        got = ndl.ops.grid_sample(*ours, mode, padding)
        seeds = dy.transpose(2, 3) if given[1] is not grid else dy
        want.backward(seeds)
        got.backward(ndl.Tensor(seeds.numpy()))
        pairs = [(got.numpy(), want.detach()), *((a.grad.numpy(), b.grad) for a, b in zip(ours, theirs, strict=True))]
        for a, b in pairs if padding == "zeros" else pairs[:2]:  # torch has 0 x NaN where padding holds the grid still
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
@pytest.mark.parametrize("align", [False, True])
def test_affine_grids(align: bool) -> None:
    agrees(lambda t: F.affine_grid(t, (2, 3, 4, 5), align), (2, 2, 3), batch=False)
    agrees(lambda t: F.affine_grid(t, [2, 1, 3, 1, 5], align), (2, 3, 4), batch=False)


def overlapping(x: torch.Tensor) -> torch.Tensor:
    """Chunks of which each begins in the middle of the one before, as Longformer has them."""
    chunks = x.view(x.shape[0], 2, 4, 3)
    size, stride = list(chunks.size()), list(chunks.stride())
    return chunks.as_strided((size[0], 3, *size[2:]), (stride[0], stride[1] // 2, *stride[2:]))


@pytest.mark.parametrize(
    "f",
    [
        overlapping,
        lambda x: torch.as_strided(x * 2, (2, 3), (1, 2), 3),
        lambda x: torch.as_strided_copy(x[1:], (2, 3), (1, 2)).mul_(2) + x[:1, :2],
        lambda x: torch.as_strided(x[1:], (2, 3), (1, 2)),
        lambda x: torch.as_strided(x[1:], (2, 3), (3, 2), 25),
        lambda x: x.transpose(1, 2).as_strided((2, 2, 2), (24, 1, 2)) * 3,
    ],
)
def test_strides_of_dense_memory(f: Callable) -> None:
    agrees(f, (2, 8, 3), example=KNOWN, batch=f is overlapping)


def test_strides_from_before_a_part_are_refused() -> None:
    """Also of a program, which nothing is compared with."""
    f = lambda x: torch.as_strided(x[1:], (2, 3), (1, 2), 0)  # noqa: E731
    program = torch.export.export(One(f), (torch.randn(2, 8, 3),))
    for model in (One(f).eval(), program):
        with pytest.raises(torch2needle.ConversionError, match="as_strided"):
            torch2needle.convert(model, (torch.randn(2, 8, 3),))


def test_a_spatial_transformer() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Linear(3 * 6 * 6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3).tanh(), x.size(), align_corners=False)
            return F.grid_sample(x, grid, align_corners=False)

    converts(Turns(), (2, 3, 6, 6), example=True, tolerance=2e-5)


CASES: list[tuple[Callable, Any]] = [
    (lambda x: x.unfold(1, 3, 2) * 2, (2, 9, 3)),
    (lambda x: x.unfold(-1, 2, 1).sum(-1), MATRIX),
    (lambda x: x.unfold(0, 5, 1), MATRIX),
    (lambda x: x.sum().unfold(0, 1, 1) * x.sum().unfold(-1, 1, 2), MATRIX),
    (lambda x: x.sum().unfold(0, 0, 1), MATRIX),
    (lambda x: torch.stack(torch.meshgrid(x[:, 0], x[0], indexing="ij")), MATRIX),
    (lambda x: torch.meshgrid(x[:, 0], x[0], x[:2, 1], indexing="xy"), MATRIX),
    (lambda x: torch.meshgrid([x[:, 0], x[0]], indexing="ij")[1], MATRIX),
    (lambda x: torch.cdist(x, x * 2 - 1), MATRIX),
    (lambda x: torch.cdist(x, x[:, :2]) + torch.cdist(x, x[:, :2], p=1) + torch.cdist(x, x[:, :2], p=math.inf), CUBE),
    (lambda x: torch.cdist(x, x[:2], p=3.5), MATRIX),
    (lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 0.5, 2.0]), x), MATRIX),
    (lambda x: torch.searchsorted(x.sort(-1)[0], x, right=True), MATRIX),
    (lambda x: torch.bucketize(x.round(), torch.tensor([-1.0, 0.0, 1.0]), right=True, out_int32=True), MATRIX),
    (lambda x: x.median() + x.median(1)[0].sum() + torch.median(x, 0, keepdim=True)[0], MATRIX),
    (lambda x: torch.where(x > 2, float("nan"), x).median(0)[0].nan_to_num(7.0), MATRIX),
    (lambda x: (x.kthvalue(2, 0), x.kthvalue(3, keepdim=True), torch.msort(x)), MATRIX),
    (lambda x: torch.trapezoid(x) + torch.trapezoid(x, torch.tensor([0.0, 1, 3, 4])) + torch.trapz(x, dx=0.5), MATRIX),
    (lambda x: torch.isin((x * 2).long(), torch.tensor([1, -1])), MATRIX),
    (lambda x: torch.nansum(x / x, 1) + torch.nanmean(x) + torch.dist(x, x * 2) + torch.dist(x, x * 2, 1), MATRIX),
    (lambda x: L.cross(x, x.flip(0)) + torch.cross(x, x.flip(1), dim=0), (3, 5, 3)),
    (lambda x: L.vecdot(x, x * 2).sum() + torch.trace(x) + torch.vdot(x[0], x[1]), SQUARE),
    (
        lambda x: L.multi_dot([x, x, x]) + torch.matrix_power(x, 5) + x.matrix_power(1) + torch.tensordot(x, x, 1),
        SQUARE,
    ),
    (lambda x: torch.tensordot(x, x, dims=([0, 1], [0, 1])), CUBE),
    (lambda x: torch.kron(x, x[:2, 0]) + torch.kron(x, x[:2, 1]), MATRIX),
    (lambda x: L.matrix_norm(x) + L.matrix_norm(x, 1) + L.matrix_norm(x, -math.inf, dim=(1, 2)), CUBE),
    (lambda x: torch.diag_embed(x, 1) + torch.diag_embed(x, -1), MATRIX),
    (lambda x: torch.diag_embed(x, -2, 2, 1).sum(0) + torch.diag_embed(x, 2, 0, 2).sum(1), MATRIX),
    (lambda x: torch.diag(x[0], -1).sum() + x.diag(1) + torch.diagflat(x, 1).sum(), MATRIX),
    (lambda x: x.clone().fill_diagonal_(3.0) + x.rot90(2), SQUARE),
    (lambda x: torch.block_diag(x, x[0], x.T), MATRIX),
    (lambda x: L.vander(x, N=3), LINE),
    (
        lambda x: (torch.atleast_2d(x[0]), torch.atleast_3d(x), torch.column_stack([x, x[:, 0]]), torch.dstack([x, x])),
        MATRIX,
    ),
    (lambda x: (*torch.hsplit(x, 2), *torch.vsplit(x, [2]), *x[..., None].expand(5, 4, 2).dsplit([1])), MATRIX),
    (lambda x: x.rot90() + torch.rot90(x, -1) + x.rot90(3, (1, 0)), SQUARE),
    (lambda x: torch.select_scatter(x, x[0], 0, 2) + torch.adjoint(x), SQUARE),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_functions(case: int) -> None:
    f, shape = CASES[case]
    agrees(f, shape, example=KNOWN, batch=False)


BAG = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
OFFSETS = torch.tensor([0, 4, 4, 7])


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str, padding: int | None) -> None:
    for last in (False, True):
        bag = nn.EmbeddingBag(10, 3, mode=mode, padding_idx=padding, include_last_offset=last)
        ends = torch.cat([OFFSETS, torch.tensor([8])]) if last else OFFSETS
        converts(bag_of(bag), BAG, ends, example=True, batch=False)
        converts(bag_of(bag), BAG.reshape(2, 4), example=True, batch=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_other_calls_keep_offsets_ascending(dtype: torch.dtype) -> None:
    for values, ascending in (
        ([0, 4, 4, 7], True),
        ([0, 2, 9], True),
        ([7, 0, 4, 4, 2], False),
        ([0, 1, 2, 3, 4], False),
    ):
        (made,) = shuffled((torch.tensor(values, dtype=dtype),), 1.0)
        assert made.dtype == dtype and made.shape == (len(values),)
        assert (sorted(made.tolist()) == made.tolist()) is ascending
        if ascending:
            assert (made[0], made[-1]) == (values[0], values[-1])
        else:
            assert sorted(made.tolist()) == sorted(values)


def bag_of(bag: nn.Module) -> nn.Module:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = bag

        def forward(self, ids: Any, offsets: Any = None) -> Any:
            return self.bag(ids, offsets) * 2

    return Bags()


def test_indices_behind_the_last_bag() -> None:
    """They belong to no sum. torch divides its mean by them all the same, and its gradient is of memory not its own."""
    ids, offsets = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 3])
    bag = nn.EmbeddingBag(5, 3, mode="sum", include_last_offset=True)
    converts(bag_of(bag), ids, offsets, example=True, batch=False, gradient=False)


def test_places_of_nan_and_of_fractions() -> None:
    values, whole = torch.tensor([math.nan, 0.2, math.inf]), torch.tensor([1, 2, 3])
    numbers = torch.tensor([0.0, 1.0])
    agrees(lambda v: torch.searchsorted(numbers, v), values, example=KNOWN, batch=False)
    agrees(lambda v: torch.searchsorted(numbers, v, right=True), values, example=KNOWN, batch=False)
    agrees(lambda s: torch.searchsorted(s, 2.5), whole, batch=False)
    agrees(lambda s: torch.searchsorted(s, 2), numbers, batch=False)


def test_numbers_with_fractions_beside_whole_ones() -> None:
    agrees(lambda x: torch.xlogy(x, 2.5) + torch.xlogy(1.5, x), torch.tensor([1, 2, 3]), batch=False)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_nan_in_a_grid_is_seen(mode: str) -> None:
    x, grid = torch.randn(1, 2, 4, 4), torch.tensor([[[[math.nan, 0.0], [0.1, 0.2], [7.0, 0.0]]]])
    got = torch2needle.convert(One(lambda g: F.grid_sample(x, g, mode, align_corners=False)), example=(grid,))(grid)
    np.testing.assert_allclose(got.numpy(), F.grid_sample(x, grid, mode, align_corners=False).numpy(), atol=1e-5)


def test_weighted_bags() -> None:
    f = lambda w, s: F.embedding_bag(BAG, w, OFFSETS, mode="sum", per_sample_weights=s)  # noqa: E731
    agrees(f, (10, 3), (8,), example=KNOWN, batch=False)


# Every magnitude and sign, the ends of domains, infinities and NaN.
SIZES = (0.0, 1e-20, 1e-3, 0.3, 0.5, 0.7, 0.9, 0.99999, 1.0, 1.5, 2.5, 3.0, 80.0, 3e38, math.inf)
HARD = torch.tensor([*SIZES, *(-s for s in SIZES), math.nan])
SPECIAL: dict[str, Callable] = {
    name: getattr(torch, name)
    for name in (
        *(
            "tan",
            "asin",
            "acos",
            "atan",
            "sinh",
            "cosh",
            "asinh",
            "acosh",
            "atanh",
            "erfc",
            "exp2",
            "log2",
            "log10",
        ),
        *("deg2rad", "erfinv", "logit", "nan_to_num", "isposinf", "isneginf"),
    )
} | {
    "entr": S.entr,
    "ndtr": S.ndtr,
    "clamped logit": lambda x: torch.logit(x, 0.1),
    "atan2": lambda x: torch.atan2(x, x.flip(0)),
    "hypot": lambda x: torch.hypot(x, x.flip(0)),
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "logaddexp2": lambda x: torch.logaddexp2(x, x.flip(0)),
    "xlogy": lambda x: torch.xlogy(x, x.flip(0)),
    "xlogy of numbers": lambda x: torch.xlogy(x, 2.0) + torch.xlogy(2.0, x),
    "xlog1py": lambda x: S.xlog1py(x, x.flip(0)),
    "heaviside": lambda x: torch.heaviside(x, torch.tensor(0.5, dtype=x.dtype)),
    "isclose": lambda x: torch.isclose(x, x.flip(0)),
    "nan_to_num with numbers": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0),
    "ldexp": lambda x: torch.ldexp(x, torch.tensor(3)),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions_at_hard_places(name: str) -> None:
    f = SPECIAL[name]
    net = torch2needle.convert(One(lambda x: f(x)), example=(HARD,))
    exe = ndl.compile(net.eval(), (HARD.numpy(),))
    theirs, exact = f(HARD).numpy(), f(HARD.double()).numpy().astype("float64")
    for got in (net(HARD).numpy(), exe(HARD.numpy())):
        assert got.dtype == theirs.dtype
        finite = np.isfinite(theirs) & (np.abs(exact) < 3.4e38)
        np.testing.assert_array_equal(got[~np.isfinite(theirs)], theirs[~np.isfinite(theirs)])
        np.testing.assert_allclose(got[finite], exact[finite], rtol=1e-6, atol=1e-37)


def test_gradient_of_erfinv_at_and_beyond_its_ends() -> None:
    x = torch.tensor([-2.0, -1.0, 0.3, 1.0, 1.5], requires_grad=True)
    net = torch2needle.convert(One(lambda x: torch.erfinv(x)), example=(x.detach(),))
    ours = ndl.Tensor(x.detach().numpy(), requires_grad=True)
    torch.erfinv(x).sum().backward()
    net(ours).sum().backward()
    np.testing.assert_allclose(ours.grad.numpy(), x.grad.numpy(), rtol=2e-6)


@pytest.mark.parametrize(("f", "least"), [(torch.xlogy, 0.0), (S.xlog1py, -1.0)])
def test_gradients_of_products_with_logarithms_at_zero(f: Any, least: float) -> None:
    y = torch.tensor([-2.0, -0.5, 0.0, 0.25, 3.0]) + least
    x = torch.zeros(5, requires_grad=True)
    net = torch2needle.convert(One(lambda x: f(x, y)), example=(x.detach(),))
    ours = ndl.Tensor(np.zeros(5, "float32"), requires_grad=True)
    f(x, y).sum().backward()
    net(ours).sum().backward()
    np.testing.assert_allclose(ours.grad.numpy(), x.grad.numpy(), rtol=2e-6)


def test_sinc() -> None:
    agrees(lambda x: torch.sinc(x), MATRIX, tolerance=1e-4)
