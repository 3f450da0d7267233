"""Layers and containers of torch's names: what torch's give, from files and plans, too; lists and dicts of modules."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
import operator_fusion
from needle import nn
from needle.nn.module import Module

torch = pytest.importorskip("torch")

STREAM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return STREAM.normal(size=shape).astype("float32")


LINE, IMAGE, VOLUME = normal(2, 4, 9), normal(2, 4, 6, 5), normal(2, 4, 3, 4, 5)
SIZED = {1: LINE, 2: IMAGE, 3: VOLUME}
NUMBERS = np.array([0, 3, 3, 1, 4, 0])
OFFSETS = np.array([0, 2, 2, 5])

# name, arguments, arguments by name, inputs
LAYERS: list[tuple[str, tuple, dict, tuple]] = [
    *((f"{kind}Pad{n}d", (2,), {}, (SIZED[n],)) for n in (1, 2, 3) for kind in ("Zero", "Reflection", "Replication")),
    *((f"CircularPad{n}d", ((1, 2) * n,), {}, (SIZED[n],)) for n in (1, 2, 3)),
    *((f"ConstantPad{n}d", ((0, 3) * n, 1.5), {}, (SIZED[n],)) for n in (1, 2, 3)),
    ("ReflectionPad2d", ((0, 2, 1, 0),), {}, (IMAGE,)),
    ("ReplicationPad2d", ((-1, 2, 3, -2),), {}, (IMAGE,)),
    ("PixelShuffle", (2,), {}, (IMAGE,)),
    ("PixelUnshuffle", (2,), {}, (IMAGE[..., :4],)),
    ("ChannelShuffle", (2,), {}, (IMAGE,)),
    ("Unflatten", (1, (2, -1)), {}, (IMAGE,)),
    ("Unfold", ((3, 2),), {"padding": 1, "stride": 2, "dilation": (1, 2)}, (IMAGE,)),
    ("Fold", ((6, 5), 3), {"padding": 1}, (normal(2, 18, 30),)),
    ("UpsamplingNearest2d", (), {"scale_factor": 2}, (IMAGE,)),
    ("UpsamplingNearest2d", ((3, 9),), {}, (IMAGE,)),
    ("UpsamplingBilinear2d", (7,), {}, (IMAGE,)),
    ("Bilinear", (3, 5, 4), {}, (normal(2, 6, 3), normal(2, 6, 5))),
    ("Bilinear", (3, 1, 1), {"bias": False}, (normal(2, 3), normal(2, 1))),
    ("CosineSimilarity", (), {}, (normal(3, 4), normal(3, 4))),
    ("CosineSimilarity", (-1, 1e-2), {}, (normal(3, 4), 1e-3 * normal(1, 4))),
    ("PairwiseDistance", (), {}, (normal(3, 4), normal(3, 4))),
    ("PairwiseDistance", (1.0,), {}, (normal(3, 4), normal(3, 4))),
    ("Conv2d", (4, 6, 3), {}, (IMAGE,)),
    ("Conv2d", (4, 6, (3, 2), 2, 1, 1, 2, False), {}, (IMAGE,)),
    ("Conv2d", (4, 4, 3), {"padding": "same", "groups": 4, "padding_mode": "reflect"}, (IMAGE,)),
    *((f"InstanceNorm{n}d", (4,), {}, (SIZED[n],)) for n in (1, 2, 3)),
    *((f"InstanceNorm{n}d", (4, 1e-3, 0.3, True, True), {}, (SIZED[n],)) for n in (1, 2, 3)),
    ("InstanceNorm2d", (4,), {"affine": True}, (IMAGE[0],)),
    *(("EmbeddingBag", (5, 3), {"mode": mode}, (NUMBERS.reshape(2, 3),)) for mode in ("sum", "mean", "max")),
    ("EmbeddingBag", (5, 3), {"mode": "sum"}, (NUMBERS.reshape(2, 3)[:0],)),
    ("EmbeddingBag", (5, 3), {"mode": "sum", "padding_idx": 3}, (NUMBERS, OFFSETS)),
    ("EmbeddingBag", (5, 3), {"include_last_offset": True}, (NUMBERS, np.append(OFFSETS, 6))),
    ("EmbeddingBag", (5, 3), {"mode": "sum"}, (NUMBERS.reshape(2, 3), None, normal(2, 3))),
]


def both(name: str, args: tuple, options: dict) -> tuple[Any, Any]:
    """needle's layer and torch's with its weights."""
    theirs, ours = getattr(torch.nn, name)(*args, **options), getattr(nn, name)(*args, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tensor(x: Any) -> Any:
    return None if x is None else ndl.Tensor(x, dtype=str(x.dtype), requires_grad=x.dtype.kind == "f")


def torch_tensor(x: Any) -> Any:
    return None if x is None else torch.tensor(x, requires_grad=x.dtype.kind == "f")


@pytest.mark.parametrize(
    ("name", "args", "options", "given"), LAYERS, ids=[f"{i} {c[0]}" for i, c in enumerate(LAYERS)]
)
def test_values_gradients_and_statistics(name: str, args: tuple, options: dict, given: tuple) -> None:
    ours, theirs = both(name, args, options)
    mine, its = tuple(map(tensor, given)), tuple(map(torch_tensor, given))
    got, want = ours(*mine), theirs(*its)
    np.testing.assert_allclose(got.numpy(), want.detach(), rtol=2e-6, atol=2e-6)
    weights = np.cos(np.arange(want.numel(), dtype="float32")).reshape(want.shape)
    if want.requires_grad:
        (want * torch.tensor(weights)).sum().backward()
        (got * ndl.Tensor(weights)).sum().backward()
    for x, y in zip((*mine, *ours.parameters()), (*its, *theirs.parameters()), strict=True):
        if y is not None and y.grad is not None:
            np.testing.assert_allclose(x.grad.numpy(), y.grad, rtol=2e-5, atol=2e-5)
    for key, value in theirs.state_dict().items():
        np.testing.assert_allclose(ours.state_dict()[key].numpy(), value, rtol=1e-6, atol=1e-6)
    ours.eval(), theirs.eval()
    np.testing.assert_allclose(ours(*mine).numpy(), theirs(*its).detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "args", "options", "given"), LAYERS, ids=[f"{i} {c[0]}" for i, c in enumerate(LAYERS)]
)
def test_plans_and_files_give_the_same(name: str, args: tuple, options: dict, given: tuple, tmp_path: Path) -> None:
    layer = both(name, args, options)[0].eval()
    given = tuple(x for x in given if x is not None)

    class Calls(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *x: Any) -> Any:
            return (
                self.layer(*x)
                if len(x) < 2 or name != "EmbeddingBag" or x[1].ndim < 2
                else self.layer(x[0], None, x[1])
            )

    net = Calls().eval()
    want = net(*map(tensor, given)).numpy()
    np.testing.assert_allclose(ndl.compile(net, given)(*given), want, rtol=1e-6, atol=1e-6)
    if len(given) == 1:
        ndl.save(layer_net := ndl.graph.symbolic(nn.Sequential(layer)), tmp_path / "net.needle")
        assert list(layer_net.state_dict()) == [f"0.{k}" for k in layer.state_dict()]
        np.testing.assert_array_equal(ndl.load(tmp_path / "net.needle").eval()(tensor(given[0])).numpy(), want)


class Tower(Module):
    """Every container, a buffer of each kind, and a name that holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})
        self.scales = nn.ParameterList([ndl.Tensor(normal(4)) for _ in range(5)])
        self.shifts = nn.ParameterDict({"in": ndl.Tensor(normal(4))})
        self.last = nn.Sequential(OrderedDict(fc=nn.Linear(4, 4), act=nn.ReLU()))
        self.register_buffer("mean", ndl.Tensor(normal(4)), persistent=False)
        self.register_buffer("_spread", ndl.Tensor(np.ones(4, "float32")))
        self.register_parameter("none", None)

    def forward(self, x: Any) -> Any:
        x = (x - self.mean) / self._spread + self.shifts["in"]
        for layer, scale in zip(self.layers, self.scales, strict=False):
            x = layer(x) * scale + x
        return self.heads["a"](self.last(x)), self.heads["b"](x)


