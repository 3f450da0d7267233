"""2-d convolution, transposed convolution and the gradient of their weights: three ops closed under differentiation."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call

from . import expressions
from .activation import activation_code
from .planned import Halo, conv2d_halo, conv_transpose2d_halo, lower_conv2d, lower_conv_transpose2d
from .reduce import summation
from .shape import permute
from .spatial import (
    ANY,
    as_padding,
    check_gradient,
    infer_conv,
    infer_conv_transpose,
    per_axis,
    window_attributes,
    windows_of,
)
from .windows import conv2d_array, conv_transpose2d_array, windows


def conv2d_kernel(
    op: Any, x: NDArray, w: NDArray, bias: NDArray | None, activation: str = "none", alpha: float = 0.0
) -> NDArray:
    """Kernel conv2d with the attributes of `op`."""
    out = NDArray.empty(infer_conv(op, x, w).shape)
    conv2d_into(out, op, x, w, bias, activation, alpha)
    return out


def conv2d_into(
    out: NDArray, op: Any, x: NDArray, w: NDArray, bias: NDArray | None, activation: str = "none", alpha: float = 0.0
) -> None:
    """conv2d_kernel with its result in an array that is there."""
    ends = {"pad_bottom": op.padding[2], "pad_right": op.padding[3]}
    rest = {"groups": op.groups, "activation": activation_code(activation), "alpha": alpha}
    call("conv2d", [out], x=x, weight=w, bias=bias, **window_attributes(op), **ends, **rest)


@op
class Conv2d(Op):
    """Inputs: x (N, I, H, W), weight (O, I / groups, KH, KW), optionally bias (O,). padding: (top, left, bottom, right)."""

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    float32_only = True
    layout = "blocked"
    checks = windows_of(stride=1, padding=ANY, dilation=1, groups=1)

    def infer(self, x: Any, w: Any, bias: Any = None) -> Any:
        return infer_conv(self, x, w, bias)

    def is_weight(self, index: int) -> bool:
        return index > 0

    def flops(self, out: Any, x: Any, w: Any, *rest: Any) -> int:
        return 2 * prod(out.shape) * prod(w.shape[1:])

    def compute(self, x: NDArray, w: NDArray, bias: NDArray | None = None) -> Any:
        return conv2d_kernel(self, x, w, bias)

    def reference(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> Any:
        out = conv2d_array(x, w, self.stride, self.padding, self.dilation, self.groups)
        return out if bias is None else out + bias.reshape(-1, 1, 1)

    def te(self, t: Any, out: Any, x: Any, w: Any, *bias: Any) -> Any:
        return expressions.conv2d(t, self, out, x, w, *bias)

    def relax(self, t: Any, out: Any, x: Any, w: Any, *bias: Any) -> Any:
        made = t.relax.op.nn.conv2d(x, w, self.stride, self.padding, self.dilation, self.groups)
        return t.relax.op.add(made, t.relax.op.reshape(bias[0], (1, -1, 1, 1))) if bias else made

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, w, *bias = node.inputs
        return conv2d_gradient(self, out_grad, x, w, has_bias=bool(bias))

    def halo(self, index: int, out: Spec, *inputs: Spec) -> Halo:
        return conv2d_halo(self, out, *inputs[:2])

    def reads_narrow_blocks(self, *inputs: Spec) -> bool:
        return self.groups == 1

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        lower_conv2d(builder, self, inputs, out)

    @classmethod
    def samples(cls) -> list:
        return conv_samples()


def conv_samples() -> list:
    return [
        ({}, [(2, 3, 6, 7), (4, 3, 3, 3), (4,)]),
        ({"stride": (2, 1), "padding": (1, 2, 1, 2), "dilation": (1, 2)}, [(1, 4, 9, 8), (6, 4, 3, 2)]),
        ({"stride": (2, 2), "padding": (1, 1, 1, 1), "groups": 2}, [(2, 4, 14, 14), (6, 2, 3, 3), (6,)]),
        ({"padding": (0, 1, 1, 0), "groups": 20}, [(1, 20, 5, 5), (20, 1, 2, 2)]),
        ({}, [(2, 17, 5, 5), (33, 17, 1, 1), (33,)]),
    ]


def conv2d_gradient(op: Any, out_grad: Tensor, x: Tensor, w: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Gradients of x, weight and bias of a convolution with the attributes of `op`."""
    grads: list[Any] = [None, None]
    if x.requires_grad:
        rest = tuple(
            (x.shape[2 + i] + op.padding[i] + op.padding[2 + i] - op.dilation[i] * (w.shape[2 + i] - 1) - 1)
            % op.stride[i]
            for i in (0, 1)
        )
        grads[0] = ConvTranspose2d(op.stride, op.padding, rest, op.dilation, op.groups)(out_grad, w)
    if w.requires_grad:
        grads[1] = Conv2dWeightGrad(tuple(w.shape[2:]), op.stride, op.padding, op.dilation, op.groups)(x, out_grad)
    return (*grads, summation(out_grad, (0, 2, 3))) if has_bias else tuple(grads)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """2-d convolution. padding: an int, a pair, (top, left, bottom, right), "same" or "valid"."""
    stride, dilation = per_axis("conv2d", stride, 2), per_axis("conv2d", dilation, 2)
    kernel = tuple(weight.shape[2:4]) if padding == "same" else ()
    op = Conv2d(stride, as_padding(padding, kernel, stride, dilation, "conv2d"), dilation, groups)
    return op(x, weight, *(() if bias is None else (bias,)))


