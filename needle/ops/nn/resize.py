"""Interpolation over one, two or three axes, as torch.nn.functional.interpolate."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from needle.autograd import Op, Spec, Tensor, one_of, op
from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.kernels import unplanned
from needle.ops.common import constant
from needle.ops.families import samples_of
from needle.ops.linalg.basic import matmul
from needle.ops.nn.pool import AdaptiveAvgPool2d
from needle.ops.nn.pool_nd import AdaptiveAvgPoolNd
from needle.ops.nn.spatial import SHAPES, check_gradient, on_frames, on_row, per_axis
from needle.ops.shape.gather import take

__all__ = ["interpolate"]

MODES = {  # the numbers of axes that each mode resizes
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "area": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "bicubic": (2,),
    "trilinear": (3,),
}
KERNELS = ("nearest", "bilinear")  # modes with kernels for images
CORNERS = ("linear", "bilinear", "bicubic", "trilinear")  # modes that take align_corners
FACTOR_COUNTS = ("nearest-exact", "bicubic")  # modes that resize by a factor also where the size stays
CUBIC = -0.75  # torch's coefficient of bicubic convolution (Keys, 1981)
SMOOTHED = {"bilinear": 1, "bicubic": 2}  # modes with antialias: how many pixels their filters reach to a side


def source_scale(n: int, out: int, factor: float | None, align_corners: bool, mode: str) -> float:
    """Input pixels per output pixel along one axis."""
    if align_corners:
        return (n - 1) / (out - 1) if out > 1 else 0.0
    # As in torch, whatever the factor was: the same size is the same pixels, twice the size each of them twice.
    if (out == n and mode not in FACTOR_COUNTS) or (out == 2 * n and mode == "nearest"):
        return n / out
    return 1 / factor if factor else n / out


Taps = list[tuple[np.ndarray, np.ndarray]]  # the pixels that are read along an axis and their weights


def axis_taps(n: int, out: int, scale: float, mode: str, align_corners: bool, antialias: bool = False) -> Taps:
    """What is read along one axis, where a tap has an element for each of the `out` pixels."""
    if antialias:
        return smooth_taps(n, out, scale, mode)
    at = np.arange(out)
    if mode.startswith("nearest"):  # torch computes the index in float32
        place = at.astype("float32") + np.float32(0.5 if mode == "nearest-exact" else 0)
        return [(np.minimum((place * np.float32(scale)).astype(int), n - 1), np.ones(out))]
    if mode == "bicubic":
        x = at * scale if align_corners else (at + 0.5) * scale - 0.5
        low = np.minimum(np.floor(x), n - 1).astype(int)
        weights = cubic_weights(np.clip(x - low, 0, 1))
        return [(np.clip(low + k, 0, n - 1), w) for k, w in zip((-1, 0, 1, 2), weights, strict=True)]
    x = at * scale if align_corners else np.maximum((at + 0.5) * scale - 0.5, 0)
    low = np.minimum(x.astype(int), n - 1)
    if n == out == 1:  # the axis that a row lacks
        return [(low, np.ones(1))]
    return [(low, 1 - (x - low)), (low if out == n else np.minimum(low + 1, n - 1), x - low)]


class ResizedAxis(NamedTuple):
    """How an axis of n pixels becomes one of `out`; scale: input pixels per output pixel."""

    n: int
    out: int
    scale: float
    mode: str
    align_corners: bool
    antialias: bool

    def taps(self) -> Taps:
        return axis_taps(*self)


def smooth_taps(n: int, out: int, scale: float, mode: str) -> Taps:
    """`axis_taps` with antialias: a filter over all pixels that an output pixel covers, as wide as a step over 1."""
    step, centre = max(scale, 1.0), (np.arange(out) + 0.5) * scale
    reach = SMOOTHED[mode] * step
    first = np.maximum((centre - reach + 0.5).astype(int), 0)
    count = np.minimum((centre + reach + 0.5).astype(int), n) - first
    places = first[:, None] + np.arange(count.max())
    away = (places - centre[:, None] + 0.5) / step
    weights = np.maximum(1 - np.abs(away), 0) if mode == "bilinear" else cubic_filter(np.abs(away), -0.5)
    weights = np.where(np.arange(count.max()) < count[:, None], weights, 0)
    weights /= weights.sum(1, keepdims=True)
    return list(zip(np.minimum(places, n - 1).T, weights.T, strict=True))


def matrix_of(taps: Taps, n: int) -> np.ndarray:
    """The (out, n) matrix that resizes one axis."""
    m = np.zeros((len(taps[0][0]), n))
    for index, weight in taps:
        np.add.at(m, (np.arange(len(index)), index), weight)
    return m


@functools.lru_cache(maxsize=64)
def band_of(axis: ResizedAxis, transposed: bool, dtype: str, device: Any) -> tuple[NDArray, NDArray]:
    """The matrix of one axis as its band: the first pixel that each row reads, and weights (as many as it reads, rows)."""
    taps = axis.taps()
    rows, columns = np.tile(np.arange(axis.out), len(taps)), np.concatenate([place for place, _ in taps])
    weights = np.concatenate([weight for _, weight in taps])
    rows, columns, weights = (v[weights != 0] for v in (rows, columns, weights))
    if transposed:
        rows, columns = columns, rows
    down, across = (axis.n, axis.out) if transposed else (axis.out, axis.n)
    first, last = np.full(down, across - 1), np.zeros(down, "int64")
    np.minimum.at(first, rows, columns)
    np.maximum.at(last, rows, columns)
    width = int((last - first).max(initial=0)) + 1
    first = np.minimum(first, across - width)
    band = np.zeros((width, down))
    np.add.at(band, (columns - first[rows], rows), weights)
    with unplanned():
        return NDArray(first, device, "int64"), NDArray(band, device, dtype)


def cubic_filter(d: np.ndarray, a: float) -> np.ndarray:
    """Weights of pixels at distances `d`, at least 0."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d < 1, near, np.where(d < 2, far, 0))


