"""The emulation finds races: faults planted for it, and equal bits from every kernel in any order of blocks and threads."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from needle.backend_ndarray import Device
from test_gpu import GPU
from test_gpu_ops import FIRST, leaves
from test_ops import case, cotangents, differentiable, float32_exact, gradients, run

SEEDS = range(1, 6)
FLAGS = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-DNEEDLE_EMULATION", f"-I{GPU.parent}"]
SOURCE = Path(__file__).with_name("gpu_faults.cpp")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program of faults as it is ("seeds", 64 lanes), and watched at every access ("races", 32 lanes)."""
    folder = tmp_path_factory.mktemp("faults")
    watched, main, detector = folder / "races", folder / "main.o", folder / "detector.o"
    for command in (
        ["-DNEEDLE_WAVE=64", str(SOURCE), "-o", str(folder / "seeds")],
        ["-DNEEDLE_WAVE=32", "-c", "-fsanitize=thread", str(SOURCE), "-o", str(main)],
        ["-DNEEDLE_WAVE=32", "-c", str(GPU / "emulation_races.cpp"), "-o", str(detector)],
        [str(main), str(detector), "-o", str(watched)],
    ):
        subprocess.run(["g++", *FLAGS, *command], check=True)
    return {"seeds": folder / "seeds", "races": watched}


def outcome(program: Path, name: str, seed: int, what: str = "fault") -> str:
    done = subprocess.run(
        [program, name, what], capture_output=True, text=True, env={"NEEDLE_EMULATION_SEED": str(seed)}, timeout=30
    )
    return done.stdout.strip() if done.returncode >= 0 else signal.Signals(-done.returncode).name


# What finds it, and what it says. "wrong": other numbers at one of the seeds, the right ones without a seed.
FOUND = {
    "race": ("seeds", "wrong"),
    "wave_race": ("races", "no barrier lies between two accesses of shared memory"),
    "blocks": ("seeds", "wrong"),
    "overrun": ("seeds", "bytes written between them"),
    "streams": ("seeds", "wrong"),
    "host_buffer": ("seeds", "wrong"),
    "use_after_free": ("seeds", "SIGSEGV"),
    "before_first": ("seeds", "SIGSEGV"),
}


@pytest.mark.parametrize("name", FOUND)
def test_planted_fault(faults: dict[str, Path], name: str) -> None:
    program, text = FOUND[name]
    for built in faults.values():
        assert {outcome(built, name, seed, "sound") for seed in (0, 1, 2)} == {"right"}
    assert any(text in outcome(faults[program], name, seed) for seed in SEEDS)
    if text == "wrong":
        assert outcome(faults[program], name, 0) == "right"
    if name in ("race", "blocks"):  # whatever the order is
        kind = "shared" if name == "race" else "device"
        for seed in (0, 1):
            assert f"no barrier lies between two accesses of {kind} memory" in outcome(faults["races"], name, seed)


@pytest.mark.parametrize(("name", "index"), FIRST)
def test_equal_bits_in_any_order(gpu: Device, name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gpu.name.startswith("emulation"):
        pytest.skip("the order is the emulation's to choose")
    op, arrays = case(name, index)
    arrays = float32_exact(arrays)
    slopes = differentiable(name, op, arrays)
    weights = float32_exact(cotangents(op, arrays)) if slopes else []

    def results() -> list[bytes | None]:
        found = run(op, [x.detach() for x in leaves(arrays, gpu)])
        found += gradients(op, leaves(arrays, gpu), weights) if slopes else []
        return [y if y is None else y.numpy().tobytes() for y in found]

    usual = results()
    try:
        for seed in SEEDS:
            gpu.limit_cache(None if seed % 2 else 0)  # with a cache nothing waits before its memory goes on to the next
            monkeypatch.setenv("NEEDLE_EMULATION_SEED", str(seed))
            assert results() == usual, f"seed {seed}"
    finally:
        gpu.limit_cache(0)
