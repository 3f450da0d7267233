"""`verify` and `explain`: what they must find, what they must leave alone; progress and interrupts of long work."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from conversion import Calls  # noqa: E402
from needle.backend_selection import BACKEND  # noqa: E402
from torch2needle.models import randomize, resnet18  # noqa: E402
from torch2needle.rules import registry  # noqa: E402

COMPILED = BACKEND != "np"


class Small(nn.Module):
    """Layers, a functional call, a layer called twice, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)) + y)
        z = F.gelu(y.mean((2, 3)))
        return {"logits": self.fc(self.drop(z)), "features": (z, y)}


def make(training: bool = False) -> tuple[Small, Any, Any]:
    torch.manual_seed(0)
    model = randomize(Small()).train(training)
    return model, torch2needle.convert(model), torch.randn(4, 3, 8, 7)


def change(net: Any, path: str, by: float = 0.5) -> None:
    tensor = net.get_tensor(path)
    values = tensor.numpy()
    values.reshape(-1)[0] += by
    tensor.data = ndl.Tensor(values, device=tensor.device, dtype=tensor.dtype, requires_grad=False)


def state(model: nn.Module) -> list[Any]:
    """Everything of a torch model that a call of ours could leave behind."""
    facts: list[Any] = [(k, v.clone()) for k, v in model.state_dict().items()]
    for m in model.modules():
        facts.append((m.training, list(vars(m)), list(m._buffers), list(m._parameters), list(m._modules)))
        facts.append((dict(m._forward_hooks), dict(m._forward_pre_hooks)))
    return facts


