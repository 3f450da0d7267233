"""TorchScript as modules of Python: the same parameters and buffers, and forwards that follow the scripts' graphs.

What torch.jit.script or torch.jit.trace made has no Python left that a capture could follow, but its graph says every call.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from needle.autograd import Unsupported

from .behaviour import behaviour
from .calls import call_of, varied
from .differences import disagreement
from .guard import patched

# Numbers that TorchScript has for what Python has as objects.
DTYPES = {
    **dict(enumerate((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32))),
    **{
        7: torch.float64,
        8: torch.complex32,
        9: torch.complex64,
        10: torch.complex128,
        11: torch.bool,
        15: torch.bfloat16,
    },
}
FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
OBJECTS: dict[str, Callable[[int], Any]] = {
    "ScalarType": DTYPES.__getitem__,
    "MemoryFormat": FORMATS.__getitem__,
    "Layout": lambda number: torch.strided,
}


def length(x: Any, axis: int | None = None) -> Any:
    return list(x.shape) if axis is None else x.shape[axis]


# Calls of numbers, lists, strings and sizes; what has a tensor in it is torch's.
OPERATORS = ["add", "sub", "mul", "neg", "eq", "ne", "lt", "le", "gt", "ge", "floordiv", "mod", "pow"]
PYTHON: dict[str, Callable] = {n: getattr(operator, n) for n in OPERATORS} | {
    **{"__and__": operator.and_, "__or__": operator.or_, "__not__": operator.not_, "div": operator.truediv},
    **{"remainder": operator.mod, "floor_divide": operator.floordiv, "Int": int, "Float": float, "Bool": bool},
    **{"str": str, "format": lambda text, *args: text.format(*args), "warn": lambda *_: None, "len": len},
}
LISTS: dict[str, Callable] = {
    **{
        "__is__": operator.is_,
        "__isnot__": operator.is_not,
        "list": list,
        "append": lambda a, item: a.append(item) or a,
    },
    **{"__getitem__": operator.getitem, "__contains__": operator.contains, "_set_item": operator.setitem},
    **{"extend": lambda a, b: a.extend(b), "keys": lambda d: list(d), "values": lambda d: list(d.values())},
    **{"items": lambda d: list(d.items())},
}
ASKED: dict[str, Callable] = {
    "Int": int,
    "Bool": bool,
    "Float": float,
    "IntImplicit": int,
    "FloatImplicit": float,
    "ScalarImplicit": torch.Tensor.item,
}
OF_TENSORS = {"size": length, "dim": lambda x: x.dim(), "len": lambda x: x.shape[0], "numel": lambda x: x.numel()}
SAME = ("unchecked_cast", "unchecked_unwrap_optional", "NumToTensor", "data")


class Script(nn.Module):
    """A module of TorchScript in Python."""

    def __init__(self, script: ScriptModule, made: dict[int, Script]) -> None:
        super().__init__()
        made[id(script)] = self
        self.__dict__["script"] = (script,)  # in a tuple, so that it is no child
        for name, p in script._parameters.items():
            self.register_parameter(name, as_parameter(p))
        for name, b in script._buffers.items():
            self.register_buffer(name, b)
        for name, child in script._modules.items():
            self.add_module(name, made[id(child)] if id(child) in made else Script(child, made))  # type: ignore[arg-type]
        self.training = script.training
        if not script._c._has_method("forward"):
            return
        method = script._c._get_method("forward")
        graph = method.graph.copy()
        torch._C._jit_pass_inline(graph)
        if "prim::SetAttr" in str(graph):
            raise Unsupported("[convert] expects TorchScript that sets no attributes, got some that does.")

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = forward.__signature__.bind(*args, **kwargs)  # type: ignore[attr-defined]
            bound.apply_defaults()
            (result,) = run(graph, [self, *bound.args])
            return result

        forward.__signature__ = signature_of(method.schema)  # type: ignore[attr-defined]
        self.__dict__["forward"] = forward

    def attribute(self, name: str) -> Any:
        own = name in self.__dict__ or name in self._parameters or name in self._buffers or name in self._modules
        return getattr(self, name) if own else getattr(self.script[0], name)  # type: ignore[index]


def as_parameter(p: Any) -> Any:
    """Copies of a script hold plain tensors."""
    return p if p is None or isinstance(p, nn.Parameter) else nn.Parameter(p, requires_grad=p.requires_grad)


def signature_of(schema: Any) -> inspect.Signature:
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(a.name, kind, default=a.default_value if a.has_default_value() else empty)
            for a in schema.arguments[1:]
        ]
    )


def run(block: Any, given: list[Any], known: dict[int, Any] | None = None) -> list[Any]:
    """The results of a graph or of a block in it, which sees the `known` values around it."""
    values = dict(known or {}) | {v.unique(): g for v, g in zip(block.inputs(), given, strict=True)}
    for node in block.nodes():
        results = step(node, [values[v.unique()] for v in node.inputs()], values)
        values.update((v.unique(), r) for v, r in zip(node.outputs(), results, strict=True))
    return [values[v.unique()] for v in block.outputs()]


def step(node: Any, args: list[Any], known: dict[int, Any]) -> list[Any]:
    """The values that a node makes of its arguments."""
    space, _, name = node.kind().partition("::")
    if space == "aten":
        result = call(node, name, args)
        return [result] if node.outputsSize() == 1 else list(result or ())
    blocks = list(node.blocks())
    if name == "If":
        return run(blocks[0 if args[0] else 1], [], known)
    if name == "Loop":
        count, going, *carried = args
        i = 0
        while i < count and going:
            going, *carried = run(blocks[0], [i, *carried], known)
            i += 1
        return carried
    if name == "Constant":
        return [node.output().toIValue()]
    if name == "GetAttr":
        return [args[0].attribute(node.s("name"))]
    if name == "SetAttr":
        setattr(args[0], node.s("name"), args[1])
        return []
    if name in ("ListConstruct", "TupleConstruct"):
        return [args if name == "ListConstruct" else tuple(args)]
    if name == "DictConstruct":
        return [dict(zip(args[::2], args[1::2], strict=True))]
    if name in ("ListUnpack", "TupleUnpack"):
        return list(args[0])
    if name == "TupleIndex":
        return [args[0][args[1]]]
    if name in SAME:
        return args[:1]
    if name == "Uninitialized":
        return [None]
    if name == "RaiseException":
        raise RuntimeError(args[0])
    if name == "dtype":
        return [next(number for number, d in DTYPES.items() if d is args[0].dtype)]
    if name in ("device", "shape", "is_cuda", "requires_grad"):
        return [list(args[0].shape) if name == "shape" else getattr(args[0], name)]
    if name in ("min", "max"):
        return [(min if name == "min" else max)(*args)]
    if name == "Print":
        return []
    raise Unsupported(f"TorchScript's {node.kind()} is not taken; convert the module that the script was made from")


def call(node: Any, name: str, args: list[Any]) -> Any:
    """torch's operator, or Python's where no tensor is among the arguments; sizes stay as free as they are."""
    if not any(isinstance(a, torch.Tensor) for a in args) and name in PYTHON:
        return PYTHON[name](*args)
    if isinstance(args[0], torch.Tensor) and name in OF_TENSORS:
        return OF_TENSORS[name](*args)
    if isinstance(args[0], torch.Tensor) and name in ASKED and len(args) == 1:
        return asked(node, ASKED[name], args[0])
    if name in LISTS:
        return LISTS[name](*args)
    schema = torch._C.parse_schema(node.schema())
    target = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
    given = [object_of(a, v) for a, v in zip(target._schema.arguments, args, strict=True)]
    named = {a.name: v for a, v in zip(target._schema.arguments, given, strict=True) if a.kwarg_only}
    return target(*given[: len(given) - len(named)], **named)


def asked(node: Any, f: Callable, x: torch.Tensor) -> Any:
    """`f(x)`, called from the line of the script's source, which a guard names."""
    found = re.search(r'File "([^"]+)", line (\d+)', node.sourceRange())
    path, line = (found[1], int(found[2])) if found else (__file__, 1)
    return eval(compile("\n" * (line - 1) + "f(x)", path, "eval"), {"f": f, "x": x})


