"""profiling/bench.py: the JSON, ratios from the rounds, rows of peers that are wrong, fail, crash or are missing, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench
from peers.formats import Task, compared
from peers.processes import Child, Exports, WorkerError
from peers.table import OURS, PEERS, Peer, select, table

ROOT = Path(__file__).parents[1]
EXTRA = """
import os, sys, time
import numpy as np
from peers.table import Peer

def wanted(task):
    (want,) = task.want()
    return want.astype("float32")

def wrong(task):
    want = wanted(task)
    return lambda: [want + 0.01 * abs(want).max()]

def late(task):  # right at first, then wrong
    want, calls = wanted(task), []
    def call():
        calls.append(None)
        return [want] if len(calls) < 3 else [want + 1]
    return call

def turned(task):
    want = wanted(task).T
    return lambda: [want]

def twice(task):
    want = wanted(task)
    return lambda: [want, want]

def broken(task):
    raise ValueError("[broken] no such operator.\\nmore lines")

def crash(task):
    print("the last words", file=sys.stderr, flush=True)
    os.abort()

def slow(task):
    with open(os.environ.get("BENCH_PID", os.devnull), "w") as f:
        f.write(str(os.getpid()))
    time.sleep(300)

def make(name, load, packages=()):
    return Peer(name, "torch", load, ("numpy",), packages)

