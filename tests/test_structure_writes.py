"""Forwards that write in place, branch on the mode or checkpoint, on the models of test_structure.py."""

# ruff: noqa: PLC3002 (its tables of models are one-line lambdas)
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, converts, leaves  # noqa: E402
from gpu_devices import everywhere  # noqa: E402
from test_structure import MATRIX, model, writes_list  # noqa: E402
from torch2needle.capture.cells import Cell, with_item  # noqa: E402
from torch2needle.models import randomize  # noqa: E402

# -- writes --------------------------------------------------------------------------------------------------------------


def input_write(self: Any, x: Any) -> Any:
    x += self.scale
    x[:, 0] = 1.0
    return self.fc(x) * x


WRITING: dict[str, Any] = {
    "input": input_write,
    "del": lambda self, x: (lambda d: (d.pop("a"), d)[1]["b"])({"a": x, "b": self.fc(x)}),
    "relu_ before a skip": lambda self, x: (lambda y: F.relu_(y) + y)(self.fc(x)),
    "input by keyword": lambda self, x: (lambda y: (F.relu(input=y, inplace=True), y * 2)[1])(self.fc(x)),
    "permuted by keyword": lambda self, x: (lambda y: (y.permute(dims=(1, 0))[0].mul_(3), y * 2)[1])(self.fc(x)),
    "swap": lambda self, x: (lambda y: (y[:, :4].copy_(y[:, 4:].clone()), y)[1])(self.fc(x)),
    "bool assignment": lambda self, x: (lambda m: (m.__ior__(x < -1), x * m)[1])(x > 1),
}


@everywhere
@pytest.mark.parametrize("name", WRITING)
def test_writes(name: str) -> None:
    converts(model(WRITING[name]), MATRIX, gradient=name != "input")


@everywhere
def test_writes_through_chains_of_views() -> None:
    def chain(self: Any, x: Any) -> Any:
        y = self.fc(x)
        halves = y.view(-1, 2, 4)
        first = halves[:, 0]
        first.mul_(2).add_(1)
        halves[:, 1].neg_()
        y += x
        y[:, 3] = first[:, 0] * 2
        return y, halves * 1, first + 0

    converts(model(chain), MATRIX)


def test_views_are_computed_again_where_they_are_read() -> None:
    """A loop that fills a tensor row by row makes a view for each write and each read: none follows the writes of all others."""
    calls = []

    def row(i: int, base: Cell) -> Cell:
        def view(rows: tuple) -> Any:
            calls.append(i)
            return rows[i]

        return Cell(base.value[i], base, view, lambda rows, value: with_item(rows, i, value))

    table = Cell(tuple((0, 0) for _ in range(50)))
    rows = [row(i, table) for i in range(50)]
    firsts = [row(0, r) for r in rows]
    for i, r in enumerate(rows):
        r.write((r.read()[0] + i, 1), "a loop")
        firsts[i].write(firsts[i].read() + 1, "a loop")
    assert table.read() == tuple((i + 1, 1) for i in range(50))
    assert [r.read() for r in rows] == list(table.read()) and [f.read() for f in firsts] == list(range(1, 51))
    assert len(calls) <= 300
    table.write(((7, 8),) * 50, "a write of all")
    assert firsts[3].read() == 7 and rows[3].read() == (7, 8)


@pytest.mark.parametrize("part", [Ellipsis, 0])
def test_writes_to_buffers_last(part: Any) -> None:
    theirs = model(lambda self, x: (self.offset[part].add_(1), x + self.offset)[1])
    ours = torch2needle.convert(theirs)
    for _ in range(2):
        x = torch.randn(MATRIX)
        close(ours(x), theirs(x))
        close(ours.state_dict()["offset"], theirs.offset)


def test_writes_to_parameters_of_called_layers_are_refused() -> None:
    for write in (
        lambda self, x: (self.fc.bias.add_(1), self.fc(x))[1],
        lambda self, x: (self.fc.bias[0].add_(1), self.fc(x))[1],
    ):
        with pytest.raises(torch2needle.ConversionError, match="which the layer fc may share"):
            torch2needle.convert(model(write))


