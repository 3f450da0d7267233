"""Random constructor arguments of layers, by torch's names, and inputs that fit them; needs no torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WILD = (
    0,
    -1,
    -2,
    1.5,
    0.0,
    None,
    "x",
    "",
    True,
    (),
    (1,),
    (2, 0),
    (1, 2, 3, 4),
    [2],
    float("nan"),
    float("inf"),
    7,
    9,
)
WORDS = {
    "zeros": ("reflect", "replicate", "circular", "zero"),
    "relu": ("gelu", "tanh", "silu"),
    "nearest": ("bilinear", "linear", "bicubic", "area", "nearest-exact", "cubic"),
}

Draw = Callable[[random.Random], Any]


def of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def around(axes: int, *values: int) -> Draw:
    """One number, or one for each axis."""
    return lambda rng: rng.choice(values) if rng.random() < 0.6 else tuple(rng.choice(values) for _ in range(axes))


SIZE, FLAG, EPS = of(1, 2, 3, 4, 6, 8), of(True, False), of(1e-5, 1e-3, 0.1, 0.0)
CHANNELS = of(1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Row:
    """needle: the class and how torch's arguments are called there; fixed: arguments of needle's alone.

    shape: of the input, from the arguments and the random numbers.
    """

    torch: str
    arguments: dict[str, Draw]
    shape: Callable[[dict[str, Any], random.Random], Any]
    needle: str = ""
    names: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    kind: str = "float"  # index: an integer input below the argument num_embeddings

    def needles(self, given: dict[str, Any]) -> dict[str, Any]:
        return {self.names.get(k, k): v for k, v in given.items()} | self.fixed


def spatial(axes: int, channels: str = "") -> Callable[[dict[str, Any], random.Random], Any]:
    """(N, C, *) with the channels of an argument."""

    def shape(given: dict[str, Any], rng: random.Random) -> tuple[int, ...]:
        c = whole(given.get(channels), rng.choice((1, 2, 3)))
        return (rng.choice((1, 2, 2, 0)), c, *(rng.choice((1, 2, 3, 4, 5, 7)) for _ in range(axes)))

    return shape


def whole(value: Any, otherwise: int) -> int:
    return value if type(value) is int and 0 <= value <= 100 else otherwise


def last(name: str) -> Callable[[dict[str, Any], random.Random], Any]:
    def shape(given: dict[str, Any], rng: random.Random) -> tuple[int, ...]:
        wanted = given.get(name)
        ends = tuple(wanted) if isinstance(wanted, tuple | list) else (whole(wanted, 3),)
        return (*(rng.choice((1, 2, 3, 0)) for _ in range(rng.choice((0, 1, 1, 2)))), *(whole(e, 3) for e in ends))

    return shape


def sequence(name: str) -> Callable[[dict[str, Any], random.Random], Any]:
    return lambda given, rng: (rng.choice((1, 2, 3)), rng.choice((1, 2)), whole(given.get(name), 3))


def anything(given: dict[str, Any], rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.choice((0, 1, 2, 2, 3, 4))))


def convolution(axes: int, transposed: bool) -> Row:
    window = {
        "kernel_size": around(axes, 1, 2, 3),
        "stride": around(axes, 1, 1, 2, 3),
        "dilation": around(axes, 1, 1, 2),
    }
    arguments = {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        **window,
        "groups": of(1, 1, 2, 4),
        "bias": FLAG,
        "padding": around(axes, 0, 1, 2),
    }
    name = f"ConvTranspose{axes}d" if transposed else f"Conv{axes}d"
    if transposed:
        arguments["output_padding"] = around(axes, 0, 1)
    else:
        arguments["padding"] = lambda rng: rng.choice(("same", "valid", 0, 1, around(axes, 0, 1, 2)(rng)))
        arguments["padding_mode"] = of("zeros", "zeros", "reflect", "replicate", "circular")
    own = {"needle": "Conv", "fixed": {"layout": "torch"}} if name == "Conv2d" else {}
    required = ("in_channels", "out_channels", "kernel_size")
    return Row(name, arguments, spatial(axes, "in_channels"), required=required, **own)  # type: ignore[arg-type]


def pool(kind: str, axes: int) -> Row:
    arguments = {
        "kernel_size": around(axes, 1, 2, 3),
        "stride": lambda rng: rng.choice((None, around(axes, 1, 2, 3)(rng))),
        "padding": around(axes, 0, 1),
        "ceil_mode": FLAG,
    }
    if kind == "Max":
        arguments["dilation"] = around(axes, 1, 2)
    else:
        arguments["count_include_pad"] = FLAG
        if axes > 1:
            arguments["divisor_override"] = of(None, 1, 3)
    return Row(f"{kind}Pool{axes}d", arguments, spatial(axes), required=("kernel_size",))


def recurrent(name: str) -> Row:
    arguments = {
        "input_size": SIZE,
        "hidden_size": of(1, 2, 3),
        "num_layers": of(1, 2),
        "bias": FLAG,
        "batch_first": FLAG,
        "dropout": of(0.0, 0.5),
        "bidirectional": FLAG,
    }
    if name == "RNN":
        arguments["nonlinearity"] = of("tanh", "relu")
    return Row(
        name, arguments, sequence("input_size"), fixed={"layout": "torch"}, required=("input_size", "hidden_size")
    )


def cell(name: str) -> Row:
    arguments = {"input_size": SIZE, "hidden_size": of(1, 2, 3), "bias": FLAG}
    shape = lambda given, rng: (rng.choice((1, 2, 3)), whole(given.get("input_size"), 3))  # noqa: E731
    return Row(name, arguments, shape, fixed={"layout": "torch"}, required=("input_size", "hidden_size"))


def normalisation(kind: str, axes: int) -> Row:
    arguments = {
        "num_features": CHANNELS,
        "eps": EPS,
        "momentum": of(0.1, 0.5, 1.0),
        "affine": FLAG,
        "track_running_stats": FLAG,
    }
    batch = {"fixed": {"unbiased": True, "count_batches": True}}
    own: dict[str, Any] = batch if kind == "BatchNorm" else {"needle": "InstanceNorm", "fixed": {"rank": axes}}
    return Row(
        f"{kind}{axes}d",
        arguments,
        spatial(axes, "num_features"),
        names={"num_features": "dim"},
        required=("num_features",),
        **own,
    )


def activation(
    name: str, names: dict[str, str] | None = None, required: tuple[str, ...] = (), **arguments: Draw
) -> Row:
    return Row(name, arguments, anything, names=names or {}, required=required)


def dropout(name: str) -> Row:
    return Row(name, {"p": of(0.0, 0.3, 1.0)}, spatial(2))


def padding(name: str, axes: int, mode: str, **more: Draw) -> Row:
    draw: Draw = lambda rng: tuple(rng.choice((0, 1, 2, -1)) for _ in range(2 * axes))  # noqa: E731
    own = {} if name == "ConstantPad2d" else {"needle": "Pad", "fixed": {"mode": mode}}
    return Row(name, {"padding": draw, **more}, spatial(axes), required=("padding", *more), **own)  # type: ignore[arg-type]


def images(given: dict[str, Any], rng: random.Random) -> tuple[int, ...]:
    return spatial(rng.choice((1, 2, 2, 3)))(given, rng)


SLOPE = of(0.01, 0.5, -0.5, 0.0, 2)
ROWS: tuple[Row, ...] = (
    Row(
        "Linear",
        {"in_features": SIZE, "out_features": SIZE, "bias": FLAG},
        last("in_features"),
        fixed={"layout": "torch"},
        required=("in_features", "out_features"),
    ),
    *(convolution(n, t) for n in (1, 2, 3) for t in (False, True)),
    *(pool(kind, n) for n in (1, 2, 3) for kind in ("Max", "Avg")),
    *(
        Row(f"Adaptive{k}Pool{n}d", {"output_size": around(n, 1, 2, 3)}, spatial(n), required=("output_size",))
        for n in (1, 2, 3)
        for k in ("Max", "Avg")
    ),
    *(normalisation(k, n) for n in (1, 2, 3) for k in ("BatchNorm", "InstanceNorm")),
    Row(
        "LayerNorm",
        {"normalized_shape": of(1, 3, 4, (3,), (2, 3), [4]), "eps": EPS, "elementwise_affine": FLAG, "bias": FLAG},
        last("normalized_shape"),
        required=("normalized_shape",),
    ),
    Row(
        "RMSNorm",
        {"normalized_shape": of(1, 3, 4, (3,), (2, 3), [4]), "eps": of(None, 1e-5, 0.1), "elementwise_affine": FLAG},
        last("normalized_shape"),
        required=("normalized_shape",),
    ),
    Row(
        "GroupNorm",
        {"num_groups": of(1, 2, 4), "num_channels": CHANNELS, "eps": EPS, "affine": FLAG},
        spatial(1, "num_channels"),
        required=("num_groups", "num_channels"),
    ),
    Row(
        "LocalResponseNorm",
        {"size": of(1, 2, 3, 5), "alpha": of(1e-4, 1.0), "beta": of(0.75, 0.5), "k": of(1.0, 2.0)},
        images,
        required=("size",),
    ),
    Row(
        "Embedding",
        {"num_embeddings": of(1, 3, 5), "embedding_dim": SIZE, "padding_idx": of(None, 0, -1, 2)},
        anything,
        required=("num_embeddings", "embedding_dim"),
        kind="index",
    ),
    *(recurrent(n) for n in ("RNN", "LSTM", "GRU")),
    *(cell(n) for n in ("RNNCell", "LSTMCell", "GRUCell")),
    Row(
        "MultiheadAttention",
        {
            "embed_dim": of(2, 4, 6),
            "num_heads": of(1, 2),
            "dropout": of(0.0, 0.3),
            "bias": FLAG,
            "add_bias_kv": FLAG,
            "add_zero_attn": FLAG,
            "kdim": of(None, 4),
            "vdim": of(None, 4),
            "batch_first": FLAG,
        },
        sequence("embed_dim"),
        required=("embed_dim", "num_heads"),
        kind="attention",
    ),
    Row(
        "TransformerEncoderLayer",
        {
            "d_model": of(2, 4),
            "nhead": of(1, 2),
            "dim_feedforward": of(1, 5),
            "dropout": of(0.0, 0.1),
            "activation": of("relu", "gelu"),
            "layer_norm_eps": EPS,
            "batch_first": FLAG,
            "norm_first": FLAG,
            "bias": FLAG,
        },
        sequence("d_model"),
        required=("d_model", "nhead", "dim_feedforward"),
    ),
    *(
        activation(n)
        for n in (
            "ReLU",
            "ReLU6",
            "Sigmoid",
            "Tanh",
            "SiLU",
            "Hardswish",
            "Hardsigmoid",
            "SELU",
            "Mish",
            "LogSigmoid",
            "Tanhshrink",
            "Softsign",
            "Identity",
            "Softmax2d",
        )
    ),
    activation("LeakyReLU", negative_slope=SLOPE),
    activation("ELU", alpha=of(1.0, 0.5, 0.0)),
    activation("CELU", alpha=of(1.0, 0.5, 0.0)),
    activation("GELU", approximate=of("none", "tanh")),
    activation("GLU", {"dim": "axis"}, dim=of(-1, 0, 1)),
    activation("Hardshrink", lambd=of(0.5, 0.0, 2.0)),
    activation("Softshrink", lambd=of(0.5, 0.0, 2.0)),
    activation("Hardtanh", min_val=of(-1.0, 0.0, 0.5), max_val=of(1.0, 2.0, 0.5)),
    activation("Softplus", beta=of(1.0, 2, 0.5), threshold=of(20.0, 1.0)),
    activation("Threshold", required=("threshold", "value"), threshold=of(0.1, 1.0), value=of(2.0, 0)),
    activation("PReLU", {"init": "init_slope"}, num_parameters=of(1, 1, 2, 3), init=of(0.25, 0.1)),
    activation("RReLU", lower=of(0.1, 0.2), upper=of(0.3, 0.2)),
    activation("Softmax", {"dim": "axis"}, ("dim",), dim=of(-1, 0, 1)),
    activation("LogSoftmax", {"dim": "axis"}, ("dim",), dim=of(-1, 0, 1)),
    activation("Softmin", {"dim": "axis"}, ("dim",), dim=of(-1, 0, 1)),
    activation("Flatten", start_dim=of(0, 1, -1), end_dim=of(-1, 2, 1)),
    *(dropout(n) for n in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")),
    *(padding(f"ReflectionPad{n}d", n, "reflect") for n in (1, 2)),
    *(padding(f"ReplicationPad{n}d", n, "replicate") for n in (1, 2)),
    padding("CircularPad2d", 2, "circular"),
    padding("ConstantPad2d", 2, "constant", value=of(0.0, 1.5)),
    Row(
        "Upsample",
        {
            "size": of(None, 1, 3, (2, 3)),
            "scale_factor": of(None, 2, 1.5, 0.5, (2, 1.3)),
            "mode": of("nearest", "bilinear", "linear", "bicubic", "area"),
            "align_corners": of(None, True, False),
        },
        images,
    ),
)
BY_NAME = {row.torch: row for row in ROWS}


def arguments(row: Row, rng: random.Random, wild: float) -> dict[str, Any]:
    """Some of the arguments of a layer; each with a probability of something else."""
    given = {}
    for name, draw in row.arguments.items():
        if name in row.required or rng.random() < 0.5:
            given[name] = rng.choice(WILD) if rng.random() < wild else draw(rng)
    return given
