"""`profile`: runs a model a few times, with and without timers inside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from tqdm import tqdm

from needle.autograd import Unsupported, no_grad
from needle.backend_ndarray import Device, cpu
from needle.backend_ndarray.kernels import DECOMPOSED
from needle.executor import Executable, compile
from needle.executor.arguments import example_call
from needle.executor.constants import taken_back
from needle.executor.executable import CompiledPlan
from needle.executor.staged import Staged
from needle.executor.step import JOIN
from needle.executor.target import target_of
from needle.graph import map_structure
from needle.graph.kept import state_kept
from needle.interop import as_tensor
from needle.nn.module import Module

from .peaks import peaks_of
from .record import Call, recording
from .result import Event, Profile, Row

Place = tuple[str, str, tuple[int, ...]]  # name, op and shape of a call


def profile(model: Module | Executable | Staged, x: Any, rounds: int = 10, compiled: bool = False) -> Profile:
    """Where the time of `model(x)` goes.

    model: a Module (its eager forward, op by op) or an Executable (the steps of its plan); with `compiled` a Module is
        compiled first. Modules that behave differently in training must be in eval mode: a profile changes nothing.
    x: the input, a tuple of inputs, or a dict of them by name; arrays of any library.
    rounds: timed runs, of which the medians are taken; whole runs without timers alternate with them. What they write into
        buffers, such as a decoder's cache, is taken back.
    """
    if rounds < 1:
        raise ValueError(f"[profile] rounds expects at least 1, got {rounds}.")
    exe = unstaged(model) if isinstance(model, Executable | Staged) else None
    if exe is None and not isinstance(model, Module):
        raise TypeError(f"[profile] expects a Module or an Executable, got {type(model).__name__}.")
    args = example_call(exe.model if exe else model, x)
    if compiled and isinstance(model, Module):
        exe = unstaged(compile(model, args))
    if exe is not None:
        plan, _, _ = exe._prepare(args, {})
        with taken_back(exe._pool) if plan.writes else nullcontext():
            return profile_executable(exe, args, rounds)
    assert isinstance(model, Module)
    with state_kept(model), no_grad():  # so that fused ops without a gradient of their own run as they are
        return profile_module(model, args, rounds)


def unstaged(exe: Executable | Staged) -> Executable:
    if isinstance(exe, Staged):
        raise Unsupported(
            "[profile] a model in which values say how large results are runs in stages; exe.profile(...) has their steps."
        )
    return exe


def shapes(args: tuple) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    map_structure(args, lambda a: found.append(tuple(a.shape)) if hasattr(a, "shape") else None)
    return found


def whole(run: Callable[[], Any], device: Device) -> float:
    """Seconds until the results are there."""
    start = time.perf_counter()
    run()
    if device.core is not None:
        device.core.sync()
    return time.perf_counter() - start


def place_of(model: Module, inputs: tuple) -> Device:
    """The device of the model's parameters and buffers, else of its inputs."""
    found = [t.device for _, t in model.named_tensors()]
    map_structure(inputs, lambda a: found.append(a.device) if hasattr(a, "device") else None)
    return next(iter(found), cpu())


def title_of(model: Any, otherwise: str = "") -> str:
    """What a model is called: a converted one by torch's class, a loaded one by its file."""
    return getattr(model, "_title", otherwise or type(model).__name__)


def progress(rounds: int) -> Any:
    """Shown only when the profile takes longer than a second."""
    return tqdm(range(rounds), desc="profile", unit="round", leave=False, delay=1)


def profile_module(model: Module, args: tuple, rounds: int) -> Profile:
    model.check_evaluation("profile")
    inputs = tuple(map_structure(args, as_tensor))
    model(*inputs)
    device = place_of(model, inputs)
    peaks = peaks_of(device)
    times, runs = [], []
    for _ in progress(rounds):
        times.append(whole(lambda: model(*inputs), device))
        with recording(model) as recorder:
            model(*inputs)
        runs.append(recorder.calls)
    before = DECOMPOSED.copy()
    with recording(model) as tracked:
        tracked.track = True
        start = time.perf_counter()
        model(*inputs)
    decomposed = {f"{op} on {device}": n for (device, op), n in (DECOMPOSED - before).items()}
    rows = merge(runs)
    row_of = {r[:3]: i for i, r in enumerate(rows)}
    timeline = [Event(c.name, c.op, c.start - start, c.seconds, c.live, row_of.get(c[:3])) for c in tracked.calls]
    peak = max((e.live for e in timeline), default=0)
    return Profile(
        "eager", title_of(model), shapes(args), rounds, times, rows, timeline, peaks, {"peak": peak}, decomposed
    )


def merge(runs: Sequence[Sequence[Call]]) -> list[Row]:
    """One row for all calls of an op at one place with one shape."""
    seconds: dict[Place, list[float]] = {}
    for i, calls in enumerate(runs):
        for c in calls:
            seconds.setdefault(c[:3], [0.0] * len(runs))[i] += c.seconds
    places: dict[Place, list[Call]] = {}
    for c in runs[0]:
        places.setdefault(c[:3], []).append(c)
    rows = []
    for key, own in places.items():
        counts = zip(*((c.flops, c.read, c.written, c.memory) for c in own), strict=True)
        flops, read, written, memory = map(sum, counts)
        rows.append(Row(*key, len(own), statistics.median(seconds[key]), flops, read, written, memory))
    return rows


def profile_executable(exe: Executable, args: tuple, rounds: int) -> Profile:
    exe(*args)
    device = getattr(exe.last, "device", cpu())
    peaks = peaks_of(device)
    times, runs = [], []
    for _ in progress(rounds):
        times.append(whole(lambda: exe(*args), device))
        runs.append(exe.profile(*args, rounds=1))
    plan = exe.last
    info = plan.info
    seconds = [statistics.median(step) for step in zip(*([t for _, _, t in r] for r in runs), strict=True)]
    flops = step_flops(plan, seconds)
    memory = exe.memory
    live = memory.live
    rows, timeline, start = [], [], 0.0
    for i, (label, kernel, shape, (read, written)) in enumerate(
        zip(info.labels, info.names, info.shapes, info.traffic, strict=True)
    ):
        new = sum(b.nbytes for b in memory.buffers if b.first == i)
        name = plan.node(label)
        rows.append(Row(name, kernel, tuple(shape), 1, seconds[i], flops[i], read, written, new))
        timeline.append(Event(name, kernel, start, seconds[i], live[i], i))
        start += seconds[i]
    return Profile(
        "compiled",
        title_of(exe.model, exe.name),
        shapes(args),
        rounds,
        times,
        rows,
        timeline,
        peaks,
        memory.timeline(),
        plan.decomposed,
    )


def step_flops(plan: CompiledPlan, seconds: Sequence[float]) -> list[int]:
    """Operations of every step: an op's belong to its slowest kernel, shared by that kernel's steps; the others move data."""
    steps: dict[str, list[int]] = {}
    for i, (label, kernel) in enumerate(zip(plan.info.labels, plan.info.names, strict=True)):
        if kernel not in target_of(plan.device).layout.kernels:
            for part in label.split(JOIN):
                if part in plan.origins:
                    steps.setdefault(part, []).append(i)
    flops = [0] * len(seconds)
    for label, own in steps.items():
        kernel = plan.info.names[max(own, key=lambda i: seconds[i])]
        working = [i for i in own if plan.info.names[i] == kernel]
        each, rest = divmod(plan.origins[label].flops, len(working))
        for i in working:
            flops[i] += each + (rest if i == working[0] else 0)
    return flops
