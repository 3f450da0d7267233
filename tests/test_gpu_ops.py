"""Every op's samples on GPU devices against float64: values, strided inputs, gradients."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle.autograd import Op, Tensor
from needle.backend_ndarray import Device, NDArray, NoKernel
from needle.backend_ndarray.kernels import KERNELS
from test_gpu import ROOT
from test_ops import (
    CASES,
    STEPS,
    assert_close,
    assert_gradients_close,
    case,
    cotangents,
    differentiable,
    float32_exact,
    gradients,
    run,
    tensors,
)

# CPU layouts and plans: no device has these.
CPU_ONLY = set(re.findall(r"^KERNEL\((\w+), CPU,", (ROOT / "csrc/kernels/kernels.def").read_text(), re.M))


def test_the_table_has_the_kernels_of_the_cpu(gpu: Device) -> None:
    assert set(KERNELS) - set(gpu.kernels) == CPU_ONLY
    for name, kernel in gpu.kernels.items():
        if name in KERNELS:
            same = KERNELS[name]
            assert (kernel.inputs, kernel.outputs, kernel.attrs) == (same.inputs, same.outputs, same.attrs)
            assert set(kernel.dtypes) <= set(same.dtypes)


def leaves(arrays: list[np.ndarray], device: Device, strided: bool = False) -> list[Tensor]:
    made = []
    for a in arrays:
        floating = a.dtype.kind == "f"
        a = a.astype("float32") if floating else a
        if strided and a.ndim:
            view = NDArray(np.repeat(a, 2, axis=-1), device, str(a.dtype))[..., ::2]
            made.append(Tensor.make_const(view, requires_grad=floating))
        else:
            made.append(Tensor(a, device=device, dtype=str(a.dtype), requires_grad=floating))
    return made


@pytest.mark.parametrize(("name", "index"), CASES)
def test_kernel_agrees_with_float64(gpu: Device, name: str, index: int) -> None:
    op, arrays = case(name, index)
    arrays = float32_exact(arrays)
    strided = index % 2 == 1
    got = run(op, [x.detach() for x in leaves(arrays, gpu, strided)])
    for a, b in zip(got, run(op, tensors(arrays, True)), strict=True):
        assert a.device == gpu
        assert_close(a.numpy().astype("float64"), b.numpy().astype("float64"))


FIRST = [p for p in CASES if p.values[1] == 0 and p.values[0] not in STEPS]


@pytest.mark.parametrize(("name", "index"), FIRST)
def test_gradient_agrees_with_float64(gpu: Device, name: str, index: int) -> None:
    op, arrays = case(name, index)
    if not differentiable(name, op, arrays):
        pytest.skip("no gradient by definition")
    arrays = float32_exact(arrays)
    weights = float32_exact(cotangents(op, arrays))
    got = gradients(op, leaves(arrays, gpu), weights)
    want = gradients(op, tensors(arrays, True), weights)
    assert all(g is None or g.device == gpu for g in got)
    assert_gradients_close(got, want)


class TestFallback:
    def test_counted_and_in_the_profile(self, gpu: Device) -> None:
        class Net(ndl.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return Doubled()(x) + 1

        x = Tensor([1.0, 2.0], device=gpu)
        assert Net()(x).numpy().tolist() == [3, 5]
        profile = ndl.profile(Net(), x, rounds=1)
        assert profile.decomposed == {f"doubled on {gpu.name}": 1}
        assert f"run as other ops: doubled on {gpu.name} 1x" in str(profile)

    def test_without_decomposition(self, gpu: Device) -> None:
        with pytest.raises(
            NoKernel, match=r"^\[missing\] has neither .* no such kernel on \w+\(\), which has abs, .*\.$"
        ):
            Missing()(Tensor([1.0], device=gpu, requires_grad=False))


class Missing(Op):
    def infer(self, x: Any) -> Any:
        return ndl.autograd.Spec(tuple(x.shape), x.dtype)

    def compute(self, x: NDArray) -> NDArray:
        return NDArray.made("no_such_kernel", [x], x.dtype, x.shape, x.shape)


class Doubled(Missing):
    def decompose(self, x: Tensor) -> Tensor:
        return x + x
