"""`torch.ops.needle.*` beside the unfused torch sequences: `python profiling/torch_ops.py [--rows ...] [--threads N] [--json F]`.

Calls alternate in one process, so that each op runs as it does between other torch ops. Ratio: torch / needle, of the least times
of all turns (on a shared machine others are those of other work), and the median of rounds; over 1, needle is faster. Training
rows are forward and backward of a sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from needle import isa
from needle.profiler import cpu_name
from torch2needle import torch_ops

NEEDLE = torch_ops.NEEDLE

# name: (op, shapes of input and weight, further arguments); convolutions run in both layouts
LINEAR = {
    "linear + ReLU, 1 x 1024 to 1024": ((1, 1024), (1024, 1024), "relu"),
    "linear + ReLU, 64 x 784 to 256": ((64, 784), (256, 784), "relu"),
    "linear + ReLU, 4096 x 64 to 64": ((4096, 64), (64, 64), "relu"),
    "linear + ReLU, 1024 x 256 to 1024": ((1024, 256), (1024, 256), "relu"),
    "linear + GELU, 128 x 768 to 3072": ((128, 768), (3072, 768), "gelu"),
}
CONV = {  # input, weight, stride, padding, groups
    "3x3 3-64 @224": ((1, 3, 224, 224), (64, 3, 3, 3), 1, 1, 1),
    "7x7/2 3-64 @224": ((1, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
    "3x3 64-64 @56": ((1, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
    "3x3 64-64 @56, batch 8": ((8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
    "3x3 512-512 @7": ((1, 512, 7, 7), (512, 512, 3, 3), 1, 1, 1),
    "3x3/2 128-256 @28": ((1, 128, 28, 28), (256, 128, 3, 3), 2, 1, 1),
    "1x1 64-256 @56": ((1, 64, 56, 56), (256, 64, 1, 1), 1, 0, 1),
    "1x1 256-64 @56, batch 8": ((8, 256, 56, 56), (64, 256, 1, 1), 1, 0, 1),
    "depthwise 3x3 144 @56": ((1, 144, 56, 56), (144, 1, 3, 3), 1, 1, 144),
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) / max(1, shape[-1 if len(shape) == 2 else len(shape) // 3]) ** 0.5


def rows() -> dict[str, tuple[str, list[Any]]]:
    """Every row: the op's name and its arguments."""
    found: dict[str, tuple[str, list[Any]]] = {}
    for name, (rows_of, weight_of, activation) in LINEAR.items():
        found[name] = ("linear_bias_act", [random(*rows_of), random(*weight_of), random(weight_of[0]), activation])
    for name, (x, w, *geometry) in CONV.items():
        stride, padding, groups = ([g] * 2 if i < 2 else g for i, g in enumerate(geometry))
        vectors = [random(w[0], 1).reshape(-1) for _ in range(4)]
        vectors[1] = vectors[1].abs() + 0.1
        for layout in ("contiguous", "channels_last"):
            to = getattr(torch, "contiguous_format" if layout == "contiguous" else layout)
            image, weight = random(*x).contiguous(memory_format=to), random(*w).contiguous(memory_format=to)
            conv = [stride, padding, [1, 1], groups]
            found[f"conv + bias + ReLU, {name}, {layout}"] = ("conv2d_bias_act", [image, weight, vectors[0], *conv])
            found[f"conv + BN + ReLU, {name}, {layout}"] = ("conv2d_bn_act", [image, weight, None, *vectors, *conv])
    found["BN + ReLU, 8 x 64 @56"] = (
        "batch_norm_act",
        [random(8, 64, 56, 56), *(random(64, 1).reshape(-1).abs() + 0.1 for _ in range(4))],
    )
    up = [random(1, 128, 28, 28), random(128, 64, 2, 2), random(64, 1).reshape(-1), [2, 2]]
    found["transposed conv + ReLU, 2x2/2 128-64 @28"] = ("conv_transpose2d_bias_act", up)
    for name, heads in {"12 heads, 128 x 64": (1, 12, 128, 64), "8 heads, 1024 x 64": (1, 8, 1024, 64)}.items():
        found[f"attention, {name}"] = ("attention", [random(*heads) for _ in range(3)])
    return found


def pair(name: str, arguments: list[Any]) -> tuple[list[Callable], list[Any]]:
    """The op and the calls of torch that it stands for, and all arguments of either."""
    rest = getattr(NEEDLE, name).default._schema.arguments[len(arguments) :]
    return [getattr(NEEDLE, name), torch_ops.OPS[name][1]], [*arguments, *(a.default_value for a in rest)]


def training(op: Callable, name: str, arguments: list[Any]) -> Callable[[], Any]:
    """Forward and backward; every tensor that is no running statistic needs a gradient."""
    constant = [a.name.startswith("running") for a in getattr(NEEDLE, name).default._schema.arguments]
    leaves = [
        a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) and not c else a
        for a, c in zip(arguments, constant, strict=True)
    ]
    needed = [a for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]

    def step() -> Any:
        return torch.autograd.grad(op(*leaves).sum(), needed)

    return step


def measure(name: str, arguments: list[Any], seconds: float, train: bool) -> dict[str, Any]:
    ops, arguments = pair(name, arguments)
    calls = [training(op, name, arguments) if train else partial(op, *arguments) for op in ops]
    with torch.set_grad_enabled(train):
        for call in calls:
            call()
        times: list[list[float]] = [[], []]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[0]) < 5:
            for call, found in zip(calls, times, strict=True):
                found.append(min(timed(call) for _ in range(3)))
    ratios = [u / f for f, u in zip(*times, strict=True)]
    return {
        "ratio": min(times[1]) / min(times[0]),
        "median": statistics.median(ratios),
        "needle_us": 1e6 * min(times[0]),
        "torch_us": 1e6 * min(times[1]),
    }


def timed(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", help="only rows with one of these words in their names")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = {}
    print(f"{cpu_name()}, {isa()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, (op, arguments) in rows().items():
        if args.rows and not any(word in name for word in args.rows):
            continue
        for train in (False, True):
            title = f"{name}{', training' if train else ''}"
            results[title] = r = measure(op, arguments, args.seconds, train)
            print(
                f"{title:<64}{r['ratio']:6.2f}x (median {r['median']:.2f}){r['needle_us']:10.0f} us",
                flush=True,
            )
    losing = [name for name, r in results.items() if r["ratio"] < 1]
    print(f"{len(losing)} of {len(results)} rows are slower than torch: {'; '.join(losing) or 'none'}")
    for kind, train in (("without gradients", False), ("with gradients", True)):
        ratios = [r["ratio"] for name, r in results.items() if name.endswith(", training") == train]
        print(f"{kind}: median {statistics.median(ratios):.2f}, least {min(ratios):.2f}")
    if args.json:
        head = {"cpu": cpu_name(), "isa": isa(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        Path(args.json).write_text(json.dumps({**head, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
