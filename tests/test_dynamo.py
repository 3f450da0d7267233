"""torch.compile(backend="needle") against torch: partial graphs, changed weights, modes, sizes, threads, options."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2needle
from conversion import close
from torch2needle import dynamo
from torch2needle.models import UNet, randomize, resnet18

pytestmark = pytest.mark.usefixtures("without_rules", "fresh_dynamo")


def compiled(model: nn.Module | Callable, **kwargs: Any) -> Any:
    return torch.compile(model, backend="needle", **kwargs)


def said(call: Callable[[], Any]) -> str:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(w.message) for w in caught)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean(1)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).relu()
        print(end="")
        return self.b(x)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y += 1
        y[:, 1] = 0.5
        return F.relu_(y).mul_(2)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.conv(x)
        return {"y": y, "mean": (y.mean((2, 3)), None, 3)}


class Missing(nn.Module):
    """A call without a rule between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.renorm(self.a(x), 2, 1, 1.0))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)), (4, 20)),
    "resnet18": (lambda: resnet18(), (2, 3, 64, 64)),
    "unet": (lambda: UNet(3, 2, base=8), (1, 3, 32, 32)),
    "transformer": (Encoder, (2, 7, 32)),
    "graph_break": (Breaks, (4, 6)),
    "in_place": (Writes, (2, 3, 8, 8)),
    "dict": (Named, (2, 3, 8, 8)),
    "missing": (Missing, (2, 3, 12, 12)),
}


@pytest.mark.filterwarnings("ignore:.convert.")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, mode: Callable, runs: list[int]) -> None:
    make, shape = MODELS[name]
    model = make().eval()
    randomize(model)
    x = torch.randn(shape)
    with mode():
        want = model(x.clone())
        ours = compiled(model)
        for _ in range(2):
            close(ours(x.clone()), want)
    assert runs and not dynamo.SAID


def test_lstm() -> None:
    model = nn.LSTM(4, 5, batch_first=True).eval()
    head = nn.Linear(5, 3)
    x = torch.randn(2, 6, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        return head(model(x)[0]).relu()

    with torch.no_grad():
        close(compiled(f)(x), f(x))


def test_call_without_a_rule_is_named() -> None:
    model = Missing().eval()
    with torch.no_grad():
        text = said(lambda: compiled(model)(torch.randn(2, 3, 12, 12)))
    assert "1 calls run in torch" in text and "renorm" in text and "test_dynamo.py" in text


@pytest.mark.parametrize("dynamic", [True, None])
def test_batch_sizes(dynamic: bool | None, runs: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    ours = compiled(model, dynamic=dynamic)
    with torch.no_grad():
        for n in (2, 3, 7, 2):
            x = torch.randn(n, 3, 8, 8)
            close(ours(x), model(x))
    assert len(runs) >= 4 and not dynamo.SAID


def test_size_as_an_argument(runs: list[int]) -> None:
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x * n).reshape(x.shape[0] * 2, -1).sum(1)

    ours = compiled(f, dynamic=True)
    for n, rows in ((3, 2), (5, 4), (3, 6)):
        x = torch.randn(rows, 8)
        close(ours(x, n), f(x, n))
    assert len(runs) >= 3


def trained(model: nn.Module, x: torch.Tensor, **kwargs: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kwargs)
    model(x).square().sum().backward()
    optimizer.step()


def written(model: nn.Module, x: torch.Tensor) -> None:
    """What leaves versions and addresses as they are."""
    model[3].weight.data.add_(1.0)
    model[1].running_mean.data[0] = 3.0


CHANGES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "fused": lambda m, x: trained(m, x, fused=True),
    "foreach": lambda m, x: trained(m, x, foreach=True),
    "through data": written,
    "rows turned": lambda m, x: m[0].weight.data.copy_(m[0].weight.data.flip(0)),
    "signs": lambda m, x: m[0].weight.data.neg_(),
    "numpy": lambda m, x: m[3].bias.detach().numpy().__setitem__(0, 5.0),
    "one element": lambda m, x: m[0].weight.data.view(-1)[100:101].mul_(50),
}


