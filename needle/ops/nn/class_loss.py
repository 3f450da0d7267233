"""Losses of classes, as torch has them: weights of classes, a number that is ignored, smoothed labels, probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Op, Spec, Tensor, op
from needle.backend_ndarray import FLOATS, NDArray
from needle.ops.families import no_gradient, samples_of
from needle.ops.math.activation import relu
from needle.ops.math.comparison import eq, ge, lt, ne
from needle.ops.math.elementwise import cast, where
from needle.ops.math.logic import logical_and
from needle.ops.nn.cross_entropy import CrossEntropy, as_labels
from needle.ops.nn.embedding import check_numbers
from needle.ops.nn.loss import Loss, as_weights, check_reduction, float_of, has_values, reduced
from needle.ops.nn.norm import channel_shape
from needle.ops.reduce.basic import mean, summation
from needle.ops.reduce.softmax import log_softmax
from needle.ops.shape.basic import reshape, squeeze, unsqueeze
from needle.ops.shape.gather import gather, take

__all__ = ["cross_entropy", "multi_margin_loss", "nll_loss"]


@op
class ClassNumbers(Op):
    """Labels as they are: class numbers below `classes`, or `ignored`; what a compiled step checks before it runs."""

    classes: int
    ignored: int | None = None

    def infer(self, labels: Any) -> Spec:
        return Spec(tuple(labels.shape), str(labels.dtype))

    def aliases(self, out: Any, *inputs: Any) -> bool:
        return True

    def compute(self, *arrays: Any) -> Any:
        return arrays[0]

    def reference(self, *arrays: Any) -> Any:
        return arrays[0]

    def decompose(self, *inputs: Tensor) -> Tensor:
        return inputs[0]

    def check_values(self, labels: Any) -> None:
        if isinstance(labels, NDArray):
            values = labels.read()
            check_numbers("cross_entropy", values[values != self.ignored], self.classes)

    gradient = no_gradient

    samples = samples_of(({"classes": 5}, [Spec((7,), "int64")]))


def as_classes(labels: Tensor, classes: int, ignored: int | None = None) -> Tensor:
    """Labels; those whose values are not known yet come from a caller, whose mistakes a compiled step has to see."""
    return labels if has_values(labels) else ClassNumbers(classes, ignored)(labels)


class ClassLoss(Loss):
    """A loss of x (N, C, *) or (C,) and labels (N, *) or (), with weights (C,) as third input."""

    what = "logits"

    def places(self, x: Any, labels: Any) -> tuple[int, ...]:
        """The shape of the labels."""
        shape, found = tuple(x.shape), tuple(labels.shape)
        if not shape or found != shape[:1] * (len(shape) > 1) + shape[2:]:
            raise ValueError(f"[{self.label}] expects {self.what} (N, C) and labels (N,), got {shape} and {found}.")
        return found

    def check_weight(self, x: Any, weight: Any = None) -> None:
        classes = x.shape[1 if len(x.shape) > 1 else 0]
        if weight is not None and tuple(weight.shape) != (classes,):
            raise ValueError(f"[{self.label}] weight expects shape ({classes},), got {tuple(weight.shape)}.")

    def rows(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """x and labels with an axis of samples."""
        return (unsqueeze(x, 0), unsqueeze(labels, 0)) if len(x.shape) == 1 else (x, labels)

    def as_given(self, losses: Tensor, *inputs: Tensor) -> Tensor:
        """Without the axis that `rows` made."""
        return reshape(losses, ()) if len(inputs[0].shape) == 1 else losses


def may_ignore(labels: Tensor, ignore_index: int) -> bool:
    """Whether some labels are to be ignored, as may be of those whose values are not known."""
    if not has_values(labels):
        return True
    values = labels.cached_data
    return bool(((values.read() if isinstance(values, NDArray) else values) == ignore_index).any())


def at_label(label: str, x: Tensor, labels: Tensor) -> Tensor:
    """x (N, C, *) at each label. Raises for a label that is no class; NaN while none is known."""
    known, numbers = has_values(labels), as_index(labels)
    if known:
        check_numbers(label, labels.cached_data, x.shape[1])
    else:
        inside = is_class(labels, x)
        numbers = where(inside, numbers, 0)
    found = squeeze(gather(x, 1, unsqueeze(numbers, 1), wrap=False), 1)
    return found if known else where(inside, found, math.nan)


def is_class(labels: Tensor, x: Tensor) -> Tensor:
    return logical_and(ge(labels, 0), lt(labels, x.shape[1]))


class Weighing(ClassLoss):
    """The mean is over the weights of the labels; those equal to `ignore_index` are left out of it."""

    def infer(self, *inputs: Any) -> Spec:
        x, labels = inputs[:2]
        places = self.places(x, labels)
        self.check_weight(x, *inputs[2:])
        reduction = vars(self)["reduction"]
        return Spec(places if reduction == "none" else (), float_of(self.label, x))

    def over_labels(self, x: Tensor, labels: Tensor, losses: Any, more: Any, *weight: Tensor) -> Tensor:
        """Losses reduced: `losses(x, labels)` times the weights of the labels, and `more` as it is, of those not ignored."""
        ignore_index, reduction = vars(self)["ignore_index"], vars(self)["reduction"]
        labels = as_classes(labels, x.shape[1], ignore_index)
        kept = ne(labels, ignore_index) if may_ignore(labels, ignore_index) else None
        known = labels
        if kept is not None and has_values(labels):  # in executables kernels give NaN, and that is dropped below
            known = where(kept, labels, 0)
        found, scale = losses(x, known), None
        if kept is not None:
            found = where(kept, found, 0.0)
        if weight:
            named = where(is_class(known, x), known, 0)  # of others the loss is NaN, or dropped
            scale = take(cast(weight[0], x.dtype), as_index(named), wrap=False)
            scale = scale if kept is None else where(kept, scale, 0.0)
            found = found * scale
        if more is not None:
            found = more(found) if kept is None else where(kept, more(found), 0.0)
        scale = kept if scale is None else scale
        if scale is None or reduction != "mean":
            return reduced(found, reduction)
        return summation(found) / cast(summation(scale), found.dtype)


def as_index(labels: Tensor) -> Tensor:
    return labels if labels.dtype in ("int32", "int64") else cast(labels, "int64")


@op
class ReducedNll(Weighing):
    """-x[label] times the label's weight, reduced; 0 where the label is ignored."""

    reduction: str = "mean"
    ignore_index: int = -100

    label = "nll_loss"
    what = "input"

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, labels = self.rows(*inputs[:2])
        made = self.over_labels(x, labels, lambda x, labels: -at_label(self.label, x, labels), None, *inputs[2:])
        return self.as_given(made, *inputs)

    samples = samples_of(
        ({}, [(7, 5), Spec((7,), "int64"), (5,)]),
        ({"reduction": "none", "ignore_index": 1}, [(2, 5, 3), Spec((2, 3), "int64")]),
    )


