"""Rules of convolutions over one, two and three axes, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import Calls, close, converts  # noqa: E402
from gpu_devices import everywhere  # noqa: E402

LINE, IMAGE, VOLUME = (2, 4, 11), (2, 4, 9, 7), (2, 4, 5, 6, 7)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), LINE),
    "conv1d all": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), LINE),
    "conv1d stride over kernel": (lambda: nn.Conv1d(4, 6, 2, stride=4, bias=False), LINE),
    "conv1d depthwise": (lambda: nn.Conv1d(4, 4, 5, padding=2, groups=4), LINE),
    "conv1d depthwise blocks": (lambda: nn.Conv1d(32, 32, 3, padding=1, groups=32), (1, 32, 9)),
    "conv1d multiplier": (lambda: nn.Conv1d(4, 8, 3, groups=4), LINE),
    "conv1d point": (lambda: nn.Conv1d(4, 6, 1), (2, 4, 1)),
    "conv1d same even": (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=3), LINE),
    "conv1d valid": (lambda: nn.Conv1d(4, 6, 4, padding="valid"), LINE),
    "conv1d reflect": (lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="reflect"), LINE),
    "conv1d replicate same": (lambda: nn.Conv1d(4, 6, 4, padding="same", padding_mode="replicate"), LINE),
    "conv1d circular": (lambda: nn.Conv1d(4, 6, 5, stride=2, padding=4, padding_mode="circular"), LINE),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), IMAGE),
    "conv2d all": (lambda: nn.Conv2d(4, 6, (3, 1), (2, 1), (1, 0), (1, 2), groups=2), IMAGE),
    "conv2d same": (lambda: nn.Conv2d(4, 6, 3, padding="same", bias=False), IMAGE),
    "conv2d same even": (lambda: nn.Conv2d(4, 6, (4, 2), padding="same", dilation=(1, 3)), IMAGE),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), IMAGE),
    "conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect"), IMAGE),
    "conv2d replicate": (lambda: nn.Conv2d(4, 6, 4, padding="same", padding_mode="replicate"), IMAGE),
    "conv2d circular": (lambda: nn.Conv2d(4, 6, 3, 2, (3, 1), padding_mode="circular"), IMAGE),
    "conv2d mode without padding": (lambda: nn.Conv2d(4, 6, 3, padding_mode="reflect"), IMAGE),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3), VOLUME),
    "conv3d all": (lambda: nn.Conv3d(4, 6, (3, 2, 1), (2, 1, 3), (2, 1, 0), (2, 1, 1), groups=2), VOLUME),
    "conv3d depthwise": (lambda: nn.Conv3d(4, 4, 3, padding=1, groups=4), VOLUME),
    "conv3d stride over kernel": (lambda: nn.Conv3d(4, 6, 1, stride=2, bias=False), VOLUME),
    "conv3d point": (lambda: nn.Conv3d(4, 6, 1), (2, 4, 1, 1, 1)),
    "conv3d along depth": (lambda: nn.Conv3d(4, 6, (3, 1, 1), (2, 1, 1), (1, 0, 0), (2, 1, 1), groups=2), VOLUME),
    "conv3d within frames": (lambda: nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1)), VOLUME),
    "conv3d same even": (lambda: nn.Conv3d(4, 6, (2, 4, 3), padding="same", dilation=(3, 1, 1)), VOLUME),
    "conv3d reflect": (lambda: nn.Conv3d(4, 6, 3, padding=(2, 1, 2), padding_mode="reflect"), VOLUME),
    "conv3d replicate": (lambda: nn.Conv3d(4, 6, 2, padding="same", padding_mode="replicate"), VOLUME),
    "conv3d circular": (lambda: nn.Conv3d(4, 6, 3, padding=1, padding_mode="circular"), VOLUME),
    "transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), LINE),
    "transpose1d all": (lambda: nn.ConvTranspose1d(4, 6, 3, 3, 1, 2, groups=2, dilation=2), LINE),
    "transpose1d stride over kernel": (lambda: nn.ConvTranspose1d(4, 6, 2, stride=3, bias=False), LINE),
    "transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "transpose2d groups": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False), IMAGE),
    "transpose2d depthwise": (lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, groups=4), IMAGE),
    "transpose3d": (lambda: nn.ConvTranspose3d(4, 6, 3), VOLUME),
    "transpose3d up": (lambda: nn.ConvTranspose3d(4, 6, 2, stride=2), VOLUME),
    "transpose3d all": (
        lambda: nn.ConvTranspose3d(4, 6, (3, 2, 3), (2, 1, 2), (1, 0, 2), (1, 0, 0), groups=2, dilation=(2, 1, 1)),
        VOLUME,
    ),
    "transpose3d stride over kernel": (lambda: nn.ConvTranspose3d(4, 6, 1, 2, output_padding=1), (1, 4, 2, 1, 3)),
    "transpose3d crop": (lambda: nn.ConvTranspose3d(4, 4, (4, 3, 3), (2, 2, 2), (3, 1, 1), groups=4), VOLUME),
}


@everywhere
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    make, shape = MODULES[name]
    converts(nn.Sequential(make()), shape)


class Functional(nn.Module):
    """A convolution as a function of the module's own weight and bias."""

    def __init__(self, f: Callable, *shape: int, outputs: int) -> None:
        super().__init__()
        self.f, self.weight, self.bias = f, nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Any) -> Any:
        return self.f(x, self.weight, self.bias)


