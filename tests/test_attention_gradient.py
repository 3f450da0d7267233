"""Gradients of attention by its own kernel, which keeps no scores: against float64 torch over shapes, masks and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import needle as ndl
from needle import nn, ops
from needle.autograd import Tensor, find_topo_sort
from needle.backend_selection import BACKEND
from needle.ops.common import vjp

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="the numpy backend has no kernels and no executor")
TOLERANCE = 5e-6  # relative to the largest value
SHAPES = [  # of q, k, v
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    ((1, 3), (1, 3), (1, 2)),
    ((33, 7), (33, 7), (33, 5)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 16)),
    ((3, 2, 16, 32), (3, 2, 16, 32), (3, 2, 16, 32)),
    ((1, 40, 17), (1, 150, 17), (1, 150, 1)),
    ((1, 1, 150, 64), (1, 1, 3, 64), (1, 1, 3, 64)),
    ((1, 2, 197, 64), (1, 2, 197, 64), (1, 2, 197, 64)),
    ((1, 1, 300, 48), (1, 1, 513, 48), (1, 1, 513, 40)),
    ((2, 4, 60, 16), (2, 1, 50, 16), (1, 4, 50, 24)),  # batch axes that broadcast
    ((4, 1, 9, 16), (3, 9, 16), (9, 16)),
]
MASKS = ["none", "keys", "bool", "float", "float of each head"]


def draw(*shape: int) -> np.ndarray:
    return np.random.randn(*shape).astype("float32")


def mask_of(kind: str, batch: tuple[int, ...], length: int, source: int) -> np.ndarray | None:
    """Rows without a key are among those of `bool` and `float`."""
    if kind == "none":
        return None
    if kind == "keys":
        keep = np.random.rand(*batch[:1], *(1,) * len(batch), source) > 0.3
        keep[..., 0] = True
        return keep
    shape = (*batch, length, source) if kind == "float of each head" else (length, source)
    hidden = np.random.rand(*shape) > 0.7
    hidden[..., length // 2, :] = True
    return ~hidden if kind == "bool" else np.where(hidden, -np.inf, np.random.randn(*shape)).astype("float32")


def batch_of(arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(a.shape[:-2] for a in arrays))


def expected(arrays: Sequence[np.ndarray], dy: np.ndarray, mask: np.ndarray | None, causal: bool) -> list[np.ndarray]:
    """The result and gradients of q, k, v, by torch in float64."""
    xs = [torch.tensor(a.astype("float64"), requires_grad=True) for a in arrays]
    length, source = arrays[0].shape[-2], arrays[1].shape[-2]
    bias = torch.zeros(length, source, dtype=torch.float64)
    if mask is not None:
        given = torch.tensor(mask)
        bias = bias.masked_fill(~given, -torch.inf) if mask.dtype == bool else bias + given.double()
    if causal:
        bias = bias.masked_fill(~torch.ones(length, source, dtype=torch.bool).tril(), -torch.inf)
    y = F.scaled_dot_product_attention(*xs, attn_mask=bias)
    y.backward(torch.tensor(dy.astype("float64")))
    return [y.detach().numpy(), *(x.grad.numpy() for x in xs)]


def found(xs: Sequence[Tensor], dy: Tensor, mask: np.ndarray | None, causal: bool) -> list[np.ndarray]:
    extra = () if mask is None else (Tensor(mask, dtype=str(mask.dtype), requires_grad=False),)
    y = ops.scaled_dot_product_attention(*xs, *extra, causal=causal)
    y.backward(dy)
    return [y.numpy(), *(x.grad.numpy() for x in xs)]


def error(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """The largest of all, relative to the largest value of each array; NaN where one is not a number."""
    assert [a.shape for a in got] == [a.shape for a in want]
    return max(
        float(np.abs(a - b).max(initial=0)) / max(np.abs(b).max(initial=0), 1e-2)
        for a, b in zip(got, want, strict=True)
    )


def error_of(shapes: Any, kind: str, causal: bool) -> float:
    np.random.seed(0)
    arrays = [draw(*s) for s in shapes]
    batch, length, source = batch_of(arrays), shapes[0][-2], shapes[1][-2]
    mask, dy = mask_of(kind, batch, length, source), draw(*batch, length, shapes[2][-1])
    got = found([Tensor(a) for a in arrays], Tensor(dy, requires_grad=False), mask, causal)
    return error(got, expected(arrays, dy, mask, causal))


@pytest.fixture(params=[1, 2, 5])
def threads(request: Any) -> Any:
    before = ndl.get_num_threads()
    ndl.set_num_threads(request.param)
    yield
    ndl.set_num_threads(before)


@pytest.mark.parametrize("causal", [False, True], ids=["open", "causal"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shapes", SHAPES, ids=lambda s: "x".join(map(str, s[0])))
def test_gradients_are_torchs(shapes: Any, kind: str, causal: bool, threads: None) -> None:
    assert error_of(shapes, kind, causal) <= TOLERANCE


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_kernel_of_every_isa(isa: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_attention_gradient import *\n"
    code += "print(ndl.isa(), max(error_of(s, m, c) for s in SHAPES for m in MASKS for c in (False, True)))"
    env = {**os.environ, "NEEDLE_ISA": isa, "NEEDLE_GUARD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if "is not supported by this CPU" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stderr
    used, worst = done.stdout.split()
    assert used == isa and float(worst) <= TOLERANCE


VIEWS = {
    "heads split from rows": lambda t: t.permute((0, 2, 1, 3)),
    "every second feature": lambda t: t[..., ::2],
    "features first": lambda t: t.permute((0, 1, 3, 2)),
    "backwards": lambda t: t[:, :, ::-1],
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_inputs(view: str) -> None:
    arrays = [draw(2, 6, 6, 40) if "split" in view else draw(2, 3, 24, 24) for _ in range(4)]
    seen = [VIEWS[view](Tensor(a, requires_grad=False)) for a in arrays]
    dense = [np.ascontiguousarray(t.numpy()) for t in seen]
    xs = [Tensor.make_const(t.cached_data, requires_grad=True) for t in seen[:3]]
    assert error(found(xs, seen[3], None, True), expected(dense[:3], dense[3], None, True)) <= TOLERANCE


def test_a_gradient_that_is_one_number_everywhere() -> None:
    arrays = [draw(2, 3, 9, 8) for _ in range(3)]
    y = ops.scaled_dot_product_attention(*(xs := [Tensor(a) for a in arrays]))
    y.sum().backward()
    want = expected(arrays, np.ones((2, 3, 9, 8), "float32"), None, False)
    assert error([y.numpy(), *(x.grad.numpy() for x in xs)], want) <= TOLERANCE


@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("width", [0, 5])
def test_nothing_to_attend_to(sizes: tuple[int, int, int], width: int) -> None:
    heads, length, source = sizes
    xs = [Tensor(draw(heads, n, 4)) for n in (length, source)] + [Tensor(draw(heads, source, width))]
    y = ops.scaled_dot_product_attention(*xs)
    y.backward(Tensor(np.ones(y.shape, "float32")))
    assert [x.grad.shape for x in xs] == [x.shape for x in xs]
    assert not any(x.grad.numpy().any() for x in xs)


def test_a_row_without_keys_has_no_gradient_and_gives_none() -> None:
    arrays, keep = [draw(2, 5, 8) for _ in range(4)], np.ones((5, 5), bool)
    keep[3] = False
    _, dq, dk, dv = found([Tensor(a) for a in arrays[:3]], Tensor(arrays[3]), keep, False)
    rest = [arrays[0][:, [0, 1, 2, 4]], *arrays[1:3]]
    _, want, want_k, want_v = expected(rest, arrays[3][:, [0, 1, 2, 4]], None, False)
    assert not dq[:, 3].any()
    assert error([dq[:, [0, 1, 2, 4]], dk, dv], [want, want_k, want_v]) <= TOLERANCE


@pytest.mark.parametrize("device", [ndl.cpu(), ndl.cpu_numpy()], ids=str)
def test_a_strict_row_without_keys_is_nan_as_softmax_of_a_sum_is(device: Any) -> None:
    arrays, bias = [draw(4, 8) for _ in range(4)], np.zeros((4, 4), "float32")
    bias[2] = -np.inf
    attention = ndl.ops.nn.attention.ScaledDotProductAttention(has_mask=True, strict=True)
    xs = [Tensor(a, device=device) for a in arrays[:3]]
    attention(*xs, Tensor(bias, device=device, requires_grad=False)).backward(Tensor(arrays[3], device=device))
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays[:3]]
    q, k, v = theirs
    (torch.softmax(q @ k.T * 8**-0.5 + torch.tensor(bias), -1) @ v).backward(torch.tensor(arrays[3]))
    for x, t in zip(xs, theirs, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True], ids=["open", "causal"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 1, 7), (1, 3, 5, 7)], ids=str)
def test_a_mask_that_is_learned(shape: tuple[int, ...], causal: bool) -> None:
    arrays = [draw(2, 3, 5, 8), draw(2, 3, 7, 8), draw(2, 3, 7, 4), draw(*shape), draw(2, 3, 5, 4)]
    xs = [Tensor(a) for a in arrays[:4]]
    ops.scaled_dot_product_attention(*xs, causal=causal).backward(Tensor(arrays[4]))
    theirs = [torch.tensor(a.astype("float64"), requires_grad=True) for a in arrays[:4]]
    hidden = ~torch.ones(5, 7, dtype=torch.bool).tril() if causal else torch.zeros(5, 7, dtype=torch.bool)
    bias = theirs[3].masked_fill(hidden, -torch.inf)
    F.scaled_dot_product_attention(*theirs[:3], attn_mask=bias).backward(torch.tensor(arrays[4].astype("float64")))
    assert error([x.grad.numpy() for x in xs], [t.grad.numpy() for t in theirs]) <= TOLERANCE


@pytest.mark.parametrize("place", range(3), ids=["q", "k", "v"])
def test_one_trained_input_among_constants(place: int) -> None:
    arrays = [draw(2, 5, 8) for _ in range(4)]
    xs = [Tensor(a, requires_grad=i == place) for i, a in enumerate(arrays[:3])]
    ops.scaled_dot_product_attention(*xs).backward(Tensor(arrays[3]))
    want = expected(arrays[:3], arrays[3], None, False)
    assert error([xs[place].grad.numpy()], [want[1 + place]]) <= TOLERANCE
    assert [x.grad is None for x in xs] == [i != place for i in range(3)]


@pytest.mark.parametrize("keys", [1, 6, 40])
@pytest.mark.parametrize("hidden", [False, True], ids=["open", "one key"])
def test_nan_stays_where_it_belongs(keys: int, hidden: bool) -> None:
    """In the row of a query and what its head's keys and values get, also where all keys but one are masked."""
    arrays = [draw(2, 6, 8), draw(2, keys, 8), draw(2, keys, 8), draw(2, 6, 8)]
    arrays[0][0, 2, 1] = np.nan
    keep = np.arange(keys)[None] == keys // 2 if hidden else None
    y, dq, *rest = (np.isnan(a).any(-1) for a in found([Tensor(a) for a in arrays[:3]], Tensor(arrays[3]), keep, False))
    assert y.tolist() == dq.tolist() == [[i == 2 for i in range(6)], [False] * 6]
    for lost in rest:
        assert lost[0, keys // 2] and not lost[1].any()


def test_float64_keeps_its_accuracy() -> None:
    arrays = [draw(2, 5, 8).astype("float64") for _ in range(4)]
    xs = [Tensor(a, dtype="float64") for a in arrays[:3]]
    ops.scaled_dot_product_attention(*xs, causal=True).backward(Tensor(arrays[3], dtype="float64"))
    want = expected(arrays[:3], arrays[3], None, True)
    assert error([x.grad.numpy() for x in xs], want[1:]) <= 1e-14


@pytest.mark.parametrize("shared", [False, True], ids=["three tensors", "one tensor as all"])
def test_second_derivatives_through_the_kernel(shared: bool) -> None:
    """Gradients of <direction, gradients> in float32 against float64 torch."""
    arrays, dy = [draw(2, 5, 8) for _ in range(3)], draw(2, 5, 8)
    directions = [draw(2, 5, 8) for _ in range(3)]
    given = 1 if shared else 3
    xs = [Tensor(a) for a in arrays[:given]]
    first = vjp(ops.scaled_dot_product_attention(*(xs * (4 - given))), Tensor(dy, requires_grad=False), xs)
    slope = sum(ops.summation(g * Tensor(d, requires_grad=False)) for g, d in zip(first, directions, strict=False))
    got = vjp(slope, ndl.init.ones(), xs)
    theirs = [torch.tensor(a.astype("float64"), requires_grad=True) for a in arrays[:given]]
    q, k, v = theirs * (4 - given)
    y = torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1) @ v
    grads = torch.autograd.grad(y, theirs, torch.tensor(dy.astype("float64")), create_graph=True)
    total = sum((g * torch.tensor(d)).sum() for g, d in zip(grads, directions, strict=False))
    want = torch.autograd.grad(total, theirs)
    assert error([g.numpy() for g in got], [t.numpy() for t in want]) <= 2e-5


