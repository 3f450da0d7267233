"""profiling/sweep.py: what the table says of results, what is a cliff, runs that go on where one stopped, the list of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sweep
from peers.table import OURS
from zoo import sizes

EXTRA = """
from peers.table import Peer

def broken(task):
    raise ValueError("[broken] no such operator.")

PEERS = [Peer("broken", "torch", broken, ("numpy",))]
"""


def row(engine: str, ratio: float | None, **facts: Any) -> dict[str, Any]:
    status = {"status": "ok", "reason": ""} if ratio else {"status": "failed", "reason": "no such operator"}
    return {"engine": engine, "ratio": ratio, "ratio_of_least": ratio, "ms": ratio, "error": 1e-6, **status, **facts}


def step(op: str, ms: float, roofline: float | None) -> dict[str, Any]:
    return {"name": op.upper(), "op": op, "shape": [1, 2], "ms": ms, "roofline": roofline}


def result(model: str, rows: list[dict[str, Any]], steps: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"model": model, "rows": [*rows, row(OURS, 1.0)], "layers": {"rows": steps or []}}


def test_best_peer_is_the_fastest_other_engine() -> None:
    rows = [row("torch eager", 2.0), row("openvino", 0.8), row("mnn", None), row("needle low", 0.5)]
    best = sweep.best_peer(result("m", rows))
    assert best is not None and best["engine"] == "openvino"
    assert sweep.best_peer(result("m", [row("mnn", None)])) is None


@pytest.mark.parametrize(
    ("ms", "roofline", "expected"),
    [(3.1, 0.24, True), (2.9, 0.24, False), (3.1, 0.26, False), (3.1, None, False)],
    ids=["cliff", "short", "near-the-roofline", "unknown-roofline"],
)
def test_cliff(ms: float, roofline: float | None, expected: bool) -> None:
    found = sweep.cliffs(result("m", [], [step("rest", 100 - ms, 0.9), step("gather", ms, roofline)]))
    assert [s["op"] for s in found] == (["gather"] if expected else [])


def test_page_has_the_worst_first_and_every_reason() -> None:
    results = [
        result("faster", [row("openvino", 1.5)]),
        result("slower", [row("openvino", 0.5), row("mnn", None)], [step(f"op{i}", i, 0.5) for i in range(5)]),
        {"model": "unbuilt", "failed": "export to torch: no module"},
    ]
    text = sweep.page(results, "a note")
    lines = text.splitlines()
    at = [next(i for i, line in enumerate(lines) if line.startswith(n)) for n in ("unbuilt", "slower", "faster")]
    assert at == sorted(at) and lines[0] == "a note"
    assert "ahead of the best peer on 1 of 2 models that have a ratio, 3 models in all" in text
    assert "    failed: export to torch: no module" in lines and "    mnn: failed: no such operator" in lines
    assert [line.split()[0] for line in lines if line.startswith("    op")] == ["op4", "op3", "op2"]


def test_every_timed_peer_is_shown() -> None:
    lines = sweep.model_lines(result("m", [row("torch eager", 2.0), row("mnn", None), row("openvino", 0.8)]))
    assert lines[1:3] == ["    openvino 0.80, torch eager 2.00", "    mnn: failed: no such operator"]


def test_cliff_page_sums_by_op() -> None:
    steps = [step("lstm", 50, 0.1), step("lstm", 25, 0.2), *[step("add", 2.5, 0.1)] * 4, *[step("mul", 1.5, 0.5)] * 10]
    lines = sweep.cliff_page([result("m", [], steps), {"model": "unbuilt", "failed": "no"}]).splitlines()
    assert lines[0].startswith("2 steps")  # the single additions are short
    assert any(line.startswith("2 ops of a model") for line in lines)
    assert any(line.endswith("add x 4: 10% of the run, 10% of the roofline") for line in lines)
    assert [line.split() for line in lines[-2:]] == [["lstm", "1", "0.75"], ["add", "1", "0.10"]]


def test_roofline_of_an_op_is_weighted_by_time() -> None:
    found = sweep.groups(result("m", [], [step("lstm", 30, 0.1), step("lstm", 10, 0.5), step("add", 1, None)]))
    assert [(g["op"], g["count"], g["roofline"]) for g in found] == [("lstm", 2, pytest.approx(0.2)), ("add", 1, None)]


def test_run_goes_on_where_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with two outputs against float64 torch, in real workers; then a folder that has it already."""
    extra = tmp_path / "extra.py"
    extra.write_text(EXTRA)
    options = ["--out", str(tmp_path / "out"), "--rows", "audio/CRNN", "--peers", "torch eager", "broken"]
    options += ["--extra", str(extra), "--batch", "2", "--rounds", "1", "--threads", "1", "--budget", "0.01"]
    (found,) = sweep.run(sweep.arguments(options))
    rows = {r["engine"]: r for r in found["rows"]}
    assert found["shapes"] == [[2, 1, 200, 64]] and list(rows) == ["torch eager", "broken", OURS]
    assert rows["torch eager"]["ratio"] > 0 and 0 < rows[OURS]["error"] < 1e-5
    table = (tmp_path / "out/table.txt").read_text()
    assert "broken: failed: ValueError: [broken] no such operator." in table
    assert any(s["op"] == "lstm" for s in sweep.steps(found))
    pytest.importorskip("matplotlib")
    assert (tmp_path / "out/sweep.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sweep, "measured", lambda *_: pytest.fail("measured again"))
    assert sweep.run(sweep.arguments(options)) == [found]
    with pytest.raises(SystemExit, match="has results of other settings"):
        sweep.run(sweep.arguments([*options, "--batch", "3"]))


def test_arguments_refuse_unknown_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.arguments(["--out", "x", "--rows", "torchvision/resnet18", "nobody"])
    assert "got nobody" in capsys.readouterr().err


def test_list_of_models() -> None:
    table = sizes.table()
    assert len(table) >= 60 and set(sizes.SAMPLE) <= set(table)
    assert {n.partition("/")[0] for n in table} >= {"torchvision", "timm", "transformers", "audio"}
    for name in table:
        given, _ = sizes.entry(name, 2)["inputs"]
        assert all(spec["shape"][0] == 2 and all(isinstance(n, int) for n in spec["shape"]) for spec in given.values())
    listed = {e["name"]: e["model"] for e in json.loads(sizes.LIST.read_text())}
    assert all(table[n]["model"] == listed[n] for n in table if n in listed and n.startswith(("torchvision", "timm")))
