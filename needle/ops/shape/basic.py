"""Ops that only rearrange: reshape, transpose, broadcast, padding, flipping."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.ndarray import resolve_shape
from needle.backend_ndarray.sizes import whole
from needle.ops.common import as_axes, check_axes, check_axis, unbroadcast
from needle.ops.dtypes import check_value
from needle.ops.families import samples_of

__all__ = ["broadcast_to", "flatten", "flip", "permute", "reshape", "squeeze", "transpose", "unsqueeze"]


def as_shape(shape: tuple) -> tuple:
    """A shape given as one sequence or as several numbers."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else tuple(shape)


class View(Op):
    """An op whose result may share memory with x: unless it says more, x in the shape that `infer` finds."""

    is_view = compute_infers = True

    def compute(self, x: NDArray) -> Any:
        return x.viewed(self.infer(x).shape)

    def reference(self, x: np.ndarray) -> Any:
        return x.reshape(self.infer(x).shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return reshape(out_grad, node.inputs[0].shape)


@op
class Reshape(View):
    """The same elements in another shape; one entry of `shape` may be -1."""

    shape: tuple

    def infer(self, x: Any) -> Any:
        return Spec(resolve_shape(self.shape, x.shape), x.dtype)

    def compute(self, x: NDArray) -> Any:
        return x.viewed(self.shape)

    def reference(self, x: np.ndarray) -> Any:
        return x.reshape(self.shape)

    samples = samples_of(({"shape": (5, -1)}, [(4, 10)]), ({"shape": ()}, [(1, 1)]))


@tensor_method("reshape", "view")
def reshape(a: Tensor, *args: Any, shape: Any = None) -> Tensor:
    """a with another shape: reshape(a, (2, -1)), reshape(a, 2, -1) or reshape(a, shape=(2, -1))."""
    return Reshape(as_shape(args) if shape is None else tuple(shape))(a)


view = reshape


def reshaped(a: Tensor, shape: tuple) -> Tensor:
    """a in a shape that it may have already."""
    return a if tuple(a.shape) == tuple(shape) else reshape(a, shape)


@op
class Flatten(View):
    """Axes start_dim to end_dim as one."""

    start_dim: int = 0
    end_dim: int = -1

    def infer(self, x: Any) -> Any:
        axes = x.shape or (1,)  # a 0-d tensor becomes one of an axis
        first, last = check_axis("flatten", self.start_dim, axes), check_axis("flatten", self.end_dim, axes)
        if first > last:
            raise ValueError(f"[flatten] start_dim {self.start_dim} comes after end_dim {self.end_dim}.")
        flat = int(np.prod(x.shape[first : last + 1]))
        return Spec((*x.shape[:first], flat, *x.shape[last + 1 :]), x.dtype)

    samples = samples_of(({"start_dim": 1, "end_dim": -1}, [(2, 3, 4)]), ({}, [(2, 3)]))


@tensor_method()
def flatten(a: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Axes `start_dim` to `end_dim`, the last one included, as one axis: a view where it can be. A 0-d tensor becomes (1,). As
    torch.flatten.
    """
    return Flatten(start_dim, end_dim)(a)


@op
class Permute(View):
    """Axes in another order; None: in the reverse one."""

    axes: Any

    def _order(self, x: Any) -> tuple[int, ...]:
        if self.axes is None:
            return tuple(reversed(range(len(x.shape))))
        order = tuple(check_axis("permute", a, x.shape) for a in self.axes)
        if sorted(order) != list(range(len(x.shape))):
            raise ValueError(f"[permute] axes {self.axes} are no permutation of the axes of shape {tuple(x.shape)}.")
        return order

    def infer(self, x: Any) -> Any:
        return Spec(tuple(x.shape[a] for a in self._order(x)), x.dtype)

    def compute(self, x: NDArray) -> Any:
        return x.permute(self._order(x))

    def reference(self, x: np.ndarray) -> Any:
        return x.transpose(self.axes)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return permute(out_grad, tuple(int(i) for i in np.argsort(self._order(node.inputs[0]))))

    samples = samples_of(({"axes": (2, 0, -2)}, [(2, 3, 4)]), ({"axes": None}, [(2, 3, 4)]))


@tensor_method()
def permute(a: Tensor, *axes: Any) -> Tensor:
    """a with its axes in another order; without one in the reverse."""
    return Permute(as_shape(axes) if axes else None)(a)


@op
class Transpose(View):
    """Two axes exchanged; None: the last two."""

    axes: Any = None

    def _pair(self, x: Any) -> tuple[int, int]:
        a, b = (-1, -2) if self.axes is None else self.axes
        return check_axis("transpose", a, x.shape), check_axis("transpose", b, x.shape)

    def infer(self, x: Any) -> Any:
        shape, (a, b) = list(x.shape), self._pair(x)
        if shape:
            shape[a], shape[b] = shape[b], shape[a]
        return Spec(tuple(shape), x.dtype)

    def compute(self, x: NDArray) -> Any:
        if not x.shape:
            return x
        order, (a, b) = list(range(len(x.shape))), self._pair(x)
        order[a], order[b] = b, a
        return x.permute(order)

    def reference(self, x: np.ndarray) -> Any:
        return x.swapaxes(*self._pair(x)) if x.shape else x

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return transpose(out_grad, self.axes)

    samples = samples_of(({}, [(2, 3, 4)]), ({"axes": (0, 2)}, [(2, 3, 4)]))


@tensor_method()
def transpose(a: Tensor, axes: Any = None, other: int | None = None) -> Tensor:
    """a with two axes exchanged: transpose(a, (0, 1)) or transpose(a, 0, 1); by default the last two."""
    return Transpose((axes, other) if other is not None else as_axes(axes))(a)


@op
class BroadcastTo(View):
    """Axes of size 1 stretched and leading axes added, as numpy does; -1 keeps a size."""

    shape: tuple

    def infer(self, x: Any) -> Any:
        lead = len(self.shape) - len(x.shape)
        shape = tuple([x.shape[i - lead] if s == -1 and i >= lead else whole(s) for i, s in enumerate(self.shape)])
        if (
            lead < 0
            or any(n < 0 for n in shape)
            or any([a not in (1, b) for a, b in zip(x.shape, shape[lead:], strict=True)])
        ):
            raise ValueError(f"[broadcast_to] shape {tuple(x.shape)} does not broadcast to {shape}.")
        return Spec(shape, x.dtype)

    def compute(self, x: NDArray) -> Any:
        return x.broadcast_to(self.infer(x).shape)

    def reference(self, x: np.ndarray) -> Any:
        return np.broadcast_to(x, self.infer(x).shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return unbroadcast(out_grad, node.inputs[0].shape)

    samples = samples_of(({"shape": (4, 3, 5)}, [(3, 1)]), ({"shape": (-1, 5)}, [(3, 1)]))


@tensor_method("broadcast_to", "expand")
def broadcast_to(a: Tensor, *args: Any, shape: Any = None) -> Tensor:
    """Stretched to `shape` without a copy: axes of size 1 grow and leading axes are added; -1 keeps a size. As torch's
    `expand`.

    The shape comes as one tuple or as numbers. Raises ValueError where the tensor does not broadcast to it.
    """
    return BroadcastTo(as_shape(args) if shape is None else tuple(shape))(a)


class Padding(Op):
    """`pads` holds (before, after) for each of the last axes; negative ones crop."""

    pads: tuple

    def all_pads(self, x: Any) -> list[tuple[int, int]]:
        """Those of every axis."""
        lead = len(x.shape) - len(self.pads)
        if lead < 0:
            raise ValueError(f"[pad] {len(self.pads)} pairs are too many for shape {tuple(x.shape)}.")
        return [(0, 0)] * lead + [(int(l), int(r)) for l, r in self.pads]


@op
class Pad(Padding):
    """A constant around the last axes: `pads` holds (before, after) for each of them; negative ones crop."""

    pads: tuple
    value: Any = 0.0
    compute_infers = True

    def infer(self, x: Any) -> Any:
        shape = tuple(s + before + after for s, (before, after) in zip(x.shape, self.all_pads(x), strict=True))
        if any(s < 0 for s in shape):
            raise ValueError(f"[pad] pads {self.pads} crop more than shape {tuple(x.shape)} has.")
        check_value("pad", self.value, x.dtype)
        return Spec(shape, x.dtype)

    def regions(self, x: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the kept part lies in the output and in the input."""
        target, source = [], []
        for size, (before, after) in zip(x.shape, self.all_pads(x), strict=True):
            start, stop = max(0, -before), size - max(0, -after)
            source.append(slice(start, max(start, stop)))
            target.append(slice(start + before, max(start, stop) + before))
        return tuple(target), tuple(source)

    def aliases(self, out: Any, *inputs: Any) -> bool:
        return not any(sum(map(abs, p)) for p in self.pads)

    def into(self, out: NDArray, *inputs: NDArray) -> None:
        self.write(out, inputs[0], *self.regions(inputs[0]))

    def write(self, out: NDArray, x: NDArray, target: tuple, source: tuple) -> None:
        call("fill", [out], value=float(self.value))
        call("copy", [out[target]], x=x[source])

    def reference(self, x: np.ndarray) -> Any:
        out = np.full(self.infer(x).shape, self.value, x.dtype)
        target, source = self.regions(x)
        out[target] = x[source]
        return out

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return Pad(tuple((-l, -r) for l, r in self.pads))(out_grad)

    samples = samples_of(({"pads": ((1, 2), (0, 3)), "value": 0.5}, [(2, 3, 4)]), ({"pads": ((-1, 2),)}, [(2, 4)]))


@op
class Flip(View):
    """Axes reversed."""

    axes: tuple

    def infer(self, x: Any) -> Any:
        check_axes("flip", self.axes, x.shape)
        return Spec(tuple(x.shape), x.dtype)

    def compute(self, x: NDArray) -> Any:
        axes = check_axes("flip", self.axes, x.shape)
        return x.flip(axes) if x.shape else x

    def reference(self, x: np.ndarray) -> Any:
        return np.flip(x, self.axes) if x.shape else x

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return flip(out_grad, self.axes)

    samples = samples_of(({"axes": (0, -1)}, [(2, 3, 4)]))


@tensor_method()
def flip(a: Tensor, axes: Any) -> Tensor:
    """The order of elements reversed along `axes`, one or several; shape and dtype stay. As torch.flip."""
    return Flip((axes,) if isinstance(axes, int) else tuple(axes))(a)


@op
class Squeeze(View):
    """Without its axes of size 1, or (`axes`) without those named axes that have size 1."""

    axes: Any = None

    def infer(self, x: Any) -> Any:
        axes = check_axes("squeeze", self.axes, x.shape)
        return Spec(tuple(s for i, s in enumerate(x.shape) if i not in axes or s != 1), x.dtype)

    samples = samples_of(({}, [(1, 3, 1)]), ({"axes": -1}, [(1, 3, 1)]))


@tensor_method()
def squeeze(a: Tensor, axes: Any = None) -> Tensor:
    """Without the axes of size 1, or without those of `axes` that have size 1. As torch.squeeze."""
    return Squeeze(as_axes(axes))(a)


@op
class Unsqueeze(View):
    """With a new axis of size 1."""

    axis: int

    def infer(self, x: Any) -> Any:
        axis = check_axis("unsqueeze", self.axis, (*x.shape, 1))
        return Spec((*x.shape[:axis], 1, *x.shape[axis:]), x.dtype)

    samples = samples_of(({"axis": -1}, [(2, 3)]), ({"axis": 0}, [(2,)]))


@tensor_method()
def unsqueeze(a: Tensor, axis: int) -> Tensor:
    """With an axis of size 1 at place `axis` of the result, from -(ndim + 1) to ndim. As torch.unsqueeze."""
    return Unsqueeze(axis)(a)
