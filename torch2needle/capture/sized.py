"""What a forward asks of sizes in an fx capture: answered as on the example, each time with a check in the graph.

Sizes come of torch's fake tensors, which run the captured calls up to the question. What is asked of values is refused:
torch.export follows such forwards.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import operator
import os
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from needle.graph.structure import record_of

from .asked import CHECKS, OtherAnswer
from .nodes import asker, attribute, user_location
from .packing import run as run_rows
from .proxies import TORCH_FOLDER, is_rank
from .structure import is_record_class
from .tracing import Tracer


def same_size(value: Any, expected: list[float], text: str) -> None:
    """The check of what was asked of sizes."""
    if [value] != expected:
        raise OtherAnswer(text)


CHECKS.add(same_size)


class Facts(NamedTuple):
    """Of a value that the example gives."""

    kind: type | None = None
    number: float | None = None
    length: int | None = None  # of a shape or tuple
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> Facts:
        if isinstance(value, torch.Tensor):
            return cls(torch.Tensor, dtype=value.dtype)
        if isinstance(value, torch.device):
            return cls(torch.device, device=value)
        number = value if isinstance(value, int | float) else None
        return cls(type(value), number, len(value) if isinstance(value, tuple | list) else None)


class SizedTracer(Tracer):
    """Knows the sizes of an example, by the names of the inputs.

    known: what a tracer before was asked, in order: graphs that are alike up to a question have its answer. numbers: gets the
    globals of the functions that make plain numbers of sizes.
    """

    def __init__(
        self, example: dict[str, Any], known: list[Facts], opened: dict[int, Any], numbers: dict[int, Any]
    ) -> None:
        super().__init__()
        self.example, self.known, self.asked, self.values = example, known, itertools.count(), dict[fx.Node, Any]()
        self.open, self.numbers = opened, numbers

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """The inputs that the example gives, whatever else the forward takes."""
        taken = inspect.signature(self.root.forward).parameters
        given = {n: v for n, v in self.example.items() if isinstance(v, torch.Tensor)}
        fixed = {n: v for n, v in self.example.items() if n not in given}
        if not is_module or any(n not in taken or taken[n].kind is taken[n].POSITIONAL_ONLY for n in self.example):
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        names = [n for n in taken if n in given]
        defaults = [() if taken[n].default is taken[n].empty else (taken[n].default,) for n in names]
        inputs = [self.create_proxy("placeholder", n, d, {}) for n, d in zip(names, defaults, strict=True)]
        return lambda root, *args: root_fn(root, **dict(zip(names, args, strict=True)), **fixed), [self.root, *inputs]

    @functools.cached_property
    def fakes(self) -> FakeTensorMode:
        return FakeTensorMode(allow_non_fake_inputs=True)

    def facts(self, obj: fx.Proxy) -> Facts:
        """What torch's own modules may not know, whose rules do; fake tensors run in the graph's order, since calls may write."""
        if asker().startswith(TORCH_FOLDER):
            return Facts()
        place = next(self.asked)
        if place == len(self.known):
            pending = list(itertools.takewhile(lambda n: n not in self.values, reversed(self.graph.nodes)))
            self.busy = True
            try:
                with _disable_current_modes(), self.fakes, torch.no_grad():
                    for node in reversed(pending):
                        self.values[node] = self.run(node)
                self.known.append(Facts.of(self.values[obj.node]))
            except Exception:  # of what fake tensors cannot run, nothing is known
                self.known.append(Facts())
            finally:
                self.busy = False
        return self.known[place]

    def run(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.op == "placeholder":
            value = self.example[str(node.target)] if str(node.target) in self.example else node.args[0]
            return self.fakes.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value
        if node.op == "get_attr":  # the forward may have put another value there since
            tensor, _ = node.meta.get("read") or (attribute(str(node.target), self.root), None)
            return self.fakes.from_tensor(tensor)
        if node.op == "call_module":  # with fakes of all that it holds, since real ones would be written
            layer = self.root.get_submodule(str(node.target))
            named = (*layer.named_parameters(), *layer.named_buffers())
            held: dict[str, torch.Tensor] = {n: self.fakes.from_tensor(t) for n, t in named}
            return torch.func.functional_call(layer, held, args, kwargs)
        return called(node, self.root, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self.facts(obj).number
        if value is None:
            return super().to_bool(obj)
        if not isinstance(value, bool):
            obj, value = self.create_proxy("call_function", operator.ne, (obj, 0), {}), value != 0
        self.check(obj, value)
        return value

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return iter([obj[i] for i in range(self.length(obj))])  # type: ignore[index]

    def length(self, obj: fx.Proxy) -> int:
        kind, length = (facts := self.facts(obj)).kind, facts.length
        if length is None:
            return super().length(obj)
        if kind is not torch.Size:
            self.check(self.create_proxy("call_function", len, (obj,), {}), length)
        return length

    def number(self, obj: fx.Proxy) -> float:
        """What Python takes as a number, as `int(n / 2)` and `range(n)` do: the sizes that it is made of are fixed."""
        value = self.facts(obj).number
        if value is None:
            return super().number(obj)
        for node in sources(obj.node):
            size = fx.Proxy(node, self)
            checked = self.check(size, self.facts(size).number)  # type: ignore[arg-type]
            checked.meta.update({} if is_rank(node) else {"fixes": True})
        return value

    def plain(self, obj: fx.Proxy, frame: FrameType) -> float:
        self.numbers[id(frame.f_globals)] = frame.f_globals
        return self.number(obj)

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        """Without the numbers that Python went on with by itself."""
        graph = super().trace(*args, **kwargs)
        for node in reversed(graph.nodes):
            if node.op == "call_function" and is_number(node) and not node.users:
                graph.erase_node(node)
        return graph

    def device(self, obj: fx.Proxy) -> Any:
        return self.facts(obj).device

    def dtype(self, obj: fx.Proxy) -> Any:
        return self.facts(obj).dtype

    def type_of(self, obj: fx.Proxy) -> Any:
        return self.facts(obj).kind or super().type_of(obj)

    def check(self, obj: fx.Proxy, value: float) -> fx.Node:
        path, _, number = user_location().rpartition(":")
        line = linecache.getline(path, int(number or 0)).strip()
        text = f"{line} ({os.path.basename(path)}:{number})" if line else "a condition on sizes"  # which was typed in
        return self.create_node("call_function", same_size, (obj.node, [float(value)], text), {})


def is_number(node: fx.Node) -> bool:
    return node.meta.get("kind") in (int, float, bool)


def sources(node: fx.Node) -> list[fx.Node]:
    """The sizes that a number is computed of."""
    parts = [n for n in node.all_input_nodes if is_number(n)]
    return list(dict.fromkeys(s for n in parts for s in sources(n))) if parts else [node]


def called(node: fx.Node, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of a call that a graph captured."""
    target: Any = node.target
    if is_record_class(target):
        return record_of(target, kwargs)
    if node.op == "call_module":
        layer: Any = model.get_submodule(target)
        rows = "lengths" in kwargs and isinstance(layer, nn.RNNBase)
        return (functools.partial(run_rows, layer) if rows else layer)(*args, **kwargs)
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
