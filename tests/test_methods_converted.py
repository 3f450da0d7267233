"""Functions, and methods of models, converted as models: names of arguments and parameters, gradients, copies, refusals."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import needle as ndl

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import torch2needle  # noqa: E402


class Coder(nn.Module):
    """A model whose methods call one another, and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 6), nn.Linear(3, 8), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def encode(self, x: Any) -> Any:
        return self.first(self.norm(x)).chunk(2, -1)

    def decode(self, z: Any, gain: float = 2.0) -> Any:
        return torch.tanh(self.second(z)) * gain * self.scale

    def forward(self, x: Any) -> Any:
        return self.decode(self.encode(x)[0])

    def loss(self, x: Any, weight: Any = None) -> Any:
        found = F.mse_loss(self(x), x)
        return found if weight is None else found * weight

    def twice(self, x: Any, *, rounds: int = 2) -> dict[str, Any]:
        for _ in range(rounds):
            x = self.forward(x)
        return {"x": x}

    @staticmethod
    def halved(x: Any) -> Any:
        return x / 2

    @torch.no_grad()
    def embed(self, x: Any) -> Any:
        return F.normalize(self.encode(x)[1], dim=-1)


torch.manual_seed(0)
CODER = Coder().eval()
MIX = nn.Parameter(torch.randn(8, 8))
ROWS, CODES, SCORES = torch.randn(5, 8), torch.randn(5, 3), torch.randn(5, 4)
LABELS = torch.tensor([0, 3, 1, 2, 3])


def own_loss(scores: Any, labels: Any, smooth: float = 0.1) -> Any:
    return (
        F.cross_entropy(scores, labels, label_smoothing=smooth) + F.cosine_similarity(scores, scores.roll(1, 0)).mean()
    )


def through_globals(x: Any) -> Any:
    return CODER(x).softmax(-1) @ MIX


def through_another(x: Any) -> Any:
    return through_globals(x) * 2


def repeated(x: Any, rounds: int = 2) -> Any:
    return repeated(CODER(x), rounds - 1) if rounds else x


def closure(model: Any, temperature: float) -> Any:
    def scores(x: Any, *, k: int = 3) -> Any:
        return (model(x) / temperature).topk(k).values

    return scores


CASES: dict[str, tuple[Any, tuple]] = {
    "method": (CODER.encode, (ROWS,)),
    "method with a default": (CODER.decode, (CODES,)),
    "method that calls the model": (CODER.loss, (ROWS,)),
    "method that calls the model, weighted": (CODER.loss, (ROWS, torch.tensor(2.0))),
    "method that calls forward": (CODER.twice, (ROWS,)),
    "forward": (CODER.forward, (ROWS,)),
    "static method": (CODER.halved, (ROWS,)),
    "decorated method": (CODER.embed, (ROWS,)),
    "function": (own_loss, (SCORES, LABELS)),
    "torch's": (F.silu, (ROWS,)),
    "globals": (through_globals, (ROWS,)),
    "another function": (through_another, (ROWS,)),
    "itself": (repeated, (ROWS,)),
    "closure of a model": (closure(CODER, 0.5), (ROWS,)),
    "closure of a method": (closure(CODER.decode, 0.5), (CODES,)),
    "lambda": (lambda a, b: (a @ b.T).logsumexp(1), (ROWS, ROWS)),
    "partial": (functools.partial(F.cross_entropy, label_smoothing=0.2), (SCORES, LABELS)),
    "partial of a method": (functools.partial(CODER.decode, gain=3.0), (CODES,)),
    "branch": (lambda x: x * 2 if x.sum() > -1e9 else x, (ROWS,)),
}


@pytest.mark.parametrize("name", CASES)
def test_function_agrees(name: str) -> None:
    function, given = CASES[name]
    net = torch2needle.convert(function, given)
    assert torch2needle.verify(function, net, given)
    assert torch2needle.check(function, given).ok


