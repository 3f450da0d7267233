"""RNN, LSTM, GRU and their cells: torch's results with transposed weights, needle's names, shapes and order of draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from gpu_devices import everywhere, need_executor
from needle import nn
from needle.autograd import Tensor

pytestmark = everywhere
KINDS = {"rnn": (nn.RNN, torch.nn.RNN, 1), "lstm": (nn.LSTM, torch.nn.LSTM, 4), "gru": (nn.GRU, torch.nn.GRU, 3)}
CELLS = {
    "rnn": (nn.RNNCell, torch.nn.RNNCell),
    "lstm": (nn.LSTMCell, torch.nn.LSTMCell),
    "gru": (nn.GRUCell, torch.nn.GRUCell),
}
SIZES = [
    (1, 1, 1, 1, 1),
    (5, 3, 7, 11, 2),
    (3, 2, 17, 33, 3),
    (2, 1, 16, 12, 1),
    (1, 5, 13, 1, 2),
]  # T, B, in, hidden, layers
NAMES = {"W_ih": "weight_ih", "W_hh": "weight_hh", "bias_ih": "bias_ih", "bias_hh": "bias_hh"}


def close(ours: Any, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    want = theirs.detach().numpy()
    assert tuple(ours.shape) == want.shape
    assert np.abs(ours.numpy() - want).max() <= tolerance * max(np.abs(want).max(), 1e-2)


def as_states(values: list[Any]) -> Any:
    return tuple(values) if len(values) > 1 else values[0]


def as_list(state: Any) -> list[Any]:
    return list(state) if isinstance(state, tuple) else [state]


def copy_weights(cell: Any, theirs: Any, suffix: str = "") -> list[tuple[Any, torch.Tensor]]:
    """Gives torch's layer the cell's weights; returns the pairs of parameters."""
    pairs = []
    for ours, name in NAMES.items():
        p, q = getattr(cell, ours), getattr(theirs, name + suffix, None)
        if p is not None:
            q.data = torch.tensor(p.numpy().T.astype("float64"))
            pairs.append((p, q))
    return pairs


def backward(outs: list[Tensor], wants: list[torch.Tensor]) -> None:
    """A weighted sum of all outputs, backwards in both libraries."""
    ours: Any = 0
    theirs: Any = 0
    for o, w in zip(outs, wants, strict=True):
        close(o, w)
        weight = np.random.randn(*w.shape)
        ours = ndl.summation(o * Tensor(weight.astype("float32"), requires_grad=False)) + ours
        theirs = (w * torch.tensor(weight)).sum() + theirs
    ours.backward()
    theirs.backward()


@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("kind", [*KINDS, "relu"])
def test_layers_agree_with_torch(kind: str, sizes: tuple[int, ...], state: bool) -> None:
    steps, batch, n_in, hidden, layers = sizes
    options = {"nonlinearity": "relu"} if kind == "relu" else {}
    kind = "rnn" if kind == "relu" else kind
    ours_type, theirs_type, gates = KINDS[kind]
    ours = ours_type(n_in, hidden, layers, **options)
    theirs = theirs_type(n_in, hidden, layers, **options).double()
    pairs: list[tuple[Any, torch.Tensor]] = []
    for k in range(layers):
        cell = getattr(ours, f"{kind}_cells")[k]
        assert cell.W_ih.shape == (n_in if k == 0 else hidden, gates * hidden)
        assert cell.W_hh.shape == (hidden, gates * hidden)
        assert cell.bias_ih.shape == cell.bias_hh.shape == (gates * hidden,)
        pairs += copy_weights(cell, theirs, f"_l{k}")
    assert len(ours.parameters()) == len(pairs) == 4 * layers
    arrays = [np.random.randn(steps, batch, n_in).astype("float32")]
    if state:
        arrays += [np.random.randn(layers, batch, hidden).astype("float32") for _ in range(1 + (kind == "lstm"))]
    xs, ts = [Tensor(a) for a in arrays], [torch.tensor(a.astype("float64"), requires_grad=True) for a in arrays]
    out, last = ours(xs[0], as_states(xs[1:]) if state else None)
    want, want_last = theirs(ts[0], as_states(ts[1:]) if state else None)
    assert out.shape == (steps, batch, hidden)
    assert isinstance(last, tuple) == (kind == "lstm")
    backward([out, *as_list(last)], [want, *as_list(want_last)])
    for p, q in pairs:
        close(p.grad, q.grad.T if p.ndim == 2 else q.grad)
    for p, q in zip(xs, ts, strict=True):
        close(p.grad, q.grad)


@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 7, 11), (2, 33, 17)])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_agree_with_torch(kind: str, sizes: tuple[int, ...], bias: bool, state: bool) -> None:
    batch, n_in, hidden = sizes
    ours, theirs = CELLS[kind][0](n_in, hidden, bias=bias), CELLS[kind][1](n_in, hidden, bias=bias).double()
    pairs = copy_weights(ours, theirs)
    assert len(pairs) == len(ours.parameters()) == (4 if bias else 2)
    assert (ours.bias_ih is None) is not bias
    arrays = [np.random.randn(batch, n_in).astype("float32")]
    if state:
        arrays += [np.random.randn(batch, hidden).astype("float32") for _ in range(1 + (kind == "lstm"))]
    xs, ts = [Tensor(a) for a in arrays], [torch.tensor(a.astype("float64"), requires_grad=True) for a in arrays]
    got = ours(xs[0], as_states(xs[1:]) if state else None)
    want = theirs(ts[0], as_states(ts[1:]) if state else None)
    backward(as_list(got), as_list(want))
    for p, q in pairs:
        close(p.grad, q.grad.T if p.ndim == 2 else q.grad)
    for p, q in zip(xs, ts, strict=True):
        close(p.grad, q.grad)


@pytest.mark.parametrize(("kind", "gates"), [("rnn", 1), ("lstm", 4), ("gru", 3)])
def test_weights_are_drawn_in_order(kind: str, gates: int) -> None:
    np.random.seed(11)
    layer = KINDS[kind][0](5, 7, 2)
    np.random.seed(11)
    bound = np.sqrt(1 / 7)
    for k, n_in in enumerate((5, 7)):
        cell = getattr(layer, f"{kind}_cells")[k]
        for name, shape in {"W_ih": (n_in,), "W_hh": (7,), "bias_ih": (), "bias_hh": ()}.items():
            want = (np.random.rand(*shape, gates * 7) * 2 * bound - bound).astype("float32")
            np.testing.assert_array_equal(getattr(cell, name).numpy(), want)


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_from_zeros_reaches_every_parameter(kind: str) -> None:
    layer = KINDS[kind][0](3, 4, 2)
    out, _ = layer(Tensor(np.random.randn(1, 2, 3).astype("float32")))
    out.backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None and p.grad.shape == p.shape, name
        assert (np.abs(p.grad.numpy()).max() == 0) == name.endswith("W_hh"), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_carried_state_continues_the_sequence(kind: str) -> None:
    layer = KINDS[kind][0](3, 5, 2)
    x = np.random.randn(6, 2, 3).astype("float32")
    whole, last = layer(Tensor(x))
    first, state = layer(Tensor(x[:4]))
    state = as_states([s.detach() for s in as_list(state)])
    rest, end = layer(Tensor(x[4:]), state)
    np.testing.assert_allclose(np.concatenate([first.numpy(), rest.numpy()]), whole.numpy(), atol=1e-6)
    for a, b in zip(as_list(end), as_list(last), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    rest.backward()  # ends at the detached state
    assert layer.parameters()[0].grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_double_precision_on_numpy(kind: str) -> None:
    layer = KINDS[kind][0](3, 5, 2, device=ndl.cpu_numpy(), dtype="float64")
    theirs = KINDS[kind][1](3, 5, 2).double()
    for k in range(2):
        copy_weights(getattr(layer, f"{kind}_cells")[k], theirs, f"_l{k}")
    x = np.random.randn(4, 2, 3)
    out, _ = layer(Tensor(x, device=ndl.cpu_numpy()))
    assert out.dtype == "float64"
    close(out, theirs(torch.tensor(x))[0], 1e-13)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (5, 3, 7, 11, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_eager(kind: str, sizes: tuple[int, ...]) -> None:
    need_executor()
    steps, batch, n_in, hidden, layers = sizes
    layer = KINDS[kind][0](n_in, hidden, layers)
    x = np.random.randn(steps, batch, n_in).astype("float32")
    state = [np.random.randn(layers, batch, hidden).astype("float32") for _ in range(1 + (kind == "lstm"))]
    for args in ((x,), (x, as_states(state))):
        want, last = layer(Tensor(x), *(as_states([Tensor(s) for s in as_list(a)]) for a in args[1:]))
        got, got_last = ndl.compile(layer, args)(*args)
        np.testing.assert_allclose(got, want.numpy(), atol=1e-6)
        for a, b in zip(as_list(got_last), as_list(last), strict=True):
            np.testing.assert_allclose(a, b.numpy(), atol=1e-6)
    exe = ndl.compile(layer, (x,))
    more = np.random.randn(steps + 2, batch + 1, n_in).astype("float32")
    np.testing.assert_allclose(exe(more)[0], layer(Tensor(more))[0].numpy(), atol=1e-6)


def test_errors_name_the_shapes() -> None:
    layer = nn.LSTM(3, 4, 2)
    with pytest.raises(ValueError, match=r"\[LSTM\] x expects shape \(T, B, 3\), got \(2, 3\)\."):
        layer(Tensor(np.zeros((2, 3), "float32")))
    with pytest.raises(ValueError, match=r"\[LSTM\] x expects at least one step"):
        layer(Tensor(np.zeros((0, 2, 3), "float32")))
    x, h = Tensor(np.zeros((5, 2, 3), "float32")), Tensor(np.zeros((2, 1, 4), "float32"))
    with pytest.raises(
        ValueError, match=r"\[LSTM\] state expects 2 of shape \(2, 2, 4\), got \(2, 1, 4\), \(2, 1, 4\)\."
    ):
        layer(x, (h, h))
    with pytest.raises(ValueError, match=r"\[RNN\] nonlinearity expects tanh or relu, got sine\."):
        nn.RNN(3, 4, nonlinearity="sine")
    with pytest.raises(ValueError, match=r"\[GRU\] num_layers expects at least 1, got 0\."):
        nn.GRU(3, 4, 0)
