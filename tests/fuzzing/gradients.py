"""Values and gradients of single ops and layers with odd arguments and shapes, in both modes, against torch in float64."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

import needle as ndl
import torch2needle
from torch2needle.models import randomize

from . import frame
from . import op_calls as o
from . import op_calls_shapes as s

NAME, SAMPLE, FULL, SECONDS = "gradients", 1000, 20_000, 60
ROUNDING = 1e-5  # of the largest value; more where torch in float32 rounds worse
WORST = 2e-2  # what torch's own rounding may excuse

WINDOWS = (o.convolution, o.convolution, o.pool, o.resize, o.patches, o.padding)
POINTWISE = (o.unary, o.binary, o.with_number, o.of_three, o.gated)
FAMILIES = (
    *(*WINDOWS, *POINTWISE, o.reduction, o.similarity, o.norm_layer, s.reshaped, s.shuffled, s.joined, s.indexed),
    *(s.gathered, s.product, s.attention, s.attention_layer, s.recurrent),
)

Case = dict[
    str, Any
]  # call, args, kwargs, inputs: [(shape, values, layout)], results (of a named tuple), train, compiled


def draw(rng: random.Random) -> Case:
    case = rng.choice(FAMILIES)(rng)
    layouts = [layout for layout in LAYOUTS if layout != "expanded" or all(v != "different" for _, v in case["inputs"])]
    case["inputs"] = [(tuple(s), values, rng.choice(layouts)) for s, values in case["inputs"]]
    return {"args": [], "kwargs": {}, "results": 0, **case, "train": rng.random() < 0.5, "compiled": rng.random() < 0.3}


# -- what a case stands for ----------------------------------------------------------------------------------------------

LAYOUTS = ("plain", "plain", "plain", "transposed", "sliced", "expanded", "flipped")


def stored(shape: tuple, layout: str) -> tuple:
    """The shape of the array from which `seen` makes one of `shape`."""
    if not shape:
        return shape
    return {
        "transposed": (*shape[:-2], *shape[-2:][::-1]),
        "sliced": (*shape[:-1], 2 * shape[-1]),
        "expanded": (1, *shape[1:]),
    }.get(layout, shape)


def seen(x: torch.Tensor, shape: tuple, layout: str) -> torch.Tensor:
    if layout == "transposed" and len(shape) > 1:
        return x.transpose(-1, -2)
    if layout == "sliced" and shape:
        return x[..., ::2]
    if layout == "expanded" and shape:
        return x.expand(shape)
    if layout == "flipped" and shape:
        return x.flip(0)
    return x


def values(kind: str, shape: tuple) -> torch.Tensor:
    """Numbers of a kind, from torch's generator; integers below n for "below n"."""
    x = torch.randn(shape)
    name, _, number = kind.partition(" ")
    if name == "below":
        return torch.randint(0, max(1, int(number)), shape)
    if name == "mask":
        return x > 0
    made = {
        "positive": lambda: x.abs() + 0.1,
        "unit": lambda: torch.rand(shape) * 0.98 + 0.01,
        "zeros": lambda: torch.zeros(shape),
        "ties": lambda: x.round() + 0.0,  # no -0
        "different": lambda: torch.randperm(x.numel()).reshape(shape) / 7,
        "rows": lambda: (
            x[..., :1].expand(shape).clone() if x.ndim and x.shape[-1] else x
        ),  # constant along the last axis
        "large": lambda: x * 50,
        "tiny": lambda: x * 1e-4,
        "shifted": lambda: x + 100,
        "nan": lambda: torch.where(torch.rand(shape) < 0.15, torch.nan, x),
        "-inf": lambda: torch.where(torch.rand(shape) < 0.3, -torch.inf, x),
    }
    return made[name]() if name in made else x


