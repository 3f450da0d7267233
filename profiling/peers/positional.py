"""The form of a model that every file format takes: positional tensors in, a tuple of tensors out."""

from __future__ import annotations

import torch
from torch import nn

from .formats import flat


class Positional(nn.Module):
    """`model`, called by the names of its arguments; its nested result without what is no tensor."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(flat(self.model(**dict(zip(self.names, given, strict=True)))))
