"""The public calls: convert, check, compile."""

from __future__ import annotations

import functools
import inspect
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

import needle
from needle import _core
from needle.autograd import Unsupported
from needle.graph import GraphModule
from needle.graph.graph import Graph, Node
from needle.graph.module import other_modes
from needle.graph.narrow import narrow_fault, overflowing
from needle.ops.math.bits import Narrowed

from .bridges.fallback import FallbackInterpreter, warn_of_share, warn_of_torch
from .bridges.otherwise import answers_violations
from .bridges.whole import WHOLE, WholeInterpreter, captured_whole, run_once
from .capture.asked import asked_of_draws, asks
from .capture.calls import call_of, longer_texts, named_axes, resized
from .capture.comparison import BadExample, Judge
from .capture.export import Manner, captures, from_program
from .capture.functions import as_module
from .capture.guard import LOCK, same_chance
from .capture.interpret import interpret
from .capture.questions import plain_masks
from .capture.refusals import refuse_unseen
from .capture.script import in_python
from .capture.settled import hint_of_writes, settled
from .capture.sized import Facts, SizedTracer
from .capture.sizes import allow_one, keep_ranks, larger, smallest, takes
from .capture.sparse import made_dense
from .capture.structure import known_records
from .capture.tracing import DIFFERS, Captured, Tracer, capture
from .report import ConversionError, Report, Row, progress, reason_of
from .rules.registry import target_name
from .tools.trace_log import LoggingInterpreter
from .weights import Tensors, TreeBuilder

LOG = logging.getLogger("needle.convert")
BUDGET = 6.0  # seconds; most models take less than one


def example_by_name(model: Any, example: Any) -> dict[str, Any]:
    """The example inputs under the names of the forward's parameters."""
    if example is None or isinstance(example, dict):
        return dict(example or {})
    if not isinstance(example, tuple | list):
        example = (example,)
    if not isinstance(model, nn.Module):
        return {}
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(example) > len(names) and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise Unsupported("the forward takes as many inputs as a call gives")
    if len(example) > len(names):
        raise ValueError(f"[convert] example expects at most {len(names)} inputs, got {len(example)}.")
    return dict(zip(names, example, strict=False))


def run(
    model: Any, example: Any, share: bool, dynamic: Any = "auto", fallback: str = "error", budget: float = BUDGET
) -> tuple[GraphModule | None, Report]:
    """Capture, run every rule, and collect; the net is None when something is unsupported.

    Torch runs calls, where `fallback` allows it, in models alone that no capture converts whole.
    """
    with (
        LOCK,
        same_chance(),
        known_records(example),
        plain_masks(),
        in_python(model, example) as model,
        made_dense(model) as notes,
    ):
        tensors = Tensors(share)
        if fallback == "torch":
            net, report = with_torch(model, example, tensors, dynamic, budget)
        else:
            net, report = first_whole(model, example, tensors, dynamic, budget, LoggingInterpreter)
            if net is not None and isinstance(model, nn.Module) and net.holds_for is model.training:
                hold_both(net, model, functools.partial(first_whole, model, example, tensors, dynamic, budget))
    report.notes += notes
    _core.release_unused_memory()  # captures were run, in float64, too
    return net, report


def with_torch(
    model: Any, example: Any, tensors: Tensors, dynamic: Any, budget: float
) -> tuple[GraphModule | None, Report]:
    """As `first_whole`; what does not convert runs in torch: single calls, else the whole model."""
    for kind in (LoggingInterpreter, FallbackInterpreter):
        try:
            net, report = first_whole(model, example, tensors, dynamic, budget, kind)
        except BadExample:
            raise
        except ConversionError as e:
            net, report = None, e.report
        except (Unsupported, AttributeError, RuntimeError, NotImplementedError) as e:
            net, report = None, Report(rows=[failed("capture", reason_of(e))])
        if net is not None:
            return net, report
    if not isinstance(model, nn.Module) or example is None:
        return None, report
    try:
        reason = "; ".join(f"{r.op}: {r.reason}" for r in report.unsupported[:1])
        whole = functools.partial(WholeInterpreter, result=run_once(model, example), reason=reason)
        return build(captured_whole(model, example), {}, tensors, WHOLE, whole)
    except Unsupported as e:
        report.add(failed("the model in torch", reason_of(e)))
        return None, report


