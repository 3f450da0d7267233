"""Programs that torch.export.save wrote, read so that nothing in the file can run.

torch.export.load is for files of one's own: it unpickles inputs, weights and constants, opens compiled libraries, evaluates
expressions and guards as Python, writes source code with the names of values in it and calls what a node's target names, be it
torch.os.system. Here no pickle is read but with weights_only, and every word of a program is checked before torch gets it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import json
import math
import operator
import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram

NAME, WORD = re.compile(r"\w*"), re.compile(r"[\w.+\-]*")
TARGET = re.compile(r"(?:torch\.ops\.\w+|torch|_operator|math)(?:\.\w+){1,2}")
NAMESPACES = ("aten", "needle", "torchvision")  # torch itself registers others, which read files and talk to processes
SIZES = ("size", "stride", "storage_offset")
LONGEST, LARGEST_POWER = 10_000, 16


class Unsafe(Exception):
    """The file holds more than a plain program; the text completes "PATH holds ..."."""


def load_program(path: str) -> ExportedProgram:
    """The one program in the archive, without its sample inputs. Unsafe where it could run code, else what torch raises."""
    from torch._export.serde import schema, serialize
    from torch.export.pt2_archive import _package as package

    reader = package.PT2ArchiveReader(path)
    records = reader.get_file_names()
    prefix, suffix = package.MODELS_FILENAME_FORMAT.split("{}")
    names = [r.removeprefix(prefix).removesuffix(suffix) for r in records if r.startswith(prefix)]
    if len(names) != 1:
        raise Unsafe(f"{len(names)} programs, where one is expected")
    (name,) = names
    program = serialize._bytes_to_dataclass(schema.ExportedProgram, reader.read_bytes(f"{prefix}{name}{suffix}"))
    check_words(program, "")
    parts: list[Any] = []
    for folder, config, load in (
        (package.WEIGHTS_DIR, package.WEIGHTS_CONFIG_FILENAME_FORMAT, package._load_state_dict),
        (package.CONSTANTS_DIR, package.CONSTANTS_CONFIG_FILENAME_FORMAT, package._load_constants),
    ):
        legacy = f"{folder}{name}.pt"  # of torch before 2.9
        if legacy in records:
            parts.append(load_pickle(reader.read_bytes(legacy), "weights"))
            continue
        payloads = package._load_payload_config(reader, config.format(name))
        check_words(payloads, "")
        kinds = (package.WEIGHT_FILENAME_PREFIX, package.TENSOR_CONSTANT_FILENAME_PREFIX)
        for key, payload in payloads.config.items():
            if payload.use_pickle or not str(payload.path_name).startswith(kinds):
                raise Unsafe(f"a pickled object, {key}")
        parts.append(load(reader, name))
    state, constants = parts
    return serialize.ExportedProgramDeserializer().deserialize(program, state, constants, b"")


def load_pickle(content: bytes, what: str) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as e:  # pickle, zipfile and torch raise their own kinds
        raise Unsafe(f"pickled {what} that are more than tensors") from e
    if not isinstance(found, dict):
        raise Unsafe(f"{what} that are no dict")
    return found


# -- words ---------------------------------------------------------------------------------------------------------------


def check_words(value: Any, field: str) -> None:
    """Every text in a program, by the field that it stands in; torch's schema gives fields, the file values."""
    if isinstance(value, Enum) or value is None or isinstance(value, bool | int | float):
        return
    if isinstance(value, str):
        CHECKS.get(field, check_word)(value)
    elif isinstance(value, list):
        for item in value:
            check_words(item, field)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_word(key)
            check_words(item, field)
    elif hasattr(value, "create"):  # a union, of whose fields one is set
        check_words(value.value, value.type)
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            check_words(getattr(value, f.name), f.name)
    else:
        raise Unsafe(f"a {type(value).__name__} in its program")


def shown(text: str) -> str:
    return ascii(text if len(text) < 60 else text[:57] + "...")


def check_word(text: str, pattern: re.Pattern = WORD) -> None:
    if not pattern.fullmatch(text):
        raise Unsafe(f"a name that is none, got {shown(text)}")


def check_target(text: str) -> None:
    """An operator of a known library, a region, or arithmetic on sizes."""
    if not TARGET.fullmatch(text):
        raise Unsafe(f"a call of {shown(text)}, which is no operator")
    root, *names = text.split(".")
    try:
        found = functools.reduce(getattr, names, {"torch": torch, "math": math}.get(root, operator))
    except AttributeError:
        raise Unsafe(f"a call of {shown(text)}, which is not known here") from None
    if isinstance(found, OpOverload):
        files = any(a.name == "filename" for a in found._schema.arguments)
        if files or found.namespace not in NAMESPACES or not torch._C._dispatch_has_kernel(found.name()):
            raise Unsafe(f"a call of {text}, which is not taken from a file")
    elif not isinstance(found, HigherOrderOperator) and found not in arithmetic():
        raise Unsafe(f"a call of {shown(text)}, which is no operator")


