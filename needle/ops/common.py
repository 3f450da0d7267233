"""What op classes share: shape and dtype rules, axes, broadcasting back, gradients through a decomposition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, find_topo_sort, sum_grads
from needle.backend_ndarray import NDArray, call

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
    """Ops that map elements one to one, over operands broadcast together. `kernel` takes the op's attributes in their order."""

    layout = "any"
    domain: ClassVar[tuple[float, float]] = (-3.0, 3.0)  # where tests draw inputs
    ufunc: ClassVar[Any] = None  # the op in numpy

    @classmethod
    def has_kernel(cls) -> bool:
        return cls.kernel is not None

    def operand_dtype(self, *inputs: Any) -> str:
        """dtype that the kernel computes in: every input is cast to it."""
        dtype = inputs[0].dtype
        for x in inputs[1:]:
            dtype = promote(dtype, x.dtype)
        return str(dtype)

    def infer(self, *inputs: Any) -> Any:
        return Spec(broadcast_shape(self.label, *(x.shape for x in inputs)), self.operand_dtype(*inputs))

    def compute(self, *arrays: NDArray) -> Any:
        if self.kernel is None:
            return None
        out = NDArray.empty(*self.infer(*arrays))
        self.lower(None, list(arrays), out)
        return out

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        dtype = self.operand_dtype(*inputs)
        ins = [cast_array(x, dtype) for x in inputs]
        ins = [x if x.shape == out.shape else x.broadcast_to(out.shape) for x in ins]
        call(str(self.kernel), [out], ins, *(float(v) for v in self.attributes().values()))

    def reference(self, *arrays: np.ndarray) -> Any:
        if self.ufunc is None:
            return None
        dtype = self.operand_dtype(*arrays)
        return self.ufunc(*(cast_array(x, dtype) for x in arrays), *self.attributes().values())


class Unary(Elementwise):
    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 33)]), ({}, [()])]


class Binary(Elementwise):
    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 33), (4, 33)]), ({}, [(2, 1, 5), (3, 1)])]


class ScalarOp(Elementwise):
    """An array with one number, attribute `scalar`."""

    def operand_dtype(self, x: Any) -> str:
        return promote_scalar(str(x.dtype), self.attributes()["scalar"])

    @classmethod
    def samples(cls) -> list:
        return [({"scalar": 1.7}, [(4, 33)])]
