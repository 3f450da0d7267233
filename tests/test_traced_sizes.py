"""Plans for further shapes: every one that a template gives is, number by number, the plan that is made anew."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
from fuzzing import models
from needle import _core, nn, ops
from needle.backend_ndarray.sizes import Size, Trace, bounds, chosen, larger, smaller
from needle.backend_ndarray.strides import broadcast_shapes
from needle.executor import shapes
from needle.executor.shapes import Instance
from needle.executor.verify_plan import PlanError
from needle.graph import symbolic


class Encoder(nn.Module):
    """Tokens and their places, a mask of the past, attention spelled out, a head whose scale is the length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(600, 16)
        self.qkv, self.out, self.norm = (
            nn.Linear(16, 48, layout="torch"),
            nn.Linear(16, 16, layout="torch"),
            nn.LayerNorm(16),
        )

    def forward(self, ids: Any) -> Any:
        n, length = ids.shape
        x = self.tokens(ids) + self.places(ops.arange_like(ids, 0, length))
        parts = self.qkv(self.norm(x)).reshape((n, length, 3, 2, 8))
        q, k, v = (ops.transpose(parts[:, :, i], (1, 2)) for i in range(3))
        seen = ops.triangle(ops.full_like(ids, 1.0, (length, length), "float32"), False)
        scores = ops.matmul(q, ops.transpose(k)) + (seen - 1.0) * 1e9
        y = ops.transpose(ops.matmul(ops.softmax(scores), v), (1, 2)).reshape((n, length, 16))
        return {"last": (x + self.out(y))[:, -1], "mean": ops.summation(x, 1) / length, "length": length}


class Images(nn.Module):
    """A residual block with a choice of algorithms, pooling and a way back up."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv(i, 32, 3, padding=1, layout="torch") for i in (3, 32))
        self.c, self.norm = nn.Conv(32, 32, 3, stride=2, padding=1, layout="torch"), nn.BatchNorm2d(32)

    def forward(self, x: Any) -> Any:
        x = ops.relu(self.norm(self.a(x)))
        x = ops.concat([x, ops.relu(self.b(x) + x)], 1)
        return self.c(x[:, 16:48]), ops.mean(x, (2, 3))


class Pair(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return ops.matmul(x, ops.transpose(y)) * 2.0 + 1.0, ops.concat([x, y], 1)[:, 1::2]


class Picked(nn.Module):
    """Elements picked by an index for each of two axes, a row stretched to the sizes: masks of language models."""

    def forward(self, ids: Any) -> Any:
        n, length = ids.shape
        rows, columns = (ops.arange_like(ids, 0, size) for size in (n, length))
        picked = ids[rows.reshape((n, 1)), columns.reshape((1, length)) - length]
        return picked + ops.broadcast_to(columns.reshape((1, length)), (n, length))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype="float32")


def ids(n: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 20, (n, length))


LENGTHS = [5, 6, 9, 1, 2, 16, 17, 33, 64, 65, 130, 257, 512]
# model, arguments by sizes, sizes in turn, how many of their plans a template gives at least
CASES: dict[str, tuple[Callable[[], Any], Callable[..., tuple], list[tuple[int, ...]], int]] = {
    "lengths": (Encoder, lambda n: (ids(1, n),), [(n,) for n in LENGTHS], 8),
    "batches": (Encoder, lambda n: (ids(n, 7),), [(n,) for n in (3, 4, 5, 1, 2, 8, 16, 17)], 4),
    "both": (Encoder, lambda n, l: (ids(n, l),), [(3, 4), (4, 6), (6, 5), (2, 9), (9, 2), (7, 7), (1, 8), (8, 1), (5, 3)], 3),
    "squares": (Images, lambda n: (drawn(1, 3, n, n),), [(n,) for n in (24, 26, 28, 27, 25, 30, 33, 8, 4, 2, 1)], 2),
    "images": (Images, lambda b, h, w: (drawn(b, 3, h, w),), [(2, 12, 18), (3, 18, 12), (4, 12, 20), (2, 14, 16), (1, 9, 7)], 0),
    "picked": (Picked, lambda n, l: (ids(n, l),), [(3, 4), (4, 6), (5, 7), (2, 9), (9, 2), (1, 8), (8, 1)], 2),
    "pairs": (Pair, lambda a, b: (drawn(2, a, 4), drawn(2, b, 4)), [(3, 3), (5, 5), (6, 6), (7, 5), (4, 9), (9, 4), (1, 8)], 2),
}  # fmt: skip


def leaves(value: Any) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else None
    return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def agrees(exe: Any, net: Any, args: tuple) -> bool:
    """Whether a template gave the plan, which has to compute what the model does."""
    want = leaves(net(*(ndl.Tensor(a, dtype=str(a.dtype)) for a in args)))
    for got, w in zip(leaves(exe(*args)), want, strict=True):
        if isinstance(w, int):
            assert type(got) is int and got == w
            continue
        w = w.numpy()
        np.testing.assert_allclose(got, w, rtol=2e-3, atol=2e-4 * max(1.0, float(np.abs(w).max(initial=0))))
    return isinstance(exe.last, Instance)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan that a template gives is compared with one made anew."""
    monkeypatch.setattr(shapes, "guarded", lambda: True)
    np.random.seed(0)


