"""Vendors' libraries: with one that a test builds and tells how to behave, in the emulation at both wave widths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from gpu_libraries import EXACT, NONE, RELU, SIGMOID, TF32, Library, matmul, normal, on, taken
from needle.backend_ndarray import Device, NDArray, call


def test_missing(emulated: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEEDLE_EMULATION_VENDOR", raising=False)
    emulated.use_vendors("auto")
    matmul(emulated)
    found = emulated.vendors()
    assert found["mode"] == "auto"
    assert [lib["open"] for lib in found["libraries"]] == [False, False]
    assert found["libraries"][0]["text"] == "NEEDLE_EMULATION_VENDOR names no library"
    monkeypatch.setenv("NEEDLE_EMULATION_VENDOR", "/nowhere/libtest.so")
    emulated.use_vendors("auto")
    assert "/nowhere/libtest.so" in emulated.vendors()["libraries"][0]["text"]
    assert emulated.choices() == []
    monkeypatch.undo()
    emulated.use_vendors(None)


def test_open(device: Device, library: Library) -> None:
    assert device.vendors() == {
        "mode": "on",
        "libraries": [
            {"name": "test_products", "open": True, "text": str(library.path)},
            {"name": "test_convolutions", "open": True, "text": str(library.path)},
        ],
    }


@pytest.mark.parametrize("milliseconds,winner", [(0, "test_products"), (60, "needle")])
def test_the_faster_one_is_taken(device: Device, library: Library, milliseconds: int, winner: str) -> None:
    library.behave(milliseconds=milliseconds)
    device.use_vendors("auto")
    matmul(device, 12, 4, 4)
    (choice,) = device.choices()
    assert choice["taken"] == winner
    assert choice["why"] == ("" if winner == "test_products" else "slower")
    assert (choice["ours_us"] > choice["theirs_us"] > 0) == (winner == "test_products")
    before = library.runs()
    matmul(device, 12, 4, 4)
    assert library.runs() - before == (winner == "test_products")
    assert len(device.choices()) == 1


def test_both_are_timed_in_turns(device: Device, library: Library) -> None:
    """A GPU's clock rises while it works: of two that are timed one after the other, the second would win."""
    library.behave(off_by=1e-5)
    device.use_vendors("auto")
    matmul(device, 12, 4, 4)
    assert library.turns() >= 7
    assert device.choices()[0]["ours_us"] > 0


def test_a_want_of_memory_is_not_kept(emulated: Device, library: Library) -> None:
    code = """
import resource
def product(n, memory=None):
    a, b = (array(np.ones(s, "float32"), device=device) for s in ((n, 1), (1, 2048)))
    out = NDArray.empty((n, 2048), "float32", device)
    pages = int(open("/proc/self/statm").read().split()[0])
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, -1))
    call("matmul", [out], a=a, b=b, activation=0, alpha=0)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return [(c["taken"], c["why"]) for c in device.choices() if c["shapes"][0][1] == n]
product(64)
print(product(1024, 4 << 20))
print([product(1024)[0][0] for _ in range(16)])
"""
    done = in_process(emulated, library, "on", code)
    assert done.stdout.splitlines() == [
        "[('needle', 'no memory to compare the results in')]",
        str(["needle"] * 15 + ["test_products"]),
    ], done.stderr


def test_a_choice_says_what_it_is_for(device: Device) -> None:
    matmul(device, 20, 12, 9, precision=TF32)
    (choice,) = device.choices()
    assert choice["op"] == "matmul"
    assert choice["shapes"] == [[1, 20, 12], [1, 12, 9], [1, 20, 9]]
    assert choice["strides"] == [[0, 12, 1], [0, 9, 1], [0, 9, 1]]
    assert (choice["precision"], choice["activation"]) == ("tf32", RELU)
    assert (choice["scale"], choice["bias"], choice["residual"]) == (False, True, True)
    assert choice["taken"] == "test_products"


def test_forced_on(device: Device, library: Library) -> None:
    library.behave(milliseconds=60)
    matmul(device)
    assert taken(device) == ["test_products"]
    assert device.choices()[0]["theirs_us"] == 0  # not timed


