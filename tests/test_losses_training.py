"""Losses of sequences, and in training: beside torch, in compiled steps and layers, and the page on them."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import needle as ndl
from needle import nn, ops
from needle.autograd import Tensor
from needle.ops.common import vjp
from test_losses import PLACES, SAMPLES, compiled, placed

pytestmark = pytest.mark.filterwarnings("ignore:.*target size.*", "ignore:reduction. 'mean'")

# -- sequences ---------------------------------------------------------------------------------------------------------

SEQUENCES: list[tuple[Any, ...]] = [  # sizes of log-probabilities, labels, lengths, options
    ((5, 2, 4), [[1, 2, 2], [3, 1, 1]], [5, 4], [3, 1], {}),
    ((5, 2, 4), [[1, 2, 2], [3, 1, 1]], [5, 4], [3, 0], {"blank": 0, "reduction": "sum"}),
    ((6, 2, 4), [[1, 0, 0], [2, 1, 2]], [4, 6], [3, 3], {"blank": 3, "reduction": "none"}),
    ((5, 3, 4), [1, 2, 3, 1, 3, 2], [5, 4, 5], [2, 1, 3], {"reduction": "none"}),
    ((4, 2, 3), [[1, 1, 1], [2, 1, 1]], [4, 4], [3, 1], {"reduction": "none", "zero_infinity": True}),
    ((4, 2, 3), [[1, 1, 1], [2, 1, 1]], [2, 4], [3, 2], {"zero_infinity": True}),
    ((4, 3, 3), [[1, 1, 1], [2, 1, 1], [2, 2, 1]], [4, 4, 0], [3, 3, 0], {"reduction": "none"}),
    ((4, 2, 3), [[1, 1, 1], [2, 1, 1]], [4, 4], [3, 1], {"reduction": "sum"}),
    ((5, 4), [1, 2, 2], 5, 3, {}),
    ((1, 1, 2), [[1]], [1], [1], {}),
    ((7, 3, 2), [[1, 1], [1, 1], [1, 1]], [7, 6, 5], [2, 1, 0], {"reduction": "sum"}),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("shape, labels, read, written, options", SEQUENCES)
def test_sequences(
    shape: Any, labels: Any, read: Any, written: Any, options: dict[str, Any], raw: bool, place: str
) -> None:
    """Also of numbers that no log_softmax made: torch's gradients are those behind one."""
    x = np.random.randn(*shape)
    theirs = torch.tensor(x, requires_grad=True)
    lengths = [torch.tensor(v) for v in (labels, read, written)]
    want = F.ctc_loss(theirs if raw else theirs.log_softmax(-1), *lengths, **options)
    ours = placed(x, *PLACES[place], True)
    got = ops.ctc_loss(ours if raw else ops.log_softmax(ours), labels, read, written, **options)
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-10, atol=1e-12)
    want.sum().backward()
    (gradient,) = vjp(got, Tensor(np.ones(got.shape), device=ours.device, dtype="float64"), [ours])
    np.testing.assert_allclose(gradient.numpy(), theirs.grad.numpy(), rtol=1e-8, atol=1e-10)


def test_sequences_that_do_not_fit() -> None:
    x = ops.log_softmax(Tensor(np.zeros((4, 2, 3)), dtype="float32"))
    assert np.isinf(ops.ctc_loss(x, [[1, 1, 1], [2, 1, 1]], [4, 4], [3, 1], reduction="none").numpy()).tolist() == [
        True,
        False,
    ]
    for labels, read, written, text in (
        ([[1, 2], [3, 1]], [4, 4], [2, 2], "index expects 0 to 2, got 3"),
        ([[1, 2], [1, 1]], [4, 5], [2, 2], "input_lengths expects numbers from 0 to 4, got 5"),
        ([[1, 2], [1, 1]], [4, 4], [2, 3], "target_lengths expects numbers from 0 to 2, got 3"),
        ([[1, 2]], [4, 4], [2, 2], "expects targets and lengths of 2, got (1, 2), (2,) and (2,)"),
    ):
        with pytest.raises((ValueError, IndexError), match=re.escape(f"[ctc_loss] {text}.")):
            ops.ctc_loss(x, labels, read, written)


# -- training ----------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(7)
N, CLASSES = 6, 4
LABELS, SIGNS = RNG.integers(0, CLASSES, N), RNG.choice([-1.0, 1.0], N)
SHARES, OTHER = RNG.dirichlet(np.ones(CLASSES), N), RNG.normal(size=(N, CLASSES))
HOLES, WEIGHTS = np.where(np.arange(N) % 3 == 1, -100, LABELS), RNG.random(CLASSES) + 0.5
MANY = np.sign(OTHER)
Trained = dict[str, tuple[Callable[[Any, Any, Any, Any], Any], np.ndarray]]

