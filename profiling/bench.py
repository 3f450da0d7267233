"""needle beside torch, ONNX Runtime, OpenVINO, ncnn and MNN on the same models: `python profiling/bench.py`.

Every peer runs in a process of its own with the same cores and threads. A round times every peer once (median of a burst),
one after another; a ratio is the median over rounds of peer / needle compiled, with its least and largest value.
Nobody is timed on a wrong answer: outputs are held against float64 torch. Peers that fail or are missing get a row, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

import needle as ndl
from needle.profiler import cpu_name
from peers.comparison import PAUSE, Rounds, compare
from peers.formats import LIMIT, MODELS, Task
from peers.processes import WorkerError, free_cores
from peers.table import select, table, version
from peers.worker import median_time

__all__ = ["PAUSE", "median_time"]  # what the other scripts take from here

LONGEST = 8  # steps that are printed; the JSON holds all


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def lines_of(result: dict[str, Any]) -> list[str]:
    """The model's table. Ratios under 1: the peer is faster."""
    lines = [f"{result['title']}, batch {result['batch']}"]
    lines.append(
        f"  {'engine':<20}{'ms':>9}{'peer / ours':>13}{'min-max':>12}{'first s':>9}{'export s':>10}{'peak MB':>9}{'error':>9}"
    )
    for r in result["rows"]:
        spread = "" if r["ratio"] is None else f"{r['ratio_min']:.2f}-{r['ratio_max']:.2f}"
        line = f"  {r['engine']:<20}{number(r['ms'], '.2f'):>9}{number(r['ratio'], '.2f'):>13}{spread:>12}"
        line += f"{number(r.get('first_s'), '.2f'):>9}{number(r.get('export_s'), '.1f'):>10}"
        line += f"{number(r.get('memory_mb'), '.0f'):>9}{number(r.get('error'), '.0e'):>9}"
        lines.append(line if r["status"] == "ok" else f"{line}  {r['status']}: {r['reason']}")
    return lines + layer_lines(result["layers"])


def layer_lines(layers: dict[str, Any]) -> list[str]:
    """The longest steps of needle compiled."""
    if not layers:
        return []
    total, peaks = sum(r["ms"] for r in layers["rows"]), layers["machine"]
    head = f"where {total:.2f} ms go; peak {peaks['peak_gflops']:.0f} GF/s, memory {peaks['bandwidth_gbs']:.0f} GB/s"
    lines = [f"  {head:<62}{'ms':>8}{'FMA peak':>10}{'bandwidth':>11}{'roofline':>10}"]
    for r in sorted(layers["rows"], key=lambda r: -r["ms"])[:LONGEST]:
        shares = f"{r['fma_peak']:>10.0%}{r['bandwidth']:>11.0%}{number(r['roofline'], '.0%'):>10}"
        lines.append(f"  {r['name'][:37]:<38}{r['op'][:23]:<24}{r['ms']:>8.3f}{shares}")
    return lines


def untimed(row: dict[str, Any]) -> str:
    """Why a row has no ratio, in a word or two; empty where it has one."""
    return "" if row["ratio"] is not None else "no ratio" if row["status"] == "ok" else row["status"]


def summary(results: list[dict[str, Any]]) -> list[str]:
    """peer / needle compiled, models beside one another."""
    titles = [r["title"] for r in results]
    lines = ["peer / needle compiled (over 1: needle is faster)"]
    lines.append(f"  {'engine':<20}" + "".join(f"{t:>{len(t) + 3}}" for t in titles))
    for i, row in enumerate(results[0]["rows"]):
        cells = [r["rows"][i] for r in results]
        shown = [untimed(c) or f"{c['ratio']:.2f}" for c in cells]
        cut = [f"{s[: len(t) + 2]:>{len(t) + 3}}" for s, t in zip(shown, titles, strict=True)]
        lines.append(f"  {row['engine']:<20}" + "".join(cut))
    return lines


def plot(results: list[dict[str, Any]], path: str, note: str) -> None:
    """One panel per model: bars of peer / needle compiled with least and largest round; peers without a time say why."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [r["engine"] for r in results[0]["rows"]][::-1]
    size = (2.6 * len(results) + 1.6, 0.32 * len(names) + 1.4)
    figure, axes = plt.subplots(1, len(results), figsize=size, sharey=True, squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        for y, r in enumerate(result["rows"][::-1]):
            if r["ratio"] is None:
                axis.text(0.03, y, untimed(r), va="center", fontsize=7, color="#888888")
                continue
            spread = [[r["ratio"] - r["ratio_min"]], [r["ratio_max"] - r["ratio"]]]
            axis.barh(y, r["ratio"], xerr=spread, color="#a86048" if r["engine"].startswith("needle") else "#4878a8")
            axis.text(r["ratio_max"], y, f" {r['ratio']:.2f}", va="center", fontsize=7)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.margins(x=0.18)
        axis.set_xlim(left=0)
        axis.set_title(f"{result['title']} b{result['batch']}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_yticks(range(len(names)), names)
    figure.supxlabel(f"time / time of needle compiled (over 1: needle is faster); {note}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--peers", nargs="+", help='names, or first words ("torch"); all without it')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, help="for every model (default 1, MLP 64)")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per peer and round")
    parser.add_argument("--timeout", type=float, default=900, help="seconds until a silent worker is killed")
    parser.add_argument("--extra", metavar="FILE.py", help="a file with more peers: PEERS, a list of peers.table.Peer")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png")
    args = parser.parse_args(argv)
    for name in ("rounds", "threads", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} expects at least 1, got {value}.")
    if args.plot and version("matplotlib") is None:
        parser.error("--plot needs matplotlib.")
    args.cores = free_cores(args.threads)
    return args


def run(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    peers = select(args.peers, table(args.extra))
    packages = sorted({q for p in peers.values() if p for q in p.packages} | {"torch", "numpy"})
    versions = {p: version(p) for p in packages} | {"needle": ndl.__version__, "python": platform.python_version()}
    document: dict[str, Any] = {"cpu": cpu_name(), "isa": ndl.isa(), "threads": args.threads, "cores": args.cores}
    document |= {"rounds": args.rounds, "limit": LIMIT, "versions": versions, "results": []}
    note = f"{cpu_name()}, {ndl.isa()}, {args.threads} threads, {args.rounds} alternating rounds"
    say(note)
    how = Rounds(args.rounds, args.budget, args.timeout, args.cores, args.extra)
    steps = len(args.models) * (1 + len(peers) * (1 + args.rounds))
    with tqdm(total=steps, disable=None, leave=False) as bar:
        for model in args.models:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                task = Task(folder, model, args.batch or MODELS[model].batch, args.threads)
                result = {"title": MODELS[model].title} | compare(task, how, peers, bar)
            document["results"].append(result)
            say("\n" + "\n".join(lines_of(result)))
            if args.json:  # after every model, so that an interrupted run keeps what it has
                Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    say("\n" + "\n".join(summary(document["results"])))
    if args.plot:
        plot(document["results"], args.plot, note)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in what they start in the background
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # the same clean way out
    try:
        run(args, tqdm.write)
    except WorkerError as e:
        raise SystemExit(f"[bench] {e}.") from None
    except KeyboardInterrupt:
        raise SystemExit("[bench] interrupted; workers are killed, temporary files removed.") from None


if __name__ == "__main__":
    main()
