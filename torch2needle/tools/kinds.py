"""What a file is that a command was given, and what takes it."""

from __future__ import annotations

import json
import os
import struct
import zipfile

# First bytes of files that users have beside saved nets.
HEADS = {
    b"\x89ndlc": "a plan that was exported for libneedle.so, which C programs run (docs/c_api.md)",
    b"\x93NUMPY": "an array, which --input of run takes",
}
STATE = "what torch.save wrote, which --weights takes beside a model that is named"
PROGRAM = "a program of torch.export.save, which convert takes by a name that ends in .pt2"
ARCHIVES = {  # by the name, without its folder, of a file inside
    "archive_format": PROGRAM,
    "archive_version": PROGRAM,
    "constants.pkl": "TorchScript, of which MODEL names a function that gives torch.jit.load(path)",
    "data.pkl": STATE,
}
NET = "a saved needle net, which run, export, profile and fuse take, and verify as --net"
TENSORS = "tensors without a graph, which --weights takes beside a model that is named"


def kind_of_file(path: str) -> str:
    """What a file holds and what takes it, or nothing for what is not known."""
    if path.endswith(".onnx"):
        return "an ONNX file, which needle writes and does not read"
    if path.endswith(".pt2"):
        return PROGRAM
    try:
        with open(path, "rb") as f:
            head = f.read(8)
            for start, kind in HEADS.items():
                if head.startswith(start):
                    return kind
            if head.startswith(b"PK"):
                return kind_of_archive(path)
            (length,) = struct.unpack("<Q", head)
            if not 2 <= length <= os.path.getsize(path) - 8:
                return ""
            header = json.loads(f.read(length))
            return NET if "needle" in (header.get("__metadata__") or {}) else TENSORS
    except (OSError, ValueError, AttributeError, struct.error, zipfile.BadZipFile, RecursionError):
        return ""


def kind_of_archive(path: str) -> str:
    with zipfile.ZipFile(path) as archive:
        inside = {name.rpartition("/")[2] for name in archive.namelist()}
    if inside and all(name.endswith(".npy") for name in inside):
        return "arrays in one file; run takes each as a .npy file"
    return next((kind for name, kind in ARCHIVES.items() if name in inside), "")
