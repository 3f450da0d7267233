"""Gaussians and what is estimated in closed form: processes, filters, mixtures, whitening, discriminants, correlations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeepKernelProcess(nn.Module):
    """Wilson et al. 2016: exact Gaussian process regression on learned features; mean, variance and marginal likelihood of a
    task. Support x (N, S, 3) with y (N, S), queries (N, Q, 3)."""

    def __init__(self, inputs: int = 3, features: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, features))
        self.log_length, self.log_noise = nn.Parameter(torch.zeros(features)), nn.Parameter(torch.tensor(-1.0))

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        scale = self.log_length.exp()
        return torch.exp(-0.5 * torch.cdist(a / scale, b / scale).square())

    def forward(self, x: Tensor, y: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.net(x), self.net(queries)
        noise = F.softplus(self.log_noise) + 1e-2
        k = self.kernel(a, a) + noise * torch.eye(x.size(1), dtype=x.dtype, device=x.device)
        root = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y.unsqueeze(-1), root)
        cross = self.kernel(a, b)
        mean = (cross.transpose(-1, -2) @ alpha).squeeze(-1)
        v = torch.linalg.solve_triangular(root, cross, upper=False)
        variance = 1 + noise - v.square().sum(-2)
        fit = -0.5 * (y * alpha.squeeze(-1)).sum(-1)
        likelihood = fit - root.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * x.size(1) * math.log(2 * math.pi)
        return mean, variance, likelihood


class InducingPoints(nn.Module):
    """Hensman et al. 2015: a variational process with inducing points; predictions and the divergence from the prior. (N, 2)."""

    def __init__(self, inputs: int = 2, points: int = 6) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(points, inputs))
        self.mean = nn.Parameter(torch.randn(points))
        self.raw = nn.Parameter(torch.randn(points, points) / 3)

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        r = torch.sqrt(((a[:, None] - b[None]) ** 2).sum(-1) + 1e-12) * math.sqrt(5)
        return (1 + r + r**2 / 3) * torch.exp(-r)  # Matern 5/2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self.points.size(0)
        root = torch.linalg.cholesky(self.kernel(self.points, self.points) + 1e-3 * torch.eye(m).to(x))
        spread = torch.tril(self.raw, -1) + torch.diag(F.softplus(torch.diagonal(self.raw)))
        a = torch.linalg.solve_triangular(root, self.kernel(self.points, x), upper=False)
        mean = a.T @ self.mean
        variance = 1 - (a**2).sum(0) + ((spread.T @ a) ** 2).sum(0)
        divergence = 0.5 * ((spread**2).sum() + self.mean @ self.mean - m) - torch.diag(spread).log().sum()
        return mean, variance, divergence


class KalmanFilter(nn.Module):
    """Becker et al. 2019 in its plain form: predicts and updates a latent Gaussian with encoded observations. (N, L, 3)."""

    def __init__(self, observed: int = 3, latent: int = 4) -> None:
        super().__init__()
        self.encode = nn.Linear(observed, 2)
        self.transition = nn.Parameter(torch.eye(latent) + 0.1 * torch.randn(latent, latent))
        self.emission = nn.Parameter(torch.randn(2, latent))
        self.log_process, self.log_noise = nn.Parameter(torch.zeros(latent)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, length, _ = x.shape
        z = self.encode(x)
        size = self.transition.size(0)
        mean = x.new_zeros(n, size)
        cov = torch.eye(size, dtype=x.dtype).expand(n, size, size)
        q, r = torch.diag(self.log_process.exp()), torch.diag(self.log_noise.exp())
        means = []
        for t in range(length):
            mean = mean @ self.transition.T
            cov = self.transition @ cov @ self.transition.T + q
            s = self.emission @ cov @ self.emission.T + r
            gain = torch.linalg.solve(s, self.emission @ cov).mT
            mean = mean + torch.einsum("nij,nj->ni", gain, z[:, t] - mean @ self.emission.T)
            cov = (torch.eye(size).to(x) - gain @ self.emission) @ cov
            means.append(mean)
        return torch.stack(means, 1), cov


class MixtureDensity(nn.Module):
    """Bishop 1994 with full covariances: the likelihood of targets under a predicted mixture. x (N, 5), y (N, 3)."""

    def __init__(self, inputs: int = 5, out: int = 3, parts: int = 4) -> None:
        super().__init__()
        self.out, self.parts = out, parts
        self.body = nn.Sequential(nn.Linear(inputs, 16), nn.ELU())
        self.weights, self.means = nn.Linear(16, parts), nn.Linear(16, parts * out)
        self.roots = nn.Linear(16, parts * out * (out + 1) // 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        means = self.means(h).view(-1, self.parts, self.out)
        root = torch.zeros(x.size(0), self.parts, self.out, self.out, dtype=x.dtype)
        rows, columns = torch.tril_indices(self.out, self.out)
        root[..., rows, columns] = self.roots(h).view(x.size(0), self.parts, -1)
        diagonal = torch.diagonal(root, dim1=-2, dim2=-1)
        root = root - torch.diag_embed(diagonal) + torch.diag_embed(F.softplus(diagonal) + 0.1)
        mixture = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=self.weights(h)),
            torch.distributions.MultivariateNormal(means, scale_tril=root, validate_args=False),
            validate_args=False,
        )
        return mixture.log_prob(y), mixture.mean


class DecorrelatedNorm(nn.Module):
    """Huang et al. 2018: ZCA whitening of groups of channels by the eigenvectors of their covariance. Images, 8 channels."""

    def __init__(self, channels: int = 8, groups: int = 2) -> None:
        super().__init__()
        self.groups = groups
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.scale, self.shift = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        n, c, h, w = x.shape
        y = x.permute(1, 0, 2, 3).reshape(self.groups, c // self.groups, -1)
        y = y - y.mean(-1, keepdim=True)
        sigma = y @ y.transpose(1, 2) / y.size(-1) + 1e-2 * torch.eye(c // self.groups, dtype=x.dtype)
        values, vectors = torch.linalg.eigh(sigma)
        white = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.transpose(1, 2) @ y
        white = white.view(c, n, h, w).transpose(0, 1)
        return white * self.scale.view(1, -1, 1, 1) + self.shift.view(1, -1, 1, 1)


class IterNorm(nn.Module):
    """Huang et al. 2019: whitening by Newton's iteration for the inverse root of the covariance. (N, 6)."""

    def __init__(self, dim: int = 6, steps: int = 5) -> None:
        super().__init__()
        self.steps, self.linear = steps, nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        mean = x.mean(0, keepdim=True)
        xc = x - mean
        sigma = torch.addmm(torch.eye(x.size(1), dtype=x.dtype), xc.t(), xc, beta=0.1, alpha=1 / x.size(0))
        trace = torch.trace(sigma)
        p, sigma_n = torch.eye(x.size(1), dtype=x.dtype), sigma / trace
        for _ in range(self.steps):
            p = torch.baddbmm(p[None], torch.matrix_power(p, 3)[None], sigma_n[None], beta=1.5, alpha=-0.5)[0]
        return xc @ (p / trace.sqrt())


