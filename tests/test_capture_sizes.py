"""Sizes that a net takes: those with which the forward's branches go as with the example's, and those of a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

import pytest
import sympy

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

import needle  # noqa: E402
import torch2needle  # noqa: E402
from test_capture_traps import Linear  # noqa: E402
from torch2needle.capture import calls, conditions  # noqa: E402


def test_sizes_that_conditions_divide_by() -> None:
    code = compile("v0 % (v0 // 16) == 0", "condition", "eval")
    condition = conditions.Condition(code, {"v0": 32}, {"v0": "s0"}, {"v0": [8, 32, 40, 47]})
    assert [condition.holds({"v0": size}) for size in (8, 32, 40)] == [False, True, True]
    assert condition.alone() == (set(), {"s0": (16, 32)})


@pytest.mark.parametrize(
    ("text", "own", "found"),
    [
        ("v0 * 7 <= 7000", 12, (set(), {"s": (0, 1000)})),
        ("v0 * 7 >= 3500", 1000, (set(), {"s": (500, conditions.MOST)})),
        ("v0 != 128 and v0 <= 128", 12, (set(), {"s": (0, 127)})),
        ("v0 % 4 == 0", 1000, ({"s"}, {})),
        ("v0 > 1", 1000, (set(), {})),
        ("math.ceil(((torch.sym_float((-1)*v0)) / (-2.0))) <= 500", 900, (set(), {"s": (0, 1000)})),
        ("math.ceil(((torch.sym_float((-3) + (-1)*v0)) / (-1.0))) == (3 + v0)", 12, (set(), {})),
    ],
)
def test_limits_of_conditions(text: str, own: int, found: Any) -> None:
    """Ends of the stretch of sizes around the example's, wherever they lie."""
    size = sympy.Symbol("s0")

    class Size:
        node = type("Node", (), {"hint": own, "expr": size})

        def __str__(self) -> str:
            return "s"

    guard = text.replace("v0", "L['x'].size()[0]")
    assert conditions.condition(guard, lambda place, axis: Size(), {}).alone() == found


def test_conditions_on_many_sizes_are_tried_in_time() -> None:
    names = [f"v{i}" for i in range(9)]
    code = compile(" + ".join(names) + " > 9", "condition", "eval")
    sizes, values = dict.fromkeys(names, 8), {n: list(range(2, 400)) for n in names}
    condition = conditions.Condition(code, sizes, {n: n for n in names}, values)
    assert condition.alone() == (set(), {}) and condition.together({}, {})
    assert not condition._replace(code=compile("v0 + v8 > 9", "condition", "eval")).together({}, {})


class Last(nn.Module):
    """What each row has at a place that its length tells; torch.gather takes fewer lengths than rows, too."""

    def forward(self, x: Any, lengths: Any) -> Any:
        rows = torch.stack([x[:, i] for i in range(x.shape[1])], 1)  # which torch.fx does not follow
        return rows.gather(1, lengths.view(-1, 1) - 1)


class Distances(nn.Module):
    """Of places by numbers that are floats, as in Transformer-XL (Dai et al., arXiv 1901.02860)."""

    def forward(self, x: Any) -> Any:
        if x.ndim != 3:
            return x
        places = torch.arange(len(x) - 1, -1, -1.0, dtype=x.dtype)
        return (x * places.view(-1, 1, 1)).reshape(len(places), -1)


class Unshuffled(nn.Module):
    """Without branches on whether its sides are even."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(12, 2, 1)

    def forward(self, x: Any) -> Any:
        if x.ndim != 4:
            return x
        first, second = (nn.functional.pixel_unshuffle(x, 2), nn.PixelUnshuffle(2)(x * 2))
        return self.layer(first + second).flatten(1).sum() + first


class ByShapes(nn.Module):
    """What torch makes of calls with the example's sizes: a diagonal, places along an axis, a Kronecker product."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Any) -> Any:
        if x.dtype != torch.float32:
            return x
        return self.step(x * 1)


