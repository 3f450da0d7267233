"""What other converters got wrong, as data: each case plain, fused and compiled, at two batch sizes, against torch.

The reference beside a case is the report that it comes from. Cases about structure alone are in test_structure.py.
"""

# ruff: noqa: PLC3002 (its tables of models are one-line lambdas)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from conversion import Calls, close  # noqa: E402
from torch2needle.models import randomize  # noqa: E402

IMAGE, ROWS, LINE = (1, 8, 9, 7), (1, 8), (1, 8, 5)


def calls(f: Callable, *children: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Calls(f, *(make() for make in children))


def chain(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in layers))


def conv(padding: Any = 1, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(8, 8, 3, padding=padding, **options)


def norm(n: int = 8, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm2d(n, **options)


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def relu() -> nn.Module:
    return nn.ReLU(True)


class FunctionalNorm(nn.Module):
    """F.batch_norm with the tensors of another module (pytorch#122070)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv()(), norm()()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm
        return F.relu(
            F.batch_norm(self.conv(x), n.running_mean, n.running_var, n.weight, n.bias, self.training, 0.1, 3e-2)
        )


class TiedConvolutions(nn.Module):
    """Two convolutions with one weight, of which only the first has a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = conv()(), norm()(), conv()()
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


class TiedBias(nn.Module):
    """Two norms that share one bias tensor (onnxruntime-qnn PR#582)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.na, self.nb = conv()(), conv(bias=False)(), norm()(), norm()()
        self.nb.bias = self.na.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.na(self.a(x)) + self.nb(self.b(x))


class Skip(nn.Module):
    """A U-Net's skip of a value that ReLU(True) changes after it was named (pytorch#136846)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = conv()(), conv()(), nn.ReLU(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.a(x)
        deep = F.max_pool2d(self.act(skip), 2)
        deep = F.interpolate(self.b(deep), skip.shape[2:], mode="bilinear", align_corners=True)
        return torch.cat([skip, self.act(deep)], 1)


class StandardisedWeights(nn.Conv2d):
    """NFNet's convolution: its weight is normalised by a batch norm of its own in every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, weight=self.bias, training=True, momentum=0.0, eps=1e-3)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=1)


class Mixed(nn.Module):
    """A norm that trains inside a model in evaluation, or the reverse (tvm PR#17752)."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.conv, self.norm = conv()(), norm()()
        self.train(not training)
        self.norm.train(training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


def windows(x: torch.Tensor) -> torch.Tensor:
    """Masks written region by region, as Swin's."""
    mask = torch.zeros(1, x.shape[2], x.shape[3], 1)
    for i, rows in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
        mask[:, rows, :, :] = i
    y = x * 1
    y[:, 2:4] = x[:, :2]
    y[..., -1].copy_(x[..., 0])
    return y + mask.permute(0, 3, 1, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "conv read by a norm and by others": (calls(lambda x, c, n: (n(c(x)), c(x), F.relu(c(x))), conv(), norm()), IMAGE),
    "one value, two convs with norms": (
        calls(lambda x, a, b, m, n: F.relu(m(a(x)) + n(b(x))), conv(), conv(), norm(), norm()),
        IMAGE,
    ),
    "conv into a norm and a sum": (calls(lambda x, c, n: (lambda y: n(y) + y)(c(x)), conv(), norm()), IMAGE),
    "norm without weights": (chain(conv(), norm(affine=False), relu), IMAGE),
    "norm without statistics": (chain(conv(), norm(track_running_stats=False), relu), (2, 8, 9, 7)),
    "norm with a large eps": (chain(conv(bias=False), norm(eps=0.37), relu), IMAGE),
    "functional norm": (FunctionalNorm, IMAGE),
    "norm before a padded conv": (chain(norm(), conv()), IMAGE),
    "norm and relu before a padded conv": (chain(norm(), relu, conv(), norm(), relu), IMAGE),
    "conv, norm, conv, norm": (chain(conv(), norm(), conv(0), norm()), IMAGE),
    "transposed conv and norm": (chain(lambda: nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), norm(6), relu), IMAGE),
    "grouped transposed conv and norm": (chain(lambda: nn.ConvTranspose2d(8, 12, 2, 2, groups=4), norm(12)), IMAGE),
    "grouped conv with bias and norm": (chain(conv(groups=4), norm(), relu), IMAGE),
    "depthwise conv with bias and norm": (chain(conv(groups=8), norm(), lambda: nn.ReLU6(True)), IMAGE),
    "linear and norm": (chain(linear, lambda: nn.BatchNorm1d(8), relu), ROWS),
    "linear and norm over three axes": (chain(lambda: nn.Linear(5, 4), lambda: nn.BatchNorm1d(8)), LINE),
    "linear and norm over equal axes": (chain(linear, lambda: nn.BatchNorm1d(8)), (2, 8, 8)),
    "conv1d and norm": (chain(lambda: nn.Conv1d(8, 8, 3), lambda: nn.BatchNorm1d(8), relu), LINE),
    "addmm with beta": (calls(lambda x, m: torch.addmm(m.bias, x, m.weight.t(), beta=0.5, alpha=2.0), linear), ROWS),
    "tied weights, one with a norm": (TiedConvolutions, IMAGE),
    "two norms with one bias": (TiedBias, IMAGE),
    "relu_ before a skip": (Skip, IMAGE),
    "weights normalised in every call": (lambda: StandardisedWeights(8, 8, 3), IMAGE),
    "writes to slices": (calls(windows), IMAGE),
    "one module called twice": (calls(lambda x, c, n: n(c(n(c(x)))), conv(), norm()), IMAGE),
    "flatten": (calls(lambda x, m: m(torch.flatten(x, 1)), lambda: nn.Linear(504, 3)), IMAGE),
    "view by size": (calls(lambda x: x.view(x.size(0), -1, x.shape[-1]).transpose(-1, -2)), IMAGE),
    "bilinear to odd sizes": (calls(lambda x: F.interpolate(x, (13, 5), mode="bilinear", align_corners=False)), IMAGE),
    "bilinear with corners": (
        calls(lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=True)),
        IMAGE,
    ),
    "scale kept": (calls(lambda x: F.interpolate(x, scale_factor=(1.3, 2.6), mode="bilinear")), IMAGE),
    "scale recomputed": (
        calls(lambda x: F.interpolate(x, scale_factor=1.3, mode="bicubic", recompute_scale_factor=True)),
        IMAGE,
    ),
    "nearest by size of another": (calls(lambda x: x + F.interpolate(F.max_pool2d(x, 2), x.shape[-2:])), IMAGE),
    "adaptive pool to no divisor": (chain(conv(), lambda: nn.AdaptiveAvgPool2d((4, 3))), IMAGE),
    "adaptive pool of one axis": (chain(conv(), lambda: nn.AdaptiveAvgPool2d((None, 7))), IMAGE),
    "adaptive pool that repeats": (chain(conv(), lambda: nn.AdaptiveMaxPool2d((12, 9))), IMAGE),
    "ceil mode": (chain(conv(), lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True)), IMAGE),
    "average without padding": (chain(conv(), lambda: nn.AvgPool2d(3, 2, 1, True, count_include_pad=False)), IMAGE),
    "dilated max pool": (chain(conv(), lambda: nn.MaxPool2d(3, 1, 1, dilation=2)), IMAGE),
    "padding same, even kernel": (
        chain(lambda: nn.Conv2d(8, 8, (4, 2), padding="same", dilation=(1, 3)), norm()),
        IMAGE,
    ),
    "asymmetric padding": (calls(lambda x, c: c(F.pad(x, (0, 1, 2, 0))), conv(0, stride=2)), IMAGE),
    "padding that crops": (calls(lambda x: F.pad(x, (-1, 2, 0, -3), value=1.5)), IMAGE),
    "layer norm over two axes": (chain(lambda: nn.LayerNorm((9, 7))), IMAGE),
    "gelu, both": (calls(lambda x: (F.gelu(x * 4), F.gelu(x * 4, approximate="tanh"))), IMAGE),
    "instance norm with statistics": (
        chain(conv(), lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
        IMAGE,
    ),
    "negative axes": (calls(lambda x: x.permute(0, -1, -3, -2).flatten(-2).softmax(-2).unsqueeze(-3).mean(-1)), IMAGE),
    "integers": (
        calls(lambda x, e: e(x) * (x > 3).unsqueeze(-1), lambda: nn.Embedding(9, 4)),
        torch.tensor([[1, 8, 4]]),
    ),
    "truth values": (calls(lambda x: (~x).float() + x.sum(1, keepdim=True)), torch.tensor([[True, False, True]])),
}


def forms(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    net = torch2needle.convert(model, (x,))
    fused = operator_fusion.fuse(net)
    return {"plain": net, "fused": fused, "compiled": ndl.compile(fused, (x,))}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = randomize(make()).eval()
    x = torch.randn(shape) if isinstance(shape, tuple) else shape
    made = forms(model, x)
    with torch.no_grad(), ndl.no_grad():
        for given in (x, torch.cat([x, x.flip(1)])):
            for form in made.values():
                close(form(given.clone()), model(given.clone()))


@pytest.mark.parametrize("training", [True, False])
def test_modules_in_different_modes(training: bool) -> None:
    torch.manual_seed(0)
    model = randomize(Mixed(training))
    x = torch.randn(3, 8, 5, 4)
    net = torch2needle.convert(model, (x,))
    fused = operator_fusion.fuse(net)
    close(net(x), model(x))
    close(fused(x), model(x))
    if training:
        with pytest.raises(ValueError, match=r"\[compile\] .* in training mode"):
            ndl.compile(fused, (x,))


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "channels last": lambda: torch.randn(2, 8, 6, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 8, 6, 5).transpose(2, 3),
    "every second row": lambda: torch.randn(2, 8, 12, 5)[:, :, ::2],
    "expanded": lambda: torch.randn(1, 1, 6, 5).expand(2, 8, 6, 5),
    "offset": lambda: torch.randn(3, 8, 6, 5)[1:],
    "empty batch": lambda: torch.randn(0, 8, 6, 5),
}


@pytest.mark.parametrize("name", INPUTS)
def test_input(name: str) -> None:
    torch.manual_seed(0)
    model = randomize(
        nn.Sequential(conv()(), norm()(), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
    )
    x = INPUTS[name]()
    with torch.no_grad(), ndl.no_grad():
        for form in forms(model.eval(), x).values():
            close(form(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32_and_said_so(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).to(dtype)
    net = torch2needle.convert(model)
    x = torch.randn(3, 8)
    close(net(x), model.float()(x))
    assert any("computed in float32" in note for note in net.report.notes)


class Frozen(dict):
    def clear(self) -> None:
        raise TypeError("frozen")


class Cached(nn.Module):
    """A table that the forward computes once and keeps in a dictionary of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 6))
        self.cache: dict[str, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []
        self.config = Frozen(width=6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "rows" not in self.cache:
            self.cache["rows"] = self.table[torch.arange(3)]
            self.seen.append(x)
        return x + self.cache["rows"]


def test_conversion_leaves_no_trace_in_caches() -> None:
    model = Cached().eval()
    x = torch.randn(3, 6)
    net = torch2needle.convert(model, (x,))
    assert model.cache == {}
    assert model.seen == []
    close(net(x), model(x))


class Branches(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x * 2 if isinstance(x, torch.Tensor) else x * 3) + (1 if isinstance(x, tuple | list) else 0)


def test_branch_on_being_a_tensor() -> None:
    """A proxy that is no tensor would take the other branch in silence."""
    x = torch.randn(2, 3)
    close(torch2needle.convert(Branches())(x), x * 2)
