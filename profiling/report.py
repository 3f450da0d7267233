"""Reports of pipeline runs: console tables, profile.json, trace.json, and index.html rendered from what the JSON holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import needle as ndl
from needle.profiler import plots, write_file
from needle.profiler.page import environment, profile_plots
from needle.profiler.table import text_table, unsteady
from needle.profiler.trace import chrome_events


def document(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results with what they were measured on: all that is written and shown."""
    first = next(iter(results[0]["profiles"].values()))
    versions = {"needle": ndl.__version__, "torch": torch.__version__}
    return {"machine": first["machine"], "versions": versions, "results": list(results)}


def stage_texts(row: dict[str, Any], agree: dict[str, float]) -> dict[str, str]:
    """The cells of one stage, for the console and for the page."""
    ratios = {p: f"{s['median']:.2f}x ({s['min']:.2f}-{s['max']:.2f})" for p, s in row["speedup"].items()}
    return {
        "stage": row["name"],
        "median ms": f"{1e3 * row['median']:.3f}",
        "min": f"{1e3 * row['min']:.3f}",
        "max": f"{1e3 * row['max']:.3f}",
        **{f"against {p}": text for p, text in ratios.items()},
        "error, float64": f"{row['float64']:.1e}",
        "error, float32": f"{row['float32']:.1e}",
        "agree": f"{100 * agree[row['name']]:.2f}%",
    }


def stage_cells(result: dict[str, Any]) -> list[dict[str, str]]:
    return [stage_texts(r, result["agreement"]["agree"]) for r in result["stages"]]


def unsteady_stages(result: dict[str, Any]) -> str:
    return unsteady({s["name"]: s for s in result["stages"]})


def console(doc: dict[str, Any], limit: int = 12) -> str:
    """The report as text."""
    m, lines = doc["machine"], []
    peaks = f"peak {m['peak_gflops']:.0f} GF/s, {m['bandwidth_gbs']:.1f} GB/s from memory"
    lines.append(f"\n{m['cpu']}, {m['isa']}, {m['threads']} threads, {peaks}; torch {doc['versions']['torch']}")
    for r in doc["results"]:
        steps = ", ".join(f"{k.replace('_', ' ')} {v:.2f} s" for k, v in r["seconds"].items())
        lines += ["", f"{r['model']} {tuple(r['input'])}, {r['rounds']} alternating rounds; {steps}"]
        cells = stage_cells(r)
        widths = {k: max(len(k), *(len(c[k]) for c in cells)) for k in cells[0]}
        for c in ({k: k for k in widths}, *cells):
            lines.append("  ".join(v.ljust(widths[k]) if k == "stage" else v.rjust(widths[k]) for k, v in c.items()))
        lines += [*([warning] if (warning := unsteady_stages(r)) else []), *r["notes"]]
        for name, profile in r["profiles"].items():
            rows = sorted(profile["rows"], key=lambda row: -row["seconds"])
            lines += ["", f"{r['model']} {name}, slowest operators", text_table(rows[:limit], len(rows))]
        counts = ", ".join(f"{n} {p}" for p, n in r["fusion"]["counts"].items())
        lines += [
            "",
            f"fusion: {r['fusion']['nodes_before']} -> {r['fusion']['nodes_after']} calls; {counts or 'none'}",
        ]
        memory = r["profiles"].get("compiled", {}).get("memory")
        if memory:
            reuse = f"{len(memory['buffers'])} buffers, reused {memory['reuse']:.1f} times"
            bound = f"lower bound {memory['lower_bound'] / 1e6:.2f} MB"
            lines.append(f"memory: arena {memory['arena'] / 1e6:.2f} MB ({bound}), {reuse}")
    return "\n".join(lines)


def result_plots(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, SVG): times of the stages, and speed-ups."""
    rows = result["stages"]
    names, medians = [r["name"] for r in rows], [1e3 * r["median"] for r in rows]
    span = [(1e3 * r["min"], 1e3 * r["max"]) for r in rows]
    times = plots.bars(
        names, medians, span, [f"{v:.2f} ms" for v in medians], "ms for one batch (whisker: least to largest)"
    )
    ratios = [r["speedup"]["torch eager"] for r in rows]
    shown = [(s["min"], s["max"]) for s in ratios]
    texts = [f"{s['median']:.2f}x" for s in ratios]
    speed = plots.bars(names, [s["median"] for s in ratios], shown, texts, "times as fast as torch eager")
    return [
        ("Time of each stage", plots.inline(times, f"times {result['model']}")),
        ("Speed-up", plots.inline(speed, f"speed {result['model']}")),
    ]


def render(doc: dict[str, Any], images: Sequence[Sequence[str]]) -> str:
    """The page. `images`: pictures of each result as data URLs; every number comes from `doc`."""
    views = []
    for r, shown in zip(doc["results"], images, strict=True):
        shade = plots.shades_of([row for p in r["profiles"].values() for row in p["rows"]])
        views.append(
            {
                "stages": stage_cells(r),
                "warning": unsteady_stages(r),
                "plots": result_plots(r),
                "profiles": {name: profile_plots(p, shade) for name, p in r["profiles"].items()},
                "images": list(shown),
            }
        )
    return environment(Path(__file__).parent).get_template("pipeline.html").render(doc=doc, views=views)


def write(folder: Path, doc: dict[str, Any], images: Sequence[Sequence[str]]) -> Path:
    """Write profile.json, trace.json and index.html into `folder`; returns the page's path. All is made before any is written."""
    trace = {f"{r['model']} {name}": p for r in doc["results"] for name, p in r["profiles"].items()}
    text = json.dumps(doc, indent=1)
    files = {
        "profile.json": text,
        "trace.json": json.dumps(chrome_events(trace)),
        "index.html": render(json.loads(text), images),
    }
    return [write_file(folder / name, content) for name, content in files.items()][-1]


def require_agreement(doc: dict[str, Any]) -> None:
    """Ends the program when a stage of needle is further from float64 than its limit."""
    for r in doc["results"]:
        for s in r["stages"]:
            if s["name"].startswith("needle") and not s["float64"] <= r["limit"]:
                text = f"{s['name']} differs from float64 torch by {s['float64']:.1e}"
                raise SystemExit(f"[pipeline] {r['model']}: {text}, the limit is {r['limit']:.1e}.")
