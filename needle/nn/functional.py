"""Layers without parameters for functional calls of other frameworks, which hand in their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from needle import ops
from needle.autograd import Tensor
from needle.ops.nn.norm import count_batch

from .arguments import instance, listed, number
from .function import Declared
from .module import Module

__all__ = ["FunctionalBatchNorm", "FunctionalInstanceNorm", "Guard", "WriteBuffer", "WriteTrained"]


class WriteBuffer(Module):
    """Writes a value into a buffer, both given at the call."""

    def forward(self, buffer: Tensor, value: Tensor) -> Tensor:
        buffer.data = value.detach()
        return value


class WriteTrained(WriteBuffer):
    """Writes a value into a parameter where gradients are wanted; elsewhere it is made of the parameter anew at every call."""

    def forward(self, buffer: Tensor, value: Tensor) -> Tensor:
        return super().forward(buffer, value) if value.requires_grad else value


class GuardError(ValueError):
    """An input for which a captured graph does not hold."""


class Guard(Declared):
    """Raises GuardError where truths or whole numbers are not the `expected` ones, for which `text` asked at capture.

    value: a tensor, or a size. A plan gives the tensor with its results, and it is checked after each run.
    """

    arguments = {"expected": listed(number()), "text": instance(str, "text")}
    takes_narrow = True  # it computes nothing with them

    expected: tuple[float, ...]
    text: str

    def forward(self, value: Tensor | float) -> Tensor | float:
        if not isinstance(value, Tensor):
            if value != self.expected[0]:
                self.check(value)
        elif value.recorder is None:
            self.check(value.numpy())
        else:
            value.recorder.guards.append((self, value))
        return value

    def check(self, value: np.ndarray | float) -> None:
        found = np.asarray(value, "float64").reshape(-1)
        if not np.array_equal(found, self.expected):
            raise GuardError(
                f"[convert] the model holds for inputs that answer `{self.text}` with {told(self.expected)}, got "
                f"{told(found.tolist())}."
            )


def told(numbers: Sequence[float]) -> str:
    return ", ".join(f"{n:.17g}" for n in numbers)


class GivenStatistics(Declared):
    """A norm whose statistics and parameters are given at the call."""

    mode_dependent = True

    momentum: float = 0.1
    eps: float = 1e-5


class FunctionalBatchNorm(GivenStatistics):
    """Batch normalisation, in torch's rule, with the statistics and parameters given at the call.

    count: of batches in training, one more after the call.
    """

    def forward(
        self, x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, count: Tensor | None = None
    ) -> Tensor:
        training = self.training or mean is None
        if self.training:
            count_batch(count, x)
        return ops.batch_norm(x, mean, var, weight, bias, training, self.momentum, self.eps, unbiased=True)


class FunctionalInstanceNorm(GivenStatistics):
    """Instance normalisation with the statistics and parameters given at the call."""

    def forward(self, x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None) -> Tensor:
        own = self.training or mean is None
        return ops.instance_norm(x, mean, var, weight, bias, own, self.momentum, self.eps)
