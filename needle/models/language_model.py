"""Words to scores of the next word."""

from __future__ import annotations

from typing import Any

from needle import nn, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device


class LanguageModel(nn.Module):
    """Word numbers (T, B), of any dtype, to (scores (T * B, output_size), state).

    Embedding, then `seq_model` ("rnn", "lstm", or "transformer" for at most seq_len words), then a linear layer. The state is
    that of nn.RNN, nn.LSTM or nn.Transformer; a transformer gives vectors of embedding_size, hidden_size is that of its layers.
    """

    def __init__(
        self,
        embedding_size: int,
        output_size: int,
        hidden_size: int,
        num_layers: int = 1,
        seq_model: str = "rnn",
        seq_len: int = 40,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        if seq_model not in ("rnn", "lstm", "transformer"):
            raise ValueError(f"[LanguageModel] seq_model expects rnn, lstm or transformer, got {seq_model}.")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(output_size, embedding_size, **where)
        self.sequence: nn.Module
        if seq_model == "transformer":
            self.sequence = nn.Transformer(embedding_size, hidden_size, num_layers, sequence_len=seq_len, **where)
        else:
            layer = nn.RNN if seq_model == "rnn" else nn.LSTM
            self.sequence = layer(embedding_size, hidden_size, num_layers, **where)
        self.linear = nn.Linear(embedding_size if seq_model == "transformer" else hidden_size, output_size, **where)

    def forward(self, x: Tensor, h: Any = None) -> tuple[Tensor, Any]:
        out, h = self.sequence(self.embedding(x), h)
        return self.linear(ops.flatten(out, 0, 1)), h
