"""compile on GPU devices: values, graphs, fused epilogues, memory, precisions, errors."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
import operator_fusion
import torch2needle
from gpu_devices import DEVICES, gpu_device
from needle import nn
from needle.autograd import Op, Spec, Tensor
from needle.backend_ndarray import Device, NDArray, NoKernel
from needle.graph import symbolic
from test_ops import CASES, assert_close, case, float32_exact, run, tensors


def image(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype="float32")


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + x)"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv(channels, channels, 3, padding=1, layout="torch") for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = ndl.ops.relu(self.norm1(self.conv1(x)))
        return ndl.ops.relu(self.norm2(self.conv2(y)) + x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv(3, 8, 3, stride=2, padding=1, layout="torch"), nn.BatchNorm2d(8)
        self.block, self.depthwise = Block(8), nn.Conv(8, 8, 3, padding=1, groups=8, layout="torch")
        self.head = nn.Linear(8, 5, layout="torch")

    def forward(self, x: Tensor) -> Tensor:
        y = ndl.ops.max_pool2d(ndl.ops.relu(self.norm(self.stem(x))), 2)
        y = ndl.ops.silu(self.depthwise(self.block(y)))
        return self.head(ndl.ops.flatten(ndl.ops.adaptive_avg_pool2d(y, 1), 1))


class UNet(nn.Module):
    """Two levels; gives the map and its softmax over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv(2, 4, 3, padding=1, layout="torch"), nn.Conv(4, 8, 3, padding=1, layout="torch")
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv(12, 3, 1, layout="torch")

    def forward(self, x: Tensor) -> Any:
        a = ndl.ops.relu(self.down(x))
        b = ndl.ops.relu(self.deep(ndl.ops.max_pool2d(a, 2)))
        wide = ndl.ops.interpolate(b, size=a.shape[2:], mode="bilinear")
        up = ndl.ops.relu(self.up(b))
        pads = (0, a.shape[3] - up.shape[3], 0, a.shape[2] - up.shape[2])
        maps = self.last(ndl.ops.concat((ndl.ops.pad(up, pads) + a, wide), 1))
        return {"maps": maps, "shares": ndl.ops.softmax(maps, 1)}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20, layout="torch"), nn.BatchNorm1d(20), nn.GELU(), nn.Linear(20, 5))


def transformer() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        y, (h, c) = self.lstm(x)
        return self.head(ndl.ops.reshape(y, (-1, 5))), h, c


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": (mlp, (3, 12), (10, 12)),
    "resnet": (ResNet, (1, 3, 12, 12), (2, 3, 9, 11)),
    "unet": (UNet, (1, 2, 8, 8), (2, 2, 7, 9)),
    "transformer": (transformer, (1, 7, 16), (2, 5, 16)),
    "lstm": (Lstm, (4, 2, 6), (2, 3, 6)),
}


def make(name: str) -> nn.Module:
    """The same weights in every call; statistics of batch norms are not those of new ones."""
    np.random.seed(0)
    net = NETS[name][0]().eval()
    for _, m in net.named_modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.running_mean, m.running_var, m.weight, m.bias):
                t.data = ndl.Tensor(np.random.rand(*t.shape).astype("float32") + 0.5)
    return net


def fused_form(net: nn.Module, x: np.ndarray) -> nn.Module:
    return operator_fusion.fuse(symbolic(net, (x,)))


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    return [x for v in value for x in leaves(v)] if isinstance(value, tuple | list) else [value]


def arrays(value: Any) -> list[np.ndarray]:
    return [np.asarray(x.numpy() if hasattr(x, "numpy") else x) for x in leaves(value)]


