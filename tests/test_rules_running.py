"""Rules of what runs along an axis, quantiles, covariances, histograms, shifts, scalars and numbers of few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
import torch2needle
from conversion import Calls

torch.manual_seed(0)
HOLES = torch.randn(4, 7)
HOLES[0, 2], HOLES[1, :3] = torch.nan, torch.nan
ZEROS = torch.randn(3, 6)
ZEROS[0, 2] = ZEROS[1, 1] = ZEROS[1, 4] = 0
WHOLE = torch.randint(-4, 4, (3, 5))
REAL = torch.randn(4, 7)
ONE = torch.tensor([0])
TWICE = torch.tensor([0, 30, 31, 32, 63])
CASES: dict[str, tuple[Callable, torch.Tensor]] = {
    "products": (lambda x: (x.cumprod(1), torch.cumprod(x, dim=-2), (x * 2).cumprod_(0)), ZEROS),
    "products that overflow in pairs": (lambda x: x.cumprod(0), torch.tensor([0.0, 1e30, 1e30, 1e30])),
    "products of nothing": (lambda x: (x.cumprod(1), x.cummax(1)[0]), torch.randn(3, 0)),
    "no axes": (lambda x: (x.cumprod(0), *x.cummax(0), *x.cummin(-1)), torch.tensor(3.0)),
    "whole products": (lambda x: (x.cumprod(1), (x > 0).cumprod(-1), x.cumprod(0, dtype=torch.float64)), WHOLE),
    "maxima": (lambda x: (*x.cummax(1), *torch.cummin(x, dim=0)), WHOLE),
    "maxima of equals": (lambda x: (x.round().cummax(-1).values * x, *x.round().cummin(0)), REAL * 2),
    "maxima of NaN": (lambda x: (*x.cummax(1), *x.cummin(1)), HOLES),
    "logarithms of sums": (
        lambda x: (x.logcumsumexp(1), torch.logcumsumexp(x * 90, dim=-2), (x + x).logcumsumexp(0)),
        REAL,
    ),
    "logarithms of sums with holes": (lambda x: x.logcumsumexp(1), HOLES),
    "logarithms of nothing": (lambda x: x.logcumsumexp(1), torch.randn(3, 0)),
    "logarithms of sums of one": (lambda x: (x.logcumsumexp(0), (x - torch.inf).logcumsumexp(0)), torch.tensor(3.0)),
    "slopes": (lambda x: (*torch.gradient(x), *torch.gradient(x, dim=-1, spacing=0.5, edge_order=2)), REAL),
    "slopes between points": (
        lambda x: torch.gradient(x, spacing=[x[:, 0].detach().sort()[0], x[0].detach().sort()[0]], edge_order=2),
        REAL,
    ),
    "slopes of whole numbers": (lambda x: torch.gradient(x, dim=[1], spacing=(3,)), WHOLE),
    "areas between points": (
        lambda x: (torch.trapz(x, x[:, 0] + 1, dim=0), torch.cumulative_trapezoid(x, x.flip(1), dim=0)),
        REAL,
    ),
    "scalars": (
        lambda x: (
            x.index_add(0, ONE, x * 2),
            x.index_copy(0, ONE, x * 3),
            x.index_fill(0, ONE, 4.0),
            x.index_reduce(0, ONE, x * 5, "amax"),
            x.index_select(-1, ONE),
            x.quantile(0.5, 0, True),
            *x.nonzero(as_tuple=True),
        ),
        torch.tensor(3.0),
    ),
    "filled by a tensor": (lambda x: x.index_fill(1, torch.tensor([0, 6, 0]), x[0, 3] * 2), REAL),
    "a sorter": (lambda x: torch.searchsorted(x, x.flip(1) + 0.1, sorter=x.argsort(1)) + x, REAL),
    "products of vectors": (lambda x: (torch.addr(x, x[:, 0], x[1], alpha=2), x.addr(x[:, 0], x[1], beta=0)), REAL),
    "pairs of elements": (lambda x: (torch.cartesian_prod(x[0], x[1, :2], x[2, :3]), torch.cartesian_prod(x[0])), REAL),
    "powers": (lambda x: (torch.vander(x.detach()[0]) * x[0], torch.vander(x.detach()[0], 3, increasing=True)), REAL),
    "norms": (
        lambda x: (
            torch.norm_except_dim(x, 2, 1),
            torch.frobenius_norm(x, 0, True),
            torch.frobenius_norm(x, ()),
            torch.norm_except_dim(x, 3, -1),
            torch.nuclear_norm(x, (0, 1), True),
        ),
        REAL,
    ),
    "one element": (lambda x: x.unique(return_inverse=True, return_counts=True), torch.tensor(3)),
    "pieces": (lambda x: (*x.unsafe_chunk(3, 1), *torch.unsafe_split(x, 2)), REAL),
    "different coordinates": (lambda x: torch.cdist(x.round(), x.flip(0).round(), p=0) + x[:, :4], REAL),
    "nothing to sum": (lambda x: x @ x.new_zeros(0, 3) + x.sum(), torch.randn(2, 4, 0)),
    "areas": (lambda x: (torch.cumulative_trapezoid(x, dim=0), torch.cumulative_trapezoid(x, x * x)), REAL),
    "covariance": (lambda x: (torch.cov(x), x[0].cov(), torch.cov(x[:1], correction=0)), REAL),
    "covariance of nothing": (lambda x: (torch.cov(x), torch.cov(x.t())), torch.zeros(0, 3)),
    "correlation of nothing": (lambda x: (torch.corrcoef(x), torch.corrcoef(x[:, :1])), torch.zeros(0, 3)),
    "weights": (lambda x: torch.cov(x, fweights=torch.arange(1, 8), aweights=torch.arange(7) / 7 + 1), REAL),
    "correlation": (lambda x: (torch.corrcoef(x), x[0].corrcoef()), REAL),
    "covariance of whole numbers": (lambda x: torch.cov(x), WHOLE),
    "quantiles": (lambda x: (x.quantile(0.3), x.quantile(0.3, 0), torch.quantile(x, 0.25, keepdim=True)), REAL),
    "several": (lambda x: torch.quantile(x, x.new_tensor([0.0, 0.4, 1.0]), dim=-2, keepdim=True), REAL),
    "several of all": (lambda x: torch.quantile(x, x.new_tensor([0.1, 0.9]), keepdim=True), REAL),
    "histograms": (
        lambda x: (torch.histc(x), x.histc(5, -1, 1), torch.histc(x * 0 + 2, 4), x.histc(3, 2, 2), x * 2),
        REAL,
    ),
    "histogram of holes": (lambda x: (torch.histc(x, bins=1, min=-2, max=2), x * 2), HOLES),
    "with holes": (lambda x: (x.quantile(0.5, 1), x.nanquantile(0.4, 1, True), x.nanmedian()), HOLES),
    "medians": (lambda x: (*x.nanmedian(0), x.nanmedian(1, True).values), HOLES),
    "signs": (lambda x: (torch.copysign(x, x.flip(0)), torch.signbit(x * -1), torch.copysign(x, -0.0)), ZEROS),
    "double powers": (lambda x: (torch.float_power(x, 2), torch.float_power(2, x)), REAL),
    "shifts": (lambda x: (x << 2, x >> 1, x << x.abs(), 1 << x.abs(), torch.bitwise_right_shift(x, TWICE)), WHOLE),
    "shifts of 32 bits": (lambda x: (x << TWICE.int(), (x * 99999) >> TWICE.int()), WHOLE.int()),
    "shifts by all": (lambda x: (x << TWICE, (x * 2**59) >> (TWICE + 1)), WHOLE),
    "unpacked": (lambda x: (x.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15, WHOLE.int() * 123456789),
    "wrapped": (lambda x: ((x * 99).to(torch.int8).float(), (x * 99).byte().long() * 3, (x * 9999).short() > 3), WHOLE),
}
INTERPOLATIONS = ("lower", "higher", "midpoint", "nearest")
CASES |= {i: (lambda x, i=i: torch.quantile(x, 0.37, 1, interpolation=i), REAL) for i in INTERPOLATIONS}


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str) -> None:
    f, x = CASES[name]
    for given in (x, x.double()) if x.is_floating_point() else (x,):
        model = Calls(f)
        net = torch2needle.convert(model, (given,))
        want = listed(model(given))
        tolerance = 2e-5 if given.dtype != torch.float64 or name == "weights" else 1e-11  # torch's weights are float32
        for run in (net, ndl.compile(net, (given,))):
            for ours, theirs in zip(listed(run(given)), want, strict=True):
                got = np.asarray(ours.numpy())
                assert got.shape == theirs.shape and str(got.dtype) == str(theirs.dtype)[6:]
                np.testing.assert_allclose(got, theirs.detach().numpy(), rtol=tolerance, atol=tolerance / 10)
        if not given.is_floating_point() or "overflow" in name:  # where torch's own gradient is NaN
            continue
        leaf, mine = given.clone(), ndl.Tensor(given.numpy(), dtype=str(given.numpy().dtype))
        sum(t.double().square().sum() for t in listed(model(leaf.requires_grad_())) if t.requires_grad).backward()
        ours = [t for t, w in zip(listed(net(mine)), want, strict=True) if w.is_floating_point()]
        squares = [ndl.ops.summation(ndl.ops.cast(t, "float64") ** 2) for t in ours]
        sum(squares[1:], start=squares[0]).backward()
        np.testing.assert_allclose(mine.grad.numpy(), leaf.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_kernels_and_their_compositions() -> None:
    """Strided views and long axes; what devices without the kernels run."""
    rng = np.random.default_rng(0)
    x = ndl.Tensor(rng.integers(-3, 4, (40, 9)).astype("float32"))
    for op in (ndl.ops.CumMax(0), ndl.ops.CumMax(1), ndl.ops.CumProd(1), ndl.ops.CumProd(0), ndl.ops.LogCumSumExp(0)):
        for view in (x, ndl.ops.flip(x, 0), ndl.ops.transpose(x)):
            want = op.reference(view.numpy())
            for got in (op(view), op.decompose(view)):
                np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


def test_free_batches() -> None:
    net = torch2needle.convert(Calls(lambda x: (x.cumprod(1) + x.cummax(1)[0]).flatten(1).sort(1)[0]))
    for n in (0, 1, 5):
        x = torch.randn(n, 4)
        np.testing.assert_allclose(net(x).numpy(), (x.cumprod(1) + x.cummax(1)[0]).sort(1)[0].numpy(), rtol=1e-5)
    example = torch2needle.convert(Calls(lambda x: x.quantile(0.3)), (torch.randn(3, 4),))
    for n in (1, 6):
        x = torch.randn(n, 4)
        np.testing.assert_allclose(example(x).numpy(), x.quantile(0.3).numpy(), rtol=1e-5)


@pytest.mark.parametrize("replacement", [True, False])
def test_drawn_numbers(replacement: bool) -> None:
    weights = torch.tensor([[1.0, 0.0, 4.0, 3.0], [0.0, 2.0, 0.0, 6.0]])
    net = torch2needle.convert(Calls(lambda w: torch.multinomial(w, 2, replacement)), (weights,))
    drawn = np.stack([net(weights).numpy() for _ in range(2000)])
    assert drawn.dtype == np.int64 and drawn.shape == (2000, 2, 2)
    assert replacement or (drawn[..., 0] != drawn[..., 1]).all()
    for row, given in enumerate(weights.numpy() / weights.numpy().sum(1, keepdims=True)):
        first = np.bincount(drawn[:, row, 0], minlength=4) / 2000
        assert np.abs(first - given).max() < 0.05 and (first[given == 0] == 0).all()


COMPARED: tuple[Callable, ...] = (
    lambda x, y: torch.equal(x, y),
    lambda x, y: torch.allclose(x, y, atol=1e-3),
    lambda x, y: x.equal(y),
)


@pytest.mark.parametrize("compared", COMPARED)
def test_comparisons_are_guards(compared: Callable) -> None:
    class Compares(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 if compared(x, y) else x + y

    model = Compares()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for given, other in (((x, y), (x, x.clone())), ((x, x.clone()), (x, y))):
        net = torch2needle.convert(model, given)
        np.testing.assert_array_equal(net(*given).numpy(), model(*given).numpy())
        with pytest.raises(ndl.nn.functional.GuardError, match="answer"):
            net(*other)


def test_steps_move_statistics_once_for_each_call() -> None:
    """Of a batch norm that is called for two views, in a model that only torch.export follows."""

    class Twins(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
            self.register_buffer("center", torch.zeros(4))

        def forward(self, x: Any, y: Any) -> Any:
            x, y = self.norm(self.linear(x)), self.norm(self.linear(y))
            if self.training:
                self.center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            return (x - y - self.center).pow(2).mean() + (x + self.norm.running_mean).mean()

    model, inputs = Twins().train(), (torch.randn(5, 3), torch.randn(5, 3) + 2)
    net = torch2needle.convert(model, inputs)
    step = ndl.compile_step(net, lambda out, _: out, ndl.optim.SGD(net.parameters(), lr=0.1), (inputs, inputs[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(float(step(inputs, inputs[0])), float(loss), rtol=1e-4)
    for name, theirs in model.state_dict().items():
        np.testing.assert_allclose(net.state_dict()[name].numpy(), theirs.numpy(), atol=1e-5, err_msg=name)


def test_a_stack_of_one_trains_in_a_step() -> None:
    model, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    net = torch2needle.convert(Calls(lambda h: torch.stack([torch.stack([h], -1).unbind(-1)[0].sin()], 1)))
    both = ndl.nn.Sequential(torch2needle.convert(model), net)
    step = ndl.compile_step(both, lambda out, y: out.sum(), ndl.optim.SGD(both.parameters(), lr=0.1), (x, x))
    step(x, x)
    model(x).sin().sum().backward()
    np.testing.assert_allclose(
        both.parameters()[0].numpy(), (model.weight - 0.1 * model.weight.grad).detach().numpy(), atol=1e-6
    )


def test_values_that_numpy_reads_are_guards() -> None:
    class Periods(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for period in 12 // (x.argmax(1) + 1).numpy():
                x = x + x.reshape(-1, int(period)).sum(1).mean()
            return x

    x = torch.tensor([[0.0, 3, 1, 0, 0, 0], [5.0, 1, 0, 0, 0, 0]])
    net = torch2needle.convert(Periods(), (x,))
    np.testing.assert_allclose(net(x * 2).numpy(), Periods()(x * 2).numpy())
    with pytest.raises(ndl.nn.functional.GuardError):
        net(x.flip(1))
