"""Eager training steps of needle beside torch's: `python profiling/training.py [--rows ...] [--rounds N] [--json F]`.

Each engine runs in a process of its own on the same cores; a round times one burst of each, after a pause in which the threads
of the other fall asleep. Both start from the same weights; nobody is timed whose losses differ over the first steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import PAUSE, median_time
from needle import isa
from needle.profiler import cpu_name
from peers.processes import free_cores

CLASSES, STEPS = 10, 5
TOLERANCE = 1e-3  # of the losses over the first steps


class Row(NamedTuple):
    """A builder of `torch2needle.models` with its arguments, and the shape of a batch."""

    title: str
    build: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]


ROWS = {
    "mlp": Row("MLP 784-256-100-10, batch 100", "mlp", {"sizes": (784, 256, 100, CLASSES)}, (100, 784)),
    "resnet9": Row("ResNet9, batch 128 @32", "resnet9", {}, (128, 3, 32, 32)),
    "resnet18": Row("ResNet-18, batch 16 @64", "resnet18", {"num_classes": CLASSES}, (16, 3, 64, 64)),
    "lstm": Row("LSTM 2 x 256, batch 32, 40 steps", "lstm", {"classes": CLASSES}, (40, 32, 256)),
}


def batch(row: Row) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(1)
    labels = row.shape[1] if row.build == "lstm" else row.shape[0]  # sequences come as (T, B, features)
    return draw.randn(*row.shape).astype("float32"), draw.randint(0, CLASSES, labels)


def torch_step(row: Row, model: Any) -> Callable[[], float]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, y = map(torch.from_numpy, batch(row))

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def needle_step(row: Row, model: Any) -> Callable[[], float]:
    import needle as ndl
    import torch2needle

    net = torch2needle.convert(model)
    optimizer = ndl.optim.SGD(net.parameters(), 0.01, momentum=0.9, rule="torch")
    x, y = (ndl.Tensor(a, dtype=str(a.dtype), requires_grad=False) for a in batch(row))

    def step() -> float:
        optimizer.reset_grad()
        loss = ndl.ops.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


ENGINES = {"torch": torch_step, "needle": needle_step}


def work(engine: str, name: str, threads: int, cores: list[int], line: Connection) -> None:
    """The first losses, then the median seconds of a burst for every budget that comes in."""
    if cores:
        os.sched_setaffinity(0, cores)
    import torch

    import needle as ndl
    from torch2needle import models

    torch.set_num_threads(threads)
    ndl.set_num_threads(threads)
    row = ROWS[name]
    torch.manual_seed(0)
    step = ENGINES[engine](row, getattr(models, row.build)(**row.arguments).train())
    line.send([step() for _ in range(STEPS)])
    while (budget := line.recv()) is not None:
        step()  # the threads wake outside the clock
        line.send(median_time(step, budget))


@contextlib.contextmanager
def worker(engine: str, name: str, args: argparse.Namespace) -> Iterator[Connection]:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=work, args=(engine, name, args.threads, args.cores, there), daemon=True)
    process.start()
    there.close()  # so that a dead worker ends the wait
    try:
        yield here
        here.send(None)
        process.join(10)
    finally:
        process.kill()


def check_losses(name: str, losses: dict[str, list[float]]) -> float:
    """How far the engines' losses differ, relative to the largest; ends the script where that is too far."""
    off = float(np.abs(np.subtract(losses["needle"], losses["torch"])).max() / np.abs(losses["torch"]).max())
    if not off <= TOLERANCE:
        raise SystemExit(f"[training] losses of {name} differ by {off:.1e}, got {losses}.")
    return off


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per step by engine, and the ratio torch / needle: median, least and largest over rounds."""
    with contextlib.ExitStack() as stack:
        lines = {e: stack.enter_context(worker(e, name, args)) for e in ENGINES}
        losses = {e: line.recv() for e, line in lines.items()}
        off = check_losses(name, losses)
        times: dict[str, list[float]] = {e: [] for e in ENGINES}
        for r in range(args.rounds):
            for engine in list(ENGINES)[:: -1 if r % 2 else 1]:
                time.sleep(PAUSE)
                lines[engine].send(args.budget)
                times[engine].append(1e3 * lines[engine].recv())
    ratios = [a / b for a, b in zip(times["torch"], times["needle"], strict=True)]
    return {
        "row": name,
        "title": ROWS[name].title,
        **{f"{e}_ms": statistics.median(t) for e, t in times.items()},
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "loss_difference": off,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per engine and round")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    args.cores = free_cores(args.threads)
    note = f"{args.threads} threads, {args.rounds} alternating rounds"
    print(f"{cpu_name()}, {isa()}, {note}; torch / needle over 1: needle is faster")
    results = []
    for name in args.rows:
        results.append(r := compare(name, args))
        print(
            f"{r['title']:<36}{r['torch_ms']:8.2f} ms torch{r['needle_ms']:8.2f} ms needle  torch / needle {r['ratio']:.2f} "
            f"({r['ratio_min']:.2f}-{r['ratio_max']:.2f})",
            flush=True,
        )
    if args.json:
        document = {"cpu": cpu_name(), "isa": isa(), "threads": args.threads, "rounds": args.rounds, "results": results}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
