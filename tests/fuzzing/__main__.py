"""`scripts/fuzz`: searches for what is wrong in silence, by kind."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from . import frame

RESULTS = Path(__file__).parents[2] / "profiling" / "results" / "fuzz"
REASONS = 40  # outcomes that a result lists; the rest is summed


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Search one kind, say what was found, and give it as data."""
    from tqdm import tqdm

    kind = frame.kind_named(name)
    cases = args.cases or (kind.FULL if args.full else kind.SAMPLE)
    start = time.time()
    with tqdm(total=cases, desc=name, disable=None) as bar:
        found = frame.search(name, args.first, cases, args.jobs, args.minutes, lambda done: bar.update(done - bar.n))
    result = {
        "kind": name,
        "seeds": [args.first, args.first + found.cases],
        "seconds": round(time.time() - start),
        "outcomes": dict(found.outcomes.most_common(REASONS)),
        "other outcomes": sum(n for _, n in found.outcomes.most_common()[REASONS:]),
        "failures": found.failures,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    print(f"{name}: {found.cases} cases, {len(found.failures)} failures, {result['seconds']} s")
    for failure in found.failures:
        print(f"  seed {failure['seed']}: {failure['why']}\n    {failure['case']}")
    return result


def main() -> int:
    if "--no-torch" in sys.argv:
        sys.argv.remove("--no-torch")
        sys.modules["torch"] = None  # type: ignore[assignment]
    if sys.argv[1:2] == ["--worker"]:
        frame.worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    if sys.argv[1:2] == ["--one"]:
        frame.one(sys.argv[2])
        return 0
    names = frame.kinds()
    parser = argparse.ArgumentParser("scripts/fuzz", description="Search for what is wrong in silence.")
    add = parser.add_argument
    add("--kind", choices=names, action="append", help="what to search; once for each (default: all)")
    add("--sample", action="store_true", help="the cases that CI runs (the default)")
    add("--full", action="store_true", help="hours; writes profiling/results/fuzz")
    add("--first", type=int, default=0, help="the first case; each is made from its number")
    add("--cases", type=int, default=0, help="how many, in place of the kind's own number")
    add("--minutes", type=float, default=0, help="start no batch of cases after these")
    add("--jobs", type=int, default=2, help="processes at a time")
    args = parser.parse_args()
    failed = False
    for name in args.kind or names:
        result = run(name, args)
        failed |= bool(result["failures"])
        if args.full:
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
