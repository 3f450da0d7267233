"""Calls of torch's on complex numbers, one by one: values plain and compiled, gradients, files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from test_complex import Two, agrees  # noqa: E402

L = torch.linalg
torch.manual_seed(0)
Z, W, A, B = "c3,4", "c3,4", "c2,3,3", "c2,3,2"
INDEX = torch.tensor([[0, 1, 2, 1], [2, 0, 1, 1], [1, 1, 0, 2]])
ROWS = torch.tensor([0, 2, 0])
POSITIVE = torch.randn(2, 3, 3, dtype=torch.cfloat)
POSITIVE = POSITIVE @ POSITIVE.mH + 3 * torch.eye(3)

FUNCTIONS = (
    *(torch.tan, torch.sinh, torch.cosh, torch.tanh, torch.asin, torch.acos, torch.atan, torch.asinh, torch.acosh),
    *(torch.atanh, torch.sigmoid, torch.rsqrt, torch.exp2, torch.expm1, torch.log1p, torch.log2, torch.log10),
    torch.sinc,
)
SHAPES: dict[str, tuple] = {
    "sums of exponentials": (lambda z, w: torch.logaddexp(z, w * 20), Z, W),
    "diagonals": (lambda z: torch.diag(z[0]) + torch.diag_embed(z[0]) + torch.diagflat(z[1]), Z),
    "traces": (lambda z: torch.trace(z) + z[:, :3].trace(), Z),
    "turned": (lambda z: torch.rot90(z) + z.mH, Z),
    "cut": (lambda z: z.hsplit(2)[1] + torch.hsplit(z, 2)[0], Z),
    "windows": (lambda z: z.unfold(-1, 2, 1).sum(-1), Z),
    "taken": (lambda z: z.take(ROWS) + torch.take_along_dim(z, INDEX, 0)[0, :3], Z),
    "joined": (lambda z, x: torch.column_stack([z, x]) * torch.block_diag(z, x)[:3, :8], Z, (3, 4)),
    "differences": (lambda z, x: torch.diff(z, dim=0, prepend=x), Z, (1, 4)),
    "integrals": (lambda z: torch.trapezoid(z, dx=0.1) + torch.gradient(z)[1].sum(-1), Z),
    "at least": (lambda z: torch.atleast_3d(z) * 2, Z),
    "broadcast": (lambda z, x: torch.broadcast_tensors(z, x)[0] * torch.broadcast_tensors(z, x)[1], Z, (4,)),
    "as floats": (lambda z: z.view(torch.float32) * 2, Z),
    "from floats": (lambda x: x.view(torch.complex64) * 1j, (3, 4)),
    "looked up": (lambda w, x: torch.index_select(w, 0, ROWS) * x, Z, (3, 1)),
}
WRITES: dict[str, tuple] = {
    "index_add": (lambda z, w: z.index_add(0, ROWS, w, alpha=2) + torch.index_copy(z, 0, torch.arange(3), w), Z, W),
    "scatter_add": (lambda z, w: z.scatter_add(0, INDEX, w), Z, W),
    "scatter": (lambda z: z.scatter(0, INDEX, 2.0), Z),
    "index_fill": (lambda z: z.index_fill(1, ROWS, 1j), Z),
    "index_put": (lambda z, w: torch.index_put(z, (ROWS,), w, accumulate=True), Z, W),
    "masked_scatter": (lambda z, w: z.masked_scatter(torch.eye(3, 4) > 0, w), Z, W),
    "diagonal_scatter": (lambda z, w: torch.diagonal_scatter(z, w[0, :3]), Z, W),
    "fill_diagonal_": (lambda z: z.clone().fill_diagonal_(2.0), Z),
}
REDUCTIONS: dict[str, tuple] = {
    "prod": (lambda z: z.prod(1, keepdim=True) + torch.prod(z), Z),
    "prod of zeros": (lambda z: z.prod(), torch.tensor([0, 1 + 1j, 2])),
    "prod of nothing": (lambda z: z.prod(0), torch.zeros(0, 3, dtype=torch.cfloat)),
    "cumprod": (lambda z: torch.cumprod(z, -1) + z.cumprod(dim=0), Z),
    "cumprod from infinity": (lambda z: torch.view_as_real(torch.cumprod(z, 0)), torch.tensor([complex("inf"), 0, 2])),
    "truth": (
        lambda z: (z.any(1) & torch.all(z, dim=1)) | torch.logical_not(z[:, 0]),
        torch.tensor([[0, 1j], [1, 2], [0, 0]]),
    ),
    "sinc of nothing": (lambda z: torch.sinc(z), torch.tensor([0, 0.5j, 2])),
    "counted": (lambda z: torch.count_nonzero(z, 0), torch.tensor([[0, 1j], [1, 2], [0, 0]])),
    "moments": (lambda z: torch.std_mean(z, dim=1)[1] * torch.var_mean(z, 1, correction=0)[0], Z),
    "logsumexp": (lambda z: torch.logsumexp(z, 1), Z),
    "dist": (lambda z, w: torch.dist(z, w), Z, W),
    "normalize": (lambda z: F.normalize(z, dim=-1), Z),
    "l1_loss": (lambda z, w: F.l1_loss(z, w), Z, W),
    "isclose": (lambda z: torch.isclose(z, z.real + 0j, atol=0.1), Z),
    "lerp": (lambda z, w: torch.lerp(z, w, 0.3) + z.lerp(w, 0.8), Z, W),
    "addcmul": (lambda z, w: torch.addcmul(z, z, w, value=0.5) + z.addcdiv(z, w), Z, W),
    "a power in double": (lambda z: torch.float_power(z, 2), Z),
    "real sums of complex dtype": (
        lambda x: x.sum(dtype=torch.complex64).abs() + x.cumsum(0, dtype=torch.complex64).real,
        (3, 4),
    ),
}
PRODUCTS: dict[str, tuple] = {
    "vecdot": (lambda z, w: L.vecdot(z, w) + L.vecdot(z.T, w.T, dim=0), Z, W),
    "vecdot of reals": (lambda x, w: L.vecdot(x + 0j, w), (3, 4), W),
    "kron": (lambda z, w: torch.kron(z, w), Z, W),
    "tensordot": (lambda z, w: torch.tensordot(z, w, dims=([0], [0])), Z, W),
    "addmm": (lambda z, w: torch.addmm(w, z, w, beta=0.5, alpha=2j), "c3,3", "c3,3"),
    "baddbmm": (lambda z, w: torch.baddbmm(w, z, w) + torch.addbmm(w[0], z, w), A, A),
    "addr": (lambda z, w: torch.addr(torch.outer(z, w), z, w), "c3", "c4"),
    "cross": (lambda z, w: L.cross(z, w), "c4,3", "c4,3"),
    "multi_dot": (lambda z, w: L.multi_dot([z, w, z]), "c3,3", "c3,3"),
    "matrix powers": (lambda z: L.matrix_power(z, 3) + torch.matrix_power(z, -1), A),
    "matrix_exp": (lambda z: torch.matrix_exp(z * 0.3), A),
    "solve of vectors": (lambda a, b: L.solve(a, b[..., 0]), A, B),
    "solve broadcast": (lambda a, b: L.solve(a, b), A, "c3,2"),
    "solve_triangular": (
        lambda a, b: L.solve_triangular(a, b, upper=True) + L.solve_triangular(a, b, upper=False, unitriangular=True),
        *(POSITIVE, B),
    ),
    "cholesky": (lambda a: L.cholesky(a), POSITIVE),
    "cholesky_solve": (lambda a, b: torch.cholesky_solve(b, L.cholesky(a)), POSITIVE, B),
    "singular values": (
        lambda a: L.svdvals(a) + L.matrix_norm(a, "nuc")[:, None] + L.norm(a, 2, dim=(-2, -1))[:, None],
        A,
    ),
    "eigenvalues": (lambda a: L.eigvalsh(a), POSITIVE),
}
# torch has no gradient of these, or projects that of a Hermitian matrix on its lower triangle.
WITHOUT_GRADIENT = {
    "cumprod from infinity",
    "fill_diagonal_",
    "cholesky",
    "index_put",
    "isclose",
    "real sums of complex dtype",
    "as floats",
    "from floats",
    "truth",
    "counted",
}
CASES = SHAPES | WRITES | REDUCTIONS | PRODUCTS


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str) -> None:
    f, *specs = CASES[name]
    agrees(f, *specs, gradient=name not in WITHOUT_GRADIENT, tolerance=3e-5)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions(f: Callable) -> None:
    agrees(f, "c5,4", tolerance=3e-5)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_far_out_and_near_0(f: Callable) -> None:
    sizes = torch.logspace(-6, 1.5, 16)
    agrees(lambda z: f(z) / f(z).abs(), torch.polar(sizes, torch.linspace(-3, 3, 16)), gradient=False, tolerance=1e-4)


def test_dropout_draws_once_for_both_parts() -> None:
    net = torch2needle.convert(Dropped(), (torch.randn(50, 4, dtype=torch.cfloat),)).train()
    got = net(torch.ones(50, 4) * (1 + 1j)).numpy()
    assert set(got.ravel()) == {0, 2 + 2j}


class Dropped(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return F.dropout(z, 0.5, self.training)


def test_products_of_scatter_are_refused() -> None:
    model, given = (
        Two(lambda z, w: torch.scatter(z, 0, INDEX, w, reduce="multiply")),
        torch.randn(3, 4, dtype=torch.cfloat),
    )
    with pytest.raises(torch2needle.ConversionError, match="reduce expects a sum of complex numbers, got multiply"):
        torch2needle.convert(model, (given, given))