# m: needle.ops or torch.nn.functional; c: numbers as a constant there.
TRAINED: Trained = {
    "cross_entropy": (lambda m, c, z, y: m.cross_entropy(z, y), LABELS),
    "cross_entropy-ignored": (lambda m, c, z, y: m.cross_entropy(z, y), HOLES),
    "cross_entropy-class-ignored": (lambda m, c, z, y: m.cross_entropy(z, y, ignore_index=1, reduction="sum"), LABELS),
    "cross_entropy-weighted": (lambda m, c, z, y: m.cross_entropy(z, y, weight=c(WEIGHTS)), HOLES),
    "cross_entropy-smoothed": (
        lambda m, c, z, y: m.cross_entropy(z, y, weight=c(WEIGHTS), label_smoothing=0.1),
        HOLES,
    ),
    "cross_entropy-shares": (lambda m, c, z, y: m.cross_entropy(z, y, label_smoothing=0.1), SHARES),
    "cross_entropy-pixels": (
        lambda m, c, z, y: m.cross_entropy(z.reshape((2, 4, 3)), y.reshape((2, 3))),
        HOLES,
    ),
    "nll_loss": (lambda m, c, z, y: m.nll_loss(m.log_softmax(z, 1), y, weight=c(WEIGHTS)), HOLES),
    "multi_margin_loss": (lambda m, c, z, y: m.multi_margin_loss(z, y, p=2, weight=c(WEIGHTS)), LABELS),
    "binary_cross_entropy": (lambda m, c, z, y: m.binary_cross_entropy(z.sigmoid(), y, weight=c(WEIGHTS)), SHARES),
    "binary_cross_entropy_with_logits": (
        lambda m, c, z, y: m.binary_cross_entropy_with_logits(z, y, pos_weight=c(WEIGHTS)),
        SHARES,
    ),
    "multilabel_soft_margin_loss": (lambda m, c, z, y: m.multilabel_soft_margin_loss(z, y, c(WEIGHTS)), SHARES),
    "mse_loss": (lambda m, c, z, y: m.mse_loss(z, y), OTHER),
    "l1_loss": (lambda m, c, z, y: m.l1_loss(z, y), OTHER),
    "smooth_l1_loss": (lambda m, c, z, y: m.smooth_l1_loss(z, y, beta=0.4), OTHER),
    "huber_loss": (lambda m, c, z, y: m.huber_loss(z, y, delta=0.4), OTHER),
    "kl_div": (lambda m, c, z, y: m.kl_div(m.log_softmax(z, 1), y, reduction="batchmean"), SHARES),
    "poisson_nll_loss": (lambda m, c, z, y: m.poisson_nll_loss(z, y, full=True), np.floor(np.abs(OTHER) * 3)),
    "gaussian_nll_loss": (lambda m, c, z, y: m.gaussian_nll_loss(z, y, z * z + 0.1, full=True), OTHER),
    "soft_margin_loss": (lambda m, c, z, y: m.soft_margin_loss(z, y), MANY),
    "hinge_embedding_loss": (lambda m, c, z, y: m.hinge_embedding_loss(z * z, y), MANY),
    "margin_ranking_loss": (lambda m, c, z, y: m.margin_ranking_loss(z, z * z, y, margin=0.2), MANY),
    "cosine_embedding_loss": (lambda m, c, z, y: m.cosine_embedding_loss(z, c(OTHER), y, margin=-0.5), SIGNS),
    "triplet_margin_loss": (
        lambda m, c, z, y: m.triplet_margin_loss(z, y, c(OTHER[::-1].copy()), swap=True),
        OTHER,
    ),
}


LENGTHS = np.array([2, 1])
TRAINED["ctc_loss"] = (
    lambda m, c, z, y: m.ctc_loss(m.log_softmax(z, 1).reshape((3, 2, 4)), y, c(LENGTHS * 0 + 3), c(LENGTHS)),
    np.array([[1, 2], [3, 3]]),
)


def needle_net(dtype: str) -> nn.Module:
    rng = np.random.default_rng(3)
    net = nn.Sequential(nn.Linear(5, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, CLASSES, dtype=dtype))
    for p in net.parameters():
        p.data = Tensor(rng.normal(size=p.shape) * 0.5, dtype=dtype)
    return net


def torch_net() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES)).double()
    with torch.no_grad():
        for theirs, ours in zip(net.parameters(), needle_net("float64").parameters(), strict=True):
            theirs.copy_(torch.tensor(ours.numpy()).T.reshape(theirs.shape))
    return net


def typed(y: np.ndarray, dtype: str) -> np.ndarray:
    return y if y.dtype.kind == "i" else y.astype(dtype)


