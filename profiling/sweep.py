"""On which architectures needle is not ahead of the best peer, and why: `python profiling/sweep.py --out FOLDER`.

Models are those of `zoo/sizes.py`; peers, processes and rounds are those of `bench.py`. Every model is a JSON file in the folder,
and a run leaves out what is there. Written after every model: `table.txt` (worst first), `cliffs.txt`; at the end `sweep.png`.
A cliff is a step of needle that takes over 3 % of its model's run at under 25 % of its roofline, or all steps of an op together.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from tqdm import tqdm

import needle as ndl
from needle.profiler import cpu_name
from peers.comparison import Rounds, compare
from peers.formats import Task
from peers.processes import WorkerError, free_cores
from peers.table import OURS, select, table, version
from zoo import sizes

SHARE, ROOFLINE = 0.03, 0.25  # a cliff takes over the one and stays under the other
SLOWEST = 3
CAPS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
}  # of peers
Result = dict[str, Any]


def own_row(result: Result) -> dict[str, Any]:
    return next(r for r in result["rows"] if r["engine"] == OURS)


def best_peer(result: Result) -> dict[str, Any] | None:
    """The timed row of another engine with the least peer / ours; None where there is no such row."""
    timed = [r for r in result["rows"] if r["ratio"] is not None and not r["engine"].startswith("needle")]
    return min(timed, key=lambda r: r["ratio"], default=None)


def steps(result: Result) -> list[dict[str, Any]]:
    """The steps of needle's run, the slowest first, each with its share of the run."""
    rows = result["layers"].get("rows", [])
    total = sum(r["ms"] for r in rows)
    return sorted(({**r, "share": r["ms"] / total} for r in rows), key=lambda r: -r["ms"])


def cliffs(result: Result) -> list[dict[str, Any]]:
    return [s for s in steps(result) if s["share"] > SHARE and s["roofline"] is not None and s["roofline"] < ROOFLINE]


def groups(result: Result) -> list[dict[str, Any]]:
    """The steps of each op together, the slowest first. Their roofline is weighted by time, None unless all are known."""
    ops: dict[str, list[dict[str, Any]]] = {}
    for s in steps(result):
        ops.setdefault(s["op"], []).append(s)
    made = []
    for op, rows in ops.items():
        ms, share = sum(r["ms"] for r in rows), sum(r["share"] for r in rows)
        known = all(r["roofline"] is not None for r in rows)
        roofline = sum(r["roofline"] * r["ms"] for r in rows) / ms if known and ms else None
        made.append({"op": op, "count": len(rows), "ms": ms, "share": share, "roofline": roofline})
    return sorted(made, key=lambda g: -g["ms"])


def cliffs_of_ops(result: Result) -> list[dict[str, Any]]:
    return [g for g in groups(result) if g["share"] > SHARE and g["roofline"] is not None and g["roofline"] < ROOFLINE]


def step_text(s: dict[str, Any]) -> str:
    known = "no roofline" if s["roofline"] is None else f"{s['roofline']:.0%} of its roofline"
    return f"{s['op']} {s['shape']} ({s['name']}) {s['ms']:.3f} ms, {s['share']:.0%} of the run, {known}"


def complaints(result: Result) -> list[str]:
    """A line for each engine that has no ratio."""
    if "failed" in result:
        return [f"failed: {result['failed']}"]
    return [f"{r['engine']}: {r['status']}: {r['reason']}" for r in result["rows"] if r["status"] != "ok"]


def ratios(result: Result) -> list[str]:
    """A line of all peers' ratios, the fastest first; none where there is no more than one."""
    timed = [r for r in result.get("rows", []) if r["ratio"] is not None and r["engine"] != OURS]
    timed.sort(key=lambda r: r["ratio"])
    return [", ".join(f"{r['engine']} {r['ratio']:.2f}" for r in timed)] if len(timed) > 1 else []


