"""The original workflow: torch2needle_fx, the weight mapping, fusion under its first names, and top-1 on photographs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import fx, nn  # noqa: E402

import needle as ndl  # noqa: E402
from conversion import Calls, close  # noqa: E402
from needle.backend_selection import BACKEND, default_device  # noqa: E402
from operator_fusion import OperatorFusion, fuse_operators  # noqa: E402
from torch2needle import (  # noqa: E402
    Unsupported,
    convert_function_node,
    convert_layer,
    load_torch_weights_by_mapping,
    torch2needle_fx,
)
from torch2needle.models import randomize, resnet18  # noqa: E402
from torch2needle.rules import registry  # noqa: E402

on_cpu = pytest.mark.skipif(BACKEND != "nd", reason="names needle.cpu()")


def images(count: int = 20, size: int = 224) -> torch.Tensor:
    """Seeded crops of scikit-learn's two photographs, normalised as for ImageNet: (count, 3, size, size)."""
    photographs = pytest.importorskip("sklearn.datasets").load_sample_images().images
    random = np.random.RandomState(0)
    crops = []
    for i in range(count):
        photo = photographs[i % len(photographs)]
        top, left = (random.randint(0, n - size + 1) for n in photo.shape[:2])
        crops.append(photo[top : top + size, left : left + size])
    x = torch.tensor(np.stack(crops)).permute(0, 3, 1, 2).float() / 255
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((x - mean[:, None, None]) / deviation[:, None, None]).contiguous()


@on_cpu
def test_the_workflow_as_written(capsys: Any) -> None:
    model = resnet18().eval()
    needle_model, trace_log, mapping = torch2needle_fx(model, ndl.cpu(), "float32")
    load_torch_weights_by_mapping(mapping)
    assert "122 tensors loaded, 0 missing, 0 unused" in capsys.readouterr().out
    fused = fuse_operators(needle_model, verbose=True)
    assert re.search(r"^ +\d+  ConvBatchNorm2dReLU$", capsys.readouterr().out, re.M)
    fusion = OperatorFusion()
    fusion.fuse_model(needle_model)
    fusion.print_fusion_report()
    report = capsys.readouterr().out
    for count, pattern in ((9, "ConvBatchNorm2dReLU"), (8, "ConvBatchNorm2dAddReLU"), (3, "ConvBatchNorm2d")):
        assert re.search(rf"^ +{count}  {pattern}$", report, re.M)
        assert re.search(rf"^{pattern} .*conv1", report, re.M) or pattern != "ConvBatchNorm2dReLU"
    stats = fusion.get_fusion_stats()
    assert stats["total_fusions"] == 20 == len(stats["fusion_log"])
    assert stats["pattern_counts"]["ConvBatchNorm2dReLU"] == 9
    x = torch.randn(2, 3, 64, 64)
    for net in (needle_model, fused):
        close(net(x), model(x))
    assert len(trace_log) == 71 and "call_module" in str(trace_log)


@pytest.mark.skipif(BACKEND == "np", reason="compiles")
def test_top1_on_photographs() -> None:
    model = randomize(resnet18(), seed=0).eval()
    needle_model, _, mapping = torch2needle_fx(model)
    load_torch_weights_by_mapping(mapping, verbose=False)
    for p in needle_model.parameters():
        p.requires_grad = False
    fused = fuse_operators(needle_model, verbose=False)
    x = images()
    exe = ndl.compile(fused, (x[:10],))
    with torch.no_grad():
        want = torch.cat([model(b) for b in x.split(10)]).argmax(1).numpy()
    assert len(set(want)) > 1  # else every answer would agree
    for net in (needle_model, fused, exe):
        got = np.concatenate([np.asarray(net(b)).argmax(1) for b in x.split(10)])
        assert (got == want).mean() == 1.0


# -- the trace log -------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3, 1, 1))
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.conv(x * self.scale))
        return y.view(x.size(0), -1)


