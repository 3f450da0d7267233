"""Images and volumes read at points that networks choose: grid_sample in its modes, warps, correlation, upsampling by windows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(a: int, b: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.LeakyReLU(0.1, inplace=True))


def coordinates(n: int, h: int, w: int, like: Tensor) -> Tensor:
    """Pixels' x and y: (N, 2, H, W)."""
    y, x = torch.meshgrid(torch.arange(h, device=like.device), torch.arange(w, device=like.device), indexing="ij")
    return torch.stack([x, y], dim=0).to(like.dtype)[None].repeat(n, 1, 1, 1)


class SpatialTransformer(nn.Module):
    """Jaderberg et al. 2015: an affine transform is predicted, the image resampled and classified. (N, 1, 20, 20)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.localization = nn.Sequential(
            nn.Conv2d(1, 4, 5), nn.MaxPool2d(2, 2), nn.ReLU(True), nn.Conv2d(4, 6, 3), nn.MaxPool2d(2, 2), nn.ReLU(True)
        )
        self.fc_loc = nn.Sequential(nn.Linear(6 * 3 * 3, 16), nn.ReLU(True), nn.Linear(16, 3 * 2))
        self.fc_loc[2].weight.data.zero_()
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.conv1, self.conv2, self.drop = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 8, 3), nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(72, 24), nn.Linear(24, classes)

    def stn(self, x: Tensor) -> Tensor:
        xs = self.localization(x)
        theta = self.fc_loc(xs.view(-1, 6 * 3 * 3)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stn(x)
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 72)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


class DeformableConv(nn.Module):
    """Modulated deformable convolution (Zhu et al. 2019) in plain torch: taps at predicted offsets by grid_sample."""

    def __init__(self, channels: int = 4, out: int = 6, kernel: int = 3) -> None:
        super().__init__()
        self.kernel = kernel
        self.stem = conv(3, channels)
        self.offset = nn.Conv2d(channels, 2 * kernel * kernel, 3, padding=1)
        self.modulate = nn.Conv2d(channels, kernel * kernel, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(out, channels, kernel, kernel) / 6)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        k, r = self.kernel, self.kernel // 2
        offset, mask = self.offset(x).view(n, k * k, 2, h, w), torch.sigmoid(self.modulate(x))
        ky, kx = torch.meshgrid(torch.arange(-r, r + 1), torch.arange(-r, r + 1), indexing="ij")
        taps = torch.stack([kx.flatten(), ky.flatten()], -1).view(1, k * k, 2, 1, 1).type_as(x)
        at = coordinates(1, h, w, x).unsqueeze(1) + taps + offset
        at[:, :, 0] = 2.0 * at[:, :, 0] / max(w - 1, 1) - 1.0
        at[:, :, 1] = 2.0 * at[:, :, 1] / max(h - 1, 1) - 1.0
        grid = at.permute(0, 1, 3, 4, 2).reshape(n, k * k * h, w, 2)
        columns = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
        columns = columns.view(n, c, k * k, h, w) * mask.unsqueeze(1)
        return torch.einsum("nckhw,ock->nohw", columns, self.weight.flatten(2)) + self.bias.view(1, -1, 1, 1)


class RAFT(nn.Module):
    """Teed and Deng 2020: all-pairs correlation, a pyramid looked up around the flow, GRU updates, convex upsampling."""

    def __init__(self, dim: int = 12, hidden: int = 12, levels: int = 2, radius: int = 1, steps: int = 2) -> None:
        super().__init__()
        self.levels, self.radius, self.steps, self.hidden = levels, radius, steps, hidden
        self.fnet = nn.Sequential(
            nn.Conv2d(3, dim, 7, 2, 3), nn.InstanceNorm2d(dim), nn.ReLU(), nn.Conv2d(dim, dim, 3, 2, 1)
        )
        self.cnet = nn.Sequential(nn.Conv2d(3, dim, 7, 2, 3), nn.ReLU(), nn.Conv2d(dim, 2 * hidden, 3, 2, 1))
        planes = levels * (2 * radius + 1) ** 2
        self.corr, self.flow = nn.Conv2d(planes, 10, 1), nn.Conv2d(2, 6, 7, padding=3)
        self.gates = nn.ModuleList(nn.Conv2d(2 * hidden + 18, hidden, 3, padding=1) for _ in range(3))
        self.head, self.mask = nn.Conv2d(hidden, 2, 3, padding=1), nn.Conv2d(hidden, 9 * 16, 1)

    @staticmethod
    def sample(image: Tensor, at: Tensor) -> Tensor:
        h, w = image.shape[-2:]
        x, y = at.split([1, 1], dim=-1)
        grid = torch.cat([2 * x / (w - 1) - 1, 2 * y / (h - 1) - 1], dim=-1)
        return F.grid_sample(image, grid, align_corners=True)

    def lookup(self, pyramid: list[Tensor], at: Tensor) -> Tensor:
        r = self.radius
        at = at.permute(0, 2, 3, 1)
        n, h, w, _ = at.shape
        out = []
        for i, volume in enumerate(pyramid):
            dx = torch.linspace(-r, r, 2 * r + 1, device=at.device)
            dy = torch.linspace(-r, r, 2 * r + 1, device=at.device)
            delta = torch.stack(torch.meshgrid(dy, dx, indexing="ij"), axis=-1).view(1, 2 * r + 1, 2 * r + 1, 2)
            near = at.reshape(n * h * w, 1, 1, 2) / 2**i + delta
            out.append(self.sample(volume, near).view(n, h, w, -1))
        return torch.cat(out, dim=-1).permute(0, 3, 1, 2).contiguous()

    def upsample(self, flow: Tensor, mask: Tensor) -> Tensor:
        n, _, h, w = flow.shape
        mask = torch.softmax(mask.view(n, 1, 9, 4, 4, h, w), dim=2)
        up = F.unfold(4 * flow, [3, 3], padding=1).view(n, 2, 9, 1, 1, h, w)
        return torch.sum(mask * up, dim=2).permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 4 * h, 4 * w)

    def forward(self, image1: Tensor, image2: Tensor) -> Tensor:
        f1, f2 = self.fnet(torch.cat([image1, image2], dim=0)).split([image1.size(0), image2.size(0)], dim=0)
        n, c, h, w = f1.shape
        volume = torch.matmul(f1.view(n, c, h * w).transpose(1, 2), f2.view(n, c, h * w)) / math.sqrt(c)
        pyramid = [volume.reshape(n * h * w, 1, h, w)]
        for _ in range(self.levels - 1):
            pyramid.append(F.avg_pool2d(pyramid[-1], 2, stride=2))
        net, context = torch.split(self.cnet(image1), [self.hidden, self.hidden], dim=1)
        net, context = torch.tanh(net), torch.relu(context)
        start, now = coordinates(n, h, w, f1), coordinates(n, h, w, f1)
        for _ in range(self.steps):
            now = now.detach()
            flow = now - start
            motion = torch.cat([F.relu(self.corr(self.lookup(pyramid, now))), F.relu(self.flow(flow)), flow], dim=1)
            inward = torch.cat([context, motion], dim=1)
            z, r = (torch.sigmoid(g(torch.cat([net, inward], dim=1))) for g in self.gates[:2])
            q = torch.tanh(self.gates[2](torch.cat([r * net, inward], dim=1)))
            net = (1 - z) * net + z * q
            now = now + self.head(net)
            up = self.upsample(now - start, 0.25 * self.mask(net))
        return up


class PWCNet(nn.Module):
    """Sun et al. 2018: a feature pyramid, warping by the coarser flow with a mask of what is seen, a local cost volume."""

    def __init__(self, reach: int = 2) -> None:
        super().__init__()
        self.reach = reach
        self.pyramid = nn.ModuleList([conv(3, 6, 2), conv(6, 8, 2)])
        cost = (2 * reach + 1) ** 2
        self.coarse = nn.Sequential(conv(cost + 8, 12), nn.Conv2d(12, 2, 3, padding=1))
        self.fine = nn.Sequential(conv(cost + 6 + 2, 12), nn.Conv2d(12, 2, 3, padding=1))
        self.up = nn.ConvTranspose2d(2, 2, kernel_size=4, stride=2, padding=1)

    @staticmethod
    def warp(x: Tensor, flow: Tensor) -> Tensor:
        n, _, h, w = x.size()
        at = coordinates(n, h, w, x) + flow
        at[:, 0, :, :] = 2.0 * at[:, 0, :, :].clone() / max(w - 1, 1) - 1.0
        at[:, 1, :, :] = 2.0 * at[:, 1, :, :].clone() / max(h - 1, 1) - 1.0
        at = at.permute(0, 2, 3, 1)
        out = F.grid_sample(x, at, align_corners=True)
        mask = F.grid_sample(torch.ones(x.size(), dtype=x.dtype), at, align_corners=True)
        mask[mask < 0.9999] = 0
        mask[mask > 0] = 1
        return out * mask

    def cost(self, a: Tensor, b: Tensor) -> Tensor:
        d = self.reach
        h, w = a.shape[2:]
        b = F.pad(b, (d, d, d, d))
        rows = [
            torch.mean(a * b[:, :, i : i + h, j : j + w], 1, keepdim=True)
            for i in range(2 * d + 1)
            for j in range(2 * d + 1)
        ]
        return F.leaky_relu(torch.cat(rows, 1), 0.1)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        a1, b1 = self.pyramid[0](first), self.pyramid[0](second)
        a2, b2 = self.pyramid[1](a1), self.pyramid[1](b1)
        flow2 = self.coarse(torch.cat([self.cost(a2, b2), a2], 1))
        up = self.up(flow2)
        flow1 = up + self.fine(torch.cat([self.cost(a1, self.warp(b1, up * 2.0)), a1, up], 1))
        return flow1, flow2


class TriPlaneNeRF(nn.Module):
    """EG3D's renderer (Chan et al. 2022): points along rays read three planes, an MLP with a Fourier code of directions, alpha
    compositing. origins, directions: (N, R, 3)."""

    def __init__(self, channels: int = 6, size: int = 8, samples: int = 5, octaves: int = 2) -> None:
        super().__init__()
        self.samples, self.octaves = samples, octaves
        self.planes = nn.Parameter(torch.randn(3, channels, size, size) / 2)
        axes = [[[1, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 0, 1]], [[0, 0, 1], [0, 1, 0]]]
        self.register_buffer("axes", torch.tensor(axes, dtype=torch.float32))
        self.net = nn.Sequential(nn.Linear(channels + 3 * (1 + 2 * octaves), 16), nn.Softplus(), nn.Linear(16, 4))

    def encode(self, x: Tensor) -> Tensor:
        out = [x]
        for i in range(self.octaves):
            for f in (torch.sin, torch.cos):
                out.append(f(2.0**i * math.pi * x))
        return torch.cat(out, -1)

    def forward(self, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        n, rays, _ = origins.shape
        unit = directions / torch.linalg.norm(directions, dim=-1, keepdim=True)
        depth = torch.linspace(0.1, 1.5, self.samples, dtype=origins.dtype).expand(n, rays, self.samples)
        points = (origins[..., None, :] + unit[..., None, :] * depth[..., :, None]).reshape(n, -1, 3)
        flat = torch.einsum("nmk,pdk->pnmd", points, self.axes)
        read = F.grid_sample(self.planes, flat.flatten(1, 2).unsqueeze(1), padding_mode="border", align_corners=False)
        features = read.squeeze(2).permute(0, 2, 1).mean(0).view(n, rays, self.samples, -1)
        view = self.encode(unit)[..., None, :].expand(-1, -1, self.samples, -1)
        raw = self.net(torch.cat([features, view], -1))
        rgb, sigma = torch.sigmoid(raw[..., :3]), F.softplus(raw[..., 3] - 1)
        step = depth[..., 1:] - depth[..., :-1]
        step = torch.cat([step, torch.full_like(step[..., :1], 1e10)], -1)
        alpha = 1.0 - torch.exp(-sigma * step)
        seen = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1.0 - alpha + 1e-10], -1), -1)[..., :-1]
        weight = alpha * seen
        return torch.sum(weight[..., None] * rgb, -2), torch.sum(weight * depth, -1)


class DeformableAttention(nn.Module):
    """A Deformable DETR encoder layer (Zhu et al. 2021): every pixel of two levels attends to a few sampled points."""

    def __init__(self, dim: int = 16, heads: int = 2, points: int = 3, levels: int = 2) -> None:
        super().__init__()
        self.heads, self.points, self.levels = heads, points, levels
        self.inputs = nn.ModuleList([nn.Conv2d(3, dim, 3, 2, 1), nn.Conv2d(dim, dim, 3, 2, 1)])
        self.level = nn.Parameter(torch.randn(levels, dim))
        self.offsets = nn.Linear(dim, heads * levels * points * 2)
        self.weights = nn.Linear(dim, heads * levels * points)
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.linear1, self.linear2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        angle = torch.arange(heads, dtype=torch.float32) * (2.0 * math.pi / heads)
        grid = torch.stack([angle.cos(), angle.sin()], -1)
        grid = (grid / grid.abs().max(-1, keepdim=True)[0]).view(heads, 1, 1, 2).repeat(1, levels, points, 1)
        for i in range(points):
            grid[:, :, i, :] *= i + 1
        with torch.no_grad():
            self.offsets.bias = nn.Parameter(grid.view(-1))

    @staticmethod
    def references(shapes: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        made = []
        for h, w in shapes:
            y, x = torch.meshgrid(
                torch.linspace(0.5, h - 0.5, h, dtype=dtype),
                torch.linspace(0.5, w - 0.5, w, dtype=dtype),
                indexing="ij",
            )
            made.append(torch.stack((x.reshape(-1)[None] / w, y.reshape(-1)[None] / h), -1))
        return torch.cat(made, 1)[:, :, None]

    def attend(self, query: Tensor, source: Tensor, reference: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
        n, s, c = source.shape
        t, m, k, p = query.size(1), self.heads, self.levels, self.points
        value = self.value(source).view(n, s, m, c // m)
        offset = self.offsets(query).view(n, t, m, k, p, 2)
        weight = F.softmax(self.weights(query).view(n, t, m, k * p), -1).view(n, t, m, k, p)
        scale = torch.tensor([[w, h] for h, w in shapes], dtype=query.dtype)
        location = reference[:, :, None, :, None, :] + offset / scale[None, None, None, :, None, :]
        values = value.split([h * w for h, w in shapes], dim=1)
        grids, sampled = 2 * location - 1, []
        for i, (h, w) in enumerate(shapes):
            image = values[i].flatten(2).transpose(1, 2).reshape(n * m, c // m, h, w)
            grid = grids[:, :, :, i].transpose(1, 2).flatten(0, 1)
            sampled.append(F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False))
        weight = weight.transpose(1, 2).reshape(n * m, 1, t, k * p)
        out = (torch.stack(sampled, dim=-2).flatten(-2) * weight).sum(-1).view(n, c, t)
        return self.out(out.transpose(1, 2).contiguous())

    def forward(self, image: Tensor) -> Tensor:
        maps, shapes, flat = image, [], []
        for i, layer in enumerate(self.inputs):
            maps = F.relu(layer(maps))
            shapes.append((maps.shape[2], maps.shape[3]))
            flat.append(maps.flatten(2).transpose(1, 2) + self.level[i].view(1, 1, -1))
        source = torch.cat(flat, 1)
        reference = self.references(shapes, image.dtype).repeat(image.size(0), 1, self.levels, 1)
        source = self.norm1(source + self.attend(source, source, reference, shapes))
        return self.norm2(source + self.linear2(F.relu(self.linear1(source))))


class VoxelMorph(nn.Module):
    """Balakrishnan et al. 2019: 3-D registration, a velocity field by a small U-Net, integrated by scaling and squaring, a warp
    of the moving volume by 5-D grid_sample."""

    def __init__(self, channels: int = 4, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.down1, self.down2 = nn.Conv3d(2, channels, 3, 2, 1), nn.Conv3d(channels, channels, 3, 2, 1)
        self.up1 = nn.Conv3d(channels, channels, 3, 1, 1)
        self.up2 = nn.Conv3d(2 * channels, channels, 3, 1, 1)
        self.flow = nn.Conv3d(channels + 2, 3, 3, padding=1)

    @staticmethod
    def transform(source: Tensor, flow: Tensor, mode: str = "bilinear") -> Tensor:
        size = flow.shape[2:]
        vectors = [torch.arange(0, s) for s in size]
        grid = torch.stack(torch.meshgrid(vectors, indexing="ij")).unsqueeze(0).type(flow.dtype)
        at = grid + flow
        for i in range(len(size)):
            at[:, i, ...] = 2 * (at[:, i, ...] / (size[i] - 1) - 0.5)
        at = at.permute(0, 2, 3, 4, 1)[..., [2, 1, 0]]
        return F.grid_sample(source, at, align_corners=True, mode=mode)

    def forward(self, moving: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([moving, fixed], 1)
        a = F.leaky_relu(self.down1(x), 0.2)
        b = F.leaky_relu(self.up1(F.leaky_relu(self.down2(a), 0.2)), 0.2)
        b = torch.cat([F.interpolate(b, size=a.shape[2:], mode="nearest"), a], 1)
        c = F.interpolate(F.leaky_relu(self.up2(b), 0.2), scale_factor=2, mode="trilinear", align_corners=True)
        flow = self.flow(torch.cat([c, x], 1)) * (1.0 / 2**self.steps)
        for _ in range(self.steps):
            flow = flow + self.transform(flow, flow)
        return self.transform(moving, flow), flow
