"""Pairs of steps as one kernel: what lies between the two stays in a core's cache or registers and never gets memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from needle.backend_ndarray.ndarray import NDArray
from needle.ops.activation import activation_code
from needle.ops.spatial import window_attributes

JOIN = " + "  # between the labels of a merged step
HALVES = window_attributes(SimpleNamespace(stride=(2, 2), padding=(0, 0), dilation=(1, 1)), (2, 2))  # of a pool
PIXEL_BYTES, BAND_BYTES = 2 * 16 * 4, 256 << 10  # of a tile's channels; of rows that stay in L2


Halo = tuple[int, int, int, int]  # zero rows and columns around an image: top, left, bottom, right
NO_HALO: Halo = (0, 0, 0, 0)
NO_HALOS: Mapping[str, Halo] = {}


class Step(NamedTuple):
    """One kernel call of a plan."""

    kernel: str
    outs: Sequence[NDArray]
    inputs: dict[str, NDArray]  # by the kernel's names, without those that are absent
    attrs: dict[str, float]
    label: str  # the graph node that it computes
    halos: Mapping[str, Halo] = NO_HALOS  # what it reads around its inputs, where it reads around one

    @property
    def ins(self) -> list[NDArray]:
        return list(self.inputs.values())


def with_depthwise(conv: Step, depthwise: Step) -> Step | None:
    """A direct convolution and the depthwise one after it, unless that reads too many rows at a time or skips the first."""
    a, b = conv.attrs, depthwise.attrs
    height, width = depthwise.inputs["x"].shape[2:4]
    rows = (b["kernel_h"] - 1) * b["dilation_h"] + 1
    if rows * width * PIXEL_BYTES > BAND_BYTES or min(b["pad_top"], b["pad_left"]) < 0:
        return None
    if a["groups"] > 1 or "residual" in {*conv.inputs, *depthwise.inputs}:
        return None
    inputs = conv.inputs | {f"depthwise_{n}": v for n, v in depthwise.inputs.items() if n != "x"}
    attrs = a | {f"depthwise_{n}": v for n, v in b.items()} | {"height": height, "width": width}
    return Step("conv2d_depthwise", depthwise.outs, inputs, attrs, "", conv.halos)


def with_pool(conv: Step, pool: Step) -> Step | None:
    """A Winograd convolution and the largest of every 2 x 2 pixels, which lie in one of its tiles."""
    (h, w), (pooled_h, pooled_w) = conv.outs[0].shape[2:4], pool.outs[0].shape[2:4]
    if pool.attrs != HALVES or (pooled_h, pooled_w) != (h // 2, w // 2):
        return None
    if "residual" in conv.inputs or conv.attrs["activation"] not in (activation_code("none"), activation_code("relu")):
        return None
    return conv._replace(outs=pool.outs, attrs=conv.attrs | {"pool": 1.0})


Rule = Callable[[Step, Step], Step | None]
RULES: dict[tuple[str, str], Rule] = {
    ("conv2d_blocked", "depthwise_blocked"): with_depthwise,
    ("conv2d_winograd_f2", "max_pool2d"): with_pool,
    ("conv2d_winograd_f4", "max_pool2d"): with_pool,
}


def merge_pairs(steps: Sequence[Step], fixed: set[int]) -> tuple[list[Step], list[int]]:
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
        others = users[id(second.inputs["x"]._handle)] - {i}
        makers = (
            j for j in others if steps[j].kernel != "zero_halo" and steps[j].outs[0].is_same_view(second.inputs["x"])
        )
        at = next(makers, i)
        rule = RULES.get((steps[at].kernel, second.kernel))
        between = {*others, *range(at + 1, i)} - {at}
        if rule is None or any(steps[j].kernel != "zero_halo" for j in between):
            continue
        step = rule(steps[at], second)
        if step is None or (at in fixed and step.kernel != steps[at].kernel):
            continue
        merged[i] = step._replace(label=f"{steps[at].label}{JOIN}{second.label}")
        for j in others:
            number[j] = i
    kept = [i for i in range(len(steps)) if number[i] == i]
    place = {old: new for new, old in enumerate(kept)}
    return [merged.get(i, steps[i]) for i in kept], [place[i] for i in number]
