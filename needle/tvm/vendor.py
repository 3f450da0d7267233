"""needle's kernels as packed functions of TVM, called with `relax.call_dps_packed`, and the partition that calls them.

A packed function takes its inputs, whole numbers, and the array for its result, all over DLPack without a copy:

env.relu(x, out)
env.linear(x, weight, bias, out)              weight (out, in), as torch's; also env.linear_relu
env.conv2d(x, weight, bias, out)              stride 1, no padding; or with stride (2), padding (top, left, bottom, right),
                                              dilation (2) and groups before `out`; also env.conv2d_relu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax

from needle.autograd import Op, Tensor
from needle.backend_ndarray import NDArray, call, from_dlpack
from needle.graph import Graph, Node, Recorder, map_structure, trace
from needle.graph.engine import Fusion, Rewriting, Rules
from needle.graph.exporting import as_example, exact_shapes, input_names
from needle.graph.matcher import Match, Pattern
from needle.graph.report import Fired, NearMiss
from needle.graph.steps import Steps
from needle.nn import Module
from needle.ops.fused.layer import FusedLayer
from needle.ops.linalg.basic import Linear
from needle.ops.math.activation import ReLU, activation_code
from needle.ops.nn.conv import Conv2d
from needle.ops.nn.norm import BatchNorm
from needle.targets.folds import FOLDS

from .export import Exporter, ExportRecorder

# -- packed functions ----------------------------------------------------------------------------------------------------


def register(name: str, f: Callable[..., None], convert: Callable[[Any], Any] = from_dlpack) -> None:
    """Make f(*inputs, *numbers, out) callable from Relax as `name`; arrays come as what `convert` makes of them."""

    def packed(*args: Any) -> None:
        f(*(convert(a) if isinstance(a, tvm.runtime.Tensor) else int(a) for a in args))

    tvm.register_global_func(name, packed, override=True)


def relu(x: NDArray, out: NDArray) -> None:
    call("relu", [out], x=x)


def linear_with(activation: str) -> Callable[..., None]:
    code = activation_code(activation)

    def linear(x: NDArray, weight: NDArray, bias: NDArray, out: NDArray) -> None:
        rows, results = (a.reshape((-1, a.shape[-1])) for a in (x, out))
        call("matmul", [results], a=rows, b=weight.permute((1, 0)), bias=bias, activation=code, alpha=0)

    return linear


def conv2d_with(activation: str) -> Callable[..., None]:
    def conv2d(x: NDArray, weight: NDArray, bias: NDArray, *rest: Any) -> None:
        *numbers, out = rest
        op = Conv2d(tuple(numbers[:2]), tuple(numbers[2:6]), tuple(numbers[6:8]), numbers[8]) if numbers else Conv2d()
        op.into(out, x, weight, bias, activation=activation)

    return conv2d


register("env.relu", relu)
for suffix, function in (("", "none"), ("_relu", "relu")):
    register(f"env.linear{suffix}", linear_with(function))
    register(f"env.conv2d{suffix}", conv2d_with(function))


def call_packed(name: str, inputs: Sequence[Any], shape: Sequence[int], numbers: Sequence[int] = ()) -> Any:
    """Relax's call of a packed function with a float32 result of this shape."""
    args = [*inputs, *(relax.prim_value(n) for n in numbers)]
    return relax.call_dps_packed(name, relax.Tuple(args), out_ty=relax.TensorType(tuple(shape), "float32"))


# -- the partition -------------------------------------------------------------------------------------------------------

LAYERS = (Conv2d, Linear)


def stays(op: Op) -> bool:
    """Whether the partition looks at an op itself: at layers, and at fused ones that end in ReLU and add nothing."""
    if isinstance(op, FusedLayer):
        return isinstance(op.base, LAYERS) and op.activation == "relu" and not op.has_residual
    return isinstance(op, (*LAYERS, BatchNorm))


class VendorRecorder(ExportRecorder):
    """Records the layers that needle's kernels may take as they are; everything else as for export."""

    def record(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        return Recorder.record(self, op, inputs) if stays(op) else super().record(op, inputs)


def with_relu(match: Match) -> tuple[Op, list[Node]]:
    layer = match["layer"]
    return FusedLayer(layer.op, "relu", has_bias=len(layer.inputs) > 2), list(layer.inputs)


def is_float32(match: Match) -> str | None:
    found = next((n.meta["spec"].dtype for n in match["layer"].inputs if n.meta["spec"].dtype != "float32"), None)
    return found and f"{match['layer'].node.name} reads {found}"


CALLS = Rules("to_tvm_vendor")
for cls in LAYERS:
    pattern = Pattern.op("layer", cls).then("act", ReLU)
    why = "needle's kernel ends in the ReLU"
    CALLS.register(Fusion(f"{cls.__name__}ReLU", pattern, with_relu, (is_float32,), why=why, suffix="_relu"))


def partition(graph: Graph) -> tuple[Graph, list[Fired], list[NearMiss]]:
    """Batch norms folded into the layers before them; a layer and the ReLU that alone reads it become one fused op. With what
    was rewritten, and what nearly.
    """
    fired: list[Fired] = []
    misses: list[NearMiss] = []
    for rules in (FOLDS, CALLS):
        found = Rewriting(Steps(graph), rules.select())
        graph, lines = found.rewrite(static=True)
        fired, misses = fired + lines, misses + found.misses
    return graph.prune(), fired, misses


class VendorExporter(Exporter):
    """Emits fused layers as calls of needle's kernels."""

    def emit(self, node: Node) -> None:
        if not isinstance(node.target, FusedLayer) or all(a in self.known for a in node.args):
            super().emit(node)
            return
        op = node.target.base
        shape = self.shapes[node]
        x, weight, *bias = (self.value(a) for a in node.args)
        if isinstance(op, Conv2d):
            name, channels = "env.conv2d_relu", shape[1]
            numbers = [*op.stride, *op.padding, *op.dilation, op.groups]
        else:
            name, channels, numbers = "env.linear_relu", shape[-1], []
            if op.layout_of_weight == "needle":
                weight = self.builder.emit(relax.op.permute_dims(weight))
        added = bias[0] if bias else self.builder.emit(relax.op.zeros((channels,), "float32"))
        if added.ty.ndim != 1:
            added = self.builder.emit(relax.op.reshape(added, (channels,)))
        self.values[node] = self.builder.emit(call_packed(name, [x, weight, added], shape, numbers))


def to_tvm_vendor(model: Callable, *args: Any) -> Any:
    """Relax IRModule of model(*args) in which convolution (+ batch norm) + ReLU and linear + ReLU are needle's kernels.

    Arguments as `to_tvm_tensor`; a model from `operator_fusion.fuse` gives its own fused layers. Everything else is TVM's.
    """
    if isinstance(model, Module):
        model.check_evaluation("to_tvm_vendor")
    examples = map_structure(list(args), as_example)
    graph, *_ = partition(
        trace(model, *examples, names=input_names(model, examples), recorder=VendorRecorder(static=True)).prune()
    )
    return VendorExporter(graph, exact_shapes(graph), False, True).module()
