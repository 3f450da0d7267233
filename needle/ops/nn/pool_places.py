"""Where the maxima of a pooling lie, pooling by regions that tensors give, and the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.common import constant
from needle.ops.families import no_gradient, samples_of
from needle.ops.math.elementwise import cast, where
from needle.ops.math.logic import isnan
from needle.ops.math.maths import floor
from needle.ops.nn.pool import infer_adaptive, infer_pool, pooled_regions, window
from needle.ops.nn.spatial import check_spatial, one_or_many, per_axis, windows_of
from needle.ops.reduce.basic import some
from needle.ops.reduce.sorting import argmax, known_rank
from needle.ops.shape.basic import flip, reshape, squeeze, unsqueeze
from needle.ops.shape.gather import check_range, gather, take
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import along, concat
from needle.ops.shape.scatter import scatter, scatter_into

__all__ = ["adaptive_max_pool_places", "fractional_max_pool", "max_pool_places", "max_unpool"]


def winners(values: Tensor) -> Tensor:
    """The number of the largest along the last axis, as torch's pools have it: the first of equal ones, but the last NaN."""
    size, missing = values.shape[-1], isnan(values)
    first = argmax(where(missing, -np.inf, values), -1)
    last = size - 1 - argmax(cast(flip(missing, -1), "int32"), -1)
    return where(some(missing, -1), last, first)


def numbers_of(windows: Sequence[Sequence[Sequence[int]]], sizes: Sequence[int]) -> np.ndarray:
    """(P, K): the flat numbers of the pixels of every window. `windows`: per axis, the rows of each window.

    Shorter windows have their last pixel again, which wins over nothing.
    """
    found = []
    for at in np.ndindex(*map(len, windows)):
        rows = [np.asarray(axis[i]) for axis, i in zip(windows, at, strict=True)]
        found.append(np.ravel_multi_index(np.meshgrid(*rows, indexing="ij"), tuple(sizes)).ravel())
    most = max(map(len, found))
    return np.stack([np.pad(f, (0, most - len(f)), "edge") for f in found])


