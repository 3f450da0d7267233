"""Losses of pairs and triples: how far a ranking, a distance or an angle misses a margin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Spec, Tensor, op
from needle.ops.common import as_operand, broadcast_shape, constant
from needle.ops.families import samples_of
from needle.ops.math.activation import relu
from needle.ops.math.arithmetic import clamp_min
from needle.ops.math.comparison import eq, lt
from needle.ops.math.elementwise import cast, minimum, where
from needle.ops.math.logic import logical_and, logical_not
from needle.ops.math.maths import sqrt
from needle.ops.nn.cross_entropy import as_labels
from needle.ops.nn.loss import Loss, check_reduction, float_of, reduced
from needle.ops.reduce.basic import some, summation, vector_norm
from needle.ops.reduce.sorting import cumsum
from needle.ops.shape.basic import unsqueeze
from needle.ops.shape.gather import gather

__all__ = ["cosine_embedding_loss", "margin_ranking_loss", "multilabel_margin_loss", "triplet_margin_loss"]


def check_ranks(label: str, *inputs: Any) -> None:
    if len({len(x.shape) for x in inputs}) > 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ValueError(f"[{label}] expects inputs of one number of axes, got {shapes}.")


@op
class MarginRankingLoss(Loss):
    """At least margin - target (a - b) or 0."""

    margin: float = 0.0

    def infer(self, *inputs: Any) -> Spec:
        check_ranks(self.label, *inputs)
        return Loss.infer(self, *inputs)

    def decompose(self, *inputs: Tensor) -> Tensor:
        a, b, target = inputs
        return clamp_min(target * (b - a) + self.margin, 0.0)

    samples = samples_of(({}, [(4, 5), (4, 5), (4, 5)]), ({"margin": 0.7}, [(4, 1), (4, 5), (1, 5)]))


def margin_ranking_loss(
    input1: Tensor, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """How far the first of two numbers is from being the larger (target 1) or smaller (-1) one by a margin; shapes broadcast."""
    check_reduction("margin_ranking_loss", reduction)
    others = (as_operand(t, input1) for t in (input2, target))
    return reduced(MarginRankingLoss(margin)(input1, *others), reduction)


@op
class CosineEmbeddingLoss(Loss):
    """1 - cos of the angle of vectors (N, D) or (D,) where the target, (N,) or (), is 1; at least cos - margin or 0 where -1."""

    margin: float = 0.0

    def infer(self, *inputs: Any) -> Spec:
        ranks = [len(x.shape) for x in inputs]
        if ranks not in ([2, 2, 1], [1, 1, 0]):
            shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
            raise ValueError(f"[{self.label}] expects inputs (N, D) and target (N,), or (D,) and (), got {shapes}.")
        pairs = broadcast_shape(self.label, *(tuple(x.shape) for x in inputs[:2]))
        return Spec(broadcast_shape(self.label, pairs[:-1], tuple(inputs[2].shape)), float_of(self.label, *inputs[:2]))

    def decompose(self, *inputs: Tensor) -> Tensor:
        a, b, target = inputs
        squares = [summation(x * x, -1) + 1e-12 for x in (a, b)]  # torch's limit, for zero vectors
        cosine = summation(a * b, -1) / sqrt(squares[0] * squares[1])
        apart = clamp_min(cosine - self.margin, 0.0)
        return where(eq(target, 1), 1 - cosine, 0.0) + where(eq(target, -1), apart, 0.0)

    @classmethod
    def samples(cls) -> list:
        return [({}, [(4, 5), (4, 5), Spec((4,), "int64")]), ({"margin": 0.2}, [(5,), (5,), ()])]


def cosine_embedding_loss(
    input1: Tensor, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """1 - cos of the angle of two vectors that are alike (target 1), and how far that of others (-1) is above the margin."""
    check_reduction("cosine_embedding_loss", reduction)
    others = (as_operand(t, input1) for t in (input2, target))
    return reduced(CosineEmbeddingLoss(margin)(input1, *others), reduction)


@op
class TripletMarginLoss(Loss):
    """At least margin + d(anchor, positive) - d(anchor, negative) or 0, d the p-norm of the difference over the last axis.

    swap: the distance of positive and negative counts where it is the smaller one (Balntas et al., 2016).
    """

    margin: float = 1.0
    p: float = 2.0
    eps: float = 1e-6
    swap: bool = False

    def infer(self, *inputs: Any) -> Spec:
        check_ranks(self.label, *inputs)
        if not inputs[0].shape:
            raise ValueError(f"[{self.label}] anchor expects at least one axis, got shape ().")
        shape, dtype = Loss.infer(self, *inputs)
        return Spec(shape[:-1], dtype)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        return vector_norm(a - b + self.eps, float(self.p), -1)

    def decompose(self, *inputs: Tensor) -> Tensor:
        anchor, positive, negative = inputs
        far = self.distance(anchor, negative)
        if self.swap:
            far = minimum(far, self.distance(positive, negative))
        return clamp_min(self.distance(anchor, positive) - far + self.margin, 0.0)

    samples = samples_of(
        ({}, [(4, 5), (4, 5), (4, 5)]), ({"margin": 3.0, "p": 3.0, "swap": True}, [(2, 4, 5), (2, 4, 5), (2, 4, 5)])
    )


def triplet_margin_loss(
    anchor: Tensor,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """How much farther than a margin below the distance to the negative that to the positive is, over the last axis."""
    check_reduction("triplet_margin_loss", reduction)
    if not margin > 0:
        raise ValueError(f"[triplet_margin_loss] margin expects a positive number, got {margin}.")
    if not p >= 0 or p == -math.inf:
        raise ValueError(f"[triplet_margin_loss] p expects a number of at least 0, got {p}.")
    others = (as_operand(t, anchor) for t in (positive, negative))
    return reduced(TripletMarginLoss(margin, p, eps, swap)(anchor, *others), reduction)


@op
class MultiLabelMarginLoss(Loss):
    """Over rows of class numbers up to the first negative one: the mean over classes of how far each that is not among them
    is from staying 1 below each that is.
    """

    def infer(self, *inputs: Any) -> Spec:
        x, labels = inputs
        if len(x.shape) not in (1, 2) or tuple(x.shape) != tuple(labels.shape) or not x.shape[-1]:
            raise ValueError(
                f"[{self.label}] expects input (N, C) or (C,) and class numbers of its shape, got {tuple(x.shape)} and "
                f"{tuple(labels.shape)}."
            )
        return Spec(tuple(x.shape[:-1]), float_of(self.label, x))

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, labels = inputs
        self.infer(x, labels)
        named = eq(cumsum(cast(lt(labels, 0), "int64"), -1), 0)
        numbers = where(named, labels, 0)
        classes = constant(np.arange(x.shape[-1]), x, "int64")
        among = some(logical_and(eq(unsqueeze(numbers, -1), classes), unsqueeze(named, -1)), -2)
        beyond = relu(1 - unsqueeze(gather(x, -1, numbers), -1) + unsqueeze(x, -2))
        counts = logical_and(unsqueeze(named, -1), logical_not(unsqueeze(among, -2)))
        return summation(where(counts, beyond, 0.0), (-2, -1)) / x.shape[-1]

    samples = samples_of(({}, [(4, 5), Spec((4, 5), "int64")]), ({}, [(6,), Spec((6,), "int32")]))


def multilabel_margin_loss(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Of several labels per row: input (N, C) or (C,), class numbers of its shape, of which those before the first -1 count."""
    check_reduction("multilabel_margin_loss", reduction)
    return reduced(MultiLabelMarginLoss()(input, as_labels(target, input)), reduction)