def first_whole(
    model: Any,
    example: Any,
    tensors: Tensors,
    dynamic: Any,
    budget: float,
    kind: Callable[..., LoggingInterpreter],
    by_export: bool = True,
) -> tuple[GraphModule | None, Report]:
    """The first capture that converts whole, else None with the report of the one that came nearest.

    torch.fx captures first; where it cannot, or its graph has calls without a rule, torch.export follows the example, if it may.
    """
    if isinstance(model, ExportedProgram):
        return build(from_program(model), {}, tensors, "torch.export", kind)
    refuse_unseen(model, example)
    exportable = isinstance(model, nn.Module) and not isinstance(model, fx.GraphModule) and example is not None
    judge = Judge(model, call_of(example)) if exportable else None
    exportable = exportable and by_export
    try:
        net, report = traced(model, example_by_name(model, example), tensors, dynamic, kind, judge)
    except BadExample:
        raise
    except ConversionError as e:
        net, report = None, e.report
    except (Unsupported, AttributeError, RuntimeError, NotImplementedError) as e:
        if not exportable:
            raise
        net, report = None, Report(rows=[failed("torch.fx capture", reason_of(e))])
    if net is not None:
        return net, report
    if judge is None or not by_export:
        if any(r.op == "torch.fx capture" for r in report.rows):
            report.unsupported[0].reason += "; pass example= to capture with torch.export"
        return None, report
    return exported(model, example, tensors, dynamic, budget, kind, judge, report)


def hold_both(net: GraphModule, model: nn.Module, again: Callable[..., tuple[GraphModule | None, Report]]) -> None:
    """Gives a net that holds for the mode of the model alone a graph for the other mode, if the model converts in that.

    Where torch.export captures, which takes its time, only a model in training mode: it will be evaluated.
    """
    by_export = net.report.capture != "torch.fx" and model.training
    with other_modes(model):
        try:
            other, _ = again(LoggingInterpreter, by_export)
        except (Unsupported, AttributeError, RuntimeError, NotImplementedError, ConversionError):
            return
    if other is None or other.holds_for not in (None, not model.training):
        return
    net.with_modes(other.on_layers_of(net, {p for p, _ in model.named_modules()}))
    for held, mode in ((net.report, model.training), (other.report, not model.training)):
        held.notes = [n for n in held.notes if not n.startswith(DIFFERS)]
        held.note(f"{DIFFERS}; this is the one of {'training' if mode else 'evaluation'}, train() and eval() choose")


def traced(
    model: Any,
    inputs: dict[str, Any],
    tensors: Tensors,
    dynamic: Any,
    kind: Callable[..., LoggingInterpreter],
    judge: Judge | None,
) -> tuple[GraphModule | None, Report]:
    """What torch.fx captures, held against the model where there is one to run. inputs: the example by name."""
    if judge is None:
        return build(capture(model, inputs), inputs, tensors, "torch.fx", kind)
    answered: list[Facts] = []
    # Of texts torch.export knows the sizes of heads as numbers, by which rotary embeddings and grouped heads are fused.
    sized = dynamic == "auto" and not longer_texts(judge.call)
    opened, numbers = dict[int, Any](), dict[int, Any]()
    tracer = functools.partial(SizedTracer, inputs, answered, opened, numbers) if sized else Tracer
    captured = capture(model, inputs, tracer, judged=True)
    if numbers:
        opened.update(numbers)
        answered.clear()
        captured = capture(model, inputs, tracer, judged=True)
    if answered:
        keep_ranks(captured, inputs)
    sizes = None
    if asks(captured.graph):
        sizes = [s for s in judge.others if judge.holds(captured, resized(judge.call, s))]
        if judge.others[-1] not in sizes:
            raise Unsupported("the forward asks of the number of rows what other numbers answer otherwise")
        if any("fixes" in n.meta for n in captured.graph.nodes) and judge.takes_more(captured):
            raise Unsupported("the forward makes numbers of sizes, which it takes of other values, too")
    names = [n for n in judge.names if n in inputs]
    captured.arguments = {n: None if isinstance(inputs[n], torch.Tensor) else inputs[n] for n in names}
    captured.settled = settled(captured, judge.run(captured), judge.call)
    net, report = build(captured, inputs, tensors, "torch.fx", kind)
    if net is not None and (fault := judge.fault(captured, sizes) or judge.fault_of_net(net, inputs)):
        raise Unsupported(fault)
    return net, report


