"""A vendor's library that a test builds and tells how to behave (gpu_vendor.cpp), and calls that it may get."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpu_devices import gpu_device
from needle.backend_ndarray import Device, NDArray, array, call

ROOT = Path(__file__).resolve().parent.parent
NONE, RELU, SIGMOID, GELU = 0, 1, 4, 7
EXACT, TF32 = 0, 1


class Library:
    """The test's vendor: `behave` before a problem comes first, `runs` since then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))

    def behave(
        self, refuses: bool = False, fails_after: int = -1, milliseconds: int = 0, off_by: float = 0, workspace: int = 0
    ) -> None:
        self._library.behave(refuses, fails_after, milliseconds, ctypes.c_double(off_by), ctypes.c_size_t(workspace))

    def runs(self) -> int:
        return self._library.runs()

    def turns(self) -> int:
        """Runs that found another's result where theirs had been, by what they are `off_by`."""
        return self._library.turns()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("a C++ compiler is missing")
    out = tmp_path_factory.mktemp("vendor") / "libtest_vendor.so"
    source = ROOT / "tests" / "gpu_vendor.cpp"
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *options, source, "-o", out], check=True)
    return Library(out)


@pytest.fixture(scope="module", params=["emulation_w32", "emulation_w64"])
def emulated(request: pytest.FixtureRequest) -> Device:
    return gpu_device(request.param)


@pytest.fixture
def device(emulated: Device, library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """With the library open, well-behaved and used wherever it can."""
    monkeypatch.setenv("NEEDLE_EMULATION_VENDOR", str(library.path))
    library.behave()
    emulated.use_vendors("on")
    yield emulated
    monkeypatch.undo()
    emulated.use_vendors(None)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def on(device: Device, a: np.ndarray) -> NDArray:
    """On the device with numpy's strides."""
    order = sorted(range(a.ndim), key=lambda d: -a.strides[d])
    dense = array(np.ascontiguousarray(a.transpose(order)), device=device)
    return dense.permute(tuple(int(d) for d in np.argsort(order)))


def matmul(
    device: Device, m: int = 20, k: int = 12, n: int = 9, activation: int = RELU, precision: int = EXACT
) -> None:
    """Runs one with bias and residual and compares with float64."""
    a, b, bias, residual = normal(m, k), normal(k, n, seed=1), normal(n, seed=2), normal(m, n, seed=3)
    out = NDArray.empty((m, n), "float32", device)
    operands = {n: on(device, v) for n, v in (("a", a), ("b", b), ("bias", bias), ("residual", residual))}
    call("matmul_fused", [out], **operands, activation=activation, alpha=0, precision=precision)
    exact = a.astype(np.float64) @ b + bias + residual
    exact = {NONE: exact, RELU: np.maximum(exact, 0), SIGMOID: 1 / (1 + np.exp(-exact))}[activation]
    assert np.abs(out.numpy() - exact).max() < (1e-5 if precision == EXACT else 1e-1)


def taken(device: Device) -> list[str]:
    return [choice["taken"] for choice in device.choices()]
