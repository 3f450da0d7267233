"""The names under which this project first appeared: conversion with a trace log and a weight mapping, thin over `convert`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from needle.autograd import Tensor, Unsupported, as_data
from needle.backend_ndarray import Device
from needle.graph import GraphModule
from needle.nn.module import Module

from .capture.interpret import NUMPY_NAMES, is_getitem, leaves
from .convert import convert
from .report import Report, dotted, table
from .rules.registry import bind, find_function_rule, find_module_rule, method, nearest_rule, target_name
from .tools.explain import find_layer
from .tools.trace_log import TraceLog
from .weights import Tensors, TreeBuilder


@dataclass(frozen=True)
class Pair:
    """One tensor of a torch module and its counterpart in a needle module."""

    name: str
    source: torch.Tensor
    target: Tensor
    layout: str  # of the needle module: "torch" or "needle"

    def values(self) -> np.ndarray:
        """The torch tensor's values in the needle module's layout; raises ValueError where shapes or dtypes do not fit."""
        data = self.source.detach().cpu()
        a = (data.float() if data.dtype in (torch.float16, torch.bfloat16) else data).numpy()
        if self.layout == "needle":  # Linear (in, out) with bias (1, out); Conv (k, k, I, O)
            a = a.transpose(*range(2, a.ndim), 1, 0) if a.ndim > 1 else a.reshape(self.target.shape)
        if a.shape != tuple(self.target.shape):
            raise ValueError(
                f"[load_torch_weights_by_mapping] {self.name} expects shape {tuple(self.target.shape)}, got {a.shape}."
            )
        if np.dtype(self.target.dtype).kind != a.dtype.kind:
            raise ValueError(
                f"[load_torch_weights_by_mapping] {self.name} expects dtype {self.target.dtype}, got {a.dtype}."
            )
        return np.array(a, dtype=self.target.dtype, order="C")

    def row(self) -> list[str]:
        """Name, shapes and dtypes, each as one value or as torch's and needle's."""
        shapes = str(tuple(self.source.shape)), str(tuple(self.target.shape))
        dtypes = str(self.source.dtype).removeprefix("torch."), self.target.dtype
        return [self.name, *(" -> ".join(dict.fromkeys(v)) for v in (shapes, dtypes))]


class WeightMapping(dict[str, tuple[nn.Module, Module]]):
    """Torch's name of a parameter or buffer -> (the torch module that holds it, the needle module that holds its counterpart).

    unused: torch's tensors without a counterpart; missing: needle's.
    """

    def __init__(self, model: nn.Module, net: Module) -> None:
        super().__init__()
        self.unused: list[str] = []
        for path, module in model.named_modules(remove_duplicate=False):
            layer = find_layer(net, path)
            for name in own_tensors(module):
                full = dotted(path, name)
                if isinstance(getattr(layer, name, None), Tensor):
                    self[full] = (module, layer)  # type: ignore[assignment]
                else:
                    self.unused.append(full)
        self.missing = [name for name, _ in net.named_tensors() if name not in self]

    def __repr__(self) -> str:
        rows = [[name, type(module).__name__, type(layer).__name__] for name, (module, layer) in self.items()]
        return "\n".join(table(["torch name", "torch module", "needle module"], rows))


@dataclass
class LoadSummary:
    """What `load_torch_weights_by_mapping` did; `str` is a table."""

    loaded: list[Pair] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # needle tensors that nothing was loaded into
    unused: list[str] = field(default_factory=list)  # torch tensors without a counterpart

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded, {len(self.missing)} missing, {len(self.unused)} unused"]
        lines += table(["name", "shape", "dtype"], [p.row() for p in self.loaded]) if self.loaded else []
        lines += [f"missing: {name}" for name in self.missing]
        return "\n".join(lines + [f"unused: {name}" for name in self.unused])


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers directly in the module."""
    return {k: t for k, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def pairs(mapping: Mapping[str, tuple[nn.Module, Module]]) -> Iterator[Pair]:
    """Every tensor of the mapping: a key names one tensor of its module, or the module, which stands for all of them."""
    for key, (module, layer) in mapping.items():
        tensors = own_tensors(module)
        prefix, _, last = key.rpartition(".")
        chosen = {last: tensors[last]} if last in tensors else tensors
        path = prefix if last in tensors else key
        for name, source in chosen.items():
            target = getattr(layer, name, None)
            if isinstance(target, Tensor):
                layout = getattr(layer, "_layout", "torch")
                yield Pair(dotted(path, name), source, target, layout)


def left_out(mapping: Mapping[str, tuple[nn.Module, Module]], loaded: list[Pair]) -> tuple[list[str], list[str]]:
    """Names of the needle tensors that nothing was loaded into, and of the torch tensors that were not used."""
    used = {id(p.source) for p in loaded} | {id(p.target) for p in loaded}
    missing, unused = list(getattr(mapping, "missing", [])), list(getattr(mapping, "unused", []))
    for key, (module, layer) in mapping.items():
        path = key.rpartition(".")[0] if key.rpartition(".")[2] in own_tensors(module) else key
        direct = {n: t for n, t in layer.members() if isinstance(t, Tensor)}
        for names, tensors in ((missing, direct), (unused, own_tensors(module))):
            names += [dotted(path, n) for n, t in tensors.items() if id(t) not in used]
    return list(dict.fromkeys(missing)), list(dict.fromkeys(unused))


def load_torch_weights_by_mapping(mapping: Mapping[str, tuple[nn.Module, Module]], verbose: bool = True) -> LoadSummary:
    """Copy torch's current parameters and buffers into the needle modules, transposed for those of layout "needle".

    mapping: what `torch2needle_fx` gave, or {name: (torch module, needle module)} of your own.
    Executables and fused nets over the needle modules follow. Raises ValueError before anything is copied.
    """
    loaded = list(pairs(mapping))
    values = [p.values() for p in loaded]
    for p, a in zip(loaded, values, strict=True):
        p.target.data = Tensor(a, device=p.target.device, dtype=p.target.dtype, requires_grad=False)
    summary = LoadSummary(loaded, *left_out(mapping, loaded))
    if verbose:
        print(summary)
    return summary


def place(net: Module, device: Device | None, dtype: str) -> Any:
    """Put every tensor of `net`, and the constants of its graph, on `device`, floating ones in `dtype`; returns `net`."""
    constants = [n.target for n in net.graph if isinstance(n.target, Tensor)] if isinstance(net, GraphModule) else []
    for t in {id(t): t for t in (*(t for _, t in net.named_tensors()), *constants)}.values():
        wanted = dtype if t.dtype.startswith("float") else t.dtype
        if (device is not None and t.device != device) or t.dtype != wanted:
            t.cached_data = as_data(t.numpy(), device or t.device, wanted)
    return net


def check_place(device: Device | None, dtype: str, label: str) -> None:
    if dtype not in ("float32", "float64"):
        raise ValueError(f"[{label}] dtype expects float32 or float64, got {dtype}.")
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"[{label}] device expects a needle device such as needle.cpu(), got {device!r}.")
    if device is not None:
        device.require()


