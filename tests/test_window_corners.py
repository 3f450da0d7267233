"""Convolutions and pools whose taps miss tiny images by padding and dilation: values and gradients against torch in float64.

On every instruction set of the CPU, and on GPU devices.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import ops
from needle.backend_ndarray import Device
from needle.backend_selection import BACKEND

Case = tuple[str, tuple, tuple, dict[str, Any]]  # function, shapes of x and of the weight, arguments

TABLE: list[Case] = [
    ("conv2d", (1, 1, 3, 3), (1, 1, 3, 3), {"padding": 1, "dilation": 2}),
    ("conv2d", (9, 3, 3, 3), (2, 3, 3, 3), {"padding": 1, "dilation": 2}),
    ("conv2d", (2, 17, 1, 1), (5, 17, 5, 5), {"padding": 2}),
    ("conv2d", (1, 2, 1, 4), (2, 1, 3, 2), {"padding": (4, 3), "dilation": 3, "stride": (1, 4), "groups": 2}),
    ("conv2d", (1, 4, 2, 2), (4, 1, 3, 3), {"padding": 4, "dilation": 4, "groups": 4}),
    ("conv2d", (1, 1, 2, 2), (1, 1, 1, 1), {"padding": 4, "stride": 4}),
    ("conv2d", (2, 20, 13, 16), (33, 20, 3, 3), {"padding": 5, "dilation": 5}),
    ("conv2d", (1, 3, 16, 28), (17, 3, 3, 5), {"padding": (12, 18), "dilation": (12, 9), "stride": (1, 2)}),
    ("conv2d", (1, 40, 14, 9), (64, 40, 3, 3), {"padding": (9, 1), "dilation": (9, 1)}),
    ("conv1d", (1, 32, 60), (16, 32, 3), {"padding": 48, "dilation": 24}),
    ("conv1d", (1, 1, 3), (1, 1, 3), {"padding": 1, "dilation": 2}),
    ("conv1d", (2, 51, 2), (48, 17, 2), {"padding": 2, "dilation": 3, "stride": 4, "groups": 3}),
    ("conv3d", (1, 1, 3, 3, 3), (1, 1, 3, 3, 3), {"padding": 1, "dilation": 2}),
    ("conv_transpose1d", (1, 1, 1), (1, 1, 3), {"padding": 1, "dilation": 2}),
    ("conv_transpose2d", (1, 1, 1, 1), (1, 1, 3, 3), {"padding": 1, "dilation": 2}),
    ("conv_transpose2d", (3, 4, 2, 3), (4, 2, 1, 3), {"padding": (0, 3), "stride": (3, 4), "output_padding": (2, 3)}),
    (
        "conv_transpose3d",
        (1, 16, 4, 2, 1),
        (16, 1, 3, 1, 3),
        {"padding": (0, 0, 1), "dilation": (3, 2, 3), "groups": 16},
    ),
]


def drawn(seed: int) -> Case:
    """A convolution over one to three axes with any arguments, some of which no image fits."""
    rng = random.Random(seed)
    n, transposed, groups = rng.choice((1, 2, 2, 3)), rng.random() < 0.4, rng.choice((1, 1, 2, 3, 16))
    i, o = groups * rng.choice((1, 1, 2, 17 if groups < 3 else 1)), groups * rng.choice((1, 1, 2))

    def axes(*choices: int) -> tuple:
        return tuple(rng.choice(choices) for _ in range(n))

    arguments = {"stride": axes(1, 1, 2, 3), "padding": axes(0, 1, 2, 3, 7), "dilation": axes(1, 2, 3, 7)}
    weight = (i, o // groups) if transposed else (o, i // groups)
    name = f"conv{'_transpose' if transposed else ''}{n}d"
    x = (rng.choice((1, 2, 5)), i, *axes(1, 2, 3, 5))
    return name, x, (*weight, *axes(1, 2, 3)), {**arguments, "groups": groups}


def drawn_pool(seed: int) -> Case:
    """A pool over one to three axes whose windows all meet the image."""
    rng = random.Random(seed)
    n, name = rng.choice((1, 2, 2, 3)), rng.choice(("max", "avg"))
    kernel = [rng.choice((1, 2, 3, 4)) for _ in range(n)]
    padding = [rng.randint(0, k // 2) for k in kernel]
    size = tuple(max(1, k - p + rng.choice((-1, 0, 1, 3))) for k, p in zip(kernel, padding, strict=True))
    arguments = {
        "stride": [rng.choice((1, 2, 3, 5)) for _ in range(n)],
        "padding": padding,
        "ceil_mode": rng.random() < 0.5,
    }
    return f"{name}_pool{n}d", (2, rng.choice((1, 3, 17)), *size), (), {"kernel_size": kernel, **arguments}


def results(case: Case, tensor: Any, library: Any) -> list[Any]:
    """Output and gradients of all inputs, of the output's sum weighted by its element's number."""
    name, *shapes, arguments = case
    rng = np.random.RandomState(0)
    inputs = [tensor(rng.randn(*s).astype("float32")) for s in shapes if s]
    out = getattr(library, name)(*inputs, **arguments)
    size = int(np.prod(out.shape))
    (out * tensor(np.cos(np.arange(size)).reshape(out.shape).astype("float32"), False)).sum().backward()
    return [np.asarray(t.detach().numpy()) for t in (out, *(x.grad for x in inputs))]


class Planned(ndl.nn.Module):
    """A case as a net whose parameters are the inputs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.name, *shapes, self.arguments = case
        rng = np.random.RandomState(0)
        self.inputs = [ndl.nn.Parameter(rng.randn(*s).astype("float32")) for s in shapes if s]

    def forward(self, weights: ndl.Tensor | None) -> ndl.Tensor:
        out = getattr(ops, self.name)(*self.inputs, **self.arguments)
        return out if weights is None else ((out * weights).sum(), out)


