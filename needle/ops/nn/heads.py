"""Attention heads as axes, and torch's attention masks. Each looks at real shapes, so that rank and sizes may stay free."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray
from needle.ops.common import as_operand
from needle.ops.families import samples_of
from needle.ops.math.elementwise import where
from needle.ops.shape.basic import reshape

__all__ = ["attention_bias", "merge_heads", "split_heads"]


def swap_first(ndim: int, sequence_first: bool) -> list[int]:
    """Order of axes that brings (L, N, ...) to (N, L, ...) and back; only a batch of sequences has both."""
    return [1, 0, *range(2, ndim)] if sequence_first and ndim > 2 else list(range(ndim))


@op
class SplitHeads(Op):
    """(..., L, heads * D) to (..., heads, L, D); with sequence_first the input is (L, N, heads * D) or (L, heads * D)."""

    heads: int
    sequence_first: bool = False

    is_view = True

    def infer(self, x: Any) -> Any:
        if len(x.shape) < 2 or x.shape[-1] % self.heads:
            raise ValueError(f"[split_heads] expects shape (..., L, n * {self.heads}), got {tuple(x.shape)}.")
        shape = [x.shape[i] for i in swap_first(len(x.shape), self.sequence_first)]
        return Spec((*shape[:-2], self.heads, shape[-2], shape[-1] // self.heads), str(x.dtype))

    def _order(self, ndim: int) -> list[int]:
        """Axes of the split array, heads second to last, in the order of the result."""
        first = swap_first(ndim, self.sequence_first)[:-1]
        return [*first[:-1], ndim - 1, first[-1], ndim]

    def compute(self, x: NDArray) -> Any:
        return x.split_last(self.heads).permute(self._order(x.ndim))

    def reference(self, x: np.ndarray) -> Any:
        return x.reshape((*x.shape[:-1], self.heads, x.shape[-1] // self.heads)).transpose(self._order(x.ndim))

    def sources(self, axis: int, out: Any, *inputs: Any) -> list[int | None] | None:
        at = self._order(len(out.shape) - 1)[axis]
        return [at] if at < len(out.shape) - 2 else None

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return MergeHeads(self.sequence_first)(out_grad)

    samples = samples_of(
        ({"heads": 2}, [(3, 5, 8)]),
        ({"heads": 4, "sequence_first": True}, [(5, 3, 8)]),
        ({"heads": 2, "sequence_first": True}, [(5, 6)]),
    )


@op
class MergeHeads(Op):
    """(..., heads, L, D) to (..., L, heads * D), or to (L, N, heads * D) with sequence_first: undoes SplitHeads."""

    sequence_first: bool = False

    is_view = True

    def infer(self, x: Any) -> Any:
        if len(x.shape) < 3:
            raise ValueError(f"[merge_heads] expects shape (..., heads, L, D), got {tuple(x.shape)}.")
        *batch, heads, length, width = x.shape
        shape = (*batch, length, heads * width)
        return Spec(tuple(shape[i] for i in swap_first(len(shape), self.sequence_first)), str(x.dtype))

    def _order(self, ndim: int) -> list[int]:
        """Axes of the input in the order of the result before its last two become one."""
        inner = swap_first(ndim - 1, self.sequence_first)[:-1]
        axes = [*range(ndim - 3), ndim - 2]
        return [*(axes[i] for i in inner), ndim - 3, ndim - 1]

    def compute(self, x: NDArray) -> Any:
        return x.permute(self._order(x.ndim)).reshape(self.infer(x).shape)

    def reference(self, x: np.ndarray) -> Any:
        return x.transpose(self._order(x.ndim)).reshape(self.infer(x).shape)

    def sources(self, axis: int, out: Any, *inputs: Any) -> list[int | None] | None:
        return [self._order(len(out.shape) + 1)[axis]] if axis < len(out.shape) - 1 else None

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return SplitHeads(node.inputs[0].shape[-3], self.sequence_first)(out_grad)

    samples = samples_of(({}, [(3, 2, 5, 4)]), ({"sequence_first": True}, [(3, 2, 5, 4)]), ({}, [(2, 5, 4)]))


def split_heads(x: Tensor, heads: int, sequence_first: bool = False) -> Tensor:
    """Heads of attention as an axis: (N, L, heads * D) to (N, heads, L, D), of any dtype and batch axes; with `sequence_first`
    from (L, N, heads * D). Raises ValueError where the last axis is no multiple of `heads`.
    """
    return SplitHeads(heads, sequence_first)(x)


def merge_heads(x: Tensor, sequence_first: bool = False) -> Tensor:
    """Undoes `split_heads`: (N, heads, L, D) to (N, L, heads * D), or with `sequence_first` to (L, N, heads * D)."""
    return MergeHeads(sequence_first)(x)


@op
class AttentionBias(Op):
    """torch's attention masks as numbers that are added to scores (N, heads, L, S): a bool mask has -inf where it is True.

    Masks (L, S) stay, (N * heads, L, S) become (N, heads, L, S); padding masks (N, S) or (S,) get axes for heads and L.
    """

    heads: int
    padding: bool = False

    def infer(self, mask: Any) -> Any:
        shape = tuple(mask.shape)
        if self.padding:
            shape = (*shape[:-1], 1, 1, shape[-1])
        elif len(shape) == 3:
            if shape[0] % self.heads:
                raise ValueError(f"[attention] attn_mask expects n * {self.heads} matrices, got shape {shape}.")
            shape = (shape[0] // self.heads, self.heads, *shape[1:])
        return Spec(shape, "float32" if mask.dtype == "bool" else str(mask.dtype))

    def decompose(self, mask: Tensor) -> Tensor:
        bias = where(mask, as_operand(-np.inf, mask), as_operand(0.0, mask)) if mask.dtype == "bool" else mask
        return reshape(bias, self.infer(mask).shape)

    samples = samples_of(
        ({"heads": 2}, [(5, 7)]),
        ({"heads": 2}, [(6, 5, 7)]),
        ({"heads": 2, "padding": True}, [(3, 7)]),
    )


def attention_bias(mask: Tensor, heads: int, padding: bool = False) -> Tensor:
    """A mask of attention as numbers to add to scores (N, heads, L, S): bools are -inf where they are True, and float32.

    Masks (L, S) stay, (N * heads, L, S) become (N, heads, L, S); with `padding`, (N, S) and (S,) get axes for heads and L.
    """
    return AttentionBias(heads, padding)(mask)
