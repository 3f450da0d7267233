"""Rules of dropout. Training draws from numpy's global stream, so that it agrees with torch in distribution only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from needle import nn as needle_nn
from needle.autograd import Unsupported
from needle.graph import Mode

from .layer_calls import call_layer
from .registry import rule
from .tables import functions, layers

layers(
    "p",
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    view="mode",
)


def drop(layer: Callable[[float], needle_nn.Dropout], input: Any, p: float, training: Any) -> Any:
    """The call as a layer that follows the flag of the module which makes it."""
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
