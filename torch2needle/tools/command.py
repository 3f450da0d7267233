"""The command line: PyTorch models to needle files, and what can be said about them.

Exit codes: 0 fine, 1 the model is not wholly convertible or does not match, 2 bad usage, 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .named import (
    BUILT_IN,
    UsageError,
    arrays_of,
    converted,
    inputs_of,
    is_program,
    load_net,
    needle_net,
    one_line,
    refuse_inputs,
    save_array,
    torch_model,
)
from .values import at_least, file_name, object_of, shape_of

if TYPE_CHECKING:  # when it runs, needle and torch are imported where they are needed: --help answers at once
    from needle.graph import GraphModule

ENGINES = ("torch eager", "torch.compile", "onnxruntime")  # of bench.py, without importing torch
DESCRIPTION = f"""Convert PyTorch models to needle; check, compare, run, time, profile and fuse them.

MODEL is one of
  package.module:callable  a function or class that makes the model (--args, --kwargs), or a model itself
  file.pt2                 what torch.export.save wrote
  a saved needle file      for run, export, profile and fuse, and as verify --net
  a built-in name          {", ".join(BUILT_IN)}"""

EPILOG = """examples:
  torch2needle check resnet18 --input 1x3x224x224
  torch2needle convert torchvision.models:resnet50 --weights resnet50.pt --fuse --output resnet50.needle
  torch2needle export resnet50.needle --input 1x3x224x224 --output resnet50.ndlc
  torch2needle verify my_package.nets:make --kwargs '{"width": 64}' --input x=8x16 --input mask=8x16:bool
  torch2needle verify resnet18 --weights resnet18.pt --net resnet18.needle --input 2x3x224x224
  torch2needle run resnet50.needle --input photo.npy --output scores.npy
  torch2needle bench resnet18 --input 1x3x224x224
  torch2needle profile resnet50.needle --input 1x3x224x224 --html profile.html --trace trace.json
  torch2needle fuse resnet18 --dry-run --html fusion.html
  torch2needle info

