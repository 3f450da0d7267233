"""Rules of recurrent layers and their cells."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from needle import nn as needle_nn
from needle import ops
from needle.nn.recurrent import Weights, gru_step, lstm_sequence, lstm_step, rnn_step, run_layers

from .dropouts import drop
from .registry import rule
from .tables import functions, layers

STACK = "input_size hidden_size num_layers bias batch_first dropout bidirectional"

layers(f"{STACK} nonlinearity", nn.RNN, layout="torch")
layers(STACK, nn.GRU, layout="torch")
layers(f"{STACK} proj_size", nn.LSTM, layout="torch")
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


# -- whole layers, as torch calls them with their weights ------------------------------------------------------------------


def stacked(sequence: Callable) -> Callable:
    """A rule of torch's function of all layers over time: its results are the output and each part of the last state."""

    def convert(
        input: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: Any,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        cells = num_layers * (1 + bidirectional)
        given = hx if isinstance(hx, tuple | list) else [hx]
        state = [[part[k] for part in given] for k in range(cells)]
        between = partial(drop, needle_nn.Dropout, p=dropout, training=train)
        x = ops.permute(input, (1, 0, 2)) if batch_first else input
        y, last = run_layers(x, state, cells_of(params, cells, has_biases), sequence, bidirectional, "torch", between)
        return ops.permute(y, (1, 0, 2)) if batch_first else y, *last

    return convert


def cells_of(params: Any, cells: int, has_biases: bool) -> list[Weights]:
    """torch's list of all weights by cell; that of a projection is a cell's last."""
    own, bias = len(params) // cells, 2 if has_biases else 0
    each = [params[i : i + own] for i in range(0, len(params), own)]
    return [Weights(*p[:2], *(p[2:4] if bias else (None, None)), *p[2 + bias :]) for p in each]


def rnn_sequence(nonlinearity: str) -> Callable:
    return lambda projected, w, state, reverse: (
        ops.rnn(projected, w.hh, state[0], w.bias_hh, reverse, "torch", nonlinearity),
    )


def gru_sequence(projected: Any, w: Weights, state: Any, reverse: bool) -> Any:
    return (ops.gru(projected, w.hh, state[0], w.bias_hh, reverse, "torch"),)


rule(torch.ops.aten.lstm.input)(stacked(partial(lstm_sequence, layout="torch")))
rule(torch.ops.aten.gru.input)(stacked(gru_sequence))
rule(torch.ops.aten.rnn_tanh.input)(stacked(rnn_sequence("tanh")))
rule(torch.ops.aten.rnn_relu.input)(stacked(rnn_sequence("relu")))
