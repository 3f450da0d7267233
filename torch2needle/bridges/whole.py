"""`fallback="torch"` where no capture converts a model: a net whose one call is the model, which torch runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from needle.autograd import Unsupported
from needle.graph import Mode
from needle.graph.structure import is_record, members, record_of
from needle.nn.tree import Tree
from needle.serialize import DTYPES

from ..capture.behaviour import flat
from ..capture.calls import call_of, fresh
from ..capture.cells import Cell
from ..capture.guard import same_chance
from ..capture.interpret import plain
from ..capture.state import untouched
from ..capture.structure import classed, plain_result
from ..capture.tracing import Captured
from ..report import Row
from .fallback import Expression, FallbackInterpreter, TorchCall, tensors_of

WHOLE = "torch itself"  # how such a net was captured
WOULD = "torch would run it whole"


class WholeCall(TorchCall):
    """The call of a whole model, whose course and sizes values may decide."""

    counts = True
    takes_narrow = True  # the model gets numbers of its own dtypes

    def infer(self, *inputs: Any) -> None:
        return None


class Whole:
    """A model as a function of its mode, its tensors and the example's tensors: `count` results of dtypes that needle has."""

    def __init__(self, function: Callable, call: Any, own: list[torch.Tensor], count: int) -> None:
        self.function, self.call, self.count = function, call, count
        self.dtypes = [t.dtype for t in own]
        self.given: list[torch.dtype] = []
        plain(call, lambda v: self.given.append(v.dtype) if isinstance(v, torch.Tensor) else None)

    def __call__(self, training: bool, state: tuple, *inputs: torch.Tensor) -> list[torch.Tensor]:
        state = tuple(map(as_kind, state, self.dtypes))
        left = iter(map(as_kind, inputs, self.given))
        args, kwargs = plain(self.call, lambda v: next(left) if isinstance(v, torch.Tensor) else v)
        outs = [t for t in flat(plain_result(self.function(training, state, *args, **kwargs))) if t is not None]
        if len(outs) != self.count or not all(isinstance(t, torch.Tensor) for t in outs):
            raise ValueError(f"[convert] the model gave {self.count} tensors on the example, and other results now.")
        memory = {t.untyped_storage().data_ptr() for t in (*state, *inputs)}
        return [kept(t.clone() if t.untyped_storage().data_ptr() in memory else t) for t in outs]


def as_kind(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers as the model has them; real ones of 16 bits are computed in 32."""
    return t if dtype.is_floating_point or dtype.is_complex else t.to(dtype)


def has(dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in DTYPES.values()


def kept(t: torch.Tensor) -> torch.Tensor:
    """A result in a dtype that needle has."""
    return t if has(t.dtype) else t.float() if t.is_floating_point() else t.int()


class WholeInterpreter(FallbackInterpreter):
    """Of a graph with one call, of the model."""

    def __init__(self, *given: Any, result: Any, reason: str, **more: Any) -> None:
        super().__init__(*given, **more)
        self.result, self.reason = result, reason

    def call(self, node: fx.Node) -> Cell:
        model = self.captured.model
        function, (_, symbols) = self.module_call(node, ())
        value = plain_result(self.result)
        count = sum(t is not None for t in flat(value))
        whole = Whole(function, node.meta["call"], list(tensors_of(model).values()), count)
        name = type(model).__name__
        made, inputs = self.close(Expression(whole, (self.mode(), symbols, *self.resolve(node.args)), {}), name)
        call = WholeCall(made.text, made.expression, made.values, count)
        self.report.add(Row(name, "torch", 1, [""], place_of(model), self.reason))
        outs = call(*inputs)
        left = iter(outs if count > 1 else (outs,))
        structure = classed(value, self.result, lambda kind, args, kw: kind(*args) if args else record_of(kind, kw))
        return Cell(plain(structure, lambda v: None if v is None else next(left)))

    def mode(self) -> Mode:
        """The net's, which a layer beside the model's own follows."""
        root = self.builder.modules[id(self.captured.model)]
        name = next(n for i in range(1 << 30) if (n := f"mode_{i}") not in root.__dict__)
        flag = root.__dict__[name] = Tree()
        flag.training = root.training
        return Mode(flag, name)


def place_of(model: nn.Module) -> str:
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "unknown line"


def run_once(model: nn.Module, example: Any) -> Any:
    """The model's result on the example. Raises Unsupported for what a later call would not repeat."""
    if any(m.training != model.training for m in model.modules()):
        raise Unsupported(f"{WOULD}, in one mode, and here some modules are in training and some are not")
    if model.training:
        result_in(model, example, False)
    result = result_in(model, example, model.training)
    found = flat(plain_result(result))
    for t in found:
        if not isinstance(t, torch.Tensor | None) or (t is not None and t.is_complex()):
            what = "complex numbers" if isinstance(t, torch.Tensor) else f"a {type(t).__name__}"
            raise Unsupported(f"{WOULD}, but a result is {what}")
    if all(t is None for t in found):
        raise Unsupported(f"{WOULD}, but it has no result")
    return result


def result_in(model: nn.Module, example: Any, training: bool) -> Any:
    """The result in a mode, which leaves the model as it was. Statistics that training writes are written in training."""
    args, kwargs = fresh(call_of(example))
    held = list(model.buffers())
    given: list[torch.Tensor] = []
    plain((args, kwargs), lambda v: given.append(v) if isinstance(v, torch.Tensor) else None)
    with same_chance(), untouched(model) as state, torch.inference_mode(False), torch.no_grad():
        saved = [b.clone() for b in held]
        before = [t._version for t in (*held, *given)]
        model.train(training)
        try:
            result = model(*args, **kwargs)
        finally:
            changed = state.changed()
            written = [t for t, v in zip((*held, *given), before, strict=True) if t._version != v]
            for b, values in zip(held, saved, strict=True):
                if any(b is w for w in written):
                    b.copy_(values)
    if changed:
        raise Unsupported(f"{WOULD}, but the forward changes attributes of the model")
    if any(w is t for w in written for t in given):
        raise Unsupported(f"{WOULD}, but the forward writes its input in place")
    if written and not (training and all(has(t.dtype) for t in written)):
        mode = "in evaluation" if not training else "of a dtype that needle lacks"
        raise Unsupported(f"{WOULD}, but the forward writes a buffer {mode}")
    return result


def captured_whole(model: nn.Module, example: Any) -> Captured:
    """A graph with one call of the model, whose inputs are the tensors of the example."""
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise Unsupported(f"{WOULD}, which takes a model in Python, got TorchScript")
    signature = inspect.signature(model.forward)
    args, kwargs = call_of(example)
    bound = signature.bind(*args, **kwargs)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(signature.parameters[n].kind in several for n in bound.arguments):
        raise Unsupported(f"{WOULD}, but the forward takes as many inputs as a call gives")
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def enter(value: Any, place: tuple) -> None:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder("_".join(map(str, place)))
            node.meta |= {"place": place, "val": value}
            nodes.append(node)
        items = members(value) if is_record(value) else value
        if isinstance(items, dict):
            for k, v in items.items():
                enter(v, (*place, k))
        elif isinstance(items, tuple | list):
            for i, v in enumerate(items):
                enter(v, (*place, i))

    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        count = len(nodes)
        enter(value, (name,))
        arguments[name] = value if len(nodes) == count else None
    node = graph.create_node("call_module", "", tuple(nodes))
    node.meta["call"] = ((), dict(bound.arguments))
    graph.output(node)
    return Captured(graph, model, arguments=arguments)
