"""The IDX format of MNIST: two zero bytes, a type, a rank, the sizes as big-endian 32-bit numbers, the values."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from typing import IO

import numpy as np

from needle.files import existing

UNSIGNED_BYTE = 0x08
LARGEST = 2**30  # bytes of values; EMNIST, the largest of its kind, has half of it
DEFLATE_RATIO = 1032  # deflate packs no more bytes than this into one (zlib.net, "Technical Details")
PIECE = 2**20


def read_idx(path: str | os.PathLike, rank: int) -> np.ndarray:
    """The bytes of an IDX file, gzip or plain, as an array of `rank` axes; ValueError for anything that is not just that."""
    name = existing("read_idx", path)
    with open(path, "rb") as f:
        packed = f.read(2) == b"\x1f\x8b"
        f.seek(0)
        room = os.path.getsize(path) * (DEFLATE_RATIO if packed else 1)
        try:
            return _read(gzip.GzipFile(fileobj=f) if packed else f, rank, min(room, LARGEST))
        except (OSError, EOFError, zlib.error):
            raise ValueError(f"[read_idx] {name} is not a complete gzip file.") from None
        except _Malformed as e:
            raise ValueError(f"[read_idx] {name} {e}.") from None


class _Malformed(Exception):
    pass


def _read(f: IO[bytes] | gzip.GzipFile, rank: int, room: int) -> np.ndarray:
    header = f.read(4 + 4 * rank)
    wanted = bytes([0, 0, UNSIGNED_BYTE, rank])
    if header[:4] != wanted:
        raise _Malformed(
            f"expects to begin with {wanted.hex()}, an IDX file of bytes, got {header[:4].hex() or 'nothing'}"
        )
    if len(header) < 4 + 4 * rank:
        raise _Malformed(f"ends within its header of {4 + 4 * rank} bytes, got {len(header)}")
    shape = struct.unpack(f">{rank}I", header[4:])
    size = math.prod(shape)
    if size > room or max(shape) > room:
        raise _Malformed(f"announces more values than it can hold, got shape {shape}")
    values = bytearray()
    while len(values) < size:
        piece = f.read(min(PIECE, size - len(values)))
        if not piece:
            raise _Malformed(f"expects {size} values, got {len(values)}")
        values += piece
    if f.read(1):
        raise _Malformed(f"goes on after its {size} values")
    return np.frombuffer(values, dtype="uint8").reshape(shape)
