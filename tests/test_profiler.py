"""`needle.profile`: rows, peaks, the views of a profile, and the memory report of a plan."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import nn
from needle.autograd import Spec
from needle.backend_ndarray import Device
from needle.backend_selection import BACKEND
from needle.op import OPS, Op
from needle.profiler import Peaks, Profile, write_file
from needle.profiler.peaks import copy_rates
from needle.profiler.record import recording
from needle.profiler.table import COLUMNS, short
from test_ops import CASES, case, tensors

INPUT = (2, 3, 32, 32)


class Net(nn.Module):
    """Convolutions, a shared activation, a residual sum, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv(3, 16, 3, padding=1, layout="torch")
        self.second = nn.Conv(16, 16, 3, padding=1, layout="torch")
        self.relu = nn.ReLU()
        self.head = nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        a = self.relu(self.first(x))
        b = self.relu(self.second(a) + a)
        return self.head(b.sum(axes=(2, 3)))


def image() -> np.ndarray:
    return np.random.standard_normal(INPUT).astype("float32")


@pytest.fixture(scope="module")
def eager() -> Profile:
    np.random.seed(0)
    return ndl.profile(Net().eval(), image(), rounds=5)


@pytest.fixture(scope="module")
def compiled() -> Profile:
    np.random.seed(0)
    return ndl.profile(Net().eval(), image(), rounds=5, compiled=True)


@pytest.fixture(params=["eager", "compiled"])
def any_profile(request: pytest.FixtureRequest) -> Profile:
    return request.getfixturevalue(request.param)


def test_eager_rows_have_module_paths(eager: Profile) -> None:
    rows = {(r.name, r.op): r for r in eager.rows}
    assert rows["first", "conv2d"].flops == 2 * 2 * 16 * 32 * 32 * 3 * 9
    assert rows["relu", "relu"].calls == 2  # one layer called twice at one shape
    assert rows["head", "linear"].shape == (2, 5)
    weight, x, out = 16 * 16 * 9, 2 * 16 * 32 * 32, 2 * 16 * 32 * 32
    second = rows["second", "conv2d"]
    assert second.written == 4 * out == second.memory
    assert second.read in (4 * (x + weight), 4 * (x + weight + 16))  # with or without the bias in the kernel


def test_compiled_rows_are_the_plan(compiled: Profile) -> None:
    net, x = Net().eval(), image()
    exe = ndl.compile(net, (x,))
    assert [r.op for r in compiled.rows] == exe.plan.names
    flops = {r.name.partition(" + ")[0]: r.flops for r in compiled.rows if r.op.startswith("conv2d")}
    n = 2 * 16 * 32 * 32  # results, each of which is activated; in the second layer something is added, too
    assert flops["first"] == n * (2 * 3 * 9 + 1)
    assert flops["second"] == n * (2 * 16 * 9 + 2)
    assert [r.op for r in ndl.profile(exe, x, rounds=1).rows] == exe.plan.names
    assert all(r.flops == 0 for r in compiled.rows if r.op in ("to_blocked", "from_blocked", "zero_halo"))


@pytest.mark.skipif(BACKEND == "np", reason="the numpy backend runs the layer's steps")
def test_ops_with_several_results_count_all_of_them() -> None:
    rows = {r.op: r for r in ndl.profile(nn.LSTM(3, 5), np.ones((4, 2, 3), "float32"), rounds=1).rows}
    steps = rows["lstm"]
    assert steps.flops == 2 * 4 * 2 * 5 * 20 and steps.shape == (4, 2, 5)
    assert steps.written == steps.memory == 4 * 4 * 2 * (5 + 5 + 20)  # h, c and the gates
    assert steps.read == 4 * (4 * 2 * 20 + 5 * 20 + 2 * 2 * 5 + 20)
    assert rows["tuple_get_item"].written == 0


def test_profile_of_one_call_leaves_no_hooks() -> None:
    before = Op._run, nn.Module.__call__
    model = Net().eval()
    ndl.profile(model, image(), rounds=1)
    model.forward = lambda x: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        ndl.profile(model, image(), rounds=1)
    assert before == (Op._run, nn.Module.__call__)


