"""Rules of torch.fft, stft and istft, of real and of complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported
from needle.complex_numbers import Complex

from .arithmetic import dtype_name
from .complex_numbers import either
from .registry import COMPLEX_RULES, FUNCTION_RULES, rule
from .tables import functions

T, aten = torch.Tensor, torch.ops.aten


def transforms(signature: str, *names: str) -> None:
    """torch's function of each name is needle's of that name."""
    for name in names:
        target, f = getattr(torch.fft, name), getattr(ops, name)
        functions(signature, {(target,): f})
        COMPLEX_RULES[target] = FUNCTION_RULES[target]


transforms("input, n=None, dim=-1, norm=None", "fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
transforms("input, s=None, dim=(-2, -1), norm=None", "fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2")
transforms("input, s=None, dim=None, norm=None", "fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn")
transforms("input, dim=None", "fftshift", "ifftshift")


def frequencies(f: Callable) -> Callable:
    def convert(n: Any, d: Any = 1.0, *, dtype: Any = None, like: Any, **_: Any) -> Any:
        return f(like, n, d, dtype_name(dtype or torch.get_default_dtype()))

    return convert


rule(torch.fft.fftfreq)(frequencies(ops.fftfreq))
rule(torch.fft.rfftfreq)(frequencies(ops.rfftfreq))


@either(torch.stft, T.stft, aten.stft.center)
def stft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    if align_to_window is not None:
        raise Unsupported("align_to_window is not supported")
    if return_complex is None and not isinstance(input, Complex) and not isinstance(window, Complex):
        raise Unsupported("stft of real numbers expects return_complex=True or False, as torch does")
    whole = return_complex is not False
    return ops.stft(input, n_fft, hop_length, win_length, window, center, pad_mode, normalized, onesided, whole)


@either(aten.stft.default)
def stft_of_frames(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    return stft(
        *(input, n_fft, hop_length, win_length, window, False, "reflect", normalized, onesided, return_complex),
        align_to_window,
    )


@either(torch.istft, T.istft)
def istft(
    input: Any,
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
    if isinstance(input, Tensor):
        raise Unsupported("istft expects complex numbers")
    return ops.istft(input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex)
