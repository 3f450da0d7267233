"""The frame of all searches: cases made from their numbers, checked in processes of their own, shrunk where they are wrong."""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

BATCH = 500  # cases of one process
SHRINK_SECONDS, SHRINK_CASES = 20, 60  # for one failure; of a crash, which takes a process for each smaller case
SHRUNK = 3  # failures of one kind that are shrunk; the others are counted
TESTS = Path(__file__).parents[1]


class Wrong(AssertionError):
    """A difference that nobody was told of, or a failure that is no sentence."""


class Kind(Protocol):
    """A module of this package. Optional: MEMORY, bytes that a process may take beyond its imports; NO_TORCH; ENVIRONMENT."""

    NAME: str
    SAMPLE: int  # cases of `--sample`, which CI runs: half a minute
    FULL: int  # cases of `--full`
    SECONDS: int  # that one case may take

    def draw(self, rng: random.Random) -> Any:
        """A case as plain data: `repr` prints it whole, and a person can edit it."""

    def check(self, case: Any) -> str:
        """How it ended, in a few words, which are counted; raises Wrong, or anything else where it failed."""

    def smaller(self, case: Any) -> Iterable[Any]:
        """Cases with less in them, for shrinking."""


def kind_named(name: str) -> Any:
    return importlib.import_module(f"fuzzing.{name}")


def kinds() -> list[str]:
    """Every kind: the modules that draw."""
    found = [p.stem for p in Path(__file__).parent.glob("*.py")]
    return sorted(n for n in found if n not in ("__init__", "__main__", "frame") and hasattr(kind_named(n), "draw"))


def draw(kind: Kind, seed: int) -> Any:
    return kind.draw(random.Random(f"{kind.NAME} {seed}"))


def run_case(kind: Kind, case: Any) -> str:
    """`check`, with the generators of all libraries seeded by the case itself, so that shrinking changes nothing else."""
    number = zlib.crc32(repr(case).encode())
    random.seed(number)
    for library, seed in (("numpy", lambda m: m.random.seed(number)), ("torch", lambda m: m.manual_seed(number))):
        if sys.modules.get(library) is not None:
            seed(sys.modules[library])
    signal.alarm(kind.SECONDS)
    try:
        return kind.check(case)
    finally:
        signal.alarm(0)


def reason(e: BaseException) -> str:
    text = " ".join(str(e).split())[:600]
    return text if isinstance(e, Wrong) else f"{type(e).__name__}: {text}"


def same_reason(text: str) -> str:
    """The text without numbers: failures that differ in them alone are one."""
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "N", text)[:160]


def shrink(kind: Kind, case: Any, fails: Callable[[Any], bool], cases: int = sys.maxsize) -> Any:
    """The smallest case that still fails, by greedy descent within a time limit."""
    end = time.monotonic() + SHRINK_SECONDS
    found = True
    while found:
        found = False
        for smaller in kind.smaller(case):
            cases -= 1
            if time.monotonic() > end or cases < 0:
                return case
            if fails(smaller):
                case, found = smaller, True
                break
    return case


# -- a process that checks cases -----------------------------------------------------------------------------------------


def worker(name: str, first: int, last: int) -> None:
    """Checks cases `first` to `last`; prints a line before and after each, so that a crash is seen and named."""
    kind = prepared(name)
    shrunk: Counter[str] = Counter()
    for seed in range(first, last):
        case = draw(kind, seed)
        say(seed=seed)
        try:
            say(outcome=run_case(kind, case))
        except Exception as e:
            why = same_reason(reason(e))
            shrunk[why] += 1
            say(failure=reason(e))
            if shrunk[why] <= SHRUNK:  # which may end the process
                say(smaller=repr(shrink(kind, case, lambda c, why=why: fails_alike(kind, c, why))))


