"""Tuning by TVM's meta-schedule. The records lie on disk per (model, shapes, target) and survive an interruption."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm
from tqdm import tqdm
from tvm import relax
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm_ffi import register_error

from needle.facts import cache_folder
from needle.files import write_file

from .require import installed, require_tuning

register_error("KeyboardInterrupt", KeyboardInterrupt)  # else Ctrl-C in a callback comes out as another error
VERSION = 1  # of what is kept on disk
RECORDS, WORKLOADS = "database_tuning_record.json", "database_workload.json"  # TVM's names
TRIALS = 64
LITTLE = 0.01  # of a module's arithmetic: a function below is not worth trials
TIMEOUT = 60  # seconds for one candidate
POPULATION = 128  # schedules among which the search picks a round's trials; TVM's 512 take three times as long


def digest(*parts: str | bytes) -> str:
    h = hashlib.sha256()
    for p in parts:
        h.update(p.encode() if isinstance(p, str) else p)
        h.update(b"\0")
    return h.hexdigest()[:16]


def module_folder(module: Any, target: Any) -> Path:
    """Where tuning records and compiled modules of a fused module lie: by functions, shapes and target, not by weights."""
    text = module.script(show_meta=False)
    return cache_folder() / f"tvm-{digest(str(VERSION), *installed(), str(target), text)}"


def repair(folder: Path) -> int:
    """Drop what an interruption left half written; returns the number of records that are left."""
    rows: dict[str, list[str]] = {}
    for name in (WORKLOADS, RECORDS):
        path = folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        rows[name] = [line for line in lines if is_json(line)]
        if name == RECORDS:  # a record names its workload by number
            rows[name] = [line for line in rows[name] if json.loads(line)[0] < len(rows[WORKLOADS])]
        if rows[name] != lines:
            write_file(path, "".join(line + "\n" for line in rows[name]))
    return len(rows[RECORDS])


def is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), list)
    except ValueError:
        return False


@derived_object
class Progress(ms.measure_callback.PyMeasureCallback):
    """Moves a progress bar by the schedules that were measured."""

    def __init__(self, step: Callable[[int], Any]) -> None:
        super().__init__()
        self.step = step

    def apply(
        self, task_scheduler: Any, task_id: int, candidates: Any, builder_results: Any, runner_results: Any
    ) -> None:
        self.step(len(runner_results))


@derived_object
class InProcess(ms.builder.PyBuilder):
    """Compiles candidates here: TVM's own builder starts processes for every batch of them, each of which imports TVM first."""

    def build(self, build_inputs: Any) -> list[Any]:
        return [self.one(i) for i in build_inputs]

    @staticmethod
    def one(given: Any) -> Any:
        local = ms.builder.local_builder
        try:
            return ms.builder.BuilderResult(
                local.default_export(local.default_build(given.mod, given.target, None)), None
            )
        except Exception as e:  # a candidate that TVM cannot compile is no error of the search
            return ms.builder.BuilderResult(None, str(e))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time tunes a module: records name workloads by their place in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def load_intrinsics() -> None:
    """Import TVM's tensor intrinsics, each of which walks the stack and, per frame, all modules of the process.

    With torch imported that takes minutes; without the search for modules, which nothing there needs, a second.
    """
    before = inspect.getmodule
    inspect.getmodule = lambda *_: None  # type: ignore[assignment]
    try:
        importlib.import_module("tvm.s_tir.tensor_intrin")
    finally:
        inspect.getmodule = before


@contextmanager
def quiet() -> Iterator[None]:
    """Without meta-schedule's tables on the terminal; they are in its logs."""
    logger = logging.getLogger("tvm.s_tir.meta_schedule")
    before = logger.level
    for handler in list(logger.handlers):  # an earlier tuning's, at which TVM would stumble
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.ERROR)  # which it gives to the handler that it makes for the terminal
    try:
        yield
    finally:
        logger.setLevel(before)


def tune(module: Any, target: Any, trials: int = TRIALS, cost_model: str = "xgb", seed: int = 0) -> Path:
    """Measure schedules of a fused module's functions, `trials` at most; returns the folder of the records.

    What an earlier call has measured counts, also one that was interrupted. Raises RuntimeError where tuning cannot run.
    """
    require_tuning()
    folder = module_folder(module, target)
    with alone(folder):
        left = trials - repair(folder)
        if left > 0:
            measure(module, target, folder, left, cost_model, seed)
    return folder


def worth_tuning(tasks: list[Any]) -> list[Any]:
    """Those tasks that make up all but little of the arithmetic, if any does; the rest keeps its default schedule."""
    flops = [float(tvm.s_tir.analysis.estimate_tir_flops(t.dispatched[0])) * t.weight for t in tasks]
    least = LITTLE * sum(flops)
    return [t for t, f in zip(tasks, flops, strict=True) if f >= least]


def measure(module: Any, target: Any, folder: Path, trials: int, cost_model: str, seed: int) -> None:
    load_intrinsics()
    callbacks, relax_tasks = ms.measure_callback, ms.relax_integration
    with tqdm(total=trials, desc="tune", disable=None) as bar, quiet(), target:
        tasks = worth_tuning(relax_tasks.extract_tasks(module, target))
        search = ms.search_strategy.EvolutionarySearch(population_size=POPULATION)
        contexts, weights = relax_tasks.extracted_tasks_to_tune_contexts(tasks, str(folder), strategy=search, seed=seed)
        at_once = max(1, min(16, trials // len(tasks)))
        ms.tune.tune_tasks(
            tasks=contexts,
            task_weights=weights,
            work_dir=str(folder),
            max_trials_global=trials - at_once + 1,  # a round that starts below this ends at `trials`
            max_trials_per_task=trials,
            num_trials_per_iter=at_once,
            cost_model=cost_model,
            builder=InProcess(),
            runner=ms.runner.LocalRunner(timeout_sec=TIMEOUT),
            measure_callbacks=[
                callbacks.AddToDatabase(),
                callbacks.RemoveBuildArtifact(),
                callbacks.UpdateCostModel(),
                Progress(bar.update),
            ],
        )


def forget(module: Any, target: Any) -> None:
    """Remove records and compiled modules of a fused module."""
    folder = module_folder(module, target)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def apply_records(module: Any, target: Any, folder: Path) -> Any:
    """The module with the best schedule on record for each of its functions."""
    repair(folder)
    with target:
        return relax.transform.MetaScheduleApplyDatabase(str(folder))(module)


def weights_digest(module: Any) -> str:
    """Of the module with its constants."""
    return digest(re.sub(r"0x[0-9a-f]+", "", tvm.ir.save_json(module)))
