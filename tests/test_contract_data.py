"""needle.data to the contract: order of random draws, shapes, batches."""

from __future__ import annotations

import gzip
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from datafiles import batch, idx, python2_batch
from needle import data

# -- loader ----------------------------------------------------------------------------------------------------------


def test_shuffled_order_is_the_courses() -> None:
    np.random.seed(0)
    loader = iter(data.DataLoader(data.NDArrayDataset(np.arange(100)), 1, shuffle=True))
    assert [int(next(loader)[0].numpy().item()) for _ in range(10)] == [26, 86, 2, 55, 75, 93, 16, 73, 54, 95]
    np.random.seed(0)
    loader = iter(data.DataLoader(data.NDArrayDataset(np.arange(100)), 10, shuffle=True))
    np.testing.assert_array_equal(next(loader)[0].numpy(), [26, 86, 2, 55, 75, 93, 16, 73, 54, 95])


def test_one_shuffle_per_iter() -> None:
    loader = data.DataLoader(data.NDArrayDataset(np.arange(7)), 3, shuffle=True)
    np.random.seed(3)
    drawn = [np.concatenate([x.numpy() for (x,) in loader]) for _ in range(2)]
    np.random.seed(3)
    for got in drawn:
        want = np.arange(7)
        np.random.shuffle(want)
        np.testing.assert_array_equal(got, want)
    after = np.random.rand()
    np.random.seed(3)
    np.random.shuffle(np.arange(7)), np.random.shuffle(np.arange(7))
    assert after == np.random.rand()


def test_batches_are_tuples_of_tensors_and_the_last_is_smaller() -> None:
    x, y = np.random.rand(7, 2, 3).astype("float32"), np.arange(7, dtype="uint8")
    state = np.random.get_state()[1].tolist()
    loader = data.DataLoader(data.NDArrayDataset(x, y), 3)
    batches = list(loader)
    assert len(loader) == 3
    assert [tuple(b[0].shape) for b in batches] == [(3, 2, 3), (3, 2, 3), (1, 2, 3)]
    assert all(isinstance(b, tuple) and all(isinstance(t, ndl.Tensor) for t in b) for b in batches)
    assert {t.dtype for b in batches for t in b} == {"float32"}
    assert {t.device for b in batches for t in b} == {ndl.default_device()}
    np.testing.assert_array_equal(np.concatenate([b[0].numpy() for b in batches]), x)
    np.testing.assert_array_equal(np.concatenate([b[1].numpy() for b in batches]), y)
    assert np.random.get_state()[1].tolist() == state


def test_next_of_a_loader_goes_on_where_the_latest_iter_is() -> None:
    loader = data.DataLoader(data.NDArrayDataset(np.arange(4)), 2)
    iter(loader)
    assert next(loader)[0].numpy().tolist() == [0, 1]
    assert next(loader)[0].numpy().tolist() == [2, 3]
    with pytest.raises(StopIteration):
        next(loader)


class Squares(data.Dataset):
    """A dataset as programs write them: one sample per int, a random draw in each."""

    def __getitem__(self, index: int) -> Any:
        return np.full((2,), index**2 + np.random.rand()), index

    def __len__(self) -> int:
        return 5


def test_own_datasets_are_read_sample_by_sample() -> None:
    np.random.seed(1)
    x, y = next(iter(data.DataLoader(Squares(), 3)))
    np.random.seed(1)
    want = [[i**2 + d] * 2 for i, d in enumerate(np.random.rand(3))]
    np.testing.assert_allclose(x.numpy(), want, rtol=1e-6)
    assert y.numpy().tolist() == [0, 1, 2]


