"""Einstein summation as permutes, reshapes and matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from needle.autograd import Tensor
from needle.ops.linalg.basic import product
from needle.ops.reduce.basic import summation
from needle.ops.shape.basic import permute, reshape, unsqueeze
from needle.ops.shape.runtime_shape import diagonal, summed_out

__all__ = ["einsum"]

NARROW = 16  # columns; products of fewer are faster as one, though it is copied there and back
ELLIPSIS_LABELS = "".join(chr(0x100 + i) for i in range(32))  # stand for the axes under "...", from the last backwards


def parse(equation: str, ranks: Sequence[Any]) -> tuple[list[str], str]:
    """Labels of the operands and of the result; `ranks()` are asked for only under "..."."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ValueError(f"[einsum] {equation!r} names {len(terms)} operands, got {len(ranks)}.")
    widest = 0
    for i, term in enumerate(terms):
        if "..." in term:
            count = ranks[i]() - len(term) + 3
            widest = max(widest, count)
            terms[i] = term.replace("...", ELLIPSIS_LABELS[:count][::-1])
    everywhere = ELLIPSIS_LABELS[:widest][::-1]
    if not arrow:
        letters = "".join(terms)
        right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1 and c not in everywhere))
    right = right.replace("...", everywhere)
    for c in right:
        if right.count(c) > 1 or not any(c in t for t in terms):
            raise ValueError(f"[einsum] {equation!r} has no single axis {c} for its result.")
    return terms, right


def without_repeats(x: Tensor, term: str) -> tuple[Tensor, str]:
    """x at the diagonals of the labels that it has twice."""
    for c in dict.fromkeys(term):
        while term.count(c) > 1:
            first, second = term.index(c), term.rindex(c)
            x = diagonal(x, 0, first, second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + c
    return x, term


def aligned(x: Tensor, term: str, labels: str) -> Tensor:
    """x with its axes in the order of `labels`, and axes of size 1 for those that it lacks."""
    have = [c for c in labels if c in term]
    order = tuple(term.index(c) for c in have)
    x = x if order == tuple(range(len(order))) else permute(x, order)
    for i, c in enumerate(labels):
        if c not in term:
            x = unsqueeze(x, i)
    return x


def merge_last(x: Tensor, rank: int, keep: int, groups: tuple[int, int]) -> Tensor:
    """x with the axes after the first `keep` as two: the first `groups[0]` of them, and the rest."""
    if groups == (1, 1):
        return x
    sizes: list[Any] = [x.shape[i] for i in range(rank)]
    merged: list[Any] = sizes[:keep]
    at = keep
    for n in groups:
        size: Any = 1
        for s in sizes[at : at + n]:
            size = s if isinstance(size, int) and size == 1 else size * s
        merged.append(size)
        at += n
    return reshape(x, tuple(merged))


def contract(a: Tensor, ta: str, b: Tensor, tb: str, keep: str, result: str) -> tuple[Tensor, str]:
    """The product of two operands, summed over the labels that nothing in `keep` needs; where it can be, with its axes in the
    order of `result`.
    """
    shared = [c for c in ta if c in tb]
    batch = "".join(c for c in shared if c in keep)
    inner = "".join(c for c in shared if c not in keep)
    rows, columns = "".join(c for c in ta if c not in tb), "".join(c for c in tb if c not in ta)
    if not inner:
        labels = batch + rows + columns
        return aligned(a, ta, labels) * aligned(b, tb, labels), labels
    places, others = ([result.find(c) for c in labels] for labels in (rows, columns))
    if max(places, default=-1) > max(others, default=-1) >= 0:  # the other operand's axes shall be the last
        return contract(b, tb, a, ta, keep, result)
    ahead = "".join(c for c in columns if result.find(c) < min(places, default=-1))
    rest = "".join(c for c in columns if c not in ahead)
    wide = prod(b.shape[tb.index(c)] for c in rest)
    if not isinstance(wide, int) or wide >= NARROW:
        batch, columns = batch + ahead, rest  # the left operand is the same for all
    n, k, m = len(rows), len(inner), len(columns)
    left, right = aligned(a, ta, batch + rows + inner), aligned(b, tb, batch + inner + columns)
    sizes = [left.shape[len(batch) + i] for i in range(n)] if n != 1 else []
    sizes_right = [right.shape[len(batch) + k + i] for i in range(m)] if m != 1 else []
    x = merge_last(left, len(batch) + n + k, len(batch), (n, k))
    y = merge_last(right, len(batch) + k + m, len(batch), (k, m))
    out = product(x, y)
    if n != 1 or m != 1:
        lead = [out.shape[i] for i in range(len(batch))]
        middle = sizes if n != 1 else [out.shape[len(batch)]]
        last = sizes_right if m != 1 else [out.shape[len(batch) + 1]]
        out = reshape(out, (*lead, *middle, *last))
    return out, batch + rows + columns


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """torch.einsum for any equation: operands are contracted from left to right. "..." needs a known rank."""
    terms, result = parse(equation, [lambda x=x: len(x.shape) for x in operands])
    done: tuple[Tensor, str] | None = None
    for i, (x, term) in enumerate(zip(operands, terms, strict=True)):
        x, term = without_repeats(x, term)
        later = set("".join(terms[i + 1 :]) + result)
        others = later | set(done[1] if done else "") | (set("".join(terms[:i])) if done is None else set())
        alone = tuple(j for j, c in enumerate(term) if c not in others)
        if alone:
            x, term = (summed_out if len(terms) > 1 else summation)(x, alone), "".join(c for c in term if c in others)
        done = (x, term) if done is None else contract(*done, x, term, "".join(later), result)
        stale = tuple(j for j, c in enumerate(done[1]) if c not in later)
        if stale:
            done = summation(done[0], stale), "".join(c for c in done[1] if c in later)
    if done is None:
        raise ValueError("[einsum] expects operands, got none.")
    out, labels = done
    order = tuple(labels.index(c) for c in result)
    return out if order == tuple(range(len(order))) else permute(out, order)
