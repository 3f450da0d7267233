"""Ops that are one in a graph and in print, and several when they run."""

from __future__ import annotations

from typing import Any

from needle.autograd import Op


class Composed(Op):
    """An op without kernels of its own: eager calls run its decomposition, the executor plans what that is made of."""

    def must_decompose(self, *inputs: Any) -> bool:
        return any(t.recorder is not None and t.recorder.static for t in inputs) and not any(
            t.recorder is not None and t.spec is None for t in inputs
        )
