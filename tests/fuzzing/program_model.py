"""Drawn programs as models: the functions they call, the values they start from, and the module that runs their steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from support.calls import RANDOM
from torch2needle.rules.registry import COMPLEX_RULES, FUNCTION_RULES, is_overload, target_name

# The results of these are not defined, or the order of equal elements, the signs of vectors or that of NaN are open.
UNDEFINED = (
    "empty",
    "new_empty",
    "empty_like",
    "cuda",
    "tensor",
    "scalar_tensor",
    "len",
    "half",
    "bfloat16",
    "svd",
    "eigh",
    "kthvalue",
    "signbit",
)


@lru_cache(1)
def targets() -> dict[str, tuple[Any, Callable]]:
    """Every torch function and method that has a rule, with it, by name."""
    found = {}
    for target, rule in {**COMPLEX_RULES, **FUNCTION_RULES}.items():
        name = target_name(target)
        if isinstance(target, str) or is_overload(target) or name.startswith(("math.", "torch.sym_")):
            continue  # of export's captures, sizes and other libraries
        if "fractional" not in name and name not in RANDOM and name.rpartition(".")[2].rstrip("_") not in UNDEFINED:
            found[name] = (target, rule)
    return found


# -- data -------------------------------------------------------------------------------------------------------------------


def make(dtype: str, shape: tuple[int, ...], seed: int, kind: str) -> torch.Tensor:
    """Values of a kind, from a seed: eighths, of which most functions keep every digit."""
    if dtype.startswith("complex"):
        part = {"complex64": "float32", "complex128": "float64"}[dtype]
        pair = make(part, (*shape, 2), seed, "special" if kind == "special" else "plain")
        x = torch.complex(pair[..., 0], pair[..., 1])
        return x.transpose(0, -1).contiguous().transpose(0, -1) if kind == "transposed" and x.ndim > 1 else x
    rng = np.random.RandomState(seed)
    within = re.fullmatch(r"(below|within) (\d+)", kind)
    if within:
        n = int(within[2])
        values = rng.randint(0 if within[1] == "below" else -n, max(n, 1), shape)
    elif dtype == "bool":
        values = rng.randint(0, 2, shape)
    elif dtype.startswith("int"):
        values = rng.randint(-5, 6, shape)
        if kind == "special":
            values = rng.choice(
                [2**31 - 1, -(2**31), 0, 1] if dtype == "int32" else [2**53 + 1, 2**62, -(2**63), 2**63 - 1], shape
            )
    else:
        values = rng.randint(1 if kind == "positive" else -24, 25, shape) / 8
        if kind == "special":
            values = np.where(
                rng.rand(*shape) < 0.3, rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e8, 1e-8], shape), values
            )
    x = torch.tensor(np.asarray(values), dtype=getattr(torch, dtype))
    if kind == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "strided" and x.ndim:
        return torch.stack([x, x], -1)[..., 0]
    return x


WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Program(nn.Module):
    """The steps of a case; `shake` is applied to the result of every step and its operands."""

    def __init__(
        self, case: dict[str, Any], double: bool = False, shake: Callable[[Any, Any], Any] = lambda v, operands: v
    ) -> None:
        super().__init__()
        self.case, self.double, self.shake = case, double, shake
        self.places: dict[Any, str] = {}
        for found in constants(case):
            name = f"c{len(self.places)}"
            self.places[found] = name
            self.register_buffer(name, self.real(make(*found[1:])))

    def real(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(WIDER[x.dtype]) if self.double and x.dtype in WIDER else x

    def dtype(self, name: str) -> torch.dtype:
        dtype = getattr(torch, name)
        return WIDER.get(dtype, dtype) if self.double else dtype

    def value(self, v: Any, known: list[Any]) -> Any:
        """An argument: plain data with values for references."""
        if isinstance(v, tuple) and v and v[0] in ("c", *READERS):
            return getattr(self, self.places[v]) if v[0] == "c" else READERS[v[0]](self, v, known)
        return tuple(self.value(i, known) for i in v) if isinstance(v, tuple) else v

    def run(self, *inputs: Any) -> Any:
        known = list(inputs)
        for name, args, kwargs in self.case["steps"]:
            operands = self.value((*args, *kwargs.values()), known)
            known.append(self.shake(self.call(name, args, kwargs, known), operands))
        return tuple(known[i] for i in self.case["outputs"])

    def call(self, name: str, args: tuple, kwargs: dict[str, Any], known: list[Any]) -> Any:
        values = [self.value(a, known) for a in args]
        named = {k: self.value(v, known) for k, v in kwargs.items()}
        name = "torch.Tensor.double" if self.double and name == "torch.Tensor.float" else name
        method = name.removeprefix("torch.Tensor.")
        if method != name and not method.startswith("__r"):
            return getattr(values[0], method)(*values[1:], **named)
        if method != name:
            return getattr(values[0], method)(*values[1:])
        return targets()[name][0](*values, **named)


READERS: dict[str, Callable[[Program, Any, list[Any]], Any]] = {
    "v": lambda p, v, known: known[v[1]] if len(v) == 2 else known[v[1]][v[2]],
    "dtype": lambda p, v, known: p.dtype(v[1]),
    "slice": lambda p, v, known: slice(*v[1:]),
    "...": lambda p, v, known: ...,
    "list": lambda p, v, known: [p.value(i, known) for i in v[1:]],
    "tuple": lambda p, v, known: tuple(p.value(i, known) for i in v[1:]),
    "size": lambda p, v, known: p.value(v[1], known).shape[v[2]],
}


class One(Program):
    def forward(self, a: Any) -> Any:
        return self.run(a)


class Two(Program):
    def forward(self, a: Any, b: Any) -> Any:
        return self.run(a, b)


class Three(Program):
    def forward(self, a: Any, b: Any, c: Any) -> Any:
        return self.run(a, b, c)


def program(case: dict[str, Any], **options: Any) -> Program:
    return (One, Two, Three)[len(case["inputs"]) - 1](case, **options).eval()


def constants(case: dict[str, Any]) -> list[Any]:
    found: dict[Any, None] = {}

    def visit(v: Any) -> None:
        if isinstance(v, tuple | list):
            if v and v[0] == "c":
                found[v] = None
            for i in v if not (v and v[0] == "c") else ():
                visit(i)

    for _, args, kwargs in case["steps"]:
        visit(args), visit(tuple(kwargs.values()))
    return list(found)
