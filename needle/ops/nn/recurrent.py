"""Recurrent layers over whole sequences: the input's part of the gates comes in, the states of all steps come out."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

from needle.autograd import Op, Spec, Tensor, one_of, op, vjp
from needle.backend_ndarray import NDArray, call
from needle.ops.common import alias, gradient_of_decomposition, rows_of
from needle.ops.families import family
from needle.ops.linalg.basic import LAYOUTS, linear
from needle.ops.math.activation import relu, sigmoid, tanh
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import PartialTuple, concat, make_tuple, stack

__all__ = ["gru", "lstm", "rnn"]

Arrays = list[NDArray]


def parts_of(gates: Tensor, count: int) -> list[Tensor]:
    """(B, count * H) as `count` of (B, H)."""
    size = gates.shape[-1] // count
    return [getitem(gates, (Ellipsis, slice(i * size, (i + 1) * size))) for i in range(count)]


def rnn_step(projected: Tensor, recurred: Tensor, nonlinearity: str) -> Tensor:
    """The next state from what the input and the state add to it."""
    total = projected + recurred
    return relu(total) if nonlinearity == "relu" else tanh(total)


def lstm_step(projected: Tensor, recurred: Tensor, c: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The next h and c, and the gates i, f, g, o."""
    i, f, g, o = parts_of(projected + recurred, 4)
    i, f, g, o = sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)
    c = f * c + i * g
    return o * tanh(c), c, [i, f, g, o]