def cubic_weights(t: np.ndarray) -> list[np.ndarray]:
    """Weights of the four neighbours of a point at `t` between the second and the third."""
    return [cubic_filter(d, CUBIC) for d in (t + 1, t, 1 - t, 2 - t)]


class Resize(Op):
    checks = one_of(mode=MODES)

    def _factors(self, n: int) -> tuple:
        given = self.attributes()["scale_factor"]
        factors = per_axis("interpolate", given, n)
        if not all(f is None or f > 0 for f in factors):
            raise ValueError(f"[interpolate] scale_factor expects numbers above 0, got {given}.")
        return factors

    def _scales(self, size: tuple, out: tuple) -> list[float]:
        a = self.attributes()
        factors = (None,) * len(size) if a.get("recompute_scale_factor") else self._factors(len(size))
        corners, mode = a["align_corners"], "bilinear" if a.get("antialias") else a["mode"]  # torch's, of the same size
        return [source_scale(n, o, f, corners, mode) for n, o, f in zip(size, out, factors, strict=True)]

    def _taps(self, size: tuple, out: tuple) -> list[Taps]:
        a = self.attributes()
        scales = zip(size, out, self._scales(size, out), strict=True)
        return [axis_taps(*s, a["mode"], a["align_corners"], a.get("antialias", False)) for s in scales]


def attributes_of(op: Any, size: tuple, out: tuple) -> dict[str, float]:
    """The attributes of a kernel from images of `size` to `out`."""
    scales = dict(zip(("scale_h", "scale_w"), op._scales(size, out), strict=True))
    return scales | ({"align_corners": op.align_corners} if op.mode == "bilinear" else {})


