"""Rules of shapes, indexing, joining and creation: every spelling against torch, without and with an example."""

# ruff: noqa: PLC3002 (its tables of models are one-line lambdas)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close  # noqa: E402
from gpu_devices import everywhere  # noqa: E402
from test_rules_arithmetic import One, agrees  # noqa: E402

IMAGE, MATRIX = (2, 4, 9, 7), (3, 8)
BOTH, KNOWN = (False, True), (True,)  # with and without an example; only with one


def diagonals_written(x: Any) -> Any:
    y = x * 2
    y.diagonal(1).fill_(0)
    y.diagonal(-2).mul_(3)
    torch.linalg.diagonal(y).add_(x[0])
    return y


def diagonals_of_other_axes_written(x: Any) -> Any:
    y = x * 2
    y.diagonal(-1, 2, x.ndim - 3).zero_()
    y.diagonal(0, 1, -1).add_(1)
    return y


VIEWS: list[tuple[Callable, tuple]] = [
    (lambda x: x.view(x.size(0), -1) + x.reshape(x.shape[0], -1) + torch.flatten(x, 1) + x.flatten(start_dim=1), IMAGE),
    (lambda x: x.view(x.size(0), 2, x.size(1) // 2, x.shape[2], x.shape[3]).permute(0, 2, 1, 3, 4).contiguous(), IMAGE),
    (lambda x: x.unflatten(1, (2, -1)) + torch.unflatten(x, -3, (-1, 2)), IMAGE),
    (lambda x: x.view(x.shape[0], -1).view_as(x) + x.reshape(-1).reshape_as(x), IMAGE),
    (
        lambda x: torch.permute(x, (0, 2, 3, 1)) + x.permute([0, 2, 3, 1]) + x.movedim(1, -1) + torch.moveaxis(x, 1, 3),
        IMAGE,
    ),
    (lambda x: torch.movedim(x, (1, 2), (-1, 1)), IMAGE),
    (lambda x: x.transpose(1, 2) + torch.transpose(x, -2, 1).swapaxes(0, 0) + torch.swapdims(x, 1, 2), IMAGE),
    (lambda x: x.T + x.t() + x.mT + torch.t(x), MATRIX),
    (lambda x: x.unsqueeze(1).squeeze(1) + x[:, :, None].squeeze(2) + x[..., None].squeeze(-1) + x.squeeze(), MATRIX),
    (lambda x: x.unsqueeze(1).expand(-1, 4, -1) + x[:, None].expand(x.size(0), 4, x.size(1)), MATRIX),
    (lambda x: x[:, :1].expand_as(x) + torch.broadcast_to(x[:1], x.shape) + x, MATRIX),
    (lambda x: x.repeat(2, 3) + torch.tile(x, (2, 3)) + x.tile((2, 3)) + x.repeat([2, 3]), MATRIX),
    (lambda x: x.repeat(2, 1, 1) + x.tile(2, 1, 1), MATRIX),
    (lambda x: torch.cat([torch.repeat_interleave(x, 2, 0).flatten(), x.repeat_interleave(3)]), MATRIX),
    (lambda x: x.repeat_interleave(2, dim=-1), MATRIX),
    (lambda x: torch.roll(x, 1, 1) + x.roll((2, -1), (0, 1)) + torch.roll(x, -3) + x.roll(shifts=11, dims=-1), MATRIX),
    (lambda x: x.flip(1) + torch.flip(x, [0, 1]) + x.flip((0,)) + x.flip(0, 1) + torch.fliplr(x) + x.flipud(), MATRIX),
    (
        lambda x: x.flip(dims=[0, 1]).permute(dims=(1, 0)).reshape(shape=(-1,)) + x.repeat(repeats=(1, 1)).view(-1),
        MATRIX,
    ),
    (lambda x: torch.bmm(x, mat2=x.mT) + torch.matmul(input=x, other=x.mT), (2, 3, 4)),
    (lambda x: torch.tril(x) + x.triu(1) + torch.tril(x, -1) + x.tril(diagonal=2), MATRIX),
    (lambda x: torch.diagonal(x) + x.diagonal(1)[:3] + torch.diagonal(x, 2), MATRIX),
    (lambda x: x.diagonal(-1, 1, 3) + torch.diagonal(x, 0, -1, 1)[..., :3], (2, 4, 5, 4)),
    (diagonals_written, (4, 4)),
    (diagonals_of_other_axes_written, (3, 4, 5)),
    (lambda x: x.clone() + x.contiguous() + x.detach() * x + x.data * 2, MATRIX),
    (lambda x: x.contiguous(memory_format=torch.channels_last) * x.size()[0] + x.ndim - x.dim(), IMAGE),
    (lambda x: x.sum() / x.numel() + x.mean() * torch.numel(x), MATRIX),
    (lambda x: x / math.sqrt(x.size(-1)) + x * x.shape[1] ** -0.5 + x / x.size(0), MATRIX),
    (lambda x: x.view(-1, math.prod(x.shape[1:])) if False else x.view(-1, x.shape[1] * x.shape[2]), (2, 3, 4)),
    (lambda x: F.interpolate(x, size=(math.floor(x.shape[2] * 1.5), math.ceil(x.shape[3] / 2))), IMAGE),
]
KNOWN_RANK = {"numel", "broadcast_to", "ndim", "dim"}  # what asks for the rank
PIECES: list[tuple[Callable, tuple, tuple]] = [
    (lambda x: torch.split(x, [1, 3], 1)[1] + x.split((1, 3), dim=1)[1] + torch.split(x, [1, 3], -3)[1], IMAGE, BOTH),
    (lambda x: (lambda a, b: a * b)(*[x.chunk(2, 1)[i] for i in (0, 1)]), IMAGE, BOTH),
    (lambda x: torch.cat(torch.chunk(x, 2, dim=-1), 0) + torch.cat(x.chunk(2, 1)), MATRIX, BOTH),
    (lambda x: torch.cat(x.chunk(3, 1)[::-1], 1), MATRIX, BOTH),
    (lambda x: torch.split(x, 3, 1)[2] + x.split(3, -1)[0][:, :2], MATRIX, BOTH),
    (lambda x: torch.cat(x.split(3, 1)[1:], 1), MATRIX, KNOWN),
    (lambda x: x.tensor_split(3, 1)[2] + torch.tensor_split(x, 3, -1)[0][:, 1:], MATRIX, BOTH),
    (lambda x: x.tensor_split((2, 5), 1)[1] + x.tensor_split([3], dim=1)[0], MATRIX, BOTH),
    (lambda x: x.unbind(1)[2] + torch.unbind(x, -1)[3], MATRIX, BOTH),
    (lambda x: torch.stack(x.unbind(1)[::2], 1), MATRIX, KNOWN),
    (lambda x: torch.cat([x.new_zeros(0), x, torch.zeros(0)], 1), MATRIX, KNOWN),
    (lambda x: x.split(x.size(1) // 2, 1)[1], MATRIX, BOTH),
    (
        lambda x: x.select(1, 2) + torch.select(x, -1, -1) + x.narrow(1, 2, 1)[:, 0] + torch.narrow(x, -1, 0, 1)[:, 0],
        MATRIX,
        BOTH,
    ),
]
JOINS: list[tuple[Callable, tuple, tuple]] = [
    (lambda x: torch.cat([x, x], 1) + torch.cat((x, x), dim=1) + torch.concat([x, x], -1), MATRIX, BOTH),
    (lambda x: torch.stack([x, x * 2], 1) + torch.stack((x, x), dim=-2), MATRIX, BOTH),
    (lambda x: torch.hstack([x, x]) + torch.vstack([x, x])[: x.shape[0]].repeat(1, 2), MATRIX, KNOWN),
    (lambda x: torch.hstack([x[0], x[1]]) + torch.vstack([x[0], x[1]]).flatten(), MATRIX, KNOWN),
]
INDICES: list[tuple[Callable, tuple, tuple]] = [
    (lambda x: x[:, 1:3, ::2, -1] + x[:, 0:1, ::2, 0] + x[..., 0][:, :2, ::2], IMAGE, BOTH),
    (lambda x: x[:, x.size(1) // 2 :] + x[:, : x.size(1) // 2] + x[:, -4:], MATRIX, BOTH),
    (lambda x: x[:, [0, 2, -1]] + x[:, torch.tensor([1, 1, 0])] + x[..., torch.tensor([3, 2, 1])], MATRIX, BOTH),
    (lambda x: x[:, torch.tensor([[0, 2], [1, 3]])] + x[:, :, None][:, [[0, 1], [1, 0]], 0], MATRIX, BOTH),
    (lambda x: x[:, :, [0, 2], [1, 3]] + x[..., [0, 2], [1, 3]] + x[:, [1, 2], 0, :2].sum(1)[:, None], IMAGE, BOTH),
    (lambda x: x[:, [0, 2], :, [1, 3]] + x[:, [1, 0], :, 1:3].sum((1, 3)), IMAGE, BOTH),
    (
        lambda x: x[:, [0, 2], 0, [1, 3]] + x[:, [1, 3], 2, 4:5][..., 0] + x[:, None, [0, 2], 0, [1, 3]][:, 0],
        IMAGE,
        BOTH,
    ),
    (lambda x: x[:, torch.tensor([True, False, True, True])] + x[:, 1:], IMAGE, BOTH),
    (lambda x: x[0, :, [1, 2]] + x[1, :, 1:3], IMAGE, BOTH),
    (lambda x: torch.index_select(x, 1, torch.tensor([2, 0])) + x.index_select(-1, torch.tensor([1, 1])), MATRIX, BOTH),
    (
        lambda x: x.gather(1, x.argsort(1)) + torch.gather(x, 1, torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]] * 2))[:1],
        MATRIX,
        BOTH,
    ),
    (lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1) + x.take_along_dim(x.argsort(0), 0), MATRIX, BOTH),
    (lambda x: torch.take(x, torch.tensor([0, 5, 7])) + x.take(torch.tensor([1, 2, 3])), MATRIX, BOTH),
]
CREATIONS: list[tuple[Callable, tuple, tuple]] = [
    (lambda x: torch.zeros_like(x) + torch.ones_like(x) * torch.full_like(x, 2.5) + x, MATRIX, BOTH),
    (
        lambda x: (
            x + torch.full_like(x.sum(1).long(), 0.5, dtype=x.dtype).sum() + torch.ones_like(x[0] > 0, dtype=x.dtype)
        ),
        MATRIX,
        BOTH,
    ),
    (lambda x: x.new_zeros(3, 8) + x.new_ones((x.size(0), 1)) + x.new_full((1, x.size(1)), 0.5) + x, MATRIX, BOTH),
    (
        lambda x: torch.zeros(x.size(0), 8) + torch.ones(x.shape[0], x.shape[1]) + torch.full((x.size(0), 1), 2.0) + x,
        MATRIX,
        BOTH,
    ),
    (lambda x: torch.arange(x.size(1)) * x + torch.arange(0, x.size(1), 1, dtype=torch.float32), MATRIX, BOTH),
    (lambda x: (torch.arange(x.size(0)), x.new_ones(2, dtype=torch.int64), torch.full((x.size(1),), 3)), MATRIX, BOTH),
    (lambda x: x @ torch.eye(x.size(1)) + torch.linspace(0, 1, x.size(1)) + torch.tensor(x.size(0)), MATRIX, BOTH),
    (lambda x: x.masked_fill(torch.triu(torch.ones(x.size(1), x.size(1)), 1).bool()[: x.size(0)], 0.0), MATRIX, BOTH),
    (lambda x: torch.zeros(x.size(0), 2, dtype=x.dtype, device=x.device) + x[:, :2], MATRIX, BOTH),
    (
        lambda x: (
            x
            + torch.arange(8)
            + torch.zeros(3, 8)
            + torch.stack(torch.meshgrid(torch.arange(3), torch.arange(8), indexing="ij")).sum(0)
        ),
        (3, 8),
        BOTH,
    ),
    (lambda x: (lambda y: (y.zero_(), y.fill_(2.0), y + x)[2])(x * 2), MATRIX, BOTH),
    (
        lambda x: (
            *(x.new_ones(size=(x.size(0), 2)), torch.ones(size=(x.size(0), 2)), torch.zeros(size=(x.size(1), 1))),
            *(torch.empty(size=(2, x.size(0))).fill_(1), torch.arange(end=x.size(0)), torch.arange(1, end=x.size(1))),
        ),
        MATRIX,
        BOTH,
    ),
]


@everywhere
@pytest.mark.parametrize(("f", "shape"), VIEWS)
def test_view(f: Callable, shape: tuple) -> None:
    square = "diagonal" in f.__code__.co_names
    agrees(f, shape, example=KNOWN if KNOWN_RANK & {*f.__code__.co_names} else BOTH, batch=not square)


@everywhere
@pytest.mark.parametrize(("f", "shape", "example"), PIECES)
def test_pieces(f: Callable, shape: tuple, example: tuple) -> None:
    agrees(f, shape, example=example)


@everywhere
@pytest.mark.parametrize(("f", "shape", "example"), JOINS)
def test_joins(f: Callable, shape: tuple, example: tuple) -> None:
    agrees(f, shape, example=example)


@everywhere
@pytest.mark.parametrize(("f", "shape", "example"), INDICES)
def test_indices(f: Callable, shape: tuple, example: tuple) -> None:
    agrees(f, shape, example=example)


@everywhere
@pytest.mark.parametrize(("f", "shape", "example"), CREATIONS)
def test_creation(f: Callable, shape: tuple, example: tuple) -> None:
    agrees(
        f,
        shape,
        example=example,
        batch="new_zeros" not in f.__code__.co_names and "meshgrid" not in f.__code__.co_names,
    )


@everywhere
def test_unpacked_pieces() -> None:
    def f(x: Any) -> Any:
        a, b = x.split(4, 1)
        q, k, v = x.reshape(x.size(0), 2, 4)[:, [0, 1, 0]].unbind(1)
        c, d = x.chunk(2, -1)
        return a * b + q * k * v + c - d

    agrees(f, MATRIX)


@everywhere
def test_gather_with_indices_from_the_input() -> None:
    index = torch.tensor([[0, 3, 7], [2, 2, 1], [5, 0, 0]])
    agrees(lambda x, i: x.gather(1, i) + torch.take_along_dim(x, i, 1), MATRIX, index)
    agrees(lambda x, i: x[i] + x.index_select(0, i), (4, 3), torch.tensor([2, 0, 3, 2]))
    agrees(lambda x, i: x[:, i] + x[..., i], (3, 4), torch.tensor([2, 0, -1]), batch=False)


def test_parameters_are_indexed() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4))
            self.register_buffer("place", torch.tensor([[0, 1], [4, 1]]))

        def forward(self, x: Any) -> Any:
            bias = self.table[self.place.view(-1)].view(2, 2, -1).permute(2, 0, 1).contiguous()
            return x + bias.unsqueeze(0)

    from conversion import converts

    net = converts(Table(), (3, 4, 2, 2))
    exe = ndl.compile(net, (torch.zeros(3, 4, 2, 2),))
    model = Table()
    model.place.copy_(torch.tensor([[3, 3], [0, 2]]))
    net.load_state_dict(model.state_dict())
    close(exe(torch.zeros(3, 4, 2, 2)), model(torch.zeros(3, 4, 2, 2)))


