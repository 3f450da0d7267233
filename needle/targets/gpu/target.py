"""GPUs as a target, and the order of their images in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needle.backend_ndarray import Device, NDArray
from needle.executor.builder import Builder
from needle.op import Op
from needle.targets.images import TRAINED, follows, starts
from needle.targets.layers import LayerTarget


def is_channels_last(array: NDArray) -> bool:
    """An image (N, C, H, W) that lies in memory as (N, H, W, C), not as (N, C, H, W)."""
    return array.ndim == 4 and not array.is_compact() and array.permute((0, 2, 3, 1)).is_compact()


class GpuTarget(LayerTarget):
    def memory(self, op: Op, spec: Any, ins: Sequence[NDArray], leaves: bool) -> NDArray:
        """From a convolution on, images lie in the order (N, H, W, C), in which kernels read four channels at once."""
        image = starts(op) or ((follows(op) or isinstance(op, TRAINED)) and any(map(is_channels_last, ins)))
        if spec.ndim != 4 or leaves or not image:
            return super().memory(op, spec, ins, leaves)
        n, c, h, w = spec.shape
        return NDArray.empty((n, h, w, c), spec.dtype).permute((0, 3, 1, 2))

    def holds(self, op: Op, home: NDArray, ins: Sequence[NDArray], leaves: bool) -> bool:
        return super().holds(op, home, ins, leaves) or (follows(op) and is_channels_last(home))

    def row(self, builder: Builder, name: str, named: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """A product as the row that takes a precision, and finishes its sums."""
        fused = builder.device.kernels.get(f"{name}_fused")
        if fused is None or named[fused.inputs[0]].dtype != "float32":
            return name, named
        given = named | {"precision": builder.precision}
        return f"{name}_fused", {n: v for n, v in given.items() if n in (*fused.inputs, *fused.attrs)}

    def machine(self, device: Device) -> list[Any]:
        return [device.name, *device.core.properties().values()]

    def describe(self, info: Any) -> str:
        if info.core.graph_error:
            return f", on {info.device}, step by step: {info.core.graph_error}"
        return f", on {info.device}, {'one graph' if info.core.graphs else 'a graph from the second run on'}"


GPU = GpuTarget("gpu")
