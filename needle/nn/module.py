"""Module: a tree of layers with named parameters and buffers."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from needle import _core
from needle.autograd import Tensor, as_data
from needle.backend_ndarray import Device
from needle.backend_ndarray.functions import numpy_of
from needle.init import DRAWING, zeros_like
from needle.op import kind_of

from .arguments import Check, check_arguments, checks_of

__all__ = ["Module", "Parameter"]

OWN = ("needle.nn.", "needle.course.")  # where needle's own layers are
HOOKS = ("_hooks", "_pre_hooks")
BOOKKEEPING = (*HOOKS, "_config", "_public", "_modules", "_tensors", "_last_use", "_watched", "_found_at")
MAX_LINES = 20  # of the names in one message
FLOATING = ("float16", "bfloat16", "float32", "float64")


class Structure:
    """How often attributes of modules were set that someone watches, and how often members among them."""

    changes = members = 0

    def changed(self, *values: Any) -> None:
        self.changes += 1
        self.members += any(isinstance(v, Module | Tensor | list | tuple | dict) for v in values)
        _core.bump_epoch()


STRUCTURE = Structure()


class Parameter(Tensor):
    """A tensor that optimizers train. Its gradients add up, from one `backward` to the next, until they are reset."""

    rule = "needle"  # whose rules and defaults optimizers take for it; "torch" where a model was converted

    def __init__(self, array: Any, *, requires_grad: bool = True, **options: Any) -> None:
        if DRAWING.off and isinstance(array, Tensor):
            self._init(array.cached_data, None, (), requires_grad)
        else:
            super().__init__(array, requires_grad=requires_grad, **options)

    def keep_gradient(self, gradient: Tensor) -> None:
        held = self.grad
        if held is not None:  # the sum is a constant: it would keep the values of every batch
            if (held.shape, held.dtype, held.device) != (gradient.shape, gradient.dtype, gradient.device):
                raise ValueError(
                    f"[backward] expects to add {gradient.dtype} {gradient.shape} to the gradient that a parameter has, "
                    f"got {held.dtype} {held.shape}; reset_grad() forgets it."
                )
            gradient = held.detach() + gradient.detach()
        self._grad = gradient


def reset_gradients(parameters: Iterable[Tensor], set_to_none: bool = True) -> None:
    """Forget the gradients, or make those that there are zeros."""
    for p in parameters:
        p.grad = None if set_to_none or p.grad is None else zeros_like(p, requires_grad=False)


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


class Difference(NamedTuple):
    """How names given to `load_state_dict` differ from a module's own."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class HookHandle:
    """What registering a hook returns; `remove` takes the hook off again."""

    count = itertools.count()

    def __init__(self, hooks: dict[int, Callable], hook: Callable) -> None:
        self._hooks, self._key = hooks, next(self.count)
        hooks[self._key] = hook
        STRUCTURE.changed()

    def remove(self) -> None:
        self._hooks.pop(self._key, None)
        STRUCTURE.changed()


