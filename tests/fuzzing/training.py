"""Training runs: small converted models with torch's optimizers, schedules, clipping and groups, beside torch in float64."""

from __future__ import annotations

import math
import random
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle

from .frame import Wrong
from .small_models import CHANNELS, dense_row, image_row, model, sequence_row

NAME, SAMPLE, FULL, SECONDS = "training", 120, 2_000, 60
SENTENCE = re.compile(r"^\[[\w .-]+\] .*\.$", re.S)
OWN_ERROR = 30  # times torch's own error in float32 that ours may have; beside it:
TOLERANCE = {"float32": 2e-4, "float64": 1e-7}  # relative to the largest value of a tensor
HUGE = 1e4  # runs that go there are no test of anything

# -- runs ----------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random) -> Any:
    family = rng.choice(("dense", "dense", "image", "image", "line", "sequence", "sequence", "tokens"))
    width = rng.choice((2, 4, 6) if family in ("sequence", "tokens") else CHANNELS)
    batch = rng.choice((1, 2, 3, 5, 8))
    axes = {"image": 2, "line": 1}.get(family, 0)
    input_shape = {
        "dense": (batch, width),
        "image": (batch, width, rng.choice((5, 6, 9)), rng.choice((5, 7, 8))),
        "line": (batch, width, rng.choice((5, 8, 11))),
        "sequence": (batch, rng.choice((1, 2, 5)), width),
        "tokens": (batch, rng.choice((1, 3, 5))),
    }[family]
    layers: list[Any] = []
    if family == "tokens":
        options = {"padding_idx": rng.choice((None, 0, -1, 3))}
        layers.append(("Embedding", (7, width), options))
    for _ in range(rng.randint(1, 5)):
        row, width = (
            dense_row(rng, width)
            if family == "dense"
            else image_row(rng, width, axes)
            if axes
            else sequence_row(rng, width)
        )
        layers.append(row)
    dtype = rng.choice(("float32", "float32", "float64"))
    optimizer = draw_optimizer(rng, dtype)
    case = {
        "layers": layers,
        "input": input_shape,
        "tokens": 7 if family == "tokens" else 0,
        "dtype": dtype,
        "steps": rng.randint(3, 12),
        "loss": rng.choice(("square", "square", "classes", "sum")),
        "optimizer": optimizer,
        "groups": [draw_optimizer(rng, dtype, optimizer[0])[1] for _ in range(rng.choice((0, 0, 0, 1, 2)))],
        "schedules": [draw_schedule(rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))],
        "clip": rng.choice(
            (None, None, ("norm", 0.5, 2.0), ("norm", 0.1, math.inf), ("norm", 1.0, 1.0), ("value", 0.05))
        ),
        "accumulate": rng.choice((1, 1, 2, 3)),
        "zero": rng.choice((None, None, True, False)),
        "frozen": rng.choice((0, 0, 0, 2, 3)),  # every n-th parameter
        "thaws": rng.choice((None, 2, 4)),  # at this step they are frozen no longer
        "fused": rng.random() < 0.4,
        "resumes": rng.choice((None, None, None, 2)),  # after this step, from files
        "evaluates": rng.choice((None, None, 3)),  # every n-th step is in evaluation mode
        "drops": rng.choice((0, 0, 0, 2, 3)),  # every n-th parameter has no gradient in every n-th step
        "twice": rng.random() < 0.15,  # backward, over the same graph
        "labels": rng.choice(("torch", "numpy", "list")),
    }
    return case


OTHERS = ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")


