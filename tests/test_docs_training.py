"""docs/training.md and its example run as they stand, and the models of profiling/training_curves.py learn what they should."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "profiling"))
pytest.importorskip("torch")


def test_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.S)
    assert len(blocks) == 7
    exec("\n".join(blocks), {"__name__": "page"})


def test_two_processes_train_under_ray(tmp_path, script_environment):
    pytest.importorskip("ray.train.torch")
    script = ROOT / "docs" / "examples" / "ray_train.py"
    quiet = {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(script), "--epochs", "2", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=script_environment | quiet, cwd=tmp_path, timeout=250
    )
    assert done.returncode == 0, done.stderr
    loss = float(re.search(r"epoch 2: loss (\S+), saved in", done.stdout)[1])
    assert loss < 0.6 and len(list(tmp_path.rglob("model.safetensors"))) == 2


def test_digits_are_learned():
    pytest.importorskip("sklearn")
    import training_curves

    assert training_curves.train_digits()["accuracy"][-1] >= 0.97


def test_a_unet_learns_to_segment():
    import training_curves

    assert training_curves.train_shapes()["overlap"][-1] >= 0.9
