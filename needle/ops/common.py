"""What op classes share: shape rules, axes, broadcasting back, gradients through a decomposition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, vjp
from needle.backend_ndarray import NDArray, dtype_name, promote_scalar
from needle.backend_ndarray.kernels import call_map, kernel_dtype
from needle.backend_ndarray.sizes import has_sizes
from needle.backend_ndarray.strides import broadcast_shapes
from needle.op import kind_of
from needle.ops.dtypes import cast_array, real_dtype, result_dtype
from needle.ops.families import family, samples_of


def rows_of(x: Any) -> Any:
    """An array (..., K) as (M, K), without copying where that can be; K may be 0, from which -1 could not be told."""
    return x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))


def broadcast_shape(label: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    if all(s == shapes[0] for s in shapes):
        return shapes[0]
    try:
        return broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"[{label}] shapes {', '.join(map(str, shapes))} do not broadcast together.") from None


def check_axis(label: str, axis: int, shape: Sequence[int]) -> int:
    if not -max(len(shape), 1) <= axis < max(len(shape), 1):
        raise ValueError(f"[{label}] axis {axis} is out of range for shape {tuple(shape)}.")
    return axis % max(len(shape), 1)


@lru_cache(maxsize=1024)
def _normal_axes(axes: tuple[int, ...], ndim: int) -> tuple[int, ...] | None:
    """`axes` in ascending order, none negative; None where one is out of range or there twice."""
    found = sorted({a % max(ndim, 1) for a in axes})
    return tuple(found) if len(found) == len(axes) and all(-max(ndim, 1) <= a < max(ndim, 1) for a in axes) else None


def with_axis(x: Any) -> Any:
    """x, or where it has no axes x as (1,): what runs along an axis takes numbers, too."""
    return x if x.shape else x.reshape((1,))


def check_filled(label: str, x: Any, axes: Sequence[int]) -> None:
    """Raises where nothing is left to choose from along the axes."""
    if x.shape and not all(x.shape[a] for a in axes):
        raise ValueError(
            f"[{label}] expects at least one element along axes {tuple(axes)}, got shape {tuple(x.shape)}."
        )


def check_axes(label: str, axes: int | Sequence[int] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Non-negative axes in ascending order; None means all."""
    if axes is None:
        return tuple(range(len(shape)))
    wanted = (axes,) if isinstance(axes, int) else tuple(axes)
    normal = _normal_axes(wanted, len(shape))
    if normal is None:
        for a in wanted:
            check_axis(label, a, shape)
        raise ValueError(f"[{label}] axes {axes} name an axis twice.")
    return normal