BY_SHAPES = {
    "diagonal": lambda x: (x @ x.T).fill_diagonal_(-1.0),
    "diagonal of a rectangle": lambda x: (x @ torch.ones(3, 2)).fill_diagonal_(0) + 1,
    "along rows": lambda x: torch.take_along_dim(x, x.argsort(0), 0),
    "along columns": lambda x: torch.take_along_dim(x, x.argsort(-1)[:, :2], dim=-1),
    "new_tensor": lambda x: x / x.new_tensor([x.shape[0], 2.0]).sum() + x.new_tensor(x.shape[0]),
    "as_tensor": lambda x: x * torch.as_tensor(x.shape[0]) + torch.as_tensor(x.shape, dtype=torch.float32).mean(),
    "one_hot": lambda x: nn.functional.one_hot(torch.arange(len(x)).flip(0), x.shape[0]).float() @ x,
    "float": lambda x: x * float(x.shape[0]) + 1 / float(len(x)),
    "int": lambda x: x[: int(x.shape[0] / 3 + 2)] * int(x.shape[0]),
    "int of what is negative": lambda x: x * int((1 - x.shape[0]) / 2),
    "round": lambda x: x[: round(x.shape[0] / 2) + 1] * round(x.shape[0] * 1.5),
    "sqrt": lambda x: x / math.sqrt(x.shape[0]) + math.log(x.shape[0]) * math.exp(-len(x)),
    "imported": lambda x: x * log2(x.shape[0]),
    "isqrt": lambda x: x[: math.isqrt(x.shape[0] * 3)] * math.isqrt(x.shape[0]),
    "length in another module": eval("lambda x: x * torch.ones(len(x), 1) * len(x)", {"torch": torch}),
    "divmod": lambda x: x[: sum(divmod(x.shape[0], 3)) + 1],
    "windows": lambda x: x * torch.hann_window(len(x))[:, None] + torch.hamming_window(len(x), False, 0.6)[:, None],
    "more windows": lambda x: (
        torch.blackman_window(x.shape[0]) @ x + torch.bartlett_window(x.shape[0], periodic=False) @ x
    ),
    "scales": lambda x: torch.linspace(-1, 3, len(x)) @ x + torch.logspace(0, 1, len(x), 2.0) @ x,
    "upper": lambda x: (x @ x.T)[tuple(torch.triu_indices(len(x), len(x), 1))] + 0 * len(x),
    "lower": lambda x: (x @ x.T)[tuple(torch.tril_indices(x.shape[0], x.shape[0], offset=1))],
    "pairs": lambda x: torch.combinations(x[:, 0]).sum(1),
    "kron": lambda x: torch.kron(x, torch.ones(2, 1) * 3) + x[0].kron(x[0]).sum(),
}


@pytest.mark.parametrize("name", BY_SHAPES)
def test_calls_that_leave_sizes_free(name: str) -> None:
    model = ByShapes(BY_SHAPES[name]).eval()
    net = torch2needle.convert(model, (torch.randn(4, 3),))
    assert net.report.capture == "torch.fx" or any(n.startswith("free sizes: x axis 0") for n in net.report.notes)
    for n in (4, 7, 3):
        x = torch.randn(n, 3)
        assert torch.allclose(torch.from_numpy(net(x).numpy()), model(x), atol=1e-5)


