"""`on_guard="torch"`: the model itself answers inputs for which its captured graph does not hold, by the net's parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from needle.autograd import Tensor, Unsupported
from needle.graph import GraphModule, map_structure
from needle.graph.structure import record_of
from needle.interop import as_ndarray, as_tensor
from needle.nn import WriteBuffer
from needle.op import TAPE

from ..capture.calls import call_of, tensors
from ..capture.structure import classed, plain_result
from .fallback import ModuleCall, TorchCall, tensors_of, torch_tensor


class Otherwise:
    """What a net gives where a guard refuses its inputs.

    names: of the forward's parameters for each input of the net, or None where those are the example's tensors in their order.
    """

    def __init__(self, model: nn.Module, example: Any, names: list[str] | None) -> None:
        self.function, self.call, self.names = ModuleCall(model), call_of(example), names

    def __deepcopy__(self, memo: dict) -> Otherwise:
        return self  # the model is a copy already, and has the tensors of the net that asks

    def __call__(self, net: GraphModule, values: list[Any]) -> Any:
        """values: one for every input of the net."""
        given: list[Tensor] = [as_tensor(v) for v in values]
        held = dict(net.named_tensors())
        own = tensors_of(self.function.module)
        params = list({id(held[n]): held[n] for n in own if n in held}.values())  # tied ones once
        inputs = [*params, *given]
        records = TAPE.recording and any(t.requires_grad for t in inputs)
        with torch.inference_mode(False), torch.set_grad_enabled(records):
            ins = [torch_tensor(t.cached_data) for t in inputs]
            for t, tensor in zip(ins, inputs, strict=True):
                t.requires_grad_(records and tensor.requires_grad and t.is_floating_point())
            place = {id(p): t for p, t in zip(params, ins, strict=False)}
            state = tuple(as_model(held[n], place[id(held[n])], t) if n in held else t for n, t in own.items())
            args, kwargs = self.arguments(ins[len(params) :])
            result = self.function(False, state, *args, **kwargs)
            value = classed(
                plain_result(result), result, lambda kind, args, kw: kind(*args) if args else record_of(kind, kw)
            )
        outs = tensors(value)
        if any(t.is_complex() for t in outs):
            raise Unsupported("[convert] on_guard='torch' expects a model of real results, got complex ones.")
        on_numpy = isinstance(inputs[0].cached_data, np.ndarray)
        data = tuple(t.detach().numpy() if on_numpy else as_ndarray(t.detach()) for t in outs)
        if records:
            op = TorchCall(type(self.function.module).__name__, None, (), len(outs), (ins, outs))  # type: ignore[arg-type]
            made = op.results[len(outs) > 1]._from_data(data if len(outs) > 1 else data[0], op, inputs)
            results = iter(made if len(outs) > 1 else (made,))
        else:
            results = iter(map(Tensor.make_const, data))
        return map_structure(value, lambda x: next(results) if isinstance(x, torch.Tensor) else x)

    def arguments(self, given: list[torch.Tensor]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = self.call
        if self.names is not None:
            return (), {**kwargs, **dict(zip(self.names, given, strict=True))}
        if len(tensors(self.call)) != len(given):
            raise Unsupported("[convert] on_guard='torch' expects the example's tensors as inputs.")
        left = iter(given)
        return pytree.tree_map(lambda x: next(left) if isinstance(x, torch.Tensor) else x, (args, kwargs))


def as_model(tensor: Tensor, t: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A net's parameter or buffer in the form that the model has: complex numbers are pairs, narrow ones wider."""
    if tensor.of_pairs:
        return torch.view_as_complex(t)
    return t if own.is_floating_point() else t.to(own.dtype)


def answers_violations(net: GraphModule, model: Any, example: Any) -> None:
    """Let `model` answer what guards of `net` refuse."""
    if not isinstance(model, nn.Module) or example is None:
        raise ValueError("[convert] on_guard='torch' expects an nn.Module and an example.")
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise Unsupported("[convert] on_guard='torch' expects a model in Python, got TorchScript.")
    if any(type(m) is WriteBuffer for m in net.modules()):
        raise Unsupported("[convert] on_guard='torch' expects a model that writes no buffers; leave it at 'error'.")
    by_name = net.report.capture.startswith("torch.fx")
    if by_name and not isinstance(example, dict):
        from ..convert import example_by_name

        example = example_by_name(model, example)
    net.otherwise = Otherwise(model, example, net.input_names if by_name else None)
