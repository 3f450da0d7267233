"""Memory of GPU devices, exchange with other libraries, and errors: after each of them the process goes on."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy._core import _multiarray_umath

import needle as ndl
from gpu_devices import DEVICES, gpu_device
from needle.autograd import Tensor
from needle.backend_ndarray import Device, NDArray, NoKernel, as_ndarray
from needle.backend_ndarray.device import GpuDevice
from needle.backend_ndarray.kernels import call_map

CODES = {"cuda": (2, 0), "hip": (10, 0)}


@pytest.mark.parametrize("name", DEVICES)
def test_devices_that_tests_ran_on(name: str) -> None:
    device = gpu_device(name)
    found = device.properties()
    assert found["warp"] == (64 if name in ("hip", "emulation_w64") else 32)
    assert found["units"] > 0
    assert pickle.loads(pickle.dumps(device)) is device
    assert repr(device) == f"{name}()"


@pytest.fixture
def caching(gpu: Device) -> Iterator[Device]:
    gpu.limit_cache(None)
    yield gpu
    gpu.limit_cache(0)


class TestCache:
    def test_freed_blocks_are_reused(self, caching: Device) -> None:
        first = NDArray.empty((1000,), "float32", caching)
        where = first._handle.ptr()
        before = caching.memory()
        del first
        freed = caching.memory()
        assert freed["cached"] - before["cached"] == before["used"] - freed["used"] > 0
        again = NDArray.empty((990,), "float32", caching)  # of the same class
        assert again._handle.ptr() == where
        after = caching.memory()
        assert (after["reused"], after["taken"]) == (before["reused"] + 1, before["taken"])

    def test_classes_waste_at_most_an_eighth(self, caching: Device) -> None:
        for nbytes in (1, 511, 513, 4097, 100_001, 2**20 + 1, 3 * 2**20 + 7, 2**24 - 1):
            before = caching.memory()["used"]
            held = caching.core.allocate(nbytes)
            size = caching.memory()["used"] - before
            assert nbytes <= size <= max(512 * (nbytes // 512 + 1), nbytes * 9 // 8 + 512)
            assert held.nbytes == nbytes
            del held

    def test_other_sizes_take_other_memory(self, caching: Device) -> None:
        small = NDArray.empty((10,), "float32", caching)
        where = small._handle.ptr()
        del small
        assert NDArray.empty((10_000,), "float32", caching)._handle.ptr() != where

    def test_peak_and_release(self, caching: Device) -> None:
        before = caching.memory()
        held = [NDArray.empty((1 << 16,), "float32", caching) for _ in range(3)]
        assert caching.memory()["used"] == before["used"] + 3 * (1 << 18)
        assert caching.memory()["peak"] >= caching.memory()["used"]
        del held
        assert caching.memory()["cached"] >= 3 * (1 << 18)
        caching.release_memory()
        assert caching.memory()["cached"] == 0

    def test_limit(self, caching: Device) -> None:
        caching.limit_cache(1 << 18)
        held = [NDArray.empty((1 << 15,), "float32", caching) for _ in range(4)]
        del held
        assert caching.memory()["cached"] == 1 << 18

    def test_blocks_stay_on_their_stream(self, caching: Device) -> None:
        if not caching.name.startswith("emulation"):
            pytest.skip("numbers of streams are made up")
        first = NDArray.empty((100,), "float32", caching)
        where = first._handle.ptr()
        del first
        with caching.stream(7):
            other = NDArray.empty((100,), "float32", caching)
            assert other._handle.ptr() != where
        held = [NDArray.empty((100,), "float32", caching) for _ in range(5)]  # kernels' workspaces were freed, too
        assert where in [a._handle.ptr() for a in held]

    def test_from_many_threads(self, caching: Device) -> None:
        wrong = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(40):
                a = rng.standard_normal(int(rng.integers(1, 3000))).astype("float32")
                if not np.array_equal((NDArray(a, caching) + NDArray(a, caching)).numpy(), a + a):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong

    def test_scratch_is_kept(self, caching: Device) -> None:
        """Reductions in two steps take their memory once."""
        x = NDArray(np.ones((1, 60_000)), caching)
        assert x.sum().numpy() == 60_000
        before = caching.memory()["taken"]
        for _ in range(3):
            assert x.sum().numpy() == 60_000
        assert caching.memory()["taken"] == before


def test_a_fork_finds_the_memory_s_lock_free(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    sources = ("csrc/core/device.cpp", "csrc/core/forks.cpp", "tests/gpu_memory_fork.cpp")
    command = ["g++", "-std=c++20", "-Icsrc", *sources, "-o", tmp_path / "program", "-pthread", "-ldl"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    subprocess.run([tmp_path / "program"], check=True, timeout=60)


def test_out_of_memory(gpu: Device) -> None:
    held = NDArray(np.ones(1000), gpu)
    with pytest.raises(
        MemoryError, match=rf"^\[{gpu.name}\] out of memory: an array of \d+ MiB does not fit beside \d+ MiB"
    ):
        NDArray.empty((1 << 50,), "float32", gpu)
    with pytest.raises(MemoryError, match="out of memory"):
        NDArray(np.ones((1, 1)), gpu).broadcast_to((1 << 25, 1 << 25)).copy()
    assert float((held + 1).sum()) == 2000


def test_out_of_memory_gives_cached_blocks_back(caching: Device) -> None:
    held = NDArray.empty((1 << 16,), "float32", caching)
    del held
    assert caching.memory()["cached"] > 0
    with pytest.raises(MemoryError):
        NDArray.empty((1 << 50,), "float32", caching)
    assert caching.memory()["cached"] == 0


class TestErrors:
    def test_mixed_devices(self, gpu: Device) -> None:
        x, y = Tensor([1.0, 2.0], device=gpu), Tensor([1.0, 2.0], device=ndl.cpu())
        with pytest.raises(
            ValueError, match=rf"\[add\] inputs are on different devices: {gpu.name}\(\) and cpu\(\)\.$"
        ):
            x + y
        with pytest.raises(
            ValueError, match=rf"\[add\] inputs are on different devices: cpu_numpy\(\) and {gpu.name}\(\)\.$"
        ):
            Tensor([1.0], device=ndl.cpu_numpy()) + x
        with pytest.raises(ValueError, match=rf"\[add\] operands are on different devices: {gpu.name} and cpu\.$"):
            x.cached_data + y.cached_data
        with pytest.raises(ValueError, match=rf"\[mul\] operands are on different devices: cpu and {gpu.name}\.$"):
            call_map("mul", y.cached_data, [y.cached_data, x.cached_data])
        assert (x + Tensor(y, device=gpu)).numpy().tolist() == [2, 4]

    def test_no_kernel_for_a_dtype(self, gpu: Device) -> None:
        x = NDArray([1, 2], gpu, "int64")
        with pytest.raises(NoKernel, match=r"^\[exp\] has no kernel for dtype int64\.$"):
            call_map("exp", x, [x])

    def test_memory_is_not_numpys(self, gpu: Device) -> None:
        x = NDArray([1.0], gpu)
        with pytest.raises(ValueError, match=rf"^\[numpy\] memory of {gpu.name}\(\) is not numpy's"):
            x.numpy_view()
        copied = x.numpy()
        copied[0] = 5
        assert x.numpy()[0] == 1

    def test_views_stay_inside(self, gpu: Device) -> None:
        with pytest.raises(ValueError, match="reaches outside its storage of 12 bytes"):
            gpu.to_numpy(gpu.Array(3), (4,), (1,), 0)

    def test_executables_of_the_cpu(self, gpu: Device) -> None:
        exe = ndl.compile(lambda x: x + 1, (np.ones(3, "float32"),))
        with pytest.raises(
            ValueError, match=rf"^\[executable\] input 0 expects an array on cpu\(\), got {gpu.name}\(\)\.$"
        ):
            exe(NDArray(np.ones(3), gpu))

    def test_missing_library(self) -> None:
        device = GpuDevice("abacus")
        assert not device.enabled()
        with pytest.raises(RuntimeError, match=r"^\[abacus\] .* no such device: libneedle_abacus.so is neither beside"):
            Tensor([1.0], device=device)

    def test_no_device(self) -> None:
        """The driver's reason is said; such is one that is too old."""
        code = (
            "import needle as ndl\n"
            "print(ndl.emulation().enabled(), ndl.emulation().missing())\n"
            "try: ndl.Tensor([1.0], device=ndl.emulation())\n"
            "except RuntimeError as e: print(e)\n"
            "print((ndl.Tensor([1.0]) + 1).numpy())\n"
        )
        gpu_device("emulation_w32")
        env = {**os.environ, "NEEDLE_EMULATION_DEVICES": "0"}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        why = "[emulation_w32] this machine or build has no such device: no device."
        assert out.splitlines() == [f"False {why}", why, "[2.]"]

    @pytest.mark.parametrize("wrong", ["text", "other", "empty"])
    def test_a_library_that_is_none(self, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        emulation = gpu_device("emulation_w32")
        path = tmp_path / "libneedle_hip.so"
        if wrong == "text":
            path.write_text("no library")
        elif wrong == "other":
            path.symlink_to(Path(os.environ["NEEDLE_GPU_LIBRARIES"]) / "libneedle_emulation_w32.so")
        else:
            path.symlink_to(_multiarray_umath.__file__)
        monkeypatch.setenv("NEEDLE_GPU_LIBRARIES", str(tmp_path))
        why = {"text": "cannot be used: ", "other": "a library of emulation_w32", "empty": "no function needle_backend"}
        device = GpuDevice("hip")
        assert why[wrong] in str(device.missing())
        assert float(NDArray([2.0], emulation).sum()) == 2


class TestExchange:
    def test_out_to_torch(self, gpu: Device) -> None:
        x = NDArray(np.arange(12.0).reshape(3, 4), gpu)
        assert x.__dlpack_device__() == CODES.get(gpu.name, (1, 0)) == Tensor.make_const(x).__dlpack_device__()
        theirs = torch.from_dlpack(x)
        theirs[0, 1] = 50  # the same memory
        assert float(x[0, 1]) == 50
        del x
        assert theirs.sum() == 12 * 11 / 2 + 49

    def test_in_from_torch(self, gpu: Device) -> None:
        if gpu.name.startswith("emulation"):
            pytest.skip("its memory is the host's, which comes in as cpu()")
        theirs = torch.arange(6.0, device="cuda").reshape(2, 3).T
        x = ndl.from_dlpack(theirs)
        assert x.device == gpu
        theirs += 1
        assert np.array_equal((x + 1).numpy(), theirs.cpu().numpy() + 1)

    @pytest.mark.parametrize("beside", [False, True], ids=["one_stream", "two_streams"])
    def test_torchs_streams(self, gpu: Device, beside: bool) -> None:
        """What torch has yet to compute when it hands memory over, and what is read when it gets some back."""
        if gpu.name.startswith("emulation"):
            pytest.skip("its memory is the host's, which comes in as cpu()")
        exe = ndl.compile(
            ndl.nn.Sequential(ndl.nn.Linear(2048, 2048, device=gpu)), Tensor(np.zeros((2048, 2048)), device=gpu)
        )
        x = torch.randn(2048, 2048, device="cuda")
        want = exe(x / 64)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream() if beside else torch.cuda.default_stream()):
            for _ in range(5):
                late = x
                for _ in range(20):
                    late = late @ torch.eye(2048, device="cuda")
                got = exe(late / 64) * 1
                torch.cuda.current_stream().synchronize()
                assert torch.allclose(got, want, atol=1e-5)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_memory_of_negated_numbers(self, gpu: Device, dtype: str) -> None:
        where = "cpu" if gpu.name.startswith("emulation") else "cuda"
        x = torch.tensor([1 + 2j, 3 - 4j], device=where).conj().imag
        assert as_ndarray(x.to(getattr(torch, dtype))).numpy().tolist() == [-2, 4]
        assert as_ndarray(x).numpy().tolist() == ndl.Tensor(x).numpy().tolist() == [-2, 4]
        for enter in (ndl.from_dlpack, lambda t: as_ndarray(t, copy=False)):
            with pytest.raises(ValueError, match=r"\[from_dlpack\] expects memory of the values"):
                enter(x)

    def test_memory_of_a_device_that_is_not_here(self) -> None:
        class Elsewhere:
            def __init__(self, *device: int) -> None:
                self.device = device

            def __dlpack_device__(self) -> tuple[int, ...]:
                return self.device

        with pytest.raises(
            ValueError, match=r"\[from_dlpack\] expects memory of cpu\(\), cuda\(\), hip\(\), got device type 8"
        ):
            ndl.from_dlpack(Elsewhere(8, 0))
        if not ndl.hip().enabled():
            with pytest.raises(RuntimeError, match=r"\[hip\] this machine or build has no such device"):
                ndl.from_dlpack(Elsewhere(10, 0))


