"""Attention in the spellings of several code bases: what becomes one op, what must not, and values either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import needle as ndl
import operator_fusion as of
from gpu_devices import compiles, emulated, everywhere
from needle import nn, ops
from needle.graph import symbolic
from test_fusion import Net, assert_same, bn, conv, counts, data, reasons

pytestmark = everywhere

WIDTH, HEADS = 12, 3
SIZE = WIDTH // HEADS


def linear(out: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, out, bias=bias, layout="torch")


def core(q: Any, k: Any, v: Any, scale: float = 0.5) -> Any:
    return ops.matmul(ops.softmax(ops.matmul(q, ops.transpose(k)) * scale, -1), v)


def merged(y: Any, x: Any) -> Any:
    return ops.reshape(ops.transpose(y, (1, 2)), (x.shape[0], x.shape[1], WIDTH))


def heads(y: Any, x: Any) -> Any:
    return ops.transpose(ops.reshape(y, (x.shape[0], x.shape[1], HEADS, SIZE)), (1, 2))


def separate(n: Any, x: Any) -> Any:
    return n.out(merged(core(heads(n.q(x), x), heads(n.k(x), x), heads(n.v(x), x)), x))


def packed(n: Any, x: Any) -> Any:
    qkv = ops.permute(ops.reshape(n.qkv(x), (x.shape[0], x.shape[1], 3, HEADS, SIZE)), (2, 0, 3, 1, 4))
    return n.out(merged(core(qkv[0], qkv[1], qkv[2]), x))


def sliced(n: Any, x: Any) -> Any:
    y = n.qkv(x)
    parts = [heads(y[..., i * WIDTH : (i + 1) * WIDTH], x) for i in range(3)]
    return n.out(merged(ops.scaled_dot_product_attention(*parts, causal=True), x))


def keys_permuted(n: Any, x: Any) -> Any:
    """Keys come out of their views with features before rows, as in GPT-2."""
    k = ops.permute(ops.reshape(n.k(x), (x.shape[0], x.shape[1], HEADS, SIZE)), (0, 2, 3, 1))
    weights = ops.softmax(ops.matmul(heads(n.q(x), x), k) / 2.0, -1)
    return n.out(merged(ops.matmul(weights, heads(n.v(x), x)), x))


def query_scaled(n: Any, x: Any) -> Any:
    q = heads(n.q(x) * 0.5, x)
    weights = ops.softmax(ops.matmul(q, ops.transpose(heads(n.k(x), x))), -1)
    return n.out(merged(ops.matmul(weights, heads(n.v(x), x)), x))


def masked(n: Any, x: Any) -> Any:
    scores = ops.matmul(heads(n.q(x), x), ops.transpose(heads(n.k(x), x))) * 0.5 + n.mask
    return n.out(merged(ops.matmul(n.drop(ops.softmax(scores, -1)), heads(n.v(x), x)), x))


def module(n: Any, x: Any) -> Any:
    return n.mha(x, x, x, need_weights=False)[0]


def cross(n: Any, x: Any) -> Any:
    y = x[:, :3] * 2.0
    return n.mha(x, y, y, need_weights=False)[0]


THREE: dict[str, Callable] = {"q": linear, "k": linear, "v": linear, "out": linear}
ONE: dict[str, Callable] = {"qkv": lambda: linear(3 * WIDTH), "out": linear}
MASKED: dict[str, Callable] = {**THREE, "drop": lambda: nn.Dropout(0.0)}


def attention(**kwargs: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **kwargs})


SPELLINGS: dict[str, tuple[Callable, dict[str, Callable]]] = {
    "separate projections": (separate, THREE),
    "joint projection": (packed, ONE),
    "slices of a joint projection": (sliced, ONE),
    "keys permuted": (keys_permuted, THREE),
    "query scaled before": (query_scaled, THREE),
    "mask and dropout": (masked, MASKED),
    "layer": (module, {"mha": attention}),
    "layer, sequence first": (module, {"mha": lambda: attention(batch_first=False)}),
    "layer, cross attention": (cross, {"mha": attention}),
    "layer without biases": (module, {"mha": lambda: attention(bias=False)}),
}


def build(name: str) -> Net:
    forward, layers = SPELLINGS[name]
    net = Net(forward, **{k: make() for k, make in layers.items()})
    if "mask" in name:
        net.mask = ndl.Tensor(np.random.RandomState(0).randn(1, 1, 5, 5).astype("float32"), requires_grad=False)
    return net


@emulated
@pytest.mark.parametrize("name", SPELLINGS)
def test_becomes_one_op(name: str) -> None:
    net = build(name)
    fused = of.fuse(net, example=data(2, 5, WIDTH))
    assert fused.fusion_report.counts == {"MultiHeadAttention": 1}
    assert (
        fused.fusion_report.nodes_after - sum(n.kind == "op" and n.target.name == "GetItem" for n in fused.graph) <= 3
    )
    assert fused.fusion_report.fired[0].delta < 1e-5
    assert_same(net, fused, data(2, 5, WIDTH))


@pytest.mark.parametrize("name", [n for n in SPELLINGS if "mask" not in n])
def test_sizes_stay_free(name: str) -> None:
    net = build(name).eval()
    fused = of.fuse(net)
    runs = [fused, ndl.compile(fused, (data(2, 5, WIDTH),))] if compiles() else [fused]
    for shape in ((2, 5, WIDTH), (1, 1, WIDTH), (3, 17, WIDTH)):
        if name == "layer, cross attention" and shape[1] < 3:
            continue
        x = data(*shape, seed=3)
        want = net(x).numpy()
        for run in runs:
            np.testing.assert_allclose(run(x).numpy(), want, rtol=1e-5, atol=1e-5)


def test_dropout_follows_the_mode() -> None:
    net = build("mask and dropout")
    net.drop = nn.Dropout(0.5)
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"MultiHeadAttention": 1}
    x = data(2, 5, WIDTH)
    net.train()
    np.random.seed(3)
    want = net(x).numpy()
    np.random.seed(3)
    np.testing.assert_allclose(fused(x).numpy(), want, rtol=1e-5, atol=1e-5)
    assert np.abs(fused(x).numpy() - want).max() > 1e-3
    net.eval()
    np.testing.assert_allclose(fused(x).numpy(), net(x).numpy(), rtol=1e-5, atol=1e-5)


ROWS: dict[str, tuple[Any, ...]] = {  # of the mask's five rows, those that hide every key
    "all": (slice(None),),
    "some": (slice(1, 3),),
}
LOW = {"-inf": -np.inf, "minimum": float(np.finfo("float32").min), "-1e9": -1e9}


@pytest.mark.parametrize("spelling", ["written out", "op"])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_without_keys_are_as_in_the_unfused_form(rows: str, low: str, spelling: str) -> None:
    """Eager, with a gradient, and compiled: -inf leaves no key (NaN, as softmax of the sum gives; zeros in torch's op)."""

    def forward(n: Any, x: Any) -> Any:
        if spelling == "op":
            return ops.scaled_dot_product_attention(n.a(x), n.b(x), x, n.mask)
        return core_with_mask(n.a(x), n.b(x), x, n.mask)

    net = Net(forward, a=linear(), b=linear())
    mask = np.zeros((1, 5, 5), "float32")
    mask[:, ROWS[rows][0]] = LOW[low]
    net.mask = ndl.Tensor(mask, requires_grad=False)
    fused = of.fuse(net)
    assert spelling == "op" or fused.fusion_report.counts["ScaledDotProductAttention"] == 1
    x = data(2, 5, WIDTH)
    frozen = ndl.Tensor(x.numpy(), requires_grad=False)
    q, k, v = (t.numpy().astype("float64") for t in (net.a(x), net.b(x), x))
    scores = (q @ k.swapaxes(1, 2) / (0.5**-1 if spelling != "op" else WIDTH**0.5)).astype("float32") + mask
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = weights / weights.sum(-1, keepdims=True) @ v
    if spelling == "op":
        want = np.nan_to_num(want)
    found = [net(x), fused(x), fused(frozen)]
    for p in net.parameters():
        p.requires_grad = False
    found += [net(frozen), fused(frozen), *([ndl.compile(fused, (frozen,))(frozen)] if compiles() else [])]
    for y in found:
        np.testing.assert_allclose(y.numpy(), want, rtol=1e-4, atol=1e-4)


def core_with_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return ops.matmul(ops.softmax(ops.matmul(q, ops.transpose(k)) * 0.5 + mask, -1), v)


def test_a_mask_with_more_rows_than_scores() -> None:
    net = Net(lambda n, x: core_with_mask(x, n.a(x), x, n.mask), a=linear())
    net.mask = data(3, 5, 5)
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ScaledDotProductAttention": 1}
    x = ndl.Tensor(np.random.randn(5, WIDTH).astype("float32"), requires_grad=False)
    np.testing.assert_allclose(fused(x).numpy(), net(x).numpy(), rtol=1e-5, atol=1e-5)
    assert fused(x).shape == (3, 5, WIDTH)


def test_axis_3_of_five() -> None:
    def forward(n: Any, x: Any) -> Any:
        scores = ops.matmul(x, ops.transpose(n.a(x), (2, 3)))
        return ops.matmul(ops.softmax(scores, 3), x)

    net = Net(forward, a=linear())
    x = data(2, 2, WIDTH, WIDTH, WIDTH)
    fused = of.fuse(net)
    np.testing.assert_allclose(fused(x).numpy(), net(x).numpy(), rtol=1e-4, atol=1e-4)


def narrow(n: Any, x: Any) -> Any:
    """The heads are made of more features than the projection has."""
    k, v = (heads(ops.concat([p(x)] * 2, -1), x) for p in (n.k, n.v))
    return n.out(merged(core(heads(n.q(x), x), k, v), x))


def expanded(n: Any, x: Any) -> Any:
    """One head of keys for every head of queries, as in multi-query attention."""
    shape = (x.shape[0], HEADS, x.shape[1], SIZE)
    k, v = (ops.broadcast_to(ops.unsqueeze(p(x), 1), shape) for p in (n.k, n.v))
    return n.out(merged(core(heads(n.q(x), x), k, v), x))


@pytest.mark.parametrize("forward", [narrow, expanded])
def test_heads_that_are_not_the_features(forward: Any) -> None:
    out = SIZE if forward is expanded else WIDTH // 2
    net = Net(forward, q=linear(), k=linear(out), v=linear(out), out=linear())
    assert_same(net, of.fuse(net), data(2, 5, WIDTH))


def interleaved(n: Any, x: Any) -> Any:
    """Each head has its q, k and v side by side, which is another order of features than torch's."""
    qkv = ops.permute(ops.reshape(n.qkv(x), (x.shape[0], x.shape[1], HEADS, 3, SIZE)), (3, 0, 2, 1, 4))
    return n.out(merged(core(qkv[0], qkv[1], qkv[2]), x))


def test_interleaved_heads_keep_their_projection() -> None:
    net = Net(interleaved, **{k: make() for k, make in ONE.items()})
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ScaledDotProductAttention": 1}
    assert any("laid out otherwise than head by head" in r for r in reasons(fused))
    assert_same(net, fused, data(2, 5, WIDTH))


def heads_not_merged(n: Any, x: Any) -> Any:
    y = core(heads(n.q(x), x), heads(n.k(x), x), heads(n.v(x), x))
    return n.out(ops.reshape(ops.permute(y, (0, 2, 3, 1)), (x.shape[0], x.shape[1], WIDTH)))


def test_heads_merged_otherwise() -> None:
    net = Net(heads_not_merged, **{k: make() for k, make in THREE.items()})
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ScaledDotProductAttention": 1, "MergedLinears": 1}
    assert "the heads are not merged side by side" in reasons(fused)
    assert_same(net, fused, data(2, 5, WIDTH))


@pytest.mark.parametrize("index", [slice(8, None), slice(1, 4)])
def test_heads_cut_out_of_rows(index: slice) -> None:
    """Rows in the place of heads, cut to none for the sizes that the search tries."""

    def forward(n: Any, x: Any) -> Any:
        parts = (ops.reshape(p(x), (x.shape[0], x.shape[1], HEADS, SIZE))[:, index] for p in (n.q, n.k, n.v))
        y = core(*parts)
        return n.out(ops.reshape(y, (y.shape[0], y.shape[1], WIDTH)))

    net = Net(forward, **{k: make() for k, make in THREE.items()})
    fused = of.fuse(net, example=data(2, 10, WIDTH))
    assert "MultiHeadAttention" not in fused.fusion_report.counts
    assert_same(net, fused, data(2, 10, WIDTH))


def test_softmax_over_another_axis_is_no_attention() -> None:
    def forward(n: Any, x: Any) -> Any:
        return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x)), 1), x)

    assert counts(Net(forward, unused=linear())) == {}


