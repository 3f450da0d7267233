"""Linear layers with weights packed once; those that come from the input are packed in the run, if at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from needle.backend_ndarray import NDArray, call
from needle.executor.builder import Builder
from needle.ops.common import rows_of
from needle.ops.linalg.basic import Linear
from needle.targets.layers import NOTHING, Finish, join_rows, operands

from .algorithms import DIRECT, Cost, choose
from .convolution import pad_vector, padded_bias
from .machine import REFERENCES, Runs, numbers
from .target import BLOCK, CPU


def pack_matrix(op: Linear, weight: NDArray) -> NDArray:
    b = op.matrix(weight)
    out = NDArray.empty((-(-b.shape[1] // BLOCK), b.shape[0], BLOCK))
    call("pack_matrix", [out], b=b)
    return out


def pack_strassen(op: Linear, weight: NDArray) -> NDArray:
    b = op.matrix(weight)
    out = NDArray.empty((7 * b.shape[1] // 2 * b.shape[0] // 2 + b.shape[1],))
    call("strassen_pack", [out], b=b)
    return out


KERNELS = {DIRECT: ("matmul_packed", pack_matrix), "strassen": ("matmul_strassen", pack_strassen)}


def linear_costs(m: int, n: int, k: int) -> dict[str, Cost]:
    """Costs of a product (m, k) by (k, n): direct, and by one step of Strassen's algorithm (Numer. Math. 13, 1969)."""
    costs = {DIRECT: Cost(m * n * k / BLOCK, n * k * 4)}
    if k % 2 == 0 and n % (2 * BLOCK) == 0:
        rows, columns, terms = -(-m // 2), n // 2, k // 2
        sums = 50 * rows * terms + 50 * rows * columns  # of rows and of results
        costs["strassen"] = Cost((7 * rows * columns * terms + sums) / BLOCK, 7 * columns * terms * 4)
    return costs


def compared(rows: int, outputs: int, inputs: int) -> Runs:
    """A layer by each algorithm."""
    x, weight, y, op = numbers(rows, inputs), numbers(outputs, inputs), NDArray.empty((rows, outputs)), Linear("torch")

    def run(kernel: str, packed: NDArray) -> Callable[[], None]:
        return lambda: call(kernel, [y], a=x, packed=packed, bias=None, residual=None, activation=0, alpha=0)

    return {name: run(kernel, make(op, weight)) for name, (kernel, make) in KERNELS.items()}


for m, n, k in ((512, 256, 1024), (512, 1024, 256)):
    REFERENCES[f"linear {m}x{k} to {n}"] = (partial(compared, m, n, k), linear_costs(m, n, k))


@CPU.lowers(Linear)
def linear(builder: Builder, op: Linear, ins: list[NDArray], out: NDArray, finish: Finish = NOTHING) -> None:
    x, weight, bias = operands(ins)
    if not all(builder.is_constant(a) for a in ins[1:]) or any(a.dtype != "float32" for a in ins):
        finish.plainly(op, out, ins)
        return
    rows, target = rows_of(x), rows_of(out)
    (m, n), k = target.shape, rows.shape[1]
    residual = None if finish.residual is None else rows_of(finish.residual)
    rest: dict[str, Any] = {"a": rows, "bias": padded_bias(builder, bias), "residual": residual, **finish.attrs}
    made = lambda name: builder.has_derived((name, op.layout_of_weight), weight)  # noqa: E731
    name = choose(builder, ("linear {}x{} to {}", m, k, n), linear_costs(m, n, k), made)
    kernel, make = KERNELS[name]
    packed = builder.derive((name, op.layout_of_weight), partial(make, op), weight)
    call(kernel, [target], packed=packed, **rest)


def join_and_pack(*weights: NDArray) -> NDArray:
    return pack_matrix(Linear(), join_rows(*weights))


def join_and_pad(*biases: NDArray) -> NDArray:
    return pad_vector(join_rows(*biases))


@CPU.lowers_joined
def joined(builder: Builder, x: NDArray, out: NDArray, weights: Sequence[NDArray], biases: Sequence[NDArray]) -> None:
    packed = builder.derive("join_and_pack", join_and_pack, *weights)
    bias = builder.derive("join_and_pad", join_and_pad, *biases) if biases else None
    call("matmul_packed", [rows_of(out)], a=rows_of(x), packed=packed, bias=bias, activation=0, alpha=0)