def test_pieces_of_other_sizes_are_refused_at_run_time() -> None:
    net = torch2needle.convert(One(lambda x: torch.cat(x.split(3, 1)[::-1], 1)), torch.zeros(MATRIX))
    with pytest.raises(ValueError, match="expects 3 pieces"):
        net(np.zeros((3, 10), "float32"))
    net = torch2needle.convert(One(lambda x: torch.cat(x.chunk(4, 1), 1)))
    with pytest.raises(ValueError, match="expects 4 pieces"):
        net(np.zeros((3, 5), "float32"))
    net = torch2needle.convert(One(lambda x: x.split(0, 1)), torch.zeros(3, 0))
    assert [y.shape for y in net(np.zeros((3, 0), "float32"))] == [(3, 0)]
    with pytest.raises(ValueError, match="pieces of 1 or more"):
        net(np.zeros((3, 1), "float32"))
    with pytest.raises(torch2needle.ConversionError, match="an axis that is not empty"):
        torch2needle.convert(One(lambda x: x.unbind(1)), torch.zeros(3, 0))


def test_stop_gradient() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        return (y.detach() * x + y.data).sum() + y.detach().sum()

    agrees(f, MATRIX)
    net = torch2needle.convert(One(lambda x: x.detach()))
    assert not net(ndl.Tensor(np.ones(3))).requires_grad


