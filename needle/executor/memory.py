"""Arena offsets (csrc/core/offsets.h), and the report of a plan's memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from needle import _core
from needle.shown import Shown

ALIGNMENT = 64  # bytes: a cache line, and a vector register of the widest ISA


class Lifetime(NamedTuple):
    nbytes: int
    first: int  # step that first touches the buffer
    last: int  # step that last touches it


def plan_offsets(buffers: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Byte offset of every buffer and the arena's size; buffers alive at the same step never overlap."""
    return _core.plan_offsets(buffers, ALIGNMENT)


def bytes_alive(buffers: Sequence[Any], steps: int) -> list[int]:
    """The sum of bytes alive at every step."""
    change = np.zeros(steps + 1, "int64")
    np.add.at(change, [b.first for b in buffers], [b.nbytes for b in buffers])
    np.subtract.at(change, [b.last + 1 for b in buffers], [b.nbytes for b in buffers])
    return change[:steps].cumsum().tolist()


def lower_bound(buffers: Sequence[Lifetime]) -> int:
    """The largest sum of bytes alive at one step: no plan can be smaller."""
    steps = max((b.last for b in buffers), default=-1) + 1
    return max(bytes_alive(buffers, steps), default=0)


class PlannedBuffer(NamedTuple):
    """One buffer of an arena: who fills it, the steps between which it lives, and where."""

    label: str  # the module or node whose step fills it
    kind: str  # the kernel of that step
    first: int
    last: int
    offset: int
    nbytes: int


def distinct_bytes(arrays: Iterable[Any]) -> int:
    """Bytes that a kernel touches in these operands: an axis of stride 0 counts once, and so does an operand given twice."""
    seen = {(id(getattr(a, "_handle", a)), getattr(a, "_offset", 0), a.shape, a.strides): a for a in arrays}
    return sum(
        math.prod(n for n, stride in zip(a.shape, a.strides, strict=True) if stride) * np.dtype(a.dtype).itemsize
        for a in seen.values()
    )


class MemoryReport(Shown, dict[str, int]):
    """Bytes of a plan by name: `arena`, its `lower_bound`, packed weights (`constants`); and the number of `arenas` in use.

    `buffers`: what lies in the arena. `str` gives it as text, `picture` as a drawing.
    """

    def __init__(self, sizes: dict[str, int], buffers: Sequence[PlannedBuffer], steps: int) -> None:
        super().__init__(sizes)
        self.buffers, self.steps = list(buffers), steps

    @property
    def live(self) -> list[int]:
        """Bytes in use at every step."""
        return bytes_alive(self.buffers, self.steps)

    @property
    def peak(self) -> int:
        """The largest number of bytes in use at one step."""
        return max(self.live, default=0)

    @property
    def peak_step(self) -> int:
        return self.live.index(self.peak) if self.buffers else 0

    @property
    def total(self) -> int:
        """What all buffers together would take without reuse."""
        return sum(b.nbytes for b in self.buffers)

    @property
    def reuse(self) -> float:
        """How often the arena is used: the sum of all buffers' bytes over the arena's."""
        return self.total / self["arena"] if self["arena"] else 1.0

    def timeline(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON."""
        return {
            **self,
            "peak": self.peak,
            "peak_step": self.peak_step,
            "total": self.total,
            "reuse": self.reuse,
            "steps": self.steps,
            "live": self.live,
            "buffers": [b._asdict() for b in self.buffers],
        }

    def __str__(self) -> str:
        mb = {k: f"{v / 1e6:.2f} MB" for k, v in (*self.items(), ("peak", self.peak), ("total", self.total))}
        lines = [
            f"arena {mb['arena']} (lower bound {mb['lower_bound']}), {len(self.buffers)} buffers of {mb['total']} in all: "
            f"reused {self.reuse:.1f} times",
            f"peak {mb['peak']} at step {self.peak_step} of {self.steps}; packed weights {mb['constants']}; "
            f"arenas allocated: {self['arenas']}",
            f"{'steps':>9} {'offset':>12} {'bytes':>12}  {'kernel':<24}filled by",
        ]
        rows = sorted(self.buffers, key=lambda b: (b.first, b.offset))
        return "\n".join(
            [
                *lines,
                *(
                    f"{f'{b.first}-{b.last}':>9} {b.offset:>12,} {b.nbytes:>12,}  {b.kind:<24}{b.label[-50:]}"
                    for b in rows
                ),
            ]
        )

    def picture(self, path: Any) -> None:
        """Draw the arena as a PNG: steps to the right, offsets upwards, a rectangle for each buffer."""
        from needle.profiler.plots import memory_plan, save  # the drawing needs [report], the plan does not

        save(memory_plan(self.timeline()), path)
