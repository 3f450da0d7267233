"""Rules of pooling over one, two and three axes, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from conversion import Calls, converts  # noqa: E402
from gpu_devices import everywhere  # noqa: E402

LINE, IMAGE, VOLUME = (2, 4, 11), (2, 4, 9, 7), (2, 3, 5, 6, 7)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "max1d": (lambda: nn.MaxPool1d(3), LINE),
    "max1d all": (lambda: nn.MaxPool1d(3, 2, 1, 2, ceil_mode=True), LINE),
    "max1d stride over kernel": (lambda: nn.MaxPool1d(2, 4), LINE),
    "max1d ceil last window in padding": (lambda: nn.MaxPool1d(2, 2, 1, ceil_mode=True), LINE),
    "max1d ceil kernel over input": (lambda: nn.MaxPool1d(3, 2, ceil_mode=True), (2, 4, 2)),
    "max2d": (lambda: nn.MaxPool2d(3, 2, 1), IMAGE),
    "max2d ceil": (lambda: nn.MaxPool2d(2, ceil_mode=True), IMAGE),
    "max2d ceil kernel over input": (lambda: nn.MaxPool2d((2, 3), 2, ceil_mode=True), (2, 4, 1, 7)),
    "max2d dilated": (lambda: nn.MaxPool2d((3, 2), (1, 3), (1, 1), (2, 3)), IMAGE),
    "max3d": (lambda: nn.MaxPool3d(2), VOLUME),
    "max3d all": (lambda: nn.MaxPool3d((3, 2, 3), (2, 1, 3), (1, 1, 0), (1, 2, 2), ceil_mode=True), VOLUME),
    "max3d flat": (lambda: nn.MaxPool3d((1, 2, 2), ceil_mode=True), (1, 3, 1, 5, 5)),
    "avg1d": (lambda: nn.AvgPool1d(3), LINE),
    "avg1d all": (lambda: nn.AvgPool1d(4, 3, 2, ceil_mode=True, count_include_pad=False), LINE),
    "avg1d ceil": (lambda: nn.AvgPool1d(3, 3, 1, ceil_mode=True), LINE),
    "avg2d": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    "avg2d ceil": (lambda: nn.AvgPool2d((2, 3), (4, 2), (1, 1), ceil_mode=True), IMAGE),
    "avg2d divisor": (lambda: nn.AvgPool2d(3, 2, 1, True, divisor_override=4), IMAGE),
    "avg3d": (lambda: nn.AvgPool3d(2), VOLUME),
    "avg3d ceil": (lambda: nn.AvgPool3d(3, 2, 1, ceil_mode=True), VOLUME),
    "avg3d inside only": (lambda: nn.AvgPool3d((2, 3, 3), (2, 2, 3), 1, True, count_include_pad=False), VOLUME),
    "avg3d divisor": (lambda: nn.AvgPool3d((2, 3, 2), 2, (1, 1, 0), divisor_override=5), VOLUME),
    "adaptive avg1d": (lambda: nn.AdaptiveAvgPool1d(4), LINE),
    "adaptive avg2d": (lambda: nn.AdaptiveAvgPool2d((3, None)), IMAGE),
    "adaptive avg2d larger": (lambda: nn.AdaptiveAvgPool2d((13, 8)), IMAGE),
    "adaptive avg3d": (lambda: nn.AdaptiveAvgPool3d((3, None, 2)), VOLUME),
    "adaptive avg3d larger": (lambda: nn.AdaptiveAvgPool3d(8), VOLUME),
    "adaptive avg3d one": (lambda: nn.AdaptiveAvgPool3d(1), VOLUME),
    "adaptive max1d": (lambda: nn.AdaptiveMaxPool1d(4), LINE),
    "adaptive max1d larger": (lambda: nn.AdaptiveMaxPool1d(14), LINE),
    "adaptive max2d": (lambda: nn.AdaptiveMaxPool2d((4, None)), IMAGE),
    "adaptive max2d divisor": (lambda: nn.AdaptiveMaxPool2d((3, 1)), IMAGE),
    "adaptive max2d larger": (lambda: nn.AdaptiveMaxPool2d(10), IMAGE),
    "adaptive max3d": (lambda: nn.AdaptiveMaxPool3d((2, 4, None)), VOLUME),
}


@everywhere
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    make, shape = MODULES[name]
    converts(nn.Sequential(make()), shape)


FUNCTIONS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "max1d": (lambda x: F.max_pool1d(x, 3, stride=2, padding=1) + torch.max_pool1d(x, [3], [2], 1), LINE),
    "max2d": (lambda x: F.max_pool2d(x, kernel_size=3, stride=2, padding=1) + torch.max_pool2d(x, 3, 2, 1), IMAGE),
    "max3d": (lambda x: F.max_pool3d(x, (1, 2, 2)) + torch.max_pool3d(x, (1, 2, 2)), VOLUME),
    "avg1d": (lambda x: F.avg_pool1d(x, 2, ceil_mode=True), LINE),
    "avg2d": (lambda x: F.avg_pool2d(x, (3, 2), stride=2, padding=1), IMAGE),
    "avg3d": (lambda x: F.avg_pool3d(x, 3, 2, 1, divisor_override=2), VOLUME),
    "adaptive avg": (lambda x: F.adaptive_avg_pool1d(x, 1) + torch.adaptive_avg_pool1d(x, 11), LINE),
    "adaptive avg2d": (lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 3, 2)), IMAGE),
    "adaptive avg3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), VOLUME),
    "adaptive max1d": (lambda x: F.adaptive_max_pool1d(x, 3), LINE),
    "adaptive max2d": (lambda x: F.adaptive_max_pool2d(x, (2, 5)), IMAGE),
    "adaptive max3d": (lambda x: F.adaptive_max_pool3d(x, (2, 3, 1)), VOLUME),
}


@everywhere
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    f, shape = FUNCTIONS[name]
    converts(Calls(f), shape)
    converts(Calls(f), shape, example=True)


TIES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "max1d": (nn.MaxPool1d(3, 1), (1, 2, 8)),
    "max3d": (nn.MaxPool3d(2, 1), (1, 2, 3, 4, 4)),
    "adaptive max2d": (nn.AdaptiveMaxPool2d((2, 3)), (1, 2, 5, 5)),
    "adaptive max3d": (nn.AdaptiveMaxPool3d((2, 2, 1)), (1, 1, 3, 3, 4)),
}


@everywhere
@pytest.mark.parametrize("name", TIES)
def test_of_equal_values_the_same_one_gets_the_gradient(name: str) -> None:
    module, shape = TIES[name]
    torch.manual_seed(1)
    converts(nn.Sequential(module), torch.randint(0, 2, shape).float())


def unpooled(x: torch.Tensor, pool: nn.Module, back: nn.Module) -> torch.Tensor:
    y, places = pool(x)
    return back(y * 2, places, output_size=x.shape)


PLACES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "module": (nn.Sequential(nn.MaxPool2d((3, 2), 2, (1, 0), (1, 2), True, True)), IMAGE),
    "one axis": (nn.Sequential(nn.MaxPool1d(3, 2, 1, return_indices=True)), LINE),
    "adaptive": (nn.Sequential(nn.AdaptiveMaxPool3d((2, None, 3), return_indices=True)), VOLUME),
    "adaptive, two axes": (nn.Sequential(nn.AdaptiveMaxPool2d((3, 2), return_indices=True)), IMAGE),
    "adaptive, one axis": (nn.Sequential(nn.AdaptiveMaxPool1d(4, return_indices=True)), LINE),
    "ties": (Calls(lambda x: F.max_pool2d(x.relu(), 3, 2, 1, return_indices=True)), IMAGE),
    "transposed": (Calls(lambda x: F.max_pool2d(x.transpose(2, 3), 3, 2, return_indices=True)), IMAGE),
    "function": (Calls(lambda x: F.max_pool3d(x, 2, return_indices=True)), VOLUME),
    "one sample": (Calls(lambda x: F.max_pool2d(x, 2, return_indices=True)), IMAGE[1:]),
    "and back": (Calls(unpooled, nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)), IMAGE),
    "and back, one axis": (Calls(unpooled, nn.MaxPool1d(3, 2, return_indices=True), nn.MaxUnpool1d(3, 2)), LINE),
    "and back, three axes": (Calls(unpooled, nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2)), VOLUME),
}


@everywhere
@pytest.mark.parametrize("name", PLACES)
def test_places_of_maxima(name: str) -> None:
    module, shape = PLACES[name]
    converts(module, shape, example=True, batch=len(shape) != 3)


@pytest.mark.parametrize("values", [[0.0, 0, 0, 0], [-math.inf] * 4, [1, math.nan, math.nan, 2], [math.nan, 3, 1, 1]])
def test_places_of_equal_and_missing_values(values: list[float]) -> None:
    x = torch.tensor(values).view(1, 1, 4)
    model = Calls(lambda x: F.max_pool1d(x, 4, 2, 2, return_indices=True)).eval()
    net = torch2needle.convert(model, (x,))
    assert (net(x)[1].numpy() == model(x)[1].numpy()).all()


def test_numbers_that_no_image_has() -> None:
    net = torch2needle.convert(Calls(lambda x: F.max_unpool1d(x, (x * 0 + 9).long(), 2)), (torch.ones(1, 1, 5),))
    with pytest.raises(IndexError, match=r"\[max_unpool\] index expects numbers in \[0, 6\), got 9 to 9"):
        net(torch.ones(1, 1, 3))


ERRORS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "no channels": (nn.AvgPool3d(2), (4, 4, 4), r"\[avg_pool3d\] expects shape \(N, C, D, H, W\), got \(4, 4, 4\)\."),
    "no channels of a line": (nn.MaxPool1d(2), (4,), r"\[max_pool1d\] expects shape \(N, C, L\), got \(4,\)\."),
    "padding": (
        nn.MaxPool1d(2, padding=2),
        (1, 3, 4),
        r"\[MaxPool1d\] padding expects at most half of kernel_size 2, got 2",
    ),
    "too small": (nn.AvgPool2d(5), (1, 3, 4, 9), r"\[avg_pool2d\] kernel \(5, 5\) is larger than the padded input"),
    "adaptive": (nn.AdaptiveMaxPool2d(2), (4, 4), r"\[adaptive_max_pool2d\] expects shape \(N, C, H, W\)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name: str) -> None:
    module, shape, message = ERRORS[name]
    with pytest.raises((ValueError, torch2needle.ConversionError), match=message):
        torch2needle.convert(nn.Sequential(module))(torch.randn(shape))
