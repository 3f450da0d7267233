"""Results as large as values say: exact eagerly, and compiled as plans of what lies between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, leaves  # noqa: E402
from needle.executor.staged import Staged  # noqa: E402
from test_rules_arithmetic import One  # noqa: E402


def experts(x: Any) -> Any:
    out = torch.zeros_like(x)
    for i, chosen in enumerate((x[:, 0] > 0, x[:, 0] <= 0)):
        (rows,) = torch.where(chosen)
        out.index_add_(0, rows, x[rows].tanh() * (i + 1))
    return out


def rows_of_mask(x: Any) -> Any:
    y = x.clone()
    y[y[:, 0] > 0] = y[y[:, 0] > 0] * 2
    return y


def twice(x: Any) -> Any:
    y = x[x > 0]
    return y[y > 0.5].sum() + y.shape[0]


SAMPLES: list[Callable] = [
    lambda x: x[x > 0],
    lambda x: (x[x[:, 0] > 0] @ x.t()).relu(),
    lambda x: x[:, x[0] > 0],
    lambda x: torch.nonzero(x > 0),
    lambda x: (x > 0).nonzero(as_tuple=True),
    lambda x: torch.argwhere(x > 0.5) * 2,
    lambda x: torch.where(x > 0),
    lambda x: torch.masked_select(x, x > 0).sum(),
    lambda x: torch.masked_select(x, x[0] > 0),
    lambda x: torch.masked_select(x[0], x > 0) * 2,
    lambda x: torch.unique((x * 2).long(), return_inverse=True, return_counts=True),
    lambda x: torch.unique((x > 0).long(), dim=0),
    lambda x: torch.unique_consecutive((x > 0).long().flatten()),
    lambda x: torch.unique_consecutive((x > 0).long(), return_inverse=True, return_counts=True, dim=0),
    lambda x: torch.bincount((x[:, 0].abs() * 3).long(), minlength=5).clamp(min=1),
    lambda x: torch.bincount((x[:, 0].abs() * 3).long(), weights=x[:, 1]),
    lambda x: torch.repeat_interleave(x, (x[:, 0].abs() * 2).long(), dim=0) * 2,
    lambda x: x[x > 100].sum() + x.sum(),
    lambda x: (x.size(0), torch.nonzero(x > 0), torch.nonzero(x > 0).size(0) * 2),
    twice,
    experts,
    rows_of_mask,
]


@pytest.mark.parametrize("case", range(len(SAMPLES)))
def test_sizes_by_values(case: int) -> None:
    model = One(SAMPLES[case]).eval()
    x = torch.randn(6, 4)
    net = torch2needle.convert(model, example=(x,))
    fused = operator_fusion.fuse(torch2needle.convert(model, example=(x,)))
    exe = ndl.compile(fused, (x.numpy(),))
    assert isinstance(exe, Staged)
    for given in (x, torch.randn(6, 4), torch.zeros(6, 4), torch.randn(9, 4)):
        want = model(given)
        for got in (net(given), fused(given), exe(given)):
            close(got, want)
        assert all(isinstance(v, np.ndarray) for v in leaves(exe(given.numpy())))
        rows = exe.profile(x=given, rounds=1)
        assert [k for k, *_ in rows] == [k for s in exe.stages if s.run is not None for k in s.run.plan.names]


class Asking(One):
    """Only torch.export, which knows no numbers of rows, follows what asks for values."""

    def forward(self, x: Any) -> Any:
        return x if x.sum() > 1e9 else self.f(x)


GROUPED: list[Callable] = [
    lambda x: x[(x > 0)].reshape(-1, 1).expand(-1, 3) + 1,
    lambda x: x[:, [0, 1, 2, 0]][torch.tensor([1, 0, 1, 0], dtype=torch.bool).expand(len(x), 4)].view(len(x), -1, 1),
    lambda x: torch.cat([x[x[:, 0] > 0], x[x[:, 0] <= 0]]) * 2,
    lambda x: x[x[:, 0] > 0] + x[x[:, 0] > 0].tanh(),
    lambda x: torch.nn.functional.layer_norm(x[x[:, 0] > 0], (4,)) @ x.t(),
    lambda x: torch.arange((x[:, 0] > 0).nonzero().shape[0]) * 2,
]


@pytest.mark.parametrize("case", range(len(SAMPLES) + len(GROUPED)))
def test_sizes_by_values_where_the_forward_asks(case: int) -> None:
    model = Asking([*SAMPLES, *GROUPED][case]).eval()
    x = torch.randn(6, 4)
    net = torch2needle.convert(model, example=(x,))
    assert net.report.capture.startswith("torch.export")
    one, none = -x.abs(), -x.abs()
    one[2] *= -1
    for given in (x, one, none, x.abs(), torch.randn(9, 4), torch.randn(2, 4)):
        close(net(given), model(given))
        close(ndl.compile(net, (given,))(given), model(given))


def test_masks_broadcast_without_an_example() -> None:
    f: Callable = lambda x: torch.masked_select(x, x[0] > 0)  # noqa: E731
    x = torch.randn(6, 4)
    close(torch2needle.convert(One(f))(x), f(x))


def test_gradients_pass_what_was_picked() -> None:
    f: Callable = lambda x: (x[x > 0] ** 2).sum() + (x[x[:, 0] > 0] * 3).sum()  # noqa: E731
    x = torch.randn(5, 3, requires_grad=True)
    f(x).backward()
    mine = ndl.Tensor(x.detach().numpy())
    torch2needle.convert(One(f), example=(x.detach(),))(mine).backward()
    np.testing.assert_allclose(mine.grad.numpy(), x.grad.numpy(), atol=1e-5)


def test_a_function_is_refused_in_a_sentence() -> None:
    x = ndl.Tensor(np.ones((3, 2), "float32"))
    with pytest.raises(ndl.autograd.Unsupported, match=r"\[nonzero\] the size of its result depends on values"):
        ndl.compile(lambda x: ndl.ops.nonzero(x), (x,))


def test_what_is_no_number() -> None:
    for bad in (np.array([-1, 2]), np.array([[1, 2]]), np.array([0.5])):
        with pytest.raises(ValueError, match=r"\[bincount\] expects whole numbers \(N,\) from 0 on"):
            ndl.ops.bincount(ndl.Tensor(bad))
    with pytest.raises(ValueError, match=r"\[repeat_interleave\] repeats expect numbers from 0 on"):
        ndl.ops.repeat_counts(ndl.Tensor(np.ones(2)), ndl.Tensor(np.array([1, -1])))
