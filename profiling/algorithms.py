"""3x3 convolutions by each algorithm, and the one that the cost model takes: `python profiling/algorithms.py [--json FILE]`.

Each algorithm in turns, least times, with so many copies of the weights that a run finds its own out of the first caches. The
loss is the time of the algorithm taken over that of the fastest: 1 where the model is right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needle as ndl
from needle.backend_ndarray import NDArray
from needle.profiler import cpu_name
from needle.targets.cpu.algorithms import DIRECT, GAINS
from needle.targets.cpu.convolution import compared
from needle.targets.cpu.machine import least_times, this_machine
from needle.targets.cpu.target import BLOCK
from needle.targets.cpu.winograd import SCHEMES, scheme_cost

CHANNELS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
SIDES, BATCHES = (7, 14, 28, 56, 112), (1, 2, 8)
MOST = 6e9  # operations of a row
SECONDS, ROUNDS = 0.4, 2000  # that a row takes at most
CACHED = 24 << 20  # bytes of weights


def in_copies(packed: NDArray) -> Callable[[], NDArray]:
    """The weights, another copy each time."""
    count = min(40, CACHED // (packed.size * 4))
    copies = itertools.cycle([packed, *(packed.copy() for _ in range(count))])
    return lambda: next(copies)


def measure(batch: int, channels: int, side: int) -> dict[str, Any]:
    blocks = channels // BLOCK
    seconds = least_times(compared(batch, blocks, side, in_copies), SECONDS, ROUNDS)
    machine = this_machine()
    estimates = {
        name: machine.seconds(name, scheme_cost(scheme, blocks, (batch, blocks, side, side, BLOCK)))
        / (1 if name == DIRECT else GAINS)
        for name, scheme in SCHEMES.items()
    }
    taken = min(estimates, key=estimates.__getitem__)
    return {
        "batch": batch,
        "channels": channels,
        "side": side,
        "us": {name: 1e6 * s for name, s in seconds.items()},
        "estimated_us": {name: 1e6 * s for name, s in estimates.items()},
        "taken": taken,
        "loss": seconds[taken] / min(seconds.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    args = parser.parse_args()
    ndl.set_num_threads(args.threads)
    print(f"{cpu_name()}, {ndl.isa()}, {args.threads} threads")
    rows = []
    for batch, channels, side in itertools.product(args.batches, CHANNELS, SIDES):
        if 18 * batch * (channels * side) ** 2 > MOST:
            continue
        rows.append(r := measure(batch, channels, side))
        times = "  ".join(f"{n} {t:8.0f}" for n, t in r["us"].items())
        print(f"{batch} x {channels:3} @{side:<4}{times}  {r['taken']:7}{r['loss']:6.2f}", flush=True)
    losses = [r["loss"] for r in rows]
    print(f"mean loss {statistics.mean(losses):.3f}, over 1.03: {sum(x > 1.03 for x in losses)} of {len(losses)}")
    if args.json:
        facts = {"cpu": cpu_name(), "isa": ndl.isa(), "threads": args.threads, "rows": rows}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