class Unready(torch.nn.Module):
    """Scales its weights in its first call, as RWKV does after a change of the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.ready = torch.nn.Parameter(torch.randn(4, 3)), False

    def forward(self, x: Any) -> Any:
        if not self.ready:
            with torch.no_grad():
                self.weight[1:].mul_(0.5)
            self.ready = True
        return F.linear(x, self.weight)


def test_weights_that_the_first_call_changes() -> None:
    layer, x = Unready().eval(), torch.randn(2, 3)
    kept = layer.weight.detach().clone()
    with pytest.raises(
        torch2needle.ConversionError, match=r"it writes weight in place at .*call the model once before"
    ):
        torch2needle.convert(layer, (x,))
    assert torch.equal(layer.weight, kept) and not layer.ready
    layer(x)
    close(torch2needle.convert(layer, (x,))(x), layer(x))


def constant_twice(self: Any, x: Any) -> Any:
    t = torch.zeros(8)
    t.add_(x[0])
    return t * 2, t + x


def written_constant(self: Any, x: Any) -> Any:
    t = torch.ones(8)
    y = x + t
    t[0] = 5
    return y + t


def view_of_a_constant(self: Any, x: Any) -> Any:
    t = torch.zeros(8)
    t[:4].add_(x[0, :4])
    return t + x


@pytest.mark.parametrize("forward", [constant_twice, written_constant, view_of_a_constant])
def test_tensors_that_the_forward_makes(forward: Any) -> None:
    """torch.fx does not see what Python does with them."""
    x = torch.randn(MATRIX)
    with pytest.raises(torch2needle.ConversionError, match=r"of its own after|made by itself"):
        torch2needle.convert(model(forward))
    close(torch2needle.convert(model(forward), (x,))(x), model(forward)(x))


class Norms(torch.nn.Module):
    """Buffers that share memory, and those of a layer."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.bn, self.write = torch.nn.BatchNorm1d(8), write
        self.register_buffer("whole", torch.zeros(8))
        self.register_buffer("part", self.whole[:1])
        self.register_buffer("own", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        self.write(self)
        return self.bn(x) + self.whole + self.part + self.own


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda self: self.whole.add_(1), "which part may share"),
        (lambda self: self.bn.running_mean.mul_(0.5), "which the layer bn may share"),
        (lambda self: self.own.unsqueeze_(0), "another shape, which belongs to the model"),
        (lambda self: self.own[1:].add_(1), ""),
    ],
    ids=["part", "layer", "shape", "own"],
)
def test_writes_to_buffers_that_others_read(write: Any, reason: str) -> None:
    theirs, x = Norms(write).eval(), torch.randn(MATRIX)
    if reason:
        with pytest.raises(torch2needle.ConversionError, match=reason):
            torch2needle.convert(theirs)
        return
    ours = torch2needle.convert(theirs)
    for _ in range(2):
        close(ours(x), theirs(x))


class Inner(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        x[:, 0] = 3.0
        return x[:, 1:], x.mul_(2)


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Any) -> Any:
        y = x * 1
        part, whole = self.inner(y)
        part.add_(1)
        return y, part, whole + 1


def test_attributes_are_read_where_they_stand() -> None:
    def turned(self: Any, x: Any) -> Any:
        shape, before = x.shape, x.mT
        x[x > 1] = -2.0
        x.t_()
        return before.contiguous(), x, x.reshape(shape[0] * shape[1])

    def unread(self: Any, x: Any) -> Any:
        x.ndim, x.data, x.mH  # noqa: B018 - the rank is not known
        return x.relu()

    x = torch.arange(6.0).reshape(2, 3)
    for forward in (turned, unread):
        net = torch2needle.convert(model(forward))
        for got, want in zip(leaves(net(x.clone())), leaves(model(forward)(x.clone())), strict=True):
            np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_programs_that_write_their_constants_are_refused() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(2)  # an attribute, no buffer: each call of the program leaves another one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls + torch.tensor([1.0, 2.0]).add_(1)

    program = torch.export.export(Counts(), (torch.rand(2),))
    with pytest.raises(torch2needle.ConversionError, match="calls in place, which belongs to the model"):
        torch2needle.convert(program)


