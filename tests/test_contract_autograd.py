"""Tensors and differentiation as the framework's contract has them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import ops
from needle.autograd import NO_GRADIENT, Tensor, find_topo_sort
from needle.backend_selection import BACKEND
from values import close, tensor

REAL = "float64" if BACKEND == "np" else "float32"  # of lists and Python's numbers

# -- tensors -------------------------------------------------------------------------------------------------------------


def test_attributes() -> None:
    x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    assert (x.shape, x.ndim, x.size, x.dtype, len(x)) == ((2, 2), 2, 4, x.dtype, 2)
    assert type(x.dtype) is str
    assert x.dtype == REAL
    assert x.device == ndl.default_device() == (ndl.cpu_numpy() if BACKEND == "np" else ndl.cpu())
    assert x.requires_grad
    assert x.is_leaf()
    assert (x.op, x.inputs, x.grad) == (None, (), None)
    assert x.cached_data is x.realize_cached_data()
    assert isinstance(x.cached_data, ndl.backend_selection.NDArray)
    assert not x.detach().requires_grad
    y = x + 1
    assert y.op is not None
    assert y.inputs[0] is x
    assert not y.is_leaf()


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        Tensor([1.0], require_grad=False)


def test_data_is_a_detached_leaf_over_the_same_memory() -> None:
    x = tensor(3)
    y = x * 2
    assert y.data.op is None
    assert not y.data.requires_grad
    assert y.data.cached_data is y.cached_data
    y.data = Tensor([1.0, 2.0, 3.0], dtype=y.dtype)
    assert y.numpy().tolist() == [1.0, 2.0, 3.0]
    assert y.op is not None  # the tape stays
    x.data = x.data - 0.5 * x.data
    assert x.op is None
    assert x.requires_grad
    with pytest.raises(ValueError, match=r"\[data\] expects .* \(3,\), got .* \(4,\)\."):
        x.data = tensor(4)
    row = Tensor(np.zeros((1, 3), "float32"))
    row.data = Tensor(np.arange(3, dtype="float32"))  # any shape of equal size
    assert row.numpy().tolist() == [[0.0, 1.0, 2.0]]


def test_a_tensor_made_from_an_array_of_another_device_copies_it() -> None:
    here = np.arange(3, dtype="float32")
    a = Tensor(here, device=ndl.cpu())
    b = Tensor(a, device=ndl.cpu_numpy())
    c = Tensor(b, device=ndl.cpu())
    here[0] = b.cached_data[1] = 9.0
    c.cached_data[2] = 9.0
    assert (a.device, b.device, c.device) == (ndl.cpu(), ndl.cpu_numpy(), ndl.cpu())
    assert [t.numpy().tolist() for t in (a, b, c)] == [[0, 1, 2], [0, 9, 2], [0, 1, 9]]
    assert Tensor(b).device == ndl.cpu_numpy()
    assert Tensor(a.cached_data).device == ndl.default_device()
    assert Tensor(Tensor(here, dtype="int64")).dtype == "int64"


def test_dtypes() -> None:
    assert Tensor([1, 2]).dtype == Tensor([1.5]).dtype == Tensor(3).dtype == REAL
    assert Tensor(np.ones(2, "float64")).dtype == ("float64" if BACKEND == "np" else "float32")
    assert Tensor(np.ones(2), dtype="float64").dtype == Tensor([1], dtype=np.float64).dtype == "float64"
    assert [Tensor(np.ones(2, d)).dtype for d in ("int32", "int64", "bool")] == ["int32", "int64", "bool"]
    assert [Tensor(np.ones(2, d)).dtype for d in ("uint8", "float16")] == ["int32", "float32"]


def test_inputs_on_two_devices_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"\[add\] inputs are on different devices"):
        Tensor([1.0], device=ndl.cpu()) + Tensor([1.0], device=ndl.cpu_numpy())


def test_numpy_on_the_left() -> None:
    x = Tensor([1.0, 2.0], dtype="float32")
    for got, want in (
        (np.float32(3) * x, [3, 6]),
        (np.ones(2, "float32") + x, [2, 3]),
        (np.float64(3) - x, [2, 1]),
        (np.ones(2, "float32") / x, [1, 0.5]),
        (2.0**x, [2, 4]),
        (np.eye(2, dtype="float32") @ x, [1, 2]),
    ):
        assert isinstance(got, Tensor)
        close(got.numpy(), want)


@pytest.mark.usefixtures("no_collector")
def test_live_tensors_are_counted() -> None:
    before = ndl.autograd.TENSOR_COUNTER
    x = tensor(4)
    y = ops.exp(x) + x
    assert ndl.autograd.TENSOR_COUNTER == before + 3
    del y
    assert ndl.autograd.TENSOR_COUNTER == before + 1
    del x
    assert ndl.autograd.TENSOR_COUNTER == before


@pytest.mark.parametrize("make", [ndl.optim.SGD, ndl.optim.Adam], ids=["SGD", "Adam"])
def test_optimizers_keep_no_tensors_and_gradients(make: Any) -> None:
    w = ndl.nn.Parameter(np.random.randn(3, 3).astype("float32"))
    x = tensor(4, 3, requires_grad=False)
    opt, counts = make([w], lr=0.01, weight_decay=0.1), []
    for _ in range(4):
        opt.reset_grad()
        ((x @ w) ** 2).sum().backward()
        before = w.grad.numpy()
        opt.step()
        assert (w.grad.numpy() == before).all()
        gc.collect()
        counts.append(ndl.autograd.TENSOR_COUNTER)
    assert len(set(counts[1:])) == 1


# -- backward ------------------------------------------------------------------------------------------------------------


def test_backward_overwrites_gradients() -> None:
    x = tensor(3)
    for _ in range(2):
        (x * 3).sum().backward()
        close(x.grad.numpy(), [3, 3, 3])
    (x * x + x).sum().backward()
    close(x.grad.numpy(), 2 * x.numpy() + 1)


def test_gradient_of_a_part_that_does_not_depend_stays() -> None:
    x, y = tensor(2), tensor(2)
    (x * 2).sum().backward()
    (y * 3).sum().backward()
    close(x.grad.numpy(), [2, 2])
    assert y.grad is not None


def test_backward_from_a_given_gradient() -> None:
    x, g = tensor(2, 3), np.random.randn(2, 3).astype("float32")
    for out_grad in (Tensor(g), g):
        (x * 2).backward(out_grad)
        close(x.grad.numpy(), 2 * g)
    ops.exp(x).backward()  # ones
    close(x.grad.numpy(), np.exp(x.numpy()))
    with pytest.raises(ValueError, match=r"\[backward\] out_grad expects shape \(2, 3\), got \(3, 2\)\."):
        (x * 2).backward(g.T)


def test_gradients_are_tensors_with_a_graph() -> None:
    x = Tensor(np.array([0.5, -1.0, 2.0]))
    (x**3).sum().backward()
    first = x.grad
    assert isinstance(first, Tensor)
    assert first.op is not None
    close(first.numpy(), 3 * x.numpy() ** 2)
    first.sum().backward()
    second = x.grad
    close(second.numpy(), 6 * x.numpy())
    second.sum().backward()
    close(x.grad.numpy(), [6, 6, 6])


def test_shared_nodes_add_up() -> None:
    x, y = tensor(3), tensor(3)
    z = x * y
    (z * z + z + x).sum().backward()
    close(x.grad.numpy(), (2 * x.numpy() * y.numpy() + 1) * y.numpy() + 1, 1e-4)


def test_results_have_gradients_too() -> None:
    x = tensor(3)
    y = x * 3
    loss = (y**2).sum()
    loss.backward()
    close(y.grad.numpy(), 2 * y.numpy())
    y.grad.sum().backward()  # a gradient with a graph, as long as something holds that graph
    close(x.grad.numpy(), np.full(3, 6.0))
    (y * y).sum().backward()
    x.grad = None
    close(y.grad.numpy(), 2 * y.numpy())
    y.grad = None
    assert y.grad is None


@pytest.mark.usefixtures("no_collector")
def test_steps_leave_no_garbage_for_the_collector() -> None:
    w, x = tensor(3, 3), tensor(4, 3, requires_grad=False)
    counts = []
    for _ in range(4):
        w.grad = None
        pieces = ops.split(ops.exp(x @ w), 1)
        (ops.tanh(pieces[0]) * pieces[1]).sum().backward()
        counts.append(ndl.autograd.TENSOR_COUNTER)
    assert counts[1:] == counts[:1] * 3


def test_no_grad_records_nothing() -> None:
    x = tensor(3)
    with ndl.no_grad():
        y = x * 2
    assert y.op is None
    assert not y.requires_grad


def test_backward_under_no_grad_gives_plain_gradients() -> None:
    z, w = tensor(1, 4, 4, 2), tensor(3, 3, 2, 2)
    loss = (ops.conv(z, w) ** 2).sum()
    loss.backward()
    want = [t.grad.numpy() for t in (z, w)]
    with ndl.no_grad():
        loss.backward()
    for t, g in zip((z, w), want, strict=True):
        close(t.grad.numpy(), g)
        assert t.grad.op is None


def test_what_needs_no_gradient_is_a_detached_leaf() -> None:
    a, b = tensor(2, 2, requires_grad=False), tensor(2, 2, requires_grad=False)
    for y in (a + b, a @ b, ops.relu(a), a.sum(), a.reshape((4,)), ops.stack([a, b], 0), a.detach() * 2):
        assert y.op is None
        assert y.inputs == ()
        assert not y.requires_grad
    assert (a + tensor(2, 2)).op is not None


def test_numbers_and_truths_carry_no_gradient() -> None:
    x = tensor(4)
    for y in (x > 0, ops.argmax(x, 0), ops.cast(x, "int64")):
        assert y.dtype in NO_GRADIENT
        assert not y.requires_grad
        assert y.op is None


def test_topological_sort_is_post_order_depth_first() -> None:
    a, b, c = tensor(2), tensor(2), tensor(2)
    d = a * b
    e = d + c
    f = e * d
    assert [id(t) for t in find_topo_sort([f])] == [id(t) for t in (a, b, d, c, e, f)]
    g = c * a
    assert [id(t) for t in find_topo_sort([g, f])] == [id(t) for t in (c, a, g, b, d, e, f)]
    h = a + d  # a is visited before d, which also has it
    assert [id(t) for t in find_topo_sort([h, h])] == [id(t) for t in (a, b, d, h)]


def test_topological_sort_of_a_long_chain() -> None:
    x = y = tensor(1)
    for _ in range(5000):
        y = y + x
    assert len(find_topo_sort([y])) == 5001
    y.backward()
    close(x.grad.numpy(), [5001])


def test_subtraction_is_two_nodes() -> None:
    a, b = tensor(2), tensor(2)
    y = a - b
    assert y.op.name == "EWiseAdd"
    assert y.inputs[0] is a
    assert y.inputs[1].op.name == "Negate"
    assert y.inputs[1].inputs[0] is b
    close(y.numpy(), a.numpy() - b.numpy())
    close((a - 1.5).numpy(), a.numpy() - 1.5)
    close((1.5 - a).numpy(), 1.5 - a.numpy())


class Double(ndl.autograd.TensorOp):
    """An op as course programs write them: no shapes, no attributes, no samples."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def compute(self, a: Any) -> Any:
        return a * self.factor

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad * self.factor


def test_ops_in_the_course_form() -> None:
    x = tensor(3)
    y = Double(2.0)(x)
    close(y.numpy(), 2 * x.numpy())
    (y * x).sum().backward()
    close(x.grad.numpy(), 4 * x.numpy())
    (g,) = y.op.gradient_as_tuple(y, y)
    close(g.numpy(), 4 * x.numpy())
