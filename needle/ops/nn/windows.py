"""Images under a sliding window in numpy: the references of convolution and pooling."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.ops.nn.spatial import conv_size

Four = tuple[int, int, int, int]  # top, left, bottom, right


def windows(
    x: np.ndarray, padding: Four, kernel: tuple, stride: tuple, dilation: tuple, size: tuple, value: float = 0
) -> Any:
    """(i, j, x under kernel element i, j) for padded x; `size` is the output's."""
    return each_window(pad_images(x, padding, kernel, stride, dilation, size, value), kernel, stride, dilation, size)


def pad_images(
    x: np.ndarray, padding: Four, kernel: tuple, stride: tuple, dilation: tuple, size: tuple, value: float = 0
) -> np.ndarray:
    """x with its padding, and more at the end where windows reach further; negative padding crops."""
    top, left = padding[:2]
    reach = [d * (k - 1) + s * (n - 1) + 1 for d, k, s, n in zip(dilation, kernel, stride, size, strict=True)]
    bottom, right = (
        max(p, r - n - b) for p, r, n, b in zip(padding[2:], reach, x.shape[-2:], (top, left), strict=True)
    )
    pads = [(max(top, 0), max(bottom, 0)), (max(left, 0), max(right, 0))]
    x = np.pad(x, [(0, 0)] * (x.ndim - 2) + pads, constant_values=value)
    return x[..., max(-top, 0) :, max(-left, 0) :]


def each_window(x: np.ndarray, kernel: tuple, stride: tuple, dilation: tuple, size: tuple) -> Any:
    """(i, j, view of padded x under kernel element i, j)."""
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            y0, x0 = i * dilation[0], j * dilation[1]
            rows = slice(y0, y0 + stride[0] * (size[0] - 1) + 1, stride[0])
            yield i, j, x[..., rows, x0 : x0 + stride[1] * (size[1] - 1) + 1 : stride[1]]


def conv2d_array(
    x: np.ndarray, w: np.ndarray, stride: tuple, padding: Four, dilation: tuple, groups: int
) -> np.ndarray:
    """Convolution in numpy: one matrix product per kernel element."""
    n, channels = x.shape[:2]
    outputs, kernel = w.shape[0], w.shape[2:]
    size = [conv_size(x.shape[2 + i], kernel[i], stride[i], padding[i], padding[2 + i], dilation[i]) for i in (0, 1)]
    wg = w.reshape(groups, outputs // groups, channels // groups, *kernel)
    out = np.zeros((n, groups, outputs // groups, size[0] * size[1]), np.result_type(x, w))
    for i, j, window in windows(x, padding, kernel, stride, dilation, tuple(size)):
        out += wg[..., i, j] @ window.reshape(n, groups, channels // groups, size[0] * size[1])
    return out.reshape(n, outputs, *size)


def transposed_array(x: np.ndarray, w: np.ndarray, op: Any, size: tuple[int, int]) -> np.ndarray:
    """Transposed convolution in numpy: every input pixel adds its multiple of the kernel to the output."""
    n, channels, height, width = x.shape
    kernel, g = w.shape[2:], op.groups
    outputs = w.shape[1] * g
    top, left = op.padding[:2]
    full = [
        max(s * (m - 1) + d * (k - 1) + 1, p + o)
        for s, m, d, k, p, o in zip(op.stride, x.shape[2:], op.dilation, kernel, (top, left), size, strict=True)
    ]
    out = np.zeros((n, outputs, *full), np.result_type(x, w))
    wg = w.reshape(g, channels // g, outputs // g, *kernel).swapaxes(1, 2)
    xg = x.reshape(n, g, channels // g, height * width)
    for i, j, window in each_window(out, kernel, op.stride, op.dilation, (height, width)):
        window += (wg[..., i, j] @ xg).reshape(n, outputs, height, width)
    out = np.pad(out, [(0, 0), (0, 0), (max(-top, 0), 0), (max(-left, 0), 0)])
    return out[:, :, max(top, 0) :, max(left, 0) :][:, :, : size[0], : size[1]]
