"""Tuning: the algorithms of a plan's layers timed in the order of the network, with cold caches; the times stay on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from needle.backend_ndarray import Device, NDArray, default_device
from needle.facts import cache_folder

from .builder import PlanInfo
from .settings import Measured
from .split import SplitPlan
from .target import target_of

VERSION = 1  # of the file, and of kernels whose times can be compared
ROUNDS = 7
FLUSH = 64 << 20  # bytes written between runs, more than the last cache holds


def step_times(info: PlanInfo | SplitPlan, inputs: Sequence[NDArray], rounds: int, cold: bool = False) -> list[float]:
    """Median seconds of every step of a plan; cold: other data passed through the caches before every run."""
    ins = [a._ref for a in inputs]
    outs = info.core.run_new(ins)
    other = np.zeros(FLUSH // 4 if cold else 0, "float32")
    runs = []
    for _ in range(rounds):
        other += 1
        runs.append(info.core.profile(outs, ins))
    return [statistics.median(t) for t in zip(*runs, strict=True)]


class Timings:
    """Seconds by layer and algorithm on what the target says that they hold for."""

    def __init__(self, device: Device | None = None) -> None:
        device = device or default_device()
        self.machine: list[Any] = [VERSION, *target_of(device).machine(device)]
        name = hashlib.sha256(json.dumps(self.machine).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"tuning-{name}.json"
        self.seconds = self._read()

    def _read(self) -> dict[str, dict[str, float]]:
        """What the file says; anything else than such a file counts as empty and is written anew."""
        try:
            document = json.loads(self.path.read_text())
            if document["machine"] != self.machine:
                return {}
            return {
                str(layer): {str(a): float(t) for a, t in times.items() if math.isfinite(t) and t > 0}
                for layer, times in document["seconds"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}

    def __call__(self, layer: str) -> Mapping[str, float]:
        return self.seconds.get(layer, {})

    def save(self, quiet: bool = False) -> None:
        """Write the file, with what other processes have added to it since. quiet: without a warning where that fails."""
        merged = self._read()
        for layer, times in self.seconds.items():
            merged[layer] = merged.get(layer, {}) | times
        text = json.dumps({"machine": self.machine, "seconds": merged}, indent=1, sort_keys=True)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix=".tuning-", delete=False) as f:
                f.write(text)
            os.replace(f.name, self.path)
        except OSError as e:
            if quiet:
                return
            warnings.warn(f"[compile] measured times are not kept: {e}.", stacklevel=2)


def only(algorithm: str, algorithms: set[str]) -> Measured:
    """Times by which a plan takes `algorithm` wherever it may."""
    times = {a: 0.0 if a == algorithm else math.inf for a in algorithms}
    return lambda layer: times


def tuned(
    make: Callable[[Measured], PlanInfo | SplitPlan], inputs: Sequence[NDArray], device: Device
) -> PlanInfo | SplitPlan:
    """The plan that `make` builds by measured times; layers without them are timed first, in plans of one algorithm each."""
    timings = Timings(device)
    info = make(timings)
    unknown = {o.layer: o.candidates for o in info.options if not set(o.candidates) <= timings(o.layer).keys()}
    if not unknown:
        return info
    algorithms = {a for candidates in unknown.values() for a in candidates}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name in tqdm(sorted(algorithms), desc="tune", delay=2.0, leave=False, disable=None):
        trial = make(only(name, algorithms))
        times = step_times(trial, inputs, ROUNDS, cold=True)
        for o in trial.options:
            found[o.layer, o.taken].append(times[o.step])
    for (layer, name), seconds in found.items():
        if layer in unknown:
            timings.seconds.setdefault(layer, {})[name] = statistics.mean(seconds)
    timings.save()
    return make(timings)