def place(result: Result) -> tuple[int, float]:
    """Where a model stands in the table: what has no ratio first, then the worst."""
    best = best_peer(result) if "rows" in result else None
    return (0, 0.0) if best is None else (1, best["ratio"])


def model_lines(result: Result, slowest: int = SLOWEST) -> list[str]:
    """A line of numbers, then what failed, then the slowest steps."""
    best = best_peer(result) if "rows" in result else None
    line = f"{result['model']:<46}"
    if best is not None:
        ours = own_row(result)
        line += f"{best['ratio']:>7.2f}{best['ratio_of_least']:>8.2f}  {best['engine']:<20}{best['ms']:>9.2f}{ours['ms']:>9.2f}"
        line += f"{ours['error']:>9.0e}{len(steps(result)):>7}"
    else:
        line += "     no ratio"
    lines = [line, *(f"    {text}" for text in ratios(result) + complaints(result))]
    return lines + [f"    {step_text(s)}" for s in (steps(result) if "rows" in result else [])[:slowest]]


def page(results: list[Result], note: str) -> str:
    """Every model, worst first."""
    ahead = [r for r in results if place(r)[0] and place(r)[1] >= 1]
    timed = [r for r in results if place(r)[0]]
    head = f"{'model':<46}{'ratio':>7}{'least':>8}  {'best peer':<20}{'its ms':>9}{'our ms':>9}{'error':>9}{'steps':>7}"
    lines = [
        note,
        "ratio: best peer / needle compiled, median of rounds (under 1: the peer is faster); least: of the least times",
        f"ahead of the best peer on {len(ahead)} of {len(timed)} models that have a ratio, {len(results)} models in all",
        *("", head),
    ]
    for result in sorted(results, key=place):
        lines += model_lines(result)
    return "\n".join(lines) + "\n"


