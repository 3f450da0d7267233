"""Writes into parts of tensors: what they give, and that plans write once, where the tensor is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import torch2needle
from conversion import converts

SHAPE = (3, 6, 8)


class Case(NamedTuple):
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    steps: int  # of a plan, at most


def part_of_part(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[:, 1:][..., 2:] += r[:, 1:, 2:]
    return x.relu()


def again(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[1:] = r[1:]
    x[1:] = x[1:] + r[:-1]
    return x.relu()


def whole(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[:] = x + r
    return x.relu()


def whole_by_size(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[0:3, ..., 0:8] = x - r
    return x.relu()


def beside(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[0] = r[1]
    x[1:, 2] = r[1:, 2]
    return x.relu()


def shifted(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """What is read lies over what is written."""
    x = x * 2
    x[1:] = x[:-1] + r[1:]
    x[..., 1:] = x[..., :-1] - r[..., 1:]
    return x.relu()


def kept(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """The tensor is read as it was before."""
    x = x * 2
    before = x.relu()
    y = x.clone()
    y[:, 3] = r[:, 3]
    return y.relu() + before + x


def part_by_part(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x * 2
    part = x[:, 1:]
    part[..., 0] = r[:, 1:, 0]
    part[..., 1] = part[..., 0] + r[:, 1:, 1]
    part[..., 3:] += 1.0
    return x.relu() + part.sum()


def number(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x + r
    x[:, ::2] = 1.5
    x[..., 1:][:, 0] = -1.0
    return x.relu()


def other_dtype(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[:] = (r > 0) & (x > 0)
    return x.relu()


def spread(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[...] = r[0, 0]
    return x.relu()


CASES = {
    "part of part": Case(part_of_part, 4),
    "again": Case(again, 4),
    "whole": Case(whole, 1),
    "whole by size": Case(whole_by_size, 1),
    "beside": Case(beside, 4),
    "shifted": Case(shifted, 7),
    "kept": Case(kept, 3),
    "part by part": Case(part_by_part, 11),
    "number": Case(number, 4),
    "other dtype": Case(other_dtype, 1),
    "spread": Case(spread, 3),
}


class Program(nn.Module):
    def __init__(self, run: Callable) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return self.run(x, r)


@pytest.mark.parametrize("capture", ["fx", "export"])
@pytest.mark.parametrize("name", CASES)
def test_writes(name: str, capture: str) -> None:
    run, steps = CASES[name]
    x, r = torch.randn(SHAPE), torch.randn(SHAPE)
    model = Program(run)
    converts(model, x, r, example=True, batch="by size" not in name)
    net = torch2needle.convert(torch.export.export(model, (x, r)) if capture == "export" else model)
    exe = ndl.compile(net, (x.numpy(), r.numpy()))
    np.testing.assert_allclose(exe(x.numpy(), r.numpy()), run(x, r).numpy(), rtol=1e-6, atol=1e-6)
    assert len(exe.profile(x.numpy(), r.numpy())) <= steps


def to_eight(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """A write over all of eight rows, and over a part of more."""
    x = x * 2
    x[:, 0:8] = x[:, 0:8] + r[:, 0:8]
    x[:, 1:][..., 1:] += r[:, 1:, 1:]
    return x.relu()


@pytest.mark.parametrize("sizes", [(8, 9, 12, 8, 7), (12, 9, 8, 20)])
def test_other_sizes(sizes: tuple[int, ...]) -> None:
    first = torch.randn(2, sizes[0], 5)
    net = torch2needle.convert(Program(to_eight), (first, first), dynamic={"x": {1}, "r": {1}})
    exe = ndl.compile(net, (first.numpy(), first.numpy()))
    for n in sizes:
        x, r = torch.randn(2, n, 5), torch.randn(2, n, 5)
        for got in (net(ndl.Tensor(x.numpy()), ndl.Tensor(r.numpy())), exe(x.numpy(), r.numpy())):
            np.testing.assert_allclose(
                np.asarray(got.numpy() if isinstance(got, ndl.Tensor) else got), to_eight(x, r), rtol=1e-6
            )
