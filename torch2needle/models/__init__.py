"""Our own torch definitions of the models that we convert, with torchvision's parameter names where it has them."""

from .densenet import DenseNet, densenet121
from .efficientnet import EfficientNet, efficientnet_b0
from .initialise import randomize
from .lstm import LSTMClassifier, lstm
from .mlp import MLP, mlp
from .mobilenet import MobileNetV2, mobilenet_v2
from .resnet import ResNet, resnet18, resnet34, resnet50, resnet101
from .resnet9 import ResNet9, ResNet9Wide, resnet9, resnet9_wide
from .transformer import TransformerClassifier, transformer
from .unet import UNet, unet
from .vgg import VGG, vgg16
from .vit import VisionTransformer, vit

__all__ = [
    "MLP",
    "VGG",
    "DenseNet",
    "EfficientNet",
    "LSTMClassifier",
    "MobileNetV2",
    "ResNet",
    "ResNet9",
    "ResNet9Wide",
    "TransformerClassifier",
    "UNet",
    "VisionTransformer",
    "densenet121",
    "efficientnet_b0",
    "lstm",
    "mlp",
    "mobilenet_v2",
    "randomize",
    "resnet9",
    "resnet9_wide",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "transformer",
    "unet",
    "vgg16",
    "vit",
]