def exported(
    model: nn.Module,
    example: Any,
    tensors: Tensors,
    dynamic: Any,
    budget: float,
    kind: Callable[..., LoggingInterpreter],
    judge: Judge,
    report: Report,
) -> tuple[GraphModule | None, Report]:
    """The first capture of torch.export that converts whole; `report` says why torch.fx's did not."""
    why = "; ".join(f"{r.op}: {r.reason}" for r in report.unsupported[:1])
    how = f"torch.export, since torch.fx could not ({why})"
    best = report
    for manner in manners(model, judge):
        try:
            for captured in captures(model, example, dynamic, lambda: judge.changing, budget, manner):
                sizes = larger(captured, judge.call)
                judge.relax(captured, [*smallest(captured, judge.call), *sizes])
                if fault := asked_of_draws(captured.graph) or judge.fault(captured, sizes):
                    add_once(report, fault + hint_of_writes(captured))
                    continue
                if manner.training or judge.differs_in_training(captured):
                    mode = "training" if manner.training else "evaluation"
                    captured.notes.append(f"{DIFFERS}; it was captured in {mode} mode and stays so")
                    captured.only = manner.training
                allow_one(captured, judge.call, functools.partial(judge.agrees_at, captured))
                if not takes(captured, judge.call):  # of one row, where two are taken for any number
                    add_once(report, "the graph holds for other sizes than the example's")
                    continue
                captured.settled = settled(captured, judge.run(captured), judge.call)
                net, found = build(captured, {}, tensors, how, kind)
                if net is not None:
                    if not (fault := judge.fault_of_net(net, None)):
                        return net, found
                    add_once(report, fault)
                    continue
                if not best.capture or len(found.unsupported) < len(best.unsupported):
                    best = found
        except BadExample:
            raise
        except ConversionError as e:
            for row in e.report.rows:
                add_once(report, row.reason, row)
        except Exception as e:
            add_once(report, reason_of(e))
        if best is not report:  # the graph is right, and rules are missing
            break
    judge.refuse_example()
    return None, best


def manners(model: nn.Module, judge: Judge) -> Iterator[Manner]:
    """How torch.export may follow a model, each where the ones before did not do."""
    modes = (False, True) if any(m.training for m in model.modules()) else (False,)
    for training in modes:
        yield Manner(training)
        if judge.functions:
            yield Manner(training, slopes="elements")
            yield Manner(training, slopes="transposes")
        if judge.asks_whether_compiled:
            yield Manner(training, eager=True)


def add_once(report: Report, reason: str, row: Row | None = None) -> None:
    """Why a capture of torch.export is none, unless another one said so."""
    if all(r.reason != reason for r in report.rows):
        report.add(row or failed("torch.export capture", reason))


def failed(how: str, reason: str) -> Row:
    return Row(how, "unsupported", 1, [""], "unknown line", reason.removeprefix("[convert] "))


def build(
    captured: Captured, inputs: dict[str, Any], tensors: Tensors, how: str, kind: Callable[..., LoggingInterpreter]
) -> tuple[GraphModule | None, Report]:
    """Run every rule over a captured graph."""
    report = Report(capture=how)
    report.notes += captured.notes
    parts = sum(1 for _ in captured.model.modules()) + len(captured.graph.nodes)
    with progress("convert", parts) as bar:
        builder = TreeBuilder(tensors, report, bar.update)
        root = builder.build(captured.model)
        recorder = interpret(
            captured, root, builder, report, inputs, functools.partial(kind, root=root, done=bar.update)
        )
    if recorder is None:
        return None, report
    net = GraphModule(recorder.graph.prune(), root)
    net.training = captured.model.training
    net._report, net._only = report, captured.only
    if tensors.narrow or any(n.kind == "op" and isinstance(n.target, Narrowed) for n in net.graph):
        over = overflowing(net.graph, net, narrow_dtypes(net, tensors))

        def wrapped(node: Node, graph: Graph, done: dict[Node, Node]) -> Node | None:
            if node not in over:
                return None
            made = graph.copy_node(node, done)
            end = graph.add("op", Narrowed(over[node]), (made,), "narrowed")
            end.meta = dict(made.meta)
            return end

        net = net.with_graph(net.graph.copy(wrapped)) if over else net
        if fault := narrow_fault(net.graph, net, narrow_dtypes(net, tensors)):
            raise Unsupported(fault)
    return net, report


def narrow_dtypes(net: GraphModule, tensors: Tensors) -> dict[Node, str]:
    """Torch's dtypes of the parameters that are wider here; each call looks at those of inputs."""
    found = dict.fromkeys(net.graph.inputs, "float32")
    return found | {n: d for n in net.graph if n.kind == "param" and (d := tensors.narrow.get(net.constant(n)))}