@functools.cache
def arithmetic() -> frozenset[Any]:
    from torch._export.serde.serialize import _SYM_OPS

    return frozenset(_SYM_OPS)


@functools.cache
def functions() -> frozenset[str]:
    """What torch may write into the expression of a size."""
    import sympy
    from torch.utils._sympy import functions as own
    from torch.utils._sympy.interp import handlers

    named = [c for c in vars(own).values() if isinstance(c, type) and issubclass(c, sympy.Basic)]
    atoms = [sympy.Symbol, sympy.Integer, sympy.Float, sympy.Rational, sympy.floor, sympy.ceiling]
    return frozenset(c.__name__ for c in (*handlers(), *named, *atoms)) | {"Eq", "Ne", "Lt", "Le", "Gt", "Ge", "sqrt"}


def parse(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise Unsafe(f"an expression of {len(text)} letters")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unsafe(f"an expression that is none, got {shown(text)}") from None


def plain(node: ast.AST, text: str, call: Callable[[ast.Call], bool], access: bool) -> None:
    """Arithmetic and comparisons of names and numbers, and what `call` lets through; `access`: subscripts, too."""
    good = isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp)
    if isinstance(node, ast.Constant):
        is_word = isinstance(node.value, str) and WORD.fullmatch(node.value) is not None
        good = is_word or isinstance(node.value, bool | int | float | None)
    elif isinstance(node, ast.Name):
        good = "__" not in node.id
    elif isinstance(node, ast.Subscript):
        good = access
    elif isinstance(node, ast.Call):
        good = call(node)
    if not good:
        raise Unsafe(f"an expression that could run code, got {shown(text)}")
    parts = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
    if isinstance(node, ast.Call):
        parts = [*node.args, *(k.value for k in node.keywords)]
        parts += [node.func.value] if isinstance(node.func, ast.Attribute) else []
    if is_power(node):
        exponents = [n.value for n in ast.walk(parts[-1]) if isinstance(n, ast.Constant)]
        huge = len(exponents) > 1 or any(isinstance(n, int | float) and abs(n) > LARGEST_POWER for n in exponents)
        if huge or any(is_power(n) for p in parts for n in ast.walk(p)):
            raise Unsafe(f"an expression of a huge power, got {shown(text)}")
    for part in parts:
        plain(part, text, call, access)


def is_power(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and ("Pow" in node.func.id or "Shift" in node.func.id)
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift)


def check_expression(text: str) -> None:
    """Of a size, which torch hands to sympy, and sympy to Python."""
    plain(parse(text), text, lambda c: isinstance(c.func, ast.Name) and c.func.id in functions(), False)


def check_guard(text: str) -> None:
    """A condition on the inputs' sizes, which torch makes Python of, such as L['x'].size()[0] <= 4."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    def call(node: ast.Call) -> bool:
        f = node.func
        if isinstance(f, ast.Attribute):
            of = f.value.id if isinstance(f.value, ast.Name) else ""
            return {"math": f.attr in vars(math), "torch": f.attr.startswith("sym_")}.get(of, f.attr in SIZES)
        return isinstance(f, ast.Name) and f.id in {"max", "min", *SYMPY_INTERP}

    plain(parse(text), text, call, True)


def check_structure(text: str) -> None:
    """How inputs nest: a context may name a class of an enumeration or a factory, which torch would import."""

    def check(value: Any, inside: bool) -> None:
        if isinstance(value, list):
            for item in value:
                check(item, inside)
        elif isinstance(value, dict) and not inside and set(value) <= {"type", "context", "children_spec"}:
            check(value.get("children_spec"), False)
            context = value.get("context")
            if isinstance(context, str) and not WORD.fullmatch(context):
                context = json.loads(context)
            check(context, True)
        elif isinstance(value, dict) or (isinstance(value, str) and not WORD.fullmatch(value)):
            raise Unsafe("inputs of a kind that is not read from a file")

    try:
        check(json.loads(text), False)
    except (ValueError, RecursionError):
        raise Unsafe("inputs of an unknown structure") from None


def free(text: str) -> None:
    """Texts that torch only shows or passes on."""


CHECKS: dict[str, Callable[[str], None]] = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), functools.partial(check_word, pattern=NAME)),
    **dict.fromkeys(("target", "as_operator"), check_target),
    **dict.fromkeys(("in_spec", "out_spec"), check_structure),
    **dict.fromkeys(("metadata", "as_string", "as_strings", "torch_version"), free),
    "expr_str": check_expression,
    "guards_code": check_guard,
}
