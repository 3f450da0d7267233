"""Plans that would be wrong are refused: dtypes of every operand, reads of unwritten memory, overlaps; and the guarded mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import _core, nn, ops
from needle.autograd import Op, Spec, Tensor
from needle.backend_ndarray.kernels import KERNELS
from needle.backend_ndarray.ndarray import NDArray
from needle.executor import builder as builder_module
from needle.executor import passes
from needle.executor.builder import ARENA, CONSTANT, INPUT, OUTPUT, Buffer, Builder
from needle.executor.step import NO_HALO, Step
from needle.executor.verify_plan import PlanError, Value, verify_plan
from needle.op import OPS


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape, dtype="float32")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEEDLE_GUARD", "1")


class Joins(nn.Module):
    """Concats of concats of one convolution's values."""

    def __init__(self, combine: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.conv, self.combine = nn.Conv(16, 16, 3, padding=1, layout="torch"), combine

    def forward(self, x: Any) -> Any:
        return self.combine(self.conv(x), x)


def cat(*parts: Any) -> Any:
    return ndl.ops.concat(parts, 1)


def nested(a: Any, x: Any) -> Any:
    b = cat(a, x)
    return cat(cat(b, ndl.ops.relu(a)), b)


JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "nested": nested,
    "reversed": lambda a, x: cat(x, cat(a, x), a),
    "twice": lambda a, x: cat(cat(a, a), a, x),
    "identity": lambda a, x: cat(a, ndl.ops.reshape(a, a.shape), a),
    "in place": lambda a, x: cat(cat(a, x), ndl.ops.relu(a), ndl.ops.relu(cat(a, x))),
    "two outputs": lambda a, x: (cat(a, x), cat(x, a), cat(cat(a, x), cat(x, a))),
    "batch axis": lambda a, x: ndl.ops.concat([cat(a, x), cat(x, a)], 0),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", JOINS)
def test_joins_of_joins(name: str, batch: int, guarded: None) -> None:
    net, x = Joins(JOINS[name]).eval(), image(batch, 16, 6, 5)
    got, want = ndl.compile(net, (x,))(x), net(ndl.Tensor(x))
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for g, w in pairs:
        assert np.abs(g - w.numpy()).max() <= 1e-5 * np.abs(w.numpy()).max()


class TestMutations:
    """With a mend taken out, the verifier finds the plan wrong, and so do guards without the verifier."""

    @pytest.mark.parametrize("batch", [1, 2])
    def test_copies_left_out(self, batch: int, monkeypatch: pytest.MonkeyPatch, guarded: None) -> None:
        monkeypatch.setattr(NDArray, "is_same_view", lambda a, b: a._handle is b._handle)
        net, x = Joins(nested).eval(), image(batch, 16, 6, 5)
        with pytest.raises(PlanError, match=r"^\[plan\] step 5 \(from_blocked of output\) reads what no step"):
            ndl.compile(net, (x,))
        for check in ("verify_plan", "verify_steps"):
            monkeypatch.setattr(builder_module, check, lambda *_: None)
        assert np.isnan(ndl.compile(net, (x,))(x)).any()

    def test_dtypes_unchecked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(passes, "missing_kernel", lambda *_: "")
        monkeypatch.setattr("needle.executor.compiled.check_floats", lambda *_: None)

        def call(self: Builder, name: str, outs: Any, named: dict[str, Any]) -> None:
            inputs = {n: a for n, a in named.items() if isinstance(a, NDArray)}
            fixed = {n: self._known(a) for n, a in inputs.items()}
            self.steps.append(Step(name, list(outs), fixed, {n: v for n, v in named.items() if n not in inputs}, ""))

        monkeypatch.setattr(Builder, "call", call)
        with pytest.raises(
            TypeError, match=r"^\[batch_norm\] expects operands of one dtype, got float64 and float32\.$"
        ):
            ndl.compile(nn.BatchNorm1d(4).eval(), (image(3, 4).astype("float64"),))

    def test_overwritten_too_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("needle.executor.planner.Planner._can_overwrite", lambda self, x, node: x in self.home)
        with pytest.raises(PlanError, match=r"overwrites what step \d+ still reads\.$"):
            ndl.compile(lambda x: ndl.ops.relu(y := ndl.ops.exp(x)) * y, (image(3, 4),))

    def test_halos_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("needle.targets.cpu.target.Blocks.zero", lambda *_: None)
        with pytest.raises(PlanError, match=r"reads what no step before it writes\.$"):
            ndl.compile(nn.Conv(16, 16, 3, padding=1, layout="torch"), (image(1, 16, 6, 5),))

    def test_arena_without_lifetimes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(builder_module, "plan_offsets", lambda buffers: ([0] * len(buffers), 1 << 16))
        with pytest.raises(PlanError, match=r"lie on each other\.$"):
            ndl.compile(lambda x: ndl.ops.exp(x) * ndl.ops.sin(ndl.ops.exp(x)).sum((1,), True), (image(3, 4),))


def buffer(nbytes: int, space: int = ARENA) -> Buffer:
    return Buffer(nbytes, space)


def view(b: Buffer, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0) -> NDArray:
    return NDArray.make(shape, strides, handle=b, offset=offset)


def copied(out: NDArray, x: NDArray, halo: Any = NO_HALO) -> Step:
    return Step("copy", [out], {"x": x}, {}, "copy", {"x": halo})


def steps_of(case: str) -> tuple[list[Step], list[Value], dict[int, int], list]:
    """Two or three steps from an input of 8 elements to an output of 8, with one defect."""
    x, y, a, b = buffer(32, INPUT), buffer(32, OUTPUT), buffer(32), buffer(32)
    whole = [copied(view(a, [8]), view(x, [8])), copied(view(y, [8]), view(a, [8]))]
    outputs = [((8,), "float32")]
    image = view(c := buffer(4 * 6 * 6 * 16), (1, 1, 4, 4, 16), (576, 576, 96, 16, 1), 112)
    last = copied(view(y, [8]), view(c, [8], [1], 112), NO_HALO)
    cases: dict[str, tuple] = {
        "right": (whole, [], {id(a): 0}, outputs),
        "half": ([copied(view(a, [4]), view(x, [4])), whole[1]], [], {id(a): 0}, outputs),
        "every second": ([copied(view(a, [4], [2]), view(x, [4])), whole[1]], [], {id(a): 0}, outputs),
        "outside": ([copied(view(a, [8], offset=1), view(x, [8])), whole[1]], [], {id(a): 0}, outputs),
        "output": ([whole[0], copied(view(y, [7]), view(a, [7]))], [], {id(a): 0}, outputs),
        "no output": ([whole[0]], [], {id(a): 0}, outputs),
        "input": ([copied(view(x, [8]), view(x, [8]))], [], {}, []),
        "shifted": ([whole[0], copied(view(a, [4], offset=2), view(a, [4]))], [], {id(a): 0}, []),
        "arena": (
            [whole[0], copied(view(b, [8]), view(a, [8])), copied(view(y, [8]), view(b, [8]))],
            [],
            {id(a): 0, id(b): 16},
            outputs,
        ),
        "value": (
            [whole[0], copied(view(a, [2], offset=6), view(x, [2])), whole[1]],
            [Value(view(a, [8]), 0, 2)],
            {id(a): 0},
            outputs,
        ),
        "halo": (
            [
                Step("zero_halo", [image], {}, {"top": 1, "bottom": 1, "left": 1, "right": 0}, ""),
                copied(image, view(buffer(1024, INPUT), image.shape)),
                Step("copy", [view(y, [8])], {"x": image}, {}, "", {"x": (1, 1, 1, 1)}),
                last,
            ],
            [],
            {id(c): 0},
            outputs,
        ),
    }
    return cases[case]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("right", None),
        ("half", "reads what no step"),
        ("every second", "reads what no step"),
        ("outside", "outside its buffer of 32 bytes"),
        ("output", "output 0 is not written whole"),
        ("no output", "output 0 is not written whole"),
        ("input", "writes to an input or a constant"),
        ("shifted", "writes over a part of what it reads"),
        ("arena", "lie on each other"),
        ("value", "overwrites what step 2 still reads"),
        ("halo", "reads what no step"),
    ],
)
def test_verifier(case: str, error: str | None) -> None:
    if error is None:
        verify_plan(*steps_of(case))
        return
    with pytest.raises(PlanError, match=rf"^\[plan\] .*{error}.*\.$"):
        verify_plan(*steps_of(case))