def test_weights_that_are_asked_for_stay() -> None:
    net = Net(lambda n, x: n.mha(x, x, x), mha=attention())
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {}
    assert any("users" in r or "output" in r for r in reasons(fused))
    assert_same(net, fused, data(2, 5, WIDTH))


def test_joined_layers_of_different_widths() -> None:
    net = Net(lambda n, x: (n.a(x), n.b(x), n.c(x) * 2.0), a=linear(5), b=linear(33), c=linear(1))
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"MergedLinears": 1}
    assert_same(net, fused, data(2, 5, WIDTH))
    if not compiles():
        return
    x = data(4, WIDTH)
    for got, want in zip(ndl.compile(fused, (x,))(x), net(x), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-5)


def test_layers_of_which_only_some_have_a_bias_stay_apart() -> None:
    net = Net(lambda n, x: n.a(x) * n.b(x), a=linear(5), b=linear(5, bias=False))
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {}
    assert "some of the layers have a bias and some have not" in reasons(fused)


def test_mismatched_channels_are_the_same_error() -> None:
    net = Net(lambda n, x: ops.relu(n.bn(n.conv(x))), conv=conv(), bn=bn(5)).eval()
    x = data(1, 4, 6, 6)
    for module in (net, of.fuse(net)):
        with pytest.raises(
            ValueError, match=r"^\[batch_norm\] input has 4 channels, but a parameter has shape \(5,\)\.$"
        ):
            module(x)


def test_the_graph_keeps_no_sizes_of_fused_steps() -> None:
    fused = of.fuse(build("separate projections"))
    assert not [n for n in fused.graph if n.kind == "scalar"]
    assert [n for n in symbolic(build("separate projections")).graph if n.kind == "scalar"]


def test_keys_of_two_axes() -> None:
    """A Hopfield layer's (Ramsauer et al., arXiv 2008.02217), whose stored patterns have no batch and no order of axes given."""

    class Stored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stored = nn.Parameter(data(5, 6).numpy())

        def forward(self, x: Any) -> Any:
            return ops.softmax(x @ ops.permute(self.stored), -1) @ self.stored

    net = symbolic(Stored())
    assert_same(net, of.fuse(net), data(3, 6))
