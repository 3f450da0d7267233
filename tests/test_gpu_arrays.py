"""Arrays, kernels of arrays and optimizers on GPU devices, against numpy and the CPU's kernels."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.autograd import OPS, Tensor
from needle.backend_ndarray import Device, NDArray, call
from needle.backend_ndarray.kernels import KERNELS, call_map, on_device

DTYPES = ["float32", "float64", "int32", "int64", "bool"]


def values(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    a = np.random.uniform(-3, 3, shape)
    return (a > 0) if dtype == "bool" else a.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7), (2, 1, 3, 4)], ids=str)
def test_arrays_come_back(gpu: Device, shape: tuple[int, ...], dtype: str) -> None:
    a = values(shape, dtype)
    x = NDArray(a, gpu, dtype)
    assert (x.device, x.shape, x.dtype) == (gpu, shape, dtype)
    for got in (x.numpy(), x.copy().numpy(), NDArray(x, ndl.cpu()).numpy(), np.asarray(x)):
        assert got.dtype == a.dtype
        assert np.array_equal(got, a)


@pytest.mark.parametrize("count", [(1 << 20) + 1, (3 << 20) - 5])
def test_large_arrays_come_back(gpu: Device, count: int) -> None:
    """In pieces through pinned memory, of which the last is a part."""
    a = np.arange(count, dtype="float32")
    x = NDArray(a, gpu)
    assert np.array_equal(x.numpy(), a)
    assert np.array_equal(x[::-3].numpy(), a[::-3])


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_and_moves(gpu: Device, dtype: str, to: str) -> None:
    a = values((3, 5), dtype)
    x = NDArray(a, gpu, dtype)
    assert np.array_equal(x.astype(to).numpy(), a.astype(to))
    moved = x.astype(to, ndl.cpu())
    assert moved.device == ndl.cpu()
    assert np.array_equal(moved.numpy(), a.astype(to))
    assert np.array_equal(moved.astype(dtype, gpu).numpy(), a.astype(to).astype(dtype))


def test_views(gpu: Device) -> None:
    a = values((3, 4, 5))
    x = NDArray(a, gpu)
    assert np.array_equal(x.permute((2, 0, 1)).numpy(), a.transpose(2, 0, 1))
    assert np.array_equal(x.flip((0, 2)).numpy(), a[::-1, :, ::-1])
    assert np.array_equal(x[1:, ::2, -3].numpy(), a[1:, ::2, -3])
    assert np.array_equal(x[:, :1].broadcast_to((3, 4, 5)).numpy(), np.broadcast_to(a[:, :1], (3, 4, 5)))
    assert np.array_equal(x.permute((1, 0, 2)).reshape((4, 15)).numpy(), a.transpose(1, 0, 2).reshape(4, 15))
    assert np.array_equal(
        x.pad([(1, 0), (0, 2), (0, 0)], 2.5).numpy(), np.pad(a, [(1, 0), (0, 2), (0, 0)], constant_values=2.5)
    )
    x[1:, ::2, 0] = 7.5
    a[1:, ::2, 0] = 7.5
    x[0] = NDArray(a[1], gpu)
    a[0] = a[1]
    x[:, 1:3] = a[:, 2:4].copy()
    a[:, 1:3] = a[:, 2:4].copy()
    x[1:] = x[:-1]
    a[1:] = a[:-1].copy()
    x.flat[3] = 9
    a.flat[3] = 9
    assert np.array_equal(x.numpy(), a)
    assert float(x[0, 0, 3]) == 9
    assert bool(x[0, 0, 3] == 9)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("shape", [(16, 16), (33, 70), (2, 65, 3, 31), (3, 40, 5, 17)], ids=str)
def test_transposed_copies(gpu: Device, shape: tuple[int, ...], dtype: str) -> None:
    a = values(shape, dtype)
    x = NDArray(a, gpu, dtype)
    for axes in ((1, 0),) if len(shape) == 2 else ((0, 2, 3, 1), (0, 3, 1, 2), (3, 2, 1, 0), (1, 3, 0, 2)):
        assert np.array_equal(x.permute(axes).copy().numpy(), a.transpose(axes))
        wide = NDArray(np.zeros([2 * shape[i] for i in axes]), gpu, dtype)  # into and out of the middle of others
        part = wide[tuple(slice(1, 1 + shape[i]) for i in axes)]
        part[...] = x.permute(axes)
        assert np.array_equal(part.numpy(), a.transpose(axes))
        assert np.count_nonzero(wide.numpy()) == np.count_nonzero(a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fill(gpu: Device, dtype: str) -> None:
    x = NDArray(np.zeros((5, 6)), gpu, dtype)
    for value in (1.0, -2.0, 0.0, math.inf):
        x[1::2, 2:].fill(value)
        want = NDArray(np.zeros((5, 6)), ndl.cpu(), dtype)
        want[1::2, 2:].fill(value)
        assert np.array_equal(x.numpy(), want.numpy())
    for columns, where in itertools.product((15, 16, 48), (np.s_[:], np.s_[1:3], np.s_[:, 16:32], np.s_[:, 1:9])):
        x, want = (NDArray(np.zeros((7, columns)), d, dtype) for d in (gpu, ndl.cpu()))
        for a in (x, want):
            a[where].fill(3.0)
        assert np.array_equal(x.numpy(), want.numpy()), (columns, where)


def test_random_numbers_are_the_hosts(gpu: Device) -> None:
    drawn = []
    for device in (ndl.cpu(), gpu):
        np.random.seed(3)
        made = [ndl.init.randn(3, 4, device=device), ndl.init.rand(5, device=device), ndl.init.randb(6, device=device)]
        assert all(t.device == device for t in made)
        drawn.append([t.numpy() for t in made])
    for a, b in zip(*drawn, strict=True):
        assert np.array_equal(a, b)


def test_course_functions(gpu: Device) -> None:
    assert gpu.__device_name__ == gpu.name
    x, y = values((6, 8)), values((6, 8))
    a, b, out = (gpu.Array(48) for _ in range(3))
    gpu.from_numpy(x, a)
    gpu.from_numpy(y, b)
    read = lambda array, *shape: gpu.to_numpy(array, shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))], 0)  # noqa: E731
    gpu.ewise_add(a, b, out)
    assert np.array_equal(read(out, 6, 8), x + y)
    gpu.scalar_maximum(a, 0.5, out)
    assert np.array_equal(read(out, 6, 8), np.maximum(x, np.float32(0.5)))
    gpu.compact(a, out, (8, 6), (1, 8), 0)
    assert np.array_equal(read(out, 8, 6), x.T)
    gpu.fill(out, 2.0)
    gpu.ewise_setitem(b, out, (2, 3), (8, 2), 1)
    assert np.array_equal(gpu.to_numpy(out, (2, 3), (8, 2), 1), y.reshape(-1)[:6].reshape(2, 3))
    gpu.reduce_sum(a, b, 8)
    np.testing.assert_allclose(gpu.to_numpy(b, (6,), (1,), 0), x.sum(1), rtol=1e-5)


# -- element-wise kernels ------------------------------------------------------------------------------------------------

MAPS = [*KERNELS][: [*KERNELS].index("where") + 1]


def operands(name: str, dtype: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Inputs in the domain of a map, with some equal ones and zeros."""
    count = len(KERNELS[name].inputs)
    arrays = [values(shape, dtype) for _ in range(count)]
    if name in ("log", "sqrt", "rsqrt", "power", "power_scalar") and dtype.startswith("f"):
        arrays = [np.abs(a) + np.array(0.5, dtype) for a in arrays]
    for a in arrays[1:]:
        a.reshape(-1)[::3] = arrays[0].reshape(-1)[::3]
        if name in ("floor_divide", "trunc_divide", "fmod", "remainder") and not dtype.startswith("f"):
            a[a == 0] = 3  # the CPU refuses a divisor of 0
    return arrays


