"""The command line: PyTorch models to needle files, and what can be said about them.

Exit codes: 0 fine, 1 the model is not wholly convertible or does not match, 2 bad usage, 130 stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import needle as ndl
import operator_fusion
from needle.graph import GraphModule
from needle.training.command import Help, count, positive

from . import models
from .convert import check, convert
from .report import ConversionError
from .verify import Verification, verify

BUILT_IN = sorted(n for n in models.__all__ if n.islower() and n != "randomize")
DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
}
INPUT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>scalar|\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")

DESCRIPTION = f"""Convert PyTorch models to needle, check, compare, profile and fuse them.

MODEL is one of
  package.module:callable  a function or class that makes the model (--args, --kwargs), or a model itself
  file.pt2                 what torch.export.save wrote
  a saved needle file      for profile and fuse, and as verify --net
  a built-in name          {", ".join(BUILT_IN)}"""

EPILOG = """examples:
  torch2needle check resnet18 --input 1x3x224x224
  torch2needle convert torchvision.models:resnet50 --weights resnet50.pt --fuse --output resnet50.needle
  torch2needle verify my_package.nets:make --kwargs '{"width": 64}' --input x=8x16 --input mask=8x16:bool
  torch2needle verify resnet18 --weights resnet18.pt --net resnet18.needle --input 2x3x224x224
  torch2needle profile resnet50.needle --input 1x3x224x224 --html profile.html --trace trace.json
  torch2needle fuse resnet18 --dry-run

