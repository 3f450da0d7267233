"""Errors of every network, batch and mode through TVM against needle: `profiling/tvm_agreement.py [--trials N] [--json F]`.

Ends with 1 where one differs by more than 1e-4. The tuned mode takes the records that there are, N schedules at least.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import needle as ndl
import needle.tvm
from needle.tvm.command import exit_code, machine, write_json
from needle.tvm.eval import TOLERANCE
from needle.tvm.pipeline import MODES
from tvm_networks import NETWORKS, prepared

BATCHES = (1, 8)


def errors(name: str, batch: int, trials: int) -> tuple[dict[str, float], bool]:
    """By mode the largest error over the largest value, and whether every element is within 1e-4."""
    _, _, net, x = prepared(name, batch)
    with ndl.no_grad():
        want = net(x).numpy()
    found, equal = {}, True
    for mode in MODES:
        got = needle.tvm.compile(net, (x,), mode, trials=trials)(x).numpy()
        found[mode] = float(np.abs(got - want).max() / np.abs(want).max())
        equal = equal and np.allclose(got, want, TOLERANCE, TOLERANCE)
    return found, equal


def run(args: argparse.Namespace) -> int:
    result, equal = {}, True
    for name in args.models or NETWORKS:
        for batch in BATCHES:
            found, close = errors(name, batch, args.trials)
            result[f"{name} b{batch}"] = found
            equal = equal and close
            numbers = ", ".join(f"{mode} {e:.1e}" for mode, e in found.items())
            print(f"{name} b{batch}: {numbers}{'' if close else '  differs'}", flush=True)
    if args.json:
        write_json(args.json, {**machine(), "trials": args.trials, "error": result, "equal": equal})
    return 0 if equal else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(NETWORKS))
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(arguments)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
