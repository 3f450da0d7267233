"""Errors of compiled training steps beside torch's own: `python profiling/training_errors.py [--rows ...] [--steps 100]`.

gradients: the largest error of a parameter's first gradient against float64, relative to that gradient's largest entry, of torch
in float32 and of ours; the worst parameter, and the median over parameters. losses: how far those of the first steps on random
batches lie apart, relative: ours from torch's in float32, and torch's in float32 from its own in float64. Two runs of ours must
be equal to the bit.
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
    return (batch(row._replace(seed=i + 1)) for i in range(steps))


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
    parts = []
    for accumulate in (2, 1):
        own = copy.deepcopy(net)
        example = batch(row)
        step = ndl.compile_step(own, ndl.ops.cross_entropy, sgd(own), example, accumulate=accumulate, winograd=winograd)
        parts.append((own, step))
    (own, first), (_, step) = parts
    first(*batch(row))
    names = {p: name for name, p in own.named_parameters()}
    gradients = {names[p]: 2 * half.numpy().astype("float64") for p, half in first.last.sums.items()}
    return Run(gradients, [float(step(x, y)) for x, y in batches(row, steps)])


def gradient_errors(run: Run, exact: Run) -> dict[str, float]:
    """The worst and the median over the parameters that have a gradient beside rounding errors.

    A bias before a batch norm has none: what any library finds there is the error of a sum that cancels.
    """
    largest = max(np.abs(g).max() for g in exact.gradients.values())
    told = {n: g for n, g in exact.gradients.items() if np.abs(g).max() > 1e-9 * largest}
    errors = [float(np.abs(run.gradients[n] - g).max() / np.abs(g).max()) for n, g in told.items()]
    return {"worst": max(errors), "median": float(np.median(errors))}


def loss_errors(run: Run, other: Run) -> float:
    return float(np.max(np.abs(np.subtract(run.losses, other.losses)) / np.abs(other.losses)))


def measure(name: str, steps: int) -> dict[str, Any]:
    row = ROWS[name]
    theirs, exact = (torch_run(row, dtype, steps) for dtype in (torch.float32, torch.float64))
    net = converted(row, model_of(row))
    ours = {w: needle_run(row, net, steps, w) for w in WINOGRAD}
    again = needle_run(row, net, steps, "auto")
    if again.losses != ours["auto"].losses:
        raise SystemExit(
            f"[training_errors] two runs of {name} expect the same losses, got {again.losses[-1]} at last."
        )
    runs = {"torch": theirs} | {f"needle, winograd={w}": run for w, run in ours.items()}
    return {
        "row": name,
        "title": row.title,
        "steps": steps,
        "gradients": {who: gradient_errors(run, exact) for who, run in runs.items()},
        "losses": {
            who: {"torch": loss_errors(run, theirs), "float64": loss_errors(run, exact)} for who, run in runs.items()
        },
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    results = []
    for name in args.rows:
        results.append(r := measure(name, args.steps))
        print(
            f"{r['title']}: errors of gradients, worst and median; losses of {args.steps} steps from torch, from float64"
        )
        for who, g in r["gradients"].items():
            l = r["losses"][who]
            print(
                f"  {who:<24}{g['worst']:9.1e} {g['median']:9.1e}   {l['torch']:9.1e} {l['float64']:9.1e}", flush=True
            )
        if args.json:
            document = {"cpu": cpu_name(), "isa": ndl.isa(), "results": results}
            Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
