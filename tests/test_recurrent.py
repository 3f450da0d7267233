"""Recurrent ops and layers beyond the course: kernels at many sizes, second derivatives, both directions, graphs, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle import nn, ops
from needle.autograd import OPS, Tensor
from needle.backend_selection import BACKEND
from needle.ops.common import vjp

compiled = pytest.mark.skipif(BACKEND == "np", reason="the numpy backend has no kernels and no executor")
KINDS: dict[str, tuple[type, type, int, int]] = {
    "rnn": (nn.RNN, torch.nn.RNN, 1, 1),
    "lstm": (nn.LSTM, torch.nn.LSTM, 4, 2),
    "gru": (nn.GRU, torch.nn.GRU, 3, 1),
}


def drawn(kind: str, steps: int, batch: int, size: int) -> list[np.ndarray]:
    """Inputs of the kind's op with a bias, as float32 values."""
    _, _, gates, states = KINDS[kind]
    shapes = [(steps, batch, gates * size), (size, gates * size), *[(batch, size)] * states, (gates * size,)]
    scales = [1.0, size**-0.5, *[1.0] * states, 1.0]
    return [(np.random.randn(*s) * k).astype("float32") for s, k in zip(shapes, scales, strict=True)]


def apply(kind: str, xs: list[Tensor], **options: Any) -> list[Tensor]:
    out = getattr(ops, kind)(*xs, **options)
    return list(out) if isinstance(out, tuple) else [out]


def on(arrays: list[np.ndarray], numpy: bool) -> list[Tensor]:
    if numpy:
        return [Tensor(a.astype("float64"), device=ndl.cpu_numpy()) for a in arrays]
    return [Tensor(a, device=ndl.cpu()) for a in arrays]


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    got, want = (np.asarray(t.numpy(), "float64") for t in (got, want))
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 0.1)


@compiled
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 60, 5), (5, 2, 16), (4, 7, 100), (3, 33, 130), (2, 1, 300)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_at_many_sizes(kind: str, sizes: tuple[int, int, int], threads: int) -> None:
    """Values and gradients of the kernels against the unrolled steps in float64, at sizes that leave parts of tiles over."""
    arrays, before = drawn(kind, *sizes), ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        for reverse in (False, True):
            weights = [np.random.randn(*sizes).astype("float32") for _ in range(KINDS[kind][3])]
            sides = []
            for numpy in (False, True):
                xs = on(arrays, numpy)
                outs, seeds = apply(kind, xs, reverse=reverse), on(weights, numpy)
                total: Any = 0
                for out, seed in zip(outs, seeds, strict=True):
                    total = ops.summation(out * seed.detach()) + total
                total.backward()
                sides.append([*outs, *(x.grad for x in xs)])
            for got, want in zip(*sides, strict=True):
                close(got, want)
    finally:
        ndl.set_num_threads(before)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_training_runs_the_kernel(kind: str) -> None:
    """Also of inputs that require gradients: a layer is one op and its gradient another, not one per step."""
    xs = on(drawn(kind, 6, 2, 5), False)
    out = apply(kind, [x * 1.0 for x in xs])[0]
    names = {t.op.name for t in ndl.autograd.find_topo_sort([out]) if t.op is not None}
    assert names <= {"Rnn", "Lstm", "Gru", "TupleGetItem", "MulScalar"} and kind.capitalize() in names
    out.backward()
    names = {t.op.name for t in ndl.autograd.find_topo_sort([xs[0].grad]) if t.op is not None}
    assert "RecurrentGrad" in names and "Stack" not in names


