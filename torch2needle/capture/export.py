"""Capture by torch.export, which follows Python's control flow for one example, and leaves free the sizes that it can."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from needle.autograd import Unsupported
from needle.graph import map_structure

from ..report import ConversionError
from .asked import Answers, answers, whether_compiled
from .budget import Budget
from .calls import Call, call_of, named_axes, resized, tensors
from .conditions import MOST, Bounds, asks_values_alone, bounds, first_of, fixed_or_free, fixed_sizes
from .counts import for_some, some_rows
from .flags import Changing
from .functional import Gradients, below_autograd, data_as_calls, lacks_rule, transforms_as_calls
from .guard import free_len, inference_without_gradients, patched, quiet
from .numbers import Scopes
from .packing import Packing
from .program import capture_program
from .questions import without_questions
from .slopes import Slope, gradients_as_slopes
from .state import untouched
from .steps import PLAIN, layers_as_calls
from .structure import plain_result
from .surroundings import Surroundings, globals_seen, uncached
from .tracing import Captured, capture_error

Axes = dict[int, tuple[int, ...]]  # of the example's tensors, by number
SMALL = (
    400  # nodes up to which heights and widths of images are tried: torch.export takes half a minute for larger graphs
)


class Manner(NamedTuple):
    """How a forward is followed. training: in the modes that its modules are in, else in evaluation; slopes: how with the
    gradients of its own autograd functions, else with the derivatives of what they compute; eager: it is told that it is
    not compiled."""

    training: bool = False
    slopes: Slope | None = None
    eager: bool = False


NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)  # Python's, of values


def captures(
    model: nn.Module,
    example: Any,
    dynamic: Any,
    changing: Changing,
    budget: float,
    manner: Manner = Manner(),  # noqa: B008 - a tuple
) -> Iterator[Captured]:
    """Captures with fewer and fewer free sizes, or with those that `dynamic` names, for the first that converts; raises
    ConversionError where none can be made.

    Last come those that answer what the forward asks of its tensors' values as the example does, and check that.
    budget: seconds that sizes beyond the batch may take.
    """
    if isinstance(dynamic, Mapping):
        yield from named(model, call_of(example), dynamic, changing, manner)
        return
    time = Budget(budget)
    try:
        yield from unchecked(model, example, dynamic, changing, time, manner)
        error = None
    except ConversionError as e:
        error = e
    call = call_of(example)
    wider = batched(call)[1] if dynamic == "auto" else call
    try:
        asked = answers(model, *wider, manner.training)
    except Exception:  # a batch of one is no other
        wider, asked = call, answers(model, *call, manner.training)
    if not asked and not asks_values_alone(getattr(error, "__cause__", error)):
        if error is not None:
            yield strictly(model, call, error, changing, manner)
        return
    try:
        yield from answered(model, call, wider, asked, dynamic, changing, time, manner)
        if asked.scopes.found:  # numbers of tensors as the example's, which what takes no tensors needs
            asked = answers(model, *wider, manner.training, opened=False)
            yield from answered(model, call, wider, asked, dynamic, changing, time, manner)
    except Exception as e:
        yield strictly(model, call, error or capture_error(model, e, "torch.export"), changing, manner)


def answered(
    model: nn.Module,
    call: Call,
    wider: Call,
    asked: Answers,
    dynamic: Any,
    changing: Changing,
    time: Budget,
    manner: Manner,
) -> Iterator[Captured]:
    """Captures that answer what is asked as `asked`, of the call `wider`, does."""
    batch, _ = batched(wider) if dynamic == "auto" else (None, wider)
    rows, more = free_axes(wider, batch)
    for free in (more, rows):
        tried = functools.partial(attempt, model, wider, free, time=time if free is more else None, manner=manner)
        found = tried(asked) if free else None
        if found is not None:
            if (told := for_some(asked, found.program.graph)) and (fuller := tried(told)):
                yield fuller.captured(model, changing)
            yield time.noted(found).captured(model, changing)
    if wider is not call:
        asked = answers(model, *call, manner.training, asked.opened)
    with suppress(Exception) if asked.scopes.found else nullcontext():
        yield time.noted(export(model, *call, {}, asked, manner)).captured(model, changing)


def named(
    model: nn.Module, call: Call, dynamic: Mapping[str, Any], changing: Changing, manner: Manner
) -> Iterator[Captured]:
    """Captures with the axes free that `dynamic` names by input, and no others."""
    names, given = named_axes(model.forward, call, dynamic), tensors(call)
    wider = resized(call, {place: 2 for place in names if given[place[0]].shape[place[1]] == 1})  # 1 counts as fixed
    free = {i: tuple(axis for j, axis in names if j == i) for i, _ in names}
    error: Exception | None = None
    for asks_values in (False, True):
        asked = answers(model, *wider, manner.training) if asks_values else None
        if asks_values and not asked:
            break
        try:
            found = export(model, *wider, free, asked, manner)
        except Exception as e:
            error = e
            continue
        error, fixed = None, bounds(found.program).held | fixed_sizes(found.program)
        if told := [f"axis {place[1]} of {name}" for place, name in names.items() if place in fixed]:
            raise Unsupported(f"dynamic names {', '.join(told)}, which the forward fixes")
        yield found.captured(model, changing)
    if error is not None:
        raise capture_error(model, error, "torch.export") from error


def strictly(model: nn.Module, call: Call, error: ConversionError, changing: Changing, manner: Manner) -> Captured:
    """What torch.export makes of the forward's bytecode, which follows numpy, for the example's sizes; else `error`.

    It tells no classes of results, and costs seconds, so that it comes last.
    """
    args, kwargs = pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, call)
    try:
        with untouched(model), warnings.catch_warnings(), quiet(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")
            if not manner.training:
                model.eval()
            program = torch.export.export(model, args, kwargs, strict=True)
    except Exception as e:
        raise error from e
    if any(n.target in NUMBERS for n in program.graph.nodes):
        raise error
    if [t.shape for t in tensors((args, kwargs))] != [t.shape for t in tensors(call)]:  # unsqueeze_ and its like
        raise error
    return from_program(program, model, [], changing, training=manner.training)


def unchecked(
    model: nn.Module, example: Any, dynamic: Any, changing: Changing, time: Budget, manner: Manner
) -> Iterator[Captured]:
    """Captures that hold for all values."""
    call = call_of(example)
    batch, wider = batched(call) if dynamic == "auto" else (None, call)
    rows, more = free_axes(wider, batch)
    images = any(map(is_image, tensors(wider)))
    first = images or more == rows  # of texts the lengths, with which the batch is free, too
    tried = functools.partial(attempt, manner=manner, asking=[])
    some = tried(model, wider, rows) if first else None
    if some is not None and len(some.program.graph.nodes) > SMALL:  # then only lengths, of texts beside images
        more = {i: axes for i, t in enumerate(tensors(wider)) if (axes := (rows if is_image(t) else more).get(i))}
    if more != rows:
        most = tried(model, wider, more, time=time, known=(rows, some))
        if most is not None and most is not some:
            if most.fixes(rows):  # sizes that hang together may be fixed together: the batch is worth more
                some, first = some if first else tried(model, wider, rows), True
                if some is not None and not some.fixes(rows):
                    yield some.captured(model, changing)
            yield most.captured(model, changing)
    if not first:
        some = tried(model, wider, rows)
    if some is not None:
        yield time.noted(some).captured(model, changing)
    elif rows:  # a model for this batch alone, such as one with a cache of it
        rest = {i: tuple(a for a in axes if a not in rows.get(i, ())) for i, axes in more.items()}
        found = tried(model, call, {i: axes for i, axes in rest.items() if axes}, time=time)
        if found is not None:
            yield found.captured(model, changing)
    try:
        alone = export(model, *call, {}, None, manner)
    except Exception as e:
        if some is None:
            raise capture_error(model, e, "torch.export") from e
    else:
        yield time.noted(alone).captured(model, changing)


class Exported(NamedTuple):
    """A program with what there is to say of it, and a result of the model, whose classes the program's lacks."""

    program: ExportedProgram
    notes: list[str]
    result: Any
    training: bool

    def fixes(self, axes: Axes) -> bool:
        """Whether one of them is not free, or has to be a multiple of a number."""
        fixed = fixed_sizes(self.program) | bounds(self.program).stepping
        return any((i, axis) in fixed for i, several in axes.items() for axis in several)

    def captured(self, model: nn.Module, changing: Changing) -> Captured:
        return from_program(self.program, model, self.notes, changing, self.result, self.training)