def draw_optimizer(rng: random.Random, dtype: str, kind: str = "") -> tuple[str, dict[str, Any]]:
    kind = kind or rng.choice(("SGD", "SGD", "Adam", "AdamW", "RMSprop", *OTHERS, "ASGD", "Adafactor"))
    # A gradient of rounding errors alone (a bias before a batch norm) must not be blown up by a division.
    eps = rng.choice((1e-2, 0.1)) if dtype == "float32" else rng.choice((1e-4, 1e-3, 0.1))
    options: dict[str, Any] = {"lr": rng.choice((0.001, 0.01, 0.05)), "weight_decay": rng.choice((0.0, 0.0, 0.01, 0.3))}
    if kind == "SGD":
        options |= {"momentum": rng.choice((0.0, 0.5, 0.9)), "nesterov": rng.random() < 0.3}
        options |= {} if options["nesterov"] else {"dampening": rng.choice((0.0, 0.0, 0.4))}
        options["nesterov"] &= options["momentum"] > 0
    elif kind == "RMSprop":
        options |= {"alpha": rng.choice((0.9, 0.99)), "eps": eps, "momentum": rng.choice((0.0, 0.8))}
        options |= {"centered": dtype == "float64" and rng.random() < 0.4}
    elif kind == "ASGD":
        options |= {"lambd": rng.choice((1e-4, 0.1)), "alpha": rng.choice((0.5, 0.75)), "t0": rng.choice((1e6, 2))}
    elif kind == "Adafactor":
        options |= {"eps": (eps, 1e-3), "d": rng.choice((1.0, 1.5)), "beta2_decay": rng.choice((-0.8, -0.5))}
    elif kind in OTHERS:
        options |= {"eps": eps}
        options |= {"lr_decay": rng.choice((0.0, 0.1))} if kind == "Adagrad" else {}
        options |= {"rho": rng.choice((0.5, 0.9))} if kind == "Adadelta" else {}
        options |= {"betas": rng.choice(((0.9, 0.999), (0.5, 0.9)))} if kind in ("Adamax", "NAdam", "RAdam") else {}
        options |= {"decoupled_weight_decay": rng.random() < 0.3} if kind in ("NAdam", "RAdam") else {}
    else:
        options |= {"betas": rng.choice(((0.9, 0.999), (0.5, 0.9), (0.0, 0.99))), "eps": eps}
        options |= {"amsgrad": rng.random() < 0.3}
    options["maximize"] = rng.random() < 0.1
    return kind, {k: v for k, v in options.items() if rng.random() < 0.75 or k in ("lr", "eps", "nesterov", "momentum")}


