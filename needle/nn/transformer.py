"""torch's transformer layers (Vaswani et al., 2017), with its arguments and parameter names."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from needle import ops
from needle.autograd import Tensor

from .attention import MultiheadAttention
from .basic import Dropout, Linear
from .module import Module
from .norm import LayerNorm

__all__ = [
    "EncoderDecoder",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]

ACTIVATIONS = {"relu": ops.relu, "gelu": ops.gelu}


class FeedForward(Module):
    """What encoder and decoder layers share: the two linear layers, dropout and norms. `activation`: "relu" or "gelu"."""

    container = True
    decodes: ClassVar[bool] = False  # has attention over another sequence, too

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.activation: Any = ACTIVATIONS[activation]  # or a layer that a converted model has
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first)
        self.linear1 = Linear(d_model, dim_feedforward, bias, layout="torch")
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, layout="torch")
        self.norm1, self.norm2 = (LayerNorm(d_model, layer_norm_eps, bias=bias) for _ in range(2))
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        if self.decodes:
            self.multihead_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first)
            self.norm3 = LayerNorm(d_model, layer_norm_eps, bias=bias)
            self.dropout3 = Dropout(dropout)

    def attend(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        attended, _ = self.self_attn(x, x, x, key_padding_mask=padding, need_weights=False, attn_mask=mask)
        return self.dropout1(attended)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class TransformerEncoderLayer(FeedForward):
    """Self-attention and feed-forward, each with a residual and a layer norm after it, or before it with norm_first.

    src (S, N, E), or with batch_first (N, S, E), to the same shape.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        x = src
        if self.norm_first:
            x = x + self.attend(self.norm1(x), src_mask, src_key_padding_mask)
            return x + self.dropout2(self.feed_forward(self.norm2(x)))
        x = self.norm1(x + self.attend(x, src_mask, src_key_padding_mask))
        return self.norm2(x + self.dropout2(self.feed_forward(x)))


class TransformerDecoderLayer(FeedForward):
    """Self-attention, attention over `memory`, feed-forward.

    tgt (T, N, E) and memory (S, N, E), or with batch_first (N, T, E) and (N, S, E), to tgt's shape.
    """

    decodes = True

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        def look(x: Tensor) -> Tensor:
            masks = {"key_padding_mask": memory_key_padding_mask, "attn_mask": memory_mask}
            attended, _ = self.multihead_attn(x, memory, memory, need_weights=False, **masks)
            return self.dropout2(attended)

        x = tgt
        if self.norm_first:
            x = x + self.attend(self.norm1(x), tgt_mask, tgt_key_padding_mask)
            x = x + look(self.norm2(x))
            return x + self.dropout3(self.feed_forward(self.norm3(x)))
        x = self.norm1(x + self.attend(x, tgt_mask, tgt_key_padding_mask))
        x = self.norm2(x + look(x))
        return self.norm3(x + self.dropout3(self.feed_forward(x)))


class Stack(Module):
    """Copies of one layer one after another, and a norm at the end if there is one."""

    container = True

    def __init__(self, layer: Module | None = None, num_layers: int = 0, norm: Module | None = None) -> None:
        super().__init__()
        self.layers: Any = [copy.deepcopy(layer) for _ in range(num_layers)]
        self.norm = norm

    def run(self, x: Tensor, *args: Any) -> Tensor:
        # A converted model hangs its own tree of layers here.
        layers = self.layers if isinstance(self.layers, list) else [m for _, m in self.layers.named_children()]
        for layer in layers:
            x = layer(x, *args)
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(Stack):
    """`num_layers` copies of an encoder layer, whose shapes it has."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        return self.run(src, mask, src_key_padding_mask)


class TransformerDecoder(Stack):
    """`num_layers` copies of a decoder layer, whose shapes it has."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        return self.run(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)


class EncoderDecoder(Module):
    """torch's nn.Transformer: an encoder of `src`, and a decoder of `tgt` that looks at what the encoder gives.

    src (S, N, E) and tgt (T, N, E), or with batch_first (N, S, E) and (N, T, E), to tgt's shape.
    """

    container = True

    def __init__(self, encoder: Module | None = None, decoder: Module | None = None) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        if self.encoder is None or self.decoder is None:
            raise ValueError("[EncoderDecoder] expects an encoder and a decoder, got None.")
        memory = self.encoder(src, src_mask, src_key_padding_mask)
        return self.decoder(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
