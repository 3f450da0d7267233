"""PyTorch models to needle: convert, check, compile, and rules of your own."""

from needle.autograd import Unsupported

from . import rules  # registers the rules
from .convert import check, compile, convert
from .registry import rule
from .report import ConversionError

__all__ = ["ConversionError", "Unsupported", "check", "compile", "convert", "rule", "rules"]