def guarded_plan(halo: int) -> Any:
    """zero_halo around a 2 x 2 image that has no room for it, between two buffers."""
    image = (0, 0, _core.GUARD_BYTES, (1, 1, 2, 2, 16), (64, 64, 32, 16, 1), "float32")
    step = (KERNELS["zero_halo"], [image], [], [halo, 0, 0, 0])
    plan = _core.Plan(ndl.cpu().core, [step], 256 + 2 * _core.GUARD_BYTES, [], [])
    plan.guard([(_core.GUARD_BYTES, 256, 0, 0)])
    return plan


def test_guards_find_what_is_written_outside() -> None:
    guarded_plan(0).run([], [])
    with pytest.raises(
        RuntimeError, match=r"^\[plan\] step 0 'zero_halo' wrote outside of its operands, at a buffer of 256"
    ):
        guarded_plan(1).run([], [])


# -- pauses --------------------------------------------------------------------------------------------------------------


def pausing_plan(guard: bool) -> tuple[Any, NDArray]:
    """Two copies of the input, to two constants that are the halves of one array."""
    held = NDArray(np.zeros(8, "float32"))
    steps = [
        (KERNELS["copy"], [(CONSTANT, i, 16 * i, (4,), (1,), "float32")], [(INPUT, 0, 0, (4,), (1,), "float32")], [])
        for i in (0, 1)
    ]
    plan = _core.Plan(ndl.cpu().core, steps, 0, [((4,), "float32")], [])
    if guard:
        plan.guard([])
    plan.set_constants([held._ref, held._ref])
    return plan, held


