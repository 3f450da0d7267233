"""Training steps of needle, compiled and eager, beside torch's: `python profiling/training.py [--rows ...]`.

Peers are torch eager, torch in channels_last, and torch.compile (inductor); needle's models are fused, as users fuse them. Each
engine runs in a process of its own on the same cores; a round times one burst of each, after a pause in which the threads of the
others fall asleep. All start from the same weights; nobody is timed whose losses differ over the first steps. "first" is the time
of the first step, compilation included; memory is the most that the process held from there on. Conversion comes before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from needle._core import release_unused_memory

from bench import PAUSE, median_time
from needle import isa
from needle.profiler import cpu_name
from peers.processes import free_cores

CLASSES, STEPS, RATE = 10, 5, 0.001
TOLERANCE = 1e-3  # of the losses over the first steps


class Row(NamedTuple):
    """A builder of `torch2needle.models` with its arguments, the shape of a batch, and that of its labels.

    words: inputs are numbers below this, else normal floats. chaotic: batch norms over few numbers multiply rounding errors by
    thousands, so that torch's own layouts train apart; only the first losses are compared. seed: of the batch.
    """

    title: str
    build: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    words: int = 0
    chaotic: bool = False
    seed: int = 1


TEN = {"num_classes": CLASSES}
TRANSFORMER = {"width": 256, "heads": 4, "layers": 4, "feed_forward": 1024, "dropout": 0.0}
VIT = {"size": 224, "patch": 16, "width": 384, "heads": 6, "layers": 12}
ROWS = {
    "mlp": Row("MLP 784-256-100-10, batch 100", "mlp", {"sizes": (784, 256, 100, CLASSES)}, (100, 784), (100,)),
    "resnet9": Row("ResNet9, batch 128 @32", "resnet9", {}, (128, 3, 32, 32), (128,)),
    "resnet18": Row("ResNet-18, batch 16 @64", "resnet18", TEN, (16, 3, 64, 64), (16,)),
    "unet": Row("UNet of 16, batch 2 @128", "unet", {"base": 16}, (2, 3, 128, 128), (2, 128, 128)),
    "transformer": Row("Transformer 4 x 256, 8 x 64 tokens", "transformer", TRANSFORMER, (8, 64), (8,), 1000),
    "lstm": Row("LSTM 2 x 256, batch 32, 40 steps", "lstm", {"classes": CLASSES}, (40, 32, 256), (32,)),
    "resnet50": Row("ResNet-50, batch 8 @128", "resnet50", TEN, (8, 3, 128, 128), (8,), chaotic=True),
    "mobilenet": Row(
        "MobileNetV2, batch 8 @96", "mobilenet_v2", TEN | {"dropout": 0.0}, (8, 3, 96, 96), (8,), chaotic=True
    ),
    "densenet": Row("DenseNet-121, batch 4 @64", "densenet121", TEN, (4, 3, 64, 64), (4,), chaotic=True),
    "vit": Row("ViT-small, batch 4 @224", "vit", VIT, (4, 3, 224, 224), (4,)),
}


def batch(row: Row) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(row.seed)
    x = draw.randint(0, row.words, row.shape) if row.words else draw.randn(*row.shape).astype("float32")
    return x, draw.randint(0, 2 if row.build == "unet" else CLASSES, row.labels)


def torch_step(row: Row, model: Any, channels_last: bool = False, compiled: bool = False) -> Callable[[], float]:
    import torch

    x, y = map(torch.from_numpy, batch(row))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def converted(row: Row, model: Any) -> Any:
    import torch

    import operator_fusion
    import torch2needle

    return operator_fusion.fuse(torch2needle.convert(model.eval(), torch.from_numpy(batch(row)[0]))).train()


def sgd(net: Any) -> Any:
    import needle as ndl

    return ndl.optim.SGD(net.parameters(), RATE, momentum=0.9, rule="torch")


def eager_step(row: Row, net: Any) -> Callable[[], float]:
    import needle as ndl

    optimizer = sgd(net)
    x, y = (ndl.Tensor(a, dtype=str(a.dtype), requires_grad=False) for a in batch(row))

    def step() -> float:
        optimizer.reset_grad()
        loss = ndl.ops.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def needle_step(row: Row, net: Any) -> Callable[[], float]:
    import needle as ndl

    x, y = batch(row)
    step = ndl.compile_step(net, ndl.ops.cross_entropy, sgd(net), (x, y))
    return lambda: float(step(x, y))


PEERS: dict[str, Callable[[Row, Any], Callable[[], float]]] = {
    "torch": torch_step,
    "channels_last": partial(torch_step, channels_last=True),
    "inductor": partial(torch_step, compiled=True),
}
ENGINES = PEERS | {"eager": eager_step, "needle": needle_step}


def engines_of(row: Row, wanted: list[str]) -> list[str]:
    """channels_last is for images."""
    return [e for e in ENGINES if e in wanted and (e != "channels_last" or len(row.shape) == 4)]


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
    net = getattr(models, row.build)(**row.arguments).train()
    net = net if engine in PEERS else converted(row, net)
    forget_peak()
    start = time.perf_counter()
    step = ENGINES[engine](row, net)
    losses, first = [step()], time.perf_counter() - start
    line.send((losses + [step() for _ in range(STEPS - 1)], first, peak_memory()))
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


def forget_peak() -> None:
    gc.collect()
    release_unused_memory()
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float:
    """The most memory of this process since `forget_peak`, in MiB."""
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def check_losses(row: Row, losses: dict[str, list[float]]) -> float:
    """How far the engines' losses differ, relative to the largest; ends the script where that is too far."""
    known = losses.get("torch", next(iter(losses.values())))
    off = {e: np.abs(np.subtract(v, known)) / np.abs(known).max() for e, v in losses.items()}
    for engine, found in off.items():
        if not found[: 1 if row.chaotic else STEPS].max() <= TOLERANCE:
            raise SystemExit(f"[training] losses of {row.title} by {engine} differ by {found.max():.1e}, got {losses}.")
    return float(max(found.max() for found in off.values()))


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """By engine: milliseconds per step, seconds of the first, peak memory in MiB; and the ratios of the best peer to ours."""
    engines = engines_of(ROWS[name], args.engines)
    with contextlib.ExitStack() as stack:
        lines, started = {}, {}
        for e in engines:  # one after the other, so that first steps are timed alone
            lines[e] = stack.enter_context(worker(e, name, args))
            started[e] = lines[e].recv()
        off = check_losses(ROWS[name], {e: losses for e, (losses, *_) in started.items()})
        times: dict[str, list[float]] = {e: [] for e in engines}
        for r in range(args.rounds):
            for engine in engines[:: -1 if r % 2 else 1]:
                time.sleep(PAUSE)
                lines[engine].send(args.budget)
                times[engine].append(1e3 * lines[engine].recv())
    peers = [e for e in engines if e in PEERS]
    row: dict[str, Any] = {"row": name, "title": ROWS[name].title, "loss_difference": off}
    row["ms"] = {e: statistics.median(t) for e, t in times.items()}
    row["first_s"] = {e: first for e, (_, first, _) in started.items()}
    row["peak_mib"] = {e: peak for e, (*_, peak) in started.items()}
    for ours in [e for e in engines if e not in PEERS]:
        found = [min(t) / own for *t, own in zip(*(times[p] for p in peers), times[ours], strict=True)]
        row[f"ratio_{ours}"] = {"median": statistics.median(found), "min": min(found), "max": max(found)}
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per engine and round")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    args.cores = free_cores(args.threads)
    note = f"{args.threads} threads, {args.rounds} alternating rounds"
    print(f"{cpu_name()}, {isa()}, {note}; best peer / ours over 1: ours is faster")
    results = []
    for name in args.rows:
        results.append(r := compare(name, args))
        print(f"{r['title']}  (losses differ by {r['loss_difference']:.0e})")
        for engine, ms in r["ms"].items():
            ratio = r.get(f"ratio_{engine}")
            beside = (
                f"  best peer / ours {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio else ""
            )
            facts = f"first {r['first_s'][engine]:6.2f} s  {r['peak_mib'][engine]:6.0f} MiB"
            print(f"  {engine:<14}{ms:9.2f} ms  {facts}{beside}", flush=True)
    if args.json:
        document = {"cpu": cpu_name(), "isa": isa(), "threads": args.threads, "rounds": args.rounds, "results": results}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
