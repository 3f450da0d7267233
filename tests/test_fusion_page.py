"""`fusion_report.html`: the drawing has every step and edge of both graphs, and the page says what the report holds."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
import operator_fusion
from needle import nn
from needle.profiler.peaks import Gpu

fusion = pytest.importorskip("needle.profiler.fusion")  # matplotlib and jinja2


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv(width, width, 3, padding=1, bias=False, layout="torch") for _ in range(2))
        self.m, self.n = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Any) -> Any:
        y = ndl.relu(self.m(self.a(x)))
        return ndl.relu(self.n(self.b(y)) + x)


class Projections(nn.Module):
    """Joined linear layers, whose fused op comes before what stands between them; the last product has two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.up = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        q = ndl.tanh(self.q(x) * 2)
        k = ndl.tanh(self.k(x) * 3)
        u = self.up(q + k + self.v(x))
        return ndl.relu(u) + u


NETS = {
    "blocks": (lambda: nn.Sequential(*(Block() for _ in range(20))), (1, 4, 6, 6)),
    "one block": (lambda: nn.Sequential(Block()), (1, 4, 6, 6)),
    "projections": (Projections, (3, 8)),
    "nothing": (lambda: nn.Sequential(nn.Flatten()), (2, 3)),
}


@pytest.mark.parametrize("name", NETS)
def test_every_step_and_edge_is_drawn(name: str, tmp_path: Path) -> None:
    make, shape = NETS[name]
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    report = operator_fusion.fuse(make().eval(), example=x).fusion_report
    before, after = report.graphs
    rows = fusion.rows_of(before, after, report.fired, report.near_misses)
    assert [r.before for r in rows if r.before] == before and [r.after for r in rows if r.after] == after  # in order
    for place, graph in zip(fusion.places(rows), (before, after), strict=True):
        assert all(place[a] < place[v.name] for v in graph for a in v.inputs)
    beside = {r.after.name: r for r in rows if r.after}
    for f in report.fired:
        assert beside[f.node_out].before is None or beside[f.node_out].before.name in f.nodes_in
    drawn, where = fusion.folded(rows)
    assert (name == "blocks") == (len(drawn) < len(rows))
    repeated = [r for r in drawn if r.times]
    assert len(drawn) - len(repeated) + sum(r.times * int(r.pattern) for r in repeated) == len(rows)
    for place, graph in zip(where, (before, after), strict=True):
        assert all(place[a] <= place[v.name] < len(drawn) for v in graph for a in v.inputs)
        sources = {(place[a], place[v.name]) for v in graph for a in v.inputs} - {(i, i) for i in range(len(drawn))}
        s = fusion.side(drawn, graph, place, graph is before)
        assert {*s.straight, *s.far} == sources and all(a in s.lane for a, _ in s.far)

    report.html(tmp_path / "f.html")
    page = (tmp_path / "f.html").read_text()
    (svg,) = re.findall(r"<svg.*?</svg>", page, re.S)
    boxes = [r for r in ET.fromstring(svg).iter("rect") if r.get("class", "").startswith("step")]
    assert len(boxes) == sum((r.before is not None) + (r.after is not None) for r in drawn)
    assert not re.search(r"""(src|href)=["']|<script|url\(""", page)
    told = html.unescape(page)
    assert all(f.why in told and f.node_out in told and f"{f.delta:.1e}" in told for f in report.fired)
    assert all(m.reason in told for m in report.near_misses)
    assert (name == "projections") == bool(report.near_misses) == ("step missed" in page)


def test_lanes_do_not_meet() -> None:
    edges = {0: 9, 1: 3, 2: 4, 3: 6, 4: 8, 7: 9}
    lane = fusion.lanes(edges)
    for a, b in ((a, b) for a in edges for b in edges if a < b and lane[a] == lane[b]):
        assert edges[a] <= b
    assert fusion.lanes({}) == {} and max(fusion.lanes({i: 1000 for i in range(50)}).values()) == fusion.LANES - 1


def test_times_belong_to_one_fusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a plan that compute more than one fused op, or other nodes too, are nobody's."""
    monkeypatch.setattr(
        "needle.profiler.run.peaks_of", lambda device: Gpu("none", "none", 1)
    )  # measuring takes seconds
    x = np.ones((1, 4, 6, 6), "float32")
    fused = operator_fusion.fuse(nn.Sequential(Block(), Block()).eval())
    profile = ndl.profile(fused, x, rounds=1)
    report = fused.fusion_report
    found = fusion.seconds_of(report, profile)
    assert set(found) == {f.node_out for f in report.fired}
    assert sum(found.values()) == pytest.approx(sum(r.seconds for r in profile.rows))
    first, second = report.fired[:2]
    joined = [r._replace(name=f"{first.node_out} + {second.node_out}") for r in profile.rows[:1]]
    other = profile.rows[2]._replace(name=f"{report.fired[2].node_out} + else")

    class Merged:
        rows = [*joined, *profile.rows[1:], other]

    assert set(fusion.seconds_of(report, Merged)) == {report.fired[3].node_out}
    report.html(tmp_path / "f.html", profile)
    assert "in 4 of 4 fused ops; a whole run takes " in (tmp_path / "f.html").read_text()


def test_a_plan_has_tables_alone(tmp_path: Path) -> None:
    if not hasattr(ndl.default_device(), "core") or ndl.default_device().core is None:
        pytest.skip("the device has no plans")
    x = np.ones((1, 4, 6, 6), "float32")
    exe = ndl.compile(operator_fusion.fuse(Block().eval()), (x,))
    exe(x)
    exe.report.html(tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert "Before and after" not in page and "What fired" in page


def test_the_dry_run_and_names_as_they_are(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["a<b"] = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return ndl.relu(self.__dict__["a<b"](x))

    report = operator_fusion.fuse(Odd().eval(), dry_run=True).fusion_report
    report.html(tmp_path / "f.html")
    page = (tmp_path / "f.html").read_text()
    assert "<h1>Odd: 2 calls would become 1</h1>" in page and "a<b" not in page and "a&lt;b" in page