def test_shares_and_times(any_profile: Profile) -> None:
    data = any_profile.to_dict()
    assert sum(r["share"] for r in data["rows"]) == pytest.approx(1)
    assert sum(r["seconds"] for r in data["rows"]) == pytest.approx(data["seconds_in_rows"])
    assert data["seconds"]["min"] <= data["seconds"]["median"] <= data["seconds"]["max"]
    # Timers and, in eager calls, Python between the ops: far less than a factor of ten either way.
    assert data["seconds"]["min"] / 10 < data["seconds_in_rows"] < 10 * data["seconds"]["max"]


@pytest.mark.parametrize("compiled", [False, True])
def test_roofline(compiled: bool) -> None:
    """Nothing is much faster than the machine, but for Winograd's saving of up to 4 times the operations.

    Measured again when neighbours slowed the measurement of its peaks down.
    """
    for _ in range(3):
        data = ndl.profile(Net().eval(), image(), rounds=5, compiled=compiled).to_dict()
        rows = [r for r in data["rows"] if r["roofline"] is not None]
        shown = [r["roofline"] / (4 if "winograd" in r["op"] else 1) for r in rows]
        if max(shown) <= 1.5:
            break
        copy_rates.cache_clear()
    assert all(0 < v <= 1.5 for v in shown)
    assert max(shown) > 0.05


def test_peaks_take_the_slower_of_arithmetic_and_memory() -> None:
    peaks = Peaks(1e9, ((1000, 8e9), (100_000, 2e9)), "cpu", "scalar", 1)
    assert peaks.seconds(2e9, 0) == 2.0
    assert peaks.seconds(0, 500) == 500 / 8e9  # fits in the cache
    assert peaks.seconds(0, 1_000_000) == 1_000_000 / 2e9
    assert peaks.seconds(10, 1_000_000) == peaks.seconds(0, 1_000_000)
    assert peaks.bandwidth == 2e9


def test_table_fits_into_120_columns(any_profile: Profile) -> None:
    long = any_profile.rows[0]._replace(
        name="block." * 20 + "conv", op="fused_" * 9, shape=(1, 64, 112, 112, 16), seconds=9.0
    )
    wide = Profile(**{**vars(any_profile), "rows": [*any_profile.rows, long]})
    text = wide.table()
    assert max(map(len, text.splitlines())) <= 120
    assert ".conv " in text  # of a path the end stays
    assert all(c.title in text for c in COLUMNS)
    assert "9000.000" in text


def columns_of(line: str) -> list[str]:
    return line.replace(" + ", "+").split()  # a step of several ops has all of their names


def test_table_sorts_and_limits(compiled: Profile) -> None:
    assert len(compiled.table(limit=2).splitlines()) == 5
    in_order = [columns_of(line)[1] for line in compiled.table("order").splitlines()[2:]]
    assert in_order == [r.op for r in compiled.rows]
    times = [r["ms"] for r in sorted(compiled.to_dict()["rows"], key=lambda r: -r["ms"])]
    assert columns_of(compiled.table().splitlines()[2])[4] == f"{times[0]:.3f}"
    with pytest.raises(ValueError, match=r"^\[profile\] sort expects .* got colour\.$"):
        compiled.table("colour")


def test_by_op_sums(compiled: Profile) -> None:
    merged = compiled.by_op()
    for column in ("seconds", "flops", "read", "calls"):
        assert sum(getattr(r, column) for r in merged.rows) == pytest.approx(
            sum(getattr(r, column) for r in compiled.rows)
        )
    assert len({r.op for r in merged.rows}) == len(merged.rows)


def test_json_is_the_dict(any_profile: Profile, tmp_path: Path) -> None:
    any_profile.to_json(tmp_path / "p.json")
    data = json.loads((tmp_path / "p.json").read_text())
    assert data == json.loads(json.dumps(any_profile.to_dict()))
    assert set(data) == {
        "kind", "model", "inputs", "rounds", "machine", "seconds", "seconds_in_rows", "rows", "timeline", "memory", "decomposed",
    }  # fmt: skip
    assert data["inputs"] == [list(INPUT)]
    assert {"cpu", "isa", "threads", "peak_gflops", "bandwidth_gbs", "cache_gbs", "copies"} == set(data["machine"])


def test_chrome_trace(any_profile: Profile, tmp_path: Path) -> None:
    any_profile.chrome_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X"]
    assert len(steps) == len(any_profile.timeline) == sum(r.calls for r in any_profile.rows)
    for a, b in itertools.pairwise(steps):
        assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    memory = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert len(memory) == len(steps)
    assert max(memory) == any_profile.memory["peak"] > 0
    assert {e["name"] for e in events if e["ph"] == "M"} == {"process_name", "thread_name"}