@op
class Interpolate(Resize):
    """x (N, C, L), (N, C, H, W) or (N, C, D, H, W) at another size; size and scale_factor: one number or one per axis.

    `scale_factor` fixes the size where that is None, and the sampling step unless `recompute_scale_factor` is set.
    """

    size: Any = None
    scale_factor: Any = None
    mode: str = "nearest"
    align_corners: bool = False
    recompute_scale_factor: bool = False
    antialias: bool = False

    def infer(self, x: Any) -> Any:
        n = len(x.shape) - 2
        if n not in MODES[self.mode]:
            shapes = " or ".join(SHAPES[i] for i in MODES[self.mode])
            raise ValueError(f"[interpolate] mode {self.mode} expects shape {shapes}, got {tuple(x.shape)}.")
        factors = self._factors(n)
        if self.size is None:
            size = tuple(math.floor(m * f) for m, f in zip(x.shape[2:], factors, strict=True))
        else:
            size = tuple(int(s) for s in per_axis("interpolate", self.size, n))
        if min(size) < 1 or min(x.shape[2:]) < 1:
            raise ValueError(f"[interpolate] expects sizes of at least 1, got {tuple(x.shape[2:])} and {size}.")
        return Spec((*x.shape[:2], *size), str(x.dtype))

    def must_decompose(self, *inputs: Any) -> bool:
        recorder = inputs[0].recorder
        if recorder is not None and not recorder.static:
            return False
        return self.mode not in KERNELS or self.antialias or len(inputs[0].shape) != 4

    def decompose(self, x: Tensor) -> Tensor:
        before, after = tuple(x.shape[2:]), self.infer(x).shape[2:]
        if self.mode == "area":
            return (AdaptiveAvgPool2d(after) if len(after) == 2 else AdaptiveAvgPoolNd(after))(x)
        mode = {"linear": "bilinear", "trilinear": "bilinear"}.get(self.mode, self.mode)
        steps = self._scales(before, after)

        def images(size: tuple, scales: tuple) -> Any:
            return lambda t: resize_images(t, size, scales, mode, self.align_corners, self.antialias)

        if len(after) == 1:
            return on_row(images((1, *after), (1.0, *steps)), x)
        if len(after) == 2:
            return images(after, tuple(steps))(x)
        depth = images((after[0], after[1] * after[2]), (steps[0], 1.0))
        return on_frames(images(after[1:], tuple(steps[1:])), depth, x)

    def aliases(self, out: Any, *inputs: Any) -> bool:
        before, after = inputs[0].shape[2:], out.shape[2:]
        same = tuple(before) == tuple(after) and self.mode in KERNELS and not self.antialias
        return same and all(s == 1 for s in self._scales(before, after))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        (x,) = inputs
        # Where channels lie side by side, each pixel would be read from a line of its own.
        if len(x.shape) == 4 and x.strides[3] > 1 and out.size >= x.size:
            x = x.compact()
        call(f"interpolate_{self.mode}", [out], x=x, **attributes_of(self, x.shape[2:4], out.shape[2:4]))

    def reference(self, x: np.ndarray) -> Any:
        rows, columns = self._taps(x.shape[2:], self.infer(x).shape[2:])
        x = sum(x[:, :, :, index] * weight.astype(x.dtype) for index, weight in columns)
        return sum(x[:, :, index] * weight[:, None].astype(x.dtype) for index, weight in rows)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        given = None if self.recompute_scale_factor else self.scale_factor
        options = (self.mode, self.align_corners, self.antialias)
        return InterpolateGrad(tuple(node.inputs[0].shape), given, *options)(out_grad)

    @classmethod
    def samples(cls) -> list:
        x = [(2, 3, 5, 4)]
        bilinear = {"mode": "bilinear"}
        return [
            ({"scale_factor": (2.0, 2.0)}, x),
            ({"size": (3, 9)}, x),
            ({"size": (7, 3), **bilinear}, x),
            ({"scale_factor": (2.0, 2.0), "align_corners": True, **bilinear}, [(1, 17, 5, 4)]),
            ({"scale_factor": (1.7, 0.6), **bilinear}, x),
            ({"scale_factor": 1.7, "recompute_scale_factor": True, **bilinear}, x),
            ({"size": 7, "mode": "linear"}, [(2, 3, 5)]),
            ({"size": (4, 3, 6)}, [(1, 2, 3, 5, 4)]),
            ({"scale_factor": (1.5, 2.0, 0.7), "mode": "trilinear"}, [(1, 2, 3, 5, 4)]),
            ({"size": (7, 3), "mode": "nearest-exact"}, x),
            ({"scale_factor": (1.7, 0.6), "mode": "bicubic"}, x),
            ({"size": (3, 4), "mode": "bicubic", "align_corners": True}, x),
            ({"scale_factor": 0.5, "mode": "area"}, [(2, 3, 5)]),
            ({"size": (3, 2), "mode": "bicubic", "antialias": True}, x),
            ({"scale_factor": (0.7, 1.3), "antialias": True, **bilinear}, x),
        ]


@op
class InterpolateGrad(Resize):
    """Gradient of an interpolation's input, of shape `shape`, from its output's."""

    shape: tuple
    scale_factor: Any
    mode: str
    align_corners: bool
    antialias: bool = False

    def infer(self, dy: Any) -> Any:
        check_gradient(self.label, (*self.shape[:2], *dy.shape[2:4]), dy)
        return Spec(self.shape, str(dy.dtype))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        (dy,) = inputs
        call(f"interpolate_{self.mode}_grad", [out], dy=dy, **attributes_of(self, out.shape[2:4], dy.shape[2:4]))

    def reference(self, dy: np.ndarray) -> Any:
        taps = self._taps(self.shape[2:], dy.shape[2:])
        rows, columns = (matrix_of(t, n).astype(dy.dtype) for t, n in zip(taps, self.shape[2:], strict=True))
        return rows.T @ dy @ columns

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        size, options = tuple(node.inputs[0].shape[2:]), (self.mode, self.align_corners, False, self.antialias)
        return Interpolate(size, self.scale_factor, *options)(out_grad)


