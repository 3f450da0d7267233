"""Microseconds of small eager ops: `python profiling/overhead.py [--json FILE]`.

An op's whole time, the core's calls in it, the rest (Python), and torch's eager op on equal values. One thread, medians of
alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import needle as ndl
from needle import isa
from needle.profiler import cpu_name

SIZE, CALLS = 8, 2_000
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda x, y: x.relu(),
    "add": lambda x, y: x + y,
    "add a number": lambda x, y: x + 2.0,
    "matmul": lambda x, y: x @ y,
    "sum": lambda x, y: x.sum(),
    "mean over an axis": lambda x, y: x.mean(1),
    "reshape": lambda x, y: x.reshape((SIZE * SIZE,)),
    "transpose": lambda x, y: x.transpose(0, 1),
}


class Recorded:
    """A kernel that also keeps its calls."""

    def __init__(self, kernel: Any, calls: list[Callable[[], Any]]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.kernel, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            kept = [tuple(a) if isinstance(a, list | type({}.values())) else a for a in args]
            self.calls.append(lambda: found(*kept))
            return found(*args)

        return call


def core_calls(f: Callable[[], Any]) -> list[Callable[[], Any]]:
    """The calls of kernels within `f`, to be made again."""
    calls: list[Callable[[], Any]] = []
    kernels = ndl.cpu().kernels
    f()  # kernels are looked up at their first use
    with mock.patch.dict(kernels, {name: Recorded(k, calls) for name, k in dict(kernels).items()}):
        f()
    return calls


def once(f: Callable[[], Any]) -> float:
    return 1e6 * timeit.timeit(f, number=CALLS) / CALLS


def measure(rounds: int) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    ndl.set_num_threads(1)
    draw = np.random.RandomState(0)
    arrays = [draw.randn(SIZE, SIZE).astype("float32") for _ in range(2)]
    ours, theirs = [ndl.Tensor(a) for a in arrays], [torch.tensor(a, requires_grad=True) for a in arrays]
    rows = []
    for name, op in OPS.items():
        np.testing.assert_allclose(op(*ours).numpy(), op(*theirs).detach().numpy(), rtol=1e-5, atol=1e-6)
        calls = core_calls(lambda op=op: op(*ours))  # type: ignore[misc]
        timed: dict[str, Callable[[], Any]] = {
            "needle_us": lambda op=op: op(*ours),  # type: ignore[misc]
            "core_us": lambda calls=calls: [c() for c in calls],  # type: ignore[misc]
            "torch_us": lambda op=op: op(*theirs),  # type: ignore[misc]
        }
        times = [{k: once(f) for k, f in timed.items()} for _ in range(rounds)]
        row = {k: statistics.median(t[k] for t in times) for k in timed}
        rows.append({"op": name, **row, "python_us": row["needle_us"] - row["core_us"]})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    print(
        f"{cpu_name()}, {isa()}, float32 {SIZE} x {SIZE} with gradients, microseconds\n{'':<20}needle   core  Python   torch"
    )
    rows = measure(args.rounds)
    for r in rows:
        print(f"{r['op']:<20}{r['needle_us']:6.2f} {r['core_us']:6.2f}  {r['python_us']:6.2f}  {r['torch_us']:6.2f}")
    if args.json:
        document = {"cpu": cpu_name(), "isa": isa(), "rounds": args.rounds, "results": rows}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
