"""Logic: truths, bits of bools and integers, and which numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, one_of, op, tensor_method
from needle.backend_ndarray import FLOATS
from needle.ops.common import Binary, as_operand
from needle.ops.dtypes import result_dtype
from needle.ops.families import no_gradient, samples_of, unary
from needle.ops.math.comparison import eq, lt, ne
from needle.ops.math.elementwise import where
from needle.ops.math.maths import absolute

__all__ = [
    "bitwise",
    "bitwise_not",
    "isfinite",
    "isinf",
    "isnan",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
]


def truth(a: Tensor) -> Tensor:
    """Whether elements differ from zero, as bool."""
    try:
        known = a.dtype
    except Unsupported:
        known = ""
    return a if known == "bool" else ne(a, 0)


@tensor_method()
def logical_not(a: Tensor) -> Tensor:
    """Whether elements are zero, as bool. As torch.logical_not."""
    return eq(a, 0)


@tensor_method()
def logical_and(a: Tensor, b: Tensor) -> Tensor:
    """Whether both differ from zero, of any dtypes, broadcast, as bool. As torch.logical_and."""
    a = truth(a)
    return where(a, truth(b), a)


@tensor_method()
def logical_or(a: Tensor, b: Tensor) -> Tensor:
    """Whether one at least differs from zero, of any dtypes, broadcast, as bool. As torch.logical_or."""
    a = truth(a)
    return where(a, a, truth(b))


@tensor_method()
def logical_xor(a: Tensor, b: Tensor) -> Tensor:
    """Whether just one differs from zero, of any dtypes, broadcast, as bool. As torch.logical_xor."""
    return ne(truth(a), truth(b))


LOGIC = {"and": logical_and, "or": logical_or, "xor": logical_xor}


@op
class Bitwise(Binary):
    """`operator` and, or, xor of bools and integers."""

    operator: str
    kernel = "bitwise_and"  # stands for that of `operator`
    checks = one_of(operator=tuple(LOGIC))

    def operand_dtype(self, *inputs: Any) -> str:
        for x in inputs:
            if x.dtype in FLOATS:
                raise ValueError(f"[bitwise_{self.operator}] expects bools or integers, got {x.dtype}.")
        return result_dtype(*inputs)

    def row(self) -> tuple[Any, Iterable[float]]:
        return f"bitwise_{self.operator}", ()

    def formula(self, a: np.ndarray, b: np.ndarray) -> Any:
        return getattr(np, f"bitwise_{self.operator}")(a, b)

    def decompose(self, a: Tensor, b: Tensor) -> Tensor:
        if self.operand_dtype(a, b) != "bool":
            raise ValueError(f"[bitwise_{self.operator}] of integers has no decomposition.")
        return LOGIC[self.operator](a, b)

    gradient = no_gradient

    @classmethod
    def samples(cls) -> list:
        both = ("bool", "int64")
        return [({"operator": o}, [Spec((4, 9), d), Spec((9,), d)]) for o in LOGIC for d in both]


@op
class BitwiseNot(Op):
    """Every bit of bools or integers turned over."""

    def infer(self, x: Any) -> Any:
        if x.dtype in FLOATS:
            raise ValueError(f"[bitwise_not] expects bools or integers, got {x.dtype}.")
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        self.infer(x)
        return eq(x, 0) if x.dtype == "bool" else -x - 1

    samples = samples_of(*(({}, [Spec((4, 9), d)]) for d in ("bool", "int64")))


bitwise_not = unary(BitwiseNot, "bitwise_not")


def bitwise(operator: str, a: Tensor, b: Any) -> Tensor:
    """Bits of integers or bools joined by `operator` "and", "or" or "xor", broadcast. As torch.bitwise_and and so on; floats
    raise ValueError.
    """
    return Bitwise(operator)(a, as_operand(b, a))


@tensor_method()
def isnan(a: Tensor) -> Tensor:
    """Whether elements are nan, as bool. As torch.isnan."""
    return ne(a, a)


@tensor_method()
def isinf(a: Tensor) -> Tensor:
    """Whether elements are infinite, of either sign, as bool. As torch.isinf."""
    return eq(absolute(a), math.inf)


@tensor_method()
def isfinite(a: Tensor) -> Tensor:
    """Whether elements are neither infinite nor nan, as bool. As torch.isfinite."""
    return lt(absolute(a), math.inf)
