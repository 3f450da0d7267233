"""Files that are whole or not there, and safetensors files, which are read in place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from . import _core
from .backend_ndarray import NDArray

DTYPES = {"F32": "float32", "F64": "float64", "I32": "int32", "I64": "int64", "BOOL": "bool"}


def existing(label: str, path: str | os.PathLike) -> str:
    """The path as text, for messages; FileNotFoundError where no file is there."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"[{label}] there is no file {os.fspath(path)}.")
    return os.fspath(path)


def map_tensors(path: str | os.PathLike) -> dict[str, NDArray]:
    """The tensors of a safetensors file as arrays in its pages."""
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
    header.pop("__metadata__", None)
    file = _core.FileMap(os.fspath(path))
    rows = {k: (8 + length + row["data_offsets"][0], row["shape"], row["dtype"]) for k, row in header.items()}
    unknown = {dtype for *_, dtype in rows.values()} - DTYPES.keys()
    if unknown:
        raise ValueError(f"it holds tensors of dtype {min(unknown)}")
    return {k: NDArray.wrap(file.array(at, shape, DTYPES[dtype])) for k, (at, shape, dtype) in rows.items()}


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A place to write to, beside `path`, which then takes its place; an interrupt leaves the old file, or none.

    What was loaded from the old file still reads that. The new one has the permissions of the process's other files.
    """
    target = Path(path)
    part = target.with_name(f".part{os.getpid()}-{target.name}")
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        part.chmod(mode)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_file(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write `content` to `path`, whose folder is made; the file is whole or not there."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
    return target


def write_tensors(path: str | os.PathLike, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """A safetensors file, whole or not there."""
    with replacing(path) as part:
        save_file(arrays, part, metadata=metadata)
