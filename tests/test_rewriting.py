"""Rules of plans: what `exe.report` says of them, and plans without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import needle as ndl
import operator_fusion
from needle import nn, ops
from needle.backend_selection import BACKEND
from needle.executor.target import TARGETS
from needle.graph_rows import as_today
from needle.ops.fused.layer import FusedLayer
from needle.ops.nn.conv import Conv2d

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="plans")


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype("float32")


def randomize(net: nn.Module) -> nn.Module:
    rng = np.random.default_rng(7)
    for _, t in net.named_tensors():
        if t.dtype == "float32":
            t.data = ndl.Tensor(rng.uniform(0.5, 1.5, t.shape).astype("float32") * 0.3)
    return net.eval()


def conv(*args: Any, **kwargs: Any) -> nn.Module:
    return nn.Conv(*args, layout="torch", **kwargs)


def separable() -> nn.Module:
    """A pointwise and a depthwise convolution, each with batch norm, and a pool."""
    point, depth = conv(16, 32, 1, bias=False), conv(32, 32, 3, padding=1, groups=32, bias=False)
    return nn.Sequential(point, nn.BatchNorm2d(32), nn.ReLU(), depth, nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))


def pooled() -> nn.Module:
    return nn.Sequential(conv(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4, layout="torch"), nn.BatchNorm1d(4))


def up() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(4, 4, 2, stride=2), nn.BatchNorm2d(4))


CASES = {  # a net, its input, whether it is fused first, and the plan's rules that fire in it
    "unfused": (separable, (2, 16, 9, 8), False, {"LayerFoldedBatchNorm": 2, "LayerActivation": 2}),
    "fused": (separable, (2, 16, 9, 8), True, {"FusedFoldedBatchNorm": 2, "ConvDepthwise": 1}),
    "pooled": (pooled, (1, 32, 40, 40), True, {"WinogradF4MaxPool": 1}),
    "dense": (dense, (5, 8), False, {"LayerFoldedBatchNorm": 2}),
    "fused dense": (dense, (5, 8), True, {"FusedFoldedBatchNorm": 2}),
    "up": (up, (2, 4, 5, 6), False, {"LayerFoldedBatchNorm": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_reports_and_plans_without_a_rule(name: str) -> None:
    make, shape, fused, fires = CASES[name]
    net, x = randomize(make()), image(*shape)
    want = net(ndl.Tensor(x)).numpy()
    model = operator_fusion.fuse(net) if fused else net
    exe = ndl.compile(model, (x,))
    rules = TARGETS["cpu"].rules
    counts = {k: v for k, v in exe.report.counts.items() if k in rules}
    assert counts == fires
    for off in (*fires, "FoldedBatchNorm"):
        other = ndl.compile(model, (x,), disable=[off])
        gone = {f.name for f in rules.resolve(off)}
        assert not gone & set(other.report.counts)
        for e in (exe, other):
            assert np.abs(e(x) - want).max() <= 2e-5 * np.abs(want).max()


def test_one_report_for_fusions_folds_and_pairs() -> None:
    net = operator_fusion.fuse(randomize(separable()))
    report = ndl.compile(net, (image(1, 16, 8, 8),)).report
    assert report.counts == {"ConvBatchNorm2dReLU": 2, "FusedFoldedBatchNorm": 2, "ConvDepthwise": 1}
    text = str(report)
    assert "the rows between the two stay in a core's cache" in text and "scale and a shift per channel" in text
    assert all(f.checks for f in report.fired)
    pair = next(f for f in report.fired if f.pattern == "ConvDepthwise")
    assert pair.op == "conv2d_depthwise" and len(pair.nodes_in) == 2
    assert "by FusedFoldedBatchNorm" in report.explain(pair.nodes_in[0])


NEAR = {  # what keeps a rule from firing -> the rule, and words of the reason
    "weights from the input": ("LayerFoldedBatchNorm", "depends on the input"),
    "two readers": ("LayerFoldedBatchNorm", "has 2 users"),
    "another axis": ("LayerFoldedBatchNorm", "normalises another axis"),
    "another activation": ("WinogradF4MaxPool", "another activation than ReLU"),
    "windows that overlap": ("WinogradF4MaxPool", "does not take the largest of every 2 x 2"),
    "a choice of algorithms": ("ConvDepthwise", "has a choice of algorithms"),
    "groups": ("ConvDepthwise", "has groups"),
}


def near(name: str) -> tuple[Any, tuple[np.ndarray, ...]]:
    side = 4 if name == "a choice of algorithms" else 40  # where Winograd's algorithm does not pay
    norm, x = randomize(nn.BatchNorm2d(32)), image(1, 32, side, side)
    three, depth = randomize(conv(32, 32, 3, padding=1)), randomize(conv(32, 32, 3, padding=1, groups=32))
    if name == "weights from the input":
        return lambda x, w: norm(ops.conv2d(x, w)), (image(1, 3, 6, 6), image(32, 3, 3, 3))
    if name == "two readers":
        return lambda x: norm(y := three(x)) + y, (x,)
    if name == "another axis":
        layer, rows = randomize(nn.Linear(8, 32)), randomize(nn.BatchNorm1d(5))
        return lambda x: rows(layer(x)), (image(2, 5, 8),)
    if name in ("another activation", "windows that overlap"):
        after, size = (ops.silu, 2) if name == "another activation" else (ops.relu, 3)
        net = operator_fusion.fuse(nn.Sequential(three, nn.SiLU() if after is ops.silu else nn.ReLU()))
        return lambda x: ops.max_pool2d(net(x), size, 2), (x,)
    if name == "groups":
        three = randomize(conv(32, 32, 3, padding=1, groups=2))
    return lambda x: depth(three(x)), (x,)


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_say_why(name: str) -> None:
    rule, words = NEAR[name]
    fn, inputs = near(name)
    exe = ndl.compile(fn, inputs)
    misses = {m.pattern: m.reason for m in exe.report.near_misses}
    assert words in misses[rule]
    want = fn(*map(ndl.Tensor, inputs)).numpy()
    assert np.abs(exe(*inputs) - want).max() <= 2e-5 * np.abs(want).max()


def test_names_of_rules_are_checked() -> None:
    x = image(1, 4)
    with pytest.raises(ValueError, match=r"^\[compile\] a pattern expects .*FoldedBatchNorm.*, got ConvReLU\.$"):
        ndl.compile(ops.relu, (x,), disable=["ConvReLU"])
    with pytest.raises(TypeError, match=r"^\[compile\] disable expects a list of names, got 'ConvDepthwise'\.$"):
        ndl.compile(ops.relu, (x,), disable="ConvDepthwise")


FUSED_BEFORE = {  # the names of classes of earlier releases -> the layer that they fused
    "FusedConv2dActivation": "Conv2d",
    "FusedConvBatchNorm2d": "Conv2d",
    "FusedConvTranspose2dActivation": "ConvTranspose2d",
    "FusedConvTransposeBatchNorm2d": "ConvTranspose2d",
    "FusedLinearActivation": "Linear",
    "FusedLinearBatchNorm": "Linear",
    "FusedBatchNormActivation": "",
}


@pytest.mark.parametrize("name", FUSED_BEFORE)
def test_fused_ops_of_earlier_files(name: str) -> None:
    """By the attributes that such a file has; a bias was not said where the inputs show it."""
    layer = {"layout_of_weight": "needle"} if "Linear" in name else {"stride": (2, 2), "groups": 2}
    norm = {"eps": 1e-3, "training": False} if "Norm" in name else {}
    given = {**({} if name == "FusedBatchNormActivation" else layer), **norm, "activation": "relu", "alpha": 0.0}
    today, attributes = as_today(name, given, 3)
    fused = ndl.autograd.OPS[today](**attributes)
    assert isinstance(fused, FusedLayer) and fused.activation == "relu" and (fused.eps == 1e-3) == bool(norm)
    assert (fused.base.name if fused.base else "") == FUSED_BEFORE[name]
    if fused.base is not None:
        assert {k: v for k, v in fused.base.attributes().items() if k in layer} == layer and fused.has_bias
    for other in ("Conv2d", "FusedMultiHeadAttention", "FusedLinears"):
        assert as_today(other, {"groups": 2}, 2) == (other, {"groups": 2})


def test_fused_layers_are_saved_with_their_base(tmp_path: Any) -> None:
    x = image(2, 16, 8, 8)
    net = operator_fusion.fuse(randomize(separable()))
    ndl.save(net, tmp_path / "net.needle")
    again = ndl.load(tmp_path / "net.needle")
    assert (again(ndl.Tensor(x)).numpy() == net(ndl.Tensor(x)).numpy()).all()
    bases = [n.target.base for n in again.graph if n.kind == "op" and isinstance(n.target, FusedLayer)]
    assert [type(b) for b in bases] == [Conv2d, Conv2d]


def test_reports_say_what_was_done() -> None:
    """A batch norm alone goes into no weights; a dry run fused nothing; calls are counted, not nodes."""
    norm = nn.Sequential(nn.BatchNorm2d(16, count_batches=True), nn.ReLU(), nn.BatchNorm2d(16), nn.ReLU())
    fused, x = operator_fusion.fuse(randomize(norm)), image(2, 16, 5, 4)
    exe = ndl.compile(fused, (x,))
    assert exe.report.counts == {"BatchNormReLU": 2, "UncountedBatchNorm": 1}
    assert np.abs(exe(x) - fused(ndl.Tensor(x)).numpy()).max() <= 1e-5
    net, x = randomize(separable()), image(1, 16, 8, 8)
    assert "ConvBatchNorm2dReLU" not in ndl.compile(operator_fusion.fuse(net, dry_run=True), (x,)).report.counts
    for model in (net, operator_fusion.fuse(net)):
        report = ndl.compile(model, (x,)).report
        assert report.nodes_before == 7 and f"7 -> {report.nodes_after} calls" in str(report)


def test_packages_list_no_modules() -> None:
    for package in (ndl.nn, ndl.ops, ndl.optim, ndl.data, ndl.backend_ndarray):
        assert package.__all__ and not any(hasattr(getattr(package, n), "__path__") for n in package.__all__)
        assert "public" not in package.__all__