def cliff_page(results: list[Result]) -> str:
    """Every cliff by its share of the run: single steps, then ops of a model, then ops over all models."""
    measured = [r for r in results if "rows" in r]
    found = sorted(((r["model"], s) for r in measured for s in cliffs(r)), key=lambda f: -f[1]["share"])
    lines = [f"{len(found)} steps under {ROOFLINE:.0%} of their roofline with over {SHARE:.0%} of the run", ""]
    lines += [f"{model:<46}{step_text(s)}" for model, s in found]
    grouped = sorted(((r["model"], g) for r in measured for g in cliffs_of_ops(r)), key=lambda f: -f[1]["share"])
    lines += ["", f"{len(grouped)} ops of a model whose steps are so together", ""]
    ops: dict[str, list[float]] = {}
    for model, g in grouped:
        lines.append(
            f"{model:<46}{g['op']} x {g['count']}: {g['share']:.0%} of the run, {g['roofline']:.0%} of the roofline"
        )
        ops.setdefault(g["op"], []).append(g["share"])
    lines += ["", f"{'op':<34}{'models':>8}{'sum of shares':>15}"]
    for op, shares in sorted(ops.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{op:<34}{len(shares):>8}{sum(shares):>15.2f}")
    return "\n".join(lines) + "\n"


def plot(results: list[Result], path: Path, note: str) -> None:
    """The ratio to the best peer of every model, worst at the top, coloured by the peer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pairs = [(r, best) for r in sorted(results, key=place) if "rows" in r and (best := best_peer(r)) is not None]
    names = sorted({best["engine"] for _, best in pairs})
    figure, axis = plt.subplots(figsize=(8, 0.19 * len(pairs) + 1.4))
    for i, name in enumerate(names):
        bars = [(y, best["ratio"]) for y, (_, best) in enumerate(pairs) if best["engine"] == name]
        axis.barh([y for y, _ in bars], [v - 1 for _, v in bars], left=1, color=f"C{i}", label=name)
    axis.plot(
        [best["ratio_of_least"] for _, best in pairs], range(len(pairs)), "k.", markersize=3, label="of the least times"
    )
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(pairs)), [r["model"] for r, _ in pairs], fontsize=6)
    axis.set_ylim(len(pairs) - 0.5, -0.5)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(
        "time of the best peer / time of needle compiled (over 1: needle is faster)\n" + textwrap.fill(note, 90),
        fontsize=7,
    )
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", required=True, help="results; models that it holds are left out"
    )
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", help="names, or beginnings of names, of models; all without it"
    )
    parser.add_argument("--sample", action="store_true", help=f"{len(sizes.SAMPLE)} models of different kinds")
    parser.add_argument("--peers", nargs="+", help='names, or first words ("torch"); all without it')
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--isa", choices=["scalar", "avx2", "avx512"], help="for needle; avx2 also for torch and oneDNN"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per peer and round")
    parser.add_argument("--timeout", type=float, default=600, help="seconds until a silent worker is killed")
    parser.add_argument("--extra", metavar="FILE.py", help="a file with more peers: PEERS, a list of peers.table.Peer")
    args = parser.parse_args(argv)
    for name in ("threads", "batch", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} expects at least 1, got {getattr(args, name)}.")
    known = list(sizes.table())
    for start in args.rows or ():
        if not any(n.startswith(start) for n in known):
            parser.error(f"--rows expects beginnings of names of zoo/sizes.py, got {start}.")
    args.models = [n for n in known if n in sizes.SAMPLE] if args.sample else known
    if args.rows:
        args.models = [n for n in args.models if n.startswith(tuple(args.rows))]
    return args


def measured(name: str, args: argparse.Namespace, how: Rounds, bar: tqdm) -> Result:
    peers = {n: p for n, p in select(args.peers, table(args.extra)).items() if n == OURS or not n.startswith("needle")}
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        try:
            return compare(Task(folder, name, args.batch, args.threads), how, peers, bar)
        except WorkerError as e:
            return {"model": name, "batch": args.batch, "failed": str(e)}


def file_name(model: str) -> str:
    return f"{model.replace('/', '-')}.json"


def held(out: Path) -> list[Result]:
    """What the folder has, in the order of the list."""
    paths = (out / file_name(name) for name in sizes.table())
    return [json.loads(p.read_text()) for p in paths if p.exists()]


def write_pages(results: list[Result], out: Path, note: str) -> None:
    (out / "table.txt").write_text(page(results, note))
    (out / "cliffs.txt").write_text(cliff_page(results))


def run(args: argparse.Namespace) -> list[Result]:
    args.out.mkdir(parents=True, exist_ok=True)
    how = Rounds(args.rounds, args.budget, args.timeout, free_cores(args.threads), args.extra)
    isa = args.isa or ndl.isa()
    note = f"{cpu_name()}, {isa}, {args.threads} threads, batch {args.batch}, {args.rounds} alternating rounds"
    settings = {"cpu": cpu_name(), "isa": isa, "threads": args.threads, "batch": args.batch}
    for other in held(args.out):
        if any(other.get(k, v) != v for k, v in settings.items()):
            raise SystemExit(f"[sweep] {args.out} has results of other settings, got {other['model']}.")
    for key, value in ({"NEEDLE_ISA": args.isa, **CAPS.get(args.isa, {})} if args.isa else {}).items():
        os.environ[key] = value  # workers take it over
    for name in tqdm(args.models, disable=None, desc="models"):
        path = args.out / file_name(name)
        if not path.exists():
            with tqdm(disable=None, leave=False) as bar:
                result = measured(name, args, how, bar)
            path.write_text(json.dumps(result | settings, indent=1) + "\n")
            tqdm.write("\n".join(model_lines(result)))
            write_pages(held(args.out), args.out, note)
    results = held(args.out)
    write_pages(results, args.out, note)
    if version("matplotlib") is not None:
        plot(results, args.out / "sweep.png", note)
    return results


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in what they start in the background
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # the same clean way out
    try:
        run(args)
    except KeyboardInterrupt:
        raise SystemExit("[sweep] interrupted; workers are killed, temporary files removed.") from None


if __name__ == "__main__":
    main()
