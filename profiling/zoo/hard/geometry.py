"""Rotations, frames, spheres, hyperbolic balls, covariance matrices, and capsules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Capsules(nn.Module):
    """Sabour et al. 2017: capsules by dynamic routing, the reconstruction masked by the longest. Images (N, 1, 12, 12)."""

    def __init__(self, classes: int = 4, rounds: int = 3) -> None:
        super().__init__()
        self.rounds, self.conv = rounds, nn.Conv2d(1, 8, 5)
        self.primary = nn.ModuleList(nn.Conv2d(8, 4, 3, stride=2) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(1, 18, classes, 6, 4) / 3)
        self.decoder = nn.Sequential(nn.Linear(6 * classes, 16), nn.ReLU(), nn.Linear(16, 144), nn.Sigmoid())

    @staticmethod
    def squash(x: Tensor, dim: int = -1) -> Tensor:
        square = (x**2).sum(dim, keepdim=True)
        return square / (1 + square) * x / (square.sqrt() + 1e-8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.size(0)
        h = F.relu(self.conv(x))
        u = self.squash(torch.stack([p(h).view(n, 4, -1).transpose(1, 2) for p in self.primary], 1).view(n, -1, 4))
        votes = (self.weight @ u[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros(*votes.shape[:3], 1, dtype=x.dtype)
        for i in range(self.rounds):
            c = logits.softmax(dim=2)
            v = self.squash((c * votes).sum(1))
            if i + 1 < self.rounds:
                logits = logits + (votes.detach() * v.unsqueeze(1)).sum(-1, keepdim=True)
        lengths = v.norm(dim=-1)
        best = torch.eye(v.size(1)).to(x).index_select(0, lengths.max(1)[1].data)
        return lengths, self.decoder((v * best[:, :, None]).reshape(n, -1))


class QuaternionNet(nn.Module):
    """Parcollet et al. 2019: linear layers over quaternions by Hamilton products, with a split norm. (N, 8)."""

    def __init__(self, inputs: int = 2, hidden: int = 3, out: int = 1) -> None:
        super().__init__()
        self.first = nn.ParameterList(nn.Parameter(torch.randn(inputs, hidden) / 2) for _ in range(4))
        self.second = nn.ParameterList(nn.Parameter(torch.randn(hidden, out) / 2) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))

    @staticmethod
    def hamilton(r: Tensor, i: Tensor, j: Tensor, k: Tensor) -> Tensor:
        rows = ([r, -i, -j, -k], [i, r, -k, j], [j, k, r, -i], [k, -j, i, r])
        return torch.cat([torch.cat(row, dim=0) for row in rows], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.bias, x, self.hamilton(*self.first))
        q = h.view(len(x), 4, -1)
        q = q * torch.rsqrt((q**2).sum(1, keepdim=True).mean(-1, keepdim=True) + 1e-4)
        return torch.mm(F.hardtanh(q.flatten(1)), self.hamilton(*self.second))


class PointAttention(nn.Module):
    """AlphaFold 2's invariant point attention, frames moved by quaternions. (N, L, 6), frames (N, L, 3, 3), (N, L, 3)."""

    def __init__(self, dim: int = 6, heads: int = 2, points: int = 3) -> None:
        super().__init__()
        self.heads, self.points = heads, points
        self.qkv = nn.Linear(dim, 3 * heads * 4)
        self.qk_points, self.v_points = nn.Linear(dim, 6 * heads * points), nn.Linear(dim, 3 * heads * points)
        self.gamma = nn.Parameter(torch.full((heads,), math.log(math.e - 1)))
        self.out, self.update = nn.Linear(heads * (4 + 4 * points), dim), nn.Linear(dim, 6)

    def forward(self, s: Tensor, rotation: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, length, _ = s.shape
        q, k, v = self.qkv(s).view(n, length, self.heads, 12).chunk(3, -1)
        local = lambda t, c: t.view(n, length, self.heads, c, 3)  # noqa: E731
        to_world = lambda p: torch.einsum("nlij,nlhpj->nlhpi", rotation, p) + shift[:, :, None, None]  # noqa: E731
        qp, kp = to_world(local(self.qk_points(s), 2 * self.points)).split(self.points, dim=3)
        vp = to_world(local(self.v_points(s), self.points))
        spread = ((qp[:, :, None] - kp[:, None]) ** 2).sum((-1, -2))
        weight = F.softplus(self.gamma) * math.sqrt(2 / (9 * self.points)) / 2
        score = torch.einsum("nihc,njhc->nijh", q, k) / 2 - weight * spread
        a = torch.softmax(score * math.sqrt(0.5), dim=2)
        plain = torch.einsum("nijh,njhc->nihc", a, v).flatten(2)
        world = torch.einsum("nijh,njhpc->nihpc", a, vp)
        back = torch.einsum("nlji,nlhpj->nlhpi", rotation, world - shift[:, :, None, None])
        size = torch.sqrt((back**2).sum(-1) + 1e-8)
        s = s + self.out(torch.cat([plain, back.flatten(2), size.flatten(2)], -1))
        bcd, t = self.update(s).split(3, -1)
        quaternion = F.normalize(F.pad(bcd, (1, 0), value=1.0), dim=-1)
        w, x, y, z = torch.unbind(quaternion, -1)
        rows = [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
        turn = torch.stack([torch.stack(row, -1) for row in rows], -2)
        return s, rotation @ turn, shift + (rotation @ t.unsqueeze(-1)).squeeze(-1)


class RotationHead(nn.Module):
    """Zhou et al. 2019 and Levinson et al. 2020: rotations from 6 numbers by Gram-Schmidt and from 9 by SVD. (N, 8)."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.six, self.nine = nn.Linear(dim, 6), nn.Linear(dim, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a1, a2 = self.six(x).chunk(2, -1)
        b1 = F.normalize(a1, dim=-1)
        b2 = F.normalize(a2 - (b1 * a2).sum(-1, keepdim=True) * b1, dim=-1)
        first = torch.stack([b1, b2, torch.cross(b1, b2, dim=-1)], -2)
        u, _, vt = torch.linalg.svd(self.nine(x).view(-1, 3, 3))
        det = torch.det(u @ vt)
        second = torch.cat([u[..., :2], u[..., 2:] * det[:, None, None]], -1) @ vt
        trace = torch.einsum("nij,nij->n", first, second)
        return first, second, torch.acos(((trace - 1) / 2).clamp(-0.999, 0.999))


class WeightedKabsch(nn.Module):
    """Deep closest point (Wang and Solomon 2019): soft matches, then the rigid transform by SVD. (N, P, 3), (N, Q, 3)."""

    def __init__(self, dim: int = 3, features: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, features))
        self.register_buffer("reflect", torch.diag(torch.tensor([1.0, 1.0, -1.0])))

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        score = torch.softmax(self.net(source) @ self.net(target).mT / 8**0.5, -1)
        matched = score @ target
        a = source - source.mean(1, keepdim=True)
        b = matched - matched.mean(1, keepdim=True)
        u, _, v = torch.svd(a.transpose(1, 2) @ b)
        r = v @ u.transpose(1, 2)
        flipped = v @ self.reflect @ u.transpose(1, 2)
        r = torch.where((torch.det(r) < 0)[:, None, None], flipped, r)
        return r, matched.mean(1) - (r @ source.mean(1).unsqueeze(-1)).squeeze(-1)


class TensorField(nn.Module):
    """Thomas et al. 2018: a layer of scalars and vectors, mixed by spherical harmonics up to degree 2. (N, P, 3)."""

    def __init__(self, channels: int = 4, radial: int = 6) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, 3, radial))
        self.radial = nn.Sequential(nn.Linear(radial, 8), nn.SiLU(), nn.Linear(8, 3 * channels))
        self.mix = nn.Linear(channels, channels, bias=False)

    @staticmethod
    def harmonics(v: Tensor) -> tuple[Tensor, Tensor]:
        x, y, z = v[..., 0], v[..., 1], v[..., 2]
        second = [x * y, y * z, (3 * z.pow(2) - 1) / (2 * 3**0.5), x * z, (x.pow(2) - y.pow(2)) / 2]
        return math.sqrt(3) * v, math.sqrt(15) * torch.stack(second, -1)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p = points.size(1)
        delta = points.unsqueeze(2) - points.unsqueeze(1)
        distance = torch.linalg.norm(delta + torch.eye(p)[..., None].to(points), dim=-1)
        y1, y2 = self.harmonics(delta / distance[..., None])
        shell = torch.exp(-4 * (distance.unsqueeze(-1) - self.centres) ** 2)
        r0, r1, r2 = self.radial(shell).tensor_split(3, dim=-1)
        off = (1 - torch.eye(p, dtype=points.dtype))[None, :, :, None]
        scalars = (r0 * off).sum(2)
        vectors = torch.einsum("npqc,npqk->npck", r1 * off, y1)
        quads = torch.einsum("npqc,npqk->npck", r2 * off, y2)
        turned = torch.cross(vectors, vectors.roll(1, dims=2), dim=-1)
        gate = torch.sigmoid(self.mix(scalars)).unsqueeze(-1)
        return self.mix(scalars), gate * (vectors + turned), (quads * quads).sum(-1)


class PoincareBall(nn.Module):
    """Ganea et al. 2018: a hyperbolic layer, distances to hyperplanes as logits; Moebius additions and maps. (N, 5)."""

    def __init__(self, dim: int = 5, out: int = 4, classes: int = 3, curvature: float = 0.7) -> None:
        super().__init__()
        self.c = curvature
        self.weight, self.bias = nn.Parameter(torch.randn(out, dim) / 2), nn.Parameter(torch.randn(out) / 8)
        self.p, self.a = nn.Parameter(torch.randn(classes, out) / 4), nn.Parameter(torch.randn(classes, out))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        xy, x2, y2 = (x * y).sum(-1, keepdim=True), x.pow(2).sum(-1, keepdim=True), y.pow(2).sum(-1, keepdim=True)
        top = (1 + 2 * self.c * xy + self.c * y2) * x + (1 - self.c * x2) * y
        return top / (1 + 2 * self.c * xy + self.c**2 * x2 * y2).clamp_min(1e-15)

    def exp0(self, u: Tensor) -> Tensor:
        size = u.norm(dim=-1, p=2, keepdim=True).clamp_min(1e-10) * self.c**0.5
        return torch.tanh(size) * u / size

    def project(self, x: Tensor) -> Tensor:
        norm = torch.clamp_min(x.norm(dim=-1, keepdim=True, p=2), 1e-15)
        most = (1 - 4e-3) / self.c**0.5
        return torch.where(norm > most, x / norm * most, x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(self.exp0(x))
        norm, mx = x.norm(dim=-1, keepdim=True).clamp_min(1e-15), x @ self.weight.t()
        mx_norm = mx.norm(dim=-1, keepdim=True).clamp_min(1e-15)
        inside = (self.c**0.5 * norm).clamp(max=1 - 1e-5)
        y = torch.tanh(mx_norm / norm * torch.atanh(inside)) * mx / (mx_norm * self.c**0.5)
        y = self.project(self.add(self.project(y), self.exp0(self.bias)))
        shifted = self.add(-self.project(self.p).unsqueeze(0), y.unsqueeze(1))
        size = self.a.norm(dim=-1)
        lam = 2 / (1 - self.c * self.p.pow(2).sum(-1))
        top = 2 * self.c**0.5 * (shifted * self.a).sum(-1)
        return lam * size / self.c**0.5 * torch.asinh(top / ((1 - self.c * shifted.pow(2).sum(-1)) * size))


class CovariancePooling(nn.Module):
    """SPDNet (Huang and Van Gool 2017): bilinear maps of covariances, eigenvalues rectified, the matrix logarithm. (N, C, L)."""

    def __init__(self, channels: int = 6, out: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, channels, 3, padding=1)
        self.w = nn.Parameter(torch.linalg.qr(torch.randn(channels, out))[0])
        self.head = nn.Linear(out * (out + 1) // 2, classes)
        self.register_buffer("upper", torch.triu_indices(out, out))

    def forward(self, x: Tensor) -> Tensor:
        f = self.conv(x)
        c = torch.stack([torch.cov(row) for row in f])
        s = self.w.T @ c @ self.w
        values, vectors = torch.linalg.eigh(s)
        values = torch.maximum(values, values.new_tensor(1e-2))
        log = (vectors * values.log().unsqueeze(-2)) @ vectors.mT
        return self.head(log[:, self.upper[0], self.upper[1]])


class ThinPlateSpline(nn.Module):
    """ASTER's rectifier (Shi et al. 2018): control points are predicted, the spline's system solved, the image resampled.
    Images (N, 1, 16, 24)."""

    def __init__(self, points: int = 6, size: tuple[int, int] = (8, 16)) -> None:
        super().__init__()
        self.points, self.size = points, size
        self.localise = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(16, 2 * points)
        x = torch.linspace(-1, 1, points // 2)
        ones = torch.ones_like(x)
        target = torch.cat([torch.stack([x, -ones], 1), torch.stack([x, ones], 1)])
        self.register_buffer("target", target)
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, size[0]), torch.linspace(-1, 1, size[1]), indexing="ij")
        self.register_buffer("grid", torch.stack([xs, ys], -1).view(-1, 2))

    @staticmethod
    def radial(a: Tensor, b: Tensor) -> Tensor:
        square = torch.cdist(a, b) ** 2
        return torch.xlogy(square, square + 1e-9) / 2

    def forward(self, image: Tensor) -> Tensor:
        source = self.target + 0.2 * torch.tanh(self.fc(self.localise(image)).view(-1, self.points, 2))
        k = self.points
        p = torch.cat([torch.ones(k, 1).to(image), self.target], 1)
        top = torch.hstack([self.radial(self.target, self.target), p])
        system = torch.vstack([top, torch.hstack([p.T, p.new_zeros(3, 3)])])
        right = torch.cat([source, source.new_zeros(source.size(0), 3, 2)], 1)
        weights = torch.linalg.solve(system, right)
        basis = torch.column_stack(
            [self.radial(self.grid, self.target), torch.ones(len(self.grid)).to(image), self.grid]
        )
        where = (basis @ weights).view(-1, *self.size, 2)
        return F.grid_sample(image, where, padding_mode="border", align_corners=True)


class LaplacianCodes(nn.Module):
    """Dwivedi et al. 2020: eigenvectors of the normalised Laplacian, their signs made free by a network (SignNet); attention over
    nodes. x (N, 5), adjacency (N, N) weights."""

    def __init__(self, dim: int = 5, vectors: int = 3, hidden: int = 8) -> None:
        super().__init__()
        self.vectors, self.embed = vectors, nn.Linear(dim, hidden)
        self.phi = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.rho = nn.Linear(2 * vectors, hidden)
        self.attention = nn.MultiheadAttention(hidden, 2, batch_first=True)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        a = torch.sigmoid(weights + weights.T).fill_diagonal_(0)
        degree = a.sum(1)
        root = torch.diag(degree.pow(-0.5))
        laplacian = torch.eye(len(a)).to(x) - root @ a @ root
        _, vectors = torch.linalg.eigh(laplacian)
        u = vectors[:, 1 : self.vectors + 1].unsqueeze(-1)
        code = self.rho((self.phi(u) + self.phi(-u)).flatten(1))
        h = (self.embed(x) + code).unsqueeze(0)
        return (h + self.attention(h, h, h)[0]).squeeze(0)
