"""`check` and the text of what cannot be converted: all of it at once, with lines to paste that work once filled in."""

from __future__ import annotations

import html
import importlib
import json
import operator
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from needle.backend_selection import BACKEND  # noqa: E402
from torch2needle.rules import registry  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_rules")
GOLDEN = Path(__file__).parent / "golden"


SOURCE = """
import torch
from torch import nn

class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.table = nn.EmbeddingBag(8, 8, scale_grad_by_freq=True)
        self.drop = nn.Dropout()

    def forward(self, x, mask):
        y = torch.renorm(self.fc(x), 2, 0, 1.0)
        y = torch.renorm(y, 2, 0, 1.0) + torch.nan_to_num(x).view(x.size(0), -1)
        y = y.nextafter(mask[:, None].float()) + self.drop(x)
        return self.table(mask[None])[0], y
"""


def unusual() -> nn.Module:
    """Two operations without rules, one of them in two lines, and one that its rule refuses."""
    names: dict[str, Any] = {"__name__": "unusual"}
    exec(compile(SOURCE, "/models/unusual.py", "exec"), names)
    return names["Unusual"]()


EXAMPLE = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))


def golden(name: str, text: str) -> None:
    assert text + "\n" == (GOLDEN / name).read_text()


def test_the_report_of_an_unsupported_model() -> None:
    report = torch2needle.check(unusual().eval(), EXAMPLE)
    golden("report.txt", str(report))
    assert not report and not report.ok


def test_the_error_of_an_unsupported_model() -> None:
    with pytest.raises(torch2needle.ConversionError) as e:
        torch2needle.convert(unusual().eval(), EXAMPLE)
    golden("error.txt", str(e.value))


def test_json() -> None:
    report = torch2needle.check(unusual().eval(), EXAMPLE)
    data = json.loads(report.json())
    assert list(data) == ["ok", "rows", "capture", "follows_mode", "constant_flags", "notes"] and data["ok"] is False
    assert [r["op"] for r in data["rows"]] == [r.op for r in report.rows]
    row = next(r for r in data["rows"] if r["op"] == "torch.renorm")
    assert row["status"] == "unsupported" and row["location"] == "/models/unusual.py:13" and "def test_" in row["stub"]
    assert json.loads(torch2needle.check(nn.Sequential(nn.ReLU())).json())["ok"] is True


def test_statuses() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return torch.nan_to_num(self.fc(x)).view(x.size(0), -1) * 2

    report = torch2needle.check(Model(), (torch.ones(4, 8),))
    found = {r.op: r.status for r in report.rows}
    assert found == {
        "torch.nn.Linear": "native",
        "torch.nan_to_num": "decomposed",
        "torch.Tensor.size": "free",
        "torch.Tensor.view": "native",
        "operator.mul": "native",
    }
    assert str(report).startswith("5 calls of 5 operations: 3 native, 1 decomposed, 1 free\ncaptured by torch.fx\n")
    assert "nearest rule" not in str(report)


