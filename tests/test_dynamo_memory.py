"""torch.compile(backend="needle"): strides and memory of results, inputs and buffers that graphs write, what stays in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conversion import close, leaves
from test_dynamo import compiled
from torch2needle import dynamo

pytestmark = pytest.mark.usefixtures("without_rules", "fresh_dynamo")

STRIDES: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda x: (x * 2).t(),
    "a result in torch's order": lambda x: torch.relu(x.t()),
    "slice": lambda x: (x + 1)[:, ::2],
    "row": lambda x: (x + 1)[1],
    "batch norm": lambda x: F.batch_norm((x.t() * 2).view(6, 1, -1), torch.ones(1), torch.ones(1)),
    "batch norm of channels": lambda x: F.batch_norm(x.t()[None, None] * 2, torch.zeros(1), torch.ones(1)),
    "expanded": lambda x: (x[:1] * 2).expand(x.shape[0], 6),
    "expanded in the middle": lambda x: (x * 2).t()[:, None].expand(6, 4, x.shape[0]),
    "two": lambda x: {"a": (x * 2).t(), "b": (x + 1, (x - 1)[:, 1:])},
}


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("name", STRIDES)
def test_results_have_torchs_strides(name: str, dynamic: bool | None, runs: list[int]) -> None:
    """Dynamo and what comes after a graph break rely on them."""
    f = STRIDES[name]
    ours = compiled(f, dynamic=dynamic)
    for rows in (3, 3, 5):
        x = torch.randn(rows, 6)
        got, want = leaves(ours(x)), leaves(f(x))
        close(got, want)
        assert [t.stride() for t in got] == [t.stride() for t in want]
    assert len(runs) >= 3


def data_added(x: torch.Tensor) -> Any:
    x.data.add_(1.0)
    return x * 2, x.relu()


def data_replaced(x: torch.Tensor) -> Any:
    y = x * 2
    x.data = y.data + 1
    return x + y


@pytest.mark.parametrize("f", [data_added, data_replaced])
def test_writes_through_the_data_of_an_input(f: Callable) -> None:
    ours = compiled(f)
    for i in range(3):
        x = torch.randn(4, 6) + i
        mine, theirs = x.clone(), x.clone()
        for got, want in zip(leaves(ours(mine)), leaves(f(theirs)), strict=True):
            close(got, want)
        assert torch.equal(mine, theirs)
        mine.data.mul_(3), theirs.data.mul_(3)
        for got, want in zip(leaves(ours(mine)), leaves(f(theirs)), strict=True):
            close(got, want)


def test_views_after_a_graph_break() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).t()
        print(end="")
        return y.t().view(-1) + y.reshape(-1)

    x = torch.randn(4, 6)
    close(compiled(f)(x), f(x))


@torch.library.custom_op("torch2needle_tests::scale", mutates_args=())
def scale(x: torch.Tensor, k: float) -> torch.Tensor:
    return x * k


@torch.library.custom_op("torch2needle_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


scale.register_fake(lambda x, k: torch.empty_like(x))
bump.register_fake(lambda x: None)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def and_views(y: torch.Tensor) -> tuple:
    return y, y.reshape(-1), y[0]


def parts(y: torch.Tensor) -> tuple:
    return y[:2], y[1:]


def halves(x: torch.Tensor) -> tuple:
    a, b = (x * 2).split(2, 1)
    a.add_(1)
    return a, b


def assigned(x: torch.Tensor) -> torch.Tensor:
    x[:, 1] = 5.0
    return x + 1


MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "view of an input": lambda x: (x.relu(), x.reshape(-1)),
    "slice of an input": lambda x: (x.relu(), x[1:, ::2], x[:0]),
    "view of a view": lambda x: (x * 2, x.t()[1:].t()[:, 1]),
    "an input": lambda x: [x.relu(), x],
    "two views": lambda x: and_views(x * 2),
    "transposed": lambda x: and_views((x * 2).t()),
    "parts without the whole": lambda x: parts(x * 2),
    "written parts": halves,
    "one result twice": lambda x: ((y := x * 2), y),
    "result written through a view": lambda x: ((y := x * 2)[0].add_(5), y),
    "write": lambda x: x.add_(1).relu(),
    "write and return": lambda x: x.add_(1),
    "write and view": lambda x: (x.add_(1)[1:], None),
    "write a view": lambda x: (x[0].mul_(3), x.sum(0)),
    "write a view of a view": lambda x: (x[1:].t()[0].fill_(3), x * 2, x[1:]),
    "write at an index": assigned,
    "write all": lambda x: (x.copy_(x.flip(0) * 2), x.relu()),
    "write by a custom op": lambda x: (bump(x), x * 2),
    "custom op": lambda x: scale(x.relu(), 2.0) + 1,
    "function with its own gradient": lambda x: Doubled.apply(x.relu()) + 1,
}


def together(tensors: list[torch.Tensor]) -> list[Any]:
    """Which lie in the same memory, and where there."""
    own = [t.untyped_storage().data_ptr() for t in tensors]

    def distance(i: int, j: int) -> Any:
        a, b = tensors[i], tensors[j]
        return own[i] == own[j] and a.numel() * b.numel() > 0 and a.data_ptr() - b.data_ptr()

    return [[distance(i, j) for i in range(len(own))] for j in range(len(own))]


@pytest.mark.filterwarnings("ignore:.convert.")
@pytest.mark.parametrize("name", MEMORY)
def test_results_lie_in_torchs_memory(name: str, runs: list[int]) -> None:
    """Values, strides, who shares memory with whom, what later writes change, inputs that are written."""
    f = MEMORY[name]
    ours = compiled(f)
    for i in range(3):
        source = torch.randn(4, 6)
        x, mine = ((t[1:, 1:5] if i == 1 else t[:3, :4].contiguous()) for t in (source.clone(), source.clone()))
        with torch.no_grad() if i else torch.inference_mode():
            want, got = leaves(f(x)), leaves(ours(mine))
            close([*got, mine], [*want, x])
            assert [t.stride() for t in got] == [t.stride() for t in want]
            assert together([*got, mine]) == together([*want, x])
            assert [t is mine for t in got] == [t is x for t in want]
            for a, b in zip(got, want, strict=True):
                a.add_(1), b.add_(1)
            close([*got, mine], [*want, x])
    assert len(runs) >= 3, dynamo.SAID


def test_written_inputs_that_share_memory_run_in_torch(runs: list[int]) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple:
        x.add_(1)
        return x + y, y * 2

    ours = compiled(f)
    for rows in (None, 1, 2, None):
        x = torch.randn(4, 4)
        given = [(t, torch.ones(1, 4) if rows is None else t[rows : rows + 1]) for t in (x, x.clone())]
        close(list(ours(*given[0])), list(f(*given[1])))
        close(given[0][0], given[1][0])
    assert len(runs) == 3  # one of which is the first of all, of a new plan


class Cached(nn.Module):
    """A ring that is written where it is, a counter, a parameter that shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("ring", torch.zeros(8, 4))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple:
        self.ring[2 : 2 + x.shape[0]] = self.linear(x)
        self.seen += x.shape[0]
        self.other.weight.mul_(0.5)
        return self.ring.sum(0) + self.seen, self.ring, self.other(x), self.linear.weight.t()


