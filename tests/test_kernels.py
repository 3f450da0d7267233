"""Every op's samples through the executor: plain and blocked kernels against numpy in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import _core, ops
from needle.autograd import OPS, Op, Spec
from needle.backend_ndarray import array, call
from needle.nn.module import Parameter
from needle.ops.fused.layer import FusedLayer, act_reference
from needle.ops.linalg.basic import Linear
from needle.ops.math.activation import activation_code
from needle.ops.math.elementwise import EWiseAdd, EWiseMul
from needle.ops.nn.conv import Conv2d
from needle.ops.nn.norm import Positive
from needle.targets.cpu.linear import pack_strassen

TOLERANCE = 5e-6


def cases() -> list[Any]:
    found = []
    for name, cls in sorted(OPS.items()):
        for i, (attributes, shapes) in enumerate(cls.samples()):
            op = cls(**attributes)
            single = op.n_out == 1 and all(not isinstance(s, Spec) or s.dtype == "float32" for s in shapes)
            if single and cls.has_kernel():
                found.append(pytest.param(op, shapes, id=f"{name}-{i}"))
    return found


def inputs_for(op: Op, shapes: list[Any]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(shapes))
    low, high = getattr(op, "domain", (-2.0, 2.0))
    arrays = []
    for s in shapes:
        positive = isinstance(s, Positive)
        shape = s.shape if isinstance(s, Spec) else tuple(s)
        arrays.append(rng.uniform(0.1 if positive else low, 2.0 if positive else high, shape).astype("float32"))
    return arrays


def check(got: Any, want: np.ndarray) -> None:
    got, want = np.asarray(got).astype("float64"), want.astype("float64")
    assert got.shape == want.shape
    scale = max(np.abs(want).max(), 1e-30) if want.size else 1.0
    assert np.abs(got - want).max(initial=0) <= TOLERANCE * scale


def planned(op: Op, arrays: list[np.ndarray], blocked: bool) -> tuple[Any, str]:
    """The op's result in an executable, its weights being parameters; `blocked`: images come out of a 1x1 convolution."""
    weights = {i: Parameter(a) for i, a in enumerate(arrays) if i > 0 and op.is_weight(i)}
    data = [a for i, a in enumerate(arrays) if i not in weights]

    def run(*xs: ndl.Tensor) -> ndl.Tensor:
        left = iter(xs)
        values = [weights[i] if i in weights else next(left) for i in range(len(arrays))]
        if blocked:
            for i, v in enumerate(values):
                if i not in weights and len(v.shape) == 4:
                    eye = Parameter(np.eye(v.shape[1], dtype="float32")[:, :, None, None])
                    values[i] = Conv2d()(v, eye)
        return op(*values)

    exe = ndl.compile(run, tuple(data))
    return exe(*data), str(exe.plan)


@pytest.mark.parametrize(("op", "shapes"), cases())
def test_planned_op(op: Op, shapes: list[Any]) -> None:
    arrays = inputs_for(op, shapes)
    want = op(*(ndl.Tensor(a.astype("float64"), device=ndl.cpu_numpy(), requires_grad=False) for a in arrays)).numpy()
    check(planned(op, arrays, False)[0], want)
    if any(a.ndim == 4 for a in arrays):
        check(planned(op, arrays, True)[0], want)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 7, 13, 28])
@pytest.mark.parametrize("channels", [(1, 1), (3, 16), (16, 33), (32, 64), (37, 24), (48, 80)])
@pytest.mark.parametrize("kernel", [(1, 1, 0), (3, 1, 1), (3, 2, 1), (5, 3, 2)])
def test_convolution(kernel: tuple[int, int, int], channels: tuple[int, int], size: int, threads: int) -> None:
    (k, stride, padding), (c, o) = kernel, channels
    rng = np.random.default_rng(k)
    x, w = rng.standard_normal((2, c, size, size + 1)), rng.standard_normal((o, c, k, k))
    b = rng.standard_normal(o)
    op = Conv2d((stride, stride), (padding,) * 4)
    want = op.reference(x, w, b)
    before = ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        check(planned(op, [a.astype("float32") for a in (x, w, b)], False)[0], want)
    finally:
        ndl.set_num_threads(before)


