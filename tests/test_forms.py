"""What stands around tensors: classes of results and inputs, TorchScript, transforms, computed weights, half precision."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import needle as ndl
import operator_fusion
import torch2needle
from needle.nn.functional import GuardError

T = torch.Tensor
Pair = namedtuple("Pair", ["first", "second"])


class Checked(NamedTuple):
    a: T
    b: T | None = None


@dataclasses.dataclass
class Output:
    """Made in another order than its fields', with what is no field and one that its __init__ does not take."""

    second: T
    first: T
    absent: T | None = None
    parts: list[T] = dataclasses.field(default_factory=list)
    norm: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.norm = self.first.abs().sum(-1)
        self.beside = self.second + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: T
    options: tuple = ()


@dataclasses.dataclass
class Mapping(OrderedDict):
    """As transformers' outputs: attributes, and items where there is something."""

    last_hidden_state: T | None = None
    pooler_output: T | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Model(nn.Module):
    def __init__(self, step: Callable) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step

    def forward(self, x: T) -> Any:
        return self.step(self.linear(x), x)


def branching(step: Callable) -> Callable:
    """The same for torch.export: torch.fx ends at the branch."""
    return lambda y, x: step(-y if y.is_cuda else y, x)


RESULTS = {
    "named": lambda y, x: Pair(second=y, first=[x * 2, Checked(b=None, a=y)]),
    "dataclass": lambda y, x: {"out": Output(first=y, second=x * 2, parts=[y, (x, Frozen(y))])},
    "slots": lambda y, x: Frozen(x=y, options=("a", 1, None)),
    "mapping": lambda y, x: Mapping(last_hidden_state=y),
}


def same(got: Any, want: Any, loaded: bool = False) -> None:
    """Classes, fields and values; a file has the classes' names alone."""
    if isinstance(want, T):
        assert np.abs(np.asarray(got.numpy()) - want.detach().numpy()).max() < 1e-5
        return
    record = dataclasses.is_dataclass(want)
    assert type(got) is type(want) or (loaded and (record or hasattr(want, "_fields")))
    if record or hasattr(want, "_fields"):
        names = list(getattr(want, "_fields", ())) or [f.name for f in dataclasses.fields(want)]
        for name in [*names, *getattr(want, "__dict__", {})]:
            same(getattr(got, name), getattr(want, name), loaded)
    if isinstance(want, dict):
        assert list(got) == list(want)
        for k in want:
            same(got[k], want[k], loaded)
    elif isinstance(want, tuple | list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            same(a, b, loaded)
    elif not record:
        assert got == want


@pytest.mark.parametrize("exported", [False, True], ids=["fx", "export"])
@pytest.mark.parametrize("form", RESULTS)
def test_results_keep_their_classes(form: str, exported: bool, tmp_path: Path) -> None:
    """Eagerly, fused, compiled, and as far as a file knows them."""
    torch.manual_seed(0)
    model = Model(branching(RESULTS[form]) if exported else RESULTS[form]).eval()
    x, other = torch.randn(2, 4), torch.randn(3, 4)
    net = torch2needle.convert(model, (x,) if exported else None)
    assert net.report.capture.startswith("torch.export" if exported else "torch.fx")
    exe = torch2needle.compile(model, (x,))
    ndl.save(net, tmp_path / "net")
    for given in (x, other):
        want = model(given)
        for f in (net, operator_fusion.fuse(net), exe):
            same(f(given), want)
        same(ndl.load(tmp_path / "net")(given), want, loaded=True)


@dataclasses.dataclass
class Batch:
    x: T
    extra: dict
    name: str = "b"


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, scale: T, batch: Any, mode: str = "plus", pair: Any = None) -> T:
        x = self.linear(batch.x) * scale + batch.extra["values"]
        x = x + pair.second if pair is not None else x
        return x + batch.extra["items"][0] if mode == "plus" else x


def test_inputs_of_classes_and_by_name() -> None:
    """A dataclass with a dict whose keys are names of dict's methods; a dict as the example, in another order, with options."""
    torch.manual_seed(0)
    model = Takes().eval()

    def made(n: int) -> dict[str, Any]:
        batch = Batch(torch.randn(n, 4), {"values": torch.randn(n, 4), "items": [torch.randn(n, 4)]})
        return {
            "pair": Pair(torch.randn(n, 1), torch.randn(n, 4)),
            "mode": "plus",
            "batch": batch,
            "scale": torch.randn(()),
        }

    example = made(2)
    net = torch2needle.convert(model, example)
    exe = torch2needle.compile(model, example)
    for given in (made(2), made(3)):
        for f in (net, exe):
            same(f(**given), model(**given))
    with pytest.raises(ValueError, match="mode is fixed to 'plus'"):
        net(**{**made(2), "mode": "minus"})
    assert Batch not in torch.utils._pytree.SUPPORTED_NODES


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("limit", torch.tensor(3.0))

    def forward(self, x: T, times: int = 2, mask: T | None = None) -> tuple[T, dict[str, T]]:
        kept: list[T] = []
        for i in range(times):
            x = self.drop(torch.relu(self.a(x))) if i % 2 == 0 else self.b(x) - 1
            kept.append(x.view(x.size(0), -1))
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        if x.sum() > self.limit:
            x = x / 2
        return x, {"all": torch.cat(kept, dim=1), "last": kept[-1][:, 1:3]}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = torch.jit.script(Scripted()), nn.Linear(4, 2)

    def forward(self, x: T) -> T:
        return self.out(self.inner(x)[0])


