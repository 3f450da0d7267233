"""The command line of the pipeline scripts. Nothing here imports needle before `--backend` is known."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

DTYPES = ("float32",)


@dataclasses.dataclass
class Options:
    """What one run of the pipeline does; also its defaults."""

    model: str
    height: int
    width: int
    classes: int
    batch: int = 1
    backend: str = "nd"
    device: str = "cpu"
    dtype: str = "float32"
    weights: Path | None = None
    threads: int = 0  # 0: as many as needle takes by itself
    rounds: int = 5
    pictures: int = 20  # for the agreement of the largest class
    base: int = 64  # channels of a UNet at full size
    out: Path = Path("report")


class OptionError(ValueError):
    """An option that cannot be served; the text is one sentence."""


def check(options: Options) -> None:
    """Raises OptionError for what is wrong before any work is done."""
    for name in ("height", "width", "classes", "batch", "rounds", "pictures", "base"):
        if getattr(options, name) < 1:
            raise OptionError(f"[pipeline] --{name} expects at least 1, got {getattr(options, name)}.")
    if options.threads < 0:
        raise OptionError(f"[pipeline] --threads expects 0 or more, got {options.threads}.")
    if options.dtype not in DTYPES:
        raise OptionError(f"[pipeline] --dtype expects {' or '.join(DTYPES)}, got {options.dtype}.")
    if options.weights is not None:
        if options.weights.suffix not in (".pt", ".pth", ".safetensors"):
            raise OptionError(f"[pipeline] --weights expects a .pt or .safetensors file, got {options.weights.name}.")
        if not options.weights.is_file():
            raise OptionError(f"[pipeline] --weights expects an existing file, got {options.weights}.")


def parse(models: Sequence[str], defaults: Options, argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        description="Profile a model through torch and needle, stage by stage.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    texts = {
        "model": "which model",
        "backend": "nd: needle's kernels; np: numpy, without the compiled stage",
        "device": "where needle runs",
        "batch": "pictures in a batch",
        "height": "of the input",
        "width": "of the input",
        "classes": "outputs of the model",
        "dtype": "of inputs and weights",
        "weights": "state dict (.pt, read with weights_only=True, or .safetensors) instead of seeded random weights",
        "threads": "of torch and needle; 0: needle's default",
        "rounds": "alternating rounds, each stage once",
        "pictures": "how many pictures the classes are compared on",
        "base": "channels of a UNet at full size",
        "out": "folder for index.html, profile.json and trace.json",
    }
    choices = {"model": list(models), "backend": ["nd", "np"], "device": ["cpu", "cuda", "hip"]}
    for name, text in texts.items():
        if name == "base" and not any(m.startswith("unet") for m in models):
            continue
        default = getattr(defaults, name)
        kind = Path if name in ("weights", "out") else type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, choices=choices.get(name), help=text)
    return Options(**vars(parser.parse_args(argv)))


def main(models: Sequence[str], defaults: Options, argv: Sequence[str] | None = None) -> None:
    """Run the pipeline and write its report; an interrupt writes nothing."""
    options = parse(models, defaults, argv)
    try:
        check(options)
        os.environ["NEEDLE_BACKEND"] = options.backend
        import report
        import stages

        result, images = stages.run(options)
        document = report.document([result])
        print(report.console(document))
        page = report.write(options.out, document, [images])
        print(f"\nreport: {page}")
    except OptionError as e:
        raise SystemExit(str(e)) from None
    except KeyboardInterrupt:
        print("[pipeline] interrupted; nothing was written.")
        raise SystemExit(130) from None
    report.require_agreement(document)
