"""The planned forms of convolutions and linear layers: weights packed once, images in blocks of 16 channels with zero halos.

A builder that does not pack (of a GPU) gets plain arrays and kernels that take them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from needle.autograd import Spec
from needle.backend_ndarray import NDArray, call

from . import algorithms, winograd
from .algorithms import DIRECT, Cost
from .common import rows_of
from .spatial import window_attributes

BLOCK = 16  # channels per block, columns per packed panel

Halo = tuple[int, int, int, int]  # top, left, bottom, right


def merged_groups(groups: int, in_per_group: int, out_per_group: int, block: int) -> int:
    """Groups after merging neighbours until their channels fill blocks (zeros between them), as the kernels do."""
    if block == BLOCK:
        for m in range(1, groups):
            if groups % m == 0 and in_per_group * m % BLOCK == 0 and out_per_group * m % BLOCK == 0:
                return groups // m
    return 1


def pack(kernel: str, merged: int, block: int, channels: tuple[int, int], attrs: dict[str, int], w: NDArray) -> NDArray:
    """Weights packed by `kernel` for `merged` groups with `channels` (in, out) in all."""
    in_blocks, out_blocks = -(-channels[0] // merged // block), -(-channels[1] // merged // BLOCK)
    out = NDArray.empty((merged, out_blocks, in_blocks, w.shape[2] * w.shape[3] * block * BLOCK))
    call(kernel, [out], weight=w, block=block, **attrs)
    return out


def channels_last(w: NDArray) -> NDArray:
    """A weight (O, I, KH, KW) as (O, KH, KW, I), the order in which a kernel meets an image's pixels."""
    return w.permute((0, 2, 3, 1)).compact()


