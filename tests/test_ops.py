"""Every op's samples: numpy and kernels against float64, gradients against finite differences; corners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import ops
from needle.autograd import OPS, Op, Spec, Tensor, TensorTuple
from needle.backend_ndarray import FLOATS
from needle.ops.common import vjp
from needle.ops.nn.norm import Positive

TOLERANCE = 5e-6  # of a float32 kernel, relative to the largest value
DIFFERENTIABLE = {"BatchNormTrain": 1, "Lstm": 2, "Gru": 1}  # how many outputs are; the rest is kept for the gradient
in_numpy = pytest.mark.in_numpy
# Flat between jumps: no gradient by definition; or one that is not the derivative.
STEPS = {"Sign", "Floor", "Ceil", "Round", "StraightThrough", "CtcLoss"}

OWN = [n for n, c in OPS.items() if c.__module__.startswith("needle.ops.") and c.samples()]
CASES = [pytest.param(n, i, id=f"{n}-{i}") for n in OWN for i in range(len(OPS[n].samples()))]


def case(name: str, index: int) -> tuple[Op, list[np.ndarray]]:
    """The op of a sample and float64 inputs for it (other dtypes where the sample says so)."""
    attributes, shapes = OPS[name].samples()[index]
    return OPS[name](**attributes), [draw(s, *getattr(OPS[name], "domain", (-2.0, 2.0))) for s in shapes]


def draw(shape: Any, low: float, high: float) -> np.ndarray:
    if isinstance(shape, Spec):
        return (
            (np.random.rand(*shape.shape) * 4).astype(shape.dtype)
            if shape.dtype != "bool"
            else np.random.rand(*shape.shape) > 0.5
        )
    if isinstance(shape, Positive):
        low, high = 0.3, 2.0
    return np.asarray(np.random.uniform(low, high, tuple(shape)))


@in_numpy
@pytest.mark.parametrize("name", [n for n in OWN if OPS[n].like_first])
def test_the_first_input_tells_the_result(name: str) -> None:
    for i in range(len(OPS[name].samples())):
        made, arrays = case(name, i)
        specs = [Spec(a.shape, str(a.dtype)) for a in arrays]
        assert made.infer(*specs) == specs[0]


def tensors(arrays: Sequence[np.ndarray], numpy: bool, strided: bool = False) -> list[Tensor]:
    """Leaves on cpu_numpy in float64, or on the CPU in float32, there also as views with holes."""
    made = []
    for a in arrays:
        floating = a.dtype.kind == "f"
        if numpy:
            made.append(Tensor(a, device=ndl.cpu_numpy(), requires_grad=floating))
            continue
        a = a.astype("float32") if floating else a
        if strided and a.ndim:
            wide = np.repeat(a, 2, axis=-1)
            made.append(Tensor.make_const(ndl.NDArray(wide, dtype=str(a.dtype))[..., ::2], requires_grad=floating))
        else:
            made.append(Tensor(a, dtype=str(a.dtype), requires_grad=floating))
    return made


def items(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, TensorTuple | tuple) else [out]


def run(op: Op, xs: Sequence[Tensor]) -> list[Tensor]:
    return items(op(*xs))


def float32_exact(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same values for both precisions."""
    return [a.astype("float32").astype("float64") if a.dtype.kind == "f" else a for a in map(np.asarray, arrays)]


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max(initial=0) <= tolerance * max(np.abs(want).max(initial=0), 1e-3)


@in_numpy
@pytest.mark.parametrize(("name", "index"), CASES)
def test_infer_gives_shape_and_dtype(name: str, index: int) -> None:
    op, arrays = case(name, index)
    xs = tensors(arrays, numpy=True)
    specs = op.infer(*(Spec(tuple(x.shape), x.dtype) for x in xs))
    for t, spec in zip(run(op, xs), specs if op.n_out > 1 else [specs], strict=True):
        assert Spec(tuple(t.shape), t.dtype) == Spec(*spec)


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize(("name", "index"), CASES)
def test_kernel_agrees_with_float64(name: str, index: int, strided: bool) -> None:
    op, arrays = case(name, index)
    arrays = float32_exact(arrays)
    got = run(op, [x.detach() for x in tensors(arrays, False, strided)])
    for a, b in zip(got, run(op, tensors(arrays, True)), strict=True):
        assert_close(a.numpy().astype("float64"), b.numpy().astype("float64"))


