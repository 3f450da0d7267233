"""Complex numbers: two real tensors of one shape and dtype. Graphs, kernels and files hold the parts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

PARTS = {"float32": "complex64", "float64": "complex128"}  # dtype of the parts -> that of the whole
DTYPES = {whole: part for part, whole in PARTS.items()}


class Complex:
    """real + i imag. The parts are Tensors, or what stands for them: symbols, Specs, nodes, arrays.

    It is no Tensor, and ops of real numbers refuse it. Its operators and methods are in needle.ops.fourier. Gradients are those
    of the parts: for a real loss L, dL/dreal + i dL/dimag, torch's convention.
    """

    __slots__ = ("imag", "real")
    __array_priority__ = 1000  # numpy arrays on the left leave the operation to us
    __hash__ = object.__hash__

    def __init__(self, real: Any, imag: Any) -> None:
        self.real, self.imag = real, imag

    shape = property(lambda self: self.real.shape)
    ndim = property(lambda self: self.real.ndim)
    device = property(lambda self: self.real.device)

    @property
    def dtype(self) -> str:
        return PARTS[self.real.dtype]

    def map(self, f: Callable[[Any], Any]) -> Complex:
        """f of both parts."""
        return Complex(f(self.real), f(self.imag))

    def numpy(self) -> np.ndarray:
        return joined(self.real.numpy(), self.imag.numpy())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def detach(self) -> Complex:
        return self.map(lambda x: x.detach())

    def __len__(self) -> int:
        return len(self.real)

    def __bool__(self) -> bool:
        raise TypeError("[complex] a complex number is neither true nor false.")

    def __repr__(self) -> str:
        return f"needle.Complex({self.real!r}, {self.imag!r})"


def joined(real: np.ndarray, imag: np.ndarray) -> np.ndarray:
    out = np.empty(np.shape(real), PARTS[str(real.dtype)])
    out.real, out.imag = real, imag
    return out


def is_complex(x: Any) -> bool:
    """Whether x is a Complex or another library's array of complex numbers."""
    return str(getattr(x, "dtype", "")).rpartition(".")[2].startswith("complex") or isinstance(x, Complex)


def parts(x: Any) -> Complex:
    """The parts of a complex array of any library, over its memory."""
    if isinstance(x, Complex):
        return x
    dtype = str(x.dtype).rpartition(".")[2]
    if dtype not in DTYPES:
        raise TypeError(f"[complex] expects one of {', '.join(DTYPES)}, got {dtype}.")
    x = x.detach() if hasattr(x, "detach") else x
    x = x.resolve_conj() if hasattr(x, "resolve_conj") else x  # torch's, which conjugates when it is read
    return Complex(x.real, x.imag)


__all__ = ["Complex", "is_complex"]
