"""Fixtures: a fixed random stream for every test, a resting collector for those that count live tensors, scripts' environment."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def seed() -> None:
    np.random.seed(0)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What earlier tests left is gone, and what a test makes must go without Python's search for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def script_environment() -> dict[str, str]:
    """For subprocesses of profiling's scripts: its modules are importable under PYTHONSAFEPATH, too, as they are here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
