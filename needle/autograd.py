"""Tensors and reverse-mode differentiation. The tape is each tensor's `op` and `inputs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend_ndarray import Device, NDArray, cpu_numpy
from .backend_selection import default_device
from .op import OPS, Deferred, Op, Spec, Unsupported, is_on, map_deferred, no_grad, op

TENSOR_COUNTER = 0
NO_GRADIENT = ("int32", "int64", "bool")  # dtypes of tensors that are constants to differentiation


def as_data(array: Any, device: Device | None, dtype: str | None) -> Any:
    """numpy array (on cpu_numpy) or NDArray with the values of `array`."""
    if isinstance(array, Tensor):
        array = array.realize_cached_data()
    if device is None:
        device = array.device if isinstance(array, NDArray) else default_device()
    if device == cpu_numpy():
        array = array.numpy() if isinstance(array, NDArray) else array
        if dtype is None and not hasattr(array, "dtype"):
            dtype = "float32"
        return np.array(array, dtype=dtype)
    return NDArray(array, device=device, dtype=dtype)


class Tensor:
    """A value in the tape: `cached_data`, and the `op` and `inputs` that made it (None and () for leaves)."""

    recorder: Any = None  # set on symbols only

    def __init__(
        self,
        array: Any,
        *,
        device: Device | None = None,
        dtype: str | None = None,
        requires_grad: bool = True,
        **_: Any,
    ) -> None:
        self._init(as_data(array, device, dtype), None, (), requires_grad)

    def _init(self, data: Any, op: Op | None, inputs: Sequence[Tensor], requires_grad: bool) -> None:
        global TENSOR_COUNTER
        TENSOR_COUNTER += 1
        self.cached_data, self.op, self.inputs = data, op, tuple(inputs)
        self.requires_grad = requires_grad
        self.grad: Tensor | None = None
        self.watched = False  # an executable packed this tensor's data

    def __del__(self) -> None:
        global TENSOR_COUNTER
        TENSOR_COUNTER -= 1

    @classmethod
    def _from_data(cls, data: Any, op: Op | None = None, inputs: Sequence[Tensor] = ()) -> Any:
        self = cls.__new__(cls)
        if op is not None and str(getattr(data, "dtype", "float")) in NO_GRADIENT:
            op, inputs = None, ()  # nothing flows back through numbers and truths
        self._init(data, op, inputs, op is not None)
        return self

    @staticmethod
    def make_const(data: Any, *, requires_grad: bool = False) -> Tensor:
        if isinstance(data, Tensor):
            data = data.realize_cached_data()
        self = Tensor._from_data(data)
        self.requires_grad = requires_grad
        return self

    def realize_cached_data(self) -> Any:
        return self.cached_data

    def is_leaf(self) -> bool:
        return self.op is None

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        value = value if isinstance(value, Tensor) else Tensor(value, device=self.device, dtype=self.dtype)
        if value.recorder is not None:
            value.recorder.write(self, value)
            return
        if value.dtype != self.dtype or value.shape != self.shape:
            raise ValueError(f"[data] expects {self.dtype} {self.shape}, got {value.dtype} {value.shape}.")
        self.cached_data = value.cached_data
        self.touch()

    def touch(self) -> None:
        """Tell executables that this tensor's data is another one now."""
        if self.watched:
            from . import _core

            _core.bump_epoch()

    def detach(self) -> Tensor:
        return Tensor.make_const(self.cached_data)

    @property
    def shape(self) -> Any:
        return self.cached_data.shape

    @property
    def dtype(self) -> str:
        return str(self.cached_data.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def device(self) -> Device:
        return cpu_numpy() if isinstance(self.cached_data, np.ndarray) else self.cached_data.device

    def numpy(self) -> np.ndarray:
        return self.cached_data.copy() if isinstance(self.cached_data, np.ndarray) else self.cached_data.numpy()

    def item(self) -> float:
        return self.numpy().item()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.cached_data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"needle.Tensor({self.numpy()!s})"

    def backward(self, out_grad: Tensor | None = None) -> None:
        from .init import ones

        if out_grad is None:
            out_grad = ones(*self.shape, dtype=self.dtype, device=self.device)
        compute_gradient_of_variables(self, out_grad)

    # -- operators: thin names over `needle.ops`, bound there to avoid a second list -----------------------------------

    if TYPE_CHECKING:
        _bound: Any = None
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _bound
        __pow__ = __matmul__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = _bound

    def __getattr__(self, name: str) -> Any:
        method = TENSOR_METHODS.get(name)
        if method is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return method.__get__(self)


TENSOR_METHODS: dict[str, Callable] = {}


def tensor_method(*names: str) -> Callable[[Callable], Callable]:
    """Function decorator: makes a public op function a method of Tensor; dunder names become operators."""

    def bind(f: Callable) -> Callable:
        for name in names or (f.__name__,):
            if name.startswith("__"):
                setattr(Tensor, name, f)
            else:
                TENSOR_METHODS[name] = f
        return f

    return bind


class TensorTuple(Tensor):
    """Several tensors as one value: the result of an op with more than one output."""

    def __len__(self) -> int:
        return len(self.cached_data)

    def __getitem__(self, index: int) -> Tensor:
        from .ops import tuple_get_item

        return tuple_get_item(self, index)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def tuple(self) -> tuple[Tensor, ...]:
        return tuple(self)

    shape = property(lambda self: tuple(a.shape for a in self.cached_data))
    dtype = property(lambda self: str(self.cached_data[0].dtype))

    def detach(self) -> Tensor:
        return TensorTuple._from_data(self.cached_data)

    def __repr__(self) -> str:
        return f"needle.TensorTuple({list(self)})"


def compute_gradient_of_variables(output: Tensor, out_grad: Tensor) -> None:
    """Store the gradient of `output` in `.grad` of every tensor that it depends on and that requires one."""
    grads: dict[int, list[Tensor]] = {id(output): [out_grad]}
    for node in reversed(find_topo_sort([output])):
        parts = grads.pop(id(node), None)
        if parts is None or not node.requires_grad:
            continue
        node.grad = sum_grads(parts)
        if node.op is None:
            continue
        for i, g in zip(node.inputs, node.op.gradient_as_tuple(node.grad, node), strict=True):
            if g is not None and i.requires_grad:
                grads.setdefault(id(i), []).append(g)


def sum_grads(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for p in parts[1:]:
        total = total + p
    return total


def find_topo_sort(nodes: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that `nodes` depend on, in post-order depth first."""
    order: list[Tensor] = []
    seen: set[int] = set()
    for root in nodes:
        stack: list[tuple[Tensor, Iterator[Tensor]]] = []
        if id(root) not in seen:
            seen.add(id(root))
            stack.append((root, iter(root.inputs)))
        while stack:
            node, inputs = stack[-1]
            for i in inputs:
                if id(i) not in seen:
                    seen.add(id(i))
                    stack.append((i, iter(i.inputs)))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


Op.results = (Tensor, TensorTuple)
Value, TensorOp = Tensor, Op  # the course's names

__all__ = [
    "OPS",
    "Deferred",
    "Op",
    "Spec",
    "Tensor",
    "TensorOp",
    "TensorTuple",
    "Unsupported",
    "Value",
    "compute_gradient_of_variables",
    "find_topo_sort",
    "is_on",
    "map_deferred",
    "no_grad",
    "op",
    "sum_grads",
    "tensor_method",
]
