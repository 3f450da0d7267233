"""Calls that torch makes inside a converted model, through DLPack and without copies: what `convert(fallback="torch")` uses."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from needle.autograd import Op, Spec, Tensor, Unsupported
from needle.complex_numbers import Complex
from needle.graph import Mode, Symbol
from needle.interop import as_ndarray
from needle.op import TAPE, Deferred
from needle.serialize import DTYPES

from ..capture.calls import tensors as tensor_leaves
from ..capture.cells import Cell
from ..capture.interpret import MissingRule, leaves, plain
from ..capture.nodes import node_location
from ..capture.tracing import Captured
from ..report import Report, Row, reason_of
from ..rules.arithmetic import DtypeOf
from ..rules.registry import is_inplace, target_name
from ..rules.shapes import Pieces
from ..tools.trace_log import LoggingInterpreter


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for tensor input number `index` of a call."""

    index: int


@dataclasses.dataclass(frozen=True)
class Later:
    """Stands for value number `index` of a call: a size or a flag that is known when the graph runs."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """A torch function and its arguments. Leaves: expressions, constants, and symbols (in a TorchCall: Slots, Laters).

    writes: the function writes its first argument, of which it then gets a copy.
    """

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    writes: bool = False

    def map(self, leaf: Callable[[Any], Any]) -> Expression:
        def visit(v: Any) -> Any:
            return v.map(leaf) if isinstance(v, Expression) else leaf(v)

        return dataclasses.replace(self, args=plain(self.args, visit), kwargs=plain(self.kwargs, visit))

    def run(self, tensors: Any, values: tuple, done: dict[int, Any]) -> Any:
        """The result for tensors and values; an expression that is read twice (`done`) runs once."""

        def leaf(v: Any) -> Any:
            if isinstance(v, Expression):
                if id(v) not in done:
                    done[id(v)] = v.run(tensors, values, done)
                return done[id(v)]
            return tensors[v.index] if isinstance(v, Slot) else values[v.index] if isinstance(v, Later) else v

        args, kwargs = plain(self.args, leaf), plain(self.kwargs, leaf)
        if not self.writes:
            return self.function(*args, **kwargs)
        first = args[0].clone()
        self.function(first, *args[1:], **kwargs)
        return first


class ModuleCall:
    """A torch module as a function of its parameters and buffers; the flag of `train()` comes first."""

    def __init__(self, module: nn.Module) -> None:
        tensors = tensors_of(module)
        self.names = list(tensors)
        # A copy, whose flags may change; the tensors are the user's and only stand there.
        self.module = copy.deepcopy(module, {id(t): t for t in tensors.values()})

    def __call__(self, training: bool, tensors: tuple, *args: Any, **kwargs: Any) -> Any:
        self.module.train(training)
        return torch.func.functional_call(self.module, dict(zip(self.names, tensors, strict=True)), args, kwargs)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def torch_tensor(array: Any) -> torch.Tensor:
    """A torch tensor over the array's memory."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)


@dataclasses.dataclass(frozen=True, eq=False)
class TorchCall(Op):
    """One call of torch on tensors of any shapes; results as torch has them, several as a tuple. Cannot be saved."""

    library = "torch"
    compute_infers = True

    text: str
    expression: Expression
    values: tuple  # what Laters stand for
    outputs: int
    saved: Any = None  # torch tensors in and out of one call that is to be differentiated

    @property
    def n_out(self) -> int:  # type: ignore[override]
        return self.outputs

    @property
    def label(self) -> str:
        return self.text

    def attributes(self) -> dict[str, Any]:
        """Without what one call saved."""
        return {k: v for k, v in vars(self).items() if k != "saved"}

    def run(self, tensors: Any) -> list[torch.Tensor]:
        return tensor_leaves(self.expression.run(tensors, self.values, {}))

    def infer(self, *inputs: Any) -> Any:
        specs = tuple(spec_of(t) for t in fake_run(self.run, inputs)[1])
        return specs if self.outputs > 1 else specs[0]

    def compute(self, *arrays: Any) -> Any:
        with torch.no_grad():
            outs = tuple(as_ndarray(t) for t in self.run([torch_tensor(a) for a in arrays]))
        return outs if self.outputs > 1 else outs[0]

    def reference(self, *arrays: np.ndarray) -> Any:
        with torch.no_grad():
            outs = tuple(t.numpy() for t in self.run([torch_tensor(a) for a in arrays]))
        return outs if self.outputs > 1 else outs[0]

    def __call__(self, *inputs: Tensor) -> Any:
        """Where a gradient is needed, torch records the call, so that nothing is computed twice."""
        if not TAPE.recording or not any(t.requires_grad for t in inputs) or any(t.recorder for t in inputs):
            return super().__call__(*inputs)
        with torch.inference_mode(False), torch.enable_grad():
            ins = [torch_tensor(t.cached_data) for t in inputs]
            for tensor, t in zip(ins, inputs, strict=True):
                tensor.requires_grad_(t.requires_grad and tensor.is_floating_point())
            outs = self.run(ins)
        on_numpy = isinstance(inputs[0].cached_data, np.ndarray)
        data = tuple(t.detach().numpy() if on_numpy else as_ndarray(t) for t in outs)
        op = dataclasses.replace(self, saved=(ins, outs))
        return self.results[self.outputs > 1]._from_data(data if self.outputs > 1 else data[0], op, inputs)

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        ins, outs = self.saved
        grads = list(out_grad) if self.outputs > 1 else [out_grad]
        pairs = [(o, torch_tensor(g.cached_data)) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
        wanted = [t for t in ins if t.requires_grad]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], retain_graph=True, allow_unused=True
            )
        )
        op = TorchGradient(self.text)
        on_numpy = isinstance(node.inputs[0].cached_data, np.ndarray)

        def made(t: torch.Tensor | None) -> Tensor | None:
            return None if t is None else Tensor._from_data(t.numpy() if on_numpy else as_ndarray(t), op, node.inputs)

        return tuple(made(next(found)) if t.requires_grad else None for t in ins)


