"""Norms of rows as part of the product that makes them, in plans on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import needle as ndl
from needle import ops
from needle.ops.nn.layer_norm import RMSNorm

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def normal(*shape: int) -> ndl.Tensor:
    return ndl.Tensor(RNG.standard_normal(shape).astype("float32"), requires_grad=False)


class Block(ndl.nn.Module):
    """norm(x W + b + y): `kept` tells whether the sums are read by others, too."""

    def __init__(self, inputs: int, outputs: int, norm: str, added: bool, kept: bool) -> None:
        super().__init__()
        self.linear = ndl.nn.Linear(inputs, outputs, layout="torch", bias=norm != "rms")
        self.weight, self.shift = ndl.nn.Parameter(normal(outputs)), ndl.nn.Parameter(normal(outputs))
        self.norm, self.added, self.kept = norm, added, kept

    def forward(self, x: ndl.Tensor, y: ndl.Tensor) -> ndl.Tensor:
        sums = self.linear(x)
        sums = sums + y if self.added else sums
        if self.norm == "rms":
            rows = RMSNorm(1, 1e-6, True)(sums, self.weight)
        elif self.norm == "plain":
            rows = ops.layer_norm(sums)
        else:
            rows = ops.layer_norm(sums, self.weight, self.shift)
        return (rows, sums) if self.kept else rows  # type: ignore[return-value]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 16, 16), (5, 3, 17), (64, 40, 100), (65, 1024, 33), (200, 2048, 96), (131, 7, 1), (300, 64, 512)],
)
def test_one_step(rows: int, inputs: int, outputs: int, threads: int) -> None:
    before = ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        for norm, added, kept in (
            ("layer", True, False),
            ("rms", True, True),
            ("plain", False, True),
            ("layer", False, False),
        ):
            net, given = Block(inputs, outputs, norm, added, kept).eval(), (normal(rows, inputs), normal(rows, outputs))
            exe, apart = (ndl.compile(net, given, winograd="off", disable=off) for off in ((), ("LinearNorm",)))
            assert exe.plan.names == ["matmul_norm"]
            for a, b in zip(*(exe(*given), apart(*given)) if kept else ((exe(*given),), (apart(*given),)), strict=True):
                np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=2e-5)
            firsts = [(exe(*given)[0] if kept else exe(*given)).numpy() for _ in range(4)]
            assert all(np.array_equal(f, firsts[0]) for f in firsts)  # whoever finishes a block
    finally:
        ndl.set_num_threads(before)


def test_rows_of_several_axes_and_what_is_refused() -> None:
    """A norm over other rows than the product's, of a product that is activated or read before, stays a step."""
    weight, x = ndl.nn.Parameter(normal(6, 8)), normal(2, 5, 8)
    cases = {
        "rows": (lambda t: ops.layer_norm(ops.linear(t, weight)), ["matmul_norm"]),
        "two axes": (lambda t: ops.layer_norm(ops.linear(t, weight), axes=2), ["matmul_packed", "layer_norm"]),
        "activated": (lambda t: ops.layer_norm(ops.relu(ops.linear(t, weight))), None),
        "alone": (lambda t: ops.layer_norm(ops.permute(ops.linear(t, weight), (1, 0, 2))), None),
    }
    for f, kernels in cases.values():
        exe = ndl.compile(f, (x,), winograd="off")
        taken = exe.plan.names
        assert taken == kernels if kernels else "matmul_norm" not in taken
        np.testing.assert_allclose(exe(x).numpy(), f(x).numpy(), rtol=1e-5, atol=1e-5)
