"""What the command line names: models, programs, weights, saved nets and inputs; what is not there is one sentence."""

from __future__ import annotations

import argparse
import importlib
import operator
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .kinds import NET, STATE, TENSORS, kind_of_file

if TYPE_CHECKING:  # when it runs, needle and torch are imported where they are needed
    from needle.graph import GraphModule

BUILT_IN = [  # of torch2needle.models, without importing torch
    "densenet121", "efficientnet_b0", "lstm", "mlp", "mobilenet_v2", "resnet101", "resnet18", "resnet34",
    "resnet50", "resnet9", "resnet9_wide", "transformer", "unet", "vgg16", "vit",
]  # fmt: skip
LONGEST = 400  # letters of another program's error


class UsageError(Exception):
    """What the command line asks for is not there or cannot be read; one sentence."""


def one_line(e: BaseException) -> str:
    """An error's text without torch's C++ frames, and not longer than a reader's patience."""
    text = " ".join(str(e).partition("Exception raised from")[0].split()).rstrip(".") or type(e).__name__
    return text if len(text) <= LONGEST else text[: LONGEST - 3].rstrip(".") + "..."


def is_program(path: str) -> bool:
    return path.endswith(".pt2")


def is_needle_file(path: str) -> bool:
    return os.path.isfile(path) and not is_program(path)


def known(path: str) -> str:
    """The file, and what it is where that can be told."""
    return ": ".join(filter(None, (path, kind_of_file(path))))


def find(name: str) -> Any:
    """The object behind package.module:callable or a built-in name."""
    from .. import models

    if name in BUILT_IN:
        return getattr(models, name)
    module, _, path = name.partition(":")
    if not module or not path:
        got = f"the folder {name}" if os.path.isdir(name) else name or "nothing"
        raise UsageError(
            f"[model] expects package.module:callable, a file that exists, or one of {', '.join(BUILT_IN)}, got {got}."
        )
    if "" not in sys.path:  # installed commands do not search the current folder, as `python -m` does
        sys.path.insert(0, "")
    try:
        return operator.attrgetter(path)(importlib.import_module(module))
    except (Exception, SystemExit) as e:  # the user's own module may fail in any way
        raise UsageError(f"[model] cannot import {name}: {type(e).__name__}: {one_line(e)}.") from e


def program_of(args: argparse.Namespace) -> Any:
    """The ExportedProgram of a .pt2 file."""
    import torch

    from .archive import Unsafe, load_program

    path = args.model
    if args.weights or args.args or args.kwargs:
        raise UsageError("[model] a .pt2 file holds its weights and takes no --weights, --args or --kwargs.")
    if not os.path.isfile(path):
        raise UsageError(f"[model] there is no file {path}.")
    try:
        return torch.export.load(path) if args.trust else load_program(path)
    except Unsafe as e:
        raise UsageError(f"[model] {path} holds {e}; with --trust it is read all the same, and may run code.") from e
    except Exception as e:
        raise UsageError(f"[model] cannot read {path}: {one_line(e)}.") from e


def torch_model(args: argparse.Namespace) -> Any:
    """The nn.Module, or ExportedProgram of a .pt2 file, in evaluation and with its weights."""
    from .. import load

    load()
    import torch
    from torch import nn

    if is_program(args.model):
        return program_of(args)
    if os.path.isfile(args.model):
        raise UsageError(f"[model] {args.task} expects a torch model, got the file {known(args.model)}.")
    made = find(args.model)
    torch.manual_seed(args.seed)
    if not isinstance(made, nn.Module):
        try:
            made = made(*args.args, **args.kwargs)
        except (Exception, SystemExit) as e:
            raise UsageError(f"[model] {args.model} failed: {type(e).__name__}: {one_line(e)}.") from e
    if not isinstance(made, nn.Module):
        raise UsageError(f"[model] expects {args.model} to give an nn.Module, got {type(made).__name__}.")
    if args.weights:
        load_weights(made, args.weights)
    return made.eval()


