"""Linear layers that read one input, as one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Op, Tensor, op
from needle.backend_ndarray import NDArray, call

from .common import rows_of
from .linalg import Linear, linear_kernel
from .planned import lower_linear, pack_matrix, pad_vector


def join_rows(*parts: NDArray) -> NDArray:
    """Matrices or vectors one below the other."""
    out = NDArray.empty((sum(p.shape[0] for p in parts), *parts[0].shape[1:]), parts[0].dtype)
    row = 0
    for p in parts:
        call("copy", [out[row : row + p.shape[0]]], x=p)
        row += p.shape[0]
    return out


def join_and_pack(*weights: NDArray) -> NDArray:
    return pack_matrix("torch", join_rows(*weights))


def join_and_pad(*biases: NDArray) -> NDArray:
    return pad_vector(join_rows(*biases))


def plan_joined(builder: Any, x: NDArray, weights: Sequence[NDArray], biases: Sequence[NDArray]) -> list[NDArray]:
    """Plan x W^T + b for every weight (out, in): one product with the weights packed side by side, results as its slices."""
    if len(weights) == 1 or not all(builder.is_constant(a) for a in (*weights, *biases)):
        outs = [NDArray.empty((*x.shape[:-1], w.shape[0])) for w in weights]
        for i, (w, out) in enumerate(zip(weights, outs, strict=True)):
            lower_linear(builder, "torch", [x, w, *biases[i : i + 1]], out)
        return outs
    whole = NDArray.empty((*x.shape[:-1], sum(w.shape[0] for w in weights)))
    if not builder.packs:
        joined = [builder.derive("join_rows", join_rows, *parts) for parts in (weights, biases) if parts]
        lower_linear(builder, "torch", [x, *joined], whole)
        return slices(whole, weights)
    packed = builder.derive("join_and_pack", join_and_pack, *weights)
    bias = builder.derive("join_and_pad", join_and_pad, *biases) if biases else None
    rows, target = rows_of(x), rows_of(whole)
    call("matmul_packed", [target], a=rows, packed=packed, bias=bias, activation=0, alpha=0)
    return slices(whole, weights)


def slices(whole: NDArray, weights: Sequence[NDArray]) -> list[NDArray]:
    """The parts of a joined result that belong to each weight (out, in)."""
    ends = np.cumsum([w.shape[0] for w in weights])
    return [whole[..., int(e) - w.shape[0] : int(e)] for e, w in zip(ends, weights, strict=True)]


@op
class FusedLinears(Op):
    """(x W1^T + b1, x W2^T + b2, ...): inputs x, `parts` weights (out, in), and their biases if has_bias."""

    parts: int
    has_bias: bool = True

    n_out = property(lambda self: self.parts)  # type: ignore[assignment]

    def split(self, inputs: Any) -> list[tuple[Any, ...]]:
        """(weight, bias?) of each layer."""
        weights, biases = inputs[1 : 1 + self.parts], inputs[1 + self.parts :]
        return [(w, *biases[i : i + 1]) for i, w in enumerate(weights)]

    def infer(self, x: Any, *rest: Any) -> Any:
        if self.parts < 1 or len(rest) != self.parts * (1 + self.has_bias):
            raise ValueError(f"[fused_linears] expects weights of {self.parts} layers, got {len(rest)} tensors.")
        return tuple(Linear().infer(x, *layer) for layer in self.split((x, *rest)))

    def flops(self, out: Any, x: Any, *rest: Any) -> int:
        return sum(2 * int(np.prod(o.shape)) * x.shape[-1] for o in out)

    def compute(self, x: NDArray, *rest: NDArray) -> Any:
        layers = [(*layer, None)[:2] for layer in self.split((x, *rest))]
        return tuple(linear_kernel(x, w, b, "torch", "none", 0.0) for w, b in layers)

    def plan(self, builder: Any, inputs: list[NDArray]) -> Any:
        x, *rest = inputs
        return tuple(plan_joined(builder, x, rest[: self.parts], rest[self.parts :]))

    def reference(self, x: np.ndarray, *rest: np.ndarray) -> Any:
        return tuple(Linear().reference(x, *layer) for layer in self.split((x, *rest)))

    def decompose(self, x: Tensor, *rest: Tensor) -> Any:
        return tuple(Linear()(x, *layer) for layer in self.split((x, *rest)))

    @classmethod
    def samples(cls) -> list:
        return [
            ({"parts": 3}, [(2, 4, 7), (5, 7), (33, 7), (1, 7), (5,), (33,), (1,)]),
            ({"parts": 2, "has_bias": False}, [(4, 7), (5, 7), (6, 7)]),
        ]
