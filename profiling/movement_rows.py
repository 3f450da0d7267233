"""The rows of movement.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from needle.ops.nn.grid_sample import MODES, PADDINGS, GridSampleGrad


class Row(NamedTuple):
    family: str
    size: str
    call: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    counted: bool = False  # the result's size depends on values
    ours: Callable[..., Any] | None = None  # a function of needle in place of the converted one
    slope: bool = False  # with its gradient


# rows of a table, their width, how many are moved
TABLES = [(64, 1, 64), (1000, 64, 1000), (100_000, 1, 100_000), (10_000, 64, 10_000), (2000, 768, 2000)]
TABLES += [(1_000_000, 1, 1_000_000), (10_000_000, 1, 1_000_000)]


def tables() -> Iterator[Row]:
    """Rows and elements by numbers: every number once, or all of a few."""
    for rows, width, moved in TABLES:
        x, source = torch.randn(rows, width), torch.randn(moved, width)
        for name, number in (
            ("apart", torch.randperm(rows)[:moved]),
            ("colliding", torch.randint(min(rows, 16), (moved,))),
        ):
            size = f"{rows} x {width}, {moved} {name}"
            wide = number[:, None].expand(moved, width).contiguous()
            flat = (x[:, 0].contiguous(), number, source[:, 0].contiguous()) if width == 1 else (x, number, source)
            yield Row("index_add", size, lambda x, i, s: x.index_add(0, i, s), flat)
            yield Row("index_select", size, lambda x, i: x.index_select(0, i), (x, number))
            yield Row("gather", size, lambda x, i: x.gather(0, i), (x, wide))
            yield Row("scatter", size, lambda x, i, s: x.scatter(0, i, s), (x, wide, source))
            yield Row("scatter_add", size, lambda x, i, s: x.scatter_add(0, i, s), (x, wide, source))
            for reduce in ("amax", "mean", "prod"):
                yield Row(
                    f"scatter_reduce {reduce}",
                    size,
                    lambda x, i, s, r=reduce: x.scatter_reduce(0, i, s, r),
                    (x, wide, source),
                )
            yield Row("index_put", size, lambda x, i, s: x.index_put((i,), s), flat)
            yield Row("index_put accumulate", size, lambda x, i, s: x.index_put((i,), s, accumulate=True), flat)
    for batch, width, moved in ((64, 100, 100), (1000, 1000, 1000), (16, 100_000, 1000)):
        x, number, source = torch.randn(batch, width), torch.randint(width, (batch, moved)), torch.randn(batch, moved)
        size = f"{batch} x {width}, {moved} of each"
        yield Row("gather", size, lambda x, i: x.gather(1, i), (x, number))
        yield Row("scatter", size, lambda x, i, s: x.scatter(1, i, s), (x, number, source))
        yield Row("scatter_add", size, lambda x, i, s: x.scatter_add(1, i, s), (x, number, source))
    for count, width, bags in ((1000, 64, 100), (30_000, 128, 2000)):
        weight, number = torch.randn(count, width), torch.randint(count, (bags, 20))
        for mode in ("sum", "mean", "max"):
            yield Row(
                f"embedding_bag {mode}",
                f"{count} x {width}, {bags} x 20",
                lambda i, w, m=mode: F.embedding_bag(i, w, mode=m),
                (number, weight),
            )


# images or volumes, and the size of what is read of them
GRIDS = [
    ((1, 3, 32, 32), (32, 32)),
    ((8, 64, 56, 56), (56, 56)),
    ((1, 3, 512, 512), (512, 512)),
    ((1, 16, 8, 32, 32), (8, 32, 32)),
]


def grids() -> Iterator[Row]:
    for shape, out in GRIDS:
        rank = len(out)
        x, grid = torch.randn(shape), torch.rand(shape[0], *out, rank) * 2.2 - 1.1
        for mode in ("bilinear", "nearest", "bicubic")[: 3 if rank == 2 else 2]:
            for padding in ("zeros", "border", "reflection"):
                for corners in (False, True):
                    name = f"grid_sample {mode} {padding}"
                    call = lambda x, g, m=mode, p=padding, c=corners: F.grid_sample(x, g, m, p, c)  # noqa: E731
                    size = f"{shape} at {out}" + ", corners" * corners
                    yield Row(name, size, call, (x, grid))
                    back = getattr(torch.ops.aten, f"grid_sampler_{rank}d_backward")
                    numbers = (MODES.index(mode), PADDINGS.index(padding), corners, [True, True])
                    theirs = lambda x, g, dy, b=back, n=numbers: b(dy, x, g, *n)  # noqa: E731
                    ours = lambda *t, m=mode, p=padding, c=corners: GridSampleGrad(m, p, c)(*t)  # noqa: E731
                    dy = torch.randn(*shape[:2], *out)
                    yield Row(f"{name} gradient", size, theirs, (x, grid, dy), ours=ours)


NUMBERS = [(16, 64), (1000, 10), (1, 1000), (64, 1000), (1, 100_000), (1, 1_000_000)]


def rows_of_numbers() -> Iterator[Row]:
    """Along an axis: order, running sums, places."""
    for shape in NUMBERS:
        x = torch.randn(shape)
        size = f"{shape[0]} x {shape[1]}"
        yield Row("sort", size, lambda x: x.sort(-1)[0], (x,))
        yield Row("sort stable", size, lambda x: torch.sort(x, stable=True, dim=-1)[0], (x,))
        yield Row("argsort int64", size, lambda x: x.argsort(-1), (x * 1000).long()[None].unbind(0))
        yield Row("topk 5", size, lambda x: x.topk(5)[0], (x,))
        yield Row("median", size, lambda x: x.median(-1)[0], (x,))
        yield Row("kthvalue", size, lambda x: x.kthvalue(3)[0], (x,))
        yield Row("cumsum", size, lambda x: x.cumsum(-1), (x,))
        yield Row("cumprod", size, lambda x: x.cumprod(-1), (x,))
        yield Row("cummax", size, lambda x: x.cummax(-1)[0], (x,))
        yield Row("logcumsumexp", size, lambda x: x.logcumsumexp(-1), (x,))
        yield Row("argmax", size, lambda x: x.argmax(-1), (x,))
        yield Row("max", size, lambda x: x.max(-1)[0], (x,))
        ordered = torch.linspace(-3, 3, 256)
        yield Row("searchsorted 256", size, lambda x, o: torch.searchsorted(o, x), (x, ordered))
        yield Row("bucketize 256", size, lambda x, o: torch.bucketize(x, o), (x, ordered))
    x = torch.randn(1000, 64)
    yield Row("cumsum", "1000 x 64 along 0", lambda x: x.cumsum(0), (x,))
    yield Row("sort", "1000 x 64 along 0", lambda x: x.sort(0)[0], (x,))
    for n in (1000, 1_000_000):
        whole = torch.randint(1000, (n,))
        yield Row("unique", f"{n}", lambda x: torch.unique(x), (whole,), True)
        yield Row("bincount", f"{n}", lambda x: torch.bincount(x), (whole,), True)
        yield Row("nonzero", f"{n}", lambda x: torch.nonzero(x), (whole % 2,), True)
        yield Row("masked_select", f"{n}", lambda x, m: x[m], (torch.randn(n), whole > 500), True)
        yield Row("histc", f"{n}", lambda x: torch.histc(x, 100, -3, 3), (torch.randn(n),))
        yield Row("one_hot", f"{n // 100}", lambda x: F.one_hot(x, 1000), (whole[: n // 100],))


def images() -> Iterator[Row]:
    for shape in ((1, 3, 32, 32), (8, 64, 56, 56), (1, 3, 512, 512)):
        x, size = torch.randn(shape), " x ".join(map(str, shape))
        for mode in ("nearest", "bilinear", "bicubic", "area"):
            corners = {"align_corners": False} if mode in ("bilinear", "bicubic") else {}
            for factor in (2, 0.5):
                yield Row(
                    f"interpolate {mode}",
                    f"{size} by {factor}",
                    lambda x, m=mode, f=factor, c=corners: F.interpolate(x, scale_factor=f, mode=m, **c),
                    (x,),
                )
        for mode in ("bilinear", "bicubic"):
            call = lambda x, m=mode: F.interpolate(x, scale_factor=0.25, mode=m, antialias=True)  # noqa: E731
            yield Row(f"interpolate {mode}, antialias", f"{size} by 0.25", call, (x,))
        for mode in ("constant", "reflect", "replicate", "circular"):
            yield Row(f"pad {mode}", size, lambda x, m=mode: F.pad(x, (3, 2, 1, 4), mode=m), (x,))
        yield Row("unfold 3x3", size, lambda x: F.unfold(x, 3, padding=1), (x,))
        yield Row("fold 3x3", size, lambda x, s=shape: F.fold(x, s[2:], 3, padding=1), (F.unfold(x, 3, padding=1),))
        yield Row("fold 2x2/2", size, lambda x, s=shape: F.fold(x, s[2:], 2, stride=2), (F.unfold(x, 2, stride=2),))
        pooled, places = F.max_pool2d(x, 2, return_indices=True)
        yield Row("max_unpool2d", size, lambda x, i: F.max_unpool2d(x, i, 2), (pooled, places))
        yield Row("max_pool2d places", size, lambda x: F.max_pool2d(x, 2, return_indices=True), (x,))
        yield Row("flip", size, lambda x: x.flip(-1) + 0, (x,))
        yield Row("flip rows", size, lambda x: x.flip(2) + 0, (x,))
        yield Row("roll", size, lambda x: x.roll((3, -2), (2, 3)), (x,))
        yield Row("tril", size, lambda x: x.tril(), (x,))
        yield Row("triu", size, lambda x: x.triu(1), (x,))
        yield Row("where", size, lambda m, x, y: torch.where(m, x, y), (x > 0, x, -x))
        yield Row("masked_fill", size, lambda m, x: x.masked_fill(m, 1.0), (x > 0, x))
        yield Row("cat channels", size, lambda x, y: torch.cat((x, y), 1), (x, -x))
        yield Row("cat last", size, lambda x, y: torch.cat((x, y), -1), (x, -x))
        yield Row("stack first", size, lambda x, y: torch.stack((x, y)), (x, -x))
        yield Row("stack last", size, lambda x, y: torch.stack((x, y), -1), (x, -x))
        yield Row("repeat", size, lambda x: x.repeat(2, 1, 1, 2), (x,))
        yield Row("repeat_interleave", size, lambda x: x.repeat_interleave(2, -1), (x,))
        yield Row("permute", size, lambda x: x.permute(0, 2, 3, 1).contiguous(), (x,))
        yield Row("transpose", size, lambda x: x.transpose(2, 3).contiguous(), (x,))
        if shape[2] % 8 == 0:
            yield Row("pixel_unshuffle", size, lambda x: F.pixel_unshuffle(x, 2), (x,))
        if shape[1] % 4 == 0:
            yield Row("pixel_shuffle", size, lambda x: F.pixel_shuffle(x, 2), (x,))
    for n, d in ((64, 3), (1000, 16), (1000, 256)):
        for p in (2.0, 1.0):
            yield Row(
                f"cdist {p:g}",
                f"{n} x {d}",
                lambda x, y, p=p: torch.cdist(x, y, p),
                (torch.randn(n, d), torch.randn(n, d)),
            )


# Rows and columns, short and long; images; an image alone; matrices in a batch.
SHAPES = [(20_000, 8), (8, 20_000), (3136, 32), (100_000, 2), (50_000, 3), (300, 300), (64, 3, 1000), (1000, 8, 16)]
SHAPES += [(1, 64, 56, 56), (16, 12, 64, 64), (7, 11, 13, 17, 5)]
AXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum last": lambda x: x.sum(-1),
    "sum first": lambda x: x.sum(0),
    "sum second": lambda x: x.sum(1),
    "mean but second": lambda x: x.mean([d for d in range(x.ndim) if d != 1]),
    "max last": lambda x: x.amax(-1),
    "max second": lambda x: x.amax(1),
    "argmax second": lambda x: x.argmax(1),
    "var last": lambda x: x.var(-1),
    "norm last": lambda x: x.norm(dim=-1),
    "normalize second": lambda x: F.normalize(x, dim=1),
    "prod last": lambda x: x.prod(-1),
    "any last": lambda x: (x > 3).any(-1),
    "softmax last": lambda x: x.softmax(-1),
    "softmax second": lambda x: x.softmax(1),
    "log_softmax first": lambda x: x.log_softmax(0),
    "logsumexp second": lambda x: x.logsumexp(1),
    "centred rows": lambda x: x - x.mean(-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "cumsum last": lambda x: x.cumsum(-1),
    "cumprod last": lambda x: x.cumprod(-1),
    "cummax last": lambda x: x.cummax(-1)[0],
    "argsort last": lambda x: x.argsort(-1),
    "gather last": lambda x: x.gather(-1, (x > 0).long()),
    "scatter_add last": lambda x: x.scatter_add(-1, (x > 0).long(), x),
    "padded": lambda x: F.pad(x, (1, 1)),
    "joined": lambda x: torch.cat((x, x), -1),
    "products of rows": lambda x: x[..., :8, None] * x[..., None, :8],
    "dots of rows": lambda x: torch.einsum("...i,...i->...", x, x),
    "transposed": lambda x: (x.transpose(0, 1) + 1) * 2,
    "with its mirror": lambda x: x.flip(-1) + x,
    "differences": lambda x: x.diff(dim=-1),
    "every other": lambda x: x[..., : x.shape[-1] // 2 * 2 : 2] * x[..., 1::2],
    "windows": lambda x: x.unfold(-1, 2, 1).sum(-1),
    "reversed rows": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)],
}
UNARY = "sin cos tan asin acos atan sinh cosh tanh asinh atanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sigmoid"
UNARY += " erf erfc erfinv lgamma digamma floor ceil round frac sign reciprocal square nan_to_num i0 sinc logit"
ACTIVATIONS = (
    "relu gelu silu mish elu selu softplus softsign hardswish hardsigmoid leaky_relu logsigmoid hardshrink softshrink"
)
OF_TWO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "power 2.5": lambda x: x**2.5,
    "power": lambda x: x**x,
    "atan2": lambda x: torch.atan2(x, 1 - x),
    "fmod": lambda x: torch.fmod(x, 0.07),
    "remainder": lambda x: x % 0.07,
    "floor_divide": lambda x: x // 0.07,
    "hypot": lambda x: torch.hypot(x, 1 - x),
    "xlogy": lambda x: torch.xlogy(x, x),
    "logaddexp": lambda x: torch.logaddexp(x, 1 - x),
    "where": lambda x: torch.where(x > 0.5, x, x * 2),
    "lerp": lambda x: torch.lerp(x, 1 - x, 0.3),
    "clamp": lambda x: x.clamp(0.1, 0.7),
    "divide": lambda x: x / (x + 1),
}


def axes() -> Iterator[Row]:
    """Sums, norms and slices of shapes of all kinds."""
    for shape in SHAPES:
        for name, call in AXES.items():
            yield Row(name, " x ".join(map(str, shape)), call, (torch.randn(shape),))


SLOPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax second": lambda x: x.softmax(1),
    "log_softmax second": lambda x: x.log_softmax(1),
    "logsumexp second": lambda x: x.logsumexp(1),
    "cross_entropy": lambda x: F.cross_entropy(x, x.detach().argmax(1)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "max last": lambda x: x.max(-1)[0],
    "cumprod last": lambda x: (x * 0.01 + 1).cumprod(-1),
    "gather last": lambda x: x.gather(-1, (x > 0).long()),
    "sort last": lambda x: x.sort(-1)[0],
    "cdist": lambda x: torch.cdist(x.reshape(-1, x.shape[-1])[:200], x.reshape(-1, x.shape[-1])[:200].sin()),
    "rows by numbers": lambda x: x[torch.arange(1000) % x.shape[0], torch.arange(1000) * 7 % x.shape[1]],
}


def slopes() -> Iterator[Row]:
    """Functions and their gradients, in a compiled training step and torch's eager backward."""
    for shape in SHAPES:
        for name, call in SLOPES.items():
            yield Row(f"{name} slope", " x ".join(map(str, shape)), call, (torch.randn(shape),), slope=True)


