"""Executables beside others: `python profiling/sharing.py [--models ...] [--rounds N] [--seconds S] [--json F]`.

Two runs in two threads: their summed throughput over that of one run with all threads. Alternating with torch ops of about
the same time in one thread: each time over its solo time. Medians of per-round ratios, with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import needle as ndl
import torch2needle
from bench import PAUSE, median_time
from needle.profiler import cpu_name
from peers.formats import MODELS
from torch2needle import models


def throughput(calls: list[Callable], seconds: float) -> float:
    """Runs per second, summed over the calls, each repeated in a thread of its own."""
    rates, start = [0.0] * len(calls), threading.Barrier(len(calls))

    def repeat(i: int) -> None:
        start.wait()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() < begin + seconds:
            calls[i]()
            count += 1
        rates[i] = count / (time.perf_counter() - begin)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(rates)


def alternation(run: Callable, op: Callable, seconds: float) -> tuple[float, float]:
    """Times of `run` and `op` in turns, each over its own solo time."""
    solo = []
    for call in (run, op):
        time.sleep(PAUSE)
        solo.append(median_time(call, seconds))
    times: list[list[float]] = [[], []]
    begin = time.perf_counter()
    while time.perf_counter() < begin + 2 * seconds:
        for call, found in zip((run, op), times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return statistics.median(times[0]) / solo[0], statistics.median(times[1]) / solo[1]


def product_of_time(seconds: float) -> Callable:
    """A torch product that takes about so long."""
    for n in range(128, 8192, 128):
        a = torch.randn(n, n)
        product = partial(torch.matmul, a, a)
        if median_time(product, 0.05) >= seconds:
            break
    return product


def measure(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    model = models.randomize(getattr(models, MODELS[name].build)(), seed=0).eval()
    x = torch.randn(MODELS[name].batch, *MODELS[name].sample)
    first, second = (torch2needle.compile(model, (x,)) for _ in range(2))
    op = product_of_time(median_time(lambda: first(x), seconds))
    found: dict[str, list[float]] = {k: [] for k in ("two executables", "one twice", "beside torch", "torch beside")}
    for _ in range(rounds):
        solo = throughput([lambda: first(x)], seconds)
        found["two executables"].append(throughput([lambda: first(x), lambda: second(x)], seconds) / solo)
        found["one twice"].append(throughput([lambda: first(x)] * 2, seconds) / solo)
        mine, torchs = alternation(lambda: first(x), op, seconds)
        found["beside torch"].append(mine)
        found["torch beside"].append(torchs)
    rows = {k: {"ratio": statistics.median(v), "min": min(v), "max": max(v)} for k, v in found.items()}
    for label, r in rows.items():
        print(f"{MODELS[name].title:24} {label:16} {r['ratio']:.2f} ({r['min']:.2f} to {r['max']:.2f})", flush=True)
    return {"model": name, "title": MODELS[name].title, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet18", "mlp"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(ndl.get_num_threads())
    print(f"{cpu_name()}, {ndl.get_num_threads()} threads")
    results = [measure(m, args.rounds, args.seconds) for m in args.models]
    if args.json:
        document = {"cpu": cpu_name(), "threads": ndl.get_num_threads(), "rounds": args.rounds, "results": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
