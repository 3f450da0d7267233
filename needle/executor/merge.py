"""Pairs of steps as one: a convolution gives the depthwise one that alone reads it its rows in a core's cache, not in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from needle.backend_ndarray.ndarray import NDArray

CONV, DEPTHWISE, PAIR = "conv2d_blocked", "depthwise_blocked", "conv2d_depthwise"
JOIN = " + "  # between the labels of a merged step


class Step(NamedTuple):
    """One kernel call of a plan."""

    kernel: str
    outs: Sequence[NDArray]
    ins: Sequence[NDArray]
    attrs: tuple[float, ...]
    label: str  # the graph node that it computes


def same(a: NDArray, b: NDArray) -> bool:
    """Views of the same elements in the same order."""
    return (id(a._handle), a._offset, a.shape, a.strides) == (id(b._handle), b._offset, b.shape, b.strides)


def merge_depthwise(steps: Sequence[Step], fixed: set[int], kernels: Any) -> tuple[list[Step], list[int]]:
    """The steps with every such pair as one, and by each old step's number its new one. fixed: steps that stay as they are."""
    users: dict[int, set[int]] = defaultdict(set)  # of a buffer
    for i, s in enumerate(steps):
        for a in (*s.outs, *s.ins):
            users[id(a._handle)].add(i)
    merged: dict[int, Step] = {}
    gone: set[int] = set()
    for i, s in enumerate(steps):
        if s.kernel != DEPTHWISE:
            continue
        between = s.ins[0]
        others = users[id(between._handle)] - {i}
        first = next((j for j in others if steps[j].kernel == CONV and same(steps[j].outs[0], between)), i)
        around = {*others, *range(first + 1, i)} - {first}
        if first >= i or first in fixed or any(steps[j].kernel != "zero_halo" for j in around):
            continue
        conv, depthwise = (dict(zip(kernels[t.kernel].attrs, t.attrs, strict=True)) for t in (steps[first], s))
        if conv["groups"] > 1 or conv["has_residual"] or depthwise["has_residual"]:
            continue
        attrs = (*steps[first].attrs, *s.attrs, *between.shape[2:4])
        label = f"{steps[first].label}{JOIN}{s.label}"
        merged[i] = Step(PAIR, s.outs, [*steps[first].ins, *s.ins[1:]], attrs, label)
        gone |= others
    kept = [i for i in range(len(steps)) if i not in gone]
    number = {old: new for new, old in enumerate(kept)}
    return [merged.get(i, steps[i]) for i in kept], [number.get(i, -1) for i in range(len(steps))]
