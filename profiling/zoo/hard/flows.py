"""Normalising flows: a transformed input and the logarithm of its Jacobian's determinant."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RealNVP(nn.Module):
    """Dinh et al. 2017: couplings with alternating masks, and the log-density under a normal base. (N, 4)."""

    def __init__(self, dim: int = 4, hidden: int = 8, layers: int = 3) -> None:
        super().__init__()
        mask = torch.arange(dim) % 2
        self.register_buffer("masks", torch.stack([(mask + i) % 2 for i in range(layers)]).float())
        make = lambda last: nn.Sequential(nn.Linear(dim, hidden), nn.LeakyReLU(), nn.Linear(hidden, dim), *last)  # noqa: E731
        self.scales = nn.ModuleList(make([nn.Tanh()]) for _ in range(layers))
        self.shifts = nn.ModuleList(make([]) for _ in range(layers))
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(dim), torch.eye(dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.scales))):
            kept = self.masks[i] * z
            s = self.scales[i](kept) * (1 - self.masks[i])
            t = self.shifts[i](kept) * (1 - self.masks[i])
            z = (1 - self.masks[i]) * (z - t) * torch.exp(-s) + kept
            log_det -= s.sum(dim=1)
        return z, self.prior.log_prob(z) + log_det


class ActNorm(nn.Module):
    """Scale and shift by channel, set from the first batch in training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.randn(1, channels, 1, 1) / 5)
        self.shift = nn.Parameter(torch.randn(1, channels, 1, 1) / 5)
        self.register_buffer("ready", torch.tensor(1, dtype=torch.uint8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.ready.item() == 0:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean((0, 2, 3), keepdim=True))
                self.ready.fill_(1)
        height, width = x.shape[2:]
        return (x + self.shift) * self.log_scale.exp(), height * width * self.log_scale.sum()


class Glow(nn.Module):
    """Kingma and Dhariwal 2018: squeeze, actnorm, 1x1 convolutions with slogdet, affine couplings. Images of even sizes."""

    def __init__(self, channels: int = 3, hidden: int = 8, steps: int = 2) -> None:
        super().__init__()
        c = 4 * channels
        self.norms = nn.ModuleList(ActNorm(c) for _ in range(steps))
        self.mixes = nn.ParameterList(torch.linalg.qr(torch.randn(c, c))[0] for _ in range(steps))
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c // 2, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, c, 3, padding=1))
            for _ in range(steps)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, c, h, w = x.shape
        x = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h // 2, w // 2)
        total = torch.zeros(n)
        for norm, mix, net in zip(self.norms, self.mixes, self.nets, strict=True):
            x, log_det = norm(x)
            total = total + log_det
            x = F.conv2d(x, mix[:, :, None, None])
            total = total + torch.slogdet(mix)[1] * x.shape[2] * x.shape[3]
            a, b = x.chunk(2, 1)
            shift, scale = net(a).chunk(2, 1)
            scale = torch.sigmoid(scale + 2)
            x = torch.cat([a, (b + shift) * scale], 1)
            total = total + scale.log().flatten(1).sum(-1)
        return x, total


class MaskedLinear(nn.Linear):
    """Of MADE: the mask multiplies the weight at every call."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.register_buffer("mask", torch.ones(n_out, n_in))

    def set_mask(self, mask: Tensor) -> None:
        self.mask.data.copy_(mask.to(torch.uint8).t())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight, self.bias)


class MaskedAutoregressive(nn.Module):
    """MAF over MADE (Papamakarios et al. 2017), with its inverse, which takes a step for each variable. (N, 5)."""

    def __init__(self, dim: int = 5, hidden: int = 12) -> None:
        super().__init__()
        self.dim, self.first, self.last = dim, MaskedLinear(dim, hidden), MaskedLinear(hidden, 2 * dim)
        degree, inner = torch.arange(dim), torch.arange(hidden) % (dim - 1)
        self.first.set_mask(degree[:, None] <= inner[None])
        self.last.set_mask((inner[:, None] < degree[None]).repeat(1, 2))

    def parameters_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(torch.relu(self.first(x))).chunk(2, dim=-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, log_sigma = self.parameters_of(x)
        z = (x - mu) * (-log_sigma).exp()
        back = torch.zeros_like(z)
        for i in range(self.dim):
            m, s = self.parameters_of(back.clone())
            back[:, i] = m[:, i] + z[:, i] * s[:, i].exp()
        return z, -log_sigma.sum(-1), back


class SplineFlow(nn.Module):
    """Durkan et al. 2019: monotone rational-quadratic splines inside [-B, B], the identity outside. (N, 4)."""

    def __init__(self, dim: int = 4, bins: int = 5, bound: float = 2.0) -> None:
        super().__init__()
        self.bins, self.bound = bins, bound
        self.net = nn.Sequential(nn.Linear(dim // 2, 16), nn.ReLU(), nn.Linear(16, dim // 2 * (3 * bins - 1)))

    def spline(self, x: Tensor, w: Tensor, h: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        inside = (x >= -self.bound) & (x <= self.bound)
        y, log_det = torch.zeros_like(x), torch.zeros_like(x)
        d = F.pad(d, pad=(1, 1))
        constant = math.log(math.exp(1 - 1e-3) - 1)
        d[..., 0] = constant
        d[..., -1] = constant
        y[~inside] = x[~inside]
        if torch.any(inside):
            y[inside], log_det[inside] = self.quadratic(x[inside], w[inside, :], h[inside, :], d[inside, :])
        return y, log_det

    def edges(self, w: Tensor) -> tuple[Tensor, Tensor]:
        w = 1e-3 + (1 - 1e-3 * self.bins) * F.softmax(w, dim=-1)
        cum = F.pad(torch.cumsum(w, dim=-1), pad=(1, 0), mode="constant", value=0.0)
        cum = 2 * self.bound * cum - self.bound
        cum[..., 0], cum[..., -1] = -self.bound, self.bound
        return cum, cum[..., 1:] - cum[..., :-1]

    def quadratic(self, x: Tensor, w: Tensor, h: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        cum_w, w = self.edges(w)
        cum_h, h = self.edges(h)
        d = 1e-3 + F.softplus(d)
        cum = cum_w.clone()
        cum[..., -1] += 1e-6
        at = (torch.sum(x[..., None] >= cum, dim=-1) - 1)[..., None]
        take = lambda t: t.gather(-1, at)[..., 0]  # noqa: E731
        x0, width, y0, height = take(cum_w), take(w), take(cum_h), take(h)
        slope, d0, d1 = take(h / w), take(d), d[..., 1:].gather(-1, at)[..., 0]
        theta = (x - x0) / width
        mixed = theta * (1 - theta)
        top = height * (slope * theta.pow(2) + d0 * mixed)
        bottom = slope + (d0 + d1 - 2 * slope) * mixed
        grown = slope.pow(2) * (d1 * theta.pow(2) + 2 * slope * mixed + d0 * (1 - theta).pow(2))
        return y0 + top / bottom, torch.log(grown) - 2 * torch.log(bottom)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        made = self.net(a).view(x.size(0), -1, 3 * self.bins - 1)
        w, h, d = made.split([self.bins, self.bins, self.bins - 1], dim=-1)
        y, log_det = self.spline(b, w, h, d)
        return torch.cat([a, y], -1), log_det.sum(-1)


class PlanarFlow(nn.Module):
    """Rezende and Mohamed 2015: planes with constrained vectors, log-determinants collected in a list. (N, 3)."""

    def __init__(self, dim: int = 3, length: int = 4) -> None:
        super().__init__()
        self.u = nn.ParameterList(torch.randn(1, dim) / 2 for _ in range(length))
        self.w = nn.ParameterList(torch.randn(1, dim) / 2 for _ in range(length))
        self.b = nn.ParameterList(torch.randn(1) for _ in range(length))

    def forward(self, z: Tensor) -> tuple[Tensor, list[Tensor]]:
        dets = []
        for u, w, b in zip(self.u, self.w, self.b, strict=True):
            inner = (u * w).sum()
            u = u + (F.softplus(inner) - 1 - inner) * w / (w * w).sum()
            activation = torch.tanh(F.linear(z, w, b))
            psi = (1 - activation**2) * w
            dets.append(torch.log(torch.abs(1 + psi @ u.t()) + 1e-6).squeeze(-1))
            z = z + u * activation
        return z, dets


class ContinuousFlow(nn.Module):
    """FFJORD with exact traces (Grathwohl et al. 2019): Euler steps, Jacobians by torch.func under vmap. (N, 3)."""

    def __init__(self, dim: int = 3, steps: int = 2) -> None:
        super().__init__()
        self.steps, self.net = steps, nn.Sequential(nn.Linear(dim, 8), nn.Tanh(), nn.Linear(8, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(x.size(0), dtype=x.dtype)
        for _ in range(self.steps):
            jacobian = torch.vmap(torch.func.jacrev(self.net))(x)
            total = total + torch.diagonal(jacobian, dim1=-2, dim2=-1).sum(-1) / self.steps
            x = x + self.net(x) / self.steps
        return x, total


class LowerUpperFlow(nn.Module):
    """Glow's convolutions by their LU form, the inverse by triangular solves; both ways give z and x again. (N, 5)."""

    def __init__(self, dim: int = 5, layers: int = 2) -> None:
        super().__init__()
        self.weights = nn.ModuleList()
        for _ in range(layers):
            p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(dim, dim))[0])
            part = nn.Module()
            part.register_buffer("p", p)
            part.lower, part.upper = nn.Parameter(lower.tril(-1)), nn.Parameter(upper.triu(1))
            part.log_s = nn.Parameter(upper.diagonal().abs().log())
            part.register_buffer("sign", upper.diagonal().sign())
            self.weights.append(part)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_det, z = x.new_zeros(x.size(0)), x
        eye = torch.eye(x.size(1), dtype=x.dtype)
        for w in self.weights:
            upper = w.upper.triu(1) + torch.diag(w.sign * w.log_s.exp())
            z = torch.tanh(z @ (w.p @ (w.lower.tril(-1) + eye) @ upper).T / 2)
            log_det = log_det + w.log_s.sum() + torch.log1p(-z.pow(2)).sum(-1)
        back = z
        for w in reversed(self.weights):
            upper = w.upper.triu(1) + torch.diag(w.sign * w.log_s.exp())
            y = w.p.T @ (2 * torch.atanh(back)).T
            y = torch.linalg.solve_triangular(w.lower.tril(-1) + eye, y, upper=False, unitriangular=True)
            back = torch.linalg.solve_triangular(upper, y, upper=True).T
        return z, log_det, back


