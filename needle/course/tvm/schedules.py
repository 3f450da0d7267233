"""Schedules by hand: matrix products and convolutions for CPUs, window sums and matrix products for GPUs.

Each takes a PrimFunc with one block of the given name, in its default loops, and returns it with better ones; `Schedule`
proves that the result stays the same. Sizes need not be multiples of the tiles: what is left is padded or guarded.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, te
from tvm.s_tir import dlight
from tvm.target import codegen

NARROWEST = 128  # bits of the vectors that every 64-bit CPU has
ROWS = {16: 12, 8: 6, 4: 4}  # rows of a matrix tile by lanes: with two vectors per row they fill the registers
PARALLEL_FROM = 1 << 16  # elements; fewer take less time than waking threads
SHARED = "shared"


def lanes(target: Any) -> int:
    """float32 values in one vector of a CPU."""
    return max(int(codegen.llvm_get_vector_width(target)), NARROWEST) // 32


def largest_divisor(n: int, limit: int) -> int:
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def tile_rows(m: int, most: int) -> int:
    """Rows of a tile, at most `most`, that pad m rows least."""
    return min(range(min(m, most), min(m, most) // 2, -1), key=lambda rows: -(-m // rows) * rows)


def local_result(s: Any, product: Any, written: Any) -> Any:
    """Keeps a block's result in registers; the block that writes it out, which may be the copy that drops the padding."""
    if not written:
        return s.cache_write(product, 0, "local")
    s.set_scope(product, 0, "local")
    return written[0]


