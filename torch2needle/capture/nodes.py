"""What nodes of an fx graph say of the user's code: its line, the module that makes the call, what the call writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from ..rules.registry import find_function_rule, is_inplace, method
from .proxies import MODELS_FOLDER, TRACING_FOLDERS, is_foreign


def user_lines() -> Iterator[str]:
    """The user's lines that lead to the caller, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_foreign(frame.f_code.co_filename):
            yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def user_location() -> str:
    return next(user_lines(), "")


def asker() -> str:
    """The file whose code asks something of a proxy."""
    frame: Any = sys._getframe(1)
    while (name := frame.f_code.co_filename).startswith(TRACING_FOLDERS) and not name.startswith(MODELS_FOLDER):
        frame = frame.f_back
    return name


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
RANK_CHECKS = {c._check_input_dim.__code__ for c in BATCH_NORMS}


def checks_rank() -> bool:
    """Whether a batch norm of torch's asks, which a layer inherits, if its input has other axes than it takes."""
    frame: Any = sys._getframe(1)
    for _ in range(4):  # from a proxy's truth, which the tracer answers
        frame = frame.f_back
        if frame.f_code in RANK_CHECKS:
            return True
    return False


def node_location(node: fx.Node) -> str:
    """The user's file:line, from our tracer or from a GraphModule's recorded stack."""
    if "location" in node.meta:
        return node.meta["location"]
    found = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    found = [f for f in found if is_foreign(f[0])] or found
    return ":".join(found[-1]) if found else "unknown line"


def owner_path(node: fx.Node) -> str:
    """Path of the innermost module that makes the call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if node.op == "call_module":
        return str(node.target)
    return stack[-1][0] if stack else ""


def written(node: fx.Node) -> fx.Node | None:
    """The node whose result this one writes in place, through views."""
    if (
        not node.op.startswith("call_")
        or not is_inplace(target_of(node))
        or not node.args
        or not isinstance(node.args[0], fx.Node)
    ):
        return None
    root = node.args[0]
    while (
        root.args
        and isinstance(root.args[0], fx.Node)
        and (getattr(find_function_rule(target_of(root)), "view", None) or is_inplace(target_of(root)))
    ):
        root = root.args[0]
    return root


def writes_parameter(node: fx.Node, model: nn.Module) -> bool:
    """Whether the call writes a parameter in place, which no forward does with gradients."""
    root = written(node)
    return root is not None and isinstance(tensor_of(root, model), nn.Parameter)


def tensor_of(node: fx.Node, model: nn.Module) -> Any:
    """The model's tensor that the node reads, if it reads one."""
    return attribute(str(node.target), model) if node.op == "get_attr" else None


def attribute(path: str, model: nn.Module) -> Any:
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def target_of(node: fx.Node) -> Any:
    """The function or tensor method that the node calls."""
    return method(str(node.target)) if node.op == "call_method" else node.target if node.op == "call_function" else None
