"""Resizing of (N, C, H, W) images, with torch's coordinates."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Deferred, Op, Spec, Tensor, Unsupported, op
from needle.backend_ndarray import NDArray, call

from .common import pair
from .pool import LinearMapGrad


class Resize(Op):
    """What the modes share: `size` of the output or `factor`s, and the matrices that resize along one axis."""

    layout = "any"
    size: Any
    factor: Any

    def infer(self, x: Any) -> Spec:
        if len(x.shape) != 4:
            raise ValueError(f"[{self.label}] expects an input of rank 4, got {len(x.shape)}.")
        size = self.size
        if size is None:
            size = tuple(int(n * f) for n, f in zip(x.shape[2:], self.factor, strict=True))
        if min(size) < 1 or min(x.shape[2:]) < 1:
            raise ValueError(f"[{self.label}] sizes are at least 1, got {tuple(x.shape[2:])} to {tuple(size)}.")
        return Spec((*x.shape[:2], *size), x.dtype)

    def scales(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """Input pixels per output pixel, as torch computes source coordinates."""
        out = self.infer(Spec(tuple(shape))).shape[2:]
        given = self.factor if self.factor is not None and self.size is None else (None, None)
        return tuple(1 / f if f else n / o for n, o, f in zip(shape[2:], out, given, strict=True))  # type: ignore[return-value]

    def kernel_attributes(self, shape: tuple[int, ...]) -> tuple[float, ...]:
        return self.scales(shape)

    def matrix(self, n: int, out: int, scale: float, dtype: Any) -> np.ndarray:
        raise NotImplementedError

    def matrices(self, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        out, scales = self.infer(Spec(tuple(shape))).shape[2:], self.scales(shape)
        return tuple(self.matrix(n, o, s, dtype) for n, o, s in zip(shape[2:], out, scales, strict=True))  # type: ignore[return-value]

    def reference(self, x: np.ndarray) -> np.ndarray:
        return np.einsum("nchw,ih,jw->ncij", x, *self.matrices(x.shape, x.dtype), optimize=True)

    def compute(self, x: NDArray) -> NDArray:
        out = NDArray.empty(self.infer(x).shape, x.dtype)
        call(self.label, [out], [x], *self.kernel_attributes(x.shape))
        return out

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        (x,) = inputs
        call(self.label, [out], [x], *self.kernel_attributes(x.shape[:4]))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return ResizeGrad(self, tuple(node.inputs[0].shape))(out_grad)

    @classmethod
    def samples(cls) -> list:
        return [
            ({"size": (5, 9)}, [(2, 3, 4, 6)]),
            ({"factor": (2.0, 2.0)}, [(1, 18, 3, 5)]),
            ({"factor": (0.5, 1.7)}, [(1, 2, 8, 7)]),
            ({"size": (1, 1)}, [(1, 2, 3, 1)]),
        ]


@op
class InterpolateNearest(Resize):
    """Nearest source pixel: floor(i * scale)."""

    size: Any = None
    factor: Any = None

    @property
    def label(self) -> str:
        return "interpolate_nearest"

    def matrix(self, n: int, out: int, scale: float, dtype: Any) -> np.ndarray:
        m = np.zeros((out, n), dtype)
        at = np.floor(np.arange(out, dtype="float32") * np.float32(scale)).astype(int)
        m[np.arange(out), np.minimum(at, n - 1)] = 1
        return m


@op
class InterpolateBilinear(Resize):
    """Linear in both directions; corners of the images, or with align_corners the corner pixels' centres, coincide."""

    size: Any = None
    factor: Any = None
    align_corners: bool = False

    @property
    def label(self) -> str:
        return "interpolate_bilinear"

    def scales(self, shape: tuple[int, ...]) -> tuple[float, float]:
        if not self.align_corners:
            return Resize.scales(self, shape)
        out = self.infer(Spec(tuple(shape))).shape[2:]
        return tuple((n - 1) / (o - 1) if o > 1 else 0.0 for n, o in zip(shape[2:], out, strict=True))  # type: ignore[return-value]

    def kernel_attributes(self, shape: tuple[int, ...]) -> tuple[float, ...]:
        return (float(self.align_corners), *self.scales(shape))

    def matrix(self, n: int, out: int, scale: float, dtype: Any) -> np.ndarray:
        i = np.arange(out)
        source = i * scale if self.align_corners else np.maximum((i + 0.5) * scale - 0.5, 0)
        low = np.minimum(source.astype(int), n - 1)
        high, weight = np.minimum(low + 1, n - 1), source - low
        m = np.zeros((out, n), dtype)
        np.add.at(m, (i, low), 1 - weight)
        np.add.at(m, (i, high), weight)
        return m

    @classmethod
    def samples(cls) -> list:
        return [*Resize.samples(), ({"size": (7, 1), "align_corners": True}, [(1, 17, 3, 4)])]


@op
class ResizeGrad(LinearMapGrad):
    """The transpose of a resize."""

    resize: Any
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.resize.label}_grad"

    def kernel_attributes(self) -> tuple[float, ...]:
        return self.resize.kernel_attributes(self.shape)

    def reference(self, dy: np.ndarray) -> np.ndarray:
        return np.einsum("ncij,ih,jw->nchw", dy, *self.resize.matrices(self.shape, dy.dtype), optimize=True)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return self.resize(out_grad)


def interpolate(
    x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None
) -> Tensor:
    """Resize x (N, C, H, W) to `size` (int or pair) or by `scale_factor`; mode "nearest" or "bilinear"."""
    if (size is None) == (scale_factor is None):
        raise ValueError("[interpolate] expects exactly one of size and scale_factor.")
    if size is not None:
        size = pair(size if isinstance(size, tuple | list | Deferred | int) else tuple(size))
    factor = None if scale_factor is None else tuple(float(f) for f in pair(scale_factor))
    if mode == "nearest":
        if align_corners:
            raise ValueError("[interpolate] align_corners goes with mode bilinear, got nearest.")
        return InterpolateNearest(size, factor)(x)
    if mode == "bilinear":
        return InterpolateBilinear(size, factor, bool(align_corners))(x)
    raise Unsupported(f"interpolate mode expects nearest or bilinear, got {mode}")