exit codes: 0 fine, 1 not wholly convertible or no match, 2 bad usage, 130 stopped"""


class UsageError(Exception):
    """What the command line asks for is not there or cannot be read; one sentence."""


class Texts(Help, argparse.RawDescriptionHelpFormatter):
    """Defaults in help texts; descriptions and examples keep their lines."""


def object_of(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = json.loads(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"expects JSON, got {text!r} ({e})") from None
        if not isinstance(value, kind):
            raise argparse.ArgumentTypeError(f"expects a JSON {'array' if kind is list else 'object'}, got {text!r}")
        return value

    return parse


def shape_of(text: str) -> tuple[str, tuple[int, ...], torch.dtype]:
    """The name (or ""), shape and dtype of an input such as x=1x3x224x224:float32."""
    found = INPUT.fullmatch(text)
    if found is None or (found["dtype"] or "float32") not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"expects [name=]1x3x224x224[:dtype], dtype one of {', '.join(DTYPES)}, got {text!r}"
        )
    shape = () if found["shape"] == "scalar" else tuple(map(int, found["shape"].split("x")))
    return found["name"] or "", shape, DTYPES[found["dtype"] or "float32"]


def common(parser: argparse.ArgumentParser, needs_input: bool) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="package.module:callable, a .pt2 file, a saved needle file or a built-in name")
    add("--args", type=object_of(list), default=[], metavar="JSON", help="positional arguments of the callable")
    add("--kwargs", type=object_of(dict), default={}, metavar="JSON", help="keyword arguments of the callable")
    add("--weights", metavar="FILE", help="a state dict: .safetensors, or what torch.save wrote")
    add(
        "--input",
        type=shape_of,
        action="append",
        default=[],
        required=needs_input,
        metavar="SHAPE",
        help="an input, [name=]1x3x224x224[:dtype] or scalar; once for each; filled with random numbers (integers: 0 or 1)",
    )
    add("--seed", type=count, default=0, help="of random weights and inputs")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    texts: dict[str, Any] = {"formatter_class": Texts, "epilog": EPILOG}
    parser = argparse.ArgumentParser("torch2needle", description=DESCRIPTION, **texts)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="|".join(RUNS))

    def task(name: str, text: str, needs_input: bool = False) -> Callable[..., Any]:
        made = tasks.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **texts)
        common(made, needs_input)
        return made.add_argument

    add = task("convert", "write a model as a needle file that runs without torch")
    add("--output", "-o", metavar="FILE", help="default: the model's name with .needle")
    add("--fuse", action="store_true", help="write the fused form")
    add = task("check", "report what each call of a model becomes, and how to add what is missing")
    add("--json", action="store_true", help="print the report as JSON")
    add = task("verify", "compare a model's outputs and layers in needle with torch in float32 and float64", True)
    add("--net", metavar="FILE", help="compare this saved needle file instead of a conversion made now")
    add("--fuse", action="store_true", help="compare the fused form")
    add = task("profile", "measure where the time of a model goes", True)
    add("--html", metavar="FILE", help="write a page with pictures")
    add("--trace", metavar="FILE", help="write a trace for chrome://tracing or Perfetto")
    add("--rounds", type=positive, default=10, help="timed runs")
    add("--eager", action="store_true", help="op by op, neither fused nor compiled")
    add = task("fuse", "report which operators become one, and why others do not")
    add("--dry-run", action="store_true", help="only say what would happen")
    add("--disable", action="append", default=[], metavar="PATTERN", help="leave this pattern out; once for each")
    add("--output", "-o", metavar="FILE", help="write the fused net")
    args = parser.parse_args(argv)
    if args.task == "fuse" and args.dry_run and args.output:
        parser.error("--dry-run writes nothing, so it takes no --output")
    return args


# -- what is named -------------------------------------------------------------------------------------------------------


def one_line(e: BaseException) -> str:
    return " ".join(str(e).split()).rstrip(".") or type(e).__name__


def find(name: str) -> Any:
    """The object behind package.module:callable or a built-in name."""
    if name in BUILT_IN:
        return getattr(models, name)
    module, colon, path = name.partition(":")
    if not colon:
        raise UsageError(
            f"[model] expects package.module:callable, a file that exists, or one of {', '.join(BUILT_IN)}, got {name}."
        )
    if "" not in sys.path:  # installed commands do not search the current folder, as `python -m` does
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as e:  # the user's own module may fail in any way
        raise UsageError(f"[model] cannot import {name}: {type(e).__name__}: {one_line(e)}.") from e
    return found


def torch_model(args: argparse.Namespace) -> Any:
    """The nn.Module, or ExportedProgram of a .pt2 file, in evaluation and with its weights."""
    if args.model.endswith(".pt2"):
        if args.weights or args.args or args.kwargs:
            raise UsageError("[model] a .pt2 file holds its weights and takes no --weights, --args or --kwargs.")
        try:
            return torch.export.load(args.model)
        except Exception as e:
            raise UsageError(f"[model] cannot read {args.model}: {one_line(e)}.") from e
    if os.path.isfile(args.model):
        raise UsageError(f"[model] {args.task} expects a torch model, got the file {args.model}.")
    made = find(args.model)
    torch.manual_seed(args.seed)
    if not isinstance(made, nn.Module):
        try:
            made = made(*args.args, **args.kwargs)
        except Exception as e:
            raise UsageError(f"[model] {args.model} failed: {type(e).__name__}: {one_line(e)}.") from e
    if not isinstance(made, nn.Module):
        raise UsageError(f"[model] expects {args.model} to give an nn.Module, got {type(made).__name__}.")
    if args.weights:
        load_weights(made, args.weights)
    return made.eval()


def load_weights(model: nn.Module, path: str) -> None:
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except Exception as e:
        raise UsageError(f"[weights] {path} does not fit: {one_line(e)}.") from e


def inputs_of(args: argparse.Namespace) -> Any:
    """Random inputs: a tuple, a dict where they have names, or None where there are none."""
    generator = torch.Generator().manual_seed(args.seed)

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=dtype)
        return torch.randint(2, shape, generator=generator).to(dtype)

    names = [name for name, _, _ in args.input if name]
    if names and (len(names) < len(args.input) or len(set(names)) < len(names)):
        raise UsageError(f"[input] expects a name of its own for every input or for none, got {', '.join(names)}.")
    values = [draw(shape, dtype) for _, shape, dtype in args.input]
    return dict(zip(names, values, strict=True)) if names else tuple(values) or None


def needle_net(args: argparse.Namespace) -> GraphModule:
    """A conversion of the model, or the net of a saved needle file."""
    if os.path.isfile(args.model) and not args.model.endswith(".pt2"):
        if args.weights or args.args or args.kwargs:
            raise UsageError("[model] a needle file holds its weights and takes no --weights, --args or --kwargs.")
        return load_net(args.model)
    return convert(torch_model(args), inputs_of(args))


def load_net(path: str) -> GraphModule:
    try:
        net = ndl.load(path)
    except (OSError, ValueError) as e:
        raise UsageError(str(e)) from e
    net.eval()
    return net


# -- tasks ---------------------------------------------------------------------------------------------------------------


def write(net: GraphModule, path: str) -> str:
    """Save, and read what was written; one line about it."""
    try:
        ndl.save(net, path)
    except OSError as e:
        raise UsageError(str(e)) from e
    ndl.load(path)
    calls = sum(n.kind in ("op", "module") for n in net.graph)
    numbers = sum(p.size for p in net.parameters())
    return f"{path}: {calls} calls, {numbers:,} parameters, {os.path.getsize(path) / 1e6:.1f} MB"


def default_output(name: str) -> str:
    last = Path(name).stem if name.endswith(".pt2") else name.rpartition(":")[2].rpartition(".")[2]
    return f"{last}.needle"


def run_convert(args: argparse.Namespace) -> int:
    net = convert(torch_model(args), inputs_of(args))
    net = operator_fusion.fuse(net) if args.fuse else net
    print(write(net, args.output or default_output(args.model)))
    return 0


def run_check(args: argparse.Namespace) -> int:
    report = check(torch_model(args), inputs_of(args))
    print(report.json() if args.json else report)
    return 0 if report.ok else 1


def run_verify(args: argparse.Namespace) -> int:
    model, inputs = torch_model(args), inputs_of(args)
    net = load_net(args.net) if args.net else convert(model, inputs)
    net = operator_fusion.fuse(net) if args.fuse else net
    try:
        result: Verification = verify(model if isinstance(model, nn.Module) else model.module(), net, inputs)
    except (ValueError, TypeError, RuntimeError) as e:  # such as an input that the model does not take
        raise UsageError(f"[verify] the model does not run on these inputs: {one_line(e)}.") from e
    print(result)
    return 0 if result else 1


def run_profile(args: argparse.Namespace) -> int:
    net, inputs = needle_net(args), inputs_of(args)
    try:
        x = tuple(net.bind((), inputs) if isinstance(inputs, dict) else inputs)
        target = net if args.eager else ndl.compile(operator_fusion.fuse(net), x)
        found = ndl.profile(target, x, rounds=args.rounds)
    except (ValueError, TypeError, RuntimeError) as e:
        raise UsageError(f"[profile] the model does not run on these inputs: {one_line(e)}.") from e
    print(found.table())
    for path, save in ((args.html, found.html), (args.trace, found.chrome_trace)):
        if path:
            try:
                save(path)
            except (OSError, ImportError) as e:  # pictures need the extra [report]
                raise UsageError(f"[profile] cannot write {path}: {one_line(e)}.") from e
            print(f"wrote {path}")
    return 0


def run_fuse(args: argparse.Namespace) -> int:
    net, example = needle_net(args), inputs_of(args)
    try:
        fused = operator_fusion.fuse(net, dry_run=args.dry_run, disable=args.disable, example=example)
    except (ValueError, TypeError) as e:
        raise UsageError(one_line(e) + ".") from e
    print(fused.fusion_report)
    if args.output:
        print(write(fused, args.output))
    return 0


RUNS = {"convert": run_convert, "check": run_check, "verify": run_verify, "profile": run_profile, "fuse": run_fuse}


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        return RUNS[args.task](args)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except UsageError as e:
        print(e, file=sys.stderr)
        return 2
    except (ConversionError, ndl.autograd.Unsupported, ValueError, TypeError) as e:
        print(e, file=sys.stderr)
        return 1
