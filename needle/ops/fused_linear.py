"""Linear layers with batch norm and activation as one op."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, is_on, one_of, op
from needle.backend_ndarray import NDArray

from .activation import ACTIVATIONS, ActivationGrad, activation_code, apply_activation
from .fold import FoldedBias, FoldedWeight
from .fused import act_reference, count_batch
from .linalg import LAYOUTS, Linear, infer_linear, linear, linear_kernel
from .norm import BatchNorm, Positive, apply_batch_norm, batch_norm
from .planned import lower_linear


@op
class FusedLinearActivation(Op):
    """activation(x W^T + b); inputs x, weight, [bias]. Gradient from the stored output where the activation allows it."""

    activation: str = "relu"
    alpha: float = 0.0
    layout_of_weight: str = "torch"
    checks = one_of(layout_of_weight=LAYOUTS)
    flops = Linear.flops

    @property
    def label(self) -> str:
        return f"linear_{self.activation}"

    def infer(self, *inputs: Any) -> Spec:
        return infer_linear(self.label, self.layout_of_weight, *inputs)

    def compute(self, x: NDArray, weight: NDArray, *bias: NDArray) -> NDArray:
        return linear_kernel(x, weight, bias[0] if bias else None, self.layout_of_weight, self.activation, self.alpha)

    def reference(self, *arrays: np.ndarray) -> np.ndarray:
        return act_reference(self.activation, self.alpha, Linear(self.layout_of_weight).reference(*arrays))

    def decompose(self, *inputs: Tensor) -> Tensor:
        return apply_activation(self.activation, Linear(self.layout_of_weight)(*inputs), self.alpha)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        cls = ACTIVATIONS[self.activation]
        before = node if cls.from_output else Linear(self.layout_of_weight)(*node.inputs)
        grad = ActivationGrad(self.activation, self.alpha if cls.has_alpha else None)(before, out_grad)
        return Linear(self.layout_of_weight).gradient(grad, node)

    def lower(self, builder: Any, inputs: list[NDArray], out: NDArray) -> None:
        lower_linear(builder, self.layout_of_weight, inputs, out, activation_code(self.activation), self.alpha)

    @classmethod
    def samples(cls) -> list:
        return [({"activation": a}, [(5, 7), (33, 7), (33,)]) for a in ("relu", "sigmoid", "gelu")]


@op
class FusedLinearBatchNorm(Op):
    """activation(batch_norm(x W^T + b)); inputs x, weight (out, in), [bias], bn weight, bn bias, running mean, running variance,
    [num_batches_tracked].
    """

    eps: float = 1e-5
    momentum: float = 0.1
    training: Any = False
    unbiased: bool = False
    activation: str = "none"
    alpha: float = 0.0
    has_bias: bool = False
    has_count: bool = False
    flops = Linear.flops

    def must_decompose(self, *inputs: Any) -> bool:
        return is_on(self.training) or len(inputs[0].shape) != 2  # a third axis makes other channels than the features

    def is_weight(self, index: int) -> bool:
        return index > 0

    def folded(self, inputs: Any) -> tuple[Op, FoldedWeight, FoldedBias, list[Any], list[Any]]:
        x, w, *rest = inputs
        bias = [rest.pop(0)] if self.has_bias else []
        gamma, beta, mean, var = rest[:4]
        linear_op = FusedLinearActivation(self.activation, self.alpha) if self.activation != "none" else Linear("torch")
        return linear_op, FoldedWeight(self.eps), FoldedBias(self.eps), [w, mean, var, gamma, beta, *bias], [x]

    def infer(self, x: Any, w: Any, *rest: Any) -> Spec:
        return Linear("torch").infer(x, w)

    def compute(self, *inputs: NDArray) -> NDArray:
        x, w, *rest = inputs
        gamma, beta, mean, var = rest[self.has_bias : self.has_bias + 4]
        out = linear_kernel(x, w, rest[0] if self.has_bias else None, "torch", "none", 0.0)
        code = activation_code(self.activation)
        apply_batch_norm(out, out, mean, var, gamma, beta, eps=self.eps, activation=code, alpha=self.alpha)
        return out

    def reference(self, x: np.ndarray, w: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        bias = rest[:1] if self.has_bias else ()
        gamma, beta, mean, var = rest[len(bias) : len(bias) + 4]
        y = BatchNorm(self.eps).reference(Linear("torch").reference(x, w, *bias), mean, var, gamma, beta)
        return act_reference(self.activation, self.alpha, y)

    def decompose(self, x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        bias = rest[0] if self.has_bias else None
        gamma, beta, mean, var = rest[self.has_bias : self.has_bias + 4]
        if self.training:
            count_batch(rest[-1] if self.has_count else None, x)
        y = batch_norm(
            linear(x, w, bias, layout="torch"),
            mean,
            var,
            gamma,
            beta,
            self.training,
            self.momentum,
            self.eps,
            self.unbiased,
        )
        return apply_activation(self.activation, y, self.alpha)

    @classmethod
    def samples(cls) -> list:
        v = [(6,), (6,), (6,), Positive((6,))]
        return [({"activation": "relu", "has_bias": True}, [(4, 3), (6, 3), (6,), *v])]


def fused_linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None = None, layout: str = "torch") -> Tensor:
    """relu(x W^T + b); weight (out, in), or (in, out) with layout="needle"."""
    fused = FusedLinearActivation("relu", 0.0, layout)
    return fused(x, weight) if bias is None else fused(x, weight, bias)


def fused_linear_batchnorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "none",
    unbiased: bool = False,
) -> Tensor:
    """batch_norm(x W^T + b) with an activation; x (N, in), weight (out, in)."""
    fused = FusedLinearBatchNorm(eps, momentum, training, unbiased, activation, 0.0, bias is not None)
    return fused(x, weight, *([] if bias is None else [bias]), gamma, beta, running_mean, running_var)


def fused_linear_batchnorm_relu(*args: Any, **kwargs: Any) -> Tensor:
    """relu(batch_norm(x W^T + b)); arguments as fused_linear_batchnorm."""
    return fused_linear_batchnorm(*args, **dict(activation="relu", **kwargs))
