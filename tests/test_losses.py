"""Losses against torch in float64: values and gradients, corners, errors."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import needle as ndl
from needle import nn, ops
from needle.autograd import Tensor
from needle.backend_selection import BACKEND
from needle.ops.common import vjp

pytestmark = pytest.mark.filterwarnings("ignore:.*target size.*", "ignore:reduction. 'mean'")
compiled = pytest.mark.skipif(BACKEND == "np", reason="compiles")
REDUCTIONS = ("mean", "sum", "none")


class Sample(NamedTuple):
    """A call: inputs and tensor arguments as (kind, shape), and options."""

    name: str
    inputs: list[tuple[str, tuple[int, ...]]]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        inputs = ",".join(f"{kind}{'x'.join(map(str, shape))}" for kind, shape in self.inputs)
        return "-".join([self.name, inputs, *self.tensors, *(f"{k}={v}" for k, v in self.options.items())])


CORNERS = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-7, -1e-7, 2.0, 30.0, -30.0, 700.0, -700.0])


def draw(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values: labels below the number after the name, some of them also the number after that."""
    kind, *numbers = kind.split("/")
    if kind == "labels":
        made = rng.integers(0, int(numbers[0]), shape)
        for ignored in numbers[1:]:
            made = np.where(rng.random(shape) < 0.4, int(ignored), made)
        return np.asarray(made)
    if kind == "ignored":
        return np.full(shape, int(numbers[0]))
    if kind == "signs":
        return np.asarray(rng.choice([-1.0, 1.0], shape))
    if kind == "counts":
        return np.asarray(rng.integers(0, 6, shape).astype("float64"))
    if kind == "corners":
        return np.asarray(rng.choice(CORNERS, shape))
    if kind == "edges":  # of probabilities
        return np.asarray(rng.choice([0.0, 1.0, 0.5, 1e-13, 1e-300, 1 - 1e-12, 0.25], shape))
    made = rng.normal(size=shape)
    return np.asarray(
        {"real": made, "positive": np.abs(made) + 0.1, "p": 1 / (1 + np.exp(-made)), "small": np.abs(made) * 1e-6}[kind]
    )


def class_samples() -> Iterator[Sample]:
    shapes = [(7, 5), (1, 1), (5,), (2, 3, 2, 3), (0, 3), (2, 3, 0)]
    for shape, reduction in itertools.product(shapes, REDUCTIONS):
        places = shape[:1] * (len(shape) > 1) + shape[2:]
        classes = shape[1] if len(shape) > 1 else shape[0]
        kinds: list[tuple[str, int | None]] = [("labels/{}", None)]
        if 0 not in shape:  # nothing can be ignored of nothing
            kinds += [("labels/{}/-100", None), ("labels/{}", 0), ("ignored/7", 7)]
        for weighted, (kind, ignore), smooth in itertools.product((False, True), kinds, (0, 0.3, 1)):
            options = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
            tensors = {"weight": ("positive", (classes,))} if weighted else {}
            inputs = [("real", shape), (kind.format(classes), places)]
            if not smooth:
                yield Sample("nll_loss", inputs, tensors, options)
            yield Sample("cross_entropy", inputs, tensors, options | ({"label_smoothing": smooth} if smooth else {}))
            if ignore is None and "-100" not in kind:
                probabilities = [("real", shape), ("p", shape)]
                yield Sample("cross_entropy", probabilities, tensors, options | {"label_smoothing": smooth})
    for shape, reduction, weighted in itertools.product([(7, 5), (1, 4), (3, 1), (5,)], REDUCTIONS, (False, True)):
        tensors = {"weight": ("positive", shape[-1:])} if weighted else {}
        inputs = [("real", shape), (f"labels/{shape[-1]}", shape[:-1])]
        for options in ({}, {"p": 2}, {"margin": 0.2}):
            yield Sample("multi_margin_loss", inputs, tensors, options | {"reduction": reduction})


SHAPES: list[tuple[int, ...]] = [(4, 5), (1, 1), (3,), (), (2, 3, 4), (0, 3)]