def results(name: str, arrays: list[np.ndarray], dtype: str, device: Device, layout: str, out: str) -> np.ndarray:
    ins = [NDArray(a, device, dtype) for a in arrays]
    if layout == "strided":
        ins = [NDArray(np.repeat(a, 2, axis=-1), device, dtype)[..., ::2] for a in arrays]
    if layout == "broadcast":
        ins[-1] = ins[-1][..., :1].broadcast_to(ins[0].shape)
    made = NDArray(np.zeros(ins[0].shape), device, out)
    attrs = [0.3, 0.9][: len(KERNELS[name].attrs)] if dtype.startswith("f") else [1, 2][: len(KERNELS[name].attrs)]
    call_map(name, made, ins, attrs)
    return made.numpy()


@pytest.mark.parametrize("layout", ["dense", "strided", "broadcast"])
@pytest.mark.parametrize("name", MAPS)
def test_maps(gpu: Device, name: str, layout: str) -> None:
    """As the CPU's kernels, in every dtype; 517 elements are a whole number of no block, vector or wave."""
    for dtype in KERNELS[name].dtypes:
        arrays = operands(name, dtype, (11, 47))
        for out in {dtype, "float32", "bool"} if "eq" in name or "lt" in name or name == "ge" else {dtype}:
            got, want = (results(name, arrays, dtype, d, layout, out) for d in (gpu, ndl.cpu()))
            if got.dtype.kind == "f":
                np.testing.assert_allclose(got, want, rtol=3e-6, atol=2e-6)
            else:
                assert np.array_equal(got, want)


