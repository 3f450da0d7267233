"""docs/extending.md, followed literally: its Python blocks run in order, and what they made is checked."""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
import operator_fusion
import torch2needle
from needle.autograd import OPS, Tensor
from needle.backend_selection import BACKEND
from needle.ops.common import vjp
from needle.targets.cpu import CPU
from torch2needle.rules import registry

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
TABLES: list[dict] = [
    OPS,
    registry.MODULE_RULES,
    registry.FUNCTION_RULES,
    operator_fusion.REGISTRY,
    CPU.lowerings,
    CPU.rules,
    torch.fx._symbolic_trace._wrapped_fns_to_patch,
]

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="the page compiles")


def blocks() -> list[tuple[int, str]]:
    """(line, text) of the page's Python blocks."""
    page = PAGE.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", page, re.M | re.S)
    return [(page[: m.start(1)].count("\n"), m[1]) for m in found]


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """The names that the page's program has in the end; what it registered is taken back."""
    before, methods = [dict(t) for t in TABLES], set(vars(Tensor))
    module = types.ModuleType("extending")
    sys.modules["extending"] = module  # where torch and dataclasses look up what the page defines
    try:
        for line, text in blocks():
            exec(compile("\n" * line + text, str(PAGE), "exec"), module.__dict__)
        yield module.__dict__
    finally:
        del sys.modules["extending"]
        linecache.checkcache(str(PAGE))
        for table, content in zip(TABLES, before, strict=True):
            table.clear()
            table.update(content)
        for name in set(vars(Tensor)) - methods:
            delattr(Tensor, name)


def test_every_section_has_code_and_a_command() -> None:
    sections = PAGE.read_text().split("\n## ")[1:]
    known = [
        "An op",
        "A layer with its rule",
        "A fusion pattern",
        "A packed kernel with its lowering",
        "A rule over a plan's steps",
    ]
    assert [s.splitlines()[0] for s in sections][:5] == known
    assert all("```python\n" in s for s in sections[:5])
    for s in sections[:3]:
        command = re.search(r"^python -m pytest (\S+) -k (\w+)$", s, re.M)
        assert command is not None
        assert (PAGE.parents[1] / command[1]).is_file()
        assert f"class {command[2]}" in PAGE.read_text() or f"Torch{command[2]}" in s


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:needle|torch2needle|operator_fusion|csrc|tests)/[\w/.]*)`", PAGE.read_text()))
    assert "operator_fusion/patterns.py" in named
    assert [n for n in named if not (PAGE.parents[1] / n).exists()] == []


def test_op(page: dict[str, Any]) -> None:
    x = np.random.randn(4, 33)
    for device, dtype, tolerance in ((ndl.cpu(), "float32", 1e-6), (ndl.cpu_numpy(), "float64", 1e-15)):
        t = ndl.Tensor(x, device=device, dtype=dtype)
        y = page["squared_relu"](t)
        weight = ndl.Tensor(np.random.randn(4, 33), device=device, dtype=dtype, requires_grad=False)
        (gradient,) = vjp(y, weight, [t])
        np.testing.assert_allclose(y.numpy(), np.maximum(x, 0) ** 2, rtol=0, atol=10 * tolerance)
        np.testing.assert_allclose(gradient.numpy(), 2 * np.maximum(x, 0) * weight.numpy(), rtol=0, atol=20 * tolerance)
    assert (t.squared_relu().numpy() == y.numpy()).all()
    spec = page["SquaredReLU"]().infer(t)
    assert (tuple(spec.shape), spec.dtype) == ((4, 33), "float64")


def test_layer_and_rule(page: dict[str, Any]) -> None:
    model, net = page["model"], page["net"]
    x = torch.randn(3, 8, requires_grad=True)
    ours = ndl.Tensor(x.detach().numpy())
    y, mine = model(x), net(ours)
    np.testing.assert_allclose(mine.numpy(), y.detach().numpy(), rtol=0, atol=1e-5)
    weight = torch.randn(3, 4)
    (y * weight).sum().backward()
    ndl.ops.summation(mine * ndl.Tensor(weight.numpy(), requires_grad=False)).backward()
    np.testing.assert_allclose(ours.grad.numpy(), x.grad.numpy(), rtol=0, atol=1e-4)
    scale = dict(net.named_parameters())["1.scale"]
    np.testing.assert_allclose(scale.grad.numpy(), model[1].scale.grad.numpy(), rtol=0, atol=1e-4)
    assert "scaled_squared_relu" in torch2needle.explain(net, "1")


def test_rule_refuses_with_its_reason(page: dict[str, Any]) -> None:
    model = torch.nn.Sequential(page["TorchScaledSquaredReLU"]((2, 3)))
    with pytest.raises(torch2needle.ConversionError, match="scale expects one axis, got 2"):
        torch2needle.convert(model)


def test_function_rule(page: dict[str, Any]) -> None:
    net = torch2needle.convert(page["Net"]())
    assert next(n.target.name for n in net.graph if n.kind == "op") == "SquaredReLU"
    call = torch2needle.convert_function_node(torch.fx.Graph().call_function(page["torch_squared_relu"]))
    assert (call(ndl.Tensor(np.array([-1.0, 3.0], dtype="float32")), inplace=True).numpy() == [0, 9]).all()


def test_fusion(page: dict[str, Any]) -> None:
    assert page["LinearSquaredReLU"].__name__ in [n.target.name for n in page["fused"].graph if n.kind == "op"]
    net, shape = operator_fusion.REGISTRY["LinearSquaredReLU"].sample()
    fused = operator_fusion.fuse(net)
    assert fused.fusion_report.counts == {"LinearSquaredReLU": 1}
    x = ndl.Tensor(np.random.randn(*shape).astype("float32"))
    grads = []
    for n in (net, fused):
        net.reset_grad()
        y = n(x)
        ndl.ops.summation(y * y).backward()
        grads.append([p.grad.numpy() for p in net.parameters()] + [x.grad.numpy(), y.numpy()])
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)
    frozen = ndl.compile(fused, (x,))
    np.testing.assert_allclose(frozen(x).numpy(), y.numpy(), rtol=1e-5, atol=1e-5)
