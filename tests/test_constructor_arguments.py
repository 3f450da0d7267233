"""What layers are made with: refused in one sentence at once, from Python and from files; ops' words likewise."""

from __future__ import annotations

import inspect
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import nn, ops
from needle.backend_selection import BACKEND
from needle.nn.arguments import CHECKS, MODULES
from needle.nn.module import OWN, Module
from values import Applied

Made = tuple[Any, tuple, dict]  # class, arguments, arguments by name

WRONG: list[tuple[str, tuple, dict, str]] = [
    ("Linear", (3, 2), {"layout": "Torch"}, "layout expects needle or torch, got Torch"),
    ("Linear", (3, -1), {}, "out_features expects at least 0, got -1"),
    ("Linear", (3.0, 2), {}, "in_features expects a whole number, got 3.0"),
    ("Linear", (3, True), {}, "out_features expects a whole number, got True"),
    ("Linear", (3, 2**40), {}, "out_features expects at most 2147483647, got 1099511627776"),
    ("Linear", (3, 2), {"bias": "no"}, "bias expects True or False, got no"),
    ("Linear", (3, 2), {"dtype": "int32"}, "dtype expects one of float16, bfloat16, float32, float64, got int32"),
    ("Linear", (3, 2), {"device": "cpu"}, "device expects a device, got str"),
    ("Conv", (3, 4, 0), {}, "kernel_size expects at least 1, got 0"),
    ("Conv", (3, 4, (3, 3, 3)), {}, "expects one number or 2, got (3, 3, 3)"),
    ("Conv", (3, 4, 3), {"stride": 0}, "stride expects at least 1, got 0"),
    ("Conv", (3, 4, 3), {"stride": (2, -1)}, "stride expects at least 1, got -1"),
    ("Conv", (3, 4, 3), {"dilation": 0}, "dilation expects at least 1, got 0"),
    ("Conv", (3, 4, 3), {"padding": -1}, "padding expects at least 0, got -1"),
    ("Conv", (3, 4, 3), {"padding": "full"}, "padding expects a whole number, got full"),
    ("Conv", (3, 4, 3), {"padding": "same", "stride": 2}, "padding 'same' expects stride 1, got (2, 2)"),
    ("Conv", (3, 4, 3), {"groups": 2}, "channels expects a multiple of groups 2, got 3 and 4"),
    ("Conv", (4, 4, 3), {"groups": 0}, "groups expects at least 1, got 0"),
    (
        "Conv",
        (4, 4, 3),
        {"padding_mode": "zero"},
        "padding_mode expects zeros, reflect, replicate or circular, got zero",
    ),
    ("Conv", (4, 4, 3), {"layout": ""}, "layout expects needle or torch, got ''"),
    ("Conv1d", (3, 4, 3), {"dilation": (0,)}, "dilation expects at least 1, got 0"),
    ("Conv3d", (3, 4, 3), {"groups": 3}, "channels expects a multiple of groups 3, got 3 and 4"),
    ("ConvTranspose2d", (4, 3, 3), {"groups": 2}, "channels expects a multiple of groups 2, got 4 and 3"),
    ("ConvTranspose2d", (4, 4, 3), {"padding": "same"}, "padding expects a whole number, got same"),
    ("ConvTranspose1d", (4, 4, 3), {"output_padding": -1}, "output_padding expects at least 0, got -1"),
    ("MaxPool2d", (2,), {"dilation": 0}, "dilation expects at least 1, got 0"),
    ("MaxPool2d", (2,), {"stride": 0}, "stride expects at least 1, got 0"),
    ("MaxPool1d", (3,), {"padding": 2}, "padding expects at most half of kernel_size 3, got 2"),
    ("AvgPool2d", ((4, 2),), {"padding": (1, 2)}, "padding expects at most half of kernel_size (4, 2), got (1, 2)"),
    ("AvgPool2d", (2,), {"divisor_override": 0}, "divisor_override expects at least 1, got 0"),
    ("AvgPool1d", (-2,), {}, "kernel_size expects at least 1, got -2"),
    ("AdaptiveAvgPool2d", ((2, -1),), {}, "output_size expects at least 1, got -1"),
    ("BatchNorm2d", (-3,), {}, "dim expects at least 0, got -3"),
    ("BatchNorm2d", (3,), {"eps": -1e-5}, "eps expects a number of at least 0, got -1e-05"),
    ("BatchNorm2d", (3,), {"momentum": "x"}, "momentum expects a number, got x"),
    ("GroupNorm", (3, 4), {}, "num_channels expects a multiple of num_groups 3, got 4"),
    ("LayerNorm", ((),), {}, "normalized_shape expects a whole number, got ()"),
    ("LocalResponseNorm", (0,), {}, "size expects at least 1, got 0"),
    ("Dropout", (1.5,), {}, "p expects a number in [0, 1], got 1.5"),
    ("Dropout", (float("nan"),), {}, "p expects a number in [0, 1], got nan"),
    ("StochasticDepth", (0.5,), {"mode": "rows"}, "mode expects row or batch, got rows"),
    ("Embedding", (3, 2), {"padding_idx": 3}, "padding_idx expects a row of 3, got 3"),
    ("MultiheadAttention", (6, 4), {}, "embed_dim expects a multiple of num_heads 4, got 6"),
    ("MultiheadAttention", (6, 0), {}, "num_heads expects at least 1, got 0"),
    ("MultiHeadAttention", (), {"dropout": -0.1}, "dropout expects a number in [0, 1], got -0.1"),
    ("Transformer", (4, 4, 1), {"sequence_len": 0}, "sequence_len expects at least 1, got 0"),
    ("TransformerEncoderLayer", (4, 2), {"activation": "tanh"}, "activation expects relu or gelu, got tanh"),
    ("LSTM", (3, 0), {}, "hidden_size expects at least 1, got 0"),
    ("GRU", (3, 4, 0), {}, "num_layers expects at least 1, got 0"),
    ("RNN", (3, 4), {"nonlinearity": "sine"}, "nonlinearity expects tanh or relu, got sine"),
    ("GELU", ("erf",), {}, "approximate expects none or tanh, got erf"),
    ("Hardtanh", (1.0, -1.0), {}, "max_val expects a number of at least min_val 1.0, got -1.0"),
    ("RReLU", (0.5, 0.1), {}, "upper expects a number of at least lower 0.5, got 0.1"),
    ("Softshrink", (-1.0,), {}, "lambd expects a number of at least 0, got -1.0"),
    ("Pad", ((1, 2, 3),), {}, "padding expects an even number of pads, got (1, 2, 3)"),
    ("Pad", ((1, 2), "wrap"), {}, "mode expects constant, reflect, replicate or circular, got wrap"),
    ("Upsample", (), {}, "expects either size or scale_factor"),
    ("Upsample", (3,), {"mode": "cubic"}, "mode expects nearest, nearest-exact, "),
    ("Upsample", (0,), {}, "size expects at least 1, got 0"),
    ("Upsample", (), {"scale_factor": float("inf")}, "scale_factor expects a number in [0, 1.04858e+06], got inf"),
]


