"""Optimizers, learning-rate schedules and gradient clipping."""

from .adam import Adam, AdamW
from .base import Optimizer
from .clip import clip_grad_norm, clip_grad_value
from .rmsprop import RMSprop
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
from .sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CosineAnnealingLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "Optimizer",
    "RMSprop",
    "Schedule",
    "SequentialLR",
    "StepLR",
    "clip_grad_norm",
    "clip_grad_value",
]
