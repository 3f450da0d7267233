"""2-d convolution, transposed convolution and the gradient of their weights: three ops closed under differentiation."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.common import Layer
from needle.ops.dtypes import lacks_float64
from needle.ops.families import named, samples_of
from needle.ops.math.activation import activation_code
from needle.ops.nn.spatial import (
    ANY,
    as_padding,
    check_gradient,
    infer_conv,
    infer_conv_transpose,
    one_or_many,
    per_axis,
    window_attributes,
    windows_of,
)
from needle.ops.nn.windows import conv2d_array, transposed_array, windows
from needle.ops.reduce.basic import summation
from needle.ops.shape.basic import permute

__all__ = ["conv", "conv2d", "conv_transpose2d"]


class ImageLayer(Layer):
    """A convolution of images (N, C, H, W), by the kernel of its name."""

    def kernel_attributes(self) -> dict[str, float]:
        return window_attributes(self) | {"groups": vars(self)["groups"]}

    def into(
        self, out: NDArray, x: NDArray, w: NDArray, bias: Any = None, *, activation: str = "none", alpha: float = 0.0
    ) -> None:
        finish = {"activation": activation_code(activation), "alpha": alpha}
        call(self.label, [out], x=x, weight=w, bias=bias, **self.kernel_attributes(), **finish)


@op
class Conv2d(ImageLayer):
    """Inputs: x (N, I, H, W), weight (O, I / groups, KH, KW), optionally bias (O,). padding: (top, left, bottom, right)."""

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    float32_only = lacks_float64("conv2d")
    channel_axis = 0
    checks = windows_of(stride=1, padding=ANY, dilation=1, groups=1)
    infer = infer_conv

    def flops(self, out: Any, x: Any, w: Any, *rest: Any) -> int:
        return 2 * prod(out.shape) * prod(w.shape[1:])

    def kernel_attributes(self) -> dict[str, float]:
        return super().kernel_attributes() | {"pad_bottom": self.padding[2], "pad_right": self.padding[3]}

    def reference(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> Any:
        out = conv2d_array(x, w, self.stride, self.padding, self.dilation, self.groups)
        return out if bias is None else out + bias.reshape(-1, 1, 1)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, w, *bias = node.inputs
        return conv2d_gradient(self, out_grad, x, w, has_bias=bool(bias))

    samples = samples_of(
        ({}, [(2, 3, 6, 7), (4, 3, 3, 3), (4,)]),
        ({"stride": (2, 1), "padding": (1, 2, 1, 2), "dilation": (1, 2)}, [(1, 4, 9, 8), (6, 4, 3, 2)]),
        ({"stride": (2, 2), "padding": (1, 1, 1, 1), "groups": 2}, [(2, 4, 14, 14), (6, 2, 3, 3), (6,)]),
        ({"padding": (0, 1, 1, 0), "groups": 20}, [(1, 20, 5, 5), (20, 1, 2, 2)]),
        ({"padding": (1, 1, 1, 1), "groups": 5}, [(1, 20, 5, 5), (40, 4, 3, 3), (40,)]),
        ({}, [(2, 17, 5, 5), (33, 17, 1, 1), (33,)]),
    )


def input_gradient(op: Any, out_grad: Tensor, x: Any, w: Any) -> Tensor:
    """Gradient of x of a convolution with the attributes of `op`."""
    sides = zip(x.shape[2:], w.shape[2:], op.stride, op.padding[:2], op.padding[2:], op.dilation, strict=True)
    rest = tuple((n + before + after - d * (k - 1) - 1) % s for n, k, s, before, after, d in sides)
    return ConvTranspose2d(op.stride, op.padding, rest, op.dilation, op.groups)(out_grad, w)


def conv2d_gradient(op: Any, out_grad: Tensor, x: Tensor, w: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Gradients of x, weight and bias of a convolution with the attributes of `op`."""
    grad_x = input_gradient(op, out_grad, x, w) if x.requires_grad else None
    of_weight = Conv2dWeightGrad(tuple(w.shape[2:]), op.stride, op.padding, op.dilation, op.groups)
    grad_w = of_weight(x, out_grad) if w.requires_grad else None
    return (grad_x, grad_w, summation(out_grad, (0, 2, 3))) if has_bias else (grad_x, grad_w)


