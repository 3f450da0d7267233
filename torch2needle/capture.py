"""FX capture of a torch module: leaf modules are those with a rule, and every node knows the user's line."""

from __future__ import annotations

import inspect
import operator
import os
import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from needle.autograd import Unsupported

from .registry import INPLACE_OPERATORS, find_module_rule, has_hooks
from .report import ConversionError, Report, Row

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
ASSERTS = {torch._assert}
FACTORIES = ("zeros", "ones", "full", "empty", "arange", "eye", "linspace", "tensor", "scalar_tensor")

STAND_IN = torch.empty(0)


@dataclass(frozen=True)
class TrainingFlag:
    """Stands for `self.training` of the module at `path` in a captured call."""

    path: str


@dataclass
class Captured:
    graph: fx.Graph
    model: nn.Module
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors that the forward made by itself
    notes: list[str] = field(default_factory=list)
    arguments: dict[str, Any] | None = None  # of a call: those that are no inputs with the values that capture fixed


def is_foreign(filename: str) -> bool:
    """Neither ours nor torch's: the line that a user would look at."""
    ours = os.path.dirname(filename) == os.path.dirname(__file__)
    return not filename.startswith((TORCH_FOLDER, "<")) and not ours


def user_location() -> str:
    frame = sys._getframe(1)
    while frame is not None and not is_foreign(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def node_location(node: fx.Node) -> str:
    """The user's file:line, from our tracer or from a GraphModule's recorded stack."""
    if "location" in node.meta:
        return node.meta["location"]
    found = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    found = [f for f in found if is_foreign(f[0])] or found
    return ":".join(found[-1]) if found else "unknown line"


def owner_path(node: fx.Node) -> str:
    """Path of the innermost module that makes the call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if node.op == "call_module":
        return str(node.target)
    return stack[-1][0] if stack else ""


class InplaceProxy(fx.Proxy):
    """A proxy on which `x += y` and `x[i] = y` are captured as what they are; fx would record a plain add."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _inplace(name: str) -> Callable:
    function = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in INPLACE_OPERATORS - {"setitem"}:
    setattr(InplaceProxy, f"__{_name}__", _inplace(_name))


class Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else arithmetic on a buffer would be frozen into a constant

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return find_module_rule(m) is not None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InplaceProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        arg = super().create_arg(a)
        if isinstance(a, torch.Tensor) and isinstance(arg, fx.Node):
            arg.meta["read"] = a, a._version
        return arg

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        """A tensor that the forward made by itself is a constant: it may not be written after a traced call read it."""
        graph = super().trace(*args, **kwargs)
        for node in graph.nodes:
            tensor, version = node.meta.pop("read", (None, None))
            if tensor is not None and tensor._version != version:
                raise Unsupported(
                    f"the forward writes a tensor of its own after the graph reads it, near {node_location(node)}"
                )
        return graph

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["location"] = user_location()
        return node

    def path_of_module(self, mod: nn.Module) -> str:
        """A container that the forward makes by itself, such as a slice of a Sequential, stands where it is called."""
        try:
            return super().path_of_module(mod)
        except NameError:
            if find_module_rule(mod) is not None:
                raise
            stack = list(self.module_stack.values())
            return stack[-1][0] if stack else ""

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """A module of torch's own that cannot be traced becomes a leaf, so that the report names it and goes on."""
        if not type(m).__module__.startswith("torch.nn.modules") or has_hooks(m):
            return super().call_module(m, forward, args, kwargs)
        before, stack = len(self.graph.nodes), dict(self.module_stack)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if any(not type(c).__module__.startswith("torch.nn.modules") for c in m.modules()):
                raise  # a container: the trouble is in the user's code below it
            self.module_stack.clear()
            self.module_stack.update(stack)
            for node in reversed(list(self.graph.nodes)[before:]):
                self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def foreign_globals(model: nn.Module) -> list[dict[str, Any]]:
    """The names that the forwards of the model see, torch's own left out."""
    foreign = [inspect.unwrap(type(m).forward) for m in model.modules() if not type(m).__module__.startswith("torch.")]
    return [f.__globals__ for f in foreign if hasattr(f, "__globals__")]


@contextmanager
def accepting_proxies(model: nn.Module, tracer: fx.Tracer) -> Iterator[None]:
    """Capture what fx cannot: torch.zeros and its like with sizes of proxies; `len` and `isinstance` in the model's forwards."""

    def accept(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            found: list[Any] = []
            fx.node.map_aggregate((args, kwargs), lambda a: found.append(a) if isinstance(a, fx.Proxy) else None)  # type: ignore[arg-type]
            return tracer.create_proxy("call_function", function, args, kwargs) if found else function(*args, **kwargs)

        return call

    def is_instance(value: Any, kinds: Any) -> bool:
        """A proxy passes for a tensor: the other branch would be captured in silence."""
        return isinstance(STAND_IN if isinstance(value, fx.Proxy) else value, kinds)

    places = {id(g): g for g in foreign_globals(model)}.values()
    made = [(vars(torch), name, accept(getattr(torch, name))) for name in FACTORIES]
    for place in places:
        made += [(place, "len", accept(place.get("len", len)))]
        made += [(place, "isinstance", is_instance)] if "isinstance" not in place else []
    saved = [(place, name, place.get(name)) for place, name, _ in made]
    try:
        for place, name, function in made:
            place[name] = function
        yield
    finally:
        for place, name, before in saved:
            if before is None:
                place.pop(name, None)
            else:
                place[name] = before


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back what tracing and mode switches change: flags, tensors that fx hangs on the root, caches of the forward."""
    kinds = (
        dict,
        OrderedDict,
        list,
        set,
    )  # a container that the forward fills stays the same object; frozen kinds are let be
    saved = [(m, dict(vars(m)), [(v, v.copy()) for v in vars(m).values() if type(v) in kinds]) for m in model.modules()]
    try:
        yield
    finally:
        for m, state, contents in saved:
            vars(m).clear()
            vars(m).update(state)
            for container, content in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def fixed_inputs(model: nn.Module, example: dict[str, Any]) -> dict[str, Any]:
    """Inputs that capture fixes: those left at their default, and examples that are no tensors."""
    fixed = {}
    for p in inspect.signature(model.forward).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.name in example:
            value = example[p.name]
            if isinstance(value, tuple | list | dict) and any(isinstance(v, torch.Tensor) for v in tree_leaves(value)):
                raise Unsupported(
                    f"[convert] input {p.name} holds tensors in a {type(value).__name__}; give each an input of its own."
                )
            if not isinstance(value, torch.Tensor):
                fixed[p.name] = value
        elif p.default is not p.empty:
            fixed[p.name] = p.default
    return fixed


def trace(model: nn.Module, fixed: dict[str, Any], training: bool | None) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """The fx graph with every module in one mode (None: as they are), and the tensors that the forward made itself."""
    with untouched(model):
        if training is not None:
            for m in model.modules():
                m.training = training
        before = set(vars(model))
        tracer = Tracer()
        with accepting_proxies(model, tracer):
            graph = tracer.trace(model, concrete_args=fixed or None)
        constants = {k: v for k, v in vars(model).items() if k not in before and isinstance(v, torch.Tensor)}
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target).startswith("*") and not node.users:
            graph.erase_node(node)
    drop_assertions(graph, set(inspect.signature(model.forward).parameters) - set(fixed))
    return graph, constants


def drop_assertions(graph: fx.Graph, inputs: set[str] | None) -> None:
    """Erase assertions on values, what only they read, and placeholders that are not among `inputs`: those are fixed."""
    for node in reversed(list(graph.nodes)):
        dead = node.op == "placeholder" and inputs is not None and str(node.target).lstrip("*") not in inputs
        if node.op == "call_function" and (
            node.target in ASSERTS or getattr(node.target, "__name__", "") == "_assert_is_none"
        ):
            dead = True
        only_asserted = "asserted" in node.meta and not node.users
        if dead or only_asserted:
            for i in node.all_input_nodes:
                if i.op != "placeholder":
                    i.meta["asserted"] = True
            graph.erase_node(node)


class Differ(Exception):
    """Training and evaluation run different graphs."""


def mark_flags(base: Any, train: Any, evaluate: Any, path: str) -> Any:
    """`base` with a TrainingFlag wherever the two captures have True in training and False in evaluation."""
    if isinstance(train, tuple | list) and type(train) is type(evaluate) and len(train) == len(evaluate) == len(base):
        return type(train)(mark_flags(b, t, e, path) for b, t, e in zip(base, train, evaluate, strict=True))
    if isinstance(train, dict) and isinstance(evaluate, dict) and train.keys() == evaluate.keys() == base.keys():
        return {k: mark_flags(base[k], train[k], evaluate[k], path) for k in train}
    if isinstance(train, fx.Node) and isinstance(evaluate, fx.Node):
        same = train.name == evaluate.name == getattr(base, "name", None)
    elif train is True and evaluate is False:
        return TrainingFlag(path)
    else:
        same = type(train) is type(evaluate) and (repr(train) == repr(evaluate) == repr(base))
    if not same:
        raise Differ
    return base


def flags_in_both_modes(graph: fx.Graph, train: fx.Graph, evaluate: fx.Graph) -> None:
    """Mark the training flags of `graph`, or raise Differ and leave it as it is."""
    if not len(graph.nodes) == len(train.nodes) == len(evaluate.nodes):
        raise Differ
    marked = []
    for b, t, e in zip(graph.nodes, train.nodes, evaluate.nodes, strict=True):
        if not (b.op, b.target) == (t.op, t.target) == (e.op, e.target):
            raise Differ
        marked.append(
            (
                b,
                *(
                    mark_flags(*args, owner_path(b))
                    for args in ((b.args, t.args, e.args), (b.kwargs, t.kwargs, e.kwargs))
                ),
            )
        )
    for node, args, kwargs in marked:
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs


def capture(model: Any, example: dict[str, Any]) -> Captured:
    """The fx graph of a module, with training flags marked; a GraphModule is taken as it is."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"[convert] expects an nn.Module, fx.GraphModule or ExportedProgram, got {type(model).__name__}."
        )
    if isinstance(model, fx.GraphModule):
        graph = fx.Graph(tracer_cls=None)
        graph.output(graph.graph_copy(model.graph, {}))
        drop_assertions(graph, None)
        return Captured(graph, model)
    fixed = fixed_inputs(model, example)
    modes = {m.training for m in model.modules()}
    mode = modes.pop() if len(modes) == 1 else None
    try:
        graph, constants = trace(model, fixed, mode)
        captured = Captured(graph, model, constants)
    except Exception as e:
        raise capture_error(model, e) from e
    captured.notes += [
        f"input {k} is fixed to {v!r}; pass example= with it to make it an input" for k, v in fixed.items()
    ]
    try:
        both = [graph if m is mode else trace(model, fixed, m)[0] for m in (True, False)]
        flags_in_both_modes(graph, both[0], both[1])
    except Exception:  # also when only one mode can be traced, such as one with an auxiliary loss
        how = "as its modules' flags are" if mode is None else "in training mode" if mode else "in evaluation mode"
        captured.notes.append(f"the graph differs between training and evaluation; it was captured {how} and stays so")
    return captured


def capture_error(model: nn.Module, e: Exception, how: str = "torch.fx") -> ConversionError:
    """A report with the user's line at which capture ended."""
    frames = [
        f for f in traceback.extract_tb(e.__traceback__) if is_foreign(f.filename) and "torch2needle" not in f.filename
    ]
    location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"
    text = str(e).split("\n")[0].rstrip(".")
    if isinstance(e, torch.fx.proxy.TraceError):
        text = f"the forward's control flow depends on a tensor's value or size ({text})"
    report = Report()
    report.add(Row(f"{how} capture", "unsupported", 1, [type(model).__name__], location, text))
    return ConversionError(report)
