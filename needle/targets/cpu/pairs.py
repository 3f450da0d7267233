"""Steps that the CPU has one kernel for: what lies between them stays in a core's cache or registers."""

from __future__ import annotations

from types import SimpleNamespace

from needle.backend_ndarray import NDArray
from needle.backend_ndarray.strides import reshaped_strides
from needle.executor.rewriting import keeps_its_algorithm, next_to_each_other
from needle.executor.step import Step
from needle.graph.engine import Fusion
from needle.graph.matcher import Match, Pattern
from needle.ops.math.activation import activation_code
from needle.ops.nn.spatial import window_attributes
from needle.targets.chains import chains
from needle.targets.finishes import Finishes, two

from .target import BLOCK, CPU

HALVES = window_attributes(SimpleNamespace(stride=(2, 2), padding=(0, 0), dilation=(1, 1)), (2, 2))  # of a pool
PRODUCTS = ("matmul_packed", "matmul_strassen")
FINISHED = (
    *PRODUCTS,
    "conv2d_blocked",
    "conv2d_winograd_f2",
    "conv2d_winograd_f4",
    "depthwise_blocked",
)  # with what is added
PIXEL_BYTES, BAND_BYTES = 2 * BLOCK * 4, 256 << 10  # of a tile's channels; of rows that stay in L2


def adds_nothing(match: Match) -> str | None:
    conv, after = two(match)
    return "something is added to a result" if "residual" in {*conv.inputs, *after.inputs} else None


def rows_stay_in_cache(match: Match) -> str | None:
    """The kernel keeps the rows that a window of the depthwise convolution reads, and starts with the first."""
    _, depthwise = two(match)
    b, x = depthwise.attrs, depthwise.inputs["x"]
    if x.shape[1] != depthwise.outs[0].shape[1]:
        return f"{depthwise.label} reads several frames at a time"
    width = x.shape[3]
    rows = (b["kernel_h"] - 1) * b["dilation_h"] + 1
    if rows * width * PIXEL_BYTES > BAND_BYTES:
        return f"the rows that {depthwise.label} reads at a time do not stay in a core's cache"
    return f"{depthwise.label} skips the first pixels" if min(b["pad_top"], b["pad_left"]) < 0 else None


def has_no_groups(match: Match) -> str | None:
    conv, _ = two(match)
    return f"{conv.label} has groups" if conv.attrs["groups"] > 1 else None


def with_depthwise(match: Match) -> Step:
    conv, depthwise = two(match)
    height, width = depthwise.inputs["x"].shape[2:4]
    inputs = conv.inputs | {f"depthwise_{n}": v for n, v in depthwise.inputs.items() if n != "x"}
    attrs = {f"depthwise_{n}": v for n, v in depthwise.attrs.items()} | {"height": height, "width": width}
    return Step("conv2d_depthwise", depthwise.outs, inputs, conv.attrs | attrs, "", conv.halos)


def takes_every_2_x_2_pixels(match: Match) -> str | None:
    conv, pool = two(match)
    (h, w), (pooled_h, pooled_w) = conv.outs[0].shape[2:4], pool.outs[0].shape[2:4]
    whole = pool.attrs == HALVES and (pooled_h, pooled_w) == (h // 2, w // 2)
    return None if whole else f"{pool.label} does not take the largest of every 2 x 2 pixels"


def keeps_order(match: Match) -> str | None:
    """The largest of activated sums is the activated largest one."""
    conv, _ = two(match)
    known = activation_code("none"), activation_code("relu")
    return None if conv.attrs["activation"] in known else f"{conv.label} ends in another activation than ReLU"


def with_pool(match: Match) -> Step:
    conv, pool = two(match)
    return conv._replace(outs=pool.outs, attrs=conv.attrs | {"pool": 1.0})


def as_rows(x: NDArray, product: Step) -> NDArray | None:
    """An array in the shape of a product's result, if that moves nothing and leaves rows dense."""
    shape = product.outs[0].shape
    strides = reshaped_strides(x.shape, x.strides, shape) if x.size == product.outs[0].size else None
    return None if strides is None or (strides[1] != 1 and shape[1] > 1) else x.strided(shape, strides)


def as_result(x: NDArray, layer: Step) -> NDArray | None:
    """An array in the shape of a layer's result, if the layer's kernel can read and write it in place of its own."""
    if layer.kernel in PRODUCTS:
        return as_rows(x, layer)
    return x if x.shape == layer.outs[0].shape and x.strides[-1] == 1 else None


# Below 2^17 elements what two cheap maps pass on is in cache anyway.
CPU.rules.register(chains(1 << 17, "a piece of the arrays goes through all of the maps while it lies in the L1 cache"))
FINISHES = Finishes(FINISHED, ("conv_transpose2d_blocked", "group_norm_blocked"), as_result)
FINISHES.register(CPU.rules)
CPU.rules.register(
    Fusion(
        "ConvDepthwise",
        Pattern.op("conv", "conv2d_blocked").then("depthwise", "depthwise_blocked"),
        with_depthwise,
        (next_to_each_other, rows_stay_in_cache, has_no_groups, adds_nothing, keeps_its_algorithm),
        why="the rows between the two stay in a core's cache",
    )
)
for scheme in ("f2", "f4"):
    CPU.rules.register(
        Fusion(
            f"Winograd{scheme.upper()}MaxPool",
            Pattern.op("conv", f"conv2d_winograd_{scheme}").then("pool", "max_pool2d"),
            with_pool,
            (next_to_each_other, takes_every_2_x_2_pixels, adds_nothing, keeps_order),
            family="WinogradMaxPool",
            why="2 x 2 pixels lie in one tile of the convolution",
        )
    )
