"""Recurrent layers: RNN, LSTM, GRU and their cells. Sequences are (T, B, features); a state is (B, hidden) per layer.

Weights W_ih (in, gates * hidden), W_hh (hidden, gates * hidden), biases (gates * hidden,): torch's, transposed.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from needle import init, ops
from needle.autograd import Deferred, Tensor, Unsupported
from needle.backend_ndarray import Device

from .module import Module, Parameter

NONLINEARITIES = {"tanh": ops.tanh, "relu": ops.relu}


def unstack(x: Tensor) -> Any:
    """The slices of x along its first axis."""
    return ops.split(x, 0) if x.shape[0] > 1 else (x[0],)


class Cell(Module):
    """One time step. `project` is the part of a step that needs no state, so a layer does it for all steps at once."""

    container = True
    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1  # tensors that make up a state; more than one are a tuple

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        bound = math.sqrt(1 / hidden_size)

        def draw(*shape: int) -> Parameter:
            drawn = init.rand(*shape, low=-bound, high=bound, device=device, dtype=dtype)
            return Parameter(drawn, device=device, dtype=dtype)

        width = self.gates * hidden_size
        self.W_ih, self.W_hh = draw(input_size, width), draw(hidden_size, width)
        self.bias_ih: Tensor | None = draw(width) if bias else None
        self.bias_hh: Tensor | None = draw(width) if bias else None

    def project(self, x: Tensor) -> Tensor:
        """x (..., input_size) to what it adds to the gates (..., gates * hidden)."""
        return ops.linear(x, self.W_ih, self.bias_ih, layout="needle")

    def recur(self, h: Tensor) -> Tensor:
        """What h (B, hidden) adds to the gates (B, gates * hidden)."""
        return ops.linear(h, self.W_hh, self.bias_hh, layout="needle")

    def split(self, gates: Tensor, count: int) -> Any:
        """(B, count * hidden) as one (B, hidden) per gate."""
        return ops.split(ops.reshape(gates, (-1, count, self.hidden_size)), 1)

    def zeros(self, x: Tensor) -> Any:
        """The state before the first step; it takes part like any other, so that W_hh has a gradient after one step, too."""
        shape = (x.shape[-2], self.hidden_size)
        zeros = tuple(ops.full_like(x, 0.0, shape, self.W_hh.dtype) for _ in range(self.states))
        return zeros if self.states > 1 else zeros[0]

    def step(self, projected: Tensor, state: Any) -> Any:
        """The next state, from `project` of the step's input and the state before."""
        raise NotImplementedError(f"[{type(self).__name__}] defines no step.")

    def forward(self, x: Tensor, h: Any = None) -> Any:
        return self.step(self.project(x), self.zeros(x) if h is None else h)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias_ih is not None}"


