"""Lengths of texts and sounds stay free when torch.export captures; features do not, and tables of positions limit lengths."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import numpy as np
import pytest
import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import needle as ndl
import torch2needle
from torch2needle.capture import budget, export
from torch2needle.capture.budget import Budget, OutOfTime

T = torch.Tensor


class Texts(nn.Module):
    """Words with positions, a causal mask made from the length, and attention in its parts."""

    def __init__(self, most: int = 24) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(most, 8)
        self.register_buffer("numbers", torch.arange(most)[None])
        self.q, self.k, self.v, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: T, mask: T | None = None) -> T:
        assert not ids.is_cuda  # which torch.fx does not follow
        n = ids.shape[1]
        h = self.words(ids) + self.places(self.numbers[:, :n])
        q, k, v = (f(h).view(-1, n, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        kept = torch.ones(n, n, dtype=torch.bool).tril()
        kept = kept if mask is None else kept & mask[:, None, None].bool()
        scores = (q @ k.transpose(2, 3) / 2).masked_fill(~kept, -1e9)
        return self.head((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, n, 8))


class Sounds(nn.Module):
    """Convolutions over time, then a mean over what is left of it; the number of channels is the example's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 4, 5, stride=2), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: T) -> T:
        assert not x.is_cuda
        y = self.second(self.first(x).relu())
        return y.mean(2) + y.shape[2]


def words(batch: int, n: int) -> T:
    return torch.randint(0, 50, (batch, n))


@pytest.mark.parametrize("compiled", [False, True])
def test_texts_of_any_length(compiled: bool) -> None:
    torch.manual_seed(0)
    model = Texts().eval()
    masked = {"ids": words(1, 7), "mask": torch.ones(1, 7, dtype=torch.long)}
    for example in (words(1, 7), masked):
        net = torch2needle.convert(model, example)
        assert any("ids axis 0, ids axis 1" in note for note in net.report.notes)
        given = tuple(example.values()) if isinstance(example, dict) else (example,)
        run = ndl.compile(net, given) if compiled else net
        for batch, n in ((1, 7), (2, 7), (1, 1), (3, 2), (2, 24), (1, 23)):
            inputs = [words(batch, n)]
            if isinstance(example, dict):
                inputs.append((torch.rand(batch, n) > 0.4).long())
                inputs[1][:, 0] = 1
            np.testing.assert_allclose(run(*inputs).numpy(), model(*inputs).detach().numpy(), rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match=r"input ids expects size 1 to 24 in axis 1, got 25"):
            net(*(words(1, 25) for _ in inputs))


class Fixed(nn.Module):
    """A forward that fixes a size: as a number of Python, by a loop, by an `if` that only the example's answers."""

    def __init__(self, step: Callable[[T, T], T]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: T, other: T) -> T:
        assert len(x)
        return self.step(x, other)