class PatchDistribution(nn.Module):
    """PaDiM (Defard et al. 2021): a Gaussian of normal features at every place, anomalies by Mahalanobis distance. Images."""

    def __init__(self, channels: int = 4, size: int = 4) -> None:
        super().__init__()
        self.size, self.features = size, nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU())
        self.register_buffer("means", torch.randn(size * size, channels) / 3)
        half = torch.randn(size * size, channels, channels) / 3
        self.register_buffer("covariances", half @ half.mT + 0.1 * torch.eye(channels))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = F.adaptive_avg_pool2d(self.features(x), self.size).flatten(2).permute(2, 0, 1)
        delta = f - self.means[:, None]
        inverse = torch.linalg.inv(self.covariances)
        distance = torch.einsum("pnc,pcd,pnd->np", delta, inverse, delta).clamp(min=1e-9).sqrt()
        scores = distance.view(-1, 1, self.size, self.size)
        maps = F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return maps.squeeze(1), torch.amax(maps, dim=(1, 2, 3))


class DiscriminantHead(nn.Module):
    """A quadratic discriminant from a support set: class means and shrunk covariances, log densities of queries. Support
    (S, 4) with labels (S,), queries (Q, 4)."""

    def __init__(self, dim: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.classes, self.net = classes, nn.Linear(dim, dim)
        self.shrink = nn.Parameter(torch.tensor(0.0))

    def forward(self, support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        s, q = self.net(support), self.net(queries)
        member = F.one_hot(labels, self.classes).to(s.dtype)
        count = member.sum(0)
        means = member.T @ s / count.clamp(min=1)[:, None]
        centred = s.unsqueeze(0) - means.unsqueeze(1)
        cov = torch.einsum("sk,ksi,ksj->kij", member, centred, centred) / count.clamp(min=1).view(-1, 1, 1)
        mix = torch.sigmoid(self.shrink)
        cov = (1 - mix) * cov + mix * torch.eye(s.size(1), dtype=s.dtype)
        delta = q.unsqueeze(1) - means
        solved = torch.linalg.solve(cov, delta.permute(1, 2, 0)).permute(2, 0, 1)
        return -0.5 * (delta * solved).sum(-1) - 0.5 * torch.logdet(cov)


class DeepCorrelation(nn.Module):
    """Deep CCA (Andrew et al. 2013): the total correlation of two views by inverse roots and singular values. (N, 4), (N, 5)."""

    def __init__(self, first: int = 4, second: int = 5, dim: int = 3, ridge: float = 1e-1) -> None:
        super().__init__()
        self.ridge = ridge
        self.a = nn.Sequential(nn.Linear(first, 8), nn.Tanh(), nn.Linear(8, dim))
        self.b = nn.Sequential(nn.Linear(second, 8), nn.Tanh(), nn.Linear(8, dim))

    def inverse_root(self, x: Tensor) -> Tensor:
        cov = x.t() @ x / (x.size(0) - 1) + self.ridge * torch.eye(x.size(1)).to(x)
        values, vectors = torch.linalg.eigh(cov)
        return vectors @ torch.diag(values**-0.5) @ vectors.t()

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.a(first), self.b(second)
        a, b = a - a.mean(0), b - b.mean(0)
        t = self.inverse_root(a) @ (a.t() @ b / (a.size(0) - 1)) @ self.inverse_root(b)
        return torch.linalg.svdvals(t), torch.linalg.matrix_norm(t, ord="nuc")


class DeterminantalSubset(nn.Module):
    """A determinantal point process (Gillenwater et al. 2014): log-probability of given subsets by quality and diversity.
    Items (N, M, 4), chosen (N, 3) indices."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.quality, self.diversity = nn.Linear(dim, 1), nn.Linear(dim, 6)

    def forward(self, items: Tensor, chosen: Tensor) -> Tensor:
        q = self.quality(items).exp()
        phi = F.normalize(self.diversity(items), dim=-1)
        kernel = q * (phi @ phi.mT + 0.1 * torch.eye(items.size(1), dtype=items.dtype)) * q.mT
        k = chosen.size(1)
        rows = kernel.gather(1, chosen.unsqueeze(-1).expand(-1, -1, items.size(1)))
        inner = rows.gather(2, chosen.unsqueeze(1).expand(-1, k, -1))
        sign, log_abs = torch.linalg.slogdet(inner + 1e-3 * torch.eye(k, dtype=items.dtype))
        whole = torch.logdet(kernel + torch.eye(items.size(1), dtype=items.dtype))
        return sign * (log_abs - whole)
