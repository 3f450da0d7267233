"""2-D convolution, its transpose and its weight gradient: three ops that are each other's gradients. NCHW, torch's weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call

from .common import pair

Padding = tuple[int, int, int, int]  # top, left, bottom, right
BLOCK = 16  # channels per block of the planned layout


def out_size(size: int, before: int, after: int, kernel: int, stride: int, dilation: int) -> int:
    return (size + before + after - dilation * (kernel - 1) - 1) // stride + 1


def windows(x: np.ndarray, kernel: tuple[int, int], stride: tuple[int, int], padding: Padding, dilation: tuple[int, int]) -> np.ndarray:
    """(N, C, OH, OW, KH, KW) view of the padded input."""
    top, left, bottom, right = padding
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    span = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    v = np.lib.stride_tricks.sliding_window_view(x, span, axis=(2, 3))
    return v[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


class ConvOp(Op):
    """What the three share: attributes and shape checks."""

    layout = "blocked"
    stride: tuple[int, int]
    padding: Padding
    dilation: tuple[int, int]
    groups: int

    def is_weight(self, index: int) -> bool:
        return index > 0

    def check(self, x: Any, w: Any, in_channels: int, bias: Any, out_channels: int) -> None:
        if len(x.shape) != 4 or len(w.shape) != 4:
            raise ValueError(f"[{self.label}] expects input and weight of rank 4, got {len(x.shape)} and {len(w.shape)}.")
        if x.dtype != w.dtype:
            raise ValueError(f"[{self.label}] weight is {w.dtype}, got an input of {x.dtype}.")
        if x.shape[1] != in_channels:
            raise ValueError(f"[{self.label}] weight expects {in_channels} input channels, got {x.shape[1]}.")
        if bias is not None and tuple(bias.shape) != (out_channels,):
            raise ValueError(f"[{self.label}] bias expects shape ({out_channels},), got {tuple(bias.shape)}.")

    def check_size(self, size: tuple[int, int]) -> None:
        if min(size) < 1:
            raise ValueError(f"[{self.label}] the kernel is larger than the padded input, got an output of {size}.")


@op
class Conv2d(ConvOp):
    """y[n, o] = sum_i x[n, i] * w[o, i] (cross-correlation) + bias[o]; w: (O, I / groups, KH, KW)."""

    stride: tuple[int, int] = (1, 1)
    padding: Padding = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def label(self) -> str:
        return "conv2d"

    def infer(self, x: Any, w: Any, bias: Any = None) -> Spec:
        o, i, kh, kw = w.shape if len(w.shape) == 4 else (0, 0, 0, 0)
        self.check(x, w, i * self.groups, bias, o)
        if o % self.groups:
            raise ValueError(f"[conv2d] {self.groups} groups do not divide {o} output channels.")
        top, left, bottom, right = self.padding
        h = out_size(x.shape[2], top, bottom, kh, self.stride[0], self.dilation[0])
        w_ = out_size(x.shape[3], left, right, kw, self.stride[1], self.dilation[1])
        self.check_size((h, w_))
        return Spec((x.shape[0], o, h, w_), x.dtype)

    def compute(self, x: NDArray, w: NDArray, bias: NDArray | None = None) -> NDArray:
        return conv2d_kernel(self, x, w, bias)

    def reference(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        g = self.groups
        v = windows(x, w.shape[2:], self.stride, self.padding, self.dilation)
        n, c, oh, ow, kh, kw = v.shape
        v = v.reshape(n, g, c // g, oh, ow, kh, kw)
        y = np.einsum("ngcyxhw,gochw->ngoyx", v, w.reshape(g, -1, c // g, kh, kw), optimize=True)
        y = y.reshape(n, -1, oh, ow)
        return y if bias is None else y + bias[:, None, None]

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, w, *bias = node.inputs
        grads = [
            conv2d_input_grad(self, out_grad, w, x.shape) if x.requires_grad else None,
            Conv2dWeightGrad(w.shape, self.stride, self.padding, self.dilation, self.groups)(x, out_grad)
            if w.requires_grad
            else None,
        ]
        return (*grads, *(out_grad.sum((0, 2, 3)) for _ in bias))

    def halo(self, index: int, out: Spec, x: Spec, w: Spec, *_: Spec) -> tuple[int, int, int, int]:
        if index:
            return (0, 0, 0, 0)
        top, left, _, _ = self.padding
        (_, _, oh, ow), (kh, kw) = out.shape, w.shape[2:]
        bottom = (oh - 1) * self.stride[0] - top + (kh - 1) * self.dilation[0] - (x.shape[2] - 1)
        right = (ow - 1) * self.stride[1] - left + (kw - 1) * self.dilation[1] - (x.shape[3] - 1)
        return (top, left, max(0, bottom), max(0, right))

    def reads_narrow_blocks(self, x: Spec, w: Spec, *_: Spec) -> bool:
        return self.groups == 1

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        x, w, *bias = inputs
        lower_conv2d(builder, self, x, w, bias[0] if bias else None, out)

    @classmethod
    def samples(cls) -> list:
        return [
            ({}, [(1, 3, 5, 7), (4, 3, 3, 3), (4,)]),
            ({"stride": (2, 2), "padding": (1, 1, 1, 1)}, [(2, 17, 9, 8), (16, 17, 3, 3)]),
            ({"padding": (0, 2, 1, 0), "dilation": (2, 1), "stride": (1, 3)}, [(1, 5, 11, 9), (3, 5, 2, 3), (3,)]),
            ({"groups": 2, "padding": (1, 1, 1, 1)}, [(1, 6, 6, 6), (8, 3, 3, 3), (8,)]),
            ({"groups": 20, "padding": (1, 1, 1, 1)}, [(2, 20, 7, 5), (20, 1, 3, 3), (20,)]),
            ({}, [(1, 1, 1, 1), (1, 1, 1, 1)]),
        ]


def conv2d_kernel(conv: Any, x: NDArray, w: NDArray, bias: NDArray | None, activation: int = 0, alpha: float = 0.0) -> NDArray:
    """The eager kernel: y = activation(conv(x, w) + bias)."""
    top, left, bottom, right = conv.padding
    h = out_size(x.shape[2], top, bottom, w.shape[2], conv.stride[0], conv.dilation[0])
    w_ = out_size(x.shape[3], left, right, w.shape[3], conv.stride[1], conv.dilation[1])
    out = NDArray.empty((x.shape[0], w.shape[0], h, w_), x.dtype)
    ins = [x, w] if bias is None else [x, w, bias]
    attrs = (*conv.stride, *conv.padding, *conv.dilation, conv.groups, activation, alpha, bias is not None)
    call("conv2d", [out], ins, *attrs)
    return out


def conv2d_input_grad(conv: Any, dy: Tensor, w: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Gradient of conv's input: the transposed convolution that gives `shape`."""
    return ConvTranspose2d(conv.stride, conv.padding, conv.dilation, conv.groups, tuple(shape[2:]))(dy, w)


