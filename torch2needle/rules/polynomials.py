"""Rules of orthogonal polynomials of a degree that is a number, by their recurrences in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from needle import ops
from needle.autograd import Tensor, Unsupported

from .bessel import without_gradient
from .tables import functions

S = torch.special
MOST = 64  # steps of a recurrence, each of which is a few ops
Step = Callable[
    [Any, Any, Any, int], Any
]  # the next of x, of the last one, of the one before, and of the last one's degree


def polynomial(first: Callable[[Any], Any], step: Step) -> Callable[[Any, Any], Any]:
    """That of degree n at x: 1, then first(x), then as `step` says; 0 of negative degrees, as torch has it."""

    def convert(input: Any, n: Any) -> Any:
        if isinstance(n, Tensor) or not isinstance(input, Tensor):
            raise Unsupported("n expects a number, got a tensor" if isinstance(n, Tensor) else "input expects a tensor")
        if int(n) > MOST:
            raise Unsupported(f"n expects at most {MOST}, got {n}")

        def f(x: Any) -> Any:
            before, last = ops.full_like(x, 1.0 if n >= 0 else 0.0), first(x)
            if int(n) < 1:
                return before
            for k in range(1, int(n)):
                before, last = last, step(x, last, before, k)
            return last

        return without_gradient(f)(input)

    return convert


def chebyshev(x: Any, last: Any, before: Any, k: int) -> Any:
    return x * 2 * last - before


def shifted(f: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return polynomial(lambda x: f(x * 2 - 1), lambda x, last, before, k: chebyshev(x * 2 - 1, last, before, k))


KINDS: dict[str, Callable[[Any], Any]] = {
    "t": lambda x: x,
    "u": lambda x: x * 2,
    "v": lambda x: x * 2 - 1,
    "w": lambda x: x * 2 + 1,
}
for _kind, _first in KINDS.items():
    functions("input, n", {(getattr(S, f"chebyshev_polynomial_{_kind}"),): polynomial(_first, chebyshev)})
    functions("input, n", {(getattr(S, f"shifted_chebyshev_polynomial_{_kind}"),): shifted(_first)})
functions(
    "input, n",
    {
        (S.hermite_polynomial_h,): polynomial(lambda x: x * 2, lambda x, y, z, k: x * 2 * y - z * (2 * k)),
        (S.hermite_polynomial_he,): polynomial(lambda x: x, lambda x, y, z, k: x * y - z * k),
        (S.laguerre_polynomial_l,): polynomial(
            lambda x: 1 - x, lambda x, y, z, k: ((2 * k + 1 - x) * y - z * k) / (k + 1)
        ),
        (S.legendre_polynomial_p,): polynomial(lambda x: x, lambda x, y, z, k: (x * (2 * k + 1) * y - z * k) / (k + 1)),
    },
)
