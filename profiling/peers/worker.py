"""The process that writes one format or runs one peer. Started by `processes.Child`; speaks JSON, one line a message.

`export` writes the files and ends. `serve` loads once, then answers each {"budget": seconds} with the median and least time
of a burst, and {"layers": true} with where needle's time goes.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from .formats import FORMATS, Task, compared
from .table import DoesNotApplyError, table


def burst(call: Callable[[], object], budget: float, least: int = 3) -> list[float]:
    """Seconds of at least `least` calls, more of them while `budget` seconds last."""
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (time.perf_counter() < end and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def median_time(call: Callable[[], object], budget: float, least: int = 3) -> float:
    return statistics.median(burst(call, budget, least))


def peak_memory() -> float:
    """Largest resident size of this process in MB."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss would start from the parent's size, which exec hands on
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = lines[0]
    for line in lines[1:]:
        if not text.endswith(":"):  # OpenVINO's first lines only say where
            break
        text += f" {line}"
    return f"{type(error).__name__}: {text}"[:400]


def export(name: str, task: Task) -> dict[str, Any]:
    importlib.import_module("torch")
    start = time.perf_counter()
    FORMATS[name].write(task)
    return {"seconds": time.perf_counter() - start}


def serve(name: str, extra: str | None, task: Task, send: Callable[[dict], None]) -> None:
    start = time.perf_counter()
    peer = table(extra)[name]
    for module in peer.modules:
        importlib.import_module(module)
    imported = time.perf_counter()
    call = peer.load(task)
    out = call()
    done = time.perf_counter()
    want = task.want()
    times = {"import_s": imported - start, "first_s": done - imported}
    send({**times, "memory_mb": peak_memory(), **compared(out, want)})
    for line in sys.stdin:
        order = json.loads(line)
        if "layers" in order:
            send(call.layers())  # type: ignore[attr-defined]
            continue
        call()  # caches and thread pools wake outside the clock
        times = burst(call, order["budget"])
        memory = peak_memory()
        send({"seconds": statistics.median(times), "least": min(times), "memory_mb": memory, **compared(call(), want)})


def main() -> None:
    order = json.loads(sys.argv[1])
    replies: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the replies

    def send(reply: dict) -> None:
        print(json.dumps(reply), file=replies, flush=True)

    task = Task(**order["task"])
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    try:
        if order["job"] == "export":
            send(export(order["name"], task))
        else:
            serve(order["name"], order["extra"], task, send)
    except DoesNotApplyError as e:
        send({"does_not_apply": str(e)})
    except Exception as e:
        import traceback

        traceback.print_exc()
        send({"failed": one_line(e)})


if __name__ == "__main__":
    main()
