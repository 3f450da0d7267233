"""The lines that would add a missing rule, with a test of it: what a report prints for users to paste."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from needle.autograd import Tensor
from needle.graph import Symbol

from .overloads import base_name, is_overload, stub_signature
from .registry import target_name

FILL_IN = "raise NotImplementedError"  # how the line begins that users replace


class Arguments:
    """The text of a captured call's arguments: tensors become inputs of the test's model, the rest stands as it is."""

    def __init__(self, value: Callable[[fx.Node], Any]) -> None:
        self.value = value  # of a node: a symbol, or what else was computed
        self.inputs: dict[fx.Node, str] = {}

    def text(self, v: Any) -> str:
        if isinstance(v, fx.Node):
            known = self.value(v)
            if not isinstance(known, Tensor):
                return self.text(known) if isinstance(known, int | float | str | tuple | list) else "1"
            return self.inputs.setdefault(v, f"x{len(self.inputs)}")
        if isinstance(v, tuple):
            return f"({', '.join(map(self.text, v))}{',' if len(v) == 1 else ''})"
        if isinstance(v, list):
            return f"[{', '.join(map(self.text, v))}]"
        if isinstance(v, slice):
            return f"slice({', '.join(map(self.text, (v.start, v.stop, v.step)))})"
        return f"torch.device({str(v)!r})" if isinstance(v, torch.device) else repr(v)

    def call(self, args: tuple, kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self.text, args), *(f"{k}={self.text(v)}" for k, v in kwargs.items())])

    def examples(self) -> str:
        """A tuple of inputs like those of the call, as far as they are known."""
        return "(" + "".join(f"{example(self.value(n))}, " for n in self.inputs).rstrip() + ")"

    @property
    def known(self) -> bool:
        return all(getattr(self.value(n), "spec", None) is not None for n in self.inputs)


def example(value: Any) -> str:
    spec = value.spec if isinstance(value, Symbol) else None
    shape = (2, 8) if spec is None else tuple(d if isinstance(d, int) else 2 for d in spec.shape)
    dtype = "float32" if spec is None else spec.dtype
    if dtype == "bool":
        return f"torch.rand({shape}) > 0.5"
    return f"torch.rand({shape})" if dtype.startswith("float") else f"torch.randint(2, {shape}, dtype=torch.{dtype})"


def stub(node: fx.Node, target: Any, module: nn.Module | None, value: Callable[[fx.Node], Any]) -> str:
    """A rule to fill in and its test, for the captured call `node` of `target`; `module` is the one called, if any."""
    full = target_name(target)
    last = base_name(target) if is_overload(target) else full.rpartition(".")[2]
    name = re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last)).strip("_").lower()
    arguments = Arguments(value)
    setup: list[str] = []
    if module is not None:
        setup = ["def __init__(self):", "    super().__init__()", f"    self.layer = {constructor(module, full)}", ""]
        parameters, call = "(module)", f"self.layer({arguments.call(node.args, node.kwargs)})"
        hint = "a layer of needle.nn with parameters named and shaped as torch's"
    else:
        parameters, hint = (
            signature_text(target, len(node.args), node.kwargs),
            "its result in needle's public functions",
        )
        if full.startswith("torch.Tensor."):
            itself = arguments.text(node.args[0])
            call = f"{itself}.{full.rpartition('.')[2]}({arguments.call(node.args[1:], node.kwargs)})"
        else:
            call = f"{full}({arguments.call(node.args, node.kwargs)})"
    inputs = ", ".join(arguments.inputs.values())
    remark = "" if arguments.known else "  # of shapes that the call takes"
    imports = {"import needle", "import torch", "import torch2needle"}
    owner = full.partition(".")[0]
    if "." in full and owner not in ("torch", "__main__"):
        imports.add(f"import {full.rpartition('.')[0]}")
    body = [
        *sorted(imports),
        "",
        f"@torch2needle.rule({full})",
        f"def convert_{name}{parameters}:",
        f'    {FILL_IN}("{hint}")',
        "",
        f"def test_convert_{name}():",
        "    class Model(torch.nn.Module):",
        *(f"        {line}".rstrip() for line in setup),
        f"        def forward(self, {inputs}):",
        f"            return {call}",
        "",
        f"    inputs = {arguments.examples()}{remark}",
        "    model = Model().eval()",
        "    assert torch2needle.verify(model, torch2needle.convert(model, inputs), inputs)",
    ]
    return "\n".join(body)


def constructor(module: nn.Module, name: str) -> str:
    """The call that makes a module like this one, read from its repr where that is complete."""
    try:
        call = ast.parse(repr(module), mode="eval").body
        if isinstance(call, ast.Call) and not any(True for _ in module.children()):
            values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            inspect.signature(type(module)).bind(*map(ast.literal_eval, call.args), **values)
            return f"{name}{repr(module).removeprefix(type(module).__name__)}"
    except (SyntaxError, ValueError, TypeError):
        pass
    return f"{name}()  # with the arguments of {type(module).__name__}"


def signature_text(target: Any, n_args: int, keywords: Iterable[str]) -> str:
    if is_overload(target):
        return stub_signature(target)
    try:
        parameters = inspect.signature(target).parameters.values()
        text = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
        ast.parse(f"def f{text}: pass")  # defaults that have no literal form
        return text
    except (ValueError, TypeError, SyntaxError):
        names = ["input", "other", *(f"a{i}" for i in range(2, n_args))][:n_args]
        return f"({', '.join([*names, *keywords])})"
