"""Losses of numbers against numbers, as torch has them: an op gives the losses of all places, its function reduces them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import FLOATS, NDArray
from needle.backend_ndarray.ndarray import PLANNING
from needle.ops.common import as_operand, broadcast_shape
from needle.ops.dtypes import result_dtype
from needle.ops.families import samples_of
from needle.ops.math.arithmetic import clamp_max, clamp_min
from needle.ops.math.comparison import eq, gt, lt, ne
from needle.ops.math.elementwise import cast, where
from needle.ops.math.maths import absolute, exp, log, softplus
from needle.ops.nn.norm import Positive
from needle.ops.reduce.basic import mean, summation
from needle.ops.shape.basic import unsqueeze
from needle.ops.shape.runtime_shape import stop_gradient

__all__ = [
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
]

REDUCTIONS = ("mean", "sum", "none")


def check_reduction(label: str, reduction: Any, known: Sequence[str] = REDUCTIONS) -> None:
    if reduction not in known:
        listed = f"{', '.join(known[:-1])} or {known[-1]}"
        raise ValueError(f"[{label}] reduction expects {listed}, got {reduction}.")


def reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else summation(losses) if reduction == "sum" else mean(losses)


def as_weights(label: str, weight: Any, like: Tensor) -> tuple[Tensor, ...]:
    """Weights that go along with `like`, as what ops take beside it; none for None."""
    if isinstance(weight, str):  # where torch's older signatures, and ours, had the reduction
        raise TypeError(f"[{label}] weight expects numbers, got {weight}.")
    return () if weight is None else (as_operand(weight, like),)


def float_of(label: str, *inputs: Any) -> str:
    """dtype of losses of the inputs."""
    dtype = result_dtype(*inputs)
    if dtype not in FLOATS:
        raise TypeError(f"[{label}] input expects floats, got {dtype}.")
    return dtype


def lowest(x: Tensor) -> float:
    """The smallest value of a tensor; nan of an empty one, and while values are not known: comparisons with it fail."""
    return extreme(x, "min")


def highest(x: Tensor) -> float:
    return extreme(x, "max")


def extreme(x: Tensor, which: str) -> float:
    if not has_values(x) or not x.size:
        return math.nan
    data = x.cached_data
    if isinstance(data, NDArray):
        data = (data.reduce(which, tuple(range(x.ndim)), False) if x.shape else data).read()
    return float(getattr(data, which)())


def has_values(x: Tensor) -> bool:
    """False while x is only recorded or planned."""
    return x.recorder is None and (PLANNING.builder is None or not isinstance(x.cached_data, NDArray))


class Loss(Op):
    """Losses of inputs that broadcast together, not reduced."""

    mixes_floats = True

    def infer(self, *inputs: Any) -> Spec:
        shape = broadcast_shape(self.label, *(tuple(x.shape) for x in inputs))
        return Spec(shape, float_of(self.label, *inputs))

    samples = samples_of(({}, [(4, 5), (4, 5)]), ({}, [(2, 1, 3), (4, 1)]))


def loss(
    made: Loss, input: Tensor, target: Any, reduction: str, weight: Any = None, over_weight: bool = False
) -> Tensor:
    """The losses of an op, times weights, reduced; `over_weight`: their mean is over the sum of the weights."""
    check_reduction(made.label, reduction)
    losses, weights = made(input, as_operand(target, input)), as_weights(made.label, weight, input)
    if not weights:
        return reduced(losses, reduction)
    losses = Weighted(made.label)(losses, *weights)
    if over_weight and reduction == "mean":
        return summation(losses) / summation(*weights)
    return reduced(losses, reduction)


@op
class Weighted(Loss):
    """Losses times weights of the same shape; `of` is how messages call the loss."""

    of: str

    def infer(self, *inputs: Any) -> Spec:
        losses, weight = inputs
        if tuple(weight.shape) != tuple(losses.shape):
            raise ValueError(f"[{self.of}] weight expects shape {tuple(losses.shape)}, got {tuple(weight.shape)}.")
        return Spec(tuple(losses.shape), float_of(self.of, losses, weight))

    def decompose(self, *inputs: Tensor) -> Tensor:
        return inputs[0] * inputs[1]

    samples = samples_of(({"of": "mse_loss"}, [(4, 5), (4, 5)]))


# -- distances -----------------------------------------------------------------------------------------------------------


@op
class MseLoss(Loss):
    """(input - target) ** 2."""

    def decompose(self, *inputs: Tensor) -> Tensor:
        difference = inputs[0] - inputs[1]
        return difference * difference


def mse_loss(input: Tensor, target: Any, reduction: str = "mean", weight: Any = None) -> Tensor:
    """The mean (sum, none) of (input - target) ** 2; with weights of the input's shape their mean."""
    return loss(MseLoss(), input, target, reduction, weight, over_weight=True)


