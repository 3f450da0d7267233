"""Errors of 3 x 3 convolutions against float64, by algorithm, channels and instruction set.

`python profiling/winograd_errors.py [--json FILE]`: the largest error of three images relative to the largest value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import needle as ndl
from needle.executor.tuner import Timings
from needle.ops.nn.conv import Conv2d

ISAS = ("scalar", "avx2", "avx512")
ALGORITHMS = ("direct", "f2", "f4")
CHANNELS = (1, 3, 17, 31, 33, 64, 100, 256, 512)
SIZES = ((2, 2), (7, 9), (33, 30))


def forced(run: Callable, x: np.ndarray, algorithm: str) -> ndl.Executable:
    """`run` compiled with one algorithm: by kept times that say it is the fastest."""
    timings = Timings()
    for option in ndl.compile(run, (x,)).plan.options:
        timings.seconds[option.layer] = {a: 1.0 if a == algorithm else 2.0 for a in option.candidates}
    timings.save()
    return ndl.compile(run, (x,), tune=True)


def error(algorithm: str, channels: int) -> float:
    rng = np.random.default_rng(channels)
    conv, worst = Conv2d(padding=(1,) * 4), 0.0
    w = (rng.standard_normal((channels, channels, 3, 3)) / np.sqrt(9 * channels)).astype("float32")
    weight, eye = ndl.nn.Parameter(w), ndl.nn.Parameter(np.eye(channels, dtype="float32")[:, :, None, None])
    for size in SIZES:
        x = rng.standard_normal((1, channels, *size)).astype("float32")
        exe = forced(lambda v: conv(Conv2d()(v, eye), weight), x, algorithm)  # from a layer on, images are blocked
        kernel = "conv2d_blocked" if algorithm == "direct" else f"conv2d_winograd_{algorithm}"
        assert exe.plan.names.count(kernel) == 1 + (algorithm == "direct")
        want = conv.reference(x.astype("float64"), w.astype("float64"))
        worst = max(worst, float(np.abs(exe(x) - want).max() / np.abs(want).max()))
    return worst


def errors_of(isa: str, channels: Sequence[int]) -> dict[str, dict[str, float]] | None:
    """Errors by algorithm and channels, in a process that runs with the instruction set; None where the CPU lacks it."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "NEEDLE_ISA": isa, "NEEDLE_CACHE": cache}
        command = [sys.executable, __file__, "--here", "--channels", *map(str, channels)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if "is not supported by this CPU" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"[winograd_errors] the process with {isa} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS)
    parser.add_argument("--here", action="store_true", help="only with this process's instruction set, as JSON")
    args = parser.parse_args()
    if args.here:
        print(json.dumps({a: {str(c): error(a, c) for c in args.channels} for a in ALGORITHMS}))
        return
    found = {isa: errors for isa in ISAS if (errors := errors_of(isa, args.channels))}
    print("channels " + "".join(f"{isa + ' ' + a:>16}" for isa in found for a in ALGORITHMS))
    for c in map(str, args.channels):
        print(f"{c:>8} " + "".join(f"{found[isa][a][c]:>16.1e}" for isa in found for a in ALGORITHMS))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
