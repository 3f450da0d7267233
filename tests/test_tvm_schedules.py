"""Schedules by hand: their results, their speed beside TVM's default loops, and the CUDA source of the ones for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from tvm import te  # noqa: E402

from needle.course.tvm import kernels, schedules  # noqa: E402
from needle.ops.nn.conv import conv2d_array  # noqa: E402
from needle.tvm import target_of  # noqa: E402


def random(*shape: int) -> np.ndarray:
    return np.random.standard_normal(shape).astype("float32")


def run(f: Callable, want: np.ndarray, *arrays: np.ndarray, device: Any = None) -> None:
    device = device or tvm.cpu()
    out = tvm.runtime.empty(want.shape, "float32", device)
    f(*(tvm.runtime.tensor(a, device) for a in arrays), out)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4)


def product(m: int, k: int, n: int) -> Any:
    a, b = te.placeholder((m, k), name="a"), te.placeholder((k, n), name="b")
    return te.create_prim_func([a, b, kernels.matmul_te(a, b)])


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("size", [(96, 40, 64), (37, 7, 90), (5, 3, 2), (1, 9, 1)], ids=str)
def test_matmul(size: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    m, k, n = size
    a, b = random(m, k), random(k, n)
    given = [np.ascontiguousarray(x.T) if t else x for x, t in zip((a, b), transposed, strict=True)]
    f = kernels.make_matrix_mul(given[0].shape, transposed[0], given[1].shape, transposed[1], "llvm", "llvm", "product")
    run(f, a @ b, *given)


@pytest.mark.parametrize(
    ("image", "weight", "padding", "stride"),
    [
        ((2, 3, 12, 13), (16, 3, 3, 3), 1, 1),
        ((1, 1, 28, 28), (32, 1, 3, 3), 0, 1),
        ((2, 5, 9, 11), (6, 5, 3, 2), 2, 2),
        ((1, 16, 7, 7), (7, 16, 1, 1), 0, 1),
    ],
)
def test_conv2d(image: tuple, weight: tuple, padding: int, stride: int) -> None:
    x, w = te.placeholder(image, name="x"), te.placeholder(weight, name="w")
    func = te.create_prim_func([x, w, kernels.conv2d_te(x, w, padding, stride)])
    made = schedules.schedule_conv2d(func, target_of())
    text = made.script()
    assert all(f"T.{kind}(" in text for kind in ("parallel", "vectorized", "unroll")) and "conv2d_init" in text
    assert "padded" not in text  # computed in place
    arrays = random(*image), random(*weight)
    size = tuple((s + 2 * padding - k) // stride + 1 for s, k in zip(image[2:], weight[2:], strict=True))
    want = conv2d_array(*arrays, (stride, stride), (padding,) * 4, (1, 1), 1)
    assert want.shape[2:] == size
    run(tvm.compile(made, target=target_of())["main"], want, *arrays)


def test_scheduled_matmul() -> None:
    """512^3 in float32, scheduled and by TVM's default loops; profiling/results/tvm/matmul.json has their times."""
    n = 512
    a, b, out = random(n, n), random(n, n), tvm.runtime.empty((n, n), "float32")
    arrays = [tvm.runtime.tensor(a), tvm.runtime.tensor(b), out]
    for scheduled in (True, False):
        kernels.make_matrix_mul((n, n), False, (n, n), False, "llvm", "llvm", "product", scheduled=scheduled)(*arrays)
        np.testing.assert_allclose(out.numpy(), a @ b, rtol=1e-3, atol=1e-3)


# -- GPUs ----------------------------------------------------------------------------------------------------------------

HAS_CUDA = tvm.cuda(0).exist
GPU = {
    "window sum": (lambda: schedules.schedule_window_sum_gpu(schedules.window_sum(1000, 3)), [(1002,)]),
    "matmul local": (lambda: schedules.schedule_matmul_gpu(product(128, 70, 90), shared=False), [(128, 70), (70, 90)]),
    "matmul shared": (lambda: schedules.schedule_matmul_gpu(product(128, 64, 192)), [(128, 64), (64, 192)]),
    "matmul shared, odd": (lambda: schedules.schedule_matmul_gpu(product(100, 70, 90)), [(100, 70), (70, 90)]),
}


@pytest.mark.parametrize("name", GPU)
def test_gpu_source(name: str) -> None:
    source = schedules.cuda_source(GPU[name][0]())
    body = source[source.index("__global__") :]
    shared = 0 if "local" in name else 1 if "window" in name else 2
    assert body.count("__shared__") == shared
    assert ("__syncthreads" in body) == bool(shared)
    assert "threadIdx.x" in body and "blockIdx.x" in body
    if "window" in name:
        assert "__launch_bounds__(128)" in body and "x_shared_ptr[130]" in body
    else:
        assert "__launch_bounds__(64)" in body and "local_ptr[64]" in body  # 8 x 8 threads, 8 x 8 results each


def test_gpu_kernels_of_the_makers() -> None:
    """Everything that is no product gets one thread per result."""
    target = tvm.target.Target(schedules.CUDA, host="llvm")
    made = schedules.schedule_gpu(schedules.window_sum(100, 3), target)
    assert "threadIdx.x" in schedules.cuda_source(made, target)


@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("name", GPU)
def test_gpu_results(name: str) -> None:
    make, shapes = GPU[name]
    arrays = [random(*s) for s in shapes]
    want = np.lib.stride_tricks.sliding_window_view(arrays[0], 3).sum(1) if len(arrays) == 1 else arrays[0] @ arrays[1]
    target = tvm.target.Target.from_device(tvm.cuda(0))
    run(tvm.compile(make(), target=tvm.target.Target(target, host="llvm"))["main"], want, *arrays, device=tvm.cuda(0))
