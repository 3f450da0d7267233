"""Layers of two inputs: bilinear maps, likeness and distance."""

from __future__ import annotations

from needle import ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device

from .arguments import SIZE, flag, number
from .conv import draw_weights
from .function import Declared
from .module import Module

__all__ = ["Bilinear", "CosineSimilarity", "PairwiseDistance"]


class Bilinear(Module):
    """a^T W b + bias of a (*, in1_features) and b (*, in2_features): (*, out_features); weight (out, in1, in2) as torch's."""

    arguments = {"in1_features": SIZE, "in2_features": SIZE}

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        shape = (out_features, in1_features, in2_features)
        self.in1_features, self.in2_features, self.out_features = in1_features, in2_features, out_features
        self.weight, self.bias = draw_weights(shape, out_features if bias else 0, in1_features, device, dtype)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return ops.bilinear(a, b, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in1_features}, {self.in2_features}, {self.out_features}, bias={self.bias is not None}"


class CosineSimilarity(Declared):
    """See ops.cosine_similarity: along an axis, which goes."""

    axis: int = 1
    eps: float = 1e-8

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return ops.cosine_similarity(a, b, self.axis, self.eps)


class PairwiseDistance(Declared):
    """See ops.pairwise_distance: (*, N) and (*, N) give (*), or (*, 1) with `keepdims`."""

    arguments = {"p": number(), "keepdims": flag}
    p: float = 2.0
    eps: float = 1e-6
    keepdims: bool = False

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return ops.pairwise_distance(a, b, self.p, self.eps, self.keepdims)
