"""Scaled dot-product attention (Vaswani et al., 2017)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, is_on, op
from needle.backend_ndarray import NDArray, call
from needle.init.dropout import dropout
from needle.ops.common import broadcast_shape, gradient_of_decomposition, unbroadcast
from needle.ops.linalg.basic import matmul
from needle.ops.math.comparison import ne
from needle.ops.math.elementwise import where
from needle.ops.math.logic import logical_and
from needle.ops.reduce.basic import summation
from needle.ops.reduce.softmax import softmax
from needle.ops.shape.basic import transpose
from needle.ops.shape.creation import triangle_mask_like
from needle.ops.shape.join import make_tuple

__all__ = ["scaled_dot_product_attention"]

MASKED = -1e30  # a score that no softmax keeps beside others


def lower_triangle(length: int, source: int) -> np.ndarray:
    """Which of `source` keys each of `length` queries sees when it may not look ahead."""
    return np.tril(np.ones((length, source), "bool"))


def empty_heads(shape: tuple[int, ...]) -> NDArray:
    """(..., heads, L, D) over memory in the order (..., L, heads, D), which is free to merge the heads after."""
    rank = len(shape)
    order = list(range(rank))
    if rank > 2:
        order[-3:-1] = order[-2], order[-3]
    return NDArray.empty(tuple(shape[i] for i in order)).permute(order)


@op
class ScaledDotProductAttention(Op):
    """softmax(q k^T * scale + mask) v; inputs q (..., L, E), k (..., S, E), v (..., S, D), [mask].

    mask: bool (True takes part) or float (added), broadcast to (..., L, S). A query that sees no key, where all is False or
    -inf, gives zeros, as in torch; with `strict` NaN, as softmax of the sum does. In training, dropout falls on the
    probabilities and the unfused form runs.
    """

    causal: bool = False
    scale: Any = None  # default 1 / sqrt(E)
    has_mask: bool = False
    dropout: float = 0.0
    training: Any = False  # a bool, or a Mode that follows the layer
    strict: bool = False
    compute_infers = True

    def factor(self, q: Any) -> float:
        return 1 / math.sqrt(max(1, q.shape[-1])) if self.scale is None else self.scale

    def must_decompose(self, *inputs: Any) -> bool:
        return (self.dropout > 0 and is_on(self.training)) or self.wider(*inputs)

    def wider(self, q: Any, k: Any, v: Any, *mask: Any) -> bool:
        """A mask that is added has more rows than there are scores: only the sum itself can take it."""
        return self.strict and any(
            broadcast_shape("attention", m.shape, self.scores(q, k)) != self.scores(q, k) for m in mask
        )

    def scores(self, q: Any, k: Any) -> tuple[int, ...]:
        return (*broadcast_shape("attention", q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])

    def infer(self, q: Any, k: Any, v: Any, *mask: Any) -> Any:
        if min(len(x.shape) for x in (q, k, v)) < 2:
            raise ValueError(f"[attention] q, k and v expect at least 2 axes, got {[len(x.shape) for x in (q, k, v)]}.")
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(f"[attention] k expects {q.shape[-1]} features as q has, got {k.shape[-1]}.")
        if k.shape[-2] != v.shape[-2]:
            raise ValueError(f"[attention] v expects {k.shape[-2]} rows as k has, got {v.shape[-2]}.")
        batch = broadcast_shape("attention", *(tuple(x.shape[:-2]) for x in (q, k, v)))
        if self.wider(q, k, v, *mask):
            *more, length, _ = broadcast_shape("attention", mask[0].shape, self.scores(q, k))
            return Spec((*broadcast_shape("attention", tuple(more), batch), length, v.shape[-1]), str(q.dtype))
        for m in mask:
            scores = (*batch, q.shape[-2], k.shape[-2])
            if broadcast_shape("attention", tuple(m.shape), scores) != scores:
                raise ValueError(f"[attention] mask expects a shape that broadcasts to {scores}, got {tuple(m.shape)}.")
        return Spec((*batch, q.shape[-2], v.shape[-1]), str(q.dtype))

    def sources(self, axis: int, out: Any, *inputs: Any) -> list[int | None] | None:
        """Every query sees all keys."""
        is_free = not self.causal and not self.has_mask and axis == len(out.shape) - 2
        return [len(inputs[0].shape) - 2, None, None] if is_free else None

    def compute(self, q: NDArray, k: NDArray, v: NDArray, *mask: NDArray) -> Any:
        spec = self.infer(q, k, v, *mask)
        if q.dtype != "float32":
            return None
        out = self.memory(spec)
        self.into(out, q, k, v, *mask)
        return out

    def memory(self, spec: Any) -> NDArray:
        return empty_heads(spec.shape)

    def into(self, out: NDArray, q: NDArray, k: NDArray, v: NDArray, *mask: NDArray) -> None:
        """Run the kernel; `out` is strided, but dense along its last axis."""
        self.call("attention", [out], q, k, v, *mask)

    def call(
        self, kernel: str, outs: list[NDArray], q: NDArray, k: NDArray, v: NDArray, *mask: NDArray, **more: NDArray
    ) -> None:
        """Run a kernel on all of them at the batch of `outs`."""
        batch = outs[0].shape[:-2]
        wide = {n: x.broadcast_to((*batch, *x.shape[-2:])) for n, x in {"q": q, "k": k, "v": v, **more}.items()}
        for m in mask:
            m = m if m.dtype in ("bool", "float32") else m.astype("float32")
            wide["mask"] = m.broadcast_to((*batch, q.shape[-2], k.shape[-2]))
        call(kernel, outs, **wide, scale=self.factor(q), causal=self.causal, strict=self.strict)

    def weigh(self, q: np.ndarray, k: np.ndarray, *mask: np.ndarray) -> np.ndarray:
        """The probabilities of keys (..., L, S) in numpy."""
        s = (q @ k.swapaxes(-1, -2)) * self.factor(q)
        for m in mask:
            s = np.where(m, s, -np.inf) if m.dtype == "bool" else s + m
        if self.causal:
            s = np.where(lower_triangle(*s.shape[-2:]), s, -np.inf)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(top == -np.inf, 0, top))
        total = p.sum(-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            return p / (total if self.strict else np.maximum(total, np.finfo(p.dtype).tiny))

    def reference(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *mask: np.ndarray) -> Any:
        return self.weigh(q, k, *mask) @ v

    def probabilities(self, q: Tensor, k: Tensor, *mask: Tensor) -> Tensor:
        """softmax(q k^T * scale + mask) (..., L, S) in terms of other ops."""
        s = matmul(q, transpose(k)) * self.factor(q)
        seen: Tensor | None = None  # whether a key takes part
        for m in mask:
            seen = m if m.dtype == "bool" else None if self.strict else ne(m, -math.inf)
            s = s if m.dtype == "bool" else s + m
        if self.causal:
            triangle = triangle_mask_like(q, q.shape[-2], k.shape[-2])
            seen = triangle if seen is None else logical_and(seen, triangle)
        p = softmax(s if seen is None else where(seen, s, -math.inf))
        return p if seen is None or self.strict else where(seen, p, 0.0)

    def decompose(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return matmul(dropout(self.probabilities(q, k, *mask), self.dropout, is_on(self.training)), v)

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Of q, k, v and the scores, at the batch of the result, in terms of other ops; rest: [mask], gradient of the result."""
        *mask, dy = rest
        p, dp = self.probabilities(q, k, *mask), matmul(dy, transpose(v))
        ds = p * (dp - summation(p * dp, -1, keepdims=True))
        scaled = ds * self.factor(q)
        return matmul(scaled, k), matmul(transpose(scaled), q), matmul(transpose(p), dy), ds

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        """A mask that needs a gradient has that of the scores, which only the other ops give."""
        inputs = (*node.inputs, out_grad)
        needed = any(m.requires_grad for m in node.inputs[3:])
        grads = self.gradients(*inputs) if needed else (*AttentionGrad(self)(*inputs), None)
        return tuple(
            unbroadcast(g, x.shape) if x.requires_grad else None for g, x in zip(grads, node.inputs, strict=False)
        )

    @classmethod
    def samples(cls) -> list:
        q, k, v = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 16)
        return [
            ({}, [q, k, v]),
            ({"causal": True}, [(33, 5), (33, 5), (33, 3)]),
            ({"has_mask": True, "scale": 0.3}, [q, k, v, (2, 1, 1, 7)]),
            ({"has_mask": True, "causal": True}, [q, k, v, Spec((5, 7), "bool")]),
            ({}, [(1, 1, 40), (1, 150, 40), (1, 150, 1)]),
            ({"has_mask": True, "strict": True}, [q, k, v, (5, 7)]),
        ]


