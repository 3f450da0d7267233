"""Records an eager call op by op: which module it ran in, how long its kernel took, which bytes it touched."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from needle.backend_ndarray import NDArray
from needle.executor.memory import distinct_bytes
from needle.graph import GraphModule, Node
from needle.nn.module import Module
from needle.op import Op


class Call(NamedTuple):
    """One op of one run."""

    name: str
    op: str
    shape: tuple[int, ...]
    start: float
    seconds: float
    flops: int
    read: int
    written: int
    memory: int
    live: int


class Recorder:
    """The calls of the present run; `track` also follows which results are alive."""

    def __init__(self, model: Module) -> None:
        self.calls: list[Call] = []
        self.track = False
        self._paths = {id(m): p for p, m in model.named_modules()}
        self._where: list[str] = [""]
        self._live: dict[int, int] = {}  # id of the storage -> bytes
        self._thread = threading.get_ident()

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        self._where.append(path)
        try:
            yield
        finally:
            self._where.pop()

    def path_of(self, module: Module) -> str:
        return self._paths.get(id(module)) or self._where[-1]

    def node(self, node: Node) -> str:
        outer = self._where[-1]
        return f"{outer}.{node.name}" if outer else node.name

    def here(self) -> bool:
        return threading.get_ident() == self._thread

    def add(self, op: Op, inputs: Sequence[Any], result: Any, start: float, seconds: float) -> None:
        outs, *given = (a if isinstance(a, tuple) else (a,) for a in (result, *(t.cached_data for t in inputs)))
        ins = [a for arrays in given for a in arrays]
        fresh = [o for o in outs if not any(same_memory(o, i) for i in ins)]
        is_view = op.is_view and not fresh  # only the shape changed: no bytes moved
        memory = sum(nbytes(o) for o in fresh)
        if self.track:
            self._follow(fresh)
        facts = (0, 0, 0) if is_view else (op.flops(result, *ins), distinct_bytes(ins), distinct_bytes(outs))
        shape = tuple(outs[0].shape)
        live = sum(self._live.values())
        self.calls.append(Call(self._where[-1] or op.label, op.label, shape, start, seconds, *facts, memory, live))

    def _follow(self, arrays: Sequence[Any]) -> None:
        for a in arrays:
            storage = a if isinstance(a, np.ndarray) else a._handle
            self._live[id(storage)] = nbytes(a)
            weakref.finalize(storage, self._live.pop, id(storage), None)


def wait_for(out: Any) -> None:
    """Until a GPU has made an op's results; elsewhere they are there."""
    for a in out if isinstance(out, tuple) else (out,):
        if isinstance(a, NDArray) and a.device.core is not None:
            a.device.core.sync()


def nbytes(array: Any) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def same_memory(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.may_share_memory(a, b)
    return getattr(b, "_handle", None) is a._handle


@contextmanager
def recording(model: Module) -> Iterator[Recorder]:
    """Within it every op that this thread runs is recorded; other threads go on unrecorded."""
    recorder = Recorder(model)
    run, call, evaluate = Op._run, Module.__call__, GraphModule._evaluate

    def timed_run(self: Op, inputs: Sequence[Any]) -> Any:
        if not recorder.here():
            return run(self, inputs)
        start = time.perf_counter()
        out = run(self, inputs)
        wait_for(out)
        seconds = time.perf_counter() - start
        if out is not None:  # None: it has no kernel here, and the ops of its decomposition follow
            recorder.add(self, inputs, out, start, seconds)
        return out

    def named_call(self: Module, *args: Any, **kwargs: Any) -> Any:
        if not recorder.here():
            return call(self, *args, **kwargs)
        with recorder.at(recorder.path_of(self)):
            return call(self, *args, **kwargs)

    def named_node(self: GraphModule, node: Node, env: Any, inputs: Any) -> Any:
        if node.kind != "op" or not recorder.here():
            return evaluate(self, node, env, inputs)
        with recorder.at(recorder.node(node)):
            return evaluate(self, node, env, inputs)

    Op._run, Module.__call__, GraphModule._evaluate = timed_run, named_call, named_node  # type: ignore[method-assign]
    try:
        yield recorder
    finally:
        Op._run, Module.__call__, GraphModule._evaluate = run, call, evaluate  # type: ignore[method-assign]