NAMES = [
    *(f"layers.{i}.{k}" for i in range(3) for k in ("weight", "bias")),
    *(f"heads.{h}.{k}" for h in "ab" for k in ("weight", "bias")),
    *(f"scales.{i}" for i in range(5)),
    *("shifts.in", "last.fc.weight", "last.fc.bias", "_spread"),
]
X = normal(2, 4)


def test_containers_have_the_names_that_torch_gives() -> None:
    net = Tower()
    assert sorted(net.state_dict()) == sorted(NAMES)
    assert [n for n, _ in net.named_buffers()] == ["mean", "_spread"]
    assert len(net.parameters()) == len(NAMES) - 1 and net.parameters(recurse=False) == []
    assert [n for n, _ in net.heads.named_parameters()] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert net.get_parameter("scales.1") is net.scales[1] and net.get_buffer("mean") is net.mean
    assert not net.mean.requires_grad and isinstance(net.scales[0], nn.Parameter)
    again = Tower()
    again.load_state_dict(net.state_dict())
    assert again.double().mean.dtype == "float64" and again.float().get_parameter("shifts.in").dtype == "float32"
    fused = operator_fusion.fuse(net)
    assert sorted(fused.state_dict()) == sorted(NAMES)
    assert {id(p) for p in fused.parameters()} == {id(p) for p in net.parameters()}


