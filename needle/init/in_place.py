"""torch's initialisers, by its names: each fills a tensor, and returns it. Numbers come from numpy's global legacy stream.

Weights are (out, in, *kernel), torch's layout, as those of converted models; layout="needle": (*kernel, in, out), the course's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Tensor

from .drawing import DRAWING, _held

__all__ = [
    "calculate_gain",
    "constant_",
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]


def filled(
    label: str,
    tensor: Tensor,
    make: Callable[[tuple[int, ...]], np.ndarray],
    ndims: range | None = None,
    layout: str = "torch",
) -> Tensor:
    """The tensor with what `make` gives for its shape in torch's layout. ndims: how many axes it may have."""
    if not isinstance(tensor, Tensor) or tensor.op is not None:
        got = type(tensor).__name__ if not isinstance(tensor, Tensor) else "the result of an op"
        raise TypeError(f"[{label}] expects a parameter or another tensor of its own, got {got}.")
    if layout not in ("torch", "needle"):
        raise ValueError(f"[{label}] layout expects torch or needle, got {layout!r}.")
    n = len(tensor.shape)
    if ndims is not None and n not in ndims:
        most = "" if len(ndims) == 1 else " or more" if ndims.stop > 9 else f" to {ndims.stop - 1}"
        raise ValueError(f"[{label}] expects {ndims.start}{most} axes, got shape {tuple(tensor.shape)}.")
    if DRAWING.off:
        return tensor
    axes = (n - 1, n - 2, *range(n - 2)) if layout == "needle" else tuple(range(n))
    array = _held(label, np.asarray(make(tuple(tensor.shape[i] for i in axes))), tensor.dtype)
    tensor.data = Tensor(
        np.ascontiguousarray(array.transpose(np.argsort(axes))),
        device=tensor.device,
        dtype=tensor.dtype,
        requires_grad=False,
    )
    return tensor


MATRIX, WEIGHT = range(2, 3), range(2, 99)


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Uniform in [a, b)."""
    return filled("uniform_", tensor, lambda shape: np.random.rand(*shape) * (b - a) + a)


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normal numbers of this mean and standard deviation."""
    return filled("normal_", tensor, lambda shape: np.random.randn(*shape) * std + mean)


def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
    """Normal numbers, those outside of [a, b] drawn anew."""
    if not (a < b and std > 0):
        raise ValueError(f"[trunc_normal_] expects a below b and std above 0, got {a}, {b} and {std}.")

    def make(shape: tuple[int, ...]) -> np.ndarray:
        drawn = truncated(math.prod(shape), (a - mean) / std, (b - mean) / std)
        return np.clip(drawn.reshape(shape) * std + mean, a, b)

    return filled("trunc_normal_", tensor, make)


def truncated(count: int, low: float, high: float) -> np.ndarray:
    """So many standard normal numbers in [low, high], by rejection: of normal ones in wide windows, of uniform ones in others."""
    nearest = min(max(low, 0.0), high)  # to the peak; what lies 9 further has less than 1e-17 of its density
    low, high = max(low, nearest - 9), min(high, nearest + 9)
    wide = low <= 0 <= high and high - low > 2.5
    kept: list[np.ndarray] = []
    while (left := count - sum(map(len, kept))) > 0:
        if wide:
            x = np.random.randn(2 * left)
            x = x[(low <= x) & (x <= high)]
        else:
            x = np.random.rand(4 * left) * (high - low) + low
            x = x[np.random.rand(len(x)) < np.exp((nearest**2 - x * x) / 2)]
        kept.append(x[:left])
    return np.concatenate(kept) if kept else np.empty(0)


def constant_(tensor: Tensor, val: float) -> Tensor:
    """`val` everywhere."""
    return filled("constant_", tensor, lambda shape: np.full(shape, val))


def ones_(tensor: Tensor) -> Tensor:
    """1 everywhere."""
    return filled("ones_", tensor, np.ones)


def zeros_(tensor: Tensor) -> Tensor:
    """0 everywhere."""
    return filled("zeros_", tensor, np.zeros)


def eye_(tensor: Tensor) -> Tensor:
    """Ones on the diagonal of a matrix, zeros elsewhere."""
    return filled("eye_", tensor, lambda shape: np.eye(shape[0], shape[1]), MATRIX)