def number_samples() -> Iterator[Sample]:
    target: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "mse_loss": ("real", [{}]),
        "l1_loss": ("real", [{}]),
        "smooth_l1_loss": ("real", [{}, {"beta": 0.3}, {"beta": 0.0}]),
        "huber_loss": ("real", [{}, {"delta": 0.3}]),
        "kl_div": ("positive", [{}]),
        "poisson_nll_loss": ("counts", [{}, {"full": True}, {"eps": 1e-3}]),
        "hinge_embedding_loss": ("signs", [{}, {"margin": 0.3}]),
        "soft_margin_loss": ("signs", [{}]),
        "binary_cross_entropy_with_logits": ("p", [{}]),
    }
    for (name, (kind, choices)), shape, reduction in itertools.product(target.items(), SHAPES, REDUCTIONS):
        for options in choices:
            yield Sample(name, [("real", shape), (kind, shape)], {}, options | {"reduction": reduction})
        if name in ("mse_loss", "l1_loss", "huber_loss"):
            weight = {"weight": ("positive", shape)}
            yield Sample(name, [("real", shape), ("real", shape)], weight, {"reduction": reduction})
    for name, reduction in itertools.product(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), REDUCTIONS):
        yield Sample(name, [("real", (4, 1)), ("real", (3, 1, 5))], {}, {"reduction": reduction})
    for shape, reduction in itertools.product(SHAPES, (*REDUCTIONS, "batchmean")):
        yield Sample("kl_div", [("real", shape), ("real", shape)], {}, {"log_target": True, "reduction": reduction})
        if reduction == "batchmean":
            yield Sample("kl_div", [("real", shape), ("positive", shape)], {}, {"reduction": reduction})
    for shape, reduction in itertools.product(SHAPES, REDUCTIONS):
        rates = {"log_input": False, "reduction": reduction}
        yield Sample("poisson_nll_loss", [("positive", shape), ("counts", shape)], {}, rates | {"full": True})
        yield Sample("binary_cross_entropy", [("p", shape), ("p", shape)], {}, {"reduction": reduction})
        weight = {"weight": ("positive", shape[-1:])}
        yield Sample("binary_cross_entropy", [("p", shape), ("p", shape)], weight, {"reduction": reduction})
        name = "binary_cross_entropy_with_logits"
        yield Sample(name, [("real", shape), ("p", shape)], weight, {"reduction": reduction})
        both = weight | {"pos_weight": ("positive", shape[-1:])}
        yield Sample(name, [("real", shape), ("p", shape)], both, {"reduction": reduction})
        yield Sample("gaussian_nll_loss", [("real", shape), ("real", shape), ("positive", shape)], {}, {"full": True})
        if shape:
            name = "multilabel_soft_margin_loss"
            yield Sample(name, [("real", shape), ("p", shape)], {}, {"reduction": reduction})
            yield Sample(name, [("real", shape), ("p", shape)], weight, {"reduction": reduction})
            options = {"eps": 0.5, "reduction": reduction}
            for var in (shape[:-1], (*shape[:-1], 1)):
                yield Sample("gaussian_nll_loss", [("real", shape), ("real", shape), ("positive", var)], {}, options)


def pair_samples() -> Iterator[Sample]:
    for reduction, shape in itertools.product(REDUCTIONS, SHAPES):
        three = [("real", shape), ("real", shape), ("signs", shape)]
        for options in ({}, {"margin": 0.5}):
            yield Sample("margin_ranking_loss", three, {}, options | {"reduction": reduction})
        if not shape:
            continue
        triple = [("real", shape)] * 3
        choices: list[dict[str, Any]] = [
            {},
            {"swap": True},
            {"p": 1, "margin": 3.0},
            {"p": 3.0, "eps": 1e-2, "swap": True},
            {"p": float("inf")},
        ]
        for options in choices:
            if not (options.get("p") == float("inf") and 0 in shape):
                yield Sample("triplet_margin_loss", triple, {}, options | {"reduction": reduction})
        if len(shape) < 3:
            embedded = [("real", shape), ("real", shape), ("signs", shape[:-1])]
            for options in ({}, {"margin": 0.3}, {"margin": -0.5}):
                yield Sample("cosine_embedding_loss", embedded, {}, options | {"reduction": reduction})
    broadcast = [("real", (4, 1)), ("real", (1, 5)), ("signs", (4, 5))]
    yield Sample("margin_ranking_loss", broadcast, {}, {"margin": 0.1})
    yield Sample("triplet_margin_loss", [("real", (2, 1, 5)), ("real", (1, 3, 5)), ("real", (2, 3, 5))])


