"""Padding in every mode: constant (see shape.py), and with values of the input itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from needle.autograd import Spec, Tensor, one_of, op
from needle.ops.nn.spatial import on_axis
from needle.ops.shape.basic import Pad, Padding, broadcast_to, flip
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import concat

__all__ = ["pad"]

EDGE_MODES = ("reflect", "replicate", "circular")


@op
class ConstantPad(Pad):
    """Pad of any number of axes; volumes go axis by axis, since Pad takes five axes for a blocked image."""

    def must_decompose(self, *inputs: Any) -> bool:
        (x,) = inputs
        return (x.recorder is None or x.recorder.static) and len(x.shape) == 5

    def decompose(self, x: Tensor) -> Tensor:
        self.infer(x)
        for axis, pair in enumerate(self.all_pads(x)):
            x = on_axis(Pad((pair, (0, 0)), self.value), x, axis) if any(pair) else x
        return x

    @classmethod
    def samples(cls) -> list:
        return [({"pads": ((1, 2), (0, 3), (-1, 1)), "value": 0.5}, [(2, 2, 3, 4, 3)]), *super().samples()]


@op
class EdgePad(Padding):
    """The last axes continued: `pads` holds (before, after) for each of them; negative ones crop.

    mode: "reflect" (cba|abc|cba without the edge twice), "replicate" (aaa|abc|ccc), "circular" (abc|abc|abc; crops first).
    """

    pads: tuple
    mode: str
    checks = one_of(mode=EDGE_MODES)

    def infer(self, x: Any) -> Any:
        shape = []
        for size, (before, after) in zip(x.shape, self.all_pads(x), strict=True):
            inner = size + min(before, 0) + min(after, 0)
            most = {"reflect": size - 1, "circular": inner}.get(self.mode, max(before, after, 0))
            if max(before, after, 0) > max(most, 0) or (size < 1 and (before or after)):
                raise ValueError(f"[pad] {self.mode} pads {(before, after)} are too large for an axis of size {size}.")
            if size + before + after < 0 or inner < 0:
                raise ValueError(f"[pad] pads {(before, after)} crop more than an axis of size {size} has.")
            shape.append(size + before + after)
        return Spec(tuple(shape), str(x.dtype))

    def decompose(self, x: Tensor) -> Tensor:
        self.infer(x)
        pairs = self.all_pads(x)
        crops = ConstantPad(tuple((min(a, 0), min(b, 0)) for a, b in pairs))
        cropping = any(a < 0 or b < 0 for a, b in pairs)
        if cropping and self.mode == "circular":
            x = crops(x)
        for axis, (before, after) in enumerate(pairs):
            if before > 0 or after > 0:
                x = on_axis(partial(self._extend, max(before, 0), max(after, 0)), x, axis)
        return crops(x) if cropping and self.mode != "circular" else x

    def _extend(self, before: int, after: int, x: Tensor) -> Tensor:
        """x (outer, size, inner) with more before and after its middle axis."""
        outer, size, inner = x.shape

        def part(start: int, stop: int) -> Tensor:
            return getitem(x, (slice(None), slice(start, stop)))

        if self.mode == "reflect":
            first, last = flip(part(1, before + 1), 1), flip(part(size - after - 1, size - 1), 1)
        elif self.mode == "circular":
            first, last = part(size - before, size), part(0, after)
        else:
            first, last = (broadcast_to(part(i, i + 1), (outer, n, inner)) for i, n in ((0, before), (size - 1, after)))
        return concat([p for p in (first, x, last) if p.shape[1]], 1)

    @classmethod
    def samples(cls) -> list:
        both, mixed = ((1, 2), (3, 0)), ((2, -1), (-1, 2))
        return [({"pads": p, "mode": m}, [(2, 4, 5)]) for m in EDGE_MODES for p in (both, mixed)]


def pad(a: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    """torch's order: (left, right, top, bottom, ...), from the last axis backwards. Entries may be symbolic or negative.

    mode: constant (with `value`, 0 by default), reflect, replicate or circular.
    """
    if mode not in ("constant", *EDGE_MODES):
        raise ValueError(f"[pad] mode expects constant, {', '.join(EDGE_MODES)}, got {mode}.")
    if len(pad) % 2:
        raise ValueError(f"[pad] expects an even number of pads, got {len(pad)}.")
    pairs = tuple((pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2))
    if mode == "constant":
        return ConstantPad(pairs, 0.0 if value is None else value)(a)
    if value:
        raise ValueError(f"[pad] mode {mode} takes no value, got {value}.")
    return EdgePad(pairs, mode)(a)
