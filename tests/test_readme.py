"""README.md: its figures are those of profiling/results, and its commands are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
