"""convert(fallback="torch"): calls without a rule run in torch inside eager, compiled and trained models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle
from conversion import Calls, close, draw, gradients_agree
from torch2needle.bridges import fallback
from torch2needle.models import randomize

pytestmark = pytest.mark.usefixtures("without_rules")
DISTANCES = "torch.renorm"  # which has gradients and, here, no rule
GAMMA = "torch.igammac"  # as that one


class Net(nn.Module):
    """A convolution with batch norm, two calls without a rule, a convolution and a distance to the weights of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.head = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 8, 3),
            nn.Linear(8, 5),
        )

    def forward(self, x: torch.Tensor) -> Any:
        x = F.relu(self.norm(self.a(x)))
        x = torch.igammac(torch.full_like(x, 1.5), x)
        x = F.relu(self.b(x)).mean((2, 3))
        return F.linear(x, torch.renorm(self.head.weight, 2, 0, 1.0)) + self.head(x)


def converted(model: nn.Module, *inputs: torch.Tensor) -> tuple[Any, str]:
    """The net and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = torch2needle.convert(model, inputs, fallback="torch")
    return net, "\n".join(str(w.message) for w in caught)


def agrees(model: nn.Module, *shapes: Any, gradient: bool = True) -> Any:
    """Values of both batch sizes eagerly and compiled, and gradients."""
    torch.manual_seed(0)
    randomize(model)
    model.eval()
    inputs = draw(shapes)
    net, text = converted(model, *inputs)
    assert "run in torch" in text
    fused = operator_fusion.fuse(net)
    exe = ndl.compile(fused, inputs)
    for given in (inputs, tuple(torch.cat([x, x[:1]]) for x in inputs)):
        with torch.no_grad():
            want = model(*(x.clone() for x in given))
        for f in (net, fused, exe):
            close(f(*(x.clone() for x in given)), want)
    if gradient:
        gradients_agree(model, net, inputs, 1e-4)
    return net


def test_calls_between_convolutions() -> None:
    net = agrees(Net(), (2, 3, 9, 9))
    rows = {r.op: r for r in net.report.rows if r.status == "torch"}
    assert set(rows) == {GAMMA, DISTANCES}
    assert "there is no rule" in rows[DISTANCES].reason and "test_fallback.py" in rows[DISTANCES].location
    assert net.report.ok


def reflections(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return torch.linalg.householder_product(x.unflatten(-1, (4, 2)), factors[..., :2])


def product(f: torch.Tensor) -> torch.Tensor:
    return f.real * f.imag


def unpacked(x: torch.Tensor) -> Any:
    return torch.lu_unpack(*torch.linalg.lu_factor(x))


def written(y: torch.Tensor) -> torch.Tensor:
    return y.renorm_(2, 0, 1.0) + y


CALLS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "two_results": (lambda x: unpacked(x)[1] * 2 + unpacked(x).U.sum(), (4, 4)),
    "structure": (lambda x: {"s": torch.frexp(x).mantissa.relu(), "x": x * 2}, (3, 4)),
    "complex": (lambda x: torch.fft.rfft(x.relu(), dim=-1).logcumsumexp(-1).abs().log1p(), (3, 8)),
    "complex_twice": (lambda x: product(reflections(*(torch.fft.fft(x + n) / 20 for n in (1, 2)))), (3, 8)),
    "view": (lambda x: (x[:1] * 2).expand(3, 8).as_strided((3, 4, 2), (0, 2, 1)).sum(-1), (3, 8)),
    "sizes": (lambda x: torch.renorm(x.reshape(x.size(0) * 2, -1), 2, 1, 1.0).sum(1), (3, 8)),
    "write": (lambda x: written(x.tanh() * 0.5), (3, 8)),
    "keyword": (lambda x: torch.renorm(maxnorm=0.5, dim=1, p=2, input=x.sin()), (3, 8)),
    "weights": (lambda x, m: F.linear(x, torch.renorm(m.weight, 2, 0, 1.0)), (3, 8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_kinds_of_calls(name: str) -> None:
    f, shape = CALLS[name]
    agrees(Calls(f, *([nn.Linear(8, 5)] if name == "weights" else [])), shape, gradient=name != "structure")


def test_layer_whose_rule_refuses() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(9, 3, scale_grad_by_freq=True), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table((x[..., 0] * 4).long().clamp(0, 8))[:, None] + self.head(x).relu()

    model = Counted()
    net = agrees(model, (2, 5, 4))
    assert list(net.state_dict()) == list(model.state_dict())


def test_view_by_torch_follows_a_write() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.unfold(1, 2, 2)
        y += 1
        return z.sum(-1) + y.sum()

    net, _ = converted(Calls(f), torch.randn(2, 4))
    x = torch.randn(2, 4)
    close(net(x), f(x))  # the view follows the write


def test_training_step() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 9, 9)
    net, _ = converted(model, x)
    model.train(), net.train()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = ndl.optim.SGD(net.parameters(), lr=0.1)
    exe = None
    for _ in range(3):
        theirs.zero_grad(), ours.reset_grad()
        model(x).square().mean().backward()
        y = net(x)
        (ndl.ops.summation(y * y) / y.size).backward()
        theirs.step(), ours.step()
        for name, p in net.named_parameters():
            close(p, dict(model.named_parameters())[name], 1e-4)
        model.eval(), net.eval()
        exe = exe or ndl.compile(net, (x,))
        close(exe(x), model(x), 1e-4)  # packs again what the step changed
        model.train(), net.train()


def test_second_derivative_is_an_error() -> None:
    net, _ = converted(Calls(lambda x: torch.renorm(x, 2, 0, 1.0)), torch.randn(3, 1))
    x = ndl.Tensor(np.ones((3, 1), "float32"))
    ndl.ops.summation(net(x)).backward()
    with pytest.raises(NotImplementedError, match="gradient of torch"):
        ndl.ops.summation(x.grad).backward()


def test_nothing_is_copied() -> None:
    """torch reads the memory of the plan's output, and the next plan the memory of torch's result."""
    seen: list[int] = []

    def call(x: torch.Tensor, p: int, dim: int, maxnorm: float) -> torch.Tensor:
        made = torch.renorm(x, p, dim, maxnorm)
        if type(x) is torch.Tensor:  # else a run without data, to infer shapes
            seen.extend((x.data_ptr(), made.data_ptr()))
        return made

    model = Calls(lambda x: torch.renorm(x.relu(), 2, 0, 1.0) * 2)
    x = torch.randn(4, 8)
    net, _ = converted(model, x)
    node = next(n for n in net.graph if n.kind == "op" and n.target.library == "torch")
    object.__setattr__(node.target.expression, "function", call)
    exe = ndl.compile(net, (x,))
    plan = exe.plan
    borders: list[int] = []
    run_new = type(plan.parts[0].core).run_new

    class Core:
        def __init__(self, core: Any) -> None:
            self.core = core

        def run_new(self, refs: Any) -> Any:
            outs = run_new(self.core, refs)
            as_pointer = [torch.from_dlpack(ndl.backend_ndarray.NDArray.wrap(r)).data_ptr() for r in (*refs, *outs)]
            borders.extend(as_pointer)
            return outs

    for part in plan.parts:
        part.core = Core(part.core)
    seen.clear()
    close(exe(x), torch.renorm(x.relu(), 2, 0, 1.0) * 2)
    given, first_out, second_in, _ = borders
    assert given == x.data_ptr() and seen == [first_out, second_in]


def test_profiles_show_the_share_of_torch() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 9, 9)
    net, _ = converted(model, x)
    exe = ndl.compile(net, (x,))
    for p in (ndl.profile(net, x, rounds=2), ndl.profile(exe, x, rounds=2)):
        assert 0 < p.libraries()["torch"] < 1
        assert "of it in torch" in str(p) and DISTANCES in {r.op for r in p.rows}
    outs = [torch.empty_like(model(x))]
    exe.run_into(outs, x)
    close(outs, model(x))
    assert DISTANCES in str(exe.plan) and exe.memory["arena"] >= exe.memory["lower_bound"] > 0
    with pytest.warns(
        UserWarning, match=r"^\[compile\] \d+% of the time runs in torch: .*torch.renorm \(1x, test_fallback"
    ):
        close(torch2needle.compile(model, (x,), fallback="torch")(x), model(x))


def test_saving_is_refused(tmp_path: Any) -> None:
    net, _ = converted(Net().eval(), torch.randn(2, 3, 9, 9))
    with pytest.raises(ValueError, match=r"^\[save\] expects ops of needle alone, got torch"):
        ndl.save(net, tmp_path / "net.safetensors")


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: torch.fft.fft(x).logcumsumexp(0), "dtype that needle lacks"),
    ],
    ids=["complex"],
)
def test_what_stays_unsupported(f: Callable, reason: str) -> None:
    with pytest.raises(torch2needle.ConversionError, match=reason):
        torch2needle.convert(Calls(f), (torch.randn(3, 4),), fallback="torch")


def test_example_is_needed() -> None:
    with pytest.raises(torch2needle.ConversionError, match="pass example="):
        torch2needle.convert(Net(), fallback="torch")


def test_no_call_no_warning_and_strict_by_default() -> None:
    _, text = converted(nn.Sequential(nn.Linear(3, 2)), torch.randn(1, 3))
    assert not text
    with pytest.raises(torch2needle.ConversionError, match=r"no rule for torch\.renorm"):
        torch2needle.convert(Net(), (torch.randn(2, 3, 9, 9),))
    with pytest.raises(ValueError, match="fallback expects"):
        torch2needle.convert(Net(), fallback="eager")
    assert fallback.TorchCall.library == "torch"
