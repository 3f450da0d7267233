"""Small torch modules full of what capture may misread: each converts to what torch computes at every size, or is refused."""

from __future__ import annotations

import builtins
import copy
import functools
import operator
import random
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import needle as ndl
import torch2needle
from needle.nn.functional import GuardError

from . import capture_steps
from .capture_steps import HOOKS, OUTPUTS, SIGNATURES, STEPS, WIDTH, Model, Output, T
from .frame import Wrong

NAME, SAMPLE, FULL, SECONDS = "captures", 150, 20_000, 60
BATCHES = (1, 2, 3, 6)
TOLERANCE = 2e-5
NOISE = 2e-4  # of the largest gradient: what roundings leave of a gradient that is 0, before a normalisation


# -- cases -----------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random) -> dict[str, Any]:
    def block(depth: int) -> tuple:
        steps = [rng.choice(list(STEPS)) for _ in range(rng.randint(1, 3))]
        inner = block(depth + 1) if depth < 1 and rng.random() < 0.3 else None
        return steps, rng.choice((1, 2, 4, 6)), inner, rng.choice(("", "", "", "tied", "plain", "call"))

    return {
        "block": block(0),
        "output": rng.choice(list(OUTPUTS)) if rng.random() < 0.5 else "tensor",
        "signature": rng.choice(list(SIGNATURES)) if rng.random() < 0.5 else "plain",
        "hook": (rng.choice(list(HOOKS)), rng.choice(("", "block", "block.one", "block.norm")))
        if rng.random() < 0.2
        else None,
        "batch": rng.choice((1, 1, 2, 3)),
        "training": rng.random() < 0.25,
        "example": rng.random() < 0.7,
    }


