"""A training step of a converted model beside torch's: loss and gradients of a batch, in training mode without dropout."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import torch2needle
from torch2needle.capture.calls import tensors
from torch2needle.capture.structure import plain_result
from torch2needle.tools.verify import computed, map_structure, to_needle, to_torch, torch_defaults

Gradients = dict[str, np.ndarray]
DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
TARGET = 0.1  # of every result
SHAKEN = 1e-7  # of parameters in float64, as much as float32 rounds: kinks of deep nets make large differences of it
ROUNDS = 3
SIGMOIDS = (nn.Hardsigmoid,)
KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Hardswish, nn.Hardtanh)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model in training mode, drawing nothing; functional dropouts do nothing in this process from now on."""
    for name in DROPOUTS:
        setattr(F, name, lambda input, p=0.5, training=True, inplace=False: input)
    for holder in (h for m in model.modules() for h in (m, getattr(m, "config", None))):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(holder, nn.Module))):
                setattr(holder, name, 0.0)
    return model.train()


def smoothed(model: nn.Module) -> nn.Module:
    """The model without kinks, beside which roundings make gradients jump: where these differ, it tells whether only by that."""
    for name, child in model.named_children():
        if isinstance(child, SIGMOIDS):
            setattr(model, name, nn.Sigmoid())
        elif isinstance(child, KINKED):
            setattr(model, name, nn.Softplus())
        elif isinstance(child, nn.MaxPool2d):
            pool = nn.AvgPool2d(child.kernel_size, child.stride, child.padding, child.ceil_mode)
            setattr(model, name, pool)
        else:
            smoothed(child)
    return model


def torch_loss(result: Any) -> torch.Tensor:
    parts = [torch.view_as_real(t).unbind(-1) if t.is_complex() else (t,) for t in tensors(plain_result(result))]
    found = [((t - TARGET) ** 2).mean() for part in parts for t in part if t.is_floating_point() and t.requires_grad]
    return torch.stack(found).sum()


def needle_loss(result: Any) -> ndl.Tensor:
    found: list[Any] = []
    map_structure(result, found.append)
    found = [t for t in found if isinstance(t, ndl.Tensor) and t.requires_grad]
    return ndl.ops.summation(ndl.ops.stack([ndl.ops.mean((t - TARGET) ** 2) for t in found]))


class Theirs:
    """A copy of the model in torch, and its step; shaken: how much its parameters are moved, relative."""

    def __init__(self, model: nn.Module, given: Any, dtype: torch.dtype, shaken: float = 0.0) -> None:
        twin = copy.deepcopy(model, computed(model))
        self.model, self.dtype = twin.double() if dtype == torch.float64 else twin.float(), dtype
        self.given = map_structure(given, lambda x: to_torch(x, dtype))
        with torch.no_grad():
            for p in self.model.parameters() if shaken else ():
                p.mul_(1 + shaken * torch.randn_like(p))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        self.loss = self.step()

    def step(self) -> float:
        self.optimizer.zero_grad()
        with torch_defaults(self.dtype):
            loss = torch_loss(self.model(**self.given))
            loss.backward()
        self.optimizer.step()
        return float(loss)

    def gradients(self) -> Gradients:
        found = ((n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None)
        return {n: (torch.view_as_real(g) if g.is_complex() else g).double().numpy() for n, g in found}


def distance(found: Gradients, exact: Gradients) -> float:
    """Of all gradients together, relative; one that lacks is 0. Where torch's are NaN they say nothing."""
    pairs = [(found.get(n, 0.0), e) for n, e in exact.items() if not np.isnan(e).any()]
    off, size = (
        sum(float((a**2).sum()) for a in arrays) for arrays in ([f - e for f, e in pairs], [e for _, e in pairs])
    )
    return (off / max(size, 1e-300)) ** 0.5


def least_seconds(run: Callable[[], Any]) -> float:
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def train(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """A row: errors of the compiled step against float64 torch, beside the larger of float32 torch's and of what parameters that
    are rounded make of float64's; seconds to the first step's end; torch's time over ours.

    Where these errors differ, the model without kinks decides, whose row is "smooth"."""
    torch.set_num_threads(1)
    ndl.set_num_threads(1)
    model = without_dropout(model)
    row = compared(model, given)
    if not row["ok"] and "error" in row:
        smooth = compared(smoothed(model), given)
        row |= {"ok": smooth["ok"], "smooth": {k: smooth.get(k) for k in ("error", "torch_error", "loss_error")}}
    return row


def compared(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    try:
        single = Theirs(model, given, torch.float32)
    except (RuntimeError, ValueError) as e:  # ValueError: of compiled modules, whose copies have no leaves
        return {"ok": False, "reason": f"torch does not train it: {str(e).splitlines()[0]}"}
    try:
        double, shaken = (Theirs(model, given, torch.float64, by) for by in (0.0, SHAKEN))
    except RuntimeError:  # complex parameters, or a forward that casts to float32 halfway
        double, shaken = single, Theirs(model, given, torch.float32, SHAKEN)
    exact = double.gradients()
    net = torch2needle.convert(model, given).train()
    x = map_structure({k: v for k, v in given.items() if k in net.input_names}, lambda v: to_needle(v, None))
    # The first momentum of torch's rule is the gradient.
    optimizer = ndl.optim.SGD(net.parameters(), lr=0.0, momentum=0.9, rule="torch")
    start = time.perf_counter()
    step = ndl.compile_step(net, needle_loss, optimizer, (x,))
    loss = float(step(x).numpy())
    first = time.perf_counter() - start
    named = [(n, optimizer.state[p]["momentum"]) for n, p in net.named_parameters() if p in optimizer.state]
    error = distance({n: g.numpy().astype("float64") for n, g in named}, exact)
    torch_error = max(distance(single.gradients(), exact), distance(shaken.gradients(), exact))
    off, torch_off = (abs(v - double.loss) / max(abs(double.loss), 1e-300) for v in (loss, single.loss))
    ok = error <= max(1e-4, 4 * torch_error) and off <= max(1e-5, 4 * torch_off)
    ratio = least_seconds(single.step) / least_seconds(lambda: step(x))
    facts = {"error": error, "torch_error": torch_error, "loss_error": off, "first_s": first, "ratio": ratio}
    return {"ok": bool(ok), **facts}
