"""An entry of `models.json` or of one of the lists beside it as a torch module with random weights, and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

LIST = Path(__file__).with_name("models.json")
HARD = Path(__file__).with_name("models_hard.json")
TYPES = Path(__file__).with_name("models_types.json")
PACKAGES = Path(__file__).with_name("models_packages.json")
# Operators that torchvision's import registers fakes for; its wheel for another build of torch does not bring them.
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
KEPT: list[torch.library.Library] = []  # the declared names end with it


def allow_imports() -> None:
    """Make torchvision importable beside a torch that its wheel was not built for; torchaudio has no such way and is hidden."""
    sys.modules.setdefault("torchaudio", None)  # type: ignore[arg-type]
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        declared = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            declared.define(schema)
        KEPT.append(declared)
        importlib.import_module("torchvision")


def entries() -> list[dict[str, Any]]:
    """Those of all lists; their names differ."""
    return [e for file in (LIST, HARD, TYPES, PACKAGES) for e in json.loads(file.read_text())]


def evaluate(value: Any) -> Any:
    """{"call": "module.Name", "args": [...], "kwargs": {...}} as the call's result, also inside lists and arguments."""
    if isinstance(value, list):
        return [evaluate(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "call" not in value:
        return {k: evaluate(v) for k, v in value.items()}
    return called(value["call"])(*evaluate(value.get("args", [])), **evaluate(value.get("kwargs", {})))


def called(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def disturb(model: nn.Module) -> nn.Module:
    """Make what libraries initialise as constants matter: norms' scales and shifts, layer scales, zeroed layers."""
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
                bound = (3.0 / p[0].numel()) ** 0.5 if p.ndim > 1 and not p.any() else 0.2
                p.add_(torch.empty_like(p).uniform_(-bound, bound))
    return model


def settle(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    """BatchNorm statistics near those of an input, as after training; others make deep networks blow up rounding errors."""

    def observe(m: Any, args: tuple) -> None:
        axes = [i for i in range(args[0].ndim) if i != 1]
        spread = args[0].var(axes, correction=0) + 1e-2
        m.running_mean.copy_(args[0].mean(axes) + spread.sqrt() * torch.empty_like(spread).uniform_(-0.3, 0.3))
        m.running_var.copy_(spread * torch.empty_like(spread).uniform_(0.7, 1.3))

    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    hooks = [m.register_forward_pre_hook(observe) for m in norms]
    with torch.no_grad():
        if norms:
            model(**given)
    for hook in hooks:
        hook.remove()


def build(entry: dict[str, Any]) -> nn.Module:
    """The model in evaluation, seeded."""
    allow_imports()
    torch.manual_seed(0)
    model = disturb(evaluate(entry["model"])).eval()
    if "inputs" in entry:
        settle(model, inputs(entry)[-1])
    return model


def tensor(spec: dict[str, Any]) -> torch.Tensor:
    """{"shape"} normal numbers, of "dtype" if given; with "uniform" from 0 to 1; with "below" integers under it, not under
    "from"; "sorted" along the last axis, also "descending"; with "mask" an attention mask whose last quarter is 0."""
    shape = spec["shape"]
    if "mask" in spec:
        return (torch.arange(shape[-1]) < shape[-1] * 3 // 4).long().expand(shape).clone()
    if "below" in spec:
        made = torch.randint(spec.get("from", 0), spec["below"], shape)
    else:
        made = torch.rand(shape) if "uniform" in spec else torch.randn(shape)
        made = made.to(getattr(torch, spec.get("dtype", "float32")))
    return made.sort(-1, descending="descending" in spec)[0] if "sorted" in spec else made


def given(spec: Any) -> Any:
    """A tensor, a tuple of what a list holds, a dict, or what a call makes of such values."""
    if isinstance(spec, list):
        return tuple(map(given, spec))
    if "call" in spec:
        args, kwargs = given(spec.get("args", [])), given(spec.get("kwargs", {}))
        return called(spec["call"])(*args, **kwargs)
    return tensor(spec) if "shape" in spec else {k: given(v) for k, v in spec.items()}


def inputs(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The inputs by name: those of the first run, then those of other batch and image sizes that torch takes, too."""
    torch.manual_seed(1)
    return [{name: given(spec) for name, spec in named.items()} for named in entry["inputs"]]