@pytest.mark.parametrize("name, args, kwargs, message", WRONG, ids=lambda v: str(v).replace(" ", "") if v else "-")
def test_refused_at_once(name: str, args: tuple, kwargs: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as e:
        getattr(nn, name)(*args, **kwargs)
    text = str(e.value)
    assert text.startswith(f"[{name}] {message}") and text.endswith(".") and "\n" not in text


def own_layers() -> list[type]:
    found = [c for c in vars(nn).values() if isinstance(c, type) and issubclass(c, Module)]
    return [c for c in found if c.__module__.startswith(OWN)]


@pytest.mark.parametrize("layer", own_layers(), ids=lambda c: c.__name__)
def test_every_argument_of_every_layer_has_a_check(layer: Any) -> None:
    known = {**CHECKS, **layer.arguments}.keys() | MODULES
    names = inspect.signature(layer.__init__).parameters
    assert [n for n in names if n not in known] == []


def test_declared_layers_take_their_fields_in_order() -> None:
    names = {c: list(inspect.signature(c).parameters) for c in (nn.MaxPool1d, nn.AvgPool3d, nn.Threshold, nn.ReLU)}
    window = ["kernel_size", "stride", "padding"]
    assert names[nn.MaxPool1d] == [*window, "dilation", "ceil_mode", "return_indices"]
    assert names[nn.AvgPool3d] == [*window, "ceil_mode", "count_include_pad", "divisor_override"]
    assert names[nn.Threshold] == ["threshold", "value"]
    assert names[nn.ReLU] == ["device", "dtype"]
    layer = nn.AvgPool2d(3, 2, 1, True, divisor_override=4)
    fields = {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "divisor_override": 4}
    assert vars(layer).items() >= fields.items() and layer._config == fields and layer.training


def test_declared_layers_can_be_derived_from() -> None:
    class Steep(nn.LeakyReLU):
        scale: float  # not an argument

        def __init__(self, scale: float) -> None:
            super().__init__(0.5)
            self.scale = scale

        def forward(self, x: ndl.Tensor) -> ndl.Tensor:
            return super().forward(x) * self.scale

    class Named(nn.LeakyReLU):
        label: str = "not an argument"

    x = ndl.Tensor(np.array([-2.0, 4.0], "float32"))
    np.testing.assert_array_equal(Steep(3.0)(x).numpy(), [-3.0, 12.0])
    np.testing.assert_array_equal(Named(0.25)(x).numpy(), [-0.5, 4.0])


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv(np.int64(3), np.int32(4), [np.int64(3), 3]), nn.Dropout(np.float32(0.5))).eval()
    assert net.modules[0].kernel_size == (3, 3)
    ndl.save(net, tmp_path / "net")
    assert type(ndl.load(tmp_path / "net").get_submodule("1").p) is float


