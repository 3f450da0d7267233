"""FX capture of a torch module: leaf modules are those with a rule, and every node knows the user's line."""

from __future__ import annotations

import functools
import inspect
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from needle.autograd import Unsupported
from needle.graph.structure import is_record, members

from ..report import ConversionError, Report, Row, reason_of
from ..rules.aten import stop_gradient
from ..rules.registry import find_function_rule, find_module_rule, has_hooks, is_more_than_its_class
from .flags import Differ, flags_in_both_modes, follow_training, join_counts
from .guard import Writes, accepting_proxies, data_set_by, own_gradients, patched, python_chance
from .nodes import asker, checks_rank, node_location, user_location, written
from .numbers import open_in
from .proxies import InplaceProxy, is_foreign, kind_of
from .state import untouched
from .surroundings import Surroundings, globals_seen, uncached

ASSERTS = {torch._assert, torch._assert_async}

DIFFERS = "the graph differs between training and evaluation"


@dataclass
class Captured:
    graph: fx.Graph
    model: nn.Module
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors that the forward made by itself
    notes: list[str] = field(default_factory=list)
    arguments: dict[str, Any] | None = None  # of a call: those that are no inputs with the values that capture fixed
    chooses: bool | frozenset[int] = False  # computes branches that the model leaves out, with these parameters or any
    only: bool | None = None  # the one mode of training that it holds for, None where both
    settled: frozenset[str] = frozenset()  # parameters that it writes, and would not change again


class Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else arithmetic on a buffer would be frozen into a constant

    def __init__(self) -> None:
        super().__init__()
        self.thread, self.refused, self.busy = threading.get_ident(), list[str](), False
        # The globals of functions in which int and float leave sizes what they are, by id.
        self.open: dict[int, dict[str, Any]] = {}

    def tracing(self) -> bool:
        """Whether the caller is the forward under capture, and no other thread or torch at work for the capture."""
        return self.thread == threading.get_ident() and not self.busy

    def refuse(self, what: str) -> Any:
        """Ends the capture, also where the user's code that asked catches what is raised here."""
        if is_foreign(asker()):
            self.refused.append(f"{what}, at {user_location()}")
        raise fx.proxy.TraceError(f"the forward asks for {what}")

    def to_bool(self, obj: fx.Proxy) -> bool:
        if checks_rank():
            for node in (obj.node, *obj.node.all_input_nodes):
                self.graph.erase_node(node)
            return False
        return self.refuse("the truth of a traced value")

    def iter(self, obj: fx.Proxy) -> Any:
        return self.refuse("the length of a traced value")

    def keys(self, obj: fx.Proxy) -> Any:
        return self.refuse("the keys of a traced value")

    def length(self, obj: fx.Proxy) -> int:
        return self.refuse("the length of a traced value")

    def number(self, obj: fx.Proxy) -> float:
        return self.refuse("the value of a tensor")

    def plain(self, obj: fx.Proxy, frame: FrameType) -> float:
        """`int(obj)` or `float(obj)` in a frame."""
        return self.number(obj)

    def type_of(self, obj: fx.Proxy) -> Any:
        return self.refuse("the type of a value")

    def device(self, obj: fx.Proxy) -> Any:
        """The device that a value is, None where it is not known."""

    def dtype(self, obj: fx.Proxy) -> Any:
        """That of a tensor, None where it is not known."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return find_module_rule(m) is not None and self.holds(m)

    def holds(self, m: nn.Module) -> bool:
        """Whether a module is the model's, and none that the forward made, such as a loss."""
        return m in (self.submodule_paths or {})

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InplaceProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not self.tracing() or not isinstance(attr_val, torch.Tensor):
            return attr_val
        name, tensor = self.names.get(id(attr_val), ("", None))
        if tensor is not attr_val:  # which the forward hung there
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    @functools.cached_property
    def names(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Of the root's parameters and buffers, in whose list torch.fx looks each one up, by id."""
        return {id(t): (n, t) for n, t in (*self.root.named_parameters(), *self.root.named_buffers())}

    def create_arg(self, a: Any) -> Any:
        if is_record(a):  # torch.fx leaves out what a class hangs on its instances
            values = {k: self.create_arg(v) for k, v in members(a).items()}
            return self.create_node("call_function", type(a), (), values)
        arg = super().create_arg(a)
        if isinstance(a, torch.Tensor) and isinstance(arg, fx.Node) and not a.is_inference():
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
        node.meta["no_grad"] = not torch.is_grad_enabled()
        node.meta["kind"] = kind_of(node, self.root)
        return node

    def path_of_module(self, mod: nn.Module) -> str:
        """A module that the forward makes by itself, such as a slice of a Sequential or a loss, stands where it is called."""
        try:
            return super().path_of_module(mod)
        except NameError:
            stack = list(self.module_stack.values())
            return stack[-1][0] if stack else ""

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """A module of torch's own that cannot be traced becomes a leaf, so that the report names it and goes on."""
        if not self.tracing():
            return forward(*args, **kwargs)
        if not type(m).__module__.startswith("torch.nn.modules") or has_hooks(m):
            return super().call_module(m, forward, args, kwargs)
        before, stack, refused = len(self.graph.nodes), dict(self.module_stack), len(self.refused)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if not self.holds(m) or any(not type(c).__module__.startswith("torch.nn.modules") for c in m.modules()):
                raise  # a container: the trouble is in the user's code below it
            self.module_stack.clear()
            self.module_stack.update(stack)
            del self.refused[refused:]
            for node in reversed(list(self.graph.nodes)[before:]):
                self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


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


def trace(
    model: nn.Module, fixed: dict[str, Any], training: bool | None, tracer: Callable[[], Tracer], judged: bool
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """The fx graph with every module in one mode (None: as they are), and the tensors that the forward made itself."""
    writes = Writes()
    with untouched(model) as state, torch.inference_mode(False), torch.enable_grad():
        if training is not None:
            for m in model.modules():
                m.training = training
        before, chance = set(vars(model)), python_chance()
        try:
            with writes:
                graph = symbolic(model, fixed, tracer())
                constants = {k: v for k, v in vars(model).items() if k not in before and isinstance(v, torch.Tensor)}
                if writes.drawing or python_chance() != chance:
                    name = writes.drawing[0] if writes.drawing else "Python's or numpy's random"
                    raise Unsupported(f"the forward draws random numbers ({name}), which capture would freeze")
                if writes.before:
                    raise Unsupported("the forward writes a tensor that is neither input, parameter nor buffer")
                if state.changed() and not judged:
                    flags_in_both_modes(graph, graph, symbolic(model, fixed, tracer()))
        except Differ:
            raise Unsupported("the forward changes an attribute of the model on which its next call depends") from None
        finally:
            writes.undo()
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target).startswith("*") and not node.users:
            graph.erase_node(node)
    drop_assertions(graph, set(inspect.signature(model.forward).parameters) - set(fixed))
    stop_gradients(graph)
    return graph, constants


def symbolic(model: nn.Module, fixed: dict[str, Any], tracer: Tracer) -> fx.Graph:
    def refuse(name: str) -> None:  # a graph of the function's forward would have another gradient
        if tracer.tracing():
            tracer.refuse(f"a gradient of its own ({name})")

    def refuse_data(*_: Any) -> None:  # which no call tells
        if tracer.tracing():
            tracer.refuse("another memory for a tensor (.data = ...)")

    around = Surroundings.of(model)
    with (
        accepting_proxies(globals_seen(model, around), tracer),
        open_in(tracer.open.values()),
        uncached(around),
        own_gradients(refuse),
        data_set_by(refuse_data),
        wrapped_with_rules(),
    ):
        graph = tracer.trace(model, concrete_args=fixed or None)
    if tracer.refused:  # the forward caught it and went on
        raise fx.proxy.TraceError(f"the forward asks for {tracer.refused[0]}")
    return graph


def wrapped_with_rules() -> AbstractContextManager:
    """Functions that torch.fx was told to call whole are followed, unless they have a rule."""
    names = vars(fx._symbolic_trace)
    kept = {
        (place, name): found
        for (place, name), found in names["_wrapped_fns_to_patch"].items()
        if name not in found or find_function_rule(found[name]) is not None
    }
    return patched([(names, "_wrapped_fns_to_patch", kept)])


def stop_gradients(graph: fx.Graph) -> None:
    """What the forward computes under torch.no_grad passes no gradients to what it computes elsewhere."""
    for node in list(graph.nodes):
        if not node.meta.get("no_grad"):
            continue
        root = written(node)
        if root is not None and root.op != "get_attr" and not root.meta.get("no_grad"):
            raise Unsupported(f"{node.name} writes under torch.no_grad what was computed with gradients")
        kind = node.meta["kind"]
        if node.op in ("placeholder", "output", "get_attr") or kind not in (torch.Tensor, tuple, None):
            continue
        outside = [u for u in node.users if not u.meta.get("no_grad") or u.op == "output"]
        if outside:
            with graph.inserting_after(node):
                made = graph.call_function(torch.detach if kind is torch.Tensor else stop_gradient, (node,))
            made.meta = {k: v for k, v in node.meta.items() if k != "no_grad"}
            node.replace_all_uses_with(made, lambda u, outside=outside: u in outside)


def drop_assertions(graph: fx.Graph, inputs: set[str] | None) -> None:
    """Erase assertions on values, what only they read, attributes that nothing reads, and placeholders that are not among
    `inputs`: those are fixed."""
    for node in reversed(list(graph.nodes)):
        dead = node.op == "placeholder" and inputs is not None and str(node.target).lstrip("*") not in inputs
        if node.op == "call_function" and (
            node.target in ASSERTS or getattr(node.target, "__name__", "") == "_assert_is_none"
        ):
            dead = True
        if node.target is getattr or "asserted" in node.meta:
            dead = not node.users
        if dead:
            for i in node.all_input_nodes:
                if i.op != "placeholder":
                    i.meta["asserted"] = True
            graph.erase_node(node)


def capture(
    model: Any, example: dict[str, Any], tracer: Callable[[], Tracer] = Tracer, judged: bool = False
) -> Captured:
    """The fx graph of a module, with training flags marked; a GraphModule is taken as it is.

    judged: whether several calls in a row are compared afterwards, which tells what one keeps for the next.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"[convert] expects an nn.Module, a function, fx.GraphModule or ExportedProgram, got {type(model).__name__}."
        )
    if isinstance(model, fx.GraphModule):
        if has_hooks(model):
            raise Unsupported("[convert] expects a GraphModule without hooks; they are not in its graph.")
        graph = fx.Graph(tracer_cls=None)
        graph.output(graph.graph_copy(model.graph, {}))
        drop_assertions(graph, None)
        return Captured(graph, model)
    if is_more_than_its_class(model):
        raise capture_error(
            model, Unsupported("the model has hooks, or a forward or __call__ of its own, which torch.fx does not see")
        )
    fixed = fixed_inputs(model, example)
    modes = {m.training for m in model.modules()}
    mode = modes.pop() if len(modes) == 1 else None
    try:
        graph, constants = trace(model, fixed, mode, tracer, judged)
        captured = Captured(graph, model, constants)
    except Exception as e:
        raise capture_error(model, e) from e
    captured.notes += [
        f"input {k} is fixed to {v!r}; pass example= with it to make it an input" for k, v in fixed.items()
    ]
    both = {mode: graph}
    try:
        for m in (True, False):
            both[m] = both[m] if m in both else trace(model, fixed, m, tracer, judged)[0]
        join_counts(graph, both[True], both[False])
        flags_in_both_modes(graph, both[True], both[False])
    except Exception:  # also when only one mode can be traced, such as one with an auxiliary loss
        how = "as its modules' flags are" if mode is None else "in training mode" if mode else "in evaluation mode"
        captured.notes.append(f"{DIFFERS}; it was captured {how} and stays so")
        captured.only = mode
        if mode:
            follow_training(graph, both.get(False))
    return captured


def capture_error(model: nn.Module, e: Exception, how: str = "torch.fx") -> ConversionError:
    """A report with the user's line at which capture ended."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if is_foreign(f.filename)]
    location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"
    text = reason_of(e)
    if isinstance(e, torch.fx.proxy.TraceError):
        text = f"the forward's control flow depends on a tensor's value or size ({text})"
    elif type(e).__name__ == "GuardOnDataDependentSymNode":  # of a module that takes a second to load
        text = (
            "the forward needs a number that values give, such as how many rows nonzero() finds; compute all of them and "
            f"mask, or let torch run the model by fallback='torch' ({text.partition(' (unhinted')[0]})"
        )
    report = Report()
    report.add(Row(f"{how} capture", "unsupported", 1, [type(model).__name__], location, text))
    return ConversionError(report)
