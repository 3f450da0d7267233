"""A layer, what is added to its result, and the activation of the sums, as one step: rules over the plans of any target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from needle.backend_ndarray import NDArray
from needle.executor.rewriting import next_to_each_other, same_elements
from needle.executor.step import Step
from needle.graph import Node
from needle.graph.engine import Condition, Fusion, Rules
from needle.graph.matcher import Match
from needle.graph.steps import Step as GraphStep
from needle.graph.steps import Steps
from needle.ops.math.activation import ACTIVATIONS, activation_code


def two(match: Match) -> tuple[Step, Step]:
    first, second = (n.target for n in match.nodes[:2])
    return first, second


def added(match: Match) -> NDArray:
    """What a sum adds to the layer before it."""
    layer, total = two(match)
    x, y = total.inputs["x"], total.inputs["y"]
    return y if same_elements(x, layer.outs[0]) else x


def ends_in_sums(match: Match) -> str | None:
    layer, _ = two(match)
    plain = "residual" not in layer.inputs and layer.attrs["activation"] == activation_code("none")
    return None if plain else f"{layer.label} is finished already"


def has_room(match: Match) -> str | None:
    """Sums are finished tile by tile: what others are made from may not be where they go."""
    layer, last = match.nodes[0].target, match.root.target
    if any(a._handle is last.outs[0]._handle for a in layer.ins):
        return f"{last.label} goes where {layer.label} reads"
    return None


@dataclasses.dataclass(frozen=True)
class FinishPattern:
    """A layer, what is added to its result, and the activation of the sums: one of the two, or both."""

    layers: tuple[str, ...]  # their kernels
    add: bool
    activation: bool

    def __len__(self) -> int:
        return 1 + self.add + self.activation

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        found: dict[str, GraphStep] = {}
        last = steps.get(root)
        if self.activation:
            if last is None or last.op not in ACTIVATIONS:
                return
            found["activation"], last = last, steps.get(last.inputs[0])
        sources = [] if last is None else [last.node]
        if self.add:
            if last is None or last.op != "add":
                return
            found["add"], sources = last, list(last.inputs)
        for source in sources:
            if source in steps and steps[source].op in self.layers:
                yield Match({"layer": steps[source], **dict(reversed(found.items()))})


@dataclasses.dataclass(frozen=True)
class Finishes:
    """What a target's kernels finish.

    finished: kernels that add a residual and end in an activation; activated: those that only do the latter. as_result: an array
    in the shape of a layer's result, if the layer's kernel can read and write it in place of its own.
    """

    finished: tuple[str, ...]
    activated: tuple[str, ...]
    as_result: Callable[[NDArray, Step], NDArray | None]
    conditions: tuple[Condition, ...] = ()

    def adds_one_of_its_shape(self, match: Match) -> str | None:
        layer, total = two(match)
        if same_elements(total.inputs["x"], total.inputs["y"]):
            return f"{total.label} reads {layer.label} twice"
        if any(self.as_result(x, layer) is None for x in (added(match), total.outs[0])):
            return f"{total.label} adds an array of another shape or order"
        return None

    def ends_in_its_shape(self, match: Match) -> str | None:
        layer, last = match.nodes[0].target, match.root.target
        return f"{last.label} changes the order" if self.as_result(last.outs[0], layer) is None else None

    def with_finish(self, match: Match) -> Step:
        layer, last = match.nodes[0].target, match.root.target
        inputs, attrs = layer.inputs, layer.attrs
        if "add" in match:
            inputs = inputs | {"residual": self.as_result(added(match), layer)}
        if "activation" in match:
            attrs = attrs | {"activation": activation_code(last.kernel), "alpha": last.attrs.get("alpha", 0.0)}
        return layer._replace(outs=[self.as_result(last.outs[0], layer)], inputs=inputs, attrs=attrs)

    def register(self, rules: Rules) -> None:
        forms = (
            ("LayerAddActivation", True, True, (self.adds_one_of_its_shape, self.ends_in_its_shape)),
            ("LayerAdd", True, False, (self.adds_one_of_its_shape,)),
            ("LayerActivation", False, True, (self.ends_in_its_shape,)),
        )
        for name, add, activation, conditions in forms:
            layers = self.finished if add else (*self.finished, *self.activated)
            rules.register(
                Fusion(
                    name,
                    FinishPattern(layers, add, activation),
                    self.with_finish,
                    (next_to_each_other, ends_in_sums, *conditions, has_room, *self.conditions),
                    family="LayerFinish",
                    why="sums are finished while they are in registers",
                )
            )
