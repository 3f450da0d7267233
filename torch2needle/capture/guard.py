"""What capture must leave as it is: tensors, torch's names, random generators, other threads."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from needle.backend_ndarray.forks import CAPTURES, fork_lock

# torch.fx and torch.export change torch's modules while they capture: one capture at a time.
LOCK = fork_lock(CAPTURES, threading.RLock)
FACTORIES = ("zeros", "ones", "full", "empty", "arange", "eye", "linspace", "tensor", "scalar_tensor")
TYPED = type(torch.FloatTensor)  # the class of the types that name a dtype and a device

# -- state ---------------------------------------------------------------------------------------------------------------


class Writes(TorchDispatchMode):
    """Notes what torch writes that was there before, and takes it back; notes what draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()  # storages that came into being meanwhile
        self.alive: list[Any] = []  # so that their ids stay theirs
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.drawing: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, which takes a second, to leave this mode out of it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and draws(func, args, kwargs):
            self.drawing.append(func._schema.name.partition("::")[2])
        if func._schema.is_mutable:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            for a in func._schema.arguments:
                if a.alias_info is not None and a.alias_info.is_write:
                    for t in tree_leaves(given.get(a.name)):
                        self.note(t)
        result = func(*args, **kwargs)
        if not any(r.alias_info is not None for r in func._schema.returns):
            inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if has_storage(t)}
            for t in tree_leaves(result):
                if has_storage(t) and t.untyped_storage()._cdata not in inputs:
                    self.made.add(t.untyped_storage()._cdata)
        return result

    def note(self, t: Any) -> None:
        if has_storage(t):
            storage = t.untyped_storage()
            if storage._cdata not in self.made:
                self.before.setdefault(storage._cdata, (storage, storage.clone()))

    def undo(self) -> None:
        for storage, before in self.before.values():
            if storage.nbytes() == before.nbytes():
                storage.copy_(before)


