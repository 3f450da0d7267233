"""Interpolation of images, as torch.nn.functional.interpolate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call

from .common import pair

MODES = ("nearest", "bilinear")


def source_scale(n: int, out: int, factor: float | None, align_corners: bool) -> float:
    """Input pixels per output pixel along one axis."""
    if align_corners:
        return (n - 1) / (out - 1) if out > 1 else 0.0
    return 1 / factor if factor else n / out


def resize_matrix(n: int, out: int, mode: str, scale: float, align_corners: bool) -> np.ndarray:
    """The (out, n) matrix that resizes one axis."""
    m = np.zeros((out, n))
    at = np.arange(out)
    if mode == "nearest":  # torch computes the index in float32
        m[at, np.minimum((at * np.float32(scale)).astype(int), n - 1)] = 1
        return m
    x = at * scale if align_corners else np.maximum((at + 0.5) * scale - 0.5, 0)
    low = np.minimum(x.astype(int), n - 1)
    np.add.at(m, (at, low), 1 - (x - low))
    np.add.at(m, (at, np.minimum(low + 1, n - 1)), x - low)
    return m


class Resize(Op):
    layout = "any"

    def _scales(self, size: tuple, out: tuple) -> list[float]:
        a = self.attributes()
        factors = a["scale_factor"] or (None, None)
        return [source_scale(n, o, f, a["align_corners"]) for n, o, f in zip(size, out, factors, strict=True)]

    def _matrices(self, size: tuple, out: tuple, dtype: Any) -> list[np.ndarray]:
        a = self.attributes()
        scales = self._scales(size, out)
        return [
            resize_matrix(n, o, a["mode"], s, a["align_corners"]).astype(dtype)
            for n, o, s in zip(size, out, scales, strict=True)
        ]


@op
class Interpolate(Resize):
    """x (N, C, H, W) at another size; `scale_factor` fixes the sampling step, and the size where that is None."""

    size: Any = None
    scale_factor: Any = None
    mode: str = "nearest"
    align_corners: bool = False

    def infer(self, x: Any) -> Any:
        if len(x.shape) != 4:
            raise ValueError(f"[interpolate] expects shape (N, C, H, W), got {tuple(x.shape)}.")
        size = self.size
        if size is None:
            size = tuple(math.floor(n * f) for n, f in zip(x.shape[2:], self.scale_factor, strict=True))
        if min(size) < 1:
            raise ValueError(f"[interpolate] size {tuple(size)} is empty.")
        return Spec((*x.shape[:2], *(int(s) for s in size)), str(x.dtype))

    def compute(self, x: NDArray) -> Any:
        out = NDArray.empty(*self.infer(x))
        self.lower(None, [x], out)
        return out

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        attributes = self._scales(inputs[0].shape[2:4], out.shape[2:4])
        if self.mode == "nearest":
            call("interpolate_nearest", [out], inputs, *attributes)
        else:
            call("interpolate_bilinear", [out], inputs, self.align_corners, *attributes)

    def reference(self, x: np.ndarray) -> Any:
        rows, columns = self._matrices(x.shape[2:], self.infer(x).shape[2:], x.dtype)
        return rows @ x @ columns.T

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a = self.attributes()
        return InterpolateGrad(tuple(node.inputs[0].shape), a["scale_factor"], a["mode"], a["align_corners"])(out_grad)

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
        ]


@op
class InterpolateGrad(Resize):
    """Gradient of an interpolation's input, of shape `shape`, from its output's."""

    shape: tuple
    scale_factor: Any
    mode: str
    align_corners: bool
    layout = "plain"

    def infer(self, dy: Any) -> Any:
        return Spec(self.shape, str(dy.dtype))

    def compute(self, dy: NDArray) -> Any:
        dx = NDArray.empty(self.shape, dy.dtype)
        scales = self._scales(self.shape[2:], dy.shape[2:])
        corners = (self.align_corners,) if self.mode == "bilinear" else ()
        call(f"interpolate_{self.mode}_grad", [dx], [dy.compact()], *corners, *scales)
        return dx

    def reference(self, dy: np.ndarray) -> Any:
        rows, columns = self._matrices(self.shape[2:], dy.shape[2:], dy.dtype)
        return rows.T @ dy @ columns

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return Interpolate(tuple(node.inputs[0].shape[2:]), self.scale_factor, self.mode, self.align_corners)(out_grad)


def interpolate(
    x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None
) -> Tensor:
    """x (N, C, H, W) resized to `size` (may be symbolic) or by `scale_factor`; numbers or pairs."""
    if (size is None) == (scale_factor is None):
        raise ValueError("[interpolate] expects either size or scale_factor.")
    if mode not in MODES:
        raise ValueError(f"[interpolate] mode expects {' or '.join(MODES)}, got {mode}.")
    if mode == "nearest" and align_corners:
        raise ValueError("[interpolate] align_corners goes with mode bilinear only.")
    factors = None if scale_factor is None else tuple(float(f) for f in pair(scale_factor))
    return Interpolate(None if size is None else pair(size), factors, mode, bool(align_corners))(x)


upsample = interpolate
