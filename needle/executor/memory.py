"""Arena offsets: greedy by size over lifetimes (Pisarchyk and Lee, arXiv 2001.03288)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 64  # bytes: a cache line, and a vector register of the widest ISA


class Lifetime(NamedTuple):
    nbytes: int
    first: int  # step that first touches the buffer
    last: int  # step that last touches it


def plan_offsets(buffers: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Byte offset of every buffer and the arena's size; buffers alive at the same step never overlap."""
    offsets = [0] * len(buffers)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(buffers)), key=lambda i: (-buffers[i].nbytes, buffers[i].first)):
        b = buffers[i]
        size = -(-b.nbytes // ALIGNMENT) * ALIGNMENT
        at = 0
        for j in sorted(placed, key=lambda j: offsets[j]):
            other = buffers[j]
            if other.last < b.first or b.last < other.first:
                continue
            if at + size <= offsets[j]:
                break
            at = max(at, offsets[j] + -(-other.nbytes // ALIGNMENT) * ALIGNMENT)
        offsets[i] = at
        placed.append(i)
        total = max(total, at + size)
    return offsets, total


def lower_bound(buffers: Sequence[Lifetime]) -> int:
    """The largest sum of bytes alive at one step: no plan can be smaller."""
    steps = max((b.last for b in buffers), default=-1) + 1
    return max((sum(b.nbytes for b in buffers if b.first <= s <= b.last) for s in range(steps)), default=0)
