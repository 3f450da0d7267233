"""Which algorithm a planned convolution or linear layer takes: the least time, estimated by a cost model or measured.

`compile(tune=True)` measures (needle/executor/tuner.py). Costs are in vectors of 16 floats: arithmetic, loads and stores count
the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from needle.backend_ndarray.sizes import chosen, larger, smaller
from needle.executor.builder import Builder
from needle.executor.settings import Option, unmeasured

DIRECT = "direct"
# Algorithms with fewer multiplications that `compile(winograd=...)` allows.
SETTINGS = {"auto": ("f4", "f2", "strassen"), "f2": ("f2",), "off": ()}

FMAS_PER_SECOND = 7e9  # of vectors, with 2 cores at 3.5 GHz
FMAS_PER_BYTE = FMAS_PER_SECOND / 28e9  # vector FMAs in the time in which one byte of weights comes from memory
EXPOSED = 0.4  # measured: share of the shorter of computing and fetching weights that the longer does not hide

# What `compile(memory=...)` lets weights cost: vector FMAs that a run has to save for one byte more of packed weights.
FMAS_PER_KEPT_BYTE = {"normal": 0.0, "low": 2.0}


KEEPS = (
    0.9  # share of its time below which another algorithm replaces one that has its weights packed, for another shape
)


class Cost(NamedTuple):
    work: float  # vector operations
    kept: float  # bytes of packed weights

    @property
    def estimate(self) -> float:
        fetch = self.kept * FMAS_PER_BYTE
        return larger(self.work, fetch) + EXPOSED * smaller(self.work, fetch)


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

    layer: its name with {} for numbers, and these. Measured times count where every candidate has one, else estimates. packed:
    whether the weights are packed for an algorithm already, by a plan for another shape.
    """
    choice = builder.choice
    candidates = tuple(a for a in costs if a == DIRECT or a in SETTINGS[choice.winograd])
    form, *sizes = layer
    seconds = {} if builder.measured is unmeasured else builder.measured(form.format(*sizes))
    known = all(a in seconds for a in candidates)

    def cost(algorithm: str) -> float:
        c = costs[algorithm]
        time = seconds[algorithm] * FMAS_PER_SECOND if known else c.estimate
        return time + c.kept * FMAS_PER_KEPT_BYTE[choice.memory]

    best = candidates[chosen(cheapest, *map(cost, candidates), *map(packed, candidates))]
    if len(candidates) > 1:
        builder.options.append(Option(len(builder.steps), form, tuple(sizes), candidates, best))
    return best
