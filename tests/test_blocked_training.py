"""Kernels of training on blocked images, on every instruction set: batch norm, gradients of pools, resizes and maps.

Against torch in float64. Around inputs lies NaN, which nothing may read, around outputs what must stay.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import needle as ndl
from needle.backend_ndarray import NDArray, array, call
from needle.ops.math.activation import activation_code
from test_winograd import OUTSIDE, TOLERANCE, blocked, plain

Image = tuple[int, int, int, int]
SIZES: list[Image] = [
    (1, 1, 1, 1),
    (2, 16, 1, 3),
    (3, 17, 7, 5),
    (1, 33, 13, 8),
    (2, 40, 31, 30),
    (1, 3, 2, 700),  # longer than a section
    (9, 16, 40, 37),  # several parts, and bands
]
ACTIVATIONS = {"none": 0.0, "relu": 0.0, "relu6": 0.0, "leaky_relu": 0.2, "sigmoid": 0.0, "tanh": 0.0}


def run(name: str, outs: dict[str, Any], ins: dict[str, Any], **attrs: Any) -> list[np.ndarray]:
    """Kernel `name` with images blocked in a margin; a shape of an output is an image's (four) or a vector's (one)."""
    images = {n: (a.astype("float32"), margin + 1) for margin, (n, a) in enumerate(ins.items()) if np.ndim(a) == 4}
    given = {n: blocked(*images[n], np.nan)[1] if n in images else array(a.astype("float32")) for n, a in ins.items()}
    arrays: list[tuple[NDArray, NDArray]] = []
    for shape in outs.values():
        whole = NDArray.empty(shape)
        arrays.append(blocked(np.full(shape, np.nan), 2, OUTSIDE) if len(shape) == 4 else (whole, whole))
    call(name, [view for _, view in arrays], **given, **attrs)
    found = []
    for shape, (whole, view) in zip(outs.values(), arrays, strict=True):
        if len(shape) == 1:
            found.append(view.numpy())
            continue
        found.append(plain(view, shape[1]))
        assert (plain(view, -(-shape[1] // 16) * 16)[:, shape[1] :] == 0).all(), f"{name}: lanes without a channel"
        ring = whole.numpy()
        ring[:, :, 2:-2, 2:-2] = OUTSIDE
        assert (ring == OUTSIDE).all(), f"{name}: around {shape}"
    return found


def close(got: np.ndarray, want: Any, scale: float | None = None, tolerance: float = TOLERANCE) -> None:
    want = np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max(initial=0) <= tolerance * (scale or max(np.abs(want).max(initial=0), 1e-30))


def normal(shape: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32").astype("float64")


def per_channel(v: np.ndarray) -> np.ndarray:
    return v[:, None, None]


def check_moments(size: Image, mean: float, std: float) -> None:
    x = (normal(size) * std + mean).astype("float32").astype("float64")
    c = size[1]
    got = run("batch_norm_moments", {"mean": (c,), "var": (c,), "inverse": (c,)}, {"x": x}, eps=1e-5)
    var = x.var((0, 2, 3))
    close(got[0], x.mean((0, 2, 3)))
    close(got[1], var, scale=max(var.max(), mean * mean * 1e-14))
    for have, want in zip(got[2], 1 / np.sqrt(var + 1e-5), strict=True):
        assert abs(have / want - 1) <= TOLERANCE


def check_batch_norm(size: Image, activation: str, residual: bool) -> None:
    """Forwards and backwards as torch has them behind the activation."""
    c, alpha = size[1], ACTIVATIONS[activation]
    attrs = {"activation": activation_code(activation), "alpha": alpha}
    values = {"x": normal(size) + 1, "weight": normal(c, 1), "bias": normal(c, 2)}
    if residual:
        values["residual"] = normal(size, 3)
    leaves = {n: torch.tensor(v, requires_grad=True) for n, v in values.items()}
    y = torch.batch_norm(leaves["x"], leaves["weight"], leaves["bias"], None, None, True, 0.1, 0.1, False)
    y = y + leaves["residual"] if residual else y
    name = {"none": "Identity", "relu": "ReLU", "relu6": "ReLU6", "sigmoid": "Sigmoid", "tanh": "Tanh"}
    y = F.leaky_relu(y, alpha) if alpha else getattr(torch.nn, name[activation])()(y)
    dy = normal(size, 4)
    y.backward(torch.tensor(dy))
    want = {n: leaf.grad.numpy() for n, leaf in leaves.items() if leaf.grad is not None}

    x, weight = values["x"], values["weight"]
    mean, inverse = x.mean((0, 2, 3)), 1 / np.sqrt(x.var((0, 2, 3)) + 0.1)
    moments = {"mean": mean, "inverse": inverse}
    (got,) = run("batch_norm_blocked", {"y": size}, {**values, **moments}, **attrs)
    close(got, y.detach().numpy())

    out = {} if activation == "none" and c % 2 else {"y": y.detach().numpy()}
    ins = {"x": x, "dy": dy, **out, **moments}
    dweight, dbias = run("batch_norm_grad_sums", {"dweight": (c,), "dbias": (c,)}, ins, **attrs)
    terms = np.sqrt(np.prod(size) / c)  # sums of as many normal numbers
    close(dweight, want["weight"], terms)
    close(dbias, want["bias"], terms)
    ins |= {"weight": weight, "dweight": want["weight"], "dbias": want["bias"]}
    (dx,) = run("batch_norm_grad_apply", {"dx": size}, ins, **attrs)
    scale = np.abs(weight * inverse).max() * np.abs(dy).max()
    close(dx, want["x"], scale)
    both = run("batch_norm_grad_apply_residual", {"dx": size, "dresidual": size}, ins, **attrs)
    assert (both[0] == dx).all()
    if residual:
        close(both[1], want["residual"])


WINDOWS = [  # kernel, stride, padding, dilation
    ((1, 1), (1, 1), (0, 0), (1, 1)),
    ((2, 2), (2, 2), (0, 0), (1, 1)),
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((3, 2), (1, 2), (1, 0), (2, 3)),
    ((5, 3), (1, 1), (2, 1), (1, 1)),
    ((2, 2), (3, 4), (1, 1), (1, 1)),
]


def backward(of: Callable[..., torch.Tensor], x: np.ndarray, *args: Any, **named: Any) -> tuple[np.ndarray, np.ndarray]:
    """Some gradient of the result of `of`, and that of x."""
    leaf = torch.tensor(x, requires_grad=True)
    y = of(leaf, *args, **named)
    dy = normal(tuple(y.shape), 5)
    y.backward(torch.tensor(dy))
    assert leaf.grad is not None
    return dy, leaf.grad.numpy()


def window(kernel: Any, stride: Any, padding: Any) -> dict[str, int]:
    pairs = {"kernel": kernel, "stride": stride}
    sides = {f"{n}_{axis}": v for n, pair in pairs.items() for axis, v in zip("hw", pair, strict=True)}
    return {**sides, "pad_top": padding[0], "pad_left": padding[1]}


def check_pools(size: Image, number: int) -> None:
    kernel, stride, padding, dilation = WINDOWS[number]
    reach = [d * (k - 1) + 1 - 2 * p for k, p, d in zip(kernel, padding, dilation, strict=True)]
    if any(r > s for r, s in zip(reach, size[2:], strict=True)):
        return
    attrs = window(kernel, stride, padding)
    x = np.round(2 * normal(size)) / 2  # with equal numbers
    if number == 2:
        x.reshape(-1)[:: max(3, x.size // 7)] = np.nan
    dy, want = backward(F.max_pool2d, x, kernel, stride, padding, dilation)
    dilations = {"dilation_h": dilation[0], "dilation_w": dilation[1]}
    close(run("max_pool2d_grad", {"dx": size}, {"x": x, "dy": dy}, **attrs, **dilations)[0], want)
    for counts, divisor in ((True, 0), (False, 0), (True, 7)):
        if dilation == (1, 1):
            rule = kernel, stride, padding, False, counts, divisor or None
            dy, want = backward(F.avg_pool2d, normal(size), *rule)
            more = {"count_include_pad": counts, "divisor": divisor}
            close(run("avg_pool2d_grad", {"dx": size}, {"dy": dy}, **attrs, **more)[0], want)


RESIZES = [(1, 1), (2, 3), (7, 5), (62, 61)]


def check_resizes(size: Image, number: int) -> None:
    target = RESIZES[number]
    dy, want = backward(F.adaptive_avg_pool2d, normal(size), target)
    close(run("adaptive_avg_pool2d_grad", {"dx": size}, {"dy": dy})[0], want)
    scale = [i / o for i, o in zip(size[2:], target, strict=True)]
    attrs = {"scale_h": scale[0], "scale_w": scale[1]}
    dy, want = backward(F.interpolate, normal(size), target)
    close(run("interpolate_nearest_grad", {"dx": size}, {"dy": dy}, **attrs)[0], want)
    for corners in (False, True):
        dy, want = backward(F.interpolate, normal(size), target, mode="bilinear", align_corners=corners)
        if corners:
            scale = [(i - 1) / (o - 1) if o > 1 else 0 for i, o in zip(size[2:], target, strict=True)]
            attrs = {"scale_h": scale[0], "scale_w": scale[1]}
        got = run("interpolate_bilinear_grad", {"dx": size}, {"dy": dy}, **attrs, align_corners=corners)[0]
        close(got, want)


def check_maps(size: Image) -> None:
    x, y = normal(size), normal(size, 1)
    for name, want in (("relu_grad", y * (x > 0)), ("add", x + y), ("mul", x * y), ("tanh_grad", y * (1 - x * x))):
        close(run(name, {"out": size}, {"x": x, "y": y})[0], want)


def checks() -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    for size in SIZES:
        for mean, std in ((0, 1), (1000, 1), (-3, 1e-3), (5, 0)):
            yield check_moments, (size, mean, std)
        for activation in ACTIVATIONS:
            yield check_batch_norm, (size, activation, activation != "sigmoid")
        yield check_batch_norm, (size, "relu", False)
        for number in range(len(WINDOWS)):
            yield check_pools, (size, number)
        for number in range(len(RESIZES)):
            yield check_resizes, (size, number)
        yield check_maps, (size,)


CHECKS = list(checks())


@pytest.mark.parametrize("number", range(len(CHECKS)), ids=lambda i: f"{CHECKS[i][0].__name__[6:]}-{CHECKS[i][1]}")
def test_kernel(number: int) -> None:
    check, arguments = CHECKS[number]
    check(*arguments)


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_kernels_of_instruction_set(isa: str) -> None:
    code = f"import needle\nassert needle.isa() == {isa!r}\nfrom test_blocked_training import CHECKS\n"
    code += "for check, arguments in CHECKS: check(*arguments)"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {**os.environ, "NEEDLE_ISA": isa, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stderr


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    size: Image = (5, 40, 64, 50)
    x, dy, y = (normal(size, i) for i in range(3))
    (c,), one = (size[1],), np.ones(size[1])
    attrs = {"activation": activation_code("relu"), "alpha": 0.0}
    pool = window((3, 3), (1, 1), (1, 1))
    ins = {"x": x, "dy": dy, "y": y, "mean": one, "inverse": one}

    def results() -> list[np.ndarray]:
        return [
            *run("batch_norm_moments", {"mean": (c,), "var": (c,), "inverse": (c,)}, {"x": x}, eps=1e-5),
            *run("batch_norm_grad_sums", {"dweight": (c,), "dbias": (c,)}, ins, **attrs),
            *run("max_pool2d_grad", {"dx": size}, {"x": x, "dy": dy}, **pool, dilation_h=1, dilation_w=1),
            *run("interpolate_bilinear_grad", {"dx": size}, {"dy": dy}, scale_h=1.01, scale_w=0.99, align_corners=0),
        ]

    before, found = ndl.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 16):
            ndl.set_num_threads(threads)
            found.append(results())
    finally:
        ndl.set_num_threads(before)
    for other in found[1:]:
        assert all((a == b).all() for a, b in zip(found[0], other, strict=True))


def test_infinity_makes_no_finite_variance() -> None:
    x = normal((2, 3, 40, 40))
    x[1, 1, 3, 3], x[0, 2, 0, 0] = np.inf, np.nan
    outs = {n: (3,) for n in ("mean", "var", "inverse")}
    mean, var, inverse = run("batch_norm_moments", outs, {"x": x}, eps=1e-5)
    assert np.isinf(mean[1]) and np.isnan(mean[2]) and np.isnan([*var[1:], *inverse[1:]]).all()
    assert np.isfinite([mean[0], var[0], inverse[0]]).all()


@pytest.mark.parametrize(("activation", "output"), [("gelu", True), ("relu", False)])
@pytest.mark.parametrize("name", ["batch_norm_grad_sums", "batch_norm_grad_apply", "batch_norm_grad_apply_residual"])
def test_activations_whose_slope_the_output_does_not_tell(name: str, activation: str, output: bool) -> None:
    x, one = normal((1, 3, 2, 2)), np.ones(3)
    ins = {"x": x, "dy": x, **({"y": x} if output else {}), "mean": one, "inverse": one}
    outs: dict[str, Any] = {"dweight": (3,), "dbias": (3,)}
    if "apply" in name:
        ins |= {"weight": one, "dweight": one, "dbias": one}
        outs = {n: x.shape for n in (("dx", "dresidual") if "residual" in name else ("dx",))}
    with pytest.raises(ValueError, match=rf"^\[{name}\] activation expects none, or relu, [^\n]*\.$"):
        run(name, outs, ins, activation=activation_code(activation), alpha=0)