def attempt(
    model: nn.Module,
    call: Call,
    free: Axes,
    asked: Answers | None = None,
    time: Budget | None = None,
    known: tuple[Axes, Exported | None] = ({}, None),
    manner: Manner = Manner(),  # noqa: B008
    asking: list[Exception] | None = None,
) -> Exported | None:
    """The program with as many of the sizes free as the forward's branches do not hang on; None without any.

    known: the program of some sizes. asking: gets what ended an attempt, and any other would end: a question about values.
    """
    while free and not asking:
        if free == known[0] and known[1] is not None:
            return known[1]
        try:
            with (time or Budget(math.inf)).spent(f"capture, {sum(map(len, free.values()))} free sizes"):
                found = export(model, *call, free, asked, manner)
        except Exception as e:  # also where a size is another one's multiple: the caller tries fewer
            if asking is not None and asks_values_alone(e):
                asking.append(e)
            return None
        held = bounds(found.program).held
        if not held:
            return found
        less = {i: tuple(a for a in axes if (i, a) not in held) for i, axes in free.items()}
        if less == free:
            return None
        free = {i: axes for i, axes in less.items() if axes}
    return None


def batched(call: Call) -> tuple[int | None, Call]:
    """(the batch's size, the call); a batch of one is doubled, since torch.export takes a size of one as fixed."""
    first = next((t for t in tensors(call) if t.ndim), None)
    if first is None or not first.shape[0]:
        return None, call
    size = first.shape[0]
    if size > 1:
        return size, call

    def double(t: Any) -> Any:
        return torch.cat([t, t]) if isinstance(t, torch.Tensor) and t.ndim and t.shape[0] == 1 else t

    return 2, pytree.tree_map(double, call)


