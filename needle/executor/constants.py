"""Constants of executables: parameters, and arrays derived from them. After a parameter changed, what depends on it is redone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from needle import _core
from needle.autograd import Op, Spec, Tensor, TensorTuple
from needle.backend_ndarray import NDArray, cpu
from needle.backend_ndarray.kernels import call, on_device


def layout(array: NDArray) -> tuple[Any, ...]:
    return array.shape, array.strides, array._offset, array.dtype


class Constant:
    """One array: `source` is a parameter's Tensor, or None for a derived array `make(*inputs)`.

    A derived array that only other constants read (a folded, not yet packed weight) is dropped after use; a parameter's
    pages that lie in a file are given back to it.
    """

    def __init__(self, source: Tensor | None, make: Callable[..., NDArray] | None, inputs: Sequence[Constant]) -> None:
        self.source, self.make, self.inputs = source, make, tuple(inputs)
        self.device = None if source is None else source.device
        self.layout = None if source is None else layout(source.cached_data)
        self.stamp: Any = None  # another object when the array is another one
        self._read: Sequence[Any] = ()  # the stamps of the inputs that it was derived from
        self._array: NDArray | None = None
        self.refresh()

    @property
    def array(self) -> NDArray:
        if self._array is None:
            missing = lacking(self)
            readers = Counter(id(i) for c in missing for i in c.inputs)
            for c in missing:
                c._derive()
                for i in c.inputs:
                    readers[id(i)] -= 1
                    if not readers[id(i)]:
                        i.drop()
        assert self._array is not None
        return self._array

    def _derive(self) -> None:
        assert self.make is not None
        arrays: list[Any] = [i._array for i in self.inputs]
        with on_device(arrays[0].device if arrays else None):
            self._array = self.make(*arrays).compact()

    def drop(self) -> None:
        if self.source is None:
            self._array = None
        elif self._array is not None:
            self._array._handle.trim()

    def moved(self) -> bool:
        """True for a parameter whose array has another shape, dtype or order in memory than plans were made for."""
        return self.source is not None and layout(self.source.cached_data) != self.layout

    def check_device(self) -> None:
        if self.source is not None and self.source.device != self.device:
            raise ValueError(
                f"[executable] parameters were compiled on {self.device}, got one on {self.source.device}; compile again."
            )

    def refresh(self) -> bool:
        """Notice changed parameters (inputs first); True when the array is another one now."""
        if self.source is not None:
            array = self.source.cached_data
            self.source.watched = True
            array._handle.watch()
            stamp: Any = (array._handle, array._handle.version)
            same = stamp == self.stamp
        else:
            read, stamp = [i.stamp for i in self.inputs], object()
            same = self.stamp is not None and all(a is b for a, b in zip(read, self._read, strict=True))
            self._read = read
        if same:
            return False
        self.stamp = stamp
        self._array = array if self.source is not None else None
        return True


def lacking(constant: Constant) -> list[Constant]:
    """The constants without arrays among this one and those that it is derived from, each once, inputs first."""
    order: list[Constant] = []
    seen = {id(constant)}
    stack = [(constant, iter(constant.inputs))]
    while stack:
        c, inputs = stack[-1]
        for i in inputs:
            if i._array is None and id(i) not in seen:
                seen.add(id(i))
                stack.append((i, iter(i.inputs)))
                break
        else:
            order.append(c)
            stack.pop()
    return order


class SizedConstant(NamedTuple):
    """A constant that depends on traced sizes: what an op makes of constants, or of nothing but the sizes of other values."""

    spec: Spec
    op: Op  # with traced attributes
    item: int | None  # which of its results
    inputs: tuple[Constant | SizedConstant | Spec, ...]

    @property
    def source(self) -> None:
        """It is no parameter."""
        return None


class Untraceable(Exception):
    """Something that is planned for one shape at a time."""


def as_constant(c: Constant | SizedConstant) -> Constant:
    if isinstance(c, SizedConstant):
        raise Untraceable("a constant of traced sizes is packed")
    return c


@contextmanager
def taken_back(pool: ConstantPool) -> Iterator[None]:
    """What plans write meanwhile into parameters and buffers is not kept."""
    before = [(c.source, c.source.numpy()) for c in pool.constants.values() if c.source is not None]
    try:
        yield
    finally:
        for t, values in before:
            call("copy", [t.cached_data], x=NDArray(values, device=t.device, dtype=t.dtype))


class ConstantPool:
    """Constants by key, in an order in which inputs come before what is derived from them; shared by all plans, as is the memory
    that these compute in."""

    def __init__(self) -> None:
        self.constants: dict[Hashable, Constant] = {}
        self.arenas = _core.Arenas()

    def parameter(self, tensor: Tensor) -> Constant:
        key = ("parameter", id(tensor))
        if key not in self.constants:
            self.constants[key] = Constant(tensor, None, ())
        return self.constants[key]

    def derive(self, key: Hashable, make: Callable[..., NDArray], inputs: Sequence[Constant]) -> Constant:
        """The array `make(*inputs)`; `key` tells makers apart."""
        full = (key, *map(id, inputs))
        if full not in self.constants:
            self.constants[full] = Constant(None, make, inputs)
        return self.constants[full]

    def of_op(self, op: Op, item: int | None, inputs: Sequence[Constant]) -> Constant:
        """What an op computes of constants; item: which of its results."""
        make = lambda *arrays: eager(op, arrays) if item is None else eager(op, arrays)[item]  # noqa: E731
        return self.derive(("op", op.name, repr(op.attributes()), item), make, inputs)

    def of_specs(self, op: Op, specs: Sequence[Spec]) -> Constant:
        """What an op that ignores values makes beside values of these shapes and dtypes."""
        like = [SimpleNamespace(**s._asdict(), device=cpu()) for s in specs]
        key = ("sizes", op.name, repr(op.attributes()), repr(specs))
        return self.derive(key, lambda: op.decompose(*like).cached_data, ())  # type: ignore[arg-type]

    def has(self, key: Hashable, inputs: Sequence[Constant]) -> bool:
        """Whether such an array is there."""
        found = self.constants.get((key, *map(id, inputs)))
        return found is not None and found._array is not None

    def moved(self) -> bool:
        return any(c.moved() for c in self.constants.values())

    def refresh(self) -> bool:
        for c in self.constants.values():
            c.check_device()
        changed = [c.refresh() for c in self.constants.values()]
        return any(changed)

    def place(self, arrays: Sequence[NDArray]) -> int | None:
        """Which of the arrays is memory of a parameter, None where none is."""
        held = {id(c.source.cached_data._handle) for c in self.constants.values() if c.source is not None}
        return next((i for i, a in enumerate(arrays) if id(a._handle) in held), None)

    def drop_unused(self, used: Collection[Constant], needed_later: Iterable[Constant]) -> None:
        """Free the derived arrays that no plan uses, and forget those that none will use or derive from."""
        kept = {id(c) for c in used}
        needed = {id(c): c for c in (*used, *needed_later)}
        left = list(needed.values())
        while left:
            new = {id(i): i for i in left.pop().inputs if id(i) not in needed}
            needed |= new
            left += new.values()
        for key, c in list(self.constants.items()):
            if id(c) not in kept:
                c.drop()
            if id(c) not in needed and c.source is None:
                del self.constants[key]


def eager(op: Op, arrays: Sequence[NDArray]) -> Any:
    make = lambda a: TensorTuple._from_data(a) if isinstance(a, tuple) else Tensor.make_const(a)  # noqa: E731
    return op(*map(make, arrays)).cached_data
