"""Linear algebra: values and gradients of ops on every backend, and converted calls of torch.linalg, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from needle import ops  # noqa: E402
from needle.autograd import Tensor, TensorTuple  # noqa: E402
from needle.ops.common import vjp  # noqa: E402
from test_complex import agrees as agrees_complex  # noqa: E402
from test_rules_arithmetic import One, Two, agrees  # noqa: E402

L = torch.linalg
KNOWN = (True,)


def sizes(*shapes: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """Each shape as the only input."""
    return [(s,) for s in shapes]


def definite(a: Any) -> Any:
    """Positive definite, of torch's and of needle's tensors."""
    eye = np.eye(a.shape[-1]) / 2
    return a @ a.mT + torch.tensor(eye) if isinstance(a, torch.Tensor) else a @ ops.transpose(a) + eye


def symmetric(a: Any) -> Any:
    return a + (a.mT if isinstance(a, torch.Tensor) else ops.transpose(a))


def absolute(*results: Any) -> list[Any]:
    """Without the signs of vectors, which are not unique."""
    return [r.abs() if isinstance(r, torch.Tensor) else ops.absolute(r) for r in results]


SQUARES = sizes((3, 3), (2, 4, 4), (0, 0), (0, 2, 2), (2, 1, 1))
ANY = sizes((4, 3), (3, 3), (2, 3, 5), (0, 3), (3, 0), (0, 3, 2), (1, 1))
SYSTEMS = [
    ((3, 3), (3, 2)),
    ((2, 1, 3, 3), (4, 3, 2)),
    ((0, 0), (0, 2)),
    ((3, 3), (3, 0)),
    ((2, 0, 3, 3), (2, 0, 3, 1)),
]
VECTORS = [((3, 3), (3,)), ((2, 3, 3), (2, 3))]
Tril, Triu = (lambda a: torch.tril(a)), (lambda a: torch.triu(a))
OPS: dict[str, tuple[Callable, Callable, list]] = {  # name: torch's call, needle's, shapes
    "solve": (L.solve, ops.solve, SYSTEMS + VECTORS),
    "triangular": (
        lambda a, b: L.solve_triangular(a, b, upper=True),
        lambda a, b: ops.solve_triangular(a, b, True),
        SYSTEMS,
    ),
    "unit triangular from the right": (
        lambda a, b: L.solve_triangular(a, b, upper=False, left=False, unitriangular=True),
        lambda a, b: ops.solve_triangular(a, b, False, False, True),
        [((3, 3), (2, 3)), ((2, 1, 3, 3), (4, 2, 3))],
    ),
    "inv": (L.inv, ops.inv, SQUARES),
    "cholesky": (lambda a: L.cholesky(definite(a)), lambda a: ops.cholesky(definite(a))[0], SQUARES),
    "upper cholesky": (
        lambda a: L.cholesky(definite(a), upper=True),
        lambda a: ops.cholesky(definite(a), True)[0],
        sizes((3, 3)),
    ),
    "cholesky_solve": (
        lambda b, a: torch.cholesky_solve(b, Tril(a)),
        ops.cholesky_solve,
        [((3, 2), (3, 3)), ((2, 3, 2), (2, 3, 3))],
    ),
    "cholesky_inverse": (
        lambda a: torch.cholesky_inverse(Triu(a), upper=True),
        lambda a: ops.cholesky_inverse(a, True),
        sizes((3, 3), (2, 3, 3)),
    ),
    "det": (L.det, ops.det, SQUARES),
    "det of a singular one": (
        lambda a: L.det(a[..., :1] @ a[..., :1, :]) + L.det(a * 0),
        lambda a: ops.det(a[..., :1] @ a[..., :1, :]) + ops.det(a * 0.0),
        sizes((2, 2)),
    ),
    "slogdet": (L.slogdet, ops.slogdet, SQUARES),
    "qr": (L.qr, ops.qr, ANY),
    "complete qr": (lambda a: L.qr(a, mode="complete"), lambda a: ops.qr(a, "complete"), sizes((3, 5), (2, 3, 3))),
    "householder_product": (
        L.householder_product,
        ops.householder_product,
        [((4, 3), (3,)), ((2, 4, 3), (2, 2))],
    ),
    "eigh": (lambda a: absolute(*L.eigh(symmetric(a))), lambda a: absolute(*ops.eigh(symmetric(a))), SQUARES),
    "eigvalsh": (
        lambda a: L.eigvalsh(symmetric(a), UPLO="U"),
        lambda a: ops.eigvalsh(symmetric(a), False),
        sizes((3, 3)),
    ),
    "svd": (lambda a: absolute(*L.svd(a, full_matrices=False)), lambda a: absolute(*ops.svd(a)), ANY),
    "svdvals": (L.svdvals, ops.svdvals, ANY),
    "pinv": (L.pinv, ops.pinv, ANY),
    "pinv of a rank": (
        lambda a: L.pinv(a[:, :1] @ a[:1], rtol=1e-3),
        lambda a: ops.pinv(a[:, :1] @ a[:1], 1e-3),
        sizes((4, 3)),
    ),
    "lstsq": (lambda a, b: L.lstsq(a, b).solution, ops.lstsq, [((5, 3), (5, 2)), ((2, 3, 5), (2, 3, 2))]),
    "matrix_exp": (L.matrix_exp, ops.matrix_exp, SQUARES),
    "matrix_exp of a large one": (lambda a: L.matrix_exp(9 * a), lambda a: ops.matrix_exp(a * 9.0), sizes((2, 4, 4))),
    "lu": (lambda a: L.lu_factor(a)[0], lambda a: ops.lu_factor(a)[0], sizes((3, 3), (2, 4, 4), (1, 1))),
    "lu_solve": (
        lambda a, b: L.lu_solve(*L.lu_factor(a), b, left=False),
        lambda a, b: solved_by_lu(a, b, left=False),
        [((3, 3), (2, 3)), ((2, 4, 4), (2, 3, 4))],
    ),
    "adjoint lu_solve": (
        lambda a, b: L.lu_solve(*L.lu_factor(a), b, adjoint=True),
        lambda a, b: solved_by_lu(a, b, adjoint=True),
        [((3, 3), (3, 2))],
    ),
}


def solved_by_lu(a: Tensor, b: Tensor, **options: bool) -> Tensor:
    factors, _, pivots, _ = ops.lu_factor(a)
    return ops.lu_solve(factors, pivots, b, **options)


def items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, TensorTuple | tuple | list) else [value]


def near(got: np.ndarray, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == tuple(want.shape)
    scale = max(1.0, float(want.abs().max()) if want.numel() else 1.0)
    assert np.abs(got - want.detach().numpy()).max(initial=0) <= tolerance * scale


BACKENDS = [
    pytest.param(ndl.cpu_numpy(), "float64", 1e-9, id="numpy"),
    pytest.param(ndl.cpu(), "float64", 1e-9, id="cpu-f64"),
    pytest.param(ndl.cpu(), "float32", 1e-4, id="cpu-f32"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("device", "dtype", "tolerance"), BACKENDS)
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients(name: str, device: Any, dtype: str, tolerance: float) -> None:
    theirs, ours, shapes = OPS[name]
    torch.manual_seed(3)
    for given in shapes:
        inputs = [torch.randn(s, dtype=torch.float64).float().double().requires_grad_() for s in given]
        want = items(theirs(*inputs))
        leaves = [Tensor(x.detach().numpy(), device=device, dtype=dtype) for x in inputs]
        got = items(ours(*leaves))
        weights = [torch.randn_like(w) for w in want]
        total: Any = None
        for g, w, v in zip(got, want, weights, strict=True):
            near(g.numpy(), w, tolerance)
            if w.requires_grad:
                part = (g * Tensor(v.numpy(), device=device, dtype=dtype, requires_grad=False)).sum()
                total = part if total is None else total + part
        torch.stack([(w * v).sum() for w, v in zip(want, weights, strict=True) if w.requires_grad]).sum().backward()
        grads = vjp(total, ndl.init.ones(device=total.device, dtype=total.dtype), leaves)
        for g, x in zip(grads, inputs, strict=True):
            near(g.numpy(), x.grad, 100 * tolerance)


WIDE, BATCH = (3, 4), (2, 3, 3)


def again(u: Any, s: Any, vt: Any) -> Any:
    return (u * s.unsqueeze(-2)) @ vt


RULES: list[tuple[Callable, tuple]] = [
    (lambda a, b: L.solve(a, b) + torch.linalg.solve_ex(a, b)[0], (BATCH, (2, 3, 2))),
    (lambda a, b: L.solve(a, b, left=False), (BATCH, (2, 2, 3))),
    (lambda a, b: torch.linalg.lstsq(a, b).solution, ((2, 5, 3), (2, 5, 2))),
    (lambda a: a.inverse() + L.inv_ex(a).inverse + torch.inverse(a), (BATCH,)),
    (lambda a: a.det() * L.det(a) + torch.det(a).exp() + L.slogdet(a).logabsdet + a.slogdet()[1], (BATCH,)),
    (lambda a: torch.logdet(a @ a.mT + 1), (BATCH,)),
    (lambda a: L.qr(a).R + torch.qr(a)[1], ((2, 5, 3),)),
    (lambda a: L.svd(a)[1] + torch.svd(a).S + L.svdvals(a), ((2, 3, 4),)),
    (lambda a: again(*L.svd(a)), ((2, 3, 3),)),
    (lambda a: again(torch.svd(a).U, torch.svd(a).S, torch.svd(a).V.mT), ((2, 5, 3),)),
    (lambda a: L.eigvalsh(a + a.mT) + L.eigh(a + a.mT, UPLO="U").eigenvalues, (BATCH,)),
    (lambda a: L.pinv(a) + torch.pinverse(a) + L.pinv(a, rtol=1e-4), ((2, 3, 5),)),
    (lambda a: L.pinv(a @ a.mT, hermitian=True), (BATCH,)),
    (lambda a: torch.matrix_exp(a) + a.matrix_exp(), (BATCH,)),
    (lambda a: L.matrix_power(a, 3) + torch.matrix_power(a, 0) + L.matrix_power(a, -2), (BATCH,)),
    (lambda a: (L.lu(a).P @ L.lu(a).L @ L.lu(a).U, L.lu_factor(a).LU), (BATCH,)),
    (lambda a: L.cholesky(a @ a.mT + torch.eye(3)) + L.cholesky_ex(a @ a.mT + torch.eye(3), upper=True).L.mT, (BATCH,)),
    (lambda a: L.norm(a, 2) + L.norm(a, "nuc") + torch.norm(a, "nuc") + L.norm(a, -2) + L.norm(a, "fro"), (WIDE,)),
    (lambda a: L.norm(a, math.inf) + L.norm(a, 1) + L.norm(a) + L.norm(a, dim=(0, 1)) + L.norm(a[0], 3), (WIDE,)),
    (lambda a: L.matrix_norm(a, 2) + L.matrix_norm(a, "nuc", (0, 2), keepdim=True).sum(), ((2, 3, 4),)),
    (lambda a: L.cond(a) + 1 / L.cond(a, -2), (BATCH,)),
    (lambda a: L.cond(a.detach(), 1) + L.cond(a.detach(), "fro"), (BATCH,)),
    (lambda a: (L.matrix_rank(a), L.matrix_rank(a[..., :1] @ a[..., :1, :]), L.matrix_rank(a, rtol=0.9)), (BATCH,)),
    (lambda a: L.vander(a) + L.vander(a, N=4).sum(), ((3, 4),)),
    (lambda a: L.diagonal(a, offset=1), ((2, 3, 4),)),
]


@pytest.mark.parametrize("i", range(len(RULES)))
def test_calls(i: int) -> None:
    f, shapes = RULES[i]
    torch.manual_seed(1)
    agrees(f, *shapes, example=KNOWN, batch=len(shapes[0]) == 3, tolerance=1e-4)


def test_tensors_as_matrices() -> None:
    agrees(lambda a: L.tensorinv(a.view(6, 2, 3), ind=1), (6, 6), example=KNOWN, batch=False, tolerance=1e-4)
    agrees(lambda a, b: L.tensorsolve(a, b), (2, 3, 6), (2, 3), example=KNOWN, batch=False, tolerance=1e-4)


def test_symmetric_matrices_are_square_or_empty() -> None:
    net = torch2needle.convert(Two(lambda a, b: L.pinv(a, hermitian=True) @ b))
    assert net(torch.zeros(3, 1, 0), torch.zeros(3, 1, 2)).shape == (3, 0, 2)
    with pytest.raises(ValueError, match=r"\[symmetric\] expects matrices \(..., N, N\), got shape \(1, 2\)"):
        net(torch.zeros(1, 2), torch.zeros(1, 2))


def test_free_batches_without_an_example() -> None:
    f = lambda a, b: L.solve(a, b) @ L.pinv(b) + torch.matrix_exp(a) * L.det(a)[..., None, None]  # noqa: E731
    net = torch2needle.convert(Two(f))
    for batch in ((), (3,), (2, 2)):
        a, b = torch.randn(*batch, 3, 3), torch.randn(*batch, 3, 2)
        for run in (net, ndl.compile(net, (a, b))):
            near(run(a, b).numpy(), f(a.double(), b.double()), 1e-4)


SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
BAD: dict[str, tuple[Callable, torch.Tensor, str]] = {
    "solve": (lambda a: L.solve(a, a[:, :1]), SINGULAR, r"\[solve\] expects matrices that have an inverse"),
    "inv": (lambda a: L.inv(a), SINGULAR, r"\[solve\] expects matrices that have an inverse"),
    "cholesky": (lambda a: L.cholesky(a), -SINGULAR, r"\[cholesky\] expects positive-definite"),
    "svd": (lambda a: L.svdvals(a), SINGULAR * math.nan, r"\[svd\] expects finite"),
    "pinv": (lambda a: L.pinv(a), SINGULAR * math.nan, r"\[pinv\] expects finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_torch_raises_of_values_is_an_error_in_every_form(name: str) -> None:
    f, bad, text = BAD[name]
    with pytest.raises(RuntimeError):
        f(bad)
    net = torch2needle.convert(One(f), example=(torch.eye(2),))
    exe = ndl.compile(net, (torch.eye(2),))
    for run in (net, exe):
        near(run(torch.eye(2)).numpy(), f(torch.eye(2)), 1e-6)
        with pytest.raises(ValueError, match=text):
            run(bad)
    with pytest.raises(ValueError, match=text):
        net.to(ndl.cpu_numpy())(ndl.Tensor(bad.numpy(), device=ndl.cpu_numpy()))


def test_unchecked_calls_say_where_they_failed() -> None:
    both = torch.stack([torch.eye(2), SINGULAR, -torch.eye(2)])
    f = lambda a: (L.inv_ex(a).info, L.cholesky_ex(a).info, L.lu_factor_ex(a).info, L.slogdet(a).sign)  # noqa: E731
    net = torch2needle.convert(One(f), example=(torch.eye(2).repeat(3, 1, 1),))
    for run in (net, ndl.compile(net, (both,))):
        for got, want in zip(run(both), f(both), strict=True):
            assert np.array_equal(got.numpy(), want.numpy())
    bad = torch.stack([torch.eye(2), torch.eye(2) * math.inf])
    for device in (ndl.cpu(), ndl.cpu_numpy()):
        values = ops.eigvalsh(ndl.Tensor(bad.numpy(), device=device)).numpy()
        assert np.array_equal(values, L.eigvalsh(bad).numpy(), equal_nan=True)


def test_large_and_rank_deficient_matrices() -> None:
    torch.manual_seed(0)
    a = torch.randn(70, 40, dtype=torch.float64) @ torch.randn(40, 60, dtype=torch.float64)
    u, s, vt = (t.numpy() for t in ops.svd(Tensor(a.numpy(), dtype="float64")))
    np.testing.assert_allclose(u * s @ vt, a, atol=1e-11)
    np.testing.assert_allclose(u.T @ u, np.eye(60), atol=1e-12)
    np.testing.assert_allclose(vt @ vt.T, np.eye(60), atol=1e-12)
    np.testing.assert_allclose(s, L.svdvals(a), atol=1e-11)
    values, vectors = (t.numpy() for t in ops.eigh(Tensor((a @ a.T).numpy(), dtype="float64")))
    np.testing.assert_allclose(values, L.eigvalsh(a @ a.T), atol=1e-9)
    np.testing.assert_allclose(vectors * values @ vectors.T, a @ a.T, atol=1e-9)
    x = torch.randn(60, 3, dtype=torch.float64)
    square = Tensor(a[:60].numpy() + 5 * np.eye(60), dtype="float64")
    near(ops.solve(square, Tensor(x.numpy(), dtype="float64")).numpy(), L.solve(a[:60] + 5 * torch.eye(60), x), 1e-10)


def test_views_are_read_where_they_lie() -> None:
    a = torch.randn(4, 4, 6)
    f = lambda a: L.inv(a[1:3, ::2, ::3].mT) + L.inv(a[1:3].flip(0)[:, :2, :2]) + L.inv(a[0, :2, 3:5]).expand(2, 2, 2)  # noqa: E731
    agrees(f, a, batch=False, tolerance=1e-4)


COMPLEX: dict[str, tuple] = {
    "solve": (lambda a, b: L.solve(a, b), "c2,3,3", "c2,3,2"),
    "solve a vector": (lambda a, b: L.solve(a, b), "c3,3", "c3"),
    "solve from the right": (lambda a, b: L.solve(a, b, left=False), "c3,3", "c2,3"),
    "inverse": (lambda a: L.inv(a) + a.inverse(), "c2,3,3"),
    "norms": (lambda z: L.norm(z) + L.vector_norm(z, 3, 1) + torch.norm(z) + L.matrix_norm(z, 1), "c3,4"),
    "moments": (lambda z: z.var(1) + torch.std(z, 0, correction=0).sum(), "c3,4"),
    "conv1d": (lambda z, w: torch.nn.functional.conv1d(z, w, stride=2, padding=1), "c2,3,7", "c4,3,3"),
    "conv2d": (lambda z, w: torch.nn.functional.conv2d(z, w, z[0, :2, 0, 0], groups=2), "c2,4,5,5", "c2,2,3,3"),
    "conv_transpose2d": (lambda z, w: torch.nn.functional.conv_transpose2d(z, w, stride=2), "c1,3,4,4", "c3,2,3,3"),
    "real weights": (lambda z, w: torch.nn.functional.conv1d(z, w.to(z.dtype)), "c2,3,7", (4, 3, 3)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_calls(name: str) -> None:
    f, *specs = COMPLEX[name]
    torch.manual_seed(2)
    agrees_complex(f, *specs, tolerance=3e-5)


def test_istft_looks_for_places_that_no_window_reaches() -> None:
    z, hann = torch.randn(9, 5, dtype=torch.cfloat), torch.hann_window(16)
    f = lambda z, w: torch.istft(z, 16, 8, window=w, center=False)  # noqa: E731
    net = torch2needle.convert(Two(f), (z, torch.ones(16)))
    near(net(z, torch.ones(16)).numpy(), f(z, torch.ones(16)), 1e-5)
    with pytest.raises(RuntimeError, match="window overlap add min"):
        f(z, hann)
    with pytest.raises(ValueError, match=r"\[istft\] expects windows"):
        net(z, hann)


REFUSED: dict[str, tuple[Callable, str]] = {
    "eig": (lambda a: L.eigvals(a), "not symmetric are not supported"),
    "lstsq": (lambda a: L.lstsq(a, a).residuals, "gives no residuals of least squares"),
    "pivots": (lambda a: L.lu(a, pivot=False)[0], "pivot"),
    "ord": (lambda a: L.matrix_norm(a, 3), "ord expects"),
    "tolerance": (lambda a: L.pinv(a, rtol=a[0, 0]), "rtol expects a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls_say_why(name: str) -> None:
    f, text = REFUSED[name]
    with pytest.raises(torch2needle.ConversionError, match=text):
        torch2needle.convert(One(f))