def draw_schedule(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return rng.choice(
        (
            ("StepLR", {"step_size": rng.choice((1, 2, 3)), "gamma": rng.choice((0.5, 0.9))}),
            ("MultiStepLR", {"milestones": [rng.choice((0, 1, 2)), 4, 4], "gamma": 0.5}),
            ("ExponentialLR", {"gamma": rng.choice((0.8, 0.95))}),
            ("CosineAnnealingLR", {"T_max": rng.choice((1, 3, 10)), "eta_min": rng.choice((0.0, 0.003))}),
            ("LinearLR", {"start_factor": rng.choice((0.1, 1 / 3)), "total_iters": rng.choice((1, 4, 20))}),
            ("ConstantLR", {"factor": rng.choice((0.1, 0.5)), "total_iters": rng.choice((1, 4, 20))}),
            ("PolynomialLR", {"total_iters": rng.choice((3, 20)), "power": rng.choice((1.0, 2.0))}),
            ("CosineAnnealingWarmRestarts", {"T_0": rng.choice((1, 3)), "T_mult": rng.choice((1, 2))}),
            (
                "CyclicLR",
                {"base_lr": 0.001, "max_lr": 0.05, "step_size_up": rng.choice((1, 3)), "cycle_momentum": False},
            ),
            ("OneCycleLR", {"max_lr": 0.05, "total_steps": 20, "pct_start": rng.choice((0.1, 0.3, 1.0))}),
        )
    )


def batches(case: dict[str, Any], count: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        if case["tokens"]:
            yield torch.randint(0, case["tokens"], case["input"])
        else:
            yield torch.randn(case["input"])


def parameter_lists(case: dict[str, Any], named: list[tuple[str, Any]]) -> list[list[Any]]:
    """The parameters of every group."""
    count = 1 + len(case["groups"])
    return [[p for i, (_, p) in enumerate(named) if i % count == g] for g in range(count)]


class Run:
    """A model in training, of either library: `library` has the optimizers, `rates` the schedules."""

    def __init__(self, case: dict[str, Any], net: Any, names: list[str], library: Any, rates: Any) -> None:
        self.case, self.net, self.library = case, net, library
        own = dict(net.named_parameters())
        self.named = [(name, own[name]) for name in names]
        lists = parameter_lists(case, self.named)
        kind, options = case["optimizer"]
        groups = [{"params": params, **extra} for params, extra in zip(lists, [{}, *case["groups"]], strict=True)]
        self.optimizer = getattr(library, kind)(groups if len(groups) > 1 else lists[0], **options)
        self.schedules = [getattr(rates, name)(self.optimizer, **given) for name, given in case["schedules"]]

    def freeze(self, on: bool) -> None:
        for i, (_, p) in enumerate(self.named):
            if self.case["frozen"] and i % self.case["frozen"] == 0:
                p.requires_grad = not on

    def loss(self, y: Any, target: torch.Tensor) -> Any:
        raise NotImplementedError

    def clip(self) -> Any:
        raise NotImplementedError

    def step(self, number: int, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        """The losses of the step's batches and the norm of their gradients."""
        self.net.train(not self.case["evaluates"] or (number + 1) % self.case["evaluates"] != 0)
        if number == self.case["thaws"]:
            self.freeze(False)
        if self.case["zero"] is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self.case["zero"])
        told = []
        for x, target in data:
            loss = self.loss(self.forward(x), target)
            if self.case["twice"]:
                self.backward_first(loss)
            loss.backward()
            told.append(loss.item())
        for i, (_, p) in enumerate(self.named):
            if self.case["drops"] and (i + number) % self.case["drops"] == 0:
                p.grad = None
        told.append(float(self.clip() or 0.0))
        self.optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        return told

    def forward(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def backward_first(self, loss: Any) -> None:
        raise NotImplementedError


class Theirs(Run):
    def __init__(self, case: dict[str, Any], net: nn.Module, names: list[str], dtype: torch.dtype) -> None:
        self.dtype = dtype
        super().__init__(case, net.to(dtype), names, torch.optim, torch.optim.lr_scheduler)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x if self.case["tokens"] else x.to(self.dtype))

    def loss(self, y: Any, target: torch.Tensor) -> Any:
        if self.case["loss"] == "classes":
            return nn.functional.cross_entropy(y, target)
        if self.case["loss"] == "sum":
            return (y * target.to(self.dtype)).sum() / 8
        return ((y - target.to(self.dtype)) ** 2).mean()

    def backward_first(self, loss: Any) -> None:
        loss.backward(retain_graph=True)

    def clip(self) -> Any:
        how, *limits = self.case["clip"] or (None,)
        params = [p for _, p in self.named]
        if how == "norm":
            return torch.nn.utils.clip_grad_norm_(params, *limits).item()
        return torch.nn.utils.clip_grad_value_(params, *limits) if how == "value" else None


LABELS: dict[str, Any] = {"torch": lambda t: t, "numpy": torch.Tensor.numpy, "list": torch.Tensor.tolist}


class Ours(Run):
    def __init__(self, case: dict[str, Any], net: Any, names: list[str]) -> None:
        super().__init__(case, net, names, ndl.optim, ndl.optim)
        self.called = operator_fusion.fuse(net) if case["fused"] else net
        wrong = [name for name, p in self.named if p.rule != "torch"]
        if wrong or self.optimizer.rule != "torch":
            raise Wrong(f"parameters of a converted model step by rule needle: {wrong or 'all'}")

    def tensor(self, x: torch.Tensor) -> Any:
        dtype = self.case["dtype"] if x.is_floating_point() else "int64"
        device = ndl.cpu() if self.case["dtype"] == "float32" else ndl.cpu_numpy()
        return ndl.Tensor(x.numpy(), device=device, dtype=dtype, requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.called(self.tensor(x))

    def loss(self, y: Any, target: torch.Tensor) -> Any:
        if self.case["loss"] == "classes":
            return ndl.ops.cross_entropy(y, LABELS[self.case["labels"]](target))
        if self.case["loss"] == "sum":
            return (y * self.tensor(target)).sum() / 8
        return ndl.ops.mean((y - self.tensor(target)) ** 2)

    def backward_first(self, loss: Any) -> None:
        loss.backward()

    def clip(self) -> Any:
        how, *limits = self.case["clip"] or (None,)
        params = [p for _, p in self.named]
        if how == "norm":
            return ndl.optim.clip_grad_norm(params, *limits)
        return ndl.optim.clip_grad_value(params, *limits) if how == "value" else None

    def resumed(self) -> Ours:
        """The run over again from what was saved of it."""
        with tempfile.TemporaryDirectory() as folder:
            ndl.save(self.net, Path(folder) / "net")
            net = placed(ndl.load(Path(folder) / "net"), self.case["dtype"])
        again = Ours(self.case, net, [name for name, _ in self.named])
        again.optimizer.load_state_dict(self.optimizer.state_dict())
        for old, new in zip(self.schedules, again.schedules, strict=True):
            new.load_state_dict(old.state_dict())
        return again


def placed(net: Any, dtype: str) -> Any:
    return net if dtype == "float32" else net.to(ndl.cpu_numpy(), dtype)


def check(case: Any) -> str:
    warnings.filterwarnings("ignore")
    source = model(case["layers"]).train()
    try:
        with torch.no_grad():
            shape = source(next(batches(case, 1))).shape
    except (RuntimeError, ValueError) as e:
        return f"torch refuses: {str(e).split('.')[0][:60]}"
    if not shape.numel() or (case["loss"] == "classes" and len(shape) < 2):
        return "no loss"
    names = [name for name, _ in source.named_parameters()]
    if not names:
        return "no parameters"
    return compare(case, source, names, shape)


def compare(case: dict[str, Any], source: nn.Module, names: list[str], shape: torch.Size) -> str:
    import copy

    for i, p in enumerate(source.parameters()):
        p.requires_grad = not (case["frozen"] and i % case["frozen"] == 0)
    if case["frozen"] == 1 or not any(p.requires_grad for p in source.parameters()):
        return "nothing trains"
    try:
        net = placed(torch2needle.convert(copy.deepcopy(source)), case["dtype"])
        ours = Ours(case, net, names)
    except (torch2needle.Unsupported, torch2needle.ConversionError, ValueError) as e:
        if isinstance(e, ValueError) and not SENTENCE.match(str(e)):
            raise
        return f"refused: {str(e)[:60]}"
    judge = Theirs(case, copy.deepcopy(source), names, torch.float64)
    plain = Theirs(case, copy.deepcopy(source), names, torch.float32) if case["dtype"] == "float32" else judge
    for number in range(case["steps"]):
        classes = case["loss"] == "classes"
        data = [
            (x, torch.randint(0, shape[1], (shape[0], *shape[2:])) if classes else torch.randn(shape))
            for x in batches(case, case["accumulate"])
        ]
        try:
            want = judge.step(number, data)
            own = want if plain is judge else plain.step(number, data)
        except RuntimeError as e:
            return f"torch refuses: {str(e)[:60]}"
        if not np.isfinite(want).all() or max(map(abs, want)) > HUGE:
            return "diverges"
        if case["resumes"] == number:
            ours = ours.resumed()
        try:
            got = ours.step(number, data)
        except Exception as e:
            if not SENTENCE.match(str(e)):
                raise
            return f"refused: {str(e)[:60]}"
        agree(f"step {number}: losses and norm", got, want, own, case["dtype"])
        agree(
            f"step {number}: rates",
            *([g["lr"] for g in r.optimizer.param_groups] for r in (ours, judge, judge)),
            "float64",
        )
    states = [r.net.state_dict() for r in (ours, judge, plain)]
    if list(states[0]) != list(states[1]):
        raise Wrong(f"names differ: {sorted(set(states[0]) ^ set(states[1]))}")
    for name in states[0]:
        got, want, own = (np.asarray(s[name].numpy(), "float64") for s in states)
        agree(name, got, want, own, case["dtype"])
    for r in (ours, judge, plain):
        r.net.eval()
    x = next(batches(case, 1))
    with torch.no_grad(), ndl.no_grad():
        agree("evaluation", *(r.forward(x).numpy() for r in (ours, judge, plain)), case["dtype"])
    return "agrees"


def agree(what: str, got: Any, want: Any, own: Any, dtype: str) -> None:
    """Raise Wrong unless `got` is `want` up to rounding; `own`: what torch gets in float32."""
    got, want, own = (np.asarray(a, "float64") for a in (got, want, own))
    if got.shape != want.shape:
        raise Wrong(f"{what} has shape {got.shape}, torch's {want.shape}")
    if not want.size:
        return
    scale = max(np.abs(want).max(), 1e-2)
    allowed = TOLERANCE[dtype] * scale + OWN_ERROR * np.abs(own - want).max()
    error = np.abs(got - want).max()
    if not error <= allowed:
        raise Wrong(f"{what} differs by {error:.2e}, allowed {allowed:.2e}")


def smaller(case: Any) -> Iterable[Any]:
    layers = case["layers"]
    for i in range(len(layers)):
        if len(layers) > 1:
            yield {**case, "layers": layers[:i] + layers[i + 1 :]}
    plain = {"schedules": [], "clip": None, "accumulate": 1, "groups": [], "frozen": 0, "thaws": None, "fused": False}
    plain |= {
        "resumes": None,
        "evaluates": None,
        "drops": 0,
        "twice": False,
        "labels": "torch",
        "zero": None,
        "loss": "square",
        "dtype": "float64",
        "steps": 1,
    }
    plain["optimizer"] = ("SGD", {"lr": 0.01})
    for key, value in plain.items():
        if case[key] != value:
            yield {**case, key: value}
    if case["steps"] > 1:
        yield {**case, "steps": case["steps"] - 1}
    kind, options = case["optimizer"]
    for name in options:
        yield {**case, "optimizer": (kind, {k: v for k, v in options.items() if k != name})}
    for i in range(len(case["schedules"])):
        yield {**case, "schedules": case["schedules"][:i] + case["schedules"][i + 1 :]}
    for i, (name, args, given) in enumerate(layers):
        for key in given:
            rest = {k: v for k, v in given.items() if k != key}
            yield {**case, "layers": [*layers[:i], (name, args, rest), *layers[i + 1 :]]}
    if case["input"][0] > 1:
        yield {**case, "input": (1, *case["input"][1:])}
