"""A sample held against torch in float64: converted, its values, its gradients and its plan."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import needle as ndl
import torch2needle

from .calls import FIRST_RESULT, NUMBER, OTHER_GRADIENT, PRODUCT, RANDOM, UNDEFINED, Size
from .samples import Call, tensors

NAMES = "abcdefghijklmnopqrstuvwxyz"
TOLERANCE = 1e-5  # relative to the largest value
# Dtypes that needle keeps in wider ones, as it says; float16 and bfloat16 are not rounded to.
WIDER = {
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16), torch.int32),
    **dict.fromkeys((torch.float16, torch.bfloat16), torch.float32),
}
ROUNDED = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Wrong(AssertionError):
    """A difference that nobody was told of."""


class Refused(Exception):
    """The sentence that conversion, a call or a plan answered with."""


class Torch(Exception):
    """torch itself does not take this call."""


class Applies(nn.Module):
    """A model that makes one call, of as many inputs as the call has tensors."""

    def __init__(self, target: Any, call: Call, name: str) -> None:
        super().__init__()
        leaves, self.form = tree_flatten((call.args, call.kwargs))
        self.target, self.leaves, self.name = target, leaves, name
        self.inplace = name.split(".")[1 if name.startswith("aten.") else -1].endswith("_")

    def made(self, *given: Any) -> Any:
        left = list(given)
        first = left[0] * 1 if self.inplace else left[0]
        left[0] = first
        if not any(isinstance(v, torch.Tensor) for v in self.leaves):
            left = []  # the input only has the size
        leaves = [left.pop(0) if isinstance(v, torch.Tensor) else v for v in self.leaves]
        leaves = [first.size(v.axis) if isinstance(v, Size) else v for v in leaves]
        args, kwargs = tree_unflatten(leaves, self.form)
        made = self.target(*args, **kwargs)
        if self.name in UNDEFINED:
            return torch.zeros_like(made)
        if self.name in NUMBER:
            return made * first
        if self.name in PRODUCT:
            return made[0] * made[1] @ made[2].mT
        return made[0] if self.name in FIRST_RESULT else made


def inputs_of(call: Call) -> list[torch.Tensor]:
    """The call's tensors; where it has sizes alone, one that has the size."""
    return tensors(call) or [torch.randn(4, 3)]


def model_of(target: Any, name: str, call: Call) -> nn.Module:
    given = ", ".join(NAMES[: len(inputs_of(call))])
    forward = eval(f"lambda self, {given}: self.made({given})")
    return type("Model", (Applies,), {"forward": forward})(target, call, name).eval()


def doubled(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return value.detach().to(wide.get(value.dtype, value.dtype))


def results(value: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(v) for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor | int | float | bool)]


