"""compile on GPU devices: values, graphs, fused epilogues, memory, precisions, errors."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
import torch2needle
from gpu_devices import DEVICES, gpu_device
from gpu_nets import NETS, arrays, close, exact, fused_form, image, make, resnet_on
from needle import nn
from needle.autograd import Tensor, Unsupported
from needle.backend_ndarray import Device, NDArray, NoKernel
from test_ops import CASES, assert_close, case, float32_exact, run, tensors


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
        assert (exe.plan.core.arenas, exe.plan.core.graphs) == (1, 1), exe.plan.core.graph_error


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
    if not op.has_expression:  # factors of matrices
        with pytest.raises((NoKernel, Unsupported), match="has neither a kernel for these inputs nor a decomposition"):
            ndl.compile(lambda *xs: run(op, list(xs)), tuple(ins))
        return
    exe = ndl.compile(lambda *xs: run(op, list(xs)), tuple(ins))
    for _ in range(2):
        for a, b in zip(exe(*ins), want, strict=True):
            assert a.device == gpu
            assert_close(a.numpy().astype("float64"), b.numpy().astype("float64"))


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
        "matmul_fused",
    ]
    plain, _, _ = resnet_on(gpu)
    assert "batch_norm" not in ndl.compile(plain, x).plan.names


@pytest.mark.parametrize(
    "shape", [(2, 3, 6, 5), (2, 3, 1, 5), (2, 3, 6, 1), (1, 3, 1, 1)], ids=lambda s: "x".join(map(str, s))
)
def test_images_stay_in_channels_last_order(gpu: Device, shape: tuple[int, ...]) -> None:
    """From the first convolution to the last nothing is moved; norms that are not folded read and write in that order."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = (nn.Conv(c, 4, 3, padding=1, layout="torch") for c in (3, 4))
            self.norm, self.head = nn.BatchNorm2d(4), nn.Conv(8, 2, 1, layout="torch")

        def forward(self, x: Tensor) -> Tensor:
            a = self.conv1(x)
            b = self.conv2(ndl.ops.relu(self.norm(a * ndl.ops.sigmoid(a))))
            wide = ndl.ops.concat((ndl.ops.tanh(b + a), ndl.ops.max_pool2d(a, 3, 1, 1)), 1)
            return self.head(wide)

    np.random.seed(0)
    net, x = Net().eval(), image(*shape)
    want = exact(net, x)
    net.to(gpu)
    exe = ndl.compile(net, x)
    for _ in range(2):
        close(exe(x), want)
    assert exe.plan.names.count("copy") == 2  # into the concat
    assert "batch_norm" in exe.plan.names


def test_projections_are_one_product(gpu: Device) -> None:
    net = make("transformer")
    net.to(gpu)
    names = ndl.compile(fused_form(net, image(2, 5, 16)), image(2, 5, 16)).plan.names
    assert names.count("matmul_fused") == 4  # joined q, k and v; output; feed-forward twice
    assert names.count("attention_fused") == 1


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
    assert 1 <= exe.plan.core.graphs <= exe.plan.core.arenas <= 3


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

    def test_functions_stay_where_they_were_compiled(self, gpu: Device) -> None:
        exe = ndl.compile(lambda x: x + 1, np.zeros(3, "float32"))
        for n in (3, 4):
            with pytest.raises(
                ValueError, match=rf"^\[executable\] input 0 expects an array on cpu\(\), got {gpu.name}\(\)\.$"
            ):
                exe(NDArray(image(n), gpu))
        assert exe(Tensor(image(5))).device == ndl.cpu()

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
        assert exe.plan.core.arenas == 0
        assert float(exe(NDArray(np.ones((1, 1)), gpu)).numpy()[0]) == 2 << 22

    def test_kernels_that_refuse(self, gpu: Device) -> None:
        """What a kernel says while the plan runs is the error; the plan's memory goes back."""
        exe = ndl.compile(lambda x: x.broadcast_to((1 << 16, 1 << 15, 1)).sum(), NDArray(np.ones(1), gpu))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"at most 2\^31 - 1 elements"):
                exe(NDArray(np.ones(1), gpu))
        assert exe.plan.core.arenas == 1


def test_profile(gpu: Device) -> None:
    net, x, _ = resnet_on(gpu)
    exe = ndl.compile(net, x)
    rows = exe.profile(x, rounds=2)
    assert [r[0] for r in rows] == exe.plan.names
    assert all(seconds > 0 for *_, seconds in rows)


def test_calls_of_torch_between_plans(gpu: Device) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nextafter(x * 2, x) + 1

    x = image(2, 5)
    net = torch2needle.convert(Net(), torch.from_numpy(x), fallback="torch")
    exe = ndl.compile(net, NDArray(x, gpu))
    for _ in range(3):
        close(exe(NDArray(x, gpu)), [Net()(torch.from_numpy(x)).numpy()])


def test_a_training_step(gpu: Any) -> None:
    """Equal to eager steps there, also from the second run on, when other plans are graphs."""
    np.random.seed(0)
    net = ndl.nn.Sequential(
        *(
            ndl.nn.Conv(3, 8, 3, layout="torch", padding=1, device=gpu),
            ndl.nn.BatchNorm2d(8, device=gpu),
            ndl.nn.ReLU(),
        ),
        *(ndl.nn.MaxPool2d(2), ndl.nn.Flatten(), ndl.nn.Dropout(0.2), ndl.nn.Linear(8 * 9, 5, device=gpu)),
    )
    other = copy.deepcopy(net)
    x, y = np.random.randn(4, 3, 6, 6).astype("float32"), np.random.randint(0, 5, 4)
    opt, planned = (ndl.optim.Adam(n.parameters(), 0.01, eps=0.01) for n in (net, other))
    step = ndl.compile_step(other, ndl.ops.cross_entropy, planned, (x, y), clip_grad_norm=1.0)
    for i in range(4):
        np.random.seed(i)
        opt.reset_grad()
        inputs = ndl.Tensor(x, device=gpu, requires_grad=False)
        loss = ndl.ops.cross_entropy(net(inputs), ndl.Tensor(y, device=gpu, dtype="int64", requires_grad=False))
        loss.backward()
        opt.clip_grad_norm(1.0)
        opt.step()
        np.random.seed(i)
        np.testing.assert_allclose(float(step(x, y)), loss.item(), rtol=1e-5)
    for (name, a), (_, b) in zip(net.named_tensors(), other.named_tensors(), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), atol=1e-5, err_msg=name)


def test_a_training_step_whose_gradients_are_shared(gpu: Any) -> None:
    """They leave behind the run: as two processes with one batch, equal to one of them."""
    np.random.seed(0)
    net = ndl.nn.Sequential(ndl.nn.Linear(6, 8, device=gpu), ndl.nn.ReLU(), ndl.nn.Linear(8, 5, device=gpu))
    other = copy.deepcopy(net)
    x, y = np.random.randn(4, 6).astype("float32"), np.random.randint(0, 5, 4)
    steps = [
        ndl.compile_step(n, ndl.ops.cross_entropy, ndl.optim.Adam(n.parameters(), 0.01, eps=0.01), (x, y))
        for n in (net, other)
    ]
    sent = []

    def double(flat: NDArray) -> Any:
        sent.append(flat.shape)
        flat[:] = flat * 2
        return lambda: None

    steps[1].share(double, 2, 128)
    for _ in range(4):
        losses = [float(step(x, y)) for step in steps]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for (name, a), (_, b) in zip(net.named_tensors(), other.named_tensors(), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), atol=1e-5, err_msg=name)
    assert len(sent) == 4 * 4
