"""`torch2needle bench`: compiled needle beside torch and ONNX Runtime on one model, in this process and in alternating rounds."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import needle as ndl
from needle.graph import map_structure
from needle.profiler.load import Load
from needle.profiler.table import unsteady

from ..convert import executable
from .named import one_line

OURS = "needle compiled"
BURST = 0.3  # seconds of calls of one engine in one round
PAUSE = 0.25  # seconds before a burst: threads of the engine before spin for up to 0.2 s
WRONG = 1e-3  # difference to torch eager, relative to the largest output, from which on nobody is timed

Run = Callable[[], Any]


def needle_run(model: Any, net: Any, inputs: Any) -> Run:
    exe = executable(net, arguments(net, inputs), True)
    given = tuple(a.numpy() if isinstance(a, torch.Tensor) else a for a in arguments(net, inputs))
    return lambda: exe(*given)


def eager_run(model: Any, net: Any, inputs: Any) -> Run:
    return lambda: model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def compiled_run(model: Any, net: Any, inputs: Any) -> Run:
    torch._dynamo.reset()
    return eager_run(torch.compile(model), net, inputs)


def onnxruntime_run(model: Any, net: Any, inputs: Any) -> Run:
    """The needle model as an ONNX file."""
    import onnxruntime

    given = arguments(net, inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = ndl.get_num_threads(), 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        net.to_onnx(path, *given)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {i.name: np.asarray(a) for i, a in zip(session.get_inputs(), given, strict=True)}
    return lambda: session.run(None, feed)


ENGINES: dict[str, Callable[[Any, Any, Any], Run]] = {
    OURS: needle_run,
    "torch eager": eager_run,
    "torch.compile": compiled_run,
    "onnxruntime": onnxruntime_run,
}


def arguments(net: Any, inputs: Any) -> tuple:
    return tuple(net.bind((), inputs) if isinstance(inputs, dict) else net.bind(tuple(inputs), {}))


def leaves(result: Any) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    values = list(result.values()) if isinstance(result, dict) else result
    map_structure(values, lambda a: found.append(np.asarray(a.detach() if isinstance(a, torch.Tensor) else a)))
    return found


def difference(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """The largest one, relative to the largest value; infinite where shapes differ or a value alone is not a number."""
    if [a.shape for a in got] != [b.shape for b in want]:
        return float("inf")
    found = [0.0]
    for a, b in zip(got, want, strict=True):
        if not b.size:
            continue
        other = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        far = np.abs(a[other].astype("float64") - b[other].astype("float64"))
        largest = np.abs(b[np.isfinite(b)].astype("float64")).max(initial=1e-30)
        found.append(float(np.nan_to_num(far, nan=np.inf, posinf=np.inf).max(initial=0) / largest))
    return max(found)


def burst(run: Run) -> float:
    """Seconds of a call: the median of those in a burst."""
    times: list[float] = []
    while not times or sum(times) < BURST:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(
    model: Any, net: Any, inputs: Any, engines: Sequence[str], rounds: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each engine: `times` by round and its `difference` to torch eager, or the reason why it has none; and
    what makes the times doubtful.
    """
    torch.set_num_threads(ndl.get_num_threads())
    names = list(dict.fromkeys([OURS, *(engines or ENGINES)]))
    rows, runs = [], {}
    with torch.no_grad(), tqdm(total=len(names) * (rounds + 1), desc="bench", leave=False, disable=None) as bar:
        want = leaves(eager_run(model, net, inputs)())
        for name in names:
            row: dict[str, Any] = {"engine": name, "times": [], "difference": None, "reason": ""}
            rows.append(row)
            bar.set_postfix_str(name)
            try:
                run = ENGINES[name](model, net, inputs)
                row["difference"] = difference(leaves(run()), want)
                if row["difference"] <= WRONG:
                    runs[name] = run
                else:
                    row["reason"] = "its result differs from torch's, so it is not timed"
            except Exception as e:  # a peer may fail in any way, and the others are measured
                row["reason"] = f"does not run: {type(e).__name__}: {one_line(e)}"
            bar.update()
        load = Load()
        for _ in range(rounds):
            for row in rows:
                if row["engine"] in runs:
                    time.sleep(PAUSE)
                    row["times"].append(burst(runs[row["engine"]]))
                bar.update()
    spreads = {r["engine"]: {"min": min(r["times"]), "max": max(r["times"])} for r in rows if r["times"]}
    return rows, [w for w in (load.warning(ndl.get_num_threads()), unsteady(spreads)) if w]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians with least and largest round, and by how much needle is faster, from ratios within a round."""
    ours = rows[0]["times"]
    lines = [f"{'engine':<17}{'ms':>10}{'least':>10}{'largest':>10}  {'time / needle (least-largest)':<31}difference"]
    for r in rows:
        line = f"{r['engine']:<17}"
        if r["times"]:
            t = r["times"]
            line += "".join(f"{1e3 * v:>10.3f}" for v in (statistics.median(t), min(t), max(t)))
            ratios = [a / b for a, b in zip(t, ours, strict=True)] if ours else []
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
            line += f"  {spread:<31}{r['difference']:.1e}"
        lines.append(f"{line} {r['reason']}".rstrip())
    return "\n".join(lines)
