"""needle models as ONNX: every op of a traced call becomes nodes, what depends on parameters alone is computed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

try:
    from onnx import ModelProto, checker, helper, numpy_helper, save_model
except ImportError:
    raise ImportError("[to_onnx] files need onnx, got none: pip install onnx, which is the extra onnx.") from None

from needle import ops
from needle.autograd import Op, Spec, Tensor, Unsupported
from needle.executor.arguments import example_call
from needle.graph import Graph, Node, exporting, map_structure
from needle.graph.exporting import Ramp, as_example, has_row, shaped, traced
from needle.nn import Module
from needle.ops.shape.basic import BroadcastTo
from needle.ops.shape.creation import Full
from needle.ops.shape.join import MakeTuple, TupleGetItem

from . import arithmetic, matrices, places  # noqa: F401 - they register their rows
from .operators import SCALAR, SCALAR_COMPARED, as_onnx

OPSET, IR = 20, 9
# Ops whose rows take numbers that follow the batch.
NUMBERED = {*SCALAR, *SCALAR_COMPARED, ops.RDivScalar, ops.NotEqualScalar, ops.WeightedSum, ops.Wrapped, ops.GetItem}
LARGE = 1_500_000_000  # bytes of weights from which on they lie in a file of their own; protobuf ends at 2 GiB


@dataclass(frozen=True)
class Size:
    """A size that follows the free batch: slope * batch + offset."""

    slope: int = 1
    offset: int = 0

    def __mul__(self, by: int) -> Size:
        return Size(self.slope * by, self.offset * by)

    def __add__(self, more: int) -> Size:
        return Size(self.slope, self.offset + more)

    def __str__(self) -> str:
        return ("batch" if self.slope == 1 else f"{self.slope}*batch") + (f"+{self.offset}" if self.offset else "")


class Value(NamedTuple):
    """A value of the ONNX graph; of those inside a row neither shape nor dtype are known."""

    name: str
    shape: tuple[Any, ...] = ()
    dtype: str = ""


class Nodes:
    """The nodes and constants of an ONNX graph, as rows add them."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: dict[str, np.ndarray] = {}
        self.batch = ""  # the value that holds the free batch, once it is asked for
        self.first = ""  # the input whose axis 0 that is
        self.taken: set[str] = set()
        self.nothing = Value("")  # an optional input that is left out

    def name(self, stem: str) -> str:
        name, count = stem, 0
        while name in self.taken:
            count += 1
            name = f"{stem}_{count}"
        self.taken.add(name)
        return name

    def __call__(self, kind: str, *inputs: Value, dtype: str = "", **attributes: Any) -> Value:
        out = self.name(kind.lower())
        self.nodes.append(helper.make_node(kind, [i.name for i in inputs], [out], name=out, **attributes))
        return Value(out, (), dtype)

    def constant(self, array: Any, stem: str = "constant") -> Value:
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        name = self.name(stem)
        self.initializers[name] = array
        return Value(name, array.shape, str(array.dtype))

    def number(self, value: Any, dtype: Any) -> Value:
        if isinstance(value, Size):
            return self.cast(self.reshaped(self.sizes((value,)), ())._replace(dtype="int64"), dtype)
        return self.constant(np.array(value, str(dtype)), "number")

    def cast(self, x: Value, dtype: Any) -> Value:
        if x.dtype == str(dtype):
            return x
        return self("Cast", x, dtype=str(dtype), to=element(dtype))

    def without_bools(self, x: Value) -> Value:
        return self.cast(x, "int64") if x.dtype == "bool" else x

    def sizes(self, shape: Sequence[Any]) -> Value:
        """A shape as a vector."""
        if not any(isinstance(s, Size) for s in shape):
            return self.constant(np.array(shape, "int64"), "shape")
        if not self.batch:
            all_sizes = self("Shape", Value(self.first))
            self.batch = self("Gather", all_sizes, self.constant(np.zeros(1, "int64")), axis=0).name
        parts = []
        for s in shape:
            if isinstance(s, Size):
                scaled = self("Mul", Value(self.batch), self.constant(np.array([s.slope], "int64")))
                parts.append(self("Add", scaled, self.constant(np.array([s.offset], "int64"))))
            else:
                parts.append(self.constant(np.array([s], "int64")))
        return self("Concat", *parts, axis=0)

    def reshaped(self, x: Value, shape: Sequence[Any]) -> Value:
        free = [i for i, s in enumerate(shape) if isinstance(s, Size)]
        if len(free) == 1 and 0 not in shape:
            wanted = self.constant(np.array([-1 if i in free else s for i, s in enumerate(shape)], "int64"), "shape")
        else:
            wanted = self.sizes(shape)
        return self("Reshape", x, wanted, dtype=x.dtype, allowzero=int(0 in shape))

    def ramp(self, ramp: Ramp, shape: Sequence[Any]) -> Value:
        """The constant of a shape that is free along the ramp's axis."""
        ends = (self.number(n, "int64") for n in (0, shape[ramp.axis], 1))
        numbers = self.reshaped(
            self("Range", *ends, dtype="int64"), [-1 if i == ramp.axis else 1 for i in range(len(shape))]
        )
        steps = self("Mul", self.cast(numbers, ramp.step.dtype), self.constant(ramp.step))
        return self("Add", steps, self.constant(ramp.start), dtype=str(ramp.step.dtype))

    def row(self, x: Value) -> Value:
        """x with at least one axis."""
        return x if x.shape else self.reshaped(x, (1,))

    def with_axis(self, x: Value, f: Callable[[Value], Value]) -> Value:
        return f(x) if x.shape else self.reshaped(f(self.reshaped(x, (1,))), ())

    def sliced(self, x: Value, cuts: Sequence[tuple[int, Any, Any, int]]) -> Value:
        """cuts: (axis, first, last, step); ends may follow the batch."""
        if not cuts:
            return x
        axes, first, last, steps = (self.sizes(v) for v in zip(*cuts, strict=True))
        return self("Slice", x, first, last, axes, steps, dtype=x.dtype)


