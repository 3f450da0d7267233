"""`to_torch`: weights trained in needle, back in torch under its names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close  # noqa: E402
from needle.backend_selection import BACKEND  # noqa: E402
from torch2needle.models import randomize, resnet18  # noqa: E402

IMAGE = (4, 3, 9, 8)


class Norms(nn.Module):
    """Batch norm with and without statistics or weights, layer norm, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, bias=False)
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False), nn.BatchNorm2d(6, momentum=0.3)]
        )
        self.last = nn.BatchNorm2d(6, track_running_stats=False)
        self._hidden = nn.Parameter(torch.ones(6, 1, 1))
        self.register_buffer("offset", torch.arange(6.0).view(6, 1, 1))
        self.register_buffer("scale", torch.full((6, 1, 1), 0.5), persistent=False)

    def forward(self, x: Any) -> Any:
        x = self.conv(x)
        for norm in self.norms:
            x = F.relu(norm(x)) + x
        return self.last(x * self._hidden) * self.scale + self.offset


class Tied(nn.Module):
    """An embedding that is the output layer, and one block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.one = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.two = self.one

    def forward(self, x: Any) -> Any:
        return self.out(self.two(torch.tanh(self.one(self.embedding(x)))))


class Parametrised(nn.Module):
    """weight_norm in both of torch's forms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        with pytest.warns(FutureWarning):
            self.linear = nn.utils.weight_norm(nn.Linear(4, 5), dim=1)  # type: ignore[deprecated]
            self.whole = nn.utils.weight_norm(nn.Linear(5, 3), dim=None)  # type: ignore[deprecated]

    def forward(self, x: Any) -> Any:
        return self.whole(torch.relu(self.linear(torch.relu(self.conv(x)).mean((2, 3)))))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "norms": (Norms, torch.randn(IMAGE)),
    "tied": (Tied, torch.randint(11, (4, 5))),
    "parametrised": (Parametrised, torch.randn(IMAGE)),
    "resnet18": (lambda: resnet18(), torch.randn(2, 3, 33, 32)),
    "lstm": (lambda: Recurrent(), torch.randn(4, 5, 6)),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.fc(self.rnn(x)[0])


def train(net: Any, x: Any, steps: int = 3) -> None:
    """Steps of Adam on the mean square of the output."""
    net.train()
    optimizer = ndl.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.reset_grad()
        y = net(x)
        ndl.ops.summation(y * y / 100).backward()
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_after_training(name: str, fused: bool) -> None:
    make, x = MODELS[name]
    model = randomize(make()).train()
    net = torch2needle.convert(model, (x,))
    net = operator_fusion.fuse(net) if fused else net
    before = copy.deepcopy(model.state_dict())
    train(net, x)
    state = torch2needle.to_torch(net)
    assert list(state) == list(before)
    moved = [k for k, v in state.items() if not torch.equal(v, before[k])]
    assert {k for k, _ in model.named_parameters()} <= set(moved)
    for k, v in state.items():
        assert v.dtype == before[k].dtype and v.shape == before[k].shape
        if k.endswith("num_batches_tracked"):
            assert v.item() == before[k].item() + 3
        if k.endswith("running_mean"):
            assert k in moved
    loaded, taken = make(), make()
    loaded.load_state_dict(state)
    torch2needle.to_torch(net, taken)
    for mode in (False, True, False):  # in training they move their statistics alike
        ours = net.train(mode)(x)
        for other in (loaded, taken):
            close(ours, other.train(mode)(x), 2e-5)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_ties_stay() -> None:
    model = Tied()
    net = torch2needle.convert(model)
    state = torch2needle.to_torch(net)
    assert state["out.weight"] is state["embedding.weight"]
    assert state["one.0.weight"] is state["two.0.weight"]
    train(net, torch.randint(11, (4, 5)))
    torch2needle.to_torch(net, model)
    assert model.out.weight is model.embedding.weight
    close(net.state_dict()["out.weight"], model.embedding.weight, 0)


def test_values_are_copies() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    net = torch2needle.convert(model, share=True)
    state = torch2needle.to_torch(net)
    state["0.weight"].fill_(7)
    assert not (model[0].weight == 7).any()
    assert not (net.state_dict()["0.weight"].numpy() == 7).any()


def test_the_model_keeps_its_dtypes_and_optimizers() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).half()
    parameters = list(model.parameters())
    net = torch2needle.convert(model)
    train(net, torch.randn(4, 3))
    state = torch2needle.to_torch(net, model)
    assert state["0.weight"].dtype == torch.float32
    assert [p.dtype for p in model.parameters()] == [torch.float16] * 4
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    close(model[0].weight.float(), state["0.weight"], 1e-3)


def test_loaded_and_compiled_nets(tmp_path: Path) -> None:
    model = randomize(Norms()).eval()
    net = torch2needle.convert(model)
    ndl.save(operator_fusion.fuse(net), tmp_path / "net.safetensors")
    loaded = ndl.load(tmp_path / "net.safetensors")
    train(loaded, torch.randn(IMAGE))
    twin = Norms()
    torch2needle.to_torch(loaded, twin)
    x = torch.randn(IMAGE)
    close(loaded.eval()(x), twin.eval()(x))
    if BACKEND != "np":
        state = torch2needle.to_torch(ndl.compile(loaded, (x,)))
        assert list(state) == list(model.state_dict())


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (lambda: nn.Sequential(nn.Linear(3, 4)), r"0\.weight expects shape \(4, 3\), got \(2, 3\)\."),
    "more": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), r"the net lacks 1\.weight and 1 more\."),
    "less": (lambda: nn.Sequential(nn.Linear(3, 2, bias=False)), r"the model has no 0\.bias\."),
}


@pytest.mark.parametrize("name", WRONG)
def test_models_that_do_not_fit(name: str) -> None:
    make, text = WRONG[name]
    net = torch2needle.convert(nn.Sequential(nn.Linear(3, 2)))
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"^\[to_torch\] " + text + "$"):
        torch2needle.to_torch(net, model)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_tie_that_the_net_does_not_have() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net = torch2needle.convert(model)
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are one tensor in the model"):
        torch2needle.to_torch(net, model)
    with pytest.raises(
        TypeError, match=r"\[to_torch\] expects a needle Module, Optimizer or Executable, got Sequential"
    ):
        torch2needle.to_torch(model)
