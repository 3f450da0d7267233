"""Fusion: every pattern against its unfused form, and what the engine must refuse."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest

import needle as ndl
import operator_fusion as of
from gpu_devices import compiles, emulated, everywhere
from needle import nn, ops
from needle.graph import GraphModule, symbolic

pytestmark = everywhere


class Net(nn.Module):
    """Layers by name and a forward given as a function of (net, x)."""

    container = True

    def __init__(self, forward: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        self.__dict__.update(layers)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def conv(cin: int = 4, cout: int = 4, bias: bool = False, **kwargs: Any) -> nn.Conv:
    return nn.Conv(cin, cout, 3, bias=bias, layout="torch", padding=1, **kwargs)


def bn(channels: int = 4) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, unbiased=True, count_batches=True)


def data(*shape: int, seed: int = 0) -> ndl.Tensor:
    return ndl.Tensor(np.random.RandomState(seed).randn(*shape).astype("float32"), requires_grad=True)


def shake(net: nn.Module) -> None:
    """Parameters and statistics unlike their initial ones and zeros."""
    random = np.random.RandomState(1)
    for name, t in net.named_tensors():
        if t.dtype == "float32":
            low = 0.5 if name.endswith("var") else -0.6
            t.data = ndl.Tensor(random.uniform(low, 1.2, t.shape).astype("float32"), device=t.device)


def flat(y: Any) -> list[Any]:
    return list(y) if isinstance(y, tuple | list) else [y]


def step(net: nn.Module, x: ndl.Tensor, state: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs, gradients and buffers after one backward from the given state."""
    net.load_state_dict(state)
    net.reset_grad()
    ys = flat(net(x))
    total = sum(
        (ops.summation(y * data(*y.shape, seed=9)) for y in ys[1:]), ops.summation(ys[0] * data(*ys[0].shape, seed=9))
    )
    total.backward()
    found = [y.numpy() for y in ys] + [x.grad.numpy()] + [p.grad.numpy() for p in net.parameters()]
    return found + [t.numpy() for t in net.state_dict().values()]


def assert_same(net: nn.Module, fused: nn.Module, x: ndl.Tensor) -> None:
    """The same values in evaluation, and the same training: values, gradients, buffers."""
    shake(net)
    state = {k: v.numpy() for k, v in net.state_dict().items()}
    for mode in (False, True):
        net.train(mode)
        made = step(net, x, state)
        sums = 1e-6 * max(
            float(np.abs(a).max(initial=0)) for a in made
        )  # what is 0 but for rounding, as biases of keys
        for a, b in zip(made, step(fused, x, state), strict=True):
            np.testing.assert_allclose(
                b, a, rtol=1e-4, atol=max(sums, 1e-5 * max(1.0, float(np.abs(a).max(initial=0))))
            )
    net.load_state_dict(state)
    net.eval()
    frozen = ndl.Tensor(x.numpy(), requires_grad=False)
    for p in net.parameters():
        p.requires_grad = False  # otherwise a fused op without a gradient of its own runs its unfused form
    for a, b in zip(flat(net(frozen)), flat(fused(frozen)), strict=True):
        np.testing.assert_allclose(
            b.numpy(), a.numpy(), rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(a.numpy()).max()))
        )
    for p in net.parameters():
        p.requires_grad = True


def reasons(fused: Any) -> list[str]:
    return [m.reason for m in fused.fusion_report.near_misses]


def counts(net: nn.Module, **kwargs: Any) -> dict[str, int]:
    return of.fuse(net, **kwargs).fusion_report.counts


@emulated
@pytest.mark.parametrize("name", of.REGISTRY)
def test_pattern(name: str) -> None:
    net, shape = of.REGISTRY[name].sample()
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {name: 1}
    x = data(*shape)
    assert_same(net, fused, x)
    if compiles():
        np.testing.assert_allclose(ndl.compile(fused, (x,))(x).numpy(), net(x).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", of.REGISTRY)
def test_pattern_does_not_fire_where_a_step_is_an_output(name: str) -> None:
    """Every value inside a match is asked for in turn; then the whole pattern must leave it alone."""
    net, shape = of.REGISTRY[name].sample()
    fused = of.fuse(net)
    outputs = {n.name for n in symbolic(net).graph.output.inputs()}
    inner = [n for n in fused.fusion_report.fired[0].nodes_in if n not in outputs]
    if name == "MergedLinears":
        return  # all of its steps are outputs of the fused op
    assert inner
    for wanted in inner:
        opened = symbolic(of.REGISTRY[name].sample()[0])
        node = next(n for n in opened.graph if n.name == wanted)
        result = opened.graph.output.args[0]
        opened.graph.output.args = ((result, node),)
        opened = GraphModule(opened.graph, opened)
        report = of.fuse(opened).fusion_report
        assert name not in report.counts, wanted
        x = data(*shape)
        for a, b in zip(opened(x), of.fuse(opened)(x), strict=True):
            np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-4, atol=1e-5)