def has_size(shape: Any) -> bool:
    """Whether a size in a shape, or in one of several, is free."""
    return any(has_size(s) if isinstance(s, tuple) else isinstance(s, Size) for s in shape)


def element(dtype: Any) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(str(dtype)))


class Exporter:
    """Emits one traced graph; `shapes`: per node its shape, or its shapes, with the free sizes as Size."""

    def __init__(self, graph: Graph, shapes: dict[Node, Any]) -> None:
        self.graph, self.shapes, self.at = graph, shapes, Nodes()
        self.values: dict[Node, Any] = {}
        self.known: dict[Node, Tensor] = {}  # values that depend on parameters alone

    def model(self, label: str) -> ModelProto:
        inputs = []
        for node in self.graph.inputs:
            self.at.taken.add(node.name)
            self.values[node] = Value(node.name, self.shapes[node], str(node.meta["spec"].dtype))
            inputs.append(self.described(self.values[node]))
        self.at.first = inputs[0].name if inputs else ""
        for node in self.graph:
            if node.kind == "param":
                self.known[node] = node.meta["tensor"].detach()
            elif node.kind == "op":
                self.emit(node)
        outputs = [self.described(v) for v in self.results()]
        initializers = [numpy_helper.from_array(a, n) for n, a in self.at.initializers.items()]
        graph = helper.make_graph(self.at.nodes, label, inputs, outputs, initializers)
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, producer_name="torch2needle", opset_imports=opset, ir_version=IR)

    def described(self, v: Value) -> Any:
        return helper.make_tensor_value_info(
            v.name, element(v.dtype), [s if isinstance(s, int) else str(s) for s in v.shape]
        )

    def value(self, node: Node) -> Any:
        if node not in self.values:
            array, shape = self.known[node].numpy(), self.shapes[node]
            if has_size(shape) and (ramp := node.meta.get("ramp")) is not None:
                self.values[node] = self.at.ramp(ramp, shape)
                return self.values[node]
            if has_size(shape):
                raise Unsupported(f"[onnx] {node.name} holds numbers for one batch size; export the model for one.")
            stem = node.target if isinstance(node.target, str) else node.name
            self.values[node] = self.at.constant(array, stem)
        return self.values[node]

    def emit(self, node: Node) -> None:
        op, spec = node.target, node.meta["spec"]
        if isinstance(op, Full) and not has_size(self.shapes[node]):
            self.known[node] = Tensor(np.full(spec.shape, op.value, str(spec.dtype)), dtype=str(spec.dtype))
            return
        large = isinstance(op, BroadcastTo)  # which would take memory
        free = has_size(self.shapes[node]) or has_size(op.attributes().values())
        if all(a in self.known for a in node.args) and not large and not free:
            self.known[node] = op(*(self.known[a] for a in node.args))
            return
        inputs = [self.value(a) for a in node.args]
        if isinstance(op, TupleGetItem):
            self.values[node] = inputs[0][op.index]
        elif isinstance(op, MakeTuple):
            self.values[node] = tuple(inputs)
        elif op.n_out > 1:
            specs = [Spec(shape, s.dtype) for shape, s in zip(self.shapes[node], spec, strict=True)]
            made = as_onnx(op, self.at, specs, *inputs)
            self.values[node] = tuple(Value(v.name, *s) for v, s in zip(made, specs, strict=True))
        else:
            made = as_onnx(op, self.at, Spec(self.shapes[node], spec.dtype), *inputs)
            self.values[node] = Value(made.name, self.shapes[node], str(spec.dtype))

    def results(self) -> list[Value]:
        """The leaves of the result but None, each under a name of its own."""
        leaves: list[Any] = []
        map_structure(self.graph.output.args[0], lambda leaf: leaves.append(leaf) if leaf is not None else None)
        if not all(isinstance(leaf, Node) for leaf in leaves):
            raise Unsupported("[onnx] expects results that are tensors, got a number among them.")
        named = []
        for i, leaf in enumerate(leaves):
            v = self.value(leaf)
            out = self.at.name("output" if len(leaves) == 1 else f"output_{i}")
            self.at.nodes.append(helper.make_node("Identity", [v.name], [out], name=out))
            named.append(Value(out, v.shape, v.dtype))
        return named


