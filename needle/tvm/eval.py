"""`python -m needle.tvm.eval -m mlp -d cpu`: a network through TVM unfused, fused and tuned, beside needle eager and compiled."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import needle as ndl

from . import tuning
from .command import exit_code, machine, write_json
from .executable import TvmExecutable
from .executable import compile as compile_with_tvm
from .networks import NETWORKS, network
from .pipeline import MODES, functions

TOLERANCE = 1e-4
ROUNDS = 9
AT_LEAST = 0.02  # seconds that one round of one runner takes, by repeating short calls


def measure(runners: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds per call of every runner in each of the rounds, in which they alternate."""
    repeats = {}
    for name, run in runners.items():
        run()
        start = time.perf_counter()
        run()
        repeats[name] = max(1, int(AT_LEAST / max(time.perf_counter() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times


def ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """a over b per round: median, least and largest."""
    parts = sorted(x / y for x, y in zip(a, b, strict=True))
    return {"median": statistics.median(parts), "min": parts[0], "max": parts[-1]}


def compiled(net: Any, x: Any, options: argparse.Namespace) -> dict[str, TvmExecutable]:
    how = {name: getattr(options, name) for name in ("device", "trials", "recompile")}
    return {mode: compile_with_tvm(net, (x,), mode, **how) for mode in MODES}


def evaluate(
    net: Any, x: ndl.Tensor, options: argparse.Namespace, others: dict[str, Callable[[], Any]] | None = None
) -> dict[str, Any]:
    """What the table and the JSON file show. `others`: further engines by name, each of which runs the same network on x."""
    executables = compiled(net, x, options)
    if options.show:
        show(executables)
    plan = ndl.compile(net, (x,))
    runners: dict[str, Callable[[], Any]] = {mode: (lambda e=e: e(x)) for mode, e in executables.items()}  # type: ignore[misc]
    runners |= {"needle eager": lambda: net(x), "needle compiled": lambda: plan(x), **(others or {})}
    with ndl.no_grad():
        want = net(x).numpy()
        got = {name: np.asarray(run()) for name, run in runners.items()}
        times = measure(runners, options.rounds)
    return {
        "model": options.model,
        "batch": options.batch,
        "device": options.device,
        **machine(),
        "trials": options.trials,
        "functions": functions(executables["fusion"].module),
        "milliseconds": {name: statistics.median(t) * 1e3 for name, t in times.items()},
        "over_needle": {name: ratio(t, times["needle eager"]) for name, t in times.items()},
        "over_noopt": {name: ratio(t, times["noopt"]) for name, t in times.items()},
        "error": {name: float(np.abs(y - want).max() / np.abs(want).max()) for name, y in got.items()},
        "equal": {name: bool(np.allclose(y, want, TOLERANCE, TOLERANCE)) for name, y in got.items()},
    }


def show(executables: dict[str, TvmExecutable]) -> None:
    for mode, title in zip(MODES, ("translated", "fused", "scheduled"), strict=True):
        print(f"# {title}\n{executables[mode].module.script(show_meta=False)}")


def table(result: dict[str, Any]) -> str:
    head = f"{result['model']}, batch {result['batch']}, {result['cpu']}, {result['threads']} threads, {result['trials']} trials"
    rows = [f"{'':16}{'ms':>10}{'over needle':>14}{'over noopt':>14}{'error':>10}"]
    for name, ms in result["milliseconds"].items():
        by_needle, by_noopt = (result[k][name]["median"] for k in ("over_needle", "over_noopt"))
        mark = "" if result["equal"][name] else "  differs"
        rows.append(f"{name:16}{ms:10.3f}{by_needle:14.3f}{by_noopt:14.3f}{result['error'][name]:10.1e}{mark}")
    return "\n".join([head, *rows])


def chart(result: dict[str, Any], path: Path) -> bool:
    """A bar per mode; False without matplotlib."""
    try:
        from needle.profiler import plots
    except ImportError:
        return False
    ms = result["milliseconds"]
    texts = [f"{v:.3g} ms" for v in ms.values()]
    unit = f"milliseconds, {result['model']}, batch {result['batch']}"
    plots.save(plots.bars(list(ms), list(ms.values()), [(v, v) for v in ms.values()], texts, unit), path)
    return True


def parser(networks: Iterable[str] = NETWORKS) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m needle.tvm.eval", description=__doc__)
    p.add_argument("-m", "--model", choices=list(networks), required=True)
    p.add_argument("-d", "--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("-r", "--recompile", action="store_true", help="tune and compile anew")
    p.add_argument("--trials", type=int, default=tuning.TRIALS, help="schedules measured for the optimized mode")
    p.add_argument("--batch", type=int)
    p.add_argument("--rounds", type=int, default=ROUNDS)
    p.add_argument("--show", action="store_true", help="print the module translated, fused and scheduled")
    p.add_argument("--json", type=Path, help="write the numbers to this file")
    p.add_argument("--chart", type=Path, help="draw them into this file (needs matplotlib)")
    return p


def report(result: dict[str, Any], options: argparse.Namespace) -> int:
    """Print and write the result; 0, or 1 where one differs from needle's."""
    print(table(result))
    if options.json:
        write_json(options.json, result)
    if options.chart and not chart(result, options.chart):
        print("no chart: matplotlib is not installed (in a checkout: pip install '.[report]')")
    return 0 if all(result["equal"].values()) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 where a result differs from needle's by more than 1e-4 or something is lacking; 130 where stopped."""
    options = parser().parse_args(arguments)
    _, inputs, usual = NETWORKS[options.model]
    options.batch = options.batch or usual
    given = inputs(options.batch)
    x = ndl.Tensor(given, dtype=str(given.dtype), requires_grad=False)
    return exit_code(lambda: report(evaluate(network(options.model), x, options), options))


if __name__ == "__main__":
    sys.exit(main())
