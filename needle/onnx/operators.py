"""Ops as nodes of ONNX, by op class; what has no row here is exported as what it consists of."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np

from needle import ops
from needle.autograd import Unsupported
from needle.ops.common import check_axes
from needle.ops.nn.resize import matrix_of

if TYPE_CHECKING:
    from .export import Nodes, Value


@singledispatch
def as_onnx(op: Any, at: Nodes, out: Any, *inputs: Any) -> Any:
    """The op's result. at("Relu", x) adds a node; out: the result's Spec; sizes in it may follow a free batch."""
    raise Unsupported(f"[onnx] {op.label} has no operator of ONNX and does not decompose.")


Row = Callable[..., Any]
register = as_onnx.register


# -- element by element --------------------------------------------------------------------------------------------------

SAME = {
    ops.Exp: "Exp", ops.Log: "Log", ops.Sqrt: "Sqrt", ops.Abs: "Abs", ops.Negate: "Neg", ops.Reciprocal: "Reciprocal",
    ops.Sin: "Sin", ops.Cos: "Cos", ops.Tan: "Tan", ops.Asin: "Asin", ops.Acos: "Acos", ops.Atan: "Atan",
    ops.Sinh: "Sinh", ops.Cosh: "Cosh", ops.Asinh: "Asinh", ops.Acosh: "Acosh", ops.Atanh: "Atanh", ops.Erf: "Erf",
    ops.Sign: "Sign", ops.Floor: "Floor", ops.Ceil: "Ceil", ops.Round: "Round", ops.ReLU: "Relu", ops.Sigmoid: "Sigmoid",
    ops.Tanh: "Tanh", ops.Hardswish: "HardSwish", ops.Mish: "Mish", ops.EWiseAdd: "Add", ops.EWiseMul: "Mul",
    ops.SlopeBelow: "PRelu", ops.EWiseDiv: "Div", ops.EWisePow: "Pow", ops.EWiseMaximum: "Max", ops.EWiseMinimum: "Min",
}  # fmt: skip
SCALAR = {
    ops.AddScalar: "Add",
    ops.MulScalar: "Mul",
    ops.DivScalar: "Div",
    ops.PowerScalar: "Pow",
    ops.ClampMin: "Max",
    ops.ClampMax: "Min",
}
SCALAR_COMPARED = {
    ops.EqualScalar: "Equal", ops.GreaterScalar: "Greater", ops.LessScalar: "Less",
    ops.GreaterEqualScalar: "GreaterOrEqual", ops.LessEqualScalar: "LessOrEqual",
}  # fmt: skip
COMPARED = {
    **SCALAR_COMPARED, ops.Equal: "Equal", ops.Greater: "Greater", ops.GreaterEqual: "GreaterOrEqual", ops.Less: "Less",
    ops.LessEqual: "LessOrEqual",
}  # fmt: skip


def by_elements(name: str, at: Nodes, out: Any, x: Value, *rest: Any) -> Value:
    """rest: values, or numbers. Truths are computed with as whole numbers, for ONNX does not."""
    dtype = "int64" if out.dtype == "bool" else out.dtype
    others = (at.cast(y, dtype) if hasattr(y, "dtype") else at.number(y, dtype) for y in rest)
    return at.cast(at(name, at.cast(x, dtype), *others, dtype=dtype), out.dtype)


for cls, name in SAME.items():
    register(cls, lambda op, at, out, *xs, name=name: by_elements(name, at, out, *xs))
for cls, name in SCALAR.items():
    register(cls, lambda op, at, out, x, name=name: by_elements(name, at, out, x, op.scalar))


def compared(op: Any, at: Nodes, x: Value, y: Value | None, name: str) -> Value:
    """Whole numbers are compared as int64, others in the widest dtype."""
    kinds = {x.dtype, y.dtype if y else "float32" if isinstance(op.scalar, float) else "int64"}
    kind = "float64" if "float64" in kinds else "float32" if "float32" in kinds else "int64"
    return at(name, at.cast(x, kind), at.cast(y, kind) if y else at.number(op.scalar, kind))


for cls, name in COMPARED.items():
    register(cls, lambda op, at, out, x, y=None, name=name: compared(op, at, x, y, name))
for cls in (ops.NotEqual, ops.NotEqualScalar):
    register(cls, lambda op, at, out, x, y=None: at("Not", compared(op, at, x, y, "Equal")))


@register(ops.RDivScalar)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Div", at.number(op.scalar, out.dtype), at.cast(x, out.dtype))


@register(ops.WeightedSum)
def _(op: Any, at: Nodes, out: Any, x: Value, y: Value) -> Value:
    a, b = (at("Mul", at.cast(v, out.dtype), at.number(by, out.dtype)) for v, by in ((x, op.of_x), (y, op.of_y)))
    return at("Add", a, b)


@register(ops.Rsqrt)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Reciprocal", at("Sqrt", at.cast(x, out.dtype)))


@register(ops.Clamp)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Clip", at.cast(x, out.dtype), at.number(op.low, out.dtype), at.number(op.high, out.dtype))


@register(ops.ReLU6)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Clip", x, at.number(0, out.dtype), at.number(6, out.dtype))


@register(ops.Where)
def _(op: Any, at: Nodes, out: Any, condition: Value, x: Value, y: Value) -> Value:
    kind = (
        "float32" if out.dtype == "float32" else "float64" if out.dtype == "float64" else "int64"
    )  # runtimes choose no truths
    return at.cast(at("Where", condition, at.cast(x, kind), at.cast(y, kind), dtype=kind), out.dtype)


@register(ops.Cast)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at.cast(x, out.dtype)


@register(ops.LeakyReLU)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("LeakyRelu", x, alpha=float(op.alpha))


@register(ops.ELU)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Elu", x, alpha=float(op.alpha))


@register(ops.SiLU)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Mul", x, at("Sigmoid", x))


@register(ops.GELU)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Gelu", x, approximate="none")


@register(ops.GELUTanh)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Gelu", x, approximate="tanh")


@register(ops.Hardsigmoid)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@register(ops.Hypot)
def _(op: Any, at: Nodes, out: Any, x: Value, y: Value) -> Value:
    """By the larger of both, so that no square overflows."""
    a, b = (at("Abs", at.cast(v, out.dtype)) for v in (x, y))
    high, low = at("Max", a, b), at("Min", a, b)
    share = at("Div", low, at("Max", high, at.number(np.finfo(out.dtype).tiny, out.dtype)))
    return at("Mul", high, at("Sqrt", at("Add", at("Mul", share, share), at.number(1, out.dtype))))


@register(ops.Exp2)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Pow", at.number(2, out.dtype), at.cast(x, out.dtype))


for cls, base in {ops.Log2: 2, ops.Log10: 10}.items():
    register(
        cls,
        lambda op, at, out, x, base=base: at(
            "Mul", at("Log", at.cast(x, out.dtype)), at.number(1 / math.log(base), out.dtype)
        ),
    )


@register(ops.Softplus)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Softplus", at.cast(x, out.dtype))


@register(ops.Expm1)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    """tanh(x / 2) (e ** x + 1), in which nothing cancels."""
    x = at.cast(x, out.dtype)
    half = at("Tanh", at("Mul", x, at.number(0.5, out.dtype)))
    return at("Mul", half, at("Add", at("Exp", x), at.number(1, out.dtype)))


@register(ops.Log1p)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    """log(u) x / (u - 1) for u = 1 + x, whose errors cancel (Kahan); x where u is 1, log(u) where it is infinite."""
    x, one = at.cast(x, out.dtype), at.number(1, out.dtype)
    u = at("Add", x, one)
    log = at("Log", u)
    near = at("Div", at("Mul", log, x), at("Sub", u, one))
    far = at("Where", at("IsInf", u), log, near)
    return at("Where", at("Equal", u, one), x, far)


@register(ops.Bitwise)
def _(op: Any, at: Nodes, out: Any, x: Value, y: Value) -> Value:
    name = op.operator.capitalize() if out.dtype == "bool" else f"Bitwise{op.operator.capitalize()}"
    return at(name, at.cast(x, out.dtype), at.cast(y, out.dtype))


@register(ops.StopGradient)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return x


@register(ops.StraightThrough)
def _(op: Any, at: Nodes, out: Any, value: Value, x: Value) -> Value:
    return value


# -- products and convolutions -------------------------------------------------------------------------------------------


@register(ops.MatMul)
def _(op: Any, at: Nodes, out: Any, a: Value, b: Value) -> Value:
    """Vectors as matrices: onnxruntime merges a transpose with a product by a vector into other numbers."""
    x, y = at.cast(a, out.dtype), at.cast(b, out.dtype)
    x = at("Unsqueeze", x, at.constant(np.array([0]))) if len(a.shape) == 1 else x
    y = at("Unsqueeze", y, at.constant(np.array([1]))) if len(b.shape) == 1 else y
    vectors = [axis for axis, v in ((-2, a), (-1, b)) if len(v.shape) == 1]
    return at("Squeeze", at("MatMul", x, y), at.constant(np.array(vectors))) if vectors else at("MatMul", x, y)


def layer(name: str) -> Row:
    """Convolutions of any number of axes; needle's padding is (top, left, bottom, right) or a number per axis."""

    def row(op: Any, at: Nodes, out: Any, x: Value, w: Value, bias: Value | None = None) -> Value:
        count = len(x.shape) - 2
        pads = tuple(op.padding) if len(op.padding) == 2 * count else tuple(op.padding) * 2
        crop = [max(0, -p) for p in pads]
        if any(crop):
            raise Unsupported(f"[onnx] {op.label} expects no negative padding, got {op.padding}.")
        more: dict[str, Any] = {"output_padding": list(op.output_padding)} if hasattr(op, "output_padding") else {}
        flat = [at.reshaped(bias, (math.prod(bias.shape),))] if bias else []
        return at(
            name,
            x,
            w,
            *flat,
            strides=list(op.stride),
            pads=list(pads),
            dilations=list(op.dilation),
            group=op.groups,
            **more,
        )

    return row


