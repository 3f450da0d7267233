"""Files that are not what they claim to be: one sentence, no crash, no memory, nothing executed."""

from __future__ import annotations

import gzip
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datafiles import idx
from needle import data
from needle.data.idx import read_idx
from needle.data.pickles import Machine, Refused, read_pickle

ONE_SENTENCE = r"^\[\w+\] [^\n]*\.$"
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(read: Callable[[], Any], limit: int = 2**23) -> Any:
    """The result, or None after a ValueError of one sentence; more memory than `limit` bytes is a failure."""
    tracemalloc.start()
    try:
        return read()
    except ValueError as e:
        assert str(e).startswith("[") and str(e).endswith(".") and "\n" not in str(e), e
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < limit, peak


IMAGES = idx(np.arange(60, dtype="uint8").reshape(3, 4, 5))
BAD_IDX = {
    "empty": b"",
    "magic": b"\1" + IMAGES[1:],
    "type": IMAGES[:2] + b"\x0d" + IMAGES[3:],
    "rank": idx(np.arange(60, dtype="uint8")),
    "header": IMAGES[:9],
    "truncated": IMAGES[:-1],
    "trailing": IMAGES + b"\0",
    "huge": IMAGES[:4] + b"\xff" * 12,
    "huge by nothing": IMAGES[:4] + b"\xff\xff\xff\xff" + b"\0" * 8,
    "gzip truncated": gzip.compress(IMAGES)[:-3],
    "gzip trailing": gzip.compress(IMAGES) + b"more",
    "gzip checksum": gzip.compress(IMAGES)[:-8] + b"\0" * 8,
    "gzip bomb": gzip.compress(IMAGES[:4] + struct.pack(">3I", 2**14, 2**8, 2**8) + b"\0" * 2**21),
}


