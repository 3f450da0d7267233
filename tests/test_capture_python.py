"""What Python makes of sizes, axes, dtypes and parts of tensors, which torch.fx follows with an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from test_capture_traps import Linear, refusal  # noqa: E402

BY_AXES = {1: "i->i", 2: "ij->i", 3: "ijk->ik"}
IN_PYTHON: dict[str, Callable] = {  # what torch.fx follows with an example
    "axes": lambda x: torch.einsum(BY_AXES[x.ndim], x),
    "dim()": lambda x: torch.einsum(BY_AXES[x.dim()], x),
    "axes of a shape": lambda x: torch.einsum(BY_AXES[len(x.shape)], x),
    "axes in a set": lambda x: x + (1 if x.ndim in {1, 3} else 2),
    "parts": lambda x: sum(map(torch.sin, x.chunk(3, dim=-1))),
    "some parts": lambda x: torch.cat([t * (i + 1) for i, t in enumerate(x.split([1, 2, 3], 1))], 1),
    "rest": lambda x: torch.stack([t.sum(1) for t in x.split(4, dim=1)]),
    "rows": lambda x: torch.stack(list(reversed([*x.unbind(1)]))),
    "sorted": lambda x: next(iter(x.sort(dim=1))),
    "count": lambda x: x * len(x.chunk(4, dim=1)),
    "whole numbers": lambda x: x[: int(x.shape[0] / 2.5) + 1] * int(x.shape[0]),  # windows' images are counted so
    "real numbers": lambda x: x * float(x.shape[0]) + float(x.shape[0] / 2),
    "of what is negative": lambda x: x * int((1 - x.shape[0]) / 2) + float(int(x.shape[0] / 2)),
    "rounded": lambda x: x[: round(x.shape[0] / 2) + 1] * int("3", base=16),
    "kinds of numbers": lambda x: x * int(x.shape[0] / 3) if isinstance(x.shape[0], int) and int(2.5) == 2 else x,
}


@pytest.mark.parametrize("name", IN_PYTHON)
def test_what_python_makes_of_axes_parts_and_sizes(name: str) -> None:
    """Axes as keys, loops over the parts of a tensor, plain numbers of sizes: of one graph for all batches."""
    torch.manual_seed(0)
    model, x = Linear(lambda m, x: IN_PYTHON[name](m.linear(x))), torch.randn(3, 3)
    model.linear = nn.Linear(3, 6)
    net = torch2needle.convert(model, (x,))
    assert net.report.capture == "torch.fx" and not any("differs between" in n for n in net.report.notes)
    for batch in (3, 1, 7):
        assert torch2needle.verify(model, net, (torch.randn(batch, 3),))


LIMITS: dict[str, Callable] = {
    "largest": lambda x: x.masked_fill(x < 0, -torch.finfo(x.dtype).max).softmax(-1),
    "least": lambda x: x.clamp(min=torch.finfo(x.dtype).eps) + torch.finfo(torch.float64).tiny,
    "integers": lambda x: x.masked_fill(x.argmax(-1, keepdim=True) == 0, torch.iinfo(x.argmax(-1).dtype).max / 1e18),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_dtypes(name: str) -> None:
    """torch.iinfo of what is no dtype would be another's, without an error."""
    torch.manual_seed(0)
    model, x = Linear(lambda m, x: LIMITS[name](m.linear(x))), torch.randn(4, 3)
    net = torch2needle.convert(model, (x,))
    assert net.report.capture == "torch.fx" and torch2needle.verify(model, net, (x,))
    assert "pass example=" in refusal(model)


def test_a_value_that_a_forward_replaces() -> None:
    """What a buffer or an attribute was before is asked for sizes: `self.mean = self.mean.type_as(x)`."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.tensor([0.4, 0.5, 0.6])
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            self.mean = self.mean.type_as(x)
            return self.linear(x - self.mean) + (1 if x.shape[1] % 3 else self.mean)

    model, x = Shifted(), torch.randn(4, 3)
    net = torch2needle.convert(model, (x,))
    assert net.report.capture == "torch.fx" and isinstance(model.mean, torch.Tensor)
    for batch in (4, 2):
        assert torch2needle.verify(model, net, (torch.randn(batch, 3),))
