"""Rules of padding, interpolation and rearranged pixels, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import Calls, converts  # noqa: E402
from gpu_devices import everywhere  # noqa: E402
from needle.ops.nn.resize import Interpolate  # noqa: E402

LINE, IMAGE, VOLUME = (2, 4, 7), (2, 3, 6, 5), (1, 2, 4, 5, 6)
PADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "zero1d": (lambda: nn.ZeroPad1d((1, 2)), LINE),
    "zero2d": (lambda: nn.ZeroPad2d((1, 2, 0, 3)), IMAGE),
    "zero2d crop": (lambda: nn.ZeroPad2d((-1, 2, 1, -2)), IMAGE),
    "zero3d": (lambda: nn.ZeroPad3d((1, 2, 0, 3, -1, 2)), VOLUME),
    "constant1d": (lambda: nn.ConstantPad1d(2, 0.5), LINE),
    "constant2d": (lambda: nn.ConstantPad2d(1, 0.5), IMAGE),
    "constant3d": (lambda: nn.ConstantPad3d((0, 1, 2, 0, 1, 1), -1.5), VOLUME),
    "reflection1d": (lambda: nn.ReflectionPad1d((6, 2)), LINE),
    "reflection2d": (lambda: nn.ReflectionPad2d((4, 1, 0, 5)), IMAGE),
    "reflection3d": (lambda: nn.ReflectionPad3d((1, 2, 3, 0, 1, 3)), VOLUME),
    "replication1d": (lambda: nn.ReplicationPad1d((9, 1)), LINE),
    "replication2d": (lambda: nn.ReplicationPad2d((1, 0, 7, 2)), IMAGE),
    "replication3d": (lambda: nn.ReplicationPad3d(2), VOLUME),
    "replication of one": (lambda: nn.ReplicationPad2d(2), (2, 3, 1, 1)),
    "circular1d": (lambda: nn.CircularPad1d((7, 2)), LINE),
    "circular2d": (lambda: nn.CircularPad2d((5, 1, 0, 6)), IMAGE),
    "circular3d": (lambda: nn.CircularPad3d((1, 2, 0, 3, 4, 1)), VOLUME),
    "circular2d crop": (lambda: nn.CircularPad2d((-1, 2, 1, -2)), IMAGE),
}
PAD_CALLS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "constant": (lambda x: F.pad(x, [1, 2, 0, 1], value=0.5), IMAGE),
    "negative": (lambda x: F.pad(x, (-1, -2, 3, -1)), IMAGE),
    "all axes": (lambda x: F.pad(x, (1, 0, 0, 1, 2, 1, 0, 1)), IMAGE),
    "last of five axes": (lambda x: F.pad(x, (1, 2), value=2.0), VOLUME),
    "middle of five axes": (lambda x: F.pad(x, (0, 0, 1, 0, 0, 2)), VOLUME),
    "symbolic": (lambda x: F.pad(x, (0, 8 - x.shape[3], 1, x.shape[2] - 5)), IMAGE),
    "symbolic reflect": (lambda x: F.pad(x, (0, 8 - x.shape[3], 1, x.shape[2] - 5), mode="reflect"), IMAGE),
    "reflect": (lambda x: F.pad(x, (2, 1), "reflect"), LINE),
    "value of 0": (lambda x: F.pad(x, (2, 1), "reflect", 0.0) + F.pad(x, (2, 1), mode="replicate", value=0), LINE),
    "reflect crop": (lambda x: F.pad(x, (-2, 3, 1, -1), mode="reflect"), IMAGE),
    "replicate": (lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"), IMAGE),
    "replicate crop": (lambda x: F.pad(x, (-2, 1, 2, -3), mode="replicate"), IMAGE),
    "circular": (lambda x: F.pad(x, (2, 1, 3, 0, 1, 1), mode="circular"), VOLUME),
    "nothing": (lambda x: F.pad(x, (0, 0, 0, 0), mode="reflect") * 1, IMAGE),
}
REARRANGED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (2, 8, 3, 5)),
    "pixel shuffle 3": (lambda: nn.PixelShuffle(3), (1, 9, 1, 2)),
    "pixel unshuffle": (lambda: nn.PixelUnshuffle(2), (2, 3, 4, 6)),
    "channel shuffle": (lambda: nn.ChannelShuffle(2), (2, 6, 3, 5)),
    "unfold": (lambda: nn.Unfold((2, 3)), IMAGE),
    "unfold all": (lambda: nn.Unfold((3, 2), dilation=(1, 2), padding=(1, 0), stride=(3, 1)), IMAGE),
    "fold": (lambda: nn.Fold((4, 5), (2, 3)), (2, 18, 9)),
    "fold all": (lambda: nn.Fold((6, 5), (3, 2), dilation=(1, 2), padding=(1, 0), stride=(3, 1)), (2, 18, 6)),
    "fold gaps": (lambda: nn.Fold((7, 5), 2, stride=3), (2, 12, 4)),
    "calls": (lambda: Calls(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 4)), (2, 8, 6, 4)),
    "channel call": (lambda: Calls(lambda x: F.channel_shuffle(x, 3)), (2, 6, 3)),
    "fold of unfold": (lambda: Calls(lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 5), 3, padding=1)), IMAGE),
}


@everywhere
@pytest.mark.parametrize("name", PADS)
def test_padding_module(name: str) -> None:
    make, shape = PADS[name]
    converts(nn.Sequential(make()), shape)


@everywhere
@pytest.mark.parametrize("name", PAD_CALLS)
def test_padding_function(name: str) -> None:
    f, shape = PAD_CALLS[name]
    converts(Calls(f), shape)
    converts(Calls(f), shape, example=True)


@everywhere
@pytest.mark.parametrize("name", REARRANGED)
def test_rearranged(name: str) -> None:
    make, shape = REARRANGED[name]
    converts(nn.Sequential(make()), shape)


def sizes() -> list[Any]:
    """(input shape, arguments) of interpolate: every mode, up and down, by size and by factor."""
    cases: list[Any] = []
    for shape, modes in (
        (LINE, ("nearest", "nearest-exact", "area", "linear")),
        (IMAGE, ("nearest", "nearest-exact", "area", "bilinear", "bicubic")),
        (VOLUME, ("nearest", "nearest-exact", "area", "trilinear")),
    ):
        n = len(shape) - 2
        for mode in modes:
            arguments: list[dict[str, Any]] = [
                {"size": 9},
                {"size": (3, 8, 1)[:n]},
                {"scale_factor": 2},
                {"scale_factor": (1.7, 0.6, 2.5)[:n]},
                {"scale_factor": (1.7, 0.6, 2.5)[:n], "recompute_scale_factor": True},
            ]
            for a in arguments:
                cases.append((shape, {**a, "mode": mode}))
                if "linear" in mode or mode == "bicubic":
                    cases.append((shape, {**a, "mode": mode, "align_corners": True}))
        cases.append(((1, 2) + (1,) * n, {"size": 3, "mode": modes[-1]}))
        cases.append(((1, 2) + (1,) * n, {"size": 3, "mode": modes[-1], "align_corners": modes[-1] != "area"}))
    return cases


def describe(case: tuple[tuple[int, ...], dict[str, Any]]) -> str:
    return f"{len(case[0]) - 2}d-" + "-".join(f"{k}={v}" for k, v in case[1].items())


@everywhere
@pytest.mark.parametrize(("shape", "arguments"), sizes(), ids=map(describe, sizes()))
def test_interpolate(shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
    converts(Calls(lambda x: F.interpolate(x, **arguments)), shape)


UPSAMPLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "nearest line": (lambda: nn.Upsample(scale_factor=3), LINE),
    "legacy bilinear": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    "legacy nearest": (lambda: nn.UpsamplingNearest2d(size=(7, 4)), IMAGE),
    "bilinear": (lambda: nn.Upsample(size=(5, 11), mode="bilinear"), IMAGE),
    "bicubic": (lambda: nn.Upsample(scale_factor=(1.5, 2.0), mode="bicubic", align_corners=True), IMAGE),
    "trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    "recomputed": (lambda: nn.Upsample(scale_factor=1.7, mode="bilinear", recompute_scale_factor=True), IMAGE),
}


@everywhere
@pytest.mark.parametrize("name", UPSAMPLE)
def test_upsample(name: str) -> None:
    make, shape = UPSAMPLE[name]
    converts(nn.Sequential(make()), shape)


CALLS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "symbolic": (
        lambda x: F.interpolate(x, size=(x.shape[2] * 2, 5), mode="bilinear", align_corners=True),
        IMAGE,
    ),
    "shape of another": (lambda x: F.interpolate(F.max_pool2d(x, 2), size=x.shape[2:], mode="bicubic"), IMAGE),
    "list": (lambda x: F.interpolate(x, [x.size(2), 4], mode="area"), IMAGE),
    "float factor": (lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), IMAGE),
}


@everywhere
@pytest.mark.parametrize("name", CALLS)
def test_interpolate_with_sizes_of_tensors(name: str) -> None:
    f, shape = CALLS[name]
    if name != "shape of another":  # a slice of a shape needs the rank
        converts(Calls(f), shape)
    converts(Calls(f), shape, example=True)


@everywhere
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialias(mode: str, corners: bool) -> None:
    options = {"mode": mode, "align_corners": corners, "antialias": True}
    for size in [(1, 1), (3, 2), (6, 5), (7, 20)]:
        converts(Calls(lambda x, size=size: F.interpolate(x, size=size, **options)), IMAGE)
    for factor in (0.3, 0.77, (1.0, 2.3), 1.1):
        resize = lambda x, factor=factor: F.interpolate(x, scale_factor=factor, **options)  # noqa: E731
        # Five pixels times 1.1 are five, which torch copies; its gradient alone is that of a step of 1 / 1.1.
        converts(Calls(resize), IMAGE, example=True, gradient=factor != 1.1)
    one = Calls(lambda x: F.interpolate(x, size=(x.shape[2] // 2, 5), **options))
    converts(one, (2, 3, 2, 1), example=True)


def test_antialias_is_of_two_modes() -> None:
    with pytest.raises(
        ValueError, match=r"\[interpolate\] antialias goes with modes bilinear, bicubic only, got nearest"
    ):
        ndl.ops.interpolate(ndl.Tensor(np.ones((1, 1, 4, 4), "float32")), size=2, antialias=True)


ERRORS: dict[str, tuple[Callable, tuple[int, ...], str]] = {
    "reflect": (lambda x: F.pad(x, (7, 0), mode="reflect"), LINE, r"\[pad\] reflect pads \(7, 0\) are too large"),
    "circular": (lambda x: F.pad(x, (0, 8), mode="circular"), LINE, r"\[pad\] circular pads \(0, 8\) are too large"),
    "mode of another rank": (
        lambda x: F.interpolate(x, size=3, mode="bilinear"),
        LINE,
        r"\[interpolate\] mode bilinear expects shape \(N, C, H, W\), got \(2, 4, 7\)\.",
    ),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGE, r"\[pixel_shuffle\] expects .* C a multiple of 4, got"),
    "fold": (lambda x: F.fold(x, 4, 2), LINE, r"\[fold\] expects shape \(N, C \* 4, 9\), got \(2, 4, 7\)\."),
    "unfold": (lambda x: F.unfold(x, 2), LINE, r"\[unfold\] expects shape \(N, C, H, W\)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name: str) -> None:
    f, shape, message = ERRORS[name]
    net = torch2needle.convert(Calls(f))
    with pytest.raises(ValueError, match=message):
        net(torch.randn(shape))


@pytest.mark.parametrize("size", [None, (3, 9)])
@pytest.mark.parametrize("factor", [0.0, -1, (2.0, -0.5), float("nan")])
def test_scales_are_positive(size: Any, factor: Any) -> None:
    """Others would read beside the image."""
    x = ndl.Tensor(np.zeros((2, 3, 5, 4), "float32"))
    with pytest.raises(ValueError, match="scale_factor expects numbers above 0"):
        Interpolate(size, factor)(x)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("size", [(9, 30), (40, 7)])
def test_a_nan_stays_beside_its_pixel(size: tuple[int, int], antialias: bool) -> None:
    x = torch.randn(1, 2, 21, 19)
    x[0, 0, 10, 9] = torch.nan
    want = F.interpolate(x, size, mode="bicubic", antialias=antialias).numpy()
    got = ndl.ops.interpolate(ndl.Tensor(x.numpy()), size, mode="bicubic", antialias=antialias).numpy()
    assert 0 < np.isnan(got).sum() <= np.isnan(want).sum() < want.size / 4
    known = ~np.isnan(want)
    np.testing.assert_allclose(got[known], want[known], rtol=1e-5, atol=1e-5)
