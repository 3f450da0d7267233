"""Pooling over (N, C, H, W), with torch's arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call

from .common import pair
from .conv import windows


def pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Output length; with ceil_mode a window may hang over the end, but must start inside the input or its left padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    n = -(-span // stride) + 1 if ceil_mode else span // stride + 1
    if ceil_mode and (n - 1) * stride >= size + padding:
        n -= 1
    return n


class Pool(Op):
    """What the pools share."""

    layout = "any"
    n_grad_inputs = 1

    def image(self, x: Any) -> tuple[int, int]:
        if len(x.shape) != 4:
            raise ValueError(f"[{self.label}] expects an input of rank 4, got {len(x.shape)}.")
        return x.shape[2], x.shape[3]

    def kernel_attributes(self) -> tuple[float, ...]:
        return ()

    def compute(self, x: NDArray) -> NDArray:
        out = NDArray.empty(self.infer(x).shape, x.dtype)
        call(self.label, [out], [x], *self.kernel_attributes())
        return out

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        call(self.label, [out], inputs, *self.kernel_attributes())


@op
class MaxPool2d(Pool):
    """Largest value of each window; padding counts as -inf."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False

    @property
    def label(self) -> str:
        return "max_pool2d"

    def infer(self, x: Any) -> Spec:
        size = tuple(
            pooled(n, self.kernel_size[d], self.stride[d], self.padding[d], self.dilation[d], self.ceil_mode)
            for d, n in enumerate(self.image(x))
        )
        if min(size) < 1:
            raise ValueError(f"[max_pool2d] the window is larger than the padded input, got shape {tuple(x.shape)}.")
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise ValueError(f"[max_pool2d] padding is at most half the window, got {self.padding} for {self.kernel_size}.")
        return Spec((*x.shape[:2], *size), x.dtype)

    def kernel_attributes(self) -> tuple[float, ...]:
        return (*self.kernel_size, *self.stride, *self.padding, *self.dilation)

    def padded(self, x: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """x within -inf up to the last window's end, and the output's size."""
        oh, ow = self.infer(x).shape[2:]
        (ph, pw), ends = self.padding, []
        for n, size, k, s, d in zip((oh, ow), x.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True):
            ends.append((n - 1) * s + d * (k - 1) + 1 - size)
        pads = ((0, 0), (0, 0), (ph, max(0, ends[0] - ph)), (pw, max(0, ends[1] - pw)))
        return np.pad(x, pads, constant_values=-np.inf), (oh, ow)

    def reference(self, x: np.ndarray) -> np.ndarray:
        p, (oh, ow) = self.padded(x)
        v = windows(p, self.kernel_size, self.stride, (0, 0, 0, 0), self.dilation)
        return v[:, :, :oh, :ow].max((4, 5))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return MaxPool2dGrad(self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)(
            node.inputs[0].detach(), node.detach(), out_grad
        )

    @classmethod
    def samples(cls) -> list:
        return [
            ({"kernel_size": (2, 2), "stride": (2, 2)}, [(2, 3, 6, 7)]),
            ({"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)}, [(1, 18, 9, 8)]),
            ({"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "dilation": (1, 2), "ceil_mode": True}, [(1, 2, 8, 11)]),
            ({"kernel_size": (1, 1), "stride": (1, 1)}, [(1, 1, 1, 1)]),
        ]


@op
class MaxPool2dGrad(MaxPool2d):
    """Sends each output gradient to the first largest input of its window; inputs x, y, dy."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False
    layout = "plain"

    def infer(self, x: Any, *rest: Any) -> Spec:
        return Spec(tuple(x.shape), x.dtype) if rest else MaxPool2d.infer(self, x)

    def compute(self, x: NDArray, y: NDArray, dy: NDArray) -> NDArray:  # type: ignore[override]
        out = NDArray.empty(x.shape, x.dtype)
        call("max_pool2d_grad", [out], [x, y, dy], *self.kernel_attributes())
        return out

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        call("max_pool2d_grad", [out], inputs, *self.kernel_attributes())

    def reference(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray) -> np.ndarray:  # type: ignore[override]
        p, (oh, ow) = self.padded(x)
        v = windows(p, self.kernel_size, self.stride, (0, 0, 0, 0), self.dilation)[:, :, :oh, :ow]
        best = v.reshape(*v.shape[:4], -1).argmax(-1)
        grad = np.zeros(p.shape, dy.dtype)
        n, c, i, j = np.indices(best.shape)
        rows = i * self.stride[0] + best // self.kernel_size[1] * self.dilation[0]
        cols = j * self.stride[1] + best % self.kernel_size[1] * self.dilation[1]
        np.add.at(grad, (n, c, rows, cols), dy)
        (ph, pw), (h, w) = self.padding, x.shape[2:]
        return grad[:, :, ph : ph + h, pw : pw + w]

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        raise NotImplementedError("[max_pool2d] has no second derivative.")

    @classmethod
    def samples(cls) -> list:
        return []


def max_pool2d(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    """Max pooling; `stride` is `kernel_size` unless given."""
    kernel = pair(kernel_size)
    return MaxPool2d(kernel, kernel if stride in (None, []) else pair(stride), pair(padding), pair(dilation), ceil_mode)(x)


@op
class AvgPool2d(Pool):
    """Mean of each window; padding counts as zeros, in the divisor only with count_include_pad."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: Any = None

    @property
    def label(self) -> str:
        return "avg_pool2d"

    def infer(self, x: Any) -> Spec:
        size = tuple(
            pooled(n, self.kernel_size[d], self.stride[d], self.padding[d], 1, self.ceil_mode)
            for d, n in enumerate(self.image(x))
        )
        if min(size) < 1:
            raise ValueError(f"[avg_pool2d] the window is larger than the padded input, got shape {tuple(x.shape)}.")
        return Spec((*x.shape[:2], *size), x.dtype)

    def kernel_attributes(self) -> tuple[float, ...]:
        return (
            *self.kernel_size,
            *self.stride,
            *self.padding,
            self.count_include_pad,
            self.divisor_override or 0,
            *self.padding,
        )

    def weights(self, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """(OH, H) and (OW, W) matrices of window membership, to be divided by the window's divisor."""
        out = self.infer(Spec(shape)).shape[2:]
        matrices = []
        for d in (0, 1):
            m = np.zeros((out[d], shape[2 + d]), dtype)
            for i in range(out[d]):
                start = i * self.stride[d] - self.padding[d]
                m[i, max(0, start) : max(0, min(start + self.kernel_size[d], shape[2 + d]))] = 1
            matrices.append(m)
        return matrices[0], matrices[1]

    def divisors(self, shape: tuple[int, ...]) -> np.ndarray:
        rows, cols = self.weights(shape, "float64")
        if self.divisor_override:
            return np.full((len(rows), len(cols)), float(self.divisor_override))
        if not self.count_include_pad:
            return np.outer(rows.sum(1), cols.sum(1))
        counts = []
        for d, m in enumerate((rows, cols)):
            starts = np.arange(len(m)) * self.stride[d] - self.padding[d]
            counts.append(np.minimum(starts + self.kernel_size[d], shape[2 + d] + self.padding[d]) - starts)
        return np.outer(*counts)

    def reference(self, x: np.ndarray) -> np.ndarray:
        rows, cols = self.weights(x.shape, x.dtype)
        return np.einsum("nchw,ih,jw->ncij", x, rows, cols, optimize=True) / self.divisors(x.shape).astype(x.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return AvgPool2dGrad(
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
            tuple(node.inputs[0].shape),
        )(out_grad)

    @classmethod
    def samples(cls) -> list:
        return [
            ({"kernel_size": (2, 2), "stride": (2, 2)}, [(2, 3, 6, 7)]),
            ({"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "count_include_pad": False}, [(1, 18, 9, 8)]),
            ({"kernel_size": (3, 2), "stride": (2, 2), "padding": (1, 1), "ceil_mode": True}, [(1, 2, 8, 10)]),
            ({"kernel_size": (2, 2), "stride": (1, 1), "divisor_override": 3}, [(1, 2, 4, 5)]),
        ]


class LinearMapGrad(Op):
    """Gradient of a linear map of images: the transposed map, with input dy and attribute `shape` of the map's input."""

    shape: tuple[int, ...]

    def infer(self, dy: Any) -> Spec:
        return Spec(tuple(self.shape), dy.dtype)

    def compute(self, dy: NDArray) -> NDArray:
        out = NDArray.empty(self.shape, dy.dtype)
        call(self.label, [out], [dy], *self.kernel_attributes())
        return out

    def kernel_attributes(self) -> tuple[float, ...]:
        raise NotImplementedError


@op
class AvgPool2dGrad(LinearMapGrad):
    """Spreads each output gradient over its window."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: Any
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        return "avg_pool2d_grad"

    @property
    def forward_op(self) -> AvgPool2d:
        return AvgPool2d(
            self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad, self.divisor_override
        )

    def kernel_attributes(self) -> tuple[float, ...]:
        return self.forward_op.kernel_attributes()

    def reference(self, dy: np.ndarray) -> np.ndarray:
        rows, cols = self.forward_op.weights(self.shape, dy.dtype)
        scaled = dy / self.forward_op.divisors(self.shape).astype(dy.dtype)
        return np.einsum("ncij,ih,jw->nchw", scaled, rows, cols, optimize=True)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return self.forward_op(out_grad)


def avg_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Average pooling; `stride` is `kernel_size` unless given."""
    kernel = pair(kernel_size)
    stride = kernel if stride in (None, []) else pair(stride)
    return AvgPool2d(kernel, stride, pair(padding), ceil_mode, count_include_pad, divisor_override)(x)


def bins(size: int, out: int, dtype: Any) -> np.ndarray:
    """(out, size) matrix of torch's adaptive bins, each row summing to 1."""
    m = np.zeros((out, size), dtype)
    for i in range(out):
        start, end = i * size // out, -(-(i + 1) * size // out)
        m[i, start:end] = 1 / (end - start)
    return m


@op
class AdaptiveAvgPool2d(Pool):
    """Means over size[0] x size[1] bins; None keeps a dimension."""

    size: tuple[Any, Any]

    @property
    def label(self) -> str:
        return "adaptive_avg_pool2d"

    def infer(self, x: Any) -> Spec:
        size = tuple(n if s is None else s for s, n in zip(self.size, self.image(x), strict=True))
        return Spec((*x.shape[:2], *size), x.dtype)

    def reference(self, x: np.ndarray) -> np.ndarray:
        out = self.infer(x).shape
        rows, cols = bins(x.shape[2], out[2], x.dtype), bins(x.shape[3], out[3], x.dtype)
        return np.einsum("nchw,ih,jw->ncij", x, rows, cols, optimize=True)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return AdaptiveAvgPool2dGrad(self.size, tuple(node.inputs[0].shape))(out_grad)

    @classmethod
    def samples(cls) -> list:
        return [({"size": (1, 1)}, [(2, 18, 7, 7)]), ({"size": (3, None)}, [(1, 2, 7, 5)]), ({"size": (7, 5)}, [(1, 2, 3, 3)])]


@op
class AdaptiveAvgPool2dGrad(LinearMapGrad):
    """Spreads each output gradient over its bin."""

    size: tuple[Any, Any]
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        return "adaptive_avg_pool2d_grad"

    def kernel_attributes(self) -> tuple[float, ...]:
        return ()

    def reference(self, dy: np.ndarray) -> np.ndarray:
        rows, cols = bins(self.shape[2], dy.shape[2], dy.dtype), bins(self.shape[3], dy.shape[3], dy.dtype)
        return np.einsum("ncij,ih,jw->nchw", dy, rows, cols, optimize=True)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return AdaptiveAvgPool2d(self.size)(out_grad)


def adaptive_avg_pool2d(x: Tensor, output_size: Any) -> Tensor:
    """Average pooling to `output_size` (int, or pair with None to keep a dimension)."""
    return AdaptiveAvgPool2d(pair(output_size))(x)
