"""Checkpoints: one safetensors file with all that the next epoch depends on. Nothing in it is executed.

Tensors "model/PATH", "optimizer/PLACE/SLOT", "random/keys"; metadata key "needle_checkpoint": JSON of the rest.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from needle.files import existing, write_tensors
from needle.nn import Module
from needle.optim import Optimizer, Schedule

VERSION = 1
KEY = "needle_checkpoint"


def save_checkpoint(
    path: str | os.PathLike,
    model: Module,
    optimizer: Optimizer,
    epochs: int,
    results: Any = None,
    schedule: Schedule | None = None,
) -> None:
    """Write the state after `epochs` epochs and their last `results` (JSON). An older file stays until all is written."""
    if not isinstance(epochs, int):
        raise TypeError(f"[save_checkpoint] epochs expects a whole number, got {type(epochs).__name__}.")
    arrays = {
        f"model/{name}": np.ascontiguousarray(t.numpy()).reshape(t.shape) for name, t in model.state_dict().items()
    }
    state = optimizer.state_dict()
    for place, slots in state.pop("state").items():
        arrays |= {f"optimizer/{place}/{slot}": a for slot, a in slots.items()}
    generator, keys, *rest = np.random.get_state(legacy=True)
    arrays["random/keys"] = np.asarray(keys)
    document = {
        "version": VERSION,
        "epochs": epochs,
        "results": results,
        "optimizer": state,
        "schedule": None if schedule is None else schedule.state_dict(),
        "random": [generator, *rest],
    }
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"[save_checkpoint] there is no folder {folder}.")
    try:
        text = json.dumps(document)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"[save_checkpoint] results expect what JSON takes, got {type(results).__name__} ({e})."
        ) from None
    write_tensors(path, arrays, {KEY: text})


def load_checkpoint(
    path: str | os.PathLike, model: Module, optimizer: Optimizer, schedule: Schedule | None = None
) -> tuple[int, Any]:
    """Put the saved state into model, optimizer, schedule and numpy's global stream; (epochs done, their last results)."""
    name = existing("load_checkpoint", path)
    try:
        with safe_open(path, framework="numpy") as f:
            text = (f.metadata() or {}).get(KEY, "")
            arrays = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - not a dict
        document = json.loads(text)
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']}")
        epochs, results, schedule_state = int(document["epochs"]), document["results"], document["schedule"]
        saved = {key: document["optimizer"][key] for key in ("kind", "step", "options")} | document["optimizer"]
        saved["state"] = optimizer_arrays(arrays)
        generator, *rest = document["random"]
        if generator != "MT19937" or arrays["random/keys"].shape != (624,) or not 0 <= rest[0] <= 624:
            raise ValueError("random state")
        stream = (generator, arrays["random/keys"], int(rest[0]), int(rest[1]), float(rest[2]))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, IndexError, MemoryError, RecursionError):
        raise ValueError(f"[load_checkpoint] {name} is not a complete checkpoint of format {VERSION}.") from None
    if (schedule is None) != (schedule_state is None):
        has = "one" if schedule is None else "none"
        raise ValueError(f"[load_checkpoint] {name} and the run expect the same schedule, got a file with {has}.")
    optimizer.load_state_dict(saved)
    model.load_state_dict({k.removeprefix("model/"): a for k, a in arrays.items() if k.startswith("model/")})
    if schedule is not None:
        try:
            schedule.load_state_dict(schedule_state)
        except (KeyError, TypeError):
            raise ValueError(f"[load_checkpoint] the schedule in {name} is not complete.") from None
    np.random.set_state(stream)
    return epochs, results


def optimizer_arrays(arrays: dict[str, np.ndarray]) -> dict[int, dict[str, np.ndarray]]:
    """{parameter's place: {slot: array}} of the tensors named optimizer/PLACE/SLOT."""
    state: dict[int, dict[str, np.ndarray]] = {}
    for key, a in arrays.items():
        if key.startswith("optimizer/"):
            _, place, slot = key.split("/")
            state.setdefault(int(place), {})[slot] = a
    return state
