"""Which ops make images, and which ones work on images however they lie: what both targets build their layouts on."""

from __future__ import annotations

from needle.autograd import Spec
from needle.graph import Graph, Node
from needle.op import Op
from needle.ops.common import Elementwise
from needle.ops.fused.layer import FusedLayer
from needle.ops.math.arithmetic import OwnGradient, Whole
from needle.ops.nn.conv import Conv2dWeightGrad, ImageLayer
from needle.ops.nn.image_parts import (
    BatchNormGradApply,
    BatchNormGradSums,
    BatchNormMoments,
    ChannelSlice,
    ChannelSums,
    PixelNorm,
    VolumeNorm,
)
from needle.ops.nn.layer_norm import GroupNorm
from needle.ops.nn.norm import BatchNorm, BatchNormTrain, BatchNormTrainGrad
from needle.ops.nn.pool import AdaptiveAvgPool2dGrad, AvgPool2dGrad, MaxPool2dGrad, Pool
from needle.ops.nn.pool_nd import DepthPool
from needle.ops.nn.resize import Interpolate, InterpolateGrad
from needle.ops.nn.volumes import DepthTaps, FramesOfChannels
from needle.ops.reduce.basic import Reduction
from needle.ops.shape.basic import Pad
from needle.ops.shape.join import Concat, TupleGetItem

# Ops whose results are no images, though they read some.
READS = (BatchNormGradSums, BatchNormMoments, ChannelSums, Conv2dWeightGrad)
GRADIENTS = (AdaptiveAvgPool2dGrad, AvgPool2dGrad, BatchNormGradApply, InterpolateGrad, MaxPool2dGrad)
TRAINED = (BatchNormTrain, BatchNormTrainGrad)  # several results, the first of them an image
FOLLOWS = (
    BatchNorm,
    ChannelSlice,
    Concat,
    DepthPool,
    Elementwise,
    FramesOfChannels,
    GroupNorm,
    Interpolate,
    Pad,
    PixelNorm,
    Pool,
    VolumeNorm,
    *GRADIENTS,
)
PLAIN = (OwnGradient, Whole)  # several steps, which know of no layout


def main_op(op: Op) -> Op:
    """A fused layer's base, or the batch norm where it has none; any other op itself."""
    return (op.base or BatchNorm(op.eps)) if isinstance(op, FusedLayer) else op


def starts(op: Op) -> bool:
    """Whether images of a target's layout begin here."""
    return isinstance(main_op(op), ImageLayer | DepthTaps)


def images(graph: Graph) -> set[Node]:
    """The nodes of a graph whose values, or the first of them, lie as a layer of images leaves them."""
    found: set[Node] = set()
    for n in graph:
        if n.kind != "op":
            continue
        op = n.target
        keeps = follows(op) or isinstance(op, TRAINED) or (isinstance(op, TupleGetItem) and op.index == 0)
        if starts(op) or (keeps and any(a in found for a in n.args)):
            found.add(n)
    return found


def follows(op: Op) -> bool:
    """Whether the result lies as the images that the op reads."""
    return isinstance(main_op(op), FOLLOWS) and not isinstance(op, PLAIN)


def reads_images(op: Op, x: Spec) -> bool:
    """Whether the op reads images as they lie, though its result is none: sums and extremes of all pixels of a channel, too."""
    if not isinstance(op, Reduction) or type(op).compute is not Reduction.compute:
        return isinstance(op, READS)
    return x.ndim == 4 and sorted(op._arguments(x)[0]) == [2, 3]
