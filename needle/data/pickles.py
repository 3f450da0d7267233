"""Pickles of plain data, read without `pickle`: a small machine of our own that calls nothing and imports nothing.

It knows dicts, lists, tuples, bytes, text, integers and numpy arrays of integers (on demand of floats, too), as Python 2 and 3
write them in every binary protocol. numpy's own names in a file stand for placeholders; arrays are made here, after their
sizes are checked.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from needle.files import existing

LARGEST = 2**30
RECONSTRUCT, FROM_BUFFER, NDARRAY, DTYPE, ENCODE = "reconstruct", "frombuffer", "ndarray", "dtype", "encode"
NAMES = {
    "numpy.core.multiarray _reconstruct": RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": RECONSTRUCT,
    "numpy.core.numeric _frombuffer": FROM_BUFFER,
    "numpy._core.numeric _frombuffer": FROM_BUFFER,
    "numpy ndarray": NDARRAY,
    "numpy dtype": DTYPE,
    "_codecs encode": ENCODE,
}
INTEGERS = frozenset(f"{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8))
NUMBERS = INTEGERS | {"f4", "f8"}


class Refused(Exception):
    """The file holds something else; the text completes "PATH ..."."""


class Name:
    """A global that the file mentions."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class DType:
    """numpy.dtype, one of `known`; its byte order comes with BUILD."""

    def __init__(self, code: Any, known: frozenset[str]) -> None:
        code = code.decode("latin-1") if isinstance(code, bytes) else code
        if not isinstance(code, str) or code not in known:
            what = "numbers" if known is NUMBERS else "integers"
            raise Refused(f"holds an array that is not of {what}, got dtype {code!r:.20}")
        self.code, self.order = code, "="

    def build(self, state: Any) -> None:
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise Refused("holds a dtype of an unknown byte order")
        self.order = order


class Array:
    """numpy.ndarray; its content comes with BUILD."""

    value: np.ndarray | None = None

    def build(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.value = as_array(data, dtype, shape, "F" if fortran else "C")


def as_array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, DType) or not isinstance(data, bytes) or not isinstance(shape, tuple):
        raise Refused("holds an array of an unknown form")
    if not all(type(s) is int and s >= 0 for s in shape) or order not in ("C", "F"):
        raise Refused("holds an array of an unknown form")
    values = np.frombuffer(data, dtype=np.dtype(dtype.order + dtype.code)) if data else np.empty(0, dtype.code)
    if len(shape) > 8 or max(shape, default=0) > LARGEST or math.prod(shape) != values.size:
        raise Refused(f"holds an array of shape {shape!s:.60} in {values.size} values")
    return values.reshape(shape, order=order)


def latin(text: str) -> bytes:
    return text.encode("latin-1")


# What one opcode pushes, from its argument.
PUSHES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1"), lambda a: a),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), lambda a: a),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), bytes),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), latin),  # Python 2's str, which is bytes
    "NONE": lambda a: None,
    "NEWTRUE": lambda a: True,
    "NEWFALSE": lambda a: False,
    "EMPTY_DICT": lambda a: {},
    "EMPTY_LIST": lambda a: [],
    "EMPTY_TUPLE": lambda a: (),
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Machine:
    def __init__(self, data: bytes, dtypes: frozenset[str] = INTEGERS) -> None:
        self.data, self.dtypes, self.encoded = data, dtypes, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        stream = io.BytesIO(self.data)
        for opcode, argument, _ in pickletools.genops(stream):
            self.step(opcode.name, argument)
        if stream.tell() != len(self.data):
            raise Refused(f"goes on after its end, got {len(self.data) - stream.tell()} more bytes")
        return self.stack.pop()

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in PUSHES:
            stack.append(PUSHES[name](argument))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in TUPLES:
            stack.append(tuple(self.take(len(stack) - TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self.take(self.marks.pop())))
        elif name in ("LIST", "APPEND", "APPENDS"):
            items = self.take(len(stack) - 1 if name == "APPEND" else self.marks.pop())
            if name == "LIST":
                stack.append([])
            self.top(list).extend(items)
        elif name in ("DICT", "SETITEM", "SETITEMS"):
            items = self.take(len(stack) - 2 if name == "SETITEM" else self.marks.pop())
            if name == "DICT":
                stack.append({})
            self.set_items(items)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.push_name(argument if name == "GLOBAL" else " ".join(self.take(len(stack) - 2)))
        elif name == "REDUCE":
            function, arguments = self.take(len(stack) - 2)
            stack.append(self.reduce(function, arguments))
        elif name == "BUILD":
            (state,) = self.take(len(stack) - 1)
            self.top((Array, DType)).build(state)
        elif name == "FRAME" and argument > len(self.data):
            raise Refused(f"announces a frame of {argument} bytes, which it does not have")
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise Refused(f"holds more than plain data, got {name}")

    def take(self, start: int) -> list[Any]:
        """What lies above `start`, removed."""
        if start < 0:
            raise IndexError
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def top(self, kind: Any) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise TypeError
        return self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        into = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, bytes | str):
                raise Refused(f"holds a dict whose keys are not names, got {type(key).__name__}")
            into[latin(key) if isinstance(key, str) else key] = value

    def push_name(self, name: str) -> None:
        if name not in NAMES:
            shown = ascii(name.replace(" ", ".")).strip("'\"")  # a name of the file's, which may hold anything
            raise Refused(f"holds more than plain data, got {shown:.60}")
        self.stack.append(Name(NAMES[name]))

    def reduce(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise TypeError
        if function.kind == DTYPE:
            return DType(arguments[0], self.dtypes)
        if function.kind == RECONSTRUCT:
            return Array()
        if function.kind == FROM_BUFFER:
            made = Array()
            made.value = as_array(*arguments)
            return made
        if function.kind == ENCODE:  # how protocol 2 writes Python 3's bytes
            text, encoding = arguments
            self.encoded += len(text)
            if encoding != "latin1" or self.encoded > len(self.data):  # one text encoded over and over fills any memory
                raise Refused("holds more than plain data, got a text to encode")
            return latin(text)
        raise TypeError


def read_pickle(path: str | os.PathLike, dtypes: frozenset[str] = INTEGERS) -> dict[bytes, Any]:
    """The dict in a pickle file: its keys as bytes; arrays, lists, bytes and numbers. ValueError for anything else.

    dtypes: of the arrays that are let in, INTEGERS or NUMBERS.
    """
    name = existing("read_pickle", path)
    if os.path.getsize(path) > LARGEST:
        raise ValueError(f"[read_pickle] {name} expects at most {LARGEST} bytes, got {os.path.getsize(path)}.")
    with open(path, "rb") as f:
        data = f.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in text that is refused anyway
            content = Machine(data, dtypes).run()
        if not isinstance(content, dict):
            raise Refused(f"expects a dict, got {type(content).__name__}")
        return {k: v.value if isinstance(v, Array) else v for k, v in content.items()}
    except Refused as e:
        raise ValueError(f"[read_pickle] {name} {e}.") from None
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, AttributeError):
        raise ValueError(f"[read_pickle] {name} is not a complete pickle.") from None
