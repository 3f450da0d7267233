"""Kernels made one by one, for fixed shapes: each `make_*` compiles a function of arrays whose last one takes the result.

tgt: what it is compiled for, a tvm Target, a dict or a kind as "llvm" and "cuda"; tgt_host: for what calls it. "llvm" is this
machine's CPU. func_name: the function's name in the compiled module. scheduled=False leaves TVM's default loops.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import te, tirx

from needle.tvm.pipeline import target_of

from .schedules import schedule_conv2d, schedule_gpu, schedule_loops, schedule_matmul, schedule_matmul_gpu

Shape = Sequence[int]


def as_target(target: Any, host: Any = "llvm") -> Any:
    """A Target from one, from a dict or from a kind; "llvm" alone is this machine's CPU."""
    if isinstance(target, tvm.target.Target):
        return target
    return target_of() if target == "llvm" else tvm.target.Target(target, host=as_target(host))


def build(tensors: Sequence[Any], target: Any, func_name: str, schedule: Any = None) -> Callable[..., None]:
    """The compiled function of te tensors, inputs before the result. schedule: of (PrimFunc, target), for CPUs."""
    func = te.create_prim_func(list(tensors))
    if target.kind.name == "llvm":
        func = func if schedule is None else schedule(func, target)
    elif tensors[-1].op.name == "matmul":
        func = schedule_matmul_gpu(func)
    else:
        func = schedule_gpu(func, target)
    return tvm.compile(func.with_attr("global_symbol", func_name), target=target)[func_name]


def maker(schedule: Any = None) -> Callable[[Callable[..., Sequence[Any]]], Callable[..., Callable[..., None]]]:
    """Decorator: a function of shapes, numbers and a dtype that gives te tensors, as one that compiles them.

    It takes tgt, tgt_host, func_name and dtype after its own arguments. scheduled=False leaves TVM's default loops.
    """

    def decorate(tensors: Callable[..., Sequence[Any]]) -> Callable[..., Callable[..., None]]:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        *own, dtype = inspect.signature(tensors).parameters.values()
        target = [inspect.Parameter(name, kind) for name in ("tgt", "tgt_host", "func_name")]
        signature = inspect.Signature([*own, *target, dtype.replace(default="float32")])

        @functools.wraps(tensors)
        def make(*args: Any, scheduled: bool = True, **named: Any) -> Callable[..., None]:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            given = bound.arguments
            tgt, host, name = (given.pop(p.name) for p in target)
            return build(tensors(**given), as_target(tgt, host), name, schedule if scheduled else None)

        make.__signature__ = signature  # type: ignore[attr-defined]
        return make

    return decorate


def elementwise(f: Callable[..., Any], shapes: Sequence[Shape], dtype: str) -> list[Any]:
    """A function of elements at one place of arrays of one shape."""
    ins = [te.placeholder(tuple(s), dtype, name=f"x{i}") for i, s in enumerate(shapes)]
    return [*ins, te.compute(ins[0].shape, lambda *at: f(*(x(*at) for x in ins)), name="elementwise")]


@maker(schedule_loops)
def make_elemwise_add(shape: Shape, dtype: str) -> Sequence[Any]:
    """f(a, b, out): out = a + b."""
    return elementwise(lambda a, b: a + b, [shape, shape], dtype)


@maker(schedule_loops)
def make_elemwise_mul(shape: Shape, dtype: str) -> Sequence[Any]:
    """f(a, b, out): out = a * b."""
    return elementwise(lambda a, b: a * b, [shape, shape], dtype)


@maker(schedule_loops)
def make_elemwise_add_by_const(shape: Shape, const_k: float, dtype: str) -> Sequence[Any]:
    """f(a, out): out = a + const_k."""
    return elementwise(lambda a: a + tirx.const(const_k, dtype), [shape], dtype)


@maker(schedule_loops)
def make_elemwise_mul_by_const(shape: Shape, const_k: float, dtype: str) -> Sequence[Any]:
    """f(a, out): out = a * const_k."""
    return elementwise(lambda a: a * tirx.const(const_k, dtype), [shape], dtype)


@maker(schedule_loops)
def make_relu(shape: Shape, dtype: str) -> Sequence[Any]:
    """f(a, out): out = max(a, 0)."""
    return elementwise(lambda a: tirx.max(a, tirx.const(0, dtype)), [shape], dtype)


@maker(schedule_loops)
def make_relu_gradient(shape: Shape, dtype: str) -> Sequence[Any]:
    """f(a, grad, out): out = grad where a > 0, else 0; a is what relu took or what it gave."""
    zero = tirx.const(0, dtype)
    return elementwise(lambda a, g: tirx.Select(a > zero, g, zero), [shape, shape], dtype)


@maker(schedule_loops)
def make_sgd_update(shape: Shape, learning_rate: float, dtype: str) -> Sequence[Any]:
    """f(value, grad, out): out = value - learning_rate * grad."""
    rate = tirx.const(learning_rate, dtype)
    return elementwise(lambda w, g: w - rate * g, [shape, shape], dtype)


@maker(schedule_loops)
def make_broadcast_to(shape: Shape, to_shape: Shape, dtype: str) -> Sequence[Any]:
    """f(a, out): out = a with axes of size 1 stretched and leading axes added."""
    shape, to_shape = tuple(shape), tuple(to_shape)
    lead = len(to_shape) - len(shape)
    if lead < 0 or any(s not in (1, t) for s, t in zip(shape, to_shape[lead:], strict=True)):
        raise ValueError(f"[make_broadcast_to] shape {shape} does not broadcast to {to_shape}.")
    a = te.placeholder(shape, dtype, name="a")

    def at(*index: Any) -> Any:
        return a(*(0 if s == 1 else i for s, i in zip(shape, index[lead:], strict=True)))

    return [a, te.compute(to_shape, at, name="broadcast_to")]