def test_maps_at_the_ends_of_float32(gpu: Device) -> None:
    x = np.array([-np.inf, -200, -104, -90, -1e-40, 0, 1e-40, 1e-30, 88, 89, 200, np.inf, np.nan], "float32")
    for name in ("exp", "log", "tanh", "sigmoid", "erf", "softplus", "sqrt", "floor", "sign", "relu"):
        got, want = (NDArray(np.tile(x, 3), d).ewise(name).numpy() for d in (gpu, ndl.cpu()))
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=2e-38, err_msg=name)


def test_where_takes_a_condition_of_another_dtype(gpu: Device) -> None:
    condition, a, b = values((7, 9), "bool"), values((7, 9)), values((1, 9))
    got = ndl.ops.where(Tensor(condition, device=gpu, dtype="bool"), Tensor(a, device=gpu), Tensor(b, device=gpu))
    assert np.array_equal(got.numpy(), np.where(condition, a, b))


@pytest.mark.parametrize("shape", [(1, 2, 3), (5, 7, 11, 13), (61, 3, 17), (2, 3, 2, 3, 2, 3, 2)], ids=str)
def test_every_element_of_odd_shapes(gpu: Device, shape: tuple[int, ...]) -> None:
    """Places in strided arrays come from multiplications instead of divisions."""
    a = np.arange(math.prod(shape), dtype="int64").reshape(shape)
    x = NDArray(a, gpu, "int64")
    turned = [*range(1, len(shape)), 0]
    both = x.permute(turned).ewise("add", [x.flip((0,)).permute(turned)])
    assert np.array_equal(both.numpy(), (a + a[::-1]).transpose(turned))


# -- reductions ----------------------------------------------------------------------------------------------------------

REDUCED = [
    ((7,), (0,)),
    ((5, 1000), (1,)),
    ((5, 1000), (0,)),
    ((3, 40000), (1,)),
    ((40000, 3), (0,)),
    ((9000, 40), (0,)),
    ((4, 6, 50, 7), (0, 2)),
    ((4, 6, 50, 7), (1, 3)),
    ((300, 301), (0, 1)),
    ((2, 1, 3), (1,)),
    ((3, 0), (1,)),
    ((0, 3), (1,)),
]


@pytest.mark.parametrize("turned", [False, True], ids=["dense", "turned"])
@pytest.mark.parametrize(("shape", "axes"), REDUCED, ids=str)
def test_reductions(gpu: Device, shape: tuple[int, ...], axes: tuple[int, ...], turned: bool) -> None:
    a = values(shape)
    x = NDArray(a, gpu)
    if turned:
        x = NDArray(np.ascontiguousarray(a.T), gpu).permute(range(a.ndim)[::-1])
    exact = a.astype("float64")
    scale = max(np.abs(exact).sum(axes).max(initial=0), 1)
    got = x.reduce("sum", axes, False)
    assert got.shape == exact.sum(axes).shape
    assert np.abs(got.numpy() - exact.sum(axes)).max(initial=0) <= 1e-7 * scale
    if 0 in shape:
        return
    np.testing.assert_allclose(
        x.reduce("mean", axes, True).numpy(), exact.mean(axes, keepdims=True), rtol=1e-6, atol=1e-6
    )
    assert np.array_equal(x.reduce("max", axes, False).numpy(), a.max(axes))
    assert np.array_equal(x.reduce("min", axes, False).numpy(), a.min(axes))


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_reductions_of_other_dtypes(gpu: Device, dtype: str) -> None:
    a = values((3, 5000), dtype) * 1000
    a = a.astype(dtype)
    for axes in ((0,), (1,), (0, 1)):
        x = NDArray(a, gpu, dtype)
        np.testing.assert_allclose(x.reduce("sum", axes, False).numpy(), a.sum(axes), rtol=1e-12)
        assert np.array_equal(x.reduce("max", axes, False).numpy(), a.max(axes))
        assert np.array_equal(x.reduce("min", axes, False).numpy(), a.min(axes))


def test_reductions_keep_nan(gpu: Device) -> None:
    a = values((4, 100))
    a[1, 77], a[2, 3] = np.nan, np.inf
    for axes in ((0,), (1,)):
        for name in ("max", "min", "sum"):
            with np.errstate(invalid="ignore"):
                want = getattr(a, name)(axes)
            assert np.array_equal(np.isnan(NDArray(a, gpu).reduce(name, axes, False).numpy()), np.isnan(want))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 300, 3), (1, 1, 200)], ids=str)
