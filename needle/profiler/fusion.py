"""The page of a fusion report: the graph before and after side by side, what fired and what nearly did.

One row a step, in the order of execution; edges to the next step are straight, others run in lanes outside.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from needle.executor.step import JOIN
from needle.graph.report import Vertex

from . import plots
from .page import environment
from .table import cut

ROW, BOX, WIDTH, BETWEEN, LANE = 24, 18, 310, 96, 9  # pixels
LANES = 24  # of one side; what does not fit shares the last
LONG = 120  # rows from which on repeated blocks are drawn once
HIDDEN = 8  # rows that a repetition must spare


@dataclasses.dataclass(eq=False)
class Row:
    """A step before fusion, one after it, or both; `times`: how often a block above is repeated, drawn as this row."""

    before: Vertex | None = None
    after: Vertex | None = None
    pattern: str = ""  # that took the step before
    missed: str = ""
    times: int = 0
    stands_for: list[str] = dataclasses.field(default_factory=list)


Place = dict[str, int]  # the row of every step of one side


def rows_of(
    before: Sequence[Vertex], after: Sequence[Vertex], fired: Sequence[Any], misses: Sequence[Any]
) -> list[Row]:
    """Steps after fusion stand beside those that they are, or beside the last that they stand for; both in their order."""
    taken = {name: f.pattern for f in fired for name in f.nodes_in}
    reasons: dict[str, list[str]] = {}
    for m in misses:
        for name in m.nodes:
            reasons.setdefault(name, []).append(f"{m.pattern} did not apply: {m.reason}")
    own = [Row(v, pattern=taken.get(v.name, ""), missed="\n".join(reasons.get(v.name, []))) for v in before]
    order = {v.name: i for i, v in enumerate(before)}
    made = {f.node_out: [n for n in f.nodes_in if n in order] for f in fired}
    wanted = [[order[n] for n in made.get(v.name, [] if v.name in taken else [v.name]) if n in order] for v in after]
    limits = [len(own)]  # by step after fusion: where the next one with a place of its own is
    for v, at in zip(after[:0:-1], wanted[:0:-1], strict=True):
        limits.append(limits[-1] if v.name in made else min([limits[-1], *at]))
    rows, last, so_far = list(own), -1, -1
    for v, at, limit in zip(after, wanted, reversed(limits), strict=True):
        place = max((i for i in at if so_far < i < limit), default=None)
        if place is None:
            rows.insert(last + 1, row := Row())
        else:
            row, so_far = own[place], place
        row.after, row.stands_for = v, made.get(v.name, [])
        last = rows.index(row)
    return rows


def places(rows: Sequence[Row]) -> tuple[Place, Place]:
    found: tuple[Place, Place] = {}, {}
    for i, row in enumerate(rows):
        for place, v in zip(found, (row.before, row.after), strict=True):
            if v is not None:
                place[v.name] = i
    return found


def same(rows: Sequence[Row], where: tuple[Place, Place], i: int, j: int) -> bool:
    """True where rows i and j have the same ops, whose inputs are one row or equally far above."""
    a, b = rows[i], rows[j]
    if a.pattern != b.pattern or bool(a.missed) != bool(b.missed):
        return False
    for place, v, w in zip(where, (a.before, a.after), (b.before, b.after), strict=True):
        if v is None or w is None:
            if v is not w:
                return False
        elif (
            v.op != w.op
            or len(v.inputs) != len(w.inputs)
            or any(
                place[p] != place[q] and i - place[p] != j - place[q] for p, q in zip(v.inputs, w.inputs, strict=True)
            )
        ):
            return False
    return True


def folded(rows: Sequence[Row]) -> tuple[list[Row], tuple[Place, Place]]:
    """Long graphs with blocks that follow each other three times or more, each such block once; and all places."""
    where, n = places(rows), len(rows)
    if n < LONG:
        return list(rows), where
    kept: list[Row] = []
    moved: list[int] = []  # by row: where it is drawn
    i = 0
    while i < n:
        best = (0, 1, 1)  # rows spared, period, copies
        for period in range(1, (n - i) // 3 + 1):
            j = i + period
            while j < n and same(rows, where, j - period, j):
                j += 1
            copies = (j - i) // period
            if copies >= 3:
                best = max(best, ((copies - 1) * period, period, copies), key=lambda b: (b[0], -b[1]))
        spared, period, copies = best
        if spared < HIDDEN:
            spared, period, copies = 0, 1, 1
        for row in rows[i : i + period]:
            moved.append(len(kept))
            kept.append(row)
        if copies > 1:
            moved += [len(kept)] * spared
            kept.append(Row(times=copies - 1, pattern=f"{period}"))
        i += period * copies
    return kept, tuple({name: moved[r] for name, r in place.items()} for place in where)  # type: ignore[return-value]


def lanes(edges: Mapping[int, int]) -> dict[int, int]:
    """A lane for each source row, `edges` to its furthest reader; short ones are next to the boxes."""
    taken: list[list[tuple[int, int]]] = []
    found = {}
    for start, end in sorted(edges.items(), key=lambda e: (e[1] - e[0], e[0])):
        free = (k for k, own in enumerate(taken) if all(end <= a or b <= start for a, b in own))
        lane = min(next(free, len(taken)), LANES - 1)
        if lane == len(taken):
            taken.append([])
        taken[lane].append((start, end))
        found[start] = lane
    return found


class Side(NamedTuple):
    """One graph as drawn: its vertices by row, straight edges, and for the others (source, reader) and lanes."""

    vertices: dict[int, Vertex]
    straight: list[tuple[int, int]]
    far: list[tuple[int, int]]
    lane: dict[int, int]

    @property
    def width(self) -> int:
        return LANE * (max(self.lane.values(), default=-1) + 2)


def side(rows: Sequence[Row], all_vertices: Sequence[Vertex], place: Place, first: bool) -> Side:
    vertices = {i: v for i, r in enumerate(rows) if (v := r.before if first else r.after) is not None}
    stops = sorted([*vertices, *(i for i, r in enumerate(rows) if r.times)])
    following = dict(itertools.pairwise(stops))
    edges = {(place[a], place[v.name]) for v in all_vertices for a in v.inputs if place[a] != place[v.name]}
    straight = sorted(e for e in edges if following.get(e[0]) == e[1])
    far = sorted(e for e in edges if e[0] < e[1] and following.get(e[0]) != e[1])
    furthest: dict[int, int] = {}
    for a, b in far:
        furthest[a] = max(b, furthest.get(a, b))
    return Side(vertices, straight, far, lanes(furthest))


def box(x: float, y: float, v: Vertex, color: str, title: str, missed: bool) -> str:
    style = f' style="fill:{color}2e;stroke:{color}"' if color else ""
    op = cut(v.op, 28)
    name = cut(v.path or v.name, 42 - len(op)) if (v.path or v.name) != v.op else ""
    text = f"{html.escape(op)}<tspan> {html.escape(name)}</tspan>"
    mark = " missed" if missed else ""
    return (
        f'<g><title>{html.escape(title)}</title><rect class="step{mark}" x="{x}" y="{y + 3}" width="{WIDTH}" '
        f'height="{BOX}" rx="4"{style}/><text x="{x + 7}" y="{y + 16}">{text}</text></g>'
    )


def edges_of(s: Side, x: float, sign: int) -> Iterator[str]:
    """`x`: the outer edge of the boxes; lanes lie in the direction of `sign`."""
    middle = x - sign * WIDTH / 2
    for a, b in s.straight:
        yield f'<path class="edge" d="M{middle} {a * ROW + BOX + 3}V{b * ROW + 3}"/>'
    for a, b in s.far:
        lane = x + sign * LANE * (s.lane[a] + 1)
        top, bottom = a * ROW + 15, b * ROW + 9
        yield f'<path class="edge" d="M{x} {top}H{lane}V{bottom}H{x}"/><circle class="end" cx="{x}" cy="{bottom}" r="2.2"/>'


def drawing(before: Sequence[Vertex], after: Sequence[Vertex], report: Any, shade: Mapping[str, str]) -> str:
    """Both graphs as one SVG."""
    rows, (left_places, right_places) = folded(rows_of(before, after, report.fired, report.near_misses))
    left, right = side(rows, before, left_places, True), side(rows, after, right_places, False)
    x0 = left.width
    x1 = x0 + WIDTH + BETWEEN
    width, height = x1 + WIDTH + right.width, ROW * len(rows) + 4
    parts = [*edges_of(left, x0, -1), *edges_of(right, x1 + WIDTH, 1)]
    why = {f.node_out: f"{f.pattern}: {', '.join(f.nodes_in)}" for f in report.fired}
    pattern = {f.node_out: f.pattern for f in report.fired}
    for i, row in enumerate(rows):
        y = i * ROW
        if row.times:
            text = f"the {row.pattern} rows above {row.times} times more"
            parts.append(
                f'<rect class="same" x="{x0}" y="{y + 2}" width="{x1 + WIDTH - x0}" height="{BOX + 2}" rx="4"/>'
            )
            parts.append(f'<text class="same" x="{(x0 + x1 + WIDTH) / 2}" y="{y + 16}">{text}</text>')
        if row.before is not None:
            v, color = row.before, shade.get(row.pattern, "")
            title = "\n".join([f"{v.name}: {v.op}", *([row.missed] if row.missed else [])])
            parts.append(box(x0, y, v, color, title, bool(row.missed)))
        if row.after is not None:
            v = row.after
            color = shade.get(pattern.get(v.name, ""), "")
            parts.append(box(x1, y, v, color, why.get(v.name, f"{v.name}: {v.op}"), False))
            sources = {left_places[n] for n in row.stands_for} or ({i} if row.before is not None else set())
            style = f'class="link" style="stroke:{color}"' if color else 'class="link"'
            for a in sorted(sources):
                start, end, half = a * ROW + 12, y + 12, BETWEEN / 2
                curve = f"C{x0 + WIDTH + half} {start} {x1 - half} {end} {x1} {end}"
                parts.append(f'<path {style} d="M{x0 + WIDTH} {start}{curve}"/>')
    heads = "".join(f'<text class="head" x="{x}" y="-8">{t}</text>' for x, t in ((x0, "before"), (x1, "after")))
    return f'<svg viewBox="0 -24 {width} {height + 24}" style="max-width:{width}px">{heads}{"".join(parts)}</svg>'


def seconds_of(report: Any, profile: Any) -> dict[str, float]:
    """Time by fused node, from a profile's rows under its name or its layers'; none where rows are others', too."""
    if profile is None:
        return {}
    owners: dict[str, set[str]] = {}
    for f in report.fired:
        for name in (f.node_out, *f.module_paths):
            owners.setdefault(name, set()).add(f.node_out)
    found: dict[str, float] = {}
    shared: set[str] = set()
    for r in profile.rows:
        own = [owners.get(name, {""}) for name in r.name.split(JOIN)]  # a plan's step may be of several nodes
        everyone = set().union(*own)
        if len(everyone) == 1:
            (node,) = everyone
            found[node] = found.get(node, 0.0) + r.seconds
        else:
            shared |= everyone
    return {node: s for node, s in found.items() if node and node not in shared}


def fusion_page(report: Any, title: str, profile: Any = None) -> str:
    """The page of one report; profile: a `needle.Profile` of the fused model."""
    shade = plots.colors(list(report.counts))
    before, after = report.graphs or ((), ())
    return (
        environment()
        .get_template("fusion.html")
        .render(
            report=report,
            title=title,
            shade=shade,
            reasons={f.pattern: f.why for f in report.fired if f.why},
            seconds=seconds_of(report, profile),
            profile=profile,
            drawing=drawing(before, after, report, shade) if report.graphs else "",
        )
    )
