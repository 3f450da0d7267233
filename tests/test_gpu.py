"""GPU kernels: in the host emulation at both wave widths on any machine, and on CUDA and HIP devices where there are some."""

from __future__ import annotations

import ctypes as c
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpu_devices import DEVICES, gpu_library, parameters

ROOT = Path(__file__).resolve().parent.parent
GPU = ROOT / "csrc" / "gpu"
BUILD = ROOT / "build-gpu"
NONE, RELU = 0, 1


class View(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("shape", c.c_int64 * 8),
        ("stride", c.c_int64 * 8),
        ("rank", c.c_int32),
        ("dtype", c.c_int32),
    ]


SCRATCH = c.CFUNCTYPE(c.c_void_p, c.c_int, c.c_size_t)


class Exec(c.Structure):
    _fields_ = [("threads", c.c_int), ("parallel", c.c_void_p), ("scratch", SCRATCH), ("stream", c.c_void_p)]


class Call(c.Structure):
    _fields_ = [
        ("out", c.POINTER(View)),
        ("in_", c.POINTER(View)),
        ("attr", c.POINTER(c.c_double)),
        ("n_out", c.c_int),
        ("n_in", c.c_int),
        ("exec", c.POINTER(Exec)),
    ]


class KernelRow(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("inputs", c.c_char_p),
        ("outputs", c.c_char_p),
        ("attrs", c.c_char_p),
        ("groups", c.c_bool),
        ("run", c.CFUNCTYPE(None, c.POINTER(Call))),
    ]


class DeviceProperties(c.Structure):
    _fields_ = [("name", c.c_char * 128), ("warp", c.c_int32), ("units", c.c_int32), ("memory", c.c_int64)]


class BackendTable(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("alloc", c.CFUNCTYPE(c.c_void_p, c.c_size_t)),
        ("free", c.CFUNCTYPE(None, c.c_void_p, c.c_size_t)),
        ("copy", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_size_t, c.c_void_p)),
        ("sync", c.CFUNCTYPE(None, c.c_void_p)),
        ("properties", c.CFUNCTYPE(c.c_bool, c.POINTER(DeviceProperties))),
        ("rows", c.POINTER(KernelRow)),
        ("n_rows", c.c_int),
    ]


