"""The course's `models`."""

from needle.models import ConvBN, LanguageModel, ResNet9, ResNet9Wide
