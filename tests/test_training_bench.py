"""profiling/training.py and distributed.py: their documents, and that nobody is timed whose losses differ from torch's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import training

SCRIPT = Path(__file__).parents[1] / "profiling" / "training.py"


def test_document(tmp_path: Path, script_environment: dict[str, str]) -> None:
    file = tmp_path / "training.json"
    quick = ["--rows", "mlp", "--rounds", "3", "--budget", "0.05", "--threads", "1", "--json", str(file)]
    quick += ["--engines", "torch", "eager", "needle"]  # inductor compiles for ten seconds
    done = subprocess.run([sys.executable, str(SCRIPT), *quick], capture_output=True, text=True, env=script_environment)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["results"]
    assert row["title"] in done.stdout
    for ours in ("ratio_eager", "ratio_needle"):
        assert 0 < row[ours]["min"] <= row[ours]["median"] <= row[ours]["max"] < np.inf
    assert all(set(row[part]) == {"torch", "eager", "needle"} for part in ("ms", "first_s", "peak_mib"))
    assert row["loss_difference"] <= 1e-3


@pytest.mark.parametrize("row, there, here", [("mlp", [2.0, 1.0], [2.0, 2.0]), ("resnet50", [2.0, 1.0], [1.0, 1.0])])
def test_other_losses_are_an_error(row: str, there: list[float], here: list[float]) -> None:
    with pytest.raises(SystemExit, match=r"\[training\] losses of .* by needle differ by 5\.0e-01, got"):
        training.check_losses(training.ROWS[row], {"torch": there, "needle": here})


def test_chaotic_nets_agree_in_the_first_loss() -> None:
    assert training.check_losses(training.ROWS["resnet50"], {"torch": [2.0, 1.0], "needle": [2.0, 2.0]}) == 0.5


def test_two_processes(tmp_path: Path, script_environment: dict[str, str]) -> None:
    file = tmp_path / "distributed.json"
    quick = ["--rows", "mlp", "--rounds", "2", "--budget", "0.02", "--json", str(file)]
    script = SCRIPT.with_name("distributed.py")
    done = subprocess.run([sys.executable, str(script), *quick], capture_output=True, text=True, env=script_environment)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["results"]
    assert row["title"] in done.stdout and row["loss_difference"] <= 1e-3
    assert set(row["steps_per_second"]) == {"needle", "needle x 2", "torch", "torch x 2"}
    for found in (*row["scaling"].values(), *row["ratio"].values()):
        assert 0 < found["min"] <= found["median"] <= found["max"] < np.inf


def test_the_sweep_of_training_steps(tmp_path: Path, script_environment: dict[str, str]) -> None:
    """A row with its ratio, one that says why there is none, and a second run that measures nothing."""
    file, script = tmp_path / "sweep.json", SCRIPT.with_name("training_sweep.py")
    quick = [
        "--names",
        "audio/CRNN",
        "audio/none",
        "--budget",
        "0",
        "--threads",
        "1",
        "--batch",
        "1",
        "--json",
        str(file),
    ]
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script), *quick], capture_output=True, text=True, env=script_environment
        )
        assert done.returncode == 0, done.stderr
        outputs.append((file.read_text(), done.stdout))
    assert outputs[0] == outputs[1]
    row, none = json.loads(outputs[0][0])["rows"]
    assert 0 < row["min"] <= row["ratio"] <= row["max"] and row["loss_difference"] <= 1e-4
    assert none == {"name": "audio/none", "error": "KeyError: 'audio/none'"}
    assert "audio/none: KeyError" in outputs[0][1] and "1 models, geometric mean" in outputs[0][1]
