"""scripts/coverage: its list, one model run end to end, and how failures are told."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

import model_coverage as coverage
from torch2needle.capture.calls import tensors
from torch2needle.capture.structure import plain_result
from zoo import steps
from zoo.build import build, inputs

LISTED = json.loads(coverage.LIST.read_text())
HARD = json.loads(coverage.HARD.read_text())


def test_the_list_and_the_sample() -> None:
    names = [e["name"] for e in LISTED]
    assert len(set(names)) == len(names)
    assert len(set(coverage.SAMPLE)) == 20
    assert set(coverage.SAMPLE) <= set(names)
    for entry in LISTED:
        assert len(entry["inputs"]) == 3
        batches = [next(iter(given.values()))["shape"][0] for given in entry["inputs"]]
        assert batches == [1, 2, 3]


def test_the_hard_list() -> None:
    names = [e["name"] for e in HARD]
    assert len(set(names)) == len(names)
    assert not set(names) & {e["name"] for e in LISTED}
    for entry in HARD:
        family, _, name = entry["name"].partition("/")
        assert entry["model"]["call"] == f"zoo.hard.{family}.{name}"
        assert len(entry["inputs"]) >= 2
        assert entry["kinds"]


@pytest.mark.parametrize("family", sorted({e["name"].partition("/")[0] for e in HARD}))
def test_hard_models_run_in_torch_and_say_the_same_twice(family: str) -> None:
    for entry in (e for e in HARD if e["name"].startswith(f"{family}/")):
        for given, same in zip(inputs(entry), inputs(entry), strict=True):
            with torch.no_grad():
                first, second = (tensors(plain_result(build(entry)(**values))) for values in (given, same))
            assert first, entry["name"]
            for a, b in zip(first, second, strict=True):
                torch.testing.assert_close(a, b, msg=entry["name"])  # LAPACK's sums depend on alignment
                assert not a.is_floating_point() or bool(a.isfinite().all()), entry["name"]


def test_a_model_without_other_libraries() -> None:
    row = coverage.run("audio/WaveLSTM", 100)
    assert list(row) == list(coverage.STAGES)
    assert all(coverage.passed(row, form) for form in coverage.FORMS)
    assert coverage.complaint(row) == ""
    assert row["plain"]["error"] < 1e-5
    assert len(row["free"]["inputs"]) == 2


def test_a_model_as_an_onnx_file() -> None:
    pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    row = coverage.run("audio/WaveLSTM", 100, coverage.ONNX)
    assert (
        list(row) == list(coverage.ONNX)
        and coverage.complaint(row, coverage.ONNX) == ""
        and row["onnx"]["error"] < 1e-5
    )


def test_a_models_training_step() -> None:
    row = coverage.run("audio/WaveLSTM", 100, coverage.TRAIN)
    assert list(row) == list(coverage.TRAIN) and coverage.complaint(row, coverage.TRAIN) == ""
    assert row["train"]["error"] < 1e-5 and row["train"]["ratio"] > 0


def test_gradients_that_lack_or_are_nan_are_far_away() -> None:
    exact = {"a": np.array([3.0, 4.0]), "b": np.array([np.nan]), "c": np.zeros(2)}
    assert steps.distance(exact, exact) == 0
    assert steps.distance({"a": exact["a"] + [0, 0.05]}, exact) == pytest.approx(0.01)
    assert steps.distance({}, exact) == 1
    assert not steps.distance({"a": np.array([3.0, np.nan])}, exact) <= 1e9


def test_a_process_that_ends_early_is_a_row() -> None:
    row = coverage.run("audio/WaveLSTM", 1)
    stage, _, reason = coverage.complaint(row).partition(": ")
    assert stage in coverage.STAGES and reason == "took more than 1 s of processor time"
    assert "StopIteration" in coverage.complaint(coverage.run("no such model", 100))


def stage(ok: bool = True, **facts: object) -> dict:
    return {"ok": ok, **facts}


NUMBERS = {"error": 2e-3, "torch_error": 1e-6}
GOOD = {s: stage(error=1e-7, torch_error=1e-7) for s in coverage.STAGES}
MISSING = {"torch": stage(), "convert": stage(False, missing=[{"op": "torch.frac", "count": 2, "reason": "no rule"}])}
WRONG = {**GOOD, "compiled": stage(False, **NUMBERS)}
FIXED = {**GOOD, "free": stage(False, fixed=True, inputs=[stage(False, fixed=True, shapes=[[2, 3]], reason="size")])}
REFUSED = {**GOOD, "altered": stage(changes={"hook": stage(), "no_grad": stage(refused=True)})}
ALTERED = {**GOOD, "altered": stage(False, changes={"hook": stage(), "no_grad": stage(False, reason="gradients pass")})}
SIZES = {**GOOD, "free": stage(False, inputs=[stage(shapes=[[2, 3]]), stage(False, shapes=[[3, 3]], **NUMBERS)])}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (GOOD, ""),
        (MISSING, "convert: torch.frac (2x): no rule"),
        (WRONG, "compiled: error 2.0e-03, torch's own 1.0e-06"),
        (FIXED, ""),
        (REFUSED, ""),
        (ALTERED, "altered: no_grad: gradients pass"),
        (SIZES, "free: [[3, 3]]: error 2.0e-03, torch's own 1.0e-06"),
    ],
    ids=["good", "missing", "wrong", "fixed size", "refused change", "wrong after a change", "wrong at a size"],
)
def test_complaint(row: dict, text: str) -> None:
    assert coverage.complaint(row) == text


def test_page_counts_by_library_and_groups_reasons() -> None:
    page = coverage.page({"c/f": FIXED, "a/x": GOOD, "a/y": MISSING, "b/z": WRONG, "b/w": MISSING})
    assert "| a | 1 / 2 (50 %) | 1 / 2 (50 %) | 1 / 2 (50 %) | 1 / 2 (50 %) |" in page
    assert "| all | 3 / 5 (60 %) | 3 / 5 (60 %) | 2 / 5 (40 %) | 2 / 5 (40 %), 1 refused |" in page
    assert "- a/y, b/w: convert: torch.frac (2x): no rule" in page
    assert "- b/z: compiled: error" in page