def nll_loss(
    input: Tensor, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """-input[label] of log-probabilities: input (N, C, *) or (C,), class numbers (N, *) or (); the rest as `cross_entropy`."""
    check_reduction("nll_loss", reduction)
    more = as_weights("nll_loss", weight, input)
    return ReducedNll(reduction, ignore_index)(input, as_labels(target, input), *more)


@op
class ReducedCrossEntropy(Weighing):
    """Cross entropy with everything that torch's takes, reduced. Targets of the logits' shape are probabilities."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0

    label = "cross_entropy"

    def infer(self, *inputs: Any) -> Spec:
        logits, target = inputs[:2]
        if not self.are_probabilities(logits, target):
            return Weighing.infer(self, *inputs)
        self.check_weight(logits, *inputs[2:])
        if self.ignore_index >= 0:
            raise ValueError(
                f"[{self.label}] ignore_index expects class numbers as targets, got probabilities and {self.ignore_index}."
            )
        shape = tuple(logits.shape)
        places = shape[:1] * (len(shape) > 1) + shape[2:]
        return Spec(places if self.reduction == "none" else (), float_of(self.label, logits, target))

    def are_probabilities(self, logits: Any, target: Any) -> bool:
        return tuple(target.shape) == tuple(logits.shape) != () and target.dtype in FLOATS

    def decompose(self, *inputs: Tensor) -> Tensor:
        logits, target = self.rows(*inputs[:2])
        weight = inputs[2:]
        if self.are_probabilities(*inputs[:2]):
            return self.as_given(self.of_probabilities(logits, target, *weight), *inputs)
        more = None
        if self.label_smoothing:
            spread = self.over_classes(logits, None, *weight)
            rest, share = 1 - self.label_smoothing, self.label_smoothing / logits.shape[1]
            more = lambda losses: losses * rest + spread * share  # noqa: E731
        return self.as_given(self.over_labels(logits, target, CrossEntropy(), more, *weight), *inputs)

    def over_classes(self, logits: Tensor, target: Tensor | None, *weight: Tensor) -> Tensor:
        """The losses of all classes summed, times the target's shares and the weights."""
        logs = log_softmax(logits, 1)
        logs = logs * reshape(cast(weight[0], logs.dtype), channel_shape(logs)) if weight else logs
        return -summation(logs if target is None else logs * target, 1)

    def of_probabilities(self, logits: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        if self.label_smoothing:
            target = target * (1 - self.label_smoothing) + self.label_smoothing / logits.shape[1]
        return reduced(self.over_classes(logits, target, *weight), self.reduction)

    samples = samples_of(
        ({}, [(7, 5), Spec((7,), "int64")]),
        ({"ignore_index": 2, "label_smoothing": 0.2}, [(7, 5), Spec((7,), "int64"), (5,)]),
        ({"reduction": "none", "label_smoothing": 0.1}, [(2, 5, 3), (2, 5, 3), (5,)]),
    )


def cross_entropy(
    logits: Tensor,
    target: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(logits)[label]: logits (N, C, *) or (C,); target: class numbers (N, *) or () of any dtype, in a Tensor,
    list or array, or probabilities, floats of the logits' shape.

    weight (C,): of the classes; a mean is over the weights of the targets. ignore_index: a number, class or not, whose places
    count for nothing; where all do, the mean is NaN. reduction: mean, sum or none. label_smoothing: the share of the target
    that goes to all classes alike (Szegedy et al., arXiv 1512.00567). IndexError for a number that is no class; in an
    executable the loss is NaN then.
    """
    check_reduction("cross_entropy", reduction)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"[cross_entropy] label_smoothing expects a number in [0, 1], got {label_smoothing}.")
    more = as_weights("cross_entropy", weight, logits)
    return ReducedCrossEntropy(reduction, ignore_index, label_smoothing)(logits, as_labels(target, logits), *more)


@op
class MultiMarginLoss(ClassLoss):
    """The sum over the other classes of max(0, margin - x[label] + x) ** p, over their number, times the label's weight."""

    p: int = 1
    margin: float = 1.0

    what = "input"

    def infer(self, *inputs: Any) -> Spec:
        x, labels = inputs[:2]
        places = self.places(x, labels)
        if len(x.shape) > 2:
            raise ValueError(f"[{self.label}] input expects shape (N, C) or (C,), got {tuple(x.shape)}.")
        self.check_weight(x, *inputs[2:])
        return Spec(places, float_of(self.label, x))

    def decompose(self, *inputs: Tensor) -> Tensor:
        x, labels = self.rows(*inputs[:2])
        here = eq(unsqueeze(labels, 1), np.arange(x.shape[1], dtype="int64")[None])
        beyond = relu(x - unsqueeze(at_label(self.label, x, labels), 1) + self.margin)
        losses = mean(where(here, 0.0, beyond if self.p == 1 else beyond * beyond), 1)
        if inputs[2:]:
            losses = losses * take(cast(inputs[2], x.dtype), as_index(labels))
        return self.as_given(losses, *inputs)

    samples = samples_of(
        ({}, [(7, 5), Spec((7,), "int64")]),
        ({"p": 2, "margin": 0.5}, [(7, 5), Spec((7,), "int32"), (5,)]),
    )


def multi_margin_loss(
    input: Tensor, target: Any, p: int = 1, margin: float = 1.0, weight: Any = None, reduction: str = "mean"
) -> Tensor:
    """How far each class is from staying a margin below the target's, to the power p: input (N, C) or (C,), labels (N,) or ()."""
    check_reduction("multi_margin_loss", reduction)
    if p not in (1, 2):
        raise ValueError(f"[multi_margin_loss] p expects 1 or 2, got {p}.")
    more = as_weights("multi_margin_loss", weight, input)
    return reduced(MultiMarginLoss(p, margin)(input, as_labels(target, input), *more), reduction)
