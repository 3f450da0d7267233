"""The functions of torch.fft: arguments and results as there, complex numbers as needle.Complex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needle.autograd import Tensor
from needle.complex_numbers import Complex
from needle.ops.dtypes import float_dtype
from needle.ops.fourier.complex import complex_map
from needle.ops.fourier.transform import Fourier, FourierToReal
from needle.ops.math.arithmetic import remainder
from needle.ops.math.elementwise import cast
from needle.ops.shape.creation import arange_like, full_like
from needle.ops.shape.runtime_shape import roll

__all__ = [
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "hfft2",
    "hfftn",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "ihfft",
    "ihfft2",
    "ihfftn",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftfreq",
    "rfftn",
]

NORMS = (None, "backward", "ortho", "forward")
PLANE = (-2, -1)


def factor(n: Any, norm: str | None, inverse: bool) -> Any:
    """What results are multiplied by: n numbers back and forth are themselves."""
    if norm not in NORMS:
        raise ValueError(f"[fft] norm expects backward, ortho or forward, got {norm}.")
    if norm == "ortho":
        return n**-0.5
    return 1 / n if (norm == "forward") != inverse else 1.0


def size_of(label: str, x: Any, n: Any, axis: int) -> Any:
    if isinstance(n, int) and n < 1:
        raise ValueError(f"[{label}] n expects at least 1, got {n}.")
    n = x.shape[axis] if n is None else n
    if isinstance(n, int) and n < 1:
        raise ValueError(f"[{label}] expects at least one number along axis {axis}, got shape {tuple(x.shape)}.")
    return n


def complex_to_complex(label: str, x: Any, n: Any, axis: int, norm: str | None, inverse: bool) -> Complex:
    n = size_of(label, x, n, axis)
    given = (x.real, x.imag) if isinstance(x, Complex) else (x,)
    real, imag = Fourier(axis, n, n, inverse, factor(n, norm, inverse))(*given)
    return Complex(real, imag)


def from_real(label: str, x: Any, n: Any, axis: int, norm: str | None, inverse: bool) -> Complex:
    if isinstance(x, Complex):
        raise TypeError(f"[{label}] expects real numbers, got complex ones.")
    n = size_of(label, x, n, axis)
    real, imag = Fourier(axis, n, n // 2 + 1, inverse, factor(n, norm, inverse), half=True)(x)
    return Complex(real, imag)


def to_real(label: str, x: Any, n: Any, axis: int, norm: str | None, inverse: bool) -> Tensor:
    n = size_of(label, x, 2 * (size_of(label, x, None, axis) - 1) if n is None else n, axis)
    real, imag = (x.real, x.imag) if isinstance(x, Complex) else (x, full_like(x, 0))
    return FourierToReal(axis, n, n, inverse, factor(n, norm, inverse))(real, imag)


def fft(x: Any, n: Any = None, axis: int = -1, norm: str | None = None) -> Complex:
    """The discrete Fourier transform of n numbers along an axis, cut or filled up with zeros to n."""
    return complex_to_complex("fft", x, n, axis, norm, False)


def ifft(x: Any, n: Any = None, axis: int = -1, norm: str | None = None) -> Complex:
    """The inverse of `fft`."""
    return complex_to_complex("ifft", x, n, axis, norm, True)


def rfft(x: Tensor, n: Any = None, axis: int = -1, norm: str | None = None) -> Complex:
    """The first n // 2 + 1 frequencies of n real numbers along an axis; the others are their conjugates."""
    return from_real("rfft", x, n, axis, norm, False)


