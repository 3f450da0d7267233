"""Files as the data sets' authors write them, made small."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np


def idx(values: np.ndarray) -> bytes:
    """An IDX file of bytes."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def python2_batch(x: np.ndarray, y: list[int]) -> bytes:
    """A batch as Python 2's pickle wrote it: protocol 2, str for bytes."""

    def text(b: bytes) -> bytes:
        return b"U" + bytes([len(b)]) + b if len(b) < 256 else b"T" + struct.pack("<I", len(b)) + b

    dtype = b"cnumpy\ndtype\nq\x03U\x02u1K\x00K\x01\x87Rq\x04(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07"
    array += b"(K\x01" + b"M" + struct.pack("<H", x.shape[0]) + b"M" + struct.pack("<H", x.shape[1]) + b"\x86"
    array += dtype + b"\x89" + text(x.tobytes()) + b"tb"
    labels = b"]q\x08(" + b"".join(b"K" + bytes([v]) for v in y) + b"e"
    names = b"](" + text(b"a.png") + text(b"b.png") + b"e"
    items = [(b"batch_label", text(b"batch 1")), (b"labels", labels), (b"data", array), (b"filenames", names)]
    return b"\x80\x02}q\x01(" + b"".join(text(k) + v for k, v in items) + b"u."


def batch(seed: int, n: int = 4) -> tuple[np.ndarray, list[int]]:
    """Random CIFAR-10 images and labels."""
    rng = np.random.RandomState(seed)
    return rng.randint(0, 256, (n, 3072)).astype("uint8"), rng.randint(0, 10, n).tolist()


def write_mnist(folder: Path, n: int = 60) -> Path:
    """MNIST's four files; the label is where the first row is lightest."""
    for kind in ("train", "t10k"):
        x = np.random.randint(0, 256, (n, 4, 4)).astype("uint8")
        (folder / f"{kind}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x)))
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(idx(np.argmax(x[:, 0], 1).astype("uint8")))
    return folder


def write_cifar10(folder: Path, n: int = 6) -> Path:
    """CIFAR-10's six batches."""
    for i, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        x, y = batch(i, n)
        (folder / name).write_bytes(pickle.dumps({b"data": x, b"labels": y}, 2))
    return folder


def write_text(folder: Path) -> Path:
    """train.txt and test.txt of seven words."""
    words = [f"w{i}" for i in range(7)]
    for name, lines in (("train.txt", 60), ("test.txt", 12)):
        text = "\n".join(" ".join(words[(i * k) % 7] for k in range(5)) for i in range(lines))
        (folder / name).write_text(text)
    return folder
