"""The kernel makers against numpy, the executor against needle's tape, and what learns digits with them."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

import needle as ndl  # noqa: E402
from needle import ops  # noqa: E402
from needle.autograd import Unsupported  # noqa: E402
from needle.course.tvm import kernels, mnist  # noqa: E402
from needle.course.tvm.executor import Executor, gradients, sgd_update, softmax_cross_entropy, variables  # noqa: E402

MNIST = Path(__file__).parents[2] / "shared" / "data" / "mnist"


def random(*shape: int) -> np.ndarray:
    return np.random.standard_normal(shape).astype("float32")


def labels(rows: int, classes: int) -> np.ndarray:
    return np.eye(classes, dtype="float32")[np.random.randint(classes, size=rows)]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def conv(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, w)


A, B = (7, 33), (700, 300)  # one in one thread, one in several
MAKERS: dict[str, tuple[Callable, tuple, list[tuple], Callable]] = {
    "add": (kernels.make_elemwise_add, (B,), [B, B], lambda a, b: a + b),
    "mul": (kernels.make_elemwise_mul, (A,), [A, A], lambda a, b: a * b),
    "add const": (kernels.make_elemwise_add_by_const, (A, 2.5), [A], lambda a: a + 2.5),
    "mul const": (kernels.make_elemwise_mul_by_const, (B, -0.7), [B], lambda a: a * -0.7),
    "relu": (kernels.make_relu, (A,), [A], lambda a: np.maximum(a, 0)),
    "relu gradient": (kernels.make_relu_gradient, (A,), [A, A], lambda a, g: g * (a > 0)),
    "sgd": (kernels.make_sgd_update, (A, 0.3), [A, A], lambda w, g: w - 0.3 * g),
    "broadcast rows": (kernels.make_broadcast_to, ((33,), A), [(33,)], lambda a: np.broadcast_to(a, A)),
    "broadcast": (kernels.make_broadcast_to, ((3, 1), (2, 3, 4)), [(3, 1)], lambda a: np.broadcast_to(a, (2, 3, 4))),
    "sum": (kernels.make_reduce_sum_axis_zero, (A,), [A], lambda a: a.sum(0)),
    "sum of a vector": (kernels.make_reduce_sum_axis_zero, ((9,),), [(9,)], lambda a: a.sum(0, keepdims=True)),
    "softmax": (kernels.make_matrix_softmax, (A,), [A], softmax),
    "conv2d": (kernels.make_conv2d, ((2, 3, 9, 8), (5, 3, 3, 2)), [(2, 3, 9, 8), (5, 3, 3, 2)], conv),
    "default product": (
        lambda *a: kernels.make_matrix_mul(*a, scheduled=False),
        ((33, 7), True, (5, 33), True),
        [(33, 7), (5, 33)],
        lambda a, b: a.T @ b.T,
    ),
}


def check(f: Callable, want: np.ndarray, *arrays: np.ndarray) -> None:
    out = tvm.runtime.empty(want.shape, "float32")
    f(*map(tvm.runtime.tensor, arrays), out)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MAKERS)
def test_kernels(name: str) -> None:
    make, args, shapes, reference = MAKERS[name]
    arrays = [random(*s) for s in shapes]
    check(make(*args, "llvm", "llvm", "f"), reference(*arrays), *arrays)


def test_softmax_cross_entropy_kernel() -> None:
    x, y = random(20, 10) * 40, labels(20, 10)  # so far apart that e ** x overflows
    shifted = x - x.max(1, keepdims=True)
    want = -(y * (shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))).sum(1).mean(keepdims=True)
    check(kernels.make_matrix_softmax_cross_entropy(x.shape, "llvm", "llvm", "f"), want, x, y)


def test_kernels_refuse_shapes() -> None:
    for make, args, text in (
        (kernels.make_matrix_mul, ((2, 3), False, (4, 5), False), "b expects 3 rows, got 4"),
        (kernels.make_broadcast_to, ((3,), (2, 4)), "does not broadcast"),
        (kernels.make_conv2d, ((1, 3, 5, 5), (2, 4, 3, 3)), "expects 3 input channels, got 4"),
    ):
        with pytest.raises(ValueError, match=text):
            make(*args, "llvm", "llvm", "f")


# -- the executor --------------------------------------------------------------------------------------------------------


def network() -> tuple[list, list, Any]:
    """Variables, evaluated nodes (loss, gradients, new weights) and the same in needle, eagerly."""
    x, y, w1, b1, w2, b2 = nodes = variables("x", "y", "w1", "b1", "w2", "b2")
    hidden = ops.relu(x @ w1 + b1)
    loss = softmax_cross_entropy((hidden * hidden + 0.5) @ w2 + b2, y)
    found = gradients(loss, nodes[2:])
    new = [sgd_update(w, g, 0.25) for w, g in zip(nodes[2:], found, strict=True)]

    def eager(values: list[np.ndarray]) -> list[np.ndarray]:
        x, y, *weights = map(ndl.Tensor, values)
        w1, b1, w2, b2 = weights
        hidden = ops.relu(x @ w1 + b1)
        logits = (hidden * hidden + 0.5) @ w2 + b2
        loss = ndl.training.softmax_loss(logits, y)
        loss.backward()
        grads = [w.grad.numpy() for w in weights]
        return [loss.numpy().reshape(1), *grads, *(w.numpy() - 0.25 * g for w, g in zip(weights, grads, strict=True))]

    return nodes, [loss, *found, *new], eager


def values(n: int) -> list[np.ndarray]:
    return [random(n, 20), labels(n, 5), random(20, 12) * 0.3, random(12), random(12, 5) * 0.3, random(5)]


@pytest.mark.skipif(ndl.default_device() == ndl.cpu_numpy(), reason="the eager side runs on needle's kernels")
def test_executor_agrees_with_the_tape_and_keeps_its_plan() -> None:
    nodes, evaluated, eager = network()
    ex = Executor(evaluated, tvm.cpu(0))
    plan, last = None, 0
    for n in (8, 8, 3, 8):
        given = values(n)
        got = ex.run(dict(zip(nodes, given, strict=True)), convert_to_numpy_ret_vals=True)
        for a, b in zip(got, eager(given), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert plan is None or (ex.node_to_arr_map is plan) == (n == last)  # kept while the shapes stay
        plan, last = ex.node_to_arr_map, n
    assert ex.node_to_shape_map[evaluated[0]] == (1,) and ex.node_to_shape_map[nodes[0]] == (8, 20)
    separate = sum(int(np.prod(a.shape)) * 4 for a in ex.node_to_arr_map.values())
    assert 0 < ex.arena_bytes < separate


def test_executor_takes_tvm_arrays_and_gives_fresh_ones() -> None:
    a, b = variables("a", "b")
    ex = Executor([a @ b, ops.reshape(a * 2.0, (-1,))])
    x, y = (tvm.runtime.tensor(random(3, 3)) for _ in range(2))
    first = ex.run({a: x, b: y})
    kept = [f.numpy().copy() for f in first]
    ex.run({a: y, b: x})
    for f, k in zip(first, kept, strict=True):
        np.testing.assert_array_equal(f.numpy(), k)
    np.testing.assert_allclose(kept[0], x.numpy() @ y.numpy(), rtol=1e-5)
    assert kept[1].shape == (9,)


def test_infer_shape_and_memory_plan_before_a_run() -> None:
    x, w = variables("x", "w")
    y = ops.relu(x @ w)
    ex = Executor([ops.softmax(y + 1.0, 1)])
    assert ex.infer_shape({x: (4, 6), w: (6, 3)})[ex.eval_node_list[0]] == (4, 3)
    arrays = ex.memory_plan({x: (4, 6), w: (6, 3)})
    assert len(arrays) == len(ex.steps) - 1 == 3  # all results but the last
    given = {x: random(4, 6), w: random(6, 3)}
    (got,) = ex.run(given, True)
    assert ex.node_to_arr_map is arrays
    np.testing.assert_allclose(got, softmax(np.maximum(given[x] @ given[w], 0) + 1), rtol=1e-5)


def test_executor_errors() -> None:
    x, w, other = variables("x", "w", "other")
    (foreign,) = variables("foreign")
    feed = {x: random(4, 6), w: random(6, 3)}
    with pytest.raises(ValueError, match=r"\[executor\] variable w is not fed"):
        Executor([x @ w]).run({x: feed[x]})
    with pytest.raises(ValueError, match="variables of one call"):
        Executor([x, foreign])
    with pytest.raises(ValueError, match="does not depend on other"):
        loss = softmax_cross_entropy(x @ w, x @ w)
        Executor(gradients(loss, [other])).run({**feed, other: random(2, 2)})
    with pytest.raises(ValueError, match="the loss expects one value, got shape"):
        Executor(gradients(x @ w, [w])).run(feed)
    with pytest.raises(Unsupported, match=r"no kernel for exp .* it has .*MatMul"):
        Executor([ops.exp(x)]).run({x: feed[x]})
    with pytest.raises(ValueError, match="rows"):
        Executor([x @ w]).run({x: random(4, 5), w: feed[w]})


# -- digits --------------------------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> argparse.Namespace:
    usual = {"batch_size": 50, "lr": 0.1, "epochs": 15, "loss": True, "compare": False, "rounds": 3}
    return argparse.Namespace(**(usual | changes))


def test_learning_scikit_learns_digits() -> None:
    pytest.importorskip("sklearn")
    digits = mnist.read_digits(None)
    assert mnist.train("logreg", digits, arguments(epochs=30))["accuracy"] >= 0.92
    assert mnist.train("mlp", digits, arguments(epochs=12))["accuracy"] >= 0.95


@pytest.mark.skipif(not MNIST.is_dir(), reason="no MNIST files beside the repository")
def test_learning_mnist() -> None:
    digits = mnist.read_digits(str(MNIST))
    assert [len(x) for x, _ in digits] == [8000, 2000]
    assert mnist.train("logreg", digits, arguments(epochs=10))["accuracy"] >= 0.92
    assert mnist.train("mlp", digits, arguments(epochs=8))["accuracy"] >= 0.95


def test_epoch_with_scheduled_products_is_eight_times_shorter(capsys: pytest.CaptureFixture) -> None:
    x, y = np.random.random_sample((800, 784)).astype("float32"), np.arange(800) % 10
    digits = mnist.Digits((x, y), (x, y))
    found = mnist.compare([784, *mnist.HIDDEN, 10], digits, arguments(rounds=4), 100)
    with capsys.disabled():
        print("\n784-256-100-10: " + capsys.readouterr().out)
    assert list(found["seconds"]) == ["scheduled", "default", "needle eager", "needle compiled, forward only"]
    assert found["default_over_scheduled"] >= 8


def test_command(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    written = tmp_path / "digits.json"
    assert mnist.main(["-l", "-m", "logreg", "--epochs", "2", "--json", str(written)]) == 0
    assert json.loads(written.read_text())["logreg"]["tested"] == 360
    text = capsys.readouterr().out
    assert text.count("loss ") == 2 and "epoch 2/2" in text and "test accuracy" in text
    assert mnist.main(["--data", str(tmp_path)]) == 1
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["executor", "fashion", "kernels", "mnist", "schedules"])
def test_earlier_paths(name: str) -> None:
    earlier, now = (importlib.import_module(f"needle.{room}.{name}") for room in ("tvm", "course.tvm"))
    here = {k: v for k, v in vars(now).items() if getattr(v, "__module__", "") == now.__name__ and k[0] != "_"}
    assert here and all(getattr(earlier, k) is v for k, v in here.items())


@pytest.mark.parametrize("room", ["tvm", "course.tvm"])
def test_commands_at_both_paths(room: str) -> None:
    for name in ("mnist", "fashion"):
        done = subprocess.run([sys.executable, "-m", f"needle.{room}.{name}", "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and f"python -m needle.course.tvm.{name}" in done.stdout