def test_every_loss_is_trained() -> None:
    assert {"ctc_loss", *(s.name for s in SAMPLES)} == {name.partition("-")[0] for name in TRAINED}


@pytest.mark.parametrize("name", TRAINED)
def test_twenty_steps_beside_torch(name: str) -> None:
    f, y = TRAINED[name]
    x = np.random.default_rng(1).normal(size=(N, 5))
    theirs, ours = torch_net(), needle_net("float64")
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1), ndl.optim.SGD(ours.parameters(), lr=0.1)
    given = Tensor(x, dtype="float64", requires_grad=False)
    labels = Tensor(y, dtype=str(y.dtype), requires_grad=False)
    constant = lambda a: Tensor(a, dtype="float64" if a.dtype.kind == "f" else "int64", requires_grad=False)  # noqa: E731
    for _ in range(20):
        for optimizer in sgd:
            optimizer.zero_grad() if optimizer is sgd[0] else optimizer.reset_grad()
        want = f(F, torch.tensor, theirs(torch.tensor(x)), torch.tensor(y))
        got = f(ops, constant, ours(given), labels)
        np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-9)
        want.backward(), got.backward()
        sgd[0].step(), sgd[1].step()


@compiled
@pytest.mark.parametrize("name", TRAINED)
def test_compiled_steps_are_the_eager_ones(name: str) -> None:
    f, y = TRAINED[name]
    x = np.random.default_rng(1).normal(size=(N, 5)).astype("float32")
    y, constant = typed(y, "float32"), lambda a: Tensor(typed(a, "float32"), requires_grad=False)
    loss = lambda z, y: f(ops, constant, z, y)  # noqa: E731
    one, two = needle_net("float32"), needle_net("float32")
    sgd = ndl.optim.SGD(two.parameters(), lr=0.1)
    step = ndl.compile_step(one, loss, ndl.optim.SGD(one.parameters(), lr=0.1), (x, y))
    labels = Tensor(y, dtype=str(y.dtype), requires_grad=False)
    for _ in range(2):
        two.reset_grad()
        want = loss(two(Tensor(x, requires_grad=False)), labels)
        want.backward()
        sgd.step()
        np.testing.assert_allclose(np.asarray(step(x, y)), want.numpy(), rtol=1e-5, atol=1e-6)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


@compiled
def test_the_plain_case_keeps_its_kernels() -> None:
    net = needle_net("float32")
    x = np.zeros((N, 5), "float32")
    step = ndl.compile_step(net, ops.cross_entropy, ndl.optim.SGD(net.parameters(), lr=0.1), (x, LABELS))
    assert {"cross_entropy", "cross_entropy_grad"} <= set(step.plan.names)


@compiled
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss", "multi_margin_loss"])
def test_a_number_that_is_no_class_gives_nan_in_executables(name: str) -> None:
    x, y = np.random.randn(4, 3).astype("float32"), np.array([0, 1, 2, 1])
    exe = ndl.compile(lambda x, y: getattr(ops, name)(x, y, reduction="none"), (x, y))
    for label in (-1, 3, 1 << 40, -(1 << 40)):
        y[1] = label
        assert np.isnan(exe(x, y)).tolist() == [False, True, False, False]
    if name != "multi_margin_loss":
        y[1] = -100
        assert np.asarray(exe(x, y))[1] == 0


# -- layers ------------------------------------------------------------------------------------------------------------


def test_weights_of_layers() -> None:
    for given in ([1.0, 2.0], np.array([1, 2]), torch.tensor([1.0, 2.0]), Tensor([1.0, 2.0], dtype="float64")):
        layer = nn.CrossEntropyLoss(given)
        assert list(layer.state_dict()) == ["weight"] and layer.parameters() == []
        np.testing.assert_array_equal(layer.weight.numpy(), [1.0, 2.0])
        loss = layer(Tensor(np.zeros((2, 2)), dtype="float32"), [0, 1])
        np.testing.assert_allclose(loss.numpy(), np.log(2), rtol=1e-6)
    assert repr(nn.CrossEntropyLoss(ignore_index=1)) == repr(nn.CrossEntropyLoss(None, 1))


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "losses.md"


@compiled
def test_page() -> None:
    """docs/losses.md, followed literally: its Python blocks run in order."""
    text = PAGE.read_text()
    module = types.ModuleType("losses")
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        line = text[: found.start(1)].count("\n")
        exec(compile("\n" * line + found[1], str(PAGE), "exec"), module.__dict__)
    names = set(re.findall(r"`(\w+(?:_loss|_entropy|Loss))`", text))
    assert "cross_entropy" in names and [n for n in names if not hasattr(ops, n) and not hasattr(nn, n)] == []
