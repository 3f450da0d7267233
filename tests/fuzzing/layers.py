"""Constructor arguments of layers, right and wrong: torch's results, or a refusal in one sentence where torch refuses, too."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import needle as ndl

from .frame import Wrong
from .layer_arguments import BY_NAME, ROWS, WILD, Row, arguments

NAME, SAMPLE, FULL, SECONDS = "layers", 3000, 20_000, 20
MEMORY = 4 << 30
TOLERANCE = 1e-5  # of the largest value
warnings.filterwarnings("ignore")


def draw(rng: random.Random) -> Any:
    row = rng.choice(ROWS)
    given = arguments(row, rng, rng.choice((0.0, 0.0, 0.2)))
    shape = row.shape(given, rng)
    if rng.random() < 0.05:
        shape = tuple(rng.choice((0, 1, 2, 3)) for _ in range(rng.choice((0, 1, 2, 3, 4))))
    return (row.torch, given, shape, rng.random() < 0.3, rng.getrandbits(16))


def smaller(case: Any) -> Iterable[Any]:
    name, given, shape, training, seed = case
    for key in given:
        if key not in BY_NAME[name].required:
            yield name, {k: v for k, v in given.items() if k != key}, shape, training, seed
    for i, size in enumerate(shape):
        if size > 1:
            yield name, given, (*shape[:i], size - 1, *shape[i + 1 :]), training, seed
    if training:
        yield name, given, shape, False, seed


def inputs(row: Row, given: dict[str, Any], shape: tuple[int, ...], rng: np.random.RandomState) -> list[torch.Tensor]:
    if row.kind == "index":
        count = given.get("num_embeddings")
        return [torch.tensor(rng.randint(0, max(count if type(count) is int else 3, 1), shape))]
    x = torch.tensor(np.asarray(rng.randn(*shape), "float64"))
    if row.kind == "attention":
        sizes = [given.get(k) if type(given.get(k)) is int else shape[-1] for k in ("kdim", "vdim")]
        return [x, *(torch.tensor(rng.randn(*shape[:-1], max(n, 0))) for n in sizes)]
    return [x]


def first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def check(case: Any) -> str:
    name, given, shape, training, seed = case
    row, rng = BY_NAME[name], np.random.RandomState(seed)
    random_layer = (
        "Dropout" in name or name == "RReLU" or any(given.get(k) for k in ("dropout",)) or "Transformer" in name
    )
    training = training and not random_layer
    xs = inputs(row, given, shape, rng)
    theirs: Any = None
    try:
        layer = getattr(torch.nn, name)(**given).train(training)
        for p in layer.parameters():
            p.data = torch.tensor(np.asarray(rng.randn(*p.shape), "float32"))
        single, double = layer, copy.deepcopy(layer).double()
        theirs = first(double(*xs)).detach()
        rough = first(copy.deepcopy(single)(*(x.float() if x.is_floating_point() else x for x in xs))).detach()
    except Exception as e:  # whatever torch raises is a refusal
        theirs, why = None, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    try:
        outs = run(row, given, xs, training, None if theirs is None else single)
    except Wrong:
        raise
    except Exception as e:
        text = str(e)
        if not (text.startswith("[") and text.endswith(".") and "\n" not in text) and not known(e):
            raise Wrong(f"no sentence: {type(e).__name__}: {text}") from None
        return "both refuse" if theirs is None else f"{name} refused alone: {text[:100]}"
    if theirs is None:
        if not all(np.isfinite(o).all() for o in outs):
            raise Wrong(f"torch refuses, ours gives what is not finite: {why}")
        for other in outs[1:]:
            compare("compiled", other, outs[0], outs[0])
        return f"{name} accepted alone: {why[:100]}"
    for form, got in zip(("eager", "compiled", "saved"), outs, strict=False):
        compare(form, got, theirs.numpy(), rough.double().numpy())
    return "agrees"


def known(e: Exception) -> bool:
    """Python's own sentence for a call that does not fit a signature."""
    return isinstance(e, TypeError) and "argument" in str(e)


def run(row: Row, given: dict[str, Any], xs: list[torch.Tensor], training: bool, source: Any) -> list[np.ndarray]:
    layer = getattr(ndl.nn, row.needle or row.torch)(**row.needles(given)).train(training)
    if source is not None:
        names, theirs = list(layer.state_dict()), source.state_dict()
        if sorted(names) != sorted(theirs):
            raise Wrong(f"parameters {names}, torch's are {list(theirs)}")
        layer.load_state_dict({k: v.numpy() for k, v in theirs.items()})
    arrays = [x.float().numpy() if x.is_floating_point() else x.numpy() for x in xs]
    compiled = None
    if not training:
        net = ndl.nn.Sequential(layer) if len(xs) == 1 else Several(layer)
        compiled = first(ndl.compile(net, tuple(arrays))(*arrays))
    out = first(layer(*(ndl.Tensor(a) for a in arrays)))
    return [np.asarray(o) if isinstance(o, np.ndarray) else o.numpy() for o in (out, compiled) if o is not None]


class Several(ndl.nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, a: Any, b: Any, c: Any) -> Any:
        return self.layer(a, b, c)


def compare(form: str, got: np.ndarray, want: np.ndarray, rough: np.ndarray) -> None:
    """`rough` is torch's own result in float32: where that is far from float64, ours may be as far."""
    if got.shape != want.shape:
        raise Wrong(f"{form} has shape {got.shape}, torch's is {want.shape}")
    finite = np.isfinite(want) & np.isfinite(rough)
    if not np.array_equal(np.isfinite(got) | ~finite, np.ones_like(finite)):
        raise Wrong(f"{form} is not finite where torch is")
    if finite.any():
        scale = max(np.abs(want[finite]).max(), 1e-30)
        allowed = TOLERANCE * scale + 8 * np.abs(rough - want)[finite].max()
        worst = np.abs(got - want)[finite].max()
        if worst > allowed:
            raise Wrong(f"{form} differs by {worst / scale:.2g} of the largest value")


__all__ = ["FULL", "NAME", "SAMPLE", "SECONDS", "WILD", "check", "draw", "smaller"]
