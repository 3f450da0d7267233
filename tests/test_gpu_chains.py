"""Chains of maps as one kernel on GPU devices: every result has the bits of the maps' own kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import needle as ndl
import torch2needle
from needle import _core, nn, ops
from needle.backend_ndarray import Device, NDArray, call
from needle.backend_ndarray.kernels import KERNELS, call_map
from needle.targets.chains import COPY, INPUTS, OUTPUTS, SLOTS, TRUTHS

LENGTH = 32  # rows of a program
MAPS = {name: number for number, name in enumerate(_core.MAPS) if "float32" in KERNELS[name].dtypes}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38, 88.8, -103.5, 2.0**23 + 1]
SHAPES = [(1,), (3,), (4,), (1027,), (5, 7), (3, 64), (2, 3, 5, 8), (2, 1, 33), (1, 1), (130, 6), (2, 5, 4, 4)]


class Row(NamedTuple):
    """What computes, of which inputs (from 0 on) or slots (from 8 on), in which slot it stays and which output it is."""

    map: str
    operands: list[int]
    slot: int
    output: int
    attrs: list[float]

    @property
    def numbers(self) -> list[float]:
        operands, attrs = [*self.operands, 0, 0][:3], [*self.attrs, 0, 0][:2]
        return [MAPS.get(self.map, COPY), *operands, self.slot, self.output, *attrs]


def run_chain(rows: list[Row], inputs: list[NDArray], outputs: list[NDArray]) -> None:
    program = NDArray(np.array([r.numbers for r in rows]), outputs[0].device, "float64")
    outs = [*outputs, *outputs[:1] * (len(OUTPUTS) - len(outputs))]
    slots = 1 + max(r.slot for r in rows)
    call("chain", outs, program=program, **dict(zip(INPUTS, inputs, strict=False)), slots=slots)


def run_alone(rows: list[Row], inputs: list[NDArray], outputs: list[NDArray]) -> None:
    """The same, a kernel for each row."""
    shape, device = outputs[0].shape, outputs[0].device
    values: dict[int, NDArray] = {i: x.astype("float32") for i, x in enumerate(inputs)}
    for r in rows:
        operands = [values[k] for k in r.operands]
        made = NDArray.empty(shape, "float32", device)
        call_map(r.map, made, operands, r.attrs) if r.map != "copy" else call("copy", [made], x=operands[0])
        values[len(INPUTS) + r.slot] = made
        if r.output >= 0:
            call("copy", [outputs[r.output]], x=made)


def same_bits(got: NDArray, want: NDArray) -> None:
    a, b = got.numpy(), want.numpy()
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a[a == 0]), np.signbit(b[b == 0]))


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    a = rng.standard_normal(shape).astype("float32") * 3
    return np.where(rng.random(shape) < 0.2, rng.choice(np.array(SPECIAL, "float32"), shape), a)


def spread(rng: np.random.Generator, shape: tuple[int, ...], device: Device, dtype: str, kind: str) -> NDArray:
    """An array of this shape: dense, every other element of a mirrored one, in another order, or with steps of 0."""
    if kind == "mirrored":
        x = NDArray(drawn(rng, tuple(2 * n for n in shape)), device).astype(dtype)
        return x[tuple(slice(None, None, -2) for _ in shape)]
    if kind == "turned":
        return NDArray(drawn(rng, shape[::-1]), device).astype(dtype).permute(tuple(range(len(shape)))[::-1])
    if kind == "broadcast":
        narrow = tuple(1 if rng.random() < 0.5 else n for n in shape)
        return NDArray(drawn(rng, narrow), device).astype(dtype).broadcast_to(shape)
    return NDArray(drawn(rng, shape), device).astype(dtype)


@pytest.mark.parametrize("kind", ["dense", "broadcast", "mirrored"])
@pytest.mark.parametrize("name", MAPS)
def test_every_map(gpu: Device, name: str, kind: str) -> None:
    rng = np.random.default_rng(MAPS[name])
    kernel = KERNELS[name]
    for shape in [(403,), (3, 21)]:
        inputs = [spread(rng, shape, gpu, "float32", kind) for _ in kernel.inputs]
        rows = [Row(name, list(range(len(inputs))), 0, 0, [0.7, 1.9][: len(kernel.attrs)])]
        got, want = (NDArray.empty(shape, "float32", gpu) for _ in range(2))
        run_chain(rows, inputs, [got])
        call_map(name, want, inputs, rows[0].attrs)
        same_bits(got, want)


def draw(rng: np.random.Generator, inputs: int, length: int) -> list[Row]:
    rows, written, free = list[Row](), list[int](), 0
    kept = set(rng.choice(length, min(length, len(OUTPUTS)), replace=False)) | {length - 1}
    for i in range(length):
        name = str(rng.choice([*MAPS, "copy"]))
        known = [*range(inputs), *(len(INPUTS) + s for s in written)]
        operands = [int(k) for k in rng.choice(known, len(KERNELS[name].inputs))]
        slot = int(rng.integers(SLOTS))
        written = sorted({*written, slot})
        attrs = list(rng.standard_normal(len(KERNELS[name].attrs)))
        output = free if i in kept and free < len(OUTPUTS) else -1
        free += output >= 0
        rows.append(Row(name, operands, slot, output, attrs))
    return rows


def output_of(rng: np.random.Generator, shape: tuple[int, ...], device: Device, row: Row, kind: str) -> NDArray:
    of_truths = ["bool", "int32", "int64", "float64", "float32"]
    dtype = str(rng.choice(of_truths if row.map in TRUTHS else ["float32", "float32", "float64"]))
    return spread(rng, shape, device, dtype, kind)


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(gpu: Device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    n = 8 if seed % 5 == 0 else int(rng.integers(1, 9))
    rows = draw(rng, n, LENGTH if seed % 7 == 0 else int(rng.integers(1, 12)))
    kinds = ["dense", "dense", "broadcast", "mirrored", "turned"]
    dtypes = ["float32", "float32", "bool", "int32", "int64", "float64"]
    with np.errstate(all="ignore"):
        inputs = [spread(rng, shape, gpu, str(rng.choice(dtypes)), str(rng.choice(kinds))) for _ in range(n)]
    kind = str(rng.choice(["dense", "dense", "mirrored", "turned"]))
    stored = [output_of(rng, shape, gpu, r, kind) for r in rows if r.output >= 0]
    alone = [NDArray.empty(shape, y.dtype, gpu) for y in stored]
    run_chain(rows, inputs, stored)
    run_alone(rows, inputs, alone)
    for got, want in zip(stored, alone, strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("columns", [2, 3, 7])
def test_several_quads_a_thread(gpu: Device, columns: int) -> None:
    """Of large arrays, by the shared memory that the values take."""
    rng = np.random.default_rng(columns)
    x, row = drawn(rng, (131, 3001)), drawn(rng, (3001,))
    inputs = [NDArray(x, gpu), NDArray(row, gpu).broadcast_to(x.shape)][:columns]
    first = Row("mul_scalar", [0], columns - 2, -1, [0.5])
    rows = [first, Row("maximum", [len(inputs) - 1, 8 + first.slot], 0, 0, [])]
    got, want = (NDArray.empty(x.shape, "float32", gpu) for _ in range(2))
    run_chain(rows, inputs, [got])
    run_alone(rows, inputs, [want])
    same_bits(got, want)


def test_in_place_and_empty(gpu: Device) -> None:
    x = drawn(np.random.default_rng(0), (5, 101))
    rows = [Row("relu", [0], 0, -1, []), Row("add_scalar", [8], 1, 0, [2.5])]
    got, want, none = NDArray(x, gpu), NDArray.empty(x.shape, "float32", gpu), NDArray.empty((0, 3), "float32", gpu)
    run_alone(rows, [got], [want])
    run_chain(rows, [got], [got])
    same_bits(got, want)
    run_chain(rows, [none], [none])


def test_too_much(gpu: Device) -> None:
    x = NDArray(np.ones(3, "float32"), gpu)
    program: Any = [Row("neg", [0], 0, 0, [])] * (LENGTH + 1)
    with pytest.raises(RuntimeError, match=r"\[chain\] a program has at most 32 maps, got 33\."):
        run_chain(program, [x], [x])
    with pytest.raises(RuntimeError, match=r"\[chain\] a program has at most 8 slots, got 9\."):
        run_chain([Row("neg", [0], 8, 0, [])], [x], [x])


class Block(torch.nn.Module):
    """A depthwise convolution, squeeze and excitation, a scale of channels, what is added, activations of several maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = torch.nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.gate = torch.nn.Conv2d(width, width, 1)
        self.scale = torch.nn.Parameter(torch.full((width, 1, 1), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(x)
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return torch.log1p((x + self.scale * y).abs()) * torch.where(y > 0, y, 0.1)


@pytest.mark.parametrize("width,size", [(8, 6), (5, 7)])
def test_images(gpu: Device, width: int, size: int) -> None:
    """They lie channels-last, with factors of channels that are the same everywhere."""
    model, x = Block(width).eval(), torch.randn(2, width, size, size)
    example = (ndl.Tensor(x.numpy(), device=gpu),)
    net = torch2needle.convert(model, (x,)).to(gpu).eval()
    with_chains, without = (ndl.compile(net, example, disable=d) for d in ([], ["ElementwiseChain"]))
    got, want = with_chains(x.numpy()), model.double()(x.double()).detach().numpy()
    np.testing.assert_array_equal(got, without(x.numpy()))
    assert np.abs(got - want).max() < 5e-6 * np.abs(want).max()
    assert "chain" in with_chains.plan.names
    assert len(with_chains.plan.names) <= len(without.plan.names) - 4


def test_two_maps_are_one_step(gpu: Device) -> None:
    x = ndl.Tensor(drawn(np.random.default_rng(0), (3, 5)), device=gpu)
    exe = ndl.compile(lambda x: ops.tanh(x * 2.0), (x,))
    assert exe.plan.names == ["chain"]
    np.testing.assert_array_equal(exe(x).numpy(), ops.tanh(x * 2.0).numpy())


class Mean(nn.Module):
    def forward(self, out: ndl.Tensor, target: ndl.Tensor) -> ndl.Tensor:
        return ops.mean((out - target) ** 2)


def test_training(gpu: Device) -> None:
    """A step's chains of both passes, on parameters that it changes."""

    def train(disable: list[str]) -> tuple[Any, list[np.ndarray]]:
        torch.manual_seed(0)
        x = torch.randn(2, 8, 6, 6)
        net = torch2needle.convert(Block(8), (x,)).to(gpu).train()
        example = tuple(ndl.Tensor(a, device=gpu) for a in (x.numpy(), x.numpy() / 2))
        optimizer = ndl.optim.SGD(net.parameters(), lr=0.1)
        step = ndl.compile_step(net, Mean(), optimizer, example, disable=disable)
        losses = [step(*example).numpy() for _ in range(3)]
        return step.plan.names, [*losses, *(t.numpy() for _, t in net.named_tensors())]

    (chained, got), (plain, want) = train([]), train(["ElementwiseChain"])
    assert chained.count("chain") >= 2
    assert len(chained) <= len(plain) - 8
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