class Cells(HTMLParser):
    """The texts of a page's table cells, by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        self._inside = tag in ("td", "th")
        if self._inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


def test_html_shows_every_row(any_profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    any_profile.html(tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    rows = sorted(any_profile.to_dict()["rows"], key=lambda r: -r["seconds"])
    assert Cells(page).rows[1:] == [[c.text(r[c.key]) for c in COLUMNS] for r in rows]
    assert page.count("<svg") == 3 and all(c.note in html.unescape(page) for c in COLUMNS)
    assert not re.search(r"""(src|href)=["'](?!data:|#)|url\((?!#)""", page)  # nothing is loaded from elsewhere
    assert f"<h1>Net, {any_profile.kind}</h1>" in page


def test_pictures_of_a_profile(compiled: Profile) -> None:
    """Rows above the roofs, as Winograd's, are inside the axes; an op has one colour in all pictures."""
    plots = pytest.importorskip("needle.profiler.plots")
    data = compiled.to_dict()
    rows = [r | {"gflops": 40 * data["machine"]["peak_gflops"]} if r["gflops"] else r for r in data["rows"]]
    shade = plots.shades_of(rows)
    axes = plots.roofline(rows, data["machine"], shade).axes[0]
    shown = [c.get_offsets()[0] for c in axes.collections]
    assert shown and all(axes.get_ylim()[0] < y < axes.get_ylim()[1] for _, y in shown)
    figures = plots.operator_times(rows, 15, shade), plots.memory_plan(data["memory"], shade)
    keys = [dict(zip(texts_of(f), f.legends[0].legend_handles, strict=True)) for f in figures]
    both = set(keys[0]) & set(keys[1])
    assert both and all(keys[0][n].get_facecolor() == keys[1][n].get_facecolor() for n in both)
    drawn = plots.inline(figures[0], "a")
    assert "var(--ink)" in drawn and plots.INK not in drawn and "url(#" in drawn


def texts_of(figure: Any) -> list[str]:
    return [t.get_text() for t in figure.legends[0].get_texts()]


def test_rounds_that_differ_are_told(compiled: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for times, told in (([1.0, 1.29], False), ([1.0, 1.1, 1.35], True)):
        profile = dataclasses.replace(compiled, times=times)
        profile.html(tmp_path / "p.html")
        assert ("Rounds differ much (whole runs by 1.4x)" in str(profile)) is told
        assert ("Rounds differ much" in (tmp_path / "p.html").read_text()) is told


def test_memory_report() -> None:
    exe = ndl.compile(Net().eval(), (image(),))
    exe(image())
    memory = exe.memory
    assert set(memory) == {"arena", "lower_bound", "constants", "arenas"}
    data = memory.timeline()
    buffers = data["buffers"]
    assert max(b["offset"] + b["nbytes"] for b in buffers) <= memory["arena"]
    assert data["peak"] == memory["lower_bound"] == max(data["live"]) == data["live"][data["peak_step"]]
    assert data["reuse"] == pytest.approx(sum(b["nbytes"] for b in buffers) / memory["arena"])
    for i, a in enumerate(buffers):
        for b in buffers[:i]:
            apart = a["last"] < b["first"] or b["last"] < a["first"]
            below = a["offset"] + a["nbytes"] <= b["offset"] or b["offset"] + b["nbytes"] <= a["offset"]
            assert apart or below
    assert {b["kind"] for b in buffers} <= set(exe.plan.names) - {"zero_halo"}
    assert {"first", "second"} & {b["label"] for b in buffers}
    assert f"arena {memory['arena'] / 1e6:.2f} MB" in str(memory)
    assert json.loads(json.dumps(data)) == data


def test_memory_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    exe = ndl.compile(Net().eval(), (image(),))
    exe.memory.picture(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "index"), CASES)
def test_every_sample_of_an_op_is_recorded(name: str, index: int) -> None:
    """Operations and bytes are known for every op on every shape: from shapes alone, and never negative."""
    op, arrays = case(name, index)
    inputs = tensors(arrays, numpy=False)
    with recording(nn.Module()) as recorder:
        op(*inputs)
    for c in recorder.calls:
        assert min(c.flops, c.read, c.written, c.memory) >= 0
        assert c.flops == 0 or c.written > 0 or math.prod(c.shape) == 0


