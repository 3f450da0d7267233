"""The needle module tree of a torch model: layers by rule, parameters and buffers under torch's names, there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

import needle as ndl
from needle.autograd import Tensor, Unsupported
from needle.executor import Executable
from needle.graph.narrow import is_narrow
from needle.init import no_drawing
from needle.interop import as_ndarray
from needle.nn.module import Module, Parameter
from needle.nn.tree import Tree
from needle.optim import Optimizer
from needle.optim.torch_state import as_torch

from .report import Report, dotted
from .rules.registry import find_module_rule


class Tensors:
    """A needle Parameter or buffer for each of torch's: over a copy of its values or, with `share`, over its memory."""

    def __init__(self, share: bool) -> None:
        self.share = share
        self.made: dict[int, Tensor] = {}  # by id of torch's
        self.notes: dict[int, list[str]] = {}  # what to tell of them
        self.narrow: dict[Tensor, str] = {}  # the dtype of torch's, for those that are wider here
        self._alive: list[torch.Tensor] = []  # ids stay unique while the objects live

    def of(self, t: torch.Tensor, path: str) -> Tensor:
        if id(t) not in self.made:
            self._alive.append(t)
            self.notes[id(t)] = []
            self.made[id(t)] = self.make(t, path)
        return self.made[id(t)]

    def make(self, t: torch.Tensor, path: str) -> Tensor:
        data = t.detach()
        if pairs := data.is_complex():
            data = torch.view_as_real(data.resolve_conj())
        if data.dtype in (torch.bfloat16, torch.float16):
            self.notes[id(t)].append(f"{path} is {data.dtype} and computed in float32")
            data = data.float()
        if data.is_floating_point() and not finite(data):
            self.notes[id(t)].append(f"{path} holds NaN or infinite values")
        kind = Parameter if isinstance(t, nn.Parameter) else Tensor
        if narrow := is_narrow(data):
            data = data.int()
        dtype = str(data.dtype).removeprefix("torch.")
        if self.share and data.device.type == "cpu":
            made = kind.make_const(as_ndarray(data)) if kind is Tensor else parameter_over(as_ndarray(data))
        else:
            made = kind(data.cpu().contiguous().numpy(), dtype=dtype, device=ndl.autograd.default_device())
        made.of_pairs = pairs
        made.requires_grad = isinstance(t, nn.Parameter) and t.requires_grad
        if isinstance(made, Parameter):
            made.rule = "torch"
        if narrow:
            self.narrow[made] = str(t.dtype).removeprefix("torch.")
        return made


class TreeBuilder:
    """Builds needle modules; shared modules and shared (tied) parameters stay shared."""

    def __init__(self, tensors: Tensors, report: Report, done: Callable[[], Any] = lambda: None) -> None:
        self.tensors, self.report = tensors, report
        self.done = done  # called after each module
        self.modules: dict[int, Module] = {}  # by id of the torch module
        self.failures: dict[int, str] = {}  # why a module's rule refused

    def build(self, module: nn.Module, path: str = "") -> Module:
        if id(module) in self.modules:
            return self.modules[id(module)]
        layer = (self._layer(module) if path else Tree()).train(module.training)
        self.modules[id(module)] = layer
        for name, p in module._parameters.items():
            if p is not None:
                put(layer, name, self.tensor(p, dotted(path, name)))
        for name, b in module._buffers.items():
            saved = name not in module._non_persistent_buffers_set
            if b is not None and (saved or name in layer.__dict__):  # what the layer reads, saved or not
                put(layer, name, self.tensor(b, dotted(path, name)))
        for name, child in module._modules.items():
            if child is not None:
                put(layer, name, self.build(child, dotted(path, name)))
        layer.training = module.training
        self.done()
        return layer

    def _layer(self, module: nn.Module) -> Module:
        rule = find_module_rule(module)
        if rule is None:
            return Tree()
        try:
            with no_drawing():
                return rule(module)
        except (Unsupported, NotImplementedError, ValueError, TypeError) as e:  # the last two: arguments out of range
            self.failures[id(module)] = str(e)
            return Tree()

    def tensor(self, t: torch.Tensor, path: str = "") -> Tensor:
        """The needle tensor for a torch one."""
        made = self.tensors.of(t, path)
        for note in self.tensors.notes[id(t)]:
            self.report.note(note)
        return made


def finite(data: torch.Tensor) -> bool:
    """Whether all values are finite; a sum says so in one pass, unless it overflows."""
    return bool(torch.isfinite(data.sum())) or bool(torch.isfinite(data).all())


def parameter_over(data: Any) -> Parameter:
    made = Parameter.__new__(Parameter)
    made._init(data, None, (), True)
    return made


def put(layer: Module, name: str, value: Any) -> None:
    """Hang a child or tensor into the tree under torch's name."""
    if name.startswith("_") and name not in layer._public:
        layer._public = (*layer._public, name)
    layer.__dict__.pop(name, None)  # torch's order, not that of the layer's constructor
    layer.__dict__[name] = value


def to_torch(net: Any, model: nn.Module | None = None) -> dict[str, Any]:
    """The weights that a converted net has now, as a torch state_dict under torch's names: new tensors, on the CPU.

    Of an optimizer: its state, as torch's optimizer of the same name takes it by `load_state_dict`.

    net: what `convert`, `fuse` or `needle.load` gave, or an Executable of it. Tied names get one tensor; running statistics
    and other buffers are among them. What torch had in 16 bits is float32 here.
    model: this torch model takes the values, too, in its own tensors, dtypes and devices; names and shapes must be its own,
    else ValueError before anything is copied.
    """
    if isinstance(net, Optimizer):
        return tree_map(lambda a: torch.from_numpy(a) if isinstance(a, np.ndarray) else a, as_torch(net))
    net = net.model if isinstance(net, Executable) else net
    if not isinstance(net, Module):
        raise TypeError(f"[to_torch] expects a needle Module, Optimizer or Executable, got {type(net).__name__}.")
    made: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, t in net.named_tensors():
        if id(t) not in made:
            values = torch.from_numpy(np.array(t.numpy()))
            made[id(t)] = torch.view_as_complex(values) if t.of_pairs else values
        state[name] = made[id(t)]
    if model is not None:
        load_into(model, state)
    return state


def load_into(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    own = {k: t for k, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    missing, unexpected = [k for k in own if k not in state], [k for k in state if k not in own]
    for text, names in (("lacks", missing), ("has no", unexpected)):
        if names:
            who = "the net" if text == "lacks" else "the model"
            raise ValueError(f"[to_torch] {who} {text} {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}.")
    first: dict[int, str] = {}
    for k, t in own.items():
        if t.shape != state[k].shape:
            raise ValueError(f"[to_torch] {k} expects shape {tuple(t.shape)}, got {tuple(state[k].shape)}.")
        tied = first.setdefault(id(t), k)
        if not torch.equal(state[k], state[tied]):
            raise ValueError(f"[to_torch] {tied} and {k} are one tensor in the model, the net has two that differ.")
    with torch.no_grad():
        for k, t in own.items():
            if t.layout == torch.strided:
                t.copy_(state[k])
            elif not torch.equal(t.to_dense(), state[k].to(t.dtype)):  # conversion made it dense
                raise ValueError(f"[to_torch] {k} expects the numbers of the sparse tensor that it was, got others.")
