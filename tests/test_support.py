"""docs/support.md is what the samples show: names, statuses, and a reason for all that does not convert."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from support import lists, reasons  # noqa: E402
from support.page import PAGE, rows, written  # noqa: E402

NAMES = {title: names() for title, names in lists.LISTS.items()}
AT_ONCE = 60  # functions of a test, since two processes share them
PARTS = [(title, first) for title, names in NAMES.items() for first in range(0, len(names), AT_ONCE)]


@pytest.mark.parametrize(("title", "first"), PARTS)
def test_the_page_says_what_is_shown(title: str, first: int) -> None:
    """One sample of each function."""
    page, part = written(PAGE.read_text())[title], dict(list(NAMES[title].items())[first : first + AT_ONCE])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows(part, fast=True):
            assert not row.wrong, (row.name, row.wrong)
            assert row.right or row.said, f"nothing shows {row.name}, and support/reasons.py does not say why"
            assert page.get(row.name) is (row.right > 0), f"{row.name}: run scripts/support"


def test_the_page_has_every_function() -> None:
    for title, page in written(PAGE.read_text()).items():
        assert page.keys() == NAMES[title].keys(), f"{title}: run scripts/support"
        if title in ("core ATen", "torch.nn.functional"):
            assert sum(page.values()) >= 0.97 * len(page)


def test_reasons_are_of_functions_without_a_rule() -> None:
    names = {name: target for listed in lists.LISTS.values() for name, target in listed().items()}
    assert reasons.REASONS.keys() <= names.keys()
    assert [n for n in reasons.REASONS if lists.has_rule(names[n])] == []
