"""Whether a captured graph computes what its model computes: torch runs both, on the example and on inputs unlike it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import needle as ndl
from needle.autograd import Unsupported
from needle.graph import GraphModule
from needle.graph.structure import record_of
from needle.nn import WriteBuffer

from ..rules.overloads import FLAGS
from .asked import OtherAnswer, asks
from .calls import (
    LARGER,
    SMALLER,
    Call,
    Sizes,
    fresh,
    half_images,
    other_batch,
    resized,
    shuffled,
    tensors,
    varied,
)
from .functional import Gradients
from .guard import (
    Writes,
    autocasts,
    gradient_hooks,
    own_gradients,
    plain_conditions,
    python_chance,
    same_chance,
    untouched,
)
from .packing import run as run_rows
from .slopes import slopes
from .structure import PLAIN, is_record_class, plain_result
from .tracing import Captured, TrainingFlag, user_lines

# Of the largest value; a fast path of torch's own may round otherwise.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 3e-2
NET_TOLERANCE = 1e-2  # of needle's result: what another order of sums may make of a deep network, and no wrong rule
ROUNDING = 1e-4  # of a result in float32, where it is no longer only that of the last sums
TIES = 0.1  # of whole numbers may differ, since a rounding error picks another of almost equal values
HALVES = (torch.float16, torch.bfloat16)


class BadExample(Unsupported):
    """The model refuses the example that was given."""


class Fails(Exception):
    """The model itself raises an error."""


@dataclasses.dataclass
class Behaviour:
    """What some calls in a row gave, which parameters the results have gradients of, and whose gradients are the user's."""

    results: list[list[Any]]
    reached: list[frozenset[int]]
    functions: set[str]  # of autograd
    hooks: set[str]
    drawing: bool = False  # torch's random numbers
    chancy: bool = False  # Python's or numpy's
    changing: bool = False  # attributes of the model
    casting: bool = False  # by autocast


def behaviour(function: Callable, model: nn.Module, calls: list[Call], training: bool | None = None) -> Behaviour:
    """Runs the calls one after the other from the model's present state, which they leave as it is."""
    made = Behaviour([], [], set(), set())
    writes, gradients = Writes(), Gradients()

    def noting(names: set[str]) -> Callable[[str], None]:
        return lambda name: names.add(name) if torch.is_grad_enabled() else None

    with same_chance(), untouched(model) as state, torch.inference_mode(False):
        if training is not None:
            model.train(training)
        chance = python_chance()
        try:
            for i, call in enumerate(calls):
                args, kwargs = fresh(call)
                with (
                    torch.set_grad_enabled(not i or gradients.asked),
                    gradients.watched(),
                    writes,
                    own_gradients(noting(made.functions)),
                    gradient_hooks(noting(made.hooks)),
                    plain_conditions(),
                    autocasts(lambda: setattr(made, "casting", True)),
                ):
                    result = flat(plain_result(function(*args, **kwargs)))
                if not i:
                    made.reached = [reached(t) for t in result]
                made.results.append([t.detach().clone() if isinstance(t, torch.Tensor) else t for t in result])
                del result  # and what its graph keeps
        finally:
            writes.undo()
            made.changing = state.changed()
            made.chancy = python_chance() != chance
    made.drawing = bool(writes.drawing)
    return made


def flat(result: Any, *kinds: type) -> list[Any]:
    return pytree.tree_leaves(result, is_leaf=lambda v: v is None or isinstance(v, kinds))


def reached(result: Any) -> frozenset[int]:
    """Ids of the tensors whose gradients a result's graph leads to."""
    found: set[int] = set()
    todo = [result.grad_fn] if isinstance(result, torch.Tensor) and result.grad_fn is not None else []
    seen = set(todo)
    while todo:
        step = todo.pop()
        if (variable := getattr(step, "variable", None)) is not None and isinstance(variable, nn.Parameter):
            found.add(id(variable))
        for following, _ in step.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return frozenset(found)