FROM_FILES: list[tuple[Any, tuple, str, Any, str]] = [
    (lambda: nn.Linear(3, 2), (2, 3), "layout", "Torch", "layout expects needle or torch, got Torch"),
    (lambda: nn.MaxPool2d(2, dilation=1), (1, 1, 6, 6), "dilation", 0, "dilation expects at least 1, got 0"),
    (lambda: nn.AvgPool2d(2, stride=2), (1, 1, 6, 6), "stride", 0, "stride expects at least 1, got 0"),
    (lambda: nn.Conv(2, 2, 3, groups=2), (1, 2, 6, 6), "groups", 0, "groups expects at least 1, got 0"),
]


def edited(path: Path, edit: Any) -> None:
    """The file with its document changed."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    document = json.loads(header["__metadata__"]["needle"])
    edit(document)
    header["__metadata__"]["needle"] = json.dumps(document)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


@pytest.mark.parametrize("make, shape, name, value, message", FROM_FILES, ids=[row[2] for row in FROM_FILES])
def test_files_go_through_the_same_checks(
    make: Any, shape: tuple, name: str, value: Any, message: str, tmp_path: Path
) -> None:
    ndl.save(nn.Sequential(make()), tmp_path / "net")
    edited(tmp_path / "net", lambda d: d["modules"]["0"][1].update({name: value}))
    with pytest.raises(ValueError, match=re.escape(message)):
        ndl.load(tmp_path / "net")


ATTRIBUTES: list[tuple[Any, str, Any, str]] = [
    (
        lambda x: ops.linear(x, x),
        "layout_of_weight",
        "Torch",
        "layout_of_weight expects one of torch, needle, got Torch",
    ),
    (lambda x: ops.softmax(x), "axis", 0.5, "Softmax expects int as axis and got 0.5"),
    (lambda x: ops.softmax(x), "axis", None, "Softmax expects int as axis and got None"),
    (lambda x: ops.reshape(x, (3, 3)), "shape", 9, "Reshape expects tuple as shape and got 9"),
    (lambda x: ops.leaky_relu(x, 0.1), "alpha", "x", "LeakyReLU expects float as alpha and got x"),
    (lambda x: ops.pad(x, (1, 1), "reflect"), "mode", "mirror", "mode expects one of reflect, replicate, circular"),
]


@pytest.mark.parametrize("f, name, value, message", ATTRIBUTES, ids=[f"{r[1]}-{r[2]}" for r in ATTRIBUTES])
def test_attributes_of_ops_in_files(f: Any, name: str, value: Any, message: str, tmp_path: Path) -> None:
    ndl.save(Applied(f), tmp_path / "net")

    def edit(document: Any) -> None:
        rows = [row["target"][1] for row in document["graph"] if row["kind"] == "op" and name in row["target"][1]]
        rows[0][name] = value

    edited(tmp_path / "net", edit)
    with pytest.raises(ValueError, match=re.escape(message)):
        ndl.load(tmp_path / "net")


@pytest.mark.skipif(BACKEND == "np", reason="compiles")
def test_words_of_ops() -> None:
    x = ndl.Tensor(np.ones((3, 3), "float32"))
    with pytest.raises(ValueError, match=r"\[linear\] layout_of_weight expects one of torch, needle, got Torch\."):
        ops.linear(x, x, layout="Torch")
    with pytest.raises(ValueError, match=r"\[lstm\] layout_of_weight expects one of torch, needle, got x\."):
        ops.lstm(x, x, x, x, layout="x")


UNFIT: dict[str, tuple[str, dict, list[tuple]]] = {  # ops whose kernels would read beside their inputs
    "softmax": ("SoftmaxGrad", {"axis": -1}, [(4, 33), (4, 32)]),
    "log softmax": ("LogSoftmaxGrad", {"axis": 1}, [(4, 3), (3, 3)]),
    "cross entropy": ("CrossEntropyGrad", {}, [(7, 5), (6,), (7,)]),
    "gradient of cross entropy": ("CrossEntropyGrad", {}, [(7, 5), (7,), (1,)]),
    "batch norm": ("BatchNormTrainGrad", {"eps": 0.1}, [(2, 3, 4), (3,), (2,), (3,), (2, 3, 4)]),
    "gradient of batch norm": ("BatchNormTrainGrad", {"eps": 0.1}, [(2, 3, 4), (3,), (3,), (3,), (2, 3, 2)]),
    "take": ("TakeGrad", {"axis": 1, "size": 4}, [(2, 3), (5,)]),
    "broadcast": ("BroadcastTo", {"shape": (4, 3, -5)}, [(3, 1)]),
    "adaptive": ("AdaptiveMaxPoolNd", {"output_size": (1 << 20, 1)}, [(1, 1, 4, 4)]),
    "interpolate": ("Interpolate", {"size": 2**63 - 1, "mode": "bilinear"}, [(1, 17, 5, 4)]),
    "reshape": ("Full", {"value": 1.0, "shape": (2**33, 2**30, 2)}, [(2,)]),
    "joined": ("FusedLinears", {"parts": 2**64, "has_bias": False}, [(4, 7), (5, 7)]),
}


@pytest.mark.parametrize("name", UNFIT)
def test_inputs_that_an_op_cannot_have(name: str) -> None:
    op, attributes, shapes = UNFIT[name]
    dtype = {"CrossEntropyGrad": ("float32", "int64", "float32"), "TakeGrad": ("float32", "int64")}.get(op, ())
    xs = [ndl.Tensor(np.zeros(s, d)) for s, d in zip(shapes, [*dtype, *["float32"] * 9], strict=False)]
    with pytest.raises((ValueError, IndexError, MemoryError)):
        ndl.op.OPS[op](**attributes)(*xs)


def test_norms_refuse_what_torch_refuses() -> None:
    x = ndl.Tensor(np.ones((1, 3), "float32"))
    with pytest.raises(ValueError, match=r"\[BatchNorm1d\] expects more than one value per channel in training, got"):
        nn.BatchNorm1d(3, unbiased=True)(x)
    assert nn.BatchNorm1d(3)(x).shape == nn.BatchNorm1d(3, unbiased=True).eval()(x).shape == (1, 3)
    for layer in (nn.LayerNorm((4,), elementwise_affine=False), nn.RMSNorm(4, elementwise_affine=False)):
        with pytest.raises(ValueError, match=r"x expects shape \(\.\.\., 4\), got \(1, 3\)\."):
            layer(x)


@pytest.mark.parametrize(
    ("layer", "shape", "error"),
    [
        (lambda: nn.BatchNorm1d(3), (3,), r"\[BatchNorm1d\] expects \(N, C\) or more axes, got shape \(3,\)"),
        (lambda: nn.InstanceNorm(3, 1), (1, 3, 1), r"\[instance_norm\] expects more than one element per channel, got"),
        (lambda: nn.InstanceNorm(3, 2, eps=0.0), (3, 1, 1), r"\[instance_norm\] expects more than one element per"),
    ],
)
def test_norms_of_too_little(layer: Any, shape: tuple, error: str) -> None:
    """Which torch refuses, too."""
    with pytest.raises(ValueError, match=error):
        layer()(ndl.Tensor(np.zeros(shape, "float32")))
