"""Images and volumes read at places that a grid gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.op import one_of
from needle.ops.common import constant, gradient_of_decomposition
from needle.ops.families import family, samples_of
from needle.ops.math.arithmetic import fmod
from needle.ops.math.comparison import eq, ge, gt, le, lt
from needle.ops.math.elementwise import cast, maximum, minimum, where
from needle.ops.math.logic import logical_and, logical_or
from needle.ops.math.maths import absolute, floor, round
from needle.ops.reduce.basic import summation
from needle.ops.shape.basic import permute, reshape, unsqueeze
from needle.ops.shape.gather import take
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import make_tuple, stack
from needle.ops.shape.scatter import index_add

__all__ = ["grid_sample"]

MODES, PADDINGS = (
    ("bilinear", "nearest", "bicubic"),
    ("zeros", "border", "reflection"),
)  # places are the kernel's numbers
CUBIC = -0.75  # as torch has it


class Tap(NamedTuple):
    """What is read along an axis: whole coordinates, their weights, and how these change with the grid's number."""

    place: Tensor
    weight: Any
    slope: Any


class Corner(NamedTuple):
    """What is read of an image: numbers among its pixels, their weights, and how these change along each axis."""

    number: Tensor
    weight: Tensor
    slopes: list[Tensor]


@family
class Sampled(Op):
    """Base of sampling and its gradient."""

    mode: str = "bilinear"
    padding_mode: str = "zeros"
    align_corners: bool = False
    checks = one_of(mode=MODES, padding_mode=PADDINGS)
    compute_infers = True

    def numbers(self) -> dict[str, int]:
        return {
            "mode": MODES.index(self.mode),
            "padding": PADDINGS.index(self.padding_mode),
            "corners": int(self.align_corners),
        }

    def check(self, x: Any, grid: Any) -> tuple[int, ...]:
        """The shape of what is read."""
        rank = len(x.shape) - 2
        fits = rank in (2, 3) and len(grid.shape) == rank + 2 and grid.shape[-1] == rank and grid.shape[0] == x.shape[0]
        if not fits or (self.mode == "bicubic" and rank == 3) or not all(x.shape[2:]):
            raise ValueError(
                f"[grid_sample] expects images (N, C, H, W) and a grid (N, H', W', 2), or (N, C, D, H, W) and (N, D', H', W', 3) "
                f"but for bicubic, got {tuple(x.shape)} and {tuple(grid.shape)}."
            )
        return (*x.shape[:2], *grid.shape[1:-1])

    def corners(self, x: Tensor, grid: Tensor) -> list[Corner]:
        n, _, *sizes = x.shape
        rank = len(sizes)
        image = constant(np.arange(n).reshape((n,) + (1,) * rank) * math.prod(sizes), x, "int64")
        axes = [self._taps(getitem(grid, (Ellipsis, rank - 1 - d)), size) for d, size in enumerate(sizes)]
        found = (self._corner(taps, sizes) for taps in itertools.product(*axes))
        return [c._replace(number=image + c.number) for c in found]

    def _corner(self, taps: Sequence[Tap], sizes: Sequence[int]) -> Corner:
        number: Any = 0
        inside: Any = None
        for tap, size in zip(taps, sizes, strict=True):
            within = logical_and(ge(tap.place, 0.0), le(tap.place, size - 1.0))
            inside = within if inside is None else logical_and(inside, within)
            number = number * size + cast(where(within, tap.place, 0.0), "int64")

        def product(factors: list[Any]) -> Tensor:
            total = math.prod(factors[1:], start=factors[0])
            return where(inside, total, total * 0.0)  # a NaN stays

        weights = [t.weight for t in taps]
        slopes = [product([*weights[:d], t.slope, *weights[d + 1 :]]) for d, t in enumerate(taps)]
        return Corner(number, product(weights), slopes)

    def _taps(self, g: Tensor, size: int) -> list[Tap]:
        """What is read along an axis at normalised coordinates."""
        x = (g + 1.0) * ((size - 1) / 2) if self.align_corners else ((g + 1.0) * float(size) - 1.0) / 2.0
        scale = (size - 1) / 2 if self.align_corners else size / 2
        if self.mode == "bicubic":
            first = floor(x)
            near = [(first + float(i), x - first - float(i)) for i in (-1, 0, 1, 2)]
            return [Tap(self._padded(place, size)[0], cubic(t), cubic_slope(t) * scale) for place, t in near]
        x, slope = self._padded(x, size)
        if self.mode == "nearest":
            none = where(lt(absolute(x), math.inf), x, 0.0) * 0.0
            return [Tap(round(x), none + 1.0, none)]
        first = floor(x)
        return [Tap(first, first + 1.0 - x, -slope * scale), Tap(first + 1.0, x - first, slope * scale)]

    def _padded(self, x: Tensor, size: int) -> tuple[Tensor, Any]:
        """x within the axis, and its slope by x before."""
        if self.padding_mode == "zeros":
            return x, x * 0.0 + 1.0
        slope: Any = 1.0
        if self.padding_mode == "reflection":
            x, slope = reflected(x, 0.0, size - 1.0) if self.align_corners else reflected(x, -0.5, size - 0.5)
        still = logical_or(le(x, 0.0), ge(x, size - 1.0))
        within = minimum(maximum(x, constant(0.0, x)), constant(size - 1.0, x))
        return within, where(still, 0.0, slope * (x * 0.0 + 1.0))


