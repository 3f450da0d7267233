"""docs/support.md is what the samples show: names, statuses, and a reason for all that does not convert."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from support import lists, reasons  # noqa: E402
from support.page import PAGE, all_rows, written  # noqa: E402


def test_the_page_says_what_is_shown() -> None:
    """One sample of each function."""
    found: dict[str, dict[str, bool]] = {title: {} for title in lists.LISTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title, row in all_rows(fast=True):
            assert not row.wrong, (row.name, row.wrong)
            assert row.right or row.said, f"nothing shows {row.name}, and support/reasons.py does not say why"
            found[title][row.name] = row.right > 0
    page = written(PAGE.read_text())
    for title, statuses in found.items():
        differs = {n for n in statuses.keys() | page[title] if statuses.get(n) is not page[title].get(n)}
        assert not differs, f"{title}: run scripts/support"
    for title in ("core ATen", "torch.nn.functional"):
        assert Counter(found[title].values())[True] >= 0.97 * len(found[title])


def test_reasons_are_of_functions_without_a_rule() -> None:
    names = {name: target for listed in lists.LISTS.values() for name, target in listed().items()}
    assert reasons.REASONS.keys() <= names.keys()
    assert [n for n in reasons.REASONS if lists.has_rule(names[n])] == []