def pack_depthwise(w: NDArray) -> NDArray:
    out = NDArray.empty((-(-w.shape[0] // BLOCK), w.shape[2] * w.shape[3], BLOCK))
    call("depthwise_pack", [out], weight=w)
    return out


def pad_vector(v: NDArray) -> NDArray:
    """A bias of any shape as a vector with zeros up to a full block."""
    flat = v.reshape((-1,))
    return flat.pad([(0, -flat.shape[0] % BLOCK)])


def planned_bias(builder: Any, bias: NDArray | None) -> NDArray | None:
    return None if bias is None else builder.derive("pad_vector", pad_vector, bias)


def conv2d_halo(op: Any, out: Spec, x: Spec, w: Spec) -> Halo:
    """Zero rows and columns that a convolution reads around its input."""
    top, left = op.padding[:2]
    ends = [
        (out.shape[2 + d] - 1) * op.stride[d]
        - op.padding[d]
        + (w.shape[2 + d] - 1) * op.dilation[d]
        - (x.shape[2 + d] - 1)
        for d in (0, 1)
    ]
    return (max(0, top), max(0, left), max(0, ends[0]), max(0, ends[1]))


def lower_conv2d(
    builder: Any,
    op: Any,
    inputs: list[NDArray],
    out: NDArray,
    residual: NDArray | None = None,
    activation: int = 0,
    alpha: float = 0.0,
) -> None:
    """Plan out = activation(conv(x, w) + bias + residual); `inputs`: x (blocked where the builder packs), w, bias or None."""
    x, w = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    if not builder.packs:
        if x.strides[1] == 1 < w.shape[1] and w.shape[2] * w.shape[3] > 1 and builder.is_constant(w):
            w = builder.derive("channels_last", channels_last, w).permute((0, 3, 1, 2))
        ins = {"x": x, "weight": w, "bias": bias, "residual": residual}
        attrs = {"groups": op.groups, "activation": activation, "alpha": alpha, "precision": builder.precision}
        call("conv2d_fused", [out], **ins, **window_attributes(op), **attrs)
        return
    block, (o, per_group, kh, kw) = x.shape[4], w.shape
    channels = (per_group * op.groups, o)
    rest = {"bias": planned_bias(builder, bias), "residual": residual, "activation": activation, "alpha": alpha}
    costs = winograd.conv_costs(op, x, w, out)
    if costs:
        layer = f"conv 3x3 {x.shape[0]}x{x.shape[1] * BLOCK}x{out.shape[2]}x{out.shape[3]} to {out.shape[1] * BLOCK}"
        name = algorithms.choose(builder, layer, costs)
        if name != DIRECT:
            make = partial(winograd.pack, winograd.SCHEMES[name], x.shape[1])
            packed = builder.derive(("winograd_pack", name), make, w)
            top, left = op.padding[:2]
            call(f"conv2d_winograd_{name}", [out], x=x, packed=packed, pad_top=top, pad_left=left, pool=0, **rest)
            return
    if 1 < op.groups == channels[0] == o and block == BLOCK:
        packed = builder.derive("depthwise_pack", pack_depthwise, w)
        call("depthwise_blocked", [out], x=x, packed=packed, **window_attributes(op, (kh, kw)), **rest)
        return
    merged = merged_groups(op.groups, per_group, o // op.groups, block)
    make = partial(pack, "conv2d_pack", merged, block, channels, {"groups": op.groups})
    packed = builder.derive(("conv2d_pack", op.groups, block), make, w)
    groups = {"groups": merged, "channels": channels[0] // merged}
    call("conv2d_blocked", [out], x=x, packed=packed, **window_attributes(op, (kh, kw)), **groups, **rest)


def conv_transpose2d_halo(op: Any, out: Spec, x: Spec, w: Spec) -> Halo:
    """Zero rows and columns read around the input: output o meets input (o + pad - k dilation) / stride where that is whole."""
    before, after = [], []
    for d in (0, 1):
        before.append(max(0, ((w.shape[2 + d] - 1) * op.dilation[d] - op.padding[d]) // op.stride[d]))
        last = (out.shape[2 + d] - 1 + op.padding[d]) // op.stride[d]
        after.append(max(0, last - (x.shape[2 + d] - 1)))
    return (before[0], before[1], after[0], after[1])


def lower_conv_transpose2d(
    builder: Any, op: Any, inputs: list[NDArray], out: NDArray, activation: int = 0, alpha: float = 0.0
) -> None:
    x, w = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    rest = {"activation": activation, "alpha": alpha}
    if not builder.packs:
        call("conv_transpose2d", [out], x=x, weight=w, bias=bias, groups=op.groups, **window_attributes(op), **rest)
        return
    block, (i, per_group, kh, kw) = x.shape[4], w.shape
    merged = merged_groups(op.groups, i // op.groups, per_group, block)
    attrs = {k: v for k, v in window_attributes(op).items() if not k.startswith("pad")} | {"groups": op.groups}
    make = partial(pack, "conv_transpose2d_pack", merged, block, (i, per_group * op.groups), attrs)
    packed = builder.derive(("conv_transpose2d_pack", block, *attrs.values()), make, w)
    bias = planned_bias(builder, bias)
    call(
        "conv_transpose2d_blocked",
        [out],
        x=x,
        packed=packed,
        bias=bias,
        groups=merged,
        **window_attributes(op, (kh, kw)),
        **rest,
    )


def as_matrix(layout: str, weight: NDArray) -> NDArray:
    """A linear weight as (in, out)."""
    return weight.permute((1, 0)) if layout == "torch" else weight


def pack_matrix(layout: str, weight: NDArray) -> NDArray:
    b = as_matrix(layout, weight)
    out = NDArray.empty((-(-b.shape[1] // BLOCK), b.shape[0], BLOCK))
    call("pack_matrix", [out], b=b)
    return out


def pack_strassen(layout: str, weight: NDArray) -> NDArray:
    b = as_matrix(layout, weight)
    out = NDArray.empty((7 * b.shape[1] // 2 * b.shape[0] // 2 + b.shape[1],))
    call("strassen_pack", [out], b=b)
    return out


def linear_costs(m: int, n: int, k: int) -> dict[str, Cost]:
    """Costs of a product (m, k) by (k, n): direct, and by one step of Strassen's algorithm (Numer. Math. 13, 1969)."""
    costs = {DIRECT: Cost(m * n * k / BLOCK, n * k * 4)}
    if k % 2 == 0 and n % (2 * BLOCK) == 0:
        rows, columns, terms = -(-m // 2), n // 2, k // 2
        sums = 50 * rows * terms + 50 * rows * columns  # of rows and of results
        costs["strassen"] = Cost((7 * rows * columns * terms + sums) / BLOCK, 7 * columns * terms * 4)
    return costs


def lower_linear(
    builder: Any, layout: str, inputs: list[NDArray], out: NDArray, activation: int = 0, alpha: float = 0.0
) -> None:
    """Plan out = activation(x W + b); weights that come from the input are packed in the run, if at all."""
    x, weight = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    rows, target = rows_of(x), rows_of(out)
    packs = builder.packs and all(builder.is_constant(a) for a in inputs[1:])
    rest: dict[str, Any] = {"activation": activation, "alpha": alpha}
    if not packs or any(a.dtype != "float32" for a in inputs):
        a, b = (v.as_dtype(out.dtype) for v in (rows, as_matrix(layout, weight)))
        bias = None if bias is None else bias.reshape((-1,)).as_dtype(out.dtype)
        call("matmul", [target], a=a, b=b, bias=bias, **rest)
        return
    (m, n), k = target.shape, rows.shape[1]
    rest |= {"a": rows, "bias": planned_bias(builder, bias)}
    if algorithms.choose(builder, f"linear {m}x{k} to {n}", linear_costs(m, n, k)) == DIRECT:
        packed = builder.derive(("pack_matrix", layout), partial(pack_matrix, layout), weight)
        call("matmul_packed", [target], packed=packed, **rest)
    else:
        packed = builder.derive(("strassen_pack", layout), partial(pack_strassen, layout), weight)
        call("matmul_strassen", [target], packed=packed, **rest)
