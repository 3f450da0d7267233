"""The structure of models: inputs, outputs, shared modules and weights, containers, writes, modes."""

# ruff: noqa: PLC3002 (its tables of models are one-line lambdas)
from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import fx, nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, converts, leaves  # noqa: E402
from gpu_devices import everywhere  # noqa: E402
from torch2needle.models import randomize  # noqa: E402

MATRIX, IMAGE = (3, 8), (2, 4, 6, 5)


class Base(nn.Module):
    """A model with a linear layer, a parameter, a buffer and a constant to build forwards on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("offset", torch.randn(8))
        self.register_buffer("hidden", torch.randn(8), persistent=False)
        self.constant = torch.linspace(0, 1, 8)
        self.size = 8


def model(forward: Any, base: type[nn.Module] = Base) -> nn.Module:
    """An instance of a class with that forward, as users write one."""
    return type("Model", (base,), {"forward": forward})()


class Pair(NamedTuple):
    first: Any
    second: Any


def same_structure(ours: Any, theirs: Any) -> None:
    """Nested results have the same containers, keys and plain values."""
    if isinstance(theirs, torch.Tensor):
        close(ours, theirs)
        return
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(theirs, tuple | list):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same_structure(a, b)
    else:
        assert ours == theirs


# -- outputs -------------------------------------------------------------------------------------------------------------


def twice(self: Any, x: Any) -> Any:
    y = self.fc(x)
    return y, y


def nested(self: Any, x: Any) -> Any:
    return {"a": [x + 1, (self.fc(x), None)], "b": {"c": x.sum()}, "n": 3, "text": "t"}


def writes_list(self: Any, x: Any) -> Any:
    found: list[Any] = []
    for i in range(3):
        found.append(x * i)
    found[1] = found[1] + 1
    found.insert(0, x)
    del found[2]
    return torch.cat(found, 1), found


OUTPUTS: dict[str, Any] = {
    "dict": lambda self, x: {"y": self.fc(x), "x": x},
    "tuple": lambda self, x: (self.fc(x), x * 2),
    "list": lambda self, x: [self.fc(x), x * 2],
    "named tuple": lambda self, x: Pair(self.fc(x), x * 2),
    "nested": nested,
    "output is input": lambda self, x: x,
    "input among outputs": lambda self, x: (x, self.fc(x), x),
    "output twice": twice,
    "parameter": lambda self, x: (self.scale, x * self.scale),
    "buffer": lambda self, x: (self.offset, x + self.hidden),
    "parameter alone": lambda self, x: self.fc.weight,
    "constant alone": lambda self, x: self.constant,
    "none": lambda self, x: (None, x * 2, None),
    "number": lambda self, x: (self.size, x * 2),
    "views of one": lambda self, x: (lambda y: (y[:, :2], y.t(), y))(self.fc(x)),
    "lists that change": writes_list,
    "unused work": lambda self, x: (self.fc(x), x * 3)[1],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str) -> None:
    net = model(OUTPUTS[name])
    needs = not name.endswith("alone") or name.startswith("parameter")
    ours = converts(net, MATRIX, gradient=needs and name not in ("output is input",))
    x = torch.randn(MATRIX)
    same_structure(ours(x), net(x))
    exe = ndl.compile(ours.eval(), (x,))
    want = net.eval()(x)
    assert len(leaves(exe(x))) == len(leaves(want))


def test_a_size_is_an_output() -> None:
    net = model(lambda self, x: (x * 2, x.size(0), x.shape[1] * 2))
    ours = torch2needle.convert(net)
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        same_structure(ours(x), net(x))
    exe = ndl.compile(ours, (torch.randn(3, 8),))
    y, *sizes = exe(torch.randn(3, 8))
    assert sizes == [3, 16] and tuple(y.shape) == (3, 8)


# -- inputs --------------------------------------------------------------------------------------------------------------


def several(self: Any, x: Any, y: Any, scale: float = 2.0, mask: Any = None) -> Any:
    out = self.fc(x) + y * scale
    return out if mask is None else out * mask


def test_inputs_by_position_and_keyword() -> None:
    net = randomize(model(several))
    x, y, mask = (torch.randn(MATRIX) for _ in range(3))
    ours = torch2needle.convert(net)
    assert ours.input_names == ["x", "y"]
    close(ours(x, y), net(x, y))
    close(ours(y=y, x=x), net(x, y))
    close(ours(x, y=y), net(x, y))
    masked = torch2needle.convert(net, {"x": x, "y": y, "mask": mask})
    assert masked.input_names == ["x", "y", "mask"]
    close(masked(x, y, mask), net(x, y, mask=mask))
    close(ndl.compile(masked, (x, y, mask))(x, y, mask), net(x, y, mask=mask))
    doubled = torch2needle.convert(net, {"x": x, "y": y, "scale": 4.0})
    close(doubled(x, y), net(x, y, 4.0))
    with pytest.raises(TypeError, match="input y is missing"):
        ours(x)
    with pytest.raises(TypeError, match="got z"):
        ours(x, z=y)


def test_unused_inputs_stay() -> None:
    net = model(lambda self, x, y, z: self.fc(z))
    ours = torch2needle.convert(net)
    x = torch.randn(MATRIX)
    assert ours.input_names == ["x", "y", "z"]
    close(ours(x, x, x), net(x, x, x))
    close(ndl.compile(ours, (x, x, x))(x, x, x), net(x, x, x))


def test_one_tensor_as_two_inputs() -> None:
    net = model(lambda self, x, y: (x.add_(0) * 2) + y)
    ours = torch2needle.convert(net)
    x = torch.randn(MATRIX)
    close(ours(x, x), net(x.clone(), x.clone()))


def test_star_arguments() -> None:
    def unused(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fc(x)

    def used(self: Any, x: Any, **kwargs: Any) -> Any:
        return self.fc(x) + kwargs["y"]

    net = model(unused)
    x = torch.randn(MATRIX)
    close(torch2needle.convert(net)(x), net(x))
    with pytest.raises(torch2needle.Unsupported, match=r"named inputs, got \*\*kwargs"):
        torch2needle.convert(model(used))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_inputs_as_given(count: int) -> None:
    def total(self: Any, first: Any, *others: Any) -> Any:
        for x in others:
            first = first * 2 + x.softmax(-1)
        return self.fc(first)

    net, inputs = model(total), [torch.randn(MATRIX) for _ in range(count)]
    ours = torch2needle.convert(net, inputs)
    wider = [torch.randn(MATRIX[0] + 3, *MATRIX[1:]) for _ in range(count)]
    for given in (inputs, wider):
        close(ours(*given), net(*given))
    assert torch2needle.verify(net, ours, tuple(wider)).ok


def test_attributes_keep_their_shape() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.randn(8, 4)

        def forward(self, x: Any) -> Any:
            return x + self.table.t_().sum()

    net = Turned()
    table, before = net.table, net.table.clone()
    torch2needle.check(net, (torch.randn(MATRIX),))
    torch2needle.check(net)
    assert net.table is table and torch.equal(table, before)


# -- sharing -------------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        self.blocks = nn.ModuleList([self.a, nn.Sequential(self.a, nn.ReLU())])

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x)) + self.blocks[1](x)


class Tied(nn.Module):
    """The output layer is the table of the input layer; two branches share one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 8))
        self.one, self.two, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.two.bias = self.one.bias
        self.out.weight = self.table

    def forward(self, x: Any) -> Any:
        h = x @ self.table
        return self.out(F.relu(self.one(h)) + self.two(h)) + F.linear(h, self.table)


class TiedNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, k, padding=k // 2, bias=False) for k in (3, 1))
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.bn2.bias = self.bn1.bias

    def forward(self, x: Any) -> Any:
        return F.relu(self.bn1(self.conv1(x))) + self.bn2(self.conv2(x))


SHARING: dict[str, tuple[Any, tuple, int]] = {
    "one module under two names": (Shared, MATRIX, 2),
    "a table and two biases": (Tied, (3, 11), 4),
    "two norms with one bias": (TiedNorms, IMAGE, 5),
}


@pytest.mark.parametrize("name", SHARING)
def test_sharing(name: str) -> None:
    make, shape, parameters = SHARING[name]
    torch_model = make()
    net = converts(torch_model, shape)
    assert len(net.parameters()) == len(list(torch_model.parameters())) == parameters
    fused = operator_fusion.fuse(net.eval())
    x = torch.randn(shape)
    close(fused(x), torch_model.eval()(x))
    close(ndl.compile(fused, (x,))(x), torch_model(x))
    assert len(copy.deepcopy(net).parameters()) == parameters


class SharedConv(nn.Module):
    """A convolution that a batch norm reads, and another path, too (pytorch#197539: fx folds it into both)."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.conv, self.bn, self.calls = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), calls

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        other = self.conv(x * 0.5) if self.calls == 2 else y
        return F.relu(self.bn(y)) + other


class SameNames(nn.Module):
    """Two branches whose parameters have the same last names (pytorch#166797: fx gives both one bias)."""

    def __init__(self) -> None:
        super().__init__()
        branch = lambda: nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6))  # noqa: E731
        self.left, self.right = branch(), branch()

    def forward(self, x: Any) -> Any:
        return F.relu(self.left(x) + self.right(x))