def reduced_shape(shape: Sequence[int], axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    """`shape` with size 1 at the axes, or without them."""
    return tuple([1 if d in axes else s for d, s in enumerate(shape) if keepdims or d not in axes])


def as_axes(axes: Any) -> Any:
    """Axes as an attribute: None, an int or a tuple."""
    return tuple(axes) if isinstance(axes, list | tuple) else axes


def unbroadcast(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`grad` summed over the axes that broadcasting added or stretched."""
    if grad.shape == tuple(shape):
        return grad
    lead = len(grad.shape) - len(shape)
    axes = [*range(lead), *(i + lead for i, s in enumerate(shape) if s == 1 and grad.shape[i + lead] != 1)]
    return (grad.sum(tuple(axes)) if axes else grad).reshape(tuple(shape))


def constant(values: Any, like: Tensor, dtype: str | None = None) -> Tensor:
    """A tensor of `dtype`, by default that of `like`, on the device of `like`, without a gradient."""
    return Tensor(values, device=like.device, dtype=dtype or like.dtype, requires_grad=False)


def as_operand(value: Any, like: Tensor) -> Tensor:
    """A Tensor from a number or array that meets `like` in an op; constant, on the same device."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(like, Tensor):
        raise TypeError(f"[ops] an operand expects a needle Tensor, got {kind_of(like)}.")
    if hasattr(value, "__dlpack__"):
        return Tensor(value, device=like.device, requires_grad=False)
    try:
        dtype = promote_scalar(like.dtype, value) if has_sizes(value) or np.ndim(value) == 0 else None
        known = not has_sizes(value)
    except Unsupported:  # until the graph runs
        known = False
    if not known:
        from .shape.creation import Number

        return Number(value)(like)
    return Tensor(value, device=like.device, dtype=dtype, requires_grad=False)


def alias(t: Tensor) -> Tensor:
    """The same values as another node, so that one tensor in two places has two gradients."""
    return t * 1.0


def gradient_of_decomposition(self: Op, out_grad: Tensor, node: Tensor) -> tuple[Any, ...]:
    """For `gradient = ...` in an op whose gradient is rarely needed: recomputes the op as its decomposition."""
    inputs = [alias(t) if t.requires_grad else t for t in node.inputs]
    return vjp(self.decompose(*inputs), out_grad, inputs)


class Layer(Op):
    """Ops of x, weight and optionally bias (of any shape with a value per output channel), whose kernels finish with an
    activation.
    """

    channel_axis: ClassVar[Any]  # of the weight: its output channels
    compute_infers = True

    def is_weight(self, index: int) -> bool:
        return index > 0

    def finished(self, activation: str, alpha: float, *arrays: Any) -> NDArray:
        """activation(layer(x, weight, bias))."""
        out = NDArray.empty(*self.infer(*arrays))
        self.into(out, *arrays, activation=activation, alpha=alpha)  # type: ignore[call-arg]
        return out

    def compute(self, *arrays: NDArray) -> Any:
        return self.finished("none", 0.0, *arrays)

    def takes_norm(self, out: Any) -> bool:
        """Whether a batch norm after it, which is over axis 1, is over its channels."""
        return True


class Elementwise(Op):
    """Ops that map elements one to one, over operands broadcast together. `kernel` takes the op's attributes in their order."""

    mixes_floats = True
    domain: ClassVar[tuple[float, float]] = (-3.0, 3.0)  # where tests draw inputs
    ufunc: ClassVar[Any] = None  # the op in numpy
    result: ClassVar[str] = ""  # dtype of the result, where it is not that of the operands

    compute_infers = True

    @classmethod
    def has_kernel(cls) -> bool:
        return cls.kernel is not None

    def operand_dtype(self, *inputs: Any) -> str:
        """dtype of the result, to which every input is cast: floats where the kernel is for real numbers."""
        dtype = dtype_name(inputs[0].dtype)
        for x in inputs[1:]:
            if x.dtype != dtype:
                dtype = result_dtype(*inputs)
                break
        return dtype if dtype == "float32" else real_dtype(self.kernel, dtype)

    def infer(self, *inputs: Any) -> Any:
        shape = tuple(inputs[0].shape)
        for x in inputs[1:]:
            if x.shape != shape:
                shape = broadcast_shape(self.label, shape, tuple(x.shape))
        return Spec(shape, self.result or self.operand_dtype(*inputs))

    def sources(self, axis: int, out: Any, *inputs: Any) -> list[int | None] | None:
        places = [(axis - len(out.shape) + len(x.shape), x.shape) for x in inputs]
        return [at if at >= 0 and shape[at] == out.shape[axis] else None for at, shape in places]

    def row(self) -> tuple[Any, Iterable[float]]:
        """The kernel and its attributes."""
        return self.kernel, vars(self).values()

    def compute(self, *arrays: NDArray) -> Any:
        if self.kernel is None:
            return None
        if type(self).into is Elementwise.into:
            name, attrs = self.row()
            dtype = self.operand_dtype(*arrays)
            return arrays[0].ewise(name, arrays[1:], attrs, dtype, self.result or dtype)
        out = NDArray.empty(*self.infer(*arrays))
        self.into(out, *arrays)
        return out

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        name, attrs = self.row()
        shape, dtype = out.shape, kernel_dtype(name, self.operand_dtype(*inputs))
        call_map(name, out, [x.fitted(shape, dtype) for x in inputs], attrs)

    def reference(self, *arrays: np.ndarray) -> Any:
        dtype = self.operand_dtype(*arrays)
        return self.formula(*(cast_array(x, dtype) for x in arrays))

    def formula(self, *arrays: np.ndarray) -> Any:
        """The op in numpy, on arrays of one dtype."""
        return self.ufunc(*arrays, *vars(self).values()) if self.ufunc is not None else None


class Unary(Elementwise):
    samples = samples_of(({}, [(4, 33)]), ({}, [()]))


class Binary(Elementwise):
    samples = samples_of(({}, [(4, 33), (4, 33)]), ({}, [(2, 1, 5), (3, 1)]))


@family
class ScalarOp(Elementwise):
    """An array with one number."""

    scalar: Any

    def operand_dtype(self, *inputs: Any) -> str:
        dtype = promote_scalar(dtype_name(inputs[0].dtype), self.scalar)
        return dtype if dtype == "float32" else real_dtype(self.kernel, dtype)

    def formula(self, *arrays: np.ndarray) -> Any:
        return self.ufunc(arrays[0], np.asarray(self.scalar, arrays[0].dtype))

    samples = samples_of(({"scalar": 1.7}, [(4, 33)]))
