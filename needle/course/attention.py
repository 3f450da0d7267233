"""The course's transformer: attention, its layer with prenorm and projections, transformer layers. torch's are in transformer.py.

Dropouts draw in the order: attention probabilities, after attention, after ReLU, after linear2.
"""

from __future__ import annotations

from typing import Any

from needle import ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.nn.activation import ReLU
from needle.nn.basic import Dropout, Linear
from needle.nn.containers import Sequential
from needle.nn.embedding import Embedding
from needle.nn.module import Module
from needle.nn.norm import LayerNorm1d
from needle.ops.nn.attention import MASKED


def on_rows(layer: Module, x: Tensor) -> Tensor:
    """A layer for (rows, features) on (B, T, features)."""
    return ops.reshape_like(layer(ops.flatten(x, 0, 1)), x)


class MultiHeadAttention(Module):
    """q (B, H, Tq, D), k (B, H, Tk, D), v (B, H, Tk, Dv) to (result (B, H, Tq, Dv), probs (B, H, Tq, Tk)).

    probs = dropout(softmax(q k^T / sqrt(D))) and result = probs v (Vaswani et al., 2017). causal: the last query sees every
    key, each query before it one key less.
    """

    container = True

    def __init__(
        self, *, dropout: float = 0.0, causal: bool = False, device: Device | None = None, dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.causal = causal
        self.dropout = Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = q.shape[-2], k.shape[-2]
        scores = ops.matmul(q, ops.transpose(k)) * q.shape[-1] ** -0.5
        if self.causal:
            ahead = ops.full_like(scores, MASKED, (queries, keys))
            scores = scores + ops.triangle(ahead, upper=True, diagonal=keys - queries + 1)
        probs = self.dropout(ops.softmax(scores))
        return ops.matmul(probs, v), probs

    def extra_repr(self) -> str:
        return f"causal={self.causal}"


class AttentionLayer(Module):
    """q (B, Tq, q_features), k (B, Tk, k_features), v (B, Tk, v_features) to (B, Tq, out_features); k and v default to q.

    Each of them is normalised by its own LayerNorm1d over (B * T, features) and projected to num_head * dim_head features.
    Projections have no bias.
    """

    container = True

    def __init__(
        self,
        q_features: int,
        num_head: int,
        dim_head: int,
        *,
        k_features: int | None = None,
        v_features: int | None = None,
        out_features: int | None = None,
        dropout: float = 0.0,
        causal: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        k_features, v_features, out_features = (n or q_features for n in (k_features, v_features, out_features))
        self.num_head, self.dim_head = num_head, dim_head
        features, inner = (q_features, k_features, v_features), num_head * dim_head
        self.prenorm_q, self.prenorm_k, self.prenorm_v = (LayerNorm1d(n, **where) for n in features)
        projections = (Linear(n, inner, bias=False, **where) for n in features)
        self.q_projection, self.k_projection, self.v_projection = projections
        self.attn = MultiHeadAttention(dropout=dropout, causal=causal, **where)
        self.out_projection = Linear(inner, out_features, bias=False, **where)

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = q if k is None else k, q if v is None else v
        heads = [
            ops.split_heads(project(on_rows(norm, x)), self.num_head)
            for x, norm, project in (
                (q, self.prenorm_q, self.q_projection),
                (k, self.prenorm_k, self.k_projection),
                (v, self.prenorm_v, self.v_projection),
            )
        ]
        attended, _ = self.attn(*heads)
        return self.out_projection(ops.merge_heads(attended))

    def extra_repr(self) -> str:
        return f"num_head={self.num_head}, dim_head={self.dim_head}"


class TransformerLayer(Module):
    """x (B, T, q_features) to the same: x + dropout(attention(x)), then + dropout(linear2(dropout(relu(linear1(norm(x)))))).

    The norm runs on (B * T, q_features); linear1 has hidden_size outputs.
    """

    container = True

    def __init__(
        self,
        q_features: int,
        num_head: int,
        dim_head: int,
        hidden_size: int,
        *,
        dropout: float = 0.0,
        causal: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = AttentionLayer(q_features, num_head, dim_head, dropout=dropout, causal=causal, **where)
        self.dropout = Dropout(dropout)
        self.norm = LayerNorm1d(q_features, **where)
        first, second = Linear(q_features, hidden_size, **where), Linear(hidden_size, q_features, **where)
        self.feed_forward = Sequential(first, ReLU(), Dropout(dropout), second, Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(x))
        return x + self.feed_forward(on_rows(self.norm, x))


class Transformer(Module):
    """x (T, B, embedding_size), or with batch_first (B, T, embedding_size), to (out, h), both of x's shape.

    A learnt embedding of the position is added to x; T is at most sequence_len. The model keeps nothing between calls: h is
    zeros, there so that programs can treat it as a recurrent layer, and a given h is not read.
    """

    container = True

    def __init__(
        self,
        embedding_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        num_head: int = 8,
        dim_head: int = 32,
        dropout: float = 0.0,
        causal: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
        batch_first: bool = False,
        sequence_len: int = 2048,
    ) -> None:
        super().__init__()
        self.batch_first, self.sequence_len = batch_first, sequence_len
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.positional_embedding = Embedding(sequence_len, embedding_size, **where)
        sizes = (embedding_size, num_head, dim_head, hidden_size)
        self.layers = [TransformerLayer(*sizes, dropout=dropout, causal=causal, **where) for _ in range(num_layers)]

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if self.batch_first else ops.transpose(x, (0, 1))
        length = x.shape[1]
        if isinstance(length, int) and length > self.sequence_len:
            raise ValueError(f"[Transformer] sequence expects at most {self.sequence_len} steps, got {length}.")
        x = x + self.positional_embedding(ops.arange_like(x, 0, length))
        for layer in self.layers:
            x = layer(x)
        x = x if self.batch_first else ops.transpose(x, (0, 1))
        return x, ops.full_like(x, 0.0)

    def extra_repr(self) -> str:
        return f"batch_first={self.batch_first}, sequence_len={self.sequence_len}"
