"""Probabilities of dropping that are 0 in evaluation follow the mode, as transformers and users write attention."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle

torch.manual_seed(0)

CHOICES = {
    "chosen": lambda m: m.p if m.training else 0.0,
    "whole": lambda m: m.p if m.training else 0,
    "product": lambda m: m.p * m.training,
}


class Attention(nn.Module):
    """Two heads of queries; keys and values have one where `grouped`."""

    def __init__(self, p: float, choice: str = "chosen", grouped: bool = False, mask: str = "") -> None:
        super().__init__()
        self.p, self.choice, self.grouped, self.mask = p, choice, grouped, mask
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8 if grouped else 16), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, 4)).transpose(1, 2).chunk(2, 1)
        mask = torch.tensor([[0.0, 1.0, -1.0]]) if self.mask == "added" else None
        rest = {"enable_gqa": True} if self.grouped else {}
        p = CHOICES[self.choice](self)
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=self.mask == "causal", **rest)
        return self.out(y.transpose(1, 2).flatten(2))


class Plain(Attention):
    """Without heads, of one query, and with what torch takes by place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q, p = self.q(x), CHOICES[self.choice](self)
        last = F.scaled_dot_product_attention(q[:, -1:], k, v, dropout_p=p)
        return self.out(F.scaled_dot_product_attention(q, k, v, None, p, True) + last)


