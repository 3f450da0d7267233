"""More of images read at computed points: upsampling by predicted windows, bilateral grids, homographies, rotated kernels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sampling import conv, coordinates


class CARAFE(nn.Module):
    """Wang et al. 2019 in a small decoder: kernels predicted by pixel_shuffle, windows by unfold, reassembled."""

    def __init__(self, dim: int = 8, kernel: int = 3, scale: int = 2) -> None:
        super().__init__()
        self.kernel, self.scale = kernel, scale
        self.stem = nn.Sequential(nn.Conv2d(3, dim, 3, 2, 1), nn.BatchNorm2d(dim), nn.ReLU())
        self.compress = nn.Conv2d(dim, 6, 1)
        self.encode = nn.Conv2d(6, (scale * kernel) ** 2, 3, padding=1)
        self.head = nn.Conv2d(dim, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.size()
        s, k = self.scale, self.kernel
        weight = F.softmax(F.pixel_shuffle(self.encode(self.compress(x)), s), dim=1)
        weight = weight.unfold(2, s, step=s).unfold(3, s, step=s).reshape(n, k * k, h, w, s * s)
        weight = weight.permute(0, 2, 3, 1, 4)
        windows = F.pad(x, pad=(k // 2, k // 2, k // 2, k // 2)).unfold(2, k, step=1).unfold(3, k, step=1)
        windows = windows.reshape(n, c, h, w, -1).permute(0, 2, 3, 1, 4)
        up = torch.matmul(windows, weight).reshape(n, h, w, -1).permute(0, 3, 1, 2)
        return self.head(F.pixel_shuffle(up, s))


class HDRNet(nn.Module):
    """Gharbi et al. 2017: a bilateral grid of affine colour transforms from a thumbnail, sliced by a guide in 3-D."""

    def __init__(self, bins: int = 4, width: int = 6) -> None:
        super().__init__()
        self.bins = bins
        self.low = nn.Sequential(conv(3, width, 2), conv(width, width, 2))
        self.local = nn.Sequential(conv(width, width), nn.Conv2d(width, width, 3, padding=1, bias=False))
        self.wide = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.out = nn.Conv2d(width, 12 * bins, 1)
        self.ccm = nn.Parameter(torch.eye(3) + torch.randn(3, 3) / 10)
        self.shifts = nn.Parameter(torch.linspace(0, 1, 5)[:-1].repeat(3, 1))
        self.slopes = nn.Parameter(torch.randn(3, 4) / 4 + 0.5)

    def guide(self, image: Tensor) -> Tensor:
        y = torch.einsum("nchw,dc->ndhw", image, self.ccm).unsqueeze(-1)
        y = (self.slopes[None, :, None, None] * F.relu(y - self.shifts[None, :, None, None])).sum(-1)
        return torch.sigmoid(y.mean(1))

    def forward(self, image: Tensor) -> Tensor:
        n, _, h, w = image.shape
        low = self.low(F.interpolate(image, (16, 16), mode="bilinear", align_corners=False))
        fused = F.relu(self.local(low) + self.wide(low.mean((2, 3)))[:, :, None, None])
        grid = self.out(fused)
        grid = torch.stack(torch.split(grid, grid.shape[1] // self.bins, dim=1), 2)
        y, x = torch.meshgrid(torch.arange(0, h), torch.arange(0, w), indexing="ij")
        x = (x.type_as(image) / (w - 1)).mul(2).sub(1).expand(n, h, w)
        y = (y.type_as(image) / (h - 1)).mul(2).sub(1).expand(n, h, w)
        at = torch.stack([x, y, self.guide(image) * 2 - 1], dim=-1).unsqueeze(1)
        t = F.grid_sample(grid, at, "bilinear", "border", align_corners=True).squeeze(2)
        r = torch.sum(image * t[:, 0:3, :, :], dim=1, keepdim=True) + t[:, 3:4, :, :]
        g = torch.sum(image * t[:, 4:7, :, :], dim=1, keepdim=True) + t[:, 7:8, :, :]
        b = torch.sum(image * t[:, 8:11, :, :], dim=1, keepdim=True) + t[:, 11:12, :, :]
        return torch.cat([r, g, b], dim=1)


class DeepHomography(nn.Module):
    """Nguyen et al. 2018: four corners' offsets, the homography by a linear solve (DLT), a perspective warp."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(2, width, 2), conv(width, width, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.corners = nn.Linear(4 * width, 8)

    @staticmethod
    def solve(source: Tensor, target: Tensor) -> Tensor:
        n = source.size(0)
        a = torch.zeros(n, 8, 8, dtype=source.dtype)
        x, y, u, v = source[..., 0], source[..., 1], target[..., 0], target[..., 1]
        a[:, 0::2, 0], a[:, 0::2, 1], a[:, 0::2, 2] = x, y, 1
        a[:, 0::2, 6], a[:, 0::2, 7] = -x * u, -y * u
        a[:, 1::2, 3], a[:, 1::2, 4], a[:, 1::2, 5] = x, y, 1
        a[:, 1::2, 6], a[:, 1::2, 7] = -x * v, -y * v
        h = torch.linalg.solve(a, target.reshape(n, 8, 1)).squeeze(-1)
        return torch.cat([h, torch.ones(n, 1, dtype=h.dtype)], 1).view(n, 3, 3)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        n, _, h, w = first.shape
        offset = 0.2 * torch.tanh(self.corners(self.net(torch.cat([first, second], 1)))).view(n, 4, 2)
        corners = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]], dtype=first.dtype)
        corners = corners.expand(n, -1, -1)
        matrix = self.solve(corners, corners + offset)
        y, x = torch.meshgrid(
            torch.linspace(-1, 1, h, dtype=first.dtype), torch.linspace(-1, 1, w, dtype=first.dtype), indexing="ij"
        )
        points = torch.stack([x.flatten(), y.flatten(), torch.ones(h * w, dtype=x.dtype)])
        moved = matrix @ points
        z = moved[:, 2:]
        z = torch.where(z.abs() < 1e-6, torch.full_like(z, 1e-6), z)
        grid = (moved[:, :2] / z).transpose(1, 2).view(n, h, w, 2)
        warped = F.grid_sample(second, grid, mode="bilinear", padding_mode="reflection", align_corners=True)
        inside = (grid.abs() <= 1).all(-1, keepdim=True).permute(0, 3, 1, 2)
        return warped * inside, matrix