def has_storage(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided and not isinstance(t, FakeTensor)


def draws(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Attention and dropout with probability zero or in evaluation mode draw nothing."""
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return bool(given.get("train", given.get("training", True))) and given.get("dropout_p", 1.0) != 0.0


def python_chance() -> tuple:
    """The states of Python's and numpy's generators."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), bytes(keys), rest  # type: ignore[arg-type]


@contextmanager
def same_chance() -> Iterator[None]:
    """The generators of torch, numpy and Python go on afterwards as if nothing had been."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    saved = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        np.random.set_state(saved[1])
        random.setstate(saved[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


# -- names -----------------------------------------------------------------------------------------------------------------


class TypeOf(type):
    """The metaclass of a stand-in for `type` that passes for it."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, type)


MISSING = object()


def put(place: Any, name: str, value: Any) -> None:
    """Set a name of a namespace or an attribute of a class, or take it out where the value is MISSING."""
    if value is MISSING:
        place.pop(name, None) if isinstance(place, dict) else delattr(place, name)
    elif not isinstance(place, dict):
        setattr(place, name, value)
    else:
        place[name] = value


@contextmanager
def patched(names: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give names of namespaces, and attributes that classes have, other values for a while."""
    saved = [(p, name, (p if isinstance(p, dict) else vars(p)).get(name, MISSING)) for p, name, _ in names]
    try:
        for place, name, value in names:
            put(place, name, value)
        yield
    finally:
        for place, name, before in reversed(saved):
            put(place, name, before)


def accepting_proxies(places: list[dict[str, Any]], tracer: Any) -> contextlib.AbstractContextManager:
    """Capture what fx cannot: torch.zeros, torch.fft and their like with sizes of proxies; `len` and what asks for types.

    places: the globals of the functions whose calls of these are meant. For other threads, and for whoever keeps such a
    function, it is the original.
    """

    def accept(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not tracer.tracing():
                return function(*args, **kwargs)
            found: list[Any] = []
            fx.node.map_aggregate((args, kwargs), lambda a: found.append(a) if isinstance(a, fx.Proxy) else None)  # type: ignore[arg-type]
            return tracer.create_proxy("call_function", function, args, kwargs) if found else function(*args, **kwargs)

        return call

    def length(own: Callable) -> Callable:  # of a list of proxies it is a number
        of_proxy = accept(own)
        return lambda value: (of_proxy if isinstance(value, fx.Proxy) else own)(value)

    class Type(type, metaclass=TypeOf):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            own = len(args) == 1 and not kwargs and isinstance(args[0], fx.Proxy) and tracer.tracing()
            return args[0].stands_for() if own else type(*args, **kwargs)

    def is_instance(value: Any, kinds: Any) -> bool:
        own = isinstance(value, fx.Proxy) and not isinstance(value, kinds) and tracer.tracing()
        if own and any(type(k) is TYPED for k in (kinds if isinstance(kinds, tuple) else (kinds,))):
            tracer.refuse("a tensor's dtype and device, by isinstance")
        return issubclass(value.stands_for(), kinds) if own else isinstance(value, kinds)

    def is_callable(value: Any) -> bool:
        own = isinstance(value, fx.Proxy) and tracer.tracing()
        return any("__call__" in vars(c) for c in value.stands_for().__mro__) if own else callable(value)

    def has_attribute(value: Any, name: str) -> bool:
        if isinstance(value, fx.Proxy) and tracer.tracing():
            tensor = value.tensor_of_model()  # type: ignore[attr-defined]
            value = value.stands_for() if tensor is None else tensor  # type: ignore[attr-defined]
        return hasattr(value, name)

    def is_tensor(value: Any) -> bool:
        return is_instance(value, torch.Tensor)

    sized = [(torch, n) for n in (*FACTORIES, "istft", "finfo", "iinfo")] + [
        (torch.fft, n) for n in torch.fft.__all__ if n != "Tensor"
    ]
    names: list[tuple[Any, str, Any]] = [(vars(place), n, accept(getattr(place, n))) for place, n in sized]
    names.append((vars(torch), "is_tensor", is_tensor))
    for place in places:
        names.append((place, "len", length(place.get("len", len))))
        asking = {"isinstance": is_instance, "type": Type, "callable": is_callable, "hasattr": has_attribute}
        names += [(place, n, f) for n, f in asking.items() if n not in place]
    return patched(names)


def own_gradients(note: Callable[[str], None]) -> contextlib.AbstractContextManager:
    """Calls `note` with the name of every user's autograd function that is applied."""

    def apply(before: Callable, cls: Any, *args: Any, **kwargs: Any) -> Any:
        note(cls.__name__)
        return before(*args, **kwargs)

    return function_applied_by(apply)


class Applied:
    """The code of `apply` where a call of ours takes its place."""

    def apply(cls, *args: Any, instead: Callable, **kwargs: Any) -> Any:
        __class__  # type: ignore[name-defined]  # noqa: B018 - a free name of torch's code: this has to have it, too
        return instead(cls, *args, **kwargs)


@contextlib.contextmanager
def function_applied_by(call: Callable) -> Iterator[None]:
    """`call(before, cls, *args)` applies autograd functions that are not torch's; `before(*args)` is what torch does.

    The code itself changes: most forwards have `apply` from before, `quantise = Quantise.apply`.
    """
    function, thread = vars(torch.autograd.Function)["apply"].__func__, threading.get_ident()
    before = types.FunctionType(function.__code__, function.__globals__, "apply", None, function.__closure__)
    before.__kwdefaults__ = function.__kwdefaults__

    def instead(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(before, cls)
        if cls.__module__.startswith("torch.") or threading.get_ident() != thread:
            return own(*args, **kwargs)
        return call(own, cls, *args, **kwargs)

    function.__kwdefaults__ = {"instead": instead}  # first: other threads call it meanwhile
    function.__code__ = Applied.apply.__code__
    try:
        yield
    finally:
        function.__code__ = before.__code__
        function.__kwdefaults__ = before.__kwdefaults__


def data_set_by(call: Callable[[torch.Tensor, torch.Tensor], Any]) -> contextlib.AbstractContextManager:
    """`call(t, value)` is what `t.data = value` does in code that is not torch's."""
    before: Any = vars(torch.Tensor).get("data", torch._C.TensorBase.data)
    thread = threading.get_ident()

    def put_data(self: torch.Tensor, value: torch.Tensor) -> None:
        torchs = sys._getframe(1).f_globals["__name__"].startswith("torch.")
        (before.__set__ if torchs or threading.get_ident() != thread else call)(self, value)

    return patched([(torch.Tensor, "data", property(before.__get__, put_data))])


def gradients_where_asked(call: Callable[[], Any]) -> Any:
    """What a call gives without gradients, or with them where the forward asks for some."""
    try:
        with torch.no_grad():
            return call()
    except RuntimeError as e:
        if "does not require grad" not in str(e):
            raise
    with torch.enable_grad():
        return call()


def inference_without_gradients() -> contextlib.AbstractContextManager:
    """`torch.inference_mode` is `torch.no_grad`, which torch.export follows."""

    def enter(self: Any) -> None:
        self.enabled = torch.is_grad_enabled()
        if self.mode:
            torch.set_grad_enabled(False)

    def leave(self: Any, *_: Any) -> None:
        torch.set_grad_enabled(self.enabled)

    return patched([(torch.inference_mode, "__enter__", enter), (torch.inference_mode, "__exit__", leave)])


def autocasts(note: Callable[[], None]) -> contextlib.AbstractContextManager:
    """Calls `note` where autocast is turned on."""
    before = torch.autocast.__enter__

    def enter(self: Any) -> Any:
        if self._enabled:
            note()
        return before(self)

    return patched([(torch.autocast, "__enter__", enter)])


def plain_conditions() -> contextlib.AbstractContextManager:
    """`torch.cond` is Python's `if`: torch's own compiles both functions, which it cannot while it is being watched."""

    def cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Any = ()) -> Any:
        return (true_fn if pred else false_fn)(*operands)

    return patched([(vars(torch), "cond", cond)])


def gradient_hooks(note: Callable[[str], None]) -> contextlib.AbstractContextManager:
    """Calls `note` with the name of every method that registers a hook on a tensor's gradient."""

    def noting(name: str) -> Callable:
        before = getattr(torch.Tensor, name)

        def register(self: torch.Tensor, hook: Callable) -> Any:
            note(name)
            return before(self, hook)

        return register

    names = ("register_hook", "register_post_accumulate_grad_hook")
    return patched([(torch.Tensor, name, noting(name)) for name in names])


def free_len(places: list[dict[str, Any]]) -> contextlib.AbstractContextManager:
    """`len(x)` of a tensor in functions of these globals is its free size; Python's must be a number."""
    thread = threading.get_ident()

    def free(value: Any) -> Any:
        mine = isinstance(value, torch.Tensor) and threading.get_ident() == thread
        return value.shape[0] if mine and value.ndim else len(value)

    return patched([(g, "len", free) for g in places if "len" not in g])


# -- what torch says ---------------------------------------------------------------------------------------------------------


class Quiet:
    """A stream that drops what one thread writes."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.thread else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of what torch.export says of an attempt, which prints graphs and logs its guesses, reaches the terminal."""
    thread = threading.get_ident()
    handlers = [
        h
        for n in list(logging.root.manager.loggerDict)
        if n.split(".")[0] == "torch"
        for h in logging.getLogger(n).handlers
    ]

    def other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    for h in handlers:
        h.addFilter(other)
    try:
        with contextlib.redirect_stderr(Quiet(sys.stderr)):
            yield
    finally:
        for h in handlers:
            h.removeFilter(other)