class RNNCell(Cell):
    """h' = f(x W_ih + bias_ih + h W_hh + bias_hh), f tanh or relu: x (B, in), h (B, hidden) or None to (B, hidden)."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        if nonlinearity not in NONLINEARITIES:
            raise ValueError(f"[RNNCell] nonlinearity expects tanh or relu, got {nonlinearity}.")
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.nonlinearity = nonlinearity

    def step(self, projected: Tensor, state: Tensor) -> Tensor:
        return NONLINEARITIES[self.nonlinearity](projected + self.recur(state))


class LSTMCell(Cell):
    """x (B, in), state (h, c) or None to (h', c'), each (B, hidden) (Hochreiter and Schmidhuber, 1997).

    Gates i, f, g, o in this order: c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c').
    """

    gates, states = 4, 2

    def step(self, projected: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = self.split(projected + self.recur(h), 4)
        c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(c), c


class GRUCell(Cell):
    """x (B, in), h (B, hidden) or None to (B, hidden) (Cho et al., 2014, with torch's place for the reset gate).

    Gates r, z, n in this order: n = tanh(x_n + sigmoid(r) h_n), where x_n and h_n are what x and h add to gate n;
    h' = (1 - sigmoid(z)) n + sigmoid(z) h.
    """

    gates = 3

    def step(self, projected: Tensor, state: Tensor) -> Tensor:
        recurred, both = self.recur(state), 2 * self.hidden_size
        r, z = self.split(ops.sigmoid(projected[:, :both] + recurred[:, :both]), 2)
        n = ops.tanh(projected[:, both:] + r * recurred[:, both:])
        return n + z * (state - n)


class Recurrent(Module):
    """Layers of cells over time: x (T, B, in), state or None to (T, B, hidden) and the last state of every layer.

    A state is (num_layers, B, hidden), or for an LSTM the tuple (h, c) of two of them.
    """

    container = True
    cells_name: ClassVar[str]

    def __init__(self, cells: list[Cell]) -> None:
        super().__init__()
        if not cells:
            raise ValueError(f"[{type(self).__name__}] num_layers expects at least 1, got 0.")
        self.input_size, self.hidden_size, self.num_layers = cells[0].input_size, cells[0].hidden_size, len(cells)
        setattr(self, self.cells_name, cells)

    @property
    def cells(self) -> list[Any]:
        return getattr(self, self.cells_name)

    def forward(self, x: Tensor, h0: Any = None) -> tuple[Tensor, Any]:
        per_layer = self._check(x, h0)
        finals = []
        for cell, state in zip(self.cells, per_layer, strict=True):
            state = cell.zeros(x) if state is None else state
            outputs = []
            for projected in unstack(cell.project(x)):
                state = cell.step(projected, state)
                outputs.append(state[0] if cell.states > 1 else state)
            x = ops.stack(outputs, 0)
            finals.append(state)
        if self.cells[0].states == 1:
            return x, ops.stack(finals, 0)
        return x, tuple(ops.stack(parts, 0) for parts in zip(*finals, strict=True))

    def _check(self, x: Tensor, h0: Any) -> list[Any]:
        """The state of each layer; raises for shapes that do not fit."""
        label, shape = type(self).__name__, x.shape
        if isinstance(shape[0], Deferred):
            raise Unsupported(f"{label} needs a known number of steps, so no graph can hold it; call or compile it")
        if x.ndim != 3 or shape[2] != self.input_size:
            raise ValueError(f"[{label}] x expects shape (T, B, {self.input_size}), got {tuple(shape)}.")
        if shape[0] == 0:
            raise ValueError(f"[{label}] x expects at least one step, got shape {tuple(shape)}.")
        if h0 is None:
            return [None] * self.num_layers
        count, want = self.cells[0].states, (self.num_layers, shape[1], self.hidden_size)
        parts = tuple(h0) if count > 1 else (h0,)
        if len(parts) != count or any(tuple(p.shape) != want for p in parts):
            raise ValueError(
                f"[{label}] state expects {count} of shape {want}, got {', '.join(str(tuple(p.shape)) for p in parts)}."
            )
        layers = zip(*(unstack(p) for p in parts), strict=True)
        return [state if count > 1 else state[0] for state in layers]

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


class RNN(Recurrent):
    """Elman network, cells in `rnn_cells`; see Recurrent and RNNCell."""

    cells_name = "rnn_cells"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        super().__init__([RNNCell(n, hidden_size, bias, nonlinearity, device, dtype) for n in sizes[:num_layers]])


class LSTM(Recurrent):
    """Long short-term memory, cells in `lstm_cells`, states (h, c); see Recurrent and LSTMCell."""

    cells_name = "lstm_cells"
    cell: ClassVar[type[Cell]] = LSTMCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        super().__init__([self.cell(n, hidden_size, bias, device, dtype) for n in sizes[:num_layers]])


class GRU(LSTM):
    """Gated recurrent units, cells in `gru_cells`; see Recurrent and GRUCell."""

    cells_name = "gru_cells"
    cell = GRUCell
