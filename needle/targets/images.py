"""Which ops make images, and which ones work on images however they lie: what both targets build their layouts on."""

from __future__ import annotations

from needle.op import Op
from needle.ops.common import Elementwise
from needle.ops.fused.layer import FusedLayer
from needle.ops.math.arithmetic import OwnGradient, Whole
from needle.ops.nn.conv import ImageLayer
from needle.ops.nn.norm import BatchNorm
from needle.ops.nn.pool import Pool
from needle.ops.nn.resize import Interpolate
from needle.ops.shape.basic import Pad
from needle.ops.shape.join import Concat

FOLLOWS = (Elementwise, BatchNorm, Concat, Interpolate, Pad, Pool)
PLAIN = (OwnGradient, Whole)  # several steps, which know of no layout


def main_op(op: Op) -> Op:
    """A fused layer's base, or the batch norm where it has none; any other op itself."""
    return (op.base or BatchNorm(op.eps)) if isinstance(op, FusedLayer) else op


def starts(op: Op) -> bool:
    """Whether images of a target's layout begin here."""
    return isinstance(main_op(op), ImageLayer)


def follows(op: Op) -> bool:
    """Whether the result lies as the images that the op reads."""
    return isinstance(main_op(op), FOLLOWS) and not isinstance(op, PLAIN)