def torch2needle_fx(
    model: nn.Module, device: Device | None = None, dtype: str = "float32", example: Any = None
) -> tuple[GraphModule, TraceLog, WeightMapping]:
    """(needle_model, trace_log, mapping) of an nn.Module or fx.GraphModule; the needle model has torch's weights already.

    device: default needle's default device; dtype: float32, or float64 (on cpu_numpy(), and on cpu() for ops whose kernels
    take it); example: as in `convert`; the log then has shapes, too.
    """
    check_place(device, dtype, "torch2needle_fx")
    net = place(convert(model, example), device, dtype)
    return net, TraceLog(net.report.calls), WeightMapping(model, net)


def convert_layer(layer: nn.Module, device: Device | None = None, dtype: str = "float32") -> Module:
    """The needle layer for one torch module, with its weights; a GraphModule for a module without a rule of its own."""
    check_place(device, dtype, "convert_layer")
    if not isinstance(layer, nn.Module):
        raise TypeError(f"[convert_layer] expects a torch module, got {type(layer).__name__}.")
    if find_module_rule(layer) is None:
        return place(convert(layer), device, dtype)
    builder = TreeBuilder(Tensors(share=False), Report())
    made = builder.build(layer, "layer")
    if id(layer) in builder.failures:
        raise Unsupported(f"[convert_layer] {target_name(type(layer))}: {builder.failures[id(layer)].rstrip('.')}.")
    return place(made, device, dtype)


def convert_function_node(node: fx.Node) -> Callable:
    """The needle callable for a captured function or tensor method: torch's arguments, with needle Tensors.

    In-place spellings return the new value and write nothing.
    """
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        got = f"{node.op} {node.name}" if isinstance(node, fx.Node) else type(node).__name__
        raise ValueError(f"[convert_function_node] expects a call_function or call_method node, got {got}.")
    target = (method(str(node.target)) or node.target) if node.op == "call_method" else node.target
    rule = find_function_rule(target)
    name = target_name(target)
    if rule is None and (name.startswith("torch.") or not callable(target)):
        near = nearest_rule(target)
        hint = f"; the nearest is that of {near}" if near else ""
        raise Unsupported(f"[convert_function_node] there is no rule for {name}{hint}.")

    def call(*args: Any, **kwargs: Any) -> Any:
        inside = is_getitem(target) and not isinstance(args[0], Tensor)  # of a tuple of tensors
        if rule is None or inside or not any(isinstance(v, Tensor) for v in leaves((args, kwargs))):
            return target(*args, **kwargs)  # type: ignore[operator]
        bound = bind(rule, target, args, {NUMPY_NAMES.get(k, k): v for k, v in kwargs.items()})
        return rule(*bound.args, **bound.kwargs)

    return call
