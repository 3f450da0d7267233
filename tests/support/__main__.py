"""`scripts/support`: runs every sample and writes docs/support.md; `--check`: one sample each, and whether the page says so."""

from __future__ import annotations

import argparse
import sys
import time

from .lists import LISTS
from .page import PAGE, Row, all_rows, text_of, written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; one sample of each function")
    options = parser.parse_args()
    tables: dict[str, list[Row]] = {title: [] for title in LISTS}
    start, total = time.monotonic(), sum(len(names()) for names in LISTS.values())
    for i, (title, row) in enumerate(all_rows(options.check), 1):
        tables[title].append(row)
        if sys.stderr.isatty():
            print(f"\r{i}/{total} {row.name:60.60}", end="", file=sys.stderr)
    print(f"\r{time.monotonic() - start:.0f} s{'':70}", file=sys.stderr)
    wrong = [f"{r.name}: {w}" for found in tables.values() for r in found for w in r.wrong]
    mute = [r.name for found in tables.values() for r in found if not r.right and not r.said]
    for line in wrong:
        print(f"wrong: {line}")
    for name in mute:
        print(f"nothing shows {name}, and support/reasons.py does not say why")
    if options.check:
        found = {title: {r.name: r.right > 0 for r in rows} for title, rows in tables.items()}
        differs = found != written(PAGE.read_text())
        print("the page differs; run scripts/support" if differs else "the page is as it should be")
        return int(differs or bool(wrong or mute))
    PAGE.write_text(text_of(tables))
    print(PAGE.read_text().split("\n\n## ")[0])
    return int(bool(wrong or mute))


if __name__ == "__main__":
    sys.exit(main())
