"""Numbers in place of what is none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op, tensor_method
from needle.backend_ndarray import FLOATS
from needle.ops.common import Unary
from needle.ops.families import samples_of
from needle.ops.math.arithmetic import clamp
from needle.ops.math.comparison import eq, le
from needle.ops.math.elementwise import where
from needle.ops.math.logic import isnan
from needle.ops.math.maths import absolute

__all__ = ["nan_to_num"]


@op
class Finite(Unary):
    """x limited to [-most, most], `nan` where it is NaN; the gradient is 0 of NaN and infinities, else 1."""

    kernel = "finite"
    nan: float
    most: float

    def decompose(self, x: Tensor) -> Tensor:
        return where(isnan(x), self.nan, clamp(x, -self.most, self.most))

    def formula(self, x: np.ndarray) -> Any:
        return np.where(np.isnan(x), self.nan, np.clip(x, -self.most, self.most)).astype(x.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return where(le(absolute(node.inputs[0]), self.most), out_grad, 0.0)

    samples = samples_of(({"nan": 0.5, "most": 2.0}, [(4, 33)]))


@op
class NanToNum(Op):
    """Elements with `nan` for NaN, `posinf` and `neginf` for what is infinite; None: 0 and the largest numbers of the dtype."""

    nan: float | None = None
    posinf: float | None = None
    neginf: float | None = None

    def infer(self, x: Any) -> Spec:
        return Spec(tuple(x.shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        if x.dtype not in FLOATS:
            return x
        most = float(np.finfo("float64" if x.dtype == "float64" else "float32").max)
        nan = 0.0 if self.nan is None else float(self.nan)
        if self.posinf is None and self.neginf is None:  # one pass instead of two comparisons and choices
            return Finite(nan, most)(x)
        made = where(isnan(x), nan, x)
        made = where(eq(x, math.inf), most if self.posinf is None else float(self.posinf), made)
        return where(eq(x, -math.inf), -most if self.neginf is None else float(self.neginf), made)

    samples = samples_of(({}, [(4, 9)]), ({"nan": 1.5, "posinf": 2.0}, [(3, 1)]), ({}, [Spec((4,), "int64")]))


@tensor_method()
def nan_to_num(x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Elements with `nan` for NaN (0), `posinf` and `neginf` for what is infinite (the dtype's largest numbers)."""
    return NanToNum(nan, posinf, neginf)(x)
