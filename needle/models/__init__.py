"""The course's models."""

from .language_model import LanguageModel
from .mlp_resnet import MLPResNet, ResidualBlock
from .resnet9 import ConvBN, ResNet9, ResNet9Wide

__all__ = ["ConvBN", "LanguageModel", "MLPResNet", "ResNet9", "ResNet9Wide", "ResidualBlock"]
