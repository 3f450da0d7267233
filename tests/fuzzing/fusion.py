"""Layers that fuse, with odd parameters: the fused net against the unfused one in every mode, and torch against both."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle
from needle import ops

from .frame import Wrong

NAME, SAMPLE, FULL, SECONDS = "fusion", 300, 10_000, 60
TOLERANCE = 2e-4  # relative to the largest value: gradients of batch norms over few samples cancel
MIN = torch.finfo(torch.float32).min


# -- models --------------------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "SiLU": nn.SiLU,
    "GELU": nn.GELU,
    "GELU tanh": lambda: nn.GELU(approximate="tanh"),
    "Tanh": nn.Tanh,
    "Sigmoid": nn.Sigmoid,
    "LeakyReLU": lambda: nn.LeakyReLU(0.3),
    "LeakyReLU -1": lambda: nn.LeakyReLU(-1.0),
    "ELU": lambda: nn.ELU(0.5),
    "Hardswish": nn.Hardswish,
    "Hardsigmoid": nn.Hardsigmoid,
    "Mish": nn.Mish,
    "Softplus": nn.Softplus,
    "ReLU in place": lambda: nn.ReLU(True),
}


class FunctionalNorm(nn.Module):
    """F.batch_norm or F.instance_norm with a flag that is the module's, or fixed."""

    def __init__(self, width: int, what: str, flag: bool | None, momentum: float, affine: bool) -> None:
        super().__init__()
        self.f = getattr(F, what)
        self.flag, self.momentum = flag, momentum
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("var", torch.rand(width) + 0.5)
        self.weight = nn.Parameter(torch.randn(width)) if affine else None
        self.bias = nn.Parameter(torch.randn(width)) if affine else None

    def forward(self, x: Any) -> Any:
        flag = self.training if self.flag is None else self.flag
        return self.f(x, self.mean, self.var, self.weight, self.bias, flag, self.momentum)


class Attend(nn.Module):
    """Attention written out: projections, heads, scale, mask."""

    def __init__(self, width: int, o: dict[str, Any]) -> None:
        super().__init__()
        self.o, self.heads, self.inner = o, o["heads"], o["inner"]
        names = ("qkv",) if o["joint"] else ("q", "k", "v")
        for name in names if o["projected"] else ():
            setattr(self, name, nn.Linear(width, len(name) * self.inner, bias=o["bias"]))
        self.out = nn.Linear(self.inner if o["projected"] else width, width) if o["out"] else nn.Identity()
        self.drop = nn.Dropout(0.0)

    def split(self, x: Any) -> Any:
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x: Any) -> Any:
        o = self.o
        if not o["projected"]:
            parts = [x, x * 0.5, x + 1]
        elif o["joint"]:
            parts = self.qkv(x).chunk(3, -1)
        else:
            parts = [self.q(x), self.k(x), self.v(x)]
        q, k, v = (self.split(p) for p in parts) if self.heads else parts
        keys = k.transpose(-2, -1) if o["back"] or not self.heads else k.transpose(2, 3)
        scores = (q * o["scale"]) @ keys if o["early"] else (q @ keys) / o["scale"]
        mask = self.mask(x.size(1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, o["low"]) if o["fill"] else scores + (1 - mask) * o["low"]
        y = self.drop(scores.softmax(-1 if o["back"] or not self.heads else 3)) @ v
        if self.heads:
            y = y.transpose(1, 2).reshape(x.size(0), x.size(1), -1)
        return self.out(y)

    def mask(self, length: int) -> Any:
        if self.o["mask"] == "none":
            return None
        ones = torch.ones(5, 5)
        return {"causal": ones.tril(), "row": torch.cat([0 * ones[:2], ones[2:]]), "all": ones * 0}[self.o["mask"]]


def layer(name: str, width: int, o: dict[str, Any]) -> nn.Module:
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]()
    if name == "FunctionalNorm":
        return FunctionalNorm(width, **o)
    return Attend(width, o) if name == "Attend" else getattr(nn, name)(*o.get("sizes", ()), **o.get("options", {}))


