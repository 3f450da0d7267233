"""Rules of recurrent layers and their cells."""

from __future__ import annotations

from typing import Any

from torch import nn

from needle import nn as needle_nn
from torch2needle.registry import rule
from torch2needle.rules.layers import require


def layer_arguments(m: nn.RNNBase) -> dict[str, Any]:
    require(m.proj_size == 0, f"proj_size={m.proj_size} is not supported; put a Linear behind the layer")
    return {
        "input_size": m.input_size,
        "hidden_size": m.hidden_size,
        "num_layers": m.num_layers,
        "bias": m.bias,
        "batch_first": m.batch_first,
        "dropout": m.dropout,
        "bidirectional": m.bidirectional,
        "layout": "torch",
    }


@rule(nn.RNN)
def rnn(m: nn.RNN) -> Any:
    return needle_nn.RNN(nonlinearity=m.nonlinearity, **layer_arguments(m))


@rule(nn.LSTM)
def lstm(m: nn.LSTM) -> Any:
    return needle_nn.LSTM(**layer_arguments(m))


@rule(nn.GRU)
def gru(m: nn.GRU) -> Any:
    return needle_nn.GRU(**layer_arguments(m))


@rule(nn.RNNCell)
def rnn_cell(m: nn.RNNCell) -> Any:
    return needle_nn.RNNCell(m.input_size, m.hidden_size, m.bias, m.nonlinearity, layout="torch")


@rule(nn.LSTMCell)
def lstm_cell(m: nn.LSTMCell) -> Any:
    return needle_nn.LSTMCell(m.input_size, m.hidden_size, m.bias, layout="torch")


@rule(nn.GRUCell)
def gru_cell(m: nn.GRUCell) -> Any:
    return needle_nn.GRUCell(m.input_size, m.hidden_size, m.bias, layout="torch")