def dirac_(tensor: Tensor, groups: int = 1, *, layout: str = "torch") -> Tensor:
    """The weight of a convolution that leaves images, of as many channels as there are in each group, as they are."""

    def make(shape: tuple[int, ...]) -> np.ndarray:
        if shape[0] % groups:
            raise ValueError(f"[dirac_] groups expects to divide {shape[0]} output channels, got {groups}.")
        array, each = np.zeros(shape), shape[0] // groups
        middle = tuple(size // 2 for size in shape[2:])
        for group in range(groups):
            for channel in range(min(each, shape[1])):
                array[(group * each + channel, channel, *middle)] = 1
        return array

    return filled("dirac_", tensor, make, range(3, 6), layout)


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many numbers make one of the results, and how many results one of the numbers goes into."""
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


GAINS = {"tanh": 5 / 3, "relu": math.sqrt(2), "selu": 0.75}
PLAIN = ("linear", "sigmoid", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """What a non-linearity asks weights to be multiplied by. param: the slope of leaky_relu, 0.01 unless given."""
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in (*GAINS, *PLAIN):
        known = ", ".join((*GAINS, "leaky_relu", *PLAIN))
        raise ValueError(f"[calculate_gain] nonlinearity expects one of {known}, got {nonlinearity!r}.")
    return GAINS.get(nonlinearity, 1.0)


def scaled(label: str, tensor: Tensor, std: Callable[[int, int], float], uniform: bool, layout: str) -> Tensor:
    """Numbers of mean zero and the deviation that the fans in and out ask for."""

    def make(shape: tuple[int, ...]) -> np.ndarray:
        scale = std(*fans(shape))
        return (np.random.rand(*shape) * 2 - 1) * (math.sqrt(3) * scale) if uniform else np.random.randn(*shape) * scale

    return filled(label, tensor, make, WEIGHT, layout)


def xavier(gain: float) -> Callable[[int, int], float]:
    return lambda fan_in, fan_out: gain * math.sqrt(2 / max(fan_in + fan_out, 1))


def kaiming(label: str, a: float, mode: str, nonlinearity: str) -> Callable[[int, int], float]:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"[{label}] mode expects fan_in or fan_out, got {mode!r}.")
    gain = calculate_gain(nonlinearity, a)
    return lambda fan_in, fan_out: gain / math.sqrt(max(fan_in if mode == "fan_in" else fan_out, 1))


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, *, layout: str = "torch") -> Tensor:
    """Uniform in +-gain sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""
    return scaled("xavier_uniform_", tensor, xavier(gain), True, layout)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, *, layout: str = "torch") -> Tensor:
    """Normal with standard deviation gain sqrt(2 / (fan_in + fan_out))."""
    return scaled("xavier_normal_", tensor, xavier(gain), False, layout)


def kaiming_uniform_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", *, layout: str = "torch"
) -> Tensor:
    """Uniform in +-gain sqrt(3 / fan) (He et al., 2015). a: the slope of leaky_relu."""
    return scaled("kaiming_uniform_", tensor, kaiming("kaiming_uniform_", a, mode, nonlinearity), True, layout)


def kaiming_normal_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", *, layout: str = "torch"
) -> Tensor:
    """Normal with standard deviation gain / sqrt(fan). a: the slope of leaky_relu."""
    return scaled("kaiming_normal_", tensor, kaiming("kaiming_normal_", a, mode, nonlinearity), False, layout)


def orthogonal_(tensor: Tensor, gain: float = 1.0, *, layout: str = "torch") -> Tensor:
    """Rows, or columns where there are fewer, of length `gain` at right angles; all axes but the first make the columns."""

    def make(shape: tuple[int, ...]) -> np.ndarray:
        rows, columns = shape[0], math.prod(shape[1:])
        q, r = np.linalg.qr(np.random.randn(max(rows, columns), min(rows, columns)))
        q = q * np.where(np.diag(r) < 0, -1.0, 1.0)  # else not all of them are equally likely (Mezzadri, 2007)
        return gain * (q if rows >= columns else q.T).reshape(shape)

    return filled("orthogonal_", tensor, make, WEIGHT, layout)


def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01, *, layout: str = "torch") -> Tensor:
    """Normal numbers in a matrix, of which a part `sparsity` of each column is zero (Martens, 2010)."""

    def make(shape: tuple[int, ...]) -> np.ndarray:
        array: Any = np.random.randn(*shape) * std
        for column in range(shape[1]):
            array[np.random.permutation(shape[0])[: math.ceil(sparsity * shape[0])], column] = 0
        return array

    return filled("sparse_", tensor, make, MATRIX, layout)
