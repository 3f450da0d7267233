"""The frame of the searches: what it calls a failure, and that it finds and shrinks it. CI runs `scripts/fuzz --sample`."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

import fuzzing
import needle as ndl
from fuzzing import file_damage, files, frame, layers, programs
from needle.backend_ndarray import NDArray
from needle.backend_selection import BACKEND
from needle.op import OPS

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="searches compile")


def test_failures_that_differ_in_numbers_alone_are_one() -> None:
    assert frame.same_reason("3 of 1.5e-3") == frame.same_reason("70 of 2.5") == "N of N"


def test_a_case_is_made_from_its_number_alone() -> None:
    assert frame.draw(files, 3) == frame.draw(files, 3) != frame.draw(files, 4)


LINES = """
import os, random, signal, time
NAME, SAMPLE, FULL, SECONDS = "{name}", 60, 60, 1
def draw(rng): return [rng.randrange(100) for _ in range(3)]
def smaller(case): return [case[:i] + case[i + 1:] for i in range(len(case))]
def check(case):
    if max(case, default=0) > 97: raise ValueError(f"{{max(case)}} is large")
    if 13 in case: os.kill(os.getpid(), signal.SIGSEGV)
    if 14 in case: time.sleep(60)
    return "agrees"
"""


def test_crashes_hangs_and_failures_are_found_and_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of its own beside the others, for the processes that the frame starts."""
    folder, name = tmp_path / "fuzzing", "made_up_for_a_test"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / f"{name}.py").write_text(LINES.format(name=name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setattr(fuzzing, "__path__", [*fuzzing.__path__, str(folder)])
    try:
        found = frame.search(name, 0, 60)
        cases = [frame.draw(frame.kind_named(name), seed) for seed in range(60)]
    finally:
        sys.modules.pop(f"fuzzing.{name}", None)
    assert found.cases == 60 and found.outcomes["agrees"] == sum(not {13, 14, 98, 99} & {*c} for c in cases)
    by_reason = {f["why"]: f["case"] for f in sorted(found.failures, key=lambda f: -len(f["case"]))}
    large = {"ValueError: 98 is large": "[98]", "ValueError: 99 is large": "[99]"}  # the shortest of each
    assert by_reason.items() <= {"crash: SIGSEGV": "[13]", "hangs": "[14]", **large}.items() and len(by_reason) >= 3


EMPTY = ("c", "float32", (2, 2, 4, 3), 1, "plain")
JUDGED: dict[str, list] = {
    "what torch takes in float32 alone": [
        ("torch.nn.functional.conv_transpose2d", (EMPTY, ("c", "float32", (2, 1, 3, 2), 2, "plain")), {"padding": 2}),
        ("torch.Tensor.sin", (("v", 0),), {}),
    ],
    "a method that names float32": [
        ("torch.Tensor.float", (("v", 0),), {}),
        ("torch.matmul", (("v", 1), ("c", "float32", (3, 2), 1, "plain")), {}),
        ("torch.Tensor.sin", (("v", 2),), {}),
    ],
}


@pytest.mark.parametrize("name", JUDGED)
def test_programs_are_judged(name: str) -> None:
    steps = JUDGED[name]
    case = {"inputs": [("float32", (3, 3), 1, "plain")], "steps": steps, "outputs": [1, len(steps)], "form": "fused"}
    assert programs.check(case) == "agrees"
    judge = programs.Judge(case, [programs.make(*i) for i in case["inputs"]])
    with pytest.raises(frame.Wrong, match="output 1 is"):
        judge.check("wrong", [judge.want[0], judge.want[1] + 1])


def test_damaged_files() -> None:
    found = frame.search("files", 0, 200)
    assert not found.failures
    assert found.cases == 200 and found.outcomes["refused"] > 40 and found.outcomes["op: loaded, runs"] > 5


@pytest.mark.parametrize("mutation", sorted({m.__name__ for m in file_damage.MUTATIONS}))
def test_every_kind_of_damage_changes_the_file(mutation: str) -> None:
    found = files.saved("wide")
    assert found is not None
    data = found[0]
    f = getattr(file_damage, mutation)
    assert sum(f(bytearray(data), random.Random(i)) != data for i in range(20)) >= 15


def test_what_the_check_of_files_calls_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, raised in ((ValueError("[load] two\nlines."), frame.Wrong), (MemoryError(), MemoryError)):

        def load(path: Path, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(ndl, "load", load)
        with pytest.raises(raised):
            files.one(tmp_path, [np.zeros(1, "float32")])


def test_results_of_unwritten_memory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = files.saved("op Softmax 0")
    assert found is not None
    (tmp_path / "net").write_bytes(found[0])
    assert files.one(tmp_path / "net", found[1]) == "loaded, runs"
    monkeypatch.setattr(OPS["Softmax"], "compute", lambda op, x: NDArray.empty(x.shape))
    try:
        with pytest.raises(frame.Wrong, match="eager depends on what was in memory before"):
            files.one(tmp_path / "net", found[1])
    finally:
        ctypes.CDLL(None).mallopt(-6, 0)


def test_layers_with_other_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ("Linear", {"in_features": 3, "out_features": 2}, (4, 3), False, 1)
    assert layers.check(case) == "agrees"
    assert layers.check(("Linear", {"in_features": 3, "out_features": -2}, (4, 3), False, 1)) == "both refuse"
    monkeypatch.setattr(ndl.nn.Linear, "forward", lambda self, x: ndl.ops.linear(x, self.weight))
    with pytest.raises(frame.Wrong, match="differs by"):
        layers.check(case)
