"""Ops that move, sort and sample, functions of numbers and sums along axes beside torch's.

`python profiling/movement.py [--json FILE] [--threads N] [--families NAME ...] [--rows NAME ...]`

A torch function is converted and compiled; the steps of its plan and torch's eager call are timed in turns, on the same
values. The ratio is torch's time over the plan's: over 1, needle is faster. What has no plan (its size depends on values) is
timed eagerly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import needle as ndl
import torch2needle
from movement_rows import FAMILIES, Row
from needle.profiler import cpu_name

SECONDS = 0.02  # that a round of a row takes at least


class Call(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.call(*inputs)


class Slope(nn.Module):
    """The gradient of a function of a parameter, each result times a number: what a training step does of it."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        super().__init__()
        self.call, self.x = call, nn.Parameter(x)

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return (self.call(self.x) * weights).sum()


def timed(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def all_of(results: Any) -> list[torch.Tensor]:
    made = results if isinstance(results, tuple | list) else (results,)
    return [torch.as_tensor(r.numpy()) for r in made]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if not theirs.numel():
        return 0.0
    return float((ours.double() - theirs.double()).abs().max()) / max(1.0, float(theirs.double().abs().max()))


def slope_of(row: Row) -> tuple[Callable[[int], list], Callable[[], Any], float, list[str]]:
    """The profile of a step, torch's call, the largest error of the gradient and the step's kernels."""
    (x,) = row.inputs
    net = Slope(row.call, x.clone())
    with torch.no_grad():
        weights = torch.randn_like(row.call(x))
    ours = torch2needle.convert(net, (weights,), dynamic=False)
    optimizer = ndl.optim.SGD(ours.parameters(), lr=0.0, momentum=0.9, rule="torch")  # its state begins as the gradient
    step = ndl.compile_step(ours, lambda y, _: y, optimizer, (weights, None))
    step(weights)

    def theirs() -> torch.Tensor:
        net.x.grad = None
        net(weights).backward()
        return net.x.grad  # type: ignore[return-value]

    (state,) = optimizer.state.values()
    off = error(torch.as_tensor(state["momentum"].numpy()), theirs())
    return lambda rounds: step.profile(weights, rounds=rounds), theirs, off, list(step.plan.names)


def call_of(row: Row) -> tuple[Callable[[int], list] | None, Callable[[], Any], float, list[str], Callable[[], Any]]:
    """As `slope_of`, of a function alone, and the call to time where there is no plan."""
    arrays = [t.numpy() for t in row.inputs]
    given = [ndl.Tensor(a, dtype=str(a.dtype), requires_grad=False) for a in arrays]
    with torch.no_grad():
        want = all_of(row.call(*row.inputs))
    net: Any = row.ours or torch2needle.convert(Call(row.call).eval(), row.inputs, dynamic=False)
    exe = None if row.counted else ndl.compile(net, tuple(given))
    eager = lambda: net(*given)  # noqa: E731
    off = max(map(error, all_of(exe(*given) if exe else eager()), want))
    profile = (lambda rounds: exe.profile(*given, rounds=rounds)) if exe else None
    return profile, lambda: row.call(*row.inputs), off, list(exe.plan.names) if exe else [], eager


def measure(row: Row, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"family": row.family, "size": row.size}
    profile, theirs, found["error"], steps, *eager = slope_of(row) if row.slope else call_of(row)
    if steps:
        found["steps"] = steps
    with torch.set_grad_enabled(row.slope):
        count = max(3, min(200, round(SECONDS / max(1e-9, timed(theirs, 2)))))
        times, torchs = [], []
        for _ in range(rounds):
            times.append(sum(t for *_, t in profile(min(count, 50))) if profile else timed(eager[0], count))
            torchs.append(timed(theirs, count))
    ratios = sorted(t / s for t, s in zip(torchs, times, strict=True))
    found |= {"ours_us": 1e6 * statistics.median(times), "torch_us": 1e6 * statistics.median(torchs)}
    return found | {"ratio": statistics.median(ratios), "least": ratios[0], "largest": ratios[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rows", nargs="*", help="rows whose family begins so")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ndl.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{cpu_name()}, {ndl.isa()}, {args.threads} threads")
    rows = []
    for family in args.families:
        for row in FAMILIES[family]():
            if args.rows and not row.family.startswith(tuple(args.rows)):
                continue
            try:
                rows.append(r := measure(row, args.rounds))
            except Exception as e:  # a row that fails is a finding, and the others go on
                print(f"{row.family:28}{row.size:34} FAILED {type(e).__name__}: {str(e)[:150]}", flush=True)
                continue
            span = f"({r['least']:.2f} to {r['largest']:.2f})"
            print(
                f"{row.family:28}{row.size:34}{r['ours_us']:10.1f} us  torch {r['torch_us']:10.1f} us  {r['ratio']:6.2f} {span}"
                + f"  error {r['error']:.1e}" * (r["error"] > 1e-5),
                flush=True,
            )
            if args.json:  # after every row: a run of all of them takes minutes
                facts = {"cpu": cpu_name(), "isa": ndl.isa(), "threads": args.threads, "rows": rows}
                args.json.write_text(json.dumps(facts, indent=1) + "\n")
    ratios = [r["ratio"] for r in rows]
    print(f"least ratio {min(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
