"""What op classes share: shape and dtype rules, axes, broadcasting back, gradients through a decomposition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, find_topo_sort, sum_grads
from needle.backend_ndarray import NDArray

FLOATS = ("float16", "bfloat16", "float32", "float64")  # in the order of promotion
SQRT_2, SQRT_2_OVER_PI = math.sqrt(2.0), math.sqrt(2.0 / math.pi)


def promote(a: str, b: str) -> str:
    """dtype of an operation on two dtypes: torch's rule, under which a float wins over every integer."""
    if a == b:
        return a
    if a in FLOATS or b in FLOATS:
        return max((d for d in (a, b) if d in FLOATS), key=FLOATS.index)
    return str(np.promote_types(a, b))


def promote_scalar(dtype: str, scalar: Any) -> str:
    return dtype if dtype in FLOATS or not isinstance(scalar, float) else "float32"


def cast_array(x: Any, dtype: str) -> Any:
    """numpy array or NDArray as `dtype`, itself where it has it already."""
    return x if x.dtype == dtype else x.astype(dtype)


def broadcast_shape(label: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    if all(s == shapes[0] for s in shapes):
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"[{label}] shapes {', '.join(map(str, shapes))} do not broadcast together.") from None


def check_axis(label: str, axis: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= axis < max(len(shape), 1):
        raise ValueError(f"[{label}] axis {axis} is out of range for shape {tuple(shape)}.")
    return axis % max(len(shape), 1)


def check_axes(label: str, axes: int | Sequence[int] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Non-negative axes in ascending order; None means all."""
    if axes is None:
        return tuple(range(len(shape)))
    found = sorted(check_axis(label, a, shape) for a in ((axes,) if isinstance(axes, int) else axes))
    if len(set(found)) != len(found):
        raise ValueError(f"[{label}] axes {axes} name an axis twice.")
    return tuple(found)


def as_axes(axes: Any) -> Any:
    """Axes as an attribute: None, an int or a tuple."""
    return tuple(axes) if isinstance(axes, list | tuple) else axes


def pair(value: Any) -> tuple[Any, Any]:
    """(height, width) from one number or two."""
    if isinstance(value, tuple | list):
        return (value[0], value[-1])
    return (value, value)


def unbroadcast(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`grad` summed over the axes that broadcasting added or stretched."""
    from .reduce import summation
    from .shape import reshape

    if grad.shape == tuple(shape):
        return grad
    lead = len(grad.shape) - len(shape)
    axes = [*range(lead), *(i + lead for i, s in enumerate(shape) if s == 1 and grad.shape[i + lead] != 1)]
    return reshape(summation(grad, tuple(axes)) if axes else grad, tuple(shape))


def as_operand(value: Any, like: Tensor) -> Tensor:
    """A Tensor from a number or array that meets `like` in an op; constant, on the same device."""
    if isinstance(value, Tensor):
        return value
    try:
        dtype = promote_scalar(like.dtype, value) if np.ndim(value) == 0 else None
    except Unsupported:
        dtype = "float32"
    return Tensor(value, device=like.device, dtype=dtype, requires_grad=False)


def vjp(output: Tensor, out_grad: Tensor, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Gradients of `inputs` as differentiable tensors; the walk stops at them and stores nothing in `.grad`."""
    stop = {id(t) for t in inputs}
    grads: dict[int, list[Tensor]] = {id(output): [out_grad]}
    for node in reversed(find_topo_sort([output])):
        if id(node) in stop or id(node) not in grads or node.op is None:
            continue
        total = sum_grads(grads.pop(id(node)))
        for i, g in zip(node.inputs, node.op.gradient_as_tuple(total, node), strict=True):
            if g is not None and i.requires_grad:
                grads.setdefault(id(i), []).append(g)
    return tuple(sum_grads(grads[id(t)]) if id(t) in grads else None for t in inputs)


def gradient_of_decomposition(self: Op, out_grad: Tensor, node: Tensor) -> tuple[Any, ...]:
    """For `gradient = ...` in an op whose gradient is rarely needed: recomputes the op as its decomposition."""
    return vjp(self.decompose(*node.inputs), out_grad, node.inputs)


class Elementwise(Op):
    """Ops that map elements one to one, over operands broadcast together."""

    layout = "any"
    domain: ClassVar[tuple[float, float]] = (-3.0, 3.0)  # where tests draw inputs


class Unary(Elementwise):
    ufunc: ClassVar[Any] = None

    def infer(self, x: Any) -> Any:
        return Spec(x.shape, x.dtype)

    def reference(self, x: np.ndarray) -> Any:
        return None if self.ufunc is None else self.ufunc(x)

    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 33)]), ({}, [()])]


class Binary(Elementwise):
    ufunc: ClassVar[Any] = None

    def infer(self, a: Any, b: Any) -> Any:
        return Spec(broadcast_shape(self.label, a.shape, b.shape), promote(a.dtype, b.dtype))

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        dtype = promote(a.dtype, b.dtype)
        return cast_array(a, dtype).ewise(self.kernel, cast_array(b, dtype))

    def reference(self, a: np.ndarray, b: np.ndarray) -> Any:
        dtype = promote(str(a.dtype), str(b.dtype))
        return self.ufunc(cast_array(a, dtype), cast_array(b, dtype))

    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 33), (4, 33)]), ({}, [(2, 1, 5), (3, 1)])]


class ScalarOp(Unary):
    """An array with one number, attribute `scalar`."""

    scalar: Any

    def infer(self, x: Any) -> Any:
        return Spec(x.shape, promote_scalar(x.dtype, self.scalar))

    def compute(self, x: NDArray) -> NDArray:
        return cast_array(x, promote_scalar(x.dtype, self.scalar)).ewise(self.kernel, attrs=(float(self.scalar),))

    def reference(self, x: np.ndarray) -> Any:
        return self.ufunc(cast_array(x, promote_scalar(str(x.dtype), self.scalar)), self.scalar)

    @classmethod
    def samples(cls) -> list:
        return [({"scalar": 1.7}, [(4, 33)])]


class UnaryGrad(Elementwise):
    """Gradient kernel of an activation, op(x or y, dy). Defined by `decompose`, so that it can be differentiated again."""

    gradient = gradient_of_decomposition

    def infer(self, x: Any, dy: Any) -> Any:
        return Spec(broadcast_shape(self.label, x.shape, dy.shape), dy.dtype)

    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 33), (4, 33)])]