@pytest.mark.parametrize("name", BAD_IDX)
def test_bad_idx(name: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(BAD_IDX[name])
    with pytest.raises(ValueError, match=ONE_SENTENCE):
        read_idx(tmp_path / "f", 3)
    assert survives(lambda: read_idx(tmp_path / "f", 3)) is None


def mutated(content: bytes) -> st.SearchStrategy[bytes]:
    """The content cut, with bytes replaced, or with more behind it."""
    edit = st.tuples(st.integers(0, len(content) - 1), st.binary(min_size=1, max_size=9))
    cut = st.integers(0, len(content)).map(lambda n: content[:n])
    changed = st.lists(edit, min_size=1, max_size=3).map(lambda edits: apply(content, edits))
    return st.one_of(cut, changed, st.binary(max_size=9).map(lambda more: content + more), st.binary(max_size=40))


def apply(content: bytes, edits: list[tuple[int, bytes]]) -> bytes:
    for at, new in edits:
        content = content[:at] + new + content[at + len(new) :]
    return content


@FUZZ
@given(content=st.one_of(mutated(IMAGES), mutated(gzip.compress(IMAGES))))
def test_idx_fuzz(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    got = survives(lambda: read_idx(tmp_path / "f", 3))
    assert got is None or (got.ndim == 3 and got.dtype == np.uint8)


def test_mnist_counts_must_agree(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(IMAGES)
    (tmp_path / "y").write_bytes(idx(np.zeros(4, "uint8")))
    with pytest.raises(ValueError, match=r"expects 3 labels, one per image, got 4\.$"):
        data.MNISTDataset(tmp_path / "x", tmp_path / "y")


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


RAN: list[int] = []
ENCODED = b"\x80\x02c_codecs\nencode\nq\x00X\x10\x27\x00\x00" + b"a" * 10000 + b"X\x06\x00\x00\x00latin1\x86q\x01R"
BAD_PICKLES = {
    "calls": pickle.dumps({b"data": Evil(RAN.append, 1)}),
    "system": pickle.dumps({b"data": Evil(print, "ran")}, 2),
    "object": pickle.dumps(Path("x")),
    "float": pickle.dumps({b"data": 1.5}),
    "floats": pickle.dumps({b"data": np.zeros(3)}),
    "objects": pickle.dumps({b"data": np.array([None])}),
    "key": pickle.dumps({3: b""}),
    "list": pickle.dumps([b""]),
    "trailing": pickle.dumps({}) + b".",
    "empty": b"",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
    "huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",
    "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",
    "huge memo": b"\x80\x02Nr\xff\xff\xff\xff.",
    "huge array": pickle.dumps({b"d": np.zeros((2, 3), "uint8")}, 2).replace(
        b"K\x02K\x03\x86", b"J\xff\xff\xff\x7fK\x03\x86"
    ),
    "encoded again and again": ENCODED + b"0h\x00h\x01R" * 5000 + b".",
    "encoded into a list": b"\x80\x02](" + ENCODED[2:] + b"h\x00h\x01R" * 5000 + b"e.",
    "persistent": b"Pname\n.",
    "extension": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("name", BAD_PICKLES)
def test_bad_pickles(name: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(BAD_PICKLES[name])
    with pytest.raises(ValueError, match=ONE_SENTENCE):
        read_pickle(tmp_path / "f")
    assert survives(lambda: read_pickle(tmp_path / "f")) is None
    assert not RAN


SMALL = {p: pickle.dumps({b"data": np.arange(6, dtype="uint8").reshape(2, 3), b"labels": [1, 2]}, p) for p in (2, 4, 5)}


@FUZZ
@given(content=st.one_of(*(mutated(c) for c in SMALL.values())))
def test_pickle_fuzz(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    got = survives(lambda: read_pickle(tmp_path / "f"))
    assert got is None or all(isinstance(k, bytes) for k in got)


OPCODES = st.sampled_from([bytes([c]) for c in b"()]}K\x01tbR.0aeus\x85\x86\x87h\x00q\x00\x94\x93NlU\x01u"])


@FUZZ
@given(parts=st.lists(st.one_of(OPCODES, st.sampled_from([b"cnumpy\ndtype\n", b"U\x02u1", b"c_codecs\nencode\n"]))))
def test_opcode_fuzz(parts: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x80\x02" + b"".join(parts) + b".")
    survives(lambda: read_pickle(tmp_path / "f"))


def test_plain_data_comes_back() -> None:
    value = {"a": [1, -5, 2**40, True, None, "é", b"\xff", (1,), (1, 2, 3, 4), {}], b"b": ()}
    for p in (1, 2, 3, 4, 5):
        assert Machine(pickle.dumps(value, p)).run() == {b"a": value["a"], b"b": ()}
    for dtype in ("u1", "<i4", ">i2", "i8"):
        for order in ("C", "F"):
            a = np.asarray(np.arange(6).reshape(2, 3), dtype=dtype, order=order)  # type: ignore[call-overload]
            for p in (2, 4, 5):
                np.testing.assert_array_equal(Machine(pickle.dumps(a, p)).run().value, a)
    with pytest.raises(Refused):
        Machine(pickle.dumps(print)).run()


BAD_BATCHES: dict[str, Any] = {
    "no data": {b"labels": []},
    "width": {b"data": np.zeros((2, 10), "uint8"), b"labels": [0, 1]},
    "dtype": {b"data": np.zeros((2, 3072), "int64"), b"labels": [0, 1]},
    "count": {b"data": np.zeros((2, 3072), "uint8"), b"labels": [0]},
    "class": {b"data": np.zeros((2, 3072), "uint8"), b"labels": [0, 10]},
    "label": {b"data": np.zeros((2, 3072), "uint8"), b"labels": [0, b"1"]},
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batches(name: str, tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(pickle.dumps(BAD_BATCHES[name]))
    with pytest.raises(ValueError, match=ONE_SENTENCE):
        data.CIFAR10Dataset(tmp_path, False)