def places(x: Tensor, windows: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """(N, C, *out) of int64: the flat number of each window's maximum in its image."""
    n, channels, *sizes = x.shape
    numbers = numbers_of(windows, sizes)
    count, size = numbers.shape
    flat = reshape(x, (n * channels, math.prod(sizes)))
    values = reshape(take(flat, constant(numbers.ravel(), x, "int64"), 1), (n * channels, count, size))
    at = winners(values) + constant(np.arange(count) * size, x, "int64")
    return reshape(take(constant(numbers.ravel(), x, "int64"), at), (n, channels, *map(len, windows)))


def as_images(x: NDArray) -> NDArray:
    """Rows (N, C, L) as images of one row."""
    return x if x.ndim == 4 else x.reshape((*x.shape[:2], 1, x.shape[2]))


@op
class MaxPoolPlaces(Op):
    """The flat number, in its image, of the maximum of every window of x (N, C, *), over one or two axes."""

    kernel_size: tuple
    stride: tuple
    padding: tuple
    dilation: tuple
    ceil_mode: bool = False
    checks = windows_of(kernel_size=1, stride=1, padding=0, dilation=1)
    gradient = no_gradient

    def infer(self, x: Any) -> Any:
        return Spec(infer_pool(self, x).shape, "int64")

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        steps = self.stride, self.dilation, self.kernel_size
        pairs = dict(zip(("stride", "dilation", "kernel"), steps, strict=True))
        sizes = {f"{n}_{axis}": size for n, v in pairs.items() for axis, size in zip("hw", (1, *v)[-2:], strict=True)}
        top, left = (0, *self.padding)[-2:]
        call("max_pool2d_places", [as_images(out)], x=as_images(inputs[0]), pad_top=top, pad_left=left, **sizes)

    def decompose(self, x: Tensor) -> Tensor:
        each = zip(x.shape[2:], self.infer(x).shape[2:], *list(vars(self).values())[:4], strict=True)
        windows = []
        for size, out, k, s, p, d in each:
            rows = [range(i * s - p, i * s - p + d * (k - 1) + 1, d) for i in range(out)]
            windows.append([[r for r in row if 0 <= r < size] for row in rows])
        return places(x, windows)

    samples = samples_of(
        ({"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}, [(2, 3, 6, 7)]),
        (
            {"kernel_size": (3,), "stride": (2,), "padding": (1,), "dilation": (2,), "ceil_mode": True},
            [(2, 3, 10)],
        ),
    )


@op
class MaxPoolPlaces3d(MaxPoolPlaces):
    """The same over three axes, without a kernel."""

    into = Op.into
    samples = samples_of(
        ({"kernel_size": (2,) * 3, "stride": (2,) * 3, "padding": (0,) * 3, "dilation": (1,) * 3}, [(1, 2, 4, 5, 4)]),
    )


def max_pool_places(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    axes: int = 2,
) -> Tensor:
    """Where max_pool1d, 2d or 3d (by `axes`) of x finds its maxima: numbers in the flat image, int64."""
    sizes = window("max_pool_places", axes, kernel_size, stride, padding, dilation)
    op = (MaxPoolPlaces3d if axes == 3 else MaxPoolPlaces)(*sizes, bool(ceil_mode))  # type: ignore[call-arg]
    return one_or_many(axes, op)(x)


@op
class AdaptiveMaxPoolPlaces(Op):
    """The flat number, in its image, of the maximum of every region of x; regions as in AdaptiveAvgPool2d."""

    output_size: tuple
    gradient = no_gradient

    def infer(self, x: Any) -> Any:
        return Spec(infer_adaptive(self, x).shape, "int64")

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        call("adaptive_max_pool2d_places", [as_images(out)], x=as_images(inputs[0]))

    def decompose(self, x: Tensor) -> Tensor:
        regions = pooled_regions(tuple(x.shape[2:]), self.infer(x).shape[2:])
        return places(x, [[range(*bounds) for bounds in axis] for axis in regions])

    samples = samples_of(({"output_size": (3,)}, [(2, 3, 7)]), ({"output_size": (2, None)}, [(1, 2, 6, 3)]))


@op
class AdaptiveMaxPoolPlaces3d(AdaptiveMaxPoolPlaces):
    """The same over three axes, without a kernel."""

    into = Op.into
    samples = samples_of(({"output_size": (3, 2, None)}, [(1, 2, 4, 5, 3)]))


def adaptive_max_pool_places(x: Tensor, output_size: Any, *, axes: int = 2) -> Tensor:
    """Where adaptive_max_pool1d, 2d or 3d (by `axes`) of x finds its maxima: numbers in the flat image, int64."""
    cls = AdaptiveMaxPoolPlaces3d if axes == 3 else AdaptiveMaxPoolPlaces
    return one_or_many(axes, cls(per_axis("adaptive_max_pool_places", output_size, axes)))(x)


@op
class FractionalPlaces(Op):
    """The flat number of the maximum of each of `output_size` windows whose starts `samples` (N, C, axes) in [0, 1) shift.

    Graham, arXiv 1412.6071. Of images the first sample belongs to the columns, of volumes to the depth, as in torch.
    """

    kernel_size: tuple
    output_size: tuple
    domain = (0.0, 0.9)
    gradient = no_gradient

    def infer(self, x: Any, samples: Any) -> Any:
        n = len(self.kernel_size)
        check_spatial(self.label, x, n)
        if tuple(samples.shape) != (*x.shape[:2], n) or str(samples.dtype) != str(x.dtype):
            raise ValueError(
                f"[fractional_max_pool] samples expect shape {(*x.shape[:2], n)} and dtype {x.dtype}, got {tuple(samples.shape)}."
            )
        for size, k, out in zip(x.shape[2:], self.kernel_size, self.output_size, strict=True):
            if not 1 <= out <= size - k + 1:
                raise ValueError(
                    f"[fractional_max_pool] output size expects 1 to {size - k + 1} where {size} are pooled by {k}, got {out}."
                )
        return Spec((*x.shape[:2], *self.output_size), "int64")

    def decompose(self, x: Tensor, samples: Tensor) -> Tensor:
        shape = self.infer(x, samples).shape
        (n, channels, *sizes), axes = x.shape, len(self.kernel_size)
        number: Any = constant(np.zeros((1,) * (2 + 2 * axes), "int64"), x, "int64")
        for axis, (size, k, out) in enumerate(zip(sizes, self.kernel_size, self.output_size, strict=True)):
            own = axis if axes == 3 else axes - 1 - axis
            sample = getitem(samples, along(2, 3, slice(own, own + 1)))
            start = constant(np.full((1, 1, 1), size - k), x, "int64")
            if out > 1:
                step = np.asarray((size - k) / (out - 1), x.dtype)
                steps = constant(np.arange(out - 1), x, str(x.dtype))
                moved = floor((steps + sample) * float(step)) - floor(sample * float(step))
                ends = start + cast(sample * 0.0, "int64")
                start = concat([cast(moved, "int64"), ends], 2)
            rows = unsqueeze(start, -1) + constant(np.arange(k), x, "int64")  # (N, C, out, k)
            place = [1] * (2 + 2 * axes)
            place[2 + axis], place[2 + axes + axis] = out, k
            number = number * size + reshape(rows, (*rows.shape[:2], *place[2:]))
        count = math.prod(self.output_size)
        number = reshape(number, (n, channels, count, math.prod(self.kernel_size)))
        values = gather(reshape(x, (n, channels, math.prod(sizes))), 2, reshape(number, (n, channels, -1)))
        at = winners(reshape(values, number.shape))
        return reshape(gather(number, 3, unsqueeze(at, -1)), shape)

    samples = samples_of(({"kernel_size": (2, 2), "output_size": (3, 4)}, [(2, 3, 6, 7), (2, 3, 2)]))


def at_places(x: Tensor, numbers: Tensor) -> Tensor:
    """Elements of images by flat numbers (N, C, *)."""
    n, channels, *sizes = x.shape
    flat = reshape(x, (n, channels, math.prod(sizes)))
    return reshape(gather(flat, 2, reshape(numbers, (n, channels, -1))), numbers.shape)


def fractional_max_pool(
    x: Tensor, kernel_size: Any, output_size: Any, samples: Tensor, *, axes: int = 2
) -> tuple[Tensor, Tensor]:
    """Maxima of windows that `samples` (N, C, axes) place, and where they lie (Graham, arXiv 1412.6071)."""
    op = FractionalPlaces(*(per_axis("fractional_max_pool", v, axes) for v in (kernel_size, output_size)))

    def pool(x: Tensor) -> tuple[Tensor, Tensor]:
        numbers = op(x, samples)
        return at_places(x, numbers), numbers

    return one_or_many(axes, pool)(x)


@op
class MaxUnpool(Op):
    """x (N, C, *) at the flat numbers that a pooling gave, zeros elsewhere: (N, C, *output_size)."""

    output_size: tuple

    def infer(self, x: Any, numbers: Any) -> Any:
        check_spatial(self.label, x, len(self.output_size))
        if tuple(x.shape) != tuple(numbers.shape):
            raise ValueError(
                f"[max_unpool] expects numbers of the shape of the input, got {tuple(x.shape)} and {tuple(numbers.shape)}."
            )
        return Spec((*x.shape[:2], *self.output_size), str(x.dtype))

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        rows, size = math.prod(out.shape[:2]), math.prod(self.output_size)
        x, numbers = (a.reshape((rows, math.prod(a.shape[2:]))) for a in inputs)
        check_range(self.label, numbers, 0, size)
        out.fill(0)
        scatter_into(out.reshape((rows, size)), 1, numbers, x, "set")

    def decompose(self, x: Tensor, numbers: Tensor) -> Tensor:
        shape = self.infer(x, numbers).shape
        rows = shape[0] * shape[1]
        zeros = constant(np.zeros((rows, math.prod(self.output_size)), x.dtype), x)
        flat = [reshape(t, (rows, math.prod(x.shape[2:]))) for t in (numbers, x)]
        return reshape(scatter(zeros, 1, *flat), shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        """As torch has it, also of elements that others of the same number replaced."""
        return at_places(out_grad, node.inputs[1]), None

    samples = samples_of(({"output_size": (4, 5)}, [(2, 3, 1, 1), Spec((2, 3, 1, 1), "int64")]))


def max_unpool(x: Tensor, numbers: Tensor, output_size: Any) -> Tensor:
    """The way back of max_pool with places: x (N, C, *) at its `numbers`, of its shape and whole, in (N, C, *output_size);
    zeros elsewhere."""
    op = MaxUnpool(tuple(output_size))
    if known_rank(x) == len(op.output_size) + 1:
        return squeeze(op(unsqueeze(x, 0), unsqueeze(numbers, 0)), 0)
    return op(x, numbers)
