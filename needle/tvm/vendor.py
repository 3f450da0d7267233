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
from needle.executor.passes import add_op, fold_batch_norms
from needle.graph import Graph, Node, Recorder, map_structure, trace
from needle.nn import Module
from needle.ops.activation import ReLU, activation_code
from needle.ops.conv import Conv2d, conv2d_into
from needle.ops.fused import FusedConv2dActivation, FusedConvBatchNorm2d
from needle.ops.fused_linear import FusedLinearActivation, FusedLinearBatchNorm
from needle.ops.linalg import Linear
from needle.ops.norm import BatchNorm

from .export import Exporter, ExportRecorder, as_example, exact_shapes, input_names

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
        conv2d_into(out, op, x, weight, bias, activation)

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

LAYERS = (Conv2d, Linear, BatchNorm)
FUSED = (FusedConv2dActivation, FusedConvBatchNorm2d, FusedLinearActivation, FusedLinearBatchNorm)


def stays(op: Op) -> bool:
    """Whether the partition looks at an op itself: at layers, and at fused ones that end in ReLU and add nothing."""
    attributes = op.attributes()
    return isinstance(op, LAYERS) or (
        isinstance(op, FUSED) and attributes["activation"] == "relu" and not attributes.get("has_residual")
    )


class VendorRecorder(ExportRecorder):
    """Records the layers that needle's kernels may take as they are; everything else as for export."""

    def record(self, op: Op, inputs: Sequence[Tensor]) -> Any:
        return Recorder.record(self, op, inputs) if stays(op) else super().record(op, inputs)


def with_relu(layer: Op, inputs: int) -> Op | None:
    """The fused op of a layer and the ReLU after it; None where there is none."""
    if isinstance(layer, Conv2d):
        return FusedConv2dActivation(**layer.attributes(), activation="relu", has_bias=inputs > 2)
    return FusedLinearActivation("relu", 0.0, layer.layout_of_weight) if isinstance(layer, Linear) else None


def partition(graph: Graph) -> Graph:
    """Batch norms folded into the layers before them; a layer and the ReLU that alone reads it become one fused op."""
    graph = fold_batch_norms(graph)
    users = graph.users()

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node.kind != "op" or not isinstance(node.target, ReLU):
            return None
        layer = node.args[0]
        fused = with_relu(layer.target, len(layer.args)) if layer.kind == "op" and len(users[layer]) == 1 else None
        if fused is None or any(a.meta["spec"].dtype != "float32" for a in layer.args):
            return None
        return add_op(new, fused, [done[a] for a in layer.args], node.name)

    return graph.copy(replace).prune()


class VendorExporter(Exporter):
    """Emits fused layers as calls of needle's kernels."""

    def emit(self, node: Node) -> None:
        op = node.target
        if not isinstance(op, FusedConv2dActivation | FusedLinearActivation) or all(a in self.known for a in node.args):
            super().emit(node)
            return
        shape = self.shapes[node]
        x, weight, *bias = (self.value(a) for a in node.args)
        if isinstance(op, FusedConv2dActivation):
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
    graph = partition(
        trace(model, *examples, names=input_names(model, examples), recorder=VendorRecorder(static=True)).prune()
    )
    return VendorExporter(graph, exact_shapes(graph), False, True).module()
