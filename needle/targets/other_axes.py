"""Sequences and volumes as images: what maps their channels is done before the images are seen as something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from needle.graph import Graph, Node
from needle.op import Op, Spec
from needle.ops.common import Elementwise, Layer
from needle.ops.fused.layer import FusedLayer
from needle.ops.math.activation import activation_op
from needle.ops.math.elementwise import EWiseAdd
from needle.ops.nn.image_parts import VolumeNorm
from needle.ops.nn.layer_norm import GroupNorm
from needle.ops.nn.norm import BatchNorm
from needle.ops.nn.volumes import FramesOfVolume, VolumeOfFrames
from needle.ops.shape.basic import Reshape, Squeeze, Unsqueeze
from needle.ops.shape.join import Concat
from needle.targets.branches import add
from needle.targets.images import PLAIN

ROW = 2  # the axis of size 1 that a sequence has as an image


def on_images(graph: Graph, lowers: Callable[[Op], Any]) -> Graph:
    """The graph in which images are seen as sequences or volumes as late as can be, and not at all where a layer of images
    reads them next. lowers: whether the target plans an op that works on images alone.
    """
    if not any(n.kind == "op" and leads_back(n) for n in graph):
        return graph
    image: dict[Node, tuple[Node, Op]] = {}  # of a sequence or volume: its images, and what leads back from them

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node.kind != "op":
            return None
        op, args = node.target, [done[a] for a in node.args]
        if leads_there(node) and args[0] in image:
            return image[args[0]][0]
        if leads_back(node):
            back, inputs, made = op, args, args[0]
        else:
            found = image_arguments(new, node, args, image)
            if found is None:
                return None
            back, inputs = found
            if isinstance(op, GroupNorm) and isinstance(back, VolumeOfFrames):
                op = VolumeNorm(op, back.depth)
                if not lowers(op):
                    return None
            made = mapped(new, node, op, inputs)
        seen = add(new, back, [made], node)
        image[seen] = made, back
        return seen

    return graph.copy(replace).prune()


def leads_back(node: Node) -> bool:
    """Whether images become sequences or volumes."""
    op = node.target
    if isinstance(op, Squeeze) and node.args[0].meta["spec"].ndim == 4:
        return op.axes in (ROW, (ROW,)) and node.meta["spec"].ndim == 3
    return isinstance(op, VolumeOfFrames)


def leads_there(node: Node) -> bool:
    op = node.target
    return isinstance(op, FramesOfVolume) or (
        isinstance(op, Unsqueeze) and op.axis == ROW and node.meta["spec"].ndim == 4
    )


def image_arguments(
    new: Graph, node: Node, args: Sequence[Node], image: dict[Node, tuple[Node, Op]]
) -> tuple[Op, list[Node]] | None:
    """For an op that works on every image alone: what leads back from its result, and its inputs as images."""
    op, out = node.target, node.meta["spec"]
    backs = [image[a][1] for a in args if a in image]
    if not backs or not isinstance(out, Spec) or not works_on_images(op, out.ndim):
        return None
    if out.dtype != args[0].meta["spec"].dtype:
        return None
    back = max(backs, key=depth_of)
    if out.ndim != (3 if isinstance(back, Squeeze) else 5) or (out.ndim == 5 and out.shape[2] != depth_of(back)):
        return None
    inputs = []
    for i, a in enumerate(args):
        spec = a.meta["spec"]
        if op.is_weight(i):
            inputs.append(a)
        elif a in image and spec.ndim == out.ndim and spec.shape[0] == out.shape[0]:
            if depth_of(image[a][1]) != depth_of(back) and out.shape[0] > 1:
                return None  # frames of several samples are no frames of one
            inputs.append(image[a][0])
        elif spec.shape == out.shape and isinstance(op, Elementwise):
            inputs.append(add(new, Unsqueeze(ROW) if isinstance(back, Squeeze) else FramesOfVolume(), [a], node))
        elif isinstance(op, Elementwise) and (shape := per_channel(spec.shape, out.ndim)) is not None:
            inputs.append(add(new, Reshape(shape), [a], node))
        else:
            return None
    return back, inputs


def depth_of(back: Any) -> int:
    """Images of a sample."""
    return back.depth if isinstance(back, VolumeOfFrames) else 1


def works_on_images(op: Any, ndim: int) -> bool:
    if isinstance(op, Elementwise):
        return not isinstance(op, PLAIN)
    if isinstance(op, Concat):
        return op.axis in (1, 1 - ndim)
    return isinstance(op, BatchNorm | GroupNorm) or (isinstance(op, FusedLayer) and op.base is None)


def per_channel(shape: Sequence[int], ndim: int) -> tuple[int, ...] | None:
    """The shape among images of an operand with a number for each channel, or one for all; None for others."""
    full = (*(1,) * (ndim - len(shape)), *shape)
    return (1, full[1], 1, 1) if full == (1, full[1], *(1,) * (ndim - 2)) else None


def mapped(new: Graph, node: Node, op: Any, inputs: list[Node]) -> Node:
    """The op on images; a batch norm with what follows it in parts where the layer before may take them."""
    if isinstance(op, Concat):
        return add(new, Concat(1), inputs, node)
    if not isinstance(op, FusedLayer) or not isinstance(inputs[0].target, Layer):
        return add(new, op, inputs, node)
    x, weight, bias, mean, var = inputs[:5]
    made = add(new, BatchNorm(op.eps), [x, mean, var, weight, bias], node)
    if op.has_residual:
        made = add(new, EWiseAdd(), [made, inputs[5]], node)
    if op.activation == "none":
        return made
    return add(new, activation_op(op.activation, op.alpha), [made], node)