def corner_samples() -> Iterator[Sample]:
    """Ties, large numbers, saturated probabilities."""
    for seed in range(3):
        shape = (5, 3 + seed)
        two = [("corners", shape), ("corners", shape)]
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
            yield Sample(name, two)
            yield Sample(name, two, {}, {"reduction": "none"})
        signs = [("corners", shape), ("signs", shape)]
        yield Sample("hinge_embedding_loss", signs, {}, {"reduction": "none"})
        yield Sample("margin_ranking_loss", [*two, ("signs", shape)], {}, {"margin": float(seed), "reduction": "none"})
        yield Sample("binary_cross_entropy", [("edges", shape), ("edges", shape)], {}, {"reduction": "none"})
        yield Sample(
            "binary_cross_entropy_with_logits", [("corners", shape), ("edges", shape)], {}, {"reduction": "none"}
        )
        yield Sample("multilabel_soft_margin_loss", [("corners", shape), ("edges", shape)])
        labels = [("corners", shape), (f"labels/{shape[1]}/-1", shape[:1])]
        for smooth in (0.0, 0.1):
            options = {"ignore_index": -1, "reduction": "none", "label_smoothing": smooth}
            yield Sample("cross_entropy", labels, {}, options)
        yield Sample(
            "multi_margin_loss", [("corners", shape), (f"labels/{shape[1]}", shape[:1])], {}, {"reduction": "none"}
        )
        yield Sample(
            "gaussian_nll_loss", [("real", shape), ("real", shape), ("small", shape)], {}, {"reduction": "none"}
        )
        yield Sample("cosine_embedding_loss", [("corners", shape), ("real", shape), ("signs", shape[:1])])
        yield Sample(
            "triplet_margin_loss", [("corners", shape)] * 3, {}, {"eps": 0.0, "reduction": "none", "swap": True}
        )


SAMPLES = [*class_samples(), *number_samples(), *pair_samples(), *corner_samples()]
PLACES = {"numpy": (ndl.cpu_numpy(), False), "dense": (ndl.cpu(), False), "strided": (ndl.cpu(), True)}


def placed(a: np.ndarray, device: Any, strided: bool, grad: bool) -> Tensor:
    """A leaf with the values, on the CPU also as a view with holes."""
    if strided and a.ndim:
        wide = ndl.NDArray(np.repeat(a, 2, axis=-1), dtype=str(a.dtype))[..., ::2]
        return Tensor.make_const(wide, requires_grad=grad)
    return Tensor(a, device=device, dtype=str(a.dtype), requires_grad=grad)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", sorted({s.name for s in SAMPLES}))
def test_agrees_with_torch(name: str, place: str) -> None:
    for number, sample in enumerate(s for s in SAMPLES if s.name == name):
        try:
            agrees(sample, np.random.default_rng(number), *PLACES[place])
        except AssertionError as e:
            raise AssertionError(f"{sample}: {e}") from None


def agrees(sample: Sample, rng: np.random.Generator, device: Any, strided: bool) -> None:
    arrays = [draw(kind, shape, rng) for kind, shape in sample.inputs]
    tensors = {k: draw(*v, rng) for k, v in sample.tensors.items()}
    grads = [
        kind not in ("signs", "counts") and a.dtype.kind == "f"
        for (kind, _), a in zip(sample.inputs, arrays, strict=True)
    ]
    theirs = [torch.tensor(a, requires_grad=g) for a, g in zip(arrays, grads, strict=True)]
    want = getattr(F, sample.name)(*theirs, **{k: torch.tensor(v) for k, v in tensors.items()}, **sample.options)
    ours = [placed(a, device, strided, g) for a, g in zip(arrays, grads, strict=True)]
    named = {k: placed(v, device, strided, False) for k, v in tensors.items()}
    got = getattr(ops, sample.name)(*ours, **named, **sample.options)
    assert (got.shape, got.dtype) == (tuple(want.shape), "float64")
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-10, atol=1e-12)
    weight = np.asarray(rng.normal(size=want.shape))
    want.backward(torch.tensor(weight))
    found = vjp(got, Tensor(weight, device=device, dtype="float64", requires_grad=False), ours)
    for g, t in zip(found, theirs, strict=True):
        if t.requires_grad:
            assert t.grad is not None
            here = np.zeros(t.shape) if g is None else g.numpy()
            np.testing.assert_allclose(here, t.grad.numpy(), rtol=1e-8, atol=1e-11)


# -- corners of classes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("options", [{}, {"weight": [1.0, 2.0, 3.0]}], ids=["plain", "weighted"])
def test_where_all_are_ignored_the_mean_is_nan(name: str, options: dict[str, Any]) -> None:
    x = Tensor(np.random.randn(2, 3))
    loss = getattr(ops, name)(x, [-100, -100], **options)
    (gradient,) = vjp(loss, Tensor(1.0, dtype=loss.dtype, device=loss.device), [x])
    assert np.isnan(loss.numpy()) and getattr(ops, name)(x, [-100, -100], reduction="sum", **options).numpy() == 0
    assert np.isnan(gradient.numpy()).all() or (gradient.numpy() == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"weight": [1.0, 2.0, 3.0]}, {"label_smoothing": 0.1}], ids=str)
