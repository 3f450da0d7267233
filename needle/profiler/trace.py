"""Trace Event Format (the JSON that chrome://tracing and ui.perfetto.dev read) of profiles."""

from __future__ import annotations

from typing import Any


def chrome_events(profiles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Profiles by name, as dicts: each a process with its steps as complete events and its memory as a counter."""
    events: list[dict[str, Any]] = []
    for pid, (name, profile) in enumerate(profiles.items(), 1):
        title = f"{name}: {profile['model']}"
        events.append({"ph": "M", "pid": pid, "tid": 1, "name": "process_name", "args": {"name": title}})
        events.append({"ph": "M", "pid": pid, "tid": 1, "name": "thread_name", "args": {"name": "steps"}})
        for e in profile["timeline"]:
            row = {} if e["row"] is None else profile["rows"][e["row"]]
            facts = {k: row[k] for k in ("shape", "mflop", "mb", "gflops", "gbs", "roofline") if k in row}
            start = 1e6 * e["start"]
            event = {"ph": "X", "pid": pid, "tid": 1, "ts": start, "dur": 1e6 * e["seconds"]}
            events.append({**event, "name": e["name"], "cat": e["op"], "args": {"op": e["op"], **facts}})
            memory = {"ph": "C", "pid": pid, "tid": 1, "ts": start, "name": "memory", "args": {"bytes": e["live"]}}
            events.append(memory)
    machine = next(iter(profiles.values()))["machine"] if profiles else {}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": machine}