class Backend:
    """One GPU library, called as needle's core calls it: arrays live in device memory, kernels get a Call."""

    def __init__(self, path: Path):
        self.library = c.CDLL(str(path))
        self.library.needle_backend.restype = c.POINTER(BackendTable)
        self.table = self.library.needle_backend().contents
        self.rows = {row.name.decode(): row for row in self.table.rows[: self.table.n_rows]}

    def properties(self) -> DeviceProperties | None:
        p = DeviceProperties()
        return p if self.table.properties(p) else None

    def self_check(self) -> str:
        message = c.create_string_buffer(512)
        return message.value.decode() if self.library.needle_self_check(message, 512) else "passed"

    def run(self, name: str, inputs: list[np.ndarray | None], out: np.ndarray, attrs: list[float]) -> np.ndarray:
        """Runs a kernel; every array goes to the device with its own strides, gaps included."""
        held: list[tuple[int, int]] = []

        def view(a: np.ndarray | None) -> View:
            if a is None:
                return View(rank=-1)
            span = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)) + a.itemsize if a.size else 0
            p = self.table.alloc(span)
            assert p, "out of device memory"
            held.append((p, span))
            self.table.copy(p, a.ctypes.data, span, None)
            strides = [s // a.itemsize for s in a.strides]
            return View(p, (c.c_int64 * 8)(*a.shape), (c.c_int64 * 8)(*strides), a.ndim, 0)

        ins = (View * len(inputs))(*[view(a) for a in inputs])
        outs = (View * 1)(view(out))
        call = Call(
            outs, ins, (c.c_double * len(attrs))(*attrs), 1, len(inputs), c.pointer(Exec(1, None, SCRATCH(), None))
        )
        self.rows[name].run(call)
        self.table.sync(None)
        if held[-1][1]:
            self.table.copy(out.ctypes.data, held[-1][0], held[-1][1], None)
        self.table.sync(None)
        for p, span in held:
            self.table.free(p, span)
        return out


def build(folder: str, *options: str) -> Path:
    """Configures and builds csrc/gpu on its own; later runs only check that nothing changed."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not cmake:
        pytest.skip("cmake is missing")
    if ccache := shutil.which("ccache"):
        options = (*options, f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}")
    where = BUILD / folder
    where.mkdir(parents=True, exist_ok=True)
    with open(where / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            [cmake, "-S", GPU, "-B", where, *options],
            [cmake, "--build", where, "-j", str(os.cpu_count())],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return where


@pytest.fixture(scope="session", params=parameters(DEVICES))
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(gpu_library(request.param))


def linear(backend: Backend, x, w, b, activation, out=None) -> None:
    """Runs `linear` and compares with float64."""
    out = np.full((x.shape[0], w.shape[0]), np.nan, np.float32) if out is None else out
    backend.run("linear", [x, w, b], out, [activation, 0.0])
    exact = x.astype(np.float64) @ w.astype(np.float64).T + (0 if b is None else b.astype(np.float64))
    if activation == RELU:
        exact = np.maximum(exact, 0)
    if exact.size:
        scale = max(np.abs(exact).max(), 1e-30)
        assert np.abs(out - exact).max() / scale < 5e-6


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# Few rows (1, 3, 8), tiles of 64 and of 128, multiples of neither, float4 loads and single ones, one and many k steps.
SHAPES = [
    (1, 1, 1),
    (1, 17, 3),
    (1, 130, 64),
    (1, 65, 130),
    (1, 40, 512),
    (2, 5, 65),
    (3, 17, 1),
    (3, 33, 100),
    (4, 16, 256),
    (5, 64, 17),
    (8, 65, 64),
    (8, 130, 131),
    (9, 1, 17),
    (17, 3, 65),
    (64, 64, 64),
    (64, 65, 3),
    (65, 64, 130),
    (65, 1, 16),
    (130, 130, 17),
    (128, 128, 32),
    (131, 67, 64),
    (300, 130, 24),
    (257, 260, 9),
    (130, 300, 40),
]


@pytest.mark.parametrize("m,n,k", SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
def test_linear(backend: Backend, m: int, n: int, k: int, transposed: bool) -> None:
    x, b = normal(m, k), normal(n, seed=2)
    w = normal(k, n, seed=1).T if transposed else normal(n, k, seed=1)
    linear(backend, x, w, b, RELU)
    linear(backend, x, w, None, NONE)


@pytest.mark.parametrize("m", [1, 6, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [NONE, RELU])
def test_linear_epilogue(backend: Backend, m: int, bias: bool, activation: int) -> None:
    linear(backend, normal(m, 36), normal(50, 36, seed=1), normal(50, seed=2) if bias else None, activation)


@pytest.mark.parametrize("m", [1, 7, 66])
def test_linear_strided(backend: Backend, m: int) -> None:
    """Slices of larger arrays, in every role; the gaps of the output stay untouched."""
    x = normal(m, 96)[:, 3:63]
    w = normal(140, 60, seed=1)[::2]
    b = normal(210, seed=2)[::3]
    whole = np.full((m, 84), 5, np.float32)
    linear(backend, x, w, b, RELU, whole[:, 4:74])
    assert (whole[:, :4] == 5).all() and (whole[:, 74:] == 5).all()
    # float4 loads are possible here, but not for the last ones: K and N end inside a wider array.
    linear(backend, normal(m, 64)[:, :61], normal(70, 64, seed=1)[:, :61], None, NONE)
    linear(backend, normal(m, 64)[:, :61], normal(61, 72, seed=1)[:, :70].T, None, NONE)
    linear(backend, np.asfortranarray(normal(m, 60)), w, None, NONE)
    linear(backend, np.ascontiguousarray(x), np.ascontiguousarray(w), None, NONE, np.zeros((70, m), np.float32).T)


@pytest.mark.parametrize("m,n,k", [(0, 4, 4), (4, 0, 4), (3, 5, 0), (70, 70, 0)])
def test_linear_empty(backend: Backend, m: int, n: int, k: int) -> None:
    linear(backend, normal(m, k), normal(n, k, seed=1), normal(n, seed=2), RELU)


def leaky(v: np.ndarray) -> np.ndarray:
    return np.where(v < 0, 0.1 * v, v)


ACTIVATIONS = {
    2: lambda v: np.clip(v, 0, 6),
    3: leaky,
    4: lambda v: 1 / (1 + np.exp(-v)),
    5: lambda v: v / (1 + np.exp(-v)),
    6: np.tanh,
}


@pytest.mark.parametrize("m", [3, 66, 260])
@pytest.mark.parametrize("code", ACTIVATIONS)
def test_linear_other_activations(backend: Backend, m: int, code: int) -> None:
    """By their codes in math/maps.h, whose own tests cover their accuracy."""
    x, w, b = normal(m, 20), normal(140, 20, seed=1), normal(140, seed=2)
    out = backend.run("linear", [x, w, b], np.zeros((m, 140), np.float32), [code, 0.1, 1.0])
    exact = ACTIVATIONS[code](x.astype(np.float64) @ w.T.astype(np.float64) + b)
    assert np.abs(out - exact).max() / np.abs(exact).max() < 5e-6


@pytest.mark.parametrize("m", [2, 70])
def test_linear_keeps_nan(backend: Backend, m: int) -> None:
    x = normal(m, 20)
    x[1, 3] = np.nan
    out = np.zeros((m, 9), np.float32)
    backend.run("linear", [x, normal(9, 20, seed=1), None], out, [RELU, 0.0])
    assert np.isnan(out[1]).all() and not np.isnan(np.delete(out, 1, axis=0)).any()


def test_properties(backend: Backend) -> None:
    p = backend.properties()
    assert p is not None and p.units > 0
    assert p.warp == (64 if backend.table.name in (b"emulation_w64", b"hip") else 32)


def test_rows_name_their_kernels(backend: Backend) -> None:
    row = backend.rows["linear"]
    assert (row.inputs, row.outputs, row.attrs) == (b"x:f weight: bias?: ", b"y: ", b"activation alpha ")


@pytest.mark.parametrize("reverse", ["0", "1"], ids=["forward", "reverse"])
def test_self_check(backend: Backend, reverse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffles, ballots, barriers and shared memory; in the emulation with the threads in either order."""
    monkeypatch.setenv("NEEDLE_EMULATION_REVERSE", reverse)
    assert backend.self_check() == "passed"


@pytest.mark.parametrize("m,n,k", [(3, 33, 100), (65, 70, 40), (257, 260, 17)])
def test_linear_does_not_depend_on_thread_order(backend: Backend, m: int, n: int, k: int, monkeypatch) -> None:
    monkeypatch.setenv("NEEDLE_EMULATION_REVERSE", "1")
    linear(backend, normal(m, k), normal(n, k, seed=1), normal(n, seed=2), RELU)


@pytest.mark.parametrize("name", ["emulation_w32", "emulation_w64"])
def test_no_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device a library loads, says so, and neither allocates nor crashes. scripts/hip_check tries the vendors'."""
    loaded = Backend(gpu_library(name))
    monkeypatch.setenv("NEEDLE_EMULATION_DEVICES", "0")
    assert loaded.properties() is None
    assert not loaded.table.alloc(16)
    assert loaded.self_check().startswith("[self_check] the device refused the call, got ")


# What the self-check and the emulation must notice: (file, sound text, broken text).
BREAKS = {
    "block barrier": ("portable.cuh", "void block_sync() { emulation::wait_block(); }", "void block_sync() {}"),
    "wave barrier": ("portable.cuh", "void wave_sync() { emulation::wait_wave(); }", "void wave_sync() {}"),
    "ballot of 32 bits": ("emulation.h", "<uint64_t>(slot[i][0]) << i", "<uint64_t>(slot[i][0]) << i % 32"),
    "shuffle that ignores its lane": ("emulation.h", "memcpy(&v, slot[lane]", "memcpy(&v, slot[0]"),
    "shuffle slots used too early": ("emulation.h", "exchanges++ % 2; }", "exchanges++ % 1; }"),
    "reduction from lane 16 down": (
        "portable.cuh",
        "W / 2; bits > 0; bits /= 2) v = combine",
        "16; bits > 0; bits /= 2) v = combine",
    ),
}


# Errors in how mma.cuh spreads tiles over lanes and registers: (lanes of a wave, sound text, broken text).
LAYOUTS = {
    "lanes of a fragment": (32, "lane_id() / 4 * distance + lane_id() % 4", "lane_id() % 8 * distance + lane_id() / 8"),
    "rows and words of a fragment": (32, "i % 2 * 8 * distance + i / 2 * 4", "i / 2 % 2 * 8 * distance + i % 2 * 4"),
    "words of a fragment": (32, "distance + i / 2 * 4)", "distance + i / 2 * 2)"),
    "registers of A": (32, "a.v[s + 1], a.v[s + 2]", "a.v[s + 2], a.v[s + 1]"),
    "registers of B": (32, "b.v[s + n], b.v[s + n + 2]", "b.v[s + n + 2], b.v[s + n]"),
    "columns of B": (32, "b.v[s + n], b.v[s + n + 2]", "b.v[s + 2 * n], b.v[s + 2 * n + 1]"),
    "steps of k": (32, "s < Fragment<P>::kWords / 2; s += 4", "s < 4; s += 4"),
    "halves of the sums": (32, "(v + 4 * n,", "(v + 4 * (1 - n),"),
    "rows of the sums": (32, "e / 2 % 2 * 8; }", "e % 2 * 8; }"),
    "columns of the sums": (32, "lane_id() % 4 * 2 + e % 2 +", "lane_id() % 4 + e % 2 * 4 +"),
    "lanes of a fragment (MFMA)": (64, "% 16 * stride + lane_id() / 16 * 4", "/ 4 * stride + lane_id() % 4 * 4"),
    "k of a fragment (MFMA)": (64, "* stride + lane_id() / 16 * 4", "* stride + lane_id() / 32 * 4"),
    "A and B (MFMA)": (64, "mfma<P>(a.v, b.v, v)", "mfma<P>(b.v, a.v, v)"),
    "k of four products (MFMA)": (64, "(a.v[k], b.v[k], v)", "(a.v[k], b.v[k ^ 1], v)"),
    "rows of the sums (MFMA)": (64, "lane_id() / 16 * 4 + e; }", "lane_id() / 16 + e * 4; }"),
    "columns of the sums (MFMA)": (64, "return lane_id() % 16; }", "return lane_id() % 16 ^ 1; }"),
}


def self_check_of(folder: Path, wave: int, file: str, sound: str, broken: str) -> subprocess.CompletedProcess[str]:
    """The self-check in the emulation, one file changed."""
    shutil.copytree(GPU, folder / "gpu")
    text = (folder / "gpu" / file).read_text()
    assert text.count(sound) == 1, "this test must follow the source"
    (folder / "gpu" / file).write_text(text.replace(sound, broken))
    main = folder / "main.cpp"
    main.write_text(
        '#include "gpu/self_check.cu"\n'
        'int main() { char m[512] = ""; int bad = needle_self_check(m, 512); puts(m); return bad; }\n'
    )
    flags = ["-std=c++17", "-O0", "-w", "-U_FORTIFY_SOURCE", "-DNEEDLE_EMULATION", f"-DNEEDLE_WAVE={wave}"]
    subprocess.run(["g++", *flags, f"-I{folder}", f"-I{GPU.parent}", main, "-o", folder / "main"], check=True)
    return subprocess.run([folder / "main"], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("name", BREAKS)
def test_self_check_notices(name: str, tmp_path: Path) -> None:
    assert self_check_of(tmp_path, 64, *BREAKS[name]).returncode != 0, f"a broken {name} went unnoticed"


@pytest.mark.parametrize("name", LAYOUTS)
def test_self_check_notices_layout(name: str, tmp_path: Path) -> None:
    wave, sound, broken = LAYOUTS[name]
    done = self_check_of(tmp_path, wave, "mma.cuh", sound, broken)
    assert done.returncode == 1 and " product of thread " in done.stdout, done.stdout
