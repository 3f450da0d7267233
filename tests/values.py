"""Random arrays and tensors for tests, and their comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle import backend_ndarray as nd
from needle import nn
from needle.autograd import Tensor


def made(*shape: int) -> tuple[np.ndarray, nd.NDArray]:
    """The same float32 values as a numpy array and as an NDArray."""
    a = np.random.randn(*shape).astype("float32")
    return a, nd.array(a, device=nd.cpu())


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Equal shapes, and values within the tolerance."""
    got = got.numpy() if hasattr(got, "numpy") else np.asarray(got)
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def tensor(*shape: int, requires_grad: bool = True) -> Tensor:
    """Normal values on the default device."""
    return Tensor(np.random.randn(*shape), requires_grad=requires_grad)


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class Applied(nn.Module):
    """A module of a function of its input."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Any) -> Any:
        return self.f(x)
