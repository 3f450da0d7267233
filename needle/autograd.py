"""Tensors and reverse-mode differentiation. The tape is each tensor's `op` and `inputs`."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend_ndarray import Device, NDArray, as_ndarray, cpu_numpy, dtype_name, dtype_of, full
from .backend_selection import BACKEND, default_device
from .backward import compute_gradient_of_variables, find_topo_sort, grad, sum_grads, uncollected, vjp
from .op import OPS, Deferred, Op, Spec, Unsupported, is_on, map_deferred, no_grad, one_of, op

TENSOR_COUNTER = 0
# dtypes of tensors that are constants to differentiation, by name and as numpy has them
NO_GRADIENT = frozenset(f(name) for name in ("int32", "int64", "bool") for f in (str, np.dtype))


def as_data(array: Any, device: Device | None, dtype: str | None) -> Any:
    """numpy array (on cpu_numpy) or NDArray with the values of `array`."""
    if isinstance(array, Tensor):
        device, dtype = device or array.device, dtype or array.dtype
        array = array.realize_cached_data()
    elif array is None:
        raise TypeError("[tensor] expects an array or a number, got None.")
    elif not isinstance(array, NDArray | np.ndarray | np.generic) and hasattr(array, "__dlpack__"):
        made = as_ndarray(array)  # another library's, whose memory stays its own
        array, dtype = made.numpy(), dtype or made.dtype
    if device is None:
        stays = isinstance(array, NDArray) and default_device() != cpu_numpy()
        device = array.device if stays else default_device()
    if device == cpu_numpy():
        array = array.numpy() if isinstance(array, NDArray) else array
        if BACKEND == "np" and not hasattr(array, "dtype"):
            dtype = dtype or "float64"  # what numpy gives numbers and lists: the course checks gradients to 1e-6
        return np.array(array, dtype=dtype_of(array, dtype))
    return NDArray(array, device=device, dtype=dtype)


class Tensor:
    """A value in the tape: `cached_data`, and the `op` and `inputs` that made it (None and () for leaves)."""

    recorder: Any = None  # set on symbols only
    watched = False  # an executable packed this tensor's data
    of_pairs = False  # (..., 2): real and imaginary parts of what a converted model has as complex numbers
    __array_priority__ = 1000  # numpy arrays and scalars on the left leave the operation to us

    def __init__(
        self, array: Any, *, device: Device | None = None, dtype: Any = None, requires_grad: bool = True
    ) -> None:
        self._init(as_data(array, device, dtype), None, (), requires_grad)

    def _init(self, data: Any, op: Op | None, inputs: Sequence[Tensor], requires_grad: bool) -> None:
        global TENSOR_COUNTER
        TENSOR_COUNTER += 1
        self.cached_data, self.op, self.inputs = data, op, inputs if type(inputs) is tuple else tuple(inputs)
        self.requires_grad = requires_grad
        self._grad: Any = None

    def __del__(self) -> None:
        global TENSOR_COUNTER
        TENSOR_COUNTER -= 1

    @classmethod
    def _from_data(cls, data: Any, op: Op | None = None, inputs: Sequence[Tensor] = ()) -> Any:
        self = cls.__new__(cls)
        if op is not None and getattr(data, "dtype", None) in NO_GRADIENT:
            op, inputs = None, ()  # nothing flows back through numbers and truths
        self._init(data, op, inputs, op is not None)
        return self

    @property
    def grad(self) -> Any:
        """The gradient that the last `backward` found, as a Tensor; None before."""
        if type(self._grad) is not tuple:
            return self._grad
        gradient, data = self._grad[0](), self._grad[1]
        return gradient if gradient is not None or data is None else Tensor.make_const(data)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._grad = value

    def keep_gradient(self, gradient: Tensor) -> None:
        """Leaves own their gradient, results only its data: node and gradient would keep each other's graph alive."""
        self._grad = gradient if self.op is None else (weakref.ref(gradient), gradient.cached_data)

    @classmethod
    def make_const(cls, data: Any, *, requires_grad: bool = False) -> Any:
        """A leaf over `data` itself, which is not copied."""
        if isinstance(data, Tensor):
            data = data.realize_cached_data()
        self = cls.__new__(cls)
        self._init(data, None, (), requires_grad)
        return self

    def realize_cached_data(self) -> Any:
        return self.cached_data

    def is_leaf(self) -> bool:
        return self.op is None

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        self.requires_grad = requires_grad
        return self

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        """Takes any shape of equal size: the course sets a bias (1, n) from (n,)."""
        value = value if isinstance(value, Tensor) else Tensor(value, device=self.device, dtype=self.dtype)
        if value.recorder is not None:
            same = not value.recorder.static or tuple(value.shape) == tuple(self.shape)
            value.recorder.write(self, value if same else value.reshape(self.shape))
            return
        if value.device != self.device:
            value = Tensor(value, device=self.device)
        if value.size == self.size:
            value = value if value.shape == self.shape else value.detach().reshape(self.shape)
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
        return dtype_name(self.cached_data.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def T(self) -> Tensor:
        """All axes in reverse order."""
        return self.permute(tuple(reversed(range(self.ndim))))

    @property
    def mT(self) -> Tensor:
        """The last two axes transposed."""
        return self.transpose((-2, -1))

    @property
    def device(self) -> Device:
        return cpu_numpy() if isinstance(self.cached_data, np.ndarray) else self.cached_data.device

    def numpy(self) -> np.ndarray:
        return self.cached_data.copy() if isinstance(self.cached_data, np.ndarray) else self.cached_data.numpy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.cached_data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.cached_data.__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("[len] expects at least one axis, got shape ().")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    __hash__ = object.__hash__  # `==` compares elements, yet sets and dicts keep tensors by identity

    def __repr__(self) -> str:
        return f"needle.Tensor({self.numpy()!s})"

    def backward(self, out_grad: Any = None) -> None:
        """Set `.grad` of all tensors under this one, and add to that of parameters.

        out_grad: the gradient of this tensor itself, ones unless given.
        """
        if not self.requires_grad:
            raise ValueError("[backward] expects a result of tensors that need a gradient, got one that needs none.")
        out_grad = self.cotangent(out_grad)
        if out_grad.shape != self.shape:
            raise ValueError(f"[backward] out_grad expects shape {self.shape}, got {out_grad.shape}.")
        compute_gradient_of_variables(self, out_grad)

    def cotangent(self, gradient: Any = None) -> Tensor:
        """A gradient of this tensor as one of its dtype and device, ones unless given."""
        if gradient is None:
            data = self.cached_data
            is_array = isinstance(data, NDArray)
            ones = full(self.shape, 1.0, data.dtype, data.device) if is_array else np.ones(self.shape, self.dtype)
            return Tensor.make_const(ones)
        if not isinstance(gradient, Tensor) or (gradient.dtype, gradient.device) != (self.dtype, self.device):
            return Tensor(gradient, device=self.device, dtype=self.dtype, requires_grad=False)
        return gradient

    # -- operators: thin names over `needle.ops`, bound there to avoid a second list -----------------------------------

    if TYPE_CHECKING:
        _bound: Any = None
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _bound
        __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __getitem__ = _bound
        __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __xor__ = __invert__ = _bound
        __float__ = __int__ = __index__ = _bound

        def __getattr__(self, name: str) -> Any:
            """The methods that `tensor_method` adds."""


def tensor_method(*names: str, of: type[Tensor] | None = None) -> Callable[[Callable], Callable]:
    """Function decorator: makes a public op function a method of Tensor; dunder names become operators."""

    def bind(f: Callable) -> Callable:
        f = axis_names(f)
        for name in names or (f.__name__,):
            setattr(of or Tensor, name, f)
        return f

    return bind


def axis_names(f: Callable) -> Callable:
    """f, which takes `axis` or `axes` and perhaps `keepdims`, by the names that numpy and torch have for them, too."""
    if hasattr(f, "by_any_name"):
        return f
    parameters = inspect.signature(f).parameters
    own = next((p for p in ("axes", "axis") if p in parameters), "")
    others = dict.fromkeys({"dim", "dims", "axis", "axes"} - parameters.keys(), own) if own else {}
    if "keepdims" in parameters:
        others["keepdim"] = "keepdims"
    if not others:
        return f

    @functools.wraps(f)
    def named(*args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            return f(*args)
        given = {others.get(k, k): v for k, v in kwargs.items()}
        if len(given) < len(kwargs):
            raise TypeError(f"[{f.__name__}] expects one name for one argument, got {', '.join(kwargs)}.")
        return f(*args, **given)

    named.by_any_name = True  # type: ignore[attr-defined]
    return named


class TensorTuple(Tensor):
    """Several tensors as one value: the result of an op with more than one output."""

    def __len__(self) -> int:
        return len(self.cached_data)

    if TYPE_CHECKING:  # needle/ops/shape/join.py

        def __getitem__(self, index: int) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def tuple(self) -> tuple[Tensor, ...]:
        return tuple(self)

    shape = property(lambda self: tuple(tuple(a.shape) for a in self.cached_data))
    dtype = property(lambda self: dtype_name(self.cached_data[0].dtype))
    device = property(lambda self: self[0].device)

    def numpy(self) -> Any:
        return tuple(t.numpy() for t in self)

    def detach(self) -> Tensor:
        return TensorTuple._from_data(self.cached_data)

    def __repr__(self) -> str:
        return f"needle.TensorTuple({list(self)})"


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
    "grad",
    "is_on",
    "map_deferred",
    "no_grad",
    "one_of",
    "op",
    "sum_grads",
    "tensor_method",
    "uncollected",
    "vjp",
]