def functions() -> Iterator[Row]:
    """Maps of numbers between 0 and 1."""
    x = torch.rand(100_000) * 0.9 + 0.05
    for name in UNARY.split():
        yield Row(name, "100000", getattr(torch, name, None) or getattr(torch.special, name), (x,))
    for name in ACTIVATIONS.split():
        yield Row(name, "100000", getattr(F, name), (x,))
    for name, call in OF_TWO.items():
        yield Row(name, "100000", call, (x,))


def products() -> Iterator[Row]:
    """Layers over an axis in front of others, sums by letters, and batches of small products."""
    for heads, length in ((4, 196), (8, 64), (12, 196), (16, 197), (32, 64)):
        a, weight, size = torch.randn(1, heads, length, length), torch.randn(heads, heads), f"{heads} x {length}"
        pixel = weight[:, :, None, None]
        for name, call in (
            ("heads by linear", lambda a, w=weight: F.linear(a.permute(0, 2, 3, 1), w).permute(0, 3, 1, 2)),
            ("heads by conv2d", lambda a, w=pixel: F.conv2d(a, w)),
            ("heads by einsum", lambda a, w=weight: torch.einsum("bhij,gh->bgij", a, w)),
        ):
            yield Row(name, size, call, (a,))
    for channels, side in ((64, 32), (64, 33), (32, 64), (32, 65), (16, 128)):
        x, weight = torch.randn(1, channels, side, side), torch.randn(channels, channels, 3, 3)
        yield Row("conv2d alone", f"{channels} x {side}", lambda x, w=weight: F.conv2d(x, w, padding=1), (x,))
    for equation, *shapes in (
        ("ij,bjd->bid", (207, 207), (8, 207, 64)),
        ("ij,bjd->bid", (17, 17), (1000, 17, 3)),
        ("vw,nctw->nctv", (25, 25), (4, 16, 32, 25)),
        ("bchw,oc->bohw", (8, 32, 32, 32), (64, 32)),
    ):
        inputs = tuple(torch.randn(s) for s in shapes)
        size = ", ".join(" x ".join(map(str, s)) for s in shapes)
        yield Row(equation, size, lambda x, y, e=equation: torch.einsum(e, x, y), inputs)
    for m, n, k in ((3, 3, 3), (4, 64, 16), (8, 8, 16), (17, 3, 17), (32, 32, 32), (64, 64, 64)):
        x, y = torch.randn(500, m, k), torch.randn(500, k, n)
        yield Row("x @ y", f"500 x {m} x {k} x {n}", torch.matmul, (x, y))
        yield Row("x @ y.mT", f"500 x {m} x {k} x {n}", lambda x, y: x @ y.mT, (x, y.mT.contiguous()))


FAMILIES = {
    "tables": tables,
    "grids": grids,
    "numbers": rows_of_numbers,
    "images": images,
    "axes": axes,
    "functions": functions,
    "slopes": slopes,
    "products": products,
}
