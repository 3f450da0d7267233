"""Rules of recurrent layers and their cells."""

from __future__ import annotations

from torch import nn

from .tables import layers

STACK = "input_size hidden_size num_layers bias batch_first dropout bidirectional"
PROJECTED = {"proj_size": "; put a Linear behind the layer"}

layers(f"{STACK} nonlinearity", nn.RNN, refused=PROJECTED, layout="torch")
layers(STACK, nn.LSTM, nn.GRU, refused=PROJECTED, layout="torch")
layers("input_size hidden_size bias nonlinearity", nn.RNNCell, layout="torch")
layers("input_size hidden_size bias", nn.LSTMCell, nn.GRUCell, layout="torch")
