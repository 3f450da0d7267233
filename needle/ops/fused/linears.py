"""Linear layers that read one input, as one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Op, Tensor, op
from needle.backend_ndarray import NDArray
from needle.ops.families import samples_of
from needle.ops.linalg.basic import Linear


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