PEERS = [make(f.__name__, f) for f in (wrong, late, turned, twice, broken, crash, slow)]
PEERS.append(make("absent", wrong, ("no-such-distribution-at-all",)))
"""


@pytest.fixture(scope="module")
def extra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extra") / "extra.py"
    path.write_text(EXTRA)
    return path


@pytest.fixture(scope="module")
def written(extra: Path) -> tuple[dict[str, Any], str]:
    """The JSON and the printed text of one run with good, bad and missing peers."""
    path = extra.with_name("out.json")
    said: list[str] = []
    names = ["torch eager", "torch channels_last", "wrong", "late", "turned", "twice", "broken"]
    names += ["crash", "absent", "nobody"]
    options = ["--models", "mlp", "--batch", "3", "--rounds", "2", "--threads", "1", "--budget", "0.01"]
    args = bench.arguments([*options, "--peers", *names, "--extra", str(extra), "--json", str(path)])
    bench.run(args, said.append)
    return json.loads(path.read_text()), "\n".join(said)


@pytest.fixture(scope="module")
def rows(written: tuple[dict[str, Any], str]) -> dict[str, dict[str, Any]]:
    return {r["engine"]: r for r in written[0]["results"][0]["rows"]}


def test_document(written: tuple[dict[str, Any], str]) -> None:
    document = written[0]
    assert document["cpu"] and document["isa"] and document["threads"] == 1 and document["rounds"] == 2
    assert document["versions"]["torch"] and document["versions"]["needle"]
    assert document["versions"]["no-such-distribution-at-all"] is None
    (result,) = document["results"]
    assert result["model"] == "mlp" and result["shapes"] == [[3, 784]] and result["batch"] == 3


def test_layers(written: tuple[dict[str, Any], str]) -> None:
    document, text = written
    layers = document["results"][0]["layers"]
    linear = [r for r in layers["rows"] if r["op"].startswith("matmul")]
    assert len(linear) == 3 and all(0 < r["fma_peak"] < 1.2 and r["ms"] > 0 for r in linear)
    assert layers["machine"]["peak_gflops"] > 1 and f"peak {layers['machine']['peak_gflops']:.0f} GF/s" in text
    assert all(r["name"] in text for r in linear)


def test_ratios_follow_from_the_rounds(rows: dict[str, dict[str, Any]]) -> None:
    ours = rows[OURS]["rounds_ms"]
    for name in ("torch eager", OURS):
        row = rows[name]
        ratios = [a / b for a, b in zip(row["rounds_ms"], ours, strict=True)]
        assert row["status"] == "ok" and len(ratios) == 2
        assert row["ms"] == statistics.median(row["rounds_ms"]) > 0
        assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (
            statistics.median(ratios),
            min(ratios),
            max(ratios),
        )
        assert row["least_ms"] <= min(row["rounds_ms"])
        assert row["ratio_of_least"] == row["least_ms"] / rows[OURS]["least_ms"]
        assert 0 < row["error"] < 1e-5 and row["first_s"] > 0 and row["memory_mb"] > 10
    assert (
        rows[OURS]["memory_mb"] < rows["torch eager"]["memory_mb"]
    )  # each measured for itself: ours runs without torch


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("wrong", "wrong", "differs from float64 torch by 1.0e-02"),
        ("late", "wrong", "differs from float64 torch"),
        ("turned", "wrong", "output has shape (10, 3), expects (3, 10)"),
        ("twice", "wrong", "there are 2 outputs, expects 1"),
        ("broken", "failed", "ValueError: [broken] no such operator."),
        ("crash", "failed", "the worker ended with SIGABRT: the last words"),
        ("absent", "not installed", "pip install no-such-distribution-at-all"),
        ("nobody", "unknown", "no such peer"),
        ("torch channels_last", "does not apply", "channels_last is a layout of 4-d inputs"),
    ],
)
def test_peers_without_a_time_say_why(
    rows: dict[str, dict[str, Any]], written: tuple[dict[str, Any], str], name: str, status: str, reason: str
) -> None:
    row = rows[name]
    assert row["status"] == status and reason in row["reason"] and "\n" not in row["reason"]
    assert row["ms"] is None and row["ratio"] is None
    assert any(
        line.strip().startswith(f"{name}  ") and f"{status}: {row['reason']}" in line for line in written[1].split("\n")
    )


def test_not_finite_is_wrong() -> None:
    want = np.ones((2, 2))
    assert compared([np.array([[1, np.nan], [1, 1]])], [want]) == {"error": None, "reason": "output is not finite"}


def test_error_is_that_of_the_worst_output_and_relative_to_it() -> None:
    want = [np.ones((2, 2)), np.full(3, 100.0), np.zeros(2)]
    got = [np.full((2, 2), 1.5, "float32"), np.full(3, 110.0), np.full(2, 0.25)]
    assert compared(got, want) == {"error": 0.5}
    assert compared([want[0], *got[1:]], want) == {"error": 0.25}  # absolute where all that is wanted is 0


def test_one_entry_adds_a_peer_and_a_first_word_chooses_several(extra: Path) -> None:
    peers = table(str(extra))
    assert len(peers) == len(PEERS) + 8
    assert list(select(["torch", "late"], peers)) == [
        "torch eager",
        "torch channels_last",
        "torch inductor",
        "late",
        OURS,
    ]
    assert list(select(["mnn"], peers)) == ["mnn", "mnn small blocks", OURS]
    assert list(select(None, peers)) == list(peers)
    assert select(["nobody"], peers) == {"nobody": None, OURS: peers[OURS]}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, Exports]:
    task = Task(str(tmp_path_factory.mktemp("models")), "mlp", 2, 1)
    files = Exports(task, 120)
    files.seconds("torch")
    return task, files


OTHERS = ("torch inductor", "torch channels_last")  # one takes long to compile, the other does not apply
AGREEING = [p for p in PEERS if p.name not in OTHERS]


@pytest.mark.parametrize("peer", AGREEING, ids=lambda p: p.name)
def test_each_peer_agrees_with_float64_torch(peer: Peer, exports: tuple[Task, Exports]) -> None:
    if peer.missing():
        pytest.skip(f"needs {', '.join(peer.missing())}")
    task, files = exports
    files.seconds(peer.format)
    with Child("serve", peer.name, task, []) as child:
        first = child.ask(120)
        second = child.ask(120, {"budget": 0.0})
    assert first["error"] < 1e-5 and second["error"] < 1e-5 and second["seconds"] > 0


def test_silent_worker_is_an_error_and_is_killed(extra: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_PID", str(tmp_path / "pid"))
    with Child("serve", "slow", Task(str(tmp_path), "mlp", 1, 1), [], str(extra)) as child:
        with pytest.raises(WorkerError, match="no answer within 3 s"):
            child.ask(3)
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_interrupt_kills_workers_and_removes_files(
    extra: Path, tmp_path: Path, script_environment: dict[str, str], by: signal.Signals
) -> None:
    files, pid_file = tmp_path / "files", tmp_path / "pid"
    files.mkdir()
    environment = {**script_environment, "TMPDIR": str(files), "BENCH_PID": str(pid_file)}
    command = [sys.executable, str(ROOT / "profiling/bench.py"), "--models", "mlp", "--batch", "1", "--rounds", "1"]
    command += ["--peers", "slow", "--extra", str(extra)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    end = time.monotonic() + 120
    while not (pid_file.is_file() and pid_file.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(list(files.iterdir())) == 1
    process.send_signal(by)
    _, text = process.communicate(timeout=30)
    assert process.returncode == 1 and "[bench] interrupted" in text and "Traceback" not in text
    assert not list(files.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_summary_and_plot(written: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    results = written[0]["results"]
    line = next(t for t in bench.summary(results) if t.strip().startswith("torch eager"))
    assert line.split()[-1] == f"{results[0]['rows'][0]['ratio']:.2f}"
    pytest.importorskip("matplotlib")
    bench.plot(results, str(tmp_path / "bars.png"), "note")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
