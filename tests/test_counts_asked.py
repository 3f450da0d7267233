"""Forwards that ask whether values count any rows: `if rows.numel() == 0: continue`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close, gradients_agree  # noqa: E402
from needle.nn.functional import GuardError  # noqa: E402

EMPTY: dict[str, Callable] = {  # of a mask, whether nothing is picked
    "number of elements": lambda mask: mask.nonzero().numel() == 0,
    "shape": lambda mask: torch.where(mask)[0].shape[0] == 0,
    "length": lambda mask: len(mask.nonzero()) == 0,
    "length of a selection": lambda mask: not len(mask[mask]) > 0,
    "truth of a number": lambda mask: not mask.nonzero().size(0),
    "below one": lambda mask: 1 > mask.nonzero().shape[0],
    "any": lambda mask: not mask.any(),
    "torch.any": lambda mask: torch.any(mask).logical_not(),
    "sum": lambda mask: mask.sum() == 0,
    "sum of whole numbers": lambda mask: mask.long().sum() < 1,
    "count": lambda mask: not torch.count_nonzero(mask),
}


class Experts(nn.Module):
    def __init__(self, empty: Callable) -> None:
        super().__init__()
        self.gate, self.empty = nn.Linear(4, 3), empty
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Any) -> Any:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.empty(chosen == i):
                continue
            (rows,) = torch.where(chosen == i)
            out.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return out


@pytest.mark.parametrize("rows", [9, 2], ids=["an example for all", "an example for some"])
@pytest.mark.parametrize("name", EMPTY)
def test_experts_without_rows(name: str, rows: int) -> None:
    torch.manual_seed(0)
    model, x = Experts(EMPTY[name]).eval(), torch.randn(rows, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    net = torch2needle.convert(model, (x,))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for batch in (9, 12, 2, 1):
        given = torch.randn(batch, 4)
        close(net(given), model(given))
        close(ndl.compile(net, (given,))(given), model(given))
    gradients_agree(model, net, (x,), 1e-4)


class Branch(nn.Module):
    def __init__(self, f: Callable) -> None:
        super().__init__()
        self.layer, self.f = nn.Linear(4, 3), f
        self.zeros = nn.Parameter(torch.zeros(3))
        self.register_buffer("none", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return self.f(self, self.layer(x), x[:, 0] > 0)


DIFFER: dict[str, Callable] = {
    "another result": lambda s, h, m: h[m].mean(0) if h[m].shape[0] > 0 else h.sum(0),
    "no mean": lambda s, h, m: h[m].mean(0) if m.any() else h[0] * 0,
    "zeros that are trained": lambda s, h, m: h + s.zeros if m.any() else h,
    "zeros that are counted": lambda s, h, m: h + s.none if m.nonzero().numel() else h,
    "what is left as it is": lambda s, h, m: h if not (h > 50).any() else h * 2,
}


@pytest.mark.parametrize("name", DIFFER)
def test_other_results_without_rows_are_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Branch(DIFFER[name]).eval()
    x = torch.randn(6, 4)
    x[:, 0] = torch.tensor([1.0, -1, 1, 1, -1, 1])
    net = torch2needle.convert(model, (x,))
    close(net(x), model(x))
    other = x * 1000 if name == "what is left as it is" else -x.abs()
    with pytest.raises(GuardError, match="holds for inputs that answer"):
        net(other)
    with pytest.raises(GuardError, match="holds for inputs that answer"):
        ndl.compile(net, (x,))(other)
    close(torch2needle.convert(model, (x,), on_guard="torch")(other), model(other))


MORE: dict[str, Callable] = {  # that two rows answer otherwise than four, and none gives the same in both ways
    "rows": lambda s, h, m: h + h[m].sum(0) if len(m.nonzero()) > 3 else h,
    "not as many": lambda s, h, m: h if m.nonzero().shape[0] != 4 else h + h[m].sum(0),
    "pairs": lambda s, h, m: h + h[m].sum(0) if m.nonzero().shape[0] // 3 > 0 else h,
    "a mask": lambda s, h, m: h + (h * m[:, None]).sum(0) if m.sum() > 3 else h,
    "a mask of as many": lambda s, h, m: h + (h * m[:, None]).sum(0) if torch.count_nonzero(m) == 4 else h,
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("example", [0, 4])
def test_what_is_asked_of_more_than_none_is_checked(name: str, example: int) -> None:
    torch.manual_seed(0)
    model = Branch(MORE[name]).eval()
    x = {n: torch.randn(6, 4).abs() * torch.where(torch.arange(6)[:, None] < n, 1, -1) for n in (0, 2, 4)}
    try:
        net = torch2needle.convert(model, (x[example],))
    except torch2needle.ConversionError as e:
        assert "answers otherwise" in str(e)  # what no rows answer, others may answer as well
        return
    close(net(x[example]), model(x[example]))
    with pytest.raises(GuardError, match="holds for inputs that answer"):
        net(x[2 if example else 4])
