"""Functions and methods that tensors have as in torch: values, dtypes and gradients by torch's own; derivatives by `grad`."""

from __future__ import annotations

import pickle
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.autograd import Tensor, grad

torch = pytest.importorskip("torch")

STREAM = np.random.default_rng(0)
ROWS = STREAM.normal(size=(3, 4)).astype("float32")
OTHER = STREAM.normal(size=(3, 4)).astype("float32")
SQUARE = STREAM.normal(size=(2, 4, 4)).astype("float32")
ROW = STREAM.normal(size=4).astype("float32")
ODD = np.array([[np.nan, np.inf, -0.0, 1.5], [2, -np.inf, 0, -1.5]], "float32")
PLACES = np.array([[0, 2, 1, 1], [2, 0, 0, 1], [1, 1, 2, 0]])
WHOLE = np.array([3, 0, 1, 3, 2])

# name, the tensor, positional and named arguments
METHODS: list[tuple[str, Any, tuple, dict]] = [
    *(
        (name, ROWS, (OTHER,), {})
        for name in ("atan2", "fmax", "fmin", "fmod", "hypot", "inner", "logaddexp", "isclose")
    ),
    *(
        (name, ODD, (), {})
        for name in ("isfinite", "isinf", "isnan", "nan_to_num", "logical_not", "count_nonzero", "trunc")
    ),
    *((name, WHOLE > 1, (WHOLE < 3,), {}) for name in ("logical_and", "logical_or", "logical_xor")),
    *((name, SQUARE, (), {}) for name in ("det", "inverse", "matrix_exp", "tril", "triu", "slogdet")),
    *((name, ROWS, (), {}) for name in ("frac", "hardshrink", "square", "float", "double", "long", "int", "bool")),
    *(
        (name, ROWS, (), {})
        for name in ("t", "ravel", "numel", "dim", "contiguous", "unbind", "argsort", "sort", "diff")
    ),
    *(
        (name, ROWS, (1,), {})
        for name in ("cummax", "cummin", "logcumsumexp", "sort", "unbind", "count_nonzero", "argsort")
    ),
    *((name, ROWS, (OTHER,), {}) for name in ("view_as", "expand_as", "type_as")),
    ("logcumsumexp", ROWS, (), {"dim": -1}),
    ("sort", ROWS, (), {"dim": 0, "descending": True}),
    ("topk", ROWS, (2,), {"dim": 0, "largest": False}),
    ("clamp_min", ROWS, (0.1,), {}),
    ("clamp_max", ROWS, (0.1,), {}),
    ("diagonal", SQUARE, (1, 2, 0), {}),
    ("gather", ROWS, (0, PLACES % 3), {}),
    ("scatter", ROWS, (0, PLACES % 3, 2.5), {}),
    ("index_add", ROWS, (0, np.array([2, 0]), OTHER[:2]), {}),
    ("index_copy", ROWS, (0, np.array([2, 0]), OTHER[:2]), {}),
    ("index_fill", ROWS, (), {"dim": 1, "index": np.array([1, 3]), "value": 9.0}),
    ("index_select", ROWS, (1, np.array([3, 0, 3])), {}),
    ("masked_fill", ROWS, (ROWS > 0, -1.0), {}),
    ("masked_select", ROWS, (ROWS > 0,), {}),
    ("masked_scatter", ROWS, (ROWS > 0, OTHER), {}),
    ("moveaxis", SQUARE, (0, 2), {}),
    ("movedim", SQUARE, (2, 0), {}),
    ("nonzero", WHOLE, (), {}),
    ("bincount", WHOLE, (), {"minlength": 6}),
    ("prelu", ROWS, (ROW[:1],), {}),
    ("repeat_interleave", ROWS, (2,), {"dim": 1}),
    ("roll", ROWS, (1, 1), {}),
    ("tile", ROWS, ((2, 1),), {}),
    ("repeat", ROWS, ((2, 1, 3),), {}),
    ("unflatten", ROWS, (1, (2, 2)), {}),
    ("addmm", SQUARE[0], (SQUARE[0], SQUARE[1]), {"beta": 0.5, "alpha": 2}),
    ("addmm", np.full((4, 4), np.nan, "float32"), (SQUARE[0], SQUARE[1]), {"beta": 0}),
    ("mm", SQUARE[0], (ROWS.T,), {}),
    ("mv", ROWS, (ROW,), {}),
    ("dot", ROW, (ROW[::-1],), {}),
    ("bmm", SQUARE, (SQUARE,), {}),
    ("outer", ROW, (ROWS[:, 0],), {}),
    ("lerp", ROWS, (OTHER, 0.3), {}),
    ("lerp", ROWS, (OTHER, 0.7), {}),
    ("lerp", ROWS, (OTHER, OTHER), {}),
    ("isclose", ODD, (ODD,), {}),
    ("isclose", ODD, (ODD,), {"equal_nan": True}),
    ("isclose", WHOLE, (WHOLE[::-1],), {}),
    ("allclose", ROWS, (ROWS + 1e-7,), {}),
    ("allclose", ROWS, (OTHER,), {}),
    ("diff", ROWS, (2, 0), {}),
    ("diff", ROWS, (), {"prepend": OTHER, "append": OTHER[:, :1]}),
    ("tril", SQUARE, (-1,), {}),
    ("triu", SQUARE, (), {"diagonal": 2}),
    ("narrow", ROWS, (1, 1, 2), {}),
    ("narrow", ROWS, (-1, -3, 2), {}),
    ("select", SQUARE, (1, -1), {}),
    ("swapaxes", SQUARE, (0, 2), {}),
    *((name, ODD, (), {}) for name in ("nansum", "nanmean", "median")),
    *((name, ROWS, (), {}) for name in ("median", "clone", "is_floating_point", "ndimension", "nelement", "trace")),
    *((name, WHOLE, (), {}) for name in ("clone", "is_floating_point", "median")),
    *((name, ROWS, (), {"dim": 1, "keepdim": True}) for name in ("nansum", "nanmean", "median")),
    *((name, ODD, (0,), {}) for name in ("nansum", "nanmean", "median")),
    ("kthvalue", ROWS, (2,), {"dim": 0}),
    ("kthvalue", ROWS, (4, 1, True), {}),
    *((name, ROWS, (OTHER, OTHER + 3), {"value": 0.5}) for name in ("addcmul", "addcdiv")),
    ("baddbmm", SQUARE, (SQUARE, SQUARE), {"beta": 2, "alpha": 0.5}),
    ("baddbmm", np.full((4, 4), np.nan, "float32"), (SQUARE, SQUARE), {"beta": 0}),
    ("equal", ROWS, (ROWS,), {}),
    ("equal", ROWS, (ROWS[:2],), {}),
    ("take_along_dim", ROWS, (PLACES, 1), {}),
    ("take_along_dim", ROWS, (WHOLE,), {}),
    ("scatter_add", ROWS, (0, PLACES % 3, OTHER), {}),
    ("split", ROWS, (2,), {"dim": 1}),
    ("split", ROWS, ([1, 2],), {}),
    ("unfold", ROWS, (1, 2, 2), {}),
    ("where", ROWS, (ROWS > 0, OTHER), {}),
    ("where", ROWS, (ROWS > 0, 0.5), {}),
    ("new_zeros", ROWS, (2, 3), {}),
    ("new_ones", WHOLE, ((2, 3),), {}),
    ("new_full", ROWS, ((2,), 0.5), {}),
    ("new_tensor", ROWS, ([1.0, 2.0],), {}),
]
FUNCTIONS: list[tuple[str, tuple, dict]] = [
    ("cosine_similarity", (ROWS, OTHER), {}),
    ("cosine_similarity", (ROWS, ROW[None]), {"dim": -1}),
    ("cosine_similarity", (ROWS, OTHER[:, :1]), {"dim": 1}),
    ("cosine_similarity", (ROWS, 0 * OTHER), {"dim": 0, "eps": 1e-3}),
    ("pairwise_distance", (ROWS, OTHER), {}),
    ("pairwise_distance", (ROWS, ROW), {"p": 1, "keepdim": True}),
    ("pairwise_distance", (ROWS, OTHER), {"p": float("inf")}),
    ("softmax", (ROWS,), {"dim": 0}),
    ("softmin", (ROWS,), {"dim": 1}),
    ("bilinear", (ROWS, OTHER, SQUARE, ROW[:2]), {}),
    ("bilinear", (SQUARE, SQUARE, SQUARE), {}),
    ("logsumexp", (ROWS,), {"dim": 1, "keepdim": True}),
    ("normalize", (ROWS,), {"dim": -1}),
]


