"""Time series: decomposition, patches, dilated stacks, cells in loops, missing values, segments of unequal length."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DLinear(nn.Module):
    """Zeng et al. 2023: trend by a moving average with repeated ends, rest apart. (N, 24, 3)."""

    def __init__(self, length: int = 24, horizon: int = 8, kernel: int = 5) -> None:
        super().__init__()
        self.kernel = kernel
        self.trend, self.season = nn.Linear(length, horizon), nn.Linear(length, horizon)

    def forward(self, x: Tensor) -> Tensor:
        front = x[:, 0:1, :].repeat(1, (self.kernel - 1) // 2, 1)
        end = x[:, -1:, :].repeat(1, (self.kernel - 1) // 2, 1)
        mean = F.avg_pool1d(torch.cat([front, x, end], dim=1).permute(0, 2, 1), self.kernel, stride=1)
        season = x.permute(0, 2, 1) - mean
        return (self.season(season) + self.trend(mean)).permute(0, 2, 1)


class PatchTST(nn.Module):
    """Nie et al. 2023: normalised series, overlapping patches by Tensor.unfold, an encoder per channel. (N, 24, 3)."""

    def __init__(self, length: int = 24, patch: int = 6, stride: int = 3, horizon: int = 8) -> None:
        super().__init__()
        self.patch, self.stride = patch, stride
        count = (length - patch) // stride + 2
        self.embed, self.position = nn.Linear(patch, 16), nn.Parameter(torch.randn(1, count, 16) * 0.02)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
        self.head = nn.Linear(count * 16, horizon)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True), torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        y = ((x - mean) / std).permute(0, 2, 1)
        y = F.pad(y, (0, self.stride), mode="replicate").unfold(-1, self.patch, self.stride)
        n, c, p, _ = y.shape
        y = self.encoder((self.embed(y) + self.position).reshape(n * c, p, -1))
        return self.head(y.reshape(n, c, -1)).permute(0, 2, 1) * std + mean


class NBeats(nn.Module):
    """Oreshkin et al. 2020: blocks subtract their backcast; trend and season bases as buffers. (N, 20)."""

    def __init__(self, length: int = 20, horizon: int = 5) -> None:
        super().__init__()
        t = torch.arange(length + horizon) / (length + horizon)
        trend = torch.stack([t**i for i in range(3)])
        season = torch.cat(
            [torch.stack([torch.cos(2 * math.pi * i * t), torch.sin(2 * math.pi * i * t)]) for i in (1, 2)]
        )
        self.register_buffer("trend", trend)
        self.register_buffer("season", season)
        self.length = length
        make = lambda n: nn.Sequential(nn.Linear(length, 16), nn.ReLU(), nn.Linear(16, n))  # noqa: E731
        self.blocks = nn.ModuleList([make(3), make(3), make(4)])

    def forward(self, x: Tensor) -> Tensor:
        residual, forecast = x.flip(dims=(1,)), x[:, -1:]
        for i, block in enumerate(self.blocks):
            basis = self.trend if i < 2 else self.season
            both = block(residual) @ basis
            residual = residual - both[:, : self.length].flip(dims=(1,))
            forecast = forecast + both[:, self.length :]
        return forecast


class TimesBlock(nn.Module):
    """TimesNet (Wu et al. 2023): the strongest periods of the spectrum fold the series into images. (N, 24, 4)."""

    def __init__(self, width: int = 4, k: int = 2) -> None:
        super().__init__()
        self.k, self.conv = (
            k,
            nn.Sequential(nn.Conv2d(width, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, width, 3, padding=1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.size()
        strength = abs(torch.fft.rfft(x, dim=1))
        frequencies = strength.mean(0).mean(-1)
        frequencies[0] = 0
        _, top = torch.topk(frequencies, self.k)
        periods = length // top.detach().cpu().numpy()
        weights = F.softmax(strength.mean(-1)[:, top], dim=1)
        parts = []
        for period in periods:
            rows = -(-length // int(period))
            y = F.pad(x, (0, 0, 0, rows * int(period) - length)).reshape(n, rows, int(period), width)
            parts.append(self.conv(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).reshape(n, -1, width)[:, :length])
        return (torch.stack(parts, dim=-1) * weights[:, None, None]).sum(-1) + x


class GRUD(nn.Module):
    """Che et al. 2018: values decay to their means while they are missing; masks and times as inputs. Three of (N, 7, 4)."""

    def __init__(self, width: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.hidden, self.cell = hidden, nn.GRUCell(2 * width, hidden)
        self.decay_x, self.decay_h = nn.Linear(width, width), nn.Linear(width, hidden)
        self.register_buffer("mean", torch.randn(width))
        self.head = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, seen: Tensor, gap: Tensor) -> Tensor:
        mask = seen > 0
        h, last = x.new_zeros(x.size(0), self.hidden), self.mean.expand(x.size(0), -1)
        for t in range(x.size(1)):
            m, d = mask[:, t], gap[:, t].abs()
            last = torch.where(m, x[:, t], last)
            gamma = torch.exp(-F.relu(self.decay_x(d)))
            value = torch.where(m, x[:, t], gamma * last + (1 - gamma) * self.mean)
            h = self.cell(torch.cat([value, m.float()], 1), h * torch.exp(-F.relu(self.decay_h(d))))
        return self.head(h)


class WaveNet(nn.Module):
    """van den Oord et al. 2016: gated dilated causal convolutions over codes. (N, L) in 0 ... 15."""

    def __init__(self, codes: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(codes, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4))
        self.head = nn.Conv1d(width, codes, 1)

    def forward(self, codes: Tensor) -> Tensor:
        x, total = self.embed(codes).mT, 0
        for i, (layer, skip) in enumerate(zip(self.layers, self.skips, strict=True)):
            a, b = layer(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            y = skip(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + y, total + y
        return self.head(F.relu(total))


class Informer(nn.Module):
    """Zhou et al. 2021: only the queries with the sharpest scores attend, the rest take the running mean. (N, L, 8)."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=-1))
        top = min(length, math.ceil(2 * math.log(length)))
        sample = torch.arange(0, length, 3)
        scores = torch.einsum("bhld,bhsd->bhls", q, k[:, :, sample])
        sharp = scores.max(-1)[0] - torch.div(scores.sum(-1), length)
        index = sharp.topk(top, sorted=False)[1].sort(-1)[0]
        picked = q[torch.arange(n)[:, None, None], torch.arange(self.heads)[None, :, None], index, :]
        weights = torch.matmul(picked, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        allowed = torch.ones(length, length, dtype=torch.bool).triu(1)[index]
        weights.masked_fill_(allowed, -math.inf)
        context = v.cumsum(dim=-2)
        context[torch.arange(n)[:, None, None], torch.arange(self.heads)[None, :, None], index, :] = torch.matmul(
            torch.softmax(weights, -1), v
        ).type_as(context)
        return self.out(context.transpose(1, 2).reshape(n, length, width))


class NeuralODE(nn.Module):
    """Chen et al. 2018 with the classical Runge-Kutta method of fixed steps between given times. (N, 4) and (5,)."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width + 1, 16), nn.Tanh(), nn.Linear(16, width))

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(torch.cat([y, t.expand(y.size(0), 1)], dim=1))

    def forward(self, y: Tensor, times: Tensor) -> Tensor:
        assert (times[1:] >= times[:-1]).all(), "times must not fall"
        path = [y]
        for t0, t1 in itertools.pairwise(times):
            h = t1 - t0
            k1 = self.slope(t0, y)
            k2 = self.slope(t0 + h / 2, y + h * k1 / 2)
            k3 = self.slope(t0 + h / 2, y + h * k2 / 2)
            k4 = self.slope(t1, y + h * k3)
            y = y + (k1 + 2 * k2 + 2 * k3 + k4) * (h / 6)
            path.append(y)
        return torch.stack(path, dim=1)


class QuantileForecast(nn.Module):
    """A GRU's heads give quantiles that never cross, by cumulative sums; values scaled by their own mean. (N, 12, 2)."""

    def __init__(self, width: int = 2, quantiles: int = 5) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(width, 8, 2, batch_first=True, bidirectional=True), nn.Linear(16, quantiles)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().mean(1, keepdim=True)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        y, _ = self.rnn(x / scale)
        raw = self.head(y[:, -1])
        return torch.cumsum(torch.cat([raw[:, :1], F.softplus(raw[:, 1:])], dim=1), dim=1) * scale[:, 0, :1]


class SoftDTW(nn.Module):
    """Cuturi and Blondel 2017: the dynamic programme of soft minima between two encoded series. (N, 5, 2) and (N, 6, 2)."""

    def __init__(self, gamma: float = 0.5) -> None:
        super().__init__()
        self.gamma, self.encode = gamma, nn.Linear(2, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        d = torch.cdist(self.encode(a), self.encode(b)) ** 2
        n, rows, columns = d.shape
        r = torch.full((n, rows + 1, columns + 1), 1e6)
        r[:, 0, 0] = 0
        for i in range(rows):
            for j in range(columns):
                near = torch.stack([r[:, i, j], r[:, i, j + 1], r[:, i + 1, j]], dim=-1)
                r[:, i + 1, j + 1] = d[:, i, j] - self.gamma * torch.logsumexp(-near / self.gamma, dim=-1)
        return r[:, -1, -1]
