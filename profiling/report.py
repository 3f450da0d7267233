"""The demo's HTML page: one self-contained file with tables and plots."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import jinja2
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAGE = jinja2.Template(
    """<!doctype html><html lang="en"><meta charset="utf-8"><title>torch2needle report</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}pre{background:#f6f6f6;padding:1rem;overflow:auto;font-size:12px}
img{max-width:100%}</style>
<h1>torch2needle report</h1><p>{{ cpu }}; input: two photographs of scikit-learn.</p>
{% for r in results %}
<h2>{{ r.name }} {{ r.shape }}</h2>
<p>Convert {{ "%.2f"|format(r.seconds.convert) }} s, fuse {{ "%.2f"|format(r.seconds.fuse) }} s,
compile {{ "%.2f"|format(r.seconds.compile) }} s. Largest class agrees with torch in {{ "%.2f"|format(100*r.agree) }} %.
Arena {{ "%.1f"|format(r.memory.arena/1e6) }} MB (lower bound {{ "%.1f"|format(r.memory.lower_bound/1e6) }} MB),
weights {{ "%.1f"|format(r.memory.constants/1e6) }} MB.</p>
<table><tr><th>engine</th><th>median ms</th><th>torch eager / this</th><th>error against float64</th></tr>
{% for row in r.rows %}<tr><td>{{ row.engine }}</td><td>{{ "%.2f"|format(row.ms) }}</td>
<td>{{ "%.2f"|format(row.speedup) }}x</td><td>{{ "%.1e"|format(row.error) }}</td></tr>{% endfor %}</table>
{% for image in r.images %}<img alt="plot" src="data:image/png;base64,{{ image }}">{% endfor %}
<details><summary>Slowest steps</summary><table><tr><th>node</th><th>kernel</th><th>ms</th></tr>
{% for kernel, node, seconds in r.slowest %}<tr><td>{{ node }}</td><td>{{ kernel }}</td>
<td>{{ "%.3f"|format(1e3*seconds) }}</td></tr>{% endfor %}</table></details>
<details><summary>Fusions</summary><pre>{{ r.fusions|e }}</pre></details>
{% endfor %}</html>"""
)


def png(figure: plt.Figure) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return base64.b64encode(data.getvalue()).decode()


def speed_plot(rows: list[dict]) -> str:
    figure, axes = plt.subplots(figsize=(7, 2.2))
    axes.barh([r["engine"] for r in rows][::-1], [r["ms"] for r in rows][::-1], color="#4878a8")
    axes.set_xlabel("median ms per batch")
    return png(figure)


def output_plot(result: dict) -> str:
    """Pictures beside what the model says: class scores, or a class map."""
    figure, axes = plt.subplots(2, 2, figsize=(8, 5))
    for row, picture, out in zip(axes, result["pictures"], result["output"], strict=True):
        row[0].imshow(picture)
        row[0].axis("off")
        if out.ndim == 1:
            top = np.argsort(out)[-5:]
            row[1].barh([str(i) for i in top], out[top], color="#a86048")
            row[1].set_title("five largest scores (random weights)", fontsize=9)
        else:
            row[1].imshow(out.argmax(0), cmap="tab10")
            row[1].axis("off")
            row[1].set_title("class map (random weights)", fontsize=9)
    return png(figure)


def write(results: list[dict], folder: Path, cpu: str) -> Path:
    """Write `folder`/index.html and return its path."""
    for r in results:
        medians = {k: 1e3 * sorted(v)[len(v) // 2] for k, v in r["times"].items()}
        base = medians["torch eager"]
        r["rows"] = [
            {"engine": k, "ms": ms, "speedup": base / ms, "error": r["errors"][k]} for k, ms in medians.items()
        ]
        r["images"] = [speed_plot(r["rows"]), output_plot(r)]
        r["slowest"] = sorted(r["profile"], key=lambda row: -row[2])[:15]
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    page.write_text(PAGE.render(results=results, cpu=cpu))
    return page
