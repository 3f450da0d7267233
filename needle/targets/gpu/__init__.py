"""GPUs: plain arrays, images as (N, H, W, C) by their strides, kernels with epilogues."""

from . import layers
from .target import GPU

__all__ = ["GPU", "layers"]
