"""The course's `mlp_resnet`."""

from needle.models import MLPResNet, ResidualBlock
from needle.training import epoch, train_mnist