def test_infinite_logits(options: dict[str, Any], place: str, dtype: str) -> None:
    inf, labels = math.inf, [1, 1, 1, 1, 0]
    x = np.array([[1, inf, 0], [inf, 1, 0], [-inf, 1, 0], [-inf, -inf, -inf], [-inf, 1, 2]], dtype)
    given = torch.tensor(x, requires_grad=True)
    weight = {k: torch.tensor(v, dtype=given.dtype) for k, v in options.items() if k == "weight"}
    want = F.cross_entropy(given, torch.tensor(labels), reduction="none", **(options | weight))
    want.backward(torch.ones_like(want))
    ours = placed(x, *PLACES[place], True)
    got = ops.cross_entropy(ours, labels, reduction="none", **options)
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-6)
    (gradient,) = vjp(got, Tensor(np.ones(5), device=got.device, dtype=dtype, requires_grad=False), [ours])
    rows = [2] if "label_smoothing" in options else [0, 1, 2, 3, 4]  # beside it torch's has 0 * inf of its own
    assert given.grad is not None
    np.testing.assert_allclose(gradient.numpy()[rows], given.grad.numpy()[rows], rtol=1e-6)


@pytest.mark.parametrize("labels", ["int32", "int64", "float32", "float64"])
def test_labels_of_any_dtype(labels: str) -> None:
    x, numbers = np.random.randn(4, 3), np.array([0, 2, -100, 1])
    want = F.cross_entropy(torch.tensor(x), torch.tensor(numbers), label_smoothing=0.2)
    for given in (numbers.astype(labels), Tensor(numbers, dtype=labels), numbers.astype(labels).tolist()):
        loss = ops.cross_entropy(Tensor(x, dtype="float64"), given, label_smoothing=0.2)
        np.testing.assert_allclose(loss.numpy(), want.numpy(), rtol=1e-12)


def test_probabilities_of_a_list_or_of_torch() -> None:
    x, p = np.random.randn(2, 3), [[0.2, 0.5, 0.3], [0.0, 0.0, 1.0]]
    want = F.cross_entropy(torch.tensor(x), torch.tensor(p, dtype=torch.float64))
    for given in (p, np.array(p), torch.tensor(p, dtype=torch.float64)):
        np.testing.assert_allclose(
            ops.cross_entropy(Tensor(x, dtype="float64"), given).numpy(), want.numpy(), rtol=1e-12
        )