@op
class GridSample(Sampled):
    """x (N, C, *sizes), 2 or 3 of them, read at grid (N, *out, 2 or 3): (x, y, z) in [-1, 1] (Jaderberg et al., 2015)."""

    def infer(self, x: Any, grid: Any) -> Any:
        return Spec(self.check(x, grid), str(x.dtype))

    def compute(self, x: NDArray, grid: NDArray) -> Any:
        out = NDArray.empty(*self.infer(x, grid))
        call("grid_sample", [out], x=x, grid=grid.as_dtype(x.dtype), **self.numbers())
        return out

    def decompose(self, x: Tensor, grid: Tensor) -> Tensor:
        self.check(x, grid)
        rank, rows = len(x.shape) - 2, rows_of_pixels(x)
        total: Any = None
        for corner in self.corners(x, grid):
            part = weighted(take(rows, corner.number), unsqueeze(corner.weight, -1))
            total = part if total is None else total + part
        return permute(total, (0, rank + 1, *range(1, rank + 1)))

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return tuple(GridSampleGrad(self.mode, self.padding_mode, self.align_corners)(*node.inputs, out_grad))

    samples = samples_of(
        ({}, [(2, 3, 4, 5), (2, 3, 6, 2)]),
        ({"padding_mode": "border", "align_corners": True}, [(1, 2, 4, 5), (1, 3, 2, 2)]),
        ({"padding_mode": "reflection"}, [(1, 2, 4, 5), (1, 3, 2, 2)]),
        ({"mode": "bicubic"}, [(1, 2, 4, 5), (1, 3, 2, 2)]),
        ({}, [(1, 2, 3, 4, 5), (1, 2, 3, 2, 3)]),
    )


@op
class GridSampleGrad(Sampled):
    """Gradients of x and the grid of GridSample; inputs x, grid, gradient of the result. The border's slope is 0, as in torch."""

    n_out = 2

    def infer(self, x: Any, grid: Any, dy: Any) -> Any:
        want = self.check(x, grid)
        if tuple(dy.shape) != want:
            raise ValueError(f"[{self.label}] gradient expects shape {want}, got {tuple(dy.shape)}.")
        return Spec(tuple(x.shape), str(x.dtype)), Spec(tuple(grid.shape), str(x.dtype))

    def compute(self, x: NDArray, grid: NDArray, dy: NDArray) -> Any:
        outs = [NDArray.empty(*spec) for spec in self.infer(x, grid, dy)]
        call("grid_sample_grad", outs, x=x, grid=grid.as_dtype(x.dtype), dy=dy.as_dtype(x.dtype), **self.numbers())
        return tuple(outs)

    def decompose(self, x: Tensor, grid: Tensor, dy: Tensor) -> Any:
        n, channels, *sizes = x.shape
        rank, rows = len(sizes), rows_of_pixels(x)
        seeds = permute(dy, (0, *range(2, rank + 2), 1))
        of_rows: Tensor = constant(np.zeros(rows.shape), x)
        of_axes: list[Any] = [0.0] * rank
        for corner in self.corners(x, grid):
            met = summation(take(rows, corner.number) * seeds, -1)
            of_axes = [total + weighted(met, slope) for total, slope in zip(of_axes, corner.slopes, strict=True)]
            part = reshape(weighted(seeds, unsqueeze(corner.weight, -1)), (-1, channels))
            of_rows = index_add(of_rows, 0, reshape(corner.number, (-1,)), part)
        of_x = permute(reshape(of_rows, (n, *sizes, channels)), (0, rank + 1, *range(1, rank + 1)))
        return make_tuple(of_x, stack(of_axes[::-1], -1))

    gradient = gradient_of_decomposition

    samples = samples_of(
        ({}, [(2, 3, 4, 5), (2, 3, 6, 2), (2, 3, 3, 6)]),
        ({"mode": "bicubic"}, [(1, 2, 4, 5), (1, 3, 2, 2), (1, 2, 3, 2)]),
        ({"padding_mode": "reflection"}, [(1, 2, 3, 4, 5), (1, 2, 3, 2, 3), (1, 2, 2, 3, 2)]),
    )


def rows_of_pixels(x: Tensor) -> Tensor:
    """All pixels of all images (M, C)."""
    rank = len(x.shape) - 2
    return reshape(permute(x, (0, *range(2, rank + 2), 1)), (x.shape[0] * math.prod(x.shape[2:]), x.shape[1]))


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    """What has weight 0 is not read: beside the image there may be anything."""
    return where(eq(weight, 0.0), 0.0, x * weight)


def reflected(x: Tensor, low: float, high: float) -> tuple[Tensor, Any]:
    """x thrown back at both ends as often as it takes, and its slope by x before."""
    if high <= low:
        return x * 0.0, 0.0
    away = absolute(x - low)
    rest, turns = fmod(away, high - low), floor(away / (high - low))
    straight = eq(fmod(turns, 2.0), 0.0)
    forward = eq(cast(straight, x.dtype), cast(ge(x, low), x.dtype))
    return where(straight, rest, (high - low) - rest) + low, where(forward, 1.0, x * 0.0 - 1.0)


def cubic(distance: Tensor) -> Tensor:
    """Keys' kernel."""
    d = absolute(distance)
    near = ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1.0
    far = ((d - 5.0) * d + 8.0) * d * CUBIC - 4 * CUBIC
    return where(le(d, 1.0), near, far)


def cubic_slope(distance: Tensor) -> Tensor:
    d = absolute(distance)
    near = (d * (3 * (CUBIC + 2)) - 2 * (CUBIC + 3)) * d
    far = ((d * 3.0 - 10.0) * d + 8.0) * CUBIC
    slope = where(le(d, 1.0), near, far)
    return where(gt(distance, 0.0), slope, -slope)


def grid_sample(
    x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Tensor:
    """torch.nn.functional.grid_sample: images (N, C, H, W) at grid (N, H', W', 2), or volumes at (N, D', H', W', 3)."""
    return GridSample(mode, padding_mode, align_corners)(x, grid)
