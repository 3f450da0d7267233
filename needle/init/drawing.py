"""The stream that random numbers come from, and code that draws none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def _held(label: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """The array in `dtype`; TypeError where that is of whole numbers and the array's are not."""
    if np.dtype(dtype).kind not in "fc" and array.dtype.kind == "f" and (array % 1).any():
        raise TypeError(f"[{label}] expects a dtype of floats for numbers with fractions, got {dtype}.")
    return array.astype(dtype)


def manual_seed(seed: int) -> None:
    """Begin numpy's global legacy stream, from which all of needle's random numbers come, anew."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"[manual_seed] expects a whole number, got {type(seed).__name__}.")
    np.random.seed(int(seed) % 2**32)


class _Drawing(threading.local):
    off = False


DRAWING = _Drawing()


@contextmanager
def no_drawing() -> Iterator[None]:
    """Tensors made inside have one value in memory, drawn ones NaN: for layers whose weights are replaced by others at once."""
    before, DRAWING.off = DRAWING.off, True
    try:
        yield
    finally:
        DRAWING.off = before
