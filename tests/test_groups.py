"""Convolutions of channels and groups that begin and end anywhere in blocks of 16 against float64: every pass on every ISA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
import operator_fusion
import torch2needle
from needle.backend_ndarray import array
from needle.ops.nn.conv import Conv2d, Conv2dWeightGrad, ConvTranspose2d
from needle.targets.cpu.convolution import Grouping, Row, packed_sizes

TOLERANCE = 2e-6  # of the largest value
GROUPS = [  # groups, inputs and outputs of each
    (55, 8, 8),
    (32, 4, 4),
    (9, 2, 2),
    (3, 5, 5),
    (7, 3, 3),
    (5, 24, 24),
    (3, 40, 40),
    (4, 17, 17),
    (5, 12, 12),
    (3, 20, 80),
    (3, 80, 20),
    (2, 16, 16),
    (20, 1, 2),
    (7, 1, 5),
    (3, 1, 9),  # two blocks read one chunk, the first one not all of it; so in the next two
    (5, 1, 5),
    (7, 1, 3),
    (3, 9, 1),
    (3, 1, 40),
    (12, 8, 1),
    (9, 4, 8),
    (2, 33, 1),
    (1, 20, 40),
    (1, 24, 24),
    (1, 17, 33),
    (1, 16, 1),
    (1, 36, 2),
    (1, 64, 3),
    (1, 33, 4),
    (1, 36, 5),
    (1, 40, 6),
    (1, 48, 7),
    (1, 17, 8),
    (1, 3, 20),
]
GEOMETRIES: list[dict[str, Any]] = [  # of (7, 19) pixels
    {"kernel": (1, 1)},
    {"kernel": (3, 3), "padding": (1, 1, 1, 1)},
    {"kernel": (3, 3), "padding": (1, 1, 1, 1), "stride": (2, 2)},
    {"kernel": (1, 5), "padding": (0, 2, 0, 2), "dilation": (1, 2)},
    {"kernel": (2, 7), "padding": (1, 3, 0, 3), "stride": (1, 2), "dilation": (1, 2)},
]


def errors(grouping: tuple[int, int, int], kernel: tuple[int, int], **attributes: Any) -> Iterator[tuple[str, float]]:
    """Of both data passes and of the weight's gradient, eager and in a plan, relative to the largest value."""
    groups, inputs, outputs = grouping
    rng = np.random.default_rng(groups * inputs)
    op = Conv2d(**attributes, groups=groups)
    of_weight = Conv2dWeightGrad(kernel, **vars(op))
    x = rng.standard_normal((2, groups * inputs, 7, 19)).astype("float32")
    w = rng.standard_normal((groups * outputs, inputs, *kernel)).astype("float32")
    dy = rng.standard_normal(op.infer(array(x), array(w)).shape).astype("float32")
    transposed = ConvTranspose2d(op.stride, op.padding, (0, 0), op.dilation, groups)
    for name, run, operands in (
        ("forward", op, (x, w)),
        ("transposed", transposed, (dy, w)),
        ("weight", of_weight, (x, dy)),
    ):
        want = run.reference(*(a.astype("float64") for a in operands))
        eager = run(*(ndl.Tensor(a, requires_grad=False) for a in operands)).numpy()
        weight = ndl.nn.Parameter(operands[1])
        function = run if name == "weight" else lambda v, run=run, weight=weight: run(v, weight)
        given = operands if name == "weight" else operands[:1]
        planned = ndl.compile(function, given, winograd="off")(*given)
        for how, got in (("eager", eager), ("planned", planned)):
            yield f"{name} {how}", float(np.abs(got - want).max() / np.abs(want).max())


def failures() -> Iterator[str]:
    for grouping in GROUPS:
        for geometry in GEOMETRIES:
            for name, error in errors(grouping, **geometry):
                if not error < TOLERANCE:
                    yield f"{name} {grouping} {geometry}: {error:.1e}"


@pytest.mark.parametrize("threads", [1, 3])
def test_groups(threads: int) -> None:
    before = ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        assert list(failures()) == []
    finally:
        ndl.set_num_threads(before)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_groups_of_every_isa(isa: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_groups import failures\n"
    code += "import needle\nprint(needle.isa(), *failures(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "NEEDLE_ISA": isa}, capture_output=True, text=True
    )
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [isa, ""]