# -- stubs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules that a test adds are taken back, and torch.fx alone captures: by torch.export's names other rules may hold."""
    monkeypatch.setattr(importlib.import_module("torch2needle.convert"), "captures", lambda *_: iter(()))
    tables: list[dict] = [registry.FUNCTION_RULES, registry.MODULE_RULES]
    before = [dict(t) for t in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


class Calls(nn.Module):
    """A forward of `f`; `layer` is handed to it."""

    def __init__(self, f: Any, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.f, self.layer = f, layer

    def forward(self, x: Any) -> Any:
        return self.f(x, self.layer)


# What a model calls, the keys whose rules are taken away first, and what a user writes for the line to fill in.
BODIES: dict[str, tuple[Any, list[Any], str]] = {
    "function": (lambda x, _: torch.special.expit(x), [torch.special.expit], "return ops.sigmoid(input)"),
    "keywords": (
        lambda x, _: torch.addcmul(x, x + 1, tensor2=x * x, value=0.5),
        [torch.addcmul],
        "return input + value * other * tensor2",
    ),
    "method": (lambda x, _: (x * 2).square(), [torch.Tensor.square], "return input * input"),
    "list": (lambda x, _: torch.cat([x, x + 1], dim=1), [torch.cat], "return ops.concat(input, dim)"),
    "operator": (lambda x, _: x / (x * x + 1), [operator.truediv], "return a * b**-1.0"),
    "module": (lambda x, layer: layer(x)[0], [nn.GRU], "return original(module)"),
}


@pytest.mark.skipif(BACKEND == "np", reason="verify compiles")
@pytest.mark.parametrize("example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("name", BODIES)
def test_stubs_are_rules_with_tests_once_filled_in(name: str, example: bool, rules: None) -> None:
    f, targets, body = BODIES[name]
    original = [
        t.pop(target) for target in targets for t in (registry.FUNCTION_RULES, registry.MODULE_RULES) if target in t
    ]
    assert original
    model = Calls(f, nn.GRU(8, 3, batch_first=True) if name == "module" else None).eval()
    x = torch.rand(2, 5, 8) if name == "module" else torch.rand(2, 8)
    report = torch2needle.check(model, (x,) if example else None)
    (row,) = report.unsupported
    assert row.reason.startswith("there is no rule for ") and str(report).count("def test_convert_") == 1
    (line,) = [t for t in row.stub.splitlines() if "raise NotImplementedError(" in t]
    text = row.stub
    if name == "module" and not example:
        text = text.replace("torch.rand((2, 8))", "torch.rand((2, 5, 8))")

    unfilled: dict[str, Any] = {}
    exec(row.stub, unfilled)  # as pasted: its test fails, and says what is to be done
    test = next(v for k, v in unfilled.items() if k.startswith("test_convert_"))
    with pytest.raises((torch2needle.ConversionError, torch2needle.Unsupported), match=r"its result|a layer of needle"):
        test()

    for t in (registry.FUNCTION_RULES, registry.MODULE_RULES):
        for target in targets:
            t.pop(target, None)
    filled: dict[str, Any] = {"ops": ndl.ops, "original": original[0]}
    exec(text.replace(line, f"    {body}"), filled)
    next(v for k, v in filled.items() if k.startswith("test_convert_"))()
    assert torch2needle.verify(model, torch2needle.convert(model, (x,)), x)


def test_stub_of_an_overload(rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # both captures
    model = Calls(lambda x, _: torch.renorm(x, 2, 1, 1.0) if x.shape[1] > 3 else x).eval()
    x = torch.rand(2, 8)
    (row,) = torch2needle.check(model, x).unsupported
    (line,) = [t for t in row.stub.splitlines() if "raise NotImplementedError(" in t]
    square = row.stub.replace(line, "    return input * input")
    names: dict[str, Any] = {}
    exec(square, names)
    with pytest.raises(torch2needle.ConversionError, match="the converted model's output 0 is off by"):
        names["test_convert_renorm"]()
    assert any("is off by" in r.reason for r in torch2needle.check(model, x).unsupported)  # the rule is found


def test_a_wrong_rule_fails_its_test(rules: None) -> None:
    registry.FUNCTION_RULES.pop(torch.special.expit)
    (row,) = torch2needle.check(Calls(BODIES["function"][0])).unsupported
    (line,) = [t for t in row.stub.splitlines() if "raise NotImplementedError(" in t]
    names: dict[str, Any] = {}
    exec(row.stub.replace(line, "    return input * 2"), names)
    with pytest.raises(torch2needle.ConversionError, match="the converted model's output 0 is off by"):
        names["test_convert_expit"]()


def test_what_people_look_at_is_short() -> None:
    """In a notebook, too: one line as `repr`, all as text there."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), torch.randn(2, 4)
    fused = operator_fusion.fuse(torch2needle.convert(model))
    exe = ndl.compile(fused, (x,))
    step = ndl.compile_step(fused, lambda out, y: (out * out).mean(), ndl.optim.SGD(fused.parameters(), 0.1), (x, x))
    looked_at = [
        fused.report,
        fused.fusion_report,
        fused.graph,
        exe,
        exe.plan,
        exe.memory,
        step,
        ndl.profile(exe, x, 1),
    ]
    looked_at.append(ndl.compile(torch2needle.convert(Calls(lambda x, _: x[x > 0]), (x,)), (x,)))
    for shown in [*looked_at, torch2needle.verify(model, fused, x)]:
        assert (
            len(repr(shown)) < 200 and "\n" not in repr(shown) and repr(shown).startswith(f"<{type(shown).__name__}: ")
        )
        assert shown._repr_html_() == f"<pre>{html.escape(str(shown))}</pre>"
    assert repr(fused.report) == "<Report: 2 calls of 2 operations: 2 native>"


@pytest.mark.parametrize("calls", [0, 1, 30, 400])
def test_a_long_net_shows_its_ends(calls: int) -> None:
    net = torch2needle.convert(torch.nn.Sequential(*[torch.nn.ReLU() for _ in range(calls)]))
    lines, shown = str(net).splitlines(), repr(net).splitlines()
    assert len(lines) == calls + 4 and len(shown) <= 81 and (shown[0], shown[-1]) == (lines[0], lines[-1])
    if calls == 400:
        assert shown[40] == "... 324 more, print(net) has all" and set(shown) - set(lines) == {shown[40]}
    else:
        assert shown == lines


def test_errors_cross_processes() -> None:
    """As exceptions of a pool's workers do."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(x)

    with pytest.raises(torch2needle.ConversionError) as found:
        torch2needle.convert(Model())
    again = pickle.loads(pickle.dumps(found.value))
    assert str(again) == str(found.value) and again.report.unsupported[0].op == "torch.linalg.eigvals"
