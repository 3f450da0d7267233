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
from torch2needle.layer_calls import call_layer
from torch2needle.registry import rule


@rule(nn.Dropout, view="mode")
def dropout_layer(m: nn.Dropout) -> Any:
    return needle_nn.Dropout(m.p)


@rule(nn.Dropout1d, view="mode")
def dropout1d_layer(m: nn.Dropout1d) -> Any:
    return needle_nn.Dropout1d(m.p)


@rule(nn.Dropout2d, view="mode")
def dropout2d_layer(m: nn.Dropout2d) -> Any:
    return needle_nn.Dropout2d(m.p)


@rule(nn.Dropout3d, view="mode")
def dropout3d_layer(m: nn.Dropout3d) -> Any:
    return needle_nn.Dropout3d(m.p)


@rule(nn.AlphaDropout, view="mode")
def alpha_dropout_layer(m: nn.AlphaDropout) -> Any:
    return needle_nn.AlphaDropout(m.p)


@rule(nn.FeatureAlphaDropout, view="mode")
def feature_alpha_dropout_layer(m: nn.FeatureAlphaDropout) -> Any:
    return needle_nn.FeatureAlphaDropout(m.p)


def drop(layer: Callable[[float], needle_nn.Dropout], input: Any, p: float, training: Any) -> Any:
    """The call as a layer that follows the flag of the module which makes it."""
    if training is False or p == 0:
        return input
    if not isinstance(training, Mode):
        raise Unsupported("training=True holds in evaluation, too; pass training=self.training")
    return call_layer(training, layer(p), input)


@rule(F.dropout, view="mode")
def dropout(input: Any, p: float = 0.5, training: Any = True, inplace: bool = False) -> Any:
    return drop(needle_nn.Dropout, input, p, training)


@rule(F.dropout1d, view="mode")
def dropout1d(input: Any, p: float = 0.5, training: Any = True, inplace: bool = False) -> Any:
    return drop(needle_nn.Dropout1d, input, p, training)


@rule(F.dropout2d, view="mode")
def dropout2d(input: Any, p: float = 0.5, training: Any = True, inplace: bool = False) -> Any:
    return drop(needle_nn.Dropout2d, input, p, training)


@rule(F.dropout3d, view="mode")
def dropout3d(input: Any, p: float = 0.5, training: Any = True, inplace: bool = False) -> Any:
    return drop(needle_nn.Dropout3d, input, p, training)


@rule(F.alpha_dropout, view="mode")
def alpha_dropout(input: Any, p: float = 0.5, training: Any = False, inplace: bool = False) -> Any:
    return drop(needle_nn.AlphaDropout, input, p, training)


@rule(F.feature_alpha_dropout, view="mode")
def feature_alpha_dropout(input: Any, p: float = 0.5, training: Any = False, inplace: bool = False) -> Any:
    return drop(needle_nn.FeatureAlphaDropout, input, p, training)


@rule(torch.dropout, torch.dropout_, view="mode")
def torch_dropout(input: Any, p: float, train: Any) -> Any:
    return drop(needle_nn.Dropout, input, p, train)


@rule(torch.feature_dropout, torch.feature_dropout_, view="mode")
def feature_dropout(input: Any, p: float, train: Any) -> Any:
    return drop(needle_nn.Dropout2d, input, p, train)


@rule(torch.alpha_dropout, torch.alpha_dropout_, view="mode")
def torch_alpha_dropout(input: Any, p: float, train: Any) -> Any:
    return drop(needle_nn.AlphaDropout, input, p, train)


@rule(torch.feature_alpha_dropout, torch.feature_alpha_dropout_, view="mode")
def torch_feature_alpha_dropout(input: Any, p: float, train: Any) -> Any:
    return drop(needle_nn.FeatureAlphaDropout, input, p, train)


@rule("torchvision.ops.stochastic_depth.stochastic_depth", view="mode")
def stochastic_depth(input: Any, p: float, mode: str, training: Any = True) -> Any:
    return drop(partial(needle_nn.StochasticDepth, mode=mode), input, p, training)