def planned(case: Case) -> list[np.ndarray]:
    """`results` by a compiled step: what plain gradient descent takes from the inputs."""
    net = Planned(case)
    before = [p.numpy() for p in net.inputs]
    shape = net(None).shape
    weights = np.cos(np.arange(int(np.prod(shape)))).reshape(shape).astype("float32")
    step = ndl.compile_step(net, lambda out: out, ndl.optim.SGD(net.parameters(), 1.0), (weights,))
    _, out = step(weights)
    return [out, *(a - p.numpy() for a, p in zip(before, net.inputs, strict=True))]


def agrees(case: Case, device: Device, plans: bool = False) -> bool:
    """Whether torch takes the case; that it agrees is asserted. plans: of a compiled step, else of eager calls."""
    import torch

    def theirs(a: np.ndarray, leaf: bool = True) -> torch.Tensor:
        return torch.tensor(a, dtype=torch.float64, requires_grad=leaf)

    def ours(a: np.ndarray, leaf: bool = True) -> ndl.Tensor:
        return ndl.Tensor(a, device=device, dtype="float32", requires_grad=leaf)

    try:
        want = results(case, theirs, torch.nn.functional)
    except (RuntimeError, ValueError):
        return False
    for got, exact in zip(planned(case) if plans else results(case, ours, ops), want, strict=True):
        assert got.shape == exact.shape, case
        assert np.abs(got - exact).max(initial=0) <= 1e-5 * max(1, np.abs(exact).max(initial=0)), case
    return True


@pytest.mark.parametrize("case", TABLE, ids=lambda c: f"{c[0]}-{'x'.join(map(str, c[1]))}-{'x'.join(map(str, c[2]))}")
def test_taps_that_miss_the_image(case: Case) -> None:
    assert agrees(case, ndl.default_device())


def many(device: Device, count: int, plans: bool = False) -> None:
    taken = [agrees(f(seed), device, plans) for seed in range(count) for f in (drawn, drawn_pool)]
    assert sum(taken) > count


def test_drawn_windows() -> None:
    many(ndl.default_device(), 150)


@pytest.mark.skipif(BACKEND == "np", reason="the numpy backend has no plans")
def test_drawn_windows_in_compiled_steps() -> None:
    assert all(agrees(case, ndl.cpu(), plans=True) for case in TABLE)
    many(ndl.cpu(), 100, plans=True)


def test_windows_on_gpus(gpu: Device) -> None:
    assert all(agrees(case, gpu) for case in TABLE)
    many(gpu, 25)


