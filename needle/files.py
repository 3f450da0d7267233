"""Safetensors files: written whole or not at all, and read in place."""

from __future__ import annotations

import json
import os

import numpy as np
from safetensors.numpy import save_file

from . import _core
from .backend_ndarray import NDArray

DTYPES = {"F32": "float32", "F64": "float64", "I32": "int32", "I64": "int64", "BOOL": "bool"}


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


def write_tensors(path: str | os.PathLike, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """A safetensors file, whole or not there, with the permissions of the process's other files."""
    # Beside it, then in its place: models that were loaded from the file still read the old one.
    beside = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as f:
            mode = os.fstat(f.fileno()).st_mode
        save_file(arrays, beside, metadata=metadata)
        os.chmod(beside, mode)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.remove(beside)