def object_of(argument: Any, value: Any) -> Any:
    text = str(getattr(argument, "real_type", argument.type))
    found = next((f for kind, f in OBJECTS.items() if kind in text), None)
    return found(value) if found is not None and isinstance(value, int) else value


@contextmanager
def in_python(model: Any, example: Any) -> Iterator[Any]:
    """The model with modules of Python in the places of its scripts, for a while."""
    path = (
        next((p for p, m in model.named_modules() if isinstance(m, ScriptModule)), None) if is_module(model) else None
    )
    if path is None:
        yield model
        return
    if example is None:
        raise Unsupported(
            f"[convert] expects example= for TorchScript, whose graph it follows, got a script in {path or 'the model'}."
        )
    made: dict[int, Script] = {}
    root = Script(model, made) if isinstance(model, ScriptModule) else model
    stand_ins = places(root, made)
    try:
        calls = [call_of(example), *varied(call_of(example))]
        theirs = behaviour(model, model, calls)
    except Exception:  # such as values that the model refuses
        calls = [call_of(example)]
        theirs = behaviour(model, model, calls)
    with patched(stand_ins):
        if fault := disagreement(behaviour(root, root, calls), theirs):
            raise Unsupported(
                f"[convert] the graph of TorchScript in {path or 'the model'} is not what it computes: {fault}."
            )
        yield root


def is_module(model: Any) -> bool:
    return isinstance(model, nn.Module) and not isinstance(model, torch.fx.GraphModule)


def places(model: nn.Module, made: dict[int, Script]) -> list[tuple[Any, str, Script]]:
    """Where the model has scripts among its children, and what stands for them."""
    found = []
    for m in model.modules():
        for name, child in m._modules.items() if not isinstance(m, ScriptModule) else ():
            if isinstance(child, ScriptModule):
                found.append((m._modules, name, made[id(child)] if id(child) in made else Script(child, made)))
    return found
