"""Rules of dropout. Training draws from numpy's global stream, so that it agrees with torch in distribution only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from needle import nn as needle_nn
from needle.autograd import Unsupported
from needle.graph import Mode

from .layer_calls import Probability, call_layer
from .registry import rule, rule_by_name
from .tables import functions, layers

layers(
    "p",
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    view="mode",
)


def drop(layer: Callable[[float], needle_nn.Dropout], input: Any, p: Any, training: Any) -> Any:
    """The call as a layer that follows the flag of the module which makes it, by `training` or by `p`."""
    if isinstance(p, Probability) and training is not False:
        p, training = p.p, p
    if training is False or p == 0:
        return input
    if not isinstance(training, Mode):
        raise Unsupported("training=True holds in evaluation, too; pass training=self.training")
    return call_layer(training, layer(p), input)


functions(
    "input, p=0.5, training=True, inplace=False",
    {
        (F.dropout,): partial(drop, needle_nn.Dropout),
        (F.dropout1d,): partial(drop, needle_nn.Dropout1d),
        (F.dropout2d,): partial(drop, needle_nn.Dropout2d),
        (F.dropout3d,): partial(drop, needle_nn.Dropout3d),
    },
    view="mode",
)
functions(
    "input, p=0.5, training=False, inplace=False",
    {
        (F.alpha_dropout,): partial(drop, needle_nn.AlphaDropout),
        (F.feature_alpha_dropout,): partial(drop, needle_nn.FeatureAlphaDropout),
    },
    view="mode",
)
functions(
    "input, p, train",
    {
        (torch.dropout, torch.dropout_): partial(drop, needle_nn.Dropout),
        (torch.feature_dropout, torch.feature_dropout_): partial(drop, needle_nn.Dropout2d),
        (torch.alpha_dropout, torch.alpha_dropout_): partial(drop, needle_nn.AlphaDropout),
        (torch.feature_alpha_dropout, torch.feature_alpha_dropout_): partial(drop, needle_nn.FeatureAlphaDropout),
    },
    view="mode",
)


@rule("torchvision.ops.stochastic_depth.stochastic_depth", view="mode")
def stochastic_depth(input: Any, p: float, mode: str, training: Any = True) -> Any:
    return drop(partial(needle_nn.StochasticDepth, mode=mode), input, p, training)


def drops_samples(m: nn.Module) -> bool:
    """Whether a module without tensors is seen to drop samples of ones with its `drop_prob`, in training alone."""
    p = getattr(m, "drop_prob", None)
    if not isinstance(p, int | float) or not 0 <= p < 1 or m.state_dict() or next(m.children(), None) is not None:
        return False
    before, made = m.training, []
    try:
        with _disable_current_modes(), torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(0)
            ones = torch.ones(512, 2, 3, dtype=torch.float32, device="cpu")
            for m.training in (False, True):
                made.append(type(m).forward(m, ones.clone()))
            evaluated, trained = made
            kept = trained[:, :1, :1] != 0
            near = abs(float(kept.float().mean()) - (1 - p)) <= 5 * (p * (1 - p) / 512) ** 0.5
            return near and torch.equal(evaluated, ones) and torch.allclose(trained, kept / (1 - p) * ones)
    except Exception:  # it takes or gives something else
        return False
    finally:
        m.training = before


@rule_by_name("DropPath", "StochasticDepth", behaves=drops_samples, view="mode")
def drop_path(m: Any) -> needle_nn.StochasticDepth:
    return needle_nn.StochasticDepth(m.drop_prob)