@pytest.mark.parametrize("watch", ["content", "version"])
def test_buffers_and_parameters_that_a_graph_writes(watch: str, runs: list[int]) -> None:
    model = Cached().eval()
    theirs = copy.deepcopy(model)
    ours = compiled(model, options={"watch": watch})
    with torch.no_grad():
        for i in range(4):
            x = torch.randn(3, 4)
            got, want = ours(x), theirs(x)
            close(list(got), list(want))
            assert got[1] is model.ring and got[3].data_ptr() == model.linear.weight.data_ptr()
            close(list(model.state_dict().values()), list(theirs.state_dict().values()))
            if i == 1:
                for t in (*model.state_dict().values(), *theirs.state_dict().values()):
                    t.add_(1)
    assert len(runs) == 5


def test_graphs_of_views_alone() -> None:
    x, f = torch.randn(3, 4), lambda x: (x[1:], x, x.t(), None)
    with torch.no_grad():
        for given in (x, torch.randn(5, 2)):
            got = compiled(f)(given)
            close(list(got[:3]), list(f(given)[:3]))
            assert got[1] is given and all(
                t.data_ptr() == w.data_ptr() for t, w in zip(got[:3], f(given), strict=False)
            )
    assert not dynamo.SAID


class Made(nn.Module):
    """Reads parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(2, 3)), nn.Buffer(torch.randn(3))

    def forward(self, n: int) -> tuple:
        return self.weight @ self.shift, torch.arange(n) * 2.0, self.shift[1:]


def test_graphs_without_inputs(runs: list[int]) -> None:
    model = Made()
    ours = compiled(model)
    with torch.no_grad():
        for n in (3, 5, 3):
            got = ours(n)
            close(list(got), list(model(n)))
            assert got[2].data_ptr() == model.shift[1:].data_ptr()
            got[1].zero_()
            model.weight.mul_(2)
    assert runs and not dynamo.SAID


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: (x * 3, x.view(torch.int32)), "view of another dtype"),
        (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True), "running statistics"),
        (lambda x: x + torch.randn(3, 4), "random"),
        (lambda x: F.dropout(x, 0.5), "random"),
        (lambda x: x.half() * 2, "dtype"),
    ],
    ids=["dtype", "statistics", "random", "dropout", "half"],
)
def test_what_stays_in_torch(f: Callable, reason: str, runs: list[int]) -> None:
    x = torch.randn(3, 4)
    first, second = x.clone(), x.clone()
    torch.manual_seed(3)
    want = f(first)
    torch.manual_seed(3)
    close(compiled(f)(second), want)
    close(second, first)
    assert not runs and reason in "".join(dynamo.SAID)
