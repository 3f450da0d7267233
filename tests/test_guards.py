"""Conditions on values: the example decides, and nets, plans and files check the same of every input."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from needle.nn.functional import GuardError  # noqa: E402

ONES = torch.ones(3, 4)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor(x)

    def factor(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


class Truth(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        if x.mean() > 0:
            return 2.0
        return -1.0


class Asserts(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        assert (x > -5).all(), "too small"
        return 3.0


class Item(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return sum(range((x > 0).sum(1).max().item()))


class Whole(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return int(x.max() * 3)


class Listed(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return sum(n for n in (x[0] > 0).long().tolist())


class While(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        n = 1
        while x.abs().sum() > n:
            n *= 2
        return n


class Number(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return (x > 0).sum().item() / 4


class Compared(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return 2.0 if 2 * x.mean().item() - 1 > 0 else -1.0


class Clipped(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        largest = abs(x.min().item())
        return min(largest, 3.0) / 2 if 0 < largest <= 2 else largest - 7


class WholeOfItem(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        number = x.max().item()
        return int(number * 3) if number else 5


class Index(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        return [1.0, 2.0, 3.0, 4.0][(x > 0).sum(1).min() // 2]


class Several(Asks):
    def factor(self, x: torch.Tensor) -> Any:
        if x[0].mean() > 0 and x[1].mean() > 0:  # the first holds for all inputs below
            return 2.0
        return -3.0


class Hit(Asks):
    """A loop over the experts that some row chose, as mixtures have it; each computes the rows that did."""

    def factor(self, x: torch.Tensor) -> Any:
        for _ in range(2):
            chosen = nn.functional.one_hot((x[:, 1:].sum(1) > 0).long(), 3)
            out = torch.zeros_like(x)
            for expert in (chosen.sum(0) > 0).nonzero():
                rows = torch.where(chosen[:, expert[0]])[0]
                out.index_add_(0, rows, x[rows] * [2.0, self.steps, 7.0][expert])
            x = out
        return x


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x[1].mean() > 0):
            return self.linear(x)
        return self.linear(x) - 1.0


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


BAD = ONES * torch.tensor([[1.0], [-9.0], [-9.0]])
ROWS = (torch.ones(3, 6, 4), torch.tensor([4, 3, 2]))
# The model, an example, inputs for which its graph does not hold, and whether torch takes them.
KINDS: dict[str, tuple[Any, tuple, tuple, bool]] = {
    **{
        kind.__name__: (kind, (ONES,), (BAD,), True)
        for kind in (Truth, While, Number, Compared, Clipped, Index, Several)
    },
    **{kind.__name__: (kind, (ONES,), (ONES * -9,), True) for kind in (Item, Whole, WholeOfItem)},
    "Asserts": (Asserts, (ONES,), (BAD,), False),
    "Hit": (Hit, (BAD,), (-BAD * torch.tensor([[-1.0], [1.0], [1.0]]),), True),
    "Listed": (Listed, (ONES,), (-ONES,), True),
    "TorchScript": (lambda: torch.jit.script(Scripted()), (ONES,), (BAD,), False),
    "lengths that rise": (Packs, ROWS, (ROWS[0], torch.tensor([3, 4, 2])), False),
    "length beyond the steps": (Packs, ROWS, (ROWS[0], torch.tensor([7, 3, 2])), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_guard_holds_and_is_violated(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, example, bad, answered = KINDS[kind]
    model = make().eval()
    net = torch2needle.convert(model, example=example)
    assert any("it holds for inputs that answer" in n for n in net.report.notes)
    ndl.save(net, tmp_path / "net")
    arrays = tuple(t.numpy() for t in example)
    forms = [net, operator_fusion.fuse(net), ndl.load(tmp_path / "net"), copy.deepcopy(net)]
    forms += [ndl.compile(f, arrays) for f in forms[:3]]
    if kind == "TorchScript":
        with pytest.raises(ndl.autograd.Unsupported, match="expects a model in Python, got TorchScript"):
            torch2needle.convert(model, example=example, on_guard="torch")
        other = net
    else:
        other = torch2needle.convert(model, example=example, on_guard="torch")
    others = [other, operator_fusion.fuse(other), copy.deepcopy(other), ndl.compile(other, arrays)]
    for given in (example, (example[0] * 1.01, *example[1:])):
        want = model(*given).detach().numpy()
        for f in (*forms, *others):
            for x in (given, tuple(t.numpy() for t in given)):
                np.testing.assert_allclose(np.asarray(as_numpy(f(*x))), want, atol=1e-5)
    for f in forms:
        for x in (bad, tuple(t.numpy() for t in bad)):
            with pytest.raises(GuardError, match=r"\[convert\] the model holds for inputs that answer"):
                f(*x)
    for f in others:
        for x in (bad, tuple(t.numpy() for t in bad)):
            if answered:
                np.testing.assert_allclose(as_numpy(f(*x)), model(*bad).detach().numpy(), atol=1e-6)
            else:
                with pytest.raises((AssertionError, RuntimeError, ValueError)):
                    f(*x)
    ndl.save(other, tmp_path / "net")
    with pytest.raises(GuardError):
        ndl.load(tmp_path / "net")(*bad)


class WithinTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3))

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.table[i] if i.max() < 4 else self.table[i % 4] * 2


def test_a_guard_speaks_before_the_numbers_that_it_keeps_out() -> None:
    model, good, bad = WithinTable().eval(), torch.tensor([0, 3]), torch.tensor([1, 7])
    refuses = ndl.compile(torch2needle.convert(model, (good,)), (good,))
    with pytest.raises(GuardError):
        refuses(bad)
    answers = ndl.compile(torch2needle.convert(model, (good,), on_guard="torch"), (good,))
    with torch.no_grad():
        for given in (good, bad):
            np.testing.assert_allclose(answers(given.numpy()), model(given).numpy(), rtol=1e-6)
    plain = ndl.compile(lambda t, i: ndl.ops.take(t, i), (model.table.detach().numpy(), good.numpy()))
    with pytest.raises(IndexError, match="got 7"):
        plain(model.table.detach().numpy(), bad.numpy())


def as_numpy(y: Any) -> np.ndarray:
    return y if isinstance(y, np.ndarray) else y.numpy() if isinstance(y, ndl.Tensor) else y.detach().numpy()


def test_the_model_answers_with_the_nets_parameters_and_passes_gradients() -> None:
    torch.manual_seed(0)
    model = Truth().eval()
    net = torch2needle.convert(model, (ONES,), on_guard="torch")
    exe = ndl.compile(net, (ONES.numpy(),))
    with torch.no_grad():
        np.testing.assert_allclose(torch2needle.compile(model, ONES, on_guard="torch")(BAD), model(BAD), atol=1e-6)
    net.linear.weight.data = net.linear.weight.data * 3
    with torch.no_grad():
        model.linear.weight *= 3
    want = model(BAD)
    np.testing.assert_allclose(exe(BAD.numpy()), want.detach().numpy(), atol=1e-6)
    (net(BAD) ** 2).sum().backward()
    (want**2).sum().backward()
    np.testing.assert_allclose(net.linear.weight.grad.numpy(), model.linear.weight.grad.numpy(), rtol=1e-5)
    net.train()
    with pytest.raises(GuardError):
        net(BAD)
    with pytest.raises(ValueError, match="on_guard expects 'error' or 'torch', got 'raise'"):
        torch2needle.convert(model, (ONES,), on_guard="raise")


def test_large_whole_numbers_are_told_apart() -> None:
    class Counts(Asks):
        def factor(self, x: torch.Tensor) -> Any:
            return float(x.long().sum().item() % 2)

    net = torch2needle.convert(Counts().eval(), example=(ONES * 100_000,))
    bad = ONES * 100_000
    bad[0, 0] += 1
    with pytest.raises(GuardError, match="with 1200000, got 1200001"):
        net(bad)


def test_real_numbers_of_constants_and_buffers() -> None:
    """Strides of a detector are a tensor that is no buffer; `strides.tolist()` are numbers all the same."""

    class Strides(Asks):
        strides = torch.tensor([8.0, 16.5])

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scales", torch.tensor([0.3, 0.7]))

        def factor(self, x: torch.Tensor) -> Any:
            if x.shape[0] > 50:  # which torch.fx cannot follow
                return 1.0
            made = [a * b for a, b in zip(self.strides.tolist(), self.scales.tolist(), strict=True)]
            return torch.full((x.shape[1],), made[0]) * made[1]

    model = Strides().eval()
    net = torch2needle.convert(model, example=(ONES,))
    np.testing.assert_allclose(net(ONES).numpy(), model(ONES).detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(ndl.compile(net, ONES)(ONES).numpy(), model(ONES).detach().numpy(), atol=1e-5)
    net.scales.data = net.scales * 2
    with pytest.raises(GuardError, match=r"0\.3"):
        net(ONES)


def test_real_numbers_of_inputs_are_refused() -> None:
    class Means(Asks):
        def factor(self, x: torch.Tensor) -> Any:
            return x.exp().mean().__float__()

    with pytest.raises(
        torch2needle.ConversionError, match=r"no other input answers .*x.exp\(\).mean\(\).__float__\(\)"
    ):
        torch2needle.convert(Means().eval(), example=(ONES,))


def test_a_buffer_that_is_asked() -> None:
    class Steps(Asks):
        def factor(self, x: torch.Tensor) -> Any:
            return 2.0 ** int(self.steps) if self.steps > 1 else 0.0

    model = Steps().eval()
    net = torch2needle.convert(model, example=(ONES,))
    x = torch.randn(6, 4)
    np.testing.assert_allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-5)
    net.steps.data = ndl.Tensor(np.array(3), dtype="int64")  # the graph is another one now
    with pytest.raises(GuardError, match="with 2, got 3"):
        net(x)


def test_fused_nets_keep_their_guards() -> None:
    net = operator_fusion.fuse(torch2needle.convert(Truth().eval(), example=(ONES,)))
    exe = ndl.compile(net, (ONES.numpy(),))
    with pytest.raises(GuardError):
        exe(-ONES.numpy())
    with pytest.raises(ndl.autograd.Unsupported, match="gives its results by a call"):
        exe.run_into(np.empty((3, 4), "float32"), ONES.numpy())


class Trains(Asks):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def factor(self, x: torch.Tensor) -> Any:
        if self.norm(x).abs().sum() >= 0 and x.mean() > 0:
            return self.drop(x)
        return -1.0


@pytest.mark.parametrize(("accumulate", "recompute"), [(1, "auto"), (2, "auto"), (1, "full")])
def test_training_steps_check_before_anything_moves(accumulate: int, recompute: str) -> None:
    torch.manual_seed(0)
    xs = np.random.default_rng(0).random((5, 3, 4), "float32")
    net = torch2needle.convert(Trains().train(), example=(torch.from_numpy(xs[0]),))
    eager = copy.deepcopy(net)
    loss = lambda y, t: ((y - t) ** 2).sum()  # noqa: E731
    optimizers = [ndl.optim.Adam(n.parameters(), lr=0.1) for n in (net, eager)]
    step = ndl.compile_step(net, loss, optimizers[0], (xs[0], xs[0]), accumulate=accumulate, recompute=recompute)
    np.random.seed(0)
    found = [float(step(x, x)) for x in xs[:3]]
    before = {k: t.numpy().copy() for k, t in net.state_dict().items()}
    with pytest.raises(GuardError, match=r"and x\.mean"):
        step(-xs[3], xs[3])
    assert all(np.array_equal(before[k], t.numpy()) for k, t in net.state_dict().items())
    np.random.seed(1)
    found += [float(step(x, x)) for x in xs[3:]]
    for i, x in enumerate(xs):
        if i in (0, 3):
            np.random.seed(i // 3)
        value = loss(eager(ndl.Tensor(x)), ndl.Tensor(x))
        (value / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizers[1].step()
            optimizers[1].reset_grad()
        np.testing.assert_allclose(found[i], float(value.numpy()), rtol=1e-5)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if x.mean() > 0:
            return x * self.calls
        return -x


def test_a_violation_writes_no_buffers() -> None:
    model = Counts().eval()
    net = torch2needle.convert(model, (ONES,))
    exe = ndl.compile(net, (ONES.numpy(),))
    for f in (net, exe):
        calls = float(net.calls.numpy()[0])
        np.testing.assert_array_equal(as_numpy(f(ONES.numpy())), np.full((3, 4), calls + 1))
        with pytest.raises(GuardError):
            f(-ONES.numpy())
        assert float(net.calls.numpy()[0]) == calls + 1
    with pytest.raises(ndl.autograd.Unsupported, match="expects a model that writes no buffers"):
        torch2needle.convert(model, (ONES,), on_guard="torch")


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.mean() > 0, lambda v: self.high(v).relu(), lambda v: self.low(v).tanh(), (x,))


def test_both_branches_of_cond_are_there() -> None:
    model = Conditional().eval()
    net = torch2needle.convert(model, example=(ONES,))
    exe = ndl.compile(net, (ONES.numpy(),))
    for x in (ONES, -ONES, torch.randn(3, 4), torch.randn(5, 4)):
        chosen = model.high(x).relu() if x.mean() > 0 else model.low(x).tanh()
        for y in (net(x).numpy(), exe(x.numpy())):
            np.testing.assert_allclose(y, chosen.detach().numpy(), atol=1e-6)


def test_what_is_only_made_where_nothing_is_compiled() -> None:
    """As T5's kin make masks, which torch.export then does not find."""

    class Masked(Asks):
        def factor(self, x: torch.Tensor) -> Any:
            if x.sum() > 1e9:  # which torch.fx cannot follow
                return 1.0
            mask = None if torch.compiler.is_compiling() else x > 0
            return mask.sum(1, keepdim=True)  # type: ignore[union-attr]

    model = Masked().eval()
    net = torch2needle.convert(model, (ONES,))
    for x in (ONES, torch.randn(5, 4)):
        np.testing.assert_allclose(net(x).numpy(), model(x).detach().numpy(), atol=1e-5)
    assert not torch.compiler.is_compiling()