FUNCTIONS: dict[str, tuple[Callable, tuple[int, ...], int, tuple[int, ...]]] = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1, groups=2), (6, 2, 3), 6, LINE),
    "conv1d same": (lambda x, w, b: torch.conv1d(x, w, b, padding="same"), (6, 4, 4), 6, LINE),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, None, (2, 1), (0, 1)) + b[:, None, None], (6, 4, 3, 2), 6, IMAGE),
    "conv2d same": (lambda x, w, b: torch.conv2d(x, w, bias=b, padding="same"), (6, 4, 3, 2), 6, IMAGE),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, dilation=(1, 2, 1)), (6, 4, 2, 3, 1), 6, VOLUME),
    "transpose1d": (lambda x, w, b: F.conv_transpose1d(x, w, b, 2, output_padding=1), (4, 3, 3), 3, LINE),
    "transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, groups=2), (4, 3, 3, 2), 6, IMAGE),
    "transpose3d": (lambda x, w, b: torch.conv_transpose3d(x, w, b, (1, 2, 2)), (4, 3, 2, 3, 1), 3, VOLUME),
}


@everywhere
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    f, weight, outputs, shape = FUNCTIONS[name]
    converts(Functional(f, *weight, outputs=outputs), shape)
    converts(Functional(f, *weight, outputs=outputs), shape, example=True)


@everywhere
def test_weights_computed_from_the_input() -> None:
    converts(Calls(lambda x: F.conv1d(x, x[:1, :, :3] * 2)), LINE, batch=False)
    converts(Calls(lambda x: F.conv3d(x, x[:1, :, :2, :3, :2] * 2, padding=1)), VOLUME, batch=False)


def test_other_sizes_of_one_model() -> None:
    net = torch2needle.convert(model := nn.Sequential(nn.Conv3d(2, 3, 2, 2, 1), nn.ReLU(), nn.Conv3d(3, 2, 1)))
    for shape in ((1, 2, 4, 5, 6), (3, 2, 1, 7, 2)):
        x = torch.randn(shape)
        close(net(x), model(x))
        close(ndl.compile(net, (x,))(x), model(x).detach())


@pytest.mark.parametrize("cls", [nn.Conv1d, nn.Conv3d])
def test_a_layer_is_one_op(cls: Any) -> None:
    x = ndl.graph.symbolic(torch2needle.convert(Functional(cls_function(cls), *cls(2, 3, 1).weight.shape, outputs=3)))
    assert [n.target.name for n in x.graph if n.kind == "op"] == [cls.__name__]


def cls_function(cls: Any) -> Callable:
    return {nn.Conv1d: F.conv1d, nn.Conv3d: F.conv3d}[cls]


ERRORS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "no channels": (nn.Conv1d(4, 6, 3), (9,), r"\[conv1d\] expects an input \(N, C, L\) and a 3-d weight, got \(9,\)"),
    "no channels of a volume": (nn.Conv3d(4, 6, 3), (5, 5, 5), r"\[conv3d\] expects an input \(N, C, D, H, W\)"),
    "an image for a line": (
        nn.ConvTranspose1d(4, 6, 3),
        (1, 4, 9, 9),
        r"\[conv_transpose1d\] expects an input \(N, C, L\)",
    ),
    "channels": (nn.Conv3d(4, 6, 1), (1, 3, 2, 2, 2), r"\[conv3d\] weight expects 4 input channels, got 3\."),
    "too small": (nn.Conv1d(4, 6, 5), (1, 4, 4), r"\[conv1d\] kernel \(5,\) is larger than the padded input \(4,\)\."),
    "too small by one with stride": (nn.Conv2d(4, 6, 3, 2), (1, 4, 2, 5), r"\[conv2d\] kernel .* is larger"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name: str) -> None:
    module, shape, message = ERRORS[name]
    net = torch2needle.convert(nn.Sequential(module))
    with pytest.raises(ValueError, match=message):
        net(torch.randn(shape))