class TestTraining:
    def test_on_the_device(self, gpu: Device) -> None:
        """Element-wise layers, reductions and an optimizer: the same losses as on the CPU."""
        losses = []
        for device in (ndl.cpu(), gpu):
            np.random.seed(0)
            x, y = (ndl.init.randn(16, 8, device=device) for _ in range(2))
            scale, shift = (ndl.nn.Parameter(ndl.init.randn(8, device=device)) for _ in range(2))
            optimizer = ndl.optim.Adam([scale, shift], lr=0.1)
            mine = []
            for _ in range(4):
                error = ndl.ops.tanh(x * scale.broadcast_to((16, 8)) + shift.broadcast_to((16, 8))) - y
                loss = (error * error).sum() / 128
                optimizer.reset_grad()
                loss.backward()
                optimizer.step()
                mine.append(float(loss.numpy()))
            losses.append(mine)
        assert losses[0][-1] < losses[0][0]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)

    def test_models_move(self, gpu: Device) -> None:
        net = ndl.nn.Sequential(ndl.nn.Linear(3, 2), ndl.nn.BatchNorm2d(2))
        before = {name: t.numpy() for name, t in net.state_dict().items()}
        for device in (gpu, ndl.cpu()):
            net.to(device)
            assert all(t.device == device for t in net.state_dict().values())
            assert all(np.array_equal(t.numpy(), before[name]) for name, t in net.state_dict().items())

    def test_constants_of_a_graph_move_with_it(self, gpu: Device) -> None:
        class Net(ndl.nn.Module):
            container = True

            def __init__(self) -> None:
                super().__init__()
                self.linear = ndl.nn.Linear(3, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(x) + Tensor([1.0, 2.0, 3.0], requires_grad=False)

        net = ndl.graph.symbolic(Net())
        x = np.random.randn(2, 3).astype("float32")
        want = net(Tensor(x)).numpy()
        for module in (net, ndl.nn.Sequential(net)):
            module.to(gpu)
            np.testing.assert_allclose(module(Tensor(x, device=gpu)).numpy(), want, rtol=1e-6)
            module.to(ndl.cpu())
            np.testing.assert_array_equal(module(Tensor(x)).numpy(), want)

    def test_save_and_load(self, gpu: Device, tmp_path: Path) -> None:
        net = ndl.nn.Sequential(ndl.nn.Linear(3, 2, device=gpu))
        ndl.save(net, tmp_path / "net")
        loaded = ndl.load(tmp_path / "net")
        for name, value in net.state_dict().items():
            assert np.array_equal(loaded.state_dict()[name].numpy(), value.numpy())
