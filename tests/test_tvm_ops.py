"""Every op's samples through the export to TVM: built, run, and held against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

import tvm
from tvm import relax

import needle as ndl
from needle.autograd import OPS
from needle.op import Op, Spec, Unsupported
from needle.ops.fused.folded import Folded, FoldedBias, FoldedWeight
from needle.ops.nn.conv import Conv2d
from needle.ops.nn.norm import BatchNormTrainGrad
from needle.ops.nn.pool import AdaptiveAvgPool2dGrad, AvgPool2d, AvgPool2dGrad, MaxPool2dGrad
from needle.ops.nn.recurrent import RecurrentGrad
from needle.ops.nn.resize import InterpolateGrad
from needle.ops.shape.join import MakeTuple, Split, TupleGetItem
from needle.tvm import to_tvm_tensor
from needle.tvm.arrays import Array
from needle.tvm.export import is_exported
from needle.tvm.expressions import as_te
from needle.tvm.relax_ops import as_relax
from test_ops import OWN, assert_close, case, float32_exact, run, tensors

TARGET = {"kind": "llvm", "mcpu": "x86-64", "opt-level": 1}  # tests compile more than they run
MADE = {  # ops that only gradients and passes make, which have no samples of their own: op, shapes of inputs
    "max_pool2d": (MaxPool2dGrad((3, 3), (2, 2), (1, 1), (1, 1), True), [(2, 3, 7, 6), (2, 3, 4, 4)]),
    "avg_pool2d": (AvgPool2dGrad(AvgPool2d((3, 3), (2, 2), (1, 1), True, False), (2, 3, 7, 6)), [(2, 3, 4, 4)]),
    "adaptive_avg_pool2d": (AdaptiveAvgPool2dGrad((2, 3, 7, 6)), [(2, 3, 3, 4)]),
    "bilinear": (InterpolateGrad((2, 3, 7, 6), None, "bilinear", False), [(2, 3, 12, 5)]),
    "nearest": (InterpolateGrad((2, 3, 7, 6), (1.7, 1.7), "nearest", False), [(2, 3, 11, 10)]),
    "batch_norm": (BatchNormTrainGrad(1e-5), [(4, 3, 2, 2), (3,), (3,), (3,), (4, 3, 2, 2)]),
    "stack": (Split(1, 3), [(2, 3, 4)]),
    "folded weight": (FoldedWeight(1e-5, 1), [(4, 6, 3, 3), *[(6,)] * 4]),
    "folded weight of groups": (FoldedWeight(1e-5, 1), [(4, 3, 2, 2), *[(6,)] * 4]),
    "folded bias": (FoldedBias(1e-5), [(6, 4), *[(6,)] * 5]),
    "folded no bias": (FoldedBias(1e-5), [(6, 4), *[(6,)] * 4]),
}
EXPORTED = [n for n in OWN if OPS[n].has_expression]
RECURRENT = [(name, i) for name in ("Rnn", "Lstm", "Gru") for i in range(len(OPS[name].samples()))]


def through_tvm(f: Any, xs: list[Any], te: bool = True) -> list[np.ndarray]:
    """The results of f by the default schedules."""
    module = to_tvm_tensor(f, *xs, te=te)
    library = tvm.compile(relax.transform.LegalizeOps()(module), target=tvm.target.Target(TARGET))
    out = relax.VirtualMachine(library, tvm.cpu())["main"](*(tvm.runtime.tensor(x.numpy()) for x in xs))
    return [o.numpy() for o in ([out] if hasattr(out, "numpy") else out)]


def check(op: Any, arrays: list[np.ndarray], te: bool) -> None:
    folded = isinstance(op, Folded)  # computed in numpy everywhere
    want = [ndl.Tensor(op.reference(*arrays))] if folded else run(op, tensors(arrays, True))
    xs = [x.detach() for x in tensors(arrays, False)]
    specs = op.infer(*(Spec(tuple(x.shape), x.dtype) for x in xs))
    got = through_tvm(lambda *a: op(*a), xs, te)
    for a, b, spec in zip(got, want, specs if op.n_out > 1 else [specs], strict=True):
        assert str(a.dtype) == spec.dtype
        assert_close(a.astype("float64"), b.numpy().astype("float64"))


@pytest.mark.parametrize("name", EXPORTED)
def test_samples_as_tensor_expressions(name: str) -> None:
    for i in range(len(OPS[name].samples())):
        op, arrays = case(name, i)
        check(op, float32_exact(arrays), te=True)


@pytest.mark.parametrize("name", [n for n in EXPORTED if as_relax.dispatch(OPS[n]) is not as_relax.dispatch(Op)])
def test_first_sample_as_relax_operators(name: str) -> None:
    op, arrays = case(name, 0)
    check(op, float32_exact(arrays), te=False)


@pytest.mark.parametrize("name", MADE)
def test_ops_without_samples(name: str) -> None:
    op, shapes = MADE[name]
    draw = np.random.rand if isinstance(op, Folded) else np.random.randn  # a variance is positive
    check(op, float32_exact([draw(*shape) for shape in shapes]), te=True)


@pytest.mark.parametrize(("name", "index"), RECURRENT)
def test_gradients_of_recurrences(name: str, index: int) -> None:
    """Their inputs hang together: the outputs are those of the inputs before them."""
    of, arrays = case(name, index)
    arrays = float32_exact(arrays)
    outs = [t.numpy() for t in run(of, tensors(arrays, True))]
    for has_dc in [False, True][: of.states]:
        grads = [np.random.randn(*outs[0].shape) for _ in range(1 + has_dc)]
        check(RecurrentGrad(of, has_dc), float32_exact([*arrays, *outs, *grads]), te=True)


def test_no_op_is_left_out() -> None:
    own = {name: cls for name, cls in OPS.items() if cls.__module__.startswith("needle.ops.")}
    # TVM's results have sizes before they have values
    ours = {name for name, cls in own.items() if not cls.counts and cls.has_expression}
    made = {type(op).__name__ for op, _ in MADE.values()}
    assert ours == {*EXPORTED, *made, RecurrentGrad.__name__, TupleGetItem.__name__, MakeTuple.__name__}


def test_a_row_serves_subclasses_up_to_the_next_decomposition() -> None:
    plain = type("Plain", (Conv2d,), {})
    composed = type("Composed", (plain,), {"decompose": lambda self, x, w: ndl.ops.conv2d(x, w)})
    own = type("Own", (composed,), {})
    as_te.register(own, lambda op, out, x, w: x)
    assert [is_exported(c) for c in (plain, composed, own)] == [True, False, True]
    assert as_te.dispatch(plain) is as_te.dispatch(Conv2d)


def test_numbers_outside_of_a_table_give_nan() -> None:
    weight, numbers = np.random.randn(4, 3).astype("float32"), np.array([1, 7, -1], "int64")
    xs = tensors([numbers, weight], False)
    out = through_tvm(lambda i, w: ndl.ops.embedding(i, w), [x.detach() for x in xs])[0]
    assert (out[0] == weight[1]).all()
    assert np.isnan(out[1:]).all()


def test_arrays_index_as_numpy_does() -> None:
    x = np.random.randn(4, 5, 6).astype("float32")
    a = Array(tvm.te.placeholder(x.shape, "float32"))
    for index in (2, (..., -1), (slice(1, 4, 2), None), (slice(None, None, -2), slice(4, 1, -1), 0)):
        assert a[index].shape == x[index].shape
    assert a.reshape(2, -1, 3).shape == (2, 20, 3)
    with pytest.raises(Unsupported, match="cbrt"):
        np.cbrt(a)