class Called(nn.Module):
    """A case as a module: the layer, or the function with its inputs where the arguments say "x0", "x1", ..."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, target = case, resolved(case["call"])
        layer = isinstance(target, type)
        self.layer = target(*case["args"], **case["kwargs"]) if layer else None
        self.function = None if layer else target

    def call(self, *inputs: torch.Tensor) -> Any:
        described = self.case["inputs"]
        xs = [seen(x, shape, layout) for x, (shape, _, layout) in zip(inputs, described, strict=True)]
        if self.layer is not None:
            return self.layer(*xs)
        out = self.function(*filled(self.case["args"], xs), **filled(self.case["kwargs"], xs))
        return tuple(out[i] for i in range(self.case["results"])) if self.case["results"] else out


class Called1(Called):
    def forward(self, a: Any) -> Any:
        return self.call(a)


class Called2(Called):
    def forward(self, a: Any, b: Any) -> Any:
        return self.call(a, b)


class Called3(Called):
    def forward(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(a, b, c)


class Called4(Called):
    def forward(self, a: Any, b: Any, c: Any, d: Any) -> Any:
        return self.call(a, b, c, d)


def resolved(name: str) -> Any:
    """`torch.nn.functional.conv2d`, `Tensor.view`, `operator.getitem`: what a name stands for."""
    first, *rest = name.split(".")
    found: Any = {"torch": torch, "F": nn.functional, "nn": nn, "Tensor": torch.Tensor}.get(first) or __import__(first)
    for part in rest:
        found = getattr(found, part)
    return found


def filled(value: Any, xs: list[torch.Tensor]) -> Any:
    """Arguments with tensors, slices and dtypes in place of their names."""
    if isinstance(value, dict):
        return slice(*value["slice"]) if "slice" in value else {k: filled(v, xs) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(v, xs) for v in value)
    if isinstance(value, str) and value[:1] == "x" and value[1:].isdigit():
        return xs[int(value[1:])]
    return Ellipsis if value == "..." else value


# -- the judge -----------------------------------------------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [x for v in value for x in leaves(v)]
    return [value] if hasattr(value, "shape") else []


def numbers(x: Any) -> np.ndarray:
    return np.asarray(x.detach().numpy())


class Run:
    """A model's results by name: outputs, buffers, gradients of inputs and parameters for the given weights of outputs."""

    def __init__(self, model: Any, inputs: list[Any], weights: list[torch.Tensor] | None, make: Any) -> None:
        outs = leaves(model(*inputs))
        self.results = {f"output {i}": numbers(o) for i, o in enumerate(outs)}
        state = {k: v for k, v in model.state_dict().items() if "running" in k or "num_batches" in k}
        self.results |= {f"buffer {k}": numbers(v) for k, v in state.items()}
        self.gradients: dict[str, np.ndarray | None] = {}
        own = [o for o in outs if o.requires_grad]
        self.weights = weights if weights is not None else [torch.randn(o.shape) for o in own]
        if not own or len(own) != len(self.weights):
            return
        total: Any = None
        for out, w in zip(own, self.weights, strict=True):
            part = (out * make(w)).sum()
            total = part if total is None else total + part
        total.backward()
        leaf = {f"x{i}": x for i, x in enumerate(inputs)} | dict(model.named_parameters())
        self.gradients = {k: None if t.grad is None else numbers(t.grad) for k, t in leaf.items() if t.requires_grad}


def run_torch(model: nn.Module, inputs: list[torch.Tensor], dtype: torch.dtype, weights: Any = None) -> Run:
    model = copy.deepcopy(model).to(dtype)
    xs = [x.to(dtype, copy=True).requires_grad_() if x.is_floating_point() else x for x in inputs]
    return Run(model, xs, weights, lambda w: w.to(dtype))


def compare(
    what: str, got: np.ndarray | None, exact: np.ndarray | None, single: np.ndarray | None, least: float = 1e-30
) -> None:
    """`got` equals torch in float64 up to rounding; where torch in float32 itself falls on the other side, that will do.

    least: the size of terms that may cancel in it.
    """
    if exact is None or single is None:
        if got is not None and np.any(got):
            raise frame.Wrong(f"{what}: torch gives none")
        return
    if got is None:
        got = np.zeros_like(single)
    if got.shape != exact.shape:
        raise frame.Wrong(f"{what}: shape {got.shape}, torch's is {exact.shape}")
    if got.dtype != single.dtype:
        raise frame.Wrong(f"{what}: {got.dtype}, torch's is {single.dtype}")
    if exact.size == 0:
        return
    if exact.dtype.kind != "f":
        if not (got == exact).all():
            raise frame.Wrong(f"{what}: other integers")
        return
    scale = max(least, 1e-30, np.abs(exact[np.isfinite(exact)]).max(initial=0))
    allowed = ROUNDING * scale
    with np.errstate(invalid="ignore"):
        own = np.abs(single - exact)
        allowed = max(allowed, min(8 * np.nanmax(np.where(np.isfinite(own), own, 0)), WORST * scale))
        off = np.minimum(distance(got, exact), distance(got, single))
    if not (off <= allowed).all():
        wrong = np.isnan(off) | np.isinf(off)
        if wrong.any():
            at = np.unravel_index(np.argmax(wrong), wrong.shape)
            raise frame.Wrong(f"{what}: {got[at]} where torch has {exact[at]}")
        raise frame.Wrong(f"{what}: off by {off.max() / scale:.1e} of the largest")


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0, np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.inf))


# -- the check -----------------------------------------------------------------------------------------------------------


