"""Winograd's minimal filtering in plans (Lavin and Gray, arXiv 1509.09308): its costs for a convolution, and its weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from needle.backend_ndarray import NDArray, call

from .algorithms import DIRECT, Cost
from .target import BLOCK


class Scheme(NamedTuple):
    """F(tile x tile, 3 x 3), with vector operations per tile."""

    tile: int  # output pixels to a side
    input: int  # transforming one tile of 16 input channels
    output: int  # one tile of 16 output channels

    @property
    def points(self) -> int:
        return (self.tile + 2) ** 2


F2, F4 = Scheme(2, input=64, output=44), Scheme(4, input=216, output=172)
SCHEMES = {DIRECT: Scheme(1, input=0, output=0), "f4": F4, "f2": F2}  # direct sums are tiles of one pixel


def conv_costs(op: Any, x: NDArray, kernel: Any, out: NDArray, packs: bool, terms: int) -> dict[str, Cost]:
    """Costs of a blocked convolution by algorithm; empty where there is no choice. packs: its weights are packed in the run;
    terms: of direct sums, by pixel and tap.
    """
    unit = (1, 1)
    if kernel != (3, 3) or op.groups != 1 or op.stride != unit or op.dilation != unit or x.shape[4] != BLOCK:
        return {}
    costs = {name: scheme_cost(scheme, x.shape[1], out.shape, packs) for name, scheme in SCHEMES.items()}
    return costs | {DIRECT: scheme_cost(SCHEMES[DIRECT], x.shape[1], out.shape, packs, terms)}


def scheme_cost(scheme: Scheme, in_blocks: int, out: tuple[int, ...], packs: bool = False, terms: int = 0) -> Cost:
    """Of a convolution to images of shape `out` in blocks. terms: vectors of weights by point, unless all of the blocks'."""
    n, out_blocks, height, width, _ = out
    terms = terms or in_blocks * out_blocks * BLOCK
    tiles = n * -(-height // scheme.tile) * -(-width // scheme.tile)
    work = tiles * (in_blocks * scheme.input + out_blocks * scheme.output + scheme.points * terms)
    kept = terms * BLOCK * scheme.points * 4
    return Cost(work + packs * terms * scheme.points, kept, packs * kept)


def pack(scheme: Scheme, in_blocks: int, w: NDArray) -> NDArray:
    """Transformed weights: (output blocks, points, input channels, 16)."""
    out = NDArray.empty((-(-w.shape[0] // BLOCK), scheme.points, in_blocks * BLOCK, BLOCK))
    call("winograd_pack", [out], weight=w, tile=scheme.tile)
    return out