def evaluate(captured: Captured, names: list[str], *args: Any, **kwargs: Any) -> Any:
    """The captured graph in torch; constants are as they were at each call."""
    given = dict(zip(names, args, strict=False)) | kwargs
    flat = iter(tensors((args, kwargs)))
    env: dict[fx.Node, Any] = {}
    last = {n: node for node in captured.graph.nodes for n in node.all_input_nodes}  # its last reader

    def leaf(v: Any) -> Any:
        if isinstance(v, fx.Node):
            return env[v]
        return captured.model.get_submodule(v.path).training if isinstance(v, TrainingFlag) else v

    def value(v: Any) -> Any:
        return fx.node.map_aggregate(v, leaf)

    for node in captured.graph.nodes:
        name = str(node.target)
        if node.op == "placeholder":
            env[node] = next(flat) if "place" in node.meta else given[name] if name in given else node.args[0]
        elif node.op == "get_attr":
            constant = captured.constants.get(name)
            env[node] = operator.attrgetter(name)(captured.model) if constant is None else constant.clone()
        elif node.op == "output":
            return value(node.args[0])
        else:
            args, kwargs = value(node.args), value(node.kwargs)
            if is_record_class(node.target):
                env[node] = record_of(node.target, kwargs)  # type: ignore[arg-type]
            elif node.op == "call_module":
                layer = captured.model.get_submodule(name)
                rows = isinstance(layer, nn.RNNBase) and "lengths" in kwargs
                env[node] = run_rows(layer, *args, **kwargs) if rows else layer(*args, **kwargs)  # type: ignore[arg-type]
            elif node.op == "call_method":
                env[node] = getattr(args[0], name)(*args[1:], **kwargs)
            else:
                env[node] = node.target(*args, **kwargs)
            for n in node.all_input_nodes:
                if last[n] is node:
                    del env[n]
    raise AssertionError


def difference(ours: Any, theirs: Any, tolerance: float = 0.0) -> str:
    """What distinguishes two leaves of results, or nothing; `tolerance` in place of the dtype's where it is larger."""
    if not isinstance(theirs, torch.Tensor):
        if isinstance(ours, torch.Tensor):
            return "is a tensor instead of Python's value"
        return "" if ours == theirs or ours is theirs else f"is {ours!r} instead of {theirs!r}"
    if not isinstance(ours, torch.Tensor):
        return f"is {type(ours).__name__} instead of a tensor"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"is {text_of(ours)} instead of {text_of(theirs)}"
    if not theirs.numel():
        return ""
    if theirs.is_complex():
        return difference(torch.view_as_real(ours.resolve_conj()), torch.view_as_real(theirs.resolve_conj()), tolerance)
    if not theirs.is_floating_point():
        return "" if torch.equal(ours, theirs) else "has other values"
    a, b = ours.double(), theirs.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a[a.isinf()], b[b.isinf()]):
        return "has NaN or infinite values elsewhere"
    a, b = (torch.nan_to_num(t, 0, 0, 0) for t in (a, b))
    error, size = float((a - b).abs().max()), float(b.abs().max())
    near = error <= max(tolerance, TOLERANCE.get(theirs.dtype, HALF_TOLERANCE)) * size
    return "" if near else f"is off by {error:.2g}, values being up to {size:.2g}"


def text_of(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}"


def disagreement(ours: Behaviour, theirs: Behaviour) -> str:
    for i, (a, b) in enumerate(zip(ours.results, theirs.results, strict=True)):
        where = "on the example" if not i else "at another call, with other values or another batch"
        if len(a) != len(b):
            return f"it gives {len(a)} values instead of {len(b)} {where}"
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            if text := difference(x, y):
                why = ", and the forward turns on autocast, which capture does not see" if theirs.casting else ""
                return f"its output {k} {text} {where}{why}"
    if theirs.chancy:
        return "the forward draws Python's or numpy's random numbers, which capture would freeze"
    return own_gradients_of(theirs.hooks)


def own_gradients_of(names: set[str]) -> str:
    return (
        f"the forward has gradients of its own ({', '.join(sorted(names))}), which capture does not see"
        if names
        else ""
    )


def lost_gradients(ours: Behaviour, theirs: Behaviour, chooses: bool = False) -> str:
    """chooses: the graph computes branches that torch leaves out, whose parameters get zeros."""
    for k, (mine, their) in enumerate(zip(ours.reached, theirs.reached, strict=True)):
        if mine != their and not (chooses and mine > their):
            return f"output {k} passes gradients to {len(mine)} parameters instead of {len(their)}"
    return ""


