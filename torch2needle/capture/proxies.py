"""Proxies that answer what a forward asks of a tensor as torch would, or end the capture: Python takes no branch by accident."""

from __future__ import annotations

import dis
import functools
import operator
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..rules.registry import INPLACE_OPERATORS

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
MODELS_FOLDER = os.path.join(OWN_FOLDER, "models") + os.sep  # whose lines are a user's
TRACING_FOLDERS = (os.path.join(TORCH_FOLDER, "fx") + os.sep, OWN_FOLDER)
SEVERAL = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)  # modules whose results are tuples
# Attributes that stay values of the graph; the others, such as requires_grad and grad_fn, are Python's to branch on.
VALUES = {"shape": torch.Size, "ndim": int, "dtype": torch.dtype, "device": torch.device} | dict.fromkeys(
    ("T", "mT", "H", "mH", "real", "imag", "data"), torch.Tensor
)
KNOWN = (int, float, bool, tuple, torch.Size, torch.dtype, torch.device)  # whose attributes are those of their types
READS = ("LOAD_ATTR", "LOAD_METHOD")  # of an attribute, where others ask whether there is one
OWN = {"tracer", "node", "root", "attr", "_node"}  # what proxies are made of


def is_foreign(filename: str) -> bool:
    """Neither ours nor torch's: the line that a user would look at."""
    return filename.startswith(MODELS_FOLDER) or not filename.startswith((TORCH_FOLDER, OWN_FOLDER, "<"))


@functools.cache
def result_kind(name: str) -> Any:
    """The type that torch's functions of this name give; None where that differs between them or is not known."""
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) or getattr(torch.ops.aten, name, None)
    if packet is None:
        return torch.Tensor if hasattr(nn.functional, name) else None
    schemas = [getattr(packet, o)._schema for o in packet.overloads()]
    texts = {tuple(str(r.type) for r in s.returns) for s in schemas if "Tensor" in str(s)}  # not those of numbers alone
    return {"Tensor": torch.Tensor, "int": int, "bool": bool}.get(" ".join(texts.pop())) if len(texts) == 1 else None


def kind_of(node: fx.Node, model: nn.Module) -> Any:
    """The type of a captured value, from those of its inputs; None where only a run would tell."""
    if node.op in ("placeholder", "get_attr"):
        return torch.Tensor
    if node.op == "call_module":
        return kind_of_layer(model.get_submodule(str(node.target)))
    if node.kwargs.get("return_indices"):
        return tuple
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    parts = [a.meta.get("kind") for a in node.all_input_nodes]
    if name == "getattr":
        return VALUES.get(str(node.args[1]))
    if name == "size":
        return int if len(node.args) > 1 or node.kwargs else torch.Size
    if name in ("dim", "numel", "len"):
        return int
    if name == "getitem" and parts and parts[0] is not torch.Tensor:
        return int if parts[0] is torch.Size and not isinstance(node.args[1], slice) else None
    if getattr(node.target, "__module__", "") in ("_operator", "math"):
        return torch.Tensor if torch.Tensor in parts else None if None in parts else kind_of_numbers(node)
    return result_kind(name)


def is_rank(node: fx.Node) -> bool:
    """The number of a tensor's axes."""
    if node.op == "call_method":
        return node.target in ("dim", "ndimension")
    of_shape = node.target is len and isinstance(part := node.args[0], fx.Node) and part.meta.get("kind") is torch.Size
    return of_shape or (node.target is getattr and node.args[1] == "ndim")


def kind_of_layer(layer: nn.Module) -> Any:
    if isinstance(layer, SEVERAL) or getattr(layer, "return_indices", False):
        return tuple
    named = isinstance(layer, nn.AdaptiveLogSoftmaxWithLoss)  # its tuple has names
    known = not named and any(c.__module__.startswith("torch.nn.") for c in type(layer).__mro__ if c is not nn.Module)
    return torch.Tensor if known else None


def kind_of_numbers(node: fx.Node) -> Any:
    """The type of what Python computes of sizes: of ones in their places."""
    if node.target is operator.pow and not isinstance(node.args[1], int):
        return None  # which signs tell
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["kind"](1))
        return type(node.target(*args, **kwargs))  # type: ignore[operator]
    except Exception:
        return None


@functools.cache
def comparisons(code: types.CodeType) -> set[int]:
    """Where the code reads an attribute that it compares by `is` with a global name or an attribute of one."""
    steps = list(dis.get_instructions(code))
    names = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_FAST", "LOAD_DEREF", "LOAD_NAME")
    found = set()
    for i, step in enumerate(steps):
        following = (s for s in steps[i + 1 : i + 6] if s.opname not in ("CACHE", "RESUME"))
        if step.opname == "LOAD_ATTR":
            rest = next((s.opname for s in following if s.opname not in names), "")
            found.update([step.offset] if rest == "IS_OP" else [])
    return found


