"""Data-parallel training on torch.distributed: every process steps on its part of a batch, by the mean of all gradients.

Started as torch programs are (`torchrun`, Ray Train): gloo on CPUs, NCCL and RCCL where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray
from needle.executor import TrainingStep
from needle.interop import as_ndarray

BUCKET = 8 * 2**20  # bytes that leave together: less waits for the last gradient, more for messages

TURN = timedelta(seconds=0.1)  # after which Python looks for signals


def as_torch(array: NDArray) -> torch.Tensor:
    """The array's own memory."""
    return torch.from_dlpack(array)


def wait(work: Any) -> None:
    """`work.wait()`, which Ctrl-C ends."""
    while not work.is_completed():
        with suppress(RuntimeError):  # it is not there yet
            work.wait(TURN)
    work.wait()


def check_alike(step: TrainingStep, group: Any) -> None:
    """Raise where processes would sum up gradients of different parameters, or move them in different ways."""
    names = {id(t): name for name, t in step.model.named_tensors()}
    parameters = [(names[id(p)], tuple(p.shape), p.dtype, p.requires_grad) for p in step.optimizer.params]
    mine = {"model": parameters, "optimizer": type(step.optimizer).__name__, "settings": tuple(step.settings[:3])}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group)
    for rank, found in enumerate(gathered):
        for part, expected in gathered[0].items():
            if found[part] != expected:
                raise ValueError(
                    f"[data_parallel] expects the same {part} in all processes, got another in process {rank}."
                )


def data_parallel(step: TrainingStep, group: Any = None) -> TrainingStep:
    """The step, whose gradients are from now on the mean over the processes of a group, by default of all.

    Weights, buffers and the optimizer's state become those of the group's first process. Batches may differ in size: every
    process's mean counts the same. Batch norms use, and keep, the statistics of their own process, as torch's without
    SyncBatchNorm do; save the first process's. On the CPU gradients leave in buckets while the step still runs, on a GPU after
    it. Where a process is gone the others get torch.distributed's error, after its time-out at the latest, and parameters stay
    as they are; then the step takes a new group, `data_parallel(step, group)`.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "[data_parallel] expects torch.distributed.init_process_group to have been called, got no group."
        )
    if not isinstance(step, TrainingStep):
        raise TypeError(f"[data_parallel] step expects what needle.compile_step returns, got {type(step).__name__}.")
    if dist.get_rank(group) < 0:
        raise ValueError("[data_parallel] expects a process of the group, got one outside of it.")
    check_alike(step, group)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    state = [step.optimizer.state_dict()] if dist.get_rank() == first else [None]
    for t in {id(t): t for _, t in step.model.named_tensors()}.values():
        held = as_torch(t.cached_data).clone(memory_format=torch.contiguous_format)
        dist.broadcast(held, first, group)
        t.data = Tensor(as_ndarray(held), device=t.device, dtype=t.dtype)
    dist.broadcast_object_list(state, first, group)
    step.optimizer.load_state_dict(state[0])

    def reduce(flat: NDArray) -> Callable[[], Any]:
        work = dist.all_reduce(t := as_torch(flat), group=group, async_op=True)
        return partial(wait, work) if t.is_cpu else work.wait

    step.share(reduce, dist.get_world_size(group), BUCKET)
    return step