def convert(
    model: Any,
    example: Any = None,
    *,
    dynamic: str | bool | Mapping[str, Any] = "auto",
    dynamic_budget: float = BUDGET,
    share: bool = False,
    fallback: str = "error",
    on_guard: str = "error",
) -> GraphModule:
    """A trainable needle GraphModule that computes what `model` computes, with torch's parameter names.

    model: nn.Module, fx.GraphModule or torch.export.ExportedProgram, or a method of a module (`model.encode`) or a function,
        whose parameters are those that it looks at by name; it is left as it is.
    example: inputs as a tuple or a dict by name. Ranks and dtypes are then known to rules that need them, inputs with
        defaults that appear in it become inputs, and what torch.fx cannot trace is captured by torch.export.
    dynamic: "auto": with torch.export the batch, image sizes and lengths stay free where they can, as they are with torch.fx;
        False: torch.export fixes all sizes to the example's; {"input_ids": {0, 1}}: those axes of the forward's arguments are
        free, or the conversion says what fixes them, and no others.
    dynamic_budget: seconds of processor time that torch.export may take to leave heights, widths and lengths free; where they
        end, the batch alone is, and `net.report` says so.
    share: use torch's memory for the weights (through DLPack) instead of copies. An executable packs its own: after torch
        wrote them, as its optimizers do, call `refresh()` of it.
    fallback: "torch" lets torch run the calls that have no rule or whose rule refuses, through DLPack and without copies, and
        warns of them, or the whole model where no capture converts; it needs `example`. Such a model trains and compiles,
        but cannot be saved.
    on_guard: "torch" lets `model` itself, in torch and by the net's parameters, answer inputs that answer otherwise than the
        example what the forward asks of values; in evaluation alone, and files do not have it. "error" raises GuardError.
    Raises ConversionError, which lists everything that is unsupported at once.
    """
    model = as_module(model)
    if not isinstance(dynamic, Mapping) and dynamic not in ("auto", False):
        raise ValueError(f"[convert] dynamic expects 'auto', False or axes by input, got {dynamic!r}.")
    if isinstance(dynamic, Mapping):
        if example is None or not isinstance(model, nn.Module):
            raise ValueError(f"[convert] dynamic by input expects a module and example=, got {type(model).__name__}.")
        named_axes(model.forward, call_of(example), dynamic)
    if fallback not in ("error", "torch"):
        raise ValueError(f"[convert] fallback expects 'error' or 'torch', got {fallback!r}.")
    if on_guard not in ("error", "torch"):
        raise ValueError(f"[convert] on_guard expects 'error' or 'torch', got {on_guard!r}.")
    if not isinstance(dynamic_budget, int | float) or isinstance(dynamic_budget, bool) or not dynamic_budget >= 0:
        raise ValueError(f"[convert] dynamic_budget expects a number of seconds, got {dynamic_budget!r}.")
    start = time.perf_counter()
    net, report = run(model, example, share, dynamic, fallback, dynamic_budget)
    if net is None:
        raise ConversionError(report)
    if isinstance(model, nn.Module):
        net._title = type(model).__name__
    seconds = time.perf_counter() - start
    LOG.info(
        "converted %s by %s: %d nodes, %.2f s", type(model).__name__, report.capture, sum(1 for _ in net.graph), seconds
    )
    for note in report.notes:
        LOG.debug("%s: %s", type(model).__name__, note)
    warn_of_torch(report)
    net.warn_of_mode(net.training, "convert")
    if on_guard == "torch":
        answers_violations(net, model, example)
    return net


def check(model: Any, example: Any = None) -> Report:
    """What `convert` would do, as a report with one row per unsupported call; raises nothing for what is unsupported."""
    model = as_module(model)
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
    precision: str = "float32",
    fallback: str = "error",
    on_guard: str = "error",
) -> Any:
    """`convert`, `operator_fusion.fuse` and `needle.compile` in one call: a needle.Executable, called as `model` is.

    model: as of `convert`, in evaluation; one on a GPU stays there.
    example: an input, a tuple of inputs or a dict by name, of the shapes to plan for; other shapes get their own plan later.
    fuse: False leaves operators as they are.
    winograd ("auto", "f2", "off"), memory ("normal", "low"), tune, precision ("float32"; on a GPU also "tf32", "float16",
        "bfloat16"): as of `needle.compile`.
    fallback ("error", "torch": with a warning that says which share of the time torch takes), on_guard: as of `convert`.
    Raises ConversionError, and ValueError where layers are in training mode.
    """
    model = as_module(model)
    example = example if isinstance(example, tuple | dict) else (example,)
    with warnings.catch_warnings():
        if fallback == "torch":
            warnings.filterwarnings("ignore", r"\[convert\]")  # the one below says more
        net = convert(model, example, fallback=fallback, on_guard=on_guard)
    if any(t.device.type == "cuda" for t in model.parameters()):
        net.to(needle.hip() if torch.version.hip else needle.cuda())
    args, kwargs = call_of(example)
    inputs = tuple(net.bind(args, {k: v for k, v in kwargs.items() if k in net.input_names}))
    exe = executable(net, inputs, fuse, winograd=winograd, memory=memory, tune=tune, precision=precision)
    if fallback == "torch":
        warn_of_share(exe, net.report, inputs)
    return exe


def executable(net: GraphModule, inputs: tuple, fuse: bool, **options: Any) -> Any:
    """`net`, fused or not, compiled with `options`."""
    if fuse:
        import operator_fusion

        net = operator_fusion.fuse(net)
    return needle.compile(net, inputs, **options)
