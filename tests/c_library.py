"""`libneedle.so` by its C functions, as `needle.h` declares them."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import numpy as np

from needle import _core

FOLDER = Path(_core.__file__).parent  # of include/ and lib/
DTYPES = ("float32", "float64", "int32", "int64", "bool")


class Tensor(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("dtype", c.c_int),
        ("rank", c.c_int),
        ("shape", c.c_int64 * 8),
        ("bytes", c.c_size_t),
    ]

    def empty(self) -> np.ndarray:
        array = np.empty(tuple(self.shape[: self.rank]), DTYPES[self.dtype])
        assert array.nbytes == self.bytes
        return array


library = c.CDLL(str(FOLDER / "lib" / "libneedle.so"))
for name, result, *arguments in (
    ("open", c.c_int, c.c_char_p, c.POINTER(c.c_void_p)),
    ("close", None, c.c_void_p),
    ("plan_count", c.c_int, c.c_void_p),
    ("input_count", c.c_int, c.c_void_p, c.c_int),
    ("output_count", c.c_int, c.c_void_p, c.c_int),
    ("input", c.c_int, c.c_void_p, c.c_int, c.c_int, c.POINTER(Tensor)),
    ("output", c.c_int, c.c_void_p, c.c_int, c.c_int, c.POINTER(Tensor)),
    ("isa", c.c_char_p, c.c_void_p),
    ("run", c.c_int, c.c_void_p, c.c_int, c.POINTER(c.c_void_p), c.POINTER(c.c_void_p)),
    ("has_state", c.c_int, c.c_void_p),
    ("reset", c.c_int, c.c_void_p),
    ("set_threads", c.c_int, c.c_int),
    ("threads", c.c_int),
    ("last_error", c.c_char_p),
    ("version", c.c_char_p),
):
    function = getattr(library, f"needle_{name}")
    function.restype, function.argtypes = result, arguments


class Failed(Exception):
    """What `needle_last_error` says."""


def check(status: int) -> None:
    if status:
        raise Failed(library.needle_last_error().decode(errors="replace"))


class Model:
    def __init__(self, path: Path | str) -> None:
        self.handle = c.c_void_p()
        check(library.needle_open(str(path).encode(), c.byref(self.handle)))
        assert self.handle

    def __del__(self) -> None:
        library.needle_close(self.handle)

    isa = property(lambda self: library.needle_isa(self.handle).decode())
    plans = property(lambda self: library.needle_plan_count(self.handle))

    has_state = property(lambda self: bool(library.needle_has_state(self.handle)))

    def reset(self) -> None:
        check(library.needle_reset(self.handle))

    def tensors(self, kind: str, plan: int = 0) -> list[Tensor]:
        count = getattr(library, f"needle_{kind}_count")(self.handle, plan)
        check(count < 0)
        found = [Tensor() for _ in range(count)]
        for i, t in enumerate(found):
            check(getattr(library, f"needle_{kind}")(self.handle, plan, i, c.byref(t)))
        return found

    def __call__(self, *inputs: np.ndarray, plan: int = 0) -> list[np.ndarray]:
        wanted, outputs = self.tensors("input", plan), [t.empty() for t in self.tensors("output", plan)]
        given = [np.array(x, order="C") for x in inputs]
        assert [(x.shape, x.dtype) for x in given] == [(t.empty().shape, t.empty().dtype) for t in wanted]
        check(library.needle_run(self.handle, plan, addresses(given), addresses(outputs)))
        return outputs


def addresses(arrays: list[np.ndarray]) -> c.Array:
    return (c.c_void_p * max(1, len(arrays)))(*(a.ctypes.data for a in arrays))