def named(case: tuple) -> str:
    return f"{case[0]}-{'-'.join(map(str, case[-1])) or len(case[-2])}"


def leaves(x: Any) -> list[Any]:
    return [v for part in x for v in leaves(part)] if isinstance(x, tuple | list | ndl.TensorTuple) else [x]


def ours(x: Any) -> Any:
    return Tensor(x, dtype=str(x.dtype), requires_grad=x.dtype.kind == "f") if isinstance(x, np.ndarray) else x


def theirs(x: Any) -> Any:
    return torch.tensor(x.copy(), requires_grad=x.dtype.kind == "f") if isinstance(x, np.ndarray) else x


def compare(call: Any, torch_call: Any, given: tuple, options: dict) -> None:
    """Results to the last digits, dtypes, and gradients of what is differentiable."""
    mine, its = tuple(map(ours, given)), tuple(map(theirs, given))
    got = leaves(call(*mine, **{k: ours(v) for k, v in options.items()}))
    want = leaves(torch_call(*its, **{k: theirs(v) for k, v in options.items()}))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, tuple(a.shape)) == (str(b.dtype).removeprefix("torch."), tuple(b.shape))
        np.testing.assert_allclose(a.numpy(), b.detach(), rtol=2e-6, atol=2e-6)
        if not b.requires_grad or not b.isfinite().all():
            continue
        weights = np.cos(np.arange(b.numel(), dtype="float32")).reshape(b.shape)
        for x in its:
            if isinstance(x, torch.Tensor):
                x.grad = None
        (b * torch.tensor(weights)).sum().backward(retain_graph=True)
        (a * Tensor(weights, dtype=a.dtype)).sum().backward()
        for x, y in zip(mine, its, strict=True):
            if isinstance(y, torch.Tensor) and y.grad is not None:
                found = np.zeros_like(y.grad) if x.grad is None else x.grad.numpy()
                np.testing.assert_allclose(found, y.grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", METHODS, ids=named)
def test_methods(case: tuple) -> None:
    name, x, given, options = case
    compare(getattr(Tensor, name), getattr(torch.Tensor, name), (x, *given), options)


@pytest.mark.parametrize("case", FUNCTIONS, ids=named)
def test_functions(case: tuple) -> None:
    name, given, options = case
    compare(getattr(ndl.ops, name), getattr(torch.nn.functional, name, None) or getattr(torch, name), given, options)


def test_functions_are_pickled_by_name() -> None:
    functions = [f for f in map(vars(ndl.ops).get, ndl.ops.__all__) if isinstance(f, FunctionType)]
    assert len(functions) > 300
    assert [f for f in functions if pickle.loads(pickle.dumps(f)) is not f] == []


def test_transposes() -> None:
    np.testing.assert_array_equal(Tensor(ROWS).T.numpy(), ROWS.T)
    np.testing.assert_array_equal(Tensor(SQUARE).mT.numpy(), SQUARE.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.mm(x.reshape((4, 3, 1))), r"\[mm\] expects operands of 2 and 2 axes"),
        (lambda x: x.narrow(1, 3, 2), r"\[narrow\] start and length expect places of 4, got 3 and 2"),
        (lambda x: x.reshape((3, 2, 2)).t(), r"\[t\] expects at most two axes"),
        (lambda x: x.select(2, 0), r"\[getitem\] axis expects -2 to 1, got 2"),
        (lambda x: x.sum(dim=1, axis=1), r"expects one name for one argument"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, IndexError, TypeError), match=message):
        call(Tensor(ROWS))


