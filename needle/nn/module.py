"""Module: a tree of layers with named parameters and buffers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from needle.autograd import Tensor


class Parameter(Tensor):
    """A tensor that optimizers train."""


def find_recorder(values: Any) -> Any:
    """The recorder of the first symbol in nested arguments, or None."""
    for v in values.values() if isinstance(values, dict) else values:
        if isinstance(v, Tensor):
            if v.recorder is not None:
                return v.recorder
        elif isinstance(v, tuple | list | dict):
            found = find_recorder(v)
            if found is not None:
                return found
    return None


class Module:
    """Base of layers and models. Members that are modules, tensors, or nested lists, tuples and dicts of them, are found."""

    mode_dependent: ClassVar[bool] = False  # behaves differently in training
    container: ClassVar[bool] = False  # calls its children and nothing else: `symbolic` looks inside

    training = True
    _public: tuple[str, ...] = ()  # members whose names begin with an underscore, as some torch models have
    _config: dict[str, Any]  # the constructor's arguments by name: what `save` writes and `load` calls

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" not in cls.__dict__:
            return
        init, signature = cls.__init__, inspect.signature(cls.__init__)

        @functools.wraps(init)
        def wrapped(self: Module, *args: Any, **kwargs: Any) -> None:
            if "_config" not in self.__dict__:  # the outermost constructor: that of the object's own class
                bound = signature.bind(self, *args, **kwargs).arguments
                self._config = {k: v for k, v in bound.items() if k != "self"}
            init(self, *args, **kwargs)

        cls.__init__ = wrapped  # type: ignore[method-assign]

    def __init__(self) -> None:
        self.training = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"[{type(self).__name__}] defines no forward.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = find_recorder(args) or find_recorder(kwargs)
        if recorder is not None and id(self) in recorder.leaf_paths:
            return recorder.module(recorder.leaf_paths[id(self)], args, kwargs, self)
        return self.forward(*args, **kwargs)

    @property
    def is_leaf(self) -> bool:
        return type(self).__module__.startswith("needle.nn.") and not self.container

    # -- the tree ----------------------------------------------------------------------------------------------------

    def members(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of every module and tensor directly below, containers flattened as name.index."""

        def walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
            if isinstance(value, Module | Tensor):
                yield name, value
            elif isinstance(value, list | tuple):
                for i, v in enumerate(value):
                    yield from walk(f"{name}.{i}" if name else str(i), v)
            elif isinstance(value, dict):
                for k, v in value.items():
                    yield from walk(f"{name}.{k}" if name else str(k), v)

        for name, value in self.__dict__.items():
            if not name.startswith("_") or name in self._public:
                yield from walk(self.member_name(name), value)

    def member_name(self, attribute: str) -> str:
        """The name under which an attribute appears in paths."""
        return attribute

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((n, m) for n, m in self.members() if isinstance(m, Module))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Every module of the tree once, under its first path."""
        seen: set[int] = set()

        def walk(path: str, module: Module) -> Iterator[tuple[str, Module]]:
            if id(module) in seen:
                return
            seen.add(id(module))
            yield path, module
            for name, child in module.named_children():
                yield from walk(f"{path}.{name}" if path else name, child)

        return walk(prefix, self)

    def modules(self) -> Iterator[Module]:
        return (m for _, m in self.named_modules())

    def get_submodule(self, path: str) -> Module:
        module = self
        for part in split_path(module, path):
            module = part
        return module

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every path of a parameter or buffer; a tied tensor appears under each of its paths."""

        def walk(path: str, module: Module, above: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
            for name, value in module.members():
                full = f"{path}.{name}" if path else name
                if isinstance(value, Tensor):
                    yield full, value
                elif id(value) not in above:
                    yield from walk(full, value, (*above, id(value)))

        return walk("", self, (id(self),))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, under its first path."""
        seen: set[int] = set()
        for name, t in self.named_tensors():
            if isinstance(t, Parameter) and id(t) not in seen:
                seen.add(id(t))
                yield name, t

    def parameters(self) -> list[Parameter]:
        return [p for _, p in self.named_parameters()]

    def get_tensor(self, path: str) -> Tensor:
        for name, t in self.named_tensors():
            if name == path:
                return t
        raise KeyError(f"[module] there is no parameter or buffer named {path}.")

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by path; the values share memory with the module."""
        return {name: t.detach() for name, t in self.named_tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values (anything numpy reads) into the tensors of the same names; every name must match."""
        own = dict(self.named_tensors())
        problems = [f"missing {k}" for k in own if k not in state] + [f"unexpected {k}" for k in state if k not in own]
        arrays = {k: np.asarray(v.detach() if isinstance(v, Tensor) else v) for k, v in state.items() if k in own}
        problems += [
            f"{k} has shape {a.shape}, not {tuple(own[k].shape)}"
            for k, a in arrays.items()
            if a.shape != tuple(own[k].shape)
        ]
        if problems:
            raise ValueError(f"[load_state_dict] {len(problems)} names do not fit: {'; '.join(problems[:8])}.")
        for k, a in arrays.items():
            own[k].data = Tensor(a, device=own[k].device, dtype=own[k].dtype, requires_grad=False)

    def train(self, mode: bool = True) -> Module:
        for _, m in self.named_modules():  # `modules` is a list in Sequential
            m.training = mode
        return self

    def eval(self) -> Module:
        return self.train(False)

    def apply(self, f: Callable[[Module], Any]) -> Module:
        for _, m in self.named_modules():
            f(m)
        return self

    def extra_repr(self) -> str:
        return ""

    def __repr__(self) -> str:
        lines = [f"({n}): " + repr(c).replace("\n", "\n  ") for n, c in self.named_children()]
        if not lines:
            return f"{type(self).__name__}({self.extra_repr()})"
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"


def split_path(module: Module, path: str) -> Iterator[Module]:
    """The modules along a dotted path. A child's own name may hold dots (members of lists)."""
    while path:
        for name, child in module.named_children():
            if path == name or path.startswith(name + "."):
                module, path = child, path[len(name) + 1 :]
                yield module
                break
        else:
            raise KeyError(f"[module] there is no submodule named {path}.")


class Tree(Module):
    """A node of a submodule tree that has no forward of its own."""

    container = True


def set_submodule(root: Module, path: str, module: Module) -> None:
    """Put `module` at `path` below `root`, making Tree nodes on the way."""
    *parents, last = path.split(".")
    for part in parents:
        child = root.__dict__.get(part)
        if child is None:
            child = Tree()
            root.__dict__[part] = child
        root = child
    root.__dict__[last] = module
