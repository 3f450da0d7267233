"""The order of a plan's steps: what writes state moves forward, to where its gradient is there and nobody reads the old state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .step import Step
from .verify_plan import region


class Touch(NamedTuple):
    """Bytes of one memory that a step reads or writes."""

    memory: int
    start: float
    stop: float
    writes: bool

    def clashes(self, other: Touch) -> bool:
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop


def touched(step: Step) -> Iterator[Touch]:
    """What a step reads and writes; parameters may be parts of one memory, arrays of the arena count whole."""
    for arrays, writes in ((step.outs, True), (step.ins, False)):
        for a in arrays:
            constant = a._handle.constant
            if constant is None:
                yield Touch(id(a._handle), 0, math.inf, writes)
            elif constant.source is not None and (part := region(a)) is not None:
                yield Touch(id(constant.source.cached_data._handle), part.start, part.stop, writes)


def hoisted(steps: Sequence[Step], early: range) -> list[int]:
    """The steps' numbers in the order in which those of `early` run right after the last step before that has to come first."""
    after: dict[int, int] = {}
    seen: dict[int, list[tuple[int, Touch]]] = defaultdict(list)
    for i in range(early.stop if early else 0):
        touches = list(touched(steps[i]))
        if i in early:
            found = (at for t in touches for at, other in seen[t.memory] if t.clashes(other))
            after[i] = max(found, default=-1)
        for t in touches:
            seen[t.memory].append((after.get(i, i), t))
    return sorted(range(len(steps)), key=lambda i: (after.get(i, i), i in after))