# -- training ------------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Attention of four heads between linear layers, over `hidden` keys fewer than there are."""

    def __init__(self, width: int, causal: bool = False, hidden: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 1)
        self.attention = nn.ScaledDotProductAttention(dropout, causal)
        self.hidden, self.width = hidden, width

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x)
        q, k, v = (ops.split_heads(rows[..., i * self.width : (i + 1) * self.width], 4) for i in range(3))
        mask = ()
        if self.hidden:
            keep = np.arange(x.shape[1]) < x.shape[1] - self.hidden
            mask = (Tensor(keep[None], dtype="bool", requires_grad=False),)
        return self.out(ops.merge_heads(self.attention(q, k, v, *mask)))


def square(y: Tensor) -> Tensor:
    return (y * y).mean()


def test_training_runs_the_kernel() -> None:
    net, x = Attending(16), Tensor(draw(2, 5, 16))
    out = net(x)
    assert "ScaledDotProductAttention" in {t.op.name for t in find_topo_sort([out]) if t.op is not None}
    out.backward(Tensor(draw(2, 5, 1)))
    names = {t.op.name for t in find_topo_sort([net.qkv.weight.grad]) if t.op is not None}
    assert "AttentionGrad" in names and not names & {"Softmax", "SoftmaxGrad"}


