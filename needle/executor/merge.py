"""Pairs of steps as one kernel: what lies between the two stays in a core's cache or registers and never gets memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from needle.backend_ndarray.ndarray import NDArray
from needle.ops.activation import activation_code

JOIN = " + "  # between the labels of a merged step
PIXEL_BYTES, BAND_BYTES = 2 * 16 * 4, 256 << 10  # of a tile's channels; of rows that stay in L2


Halo = tuple[int, int, int, int]  # zero rows and columns around an image: top, left, bottom, right
NO_HALO: Halo = (0, 0, 0, 0)


class Step(NamedTuple):
    """One kernel call of a plan."""

    kernel: str
    outs: Sequence[NDArray]
    ins: Sequence[NDArray]
    attrs: tuple[float, ...]
    label: str  # the graph node that it computes
    halos: Sequence[Halo] = ()  # what it reads around each of `ins`, where it reads around one


Attributes = dict[str, float]  # of a step, by name


def with_depthwise(conv: Step, depthwise: Step, a: Attributes, b: Attributes) -> Step | None:
    """A direct convolution and the depthwise one after it, unless that reads too many rows at a time or skips the first."""
    height, width = depthwise.ins[0].shape[2:4]
    rows = (b["kernel_h"] - 1) * b["dilation_h"] + 1
    if rows * width * PIXEL_BYTES > BAND_BYTES or min(b["pad_top"], b["pad_left"]) < 0:
        return None
    if a["groups"] > 1 or a["has_residual"] or b["has_residual"]:
        return None
    attrs = (*conv.attrs, *depthwise.attrs, height, width)
    halos = [*conv.halos, *[NO_HALO] * len(depthwise.ins[1:])] if conv.halos else ()
    return Step("conv2d_depthwise", depthwise.outs, [*conv.ins, *depthwise.ins[1:]], attrs, "", halos)


def with_pool(conv: Step, pool: Step, a: Attributes, b: Attributes) -> Step | None:
    """A Winograd convolution and the largest of every 2 x 2 pixels, which lie in one of its tiles."""
    (h, w), (pooled_h, pooled_w) = conv.outs[0].shape[2:4], pool.outs[0].shape[2:4]
    if pool.attrs != (2, 2, 2, 2, 0, 0, 1, 1) or (pooled_h, pooled_w) != (h // 2, w // 2):
        return None
    if a["has_residual"] or a["activation"] not in (activation_code("none"), activation_code("relu")):
        return None
    return conv._replace(outs=pool.outs, attrs=tuple((a | {"pool": 1.0}).values()))


Rule = Callable[[Step, Step, Attributes, Attributes], Step | None]
RULES: dict[tuple[str, str], Rule] = {
    ("conv2d_blocked", "depthwise_blocked"): with_depthwise,
    ("conv2d_winograd_f2", "max_pool2d"): with_pool,
    ("conv2d_winograd_f4", "max_pool2d"): with_pool,
}


def merge_pairs(steps: Sequence[Step], kernels: Any, fixed: set[int]) -> tuple[list[Step], list[int]]:
    """The steps with every pair of RULES as one, and by each old step's number its new one.

    A pair is a step whose result only the other reads, with nothing but zeroed halos between them. fixed: steps that do
    not become part of another kernel.
    """
    users: dict[int, set[int]] = defaultdict(set)  # of a buffer
    for i, s in enumerate(steps):
        for a in (*s.outs, *s.ins):
            users[id(a._handle)].add(i)
    merged: dict[int, Step] = {}
    number = list(range(len(steps)))
    for i, second in enumerate(steps):
        if not any(second.kernel == reader for _, reader in RULES):
            continue
        others = users[id(second.ins[0]._handle)] - {i}
        makers = (j for j in others if steps[j].kernel != "zero_halo" and steps[j].outs[0].is_same_view(second.ins[0]))
        at = next(makers, i)
        rule = RULES.get((steps[at].kernel, second.kernel))
        between = {*others, *range(at + 1, i)} - {at}
        if rule is None or any(steps[j].kernel != "zero_halo" for j in between):
            continue
        pair = (dict(zip(kernels[s.kernel].attrs, s.attrs, strict=True)) for s in (steps[at], second))
        step = rule(steps[at], second, *pair)
        if step is None or (at in fixed and step.kernel != steps[at].kernel):
            continue
        merged[i] = step._replace(label=f"{steps[at].label}{JOIN}{second.label}")
        for j in others:
            number[j] = i
    kept = [i for i in range(len(steps)) if number[i] == i]
    place = {old: new for new, old in enumerate(kept)}
    return [merged.get(i, steps[i]) for i in kept], [place[i] for i in number]
