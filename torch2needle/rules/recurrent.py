"""Rules of recurrent layers and their cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from needle import ops
from needle.nn.recurrent import gru_step, lstm_step, rnn_step

from .registry import rule
from .tables import functions, layers

STACK = "input_size hidden_size num_layers bias batch_first dropout bidirectional"
PROJECTED = {"proj_size": "; put a Linear behind the layer"}

layers(f"{STACK} nonlinearity", nn.RNN, refused=PROJECTED, layout="torch")
layers(STACK, nn.LSTM, nn.GRU, refused=PROJECTED, layout="torch")
layers("input_size hidden_size bias nonlinearity", nn.RNNCell, layout="torch")
layers("input_size hidden_size bias", nn.LSTMCell, nn.GRUCell, layout="torch")


def gates(input: Any, h: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> tuple[Any, Any]:
    """What the input and the state add to the gates."""
    return ops.linear(input, w_ih, b_ih, "torch"), ops.linear(h, w_hh, b_hh, "torch")


@rule(torch.lstm_cell)
def lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return lstm_step(*gates(input, hx[0], w_ih, w_hh, b_ih, b_hh), hx[1])[:2]


CELL = "input, hx, w_ih, w_hh, b_ih=None, b_hh=None"
functions(CELL, {(torch.gru_cell,): lambda input, hx, *weights: gru_step(*gates(input, hx, *weights), hx)[0]})
functions(
    CELL,
    {
        (torch.rnn_tanh_cell,): lambda *given: rnn_step(*gates(*given), "tanh"),
        (torch.rnn_relu_cell,): lambda *given: rnn_step(*gates(*given), "relu"),
    },
)
