"""Rules of module classes: torch module to needle layer, in torch's layout. The converter fills the parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from needle import nn as needle_nn
from needle.autograd import Unsupported
from torch2needle.cells import written_by
from torch2needle.registry import rule


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsupported(reason)


@rule(nn.Linear)
def linear(m: nn.Linear) -> Any:
    return needle_nn.Linear(m.in_features, m.out_features, bias=m.bias is not None, layout="torch")


@rule(nn.Identity, view="same")
@written_by(lambda base, value: value)
def identity(m: nn.Identity) -> Any:
    return needle_nn.Identity()


@rule(nn.Flatten, view="maybe")
def flatten(m: nn.Flatten) -> Any:
    return needle_nn.Flatten(m.start_dim, m.end_dim)