def test_trace_log() -> None:
    _, log, _ = torch2needle_fx(Mixed().eval(), example=(torch.randn(2, 3, 5, 6),))
    assert [(c.step, c.kind, c.name) for c in log] == [
        (0, "placeholder", "x"),
        (1, "get_attr", "scale"),
        (2, "call_function", "mul"),
        (3, "call_module", "conv"),
        (4, "call_function", "relu"),
        (5, "call_method", "size"),
        (6, "call_method", "view"),
        (7, "output", "output"),
    ]
    by_name = {c.name: c for c in log}
    assert [by_name[n].target for n in ("mul", "conv", "relu")] == [
        "operator.mul",
        "torch.nn.Conv2d",
        "torch.nn.functional.relu",
    ]
    assert [by_name[n].needle for n in ("mul", "conv", "relu", "size")] == ["EWiseMul", "Conv", "ReLU", "size"]
    assert by_name["view"].args == "relu, size, -1" and by_name["conv"].args == "mul"
    assert by_name["conv"].shape == (2, 4, 3, 4) and by_name["view"].shape == (2, 48)
    lines = str(log).splitlines()
    assert len(lines) == 9 and lines[0].split() == ["step", "op", "name", "target", "args", "needle", "shape"]
    assert len({line.index(c.kind) for line, c in zip(lines[1:], log, strict=True)}) == 1  # aligned
    assert "shape" not in str(torch2needle_fx(Mixed().eval())[1]).splitlines()[0]


def test_graph_module() -> None:
    model = Mixed().eval()
    traced = fx.symbolic_trace(model)
    net, log, mapping = torch2needle_fx(traced)
    x = torch.randn(2, 3, 5, 6)
    close(net(x), model(x))
    assert set(mapping) == set(model.state_dict()) and log[0].kind == "placeholder"


# -- the mapping transfers weights -----------------------------------------------------------------------------------------


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))


def test_weights_follow_torch() -> None:
    model = randomize(small()).eval()
    net, _, mapping = torch2needle_fx(model)
    x = torch.randn(2, 3, 5, 6)
    exe = ndl.compile(fuse_operators(net, verbose=False), (x,)) if BACKEND != "np" else net
    close(net(x), model(x))
    before = net(x).numpy()
    randomize(model, seed=7)
    model[1].num_batches_tracked += 3
    assert np.abs(net(x).numpy() - model(x).detach().numpy()).max() > 0.1
    summary = load_torch_weights_by_mapping(mapping, verbose=False)
    assert [p.name for p in summary.loaded] == list(model.state_dict()) and not summary.missing and not summary.unused
    close(net(x), model(x))
    close(exe(x), model(x))
    assert np.abs(net(x).numpy() - before).max() > 0.1
    close(net.state_dict(), model.state_dict())
    assert net.state_dict()["1.num_batches_tracked"].numpy() == 3


