"""Which algorithm a planned convolution or linear layer takes: the least time, estimated by a cost model or measured.

`compile(tune=True)` measures (needle/executor/tuner.py). Costs are in vectors of 16 floats: arithmetic, loads and stores count
the same, up to what `machine.py` finds on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from needle.backend_ndarray.sizes import chosen
from needle.executor.builder import Builder
from needle.executor.settings import Option, unmeasured

from .machine import DIRECT, Cost, this_machine

# Algorithms with fewer multiplications that `compile(winograd=...)` allows.
SETTINGS = {"auto": ("f4", "f2", "strassen"), "f2": ("f2",), "off": ()}


# What `compile(memory=...)` lets weights cost: vector FMAs that a run has to save for one byte more of packed weights.
FMAS_PER_KEPT_BYTE = {"normal": 0.0, "low": 2.0}


# Shares of its time below which another algorithm replaces one that has its weights packed, for another shape, and below which
# an estimate replaces direct sums.
KEEPS, GAINS = 0.9, 0.97


def cheapest(*given: float) -> int:
    """The least of the costs, which are the first half of the numbers; rather one of those that the other half says to be
    packed, if that is nearly as cheap.
    """
    costs, packed = given[: len(given) // 2], given[len(given) // 2 :]
    best = min(range(len(costs)), key=costs.__getitem__)
    held = min((i for i in range(len(costs)) if packed[i]), key=costs.__getitem__, default=best)
    return held if costs[best] > KEEPS * costs[held] else best


def choose(builder: Builder, layer: tuple[Any, ...], costs: dict[str, Cost], packed: Callable[[str], bool]) -> str:
    """The cheapest allowed algorithm, the first of equals; noted in `builder.options` for the step that comes next.

    layer: its name with {} for numbers, and these. Measured times count where every candidate has one, else estimates for this
    machine. packed: whether the weights are packed for an algorithm already, by a plan for another shape.
    """
    choice = builder.choice
    candidates = tuple(a for a in costs if a == DIRECT or a in SETTINGS[choice.winograd])
    if len(candidates) == 1:
        return DIRECT
    form, *sizes = layer
    seconds = {} if builder.measured is unmeasured else builder.measured(form.format(*sizes))
    known = all(a in seconds for a in candidates)

    machine = this_machine()

    def cost(algorithm: str) -> float:
        c = costs[algorithm]
        time = seconds[algorithm] if known else machine.seconds(algorithm, c) / (1 if algorithm == DIRECT else GAINS)
        return time + c.kept * FMAS_PER_KEPT_BYTE[choice.memory] / machine.fmas

    best = candidates[chosen(cheapest, *map(cost, candidates), *map(packed, candidates))]
    builder.options.append(Option(len(builder.steps), form, tuple(sizes), candidates, best))
    return best
