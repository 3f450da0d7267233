"""Tensors, the op base class and reverse-mode differentiation.

An op is a frozen dataclass: its fields are its attributes. `Op.__call__` is the one hook of the framework: on real tensors it
computes, on symbols (`needle.graph`) it records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from .backend_ndarray import Device, NDArray, cpu_numpy
from .backend_selection import default_device

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # for type checkers only: it tells them that ops have the constructors of dataclasses

    def dataclass_transform(**_: Any) -> Callable:
        return lambda f: f


T = TypeVar("T", bound="Op")
TENSOR_COUNTER = 0
OPS: dict[str, type[Op]] = {}  # every op class by name; filled by `op`, read by load


class Unsupported(Exception):
    """An operation that cannot be recorded or converted; the text says why and what to do."""


class Spec(NamedTuple):
    """Shape and dtype of a tensor that is not computed yet."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Deferred:
    """An attribute whose value is known only when the op runs: a symbolic dim, a module's training flag."""


def map_deferred(value: Any, f: Callable[[Deferred], Any]) -> Any:
    """`value` with `f` applied to every Deferred in its nested tuples."""
    if isinstance(value, Deferred):
        return f(value)
    if isinstance(value, tuple | list):
        return tuple(map_deferred(v, f) for v in value)
    return value


def op(cls: type[T]) -> type[T]:
    """Class decorator: makes an op class a frozen dataclass and registers it under its name."""
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    if cls.__name__ in OPS:
        raise ValueError(f"[op] there is already an op named {cls.__name__}.")
    OPS[cls.__name__] = cls
    return cls


@dataclass_transform(frozen_default=True, eq_default=False)
class Op:
    """Base of all ops. A subclass declares its attributes as dataclass fields and defines

    infer(*inputs) -> Spec           shapes and dtypes (inputs are Tensors or Specs); raises ValueError on bad ones
    compute(*arrays) -> NDArray      on the device, by default element-wise kernel `kernel`
    reference(*arrays) -> ndarray    numpy, in the arrays' dtype; or
    decompose(*tensors) -> Tensor    in terms of other ops
    gradient(out_grad, node)         gradients of the inputs, as tensors; None where there is none
    samples() -> list of (attributes, input shapes)
    """

    kernel: ClassVar[str | None] = None  # element-wise kernel of the table
    n_out: ClassVar[int] = 1
    layout: ClassVar[str] = "plain"  # what the executor may feed it: plain, any (follows its input) or blocked
    zero_is_safe: ClassVar[bool] = True  # finite at 0, so that it may run over padded channels
    joins_channels: ClassVar[bool] = False  # its inputs may be written straight into slices of its output

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def label(self) -> str:
        """How the op is called in messages: its kernel's or class's name in lower case."""
        return self.kernel or "".join("_" + c.lower() if c.isupper() else c for c in self.name).strip("_")

    def attributes(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def deferred(self) -> list[Deferred]:
        found: list[Deferred] = []
        for value in self.attributes().values():
            map_deferred(value, found.append)
        return found

    def resolve(self, f: Callable[[Deferred], Any]) -> Op:
        """The op with its deferred attributes replaced by values."""
        if not self.deferred():
            return self
        return type(self)(**{k: map_deferred(v, f) for k, v in self.attributes().items()})

    def must_decompose(self, *inputs: Any) -> bool:
        """True for a fused op that has to run its unfused form on these: a BatchNorm in training, shapes that broadcast."""
        return False

    def infer(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def compute(self, *arrays: NDArray) -> Any:
        if self.kernel is None:
            return None
        return arrays[0].ewise(self.kernel, *arrays[1:], attrs=[float(v) for v in self.attributes().values()])

    def reference(self, *arrays: np.ndarray) -> Any:
        return None

    def decompose(self, *inputs: Tensor) -> Any:
        raise NotImplementedError(f"[{self.label}] has neither a kernel here nor a decomposition.")

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        raise NotImplementedError(f"[{self.label}] has no gradient.")

    def gradient_as_tuple(self, out_grad: Any, node: Tensor) -> tuple[Any, ...]:
        grads = self.gradient(out_grad, node)
        return grads if isinstance(grads, tuple) else tuple(grads) if isinstance(grads, list) else (grads,)

    @classmethod
    def has_own_gradient(cls) -> bool:
        return cls.gradient is not Op.gradient

    # -- what the executor asks (needle/executor/planner.py) ------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        """May write over an input of the same shape that nobody reads later."""
        return self.kernel is not None

    @classmethod
    def has_own_lowering(cls) -> bool:
        return cls.kernel is not None or cls.lower is not Op.lower

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        """Add the op's steps to a plan, writing to `out`; both plain, or both blocked where `layout` allows it."""
        from .backend_ndarray import call

        attrs = [float(v) for v in self.attributes().values()]
        call(str(self.kernel), [out], [i.broadcast_to(out.shape) for i in inputs], *attrs)

    def is_weight(self, index: int) -> bool:
        """True for an input that stays plain (and is packed if constant) when the op runs blocked."""
        return False

    def accepts_blocked(self, *inputs: Spec) -> bool:
        """Whether an op of layout "any" can run blocked on inputs of these shapes."""
        images = [s for i, s in enumerate(inputs) if not self.is_weight(i)]
        return all(s.ndim == 4 and s.shape[1] == images[0].shape[1] for s in images)

    def aliases(self, out: Any, *inputs: Any) -> bool:
        """True when the result is the first input unchanged."""
        return False

    def halo(self, index: int, out: Spec, *inputs: Spec) -> tuple[int, int, int, int]:
        """Zero rows and columns (top, left, bottom, right) that a blocked input needs around it."""
        return (0, 0, 0, 0)

    def reads_narrow_blocks(self, *inputs: Spec) -> bool:
        """Whether the first input may be one block of C < 16 channels."""
        return False

    @classmethod
    def samples(cls) -> list[tuple[dict[str, Any], list[tuple[int, ...]]]]:
        return []

    def __call__(self, *inputs: Tensor) -> Any:
        for t in inputs:
            if t.recorder is not None:
                return t.recorder.record(self, inputs)
        needs_grad = any(t.requires_grad for t in inputs)
        if self.must_decompose(*inputs) or (needs_grad and not self.has_own_gradient()):
            return self.decompose(*inputs)
        self.infer(*inputs)
        data = self._run(inputs)
        if data is None:
            return self.decompose(*inputs)
        kind = TensorTuple if self.n_out > 1 else Tensor
        return kind._from_data(data, self if needs_grad else None, inputs if needs_grad else ())

    def _run(self, inputs: Sequence[Tensor]) -> Any:
        arrays = [t.cached_data for t in inputs]
        on_numpy = [isinstance(a, np.ndarray) for a in arrays]
        if any(on_numpy):
            if not all(on_numpy):
                raise ValueError(f"[{self.label}] inputs are on different devices: cpu_numpy() and cpu().")
            with np.errstate(all="ignore"):
                out = self.reference(*arrays)
            return np.asarray(out) if isinstance(out, np.generic) else out
        return self.compute(*arrays)


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


Value, TensorOp = Tensor, Op  # the course's names
