"""torch.compile(backend="needle"): complex weights, torch.vmap, gradients switched on inside, results beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conversion import close
from test_dynamo import compiled
from torch2needle import dynamo

pytestmark = pytest.mark.usefixtures("without_rules", "fresh_dynamo")


class Spectral(nn.Module):
    """Frequencies weighted by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.fft.rfft(x) @ self.weight
        return torch.fft.irfft(y, n=6), y


def test_complex_weights(runs: list[int]) -> None:
    model, x = Spectral().eval(), torch.randn(3, 6)
    ours = compiled(model)
    for change in (lambda: None, lambda: model.weight.mul_(2j), lambda: model.weight.data.add_(1.0)):
        with torch.no_grad():
            change()
            for got, want in zip(ours(x), model(x), strict=True):
                close(got, want)
    assert len(runs) >= 3 and not dynamo.SAID


@pytest.mark.parametrize("dynamic", [True, None])
def test_vmap(dynamic: bool | None, runs: list[int]) -> None:
    layer = nn.Linear(6, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: layer(row).softmax(0) * row.sum())(x)

    ours = compiled(f, dynamic=dynamic)
    with torch.no_grad():
        for rows in (3, 3, 5):
            x = torch.randn(rows, 6)
            close(ours(x), f(x))
    assert len(runs) >= 3 and not dynamo.SAID


def test_gradients_switched_on_inside(runs: list[int]) -> None:
    """As torch.distributions does for probabilities; where a result has gradients, torch runs it."""
    layer = nn.Linear(4, 3)

    def behind(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        with torch.enable_grad():
            z = y.softmax(-1)
        return z * 2

    def through(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return layer(x)

    x = torch.randn(2, 4)
    with torch.no_grad():
        close(compiled(behind)(x), behind(x))
        assert runs and not dynamo.SAID
        assert compiled(through)(x).requires_grad and dynamo.SAID
        mixture = torch.distributions.Categorical(logits=x)
        close(
            compiled(lambda x: torch.distributions.Categorical(logits=x, validate_args=False).probs)(x), mixture.probs
        )


def test_graph_whose_results_differ_stays_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dynamo.executable

    def wrong(*args: Any, **options: Any) -> Any:
        exe = real(*args, **options)
        return lambda *given: [t + 1 for t in exe(*given)]

    monkeypatch.setattr(dynamo, "executable", wrong)
    x = torch.randn(3, 6)
    close(compiled(torch.relu)(x), torch.relu(x))
    assert "off by 1," in "".join(dynamo.SAID)