class Flags(TorchFunctionMode):
    """Notes the training flags that functions are given, by the user's lines: torch.export keeps those of forwards alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[bool]] = {}

    def around(self, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
        overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
        named = [
            dict(zip((a.name for a in getattr(packet, o)._schema.arguments), args, strict=False)) for o in overloads
        ]
        for given in (kwargs, *named):
            for name in FLAGS:
                if isinstance(given.get(name), bool):
                    for line in user_lines():
                        self.found.setdefault(line, set()).add(given[name])
        return func(*args, **kwargs)


class Judge:
    """The model's own behaviour, run once for all captures of it."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model, self.call = model, call
        self.names = list(inspect.signature(model.forward).parameters)
        self.training: bool | None = None  # the mode in which to run, None for the present one
        self.pairs: dict[Any, tuple[list[Call], Behaviour]] = {}

    def theirs(self, calls: list[Call]) -> Behaviour:
        try:
            return behaviour(self.model, self.model, calls, self.training)
        except Unsupported:
            raise
        except Exception as e:
            raise Fails(first_line(e)) from None

    def fault(self, captured: Captured, sizes: Sequence[Sizes] | None = None) -> str:
        """How the graph differs from the model on the example and on a second call after it, of `sizes` that the model takes."""
        if sizes is None:
            batch = other_batch(self.call)
            sizes = [batch | half_images(self.call), batch]
        calls, theirs = self.pair(sizes)
        fault = self.against(captured, calls, theirs)
        return fault or (self.fault_of_memory(captured) if theirs.changing else "")

    def fault_of_memory(self, captured: Captured) -> str:
        """How the graph differs once the model has kept something of large inputs, which counts for inputs of their sizes."""
        calls = [self.call, shuffled(self.call, LARGER), self.call]
        try:
            theirs = self.theirs(calls)
        except Fails:
            calls, theirs = self.pair([])
        return self.against(captured, calls, theirs)

    def against(self, captured: Captured, calls: list[Call], theirs: Behaviour) -> str:
        run = functools.partial(evaluate, captured, self.names)
        if asks(captured.graph):
            calls = [c for i, c in enumerate(calls) if not i or self.holds(captured, c)]
            theirs = self.theirs(calls)
        try:
            ours = behaviour(run, captured.model, calls, self.training)
        except Exception as e:
            return f"it fails ({first_line(e)})"
        if text := disagreement(ours, theirs):
            return text
        if theirs.functions:
            compared = self.slopes_of(captured, calls)
            takes = [p.requires_grad for p in self.model.parameters()]
            if compared is None and any(takes):
                return f"{own_gradients_of(theirs.functions)}; for inference alone, convert model.requires_grad_(False)"
            if compared is None and not takes:  # nobody said that gradients are not wanted
                return own_gradients_of(theirs.functions)
            if not compared:
                captured.only = False
            note = (
                f"the gradients of {', '.join(sorted(theirs.functions))} are the derivatives of what they compute, "
                f"{'as compared' if compared else 'not theirs: no parameter takes any'}"
            )
            captured.notes += [note] if note not in captured.notes else []
        # What a model keeps between its calls in evaluation may have no gradients; they count in training.
        text = lost_gradients(ours, theirs, captured.chooses)
        return "" if text and self.trains_alike(captured) else text

    def slopes_of(self, captured: Captured, calls: list[Call]) -> bool | None:
        """Whether there are gradients; None where the graph's are not those that the model's own autograd functions give."""
        run = functools.partial(evaluate, captured, self.names)
        some = False
        try:
            for call in calls:
                ours, theirs = (slopes(f, self.model, call, self.training) for f in (run, self.model))
                some = some or bool(theirs)
                pairs = (zip(a, b, strict=True) for a, b in zip(ours, theirs, strict=True))
                if any(difference(a, b) for pair in pairs for a, b in pair):
                    return None
        except Exception:
            return None
        return some

    def holds(self, captured: Captured, call: Call) -> bool:
        """Whether a graph with guards stands for the model on these inputs."""
        try:
            behaviour(functools.partial(evaluate, captured, self.names), captured.model, [call], self.training)
        except OtherAnswer:
            return False
        except Exception:  # which the comparison shall tell
            pass
        return True

    def trains_alike(self, captured: Captured) -> bool:
        """Whether graph and model pass gradients to the same parameters in training."""
        calls = [resized(self.call, other_batch(self.call))]  # a batch norm takes no single image
        run = functools.partial(evaluate, captured, self.names)
        try:
            ours, theirs = (behaviour(f, self.model, calls, True) for f in (run, self.model))
        except Exception:
            return False
        return not lost_gradients(ours, theirs, captured.chooses)

    def refuse_example(self) -> None:
        """Raises BadExample where the model does not take the example."""
        try:
            self.pair([])
        except BadExample:
            raise
        except Unsupported:  # which the report says
            return

    def pair(self, sizes: Sequence[Sizes]) -> tuple[list[Call], Behaviour]:
        """The example and what the model takes after it: other sizes, else other values, else the example again."""
        key = tuple(tuple(sorted(s.items())) for s in sizes)
        if key in self.pairs:
            return self.pairs[key]
        others = [varied(resized(self.call, s)) for i, s in enumerate(sizes) if s and s not in sizes[:i]]
        for other in (*others, varied(self.call), [self.call]):
            calls = [self.call, *other]
            try:
                self.pairs[key] = calls, self.theirs(calls)
                return self.pairs[key]
            except Fails as e:
                failure = e
        if self.training is None and self.model.training:
            self.training = False  # such as a batch norm in training mode, which takes no single image
            return self.pair(sizes)
        raise BadExample(f"[convert] expects an example that the model takes: {failure}.")

    def fault_of_net(self, net: GraphModule, inputs: dict[str, Any] | None) -> str:
        """How the converted model differs from the model on the example; inputs: the example by name, where names are all."""
        theirs = next(iter(self.pairs.values()))[1]
        if theirs.drawing or ndl.default_device() != ndl.cpu() or any(m.training for m in net.modules()):
            return ""
        halves = (t.dtype in HALVES for t in (*self.model.parameters(), *self.model.buffers(), *tensors(self.call)))
        if any(halves) or any(isinstance(m, WriteBuffer) for m in net.modules()):
            return ""
        fault = net_fault(net, self.call, inputs, theirs.results[0])
        if fault and self.only_rounds(net, inputs, theirs.results[0]):
            net.report.note(f"{fault}, as torch's is off from float64, where both agree: rounding decides there")
            return ""
        return fault

    def only_rounds(self, net: GraphModule, inputs: dict[str, Any] | None, theirs: list[Any]) -> bool:
        """Whether net and model agree in float64 alone, off which the model's own results are, too: a tie, say, is broken."""
        try:
            twin, call = copy.deepcopy(self.model).double(), pytree.tree_map(doubled, self.call)
            exact = behaviour(twin, twin, [call], self.training).results[0]
            if not any(difference(doubled(a), b, ROUNDING) for a, b in zip(theirs, exact, strict=True)):
                return False
            precise = copy.deepcopy(net)
            precise.to("float64")
            return not net_fault(precise, call, pytree.tree_map(doubled, inputs), exact)
        except Exception:  # what does not run in float64 tells nothing
            return False

    def differs_in_training(self, captured: Captured) -> bool:
        """Whether the graph of a model in evaluation mode gives something else than the model in training mode."""
        run = functools.partial(evaluate, captured, self.names)
        for call in (self.call, resized(self.call, other_batch(self.call))):  # a batch norm takes no single image
            try:
                theirs, ours = (behaviour(f, self.model, [shuffled(call, SMALLER)], True) for f in (self.model, run))
                return bool(disagreement(ours, theirs) or lost_gradients(ours, theirs, captured.chooses))
            except Exception:
                continue
        return False

    @functools.cached_property
    def changing(self) -> set[str]:
        """Lines whose calls are given a training flag that is False in evaluation and True in training."""
        seen: list[dict[str, set[bool]]] = []
        for training in (False, True):
            flags = Flags()
            try:
                behaviour(flags.around(self.model), self.model, [resized(self.call, other_batch(self.call))], training)
            except Exception:
                return set()
            seen.append(flags.found)
        return {line for line, given in seen[0].items() if given == {False} and seen[1].get(line) == {True}}

    def agrees_at(self, captured: Captured, sizes: Sizes) -> bool:
        """Whether the graph gives what the model gives at these sizes; False, too, where the model refuses them."""
        calls = [resized(self.call, sizes)]
        try:
            theirs = self.theirs(calls)
        except Fails:
            return False
        return not self.against(captured, calls, theirs)