def gradients(op: Op, xs: list[Tensor], weights: list[np.ndarray]) -> list[Tensor | None]:
    """Gradients of sum(weight * output)."""
    outs = run(op, xs)
    total = None
    for out, w in zip(outs, weights, strict=False):
        part = (out * Tensor(w, device=out.device, dtype=out.dtype, requires_grad=False)).sum()
        total = part if total is None else total + part
    one = ndl.init.ones(device=total.device, dtype=total.dtype)
    return list(vjp(total, one, xs))


def differentiable(name: str, op: Op, arrays: list[np.ndarray]) -> bool:
    """False for step functions, and for results that are numbers of things or truth values."""
    outs = run(op, [t.detach() for t in tensors(arrays, True)])
    return name not in STEPS and all(o.dtype in FLOATS for o in outs)


def cotangents(op: Op, arrays: list[np.ndarray]) -> list[np.ndarray]:
    outs = run(op, tensors(arrays, True))
    return [np.random.randn(*t.shape) for t in outs[: DIFFERENTIABLE.get(type(op).__name__)]]


@in_numpy
@pytest.mark.parametrize(("name", "index"), CASES)
def test_gradient_agrees_with_finite_differences(name: str, index: int) -> None:
    op, arrays = case(name, index)
    if not differentiable(name, op, arrays):
        pytest.skip("no gradient by definition")
    weights = cotangents(op, arrays)

    def value(xs: list[np.ndarray]) -> float:
        outs = run(op, [x.detach() for x in tensors(xs, True)])
        return sum(float((o.numpy() * w).sum()) for o, w in zip(outs, weights, strict=False))

    for i, g in enumerate(gradients(op, tensors(arrays, True), weights)):
        if g is None or arrays[i].dtype.kind != "f" or (name == "BatchNormTrainGrad" and i in (1, 2)):
            continue  # the mean and 1 / std there are functions of x
        flat = arrays[i].reshape(-1)
        for j in np.random.permutation(flat.size)[:6]:
            ends = []
            for step in (1e-6, -1e-6):
                moved = [a.copy() for a in arrays]
                moved[i].reshape(-1)[j] += step
                if name == "BatchNormTrainGrad":
                    moved[1:3] = [
                        moved[0].mean(axes_of(moved[0])),
                        1 / np.sqrt(moved[0].var(axes_of(moved[0])) + op.attributes()["eps"]),
                    ]
                ends.append(value(moved))
            want = (ends[0] - ends[1]) / 2e-6
            assert abs(g.numpy().reshape(-1)[j] - want) <= 1e-5 * max(1.0, abs(want), float(np.abs(g.numpy()).max()))


def axes_of(x: np.ndarray) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def assert_gradients_close(got: Sequence[Any], want: Sequence[Any]) -> None:
    largest = max((np.abs(b.numpy()).max(initial=0) for b in want if b is not None), default=0)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        exact = b.numpy()
        if np.abs(exact).max(initial=0) < 1e-10 * largest:  # zero by cancellation, such as that of a key's bias
            assert np.abs(a.numpy()).max() <= 2e-5 * largest
        else:
            assert_close(a.numpy().astype("float64"), exact, 2e-5)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_kernel_gradient_agrees_with_float64(name: str, index: int) -> None:
    op, arrays = case(name, index)
    if not differentiable(name, op, arrays):
        pytest.skip("no gradient by definition")
    arrays = float32_exact(arrays)
    weights = float32_exact(cotangents(op, arrays))
    got, want = (gradients(op, tensors(arrays, numpy), weights) for numpy in (False, True))
    assert_gradients_close(got, want)


# -- corners -------------------------------------------------------------------------------------------------------------

BACKENDS = [pytest.param(True, id="numpy-f64", marks=in_numpy), pytest.param(False, id="cpu-f32")]

SIGNED: dict[str, Any] = {
    "relu": ops.relu,
    "relu6": ops.relu6,
    "clamp_min": lambda x: ops.clamp_min(x, 0.0),
    "clamp_min_of_minus_zero": lambda x: ops.clamp_min(x, -0.0),
    "clamp_max": lambda x: ops.clamp_max(x, 0.0),
    "clamp": lambda x: ops.clamp(x, -0.0, 0.0),
    "leaky_relu": ops.leaky_relu,
    "remainder": lambda x: ops.remainder(x, 2.0),
    "remainder_of_a_negative": lambda x: ops.remainder(x, -2.0),
    "fmod": lambda x: ops.fmod(x, 2.0),
}


@pytest.mark.parametrize("numpy", BACKENDS)
@pytest.mark.parametrize("name", SIGNED)
def test_zeros_keep_their_sign(name: str, numpy: bool) -> None:
    x = np.array([0.0, -0.0] * 9)
    signs = np.signbit(SIGNED[name](tensors([x], numpy)[0]).numpy())
    np.testing.assert_array_equal(signs, np.signbit(x))


