"""Processor time that captures with more free sizes may take."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any

from ..report import progress
from .guard import patched


class OutOfTime(Exception):
    """A capture takes longer than it may."""


class Budget:
    """Seconds of this thread's processor time that some captures may take together: formulas of sizes can grow without end."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.left = seconds, seconds

    def noted(self, found: Any) -> Any:
        """What was exported, with a note where the time did not suffice for more."""
        text = f"sizes beyond the batch were not all tried: dynamic_budget={self.seconds:g} seconds of processor time ended"
        return found if self.left > 0 else found._replace(notes=[*found.notes, text])

    @contextmanager
    def spent(self, text: str) -> Iterator[None]:
        """Counts steps in a bar, and raises OutOfTime in that at which the time is over."""
        from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # which loads sympy

        thread, start = threading.get_ident(), thread_time()

        def is_over() -> bool:
            return thread_time() - start > self.left

        def check() -> None:
            if is_over():
                raise OutOfTime

        def counted(before: Callable, end: Callable) -> Callable:
            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == thread:
                    bar.update()
                    if is_over():
                        return end(*args, **kwargs)
                return before(*args, **kwargs)

            return call

        def stop(*_: Any, **__: Any) -> None:
            raise OutOfTime

        def as_it_is(env: Any, formula: Any, *_: Any, **__: Any) -> Any:
            return formula

        # C++ asks for formulas and fake tensors where an exception would end the process; the forward's next call raises it.
        calls = counted(_NonStrictTorchFunctionHandler.__torch_function__, stop)
        formulas = counted(ShapeEnv.simplify, as_it_is)
        watched = [(_NonStrictTorchFunctionHandler, "__torch_function__", calls), (ShapeEnv, "simplify", formulas)]
        if self.left == math.inf:  # torch.cond cannot follow what counts
            watched = []
        try:
            with progress(text) as bar, patched(watched):
                check()
                yield
                check()  # the forward may have caught it
        finally:
            self.left -= thread_time() - start
