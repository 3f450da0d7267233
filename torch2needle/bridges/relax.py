"""A traced torch model as a Relax module, by the converter's rules and users' maps; and torch's functions as packed functions.

The only module of this package that needs Apache TVM: `pip install ".[tvm]"` in a checkout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from needle.autograd import Tensor
from needle.backend_selection import cpu_numpy
from needle.graph import Symbol, map_structure
from needle.graph.exporting import exact_shapes
from needle.nn import Parameter
from needle.op import Spec, Unsupported, remembering
from needle.tvm.export import Exporter, ExportRecorder
from needle.tvm.vendor import register

from ..capture.cells import Cell
from ..capture.interpret import Interpreter, MissingRule
from ..capture.tracing import Captured
from ..report import Report, reason_of
from ..rules.registry import INPLACE_OPERATORS
from ..weights import Tensors, TreeBuilder

import tvm  # isort: skip  (after needle.tvm, which says what to install)
from tvm import relax  # isort: skip

FunctionRow = Callable[[Any, dict[fx.Node, Any], fx.Node], Any]
ModuleRow = Callable[[Any, dict[fx.Node, Any], fx.Node, nn.Module], Any]
CALL_FUNCTION_MAP: dict[Any, FunctionRow] = {}  # rows for every import: of functions, and of tensor methods by name
CALL_MODULE_MAP: dict[type[nn.Module], ModuleRow] = {}


class Weights(Tensors):
    """Over torch's memory, where float16 stays what it is: TVM computes in it, needle's kernels do not."""

    def make(self, t: torch.Tensor, path: str) -> Tensor:
        if t.dtype != torch.float16:
            return super().make(t, path)
        kind = Parameter if isinstance(t, nn.Parameter) else Tensor
        return kind(t.detach().cpu().numpy(), dtype="float16", device=cpu_numpy())


class Importer(Interpreter):
    """Runs a traced graph at known sizes and emits what its calls record; a call with a row is what the row gives."""

    def __init__(
        self,
        model: fx.GraphModule,
        block_builder: Any,
        functions: Mapping[Any, FunctionRow],
        modules: Mapping[type[nn.Module], ModuleRow],
    ) -> None:
        tree, recorder = TreeBuilder(Weights(share=True), Report()), ExportRecorder(static=True)
        tree.build(model)
        super().__init__(Captured(model.graph, model), tree, recorder, tree.report)  # type: ignore[arg-type]
        self.functions, self.modules = functions, modules
        self.exporter = Exporter(recorder.graph, {}, params_as_inputs=False, use_te=False)
        self.exporter.builder = block_builder
        self.emitted = 0  # of the recorder's nodes
        self.from_rows: dict[fx.Node, Any] = {}

    def input(self, name: str, expression: Any) -> Symbol:
        """The symbol that stands for an expression of Relax."""
        spec = Spec(tuple(int(s) for s in expression.ty.shape), str(expression.ty.dtype))
        symbol = self.recorder.input(name, spec)
        self.exporter.values[symbol.node] = expression
        return symbol

    def row(self, node: fx.Node) -> Any:
        """What users gave for a call, if anything."""
        if node.op == "call_module":
            return self.modules.get(type(self.module(node)))
        return self.functions.get(node.target) if node.op.startswith("call") else None

    def call(self, node: fx.Node) -> Cell:
        check_write(node, self.captured.model)
        layers = [self.module(node)] if node.op == "call_module" else []
        row = self.row(node)
        if row is None:
            self.check_evaluation(node, layers)
            return super().call(node)
        self.emit()
        known = {n: self.expressions(n, c.value) for n, c in self.env.items()}
        self.from_rows[node] = row(self.exporter.builder, known, node, *layers)
        return Cell(self.symbols(node.name, self.from_rows[node]))

    def inline(self, node: fx.Node, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Cell:
        raise MissingRule(f"there is no rule for {type(module).__name__}")

    def check_evaluation(self, node: fx.Node, layers: list[nn.Module]) -> None:
        made = [m for layer in layers for _, m in self.builder.modules[id(layer)].named_modules()]
        if any(m.mode_dependent and m.training for m in made):
            raise Unsupported(f"[from_fx] {node.name} is in training mode; call model.eval() before tracing.")

    def emit(self) -> None:
        """Emit what was recorded since the last time."""
        new = self.recorder.graph.nodes[self.emitted :]
        self.emitted += len(new)
        self.exporter.shapes |= exact_shapes(new)  # type: ignore[arg-type]
        for node in new:
            if node.kind == "param":
                self.exporter.known[node] = node.meta["tensor"].detach()
            elif node.kind == "op":
                self.exporter.emit(node)

    def expressions(self, node: fx.Node | None, value: Any) -> Any:
        """A captured value with expressions for its tensors."""
        if node in self.from_rows:
            return self.from_rows[node]
        return map_structure(value, lambda v: self.exporter.value(v.node) if isinstance(v, Symbol) else v)

    def symbols(self, name: str, value: Any) -> Any:
        """What a row gave as rules take it."""
        if isinstance(value, tuple | list):
            return type(value)(self.symbols(name, v) for v in value)
        if not isinstance(value, tvm.ir.Expr):
            return value
        emit = self.exporter.builder.emit
        value = value if isinstance(value, relax.Var) else emit(value)
        if not isinstance(value.ty, relax.TupleType):
            return self.input(name, value)
        return tuple(self.input(name, emit(relax.TupleGetItem(value, i))) for i in range(len(value.ty.fields)))

    def fail(self, node: fx.Node, e: Exception) -> None:
        if isinstance(e, MissingRule):
            raise unknown(node, self.target(node)) from None
        ours = self.row(node) is None and not str(e).startswith("[from_fx]")
        if ours and isinstance(e, Unsupported | ValueError):
            raise Unsupported(f"[from_fx] {node.name}, {name_of(node.target)}: {reason_of(e)}.") from None
        raise e


def from_fx(
    graph_module: fx.GraphModule,
    input_info: Sequence[tuple[Sequence[int], str]],
    call_function_map: Mapping[Any, FunctionRow] | None = None,
    call_module_map: Mapping[type[nn.Module], ModuleRow] | None = None,
) -> Any:
    """IRModule with `main` from a traced model and (shape, dtype) of every input. Weights are constants.

    Calls become what the converter's rules make of them, in evaluation. call_function_map[target](bb, node_map, node): instead,
    a call of function `target`, or of the tensor method of that name, as an expression emitted into BlockBuilder `bb`;
    `node_map` has the expressions of the nodes before. call_module_map[type](bb, node_map, node, module): a call of a module.
    They come before the rows of CALL_FUNCTION_MAP and CALL_MODULE_MAP, and those before the rules.
    """
    places = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    if len(places) != len(input_info):
        raise ValueError(f"[from_fx] input_info expects {len(places)} inputs, got {len(input_info)}.")
    variables = {
        n: relax.Var(n.name, relax.TensorType(tuple(shape), dtype))
        for n, (shape, dtype) in zip(places, input_info, strict=True)
    }
    functions = {**CALL_FUNCTION_MAP, **(call_function_map or {})}
    modules = {**CALL_MODULE_MAP, **(call_module_map or {})}
    bb = relax.BlockBuilder()
    importer = Importer(graph_module, bb, functions, modules)
    with bb.function("main", list(variables.values())):
        with bb.dataflow(), remembering():
            made = importer.run({str(n.target): importer.input(n.name, v) for n, v in variables.items()})
            importer.emit()
            result = bb.emit_output(structured(importer.expressions(None, made)))
        bb.emit_func_output(result)
    for note in importer.report.notes:
        warnings.warn(f"[from_fx] {note}.", stacklevel=2)
    return bb.get()


def structured(value: Any) -> Any:
    return relax.Tuple([structured(v) for v in value]) if isinstance(value, tuple | list) else value


def name_of(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def check_write(node: fx.Node, graph_module: nn.Module) -> None:
    """Raise Unsupported for a call that writes to its first input where somebody reads that later."""
    if node.op == "call_module":
        writes = getattr(graph_module.get_submodule(str(node.target)), "inplace", False)
    else:
        name = name_of(node.target)
        writes = node.kwargs.get("inplace", name.endswith("_") or name in INPLACE_OPERATORS)
    if not writes or not node.args or not isinstance(node.args[0], fx.Node):
        return
    later = list(node.graph.nodes)
    later = later[later.index(node) + 1 :]
    reader = next((n for n in later if n in node.args[0].users), None)
    if reader is not None:
        raise Unsupported(f"[from_fx] {node.name} writes to {node.args[0].name}, which {reader.name} reads later.")


def unknown(node: fx.Node, target: Any) -> Unsupported:
    if node.op == "call_module":
        table, key, arguments = "call_module_map", target.__name__, "bb, node_map, node, module"
    else:
        key = repr(node.target) if isinstance(node.target, str) else name_of(node.target)
        table, arguments = "call_function_map", "bb, node_map, node"
    return Unsupported(
        f"[from_fx] {node.name} calls {key}, which neither {table} nor a rule knows; pass {table}={{{key}: f}} with a "
        f"function f({arguments}) that gives its expression."
    )


# -- torch as a vendor ---------------------------------------------------------------------------------------------------


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    torch.addmm(bias, x, weight.T, out=out)


def torch_conv2d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *rest: Any) -> None:
    *numbers, out = rest
    if not numbers:
        out.copy_(torch.conv2d(x, weight, bias))
        return
    (top, left, bottom, right), stride, dilation = numbers[2:6], numbers[:2], numbers[6:8]
    padded = F.pad(x, (left, right, top, bottom))
    out.copy_(torch.conv2d(padded, weight, bias, stride, 0, dilation, numbers[8]))


def torch_relu(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.clamp_min(x, 0, out=out)


def register_torch() -> None:
    """torch's functions as env.torch.linear, env.torch.conv2d and env.torch.relu, called as those of needle.tvm.vendor."""
    for name, f in (("linear", torch_linear), ("conv2d", torch_conv2d), ("relu", torch_relu)):
        register(f"env.torch.{name}", f, torch.from_dlpack)


register_torch()