def test_differences_are_measured() -> None:
    net = block().eval()
    shake(net)
    report = of.fuse(net, example=data(2, 4, 6, 6)).fusion_report
    assert all(f.delta is not None and 0 < f.delta < 1e-5 for f in report.fired)
    assert "difference" in str(report)
    net.train()
    assert all(f.delta is None for f in of.fuse(net, example=data(2, 4, 6, 6)).fusion_report.fired)


def resnet_block(net: Any, x: Any) -> Any:
    y = net.bn2(net.conv2(ops.relu(net.bn1(net.conv1(x)))))
    return ops.relu(y + net.down_bn(net.down(x)))


def block(forward: Any = resnet_block) -> Net:
    layers = {"conv1": conv(), "bn1": bn(), "conv2": conv(), "bn2": bn()}
    return Net(forward, **layers, down=nn.Conv(4, 4, 1, bias=False), down_bn=bn())


@emulated
def test_residual_of_two_conv_batch_norms() -> None:
    net = block()
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2dReLU": 1, "ConvBatchNorm2dAddReLU": 1, "ConvBatchNorm2d": 1}
    assert_same(net, fused, data(2, 4, 6, 6))


@pytest.mark.parametrize("left", [True, False])
def test_residual_on_either_side(left: bool) -> None:
    net = Net(lambda n, x: ops.relu(n.bn(n.conv(x)) + x if left else x + n.bn(n.conv(x))), conv=conv(), bn=bn())
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2dAddReLU": 1}
    assert_same(net, fused, data(2, 4, 6, 6))


def test_residual_of_two_convs() -> None:
    net = Net(lambda n, x: ops.relu(n.a(x) + n.b(x)), a=conv(bias=True), b=conv(bias=True))
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvAddReLU": 1}
    assert_same(net, fused, data(2, 4, 6, 6))


def test_conv_used_twice() -> None:
    def forward(n: Any, x: Any) -> Any:
        y = n.conv(x)
        return ops.relu(n.bn(y)) + y

    net = Net(forward, conv=conv(), bn=bn())
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"BatchNormReLU": 1}
    assert any(re.match("conv has 2 users: bn, ", r) for r in reasons(fused))
    assert_same(net, fused, data(2, 4, 6, 6))


def test_conv_is_an_output() -> None:
    def forward(n: Any, x: Any) -> Any:
        y = n.conv(x)
        return n.bn(y), y

    net = Net(forward, conv=conv(), bn=bn())
    fused = of.fuse(net)
    assert not fused.fusion_report.fired
    assert reasons(fused) == ["conv is an output of the graph"]
    assert_same(net, fused, data(2, 4, 6, 6))


def test_conv_that_only_an_output_reads_besides_is_kept() -> None:
    net = Net(lambda n, x: {"y": n.conv(x), "same": [n.conv(x)]}, conv=conv())
    assert not of.fuse(net).fusion_report.fired


def test_add_of_a_step_to_itself() -> None:
    def forward(n: Any, x: Any) -> Any:
        y = n.bn(n.conv(x))
        return ops.relu(y + y)

    net = Net(forward, conv=conv(), bn=bn())
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2d": 1}
    assert any("reads bn twice" in r for r in reasons(fused))
    assert_same(net, fused, data(2, 4, 6, 6))


def test_module_called_twice_is_fused_at_each_call() -> None:
    """Nothing is altered, so a shared layer is safe: each fused node reads the same parameters."""
    net = Net(lambda n, x: ops.relu(n.bn(n.conv(ops.relu(n.bn(n.conv(x)))))), conv=conv(), bn=bn())
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2dReLU": 2}
    assert_same(net, fused, data(2, 4, 6, 6))


def test_batch_norm_shared_by_two_convs() -> None:
    net = Net(lambda n, x: ops.relu(n.bn(n.a(x))) + ops.relu(n.bn(n.b(x))), a=conv(), b=conv(), bn=bn())
    fused = of.fuse(net)
    assert fused.fusion_report.counts["ConvBatchNorm2dReLU"] == 2
    assert_same(net, fused, data(2, 4, 6, 6))