def test_elu_keeps_the_sign_of_zero() -> None:
    assert np.signbit(ops.elu(tensors([np.array([-0.0])], True)[0]).numpy()).all()


def test_regions_of_opposite_numbers_have_the_mean_zero() -> None:
    x = np.array([0.375, -0.25, -0.125]).reshape(1, 1, 1, 3)
    assert ops.adaptive_avg_pool2d(tensors([x], True)[0], 1).numpy() == 0


@pytest.mark.parametrize("numpy", BACKENDS)
@pytest.mark.parametrize("unbiased", [True, False], ids=["unbiased", "biased"])
def test_batch_norm_moves_running_statistics(numpy: bool, unbiased: bool) -> None:
    x, mean, var = np.random.randn(4, 3, 5, 6), np.random.randn(3), np.random.rand(3) + 0.5
    ours = tensors([x, mean, var], numpy)
    ops.batch_norm(*ours, training=True, momentum=0.3, unbiased=unbiased)
    count = 4 * 5 * 6
    scale = count / (count - 1) if unbiased else 1
    np.testing.assert_allclose(ours[1].numpy(), 0.7 * mean + 0.3 * x.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours[2].numpy(), 0.7 * var + 0.3 * scale * x.var((0, 2, 3)), rtol=1e-5)


# -- the course's conventions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numpy", BACKENDS)
def test_second_derivative(numpy: bool) -> None:
    x = tensors([np.array([0.3, -0.7, 1.2])], numpy)[0]
    (ops.exp(x) * x).sum().backward()
    x.grad.sum().backward()
    want = (2 + x.numpy()) * np.exp(x.numpy())
    np.testing.assert_allclose(x.grad.numpy(), want, rtol=1e-5)


def test_subtraction_is_two_nodes() -> None:
    a, b = tensors([np.ones(2), np.ones(2)], True)
    order = ndl.autograd.find_topo_sort([a - b])
    assert [t.op.name for t in order if t.op] == ["Negate", "EWiseAdd"]


def test_dilate_appends_zeros_and_ignores_missing_axes() -> None:
    x = tensors([np.arange(6.0).reshape(2, 3)], True)[0]
    out = ops.dilate(x, dilation=1, axes=(0, 5))
    assert out.shape == (4, 3)
    assert (out.numpy()[::2] == x.numpy()).all()
    assert not out.numpy()[1::2].any()
    assert (ops.undilate(out, dilation=1, axes=(0,)).numpy() == x.numpy()).all()


def test_stack_and_split_are_inverse_with_tuple_gradients() -> None:
    xs = tensors([np.random.randn(2, 3) for _ in range(3)], True)
    out = ops.stack(xs, 1)
    assert isinstance(out.op.gradient(out, out), TensorTuple)
    pieces = ops.split(out, 1)
    (pieces[0] * 2 + pieces[2]).sum().backward()
    assert [float(x.grad.numpy().mean()) for x in xs] == [2.0, 0.0, 1.0]


def test_pieces_of_torch_split_and_chunk() -> None:
    x = tensors([np.random.randn(2, 7)], True)[0]
    assert [p.shape for p in ops.split_sizes(x, 3, axis=-1)] == [(2, 3), (2, 3), (2, 1)]
    assert [p.shape for p in ops.chunk(x, 3, 1)] == [(2, 3), (2, 3), (2, 1)]


ERRORS = {
    "softmax": (lambda x: ops.softmax(x, 3), r"\[softmax\] axis 3 is out of range for shape \(2, 5\)\."),
    "matmul": (lambda x: x @ x, r"\[matmul\]"),
    "add": (lambda x: x + ops.transpose(x), r"\[add\] shapes"),
    "reshape": (lambda x: ops.reshape(x, (3, -1)), r"\[reshape\] expects a shape of 10 elements"),
    "linear": (lambda x: ops.linear(x, x[:, :4]), r"\[linear\] weight expects 4 input features"),
    "concat": (lambda x: ops.concat([x, x[:, 0]]), r"\[concat\]"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name: str) -> None:
    f, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        f(tensors([np.zeros((2, 5))], True)[0])


def test_conv_error_names_the_channels() -> None:
    x, w = tensors([np.zeros((1, 32, 8, 8)), np.zeros((4, 64, 3, 3))], True)
    with pytest.raises(ValueError, match=r"^\[conv2d\] weight expects 64 input channels, got 32\.$"):
        ops.conv2d(x, w)