class Watched(data.IndexedDataset):
    """Notes which threads read and which draw."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: set[str] = set()
        self.drawers: set[str] = set()

    def __len__(self) -> int:
        return 23

    def read(self, index: Any) -> tuple[Any, ...]:
        self.readers.add(threading.current_thread().name)
        return (np.asarray(index, dtype="float32"),)

    def transform(self, x: Any) -> tuple[Any, ...]:  # type: ignore[override]
        self.drawers.add(threading.current_thread().name)
        return (x + np.random.rand(*x.shape),)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_read_ahead_and_change_nothing(workers: int) -> None:
    results = []
    for n in (0, workers):
        np.random.seed(5)
        watched = Watched()
        loader = data.DataLoader(watched, 4, shuffle=True, workers=n)
        results.append([x.numpy() for _ in range(2) for (x,) in loader])
        assert watched.drawers == {"MainThread"}
        assert all(name.startswith("needle-data" if n else "MainThread") for name in watched.readers)
    assert len(results[0]) == 12
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_leaving_a_loop_early_ends_its_threads() -> None:
    before = threading.active_count()
    loader = data.DataLoader(Watched(), 2, workers=2)
    for _ in loader:
        break
    del loader
    assert threading.active_count() == before


BAD_LOADERS: dict[str, tuple[Callable[[], Any], str]] = {
    "no batch": (lambda: data.DataLoader(Squares(), 0), "at least 1, got 0"),
    "workers": (lambda: data.DataLoader(Squares(), 1, workers=2), "got Squares"),
    "lengths": (lambda: data.NDArrayDataset(np.zeros(3), np.zeros(4)), r"got lengths \[3, 4\]"),
    "text": (lambda: next(iter(data.DataLoader(data.NDArrayDataset(np.array(["a"])), 1))), "expects numbers"),
    "large": (lambda: next(iter(data.DataLoader(data.NDArrayDataset(np.array([2**24 + 1])), 1))), "got 16777217"),
}


@pytest.mark.parametrize("name", BAD_LOADERS)
def test_loader_errors_are_one_sentence(name: str) -> None:
    make, text = BAD_LOADERS[name]
    with pytest.raises(ValueError, match=rf"^\[\w+\] [^\n]*{text}[^\n]*\.$"):
        make()


# -- transforms ------------------------------------------------------------------------------------------------------


def test_flip_draws_once_per_image() -> None:
    images = np.random.rand(20, 4, 5, 3)
    flip = data.RandomFlipHorizontal(0.3)
    np.random.seed(0)
    got = [flip(i) for i in images]
    np.random.seed(0)
    for g, image in zip(got, images, strict=True):
        np.testing.assert_array_equal(g, image[:, ::-1] if np.random.rand() < 0.3 else image)


@pytest.mark.parametrize("padding", [0, 1, 3, 9])
def test_crop_draws_two_numbers_per_image(padding: int) -> None:
    images = np.random.rand(20, 4, 6, 2)
    crop = data.RandomCrop(padding)
    np.random.seed(0)
    got = [crop(i) for i in images]
    np.random.seed(0)
    for g, image in zip(got, images, strict=True):
        x, y = np.random.randint(low=-padding, high=padding + 1, size=2) + padding
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        np.testing.assert_array_equal(g, padded[x : x + 4, y : y + 6])


# -- MNIST -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["gzip", "plain"])
def mnist(request: Any, tmp_path: Path) -> tuple[str, str, np.ndarray, np.ndarray]:
    x = np.random.randint(0, 256, (12, 6, 5), dtype="uint8")
    y = np.random.randint(0, 10, 12, dtype="uint8")
    paths = []
    for name, values in (("images", x), ("labels", y)):
        content = idx(values)
        (tmp_path / name).write_bytes(gzip.compress(content) if request.param == "gzip" else content)
        paths.append(str(tmp_path / name))
    return paths[0], paths[1], x, y


def test_mnist_by_ints_slices_and_arrays(mnist: Any) -> None:
    images, labels, x, y = mnist
    ds = data.MNISTDataset(images, labels)
    flat = x.reshape(12, 30).astype("float32") / 255
    assert len(ds) == 12
    image, label = ds[3]
    assert image.shape == (30,) and image.dtype == np.float32 and label == y[3]
    for index in (3, -1, slice(2, 7), np.array([4, 0, 4])):
        got_x, got_y = ds[index]
        np.testing.assert_array_equal(got_x, flat[index])
        np.testing.assert_array_equal(got_y, y[index])


def test_mnist_transforms_sample_by_sample(mnist: Any) -> None:
    images, labels, x, _ = mnist
    ds = data.MNISTDataset(images, labels, transforms=[data.RandomCrop(2), data.RandomFlipHorizontal()])
    np.random.seed(7)
    got = [X.numpy() for X, _ in data.DataLoader(ds, 5)]
    np.random.seed(7)
    np.testing.assert_array_equal(np.concatenate(got), np.stack([ds[i][0] for i in range(12)]))
    np.random.seed(7)
    down, right = np.random.randint(low=-2, high=3, size=2) + 2
    want = np.pad(x[0], 2)[down : down + 6, right : right + 5]
    want = want[:, ::-1] if np.random.rand() < 0.5 else want
    np.testing.assert_allclose(got[0][0], want.reshape(-1) / 255, rtol=1e-6)


# -- CIFAR-10 --------------------------------------------------------------------------------------------------------


WRITERS: dict[str, Callable[[np.ndarray, list[int]], bytes]] = {"python 2": python2_batch}
for protocol in (1, 2, 3, 4, 5):
    WRITERS[f"protocol {protocol}"] = lambda x, y, p=protocol: pickle.dumps({b"data": x, b"labels": y}, p)  # type: ignore[misc]


@pytest.fixture(params=WRITERS)
def cifar10(request: Any, tmp_path: Path) -> Path:
    for i, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        (tmp_path / name).write_bytes(WRITERS[request.param](*batch(i)))
    return tmp_path


def test_cifar10(cifar10: Path) -> None:
    for train, seeds in ((True, range(5)), (False, [5])):
        ds = data.CIFAR10Dataset(cifar10, train)
        x = np.concatenate([batch(i)[0] for i in seeds]).reshape(-1, 3, 32, 32).astype("float32") / 255
        y = np.concatenate([batch(i)[1] for i in seeds])
        assert len(ds) == len(x) and isinstance(ds[0], tuple)
        for index in (1, slice(1, 3), np.array([3, 0])):
            got_x, got_y = ds[index]
            np.testing.assert_array_equal(got_x, x[index])
            np.testing.assert_array_equal(got_y, y[index])
        assert ds[1][0].shape == (3, 32, 32) and ds[1][0].dtype == np.float32
        np.testing.assert_array_equal(ds.X, x)
        X, Y = next(iter(data.DataLoader(ds, 3)))
        assert X.dtype == "float32" and X.shape == (3, 3, 32, 32) and Y.shape == (3,)


def test_cifar10_transforms_see_height_width_channels(tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(python2_batch(*batch(0)))
    plain = data.CIFAR10Dataset(tmp_path, False)
    flipped = data.CIFAR10Dataset(tmp_path, False, transforms=[data.RandomFlipHorizontal(1.0)])
    np.testing.assert_array_equal(flipped[:][0], plain[:][0][..., ::-1])
    np.testing.assert_array_equal(flipped[2][0], plain[2][0][..., ::-1])


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    for read in (
        lambda: data.CIFAR10Dataset(tmp_path, True),
        lambda: data.MNISTDataset(tmp_path / "x", tmp_path / "y"),
        lambda: data.Corpus(tmp_path),
    ):
        with pytest.raises(FileNotFoundError, match=r"^\[\w+\] there is no file .*\.$"):
            read()
