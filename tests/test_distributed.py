"""torch2needle.bridges.distributed: two gloo processes train as one does on both batches."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.multiprocessing as mp  # noqa: E402

import needle as ndl  # noqa: E402
from needle import nn, optim  # noqa: E402

STEPS, TIMEOUT = 5, 5


def net_of(seed: int) -> Any:
    np.random.seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def batch(i: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(i)
    return draw.randn(8, 6).astype("float32"), draw.randint(0, 4, 8)


def trained(step: Any, pick: slice, steps: int = STEPS) -> None:
    for i in range(steps):
        x, y = batch(i)
        step(x[pick], y[pick])


def made(net: Any, accumulate: int = 1) -> Any:
    x, y = batch(0)
    opt = optim.Adam(net.parameters(), 0.01, eps=0.01)
    return ndl.compile_step(net, ndl.ops.cross_entropy, opt, (x, y), clip_grad_norm=0.5, accumulate=accumulate)


def work(rank: int, port: int, folder: str, dies: bool) -> None:
    import datetime

    import torch.distributed as dist

    from torch2needle.bridges.distributed import data_parallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=TIMEOUT))
    net = net_of(rank)  # other weights on each; the first one's count
    step = data_parallel(made(net))
    trained(step, slice(4 * rank, 4 * rank + 4))
    weights = {n: t.numpy() for n, t in net.named_tensors()}
    np.savez(Path(folder) / f"weights{rank}.npz", **weights)
    if not dies:
        dist.destroy_process_group()
        return
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    try:
        trained(step, slice(0, 4), 1)
    except RuntimeError as e:
        same = all(np.array_equal(weights[n], t.numpy()) for n, t in net.named_tensors())
        (Path(folder) / "error.txt").write_text(f"{time.monotonic() - start:.1f} {same} {type(e).__name__}")
    os._exit(0)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("dies", [False, True])
def test_two_processes_equal_one_with_both_batches(tmp_path: Path, dies: bool) -> None:
    mp.spawn(work, (free_port(), str(tmp_path), dies), nprocs=2)
    net = net_of(0)
    trained(made(net), slice(0, 8))
    for rank in (0, 1):
        found = np.load(tmp_path / f"weights{rank}.npz")
        for name, t in net.named_tensors():
            np.testing.assert_allclose(found[name], t.numpy(), atol=1e-5, err_msg=name)
    if dies:
        seconds, same, _ = (tmp_path / "error.txt").read_text().split()
        assert float(seconds) < TIMEOUT + 5 and same == "True"


def test_a_step_without_a_group_is_refused() -> None:
    from torch2needle.bridges.distributed import data_parallel

    with pytest.raises(RuntimeError, match="init_process_group"):
        data_parallel(made(net_of(0)))
