"""What `scripts/gpu_check` measures on a CUDA or ROCm machine: needle beside torch eager and torch.compile.

Ratios: engine / needle of per-round times, median of rounds with the least and the largest; over 1, needle is faster. A row that
needle or an engine refuses, and one for which the time is up, is unmeasured, with the reason; nothing is estimated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch2needle
from torch2needle import models

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, BURST = 9, 0.03  # seconds
TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "float16": 3e-2}  # of the largest value, against torch eager in float32


@dataclass(frozen=True)
class Row:
    """A model or an op, its inputs and how it computes."""

    title: str
    build: Callable[[], tuple[Any, tuple]]  # a module or function and its inputs, on the CPU
    precision: str


def image_model(name: str, batch: int, size: int) -> tuple[Any, tuple]:
    return models.randomize(getattr(models, name)(), seed=0).eval(), (torch.randn(batch, 3, size, size),)


class Encoder(torch.nn.Module):
    """BERT-base without its embedding: 12 layers of width 768, post-norm, GELU (Devlin et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def encoder(batch: int) -> tuple[Any, tuple]:
    return Encoder().eval(), (torch.randn(batch, 128, 768),)


def model_rows() -> list[Row]:
    """The most telling first, since the time may be up."""
    rows = []
    for batch in (1, 64):
        for precision in ("float32", "float16", "tf32"):
            for name, title, size in (("resnet50", "ResNet-50 @224", 224), ("unet", "UNet 31 M @256", 256)):
                rows.append(Row(f"{title}, batch {batch}", partial(image_model, name, batch, size), precision))
            rows.append(Row(f"BERT-base S=128, batch {batch}", partial(encoder, batch), precision))
    return rows


def conv_bn_relu(batch: int, channels: int, out: int, size: int, kernel: int) -> tuple[Any, tuple]:
    conv = torch.nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)
    block = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(out), torch.nn.ReLU()).eval()
    return block, (torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last),)


def linear_relu(rows: int, features: int, out: int) -> tuple[Any, tuple]:
    return torch.nn.Sequential(torch.nn.Linear(features, out), torch.nn.ReLU()).eval(), (torch.randn(rows, features),)


def op_rows() -> list[Row]:
    """Alone, as torch.ops.needle; the shapes are bound by memory."""
    convs = [(64, 64, 64, 56, 1), (64, 64, 256, 56, 1), (64, 64, 64, 56, 3), (1, 64, 64, 56, 3)]
    linears = [(65536, 64, 64), (16384, 256, 256), (4096, 1024, 1024)]
    rows = [
        Row(f"conv-bn-relu {b} x {c}-{o} @{s}, {k}x{k}", partial(conv_bn_relu, b, c, o, s, k), "float32")
        for b, c, o, s, k in convs
    ]
    return rows + [Row(f"linear-relu {m} x {k}-{n}", partial(linear_relu, m, k, n), "float32") for m, k, n in linears]


def needle_op(block: torch.nn.Sequential) -> Callable:
    """A block of layers as one call of torch.ops.needle."""
    from torch2needle.torch_ops import NEEDLE

    first: Any = block[0]
    second: Any = block[1]
    if isinstance(first, torch.nn.Linear):
        return lambda x: NEEDLE.linear_relu(x, first.weight, first.bias)
    statistics_ = (second.running_mean, second.running_var, second.weight, second.bias)
    return lambda x: NEEDLE.conv2d_bn_relu(x, first.weight, None, *statistics_, first.stride, first.padding)


def refuse_unfused(op: Callable, inputs: tuple) -> None:
    """Fails where a device without the kernel runs torch's own operations."""
    with torch.profiler.profile() as profile:
        op(*inputs)
    used = {e.key for e in profile.key_averages()} & {"aten::conv2d", "aten::linear", "aten::batch_norm"}
    if used:
        raise RuntimeError(f"this device has no kernel for it, torch's {', '.join(sorted(used))} ran.")


def needle_call(module: Any, inputs: tuple, row: Row) -> Callable:
    if isinstance(module, torch.nn.Sequential):
        op = needle_op(module)
        refuse_unfused(op, inputs)
        return op
    options: dict[str, Any] = {"precision": "tf32"} if row.precision == "tf32" else {}
    return torch2needle.compile(module, inputs, tune=True, **options)


def engines() -> dict[str, Callable[[Any, tuple, Row], Callable]]:
    """needle first, then torch's; each makes what is timed."""
    found: dict[str, Callable[[Any, tuple, Row], Callable]] = {
        "needle": needle_call,
        "torch eager": lambda module, inputs, row: module,
        "torch.compile": lambda module, inputs, row: torch.compile(module, mode="max-autotune", fullgraph=True),
    }
    try:
        import torch_tensorrt  # noqa: F401

        found["TensorRT"] = lambda module, inputs, row: torch.compile(module, backend="tensorrt")
    except ImportError:
        pass
    return found


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable, inputs: tuple, device: str, repeats: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call(*inputs)
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return text if len(text) < 160 else text[:157] + "..."


