"""Whether a captured graph computes what its model computes: torch runs both, on the example and on inputs unlike it."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import needle as ndl
from needle.autograd import Unsupported
from needle.graph import GraphModule
from needle.nn import WriteBuffer

from .asked import OtherAnswer, noting
from .behaviour import Behaviour, behaviour, evaluate, first_line
from .calls import (
    LARGER,
    Call,
    Sizes,
    half_images,
    longer_texts,
    other_batch,
    other_sizes,
    resized,
    shuffled,
    tensors,
    varied,
)
from .counts import drop, supposed, trained
from .differences import (
    ROUNDING,
    difference,
    disagreement,
    doubled,
    error_free,
    error_of,
    lost_gradients,
    net_fault,
    own_gradients_of,
)
from .modes import Run, changing, differs_in_training, in_training, trains_alike
from .slopes import same_slopes
from .tracing import Captured

HALVES = (torch.float16, torch.bfloat16)

UNREGISTERED = "parameters that model.parameters() does not have, as of layers in a plain list, are constants"


class BadExample(Unsupported):
    """The model refuses the example that was given."""


class Fails(Exception):
    """The model itself raises an error."""


class Judge:
    """The model's own behaviour, run once for all captures of it."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model, self.call = model, call
        self.names = list(inspect.signature(model.forward).parameters)
        self.training: bool | None = None  # the mode in which to run, None for the present one
        self.pairs: dict[Any, tuple[list[Call], Behaviour]] = {}
        self.runs = in_training(model, call)

    def run(self, captured: Captured) -> Callable:
        return functools.partial(evaluate, captured, self.names)

    def theirs(self, calls: list[Call]) -> Behaviour:
        try:
            return behaviour(self.model, self.model, calls, self.training)
        except Unsupported:
            raise
        except Exception as e:
            raise Fails(first_line(e)) from None

    @functools.cached_property
    def others(self) -> list[Sizes]:
        """Sizes of a second call, the better ones first: another batch with half the images and longer texts, or alone."""
        batch, half, longer = other_batch(self.call), half_images(self.call), longer_texts(self.call)
        found = [longer | batch | half, batch | half, batch]
        return [s for i, s in enumerate(found) if s not in found[:i]]

    def fault(self, captured: Captured, sizes: Sequence[Sizes] | None = None) -> str:
        """How the graph differs from the model on the example and on a second call after it, of `sizes` that the model takes."""
        calls, theirs = self.pair(self.others if sizes is None else sizes)
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
        run = self.run(captured)
        try:
            try:
                ours = behaviour(run, captured.model, calls, self.training)
            except OtherAnswer:
                calls = [c for i, c in enumerate(calls) if not i or self.holds(captured, c)]
                theirs = self.theirs(calls)
                ours = behaviour(run, captured.model, calls, self.training)
        except OtherAnswer as e:  # which was asked of a buffer that the call before wrote
            return f"it asks `{e}`, which the model answers otherwise at its next call; compute with the tensor instead"
        except Exception as e:
            return f"it fails ({first_line(e)})"
        if text := disagreement(ours, theirs):
            return text
        if theirs.functions:
            compared = same_slopes(run, self.model, calls, self.training)
            takes = [p.requires_grad for p in self.model.parameters()]
            if compared is None and any(takes):
                return f"{own_gradients_of(theirs.functions)}; for inference alone, convert model.requires_grad_(False)"
            if compared is None and not takes:  # nobody said that gradients are not wanted
                return own_gradients_of(theirs.functions)
            if not compared:
                captured.only = False
            names = f"the gradients of {', '.join(sorted(theirs.functions))} are"
            note = (
                f"{names} the model's, as compared"
                if compared
                else f"{names} the derivatives of what they compute, not theirs: no parameter takes any"
            )
            captured.notes += [note] if note not in captured.notes else []
        if theirs.unregistered and UNREGISTERED not in captured.notes:
            captured.notes.append(UNREGISTERED)
        # What a model keeps between its calls in evaluation may have no gradients; they count in training.
        text = lost_gradients(ours, theirs, captured.chooses)
        return "" if text and trains_alike(run, self.model, self.call, captured.chooses) else text

    def relax(self, captured: Captured, sizes: Sequence[Sizes]) -> None:
        """Drops checks of whether values count any rows, where graph and model were seen to agree though they do not."""
        lines = frozenset(supposed(captured.graph).values())
        if not lines:
            return
        agreeing, other = set[str](), set[str]()
        few = (self.call, resized(self.call, other_batch(self.call)), *(resized(self.call, s) for s in sizes))
        for call in [c for given in few for c in (given, *varied(given))]:
            try:
                with trained(self.model), noting(lines) as found:
                    theirs = self.theirs([call])
                    ours = behaviour(self.run(captured), captured.model, [call], self.training)
            except Exception:  # which is no call to compare
                continue
            same = not disagreement(ours, theirs) and all(map(error_free, ours.results[0], theirs.results[0]))
            (agreeing if same else other).update(found.seen)
        if needless := agreeing - other:
            drop(captured.graph, needless)
            captured.chooses = True
            captured.notes += [f"whether `{line}` is left out, since it gives the same" for line in sorted(needless)]

    def holds(self, captured: Captured, call: Call) -> bool:
        """Whether a graph with guards stands for the model on these inputs."""
        try:
            behaviour(self.run(captured), captured.model, [call], self.training)
        except OtherAnswer:
            return False
        except Exception:  # which the comparison shall tell
            pass
        return True

    def takes_more(self, captured: Captured) -> bool:
        """Whether the model takes sizes that a graph does not."""

        def runs(function: Callable, call: Call) -> bool:
            try:
                behaviour(function, self.model, [call], self.training)
            except Exception:
                return False
            return True

        calls = (resized(self.call, s) for s in other_sizes(self.call))
        return any(not runs(self.run(captured), c) and runs(self.model, c) for c in calls)

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
        if any(halves) or any(type(m) is WriteBuffer for m in net.modules()):
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
            least = [error_of(a, b) for a, b in zip(theirs, exact, strict=True)]  # of what should be 0, say
            return not net_fault(precise, call, pytree.tree_map(doubled, inputs), exact, least)
        except Exception:  # what does not run in float64 tells nothing
            return False

    @property
    def functions(self) -> set[str]:
        """The user's autograd functions that the model was seen to apply."""
        return set().union(*(b.functions for _, b in self.pairs.values()))

    @property
    def asks_whether_compiled(self) -> bool:
        """Whether the model was seen to ask torch for that."""
        self.refuse_example()
        return any(b.asking for _, b in self.pairs.values())

    def differs_in_training(self, captured: Captured) -> bool:
        """Whether the graph of a model in evaluation mode gives something else than the model in training mode."""
        return differs_in_training(self.run(captured), self.model, self.trained(), captured.chooses)

    def trained(self) -> Iterator[Run]:
        """The model's runs in training mode, each made once and when it is asked for."""
        self.runs, found = itertools.tee(self.runs)
        return found

    @functools.cached_property
    def changing(self) -> dict[tuple[str, str], list[Any]]:
        """Flags that change with the mode, by line and name."""
        return changing(self.model, next(self.trained(), None))

    def agrees_at(self, captured: Captured, sizes: Sizes) -> bool:
        """Whether the graph gives what the model gives at these sizes; False, too, where the model refuses them."""
        calls = [resized(self.call, sizes)]
        try:
            theirs = self.theirs(calls)
        except Fails:
            return False
        return not self.against(captured, calls, theirs)
