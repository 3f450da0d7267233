"""docs/support.md: what the samples of every function show, and what the page says already."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .check import Refused, Torch, Wrong, check
from .lists import LISTS, has_rule
from .meaningless import meaningless
from .reasons import reason
from .samples import calls

PAGE = Path(__file__).parents[2] / "docs/support.md"
SAMPLES, SECONDS = 8, 30  # of a function, at most; the seconds are the process's
OTHERS = 40  # calls that are none of the function's, in torch's table of another overload
HEAD = """# Functions of torch that convert

Written by `scripts/support` from what it ran, not by hand: of every function calls with several arguments and shapes, each
converted with an example and held against torch in float64: its values, its plan (`ndl.compile`) and its gradient. A row says
how many are right; the others are refused in a sentence, of which the first is given. Random numbers are compared in
distribution; a dash is before why there is nothing to compute. Results of 8 and 16 bits come as float32 or int32.
"""


@dataclass
class Row:
    name: str
    right: int = 0
    tried: int = 0
    said: str = ""  # the first refusal, or why there is nothing
    wrong: tuple[str, ...] = ()
    none: bool = False  # it computes nothing that a graph could hold

    def __str__(self) -> str:
        shown = "-" if self.none else f"{self.right} of {self.tried}" if self.right else "no"
        return f"| `{self.name}` | {shown} | {self.said} |"


def rows(names: dict[str, Any], fast: bool) -> Iterator[Row]:
    for name, target in names.items():
        if none := meaningless(name):
            yield Row(name, said=none, none=True)
            continue
        why = reason(name, has_rule(target))
        yield Row(name, said=why) if why else shown(name, target, fast)


def shown(name: str, target: Any, fast: bool) -> Row:
    """What a function's samples come to; fast: values of the first that converts."""
    row, others, end = Row(name), 0, time.process_time() + SECONDS
    wrong = []
    for call in calls(name):
        if others > OTHERS or (fast and row.right) or row.tried == SAMPLES or time.process_time() > end:
            break
        try:
            check(name, target, call, gradient=not fast, plan=not fast)
            row.right += 1
        except Torch:
            others += 1
            continue
        except Refused as e:
            row.said = row.said or short(str(e))
        except Wrong as e:
            wrong.append(str(e))
        row.tried += 1
    row.wrong = tuple(wrong)
    return row


def short(text: str) -> str:
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= 110 else f"{text[:107]}..."


def text_of(tables: dict[str, list[Row]]) -> str:
    parts = [
        HEAD,
        "| list | functions | that compute nothing | of the others, that convert |\n| --- | --- | --- | --- |",
    ]
    for title, found in tables.items():
        good, none = sum(r.right > 0 for r in found), sum(r.none for r in found)
        share = 100 * good / (len(found) - none)
        parts[-1] += f"\n| {title} | {len(found)} | {none or ''} | {good} ({share:.1f} %) |"
    for title, found in tables.items():
        parts.append(
            f"\n## {title}\n\n| function | right | refused |\n| --- | --- | --- |\n" + "\n".join(map(str, found))
        )
    return "\n".join(parts) + "\n"


def written(text: str) -> dict[str, dict[str, bool]]:
    """Whether each function converts, by list, as the page says."""
    found: dict[str, dict[str, bool]] = {}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        lines = re.findall(r"^\| `([^`]+)` \| (no|-|\d+ of \d+) \|", body, re.M)
        found[title] = {name: right not in ("no", "-") for name, right in lines}
    return found


def all_rows(fast: bool) -> Iterator[tuple[str, Row]]:
    for title, names in LISTS.items():
        for row in rows(names(), fast):
            yield title, row