def is_image(t: torch.Tensor) -> bool:
    return t.ndim >= 4 and t.is_floating_point()


def free_axes(call: Any, batch: int | None) -> tuple[Axes, Axes]:
    """The batch's axes, by number of the tensor, and the same with heights and widths of images and any axis of other tensors.

    Those that the model fixes, such as features, torch.export takes back.
    """
    if batch is None:
        return {}, {}
    rows: Axes = {i: (0,) for i, t in enumerate(tensors(call)) if t.ndim and t.shape[0] == batch}
    more = {i: tuple(range(2 if is_image(t) else 1, t.ndim)) for i, t in enumerate(tensors(call))}
    vectors = {i: (0,) for i, t in enumerate(tensors(call)) if t.ndim == 1 and not t.is_floating_point()}
    more |= {i: axes for i, axes in vectors.items() if i not in rows}  # lengths, where time is the first axis
    sizes = {t.shape[axis] for i, t in enumerate(tensors(call)) for axis in more[i]}
    for i, t in enumerate(tensors(call)):
        if i not in rows and t.ndim == 2 and t.shape[0] in sizes:  # masks (L, L), matrices of neighbours
            more[i] = (0, *more[i])
    both = {i: (*rows.get(i, ()), *axes) for i, axes in more.items()}
    return rows, {i: axes for i, axes in both.items() if axes}


def export(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], free: Axes, asked: Answers | None, manner: Manner
) -> Exported:
    """torch.export above decomposition; asked: what it is told of values.

    A forward that asks autograd for gradients is exported from below it, where torch has them in calls that have rules.
    """
    asks = Gradients()
    try:
        with asks.watched():
            found = export_open(model, args, kwargs, free, asked, manner)
        targets = {n.target for n in found.program.graph.nodes} if asks.asked else set()
        if not any(t in PLAIN or lacks_rule(t) for t in targets):
            return found
    except Exception:
        if not asks.asked:
            raise
    with asks.watched(), below_autograd(model):
        return export_open(model, args, kwargs, free, asked, manner)


def export_open(model: nn.Module, *how: Any) -> Exported:
    """`export_once`, and once more with free sizes in the place of the plain numbers that code makes of them."""
    scopes, error = Scopes(), None
    try:
        with scopes.watched():
            found = export_once(model, *how)
    except Exception as e:
        error = e
    if scopes.found:
        with suppress(Exception), scopes.open():
            return export_once(model, *how)
    if error is not None:
        raise error
    return found