def doubled(t: Any) -> Any:
    return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


def net_fault(net: GraphModule, call: Call, inputs: dict[str, Any] | None, theirs: list[Any]) -> str:
    """How the net's results differ from the model's of a call; inputs: the call by name, where names are all."""
    args, kwargs = fresh(call) if inputs is None else ((), {n: inputs[n] for n in net.input_names if n in inputs})
    values = (ndl.Tensor, ndl.Complex)
    try:
        with ndl.no_grad():
            result = flat(plain_result(net(*args, **kwargs), leaves=(*values, *PLAIN)), *values)
    except Exception as e:
        return f"the converted model fails ({first_line(e)})"
    ours = [torch.from_numpy(np.array(t.numpy())) if isinstance(t, values) else t for t in result]
    wanted = [t.cpu() if isinstance(t, torch.Tensor) else t for t in theirs]
    if len(ours) != len(wanted):
        return f"the converted model gives {len(ours)} values instead of {len(wanted)}"
    for k, (a, b) in enumerate(zip(ours, wanted, strict=True)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
            near = (
                not (b.is_floating_point() or b.is_complex()) and float((a != b).double().mean()) < TIES
            )  # an argmax of what is almost equal
            a = b if near else a.to(b.dtype)
        if text := difference(a, b, NET_TOLERANCE):
            return f"the converted model's output {k} {text} on the example"
    return ""


def first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}".rstrip(": .")