@pytest.mark.parametrize("name", CASES)
def test_the_plans_are_those_made_anew(name: str, compared: None) -> None:
    make, arguments, sizes, least = CASES[name]
    net = make().eval()
    exe = ndl.compile(net, arguments(*sizes[0]))
    assert sum([agrees(exe, net, arguments(*s)) for s in sizes]) >= least
    assert [f for kind in exe._shapes.kinds.values() for f in kind.faults] == []


def test_random_models(compared: None) -> None:
    found = 0
    for seed in range(40):
        rng = random.Random(seed)
        case = {**models.draw(rng), "dtype": "float32"}
        net = models.build(case, models.arrays(case))
        exe = ndl.compile(net, tuple(models.arrays(case)))
        for batch in rng.sample(range(1, 20), 4):
            args = models.arrays(case, batch)
            try:
                net(*(ndl.Tensor(a, dtype=str(a.dtype)) for a in args))
            except ValueError:  # a parameter has the batch's size
                continue
            found += agrees(exe, net, tuple(args))
    assert found > 40


def test_a_plan_that_is_another_one_is_found(compared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is worth: one condition forgotten."""
    net = Images().eval()
    exe = ndl.compile(net, drawn(1, 3, 30, 30))
    exe(drawn(1, 3, 31, 31))
    for kind in exe._shapes.kinds.values():
        for template in kind.templates:
            template.trace.conditions.clear()
            template.trace.tied.clear()
    with pytest.raises(PlanError, match="another one than a new one"):
        exe(drawn(1, 3, 4, 4))


def test_what_is_told_of_it(compared: None) -> None:
    net = Encoder().eval()
    exe, other = ndl.compile(net, ids(1, 5)), ndl.compile(net, ids(1, 40))
    for n in (6, 40):
        exe(ids(1, n))
    assert isinstance(exe.last, Instance)
    told = [
        (str(e.plan), e.plan.traffic, e.plan.buffers, {**e.memory, "arenas": 1}, str(e.report), e.last.origins)
        for e in (exe, other)
    ]
    assert told[0] == told[1]
    assert [row[:2] for row in exe.profile(ids(1, 40), rounds=1)] == [
        row[:2] for row in other.profile(ids(1, 40), rounds=1)
    ]


def test_weights_change_and_plans_are_thrown_away() -> None:
    np.random.seed(0)
    net = Encoder().eval()
    exe = ndl.compile(net, ids(1, 5), max_plans=2)
    with pytest.warns(UserWarning, match="thrown away"):
        for n in (6, 7, 8, 9, 10):
            agrees(exe, net, (ids(1, n),))
    kept = len(exe._pool.constants)
    for n in range(11, 20):
        net.qkv.weight.data = net.qkv.weight.detach() * 1.5
        net.places.weight.data = net.places.weight.detach() + 0.25
        assert agrees(exe, net, (ids(1, n),))
    assert len(exe._pool.constants) <= kept + 1 and len(exe._plans) == 2
    net.out = nn.Linear(16, 16, layout="torch")  # another model
    for n in (20, 21, 22):
        agrees(exe, net, (ids(1, n),))


def looped(x: Any) -> Any:
    return sum(x[:, i] * float(i) for i in range(x.shape[1]))


def looked_up(x: Any) -> Any:
    return x * {3: 1.0, 4: 2.0}.get(x.shape[1], 3.0)


def measured(x: Any) -> Any:
    return x + ndl.Tensor(np.linspace(0, 1, x.shape[1]).astype("float32"))


def told(x: Any) -> Any:
    return x * (2.0 if str(x.shape) == "(2, 5)" else 1.0)


@pytest.mark.parametrize("f", [looped, looked_up, measured, told])
def test_sizes_that_are_needed_themselves(f: Any, compared: None) -> None:
    exe = ndl.compile(f, drawn(2, 6))
    assert not any([agrees(exe, f, (drawn(2, n),)) for n in (3, 4, 5, 6, 7, 8)])
    (kind,) = exe._shapes.kinds.values()
    assert kind.faults and kind.tries == 0


def branches(x: Any) -> Any:
    n = x.shape[1]
    return x * 2.0 if n > 6 else x[:, : n // 2] + 1.0 if n % 2 else ops.summation(x, 1)


def test_decisions_of_a_forward_are_conditions(compared: None) -> None:
    exe = ndl.compile(branches, drawn(2, 8))
    assert sum([agrees(exe, branches, (drawn(2, n),)) for n in (9, 2, 10, 3, 12, 4, 5, 30, 7, 6, 1)]) >= 4


def test_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEEDLE_GUARD", "1")
    net = Encoder().eval()
    exe = ndl.compile(net, ids(1, 5))
    assert [agrees(exe, net, (ids(1, n),)) for n in (6, 7, 12)] == [False, True, True]
    monkeypatch.setenv("NEEDLE_GUARD", "0")
    assert [agrees(exe, net, (ids(1, n),)) for n in (8, 9)] == [False, True]  # buffers lie elsewhere now


USES: list[Callable[[Any], Any]] = [
    *(hash, str, repr, int, float, range, np.zeros, np.float32, "{:d}".format),
    lambda n: [1, 2, 3, 4, 5][n],
    lambda n: n in {1, 2},
    lambda n: _core.empty((n,), "float32"),
]


class TestTrace:
    def test_numbers_and_conditions(self) -> None:
        with Trace([6, 4]) as trace:
            a, b = trace.sizes
            made = [
                a * b + 3,
                -a // 4,
                2 - b,
                a / b,
                (a * 768) % 7,
                abs(b - a),
                larger(0, b - a),
                smaller(a, 2.5),
                2**b,
                divmod(a, 5)[1],
            ]
            assert isinstance(a, int) and isinstance(a / b, float) and not isinstance(a, float)
            assert a + 0 is a and a * 1 is a and a * b is b * a
            assert all([a > b, a != b, b <= 4, a != 5])
        value = lambda values: [values[m.index] for m in made]  # noqa: E731
        for x, y in ((6, 4), (9, 3), (30, 1), (2, 1)):
            want = [x * y + 3, -x // 4, 2 - y, x / y, x * 768 % 7, abs(y - x), max(0, y - x), min(x, 2.5), 2**y, x % 5]
            assert value(trace.at([x, y])) == want
        assert (
            trace.at([3, 4]) is None
            and trace.at([9, 5]) is None
            and trace.at([5, 4]) is None
            and trace.at([6, 0]) is None
        )
        assert a + 1 == 7 and type(a + 1) is int and len(trace.values) == len(trace.at([6, 4]))  # after it, numbers

    @pytest.mark.parametrize("use", USES)
    def test_uses_of_the_value_are_conditions(self, use: Any) -> None:
        with Trace([3]) as trace:
            use(trace.sizes[0])
        assert trace.at([3]) is not None and trace.at([4]) is None

    def test_choices(self) -> None:
        with Trace([10]) as trace:
            (n,) = trace.sizes
            assert chosen(lambda a, b: int(b < a), n * 3, n + 15) == 1
        assert trace.at([8]) is not None and trace.at([7]) is None  # 21 < 22

    def test_slices(self) -> None:
        ends = [None, -9, -3, -1, 0, 1, 2, 5, 9]
        for n, start, stop, step in itertools.product([0, 1, 4, 5], ends, ends, [None, 1, 2, 3, -1, -2]):
            s = slice(start, stop, step)
            with Trace([n]) as trace:
                found = bounds(s, trace.sizes[0])
                assert tuple(map(int, (found[0], found[1], found[2]))) == s.indices(n), (s, n)

    def test_broadcasts(self) -> None:
        for ranks in itertools.product(range(3), repeat=2):
            for sizes in itertools.product([0, 1, 2, 3], repeat=sum(ranks)):
                one, other = sizes[: ranks[0]], sizes[ranks[0] :]
                try:
                    want: Any = np.broadcast_shapes(one, other)
                except ValueError:
                    with pytest.raises(ValueError):
                        broadcast_shapes(one, other)
                else:
                    assert broadcast_shapes(one, other) == want

    def test_traces_do_not_meet(self) -> None:
        with Trace([3]) as one, Trace([4]) as other:
            total = one.sizes[0] + other.sizes[0]
        assert total == 7 and type(total) is not Size and one.at([5]) is None and other.at([5]) is None


class TestRanges:
    """`compile(sizes=...)`."""

    def test_calls_in_a_range_do_not_plan(self, compared: None, monkeypatch: pytest.MonkeyPatch) -> None:
        net = Encoder().eval()
        exe = ndl.compile(net, ids(3, 7), sizes={"ids.1": (1, 200), "ids.0": (2, 9)})
        planned = set(exe._plans)
        for n, length in ((3, 1), (3, 2), (3, 200), (3, 77), (2, 7), (9, 7), (5, 50), (9, 200)):
            key = repr((ndl.autograd.Spec((n, length), "int64"),))
            assert agrees(exe, net, (ids(n, length),)) or key in planned
        for n, length, told in ((1, 7, "2 to 9 for ids.0, got 1"), (3, 201, "1 to 200 for ids.1, got 201")):
            with pytest.raises(ValueError, match=told):
                exe(ids(n, length))

    def test_sizes_that_are_equal(self, compared: None) -> None:
        net = Pair().eval()
        exe = ndl.compile(net, (drawn(2, 3, 4), drawn(2, 3, 4)), sizes={"x.1, y.1": (2, 40)})
        assert all(agrees(exe, net, (drawn(2, n, 4), drawn(2, n, 4))) for n in (5, 9, 40))
        with pytest.raises(ValueError, match=r"one size for x.1, y.1, got 5 and 6"):
            exe(drawn(2, 5, 4), drawn(2, 6, 4))
        graph = symbolic(net, (drawn(2, 3, 4), drawn(2, 3, 4)))
        for node in graph.graph.inputs:
            node.meta["sizes"] = ((2, 2, ""), (2, 50, "rows"), (4, 4, ""))
        named = ndl.compile(graph.with_graph(graph.graph), (drawn(2, 3, 4),) * 2, sizes={"rows": (2, 40)})
        assert agrees(named, net, (drawn(2, 7, 4), drawn(2, 7, 4)))
        with pytest.raises(ValueError, match=r"inputs of \[3, 3\] axes, got \[2, 3\]"):
            exe(drawn(5, 4), drawn(2, 5, 4))

    @pytest.mark.parametrize(
        ("sizes", "told"),
        [
            ({"x.5": (1, 2)}, "names of axes, of x.0, x.1, x.2, y.0, y.1, y.2, got 'x.5'"),
            ({"x.1": (3, 2)}, r"expects \(least, most\) for x.1, got \(3, 2\)"),
            ({"x.1": 4}, "for x.1, got 4"),
            ({"x.1": (1, 2.5)}, "for x.1"),
            ({"x.1": (1, 4), "y.1, x.1": (1, 4)}, "names an axis of y.1, x.1 twice"),
            ({"x.1": (4, 8)}, "expects 4 to 8 for x.1, got 3"),
        ],
    )
    def test_what_is_refused(self, sizes: Any, told: str) -> None:
        with pytest.raises(ValueError, match=told):
            ndl.compile(Pair().eval(), (drawn(2, 3, 4), drawn(2, 3, 4)), sizes=sizes)