OF_NUMBERS = {
    "of sizes": lambda x: x * math.sqrt(x.shape[0]) + math.log(x.shape[0], 2) + math.exp(-x.shape[0]),
    "power": lambda x: x * math.pow(x.shape[0], 0.5) + math.pow(x.sum(), 2),
    "logarithms": lambda x: x * math.log10(x.shape[0] ** 3) + math.log2(x.shape[0]) + torch.tensor(math.log(len(x))),
    "isqrt": lambda x: x[: math.isqrt(x.shape[0] * 3)] * math.isqrt(x.shape[0]) + torch.full((3,), math.log(3.0)),
    "power of two": lambda x: nn.functional.pad(x, (0, 0, 0, 2 ** math.ceil(math.log2(x.shape[0])) - x.shape[0])),
    "of a tensor": lambda x: x * math.sqrt(x.square().sum()) + math.log(x.square().sum()),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_functions_of_numbers_without_an_example(name: str) -> None:
    """Python's numbers have no gradients."""
    model = nn.Sequential(nn.Linear(3, 3), ByShapes(OF_NUMBERS[name]))
    model[1].forward = model[1].step
    net = torch2needle.convert(model)
    for n in (4, 7):
        x = torch.randn(n, 3)
        got, want = net(x), model(x)
        assert torch.allclose(torch.from_numpy(got.numpy()), want, rtol=1e-4, atol=1e-5)
    want.square().sum().backward()
    (got * got).sum().backward()
    grad = torch.from_numpy(next(iter(net.parameters())).grad.numpy())
    assert torch.allclose(grad, model[0].weight.grad, rtol=1e-4, atol=1e-4)


class Larger(nn.Module):
    """As many rows as the larger of two inputs has, as of a body model (Loper et al., SMPL, 2015)."""

    def forward(self, x: Any, y: Any, z: Any) -> Any:
        rows = max(x.shape[0], y.shape[0])
        if x.ndim != 2:
            return x
        return x + (y * 2).view(rows, -1) + z


def test_rows_of_three_inputs() -> None:
    net = torch2needle.convert(Larger().eval(), tuple(torch.randn(2, 3) for _ in range(3)))
    for n in (1, 2, 5):
        given = [torch.randn(n, 3) for _ in range(3)]
        assert torch.allclose(torch.from_numpy(net(*given).numpy()), Larger()(*given))
    with pytest.raises(ValueError, match="do not broadcast"):
        net(torch.randn(2, 3), torch.randn(2, 3), torch.randn(4, 3))


@pytest.mark.parametrize(
    ("model", "shape", "others"),
    [(Distances(), (5, 2, 3), [(9, 2, 3), (3, 1, 3)]), (Unshuffled(), (2, 3, 6, 4), [(1, 3, 8, 10), (3, 3, 4, 6)])],
    ids=["distances", "unshuffled"],
)
def test_free_sizes(model: nn.Module, shape: tuple, others: list[tuple]) -> None:
    net = torch2needle.convert(model.eval(), (torch.randn(shape),))
    for size in (shape, *others):
        x = torch.randn(size)
        assert torch.allclose(torch.from_numpy(net(x).numpy()), model(x), atol=1e-4)
    if isinstance(model, Unshuffled):
        with pytest.raises(ValueError, match=r"\[pixel_unshuffle\]"):
            net(torch.randn(2, 3, 5, 4))


class Chunked(nn.Module):
    """Rows of chunks of four, each with the one after it (Beltagy et al., Longformer, 2020)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 3:
            return x
        rows, length, features = x.shape
        chunks = x.reshape(rows, length // 4, 4, features)
        return (chunks @ chunks.mT).reshape(rows, length, 4) + chunks.flatten(1, 2).mean(-1, keepdim=True)


def test_lengths_that_are_multiples_are_free(tmp_path: Path) -> None:
    net = torch2needle.convert(Chunked().eval(), (torch.randn(2, 12, 6),))
    needle.save(net, tmp_path / "net.ndl")
    for made in (net, needle.load(tmp_path / "net.ndl")):
        for shape in ((2, 12, 6), (3, 16, 6), (1, 64, 6)):
            x = torch.randn(shape)
            assert torch.allclose(torch.from_numpy(made(x).numpy()), Chunked()(x), atol=1e-5)
        with pytest.raises(ValueError, match=r"\[reshape\] expects a shape of 156 elements"):
            made(torch.randn(2, 13, 6))


@pytest.mark.parametrize(
    ("code", "own", "step"),
    [
        *(("v0 % 4 == 0", 12, 4), ("6 * v0 == 24 * (v0 // 4)", 8, 4), ("v0 % 4 == 0 and v0 > 8", 12, 4)),
        *(("v0 == 12", 12, 1), ("v0 > 3", 12, 1), ("v0 % 4 == 1", 13, 1), ("v0 % 4 == 0 and v0 != 20", 12, 1)),
    ],
)
def test_numbers_of_which_sizes_are_multiples(code: str, own: int, step: int) -> None:
    condition = conditions.Condition(
        compile(code, "condition", "eval"), {"v0": own}, {"v0": "s0"}, {"v0": list(range(2, 200))}
    )
    assert condition.step("v0") == step


def test_rows_of_three_are_tied_where_two_are_not_enough() -> None:
    names = ["v0", "v1", "v2"]
    code = compile("max(v0, v1) == v2", "condition", "eval")
    condition = conditions.Condition(
        code, dict.fromkeys(names, 2), {n: n for n in names}, {n: list(range(2, 40)) for n in names}
    )
    held, limits = condition.alone()
    assert (held, limits) == (set(), {n: (0, 2) for n in names})
    assert condition.tied(held | limits.keys()) == {"v1": "v0", "v2": "v0"}


class Strided(nn.Module):
    """Strides as numbers of a tensor, as of a detector's head."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("strides", torch.tensor([8.0, 16.0]))

    def forward(self, x: Any) -> Any:
        return torch.cat([torch.full((x.shape[2], 1), float(s)) for s in self.strides]) * x.mean()


def test_a_question_about_values_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sizes are free, torch.export ends at it: with some, with none, and then it is answered."""
    calls, before = [], torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs.get("dynamic_shapes"))
        return before(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    model, x = Strided().eval(), torch.randn(2, 3, 4, 5)
    net = torch2needle.convert(model, (x,))
    assert len(calls) == 3
    for other in (x, torch.randn(3, 3, 6, 4)):
        assert torch.allclose(torch.from_numpy(net(other).numpy()), model(other), atol=1e-5)


def test_rows_and_as_many_lengths() -> None:
    x, lengths = torch.randn(2, 5), torch.tensor([5, 3])
    net = torch2needle.convert(Last(), (x, lengths))
    for n in (1, 2, 5):
        x, lengths = torch.randn(n, 5), torch.arange(n) + 1
        assert torch.equal(torch.from_numpy(net(x, lengths).numpy()), Last()(x, lengths))
    with pytest.raises(ValueError, match="input lengths"):
        net(torch.randn(3, 5), torch.tensor([5, 3]))


def accepted(net: Any, sizes: range) -> list[int]:
    found = []
    for n in sizes:
        try:
            net(torch.ones(n, 3))
            found.append(n)
        except ValueError:
            pass
    return found


@pytest.mark.parametrize(
    ("batch", "step", "sizes"),
    [
        (1, lambda s, x: x.softmax(-1) if x.shape[0] == 1 else x * 2, [1]),
        (3, lambda s, x: x.softmax(-1) if x.shape[0] == 1 else x * 2, [2, 3, 4, 5, 6, 7, 8]),
        (2, lambda s, x: x * 2 if x.shape[0] != 7 else x, [1, 2, 3, 4, 5, 6, 8]),
        (1, lambda s, x: s.linear(x).squeeze(0) if x.shape[1] > 2 else x, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, lambda s, x: s.linear(x).squeeze(0) if x.shape[1] > 2 else x, [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, lambda s, x: s.linear(x) if x.shape[0] < 6 else x, [1, 2, 3, 4, 5]),
        (4, lambda s, x: s.linear(x) if x.shape[1] == 3 else x, [1, 2, 3, 4, 5, 6, 7, 8]),
        (8, lambda s, x: sum(t.sum(0) for t in s.linear(x).split(3)), [7, 8]),
    ],
    ids=["one", "not one", "seven", "squeezed", "not squeezed", "below", "any", "parts"],
)
def test_sizes_of_other_branches_are_refused(batch: int, step: Callable, sizes: list[int]) -> None:
    model = Linear(step).eval()
    net = torch2needle.convert(model, (torch.randn(batch, 3),))
    assert accepted(net, range(1, 9)) == sizes
    for n in sizes:
        x = torch.randn(n, 3)
        assert torch.allclose(torch.from_numpy(net(x).numpy()), model(x), atol=1e-6)


@pytest.mark.parametrize(
    ("dim", "sizes"),
    [(Dim("batch", min=2), [2, 3, 4, 5]), (Dim("batch", min=1), [1, 2, 3, 4, 5]), (Dim("batch", min=3, max=4), [3, 4])],
    ids=["two", "one", "three to four"],
)
def test_sizes_of_programs(dim: Any, sizes: list[int]) -> None:
    program = torch.export.export(nn.Linear(3, 3), (torch.ones(4, 3),), dynamic_shapes=({0: dim},), strict=False)
    assert accepted(torch2needle.convert(program), range(1, 6)) == sizes


def test_both_axes_of_a_mask_are_free() -> None:
    """A matrix whose first axis is no batch, such as one of pairs of tokens."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            order = [d for d in range(scores.ndim) if d != 1]  # which torch.fx does not follow
            return self.mix(scores.permute(*order, 1)).permute(0, 3, 1, 2) + mask

    model = Attention().eval()
    net: Any = torch2needle.convert(model, (torch.randn(2, 4, 9, 9), torch.randn(9, 9)))
    for batch, n in ((2, 9), (1, 5), (3, 14)):
        scores, mask = torch.randn(batch, 4, n, n), torch.randn(n, n)
        assert torch.allclose(torch.from_numpy(net(scores, mask).numpy()), model(scores, mask), atol=1e-6)


def test_other_calls_on_gpus_name_places_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a number outside of an axis is the end of the device for the process; negative ones stay what they mean."""
    x, numbers = torch.randn(6, 300), torch.tensor([[0, 5, 299, -1, -100]]).expand(6, 5)
    monkeypatch.setattr(calls, "names_places", lambda t: t.dtype == torch.int64)
    seen = [
        calls.shuffled(((x, numbers), {}), 2.0),
        calls.resized(((x, numbers), {}), {(0, 1): 3, (0, 0): 2, (1, 0): 2}),
    ]
    (_, kept), _ = seen[0]
    (_, fitting), _ = seen[1]
    assert torch.equal(kept, numbers) and fitting.tolist() == [[0, 1, 1, -1, -100]] * 2


class Growing(nn.Module):
    """As many rows as a list has tensors, each of all before it."""

    def forward(self, x: Any) -> Any:
        rows = [x]
        while len(rows) < 4:
            rows.append(sum(rows) / len(rows) + len(x))
        return torch.stack(rows, 1)


def test_lengths_of_lists_are_numbers() -> None:
    net = torch2needle.convert(Growing(), (torch.randn(3, 2),))
    assert net.report.capture == "torch.fx"
    for n in (3, 5):
        x = torch.randn(n, 2)
        assert torch.allclose(torch.from_numpy(net(x).numpy()), Growing()(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_net_takes_its_own_example(batch: int, training: bool) -> None:
    def step(m: Any, x: Any) -> Any:
        x = m.linear(x) * (2 if isinstance(x.shape[0], int) else 1)
        return x * 2 if x.shape[0] % 2 == 0 else x

    model = Linear(step).train(training)
    net = torch2needle.convert(model, (torch.randn(batch, 3),))
    assert torch2needle.verify(model, net, (torch.randn(batch, 3),))
