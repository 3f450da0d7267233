"""Projections, attention and output projection as one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, is_on, op
from needle.backend_ndarray import NDArray
from needle.ops.linalg.basic import Linear, linear
from needle.ops.nn.attention import ScaledDotProductAttention
from needle.ops.nn.heads import MergeHeads, SplitHeads, merge_heads, split_heads

__all__ = ["fused_multihead_attention"]


@op
class FusedMultiHeadAttention(Op):
    """linear(attention of heads(linear(query), linear(key), linear(value))).

    Inputs query, key, value (..., L, *), weights of q, k, v (E, *), [their biases (E,)], output weight, [output bias], [mask].
    Weights are torch's, (out, in). sequence_first: inputs and result are (L, N, *). Inputs that are the same tensor get one
    product with joined weights in a plan. In training with dropout the unfused form runs.
    """

    heads: int
    scale: Any = None
    causal: bool = False
    dropout: float = 0.0
    training: Any = False  # a bool, or a Mode that follows the attention's layer
    has_bias: bool = True
    has_out_bias: bool = True
    has_mask: bool = False
    sequence_first: bool = False
    strict: bool = False  # as the attention's

    @property
    def attention(self) -> ScaledDotProductAttention:
        core = (self.causal, self.scale, self.has_mask, self.dropout, self.training, self.strict)
        return ScaledDotProductAttention(*core)

    def split(self, inputs: Any) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]:
        """[query, key, value], their weights, their biases, [output weight, bias?], [mask?]."""
        sources, weights, rest = list(inputs[:3]), list(inputs[3:6]), list(inputs[6:])
        biases = rest[:3] if self.has_bias else []
        rest = rest[len(biases) :]
        n_out = 1 + self.has_out_bias
        return sources, weights, biases, rest[:n_out], rest[n_out:]

    def project(self, layer: Callable[..., Any], inputs: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """layer(x, weight, bias?) of query, key and value; [output weight, bias?], [mask?]."""
        sources, weights, biases, output, mask = self.split(inputs)
        pairs = enumerate(zip(sources, weights, strict=True))
        return [layer(x, w, *biases[i : i + 1]) for i, (x, w) in pairs], output, mask

    def must_decompose(self, *inputs: Any) -> bool:
        return self.dropout > 0 and is_on(self.training)

    def infer(self, *inputs: Any) -> Spec:
        projected, output, mask = self.project(Linear().infer, inputs)
        heads = [SplitHeads(self.heads, self.sequence_first).infer(p) for p in projected]
        merged = MergeHeads(self.sequence_first).infer(self.attention.infer(*heads, *mask))
        return Linear().infer(merged, *output)

    def attend(self, q: NDArray, k: NDArray, v: NDArray, mask: list[NDArray]) -> NDArray:
        split = SplitHeads(self.heads, self.sequence_first)
        q, k, v = (split.compute(x) for x in (q, k, v))
        # Written in the order in which the heads are merged, so that merging them moves nothing.
        shape = MergeHeads(self.sequence_first).infer(Spec((*q.shape[:-1], v.shape[-1]))).shape
        merged = NDArray.empty(shape)
        self.attention.into(split.compute(merged), q, k, v, *mask)
        return merged

    def compute(self, *inputs: NDArray) -> Any:
        if inputs[0].dtype != "float32":
            return None
        (q, k, v), output, mask = self.project(Linear().compute, inputs)
        return Linear().compute(self.attend(q, k, v, mask), *output)

    def reference(self, *inputs: np.ndarray) -> np.ndarray:
        projected, output, mask = self.project(Linear().reference, inputs)
        heads = [SplitHeads(self.heads, self.sequence_first).reference(p) for p in projected]
        merged = MergeHeads(self.sequence_first).reference(self.attention.reference(*heads, *mask))
        return Linear().reference(merged, *output)

    def decompose(self, *inputs: Tensor) -> Tensor:
        projected, output, mask = self.project(linear, inputs)
        heads = [split_heads(p, self.heads, self.sequence_first) for p in projected]
        return linear(merge_heads(self.attention(*heads, *mask), self.sequence_first), *output)

    @classmethod
    def samples(cls) -> list:
        x, m, v = (2, 5, 6), (8, 6), (8,)
        return [
            ({"heads": 2}, [x, x, x, m, m, m, v, v, v, (6, 8), (6,)]),
            (
                {"heads": 4, "has_bias": False, "has_out_bias": False, "causal": True},
                [x, x, x, m, m, m, (3, 8)],
            ),
            (
                {"heads": 2, "has_mask": True, "sequence_first": True},
                [(5, 2, 6), (7, 2, 3), (7, 2, 4), m, (8, 3), (8, 4), v, v, v, (6, 8), (6,), (2, 1, 1, 7)],
            ),
        ]


def fused_multihead_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    weights: tuple[Tensor, Tensor, Tensor] | Tensor,
    biases: tuple[Tensor, Tensor, Tensor] | Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    training: Any = False,
    sequence_first: bool = False,
) -> Tensor:
    """Multi-head attention (Vaswani et al., 2017). query (..., L, E); weights (E, E) of q, k and v, or one of (3 E, E)."""

    def thirds(t: Tensor) -> tuple[Tensor, ...]:
        size = t.shape[0] // 3
        return tuple(t[i * size : (i + 1) * size] for i in range(3))

    ws = thirds(weights) if isinstance(weights, Tensor) else weights
    bs = thirds(biases) if isinstance(biases, Tensor) else biases or ()
    flags = (bool(bs), out_bias is not None, mask is not None, sequence_first)
    extra = [t for t in (out_bias, mask) if t is not None]
    fused = FusedMultiHeadAttention(heads, scale, causal, dropout, training, *flags)
    return fused(query, key, value, *ws, *bs, out_weight, *extra)