@op
class Resample(Op):
    """x (N, C, H, W) resized along axis 2 or 3, each pixel from those beside it; transposed: the gradient of that."""

    axis: int
    n: int
    out: int
    scale: float
    mode: str
    align_corners: bool = False
    antialias: bool = False
    transposed: bool = False

    def how(self) -> ResizedAxis:
        return ResizedAxis(self.n, self.out, self.scale, self.mode, self.align_corners, self.antialias)

    def infer(self, x: Any) -> Any:
        before, after = (self.out, self.n) if self.transposed else (self.n, self.out)
        if len(x.shape) != 4 or x.shape[self.axis] != before:
            raise ValueError(
                f"[resample] expects images with {before} pixels in axis {self.axis}, got {tuple(x.shape)}."
            )
        return Spec((*x.shape[: self.axis], after, *x.shape[self.axis + 1 :]), str(x.dtype))

    def matrix(self) -> np.ndarray:
        matrix = matrix_of(self.how().taps(), self.n)
        return matrix.T if self.transposed else matrix

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        (x,) = inputs
        first, weights = band_of(self.how(), self.transposed, str(x.dtype), x.device)
        call("resample", [out], x=x, first=first, weights=weights, axis=self.axis)

    def decompose(self, x: Tensor) -> Tensor:
        matrix = self.matrix()
        return matmul(x, constant(matrix.T, x)) if self.axis == 3 else matmul(constant(matrix, x), x)

    def reference(self, x: np.ndarray) -> Any:
        return np.moveaxis(np.moveaxis(x, self.axis, -1) @ self.matrix().T.astype(x.dtype), -1, self.axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return Resample(self.axis, *self.how(), not self.transposed)(out_grad)

    samples = samples_of(
        ({"axis": 3, "n": 9, "out": 5, "scale": 1.8, "mode": "bicubic", "antialias": True}, [(2, 3, 4, 9)]),
        ({"axis": 2, "n": 5, "out": 40, "scale": 0.125, "mode": "bicubic"}, [(2, 3, 5, 7)]),
        ({"axis": 3, "n": 5, "out": 40, "scale": 4 / 39, "mode": "bicubic", "align_corners": True}, [(2, 1, 2, 5)]),
        (
            {"axis": 2, "n": 70, "out": 33, "scale": 2.2, "mode": "bilinear", "antialias": True, "transposed": True},
            [(1, 2, 33, 5)],
        ),
    )


def resize_images(
    x: Tensor, size: tuple, scales: tuple, mode: str, align_corners: bool, antialias: bool = False
) -> Tensor:
    """x (N, C, H, W) at `size` with input pixels per output pixel `scales`: by kernels, else by a matrix or numbers per axis."""
    before = tuple(x.shape[2:])
    if mode == "nearest-exact" and all(o % n == 0 and s == n / o for n, o, s in zip(before, size, scales, strict=True)):
        mode = "nearest"  # the same pixels
    if mode in KERNELS and not antialias:
        factors = None if align_corners else tuple(1 / s for s in scales)
        return Interpolate(size, factors, mode, align_corners)(x)
    for axis in (0, 1) if size[0] < before[0] else (1, 0):  # first the one that leaves less to the other
        if size[axis] == before[axis] and scales[axis] == 1:
            continue
        how = ResizedAxis(before[axis], size[axis], scales[axis], mode, align_corners, antialias)
        if mode == "nearest-exact":
            x = take(x, constant(how.taps()[0][0], x, "int64"), axis + 2)
            continue
        x = Resample(axis + 2, *how)(x)
    return x


def check_resize(
    label: str, size: Any, scale_factor: Any, mode: str, corners: Any, recompute: Any, antialias: Any = False
) -> None:
    if (size is None) == (scale_factor is None):
        raise ValueError(f"[{label}] expects either size or scale_factor.")
    if mode not in MODES:
        raise ValueError(f"[{label}] mode expects {', '.join(MODES)}, got {mode}.")
    if corners and mode not in CORNERS:
        raise ValueError(f"[{label}] align_corners goes with modes {', '.join(CORNERS)} only, got {mode}.")
    if recompute and scale_factor is None:
        raise ValueError(f"[{label}] recompute_scale_factor goes with scale_factor only.")
    if antialias and mode not in SMOOTHED:
        raise ValueError(f"[{label}] antialias goes with modes {', '.join(SMOOTHED)} only, got {mode}.")


def interpolate(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """x (N, C, and one to three axes) resized to `size` (may be symbolic) or by `scale_factor`; numbers or one per axis.

    antialias: smaller images are averages over all pixels that a pixel covers; of modes bilinear and bicubic.
    """
    check_resize("interpolate", size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if isinstance(scale_factor, tuple | list):
        scale_factor = tuple(float(f) for f in scale_factor)
    size = tuple(size) if isinstance(size, list) else size
    options = (bool(align_corners), bool(recompute_scale_factor), bool(antialias))
    return Interpolate(size, scale_factor, mode, *options)(x)


upsample = interpolate