@pytest.mark.parametrize("change", CHANGES)
def test_writes_that_torch_does_not_count_are_seen(change: str, runs: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    randomize(model)
    ours, xs = compiled(model), [torch.randn(2, 3, 9, 9), torch.randn(3, 3, 8, 8)]
    with torch.no_grad():
        before = [model(x) for x in xs]
        for x, y in zip(xs, before, strict=True):
            close(ours(x), y)
    CHANGES[change](model, xs[0])
    count = len(runs)
    with torch.no_grad():
        for x, y in zip(xs, before, strict=True):
            want = model(x)
            assert (want - y).abs().max() > 1e-3
            close(ours(x), want)
    assert len(runs) == count + 2 and not [t for t in dynamo.SAID if "gradients" not in t]


def test_versions_alone() -> None:
    """Asked for, only what torch counts is seen: a large model is then not read at every call."""
    model, x = nn.Linear(64, 64).eval(), torch.randn(16, 64)
    with torch.no_grad():
        ours = compiled(model, options={"watch": "version"})
        close(ours(x), model(x))
        model.weight.add_(1)
        close(ours(x), model(x))
        with pytest.raises(Exception, match="watch expects content or version, got 'never'"):
            compiled(model, options={"watch": "never"})(x)


@pytest.mark.parametrize("change", ["add_", "optimizer", "data", "load", "replace"])
def test_changed_weights_are_seen(change: str, runs: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    ours, x = compiled(model), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        before = model(x)
        close(ours(x), before)
    if change == "add_":
        with torch.no_grad():
            model[0].weight.add_(0.5)
            model[1].running_mean.mul_(2).add_(1)
    elif change == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        optimizer.step()
    elif change == "data":
        model[3].weight.data = torch.randn(4, 16, 3, 3)
    elif change == "load":
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    else:
        model[0].weight = nn.Parameter(torch.randn(16, 3, 3, 3))
    count = len(runs)
    with torch.no_grad():
        want = model(x)
        assert (want - before).abs().max() > 1e-3
        close(ours(x), want)
    assert len(runs) > count


def test_blocks_of_one_class_keep_their_own_weights(runs: list[int]) -> None:
    blocks = nn.ModuleList(Breaks() for _ in range(4)).eval()
    for b in blocks:
        b.compile(backend="needle")
    x = torch.randn(3, 6)
    with torch.no_grad():
        for _ in range(2):
            for b in blocks:
                close(b(x), b.forward(x))
    assert len(runs) >= 16 and len(set(runs)) == 8


def test_training_then_evaluation(runs: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    twin, x = copy.deepcopy(model), torch.randn(5, 3, 8, 8)
    ours = compiled(model)
    for m in (ours, twin):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad)
    assert not runs and any("gradients are needed" in t for t in dynamo.SAID)
    with torch.no_grad():  # writes running statistics
        close(ours(x), twin(x))
    assert not runs and any("running statistics" in t for t in dynamo.SAID)
    for key, value in twin.state_dict().items():
        close(model.state_dict()[key], value)
    model.eval(), twin.eval()
    with torch.no_grad():
        close(ours(x), twin(x))
    assert runs


def test_gradient_after_inference() -> None:
    model = nn.Linear(4, 3).eval()
    ours, x = compiled(model), torch.randn(2, 4)
    with torch.inference_mode():
        close(ours(x), model(x))
    y = ours(x)
    assert y.requires_grad
    y.sum().backward()
    close(model.weight.grad, x.sum(0).expand(3, 4))


def test_parameter_that_comes_to_need_a_gradient() -> None:
    model = nn.Linear(4, 3).eval().requires_grad_(False)
    ours, x = compiled(model), torch.randn(2, 4)
    close(ours(x), model(x))
    model.requires_grad_(True)
    assert ours(x).requires_grad


def test_autocast_stays_in_torch(runs: list[int]) -> None:
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert compiled(model)(x).dtype == torch.bfloat16
    assert not runs


class Regions(nn.Module):
    """A rotary embedding keeps out of autocast, whether it is on or off."""

    def __init__(self, enabled: bool, device: str = "cpu") -> None:
        super().__init__()
        self.enabled, self.device = enabled, device
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.enabled):
            with torch.autocast("cpu", enabled=False):
                y = x * 2
            y = self.layer(y)
        return y + x


@pytest.mark.parametrize(("enabled", "device"), [(False, "cpu"), (True, "cuda")])
def test_regions_that_change_nothing_run_in_needle(runs: list[int], enabled: bool, device: str) -> None:
    model, x = Regions(enabled, device).eval(), torch.randn(2, 4)
    with torch.no_grad():
        close(compiled(model)(x), model(x))
    assert runs


def test_region_under_autocast_stays_in_torch(runs: list[int]) -> None:
    model, x = Regions(True).eval(), torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))
    assert not runs


class Pictures(nn.Module):
    def __init__(self, step: Callable) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(4, 3), step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self.layer, x)


def test_pictures_in_bytes_run_in_needle(runs: list[int]) -> None:
    model = Pictures(lambda layer, x: layer(x.float() / 255 - 0.5)).eval()
    x = torch.randint(256, (2, 4), dtype=torch.uint8)
    with torch.no_grad():
        close(compiled(model)(x), model(x))
    assert runs


@pytest.mark.parametrize(
    "step",
    [lambda layer, x: layer((x + x).float()), lambda layer, x: layer(x.add_(200).float()), lambda layer, x: x + 100],
)
def test_arithmetic_of_bytes_stays_in_torch(runs: list[int], step: Callable) -> None:
    model = Pictures(step).eval()
    x = torch.randint(100, 256, (2, 4), dtype=torch.uint8)
    with torch.no_grad():
        want = model(x.clone())
        close(compiled(model)(x.clone()), want)
    assert not runs


def test_reason_is_said_once() -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    ours = compiled(model)
    assert said(lambda: ours(x)).count("gradients are needed") == 1
    assert "gradients" not in said(lambda: compiled(nn.Linear(4, 3))(x))


def test_two_threads(runs: list[int]) -> None:
    model = resnet18().eval()
    randomize(model)
    xs = [torch.randn(1, 3, 32, 32) for _ in range(2)]
    with torch.no_grad():
        wants = [model(x) for x in xs]
        ours = compiled(model)
        close(ours(xs[0]), wants[0])
    failures: list[Exception] = []

    def work(x: torch.Tensor, want: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                for _ in range(10):
                    close(ours(x), want)
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, wants, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and len(runs) >= 20


def test_options() -> None:
    model, x = nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 12, 12)
    with torch.no_grad():
        close(compiled(model, options={"winograd": "off", "fuse": False, "memory": "low"})(x), model(x))
        with pytest.raises(Exception, match="options expects some of"):
            compiled(model, options={"winogard": "off"})(x)
    assert "needle" in torch._dynamo.list_backends() and torch2needle.dynamo.OPTIONS["fuse"]
