"""What `scripts/gpu_check` measures on a CUDA or ROCm machine: needle beside torch eager and torch.compile.

Ratios: engine / needle of per-round times, median of rounds with the least and the largest; over 1, needle is faster. A row that
needle or an engine refuses, and one for which the time is up, is unmeasured, with the reason; nothing is estimated.
In float16, torch's engines get a model and inputs of float16; needle's stay float32 and are rounded where they are multiplied.
"""

from __future__ import annotations

import argparse
import copy
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
from typing import Any, NamedTuple

import torch

import needle as ndl
import operator_fusion
import torch2needle
from torch2needle import models

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, BURST = 9, 0.03  # seconds
TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "float16": 3e-2}  # of the largest value, against torch eager in float32
PRECISIONS = ("float32", "float16", "tf32")


@dataclass(frozen=True)
class Row:
    """A model or an op, its inputs and how it computes."""

    title: str
    build: Callable[[], tuple[Any, tuple]]  # a module or function and its inputs, on the CPU
    precision: str


class Target(NamedTuple):
    """Where rows run: torch's device, needle's, and a name of both."""

    torch: str
    needle: ndl.Device
    name: str


def target_of(device: str) -> Target:
    if device == "cuda":
        return Target("cuda", ndl.hip() if torch.version.hip else ndl.cuda(), torch.cuda.get_device_name())
    return Target("cpu", ndl.cpu() if device == "cpu" else ndl.emulation(), f"the {device}, not on a GPU")


def image_model(name: str, batch: int, size: int, **options: int) -> tuple[Any, tuple]:
    return models.randomize(getattr(models, name)(**options), seed=0).eval(), (torch.randn(batch, 3, size, size),)


class Encoder(torch.nn.Module):
    """An encoder on embeddings: `layers` post-norm layers with GELU (Devlin et al., 2019)."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, heads, hidden, 0.0, "gelu", batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


BERT_BASE, SMALL = (768, 12, 3072, 12), (16, 2, 24, 1)


def encoder(batch: int, length: int, sizes: tuple[int, int, int, int]) -> tuple[Any, tuple]:
    return Encoder(*sizes).eval(), (torch.randn(batch, length, sizes[0]),)


def model_rows() -> list[Row]:
    """The most telling first, since the time may be up."""
    rows = []
    for batch in (1, 64):
        for precision in PRECISIONS:
            for name, title, size in (("resnet50", "ResNet-50 @224", 224), ("unet", "UNet 31 M @256", 256)):
                rows.append(Row(f"{title}, batch {batch}", partial(image_model, name, batch, size), precision))
            rows.append(Row(f"BERT-base S=128, batch {batch}", partial(encoder, batch, 128, BERT_BASE), precision))
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


def small_rows() -> list[Row]:
    """One of each kind, for the emulation."""
    rows = [
        Row("conv-bn-relu 2 x 3-4 @6, 3x3", partial(conv_bn_relu, 2, 3, 4, 6, 3), "float32"),
        Row("linear-relu 5 x 8-4", partial(linear_relu, 5, 8, 4), "float32"),
    ]
    rows.append(Row("UNet @16, batch 1", partial(image_model, "unet", 1, 16, base=2), "float32"))
    return rows + [Row("encoder S=6, batch 2", partial(encoder, 2, 6, SMALL), p) for p in PRECISIONS]


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


class Case(NamedTuple):
    """What an engine is made from: a row's module and inputs on torch's device, in float32."""

    module: Any
    inputs: tuple
    precision: str
    target: Target


def needle_call(case: Case) -> Callable[[], Any]:
    if isinstance(case.module, torch.nn.Sequential):
        op = needle_op(case.module)
        refuse_unfused(op, case.inputs)
        return partial(op, *case.inputs)
    net = operator_fusion.fuse(torch2needle.convert(case.module).to(case.target.needle))
    options: dict[str, Any] = {} if case.precision == "float32" else {"precision": case.precision}
    return partial(ndl.compile(net, case.inputs, tune=True, **options), *case.inputs)


def torch_call(case: Case, transform: Callable[[Any], Callable]) -> Callable[[], Any]:
    if case.precision != "float16":
        return partial(transform(case.module), *case.inputs)
    return partial(transform(copy.deepcopy(case.module).half()), *(x.half() for x in case.inputs))


def engines(compiler: dict[str, Any]) -> dict[str, Callable[[Case], Callable[[], Any]]]:
    """needle first, then torch's; each makes what is timed. `compiler`: options of torch.compile."""
    found: dict[str, Callable[[Case], Callable[[], Any]]] = {
        "needle": needle_call,
        "torch eager": partial(torch_call, transform=lambda module: module),
        "torch.compile": partial(torch_call, transform=partial(torch.compile, fullgraph=True, **compiler)),
    }
    try:
        import torch_tensorrt  # noqa: F401

        found["TensorRT"] = partial(torch_call, transform=partial(torch.compile, backend="tensorrt"))
    except ImportError:
        pass
    return found


def synchronize(target: Target) -> None:
    if target.torch == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], target: Target, repeats: int) -> float:
    synchronize(target)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(target)
    return (time.perf_counter() - start) / repeats


def one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return text if len(text) < 160 else text[:157] + "..."


