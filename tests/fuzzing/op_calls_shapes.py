"""More calls for the search of gradients: shapes, indices, products of matrices, attention and recurrent layers."""

from __future__ import annotations

import math
import random
from typing import Any

from .op_calls import VALUES, Call, any_axis, maybe, shape_of


def reshaped(rng: random.Random) -> Call:
    shape = shape_of(rng)
    rank, size = len(shape), math.prod(shape)
    divisor = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    order = rng.sample(range(rank), rank)
    two = [any_axis(rng, rank), any_axis(rng, rank)]
    name, args, kwargs = rng.choice(
        [
            ("torch.reshape", [[divisor, -1]], {}),
            ("torch.reshape", [[-1]], {}),
            ("torch.permute", [order], {}),
            ("torch.transpose", two, {}),
            ("torch.movedim", two, {}),
            ("torch.flatten", sorted(a % max(rank, 1) for a in two), {}),
            ("torch.squeeze", rng.choice(([], [two[0]], [sorted({a % max(rank, 1) for a in two})])), {}),
            ("torch.unsqueeze", [any_axis(rng, rank + 1)], {}),
            ("torch.flip", [rng.sample(range(rank), rng.randint(0, rank))], {}),
            ("torch.roll", [rng.randint(-4, 4)], rng.choice(({}, {"dims": two[0]}))),
            ("torch.tile", [[rng.randint(1, 3) for _ in range(rng.randint(1, rank + 1))]], {}),
            ("Tensor.repeat", [[rng.randint(1, 3) for _ in range(rank + rng.randint(0, 1))]], {}),
            ("torch.repeat_interleave", [rng.randint(1, 3)], rng.choice(({}, {"dim": two[0]}))),
            ("Tensor.expand", [[rng.choice((2, 3)) if n == 1 else -1 for n in shape]], {}),
            ("torch.broadcast_to", [[2, *shape]], {}),
            ("torch.tril", [], maybe(rng, diagonal=(-2, -1, 0, 1, 2))),
            ("torch.triu", [], maybe(rng, diagonal=(-2, -1, 0, 1, 2))),
            ("torch.diagonal", [], {**maybe(rng, offset=(-2, -1, 0, 1, 2)), "dim1": two[0], "dim2": two[1]}),
            ("torch.chunk", [rng.randint(1, 4)], {"dim": two[0]}),
            ("torch.split", [rng.randint(1, 4)], {"dim": two[0]}),
            ("torch.tensor_split", [rng.choice((2, 3, [1, 2]))], {"dim": two[0]}),
            ("torch.unbind", [], {"dim": two[0]}),
            ("torch.select", [two[0], 0], {}),
            ("torch.narrow", [two[0], 0, 1], {}),
            ("torch.unflatten", [two[0], [1, -1]], {}),
        ]
    )
    return {"call": name, "args": ["x0", *args], "kwargs": kwargs, "inputs": [(shape, rng.choice(VALUES))]}


def shuffled(rng: random.Random) -> Call:
    r, batch = rng.choice((1, 2, 3)), rng.choice((1, 2))
    c, h, w = (rng.choice((1, 2, 3)) for _ in range(3))
    name, shape = rng.choice(
        (
            ("pixel_shuffle", (batch, c * r * r, h, w)),
            ("pixel_unshuffle", (batch, c, h * r, w * r)),
            ("channel_shuffle", (batch, c * r, h, w)),
        )
    )
    return {"call": f"F.{name}", "args": ["x0", r], "inputs": [(shape, rng.choice(VALUES))]}


def joined(rng: random.Random) -> Call:
    shape, count = shape_of(rng, 1, 3), rng.randint(1, 4)
    axis = any_axis(rng, len(shape))
    name = rng.choice(("torch.cat", "torch.stack", "torch.hstack", "torch.vstack"))
    shapes = [shape] * count
    if name == "torch.cat":
        at = axis % len(shape)
        shapes = [(*shape[:at], rng.choice((0, 1, 2, 3)), *shape[at + 1 :]) for _ in range(count)]
    kwargs = {"dim": axis} if name in ("torch.cat", "torch.stack") else {}
    inputs = [(s, rng.choice(VALUES)) for s in shapes]
    return {"call": name, "args": [[f"x{i}" for i in range(count)]], "kwargs": kwargs, "inputs": inputs}


