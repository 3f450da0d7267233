"""Runs a captured fx graph over needle symbols: every call goes through its rule; failures are collected, not raised."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from needle import ops
from needle.autograd import Spec, Tensor, Unsupported
from needle.complex_numbers import DTYPES as WHOLE
from needle.complex_numbers import Complex
from needle.graph import Dim, Mode, ModuleRecorder
from needle.graph.inputs import PARTS
from needle.graph.record import SymbolicShape
from needle.graph.structure import record_of
from needle.nn import Guard, WriteBuffer, WriteTrained
from needle.nn.functional import told
from needle.nn.module import Module

from ..report import Report, Row, dotted, reason_of, short, status_of
from ..rules.arithmetic import DtypeOf
from ..rules.complex_numbers import is_complex
from ..rules.layer_calls import Probability, call_layer, hang
from ..rules.overloads import FLAGS, is_overload, without_out
from ..rules.registry import (
    COMPLEX_RULES,
    bind,
    find_function_rule,
    find_module_rule,
    is_inplace,
    method,
    nearest_rule,
    target_name,
)
from ..rules.shapes import Absent, Pieces
from ..rules.stubs import stub
from ..weights import TreeBuilder
from .asked import CHECKS, refuse_real_numbers
from .cells import Cell, with_item
from .flags import TrainingFlag
from .nodes import attribute, node_location, owner_path
from .size_calls import call_of_sizes
from .structure import is_record_class, plain
from .tracing import Captured, capture
from .writes import as_stored, second_name, view_kind

NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # torch takes numpy's names, too
VALUES = (Tensor, Complex)
HALVES = (torch.float16, torch.bfloat16)
HALF_METHODS = (torch.Tensor.half, torch.Tensor.bfloat16)


def leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    plain(value, found.append)
    return found


def say_unknown(value: Any) -> None:
    """Raises Unsupported for what stands for something that only an example tells."""
    if isinstance(value, Pieces | SymbolicShape):
        len(value)
    if isinstance(value, DtypeOf):
        raise Unsupported("an output is a dtype, which is not known; pass example=")


def is_real_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymFloat)


class Interpreter:
    """`env` maps fx nodes to cells; `tainted` holds those that depend on a failure, whose own trouble may come from it."""

    def __init__(
        self, captured: Captured, builder: TreeBuilder, recorder: ModuleRecorder, report: Report, prefix: str = ""
    ) -> None:
        self.captured, self.builder, self.recorder = captured, builder, recorder
        self.report, self.prefix = report, prefix
        self.env: dict[fx.Node, Cell] = {}
        self.attributes: dict[str, Cell] = {}  # of the model, by path
        self.written: dict[str, Cell] = {}  # its buffers that the forward writes
        self.guards: list[Tensor] = []  # values that the graph is held against
        self.tainted: set[fx.Node] = set()
        self.given: dict[str, Cell] = {}  # cells of the caller, by placeholder name

    def run(self, inputs: dict[str, Any]) -> Any:
        """The symbolic result. `inputs`: symbols by placeholder name."""
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                name = str(node.target)
                self.env[node] = self.given.get(name) or Cell(inputs[name], owner=f"input {name}")
                continue
            if any(n in self.tainted for n in node.all_input_nodes):
                self.tainted.add(node)
            try:
                if node.op == "output":
                    result = self.resolve(node.args[0])
                    for v in leaves(result):
                        say_unknown(v)
                    if any(is_real_number(n) and isinstance(self.resolve(n), Tensor) for n in node.all_input_nodes):
                        raise Unsupported("an output is a number that values say; return the tensor")
                    return result
                self.env[node] = self.get_attr(node) if node.op == "get_attr" else self.call(node)
            except Exception as e:
                self.fail(node, e)
        return None  # the output itself failed

    def fail(self, node: fx.Node, e: Exception) -> None:
        missing = isinstance(e, MissingRule)
        if node not in self.tainted or missing:
            self.tainted.add(node)
            reason = reason_of(e) if isinstance(e, Unsupported | ValueError) else f"{type(e).__name__}: {e}"
            target = self.target(node) if node.op != "get_attr" else node.target
            row = Row(target_name(target), "unsupported", 1, [self.path(node)], node_location(node), reason)
            if missing:
                module = self.module(node) if node.op == "call_module" else None
                row.nearest = nearest_rule(target)
                row.stub = stub(node, target, module, lambda n: self.env[n].value)
            self.report.add(row)
        self.env[node] = Cell(self.recorder.input("unknown", None))

    def path(self, node: fx.Node) -> str:
        return dotted(self.prefix, owner_path(node))

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a call is of."""
        return self.captured.model.get_submodule(str(node.target))

    def target(self, node: fx.Node) -> Any:
        """The key of the node's rule: a function, a tensor method, or a module's class."""
        if node.op == "call_method":
            return method(str(node.target)) or node.target
        return type(self.module(node)) if node.op == "call_module" else node.target

    def resolve(self, value: Any) -> Any:
        """Captured arguments with values for nodes and Modes for training flags."""

        def leaf(v: Any) -> Any:
            if isinstance(v, fx.Node):
                return self.env[v].read()
            if isinstance(v, TrainingFlag):
                module = self.builder.modules[id(self.captured.model.get_submodule(v.path))]
                path = dotted(self.prefix, v.path)
                return Mode(module, path) if v.p is None else Probability(module, path, v.p)
            return self.constant(v) if isinstance(v, torch.Tensor) else v

        return plain(value, leaf)

    def constant(self, t: torch.Tensor) -> Any:
        made = self.stored(t)
        return ops.view_as_complex(made) if t.is_complex() else made

    def stored(self, t: torch.Tensor) -> Tensor:
        """The symbol of a tensor's memory: of complex numbers (..., 2)."""
        return self.recorder.param(self.builder.tensor(t, "a constant of the forward"))

    def get_attr(self, node: fx.Node) -> Cell:
        name = str(node.target)
        if name not in self.attributes:
            made = self.captured.constants.get(name)
            value = operator.attrgetter(name)(self.captured.model) if made is None else made
            known = self.constant(value) if isinstance(value, torch.Tensor) else value
            kind = "model" if made is None else "constant"
            if made is not None and "val" in node.meta:  # of torch.tensor(...), which makes it anew, or an attribute
                fresh = all(u.target is torch.ops.aten.lift_fresh.default for u in node.users)
                kind = "lifted" if fresh else "model"
            self.attributes[name] = Cell(known, owner=f"{kind} {name}")
        return self.attributes[name]

    def guard(self, value: Tensor | Dim, expected: list[float], text: str) -> None:
        """The graph holds for inputs that give this value."""
        refuse_real_numbers(value, text)
        mode, guard = Mode(self.builder.modules[id(self.captured.model)], self.prefix), Guard(tuple(expected), text)
        if isinstance(value, Tensor):
            self.guards.append(call_layer(mode, guard, value))
        elif isinstance(value, Dim):
            self.guards.append(self.recorder.module(hang(mode, guard), (value,), {}, guard))
        else:  # the weights tell
            guard.check(value)
            return
        self.report.note(f"it holds for inputs that answer `{text}` with {told(expected)}, and checks that")

    def effects(self) -> list[Tensor]:
        """What the graph computes beside its result: guards, and writes of the buffers that the forward changed."""
        made = list(self.guards)
        for name, cell in self.written.items():
            before = self.stored(operator.attrgetter(name)(self.captured.model))
            mode, value = Mode(self.builder.modules[id(self.captured.model)], self.prefix), cell.read()
            value = ops.view_as_real(value) if isinstance(value, Complex) else value
            layer = WriteTrained() if name in self.captured.settled else WriteBuffer()
            made.append(call_layer(mode, layer, before, value))
        return made

    def keep_gradient(self, root: Cell) -> None:
        """What a parameter became in place passes its gradients to it, as torch has it of writes without gradients."""
        kind, _, name = root.owner.partition(" ")
        own = attribute(name, self.captured.model) if kind == "model" else None
        if isinstance(own, nn.Parameter) and own.requires_grad:
            leaf = self.stored(own)
            root.write(ops.straight_through(root.value, leaf), f"a write of {name}")

    def call(self, node: fx.Node) -> Cell:
        args, kwargs = self.resolve(node.args), self.resolve(node.kwargs)
        self.first = len(
            self.recorder.graph.nodes
        )  # of those that this call records, but for views of what was written
        if node.op == "call_module":
            return self.call_module(node, args, kwargs)
        if node.op == "call_method" and not isinstance(args[0], VALUES):
            return Cell(getattr(args[0], str(node.target))(*args[1:], **kwargs))
        target = self.target(node)
        if target in CHECKS:
            self.guard(*args)
            return Cell(None)
        if is_record_class(target):
            return Cell(record_of(target, kwargs))
        values = leaves((args, kwargs))
        if node.op == "call_function" and is_getitem(target) and not isinstance(args[0], VALUES):
            return self.item(node, args[0], args[1])
        rules = COMPLEX_RULES if any(map(is_complex, values)) else None
        if not any(isinstance(v, VALUES) for v in values):
            made = call_of_sizes(self.recorder, target, args, kwargs, values)
            return Cell(self.constant(made) if isinstance(made, torch.Tensor) else made)
        if isinstance(target, type) and issubclass(target, tuple):  # a named tuple among the results
            return Cell(
                target._make((*args, *kwargs.values())) if hasattr(target, "_make") else target(*args, **kwargs)
            )
        if target is getattr and not isinstance(args[0], VALUES):  # of a named tuple
            fields = getattr(args[0], "_fields", ())
            if args[1] in fields:
                return self.item(node, args[0], fields.index(args[1]))
            return Cell(getattr(*args), self.base(node), lambda v: getattr(v, args[1]))
        out = kwargs.pop("out", None)
        if out is not None:
            target = without_out(target) if is_overload(target) else target
        for v in values:
            if isinstance(v, Absent):
                len(v)  # says why
        rule = find_function_rule(target, rules)
        kwargs = {NUMPY_NAMES.get(k, k): v for k, v in kwargs.items()}
        if any(v in HALVES for v in values if isinstance(v, torch.dtype)) or target in HALF_METHODS:
            self.report.note(f"the cast to a 16-bit float at {node_location(node)} is computed in float32")
        if rule is None and rules is COMPLEX_RULES and find_function_rule(target) is not None:
            raise Unsupported(f"the rule of {target_name(target)} takes no complex numbers")
        if rule is None:
            raise MissingRule(f"there is no rule for {target_name(target)}")
        bound = bind(rule, target, args, kwargs, rules)
        result = rule(*bound.args, **bound.kwargs)
        if is_overload(target) and len(target._schema.returns) > 1 and not isinstance(result, tuple | list):
            raise Unsupported("the rule gives one of the results that the graph reads")
        if out is not None:
            return self.written_out(node, result, out)
        flag = next((n for n in FLAGS if n in bound.signature.parameters), "")
        mode = next((v for v in bound.arguments.values() if isinstance(v, Mode)), bound.arguments.get(flag))
        self.note_flag(node, target, mode, bool(flag))
        inplace = is_inplace(target) or bound.arguments.get("inplace") is True

        def again(value: Any) -> Any:
            return rule(value, *bound.args[1:], **bound.kwargs)

        put: Any = getattr(rule, "put", None)
        back = put and (lambda base, value: put(base, value, *bound.args[1:], **bound.kwargs))
        return self.finish(node, result, inplace, view_kind(node, rule, bound.args, inplace), again, back)

    def written_out(self, node: fx.Node, result: Any, out: Any) -> Cell:
        """What a call leaves in the tensor that it is given as out=, which is its result, too."""
        place: Any = node.kwargs["out"]
        known = [getattr(t, "spec", None) is not None for t in (result, out)]
        if not isinstance(place, fx.Node) or not isinstance(result, Tensor) or not all(known):
            raise Unsupported("out= expects one tensor and shapes that are known; pass example=, or assign with copy_")
        self.check_write(self.env[place])
        stored = as_stored(result, out)
        self.report.add(Row(target_name(self.target(node)), "native", 1, [self.path(node)], node_location(node)))
        self.env[place].write(stored, f"{target_name(self.target(node))} at {node_location(node)}")
        self.keep_gradient(self.env[place].root())
        return self.env[place]

    def item(self, node: fx.Node, value: Any, index: Any) -> Cell:
        """One of several values, such as a piece of a split."""

        base = self.base(node)
        if base is None or isinstance(index, slice):
            return Cell(value[index], base, lambda v: v[index])
        index = index + len(value) if index < 0 else index
        if index not in base.items:
            base.items[index] = Cell(value[index], base, lambda v: v[index], lambda v, item: with_item(v, index, item))
        return base.items[index]

    def call_module(self, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Cell:
        module = self.module(node)
        if id(module) in self.builder.failures:
            raise Unsupported(self.builder.failures[id(module)])
        rule = find_module_rule(module)
        if rule is None:
            return self.inline(node, module, args, kwargs)
        if any(map(is_complex, leaves((args, kwargs)))):
            if all(p.is_complex() for p in module.parameters()):  # its calls have rules
                return self.inline(node, module, args, kwargs)
            raise Unsupported(f"the rule of {target_name(type(module))} takes no complex numbers")
        layer = self.builder.modules[id(module)]
        result = layer(*args, **kwargs)
        inplace = getattr(module, "inplace", False)
        view, put = view_kind(node, rule, args, inplace), getattr(rule, "put", None)
        return self.finish(node, result, inplace, view, lambda v: layer(v), put)

    def inline(self, node: fx.Node, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Cell:
        """A submodule without a rule, as GraphModules of other tracers call them: capture and run it here."""
        try:
            captured = capture(module, {})
        except Exception:
            raise MissingRule(f"there is no rule for {target_name(type(module))}") from None
        names = [str(n.target) for n in captured.graph.nodes if n.op == "placeholder"]
        nodes = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        inner = self.inner(captured, self.path(node))
        inner.given = {k: self.env[n] for k, n in nodes.items() if isinstance(n, fx.Node)}
        return inner.cell_of(captured.graph.output_node().args[0], inner.run(values))

    def cell_of(self, result: Any, value: Any) -> Cell:
        """The cell of a graph's result: that of its node, or of a structure with the cells of its nodes."""
        if isinstance(result, fx.Node):
            return self.env[result]
        cell = Cell(value)
        if isinstance(result, tuple | list) and value is not None:
            cell.items = {i: self.cell_of(r, v) for i, (r, v) in enumerate(zip(result, value, strict=True))}
        return cell

    def inner(self, captured: Captured, prefix: str) -> Interpreter:
        return Interpreter(captured, self.builder, self.recorder, self.report, prefix)

    def finish(
        self, node: fx.Node, result: Any, inplace: bool, view: str | None, again: Callable, put: Any = None
    ) -> Cell:
        """The cell of a result: that of the first argument when the call wrote into it, a view's, or one of its own."""
        base = self.base(node)
        if inplace and base is not None:
            self.check_write(base)
            if view is not None:
                return self.reshape(base, Cell(result, base, again, put))
            result = as_stored(result, base.value)
        status = status_of(self.recorder.graph.nodes[self.first :])
        self.report.add(Row(target_name(self.target(node)), status, 1, [self.path(node)], node_location(node)))
        if inplace and base is not None:
            base.write(result, f"{target_name(self.target(node))} at {node_location(node)}")
            self.keep_gradient(base.root())
            return base
        if view is None or base is None:
            return Cell(result)
        alike = view != "always" or result is base.value
        if view not in ("always", "same"):
            return Cell(result, base, alike=alike)
        return Cell(result, base, again, put, alike=alike)

    def reshape(self, old: Cell, new: Cell) -> Cell:
        """After an in-place unsqueeze_ and its like: every name of the tensor has the new shape, older views keep theirs."""
        if old.owner.startswith("model"):
            raise Unsupported(f"it gives {old.owner.partition(' ')[2]} another shape, which belongs to the model")
        if not old.is_one_tensor():
            raise Unsupported(
                "it gives a tensor another shape that may have a second name; write that step out of place"
            )
        tables: list[dict[Any, Cell]] = [self.env, self.attributes, old.base.items if old.base else {}]  # type: ignore[list-item]
        for cells in tables:
            cells.update({k: new for k, c in cells.items() if c is old})
        return new

    def base(self, node: fx.Node) -> Cell | None:
        first: Any = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(first, str):  # einsum's
            first = node.args[1][0] if isinstance(node.args[1], tuple | list) else node.args[1]
        return self.env[first] if isinstance(first, fx.Node) else None

    def check_write(self, cell: Cell) -> None:
        kind, _, name = cell.root().owner.partition(" ")
        if kind == "model":
            own = attribute(name, self.captured.model)
            weight = isinstance(own, nn.Parameter) and not own.is_complex()
            if not (weight or name in dict(self.captured.model.named_buffers())) or self.prefix:
                raise Unsupported(f"it writes {name} in place, which belongs to the model")
            other = second_name(self.captured, name)
            if other:
                raise Unsupported(f"it writes {name} in place, which {other} may share")
            self.written[name] = cell.root()
        if kind == "constant":  # what Python did with it meanwhile is not in the graph
            raise Unsupported("it writes a tensor that the forward made by itself; pass example= to capture that")
        if kind == "input":
            self.report.note(f"torch writes input {name} in place; the converted model leaves it as it is")

    def note_flag(self, node: fx.Node, target: Any, flag: Any, has_flag: bool) -> None:
        if isinstance(flag, Mode):
            self.report.follows_mode.append(
                f"{target_name(target)} at {node_location(node)} follows {short([flag.path])}"
            )
        elif has_flag:
            value = "its default" if flag is None else flag
            self.report.constant_flags.append(f"{target_name(target)} at {node_location(node)}: training is {value}")


class MissingRule(Unsupported):
    """No rule for the target, as against a rule that refused."""


def is_getitem(target: Any) -> bool:
    return getattr(target, "__name__", "") == "getitem"


def input_specs(graph: fx.Graph, example: dict[str, Any], report: Report) -> dict[str, Spec | None]:
    specs: dict[str, Spec | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if str(node.target).startswith("*"):
                raise Unsupported(f"[convert] expects a forward with named inputs, got {node.target}.")
            x = node.meta.get("val", example.get(str(node.target)))
            spec = None
            if isinstance(x, torch.Tensor):
                shape = tuple(s if isinstance(s, int) else s.node.hint for s in x.shape)
                spec = Spec(shape, "float32" if x.dtype in HALVES else str(x.dtype).removeprefix("torch."))
                if x.dtype in HALVES:
                    report.note(f"input {node.target} is {x.dtype} and computed in float32")
            specs[str(node.target)] = spec
    return specs


def interpret(
    captured: Captured,
    root: Module,
    builder: TreeBuilder,
    report: Report,
    example: dict[str, Any],
    interpreter: Callable[..., Interpreter] = Interpreter,
) -> ModuleRecorder | None:
    """Record the captured graph on `root`'s modules; None when the report has failures."""
    recorder = ModuleRecorder(root)
    inputs: dict[str, Any] = {}
    for name, spec in input_specs(captured.graph, example, report).items():
        if spec is None or spec.dtype not in WHOLE:
            inputs[name] = recorder.input(name, spec)
        else:
            part = spec._replace(dtype=WHOLE[spec.dtype])
            inputs[name] = Complex(*(recorder.input(f"{name}.{side}", part) for side in PARTS))
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            value, kept = inputs[str(node.target)], {k: node.meta[k] for k in ("place", "sizes") if k in node.meta}
            if isinstance(value, Complex):
                place = node.meta.get("place", (str(node.target),))
                for side in PARTS:
                    getattr(value, side).node.meta.update(kept, place=(*place, side))
                continue
            own = value.node.meta
            own |= {"default": node.args[0]} if node.args else {}
            own |= kept
    running = interpreter(captured, builder, recorder, report)
    result = running.run(inputs)
    if not report.ok:
        return None
    recorder.finish(result, running.effects())
    if captured.arguments is not None:
        recorder.graph.output.meta["arguments"] = captured.arguments
    return recorder
