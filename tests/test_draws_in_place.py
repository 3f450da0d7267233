"""Numbers that a forward draws into tensors, and samples of torch.distributions: quantiles as torch's, new at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributions as td  # noqa: E402

import torch2needle  # noqa: E402
from conversion import Calls  # noqa: E402

LOC = torch.zeros(4000)
DRAWS: dict[str, Callable[[Any], Any]] = {
    "Normal": lambda x: td.Normal(x + 1, x.exp() * 2).rsample(),
    "Exponential": lambda x: td.Exponential(x.exp() * 2).rsample(),
    "Laplace": lambda x: td.Laplace(x, 2.0).rsample(),
    "Cauchy": lambda x: td.Cauchy(x, 0.5).rsample().clamp(-5, 5),
    "Geometric": lambda x: td.Geometric(logits=x).sample(),
    "Gamma": lambda x: td.Gamma(x.exp() * 2, 1.0).sample(),
    "Gamma of small shape": lambda x: td.Gamma(x.exp() * 0.3, x + 2).sample(),
    "Beta": lambda x: td.Beta(x + 2, x + 0.5).sample(),
    "Dirichlet": lambda x: td.Dirichlet((x + 0.5).unsqueeze(-1).expand(-1, 3).contiguous()).sample()[:, 1],
    "Poisson": lambda x: td.Poisson(x.exp() * 20).sample(),
    "Binomial": lambda x: td.Binomial(50, x.sigmoid()).sample(),
    "poisson of a constant": lambda x: x + torch.poisson(torch.full((4000,), 30.0)),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 3.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-2, to=3.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(3.0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.1, 0.4),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3) + torch.empty_like(x).bernoulli_(x.sigmoid()),
    "random_": lambda x: torch.empty_like(x).random_(5) + torch.empty_like(x, dtype=torch.int64).random_(2),
    "normal": lambda x: torch.normal(x, x.exp()) + torch.normal(x, 2.0) + torch.normal(1.0, x.exp()),
    "normal of a size": lambda x: x + torch.normal(1.0, 2.0, size=(x.shape[0],)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_as_torch_in_distribution(name: str) -> None:
    model = Calls(DRAWS[name]).eval()
    net = torch2needle.convert(model, (LOC,))
    first, second, theirs = net(LOC).numpy(), net(LOC).numpy(), model(LOC).numpy()
    assert (first != second).any() and first.dtype == theirs.dtype
    got, want = (np.quantile(v, (0.1, 0.3, 0.5, 0.7, 0.9)) for v in (first, theirs))
    spread = want[-1] - want[0]
    np.testing.assert_allclose(
        got, want, atol=max(0.1 * spread, 1.0 if theirs.max() > 3 and (theirs % 1 == 0).all() else 0)
    )


@pytest.mark.parametrize(
    "name",
    [
        *("normal_", "uniform_", "exponential_", "geometric_", "random_", "normal"),
        "Gamma",
        "Beta",
        "Poisson",
        "Binomial",
    ],
)
def test_in_double(name: str) -> None:
    model, x = Calls(DRAWS[name]).eval(), LOC[:9].double()
    assert torch2needle.convert(model, (x,))(x).dtype == "float64"


def test_a_sample_passes_gradients_to_what_it_is_moved_by() -> None:
    x = torch.ones(3, requires_grad=True)
    net = torch2needle.convert(Calls(lambda x: td.Normal(x * 3, x.exp()).rsample()).eval(), (x.detach(),))
    import needle as ndl

    mine = ndl.Tensor(np.zeros(3, "float32"))
    out = net(mine)
    ndl.ops.summation(out).backward()
    np.testing.assert_allclose(mine.grad.numpy(), 3 + out.numpy(), rtol=1e-5)  # exp(0) = 1 = its slope


def test_draws_that_gradients_do_not_follow() -> None:
    import needle as ndl

    x = torch.ones(3)
    net = torch2needle.convert(Calls(lambda x: td.Gamma(x, x).rsample()).eval(), (x,))
    with pytest.raises(ndl.autograd.Unsupported, match=r"\[gamma\] a draw passes no gradients to its parameters"):
        ndl.ops.summation(net(ndl.Tensor(x.numpy()))).backward()
    net = torch2needle.convert(Calls(torch.poisson).eval(), (x,))
    with pytest.raises(ndl.autograd.Unsupported, match=r"\[poisson\] a plan draws no poisson numbers"):
        ndl.compile(net, (x,))


def test_a_training_step_draws_gammas() -> None:
    """Mixtures of pairs of rows, with gradients beside the share that is drawn."""
    import needle as ndl

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 2)

        def forward(self, x: Any) -> Any:
            share = td.Beta(0.4, 0.4).sample((x.shape[0], 1))
            return self.head(share * x + (1 - share) * x.flip(0))

    x = torch.randn(6, 3)
    net = torch2needle.convert(Mixed(), (x,))
    optimizer = ndl.optim.SGD(net.parameters(), 0.0)
    step = ndl.compile_step(net, lambda a, b: ndl.ops.mean((a - b) ** 2), optimizer, (x, torch.zeros(6, 2)))
    losses = [float(step(x, torch.zeros(6, 2)).numpy()) for _ in range(3)]
    assert len(set(losses)) == 3
