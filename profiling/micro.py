"""GF/s of single kernels beside the FMA peak that the same process measures. `python profiling/micro.py [--json FILE]`"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np

import needle as ndl
from needle import _core
from needle.profiler import fma_peak

# name, kind, sizes: conv (C_in, C_out, height = width, kernel, stride, groups if there are any), gemm (M, N, K)
SHAPES = [
    ("resnet 3x3 64 @56", "conv", (64, 64, 56, 3, 1)),
    ("resnet 3x3 128 @28", "conv", (128, 128, 28, 3, 1)),
    ("resnet 3x3 256 @14", "conv", (256, 256, 14, 3, 1)),
    ("resnet 3x3 512 @7", "conv", (512, 512, 7, 3, 1)),
    ("resnet 1x1 64-256 @56", "conv", (64, 256, 56, 1, 1)),
    ("resnet 1x1 1024-256 @14", "conv", (1024, 256, 14, 1, 1)),
    ("resnet 3x3/2 64-128 @56", "conv", (64, 128, 56, 3, 2)),
    ("resnet 1x1/2 256-512 @28", "conv", (256, 512, 28, 1, 2)),
    ("resnet 7x7/2 3-64 @224", "conv", (3, 64, 224, 7, 2)),
    ("regnet 3x3 440 / 55 @14", "conv", (440, 440, 14, 3, 1, 55)),
    ("resnext 3x3 128 / 32 @56", "conv", (128, 128, 56, 3, 1, 32)),
    ("resnext 3x3 512 / 32 @14", "conv", (512, 512, 14, 3, 1, 32)),
    ("shufflenet 1x1 240 / 3 @28", "conv", (240, 240, 28, 1, 1, 3)),
    ("groups of 24 3x3 240 @28", "conv", (240, 240, 28, 3, 1, 10)),
    ("multiplier 2 3x3 64 @56", "conv", (64, 128, 56, 3, 1, 64)),
    ("gemm 64x1024x1024", "gemm", (64, 1024, 1024)),
    ("gemm 128x256x1024", "gemm", (128, 256, 1024)),
    ("gemm 256x512x512", "gemm", (256, 512, 512)),
]


def step_for(kind: str, sizes: tuple[int, ...]) -> tuple[ndl.Executable, np.ndarray, float, str]:
    """An executable of one layer, its input, the layer's GFLOP, and the kernel that does the work."""
    rng = np.random.default_rng(0)
    if kind == "gemm":
        m, n, k = sizes
        weight = ndl.nn.Parameter(rng.standard_normal((n, k), dtype="float32"))
        x = rng.standard_normal((m, k), dtype="float32")
        exe = ndl.compile(lambda x: ndl.ops.linear(x, weight), (x,), winograd="off")
        return exe, x, 2e-9 * m * n * k, "matmul_packed"
    c, o, size, kernel, stride, groups = (*sizes, 1)[:6]
    weight = ndl.nn.Parameter(rng.standard_normal((o, c // groups, kernel, kernel), dtype="float32"))
    x = rng.standard_normal((1, c, size, size), dtype="float32")
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1
    attributes = {"stride": stride, "padding": pad, "groups": groups}
    exe = ndl.compile(lambda x: ndl.ops.conv2d(x, weight, **attributes), (x,), winograd="off")
    return exe, x, 2e-9 * (c // groups) * o * kernel * kernel * out * out, "conv2d_blocked"


def measure(rounds: int = 9) -> list[dict]:
    ndl.set_num_threads(1)
    layers = [(name, *step_for(kind, sizes)) for name, kind, sizes in SHAPES]
    rates: dict[str, list[float]] = {name: [] for name, *_ in layers}
    speeds: dict[str, list[float]] = {name: [] for name, *_ in layers}
    for _ in range(rounds):
        for name, exe, x, gflop, kernel in layers:
            peak = fma_peak() / 1e9  # beside each measurement: clocks and neighbours change from second to second
            seconds = next(t for k, _, t in exe.profile(x, rounds=15) if k == kernel)
            speeds[name].append(gflop / seconds)
            rates[name].append(gflop / seconds / peak)
    return [
        {"shape": name, "gflops": statistics.median(speeds[name]), "of_peak": statistics.median(rates[name])}
        for name in rates
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rows = measure(args.rounds)
    print(f"one thread, {_core.isa()}, FMA peak {fma_peak() / 1e9:.1f} GF/s")
    for r in rows:
        print(f"{r['shape']:<28}{r['gflops']:8.1f} GF/s {100 * r['of_peak']:6.1f} %")
    shares = [r["of_peak"] for r in rows]
    geomean = statistics.geometric_mean(shares)
    print(f"geomean {100 * geomean:.1f} %, minimum {100 * min(shares):.1f} %")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"isa": _core.isa(), "rows": rows, "geomean": geomean, "minimum": min(shares)}, f, indent=1)


if __name__ == "__main__":
    main()
