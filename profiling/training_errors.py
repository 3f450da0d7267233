"""Errors of compiled training steps beside torch's own: `python profiling/training_errors.py [--rows ...] [--steps 100]`.

gradients: the largest error of a parameter's first gradient against float64, relative to that gradient's largest entry, of torch
in float32 and of ours; the worst parameter's, the least and the median of several batches. Where rounding turns a ReLU or a
maximum over, a gradient jumps, in torch as in needle: the least shows rounding, the median such jumps. losses: how far those of
the first steps on random batches lie apart, relative: ours from torch's in float32, and both from torch's in float64. Two runs of
ours must be equal to the bit.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import needle as ndl
from needle.profiler import cpu_name
from torch2needle import models
from training import RATE, ROWS, Row, batch, converted, sgd

WINOGRAD = ("auto", "off")


def model_of(row: Row) -> Any:
    torch.manual_seed(0)
    return getattr(models, row.build)(**row.arguments).train()


def batches(row: Row, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return (batch(row._replace(seed=row.seed + i)) for i in range(steps))


class Run(NamedTuple):
    gradients: dict[str, np.ndarray]  # of the first step
    losses: list[float]


def torch_run(row: Row, dtype: torch.dtype, steps: int) -> Run:
    model = model_of(row).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    found = Run({}, [])
    for x, y in batches(row, steps):
        inputs = torch.from_numpy(x)
        out = model(inputs.to(dtype) if inputs.is_floating_point() else inputs)
        loss = torch.nn.functional.cross_entropy(out, torch.from_numpy(y))
        optimizer.zero_grad()
        loss.backward()
        if not found.gradients:
            named = model.named_parameters()
            found.gradients.update({n: p.grad.double().numpy().copy() for n, p in named if p.grad is not None})
        optimizer.step()
        found.losses.append(loss.item())
    return found


def needle_run(row: Row, net: Any, steps: int, winograd: str) -> Run:
    """Gradients are what the first of two accumulated steps has summed up, their halves."""

    def step_of(own: Any, accumulate: int) -> Any:
        options = {"accumulate": accumulate, "winograd": winograd}
        return ndl.compile_step(own, ndl.ops.cross_entropy, sgd(own), batch(row), **options)

    own = copy.deepcopy(net)
    first, step = step_of(own, 2), step_of(copy.deepcopy(net), 1)
    first(*batch(row))
    names = {p: name for name, p in own.named_parameters()}
    gradients = {names[p]: 2 * half.numpy().astype("float64") for p, half in first.last.sums.items()}
    return Run(gradients, [float(step(x, y)) for x, y in batches(row, steps)])


def gradient_error(run: Run, exact: Run) -> float:
    """The worst parameter's, of those that have a gradient beside rounding errors.

    A bias before a batch norm has none: what any library finds there is the error of a sum that cancels.
    """
    largest = {n: np.abs(g).max() for n, g in exact.gradients.items()}
    told = [n for n, size in largest.items() if size > 1e-9 * max(largest.values())]
    return max(float(np.abs(run.gradients[n] - exact.gradients[n]).max() / largest[n]) for n in told)


def loss_errors(run: Run, other: Run) -> float:
    return float(np.max(np.abs(np.subtract(run.losses, other.losses)) / np.abs(other.losses)))


def gradient_errors(row: Row, net: Any, count: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {"torch": [], **{who(w): [] for w in WINOGRAD}}
    for seed in range(count):
        one = row._replace(seed=seed + 1)
        exact = torch_run(one, torch.float64, 1)
        found["torch"].append(gradient_error(torch_run(one, torch.float32, 1), exact))
        for w in WINOGRAD:
            found[who(w)].append(gradient_error(needle_run(one, net, 1, w), exact))
    return {name: {"least": min(errors), "median": float(np.median(errors))} for name, errors in found.items()}


def who(winograd: str) -> str:
    return f"needle, winograd={winograd}"


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    row = ROWS[name]
    theirs, exact = (torch_run(row, dtype, args.steps) for dtype in (torch.float32, torch.float64))
    net = converted(row, model_of(row))
    runs = {"torch": theirs} | {who(w): needle_run(row, net, args.steps, w) for w in WINOGRAD}
    again = needle_run(row, net, args.steps, "auto")
    if again.losses != runs[who("auto")].losses:
        raise SystemExit(
            f"[training_errors] two runs of {name} expect the same losses, got {again.losses[-1]} at last."
        )
    return {
        "row": name,
        "title": row.title,
        "steps": args.steps,
        "batches": args.batches,
        "gradients": gradient_errors(row, net, args.batches),
        "losses": {n: {"torch": loss_errors(r, theirs), "float64": loss_errors(r, exact)} for n, r in runs.items()},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    results = []
    for name in args.rows:
        results.append(r := measure(name, args))
        print(
            f"{r['title']}: errors of gradients, least and median; losses of {args.steps} steps from torch, from float64"
        )
        for engine, g in r["gradients"].items():
            off = r["losses"][engine]
            numbers = f"{g['least']:9.1e} {g['median']:9.1e}   {off['torch']:9.1e} {off['float64']:9.1e}"
            print(f"  {engine:<24}{numbers}", flush=True)
        if args.json:
            document = {"cpu": cpu_name(), "isa": ndl.isa(), "results": results}
            Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
