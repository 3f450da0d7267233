"""Recurrent layers: RNN, LSTM, GRU and their cells. Sequences are (T, B, features); a state is (B, hidden) per layer.

layout "needle": cells with W_ih (in, gates * hidden), W_hh (hidden, gates * hidden), biases (gates * hidden,); layout "torch":
torch's names and shapes, weight_ih (gates * hidden, in), in a layer with the suffix _l0, _l0_reverse, _l1, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.ops.nn.recurrent import gru_step, lstm_step, rnn_step

from .arguments import integer
from .basic import Dropout
from .module import Module, Parameter

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]

NAMES = {
    "needle": ("W_ih", "W_hh", "bias_ih", "bias_hh"),
    "torch": ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
}
PROJECTION = "weight_hr"  # of torch's layout, which alone has it


class Weights(NamedTuple):
    """What one cell multiplies by and adds; biases may be None, and hr is None unless h is a projection."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None


def draw_weights(
    owner: Any, suffix: str, input_size: int, width: int, bias: bool, device: Device | None, dtype: str, proj: int = 0
) -> None:
    """Gives `owner` the parameters of one cell with `width` = gates * hidden."""
    bound = math.sqrt(1 / owner.hidden_size)
    matrices: list[tuple[int, ...]] = [(input_size, width), (proj or owner.hidden_size, width)]
    if owner.layout == "torch":
        matrices = [m[::-1] for m in matrices]
    names, shapes = [*NAMES[owner.layout]], [*matrices, (width,), (width,)]
    if proj:
        names, shapes = [*names, PROJECTION], [*shapes, (proj, owner.hidden_size)]
    for name, shape in zip(names, shapes, strict=True):
        value = None
        if bias or len(shape) == 2:
            drawn = init.rand(*shape, low=-bound, high=bound, device=device, dtype=dtype)
            value = Parameter(drawn, device=device, dtype=dtype)
        setattr(owner, name + suffix, value)


def weights_of(owner: Any, suffix: str = "") -> Weights:
    ih, hh, bias_ih, bias_hh = (getattr(owner, name + suffix) for name in NAMES[owner.layout])
    return Weights(ih, hh, bias_ih, bias_hh, getattr(owner, PROJECTION + suffix, None))


def known_shape(x: Any) -> tuple[int, ...] | None:
    """The shape, also a symbol's, where it is known."""
    spec = x if x.recorder is None else x.spec
    return None if spec is None else tuple(spec.shape)


class Cell(Module):
    """One time step."""

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
        layout: str = "needle",
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.layout = layout
        draw_weights(self, "", input_size, self.gates * hidden_size, bias, device, dtype)

    def step(self, projected: Tensor, recurred: Tensor, state: list[Tensor]) -> Any:
        """The next state, from what the input and h add to the gates and the state before."""
        raise NotImplementedError(f"[{type(self).__name__}] defines no step.")

    def forward(self, x: Tensor, h: Any = None, hx: Any = None) -> Any:
        """hx: torch's name of h."""
        w, h, shape = weights_of(self), hx if h is None else h, known_shape(x)
        if shape is not None and len(shape) != 2:
            raise ValueError(f"[{type(self).__name__}] x expects shape (B, {self.input_size}), got {shape}.")
        state = zero_state(x, x.shape[0], self.hidden_size, w.hh.dtype, self.states) if h is None else as_parts(h)
        projected = ops.linear(x, w.ih, w.bias_ih, layout=self.layout)
        return self.step(projected, ops.linear(state[0], w.hh, w.bias_hh, layout=self.layout), state)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={weights_of(self).bias_ih is not None}"


def zero_state(x: Tensor, batch: Any, size: int, dtype: str, count: int) -> list[Tensor]:
    """The state before the first step; it takes part like any other, so that W_hh has a gradient after one step, too."""
    return [ops.full_like(x, 0.0, (batch, size), dtype) for _ in range(count)]


def as_parts(state: Any) -> list[Tensor]:
    return list(state) if isinstance(state, tuple | list) else [state]


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
        layout: str = "needle",
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype, layout)
        self.nonlinearity = nonlinearity

    def step(self, projected: Tensor, recurred: Tensor, state: list[Tensor]) -> Tensor:
        return rnn_step(projected, recurred, self.nonlinearity)