def smaller(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    steps, number, inner, linear = case["block"]
    if inner:
        yield case | {"block": inner}
        yield case | {"block": (steps, number, None, linear)}
    for i in range(len(steps)):
        if len(steps) > 1:
            yield case | {"block": (steps[:i] + steps[i + 1 :], number, inner, linear)}
    for key, simple in (("output", "tensor"), ("signature", "plain"), ("hook", None), ("training", False)):
        if case[key] != simple:
            yield case | {key: simple}
    if linear:
        yield case | {"block": (steps, number, inner, "")}


def make(case: dict[str, Any]) -> Model:
    """The same model at each call."""
    torch.manual_seed(0)
    model = SIGNATURES[case["signature"]][0](case)
    for name, b in model.named_buffers():
        if "running" in name:
            b.uniform_(0.5, 1.5)
    model.train(case["training"])
    if case["hook"]:
        what, where = case["hook"]
        HOOKS[what](model.get_submodule(where))
    return model


# -- checks ----------------------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> str:
    """All that a model holds, as text."""

    def text(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return (v.detach().tolist(), v.requires_grad, v.grad is None)
        if isinstance(v, dict):
            return {str(k): text(x) for k, x in v.items() if not isinstance(x, nn.Module)}
        return (
            [text(x) for x in v] if isinstance(v, list | tuple) else repr(v) if isinstance(v, int | str | None) else ""
        )

    return repr({name: text(vars(m)) for name, m in model.named_modules()})


def surroundings() -> list[Any]:
    names = ("zeros", "ones", "full", "arange", "tensor", "is_tensor")
    patched = [
        n
        for n in ("len", "type", "isinstance", "callable")
        if n in vars(capture_steps) or getattr(builtins, n).__module__ != "builtins"
    ]
    generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    calls = [nn.Module.__call__, nn.Module.__getattr__, torch.Tensor.__getattribute__, torch.autograd.Function.apply]
    return [[getattr(torch, n) for n in names], patched, generators, calls, torch.is_grad_enabled()]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Output):
        value = {"value": value.value, "more": value.more}
    if isinstance(value, types.SimpleNamespace):
        value = {"key": value.key}
    if isinstance(value, dict):
        return [x for v in value.values() for x in leaves(v)]
    if isinstance(value, tuple | list):
        return [x for v in value for x in leaves(v)]
    return [value]


def same(got: Any, want: Any) -> bool:
    ours, theirs = leaves(got), leaves(want)
    return len(ours) == len(theirs) and all(map(alike, ours, theirs))


def alike(a: Any, b: Any) -> bool:
    if not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    if not isinstance(a, ndl.Tensor) or tuple(a.shape) != tuple(b.shape):
        return False
    b = b.detach().double().numpy()
    size = float(np.abs(b).max()) if b.size else 0.0
    return bool(np.allclose(a.numpy(), b, rtol=0, atol=TOLERANCE * max(size, 1e-3), equal_nan=True))


def is_random(case: dict[str, Any], call: Callable, x: T) -> bool:
    """Whether first calls differ when only the generators go on; signs and thresholds hide noise from most."""
    values = []
    for seed in range(8):
        model = make(case)
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        args, kwargs = call(x.clone())
        values.append([v for v in leaves(model(*args, **kwargs)) if isinstance(v, torch.Tensor)])
    return any(not torch.equal(a, b) for others in values[1:] for a, b in zip(values[0], others, strict=True))


def gradients(result: Any, tensors: Iterable[tuple[str, Any]]) -> dict[str, np.ndarray]:
    outs = [v for v in leaves(result) if hasattr(v, "requires_grad") and v.requires_grad]
    if outs:
        total(outs).backward()
    found = {n: t.grad for n, t in tensors if getattr(t, "grad", None) is not None}
    return {
        n: np.asarray(g.detach().numpy(), "float64") for n, g in found.items() if np.abs(g.detach().numpy()).max() > 0
    }


def total(outs: list[Any]) -> Any:
    """Of squares."""
    sums = [ndl.ops.summation(o * o) if isinstance(o, ndl.Tensor) else (o * o).sum() for o in outs]
    return functools.reduce(operator.add, sums)


def compare(case: dict[str, Any], net: Any, call: Callable) -> None:
    """Values of two calls in a row at every batch, and gradients at the example's."""
    for batch in (case["batch"], *BATCHES):
        twin, ours = make(case).train(net.training), copy.deepcopy(net)
        for time in ("first", "second"):
            x = torch.randn(batch, WIDTH)
            args, kwargs = call(x)
            try:
                want = twin(*args, **kwargs)
            except Exception:
                break
            args, kwargs = call(x)
            try:
                got = ours(*args, **kwargs)
            except GuardError:
                break  # it holds for other values
            except (ValueError, IndexError, TypeError) as e:
                if not str(e).startswith("["):
                    raise
                if batch == case["batch"] and case["example"]:
                    raise Wrong(f"the net refuses its own example: {e}") from None
                if batch == case["batch"]:
                    return
                break
            if not same(got, want):
                raise Wrong(f"other values than torch's at the {time} call of batch {batch}")
    x = torch.randn(case["batch"], WIDTH)
    if case["signature"] == "mask given" and not case["example"]:
        return  # the mask is fixed to None, and a call with one is refused
    twin, ours = make(case).train(net.training), copy.deepcopy(net)
    args, kwargs = call(x)
    try:
        theirs = gradients(twin(*args, **kwargs), twin.named_parameters())
    except RuntimeError:  # torch needs what the forward wrote over
        return
    args, kwargs = call(x)
    try:
        mine = gradients(ours(*args, **kwargs), ours.named_tensors())
    except GuardError:
        return
    largest = max((np.abs(g).max() for g in theirs.values()), default=0.0)
    theirs, mine = ({n: g for n, g in found.items() if np.abs(g).max() > NOISE * largest} for found in (theirs, mine))
    for name, g in theirs.items():
        if name not in mine or not np.allclose(mine[name], g, rtol=0, atol=1e-3 * np.abs(g).max() + NOISE * largest):
            raise Wrong(f"another gradient of {name}" if name in mine else f"no gradient of {name}")
    seen = dict(twin.named_parameters(remove_duplicate=False))
    for name in mine.keys() - theirs.keys():
        if not any(seen[name] is seen[other] for other in theirs):
            raise Wrong(f"a gradient of {name}, which has none in torch")


def check(case: dict[str, Any]) -> str:
    warnings.simplefilter("ignore")
    model, (_, call) = make(case), SIGNATURES[case["signature"]]
    example = torch.randn(case["batch"], WIDTH)
    args, kwargs = call(example)
    before, around = snapshot(model), surroundings()
    try:
        net = torch2needle.convert(model, *((kwargs or args,) if case["example"] else ()))
    except torch2needle.Unsupported as e:
        net, text = None, str(e)
    except ValueError as e:
        if not str(e).startswith("[convert] example expects"):
            raise
        return "no example of the model's"
    if surroundings() != around:
        raise Wrong("convert leaves torch, Python or a generator changed")
    if snapshot(model) != before:
        raise Wrong("convert changes the model")
    if net is None:
        if not text.startswith("[convert] "):
            raise Wrong(f"no sentence: {text}")
        return "refused"
    try:
        drawing = is_random(case, call, example)
    except Exception:
        return "torch fails"
    if drawing and case["signature"] == "mask given" and not case["example"]:
        return "random in torch"  # the mask is fixed to None, and a call with one is refused
    if drawing:
        try:
            a, *others = (leaves(net(*args, **kwargs))[0].numpy() for _ in range(8))
        except GuardError:
            return "random in both"  # a branch that asks of what was drawn
        if all(np.array_equal(a, b) for b in others):
            raise Wrong("random numbers are frozen")
        return "random in both"
    compare(case, net, call)
    if snapshot(model) != before:
        raise Wrong("a call of the net changes the model")
    if not any("differs between training and evaluation" in n for n in net.report.notes):
        compare(case, net.eval(), call)
    return f"agrees ({net.report.capture[:12].rstrip(',')})"
