"""The loss of label sequences that are shorter than what is read: connectionist temporal classification."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle.autograd import Spec, Tensor, op
from needle.backend_ndarray import NDArray
from needle.ops.common import constant
from needle.ops.math.arithmetic import clamp_min
from needle.ops.math.comparison import eq, ge, gt, lt, ne
from needle.ops.math.elementwise import cast, where
from needle.ops.math.logic import logical_and, logical_or
from needle.ops.math.maths import exp
from needle.ops.nn.cross_entropy import as_labels
from needle.ops.nn.embedding import check_numbers
from needle.ops.nn.loss import Loss, check_reduction, float_of, has_values, highest, lowest, reduced
from needle.ops.reduce.basic import summation
from needle.ops.reduce.softmax import logsumexp
from needle.ops.reduce.sorting import cumsum
from needle.ops.shape.basic import broadcast_to, reshape, unsqueeze
from needle.ops.shape.creation import full_like
from needle.ops.shape.gather import gather, take
from needle.ops.shape.join import split, stack
from needle.ops.shape.padding import pad
from needle.ops.shape.runtime_shape import StraightThrough

__all__ = ["ctc_loss"]

NEVER = -1e30  # the logarithm of what cannot be: with -inf, sums of nothing would have gradients that are no numbers


def normalized(losses: Tensor, x: Tensor, read: Tensor, never: Tensor) -> Tensor:
    """The losses (N,) with gradients as if the log-probabilities (T, N, C) were logits: beside the losses' own, that of the
    logarithm of sum(exp(x)), in the steps that are read (Graves et al., 2006, eq. 16). A log_softmax before leaves them alone.

    never: which losses the caller makes infinite: times 0 that gives gradients that are no numbers, as torch's.
    """
    inside = lt(constant(np.arange(x.shape[0])[:, None], x, "int64"), unsqueeze(read, 0))
    sums = summation(where(unsqueeze(inside, 2), exp(x), 0.0), (0, 2))
    sums = sums * where(never, 0.0, 1.0)
    return losses + StraightThrough()(full_like(sums, 0.0), sums)


@op
class CtcLoss(Loss):
    """-log of the probability of a label sequence over all its alignments (Graves et al., 2006), step by step.

    Inputs: log-probabilities (T, N, C), labels (N, S) or those of all in one row, lengths (N,) of both; or (T, C), (S,), ().
    """

    blank: int = 0
    zero_infinity: bool = False

    def infer(self, *inputs: Any) -> Spec:
        x, labels, read, written = (tuple(t.shape) for t in inputs)
        if len(x) not in (2, 3) or not x[0] or len(labels) not in (1, len(x) - 1):
            raise ValueError(f"[{self.label}] expects log_probs (T, N, C) and targets (N, S), got {x} and {labels}.")
        batch = x[1:-1]
        fits = len(labels) == 1 or labels[:1] == batch
        if not fits or any(n not in (batch, batch or (1,)) for n in (read, written)):
            raise ValueError(
                f"[{self.label}] expects targets and lengths of {batch[0] if batch else 1}, got {labels}, {read} and {written}."
            )
        if not 0 <= self.blank < x[-1]:
            raise ValueError(f"[{self.label}] blank expects 0 to {x[-1] - 1}, got {self.blank}.")
        return Spec(batch, float_of(self.label, inputs[0]))

    def in_rows(self, labels: Tensor, written: Tensor) -> Tensor:
        """Labels (N, S) of those that come in one row."""
        count = written.shape[0]
        if len(labels.shape) == 2:
            return labels
        longest = int(highest(written)) if has_values(written) and count else labels.shape[0]
        steps = constant(np.arange(longest), labels, "int64")
        place = unsqueeze(cumsum(written, 0) - written, 1) + steps
        row = pad(labels, (0, 1))
        return take(row, where(lt(steps, unsqueeze(written, 1)), place, labels.shape[0]))

    def check(self, labels: Tensor, read: Tensor, written: Tensor, sizes: tuple[int, int]) -> None:
        for name, lengths, most in (("input_lengths", read, sizes[0]), ("target_lengths", written, labels.shape[1])):
            if lowest(lengths) < 0 or highest(lengths) > most:
                found = lowest(lengths) if lowest(lengths) < 0 else highest(lengths)
                raise ValueError(f"[{self.label}] {name} expects numbers from 0 to {most}, got {found:g}.")
        if has_values(labels) and has_values(written):
            values, counts = (
                (d.read() if isinstance(d, NDArray) else d) for d in (labels.cached_data, written.cached_data)
            )
            check_numbers(self.label, values[np.arange(values.shape[1]) < counts[:, None]], sizes[1])

    def decompose(self, *inputs: Tensor) -> Tensor:
        x = inputs[0] if len(inputs[0].shape) == 3 else unsqueeze(inputs[0], 1)
        (steps, count, classes), batch = x.shape, tuple(inputs[0].shape[1:-1])
        read, written = (reshape(cast(t, "int64"), (count,)) for t in inputs[2:])
        labels = cast(inputs[1], "int64")
        labels = self.in_rows(labels if batch or len(labels.shape) == 2 else unsqueeze(labels, 0), written)
        self.check(labels, read, written, (steps, classes))
        long = labels.shape[1]
        size = 2 * long + 1  # a blank before, between and after labels
        number = constant(np.arange(size), x, "int64")
        inside = lt(constant(np.arange(long), x, "int64"), unsqueeze(written, 1))
        known = logical_and(ge(labels, 0), lt(labels, classes))
        wrong = gt(summation(logical_and(inside, eq(known, False)), 1), 0)
        for lengths, most in ((read, steps), (written, long)):
            wrong = logical_or(wrong, logical_or(lt(lengths, 0), gt(lengths, most)))
        labels = where(logical_and(inside, known), labels, self.blank)
        between = stack([labels, labels * 0 + self.blank], 2)
        path = pad(reshape(between, (count, 2 * long)), (1, 0), value=self.blank)
        emitted = split(gather(x, 2, broadcast_to(unsqueeze(path, 0), (steps, count, size))), 0)
        may_skip = logical_and(ne(path, self.blank), ne(path, pad(path, (2, 0), value=self.blank)[:, :size]))
        alpha = where(lt(number, 2), emitted[0], NEVER)
        for t in range(1, steps):
            before = [pad(alpha, (shift, 0), value=NEVER)[:, :size] for shift in (1, 2)]
            ways = stack([alpha, before[0], where(may_skip, before[1], NEVER)], 0)
            alpha = where(unsqueeze(gt(read, t), 1), logsumexp(ways, 0) + emitted[t], alpha)
        last = unsqueeze(written * 2, 1)
        losses = -logsumexp(where(logical_or(eq(number, last), eq(number, last - 1)), alpha, NEVER), 1)
        impossible = 0.0 if self.zero_infinity else math.inf
        never = gt(losses, -NEVER / 2)
        losses = normalized(where(never, 1.0, losses), x, read, never) * where(never, impossible, 1.0)
        losses = where(eq(read, 0), where(eq(written, 0), 0.0, cast(written * 0, x.dtype) + impossible), losses)
        return reshape(where(wrong, math.nan, losses), batch)

    @classmethod
    def samples(cls) -> list:
        lengths = [Spec((2,), "int64"), Spec((2,), "int64")]
        return [({"zero_infinity": True}, [(4, 2, 5), Spec((2, 3), "int64"), *lengths])]


def ctc_loss(
    log_probs: Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """-log of the probability of label sequences over all alignments with what is read, blanks between: log-probabilities
    (T, N, C) or (T, C), labels (N, S), (S,) or those of all in one row, lengths (N,) or ().

    The mean is that of the losses over their numbers of labels. zero_infinity: labels that do not fit count for nothing.
    """
    check_reduction("ctc_loss", reduction)
    others = [as_labels(t, log_probs) for t in (targets, input_lengths, target_lengths)]
    losses = CtcLoss(blank, zero_infinity)(log_probs, *others)
    if reduction == "mean":
        losses = losses / clamp_min(others[2], 1)
    return reduced(losses, reduction)