def one(name: str) -> None:
    """Checks the case that standard input holds."""
    kind = prepared(name)
    say(seed=0)
    try:
        say(outcome=run_case(kind, ast.literal_eval(sys.stdin.read())))
    except Exception as e:
        say(failure=reason(e))


def prepared(name: str) -> Any:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind = kind_named(name)
    if memory := getattr(kind, "MEMORY", 0):
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
    return kind


def fails_alike(kind: Kind, case: Any, why: str) -> bool:
    try:
        run_case(kind, case)
    except Exception as e:
        return same_reason(reason(e)) == why
    return False


def say(**line: Any) -> None:
    sys.__stdout__.write(json.dumps(line) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


# -- many processes ------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a run of cases came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)  # seed, why, case

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values()) + len(self.failures)


def command(name: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    kind = kind_named(name)
    path = os.pathsep.join([str(TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    one_thread = dict.fromkeys(("NEEDLE_NUM_THREADS", "OMP_NUM_THREADS"), "1")  # processes share the cores
    environment = {
        "NEEDLE_MEASURE": "0",
        **os.environ,
        **one_thread,
        "PYTHONPATH": path,
        **getattr(kind, "ENVIRONMENT", {}),
    }
    code = ["-m", "fuzzing", *(["--no-torch"] if getattr(kind, "NO_TORCH", False) else []), *arguments]
    return [sys.executable, *code], environment


def run_worker(name: str, first: int, last: int) -> Iterator[dict[str, Any]]:
    """Lines of cases `first` to `last`; after a crash or a hang the next process goes on behind it."""
    while first < last:
        code, environment = command(name, "--worker", name, str(first), str(last))
        process = subprocess.Popen(code, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, errors = process.communicate()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
        seed = first - 1
        for line in lines:
            seed = line.get("seed", seed)
            yield {"seed": seed, **line}
        if process.returncode == 0:
            return
        if not lines:
            raise RuntimeError(f"[fuzz] {name} cannot run, case {first}: {ending(process.returncode, errors)}")
        if set(lines[-1]) == {"seed"}:
            yield {"seed": seed, "failure": ending(process.returncode, errors), "crash": True}
        first = seed + 1


def ending(code: int, errors: str) -> str:
    if code == -signal.SIGALRM:
        return "hangs"
    last = (errors.strip().splitlines() or [""])[-1]
    return f"crash: {signal.Signals(-code).name}" if code < 0 else f"crash: exit code {code}: {last}"


def crashes(name: str, case: Any) -> bool:
    code, environment = command(name, "--one", name)
    return subprocess.run(code, env=environment, input=repr(case), capture_output=True, text=True).returncode != 0


def search(
    name: str, first: int, cases: int, jobs: int = 2, minutes: float = 0, report: Callable[[int], Any] = lambda n: None
) -> Found:
    """Cases `first` to `first + cases`, as many as fit in `minutes` if those are given."""
    found, kind, groups = Found(), kind_named(name), Counter[str]()
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    batch = min(BATCH, max(1, -(-cases // jobs)))

    def batch_from(start: int) -> list[dict[str, Any]]:
        late = time.monotonic() > end
        return [] if late else list(run_worker(name, start, min(start + batch, first + cases)))

    with ThreadPoolExecutor(jobs) as pool:
        for lines in pool.map(batch_from, range(first, first + cases, batch)):
            for line in lines:
                if "outcome" in line:
                    found.outcomes[same_reason(line["outcome"])] += 1
                if "smaller" in line:
                    found.failures[-1]["case"] = line["smaller"]
                if "failure" in line:
                    case = draw(kind, line["seed"])
                    groups[same_reason(line["failure"])] += 1
                    if line.get("crash") and groups[same_reason(line["failure"])] <= SHRUNK:
                        case = shrink(kind, case, lambda c: crashes(name, c), cases=SHRINK_CASES)
                    found.failures.append({"seed": line["seed"], "why": line["failure"], "case": repr(case)})
            report(found.cases)
    return found
