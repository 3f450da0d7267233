"""GF/s of single kernels beside the FMA peak, GB/s of norms beside a copy, which the same process measures. `--json FILE`"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import needle as ndl
from needle import _core
from needle.profiler import fma_peak
from needle.profiler.peaks import stream_rate

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

# name, kind, (channels, height = width, groups if there are any), kernels that norm. Of blocked images a convolution makes
# them and another reads what is normed; "rows" are the pixels of such an image. A step of training has its gradients, too.
NORMS = [
    ("group 32 of 320 @32", "group", (320, 32, 32), ("layer_norm", "fill", "batch_norm")),
    ("group 32 of 320 @32 blocked", "group blocked", (320, 32, 32), ("group_norm_blocked",)),
    ("group 8 of 64 @64 blocked", "group blocked", (64, 64, 8), ("group_norm_blocked",)),
    ("instance 64 @64", "instance", (64, 64, 64), ("layer_norm", "fill", "batch_norm")),
    ("instance 64 @64 blocked", "instance blocked", (64, 64, 64), ("group_norm_blocked",)),
    ("layer 96 @56 rows", "layer", (96, 56), ("layer_norm",)),
    ("layer 384 @14 rows", "layer", (384, 14), ("layer_norm",)),
    ("layer 96 @56 blocked", "layer blocked", (96, 56), ("layer_norm_blocked",)),
    ("layer 384 @14 blocked", "layer blocked", (384, 14), ("layer_norm_blocked",)),
    ("batch training 64 @56", "batch", (64, 56), ("batch_norm_train", "batch_norm_train_grad")),
    (
        "batch training 64 @56 blocked",
        "batch blocked",
        (64, 56),
        ("batch_norm_moments", "batch_norm", "batch_norm_grad_sums", "batch_norm_grad_apply"),
    ),
]


class Normed(ndl.nn.Module):
    """A norm of an image in needle's layout or, between convolutions of 1 x 1, of one in blocks."""

    def __init__(self, kind: str, channels: int, groups: int) -> None:
        super().__init__()
        self.rows, self.blocked = kind.startswith("layer"), kind.endswith("blocked")
        made = {
            "group": lambda: ndl.nn.GroupNorm(groups, channels),
            "instance": lambda: ndl.nn.InstanceNorm(channels, affine=True),
            "layer": lambda: ndl.nn.LayerNorm(channels),
            "batch": lambda: ndl.nn.BatchNorm2d(channels),
        }
        self.norm = made[kind.split(maxsplit=1)[0]]()
        scale = np.float32(channels**-0.5)
        one, other = np.random.default_rng(0).standard_normal((2, channels, channels, 1, 1), dtype="float32") * scale
        self.one, self.other = ndl.nn.Parameter(one), ndl.nn.Parameter(other)

    def forward(self, x: Any) -> Any:
        if not self.blocked:
            return self.norm(x * 1)  # in training a gradient of it is wanted
        y = ndl.ops.conv2d(x, self.one)
        y = self.norm(y.permute((0, 2, 3, 1))).permute((0, 3, 1, 2)) if self.rows else self.norm(y)
        return ndl.ops.conv2d(y, self.other)


def norm_for(kind: str, sizes: tuple[int, ...]) -> tuple[Callable[[], list], int]:
    """A profile of a norm's plan, and the least bytes that move: an array read and one written, in training 2 and 3 of each."""
    c, size, groups = (*sizes, 1)[:3]
    x = np.random.default_rng(0).standard_normal((1, c, size, size), dtype="float32")
    if kind == "layer":
        x = x.reshape(c, -1).T.copy()
    net = Normed(kind, c, groups)
    if kind.startswith("batch"):
        net.norm.train()
        x = np.repeat(x, 4, 0)
        loss = lambda y, _: (y * y).mean()  # noqa: E731
        step = ndl.compile_step(net, loss, ndl.optim.SGD(net.parameters(), lr=0.0), (x, None))
        return lambda: step.profile(x, rounds=15), 5 * x.nbytes
    exe = ndl.compile(net.eval(), (x,))
    return lambda: exe.profile(x, rounds=15), 2 * x.nbytes


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


def measure_norms(rounds: int) -> list[dict]:
    layers = [(name, *norm_for(kind, sizes), kernels) for name, kind, sizes, kernels in NORMS]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in layers}
    for _ in range(rounds):
        for name, profile, nbytes, kernels in layers:
            copy = max(stream_rate(nbytes, 5), stream_rate(nbytes, 5, "relu", in_place=True))
            seconds = [t for k, _, t in profile() if k in kernels]
            assert seconds, name
            rate = nbytes / sum(seconds)
            found[name].append((rate / 1e9, rate / copy))
    return [
        {"shape": name, "gbs": statistics.median(r for r, _ in rows), "of_copy": statistics.median(s for _, s in rows)}
        for name, rows in found.items()
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
    norms = measure_norms(args.rounds)
    print("norms: bytes read and written once, beside a copy of as many")
    for r in norms:
        print(f"{r['shape']:<32}{r['gbs']:8.1f} GB/s {100 * r['of_copy']:6.1f} %")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(
                {"isa": _core.isa(), "rows": rows, "geomean": geomean, "minimum": min(shares), "norms": norms},
                f,
                indent=1,
            )


if __name__ == "__main__":
    main()
