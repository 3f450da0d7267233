"""needle models as Relax modules: every op of a traced call becomes a tensor expression or an operator of Relax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, tirx, topi

from needle.autograd import Tensor
from needle.graph import Graph, Node, exporting, map_structure
from needle.graph.exporting import as_example, has_row, shaped, traced
from needle.nn import Module
from needle.op import Op, Spec, Unsupported, snake_case
from needle.ops.shape.basic import BroadcastTo
from needle.ops.shape.join import TupleGetItem

from .arrays import plain
from .expressions import as_te
from .relax_ops import RELAX_ONLY, as_relax


def is_exported(cls: type[Op]) -> bool:
    return issubclass(cls, RELAX_ONLY) or has_row(cls, as_te.registry)


class ExportRecorder(exporting.ExportRecorder):
    def exported(self, op: Op) -> bool:
        return is_exported(type(op))

    def whole(self, op: Op) -> bool:
        return isinstance(op, RELAX_ONLY)


def te_name(op: Op) -> str:
    """te_matmul, te_ewise_add, te_broadcast_to, te_relu: the names of the original."""
    if op.name.startswith("EWise"):
        return "te_ewise_" + snake_case(op.name.removeprefix("EWise"))
    return f"te_{'matmul' if op.name == 'MatMul' else op.label}"


def graph_of(fn: Callable, examples: Sequence[Any]) -> Graph:
    return traced(fn, examples, ExportRecorder(static=True)).prune()


def each(op: Op, value: Any) -> list[Any]:
    """What an op has per result, as a list."""
    return list(value) if op.n_out > 1 else [value]


class Exporter:
    """Emits one graph into a BlockBuilder; `shapes`: per node its shape, or its shapes, with the free sizes as variables."""

    def __init__(self, graph: Graph, shapes: dict[Node, Any], params_as_inputs: bool, use_te: bool) -> None:
        self.graph, self.shapes, self.use_te = graph, shapes, use_te
        self.params_as_inputs = params_as_inputs
        self.builder = relax.BlockBuilder()
        self.values: dict[Node, Any] = {}
        self.known: dict[Node, Tensor] = {}  # values that depend on parameters alone

    def variable(self, node: Node, name: str) -> Any:
        spec = node.meta["spec"]
        return relax.Var(name, relax.TensorType(self.shapes[node], spec.dtype))

    def module(self) -> Any:
        inputs = [self.variable(n, n.name) for n in self.graph.inputs]
        self.values.update(zip(self.graph.inputs, inputs, strict=True))
        params = [n for n in self.graph if n.kind == "param" and isinstance(n.target, str)]
        taken = [self.variable(n, n.name) for n in params] if self.params_as_inputs else []
        self.values.update(zip(params, taken, strict=False))
        for node in self.graph:
            if node.kind == "param" and node not in self.values:
                self.known[node] = node.meta["tensor"].detach()
        with self.builder.function("main", inputs + taken, attrs={"num_input": len(inputs)}):
            with self.builder.dataflow():
                for node in self.graph:
                    if node.kind == "op":
                        self.emit(node)
                result = self.builder.emit_output(self.result())
            self.builder.emit_func_output(result)
        return self.builder.get()

    def result(self) -> Any:
        leaves: list[Any] = []
        structure = self.graph.output.args[0]
        map_structure(structure, lambda n: leaves.append(self.value(n)) if isinstance(n, Node) else None)
        return leaves[0] if isinstance(structure, Node) else relax.Tuple(leaves)

    def value(self, node: Node) -> Any:
        if node not in self.values:
            shape, tensor = self.shapes[node], self.known[node]
            if plain(shape) == tuple(tensor.shape):
                self.values[node] = relax.const(tensor.numpy(), tensor.dtype)
            else:
                self.values[node] = self.free_constant(node, tensor, shape)
        return self.values[node]

    def free_constant(self, node: Node, tensor: Tensor, shape: Any) -> Any:
        """A constant whose shape follows a free size: possible where it holds one value."""
        numbers = np.unique(tensor.numpy())
        if len(numbers) != 1:
            raise Unsupported(f"[tvm] {node.name} holds numbers for one batch size; export it without symbolic_batch.")
        return self.builder.emit(relax.op.full(shape, relax.const(numbers[0], tensor.dtype), tensor.dtype))

    def emit(self, node: Node) -> None:
        op = node.target
        stretched = isinstance(op, BroadcastTo)  # which would take memory
        if all(a in self.known for a in node.args) and not stretched:
            self.known[node] = op(*(self.known[a] for a in node.args))
            return
        if isinstance(op, TupleGetItem):
            self.values[node] = self.builder.emit(relax.TupleGetItem(self.value(node.args[0]), op.index))
            return
        inputs = [self.value(a) for a in node.args]
        specs, shapes = each(op, node.meta["spec"]), each(op, self.shapes[node])
        outs = [Spec(tuple(shape), spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]
        direct = isinstance(op, RELAX_ONLY) or not self.use_te
        whole = as_relax(op, outs if op.n_out > 1 else outs[0], *inputs) if direct else None
        if whole is not None:
            self.values[node] = self.builder.emit(whole, op.label)
            return

        def expression(*arguments: Any) -> Any:
            xs, shapes = arguments[: len(inputs)], arguments[len(inputs) :]
            specs = [Spec(plain(s), o.dtype) for s, o in zip(shapes, outs, strict=True)]
            if op.n_out > 1:
                return list(as_te(op, specs, *xs))
            made = as_te(op, specs[0], *xs)
            made = made[0] if isinstance(made, list) else made  # a tuple of one
            unwritten = any(made.same_as(x) for x in xs)  # a function has to write its result
            return topi.identity(made) if unwritten else made

        hint = te_name(op)
        expression.__name__ = hint
        try:
            self.values[node] = self.builder.emit_te(
                expression, *inputs, *(s.shape for s in outs), primfunc_name_hint=hint
            )
        except (NotImplementedError, TypeError, AttributeError) as e:
            raise Unsupported(f"[tvm] {op.label} cannot be exported: {e}.") from e


def to_tvm_tensor(
    model: Callable,
    *args: Any,
    params_as_inputs: bool = False,
    te: bool = True,
    symbolic_batch: bool = False,
) -> Any:
    """Relax IRModule whose `main` computes model(*args).

    args: tensors of any library or Specs (shape, dtype), of which only shapes and dtypes count. params_as_inputs: parameters
    and buffers are further inputs of `main`, in the order of `parameter_names`, instead of constants. te: tensor expressions
    (fused and tuned by TVM) for every op; else Relax's operators where an op has one. symbolic_batch: axis 0 of every input
    is free. Raises Unsupported for what cannot be exported.
    """
    if isinstance(model, Module):
        model.check_evaluation("to_tvm_tensor")
    examples = map_structure(list(args), as_example)
    batch = tirx.Var("batch", "int64") if symbolic_batch else None
    graph, shapes = shaped(partial(graph_of, model), examples, batch)
    return Exporter(graph, shapes, params_as_inputs, te).module()


def parameter_values(model: Module, *args: Any) -> list[Tensor]:
    """What a module exported with params_as_inputs takes after its inputs."""
    graph = graph_of(model, map_structure(list(args), as_example))
    return [n.meta["tensor"] for n in graph if n.kind == "param" and isinstance(n.target, str)]
