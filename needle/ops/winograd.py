"""Winograd's minimal filtering in plans (Lavin and Gray, arXiv 1509.09308): which 3x3 convolutions take it, by a cost model."""

from __future__ import annotations

from math import prod
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


F2 = Scheme("f2", 2, input=64, output=44)
F4 = Scheme("f4", 4, input=216, output=172)
SETTINGS = {"auto": (F4, F2), "f2": (F2,), "off": ()}  # what `compile(winograd=...)` lets a plan choose from

# Vector FMAs in the time in which one byte of weights comes from memory: 2 cores x 3.5 GHz x 1 FMA over 28 GB/s.
FMAS_PER_BYTE = 0.25
EXPOSED = (
    0.4  # measured: share of the shorter of the two, computing and fetching weights, that the longer does not hide
)


# What `compile(memory=...)` lets weights cost: vector FMAs that a run has to save for one byte more of packed weights.
FMAS_PER_KEPT_BYTE = {"normal": 0.0, "low": 2.0}


class Choice(NamedTuple):
    """The settings of a plan: keys of SETTINGS and of FMAS_PER_KEPT_BYTE."""

    winograd: str = "auto"
    memory: str = "normal"

    def check(self) -> Choice:
        allowed = (("winograd", self.winograd, [*SETTINGS]), ("memory", self.memory, [*FMAS_PER_KEPT_BYTE]))
        for name, value, known in allowed:
            if value not in known:
                raise ValueError(f"[compile] {name} expects one of {', '.join(known)}, got {value!r}.")
        return self


DEFAULT = Choice()


def choose(setting: Choice, op: Any, x: NDArray, w: NDArray, out: NDArray) -> Scheme | None:
    """The cheapest algorithm for a blocked convolution, None for the direct one."""
    unit = (1, 1)
    if w.shape[2:] != (3, 3) or op.groups != 1 or op.stride != unit or op.dilation != unit or x.shape[4] != BLOCK:
        return None
    n, out_blocks, height, width, _ = out.shape
    in_blocks = x.shape[1]
    pairs = in_blocks * out_blocks

    def cost(work: float, taps: int) -> float:
        kept = pairs * BLOCK * BLOCK * taps * 4
        fetch = kept * FMAS_PER_BYTE
        return max(work, fetch) + EXPOSED * min(work, fetch) + kept * FMAS_PER_KEPT_BYTE[setting.memory]

    def scheme_cost(s: Scheme) -> float:
        tiles = n * -(-height // s.tile) * -(-width // s.tile)
        return cost(tiles * (in_blocks * s.input + out_blocks * s.output + s.points * pairs * BLOCK), s.points)

    best = min(SETTINGS[setting.winograd], key=scheme_cost, default=None)
    direct = cost(prod((n, height, width)) * 9 * pairs * BLOCK, 9)
    return best if best is not None and scheme_cost(best) < direct else None


def pack(scheme: Scheme, in_blocks: int, w: NDArray) -> NDArray:
    """Transformed weights: (output blocks, points, input channels, 16)."""
    out = NDArray.empty((-(-w.shape[0] // BLOCK), scheme.points, in_blocks * BLOCK, BLOCK))
    call("winograd_pack", [out], [w], scheme.tile)
    return out