def pair(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [Tensor(np.random.rand(*s) * 0.8 + 0.1, dtype="float32") for s in shapes]


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a label": (lambda: ops.cross_entropy(*pair((2, 3)), [0, 3]), "[cross_entropy] index expects 0 to 2, got 3."),
    "a negative label": (
        lambda: ops.cross_entropy(*pair((2, 3)), [0, -1]),
        "[cross_entropy] index expects 0 to 2, got -1.",
    ),
    "a label beside ignored ones": (
        lambda: ops.cross_entropy(*pair((3, 3)), [0, -100, 7]),
        "[cross_entropy] index expects 0 to 2, got 7.",
    ),
    "a fraction": (lambda: ops.nll_loss(*pair((2, 3)), [0.5, 1]), "[nll_loss] index expects whole numbers, got 0.5."),
    "a label of nll": (lambda: ops.nll_loss(*pair((2, 3)), [0, 3]), "[nll_loss] index expects 0 to 2, got 3."),
    "an ignored label": (
        lambda: ops.multi_margin_loss(*pair((2, 3)), [0, -100]),
        "[multi_margin_loss] index expects 0 to 2, got -100.",
    ),
    "shapes": (
        lambda: ops.cross_entropy(*pair((2, 3)), [0, 1, 2]),
        "[cross_entropy] expects logits (N, C) and labels (N,), got (2, 3) and (3,).",
    ),
    "shapes of nll": (
        lambda: ops.nll_loss(*pair((2, 3, 4)), [0, 1]),
        "[nll_loss] expects input (N, C) and labels (N,), got (2, 3, 4) and (2,).",
    ),
    "no axes": (
        lambda: ops.cross_entropy(Tensor(1.0), 0),
        "[cross_entropy] expects logits (N, C) and labels (N,), got () and ().",
    ),
    "axes of a margin": (
        lambda: ops.multi_margin_loss(*pair((2, 3, 4)), np.zeros((2, 4))),
        "[multi_margin_loss] input expects shape (N, C) or (C,), got (2, 3, 4).",
    ),
    "weights": (
        lambda: ops.cross_entropy(*pair((2, 3)), [0, 1], [1.0, 2.0]),
        "[cross_entropy] weight expects shape (3,), got (2,).",
    ),
    "a reduction for weights": (
        lambda: ops.cross_entropy(*pair((2, 3)), [0, 1], "sum"),
        "[cross_entropy] weight expects numbers, got sum.",
    ),
    "whole logits": (
        lambda: ops.cross_entropy(Tensor(np.ones((2, 3)), dtype="int64"), [0, 1]),
        "[cross_entropy] input expects floats, got int64.",
    ),
    "ignored probabilities": (
        lambda: ops.cross_entropy(*pair((2, 3), (2, 3)), ignore_index=1),
        "[cross_entropy] ignore_index expects class numbers as targets, got probabilities and 1.",
    ),
    "smoothing": (
        lambda: ops.cross_entropy(*pair((2, 3)), [0, 1], label_smoothing=1.5),
        "[cross_entropy] label_smoothing expects a number in [0, 1], got 1.5.",
    ),
    "a probability": (
        lambda: ops.binary_cross_entropy(Tensor([0.5, 1.5]), [0.0, 1.0]),
        "[binary_cross_entropy] input expects numbers in [0, 1], got 1.5.",
    ),
    "binary shapes": (
        lambda: ops.binary_cross_entropy(*pair((2, 3), (3,))),
        "[binary_cross_entropy] target expects shape (2, 3), got (3,).",
    ),
    "shapes of logits": (
        lambda: ops.binary_cross_entropy_with_logits(*pair((2, 3), (3,))),
        "[binary_cross_entropy_with_logits] target expects shape (2, 3), got (3,).",
    ),
    "broadcasting": (
        lambda: ops.mse_loss(*pair((2, 3), (4,))),
        "[mse_loss] shapes (2, 3), (4,) do not broadcast together.",
    ),
    "weights of squares": (
        lambda: ops.mse_loss(*pair((2, 3), (2, 3)), weight=[1.0]),
        "[mse_loss] weight expects shape (2, 3), got (1,).",
    ),
    "beta": (
        lambda: ops.smooth_l1_loss(*pair((2,), (2,)), beta=-1),
        "[smooth_l1_loss] beta expects a number of at least 0, got -1.",
    ),
    "delta": (
        lambda: ops.huber_loss(*pair((2,), (2,)), delta=0),
        "[huber_loss] delta expects a positive number, got 0.",
    ),
    "var": (
        lambda: ops.gaussian_nll_loss(*pair((2,), (2,)), [1.0, -2.0]),
        "[gaussian_nll_loss] var expects numbers of at least 0, got -2.",
    ),
    "shape of var": (
        lambda: ops.gaussian_nll_loss(*pair((2, 3), (2, 3), (3, 2))),
        "[gaussian_nll_loss] var expects shape (2, 3) or (2,), got (3, 2).",
    ),
    "ranks": (
        lambda: ops.margin_ranking_loss(*pair((2, 3), (2, 3), (2,))),
        "[margin_ranking_loss] expects inputs of one number of axes, got (2, 3), (2, 3), (2,).",
    ),
    "vectors": (
        lambda: ops.cosine_embedding_loss(*pair((2, 3), (2, 3), ())),
        "[cosine_embedding_loss] expects inputs (N, D) and target (N,), or (D,) and (), got (2, 3), (2, 3), ().",
    ),
    "margin": (
        lambda: ops.triplet_margin_loss(*pair((2, 3), (2, 3), (2, 3)), margin=0),
        "[triplet_margin_loss] margin expects a positive number, got 0.",
    ),
    "p": (
        lambda: ops.multi_margin_loss(*pair((2, 3)), [0, 1], p=3),
        "[multi_margin_loss] p expects 1 or 2, got 3.",
    ),
    "reduction of a layer": (
        lambda: nn.MSELoss("avg"),
        "[MSELoss] reduction expects mean, sum or none, got avg.",
    ),
    "weight of a layer": (
        lambda: nn.CrossEntropyLoss("none"),
        "[CrossEntropyLoss] weight expects numbers, got none.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_one_sentence(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises((ValueError, TypeError, IndexError)) as e:
        call()
    assert str(e.value) == text


@pytest.mark.parametrize("name", sorted({s.name for s in SAMPLES}))
def test_every_loss_knows_its_reductions(name: str) -> None:
    sample = next(s for s in SAMPLES if s.name == name)
    xs = [Tensor(draw(kind, shape, np.random.default_rng(0))) for kind, shape in sample.inputs]
    words = "mean, batchmean, sum or none" if name == "kl_div" else "mean, sum or none"
    with pytest.raises(ValueError, match=re.escape(f"[{name}] reduction expects {words}, got avg.")):
        getattr(ops, name)(*xs, reduction="avg")