FUSED: dict[str, Any] = {
    "conv read by a norm and a sum": lambda: SharedConv(1),
    "conv called twice": lambda: SharedConv(2),
    "two branches with the same names": SameNames,
}


@pytest.mark.parametrize("name", FUSED)
def test_fusion_of_shared_layers_is_exact(name: str) -> None:
    torch_model = FUSED[name]()
    net = converts(torch_model, IMAGE)
    fused = operator_fusion.fuse(net.eval())
    x = torch.randn(IMAGE)
    want = torch_model.eval()(x)
    close(fused(x), want)
    close(ndl.compile(fused, (x,))(x), want)
    fused.train(), torch_model.train()
    close(fused(x), torch_model(x))


# -- containers ----------------------------------------------------------------------------------------------------------


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.dict = nn.ModuleDict({"relu": nn.ReLU(), "fc": nn.Linear(8, 8)})
        self.seq = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), act=nn.Tanh(), last=nn.Linear(8, 8)))
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(8))})

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.list[:2]):
            x = layer(x) * self.scales[i]
        x = self.list[-1](x) + self.named["shift"]
        for key in self.dict:
            x = self.dict[key](x)
        for p in self.scales:
            x = x + p
        return self.seq[1:](self.seq.first(x)) + self.seq(x)


class Functional(Base):
    """A submodule with parameters of its own that are used in functions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model(lambda self, x: F.linear(x, self.fc.weight * 2, self.scale) + self.hidden * self.constant)
        self.norm = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))

    def forward(self, x: Any) -> Any:
        y = self.norm(torch.tanh(self.inner(x))) * self.offset
        return (y - self.inner.offset) / (self.constant + 1) + len(self.norm)


class Length(nn.Module):
    def forward(self, x: Any) -> Any:
        return x / len(x) + len((1, 2))


@everywhere
def test_containers() -> None:
    converts(Containers(), MATRIX)


@everywhere
def test_functions_of_parameters_and_buffers() -> None:
    converts(Functional(), MATRIX)


@everywhere
def test_len_of_a_tensor() -> None:
    converts(Length(), MATRIX)


def test_parameters_alone_stay_parameters_when_compiled() -> None:
    torch_model = randomize(Functional())
    net = torch2needle.convert(torch_model.eval())
    x = torch.randn(MATRIX)
    exe = ndl.compile(net, (x,))
    close(exe(x), torch_model(x))
    torch_model.inner.fc.weight.data.mul_(3)
    net.load_state_dict(torch_model.state_dict())
    close(net(x), torch_model(x))
    close(exe(x), torch_model(x))


# -- graphs of other tracers ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(8, 8), nn.ReLU()])
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Any) -> Any:
        for layer in self.list:
            x = layer(x) * self.scale
        return x


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, Block | nn.Sequential) or super().is_leaf_module(m, name)


@everywhere
def test_graph_modules_with_calls_of_unknown_containers() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.tail = Block(), nn.Sequential(nn.Linear(8, 4), nn.ReLU(True))

        def forward(self, x: Any) -> Any:
            return self.tail(self.parts(x) + x)

    outer = randomize(Outer())
    for traced in (fx.symbolic_trace(outer), fx.GraphModule(outer, Leaves().trace(outer))):
        converts(traced, MATRIX)
