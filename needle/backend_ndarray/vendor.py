"""Vendors' libraries beside needle's kernels on a GPU (csrc/gpu/vendor): which are open, and what was chosen."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

MODES = ("auto", "on", "off")
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")


class Vendors:
    """The libraries that the device's library at `path` has found."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.needle_vendor_report.restype = ctypes.c_size_t
        self._library.needle_vendor_report.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._library.needle_vendor_folders(":".join(filter(None, sys.path)).encode())

    def report(self) -> dict[str, Any]:
        """`mode`, `libraries` and `choices`, as csrc/gpu/vendor/report.h has them."""
        size = 1 << 16
        while True:
            text = ctypes.create_string_buffer(size)
            needed = self._library.needle_vendor_report(text, size)
            if needed <= size:
                break
            size = 2 * needed  # other threads may add to it meanwhile
        if text.value.startswith(b"["):
            raise RuntimeError(text.value.decode())
        report: dict[str, Any] = json.loads(text.value)
        for choice in report["choices"]:
            choice["precision"] = PRECISIONS[choice["precision"]]
        return report

    def use(self, mode: str | None) -> None:
        if mode is not None and mode not in MODES:
            raise ValueError(f"[vendor] mode expects one of {', '.join(MODES)}, got {mode}.")
        self._library.needle_vendor_restart((mode or "").encode())