# -- derivatives ---------------------------------------------------------------------------------------------------------


def polynomial(x: Any, y: Any) -> Any:
    return (x**3 * y).sum() + (x * y**2).sum()


def test_grad_of_several_inputs_and_of_what_they_are_made_into() -> None:
    x, y = Tensor(ROWS), Tensor(OTHER)
    tx, ty = torch.tensor(ROWS, requires_grad=True), torch.tensor(OTHER, requires_grad=True)
    z, tz = x * y, tx * ty
    got = grad(polynomial(z, y), [x, y, z])
    for a, b in zip(got, torch.autograd.grad(polynomial(tz, ty), [tx, ty, tz]), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=1e-5)
    assert x.grad is None
    assert all(not g.requires_grad for g in got)


def test_grad_of_several_outputs() -> None:
    x, tx = Tensor(ROWS), torch.tensor(ROWS, requires_grad=True)
    (got,) = grad((x**2, x**2, x.sum()), x, (Tensor(OTHER), OTHER, None))
    seed = torch.tensor(OTHER)
    (want,) = torch.autograd.grad((tx**2, tx**2, tx.sum()), tx, (seed, seed, None))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)
    out = x**2
    (got,) = grad((out, out), x, (OTHER, OTHER))  # one tensor twice
    np.testing.assert_allclose(got.numpy(), 4 * ROWS * OTHER, rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_third_derivatives(compiled: bool) -> None:
    def third(x: Any) -> Any:
        x = x.detach().requires_grad_()
        value = (x**4 * x.sin()).sum()
        for _ in range(3):
            (value,) = (g.sum() for g in grad(value, x, create_graph=True))
        return value

    x = torch.tensor(ROWS, dtype=torch.float64, requires_grad=True)
    value = (x**4 * x.sin()).sum()
    for _ in range(3):
        value = torch.autograd.grad(value, x, create_graph=True)[0].sum()
    got = ndl.compile(third, (ROWS,))(ROWS) if compiled else third(Tensor(ROWS)).detach().numpy()
    np.testing.assert_allclose(got, value.item(), rtol=1e-5)


def test_a_gradient_penalty_in_a_compiled_step() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    net = ndl.nn.Sequential(ndl.nn.Linear(4, 16), ndl.nn.Tanh(), ndl.nn.Linear(16, 1))
    for p, q in zip(net.parameters(), model.parameters(), strict=True):
        p.data = Tensor(q.detach().numpy().T if q.ndim == 2 else q.detach().numpy())

    class Penalised(ndl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            x = x.detach().requires_grad_()
            (slope,) = grad(self.net(x).sum(), x, create_graph=True)
            return ((slope.norm(axes=1) - 1) ** 2).mean()

    step = ndl.compile_step(Penalised(), lambda loss: loss, ndl.optim.SGD(net.parameters(), lr=0.1), (ROWS,))
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        x = torch.tensor(ROWS, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = ((slope.norm(dim=1) - 1) ** 2).mean()
        rule.zero_grad()
        loss.backward()
        rule.step()
        assert abs(float(step(ROWS)) - loss.item()) < 1e-5


def test_grad_refuses() -> None:
    x, y = Tensor(ROWS), Tensor(OTHER)
    with pytest.raises(
        ValueError, match=r"\[grad\] inputs expects tensors that the outputs depend on, got another one at 1"
    ):
        grad(x.sum(), (x, y))
    assert grad(x.sum(), (x, y), allow_unused=True)[1] is None
    with pytest.raises(ValueError, match=r"\[grad\] grad_outputs is needed for an output of several numbers"):
        grad(x * y, x)
    with pytest.raises(ValueError, match=r"\[grad\] grad_outputs expects shape \(3, 4\), got \(4,\)"):
        grad(x * y, x, ROW)
    with pytest.raises(ValueError, match=r"\[grad\] outputs expects results of tensors that need a gradient"):
        grad(x.detach().sum(), x)
    with pytest.raises(ValueError, match=r"\[grad\] inputs expects tensors that need a gradient"):
        grad(x.sum(), Tensor(ROWS, requires_grad=False))
    with pytest.raises(ValueError, match=r"\[grad\] grad_outputs expects one for each of 2 outputs, got 1"):
        grad((x.sum(), y.sum()), (x, y), (None,))


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (2, 3)])
def test_grad_in_plans_of_other_shapes_with_gradients_given(shape: tuple[int, int]) -> None:
    x = np.arange(shape[0] * shape[1], dtype="float32").reshape(shape) + 1

    def slope(x: Any, seed: Any) -> Any:
        x = x.detach().requires_grad_()
        return grad(x**3, x, seed)[0]

    got = ndl.compile(slope, (x, 2 * x))(x, 2 * x)
    np.testing.assert_allclose(got, 6 * x**3, rtol=1e-6)
    np.testing.assert_allclose(slope(Tensor(x), 2 * x).numpy(), 6 * x**3, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_methods_of_other_dtypes(dtype: str) -> None:
    x = (100 * ROWS).astype(dtype)  # without ties
    for name, given in (
        ("tril", ()),
        ("square", ()),
        ("diff", ()),
        ("topk", (2,)),
        ("unbind", ()),
        ("count_nonzero", ()),
    ):
        compare(getattr(Tensor, name), getattr(torch.Tensor, name), (x, *given), {})


def test_names_are_taken_by_one_layer() -> None:
    assert not hasattr(ndl.ops.softmax.__wrapped__, "__wrapped__")


def test_to_moves_and_casts() -> None:
    x = Tensor(ROWS, requires_grad=False)
    assert x.to("float32") is x and x.to(ndl.cpu_numpy()).device == ndl.cpu_numpy()
    assert x.to(Tensor(ROWS, dtype="float64")).dtype == "float64" and x.double().to(x).dtype == "float32"
    np.testing.assert_array_equal(x.to(ndl.cpu_numpy(), dtype="float64").numpy(), ROWS.astype("float64"))
    other = ndl.cpu_numpy() if x.device == ndl.cpu() else ndl.cpu()
    with pytest.raises(ValueError, match=r"\[to\] gradients stay on .*, got a result that has one; detach\(\) it\."):
        (Tensor(ROWS) * 2).to(other)
    with pytest.raises(TypeError, match=r"\[to\] expects a device, the name of a dtype or a tensor, got int\."):
        x.to(3)


def test_a_clone_shares_no_memory() -> None:
    p = ndl.nn.Parameter(ROWS)
    kept, grown = p.detach().clone(), p.clone()
    grown.sum().backward()
    p.data = Tensor(OTHER)
    np.testing.assert_array_equal(kept.numpy(), ROWS)
    np.testing.assert_array_equal(p.grad.numpy(), np.ones_like(ROWS))


@pytest.mark.parametrize("k", [0, -1, 5])
def test_no_such_place_in_the_order(k: int) -> None:
    with pytest.raises(ValueError, match=r"\[\w+\] (k|count) expects at (least 1|most the size of axis 1), got"):
        Tensor(ROWS).kthvalue(k, 1)


EXTREMES = np.array([np.nan, np.inf, -np.inf, -0.0, 0.5, -0.5, 2.5, -2.5])
F = torch.nn.functional
MAPS: dict[str, tuple[Any, Any]] = {
    "trunc": (ndl.ops.trunc, torch.trunc),
    "frac": (ndl.ops.frac, torch.frac),
    "hardshrink": (ndl.ops.hardshrink, F.hardshrink),
    "hardshrink 0": (lambda x: ndl.ops.hardshrink(x, 0.0), lambda x: F.hardshrink(x, 0.0)),
    "softshrink": (ndl.ops.softshrink, F.softshrink),
    "threshold": (lambda x: ndl.ops.threshold(x, 0.1, -2.0), lambda x: F.threshold(x, 0.1, -2.0)),
    "nan_to_num": (ndl.ops.nan_to_num, torch.nan_to_num),
    "nan_to_num 1.5": (lambda x: ndl.ops.nan_to_num(x, 1.5), lambda x: torch.nan_to_num(x, 1.5)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("x", [EXTREMES, EXTREMES[:1], EXTREMES[:0], np.array(-0.7), np.zeros((3, 0))], ids=np.shape)
@pytest.mark.parametrize("name", MAPS)
def test_maps_at_their_corners(name: str, x: np.ndarray, dtype: str) -> None:
    ours, theirs = MAPS[name]
    got, want = ours(Tensor(x, dtype=dtype)), theirs(torch.tensor(x.astype(dtype))).numpy()
    assert got.dtype == dtype and got.shape == x.shape
    np.testing.assert_array_equal(got.numpy(), want)
    if name != "softshrink":  # whose zeros have other signs in torch by dtype
        np.testing.assert_array_equal(np.signbit(got.numpy())[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])


@pytest.mark.parametrize("limit", [1, 2**31 - 1])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_thresholds_of_whole_numbers(dtype: str, limit: int) -> None:
    x = np.array([-3, 0, 1, 5]).astype(dtype)
    got = ndl.ops.threshold(Tensor(x, dtype=dtype), 0, limit)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.numpy(), F.threshold(torch.tensor(x), 0, limit))
