"""Losses of probabilities and logits of yes or no."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import Spec, Tensor, no_grad, op
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.ndarray import PLANNING
from needle.ops.common import as_operand
from needle.ops.dtypes import cast_array
from needle.ops.families import samples_of
from needle.ops.math.arithmetic import clamp_min, log1p
from needle.ops.math.composed_activation import logsigmoid
from needle.ops.math.maths import log
from needle.ops.nn.loss import Loss, as_weights, check_reduction, float_of, highest, lowest, reduced
from needle.ops.reduce.basic import mean

__all__ = ["binary_cross_entropy", "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss"]

LEAST_LOG = -100.0  # torch's limit, by which no loss is infinite
LEAST_SLOPE = 1e-12  # torch's limit of x (1 - x) in the gradient


class OfOneShape(Loss):
    """Losses of inputs of one shape, with weights that broadcast."""

    def infer(self, *inputs: Any) -> Spec:
        shape, target = (tuple(t.shape) for t in inputs[:2])
        if shape != target:
            raise ValueError(f"[{self.label}] target expects shape {shape}, got {target}.")
        return Loss.infer(self, *inputs)


@op
class BinaryCrossEntropy(OfOneShape):
    """-target log x - (1 - target) log(1 - x), with logarithms of at least -100; gradients are torch's there, too.
    A number outside of [0, 1] gives NaN.
    """

    domain = (0.05, 0.95)

    def check_values(self, *inputs: Any) -> None:
        for name, given in zip(("input", "target"), inputs, strict=True):
            if isinstance(given, Spec) or (isinstance(given, NDArray) and PLANNING.builder is not None):
                continue
            held = Tensor.make_const(given)
            beyond = [v for v in (lowest(held), highest(held)) if v < 0 or v > 1]
            if beyond:
                raise ValueError(f"[{self.label}] {name} expects numbers in [0, 1], got {beyond[0]:g}.")

    def compute(self, *arrays: NDArray) -> Any:
        self.check_values(*arrays)
        with no_grad():
            return self.decompose(*map(Tensor.make_const, arrays)).cached_data

    def reference(self, *arrays: np.ndarray) -> Any:
        self.check_values(*arrays)
        x, target = (cast_array(a, float_of(self.label, *arrays)) for a in arrays)
        least = lambda logs: np.maximum(logs, LEAST_LOG)  # noqa: E731
        return (target - 1) * least(np.log1p(-x)) - target * least(np.log(x))

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, target = inputs
        return (target - 1) * clamp_min(log1p(-x), LEAST_LOG) - target * clamp_min(log(x), LEAST_LOG)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        x, target = node.inputs
        of_target = None
        if target.requires_grad:
            of_target = out_grad * (log1p(-x) - log(x))  # which torch does not limit
        return out_grad * ((x - target) / clamp_min((1 - x) * x, LEAST_SLOPE)), of_target

    samples = samples_of(({}, [(4, 5), (4, 5)]), ({}, [(), ()]))


def binary_cross_entropy(input: Tensor, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """-target log input - (1 - target) log(1 - input) of probabilities, times weights that broadcast.

    ValueError for a number outside of [0, 1]; in an executable the loss is NaN for one of the input.
    """
    check_reduction("binary_cross_entropy", reduction)
    losses = BinaryCrossEntropy()(input, as_operand(target, input))
    for scale in as_weights("binary_cross_entropy", weight, input):
        losses = losses * scale
    return reduced(losses, reduction)


@op
class BinaryCrossEntropyWithLogits(OfOneShape):
    """Binary cross entropy of sigmoid(x), without overflow; the third input weighs positive targets."""

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, target = inputs[:2]
        logs = logsigmoid(x)
        if len(inputs) > 2:
            logs = ((inputs[2] - 1) * target + 1) * logs
        return (1 - target) * x - logs

    samples = samples_of(({}, [(4, 5), (4, 5)]), ({}, [(2, 4, 5), (2, 4, 5), (4, 1)]), ({}, [(), ()]))


def binary_cross_entropy_with_logits(
    input: Tensor, target: Any, weight: Any = None, reduction: str = "mean", pos_weight: Any = None
) -> Tensor:
    """Binary cross entropy of sigmoid(input), times weights that broadcast; pos_weight weighs positive targets."""
    check_reduction("binary_cross_entropy_with_logits", reduction)
    more = as_weights("binary_cross_entropy_with_logits", pos_weight, input)
    losses = BinaryCrossEntropyWithLogits()(input, as_operand(target, input), *more)
    for scale in as_weights("binary_cross_entropy_with_logits", weight, input):
        losses = losses * scale
    return reduced(losses, reduction)


@op
class MultilabelSoftMarginLoss(Loss):
    """The mean over the last axis of the binary cross entropy of sigmoid(x), times the third input."""

    def infer(self, *inputs: Any) -> Spec:
        shape, dtype = Loss.infer(self, *inputs)
        if not inputs[0].shape:
            raise ValueError(f"[{self.label}] input expects at least one axis, got shape ().")
        return Spec(shape[:-1], dtype)

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, target = inputs[:2]
        losses = (target - 1) * logsigmoid(-x) - target * logsigmoid(x)
        return mean(losses * inputs[2] if len(inputs) > 2 else losses, -1)

    samples = samples_of(({}, [(4, 5), (4, 5)]), ({}, [(2, 4, 5), (2, 4, 5), (5,)]))


def multilabel_soft_margin_loss(input: Tensor, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """Binary cross entropy of sigmoid(input) with weights of the classes, the mean over them, which are the last axis."""
    check_reduction("multilabel_soft_margin_loss", reduction)
    more = as_weights("multilabel_soft_margin_loss", weight, input)
    return reduced(MultilabelSoftMarginLoss()(input, as_operand(target, input), *more), reduction)