@op
class L1Loss(Loss):
    """|input - target|."""

    def decompose(self, *inputs: Tensor) -> Tensor:
        return absolute(inputs[0] - inputs[1])


def l1_loss(input: Tensor, target: Any, reduction: str = "mean", weight: Any = None) -> Tensor:
    """The mean (sum, none) of |input - target|; with weights of the input's shape their mean."""
    return loss(L1Loss(), input, target, reduction, weight, over_weight=True)


def bent(difference: Tensor, limit: float) -> Tensor:
    """Half the square of a difference up to a limit, from there on a line; no branch squares what is infinite."""
    size = absolute(difference)
    square = clamp_max(size, limit)
    return square * (size - square * 0.5)


@op
class SmoothL1Loss(Loss):
    """Half the square of input - target over beta where that is below beta, else |input - target| - beta / 2."""

    beta: float = 1.0

    def decompose(self, *inputs: Tensor) -> Tensor:
        return bent(inputs[0] - inputs[1], self.beta) / self.beta

    samples = samples_of(({}, [(4, 5), (4, 5)]), ({"beta": 0.3}, [(2, 1, 3), (4, 1)]))


def smooth_l1_loss(input: Tensor, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """The L1 loss with a parabola below beta (Girshick, arXiv 1504.08083)."""
    if not beta >= 0:
        raise ValueError(f"[smooth_l1_loss] beta expects a number of at least 0, got {beta}.")
    return loss(SmoothL1Loss(beta) if beta else L1Loss(), input, target, reduction)


@op
class HuberLoss(Loss):
    """Half the square of input - target where that is below delta, else delta (|input - target| - delta / 2)."""

    delta: float = 1.0

    def decompose(self, *inputs: Tensor) -> Tensor:
        return bent(inputs[0] - inputs[1], self.delta)

    samples = samples_of(({}, [(4, 5), (4, 5)]), ({"delta": 0.3}, [(2, 1, 3), (4, 1)]))


def huber_loss(input: Tensor, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> Tensor:
    """Huber's loss (1964): squares up to delta, lines from there on."""
    if not delta > 0:
        raise ValueError(f"[huber_loss] delta expects a positive number, got {delta}.")
    return loss(HuberLoss(delta), input, target, reduction, weight)


# -- distributions -------------------------------------------------------------------------------------------------------


@op
class KlDiv(Loss):
    """target (log target - input): input and, with `log_target`, the target are logarithms. 0 log 0 is 0."""

    log_target: bool = False

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, target = inputs
        if self.log_target:
            return exp(target) * (target - x)
        none = eq(target, 0.0)
        return where(none, 0.0, target * log(where(none, 1.0, target))) - target * x

    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 5), Positive((4, 5))]), ({"log_target": True}, [(2, 1, 3), (4, 1)])]


@op
class OverBatch(Op):
    """A total divided by the size of the second input's first axis."""

    def infer(self, total: Any, like: Any) -> Spec:
        return Spec(tuple(total.shape), str(total.dtype))

    def decompose(self, total: Tensor, like: Tensor) -> Tensor:
        return total * (1 / like.shape[0] if like.shape[0] else math.nan) if like.shape else total

    samples = samples_of(({}, [(), (4, 5)]))


