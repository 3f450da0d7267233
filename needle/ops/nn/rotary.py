"""Rotary position embedding, and attention of groups of queries that share a head of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.common import broadcast_shape
from needle.ops.families import samples_of
from needle.ops.nn.attention import ScaledDotProductAttention
from needle.ops.shape.basic import broadcast_to, reshape, unsqueeze
from needle.ops.shape.indexing import getitem
from needle.ops.shape.join import concat, stack

__all__ = ["rotary"]


@op
class Rotary(Op):
    """x cos + turned(x) sin of x (..., D), cos and sin broadcast to it: turned (x1, x2) is (-x2, x1), x1 and x2 being the halves
    of the last axis or, interleaved, its even and odd places.

    Su et al., RoFormer, arXiv 2104.09864.
    """

    interleaved: bool = False
    float32_only = True
    compute_infers = True

    def infer(self, x: Any, cos: Any, sin: Any) -> Spec:
        shape = tuple(x.shape)
        if not shape or shape[-1] % 2:
            raise ValueError(f"[rotary] expects an even number of features, got shape {shape}.")
        for v in (cos, sin):
            if broadcast_shape("rotary", shape, tuple(v.shape)) != shape:
                raise ValueError(f"[rotary] cos and sin broadcast to {shape}, got {tuple(v.shape)}.")
        return Spec(shape, str(x.dtype))

    def into(self, out: NDArray, x: NDArray, cos: NDArray, sin: NDArray) -> None:
        dense = [v if v.strides[-1] == 1 else v.copy() for v in (x, cos, sin)]
        x, cos, sin = (v.broadcast_to(out.shape) for v in dense)
        if cos.strides[-1] != 1 or sin.strides[-1] != 1:  # of one value for a row
            cos, sin = cos.copy(), sin.copy()
        call("rotary", [out], x=x, cos=cos, sin=sin, interleaved=self.interleaved)

    def reference(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> Any:
        half = x.shape[-1] // 2
        if self.interleaved:
            turned = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        else:
            turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
        return x * cos + turned * sin

    def decompose(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        if self.interleaved:
            even, odd = (getitem(x, (Ellipsis, slice(i, None, 2))) for i in (0, 1))
            turned = reshape(stack((-odd, even), -1), x.shape)
        else:
            low, high = getitem(x, (Ellipsis, slice(0, half))), getitem(x, (Ellipsis, slice(half, None)))
            turned = concat((-high, low), -1)
        return x * cos + turned * sin

    samples = samples_of(
        ({}, [(2, 3, 5, 8), (5, 8), (1, 1, 5, 8)]),
        ({"interleaved": True}, [(2, 3, 5, 6), (2, 1, 5, 6), (5, 6)]),
        ({}, [(4, 34), (4, 34), (1,)]),
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x (..., D) turned by the angles whose cosines and sines are given for every feature."""
    return Rotary(interleaved)(x, cos, sin)


@op
class GroupedAttention(Op):
    """Attention `of` in which `groups` neighbouring heads of q (..., H, L, E) share one of k and v (..., H / groups, S, *).

    Ainslie et al., arXiv 2305.13245.
    """

    of: ScaledDotProductAttention
    groups: int
    compute_infers = True

    def must_decompose(self, *inputs: Any) -> bool:
        q, k, v, *mask = inputs
        return self.of.must_decompose(q, self.repeated(k), self.repeated(v), *mask)

    def repeated(self, x: Any) -> Spec:
        shape = tuple(x.shape)
        return Spec((*shape[:-3], shape[-3] * self.groups, *shape[-2:]), str(x.dtype))

    def infer(self, q: Any, k: Any, v: Any, *mask: Any) -> Any:
        if min(len(k.shape), len(v.shape)) < 3:
            raise ValueError(f"[grouped_attention] k expects heads, got shapes {tuple(k.shape)} and {tuple(v.shape)}.")
        return self.of.infer(q, self.repeated(k), self.repeated(v), *mask)

    def memory(self, spec: Any) -> NDArray:
        return self.of.memory(spec)

    def compute(self, q: NDArray, k: NDArray, v: NDArray, *mask: NDArray) -> Any:
        spec = self.infer(q, k, v, *mask)
        if q.dtype != "float32":
            return None
        out = self.memory(spec)
        self.into(out, q, k, v, *mask)
        return out

    def into(self, out: NDArray, q: NDArray, k: NDArray, v: NDArray, *mask: NDArray) -> None:
        """Groups as an axis of their own, along which keys and values stand still."""
        heads = out.shape[-3]

        def split(x: NDArray) -> NDArray:
            return x.viewed((*x.shape[:-3], heads // self.groups, self.groups, *x.shape[-2:]))

        scores = (*out.shape[:-1], k.shape[-2])
        k, v = (x.viewed((*x.shape[:-2], 1, *x.shape[-2:])) for x in (k, v))
        self.of.into(split(out), split(q), k, v, *(split(m.broadcast_to(scores)) for m in mask))

    def reference(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *mask: np.ndarray) -> Any:
        return self.of.reference(q, *(np.repeat(x, self.groups, -3) for x in (k, v)), *mask)

    def decompose(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return self.of(q, *(self._repeat(x) for x in (k, v)), *mask)

    def _repeat(self, x: Tensor) -> Tensor:
        *lead, rows, width = x.shape
        wide = broadcast_to(unsqueeze(x, -3), (*lead, self.groups, rows, width))
        return reshape(wide, self.repeated(x).shape)

    samples = samples_of(
        ({"of": ScaledDotProductAttention(), "groups": 2}, [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16)]),
        ({"of": ScaledDotProductAttention(causal=True), "groups": 3}, [(3, 5, 8), (1, 5, 8), (1, 5, 8)]),
        (
            {"of": ScaledDotProductAttention(has_mask=True), "groups": 2},
            [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16), (2, 1, 5, 7)],
        ),
    )