@pytest.mark.parametrize("guard", [False, True])
def test_a_run_calls_back_when_its_first_steps_are_done(guard: bool) -> None:
    plan, held = pausing_plan(guard)
    seen: list[tuple[int, float]] = []
    x = NDArray(np.ones(4, "float32"))
    assert plan.run_paused([x._ref], [0, 1, 1, 2], lambda i: seen.append((i, float(held.numpy().sum())))) == []
    assert seen == [(i, 8.0 if guard else s) for i, s in enumerate((0, 4, 4, 8))]  # guarded ones write at the end
    plan.run_paused([x._ref], [], seen.append)
    assert len(seen) == 4 and plan.runs == 2


@pytest.mark.parametrize("guard", [False, True])
def test_what_a_call_back_raises_ends_the_run(guard: bool) -> None:
    plan, held = pausing_plan(guard)
    x = NDArray(np.ones(4, "float32"))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            plan.run_paused([x._ref], [1], lambda i: 1 / i)
    assert (plan.runs, plan.arenas) == (0, 1) and held.numpy().sum() == (8 if guard else 4)
    plan.run_new([x._ref])
    assert plan.runs == 1 and held.numpy().sum() == 8


@pytest.mark.parametrize("places", [[2, 1], [3]])
def test_pauses_come_in_the_order_of_steps(places: list[int]) -> None:
    plan, held = pausing_plan(False)
    with pytest.raises(IndexError, match=r"^\[plan\] pauses expect steps in their order, got"):
        plan.run_paused([held[:4]._ref], places, print)


@pytest.mark.parametrize(("channels", "wrong"), [(4, 0), (8, 4)])
def test_guards_make_nan_of_what_is_read_outside(channels: int, wrong: int) -> None:
    """A batch norm of as many channels on parameters of 4, which it reads as far as parameters of float64 would go."""
    x, out = NDArray(image(2, channels)), NDArray.empty((2, channels), "float32")
    strided = ((2, channels, 1), (channels, 1, 1), "float32")
    params = [(1, i, 0, (4,), (1,), "float32") for i in range(4)]
    step = (KERNELS["batch_norm"], [(3, 0, 0, *strided)], [(2, 0, 0, *strided), *params], [1e-5, 0, 0])
    plan = _core.Plan(ndl.cpu().core, [step], 2 * _core.GUARD_BYTES, *[[((2, channels), "float32")]] * 2)
    plan.guard([])
    plan.set_constants([NDArray(np.ones(4, "float32"))._ref for _ in range(4)])
    plan.run([out._ref], [x._ref])
    assert np.isnan(out.numpy()).sum() == 2 * wrong


def arrays_of(shapes: Sequence[Any], low: float = 0.2, high: float = 2.0) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        np.asarray(rng.integers(0, 2, s.shape), s.dtype) if isinstance(s, Spec) else rng.uniform(low, high, s)
        for s in (getattr(s, "shape", s) if not isinstance(s, Spec) else s for s in shapes)
    ]


SAMPLES = {f"{name}-{i}": (cls, *s) for name, cls in sorted(OPS.items()) for i, s in enumerate(cls.samples())}


def values_of(op: Op, tensors: Sequence[Any]) -> list[Any]:
    out = op(*tensors)
    return list(out) if op.n_out > 1 or isinstance(out, tuple) else [out]


FLOAT64 = [(case, weights) for case, s in SAMPLES.items() for weights in (False, True) if not weights or len(s[2]) > 1]


