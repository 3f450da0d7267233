"""Training steps of two processes beside those of one: `python profiling/distributed.py [--rows ...]`.

Every process has one thread on a core of its own and a batch of its own, as large as one process alone has: a scaling of 1
is twice the examples in the same time. Ours is `data_parallel(compile_step(...))`, torch's DistributedDataParallel of an eager
model (gradients in buckets of its own memory, statistics per process as ours), both over gloo. All processes stay alive and
take turns: a round times one burst of each kind. Nobody is timed whose losses differ over the first steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import training
from bench import PAUSE
from needle import isa
from needle.profiler import cpu_name
from peers.processes import free_cores
from training import ROWS, STEPS, Row, check_losses

PROCESSES = {"needle": 1, "needle x 2": 2, "torch": 1, "torch x 2": 2}  # by engine


def needle_step(row: Row, model: Any, processes: int, bucket: int) -> Callable[[], float]:
    import needle as ndl

    net = training.converted(row, model)
    if processes == 1:
        return training.needle_step(row, net)
    from torch2needle.bridges import distributed

    distributed.BUCKET = bucket * 2**20 or distributed.BUCKET
    x, y = training.batch(row)
    step = distributed.data_parallel(ndl.compile_step(net, ndl.ops.cross_entropy, training.sgd(net), (x, y)))
    return lambda: float(step(x, y))


def torch_step(row: Row, model: Any, processes: int, bucket: int) -> Callable[[], float]:
    from torch.nn.parallel import DistributedDataParallel

    if processes > 1:
        warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers, whose successor only 2.13 has
        options = {"broadcast_buffers": False, "gradient_as_bucket_view": True, "bucket_cap_mb": bucket or None}
        model = DistributedDataParallel(model, **options)
    return training.torch_step(row, model)


def work(engine: str, name: str, rank: int, cores: list[int], bucket: int, meeting: str, line: Connection) -> None:
    """The first losses, then the seconds of as many steps as come in."""
    if cores:
        os.sched_setaffinity(0, {cores[rank]})
    import torch

    import needle as ndl
    from torch2needle import models

    torch.set_num_threads(1)
    ndl.set_num_threads(1)
    row = ROWS[name]._replace(seed=1 + rank)
    torch.manual_seed(0)
    model = getattr(models, row.build)(**row.arguments).train()
    if (processes := PROCESSES[engine]) > 1:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=processes)
    step = (needle_step if engine.startswith("needle") else torch_step)(row, model, processes, bucket)
    line.send([step() for _ in range(STEPS)])
    while (count := line.recv()) is not None:
        step()  # the processes meet outside the clock
        start = time.perf_counter()
        for _ in range(count):
            step()
        line.send(time.perf_counter() - start)


class Group:
    """The processes of one engine. losses: the first ones of the first process."""

    def __init__(self, engine: str, name: str, args: argparse.Namespace, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.lines, self.processes, self.count = [], [], 1
        meeting = str(Path(folder) / f"{engine} {name}".replace(" ", "-"))
        for rank in range(PROCESSES[engine]):
            here, there = multiprocessing.Pipe()
            process = context.Process(
                target=work, args=(engine, name, rank, args.cores, args.bucket, meeting, there), daemon=True
            )
            process.start()
            there.close()  # so that a dead process ends the wait
            self.lines.append(here)
            self.processes.append(process)
        self.losses, *_ = [line.recv() for line in self.lines]
        self.count = max(1, round(args.budget * self.rate()))

    def rate(self) -> float:
        """Steps per second of a burst, of all processes together."""
        for line in self.lines:
            line.send(self.count)
        return self.count / max([line.recv() for line in self.lines])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of those that have died
            for line in self.lines:
                line.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


@contextlib.contextmanager
def group(engine: str, name: str, args: argparse.Namespace, folder: str) -> Iterator[Group]:
    made = Group(engine, name, args, folder)
    try:
        yield made
    finally:
        made.close()


def spread(found: list[float]) -> dict[str, float]:
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Steps per second of every engine; scaling: of two processes over one; ratio: ours over torch's, for both numbers."""
    rates: dict[str, list[float]] = {e: [] for e in PROCESSES}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        groups = {e: stack.enter_context(group(e, name, args, folder)) for e in PROCESSES}
        off = [
            check_losses(ROWS[name], {"torch": groups[f"torch{n}"].losses, "needle": groups[f"needle{n}"].losses})
            for n in ("", " x 2")
        ]
        for r in range(args.rounds):
            for engine in list(PROCESSES)[:: -1 if r % 2 else 1]:
                time.sleep(PAUSE)
                rates[engine].append(groups[engine].rate())
    over = lambda a, b: spread([x / y for x, y in zip(rates[a], rates[b], strict=True)])  # noqa: E731
    return {
        "row": name,
        "title": ROWS[name].title,
        "loss_difference": max(off),
        "steps_per_second": {e: statistics.median(r) for e, r in rates.items()},
        "scaling": {e: over(f"{e} x 2", e) for e in ("needle", "torch")},
        "ratio": {"one": over("needle", "torch"), "two": over("needle x 2", "torch x 2")},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["mlp", "resnet18", "transformer"], choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per engine and round")
    parser.add_argument(
        "--bucket", type=int, default=0, help="MiB of gradients that are sent together; 0: each engine's own"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    args.cores = free_cores(2)
    print(f"{cpu_name()}, {isa()}, one thread per process, {args.rounds} alternating rounds; steps per second")
    results = []
    for name in args.rows:
        results.append(r := compare(name, args))
        print(f"{r['title']}  (losses differ by {r['loss_difference']:.0e})")
        for engine in ("needle", "torch"):
            one, two = (r["steps_per_second"][e] for e in (engine, f"{engine} x 2"))
            s = r["scaling"][engine]
            scaling = f"scaling {s['median']:.2f} ({s['min']:.2f}-{s['max']:.2f})"
            print(f"  {engine:<8}1 process {one:8.1f}  2 processes {two:8.1f} each  {scaling}")
        ratios = (f"{n} {s['median']:.2f} ({s['min']:.2f}-{s['max']:.2f})" for n, s in r["ratio"].items())
        print(f"  needle / torch: {', '.join(ratios)}", flush=True)
    if args.json:
        document = {
            "cpu": cpu_name(),
            "isa": isa(),
            "rounds": args.rounds,
            "bucket_mib": args.bucket,
            "results": results,
        }
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
