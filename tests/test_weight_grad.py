"""Weight gradients of convolutions on blocks of channels: the kernel against float64 on every ISA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.backend_ndarray import NDArray, array, call
from needle.ops.nn.conv import Conv2dWeightGrad
from test_winograd import blocked

TOLERANCE = 5e-6  # of the largest value


def narrow(x: np.ndarray, margin: int, around: float, halo: tuple[int, int]) -> NDArray:
    """A few channels as one block (N, 1, H, W, C) in a ring of `halo` zeros in a margin of `around`."""
    (n, c, h, w), (top, left) = x.shape, (margin + halo[0], margin + halo[1])
    whole = np.full((n, 1, h + 2 * top, w + 2 * left, c), around, "float32")
    whole[:, :, margin:-margin, margin:-margin] = 0
    whole[:, 0, top : top + h, left : left + w] = x.transpose(0, 2, 3, 1)
    return array(whole)[:, :, top : top + h, left : left + w]


def case(
    size: tuple[int, int] = (6, 9),
    channels: tuple[int, int] = (17, 33),
    kernel: tuple[int, int] = (3, 3),
    batch: int = 1,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] | None = None,
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    stem: bool = False,
    offset: float = 0.0,
) -> tuple[Conv2dWeightGrad, np.ndarray, np.ndarray, NDArray, NDArray]:
    """The op, x and dy in float64, and both in blocks. What lies outside of the halo is NaN."""
    rng = np.random.default_rng(sum(size) + sum(channels))
    pad = ((kernel[0] - 1) * dilation[0] // 2, (kernel[1] - 1) * dilation[1] // 2) if padding is None else padding
    out = [(size[d] + 2 * pad[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in (0, 1)]
    x = (rng.standard_normal((batch, channels[0], *size)) + offset).astype("float32")
    dy = (rng.standard_normal((batch, channels[1], *out)) + offset).astype("float32")
    op = Conv2dWeightGrad(kernel, stride, (*pad, *pad), dilation, groups)
    source = narrow(x, 2, np.nan, pad) if stem else blocked(x, 2, np.nan, max(pad))[1]
    return op, x, dy, source, blocked(dy, 1, np.nan)[1]


def gradient(op: Conv2dWeightGrad, channels: tuple[int, int], x: NDArray, dy: NDArray) -> np.ndarray:
    """Into an array whose kernel's axes come first."""
    out = NDArray.empty((*op.kernel_size, channels[1], channels[0] // op.groups)).permute((2, 3, 0, 1))
    attrs = {f"{n}_{d}": v for n in ("stride", "dilation") for d, v in zip("hw", getattr(op, n), strict=True)}
    call("conv2d_weight_grad_blocked", [out], x=x, dy=dy, pad_top=op.padding[0], pad_left=op.padding[1],
         groups=op.groups, **attrs)  # fmt: skip
    dense = NDArray.empty(out.shape)
    call("conv2d_weight_grad_blocked", [dense], x=x, dy=dy, pad_top=op.padding[0], pad_left=op.padding[1],
         groups=op.groups, **attrs)  # fmt: skip
    assert np.array_equal(dense.numpy(), out.numpy(), equal_nan=True)
    return dense.numpy()


def error(**given: Any) -> float:
    """Largest error relative to the largest value."""
    op, x, dy, source, blocks = case(**given)
    want = op.reference(x.astype("float64"), dy.astype("float64"))
    got = gradient(op, (x.shape[1], dy.shape[1]), source, blocks)
    return float(np.abs(got - want).max() / np.abs(want).max())


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for kernel in ((1, 1), (3, 3), (5, 5), (7, 7), (1, 7), (3, 1), (1, 31), (2, 4)):
        for size in ((1, 1), (2, 2), (5, 9), (16, 16)):
            yield f"{kernel}-{size}", {"kernel": kernel, "size": size, "padding": tuple(k // 2 for k in kernel)}
        yield f"{kernel}-stride", {"kernel": kernel, "size": (11, 14), "stride": (2, 2), "batch": 2}
        yield f"{kernel}-dilated", {"kernel": kernel, "size": (15, 68), "dilation": (2, 2), "channels": (16, 16)}
        for stem in (1, 3, 4):
            more = {"stem": True, "channels": (stem, 20), "size": (13, 10), "batch": 3, "stride": (2, 1)}
            yield f"{kernel}-stem{stem}", {"kernel": kernel, **more}
    for channels in ((16, 16), (33, 17), (48, 80), (272, 64), (5, 100), (1, 1)):
        yield f"{channels}", {"channels": channels}
    yield "stride-1-3", {"size": (7, 19), "stride": (1, 3), "dilation": (3, 1)}
    yield "no-padding", {"size": (7, 9), "padding": (0, 0)}
    for batch in (2, 3, 128):
        for size in (1, 2, 4):
            yield f"batch{batch}-{size}", {"batch": batch, "size": (size, size), "channels": (32, 48)}
    for groups, channels in ((2, (32, 64)), (2, (48, 96)), (2, (96, 48)), (3, (9, 15)), (4, (32, 128)), (8, (32, 32)),
                             (32, (128, 128)), (5, (35, 35)), (3, (120, 72)), (12, (12, 24))):  # fmt: skip
        for kernel in ((1, 1), (3, 3)):
            yield f"groups{groups}-{channels}-{kernel}", {"groups": groups, "channels": channels, "kernel": kernel}
    yield "groups-of-a-stem", {"groups": 3, "channels": (3, 9), "stem": True}
    for channels in (16, 17, 40):
        depthwise = {"groups": channels, "channels": (channels, channels)}
        for kernel in ((1, 1), (3, 3), (5, 5), (7, 7), (1, 11), (4, 2)):
            yield f"depthwise{channels}-{kernel}", {**depthwise, "kernel": kernel, "size": (13, 20), "batch": 2}
            yield f"depthwise{channels}-{kernel}-stride", {**depthwise, "kernel": kernel, "stride": (2, 2)}
        yield f"depthwise{channels}-dilated", {**depthwise, "dilation": (2, 3), "size": (9, 12)}
        yield f"depthwise{channels}-1", {**depthwise, "size": (1, 1), "batch": 5}
        yield f"depthwise{channels}-wide", {**depthwise, "size": (3, 700)}
    yield "many-pixels", {"size": (90, 131), "channels": (16, 32), "batch": 3}
    yield "one-sign", {"size": (90, 131), "channels": (16, 16), "batch": 3, "offset": 3.0}
    yield "depthwise-one-sign", {"size": (90, 131), "channels": (16, 16), "groups": 16, "batch": 3, "offset": 3.0}


def sum_error(size: tuple[int, int], channels: int, batch: int, offset: float = 0.5) -> float:
    x = (np.random.default_rng(0).standard_normal((batch, channels, *size)) + offset).astype("float32")
    out, want = NDArray.empty((channels,)), x.sum((0, 2, 3), dtype="float64")
    call("sum_channels", [out], x=blocked(x, 1, np.nan)[1])
    return float(np.abs(out.numpy() - want).max() / np.abs(want).max())


def sum_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for channels in (1, 16, 40):
        for size in ((1, 1), (2, 3), (5, 4), (16, 16), (3, 1500)):
            for batch in (1, 3, 128):
                yield f"sum{channels}-{size}-batch{batch}", {"channels": channels, "size": size, "batch": batch}
    yield "sum-of-a-million", {"channels": 16, "size": (1000, 1000), "batch": 1, "offset": 2.0}


def worst() -> tuple[float, str]:
    sums = ((sum_error(**given), label) for label, given in sum_cases())
    return max(*((error(**given), label) for label, given in cases()), *sums)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_kernel(threads: int) -> None:
    before = ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        assert worst() <= (TOLERANCE,)
    finally:
        ndl.set_num_threads(before)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_kernel_of_every_isa(isa: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_weight_grad import worst\n"
    code += "import needle\nprint(needle.isa(), worst()[0])"
    env = {**os.environ, "NEEDLE_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stderr
    used, found = done.stdout.split()
    assert used == isa
    assert float(found) <= TOLERANCE


def test_a_million_pixels_of_one_sign() -> None:
    assert error(size=(1024, 1024), channels=(16, 16), kernel=(1, 1), offset=2.0) <= TOLERANCE


@pytest.mark.parametrize("groups", [1, 64])
def test_runs_are_the_same_to_the_last_bit(groups: int) -> None:
    op, x, dy, source, blocks = case(size=(45, 31), channels=(64, 64), batch=4, groups=groups)
    before, channels = ndl.get_num_threads(), (x.shape[1], dy.shape[1])
    want = gradient(op, channels, source, blocks)
    try:
        for threads in (1, 2, 3, 16):
            ndl.set_num_threads(threads)
            assert all((gradient(op, channels, source, blocks) == want).all() for _ in range(3))
    finally:
        ndl.set_num_threads(before)


def test_plain_images_in_batches() -> None:
    """More than one batch goes through blocks: the sums of all are added up."""
    for given in ({"groups": 64, "channels": (64, 64), "size": (60, 60), "batch": 5}, {"size": (70, 60), "batch": 3,
                  "channels": (800, 1024), "kernel": (1, 1)}):  # fmt: skip
        op, x, dy, *_ = case(**given)
        want, got = op.reference(x.astype("float64"), dy.astype("float64")), op.compute(array(x), array(dy)).numpy()
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


def test_no_images() -> None:
    op, _, _, x, dy = case(batch=2, channels=(16, 16))
    assert (gradient(op, (16, 16), x[:0], dy[:0]) == 0).all()


def test_groups_do_not_meet() -> None:
    """NaN in one group's channels stays out of the gradients of the others."""
    op, _, _, source, dy = case(channels=(32, 32), groups=8)
    whole = source.numpy()
    whole[:, 0, :, :, 5] = np.nan
    source[:] = array(whole)
    got = np.isnan(gradient(op, (32, 32), source, dy)).any((1, 2, 3))
    assert (got == (np.arange(32) // 4 == 1)).all()