def array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.to(WIDER.get(value.dtype, value.dtype))
        return value.detach().resolve_conj().resolve_neg().numpy()
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def ours(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [x for v in value for x in ours(v)]
    return [] if value is None else [value]


def compare(what: str, got: list[Any], exact: list[Any], rounded: list[Any], tolerance: float) -> None:
    """`exact` is torch's in float64, `rounded` in the dtype of the sample: what is infinite or NaN is so there, too."""
    if len(got) != len(exact):
        raise Wrong(f"{what}: {len(got)} results instead of {len(exact)}")
    for g, e, r in zip(map(array, got), map(array, exact), map(array, rounded), strict=True):
        if g.shape != e.shape:
            raise Wrong(f"{what}: shape {g.shape} instead of {e.shape}")
        if what == "values" and g.dtype != r.dtype:
            raise Wrong(f"{what}: {g.dtype} instead of {r.dtype}")
        if e.dtype.kind in "biu":
            if not (g == r).all():
                raise Wrong(f"{what}: other numbers")
            continue
        finite = np.isfinite(r) & np.isfinite(e)
        if not ((g == r) | (np.isnan(g) & np.isnan(r)) | finite | (np.isfinite(r) & (g == e.astype(g.dtype)))).all():
            raise Wrong(f"{what}: infinite or NaN elsewhere")
        if finite.any():
            scale = max(
                np.abs(e[finite]).max(), 1e-30 if what != "gradient" else 1e-2
            )  # zeros there are sums of others
            error, theirs = (np.abs(a[finite] - e[finite]).max() / scale for a in (g, r))
            if not error <= max(tolerance, 4 * theirs):
                raise Wrong(f"{what}: off by {error:.2g}, torch by {theirs:.2g}")


def alike(got: list[Any], torchs: list[Any]) -> None:
    """Random numbers of one distribution: their deciles, and what is exact."""
    for g, r in zip(map(array, got), map(array, torchs), strict=True):
        if g.shape != r.shape or g.dtype != r.dtype:
            raise Wrong(f"values: {g.dtype}{g.shape} instead of {r.dtype}{r.shape}")
        whole = bool((r == np.floor(r)).all())
        if whole and not (g == np.floor(g)).all():
            raise Wrong("values: parts of whole numbers")
        parts = np.random.default_rng(0).random(r.shape) * whole
        # A decile of whole numbers may be one or the next; with a part of one added they are numbers of any size.
        if not (close_deciles(g, r) or close_deciles(g + parts, r + parts)):
            raise Wrong("values: another distribution")


def close_deciles(a: np.ndarray, b: np.ndarray) -> bool:
    one, other = (np.quantile(x, np.arange(1, 10) / 10) for x in (a, b))
    return bool(np.abs(one - other).max() <= 0.06 * max(np.abs(other).max(), 1))


def sentence(e: BaseException) -> str:
    """What was said; anything that is no sentence is a failure."""
    if isinstance(e, torch2needle.ConversionError):
        reasons = [row.reason for row in e.report.rows if row.reason]
        return reasons[0] if reasons else str(e)
    if isinstance(e, ndl.autograd.Unsupported) or str(e).startswith("["):
        return str(e)
    raise Wrong(f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")


def check(name: str, target: Any, call: Call, gradient: bool = True, plan: bool = True) -> None:
    """Raises Refused with what was said, Wrong where nobody said anything, Torch where the call is none."""
    inputs = inputs_of(call)
    model = model_of(target, name, call)
    wide = model_of(target, name, Call(tree_map(doubled, call.args), tree_map(doubled, call.kwargs)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if not tensors(call) and not any(isinstance(v, Size) for v in tree_flatten((call.args, call.kwargs))[0]):
                raise Torch("no tensor and no size among its arguments")
            rounded = results(model(*(x.clone() for x in inputs)))
            try:
                exact = results(wide(*map(doubled, inputs)))
            except RuntimeError:  # it takes no float64
                wide, exact = model, rounded
        except Exception as e:
            raise Torch(str(e)) from None
        try:
            net = torch2needle.convert(model, tuple(x.clone() for x in inputs), dynamic=False)
            got = ours(net(*(x.clone() for x in inputs)))
        except Exception as e:
            raise Refused(sentence(e)) from None
        if name in RANDOM:
            return alike(got, rounded)
        tolerance = max([TOLERANCE, *(ROUNDED.get(r.dtype, 0.0) for r in rounded)])
        compare("values", got, exact, rounded, tolerance)
        if plan and name not in PRODUCT:  # which a draw makes
            try:
                planned = ours(ndl.compile(net, tuple(inputs))(*inputs))
            except Exception as e:
                raise Refused(f"in a plan: {sentence(e)}") from None
            compare("plan", planned, exact, rounded, tolerance)
        if gradient and name not in OTHER_GRADIENT and not any(x.is_complex() for x in (*inputs, *exact)):
            gradients(model, wide, net, inputs)


def slopes(model: nn.Module, inputs: list[Any], places: list[int], double: bool) -> tuple[list[Any], list[Any]]:
    """torch's gradients of a weighted sum of the results for the inputs at `places`, and the weights."""
    given = [doubled(x) if double else x.clone() for x in inputs]
    for i in places:
        given[i].requires_grad_()
    outs = results(model(*given))
    torch.manual_seed(0)
    weights = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) if o.requires_grad else None for o in outs]
    if all(w is None for w in weights):
        return [None] * len(places), weights
    return list(torch.autograd.grad(total(outs, weights), [given[i] for i in places], allow_unused=True)), weights


def gradients(model: nn.Module, wide: nn.Module, net: Any, inputs: list[Any]) -> None:
    """Of every input that torch has a gradient for; some functions have one only for their first."""
    floats = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    for places in (floats, floats[:1]):
        try:
            exact, weights = slopes(wide, inputs, places, True)
            rounded, _ = slopes(model, inputs, places, False)
            break
        except (RuntimeError, NotImplementedError):
            continue
    else:
        return
    if all(e is None for e in exact):
        return
    mine = [ndl.Tensor(x.numpy(), dtype=str(x.dtype)[6:], requires_grad=i in places) for i, x in enumerate(inputs)]
    try:
        sums: Any = 0
        for o, w in zip(ours(net(*mine)), weights, strict=True):
            if w is not None:
                sums = ndl.ops.summation(o * ndl.Tensor(w.float().numpy(), requires_grad=False)) + sums
        if sums.requires_grad:
            sums.backward()
    except Exception as e:
        raise Refused(f"in a gradient: {sentence(e)}") from None
    for i, e, r in zip(places, exact, rounded, strict=True):
        grad = mine[i].grad
        if grad is None and e is not None and (e != 0).any():
            raise Wrong("gradient: none")
        if grad is not None and e is not None:
            compare("gradient", [grad.numpy()], [e], [r], 10 * TOLERANCE)


def total(values: list[Any], weights: list[Any]) -> Any:
    return torch.stack([(v * w).sum() for v, w in zip(values, weights, strict=True) if w is not None]).sum()
