"""Damaged exported models (`exe.export`): each is refused in one sentence or runs as before, in the process that opens it.

A file whose digests were made to fit again is opened, too, but not run: what its steps say is then trusted (docs/c_api.md).
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import needle as ndl
from needle import nn, ops
from needle.nn.functional import Guard

from .file_damage import cut_out, extend, flip, foreign, repeat, truncate
from .frame import Wrong

NAME, SAMPLE, FULL, SECONDS = "plan_files", 3000, 100_000, 20
MEMORY, NO_TORCH = 1 << 30, True
START = 32  # bytes before the head
NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 3)
        )

    def forward(self, x: Any) -> Any:
        return self.body(x)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells, self.last = nn.Embedding(7, 6), nn.LSTM(6, 4), nn.Linear(4, 3)

    def forward(self, ids: Any) -> Any:
        y, _ = self.cells(self.embedding(ids))
        return self.last(y), ops.argmax(ops.softmax(y), 2)


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Guard((1.0, 0.0), "x.sum(1) > 0"), Guard((2.0,), "len(x)")

    def forward(self, x: Any) -> Any:
        self.first(ops.gt(ops.summation(x, (1,)), 0))
        self.second(ops.summation(x * 0 + 1) / 3)
        return ops.relu(x) * 2


class Counting(nn.Module):
    """State, and a condition that is checked before it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.total = ndl.Tensor(np.zeros(3, "float32"), requires_grad=False)
        self.guard = Guard((1.0,), "x.sum() >= 0")

    def forward(self, x: Any) -> Any:
        self.guard(ops.ge(ops.summation(x), 0))
        self.total.data = self.total + ops.summation(x, (0,))
        return self.total * 2


NETS = {
    "image": lambda: (Image(), [np.random.RandomState(0).randn(1, 3, 6, 6).astype("float32")]),
    "text": lambda: (Text(), [np.random.RandomState(0).randint(0, 7, (5, 2))]),
    "counting": lambda: (Counting(), [np.array([[1, 2, 3], [-1, -2, -3]], "float32")]),
    "conditional": lambda: (Conditional(), [np.array([[1, 2, 3], [-1, -2, -3]], "float32")]),
    "chain": lambda: (
        lambda x, y: ops.tanh(ops.exp(x) * y) + y,
        [np.ones((4, 5), "float32"), np.ones((4, 5), "float32")],
    ),
}


@functools.cache
def folder() -> Path:
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.environ["FUZZ_CANARY"] = str(place / "canary")
    return place


@functools.cache
def exported(name: str) -> tuple[bytes, list[np.ndarray], list[np.ndarray]]:
    """A file's bytes, inputs, and the results."""
    from c_library import Model

    np.random.seed(0)
    net, xs = NETS[name]()
    net = net.eval() if isinstance(net, nn.Module) else net
    path = folder() / "whole"
    ndl.compile(net, tuple(xs)).export(path)
    return path.read_bytes(), xs, Model(path)(*xs)


def head_bytes(data: bytes) -> int:
    return START + int.from_bytes(data[16:24], "little")


def edit_head(data: bytearray, rng: random.Random) -> bytes:
    """Bytes of the head, mostly at places of numbers."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(head_bytes(data))
        value = rng.choice((rng.choice(NUMBERS), rng.getrandbits(8)))
        size = rng.choice((1, 1, 4, 8))
        data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return bytes(data)


def nudge(data: bytearray, rng: random.Random) -> bytes:
    """One byte of the head a little larger or smaller: sizes, strides, offsets and attributes that nearly fit."""
    at = rng.randrange(START, head_bytes(data))
    data[at] = (data[at] + rng.choice((-2, -1, 1, 2, 16))) % 256
    return bytes(data)


MUTATIONS = {f.__name__: f for f in (flip, truncate, extend, cut_out, repeat, foreign, edit_head, nudge)}


@functools.cache
def digest_of(data: bytes) -> int:
    from needle import _core

    return _core.digests([np.frombuffer(data, "uint8")])[0]


def fitting(data: bytes) -> bytes:
    """The same with its sizes and the digest of its head made to fit."""
    if len(data) < START + 8:
        return data
    data = data[:24] + struct.pack("<Q", len(data)) + data[32:]
    end = head_bytes(data)
    return data if end + 8 > len(data) else data[:end] + struct.pack("<Q", digest_of(data[:end])) + data[end + 8 :]


def draw(rng: random.Random) -> Any:
    return (rng.choice(list(MUTATIONS)), rng.choice(list(NETS)), rng.random() < 0.5, rng.getrandbits(32))


def check(case: Any) -> str:
    from c_library import Failed, Model

    mutation, name, forged, seed = case
    data, xs, wanted = exported(name)
    damaged = MUTATIONS[mutation](bytearray(data), random.Random(seed))
    path = folder() / "damaged"
    path.write_bytes(fitting(damaged) if forged else damaged)
    kind = "forged" if forged else "damaged"
    try:
        model = Model(path)
    except Failed as e:
        text = str(e)
        if not text.startswith("[open] ") or not text.endswith(".") or "\n" in text:
            raise Wrong(f"no sentence: {text!r}") from None
        return f"{kind}: refused"
    if forged:
        return "forged: opens"
    if any(a.tobytes() != b.tobytes() for a, b in zip(model(*xs), wanted, strict=True)):
        raise Wrong("a damaged file gives other results")
    return "damaged: runs as before"


def smaller(case: Any) -> Iterable[Any]:
    return ()