def export_once(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], free: Axes, asked: Answers | None, manner: Manner
) -> Exported:
    args, kwargs = pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, (args, kwargs))
    shapes = ShapesCollection()
    for i, t in enumerate(tensors((args, kwargs))):
        if i in free:
            shapes[t] = dict.fromkeys(free[i], Dim.AUTO)
    notes: list[str] = []
    results: list[Any] = []
    around = Surroundings.of(model)
    outputs, stand_ins = plain_outputs(model, kwargs, notes, results), Packing().patches()
    with (
        untouched(model),
        warnings.catch_warnings(),
        outputs,
        free_len(globals_seen(model, around)),
        uncached(around),
        quiet(),
        stand_ins,
        transforms_as_calls(),
        data_as_calls(),
        gradients_as_slopes(manner.slopes) if manner.slopes else nullcontext(),
        whether_compiled(lambda own: False) if manner.eager else nullcontext(),
        without_questions(),
        layers_as_calls(),
        without_layouts(),
    ):
        warnings.simplefilter("ignore")
        if not manner.training:
            model.eval()
        dynamic = shapes.dynamic_shapes(model, args, kwargs) if free else None
        told, some, opened = (
            (nullcontext(), nullcontext(), nullcontext())
            if asked is None
            else (asked.given(), some_rows(), asked.scopes.open())
        )
        with torch.inference_mode(False), torch.enable_grad(), inference_without_gradients(), told, some, opened:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
    return Exported(program, notes, results[-1], manner.training)


def without_layouts() -> AbstractContextManager:
    """No node is told how its result lies in memory, which asks some ten questions of free sizes and is read nowhere."""
    names = vars(proxy_tensor)
    return patched([(names, n, lambda _: None) for n in ("_extract_tensor_metadata",) if n in names])


def is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def plain_size(value: Any) -> Any:
    return tuple(value) if is_size(value) else value


def named_keywords(forward: Any, kwargs: dict[str, Any]) -> inspect.Signature:
    """The forward's signature with the names that the call gives for **kwargs, which torch.export cannot leave free."""
    signature = inspect.signature(forward)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(kept) < len(signature.parameters):
        kept += [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in kwargs if k not in signature.parameters]
    return signature.replace(parameters=kept)


def plain_outputs(
    model: nn.Module, kwargs: dict[str, Any], notes: list[str], results: list[Any]
) -> AbstractContextManager:
    """The forward returns dicts instead of classes; `results` gets what it returned, without the tensors."""
    forward, own = model.forward, vars(model).get("forward")

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs) if own else type(model).forward(model, *args, **kwargs)  # which may be patched
        results.append(map_structure(pytree.tree_map(plain_size, result, is_leaf=is_size), lambda _: None))
        return plain_result(result, notes)

    wrapped.__signature__ = named_keywords(forward, kwargs)  # type: ignore[attr-defined]
    return patched([(vars(model), "forward", wrapped)])


def from_program(
    program: ExportedProgram,
    model: nn.Module | None = None,
    notes: list[str] | None = None,
    changing: Changing = dict,
    result: Any = None,
    training: bool = False,
) -> Captured:
    """The captured graph of a program that gives what `result` tells the classes of, with the sizes that its inputs may have."""
    captured = capture_program(program, model, notes or [], changing, result, training)
    ranges = {str(s): r for s, r in program.range_constraints.items()}
    asked = bounds(program)
    free = []
    for i, node in enumerate(n for n in captured.graph.nodes if n.op == "placeholder"):
        shape = [
            s.node.hint if (i, axis) in asked.held else fixed_or_free(s)
            for axis, s in enumerate(node.meta["val"].shape)
        ]
        node.meta["sizes"] = tuple(limits(s, ranges, asked) for s in shape)
        free += [f"{node.target} axis {axis}" for axis, s in enumerate(shape) if not isinstance(s, int)]
    captured.notes.append(f"free sizes: {', '.join(free) or 'none'}")
    return captured


def limits(size: Any, ranges: dict[str, Any], asked: Bounds) -> tuple:
    """(least, largest or None, name), and the number of which sizes are multiples; asked: by the forward's branches."""
    if isinstance(size, int):
        return size, size, ""
    r = ranges.get(str(size))
    if r is None:
        return 1, None, ""
    name = first_of(str(size), asked.same)
    low, high = asked.limits.get(name, (1, MOST))
    most = min(high, int(r.upper) if r.upper.is_number and r.upper < MOST else MOST)
    step = asked.steps.get(name, 1)
    least = -(-max(1, int(r.lower), low) // step) * step
    return (least, None if most == MOST else most, name, *([step] if step > 1 else []))