@emulated
def test_shared_statistics_keep_their_order() -> None:
    def forward(n: Any, x: Any) -> Any:
        first, second = n.bn(n.a(x)), n.bn(n.b(x))
        return ops.relu(second), ops.relu(first)  # fusing `first` would run its batch norm last

    net = Net(forward, a=conv(), b=conv(), bn=bn())
    fused = of.fuse(net)
    assert any("uses the statistics of bn before" in r for r in reasons(fused))
    assert_same(net, fused, data(2, 4, 6, 6))


def test_functional_spellings_match_as_layers() -> None:
    def forward(n: Any, x: Any) -> Any:
        y = ops.conv2d(x, n.conv.weight, None, 1, 1)
        y = ops.relu(ops.batch_norm(y, n.bn.running_mean, n.bn.running_var, n.bn.weight, n.bn.bias))
        return ops.relu(ops.linear(ops.flatten(y, 1), n.fc.weight, n.fc.bias, layout="needle"))

    net = Net(forward, conv=conv(), bn=bn(), fc=nn.Linear(4 * 36, 3))
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2dReLU": 1, "LinearReLU": 1}
    assert_same(net, fused, data(2, 4, 6, 6))


@pytest.mark.parametrize("affine", [True, False])
def test_functional_batch_norm_layer(affine: bool) -> None:
    def forward(n: Any, x: Any) -> Any:
        extra = (n.bn.weight, n.bn.bias) if affine else ()
        return ops.relu(n.f(n.conv(x), n.bn.running_mean, n.bn.running_var, *extra))

    net = Net(forward, conv=conv(), bn=bn(), f=nn.FunctionalBatchNorm())
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2dReLU": 1}
    x = data(2, 4, 6, 6)
    for mode in (False, True):
        net.train(mode)
        state = {k: v.numpy() for k, v in net.state_dict().items()}
        y, mean = net(x).numpy(), net.bn.running_mean.numpy()
        net.load_state_dict(state)
        np.testing.assert_allclose(fused(x).numpy(), y, atol=1e-5)
        np.testing.assert_allclose(net.bn.running_mean.numpy(), mean, atol=1e-6)


def test_batch_norm_without_affine_parameters() -> None:
    net = nn.Sequential(conv(), nn.BatchNorm2d(4, affine=False), nn.SiLU())
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"ConvBatchNorm2dSiLU": 1}
    assert_same(net, fused, data(2, 4, 6, 6))


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_without_statistics_is_a_near_miss(affine: bool) -> None:
    net = Net(lambda n, x: n.bn(n.conv(x)), conv=conv(), bn=nn.BatchNorm2d(4, affine=affine, track_running_stats=False))
    fused = of.fuse(net)
    assert reasons(fused) == ["bn has no running statistics"]
    assert_same(net, fused, data(2, 4, 6, 6))


@pytest.mark.parametrize("known", [True, False])
def test_residual_that_broadcasts(known: bool) -> None:
    net = Net(lambda n, x: ops.relu(n.bn(n.conv(ops.mean(x, (2, 3), keepdims=True))) + x), conv=conv(), bn=bn())
    x = data(2, 4, 6, 6)
    fused = of.fuse(symbolic(net, (x,)) if known else net)
    assert ("ConvBatchNorm2dAddReLU" in fused.fusion_report.counts) is not known
    assert_same(net, fused, x)


@pytest.mark.parametrize("known", [True, False])
def test_linear_batch_norm_over_three_axes(known: bool) -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU())  # 4 channels and 4 features: not the same axis
    x = data(3, 4, 5)
    fused = of.fuse(symbolic(net, (x,)) if known else net)
    assert ("LinearBatchNormReLU" in fused.fusion_report.counts) is not known
    assert_same(net, fused, x)


@pytest.mark.parametrize("layout", ["torch", "needle"])
def test_both_weight_layouts(layout: str) -> None:
    net = nn.Sequential(
        nn.Linear(5, 4, layout=layout), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3, layout=layout), nn.Tanh()
    )
    fused = of.fuse(net)
    assert fused.fusion_report.counts == {"LinearBatchNormReLU": 1, "LinearTanh": 1}
    assert_same(net, fused, data(6, 5))


def test_net_is_untouched_and_parameters_are_shared() -> None:
    net = symbolic(block())
    before, tensors = str(net.graph), dict(net.named_tensors())
    fused = of.fuse(net)
    assert str(net.graph) == before
    assert list(fused.state_dict()) == list(net.state_dict())
    assert all(t is tensors[name] for name, t in fused.named_tensors())
    assert all(a is b for a, b in zip(fused.parameters(), net.parameters(), strict=True))
    net.eval()
    assert not any(m.training for _, m in fused.named_modules() if m.mode_dependent)


