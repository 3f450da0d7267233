"""Operator fusion: declared patterns and the engine that rewrites needle graphs with them."""

from needle.ops import (
    fused_batchnorm_relu,
    fused_conv2d_relu,
    fused_conv_batchnorm2d,
    fused_conv_batchnorm2d_relu,
    fused_linear_batchnorm,
    fused_linear_batchnorm_relu,
    fused_linear_relu,
    fused_multihead_attention,
)

from .engine import REGISTRY, Fusion, explain, fuse, register
from .matcher import Match, Pattern
from .original import OperatorFusion, fuse_operators
from .report import Fired, FusionReport, NearMiss
from .steps import Step, Steps

from . import patterns  # isort: skip  (registers them)

__all__ = [
    "REGISTRY",
    "Fired",
    "Fusion",
    "FusionReport",
    "Match",
    "NearMiss",
    "OperatorFusion",
    "Pattern",
    "Step",
    "Steps",
    "explain",
    "fuse",
    "fuse_operators",
    "fused_batchnorm_relu",
    "fused_conv2d_relu",
    "fused_conv_batchnorm2d",
    "fused_conv_batchnorm2d_relu",
    "fused_linear_batchnorm",
    "fused_linear_batchnorm_relu",
    "fused_linear_relu",
    "fused_multihead_attention",
    "patterns",
    "register",
]
