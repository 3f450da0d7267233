"""Discrete Fourier transforms along one axis as ops on real and imaginary parts; each is the other's gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, NoKernel, call
from needle.ops.common import check_axis, constant
from needle.ops.dtypes import cast_array, float_dtype
from needle.ops.families import family, samples_of
from needle.ops.linalg.basic import matmul
from needle.ops.math.elementwise import cast
from needle.ops.shape.join import make_tuple
from needle.ops.shape.runtime_shape import moveaxis

from .table import plan

MOST = 4096  # longest transform by a matrix
LONGEST = 1 << 40  # factors of lengths beyond memory are not looked for


@family
class Transform(Op):
    """Of length n along `axis`, of which inputs give the first numbers and results have `out`, zeros beyond both.

    inverse: e ** (+2 pi i j k / n) in place of -. scale: a factor of all results. inner: a factor of the frequencies of a real
    transform but 0 and n / 2.
    """

    axis: int
    n: Any
    out: Any
    inverse: bool = False
    scale: Any = 1.0
    inner: float = 1.0

    compute_infers = True

    def spec(self, x: Any) -> Spec:
        if not x.shape:
            raise ValueError("[fft] expects at least one axis, got shape ().")
        if self.n < 1 or self.out < 0:
            raise ValueError(f"[fft] n expects at least 1 and out at least 0, got {self.n} and {self.out}.")
        if self.n > LONGEST:
            raise ValueError(f"[fft] n expects at most {LONGEST}, got {self.n}.")
        axis = check_axis("fft", self.axis, x.shape)
        return Spec((*x.shape[:axis], int(self.out), *x.shape[axis + 1 :]), float_dtype(x.dtype))

    def call(self, kernel: str, outs: list[NDArray], real: bool, named: dict[str, Any]) -> None:
        dtype, axis = outs[0].dtype, self.axis % outs[0].ndim
        made = plan(int(self.n), real, dtype)
        given = {k: x if x is None else x.as_dtype(dtype) if isinstance(x, NDArray) else x for k, x in named.items()}
        numbers = {"n": self.n, "inverse": self.inverse, "scale": self.scale, "inner": self.inner}
        call(kernel, outs, **given, axis=axis, **numbers, table=made.table, core=made.core, m=made.m, m1=made.m1)

    def fitted(self, x: np.ndarray, size: int) -> np.ndarray:
        """x with `size` numbers along the axis."""
        x = np.moveaxis(x, self.axis, -1)[..., :size]
        return np.moveaxis(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]), -1, self.axis)

    def weights(self) -> np.ndarray:
        """`inner` for each of the frequencies 0 ... n / 2."""
        k = np.arange(self.n // 2 + 1)
        return np.where((k == 0) | (2 * k == self.n), 1.0, self.inner)

    def angles(self, rows: int, columns: int) -> np.ndarray:
        if self.n > MOST:
            raise NoKernel(f"[{self.label}] there is no kernel here for more than {MOST} numbers, got {self.n}.")
        return 2 * math.pi * (np.outer(np.arange(rows), np.arange(columns)) % self.n) / self.n

    def by_matrices(self, pairs: list[tuple[Tensor, np.ndarray]]) -> Tensor:
        """The sum of tensors times matrices along the axis; rows and columns beyond what there is are 0 or left out."""
        total: Any = None
        for x, matrix in pairs:
            x = moveaxis(cast(x, float_dtype(x.dtype)), self.axis, -1)
            whole = np.zeros((x.shape[-1], int(self.out)))
            rows, columns = min(matrix.shape[0], x.shape[-1]), min(matrix.shape[1], int(self.out))
            whole[:rows, :columns] = matrix[:rows, :columns] * self.scale
            y = matmul(x, constant(whole, x))
            total = y if total is None else total + y
        return moveaxis(total, -1, self.axis)

    def flops(self, out: Any, *inputs: Any) -> int:
        return round(5 * math.prod(inputs[0].shape) * math.log2(max(int(self.n), 2)))


@op
class Fourier(Transform):
    """(re, im) of the transform of x + iy, or of real x; `half`: of real x its first n // 2 + 1 frequencies."""

    half: bool = False
    n_out = 2

    def infer(self, x: Any, *imag: Any) -> Any:
        if self.half and imag:
            raise ValueError("[fft] half expects real numbers, got imaginary parts.")
        if any(tuple(y.shape) != tuple(x.shape) for y in imag):
            raise ValueError(f"[fft] expects parts of one shape, got {tuple(x.shape)} and {tuple(imag[0].shape)}.")
        return (self.spec(x),) * 2

    def compute(self, x: NDArray, *imag: NDArray) -> Any:
        outs = [NDArray.empty(*spec) for spec in self.infer(x, *imag)]
        im = imag[0] if imag else None
        self.call("fft", outs, not imag, {"re": x, "im": im, "half": self.half})
        return tuple(outs)

    def reference(self, x: np.ndarray, *imag: np.ndarray) -> Any:
        dtype = self.infer(x, *imag)[0].dtype
        z = self.fitted(x + 1j * imag[0] if imag else x, int(self.n))
        y = np.fft.ifft(z, axis=self.axis) * self.n if self.inverse else np.fft.fft(z, axis=self.axis)
        if self.half:
            shape = [1] * x.ndim
            shape[self.axis] = -1
            y = self.fitted(y, self.n // 2 + 1) * self.weights().reshape(shape)
        y = self.fitted(y, int(self.out)) * self.scale
        return cast_array(y.real, dtype), cast_array(y.imag, dtype)

    def decompose(self, x: Tensor, *imag: Tensor) -> Any:
        columns = self.n // 2 + 1 if self.half else self.n
        angles, factor = self.angles(self.n, columns), self.weights() if self.half else 1.0
        c, s = np.cos(angles) * factor, np.sin(angles) * factor * (1 if self.inverse else -1)
        re = self.by_matrices([(x, c), *((y, -s) for y in imag)])
        return make_tuple(re, self.by_matrices([(x, s), *((y, c) for y in imag)]))

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        size = node.inputs[0].shape[self.axis]
        if self.half:
            back = FourierToReal(self.axis, self.n, size, not self.inverse, self.scale, self.inner / 2)
            return back(out_grad[0], out_grad[1])
        parts = Fourier(self.axis, self.n, size, not self.inverse, self.scale)(out_grad[0], out_grad[1])
        return tuple(parts)[: len(node.inputs)]

    samples = samples_of(
        ({"axis": -1, "n": 6, "out": 6}, [(3, 6), (3, 6)]),
        ({"axis": 0, "n": 5, "out": 7, "inverse": True, "scale": 0.2}, [(4, 3), (4, 3)]),
        ({"axis": 1, "n": 17, "out": 17}, [(2, 20, 3)]),
        ({"axis": -1, "n": 8, "out": 5, "half": True, "inner": 2.0}, [(3, 8)]),
        ({"axis": 0, "n": 9, "out": 4, "half": True, "inverse": True}, [(7, 2)]),
    )


@op
class FourierToReal(Transform):
    """The real transform of frequencies (re, im) 0 ... n / 2, of which the others are conjugates; at 0 and n / 2 re counts."""

    def infer(self, re: Any, im: Any) -> Any:
        if tuple(re.shape) != tuple(im.shape):
            raise ValueError(f"[fft] expects parts of one shape, got {tuple(re.shape)} and {tuple(im.shape)}.")
        return self.spec(re)

    def compute(self, re: NDArray, im: NDArray) -> Any:
        out = NDArray.empty(*self.infer(re, im))
        self.call("fft_to_real", [out], True, {"re": re, "im": im})
        return out

    def reference(self, re: np.ndarray, im: np.ndarray) -> Any:
        shape = [1] * re.ndim
        shape[self.axis] = -1
        z = re + 1j * im if self.inverse else re - 1j * im
        z = self.fitted(z, self.n // 2 + 1) * self.weights().reshape(shape)
        y = self.fitted(np.fft.irfft(z, int(self.n), axis=self.axis) * self.n, int(self.out)) * self.scale
        return cast_array(y, self.infer(re, im).dtype)

    def decompose(self, re: Tensor, im: Tensor) -> Any:
        angles = self.angles(self.n // 2 + 1, self.n)
        k = np.arange(self.n // 2 + 1)
        factor = (np.where((k == 0) | (2 * k == self.n), 1.0, 2.0) * self.weights())[:, None]
        sine = np.sin(angles) * ((k > 0) & (2 * k != self.n))[:, None]
        return self.by_matrices([(re, np.cos(angles) * factor), (im, sine * factor * (-1 if self.inverse else 1))])

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        size = node.inputs[0].shape[self.axis]
        back = Fourier(self.axis, self.n, size, not self.inverse, self.scale, 2 * self.inner, half=True)
        return tuple(back(out_grad))

    samples = samples_of(
        ({"axis": -1, "n": 8, "out": 8, "inverse": True, "scale": 0.125}, [(3, 5), (3, 5)]),
        ({"axis": 0, "n": 7, "out": 9, "inner": 0.5}, [(5, 3), (5, 3)]),
    )