def test_forced_off(device: Device, library: Library) -> None:
    device.use_vendors("off")
    matmul(device)
    assert (library.runs(), device.choices()) == (0, [])
    assert device.vendors()["libraries"][0] == {
        "name": "test_products",
        "open": False,
        "text": "vendors' libraries are off",
    }


def test_refuses(device: Device, library: Library) -> None:
    library.behave(refuses=True)
    matmul(device)
    (choice,) = device.choices()
    assert (choice["taken"], choice["why"], library.runs()) == ("needle", "not today", 0)


@pytest.mark.parametrize("fails_after", [0, 1, 3])
@pytest.mark.parametrize("mode", ["auto", "on"])
def test_an_error_ends_its_use(device: Device, library: Library, fails_after: int, mode: str) -> None:
    """At the first run, while it is timed, or later: the result is right, and needle's kernel goes on."""
    device.use_vendors(mode)
    library.behave(fails_after=fails_after)
    for _ in range(5):
        matmul(device, 12, 4, 4)
    (choice,) = device.choices()
    assert (choice["taken"], choice["why"]) == ("needle", "error 7")


def test_a_wrong_result_is_noticed(device: Device, library: Library) -> None:
    library.behave(off_by=0.01)
    matmul(device)
    (choice,) = device.choices()
    assert choice["taken"] == "needle" and choice["why"].startswith("results differ by ")
    matmul(device, precision=TF32)  # for which so much is rounding
    assert sorted(taken(device)) == ["needle", "test_products"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_a_number_on_one_side_is_noticed(device: Device, library: Library, value: float) -> None:
    library.behave(off_by=value)
    matmul(device)
    assert taken(device) == ["needle"]


def test_not_a_number_on_both_sides_is_no_difference(device: Device) -> None:
    a = normal(10, 10)
    a[3, 4], a[5, 6] = np.nan, np.inf
    out = NDArray.empty((10, 10), "float32", device)
    with np.errstate(invalid="ignore"):
        call("matmul", [out], a=on(device, a), b=on(device, normal(10, 10, seed=1)), activation=NONE, alpha=0)
    assert taken(device) == ["test_products"]


def test_choices_are_by_shape_layout_and_epilogue(device: Device) -> None:
    for arguments in ({}, {"m": 21}, {"activation": NONE}, {"precision": TF32}, {"m": 20}):
        matmul(device, **arguments)
    assert len(device.choices()) == 4
    out = NDArray.empty((4, 5), "float32", device)
    a, b = normal(4, 6), normal(6, 5, seed=1)
    for operand in (a, np.asfortranarray(a)):
        call("matmul", [out], a=on(device, operand), b=on(device, b), activation=NONE, alpha=0)
        assert np.abs(out.numpy() - a @ b).max() < 1e-5
    assert len(device.choices()) == 6


def test_workspace(device: Device, library: Library) -> None:
    """It is the calling thread's scratch memory, as large as asked for: beyond its end the emulation has no memory."""
    device.limit_cache(0)
    library.behave(workspace=100_001)
    matmul(device)
    assert taken(device) == ["test_products"]
    device.limit_cache(None)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_result_that_is_what_it_adds(device: Device, library: Library, mode: str) -> None:
    """Each try finds the residual as it was, and so does the run that counts."""
    device.use_vendors(mode)
    for times in range(1, 4):
        a, b, out = normal(9, 5), normal(5, 7, seed=1), on(device, normal(9, 7, seed=2))
        operands = {"a": on(device, a), "b": on(device, b), "residual": out}
        call("matmul_fused", [out], **operands, activation=SIGMOID, alpha=0, precision=EXACT)
        exact = 1 / (1 + np.exp(-(a @ b + normal(9, 7, seed=2))))
        assert np.abs(out.numpy() - exact).max() < 1e-5
        assert len(device.choices()) == 1 and library.runs() >= times


def test_a_result_that_is_an_operand(device: Device, library: Library) -> None:
    """It would not survive being tried: our kernel runs once."""
    a, b = on(device, normal(8, 8)), on(device, normal(8, 8, seed=1))
    call("matmul", [a], a=a, b=b, activation=NONE, alpha=0)
    assert (library.runs(), device.choices()) == (0, [])


@pytest.mark.parametrize("way", ["folder", "wheel"])
def test_where_libraries_are_looked_for(
    way: str, emulated: Device, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of NEEDLE_VENDOR_LIBRARIES, and in the folders of wheels on the path of modules."""
    folder = tmp_path if way == "folder" else tmp_path / "nvidia" / "test" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(library.path, folder / f"lib{way}.so")
    code = """
import os, sys, needle as ndl
print(ndl.emulation(int(sys.argv[1])).vendors()["libraries"][0]["text"])
"""
    environment = {**os.environ, "NEEDLE_EMULATION_VENDOR": f"lib{way}.so", "NEEDLE_GPU_VENDOR": "auto"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), *([str(tmp_path)] if way == "wheel" else [])])
    environment["NEEDLE_VENDOR_LIBRARIES"] = f"/nowhere:{tmp_path}" if way == "folder" else ""
    command = [sys.executable, "-c", code, emulated.name.removeprefix("emulation_w")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(folder / f"lib{way}.so"), done.stderr


def test_modes(emulated: Device) -> None:
    with pytest.raises(ValueError, match="expects one of auto, on, off, got maybe"):
        emulated.use_vendors("maybe")


def in_process(emulated: Device, library: Library, mode: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` where `dot(n)` multiplies on the device and `library` is the test's."""
    prelude = f"""
import ctypes, numpy as np, needle as ndl
from needle.backend_ndarray import NDArray, array, call
device = ndl.emulation({emulated.name.removeprefix("emulation_w")})
library = ctypes.CDLL({str(library.path)!r})
def dot(n):
    a, out = array(np.eye(n, dtype="float32"), device=device), NDArray.empty((n, n), "float32", device)
    call("matmul", [out], a=a, b=a, activation=0, alpha=0)
    assert (out.numpy() == np.eye(n)).all()
"""
    environment = {**os.environ, "NEEDLE_EMULATION_VENDOR": str(library.path), "NEEDLE_GPU_VENDOR": mode}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run([sys.executable, "-c", prelude + code], env=environment, capture_output=True, text=True)


def test_a_failure_is_said_once(emulated: Device, library: Library) -> None:
    code = """
for n in (10, 11, 12):
    library.behave(False, 0, 0, ctypes.c_double(0), ctypes.c_size_t(0))
    dot(n)
print([c["why"] for c in device.choices()])
"""
    done = in_process(emulated, library, "auto", code)
    assert done.stdout.strip() == str(["error 7"] * 3), done.stderr
    assert done.stderr == "[vendor] test_products: error 7; needle's own kernels go on (said once).\n"


def test_the_environment_chooses_the_mode(emulated: Device, library: Library) -> None:
    code = "dot(12); print(device.vendors()['mode'], [c['taken'] for c in device.choices()])"
    assert in_process(emulated, library, "on", code).stdout.strip() == "on ['test_products']"
    assert in_process(emulated, library, "off", code).stdout.strip() == "off []"
    wrong = in_process(emulated, library, "maybe", code)
    assert wrong.stderr.strip().endswith("[vendor] NEEDLE_GPU_VENDOR expects off, on or auto, got maybe.")


def test_a_plan_records_the_librarys_runs(device: Device, library: Library) -> None:
    net = ndl.nn.Sequential(ndl.nn.Linear(12, 9), ndl.nn.ReLU()).to(device)
    weight, bias = (p.numpy() for p in net.parameters())
    exe = ndl.compile(net, ndl.Tensor(normal(20, 12), device=device))
    before = library.runs()
    for seed in range(5):
        x = normal(20, 12, seed=seed)
        exact = np.maximum(x.astype(np.float64) @ weight + bias, 0)
        assert np.abs(exe(ndl.Tensor(x, device=device)).numpy() - exact).max() < 1e-5
    assert taken(device) == ["test_products"] and exe.plan.core.graphs == 1
    assert library.runs() >= before + 5