@op
class AttentionGrad(Op):
    """Gradients of q, k and v of attention `of`, at the batch of its result; inputs q, k, v, [mask], gradient of the result.

    The kernel computes scores and probabilities again, a block of rows at a time, and keeps nothing of (..., L, S).
    """

    of: ScaledDotProductAttention
    n_out = 3
    compute_infers = True

    def infer(self, *inputs: Any) -> Any:
        *given, dy = inputs
        out = self.of.infer(*given)
        if tuple(dy.shape) != tuple(out.shape):
            raise ValueError(f"[{self.label}] gradient expects shape {out.shape}, got {tuple(dy.shape)}.")
        return tuple(Spec((*out.shape[:-2], *x.shape[-2:]), str(x.dtype)) for x in given[:3])

    def compute(self, *inputs: NDArray) -> Any:
        *given, dy = inputs
        specs = self.infer(*inputs)
        if dy.dtype != "float32":
            return None
        outs = [empty_heads(spec.shape) for spec in specs]
        self.of.call("attention_grad", outs, *given, dy=dy)
        return tuple(outs)

    def reference(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: np.ndarray) -> Any:
        *mask, dy = rest
        p, dp = self.of.weigh(q, k, *mask), dy @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * self.of.factor(q)
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy

    def decompose(self, *inputs: Tensor) -> Any:
        return make_tuple(*self.of.gradients(*inputs)[:3])

    gradient = gradient_of_decomposition

    @classmethod
    def samples(cls) -> list:
        def case(attributes: dict[str, Any], shapes: list) -> tuple[dict[str, Any], list]:
            of = ScaledDotProductAttention(**attributes)
            given = [s if isinstance(s, Spec) else Spec(s) for s in shapes]
            return {"of": of}, [*shapes, of.infer(*given).shape]

        return [case(*sample) for sample in ScaledDotProductAttention.samples()]


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    training: Any = False,
) -> Tensor:
    """softmax(q k^T * scale + mask) v; see ScaledDotProductAttention. q (..., L, E), k (..., S, E), v (..., S, D)."""
    extra = () if mask is None else (mask,)
    return ScaledDotProductAttention(causal, scale, mask is not None, dropout, training)(q, k, v, *extra)
