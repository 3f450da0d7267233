"""Pooling over images (N, C, H, W) with torch's argument rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.families import family, named, samples_of
from needle.ops.math.comparison import gt
from needle.ops.math.elementwise import where
from needle.ops.nn.spatial import (
    SHAPES,
    check_gradient,
    check_spatial,
    one_or_many,
    per_axis,
    window_attributes,
    windows_of,
)
from needle.ops.nn.windows import each_window, pad_images, windows
from needle.ops.shape.basic import Pad
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import along

__all__ = ["adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"]


def pool_sizes(op: Any, x: Any) -> tuple[int, ...]:
    """Output size along every spatial axis of a pooling with the attributes of `op`."""
    check_spatial(op.label, x, len(op.kernel_size))
    dilations = getattr(op, "dilation", (1,) * len(op.kernel_size))
    sizes = []
    for size, k, s, p, d in zip(x.shape[2:], op.kernel_size, op.stride, op.padding, dilations, strict=True):
        if 2 * p > k:
            raise ValueError(f"[{op.label}] padding {op.padding} is more than half of the kernel {op.kernel_size}.")
        span = size + 2 * p - d * (k - 1) - 1
        n = (-(-span // s) if op.ceil_mode else span // s) + 1
        if n < 1 or not size:
            raise ValueError(
                f"[{op.label}] kernel {op.kernel_size} is larger than the padded input {tuple(x.shape[2:])}."
            )
        if op.ceil_mode and (n - 1) * s >= size + p:
            n -= 1  # the last window would start in the padding after the image
        sizes.append(n)
    return tuple(sizes)


def window(label: str, n: int, kernel_size: Any, stride: Any, *others: Any) -> Any:
    """Kernel size, stride (by default the kernel's size) and other arguments, each with one value per axis."""
    kernel = per_axis(label, kernel_size, n)
    given = stride is not None and stride != [] and stride != ()
    return (kernel, per_axis(label, stride, n) if given else kernel, *(per_axis(label, o, n) for o in others))


def infer_pool(op: Any, x: Any) -> Any:
    """Output of a pooling of windows with the attributes of `op`."""
    return Spec((*x.shape[:2], *pool_sizes(op, x)), str(x.dtype))


def both_sides(op: Any) -> Any:
    """The padding of a pooling as (top, left, bottom, right)."""
    return (*op.padding, *op.padding)


class Pool(Op):
    """One result per window of every channel, by the kernel of its name."""

    infer = infer_pool

    def kernel_attributes(self) -> dict[str, float]:
        return {}

    def row(self) -> str:
        return self.label

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        call(self.row(), [out], x=inputs[0], **self.kernel_attributes())


@family
class MaxWindows(Op):
    """What a maximum pooling and its gradient know of the windows."""

    kernel_size: tuple
    stride: tuple
    padding: tuple = (0, 0)
    dilation: tuple = (1, 1)
    ceil_mode: bool = False
    checks = windows_of(kernel_size=1, stride=1, padding=0, dilation=1)


@op
class MaxPool2d(MaxWindows, Pool):
    """Maximum of every window; padding never wins."""

    def kernel_attributes(self) -> dict[str, float]:
        return window_attributes(self, self.kernel_size)

    def reference(self, x: np.ndarray) -> Any:
        return self._winners(x)[0]

    def _winners(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Maxima, and which kernel element they came from; of equal ones the first."""
        size = pool_sizes(self, x)
        best, at = np.full((*x.shape[:2], *size), -np.inf, x.dtype), np.zeros((*x.shape[:2], *size), int)
        sides, kernel = both_sides(self), self.kernel_size
        for i, j, window in windows(x, sides, kernel, self.stride, self.dilation, size, -np.inf):
            better = (window > best) | np.isnan(window)
            best, at = np.where(better, window, best), np.where(better, i * kernel[1] + j, at)
        return best, at

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return MaxPool2dGrad(*self.attributes().values())(node.inputs[0], out_grad)

    samples = samples_of(
        ({"kernel_size": (2, 2), "stride": (2, 2)}, [(2, 3, 6, 7)]),
        ({"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)}, [(1, 17, 9, 8)]),
        (
            {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "ceil_mode": True},
            [(1, 2, 8, 9)],
        ),
    )


@op
class MaxPool2dGrad(MaxWindows):
    """The output's gradient at the winners of every window."""

    def _forward(self) -> MaxPool2d:
        return MaxPool2d(*self.attributes().values())

    def infer(self, x: Any, dy: Any) -> Any:
        check_gradient(self.label, self._forward().infer(x).shape, dy)
        return Spec(tuple(x.shape), str(x.dtype))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        x, dy = inputs
        call("max_pool2d_grad", [out], x=x, dy=dy, **self._forward().kernel_attributes())

    def reference(self, x: np.ndarray, dy: np.ndarray) -> Any:
        _, at = self._forward()._winners(x)
        args = (both_sides(self), self.kernel_size, self.stride, self.dilation, dy.shape[2:])
        dx = pad_images(np.zeros(x.shape, dy.dtype), *args)
        for i, j, window in each_window(dx, *args[1:]):
            window += dy * (at == i * self.kernel_size[1] + j)
        top, left = self.padding
        return dx[:, :, top : top + x.shape[2], left : left + x.shape[3]]

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return None, at_winners(self._forward(), node.inputs[0].detach(), out_grad)


def at_winners(pool: MaxPool2d, x: Tensor, values: Tensor) -> Tensor:
    """`values`, of the shape of x, where every window of x has its maximum."""
    ends, steps, size = [], [], pool_sizes(pool, x)
    for n, count, k, s, p, d in zip(
        x.shape[2:], size, pool.kernel_size, pool.stride, pool.padding, pool.dilation, strict=True
    ):
        span = s * (count - 1) + 1  # from the first window's place to the last one's
        ends.append((p, max(p, d * (k - 1) + span - n - p)))
        steps.append([slice(i * d, i * d + span, s) for i in range(k)])
    wide, held = (Pad(tuple(ends), v)(t) for t, v in ((x, -np.inf), (values, 0.0)))
    places = [(slice(None), slice(None), rows, columns) for rows in steps[0] for columns in steps[1]]
    best, picked = getitem(wide, places[0]), getitem(held, places[0])
    for place in places[1:]:
        here = getitem(wide, place)
        better = gt(here, best)
        best, picked = where(better, here, best), where(better, getitem(held, place), picked)
    return picked


def max_pooling(cls: Any, n: int) -> Callable[..., Tensor]:
    """The public function of a maximum pooling over n axes."""
    name = f"max_pool{n}d"

    def pool(
        x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Tensor:
        op = cls(*window(name, n, kernel_size, stride, padding, dilation), bool(ceil_mode))
        return one_or_many(n, op)(x)

    return named(pool, name, f"Maxima of windows of x {SHAPES[n]}; {ARGUMENTS}")


ARGUMENTS = "arguments as in torch, numbers or one per axis: the stride is the kernel's size unless given."
max_pool2d = max_pooling(MaxPool2d, 2)


@op
class AvgPool2d(Pool):
    """Mean of every window; zeros of the padding count (count_include_pad) or not; divisor_override replaces the count."""

    kernel_size: tuple
    stride: tuple
    padding: tuple = (0, 0)
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None
    checks = windows_of(kernel_size=1, stride=1, padding=0)

    def kernel_attributes(self) -> dict[str, float]:
        by = {"count_include_pad": self.count_include_pad, "divisor": self.divisor_override or 0}
        return window_attributes(self, self.kernel_size) | by

    def divisor(self, x: Any) -> np.ndarray:
        """(OH, OW): by what the sum of each window is divided."""
        size = pool_sizes(self, x)
        if self.divisor_override:
            return np.full(size, float(self.divisor_override))
        counts = []
        for n, out, k, s, p in zip(x.shape[2:], size, self.kernel_size, self.stride, self.padding, strict=True):
            start = np.arange(out) * s - p
            stop = np.minimum(start + k, n + p)
            counts.append(stop - start if self.count_include_pad else np.minimum(stop, n) - np.maximum(start, 0))
        return np.outer(*counts).astype("float64")

    def reference(self, x: np.ndarray) -> Any:
        size = pool_sizes(self, x)
        total = sum(w for *_, w in windows(x, both_sides(self), self.kernel_size, self.stride, (1, 1), size))
        return total / self.divisor(x).astype(x.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return AvgPool2dGrad(self, tuple(node.inputs[0].shape))(out_grad)

    @classmethod
    def samples(cls) -> list:
        plain = {"kernel_size": (2, 2), "stride": (2, 2)}
        padded = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": True}
        return [
            (plain, [(2, 3, 6, 7)]),
            (padded, [(1, 17, 8, 9)]),
            ({**padded, "count_include_pad": False}, [(1, 2, 8, 9)]),
            ({**padded, "divisor_override": 5}, [(1, 2, 8, 9)]),
        ]


@op
class AvgPool2dGrad(Op):
    """Gradient of an average pooling's input, of shape `shape`, from its output's."""

    pool: AvgPool2d
    shape: tuple

    def infer(self, dy: Any) -> Any:
        check_gradient(self.label, self.pool.infer(Spec(self.shape)).shape, dy)
        return Spec(self.shape, str(dy.dtype))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        call("avg_pool2d_grad", [out], dy=inputs[0], **self.pool.kernel_attributes())

    def reference(self, dy: np.ndarray) -> Any:
        p = self.pool
        args = (both_sides(p), p.kernel_size, p.stride, (1, 1), dy.shape[2:])
        dx = pad_images(np.zeros(self.shape, dy.dtype), *args)
        part = dy / p.divisor(Spec(self.shape)).astype(dy.dtype)
        for _, _, window in each_window(dx, *args[1:]):
            window += part
        top, left = p.padding
        return dx[:, :, top : top + self.shape[2], left : left + self.shape[3]]

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return self.pool(out_grad)


def avg_pooling(cls: Any, n: int) -> Callable[..., Tensor]:
    """The public function of an average pooling over n axes."""
    name = f"avg_pool{n}d"

    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        sizes = window(name, n, kernel_size, stride, padding)
        return one_or_many(n, cls(*sizes, bool(ceil_mode), bool(count_include_pad), divisor_override))(x)

    return named(pool, name, f"Means of windows of x {SHAPES[n]}; {ARGUMENTS}")


avg_pool2d = avg_pooling(AvgPool2d, 2)
MOST_REGIONS = 1 << 16  # along an axis: regions of several sizes are pooled one by one


def infer_adaptive(op: Any, x: Any) -> Any:
    """Output of an adaptive pooling with the attribute `output_size`, in which None keeps the input's size."""
    check_spatial(op.label, x, len(op.output_size))
    size = tuple(n if s is None else int(s) for s, n in zip(op.output_size, x.shape[2:], strict=True))
    if max(size) > MOST_REGIONS:
        raise ValueError(f"[{op.label}] output size expects at most {MOST_REGIONS}, got {size}.")
    if min(x.shape[2:]) < 1 or min(size) < 1:
        raise ValueError(f"[{op.label}] output size {size} and input {tuple(x.shape)} are expected not to be empty.")
    return Spec((*x.shape[:2], *size), str(x.dtype))


@op
class AdaptiveAvgPool2d(Pool):
    """Means of output_size regions that cover the image: region i is [floor(i n / out), ceil((i + 1) n / out))."""

    output_size: tuple

    infer = infer_adaptive

    def reference(self, x: np.ndarray) -> Any:
        regions = pooled_regions(tuple(x.shape[2:]), self.infer(x).shape[2:])
        for axis, bounds in zip((3, 2), regions[::-1], strict=True):  # sums first: those of few digits keep all of them
            x = np.stack([x[along(axis, 4, slice(*b))].sum(axis) for b in bounds], axis)
        return x / region_sizes(regions).astype(x.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return AdaptiveAvgPool2dGrad(tuple(node.inputs[0].shape))(out_grad)

    samples = samples_of(({"output_size": (1, 1)}, [(2, 17, 7, 7)]), ({"output_size": (3, None)}, [(1, 2, 7, 5)]))


def pooled_regions(size: tuple, out: tuple) -> list[list[tuple[int, int]]]:
    """Start and end of every region, per axis."""
    return [[(i * n // o, -(-(i + 1) * n // o)) for i in range(o)] for n, o in zip(size, out, strict=True)]


def region_sizes(regions: list[list[tuple[int, int]]]) -> np.ndarray:
    rows, columns = (np.array([stop - start for start, stop in r]) for r in regions)
    return rows[:, None] * columns


@op
class AdaptiveAvgPool2dGrad(Op):
    """Gradient of an adaptive average pooling's input, of shape `shape`, from its output's."""

    shape: tuple

    def infer(self, dy: Any) -> Any:
        check_gradient(self.label, AdaptiveAvgPool2d(tuple(dy.shape[2:])).infer(Spec(self.shape)).shape, dy)
        return Spec(self.shape, str(dy.dtype))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        call("adaptive_avg_pool2d_grad", [out], dy=inputs[0])

    def reference(self, dy: np.ndarray) -> Any:
        regions = pooled_regions(self.shape[2:], dy.shape[2:])
        dx = dy / region_sizes(regions).astype(dy.dtype)
        for axis, bounds in zip((2, 3), regions, strict=True):
            part, dx = dx, np.zeros((*dx.shape[:axis], self.shape[axis], *dx.shape[axis + 1 :]), dy.dtype)
            for i, b in enumerate(bounds):
                dx[along(axis, 4, slice(*b))] += part[along(axis, 4, slice(i, i + 1))]
        return dx

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return adaptive_avg_pool2d(out_grad, tuple(node.inputs[0].shape[2:]))


def adaptive_pooling(cls: Any, name: str, n: int) -> Callable[[Tensor, Any], Tensor]:
    """The public function of an adaptive pooling over n axes."""

    def pool(x: Tensor, output_size: Any) -> Tensor:
        return one_or_many(n, cls(per_axis(name, output_size, n)))(x)

    what = "Means" if "avg" in name else "Maxima"
    return named(pool, name, f"{what} of `output_size` regions of x {SHAPES[n]}; None keeps the size of an axis.")


adaptive_avg_pool2d = adaptive_pooling(AdaptiveAvgPool2d, "adaptive_avg_pool2d", 2)
