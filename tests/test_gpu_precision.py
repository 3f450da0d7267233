"""compile on GPU devices: precisions of products, and ops that a device has no kernel for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import needle as ndl
from gpu_nets import close, exact, image, make, resnet_on
from needle import nn
from needle.autograd import Op, Spec, Tensor
from needle.backend_ndarray import Device, NDArray, NoKernel
from needle.backend_ndarray.kernels import call


class TestPrecision:
    ERRORS = {"float32": 1e-6, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 2e-2}

    @pytest.mark.parametrize("precision", ERRORS)
    def test_products(self, gpu: Device, precision: str) -> None:
        net, x = make("mlp"), image(20, 12)
        want = exact(net, x)[0]
        net.to(gpu)
        exe = ndl.compile(net, x, precision=precision)
        error = max(np.abs(exe(x) - want).max() for _ in range(2)) / np.abs(want).max()
        assert error < self.ERRORS[precision]
        if precision in ("float16", "bfloat16"):
            assert error > 1e-5
        assert str(exe.plan).count(precision) == (0 if precision == "float32" else 2)

    def test_convolutions(self, gpu: Device) -> None:
        net, x, want = resnet_on(gpu, fused=True)
        exe = ndl.compile(net, x, precision="bfloat16")
        error = np.abs(exe(x) - want[0]).max() / np.abs(want[0]).max()
        assert 1e-5 < error < 5e-2
        assert exe.plan.precisions[0] == "bfloat16" and exe.plan.precisions[1] == ""

    @pytest.mark.parametrize("precision", ERRORS)
    def test_attention(self, gpu: Device, precision: str) -> None:
        q, k, v = (image(2, 3, n, 16, seed=n) for n in (20, 70, 71))
        v, mask = v[..., :70, :], image(20, 70) > -1
        mask[4] = False

        def net(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return ndl.ops.scaled_dot_product_attention(q, k, v, mask)

        s = np.where(mask, q.astype(float) @ k.swapaxes(-1, -2) / 4, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
        want = p / np.maximum(p.sum(-1, keepdims=True), 1e-300) @ v
        ins = (*(NDArray(np.ascontiguousarray(a), gpu) for a in (q, k, v)), NDArray(mask, gpu, "bool"))
        exe = ndl.compile(net, ins, precision=precision)
        step = exe.plan.names.index("attention_fused")
        assert exe.plan.precisions[step] == ("" if precision == "float32" else precision)
        found = [exe(*ins).numpy() for _ in range(2)]
        assert np.array_equal(*found, equal_nan=True)
        found[0][..., 4, :] = 0
        error = np.abs(found[0] - want).max() / np.abs(want).max()
        assert error < self.ERRORS[precision]
        if precision in ("float16", "bfloat16"):
            assert error > 1e-5

    def test_integers_stay_exact(self, gpu: Device) -> None:
        a = np.full((3, 3), 2**40 + 1)
        exe = ndl.compile(lambda x: x @ x, NDArray(a, gpu, "int64"), precision="float16")
        assert np.array_equal(exe(NDArray(a, gpu, "int64")).numpy(), a @ a)

    def test_errors(self, gpu: Device) -> None:
        net, x, _ = resnet_on(ndl.cpu())
        with pytest.raises(ValueError, match=r"^\[compile\] precision expects float32 on cpu\(\), got 'float16'\.$"):
            ndl.compile(net, x, precision="float16")
        with pytest.raises(ValueError, match=r"\[compile\] precision expects one of float32, tf32, .* got 'half'\.$"):
            ndl.compile(net, x, precision="half")
        x, found = NDArray(image(9, 8), gpu), NDArray(image(9, 8), gpu)
        with pytest.raises(RuntimeError, match=r"^\[attention\] precision is 0 .* or 3 \(bfloat16\), got 4\.$"):
            call("attention_fused", [found], q=x, k=x, v=x, scale=1, causal=0, strict=0, precision=4)


class Twice(Op):
    """An op whose kernel no device has."""

    def infer(self, x: Any) -> Spec:
        return Spec(tuple(x.shape), x.dtype)

    def compute(self, x: NDArray) -> NDArray:
        x + x  # a step that must not stay
        return NDArray.made("no_such_kernel", [x], x.dtype, x.shape, x.shape)


class Doubled(Twice):
    def decompose(self, x: Tensor) -> Tensor:
        return x + x


class TestDecomposed:
    def test_counted(self, gpu: Device) -> None:
        doubled = lambda x: Doubled()(x + 1) + Doubled()(x)  # noqa: E731
        exe = ndl.compile(doubled, NDArray(image(3), gpu), disable=["ElementwiseChain"])
        assert exe.plan.names == ["add_scalar", "add", "add", "add"]
        close(exe(NDArray(image(3), gpu)), [4 * image(3) + 2])
        assert exe.last.decomposed == {f"doubled on {gpu.name}": 2}
        text = str(ndl.profile(exe, NDArray(image(3), gpu), rounds=1))
        assert f"run as other ops: doubled on {gpu.name} 2x" in text

    def test_without_decomposition(self, gpu: Device) -> None:
        with pytest.raises(NoKernel, match=r"^\[twice\] has neither a kernel .* no such kernel on \w+\(\), which has"):
            ndl.compile(lambda x: Twice()(x), NDArray(image(3), gpu))

    def test_dtype_without_a_kernel(self, gpu: Device) -> None:
        conv = nn.Conv(2, 2, 1, layout="torch")
        conv.to(gpu, "float64")
        with pytest.raises(NoKernel, match=r"^\[conv2d\] has neither a kernel for these inputs nor a decomposition: "):
            ndl.compile(conv, NDArray(np.ones((1, 2, 3, 3)), gpu, "float64"))


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_training_steps(gpu: Device, precision: str) -> None:
    """All products of a step, those of its gradients, too; the parameters stay float32."""

    def losses(device: Any, **options: Any) -> list[float]:
        np.random.seed(1)
        net = nn.Sequential(
            *(
                nn.Conv(3, 8, 3, padding=1, layout="torch"),
                nn.ReLU(),
                nn.Conv(8, 8, 3, padding=1, stride=2, layout="torch"),
            ),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)),
        ).to(device)
        x, y = np.random.randn(12, 3, 8, 8).astype("float32"), np.arange(12) % 5
        step = ndl.compile_step(net, ndl.ops.cross_entropy, ndl.optim.SGD(net.parameters(), lr=0.1), (x, y), **options)
        found = [float(step(x, y)) for _ in range(4)]
        if options:
            names = dict(zip(step.plan.names, step.plan.precisions, strict=True))
            told = options["precision"] if options["precision"] != "float32" else ""
            assert names["conv2d_weight_grad_fused"] == names["conv_transpose2d_fused"] == told
        return found

    apart = np.abs(np.subtract(losses(gpu, precision=precision), losses(ndl.cpu()))).max()
    assert apart < {"float32": 1e-6, "tf32": 2e-3, "bfloat16": 2e-2}[precision]
    assert precision == "float32" or apart > 1e-7
    if precision != "float32":
        with pytest.raises(ValueError, match="precision expects float32 on cpu"):
            losses(ndl.cpu(), precision=precision)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_layers_finish_with_what_follows(gpu: Device, precision: str) -> None:
    """Sums of a residual branch, and activations, in nets that nobody fused; a sum goes where its residual lay."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(a, b) for a, b in ((12, 20), (20, 12), (12, 12)))
            self.conv, self.up = nn.Conv(3, 4, 3, padding=1, layout="torch"), nn.ConvTranspose2d(4, 3, 2, 2)

        def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
            x = ndl.ops.relu(x)  # memory of its own
            x = x + self.second(ndl.ops.gelu(self.first(x)))
            a = ndl.ops.tanh(self.third(x) + x)
            return a, ndl.ops.sigmoid(self.up(ndl.ops.relu(self.conv(image))))

    net = Net()
    inputs = image(2, 5, 12), image(2, 3, 6, 6)
    want = [r.numpy() for r in net(*(Tensor(v) for v in inputs))]
    net.to(gpu)
    exe = ndl.compile(net, inputs, precision=precision)
    for _ in range(4):
        for a, b in zip(exe(*inputs), want, strict=True):
            assert np.abs(a - b).max() < (1e-5 if precision == "float32" else 2e-2)
    assert exe.plan.names == ["relu", *["matmul_fused"] * 3, "conv2d_fused", "conv_transpose2d_fused", "copy"]


@pytest.mark.parametrize("size", [(1, 1), (4, 1), (3, 5)])
@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (4, 1), (6, 2), (5, 5)])
def test_group_norms_between_convolutions(gpu: Device, channels: int, groups: int, size: tuple[int, int]) -> None:
    """Their images lie as (N, H, W, C), in which groups are no rows; an empty batch, too."""
    net = nn.Sequential(
        *(nn.Conv(3, channels, 3, padding=1, layout="torch"), nn.GroupNorm(groups, channels), nn.ReLU()),
        nn.Conv(channels, 2, 1, layout="torch"),
    )
    x = image(3, 3, *size)
    want = exact(net, x)
    net.to(gpu)
    exe = ndl.compile(net, x)
    for _ in range(2):
        close(exe(x), want)
    assert exe.plan.names == ["conv2d_fused", "group_norm", "conv2d_fused"]
    assert exe(x[:0]).shape == (0, 2, *size)