class Scaled(Plain):
    """By a number that is known without the example's rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=CHOICES[self.choice](self), scale=1.0 / x.size(2))


class Dropped(nn.Module):
    def __init__(self, p: float, drop: Any = F.dropout, choice: str = "product", named: bool = False) -> None:
        super().__init__()
        self.p, self.drop, self.choice, self.named = p, drop, choice, named
        self.q = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = CHOICES[self.choice](self)
        return x * (self.drop(self.q(x), p=p, training=True) if self.named else self.drop(self.q(x), p, True))


class Deep(nn.Module):
    """Layers of rates of their own, the first without. exports: torch.fx does not follow it."""

    def __init__(self, exports: bool, *layers: nn.Module) -> None:
        super().__init__()
        self.exports, self.layers = exports, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if not self.exports or x.is_cuda else x * 1.0
        for layer in self.layers:
            x = x + layer(x)
        return x


LAYERS = {
    **{f"attention {c}": lambda p, c=c: Attention(p, c) for c in CHOICES},
    "grouped": lambda p: Attention(p, grouped=True),
    "plain": lambda p: Plain(p),
    "causal": lambda p: Attention(p, mask="causal"),
    "grouped with mask": lambda p: Attention(p, grouped=True, mask="added"),
    **{f"dropout {c}": lambda p, c=c: Dropped(p, choice=c) for c in CHOICES},
    "dropout named": lambda p: Dropped(p, named=True),
    "dropout2d": lambda p: Dropped(p, F.dropout1d),
}
WAYS = [(name, i % 2 == 0, how) for i, name in enumerate(LAYERS) for how in (False, True)]


def converted(model: nn.Module, x: torch.Tensor, exports: bool) -> Any:
    net = torch2needle.convert(model, example=(x,))
    assert net.report.capture.startswith("torch.export") is exports, net.report.capture
    assert net._only is None and not any("stays so" in note for note in net.report.notes), net.report.notes
    return net


@pytest.mark.parametrize(("name", "training", "exports"), WAYS)
def test_all_dropped(name: str, training: bool, exports: bool) -> None:
    """Where training drops all, nothing is left to chance: values, gradients and steps are torch's in both modes."""
    model = Deep(exports, *(LAYERS[name](p) for p in (0.0, 1.0))).train(training)
    x = torch.randn(4, 3, 8)
    net = converted(model, x, exports)
    for mode, fused in itertools.product((False, True), repeat=2):
        theirs, ours = copy.deepcopy(model).train(mode), copy.deepcopy(net).train(mode)
        ours = operator_fusion.fuse(ours) if fused else ours
        given, taken = x.clone().requires_grad_(), ndl.Tensor(x.numpy(), requires_grad=True)
        want, got = theirs(given), ours(taken)
        np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-4, atol=1e-5)
        (want**2).sum().backward()
        (got**2).sum().backward()
        np.testing.assert_allclose(taken.grad.numpy(), given.grad.numpy(), rtol=1e-3, atol=1e-4)
    theirs = model.train()
    ours = operator_fusion.fuse(net.train())
    torch_step = torch.optim.SGD(theirs.parameters(), lr=0.1)
    optimizer = ndl.optim.SGD(ours.parameters(), lr=0.1)
    data = ndl.Tensor(x.numpy()), ndl.Tensor(np.ones_like(x.numpy()))
    step = ndl.compile_step(ours, ndl.nn.MSELoss(), optimizer, data)
    for _ in range(3):
        torch_step.zero_grad()
        want = F.mse_loss(theirs(x), torch.ones_like(x))
        want.backward()
        torch_step.step()
        np.testing.assert_allclose(step(*data).numpy(), want.detach().numpy(), rtol=1e-4)
    plan = ndl.compile(ours.eval(), (data[0],))
    np.testing.assert_allclose(plan(data[0]).numpy(), theirs.eval()(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 1, 8), (1, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_key_and_one_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = Deep(False, Attention(0.0), Attention(1.0, grouped=True), Plain(1.0)).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    net = converted(model, x, False)
    for mode in (True, False):
        want = model.train(mode)(x).detach().numpy()
        np.testing.assert_allclose(
            net.train(mode)(ndl.Tensor(x.numpy(), dtype=str(dtype)[6:])).numpy(), want, atol=1e-5
        )


def test_numbers_that_are_no_constants_are_refused() -> None:
    """Layers hold numbers: without an example such a one is refused, with one torch.export knows it."""
    model, x = Scaled(1.0), torch.randn(2, 3, 8)
    with pytest.raises(torch2needle.ConversionError, match="scale expects a number"):
        torch2needle.convert(model)
    net = converted(model, x, True)
    for mode in (False, True):
        want = model.train(mode)(x).numpy()
        np.testing.assert_allclose(net.train(mode)(ndl.Tensor(x.numpy())).numpy(), want, atol=1e-5)


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_shares_that_are_dropped(name: str, exports: bool) -> None:
    """Of many equal samples each draws for itself, and their mean is what evaluation gives."""
    model = Deep(exports, LAYERS[name](0.25)).eval()
    x = torch.randn(1, 3, 8)
    net = converted(model, x.repeat(2, 1, 1), exports).train()
    made = net(ndl.Tensor(x.repeat(2000, 1, 1).numpy())).numpy()
    want = model(x).detach().numpy()
    spread = made.std(0)
    assert (spread > 1e-4).all()
    assert (np.abs(made.mean(0) - want[0]) <= 5 * spread / 2000**0.5).all()
    assert np.abs(net.eval()(ndl.Tensor(x.numpy())).numpy() - want).max() < 1e-5


class Always(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.training = True
        return super().forward(x)


class Half(nn.Module):
    """A number that is 0 in evaluation and no probability."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) + (0.5 if self.training else 0.0)


@pytest.mark.parametrize("training", [False, True])
def test_other_numbers_do_not_follow(training: bool) -> None:
    model, x = Half().train(training), torch.randn(2, 3, 8)
    net = torch2needle.convert(model, example=(x,))
    assert net._only is training
    np.testing.assert_allclose(net(ndl.Tensor(x.numpy())).numpy(), model(x).detach().numpy(), atol=1e-5)


def test_attention_that_always_drops_is_refused() -> None:
    with pytest.raises(torch2needle.ConversionError, match=r"pass dropout_p=p if self\.training else 0\.0"):
        torch2needle.convert(Always(0.5), example=(torch.randn(2, 3, 8),))


class LayerDrop(nn.Module):
    """As fairseq and transformers have it: whole layers are left out of some steps."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.layers = p, nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.p:
                    continue
            x = x + layer(x)
        return x


def test_branches_on_random_numbers_are_no_guards() -> None:
    """A net that held for one draw would refuse nearly every call."""
    x = torch.randn(2, 3, 8)
    with pytest.raises(torch2needle.ConversionError, match="asks random numbers, which answer otherwise at every call"):
        torch2needle.convert(LayerDrop(0.5).train(), example=(x,))
    model = LayerDrop(0.5).eval()
    net = torch2needle.convert(model, example=(x,))
    assert net._only is False
    np.testing.assert_allclose(net(ndl.Tensor(x.numpy())).numpy(), model(x).detach().numpy(), atol=1e-5)


class NeedsLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: Any = None) -> torch.Tensor:
        if self.training:
            return F.mse_loss(self.q(x), labels)
        return self.q(x if x.is_cuda else x * 1.0)


def test_a_model_that_the_example_does_not_train_holds_for_evaluation() -> None:
    net = torch2needle.convert(NeedsLabels().eval(), example=(torch.randn(2, 3, 8),))
    assert net.report.capture.startswith("torch.export") and net._only is False