WRITES: dict[str, Callable] = {
    "slice": lambda y: y.__setitem__((slice(None), slice(1, 3)), 0.5),
    "column": lambda y: y.__setitem__((slice(None), 0), y[:, 1] * 2),
    "row": lambda y: y.__setitem__(0, y[1]),
    "ellipsis": lambda y: y.__setitem__((..., -1), 1.0),
    "mask": lambda y: y.__setitem__(y > 0.5, 0.0),
    "row mask": lambda y: y.__setitem__(torch.tensor([True, False, True]), -1.0),
    "all": lambda y: y.__setitem__(slice(None), 2.0),
    "view": lambda y: y[:, 0].add_(1),
    "view of view": lambda y: y[:, 2:6][..., 1:3].mul_(2),
    "transposed": lambda y: y.t()[0].zero_(),
    "reshaped": lambda y: y.view(-1)[3:5].fill_(7.0),
    "unsqueezed": lambda y: y.unsqueeze(1).mul_(3),
    "permuted": lambda y: y.permute(1, 0).clamp_(-0.5, 0.5),
    "narrow": lambda y: y.narrow(1, 1, 2).copy_(y[:, 5:7]),
    "select": lambda y: y.select(1, 3).copy_(torch.ones(1)),
    "slot": lambda y: y.unflatten(1, (2, 4))[:, 1].add_(2.0),
}


