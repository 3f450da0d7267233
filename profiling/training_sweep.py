"""Training steps of the sweep's models, fused and compiled, beside torch eager's: `python profiling/training_sweep.py --json F`.

Every model has a process of its own, in which steps of both alternate on the same cores. Dropout is off; the loss is the mean
square of all results, the optimizer SGD with momentum. Rows are in the file as soon as they are there, and a run leaves out what
it holds. "first" is the time of the first step, planning included; conversion comes before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from needle import isa
from needle.profiler import cpu_name
from peers.processes import free_cores
from zoo import sizes

RATE, TOLERANCE = 1e-5, 1e-4  # of the losses of the first steps
LEAST = 3  # rounds of a model, however long they take
SLOW = 1.0  # ratios below have their kernels in the row


def measure(name: str, batch: int, threads: int, cores: list[int], rounds: int, budget: float) -> dict[str, Any]:
    """The row of one model."""
    if cores:
        os.sched_setaffinity(0, cores)
    import torch

    import needle as ndl
    import operator_fusion
    import torch2needle
    from torch2needle.tools.verify import map_structure, to_needle
    from zoo.build import build, inputs
    from zoo.steps import needle_loss, torch_loss, without_dropout

    torch.set_num_threads(threads)
    ndl.set_num_threads(threads)
    entry = sizes.entry(name, batch)
    model, given = without_dropout(build(entry)), inputs(entry)[0]
    start = time.perf_counter()
    net = operator_fusion.fuse(torch2needle.convert(model, given).train()).train()
    converted = time.perf_counter() - start
    x = map_structure({k: v for k, v in given.items() if k in net.input_names}, lambda v: to_needle(v, None))
    ours = ndl.optim.SGD(net.parameters(), RATE, momentum=0.9, rule="torch")
    theirs = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)

    def torch_step() -> float:
        theirs.zero_grad()
        loss = torch_loss(model(**given))
        loss.backward()
        theirs.step()
        return loss.item()

    start = time.perf_counter()
    step = ndl.compile_step(net, needle_loss, ours, (x,))
    loss = float(step(x))
    first = time.perf_counter() - start
    off = abs(loss - (known := torch_step())) / max(abs(known), 1e-30)
    if not off <= TOLERANCE:
        return {"name": name, "error": f"the first losses differ by {off:.1e}"}
    times: dict[str, list[float]] = {"torch": [], "needle": []}
    end = time.perf_counter() + budget
    while len(times["torch"]) < LEAST or (len(times["torch"]) < rounds and time.perf_counter() < end):
        for engine, run in (("torch", torch_step), ("needle", partial(step, x))):
            start = time.perf_counter()
            run()
            times[engine].append(1e3 * (time.perf_counter() - start))
    ratios = [t / o for t, o in zip(times["torch"], times["needle"], strict=True)]
    row = {"name": name, "ratio": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    row |= {f"{engine}_ms": statistics.median(found) for engine, found in times.items()}
    row |= {"convert_s": converted, "first_s": first, "loss_difference": off}
    if row["ratio"] < SLOW:
        kernels: dict[str, float] = {}
        for kernel, _, seconds in step.profile(x, rounds=2):
            kernels[kernel] = kernels.get(kernel, 0.0) + 1e3 * seconds
        row["kernels_ms"] = dict(sorted(kernels.items(), key=lambda item: -item[1])[:8])
    return row


def row_of(name: str, *args: Any) -> dict[str, Any]:
    try:
        return measure(name, *args)
    except Exception as e:  # whatever a model's library raises
        return {"name": name, "error": f"{type(e).__name__}: {e}".splitlines()[0]}


def in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            row = pool.submit(row_of, name, args.batch, args.threads, args.cores, args.rounds, args.budget)
            return row.result()
        except BrokenProcessPool:
            return {"name": name, "error": "the process died"}


def table(rows: list[dict[str, Any]]) -> str:
    timed = sorted((r for r in rows if "ratio" in r), key=lambda r: r["ratio"])
    lines = [
        f"{r['ratio']:5.2f} ({r['min']:.2f}-{r['max']:.2f})  {r['name']:<45} torch {r['torch_ms']:8.1f} ms  "
        f"first {r['first_s']:5.1f} s  convert {r['convert_s']:5.1f} s"
        for r in timed
    ]
    lines += [f"  -  {r['name']}: {r['error']}" for r in rows if "error" in r]
    if timed:
        mean = statistics.geometric_mean([r["ratio"] for r in timed])
        lines.append(f"{len(timed)} models, geometric mean {mean:.2f}, {sum(r['ratio'] < 1 for r in timed)} below 1")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(sizes.table()), metavar="NAME", help="of zoo/sizes.py")
    parser.add_argument("--sample", action="store_true", help="a model of each kind")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--budget", type=float, default=15.0, help="seconds of a model's rounds, of which there are 3 at least"
    )
    parser.add_argument("--json", metavar="FILE", required=True)
    args = parser.parse_args(argv)
    args.cores = free_cores(args.threads)
    path = Path(args.json)
    document = {"cpu": cpu_name(), "isa": isa(), "threads": args.threads, "batch": args.batch, "rows": []}
    document = json.loads(path.read_text()) if path.exists() else document
    done = {r["name"] for r in document["rows"]}
    for name in tqdm([n for n in (sizes.SAMPLE if args.sample else args.names) if n not in done], unit="model"):
        document["rows"].append(in_process(name, args))
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"{document['cpu']}, {document['isa']}, {document['threads']} threads, batch {document['batch']}; torch eager / ours"
    )
    print(table(document["rows"]))


if __name__ == "__main__":
    main()
