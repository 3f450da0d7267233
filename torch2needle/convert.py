"""The public calls: convert, check, compile."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn
from tqdm import tqdm

from needle.autograd import Unsupported
from needle.graph import GraphModule

from .capture import capture
from .interpret import interpret
from .registry import target_name
from .report import ConversionError, Report, Row
from .trace_log import LoggingInterpreter
from .weights import TreeBuilder

BAR_DELAY = 2.0  # seconds before a bar shows


def progress(text: str, total: int) -> tqdm:
    """A bar for work that takes long, on a terminal only."""
    return tqdm(total=total, desc=text, delay=BAR_DELAY, leave=False, disable=None)


def example_by_name(model: Any, example: Any) -> dict[str, Any]:
    """The example inputs under the names of the forward's parameters."""
    if example is None or isinstance(example, dict):
        return dict(example or {})
    if not isinstance(example, tuple | list):
        example = (example,)
    if not isinstance(model, nn.Module):
        return {}
    names = [p.name for p in inspect.signature(model.forward).parameters.values()]
    if len(example) > len(names):
        raise ValueError(f"[convert] example expects at most {len(names)} inputs, got {len(example)}.")
    return dict(zip(names, example, strict=False))


def run(model: Any, example: Any, share: bool) -> tuple[GraphModule | None, Report]:
    """Capture, run every rule, and collect; the net is None when something is unsupported."""
    report = Report()
    inputs = example_by_name(model, example)
    captured = capture(model, inputs)
    report.notes += captured.notes
    parts = sum(1 for _ in captured.model.modules()) + len(captured.graph.nodes)
    with progress("convert", parts) as bar:
        builder = TreeBuilder(share, report, bar.update)
        root = builder.build(captured.model)
        logging = partial(LoggingInterpreter, root=root, done=bar.update)
        recorder = interpret(captured, root, builder, report, inputs, logging)
    if recorder is None:
        return None, report
    net = GraphModule(recorder.graph.prune(), root)
    net.training = captured.model.training
    net._report = report
    return net, report


def convert(
    model: Any,
    example: Any = None,
    *,
    dynamic: str = "auto",
    share: bool = False,
    fallback: str = "error",
) -> GraphModule:
    """A trainable needle GraphModule that computes what `model` computes, with torch's parameter names.

    model: nn.Module or fx.GraphModule; it is left as it is.
    example: inputs as a tuple or a dict by name. Ranks and dtypes are then known to rules that need them, and inputs with
        defaults that appear in it become inputs. Batch and image sizes stay free either way.
    share: use torch's memory for the weights (through DLPack) instead of copies.
    Raises ConversionError, which lists everything that is unsupported at once.
    """
    if dynamic != "auto":
        raise ValueError(f"[convert] dynamic expects 'auto', got {dynamic!r}.")
    if fallback != "error":
        raise ValueError(f"[convert] fallback expects 'error', got {fallback!r}.")
    net, report = run(model, example, share)
    if net is None:
        raise ConversionError(report)
    return net


def check(model: Any, example: Any = None) -> Report:
    """What `convert` would do, as a report with one row per unsupported call; raises nothing for what is unsupported."""
    try:
        return run(model, example, share=False)[1]
    except ConversionError as e:
        return e.report
    except Unsupported as e:
        report = Report()
        report.add(Row(target_name(type(model)), "unsupported", 1, [""], "unknown line", str(e)))
        return report


def compile(
    model: Any,
    example: Any,
    *,
    fuse: bool = True,
    winograd: str = "auto",
    memory: str = "normal",
    tune: bool = False,
) -> Any:
    """`convert`, `operator_fusion.fuse` and `needle.compile` in one call; `winograd` ("auto", "f2", "off"), `memory`
    ("normal", "low") and `tune` as there.
    """
    import needle

    example = example if isinstance(example, tuple | dict) else (example,)
    net = convert(model, example)
    if fuse:
        import operator_fusion

        net = operator_fusion.fuse(net)
    inputs = tuple(example.values()) if isinstance(example, dict) else example
    return needle.compile(net, inputs, winograd=winograd, memory=memory, tune=tune)