# -- the planned form: packed weights, blocked images with physical halos ------------------------------------------------


def merged_groups(groups: int, in_per_group: int, out_per_group: int, block: int) -> int:
    """Groups after merging neighbours until their channels fill blocks (zeros between them), as the kernels do."""
    if block == BLOCK:
        for m in range(1, groups):
            if groups % m == 0 and in_per_group * m % BLOCK == 0 and out_per_group * m % BLOCK == 0:
                return groups // m
    return 1


def pack(kernel: str, groups: int, block: int, merged: int, channels: tuple[int, int], w: NDArray) -> NDArray:
    """Weights packed by `kernel` for `merged` groups of `channels` (in, out)."""
    in_blocks, out_blocks = -(-channels[0] // merged // block), -(-channels[1] // merged // BLOCK)
    out = NDArray.empty((merged, out_blocks, in_blocks, w.shape[2] * w.shape[3] * block * BLOCK))
    call(kernel, [out], [w], groups, block)
    return out


def pack_depthwise(w: NDArray) -> NDArray:
    out = NDArray.empty((-(-w.shape[0] // BLOCK), w.shape[2] * w.shape[3], BLOCK))
    call("depthwise_pack", [out], [w])
    return out


def pad_to_blocks(multiple: int, v: NDArray) -> NDArray:
    """A vector with zeros appended up to a multiple of `multiple`."""
    return v.pad([(0, -v.shape[0] % multiple)])


def lower_conv2d(
    builder: Any,
    conv: Any,
    x: NDArray,
    w: NDArray,
    bias: NDArray | None,
    out: NDArray,
    residual: NDArray | None = None,
    activation: int = 0,
    alpha: float = 0.0,
) -> None:
    """Plan out = activation(conv(x) + bias + residual) on blocked arrays."""
    block = x.shape[4]
    o, per_group, kh, kw = w.shape
    channels = (per_group * conv.groups, o)
    depthwise = conv.groups == channels[0] == o and block == BLOCK and conv.groups > 1
    if depthwise:
        packed, merged = builder.derive("depthwise_pack", pack_depthwise, w), ()
    else:
        n = merged_groups(conv.groups, per_group, o // conv.groups, block)
        key = ("conv2d_pack", conv.groups, block)
        packed = builder.derive(key, partial(pack, "conv2d_pack", conv.groups, block, n, channels), w)
        merged = (n,)
    ins = [x, packed]
    if bias is not None:
        ins.append(builder.derive(("pad", BLOCK), partial(pad_to_blocks, BLOCK), bias))
    if residual is not None:
        ins.append(residual)
    top, left, _, _ = conv.padding
    attrs = (kh, kw, *conv.stride, top, left, *conv.dilation, *merged, activation, alpha, bias is not None, residual is not None)
    call("depthwise_blocked" if depthwise else "conv2d_blocked", [out], ins, *attrs)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """2-D convolution of x (N, C, H, W) with weight (O, C / groups, KH, KW).

    `padding`: int, (height, width), "valid", or "same" (stride 1; an odd rest goes to the bottom and right).
    """
    stride, dilation = pair(stride), pair(dilation)
    conv = Conv2d(stride, full_padding(padding, weight.shape[2:], stride, dilation), dilation, groups)
    return conv(x, weight) if bias is None else conv(x, weight, bias)


def full_padding(padding: Any, kernel: Any, stride: tuple[int, int], dilation: tuple[int, int]) -> Padding:
    if padding == "valid":
        return (0, 0, 0, 0)
    if padding == "same":
        if stride != (1, 1):
            raise ValueError(f"[conv2d] padding 'same' expects stride 1, got {stride}.")
        h, w = (d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
        return (h // 2, w // 2, h - h // 2, w - w // 2)
    if isinstance(padding, str):
        raise ValueError(f"[conv2d] padding expects a number, a pair, 'same' or 'valid', got {padding!r}.")
    if isinstance(padding, tuple | list) and len(padding) == 4:
        return tuple(padding)  # type: ignore[return-value]
    h, w = pair(padding)
    return (h, w, h, w)


@op
class ConvTranspose2d(ConvOp):
    """The transpose of Conv2d as a linear map; w: (I, O / groups, KH, KW); `size`: height and width of the output."""

    stride: tuple[int, int]
    padding: Padding
    dilation: tuple[int, int]
    groups: int
    size: tuple[int, int]

    @property
    def label(self) -> str:
        return "conv_transpose2d"

    def infer(self, x: Any, w: Any, bias: Any = None) -> Spec:
        out_channels = w.shape[1] * self.groups if len(w.shape) == 4 else 0
        self.check(x, w, w.shape[0], bias, out_channels)
        self.check_size(self.size)
        return Spec((x.shape[0], out_channels, *self.size), x.dtype)

    def compute(self, x: NDArray, w: NDArray, bias: NDArray | None = None) -> NDArray:
        out = NDArray.empty((x.shape[0], w.shape[1] * self.groups, *self.size), x.dtype)
        ins = [x, w] if bias is None else [x, w, bias]
        attrs = (*self.stride, *self.padding[:2], *self.dilation, self.groups, 0, 0, bias is not None)
        call("conv_transpose2d", [out], ins, *attrs)
        return out

    def reference(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        n, i, h, w_ = x.shape
        g, (kh, kw), (top, left, _, _) = self.groups, w.shape[2:], self.padding
        spread = np.einsum("ngiyx,giohw->ngohwyx", x.reshape(n, g, i // g, h, w_), w.reshape(g, i // g, -1, kh, kw), optimize=True)
        o = w.shape[1] * g
        spread = spread.reshape(n, o, kh, kw, h, w_)
        full_h = max((h - 1) * self.stride[0] + (kh - 1) * self.dilation[0] + 1, self.size[0] + top)
        full_w = max((w_ - 1) * self.stride[1] + (kw - 1) * self.dilation[1] + 1, self.size[1] + left)
        y = np.zeros((n, o, full_h, full_w), x.dtype)
        for a in range(kh):
            for b in range(kw):
                rows = slice(a * self.dilation[0], a * self.dilation[0] + (h - 1) * self.stride[0] + 1, self.stride[0])
                cols = slice(b * self.dilation[1], b * self.dilation[1] + (w_ - 1) * self.stride[1] + 1, self.stride[1])
                y[:, :, rows, cols] += spread[:, :, a, b]
        y = y[:, :, top : top + self.size[0], left : left + self.size[1]]
        return y if bias is None else y + bias[:, None, None]

    def halo(self, index: int, out: Spec, x: Spec, w: Spec, *_: Spec) -> tuple[int, int, int, int]:
        if index:
            return (0, 0, 0, 0)
        ring = []
        for d in (0, 1):
            # Output pixel o reads input (o + pad - k * dilation) / stride for the taps k where that is whole.
            last = self.size[d] - 1 + self.padding[d]
            ring.append((max(0, -(-((w.shape[2 + d] - 1) * self.dilation[d] - self.padding[d]) // self.stride[d])), max(0, last // self.stride[d] - x.shape[2 + d] + 1)))
        (top, bottom), (left, right) = ring
        return (top, left, bottom, right)

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        x, w, *bias = inputs
        block, (kh, kw) = x.shape[4], w.shape[2:]
        merged = merged_groups(self.groups, w.shape[0] // self.groups, w.shape[1], block)
        key = ("conv_transpose2d_pack", self.groups, block, self.stride, self.dilation)
        ins = [x, builder.derive(key, partial(pack_transpose, self, block, merged), w)]
        ins += [builder.derive(("pad", BLOCK), partial(pad_to_blocks, BLOCK), b) for b in bias]
        attrs = (kh, kw, *self.stride, *self.padding[:2], *self.dilation, merged, 0, 0, bool(bias))
        call("conv_transpose2d_blocked", [out], ins, *attrs)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, w, *bias = node.inputs
        # The forward convolution that this transposes: its bottom and right padding follow from the sizes.
        kh, kw = w.shape[2:]
        bottom = (x.shape[2] - 1) * self.stride[0] + (kh - 1) * self.dilation[0] + 1 - self.padding[0] - self.size[0]
        right = (x.shape[3] - 1) * self.stride[1] + (kw - 1) * self.dilation[1] + 1 - self.padding[1] - self.size[1]
        padding = (*self.padding[:2], max(0, bottom), max(0, right))
        conv = Conv2d(self.stride, padding, self.dilation, self.groups)
        dx = dw = None
        if x.requires_grad:
            dx = conv(out_grad, w)
            dx = dx if dx.shape == x.shape else dx[:, :, : x.shape[2], : x.shape[3]]
        if w.requires_grad:
            dw = Conv2dWeightGrad(w.shape, self.stride, padding, self.dilation, self.groups)(out_grad, x)
        return (dx, dw, *(out_grad.sum((0, 2, 3)) for _ in bias))

    @classmethod
    def samples(cls) -> list:
        one = {"padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}
        return [
            ({"stride": (2, 2), "size": (8, 10), **one}, [(1, 5, 4, 5), (5, 3, 2, 2), (3,)]),
            ({"stride": (1, 1), "size": (6, 5), **one}, [(2, 17, 4, 3), (17, 16, 3, 3)]),
            ({**one, "stride": (2, 3), "padding": (1, 0, 1, 0), "dilation": (1, 2), "size": (7, 12)}, [(1, 4, 4, 3), (4, 3, 3, 2), (3,)]),
            ({**one, "stride": (2, 2), "groups": 2, "size": (7, 7)}, [(1, 4, 3, 3), (4, 3, 3, 3)]),
        ]


def pack_transpose(conv: Any, block: int, merged: int, w: NDArray) -> NDArray:
    channels = (w.shape[0] // merged, w.shape[1] * conv.groups // merged)
    taps = w.shape[2] * w.shape[3]
    out = NDArray.empty((merged, -(-channels[1] // BLOCK), -(-channels[0] // block), taps * block * BLOCK))
    call("conv_transpose2d_pack", [out], [w], conv.groups, block, *conv.stride, *conv.dilation)
    return out


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """Transposed 2-D convolution; weight (C_in, C_out / groups, KH, KW), sizes as torch.nn.ConvTranspose2d gives them."""
    stride, dilation, (ph, pw), extra = pair(stride), pair(dilation), pair(padding), pair(output_padding)
    kernel = weight.shape[2:]
    size = tuple(
        (x.shape[2 + d] - 1) * stride[d] - 2 * (ph, pw)[d] + dilation[d] * (kernel[d] - 1) + extra[d] + 1 for d in (0, 1)
    )
    conv = ConvTranspose2d(stride, (ph, pw, ph, pw), dilation, groups, size)
    return conv(x, weight) if bias is None else conv(x, weight, bias)


@op
class Conv2dWeightGrad(ConvOp):
    """Gradient of Conv2d's weight of shape `shape`, from its input x and the output's gradient dy."""

    shape: tuple[int, ...]
    stride: tuple[int, int]
    padding: Padding
    dilation: tuple[int, int]
    groups: int
    layout = "plain"

    @property
    def label(self) -> str:
        return "conv2d_weight_grad"

    def infer(self, x: Any, dy: Any) -> Spec:
        return Spec(tuple(self.shape), x.dtype)

    def compute(self, x: NDArray, dy: NDArray) -> NDArray:
        out = NDArray.empty(self.shape, x.dtype)
        call("conv2d_weight_grad", [out], [x, dy], *self.stride, *self.padding[:2], *self.dilation, self.groups)
        return out

    def reference(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        v = windows(x, self.shape[2:], self.stride, self.padding, self.dilation)  # type: ignore[arg-type]
        oh, ow, g = dy.shape[2], dy.shape[3], self.groups
        v = v[:, :, :oh, :ow]
        v = v.reshape(v.shape[0], g, -1, *v.shape[2:])
        dy = dy.reshape(dy.shape[0], g, -1, oh, ow)
        return np.einsum("ngcyxhw,ngoyx->gochw", v, dy, optimize=True).reshape(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, dy = node.inputs
        conv = Conv2d(self.stride, self.padding, self.dilation, self.groups)
        d_dy = conv(x, out_grad) if dy.requires_grad else None
        return (conv2d_input_grad(conv, dy, out_grad, x.shape) if x.requires_grad else None, d_dy)

    @classmethod
    def samples(cls) -> list:
        base = {"stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
        return [
            ({**base, "shape": (4, 3, 3, 3)}, [(2, 3, 6, 5), (2, 4, 6, 5)]),
            ({**base, "stride": (2, 2), "shape": (17, 18, 3, 3)}, [(1, 18, 7, 8), (1, 17, 4, 4)]),
            ({**base, "groups": 2, "shape": (4, 2, 3, 3)}, [(1, 4, 5, 5), (1, 4, 5, 5)]),
        ]


def conv(z: Tensor, weight: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """The course's convolution: z (N, H, W, C_in), weight (k, k, C_in, C_out), result (N, H', W', C_out)."""
    y = conv2d(z.permute((0, 3, 1, 2)), weight.permute((3, 2, 0, 1)), None, stride, padding)
    return y.permute((0, 2, 3, 1))
