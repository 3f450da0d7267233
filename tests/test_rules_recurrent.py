"""Recurrent layers and their cells: conversion samples, states, options, refusals, training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import torch2needle
from conversion import close, converts, gradients_agree
from gpu_devices import everywhere
from needle.backend_selection import BACKEND

RUNS_PLANS = BACKEND != "np"


class One(nn.Module):
    """A module whose forward is a function of its one part and the input."""

    def __init__(self, part: nn.Module, f: Callable) -> None:
        super().__init__()
        self.part, self.f = part, f

    def forward(self, x: torch.Tensor) -> Any:
        return self.f(self.part, x)


class Two(One):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:  # type: ignore[override]
        return self.f(self.part, x, h)


class Three(One):
    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:  # type: ignore[override]
        return self.f(self.part, x, (h, c))


LAYERS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
CELLS = {"rnn": nn.RNNCell, "lstm": nn.LSTMCell, "gru": nn.GRUCell}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "batch first": {"batch_first": True},
    "bidirectional": {"bidirectional": True},
    "everything": {"num_layers": 3, "bidirectional": True, "batch_first": True, "bias": False},
}


@everywhere
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str, options: str) -> None:
    model = One(LAYERS[kind](5, 7, **OPTIONS[options]), lambda m, x: m(x))
    converts(model, (4, 3, 5), executable=RUNS_PLANS)


@everywhere
def test_relu() -> None:
    converts(One(nn.RNN(5, 7, 2, nonlinearity="relu"), lambda m, x: m(x)[0]), (4, 3, 5), executable=RUNS_PLANS)


@everywhere
@pytest.mark.parametrize("kind", LAYERS)
def test_parts_of_the_result(kind: str) -> None:
    def last(m: nn.Module, x: torch.Tensor) -> Any:
        out, state = m(x)
        return out[-1] + (state[1] if kind == "lstm" else state)[0]

    converts(One(LAYERS[kind](5, 7), last), (4, 3, 5), executable=RUNS_PLANS)


@pytest.mark.parametrize("options", ["plain", "everything"])
@pytest.mark.parametrize("kind", LAYERS)
def test_given_states(kind: str, options: str) -> None:
    given = OPTIONS[options]
    count = given.get("num_layers", 1) * (1 + given.get("bidirectional", False))
    part, state = LAYERS[kind](5, 7, **given), [(count, 3, 7)] * (1 + (kind == "lstm"))
    x = (3, 4, 5) if given.get("batch_first") else (4, 3, 5)
    model = Three(part, lambda m, x, h: m(x, h)) if kind == "lstm" else Two(part, lambda m, x, h: m(x, hx=h))
    net = converts(model, x, *state, batch=False, executable=RUNS_PLANS)
    other = [torch.randn(6, 2, 5)] + [torch.randn(count, 6 if given.get("batch_first") else 2, 7) for _ in state]
    close(net(*other), model(*other))


@everywhere
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: str, bias: bool) -> None:
    cell = CELLS[kind](5, 7, bias=bias)
    converts(One(cell, lambda m, x: m(x)), (3, 5), executable=RUNS_PLANS)
    model = Three(cell, lambda m, x, h: m(x, h)) if kind == "lstm" else Two(cell, lambda m, x, h: m(x, h))
    converts(model, (3, 5), *[(3, 7)] * (1 + (kind == "lstm")), executable=RUNS_PLANS)


@everywhere
def test_cells_in_a_loop() -> None:
    def unrolled(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = m(x)
        for _ in range(3):
            h = m(x, h)
        return h

    converts(One(nn.GRUCell(5, 7), unrolled), (3, 5), executable=RUNS_PLANS)
    converts(One(nn.RNNCell(5, 7, nonlinearity="relu"), unrolled), (3, 5), executable=RUNS_PLANS)


@pytest.mark.parametrize("kind", LAYERS)
def test_steps_and_batch_stay_free(kind: str) -> None:
    model = One(LAYERS[kind](5, 20, 2, bidirectional=True), lambda m, x: m(x))
    net = torch2needle.convert(model, (torch.randn(4, 3, 5),))
    for shape in ((4, 3, 5), (9, 1, 5), (1, 6, 5)):
        x = torch.randn(shape)
        close(net(x), model(x))
        gradients_agree(model, net, (x,), 1e-4)
        model.zero_grad()
    if RUNS_PLANS:
        exe = ndl.compile(net.eval(), (torch.randn(4, 3, 5),))
        for shape in ((4, 3, 5), (7, 2, 5)):
            x = torch.randn(shape)
            close(exe(x), model(x))


def test_dropout_between_layers() -> None:
    model = One(nn.LSTM(5, 7, 2, dropout=0.5), lambda m, x: m(x)[0])
    net = converts(model, (4, 3, 5), modes=(False,), executable=RUNS_PLANS)
    x = torch.randn(4, 3, 5)
    net.train()
    a, b = net(x).numpy(), net(x).numpy()
    assert np.abs(a - b).max() > 1e-3
    net.eval()
    np.testing.assert_array_equal(net(x).numpy(), net(x).numpy())


def test_names_and_shapes_are_torchs() -> None:
    model = nn.Sequential(nn.LSTM(5, 7, 2, bidirectional=True))
    state = torch2needle.convert(One(model[0], lambda m, x: m(x)[0])).state_dict()
    want = {f"part.{k}": tuple(v.shape) for k, v in model[0].state_dict().items()}
    assert {k: tuple(v.shape) for k, v in state.items()} == want
    assert state["part.weight_ih_l1_reverse"].shape == (28, 14)


def test_a_training_run_follows_torch() -> None:
    torch.manual_seed(1)
    model = One(nn.LSTM(5, 7, 2), lambda m, x: m(x)[0])
    net = torch2needle.convert(model)
    x, y = torch.randn(6, 4, 5), torch.randn(6, 4, 7)
    theirs = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    ours = ndl.optim.SGD(net.parameters(), 0.5, momentum=0.9, rule="torch")
    for _ in range(5):
        theirs.zero_grad(), ours.reset_grad()
        ((model(x) - y) ** 2).mean().backward()
        error = net(x) - ndl.Tensor(y.numpy(), requires_grad=False)
        ndl.ops.mean(error * error).backward()
        theirs.step(), ours.step()
    for key, value in model.state_dict().items():
        close(net.state_dict()[key], value, 1e-4)


def test_a_converted_layer_is_saved(tmp_path: Any) -> None:
    model = One(nn.GRU(5, 7, 2, batch_first=True, bidirectional=True), lambda m, x: m(x))
    net = torch2needle.convert(model)
    ndl.save(net, tmp_path / "net.needle")
    close(ndl.load(tmp_path / "net.needle")(torch.ones(2, 3, 5)), model(torch.ones(2, 3, 5)))


WHOLE: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "projected": lambda *a, **k: nn.LSTM(*a, proj_size=3, **k),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
OPTIONS_OF_ONE = {
    "plain": {},
    "everything": {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.3},
    "no bias": {"num_layers": 2, "bias": False},
}


def state_of(layer: Any, *batch: int) -> Any:
    cells = layer.num_layers * (1 + layer.bidirectional)
    h = torch.randn(cells, *batch, layer.proj_size or 7)
    return (h, torch.randn(cells, *batch, 7)) if isinstance(layer, nn.LSTM) else h


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("options", OPTIONS_OF_ONE)
@pytest.mark.parametrize("kind", WHOLE)
def test_the_layer_is_the_model(kind: str, options: str, given: bool) -> None:
    model = WHOLE[kind](5, 7, **OPTIONS_OF_ONE[options]).eval()

    def example(steps: int, batch: int) -> tuple:
        x = torch.randn(*((batch, steps) if model.batch_first else (steps, batch)), 5)
        return (x, state_of(model, batch)) if given else (x,)

    net = torch2needle.convert(model, example(4, 3))
    assert list(net.state_dict()) == list(model.state_dict())
    calls = [example(4, 3), example(6, 2), example(1, 3)]
    for call in calls:
        close(net(*call), model(*call))
    if not (given and isinstance(model, nn.LSTM)):  # whose state is no tensor
        gradients_agree(model, net, calls[1], 1e-4)
    if RUNS_PLANS:
        exe = torch2needle.compile(model, calls[0])
        for call in calls:
            close(exe(*call), model(*call))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", WHOLE)
def test_one_sequence_without_a_batch(kind: str, given: bool) -> None:
    model = WHOLE[kind](5, 7, 2, bidirectional=True).eval()
    call = (torch.randn(4, 5), *([state_of(model)] if given else []))
    net = torch2needle.convert(model, call)
    for x in (call[0], torch.randn(6, 5)):
        close(net(x, *call[1:]), model(x, *call[1:]))


def test_dropout_of_a_whole_layer_follows_the_mode() -> None:
    x = torch.randn(4, 3, 5)
    net = torch2needle.convert(nn.GRU(5, 7, 2, dropout=0.5).eval(), (x,))
    np.testing.assert_array_equal(net(x)[0].numpy(), net(x)[0].numpy())
    net.train()
    assert np.abs(net(x)[0].numpy() - net(x)[0].numpy()).max() > 1e-3


@everywhere
@pytest.mark.parametrize("options", OPTIONS)
def test_projections(options: str) -> None:
    converts(One(nn.LSTM(5, 7, proj_size=3, **OPTIONS[options]), lambda m, x: m(x)), (4, 3, 5), executable=RUNS_PLANS)


def test_projections_of_packed_rows() -> None:
    def rows(m: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        y, state = m(nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))
        return nn.utils.rnn.pad_packed_sequence(y, total_length=x.shape[0])[0], state

    model = Two(nn.LSTM(5, 7, 2, bidirectional=True, proj_size=3), rows).eval()
    net = torch2needle.convert(model, (torch.randn(4, 3, 5), torch.tensor([2, 4, 1])))
    other = torch.randn(6, 2, 5), torch.tensor([3, 6])
    close(net(*other), model(*other))


def test_gradients_inside_of_a_layer() -> None:
    """The forward differentiates through the layer, which has to be one of torch's own then."""

    def slope(m: nn.Module, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_(True)
        y = m(x)[0].sum() + x.sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]

    model, x = One(nn.GRU(5, 7), slope).eval(), torch.randn(4, 3, 5)
    close(torch2needle.convert(model, (x,))(x), model(x))


def test_a_projection_needs_torchs_layout() -> None:
    with pytest.raises(ValueError, match=r'\[LSTM\] proj_size expects an LSTM of layout="torch", got 3'):
        ndl.nn.LSTM(5, 7, proj_size=3)
    with pytest.raises(ValueError, match=r"\[GRU\] proj_size expects an LSTM"):
        ndl.nn.GRU(5, 7, proj_size=3, layout="torch")


def packed(m: nn.Module, x: torch.Tensor) -> Any:
    return m(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1])))[0].data


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "control flow": (lambda: One(nn.LSTM(5, 7), packed), None),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str) -> None:
    make, shape = REFUSED[reason]
    with pytest.raises(torch2needle.ConversionError, match=reason):
        torch2needle.convert(make(), None if shape is None else (torch.randn(shape),))
