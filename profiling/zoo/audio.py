"""Recurrent audio models in torch, as speech and sound papers describe them: spectrograms in, scores by time step or clip out."""

from __future__ import annotations

import torch
from torch import nn


class DeepSpeech2(nn.Module):
    """Amodei et al. 2015: strided 2-D convolutions with clipped ReLU, bidirectional GRUs, scores by step. (N, 1, mels, T)."""

    def __init__(self, mels: int = 64, hidden: int = 128, layers: int = 2, classes: int = 29) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, (21, 11), (2, 2), (10, 5), bias=False),
            nn.BatchNorm2d(16),
            nn.Hardtanh(0, 20),
            nn.Conv2d(16, 16, (11, 11), (2, 1), (5, 5), bias=False),
            nn.BatchNorm2d(16),
            nn.Hardtanh(0, 20),
        )
        self.recurrent = nn.GRU(16 * mels // 4, hidden, layers, batch_first=True, bidirectional=True)
        self.classify = nn.Sequential(nn.LayerNorm(2 * hidden), nn.Linear(2 * hidden, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        n, c, f, t = x.shape
        x = x.view(n, c * f, t).transpose(1, 2)
        x, _ = self.recurrent(x)
        return torch.log_softmax(self.classify(x), -1)


class CRNN(nn.Module):
    """Sound event detection (Cakir et al. 2017): convolutions that pool over frequency, a bidirectional LSTM, sigmoid by step."""

    def __init__(self, mels: int = 64, channels: int = 32, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for i in range(3):
            blocks += [nn.Conv2d(channels if i else 1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(True)]
            blocks += [nn.MaxPool2d((1, 4)), nn.Dropout(0.2)]
        self.blocks = nn.Sequential(*blocks)
        self.lstm = nn.LSTM(channels * mels // 64, hidden, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks(x).permute(0, 2, 1, 3).flatten(2)
        frames = torch.sigmoid(self.head(self.lstm(x)[0]))
        return frames, (frames * frames).sum(1) / frames.sum(1)


class GRUDenoiser(nn.Module):
    """A mask over a magnitude spectrogram (N, T, bins) from unidirectional GRUs, with the last states for the next block."""

    def __init__(self, bins: int = 129, hidden: int = 96) -> None:
        super().__init__()
        self.inward = nn.Linear(bins, hidden)
        self.gru = nn.GRU(hidden, hidden, 2, batch_first=True)
        self.outward = nn.Linear(hidden, bins)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = self.gru(torch.tanh(self.inward(x.clamp_min(1e-5).log10())), state)
        return x * torch.sigmoid(self.outward(y)), state


class WaveLSTM(nn.Module):
    """Raw sound (N, 1, samples): 1-D convolutions (M5, Dai et al. 2017), an LSTM over (T, N, C), the last step's class scores."""

    def __init__(self, channels: int = 32, hidden: int = 64, classes: int = 35) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, channels, 80, 16)
        self.bn1 = nn.BatchNorm1d(channels)
        self.conv2 = nn.Conv1d(channels, channels, 3)
        self.bn2 = nn.BatchNorm1d(channels)
        self.pool = nn.MaxPool1d(4)
        self.lstm = nn.LSTM(channels, hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        x = self.pool(torch.relu(self.bn2(self.conv2(x))))
        steps, (h, _) = self.lstm(x.permute(2, 0, 1))
        return torch.log_softmax(self.fc(steps[-1] + h[-1]), dim=1)


class SeparationBlock(nn.Module):
    """A residual block of Conv-TasNet: wide 1x1, dilated depthwise, narrow 1x1, with PReLU and norms over channels and time."""

    def __init__(self, channels: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(channels, hidden, 1),
            nn.PReLU(),
            nn.GroupNorm(1, hidden),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            nn.PReLU(),
            nn.GroupNorm(1, hidden),
            nn.Conv1d(hidden, channels, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class ConvTasNet(nn.Module):
    """Luo and Mesgarani 2019: a learned basis, masks from dilated convolutions. (N, 1, samples) to (N, 2 speakers, samples)."""

    def __init__(
        self, basis: int = 256, channels: int = 128, hidden: int = 256, blocks: int = 8, repeats: int = 2
    ) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, basis, 16, 8, 4, bias=False)
        self.norm, self.inward = nn.GroupNorm(1, basis), nn.Conv1d(basis, channels, 1)
        dilations = [2**i for i in range(blocks)] * repeats
        self.separate = nn.Sequential(*(SeparationBlock(channels, hidden, d) for d in dilations))
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(channels, 2 * basis, 1), nn.Sigmoid())
        self.decode = nn.ConvTranspose1d(basis, 1, 16, 8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.encode(x))
        masks = self.masks(self.separate(self.inward(self.norm(x))))
        parts = [self.decode(x * mask) for mask in masks.chunk(2, 1)]
        return torch.cat(parts, 1)
