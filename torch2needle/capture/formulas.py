"""Functions of torch that take plain numbers alone, as formulas in which tensors stand for these."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

T = torch.Tensor


def leaky_relu(input: T, negative_slope: float = 0.01) -> T:
    return torch.where(input > 0, input, input * negative_slope)


def elu(input: T, alpha: float = 1.0) -> T:
    return torch.where(input > 0, input, input.clamp(max=0).expm1() * alpha)


def celu(input: T, alpha: float = 1.0) -> T:
    return torch.where(input > 0, input, (input.clamp(max=0) / alpha).expm1() * alpha)


def hardtanh(input: T, min_val: float = -1.0, max_val: float = 1.0) -> T:
    low, high = torch.as_tensor(min_val, dtype=input.dtype), torch.as_tensor(max_val, dtype=input.dtype)
    return torch.where(input > high, high, torch.where(input < low, low, input))


def threshold(input: T, threshold: float, value: float) -> T:
    return torch.where(input <= threshold, value, input)


def softplus(input: T, beta: float = 1.0, threshold: float = 20.0) -> T:
    scaled = input * beta
    return torch.where(scaled > threshold, input, torch.where(scaled > threshold, 0.0, scaled).exp().log1p() / beta)


def softshrink(input: T, lambd: float = 0.5) -> T:
    return torch.where(input > lambd, input - lambd, torch.where(input < -lambd, input + lambd, input * 0))


def hardshrink(input: T, lambd: float = 0.5) -> T:
    return torch.where((input <= lambd) & (input >= -lambd), 0.0, input)


def add(input: T, other: Any, *, alpha: float = 1) -> T:
    return input + other * alpha


def sub(input: T, other: Any, *, alpha: float = 1) -> T:
    return input - other * alpha


def addcmul(input: T, tensor1: T, tensor2: T, *, value: float = 1) -> T:
    return input + tensor1 * tensor2 * value


def addcdiv(input: T, tensor1: T, tensor2: T, *, value: float = 1) -> T:
    return input + tensor1 / tensor2 * value


def addmm(input: T, mat1: T, mat2: T, *, beta: float = 1, alpha: float = 1) -> T:
    return input * beta + mat1 @ mat2 * alpha


def addmv(input: T, mat: T, vec: T, *, beta: float = 1, alpha: float = 1) -> T:
    return input * beta + mat @ vec * alpha


def baddbmm(input: T, batch1: T, batch2: T, *, beta: float = 1, alpha: float = 1) -> T:
    return input * beta + batch1 @ batch2 * alpha


def nan_to_num(input: T, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> T:
    return torch.where(input.isnan(), nan, before(torch, "nan_to_num")(input, 0.0, posinf, neginf))


def pad(input: T, pad: Any, mode: str = "constant", value: float = 0.0) -> T:
    own = before(F, "pad")
    return torch.where(own(torch.ones_like(input, dtype=torch.bool), pad), own(input, pad), value)


def scaled_dot_product_attention(query: T, key: T, value: T, *rest: Any, scale: float = 1.0, **how: Any) -> T:
    return before(F, "scaled_dot_product_attention")(query * scale, key, value, *rest, scale=1.0, **how)


def reduced(loss: T, reduction: str) -> T:
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def huber_loss(input: T, target: T, reduction: str = "mean", delta: float = 1.0) -> T:
    apart = (input - target).abs()
    return reduced(torch.where(apart <= delta, apart * apart / 2, (apart - delta / 2) * delta), reduction)


def smooth_l1_loss(
    input: T, target: T, size_average: None = None, reduce: None = None, reduction: str = "mean", beta: float = 1.0
) -> T:
    apart = (input - target).abs()
    return reduced(torch.where(apart < beta, apart * apart / (beta * 2), apart - beta / 2), reduction)


METHODS = (add, sub, addcmul, addcdiv, addmm, addmv, baddbmm, nan_to_num, hardshrink)
ACTIVATIONS = (leaky_relu, elu, celu, hardtanh, threshold, softplus, softshrink, hardshrink)
OTHERS = (pad, scaled_dot_product_attention, huber_loss, smooth_l1_loss)
TABLE: dict[Any, tuple[Callable, ...]] = {F: ACTIVATIONS + OTHERS, torch: METHODS, torch.Tensor: METHODS}
OWN = {(owner, f.__name__): getattr(owner, f.__name__) for owner, several in TABLE.items() for f in several}


def before(owner: Any, name: str) -> Callable:
    """Torch's own function."""
    return OWN[owner, name]


def of_numbers() -> list[tuple]:
    """The formulas in the places of torch's functions, for calls of this thread with a number that is a tensor of a capture."""
    places = [(owner, f) for owner, several in TABLE.items() for f in several]
    thread = threading.get_ident()
    return [
        (o if o is torch.Tensor else vars(o), f.__name__, instead(before(o, f.__name__), f, thread)) for o, f in places
    ]


def instead(own: Callable, formula: Callable, thread: int) -> Callable:
    signature = inspect.signature(formula)
    numbers = [n for n, p in signature.parameters.items() if p.annotation == "float"]

    @functools.wraps(own)
    def call(*args: Any, **how: Any) -> Any:
        inplace = how.get("inplace", False)
        if threading.get_ident() != thread or not any(is_number(v) for v in (*args, *how.values())):
            return own(*args, **how)
        try:
            given = signature.bind(*args, **{n: v for n, v in how.items() if n != "inplace"})
        except TypeError:  # torch's, or an older form of its arguments
            return own(*args, **how)
        if not any(is_number(given.arguments.get(n)) for n in numbers):
            return own(*args, **how)
        made = formula(*given.args, **given.kwargs)
        return given.args[0].copy_(made) if inplace else made

    return call


def is_number(value: Any) -> bool:
    return isinstance(value, FakeTensor) and not value.ndim
