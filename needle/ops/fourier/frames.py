"""Signals in time and frequency: frames, their sum, and torch's stft and istft."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, op
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.kernels import PLANNING
from needle.complex_numbers import Complex
from needle.ops.families import samples_of
from needle.ops.fourier.complex import complex_map, known, multilinear, view_as_complex, view_as_real
from needle.ops.fourier.fft import fft, ifft, irfft, rfft
from needle.ops.math.elementwise import add, multiply
from needle.ops.shape.basic import Pad, broadcast_to, reshape, transpose, unsqueeze
from needle.ops.shape.creation import full_like
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import along, concat
from needle.ops.shape.padding import pad

__all__ = ["istft", "overlap_add", "stft"]


def padded(x: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Zeros around an axis, or with negative numbers less of it."""
    if not before and not after:
        return x
    pads = [(0, 0)] * len(x.shape)
    pads[axis] = (before, after)
    return Pad(tuple(pads))(x)


@op
class Frames(Op):
    """Frames of `size` every `step` along the last axis: (..., L) to (..., frames, size)."""

    size: int
    step: int

    def infer(self, x: Any) -> Any:
        if not x.shape or not 0 < self.size <= x.shape[-1] or self.step < 1:
            raise ValueError(
                f"[stft] expects frames of 1 to as many numbers as there are, and a step from 1 on, got {self.size}, "
                f"{self.step} and shape {tuple(x.shape)}."
            )
        return Spec((*x.shape[:-1], (x.shape[-1] - self.size) // self.step + 1, self.size), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        shape, rank = self.infer(x).shape, len(x.shape)
        count, parts = shape[-2], -(-self.size // self.step)
        total = (count + parts - 1) * self.step
        x = padded(x, -1, 0, total - x.shape[-1])
        steps = reshape(x, (*shape[:-2], count + parts - 1, self.step))
        found = [getitem(steps, along(rank - 1, rank + 1, slice(k, k + count))) for k in range(parts)]
        return padded(concat(found, -1), -1, 0, self.size - parts * self.step)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x = node.inputs[0]
        back = OverlapAdd(self.step)(out_grad)
        return padded(back, -1, 0, x.shape[-1] - back.shape[-1])

    samples = samples_of(
        ({"size": 5, "step": 2}, [(2, 12)]), ({"size": 4, "step": 4}, [(9,)]), ({"size": 2, "step": 3}, [(2, 3, 9)])
    )


@op
class OverlapAdd(Op):
    """Frames (..., T, size) added every `step`: (..., size + step (T - 1))."""

    step: int

    def infer(self, x: Any) -> Any:
        if len(x.shape) < 2 or 0 in x.shape[-2:] or self.step < 1:
            raise ValueError(
                f"[istft] expects frames (..., T, size) and a step from 1 on, got {tuple(x.shape)} and {self.step}."
            )
        return Spec((*x.shape[:-2], x.shape[-1] + self.step * (x.shape[-2] - 1)), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        shape, rank = self.infer(x).shape, len(x.shape)
        size, step = x.shape[-1], self.step
        parts = -(-size // step)
        x = padded(x, -1, 0, parts * step - size)
        total: Any = None
        for k in range(parts):
            part = padded(getitem(x, along(rank - 1, rank, slice(k * step, (k + 1) * step))), -2, k, parts - 1 - k)
            total = part if total is None else add(total, part)
        long = (*shape[:-1], (x.shape[-2] + parts - 1) * step)
        return padded(reshape(total, long), -1, 0, shape[-1] - long[-1])

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return Frames(node.inputs[0].shape[-1], self.step)(out_grad)

    samples = samples_of(({"step": 2}, [(2, 4, 5)]), ({"step": 4}, [(3, 4)]), ({"step": 3}, [(2, 3, 2)]))


def overlap_add(frames: Tensor, step: int) -> Tensor:
    """Frames (..., T, size) added, each `step` after the one before: (..., size + step * (T - 1)). As torch.nn.functional.fold
    of one axis; raises ValueError for empty frames or a step under 1.
    """
    return OverlapAdd(step)(frames)


@op
class Covered(Op):
    """Its input, sums of windows' squares; one of 0 is an error where values are known, as those of constants are in plans."""

    def infer(self, x: Any) -> Any:
        return Spec(tuple(x.shape), str(x.dtype))

    def compute(self, x: NDArray) -> Any:
        if PLANNING.builder is None:
            self.reference(x.read())
        return x

    def aliases(self, out: Any, *inputs: Any) -> bool:
        return True

    def decompose(self, x: Tensor) -> Tensor:
        return x

    def reference(self, x: np.ndarray) -> Any:
        if np.abs(x).min(initial=1.0) < 1e-11:
            raise ValueError(
                "[istft] expects windows whose squares sum to more than 0 everywhere, got 0 at some place."
            )
        return x

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad

    samples = samples_of(({}, [(5,)]))


def mapped(f: Any, x: Any) -> Any:
    return complex_map(f, x) if isinstance(x, Complex) else f(x)


def times_window(x: Any, window: Any) -> Any:
    if isinstance(x, Complex) or isinstance(window, Complex):
        return multilinear(multiply, x, window)
    return multiply(x, window)


def check_frames(label: str, n_fft: int, hop: Any, length: Any, window: Any) -> tuple[int, int]:
    """The step and the window's length."""
    length = n_fft if length is None else length
    hop = n_fft // 4 if hop is None else hop
    if hop < 1:
        raise ValueError(f"[{label}] hop_length expects at least 1, got {hop}.")
    if not 0 < length <= n_fft:
        raise ValueError(f"[{label}] win_length expects 1 to n_fft, which is {n_fft}, got {length}.")
    spec = None if window is None else known(window.real if isinstance(window, Complex) else window)
    if spec is not None and spec.shape != (length,):
        raise ValueError(f"[{label}] window expects shape ({length},), got {tuple(spec.shape)}.")
    return hop, length


def whole_window(window: Any, like: Tensor, length: int, n_fft: int) -> Any:
    """The window of n_fft numbers, in whose middle are those that are given; None for ones alone."""
    if window is None and length == n_fft:
        return None
    window = full_like(like, 1.0, (length,)) if window is None else window
    left = (n_fft - length) // 2
    return mapped(lambda w: pad(w, (left, n_fft - length - left)), window) if length < n_fft else window


def stft(
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool = True,
) -> Any:
    """torch.stft: transforms of frames of x (..., L), as (..., frequencies, frames)."""
    hop, length = check_frames("stft", n_fft, hop_length, win_length, window)
    many = isinstance(x, Complex) or isinstance(window, Complex)
    onesided = not many if onesided is None else onesided
    if onesided and many:
        raise ValueError("[stft] expects onesided=False of complex numbers.")
    if center:
        x = mapped(lambda part: pad(part, (n_fft // 2, n_fft // 2), pad_mode), x)
    frames = mapped(Frames(n_fft, hop), x)
    given = whole_window(window, x.real if isinstance(x, Complex) else x, length, n_fft)
    frames = frames if given is None else times_window(frames, given)
    y = (rfft if onesided else fft)(frames, norm="ortho" if normalized else None)
    y = complex_map(transpose, y)
    return y if return_complex else view_as_real(y)


def istft(
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Any = None,
    return_complex: bool = False,
) -> Any:
    """torch.istft of (..., frequencies, frames): frames added under their windows, over the sum of the windows' squares.

    A sum of 0 is an error; in a plan, that of a window which is no constant gives what is no number.
    """
    hop, width = check_frames("istft", n_fft, hop_length, win_length, window)
    if hop > width:
        raise ValueError(f"[istft] hop_length expects at most win_length, which is {width}, got {hop}.")
    x = x if isinstance(x, Complex) else view_as_complex(x)
    spec = known(x.real)
    bins = None if spec is None else spec.shape[-2]
    if onesided is None and bins is None:
        raise Unsupported("[istft] needs onesided=, or with an example the number of frequencies")
    onesided = bins != n_fft if onesided is None else onesided
    if bins not in (None, n_fft // 2 + 1 if onesided else n_fft):
        raise ValueError(f"[istft] expects {n_fft // 2 + 1 if onesided else n_fft} frequencies, got {bins}.")
    if return_complex and onesided:
        raise ValueError("[istft] expects onesided=False for complex results.")
    if isinstance(window, Complex) and not return_complex:
        raise ValueError("[istft] expects return_complex=True with a complex window.")
    norm, frames = "ortho" if normalized else None, complex_map(transpose, x)
    count = x.shape[-1]
    y = irfft(frames, n_fft, norm=norm) if onesided else ifft(frames, norm=norm)
    y = y if return_complex or not isinstance(y, Complex) else y.real
    like = y.real if isinstance(y, Complex) else y
    given = whole_window(window, like, width, n_fft)
    y = y if given is None else times_window(y, given)
    squares = full_like(like, 1.0, (n_fft,)) if given is None else times_window(given, given)
    spread = lambda w: overlap_add(broadcast_to(unsqueeze(w, 0), shape=(count, n_fft)), hop)  # noqa: E731
    total = n_fft + hop * (count - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else total - n_fft // 2 if center else total
    cut = lambda a: getitem(a, (Ellipsis, slice(start, end)))  # noqa: E731
    y, squares = mapped(lambda a: cut(overlap_add(a, hop)), y), mapped(lambda a: cut(spread(a)), squares)
    y = y / (squares if isinstance(squares, Complex) else Covered()(squares))
    if length is None:
        return y
    missing = end - total  # of a length beyond all frames
    missing = max(missing, 0) if isinstance(missing, int) else missing.larger(0)
    return y if isinstance(missing, int) and not missing else mapped(lambda a: pad(a, (0, missing)), y)
