"""What ops over one, two or three spatial axes share: arguments per axis, one and three axes as two, shapes of convolutions."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

from needle.autograd import Deferred, Spec, Tensor
from needle.backend_ndarray.sizes import cached
from needle.ops.reduce.sorting import known_rank
from needle.ops.shape.basic import reshape, squeeze, unsqueeze

LARGEST = 1 << 20  # kernels count the elements that windows reach in 64 bits
ANY = -math.inf  # as the least number: no limit
SHAPES = {1: "(N, C, L)", 2: "(N, C, H, W)", 3: "(N, C, D, H, W)"}


def per_axis(label: str, value: Any, n: int) -> tuple:
    """One value per spatial axis, from one for all of them or from n."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    if len(values) not in (1, n):
        raise ValueError(f"[{label}] expects one number or {n}, got {values}.")
    return values * n if len(values) == 1 else values


def one_or_many(n: int, f: Callable[..., Any]) -> Callable[..., Any]:
    """f, which takes batches (N, C, *) with n further axes, of one sample (C, *), too, where the rank is known."""

    def convert(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if known_rank(x) != n + 1:
            return f(x, *args, **kwargs)
        made = f(unsqueeze(x, 0), *args, **kwargs)
        return tuple(squeeze(t, 0) for t in made) if isinstance(made, tuple) else squeeze(made, 0)

    return functools.wraps(f)(convert) if inspect.isfunction(f) else convert


def windows_of(**least: float) -> Callable[[Any], None]:
    """For `checks = windows_of(...)` in an op: the least of every attribute, a tuple of one whole number per axis.

    `padding` may name both sides of every axis, and `groups` is one number.
    """

    def check(self: Any) -> None:
        given = vars(self)
        first = given[next(iter(least))]
        axes = len(first) if isinstance(first, tuple) else 0
        for name, low in least.items():
            values = given[name]
            if name == "groups":
                values = (values,)
            elif not isinstance(values, tuple) or (
                len(values) != axes and (len(values) != 2 * axes or name != "padding")
            ):
                raise ValueError(f"[{self.label}] {name} expects one number per axis, got {values}.")
            for v in values:
                if type(v) is int and low <= v <= LARGEST and v >= -LARGEST:
                    continue
                whole = type(v) is int or isinstance(v, Integral)
                if not (whole and v >= low and abs(v) <= LARGEST) and not isinstance(v, Deferred):
                    which = f" {'below' if low == ANY else f'from {low} to'} {LARGEST}"
                    raise ValueError(f"[{self.label}] {name} expects whole numbers{which}, got {given[name]}.")

    return check


def check_spatial(label: str, x: Any, n: int) -> None:
    if len(x.shape) != n + 2:
        raise ValueError(f"[{label}] expects shape {SHAPES[n]}, got {tuple(x.shape)}.")


def on_axis(f: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
    """f of (outer, size, inner), on the axis of x whose size is `size`; f may change that size."""
    shape = x.shape
    out = f(reshape(x, (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))))
    return reshape(out, (*shape[:axis], out.shape[1], *shape[axis + 1 :]))


def on_row(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f of images, on x (N, C, L) as images of one row."""
    return squeeze(f(unsqueeze(x, 2)), 2)


def on_frames(planes: Callable[[Tensor], Tensor], depth: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """x (N, C, D, H, W) through `planes` over (H, W) and then `depth` over (D, 1): for what works axis by axis."""
    n, c, d, h, w = x.shape
    flat = planes(reshape(x, (n, c * d, h, w)))
    size = flat.shape[2:]
    out = depth(reshape(flat, (n, c, d, size[0] * size[1])))
    return reshape(out, (n, c, out.shape[2], *size))


def conv_size(size: int, kernel: int, stride: int, before: int, after: int, dilation: int) -> int:
    return (size + before + after - dilation * (kernel - 1) - 1) // stride + 1


def as_padding(padding: Any, kernel: Any, stride: Any, dilation: Any, label: str) -> tuple:
    """(top, left, bottom, right) from an int, a pair, four numbers, "same" or "valid"; likewise for one and three axes."""
    n = len(stride)
    if padding == "valid":
        return (0,) * (2 * n)
    if padding == "same":
        if any(s != 1 for s in stride):
            raise ValueError(f"[{label}] padding 'same' expects stride 1, got {stride}.")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return (*(t // 2 for t in total), *(t - t // 2 for t in total))
    if isinstance(padding, tuple | list) and len(padding) == 2 * n:
        return tuple(padding)
    return per_axis(label, padding, n) * 2


def infer_conv(op: Any, x: Any, w: Any, bias: Any = None) -> Any:
    """Output of a convolution over any number of axes with the attributes of `op`; checks the operands."""
    n, p = len(op.stride), op.padding
    check_images(op.label, x, w, n)
    check_weight(op, x, w, bias, w.shape[1] * op.groups, w.shape[0], "output")
    size = [conv_size(x.shape[2 + i], w.shape[2 + i], op.stride[i], p[i], p[n + i], op.dilation[i]) for i in range(n)]
    if any(n < 1 for n in size):
        raise ValueError(
            f"[{op.label}] kernel {tuple(w.shape[2:])} is larger than the padded input {tuple(x.shape[2:])}."
        )
    return Spec((x.shape[0], w.shape[0], *size), str(x.dtype))


def infer_conv_transpose(op: Any, x: Any, w: Any, bias: Any = None) -> Any:
    """Output of a transposed convolution over any number of axes with the attributes of `op`; checks the operands."""
    n, p = len(op.stride), op.padding
    check_images(op.label, x, w, n)
    check_weight(op, x, w, bias, w.shape[0], w.shape[1] * op.groups, "input")
    size = []
    for i in range(n):
        reach = op.stride[i] * (x.shape[2 + i] - 1) + op.dilation[i] * (w.shape[2 + i] - 1) + 1
        size.append(reach - p[i] - p[n + i] + op.output_padding[i])
    if any(n < 0 for n in size):
        raise ValueError(f"[{op.label}] padding {p} is larger than the output.")
    return Spec((x.shape[0], w.shape[1] * op.groups, *size), str(x.dtype))


def check_images(label: str, x: Any, w: Any, n: int) -> None:
    if len(x.shape) != n + 2 or len(w.shape) != n + 2:
        raise ValueError(
            f"[{label}] expects an input {SHAPES[n]} and a {n + 2}-d weight, got {tuple(x.shape)} and {tuple(w.shape)}."
        )


def check_gradient(label: str, shape: tuple, dy: Any) -> None:
    """That dy is a gradient of what has `shape`."""
    if tuple(dy.shape) != tuple(shape):
        raise ValueError(f"[{label}] expects a gradient of shape {tuple(shape)}, got {tuple(dy.shape)}.")


def check_weight(op: Any, x: Any, w: Any, bias: Any, inputs: int, outputs: int, grouped: str) -> None:
    """Of a convolution between so many channels, of which `grouped` ones are axis 0 of the weight."""
    if x.shape[1] != inputs:
        raise ValueError(f"[{op.label}] weight expects {inputs} input channels, got {x.shape[1]}.")
    if w.shape[0] % op.groups:
        raise ValueError(f"[{op.label}] {w.shape[0]} {grouped} channels do not divide into {op.groups} groups.")
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise ValueError(f"[{op.label}] bias expects shape ({outputs},), got {tuple(bias.shape)}.")
    if min(w.shape[2:]) < 1:
        raise ValueError(f"[{op.label}] expects a kernel of at least one element per axis, got {tuple(w.shape[2:])}.")
    if 0 in w.shape[:2]:
        raise ValueError(f"[{op.label}] weight expects at least one channel, got shape {tuple(w.shape)}.")


def window_attributes(op: Any, kernel: tuple[int, ...] = ()) -> dict[str, float]:
    """The attributes by which kernels know an op's windows, not to be written to; `kernel`: their size, where it is asked for."""
    return _window(op.padding[:2], op.stride, getattr(op, "dilation", ()), kernel)


@cached(maxsize=128)
def _window(padding: tuple, stride: tuple, dilation: tuple, kernel: tuple) -> dict[str, float]:
    pairs = {"stride": stride, "dilation": dilation, "kernel": kernel}
    found: dict[str, float] = {
        f"{n}_{axis}": size for n, pair in pairs.items() for axis, size in zip("hw", pair, strict=False)
    }
    return found | {"pad_top": padding[0], "pad_left": padding[1]}
