"""A product of square matrices by TVM's default loops, scheduled by hand and tuned, beside needle and torch; results as JSON.

python profiling/tvm_matmul.py [--size 512] [--trials N] [--json F]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm

import needle as ndl
import needle.tvm
from needle.course.tvm import kernels
from needle.op import Spec
from needle.tvm import eval as evaluation
from needle.tvm.command import exit_code, machine, write_json


def runners(size: int, trials: int) -> dict[str, Callable[[], Any]]:
    """Functions without arguments by name, each of which gives the same product."""
    shape, given = (size, size), np.random.RandomState(0).standard_normal((2, size, size)).astype("float32")
    arrays, out = [tvm.runtime.tensor(x) for x in given], tvm.runtime.empty(shape, "float32")
    x, y = (ndl.Tensor(a, requires_grad=False) for a in given)
    tx, ty = torch.from_numpy(given[0]), torch.from_numpy(given[1])

    def made(scheduled: bool) -> Callable[[], Any]:
        f = kernels.make_matrix_mul(shape, False, shape, False, "llvm", "llvm", "product", scheduled=scheduled)

        def run() -> Any:
            f(*arrays, out)
            return out.numpy()

        return run

    def product(a: Any, b: Any) -> Any:
        return a @ b

    tuned = needle.tvm.compile(product, (Spec(shape), Spec(shape)), "optimized", trials=trials)
    plan = ndl.compile(product, (x, y))
    return {
        "default": made(False),
        "scheduled": made(True),
        "tuned": lambda: tuned(x, y).numpy(),
        "needle eager": lambda: (x @ y).numpy(),
        "needle compiled": lambda: plan(x, y).numpy(),
        "torch eager": lambda: (tx @ ty).numpy(),
    }


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(ndl.get_num_threads())
    given = runners(args.size, args.trials)
    want = given["torch eager"]()
    equal = {name: bool(np.allclose(f(), want, 1e-4, 1e-3)) for name, f in given.items()}
    times = evaluation.measure(given, args.rounds)
    faster = {name: evaluation.ratio(times["default"], t) for name, t in times.items()}
    milliseconds = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    for name, ms in milliseconds.items():
        print(f"{name:16}{ms:10.3f} ms{faster[name]['median']:10.1f} times{'' if equal[name] else '  differs'}")
    if args.json:
        result = {"size": args.size, **machine(), "trials": args.trials, "milliseconds": milliseconds}
        write_json(args.json, {**result, "default_over": faster, "equal": equal})
    return 0 if all(equal.values()) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--trials", type=int, default=32, help="schedules measured for the tuned product")
    parser.add_argument("--rounds", type=int, default=evaluation.ROUNDS)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(arguments)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