FIXING = {
    "index": lambda x, other: x.sum(0) * operator.index(x.shape[0]) + other.sum(),
    "range": lambda x, other: x.sum(0) + sum(torch.ones(()) * i for i in range(x.shape[0])) + other.sum(),
    "if": lambda x, other: x.sum(0) + (1 if 24 * x.shape[0] == 24 * 2 else 0) + other.sum(),
    "second axis": lambda x, other: x.sum(1)[:1] * operator.index(x.shape[1]) + other.sum(),
    "another's": lambda x, other: x.sum(0) * operator.index(other.shape[1]) + other.sum(),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", FIXING)
def test_sizes_that_a_forward_fixes(name: str, batch: int) -> None:
    """torch.export keeps such a size as a formula without symbols, which is not free: others were wrong without a word."""
    torch.manual_seed(0)
    model, example = Fixed(FIXING[name]).eval(), (torch.randn(batch, 5), torch.randn(batch, 7))
    net = torch2needle.convert(model, example)
    assert np.allclose(net(*example).numpy(), model(*example).numpy(), atol=1e-5)
    taken = 0
    for rows, columns, others in itertools.product((1, 2, 3), (5, 6), (7, 8)):
        given = torch.randn(rows, columns), torch.randn(rows, others)
        try:
            got = net(*given)
        except ValueError as e:
            assert "] input " in str(e) and "expects size" in str(e)
        else:
            assert np.allclose(got.numpy(), model(*given).numpy(), atol=1e-5)
            taken += 1
    assert 0 < taken < 12 or (name == "if" and batch == 1)


class Captions(Texts):
    """Texts beside images."""

    def forward(self, ids: T, image: T) -> T:
        return super().forward(ids) + image.mean((2, 3), keepdim=True).sum(1)


@pytest.mark.parametrize("small", [1, 400])
def test_texts_beside_images(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large graph the heights and widths of images are left as they are, but not the lengths of texts."""
    monkeypatch.setattr(export, "SMALL", small)
    torch.manual_seed(0)
    model = Captions().eval()
    net = torch2needle.convert(model, (words(2, 7), torch.randn(2, 3, 6, 6)))
    for batch, n, side in ((2, 7, 6), (3, 9, 6), (1, 1, 6), (3, 24, 6), (2, 5, 8)):
        given = words(batch, n), torch.randn(batch, 3, side, side)
        if side != 6 and small == 1:
            with pytest.raises(ValueError, match="image expects size 6 in axis 2, got 8"):
                net(*given)
        else:
            assert np.allclose(net(*given).numpy(), model(*given).detach().numpy(), atol=1e-5)


def test_sounds_of_any_length() -> None:
    torch.manual_seed(0)
    model = Sounds().eval()
    net = torch2needle.convert(model, torch.randn(2, 3, 20))
    assert "free sizes: x axis 0, x axis 2" in net.report.notes
    for shape in ((2, 3, 20), (1, 3, 21), (5, 3, 64), (1, 3, 9)):
        x = torch.randn(shape)
        np.testing.assert_allclose(net(x).detach().numpy(), model(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"input x expects size 3 in axis 1, got 4"):
        net(torch.randn(2, 4, 20))


def test_a_budget_ends_what_is_tried() -> None:
    """Nothing but sizes beyond the batch is left out; what the forward catches does not save an attempt."""

    class Catches(Texts):
        def forward(self, ids: T, mask: T | None = None) -> T:
            try:
                return super().forward(ids, mask)
            except Exception:
                return self.head(self.words(ids))

    torch.manual_seed(0)
    for model, seconds in ((Texts().eval(), 0), (Catches().eval(), 2e-3)):
        net = torch2needle.convert(model, words(2, 7), dynamic_budget=seconds)
        assert "free sizes: ids axis 0" in net.report.notes
        assert any(f"dynamic_budget={seconds:g} seconds of processor time ended" in note for note in net.report.notes)
        ids = words(5, 7)
        np.testing.assert_allclose(net(ids).numpy(), model(ids).detach().numpy(), rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="input ids expects size 7 in axis 1, got 8"):
            net(words(2, 8))
    with pytest.raises(ValueError, match="dynamic_budget expects a number of seconds, got -1"):
        torch2needle.convert(Texts().eval(), words(2, 7), dynamic_budget=-1)


@pytest.mark.parametrize("steps", [1, 2, 8, 30])
def test_a_capture_ends_at_any_step_of_its_time(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in what C++ asks of fake tensors, such as in an embedding, would end the process."""
    model, clock, call = Texts().eval(), itertools.count(), ((words(2, 7),), {})
    monkeypatch.setattr(budget, "thread_time", lambda: next(clock))
    assert export.attempt(model, call, {0: (0, 1)}, time=Budget(steps)) is None


def test_formulas_raise_nothing_when_the_time_is_over() -> None:
    """C++ asks for them where an exception would end the process."""
    env, x = ShapeEnv(), sympy.Symbol("x")
    with pytest.raises(OutOfTime), Budget(1e-3).spent("test"):
        sum(range(1_000_000))
        assert env.simplify(x + 1) == x + 1


class Heads(nn.Module):
    """Places that one input says, read from the other one, both with the heads in the batch."""

    def forward(self, places: T, image: T) -> T:
        assert len(places)
        batch, n, _ = places.shape
        grid = places.view(batch, n, 2, 1, 2).permute(0, 2, 1, 3, 4).reshape(batch * 2, n, 1, 2)
        parts = image.view(batch * 2, 4, *image.shape[2:])
        return nn.functional.grid_sample(parts, grid, align_corners=False).view(batch, 8, n)


def test_the_batch_is_free_where_other_sizes_are_fixed_with_it() -> None:
    model = Heads().eval()

    def inputs(batch: int) -> tuple[T, T]:
        return torch.rand(batch, 7, 4) * 2 - 1, torch.randn(batch, 8, 6, 5)

    net = torch2needle.convert(model, inputs(4))
    for batch in (4, 5, 1):
        given = inputs(batch)
        np.testing.assert_allclose(net(*given).numpy(), model(*given).numpy(), atol=1e-5)