CHANGES: dict[str, Any] = {
    "replace": lambda net: net.layers.__setitem__(0, nn.Linear(4, 4)),
    "replace the last": lambda net: net.layers.__setitem__(-1, nn.Linear(4, 4)),
    "delete": lambda net: net.layers.__delitem__(1),
    "slice": lambda net: net.layers.__setitem__(slice(0, 2), [nn.Linear(4, 4)]),
    "insert": lambda net: net.layers.insert(1, nn.Linear(4, 4)),
    "append": lambda net: net.layers.append(nn.Linear(4, 4)).append(nn.Linear(4, 4)),
    "extend": lambda net: net.layers.extend([nn.Linear(4, 4), nn.Linear(4, 4)]),
    "add": lambda net: net.layers.__iadd__([nn.Linear(4, 4)]),
    "pop": lambda net: net.layers.pop(0),
    "head": lambda net: net.heads.update(a=nn.Linear(4, 2)),
    "other head": lambda net: net.heads.__setitem__("b", nn.Linear(4, 7)),
    "last": lambda net: net.last.__setitem__(1, nn.Tanh()),
    "last one": lambda net: net.last.__delitem__(1),
    "longer": lambda net: net.last.append(nn.Sigmoid()),
    "parameter": lambda net: net.scales.__setitem__(0, ndl.Tensor(normal(4))),
    "shift": lambda net: net.shifts.update({"in": ndl.Tensor(normal(4))}),
    "attribute": lambda net: setattr(net, "mean", ndl.Tensor(normal(4), requires_grad=False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_executables_see_what_changed_in_a_container(name: str) -> None:
    net = Tower()
    run = ndl.compile(net, X)
    before = run(X)
    CHANGES[name](net)
    want = [t.numpy() for t in net(ndl.Tensor(X))]
    assert any(a.shape != b.shape or not np.allclose(a, b) for a, b in zip(before, want, strict=True))
    for a, b in zip(run(X), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_lists_and_dicts_are_pythons() -> None:
    made = [nn.Linear(1, 1), nn.ReLU(), nn.Tanh()]
    items = nn.ModuleList(made)
    assert list(items) == made and len(items) == 3 and items[-1] is made[2] and made[1] in items
    assert isinstance(items[1:], nn.ModuleList) and list(items[1:]) == made[1:]
    assert items.index(made[1]) == 1 and list(reversed(items)) == made[::-1]
    assert items == items and items != nn.ModuleList(made) and len({items, items}) == 1
    table = nn.ModuleDict({"x": made[0]})
    table["y"] = made[1]
    assert list(table) == ["x", "y"] and list(table.values()) == made[:2] and "x" in table and table.get("z") is None
    assert table.pop("x") is made[0] and len(table) == 1
    named = nn.Sequential({"fc": made[0], "act": made[1]})
    assert named.modules == made[:2] and named[0] is made[0] and named.act is made[1]
    with pytest.raises(AttributeError, match=r"\[Sequential\] has no attribute norm\."):
        named.norm  # noqa: B018
    assert [n for n, _ in named[1:].named_children()] == ["act"]
    assert [n for n, _ in named.append(made[2]).named_children()] == ["fc", "act", "2"]
    assert not nn.ModuleList() and not nn.ModuleDict()


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda n: nn.ModuleList([3]), TypeError, r"\[ModuleList\] expects modules, got int\."),
    (lambda n: nn.Sequential([nn.ReLU()]), TypeError, r"\[Sequential\] expects modules, got list\."),
    (lambda n: nn.ParameterList([1.0]), TypeError, r"\[ParameterList\] expects tensors, got float\."),
    (lambda n: n.layers.append(n.scales[0]), TypeError, r"\[ModuleList\] expects modules, got needle's Parameter\."),
    (lambda n: nn.ModuleDict({"a.b": nn.ReLU()}), KeyError, r"\[ModuleDict\] expects names without dots, got 'a\.b'\."),
    (lambda n: nn.Sequential({"a.b": nn.ReLU()}), KeyError, r"\[Sequential\] expects names without dots, got 'a\.b'\."),
    (lambda n: n.register_buffer("forward", None), KeyError, r"\[Tower\] has another attribute named forward\."),
    (lambda n: n.register_buffer("training", None), KeyError, r"\[Tower\] has another attribute named training\."),
    (
        lambda n: n.register_buffer("a.b", None),
        KeyError,
        r"\[Tower\] expects names without dots for members, got 'a\.b'\.",
    ),
    (
        lambda n: n.register_buffer("q", n.scales[0]),
        TypeError,
        r"\[Tower\] q expects a tensor that is no parameter or None",
    ),
    (
        lambda n: n.register_parameter("q", n.mean),
        TypeError,
        r"\[Tower\] q expects a parameter or None, got needle's Tensor",
    ),
    (lambda n: n.add_module("q", n.mean), TypeError, r"\[Tower\] q expects a module or None, got needle's Tensor"),
    (lambda n: n.get_parameter("mean"), KeyError, r"\[module\] there is no parameter named mean\."),
    (lambda n: n.get_buffer("scales.0"), KeyError, r"\[module\] there is no buffer named scales\.0\."),
    (lambda n: nn.EmbeddingBag(3, 2)(tensor(NUMBERS)), ValueError, r"\[EmbeddingBag\] expects offsets beside indices"),
    (
        lambda n: operator_fusion.fuse(n)[0],
        TypeError,
        r"\[GraphModule\] expects modules named 0, 1, \.\.\. to be indexed",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(Tower())


def test_converted_models_are_indexed_where_torchs_are() -> None:
    """A head is replaced as in torch; nets from files list their children in another order."""
    torch2needle = pytest.importorskip("torch2needle")
    classifier = torch.nn.Sequential(
        torch.nn.Dropout(0.5), torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
    )
    model = torch.nn.Sequential(OrderedDict(features=torch.nn.Linear(4, 4), classifier=classifier)).eval()
    for net in (torch2needle.convert(model), torch2needle.convert(model, torch.zeros(2, 4))):
        assert len(net.classifier) == 4 and bool(net) and isinstance(net.classifier[2], nn.ReLU)
        assert [type(m).__name__ for m in net.classifier] == ["Dropout", "Linear", "ReLU", "Linear"]
        net.classifier[-1] = nn.Linear(4, 7)
        assert net(ndl.Tensor(X)).shape == (2, 7) and net.classifier[3].out_features == 7
        assert net.classifier[1:3](ndl.Tensor(X)).shape == (2, 4)


def test_loaded_models_are_indexed_in_order(tmp_path: Path) -> None:
    net = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    ndl.save(net, tmp_path / "net.needle")
    again = ndl.load(tmp_path / "net.needle")
    assert [type(m).__name__ for m in again] == ["ReLU", "Linear", "Tanh", "Linear"]
