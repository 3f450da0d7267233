"""Tables of vectors."""

from __future__ import annotations

import numpy as np

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .arguments import choice, flag
from .module import Module, Parameter

__all__ = ["Embedding", "EmbeddingBag"]


class Embedding(Module):
    """Indices (*) to rows (*, embedding_dim) of `weight` (num_embeddings, embedding_dim), drawn from N(0, 1).

    padding_idx: a row that starts as zeros and gets no gradient; scale_grad_by_freq: a row's gradient is divided by how often its
    index is among those of the call.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: Device | None = None,
        dtype: str = "float32",
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"[Embedding] padding_idx expects a row of {num_embeddings}, got {padding_idx}.")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.scale_grad_by_freq = padding_idx, scale_grad_by_freq
        drawn = init.randn(num_embeddings, embedding_dim, device=device, dtype=dtype)
        if padding_idx is not None and not init.DRAWING.off:
            values = drawn.numpy()
            values[padding_idx] = 0
            drawn = Tensor(np.asarray(values), device=device, dtype=dtype)
        self.weight = Parameter(drawn, device=device, dtype=dtype)

    def forward(self, indices: Tensor) -> Tensor:
        return ops.embedding(indices, self.weight, self.padding_idx, self.scale_grad_by_freq)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class EmbeddingBag(Embedding):
    """Sums, means or maxima of rows of `weight`, drawn from N(0, 1), that bags of indices name.

    Indices (B, L) are B bags; indices (M,) with offsets (B,), at which bags begin: (B, embedding_dim). include_last_offset: the
    end of the last bag is among the offsets. padding_idx: a row that counts for nothing. mode: "sum", "mean" or "max";
    per_sample_weights: factors of the indices' shape, of sums.
    """

    arguments = {"mode": choice("sum", "mean", "max"), "include_last_offset": flag}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device, dtype, padding_idx)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(  # type: ignore[override]
        self, indices: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        last = self.include_last_offset
        if indices.ndim == 2:
            if offsets is not None:
                raise ValueError(f"[EmbeddingBag] expects no offsets beside bags {indices.shape}, got some.")
            (bags, length), last = indices.shape, False
            offsets = ops.arange_like(indices, 0, bags, 1) * length
            indices = ops.flatten(indices)
            per_sample_weights = None if per_sample_weights is None else ops.flatten(per_sample_weights)
        elif offsets is None:
            raise ValueError(f"[EmbeddingBag] expects offsets beside indices (M,), got indices {indices.shape} alone.")
        return ops.embedding_bag(indices, self.weight, offsets, self.mode, per_sample_weights, last, self.padding_idx)