def test_argmax(gpu: Device, shape: tuple[int, ...], axis: int) -> None:
    a = np.random.randint(0, 9, shape).astype("float32")  # many are equal: the first wins
    assert np.array_equal(ndl.ops.argmax(Tensor(a, device=gpu), axis).numpy(), a.argmax(axis))
    a.reshape(-1)[math.prod(shape) // 2 :: 5] = np.nan
    assert np.array_equal(ndl.ops.argmax(Tensor(a, device=gpu), axis).numpy(), a.argmax(axis))


# -- tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [37, 40])
@pytest.mark.parametrize("numbers", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_gather_rows(gpu: Device, dtype: str, numbers: str, width: int) -> None:
    table, rows = values((9, width), dtype), np.array([3, 0, 8, 3, -1, 9], numbers)
    made = NDArray(np.ones((6, width)), gpu, dtype)
    call("gather_rows", [made], table=NDArray(table, gpu, dtype), numbers=NDArray(rows, gpu, numbers))
    assert np.array_equal(made.numpy()[:4], table[rows[:4]])
    outside = made.numpy()[4:]
    assert np.isnan(outside).all() if dtype.startswith("f") else not outside.any()
    turned = NDArray(np.ascontiguousarray(table.T), gpu, dtype).permute((1, 0))
    call("gather_rows", [made], table=turned, numbers=NDArray(rows, gpu, numbers))
    assert np.array_equal(made.numpy()[:4], table[rows[:4]])


COMBINED = {"set": lambda old, new: new, "sum": np.add, "prod": np.multiply, "amax": np.maximum, "amin": np.minimum}


@pytest.mark.parametrize("numbers", ["int32", "int64"])
@pytest.mark.parametrize("reduce", COMBINED)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bool"])
def test_scatter(gpu: Device, dtype: str, reduce: str, numbers: str) -> None:
    rng = np.random.default_rng(0)
    tables, rows = (rng.integers(0, 2, s).astype(dtype) for s in ((3, 7, 37), (3, 37, 4)))
    places = rng.integers(0, 7, (3, 4, 37)).astype(numbers)
    places[:, :, 0] = [5, 0, 5, 2]  # equal ones, in the order of the rows
    made, source = NDArray(tables, gpu, dtype), NDArray(rows, gpu, dtype).permute((0, 2, 1))
    at = {"reduce": list(COMBINED).index(reduce)}
    call("scatter", [made], rows=source, numbers=NDArray(places, gpu, numbers), **at)
    for b, m, d in np.ndindex(places.shape):
        to = (b, places[b, m, d], d)
        tables[to] = COMBINED[reduce](tables[to], rows[b, d, m])
    assert np.array_equal(made.numpy(), tables)
    places[1, 2, 3] = 7
    call("scatter", [made], rows=source, numbers=NDArray(places, gpu, numbers), **at)
    outside = made.numpy()[1, :, 3]
    assert np.isnan(outside).all() if dtype.startswith("f") else not outside.any()
    assert np.isfinite(made.numpy().astype("float64")).sum() == tables.size - 7 * dtype.startswith("f")


NUMBERS = {  # of rows of a table of 7: sorted in one block or several, runs within a piece of 64 and over many
    "none": lambda n: np.full(n, -1),
    "few": lambda n: np.random.randint(-1, 8, n),
    "one": lambda n: np.full(n, 5),
    "sorted": lambda n: np.arange(n) * 7 // n,
    "in turns": lambda n: np.arange(n)[::-1] % 7,
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("shape", [(1, 1), (50, 37), (64, 3), (257, 5), (1100, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scatter_add_rows(gpu: Device, shape: tuple, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in an order that does not change: with threads the other way round the same to the last bit."""
    rows, numbers = values(shape, dtype), NUMBERS[kind](shape[0])
    want = np.zeros((7, shape[1]))
    for row, number in zip(rows, numbers, strict=True):
        if 0 <= number < 7 and number != 2:
            want[number] += row
    found = []
    for order in "01":
        monkeypatch.setenv("NEEDLE_EMULATION_REVERSE", order)
        made = NDArray(np.ones((7, shape[1])), gpu, dtype)
        call("scatter_add_rows", [made], rows=NDArray(rows, gpu, dtype), numbers=NDArray(numbers, gpu), skip=2)
        np.testing.assert_allclose(made.numpy(), want, atol=1e-5 if dtype == "float32" else 1e-12)
        found.append(made.numpy())
    assert np.array_equal(*found)


def test_scatter_add_rows_of_a_large_table_and_strides(gpu: Device) -> None:
    rows = values((300, 20), "float32")
    numbers = np.random.randint(0, 100_000, 300).astype("int32")
    want = np.zeros((100_000, 10))
    np.add.at(want, numbers, rows[::-1, ::2])
    made = NDArray(np.ones((100_000, 10)), gpu)
    call("scatter_add_rows", [made], rows=NDArray(rows, gpu)[::-1, ::2], numbers=NDArray(numbers, gpu), skip=-1)
    np.testing.assert_allclose(made.numpy(), want, atol=1e-5)


# -- optimizers ----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD-needle": {"momentum": 0.9, "weight_decay": 0.01},
    "SGD-torch": {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.2, "rule": "torch"},
    "SGD-nesterov": {"momentum": 0.9, "nesterov": True, "rule": "torch"},
    "SGD-plain": {"dampening": 0.2, "maximize": True, "rule": "torch"},
    "Adam": {"weight_decay": 0.01},
    "Adam-amsgrad": {"amsgrad": True, "betas": (0.5, 0.6)},
    "AdamW": {},
    "RMSprop": {"momentum": 0.9},
    "RMSprop-centered": {"centered": True, "weight_decay": 0.01},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1, "weight_decay": 0.01},
    "Adadelta": {"weight_decay": 0.01, "eps": 1e-3},
    "Adamax": {"weight_decay": 0.01},
    "NAdam": {"weight_decay": 0.01},
    "NAdam-decoupled": {"weight_decay": 0.01, "decoupled_weight_decay": True, "maximize": True},
    "RAdam": {"weight_decay": 0.01},
    "RAdam-rectified": {"betas": (0.5, 0.8)},
    "Lion": {"weight_decay": 0.1},
    "Rprop": {},
    "ASGD": {"lambd": 0.1, "t0": 1},
    "Adafactor": {"weight_decay": 0.1},
}
SIZES = [1, 1023, 1024, 1025, 5000, *range(2, 36)]  # more than one launch takes


def after_steps(kind: str, options: dict[str, Any], device: Device, dtype: str) -> list[np.ndarray]:
    np.random.seed(1)
    params = [ndl.nn.Parameter(np.random.randn(n), device=device, dtype=dtype) for n in SIZES]
    optimizer = getattr(ndl.optim, kind.partition("-")[0])(params, lr=0.05, **options)
    for _ in range(3):
        for p in params:
            p.grad = Tensor(np.random.randn(*p.shape), device=device, dtype=dtype)
        optimizer.step()
    assert all(p.device == device for p in params)
    return [p.numpy() for p in params]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(gpu: Device, kind: str, dtype: str) -> None:
    got, want = (after_steps(kind, OPTIMIZERS[kind], d, dtype) for d in (gpu, ndl.cpu()))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5 if dtype == "float32" else 1e-12, atol=2e-6)


# -- recurrent layers ----------------------------------------------------------------------------------------------------


def recurrent(op: Any, arrays: list[np.ndarray], grads: list[np.ndarray], device: Device) -> list[np.ndarray]:
    """The outputs of a layer's kernel, then those of its gradient's."""
    with on_device(device):
        inputs, given = ([NDArray(a, device) for a in some] for some in (arrays, grads))
        outs = op.compute(*inputs)
        outs = list(outs) if isinstance(outs, tuple) else [outs]
        dx, dgates, state = op.gate_gradients(inputs, outs, given)
        return [a.numpy() for a in (*outs, dx, dgates, *state)]


@pytest.mark.parametrize("options", [{}, {"reverse": True, "layout_of_weight": "torch"}, {"has_bias": True}], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2, 5), (4, 9, 33), (2, 17, 70)], ids=str)
@pytest.mark.parametrize("name", ["Rnn", "Lstm", "Gru"])
def test_recurrent_layers(gpu: Device, name: str, sizes: tuple[int, int, int], options: dict[str, Any]) -> None:
    op = OPS[name](**options)
    steps, batch, size = sizes
    width = op.gates * size
    weight = (width, size) if "layout_of_weight" in options else (size, width)
    shapes = [(steps, batch, width), weight, *[(batch, size)] * op.states, *[(width,)] * op.has_bias]
    arrays = [values(s) / 3 for s in shapes]
    for count in range(1, op.states + 1):  # the gradient of an LSTM's cells may be left out
        grads = [values((steps, batch, size)) for _ in range(count)]
        got, want = (recurrent(op, arrays, grads, d) for d in (gpu, ndl.cpu()))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
