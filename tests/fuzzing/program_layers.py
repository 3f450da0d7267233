"""Arguments of structured calls for drawn programs: products, convolutions, pools, norms, resizing, tensors made of sizes."""

from __future__ import annotations

from typing import Any

import torch

from .program_arguments import Drawn, State, special

T = torch.Tensor


def images(s: State, n: int, channels: int | None = None) -> tuple[Any, T]:
    """A float image over n axes, earlier or new."""
    found = s.pick(lambda t: t.ndim == n + 2 and t.is_floating_point() and channels in (None, t.shape[1]))
    if found and s.chance(0.8):
        return found
    shape = (
        s.rng.choice((1, 2, 2, 0)) if s.chance(0.1) else s.rng.choice((1, 2)),
        channels or s.rng.choice((1, 2, 3, 4, 6, 9)),
    )
    return s.fresh((*shape, *(s.rng.choice((1, 2, 3, 4, 5, 7)) for _ in range(n))))


def spread(s: State, n: int, choices: tuple[int, ...]) -> Any:
    """One number, or one for each axis."""
    return s.rng.choice(choices) if s.chance(0.6) else tuple(s.rng.choice(choices) for _ in range(n))


def some_of(s: State, **values: Any) -> dict[str, Any]:
    return {k: v for k, v in values.items() if s.chance(0.4)}


# -- products ---------------------------------------------------------------------------------------------------------------


@special("matmul")
def matmul(s: State, x: T, ref: Any) -> Drawn | None:
    if not x.ndim or x.dtype == torch.bool:  # of bools torch takes those of which there are none
        return None
    shape = (
        *(x.shape[:-2] if s.chance(0.4) else ()),
        x.shape[-1],
        *((s.rng.choice((1, 2, 4)),) if s.chance(0.8) else ()),
    )
    return (ref, s.some(shape, str(x.dtype)[6:])[0]), {}


@special("mm", "bmm", "mv", "dot", "outer", "ger", "inner")
def product(s: State, x: T, ref: Any) -> Drawn | None:
    if x.dtype == torch.bool:
        return None
    last = x.shape[-1] if x.ndim else 1
    shape = {1: (last,), 2: (last, s.rng.choice((1, 3))), 3: (*x.shape[:1], last, 2)}.get(x.ndim, ())
    if s.chance(0.3):
        shape = shape[:1]
    if s.chance(0.3):
        shape = (3, last) if s.chance(0.5) else (2, 3, last)
    return (ref, s.some(shape, str(x.dtype)[6:])[0]), {}


@special("addmm", "baddbmm", "addmv", "addbmm")
def added(s: State, x: T, ref: Any) -> Drawn | None:
    rank = s.rng.choice((2, 3, 3))
    a = s.some(tuple(max(n, 1) for n in s.shape(rank)))  # torch itself differs from call to call where there are none
    n = a[1].shape[-1]
    shape = s.rng.choice(((n,), (n, 2))) if rank == 2 else (a[1].shape[0], n, 3)
    b = s.some(shape)
    start = s.fresh(
        s.rng.choice(((), (1,), shape[-1:] if len(shape) > 1 else (1,))), "float32", s.rng.choice(("plain", "special"))
    )
    return (start[0], a[0], b[0]), some_of(
        s, beta=s.rng.choice((0, 0.0, 1, 2, 0.5)), alpha=s.rng.choice((1, 0, 2, 0.5))
    )


@special("einsum")
def einsum(s: State, x: T, ref: Any) -> Drawn | None:
    letters = "abcdfghij"[: x.ndim]  # e is the other operand's
    kept = "".join(s.rng.sample(letters, s.rng.randint(0, x.ndim)))
    empty = not x.numel() and not x.is_floating_point()  # torch gives the other operand's dtype then
    if not x.ndim or s.chance(0.4) or empty:
        return (f"{letters}->{kept}", ref), {}
    other = "".join(s.rng.sample(letters, s.rng.randint(1, x.ndim)))
    shape = tuple(x.shape[letters.index(c)] for c in other)
    return (f"{letters},{other}e->{kept}e", ref, s.some((*shape, 2), str(x.dtype)[6:])[0]), {}


@special("bilinear")
def bilinear(s: State, x: T, ref: Any) -> Drawn:
    lead = s.shape(s.rng.choice((0, 1, 2)))
    a, b = s.some((*lead, 3)), s.some((*lead, 2))
    return (a[0], b[0], s.fresh((4, 3, 2))[0], *((s.fresh((4,))[0],) if s.chance(0.5) else ())), {}


