"""Attention and torch's transformer layers: conversion samples, masks, biases, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import needle as ndl
import torch2needle
from conversion import close, converts
from gpu_devices import everywhere

SEQUENCES, QUERY, KEY = (2, 5, 12), (2, 4, 12), (2, 7, 12)
FORBIDDEN = torch.triu(torch.ones(5, 5), 1).bool()
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


class One(nn.Module):
    """A module whose forward is a function of its one part and the input."""

    def __init__(self, part: nn.Module | None, f: Callable) -> None:
        super().__init__()
        self.part, self.f = part, f

    def forward(self, x: torch.Tensor) -> Any:
        return self.f(self.part, x)


class Two(One):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.f(self.part, x, y)


def mha(*args: Any, **kwargs: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(12, 3, *args, **{"batch_first": True, **kwargs})


def groups(x: torch.Tensor, keys: int, values: int, **kwargs: Any) -> torch.Tensor:
    """Attention of 4 heads of 3 features, which share heads of keys and of values."""
    q = x.unflatten(-1, (4, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q[:, :keys] + 1, q[:, 4 - values :] * 2, enable_gqa=True, **kwargs)


SELF: dict[str, tuple[Callable, Callable]] = {
    "weights": (mha, lambda m, x: m(x, x, x)),
    "weights per head": (mha, lambda m, x: m(x, x, x, average_attn_weights=False)),
    "output only": (mha, lambda m, x: m(x, x, x, need_weights=False)[0]),
    "no bias": (lambda: mha(bias=False), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "sequence first": (lambda: mha(batch_first=False), lambda m, x: m(x, x, x)),
    "boolean mask": (mha, lambda m, x: m(x, x, x, attn_mask=FORBIDDEN)[0]),
    "float mask": (mha, lambda m, x: m(x, x, x, attn_mask=torch.eye(5), need_weights=False)[0]),
    "mask per head": (mha, lambda m, x: m(x, x, x, attn_mask=torch.stack([FORBIDDEN] * 6), need_weights=False)[0]),
    "padding": (mha, lambda m, x: m(x, x, x, key_padding_mask=PADDING, need_weights=False)[0]),
    "both masks": (mha, lambda m, x: m(x, x, x, key_padding_mask=PADDING, attn_mask=FORBIDDEN)[0]),
    "causal hint": (mha, lambda m, x: m(x, x, x, attn_mask=FORBIDDEN, is_causal=True, need_weights=False)[0]),
    "bias kv": (lambda: mha(add_bias_kv=True), lambda m, x: m(x, x, x)),
    "zero attention": (lambda: mha(add_zero_attn=True), lambda m, x: m(x, x, x, attn_mask=FORBIDDEN)[0]),
    "both rows": (lambda: mha(add_bias_kv=True, add_zero_attn=True), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "sdpa": (lambda: None, lambda m, x: F.scaled_dot_product_attention(x, x + 1, x * 2)),
    "sdpa causal": (lambda: None, lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3)),
    "sdpa groups": (lambda: None, lambda m, x: groups(x, 2, 2)),
    "sdpa one head of keys": (lambda: None, lambda m, x: groups(x, 1, 1, is_causal=True, scale=0.4)),
    "sdpa groups mask": (lambda: None, lambda m, x: groups(x, 2, 2, attn_mask=~FORBIDDEN)),
    "sdpa groups of two sizes": (lambda: None, lambda m, x: groups(x, 2, 4)),
    "sdpa groups mask per head": (
        lambda: None,
        lambda m, x: groups(x, 1, 2, attn_mask=torch.arange(100.0).view(4, 5, 5) % 3),
    ),
    "sdpa no groups": (lambda: None, lambda m, x: groups(x, 4, 4)),
    "sdpa mask": (lambda: None, lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=~FORBIDDEN)),
}


@everywhere
@pytest.mark.parametrize("name", SELF)
def test_self_attention(name: str) -> None:
    make, f = SELF[name]
    fixed = name in ("padding", "both masks", "mask per head")  # constants of the batch's size
    converts(One(make(), f), SEQUENCES, batch=not fixed)


@everywhere
def test_unbatched() -> None:
    converts(One(mha(), lambda m, x: m(x, x, x)), (5, 12), batch=False)
    converts(One(mha(batch_first=False), lambda m, x: m(x, x, x)), (5, 12), batch=False)


@everywhere
def test_cross_attention() -> None:
    converts(Two(mha(), lambda m, x, y: m(x, y, y)[0]), QUERY, KEY)
    converts(Two(mha(), lambda m, x, y: m(x, y, y * 2, need_weights=False)[0]), QUERY, KEY)
    converts(Two(mha(kdim=6, vdim=6), lambda m, x, y: m(x, y, y)[0]), QUERY, (2, 7, 6))
    converts(Two(mha(kdim=6, vdim=6, bias=False), lambda m, x, y: m(x, y, y)[0]), QUERY, (2, 7, 6))


ENCODERS: dict[str, Callable] = {
    "post norm": lambda: nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True),
    "pre norm gelu": lambda: nn.TransformerEncoderLayer(12, 3, 20, 0.0, "gelu", norm_first=True, batch_first=True),
    "activation module": lambda: nn.TransformerEncoderLayer(12, 3, 20, 0.0, nn.SiLU(), batch_first=True),
    "no bias": lambda: nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True, bias=False),
    "sequence first": lambda: nn.TransformerEncoderLayer(12, 3, 20, 0.0),
    "stack": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True), 2, nn.LayerNorm(12)
    ),
}


@everywhere
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name: str) -> None:
    converts(nn.Sequential(ENCODERS[name]()), SEQUENCES)


@everywhere
def test_encoder_masks() -> None:
    layer = ENCODERS["stack"]()
    converts(One(layer, lambda m, x: m(x, mask=FORBIDDEN)), SEQUENCES)
    # In evaluation torch's fast path gives zeros where a sequence is padded; those positions mean nothing.
    model = One(layer, lambda m, x: m(x, src_key_padding_mask=PADDING)).train()
    converts(model, SEQUENCES, batch=False, modes=(True,))


@everywhere
def test_decoder() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20, 0.0, batch_first=True)
    converts(Two(layer, lambda m, x, y: m(x, y)), QUERY, KEY)
    before = nn.TransformerDecoderLayer(12, 3, 20, 0.0, "gelu", norm_first=True, batch_first=True)
    converts(Two(nn.TransformerDecoder(before, 2), lambda m, x, y: m(x, y)), QUERY, KEY)


@everywhere
def test_whole_transformer() -> None:
    model = nn.Transformer(12, 3, 2, 2, 20, 0.0, batch_first=True)
    converts(Two(model, lambda m, x, y: m(x, y)), KEY, QUERY)


def test_dropout_follows_the_mode() -> None:
    """In evaluation none; in training probabilities are dropped, so that two calls differ."""
    model = One(mha(0.5), lambda m, x: m(x, x, x, need_weights=False)[0])
    net = converts(model, SEQUENCES, modes=(False,))
    x = ndl.Tensor(np.random.randn(*SEQUENCES).astype("float32"))
    close(net(x), net(x))
    net.train()
    assert np.abs(net(x).numpy() - net(x).numpy()).max() > 1e-3
    with pytest.raises(ValueError, match="training mode"):
        ndl.compile(net, (x,))


def test_refusals() -> None:
    def reason(f: Callable) -> str:
        return torch2needle.check(One(None, f)).unsupported[0].reason

    assert "dropout_p" in reason(lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1))
    with pytest.raises(ValueError, match=r"^\[attention\] k expects 4 features as q has, got 5\.$"):
        ndl.ops.scaled_dot_product_attention(*(ndl.Tensor(np.zeros(s, "f")) for s in ((3, 4), (3, 5), (3, 4))))


@pytest.mark.parametrize("frozen", [False, True])
def test_slices_of_a_joint_weight_follow_it(frozen: bool) -> None:
    """Cross attention reads thirds of in_proj_weight: they are recorded, also of a model that needs no gradients."""
    model = Two(mha(), lambda m, x, y: m(x, y, y)[0]).requires_grad_(not frozen)
    x, y = torch.randn(QUERY), torch.randn(KEY)
    net = torch2needle.convert(model.eval())
    exe = ndl.compile(net, (x, y))
    exe(x, y)
    with torch.no_grad():
        model.part.in_proj_weight.mul_(-2.0)
    net.load_state_dict({k: v.numpy() for k, v in model.state_dict().items()})
    close(net(x, y), model(x, y))
    close(exe(x, y), model(x, y))


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
def test_causal_masks_of_their_own_class(make: Callable, example: bool) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(4, 4)

        def forward(self, x: Any, y: Any) -> Any:
            q, k = self.query(x).unsqueeze(1), y.unsqueeze(1)
            return F.scaled_dot_product_attention(q, k, k, attn_mask=make(x.shape[1], y.shape[1]))

    model, inputs = Causal().eval(), (torch.randn(2, 3, 4), torch.randn(2, 5, 4))
    net = torch2needle.convert(model, inputs if example else None)
    for given in (inputs, (torch.randn(3, 3, 4), torch.randn(3, 5, 4))):
        close(net(*given), model(*given))
        close(ndl.compile(net, given)(*given), model(*given))
    assert type(make(2, 3)).__name__ == "CausalBias"  # as before
