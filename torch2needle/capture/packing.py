"""Packed sequences, for torch.export: rows stay padded, with their lengths, and layers take the lengths.

Torch's own packed form has as many rows as values say, which no graph knows before it runs. It is computed where the forward
reads it: `.data` and `.batch_sizes` are as torch gives them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

from .asked import ASKED, LIBRARY
from .guard import patched

Layer = nn.LSTM | nn.GRU | nn.RNN
LIBRARY.define(
    "rows(Tensor x, Tensor lengths, Tensor[] hx, Tensor[] weights, int[] sizes, bool both, bool batch_first) "
    "-> Tensor[]"
)
ROWS = torch.ops.torch2needle.rows.default
FALLING = "lengths of packed rows, which fall from no more than there are steps to at least 1"


@torch.library.register_fake("torch2needle::rows")
def shapes(x: Any, lengths: Any, hx: Any, weights: Any, sizes: list[int], both: bool, batch_first: bool) -> list[Any]:
    """sizes: of the parts of a state."""
    per_cell = 2 + 2 * any(w.ndim == 1 for w in weights) + (sizes[0] != sizes[-1])
    last = (len(weights) // per_cell, x.shape[0 if batch_first else 1])
    return [x.new_empty((*x.shape[:2], (1 + both) * sizes[0])), *(x.new_empty((*last, n)) for n in sizes)]


class Rows(NamedTuple):
    """How rows are packed: lengths (B,) that fall, mask (T, B) of the steps that there are."""

    lengths: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, lengths: torch.Tensor, steps: Any) -> Rows:
        return cls(lengths, torch.arange(steps)[:, None] < lengths[None])


class Packing:
    """Stands for torch's functions of packed sequences during one capture."""

    def __init__(self) -> None:
        self.rows: dict[int, Rows] = {}  # by id of `.batch_sizes`
        self.places: dict[int, Any] = {}  # of the mask's steps, by the same id
        self.padded: dict[int, torch.Tensor] = {}  # (T, B, ...), by id of `.data`
        self.alive: list[Any] = []  # so that ids stay theirs

    def patches(self) -> AbstractContextManager:
        own = types.SimpleNamespace(_pack_padded_sequence=self.pack, _pad_packed_sequence=self.pad)
        layers = [(cls, "forward", self.forward(cls.forward)) for cls in (nn.LSTM, nn.GRU, nn.RNN)]
        return patched([(vars(rnn), "_VF", own), *layers])

    def pack(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.transpose(0, 1) if batch_first else x
        rows = Rows.of(lengths, x.shape[0])
        falling = lengths == torch.sort(lengths, descending=True)[0]
        fits = (falling & (lengths >= 1) & (lengths <= x.shape[0])).all()
        ASKED(fits, [1.0], FALLING)
        batch_sizes = rows.mask.sum(1)[rows.mask.any(1)]
        torch._check(batch_sizes.shape[0] <= x.shape[0])
        self.alive.append(batch_sizes)
        self.rows[id(batch_sizes)] = rows
        return self.packed(x, batch_sizes), batch_sizes

    def packed(self, x: torch.Tensor, batch_sizes: torch.Tensor) -> torch.Tensor:
        """`.data` of padded rows."""
        if id(batch_sizes) not in self.places:
            self.places[id(batch_sizes)] = self.rows[id(batch_sizes)].mask.nonzero().unbind(1)
        data = x[self.places[id(batch_sizes)]]
        self.alive.append(data)
        self.padded[id(data)] = x
        return data

    def opened(
        self, data: torch.Tensor, batch_sizes: torch.Tensor, indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Rows]:
        """Padded rows (T, B, ...) of what the forward, or its caller, packed."""
        if id(batch_sizes) not in self.rows:
            count: Any = int(batch_sizes[0]) if indices is None else indices.shape[0]
            lengths = (batch_sizes[:, None] > torch.arange(count)[None]).sum(0)
            self.rows[id(batch_sizes)] = Rows.of(lengths, batch_sizes.shape[0])
            self.alive.append(batch_sizes)
        rows = self.rows[id(batch_sizes)]
        if id(data) not in self.padded:
            counts = rows.mask.sum(1)
            index = (counts.cumsum(0) - counts)[:, None] + torch.arange(rows.mask.shape[1])[None]
            x = data[index.clamp(max=data.shape[0] - 1)]
            self.padded[id(data)] = torch.where(wide(rows.mask, x), x, torch.zeros((), dtype=x.dtype))
            self.alive.append(data)
        return self.padded[id(data)], rows

    def pad(
        self, data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, rows = self.opened(data, batch_sizes)
        steps = x.shape[0]
        x = torch.where(wide(rows.mask, x), x, torch.full((), value, dtype=x.dtype))
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # which loads sympy

        whole = statically_known_true(total == steps)
        if str(total) == str(batch_sizes.shape[0]) and not whole:  # as many as there are
            x = x[rows.mask.any(1)]
        elif not whole:
            ASKED(rows.lengths[0] <= total, [1.0], "total_length, which is no less than the lengths")
            x = F.pad(x, (0, 0) * (x.ndim - 1) + (0, total - steps), value=value) if total > steps else x[:total]
        return x.transpose(0, 1) if batch_first else x, rows.lengths

    def forward(self, before: Callable) -> Callable:
        """A layer's forward; of packed rows it is one call of ROWS."""

        def forward(layer: Layer, input: Any, hx: Any = None) -> Any:
            if not isinstance(input, rnn.PackedSequence):
                return before(layer, input, hx)
            data, batch_sizes, order, back = input
            x, rows = self.opened(data, batch_sizes, order)
            long = isinstance(layer, nn.LSTM)
            state = () if hx is None else layer.permute_hidden(hx, order)  # type: ignore[arg-type]
            given = list(state) if long or hx is None else [state]
            x = x.transpose(0, 1) if layer.batch_first else x
            sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 1 + long]
            how = sizes, layer.bidirectional, layer.batch_first
            y, *last = ROWS(x, rows.lengths, given, layer._flat_weights, *how)
            data = self.packed(y.transpose(0, 1) if layer.batch_first else y, batch_sizes)
            last = layer.permute_hidden(tuple(last) if long else last[0], back)  # type: ignore[arg-type]
            return rnn.PackedSequence(data, batch_sizes, order, back), last

        return forward


def wide(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return mask.reshape(*mask.shape, *[1] * (x.ndim - 2))


def run(layer: Layer, x: torch.Tensor, state: Any = None, *, lengths: torch.Tensor) -> Any:
    """What needle's layer gives for padded rows and lengths, by torch's."""
    rows = rnn.pack_padded_sequence(x, lengths.cpu(), layer.batch_first, enforce_sorted=False)
    y, last = layer(rows, state)
    return rnn.pad_packed_sequence(y, layer.batch_first, total_length=x.shape[int(layer.batch_first)])[0], last