@special("torch.nn.functional.linear")
def linear(s: State, x: T, ref: Any) -> Drawn | None:
    found = s.pick(lambda t: t.ndim > 0 and t.is_floating_point())
    if found is None:
        return None
    out = s.rng.choice((1, 2, 5))
    bias = (s.fresh((out,), str(found[1].dtype)[6:])[0],) if s.chance(0.6) else ()
    return (found[0], s.fresh((out, found[1].shape[-1]), str(found[1].dtype)[6:])[0], *bias), {}


@special("scaled_dot_product_attention")
def attention(s: State, x: T, ref: Any) -> Drawn:
    lead, rows, keys, width = (
        s.shape(s.rng.choice((1, 2))),
        s.rng.choice((1, 2, 4)),
        s.rng.choice((1, 3, 5)),
        s.rng.choice((1, 4)),
    )
    q, k, v = (
        s.some((*lead, rows, width)),
        s.some((*lead, keys, width)),
        s.some((*lead, keys, s.rng.choice((width, 3)))),
    )
    mask = s.fresh((rows, keys), s.rng.choice(("bool", "float32")), s.rng.choice(("plain", "special")))
    given = {"attn_mask": mask[0]} if s.chance(0.4) else some_of(s, is_causal=True)
    return (q[0], k[0], v[0]), {**given, **some_of(s, scale=0.5)}


# -- convolutions and pools -------------------------------------------------------------------------------------------------