def same(a: list[Any], b: list[Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return x[0] == y[0] and torch.equal(x[1], y[1]) if isinstance(x[1], torch.Tensor) else x == y

    return len(a) == len(b) and all(map(equal, a, b))


# -- verify --------------------------------------------------------------------------------------------------------------


def test_correct_model() -> None:
    model, net, x = make()
    v = torch2needle.verify(model, net, x)
    assert v and v.ok and v.first_divergence is None
    names = ["logits", "features.0", "features.1"]
    forms = ["eager", "compiled"] if COMPILED else ["eager"]
    assert [(o.form, o.name) for o in v.outputs] == [(f, n) for f in forms for n in names]
    assert [layer.path for layer in v.layers] == ["conv1", "bn1", "relu", "conv2", "bn2", "relu", "drop", "fc"]
    for o in v.outputs:
        e = o.errors
        assert 0 < e.torch_rel < 1e-5 and e.limit >= 1e-5 and e.top1 == 1.0 and e.max_rel <= e.limit
        assert e.ratio == pytest.approx(e.max_rel / e.torch_rel)
    assert v.outputs[0].errors.shape == (4, 5)
    assert "needle agrees with torch" in str(v) and "8 layers agree" in str(v)


@pytest.mark.parametrize("path", ["conv1", "bn1", "conv2", "fc"])
def test_changed_weight_is_found_at_its_layer(path: str) -> None:
    model, net, x = make()
    change(net, f"{path}.weight")
    v = torch2needle.verify(model, net, x)
    assert not v
    assert v.first_divergence.path == path
    assert v.first_divergence.errors.max_rel > 1e-3
    location = v.first_divergence.source
    assert re.fullmatch(r".*test_verify\.py:\d+", location)
    text = f"first divergence: {path} ("
    assert text in str(v) and location in str(v) and "out of bounds" in str(v)


def test_changed_running_statistics_are_found() -> None:
    model, net, x = make()
    change(net, "bn2.running_var")
    assert torch2needle.verify(model, net, x).first_divergence.path == "bn2"


def test_written_buffers_are_left_as_they_are() -> None:
    def f(x: Any, m: nn.Module) -> Any:
        m.running_mean += x.mean(0)
        return x - m.running_mean, (m.running_mean * 9).to(torch.uint8)

    model = Calls(f, nn.BatchNorm1d(4)).eval()
    x = torch.view_as_complex(torch.randn(3, 4, 2)).conj().imag  # whose sign is a flag of the tensor
    net = torch2needle.convert(model, (x,))
    for v in (torch2needle.verify(model, net, x), torch2needle.verify(model, net, x)):
        assert v and v.outputs[0].errors.max_rel < 1e-6
    assert not net.get_tensor("parts.0.running_mean").numpy().any()


def test_second_call_of_a_shared_layer() -> None:
    """The i-th call in the graph is held against torch's i-th call, also where an earlier one is dead."""
    layer = nn.Linear(4, 4)

    def f(x: Any, m: nn.Module) -> Any:
        m(x + 1)
        return m(m(x))

    model = randomize(Calls(f, layer)).eval()
    net = torch2needle.convert(model)
    v = torch2needle.verify(model, net, torch.randn(3, 4))
    assert v and len(v.layers) == 2 and v.first_divergence is None


def test_bound_follows_torchs_own_error() -> None:
    """Cancellation, at which float32 torch is as bad: an absolute bound alone would refuse it."""
    model = Calls(lambda x: (x * 1e4 + 0.1) - x * 1e4).eval()
    x = torch.rand(50, 8)
    v = torch2needle.verify(model, torch2needle.convert(model), x)
    assert v and all(o.errors.max_rel > 1e-5 for o in v.outputs)


def test_nan_and_infinity() -> None:
    model = Calls(lambda x: torch.log(x) / (x - 1)).eval()
    net = torch2needle.convert(model)
    x = torch.tensor([[-1.0, 0.0, 1.0, 2.0, 3.0]])
    assert torch2needle.verify(model, net, x, layers=False)  # torch's NaN and infinity at the same places
    model, net, x = make()
    change(net, "fc.bias", float("nan"))
    v = torch2needle.verify(model, net, x)
    assert not v and v.first_divergence.path == "fc"
    assert v.outputs[0].errors.max_abs == np.inf and v.outputs[1].errors.ok
    assert "inf" in str(v)


def test_another_number_of_outputs_or_another_shape() -> None:
    model, _, x = make()
    other = Calls(lambda x: x[:, :2]).eval()
    v = torch2needle.verify(model, torch2needle.convert(other), x)
    assert not v and "torch gives 3 outputs, needle 1" in str(v)
    v = torch2needle.verify(Calls(lambda x: x).eval(), torch2needle.convert(other), x)
    assert not v and "out of bounds" in str(v)


def test_fused_net() -> None:
    model, net, x = make()
    fused = operator_fusion.fuse(net)
    assert fused.fusion_report.counts["ConvBatchNorm2dReLU"] == 1
    v = torch2needle.verify(model, fused, x)
    assert v
    compared = {layer.path: layer for layer in v.layers}
    assert compared["relu"].covers and {"fc", "drop"} <= compared.keys()
    assert [layer.covers[-1] for layer in v.layers if layer.covers] == ["relu", "relu_1"]
    assert "conv1" not in compared and "bn1" not in compared
    change(net, "conv1.weight")
    v = torch2needle.verify(model, fused, x)
    first = v.first_divergence
    assert not v and first.path == "relu" and first.covers == ["conv1", "bn1", "relu"]
    assert "conv1, bn1, relu" in str(v)


def test_fusion_that_ends_in_a_function_is_not_taken_for_its_layer() -> None:
    """conv + F.relu: the fused value is not the convolution's."""
    model = randomize(Calls(lambda x, c, d: d(F.relu(c(x))), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))).eval()
    fused = operator_fusion.fuse(torch2needle.convert(model))
    assert fused.fusion_report.counts == {"ConvReLU": 1}
    v = torch2needle.verify(model, fused, torch.randn(1, 3, 6, 6))
    assert v and [layer.path for layer in v.layers] == ["parts.1"]


@pytest.mark.skipif(BACKEND == "np", reason="the numpy backend has no executor")
def test_executable() -> None:
    model, net, x = make()
    exe = ndl.compile(operator_fusion.fuse(net), (x,))
    v = torch2needle.verify(model, exe, x)
    assert v and [o.form for o in v.outputs] == ["eager"] * 3 + ["compiled"] * 3
    change(net, "fc.weight")
    v = torch2needle.verify(model, exe, x)
    assert not v and not any(o.errors.ok for o in v.outputs if o.name == "logits")


@pytest.mark.parametrize("kind", ["tuple", "dict", "numpy"])
def test_kinds_of_inputs(kind: str) -> None:
    class Two(nn.Module):
        def forward(self, a: Any, b: Any, scale: Any = None) -> Any:
            return a @ b if scale is None else a @ b * scale

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    x: Any = {"tuple": (a, b), "dict": {"b": b, "a": a}, "numpy": (a.numpy(), b.numpy())}[kind]
    model = Two()
    v = torch2needle.verify(model, torch2needle.convert(model), x)
    assert v and v.outputs[0].errors.shape == (3, 5)


def test_training_mode_and_nothing_changes() -> None:
    model, net, x = make(training=True)
    model.drop.p = 0.0
    net.get_submodule("drop").p = 0.0
    before, ours = state(model), {k: t.numpy() for k, t in net.state_dict().items()}
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    given = x.clone()
    v = torch2needle.verify(model, net, x)
    assert v and [o.form for o in v.outputs] == ["eager"] * 3
    assert "not compiled: " in str(v) and "bn1" in str(v)
    assert same(state(model), before) and torch.equal(x, given)
    assert all((t.numpy() == ours[k]).all() for k, t in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())
    assert (np.random.get_state()[1] == numpy_state).all() and torch.equal(torch.get_rng_state(), torch_state)
    assert torch.get_default_dtype() == torch.float32


def test_other_mode_is_noted() -> None:
    model, net, x = make()
    net.train()
    v = torch2needle.verify(model, net, x)
    assert not v and any("layers are in another mode than torch's (first: bn1)" in n for n in v.notes)


def test_model_that_cannot_run_in_float64() -> None:
    weight = torch.randn(3, 3)  # not the model's, so that it stays float32
    model = randomize(Calls(lambda x, m: m(x) @ weight, nn.Linear(4, 3))).eval()
    v = torch2needle.verify(model, torch2needle.convert(model), torch.randn(2, 4))
    assert v and any("torch cannot run in float64" in n for n in v.notes) and len(v.layers) == 1


def test_layers_and_compiled_can_be_left_out() -> None:
    model, net, x = make()
    v = torch2needle.verify(model, net, x, compiled=False, layers=False)
    assert v and not v.layers and {o.form for o in v.outputs} == {"eager"}


def test_wrong_arguments() -> None:
    model, net, x = make()
    with pytest.raises(TypeError, match=r"^\[verify\] expects a torch module and a needle Module or Executable, got "):
        torch2needle.verify(net, model, x)


def test_run_shows_every_value() -> None:
    _, net, x = make()
    seen: list[Any] = []
    y = net.run(x, watch=lambda node, value: seen.append((node, value)))
    assert [n for n, _ in seen] == list(net.graph)
    assert (seen[-1][1]["logits"].numpy() == net(x)["logits"].numpy()).all() and y is seen[-1][1]


# -- explain -------------------------------------------------------------------------------------------------------------


def test_explain() -> None:
    _, net, x = make()
    text = torch2needle.explain(net, "bn1")
    assert re.search(r"bn1: torch\.nn\.BatchNorm2d\(conv1\) at .*test_verify\.py:\d+ became BatchNorm2d\(6", text)
    assert re.search(r"by torch2needle\.rules\.norms\.BatchNorm2d \(node bn1\)", text)
    assert "bn1 follows train() and eval(); it is in evaluation" in text
    assert re.search(r"fusion: conv1, bn1, relu\b.* would become conv1_fused \(conv2d_batch_norm_relu\)", text)
    fused = operator_fusion.fuse(net)
    text = torch2needle.explain(fused, "conv1")
    assert re.search(r"conv1, bn1, relu\b.* became conv1_fused \(conv2d_batch_norm_relu\) by ConvBatchNorm2dReLU", text)
    node = next(n.name for n in fused.graph if n.meta.get("covers") == ["conv1", "bn1", "relu"])
    text = torch2needle.explain(fused, node)
    assert "torch.nn.Conv2d" in text and "torch.nn.ReLU" in text
    assert "torch.nn.functional.gelu" in torch2needle.explain(net, "gelu")
    assert "input" in torch2needle.explain(net, "x")
    if COMPILED:
        assert "BatchNorm2d" in torch2needle.explain(ndl.compile(fused, (x,)), "bn1")


def test_explain_says_why_a_fusion_did_not_apply() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Any) -> Any:
            y = self.conv(x)
            return torch.nn.functional.softsign(self.bn(y)) + y

    net = torch2needle.convert(Reads().eval())
    for form in (net, operator_fusion.fuse(net)):
        text = torch2needle.explain(form, "conv")
        assert re.search(r"conv: torch\.nn\.Conv2d\(x\) at .*test_verify\.py:\d+ became Conv\(3, 4", text)
        assert "by torch2needle.rules.convolution." in text and "(node conv)" in text
        assert "fusion: ConvBatchNorm2d did not apply at bn: conv has 2 users: bn, add" in text
    text = torch2needle.explain(net, "softsign")
    assert re.search(
        r"softsign in the model: torch\.nn\.functional\.softsign\(bn\) at .*:\d+ became .*, .* by torch2needle\.rules\.",
        text,
    )


