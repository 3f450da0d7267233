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

__all__ = ["grouped_attention", "rotary"]


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


def repeat_heads(x: Tensor, times: int) -> Tensor:
    *lead, heads, rows, width = x.shape
    wide = broadcast_to(unsqueeze(x, -3), (*lead, heads, times, rows, width))
    return reshape(wide, (*lead, heads * times, rows, width))


@op
class GroupedAttention(Op):
    """Attention `of` in which neighbouring heads of q (..., H, L, E) share one of k (..., H / n, S, E) and of v (..., H / m, S,
    D). Ainslie et al., arXiv 2305.13245.
    """

    of: ScaledDotProductAttention
    compute_infers = True

    def sharing(self, q: Any, *others: Any) -> list[int]:
        """How many heads of q share one of k, and one of v."""
        shapes = [tuple(x.shape) for x in (q, *others)]
        heads = [s[-3] if len(s) > 2 else 0 for s in shapes]
        few, many = min(heads[1:]), max(heads[1:])
        if not few or many % few or heads[0] % many:
            raise ValueError(
                f"[grouped_attention] q, k and v expect heads of which each number divides the larger ones, got shapes "
                f"{', '.join(map(str, shapes))}."
            )
        return [heads[0] // n for n in heads[1:]]

    def repeated(self, q: Any, *others: Any) -> list[Spec]:
        return [
            Spec((*x.shape[:-3], x.shape[-3] * n, *x.shape[-2:]), str(x.dtype))
            for x, n in zip(others, self.sharing(q, *others), strict=True)
        ]

    def must_decompose(self, q: Any, k: Any, v: Any, *mask: Any) -> bool:
        return self.of.must_decompose(q, *(self.repeated(q, k, v) if self.of.strict else (k, v)), *mask)

    def infer(self, q: Any, k: Any, v: Any, *mask: Any) -> Any:
        return self.of.infer(q, *self.repeated(q, k, v), *mask)

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
        """Groups as axes of their own, along which keys and values stand still."""
        few, many = sorted((k.shape[-3], v.shape[-3]))

        def split(x: NDArray) -> NDArray:
            parts = (few, min(many, x.shape[-3]) // few, max(x.shape[-3] // many, 1))
            return x.viewed((*x.shape[:-3], *parts, *x.shape[-2:]))

        scores = (*out.shape[:-1], k.shape[-2])
        self.of.into(*map(split, (out, q, k, v, *(m.broadcast_to(scores) for m in mask))))

    def reference(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *mask: np.ndarray) -> Any:
        wide = (np.repeat(x, n, -3) for x, n in zip((k, v), self.sharing(q, k, v), strict=True))
        return self.of.reference(q, *wide, *mask)

    def decompose(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        wide = (repeat_heads(x, n) for x, n in zip((k, v), self.sharing(q, k, v), strict=True))
        return self.of(q, *wide, *mask)

    samples = samples_of(
        ({"of": ScaledDotProductAttention()}, [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16)]),
        ({"of": ScaledDotProductAttention(causal=True)}, [(3, 5, 8), (1, 5, 8), (1, 5, 8)]),
        (
            {"of": ScaledDotProductAttention(has_mask=True)},
            [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16), (2, 1, 5, 7)],
        ),
    )


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    **more: Any,
) -> Tensor:
    """Attention whose neighbouring heads of q (..., H, L, E) share one of k (..., H / n, S, E) and of v (..., H / m, S, D), as
    torch's with enable_gqa=True. more: `dropout` and `training` of scaled_dot_product_attention."""
    extra = () if mask is None else (mask,)
    return GroupedAttention(ScaledDotProductAttention(causal, scale, mask is not None, **more))(q, k, v, *extra)