@pytest.mark.skipif(BACKEND == "np", reason="instruction sets are those of our kernels")
@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_windows_on_instruction_set(isa: str) -> None:
    code = (
        "from test_window_corners import *; assert all(agrees(c, ndl.cpu()) for c in TABLE); many(ndl.cpu(), 60);"
        "many(ndl.cpu(), 40, plans=True)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NEEDLE_ISA": isa, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert done.returncode == 0, done.stderr


def conv(**attributes: Any) -> Any:
    return lambda: ops.Conv2d(**{"stride": (1, 1), **attributes})(ones(1, 2, 4, 4), ones(2, 2, 3, 3))


def ones(*shape: int) -> ndl.Tensor:
    return ndl.Tensor(np.ones(shape, "float32"))


WINDOW = {"kernel_size": (2, 2), "stride": (2, 2)}
REFUSED = [  # what a call or a damaged file may ask for, and a word of the answer
    (conv(stride=(0, 1)), "stride"),
    (conv(dilation=(1, -1)), "dilation"),
    (conv(stride=(1, 0.5)), "stride"),
    (conv(stride=(1,)), "padding|dilation"),
    (conv(groups=0), "groups"),
    (conv(padding=(1,)), "padding"),
    (lambda: ops.conv2d(ones(1, 1, 3, 3), ones(1, 1, 0, 3)), "kernel"),
    (lambda: ops.conv2d(ones(1, 1, 3, 3), ones(1, 1, 2, 2), stride=(1, 1, 2)), "one number or 2"),
    (lambda: ops.FusedLayer(ops.Conv2d((0, 1))), "stride"),
    (lambda: ops.FusedLayer(ops.ReLU()), "a layer such as"),
    (lambda: ops.FusedLayer(), "a layer such as"),
    (lambda: ops.FusedLayer(ops.Conv2d(), "swoosh"), "activation"),
    (lambda: ops.conv_transpose2d(ones(1, 1, 3, 3), ones(1, 1, 2, 2), output_padding=-1), "output_padding"),
    (lambda: ops.conv3d(ones(1, 1, 3, 3, 3), ones(1, 1, 2, 2, 2), dilation=0), "dilation"),
    (lambda: ops.max_pool2d(ones(1, 1, 3, 3), 2, dilation=0), "dilation"),
    (lambda: ops.max_pool1d(ones(1, 1, 3), 2, 0), "stride"),
    (lambda: ops.avg_pool3d(ones(1, 1, 3, 3, 3), 2, padding=-1), "padding"),
    (lambda: ops.avg_pool2d(ones(1, 1, 3, 3), 0, 1), "kernel_size"),
    (lambda: ops.unfold(ones(1, 1, 3, 3), 2, stride=0), "stride"),
    (lambda: ops.fold(ones(1, 4, 4), 3, 2, dilation=0), "dilation"),
    (lambda: ops.Conv2dWeightGrad((3, 3))(ones(1, 1, 3, 3), ones(2, 1, 1, 1)), "gradient"),
    (lambda: ops.Conv2dWeightGrad((3, 3))(ones(1, 1, 3, 3), ones(1, 1, 5, 5)), "gradient"),
    (lambda: ops.MaxPool2dGrad(**WINDOW)(ones(1, 1, 4, 4), ones(1, 9, 2, 2)), "gradient"),
    (lambda: ops.AvgPool2dGrad(ops.AvgPool2d(**WINDOW), (1, 1, 4, 4))(ones(1, 1, 9, 2)), "gradient"),
    (lambda: ops.AdaptiveAvgPool2dGrad((1, 1, 4, 4))(ones(3, 1, 2, 2)), "gradient"),
    (lambda: ops.InterpolateGrad((1, 1, 4, 4), None, "nearest", False)(ones(1, 3, 2, 2)), "gradient"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_no_window_can_be_is_refused(number: int) -> None:
    call, word = REFUSED[number]
    with pytest.raises(ValueError, match=rf"^\[\w+\] [^\n]*({word})[^\n]*\.$"):
        call()


@pytest.mark.parametrize("call", [ops.conv1d, ops.conv2d, ops.conv3d, ops.conv_transpose2d])
def test_convolutions_without_channels_are_refused(call: Any) -> None:
    axes = {"1d": 1, "2d": 2, "3d": 3}[call.__name__[-2:]]
    for inputs, outputs in ((0, 1), (1, 0)):
        x = ndl.Tensor(np.zeros((2, inputs, *[4] * axes), "float32"))
        shape = (inputs, outputs) if "transpose" in call.__name__ else (outputs, inputs)
        with pytest.raises(ValueError, match=r"\[conv.*weight expects at least one channel"):
            call(x, ndl.Tensor(np.zeros((*shape, *[3] * axes), "float32")))
