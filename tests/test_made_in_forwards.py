"""Modules that a forward makes by itself, as transformers' heads make their losses, are captured as what they call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from conversion import close  # noqa: E402

MADE = {
    "cross entropy": lambda x: nn.CrossEntropyLoss(ignore_index=-1)(x.flatten(2).mean(2), torch.tensor([1, -1])),
    "mse": lambda x: nn.MSELoss(reduction="none")(x, x.flip(1)),
    "bce": lambda x: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))(x, x.sigmoid()),
    "kl": lambda x: nn.KLDivLoss(reduction="batchmean")(x.log_softmax(1), x.flip(1).softmax(1)),
    "softmax": lambda x: nn.Softmax(-1)(x),
    "gelu": lambda x: nn.GELU("tanh")(x),
    "upsample": lambda x: nn.Upsample(scale_factor=2, mode="bilinear")(x),
    "pad": lambda x: nn.ZeroPad2d((1, 0, 2, 1))(x),
    "pool": lambda x: nn.AdaptiveAvgPool2d((2, 3))(nn.MaxPool2d(2, ceil_mode=True)(x)),
    "norm": lambda x: nn.LayerNorm(x.shape[-1], elementwise_affine=False)(x),
    "instances": lambda x: nn.InstanceNorm2d(6)(x),
    "container": lambda x: nn.Sequential(nn.ReLU(), nn.Sequential(nn.Sigmoid(), nn.Flatten()))(x),
    "unfold": lambda x: nn.Unfold(3, padding=1)(x),
    "cosine": lambda x: nn.CosineSimilarity(1)(x, x.flip(0)),
    "parameter": lambda x: nn.PReLU(init=0.3)(x),
}
EXPORTED = (
    "norm",
    "instances",
    "parameter",
)  # whose forwards in torch ask for sizes, or hold what is no member of the model
OTHERS = {
    "dropout": lambda x: nn.Dropout(0.5)(x),
    "weights": lambda x: nn.Conv2d(6, 2, 1)(x),
    "statistics": lambda x: nn.BatchNorm2d(6)(x),
    "recurrent": lambda x: nn.LSTM(5, 2)(x[0])[0],
}


class Net(nn.Module):
    def __init__(self, made: Any) -> None:
        super().__init__()
        self.layer, self.made = nn.Conv2d(3, 6, 1), made

    def forward(self, x: Any) -> Any:
        return self.made(self.layer(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_modules_made_in_forwards(name: str, training: bool) -> None:
    model, x = Net(MADE[name]).train(training), torch.randn(2, 3, 4, 5)
    net = torch2needle.convert(model, example=(x,))
    assert name in EXPORTED or net.report.capture == "torch.fx", net.report.capture
    for mode in (training, not training):
        close(net.train(mode)(x), model.train(mode)(x))


@pytest.mark.parametrize("name", OTHERS)
def test_modules_that_draw_or_keep_something(name: str) -> None:
    """Refused, or right: those that draw their weights are others at every call."""
    model, x = Net(OTHERS[name]), torch.randn(2, 3, 4, 5)
    try:
        net = torch2needle.convert(model, example=(x,))
    except torch2needle.ConversionError:
        return
    if name == "statistics":
        close(net(x), model(x))
    else:
        assert not np.allclose(net(x).numpy(), net(x).numpy())
