"""Rules of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle import ops
from needle.autograd import Unsupported
from needle.ops.common import constant

from .registry import rule

# Gradients of sparse=True are dense in needle: the same numbers, and zeros where torch keeps none.


def check(max_norm: float | None) -> None:
    if max_norm is not None:
        raise Unsupported("max_norm writes to the weight in every call")


@rule(nn.Embedding)
def embedding_layer(m: nn.Embedding) -> Any:
    check(m.max_norm)
    return needle_nn.Embedding(
        m.num_embeddings, m.embedding_dim, padding_idx=m.padding_idx, scale_grad_by_freq=m.scale_grad_by_freq
    )


@rule(F.embedding)
def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    check(max_norm)
    return ops.embedding(input, weight, padding_idx, scale_grad_by_freq)


@rule(torch.embedding)
def torch_embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    return ops.embedding(indices, weight, padding_idx if padding_idx >= 0 else None, scale_grad_by_freq)


@rule(torch.embedding_renorm_)
def embedding_renorm(input: Any, indices: Any, max_norm: float, norm_type: float) -> Any:
    """The rows that are asked for, scaled down to the norm where theirs is larger."""
    norm = ops.vector_norm(input, norm_type, 1)
    asked = ops.scatter(ops.full_like(norm, 0.0), 0, ops.reshape(indices, (-1,)), 1.0)
    large = ops.logical_and(ops.gt(norm, max_norm), ops.gt(asked, 0.0))
    return ops.where(ops.unsqueeze(large, 1), input * ops.unsqueeze(max_norm / (norm + 1e-7), 1), input)


@rule(F.one_hot)
def one_hot(input: Any, num_classes: int = -1) -> Any:
    if isinstance(num_classes, int) and num_classes < 0:
        raise Unsupported("num_classes=-1 depends on the values; give it a number")
    classes = ops.take(constant(np.arange(num_classes), input, "int64"), input, wrap=False)  # as given, or refused
    return ops.one_hot(classes, num_classes)