def schedule_matmul(func: Any, target: Any, block: str = "matmul") -> Any:
    """For CPUs: block(i, j) summed over k, operands transposed or not.

    Tiles of the result stay in registers over all of k; the second operand is packed into panels as wide as a tile.
    """
    s = s_tir.Schedule(func)
    width = lanes(target)
    product = s.get_sblock(block)
    m, n = (int(s.get(loop).extent) for loop in s.get_loops(product)[:2])
    rows, columns = tile_rows(m, ROWS[min(width, 16)]), 2 * width
    operands = [str(r.source.name) for r in s.get(product).reads]
    second = s.get(product).reads[1]
    j_first = second.region[0].min.same_as(s.get(product).iter_vars[1].var)
    s.pad_einsum(product, [rows, columns, 1])
    padding = {s.get(p).name_hint: p for p in s.get_producers(product)}
    written = s.get_consumers(product)
    packed = s.cache_read(product, 1, "global")
    if j_first:
        s.transform_layout(product, ("read", 1), lambda j, k: (j // columns, k, j % columns))
    else:
        s.transform_layout(product, ("read", 1), lambda k, j: (j // columns, k, j % columns))
    if f"{operands[1]}_pad" in padding:
        s.compute_inline(padding[f"{operands[1]}_pad"])
    if f"{operands[0]}_pad" in padding:
        s.parallel(s.get_loops(padding[f"{operands[0]}_pad"])[0])
    s.parallel(s.get_loops(packed)[0])

    i, j, k = s.get_loops(product)
    io, ii = s.split(i, [None, rows])
    jo, ji = s.split(j, [None, columns])
    s.reorder(io, jo, k, ii, ji)
    out = local_result(s, product, written)
    s.reverse_compute_at(out, jo)
    s.parallel(io if m > rows else jo)
    s.unroll(ii)
    s.vectorize(ji)
    if n % columns == 0:
        s.vectorize(s.get_loops(out)[-1])
    start = s.decompose_reduction(product, k)
    *_, row, column = s.get_loops(start)
    s.unroll(row)
    s.vectorize(column)
    return s.mod["main"]


def schedule_loops(func: Any, target: Any) -> Any:
    """For CPUs: the last block, whose results do not depend on each other, in vectors on all cores."""
    s = s_tir.Schedule(func)
    (last,) = s.get_output_blocks(s.get_sblock("root"))
    outer, inner = s.split(s.fuse(*s.get_loops(last)), [None, lanes(target)])
    if s.get(outer).extent.value * lanes(target) >= PARALLEL_FROM:
        s.parallel(outer)
    s.vectorize(inner)
    return s.mod["main"]


def schedule_conv2d(func: Any, target: Any, block: str = "conv2d") -> Any:
    """For CPUs: block(n, o, y, x) summed over (c, i, j); a block before it that pads the images is computed in place.

    A vector holds output channels; the weights are packed for it.
    """
    s = s_tir.Schedule(func)
    conv = s.get_sblock(block)
    for padding in s.get_producers(conv):
        s.compute_inline(padding)
    extents = [int(s.get(loop).extent) for loop in s.get_loops(conv)]
    channels, pixels = largest_divisor(extents[1], lanes(target)), largest_divisor(extents[3], 16)

    packed = s.cache_read(conv, 1, "global")
    s.transform_layout(conv, ("read", 1), lambda o, c, i, j: (o // channels, c, i, j, o % channels))
    s.parallel(s.get_loops(packed)[0])
    out = s.cache_write(conv, 0, "local")
    s.transform_layout(conv, ("write", 0), lambda n, o, y, x: (n, o // channels, y, x, o % channels))
    n, o, y, x, c, i, j = s.get_loops(conv)
    oo, oi = s.split(o, [None, channels])
    xo, xi = s.split(x, [None, pixels])
    s.reorder(n, oo, y, xo, c, i, j, xi, oi)
    s.reverse_compute_at(out, xo)
    s.parallel(s.fuse(n, oo, y))
    s.unroll(j)
    s.unroll(xi)
    s.vectorize(oi)
    start = s.decompose_reduction(conv, c)
    *_, pixel, lane = s.get_loops(start)
    s.unroll(pixel)
    s.vectorize(lane)
    return s.mod["main"]


# -- GPUs ----------------------------------------------------------------------------------------------------------------


def window_sum(length: int, window: int, dtype: str = "float32") -> Any:
    """out[i] = the sum of x[i : i + window]; x has length + window - 1 elements."""
    x = te.placeholder((length + window - 1,), dtype, name="x")
    r = te.reduce_axis((0, window), name="r")
    out = te.compute((length,), lambda i: te.sum(x[i + r], axis=r), name="window_sum")
    return te.create_prim_func([x, out])


def fetch_together(s: Any, copy: Any, at: Any, threads: dict[str, int]) -> None:
    """The threads of a group share the work of a copy to shared memory, neighbours reading neighbours."""
    s.compute_at(copy, at)
    axes = len(s.get(copy).iter_vars)
    fused = s.fuse(*s.get_loops(copy)[-axes:])
    for loop, axis in zip(s.split(fused, [None, *threads.values()])[1:], threads, strict=True):
        s.bind(loop, axis)


def schedule_window_sum_gpu(func: Any, threads: int = 128, block: str = "window_sum") -> Any:
    """One thread per result; a group fetches its stretch of x into shared memory together."""
    s = s_tir.Schedule(func)
    sums = s.get_sblock(block)
    i, r = s.get_loops(sums)
    group, thread = s.split(i, [None, threads])
    s.bind(group, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    stretch = s.cache_read(sums, 0, SHARED)
    fetch_together(s, stretch, group, {"threadIdx.x": threads})
    out = s.cache_write(sums, 0, "local")
    s.reverse_compute_at(out, thread)
    s.decompose_reduction(sums, r)
    return s.mod["main"]


def schedule_matmul_gpu(func: Any, shared: bool = True, tile: int = 8, threads: int = 8, depth: int = 8) -> Any:
    """Each of threads x threads threads keeps a tile x tile part of the product in registers.

    shared: a group fetches `depth` columns and rows of both operands into shared memory together before it uses them.
    """
    s = s_tir.Schedule(func)
    product = s.get_sblock("matmul")
    side = tile * threads
    s.pad_einsum(product, [side, side, depth])
    padding, written = s.get_producers(product), s.get_consumers(product)
    copies = [s.cache_read(product, index, SHARED if shared else "local") for index in (0, 1)]
    for p in padding:
        s.compute_inline(p)
    out = local_result(s, product, written)
    i, j, k = s.get_loops(product)
    by, ty, yi = s.split(i, [None, threads, tile])
    bx, tx, xi = s.split(j, [None, threads, tile])
    ko, ki = s.split(k, [None, depth])
    s.reorder(by, bx, ty, tx, ko, ki, yi, xi)
    for loop, axis in ((by, "blockIdx.y"), (bx, "blockIdx.x"), (ty, "threadIdx.y"), (tx, "threadIdx.x")):
        s.bind(loop, axis)
    s.reverse_compute_at(out, tx)
    for copy in copies:
        if shared:
            fetch_together(s, copy, ko, {"threadIdx.y": threads, "threadIdx.x": threads})
        else:
            s.compute_at(copy, ki)
    for loop in (ki, yi, xi):
        s.unroll(loop)
    s.decompose_reduction(product, ko)
    return s.mod["main"]


def schedule_gpu(func: Any, target: Any) -> Any:
    """TVM's own rule for any function: one thread per result."""
    with target:
        return dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(tvm.IRModule({"main": func}))["main"]


CUDA = {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}


def cuda_source(func: Any, target: Any = None) -> str:
    """The CUDA source of a GPU schedule; needs neither a device nor CUDA's compiler."""
    built = tvm.compile(func, target=target or tvm.target.Target(CUDA, host="llvm"))
    return built.mod.imports[0].inspect_source()
