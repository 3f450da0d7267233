"""Tensors as Python's values: truth, comparison, numbers, text, names of axes, masks; as torch's, and hashed by identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle import nn
from needle.autograd import Unsupported
from needle.backend_selection import BACKEND
from needle.graph import symbolic

A = np.array([[1.0, -2.0, 3.0, 0.0], [0.5, 2.0, -1.0, 4.0], [2.0, 2.0, 1.0, -3.0]], "float32")
I = np.array([[1, -2, 3], [0, 2, 2]], "int64")

OF_BOTH: dict[str, Any] = {  # a function of a float tensor, the same for torch and for needle
    "if": lambda t: "taken" if t[0, 0] < 1 else "not taken",
    "bool": lambda t: [bool(v) for v in (t[0, 0], t[0, 3], t[:1, :1])],
    "not": lambda t: not t[0, 3],
    "float": lambda t: (float(t[1, 0]), float(t[:1, 1:2])),
    "int": lambda t: (int(t[0, 1]), int(t[1, 0])),
    "tolist": lambda t: (t.tolist(), t[0, 0].tolist(), t[:0].tolist()),
    "item": lambda t: t[1, 1].item(),
    "format": lambda t: (f"{t[1, 0]:.3f}", f"{t[1, 1]:8.1e}"),
    "len": lambda t: (len(t), len(t[:0])),
    "none": lambda t: (t == None, t != None, t == "x", None in [t]),  # noqa: E711
    "identity": lambda t: (t in [t], {t: 1}[t], len({t, t[0], t}), [t].index(t)),
    "contains": lambda t: (3.0 in t, 9 in t),
    "eq": lambda t: (t == 2, t != 2, t == t[:1], 2 == t),
    "order": lambda t: (t < 1, t <= 1, t > 1, t >= 1, 1 < t),
    "logic": lambda t: ((t > 0) & (t < 2), (t > 0) | (t < -1), (t > 0) ^ (t > 1), ~(t > 0)),
    "dim": lambda t: (t.sum(dim=1), t.mean(dim=(0, 1)), t.softmax(dim=0), t.var(dim=1, keepdim=True), t.std(dim=0)),
    "axis": lambda t: (t.sum(axis=0, keepdims=True), t.mean(axis=-1), t.argmax(axis=1), t.amax(axis=1)),
    "keepdim": lambda t: (t.argmax(dim=0, keepdim=True), t.argmin(dim=1), t.cumsum(dim=1), t.amin(dim=0, keepdim=True)),
    "shapes": lambda t: (t.unsqueeze(dim=1), t[:1].squeeze(dim=0), t.flip(dims=(0,)), t.logsumexp(dim=1)),
    "max": lambda t: (*t.max(dim=1), *t.min(dim=0, keepdim=True), t.max(), t.max(dim=1).indices),
    "any": lambda t: (t.any(), t.all(), (t > 0).any(dim=1), (t > -9).all(dim=0), t.prod(dim=1), t.norm()),
    "mask": lambda t: (t[t > 0], t[t > 99], t[t[:, 0] > 0.6], t[:, t[0] > 0], t[t[:, 0] > 0.6, 1], t[..., t[0] > 0]),
    "list": lambda t: (t[[0, 2]], t[:, [3, 1]], t[[0, 2], [1, 3]], t[[-1]], t[[0, 1], :, None], t[[]]),
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | ndl.Tensor):
        return ("tensor", tuple(value.shape), str(value.dtype).removeprefix("torch."), value.tolist())
    return tuple(plain(v) for v in value) if isinstance(value, tuple | list) else value


def close(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, tuple | list):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            close(a, b)
    else:
        assert ours == (pytest.approx(theirs) if isinstance(ours, float) else theirs)


@pytest.mark.parametrize("name", OF_BOTH)
def test_as_torch(name: str) -> None:
    close(plain(OF_BOTH[name](ndl.Tensor(A))), plain(OF_BOTH[name](torch.tensor(A))))


@pytest.mark.parametrize("name", ["eq", "order", "list", "max", "contains", "none", "any"])
def test_integers_as_torch(name: str) -> None:
    if name == "any":
        assert ndl.Tensor(I).any() and not ndl.Tensor(I).all()
        return
    i = np.concatenate([I, I[:1]]), I
    make = OF_BOTH[name]
    wide = np.pad(i[0], ((0, 0), (0, 1)))
    close(plain(make(ndl.Tensor(wide))), plain(make(torch.tensor(wide))))


def test_numbers_of_an_index() -> None:
    t = ndl.Tensor(I)
    assert [10, 20, 30][t[1, 1]] == 30 and list(range(t[1, 1])) == [0, 1] and A[t[1, 1], 0] == 2.0
    np.testing.assert_array_equal(ndl.Tensor(A)[t[0, 0], 1:].numpy(), A[1, 1:])
    np.testing.assert_array_equal(ndl.Tensor(A)[t[1]].numpy(), A[[0, 2, 2]])
    np.testing.assert_array_equal(ndl.Tensor(A)[np.array([0, 2])].numpy(), A[[0, 2]])


@pytest.mark.parametrize("left", [np.float32(2), np.float64(2), np.array(2.0), A], ids=["f32", "f64", "0d", "array"])
def test_comparison_with_numpy_on_the_left(left: Any) -> None:
    for got, want in (((left == ndl.Tensor(A)), left == A), ((left < ndl.Tensor(A)), left < A)):
        assert isinstance(got, ndl.Tensor) and got.dtype == "bool"
        np.testing.assert_array_equal(got.numpy(), want)


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "truth of many": (
        lambda t: bool(t),
        ValueError,
        r"\[bool\] expects a tensor of one element, got shape \(3, 4\); use",
    ),
    "truth of none": (
        lambda t: bool(t[:0]),
        ValueError,
        r"\[bool\] expects a tensor of one element, got shape \(0, 4\)",
    ),
    "membership": (lambda t: t in [t[1:], t[:1]], ValueError, r"\[eq\] shapes|\[bool\] expects"),
    "item": (lambda t: t.item(), ValueError, r"\[item\] expects a tensor of one element, got shape \(3, 4\)\."),
    "float": (lambda t: float(t), ValueError, r"\[item\] expects a tensor of one element"),
    "format": (lambda t: f"{t:.3f}", ValueError, r"\[item\] expects a tensor of one element"),
    "index": (lambda t: [1, 2][t[0, 0]], TypeError, r"\[index\] expects whole numbers, got dtype float32\."),
    "len": (lambda t: len(t[0, 0]), TypeError, r"\[len\] expects at least one axis, got shape \(\)\."),
    "order": (lambda t: t < None, TypeError, "not supported between"),
    "float indices": (lambda t: t[t], TypeError, r"\[getitem\] expects whole numbers or a mask, got .* float32\."),
    "mask": (
        lambda t: t[t[0] > 0],
        IndexError,
        r"\[getitem\] a mask of shape \(4,\) does not fit axes 0 and on of shape",
    ),
    "range": (lambda t: t[[0], [7]], (IndexError, ValueError), "index expects numbers|out of bounds"),
    "two names": (
        lambda t: t.sum(dim=0, axis=1),
        TypeError,
        r"\[summation\] expects one name for one argument, got dim, axis",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name: str) -> None:
    f, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        f(ndl.Tensor(A))


def test_gradients_flow_through_masks() -> None:
    x, xt = ndl.Tensor(A), torch.tensor(A, requires_grad=True)
    ndl.ops.summation(x[x > 0] * x[x > 0]).backward()
    (xt[xt > 0] * xt[xt > 0]).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), xt.grad.numpy())


def test_tuples_of_tensors_stay_objects() -> None:
    pair = ndl.ops.make_tuple(ndl.Tensor(A), ndl.Tensor(A))
    assert pair == pair and pair != None and pair in [pair] and bool(pair)  # noqa: E711


class Compares(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x == 2.0) * 1.0 + (x != x)


class Branches(nn.Module):
    def forward(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


def test_recording() -> None:
    x = ndl.Tensor(A)
    net = symbolic(Compares())
    np.testing.assert_array_equal(net(x).numpy(), (A == 2) * 1.0)
    if BACKEND != "np":
        np.testing.assert_array_equal(ndl.compile(Compares(), (x,))(x).numpy(), (A == 2) * 1.0)
    with pytest.raises(Unsupported, match="is not known while recording"):
        symbolic(Branches())


# -- under numpy's backend -----------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "conv": (lambda: nn.Conv(3, 4, 3), (2, 3, 5, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 5, 5)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 2, 2)),
    "batch norm in evaluation": (lambda: nn.BatchNorm1d(4).eval(), (3, 4)),
    "layer norm": (lambda: nn.LayerNorm1d(4), (3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), (3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "instance norm": (lambda: nn.InstanceNorm(4, 1, affine=True, track_running_stats=True), (3, 4, 5)),
    "lstm": (lambda: nn.LSTM(4, 3), (5, 2, 4)),
    "transformer": (lambda: nn.Transformer(4, 8, 1, num_head=2, dim_head=2), (5, 2, 4)),
    "gelu": (nn.GELU, (2, 4)),
}


@pytest.mark.skipif(BACKEND != "np", reason="numpy's rules")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_promote_as_numpy(name: str) -> None:
    make, shape = LAYERS[name]
    for dtype in ("float32", "float64"):
        out: Any = make()(ndl.Tensor(np.random.randn(*shape).astype(dtype)))
        assert (out[0] if isinstance(out, tuple) else out).dtype == dtype


def test_comparison_with_torch() -> None:
    ours, theirs = ndl.Tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    for got, want in (
        (ours == theirs, [True, False]),
        (theirs == ours, [True, False]),
        (ours != theirs, [False, True]),
        (ours < theirs, [False, True]),
        (theirs <= ours, [True, False]),
        (ours + theirs, [2.0, 5.0]),
        (ndl.Tensor(theirs), [1.0, 3.0]),
    ):
        assert got.tolist() == want
    assert ndl.Tensor(torch.tensor([1, 2])).dtype == "int64" and (ours == torch.tensor(2.0)).tolist() == [False, True]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ndl.Tensor(None), r"\[tensor\] expects an array or a number, got None"),
        (lambda: ndl.nn.Linear(4, 3)(torch.ones(2, 4)), "expects .* got torch's Tensor"),
        (lambda: ndl.nn.BatchNorm1d(4)(None), "expects .* got NoneType"),
        (lambda: ndl.nn.ReLU()(np.ones(3)), r"\[relu\] expects needle Tensors, got numpy's ndarray"),
        (lambda: ndl.ops.concat([ndl.Tensor([1.0]), None], 0), r"\[concat\] expects needle Tensors, got NoneType"),
        (lambda: ndl.graph.symbolic(ndl.nn.Sequential(ndl.nn.ReLU()))(None), "input .* expects an array, got NoneType"),
        (lambda: ndl.ops.add(ndl.Tensor([1.0]), [1.0]), r"\[scalar\] expects a number or an array, got list"),
    ],
)
def test_what_is_no_tensor(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()
