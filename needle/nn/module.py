"""Module: a tree of layers with named parameters and buffers."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from needle import _core
from needle.autograd import Tensor
from needle.backend_ndarray import Device, cpu, cuda
from needle.init import DRAWING, zeros_like
from needle.op import kind_of

from .arguments import Check, check_arguments, checks_of
from .state import Difference, copy_state, move

__all__ = ["Module", "Parameter"]

OWN = ("needle.nn.", "needle.course.")  # where needle's own layers are
HOOKS = ("_hooks", "_pre_hooks")
BOOKKEEPING = (*HOOKS, "_config", "_public", "_transient", "_modules", "_tensors", "_last_use", "_watched", "_found_at")


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
    _transient: tuple[str, ...] = ()  # buffers that `state_dict` leaves out
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

    def _named_once(self, parameters: bool, recurse: bool) -> Iterator[tuple[str, Any]]:
        """Every parameter, or every other tensor, under its first path; of the module alone unless `recurse`."""
        seen: set[int] = set()
        for name, t in self.named_tensors() if recurse else self.members():
            if isinstance(t, Tensor) and isinstance(t, Parameter) == parameters and id(t) not in seen:
                seen.add(id(t))
                yield name, t

    def persistent_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """`named_tensors` without the buffers that `register_buffer` was told to leave out of `state_dict`."""
        left = {id(m.__dict__.get(name)) for _, m in self.named_modules() for name in m._transient}
        return ((name, t) for name, t in self.named_tensors() if id(t) not in left)

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, under its first path; those of the module alone unless `recurse`."""
        return self._named_once(True, recurse)

    def parameters(self, recurse: bool = True) -> list[Parameter]:
        return [p for _, p in self.named_parameters(recurse)]

    def reset_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, which else add up; or make them zeros."""
        reset_gradients(self.parameters(), set_to_none)

    zero_grad = reset_grad

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """Whether `backward` gives the parameters a gradient; returns the module."""
        for p in self.parameters():
            p.requires_grad = requires_grad
        return self

    def named_buffers(self, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is no parameter once, under its first path; those of the module alone unless `recurse`."""
        return self._named_once(False, recurse)

    def buffers(self, recurse: bool = True) -> list[Tensor]:
        return [t for _, t in self.named_buffers(recurse)]

    def get_tensor(self, path: str) -> Tensor:
        return tensor_at(self, path, "parameter or buffer", lambda t: True)

    def get_parameter(self, path: str) -> Any:
        return tensor_at(self, path, "parameter", is_parameter)

    def get_buffer(self, path: str) -> Tensor:
        return tensor_at(self, path, "buffer", is_buffer)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Keep a parameter, or none, under a name, as an assignment does."""
        register(self, name, param, "parameter", is_parameter)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Keep a tensor that is not trained under a name, as an assignment does; persistent=False: not in `state_dict`."""
        register(self, name, tensor, "tensor that is no parameter", is_buffer)
        if tensor is not None:
            tensor.requires_grad = False
        self._transient = (*(n for n in self._transient if n != name), *(() if persistent else (name,)))

    def register_module(self, name: str, module: Module | None) -> None:
        """Keep a module, or none, under a name, as an assignment does."""
        register(self, name, module, "module", lambda m: isinstance(m, Module))

    add_module = register_module

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by path; the values share memory with the module."""
        return {name: t.detach() for name, t in self.persistent_tensors()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Difference:
        """Copy values (arrays of any library, on any device) into the tensors of the same names.

        Raises ValueError, before anything is copied, for shapes that differ and, if strict, for names that only one side
        has; otherwise those are returned.
        """
        return copy_state(self, state, strict)

    def _constants(self) -> list[Tensor]:
        """Tensors that a graph holds beside parameters and buffers."""
        return []

    def to(self, *targets: Device | str | Tensor, device: Device | None = None, dtype: str | None = None) -> Module:
        """Move parameters, buffers and gradients to a device, or cast the floating ones to a dtype, or both; in place."""
        move(self, targets, device, dtype)
        return self

    def cpu(self) -> Module:
        return self.to(cpu())

    def cuda(self) -> Module:
        return self.to(cuda())

    def float(self) -> Module:
        """Floating parameters, buffers and gradients as float32."""
        return self.to("float32")

    def double(self) -> Module:
        """Those as float64."""
        return self.to("float64")

    def half(self) -> Module:
        """Those as float16."""
        return self.to("float16")

    def bfloat16(self) -> Module:
        """Those as bfloat16."""
        return self.to("bfloat16")

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


def is_parameter(t: Any) -> bool:
    return isinstance(t, Parameter)


def is_buffer(t: Any) -> bool:
    return isinstance(t, Tensor) and not isinstance(t, Parameter)


def tensor_at(module: Module, path: str, what: str, fits: Callable[[Tensor], bool]) -> Tensor:
    for name, t in module.named_tensors():
        if name == path and fits(t):
            return t
    raise KeyError(f"[module] there is no {what} named {path}.")


def register(module: Module, name: str, value: Any, what: str, fits: Callable[[Any], bool]) -> None:
    """Set a member whose name is free, or another member's."""
    label, held = type(module).__name__, module.__dict__
    if value is not None and not fits(value):
        raise TypeError(f"[{label}] {name} expects a {what} or None, got {kind_of(value)}.")
    if not name or "." in name:
        raise KeyError(f"[{label}] expects names without dots for members, got {name!r}.")
    if not isinstance(held[name], Module | Tensor | None) if name in held else hasattr(module, name):
        raise KeyError(f"[{label}] has another attribute named {name}.")
    setattr(module, name, value)
    expose(module, name)