def indexed(rng: random.Random) -> Call:
    shape = shape_of(rng, 1)
    items: list[Any] = []
    for n in shape[: rng.randint(1, len(shape))]:
        step = {"slice": [rng.choice((None, 0, 1, -2)), rng.choice((None, n, -1, 2)), rng.choice((None, 1, 2, 3))]}
        items.append(rng.choice((step, step, rng.randrange(-n, n), [rng.randrange(-n, n) for _ in range(3)])))
    if rng.random() < 0.3:
        items.insert(rng.randint(0, len(items)), None)
    if rng.random() < 0.3:
        items.append("...")
    return {"call": "operator.getitem", "args": ["x0", tuple(items)], "inputs": [(shape, rng.choice(VALUES))]}


def gathered(rng: random.Random) -> Call:
    shape = shape_of(rng, 1)
    axis = any_axis(rng, len(shape))
    n, x = shape[axis], (shape, rng.choice(VALUES))
    name = rng.choice(("gather", "index_select", "take", "take_along_dim", "topk", "sort", "argsort", "embedding"))
    if name == "embedding":
        kwargs = maybe(rng, padding_idx=(0, -1))
        index = (shape_of(rng), "below 4")
        return {"call": "nn.Embedding", "args": [4, rng.choice((1, 3, 17))], "kwargs": kwargs, "inputs": [index]}
    if name == "topk":
        args, kwargs = ["x0", rng.randint(1, n)], {"dim": axis, **maybe(rng, largest=(True, False))}
        return {"call": "torch.topk", "args": args, "kwargs": kwargs, "inputs": [(shape, "different")], "results": 2}
    if name in ("sort", "argsort"):
        kwargs = {"dim": axis, "stable": True, **maybe(rng, descending=(True, False))}
        results = 2 * (name == "sort")
        return {"call": f"torch.{name}", "args": ["x0"], "kwargs": kwargs, "inputs": [x], "results": results}
    if name == "take":
        index = (shape_of(rng), f"below {math.prod(shape)}")
        return {"call": "torch.take", "args": ["x0", "x1"], "inputs": [x, index]}
    if name == "index_select":
        return {"call": "torch.index_select", "args": ["x0", axis, "x1"], "inputs": [x, ((3,), f"below {n}")]}
    at = axis % len(shape)
    index = ((*shape[:at], rng.choice((1, 3)), *shape[at + 1 :]), f"below {n}")
    args = ["x0", axis, "x1"] if name == "gather" else ["x0", "x1", axis]
    return {"call": f"torch.{name}", "args": args, "inputs": [x, index]}


# -- products --------------------------------------------------------------------------------------------------------------

EINSUMS = (
    "ij,jk->ik",
    "bij,bjk->bik",
    "ij,ij->",
    "ij->ji",
    "i,j->ij",
    "bij,kj->bki",
    "bi,bi->b",
    "ii->i",
    "ij,j",
    "...ij,...jk->...ik",
)


def product(rng: random.Random) -> Call:
    b, m, k, n = (rng.choice((1, 1, 2, 3, 5, 17)) for _ in range(4))
    kinds = ("normal", "normal", "normal", "zeros", "ties")
    name, args, shapes, kwargs = rng.choice(
        [
            ("matmul", ["x0", "x1"], [(m, k), (k, n)], {}),
            ("matmul", ["x0", "x1"], [(k,), rng.choice(((k,), (k, n), (b, k, n)))], {}),
            ("matmul", ["x0", "x1"], [rng.choice(((m, k), (b, m, k), (2, 1, m, k))), (k,)], {}),
            ("matmul", ["x0", "x1"], [(b, m, k), rng.choice(((k, n), (1, k, n), (2, 1, k, n)))], {}),
            ("bmm", ["x0", "x1"], [(b, m, k), (b, k, n)], {}),
            ("mm", ["x0", "x1"], [(m, k), (k, n)], {}),
            ("mv", ["x0", "x1"], [(m, k), (k,)], {}),
            ("dot", ["x0", "x1"], [(k,), (k,)], {}),
            ("outer", ["x0", "x1"], [(m,), (n,)], {}),
            ("inner", ["x0", "x1"], [(m, k), rng.choice(((n, k), (k,), (2, n, k)))], {}),
            ("addmm", ["x0", "x1", "x2"], [rng.choice(((m, n), (n,), (1, n), (m, 1), ())), (m, k), (k, n)], "scales"),
            ("addmv", ["x0", "x1", "x2"], [rng.choice(((m,), (1,), ())), (m, k), (k,)], "scales"),
            (
                "baddbmm",
                ["x0", "x1", "x2"],
                [rng.choice(((b, m, n), (m, n), (1, 1, n))), (b, m, k), (b, k, n)],
                "scales",
            ),
            ("addbmm", ["x0", "x1", "x2"], [rng.choice(((m, n), (n,))), (b, m, k), (b, k, n)], "scales"),
            ("nn.functional.linear", ["x0", "x1", "x2"], [rng.choice(((k,), (m, k), (b, m, k))), (n, k), (n,)], {}),
            ("nn.functional.bilinear", ["x0", "x1", "x2"], [(b, m), (b, k), (n, m, k)], {}),
        ]
    )
    if rng.random() < 0.15:
        equation = rng.choice(EINSUMS)
        sizes = dict(zip("bijk", (b, m, k, n), strict=True))
        terms = equation.split("->")[0].replace("...", "b").split(",")
        inputs = [(tuple(sizes[c] for c in t), rng.choice(kinds)) for t in terms]
        return {"call": "torch.einsum", "args": [equation, *(f"x{i}" for i in range(len(terms)))], "inputs": inputs}
    if kwargs == "scales":
        kwargs = maybe(rng, beta=(0, 0.5, 1, 2), alpha=(0, 0.5, 1, 2))
    inputs = [(s, rng.choice(kinds)) for s in shapes]
    if kwargs.get("beta") == 0 and rng.random() < 0.5:
        inputs[0] = (shapes[0], "nan")
    return {"call": f"torch.{name}", "args": args, "kwargs": kwargs, "inputs": inputs}


