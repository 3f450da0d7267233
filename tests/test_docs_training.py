"""docs/training.md runs as it stands, and the models of profiling/training_curves.py learn what they should."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "profiling"))
pytest.importorskip("torch")


def test_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.S)
    assert len(blocks) == 4
    exec("\n".join(blocks), {"__name__": "page"})


def test_digits_are_learned():
    pytest.importorskip("sklearn")
    import training_curves

    assert training_curves.train_digits()["accuracy"][-1] >= 0.97


def test_a_unet_learns_to_segment():
    import training_curves

    assert training_curves.train_shapes()["overlap"][-1] >= 0.9
