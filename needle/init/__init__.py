"""Tensors filled with constants or random numbers. Random ones draw from numpy's global legacy stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import Device, NDArray, cpu_numpy
from needle.backend_selection import default_device

from .drawing import DRAWING, _held, manual_seed, no_drawing
from .in_place import *


def _hollow(value: float, shape: Sequence[int], device: Device | None, dtype: str, requires_grad: bool) -> Tensor:
    one, device = np.asarray(value).astype(dtype), device or default_device()
    on_numpy = device == cpu_numpy()
    data = np.broadcast_to(one, shape) if on_numpy else NDArray(one, device, dtype).broadcast_to(shape)
    return Tensor.make_const(data, requires_grad=requires_grad)


def _tensor(array: Any, device: Device | None, dtype: str, requires_grad: bool) -> Tensor:
    return Tensor(_held("init", np.asarray(array), dtype), device=device, dtype=dtype, requires_grad=requires_grad)


def rand(
    *shape: int,
    low: float = 0.0,
    high: float = 1.0,
    device: Device | None = None,
    dtype: str = "float32",
    requires_grad: bool = False,
) -> Tensor:
    """Uniform in [low, high)."""
    if DRAWING.off:
        return _hollow(math.nan, shape, device, dtype, requires_grad)
    return _tensor(np.random.rand(*shape) * (high - low) + low, device, dtype, requires_grad)


def randn(
    *shape: int,
    mean: float = 0.0,
    std: float = 1.0,
    device: Device | None = None,
    dtype: str = "float32",
    requires_grad: bool = False,
) -> Tensor:
    """Normal with the given mean and standard deviation."""
    if DRAWING.off:
        return _hollow(math.nan, shape, device, dtype, requires_grad)
    return _tensor(np.random.randn(*shape) * std + mean, device, dtype, requires_grad)


def randb(
    *shape: int, p: float = 0.5, device: Device | None = None, dtype: str = "bool", requires_grad: bool = False
) -> Tensor:
    """True with probability p."""
    return _tensor(np.random.rand(*shape) <= p, device, dtype, requires_grad)


def constant(
    *shape: int, c: float = 1.0, device: Device | None = None, dtype: str = "float32", requires_grad: bool = False
) -> Tensor:
    """`c` everywhere, in any shape and dtype."""
    if DRAWING.off:
        return _hollow(c, shape, device, dtype, requires_grad)
    return _tensor(np.full(shape, c), device, dtype, requires_grad)


def ones(*shape: int, device: Device | None = None, dtype: str = "float32", requires_grad: bool = False) -> Tensor:
    """1 everywhere, in any shape and dtype."""
    return constant(*shape, c=1.0, device=device, dtype=dtype, requires_grad=requires_grad)


def zeros(*shape: int, device: Device | None = None, dtype: str = "float32", requires_grad: bool = False) -> Tensor:
    """0 everywhere, in any shape and dtype."""
    return constant(*shape, c=0.0, device=device, dtype=dtype, requires_grad=requires_grad)


def ones_like(t: Tensor, *, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """1 everywhere, in the shape and dtype of `t`, by default on its device."""
    return ones(*t.shape, device=device or t.device, dtype=t.dtype, requires_grad=requires_grad)


def zeros_like(t: Tensor, *, device: Device | None = None, requires_grad: bool = False) -> Tensor:
    """0 everywhere, in the shape and dtype of `t`, by default on its device."""
    return zeros(*t.shape, device=device or t.device, dtype=t.dtype, requires_grad=requires_grad)


def one_hot(
    n: int, i: Tensor, device: Device | None = None, dtype: str = "float32", requires_grad: bool = False
) -> Tensor:
    """Rows of the n x n identity, one per entry of `i`."""
    numbers = i.numpy().astype("int64")
    if numbers.size and (numbers.min() < 0 or numbers.max() >= n):
        raise IndexError(f"[one_hot] expects numbers in [0, {n}), got {numbers.min()} to {numbers.max()}.")
    return _tensor(np.eye(n)[numbers], device or i.device, dtype, requires_grad)


def _uniform(bound: float, shape: Sequence[int], **kwargs: Any) -> Tensor:
    return rand(*shape, low=-bound, high=bound, **kwargs)


def xavier_uniform(
    fan_in: int, fan_out: int, gain: float = 1.0, shape: Sequence[int] | None = None, **kwargs: Any
) -> Tensor:
    """Uniform in +-gain sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""
    return _uniform(gain * math.sqrt(6 / max(fan_in + fan_out, 1)), shape or (fan_in, fan_out), **kwargs)


def xavier_normal(
    fan_in: int, fan_out: int, gain: float = 1.0, shape: Sequence[int] | None = None, **kwargs: Any
) -> Tensor:
    """Normal with standard deviation gain sqrt(2 / (fan_in + fan_out))."""
    return randn(*(shape or (fan_in, fan_out)), std=gain * math.sqrt(2 / max(fan_in + fan_out, 1)), **kwargs)


def _relu_gain(nonlinearity: str) -> float:
    if nonlinearity != "relu":
        raise ValueError(f"[kaiming] nonlinearity expects relu, got {nonlinearity}.")
    return math.sqrt(2.0)


def kaiming_uniform(
    fan_in: int, fan_out: int, shape: Sequence[int] | None = None, nonlinearity: str = "relu", **kwargs: Any
) -> Tensor:
    """Uniform in +-sqrt(2) sqrt(3 / fan_in) (He et al., 2015); with `shape` the bound still uses fan_in."""
    return _uniform(_relu_gain(nonlinearity) * math.sqrt(3 / max(fan_in, 1)), shape or (fan_in, fan_out), **kwargs)


def kaiming_normal(
    fan_in: int, fan_out: int, shape: Sequence[int] | None = None, nonlinearity: str = "relu", **kwargs: Any
) -> Tensor:
    """Normal with standard deviation sqrt(2 / fan_in)."""
    return randn(*(shape or (fan_in, fan_out)), std=_relu_gain(nonlinearity) / math.sqrt(max(fan_in, 1)), **kwargs)