@dataclasses.dataclass(frozen=True, eq=False)
class TorchGradient(Op):
    """Made a gradient that torch computed; to differentiate it once more is an error."""

    text: str

    @property
    def label(self) -> str:
        return f"gradient of {self.text}"


def spec_of(t: torch.Tensor) -> Spec:
    return Spec(tuple(t.shape), str(t.dtype).removeprefix("torch."))


def fake_run(run: Callable[[list], Any], specs: Iterable[Any]) -> tuple[list[torch.Tensor], Any]:
    """(inputs, result) of `run` on tensors without data."""
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        ins = [torch.empty(s.shape, dtype=getattr(torch, str(s.dtype))) for s in specs]
        try:
            return ins, run(ins)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise Unsupported("its result's shape or course depends on values") from None


class FallbackInterpreter(LoggingInterpreter):
    """What has no rule, or whose rule refuses, becomes a TorchCall. A value that needle has no dtype for stays an
    Expression, which the calls that read it make themselves.
    """

    def run(self, inputs: dict[str, Any]) -> Any:
        result = super().run(inputs)
        pending = [v for v in leaves(result) if isinstance(v, Expression)]
        if pending:
            output = self.captured.graph.output_node()
            self.report.add(
                Row("output", "unsupported", 1, [""], node_location(output), "it has a dtype that needle lacks")
            )
        return result

    def call(self, node: fx.Node) -> Cell:
        first = len(self.recorder.graph.nodes)
        pending = any(isinstance(self.env[n].value, Expression) for n in node.all_input_nodes)
        try:
            if pending:
                raise Unsupported("it reads a value whose dtype needle lacks")
            return super().call(node)
        except Exception as e:
            if node in self.tainted:
                raise
            reason = reason_of(e) if isinstance(e, Unsupported | ValueError) else repr(e)
            try:
                cell = self.torch_call(node, reason)
            except Unsupported as u:
                raise (MissingRule if isinstance(e, MissingRule) else Unsupported)(str(u)) from None
            made = [n.name for n in self.recorder.graph.nodes[first:] if n.kind != "param"]
            self.log(node, "torch", cell.value, made)
            return cell

    def inner(self, captured: Captured, prefix: str) -> FallbackInterpreter:
        parts = (captured, self.builder, self.recorder, self.report, prefix)
        return type(self)(*parts, root=self.root, done=self.done)

    def torch_call(self, node: fx.Node, reason: str) -> Cell:
        args, kwargs = self.resolve(node.args), self.resolve(node.kwargs)
        function = self.target(node)
        if node.op == "call_module":
            function, args = self.module_call(node, args)
        elif not callable(function):
            raise Unsupported(reason)
        for v in leaves((args, kwargs)):
            if isinstance(v, Pieces):
                len(v)  # says what is not known
        if args and isinstance(args[0], Complex) and is_inplace(self.target(node)):
            raise Unsupported(f"{reason}, and torch would write a copy of the complex numbers in its place")
        expression = Expression(function, args, kwargs)
        name = target_name(self.target(node))
        text = name if name.startswith("torch.") else f"torch.{name}"
        call, inputs = self.close(expression, text)
        if any(s.spec is None for s in inputs):
            raise Unsupported(f"{reason}; to run it in torch, pass example=")  # which gives shapes and dtypes
        call, result, base_index = self.probe(call, [s.spec for s in inputs if s.spec], reason)
        writes = call.expression.writes
        self.report.add(Row(name, "torch", 1, [self.path(node)], node_location(node), reason))
        if any(str(t.dtype)[6:] not in DTYPES.values() for t in tensor_leaves(result)):
            return Cell(dataclasses.replace(expression, writes=writes))
        base = self.base(node)

        def apply(first: Any) -> Any:
            outs = call(*(first if i == base_index else s for i, s in enumerate(inputs)))
            made = iter(outs if call.outputs > 1 else (outs,))
            return tree_map(lambda t: next(made) if isinstance(t, torch.Tensor) else t, result)

        value = apply(None if base_index is None else inputs[base_index])
        if writes and base is not None:
            self.check_write(base)
            base.write(value, f"{name} at {node_location(node)}")
            return base
        return Cell(value) if base_index is None else Cell(value, base, apply)

    def module_call(self, node: fx.Node, args: tuple) -> tuple[Callable, tuple]:
        module = self.module(node)
        function = ModuleCall(module)
        tensors = tensors_of(module)
        symbols = tuple(self.constant(t) for t in tensors.values())
        layer = self.builder.modules.get(id(module))
        training = module.training if layer is None else Mode(layer, self.path(node))
        return function, (training, symbols, *args)

    def close(self, expression: Expression, text: str) -> tuple[TorchCall, list[Symbol]]:
        """The call with Slots for symbols and Laters for what is known later, and the symbols."""
        slots: dict[int, Slot] = {}
        inputs: list[Symbol] = []
        values: list[Any] = []

        def leaf(v: Any) -> Any:
            if isinstance(v, Complex):
                return Expression(torch.complex, (v.real, v.imag), {}).map(leaf)
            if isinstance(v, Tensor):
                symbol = v if isinstance(v, Symbol) else self.recorder.param(v)
                if id(symbol) not in slots:
                    slots[id(symbol)] = Slot(len(inputs))
                    inputs.append(symbol)
                return slots[id(symbol)]
            if isinstance(v, DtypeOf):
                return getattr(torch, v.tensor.dtype)
            if isinstance(v, Deferred):
                values.append(v)
                return Later(len(values) - 1)
            return v

        return TorchCall(text, expression.map(leaf), tuple(values), 1), inputs

    def probe(self, call: TorchCall, specs: list[Spec], reason: str) -> tuple[TorchCall, Any, int | None]:
        """What the call does, by a run without data: the finished call, its result, and the input that it writes or views."""
        known: Any = call.resolve(self.recorder._example)
        instead = f"{reason}, and torch cannot run it in its place"
        try:
            ins, result = fake_run(lambda ins: known.expression.run(ins, known.values, {}), specs)
        except Unsupported as e:
            raise Unsupported(f"{instead}: {e}") from None
        written = [i for i, t in enumerate(ins) if t._version]
        first = call.expression.args[0] if call.expression.args else None
        base = first.index if isinstance(first, Slot) else None
        if written:
            if written != [base]:
                raise Unsupported(f"{instead}: it writes an argument")
            result = ins[written[0]]
            if result.shape != specs[written[0]].shape or not result.is_contiguous():
                raise Unsupported(f"{instead}: it gives its argument another shape or storage")
        if not all(isinstance(t, torch.Tensor | None) for t in tree_leaves(result)) or not tensor_leaves(result):
            raise Unsupported(f"{instead}: its result is no tensor")
        storage = {t.untyped_storage()._cdata: i for i, t in enumerate(ins)}
        seen = {storage.get(t.untyped_storage()._cdata) for t in tensor_leaves(result)} - {None}
        if seen - {base}:
            raise Unsupported(f"{instead}: its result shares memory with an argument that is not the first")
        expression = dataclasses.replace(call.expression, writes=bool(written))
        call = dataclasses.replace(call, expression=expression, outputs=len(tensor_leaves(result)))
        return call, result, base if seen else None


def calls_in_torch(report: Report) -> str:
    """The rows that run in torch, as a list in words."""
    rows = [r for r in report.rows if r.status == "torch"]
    words = [f"{r.op} ({r.count}x, {os.path.basename(r.location)})" for r in rows[:5]]
    return ", ".join(words) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")


def warn_of_torch(report: Report) -> None:
    n = sum(r.count for r in report.rows if r.status == "torch")
    if n:
        warnings.warn(f"[convert] {n} calls run in torch: {calls_in_torch(report)}; net.report says why.", stacklevel=3)


def warn_of_share(exe: Any, report: Report, inputs: tuple) -> None:
    """The same with the share of the time, measured."""
    if any(r.status == "torch" for r in report.rows):
        exe(*inputs)  # torch's first call of a function takes longer
        steps = exe.profile(*inputs, rounds=3)
        share = sum(t for name, _, t in steps if "." in name) / sum(t for _, _, t in steps)
        text = f"[compile] {100 * share:.0f}% of the time runs in torch: {calls_in_torch(report)}"
        warnings.warn(f"{text}; exe.model.report says why.", stacklevel=3)
