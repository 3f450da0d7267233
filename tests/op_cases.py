"""Calls at the corners of torch's ops: dtypes that meet, whole numbers beyond 2 ** 53, NaN, no axes, no elements."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

NAN, INF, BIG = float("nan"), float("inf"), 2**53 + 1


def t(*values: Any, dtype: str = "float32") -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype))


def i64(*values: int) -> torch.Tensor:
    return t(*values, dtype="int64")


def bools(*values: bool) -> torch.Tensor:
    return t(*values, dtype="bool")


def put_in(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[()] = y
    return x


def written(x: torch.Tensor, value: Any) -> torch.Tensor:
    x = x.clone()
    x[0] = value
    return x


def limits_of_sum(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x.sum()
    return total, -total.max(0).values, -total.min(0).values


X = torch.arange(6.0).reshape(2, 3)
LARGE = i64(BIG, BIG + 1, BIG - 1, 2**62 + 1)
FLOATS = t(-5, 5, 3, 0, -0.0, INF, NAN, -INF)
DOUBLE = torch.full((2, 3), 0.1, dtype=torch.float64)
EMPTY, NUMBER = torch.zeros(0, 3), torch.tensor(3.0)

CASES: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    # dtypes that meet
    "stack of int and float": (lambda x, y: torch.stack([x, y]), (i64(1, 2), t(0.5, 1.5))),
    "stack of float32 and float64": (lambda x, y: torch.stack([x, y]), (t(1, 2), t(0.1, 0.2, dtype="float64"))),
    "cat of bool and int": (lambda x, y: torch.cat([x, y]), (bools(True), i64(2))),
    "cat of nothing": (
        lambda x, y: (torch.cat([y[:0], x], 1), torch.cat([x, y[:0]]), torch.hstack([y[:0], x]), torch.cat([y, y[:0]])),
        (X, t(1, 2, dtype="float64")),
    ),
    "cat of nothing alone": (lambda x, y: torch.cat([x, y], -1), (i64(), t(dtype="float64"))),
    "cat of nothing first": (lambda x: torch.cat([torch.zeros(0, dtype=torch.float64), x], 1), (X,)),
    "scaled in the dtype of the result": (
        lambda x, y, w: (
            torch.addcmul(x, y, w, value=-1.5),
            torch.addcmul(x, y, w.double(), value=-1.5),
            torch.addcdiv(w.double(), y, w + 0.5, value=0.1),
            torch.add(w, w, alpha=2),
            torch.add(x, w, alpha=3),
            torch.sub(y.double(), x, alpha=0.1),
            torch.rsub(x, y.double(), alpha=0.1),
        ),
        (t(1, 2, dtype="int32"), i64(4, -5), bools(True, True)),
    ),
    "three dtypes": (
        lambda x, y, w: (torch.addcmul(x, y, w), torch.addcdiv(x, y, w, value=2), torch.clamp(y, w, x)),
        (t(1, 2), i64(4, -5), torch.tensor(0.1, dtype=torch.float64)),
    ),
    "products of ints scaled by fractions": (
        lambda x, y: (torch.addmm(x, x, y, beta=0.5, alpha=1.5), torch.baddbmm(x[None], x[None], y[None], beta=2.7)),
        (i64(1, 2, 3, 4).reshape(2, 2), i64(5, 6, 7, 8).reshape(2, 2)),
    ),
    "an infinite limit": (lambda x: (x.clamp(-INF, 3), x.clamp(2, INF), x.clip(-INF)), (i64(1, 5),)),
    "numbers beside a number": (
        lambda x, y: (
            x & 2,
            7 // x,
            2**x,
            torch.where(x > 1, x, 3),
            torch.where(y > 1, y, 0.1),
            torch.where(y > 2, 2, 3),
        ),
        (torch.tensor(3, dtype=torch.int32), t(0.5, 2, dtype="float64")),
    ),
    "filled with a tensor": (
        lambda x, y: ((x + 0).fill_(y), torch.full_like(x, y), x.new_full((2, 3), y)),
        (t(1, 2), torch.tensor(7, dtype=torch.int32)),
    ),
    "writes of higher ints": (
        lambda x, y: (
            operator.ipow(x + 0, y),
            (x * 1).add_(y),
            operator.ifloordiv(x + 0, i64(2, 2)),
            (x + 0).sub_(y, alpha=2),
        ),
        (t(5, 6, dtype="int32"), i64(2, 2)),
    ),
    "writes of higher floats": (
        lambda x, y: (operator.itruediv(x + 0, y), torch.ones_like(x).floor_divide_(y), (x / 2).mul_(y)),
        (t(5, 6), t(1.5, 2, dtype="float64")),
    ),
    "writes of lower kinds": (lambda x, y: ((x * 1).add_(y), (x * 1).mul_(y > 2)), (t(1, 2), i64(2, 3))),
    "a float64 constant": (
        lambda x: (
            torch.stack([x, DOUBLE]),
            written(x, DOUBLE[0]),
            x.type_as(DOUBLE),
            x[:1].expand_as(DOUBLE),
            x.view_as(DOUBLE),
        ),
        (X,),
    ),
    "float32 and float64": (
        lambda x, y: (x + y, x * y, torch.where(x > 1, x, y)),
        (t(1, 2), t(0.1, 0.2, dtype="float64")),
    ),
    "a float64 number": (
        lambda x, y: (x + y, torch.maximum(x, y), x < y),
        (t(1, 2), torch.tensor(0.1, dtype=torch.float64)),
    ),
    "an int64 number": (lambda x, y: (x + y, x * y, x // y), (t(1, 2, dtype="int32"), torch.tensor(7))),
    "ints and a float64 number": (lambda x, y: (x + y, x / y), (i64(1, 2), torch.tensor(0.1, dtype=torch.float64))),
    "where of bools": (lambda c, y: torch.where(c, y, c), (bools(True, False), bools(True, True))),
    "where of numbers": (
        lambda c: tuple(torch.where(c, a, b) for a, b in ((1, 2), (1.0, 2), (True, False), (True, 2))),
        (bools(True, False),),
    ),
    "where of ints and numbers": (
        lambda c, y: (torch.where(c, y, 2), torch.where(c, y, 2.5), torch.where(c, 2.5, y), torch.where(c, True, y)),
        (bools(True, False), i64(3, 4)),
    ),
    "masked_fill of ints": (lambda x: (x.masked_fill(x > 1, 1.5), x.masked_fill(x > 1, True)), (i64(1, 2, 3),)),
    "masked_fill of bools": (lambda x: x.masked_fill(x, 1), (bools(True, False),)),
    "masked_fill by a tensor": (lambda x, y: x.masked_fill(x > 1, y), (i64(1, 2, 3), torch.tensor(1.5))),
    "threshold of ints": (lambda x: (F.threshold(x, 1, 2.5), F.threshold(x, -1.5, 7)), (i64(-1, -2, 3),)),
    "one number written to no axes": (put_in, (t(3.0)[0], i64(2))),
    "hardtanh of ints": (lambda x: (F.hardtanh(x), F.hardtanh(x, -1, 2), F.relu6(x)), (i64(1, 7, -3),)),
    "clamp of ints": (lambda x: (x.clamp(0.5, 2), x.clamp(0, 2), x.clamp(min=0.5)), (i64(0, 2, 3),)),
    "clamp of ints at infinity": (lambda x: (x.clamp(-INF, 2), x.clamp(INF, 0), x.clamp(max=INF)), (i64(0, 2, 3),)),
    "einsum of bools": (
        lambda x, y: (torch.einsum("ab,ac->ac", x, y), torch.einsum("ab,cb->ac", x, x), torch.einsum("ab->a", x)),
        (bools([True], [False]), bools([True, True], [False, True])),
    ),
    "einsum of int32": (
        lambda x, y: (torch.einsum("ab,ac->ac", x, y), torch.einsum("ac,ab->ab", y, x)),
        (t([1], [2], dtype="int32"), t([1, 2], [3, 4], dtype="int32")),
    ),
    "einsum of nothing": (
        lambda x, y: (torch.einsum("abc,abe->ae", x, y), torch.einsum("abc,abe->ac", x, y)),
        (torch.zeros(4, 0, 3, dtype=torch.int32), torch.zeros(4, 0, 2, dtype=torch.int32)),
    ),
    "matmul of bools": (lambda x, y: x @ y, (torch.zeros(2, 0, dtype=torch.bool), torch.zeros(0, 3, dtype=torch.bool))),
    "largest of a number": (limits_of_sum, (t(1, 2),)),
    "square of bools": (lambda x: torch.square(x), (bools(True, False),)),
    "totals in a dtype": (
        lambda x: (x.sum(dtype=torch.int32), x.cumsum(0, dtype=torch.int32), x.prod(dtype=torch.int32)),
        (i64(2, 3),),
    ),
    # powers, quotients
    "bools ** bool": (lambda x: (x.pow(False), x.pow(True)), (bools(True, False),)),
    "number ** ints": (lambda x: (0.5**x, 2**x, torch.pow(2.5, x)), (i64(1, 2, 3),)),
    "ints ** ints": (lambda x, y: x**y, (i64(3, -3, 0, 2, 1, -1), i64(39, 39, 0, 63, -1, -3))),
    "ints ** number": (lambda x: (x**2, x**3, x**0.5), (i64(3**13, 3),)),
    "quotients of ints": (
        lambda x: (
            x / 2,
            x // 2,
            x % 3,
            x % -3,
            torch.fmod(x, -3),
            torch.div(x, 2, rounding_mode="trunc"),
            7 // x,
            7 % x,
        ),
        (i64(-5, 5, 3),),
    ),
    "quotients of floats": (
        lambda x: (x // 2, x % 3, x % -3, torch.fmod(x, -3), 7 // x, 7 % x, x // 0, x % 0, x % INF, x // INF),
        (FLOATS,),
    ),
    "quotients of tensors": (
        lambda x, y: (x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc")),
        (t(-5, 5, 1, 0.3, 6, -6, INF, 5), t(0.1, -0.1, 0.1, 0.1, INF, INF, 2, 0)),
    ),
    "the smallest int": (lambda x: (x // -1, -x, x.abs(), x * 2, x - 1, x**2), (i64(2**63 - 1, -(2**63)),)),
    "a float less the smallest int": (
        lambda x, y: (0.5 - x, y - x, x - y),
        (t(-(2**31), 7, dtype="int32"), t(0.5, 1.5)),
    ),
    # whole numbers beyond 2 ** 53
    "comparisons of large ints": (lambda x: (x == BIG, x != BIG, x < BIG, x <= BIG, x > BIG, x >= BIG), (LARGE,)),
    "sums of large ints": (lambda x: (x + BIG, x - BIG, BIG - x, x.sum(), x.cumsum(0), x * 3), (LARGE,)),
    "quotients of large ints": (lambda x: (x // 3, x % 7, torch.remainder(x, BIG), x // BIG), (LARGE,)),
    "limits of large ints": (
        lambda x: (x.clamp(min=BIG), x.clamp(max=BIG), x.clamp(-BIG, BIG)),
        (i64(BIG + 2, -BIG - 2),),
    ),
    "large values": (
        lambda x: (torch.full_like(x, BIG), x.masked_fill(x > 1, BIG), torch.where(x > 1, x, BIG), written(x, BIG)),
        (i64(1, 2),),
    ),
    # not a number
    "fmax and fmin": (
        lambda x, y: (torch.fmax(x, y), torch.fmin(x, y), torch.maximum(x, y), torch.minimum(x, y)),
        (t(NAN, 1, NAN, 2), t(1, NAN, NAN, 3)),
    ),
    "order with NaN": (
        lambda x: (
            *(
                v
                for descending in (False, True)
                for v in (x.sort(descending=descending)[0], x.argsort(descending=descending))
            ),
            *(v for largest in (False, True) for v in (x.topk(2, largest=largest)[0], x.topk(2, largest=largest)[1])),
            *(x.max(0)[0], x.max(0)[1], x.min(0)[0], x.min(0)[1], x.max(), x.argmin()),
        ),
        (t(1, NAN, 3, INF, -INF),),
    ),
    "limits that are NaN": (
        lambda x: (x.clamp(NAN, 1), x.clamp(min=NAN), x.clamp(max=NAN), x.clamp(0, 1)),
        (t(1, NAN),),
    ),
    "norms of infinite rows": (
        lambda x: (F.layer_norm(x, (3,)), F.group_norm(x, 1), F.instance_norm(x[None])),
        (t(INF, 1, 2, -INF, INF, 0, NAN, 1, 2, 3, 4, 6).reshape(4, 3),),
    ),
    "addmm without its input": (
        lambda x, y: (
            torch.addmm(x, y, y, beta=0),
            torch.baddbmm(x, y[None], y[None], beta=0),
            torch.addmv(x[0], y, y[0], beta=0),
        ),
        (torch.full((2, 2), NAN), torch.ones(2, 2)),
    ),
    "lerp": (
        lambda x, y, w: (torch.lerp(x, y, 1.0), torch.lerp(x, y, 0.5), torch.lerp(x, y, 0.0), torch.lerp(x, y, w)),
        (t(1e8, 0.1), t(0.3, INF), t(1, 0.3)),
    ),
    # axes
    "no axes mean all": (
        lambda x: (
            x.sum(()),
            x.mean(()),
            x.var(()),
            x.std(()),
            x.sum([], True),
            torch.amax(x, ()),
            torch.count_nonzero(x, ()),
        ),
        (X,),
    ),
    "no axes mean none": (lambda x: (torch.any(x, ()), torch.all(x, ())), (X,)),
    "inner": (lambda x, y: torch.inner(x, y), (torch.randn(2, 3, 4), torch.randn(5, 6, 4))),
    "inner with a number": (lambda x, y: torch.inner(x, y), (NUMBER, torch.randn(5, 6, 4))),
    "similarity of shapes that broadcast": (
        lambda x, y: (
            F.cosine_similarity(x, y, dim=0),
            F.cosine_similarity(x, y),
            F.cosine_similarity(y[:, :1], y, -1),
        ),
        (t(1, 2, 3), X),
    ),
    "extremes of bools": (
        lambda x: (x.min(0)[0], x.min(0)[1], x.max(0)[1], x.amin(0), x.amax(0)),
        (bools(True, False, True),),
    ),
    "a number along its axis": (
        lambda x: (
            x.softmax(0),
            x.log_softmax(-1),
            x.cumsum(0),
            x.argmax(0),
            x.logsumexp(0),
            x.prod(0),
            x.argsort(),
            x.sum(-1),
        ),
        (NUMBER,),
    ),
    "a number turned": (lambda x: (x.flip(0), torch.flip(x, (-1,)), x.roll(1)), (NUMBER,)),
    "a number in order": (
        lambda x: (*(v for f in (x.sort(), x.max(0), x.min(0), torch.topk(x, 1)) for v in (f[0], f[1])),),
        (NUMBER,),
    ),
    "a number picked": (
        lambda x, i: (
            torch.gather(x, 0, i),
            x.index_select(0, i),
            torch.take(x, i),
            torch.hstack([x, x]),
            torch.vstack([x, x]),
        ),
        (NUMBER, torch.tensor(0)),
    ),
    "no elements": (
        lambda x: (
            x.sum(),
            x.mean(),
            x.prod(),
            x.prod(0),
            x.var(),
            x.std(0),
            x.norm(),
            x.all(),
            x.any(),
            x.any(0),
            x.all(0),
        ),
        (EMPTY,),
    ),
    "no elements along an axis": (
        lambda x: (x.amax(1), x.argmax(1), x.logsumexp(0), x.logsumexp(1), x.softmax(0), x.cumsum(0), x.argsort(0)),
        (EMPTY,),
    ),
    "pieces of nothing": (lambda x: (*x.chunk(3), *x.split(2), *x.tensor_split(2)), (EMPTY,)),
    "@= is out of place": (lambda x: (operator.imatmul(x, x), x), (torch.ones(2, 2),)),
    "bits of ints": (lambda x, y: (x & y, x | y, x ^ 5, ~x), (i64(6, -3), i64(3, 12))),
    "a line of one number": (lambda x: torch.linspace(0, 1, x.shape[0]), (torch.ones(1),)),
    "lines of ints between fractions": (
        lambda x, y: (
            torch.linspace(0.5, 3.5, x.shape[1], dtype=torch.int64),
            torch.linspace(-7, 13, 16 + x.shape[1], dtype=torch.int32),
            torch.linspace(-3.5, x.shape[1], x.shape[1], dtype=y.dtype),
            torch.arange(0.5, x.shape[1] + 1, 1.5, dtype=torch.int64),
            torch.arange(0.5, x.shape[1] + 1.7, dtype=torch.int32),
            torch.arange(0.5, x.shape[1] + 1, 1.5, dtype=y.dtype),
            torch.arange(x.shape[1], 0.5, -0.7),
        ),
        (X, i64(1)),
    ),
    "numbers of sizes": (
        lambda x: (
            torch.full((2,), x.shape[1]),
            torch.full((2,), x.shape[1] / 2),
            torch.full((x.shape[0],), -2.5, dtype=torch.int64),
            torch.arange(x.shape[1] / 2),
        ),
        (X,),
    ),
    "the sign of bools": (lambda x: torch.sign(x), (bools(True, False),)),
    "log of sums of no axes": (
        lambda x: (x.logsumexp((0, 1), True), x.logsumexp(-1, True)),
        (t(-INF, -INF, INF)[None],),
    ),
    # resizing by a factor
    **{
        f"{mode} by {factor}": (
            lambda x, mode=mode, factor=factor: F.interpolate(x, scale_factor=factor, mode=mode),
            (torch.randn(1, 2, 2, 3),),
        )
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
        for factor in (1.3, (1.3, 1.4), (2.3, 0.7))
    },
}

NEEDS_EXAMPLE = (
    *("cat of nothing", "a number in order", "a number picked", "pieces of nothing", "einsum of nothing"),
    *("einsum of bools", "matmul of bools"),
)
