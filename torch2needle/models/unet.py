"""U-Net (Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597) with padded convolutions, for inputs of any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DoubleConv(nn.Module):
    """(convolution, BatchNorm, ReLU) twice."""

    def __init__(self, n_in: int, n_out: int, n_mid: int | None = None) -> None:
        super().__init__()
        n_mid = n_mid or n_out
        self.double_conv = nn.Sequential(
            nn.Conv2d(n_in, n_mid, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_mid),
            nn.ReLU(inplace=True),
            nn.Conv2d(n_mid, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.double_conv(x)


class Down(nn.Module):
    """Half the size, then a DoubleConv."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(n_in, n_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.maxpool_conv(x)


class Up(nn.Module):
    """Double the size, pad to the skip connection's, join both, then a DoubleConv."""

    def __init__(self, n_in: int, n_out: int, bilinear: bool) -> None:
        super().__init__()
        if bilinear:
            self.up: nn.Module = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(n_in, n_out, n_in // 2)
        else:
            self.up = nn.ConvTranspose2d(n_in, n_in // 2, 2, stride=2)
            self.conv = DoubleConv(n_in, n_out)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        dy = skip.size()[2] - x.size()[2]
        dx = skip.size()[3] - x.size()[3]
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([skip, x], dim=1))


class OutConv(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class UNet(nn.Module):
    """Four levels; `base` channels at full size, 16 times as many at the bottom."""

    def __init__(self, n_channels: int = 3, n_classes: int = 2, bilinear: bool = False, base: int = 64) -> None:
        super().__init__()
        factor = 2 if bilinear else 1
        self.inc = DoubleConv(n_channels, base)
        self.down1 = Down(base, base * 2)
        self.down2 = Down(base * 2, base * 4)
        self.down3 = Down(base * 4, base * 8)
        self.down4 = Down(base * 8, base * 16 // factor)
        self.up1 = Up(base * 16, base * 8 // factor, bilinear)
        self.up2 = Up(base * 8, base * 4 // factor, bilinear)
        self.up3 = Up(base * 4, base * 2 // factor, bilinear)
        self.up4 = Up(base * 2, base, bilinear)
        self.outc = OutConv(base, n_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x = self.up1(self.down4(x4), x4)
        x = self.up3(self.up2(x, x3), x2)
        return self.outc(self.up4(x, x1))


def unet(n_channels: int = 3, n_classes: int = 2, bilinear: bool = False, base: int = 64) -> UNet:
    return UNet(n_channels, n_classes, bilinear, base)