@pytest.mark.parametrize(("causal", "hidden"), [(c, n) for c in (False, True) for n in (0, 2)])
def test_a_compiled_step_is_an_eager_one(causal: bool, hidden: int) -> None:
    x, nets, losses = draw(2, 7, 16), [], []
    for compiled in (True, False):
        np.random.seed(3)
        net = Attending(16, causal, hidden)
        optimizer = ndl.optim.SGD(net.parameters(), 0.1)
        step = ndl.compile_step(net, square, optimizer, (x,)) if compiled else None
        for _ in range(3):
            if step is not None:
                losses.append(float(step(x)))
                continue
            optimizer.reset_grad()
            loss = square(net(Tensor(x)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if step is not None:
            assert step.plan.names.count("attention_grad") == 1 and "softmax" not in step.plan.names
        nets.append(net)
    np.testing.assert_allclose(losses[:3], losses[3:], rtol=1e-5)
    for a, b in zip(*(n.parameters() for n in nets), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


def test_a_compiled_step_keeps_no_scores() -> None:
    length, width = 512, 16
    net, x = Attending(width), draw(1, length, width)
    step = ndl.compile_step(net, square, ndl.optim.SGD(net.parameters(), 0.1), (x,))
    step(x)
    assert step.memory.peak < 4 * length * length  # of one head's scores


def test_dropout_trains_as_its_parts() -> None:
    net = Attending(16, dropout=0.5)
    names = {t.op.name for t in find_topo_sort([net(Tensor(draw(2, 5, 16)))]) if t.op is not None}
    assert "Softmax" in names and "ScaledDotProductAttention" not in names
