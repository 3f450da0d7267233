"""The machine at hand as algorithms see it: its rates and how its algorithms compare, measured once and kept on disk."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from needle import _core
from needle.backend_ndarray import NDArray, call, cpu
from needle.backend_ndarray.forks import MACHINE, fork_lock
from needle.backend_ndarray.kernels import unplanned
from needle.backend_ndarray.sizes import larger, smaller
from needle.executor.tuner import Timings

DIRECT = "direct"
EXPOSED = 0.4  # measured: share of the shorter of computing and fetching weights that the longer does not hide


class Cost(NamedTuple):
    work: float  # vector operations
    kept: float  # bytes of packed weights
    moved: float = 0.0  # bytes of weights that the run packs


class Machine(NamedTuple):
    """What costs are in seconds. excess: time of an algorithm beside direct sums over what its vector operations say."""

    fmas: float  # of vectors per second, on all threads
    rate: float  # bytes of weights per second
    excess: Mapping[str, float]

    def seconds(self, algorithm: str, cost: Cost) -> float:
        compute = cost.work * self.excess.get(algorithm, 1.0) / self.fmas + cost.moved / self.rate
        fetch = cost.kept / self.rate
        return larger(compute, fetch) + EXPOSED * smaller(compute, fetch)


# The 2 cores at 3.5 GHz on which costs were first fitted: what choices rest on with NEEDLE_MEASURE=0.
FIXED = Machine(7e9, 28e9, {})
SECONDS, ROUNDS = 0.02, 25  # that are spent on a layer at most
WEIGHTS = 32 << 20  # bytes read to see how fast weights come

LOCK = fork_lock(MACHINE)
Runs = dict[str, Callable[[], None]]
# Layers by which algorithms are compared: what runs each of them, and what each is thought to cost.
REFERENCES: dict[str, tuple[Callable[[], Runs], Mapping[str, Cost]]] = {}


def this_machine() -> Machine:
    """For the number of threads at present."""
    if os.environ.get("NEEDLE_MEASURE") == "0":
        return FIXED
    with LOCK:  # two measurements at once would measure each other
        return measured(_core.num_threads(), _core.isa())


@functools.cache
def measured(threads: int, isa: str) -> Machine:
    """Algorithms are as slow as in the layer that suits them least, so that none is taken where it costs time."""
    timings = Timings(cpu())
    seconds = {layer: dict(timings(f"machine: {layer}")) for layer in REFERENCES}
    if not all(seconds[layer].keys() >= (set(costs) or {"read"}) for layer, (_, costs) in REFERENCES.items()):
        with unplanned():
            seconds = {layer: least_times(make()) for layer, (make, _) in REFERENCES.items()}
        _core.release_unused_memory()
        timings.seconds |= {f"machine: {layer}": times for layer, times in seconds.items()}
        timings.save(quiet=True)
    excess: dict[str, float] = {}
    fmas = 0.0
    for layer, (_, costs) in REFERENCES.items():
        times = seconds[layer]
        rates = {name: cost.work / times[name] for name, cost in costs.items()}
        fmas = max(fmas, rates.get(DIRECT, 0.0))
        for name in rates.keys() - {DIRECT}:
            excess[name] = max(excess.get(name, 0.0), rates[DIRECT] / rates[name])
    return Machine(fmas, WEIGHTS / seconds["weights"]["read"], excess)


def least_times(runs: Runs, seconds: float = SECONDS, rounds: int = ROUNDS) -> dict[str, float]:
    """The least seconds of each, in turns, so that what else the machine does meets all of them."""
    best: dict[str, float] = {}
    begin = time.perf_counter()
    for done in range(rounds + 1):
        if done > 2 and time.perf_counter() - begin > seconds:
            break
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if done:  # the first touches memory
                best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)
    return best


def numbers(*shape: int) -> NDArray:
    return NDArray((np.arange(np.prod(shape)) % 7 - 3.0).astype("float32").reshape(shape), device=cpu())


def reading() -> Runs:
    memory, total = NDArray.empty((WEIGHTS // 4,)), NDArray.empty(())
    memory.fill(1.0)
    return {"read": lambda: call("sum", [total], x=memory)}


REFERENCES["weights"] = (reading, {})