@pytest.mark.parametrize(("case", "constant"), FLOAT64, ids=[f"{c}-{'weights' if w else 'inputs'}" for c, w in FLOAT64])
def test_float64_plans_are_right(case: str, constant: bool) -> None:
    """Every op on float64, compiled: float64's rounding, or a sentence."""
    cls, attributes, shapes = SAMPLES[case]
    op, arrays = cls(**attributes), arrays_of(shapes, *getattr(cls, "domain", ()))
    make = lambda a, device: Tensor(a, device=device, dtype=str(a.dtype), requires_grad=False)  # noqa: E731
    want = [t.numpy() for t in values_of(op, [make(a, ndl.cpu_numpy()) for a in arrays])]
    given = [make(a, ndl.cpu()) for a in arrays]
    free, fixed = (given[:1], given[1:]) if constant else (given, [])
    exe = ndl.compile(lambda *xs: tuple(values_of(op, [*xs, *fixed])), tuple(free))
    for g, w in zip(exe(*free), want, strict=True):
        g = g.numpy()
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9 * max(1, np.abs(w).max(initial=0)))


def test_an_op_that_reads_a_view_of_its_input_does_not_write_over_it() -> None:
    def pieces(x: Tensor) -> Tensor:
        y = ops.relu(x)
        return ops.where(ops.gt(y, 1.0), y, ops.broadcast_to(y[:, :1], y.shape))

    x = np.random.randn(3, 4).astype("float32") * 2
    y = np.maximum(x, 0)
    np.testing.assert_array_equal(ndl.compile(pieces, (x,))(x), np.where(y > 1, y, y[:, :1]))


EMPTY: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "a halo around no rows": (lambda x, net: net[1](net[0](x)), (1, 16, 0, 5)),
    "a halo around no columns": (lambda x, net: net[1](net[0](x)), (2, 16, 3, 0)),
    "reversed arrays of no columns": (
        lambda x, net: ops.flip(x, 1) @ ops.flip(ops.permute(x, (0, 2, 1)), 2),
        (4, 3, 0),
    ),
}


def test_an_op_whose_result_is_its_input_is_not_written_over() -> None:
    x = np.array(0.5, "float32")  # without axes: the largest along an axis is the input
    exe = ndl.compile(lambda x: ops.exp(ops.max_along(x, 0)[0] * 2.0), (x,))
    assert np.allclose([exe(x), exe(x)], np.exp(1.0)) and x == 0.5


@pytest.mark.parametrize("name", EMPTY)
def test_plans_of_empty_arrays(name: str, guarded: None) -> None:
    f, shape = EMPTY[name]
    net = nn.Sequential(
        nn.Conv(16, 16, 1, stride=2, padding=2, layout="torch"), nn.Conv(16, 32, 3, padding=1, layout="torch")
    ).eval()
    layers, x = net.layers if hasattr(net, "layers") else list(net.children()), np.zeros(shape, "float32")
    want = f(Tensor(x), layers).numpy()
    assert want.size
    np.testing.assert_allclose(ndl.compile(lambda x: f(x, layers), (x,))(x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", ["BatchNorm2d", "LayerNorm", "GroupNorm"])
@pytest.mark.parametrize("count", [3, 5, 17, 33, 1001])
def test_norms_of_equal_numbers_are_exact(layer: str, count: int) -> None:
    """A mean that is off by a rounding would be divided by the root of eps."""
    x = np.full((1, 1, 1, count), np.float32(0.7) / 3, "float32")
    net = {
        "BatchNorm2d": lambda: nn.BatchNorm2d(1),
        "LayerNorm": lambda: nn.LayerNorm((count,)),
        "GroupNorm": lambda: nn.GroupNorm(1, 1),
    }[layer]()
    np.testing.assert_array_equal(net(Tensor(x)).numpy(), np.zeros_like(x))


@pytest.mark.parametrize("slope", [0.01, 0.3])
def test_slopes_of_float64_are_float64(slope: float) -> None:
    import operator_fusion

    net = nn.Sequential(nn.Linear(6, 5, layout="torch"), nn.BatchNorm1d(5), nn.LeakyReLU(slope)).to("float64").eval()
    x = np.random.default_rng(0).standard_normal((9, 6))
    exe = ndl.compile(operator_fusion.fuse(net), (x,))
    np.testing.assert_allclose(exe(x), net(Tensor(x, dtype="float64")).numpy(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("features", "out"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(2,), (2, 4), (0,)])
def test_linear_layers_of_no_features(lead: tuple, features: int, out: int) -> None:
    net, x = (
        nn.Sequential(nn.Linear(features, out, layout="torch"), nn.ReLU()).eval(),
        np.zeros((*lead, features), "float32"),
    )
    want = net(Tensor(x)).numpy()
    assert want.shape == (*lead, out)
    np.testing.assert_array_equal(ndl.compile(net, (x,))(x), want)
