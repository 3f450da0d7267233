"""Whole models from one conversion: values at several sizes in both modes, and training steps against torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from gpu_devices import everywhere, ours  # noqa: E402
from torch2needle import models  # noqa: E402
from torch2needle.models.efficientnet import StochasticDepth  # noqa: E402

SQUARES = [(1, 3, 64, 64), (3, 3, 96, 72), (2, 3, 65, 33)]
CASES: list[tuple[str, Callable, list[tuple[int, ...]]]] = [
    ("mlp", lambda: models.mlp((784, 64, 10)), [(1, 784), (3, 1, 28, 28)]),
    ("resnet18", models.resnet18, SQUARES),
    ("resnet50", models.resnet50, SQUARES[:1]),
    ("resnet9", models.resnet9, [(1, 3, 32, 32), (3, 3, 32, 32)]),
    ("resnet9_wide", models.resnet9_wide, [(2, 3, 32, 32)]),
    ("mobilenet_v2", lambda: models.mobilenet_v2(dropout=0.0), [(1, 3, 64, 64), (3, 3, 96, 64)]),
    ("efficientnet_b0", lambda: models.efficientnet_b0(dropout=0.0), [(1, 3, 64, 64), (3, 3, 96, 64)]),
    ("densenet121", models.densenet121, [(1, 3, 64, 64), (3, 3, 96, 64)]),
    ("unet", lambda: models.unet(base=8), [(1, 3, 32, 32), (3, 3, 45, 61), (2, 3, 37, 64)]),
    ("unet_bilinear", lambda: models.unet(base=8, bilinear=True), [(1, 3, 32, 32), (3, 3, 45, 61), (2, 3, 37, 64)]),
]


def difference(ours: ndl.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    want = theirs.detach().numpy()
    assert tuple(ours.shape) == want.shape
    return float(np.abs(ours.numpy() - want).max() / np.abs(want).max())


@everywhere
@pytest.mark.parametrize(("make", "shapes"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_model_matches_torch(make: Callable, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = models.randomize(make()).eval()
    net = torch2needle.convert(model)
    assert list(net.state_dict()) == list(model.state_dict())
    for shape in shapes:
        x = torch.randn(shape)
        assert difference(net(ours(x)), model(x)) < 1e-5, shape
    if shapes[-1][0] > 1:
        model.train(), net.train()
        exact = copy.deepcopy(model).double()(x.double())
        own = float(
            (model(x) - exact).abs().max() / exact.abs().max()
        )  # many batch norms of few values amplify rounding
        assert difference(net(ours(x)), exact) <= max(1e-5, 4 * own)


def torch_states(model: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor) -> dict[str, np.ndarray]:
    """What five steps of torch's SGD change, by name, in the model's dtype."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        (model(x) * weight).sum().backward()
        optimizer.step()
    return {k: (v - before[k]).numpy() for k, v in model.state_dict().items()}


SMALL = {
    "resnet18": lambda: models.resnet18(10),
    "unet": lambda: models.unet(base=8),
    "mobilenet_v2": lambda: models.mobilenet_v2(10, dropout=0.0),
}


@everywhere
@pytest.mark.parametrize(
    ("name", "shape"), [("resnet18", (2, 3, 64, 64)), ("unet", (2, 3, 32, 32)), ("mobilenet_v2", (2, 3, 64, 64))]
)
def test_five_training_steps_match_torch(name: str, shape: tuple[int, ...]) -> None:
    """Against float64 torch. One ReLU that flips by rounding moves ResNet-18's updates by 1 % or more, in torch, too, so the
    bound is 1e-3 or twice float32 torch's own difference."""
    torch.manual_seed(0)
    model = SMALL[name]().train()
    net, double = torch2needle.convert(model), copy.deepcopy(model).double()
    x = torch.randn(shape)
    weight = torch.randn_like(copy.deepcopy(model)(x)) / 100
    before = {k: t.numpy() for k, t in net.state_dict().items()}
    optimizer = ndl.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, rule="torch")
    for _ in range(5):
        optimizer.reset_grad()
        ndl.ops.summation(net(ours(x)) * ndl.Tensor(weight.numpy(), requires_grad=False)).backward()
        optimizer.step()
    got = {k: t.numpy() - before[k] for k, t in net.state_dict().items()}
    single, exact = torch_states(model, x, weight), torch_states(double, x.double(), weight.double())
    for statistics in (True, False):
        keys = [k for k, v in exact.items() if v.dtype == np.float64 and ("running" in k) == statistics]
        largest = max(np.abs(exact[k]).max() for k in keys)
        theirs = max(np.abs(single[k] - exact[k]).max() for k in keys)
        assert max(np.abs(got[k] - exact[k]).max() for k in keys) <= max(1e-3 * largest, 2 * theirs)


def test_parameter_counts() -> None:
    counts = {
        "resnet18": 11_689_512,
        "resnet50": 25_557_032,
        "resnet101": 44_549_160,
        "mobilenet_v2": 3_504_872,
        "efficientnet_b0": 5_288_548,
        "densenet121": 7_978_856,
    }
    for name, count in counts.items():
        assert sum(p.numel() for p in getattr(models, name)().parameters()) == count
    assert sum(p.numel() for p in models.resnet9().parameters()) == 431_946
    assert sum(p.numel() for p in models.unet(3, 2).parameters()) == 31_037_698


def test_names_are_torchvisions() -> None:
    """First, last and every kind of parameter, as in torchvision's state dicts."""
    want = {
        "mobilenet_v2": (314, "features.0.0.weight", "features.1.conv.1.weight", "features.2.conv.3.running_var"),
        "efficientnet_b0": (
            360,
            "features.1.0.block.1.fc2.bias",
            "features.2.1.block.3.1.weight",
            "features.8.0.weight",
        ),
        "densenet121": (
            727,
            "features.conv0.weight",
            "features.denseblock4.denselayer16.norm2.bias",
            "features.norm5.bias",
        ),
    }
    for name, (count, *names) in want.items():
        state = getattr(models, name)().state_dict()
        assert len(state) == count
        classifier = "classifier.weight" if name == "densenet121" else "classifier.1.weight"
        assert {*names, classifier} <= set(state)


@everywhere
def test_stochastic_depth_drops_whole_samples() -> None:
    model = StochasticDepth(0.5).eval()
    net, x = torch2needle.convert(model), torch.rand(64, 3, 4, 5) + 1
    assert difference(net(ours(x)), x) == 0
    net.train()
    np.random.seed(0)
    factors = net(ours(x)).numpy() / x.numpy()
    per_sample = factors[:, 0, 0, 0]
    assert np.allclose(factors, per_sample[:, None, None, None])
    assert sorted(set(np.round(per_sample, 5))) == [0, 2]
    depths = [
        m.drop.p for m in models.efficientnet_b0(stochastic_depth=0.2).modules() if isinstance(m, StochasticDepth)
    ]
    assert len(depths) == 9 and depths == sorted(depths) and 0 < depths[0] < depths[-1] < 0.2
