"""Optimizers whose steps are written in ops: they have no kernel of their own, and in plans their ops are part of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from needle import ops
from needle.autograd import Tensor

from .adaptive import both
from .base import Optimizer
from .group import Group

Tensors = dict[str, Any]


class Composed(Optimizer):
    """Base: a subclass names its options, arguments and state arrays, and defines `rates` and `update`."""

    composed = True
    names: ClassVar[tuple[str, ...]]  # of the numbers that `rates` gives

    def rates(self, group: Group, p: Tensor, state: Mapping[str, Any]) -> tuple[float, ...]:
        """What `update` needs of options and of the number of steps, which both may be others in the next step."""
        return tuple(group[name] for name in self.names)

    def update(self, group: Group, p: Any, grad: Any, state: Tensors, n: Mapping[str, Any]) -> tuple[Any, Tensors]:
        """The parameter and the state arrays after a step; n: the numbers of `rates` by name, in plans tensors ()."""
        raise NotImplementedError(f"[{type(self).__name__}] defines no update.")

    def step_alone(self, group: Group, p: Tensor, grad: Any, state: dict[str, Any], first: bool) -> bool:
        held = {slot: Tensor.make_const(state[slot]) for slot in self.slots_for(group, tuple(p.shape))}
        rates = dict(zip(self.names, self.rates(group, p, state), strict=True))
        value, moved = self.update(group, p.detach(), Tensor.make_const(grad), held, rates)
        p.data = value
        state |= {slot: t.cached_data for slot, t in moved.items()}
        return True


class Rprop(Composed):
    """Steps along the sign of the gradient, of a size for every number that grows while its sign stays and shrinks where it turns
    (Riedmiller and Braun, 1993).

    Rprop(params, lr, etas, step_sizes): lr is the first size, etas what it is multiplied by, step_sizes its limits.
    """

    rules = both({"lr": 0.01, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0), "maximize": False})
    arguments = both(("lr", "etas", "step_sizes"))
    slots = required = ("previous", "size")
    names = ("shrinks", "grows", "least", "most")
    torch_names = {"step": "step", "previous": "prev", "size": "step_size"}

    def initial(self, slot: str, group: Group) -> float:
        return group["lr"] if slot == "size" else 0.0

    def rates(self, group: Group, p: Tensor, state: Mapping[str, Any]) -> tuple[float, ...]:
        return (*group["etas"], *group["step_sizes"])

    def update(self, group: Group, p: Any, grad: Any, state: Tensors, n: Mapping[str, Any]) -> tuple[Any, Tensors]:
        turn = grad * state["previous"]
        factor = ops.where(turn > 0, n["grows"], ops.where(turn < 0, n["shrinks"], ops.full_like(turn, 1.0)))
        size = ops.minimum(ops.maximum(state["size"] * factor, n["least"]), n["most"])
        grad = ops.where(turn < 0, 0.0, grad)
        return p - ops.sign(grad) * size, {"previous": grad, "size": size}


class ASGD(Composed):
    """Stochastic gradient descent with rates that fall, and the average of what parameters were (Polyak and Juditsky, 1992).

    ASGD(params, lr, lambd, alpha, t0, weight_decay): eta = lr / (1 + lambd lr t)^alpha; averages, `state[p]["average"]`, begin
    after t0 steps.
    """

    rules = both({"lr": 0.01, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0, "maximize": False})
    arguments = both(("lr", "lambd", "alpha", "t0", "weight_decay"))
    slots = required = ("average",)
    numbers = ("eta", "mu")  # those of the next step, as torch's state has them
    names = ("eta", "mu", "lambd", "weight_decay")
    torch_names = {"step": "step", "average": "ax", "eta": "eta", "mu": "mu"}

    def __init__(self, *args: Any, **options: Any) -> None:
        self.now: dict[Tensor, tuple[float, float]] = {}  # eta and mu of this step
        super().__init__(*args, **options)

    def advance(self, group: Group, p: Tensor, slots: tuple[str, ...]) -> tuple[dict[str, Any], bool]:
        state, first = super().advance(group, p, slots)
        self.now[p] = state.get("eta", group["lr"]), state.get("mu", 1.0)
        lr, step = group["lr"], state["step"]
        state["eta"] = lr / (1 + group["lambd"] * lr * step) ** group["alpha"]
        state["mu"] = 1 / max(1.0, step - group["t0"])
        return state, first

    def rates(self, group: Group, p: Tensor, state: Mapping[str, Any]) -> tuple[float, ...]:
        return (*self.now.get(p, (group["lr"], 1.0)), group["lambd"], group["weight_decay"])

    def update(self, group: Group, p: Any, grad: Any, state: Tensors, n: Mapping[str, Any]) -> tuple[Any, Tensors]:
        grad = grad + p * n["weight_decay"]
        moved = p * (1 - n["lambd"] * n["eta"]) - grad * n["eta"]
        return moved, {"average": ops.lerp(state["average"], moved, n["mu"])}


class Adafactor(Composed):
    """Adam without a mean of gradients, whose mean of squares is kept as those of rows and of columns (Shazeer and Stern,
    arXiv 1804.04235).

    Adafactor(params, lr, beta2_decay, eps, d, weight_decay): the rate is max(eps[1], rms(w)) min(lr, 1 / sqrt(t)), a step's root
    mean square at most d; eps[0] None: the dtype's. Vectors keep the mean of squares itself.
    """

    rules = both(
        {"lr": 0.01, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0, "maximize": False}
    )
    arguments = both(("lr", "beta2_decay", "eps", "d", "weight_decay"))
    slots = ("rows", "columns", "square")
    names = ("lr", "rate", "weight", "eps", "least", "d", "weight_decay")
    torch_names = {"step": "step", "rows": "row_var", "columns": "col_var", "square": "variance"}

    def slots_for(self, group: Group, shape: tuple[int, ...]) -> tuple[str, ...]:
        return ("rows", "columns") if len(shape) > 1 else ("square",)

    def slot_shape(self, slot: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return {"rows": (*shape[:-1], 1), "columns": (*shape[:-2], 1, *shape[-1:])}.get(slot, shape)

    def rates(self, group: Group, p: Tensor, state: Mapping[str, Any]) -> tuple[float, ...]:
        step, (least, smallest) = state["step"], group["eps"]
        least = float(np.finfo(p.dtype).eps) if least is None else least
        rate, weight = min(group["lr"], step**-0.5), step ** group["beta2_decay"]
        return group["lr"], rate, weight, least, smallest, group["d"], group["weight_decay"]

    def update(self, group: Group, p: Any, grad: Any, state: Tensors, n: Mapping[str, Any]) -> tuple[Any, Tensors]:
        rate = n["rate"] * ops.maximum(rms(p), n["least"])
        square, moved = grad * grad, {}
        for slot, axis in (("rows", -1), ("columns", -2)) if p.ndim > 1 else (("square", None),):
            mean = square if axis is None else ops.mean(square, axis, True)
            moved[slot] = ops.lerp(state[slot], mean, n["weight"])
        spread = moved.get("square")
        if spread is None:
            rows = moved["rows"]
            spread = rows * moved["columns"] / ops.maximum(ops.mean(rows, -2, True), n["eps"])
        step = grad * ops.rsqrt(ops.maximum(spread, n["eps"] * n["eps"]))
        step = step / ops.maximum(rms(step) / n["d"], 1.0)
        return p * (1 - n["lr"] * n["weight_decay"]) - step * rate, moved


def rms(x: Any) -> Any:
    """The root of the mean of squares."""
    return ops.sqrt(ops.mean(x * x))


class Muon(Composed):
    """Momentum whose steps are made orthogonal, for the matrices of hidden layers (Jordan, 2024): five rounds of Newton and
    Schulz bring all singular values near 1.

    Muon(params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn). adjust_lr_fn: "original",
    lr sqrt(max(1, rows / columns)), or "match_rms_adamw", 0.2 lr sqrt(max(rows, columns)). torch computes the rounds in bfloat16.
    """

    rules = both(
        {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": (3.4445, -4.7750, 2.0315),
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": "original",
        }
    )
    arguments = both(tuple(rules["torch"]))
    slots = required = ("momentum",)
    names = ("lr", "weight_decay", "momentum", "a", "b", "c", "eps")
    torch_names = {"momentum": "momentum_buffer"}

    def check(self, group: Group) -> None:
        for p in group["params"]:
            if p.ndim != 2:
                raise ValueError(f"[Muon] expects matrices, got a parameter of shape {tuple(p.shape)}.")

    def structure(self, group: Group) -> tuple[Any, ...]:
        return (*super().structure(group), group["nesterov"], group["ns_steps"], group["adjust_lr_fn"])

    def rates(self, group: Group, p: Tensor, state: Mapping[str, Any]) -> tuple[float, ...]:
        own = (group[name] for name in ("lr", "weight_decay", "momentum"))
        return (*own, *group["ns_coefficients"], group["eps"])

    def update(self, group: Group, p: Any, grad: Any, state: Tensors, n: Mapping[str, Any]) -> tuple[Any, Tensors]:
        rows, columns = p.shape
        mean = state["momentum"] * n["momentum"] + grad * (1 - n["momentum"])
        x = grad * (1 - n["momentum"]) + mean * n["momentum"] if group["nesterov"] else mean
        x = x.T if rows > columns else x
        x = x / ops.maximum(ops.sqrt(ops.summation(x * x)), n["eps"])
        for _ in range(int(group["ns_steps"])):
            gram = x @ x.T
            x = x * n["a"] + (gram * n["b"] + gram @ gram * n["c"]) @ x
        x = x.T if rows > columns else x
        original = group["adjust_lr_fn"] == "original"
        scale = math.sqrt(max(1.0, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
        return p * (1 - n["lr"] * n["weight_decay"]) - x * (n["lr"] * scale), {"momentum": mean}
