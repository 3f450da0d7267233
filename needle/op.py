"""The op base class.

An op is a frozen dataclass: its fields are its attributes. `Op.__call__` is the one hook of the framework: on real tensors it
computes, on symbols (`needle.graph`) it records.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from .backend_ndarray import NDArray, NoKernel, cpu
from .backend_ndarray.kernels import DECOMPOSED, call_map, on_device

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    from .autograd import Tensor
    from .backend_ndarray import Device
else:  # for type checkers only: it tells them that ops have the constructors of dataclasses

    def dataclass_transform(**_: Any) -> Callable:
        return lambda f: f


T = TypeVar("T", bound="Op")
CPU = cpu()
OPS: dict[str, type[Op]] = {}  # every op class by name; filled by `op`, read by load


class Unsupported(Exception):
    """An operation that cannot be recorded or converted; the text says why and what to do."""


def on(device: Device, array: Any) -> Any:
    """An op's result on the device of its inputs: what its `compute` found in numpy is still on the CPU."""
    return NDArray(array, device) if isinstance(array, NDArray) and array.device != device else array


class Tape(threading.local):
    """Whether ops of this thread remember what made their results, and which of them run as their decompositions."""

    recording = True
    remembered: list[Any] | None = None  # results that need no gradient, where they remember, too
    lacking = ""  # the kernel that the last of them would need

    def __init__(self) -> None:
        self.decomposing: list[Any] = []


TAPE = Tape()


RECORDERS = 0  # calls being recorded, in any thread: eager calls look no further while there are none


@contextmanager
def remembering() -> Iterator[None]:
    """Context in which every result remembers what made it: what a forward makes of buffers alone is recorded, not frozen."""
    global RECORDERS
    before, TAPE.remembered = TAPE.remembered, []
    RECORDERS += 1
    try:
        yield
    finally:
        TAPE.remembered = before
        RECORDERS -= 1


@contextmanager
def recording(wanted: bool) -> Iterator[None]:
    """Context in which results of what needs a gradient need one, or none does."""
    before, TAPE.recording = TAPE.recording, wanted
    try:
        yield
    finally:
        TAPE.recording = before


@contextmanager
def no_grad() -> Iterator[None]:
    """Context or decorator in which results need no gradient, as torch's."""
    with recording(False):
        yield


@lru_cache
def snake_case(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).strip("_")


class Spec(NamedTuple):
    """Shape and dtype of a tensor that is not computed yet."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Deferred:
    """An attribute whose value is known only when the op runs: a symbolic dim, a module's training flag."""


def is_on(flag: Any) -> bool:
    """The value of a training flag; False while a Deferred one is only recorded."""
    return not isinstance(flag, Deferred) and bool(flag)


def map_deferred(value: Any, f: Callable[[Deferred], Any]) -> Any:
    """`value` with `f` applied to every Deferred in its nested tuples and ops."""
    if isinstance(value, Deferred):
        return f(value)
    if isinstance(value, tuple | list):
        return tuple(map_deferred(v, f) for v in value)
    return value.resolve(f) if isinstance(value, Op) else value


def deferred_in(value: Any) -> list[Deferred]:
    """Every Deferred in nested tuples and ops."""
    if isinstance(value, Deferred):
        return [value]
    parts = value if isinstance(value, tuple | list) else vars(value).values() if isinstance(value, Op) else ()
    return [d for part in parts if isinstance(part, NESTED) for d in deferred_in(part)]


def op(cls: type[T]) -> type[T]:
    """Class decorator: makes an op class a frozen dataclass, which `checks` its attributes, and registers it under its name."""
    if cls.checks is not None:
        cls.__post_init__ = cls.checks  # type: ignore[attr-defined]
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    if cls.__name__ in OPS:
        raise ValueError(f"[op] there is already an op named {cls.__name__}.")
    OPS[cls.__name__] = cls
    return cls