class LSTMCell(Cell):
    """x (B, in), state (h, c) or None to (h', c'), each (B, hidden) (Hochreiter and Schmidhuber, 1997).

    Gates i, f, g, o in this order: c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c').
    """

    gates, states = 4, 2

    def step(self, projected: Tensor, recurred: Tensor, state: list[Tensor]) -> tuple[Tensor, Tensor]:
        return lstm_step(projected, recurred, state[1])[:2]


class GRUCell(Cell):
    """x (B, in), h (B, hidden) or None to (B, hidden) (Cho et al., 2014, with torch's place for the reset gate).

    Gates r, z, n in this order: n = tanh(x_n + sigmoid(r) h_n), where x_n and h_n are what x and h add to gate n;
    h' = (1 - sigmoid(z)) n + sigmoid(z) h.
    """

    gates = 3

    def step(self, projected: Tensor, recurred: Tensor, state: list[Tensor]) -> Tensor:
        return gru_step(projected, recurred, state[0])[0]


class Steps:
    """The steps that rows of a sequence (T, B, ...) have."""

    def __init__(self, x: Tensor, lengths: Tensor) -> None:
        shape, given = known_shape(lengths), known_shape(x)
        if shape is not None and (len(shape) != 1 or "int" not in str(lengths.dtype)):
            raise ValueError(f"[recurrent] lengths expects whole numbers of shape (B,), got {lengths.dtype} {shape}.")
        if shape is not None and given is not None and shape != given[1:2]:
            raise ValueError(f"[recurrent] lengths expects shape {given[1:2]}, got {shape}.")
        if lengths.recorder is None and x.recorder is None:
            numbers = lengths.numpy()
            if numbers.size and (numbers.min() < 1 or numbers.max() > given[0]):  # type: ignore[index]
                raise ValueError(f"[recurrent] lengths expects numbers from 1 to {given[0]}, got {numbers.tolist()}.")  # type: ignore[index]
        lengths = ops.reshape(ops.cast(lengths, "int64"), (1, -1, 1))
        step = ops.reshape(ops.arange_like(x, 0, x.shape[0]), (-1, 1, 1))
        self.there = step < lengths
        self.ends = lengths - 1
        self.order = ops.where(self.there, self.ends - step, step)

    def masked(self, x: Tensor, value: float) -> Tensor:
        return ops.where(self.there, x, value)

    def turned(self, x: Tensor) -> Tensor:
        """Each row's steps in reverse."""
        return ops.take_along(x, self.order, 0)

    def last(self, x: Tensor) -> Tensor:
        """Each row's last step (B, ...)."""
        return ops.take_along(x, self.ends, 0)[0]


