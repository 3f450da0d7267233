"""Values of options, or a sentence about what they should be."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable
from typing import Any

DTYPES = {"float32": 4, "float64": 8, "int64": 8, "int32": 4, "bool": 1}  # bytes
DTYPES |= {"float16": 2, "int16": 2, "int8": 1, "uint8": 1}
INPUT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>scalar|\d{1,18}(?:x\d{1,18}){0,15})(?::(?P<dtype>\w+))?", re.ASCII
)


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expects a whole number of at least {least}, got {text!r}")
        return int(text)

    return parse


def file_name(text: str) -> str:
    """Not the value of a variable that the shell does not have."""
    if not text:
        raise argparse.ArgumentTypeError("expects the name of a file, got an empty one")
    return text


def object_of(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise argparse.ArgumentTypeError(f"expects JSON, got {text[:60]!r} ({e})") from None
        if not isinstance(value, kind):
            raise argparse.ArgumentTypeError(f"expects a JSON {'array' if kind is list else 'object'}, got {text!r}")
        return value

    return parse


def shape_of(text: str) -> tuple[str, tuple[int, ...], str]:
    """The name (or ""), shape and dtype of an input such as x=1x3x224x224:float32."""
    found = INPUT.fullmatch(text)
    if found is None or (found["dtype"] or "float32") not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"expects [name=]1x3x224x224[:dtype], dtype one of {', '.join(DTYPES)}, got {text!r}"
        )
    shape = () if found["shape"] == "scalar" else tuple(map(int, found["shape"].split("x")))
    dtype = found["dtype"] or "float32"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if math.prod(shape) * DTYPES[dtype] > memory:
        raise argparse.ArgumentTypeError(f"expects what fits into the {memory / 1e9:.0f} GB of memory, got {text!r}")
    return found["name"] or "", shape, dtype
