"""torch's functions of recurrent layers, for torch.export: it would follow them step by step, for as many as the example has.

Here each is one call of any number of steps, which the captured graph has as the call of torch's own. So are the CTC loss, of
which torch.export finds no shapes, and pixel_unshuffle, of whose views it holds that they fix the height.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import rnn

from .asked import LIBRARY
from .guard import patched

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
PLAIN: dict[Any, Any] = {}  # torch's own overload by the one that stands for it


def shapes(
    x: Any,
    hx: Any,
    params: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> Any:
    states = hx if isinstance(hx, list | tuple) else [hx]
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    y = x.new_empty((steps, batch, states[0].shape[2] * (1 + both)))
    return y.transpose(0, 1) if batch_first else y, *(x.new_empty(s.shape) for s in states)


for name in NAMES:
    own = getattr(torch.ops.aten, name).input
    LIBRARY.define(str(own._schema).removeprefix("aten::").replace(f"{name}.input", name, 1))
    torch.library.register_fake(f"torch2needle::{name}")(shapes)
    PLAIN[getattr(torch.ops.torch2needle, name).default] = own


def loss_shape(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    return log_probs.new_empty(() if reduction or log_probs.ndim == 2 else log_probs.shape[1:2])


CTC: Any = torch.ops.aten.ctc_loss.Tensor
LIBRARY.define(str(CTC._schema).removeprefix("aten::").replace("ctc_loss.Tensor", "ctc_loss", 1))
torch.library.register_fake("torch2needle::ctc_loss")(loss_shape)
PLAIN[torch.ops.torch2needle.ctc_loss.default] = CTC

LIBRARY.define("pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor")
PLAIN[torch.ops.torch2needle.pixel_unshuffle.default] = torch.ops.aten.pixel_unshuffle.default


@torch.library.register_fake("torch2needle::pixel_unshuffle")
def unshuffled(x: Any, factor: int) -> Any:
    *batch, channels, height, width = x.shape
    return x.new_empty((*batch, channels * factor**2, height // factor, width // factor))


class Functions(types.SimpleNamespace):
    """torch's, but for some."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._VF, name)


def layers_as_calls() -> AbstractContextManager:
    """Layers of rows that are not packed; what traces below autograd wants torch's own, which have gradients."""
    thread = threading.get_ident()
    ctc_loss: Any = torch.ctc_loss

    def loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *options: Any, **named: Any
    ) -> torch.Tensor:
        lengths = (n if isinstance(n, torch.Tensor) else torch.tensor(n) for n in (input_lengths, target_lengths))
        own = threading.get_ident() != thread
        return (ctc_loss if own else torch.ops.torch2needle.ctc_loss)(log_probs, targets, *lengths, *options, **named)

    def instead(name: str) -> Callable:
        before, one = getattr(torch._VF, name), getattr(torch.ops.torch2needle, name)

        def call(*args: Any) -> Any:
            packed = isinstance(args[3], list | tuple)  # behind the rows' sizes
            return before(*args) if packed or threading.get_ident() != thread else one(*args)

        return call

    def pixel_unshuffle(input: torch.Tensor, downscale_factor: int) -> torch.Tensor:
        mine = threading.get_ident() == thread and input.ndim > 2 and downscale_factor > 0
        return (torch.ops.torch2needle.pixel_unshuffle if mine else shuffles)(input, downscale_factor)

    shuffles = torch.pixel_unshuffle
    layers = Functions(**{n: instead(n) for n in NAMES})
    return patched([(vars(rnn), "_VF", layers), (vars(torch), "ctc_loss", loss), *shuffling(pixel_unshuffle)])


def torchs_own() -> AbstractContextManager:
    own = torch._C._VariableFunctions.pixel_unshuffle
    return patched([(vars(rnn), "_VF", torch._VF), (vars(torch), "ctc_loss", CTC), *shuffling(own)])


def shuffling(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """`function` in the two places where torch has pixel_unshuffle."""
    return [(vars(module), "pixel_unshuffle", function) for module in (torch, nn.functional)]
