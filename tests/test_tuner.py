"""compile(tune=True): measured times decide, are kept on disk, and a damaged file is no trouble."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.executor import tuner
from needle.targets.cpu import machine
from test_winograd import layer

LAYER = "conv 3x3 1x64x32x32 to 64"
KERNELS = {"direct": "conv2d_blocked", "f2": "conv2d_winograd_f2", "f4": "conv2d_winograd_f4"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("NEEDLE_CACHE", str(folder))
    return folder


def kernel(**settings: Any) -> str:
    run, x = layer(64, 64, 32)
    exe = ndl.compile(run, (x,), tune=True, **settings)
    want = ndl.compile(run, (x,), winograd="off")(x)
    assert abs(exe(x) - want).max() < 1e-5 * abs(want).max()
    (name,) = (n for n in exe.plan.names if n.startswith("conv2d"))
    return name


def keep(fastest: str) -> None:
    timings = tuner.Timings()
    timings.seconds[LAYER] = {a: 1e-4 if a == fastest else 3e-4 for a in KERNELS}
    timings.save()


def no_timing(*_: Any, **__: Any) -> None:
    raise AssertionError("timed again")


@pytest.mark.parametrize("fastest", KERNELS)
def test_kept_times_decide(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(fastest)
    monkeypatch.setattr(tuner, "step_times", no_timing)
    assert kernel() == KERNELS[fastest]


def test_unknown_layers_are_timed_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = kernel()
    (file,) = cache.iterdir()
    seconds = json.loads(file.read_text())["seconds"][LAYER]
    assert seconds.keys() == KERNELS.keys()
    assert chosen == KERNELS[min(seconds, key=seconds.get)]
    monkeypatch.setattr(tuner, "step_times", no_timing)
    assert kernel() == chosen


def test_a_setting_limits_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    keep("f4")
    monkeypatch.setattr(tuner, "step_times", no_timing)
    assert kernel(winograd="off") == KERNELS["direct"]
    assert kernel(winograd="f2") == KERNELS["direct"]  # the first of equals
    assert kernel(memory="low") == KERNELS["f4"]  # 0.2 ms for 0.4 MB


def test_linear_layers_are_timed_too(cache: Path) -> None:
    x = np.zeros((64, 256), "float32")
    ndl.compile(ndl.nn.Linear(256, 256).eval(), (x,), tune=True)
    assert tuner.Timings()("linear 64x256 to 256").keys() == {"direct", "strassen"}


def test_other_threads_have_times_of_their_own() -> None:
    before = ndl.get_num_threads()
    try:
        ndl.set_num_threads(1)
        one = tuner.Timings().path
        ndl.set_num_threads(2)
        assert tuner.Timings().path != one
    finally:
        ndl.set_num_threads(before)


def test_processes_add_to_one_file() -> None:
    first, second = tuner.Timings(), tuner.Timings()
    first.seconds["a"], second.seconds["b"] = {"f2": 1.0}, {"f2": 2.0}
    first.save()
    second.save()
    assert tuner.Timings().seconds == {"a": {"f2": 1.0}, "b": {"f2": 2.0}}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "{", "\x00\xff", '{"machine": 1}', "[" * 100_000),
        '{"machine": MACHINE, "seconds": 5}',
        '{"machine": MACHINE, "seconds": {"LAYER": [1, 2]}}',
        '{"machine": MACHINE, "seconds": {"LAYER": {"direct": "x", "f2": 1, "f4": 1}}}',
        '{"machine": MACHINE, "seconds": {"LAYER": {"direct": NaN, "f2": -1, "f4": 1e999}}}',
        '{"machine": ["another"], "seconds": {"LAYER": {"direct": 1, "f2": 1, "f4": 1}}}',
    ],
    ids=lambda t: t[:20],
)
def test_damaged_files_are_written_anew(text: str) -> None:
    timings = tuner.Timings()
    timings.path.parent.mkdir()
    timings.path.write_text(text.replace("MACHINE", json.dumps(timings.machine)).replace("LAYER", LAYER))
    assert kernel() in KERNELS.values()
    assert tuner.Timings()(LAYER).keys() == KERNELS.keys()


def test_a_folder_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.warns(UserWarning, match=r"^\[compile\] measured times are not kept: "):
        assert kernel() in KERNELS.values()


class TestMachine:
    """Without tuning, estimates rest on what was measured on the machine once."""

    @pytest.fixture(autouse=True)
    def measuring(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("NEEDLE_MEASURE", "1")
        machine.measured.cache_clear()
        yield
        machine.measured.cache_clear()

    def keep(self, strassen: float) -> None:
        """A file by which Strassen's algorithm takes `strassen` times the time of its vector operations."""
        timings = tuner.Timings()
        for name_of_layer, (_, costs) in machine.REFERENCES.items():
            slower = {"strassen": strassen}
            times = {name: 1e-10 * cost.work * slower.get(name, 1.0) for name, cost in costs.items()}
            timings.seconds[f"machine: {name_of_layer}"] = times or {"read": 1e-3}
        timings.save()

    def test_measured_once(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = machine.this_machine()
        assert found.fmas > 1e6 and found.rate > 1e6
        assert found.excess.keys() == {"strassen", "f2", "f4"} and all(0.1 < e < 10 for e in found.excess.values())
        monkeypatch.setattr(machine, "least_times", no_timing)
        assert machine.this_machine() == found
        machine.measured.cache_clear()
        assert machine.this_machine() == found

    def test_half_a_file_is_measured_anew(self) -> None:
        self.keep(1.0)
        timings = tuner.Timings()
        (path,) = timings.path.parent.iterdir()
        document = json.loads(path.read_text())
        del document["seconds"]["machine: conv 3x3"]["f4"]
        path.write_text(json.dumps(document))
        assert "f4" in machine.this_machine().excess

    @pytest.mark.parametrize(
        ("strassen", "kernel"), [(1.0, "matmul_strassen"), (1.08, "matmul_packed"), (2.0, "matmul_packed")]
    )
    def test_direct_sums_unless_something_gains(self, strassen: float, kernel: str) -> None:
        """768 x 768 to 768 is estimated at 0.91 of direct sums; what gains less than 3 % is not taken."""
        self.keep(strassen)
        exe = ndl.compile(ndl.nn.Linear(768, 768).eval(), (np.zeros((768, 768), "float32"),))
        assert kernel in exe.plan.names

    def test_where_nothing_can_be_written(self, cache: Path, recwarn: pytest.WarningsRecorder) -> None:
        cache.write_text("not a folder")
        assert machine.this_machine().excess
        assert not recwarn