class Model(nn.Module):
    """Steps, each of the value before and perhaps of an earlier one; a step with a number repeats that step's layer."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case, made = case, []
        for name, width, o in case["steps"]:
            made.append(
                made[o] if name == "again" else nn.Identity() if name in ("add", "mul") else layer(name, width, o)
            )
        self.layers = nn.ModuleList(made)
        if case["tied"]:
            self.tie()

    def tie(self) -> None:
        """Norms of one width share their weights, and the first bias that fits is the second one's, too."""
        found: dict[Any, nn.Parameter] = {}
        for m in self.layers:
            if getattr(m, "bias", None) is not None:
                m.bias = found.setdefault(m.bias.shape, m.bias)

    def forward(self, x: Any) -> Any:
        values = [x]
        for made, (name, _, o) in zip(self.layers, self.case["steps"], strict=True):
            if name == "add":
                other = values[o["of"]]
                y = values[-1] + (other.mean(o["over"], keepdim=True) if o["over"] else other)
            elif name == "mul":
                y = values[-1] * values[o["of"]]
            else:
                y = made(values[-1])
            values.append(y)
        return (*(values[i] for i in self.case["outputs"]), values[-1])


# -- drawing -------------------------------------------------------------------------------------------------------------


def drawn_step(rng: random.Random, values: list[torch.Tensor], steps: list[Any]) -> tuple:
    x = values[-1]
    rank, width = x.ndim, x.shape[1] if x.ndim > 1 else 1
    last = x.shape[-1]
    c = rng.choice
    norm = {
        "eps": c((1e-5, 1e-5, 0.5, 100.0, 1e-12)),
        "momentum": c((0.1, 0.1, 0.7, 1.0, 0.0, None)),
        "affine": c((True, True, False)),
    }
    tracked = norm | {"track_running_stats": c((True, True, True, False))}
    plain = {**tracked, "momentum": tracked["momentum"] if tracked["momentum"] is not None else 0.3}
    groups = c([1, 1, 1, width])
    conv = {
        "stride": c((1, 1, 1, 2)),
        "padding": c((0, 1, 1, 2)),
        "dilation": c((1, 1, 2)),
        "groups": groups,
        "bias": c((True, False)),
        "padding_mode": c(("zeros", "zeros", "zeros", "circular")),
    }
    sizes = (width, c((1, 3, 4)) * groups if groups > 1 else c((1, 3, 4, width)), c((1, 3, 3)))
    choices: list[tuple] = [(c(list(ACTIVATIONS)), width, {})] * 4
    if rank in (3, 4):
        d = rank - 2
        choices += [(f"Conv{d}d", width, {"sizes": sizes, "options": conv})] * 4
        choices += [(f"InstanceNorm{d}d", width, {"sizes": (width,), "options": plain})]
        turned = {"stride": c((1, 2)), "padding": c((0, 1)), "bias": c((True, False)), "dilation": c((1, 2))}
        choices += [(f"ConvTranspose{d}d", width, {"sizes": (width, c((1, 3, width)), 3), "options": turned})]
    if rank in (2, 3, 4):
        cls = "BatchNorm2d" if rank == 4 else "BatchNorm1d"
        choices += [(cls, width, {"sizes": (width,), "options": tracked})] * 4
        what = c(("batch_norm", "batch_norm", "instance_norm")) if rank > 2 else "batch_norm"
        functional = {
            "what": what,
            "flag": c((None, None, True, False)),
            "momentum": c((0.1, 0.9)),
            "affine": norm["affine"],
        }
        choices += [("FunctionalNorm", width, functional)]
        choices += [("Linear", width, {"sizes": (last, c((1, 3, last))), "options": {"bias": c((True, False))}})] * (
            6 - rank
        )
    if rank == 3 and last > 1:
        o = {
            "heads": c((0, 1, 2)), "inner": c((2, 4, 6)), "joint": c((True, False)), "bias": c((True, False)),
            "projected": last % 2 == 1 or c((True, True, False)), "out": c((True, False)), "back": c((True, False)),
            "early": c((True, False)), "scale": c((0.5, 2.0, 1, 1.7)), "fill": c((True, False)),
            "mask": c(("none", "causal", "row", "all")) if x.shape[1] == 5 else "none",
            "low": c((MIN, -1e9, -1e4, -float("inf"))),
        }  # fmt: skip
        if o["low"] == -float("inf"):
            o["fill"] = True  # 0 * inf
        choices += [("Attend", width, o)] * 8
    if len(values) > 1:
        place = rng.randrange(len(values))
        over = c(((), (), (0,), (-1,)))
        choices += [("add", width, {"of": place, "over": over})] * 4 + [("mul", width, {"of": place})]
    if steps:
        choices += [("again", width, rng.randrange(len(steps)))]
    return c(choices)