for cls in (ops.Conv1d, ops.Conv2d, ops.Conv3d):
    register(cls, layer("Conv"))
for cls in (ops.ConvTranspose1d, ops.ConvTranspose2d, ops.ConvTranspose3d):
    register(cls, layer("ConvTranspose"))


# -- normalisation, softmax, pools ---------------------------------------------------------------------------------------


@register(ops.BatchNorm)
def _(op: Any, at: Nodes, out: Any, x: Value, mean: Value, var: Value, weight: Value, bias: Value) -> Value:
    return at("BatchNormalization", x, weight, bias, mean, var, epsilon=float(op.eps))


@register(ops.LayerNorm)
def _(op: Any, at: Nodes, out: Any, x: Value, *rest: Value) -> Value:
    given = iter(rest)
    shape = x.shape[len(x.shape) - op.axes :]
    weight = next(given) if op.has_weight else at.constant(np.ones(shape, x.dtype))
    bias = [next(given)] if op.has_bias else []
    return at("LayerNormalization", x, weight, *bias, axis=-op.axes, epsilon=float(op.eps))


for cls, name in {ops.Softmax: "Softmax", ops.LogSoftmax: "LogSoftmax"}.items():
    register(
        cls, lambda op, at, out, x, name=name: at.with_axis(x, lambda v: at(name, at.cast(v, out.dtype), axis=op.axis))
    )


