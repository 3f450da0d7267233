"""PyTorch models to needle: convert, check, compile, verify, explain, and rules of your own."""

from needle.autograd import Unsupported

from . import dynamo, rules  # registers the backend of torch.compile, and the rules
from .convert import check, compile, convert
from .explain import explain
from .original import convert_function_node, convert_layer, load_torch_weights_by_mapping, torch2needle_fx
from .registry import rule
from .report import ConversionError
from .verify import Verification, verify
from .weights import to_torch

__all__ = [
    "ConversionError",
    "Unsupported",
    "Verification",
    "check",
    "compile",
    "convert",
    "convert_function_node",
    "convert_layer",
    "dynamo",
    "explain",
    "load_torch_weights_by_mapping",
    "rule",
    "rules",
    "to_torch",
    "torch2needle_fx",
    "verify",
]
