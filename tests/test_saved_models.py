"""Models saved by earlier versions load and give what they gave then; tests/saved has files of version 0.1.0, fused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl

SAVED = Path(__file__).parent / "saved"


def results(value: Any) -> Iterator[np.ndarray]:
    for v in value.values() if isinstance(value, dict) else [value]:
        yield np.asarray(v.numpy() if hasattr(v, "numpy") else v)


@pytest.mark.parametrize("name", [p.stem for p in sorted(SAVED.glob("*.needle"))])
def test_what_was_saved_before(name: str) -> None:
    net, known = ndl.load(SAVED / f"{name}.needle"), np.load(SAVED / f"{name}.npz")
    inputs = [known[k] for k in known if k.startswith("in")]
    for value in (net(*inputs), ndl.compile(net, tuple(inputs))(*inputs)):
        got = list(results(value))
        assert len(got) == len([k for k in known if k.startswith("out")])
        for i, a in enumerate(got):
            want = known[f"out{i}"]
            assert a.dtype == want.dtype and a.shape == want.shape
            np.testing.assert_allclose(a, want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()))