@pytest.mark.parametrize("name", ["method", "globals", "another function", "partial of a method"])
def test_gradients_reach_what_the_function_looks_at(name: str) -> None:
    function, given = CASES[name]
    CODER.zero_grad()
    MIX.grad = None
    net = torch2needle.convert(function, given)
    theirs, ours = function(*given), net(*given)
    theirs, ours = (theirs[0], ours[0]) if isinstance(theirs, tuple) else (theirs, ours)
    (theirs * torch.arange(theirs.numel()).reshape(theirs.shape)).sum().backward()
    (ours * np.arange(theirs.numel(), dtype="float32").reshape(ours.shape)).sum().backward()
    found = dict(net.named_parameters())
    wanted = {n: p for n, p in (("MIX", MIX), *CODER.named_parameters()) if p.grad is not None}
    assert wanted
    for path, p in wanted.items():
        (mine,) = (v for n, v in found.items() if f".{n}".endswith(f".{path}"))
        np.testing.assert_allclose(mine.grad.numpy(), p.grad.numpy(), rtol=2e-5, atol=2e-5 * float(p.grad.abs().max()))


def test_methods_keep_the_models_names_and_inputs() -> None:
    net = torch2needle.convert(CODER.decode, {"z": CODES, "gain": 3.0})
    assert set(net.state_dict()) == set(CODER.state_dict())
    np.testing.assert_allclose(net(z=CODES).detach(), CODER.decode(CODES, 3.0).detach(), rtol=1e-6)
    other = Coder()
    other.load_state_dict(torch2needle.to_torch(net))
    assert type(CODER) is Coder
    assert CODER.forward(ROWS).shape == (5, 8)
    assert torch2needle.convert(closure(CODER, 1.0), (ROWS,)).input_names == ["x"]


def test_modes_are_the_models() -> None:
    model = Coder().train()
    net = torch2needle.convert(model.encode, (ROWS,))
    for training in (True, False):
        model.train(training)
        net.train(training)
        np.testing.assert_allclose(net(ROWS)[0].detach(), model.encode(ROWS)[0].detach(), rtol=1e-5, atol=1e-5)


def test_a_loss_in_torch_trains() -> None:
    model, loss = nn.Linear(8, 4), torch2needle.convert(own_loss, (SCORES, LABELS))
    net = torch2needle.convert(model)
    ours, theirs = ndl.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    step = ndl.compile_step(net, loss, ours, (ROWS, LABELS))
    for _ in range(3):
        theirs.zero_grad()
        value = own_loss(model(ROWS), LABELS)
        value.backward()
        theirs.step()
        assert abs(float(step(ROWS, LABELS)) - value.item()) < 1e-5


def test_compiled_and_answered_by_torch() -> None:
    exe = torch2needle.compile(CODER.encode, (ROWS,))
    np.testing.assert_allclose(exe(ROWS)[1], CODER.encode(ROWS)[1].detach(), rtol=1e-5, atol=1e-6)
    net = torch2needle.convert(lambda x: x * 2 if x.sum() > 0 else x, (ROWS.abs(),), on_guard="torch")
    np.testing.assert_array_equal(net(-ROWS.abs()).detach(), -ROWS.abs())


def test_functions_without_names_are_refused() -> None:
    with pytest.raises(TypeError, match="expects a function whose arguments have names"):
        torch2needle.convert(torch.relu, (ROWS,))
    with pytest.raises(TypeError, match=r"expects an nn\.Module, a function"):
        torch2needle.convert(3, (ROWS,))


def test_names_of_modules_that_are_none_of_a_model_and_its_modes() -> None:
    train, model = nn.Linear(8, 8), Coder().train()  # `train` is what modules have of their own
    net = torch2needle.convert(lambda x, /, *rest, _seed=None, **more: train(model.eval()(x) if rest else x), (ROWS,))
    assert {n.partition(".")[0] for n, _ in net.named_parameters()} == {"train_1", "model"}
    assert model.training
    np.testing.assert_allclose(net(ROWS).detach(), train(ROWS).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("name", ["method", "globals", "closure of a method", "lambda", "partial of a method"])
def test_other_sizes_than_the_examples(name: str, count: int) -> None:
    function, given = CASES[name]
    net, others = torch2needle.convert(function, given), tuple(torch.randn(count, *x.shape[1:]) for x in given)
    got, want = (r[0] if isinstance(r, tuple) else r for r in (net(*others), function(*others)))
    np.testing.assert_allclose(got.detach(), want.detach(), rtol=1e-5, atol=1e-5)
