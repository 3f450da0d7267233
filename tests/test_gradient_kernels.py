"""Gradients with a kernel of their own, eagerly and in compiled steps, beside torch's in float64: shapes on both sides of every
choice between ways of computing them."""

from __future__ import annotations

import copy
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
from needle.backend_selection import BACKEND  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="conversion is tested on needle's own arrays")


class Weighed(nn.Module):
    """The sum of the results of a function of a parameter and of layers, each result times a number."""

    def __init__(self, function: Callable, x: Any, *layers: nn.Module) -> None:
        super().__init__()
        self.x, self.function, self.layers = nn.Parameter(x), function, nn.ModuleList(layers)

    def forward(self, weights: Any) -> Any:
        return (self.function(self.x, *self.layers) * weights).sum()


def gradients(net: nn.Module, weights: Any) -> dict[str, np.ndarray]:
    net(weights).backward()
    return {n: p.grad.numpy() for n, p in net.named_parameters()}


def ours(net: nn.Module, weights: Any, compiled: bool) -> dict[str, np.ndarray]:
    converted = torch2needle.convert(copy.deepcopy(net), (weights,), dynamic=False)
    named = dict(converted.named_parameters())
    if not compiled:
        converted(weights).backward()
        return {n: named[n].grad.numpy() for n, _ in net.named_parameters()}
    optimizer = ndl.optim.SGD(
        list(named.values()), lr=0.0, momentum=0.9, rule="torch"
    )  # its state begins as the gradient
    ndl.compile_step(converted, lambda y: y, optimizer, (weights,))(weights)
    return {n: optimizer.state[named[n]]["momentum"].numpy() for n, _ in net.named_parameters()}


def check(function: Callable, x: Any, *layers: nn.Module) -> None:
    """Both ways within rounding of torch's gradients in float64, or three times as far as torch in float32."""
    with torch.no_grad():
        weights = torch.randn_like(function(x, *layers))
    net = Weighed(function, x, *layers).train()
    exact = gradients(copy.deepcopy(net).double(), weights.double())
    theirs = gradients(copy.deepcopy(net), weights)
    for compiled in (False, True):
        found = ours(net, weights, compiled)
        for name, gradient in exact.items():
            size = max(1.0, float(np.abs(gradient).max(initial=0)))
            limit = max(2e-6 * size, 3 * float(np.abs(theirs[name] - gradient).max(initial=0)))
            np.testing.assert_allclose(found[name], gradient, rtol=0, atol=limit, err_msg=f"{name}, {compiled}")


SHAPES = [((3, 5, 4), 1), ((2, 21, 130), 1), ((300, 7), 0), ((2, 3, 5, 7), 2), ((4, 33), -1), ((70, 3), 1), ((1, 1), 0)]
ALONG: dict[str, Callable] = {
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "cumprod": lambda x, d: (x * 0.3 + 1).cumprod(d),
    "max": lambda x, d: x.max(d)[0],
    "min": lambda x, d: x.min(d, keepdim=True)[0],
    "ties": lambda x, d: x.round().max(d)[0] + x.max(d)[0],
    "sort": lambda x, d: x.sort(d)[0],
    "cummax": lambda x, d: x.cummax(d)[0],
}


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_along_an_axis(name: str, shape: tuple, axis: int) -> None:
    torch.manual_seed(0)
    check(lambda x: ALONG[name](x, axis), torch.randn(shape))


def test_sums_of_exponentials_over_several_axes_and_of_nothing_but_infinities() -> None:
    torch.manual_seed(0)
    for axes in ((0, 1), (1, 2), (0, 2), (1,)):
        check(lambda x, a=axes: x.logsumexp(a), torch.randn(3, 5, 40))
    x = torch.randn(3, 5, 40)
    x[:, :, 7] = -math.inf
    x[0, 1, 9] = math.inf
    got = ndl.ops.logsumexp(ndl.Tensor(x.numpy()), 1).numpy()
    np.testing.assert_allclose(got, x.logsumexp(1).numpy(), rtol=1e-6)


