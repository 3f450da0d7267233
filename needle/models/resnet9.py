"""ResNets of nine layers for CIFAR-10: the course's, and the wide one of DAWNBench entries."""

from __future__ import annotations

from typing import Any

from needle import nn
from needle.autograd import Tensor
from needle.backend_ndarray import Device


class ConvBN(nn.Sequential):
    """Convolution, batch norm and ReLU: (N, in, H, W) to (N, out, H / stride, W / stride)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(
            nn.Conv(in_channels, out_channels, kernel_size, stride, device=device, dtype=dtype),
            nn.BatchNorm2d(out_channels, device=device, dtype=dtype),
            nn.ReLU(),
        )


def residual(width: int, **where: Any) -> nn.Residual:
    return nn.Residual(nn.Sequential(ConvBN(width, width, 3, **where), ConvBN(width, width, 3, **where)))


class ResNet9(nn.Module):
    """Images (N, 3, 32, 32) to scores (N, num_classes); 431,946 parameters at 10 classes."""

    def __init__(self, device: Device | None = None, dtype: str = "float32", num_classes: int = 10) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.features = nn.Sequential(
            ConvBN(3, 16, 7, 4, **where),
            ConvBN(16, 32, 3, 2, **where),
            residual(32, **where),
            ConvBN(32, 64, 3, 2, **where),
            ConvBN(64, 128, 3, 2, **where),
            residual(128, **where),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(128, 128, **where), nn.ReLU(), nn.Linear(128, num_classes, **where)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class ResNet9Wide(nn.Module):
    """Images (N, 3, H, W), H and W at least 8, to scores (N, num_classes); 6.6 million parameters at 10 classes."""

    def __init__(self, device: Device | None = None, dtype: str = "float32", num_classes: int = 10) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.features = nn.Sequential(
            ConvBN(3, 64, 3, **where),
            ConvBN(64, 128, 3, **where),
            nn.MaxPool2d(2),
            residual(128, **where),
            ConvBN(128, 256, 3, **where),
            nn.MaxPool2d(2),
            ConvBN(256, 512, 3, **where),
            nn.MaxPool2d(2),
            residual(512, **where),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(512, num_classes, **where))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))
