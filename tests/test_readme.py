"""README.md: its Python blocks run in their order, its figures are those of profiling/results, its commands are there."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from needle.backend_selection import BACKEND

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS = (ROOT / "README.md").read_text(), (ROOT / "profiling" / "results" / "README.md").read_text()


def table(text: str, column: str) -> dict[str, dict[str, str]]:
    """The first table with such a column: row -> column -> cell."""
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and f" {column} |" in line)
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    head = rows[0]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows[2:]}


@pytest.mark.parametrize("row", table(README, "ResNet-18 @224"))
def test_speeds_are_the_measured_ones(row: str) -> None:
    quoted, measured = table(README, "ResNet-18 @224"), table(RESULTS, "ResNet-18 @224")
    assert quoted[row] == measured[row]


def test_no_other_speeds_are_claimed() -> None:
    """Such as "2.4x as fast": prose grows old, the table is compared."""
    assert re.findall(r"\b\d+(?:\.\d+)?x\b(?!\d)", README.split("Precision:")[0].split("\nTests:")[1]) == []


def test_scripts_are_there() -> None:
    named = set(re.findall(r"scripts/(\w+)", README))
    assert named and all((ROOT / "scripts" / name).is_file() for name in named - {""})


@pytest.mark.skipif(BACKEND == "np", reason="it compiles")
def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one program; those of parts that are built or installed apart where these are."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    ran = 0
    text = README.replace("224, 224)", "64, 64)")  # which is quicker
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        if not all(map(importable, re.findall(r"^import (torch2needle\.torch_ops|needle\.tvm)$", found[1], re.M))):
            continue
        line = text[: found.start(1)].count("\n")
        exec(compile("\n" * line + found[1], "README.md", "exec"), names)
        ran += 1
    assert ran >= 5 and {p.name for p in tmp_path.iterdir()} >= {"resnet18.safetensors", "resnet18.onnx", "fusion.html"}
    assert names["torch"].allclose(names["fast"](names["x"]), names["model"](names["x"]), atol=1e-4)


def importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def test_command_lines_are_understood() -> None:
    command = importlib.import_module("torch2needle.tools.command")
    lines = re.findall(r"^torch2needle (.*)$", README, re.M)
    tasks = {command.arguments(shlex.split(line, comments=True)).task for line in lines}
    assert tasks == set(command.RUNS)