def irfft(x: Any, n: Any = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of `rfft`; n is even unless it is given."""
    return to_real("irfft", x, n, axis, norm, True)


def hfft(x: Any, n: Any = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The transform, which is real, along an axis of numbers whose second half are the conjugates of the first."""
    return to_real("hfft", x, n, axis, norm, False)


def ihfft(x: Tensor, n: Any = None, axis: int = -1, norm: str | None = None) -> Complex:
    """The inverse of `hfft`."""
    return from_real("ihfft", x, n, axis, norm, True)


# -- several axes --------------------------------------------------------------------------------------------------------


def sizes_and_axes(label: str, x: Any, s: Any, axes: Any) -> list[tuple[Any, int]]:
    """(n, axis) of each transform; n is None for the size that there is."""
    s = (s,) if isinstance(s, int) else s
    axes = (axes,) if isinstance(axes, int) else axes
    if axes is None:
        axes = range(x.ndim) if s is None else range(-len(s), 0)
    axes = tuple(axes)
    s = (None,) * len(axes) if s is None else tuple(None if isinstance(n, int) and n == -1 else n for n in s)
    if len(s) != len(axes):
        raise ValueError(f"[{label}] expects as many sizes as axes, got {len(s)} and {len(axes)}.")
    if len(set(axes)) < len(axes) or (min(axes, default=0) < 0 <= max(axes, default=-1) and twice(x, axes)):
        raise ValueError(f"[{label}] expects different axes, got {axes}.")
    return list(zip(s, axes, strict=True))


def twice(x: Any, axes: Sequence[int]) -> bool:
    return len({a % x.ndim for a in axes}) < len(axes)


def each(x: Any, pairs: Sequence[tuple[Any, int]], label: str, norm: str | None, inverse: bool) -> Any:
    """Complex, without any axis to transform, too."""
    if not pairs and not isinstance(x, Complex):
        x = cast(x, float_dtype(x.dtype))
        return Complex(x, full_like(x, 0))
    for n, axis in reversed(pairs):
        x = complex_to_complex(label, x, n, axis, norm, inverse)
    return x


def last(label: str, pairs: list[tuple[Any, int]]) -> tuple[Any, int]:
    if not pairs:
        raise ValueError(f"[{label}] expects at least one axis, got none.")
    return pairs[-1]


def fftn(x: Any, s: Any = None, axes: Any = None, norm: str | None = None) -> Any:
    """`fft` along several axes, by default all or, with sizes, the last ones."""
    return each(x, sizes_and_axes("fftn", x, s, axes), "fftn", norm, False)


def ifftn(x: Any, s: Any = None, axes: Any = None, norm: str | None = None) -> Any:
    """The inverse of `fftn`. As torch.fft.ifftn."""
    return each(x, sizes_and_axes("ifftn", x, s, axes), "ifftn", norm, True)


def rfftn(x: Tensor, s: Any = None, axes: Any = None, norm: str | None = None) -> Complex:
    """`rfft` along the last axis, then `fft` along the others."""
    pairs = sizes_and_axes("rfftn", x, s, axes)
    return each(from_real("rfftn", x, *last("rfftn", pairs), norm, False), pairs[:-1], "rfftn", norm, False)


def irfftn(x: Any, s: Any = None, axes: Any = None, norm: str | None = None) -> Tensor:
    """The inverse of `rfftn`: real, with an even last size unless `s` says another. As torch.fft.irfftn."""
    pairs = sizes_and_axes("irfftn", x, s, axes)
    n, axis = last("irfftn", pairs)
    return to_real("irfftn", each(x, pairs[:-1], "irfftn", norm, True), n, axis, norm, True)


def hfftn(x: Any, s: Any = None, axes: Any = None, norm: str | None = None) -> Tensor:
    """`hfft` along the last of `axes` after `fft` along the others: real. As torch.fft.hfftn."""
    pairs = sizes_and_axes("hfftn", x, s, axes)
    n, axis = last("hfftn", pairs)
    return to_real("hfftn", each(x, pairs[:-1], "hfftn", norm, False), n, axis, norm, False)


def ihfftn(x: Tensor, s: Any = None, axes: Any = None, norm: str | None = None) -> Complex:
    """The inverse of `hfftn`, of real numbers. As torch.fft.ihfftn."""
    pairs = sizes_and_axes("ihfftn", x, s, axes)
    return each(from_real("ihfftn", x, *last("ihfftn", pairs), norm, True), pairs[:-1], "ihfftn", norm, True)


def fft2(x: Any, s: Any = None, axes: Any = PLANE, norm: str | None = None) -> Any:
    """`fftn` along two axes, the last ones by default. As torch.fft.fft2."""
    return fftn(x, s, axes, norm)


def ifft2(x: Any, s: Any = None, axes: Any = PLANE, norm: str | None = None) -> Any:
    """`ifftn` along two axes, the last ones by default. As torch.fft.ifft2."""
    return ifftn(x, s, axes, norm)


def rfft2(x: Tensor, s: Any = None, axes: Any = PLANE, norm: str | None = None) -> Complex:
    """`rfftn` along two axes, the last ones by default: (..., H, W) real to (..., H, W // 2 + 1) complex. As torch.fft.rfft2."""
    return rfftn(x, s, axes, norm)


def irfft2(x: Any, s: Any = None, axes: Any = PLANE, norm: str | None = None) -> Tensor:
    """`irfftn` along two axes, the last ones by default. As torch.fft.irfft2."""
    return irfftn(x, s, axes, norm)


def hfft2(x: Any, s: Any = None, axes: Any = PLANE, norm: str | None = None) -> Tensor:
    """`hfftn` along two axes, the last ones by default. As torch.fft.hfft2."""
    return hfftn(x, s, axes, norm)


def ihfft2(x: Tensor, s: Any = None, axes: Any = PLANE, norm: str | None = None) -> Complex:
    """`ihfftn` along two axes, the last ones by default. As torch.fft.ihfft2."""
    return ihfftn(x, s, axes, norm)


# -- frequencies ---------------------------------------------------------------------------------------------------------


def shifted(x: Any, axes: Any, shift: Any) -> Any:
    axes = tuple(range(x.ndim)) if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
    move = lambda part: roll(part, tuple(shift(part.shape[a]) for a in axes), axes)  # noqa: E731
    return complex_map(move, x) if isinstance(x, Complex) else move(x)


def fftshift(x: Any, axes: Any = None) -> Any:
    """Frequency 0 to the middle."""
    return shifted(x, axes, lambda n: n // 2)


def ifftshift(x: Any, axes: Any = None) -> Any:
    """Undoes `fftshift`: the middle to frequency 0, along `axes` or all. As torch.fft.ifftshift."""
    return shifted(x, axes, lambda n: (n + 1) // 2)


def fftfreq(like: Tensor, n: Any, d: float = 1.0, dtype: str = "float32") -> Tensor:
    """Frequencies of `fft` in cycles per unit, the samples d apart, on the device of `like`."""
    half = n // 2
    return (remainder(arange_like(like, 0, n, 1, dtype) + half, n) - half) / (n * d)


def rfftfreq(like: Tensor, n: Any, d: float = 1.0, dtype: str = "float32") -> Tensor:
    """Frequencies of `rfft` in cycles per unit, (n // 2 + 1,), the samples d apart, on the device of `like`. As
    torch.fft.rfftfreq.
    """
    return arange_like(like, 0, n // 2 + 1, 1, dtype) / (n * d)
