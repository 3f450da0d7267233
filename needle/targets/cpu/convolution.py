"""Convolutions on images in blocks of 16 channels with zero halos, weights packed once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from needle.autograd import Spec
from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray.kernels import unplanned
from needle.backend_ndarray.sizes import larger
from needle.executor.builder import Builder
from needle.executor.step import Halo
from needle.ops.nn.conv import Conv2d, ConvTranspose2d
from needle.ops.nn.conv_nd import DepthwiseTaps
from needle.ops.nn.spatial import window_attributes
from needle.targets.layers import NOTHING, Finish, operands

from . import winograd
from .algorithms import DIRECT, choose
from .machine import REFERENCES, Runs, numbers
from .target import BLOCK, CPU, HALOS, is_blocked


class Grouping(NamedTuple):
    """Groups of a convolution with the input and output channels of each, and how many channels a block of its input has."""

    groups: int
    inputs: int
    outputs: int
    block: int

    @property
    def attributes(self) -> dict[str, float]:
        return {"groups": self.groups, "inputs": self.inputs, "outputs": self.outputs}


class Row(NamedTuple):
    """How the taps of a kernel's row lie among pixels."""

    kernel_w: int
    stride_w: int = 1
    dilation_w: int = 1


def pack(kernel: str, grouping: Grouping, row: Row, attrs: dict[str, float], w: NDArray) -> NDArray:
    """Weights packed by `kernel` in the form that the kernels choose."""
    taps = w.shape[2] * w.shape[3]
    panels, joined, terms, lanes = packed_sizes(grouping, row, taps)
    out = NDArray.empty((panels, taps // joined, terms, lanes))
    call(kernel, [out], weight=w, groups=grouping.groups, block=grouping.block, **attrs)
    return out


@functools.lru_cache
def packed_sizes(grouping: Grouping, row: Row, taps: int) -> tuple[int, int, int, int]:
    with unplanned():
        out = NDArray.empty((4,), "int64")
        call("conv2d_panels", [out], block=grouping.block, taps=taps, **grouping.attributes, **row._asdict())
        panels, joined, terms, lanes = map(int, out.numpy())
    return panels, joined, terms, lanes


def pack_depthwise(w: NDArray) -> NDArray:
    out = NDArray.empty((-(-w.shape[0] // BLOCK), w.shape[2] * w.shape[3], BLOCK))
    call("depthwise_pack", [out], weight=w)
    return out


def pad_vector(v: NDArray) -> NDArray:
    """A bias of any shape as a vector with zeros up to a full block."""
    flat = v.reshape((-1,))
    return flat.pad([(0, -flat.shape[0] % BLOCK)])


def padded_bias(builder: Builder, bias: NDArray | None) -> NDArray | None:
    return None if bias is None else builder.derive("pad_vector", pad_vector, bias)


def taps_inside(op: Any, out: Sequence[int], x: Sequence[int], w: Sequence[int]) -> tuple[slice, slice]:
    """The rows and the columns of a convolution's kernel from the first to the last that meets a pixel in any window.

    The others multiply padding only, as those around the middle of a 3 x 3 kernel do on images of one pixel. Plain kernels find
    theirs in each call (`cut_taps` of csrc/cpu/conv.h); a plan has to know them to pack.
    """
    found = []
    for d in (0, 1):
        step, before = op.stride[d], op.padding[d]
        met = []
        for tap in range(w[2 + d]):
            start = tap * op.dilation[d] - before  # where the first window has it
            window = max(0, -(start // step))  # the first that has it at a pixel or behind
            if window < out[2 + d] and start + window * step < x[2 + d]:
                met.append(tap)
        found.append(slice(met[0], met[-1] + 1) if met else slice(0, w[2 + d]))
    return found[0], found[1]


def kept(w: NDArray, taps: tuple[slice, slice]) -> NDArray:
    return w[(slice(None), slice(None), *taps)]


def with_taps(op: Any, taps: tuple[slice, slice]) -> Any:
    """The op for a kernel of these taps alone."""
    starts = [t.start * d for t, d in zip(taps, op.dilation, strict=True)]
    top, left = (p - start for p, start in zip(op.padding[:2], starts, strict=True))
    return dataclasses.replace(op, padding=(top, left, *op.padding[2:])) if any(starts) else op


def conv_halo(op: Any, out: Spec, x: Spec, w: Spec) -> Halo:
    """Zero rows and columns that a convolution reads around its input."""
    before, after = [], []
    for d, taps in enumerate(taps_inside(op, out.shape, x.shape, w.shape)):
        reach = (out.shape[2 + d] - 1) * op.stride[d] + (taps.stop - 1) * op.dilation[d]
        before.append(larger(0, op.padding[d] - taps.start * op.dilation[d]))
        after.append(larger(0, reach - op.padding[d] - (x.shape[2 + d] - 1)))
    return (before[0], before[1], after[0], after[1])


def as_it_is(w: NDArray) -> NDArray:
    return w


def flipped(w: NDArray) -> NDArray:
    """The weights of a transposed depthwise convolution of stride 1 as those of the convolution that it is."""
    return w.flip((2, 3))


def turned(w: NDArray) -> NDArray:
    """`flipped` for one that sums over all channels."""
    return flipped(w.permute((1, 0, 2, 3)))


@CPU.lowers(Conv2d)
def conv(
    builder: Builder,
    op: Conv2d,
    ins: list[NDArray],
    out: NDArray,
    finish: Finish = NOTHING,
    view: Callable[[NDArray], NDArray] = as_it_is,
) -> None:
    """out = activation(conv(x, view(w)) + bias + residual)."""
    x, w, bias = operands(ins)
    if not is_blocked(x):
        finish.plainly(op, out, ins)
        return

    taps = taps_inside(op, out.shape, x.shape, view(w).shape)
    op = with_taps(op, taps)

    block, (o, per_group, kh, kw) = x.shape[4], kept(view(w), taps).shape
    grouping, row = Grouping(op.groups, per_group, o // op.groups, block), Row(kw, op.stride[1], op.dilation[1])

    def key_of(name: str) -> Hashable:
        what = ("conv2d_pack", grouping, row) if name == DIRECT else ("winograd_pack", name)
        return (what, view.__name__, repr(taps))

    def packed(key: Hashable, make: Callable[[NDArray], NDArray]) -> NDArray:
        return builder.derive(key, lambda w: make(kept(view(w), taps)), w)

    rest: dict[str, Any] = {"bias": padded_bias(builder, bias), "residual": finish.residual, **finish.attrs}
    trained = not builder.is_constant(w)
    panels, _, terms, lanes = packed_sizes(grouping, row, kh * kw)
    terms = min(terms, lanes)
    terms += terms < BLOCK  # what a run of one tap costs beside them
    costs = winograd.conv_costs(op, x, (kh, kw), out, trained, panels * terms)
    if trained and view is as_it_is:  # what a forward pass rounds grows through the gradients; F(2)'s errors are least
        costs.pop("f4", None)
    if costs:
        sizes = (x.shape[0], x.shape[1] * BLOCK, out.shape[2], out.shape[3], out.shape[1] * BLOCK)
        layer = ("conv 3x3 {}x{}x{}x{} to {}", *sizes)
        name = choose(builder, layer, costs, lambda name: builder.has_derived(key_of(name), w))
        if name != DIRECT:
            made = packed(key_of(name), partial(winograd.pack, winograd.SCHEMES[name], x.shape[1]))
            top, left = op.padding[:2]
            call(f"conv2d_winograd_{name}", [out], x=x, packed=made, pad_top=top, pad_left=left, pool=0, **rest)
            return
    if 1 < op.groups == o and per_group == 1 and block == BLOCK:
        made = packed(("depthwise_pack", view.__name__, repr(taps)), pack_depthwise)
        call("depthwise_blocked", [out], x=x, packed=made, **window_attributes(op, (kh, kw)), **rest)
        return
    made = packed(key_of(DIRECT), partial(pack, "conv2d_pack", grouping, row, {}))
    call("conv2d_blocked", [out], x=x, packed=made, **window_attributes(op, (kh, kw)), **grouping.attributes, **rest)


def compared(
    batch: int,
    blocks: int,
    side: int,
    given: Callable[[NDArray], Callable[[], NDArray]] = lambda packed: lambda: packed,
) -> Runs:
    """A 3x3 convolution of so many blocks of channels by each algorithm, of images that bring their padding along.

    given: from packed weights what a run asks for its own.
    """
    channels = blocks * BLOCK
    x, weight = numbers(batch, blocks, side + 2, side + 2, BLOCK), numbers(channels, channels, 3, 3)
    y, op = NDArray.empty((batch, blocks, side, side, BLOCK)), Conv2d()
    grouping = Grouping(1, channels, channels, BLOCK)
    rest = {"bias": None, "residual": None, "activation": 0, "alpha": 0.0}

    def run(kernel: str, packed: NDArray, attrs: dict[str, Any]) -> Callable[[], None]:
        own = given(packed)
        return lambda: call(kernel, [y], x=x, packed=own(), **attrs, **rest)

    direct = window_attributes(op, (3, 3)) | grouping.attributes
    edges = {"pad_top": 0, "pad_left": 0, "pool": 0}
    runs = {
        n: run(f"conv2d_winograd_{n}", winograd.pack(s, blocks, weight), edges)
        for n, s in winograd.SCHEMES.items()
        if n != DIRECT
    }
    return runs | {DIRECT: run("conv2d_blocked", pack("conv2d_pack", grouping, Row(3), {}, weight), direct)}


LAYER = (1, 8, 28)  # batch, blocks of channels and pixels to a side of what is compared
IMAGES = (*LAYER[:2], LAYER[2], LAYER[2], BLOCK)
REFERENCES["conv 3x3"] = (
    partial(compared, *LAYER),
    {n: winograd.scheme_cost(s, LAYER[1], IMAGES) for n, s in winograd.SCHEMES.items()},
)


def transposed_halo(op: Any, out: Spec, x: Spec, w: Spec) -> Halo:
    """Zero rows and columns read around the input: output o meets input (o + pad - k dilation) / stride where that is whole."""
    if same := as_convolution(op, w.shape):
        return conv_halo(same, out, x, w)
    before, after = [], []
    for d in (0, 1):
        before.append(larger(0, ((w.shape[2 + d] - 1) * op.dilation[d] - op.padding[d]) // op.stride[d]))
        last = (out.shape[2 + d] - 1 + op.padding[d]) // op.stride[d]
        after.append(larger(0, last - (x.shape[2 + d] - 1)))
    return (before[0], before[1], after[0], after[1])


def as_convolution(op: ConvTranspose2d, weight: Sequence[int]) -> Conv2d | None:
    """The convolution that a transposed one of stride 1 is; None where groups of several channels would have to be turned."""
    if op.stride != (1, 1) or (op.groups > 1 and not (op.groups == weight[0] and weight[1] == 1)):
        return None
    reach = [d * (k - 1) for d, k in zip(op.dilation, weight[2:], strict=True)]
    ends = [r + more for r, more in zip(reach, op.output_padding, strict=True)]
    padding = tuple(r - p for r, p in zip((*reach, *ends), op.padding, strict=True))
    return Conv2d((1, 1), padding, op.dilation, op.groups) if min(padding) >= 0 else None


@CPU.lowers(ConvTranspose2d)
def transposed(
    builder: Builder, op: ConvTranspose2d, ins: list[NDArray], out: NDArray, finish: Finish = NOTHING
) -> None:
    x, w, bias = operands(ins)
    if not is_blocked(x):
        finish.plainly(op, out, ins)
        return
    if same := as_convolution(op, w.shape):
        conv(builder, same, ins, out, finish, turned if op.groups == 1 else flipped)
        return
    block, (i, per_group, kh, kw) = x.shape[4], w.shape
    grouping = Grouping(op.groups, i // op.groups, per_group, block)
    attrs = {k: v for k, v in window_attributes(op).items() if not k.startswith("pad")}
    kernel = "conv_transpose2d_pack"
    row = Row(kw if op.stride == (1, 1) else 1, 1, op.dilation[1])
    packed = builder.derive((kernel, grouping, *attrs.values()), partial(pack, kernel, grouping, row, attrs), w)
    rest = {**grouping.attributes, **window_attributes(op, (kh, kw)), **finish.alone().attrs}
    call("conv_transpose2d_blocked", [out], x=x, packed=packed, bias=padded_bias(builder, bias), **rest)
    finish.add(out)


@CPU.lowers(DepthwiseTaps)
def depthwise_taps(
    builder: Builder, op: DepthwiseTaps, ins: list[NDArray], out: NDArray, finish: Finish = NOTHING
) -> None:
    x, w, bias = operands(ins)
    taps = taps_inside(op, out.shape, x.shape, w.shape)
    op, (o, kd, kh, kw) = with_taps(op, taps), kept(w, taps).shape
    key = ("depthwise_pack_taps", repr(taps))
    packed = builder.derive(key, lambda w: pack_depthwise(kept(w, taps).viewed((o, 1, kd * kh, kw))), w)
    rest: dict[str, Any] = {"bias": padded_bias(builder, bias), "residual": finish.residual, **finish.attrs}
    call("depthwise_blocked", [out], x=x, packed=packed, **window_attributes(op, (kh, kw)), **rest)


def taps_halo(op: Any, out: Spec, x: Spec, w: Spec) -> Halo:
    return conv_halo(op, out, x, Spec((w.shape[0], 1, *w.shape[2:])))


HALOS.update({Conv2d: conv_halo, ConvTranspose2d: transposed_halo, DepthwiseTaps: taps_halo})
