"""Optimizers, learning-rate schedules and gradient clipping."""

from needle.exports import public

from .base import Optimizer
from .clip import clip_grad_norm, clip_grad_value
from .rules import SGD, Adam, AdamW, RMSprop
from .schedule import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    Schedule,
    SequentialLR,
    StepLR,
)

__all__ = public(globals())