def measure(
    row: Row, target: Target, chosen: dict[str, Callable[[Case], Callable[[], Any]]], rounds: int
) -> dict[str, Any]:
    """Times of every engine in turns; an engine that refuses or is wrong gets its reason instead."""
    torch.manual_seed(0)
    module, inputs = row.build()
    case = Case(module.to(target.torch), tuple(x.to(target.torch) for x in inputs), row.precision, target)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    exact = case.module(*case.inputs)
    if row.precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    result: dict[str, Any] = {"row": row.title, "precision": row.precision, "unmeasured": {}}
    calls: dict[str, Callable[[], Any]] = {}
    repeats: dict[str, int] = {}
    for name, make in chosen.items():
        try:
            call = make(case)
            error = float((call().float() - exact).abs().max() / exact.abs().max())
            if not error <= TOLERANCE[row.precision]:
                raise RuntimeError(f"wrong by {error:.1e} of the largest value.")
            repeats[name] = max(1, int(BURST / min(seconds(call, target, 1) for _ in range(3))))
            calls[name] = call
        except Exception as refused:
            result["unmeasured"][name] = one_line(refused)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        names = list(calls)
        for name in names[i % len(names) :] + names[: i % len(names)] if names else []:
            times[name].append(seconds(calls[name], target, repeats[name]))
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
    rows: list[Row],
    target: Target,
    chosen: dict[str, Callable[[Case], Callable[[], Any]]],
    rounds: int,
    until: float,
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
                result = measure(row, target, chosen, rounds)
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


def build(folder: Path, *options: str) -> bool:
    os.environ["NEEDLE_GPU_LIBRARIES"] = str(folder)
    configured = step("configure", "cmake", "-S", "csrc/gpu", "-B", str(folder), *options)
    return configured and step("build", "cmake", "--build", str(folder), "-j", str(os.cpu_count()), seconds=400)


def gpu_options() -> list[str]:
    """How to build the library for the GPU at hand alone."""
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
        return ["-DNEEDLE_HIP=ON", f"-DNEEDLE_HIP_ARCHITECTURES={architecture}"]
    major, minor = torch.cuda.get_device_capability()
    return ["-DNEEDLE_CUDA=ON", f"-DNEEDLE_CUDA_ARCHITECTURES={major}{minor}"]


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


def test_files(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in (ROOT / "tests").glob(pattern))


def sample(device: str) -> list[str]:
    """A few tests that reach most kinds of kernels."""
    return pytest("-x", "tests/test_gpu.py", "-k", f"{device} and (64-64-64 or strided)")


def sanitizer_sample(device: str) -> bool:
    tool = shutil.which("compute-sanitizer")
    if not tool:
        print("[gpu_check] compute-sanitizer is missing: its sample was not run.")
        return True
    return step("compute-sanitizer", tool, "--error-exitcode", "1", *sample(device), seconds=120)


def check_device(device: str) -> bool:
    """Builds and tests what there is of the device."""
    if device == "cpu":
        return True
    if device == "emulation":
        good = build(ROOT / "build-gpu" / "emulation", "-DNEEDLE_EMULATION=ON")
        return step("a sample of the tests", *sample("emulation_w32")) and good
    if not torch.cuda.is_available():
        return step("tests in the emulation", *pytest(*test_files("test_gpu*.py", "test_hipify.py")))
    name = "hip" if torch.version.hip else "cuda"
    good = build(ROOT / "build" / "gpu-check", *gpu_options())
    files = test_files("test_gpu*.py", "test_fusion*.py", "test_main_job.py")
    # Of models the small ones: the others take minutes of float64 torch on the CPU.
    good = step("tests", *pytest(*files, "-k", f"{name} and (small or not test_main_job)")) and good
    return sanitizer_sample(name) and good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="rows that start later are unmeasured")
    parser.add_argument("--rows", nargs="*", help="only rows with one of these words in their names")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the benchmark out")
    where.add_argument("--emulation", action="store_true", help="all parts at tiny sizes, on a machine without a GPU")
    parser.add_argument("--json", type=Path, help="default: gpu-check.json in profiling/results; none without a GPU")
    args = parser.parse_args()
    device = "emulation" if args.emulation else args.device
    until = time.monotonic() + 60 * args.minutes
    good = check_device(device)
    if device == "cuda" and not torch.cuda.is_available():
        print("[gpu_check] this machine has no GPU that torch can use: nothing was measured on one.")
        return 0 if good else 1
    rows = small_rows() if args.emulation else op_rows() + model_rows()
    rows = [r for r in rows if not args.rows or any(word in r.title for word in args.rows)]
    target = target_of(device)
    print(f"\n== benchmark on {target.name}, torch {torch.__version__}")
    compiler = {"backend": "eager"} if args.emulation else {"mode": "max-autotune"}
    results = benchmark(rows, target, engines(compiler), 1 if args.emulation else ROUNDS, until)
    print(f"[gpu_check] {'passed' if good else 'failed'}.")
    path = args.json or (ROOT / "profiling/results/gpu-check.json" if device == "cuda" else None)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"device": target.name, "torch": torch.__version__, "rows": results}, indent=1) + "\n"
        )
        print(f"[gpu_check] results are in {path}.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
