"""Rules of shapes, views, indexing and joining. Sizes may be symbolic; ops resolve negative axes when they run."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from needle import ops
from needle.autograd import Unsupported
from torch2needle.registry import rule

T = torch.Tensor


def varargs(values: tuple) -> tuple:
    """f(1, 2) and f((1, 2)) alike."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list) else tuple(values)


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return ops.concat(list(tensors), dim)


@rule(torch.stack)
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return ops.stack(list(tensors), dim)


@rule(torch.flatten, T.flatten, view="maybe")
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    return ops.flatten(input, start_dim, end_dim)


@rule(T.view, view="always")
def view(input: Any, *shape: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise Unsupported("view(dtype) reinterprets memory")
    return ops.reshape(input, shape=varargs(shape))


@rule(T.reshape, view="maybe")
def reshape_method(input: Any, *shape: Any) -> Any:
    return ops.reshape(input, shape=varargs(shape))


@rule(torch.reshape, view="maybe")
def reshape(input: Any, shape: Any) -> Any:
    return ops.reshape(input, shape=tuple(shape))


@rule(torch.permute, view="always")
def permute(input: Any, dims: Any) -> Any:
    return ops.permute(input, tuple(dims))


@rule(T.permute, view="always")
def permute_method(input: Any, *dims: Any) -> Any:
    return ops.permute(input, varargs(dims))


@rule(torch.transpose, T.transpose, torch.swapaxes, T.swapaxes, view="always")
def transpose(input: Any, dim0: int, dim1: int) -> Any:
    return ops.transpose(input, (dim0, dim1))


@rule(T.contiguous, view="maybe")
def contiguous(input: Any, memory_format: Any = None) -> Any:
    return input


@rule(torch.detach, T.detach, view="always")
def detach(input: Any) -> Any:
    raise Unsupported("detach would have to cut the gradient, which a converted graph cannot express")


@rule(T.clone, torch.clone)
def clone(input: Any, *, memory_format: Any = None) -> Any:
    return input


@rule(T.size)
def size(input: Any, dim: int | None = None) -> Any:
    return input.shape if dim is None else input.shape[dim]


@rule(T.dim)
def dim(input: Any) -> int:
    return input.ndim


@rule(builtins.getattr)
def get_attribute(input: Any, name: str) -> Any:
    if name == "shape":
        return input.shape
    if name == "ndim":
        return input.ndim
    if name == "dtype":
        return getattr(torch, input.dtype)
    if name == "device":
        return torch.device("cpu")
    raise Unsupported(f"the attribute {name} of a tensor has no rule")


@rule(operator.getitem, view="always")
def getitem(input: Any, index: Any) -> Any:
    return ops.getitem(input, index)


@rule(torch.unsqueeze, T.unsqueeze, view="always")
def unsqueeze(input: Any, dim: int) -> Any:
    return ops.unsqueeze(input, dim)


@rule(torch.squeeze, T.squeeze, view="always")
def squeeze(input: Any, dim: Any = None) -> Any:
    return ops.squeeze(input, dim)


@rule(torch.chunk, T.chunk, view="always")
def chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    return ops.chunk(input, chunks, dim)


@rule(torch.split, T.split, view="always")
def split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    return ops.split_sizes(tensor, split_size_or_sections, dim)


@rule(F.pad)
def pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    if mode != "constant":
        raise Unsupported(f"mode expects constant, got {mode}")
    return ops.pad(input, tuple(pad), value=value or 0.0)
