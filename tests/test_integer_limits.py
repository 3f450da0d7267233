"""Differences with the smallest integer, which has no opposite of its own dtype, for all dtypes and with tensors without axes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import needle as ndl
import torch2needle

DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


class Differences(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x - y, y - x, 3 - x, x - 2.5, torch.rsub(x, y)


@pytest.mark.parametrize(("a", "b"), itertools.product(DTYPES, DTYPES), ids=str)
@pytest.mark.parametrize("places", [(..., ...), (..., 0), (0, ...), (0, 0)], ids=str)
def test_differences(a: torch.dtype, b: torch.dtype, places: tuple) -> None:
    x, y = torch.tensor([-(2**31), 2]).to(a)[places[0]], torch.tensor([-(2**31), 3]).to(b)[places[1]]
    model = Differences().eval()
    want = model(x, y)
    for example in (None, (x, y)):
        net = torch2needle.convert(model, example)
        for run in (net, ndl.compile(net, (x, y))):
            for got, theirs in zip(run(x, y), want, strict=True):
                assert str(got.dtype).rpartition(".")[2] == str(theirs.dtype).rpartition(".")[2]
                np.testing.assert_array_equal(np.asarray(got), theirs.numpy())


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40, math.inf, math.nan])
def test_pads_that_the_dtype_cannot_hold(value: float) -> None:
    x = torch.ones((2, 2), dtype=torch.int32)
    with pytest.raises(RuntimeError, match="overflow"):
        torch.nn.functional.pad(x, (0, 1), value=value)
    for device in (ndl.cpu(), ndl.cpu_numpy()):
        ours = ndl.Tensor(np.ones((2, 2)), dtype="int32", device=device, requires_grad=False)
        with pytest.raises(ValueError, match=r"^\[pad\] value expects a number that int32 can hold, got "):
            ndl.ops.pad(ours, (0, 1), value=value)
