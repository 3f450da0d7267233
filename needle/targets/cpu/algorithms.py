"""Which algorithm a planned convolution or linear layer takes: the least time, estimated by a cost model or measured.

`compile(tune=True)` measures (needle/executor/tuner.py). Costs are in vectors of 16 floats: arithmetic, loads and stores count
the same, up to what `machine.py` finds on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Callable

from needle.executor.builder import Builder
from needle.executor.settings import Option

from .machine import DIRECT, Cost, this_machine

# Algorithms with fewer multiplications that `compile(winograd=...)` allows.
SETTINGS = {"auto": ("f4", "f2", "strassen"), "f2": ("f2",), "off": ()}


# What `compile(memory=...)` lets weights cost: vector FMAs that a run has to save for one byte more of packed weights.
FMAS_PER_KEPT_BYTE = {"normal": 0.0, "low": 2.0}


# Shares of its time below which another algorithm replaces one that has its weights packed, for another shape, and below which
# an estimate replaces direct sums.
KEEPS, GAINS = 0.9, 0.97


def choose(builder: Builder, layer: str, costs: dict[str, Cost], packed: Callable[[str], bool]) -> str:
    """The cheapest allowed algorithm, the first of equals; noted in `builder.options` for the step that comes next.

    Measured times count where every candidate has one, else estimates for this machine. packed: whether the weights are packed
    for an algorithm already, by a plan for another shape.
    """
    choice = builder.choice
    candidates = tuple(a for a in costs if a == DIRECT or a in SETTINGS[choice.winograd])
    seconds = builder.measured(layer)
    known = all(a in seconds for a in candidates)

    machine = this_machine()

    def cost(algorithm: str) -> float:
        c = costs[algorithm]
        time = seconds[algorithm] if known else machine.seconds(algorithm, c) / (1 if algorithm == DIRECT else GAINS)
        return time + c.kept * FMAS_PER_KEPT_BYTE[choice.memory] / machine.fmas

    best = min(candidates, key=cost)
    held = min(filter(packed, candidates), key=cost, default=best)
    best = held if cost(best) > KEEPS * cost(held) else best
    if len(candidates) > 1:
        builder.options.append(Option(len(builder.steps), layer, candidates, best))
    return best
