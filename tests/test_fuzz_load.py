"""Some hundred damaged needle files, in a process with a memory limit of its own; `scripts/fuzz --full` loads thousands."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import fuzzing
import needle as ndl
from needle.backend_selection import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="what loads is compiled, too")


def test_damaged_files() -> None:
    found, failures = fuzzing.check(0, 400)
    assert not failures
    assert sum(found.values()) == 400 and found["refused"] > 200 and found["loaded, runs"] > 5


@pytest.mark.parametrize("mutation", sorted({m.__name__ for m in fuzzing.MUTATIONS}))
def test_every_kind_of_damage_changes_the_file(mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_CANARY", str(tmp_path / "canary"))
    net, _ = fuzzing.nets()["wide"]
    ndl.save(net, tmp_path / "net")
    data = (tmp_path / "net").read_bytes()
    f = getattr(fuzzing, mutation)
    assert sum(f(bytearray(data), random.Random(i)) != data for i in range(20)) >= 15


def test_what_the_check_calls_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, raised in ((ValueError("[load] two\nlines."), AssertionError), (MemoryError(), MemoryError)):

        def load(path: Path, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(ndl, "load", load)
        with pytest.raises(raised):
            fuzzing.one(tmp_path, np.zeros(1, "float32"))
