"""Linear layers that read one input, as one product; a gate and what it lets through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Op, Tensor, op
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.kernels import call_map
from needle.ops.families import samples_of
from needle.ops.linalg.basic import Linear
from needle.ops.math.activation import ACTIVATIONS, activation_op, apply_activation


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
        return tuple(Linear().compute(x, *layer) for layer in self.split((x, *rest)))

    def reference(self, x: np.ndarray, *rest: np.ndarray) -> Any:
        return tuple(Linear().reference(x, *layer) for layer in self.split((x, *rest)))

    def decompose(self, x: Tensor, *rest: Tensor) -> Any:
        return tuple(Linear()(x, *layer) for layer in self.split((x, *rest)))

    samples = samples_of(
        ({"parts": 3}, [(2, 4, 7), (5, 7), (33, 7), (1, 7), (5,), (33,), (1,)]),
        ({"parts": 2, "has_bias": False}, [(4, 7), (5, 7), (6, 7)]),
    )


@op
class GatedLinear(Op):
    """activation(x Wg^T + bg) * (x Wu^T + bu): inputs x, Wg, Wu (out, in), and bg, bu if has_bias.

    Shazeer, GLU variants improve Transformer, arXiv 2002.05202.
    """

    activation: str = "silu"
    alpha: float = 0.0
    has_bias: bool = False

    @property
    def linears(self) -> FusedLinears:
        return FusedLinears(2, self.has_bias)

    def infer(self, *inputs: Any) -> Any:
        gate, up = self.linears.infer(*inputs)
        if gate != up:
            raise ValueError(f"[gated_linear] expects weights of one shape, got results {gate.shape} and {up.shape}.")
        return gate

    def flops(self, out: Any, *inputs: Any) -> int:
        return self.linears.flops((out, out), *inputs)

    def join(self, out: NDArray, gate: NDArray, up: NDArray) -> None:
        """out = activation(gate) * up."""
        call_map(self.activation, out, [gate], (self.alpha,) if ACTIVATIONS[self.activation].has_alpha else ())
        call_map("mul", out, [out, up])

    def compute(self, *inputs: NDArray) -> Any:
        gate, up = self.linears.compute(*inputs)
        self.join(gate, gate, up)
        return gate

    def reference(self, *inputs: np.ndarray) -> Any:
        gate, up = self.linears.reference(*inputs)
        return activation_op(self.activation, self.alpha).reference(gate) * up

    def decompose(self, *inputs: Tensor) -> Any:
        gate, up = self.linears.decompose(*inputs)
        return apply_activation(self.activation, gate, self.alpha) * up

    samples = samples_of(
        ({}, [(2, 4, 7), (5, 7), (5, 7)]),
        ({"activation": "gelu", "has_bias": True}, [(3, 7), (33, 7), (33, 7), (33,), (33,)]),
        ({"activation": "leaky_relu", "alpha": 0.2}, [(3, 7), (4, 7), (4, 7)]),
    )