@pytest.mark.parametrize("share", [False, True])
def test_tied_weights(share: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    if share:
        model[2] = model[0]
    else:
        model[2].weight = model[0].weight
    net, _, mapping = torch2needle_fx(model)
    assert set(mapping) == set(model.state_dict())
    randomize(model, seed=3)
    load_torch_weights_by_mapping(mapping, verbose=False)
    close(net(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert len(net.parameters()) == len(list(model.parameters()))


def test_mapping_is_readable(capsys: Any) -> None:
    model = small()
    net, _, mapping = torch2needle_fx(model)
    assert mapping["1.running_mean"] == (model[1], net.get_submodule("1"))
    lines = repr(mapping).splitlines()
    assert lines[0].split("  ")[0] == "torch name" and lines[1].split() == ["0.weight", "Conv2d", "Conv"]
    summary = load_torch_weights_by_mapping(mapping, verbose=True)
    assert capsys.readouterr().out == f"{summary}\n" and "0.weight" in str(summary)


@pytest.mark.parametrize("layout", ["needle", "torch"])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_own_mapping_in_both_layouts(layout: str, per_tensor: bool) -> None:
    conv, linear, bn = (
        randomize(nn.Conv2d(3, 4, (3, 3), padding=1)),
        randomize(nn.Linear(6, 5)),
        nn.BatchNorm2d(4).eval(),
    )
    randomize(bn)
    ours = {
        "conv": ndl.nn.Conv(3, 4, 3, padding=1, layout=layout),
        "linear": ndl.nn.Linear(6, 5, layout=layout),
        "bn": ndl.nn.BatchNorm2d(4, unbiased=True).eval(),
    }
    theirs = {"conv": conv, "linear": linear, "bn": bn}
    mapping: dict[str, Any] = {k: (theirs[k], ours[k]) for k in ours}
    if per_tensor:
        names = [(k, n) for k, m in theirs.items() for n in m.state_dict() if n != "num_batches_tracked"]
        mapping = {f"{k}.{n}": (theirs[k], ours[k]) for k, n in names}
    summary = load_torch_weights_by_mapping(mapping, verbose=False)
    assert len(summary.loaded) == 8 and summary.missing == []
    assert summary.unused == ["bn.num_batches_tracked"]  # needle's layer was made without it
    image, row = torch.randn(2, 3, 5, 4), torch.randn(3, 6)
    close(ours["conv"](ndl.Tensor(image.numpy())), conv(image))
    wide = torch.randn(2, 4, 3, 2)
    close(ours["bn"](ndl.Tensor(wide.numpy())), bn(wide))
    close(ours["linear"](ndl.Tensor(row.numpy())), linear(row))


def test_what_is_missing_and_unused() -> None:
    summary = load_torch_weights_by_mapping(
        {
            "a": (nn.Linear(3, 2, bias=False), ndl.nn.Linear(3, 2)),
            "b": (nn.Linear(3, 2), ndl.nn.Linear(3, 2, bias=False)),
        },
        verbose=False,
    )
    assert summary.missing == ["a.bias"] and summary.unused == ["b.bias"]
    assert "missing: a.bias\nunused: b.bias" in str(summary)


def integer_linear() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.int32), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (lambda: nn.Linear(3, 2), lambda: ndl.nn.Linear(2, 3), r"m\.weight expects shape \(2, 3\), got \(3, 2\)\.$"),
        (
            integer_linear,
            lambda: ndl.nn.Linear(3, 2),
            r"dtype float32, got int32\.$",
        ),
    ],
    ids=["shape", "dtype"],
)
def test_weights_that_do_not_fit(theirs: Callable, ours: Callable, message: str) -> None:
    layer, good = ours(), ndl.nn.Linear(3, 2)
    before = good.weight.numpy()
    with pytest.raises(ValueError, match=rf"^\[load_torch_weights_by_mapping\] .*{message}"):
        load_torch_weights_by_mapping({"good": (nn.Linear(3, 2), good), "m": (theirs(), layer)}, verbose=False)
    assert (good.weight.numpy() == before).all()  # nothing was copied


# -- one layer, one function -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 7, 6)),
        (lambda: nn.Linear(6, 5), (4, 6)),
        (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4)),
        (lambda: nn.ReLU(inplace=True), (4, 6)),
        (lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 7, 6)),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh()), (4, 6)),
    ],
)
def test_convert_layer(make: Callable, shape: tuple[int, ...]) -> None:
    layer = randomize(make()).eval()
    ours = convert_layer(layer, default_device(), "float32")
    assert isinstance(ours, ndl.nn.Module) and not ours.training
    assert set(ours.state_dict()) == set(layer.state_dict())
    x = torch.randn(shape)
    close(ours(ndl.Tensor(x.numpy(), requires_grad=False)), layer(x.clone()))


def test_convert_layer_refuses(monkeypatch: Any) -> None:
    class Mine(nn.Module):
        pass

    def rule(module: nn.Module) -> Any:
        raise Unsupported("size expects 3, got 4")

    monkeypatch.setitem(registry.MODULE_RULES, Mine, rule)
    with pytest.raises(Unsupported, match=r"^\[convert_layer\] .*Mine: size expects 3, got 4\.$"):
        convert_layer(Mine())
    with pytest.raises(TypeError, match=r"^\[convert_layer\] expects a torch module, got function\.$"):
        convert_layer(F.relu)


def nodes(f: Callable) -> list[fx.Node]:
    return [n for n in fx.symbolic_trace(Calls(f)).graph.nodes if n.op in ("call_function", "call_method")]


FUNCTIONS: list[tuple[Callable, tuple, dict]] = [
    (lambda x: F.relu(x), (), {}),
    (lambda x: torch.cat([x, x], dim=1), (), {"dim": 1}),
    (lambda x: x.mean(1, keepdim=True), (1,), {"keepdim": True}),
    (lambda x: x.mean(axis=0), (), {"axis": 0}),
    (lambda x: x.transpose(0, 1), (0, 1), {}),
    (lambda x: F.leaky_relu(x, negative_slope=0.3), (), {"negative_slope": 0.3}),
    (lambda x: x + 2, (2,), {}),
    (lambda x: x.size(0), (0,), {}),
    (lambda x: x[:, 1:3], ((slice(None), slice(1, 3)),), {}),
]


