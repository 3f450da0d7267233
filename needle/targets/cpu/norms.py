"""Norms of rows behind the product that makes them: a block of rows is normalised while it lies in a cache. Norms of channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from needle.backend_ndarray import NDArray, call
from needle.executor.builder import Builder
from needle.executor.rewriting import PlanSteps, next_to_each_other
from needle.executor.step import Step
from needle.graph import Node
from needle.graph.engine import Fusion
from needle.graph.matcher import Match, Pattern
from needle.graph.steps import Steps
from needle.op import Op
from needle.ops.nn.image_parts import FIRST, LAST, PixelNorm, VolumeNorm
from needle.ops.nn.layer_norm import GroupNorm, LayerNorm
from needle.ops.nn.volumes import FramesOfVolume, VolumeOfFrames
from needle.ops.shape.basic import Permute
from needle.targets.finishes import added, ends_in_sums
from needle.targets.images import images

from .convolution import padded_bias
from .pairs import FINISHES, as_rows
from .target import CPU, is_blocked


class NormMatch(Match):
    """A product, what is added to it, if anything, and the norm of the sums, which others may read, too."""

    closed = True

    @property
    def outputs(self) -> list[Node]:
        return self.nodes[-2:]


class NormPattern:
    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def __len__(self) -> int:
        return 3

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        norm = steps.get(root)
        if not isinstance(steps, PlanSteps) or norm is None or norm.op != self.kernel:
            return
        last = steps.get(norm.inputs[0])
        if last is not None and last.op == "add":
            for source in last.inputs:
                if source in steps and steps[source].op == "matmul_packed":
                    yield NormMatch({"product": steps[source], "add": last, "norm": norm})
        elif last is not None and last.op == "matmul_packed":
            yield NormMatch({"product": last, "norm": norm})


def parts(match: Match) -> tuple[Step, Step, Step]:
    """The product, what makes the sums, and their norm."""
    first, *_, last = targets = [n.target for n in match.nodes]
    return first, targets[-2], last


def adds_rows(match: Match) -> str | None:
    return FINISHES.adds_one_of_its_shape(match) if "add" in match else None


def normalises_its_rows(match: Match) -> str | None:
    product, _, norm = parts(match)
    same = norm.inputs["x"].shape == product.outs[0].shape and as_rows(norm.outs[0], product) is not None
    return None if same else f"{norm.label} normalises other rows than {product.label} makes"


def gives_no_statistics(match: Match) -> str | None:
    plan, (*_, norm) = match.root.meta["plan"], parts(match)
    return f"the statistics of {norm.label} are read" if any(plan.read_by[plan.order[match.root]][1:]) else None


def has_room_for_both(match: Match) -> str | None:
    """Rows are finished one block after the other: what others are made from may not be where they go."""
    product, sums, norm = parts(match)
    read = [a._handle for a in product.ins]
    blocked = any(out._handle is h for out in (sums.outs[0], norm.outs[0]) for h in read)
    if blocked or ("add" in match and added(match)._handle is norm.outs[0]._handle):
        return f"{norm.label} goes where {product.label} reads"
    return None


def with_norm(match: Match) -> Step:
    product, sums, norm = parts(match)
    plan, rms = match.root.meta["plan"], norm.kernel == "rms_norm"
    out: Any = as_rows(norm.outs[0], product)
    needed = any(j != plan.order[match.root] for j in plan.read_by[plan.order[match.nodes[-2]]][0])
    kept: Any = as_rows(sums.outs[0], product) if needed else out
    inputs = product.inputs | {
        name: norm.inputs[given] for name, given in (("weight", "weight"), ("shift", "bias")) if given in norm.inputs
    }
    if "add" in match:
        inputs["residual"] = as_rows(added(match), product)  # type: ignore[assignment]
    return Step("matmul_norm", [kept, out], inputs, {"eps": norm.attrs["eps"], "rms": float(rms)}, "")


for name, kernel in (("LinearLayerNorm", "layer_norm"), ("LinearRMSNorm", "rms_norm")):
    CPU.rules.register(
        Fusion(
            name,
            NormPattern(kernel),
            with_norm,
            (
                next_to_each_other,
                ends_in_sums,
                adds_rows,
                normalises_its_rows,
                gives_no_statistics,
                has_room_for_both,
            ),
            family="LinearNorm",
            why="the task that writes the last sums of some rows normalises them while they lie in a cache",
        )
    )


def permutes(op: Permute, order: tuple[int, ...]) -> bool:
    return op.axes is not None and tuple(a % 4 for a in op.axes) == order


class PixelNormPattern:
    """A layer norm of the channels of an image, between the two permutations that it needs as a norm of rows."""

    chain = Pattern.op("forth", Permute).then("norm", LayerNorm).then("back", Permute)

    def __len__(self) -> int:
        return len(self.chain)

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        for match in self.chain.matches(root, steps):
            forth, norm, back = match.steps.values()
            of_channels = norm.op.axes == 1 and permutes(forth.op, LAST) and permutes(back.op, FIRST)
            if of_channels and root.meta["spec"].dtype == "float32" and forth.inputs[0] in images(steps.graph):
                yield match


def as_pixel_norm(match: Match) -> tuple[Op, list[Node]]:
    norm = match["norm"]
    return PixelNorm(norm.op.eps, norm.op.has_weight, norm.op.has_bias), [*match["forth"].inputs, *norm.inputs[1:]]


CPU.rules.register(
    Fusion(
        "PixelNorm",
        PixelNormPattern(),
        as_pixel_norm,
        why="the channels of a pixel lie in blocks, from which they need not be taken to be normalised",
        suffix="",
    )
)


@CPU.lowers(PixelNorm)
def pixel_norm(builder: Builder, op: PixelNorm, ins: list[NDArray], out: NDArray) -> None:
    if not is_blocked(out):
        op.into(out, *ins)
        return
    x, *values = op.split(ins)
    weight, bias = (padded_bias(builder, v) for v in values)
    call("layer_norm_blocked", [out], x=x, weight=weight, bias=bias, channels=builder.given[0].shape[1], eps=op.eps)


@CPU.lowers(GroupNorm)
def group_norm(builder: Builder, op: GroupNorm, ins: list[NDArray], out: NDArray, images: int = 1) -> None:
    """images: of which a sample consists, where they are in blocks."""
    if not is_blocked(out):
        op.into(out, *ins)
        return
    x, *values = op.split(ins)
    weight, bias = (padded_bias(builder, v) for v in values)
    channels = builder.given[0].shape[1]
    named = {"images": images, "channels": channels, "groups": channels if op.groups is None else op.groups}
    call("group_norm_blocked", [out], x=x, weight=weight, bias=bias, **named, eps=op.eps, activation=0, alpha=0)


@CPU.lowers(VolumeNorm)
def volume_norm(builder: Builder, op: VolumeNorm, ins: list[NDArray], out: NDArray) -> None:
    if is_blocked(out):
        group_norm(builder, op.norm, ins, out, op.depth)
        return
    made = op.norm.compute(VolumeOfFrames(op.depth).compute(ins[0]), *ins[1:])
    call("copy", [out], x=FramesOfVolume().compute(made))