@compiled
@pytest.mark.parametrize("shared", [False, True], ids=["two states", "one tensor as both"])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_through_the_kernel(kind: str, shared: bool) -> None:
    """Gradients of <v, gradients> in float32, where the first gradient is the kernel's, against the steps in float64."""
    arrays = drawn(kind, 3, 2, 4)
    directions, weight = [np.random.randn(*a.shape).astype("float32") for a in arrays], np.random.randn(3, 2, 4)
    sides = []
    for numpy in (False, True):
        xs = on(arrays, numpy)
        given = [*xs[:3], xs[2], *xs[4:]] if shared and kind == "lstm" else xs
        outs = apply(kind, given)
        seed, vs = on([weight.astype("float32")], numpy)[0].detach(), on(directions, numpy)
        total: Any = ops.summation(outs[0] * seed * outs[0])
        for out in outs[1:]:
            total = total + ops.summation(out * out * seed)
        one = ndl.init.ones(device=total.device, dtype=total.dtype)
        slope: Any = 0
        for g, v in zip(vjp(total, one, xs), vs, strict=True):
            slope = slope if g is None else ops.summation(g * v.detach()) + slope
        sides.append([g for g in vjp(slope, one, xs) if g is not None])
    assert len(sides[0]) == len(sides[1]) >= 3
    for got, want in zip(*sides, strict=True):
        close(got, want, 1e-4)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loss_of_the_last_cell_state_alone(reverse: bool) -> None:
    """No gradient comes in for h then, and only one step's for c."""
    arrays = drawn("lstm", 4, 2, 5)
    sides = []
    for numpy in (True, BACKEND == "np"):
        xs = on(arrays, numpy)
        c = apply("lstm", xs, reverse=reverse)[1][0 if reverse else -1]
        ops.summation(c * c).backward()
        sides.append([x.grad for x in xs])
    for want, got in zip(*sides, strict=True):
        close(got, want)


@compiled
def test_an_empty_batch_gives_empty_states() -> None:
    layer = nn.GRU(3, 5)
    out, last = layer(Tensor(np.zeros((4, 0, 3), "float32")))
    assert out.shape == (4, 0, 5) and last.shape == (1, 0, 5)
    out.backward()
    assert all(not p.grad.numpy().any() for p in layer.parameters())


def torch_twin(kind: str, ours: Any, layers: int) -> Any:
    """torch's layer in both directions with the weights of ours."""
    theirs = KINDS[kind][1](ours.input_size, ours.hidden_size, layers, bidirectional=True, batch_first=True).double()
    names = {"W_ih": "weight_ih", "W_hh": "weight_hh", "bias_ih": "bias_ih", "bias_hh": "bias_hh"}
    for cell, suffix in zip(getattr(ours, f"{kind}_cells"), ours.suffixes, strict=True):
        for a, b in names.items():
            getattr(theirs, b + suffix).data = torch.tensor(getattr(cell, a).numpy().T.astype("float64"))
    return theirs


@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_in_needles_layout(kind: str) -> None:
    layer = KINDS[kind][0](3, 5, 2, batch_first=True, bidirectional=True)
    theirs = torch_twin(kind, layer, 2)
    x = np.random.randn(2, 4, 3).astype("float32")
    out, last = layer(Tensor(x))
    want, want_last = theirs(torch.tensor(x, dtype=torch.float64))
    close(out, want.detach())
    pairs = zip(last, want_last, strict=True) if kind == "lstm" else [(last, want_last)]
    for a, b in pairs:
        close(a, b.detach())
    assert layer.extra_repr() == "3, 5, num_layers=2, batch_first=True, bidirectional=True"


