"""Data-parallel training on torch.distributed: every process steps on its part of a batch, by the mean of all gradients.

Started as torch programs are (`torchrun`, Ray Train): gloo on CPUs, NCCL and RCCL where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray
from needle.executor import TrainingStep
from needle.interop import as_ndarray

BUCKET = 25 * 2**20  # bytes that are sent together, as torch's DistributedDataParallel does


def as_torch(array: NDArray) -> torch.Tensor:
    """The array's own memory."""
    return torch.from_dlpack(array)


def buckets(arrays: list[NDArray]) -> list[list[torch.Tensor]]:
    """Tensors over the arrays, of one dtype and some BUCKET bytes each, the last gradients, which are ready first, in front."""
    found: list[list[torch.Tensor]] = []
    for t in map(as_torch, reversed(arrays)):
        size = sum(x.nbytes for x in found[-1]) if found else BUCKET
        if not found or found[-1][0].dtype != t.dtype or size + t.nbytes > BUCKET:
            found.append([])
        found[-1].append(t)
    return found


def data_parallel(step: TrainingStep, group: Any = None) -> TrainingStep:
    """The step, whose gradients are from now on the mean over the processes of a group, by default of all.

    Weights, buffers and the optimizer's state become those of the group's first process. Batches may differ in size: every
    process's mean counts the same. Batch norms use, and keep, the statistics of their own process, as torch's without
    SyncBatchNorm do; save the first process's. Where a process is gone the others get torch.distributed's error, after its
    time-out at the latest, and parameters stay as they are.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "[data_parallel] expects torch.distributed.init_process_group to have been called, got no group."
        )
    if not isinstance(step, TrainingStep):
        raise TypeError(f"[data_parallel] step expects what needle.compile_step returns, got {type(step).__name__}.")
    first = dist.get_global_rank(group, 0) if group is not None else 0
    state = [step.optimizer.state_dict()] if dist.get_rank() == first else [None]
    for _, t in step.model.named_tensors():
        held = as_torch(t.cached_data).clone()
        dist.broadcast(held, first, group)
        t.data = Tensor(as_ndarray(held), device=t.device, dtype=t.dtype)
    dist.broadcast_object_list(state, first, group)
    step.optimizer.load_state_dict(state[0])

    def reduce(arrays: list[NDArray]) -> None:
        for bucket in buckets(arrays):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat, group=group)
            for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(part.view_as(t))

    step.share(reduce, dist.get_world_size(group))
    return step
