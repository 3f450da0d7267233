"""Random numbers as ops of a graph, drawn anew at every call from numpy's global legacy stream, in the order of the graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, Unsupported, op
from needle.backend_ndarray import FLOATS, NDArray
from needle.op import one_of
from needle.ops.families import no_gradient

__all__ = [
    "bernoulli",
    "binomial",
    "poisson",
    "rand_like",
    "randint_like",
    "randn_like",
    "randperm_like",
    "undifferentiated",
]


@op
class Draw(Op):
    """Numbers of `shape`, by default that of x: uniform in [0, 1), normal, whole ones in [low, high), or those below `high` in
    any order. x only says where they lie.
    """

    kind: str
    shape: tuple | None = None
    dtype: str = "float32"
    low: int = 0
    high: int = 1
    has_expression = False  # exports would draw once
    gradient = no_gradient
    checks = one_of(kind=("uniform", "normal", "integers", "permutation"))

    def infer(self, x: Any) -> Any:
        if self.kind in ("uniform", "normal") and self.dtype not in FLOATS:
            raise ValueError(f"[draw] {self.kind} numbers expect a dtype of floats, got {self.dtype}.")
        if self.kind == "integers" and self.high <= self.low:
            raise ValueError(f"[draw] expects low below high, got {self.low} and {self.high}.")
        return Spec(tuple(x.shape if self.shape is None else self.shape), self.dtype)

    def _made(self, shape: tuple) -> np.ndarray:
        if self.kind == "permutation":
            return np.random.permutation(self.high).astype(self.dtype)
        if self.kind == "integers":
            return np.random.randint(self.low, self.high, shape).astype(self.dtype)
        made = np.random.rand(*shape) if self.kind == "uniform" else np.random.randn(*shape)
        if self.kind == "uniform":  # rounding to float32 must not reach 1
            made = np.minimum(made, np.nextafter(np.asarray(1, self.dtype), 0, dtype=self.dtype))
        return np.asarray(made, self.dtype)

    def compute(self, x: NDArray) -> Any:
        return NDArray(self._made(self.infer(x).shape), device=x.device, dtype=self.dtype)

    def reference(self, x: np.ndarray) -> Any:
        return self._made(self.infer(x).shape)

    def must_decompose(self, *inputs: Any) -> bool:
        return getattr(inputs[0].recorder, "static", False)

    def decompose(self, x: Tensor) -> Tensor:
        spec: Any = self.infer(x)
        if not getattr(x.recorder, "trains", False):
            raise Unsupported(
                "[draw] a plan of inference would draw its random numbers once; call the net, or compile a step"
            )
        return x.recorder.draw(spec, lambda: self._made(spec.shape))


@op
class DrawOf(Op):
    """Whole numbers, as floats, whose distributions have the numbers of these tensors: poisson (rate), binomial (count, p)."""

    kind: str
    has_expression = False
    gradient = no_gradient
    checks = one_of(kind=("poisson", "binomial"))

    def infer(self, *inputs: Any) -> Any:
        return Spec(np.broadcast_shapes(*(tuple(x.shape) for x in inputs)), str(inputs[0].dtype))

    def reference(self, *inputs: np.ndarray) -> Any:
        wide = [np.asarray(x, "float64") for x in inputs]
        if self.kind == "binomial":
            wide[0] = wide[0].astype("int64")
        return np.asarray(getattr(np.random, self.kind)(*wide), self.infer(*inputs).dtype)

    def compute(self, *inputs: NDArray) -> Any:
        made = self.reference(*(x.numpy() for x in inputs))
        return NDArray(made, device=inputs[0].device, dtype=self.infer(*inputs).dtype)

    def must_decompose(self, *inputs: Any) -> bool:
        return getattr(inputs[0].recorder, "static", False)

    def decompose(self, *inputs: Tensor) -> Tensor:
        raise Unsupported(f"[{self.kind}] a plan draws no {self.kind} numbers; call the net")


@op
class Undifferentiated(Op):
    """x, which depends on what it was made of in a way that gradients do not follow: asking for one is an error."""

    is_view = True
    has_expression = False  # nor has the draw that it stands behind
    what: str

    def infer(self, x: Any) -> Any:
        return Spec(tuple(x.shape), str(x.dtype))

    def compute(self, *arrays: Any) -> Any:
        return arrays[0]

    reference = compute

    def gradient(self, out_grad: Any, node: Any) -> Any:
        raise Unsupported(
            f"[{self.what}] a draw passes no gradients to its parameters; draw it without, as sample() does"
        )


def float_of(x: Tensor, dtype: str | None) -> str:
    return x.dtype if dtype is None else dtype


def rand_like(x: Tensor, shape: Any = None, dtype: str | None = None) -> Tensor:
    """Uniform numbers in [0, 1), anew at every call."""
    return Draw("uniform", None if shape is None else tuple(shape), float_of(x, dtype))(x)


def randn_like(x: Tensor, shape: Any = None, dtype: str | None = None) -> Tensor:
    """Normal numbers of mean 0 and deviation 1, anew at every call."""
    return Draw("normal", None if shape is None else tuple(shape), float_of(x, dtype))(x)


def randint_like(x: Tensor, low: int, high: int, shape: Any = None, dtype: str = "int64") -> Tensor:
    """Whole numbers from low to below high in the shape of x, or another, anew at every call."""
    return Draw("integers", None if shape is None else tuple(shape), dtype, low, high)(x)


def randperm_like(x: Tensor, n: int, dtype: str = "int64") -> Tensor:
    """The numbers below n in an order that is another at every call, shape (n,), on the device of x."""
    return Draw("permutation", (n,), dtype, 0, n)(x)


def bernoulli(p: Tensor) -> Tensor:
    """1 with the probability p of each place, else 0."""
    from needle.ops.math.comparison import lt

    return lt(rand_like(p), p).astype(p.dtype)


def poisson(rate: Tensor) -> Tensor:
    """Whole numbers, as floats, whose mean and variance are `rate`, anew at every call."""
    return DrawOf("poisson")(rate)


def binomial(count: Tensor, p: Tensor) -> Tensor:
    """How many of `count` tries of probability p succeed, as floats, anew at every call."""
    return DrawOf("binomial")(count, p)


def undifferentiated(x: Tensor, what: str) -> Tensor:
    """x; asking for gradients of what it was made of is an error that names `what`."""
    return Undifferentiated(what)(x)
