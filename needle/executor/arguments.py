"""Arguments of executables: what a call's inputs are, and arrays that results may be written to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import numpy as np

from needle.autograd import Spec
from needle.backend_ndarray import FLOATS, NDArray, default_device
from needle.complex_numbers import Complex, is_complex, parts
from needle.graph import Graph, GraphModule
from needle.interop import as_ndarray, is_foreign_array
from needle.nn.module import Module

MOST_WORK = 10_000  # of comparing two strided arrays; beyond they count as overlapping


def check_model(model: Any) -> None:
    """Raise TypeError for what `compile` does not take."""
    if any(c.__module__.partition(".")[0] == "torch" for c in type(model).__mro__) and hasattr(model, "forward"):
        raise TypeError("[compile] expects a needle Module, got torch's; use torch2needle.compile(model, example).")
    if isinstance(model, type) or not callable(model) or hasattr(model, "run_into"):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"[compile] expects a Module or a function of tensors, got {what}.")


@contextmanager
def without_torch(label: str) -> Iterator[None]:
    """Says so where what the user's function raises comes of a call of torch with needle's tensors."""
    try:
        yield
    except (TypeError, AttributeError) as e:
        frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(e.__traceback__)]
        if frames[-1].partition(".")[0] != "torch" and "must be Tensor, not" not in str(e):
            raise
        raise TypeError(
            f"[{label}] expects functions of needle's tensors, got a call of torch ({e}); torch2needle.convert(function, "
            "example) makes one of a function or module of torch."
        ) from e


def positional(fn: Callable, args: tuple, kwargs: dict) -> tuple:
    """A call's arguments in the order of the function's parameters; raises TypeError for others."""
    forward = fn.forward if isinstance(fn, Module) else fn
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as e:
        raise TypeError(f"[executable] {e}.") from None
    except ValueError:  # a function of C that tells nothing
        bound = None
    if kwargs and (bound is None or bound.kwargs):
        raise TypeError(f"[executable] takes positional inputs only, got {next(iter(kwargs))}.")
    return args if bound is None else bound.args


def example_call(model: Any, example: Any) -> tuple:
    """The arguments of a call: of an example that is one input, a tuple of them, or a dict of a net's by name."""
    if isinstance(example, dict) and isinstance(model, GraphModule) and model.takes_by_name(example):
        return tuple(model.bind((), example))
    return example if isinstance(example, tuple) else (example,)


def check_arrays(specs: Sequence[Any]) -> None:
    """Raise TypeError for the first input that is no array, where a model failed on its inputs."""
    for i, s in enumerate(specs):
        if isinstance(s, Complex):
            raise TypeError(f"[executable] input {i} expects real numbers, got {s.dtype}.")
        if not isinstance(s, Spec):
            raise TypeError(
                f"[executable] input {i} expects an array, got {type(s).__name__}; pass numpy.asarray(x, 'float32')."
            )


def check_floats(graph: Graph, constant: set) -> None:
    """Raise TypeError where a layer of one float dtype reads another: torch refuses that, too."""
    for n in graph:
        if n.kind != "op" or n.target.mixes_floats:
            continue
        specs = [(a in constant, a.meta["spec"]) for a in n.args]
        given, weights = (
            [s.dtype for c, s in specs if c is fixed and isinstance(s, Spec) and s.dtype in FLOATS]
            for fixed in (False, True)
        )
        for weight in weights:
            if given and weight != given[0]:
                raise TypeError(
                    f"[compile] {n.target.label} has {weight} weights and reads {given[0]}; pass inputs of {weight} "
                    f"(x.astype('{weight}')), or call net.to('{given[0]}')."
                )


def as_targets(outs: Any, ins: Sequence[NDArray]) -> list[NDArray]:
    """Arrays over the memory of `outs`, for results: writable, each element once, apart from each other and from inputs."""
    targets = []
    given = outs if isinstance(outs, tuple | list) else (outs,)
    halves = [(parts(out).real, parts(out).imag) if is_complex(out) else (out,) for out in given]
    for i, out in enumerate(part for half in halves for part in half):
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ValueError(f"[run_into] output {i} is read-only.")
        if not is_foreign_array(out) and not isinstance(out, NDArray):
            raise TypeError(f"[run_into] output {i} expects an array, got {type(out).__name__}.")
        target = as_ndarray(out, copy=False)
        if overlaps_itself(target):
            raise ValueError(f"[run_into] output {i} has elements that share memory; pass an array of its own.")
        targets.append(target)
    for i, a in enumerate(targets):
        for kind, others in (("output", targets[:i]), ("input", ins)):
            for k, b in enumerate(others):
                if share_memory(a, b):
                    raise ValueError(f"[run_into] output {i} shares memory with {kind} {k}.")
    return targets


def overlaps_itself(array: NDArray) -> bool:
    """Whether two elements of an array may lie at one place."""
    reach = 0
    if not array.size:
        return False
    for stride, n in sorted((abs(s), n) for n, s in zip(array.shape, array.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def share_memory(a: NDArray, b: NDArray) -> bool:
    if a.device != b.device:
        return False
    if a.device != default_device():
        return a._handle is b._handle
    try:
        return bool(np.shares_memory(a.read(), b.read(), max_work=MOST_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def names(argument: str, given: Any) -> tuple[str, ...]:
    """An argument of `compile` that is a list of names."""
    if isinstance(given, str) or not all(isinstance(n, str) for n in given):
        raise TypeError(f"[compile] {argument} expects a list of names, got {given!r}.")
    return tuple(given)