def test_programs_that_swap_data_are_refused() -> None:
    """Of the swap a program holds a question without a reader alone."""

    class Swap(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.arange(9.0).view(3, 3))
            self.register_buffer("row", torch.ones(1, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.row.data = self.whole
            return self.whole + x

    program = torch.export.export(Swap().eval(), (torch.zeros(3, 3),), strict=False)
    with pytest.raises(
        torch2needle.ConversionError, match=r"it gives a tensor other memory .*by copy_ under torch\.no_grad"
    ):
        torch2needle.convert(program)


def test_writes_in_submodules_of_other_tracers() -> None:
    class Leaf(torch.fx.Tracer):
        def is_leaf_module(self, m: Any, name: str) -> bool:
            return True

    outer, x = Outer(), torch.randn(MATRIX)
    traced = torch.fx.GraphModule(outer, Leaf().trace(outer))
    close(torch2needle.convert(traced)(x), outer(x))


# -- modes ---------------------------------------------------------------------------------------------------------------


def test_branches_on_the_mode_are_noted() -> None:
    def branch(self: Any, x: Any) -> Any:
        return self.fc(x) * 2 if self.training else self.fc(x)

    net = model(branch).eval()
    ours = torch2needle.convert(net)
    assert any("differs between training and evaluation" in n for n in ours.report.notes)
    x = torch.randn(MATRIX)
    close(ours(x), net(x))


class Cached(torch.nn.Module):
    """Keeps in evaluation what it makes of a parameter, as the attentions of LeViT do with their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bias = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.randn(8))
        self.train()

    def train(self, mode: bool = True) -> Any:
        self.kept: dict[str, Any] = {}
        return super().train(mode)

    def forward(self, x: Any) -> Any:
        if x.shape[0] == 0:  # for torch.export
            raise ValueError("no rows")
        if self.training:
            return self.fc(x) + self.bias.exp()
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias.exp()
        return self.fc(x) + self.kept["bias"]


@pytest.mark.parametrize("kept", [False, True])
def test_what_evaluation_keeps_converts(kept: bool) -> None:
    net = Cached().eval()
    x = torch.randn(MATRIX)
    if kept:
        with torch.no_grad():
            net(x)
    ours = torch2needle.convert(net, x)
    close(ours(x), net(x))
    ours.train()(x).sum().backward()
    trained = ours.bias.grad is not None
    assert trained or any("differs between training and evaluation" in n for n in ours.report.notes)


def test_checkpoint_is_inlined() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        net = model(lambda self, x, r=reentrant: checkpoint(self.fc, x, use_reentrant=r) + x)
        ours = torch2needle.convert(net)
        x = torch.randn(MATRIX)
        close(ours(x), net(x))


def test_results_are_the_same_twice() -> None:
    net = torch2needle.convert(randomize(model(writes_list)))
    x = np.random.randn(*MATRIX).astype("float32")
    a, b = net(x), net(x)
    for p, q in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())


class Scaled(ndl.nn.Module):
    """A needle module that computes with its parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = ndl.nn.Parameter(np.ones(3, "float32"))

    def forward(self, x: Any) -> Any:
        return x + ndl.ops.exp(self.weight * 2) * ndl.ops.reshape(self.weight, (3,))


def test_what_is_made_of_parameters_follows_them_when_compiled() -> None:
    net, x = Scaled(), np.zeros((2, 3), "float32")
    exe = ndl.compile(net, (x,))
    net.weight.data = ndl.Tensor(np.full(3, 0.5, "float32"))
    np.testing.assert_allclose(exe(x)[0], net(ndl.Tensor(x)).numpy()[0], rtol=1e-6)


def test_an_input_that_gets_another_shape_in_place_is_refused_and_the_example_kept() -> None:
    def widened(self: Any, x: Any) -> Any:
        y = x.flatten()  # x itself, where that has one axis
        y.unsqueeze_(0)
        return y + 1

    x = torch.randn(8)
    with pytest.raises(torch2needle.ConversionError, match="another shape that may have a second name"):
        torch2needle.convert(model(widened), x)
    assert x.shape == (8,)
