"""Quotients, angles and determinants as nodes of ONNX."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from needle import ops

from .operators import register

if TYPE_CHECKING:
    from .export import Nodes, Value


def operands(op: Any, at: Nodes, out: Any, x: Value, y: Value | None) -> tuple[Value, Value]:
    return at.cast(x, out.dtype), at.number(op.scalar, out.dtype) if y is None else at.cast(y, out.dtype)


def across(at: Nodes, rest: Value, y: Value, zero: Value) -> Value:
    """Whether a remainder is on the other side of zero than the divisor."""
    differ = at("Xor", at("Less", rest, zero), at("Less", y, zero))
    return at("And", at("Not", at("Equal", rest, zero)), differ)


def whole_divisor(at: Nodes, y: Value, dtype: str) -> Value:
    """An integer divisor without 0, whose quotients runtimes do not survive, and -1, by which one of them overflows."""
    bad = at("Or", at("Equal", y, at.number(0, dtype)), at("Equal", y, at.number(-1, dtype)))
    return at("Where", bad, at.number(1, dtype), y, dtype=dtype)


@register(ops.Remainder)
def remainder(op: Any, at: Nodes, out: Any, x: Value, y: Value | None = None) -> Value:
    x, y = operands(op, at, out, x, y)
    zero = at.number(0, out.dtype)
    if out.dtype.startswith("float"):
        rest = at("Mod", x, y, fmod=1, dtype=out.dtype)
        wanted = op.rounding == "floor"
        return at("Where", across(at, rest, y, zero), at("Add", rest, y), rest, dtype=out.dtype) if wanted else rest
    y = whole_divisor(at, y, out.dtype)
    rest = at("Mod", x, y, dtype=out.dtype)
    return rest if op.rounding == "floor" else at("Sub", x, at("Mul", at("Div", x, y), y), dtype=out.dtype)


@register(ops.WholeQuotient)
def _(op: Any, at: Nodes, out: Any, x: Value, y: Value | None = None) -> Value:
    x, y = operands(op, at, out, x, y)
    zero, one = at.number(0, out.dtype), at.number(1, out.dtype)
    if not out.dtype.startswith("float"):
        safe = whole_divisor(at, y, out.dtype)
        quotient = at("Div", x, safe)
        if op.rounding == "floor":
            behind = across(at, at("Sub", x, at("Mul", quotient, safe)), safe, zero)
            quotient = at("Sub", quotient, at.cast(behind, out.dtype))
        quotient = at("Where", at("Equal", y, at.number(-1, out.dtype)), at("Neg", x), quotient)
        return at("Where", at("Equal", y, zero), zero, quotient, dtype=out.dtype)
    exact = at("Div", x, y)
    if op.rounding == "trunc":
        return at("Where", at("Less", exact, zero), at("Ceil", exact), at("Floor", exact), dtype=out.dtype)
    rest = at("Mod", x, y, fmod=1)
    less = at.cast(across(at, rest, y, zero), out.dtype)
    quotient = at("Sub", at("Div", at("Sub", x, rest), y), less)  # a whole number but for its rounding
    whole = at("Floor", quotient)
    high = at("Greater", at("Sub", quotient, whole), at.number(0.5, out.dtype))
    whole = at("Where", high, at("Add", whole, one), whole)
    whole = at("Where", at("Equal", quotient, zero), at("Mul", exact, zero), whole)  # a zero has the quotient's sign
    return at("Where", at("Equal", y, zero), exact, whole, dtype=out.dtype)


def angle(op: Any, at: Nodes, out: Any, y: Value, x: Value) -> Value:
    """atan2 by the arctangent of a quotient up to 1, in which nothing overflows."""
    y, x = at.cast(y, out.dtype), at.cast(x, out.dtype)
    zero, one = at.number(0, out.dtype), at.number(1, out.dtype)

    def negative(v: Value) -> Value:  # also -0, whose reciprocal is
        return at("Or", at("Less", v, zero), at("Less", at("Reciprocal", v), zero))

    up, right = at("Abs", y), at("Abs", x)
    high, low = at("Max", up, right), at("Min", up, right)
    share = at("Div", low, at("Where", at("Equal", high, zero), one, high))
    share = at("Where", at("And", at("IsInf", low), at("IsInf", high)), one, share)
    first = at("Atan", share)
    steep = at("Where", at("Greater", up, right), at("Sub", at.number(math.pi / 2, out.dtype), first), first)
    half = at("Where", negative(x), at("Sub", at.number(math.pi, out.dtype), steep), steep)
    return at("Where", negative(y), at("Neg", half), half, dtype=out.dtype)


register(ops.Atan2, angle)


@register(ops.Det)
def _(op: Any, at: Nodes, out: Any, x: Value) -> Value:
    return at("Det", x)