def load_weights(model: Any, path: str) -> None:
    import torch

    if not os.path.isfile(path):
        raise UsageError(f"[weights] there is no file {path}.")
    kind = kind_of_file(path)
    if kind not in ("", STATE, NET, TENSORS):
        raise UsageError(f"[weights] expects a state dict, got the file {path}: {kind}.")
    try:
        if kind in (NET, TENSORS):
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        if kind in (NET, TENSORS):
            raise UsageError(f"[weights] {path} does not fit: {one_line(e)}.") from e
        # What torch says tells to load the file with weights_only=False.
        raise UsageError(f"[weights] {path} does not fit: it is no pickle of tensors alone.") from e
    try:
        model.load_state_dict(state)
    except Exception as e:
        raise UsageError(f"[weights] {path} does not fit: {one_line(e)}.") from e


def inputs_of(args: argparse.Namespace) -> Any:
    """Random inputs: a tuple, a dict where they have names, or None where there are none; of numpy for a needle file."""
    import numpy as np

    generator = np.random.default_rng(args.seed)

    def draw(shape: tuple[int, ...], dtype: str) -> Any:
        is_float = dtype.startswith("float")
        drawn = generator.standard_normal(shape) if is_float else generator.integers(0, 2, shape)
        array = np.asarray(drawn, dtype=dtype)
        return array if is_needle_file(args.model) else sys.modules["torch"].from_numpy(array)

    names = [name for name, _, _ in args.input if name]
    if names and (len(names) < len(args.input) or len(set(names)) < len(names)):
        raise UsageError(f"[input] expects a name of its own for every input or for none, got {', '.join(names)}.")
    try:
        values = [draw(shape, dtype) for _, shape, dtype in args.input]
    except (ValueError, MemoryError) as e:
        raise UsageError(f"[input] {one_line(e)}.") from e
    return dict(zip(names, values, strict=True)) if names else tuple(values) or None


def arrays_of(texts: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Arrays of .npy files, by name and by position."""
    import numpy as np

    named: dict[str, Any] = {}
    given: list[Any] = []
    for text in texts:
        found = re.fullmatch(r"([A-Za-z_]\w*)=(.+)", text, re.ASCII)
        name, path = (found[1], found[2]) if found else ("", text)
        if not os.path.isfile(path):
            raise UsageError(f"[input] there is no file {path}.")
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as e:
            raise UsageError(f"[input] {path} is not a .npy file of numbers.") from e
        if not isinstance(array, np.ndarray):
            raise UsageError(f"[input] expects a .npy file of one array, got {path}.")
        if name in named:
            raise UsageError(f"[input] expects one array for {name}, got two.")
        if name:
            named[name] = array
        else:
            given.append(array)
    return named, given


def save_array(path: str, array: Any) -> None:
    """A .npy file, whole or not there."""
    import io

    import numpy as np

    from needle.files import write_file

    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    write_file(path, data.getvalue())


def refuse_inputs(model: Any, inputs: Any) -> None:
    """Raises UsageError where torch's own model does not take these inputs: then nothing else is to blame."""
    import torch

    from ..capture.guard import gradients_where_asked

    if inputs is None:
        return
    forward = model if isinstance(model, torch.nn.Module) else model.module()
    try:
        gradients_where_asked(lambda: forward(**inputs) if isinstance(inputs, dict) else forward(*inputs))
    except Exception as e:
        raise UsageError(f"[input] the model does not run on these inputs: {type(e).__name__}: {one_line(e)}.") from e


def converted(model: Any, inputs: Any) -> GraphModule:
    from .. import check, convert

    try:
        return convert(model, inputs)
    except Exception:
        if (
            isinstance(model, sys.modules["torch"].nn.Module) or check(model).ok
        ):  # torch runs no program before its check
            refuse_inputs(model, inputs)
        raise


def needle_net(args: argparse.Namespace) -> GraphModule:
    """A conversion of the model, or the net of a saved needle file."""
    if is_needle_file(args.model):
        if args.weights or args.args or args.kwargs:
            raise UsageError("[model] a needle file holds its weights and takes no --weights, --args or --kwargs.")
        return load_net(args.model)
    model = torch_model(args)
    return converted(model, inputs_of(args))


def load_net(path: str) -> GraphModule:
    import needle as ndl

    try:
        net = ndl.load(path)
    except (OSError, ValueError) as e:
        if os.path.isfile(path) and kind_of_file(path) not in ("", NET):
            raise UsageError(f"[load] expects a saved needle net, got the file {known(path)}.") from e
        if not os.path.exists(path) and (path in BUILT_IN or ":" in path):
            raise UsageError(f"[load] expects a saved needle net, which convert makes of models, got {path}.") from e
        raise UsageError(str(e)) from e
    net.eval()
    return net