@pytest.mark.parametrize(("f", "args", "kwargs"), FUNCTIONS)
def test_convert_function_node(f: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    (node,) = nodes(f)
    call = convert_function_node(node)
    x = torch.randn(4, 6)
    ours: Any = ndl.Tensor(x.numpy())
    got, want = call([ours, ours] if node.target is torch.cat else ours, *args, **kwargs), f(x)
    if isinstance(want, int):
        assert got == want
    else:
        close(got, want)


def test_convert_function_node_of_a_tuple() -> None:
    split, item = nodes(lambda x: torch.split(x, 2, 1)[1])
    pieces = convert_function_node(split)(ndl.Tensor(np.arange(8.0, dtype="float32").reshape(2, 4)), 2, 1)
    assert (convert_function_node(item)(pieces, 1).numpy() == [[2, 3], [6, 7]]).all()


def test_convert_function_node_refuses() -> None:
    module = next(n for n in fx.symbolic_trace(nn.Sequential(nn.ReLU())).graph.nodes if n.op == "call_module")
    with pytest.raises(ValueError, match=r"expects a call_function or call_method node, got call_module _0\.$"):
        convert_function_node(module)
    unknown = fx.Graph().call_function(torch.linalg.ldl_factor)
    with pytest.raises(Unsupported, match=r"^\[convert_function_node\] there is no rule for .*ldl_factor.*\.$"):
        convert_function_node(unknown)


# -- devices and dtypes ----------------------------------------------------------------------------------------------------


def test_absent_device() -> None:
    for device in (ndl.cuda(), ndl.hip()):
        if not device.enabled():
            for call in (torch2needle_fx, convert_layer):
                with pytest.raises(RuntimeError, match=rf"^\[{device.name}\] this machine or build has no such device"):
                    call(nn.Linear(2, 2), device)


def test_wrong_device_and_dtype() -> None:
    with pytest.raises(TypeError, match=r"^\[torch2needle_fx\] device expects a needle device .*, got 'gpu'\.$"):
        torch2needle_fx(nn.Linear(2, 2), "gpu")
    with pytest.raises(ValueError, match=r"^\[convert_layer\] dtype expects float32 or float64, got float16\.$"):
        convert_layer(nn.Linear(2, 2), dtype="float16")


def test_float64() -> None:
    """On cpu_numpy() every op takes float64; on cpu() those whose kernels do, and the others say so."""
    model = randomize(small()).eval()
    net, _, mapping = torch2needle_fx(model, ndl.cpu_numpy(), "float64")
    assert all(t.dtype in ("float64", "int64") for t in net.state_dict().values())
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    ours = ndl.Tensor(x.numpy(), device=ndl.cpu_numpy(), dtype="float64")
    exact = model.double()
    close(net(ours), exact(x), 1e-13)
    randomize(exact, seed=5)
    load_torch_weights_by_mapping(mapping, verbose=False)
    close(net(ours), exact(x), 1e-13)
    single, _, mapping = torch2needle_fx(exact, dtype="float32")
    assert single.parameters()[0].dtype == "float32"
    assert "float64 -> float32" in str(load_torch_weights_by_mapping(mapping, verbose=False))
    close(single(x.float()), exact(x).float())


@on_cpu
def test_float64_on_cpu() -> None:
    x = np.random.randn(3, 4)
    t = ndl.Tensor(x, dtype="float64", requires_grad=False)
    net, _, _ = torch2needle_fx(nn.Sequential(nn.Tanh()), ndl.cpu(), "float64")
    np.testing.assert_allclose(net(t).numpy(), np.tanh(x), rtol=0, atol=1e-14)
    net, _, _ = torch2needle_fx(nn.Sequential(nn.Linear(4, 2)), ndl.cpu(), "float64")
    try:
        y = net(t)
    except TypeError as e:
        assert re.fullmatch(r"\[\w+\] has no kernel for dtype float64\.", str(e))
    else:
        assert y.dtype == "float64"
