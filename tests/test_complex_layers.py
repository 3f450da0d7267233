"""Layers of torch.nn that are given complex numbers, and weights that are some, are the functions that they call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402

C = torch.complex64
LAYERS = {
    "linear": (lambda: nn.Linear(5, 3, dtype=C), (2, 4, 5)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False, dtype=C), (5,)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1, dtype=C), (2, 2, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2, dtype=C), (2, 4, 7, 6)),
    "conv transpose": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, dtype=C), (1, 2, 3, 4)),
    "some": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3, dtype=C), nn.Flatten(), nn.Linear(15, 2, dtype=C)), (3, 2, 7)),
}


class Waves(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        z = self.layer(torch.fft.fft(x))
        return z.abs(), torch.view_as_real(z)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("example", [False, True])
def test_complex_layers(name: str, example: bool) -> None:
    make, shape = LAYERS[name]
    model, x = Waves(make()), torch.randn(shape)
    net = torch2needle.convert(model, (x,) if example else None)
    assert list(net.state_dict()) == list(model.state_dict())
    wants = [w.detach().numpy() for w in model(x)]
    for run in (net, ndl.compile(net.eval(), (x,))):
        for got, want in zip(run(x), wants, strict=True):
            np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5 * np.abs(want).max())
    model(x)[0].square().sum().backward()
    y = net(ndl.Tensor(x.numpy()))[0]
    (y * y).sum().backward()
    for name, p in net.named_parameters():
        want = torch.view_as_real(dict(model.named_parameters())[name].grad).numpy()
        np.testing.assert_allclose(p.grad.numpy(), want, rtol=0, atol=1e-4 * np.abs(want).max())
