"""docs/support.md is what the samples show: names, statuses, and a reason for all that does not convert."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from support import lists, reasons  # noqa: E402
from support.page import PAGE, rows, written  # noqa: E402


@pytest.mark.parametrize("title", lists.LISTS)
def test_the_page_says_what_is_shown(title: str) -> None:
    """One sample of each function."""
    found: dict[str, bool] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows(lists.LISTS[title](), fast=True):
            assert not row.wrong, (row.name, row.wrong)
            assert row.right or row.said, f"nothing shows {row.name}, and support/reasons.py does not say why"
            found[row.name] = row.right > 0
    page = written(PAGE.read_text())[title]
    differs = {n for n in found.keys() | page if found.get(n) is not page.get(n)}
    assert not differs, f"{title}: run scripts/support"
    if title in ("core ATen", "torch.nn.functional"):
        assert Counter(found.values())[True] >= 0.97 * len(found)


def test_reasons_are_of_functions_without_a_rule() -> None:
    names = {name: target for listed in lists.LISTS.values() for name, target in listed().items()}
    assert reasons.REASONS.keys() <= names.keys()
    assert [n for n in reasons.REASONS if lists.has_rule(names[n])] == []
