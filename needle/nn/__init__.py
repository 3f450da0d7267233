"""Layers and containers."""

from .activation import ELU, GELU, Hardsigmoid, Hardswish, LeakyReLU, ReLU, ReLU6, Sigmoid, SiLU, Tanh
from .basic import (
    Dropout,
    Flatten,
    Identity,
    Linear,
    LogSoftmax,
    Residual,
    Sequential,
    Softmax,
    SoftmaxLoss,
    Upsample,
    dropout,
)
from .conv import AdaptiveAvgPool2d, AvgPool2d, Conv, ConvTranspose2d, MaxPool2d
from .functional import ConstantPad2d, FunctionalBatchNorm
from .module import Module, Parameter
from .norm import BatchNorm1d, BatchNorm2d, LayerNorm1d

__all__ = [
    "ELU",
    "GELU",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "ConstantPad2d",
    "Conv",
    "ConvTranspose2d",
    "Dropout",
    "Flatten",
    "FunctionalBatchNorm",
    "Hardsigmoid",
    "Hardswish",
    "Identity",
    "LayerNorm1d",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "Module",
    "Parameter",
    "ReLU",
    "ReLU6",
    "Residual",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SoftmaxLoss",
    "Tanh",
    "Upsample",
    "dropout",
]