class Tagger(nn.Module):
    """A sequence through two layers and a linear one, as users write it."""

    def __init__(self, kind: str, layout: str) -> None:
        super().__init__()
        self.recurrent = KINDS[kind][0](3, 5, 2, layout=layout, bidirectional=layout == "torch")
        self.linear = nn.Linear(10 if layout == "torch" else 5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        out, state = self.recurrent(x)
        return self.linear(out), state


def leaves(value: Any) -> list[Any]:
    return [x for v in value for x in leaves(v)] if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize("layout", ["needle", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_with_free_steps_and_batch(kind: str, layout: str, tmp_path: Any) -> None:
    model = Tagger(kind, layout)
    net = ndl.graph.symbolic(model)
    assert sum(n.kind == "op" and n.target.name == kind.capitalize() for n in net.graph) == (
        4 if layout == "torch" else 2
    )
    ndl.save(net, tmp_path / "net.needle")
    again = ndl.load(tmp_path / "net.needle")
    for shape in ((4, 2, 3), (1, 1, 3), (7, 3, 3)):
        x = np.random.randn(*shape).astype("float32")
        want = [t.numpy() for t in leaves(model(Tensor(x)))]
        for other in (net, again):
            for a, b in zip(leaves(other(Tensor(x))), want, strict=True):
                np.testing.assert_allclose(a.numpy(), b, atol=1e-6)
    net(Tensor(x))[0].backward()
    got = [p.grad.numpy() for p in model.parameters()]
    model.reset_grad()
    model(Tensor(x))[0].backward()
    for g, p in zip(got, model.parameters(), strict=True):
        np.testing.assert_allclose(g, p.grad.numpy(), atol=1e-5)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_layer_compiles_once_for_all_sizes(kind: str) -> None:
    model = Tagger(kind, "torch")
    exe = ndl.compile(ndl.graph.symbolic(model), (np.zeros((4, 2, 3), "float32"),))
    assert kind in {name.strip() for line in str(exe.plan).split("\n") for name in line.split()}
    for shape in ((4, 2, 3), (6, 5, 3)):
        x = np.random.randn(*shape).astype("float32")
        for a, b in zip(leaves(exe(x)), leaves(model(Tensor(x))), strict=True):
            np.testing.assert_allclose(a, b.numpy(), atol=1e-6)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_float64_runs_the_steps(kind: str) -> None:
    layer = KINDS[kind][0](3, 5, dtype="float64", device=ndl.cpu())
    x = np.random.randn(4, 2, 3)
    out = layer(Tensor(x, device=ndl.cpu(), dtype="float64"))[0]
    theirs = KINDS[kind][1](3, 5).double()
    for a, b in zip(layer.parameters(), theirs.parameters(), strict=True):
        b.data = torch.tensor(a.numpy().T)
    close(out, theirs(torch.tensor(x))[0].detach(), 1e-13)


@compiled
def test_compiled_layers_see_new_weights() -> None:
    model = Tagger("lstm", "needle")
    x = np.random.randn(4, 2, 3).astype("float32")
    exe = ndl.compile(model, (x,))
    for p in model.parameters():
        p.data = p.data * 0.5
    np.testing.assert_allclose(exe(x)[0], model(Tensor(x))[0].numpy(), atol=1e-6)


def test_weights_can_be_saved_by_layer(tmp_path: Any) -> None:
    layer = nn.LSTM(3, 5, 2, dropout=0.3, bidirectional=True, layout="torch")
    ndl.save(layer, tmp_path / "layer.needle")
    again = ndl.load(tmp_path / "layer.needle")
    assert list(again.state_dict()) == list(layer.state_dict())
    assert "weight_hh_l1_reverse" in again.state_dict() and again.dropout.p == 0.3
    x = Tensor(np.random.randn(4, 2, 3).astype("float32"))
    np.testing.assert_array_equal(again.eval()(x)[0].numpy(), layer.eval()(x)[0].numpy())


def test_flops_are_those_of_the_recurrent_product() -> None:
    arrays = drawn("lstm", 3, 2, 4)
    assert OPS["Lstm"](has_bias=True).flops(None, *arrays) == 2 * 3 * 2 * 4 * 16


ERRORS = {
    r"\[lstm\] projected expects shape \(T, B, 4 \* H\), got \(3, 2, 18\)\.": (0, (3, 2, 18)),
    r"\[lstm\] expects at least one step, got shape \(0, 2, 16\)\.": (0, (0, 2, 16)),
    r"\[lstm\] weight expects shape \(4, 16\), got \(16, 4\)\.": (1, (16, 4)),
    r"\[lstm\] state expects shape \(2, 4\), got \(1, 4\)\.": (3, (1, 4)),
    r"\[lstm\] bias expects shape \(16,\), got \(4,\)\.": (4, (4,)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_shapes(message: str) -> None:
    index, shape = ERRORS[message]
    arrays = drawn("lstm", 3, 2, 4)
    arrays[index] = np.zeros(shape, "float32")
    with pytest.raises(ValueError, match=message):
        ops.lstm(*(Tensor(a) for a in arrays))
    with pytest.raises(ValueError, match=r"\[LSTM\] layout expects needle or torch, got jax\."):
        nn.LSTM(3, 4, layout="jax")
