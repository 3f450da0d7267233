"""Sparse tensors that a model holds, such as a graph's neighbours: needle has dense ones alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..report import dotted, short
from .guard import patched

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
MOST = 1 << 26  # numbers of a dense one: 256 MB


@contextmanager
def made_dense(model: Any) -> Iterator[list[str]]:
    """Buffers and plain attributes of a module are dense for a while; what there is to note of it.

    Those too large for that, and parameters, are left for the refusal.
    """
    names: list[tuple[Any, str, Any]] = []
    paths: list[str] = []
    for path, m in model.named_modules() if isinstance(model, nn.Module) else ():
        for place in (m._buffers, vars(m)):
            for name, t in place.items():
                small = isinstance(t, torch.Tensor) and t.layout in SPARSE and t.numel() <= MOST
                if small and not t.requires_grad and t.device.type != "meta":
                    names.append((place, name, t.to_dense()))
                    paths.append(dotted(path, name))
    notes = [f"sparse tensors are dense in the net: {short(paths)}"] if paths else []
    with patched(names):
        yield notes
