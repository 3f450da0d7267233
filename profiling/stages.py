"""Every stage of one model, from torch eager to needle compiled: times, errors, classes, profiles. The result is plain data."""

from __future__ import annotations

import base64
import copy
import io
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import needle as ndl
import operator_fusion
import torch2needle
from bench import PAUSE, median_time
from needle.profiler.load import Load
from needle.profiler.plots import COLORS
from pictures import as_pixels, picture_crops
from pipeline import OptionError, Options
from torch2needle import models

BUILDERS: dict[str, Callable[[Options], torch.nn.Module]] = {
    "resnet18": lambda o: models.resnet18(o.classes),
    "resnet34": lambda o: models.resnet34(o.classes),
    "resnet50": lambda o: models.resnet50(o.classes),
    "resnet101": lambda o: models.resnet101(o.classes),
    "unet": lambda o: models.unet(n_classes=o.classes, base=o.base),
    "unet_bilinear": lambda o: models.unet(n_classes=o.classes, bilinear=True, base=o.base),
}
BUDGET = 0.2  # seconds of calls for one stage in one round
PEERS = ("torch eager", "torch channels_last")
SHOWN = 8  # pictures on the page


def build(options: Options) -> torch.nn.Module:
    """The torch model in eval mode, with seeded random weights or those of a file."""
    torch.manual_seed(0)
    model = BUILDERS[options.model](options)
    if options.weights is None:
        return models.randomize(model, seed=0).eval()
    try:
        model.load_state_dict(read_weights(options.weights))
    except (RuntimeError, AttributeError, TypeError) as e:
        reason = " ".join(str(e).split())[:200]
        raise OptionError(f"[pipeline] {options.weights.name} does not fit {options.model}: {reason}") from None
    return model.eval()


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged or unsafe file: torch, pickle and zipfile raise their own kinds
        reason = " ".join(str(e).split())[:160]
        raise OptionError(f"[pipeline] {path.name} cannot be read as a state dict: {reason}") from None


def require_device(options: Options) -> None:
    from needle.backend_selection import BACKEND

    if options.backend != BACKEND:
        raise OptionError(f"[pipeline] needle already runs on backend {BACKEND}, got --backend {options.backend}.")
    device = {"cpu": ndl.cpu, "cuda": ndl.cuda, "hip": ndl.hip}[options.device]()
    try:
        device.require()
    except RuntimeError as e:
        raise OptionError(str(e)) from None
    if device != ndl.cpu():
        raise OptionError(f"[pipeline] models run on device cpu only, got {options.device}.")