def draw(rng: random.Random) -> dict[str, Any]:
    shape = rng.choice(
        [(2, 3, 5, 6), (1, 4, 4, 4), (3, 1, 3, 3), (4, 3), (5, 8), (2, 5, 6), (1, 5, 4), (2, 5, 1), (2, 3, 1, 1)]
    )
    case: dict[str, Any] = {"shape": shape, "steps": [], "outputs": [], "tied": rng.random() < 0.15}
    case |= {"frozen": rng.random() < 0.2, "mixed": rng.random() < 0.2, "example": rng.random() < 0.5}
    values = [torch.ones(shape)]
    for _ in range(rng.randint(2, 6)):
        made = drawn_step(rng, values, case["steps"])
        more = case | {"steps": [*case["steps"], made], "outputs": range(len(values) + 1)}
        try:
            with torch.no_grad():
                found = list(Model(more).eval()(torch.ones(shape)))[:-1]
        except Exception:
            continue
        if 0 < found[-1].numel() < 2000:
            values, case = found, more
    return case | {"outputs": [i for i in range(len(values)) if rng.random() < 0.1]}


def smaller(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    n = len(case["steps"])
    for i in range(n):
        yield case | {
            "steps": case["steps"][:i] + case["steps"][i + 1 :],
            "outputs": [o for o in case["outputs"] if o < n],
        }
    for key in ("tied", "frozen", "mixed", "example"):
        if case[key]:
            yield case | {key: False}
    if case["outputs"]:
        yield case | {"outputs": []}


# -- checking ------------------------------------------------------------------------------------------------------------


def check(case: dict[str, Any]) -> str:
    warnings.simplefilter("ignore")
    try:
        theirs = Model(case)
        theirs(torch.randn(case["shape"]))
        theirs.eval()(torch.randn(case["shape"]))
    except Exception:
        return "torch raises"
    settle(theirs, case)
    x = torch.randn(case["shape"])
    try:
        net = torch2needle.convert(theirs, (x,) if case["example"] else None)
    except (torch2needle.ConversionError, torch2needle.Unsupported) as e:
        return f"refused: {e.report.unsupported[0].reason if hasattr(e, 'report') else e}"
    fused = operator_fusion.fuse(net)
    state = {k: v.numpy().copy() for k, v in net.state_dict().items()}
    for mode in (False, True):
        set_modes(theirs, net, case, mode)
        a, b = (trained(n, x, state) for n in (net, fused))
        compare(f"mode {mode}, fused", b, a)
    set_modes(theirs, net, case, False)
    net.load_state_dict(state)
    judge = torch.float32 if any(o["low"] == -1e9 for n, _, o in case["steps"] if n == "Attend") else torch.float64
    with torch.no_grad():  # float32 rounds scores away beside -1e9
        want = [t.numpy() for t in copy.deepcopy(theirs).to(judge)(x.to(judge))]
        rounded = [np.abs(t.numpy() - w).max(initial=0) for t, w in zip(copy.deepcopy(theirs)(x), want, strict=True)]
    options = [o.get("options", {}) for _, _, o in case["steps"] if isinstance(o, dict)]
    grouped = any(o.get("groups", 1) > 1 for o in options)
    if grouped and any(np.isnan(w).any() for w in want):
        return "NaN spreads over merged groups (csrc/cpu/README.md)"
    plain = [t.numpy() for t in net(x)]
    compare("unfused, torch", plain, want, rounded)
    net.load_state_dict(state)
    compare("fused without gradients, torch", without_gradients(net, fused, x), want, rounded)
    if not any(m.training for m in net.modules() if m.mode_dependent):
        for how, form in (("plain", net), ("fused", fused)):
            exe = ndl.compile(form, (x,))
            compare(f"compiled {how}, torch", [np.asarray(t) for t in exe(x)], want, rounded)
    return f"agrees, {min(3, len(fused.fusion_report.fired))} fusions"


def settle(model: nn.Module, case: dict[str, Any]) -> None:
    """Parameters and statistics unlike their initial ones; some layers frozen."""
    with torch.no_grad():
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if t.is_floating_point():
                t.copy_(torch.rand(t.shape) + 0.5 if name.endswith("var") else torch.randn(t.shape) * 0.5)
    if case["frozen"]:
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(i % 2 == 0)


def set_modes(theirs: nn.Module, net: Any, case: dict[str, Any], mode: bool) -> None:
    """train() or eval(), or every other layer in the other mode."""
    for i, m in enumerate((theirs, *theirs.layers)):
        own = mode != (case["mixed"] and i % 2 == 1)
        m.train(own) if i else m.train(mode)
    ours = dict(net.named_modules())
    for name, m in theirs.named_modules():
        if name in ours:
            ours[name].train(m.training)  # with the layers that stand for its functions


def trained(net: Any, x: torch.Tensor, state: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs, gradients, buffers, and all again after a step of an optimizer."""
    net.load_state_dict(state)
    found: list[np.ndarray] = []
    for p in net.parameters():
        p.grad = None
    inputs = ndl.Tensor(x.numpy(), requires_grad=True)
    ys = list(net(inputs))
    total: Any = 0
    for y in ys:
        weight = np.cos(np.arange(np.prod(y.shape))).reshape(y.shape).astype("float32")
        total = ops.summation(y * ndl.Tensor(weight, requires_grad=False)) + total
    total.backward()
    found += [y.numpy() for y in ys] + [inputs.grad.numpy()]
    trainable = [p for p in net.parameters() if p.grad is not None]
    found += [p.grad.numpy() for p in trainable]
    for p in trainable:
        p.data = p.data - 0.01 * p.grad.data
    found += [t.numpy().copy() for t in net.state_dict().values()]
    return found + [y.numpy() for y in net(ndl.Tensor(x.numpy(), requires_grad=False))]


def without_gradients(net: Any, fused: Any, x: torch.Tensor) -> list[np.ndarray]:
    """A fused op without a gradient of its own runs its unfused form where one is needed."""
    wanted = [p for p in net.parameters() if p.requires_grad]
    for p in wanted:
        p.requires_grad = False
    try:
        return [t.numpy() for t in fused(x)]
    finally:
        for p in wanted:
            p.requires_grad = True


def compare(where: str, ours: list[np.ndarray], theirs: list[np.ndarray], rounded: Any = ()) -> None:
    """rounded: torch's own errors in float32, of which four times as much is allowed."""
    if len(ours) != len(theirs):
        raise Wrong(f"{where}: {len(ours)} results instead of {len(theirs)}")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.astype("float64"), b.astype("float64")
        if a.shape != b.shape:
            raise Wrong(f"{where}: result {i} has shape {a.shape} instead of {b.shape}")
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            raise Wrong(f"{where}: result {i} has NaN at {np.isnan(a).sum()} places instead of {np.isnan(b).sum()}")
        finite = np.isfinite(b)
        largest = np.abs(np.where(finite, b, 0)).max(initial=1.0)
        worst = np.abs(np.where(finite, a - b, 0)).max(initial=0)
        own = rounded[i] if rounded and np.isfinite(rounded[i]) else 0.0
        if not worst <= max(TOLERANCE * largest, 4 * own):
            raise Wrong(f"{where}: result {i} differs by {worst:.3g} of {largest:.3g}")
