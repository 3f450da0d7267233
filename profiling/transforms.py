"""Fourier transforms beside torch's: `python profiling/transforms.py [--json FILE] [--threads N] [--rounds N]`.

The step of a plan and needle's eager call, on parts in memory of their own, and torch's eager call, in turns. The ratio is
torch's time over the step's: over 1, needle is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import needle as ndl
from needle import ops
from needle.profiler import cpu_name

SIZES = (256, 500, 512, 997, 1000, 1024, 2310, 4096, 4099, 8192, 16384, 30030, 65536)
BATCHES = (1, 64)
FORMS: dict[str, tuple[Callable, Callable]] = {
    "fft": (ops.fft, torch.fft.fft),
    "rfft": (ops.rfft, torch.fft.rfft),
    "irfft": (ops.irfft, torch.fft.irfft),
}
SECONDS = 0.02  # that a round takes at least


def timed(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def measure(form: str, batch: int, n: int, rounds: int) -> dict[str, Any]:
    ours, theirs = FORMS[form]
    shape = (batch, n // 2 + 1 if form == "irfft" else n)
    x = torch.randn(shape) if form == "rfft" else torch.randn(shape, dtype=torch.cfloat)
    tensor = lambda t: ndl.Tensor(t.numpy(), requires_grad=False)  # noqa: E731
    given = tensor(x) if form == "rfft" else ndl.Complex(tensor(x.real), tensor(x.imag))
    exe, want = ndl.compile(ours, (given,)), theirs(x).numpy()
    error = np.abs(exe(given).numpy() - want).max() / np.abs(want).max()
    calls = [lambda: ours(given), lambda: theirs(x)]
    counts = [max(3, round(SECONDS / timed(c, 3))) for c in calls]
    steps, eager, torchs = [], [], []
    for _ in range(rounds):
        steps.append(sum(t for *_, t in exe.profile(given, rounds=min(counts[0], 50))))
        eager.append(timed(calls[0], counts[0]))
        torchs.append(timed(calls[1], counts[1]))
    ratios = sorted(t / s for t, s in zip(torchs, steps, strict=True))
    return {
        "form": form,
        "batch": batch,
        "n": n,
        "step_us": 1e6 * statistics.median(steps),
        "eager_us": 1e6 * statistics.median(eager),
        "torch_us": 1e6 * statistics.median(torchs),
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "largest": ratios[-1],
        "error": float(error),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ndl.set_num_threads(args.threads)
    print(f"{cpu_name()}, {ndl.isa()}, {args.threads} threads")
    rows = []
    for form in FORMS:
        for batch in BATCHES:
            for n in SIZES:
                rows.append(r := measure(form, batch, n, args.rounds))
                span = f"({r['least']:.2f} to {r['largest']:.2f})"
                times = f"step {r['step_us']:9.1f} us  eager {r['eager_us']:9.1f} us  torch {r['torch_us']:9.1f} us"
                print(f"{form:6}{batch:4} x {n:<7}{times}  {r['ratio']:5.2f} {span}", flush=True)
    ratios = [r["ratio"] for r in rows]
    print(f"least ratio {min(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}")
    if args.json:
        facts = {"cpu": cpu_name(), "isa": ndl.isa(), "threads": args.threads, "rows": rows}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
