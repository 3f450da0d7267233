"""Element-wise steps as one: results are those of the steps alone, to the last bit; products that add in their epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
from gpu_devices import emulated, everywhere
from needle import nn, ops
from needle.backend_selection import BACKEND
from needle.executor.executable import Executable

pytestmark = [everywhere, emulated, pytest.mark.skipif(BACKEND == "np", reason="plans")]

UNARY: list[Callable[[Any], Any]] = [
    ops.gelu,
    ops.tanh,
    ops.relu,
    ops.silu,
    lambda x: x * 0.7,
    lambda x: x + 1.5,
    lambda x: ops.exp(x * 0.1),
    lambda x: ops.power(x, 3),
    lambda x: ops.clamp(x, -0.8, 0.9),
    lambda x: ops.leaky_relu(x, 0.2),
    lambda x: ops.cast(ops.gt(x, 0.1), "float32"),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: ops.maximum(x, y),
    lambda x, y: x / (ops.absolute(y) + 0.5),
    lambda x, y: ops.where(ops.gt(x, y), x, y),
    lambda x, y: ops.where(ops.logical_and(ops.gt(x, 0.0), ops.lt(y, 0.5)), y, x * 0.5),
    lambda x, y: ops.where(ops.logical_not(ops.ge(x, y)), x, 0.25),
]


def example(*arrays: np.ndarray) -> tuple[ndl.Tensor, ...]:
    """Inputs on the default device, where a function of them is compiled for."""
    return tuple(ndl.Tensor(a, dtype=str(a.dtype), requires_grad=False) for a in arrays)


def steps_of(exe: Executable, kernel: str) -> int:
    return exe.plan.names.count(kernel)


def compare(f: Any, inputs: tuple[np.ndarray, ...], bits: bool = True) -> Executable:
    """Compiled with its chains and without them."""
    with_chains, without = (ndl.compile(f, example(*inputs), disable=d) for d in ([], ["ElementwiseChain"]))
    for _ in range(2):
        for got, want in zip(np.atleast_1d(with_chains(*inputs)), np.atleast_1d(without(*inputs)), strict=True):
            np.testing.assert_array_equal(got, want)
    return with_chains


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Callable[..., Any]:
    """A random graph of maps over operands that broadcast to one shape."""
    plan = []
    for i in range(int(rng.integers(2, 14))):
        binary = rng.random() < 0.5
        plan.append((binary, int(rng.integers(len(BINARY if binary else UNARY))), *map(int, rng.integers(0, 4 + i, 2))))
    kept = sorted({int(k) for k in rng.integers(4, 4 + len(plan), 2)} | {3 + len(plan)})

    def f(*inputs: Any) -> Any:
        values = [ops.broadcast_to(x, shape) if i == 3 else x for i, x in enumerate(inputs)]
        for binary, k, a, b in plan:
            values.append(BINARY[k](values[a], values[b]) if binary else UNARY[k](values[a]))
        return tuple(values[k] for k in kept)

    return f


SHAPES = [
    (7,),
    (1,),
    (3, 5),
    (4, 1024),
    (2, 3, 33),
    (5, 1, 130),
    (2, 2, 17, 3),
    (3, 1500),
    (600, 3),
    (1, 1, 1),
    (9, 257),
]


@pytest.mark.parametrize("guard", ["", "1"])
@pytest.mark.parametrize("seed", range(40))
def test_random_maps_give_the_same_bits(seed: int, guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEEDLE_GUARD", guard)
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    narrow = [tuple(1 if rng.random() < 0.5 else n for n in shape) for _ in range(2)]
    row = shape[int(rng.integers(len(shape))) :]
    inputs = tuple(rng.standard_normal(s).astype("float32") for s in (shape, narrow[0], row, narrow[1]))
    f = draw(rng, shape)
    with_chains, without = (ndl.compile(f, example(*inputs), disable=d) for d in ([], ["ElementwiseChain"]))
    for got, want in zip(with_chains(*inputs), without(*inputs), strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(with_chains.plan.names) <= len(without.plan.names)


def test_a_chain_is_one_step_and_in_the_report() -> None:
    x = np.linspace(-2, 2, 4 * 300, dtype="float32").reshape(4, 300)
    exe = ndl.compile(lambda x: ops.tanh(ops.exp(x * 0.5) + 1.0) - x, example(x))
    assert exe.plan.names == ["chain"]
    assert [f.pattern for f in exe.report.fired] == ["ElementwiseChain"]
    want = np.tanh(np.exp(x.astype("float64") * 0.5) + 1) - x
    np.testing.assert_allclose(exe(x), want, rtol=1e-6, atol=1e-6)


def test_what_others_read_is_stored() -> None:
    x = np.random.default_rng(0).standard_normal((6, 40)).astype("float32")

    def f(x: Any) -> Any:
        y = ops.exp(x)
        z = ops.tanh(y * 2.0)
        return ops.summation(y, 1), z, ops.softmax(y, -1)

    exe = ndl.compile(f, example(x))
    y = np.exp(x.astype("float64"))
    for got, want in zip(exe(x), (y.sum(1), np.tanh(2 * y), np.exp(y) / np.exp(y).sum(1, keepdims=True)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6)
    assert "chain" in exe.plan.names


def test_other_dtypes_stay_steps_of_their_own() -> None:
    x = np.arange(12).reshape(3, 4)
    exe = ndl.compile(lambda x: (x * 3 + 7) * x, example(x))
    np.testing.assert_array_equal(exe(x), (x * 3 + 7) * x)
    assert "chain" not in exe.plan.names
    f = lambda x, y: ops.cast(ops.cast(x, "int32"), "float32") * y + 0.5  # noqa: E731
    a, b = (np.random.default_rng(1).standard_normal((5, 70)).astype("float32") * 3 for _ in range(2))
    np.testing.assert_array_equal(ndl.compile(f, example(a, b))(a, b), np.trunc(a) * b + np.float32(0.5))


def test_slices_of_one_array() -> None:
    """Halves of a product lie in one memory, element by element apart."""
    x = np.random.default_rng(2).standard_normal((5, 64)).astype("float32")

    def f(x: Any) -> Any:
        y = x * 2.0
        return ops.silu(y[:, :32]) * y[:, 32:]

    y = 2 * x.astype("float64")
    np.testing.assert_allclose(
        ndl.compile(f, example(x))(x), y[:, :32] / (1 + np.exp(-y[:, :32])) * y[:, 32:], atol=1e-5
    )


def test_shifted_reads_are_no_chain() -> None:
    x = np.random.default_rng(2).standard_normal((4, 50)).astype("float32")
    f = lambda x: ops.relu(y := x * 2.0)[:, 1:] + y[:, :-1]  # noqa: E731
    np.testing.assert_array_equal(ndl.compile(f, example(x))(x), np.maximum(2 * x, 0)[:, 1:] + 2 * x[:, :-1])


def test_chains_of_other_shapes_join_in_one_of_theirs() -> None:
    """Of boxes (N, 2) and (M, 2) by pairs: what has the shape (N, M, 2) cannot be read as (N, M)."""

    def overlaps(a: Any, b: Any) -> Any:
        pairs = ops.unsqueeze(a, 1)
        low, high = ops.maximum(pairs[..., :2], b[:, :2]), ops.minimum(pairs[..., 2:], b[:, 2:])
        common = ops.prod(ops.clamp_min(high - low, 0.0), 2)
        sizes = [(t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1]) for t in (a, b)]
        union = ops.unsqueeze(sizes[0], 1) + sizes[1] - common
        share = common / union
        low, high = ops.minimum(pairs[..., :2], b[:, :2]), ops.maximum(pairs[..., 2:], b[:, 2:])
        outer = ops.prod(high - low, 2)
        return share - (outer - union) / outer

    rng = np.random.default_rng(6)
    a, b = (np.sort(rng.random((n, 4)).astype("float32"), 1) for n in (5, 6))
    assert steps_of(compare(overlaps, (a, b)), "chain") > 1


def test_parts_of_one_array_are_chains_of_their_own_size() -> None:
    """Results of several sizes are written into one memory."""
    x = np.random.default_rng(5).standard_normal((2, 3, 6, 4)).astype("float32")

    def f(x: Any) -> Any:
        y = x * 2.0
        return ops.matmul(ops.concat((y, ops.tanh(y[:, :, :1] * 0.5 + 1.0)), 2), ops.transpose(x))

    y = 2 * x.astype("float64")
    want = np.concatenate([y, np.tanh(y[:, :, :1] * 0.5 + 1)], 2) @ x.swapaxes(-1, -2).astype("float64")
    np.testing.assert_allclose(ndl.compile(f, example(x))(x), want, atol=2e-5)


class Residual(nn.Module):
    """x + linear(act(linear(x)))"""

    def __init__(self, width: int, inner: int, first: bool) -> None:
        super().__init__()
        self.a, self.b, self.first = (
            nn.Linear(width, inner, layout="torch"),
            nn.Linear(inner, width, layout="torch"),
            first,
        )

    def forward(self, x: Any) -> Any:
        y = self.b(ops.relu(self.a(x)))
        return x + y if self.first else y + x


@pytest.mark.parametrize("winograd", ["off", "auto"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 130, 257])
@pytest.mark.parametrize("width", [5, 64, 256])
def test_products_add_in_their_epilogue(width: int, rows: int, first: bool, winograd: str) -> None:
    net = Residual(width, 4 * width, first).eval()
    x = np.random.default_rng(rows).standard_normal((1, rows, width)).astype("float32")
    exe = ndl.compile(net, (x,), winograd=winograd)
    a, b, c, d = (t.numpy().astype("float64") for _, t in net.named_tensors())
    weights = [t for t in (a, b, c, d) if t.ndim == 2]
    biases = [t for t in (a, b, c, d) if t.ndim == 1]
    want = x + np.maximum(x @ weights[0].T + biases[0], 0) @ weights[1].T + biases[1]
    assert np.abs(exe(x) - want).max() < 5e-6 * np.abs(want).max()
    assert "add" not in exe.plan.names and len(exe.plan.names) <= 3


def test_a_sum_goes_nowhere_that_its_product_reads() -> None:
    net = nn.Linear(48, 48, layout="torch").eval()
    x = np.random.default_rng(4).standard_normal((70, 48)).astype("float32")

    def f(x: Any) -> Any:
        y = ops.tanh(x)
        return y + net(y)

    y = np.tanh(x.astype("float64"))
    want = y + y @ net.weight.numpy().T.astype("float64") + net.bias.numpy()
    assert np.abs(ndl.compile(f, example(x))(x) - want).max() < 5e-6 * np.abs(want).max()


class Gate(nn.Module):
    """Maps in a row, whose gradients are such, too."""

    def forward(self, x: ndl.Tensor) -> ndl.Tensor:
        return ops.sigmoid(x * 2.0 + 1.0) * x - x / 3.0


def test_training_gives_the_same_bits() -> None:
    """Maps of both passes, in memory that steps share."""

    def train(disable: list[str]) -> list[np.ndarray]:
        np.random.seed(0)
        net = nn.Sequential(
            nn.Linear(20, 64), nn.BatchNorm1d(64), nn.GELU(), Gate(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
        )
        rng = np.random.default_rng(1)
        for _, t in net.named_tensors():
            if t.ndim == 2:
                t.data = ndl.Tensor(rng.standard_normal(t.shape).astype("float32") * 0.2)
        x, y = rng.standard_normal((32, 20)).astype("float32"), rng.integers(0, 3, 32)
        opt = ndl.optim.Adam(net.parameters(), lr=1e-2)
        step = ndl.compile_step(net, nn.SoftmaxLoss(), opt, (x, y), disable=disable)
        for _ in range(4):
            step(x, y)
        assert ("chain" in step.plan.names) == (not disable)
        return [t.numpy() for _, t in net.named_tensors()]

    for got, want in zip(train([]), train(["ElementwiseChain"]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_view_is_as_old_as_what_it_views() -> None:
    """Links move over steps between a value and a view of it, and over the view of another's."""

    def written_before_its_view(x: Any, y: Any) -> Any:
        added = x + x * 0.5
        other = ops.matmul(y, y)
        view = ops.reshape(added, (2, 8))
        return ops.tanh(view) + ops.reshape(ops.amax(view, (1,)), (2, 1)) + ops.reshape(other, (2, 8))

    def view_before_its_writer(x: Any, y: Any) -> Any:
        high = ops.reshape(ops.amax(x, (1,)), (4, 1))
        return (1.0 - y) + ops.broadcast_to(-high, (4, 4))

    rng = np.random.default_rng(0)
    y = rng.standard_normal((4, 4), dtype=np.float32)
    compare(written_before_its_view, (y, y))
    compare(view_before_its_writer, (y, y))