class OnnxRecorder(exporting.ExportRecorder):
    def exported(self, op: Op) -> bool:
        if op.counts:
            raise Unsupported(
                f"[onnx] {op.label} has a result whose size depends on values, which the file cannot hold."
            )
        if not op.has_expression and as_onnx.dispatch(type(op)) is as_onnx.dispatch(object):
            raise Unsupported(f"[onnx] {op.label} has no operator of ONNX and does not decompose.")
        return has_row(type(op), as_onnx.registry)

    def whole(self, op: Op) -> bool:
        return op.n_out == 1 and not op.counts


def graph_of(model: Callable, examples: Sequence[Any]) -> Graph:
    graph = traced(model, examples, OnnxRecorder(static=True))
    if graph.output.meta.get("writes") or graph.output.meta.get("effects"):
        raise Unsupported("[onnx] expects a model that writes no buffers.")
    return graph.prune()


def to_onnx(model: Callable, path: str | os.PathLike[str], *args: Any, batch: str = "fixed") -> None:
    """Write `model`, a Module in evaluation or a function of tensors, as an ONNX file of opset 20.

    args: example inputs, or one dict of a converted net's by name: tensors of any library or Specs (shape, dtype), of which
    only shapes and dtypes count. batch: "fixed",
    or "free": axis 0 of every input is open, under the name "batch". Parameters keep their names; results are "output", or
    "output_0" and so on in their order, without those that are None. Weights of more than 1.5 GB lie in a file beside it.
    Raises Unsupported for what cannot be exported, and writes nothing then.
    """
    if batch not in ("fixed", "free"):
        raise ValueError(f"[onnx] batch expects 'fixed' or 'free', got {batch!r}.")
    if isinstance(model, Module):
        model.check_evaluation("to_onnx")
    if len(args) == 1 and isinstance(args[0], dict):
        args = example_call(model, args[0])
    examples = map_structure(list(args), as_example)
    graph, shapes = shaped(partial(graph_of, model), examples, Size() if batch == "free" else None, NUMBERED)
    made = Exporter(graph, shapes).model(type(model).__name__)
    large = sum(math.prod(t.dims) * 4 for t in made.graph.initializer) > LARGE
    if not large:
        checker.check_model(made)
    save_model(made, os.fspath(path), save_as_external_data=large)
