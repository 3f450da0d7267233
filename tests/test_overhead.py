"""profiling/overhead.py: the core's calls are found, and every op has its row. How long ops take is for that script to say."""

from __future__ import annotations

import pytest

import needle as ndl
import overhead
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="numpy arrays do not go through the core")


def test_core_calls_are_found() -> None:
    x = ndl.Tensor([[1.0, 2.0]])
    assert len(overhead.core_calls(lambda: (x + x).relu())) == 2
    assert overhead.core_calls(lambda: x.reshape((2,))) == []
    assert not any(isinstance(k, overhead.Recorded) for k in ndl.cpu().kernels.values())


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CALLS", 20)
    rows = overhead.measure(rounds=3)
    assert [r["op"] for r in rows] == list(overhead.OPS)
    assert all(min(r["core_us"], r["needle_us"], r["torch_us"]) > 0 for r in rows)
    assert all(r["python_us"] == r["needle_us"] - r["core_us"] for r in rows)