def convolutions(n: int, transposed: bool) -> Any:
    def draw(s: State, x: T, ref: Any) -> Drawn:
        x_ref, image = images(s, n)
        groups = s.rng.choice((1, 1, image.shape[1] or 1))
        groups = groups if bool(image.isfinite().all()) else 1  # kernels that merge groups make NaN of infinity there
        out, dtype = groups * s.rng.choice((1, 2)), str(image.dtype)[6:]
        kernel = tuple(s.rng.choice((1, 2, 3)) for _ in range(n))
        shape = (image.shape[1], out // groups) if transposed else (out, image.shape[1] // groups)
        more = some_of(
            s, stride=spread(s, n, (1, 2, 3)), padding=spread(s, n, (0, 1, 2)), dilation=spread(s, n, (1, 2))
        )
        if not transposed and "stride" not in more and s.chance(0.15):
            more["padding"] = s.rng.choice(("same", "valid"))
        more |= some_of(s, output_padding=spread(s, n, (0, 1))) if transposed else {}
        bias = some_of(s, bias=s.fresh((out,), dtype)[0])
        return (x_ref, s.fresh((*shape, *kernel), dtype)[0]), {**bias, **more, "groups": groups}

    return draw


def pools(n: int, kind: str) -> Any:
    def draw(s: State, x: T, ref: Any) -> Drawn:
        x_ref, _ = images(s, n)
        if kind == "adaptive":
            sizes = (1, 2, 3, 5)
            return (
                x_ref,
                spread(s, n, sizes)
                if n == 1 or s.chance(0.8)
                else tuple(s.rng.choice((None, *sizes)) for _ in range(n)),
            ), {}
        more = some_of(s, stride=spread(s, n, (1, 2, 3)), padding=spread(s, n, (0, 1)), ceil_mode=True)
        if kind == "max":
            more |= some_of(s, dilation=spread(s, n, (1, 2)))
        else:
            more |= some_of(s, count_include_pad=False, **({"divisor_override": 3} if n > 1 else {}))
        return (x_ref, spread(s, n, (1, 2, 3))), more

    return draw


for _n in (1, 2, 3):
    special(f"conv{_n}d")(convolutions(_n, False))
    special(f"conv_transpose{_n}d")(convolutions(_n, True))
    special(f"max_pool{_n}d")(pools(_n, "max"))
    special(f"avg_pool{_n}d")(pools(_n, "average"))
    special(f"adaptive_avg_pool{_n}d", f"adaptive_max_pool{_n}d")(pools(_n, "adaptive"))


@special("pad")
def pad(s: State, x: T, ref: Any) -> Drawn:
    mode = s.rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    if mode == "constant":
        count = s.rng.randint(0, x.ndim)
        return (ref, tuple(s.rng.randint(-1, 2) for _ in range(2 * count))), some_of(s, mode=mode, value=s.scalar())
    n = s.rng.choice((1, 2, 3))
    return (images(s, n)[0], tuple(s.rng.randint(0, 2) for _ in range(2 * n))), {"mode": mode}


@special("interpolate")
def interpolate(s: State, x: T, ref: Any) -> Drawn:
    n = s.rng.choice((1, 2, 2, 3))
    mode = s.rng.choice(
        (
            "nearest",
            "nearest-exact",
            "area",
            {1: "linear", 2: "bilinear", 3: "trilinear"}[n],
            *(["bicubic"] if n == 2 else []),
        )
    )
    more: dict[str, Any] = {"mode": mode}
    if s.chance(0.4):
        more["size"] = spread(s, n, (1, 2, 3, 5, 7))
    else:
        factors = (0.5, 1.3, 2, 2.0, 0.7, 1.5, 3, 1.0, 0.34)
        more["scale_factor"] = (
            s.rng.choice(factors) if s.chance(0.6) else tuple(float(s.rng.choice(factors)) for _ in range(n))
        )
        more |= some_of(s, recompute_scale_factor=s.chance(0.5))
    if mode in ("linear", "bilinear", "trilinear", "bicubic"):
        more |= some_of(s, align_corners=s.chance(0.6))
    return (images(s, n)[0],), more


@special("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def shuffled(s: State, x: T, ref: Any) -> Drawn:
    found = s.pick(lambda t: t.ndim >= 3)
    factor = s.rng.choice((1, 2, 3))
    if found and s.chance(0.3):
        return (found[0], factor), {}
    return (
        s.fresh(
            (*s.shape(s.rng.choice((0, 1))), *([2] if s.chance(0.5) else []), 4 * factor * factor, 2 * factor, factor)
        )[0],
        factor,
    ), {}


@special("unfold")
def unfold(s: State, x: T, ref: Any) -> Drawn:
    return (images(s, 2)[0], spread(s, 2, (1, 2, 3))), some_of(
        s, dilation=spread(s, 2, (1, 2)), padding=spread(s, 2, (0, 1)), stride=spread(s, 2, (1, 2))
    )


@special("fold")
def fold(s: State, x: T, ref: Any) -> Drawn:
    size, kernel = (s.rng.choice((2, 4, 5)), s.rng.choice((2, 3))), (s.rng.choice((1, 2)), s.rng.choice((1, 2)))
    more = some_of(s, padding=spread(s, 2, (0, 1)), stride=spread(s, 2, (1, 2)))
    zeros = torch.zeros(1, 1, *size)
    count = torch.nn.functional.unfold(zeros, kernel, **more).shape[2]
    return (s.fresh((s.rng.choice((1, 2)), 2 * kernel[0] * kernel[1], count))[0], size, kernel), more


# -- norms and lookups ------------------------------------------------------------------------------------------------------


def channel_values(s: State, x: T, **kinds: str) -> dict[str, Any]:
    return {k: s.fresh((x.shape[1],), str(x.dtype)[6:], kind)[0] for k, kind in kinds.items()}


def channels(s: State) -> tuple[Any, T]:
    return images(s, s.rng.choice((0, 1, 2, 3)) if s.chance(0.9) else 1)


@special("torch.nn.functional.batch_norm", "torch.nn.functional.instance_norm")
def batch_norm(s: State, x: T, ref: Any) -> Drawn:
    x_ref, image = channels(s)
    given = channel_values(s, image, running_mean="plain", running_var="positive", weight="plain", bias="plain")
    affine = some_of(s, weight=given["weight"], bias=given["bias"], eps=1e-3)
    return (x_ref, given["running_mean"], given["running_var"]), affine


@special("torch.nn.functional.instance_norm")
def instance_norm(s: State, x: T, ref: Any) -> Drawn:
    x_ref, image = images(s, s.rng.choice((1, 2, 3)))
    given = channel_values(s, image, weight="plain", bias="plain")
    return (x_ref,), given if s.chance(0.5) else {}


@special("layer_norm", "rms_norm")
def layer_norm(s: State, x: T, ref: Any) -> Drawn | None:
    found = s.pick(lambda t: t.ndim > 0 and t.is_floating_point())
    if found is None:
        return None
    shape = tuple(found[1].shape[-s.rng.randint(1, found[1].ndim) :])
    return (found[0], shape), some_of(s, weight=s.fresh(shape, str(found[1].dtype)[6:])[0], eps=1e-3)


@special("group_norm")
def group_norm(s: State, x: T, ref: Any) -> Drawn:
    x_ref, image = channels(s)
    given = channel_values(s, image, weight="plain", bias="plain")
    return (x_ref, s.rng.choice((1, image.shape[1] or 1, 2))), given if s.chance(0.5) else {}


@special("local_response_norm")
def local_response_norm(s: State, x: T, ref: Any) -> Drawn:
    return (images(s, s.rng.choice((1, 2, 3)))[0], s.rng.choice((1, 2, 3))), some_of(s, alpha=0.1, beta=0.5, k=2.0)


@special("_weight_norm")
def weight_norm(s: State, x: T, ref: Any) -> Drawn:
    v = s.some((3, 2, 2))
    return (v[0], s.fresh((3, 1, 1), "float32", "positive")[0], 0), {}


@special("torch.nn.functional.embedding", "torch.embedding")
def embedding(s: State, x: T, ref: Any) -> Drawn:
    return (s.fresh(s.shape(), "int64", "below 4")[0], s.fresh((4, 3))[0]), {}


@special("torch.embedding")
def torch_embedding(s: State, x: T, ref: Any) -> Drawn:
    return tuple(reversed(embedding(s, x, ref)[0])), {}


@special("one_hot")
def one_hot(s: State, x: T, ref: Any) -> Drawn:
    return (s.fresh(s.shape(), "int64", "below 4")[0], s.rng.choice((4, 5))), {}


@special("softmax", "log_softmax", "softmin")
def softmax(s: State, x: T, ref: Any) -> Drawn | None:
    """Of floats: of integers torch takes those of which there are none."""
    found = s.pick(lambda t: t.is_floating_point())
    return found and (
        (found[0], s.axis(found[1].ndim)),
        some_of(s, dtype=("dtype", s.rng.choice(("float32", "float64")))),
    )


@special("prelu")
def prelu(s: State, x: T, ref: Any) -> Drawn:
    found = s.pick(lambda t: t.is_floating_point())
    x_ref, value = found or s.fresh(s.shape())
    many = (value.shape[1],) if value.ndim > 1 and s.chance(0.5) else (1,)
    return (x_ref, s.fresh(many, str(value.dtype)[6:])[0]), {}


@special("cosine_similarity", "pairwise_distance")
def similarity(s: State, x: T, ref: Any) -> Drawn:
    found = s.pick(lambda t: t.is_floating_point())
    x_ref, value = found or s.fresh(s.shape(2))
    return (x_ref, s.like(value, str(value.dtype)[6:])[0]), some_of(s, eps=1e-3)


@special("torch.nn.functional.cosine_similarity", "torch.cosine_similarity")
def cosine_similarity(s: State, x: T, ref: Any) -> Drawn:
    args, more = similarity(s, x, ref)
    return args, more | some_of(s, dim=s.axis(x.ndim))


@special(
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "rrelu",
)
def dropout(s: State, x: T, ref: Any) -> Drawn:
    return (ref,), {"training": False}


@special("torch.dropout", "torch.feature_dropout", "torch.alpha_dropout", "torch.feature_alpha_dropout")
def torch_dropout(s: State, x: T, ref: Any) -> Drawn:
    return (ref, 0.5, False), {}


# -- tensors made of sizes --------------------------------------------------------------------------------------------------


@special("new_zeros", "new_ones", "zeros", "ones")
def filled(s: State, x: T, ref: Any) -> Drawn:
    return (ref, s.shape()), some_of(s, dtype=("dtype", s.dtype()))


@special("new_full")
def new_full(s: State, x: T, ref: Any) -> Drawn:
    return (ref, s.shape(), s.scalar()), some_of(s, dtype=("dtype", s.dtype()))


def size_of(s: State, x: T, ref: Any) -> Any:
    """A size as the program reads it from a tensor."""
    return ("size", ref, s.rng.randrange(-x.ndim, x.ndim)) if x.ndim else 2


@special("torch.zeros", "torch.ones")
def made_of_sizes(s: State, x: T, ref: Any) -> Drawn:
    return (("tuple", size_of(s, x, ref), *s.shape(1)),), some_of(s, dtype=("dtype", s.dtype()))


@special("torch.full")
def full(s: State, x: T, ref: Any) -> Drawn:
    return (("tuple", size_of(s, x, ref)), s.scalar()), some_of(s, dtype=("dtype", s.dtype()))


@special("torch.arange", "torch.eye")
def arange(s: State, x: T, ref: Any) -> Drawn:
    return (size_of(s, x, ref),), some_of(s, dtype=("dtype", s.dtype()))


@special("torch.linspace")
def linspace(s: State, x: T, ref: Any) -> Drawn:
    return (s.rng.choice((0, -1, 0.5)), s.rng.choice((1, 2, 3.5)), size_of(s, x, ref)), some_of(
        s, dtype=("dtype", s.dtype())
    )