def test_explain_flags_of_functions() -> None:
    class Drop(nn.Module):
        def forward(self, x: Any) -> Any:
            return F.dropout(x, 0.3, self.training) + F.dropout(x, 0.2, False)

    net = torch2needle.convert(Drop().eval())
    assert "follows (model)" in torch2needle.explain(net, "dropout")
    assert "training is False" in torch2needle.explain(net, "dropout_1")


@pytest.mark.parametrize("fused", [False, True])
def test_explain_an_unknown_name(fused: bool) -> None:
    _, net, _ = make()
    with pytest.raises(KeyError, match=r"\[explain\] expects .*, got conv9; nearest: conv[12]"):
        torch2needle.explain(operator_fusion.fuse(net) if fused else net, "conv9")


def test_explain_a_loaded_net(tmp_path: Any) -> None:
    model = Calls(lambda x, c, d: d(c(x)), nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1)).eval()
    net = torch2needle.convert(model)
    ndl.save(net, tmp_path / "net.safetensors")
    loaded = ndl.load(tmp_path / "net.safetensors")
    text = torch2needle.explain(loaded, "parts.0")
    assert "module Conv(3, 6, (3, 3)" in text and "read by parts_1" in text
    assert torch2needle.verify(model, loaded, torch.randn(1, 3, 5, 5))


