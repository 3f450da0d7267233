"""Packed sequences: recurrent layers with lengths, and models that pack and pad, held against torch in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import needle as ndl
import torch2needle
from needle.nn.functional import GuardError

T = torch.Tensor
LENGTHS = [2, 5, 1, 4]


def close(got: Any, want: T, tolerance: float = 1e-5) -> None:
    got, exact = np.asarray(got.numpy() if hasattr(got, "numpy") else got), want.detach().double().numpy()
    assert got.shape == exact.shape
    assert np.abs(got - exact).max() <= tolerance * max(1.0, np.abs(exact).max())


def leaves(value: Any) -> list[Any]:
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, tuple | list) else [value]


class Packs(nn.Module):
    """Packs, runs, pads: what comes back first says whether padding took part."""

    def __init__(self, layer: nn.Module, total: bool, ordered: bool = False, state: bool = False) -> None:
        super().__init__()
        self.layer, self.total, self.ordered, self.state = layer, total, ordered, state

    def forward(self, x: T, lengths: T) -> Any:
        first = self.layer.batch_first
        rows = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.ordered)
        given = None
        if self.state:
            made = (x.transpose(0, 1) if first else x).mean(0)[:, :1] * lengths[:, None]
            shape = self.layer.num_layers * (1 + self.layer.bidirectional), -1, self.layer.hidden_size
            h = made.tanh()[None].expand(*shape)
            given = (h, h * 0.5) if isinstance(self.layer, nn.LSTM) else h
        y, last = self.layer(rows, given)
        total = (x.shape[1] if first else x.shape[0]) if self.total else None
        return pad_packed_sequence(y, batch_first=first, padding_value=0.5, total_length=total), last


CASES = {
    "lstm": (lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), True, False, True),
    "gru counted": (lambda: nn.GRU(3, 4, bidirectional=True), False, False, False),
    "relu": (lambda: nn.RNN(3, 4, 2, nonlinearity="relu", batch_first=True), True, False, True),
    "sorted": (lambda: nn.LSTM(3, 4, bias=False), True, True, False),
}


def inputs(case: str, lengths: list[int], steps: int = 6) -> tuple[T, T]:
    layer, _, ordered, state = CASES[case]
    lengths = sorted(lengths, reverse=True) if ordered else lengths
    x = torch.randn(len(lengths), steps, 3)
    for row, n in zip(x, lengths, strict=True):
        if not state:  # which reads all of it
            row[n:] = torch.nan  # what padding holds is nobody's business
    return x if layer().batch_first else x.transpose(0, 1).contiguous(), torch.tensor(lengths)


@pytest.mark.parametrize("case", CASES)
def test_models_that_pack(case: str) -> None:
    """Values plain, fused and compiled, other batches and lengths, gradients."""
    torch.manual_seed(0)
    layer, *how = CASES[case]
    model = Packs(layer(), *how).eval()
    x, lengths = inputs(case, LENGTHS)
    net = torch2needle.convert(model, (x, lengths))
    exact = copy.deepcopy(model).double()
    for some in (LENGTHS, [3, 6], [1]):
        x, lengths = inputs(case, some)
        want = leaves(exact(x.double(), lengths))
        for form in (net, torch2needle.compile(model, (x, lengths))):
            for got, exactly in zip(leaves(form(x, lengths)), want, strict=True):
                close(got, exactly)
    x, lengths = inputs(case, LENGTHS)
    weights = [torch.randn(t.shape) if t.is_floating_point() else None for t in leaves(exact(x.double(), lengths))]
    sum(
        (t * w).sum() for t, w in zip(leaves(exact(x.double(), lengths)), weights, strict=True) if w is not None
    ).backward()
    total: Any = 0
    for t, w in zip(leaves(net(x, lengths)), weights, strict=True):
        total = total + ndl.ops.summation(t * ndl.Tensor(w.numpy())) if w is not None else total
    total.backward()
    for ours, theirs in zip(net.parameters(), exact.parameters(), strict=True):
        close(ours.grad, theirs.grad, 2e-5)


def test_lengths_that_torch_refuses_are_refused() -> None:
    model = Packs(nn.GRU(3, 4), True, True).eval()
    x = torch.randn(6, 3, 3)
    net = torch2needle.convert(model, (x, torch.tensor([5, 3, 2])))
    exe = ndl.compile(net, (x, torch.tensor([5, 3, 2])))
    for bad in ([3, 5, 2], [5, 3, 0], [7, 3, 2]):
        for form in (net, exe):
            with pytest.raises(GuardError, match="lengths of packed rows"):
                form(x, torch.tensor(bad))


class ThroughData(nn.Module):
    """Reads and rebuilds the packed form, whose rows stand in torch's order; the state of one run begins the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dense = nn.LSTM(3, 4), nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, rows: PackedSequence) -> tuple[PackedSequence, T, T]:
        made, state = self.first(rows)
        again = PackedSequence(
            self.dense(made.data).tanh(), rows.batch_sizes, rows.sorted_indices, rows.unsorted_indices
        )
        y, (h, _) = self.second(again, state)
        return y, h, made.data.sum(0)


def test_packed_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    model = ThroughData().eval()
    exact = copy.deepcopy(model).double()

    def rows(lengths: list[int]) -> PackedSequence:
        return pack_padded_sequence(torch.randn(6, len(lengths), 3), torch.tensor(lengths), enforce_sorted=False)

    example = rows([3, 5, 3, 1])
    net = torch2needle.convert(model, (example,))
    for given in (example, rows([2, 6])):
        want = exact(PackedSequence(given.data.double(), *given[1:]))
        exe = torch2needle.compile(model, (given,))
        for result in (net(given), exe(given)):
            assert type(result[0]) is PackedSequence
            for got, exactly in zip(leaves(result), leaves(want), strict=True):
                close(got, exactly)


def test_layers_take_lengths() -> None:
    layer = ndl.nn.LSTM(3, 4, bidirectional=True)
    x = ndl.Tensor(np.random.randn(5, 2, 3).astype("float32"))
    y, (h, _) = layer(x, lengths=ndl.Tensor(np.array([5, 2]), dtype="int64"))
    alone, (last, _) = layer(ndl.Tensor(x.numpy()[:2, 1:]))
    assert np.allclose(y.numpy()[:2, 1:], alone.numpy(), atol=1e-6) and not y.numpy()[2:, 1].any()
    assert np.allclose(h.numpy()[:, 1:], last.numpy(), atol=1e-6)
    for bad, text in (([5, 0], "from 1 to 5"), ([6, 1], "from 1 to 5"), ([5], r"shape \(2,\)")):
        with pytest.raises(ValueError, match=rf"\[recurrent\] lengths expects .*{text}"):
            layer(x, lengths=ndl.Tensor(np.array(bad), dtype="int64"))