def as_torch(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(x.numpy())


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of `want`."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def time_stages(calls: dict[str, Callable], x: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """One row a stage; in every round each stage runs once, and ratios are taken within a round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with tqdm(total=rounds * len(calls), desc="stages", leave=False) as bar:
        for call in calls.values():
            call(x)
        for _ in range(rounds):
            for name, call in calls.items():
                bar.set_postfix_str(name)
                time.sleep(PAUSE)
                times[name].append(median_time(lambda call=call: call(x), BUDGET, least=1))  # type: ignore[misc]
                bar.update()
    return [
        {
            "name": name,
            **spread(seconds),
            "times": seconds,
            "speedup": {p: spread([a / b for a, b in zip(times[p], seconds, strict=True)]) for p in PEERS},
        }
        for name, seconds in times.items()
    ]


def add_errors(
    rows: list[dict[str, Any]], calls: dict[str, Callable], model: torch.nn.Module, x: torch.Tensor
) -> float:
    """Errors of every stage against float64 and float32 torch; returns the largest that counts as right."""
    exact, plain = copy.deepcopy(model).double()(x.double()), model(x)
    for row in rows:
        out = as_torch(calls[row["name"]](x))
        row["float64"], row["float32"] = largest_error(out, exact), largest_error(out, plain)
    return max(1e-5, 4 * largest_error(plain, exact))


def compare_classes(calls: dict[str, Callable], options: Options) -> tuple[dict[str, Any], list[str]]:
    """How often the largest class is torch's, by stage, and the pictures as data URLs."""
    x = picture_crops(options.pictures, options.height, options.width, seed=1)
    found: dict[str, torch.Tensor] = {}
    with tqdm(total=len(calls) * len(x), desc="pictures", leave=False) as bar:
        for name, call in calls.items():
            parts = []
            for part in x.split(options.batch):
                parts.append(as_torch(call(part)).argmax(1))
                bar.update(len(part))
            found[name] = torch.cat(parts)
    want = found[PEERS[0]]
    same = {n: (c == want).flatten(1).float().mean(1) if c.ndim > 1 else (c == want).float() for n, c in found.items()}
    last = list(found)[-1]
    maps = want.ndim > 1
    result = {
        "pictures": len(x),
        "kind": "pixels with torch's largest class" if maps else "pictures with torch's largest class",
        "agree": {n: float(s.mean()) for n, s in same.items()},
        "by_picture": [
            {n: float(s[i]) for n, s in same.items()} if maps else {n: int(c[i]) for n, c in found.items()}
            for i in range(len(x))
        ],
        "maps": maps,
        "stage": last,
    }
    return result, [picture(x[i], found[last][i] if maps else None) for i in range(min(SHOWN, len(x)))]


def picture(x: torch.Tensor, classes: torch.Tensor | None) -> str:
    """A picture as a data URL; a class map stands under it."""
    pixels = as_pixels(x)
    if classes is not None:
        palette = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLORS], "uint8")
        pixels = np.concatenate([pixels, palette[classes.numpy() % len(palette)]])
    data = io.BytesIO()
    image = Image.fromarray(pixels)
    image.thumbnail((352, 704))
    image.save(data, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def fusion_data(report: Any) -> dict[str, Any]:
    return {
        "nodes_before": report.nodes_before,
        "nodes_after": report.nodes_after,
        "counts": report.counts,
        "fired": [{"pattern": f.pattern, "node": f.node_out, "stands_for": f.nodes_in} for f in report.fired],
        "near_misses": [{"pattern": m.pattern, "node": m.node, "reason": m.reason} for m in report.near_misses],
    }


@torch.no_grad()
@ndl.no_grad()
def run(options: Options) -> tuple[dict[str, Any], list[str]]:
    """Everything about one model: plain data, and pictures as data URLs. Raises OptionError for what cannot be served."""
    require_device(options)
    if options.threads:
        ndl.set_num_threads(options.threads)
    torch.set_num_threads(ndl.get_num_threads())
    model = build(options)
    x = picture_crops(options.batch, options.height, options.width)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    print(f"{options.model} {tuple(x.shape)}: converting, fusing, compiling")
    seconds, start = {}, time.perf_counter()
    net = torch2needle.convert(model)
    seconds["convert"] = time.perf_counter() - start
    fused = operator_fusion.fuse(net)
    seconds["fuse"] = time.perf_counter() - start - seconds["convert"]
    calls: dict[str, Callable] = {
        PEERS[0]: model,
        PEERS[1]: lambda x: last(x.contiguous(memory_format=torch.channels_last)),
        "needle eager": net,
        "needle fused": fused,
    }
    profiled: dict[str, Any] = {"eager": net, "fused": fused}
    notes = [] if options.weights else ["Weights are random (seed 0): classes mean nothing, only their agreement does."]
    if options.backend == "nd":
        before = time.perf_counter()
        exe = ndl.compile(fused, (x,))
        seconds["compile"] = time.perf_counter() - before
        exe(x)
        calls["needle compiled"], profiled["compiled"] = exe, exe
    else:
        fused(x)
        notes.append("The numpy backend has no executor, so nothing is compiled.")
    seconds["first_result"] = time.perf_counter() - start

    load = Load()
    rows = time_stages(calls, x, options.rounds)
    if warning := load.warning(ndl.get_num_threads()):
        notes.append(warning)
    limit = add_errors(rows, calls, model, x)
    agreement, images = compare_classes(calls, options)
    profiles = {}
    for name, target in profiled.items():
        print(f"{options.model}: profile of the {name} form")
        profiles[name] = ndl.profile(target, x, rounds=options.rounds).to_dict() | {"model": options.model}
    result = {
        "model": options.model,
        "backend": options.backend,
        "device": options.device,
        "dtype": options.dtype,
        "weights": options.weights.name if options.weights else "random",
        "rounds": options.rounds,
        "input": list(x.shape),
        "parameters": sum(p.numel() for p in model.parameters()),
        "notes": notes,
        "seconds": seconds,
        "stages": rows,
        "limit": limit,
        "agreement": agreement,
        "fusion": fusion_data(fused.fusion_report),
        "profiles": profiles,
    }
    return result, images