# -- progress and interrupts ---------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress_text(monkeypatch: Any, stream: io.StringIO, delay: float, work: Callable[[], Any]) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(sys.modules["torch2needle.report"], "BAR_DELAY", delay)
    work()
    return stream.getvalue()


class Checks(nn.Module):
    """torch.fx does not follow it, torch.export does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not x.is_cuda
        return x * 2


def test_bars_show_on_a_terminal_when_work_takes_long(monkeypatch: Any) -> None:
    model, net, x = make()
    for name, work in (
        ("capture, 2 free sizes", lambda: torch2needle.convert(Checks(), torch.ones(2, 3))),
        ("convert", lambda: torch2needle.convert(model)),
        ("verify", lambda: torch2needle.verify(model, net, x, compiled=False)),
    ):
        assert name in progress_text(monkeypatch, Terminal(), 0.0, work)
        assert progress_text(monkeypatch, Terminal(), 30.0, work) == ""  # quick work
        assert progress_text(monkeypatch, io.StringIO(), 0.0, work) == ""  # no terminal


@pytest.mark.parametrize("call", [torch2needle.convert, torch2needle.check], ids=["convert", "check"])
def test_interrupt_in_a_rule_passes_through(call: Callable, monkeypatch: Any) -> None:
    def rule(module: Any) -> Any:
        raise KeyboardInterrupt

    def function_rule(input: Any, approximate: str = "none") -> Any:
        raise KeyboardInterrupt

    model, _, _ = make()
    before, stream = state(model), np.random.get_state()[1].copy()
    monkeypatch.setitem(registry.FUNCTION_RULES, F.gelu, function_rule)
    with pytest.raises(KeyboardInterrupt):
        call(model)
    assert same(state(model), before) and (np.random.get_state()[1] == stream).all()
    monkeypatch.setitem(registry.MODULE_RULES, nn.Linear, rule)
    with pytest.raises(KeyboardInterrupt):
        call(model)
    assert same(state(model), before) and (np.random.get_state()[1] == stream).all()


def test_interrupt_in_the_forward_leaves_the_model_as_it_was() -> None:
    class Stops(Small):
        def forward(self, x: Any) -> Any:
            self.seen = self.bn1(self.conv1(x))
            raise KeyboardInterrupt

    model = Stops().eval()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        torch2needle.convert(model)
    assert same(state(model), before) and not hasattr(model, "seen")
    net = torch2needle.convert(Small().eval())
    with pytest.raises(KeyboardInterrupt):
        torch2needle.verify(model, net, torch.randn(1, 3, 8, 8))
    assert same(state(model), before) and torch.get_default_dtype() == torch.float32


def test_interrupt_while_needle_runs_puts_the_net_back(monkeypatch: Any) -> None:
    model, net, x = make(training=True)
    before = {k: t.numpy() for k, t in net.state_dict().items()}

    def stop(self: Any, node: Any, value: Any) -> None:
        if node.name == "fc":
            raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["torch2needle.tools.verify"].Run, "watch", stop)
    with pytest.raises(KeyboardInterrupt):
        torch2needle.verify(model, net, x)
    assert all((t.numpy() == before[k]).all() for k, t in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())


def test_benchmark_model() -> None:
    torch.manual_seed(0)
    model = randomize(resnet18()).eval()
    net = torch2needle.convert(model)
    v = torch2needle.verify(model, net, torch.randn(2, 3, 64, 64))
    assert v and len(v.layers) == 60
    change(net, "layer3.1.conv2.weight")
    assert torch2needle.verify(model, net, torch.randn(2, 3, 64, 64)).first_divergence.path == "layer3.1.conv2"


@pytest.mark.parametrize("x", [torch.rand(2, 5), torch.rand(2, 3).half(), torch.rand(2, 3).to("meta"), None, "x"])
def test_inputs_that_torch_refuses(x: Any) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"^\[verify\] expects inputs that the torch model takes: .*\.$"):
        torch2needle.verify(model, torch2needle.convert(nn.Sequential(model)), x)


def test_what_conversion_knew_to_differ_is_said() -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).half()

    model, x = Half().eval(), torch.randn(2, 3)
    v = torch2needle.verify(model, torch2needle.convert(model, (x,)), x)
    assert not v and any("16-bit float at" in n for n in v.notes)