def geometry(label: str, n: int, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> tuple[Any, Any, Any]:
    """stride, padding and dilation of a convolution over n axes, as the attributes that ops take."""
    strides, dilations = per_axis(label, stride, n), per_axis(label, dilation, n)
    kernel = tuple(weight.shape[2 : n + 2]) if padding == "same" else ()
    return strides, as_padding(padding, kernel, strides, dilations, label), dilations


def convolution(cls: type[Op], name: str, n: int) -> Callable[..., Tensor]:
    """The public function of a convolution over n axes."""

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        op = cls(*geometry(name, n, weight, stride, padding, dilation), groups)  # type: ignore[call-arg]
        return one_or_many(n, op)(x, weight, *(() if bias is None else (bias,)))

    doc = f'{n}-d convolution. padding: a number, one per axis, one per side of each, "same" or "valid".'
    return named(conv, name, doc)


conv2d = convolution(Conv2d, "conv2d", 2)


@op
class ConvTranspose2d(ImageLayer):
    """Inputs: x (N, I, H, W), weight (I, O / groups, KH, KW), optionally bias (O,): the input gradient of a convolution."""

    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    output_padding: tuple = (0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    float32_only = lacks_float64("conv_transpose2d")
    channel_axis = 1
    checks = windows_of(stride=1, padding=ANY, output_padding=0, dilation=1, groups=1)
    infer = infer_conv_transpose

    def flops(self, out: Any, x: Any, w: Any, *rest: Any) -> int:
        return 2 * prod(x.shape) * prod(w.shape[1:])

    def reference(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> Any:
        out = transposed_array(x, w, self, self.infer(x, w).shape[2:])
        return out if bias is None else out + bias.reshape(-1, 1, 1)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, w = node.inputs[:2]
        conv = Conv2d(self.stride, self._conv_padding(), self.dilation, self.groups)
        of_weight = Conv2dWeightGrad(tuple(w.shape[2:]), *vars(conv).values())
        grads = (conv(out_grad, w) if x.requires_grad else None, of_weight(out_grad, x) if w.requires_grad else None)
        return (*grads, summation(out_grad, (0, 2, 3))) if len(node.inputs) > 2 else grads

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


def transposed_convolution(cls: type[Op], name: str, n: int) -> Callable[..., Tensor]:
    """The public function of a transposed convolution over n axes."""

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        strides, sides, dilations = geometry(name, n, weight, stride, padding, dilation)
        op = cls(strides, sides, per_axis(name, output_padding, n), dilations, groups)  # type: ignore[call-arg]
        return one_or_many(n, op)(x, weight, *(() if bias is None else (bias,)))

    return named(conv, name, f"{n}-d transposed convolution, arguments as in torch.")


conv_transpose2d = transposed_convolution(ConvTranspose2d, "conv_transpose2d", 2)


@op
class Conv2dWeightGrad(Op):
    """Inputs: x (N, I, H, W) and the output's gradient (N, O, OH, OW); result (O, I / groups, KH, KW)."""

    kernel_size: tuple
    stride: tuple = (1, 1)
    padding: tuple = (0, 0, 0, 0)
    dilation: tuple = (1, 1)
    groups: int = 1
    float32_only = lacks_float64("conv2d_weight_grad")
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

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, dy = node.inputs
        conv = Conv2d(self.stride, self.padding, self.dilation, self.groups)
        return input_gradient(self, dy, x, out_grad) if x.requires_grad else None, conv(x, out_grad)

    @classmethod
    def samples(cls) -> list:
        cases = []
        for attributes, (x, w, *_) in Conv2d.samples():
            y = Conv2d(**attributes).infer(Spec(x), Spec(w)).shape
            cases.append(({"kernel_size": w[2:], **attributes}, [x, y]))
        return cases


IMAGES, KERNELS, LAST = (0, 3, 1, 2), (3, 2, 0, 1), (0, 2, 3, 1)  # from the course's layouts to ours, and back


@op
class Conv(Op):
    """The course's convolution: Z (N, H, W, C), weight (k, k, I, O), result NHWC. Graphs hold what it consists of."""

    stride: int = 1
    padding: int = 1
    float32_only = Conv2d.float32_only

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

    samples = samples_of(({}, [(2, 5, 6, 3), (3, 3, 3, 4)]), ({"stride": 2}, [(1, 14, 14, 2), (3, 3, 2, 3)]))


def conv(Z: Tensor, weight: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """The course's convolution: Z (N, H, W, C), weight (k, k, I, O), result NHWC."""
    return Conv(stride, padding)(Z, weight)
