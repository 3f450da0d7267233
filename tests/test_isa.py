"""The ISAs agree, and their objects share no code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from needle import _core

LIBRARY = Path(_core.__file__).parent / "lib" / "libneedle.so"  # where the kernels are

RUN = """
import sys, numpy as np, needle as ndl
sys.path.insert(0, {tests!r})
from test_executor import small_net, image
x = image(2, 3, 33, 18)
maps, scores = ndl.compile(small_net(20), (x,))(x)
np.savez({out!r}, isa=ndl.isa(), maps=maps, scores=scores)
"""


def test_isas_agree(tmp_path: Path) -> None:
    results = {}
    for isa in ("scalar", "neon", "avx2", "avx512"):
        out = tmp_path / f"{isa}.npz"
        code = RUN.format(tests=str(Path(__file__).parent), out=str(out))
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "NEEDLE_ISA": isa}, capture_output=True, text=True
        )
        if "is not supported by this CPU" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        results[isa] = np.load(out)
        assert str(results[isa]["isa"]) == isa
    assert len(results) >= 2
    want = results.pop("scalar")
    for got in results.values():
        for key in ("maps", "scores"):
            assert np.abs(got[key] - want[key]).max() <= 1e-5 * np.abs(want[key]).max()


def test_unknown_isa_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import needle"], env={**os.environ, "NEEDLE_ISA": "mmx"}, capture_output=True, text=True
    )
    assert "[needle] NEEDLE_ISA expects scalar, neon, avx2 or avx512, got mmx." in done.stderr


def test_weak_symbols_stay_in_their_isa() -> None:
    """An inline function compiled for AVX-512 must not be what another ISA's code calls."""
    try:
        names = subprocess.run(["nm", "-C", LIBRARY], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nm is not here")
    weak = [line.split(maxsplit=2)[-1] for line in names.splitlines() if " W " in line or " V " in line]
    shared = [n for n in weak if "needle::View::" in n or "needle::Call::" in n]
    assert not shared