@maker()
def make_reduce_sum_axis_zero(shape: Shape, dtype: str) -> Sequence[Any]:
    """f(a, out): out = the sum of a over its first axis."""
    rows, *rest = shape
    a, r = te.placeholder(tuple(shape), dtype, name="a"), te.reduce_axis((0, rows), name="r")
    out = te.compute(tuple(rest) or (1,), lambda *i: te.sum(a(r, *(i if rest else ())), axis=r), name="reduce_sum")
    return [a, out]


@maker(schedule_matmul)
def make_matrix_mul(shape_a: Shape, transpose_a: bool, shape_b: Shape, transpose_b: bool, dtype: str) -> Sequence[Any]:
    """f(a, b, out): out = a @ b of matrices, either one transposed first."""
    a, b = te.placeholder(tuple(shape_a), dtype, name="a"), te.placeholder(tuple(shape_b), dtype, name="b")
    return a, b, matmul_te(a, b, transpose_a, transpose_b)


def matmul_te(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """a @ b of matrices, either one transposed first, as block `matmul` for `schedule_matmul`."""
    m, k = reversed(a.shape) if transpose_a else a.shape
    rows, n = reversed(b.shape) if transpose_b else b.shape
    if int(k) != int(rows):
        raise ValueError(
            f"[make_matrix_mul] b expects {k} rows, got {rows}, for {tuple(a.shape)} and {tuple(b.shape)}."
        )
    r = te.reduce_axis((0, k), name="k")
    left = (lambda i: a[r, i]) if transpose_a else lambda i: a[i, r]
    right = (lambda j: b[j, r]) if transpose_b else lambda j: b[r, j]
    return te.compute((m, n), lambda i, j: te.sum(left(i) * right(j), axis=r), name="matmul")


def conv2d_te(x: Any, w: Any, padding: int = 0, stride: int = 1) -> Any:
    """Convolution (N, C, H, W) with (O, C, KH, KW) as blocks `padded` and `conv2d`, for `schedule_conv2d`."""
    (n, c, height, width), (o, _, kh, kw) = x.shape, w.shape
    size = [(s + 2 * padding - k) // stride + 1 for s, k in ((height, kh), (width, kw))]
    if padding:
        inside = lambda y, z: tirx.all(y >= padding, y < height + padding, z >= padding, z < width + padding)  # noqa: E731
        image = x
        x = te.compute(
            (n, c, height + 2 * padding, width + 2 * padding),
            lambda b, d, y, z: tirx.if_then_else(
                inside(y, z), image[b, d, y - padding, z - padding], tirx.const(0, image.dtype)
            ),
            name="padded",
        )
    rc, ri, rj = (te.reduce_axis((0, s), name=name) for s, name in ((c, "c"), (kh, "i"), (kw, "j")))
    return te.compute(
        (n, o, *size),
        lambda b, f, y, z: te.sum(x[b, rc, y * stride + ri, z * stride + rj] * w[f, rc, ri, rj], axis=[rc, ri, rj]),
        name="conv2d",
    )


@maker(schedule_conv2d)
def make_conv2d(shape_x: Shape, shape_w: Shape, dtype: str) -> Sequence[Any]:
    """f(x, w, out): the convolution of images (N, C, H, W) with (O, C, KH, KW), stride 1, no padding."""
    if shape_x[1] != shape_w[1]:
        raise ValueError(f"[make_conv2d] weight expects {shape_x[1]} input channels, got {shape_w[1]}.")
    x, w = te.placeholder(tuple(shape_x), dtype, name="x"), te.placeholder(tuple(shape_w), dtype, name="w")
    return [x, w, conv2d_te(x, w)]


def row_statistics(a: Any) -> tuple[Any, Any]:
    """Largest value of every row of a matrix, and the sum of e ** (x - largest)."""
    n, c = a.shape
    k, r = te.reduce_axis((0, c), name="k"), te.reduce_axis((0, c), name="r")
    largest = te.compute((n,), lambda i: te.max(a[i, k], axis=k), name="largest")
    return largest, te.compute((n,), lambda i: te.sum(tirx.exp(a[i, r] - largest[i]), axis=r), name="total")


@maker()
def make_matrix_softmax(shape: Shape, dtype: str) -> Sequence[Any]:
    """f(a, out): softmax of every row of a matrix."""
    a = te.placeholder(tuple(shape), dtype, name="a")
    largest, total = row_statistics(a)
    out = te.compute(a.shape, lambda i, j: tirx.exp(a[i, j] - largest[i]) / total[i], name="softmax")
    return [a, out]


@maker()
def make_matrix_softmax_cross_entropy(shape: Shape, dtype: str) -> Sequence[Any]:
    """f(logits, labels, out): mean over the rows of -sum(labels * log softmax(logits)); labels in rows, out (1,)."""
    a, y = (te.placeholder(tuple(shape), dtype, name=name) for name in ("logits", "labels"))
    rows, classes = shape
    largest, total = row_statistics(a)
    i, j = te.reduce_axis((0, rows), name="i"), te.reduce_axis((0, classes), name="j")
    losses = te.compute(
        (1,), lambda _: te.sum(y[i, j] * (tirx.log(total[i]) + largest[i] - a[i, j]), axis=[i, j]), name="losses"
    )
    mean = te.compute((1,), lambda _: losses[0] / tirx.const(rows, dtype), name="mean")
    return [a, y, mean]
