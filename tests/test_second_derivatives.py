"""Gradients of gradients, for every op with samples: each op that has a gradient has a second one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle.autograd import OPS, Tensor
from needle.ops.common import vjp
from test_ops import OWN, case, cotangents, differentiable, gradients, tensors

EPS = 1e-5


OWN_CASES = [pytest.param(n, i, id=f"{n}-{i}") for n in OWN for i in range(len(OPS[n].samples()))]


@pytest.mark.parametrize(("name", "index"), OWN_CASES)
def test_second_derivative(name: str, index: int) -> None:
    """d/dx of <v, gradient of sum(weight * op(x))>, in float64, against finite differences of the gradient."""
    op, arrays = case(name, index)
    if not differentiable(name, op, arrays):
        pytest.skip("no gradient by definition")
    weights = cotangents(op, arrays)
    floating = [i for i, a in enumerate(arrays) if a.dtype.kind == "f"]
    directions = {i: np.random.randn(*arrays[i].shape) for i in floating}

    def slope(xs: list[Tensor]) -> Any:
        """<directions, gradient> as a tensor; None where no gradient flows."""
        total = None
        for i, g in enumerate(gradients(op, xs, weights)):
            if g is not None and i in directions:
                part = (g * Tensor(directions[i], device=g.device, dtype=g.dtype, requires_grad=False)).sum()
                total = part if total is None else total + part
        return total

    def value(moved: list[np.ndarray]) -> float:
        total = slope(tensors(moved, True))
        return 0.0 if total is None else float(total.numpy())

    xs = tensors(arrays, True)
    total = slope(xs)
    one = ndl.init.ones(device=ndl.cpu_numpy(), dtype="float64")
    second = vjp(total, one, xs) if total is not None else (None,) * len(xs)
    for i in floating:
        got = np.zeros(arrays[i].shape) if second[i] is None else second[i].numpy()
        for j in np.random.permutation(arrays[i].size)[:4]:
            ends = []
            for step in (EPS, -EPS):
                moved = [a.copy() for a in arrays]
                moved[i].reshape(-1)[j] += step
                ends.append(value(moved))
            want = (ends[0] - ends[1]) / (2 * EPS)
            assert abs(got.reshape(-1)[j] - want) <= 1e-4 * max(1.0, abs(want), float(np.abs(got).max(initial=0)))


def test_one_tensor_as_input_and_gradient() -> None:
    """d/dx of x * gelu'(x), where the gradient's op has x in both places."""
    x = Tensor(np.random.randn(3, 4).astype("float32"))
    (slope,) = vjp(ndl.ops.gelu(x), x, [x])
    (got,) = vjp(slope.sum(), ndl.init.ones(), [x])
    theirs = torch.tensor(x.numpy().astype("float64"), requires_grad=True)
    (slopes,) = torch.autograd.grad(torch.nn.functional.gelu(theirs), theirs, theirs, create_graph=True)
    (want,) = torch.autograd.grad(slopes.sum(), theirs)
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-5)
