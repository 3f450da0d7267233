"""The contract's ops: values and gradients; integers, truths and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import ops
from needle.autograd import Tensor, TensorTuple
from values import close, tensor

# -- the contract's ops ----------------------------------------------------------------------------------------------------

COURSE_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "add": (lambda a, b: ops.add(a, b), lambda a, b: a + b, [(3, 4), (3, 4)]),
    "add_scalar": (lambda a: ops.add_scalar(a, scalar=2.5), lambda a: a + 2.5, [(3, 4)]),
    "multiply": (lambda a, b: ops.multiply(a, b), lambda a, b: a * b, [(3, 4), (3, 4)]),
    "mul_scalar": (lambda a: ops.mul_scalar(a, scalar=2.5), lambda a: a * 2.5, [(3, 4)]),
    "power": (lambda a, b: ops.power(a, b), lambda a, b: a**b, [(3, 4), (3, 4)]),
    "power_scalar": (lambda a: ops.power_scalar(a, scalar=3), lambda a: a**3, [(3, 4)]),
    "divide": (lambda a, b: ops.divide(a, b), lambda a, b: a / b, [(3, 4), (3, 4)]),
    "divide_scalar": (lambda a: ops.divide_scalar(a, scalar=2.5), lambda a: a / 2.5, [(3, 4)]),
    "negate": (lambda a: ops.negate(a), lambda a: -a, [(3, 4)]),
    "matmul": (lambda a, b: ops.matmul(a, b), lambda a, b: a @ b, [(3, 4), (4, 2)]),
    "matmul-batched": (lambda a, b: ops.matmul(a, b), lambda a, b: a @ b, [(6, 6, 3, 4), (4, 2)]),
    "matmul-left": (lambda a, b: ops.matmul(a, b), lambda a, b: a @ b, [(3, 4), (6, 6, 4, 2)]),
    "summation": (lambda a: ops.summation(a), lambda a: a.sum(), [(3, 4, 2)]),
    "summation-axis": (lambda a: ops.summation(a, axes=1), lambda a: a.sum(1), [(3, 4, 2)]),
    "summation-axes": (lambda a: ops.summation(a, axes=(0, 2)), lambda a: a.sum((0, 2)), [(3, 4, 2)]),
    "broadcast_to": (lambda a: ops.broadcast_to(a, shape=(3, 4, 2)), lambda a: np.broadcast_to(a, (3, 4, 2)), [(4, 1)]),
    "reshape": (lambda a: ops.reshape(a, shape=(2, 6)), lambda a: a.reshape(2, 6), [(3, 4)]),
    "transpose": (lambda a: ops.transpose(a), lambda a: a.swapaxes(-1, -2), [(3, 4, 2)]),
    "transpose-axes": (lambda a: ops.transpose(a, axes=(0, 1)), lambda a: a.swapaxes(0, 1), [(3, 4, 2)]),
    "log": (lambda a: ops.log(a), np.log, [(3, 4)]),
    "exp": (lambda a: ops.exp(a), np.exp, [(3, 4)]),
    "relu": (lambda a: ops.relu(a - 1.0), lambda a: np.maximum(a - 1, 0), [(3, 4)]),
    "tanh": (lambda a: ops.tanh(a), np.tanh, [(3, 4)]),
    "logsumexp": (lambda a: ops.logsumexp(a, axes=(0, 1)), lambda a: np.log(np.exp(a).sum((0, 1))), [(3, 4, 2)]),
    "logsoftmax": (lambda a: ops.logsoftmax(a), lambda a: a - np.log(np.exp(a).sum(-1, keepdims=True)), [(3, 4)]),
    "stack": (lambda a, b: ops.stack([a, b], 1), lambda a, b: np.stack([a, b], 1), [(3, 4), (3, 4)]),
    "split": (lambda a: ops.split(a, 1)[2], lambda a: a[:, 2], [(3, 4)]),
    "flip": (lambda a: ops.flip(a, axes=(0, 1)), lambda a: a[::-1, ::-1], [(3, 4)]),
    "undilate": (lambda a: ops.undilate(a, dilation=1, axes=(0, 1)), lambda a: a[::2, ::2], [(4, 6)]),
    "make_tuple": (lambda a, b: ops.tuple_get_item(ops.make_tuple(a, b), 1), lambda a, b: b, [(3,), (4,)]),
}


@pytest.mark.parametrize("name", COURSE_OPS)
def test_contract_op(name: str) -> None:
    f, want, shapes = COURSE_OPS[name]
    assert getattr(ndl, name.partition("-")[0]) is getattr(ops, name.partition("-")[0])
    arrays = [np.random.rand(*s) + 0.5 for s in shapes]
    xs = [Tensor(a) for a in arrays]
    out = f(*xs)
    close(out.numpy(), want(*arrays))
    weight = np.random.randn(*out.shape)
    out.backward(Tensor(weight, dtype=out.dtype))
    for i, x in enumerate(xs):
        for j in np.random.permutation(arrays[i].size)[:4]:
            ends = []
            for step in (1e-5, -1e-5):
                moved = [a.copy() for a in arrays]
                moved[i].flat[j] += step
                ends.append((want(*moved) * weight).sum())
            got = 0.0 if x.grad is None else x.grad.numpy().flat[j]
            close(got, (ends[0] - ends[1]) / 2e-5, 1e-3)


def test_full_reductions_of_ops_are_0_d() -> None:
    x = tensor(3, 4)
    assert ops.summation(x).shape == ops.logsumexp(x).shape == ops.amax(x).shape == ()
    assert ops.summation(x, axes=(0, 1)).shape == ()


def test_gradient_as_tuple() -> None:
    a, b = tensor(2, 3), tensor(3, 4)
    y = a @ b
    grads = y.op.gradient_as_tuple(Tensor(np.ones((2, 4), "float32"), dtype=y.dtype), y)
    assert isinstance(grads, tuple)
    assert [g.shape for g in grads] == [(2, 3), (3, 4)]
    y = ops.exp(a)
    assert [g.shape for g in y.op.gradient_as_tuple(y, y)] == [(2, 3)]


def test_stack_and_split_in_tuples() -> None:
    xs = [tensor(2, 3) for _ in range(4)]
    out = ops.stack(xs, axis=1)
    grad = out.op.gradient(out, out)
    assert isinstance(grad, TensorTuple)
    assert len(grad) == 4
    assert [g.shape for g in grad.tuple()] == [(2, 3)] * 4
    assert len(out.op.gradient_as_tuple(out, out)) == 4
    pieces = ops.split(out, axis=1)
    assert isinstance(pieces, TensorTuple)
    assert pieces.device == out.device
    for piece, x, array in zip(pieces, xs, pieces.numpy(), strict=True):
        close(piece.numpy(), x.numpy())
        close(array, x.numpy())
    (pieces[0] * 2 + pieces[2] * pieces[0]).sum().backward()
    close(xs[0].grad.numpy(), 2 + xs[2].numpy())
    close(xs[1].grad.numpy(), np.zeros((2, 3)))
    close(xs[2].grad.numpy(), xs[0].numpy())
    both = pieces + pieces
    assert isinstance(both, TensorTuple)
    close(both[3].numpy(), 2 * xs[3].numpy())


def test_tuples_pass_gradients_on() -> None:
    a, b = tensor(2), tensor(3)
    t = ops.make_tuple(a, b)
    assert isinstance(t, TensorTuple)
    assert len(t) == 2
    (ops.tuple_get_item(t, 0) * 3).sum().backward()
    close(a.grad.numpy(), [3, 3])


def test_dilate_appends_zeros_and_ignores_missing_axes() -> None:
    x = tensor(2, 3)
    out = ops.dilate(x, dilation=2, axes=(1, 5))
    want = np.zeros((2, 9))
    want[:, ::3] = x.numpy()
    close(out.numpy(), want)
    assert ops.dilate(x, axes=(7,), dilation=3).shape == (2, 3)
    close(ops.undilate(out, dilation=2, axes=(1, 5)).numpy(), x.numpy())
    close(ops.dilate(x, axes=-1, dilation=2).numpy(), want)
    g = np.random.randn(2, 9)
    (grad,) = out.op.gradient_as_tuple(Tensor(g, dtype=out.dtype), out)
    close(grad.numpy(), g[:, ::3])


CONVOLUTIONS = [
    ((3, 14, 14, 8), (3, 3, 8, 16), 1, 1),
    ((3, 14, 14, 8), (3, 3, 8, 16), 1, 0),
    ((3, 14, 14, 2), (3, 3, 2, 5), 2, 1),  # leftover rows and columns
    ((3, 17, 17, 2), (5, 5, 2, 3), 3, 2),
    ((2, 15, 16, 1), (1, 1, 1, 4), 2, 0),
    ((1, 14, 14, 2), (2, 2, 2, 2), 1, 0),
]


@pytest.mark.parametrize(("images", "kernel", "stride", "padding"), CONVOLUTIONS)
def test_conv(images: tuple, kernel: tuple, stride: int, padding: int) -> None:
    torch = pytest.importorskip("torch")
    z, w = np.random.randn(*images), np.random.randn(*kernel)
    tz, tw = (torch.tensor(a, requires_grad=True) for a in (z, w))
    want = torch.conv2d(tz.permute(0, 3, 1, 2), tw.permute(3, 2, 0, 1), None, stride, padding).permute(0, 2, 3, 1)
    g = np.random.randn(*want.shape)
    want.backward(torch.tensor(g))
    x, k = Tensor(z), Tensor(w)
    out = ops.conv(x, k, stride=stride, padding=padding)
    close(out.numpy(), want.detach().numpy(), 1e-4)
    assert [t is u for t, u in zip(out.inputs, (x, k), strict=True)] == [True, True]
    out.backward(Tensor(g))
    close(x.grad.numpy(), tz.grad.numpy(), 1e-4)
    close(k.grad.numpy(), tw.grad.numpy(), 1e-3)
    grads = out.op.gradient_as_tuple(Tensor(g, dtype=out.dtype), out)
    assert [t.shape for t in grads] == [images, kernel]


# -- integers and truths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool"])
def test_integer_tensors(dtype: str) -> None:
    values = np.array([[3, 0, 2], [1, 1, 5]]).astype(dtype)
    x = Tensor(values, requires_grad=False)
    assert x.dtype == dtype
    for f in (ops.eq, ops.ne, ops.ge, ops.gt, ops.le, ops.lt):
        numpy = {"eq": "equal", "ne": "not_equal", "ge": "greater_equal", "gt": "greater", "le": "less_equal"}
        want = getattr(np, numpy.get(f.__name__, "less"))
        for other in (1, 0.5, Tensor(values[::-1].copy()), Tensor([0.5, 1.0, 2.0])):
            got = f(x, other)
            assert got.dtype == "bool"
            assert (got.numpy() == want(values, other.numpy() if isinstance(other, Tensor) else other)).all()
    picked = ops.where(x > 0, x, Tensor(np.zeros_like(values)))
    assert picked.dtype == dtype
    assert (picked.numpy() == np.where(values > 0, values, 0)).all()
    assert (x[1, ::2].numpy() == values[1, ::2]).all()
    assert x[1].dtype == dtype
    assert (ops.take(x, Tensor(np.array([1, 1, 0])), 0).numpy() == values[[1, 1, 0]]).all()
    assert (ops.argmax(x, 1).numpy() == values.argmax(1)).all()
    assert ops.argmax(x, 1).dtype == "int64"
    assert (ops.cumsum(x, 1).numpy() == values.cumsum(1)).all()
    assert ops.cumsum(x, 1).dtype == "int64"
    assert (x.sum(1).numpy() == values.sum(1)).all()
    assert (ops.amax(x, 1).numpy() == values.max(1)).all()
    assert ops.amax(x, 1).dtype == dtype
    assert (ops.stack([x, x], 0).numpy() == np.stack([values, values])).all()
    if dtype == "bool":
        with pytest.raises(ValueError, match="expect numbers, got bools"):
            x @ ops.transpose(x)
        return
    product = x @ ops.transpose(x)
    assert (product.numpy() == values @ values.T).all() and product.dtype == dtype


def test_integer_arithmetic_follows_torch() -> None:
    torch = pytest.importorskip("torch")
    whole, truths = np.array([[3, 1, 2], [1, 4, 5]]), np.array([True, False, True])
    for f in (
        lambda m, x, t: x + 2,
        lambda m, x, t: x * 0.5,
        lambda m, x, t: x / 2,
        lambda m, x, t: 2 / x,
        lambda m, x, t: x + t,
        lambda m, x, t: t * 2,
        lambda m, x, t: t * 0.5,
        lambda m, x, t: t + t,
        lambda m, x, t: t * t,
        lambda m, x, t: x**3,
        lambda m, x, t: x**0,
        lambda m, x, t: x**2,
        lambda m, x, t: x**x,
        lambda m, x, t: x**0.5,
        lambda m, x, t: -x,
        lambda m, x, t: m.eq(x, t),
        lambda m, x, t: x >= 1.5,
        lambda m, x, t: m.exp(x),
        lambda m, x, t: m.log(x),
        lambda m, x, t: m.sqrt(t),
        lambda m, x, t: m.tanh(x),
        lambda m, x, t: m.sigmoid(x),
        lambda m, x, t: m.sin(x),
        lambda m, x, t: m.erf(x),
        lambda m, x, t: m.log1p(x),
        lambda m, x, t: m.floor(x),
        lambda m, x, t: m.relu(x),
        lambda m, x, t: m.clamp(x, 2, 3),
        lambda m, x, t: m.clamp(x, 0.5, 2.5),
        lambda m, x, t: m.where(t, x, 0),
        lambda m, x, t: m.maximum(x, m.negative(x) if m is torch else -x),
    ):
        want = f(torch, torch.tensor(whole), torch.tensor(truths))
        got = f(ops, Tensor(whole, requires_grad=False), Tensor(truths, requires_grad=False))
        assert got.dtype == str(want.dtype).removeprefix("torch.")
        close(got.numpy(), want.numpy())


def test_integer_powers_are_exact() -> None:
    x = Tensor(np.array([1234567, -3]), requires_grad=False)
    assert (x**3).numpy().tolist() == [1234567**3, -27]
    with pytest.raises(
        ValueError, match=r"\[power\] the exponent of integers expects a number of at least 0, got -1\."
    ):
        x**-1


@pytest.mark.parametrize(
    ("a", "b"),
    [((5, 7), (7, 3)), ((2, 1, 5, 7), (3, 7, 600)), ((130, 140), (140, 150)), ((7,), (7, 3)), ((2, 0), (0, 3))],
)
@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_matmul_in_other_dtypes(dtype: str, a: tuple, b: tuple) -> None:
    x, y = ((np.random.randn(*s) * 9).astype(dtype) for s in (a, b))
    got = Tensor(x, device=ndl.cpu(), dtype=dtype) @ Tensor(y, device=ndl.cpu(), dtype=dtype)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.numpy(), x @ y, rtol=1e-12, atol=1e-12)


def test_float64_on_the_cpu() -> None:
    x, w, b = (np.random.randn(*s) for s in ((2, 5), (4, 5), (4,)))
    ours = [Tensor(a, device=ndl.cpu(), dtype="float64") for a in (x, w, b)]
    np.testing.assert_allclose(ops.linear(*ours).numpy(), x @ w.T + b, rtol=1e-13)
    z, k = (Tensor(np.random.randn(*s), device=ndl.cpu(), dtype="float64") for s in ((1, 5, 5, 2), (3, 3, 2, 3)))
    reference = ops.conv(Tensor(z, device=ndl.cpu_numpy()), Tensor(k, device=ndl.cpu_numpy()))
    out = ops.conv(z, k)
    assert out.dtype == "float64"
    np.testing.assert_allclose(out.numpy(), reference.numpy(), rtol=1e-12)
    out.sum().backward()
    assert z.grad.dtype == k.grad.dtype == "float64"


def test_mixed_floats_meet_in_the_larger() -> None:
    a, b = (Tensor(np.random.randn(3, 3), device=ndl.cpu(), dtype=d) for d in ("float32", "float64"))
    assert (a + b).dtype == (a @ b).dtype == ops.linear(a, b).dtype == "float64"
    np.testing.assert_allclose((a @ b).numpy(), a.numpy().astype("float64") @ b.numpy(), rtol=1e-12)
    with pytest.raises(TypeError, match=r"\[softmax_grad\] expects operands of one dtype, got float32 and float64\."):
        ops.softmax(a).op.gradient(b, ops.softmax(a))


@pytest.mark.parametrize("name", ["EWiseAdd", "PowerScalar", "MatMul", "Summation", "Stack", "Split", "Conv"])
def test_op_classes_by_the_courses_names(name: str) -> None:
    assert getattr(ndl.ops, name) is getattr(ndl.ops.ops_mathematic, name) is ndl.autograd.OPS[name]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = ndl.ops.Nothing
    a = ndl.Tensor(np.ones((2, 2)))
    assert isinstance((a + a).op, ndl.ops.EWiseAdd)
    assert isinstance((a - a).inputs[1].op, ndl.ops.Negate)
