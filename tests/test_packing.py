"""Kernels that pack weights against numpy, bit by bit: any strides, channels that fill no block, groups, every ISA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from needle.backend_ndarray import NDArray, array, call
from needle.targets.cpu.convolution import Grouping, Row, pack_depthwise
from needle.targets.cpu.convolution import pack as pack_convolution
from needle.targets.cpu.winograd import F2, F4
from needle.targets.cpu.winograd import pack as pack_winograd

BLOCK = 16
# How weights (O, I, H, W) may lie in memory; those of a data gradient are swapped and flipped.
VIEWS: dict[str, Callable[[NDArray], NDArray]] = {
    "contiguous": lambda w: w,
    "flipped": lambda w: array(w.numpy()[:, :, ::-1, ::-1].copy()).flip((2, 3)),
    "flipped-rows": lambda w: array(w.numpy()[:, :, ::-1].copy()).flip((2,)),
    "swapped": lambda w: in_memory(w, (1, 0, 2, 3)),
    "gradient": lambda w: in_memory(array(w.numpy()[:, :, ::-1, ::-1].copy()), (1, 0, 2, 3)).flip((2, 3)),
    "channels-last": lambda w: in_memory(w, (0, 2, 3, 1)),
    "outputs-last": lambda w: in_memory(w, (2, 3, 1, 0)),
    "columns-first": lambda w: in_memory(w, (3, 2, 0, 1)),
    "slice": lambda w: array(np.pad(w.numpy(), 1))[tuple(slice(1, 1 + n) for n in w.shape)],
    "every-second": lambda w: array(np.repeat(np.repeat(w.numpy(), 2, 0), 2, 3))[::2, :, :, ::2],
    "broadcast": lambda w: array(w.numpy()[:1]).broadcast_to(w.shape),
}
CONVOLUTIONS = [  # outputs, inputs, groups, kernel
    (1, 1, 1, (1, 1)),
    (16, 16, 1, (3, 3)),
    (33, 17, 1, (3, 3)),
    (100, 150, 1, (3, 3)),
    (80, 5, 1, (7, 7)),
    (5, 80, 1, (1, 1)),
    (20, 24, 1, (1, 3)),
    (24, 20, 1, (3, 1)),
    (16, 16, 16, (3, 3)),
    (32, 32, 2, (3, 3)),
    (24, 12, 6, (3, 2)),
    (64, 256, 4, (1, 1)),
    (96, 48, 3, (5, 5)),
    (32, 32, 8, (3, 3)),
    (40, 40, 5, (3, 3)),
    (72, 72, 3, (1, 3)),
    (54, 36, 18, (3, 1)),
    (51, 34, 17, (2, 2)),
    (48, 16, 16, (3, 3)),
    (20, 60, 10, (1, 1)),
    (85, 51, 17, (1, 2)),
]
MATRICES = [(1, 1), (5, 7), (64, 32), (34, 96), (100, 130), (1030, 64)]


def in_memory(w: NDArray, axes: tuple[int, ...]) -> NDArray:
    """A view of the shape of `w` whose memory has these axes in this order."""
    return array(np.ascontiguousarray(w.numpy().transpose(axes))).permute(tuple(int(a) for a in np.argsort(axes)))


def unpacked(packed: np.ndarray, grouping: Grouping, taps: int, phases: list[list[int]]) -> np.ndarray:
    """What packed weights hold, as (output, input, tap) of a convolution without groups; every weight comes once.

    Panels of 16 outputs are [phase][chunk][tap of the phase][term][lane]. A term has the weights of one input for all lanes,
    or those of an input for each of them at several neighbouring taps, after their places in the chunk.
    """
    groups, inputs, outputs, block = grouping
    _, _, terms, lanes = packed.shape
    joined = max(1, lanes // BLOCK - 1)
    step, blocks = (block if lanes > BLOCK else terms), -(-groups * outputs // BLOCK)
    found = np.zeros((blocks * BLOCK, -(-groups * inputs // step) * step, taps), "float32")
    rest = packed.reshape(-1, lanes)
    for b in range(blocks):
        last = min((b + 1) * BLOCK, groups * outputs) - 1
        chunks = range(b * BLOCK // outputs * inputs // step, -(-(last // outputs + 1) * inputs // step))
        for phase in filter(None, phases):
            every = range(0, len(phase), joined)
            chunk, tap, term = (i.reshape(-1, 1) for i in np.meshgrid(chunks, every, range(terms), indexing="ij"))
            rows, rest = rest[: len(chunk)], rest[len(chunk) :]
            picked = rows[:, :BLOCK].view("int32") if lanes > BLOCK else term
            for t, weights in enumerate(np.split(rows, lanes // BLOCK, 1)[-joined:]):
                at = np.arange(b * BLOCK, (b + 1) * BLOCK), chunk * step + picked, np.array(phase)[tap + t]
                np.add.at(found, at, weights)
    assert rest.size == 0 and not found[groups * outputs :].any() and not found[:, groups * inputs :].any()
    return found[: groups * outputs, : groups * inputs]


def convolution(view: str, transposed: bool, case: tuple[int, int, int, tuple[int, int]]) -> bool:
    outputs, inputs, groups, (h, w) = case
    rng = np.random.default_rng(outputs + h)
    shape = (inputs, outputs // groups, h, w) if transposed else (outputs, inputs // groups, h, w)
    weight = VIEWS[view](array(rng.standard_normal(shape).astype("float32")))
    grouping = Grouping(groups, inputs // groups, outputs // groups, min(BLOCK, inputs))
    taps, attrs = [(y, x) for y in range(h) for x in range(w)], {}
    plain, phases = weight.numpy(), [taps]
    if transposed:
        (sh, sw), (dh, dw) = (2, 2) if h > 1 else (1, 1), (1, 2) if w > 2 else (1, 1)
        attrs |= {"stride_h": sh, "stride_w": sw, "dilation_h": dh, "dilation_w": dw}
        remainders = [(y, x) for y in range(sh) for x in range(sw)]
        phases = [[t for t in taps[::-1] if (t[0] * dh % sh, t[1] * dw % sw) == r] for r in remainders]
        plain = plain.reshape(groups, -1, *shape[1:]).swapaxes(1, 2).reshape(outputs, -1, h, w)
    kernel, row = ("conv_transpose2d_pack", Row(1)) if transposed else ("conv2d_pack", Row(w))
    got = pack_convolution(kernel, grouping, row, attrs, weight).numpy()
    want = np.zeros((outputs, inputs, h * w), "float32")
    for o in range(outputs):
        first = o * groups // outputs * (inputs // groups)
        want[o, first : first + inputs // groups] = plain[o].reshape(-1, h * w)
    return np.array_equal(unpacked(got, grouping, h * w, [[y * w + x for y, x in p] for p in phases]), want)


def depthwise(view: str, channels: int) -> bool:
    weight = VIEWS[view](array(np.random.default_rng(channels).standard_normal((channels, 1, 3, 5)).astype("float32")))
    want = np.zeros((-(-channels // BLOCK) * BLOCK, 15), "float32")
    want[:channels] = weight.numpy().reshape(channels, 15)
    return np.array_equal(pack_depthwise(weight).numpy(), want.reshape(-1, BLOCK, 15).swapaxes(1, 2))


def winograd(view: str, name: str, outputs: int, inputs: int) -> bool:
    """To one rounding of the exact transform."""
    w = VIEWS[view](array(np.random.default_rng(inputs).standard_normal((outputs, inputs, 3, 3)).astype("float32")))
    a, b = 0.75, 1.5
    rows = [[1 / (a * a * b * b), 0, 0]]
    for x, y in ((a, b), (b, a)):
        f = 1 / (2 * x * x * (x * x - y * y))
        rows += [[f, f * x, f * x * x], [f, -f * x, f * x * x]]
    g = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]] if name == "f2" else [*rows, [0, 0, 1]])
    blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
    want = np.zeros((len(g) ** 2, blocks[1] * BLOCK, blocks[0] * BLOCK))
    transformed = g @ w.numpy().astype("float64") @ g.T
    want[:, :inputs, :outputs] = transformed.reshape(outputs, inputs, -1).transpose(2, 1, 0)
    want = want.reshape(*want.shape[:2], blocks[0], BLOCK).transpose(2, 0, 1, 3)
    error = np.abs(pack_winograd(F2 if name == "f2" else F4, blocks[1], w).numpy() - want)
    return bool((error <= 1e-7 * np.abs(want) + 1e-14).all())


def matrix(size: tuple[int, int], view: str) -> bool:
    rng = np.random.default_rng(size[0])
    x = rng.standard_normal((2 * size[0], 3 * size[1])).astype("float32")
    b = {
        "contiguous": array(x[: size[0], : size[1]].copy()),
        "transposed": array(x[: size[0], : size[1]].T.copy()).permute((1, 0)),
        "flipped": array(x[: size[0], : size[1]].copy()).flip((0, 1)),
        "slice": array(x)[1 : 1 + size[0], 2 : 2 + size[1]],
        "every-second": array(x)[::2, ::3],
    }[view]
    plain, blocks = b.numpy(), -(-size[1] // BLOCK)
    packed = NDArray.empty((blocks, size[0], BLOCK))
    call("pack_matrix", [packed], b=b)
    want = np.pad(plain, ((0, 0), (0, blocks * BLOCK - size[1]))).reshape(size[0], blocks, BLOCK).swapaxes(0, 1)
    if not np.array_equal(packed.numpy(), want):
        return False
    if size[0] % 2 or size[1] % 32:
        return True
    strassen = NDArray.empty((7 * size[1] // 2 * size[0] // 2 + size[1],))
    call("strassen_pack", [strassen], b=b)
    powers = np.exp2(np.frexp(np.abs(plain).max(0))[1]).astype("float32")
    (q0, q1), (q2, q3) = (np.hsplit(half, 2) for half in np.vsplit(plain / powers, 2))
    sums = [q0 + q3, q0, q1 - q3, q2 - q0, q3, q0 + q1, q2 + q3]
    sums = [s.reshape(size[0] // 2, -1, BLOCK).swapaxes(0, 1).ravel() for s in sums]
    return np.array_equal(strassen.numpy(), np.concatenate([*sums, powers]))


def failures() -> Iterator[str]:
    """Everything that is not as it should be."""
    for view in VIEWS:
        for case in CONVOLUTIONS:
            for transposed in (False, True):
                if not convolution(view, transposed, case):
                    yield f"convolution {view} {'transposed ' * transposed}{case}"
        yield from (f"depthwise {view} {c}" for c in (1, 16, 33) if not depthwise(view, c))
        for name in ("f2", "f4"):
            for sizes in ((1, 1), (16, 16), (33, 17), (7, 100), (100, 150)):
                if not winograd(view, name, *sizes):
                    yield f"winograd {name} {view} {sizes}"
    for size in MATRICES:
        for view in ("contiguous", "transposed", "flipped", "slice", "every-second"):
            if not matrix(size, view):
                yield f"matrix {view} {size}"


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_packing(threads: int) -> None:
    before = ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        assert list(failures()) == []
    finally:
        ndl.set_num_threads(before)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_packing_of_every_isa(isa: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_packing import failures\n"
    code += "import needle\nprint(needle.isa(), *failures(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "NEEDLE_ISA": isa}, capture_output=True, text=True
    )
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [isa, ""]