class RotatedKernels(nn.Module):
    """RotEqNet (Marcos et al. 2017): kernels turned by affine_grid, the strongest angle and its magnitude as vectors."""

    def __init__(self, width: int = 6, angles: int = 8, kernel: int = 5, classes: int = 4) -> None:
        super().__init__()
        self.angles, self.kernel = angles, kernel
        self.weight = nn.Parameter(torch.randn(width, 1, kernel, kernel) / 4)
        self.bias = nn.Parameter(torch.zeros(width))
        self.second = nn.Conv2d(2 * width, classes, 3, padding=1)
        y, x = torch.meshgrid(torch.linspace(-1, 1, kernel), torch.linspace(-1, 1, kernel), indexing="ij")
        self.register_buffer("disk", ((x**2 + y**2) <= 1.0001).float())

    def rotated(self) -> Tensor:
        out = []
        for i in range(self.angles):
            a = 2 * math.pi * i / self.angles
            theta = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]])
            theta = theta.to(self.weight).unsqueeze(0).expand(self.weight.size(0), -1, -1)
            grid = F.affine_grid(theta, list(self.weight.shape), align_corners=True)
            out.append(F.grid_sample(self.weight, grid, mode="bicubic", align_corners=True) * self.disk)
        return torch.stack(out, 1).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        y = F.conv2d(x, self.rotated(), padding=self.kernel // 2).view(n, -1, self.angles, h, w)
        strength, index = y.max(2)
        strength = F.relu(strength + self.bias.view(1, -1, 1, 1))
        angle = index.to(x.dtype) * (2 * math.pi / self.angles)
        u, v = strength * torch.cos(angle), strength * torch.sin(angle)
        pooled, where = F.max_pool2d(strength, 2, return_indices=True)
        where = where.flatten(2)
        u, v = (p.flatten(2).gather(2, where).view_as(pooled) for p in (u, v))
        return F.adaptive_avg_pool2d(self.second(torch.cat([u, v], 1)), 1).flatten(1)


class PointRend(nn.Module):
    """Kirillov et al. 2020: a coarse mask subdivided, its most uncertain points predicted again and scattered back."""

    def __init__(self, classes: int = 3, width: int = 8, points: int = 12, rounds: int = 2) -> None:
        super().__init__()
        self.points, self.rounds = points, rounds
        self.fine = conv(3, width)
        self.body = nn.Sequential(conv(width, width, 2), conv(width, width, 2), nn.Conv2d(width, classes, 1))
        self.mlp = nn.Sequential(nn.Conv1d(width + classes, 16, 1), nn.ReLU(), nn.Conv1d(16, classes, 1))

    @staticmethod
    def sample(x: Tensor, points: Tensor) -> Tensor:
        return F.grid_sample(x, 2.0 * points.unsqueeze(2) - 1.0, align_corners=False).squeeze(3)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = self.body(fine)
        out = coarse
        for _ in range(self.rounds):
            out = F.interpolate(out, scale_factor=2, mode="bilinear", align_corners=False)
            n, c, h, w = out.shape
            best = out.topk(2, dim=1)[0]
            uncertain = (best[:, 1] - best[:, 0]).view(n, h * w)
            _, index = torch.topk(uncertain, min(self.points, h * w), dim=1)
            points = torch.zeros(n, index.size(1), 2, dtype=x.dtype)
            points[:, :, 0] = 0.5 / w + (index % w).to(x.dtype) / w
            points[:, :, 1] = 0.5 / h + torch.div(index, w, rounding_mode="floor").to(x.dtype) / h
            logits = self.mlp(torch.cat([self.sample(fine, points), self.sample(coarse, points)], dim=1))
            at = index.unsqueeze(1).expand(-1, c, -1)
            out = out.reshape(n, c, h * w).scatter_(2, at, logits).view(n, c, h, w)
        return out


class SoftSplat(nn.Module):
    """Softmax splatting (Niklaus and Liu 2020): pixels pushed along a flow, four corners each, by weights and scatter_add."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.flow = nn.Sequential(conv(6, width), nn.Conv2d(width, 4, 3, padding=1))
        self.metric = nn.Sequential(conv(6, width), nn.Conv2d(width, 2, 3, padding=1))
        self.blend = nn.Conv2d(6, 3, 3, padding=1)

    @staticmethod
    def splat(x: Tensor, flow: Tensor) -> Tensor:
        n, c, h, w = x.shape
        at = coordinates(n, h, w, x) + flow
        x0, y0 = at[:, 0].floor(), at[:, 1].floor()
        out = x.new_zeros(n, c, h * w)
        for dx in (0, 1):
            for dy in (0, 1):
                i, j = x0 + dx, y0 + dy
                weight = (1 - (at[:, 0] - i).abs()) * (1 - (at[:, 1] - j).abs())
                valid = (i >= 0) & (i < w) & (j >= 0) & (j < h)
                index = (j.clamp(0, h - 1) * w + i.clamp(0, w - 1)).long()
                value = x * (weight * valid).unsqueeze(1)
                out.scatter_add_(2, index.view(n, 1, -1).expand(-1, c, -1), value.flatten(2))
        return out.view(n, c, h, w)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat([first, second], 1)
        flows, metrics = self.flow(both).chunk(2, 1), self.metric(both).chunk(2, 1)
        made = []
        for image, flow, metric in zip((first, second), flows, metrics, strict=True):
            weight = metric.clamp(-5, 5).exp()
            pushed = self.splat(torch.cat([image * weight, weight], 1), 0.5 * flow)
            norm = pushed[:, -1:].clone()
            norm[norm == 0.0] = 1.0
            made.append(pushed[:, :-1] / norm)
        return self.blend(torch.cat(made, 1))