@pytest.mark.parametrize("zeros", [(), (2,), (1, 3), (0, 4)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_running_products_with_zeros(zeros: tuple, axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 5, 9)
    x.movedim(axis, 0)[list(zeros)] = 0
    check(lambda x: x.cumprod(axis), x)


@pytest.mark.parametrize(
    ("shape", "index", "axis"),
    [
        ((5, 7), (3, 7), 0),
        ((5, 7), (5, 30), 1),
        ((4, 6, 3), (2, 9, 3), 1),
        ((4, 6, 3), (4, 6, 1), -1),
        ((900, 2), (900, 5), 1),
        ((7,), (20,), 0),
        ((2, 3, 4, 5), (1, 3, 8, 2), 2),
    ],
    ids=str,
)
def test_elements_by_numbers(shape: tuple, index: tuple, axis: int) -> None:
    """Most of the numbers are there more than once."""
    torch.manual_seed(0)
    numbers = torch.randint(0, shape[axis], index)
    check(lambda x: x.gather(axis, numbers), torch.randn(shape))


@pytest.mark.parametrize(("rows", "width", "count"), [(7, 1, 300), (300, 1, 5), (9, 33, 200), (50, 5, 1), (3, 4, 0)])
def test_rows_by_numbers(rows: int, width: int, count: int) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(0, rows, (count,))
    check(lambda x: x[numbers], torch.randn(rows, width))
    check(lambda x: x.index_select(1, numbers), torch.randn(width, rows))


@pytest.mark.parametrize(
    "shape", [(1, 2), (300, 7), (5, 16), (5, 17), (2, 3, 33), (3, 1), (2, 1500), (1, 40), (0, 5)], ids=str
)
@pytest.mark.parametrize("kind", ["layer", "weight", "plain", "rms", "rms plain"])
def test_norms_of_rows(kind: str, shape: tuple) -> None:
    torch.manual_seed(0)
    made: dict[str, Callable] = {
        "layer": nn.LayerNorm,
        "weight": lambda n: nn.LayerNorm(n, bias=False),
        "plain": lambda n: nn.LayerNorm(n, elementwise_affine=False),
        "rms": lambda n: nn.RMSNorm(n, eps=1e-5),
        "rms plain": lambda n: nn.RMSNorm(n, eps=1e-5, elementwise_affine=False),
    }
    norm = made[kind](shape[-1])
    for p in norm.parameters():
        nn.init.normal_(p)
    check(lambda x, norm: norm(x), torch.randn(shape) * 0.7 + 0.5, norm)


def test_norms_of_several_axes_and_of_groups() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, 5, 7)
    for norm in (
        nn.LayerNorm((5, 7)),
        nn.LayerNorm((6, 5, 7)),
        nn.RMSNorm((5, 7)),
        nn.GroupNorm(3, 6),
        nn.GroupNorm(6, 6),
    ):
        check(lambda x, norm: norm(x), x, norm)


@pytest.mark.parametrize("width", [3, 16, 17, 64])
def test_equal_numbers_far_from_zero_keep_a_zero_gradient(width: int) -> None:
    x = torch.full((4, width), 1000.1)
    net = Weighed(lambda x: F.layer_norm(x, (width,)), x)
    exact = gradients(copy.deepcopy(net), torch.ones(4, width))
    found = ours(net, torch.ones(4, width), False)
    np.testing.assert_allclose(found["x"], exact["x"], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (3, 21, 70), (2, 2, 1, 1), (1, 130, 8, 9), (40, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 1}, {"reduction": "sum"}], ids=str)
def test_cross_entropy(shape: tuple, options: dict[str, Any], dtype: Any) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    labels.view(-1)[0] = 0  # not all are ignored
    x = torch.randn(shape) * 3
    if dtype == torch.int64:
        check(lambda x: F.cross_entropy(x, labels, **options), x)
    got = ndl.ops.cross_entropy(ndl.Tensor(x.numpy()), ndl.Tensor(labels.to(dtype).numpy()), **options)
    np.testing.assert_allclose(got.numpy(), F.cross_entropy(x.double(), labels, **options).numpy(), rtol=2e-6)


def test_a_class_that_there_is_not_is_nan_in_an_executable() -> None:
    x, labels = np.zeros((2, 3, 4, 5), "float32"), np.ones((2, 4, 5), "int64")
    exe = ndl.compile(lambda x, y: ndl.ops.softmax_loss(x, y, "none"), (x, labels))
    labels[1, 2, 3], labels[0, 0, 0] = 3, -1
    wrong = np.isnan(exe(x, labels))
    assert wrong[1, 2, 3] and wrong[0, 0, 0] and wrong.sum() == 2


def test_angles_at_the_origin() -> None:
    check(lambda x: torch.atan2(x, x.flip(0)), torch.tensor([0.0, 0.0, 2.0, -1.0, 0.0, 0.0]))


def test_repeats_of_many_axes() -> None:
    torch.manual_seed(0)
    check(lambda x: x.repeat(1, 2, 1, 1, 3) ** 2, torch.randn(2, 3, 1, 2, 2))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(("rows", "columns", "terms"), [(4, 5, 3), (1, 200, 2), (30, 9, 70), (7, 1, 17), (3, 4, 130)])
def test_distances(rows: int, columns: int, terms: int, p: float) -> None:
    """Of both, of batches that broadcast, and of rows of which one has no distance."""
    torch.manual_seed(0)
    other, x = torch.randn(columns, terms), torch.randn(2, rows, terms)
    x[0, 0] = other[0]
    check(lambda x: torch.cdist(x, other.to(x.dtype), p), x)
    check(lambda y: torch.cdist(y.sin()[None].expand(2, -1, -1), y[:2].cos(), p), other)


def test_distances_of_neighbours_do_not_cancel() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5) + 100
    check(lambda x: torch.cdist(x, x.detach() + 1e-2), x)
