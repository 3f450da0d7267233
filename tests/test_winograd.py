"""Winograd convolutions: the kernels against float64 on every ISA, and what plans choose."""

from __future__ import annotations

import json
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
import torch2needle
from needle.backend_ndarray import NDArray, array, call
from needle.nn.module import Parameter
from needle.ops.fused.layer import FusedLayer, act_reference
from needle.ops.math.activation import ACTIVATIONS, activation_code
from needle.ops.nn.conv import Conv2d
from needle.targets.cpu.convolution import pad_vector
from needle.targets.cpu.winograd import F2, F4, Scheme, pack

TOLERANCE = 5e-6  # of the largest value
SCHEMES = {"f2": F2, "f4": F4}
OUTSIDE = 12345.0  # around an output: must stay


def blocked(x: np.ndarray, margin: int, around: float, halo: int = 0) -> tuple[NDArray, NDArray]:
    """x (N, C, H, W) as nChw16c in a ring of `halo` zeros in a margin of `around`: the whole array, and the view of x."""
    n, c, h, w = x.shape
    blocks, ring = -(-c // 16), margin + halo
    channels = np.zeros((n, blocks * 16, h, w), "float32")
    channels[:, :c] = x
    whole = np.full((n, blocks, h + 2 * ring, w + 2 * ring, 16), around, "float32")
    whole[:, :, margin : margin + h + 2 * halo, margin : margin + w + 2 * halo] = 0
    whole[:, :, ring : ring + h, ring : ring + w] = channels.reshape(n, blocks, 16, h, w).transpose(0, 1, 3, 4, 2)
    a = array(whole)
    return a, a[:, :, ring : ring + h, ring : ring + w]


def plain(y: NDArray, channels: int) -> np.ndarray:
    n, blocks, h, w, _ = y.shape
    return y.numpy().transpose(0, 1, 4, 2, 3).reshape(n, blocks * 16, h, w)[:, :channels]


def error(
    name: str,
    size: tuple[int, int],
    channels: tuple[int, int] = (17, 33),
    batch: int = 1,
    padding: int = 1,
    activation: str = "none",
    residual: bool = False,
    bias: bool = True,
    pool: bool = False,
) -> float:
    """Largest error relative to the largest value; what lies outside of the halo is NaN, the output is a slice."""
    (c, o), (h, w) = channels, size
    rng = np.random.default_rng(h * 100 + w)
    x, weight = rng.standard_normal((batch, c, h, w)), rng.standard_normal((o, c, 3, 3)) / np.sqrt(9 * c)
    b = rng.standard_normal(o) if bias else None
    oh, ow = h + 2 * padding - 2, w + 2 * padding - 2
    r = rng.standard_normal((batch, o, oh, ow)) if residual else None
    x, weight, b, r = (None if a is None else a.astype("float32") for a in (x, weight, b, r))  # type: ignore[assignment]

    alpha = 0.3 if activation != "none" and ACTIVATIONS[activation].has_alpha else 0.0
    want = Conv2d(padding=(padding,) * 4).reference(*(a.astype("float64") for a in (x, weight)))
    want = want + (0 if b is None else b.astype("float64")[:, None, None]) + (0 if r is None else r)
    want = act_reference(activation, alpha, want)
    if pool:
        oh, ow = oh // 2, ow // 2
        want = want[:, :, : 2 * oh, : 2 * ow].reshape(batch, o, oh, 2, ow, 2).max((3, 5))

    _, source = blocked(x, 3, np.nan, padding)
    before = 32  # channels of the concat before this slice
    whole, target = blocked(np.full((batch, before + o, oh, ow), OUTSIDE), 2, OUTSIDE)
    out = target[:, before // 16 :]
    ins = {"x": source, "packed": pack(SCHEMES[name], source.shape[1], array(weight))}
    ins |= {"bias": None if b is None else pad_vector(array(b))}
    ins |= {"residual": None if r is None else blocked(r, 1, np.nan)[1]}
    attrs = {"pad_top": padding, "pad_left": padding, "activation": activation_code(activation), "alpha": alpha}
    call(f"conv2d_winograd_{name}", [out], **ins, **attrs, pool=pool)

    ring = whole.numpy()
    ring[:, before // 16 :, 2:-2, 2:-2] = OUTSIDE
    ring = ring.transpose(0, 1, 4, 2, 3).reshape(batch, -1, *ring.shape[2:4])[:, : before + o]
    assert (ring == OUTSIDE).all()
    return float(np.abs(plain(out, o) - want).max() / np.abs(want).max())


def cases(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for size in range(1, 18):
        yield f"{size}", {"size": (size, size)}
        yield f"{size}x{18 - size}-batch3", {"size": (size, 18 - size), "batch": 3, "residual": True}
    for channels in ((16, 16), (33, 17), (48, 80), (272, 64), (600, 33)):  # beyond 256 the sum is cut into chains
        yield f"{channels[0]}to{channels[1]}", {"size": (9, 14), "channels": channels}
    for size in ((30, 29), (64, 65)):
        yield f"{size[0]}x{size[1]}", {"size": size, "channels": (33, 48), "batch": 2}
    for size in ((2, 2), (3, 5), (8, 12), (11, 10), (18, 33)):
        for activation in ("none", "relu"):
            case = {"size": size, "activation": activation, "channels": (33, 48), "batch": 2, "pool": True}
            yield f"{size[0]}x{size[1]}-{activation}-pool", {**case, "bias": activation == "relu"}
    for padding in (0, 2):
        yield f"padding{padding}", {"size": (7, 9), "padding": padding, "bias": False}
    for activation in ("none", *ACTIVATIONS):
        yield activation, {"size": (7, 6), "activation": activation, "residual": True}
    yield "relu-without-bias", {"size": (11, 5), "activation": "relu", "bias": False}


def worst(name: str) -> tuple[float, str]:
    return max((error(name, **c), label) for label, c in cases(name))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_kernel(name: str, threads: int) -> None:
    before = ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        assert worst(name) <= (TOLERANCE,)
    finally:
        ndl.set_num_threads(before)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_kernels_of_every_isa(isa: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_winograd import worst\n"
    code += "import needle\nprint(needle.isa(), *(worst(n)[0] for n in ('f2', 'f4')))"
    env = {**os.environ, "NEEDLE_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stderr
    used, *errors = done.stdout.split()
    assert used == isa
    assert max(map(float, errors)) <= TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_packed_weights(scheme: Scheme) -> None:
    """A filter that is one at its centre gives the image back, whatever its size in blocks."""
    w = np.zeros((20, 20, 3, 3), "float32")
    w[range(20), range(20), 1, 1] = 1
    packed = pack(scheme, 2, array(w))
    assert packed.shape == (2, scheme.points, 32, 16)
    assert np.isclose(packed.numpy()[0, :, 0, 1:], 0).all()  # input channel 0 reaches output channel 0 only
    assert (packed.numpy()[1, :, 20:] == 0).all()  # padded channels


def test_error_table(tmp_path: Path, script_environment: dict[str, str]) -> None:
    script, file = Path(__file__).parents[1] / "profiling" / "winograd_errors.py", tmp_path / "errors.json"
    command = [sys.executable, str(script), "--channels", "3", "33", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=script_environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert {"scalar", ndl.isa()} <= found.keys()
    for errors in found.values():
        assert set(errors) == {"direct", "f2", "f4"}
        assert all(0 < e <= TOLERANCE for by_channels in errors.values() for e in by_channels.values())
    assert all(isa in done.stdout for isa in found)


def layer(c: int, o: int, size: int, **attributes: Any) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(0)
    kernel, groups = attributes.pop("kernel", 3), attributes.get("groups", 1)
    weight = Parameter(rng.standard_normal((o, c // groups, kernel, kernel)).astype("float32"))
    attributes = {"padding": (kernel // 2,) * 4, **attributes}
    return lambda x: Conv2d(**attributes)(x, weight), rng.standard_normal((1, c, size, size)).astype("float32")


def kernels(run: Any, x: np.ndarray, **options: Any) -> list[str]:
    exe = ndl.compile(run, (x,), **options)
    exe(x)
    names = [n for n in exe.plan.names if n.startswith("conv2d")]
    assert names == [n for n, *_ in exe.profile(x, rounds=1) if n.startswith("conv2d")]
    assert all(n in str(exe.plan) for n in names)
    return names


class TestChoice:
    @pytest.mark.parametrize(
        ("setting", "kernel"), [("auto", "conv2d_winograd_f4"), ("f2", "conv2d_winograd_f2"), ("off", "conv2d_blocked")]
    )
    def test_setting(self, setting: str, kernel: str) -> None:
        run, x = layer(64, 64, 32)
        assert kernels(run, x, winograd=setting) == [kernel]

    def test_default_is_auto(self) -> None:
        assert kernels(*layer(64, 64, 32)) == ["conv2d_winograd_f4"]

    @pytest.mark.parametrize(("size", "kernel"), [(1, "blocked"), (7, "winograd_f2"), (28, "winograd_f4")])
    def test_weights_of_small_images_cost_more_than_they_save(self, size: int, kernel: str) -> None:
        assert kernels(*layer(512, 512, size)) == [f"conv2d_{kernel}"]

    @pytest.mark.parametrize(
        "attributes",
        [{"kernel": 5}, {"kernel": 1}, {"stride": (2, 2)}, {"stride": (1, 2)}, {"dilation": (2, 2)}, {"groups": 2}],
        ids=str,
    )
    def test_what_winograd_does_not_do_is_direct(self, attributes: dict[str, Any]) -> None:
        assert kernels(*layer(64, 64, 32, **attributes)) == ["conv2d_blocked"]

    def test_few_channels_are_direct(self) -> None:
        assert kernels(*layer(3, 64, 32)) == ["conv2d_blocked"]

    def test_torch2needle_passes_it_on(self) -> None:
        model, x = torch.nn.Conv2d(64, 64, 3, padding=1).eval(), torch.randn(1, 64, 32, 32)
        for setting, kernel in (("auto", "conv2d_winograd_f4"), ("off", "conv2d_blocked")):
            exe = torch2needle.compile(model, (x,), winograd=setting)
            assert kernel in exe.plan.names
            assert torch.allclose(exe(x), model(x), atol=1e-5)

    def test_unknown_setting(self) -> None:
        run, x = layer(16, 16, 8)
        with pytest.raises(ValueError, match=r"^\[compile\] winograd expects one of auto, f2, off, got 'f6'\.$"):
            ndl.compile(run, (x,), winograd="f6")


def test_only_the_chosen_form_of_the_weights_is_kept() -> None:
    run, x = layer(64, 48, 32)
    sizes = {s: ndl.compile(run, (x,), winograd=s).memory["constants"] for s in ("auto", "f2", "off")}
    assert sizes == {"auto": 64 * 48 * 36 * 4, "f2": 64 * 48 * 16 * 4, "off": 64 * 48 * 9 * 4}


def test_changed_weights_are_transformed_again() -> None:
    weight = Parameter(np.ones((16, 16, 3, 3), "float32"))
    x = np.ones((1, 16, 32, 32), "float32")
    exe = ndl.compile(lambda x: Conv2d(padding=(1,) * 4)(x, weight), (x,))
    assert "conv2d_winograd_f4" in exe.plan.names
    assert np.allclose(exe(x)[0, 0, 1:-1, 1:-1], 144)
    weight.data = ndl.Tensor(np.full((16, 16, 3, 3), 2, "float32"))
    assert np.allclose(exe(x)[0, 0, 1:-1, 1:-1], 288)


def test_runs_are_the_same_to_the_last_bit() -> None:
    op = FusedLayer(Conv2d(padding=(1,) * 4), "relu")
    rng = np.random.default_rng(0)
    weight = Parameter(rng.standard_normal((96, 80, 3, 3)).astype("float32"))
    x = rng.standard_normal((2, 80, 45, 31)).astype("float32")
    exe = ndl.compile(lambda x: op(x, weight), (x,))
    assert "conv2d_winograd_f4" in exe.plan.names
    before, want = ndl.get_num_threads(), exe(x)
    try:
        for threads in (1, 2, 3, 16):
            ndl.set_num_threads(threads)
            assert all((exe(x) == want).all() for _ in range(3))
    finally:
        ndl.set_num_threads(before)