def exact(net: nn.Module, x: np.ndarray) -> list[np.ndarray]:
    """In float64; `net` is on the CPU again afterwards."""
    before = {n: t.numpy() for n, t in net.state_dict().items()}
    net.to(ndl.cpu_numpy(), "float64")
    want = arrays(net(Tensor(x.astype("float64"), device=ndl.cpu_numpy(), dtype="float64")))
    net.to(ndl.cpu(), "float32")
    assert all(np.array_equal(t.numpy(), before[n]) for n, t in net.state_dict().items())
    return want


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    got, want = arrays(got), arrays(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", NETS)
def test_models(gpu: Device, name: str, fused: bool) -> None:
    """Two shapes: step by step, while the graph is made, and as a graph; the same values to the last bit."""
    net = make(name)
    cases = [(x, exact(net, x)) for x in (image(*s) for s in NETS[name][1:])]
    net.to(gpu)
    exe = ndl.compile(fused_form(net, cases[0][0]) if fused else net, cases[0][0])
    for x, want in cases:
        runs = [arrays(exe(x)) for _ in range(3)]
        close(runs[0], want)
        for again in runs[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(runs[0], again, strict=True))
        assert (exe.plan.core.frames, exe.plan.core.graphs) == (1, 1), exe.plan.core.graph_error


@pytest.mark.parametrize(("name", "index"), CASES)
def test_samples(gpu: Device, name: str, index: int) -> None:
    """Every sample of every op, as a plan with its inputs on the device."""
    op, given = case(name, index)
    if hasattr(op, "folded"):
        pytest.skip("folds only into parameters, see test_models")
    given = float32_exact(given)
    want = run(op, tensors(given, True))
    ins = [
        Tensor(a, device=gpu, dtype="float32" if a.dtype.kind == "f" else str(a.dtype), requires_grad=False)
        for a in given
    ]
    exe = ndl.compile(lambda *xs: run(op, list(xs)), tuple(ins))
    for _ in range(2):
        for a, b in zip(exe(*ins), want, strict=True):
            assert a.device == gpu
            assert_close(a.numpy().astype("float64"), b.numpy().astype("float64"))


def resnet_on(device: Device, fused: bool = False) -> tuple[nn.Module, np.ndarray, list[np.ndarray]]:
    net, x = make("resnet"), image(2, 3, 9, 11)
    want = exact(net, x)
    net.to(device)
    return fused_form(net, x) if fused else net, x, want


def test_epilogues(gpu: Device) -> None:
    """Batch norms lie in the weights; bias, residual and activation in the kernels."""
    net, x, want = resnet_on(gpu, fused=True)
    exe = ndl.compile(net, x)
    close(exe(x), want)
    assert exe.plan.names == [
        "conv2d_fused",
        "max_pool2d",
        *["conv2d_fused"] * 3,
        "adaptive_avg_pool2d",
        "matmul",
    ]
    plain, _, _ = resnet_on(gpu)
    assert "batch_norm" not in ndl.compile(plain, x).plan.names


def test_projections_are_one_product(gpu: Device) -> None:
    net = make("transformer")
    net.to(gpu)
    names = ndl.compile(fused_form(net, image(2, 5, 16)), image(2, 5, 16)).plan.names
    assert names.count("matmul") == 4  # joined q, k and v; output; feed-forward twice
    assert names.count("attention") == 1


def test_changed_parameters_are_seen(gpu: Device) -> None:
    net, x, _ = resnet_on(gpu)
    exe = ndl.compile(net, x)
    before = [exe(x) for _ in range(3)][-1]
    for change in (net.norm.running_var, net.block.conv1.weight, net.head.bias):
        change.data = change * 1.5 + 0.25
        now = [arrays(exe(x))[0] for _ in range(2)]
        close(now[0], net(Tensor(x, device=gpu)))
        assert np.array_equal(*now) and np.abs(now[0] - before).max() > 1e-3
        before = now[0]
    assert exe.plan.core.graphs == 1


class TestInputs:
    def test_every_run_reads_its_own(self, gpu: Device) -> None:
        """Also sums that need a kernel's workspace, in a graph."""
        exe = ndl.compile(lambda x: (ndl.ops.tanh(x).sum(), x * 2), NDArray(image(1, 30_000), gpu))
        for seed in range(4):
            x = image(1, 30_000, seed=seed)
            total, double = exe(NDArray(x, gpu))
            assert abs(float(total.numpy()) - np.tanh(x.astype("float64")).sum()) < 1e-2
            assert np.array_equal(double.numpy(), x * 2)
        assert exe.plan.core.graphs == 1

    def test_kinds(self, gpu: Device) -> None:
        """From the device or the CPU's memory, of any strides; results are of the inputs' kind, on the device."""
        net, x, want = resnet_on(gpu)
        exe = ndl.compile(net, x)
        assert isinstance(exe(x), np.ndarray)
        turned = np.ascontiguousarray(x.transpose(0, 3, 2, 1))
        for given in (x, x.astype("float32", order="F"), turned.transpose(0, 3, 2, 1)):
            close(exe(given), want)
        for t in (Tensor(x), Tensor(x, device=gpu), Tensor.make_const(NDArray(turned, gpu).permute((0, 3, 2, 1)))):
            y = exe(t)
            assert isinstance(y, Tensor) and y.device == gpu
            close(y, want)
        place = "cpu" if gpu.name.startswith("emulation") else "cuda"
        for t in {torch.from_numpy(x), torch.from_numpy(x).to(place)}:
            y = exe(t)
            assert isinstance(y, torch.Tensor) and y.device.type == place
            close(y.cpu(), want)

    def test_feeds_may_change_after_the_call(self, gpu: Device) -> None:
        exe = ndl.compile(lambda x: x + 1, np.zeros(70_000, "float32"))
        feed, results = np.empty(70_000, "float32"), []
        for i in range(4):
            feed[:] = i
            results.append(exe(torch.from_numpy(feed)))
        assert [float(r.cpu().min()) for r in results] == [float(r.cpu().max()) for r in results] == [1, 2, 3, 4]

    def test_run_into(self, gpu: Device) -> None:
        exe = ndl.compile(lambda x: x * 3, NDArray(image(4, 6), gpu))
        whole = NDArray(np.zeros((4, 12)), gpu)
        for _ in range(3):
            exe.run_into(whole[:, ::2], NDArray(image(4, 6), gpu))
        assert np.array_equal(whole.numpy()[:, ::2], image(4, 6) * 3)
        assert not whole.numpy()[:, 1::2].any()

    def test_outputs_that_are_inputs_or_constants(self, gpu: Device) -> None:
        p = Tensor(np.ones(3), device=gpu)
        exe = ndl.compile(lambda x: (x, p * 2, x.reshape((3, 2))), NDArray(image(2, 3), gpu))
        for _ in range(2):
            same, constant, view = exe(NDArray(image(2, 3), gpu))
            assert np.array_equal(same.numpy(), image(2, 3)) and constant.numpy().tolist() == [2, 2, 2]
            assert np.array_equal(view.numpy(), image(2, 3).reshape(3, 2))

    def test_empty_batch(self, gpu: Device) -> None:
        net = make("mlp")
        net.to(gpu)
        exe = ndl.compile(net, image(2, 12))
        for _ in range(3):
            assert exe(np.zeros((0, 12), "float32")).shape == (0, 5)


def test_arena_is_reused(gpu: Device) -> None:
    net, x, want = resnet_on(gpu)
    gpu.limit_cache(None)
    exe = ndl.compile(net, x)
    close(exe(x), want)
    memory = exe.memory
    assert memory["arena"] < memory.total
    assert memory["arena"] >= memory["lower_bound"] > 0
    for a in memory.buffers:
        for b in memory.buffers:
            if a is not b and a.first <= b.last and b.first <= a.last:
                assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
    exe(x)
    taken = gpu.memory()["taken"]
    for _ in range(3):
        exe(x)
    assert gpu.memory()["taken"] == taken  # nothing new after the graph is made
    gpu.limit_cache(0)


def test_plans_give_their_memory_back(gpu: Device, no_collector: None) -> None:
    net, x, _ = resnet_on(gpu)
    before = gpu.memory()["used"]
    exe = ndl.compile(net, x)
    for _ in range(3):
        exe(x)
    assert gpu.memory()["used"] > before
    del exe
    gc.collect()
    assert gpu.memory()["used"] == before


def test_no_python_inside_a_run(gpu: Device) -> None:
    net, x, _ = resnet_on(gpu)
    exe = ndl.compile(net, x)
    core, ins = exe.plan.core, [NDArray(x, gpu)._ref]
    frames: list[str] = []
    for _ in range(3):
        sys.setprofile(lambda frame, event, arg: frames.append(frame.f_code.co_name) if event == "call" else None)
        try:
            core.run_new(ins)
        finally:
            sys.setprofile(None)
    assert not frames


def test_threads(gpu: Device) -> None:
    """Runs at the same time have arenas and graphs of their own."""
    net, x, want = resnet_on(gpu)
    exe = ndl.compile(net, x)
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(3):
                close(exe(x), want)
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert 1 <= exe.plan.core.graphs <= exe.plan.core.frames <= 3


class TestGraphs:
    def test_where_there_are_none(self, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        if not gpu.name.startswith("emulation"):
            pytest.skip("a real device has graphs")
        monkeypatch.setenv("NEEDLE_EMULATION_GRAPHS", "0")
        net, x, want = resnet_on(gpu)
        exe = ndl.compile(net, x)
        for _ in range(3):
            close(exe(x), want)
        assert exe.plan.core.graphs == 0
        assert "step by step: [graph] the device refused the call, got operation not permitted" in str(exe.plan)

    def test_the_plan_says_so(self, gpu: Device) -> None:
        exe = ndl.compile(lambda x: x + 1, NDArray(image(3), gpu))
        assert f"on {gpu.name}(), a graph from the second run on" in str(exe.plan)
        for _ in range(2):
            exe(NDArray(image(3), gpu))
        assert f"on {gpu.name}(), one graph" in str(exe.plan)

    def test_another_stream(self, gpu: Device) -> None:
        if not gpu.name.startswith("emulation"):
            pytest.skip("numbers of streams are made up")
        exe = ndl.compile(lambda x: ndl.ops.exp(x) + 1, NDArray(image(30), gpu))
        for stream in (0, 7, 7, 0):
            with gpu.stream(stream):
                close(exe(NDArray(image(30), gpu)), [np.exp(image(30)) + 1])
        assert exe.plan.core.graphs == 1


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
        exe = ndl.compile(lambda x: Doubled()(x + 1) + Doubled()(x), NDArray(image(3), gpu))
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


class TestErrors:
    def test_mixed_devices(self, gpu: Device) -> None:
        net, x, want = resnet_on(gpu)
        net.head.to(ndl.cpu())
        with pytest.raises(
            ValueError, match=rf"^\[compile\] expects a model on one device, got {gpu.name}\(\) and cpu"
        ):
            ndl.compile(net, x)
        p = Tensor(np.ones(3))
        with pytest.raises(
            ValueError, match=rf"^\[compile\] expects parameters on {gpu.name}\(\), got one on cpu\(\)\.$"
        ):
            ndl.compile(lambda x: x * p, NDArray(image(3), gpu))
        net.to(gpu)
        close(ndl.compile(net, x)(x), want)

    def test_inputs_elsewhere(self, gpu: Device) -> None:
        other = gpu_device(next(d for d in DEVICES if d.startswith("emulation") and d != gpu.name))
        exe = ndl.compile(lambda x: x + 1, NDArray(image(3), gpu))
        with pytest.raises(
            ValueError, match=rf"^\[executable\] input 0 expects an array on {gpu.name}\(\), got {other.name}\(\)\.$"
        ):
            exe(NDArray(image(3), other))
        with pytest.raises(ValueError, match=rf"\[executable\] output 0 expects an array on {gpu.name}\(\), got cpu"):
            exe.run_into(np.zeros(3, "float32"), NDArray(image(3), gpu))
        close(exe(NDArray(image(3), gpu)), [image(3) + 1])

    def test_moved_models(self, gpu: Device) -> None:
        net, x, want = resnet_on(gpu)
        exe = ndl.compile(net, x)
        net.to(ndl.cpu())
        for _ in range(2):
            with pytest.raises(
                ValueError, match=rf"^\[executable\] parameters were compiled on {gpu.name}\(\), got one on cpu\(\)"
            ):
                exe(x)
        close(ndl.compile(net, x)(x), want)
        net.to(gpu)
        close(exe(x), want)

    def test_out_of_memory(self, gpu: Device) -> None:
        exe = ndl.compile(
            lambda x: (x.broadcast_to((x.shape[0], 1 << 22)) + 1).sum((1,)), NDArray(np.ones((1, 1)), gpu)
        )
        big = NDArray(np.ones((1 << 20, 1)), gpu)
        with pytest.raises(
            MemoryError, match=rf"^\[{gpu.name}\] out of memory: a plan's arena of \d+ MiB does not fit"
        ):
            exe(big)
        assert exe.plan.core.frames == 0
        assert float(exe(NDArray(np.ones((1, 1)), gpu)).numpy()[0]) == 2 << 22

    def test_kernels_that_refuse(self, gpu: Device) -> None:
        """What a kernel says while the plan runs is the error; the plan's memory goes back."""
        exe = ndl.compile(lambda x: x.broadcast_to((1 << 16, 1 << 15, 1)).sum(), NDArray(np.ones(1), gpu))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"at most 2\^31 - 1 elements"):
                exe(NDArray(np.ones(1), gpu))
        assert exe.plan.core.frames == 1


def test_profile(gpu: Device) -> None:
    net, x, _ = resnet_on(gpu)
    exe = ndl.compile(net, x)
    rows = exe.profile(x, rounds=2)
    assert [r[0] for r in rows] == exe.plan.names
    assert all(seconds > 0 for *_, seconds in rows)


def test_calls_of_torch_between_plans(gpu: Device) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0e(x * 2) + 1

    x = image(2, 5)
    net = torch2needle.convert(Net(), torch.from_numpy(x), fallback="torch")
    exe = ndl.compile(net, NDArray(x, gpu))
    for _ in range(3):
        close(exe(NDArray(x, gpu)), [Net()(torch.from_numpy(x)).numpy()])
