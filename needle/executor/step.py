"""Steps of a plan: calls of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from needle.backend_ndarray.ndarray import NDArray

JOIN = " + "  # between the labels of a merged step
ZERO_HALO = "zero_halo"  # the kernel that writes around its result

Halo = tuple[int, int, int, int]  # zero rows and columns around an image: top, left, bottom, right
NO_HALO: Halo = (0, 0, 0, 0)
NO_HALOS: Mapping[str, Halo] = {}


class Step(NamedTuple):
    """One kernel call of a plan."""

    kernel: str
    outs: Sequence[NDArray]
    inputs: dict[str, NDArray]  # by the kernel's names, without those that are absent
    attrs: dict[str, float]
    label: str  # the graph node that it computes
    halos: Mapping[str, Halo] = NO_HALOS  # what it reads around its inputs, where it reads around one

    @property
    def ins(self) -> list[NDArray]:
        return list(self.inputs.values())