# -- attention, recurrent layers -------------------------------------------------------------------------------------------


def attention(rng: random.Random) -> Call:
    heads, b, lq, lk, e, ev = (rng.choice((1, 1, 2, 3, 5)) for _ in range(6))
    lead = rng.choice(((), (b,), (b, heads)))
    xs: list[Any] = [((*lead, lq, e), "normal"), ((*lead, lk, e), "normal"), ((*lead, lk, ev), "normal")]
    kwargs = maybe(rng, scale=(None, 0.5, 2.0))
    how = rng.randrange(4)
    if how == 1:
        kwargs["is_causal"] = True
    elif how > 1:
        kwargs["attn_mask"] = "x3"
        shape = rng.choice(((lq, lk), (*lead, lq, lk), (1, lk)))
        xs.append((shape, "mask" if how == 2 else rng.choice(("normal", "-inf"))))
    args = ["x0", "x1", "x2"]
    return {"call": "F.scaled_dot_product_attention", "args": args, "kwargs": kwargs, "inputs": xs}


def attention_layer(rng: random.Random) -> Call:
    heads, b, lq, lk = (rng.choice((1, 2, 3)) for _ in range(4))
    e, first = heads * rng.choice((1, 2, 4)), rng.random() < 0.5

    def sequence(n: int) -> tuple:
        return ((b, n, e) if first else (n, b, e), "normal")

    if rng.random() < 0.5:
        kwargs = {"batch_first": first, **maybe(rng, bias=(True, False), add_bias_kv=(True,), add_zero_attn=(True,))}
        inputs = [sequence(lq), sequence(lk), sequence(lk)]
        return {"call": "nn.MultiheadAttention", "args": [e, heads], "kwargs": kwargs, "inputs": inputs}
    kwargs = {"batch_first": first, "dropout": 0.0, **maybe(rng, norm_first=(True, False), activation=("relu", "gelu"))}
    kwargs |= maybe(rng, bias=(True, False))
    decoder = rng.random() < 0.5
    name = f"nn.Transformer{'Decoder' if decoder else 'Encoder'}Layer"
    inputs = [sequence(lq), *([sequence(lk)] if decoder else [])]
    return {"call": name, "args": [e, heads, rng.choice((1, 5))], "kwargs": kwargs, "inputs": inputs}


def recurrent(rng: random.Random) -> Call:
    b, n, i, h = (rng.choice((1, 1, 2, 3, 17)) for _ in range(4))
    name = rng.choice(("RNN", "GRU", "LSTM"))
    kwargs: Call = maybe(rng, bias=(True, False), **({"nonlinearity": ("tanh", "relu")} if name == "RNN" else {}))
    if rng.random() < 0.3:
        shape = rng.choice(((b, i), (i,)))
        return {"call": f"nn.{name}Cell", "args": [i, h], "kwargs": kwargs, "inputs": [(shape, "normal")]}
    kwargs |= maybe(rng, num_layers=(1, 2), bidirectional=(True, False), batch_first=(True, False))
    if name == "LSTM" and h > 1 and rng.random() < 0.2:
        kwargs["proj_size"] = rng.randrange(1, h)
    shape = (b, n, i) if kwargs.get("batch_first") else (n, b, i)
    shape = shape if rng.random() < 0.9 else (n, i)
    return {
        "call": f"nn.{name}",
        "args": [i, h],
        "kwargs": kwargs,
        "inputs": [(shape, rng.choice(("normal", "large", "zeros")))],
    }
