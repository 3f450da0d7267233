"""Operators of Relax with torch's signatures, for imports: expressions and numbers in, an expression or numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax

from needle.op import Unsupported

op = relax.op


def is_expression(value: Any) -> bool:
    return isinstance(value, tvm.ir.Expr)


def sizes(x: Any) -> tuple[int, ...]:
    return tuple(int(s) for s in x.ty.shape)


def pair(value: Any) -> list[int]:
    return [int(v) for v in (value if isinstance(value, tuple | list) else (value, value))]


def binary(number: Callable, tensors: Callable) -> Callable:
    """A function of two values, tensors or numbers; of numbers alone it is Python's."""

    def f(a: Any, b: Any) -> Any:
        if not is_expression(a) and not is_expression(b):
            return number(a, b)
        dtype = str((a if is_expression(a) else b).ty.dtype)
        if "int" in dtype and (tensors is op.divide or isinstance(a, float) or isinstance(b, float)):
            raise Unsupported(f"[from_fx] {number.__name__} of {dtype} that gives floats is not known here.")
        a, b = (x if is_expression(x) else relax.const(x, dtype) for x in (a, b))
        return tensors(a, b)

    return f


def gelu(input: Any, approximate: str = "none") -> Any:
    return op.nn.gelu_tanh(input) if approximate == "tanh" else op.nn.gelu(input)


def softmax(input: Any, dim: int) -> Any:
    return op.nn.softmax(input, dim)


def log_softmax(input: Any, dim: int) -> Any:
    return op.nn.log_softmax(input, dim)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training:
        raise Unsupported("[from_fx] dropout in training draws numbers; call model.eval() before tracing.")
    return input


def same(input: Any) -> Any:
    return input


# -- shapes --------------------------------------------------------------------------------------------------------------


def size(input: Any, dim: int | None = None) -> Any:
    return sizes(input) if dim is None else sizes(input)[dim]


def item(input: Any, index: Any) -> Any:
    if not is_expression(input):
        return input[index]
    if isinstance(input.ty, relax.TupleType):
        return relax.TupleGetItem(input, index)
    index = list(index) if isinstance(index, tuple) else [index]
    rank = len(sizes(input))
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (rank - len(index) + 1)
    spans: list[tuple[int, int, int, int]] = []
    for axis, (i, n) in enumerate(zip(index, sizes(input), strict=False)):
        if not isinstance(i, int | slice):
            raise Unsupported(f"[from_fx] an index is a number or a slice, got {type(i).__name__}.")
        begin, end, step = i.indices(n) if isinstance(i, slice) else (i % n, i % n + 1, 1)
        spans.append((axis, begin, end, step))
    part = op.strided_slice(input, *map(list, zip(*spans, strict=True)))
    dropped = [axis for axis, i in enumerate(index) if isinstance(i, int)]
    return op.squeeze(part, dropped) if dropped else part


def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = sizes(input)
    first, last = start_dim % len(shape), end_dim % len(shape)
    return op.reshape(input, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def many(f: Callable[[Any, Any], Any]) -> Callable:
    """f(input, numbers), the numbers given one by one or as one tuple."""
    return lambda input, *numbers: f(input, numbers[0] if isinstance(numbers[0], tuple | list) else numbers)


def expand(input: Any, shape: tuple) -> Any:
    own = (1,) * (len(shape) - len(sizes(input))) + sizes(input)
    return op.broadcast_to(input, [o if s == -1 else s for s, o in zip(shape, own, strict=True)])


def transpose(input: Any, dim0: int, dim1: int) -> Any:
    axes = list(range(len(sizes(input))))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return op.permute_dims(input, axes)


def squeeze(input: Any, dim: int | None = None) -> Any:
    return op.squeeze(input, dim)


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return op.concat(list(tensors), dim)


def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode != "constant":
        raise Unsupported(f"[from_fx] pad expects mode constant, got {mode}.")
    widths = [0] * (2 * len(sizes(input)) - len(pad))
    for before, after in reversed(list(zip(pad[::2], pad[1::2], strict=True))):
        widths += [before, after]
    return op.nn.pad(input, widths, "constant", value or 0.0) if any(widths) else input


def reduction(f: Callable) -> Callable:
    return lambda input, dim=None, keepdim=False: f(input, list(dim) if isinstance(dim, tuple) else dim, keepdim)


# -- layers --------------------------------------------------------------------------------------------------------------


def with_bias(y: Any, bias: Any) -> Any:
    return y if bias is None else op.add(y, op.reshape(bias, (1, -1, 1, 1)))


def conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    if isinstance(padding, str):
        if padding == "same" and pair(stride) != [1, 1]:
            raise Unsupported(f"[from_fx] padding same expects stride 1, got {stride}.")
        spare = [d * (k - 1) for d, k in zip(pair(dilation), sizes(weight)[2:], strict=True)]
        padding = [s // 2 for s in spare] + [s - s // 2 for s in spare] if padding == "same" else 0
    pads = list(padding) if isinstance(padding, list) and len(padding) == 4 else pair(padding)
    return with_bias(op.nn.conv2d(input, weight, pair(stride), pads, pair(dilation), groups), bias)


def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    out = op.nn.conv2d_transpose(
        input, weight, pair(stride), pair(padding), pair(output_padding), pair(dilation), groups
    )
    return with_bias(out, bias)


def max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices:
        raise Unsupported("[from_fx] max_pool2d gives no indices here.")
    steps = pair(kernel_size if stride is None else stride)
    return op.nn.max_pool2d(input, pair(kernel_size), steps, pair(padding), pair(dilation), ceil_mode)


def avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    steps = pair(kernel_size if stride is None else stride)
    return op.nn.avg_pool2d(input, pair(kernel_size), steps, pair(padding), (1, 1), ceil_mode, count_include_pad)


def adaptive_avg_pool2d(input: Any, output_size: Any) -> Any:
    wanted = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
    own = sizes(input)[2:]
    return op.nn.adaptive_avg_pool2d(input, [o if w is None else w for w, o in zip(wanted, own, strict=True)])


def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    shape = tuple(normalized_shape)
    weight, bias = (
        relax.op.full(shape, relax.const(value, "float32"), "float32") if w is None else w
        for w, value in ((weight, 1.0), (bias, 0.0))
    )
    return op.nn.layer_norm(input, weight, bias, list(range(-len(shape), 0)), eps)


def embedding(input: Any, weight: Any, padding_idx: int | None = None) -> Any:
    return op.take(weight, input, 0)
