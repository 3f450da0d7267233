"""HTML pages of profiles: one self-contained file, rendered from the plain data that JSON holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import plots
from .table import COLUMNS, TEXTS, short, unsteady

try:
    import jinja2
except ImportError:
    raise ImportError(
        "[profile] pages need jinja2, got none: pip install jinja2 matplotlib, which is the extra report."
    ) from None

FOLDER = Path(__file__).parent


def environment(*folders: Path) -> jinja2.Environment:
    """Templates of this folder and of others, with the tables' columns and formats at hand."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, FOLDER]), autoescape=True, undefined=jinja2.StrictUndefined
    )
    env.globals |= {"COLUMNS": COLUMNS, "TEXTS": TEXTS, "unsteady": unsteady}
    env.filters |= {"short": short, "shape": lambda s: " x ".join(map(str, s))}
    return env


def profile_plots(profile: dict[str, Any], shade: plots.Shades | None = None) -> list[tuple[str, str]]:
    """(title, SVG) of every picture of one profile; shade: the ops' colours on a page that shows several."""
    rows, memory = profile["rows"], profile["memory"]
    shade = shade or plots.shades_of(rows)
    shown = min(len(rows), 15)
    title = "Time by operator" if shown == len(rows) else f"Time by operator, the {shown} slowest of {len(rows)}"
    drawn = [(title, plots.operator_times(rows, shown, shade))]
    if "peak_gflops" in profile["machine"]:
        drawn.append(("Roofline", plots.roofline(rows, profile["machine"], shade)))
    if "buffers" in memory:
        drawn.append(("Memory plan", plots.memory_plan(memory, shade)))
    elif profile["timeline"]:
        drawn.append(("Memory", plots.memory_line(profile["timeline"])))
    return [(title, plots.inline(figure, f"{title} {profile['seconds_in_rows']}")) for title, figure in drawn]


def profile_page(profile: dict[str, Any]) -> str:
    """The page of one profile."""
    template = environment().get_template("profile.html")
    return template.render(profile=profile, machine=profile["machine"], pictures=profile_plots(profile))