class SylvesterFlow(nn.Module):
    """van den Berg et al. 2018: an amortised flow, orthogonal columns by QR of a predicted matrix. z (N, 4), code (N, 6)."""

    def __init__(self, dim: int = 4, hidden: int = 3, code: int = 6) -> None:
        super().__init__()
        self.dim, self.hidden = dim, hidden
        self.q, self.r = nn.Linear(code, dim * hidden), nn.Linear(code, 2 * hidden * hidden)
        self.b = nn.Linear(code, hidden)

    def forward(self, z: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        q, _ = torch.linalg.qr(self.q(code).view(-1, self.dim, self.hidden))
        r1, r2 = self.r(code).view(-1, 2, self.hidden, self.hidden).triu().unbind(1)
        on = torch.eye(self.hidden, dtype=torch.bool)
        r1, r2 = torch.where(on, r1.tanh(), r1), torch.where(on, r2.tanh(), r2)
        inside = torch.einsum("nij,njk,nk->ni", r2, q.mT, z) + self.b(code)
        h = torch.tanh(inside)
        moved = z + torch.einsum("nij,njk,nk->ni", q, r1, h)
        slope = 1 - h.square()
        jacobian = 1 + slope * torch.diagonal(r1, dim1=1, dim2=2) * torch.diagonal(r2, dim1=1, dim2=2)
        return moved, jacobian.abs().log().sum(-1)


class ExponentialFlow(nn.Module):
    """Hoogeboom et al. 2020: the exponential of a matrix as a layer, its log-determinant the trace, and the way back. (N, 4)."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(dim, dim) / 2), nn.Parameter(torch.randn(dim))
        self.log_scale = nn.Parameter(torch.randn(dim) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = (x @ torch.matrix_exp(self.weight).T + self.bias) * self.log_scale.exp()
        log_det = self.weight.trace() + self.log_scale.sum()
        back = (z * torch.exp(-self.log_scale) - self.bias) @ torch.linalg.matrix_exp(-self.weight).T
        return z, log_det.expand(x.size(0)), back


class ResidualFlow(nn.Module):
    """Chen et al. 2019: an invertible residual layer, its log-determinant by a power series of Jacobian traces. (N, 3)."""

    def __init__(self, dim: int = 3, hidden: int = 6, terms: int = 5) -> None:
        super().__init__()
        self.terms = terms
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.ELU(), nn.Linear(hidden, dim))
        with torch.no_grad():
            for m in self.net[::2]:
                m.weight.mul_(0.7 / torch.linalg.matrix_norm(m.weight, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        jacobian = torch.func.vmap(torch.func.jacfwd(self.net))(x)
        power, log_det = jacobian, torch.zeros(len(x), dtype=x.dtype)
        for k in range(1, self.terms + 1):
            trace = power.diagonal(dim1=-2, dim2=-1).sum(-1)
            log_det = log_det + (-1) ** (k + 1) * trace / k
            power = torch.bmm(power, jacobian)
        return x + self.net(x), log_det
