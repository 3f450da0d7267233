"""The parent's side of the workers: start, ask, kill. Every worker is a session of its own, killed with all that it started."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .formats import FORMATS, Task


class WorkerError(Exception):
    """A worker that failed, died or did not answer; the text is one line."""


def free_cores(threads: int) -> list[int]:
    """One logical CPU of each of `threads` physical cores; empty (no pinning) where there are fewer or it is not known."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    chosen: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        chosen.setdefault(siblings.read_text().strip() if siblings.is_file() else str(cpu), cpu)
    return list(chosen.values())[:threads] if len(chosen) >= threads else []


def environment(task: Task) -> dict[str, str]:
    """Thread counts for every library, and caches and temporary files inside the task's folder."""
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NEEDLE_NUM_THREADS")
    own = dict.fromkeys(counts, str(task.threads))
    own |= {"TMPDIR": task.folder, "TORCHINDUCTOR_CACHE_DIR": task.path("inductor"), "PYTHONWARNINGS": "ignore"}
    here = str(Path(__file__).parents[1])
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])}


class Child:
    """One worker; use it in a `with` block, or `kill` it."""

    def __init__(self, job: str, name: str, task: Task, cores: list[int], extra: str | None = None) -> None:
        order = {"job": job, "name": name, "task": dataclasses.asdict(task), "cores": cores, "extra": extra}
        self._log = Path(task.path(f"{job}-{name}.log".replace(" ", "-")))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "peers.worker", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(task),
                start_new_session=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, timeout: float, message: dict | None = None) -> dict[str, Any]:
        """Send `message`, if any, and return the reply; raises WorkerError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if message is not None:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._death()) from None
        line, end = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise WorkerError(f"no answer within {timeout:g} s")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise WorkerError(self._death())
            line += part
        reply = json.loads(line)
        if "failed" in reply:
            raise WorkerError(reply["failed"])
        return reply

    def _death(self) -> str:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"the worker ended with {how}: {last}"[:200]

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Exports:
    """Files of a task by format, each written once, in a process of its own, with those that it needs."""

    def __init__(self, task: Task, timeout: float) -> None:
        self._task, self._timeout = task, timeout
        self._done: dict[str, float | WorkerError] = {}

    def seconds(self, name: str) -> float:
        """Seconds that writing `name` took, with what it needs beyond torch's own weights; raises WorkerError."""
        if name not in self._done:
            try:
                needs = FORMATS[name].needs
                before = self.seconds(needs) if needs else 0.0
                with Child("export", name, self._task, []) as child:
                    own = child.ask(self._timeout)["seconds"]
                self._done[name] = 0.0 if name == "torch" else before + own
            except WorkerError as e:
                self._done[name] = WorkerError(f"export to {name}: {e}")
        found = self._done[name]
        if isinstance(found, WorkerError):
            raise found
        return found
