"""What `scripts/gpu_check bench` and `choose` measure on a CUDA or ROCm machine: needle beside torch eager and torch.compile.

Ratios: engine / needle of per-round times, median of rounds with the least and the largest; over 1, needle is faster. A row that
needle or an engine refuses, and one during which the process ended, is unmeasured, with the reason; nothing is estimated.
In float16, torch's engines get a model and inputs of float16; needle's stay float32 and are rounded where they are multiplied.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
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
from gpu_check import for_this_torch
from needle.backend_ndarray import NDArray, as_ndarray, call
from needle.executor.settings import PRECISIONS as PRECISION_CODES
from needle.ops.math.activation import activation_code
from needle.ops.nn.spatial import window_attributes
from torch2needle import models

ROUNDS, BURST = 9, 0.03  # seconds
TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "float16": 3e-2}  # of the largest value, against torch eager in float32
PRECISIONS = ("tf32", "float32", "float16")
ENDED = "the process ended here."


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


def mlp(batch: int) -> tuple[Any, tuple]:
    return models.randomize(models.mlp(), seed=0).eval(), (torch.randn(batch, 784),)


def model_rows() -> list[Row]:
    """The most telling first, since the time may be up."""
    shapes = [(f"ResNet-50 @224, batch {b}", partial(image_model, "resnet50", b, 224)) for b in (32, 1, 128)]
    shapes += [(f"UNet 31 M @256, batch {b}", partial(image_model, "unet", b, 256)) for b in (1, 16)]
    shapes += [(f"BERT-base S=128, batch {b}", partial(encoder, b, 128, BERT_BASE)) for b in (1, 32)]
    shapes += [(f"MLP 784-1024-1024-10, batch {b}", partial(mlp, b)) for b in (64, 4096)]
    return [Row(title, build, precision) for precision in PRECISIONS for title, build in shapes]


def conv_bn_relu(batch: int, channels: int, out: int, size: int, kernel: int) -> tuple[Any, tuple]:
    conv = torch.nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)
    block = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(out), torch.nn.ReLU()).eval()
    return block, (torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last),)


def linear_relu(rows: int, features: int, out: int) -> tuple[Any, tuple]:
    return torch.nn.Sequential(torch.nn.Linear(features, out), torch.nn.ReLU()).eval(), (torch.randn(rows, features),)


class Maps(torch.nn.Module):
    """Element-wise steps, of which some are several themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.relu(x) * 2) * torch.sigmoid(x) + x


def maps(rows: int, features: int) -> tuple[Any, tuple]:
    return Maps(), (torch.randn(rows, features),)


def op_rows() -> list[Row]:
    """Layers alone, as torch.ops.needle where it is built for this torch; most shapes are bound by memory."""
    convs = [(64, 64, 64, 56, 1), (64, 64, 256, 56, 1), (64, 64, 64, 56, 3), (1, 64, 64, 56, 3)]
    linears = [(1 << 20, 64, 64), (65536, 64, 64), (131072, 256, 256), (16384, 256, 256), (4096, 1024, 1024)]
    shapes = [
        (f"conv-bn-relu {b} x {c}-{o} @{s}, {k}x{k}", partial(conv_bn_relu, b, c, o, s, k)) for b, c, o, s, k in convs
    ]
    shapes += [(f"linear-relu {m} x {k}-{n}", partial(linear_relu, m, k, n)) for m, k, n in linears]
    layers = [Row(title, build, precision) for precision in ("float32", "tf32") for title, build in shapes]
    return [*layers, Row("maps 4096 x 4096", partial(maps, 4096, 4096), "float32")]


def small_rows() -> list[Row]:
    """One of each kind, for the emulation."""
    rows = [
        Row("conv-bn-relu 2 x 3-4 @6, 3x3", partial(conv_bn_relu, 2, 3, 4, 6, 3), "float32"),
        Row("linear-relu 5 x 8-4", partial(linear_relu, 5, 8, 4), "float32"),
        Row("maps 5 x 8", partial(maps, 5, 8), "float32"),
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


def kernel_call(case: Case) -> Callable[[], Any]:
    """The same kernel called from Python on torch's memory, where torch.ops.needle is not built or takes no precision."""
    first: Any = case.module[0]
    (x,) = case.inputs
    device = case.target.needle

    def array(tensor: torch.Tensor) -> NDArray:
        found = as_ndarray(tensor)
        return found if found.device == device else found.astype(found.dtype, device)  # the emulation's

    named: dict[str, Any] = {
        "precision": PRECISION_CODES[case.precision],
        "activation": activation_code("relu"),
        "alpha": 0.0,
    }
    if isinstance(first, torch.nn.Linear):
        name, named = "matmul_fused", named | {"b": array(first.weight.T), "bias": array(first.bias)}
        shape, order, source = (len(x), first.out_features), (0, 1), "a"
    else:
        norm: Any = case.module[1]
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        parts = {"weight": first.weight, "scale": scale, "bias": norm.bias - norm.running_mean * scale}
        name, named = "conv2d_fused", named | {n: array(v) for n, v in parts.items()} | {"groups": first.groups}
        named |= window_attributes(first)
        n, _, *size = x.shape
        height, width = (
            (s + 2 * p - k) // t + 1
            for s, p, k, t in zip(size, first.padding, first.kernel_size, first.stride, strict=True)
        )
        shape, order, source = (n, height, width, first.out_channels), (0, 3, 1, 2), "x"

    def run() -> Any:
        out = NDArray.empty(shape, "float32", device).permute(order)
        call(name, [out], **named, **{source: array(x)})
        return torch.from_dlpack(out)

    return run


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
        if case.precision != "float32" or for_this_torch():
            return kernel_call(case)
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


class Results:
    """Rows in a JSON file, written after every one, so that a later process goes on where this one ended."""

    def __init__(self, path: Path, target: Target) -> None:
        self.path = path
        found = json.loads(path.read_text())["rows"] if path.exists() else []
        self.rows = {(r["row"], r["precision"]): r for r in found}
        self.head = {"device": target.name, "torch": torch.__version__}

    def put(self, result: dict[str, Any]) -> None:
        self.rows[result["row"], result["precision"]] = result
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({**self.head, "rows": list(self.rows.values())}, indent=1) + "\n")
        os.replace(part, self.path)


