"""PyTorch models to needle: convert, check, compile, verify, explain, and rules of your own.

torch is imported when the first of these names is asked for, so that `torch2needle --help` answers at once.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from needle.autograd import Unsupported

    from . import rules
    from .bridges import dynamo
    from .convert import check, compile, convert
    from .original import convert_function_node, convert_layer, load_torch_weights_by_mapping, torch2needle_fx
    from .report import ConversionError
    from .rules.registry import rule
    from .tools.explain import explain
    from .tools.verify import Verification, verify
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
ROOMS = ("rules", "dynamo")  # register the rules, and the backend of torch.compile
HOMES = ("convert", "original", "report", "rules.registry", "tools.explain", "tools.verify", "weights")


def load() -> None:
    """Import all that has a public name."""
    try:
        import torch  # noqa: F401
    except ImportError as e:
        raise ImportError(f"[torch2needle] torch is missing, `pip install torch` brings it, got: {e}.") from e
    for module in (importlib.import_module(f"{__name__}.{m}") for m in (*ROOMS, *HOMES)):
        found = {n: v for n, v in vars(module).items() if n in __all__ and not isinstance(v, types.ModuleType)}
        globals().update(found)


class Package(types.ModuleType):
    """Where a function and a submodule have one name, it is the function's."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        load()
        return globals()[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> Any:  # modules as such are pickled by name, as of functions that Ray sends to processes
        return importlib.import_module, (__name__,)


sys.modules[__name__].__class__ = Package
if sys.modules.get("torch"):
    load()
