"""Gradients that several processes sum up: they lie in buckets, which leave as soon as they are final, while the step runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray import NDArray, full
from needle.backend_ndarray.ndarray import itemsize

ALIGNED = 64  # bytes; where every gradient of a bucket begins


class Bucket(NamedTuple):
    """flat: memory of the gradients `sums`, by parameter."""

    flat: NDArray
    sums: dict[Tensor, Tensor]


def room(parameter: Tensor) -> int:
    """Elements of a bucket that a gradient takes."""
    unit = ALIGNED // itemsize(parameter.dtype)
    return -(-parameter.cached_data.size // unit) * unit


def buckets(parameters: Iterable[Tensor], nbytes: int) -> list[Bucket]:
    """Gradients of one dtype and of at most `nbytes`, or one, in each; the last parameters', which are ready first, in front."""
    groups: list[list[Tensor]] = []
    for p in reversed(list(parameters)):
        held = sum(map(room, groups[-1])) if groups else 0
        if not groups or groups[-1][0].dtype != p.dtype or (held + room(p)) * itemsize(p.dtype) > nbytes:
            groups.append([])
        groups[-1].append(p)
    return list(map(bucket, groups))


def bucket(parameters: Sequence[Tensor]) -> Bucket:
    dtype, device = parameters[0].dtype, parameters[0].device
    flat, sums, offset = full((sum(map(room, parameters)),), 0.0, dtype, device), {}, 0
    for p in parameters:
        sums[p] = Tensor.make_const(NDArray.make(tuple(p.shape), None, device, flat._handle, offset, dtype))
        offset += room(p)
    return Bucket(flat, sums)


class Sharing:
    """What a step does whose gradients are summed over processes.

    reduce(flat): begins to sum an array over all processes, in place, and returns what waits for the sums. Buckets, of
    `nbytes` at most, come in the order of the optimizer's parameters, which is one in all processes whatever their plans are.
    """

    def __init__(self, reduce: Callable[[NDArray], Callable[[], Any]], nbytes: int) -> None:
        self._reduce, self._nbytes = reduce, nbytes
        self._buckets: dict[tuple[bool, ...], list[Bucket]] = {}  # by which parameters need a gradient
        self._sent = False  # gradients, by which parameters have not moved yet

    def buckets(self, needed: tuple[bool, ...], parameters: Sequence[Tensor]) -> list[Bucket]:
        """The buckets of the parameters that have a gradient where those `needed` one."""
        if needed not in self._buckets:
            self._buckets[needed] = buckets(parameters, self._nbytes)
        found = self._buckets[needed]
        if {p for b in found for p in b.sums} != set(parameters):
            raise Unsupported(
                "[compile_step] processes that share gradients expect them of the same parameters for all inputs, got "
                f"{sum(len(b.sums) for b in found)} and {len(parameters)}."
            )
        return found

    def check(self) -> None:
        """Raise where processes no longer agree on what was sent."""
        if self._sent:
            raise RuntimeError(
                "[compile_step] a step before failed while processes shared its gradients; share it again, in a new group."
            )

    def run(self, plan: Any, refs: list[Any]) -> list[Any]:
        """The results of a run of a StepPlan, whose buckets are then summed over the processes."""
        waits: list[Callable[[], Any]] = []
        self._sent = True
        results = plan.core.run_paused(refs, plan.leaves, lambda i: waits.append(self._reduce(plan.buckets[i].flat)))
        for wait in waits:
            wait()
        return results

    def done(self) -> None:
        """Parameters have moved by the gradients that were sent."""
        self._sent = False