@pytest.mark.parametrize("grouping", GROUPS, ids=str)
def test_weights_are_never_dense(grouping: tuple[int, int, int]) -> None:
    """In 16 lanes a block of outputs has the inputs of the groups in it, and less than a chunk on either side."""
    groups, inputs, outputs = grouping
    panels, _, terms, _ = packed_sizes(Grouping(groups, inputs, outputs, 16), Row(3), 9)
    blocks = [range(b, min(b + 16, groups * outputs)) for b in range(0, groups * outputs, 16)]
    needed = sum(len({o // outputs for o in block}) * inputs for block in blocks)
    assert panels * terms <= needed + 2 * 15 * len(blocks)
    if groups * outputs >= 100 and outputs <= 24:
        assert panels * terms * 16 < 0.8 * groups * inputs * groups * outputs


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8, 9, 12, 15])
def test_few_channels_in_a_block(channels: int, geometry: dict[str, Any]) -> None:
    """Behind another layer few channels lie in a whole block; what is beyond them is not summed up."""
    torch.manual_seed(channels)
    (top, left, *_), kernel = geometry.get("padding", (0, 0)), geometry["kernel"]
    options = {"padding": (top, left), "stride": geometry.get("stride", 1), "dilation": geometry.get("dilation", 1)}
    model = torch.nn.Sequential(
        torch.nn.Conv2d(20, channels, 1),
        torch.nn.PReLU(channels),
        torch.nn.Conv2d(channels, 18, kernel, **options),
        torch.nn.PReLU(),
        torch.nn.ConvTranspose2d(18, channels, kernel, **options),
    ).eval()
    x = torch.randn(2, 20, 9, 19)
    exe = ndl.compile(torch2needle.convert(model, (x,)), (x,))
    want = model.double()(x.double()).detach().numpy()
    assert np.abs(exe(x).numpy() - want).max() < 4 * TOLERANCE * np.abs(want).max()
    kernels = [kernel for kernel, *_ in exe.profile(x)]
    assert kernels.count("from_blocked") == 1, "the activation leaves the blocks"


@pytest.mark.parametrize("outputs", range(1, 10))
def test_weights_of_few_outputs_lie_along_inputs(outputs: int) -> None:
    assert packed_sizes(Grouping(1, 80, outputs, 16), Row(3), 9) == (5, 1, 16, outputs if outputs <= 8 else 16)


@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel"), [(32, 3, 3), (40, 1, 1), (64, 4, 5), (520, 8, 5), (300, 7, 7)]
)
@pytest.mark.parametrize(
    "activation", [torch.nn.Identity(), torch.nn.ReLU(), torch.nn.GELU(), torch.nn.Sigmoid()], ids=str
)
def test_few_outputs_with_what_follows(inputs: int, outputs: int, kernel: int, activation: torch.nn.Module) -> None:
    """Bias, what is added and activations; 520 inputs in several parts, which are added up in memory."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(20, inputs, 1)
            self.skip = torch.nn.Conv2d(20, outputs, 1)
            self.last = torch.nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
            self.activation = activation

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.activation(self.last(self.first(x)) + self.skip(x))

    torch.manual_seed(outputs)
    model = Model().eval()
    x = torch.randn(2, 20, 6, 17)
    exe = ndl.compile(operator_fusion.fuse(torch2needle.convert(model, (x,))), (x,), winograd="off")
    want = model.double()(x.double()).detach().numpy()
    assert np.abs(exe(x).numpy() - want).max() < 2 * TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("widths", [(1, 3), (8, 8), (5, 16, 20), (17, 31), (16, 10, 16), (40, 2, 1, 12)], ids=str)
def test_channels_are_joined_and_cut_in_blocks(widths: tuple[int, ...]) -> None:
    """Wherever in a block of 16 they begin and end, images stay in blocks, as do the gradients of training."""
    total = sum(widths)
    first, last = total // 3, total - total // 4

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Conv2d(5, w, 1) for w in widths)
            self.whole = torch.nn.Conv2d(total, 7, 3, padding=1)
            self.cut = torch.nn.Conv2d(last - first, 7, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([part(x).relu() for part in self.parts], 1)
            return self.whole(joined) + self.cut(joined[:, first:last].sigmoid())

    torch.manual_seed(total)
    model = Model().eval()
    x = torch.randn(2, 5, 4, 7)
    net = torch2needle.convert(model, (x,))
    exe = ndl.compile(net, (x,))
    want = model.double()(x.double()).detach().numpy()
    assert np.abs(exe(x).numpy() - want).max() < TOLERANCE * np.abs(want).max()
    kernels = [kernel for kernel, *_ in exe.profile(x)]
    assert kernels.count("to_blocked") == kernels.count("from_blocked") == 1

    y = torch.randn(2, 7, 4, 7)
    optimizer = ndl.optim.SGD(net.train().parameters(), 0.1, rule="torch")
    ndl.compile_step(net, lambda out, y: ((out - y) * (out - y)).mean(), optimizer, (x, y))(x, y)
    torchs = torch.optim.SGD(model.parameters(), 0.1)
    (model(x.double()) - y).square().mean().backward()
    torchs.step()
    trained = dict(net.named_parameters())
    for name, p in model.named_parameters():
        assert np.abs(trained[name].numpy() - p.detach().numpy()).max() < 1e-5 * p.abs().max().item(), name
