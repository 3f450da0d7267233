"""Executables beside others: another run in a second thread, torch's threads in the same one, forked children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import needle as ndl
from needle import nn

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="runs need a core each")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = ndl.get_num_threads(), torch.get_num_threads()
    ndl.set_num_threads(2)
    torch.set_num_threads(2)
    yield
    ndl.set_num_threads(before[0])
    torch.set_num_threads(before[1])


def net_and_input(channels: int = 64, size: int = 96) -> tuple[nn.Module, np.ndarray]:
    """Some milliseconds of convolutions."""
    layers = [m for _ in range(3) for m in (nn.Conv(channels, channels, 3), nn.ReLU())]
    x = np.random.default_rng(0).standard_normal((1, channels, size, size)).astype("float32")
    return nn.Sequential(*layers).eval(), x


@needs_two_cores
def test_two_executables_in_two_threads() -> None:
    pairs = [net_and_input() for _ in range(2)]
    exes = [ndl.compile(net, (x,)) for net, x in pairs]
    wants = [exe(x).copy() for exe, (_, x) in zip(exes, pairs, strict=True)]
    wrong: list[int] = []

    def call(i: int) -> None:
        if not np.array_equal(exes[i](pairs[i][1]), wants[i]):
            wrong.append(i)

    def repeat(i: int) -> None:
        for _ in range(50):
            call(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong  # how fast both are together: profiling/sharing.py


def task_count() -> int:
    return len(os.listdir("/proc/self/task"))


@needs_two_cores
@pytest.mark.skipif("libgomp" not in Path("/proc/self/maps").read_text(), reason="torch has another OpenMP runtime")
def test_torchs_idle_threads_leave_the_cores_to_a_long_run() -> None:
    net, x = net_and_input()
    exe, a = ndl.compile(net, (x,)), torch.randn(512, 512)
    want = exe(x).copy()  # starts the worker, and the plan learns that it takes long
    product = a @ a
    before = task_count()
    assert np.array_equal(exe(x), want)
    until = time.perf_counter() + 60
    while task_count() != before - 1 and time.perf_counter() < until:
        time.sleep(0.01)
    assert task_count() == before - 1
    assert torch.equal(a @ a, product)
    assert task_count() == before


FORKED = """
import os, numpy as np, torch, needle as ndl
from needle import nn
ndl.set_num_threads(2), torch.set_num_threads(2)
net = nn.Sequential(nn.Conv(64, 64, 3), nn.ReLU(), nn.Conv(64, 64, 3)).eval()
x = np.ones((1, 64, 96, 96), "float32")
exe = ndl.compile(net, (x,))
want = exe(x).copy()
torch.randn(512, 512) @ torch.randn(512, 512)
child = os.fork()
if child == 0:
    os._exit(0 if all(np.array_equal(exe(x), want) for _ in range(3)) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_runs_after_torch_ran_in_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)


BESIDE = """
import itertools, os, signal, sys, threading, warnings
import numpy as np, needle as ndl
from needle import nn
warnings.simplefilter("ignore")
sys.setswitchinterval(1e-5), ndl.set_num_threads(2)
net, trained = (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(2))
x, sizes = np.random.randn(2, 16).astype("float32"), itertools.cycle(range(3, 40))
step = ndl.compile_step(trained, nn.SoftmaxLoss(), ndl.optim.SGD(trained.parameters(), lr=0.1), (x, np.zeros(2, int)))
exe = ndl.compile(net.eval(), (x,))
want = exe(x).copy()
if sys.argv[1] == "conversions":
    import torch, torch2needle
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)).eval()
    want = model(torch.from_numpy(x)).detach().numpy()
WORK = {
    "conversions": lambda: torch2needle.convert(model, (torch.from_numpy(x),))(x).numpy(),
    "runs": lambda: exe(x),
    "steps": lambda: step(x, np.zeros(2, int)) is None or exe(x),
    "plans": lambda: exe(np.zeros((next(sizes), 16), "float32")) is None or exe(x),
}
work, over = WORK[sys.argv[1]], threading.Event()
work()
threads = [threading.Thread(target=lambda: [work() for _ in iter(over.is_set, True)]) for _ in range(2)]
[t.start() for t in threads]
for _ in range(int(sys.argv[2])):
    if not (child := os.fork()):
        signal.alarm(60)
        os._exit(not all(np.allclose(work(), want, atol=1e-6) for _ in range(2)))
    if status := os.waitpid(child, 0)[1]:
        break
over.set()
[t.join() for t in threads]
raise SystemExit(status != 0)
"""


@pytest.mark.parametrize("work, forks", [("runs", 60), ("steps", 40), ("plans", 60), ("conversions", 20)])
def test_forked_children_run_beside_what_threads_hold(work: str, forks: int) -> None:
    subprocess.run([sys.executable, "-c", BESIDE, work, str(forks)], check=True)


INSIDE = """
import os, threading, torch, torch2needle
from torch2needle.capture.guard import LOCK
model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
status = []
def other():
    status.append(LOCK.acquire(timeout=0.01))
with LOCK:
    if not (child := os.fork()):
        thread = threading.Thread(target=other)
        thread.start(), thread.join()
        inside = status == [False]
thread = threading.Thread(target=torch2needle.convert, args=(model, (x,)))
thread.start(), thread.join(30)
if not child:
    os._exit(not (inside and not thread.is_alive()))
raise SystemExit(os.waitpid(child, 0)[1] != 0 or thread.is_alive())
"""


def test_a_fork_inside_a_conversion_leaves_it_to_the_thread_that_forks() -> None:
    subprocess.run([sys.executable, "-c", INSIDE], check=True)


def test_profiling_script(tmp_path: Path, script_environment: dict[str, str]) -> None:
    script, file = Path(__file__).parents[1] / "profiling" / "sharing.py", tmp_path / "sharing.json"
    quick = ["--models", "mlp", "--rounds", "1", "--seconds", "0.05", "--json", str(file)]
    done = subprocess.run([sys.executable, str(script), *quick], capture_output=True, text=True, env=script_environment)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["results"]
    assert row["title"] in done.stdout
    assert all(0 < r["min"] <= r["ratio"] <= r["max"] < np.inf for r in row["rows"].values())