def test_hooks_run_as_before() -> None:
    net = symbolic(nn.Sequential(nn.Conv(3, 4, 3, layout="torch"), nn.BatchNorm2d(4), nn.ReLU())).eval()
    net.get_submodule("1").register_forward_hook(lambda m, args, out: out * 2.0)
    net.register_forward_hook(lambda m, args, out: out + 1.0)
    fused, x = of.fuse(net), ndl.Tensor(data(1, 3, 6, 6))
    assert fused.fusion_report.counts == {}
    assert any("has hooks" in miss.reason for miss in fused.fusion_report.near_misses)
    np.testing.assert_array_equal(fused(x).numpy(), net(x).numpy())
    assert net(x).numpy().min() >= 1.0


def test_fusing_twice_changes_nothing() -> None:
    fused = of.fuse(block())
    assert not of.fuse(fused).fusion_report.fired


def test_dry_run() -> None:
    net = symbolic(block())
    dry = of.fuse(net, dry_run=True)
    assert str(dry.graph) == str(net.graph)
    assert dry.fusion_report.counts == counts(net)
    assert "3 fusions would apply" in str(dry.fusion_report)


def test_disable_by_name_and_family() -> None:
    net = nn.Sequential(conv(), bn(), nn.ReLU())
    assert counts(net, disable=["ConvBatchNorm2dReLU"]) == {"ConvBatchNorm2d": 1}
    assert counts(net, disable=["conv_bn_act", "conv_bn"]) == {"BatchNormReLU": 1}
    assert counts(net, patterns=["conv_bn"]) == {"ConvBatchNorm2d": 1}
    assert not counts(net, patterns=[])
    with pytest.raises(ValueError, match=r"\[fuse\] a pattern expects .*, got conv_batch."):
        of.fuse(net, disable=["conv_batch"])
    with pytest.raises(TypeError, match="lists of names"):
        of.fuse(net, disable="conv_bn")


def test_order_of_patterns_does_not_matter() -> None:
    names = ["ConvBatchNorm2dAddReLU", "ConvBatchNorm2dReLU", "ConvBatchNorm2d", "BatchNormReLU"]
    net = block()
    found = {tuple(sorted(counts(net, patterns=order).items())) for order in itertools.permutations(names)}
    assert len(found) == 1


def test_register() -> None:
    known = of.REGISTRY["ConvReLU"]
    with pytest.raises(ValueError, match=r"\[fuse\] pattern names are unique, got a second ConvReLU."):
        of.register(known)
    with pytest.raises(ValueError, match="names each step once"):
        known.pattern.then("layer", known.pattern.links[0].op)
    mine = dataclasses.replace(known, name="Mine", conditions=(lambda m: "never on Mondays",))
    net = nn.Sequential(conv(), nn.ReLU())
    assert reasons(of.fuse(net, patterns=[mine])) == ["never on Mondays"]
    with pytest.raises(TypeError, match=r"\[fuse\] expects a needle Module, got int."):
        of.fuse(3)


def test_explain() -> None:
    def forward(n: Any, x: Any) -> Any:
        y = n.conv(x)
        return n.block(ops.relu(n.bn(y)) + y)

    net = Net(forward, conv=conv(), bn=bn(), block=nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2)))
    fused = of.fuse(net)
    assert "conv has 2 users" in of.explain(fused, "conv")
    text = of.explain(net, "block.0")
    first = "block_0, block_1 (block.0, block.1) would become block_0_fused (conv2d_relu) by ConvReLU."
    assert text.startswith(first)
    assert "why: the kernel finishes" in text and "checked: no step is read elsewhere" in text
    measured = of.explain(of.fuse(net, example=data(1, 4, 6, 6)), "block.0")
    assert "largest difference to the unfused steps: " in measured
    assert "became block_0_fused" in of.explain(fused, "block_0_fused")
    assert "block_2 is MaxPool2d" in of.explain(fused, "block")
    with pytest.raises(KeyError, match="expects a node's name"):
        of.explain(fused, "layer9")


def test_report_prints() -> None:
    text = str(of.fuse(block()).fusion_report)
    assert text.startswith("3 fusions, 9 -> 3 calls")
    assert "ConvBatchNorm2dAddReLU  conv2_fused" in text
