"""The CPU: images in blocks of 16 channels inside rings of zeros, weights packed once."""

from . import convolution, linear, maps, norms, pairs, training
from .target import CPU

__all__ = ["CPU", "convolution", "linear", "maps", "norms", "pairs", "training"]
