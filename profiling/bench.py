"""torch (eager, channels_last) and needle (eager, fused, compiled) on the same models, alternating. `--json FILE`, `--rounds N`.

Every round times every engine once; a ratio is the median over rounds of peer / ours with its least and largest value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import needle as ndl
import operator_fusion
import torch2needle
from torch2needle import models

MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "resnet18 @224": (models.resnet18, (1, 3, 224, 224)),
    "unet @256": (models.unet, (1, 3, 256, 256)),
    "mlp b64": (models.mlp, (64, 784)),
    "vgg16 @224": (models.vgg16, (1, 3, 224, 224)),
}


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def engines(name: str) -> tuple[dict[str, Callable[[], object]], float]:
    """Calls by engine, and the seconds that needle took to compile."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    x = torch.randn(*shape)
    net = torch2needle.convert(model)
    fused = operator_fusion.fuse(net)
    start = time.perf_counter()
    exe = ndl.compile(fused, (x,))
    compiled_in = time.perf_counter() - start
    calls: dict[str, Callable[[], object]] = {"torch eager": lambda: model(x)}
    if len(shape) == 4:
        last = build().eval()
        last.load_state_dict(model.state_dict())
        last = last.to(memory_format=torch.channels_last)
        x_last = x.contiguous(memory_format=torch.channels_last)
        calls["torch channels_last"] = lambda: last(x_last)
    calls |= {"needle eager": lambda: net(x), "needle fused": lambda: fused(x), "needle compiled": lambda: exe(x)}
    return calls, compiled_in


def median_time(call: Callable[[], object], budget: float, least: int = 3) -> float:
    """Median seconds of at least `least` calls, more of them while `budget` seconds last."""
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (time.perf_counter() < end and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(name: str, rounds: int, budget: float) -> dict:
    calls, compiled_in = engines(name)
    times: dict[str, list[float]] = {k: [] for k in calls}
    with torch.no_grad():
        for call in calls.values():
            call()
        for _ in range(rounds):
            for engine, call in calls.items():
                times[engine].append(median_time(call, budget))
    rows = []
    for engine, seconds in times.items():
        ratios = [s / o for s, o in zip(seconds, times["needle compiled"], strict=True)]
        rows.append(
            {
                "engine": engine,
                "ms": 1e3 * statistics.median(seconds),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
    return {"model": name, "compile_s": compiled_in, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per engine and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ndl.set_num_threads(args.threads)
    results = []
    print(f"{cpu_name()}, {ndl.isa()}, {args.threads} threads, {args.rounds} alternating rounds")
    for name in args.models:
        result = compare(name, args.rounds, args.budget)
        results.append(result)
        print(f"\n{name}: needle compiled it in {result['compile_s']:.2f} s")
        for r in result["rows"]:
            spread = f"({r['ratio_min']:.2f}-{r['ratio_max']:.2f})"
            print(f"  {r['engine']:<22}{r['ms']:9.2f} ms   {r['ratio']:5.2f}x needle compiled {spread}")
    if args.json:
        Path(args.json).write_text(
            json.dumps({"cpu": cpu_name(), "isa": ndl.isa(), "threads": args.threads, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