def gru_step(projected: Tensor, recurred: Tensor, h: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The next h, and r, z, n and what h added to n."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = parts_of(projected, 3), parts_of(recurred, 3)
    r, z = sigmoid(x_r + h_r), sigmoid(x_z + h_z)
    n = tanh(x_n + r * h_n)
    return n + z * (h - n), [r, z, n, h_n]


@family
class Recurrence(Op):
    """Inputs: projected (T, B, gates * H), the input's part of all gates with its bias; W_hh (H, gates * H), or its transpose
    when layout_of_weight is "torch"; the first state, `states` of (B, H); bias_hh (gates * H,) if has_bias.

    Outputs: per part of the state its values after all steps (T, B, H), then what only the gradient reads. reverse: from the
    last step to the first.
    """

    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1
    kept: ClassVar[int] = 0  # width of what is kept for the gradient, in units of H
    reverse: bool = False
    layout_of_weight: str = "needle"
    has_bias: bool = False
    checks = one_of(layout_of_weight=LAYOUTS)

    @property
    def n_in(self) -> int:
        return 2 + self.states + self.has_bias

    def split(self, inputs: Any) -> tuple[Any, Any, list[Any], Any]:
        """projected, W_hh, the parts of the first state, bias_hh or None."""
        return inputs[0], inputs[1], list(inputs[2 : 2 + self.states]), inputs[-1] if self.has_bias else None

    def infer(self, *inputs: Any) -> Any:
        projected, weight, state, bias = self.split(inputs)
        if len(projected.shape) != 3 or projected.shape[2] % self.gates:
            raise ValueError(
                f"[{self.label}] projected expects shape (T, B, {self.gates} * H), got {tuple(projected.shape)}."
            )
        steps, batch, width = projected.shape
        size = width // self.gates
        if not steps:
            raise ValueError(f"[{self.label}] expects at least one step, got shape {tuple(projected.shape)}.")
        matrix = (size, width) if self.layout_of_weight == "needle" else (width, size)
        for name, x, want in (
            ("weight", weight, matrix),
            *(("state", s, (batch, size)) for s in state),
            *([] if bias is None else [("bias", bias, (width,))]),
        ):
            if tuple(x.shape) != want:
                raise ValueError(f"[{self.label}] {name} expects shape {want}, got {tuple(x.shape)}.")
        dtype = str(projected.dtype)
        values = [Spec((steps, batch, size), dtype)] * self.states
        return (*values, Spec((steps, batch, self.kept * size), dtype)) if self.kept else values[0]

    def flops(self, out: Any, *inputs: Any) -> int:
        """Those of the recurrent products."""
        shape = inputs[0].shape
        return 2 * prod(shape) * (shape[2] // self.gates)

    def attrs(self) -> dict[str, bool]:
        """Of the kernels."""
        return {"reverse": self.reverse}

    def matrix(self, weight: NDArray) -> NDArray:
        return weight if self.layout_of_weight == "needle" else weight.permute((1, 0))

    def must_decompose(self, *inputs: Any) -> bool:
        """In float64, for which there are no kernels. A graph with free sizes keeps the op until it is called."""
        recorder = inputs[0].recorder
        return (recorder is None or recorder.static) and any(x.dtype != "float32" for x in inputs)

    def compute(self, *inputs: NDArray) -> Any:
        projected, weight, state, bias = self.split(inputs)
        specs = self.infer(*inputs)
        outs = [NDArray.empty(s.shape) for s in (specs if self.n_out > 1 else [specs])]
        dense = projected if projected.strides[2] == 1 else projected.compact()
        first = {name: x.compact() for name, x in zip(("h0", "c0"), state, strict=False)}
        bias = None if bias is None else bias.compact()
        call(self.label, outs, projected=dense, weight=self.matrix(weight), **first, bias=bias, **self.attrs())
        return tuple(outs) if self.n_out > 1 else outs[0]

    def step(self, projected: Tensor, recurred: Tensor, state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The next state and what to keep, from what the input and h add to the gates and the state before."""
        raise NotImplementedError(f"[{self.label}] defines no step.")

    def decompose(self, *inputs: Tensor) -> Any:
        projected, weight, state, bias = self.split(inputs)
        count = int(projected.shape[0])
        results: list[list[Tensor]] = [[]] * count
        for t in reversed(range(count)) if self.reverse else range(count):
            recurred = linear(state[0], weight, bias, layout=self.layout_of_weight)
            state, kept = self.step(getitem(projected, t), recurred, state)
            results[t] = [*state, concat(kept, -1)] if kept else state
        outs = [stack(parts, 0) for parts in zip(*results, strict=True)]
        return make_tuple(*outs) if self.n_out > 1 else outs[0]

    def gradient(self, out_grad: Any, node: Tensor) -> Any:
        outs = list(node) if self.n_out > 1 else [node]
        given = [out_grad] if self.n_out == 1 else [out_grad[0]]
        known = out_grad.items if isinstance(out_grad, PartialTuple) else range(self.n_out)
        if self.states > 1 and 1 in known:
            given.append(out_grad[1])
        grads = RecurrentGrad(self, len(given) > 1)(*node.inputs, *(t.detach() for t in outs), *given)
        return tuple(grads)

    def gate_gradients(self, inputs: Arrays, outs: Arrays, grads: Arrays) -> tuple[NDArray, NDArray, Arrays]:
        """Gradients of what the input adds to the gates, of what h adds (T, B, gates * H), and of the first state."""
        raise NotImplementedError(f"[{self.label}] defines no gate_gradients.")

    @classmethod
    def samples(cls) -> list:
        def shapes(steps: int, batch: int, size: int, bias: bool = False, torch: bool = False) -> list:
            width = cls.gates * size
            matrix = (width, size) if torch else (size, width)
            return [(steps, batch, width), matrix, *[(batch, size)] * cls.states, *[(width,)] * bias]

        return [
            ({}, shapes(1, 1, 1)),
            ({"has_bias": True}, shapes(4, 3, 5, True)),
            ({"reverse": True, "layout_of_weight": "torch"}, shapes(3, 2, 17, False, True)),
            ({"layout_of_weight": "torch", "has_bias": True}, shapes(2, 1, 70, True, True)),
        ]


@op
class Rnn(Recurrence):
    """h' = f(projected + h W_hh + bias_hh), f tanh or relu (Elman, 1990); see Recurrence."""

    nonlinearity: str = "tanh"
    checks = one_of(layout_of_weight=LAYOUTS, nonlinearity=("tanh", "relu"))

    def attrs(self) -> dict[str, bool]:
        return super().attrs() | {"relu": self.nonlinearity == "relu"}

    def step(self, projected: Tensor, recurred: Tensor, state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return [rnn_step(projected, recurred, self.nonlinearity)], []

    def gate_gradients(self, inputs: Arrays, outs: Arrays, grads: Arrays) -> tuple[NDArray, NDArray, Arrays]:
        dgates, dh = (NDArray.empty(inputs[i].shape) for i in (0, 2))
        weight, dy = self.matrix(inputs[1]), grads[0].compact()
        call("rnn_grad", [dgates, dh], weight=weight, h=outs[0], dh=dy, **self.attrs())
        return dgates, dgates, [dh]

    @classmethod
    def samples(cls) -> list:
        given = super().samples()
        return [*given, *(({**attributes, "nonlinearity": "relu"}, shapes) for attributes, shapes in given[1:3])]


@op
class Lstm(Recurrence):
    """Gates i, f, g, o: c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c') (Hochreiter and Schmidhuber, 1997);
    see Recurrence."""

    gates, states, kept, n_out = 4, 2, 4, 3

    def step(self, projected: Tensor, recurred: Tensor, state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        h, c, kept = lstm_step(projected, recurred, state[1])
        return [h, c], kept

    def gate_gradients(self, inputs: Arrays, outs: Arrays, grads: Arrays) -> tuple[NDArray, NDArray, Arrays]:
        dgates, dh, dc = (NDArray.empty(inputs[i].shape) for i in (0, 2, 3))
        known = {"weight": self.matrix(inputs[1]), "c0": inputs[3].compact(), "c": outs[1], "gates": outs[2]}
        given = {name: g.compact() for name, g in zip(("dh", "dc"), grads, strict=False)}
        call("lstm_grad", [dgates, dh, dc], **known, **given, **self.attrs())
        return dgates, dgates, [dh, dc]


@op
class Gru(Recurrence):
    """Gates r, z, n: n = tanh(x_n + sigmoid(r) h_n), h' = n + sigmoid(z) (h - n) (Cho et al., 2014, with torch's place for
    the reset gate); see Recurrence."""

    gates, kept, n_out = 3, 4, 2

    def step(self, projected: Tensor, recurred: Tensor, state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        h, kept = gru_step(projected, recurred, state[0])
        return [h], kept

    def gate_gradients(self, inputs: Arrays, outs: Arrays, grads: Arrays) -> tuple[NDArray, NDArray, Arrays]:
        recurred, projected, dh = (NDArray.empty(inputs[i].shape) for i in (0, 0, 2))
        known = {"weight": self.matrix(inputs[1]), "h0": inputs[2].compact(), "h": outs[0], "kept": outs[1]}
        call("gru_grad", [recurred, projected, dh], **known, dh=grads[0].compact(), **self.attrs())
        return projected, recurred, [dh]


@op
class RecurrentGrad(Op):
    """Gradients of the inputs of a Recurrence `of`, from them, its outputs, and the gradient of h and (has_dc) of c."""

    of: Any
    has_dc: bool = False

    n_out = property(lambda self: self.of.n_in)  # type: ignore[assignment]

    def infer(self, *inputs: Any) -> Any:
        return tuple(Spec(tuple(x.shape), str(x.dtype)) for x in inputs[: self.of.n_in])

    def split(self, inputs: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """The inputs of `of`, its outputs, the gradients of them."""
        first, last = self.of.n_in, len(inputs) - 1 - self.has_dc
        return list(inputs[:first]), list(inputs[first:last]), list(inputs[last:])

    def compute(self, *arrays: NDArray) -> Any:
        inputs, outs, grads = self.split(arrays)
        dprojected, dgates, dstate = self.of.gate_gradients(inputs, outs, grads)
        # One product over all steps: the states before them times the gradients of the gates.
        before = NDArray.empty(outs[0].shape)
        ahead, back, first = (slice(1, None), slice(None, -1), 0)
        if self.of.reverse:
            ahead, back, first = back, ahead, before.shape[0] - 1
        before[first] = inputs[2]
        if before.shape[0] > 1:
            before[ahead] = outs[0][back]
        rows, gates = map(rows_of, (before, dgates))
        a, b = (rows, gates) if self.of.layout_of_weight == "needle" else (gates, rows)
        dbias = [gates.sum(0)] if self.of.has_bias else []
        return (dprojected, a.permute((1, 0)) @ b, *dstate, *dbias)

    def decompose(self, *inputs: Tensor) -> Any:
        given, _, grads = self.split(inputs)
        given = [leaf(t) for t in given]
        out = self.of.decompose(*given)
        if type(out) is tuple:  # of a graph
            return vjp(out[: len(grads)], tuple(grads), given)
        seed = grads[0] if self.of.n_out == 1 else PartialTuple(out, dict(enumerate(grads)))
        return make_tuple(*vjp(out, seed, given))

    gradient = gradient_of_decomposition  # differentiates the steps twice


def leaf(t: Tensor) -> Tensor:
    """The same values as a node of its own that requires a gradient."""
    made = alias(t) if t.requires_grad or t.recorder is not None else Tensor.make_const(t)
    made.requires_grad = True
    return made


def recurrence(cls: type[Any], inputs: Any, bias_hh: Tensor | None, reverse: bool, layout: str, *extra: Any) -> Any:
    return cls(reverse, layout, bias_hh is not None, *extra)(*inputs, *([] if bias_hh is None else [bias_hh]))


def rnn(
    projected: Tensor,
    weight: Tensor,
    h0: Tensor,
    bias_hh: Tensor | None = None,
    reverse: bool = False,
    layout: str = "needle",
    nonlinearity: str = "tanh",
) -> Tensor:
    """States (T, B, H) of an Elman network from projected (T, B, H), the input's part of them; see Rnn."""
    return recurrence(Rnn, (projected, weight, h0), bias_hh, reverse, layout, nonlinearity)


def lstm(
    projected: Tensor,
    weight: Tensor,
    h0: Tensor,
    c0: Tensor,
    bias_hh: Tensor | None = None,
    reverse: bool = False,
    layout: str = "needle",
) -> tuple[Tensor, Tensor]:
    """h and c of all steps (T, B, H) from projected (T, B, 4 H), the input's part of the gates; see Lstm."""
    h, c, _ = recurrence(Lstm, (projected, weight, h0, c0), bias_hh, reverse, layout)
    return h, c


def gru(
    projected: Tensor,
    weight: Tensor,
    h0: Tensor,
    bias_hh: Tensor | None = None,
    reverse: bool = False,
    layout: str = "needle",
) -> Tensor:
    """States (T, B, H) of gated recurrent units from projected (T, B, 3 H), the input's part of the gates; see Gru."""
    h, _ = recurrence(Gru, (projected, weight, h0), bias_hh, reverse, layout)
    return h