def measure(row: Row, device: str, chosen: dict[str, Callable], rounds: int) -> dict[str, Any]:
    """Times of every engine in turns; an engine that refuses or is wrong gets its reason instead."""
    torch.manual_seed(0)
    module, inputs = row.build()
    module, inputs = module.to(device), tuple(x.to(device) for x in inputs)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    exact = module(*inputs).float()
    if row.precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    elif row.precision == "float16":
        module, inputs = module.half(), tuple(x.half() for x in inputs)
    result: dict[str, Any] = {"row": row.title, "precision": row.precision, "unmeasured": {}}
    calls: dict[str, Callable] = {}
    for name, make in chosen.items():
        try:
            call = make(module, inputs, row)
            error = float((call(*inputs).float() - exact).abs().max() / exact.abs().max())
            if not error <= TOLERANCE[row.precision]:
                raise RuntimeError(f"wrong by {error:.1e} of the largest value.")
            calls[name] = call
        except Exception as refused:
            result["unmeasured"][name] = one_line(refused)
    repeats = {n: max(1, int(BURST / min(seconds(c, inputs, device, 1) for _ in range(3)))) for n, c in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        names = list(calls)
        for name in names[i % len(names) :] + names[: i % len(names)] if names else []:
            times[name].append(seconds(calls[name], inputs, device, repeats[name]))
    result["ms"] = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    result["ratios"] = {}
    for name, found in times.items():
        if name != "needle" and "needle" in times:
            ratios = [other / ours for other, ours in zip(found, times["needle"], strict=True)]
            result["ratios"][name] = (statistics.median(ratios), min(ratios), max(ratios))
    return result


def line(result: dict[str, Any], names: list[str]) -> str:
    cells = []
    for name in names:
        if name in result["unmeasured"]:
            cells.append("unmeasured")
        elif name in result["ratios"]:
            median, least, most = result["ratios"][name]
            cells.append(f"{median:.2f} ({least:.2f}-{most:.2f})")
        else:
            cells.append(f"{result['ms'][name]:.3g} ms")
    text = f"{result['row']:<40}{result['precision']:<10}" + "".join(f"{c:>22}" for c in cells)
    return "\n".join([text, *(f"    unmeasured: {n}: {why}" for n, why in result["unmeasured"].items())])


def benchmark(
    rows: list[Row], device: str, chosen: dict[str, Callable], rounds: int, until: float
) -> list[dict[str, Any]]:
    names = list(chosen)
    print(f"{'':<50}" + "".join(f"{n:>22}" for n in names))
    results = []
    for row in rows:
        if time.monotonic() > until:
            why = dict.fromkeys(names, "the time was up (--minutes).")
            result: dict[str, Any] = {
                "row": row.title,
                "precision": row.precision,
                "unmeasured": why,
                "ms": {},
                "ratios": {},
            }
        else:
            with torch.no_grad():
                result = measure(row, device, chosen, rounds)
            torch.compiler.reset()
        results.append(result)
        print(line(result, names), flush=True)
    return results


def step(title: str, *command: str, seconds: float = 240) -> bool:
    """Runs a part of the check; False when it failed or took too long."""
    print(f"\n== {title}", flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"[gpu_check] {title} took more than {seconds:.0f} s.")
        return False


def build(folder: Path) -> bool:
    """The GPU library for the device at hand alone."""
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
        options = ["-DNEEDLE_HIP=ON", f"-DNEEDLE_HIP_ARCHITECTURES={architecture}"]
    else:
        major, minor = torch.cuda.get_device_capability()
        options = ["-DNEEDLE_CUDA=ON", f"-DNEEDLE_CUDA_ARCHITECTURES={major}{minor}"]
    os.environ["NEEDLE_GPU_LIBRARIES"] = str(folder)
    configured = step("configure", "cmake", "-S", "csrc/gpu", "-B", str(folder), *options)
    return configured and step("build", "cmake", "--build", str(folder), "-j", str(os.cpu_count()), seconds=400)


def sanitizer_sample() -> bool:
    tool = shutil.which("compute-sanitizer")
    if not tool:
        print("[gpu_check] compute-sanitizer is missing: its sample was not run.")
        return True
    sample = ["-m", "pytest", "-x", "tests/test_gpu.py", "-k", "cuda and (64-64-64 or strided)"]
    return step("compute-sanitizer", tool, "--error-exitcode", "1", sys.executable, *sample, seconds=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="rows that start later are unmeasured")
    parser.add_argument("--rows", nargs="*", help="only rows with one of these words in their names")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the benchmark out")
    parser.add_argument("--json", type=Path, default=ROOT / "profiling/results/gpu-check.json")
    args = parser.parse_args()
    until, good = time.monotonic() + 60 * args.minutes, True
    if args.device == "cuda":
        present = torch.cuda.is_available()
        if present:
            good = build(ROOT / "build" / "gpu-check")
        tests = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("test_gpu*.py"))
        good = step("tests", sys.executable, "-m", "pytest", *tests, "tests/test_hipify.py") and good
        if not present:
            print("[gpu_check] this machine has no GPU that torch can use: nothing was measured on one.")
            return 0 if good else 1
        good = sanitizer_sample() and good
    rows = [r for r in op_rows() + model_rows() if not args.rows or any(word in r.title for word in args.rows)]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"\n== benchmark on {name}, torch {torch.__version__}")
    results = benchmark(rows, args.device, engines(), ROUNDS, until)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": results}, indent=1) + "\n")
    print(f"[gpu_check] {'passed' if good else 'failed'}; results are in {args.json}.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