def run_layers(
    x: Tensor,
    states: list[list[Tensor]],
    weights: list[Weights],
    sequence: Callable,
    both: bool,
    layout: str = "torch",
    drop: Callable | None = None,
    rows: Steps | None = None,
    padding: float = 0.0,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (T, B, ...) of layers of cells, and each part of all their last states: x (T, B, in), `states` and `weights` of
    each cell, two to a layer where `both` directions run, and `drop` between layers; see Recurrent.sequence and Recurrent."""
    finals, directions = [], 1 + both
    for i in range(0, len(weights), directions):
        outputs = []
        for k in range(i, i + directions):
            w = weights[k]
            projected = ops.linear(x, w.ih, w.bias_ih, layout=layout)
            if rows is None:
                results = sequence(projected, w, states[k], k > i)
                outputs.append(results[0])
                finals.append([part[0 if k > i else -1] for part in results])
            else:  # backwards, each row starts at its own last step
                projected = rows.turned(projected) if k > i else projected
                projected = rows.masked(projected, padding) if padding else projected
                results = sequence(projected, w, states[k], False)
                finals.append([rows.last(part) for part in results])
                y = rows.turned(results[0]) if k > i else results[0]
                outputs.append(rows.masked(y, 0.0))
        x = outputs[0] if directions == 1 else ops.concat(outputs, -1)
        if drop is not None and i + directions < len(weights):
            x = drop(x)
    return x, tuple(ops.stack(parts, 0) for parts in zip(*finals, strict=True))


def lstm_sequence(projected: Tensor, w: Weights, state: list[Tensor], reverse: bool, layout: str) -> tuple[Tensor, ...]:
    """h and c of all steps. With w.hr (torch's layout), h' = W_hr (sigmoid(o) tanh(c')) (Sak et al., 2014, arXiv 1402.1128)."""
    h, c = state
    if w.hr is None:
        return ops.lstm(projected, w.hh, h, c, w.bias_hh, reverse, layout)
    # Both matrices are one between steps; the first h, which need not be a projection, goes to the gates of the first step.
    step = ops.reshape(ops.arange_like(projected, 0, projected.shape[0]), (-1, 1, 1))
    first = ops.eq(step, projected.shape[0] - 1 if reverse else 0)
    projected = ops.where(first, projected + ops.linear(h, w.hh, None, layout=layout), projected)
    y, c = ops.lstm(projected, w.hh @ w.hr, ops.full_like(c, 0.0), c, w.bias_hh, reverse, layout)
    return ops.linear(y, w.hr, None, layout=layout), c


class Recurrent(Module):
    """Layers of cells over time: x (T, B, in), state or None to (T, B, hidden) and the last state of every layer.

    A state is (num_layers, B, hidden), or for an LSTM the tuple (h, c) of two of them. batch_first: x and the output are
    (B, T, ...). bidirectional: every layer also runs backwards, outputs are (T, B, 2 * hidden), states have both directions
    of a layer after each other (Schuster and Paliwal, 1997). dropout: on what each layer but the last gives, in training.
    lengths: a row's steps from its length on do not count: its state is that of its last step, from which it also runs
    backwards, and the output is 0 there (torch's packed sequences).
    """

    container = True
    cell: ClassVar[type[Cell]]
    cells_name: ClassVar[str]
    padding: ClassVar[float] = 0.0  # what is added to the gates, if anything, in steps that a row has not
    arguments = {"num_layers": integer(1)}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        layout: str = "needle",
        proj_size: int = 0,
    ) -> None:
        super().__init__()
        if proj_size and (layout != "torch" or self.cell is not LSTMCell):
            raise ValueError(f'[{type(self).__name__}] proj_size expects an LSTM of layout="torch", got {proj_size}.')
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.bidirectional = batch_first, bidirectional
        self.layout, self.proj_size = layout, proj_size
        wide = (proj_size or hidden_size) * (1 + bidirectional)
        sizes = [input_size if k == 0 else wide for k in range(num_layers) for _ in range(1 + bidirectional)]
        if layout == "torch":
            for suffix, size in zip(self.suffixes, sizes, strict=True):
                draw_weights(self, suffix, size, self.cell.gates * hidden_size, bias, device, dtype, proj_size)
        else:
            setattr(self, self.cells_name, [self.make_cell(n, bias, device, dtype) for n in sizes])
        self.dropout = Dropout(dropout) if dropout else None

    def make_cell(self, input_size: int, bias: bool, device: Device | None, dtype: str) -> Cell:
        return self.cell(input_size, self.hidden_size, bias, device=device, dtype=dtype)

    @property
    def suffixes(self) -> list[str]:
        """Of the names of torch's parameters, per layer and direction."""
        return [f"_l{k}{end}" for k in range(self.num_layers) for end in ("", "_reverse")[: 1 + self.bidirectional]]

    @property
    def cells(self) -> list[Any]:
        """Per layer and direction, in needle's layout."""
        return getattr(self, self.cells_name)

    def weights(self) -> list[Weights]:
        """Per layer and direction."""
        if self.layout == "torch":
            return [weights_of(self, suffix) for suffix in self.suffixes]
        return [weights_of(cell) for cell in self.cells]

    def sequence(self, projected: Tensor, w: Weights, state: list[Tensor], reverse: bool) -> tuple[Tensor, ...]:
        """The parts of the state after all steps, each (T, B, hidden), from `projected`, the input's part of the gates."""
        raise NotImplementedError(f"[{type(self).__name__}] defines no sequence.")

    def forward(self, x: Tensor, h0: Any = None, hx: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """hx: torch's name of h0. lengths (B,): whole numbers from 1 to T, of the steps that each row has; see Recurrent."""
        h0 = None if h0 is None and hx is None else as_parts(hx if h0 is None else h0)
        self._check(x, h0)
        x = ops.permute(x, (1, 0, 2)) if self.batch_first else x
        rows = None if lengths is None else Steps(x, lengths)
        x = x if rows is None else rows.masked(x, 0.0)
        weights, count = self.weights(), self.cell.states
        states = (
            [self.zeros(x, w) for w in weights]
            if h0 is None
            else [[part[k] for part in h0] for k in range(len(weights))]
        )
        how = self.bidirectional, self.layout, self.dropout, rows, self.padding
        x, last = run_layers(x, states, weights, self.sequence, *how)
        return ops.permute(x, (1, 0, 2)) if self.batch_first else x, last if count > 1 else last[0]

    def _check(self, x: Tensor, h0: list[Tensor] | None) -> None:
        """Raises for shapes that do not fit, as far as they are known."""
        label, count, shape = type(self).__name__, self.cell.states, known_shape(x)
        if h0 is not None and len(h0) != count:
            raise ValueError(f"[{label}] state expects {count} of them, got {len(h0)}.")
        if shape is None:
            return
        steps, batch = (1, 0) if self.batch_first else (0, 1)
        order = "(B, T, " if self.batch_first else "(T, B, "
        if len(shape) != 3 or shape[2] != self.input_size:
            raise ValueError(f"[{label}] x expects shape {order}{self.input_size}), got {shape}.")
        if shape[steps] == 0:
            raise ValueError(f"[{label}] x expects at least one step, got shape {shape}.")
        known = [known_shape(p) for p in h0 or ()]
        want = [(self.num_layers * (1 + self.bidirectional), shape[batch], n) for n in self.state_sizes]
        if any(s is not None and s != w for s, w in zip(known, want, strict=False)):
            text = " and ".join(dict.fromkeys(map(str, want)))
            raise ValueError(f"[{label}] state expects {count} of shape {text}, got {', '.join(map(str, known))}.")

    @property
    def state_sizes(self) -> list[int]:
        """Of the parts of a state."""
        return [self.hidden_size] * self.cell.states

    def zeros(self, x: Tensor, w: Weights) -> list[Tensor]:
        return [part for n in self.state_sizes for part in zero_state(x, x.shape[1], n, w.hh.dtype, 1)]

    def extra_repr(self) -> str:
        options = [f"{n}=True" for n in ("batch_first", "bidirectional") if getattr(self, n)]
        return ", ".join([f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}", *options])


class RNN(Recurrent):
    """Elman network, cells in `rnn_cells`; see Recurrent and RNNCell."""

    cells_name, cell = "rnn_cells", RNNCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Device | None = None,
        dtype: str = "float32",
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        layout: str = "needle",
    ) -> None:
        self.nonlinearity = nonlinearity
        options = (device, dtype, batch_first, dropout, bidirectional, layout)
        super().__init__(input_size, hidden_size, num_layers, bias, *options)

    def make_cell(self, input_size: int, bias: bool, device: Device | None, dtype: str) -> Cell:
        return RNNCell(input_size, self.hidden_size, bias, self.nonlinearity, device, dtype)

    @property
    def padding(self) -> float:  # type: ignore[override]
        """With relu, states would grow on without an input."""
        return -1e30 if self.nonlinearity == "relu" else 0.0

    def sequence(self, projected: Tensor, w: Weights, state: list[Tensor], reverse: bool) -> tuple[Tensor, ...]:
        return (ops.rnn(projected, w.hh, state[0], w.bias_hh, reverse, self.layout, self.nonlinearity),)


class LSTM(Recurrent):
    """Long short-term memory, cells in `lstm_cells`, states (h, c); see Recurrent and LSTMCell.

    proj_size, in torch's layout: h has as many numbers, a product of the cell's own with weight_hr (proj_size, hidden).
    """

    cells_name, cell = "lstm_cells", LSTMCell

    @property
    def state_sizes(self) -> list[int]:
        return [self.proj_size or self.hidden_size, self.hidden_size]

    def sequence(self, projected: Tensor, w: Weights, state: list[Tensor], reverse: bool) -> tuple[Tensor, ...]:
        return lstm_sequence(projected, w, state, reverse, self.layout)


class GRU(Recurrent):
    """Gated recurrent units, cells in `gru_cells`; see Recurrent and GRUCell."""

    cells_name, cell = "gru_cells", GRUCell

    def sequence(self, projected: Tensor, w: Weights, state: list[Tensor], reverse: bool) -> tuple[Tensor, ...]:
        return (ops.gru(projected, w.hh, state[0], w.bias_hh, reverse, self.layout),)