class Module:
    """Base of layers and models. Members that are modules, tensors, or nested lists, tuples and dicts of them, are found.

    Every constructor takes `device` and `dtype`, which say where and how its tensors are made, if it has any.
    """

    mode_dependent: ClassVar[bool] = False  # behaves differently in training
    container: ClassVar[bool] = False  # calls its children and nothing else: `symbolic` looks inside

    training = True
    _watched = False  # an executable, or a graph, has looked at its attributes
    _public: tuple[str, ...] = ()  # members whose names begin with an underscore, as some torch models have
    arguments: ClassVar[Mapping[str, Check]] = {}  # what its constructor takes, where that is not CHECKS
    _config: Mapping[str, Any] = {}  # the constructor's arguments by name: what `save` writes and `load` calls
    _hooks: Mapping[int, Callable] = {}
    _pre_hooks: Mapping[int, Callable] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" not in cls.__dict__:
            return
        init, signature = cls.__init__, inspect.signature(cls.__init__)
        checks = checks_of(cls, signature) if cls.__module__.startswith(OWN) else {}

        @functools.wraps(init)
        def wrapped(self: Module, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            check_arguments(type(self).__name__, checks, bound.arguments)
            if "_config" not in self.__dict__:  # the outermost constructor: that of the object's own class
                # The device is where the layer was made, not part of what it is.
                self._config = {k: v for k, v in bound.arguments.items() if k not in ("self", "device")}
            init(*bound.args, **bound.kwargs)

        cls.__init__ = wrapped  # type: ignore[method-assign]

    def __init__(self, device: Device | None = None, dtype: str = "float32") -> None:
        self.training = True

    def __setattr__(self, name: str, value: Any) -> None:
        # Programs keep layers under names such as `_body`, too; in needle's own classes such names are private.
        if name[0] == "_" and self.is_seen(name) and isinstance(value, Module | Parameter | list | tuple | dict):
            expose(self, name)
        if self._watched and self.__dict__.get(name, self) is not value and self.is_seen(name):
            STRUCTURE.changed(value, self.__dict__.get(name))
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self._watched:
            STRUCTURE.changed(self.__dict__.get(name))
        object.__delattr__(self, name)

    def is_seen(self, name: str) -> bool:
        """Whether an attribute is part of what the module is: all but needle's own private ones."""
        if name[0] != "_":
            return True
        return name not in BOOKKEEPING and type(self).__module__.partition(".")[0] != __name__.partition(".")[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"[{type(self).__name__}] defines no forward.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = find_recorder(args) or find_recorder(kwargs)
        if recorder is not None:
            recorder.modules[id(self)] = self
        if recorder is not None and id(self) in recorder.leaf_paths:
            return recorder.module(recorder.leaf_paths[id(self)], args, kwargs, self)
        if not self.has_hooks:
            try:
                return self.forward(*args, **kwargs)
            except AttributeError:
                if self.is_leaf and args and not isinstance(args[0], Tensor | tuple | list):
                    raise TypeError(f"[{type(self).__name__}] expects a Tensor, got {kind_of(args[0])}.") from None
                raise
        for hook in list(self._pre_hooks.values()):
            changed = hook(self, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        out = self.forward(*args, **kwargs)
        for hook in list(self._hooks.values()):
            changed = hook(self, args, out)
            out = out if changed is None else changed
        return out

    def register_forward_pre_hook(self, hook: Callable) -> HookHandle:
        """Call hook(module, args) before every forward; unless it returns None, its result takes the place of args."""
        return HookHandle(self.__dict__.setdefault("_pre_hooks", {}), hook)

    def register_forward_hook(self, hook: Callable) -> HookHandle:
        """Call hook(module, args, output) after every forward; unless it returns None, its result is the output."""
        return HookHandle(self.__dict__.setdefault("_hooks", {}), hook)

    @property
    def has_hooks(self) -> bool:
        return bool(self._hooks or self._pre_hooks)

    @property
    def is_leaf(self) -> bool:
        return type(self).__module__.startswith(OWN) and not self.container

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

    def children(self) -> Iterator[Module]:
        return (m for _, m in self.named_children())

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

    def _named_once(self, parameters: bool) -> Iterator[tuple[str, Any]]:
        """Every parameter, or every other tensor, under its first path."""
        seen: set[int] = set()
        for name, t in self.named_tensors():
            if isinstance(t, Parameter) == parameters and id(t) not in seen:
                seen.add(id(t))
                yield name, t

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, under its first path."""
        return self._named_once(True)

    def parameters(self) -> list[Parameter]:
        return [p for _, p in self.named_parameters()]

    def reset_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, which else add up; or make them zeros."""
        reset_gradients(self.parameters(), set_to_none)

    zero_grad = reset_grad

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """Whether `backward` gives the parameters a gradient; returns the module."""
        for p in self.parameters():
            p.requires_grad = requires_grad
        return self

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is no parameter once, under its first path."""
        return self._named_once(False)

    def buffers(self) -> list[Tensor]:
        return [t for _, t in self.named_buffers()]

    def get_tensor(self, path: str) -> Tensor:
        for name, t in self.named_tensors():
            if name == path:
                return t
        raise KeyError(f"[module] there is no parameter or buffer named {path}.")

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by path; the values share memory with the module."""
        return {name: t.detach() for name, t in self.named_tensors()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Difference:
        """Copy values (arrays of any library, on any device) into the tensors of the same names.

        Raises ValueError, before anything is copied, for shapes that differ and, if strict, for names that only one side
        has; otherwise those are returned.
        """
        own = dict(self.named_tensors())
        arrays = {k: numpy_of(v) for k, v in state.items()}
        for k, a in arrays.items():
            if a.dtype.kind == "c" and k in own and own[k].of_pairs:
                arrays[k] = np.stack([a.real, a.imag], -1)
        diff = Difference([k for k in own if k not in arrays], [k for k in arrays if k not in own])
        wrong = [k for k, a in arrays.items() if k in own and a.shape != tuple(own[k].shape)]
        problems = [f"shape       {k} is {tuple(own[k].shape)}, got {arrays[k].shape}" for k in wrong]
        problems += [
            f"dtype       {k} is {own[k].dtype}, got {a.dtype}"
            for k, a in arrays.items()
            if k in own and a.dtype.kind == "c"
        ]
        if strict:
            problems += [f"missing     {k} {tuple(own[k].shape)}" for k in diff.missing_keys]
            problems += [f"unexpected  {k} {arrays[k].shape}" for k in diff.unexpected_keys]
        if problems:
            rest = [f"and {len(problems) - MAX_LINES} more"] if len(problems) > MAX_LINES else []
            lines = "".join(f"\n  {p}" for p in (*problems[:MAX_LINES], *rest))
            count = len(own.keys() | arrays.keys())
            raise ValueError(
                f"[load_state_dict] {len(problems)} of {count} names do not fit {type(self).__name__}:{lines}"
            )
        for k, a in arrays.items():
            if k in own:
                own[k].data = Tensor(a, device=own[k].device, dtype=own[k].dtype, requires_grad=False)
        return diff

    def _constants(self) -> list[Tensor]:
        """Tensors that a graph holds beside parameters and buffers."""
        return []

    def to(self, *targets: Device | str, device: Device | None = None, dtype: str | None = None) -> Module:
        """Move parameters, buffers and gradients to a device, or cast the floating ones to a dtype, or both; in place."""
        for target in targets:
            if isinstance(target, Device):
                device = target
            elif isinstance(target, str):
                dtype = target
            else:
                raise TypeError(f"[to] expects a device or the name of a dtype, got {type(target).__name__}.")
        if dtype not in (None, *FLOATING):
            raise ValueError(f"[to] dtype expects one of {', '.join(FLOATING)}, got {dtype}.")
        if device is not None:
            device.require()

        def move(t: Tensor) -> None:
            wanted = dtype if t.dtype in FLOATING else None
            if device in (None, t.device) and wanted in (None, t.dtype):
                return
            t.cached_data = as_data(t, device or t.device, wanted or t.dtype)
            t.touch()

        constants = [t for _, m in self.named_modules() for t in m._constants()]
        for t in [*(t for _, t in self.named_tensors()), *constants]:
            move(t)
            if t.grad is not None:
                t.grad = t.grad.detach()
                move(t.grad)
        return self

    def train(self, mode: bool = True) -> Module:
        for _, m in self.named_modules():  # `modules` is a list in Sequential
            m.training = mode
        return self

    def check_evaluation(self, label: str) -> None:
        """Raise ValueError where layers are in training mode that do something else in evaluation."""
        training = [p or type(m).__name__ for p, m in self.named_modules() if m.mode_dependent and m.training]
        if training:
            raise ValueError(
                f"[{label}] {len(training)} modules are in training mode (first: {training[0]}); call net.eval()."
            )

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
        extra = self.extra_repr()
        if not lines:
            return f"{type(self).__name__}({extra})"
        return f"{type(self).__name__}(\n  " + "\n  ".join([extra] * bool(extra) + lines) + "\n)"


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


def expose(module: Module, name: str) -> None:
    """Make a member whose name begins with an underscore one that is found."""
    if name.startswith("_"):
        module._public = tuple(dict.fromkeys((*module._public, name)))


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
            expose(root, part)
            root.__dict__[part] = child
        root = child
    expose(root, last)
    root.__dict__[last] = module
    STRUCTURE.changed(module)