@everywhere
@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_every_view(name: str) -> None:
    write = WRITES[name]

    def f(x: Any) -> Any:
        y = x * 2
        before, rows = y + 0, y[:2]
        write(y)
        return y + before, rows * 3, y.t() + 1

    agrees(f, MATRIX, batch="mask" not in name)


@everywhere
def test_augmented_assignment_to_a_slice() -> None:
    def f(x: Any) -> Any:
        y = x.clone()
        y[:, 1:3] += x[:, :2]
        y[:, 0] *= 2
        y[0] -= 1
        return y

    agrees(f, MATRIX)


@everywhere
def test_writes_into_pieces() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        y.chunk(2, 1)[1].mul_(0.5)
        y.split([3, 5], 1)[0].neg_()
        y.unbind(1)[2].fill_(1.0)
        return y

    with torch.no_grad():  # torch refuses such writes where it needs gradients
        agrees(f, MATRIX, example=KNOWN, gradient=False)


REFUSED: dict[str, tuple[Callable, str]] = {
    "number of pieces": (lambda x: torch.cat(x.split(2, 1)), "pass example="),
    "rank": (lambda x: x.numel() * x, "pass example="),
    "write into a reshape": (lambda x: (lambda y: (y.reshape(-1).add_(1), y)[1])(x * 2), "through a view"),
    "random": (lambda x: x + torch.rand_like(x), "rand_like"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    f, text = REFUSED[name]
    with pytest.raises(torch2needle.ConversionError, match=text):
        torch2needle.convert(One(f))


@everywhere
def test_masks_computed_from_two_inputs() -> None:
    agrees(
        lambda x, m: x.masked_fill(m == 0, -1e9) + torch.where(m.bool(), x, -x), MATRIX, torch.tensor([[1, 0] * 4] * 3)
    )