def conv_transpose2d_kernel(
    op: Any, x: NDArray, w: NDArray, bias: NDArray | None, activation: str = "none", alpha: float = 0.0
) -> NDArray:
    out = NDArray.empty(op.infer(x, w).shape)
    rest = {"groups": op.groups, "activation": activation_code(activation), "alpha": alpha}
    call("conv_transpose2d", [out], x=x, weight=w, bias=bias, **window_attributes(op), **rest)
    return out


@op
class ConvTranspose2d(Op):
    """Inputs: x (N, I, H, W), weight (I, O / groups, KH, KW), optionally bias (O,): the input gradient of a convolution."""

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    output_padding: tuple = (0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    float32_only = True
    layout = "blocked"
    checks = windows_of(stride=1, padding=ANY, output_padding=0, dilation=1, groups=1)

    def is_weight(self, index: int) -> bool:
        return index > 0

    def infer(self, x: Any, w: Any, bias: Any = None) -> Any:
        return infer_conv_transpose(self, x, w, bias)

    def flops(self, out: Any, x: Any, w: Any, *rest: Any) -> int:
        return 2 * prod(x.shape) * prod(w.shape[1:])

    def compute(self, x: NDArray, w: NDArray, bias: NDArray | None = None) -> Any:
        return conv_transpose2d_kernel(self, x, w, bias)

    def reference(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> Any:
        out = conv_transpose2d_array(x, w, self, self.infer(x, w).shape[2:])
        return out if bias is None else out + bias.reshape(-1, 1, 1)

    def te(self, t: Any, out: Any, x: Any, w: Any, *bias: Any) -> Any:
        return expressions.conv_transpose2d(t, self, out, x, w, *bias)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, w = node.inputs[:2]
        grads: list[Any] = [None, None]
        if x.requires_grad:
            grads[0] = Conv2d(self.stride, self._conv_padding(), self.dilation, self.groups)(out_grad, w)
        if w.requires_grad:
            grads[1] = Conv2dWeightGrad(
                tuple(w.shape[2:]), self.stride, self._conv_padding(), self.dilation, self.groups
            )(out_grad, x)
        return (*grads, summation(out_grad, (0, 2, 3))) if len(node.inputs) > 2 else tuple(grads)

    def halo(self, index: int, out: Spec, *inputs: Spec) -> Halo:
        return conv_transpose2d_halo(self, out, *inputs[:2])

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        lower_conv_transpose2d(builder, self, inputs, out)

    def _conv_padding(self) -> tuple:
        """Padding of the convolution that this op transposes; output_padding of a stride or more crops it."""
        crop = [o if o >= s else 0 for o, s in zip(self.output_padding, self.stride, strict=True)]
        top, left, bottom, right = self.padding
        return (top, left, bottom - crop[0], right - crop[1])

    @classmethod
    def samples(cls) -> list:
        two = {"stride": (2, 2), "padding": (1, 1, 1, 1), "output_padding": (1, 1)}
        return [
            ({}, [(2, 3, 4, 5), (3, 4, 3, 3), (4,)]),
            (two, [(1, 4, 5, 4), (4, 6, 3, 3)]),
            ({"stride": (2, 2)}, [(1, 18, 4, 4), (18, 5, 2, 2), (5,)]),
            (
                {"stride": (2, 1), "dilation": (2, 1), "groups": 2, "padding": (1, 0, 1, 0)},
                [(1, 4, 5, 4), (4, 3, 3, 2)],
            ),
        ]


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
    """2-d transposed convolution, arguments as in torch."""
    stride, dilation, more = (per_axis("conv_transpose2d", v, 2) for v in (stride, dilation, output_padding))
    padding = as_padding(padding, (), stride, dilation, "conv_transpose2d")
    op = ConvTranspose2d(stride, padding, more, dilation, groups)
    return op(x, weight, *(() if bias is None else (bias,)))


@op
class Conv2dWeightGrad(Op):
    """Inputs: x (N, I, H, W) and the output's gradient (N, O, OH, OW); result (O, I / groups, KH, KW)."""

    kernel_size: tuple
    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    float32_only = True
    checks = windows_of(kernel_size=1, stride=1, padding=ANY, dilation=1, groups=1)

    def infer(self, x: Any, dy: Any) -> Any:
        weight = Spec((dy.shape[1], x.shape[1] // self.groups, *self.kernel_size), str(x.dtype))
        check_gradient(self.label, infer_conv(self, x, weight).shape, dy)
        return weight

    def flops(self, out: Any, x: Any, dy: Any) -> int:
        return 2 * prod(dy.shape) * prod(out.shape[1:])

    def compute(self, x: NDArray, dy: NDArray) -> Any:
        out = NDArray.empty(self.infer(x, dy).shape)
        call("conv2d_weight_grad", [out], x=x, dy=dy, groups=self.groups, **window_attributes(self))
        return out

    def reference(self, x: np.ndarray, dy: np.ndarray) -> Any:
        n, g = x.shape[0], self.groups
        out = np.zeros(self.infer(x, dy).shape, np.result_type(x, dy))
        og = out.reshape(g, dy.shape[1] // g, x.shape[1] // g, *self.kernel_size)
        pixels = prod(dy.shape[2:])
        dyg = dy.reshape(n, g, dy.shape[1] // g, pixels)
        for i, j, window in windows(x, self.padding, self.kernel_size, self.stride, self.dilation, dy.shape[2:]):
            og[..., i, j] = (dyg @ window.reshape(n, g, x.shape[1] // g, pixels).swapaxes(-1, -2)).sum(0)
        return out

    def te(self, t: Any, out: Any, x: Any, dy: Any) -> Any:
        return expressions.conv2d_weight_grad(t, self, out, x, dy)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, dy = node.inputs
        conv = Conv2d(self.stride, self.padding, self.dilation, self.groups)
        grad_x = None
        if x.requires_grad:
            size = zip(
                x.shape[2:],
                self.kernel_size,
                self.stride,
                self.padding[:2],
                self.padding[2:],
                self.dilation,
                strict=True,
            )
            rest = tuple((s + a + b - d * (k - 1) - 1) % t for s, k, t, a, b, d in size)
            grad_x = ConvTranspose2d(self.stride, self.padding, rest, self.dilation, self.groups)(dy, out_grad)
        return grad_x, conv(x, out_grad)

    @classmethod
    def samples(cls) -> list:
        cases = []
        for attributes, (x, w, *_) in conv_samples():
            y = Conv2d(**attributes).infer(Spec(x), Spec(w)).shape
            cases.append(({"kernel_size": w[2:], **attributes}, [x, y]))
        return cases


IMAGES, KERNELS, LAST = (0, 3, 1, 2), (3, 2, 0, 1), (0, 2, 3, 1)  # from the course's layouts to ours, and back


@op
class Conv(Op):
    """The course's convolution: Z (N, H, W, C), weight (k, k, I, O), result NHWC. Graphs hold what it consists of."""

    stride: int = 1
    padding: int = 1
    float32_only = True

    def _conv2d(self) -> Conv2d:
        return Conv2d((self.stride,) * 2, (self.padding,) * 4)

    def must_decompose(self, *inputs: Any) -> bool:
        return any(t.recorder is not None for t in inputs)

    def infer(self, z: Any, w: Any) -> Any:
        if len(z.shape) != 4 or len(w.shape) != 4:
            raise ValueError(f"[conv] expects NHWC images and (k, k, I, O) weights, got {z.shape} and {w.shape}.")
        specs = [Spec(tuple(t.shape[a] for a in order), t.dtype) for t, order in ((z, IMAGES), (w, KERNELS))]
        out = self._conv2d().infer(*specs)
        return Spec(tuple(out.shape[a] for a in LAST), out.dtype)

    def flops(self, out: Any, z: Any, w: Any) -> int:
        return 2 * prod(out.shape) * prod(w.shape[:3])

    def compute(self, z: NDArray, w: NDArray) -> Any:
        return self._conv2d().compute(z.permute(IMAGES), w.permute(KERNELS)).permute(LAST)

    def reference(self, z: np.ndarray, w: np.ndarray) -> Any:
        return self._conv2d().reference(z.transpose(IMAGES), w.transpose(KERNELS)).transpose(LAST)

    def decompose(self, z: Tensor, w: Tensor) -> Tensor:
        return permute(self._conv2d()(permute(z, IMAGES), permute(w, KERNELS)), LAST)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        z, w = node.inputs
        x, kernels = permute(z, IMAGES), permute(w, KERNELS)
        x.requires_grad, kernels.requires_grad = z.requires_grad, w.requires_grad  # under no_grad, too
        grads = conv2d_gradient(self._conv2d(), permute(out_grad, IMAGES), x, kernels, has_bias=False)
        return tuple(
            None if g is None else permute(g, back) for g, back in zip(grads, (LAST, (2, 3, 1, 0)), strict=True)
        )

    @classmethod
    def samples(cls) -> list:
        return [({}, [(2, 5, 6, 3), (3, 3, 3, 4)]), ({"stride": 2}, [(1, 14, 14, 2), (3, 3, 2, 3)])]


def conv(Z: Tensor, weight: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """The course's convolution: Z (N, H, W, C), weight (k, k, I, O), result NHWC."""
    return Conv(stride, padding)(Z, weight)