def is_compared(frame: types.FrameType) -> bool:
    """Whether the attribute that the frame reads is compared by `is`, where a proxy would not be what it stands for."""
    return is_foreign(frame.f_code.co_filename) and frame.f_lasti in comparisons(frame.f_code)


def step_of(frame: types.FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


class InplaceProxy(fx.Proxy):
    """Passes for what it stands for; `x += y` and `x[i] = y` are captured as what they are, where fx would record a plain add."""

    def stands_for(self) -> Any:
        """The type of the value, for `isinstance` and `type` of the forward's own modules."""
        tensor = self.tensor_of_model()
        return type(tensor) if tensor is not None else self.kind() or self.tracer.type_of(self)  # type: ignore[attr-defined]

    def tensor_of_model(self) -> torch.Tensor | None:
        """The parameter or buffer that it is."""
        if self.kind() is not torch.Tensor or self.node.op != "get_attr":
            return None
        return dict(self.tracer.names.values()).get(str(self.node.target))  # type: ignore[attr-defined]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """As `match` and singledispatch ask; torch's C functions, which ask before they read memory, learn the truth."""
        frame = sys._getframe(1)
        asks = step_of(frame) in ("LOAD_ATTR", "MATCH_CLASS")
        return self.stands_for() if asks and is_foreign(frame.f_code.co_filename) else type(self)

    def kind(self) -> Any:
        return self.node.meta.get("kind")

    def __getattr__(self, name: str) -> Any:
        kind, frame = self.kind(), sys._getframe(1)
        if kind is None and is_foreign(frame.f_code.co_filename) and step_of(frame) not in READS:
            kind = self.stands_for()  # for getattr with a default
        if kind in KNOWN and not hasattr(kind, name):
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")
        if kind is torch.Tensor:
            if not hasattr(torch.Tensor, name):
                if (tensor := self.tensor_of_model()) is not None and hasattr(tensor, name):
                    value = getattr(tensor, name)  # which somebody hung on a parameter
                    plain = isinstance(value, int | float | str | None)
                    return value if plain else self.tracer.refuse(f"a tensor's {name}")  # type: ignore[attr-defined]
                raise AttributeError(f"'Tensor' object has no attribute '{name}'")
            python = name not in VALUES and not callable(getattr(torch.Tensor, name))
            if python and is_foreign(frame.f_code.co_filename):
                self.tracer.refuse(f"a tensor's {name}")  # type: ignore[attr-defined]
        tracer: Any = self.tracer
        if kind is torch.device and (device := tracer.device(self)) is not None:
            return getattr(device, name)
        if name in ("dtype", "device", "shape") and is_compared(frame):
            known = tracer.dtype(self) if name == "dtype" else None
            return known or tracer.refuse(f"a tensor's {name}, which it compares by `is`")
        made = AttributeProxy(self, name)
        if name in VALUES:  # as it is now, before a write gives the tensor another shape
            made.node  # noqa: B018 - this is what records it
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in OWN:
            self.tracer.refuse(f"an attribute of a tensor, which it sets ({name})")  # type: ignore[attr-defined]
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        if is_foreign(sys._getframe(1).f_code.co_filename):  # a look-up in a dict or set would not find it
            if is_rank(self.node):
                return hash(self.tracer.number(self))  # type: ignore[attr-defined]
            self.tracer.refuse("a value that it looks up in a dict or set")  # type: ignore[attr-defined]
        return id(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __len__(self) -> int:
        return self.tracer.length(self)  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.tracer.plain(self, sys._getframe(1)))  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.tracer.plain(self, sys._getframe(1)))  # type: ignore[attr-defined]

    def __round__(self, *digits: int) -> Any:
        if self.kind() is float:
            return self.tracer.create_proxy("call_function", round, (self, *digits), {})
        return round(self.tracer.number(self), *digits)  # type: ignore[attr-defined]

    def __index__(self) -> int:
        return operator.index(self.tracer.number(self))  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.tracer.number(self))  # type: ignore[attr-defined]

    def __contains__(self, value: Any) -> bool:
        return self.tracer.refuse("the values of a tensor")  # type: ignore[attr-defined]


class AttributeProxy(InplaceProxy, fx.proxy.Attribute):
    def kind(self) -> Any:
        return VALUES.get(self.attr) if self._node is None else super().kind()


Sequence.register(AttributeProxy)  # so that `match x.shape` asks for its length


def _inplace(name: str) -> Callable:
    function = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in INPLACE_OPERATORS - {"setitem"}:
    setattr(InplaceProxy, f"__{_name}__", _inplace(_name))
