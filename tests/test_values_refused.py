"""Values that torch refuses: a converted net refuses them as well, and a plan does, or gives NaN; never a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402

torch.manual_seed(0)
X, TABLE, HALF = torch.randn(3, 4), torch.randn(3, 4), torch.full((3,), 0.5)
SCORES = torch.randn(5, 1, 4).log_softmax(-1)


def i(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers)


# what is called -> (the call, inputs that it takes, inputs that it refuses)
CASES: dict[str, tuple[Callable, tuple, tuple]] = {
    "one_hot": (lambda n: F.one_hot(n, 4), (i(0, 3),), (i(0, 4),)),
    "one_hot, negative": (lambda n: F.one_hot(n, 4), (i(0, 3),), (i(0, -1),)),
    "embedding": (F.embedding, (i(0, 2), TABLE), (i(0, -1), TABLE)),
    "gather": (lambda x, n: x.gather(0, n), (X, i([0, 2])), (X, i([0, 3]))),
    "gather, negative": (lambda x, n: x.gather(0, n), (X, i([0, 2])), (X, i([0, -1]))),
    "index_select, negative": (lambda x, n: x.index_select(0, n), (X, i(0, 2)), (X, i(0, -1))),
    "getitem": (lambda x, n: x[n], (X, i(0, -3)), (X, i(0, -4))),
    "getitem of two": (lambda x, n, m: x[n, m], (X, i(0, 1), i(0, 3)), (X, i(0, 1), i(0, 4))),
    "scatter": (lambda x, n: x.scatter(1, n, 0.0), (X, i([0, 3])), (X, i([0, 4]))),
    "index_put": (lambda x, n: x.index_put((n,), i(1.0)), (X, i(0, 2)), (X, i(0, 3))),
    "cross_entropy": (F.cross_entropy, (X, i(0, 1, 3)), (X, i(0, 1, 4))),
    "binary_cross_entropy": (F.binary_cross_entropy, (HALF, HALF), (HALF * 3, HALF)),
    "quantile": (torch.quantile, (X[0], i(0.2, 1.0)), (X[0], i(0.2, -0.5))),
    "embedding_bag": (lambda n, o: F.embedding_bag(n, TABLE, o), (i(0, 2, 1), i(0, 1)), (i(0, 2, 1), i(1, 2))),
    "embedding_bag, end": (lambda n, o: F.embedding_bag(n, TABLE, o), (i(0, 2, 1), i(0, 3)), (i(0, 2, 1), i(0, 4))),
    "ctc_loss": (lambda n: F.ctc_loss(SCORES, i([1, 2]), n, i(2)), (i(5),), (i(9),)),
    "inv": (torch.linalg.inv, (torch.eye(3),), (torch.zeros(3, 3),)),
    "cholesky": (torch.linalg.cholesky, (torch.eye(3),), (-torch.eye(3),)),
    "floor_divide": (torch.floor_divide, (i(4, 5), i(1, 2)), (i(4, 5), i(1, 0))),
}


class Calls(nn.Module):
    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.f = f

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.f(*inputs)


@pytest.mark.parametrize("case", CASES)
def test_values_refused(case: str) -> None:
    f, good, bad = CASES[case]
    with pytest.raises((RuntimeError, IndexError)):
        f(*bad)
    net = torch2needle.convert(Calls(f), good)
    exe = ndl.compile(net, good)
    for run in (net, exe):
        np.testing.assert_allclose(run(*good).numpy(), f(*good), rtol=1e-5)
        try:
            made = run(*bad).numpy()
        except (ValueError, IndexError, ArithmeticError, np.linalg.LinAlgError) as e:
            assert str(e).startswith("[") and str(e).endswith(".")
        else:
            assert np.isnan(made).any()


def test_targets_that_are_no_probabilities() -> None:
    net = ndl.nn.Sequential(ndl.nn.Linear(4, 1), ndl.nn.Sigmoid())
    loss = ndl.ops.binary_cross_entropy
    with pytest.raises(ValueError, match=r"^\[binary_cross_entropy\] target expects numbers in \[0, 1\], got 255\.$"):
        loss(net(ndl.Tensor(X.numpy())), ndl.Tensor(np.full((3, 1), 255, "float32")))
    optimizer = ndl.optim.SGD(net.parameters(), lr=0.1)
    x, y = X.numpy(), np.ones((3, 1), "float32")
    step = ndl.compile_step(net, loss, optimizer, (x, y))
    before = net.parameters()[0].numpy().copy()
    with pytest.raises(ValueError, match="target expects"):
        step(x, y * 255)
    np.testing.assert_array_equal(net.parameters()[0].numpy(), before)