@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "silu", "tanh"])
@pytest.mark.parametrize("geometry", [(3, 1), (3, 2), (5, 1), (5, 2)], ids=lambda g: f"{g[0]}x{g[0]}s{g[1]}")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 14, 17])
def test_depthwise_convolution(size: int, geometry: tuple[int, int], activation: str) -> None:
    """Rows of every length that is cut into parts of other sizes, the last block of channels partly filled."""
    (k, stride), c = geometry, 40
    rng = np.random.default_rng(size)
    op = FusedLayer(Conv2d((stride, stride), (k // 2,) * 4, groups=c), activation, has_bias=True)
    x, w, b = 4 * rng.standard_normal((2, c, 4, size)), rng.standard_normal((c, 1, k, k)), rng.standard_normal(c)
    for blocked, kernel in ((False, "depthwise_blocked"), (True, "conv2d_depthwise")):
        got, plan = planned(op, [a.astype("float32") for a in (x, w, b)], blocked)
        assert kernel in plan
        check(got, op.reference(x, w, b))
    residual = rng.standard_normal(op.infer(*(Spec(a.shape, "float32") for a in (x, w, b))).shape)
    added = dataclasses.replace(op, has_residual=True)
    check(
        planned(added, [a.astype("float32") for a in (x, w, b, residual)], True)[0], added.reference(x, w, b, residual)
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 70])
@pytest.mark.parametrize("channels", [(3, 17), (24, 100)])
@pytest.mark.parametrize("first", [(1, 1), (3, 1), (3, 2)], ids=lambda g: f"{g[0]}x{g[0]}s{g[1]}")
@pytest.mark.parametrize("second", [(3, 1, 1), (3, 2, 1), (5, 2, 1), (2, 3, 1), (3, 1, 2)], ids=str)
def test_convolution_before_depthwise(
    second: tuple[int, int, int], first: tuple[int, int], channels: tuple[int, int], size: int, threads: int
) -> None:
    """One kernel for both, with bands of rows that are kept, skipped by strides, and shared by tasks."""
    (k, stride, dilation), (c, o) = second, channels
    rng = np.random.default_rng(size)
    conv = FusedLayer(Conv2d((first[1],) * 2, (first[0] // 2,) * 4), "silu", has_bias=True)
    depthwise = Conv2d((stride, stride), (dilation * (k // 2),) * 4, (dilation, dilation), groups=o)
    x, w = rng.standard_normal((2, c, size, size + 2)), rng.standard_normal((o, c, first[0], first[0]))
    b, w2 = rng.standard_normal(o), rng.standard_normal((o, 1, k, k))
    weights = [Parameter(a.astype("float32")) for a in (w, b, w2)]
    data = x.astype("float32")
    before = ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        exe = ndl.compile(lambda v: depthwise(conv(v, *weights[:2]), weights[2]), (data,), winograd="off")
        check(exe(data), depthwise.reference(conv.reference(x, w, b), w2))
    finally:
        ndl.set_num_threads(before)
    assert "conv2d_depthwise" in exe.plan.names and "depthwise_blocked" not in exe.plan.names


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (7, 7), (40, 33)])
def test_factors_per_channel(size: tuple[int, int], blocked: bool) -> None:
    """x times a gate per channel, as in squeeze-and-excite: the gate repeats along the pixels of a block."""
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((2, 40, *size)), rng.standard_normal((2, 40, 1, 1))
    for op in (EWiseMul(), EWiseAdd()):
        arrays = [a.astype("float32") for a in (x, gate)]
        check(planned(op, arrays, blocked)[0], op.reference(x, gate))
        check(planned(op, arrays[::-1], blocked)[0], op.reference(gate, x))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32"])
@pytest.mark.parametrize("columns", [1, 3, 16, 63, 64, 65])
def test_rows_that_repeat(columns: int, dtype: str) -> None:
    """A short vector broadcast over many rows, alone and beside operands with gaps, of another dtype, or constant."""
    rng = np.random.default_rng(columns)
    for rows in (1, 2, 9, 700):
        x, v = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((rows, columns), (columns,)))
        tx, tv = (ndl.Tensor(a, dtype=dtype, requires_grad=False) for a in (x, v))
        assert np.array_equal((tx + tv).numpy(), x + v)
        assert np.array_equal((tv * tx).numpy(), v * x)
        wide = ndl.Tensor(np.concatenate([x, x], 1), dtype=dtype, requires_grad=False)
        assert np.array_equal((wide[:, :columns] + tv).numpy(), x + v)
        assert np.array_equal(ndl.ops.where(tx > 0, tx, tv).numpy(), np.where(x > 0, x, v))


@pytest.mark.parametrize("name", ["tanh", "elu"])
def test_zeros_keep_their_signs(name: str) -> None:
    x = np.array([-0.0, 0.0, -1e-30, 1e-30, -1e-40, -0.3, 0.3] * 5, "float32")
    out = ops.tanh(ndl.Tensor(x)) if name == "tanh" else ops.elu(ndl.Tensor(x), -1.0)
    want = np.tanh(x) if name == "tanh" else np.where(x < 0, -np.expm1(x), x)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-6)
    np.testing.assert_array_equal(np.signbit(out.numpy()), np.signbit(want))


def test_exponential_at_the_ends_of_float32() -> None:
    x = np.array(
        [-np.inf, -200, -103.9, -103, -90, -87.4, -1e-8, 0, 1, 88, 88.72, 88.8, 200, np.inf, np.nan], "float32"
    )
    with np.errstate(over="ignore"):
        want = np.exp(x.astype("float64")).astype("float32")
    got = ndl.ops.exp(ndl.Tensor(np.tile(x, 3), requires_grad=False)).numpy()
    assert np.allclose(got, np.tile(want, 3), rtol=3e-7, atol=2e-45, equal_nan=True)


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("layout", ["needle", "torch"])
@pytest.mark.parametrize("sizes", [(1, 2, 32), (2, 14, 64), (7, 32, 96), (33, 1026, 160), (121, 514, 32)], ids=str)
def test_strassen(sizes: tuple[int, int, int], layout: str, threads: int, activation: str) -> None:
    """Also rows that lie in a larger array, an odd number of rows, and columns in an odd number of blocks."""
    m, k, n = sizes
    rng = np.random.default_rng(m)
    x, w, b = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal(n)
    want = act_reference(activation, 0.0, x @ w + b)
    rows = array(np.pad(x, ((0, 0), (3, 5))).astype("float32"))[:, 3 : 3 + k]
    weight = array(np.ascontiguousarray(w.T if layout == "torch" else w).astype("float32"))
    around = array(np.full((m, n + 7), 5.0, "float32"))
    ins = {"a": rows, "packed": pack_strassen(Linear(layout), weight), "bias": array(b.astype("float32"))}
    before = ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        call("matmul_strassen", [around[:, 4 : 4 + n]], **ins, activation=activation_code(activation), alpha=0)
    finally:
        ndl.set_num_threads(before)
    check(around.numpy()[:, 4 : 4 + n], want)
    assert (np.delete(around.numpy(), range(4, 4 + n), 1) == 5).all()


def test_strassen_keeps_rows_and_columns_apart() -> None:
    """Each within its own size: of small rows beside large ones, and of rows and columns of zeros, which padding makes."""
    rng = np.random.default_rng(0)
    m, k, n = 33, 64, 96
    x, w = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    x *= 10.0 ** rng.integers(-30, 15, (m, 1))
    w *= 10.0 ** rng.integers(-5, 5, (1, n))
    x[[2, 20]], w[:, [5, 70]] = 0, 0
    b = np.where(rng.random(n) < 0.5, 0, 1).astype("float32")
    x32, w32, out = x.astype("float32"), w.astype("float32"), array(np.empty((m, n), "float32"))
    ins = {"a": array(x32), "packed": pack_strassen(Linear("needle"), array(w32)), "activation": 0, "alpha": 0}
    call("matmul_strassen", [out], **ins, bias=array(b * 0))
    want = x32.astype("float64") @ w32.astype("float64")
    scale = np.linalg.norm(x32.astype("float64"), axis=1)[:, None] * np.linalg.norm(w32.astype("float64"), axis=0)
    assert (np.abs(out.numpy() - want) <= 1e-6 * scale).all()
    call("matmul_strassen", [out], **ins, bias=array(b))
    assert (out.numpy()[[2, 20]] == b).all() and (out.numpy()[:, [5, 70]] == b[[5, 70]]).all()


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [({}, "strassen"), ({"winograd": "f2"}, "packed"), ({"winograd": "off"}, "packed"), ({"memory": "low"}, "packed")],
    ids=str,
)
def test_linear_layers_with_many_rows_take_strassen(settings: dict[str, str], kernel: str) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((128, 512)).astype("float32"), rng.standard_normal((512, 512)).astype("float32")
    net = ndl.nn.Linear(512, 512, bias=False)
    net.weight.data = ndl.Tensor(w)
    exe = ndl.compile(net.eval(), (x,), **settings)
    assert exe.plan.names == [f"matmul_{kernel}"]
    check(exe(x), x.astype("float64") @ w)
    few = exe(x[:4])
    assert exe.plan.names == ["matmul_packed"]
    check(few, x[:4].astype("float64") @ w)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (0, 5, 3),
        (4, 0, 3),
        (1, 1, 1),
        (15, 257, 33),
        (128, 1000, 10),
        (128, 3072, 100),
        (197, 2048, 96),
        (300, 512, 640),
        (900, 96, 31),
        (1500, 1100, 17),
    ],
)
def test_products_by_rows_columns_and_parts_of_the_terms(m: int, k: int, n: int, threads: int) -> None:
    """Products of packed weights, whatever is shared out among the threads; with all that joins the sums, in place too."""
    rng = np.random.default_rng(0)
    x, w, b, y = (rng.standard_normal(s).astype("float32") for s in ((m, k), (k, n), n, (m, n)))
    packed, bias = array(np.zeros((-(-n // 16), k, 16), "float32")), np.zeros(-(-n // 16) * 16, "float32")
    call("pack_matrix", [packed], b=array(w))
    bias[:n] = b
    sums, before = x.astype("float64") @ w, ndl.get_num_threads()
    ndl.set_num_threads(threads)
    try:
        for activation in ("none", "relu"):
            out = array(y.copy())
            given = {"a": array(x), "packed": packed, "bias": array(bias), "residual": out}
            call("matmul_packed", [out], **given, activation=activation_code(activation), alpha=0)
            want = sums + b + y
            check(out.numpy(), np.maximum(want, 0) if activation == "relu" else want)
    finally:
        ndl.set_num_threads(before)


class TestArguments:
    def test_wrong_number_of_inputs(self) -> None:
        with pytest.raises(ValueError, match=r"\[relu\] expects 1 outputs for 1 inputs, got 1 for 0\."):
            _core.kernels()["relu"]([_core.empty([1], "float32")], [], [])

    def test_wrong_dtype(self) -> None:
        with pytest.raises(TypeError, match=r"\[exp\] has no kernel for dtype int64."):
            _core.kernels()["exp"]([_core.empty([1], "int64")], [_core.empty([1], "int64")], [])

    def test_view_outside_storage(self) -> None:
        a = _core.empty([4], "float32")
        with pytest.raises(ValueError, match="reaches outside its storage"):
            _core.Array(a.storage, [5], [1], 0, "float32")
        with pytest.raises(ValueError, match="reaches outside its storage"):
            _core.Array(a.storage, [2], [-1], 0, "float32")

    def test_too_many_dimensions(self) -> None:
        with pytest.raises(ValueError, match="at most 8 dimensions, got 9"):
            _core.empty([1] * 9, "float32")
