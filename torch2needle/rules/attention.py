"""Rules of attention and torch's transformer layers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops
from needle.autograd import Unsupported

from .layer_calls import Probability, call_layer
from .registry import rule
from .tables import layers


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if isinstance(dropout_p, Probability):
        mask = () if attn_mask is None else (attn_mask,)
        layer = needle_nn.ScaledDotProductAttention(dropout_p.p, is_causal, scale, enable_gqa)
        return call_layer(dropout_p, layer, query, key, value, *mask)
    if dropout_p != 0:
        raise Unsupported("dropout_p > 0 holds in evaluation, too; pass dropout_p=p if self.training else 0.0")
    attention = ops.grouped_attention if enable_gqa else ops.scaled_dot_product_attention
    return attention(query, key, value, attn_mask, is_causal, scale)


layers(
    "embed_dim num_heads dropout bias=in_proj_bias? add_bias_kv=bias_k? add_zero_attn kdim vdim batch_first",
    nn.MultiheadAttention,
)
layers("", nn.TransformerEncoder, nn.TransformerDecoder)
layers("", nn.Transformer, to=needle_nn.EncoderDecoder)


@rule(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
def transformer_layer(m: Any) -> Any:
    """An activation that is a module becomes a child like any other."""
    names = {F.relu: "relu", F.gelu: "gelu"}
    activation = "relu" if isinstance(m.activation, nn.Module) else names.get(m.activation)
    if activation is None:
        raise Unsupported(f"activation expects F.relu, F.gelu or a module, got {m.activation}")
    decodes = isinstance(m, nn.TransformerDecoderLayer)
    return (needle_nn.TransformerDecoderLayer if decodes else needle_nn.TransformerEncoderLayer)(
        d_model=m.self_attn.embed_dim,
        nhead=m.self_attn.num_heads,
        dim_feedforward=m.linear1.out_features,
        dropout=m.dropout.p,
        activation=activation,
        layer_norm_eps=m.norm1.eps,
        batch_first=m.self_attn.batch_first,
        norm_first=m.norm_first,
        bias=m.linear1.bias is not None,
    )