def unmeasured(row: Row, names: list[str], why: str) -> dict[str, Any]:
    return {
        "row": row.title,
        "precision": row.precision,
        "unmeasured": dict.fromkeys(names, why),
        "ms": {},
        "ratios": {},
    }


def choices(row: Row, target: Target) -> dict[str, Any]:
    """Which of ours and the vendors' kernels a row's problems get, with both times or the reason."""
    torch.manual_seed(0)
    module, inputs = row.build()
    case = Case(module.to(target.torch), tuple(x.to(target.torch) for x in inputs), row.precision, target)
    found: dict[str, Any] = {"row": row.title, "precision": row.precision}
    target.needle.use_vendors(None)  # forgets what earlier rows chose
    try:
        call = needle_call(case)
        call()
        steps: dict[str, float] = {}
        for kernel, _, took in call.func.profile(*case.inputs, rounds=3):  # type: ignore[attr-defined]
            steps[kernel] = steps.get(kernel, 0) + 1e3 * took
        report = {"libraries": target.needle.vendors()["libraries"], "choices": target.needle.choices()}
        return found | report | {"steps_ms": dict(sorted(steps.items(), key=lambda s: -s[1]))}
    except Exception as refused:
        return found | {"unmeasured": {"needle": one_line(refused)}, "choices": []}


UNSEEN = Path(__file__).parent / "zoo" / "gpu_models.txt"


def timm_model(name: str) -> tuple[Any, tuple]:
    import timm

    model = timm.create_model(name, pretrained=False).eval()
    return model, (torch.randn(8, *model.default_cfg["input_size"]),)


def timm_rows() -> list[Row]:
    """Models that nothing here was tuned on, where timm is; measured when they are asked for."""
    names = UNSEEN.read_text().split()
    return [Row(f"timm {name}, batch 8", partial(timm_model, name), p) for p in ("tf32", "float32") for name in names]


def rows_of(device: str, words: list[str]) -> list[Row]:
    """Those whose title and precision hold one of the words; all but timm's without words."""
    rows = small_rows() if device == "emulation" else model_rows() + op_rows()
    rows += timm_rows() if any(w.startswith("timm") for w in words) and device != "emulation" else []
    return [r for r in rows if not words or any(w in f"{r.title}, {r.precision}" for w in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("bench", "choose"))
    parser.add_argument("words", nargs="*", help="only rows with one of these in their names")
    parser.add_argument("--device", choices=("cuda", "cpu", "emulation"), default="cuda")
    parser.add_argument("--json", type=Path, required=True, help="rows that are in it are not measured again")
    parser.add_argument("--minutes", type=float, default=8, help="no row starts later")
    parser.add_argument("--mode", default="max-autotune", help="of torch.compile; none: leave it out")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    target = target_of(args.device)
    results = Results(args.json, target)
    compiler = {"backend": "eager"} if args.device == "emulation" else {"mode": args.mode}
    chosen = engines(compiler)
    if args.mode == "none":
        del chosen["torch.compile"]
    names = list(chosen)
    print(f"{target.name}, torch {torch.__version__}")
    print(f"{'':<50}" + "".join(f"{n:>22}" for n in names) if args.task == "bench" else "")
    for row in rows_of(args.device, args.words):
        if (row.title, row.precision) in results.rows or (args.task == "choose" and "relu" in row.title):
            continue
        if time.monotonic() > until:
            print("[gpu_check] the time is up (--minutes): the next call goes on here.")
            return 0
        results.put(unmeasured(row, names, ENDED))
        with torch.no_grad():
            if args.task == "bench":
                results.put(measure(row, target, chosen, 1 if args.device == "emulation" else ROUNDS))
                print(line(results.rows[row.title, row.precision], names), flush=True)
            else:
                results.put(choices(row, target))
                print(choice_lines(results.rows[row.title, row.precision]), flush=True)
        torch.compiler.reset()
    return 0


def choice_lines(result: dict[str, Any]) -> str:
    """A row's choices, counted by who won, and what one of each kind took."""
    lines = [f"{result['row']:<40}{result['precision']:<10}{len(result['choices'])} problems"]
    for c in result["choices"]:
        times = f"ours {c['ours_us']:.0f} us, theirs {c['theirs_us']:.0f} us" if c["theirs_us"] else c["why"]
        lines.append(f"    {c['op']:<8}{c['shapes']!s:<60}{c['taken']:<12}{times}")
    lines += [
        f"    {kernel:<24}{ms:8.3f} ms, with a wait behind each" for kernel, ms in result.get("steps_ms", {}).items()
    ]
    return "\n".join(lines + [f"    unmeasured: {n}: {why}" for n, why in result.get("unmeasured", {}).items()])


if __name__ == "__main__":
    sys.exit(main())
