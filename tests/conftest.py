"""Fixtures that every test gets: a fixed random stream."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def seed() -> None:
    np.random.seed(0)
