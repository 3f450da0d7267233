"""Winograd's minimal filtering in plans (Lavin and Gray, arXiv 1509.09308): which 3x3 convolutions take it.

A cost model estimates the time of every algorithm; `compile(tune=True)` measures it (needle/executor/tuner.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from needle.backend_ndarray import NDArray, call

BLOCK = 16


class Scheme(NamedTuple):
    """F(tile x tile, 3 x 3). Costs in vectors of 16 floats: arithmetic, loads and stores count the same."""

    name: str
    tile: int  # output pixels to a side
    input: int  # transforming one tile of 16 input channels
    output: int  # one tile of 16 output channels

    @property
    def points(self) -> int:
        return (self.tile + 2) ** 2


DIRECT = Scheme("direct", 1, input=0, output=0)
F2 = Scheme("f2", 2, input=64, output=44)
F4 = Scheme("f4", 4, input=216, output=172)
# What `compile(winograd=...)` lets a plan choose from; the first of equals.
SETTINGS = {"auto": (DIRECT, F4, F2), "f2": (DIRECT, F2), "off": (DIRECT,)}

FMAS_PER_SECOND = 7e9  # of vectors, with 2 cores at 3.5 GHz
FMAS_PER_BYTE = FMAS_PER_SECOND / 28e9  # vector FMAs in the time in which one byte of weights comes from memory
EXPOSED = (
    0.4  # measured: share of the shorter of the two, computing and fetching weights, that the longer does not hide
)


# What `compile(memory=...)` lets weights cost: vector FMAs that a run has to save for one byte more of packed weights.
FMAS_PER_KEPT_BYTE = {"normal": 0.0, "low": 2.0}


class Choice(NamedTuple):
    """The settings of a plan: keys of SETTINGS and of FMAS_PER_KEPT_BYTE."""

    winograd: str = "auto"
    memory: str = "normal"
    tune: bool = False

    @property
    def algorithms(self) -> list[str]:
        return [s.name for s in SETTINGS[self.winograd]]

    def check(self) -> Choice:
        allowed = (("winograd", self.winograd, [*SETTINGS]), ("memory", self.memory, [*FMAS_PER_KEPT_BYTE]))
        for name, value, known in allowed:
            if value not in known:
                raise ValueError(f"[compile] {name} expects one of {', '.join(known)}, got {value!r}.")
        return self


DEFAULT = Choice()

Measured = Callable[[str], Mapping[str, float]]  # from a layer to seconds by algorithm


def unmeasured(layer: str) -> Mapping[str, float]:
    return {}


def choose(builder: Any, op: Any, x: NDArray, w: NDArray, out: NDArray) -> Scheme | None:
    """The cheapest algorithm for a blocked convolution, None for the direct one; noted in `builder.layers`.

    Measured times count where every allowed algorithm has one, else estimates.
    """
    unit = (1, 1)
    if w.shape[2:] != (3, 3) or op.groups != 1 or op.stride != unit or op.dilation != unit or x.shape[4] != BLOCK:
        return None
    n, out_blocks, height, width, _ = out.shape
    in_blocks = x.shape[1]
    pairs = in_blocks * out_blocks
    choice: Choice = builder.choice
    layer = f"3x3 {n}x{in_blocks * BLOCK}x{height}x{width} to {out_blocks * BLOCK}"
    seconds = builder.measured(layer)
    measured = all(a in seconds for a in choice.algorithms)

    def cost(s: Scheme) -> float:
        kept = pairs * BLOCK * BLOCK * s.points * 4
        tiles = n * -(-height // s.tile) * -(-width // s.tile)
        work = tiles * (in_blocks * s.input + out_blocks * s.output + s.points * pairs * BLOCK)
        fetch = kept * FMAS_PER_BYTE
        estimate = max(work, fetch) + EXPOSED * min(work, fetch)
        time = seconds[s.name] * FMAS_PER_SECOND if measured else estimate
        return time + kept * FMAS_PER_KEPT_BYTE[choice.memory]

    best = min(SETTINGS[choice.winograd], key=cost)
    builder.layers.append((len(builder.steps), layer, best.name))
    return None if best is DIRECT else best


def pack(scheme: Scheme, in_blocks: int, w: NDArray) -> NDArray:
    """Transformed weights: (output blocks, points, input channels, 16)."""
    out = NDArray.empty((-(-w.shape[0] // BLOCK), scheme.points, in_blocks * BLOCK, BLOCK))
    call("winograd_pack", [out], [w], scheme.tile)
    return out
