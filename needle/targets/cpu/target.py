"""The CPU as a target, and the layout of its images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from needle import _core
from needle.autograd import Spec
from needle.backend_ndarray import Device, NDArray, call
from needle.backend_ndarray.sizes import larger
from needle.executor.builder import Buffer, Builder
from needle.executor.constants import ConstantPool
from needle.executor.planner import Planner
from needle.executor.settings import Choice
from needle.executor.step import NO_HALO, Halo
from needle.executor.target import Layout
from needle.facts import cpu_name
from needle.graph import Graph, Node
from needle.op import Op
from needle.ops.common import Elementwise
from needle.ops.nn.conv import Conv2d, Conv2dWeightGrad
from needle.ops.nn.conv_nd import Conv3d, DepthwiseTaps
from needle.ops.nn.image_parts import (
    BatchNormGradApply,
    BatchNormGradSums,
    BatchNormMoments,
    ChannelSlice,
    ChannelSums,
)
from needle.ops.nn.pool_nd import PoolNd, over_frames
from needle.ops.nn.volumes import DepthTaps, FramesOfChannels
from needle.ops.shape.basic import Pad, Reshape, View
from needle.ops.shape.join import Concat
from needle.targets.images import follows, images, main_op, reads_images, starts
from needle.targets.layers import LayerTarget

from .planar import planar
from .resized import convolved_small

# Ops that have kernels for images in blocks alone.
IMAGE_PARTS = (BatchNormGradApply, BatchNormGradSums, BatchNormMoments, ChannelSums, DepthTaps)
STEMS = (Conv2d, Conv2dWeightGrad)  # what reads images of few channels in one narrow block
BLOCK = 16  # channels per block, columns per packed panel


def is_blocked(array: NDArray) -> bool:
    """True for a value in blocks of channels, (N, C / 16, H, W, 16)."""
    return bool(array._handle.native)


def joins_channels(op: Any, images: Sequence[Spec]) -> bool:
    return op.axis in (1, -3)


def keeps_channels(op: Any, images: Sequence[Spec]) -> bool:
    return not any(sum(map(abs, p)) for p in op.all_pads(images[0])[:2])


def same_channels(op: Any, images: Sequence[Spec]) -> bool:
    return all(x.shape[1] == images[0].shape[1] for x in images)


def same_or_one(op: Any, images: Sequence[Spec]) -> bool:
    channels = op.infer(*images).shape[1]
    return all(x.shape[1] == channels or tuple(x.shape[1:]) == (1, 1, 1) for x in images)


def whole_blocks(op: Any, images: Sequence[Spec]) -> bool:
    return op.infer(*images).shape[1] % BLOCK == 0


def any_channels(op: Any, images: Sequence[Spec]) -> bool:
    return True


def copy_channels(out: NDArray, start: int, x: NDArray, first: int, channels: int) -> None:
    """out's channels from `start` on are x's from `first` on, both in blocks; the last block's others become zeros."""
    (to, at), (source, place) = (
        (a[:, c // BLOCK : -(-(c + channels) // BLOCK)], c % BLOCK) for a, c in ((out, start), (x, first))
    )
    if not to.is_same_view(source):  # else its maker has written it in place
        call("copy_channels", [to], x=source, first=place, start=at, channels=channels)


ACCEPTS: dict[type[Op], Callable[[Any, Sequence[Spec]], bool]] = {
    ChannelSlice: any_channels,
    Concat: joins_channels,
    Elementwise: same_or_one,
    FramesOfChannels: whole_blocks,
    Pad: keeps_channels,
}


class Blocks(Layout):
    """nChw16c with a physical halo from the first convolution on; a concat's inputs are written straight into their slices."""

    kernels = ("to_blocked", "from_blocked", "zero_halo")

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner)
        self.slot: dict[Node, tuple[Node, int]] = {}  # home -> (concat, first channel)

    def wants(self, node: Node) -> bool:
        op, spec, args = node.target, node.meta["spec"], node.args
        if not (starts(op) or follows(op)) or not isinstance(spec, Spec) or spec.ndim != 4:
            return False
        if any(n.meta["spec"].dtype != "float32" for n in (node, *args)):
            return False
        if starts(op) or isinstance(op, BatchNormGradApply):
            return True
        native = [bool(self.planner.is_native.get(n)) and not self._is_flat(node, n) for n in args]
        if not any(native) or not (op.zero_is_safe or spec.shape[1] % BLOCK == 0):
            return False
        images = [n.meta["spec"] for i, n in enumerate(args) if not op.is_weight(i)]
        if (
            isinstance(op, Concat)
            and any(s.shape[1] % BLOCK for s in images)
            and not (all(native) and self._read_as_image(node))
        ):
            return False  # channels are copied anyway: let them not change their layout for that
        accepts = next((ACCEPTS[c] for c in type(op).__mro__ if c in ACCEPTS), same_channels)
        return all(s.ndim == 4 for s in images) and accepts(op, images)

    def place(self, node: Node) -> None:
        if isinstance(node.target, Concat):
            self._place_slices(node)
        elif self._shares(node) and node.args[0] in self.planner.home:
            plan = self.planner
            plan.group[node] = plan.group[plan.home[node.args[0]]]
            plan.group[node].add(node)

    def _is_window(self, node: Node) -> bool:
        """Whether what windows over the depth read lies side by side already: in one volume whose frames follow each other."""
        op, plan = node.target, self.planner
        if not isinstance(op, DepthTaps) or node.args[0].meta["spec"].shape[0] != op.depth:
            return False
        layers = all(u.kind == "op" and isinstance(main_op(u.target), Conv2d | DepthwiseTaps) for u in plan.users[node])
        return layers and plan.home.get(node.args[0]) not in self.slot

    def _shares(self, node: Node) -> bool:
        """Whether a value is a view of images that are made in blocks."""
        return self._is_window(node) or (isinstance(node.target, FramesOfChannels) and node not in self.slot)

    def _members(self, node: Node) -> set[Node]:
        """The values in the memory of a value as images, among them what windows over its depth read."""
        plan = self.planner
        found = plan.group.get(node, {node})
        return found | {u for m in found for u in plan.users[m] if self._is_window(u)}

    def ends(self, node: Node) -> tuple[int, int]:
        """Frames of zeros that windows over the depth read before and behind a volume."""
        frames, needed = node.meta["spec"].shape[0], [0, 0]
        for m in self._members(node):
            if self._is_window(m):  # its frames may be parts of these
                sides = (-(-p * frames // m.target.depth) for p in m.target.padding)
                needed = list(map(max, needed, sides))
        return needed[0], needed[1]

    def _place_slices(self, concat: Node) -> None:
        plan, offset = self.planner, 0
        for x in concat.args:
            home = plan.home.get(x)
            free = home not in self.slot and concat.args.count(x) == 1
            # A value may live in the slice only if all of its memory has the concat's height and width.
            aligned = x.meta["spec"].shape[1] % BLOCK == 0 and offset % BLOCK == 0
            if home is not None and free and aligned and plan.is_native.get(home):
                self.slot[home] = (concat, offset)
                merged = plan.group[home] | plan.group[concat]
                for m in merged:
                    plan.group[m] = merged
            offset += x.meta["spec"].shape[1]

    def reads(self, node: Node) -> list[bool]:
        """All images of a native node; those of a plain one that has a kernel for it, if one of them is native."""
        op, plan = node.target, self.planner
        native = plan.is_native.get(node) or isinstance(op, IMAGE_PARTS)
        specs = [a.meta["spec"] for a in node.args]
        if specs and reads_images(op, specs[0]):
            native = native or any(plan.is_native.get(a) for a in node.args)
        wanted = [bool(native) and s.ndim == 4 and not op.is_weight(i) for i, s in enumerate(specs)]
        return [w and not self._is_flat(node, a) for w, a in zip(wanted, node.args, strict=True)]

    def operands(self, node: Node, ins: list[NDArray]) -> list[NDArray]:
        return [x.viewed((*x.shape, 1)) if self._is_flat(node, a) else x for x, a in zip(ins, node.args, strict=True)]

    def _is_flat(self, node: Node, operand: Node) -> bool:
        """Whether all channels of a mapped image meet the one number that an operand has, which is read as a plain array."""
        if not isinstance(node.target, Elementwise):
            return False
        a, b = operand.meta["spec"], node.meta["spec"]
        return a.ndim == b.ndim == 4 and a.shape[1] == 1 != b.shape[1]

    def around(self, node: Node, index: int) -> Halo:
        op = main_op(node.target)
        if index > 0 or type(op) not in HALOS:
            return NO_HALO
        return HALOS[type(op)](op, node.meta["spec"], *(a.meta["spec"] for a in node.args[:2]))

    def halo(self, node: Node) -> Halo:
        """The zero ring that the readers of a value, and of everything that shares its memory, need around it."""
        plan, halo = self.planner, NO_HALO
        for member in self._members(node):
            for user in plan.users[member]:
                if user.kind == "op":
                    for i, (x, read) in enumerate(zip(user.args, self.reads(user), strict=True)):
                        if x is member and read:
                            halo = tuple(map(larger, halo, self.around(user, i)))  # type: ignore[assignment]
        return halo

    def allocate(self, node: Node) -> NDArray:
        """Its slice of a concat, or a buffer of its own with the halo zeroed."""
        plan = self.planner
        if node not in plan.native:
            spec = node.meta["spec"]
            if node in self.slot:
                concat, channel = self.slot[node]
                whole = self.allocate(plan.home[concat])
                return whole[:, channel // BLOCK : (channel + spec.shape[1]) // BLOCK]
            if self._shares(node):
                plan.native[node] = shared(node.target, spec.shape, plan.native[node.args[0]])
            else:
                plan.native[node] = self.memory(spec.shape, self.halo(node), ends=self.ends(node))
        return plan.native[node]

    def memory(
        self, shape: Sequence[int], halo: Halo = NO_HALO, block: int = BLOCK, ends: tuple[int, int] = (0, 0)
    ) -> NDArray:
        """New memory for a (N, C, H, W) value as (N, C / block, H, W, block) inside a ring of zeros, between images of zeros."""
        n, c, h, w = shape
        top, left, bottom, right = halo
        blocks, rows, row = -(-c // block), h + top + bottom, (w + left + right) * block
        strides = (blocks * rows * row, rows * row, row, block, 1)
        handle: Any = self.planner.builder.buffer((n + sum(ends)) * strides[0] * 4)
        handle.native = True
        first = ends[0] * strides[0]
        out = NDArray.make((n, blocks, h, w, block), strides, handle=handle, offset=first + top * row + left * block)
        self.zero(out, halo)
        for count, offset in zip(ends, (0, first + n * strides[0]), strict=True):
            if count:
                call("fill", [NDArray.make((count * strides[0],), (1,), handle=handle, offset=offset)], value=0)
        return out

    def zero(self, out: NDArray, halo: Halo) -> None:
        if any(halo):
            top, left, bottom, right = halo
            call("zero_halo", [out], top=top, bottom=bottom, left=left, right=right)

    def enter(self, node: Node) -> NDArray:
        spec = node.meta["spec"]
        block = spec.shape[1] if self._stem(node) else BLOCK
        return self.memory(spec.shape, self.halo(node), block, self.ends(node))

    def constant(self, node: Node, plain: NDArray) -> NDArray | None:
        if any(self.halo(node)) or any(self.ends(node)) or self._stem(node):
            return None
        made = self.planner.builder.derive("in_blocks", in_blocks, plain)
        made._handle.native = True
        return made

    def load(self, out: NDArray, plain: NDArray) -> None:
        call("to_blocked", [out], x=plain)

    def leave(self, node: Node) -> NDArray:
        n, c, h, w = node.meta["spec"].shape
        rows = NDArray.make((n, h, w, c), handle=Buffer(0)).permute((0, 3, 1, 2))
        with Builder(ConstantPool(), self.planner.builder.device).active():
            read = list(self._found(node, rows))
        return NDArray.empty((n, h, w, c)).permute((0, 3, 1, 2)) if read and all(read) else super().leave(node)

    def _found(self, node: Node, x: NDArray) -> Iterator[bool]:
        """For everything that reads a value as a plain array, through views of it: whether x lies there without gaps."""
        for user in self.planner.users[node]:
            if user.kind != "op":
                yield x.is_compact()
            elif not any(r for a, r in zip(user.args, self.reads(user), strict=True) if a is node):
                seen = user.target.compute(x) if isinstance(user.target, View) else x
                if seen is x or seen._handle is not x._handle:  # else copied
                    yield x.is_compact()
                else:
                    yield from self._found(user, seen)

    def store(self, out: NDArray, native: NDArray) -> None:
        call("from_blocked", [out], x=native)

    def _read_as_image(self, node: Node) -> bool:
        return any(u.kind == "op" and (starts(u.target) or follows(u.target)) for u in self.planner.users[node])

    def _stem(self, node: Node) -> bool:
        """Few channels and read as a convolution's image only: one narrow block instead of zero-padded channels."""
        readers = [u for u in self.planner.users[node] if u.kind == "op" and any(self.reads(u))]
        return node.meta["spec"].shape[1] < BLOCK and all(
            node not in u.args[1:] and isinstance(conv := main_op(u.target), STEMS) and conv.groups == 1  # type: ignore[attr-defined]
            for u in readers
        )


def as_frames(op: Conv3d, x: Spec, w: Spec) -> Callable[..., Any] | None:
    """A convolution of volumes as one of frames, where their blocks of channels are not filled with zeros for the most part."""
    channels = x.shape[1]
    whole = channels + -channels % BLOCK
    alone = op.groups == channels == w.shape[0]
    blocked = op.dilation[0] == 1 and (alone or (op.groups == 1 and 3 * whole <= 4 * channels))
    if x.dtype != "float32" or not (blocked or w.shape[2] == 1 or op.groups == op.dilation[0] == 1):
        return None
    return functools.partial(op.over_frames, block=BLOCK if blocked else 1)


def shared(op: DepthTaps | FramesOfChannels, shape: Sequence[int], x: NDArray) -> NDArray:
    """The result as a view of images in blocks. Channels of neighbouring frames follow each other: a window over the depth reads
    those of all its frames as one image's, and channels of one image may be those of several frames.
    """
    image, block, row, pixel, _ = x.strides
    if isinstance(op, DepthTaps):
        blocks, step, first = op.taps * x.shape[1], op.stride * image, op.padding[0] * image
    else:
        blocks, step, first = x.shape[1] // op.parts, image // op.parts, 0
    made, strides = (shape[0], blocks, *x.shape[2:]), (step, block, row, pixel, 1)
    return NDArray.make(made, strides, handle=x._handle, offset=x._offset - first)


def with_four_axes(graph: Graph) -> Graph:
    """The graph in which what maps images to images reads other operands in four axes, too: factors (C, 1, 1), numbers."""
    found = images(graph)

    def replace(node: Node, new: Graph, done: dict[Node, Node]) -> Node | None:
        if node not in found or not isinstance(node.target, Elementwise) or node.meta["spec"].ndim != 4:
            return None
        args = []
        for a in node.args:
            spec, x = a.meta["spec"], done[a]
            if spec.ndim < 4:
                shape = (*(1,) * (4 - spec.ndim), *spec.shape)
                x = new.add("op", Reshape(shape), (x,), f"{node.name}_operand")
                x.meta["spec"] = Spec(shape, spec.dtype)
            args.append(x)
        made = new.add("op", node.target, tuple(args), node.name)
        made.meta = dict(node.meta)
        return made

    return graph.copy(replace) if found else graph


def in_blocks(x: NDArray) -> NDArray:
    """An array (N, C, H, W) in blocks without a halo."""
    n, c, h, w = x.shape
    out = NDArray.empty((n, -(-c // BLOCK), h, w, BLOCK))
    call("to_blocked", [out], x=x)
    return out


class CpuTarget(LayerTarget):
    layout = Blocks
    numpy = True
    complete = ("float32",)
    guard_zone = _core.GUARD_BYTES
    traces_sizes = True

    def folds(self, op: Op) -> bool:
        return isinstance(op, IMAGE_PARTS) or super().folds(op)

    def can_fold(self, op: Any, inputs: Sequence[Any], constant: Collection[int], disable: Collection[str]) -> bool:
        """Parts of ops on images have kernels for images in blocks alone."""
        if not isinstance(op, IMAGE_PARTS):
            return super().can_fold(op, inputs, constant, disable)
        whole = isinstance(op, DepthTaps) and (op.block == BLOCK or inputs[0].shape[1] % BLOCK == 0)
        if isinstance(op, DepthTaps) and not (whole and op.groups == op.dilation == 1):
            return False
        return inputs[0].ndim == 4 and all(s.dtype == "float32" for s in inputs)

    def splits(self, graph: Graph) -> dict[Node, Callable[..., Any]]:
        found, parts = images(graph), {}
        for n in graph:
            if n.kind == "op" and type(n.target) in PARTS and n.args[0] in found:
                spec = n.args[0].meta["spec"]
                if spec.ndim == 4 and spec.dtype == "float32" and (made := PARTS[type(n.target)](n.target, spec)):
                    parts[n] = made
            elif n.kind == "op" and isinstance(n.target, Conv3d):
                if made := as_frames(n.target, *(a.meta["spec"] for a in n.args[:2])):
                    parts[n] = made
            elif (
                n.kind == "op"
                and isinstance(n.target, PoolNd)
                and hasattr(n.target, "by_axis")
                and n.meta["spec"].ndim == 5
            ):
                parts[n] = functools.partial(over_frames, *n.target.by_axis())
        return parts

    def arranged(self, graph: Graph) -> Graph:
        return with_four_axes(planar(super().arranged(convolved_small(graph))))

    def check(self, choice: Choice, device: Device) -> None:
        super().check(choice, device)
        if choice.precision != "float32":
            raise ValueError(f"[compile] precision expects float32 on {device}, got {choice.precision!r}.")

    def machine(self, device: Device) -> list[Any]:
        """The CPU, the instruction set and the number of threads."""
        return [cpu_name(), _core.isa(), _core.num_threads()]


CPU = CpuTarget("cpu")
# op -> f(op, first input): the function of its inputs by which images in blocks are planned, or None
PARTS: dict[type[Op], Callable[[Any, Spec], Callable[..., Any] | None]] = {}
# op -> zero rows and columns that it reads around its image: f(op, out, x, weight)
HALOS: dict[type[Op], Callable[[Any, Spec, Spec, Spec], Halo]] = {}
