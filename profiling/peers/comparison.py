"""All peers on one task: loaded, judged by float64 torch, timed in alternating rounds. What `bench.py` and `sweep.py` share."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from .formats import Task
from .processes import Child, Exports, WorkerError
from .table import OURS, Peer, table

PAUSE = 0.25  # seconds before a burst: OpenMP threads of the peer before spin for up to 0.2 s


@dataclass(frozen=True)
class Rounds:
    """How peers are timed: `budget` seconds per peer and round; a worker silent for `timeout` seconds is killed."""

    rounds: int
    budget: float
    timeout: float
    cores: list[int] = field(default_factory=list)
    extra: str | None = None


def judged(row: dict[str, Any], reply: dict[str, Any], limit: float) -> bool:
    """Write what a worker measured into its row; False when its answer is wrong or the peer does not apply."""
    if "does_not_apply" in reply:
        row.update(status="does not apply", reason=reply["does_not_apply"])
        return False
    row.update({k: reply[k] for k in ("import_s", "first_s", "memory_mb", "error") if k in reply})
    if reply["error"] is None or reply["error"] > limit:
        reason = reply.get("reason") or f"differs from float64 torch by {reply['error']:.1e}, the limit is {limit:.0e}"
        row.update(status="wrong", reason=reason)
        return False
    return True


def started(name: str, peer: Peer | None, task: Task, how: Rounds, exports: Exports) -> tuple[dict, Child | None]:
    """The peer's row, and its worker after the first run; no worker when there is nothing to time."""
    row: dict[str, Any] = {"engine": name, "status": "ok", "reason": "", "rounds_ms": []}
    if peer is None:
        row.update(status="unknown", reason=f"no such peer; there are {', '.join(table(how.extra))}")
        return row, None
    if missing := peer.missing():
        row.update(status="not installed", reason=f"pip install {' '.join(missing)}")
        return row, None
    child = None
    try:
        row["export_s"] = exports.seconds(peer.format)
        child = Child("serve", name, task, how.cores, how.extra)
        if judged(row, child.ask(how.timeout), task.limit()):
            return row, child
        child.kill()
    except BaseException as e:
        if child is not None:
            child.kill()
        if not isinstance(e, WorkerError):
            raise
        row.update(status="failed", reason=str(e))
    return row, None


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Median, least and largest over rounds of peer / needle compiled, and the ratio of the least times of all rounds.

    None where one of the two was not timed.
    """
    ours = next(r for r in rows if r["engine"] == OURS)
    for row in rows:
        ratios: list[float] = []
        if row["status"] == ours["status"] == "ok":
            ratios = [a / b for a, b in zip(row["rounds_ms"], ours["rounds_ms"], strict=True)]
        row["ms"] = statistics.median(row["rounds_ms"]) if row["status"] == "ok" else None
        for key, of in (("ratio", statistics.median), ("ratio_min", min), ("ratio_max", max)):
            row[key] = of(ratios) if ratios else None
        row["ratio_of_least"] = row["least_ms"] / ours["least_ms"] if ratios else None


def compare(task: Task, how: Rounds, peers: dict[str, Peer | None], bar: tqdm) -> dict[str, Any]:
    """All rows of one model; raises WorkerError where torch itself does not run."""
    model = task.model
    rows: list[dict[str, Any]] = []
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        exports = Exports(task, how.timeout)
        bar.set_description(f"{model}: float64 torch")
        exports.seconds("torch")
        bar.update()
        for name, peer in peers.items():
            bar.set_description(f"{model}: {name} loads")
            row, child = started(name, peer, task, how, exports)
            rows.append(row)
            if child is not None:
                children[name] = stack.enter_context(child)
            bar.update(1 if child is not None else 1 + how.rounds)
        for r in range(how.rounds):
            shift = r % max(1, len(rows))  # nobody always runs after the same neighbour's load
            for row in rows[shift:] + rows[:shift]:
                child = children.get(row["engine"])
                if child is None:
                    continue
                bar.set_description(f"{model}: round {r + 1}/{how.rounds}, {row['engine']}")
                time.sleep(PAUSE)
                try:
                    reply = child.ask(how.timeout, {"budget": how.budget})
                    row["rounds_ms"].append(1e3 * reply["seconds"])
                    row["least_ms"] = min(row.get("least_ms", float("inf")), 1e3 * reply["least"])
                    keep = judged(row, reply, task.limit())
                except WorkerError as e:
                    row.update(status="failed", reason=str(e))
                    keep = False
                if not keep:
                    children.pop(row["engine"]).kill()
                bar.update(1 if keep else how.rounds - r)
        layers = children[OURS].ask(how.timeout, {"layers": True}) if OURS in children else {}
    add_ratios(rows)
    shapes = [list(x.shape) for x in task.inputs().values()]
    return {"model": model, "batch": task.batch, "shapes": shapes, "rows": rows, "layers": layers}