def test_flops() -> None:
    x, w = Spec((2, 4, 8, 8)), Spec((6, 4, 3, 3))
    conv = OPS["Conv2d"]()
    assert conv.flops(conv.infer(x, w), x, w) == 2 * (2 * 6 * 6 * 6) * (4 * 9)
    fused = OPS["FusedLayer"](conv, "relu")
    assert fused.flops(conv.infer(x, w), x, w) == conv.flops(conv.infer(x, w), x, w)
    back, y, v = OPS["ConvTranspose2d"](stride=(2, 2)), Spec((1, 4, 5, 5)), Spec((4, 3, 2, 2))
    assert back.flops(back.infer(y, v), y, v) == 2 * (4 * 25) * (3 * 4)
    assert OPS["MatMul"]().flops(Spec((7, 5, 3)), Spec((7, 5, 4)), Spec((4, 3))) == 2 * 7 * 5 * 3 * 4
    assert OPS["Linear"]().flops(Spec((7, 3)), Spec((7, 4)), Spec((3, 4))) == 2 * 7 * 3 * 4
    assert OPS["Reshape"]((6,)).flops(Spec((6,)), Spec((2, 3))) == 0


def test_a_step_of_two_ops_counts_both() -> None:
    class Separable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.point = nn.Conv(8, 32, 1, layout="torch")
            self.spatial = nn.Conv(32, 32, 3, padding=1, groups=32, layout="torch")

        def forward(self, x):
            return self.spatial(self.point(x))

    x = np.zeros((1, 8, 10, 10), "float32")
    profile = ndl.profile(ndl.compile(Separable().eval(), x), x, rounds=1)
    (row,) = (r for r in profile.rows if r.op == "conv2d_depthwise")
    assert row.name == "point + spatial"
    assert row.flops == 2 * 32 * 100 * (8 + 9)


class TestErrors:
    def test_training_mode(self) -> None:
        model = nn.Sequential(nn.BatchNorm2d(3))
        with pytest.raises(ValueError, match=r"^\[profile\] 1 modules are in training mode .*; call net\.eval\(\)\.$"):
            ndl.profile(model, image())

    def test_not_a_model(self) -> None:
        with pytest.raises(TypeError, match=r"^\[profile\] expects a Module or an Executable, got str\.$"):
            ndl.profile("resnet18", image())  # type: ignore[arg-type]

    def test_rounds(self) -> None:
        with pytest.raises(ValueError, match=r"^\[profile\] rounds expects at least 1, got 0\.$"):
            ndl.profile(Net().eval(), image(), rounds=0)


def test_missing_extra_is_one_sentence(tmp_path: Path) -> None:
    """Tables, JSON and traces work without matplotlib and jinja2; a page says what it needs."""
    code = """
import sys
sys.modules["matplotlib"] = sys.modules["jinja2"] = None
import numpy as np, needle as ndl
p = ndl.profile(ndl.nn.Sequential(ndl.nn.Linear(4, 3)).eval(), np.ones((2, 4), "float32"), rounds=1)
p.table(), p.to_json(sys.argv[1] + "/p.json"), p.chrome_trace(sys.argv[1] + "/t.json")
try:
    p.html(sys.argv[1] + "/p.html")
except ImportError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\[profile\] pictures need matplotlib, got none: .* the extra report\.", done.stdout.strip())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "t.json"]


def test_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    write_file(path, "old")

    def interrupt(self: Path, data: bytes) -> None:
        self.open("wb").write(data[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, "new content")
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert path.read_text() == "old"


def test_short_numbers() -> None:
    assert [short(v) for v in (None, 0, 0.01234, 1.234, 12.34, 1234.5)] == ["-", "0", "0.012", "1.23", "12.3", "1234"]


def test_a_gpu_is_not_held_against_the_cpus_peaks(gpu: Device, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4, device=gpu), nn.ReLU()).eval()
    profile = ndl.profile(net, ndl.Tensor(np.ones((2, 3)), device=gpu), rounds=2)
    data = profile.to_dict()
    assert set(data["machine"]) == {"device", "name", "units"} and data["machine"]["device"] == repr(gpu)
    assert [r["roofline"] for r in data["rows"]] == [None, None] and all(r["gflops"] is not None for r in data["rows"])
    assert (
        str(profile).splitlines()[1].endswith(f"{gpu!r}, {data['machine']['units']} units: its peaks are not measured")
    )
    profile.html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "its peaks are not measured" in page and "Roofline" not in page
