"""Operator fusion: declared patterns, for the engine that rewrites needle graphs with them."""

from needle.exports import public
from needle.graph.engine import Fusion
from needle.graph.matcher import Match, Pattern
from needle.graph.report import Fired, FusionReport, NearMiss
from needle.graph.steps import Step, Steps
from needle.ops.fused.attention import *
from needle.ops.fused.layer import *

from . import patterns, spelled  # registers them
from .fuse import REGISTRY, explain, fuse, register
from .original import OperatorFusion, fuse_operators

__all__ = ["patterns", "spelled", *public(globals())]
