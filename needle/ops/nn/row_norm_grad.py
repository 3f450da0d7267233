"""The gradient of norms of rows: layer norms and norms by the root mean square."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import NDArray, call
from needle.ops.common import gradient_of_decomposition
from needle.ops.families import samples_of
from needle.ops.math.maths import rsqrt
from needle.ops.nn.norm import BatchNormTrain, BatchNormTrainGrad
from needle.ops.reduce.basic import mean, summation
from needle.ops.shape.basic import reshape
from needle.ops.shape.join import make_tuple

__all__: list[str] = []

FEW_ROWS, FEW_PARTS = 128, 16  # that are summed up together; parts that threads may share


def normalised(x: Tensor, rows: int, eps: float) -> tuple[Tensor, Any]:
    """x with each of its `rows` equal parts at mean 0 and variance 1, and the function from the gradient of that to x's.

    The kernels of batch normalisation do it, with a row as a channel.
    """
    from needle.init import ones, zeros

    where: dict[str, Any] = {"device": x.device, "dtype": x.dtype, "requires_grad": False}
    flat, weight = reshape(x, (1, rows, x.size // max(rows, 1))), ones(rows, **where)
    normal, centre, _, inverse = BatchNormTrain(eps)(flat, weight, zeros(rows, **where))

    def pull_back(grad: Tensor) -> Tensor:
        grad = reshape(grad, flat.shape)
        return reshape(BatchNormTrainGrad(eps)(flat, centre.detach(), inverse.detach(), weight, grad)[0], x.shape)

    return reshape(normal, x.shape), pull_back


@op
class RowNormGrad(Op):
    """(dx, [dweight], [dbias]) from x, [weight] and the gradient of LayerNorm's or, if `rms`, RMSNorm's result."""

    axes: int
    eps: float
    rms: bool
    has_weight: bool = False
    has_bias: bool = False
    n_out = property(lambda self: 1 + self.has_weight + self.has_bias)  # type: ignore[assignment]

    def split(self, inputs: Any) -> tuple[Any, Any, Any]:
        """x, weight or None, the gradient."""
        return (inputs[0], inputs[1] if self.has_weight else None, inputs[-1])

    def infer(self, *inputs: Any) -> Any:
        x, _, g = self.split(inputs)
        if tuple(x.shape) != tuple(g.shape):
            raise ValueError(f"[{self.label}] gradient expects shape {tuple(x.shape)}, got {tuple(g.shape)}.")
        value = Spec(tuple(x.shape[-self.axes :]), str(x.dtype))
        of_x = Spec(tuple(x.shape), str(x.dtype))
        return of_x if self.n_out == 1 else (of_x, *[value] * (self.n_out - 1))

    def compute(self, *inputs: NDArray) -> Any:
        x, weight, g = self.split(inputs)
        rows, size = math.prod(x.shape[: -self.axes]), math.prod(x.shape[-self.axes :])
        dx = NDArray.empty(x.shape, x.dtype)
        given = {"x": x.reshape((rows, size)), "weight": None if weight is None else weight.compact()}
        given |= {"dy": g.reshape((rows, size)), "eps": self.eps, "rms": self.rms}
        if self.n_out == 1:
            call("row_norm_grad", [dx.reshape((rows, size))], **given)
            return dx
        parts = max(1, min(rows, max(FEW_PARTS, -(-rows // FEW_ROWS))))
        sums = NDArray.empty((parts, 1 + self.has_bias, size), x.dtype)
        call("row_norm_grad_sums", [dx.reshape((rows, size)), sums], **given)
        total, shape = sums.reduce("sum", (0,), False), x.shape[-self.axes :]
        return (dx, *(total[i].reshape(shape) for i in range(1 - self.has_weight, 1 + self.has_bias)))

    def reference(self, *inputs: np.ndarray) -> Any:
        x, weight, g = self.split(inputs)
        last = tuple(range(-self.axes, 0))
        centred = x if self.rms else x - x.mean(last, keepdims=True)
        scale = 1 / np.sqrt((centred * centred).mean(last, keepdims=True) + self.eps)
        normal, slope = centred * scale, g if weight is None else g * weight
        shift = 0 if self.rms else slope.mean(last, keepdims=True)
        dx = (slope - shift - normal * (slope * normal).mean(last, keepdims=True)) * scale
        first = tuple(range(x.ndim - self.axes))
        sums = [(g * normal).sum(first)] * self.has_weight + [g.sum(first)] * self.has_bias
        return (dx, *sums) if sums else dx

    def decompose(self, *inputs: Tensor) -> Any:
        x, weight, g = self.split(inputs)
        first, last = tuple(range(len(x.shape) - self.axes)), tuple(range(-self.axes, 0))
        slope = g if weight is None else g * weight
        if self.rms:
            scale = rsqrt(mean(x * x, last, keepdims=True) + self.eps)
            normal = x * scale
            dx = (slope - normal * mean(slope * normal, last, keepdims=True)) * scale
        else:
            normal, pull_back = normalised(x, math.prod(x.shape[: -self.axes]), self.eps)
            dx = pull_back(slope)
        sums = [g * normal] * self.has_weight + [g] * self.has_bias
        sums = [summation(s, first) if first else s for s in sums]
        return make_tuple(dx, *sums) if sums else dx

    gradient = gradient_of_decomposition

    samples = samples_of(
        ({"axes": 1, "eps": 1e-5, "rms": False, "has_weight": True, "has_bias": True}, [(4, 33), (33,), (4, 33)]),
        ({"axes": 2, "eps": 1e-3, "rms": True, "has_weight": True}, [(2, 3, 4, 5), (4, 5), (2, 3, 4, 5)]),
        ({"axes": 1, "eps": 1e-5, "rms": False, "has_bias": True}, [(3, 5, 18), (3, 5, 18)]),
        ({"axes": 1, "eps": 1e-5, "rms": False}, [(300, 7), (300, 7)]),
    )