def check(case: Case) -> str:
    inputs = [values(kind, stored(shape, layout)) for shape, kind, layout in case["inputs"]]
    try:
        model = randomize((Called1, Called2, Called3, Called4)[len(inputs) - 1](case)).train(case["train"])
        exact = run_torch(model, inputs, torch.float64)
        single = run_torch(model, inputs, torch.float32, exact.weights)
    except Exception as e:
        return f"torch refuses: {type(e).__name__}"
    try:
        net = torch2needle.convert(copy.deepcopy(model).eval(), tuple(x.clone() for x in inputs))
        net.train(case["train"])
        xs = [ndl.Tensor(x.numpy(), dtype=str(x.dtype)[6:], requires_grad=x.is_floating_point()) for x in inputs]
        got = Run(net, xs, exact.weights, lambda w: ndl.Tensor(w.numpy(), requires_grad=False))
    except Exception as e:
        return refused(e)
    name = case["call"]
    if got.results.keys() != exact.results.keys():
        raise frame.Wrong(f"{name}: results {[*got.results]}, torch's are {[*exact.results]}")
    largest = max((float(x.double().nan_to_num(0, 0, 0).abs().max()) for x in inputs if x.numel()), default=0.0)
    for k, v in exact.results.items():
        compare(f"{name} {k}", got.results[k], v, single.results[k], 1e-7 * largest)  # float64 rounds, too
    if not any(v.size for k, v in exact.results.items() if k.startswith("output")):
        return "agrees, of no elements"  # the memory of such gradients is not always written by torch
    for k, g in exact.gradients.items():
        mine, theirs = got.gradients.get(k), single.gradients[k]
        if "ConvTranspose" in name and mine is not None and g is not None:  # a tap beyond the image reads nothing
            mine = np.where((mine == 0) & np.isnan(g), g, mine).astype(mine.dtype)
        least = cancelling(case, inputs)
        if k[0] == "x" and g is not None:
            x = numbers(inputs[int(k[1:])])
            mine = mine if mine is None else np.where(np.isnan(x), g, mine).astype(mine.dtype)  # NaN has no slope
            if (
                mine is not None and mine.shape == g.shape
            ):  # infinities of both signs add up to one or to none, by the order
                mine = np.where(np.isfinite(g) | np.isfinite(mine), mine, g).astype(mine.dtype)
            least /= min(1, np.abs(x[np.isfinite(x) & (x != 0)]).max(initial=1))
        compare(f"{name} gradient of {k}", mine, g, theirs, least)
    if case["compiled"] and not case["train"]:
        return check_compiled(case, model.eval(), net.eval(), inputs)
    return "agrees"


def cancelling(case: Case, inputs: list[torch.Tensor]) -> float:
    """The size of terms that may cancel in gradients: what divides them is small in norms of equal numbers and cosines."""
    if "Norm" in case["call"] and any(k == "rows" or layout == "expanded" for _, k, layout in case["inputs"]):
        return 0.1 / case["kwargs"].get("eps", 1e-5) ** 0.5
    if "cosine" in case["call"]:
        sizes = [float(x[x != 0].double().abs().nan_to_num(1.0).min()) for x in inputs if bool((x != 0).any())]
        return 1 / min([1.0, *sizes])
    return 0.1


def check_compiled(case: Case, model: nn.Module, net: Any, inputs: list[torch.Tensor]) -> str:
    with torch.no_grad():
        exact = leaves(copy.deepcopy(model).double()(*(x.double() if x.is_floating_point() else x for x in inputs)))
        single = leaves(copy.deepcopy(model)(*inputs))
    try:
        got = leaves(ndl.compile(net, tuple(inputs))(*inputs))
    except Exception as e:
        return "compiled: " + refused(e)
    for i, (mine, e, f) in enumerate(zip(got, exact, single, strict=True)):
        compare(f"{case['call']} compiled output {i}", numbers(mine), numbers(e), numbers(f))
    return "agrees, compiled too"


def refused(e: Exception) -> str:
    """The outcome of an error that is a sentence; any other is wrong."""
    text = " ".join(str(e).split())
    if isinstance(e, ValueError | ndl.autograd.Unsupported | torch2needle.ConversionError) and "[" in text[:200]:
        return f"refused: {type(e).__name__}"
    raise e


# -- smaller cases -------------------------------------------------------------------------------------------------------


def smaller(case: Case) -> Iterable[Case]:
    for key in case["kwargs"]:
        yield {**case, "kwargs": {k: v for k, v in case["kwargs"].items() if k != key}}
    for key in ("train", "compiled"):
        if case[key]:
            yield {**case, key: False}
    for i, (shape, kind, layout) in enumerate(case["inputs"]):
        simple = [(shape, kind, "plain")] if layout != "plain" else []
        simple += [(shape, "normal", layout)] if kind not in ("normal", "mask") and not kind.startswith("below") else []
        for one in simple:
            yield {**case, "inputs": [*case["inputs"][:i], one, *case["inputs"][i + 1 :]]}
    numbers_at = list(places(case, ()))
    for path, n in numbers_at:  # the same number everywhere, since sizes of inputs and arguments go together
        for less in {1, n - 1} - {0}:
            yield replaced(case, {p for p, m in numbers_at if m == n}, less)
            yield replaced(case, {path}, less)


def places(value: Any, path: tuple) -> Iterable[tuple[tuple, int]]:
    """Where whole numbers above 1 stand in nested data."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(v, (*path, k))


def replaced(value: Any, paths: set[tuple], new: int, path: tuple = ()) -> Any:
    if path in paths:
        return new
    if isinstance(value, dict):
        return {k: replaced(v, paths, new, (*path, k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replaced(v, paths, new, (*path, i)) for i, v in enumerate(value))
    return value
