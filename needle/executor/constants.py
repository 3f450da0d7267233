"""Constants of executables: parameters, and arrays derived from them. After a parameter changed, what depends on it is redone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray


class Constant:
    """One array: `source` is a parameter's Tensor, or None for a derived array `make(*inputs)`."""

    def __init__(self, source: Tensor | None, make: Callable[..., NDArray] | None, inputs: Sequence[Constant]) -> None:
        self.source, self.make, self.inputs = source, make, tuple(inputs)
        self.array: NDArray
        self.stamp: Any = None
        self.refresh()

    def _stamp(self) -> Any:
        if self.source is not None:
            handle = self.source.cached_data._handle
            return (handle, handle.version)
        return tuple(i.stamp for i in self.inputs)

    def refresh(self) -> bool:
        """Bring the array up to date (inputs first); True when it changed."""
        stamp = self._stamp()
        if stamp == self.stamp:
            return False
        if self.source is not None:
            self.array = self.source.cached_data
            self.source.watched = True
            self.array._handle.watch()
            stamp = self._stamp()
        else:
            assert self.make is not None
            self.array = self.make(*(i.array for i in self.inputs)).compact()
        self.stamp = stamp
        return True


class ConstantPool:
    """Constants by key, in an order in which inputs come before what is derived from them; shared by all plans."""

    def __init__(self) -> None:
        self.constants: dict[Hashable, Constant] = {}

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

    def refresh(self) -> bool:
        changed = [c.refresh() for c in self.constants.values()]
        return any(changed)
