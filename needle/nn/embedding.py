"""Tables of vectors."""

from __future__ import annotations

import numpy as np

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .module import Module, Parameter

__all__ = ["Embedding"]


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