def kl_div(input: Tensor, target: Any, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """Kullback and Leibler's divergence of log-probabilities from a target of their shape; batchmean: the sum over the size
    of the batch."""
    check_reduction("kl_div", reduction, ("mean", "batchmean", "sum", "none"))
    if reduction != "batchmean":
        return loss(KlDiv(log_target), input, target, reduction)
    return OverBatch()(loss(KlDiv(log_target), input, target, "sum"), input)


@op
class PoissonNllLoss(Loss):
    """e ** x - target x, or of rates x - target log(x + eps); `full` adds Stirling's term where the target is above 1."""

    log_input: bool = True
    full: bool = False
    eps: float = 1e-8

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, target = inputs
        losses = exp(x) - target * x if self.log_input else x - target * log(x + self.eps)
        if not self.full:
            return losses
        counted = gt(target, 1)
        count = where(counted, target, 1.0)
        return losses + where(counted, count * log(count) - count + 0.5 * log(count * (2 * math.pi)), 0.0)

    @classmethod
    def samples(cls) -> list:
        rate = {"log_input": False, "full": True}
        return [({}, [(4, 5), (4, 5)]), (rate, [Positive((2, 1, 3)), Positive((4, 1))])]


def poisson_nll_loss(
    input: Tensor,
    target: Any,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """The negative log-likelihood of counts under Poisson's distribution with rate e ** input, or input; shapes broadcast."""
    return loss(PoissonNllLoss(log_input, full, eps), input, target, reduction)


@op
class GaussianNllLoss(Loss):
    """(log var + (input - target) ** 2 / var) / 2, with var of at least eps; `full` adds log(2 pi) / 2.

    var: of the input's shape, without its last axis, or with one axis of size 1. Below eps its gradient is that at eps.
    """

    full: bool = False
    eps: float = 1e-6

    def infer(self, *inputs: Any) -> Spec:
        shape, var = tuple(inputs[0].shape), tuple(inputs[2].shape)
        differing = [v for s, v in zip(shape, var, strict=False) if s != v]
        if var not in (shape, (), shape[:-1]) and (len(var) != len(shape) or differing != [1]):
            raise ValueError(f"[{self.label}] var expects shape {shape} or {shape[:-1]}, got {var}.")
        out = broadcast_shape(self.label, shape, tuple(inputs[1].shape))
        return Spec(out, float_of(self.label, *inputs))

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, target, var = inputs
        if lowest(var) < 0:
            raise ValueError(f"[{self.label}] var expects numbers of at least 0, got {lowest(var):g}.")
        var = unsqueeze(var, -1) if var.shape and var.shape == x.shape[:-1] else var
        var = where(lt(var, self.eps), var - stop_gradient(var) + self.eps, var)
        difference = x - target
        losses = (log(var) + difference * difference / var) * 0.5
        return losses + 0.5 * math.log(2 * math.pi) if self.full else losses

    @classmethod
    def samples(cls) -> list:
        return [
            ({}, [(4, 5), (4, 5), Positive((4, 5))]),
            ({"full": True}, [(4, 5), (4, 5), Positive((4,))]),
            ({}, [(4, 5, 2), (4, 5, 2), Positive((4, 1, 2))]),
        ]


def gaussian_nll_loss(
    input: Tensor, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """The negative log-likelihood under normal distributions with means `input` and variances `var`, a tensor or a number."""
    check_reduction("gaussian_nll_loss", reduction)
    made = GaussianNllLoss(full, eps)(input, as_operand(target, input), as_operand(var, input))
    return reduced(made, reduction)


# -- signs ---------------------------------------------------------------------------------------------------------------


@op
class HingeEmbeddingLoss(Loss):
    """The input where the target is 1, at least margin - input or 0 where it is -1."""

    margin: float = 1.0

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, target = inputs
        return where(ne(target, 1), clamp_min(self.margin - x, 0.0), 0.0) + where(ne(target, -1), x, 0.0)


def hinge_embedding_loss(input: Tensor, target: Any, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """Distances of pairs that are alike (target 1), and how far those of others (-1) stay below the margin."""
    return loss(HingeEmbeddingLoss(margin), input, target, reduction)


@op
class SoftMarginLoss(Loss):
    """log(1 + e ** (-target input)), without overflow."""

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, target = inputs
        return softplus(-(cast(target, x.dtype) if target.dtype not in FLOATS else target) * x)


def soft_margin_loss(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """The logistic loss of numbers against targets 1 and -1 of their shape."""
    return loss(SoftMarginLoss(), input, target, reduction)
