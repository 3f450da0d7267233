"""Optimizers, learning-rate schedules, gradient clipping and averages of parameters."""

from needle.exports import public

from .adaptive import Adadelta, Adagrad, Adamax, Lion, NAdam, RAdam
from .average import EMA, SWA
from .base import Optimizer
from .clip import clip_grad_norm, clip_grad_value
from .combined import ChainedScheduler, SequentialLR
from .composed import ASGD, Adafactor, Composed, Muon, Rprop
from .cycles import CosineAnnealingWarmRestarts, CyclicLR, OneCycleLR
from .lbfgs import LBFGS
from .plateau import ReduceLROnPlateau
from .rules import SGD, Adam, AdamW, RMSprop
from .schedule import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
    Schedule,
    StepLR,
)

__all__ = public(globals())
