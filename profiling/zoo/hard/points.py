"""Point clouds: neighbours by distance, farthest points, pillars and voxels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .graphs import mlp


class EdgeConv(nn.Module):
    """DGCNN (Wang et al. 2019): k nearest neighbours in feature space, convolutions over edge features. x: (N, 3, P)."""

    def __init__(self, k: int = 6, hidden: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.k = k
        self.conv1 = nn.Sequential(nn.Conv2d(6, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.LeakyReLU(0.2))
        self.conv2 = nn.Sequential(
            nn.Conv2d(2 * hidden, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.LeakyReLU(0.2)
        )
        self.classify = nn.Linear(4 * hidden, classes)

    def neighbours(self, x: Tensor) -> Tensor:
        n, c, points = x.shape
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        square = torch.sum(x**2, dim=1, keepdim=True)
        index = (-square - inner - square.transpose(2, 1)).topk(k=self.k, dim=-1)[1]
        index = index + torch.arange(0, n, device=x.device).view(-1, 1, 1) * points
        flat = x.transpose(2, 1).contiguous()
        feature = flat.view(n * points, -1)[index.view(-1), :].view(n, points, self.k, c)
        centre = flat.view(n, points, 1, c).repeat(1, 1, self.k, 1)
        return torch.cat((feature - centre, centre), dim=3).permute(0, 3, 1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        a = self.conv1(self.neighbours(x)).max(dim=-1)[0]
        b = self.conv2(self.neighbours(a)).max(dim=-1)[0]
        x = torch.cat([a, b], 1)
        return self.classify(torch.cat([F.adaptive_max_pool1d(x, 1), F.adaptive_avg_pool1d(x, 1)], 1).flatten(1))


class PointNet2(nn.Module):
    """PointNet++ (Qi et al. 2017): farthest points by a loop, ball queries with masked writes, grouped MLP. xyz: (N, P, 3)."""

    def __init__(self, centres: int = 8, radius: float = 1.0, samples: int = 6, hidden: int = 16) -> None:
        super().__init__()
        self.centres, self.radius, self.samples = centres, radius, samples
        self.mlp = mlp(3, hidden, hidden)
        self.head = nn.Linear(hidden, 4)

    def farthest(self, xyz: Tensor) -> Tensor:
        n, points, _ = xyz.shape
        chosen = torch.zeros(n, self.centres, dtype=torch.long)
        distance = torch.ones(n, points, dtype=xyz.dtype) * 1e10
        far = torch.zeros(n, dtype=torch.long)
        rows = torch.arange(n)
        for i in range(self.centres):
            chosen[:, i] = far
            dist = torch.sum((xyz - xyz[rows, far, :].view(n, 1, 3)) ** 2, -1)
            mask = dist < distance
            distance[mask] = dist[mask]
            far = torch.max(distance, -1)[1]
        return chosen

    def forward(self, xyz: Tensor) -> Tensor:
        n, points, _ = xyz.shape
        rows = torch.arange(n).view(n, 1)
        centre = xyz[rows, self.farthest(xyz)]
        group = torch.arange(points).view(1, 1, points).repeat(n, self.centres, 1)
        group[torch.cdist(centre, xyz) > self.radius] = points
        group = group.sort(dim=-1)[0][:, :, : self.samples]
        first = group[:, :, 0].view(n, self.centres, 1).repeat(1, 1, self.samples)
        mask = group == points
        group[mask] = first[mask]
        local = xyz[rows.view(n, 1, 1), group] - centre.unsqueeze(2)
        return self.head(self.mlp(local).max(2)[0].mean(1))


class PointPillars(nn.Module):
    """Lang et al. 2019: points into pillars by their cell, features scattered to a pseudo-image, convolutions. (P, 4)."""

    def __init__(self, cells: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.cells, self.hidden = cells, hidden
        self.point = nn.Sequential(nn.Linear(6, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.head = nn.Conv2d(hidden, 4, 3, padding=1)

    def forward(self, points: Tensor) -> Tensor:
        cell = ((points[:, :2].clamp(-3.99, 3.99) + 4) / 8 * self.cells).floor().long()
        flat = cell[:, 1] * self.cells + cell[:, 0]
        used, inverse, count = torch.unique(flat, return_inverse=True, return_counts=True)
        mean = torch.zeros(len(used), 2, dtype=points.dtype).index_add_(0, inverse, points[:, :2]) / count.unsqueeze(1)
        h = self.point(torch.cat([points, points[:, :2] - mean[inverse]], 1))
        index = inverse.unsqueeze(1).expand(-1, self.hidden)
        pillar = torch.zeros(len(used), self.hidden, dtype=h.dtype).scatter_reduce(
            0, index, h, "amax", include_self=False
        )
        canvas = torch.zeros(self.hidden, self.cells * self.cells, dtype=h.dtype)
        canvas[:, used] = pillar.t()
        return self.head(canvas.view(1, self.hidden, self.cells, self.cells))


class VoxelMean(nn.Module):
    """Voxel features as means of points in a fixed grid, by scatter_add over flat indices. points: (N, P, 3), feats (N, P, C)."""

    def __init__(self, features: int = 4, grid: int = 4) -> None:
        super().__init__()
        self.grid = grid
        self.conv = nn.Conv3d(features + 1, 8, 3, padding=1)

    def forward(self, points: Tensor, feats: Tensor) -> Tensor:
        n, _, c = feats.shape
        g = self.grid
        low, high = points.amin(1, keepdim=True), points.amax(1, keepdim=True)
        where = ((points - low) / (high - low + 1e-6) * g).long().clamp_(0, g - 1)
        flat = where[..., 0] * g * g + where[..., 1] * g + where[..., 2]
        ones = torch.cat([feats, torch.ones_like(feats[..., :1])], -1)
        grid = ones.new_zeros(n, g**3, c + 1).scatter_add(1, flat.unsqueeze(-1).expand(-1, -1, c + 1), ones)
        mean = grid[..., :-1] / grid[..., -1:].clamp(min=1)
        full = torch.cat([mean, (grid[..., -1:] > 0).to(mean.dtype)], -1)
        return self.conv(full.transpose(1, 2).reshape(n, c + 1, g, g, g)).relu()