def pool(name: str, op: Any, at: Nodes, x: Value, **more: Any) -> Value:
    pads = list(op.padding) * 2
    return at(
        name,
        x,
        kernel_shape=list(op.kernel_size),
        strides=list(op.stride),
        pads=pads,
        ceil_mode=int(op.ceil_mode),
        **more,
    )


@register(ops.MaxPool2d)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return pool("MaxPool", op, at, x, dilations=list(op.dilation))


@register(ops.AvgPool2d)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    if op.divisor_override is None:
        return pool("AveragePool", op, at, x, count_include_pad=int(op.count_include_pad))
    ends = [
        (o - 1) * t + k - n - p
        for n, o, k, t, p in zip(x.shape[2:], out.shape[2:], op.kernel_size, op.stride, op.padding, strict=True)
    ]
    pads = np.array([0, 0, *op.padding, 0, 0, *(max(0, e) for e in ends)], "int64")
    padded = at("Pad", x, at.constant(pads), at.number(0, x.dtype))
    means = at("AveragePool", padded, kernel_shape=list(op.kernel_size), strides=list(op.stride))
    return at("Mul", means, at.number(math.prod(op.kernel_size) / op.divisor_override, out.dtype))


@register(ops.AdaptiveAvgPool2d)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("GlobalAveragePool", x) if tuple(out.shape[2:]) == (1, 1) else averaged(at, out, x)


def averaged(at: Nodes, out: Any, x: Value) -> Value:
    """Means of parts of unequal sizes: along each axis a product with a matrix of shares."""
    y, last = x, len(x.shape) - 1
    for axis in range(2, len(x.shape)):
        swap = list(range(len(x.shape)))
        swap[axis], swap[last] = last, axis
        matrix = at.constant(shares(x.shape[axis], out.shape[axis], x.dtype).T)
        y = at("Transpose", at("MatMul", at("Transpose", y, perm=swap), matrix), perm=swap)
    return y


def shares(size: int, parts: int, dtype: str) -> np.ndarray:
    matrix = np.zeros((parts, size), dtype)
    for i in range(parts):
        first, last = i * size // parts, -(-(i + 1) * size // parts)
        matrix[i, first:last] = 1 / (last - first)
    return matrix


RESIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "nearest": ("nearest", {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    "nearest-exact": ("nearest", {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}),
    "bicubic": ("cubic", {"cubic_coeff_a": -0.75}),
}


@register(ops.Interpolate)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    if op.mode == "area":
        return averaged(at, out, x)
    if op.antialias:  # by matrices, for ONNX's own filter is another one
        taps = zip(op._taps(x.shape[2:], out.shape[2:]), x.shape[2:], strict=True)
        rows, columns = (at.constant(matrix_of(t, n).astype(out.dtype)) for t, n in taps)
        return at("MatMul", rows, at("MatMul", x, at("Transpose", columns, perm=[1, 0])))
    steps = op._scales(x.shape[2:], out.shape[2:])
    if tuple(out.shape[2:]) == tuple(x.shape[2:]) and any(s != 1 for s in steps):
        return resampled(op, at, out, x)
    mode, more = RESIZED.get(op.mode, ("linear", {}))
    if mode != "nearest":
        more = more | {"coordinate_transformation_mode": "align_corners" if op.align_corners else "half_pixel"}
    axes = list(range(2, len(x.shape)))
    if op.align_corners or all(
        abs(s * o - n) < 1e-6 * n for s, o, n in zip(steps, out.shape[2:], x.shape[2:], strict=True)
    ):
        sizes = at.constant(np.array(out.shape[2:], "int64"))
        return at("Resize", x, at.nothing, at.nothing, sizes, mode=mode, axes=axes, **more)
    return at(
        "Resize", x, at.nothing, at.constant(np.array([1 / s for s in steps], "float32")), mode=mode, axes=axes, **more
    )


def resampled(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    """By the pixels that are read: a runtime copies an image whose size stays, whatever the factor is."""
    y = x
    for axis, taps in enumerate(op._taps(x.shape[2:], out.shape[2:]), 2):
        parts = []
        for numbers, weights in taps:
            part = at("Gather", y, at.constant(numbers.astype("int64")), axis=axis)
            along = [-1 if a == axis else 1 for a in range(len(x.shape))]
            whole = bool((weights == 1).all())
            parts.append(part if whole else at("Mul", part, at.constant(weights.astype(out.dtype).reshape(along))))
        y = at("Sum", *parts) if len(parts) > 1 else parts[0]
    return y


@register(ops.GridSample)
def _(op: Any, at: Nodes, out: Any, x: Value, grid: Value) -> Value:
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(op.mode, op.mode)
    options = {"mode": mode, "padding_mode": op.padding_mode, "align_corners": int(op.align_corners)}
    return at("GridSample", x, at.cast(grid, x.dtype), **options)


# -- reductions ----------------------------------------------------------------------------------------------------------

REDUCED = {
    ops.Summation: "ReduceSum",
    ops.Mean: "ReduceMean",
    ops.Product: "ReduceProd",
    ops.Max: "ReduceMax",
    ops.Min: "ReduceMin",
    ops.LogSumExp: "ReduceLogSumExp",
}


def reduced(op: Any, at: Nodes, out: Any, x: Value, name: str) -> Value:
    dtype = "int64" if out.dtype == "bool" else out.dtype  # ONNX reduces no truths
    number = check_axes(op.label, op.axes, x.shape)
    axes = at.constant(np.array(number, "int64"))
    if not x.shape:
        return at.cast(x, out.dtype)
    if name == "ReduceMean" and any(x.shape[a] == 0 for a in number):  # of which runtimes make 0
        return at("Expand", at.number(math.nan, out.dtype), at.sizes(out.shape))
    return at.cast(at(name, at.cast(x, dtype), axes, keepdims=int(op.keepdims), noop_with_empty_axes=1), out.dtype)


for cls, name in REDUCED.items():
    register(cls, lambda op, at, out, x, name=name: reduced(op, at, out, x, name))


@register(ops.ArgMax)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at.with_axis(x, lambda v: at("ArgMax", at.without_bools(v), axis=op.axis, keepdims=1))


@register(ops.MaxAlong)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    axes = at.constant(np.array([op.axis], "int64"))
    return at.cast(at.with_axis(x, lambda v: at("ReduceMax", at.without_bools(v), axes, keepdims=1)), out.dtype)


@register(ops.CumSum)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at.with_axis(
        x,
        lambda v: at("CumSum", at.cast(v, out.dtype), at.constant(np.array(op.axis, "int64")), reverse=int(op.reverse)),
    )
