"""The main job on real pictures: convert, check, fuse, compile and run ResNet-18 and a UNet; table and HTML report.

`python profiling/demo.py [--out report] [--rounds 3]`
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

import needle as ndl
import operator_fusion
import report
import torch2needle
from bench import cpu_name, median_time
from torch2needle import models

SIZES = {"resnet18": (224, 224), "unet": (256, 384)}  # height, width


def pictures(height: int, width: int) -> tuple[torch.Tensor, list[np.ndarray]]:
    """scikit-learn's two photographs: normalised (2, 3, height, width) floats, and the resized pictures."""
    resized = [np.asarray(Image.fromarray(p).resize((width, height))) for p in load_sample_images().images]
    x = torch.tensor(np.stack(resized)).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (x - mean[:, None, None]) / std[:, None, None], resized


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of `want`."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def run_model(name: str, rounds: int) -> dict:
    """Every step of the main job for one model; what the report shows of it."""
    build = {"resnet18": models.resnet18, "unet": models.unet}[name]
    torch.manual_seed(0)
    model = models.randomize(build(), seed=0).eval()
    x, shown = pictures(*SIZES[name])
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        plain = model(x)
    start = time.perf_counter()
    net = torch2needle.convert(model)
    converted = time.perf_counter()
    fused = operator_fusion.fuse(net)
    fused_at = time.perf_counter()
    exe = ndl.compile(fused, (x,))
    done = time.perf_counter()

    as_torch = lambda t: torch.from_numpy(t.numpy())  # noqa: E731
    outputs = {
        "torch eager": plain,
        "needle eager": as_torch(net(x)),
        "needle fused": as_torch(fused(x)),
        "needle compiled": exe(x),
    }
    calls = {
        "torch eager": lambda: model(x),
        "needle eager": lambda: net(x),
        "needle fused": lambda: fused(x),
        "needle compiled": lambda: exe(x),
    }
    times: dict[str, list[float]] = {k: [] for k in calls}
    with torch.no_grad():
        for _ in range(rounds):
            for k, call in calls.items():
                times[k].append(median_time(call, 0.3, least=1))
    return {
        "name": name,
        "shape": tuple(x.shape),
        "seconds": {"convert": converted - start, "fuse": fused_at - converted, "compile": done - fused_at},
        "errors": {k: largest_error(v, exact) for k, v in outputs.items()},
        "agree": float((exe(x).argmax(1) == plain.argmax(1)).float().mean()),
        "times": times,
        "fusions": str(fused.fusion_report),
        "profile": exe.profile(x, rounds=3),
        "memory": exe.memory,
        "pictures": shown,
        "output": exe(x).numpy(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="report")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{cpu_name()}, {ndl.isa()}, {ndl.get_num_threads()} threads; batch: two photographs")
    results = []
    for name in SIZES:
        r = run_model(name, args.rounds)
        results.append(r)
        steps = ", ".join(f"{k} {v:.2f} s" for k, v in r["seconds"].items())
        print(f"\n{name} {r['shape']}: {steps}; class agreement with torch {100 * r['agree']:.1f} %")
        print(f"  {'engine':<18}{'ms':>10}{'error against float64':>24}")
        for k, seconds in r["times"].items():
            print(f"  {k:<18}{1e3 * sorted(seconds)[len(seconds) // 2]:10.2f}{r['errors'][k]:24.1e}")
        limit = max(1e-5, 4 * r["errors"]["torch eager"])
        worst = max(v for k, v in r["errors"].items() if k != "torch eager")
        if worst > limit:
            raise SystemExit(f"[demo] {name} differs from float64 torch by {worst:.1e}, the limit is {limit:.1e}.")
    page = report.write(results, Path(args.out), cpu_name())
    print(f"\nreport: {page}")


if __name__ == "__main__":
    main()