def one_of(**words: Collection[str]) -> Callable[[Any], None]:
    """For `checks = one_of(...)` in an op: attributes that are one of some words."""

    def check(self: Any) -> None:
        for name, known in words.items():
            value = vars(self)[name]
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"[{self.label}] {name} expects one of {', '.join(known)}, got {value}.")

    return check


def kind_of(value: Any) -> str:
    """A value's class, with the library's name where that is another one's."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"


@dataclass_transform(frozen_default=True, eq_default=False)
class Op:
    """Base of all ops. A subclass declares its attributes as dataclass fields and defines

    infer(*inputs) -> Spec           shapes and dtypes (inputs are Tensors or Specs); raises ValueError on bad ones
    compute(*arrays) -> NDArray      on the device, by default element-wise kernel `kernel`; or into(out, *arrays)
    reference(*arrays) -> ndarray    numpy, in the arrays' dtype; or
    decompose(*tensors) -> Tensor    in terms of other ops
    gradient(out_grad, node)         gradients of the inputs, as tensors; None where there is none
    samples() -> list of (attributes, input shapes)
    """

    __slots__ = ("_deferred",)  # beside the attributes, which are in `vars`
    _deferred: list[Deferred]

    kernel: ClassVar[str | None] = None  # element-wise kernel of the table
    n_out: ClassVar[int] = 1
    zero_is_safe: ClassVar[bool] = True  # finite at 0, so that it may run over padded channels
    checks: ClassVar[Any] = None  # a function of the op, called when it is made: `one_of`, `windows_of`
    results: ClassVar[tuple[Any, Any]]  # (Tensor, TensorTuple), set by autograd.py, which needs this class first
    updates: ClassVar[bool] = False  # `into` may be given the memory of its first input, of which it changes a part
    like_first: ClassVar[bool] = (
        False  # its result has the shape and dtype of its first input, whatever the others have
    )
    counts: ClassVar[bool] = False  # values say how large its result is: `infer` gives None
    is_view: ClassVar[bool] = False  # its result may share memory with its inputs
    compute_infers: ClassVar[bool] = False  # `compute` checks its inputs by `infer` itself
    float32_only: ClassVar[bool] = False  # its kernels take nothing else: float64 runs as `reference`, slow but right
    library: ClassVar[str] = "needle"  # another library's call cannot be saved and runs between plans, not in one
    mixes_floats: ClassVar[bool] = False  # its inputs may be of several float dtypes, as torch's may
    ignores_values: ClassVar[bool] = False  # its result depends on shapes and dtypes of its inputs alone
    has_expression: ClassVar[bool] = True  # TVM can be told what it computes, by itself or by what it is made of
    is_item: ClassVar[bool] = False  # one of the results of another op
    # What a subclass defines, looked up once: eager calls ask for every op.
    has_infer: ClassVar[bool]  # False for ops in the course's form, which only compute, on whatever arrays they get
    has_own_gradient: ClassVar[bool]
    may_decompose: ClassVar[bool]  # it has its own `must_decompose`
    into_is_default: ClassVar[bool]
    infers_first: ClassVar[bool] = True  # `compute` does not check its inputs
    computes_at_once: ClassVar[bool] = False  # nothing is to be asked before `compute`

    def __init_subclass__(cls) -> None:
        cls.has_infer = cls.infer is not Op.infer
        if "has_own_gradient" not in vars(cls):
            cls.has_own_gradient = cls.gradient is not Op.gradient
        cls.may_decompose = cls.must_decompose is not Op.must_decompose
        cls.into_is_default = cls.into is Op.into
        cls.infers_first = (
            cls.has_infer and not cls.compute_infers and (cls.compute is not Op.compute or cls.into_is_default)
        )
        cls.computes_at_once = not cls.infers_first and cls.float32_only is False

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def label(self) -> str:
        """How the op is called in messages: its kernel's or class's name in lower case."""
        return self.kernel or snake_case(self.name)

    def attributes(self) -> dict[str, Any]:
        return dict(vars(self))

    def deferred(self) -> list[Deferred]:
        """Every Deferred in the attributes; looked up once, for graphs ask at each walk."""
        try:
            return self._deferred
        except AttributeError:
            object.__setattr__(self, "_deferred", deferred_in(self))
            return self._deferred

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)  # a copy's Deferreds are its own

    def resolve(self, f: Callable[[Deferred], Any]) -> Op:
        """The op with its deferred attributes replaced by values."""
        if not self.deferred():
            return self
        return type(self)(**{k: map_deferred(v, f) for k, v in self.attributes().items()})

    def must_decompose(self, *inputs: Any) -> bool:
        """True for a fused op that has to run its unfused form on these: a BatchNorm in training, shapes that broadcast."""
        return False

    def infer(self, *inputs: Any) -> Any:
        raise Unsupported(f"[{self.label}] has no `infer`, which a graph needs to know shapes.")

    def compute(self, *arrays: NDArray) -> Any:
        if self.kernel is not None:
            return arrays[0].ewise(self.kernel, arrays[1:], vars(self).values())
        if self.into_is_default:
            return None
        out = NDArray.empty(*self.infer(*arrays))
        self.into(out, *arrays)
        return out

    def reference(self, *arrays: np.ndarray) -> Any:
        return None

    def decompose(self, *inputs: Tensor) -> Any:
        raise NotImplementedError(f"[{self.label}] has neither a kernel here nor a decomposition.")

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        raise NotImplementedError(f"[{self.label}] has no gradient.")

    def gradient_as_tuple(self, out_grad: Any, node: Tensor) -> tuple[Any, ...]:
        grads = self.gradient(out_grad, node)
        return grads if isinstance(grads, tuple) else tuple(grads) if isinstance(grads, list) else (grads,)

    def check_values(self, *inputs: Any) -> None:
        """Raise for what a plan's kernel answers by NaN. inputs: arrays that a caller gave, Specs of what is computed."""

    def sources(self, axis: int, out: Any, *inputs: Any) -> list[int | None] | None:
        """Where rows, the parts of `out` along `axis`, depend on the same rows of inputs alone: every input's axis of rows, None
        for those of which all takes part. None where rows depend on others, or nobody has said."""
        return None

    def taken(self, *inputs: Any) -> tuple[int, int, int] | None:
        """(axis, start, stop) of an op that takes these rows of its input, and nothing else."""
        return None

    def flops(self, out: Any, *inputs: Any) -> int:
        """Floating-point operations of one call by shapes, a multiply-add as two: one per result unless the op says more."""
        outs = out if self.n_out > 1 else (out,)
        return 0 if self.is_view else sum(math.prod(o.shape) for o in outs)

    @classmethod
    def has_kernel(cls) -> bool:
        """Whether `compute` does the work; where it does not, `decompose` runs in its place."""
        return cls.has_into() or cls.compute is not Op.compute

    def into(self, out: NDArray, *arrays: NDArray) -> None:
        """`compute` with its result in memory that is there."""
        call_map(str(self.kernel), out, [a.broadcast_to(out.shape) for a in arrays], vars(self).values())

    def memory(self, spec: Any) -> NDArray:
        """New memory for the result, in the order that suits its readers."""
        return NDArray.empty(*spec)

    @classmethod
    def has_into(cls) -> bool:
        return cls.kernel is not None or not cls.into_is_default

    @property
    def in_place(self) -> bool:
        """May write over an input of the same shape that nobody reads later."""
        return self.kernel is not None

    def is_weight(self, index: int) -> bool:
        """True for an input that is a layer's own, not data."""
        return False

    def aliases(self, out: Any, *inputs: Any) -> bool:
        """True when the result is the first input unchanged."""
        return False

    @classmethod
    def samples(cls) -> list[tuple[dict[str, Any], list[tuple[int, ...]]]]:
        return []

    def __call__(self, *inputs: Tensor) -> Any:
        needs_grad, recorder = False, None
        try:
            for t in inputs:
                if t.recorder is not None:
                    recorder = t.recorder
                needs_grad = needs_grad or t.requires_grad
        except AttributeError:
            raise TypeError(f"[{self.label}] expects needle Tensors, got {kind_of(t)}.") from None
        if recorder is not None:
            return recorder.record(self, inputs)
        if self.may_decompose and self.must_decompose(*inputs):
            return self.decompose(*inputs)
        needs_grad = needs_grad and TAPE.recording
        if needs_grad and not self.has_own_gradient:
            self.infer(*inputs)
            return self.decompose(*inputs)
        data = self._run(inputs)
        if data is None:
            return self._run_decomposed(inputs)
        make = self.results[self.n_out > 1]._from_data
        if needs_grad:
            return make(data, self, inputs)
        made = make(data)
        if RECORDERS and TAPE.remembered is not None:
            made.op, made.inputs = self, inputs
            TAPE.remembered.append(made)
        return made

    def _run_decomposed(self, inputs: Sequence[Tensor]) -> Any:
        here = (type(self), tuple(t.shape for t in inputs))
        if here in TAPE.decomposing:  # a decomposition for other modes came back to the op itself
            raise NoKernel(f"[{self.label}] has neither a kernel for these inputs nor a decomposition: {TAPE.lacking}")
        TAPE.decomposing.append(here)
        try:
            return self.decompose(*inputs)
        finally:
            TAPE.decomposing.pop()

    def _run(self, inputs: Sequence[Tensor]) -> Any:
        arrays = [t.cached_data for t in inputs]
        for a in arrays:
            if type(a) is not NDArray or a._device is not CPU:
                return self._run_elsewhere(inputs, arrays)
        return self._run_here(inputs, arrays)

    def _run_here(self, inputs: Sequence[Tensor], arrays: Sequence[Any]) -> Any:
        if self.computes_at_once:
            return self.compute(*arrays)
        if self.float32_only and any(a.dtype == "float64" for a in arrays):
            return NDArray(self.reference(*(a.read() for a in arrays)), dtype=self.infer(*inputs).dtype)
        if self.infers_first:
            self.infer(*inputs)
        return self.compute(*arrays)

    def _run_elsewhere(self, inputs: Sequence[Tensor], arrays: Sequence[Any]) -> Any:
        """On numpy arrays, on a GPU, or on tuples of arrays."""
        if any(isinstance(a, np.ndarray) for a in arrays):
            return self._run_on_numpy(inputs, arrays)
        parts = [a for array in arrays for a in (array if isinstance(array, tuple) else (array,))]
        devices = list(dict.fromkeys(a.device for a in parts if isinstance(a, NDArray)))
        if len(devices) > 1:
            raise ValueError(f"[{self.label}] inputs are on different devices: {devices[0]} and {devices[1]}.")
        device = devices[0] if devices else CPU
        if device == CPU:
            return self._run_here(inputs, arrays)
        try:
            with on_device(device):
                out = self._run_here(inputs, arrays)
        except NoKernel as e:
            if type(self).decompose is Op.decompose:
                raise NoKernel(f"[{self.label}] has neither a kernel for these inputs nor a decomposition: {e}") from e
            DECOMPOSED[device.name, self.label] += 1
            TAPE.lacking = str(e)
            return None
        return tuple(on(device, a) for a in out) if isinstance(out, tuple | list) else on(device, out)

    def _run_on_numpy(self, inputs: Sequence[Tensor], arrays: Sequence[Any]) -> Any:
        if not all(isinstance(a, np.ndarray | tuple) for a in arrays):
            found = next(a.device for a in arrays if isinstance(a, NDArray))
            raise ValueError(f"[{self.label}] inputs are on different devices: cpu_numpy() and {found}.")
        if self.has_infer:
            self.infer(*inputs)
        with np.errstate(all="ignore"):
            out = self.reference(*arrays) if self.has_infer else self.compute(*arrays)
        if isinstance(out, tuple):
            return tuple([np.asarray(a) if isinstance(a, np.generic) else a for a in out])
        return np.asarray(out) if isinstance(out, np.generic) else out


NESTED = (Deferred, tuple, list, Op)  # what may hold a Deferred