exit codes: 0 fine, 1 not wholly convertible or no match, 2 bad usage, 130 stopped
an error begins with a key in brackets: docs/messages.md has what to do, by key"""


class Texts(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults in help texts, where there are any; descriptions and examples keep their lines."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, [], {}) else super()._get_help_string(action)


def names_and_files(prefix: str, **_: Any) -> list[str]:
    """What a shell offers for MODEL."""
    from argcomplete.completers import FilesCompleter

    return [*BUILT_IN, *FilesCompleter()(prefix)]


def common(parser: argparse.ArgumentParser, needs_input: bool) -> None:
    add = parser.add_argument
    model = add(
        "model", metavar="MODEL", help="package.module:callable, a .pt2 file, a saved needle file or a built-in name"
    )
    model.completer = names_and_files  # type: ignore[attr-defined]
    add("--args", type=object_of(list), default=[], metavar="JSON", help="positional arguments of the callable")
    add("--kwargs", type=object_of(dict), default={}, metavar="JSON", help="keyword arguments of the callable")
    add("--trust", action="store_true", help="read a .pt2 file with torch.export.load: code in the file can run")
    add("--weights", type=file_name, metavar="FILE", help="a state dict: .safetensors, or what torch.save wrote")
    add(
        "--input",
        type=shape_of,
        action="append",
        default=[],
        required=needs_input,
        metavar="SHAPE",
        help="an input, [name=]1x3x224x224[:dtype] or scalar; once for each; filled with random numbers (integers: 0 or 1)",
    )
    add("--seed", type=at_least(0), default=0, help="of random weights and inputs")


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .info import version_line

        print(version_line())
        parser.exit()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    texts: dict[str, Any] = {"formatter_class": Texts, "epilog": EPILOG}
    parser = argparse.ArgumentParser("torch2needle", description=DESCRIPTION, **texts)
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    tasks = parser.add_subparsers(dest="task", required=True, metavar="|".join(RUNS))

    def bare(name: str, text: str) -> argparse.ArgumentParser:
        return tasks.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **texts)

    def task(name: str, text: str, needs_input: bool = False) -> Callable[..., Any]:
        made = bare(name, text)
        common(made, needs_input)
        return made.add_argument

    add = task("convert", "write a model as a needle file that runs without torch")
    add("--output", "-o", type=file_name, metavar="FILE", help="default: the model's name with .needle")
    add("--fuse", action="store_true", help="write the fused form")
    add = task("export", "write a model's plan and packed weights for libneedle.so, which needs no Python", True)
    add("--output", "-o", type=file_name, metavar="FILE", help="default: the model's name with .ndlc")
    add(
        "--isa",
        action="append",
        metavar="NAME",
        help="avx512, avx2, neon or scalar; once for each (default: this CPU's best)",
    )
    add = task("check", "report what each call of a model becomes, and how to add what is missing")
    add("--json", action="store_true", help="print the report as JSON")
    add = task("verify", "compare a model's outputs and layers in needle with torch in float32 and float64", True)
    add("--net", type=file_name, metavar="FILE", help="compare this saved needle file instead of a conversion made now")
    add("--fuse", action="store_true", help="compare the fused form")
    add = bare("run", "run a saved needle file on arrays, without torch").add_argument
    add("model", type=file_name, metavar="FILE", help="a saved needle file")
    add(
        "--input",
        "-i",
        action="append",
        default=[],
        metavar="FILE",
        help="an input, [name=]x.npy; once for each, in the model's order",
    )
    add(
        "--output",
        "-o",
        type=file_name,
        action="append",
        default=[],
        metavar="FILE",
        help="a .npy file; once for each result",
    )
    add = task("bench", "time a model in compiled needle beside torch and ONNX Runtime", True)
    add("--peer", action="append", default=[], choices=ENGINES, help="beside which engine; once for each; else all")
    add("--rounds", type=at_least(1), default=5, help="alternating rounds")
    add("--json", type=file_name, metavar="FILE", help="write every round's times")
    add = task("profile", "measure where the time of a model goes", True)
    add("--html", type=file_name, metavar="FILE", help="write a page with pictures")
    add("--trace", type=file_name, metavar="FILE", help="write a trace for chrome://tracing or Perfetto")
    add("--rounds", type=at_least(1), default=10, help="timed runs")
    add("--eager", action="store_true", help="op by op, neither fused nor compiled")
    add = task("fuse", "report which operators become one, and why others do not")
    add("--dry-run", action="store_true", help="only say what would happen")
    add("--disable", action="append", default=[], metavar="PATTERN", help="leave this pattern out; once for each")
    add("--output", "-o", type=file_name, metavar="FILE", help="write the fused net")
    add("--html", type=file_name, metavar="FILE", help="write a page with the graph before and after")
    bare("info", "say what is installed, what this machine has and which settings hold")
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow (docs/install.md)
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    if args.task == "fuse" and args.dry_run and args.output:
        parser.error("--dry-run writes nothing, so it takes no --output")
    return args


# -- tasks ---------------------------------------------------------------------------------------------------------------


def write(net: GraphModule, path: str) -> str:
    """Save, and read what was written; one line about it."""
    import needle as ndl

    try:
        ndl.save(net, path)
    except OSError as e:
        raise UsageError(str(e)) from e
    ndl.load(path)
    calls = sum(n.kind in ("op", "module") for n in net.graph)
    numbers = sum(p.size for p in net.parameters())
    return f"{path}: {calls} calls, {numbers:,} parameters, {os.path.getsize(path) / 1e6:.1f} MB"


def default_output(name: str, suffix: str = ".needle") -> str:
    last = Path(name).stem if is_program(name) else name.rpartition(":")[2].rpartition(".")[2]
    return last + suffix


def compiled(net: GraphModule, inputs: Any) -> tuple[Any, tuple]:
    """The fused net as an executable, and its inputs."""
    import needle as ndl

    x = tuple(net.bind((), inputs) if isinstance(inputs, dict) else inputs)
    return ndl.compile(fused(net, True), x), x


def fused(net: GraphModule, wanted: bool) -> GraphModule:
    import operator_fusion

    return operator_fusion.fuse(net) if wanted else net


def run_convert(args: argparse.Namespace) -> int:
    model = torch_model(args)
    net = fused(converted(model, inputs_of(args)), args.fuse)
    print(write(net, args.output or default_output(args.model)))
    return 0


def run_export(args: argparse.Namespace) -> int:
    net, inputs = needle_net(args), inputs_of(args)
    try:
        exe, _ = compiled(net, inputs)
    except Exception as e:
        raise UsageError(f"[export] the model does not run on these inputs: {one_line(e)}.") from e
    path = args.output or default_output(Path(args.model).stem if Path(args.model).exists() else args.model, ".ndlc")
    try:
        exe.export(path, isas=args.isa)
    except (OSError, RuntimeError, ValueError) as e:
        raise UsageError(str(e)) from e
    arena = exe.memory["arena"] / 1e6
    print(f"{path}: {len(exe.plan.names)} steps, arena {arena:.1f} MB, {os.path.getsize(path) / 1e6:.1f} MB")
    return 0


def run_check(args: argparse.Namespace) -> int:
    from .. import check

    model = torch_model(args)
    inputs = inputs_of(args)
    if not is_program(args.model):
        refuse_inputs(model, inputs)
    report = check(model, inputs)
    print(report.json() if args.json else report)
    return 0 if report.ok else 1


def run_verify(args: argparse.Namespace) -> int:
    from .. import verify

    model = torch_model(args)
    inputs = inputs_of(args)
    if args.net and is_program(args.model):
        converted(model, None)  # torch runs no program from a file before its check
    net = fused(load_net(args.net) if args.net else converted(model, inputs), args.fuse)
    try:
        result = verify(model.module() if is_program(args.model) else model, net, inputs)
    except Exception as e:
        refuse_inputs(model, inputs)
        raise ValueError(f"[verify] {args.net or 'needle'} does not run where torch does: {one_line(e)}.") from e
    print(result)
    return 0 if result else 1


def run_profile(args: argparse.Namespace) -> int:
    import needle as ndl

    net, inputs = needle_net(args), inputs_of(args)
    try:
        if args.eager:
            target, x = net, tuple(net.bind((), inputs) if isinstance(inputs, dict) else inputs)
        else:
            target, x = compiled(net, inputs)
        found = ndl.profile(target, x, rounds=args.rounds)
    except Exception as e:
        raise UsageError(f"[profile] the model does not run on these inputs: {one_line(e)}.") from e
    print(found.table())
    for path, save in ((args.html, found.html), (args.trace, found.chrome_trace)):
        if path:
            written(args, path, save)
    return 0


def written(args: argparse.Namespace, path: str, save: Callable[[str], object]) -> None:
    try:
        save(path)
    except (OSError, ImportError) as e:  # pictures need the extra [report]
        raise UsageError(f"[{args.task}] cannot write {path}: {getattr(e, 'strerror', None) or one_line(e)}.") from e
    print(f"wrote {path}")


def run_fuse(args: argparse.Namespace) -> int:
    import operator_fusion

    net = needle_net(args)
    try:
        made = operator_fusion.fuse(net, dry_run=args.dry_run, disable=args.disable, example=inputs_of(args))
    except (ValueError, TypeError) as e:
        raise UsageError(f"{one_line(e)}.") from e
    print(made.fusion_report)
    if args.html:
        written(args, args.html, made.fusion_report.html)
    if args.output:
        print(write(made, args.output))
    return 0


def run_run(args: argparse.Namespace) -> int:
    import needle as ndl
    from needle.graph import map_structure

    net = load_net(args.model)
    named, given = arrays_of(args.input)
    try:
        x = tuple(net.bind(tuple(given), named))
        result = ndl.compile(net, x)(*x)
    except Exception as e:
        raise UsageError(f"[run] the model does not run on these inputs: {one_line(e)}.") from e
    results: list[Any] = []
    map_structure(list(result.values()) if isinstance(result, dict) else result, results.append)
    if args.output and len(args.output) != len(results):
        raise UsageError(f"[run] the model gives {len(results)} results, got {len(args.output)} times --output.")
    for i, y in enumerate(results):
        about = f"{tuple(y.shape)} {y.dtype}, least {y.min():.6g}, largest {y.max():.6g}" if y.size else f"{y.shape}"
        print(f"result {i}: {about}")
        if args.output:
            written(args, args.output[i], lambda path, y=y: save_array(path, y))  # type: ignore[misc]
    return 0


def run_bench(args: argparse.Namespace) -> int:
    model = torch_model(args)
    inputs = inputs_of(args)
    net = converted(model, inputs)
    from needle.profiler import write_file

    from . import bench, info

    rows, doubts = bench.measure(
        model.module() if is_program(args.model) else model, net, inputs, args.peer, args.rounds
    )
    core, facts = info.alone("_core"), info.alone("facts")
    machine = {"cpu": facts.cpu_name(), "isa": core.isa(), "threads": core.num_threads(), "rounds": args.rounds}
    print("{cpu}, {isa}, {threads} threads, {rounds} alternating rounds".format(**machine))
    print("\n".join([bench.table(rows), *doubts]))
    if args.json:
        written(
            args,
            args.json,
            lambda path: write_file(path, json.dumps(machine | {"warnings": doubts, "rows": rows}, indent=1)),
        )
    return 0 if rows[0]["times"] else 1


def run_info(args: argparse.Namespace) -> int:
    from .info import info

    print(info())
    return 0


RUNS = {
    "convert": run_convert,
    "export": run_export,
    "check": run_check,
    "verify": run_verify,
    "run": run_run,
    "bench": run_bench,
    "profile": run_profile,
    "fuse": run_fuse,
    "info": run_info,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of ours are a line each; what libraries warn of and log about themselves is not shown."""

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        if str(message).startswith("["):
            print(f"warning: {message}", file=sys.stderr)

    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logging.disable(logging.NOTSET)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = arguments(argv)
        with quiet():
            code = RUNS[args.task](args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (UsageError, ImportError) as e:
        print(e, file=sys.stderr)
        return 2
    except Exception as e:
        if os.environ.get("NEEDLE_TRACEBACK"):
            raise
        print(e if str(e).startswith("[") else f"[{args.task}] {type(e).__name__}: {one_line(e)}.", file=sys.stderr)
        return 1
