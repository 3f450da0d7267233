"""Attention as layers, with torch's arguments and parameter names."""

from __future__ import annotations

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .arguments import check_divides
from .basic import Dropout, Linear
from .function import Declared
from .module import Module, Parameter

__all__ = ["MultiheadAttention", "ScaledDotProductAttention"]


class ScaledDotProductAttention(Declared):
    """See ops.scaled_dot_product_attention; dropout follows train() and eval()."""

    mode_dependent = True

    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False  # whether neighbouring heads of q share one of k and v; see ops.grouped_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        attention = ops.grouped_attention if self.grouped else ops.scaled_dot_product_attention
        return attention(q, k, v, mask, self.causal, self.scale, dropout=self.dropout, training=self.training)


class MultiheadAttention(Module):
    """torch's multi-head attention: projections of query, key and value, attention per head, output projection.

    query (L, N, E) or with batch_first (N, L, E), or (L, E); returns (output, weights), weights (N, L, S) or None.
    Boolean masks are True where attention is not allowed. Parameters as torch's: in_proj_weight (3 E, E), or q/k/v_proj_weight
    when kdim or vdim differ from E.
    """

    container = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        check_divides("MultiheadAttention", "embed_dim", "num_heads", num_heads, embed_dim)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.add_zero_attn = add_zero_attn

        def weight(*shape: int) -> Parameter:
            return Parameter(init.xavier_uniform(shape[1], shape[0], shape=shape), device=device, dtype=dtype)

        kdim, vdim = kdim or embed_dim, vdim or embed_dim
        self.in_proj_weight: Tensor | None = None
        if kdim == vdim == embed_dim:
            self.in_proj_weight = weight(3 * embed_dim, embed_dim)
        else:
            self.q_proj_weight = weight(embed_dim, embed_dim)
            self.k_proj_weight, self.v_proj_weight = weight(embed_dim, kdim), weight(embed_dim, vdim)
        self.in_proj_bias: Tensor | None = None
        if bias:
            self.in_proj_bias = Parameter(init.zeros(3 * embed_dim), device=device, dtype=dtype)
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype, layout="torch")
        self.bias_k: Tensor | None = None
        self.bias_v: Tensor | None = None
        if add_bias_kv:
            self.bias_k, self.bias_v = weight(1, 1, embed_dim), weight(1, 1, embed_dim)
        self.attention = ScaledDotProductAttention(dropout)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # a hint of torch's: the mask that must come with it says the same
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ValueError("[MultiheadAttention] is_causal expects attn_mask beside it, got None.")
        q, k, v = self._heads(query, key, value)
        mask = self._mask(attn_mask, key_padding_mask)
        weights = None
        if need_weights:
            scores = ops.matmul(q * (self.embed_dim // self.num_heads) ** -0.5, ops.transpose(k))
            weights = self.dropout(ops.softmax(scores if mask is None else scores + mask))
            attended = ops.matmul(weights, v)
            weights = ops.mean(weights, -3) if average_attn_weights else weights
        else:
            attended = self.attention(q, k, v) if mask is None else self.attention(q, k, v, mask)
        return self.out_proj(ops.merge_heads(attended, not self.batch_first)), weights

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v as (N, heads, L, D)."""
        e = self.embed_dim
        thirds = [slice(0, e), slice(e, 2 * e), slice(2 * e, None)]
        if query is key and key is value and self.in_proj_weight is not None:
            together = ops.linear(query, self.in_proj_weight, self.in_proj_bias)
            projected = [together[..., part] for part in thirds]
        else:
            whole, bias = self._own(query, self.in_proj_weight), self._own(query, self.in_proj_bias)
            weights = (
                [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
                if whole is None
                else [whole[part] for part in thirds]
            )
            biases = [None if bias is None else bias[part] for part in thirds]
            projected = [ops.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
        q, k, v = (ops.split_heads(x, self.num_heads, not self.batch_first) for x in projected)
        # One more key and value for all queries: a parameter, zeros, or both. 0 * the first row gives it the batch's shape.
        for extra_k, extra_v in [(self.bias_k, self.bias_v)] * (self.bias_k is not None) + [
            (None, None)
        ] * self.add_zero_attn:
            k, v = (self._with_row(x, row) for x, row in ((k, extra_k), (v, extra_v)))
        return [q, k, v]

    @staticmethod
    def _own(x: Tensor, parameter: Tensor | None) -> Tensor | None:
        """A parameter; its symbol where x is one, so that what is computed from it is recorded and not frozen."""
        return parameter if parameter is None or x.recorder is None else x.recorder.param(parameter)

    def _with_row(self, x: Tensor, row: Tensor | None) -> Tensor:
        zeros = x[..., :1, :] * 0.0
        return ops.concat(
            [x, zeros if row is None else zeros + ops.reshape(self._own(x, row), (self.num_heads, 1, -1))], -2
        )

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
        """Both masks as one that is added to the scores."""
        masks = []
        if attn_mask is not None:
            masks.append(ops.attention_bias(attn_mask, self.num_heads))
        if key_padding_mask is not None:
            masks.append(ops.attention_bias(key_padding_mask, self.num_heads, padding=True))
        if not masks:
            return None
        mask = masks[0] if len(masks) == 1 else masks[0] + masks[1]
        rows = (self.bias_k is not None) + self.add_zero_attn
        return ops.pad(mask, (0, rows)) if rows else mask

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"
