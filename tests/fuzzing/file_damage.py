"""Ways to damage the bytes of a file of needle: any bytes, its header, its graph, and what it says of tensors."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

Mutation = Callable[[bytearray, random.Random], bytes]
INTEGERS = (0, 1, -1, 2, 255, 2**31 - 1, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30)
VALUES: tuple[Any, ...] = (
    *INTEGERS,
    0.5,
    1e308,
    float("nan"),
    None,
    True,
    "",
    "x",
    "constant 0",
    "../x",
    [],
    {},
    [[]],
    {"node": 0},
)


class Ran:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["FUZZ_CANARY"],))


def flip(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def flip_header(data: bytearray, rng: random.Random) -> bytes:
    end = min(len(data), 8 + int.from_bytes(data[:8], "little"))
    for _ in range(rng.choice((1, 1, 2, 4))):
        data[rng.randrange(end)] = rng.randrange(256)
    return bytes(data)


def truncate(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data[: rng.randrange(len(data))])


def extend(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data) + rng.randbytes(rng.choice((1, 7, 8, 64, 4096)))


def cut_out(data: bytearray, rng: random.Random) -> bytes:
    first = rng.randrange(len(data))
    del data[first : first + rng.choice((1, 8, 100, 1000))]
    return bytes(data)


def repeat(data: bytearray, rng: random.Random) -> bytes:
    first = rng.randrange(len(data))
    return bytes(data[:first] + data[first : first + rng.choice((1, 8, 100, 1000))] + data[first:])


def header_length(data: bytearray, rng: random.Random) -> bytes:
    true = int.from_bytes(data[:8], "little")
    wrong = rng.choice((0, 1, true - 1, true + 1, true * 2, len(data), 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
    return struct.pack("<Q", wrong) + bytes(data[8:])


def foreign(data: bytearray, rng: random.Random) -> bytes:
    body = rng.randbytes(rng.choice((0, 1, 8, 100, 5000)))
    kinds = (
        body,
        b"PK\x03\x04" + body,
        b"\x89PNG\r\n\x1a\n" + body,
        b"\x7fELF" + body,
        b"\x1f\x8b" + body,
        b"GGUF" + body,
        zlib.compress(bytes(data)),
        pickle.dumps({"state_dict": Ran(), "x": body}),
        json.dumps({"a": list(body)}).encode(),
        b"{" * len(body),
        struct.pack("<Q", 2) + b"{}" + body,
        bytes(len(body)),
    )
    return rng.choice(kinds)


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of everything in nested lists and dicts."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        found.append((value, key))
        places(inner, found)
    return found


def damage(value: Any, rng: random.Random) -> None:
    """Change one thing somewhere in nested lists and dicts."""
    container, key = rng.choice(places(value, []))
    other, other_key = rng.choice(places(value, []))
    how = rng.randrange(6)
    if how == 0:
        del container[key]
    elif how == 1:
        container[key] = json.loads(json.dumps(other[other_key]))
    elif how == 2 and isinstance(container, dict):
        container[rng.choice(("x", "", "graph", "os.system", str(other_key)))] = container.pop(key)
    elif how == 3 and isinstance(container, list):
        container.insert(key, json.loads(json.dumps(container[key])))
    elif how == 4 and isinstance(container[key], int):
        container[key] += rng.choice((-1, 1))
    else:
        container[key] = copy.deepcopy(rng.choice(VALUES))


def edit_graph(data: bytearray, rng: random.Random) -> bytes:
    """Valid JSON that says something else: graph, layers, lists of tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    document = json.loads(header["__metadata__"]["needle"])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        damage(document, rng)
    header["__metadata__"]["needle"] = json.dumps(document)
    return with_header(header, data[end:])


def edit_numbers(data: bytearray, rng: random.Random) -> bytes:
    """Attributes of ops and arguments of layers that say something else, or nothing sensible."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    document = json.loads(header["__metadata__"]["needle"])
    rows = [r["target"][1] for r in document["graph"] if r["kind"] == "op"] + [
        m[1] for m in document["modules"].values()
    ]
    found = [place for row in rows for place in places(row, []) if isinstance(place[0][place[1]], int | float)]
    for _ in range(rng.choice((1, 1, 2))):
        container, key = rng.choice(found)
        if rng.random() < 0.5:
            container[key] += rng.choice((-3, -1, 1, 2, 5))
        else:
            container[key] = rng.choice((*INTEGERS, 1000, -5, 0.5))
    header["__metadata__"]["needle"] = json.dumps(document)
    return with_header(header, data[end:])


def edit_arguments(data: bytearray, rng: random.Random) -> bytes:
    """Attributes of ops and arguments of layers of any kind of value, at any depth."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    document = json.loads(header["__metadata__"]["needle"])
    rows = [r["target"][1] for r in document["graph"] if r["kind"] == "op"]
    rows += [m[1] for m in document["modules"].values()]
    found = [place for row in rows for place in places(row, [])] or places(document["graph"], [])
    for _ in range(rng.choice((1, 1, 2))):
        container, key = rng.choice(found)
        old = container.get(key) if isinstance(container, dict) else container[key] if key < len(container) else None
        if type(old) is int and rng.random() < 0.6:
            container[key] = old + rng.choice((-3, -2, -1, 1, 2, 5)) if rng.random() < 0.5 else -old
        elif type(old) is float and rng.random() < 0.6:
            container[key] = rng.choice((-old, 0.0, old * 1e30, float("nan"), float("inf"), 1.5))
        elif type(old) is bool and rng.random() < 0.7:
            container[key] = not old
        elif isinstance(old, list) and rng.random() < 0.6:
            container[key] = rng.choice((old + old, old[:-1], old[::-1], [*old, rng.choice(INTEGERS)]))
        elif isinstance(container, dict) or key < len(container):
            container[key] = copy.deepcopy(rng.choice((*VALUES, *INTEGERS, 1000, -5, 1, 3)))
    header["__metadata__"]["needle"] = json.dumps(document)
    return with_header(header, data[end:])


def edit_header(data: bytearray, rng: random.Random) -> bytes:
    """Names, dtypes, shapes and places of tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    for _ in range(rng.choice((1, 1, 2))):
        damage({k: v for k, v in header.items() if k != "__metadata__"} if rng.random() < 0.9 else header, rng)
    return with_header(header, data[end:])


def deep(data: bytearray, rng: random.Random) -> bytes:
    """Nesting that recursive readers do not survive."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    depth = rng.choice((500, 5000, 200_000))
    text = rng.choice(("[" * depth, "[" * depth + "]" * depth, '{"tuple":[' * depth + "]}" * depth))
    header["__metadata__"]["needle"] = header["__metadata__"]["needle"].replace("[", text, 1)
    return with_header(header, data[end:])


def with_header(header: Any, rest: bytes | bytearray) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(rest)


MUTATIONS: tuple[Mutation, ...] = (
    *(flip, flip_header, flip_header, truncate, extend, cut_out, repeat, header_length, foreign),
    *(edit_graph, edit_graph, edit_graph, edit_numbers, edit_numbers, edit_numbers, edit_header, edit_header, deep),
    edit_arguments,
)