def test_torchscript() -> None:
    """Loops, branches on None and on values, dicts; scripts inside of Python; what they are is put back."""
    torch.manual_seed(0)
    for model in (torch.jit.script(Scripted()).eval(), Around().eval()):
        x = torch.randn(3, 4)
        inner = getattr(model, "inner", None)
        net = torch2needle.convert(model, (x,))
        exe = torch2needle.compile(model, (x,))
        assert list(net.state_dict()) == list(model.state_dict())
        assert getattr(model, "inner", None) is inner
        for given in (x, torch.randn(5, 4) / 9):
            same(net(given), model(given))
            same(exe(given), model(given))
        with pytest.raises(GuardError, match=r"if x\.sum"):
            net(x * 1000)
        with pytest.raises(torch2needle.Unsupported, match="expects example= for TorchScript"):
            torch2needle.convert(model)


def test_copies_of_torchscript() -> None:
    """They hold their parameters as plain tensors."""
    x, model = torch.randn(3, 4), copy.deepcopy(Around().eval())
    net = torch2needle.convert(model, (x,))
    same(net(x), model(x))
    assert list(net.state_dict()) == list(model.state_dict())


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: T) -> T:
        self.count += 1
        return x * self.count


def test_scripts_that_keep_something_are_refused() -> None:
    model = torch.jit.script(Counts())
    with pytest.raises(torch2needle.Unsupported, match="sets no attributes"):
        torch2needle.convert(model, (torch.ones(2),))
    assert model.count == 0


def test_traced_modules_train() -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(20, 2))
    model = torch.jit.trace(made, torch.randn(2, 3, 5))
    net, x = torch2needle.convert(model, (torch.randn(2, 3, 5),)), torch.randn(4, 3, 5)
    model(x).pow(2).sum().backward()
    y = net(x)
    ndl.ops.summation(y * y).backward()
    for ours, theirs in zip(net.parameters(), model.parameters(), strict=True):
        assert np.allclose(ours.grad.numpy(), theirs.grad.numpy(), atol=1e-4)


class Mapped(nn.Module):
    """vmap over axis 1 of one and none of the other, an axis out, a transform that was made before, a gradient inside."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 4)), norm
        self.each = torch.vmap(lambda a, b: (a @ b).softmax(-1), in_dims=(0, None))

    def forward(self, x: T, keys: T) -> tuple[T, T, T]:
        def score(row: T, k: T) -> T:
            return torch.tanh(self.norm(row) @ self.weight @ k.t()) + row.sum()

        y = torch.vmap(score, in_dims=(1, None), out_dims=1, chunk_size=2)(x, keys)
        slope = torch.vmap(torch.func.grad(lambda r: (torch.sigmoid(r) * self.weight[0]).pow(2).sum()))(x[:, 0])
        return y, self.each(x, keys.t()), slope


@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(4)], ids=["free", "fixed by torch's rule of layer norms"])
def test_vmap(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model = Mapped(norm).eval()
    x, keys = torch.randn(3, 5, 4), torch.randn(2, 4)
    net = torch2needle.convert(model, (x, keys))
    for given in (x, torch.randn(2 if isinstance(norm, nn.Identity) else 3, 5, 4)):
        same(net(given, keys), model(given, keys))
        same(torch2needle.compile(model, (given, keys))(given, keys), model(given, keys))
    sum((t * t).sum() for t in model(x, keys)).backward()
    total: Any = 0
    for t in net(x, keys):
        total = total + ndl.ops.summation(t * t)
    total.backward()
    for ours, theirs in zip(net.parameters(), model.parameters(), strict=True):
        assert np.allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-4, atol=1e-4)
    assert torch.vmap(lambda a: a * 2)(x).equal(x * 2)


class Positive(nn.Module):
    def forward(self, w: T) -> T:
        return w.exp()


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4))
        self.c = parametrizations.spectral_norm(nn.Linear(4, 4))
        parametrize.register_parametrization(self.a, "weight", Positive(), unsafe=True)

    def forward(self, x: T) -> T:
        return self.c(torch.tanh(self.b(self.a(x) / 4)))


def test_parametrized_weights_follow_training() -> None:
    """They are computed again from what the optimiser changed, eagerly and compiled."""
    torch.manual_seed(0)
    model = Computed().eval()
    x = torch.randn(3, 4)
    net = torch2needle.convert(model, (x,))
    exe = ndl.compile(net, (x,))
    theirs, ours = torch.optim.SGD(model.parameters(), 0.05), ndl.optim.SGD(net.parameters(), 0.05)
    for _ in range(3):
        theirs.zero_grad()
        model(x).pow(2).sum().backward()
        theirs.step()
        ours.reset_grad()
        y = net(x)
        ndl.ops.summation(y * y).backward()
        ours.step()
        same(net(x), model(x))
        same(exe(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Linear(3, 2)).to(dtype).eval()
    exact = copy.deepcopy(model).double()
    x = torch.randn(2, 4, 5).to(dtype)
    net = torch2needle.convert(model, (x,))
    assert any("computed in float32" in n for n in net.report.notes if n.startswith("input "))
    want = exact(x.double())
    for y in (net(x), torch2needle.compile(model, (x,))(x)):
        assert str(y.dtype).endswith("float32")
        assert np.abs(np.asarray(y.numpy()) - want.detach().numpy()).max() < 1e-5
