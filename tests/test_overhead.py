"""profiling/overhead.py: the core's calls are found, and no op costs many times what it costs in torch."""

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
    monkeypatch.setattr(overhead, "CALLS", 200)
    rows = overhead.measure(rounds=11)
    assert [r["op"] for r in rows] == list(overhead.OPS)
    assert all(0 < r["core_us"] < r["needle_us"] and r["torch_us"] > 0 for r in rows)
    assert all(r["needle_us"] <= 10 * r["torch_us"] for r in rows)  # at most 2.5 on a quiet machine: profiling/results
