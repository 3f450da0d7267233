"""compile(memory="low") and models that stay in their file's pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import needle as ndl
import torch2needle
from needle import _core
from test_executor import close, image, small_net
from test_winograd import kernels, layer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ndl.save(small_net(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


class TestLow:
    def test_same_results_with_smaller_weights(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(16, 256, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(256, 256, 3, padding=1)
        ).eval()
        x = torch.randn(1, 16, 14, 14)
        low, normal = (torch2needle.compile(model, (x,), memory=m) for m in ("low", "normal"))
        assert low.memory["constants"] < 0.6 * normal.memory["constants"]
        with torch.no_grad():
            want = model(x).numpy()
        close(low(x).numpy(), want)
        close(low(x).numpy(), normal(x).numpy())

    @pytest.mark.parametrize(
        ("channels", "size", "kernel"),
        [(64, 56, "winograd_f4"), (128, 128, "winograd_f4"), (256, 14, "blocked"), (512, 7, "blocked")],
    )
    def test_bytes_count(self, channels: int, size: int, kernel: str) -> None:
        assert kernels(*layer(channels, channels, size), memory="low") == [f"conv2d_{kernel}"]

    def test_winograd_off_stays_off(self) -> None:
        assert kernels(*layer(64, 64, 56), memory="low", winograd="off") == ["conv2d_blocked"]

    def test_unknown_setting(self) -> None:
        run, x = layer(16, 16, 8)
        with pytest.raises(ValueError, match=r"^\[compile\] memory expects one of normal, low, got 'tiny'\.$"):
            ndl.compile(run, (x,), memory="tiny")


@pytest.mark.parametrize("memory", ["normal", "low"])
def test_written_parameters_of_a_loaded_model_are_packed_again(saved: Path, memory: str) -> None:
    net, x, before = ndl.load(saved), image(2, 3, 19, 16), saved.read_bytes()
    exe = ndl.compile(net, (x,), memory=memory)
    close(exe(x)[0], net(ndl.Tensor(x))[0].numpy())
    for p in net.parameters():
        p.data = p * 1.5
    close(exe(x)[0], net(ndl.Tensor(x))[0].numpy())
    for p in net.parameters():
        p.cached_data[...] = p.cached_data * 0.5  # in place, in the file's pages
    close(exe(x)[0], net(ndl.Tensor(x))[0].numpy())
    assert saved.read_bytes() == before


def test_training_a_loaded_model_leaves_the_file(saved: Path) -> None:
    nets, before = (small_net(), ndl.load(saved)), saved.read_bytes()
    x = image(2, 3, 19, 16)
    for net in nets:
        optimizer = ndl.optim.SGD(net.parameters(), lr=0.1)
        net.train()
        for _ in range(2):
            optimizer.reset_grad()
            (net(ndl.Tensor(x))[0] ** 2).sum().backward()
            optimizer.step()
        net.eval()
    for a, b in zip(*(n.parameters() for n in nets), strict=True):
        close(a.numpy(), b.numpy())
    assert saved.read_bytes() == before


def test_saving_over_the_file_of_a_living_model(saved: Path) -> None:
    net = ndl.load(saved)
    values = [p.numpy() for p in net.parameters()]
    other = small_net()
    for p in other.parameters():
        p.data = p * 2
    ndl.save(other, saved)
    for p, q, value in zip(net.parameters(), ndl.load(saved).parameters(), values, strict=True):
        close(p.numpy(), value, 0)
        close(q.numpy(), value * 2)
    assert [f.name for f in saved.parent.iterdir()] == [saved.name]


class TestTrim:
    """What was written must survive; only pages that nobody can have written go back to the file."""

    @pytest.fixture
    def mapped(self, tmp_path: Path) -> tuple[_core.Array, Path]:
        np.arange(1 << 16, dtype="float32").tofile(tmp_path / "numbers")
        return _core.FileMap(str(tmp_path / "numbers")).array(0, (1 << 16,), "float32"), tmp_path / "numbers"

    def test_unwritten_pages_are_read_again(self, mapped: tuple[_core.Array, Path]) -> None:
        array, path = mapped
        assert array.numpy(False)[40000] == 40000
        array.storage.trim()
        with path.open("r+b") as f:
            np.full(1 << 16, 7, "float32").tofile(f)
        assert array.numpy(False)[40000] == 7

    @pytest.mark.parametrize("how", ["numpy", "dlpack", "kernel"])
    def test_written_pages_stay(self, mapped: tuple[_core.Array, Path], how: str) -> None:
        from needle.backend_ndarray import NDArray

        array, _ = mapped
        if how == "numpy":
            array.numpy()[:] = 3
        elif how == "dlpack":
            torch.from_dlpack(NDArray.wrap(array)).fill_(3)
        else:
            NDArray.wrap(array).fill(3)
        array.storage.trim()
        assert (array.numpy(False) == 3).all()

    def test_reading_is_not_writing(self, mapped: tuple[_core.Array, Path]) -> None:
        with pytest.raises(ValueError, match="read-only"):
            mapped[0].numpy(False)[:] = 0

    def test_outside_of_the_file(self, mapped: tuple[_core.Array, Path]) -> None:
        file = _core.FileMap(str(mapped[1]))
        for first in (-4, 4, 1 << 40):
            with pytest.raises(ValueError, match=r"^\[load\] a tensor reaches outside its file of 262144 bytes\.$"):
                file.array(first, (1 << 16,), "float32")

    def test_misaligned_tensors_are_copied(self, mapped: tuple[_core.Array, Path]) -> None:
        file = _core.FileMap(str(mapped[1]))
        want = np.frombuffer(mapped[1].read_bytes()[2:42], "float32")
        assert (file.array(2, (10,), "float32").numpy() == want).all()


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    ndl.save(ndl.nn.Sequential(ndl.nn.Linear(4, 3), ndl.nn.Conv(3, 4, 3)), tmp_path / "net")
    np.random.seed(0)
    want = np.random.rand()
    np.random.seed(0)
    ndl.load(tmp_path / "net")
    assert np.random.rand() == want
