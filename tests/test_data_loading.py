"""torch's samplers, datasets and arguments of loaders; images in folders; what is drawn comes from numpy's stream."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import needle as ndl
from needle import data

# -- samplers ------------------------------------------------------------------------------------------------------------

TEN = list(range(100, 110))


def test_orders() -> None:
    np.random.seed(0)
    assert list(data.SequentialSampler(TEN)) == list(range(10))
    orders = [list(data.RandomSampler(TEN)) for _ in range(3)]
    assert all(sorted(o) == list(range(10)) for o in orders) and len({tuple(o) for o in orders}) == 3
    chosen = list(data.SubsetRandomSampler([7, 3, 5]))
    assert sorted(chosen) == [3, 5, 7] and all(type(i) is int for i in chosen)
    assert [len(s) for s in (data.SequentialSampler(TEN), data.RandomSampler(TEN), data.SubsetRandomSampler([1]))] == [
        10,
        10,
        1,
    ]


def test_shuffling_is_a_random_sampler() -> None:
    dataset = data.NDArrayDataset(np.arange(20))
    loaders = (
        data.DataLoader(dataset, 6, shuffle=True),
        data.DataLoader(dataset, 6, sampler=data.RandomSampler(dataset)),
    )
    got = []
    for loader in loaders:
        ndl.manual_seed(3)
        got.append([x.numpy().tolist() for (x,) in loader])
    assert got[0] == got[1]


@pytest.mark.parametrize("count", [1, 4, 10, 23])
def test_as_many_as_are_wanted(count: int) -> None:
    for replacement in (False, True):
        sampler = data.RandomSampler(TEN, replacement, count)
        got = list(sampler)
        assert len(got) == len(sampler) == count and set(got) <= set(range(10))
        if not replacement:
            counts = Counter(got).values()
            assert max(counts) - (min(counts) if len(counts) == 10 else 0) <= 1


def test_with_replacement_all_are_as_likely() -> None:
    np.random.seed(1)
    counts = Counter(data.RandomSampler(TEN, True, 20000))
    assert all(abs(counts[i] - 2000) < 200 for i in range(10))


def test_weights() -> None:
    np.random.seed(2)
    weights = [0.0, 1.0, 3.0, 6.0]
    counts = Counter(data.WeightedRandomSampler(weights, 20000))
    assert [counts[i] / 2000 for i in range(4)] == pytest.approx(weights, abs=0.2)
    for _ in range(5):
        assert sorted(data.WeightedRandomSampler(weights, 3, replacement=False)) == [1, 2, 3]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 3, 5, 10, 11])
def test_batches_of_numbers_are_torchs(size: int, drop_last: bool) -> None:
    ours = data.BatchSampler(data.SequentialSampler(TEN), size, drop_last)
    theirs = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(TEN), size, drop_last)
    assert list(ours) == list(theirs) and len(ours) == len(theirs)


# -- datasets ------------------------------------------------------------------------------------------------------------


class Squares(data.Dataset):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < 7:
            raise IndexError(i)
        return np.float32(i), i * i


def test_tensors() -> None:
    x, y = np.random.randn(6, 2).astype("float32"), np.arange(6)
    dataset = data.TensorDataset(ndl.Tensor(x), y)
    first, label = dataset[4]
    assert isinstance(first, ndl.Tensor) and not first.requires_grad and (label.dtype, label.item()) == ("int64", 4)
    np.testing.assert_array_equal(first.numpy(), x[4])
    for workers in (0, 2):
        batches = list(data.DataLoader(dataset, 4, workers=workers))
        np.testing.assert_array_equal(np.concatenate([b[0].numpy() for b in batches]), x)
        assert [b[1].dtype for b in batches] == ["int64", "int64"] and batches[1][1].numpy().tolist() == [4, 5]
    assert next(iter(data.DataLoader(dataset, 4, integers=False)))[1].dtype == "float32"


def test_integers_that_are_kept_train() -> None:
    x, y = np.random.randn(8, 3).astype("float32"), np.random.randint(0, 4, 8)
    net = ndl.nn.Linear(3, 4)
    (kept,), (floats,) = (list(data.DataLoader(d(x, y), 8)) for d in (data.TensorDataset, data.NDArrayDataset))
    assert (kept[1].dtype, floats[1].dtype) == ("int64", "float32")
    losses = [ndl.nn.SoftmaxLoss()(net(x), y).numpy() for x, y in (kept, floats)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "make", [Squares, lambda: data.NDArrayDataset(np.arange(7.0), np.arange(7) ** 2)], ids=["own", "arrays"]
)
def test_parts(make: Callable[[], Any]) -> None:
    part = data.Subset(make(), [6, 2, 2, 0])
    inner = data.Subset(part, [1, 3])
    assert (len(part), len(inner)) == (4, 2)
    assert [int(inner[i][1]) for i in range(2)] == [4, 0] and int(part[-1][1]) == 0
    got = [b[1].numpy().tolist() for b in data.DataLoader(part, 3)]
    assert got == [[36, 4, 4], [0]]
    both = data.ConcatDataset([part, make()])
    assert len(both) == 11 and [int(both[i][1]) for i in (0, 3, 4, 10, -1, -11)] == [36, 0, 0, 36, 36, 36]
    assert [len(b[0].numpy()) for b in data.DataLoader(both, 4)] == [4, 4, 3]
    with pytest.raises(IndexError, match=r"^\[ConcatDataset\] expects numbers below 11, got 11\.$"):
        both[11]


def test_parts_of_arrays_are_read_ahead() -> None:
    part = data.Subset(data.NDArrayDataset(np.arange(50)), np.arange(0, 50, 2))
    plain, ahead = ([x.numpy().tolist() for (x,) in data.DataLoader(part, 4, workers=n)] for n in (0, 3))
    assert plain == ahead and [i for batch in plain for i in batch] == list(range(0, 50, 2))
    assert data.Subset(Squares(), [1, 2])[0:2] == [(1.0, 1), (2.0, 4)]


@pytest.mark.parametrize(
    "lengths", [[5, 3, 2], [0.5, 0.3, 0.2], [0.33, 0.33, 0.34], [10], [1.0], [0.05, 0.95], [4, 6, 0]]
)
def test_random_splits_are_as_long_as_torchs(lengths: list[Any]) -> None:
    parts = data.random_split(TEN, lengths)
    want = [len(p) for p in torch.utils.data.random_split(TEN, lengths)]
    assert [len(p) for p in parts] == want
    assert sorted(p[i] for p in parts for i in range(len(p))) == TEN


# -- loaders -------------------------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Nested(data.Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Any:
        image = np.full((2, 3), i, "float32")
        return {"image": image, "at": Point(i, i + 0.5), "pair": (ndl.Tensor(image), [image, -image]), "name": f"n{i}"}


def test_nested_samples_make_nested_batches() -> None:
    loader = data.DataLoader(Nested(), 3)
    first, last = loader
    assert first["image"].shape == (3, 2, 3) and last["image"].shape == (2, 2, 3)
    assert isinstance(first["at"], Point) and first["at"].x.numpy().tolist() == [0, 1, 2]
    assert isinstance(first["pair"], tuple) and isinstance(first["pair"][1], list)
    np.testing.assert_array_equal(first["pair"][1][1].numpy(), -first["image"].numpy())
    assert last["name"] == ["n3", "n4"]
    made = data.default_collate([Nested()[1], Nested()[2]])
    assert made["at"].x.dtype == "int64" and first["at"].x.dtype == "float32"


def test_the_courses_rows_stay_arrays() -> None:
    class Rows(data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> Any:
            return [i, i + 1, i + 2], (i, 0.5), i

    batch = next(iter(data.DataLoader(Rows(), 4)))
    assert isinstance(batch, tuple) and [tuple(b.shape) for b in batch] == [(4, 3), (4, 2), (4,)]
    assert {b.dtype for b in batch} == {"float32"}


def test_own_batches() -> None:
    loader = data.DataLoader(Squares(), 3, collate_fn=lambda samples: sum(y for _, y in samples))
    assert list(loader) == [5, 50, 36]
    arrays = data.DataLoader(data.NDArrayDataset(np.arange(4)), 2, collate_fn=len)
    assert list(arrays) == [2, 2]


def test_the_last_batch_may_go() -> None:
    dataset = data.NDArrayDataset(np.arange(10))
    for options in ({}, {"shuffle": True}, {"sampler": data.SequentialSampler(dataset)}, {"workers": 2}):
        loader = data.DataLoader(dataset, 4, drop_last=True, **options)
        assert [len(x.numpy()) for (x,) in loader] == [4, 4] and len(loader) == 2


def test_samplers_of_loaders() -> None:
    dataset = data.NDArrayDataset(np.arange(10) * 10)
    loader = data.DataLoader(dataset, 2, sampler=[3, 1, 4, 1, 5])
    assert [x.numpy().tolist() for (x,) in loader] == [[30, 10], [40, 10], [50]] and len(loader) == 3
    for workers in (0, 2):
        loader = data.DataLoader(dataset, batch_sampler=[[1, 2, 3], [0], [9, 9]], workers=workers)
        assert [x.numpy().tolist() for (x,) in loader] == [[10, 20, 30], [0], [90, 90]] and len(loader) == 3
    own = data.DataLoader(Squares(), batch_sampler=data.BatchSampler(data.SubsetRandomSampler([1, 2, 3]), 2, True))
    assert [len(x.numpy()) for x, _ in own] == [2] and len(own) == 1


WRONG: dict[str, tuple[Callable[[], Any], type, str]] = {
    "two orders": (
        lambda: data.DataLoader(TEN, 2, True, [1]),
        ValueError,
        r"\[DataLoader\] expects a sampler or shuffle, got both\.",
    ),
    "two sizes": (
        lambda: data.DataLoader(TEN, 2, batch_sampler=[[1]]),
        ValueError,
        r"\[DataLoader\] batch_sampler expects no batch_size, shuffle, sampler or drop_last, got one\.",
    ),
    "read ahead": (
        lambda: data.DataLoader(data.NDArrayDataset(np.arange(3)), workers=1, collate_fn=len),
        ValueError,
        r"\[DataLoader\] workers expects an IndexedDataset, which says how to read, got collate_fn\.",
    ),
    "batch": (
        lambda: data.BatchSampler(TEN, 0),
        ValueError,
        r"\[BatchSampler\] batch_size expects a whole number of at least 1, got 0\.",
    ),
    "too many": (
        lambda: data.WeightedRandomSampler([1, 0, 2], 3, False),
        ValueError,
        r"\[WeightedRandomSampler\] num_samples expects at most 2 without replacement, got 3\.",
    ),
    "weights": (
        lambda: data.WeightedRandomSampler([1, -1], 3),
        ValueError,
        r"\[WeightedRandomSampler\] weights expects a list of numbers of at least 0, not all 0, got \[1, -1\]\.",
    ),
    "none": (
        lambda: list(data.RandomSampler([], num_samples=3)),
        ValueError,
        r"\[RandomSampler\] num_samples expects a dataset to draw from, got 3 of none\.",
    ),
    "lengths": (
        lambda: data.random_split(TEN, [3, 3]),
        ValueError,
        r"\[random_split\] lengths expect to add up to 10, or shares to 1, got \[3, 3\]\.",
    ),
    "tensors": (
        lambda: data.TensorDataset(np.ones(3), np.ones(4)),
        ValueError,
        r"\[TensorDataset\] tensors of one length are expected, got lengths \[3, 4\]\.",
    ),
    "no datasets": (
        lambda: data.ConcatDataset([]),
        ValueError,
        r"\[ConcatDataset\] expects at least one dataset, got none\.",
    ),
    "shapes": (
        lambda: data.default_collate([np.ones(2), np.ones(3)]),
        ValueError,
        r"\[default_collate\] samples expect one shape, got \(2,\) and \(3,\)\.",
    ),
    "parts": (
        lambda: data.default_collate([(1, 2), (1,)]),
        ValueError,
        r"\[default_collate\] samples expect to have as many parts each, got \[1, 2\]\.",
    ),
    "kind": (
        lambda: data.default_collate([object()]),
        TypeError,
        r"\[default_collate\] expects arrays, numbers, texts, tuples, lists or dicts, got object\.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name: str) -> None:
    f, kind, message = WRONG[name]
    with pytest.raises(kind, match=rf"^{message}$"):
        f()


# -- images in folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, files in {
        "dog": ["b.png", "a.png", "deep/c.PNG", "note.txt"],
        "ant": ["z.bmp"],
        "cat": ["x.jpg", "y.png"],
    }.items():
        for i, file in enumerate(files):
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.endswith("txt"):
                path.write_text("no image")
            else:
                pixels = rng.integers(0, 256, (40 + i, 52 - 3 * i, 3), dtype="uint8")
                Image.fromarray(pixels).convert("L" if file == "y.png" else "RGB").save(path)
    (tmp_path / "readme.md").write_text("no class")
    return tmp_path


def test_classes_are_folders(folder: Path) -> None:
    dataset = data.ImageFolder(folder)
    assert dataset.classes == ["ant", "cat", "dog"] and dataset.class_to_idx == {"ant": 0, "cat": 1, "dog": 2}
    assert [Path(p).name for p, _ in dataset.samples] == ["z.bmp", "x.jpg", "y.png", "a.png", "b.png", "c.PNG"]
    assert dataset.targets == [0, 1, 1, 2, 2, 2] and len(dataset) == 6
    image, label = dataset[4]
    assert (image.dtype, image.shape, label) == ("float32", (3, 40, 52), 2)
    want = np.asarray(Image.open(folder / "dog" / "b.png"))
    np.testing.assert_allclose(image, want.transpose(2, 0, 1) / 255, rtol=1e-6)
    assert dataset[2][0].shape[0] == 3  # a grey image


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_folders(folder: Path, workers: int) -> None:
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    steps = [data.Resize(36), data.CenterCrop(32), data.Normalize(mean, std), data.RandomFlipHorizontal()]
    dataset = data.ImageFolder(folder, steps, target_transform=lambda label: label + 10)
    np.random.seed(0)
    batches = list(data.DataLoader(dataset, 4, workers=workers))
    assert [tuple(x.shape) for x, _ in batches] == [(4, 3, 32, 32), (2, 3, 32, 32)]
    assert [y.numpy().tolist() for _, y in batches] == [[10, 11, 11, 12], [12, 12]] and batches[0][1].dtype == "int64"
    np.random.seed(0)
    alone = [dataset[i][0] for i in range(6)]
    np.testing.assert_array_equal(np.concatenate([x.numpy() for x, _ in batches]), np.stack(alone))
    part = data.Subset(dataset, [5, 0])
    assert next(iter(data.DataLoader(part, 2, workers=workers)))[1].numpy().tolist() == [12, 10]


def test_images_of_several_sizes_make_no_batch(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^\[ImageFolder\] a batch expects images of one size, got \(3, 4\d, \d+\) and .*\.$"
    ):
        list(data.DataLoader(data.ImageFolder(folder), 6))


@pytest.mark.parametrize("size", [24, 60, (20, 30), (64, 48)])
@pytest.mark.parametrize("shape", [(40, 52), (52, 40), (33, 33)])
def test_resizing_is_torchs(shape: tuple[int, int], size: Any) -> None:
    image = np.random.default_rng(0).random((*shape, 3)).astype("float32")
    got = data.Resize(size)(image)
    assert got.dtype == np.float32
    x = torch.from_numpy(image.transpose(2, 0, 1))[None]
    target = (size, int(size * max(shape) / min(shape))) if isinstance(size, int) else size
    if isinstance(size, int) and shape[0] > shape[1]:
        target = target[::-1]
    want = torch.nn.functional.interpolate(x, size=target, mode="bilinear", antialias=True)[0].numpy()
    np.testing.assert_allclose(got.transpose(2, 0, 1), want, atol=2e-3)
    pixels = (image * 255).astype("uint8")
    assert data.Resize(size)(pixels).dtype == np.uint8


def test_cropping_the_middle() -> None:
    image = np.arange(7 * 9 * 2).reshape(7, 9, 2)
    np.testing.assert_array_equal(data.CenterCrop((3, 5))(image), image[2:5, 2:7])
    np.testing.assert_array_equal(data.CenterCrop(7)(image), image[:, 1:8])
    padded = data.CenterCrop((9, 4))(image)
    assert padded.shape == (9, 4, 2) and (padded[0] == 0).all() and (padded[8] == 0).all()
    np.testing.assert_array_equal(padded[1:8], image[:, 2:6])


def test_normalising() -> None:
    image = np.random.rand(4, 5, 3).astype("float32")
    got = data.Normalize([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])(image)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, (image - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7], rtol=1e-5, atol=1e-6)


FOLDERS: dict[str, tuple[Callable[[Path], Any], type, str]] = {
    "no classes": (
        lambda p: data.ImageFolder(p / "ant"),
        FileNotFoundError,
        "expects a folder for each class, got none",
    ),
    "no folder": (lambda p: data.ImageFolder(p / "bee"), FileNotFoundError, "bee"),
    "an empty class": (
        lambda p: ((p / "bee").mkdir(), data.ImageFolder(p)),
        FileNotFoundError,
        r"expects images of every class, got none of bee\.$",
    ),
    "no image": (
        lambda p: ((p / "ant" / "a.png").write_bytes(b"\x89PNG nothing"), data.ImageFolder(p)[0]),
        ValueError,
        r"^\[ImageFolder\] .*a\.png is no image that can be read: ",
    ),
    "half an image": (
        lambda p: ((p / "ant" / "a.png").write_bytes((p / "dog" / "a.png").read_bytes()[:300]), data.ImageFolder(p)[0]),
        ValueError,
        r"^\[ImageFolder\] .*a\.png is no image that can be read: ",
    ),
    "a size": (lambda p: data.Resize(0), ValueError, r"^\[Resize\] size expects whole numbers of at least 1, got 0\.$"),
    "three sizes": (lambda p: data.CenterCrop((1, 2, 3)), ValueError, r"^\[CenterCrop\] size expects height and width"),
    "no spread": (
        lambda p: data.Normalize([0], [0]),
        ValueError,
        r"^\[Normalize\] std expects numbers above 0, got \[0\]\.$",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_refuse(name: str, folder: Path) -> None:
    f, kind, message = FOLDERS[name]
    with pytest.raises(kind, match=message):
        f(folder)
