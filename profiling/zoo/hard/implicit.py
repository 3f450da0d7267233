"""Layers that solve, optimise or differentiate inside: equilibria, solvers of equations, closed-form learners, controllers."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Equilibrium(nn.Module):
    """Bai et al. 2019: the fixed point of a layer by Anderson's acceleration, in as many steps as it takes at most. (N, 6)."""

    def __init__(self, dim: int = 6, memory: int = 3, steps: int = 12) -> None:
        super().__init__()
        self.memory, self.steps = memory, steps
        self.w, self.u = nn.Linear(dim, dim), nn.Linear(dim, dim)
        with torch.no_grad():
            self.w.weight.mul_(0.4)

    def layer(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.w(z) + self.u(x))

    def forward(self, x: Tensor) -> Tensor:
        n, d, m = x.size(0), x.size(1), self.memory
        xs, fs = torch.zeros(n, m, d, dtype=x.dtype), torch.zeros(n, m, d, dtype=x.dtype)
        fs[:, 0] = self.layer(xs[:, 0], x)
        xs[:, 1] = fs[:, 0]
        fs[:, 1] = self.layer(fs[:, 0], x)
        h = torch.zeros(n, m + 1, m + 1, dtype=x.dtype)
        h[:, 0, 1:] = h[:, 1:, 0] = 1
        y = torch.zeros(n, m + 1, 1, dtype=x.dtype)
        y[:, 0] = 1
        for k in range(2, self.steps):
            n_k = min(k, m)
            g = fs[:, :n_k] - xs[:, :n_k]
            h[:, 1 : n_k + 1, 1 : n_k + 1] = torch.bmm(g, g.transpose(1, 2)) + 1e-4 * torch.eye(n_k, dtype=x.dtype)
            alpha = torch.linalg.solve(h[:, : n_k + 1, : n_k + 1], y[:, : n_k + 1])[:, 1 : n_k + 1, 0]
            xs[:, k % m] = (alpha[:, None] @ fs[:, :n_k])[:, 0]
            fs[:, k % m] = self.layer(xs[:, k % m], x)
        return self.layer(fs[:, (self.steps - 1) % m], x)


class RungeKutta(nn.Module):
    """An augmented neural ODE (Dupont et al. 2019) with the steps of a Butcher tableau kept in buffers. (N, 3)."""

    def __init__(self, dim: int = 3, extra: int = 2, steps: int = 4) -> None:
        super().__init__()
        self.extra, self.steps = extra, steps
        self.field = nn.Sequential(nn.Linear(dim + extra + 1, 12), nn.Softplus(), nn.Linear(12, dim + extra))
        table = [[0, 0, 0, 0], [1 / 3, 0, 0, 0], [-1 / 3, 1, 0, 0], [1, -1, 1, 0]]
        self.register_buffer("a", torch.tensor(table))
        self.register_buffer("b", torch.tensor([1 / 8, 3 / 8, 3 / 8, 1 / 8]))
        self.register_buffer("c", torch.tensor([0, 1 / 3, 2 / 3, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x, (0, self.extra))
        times = torch.linspace(0, 1, self.steps + 1, dtype=x.dtype)
        for t0, t1 in itertools.pairwise(times):
            dt, slopes = t1 - t0, []
            for i in range(4):
                yi = y + dt * sum((self.a[i, j] * s for j, s in enumerate(slopes)), torch.zeros_like(y))
                time = (t0 + self.c[i] * dt).expand(len(x), 1)
                slopes.append(self.field(torch.cat([yi, time], 1)))
            y = y + dt * torch.einsum("s,snd->nd", self.b, torch.stack(slopes))
        return y[:, : x.size(1)]


class RidgeHead(nn.Module):
    """R2-D2 (Bertinetto et al. 2019): ridge regression by Woodbury's identity adapts to a task inside of the forward.
    Support (N, S, 6) with labels (N, S) of 3 classes, queries (N, Q, 6)."""

    def __init__(self, dim: int = 6, features: int = 10, classes: int = 3) -> None:
        super().__init__()
        self.classes, self.net = classes, nn.Sequential(nn.Linear(dim, features), nn.ReLU())
        self.log_ridge = nn.Parameter(torch.tensor(0.0))
        self.alpha, self.beta = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.0))

    def forward(self, support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        x, q = self.net(support), self.net(queries)
        y = F.one_hot(labels, self.classes).to(x.dtype)
        gram = x @ x.mT + self.log_ridge.exp() * torch.eye(x.size(1), dtype=x.dtype)
        w = x.mT @ torch.inverse(gram) @ y
        return self.alpha * (q @ w) + self.beta


class QuadraticProgram(nn.Module):
    """OptNet (Amos and Kolter 2017): a small quadratic programme by an interior-point method, a KKT system a step. (N, 5)."""

    def __init__(self, inputs: int = 5, variables: int = 3, constraints: int = 4, steps: int = 6) -> None:
        super().__init__()
        self.steps = steps
        self.p = nn.Linear(inputs, variables)
        self.root = nn.Parameter(torch.tril(torch.rand(variables, variables)))
        self.g = nn.Parameter(torch.randn(constraints, variables))
        self.z0, self.s0 = nn.Parameter(torch.zeros(variables)), nn.Parameter(torch.ones(constraints))

    def forward(self, x: Tensor) -> Tensor:
        n, (m, d) = x.size(0), self.g.shape
        p = self.p(x)
        q = self.root @ self.root.t() + 0.1 * torch.eye(d).to(x)
        h = self.g @ self.z0 + self.s0.abs() + 0.1
        z, s, lam = self.z0.expand(n, d), x.new_ones(n, m), x.new_ones(n, m)
        for _ in range(self.steps):
            mu = 0.2 * (s * lam).mean(1, keepdim=True)
            rz = z @ q + p + lam @ self.g
            rs = s * lam - mu
            rp = z @ self.g.T + s - h
            kkt = x.new_zeros(n, d + m, d + m)
            kkt[:, :d, :d] = q
            kkt[:, :d, d:] = self.g.T
            kkt[:, d:, :d] = self.g
            kkt[:, d:, d:] = -torch.diag_embed(s / lam)
            rhs = torch.cat([-rz, -rp + rs / lam], 1)
            step = torch.linalg.solve(kkt, rhs)
            dz, dlam = step.split([d, m], 1)
            ds = -(rs + s * dlam) / lam
            ratio = torch.cat([-s / ds.clamp(max=-1e-9), -lam / dlam.clamp(max=-1e-9)], 1)
            rate = (0.9 * ratio.min(1, keepdim=True).values).clamp(max=1.0)
            z, s, lam = z + rate * dz, s + rate * ds, lam + rate * dlam
        return z


class RiccatiController(nn.Module):
    """A linear-quadratic controller with learned dynamics: gains by the Riccati recursion, then a rollout. (N, 4)."""

    def __init__(self, state: int = 4, control: int = 2, horizon: int = 5) -> None:
        super().__init__()
        self.horizon = horizon
        self.a = nn.Parameter(torch.eye(state) + torch.randn(state, state) / 10)
        self.b = nn.Parameter(torch.randn(state, control))
        self.q, self.r = nn.Parameter(torch.zeros(state)), nn.Parameter(torch.zeros(control))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, r = torch.diag(F.softplus(self.q)), torch.diag(F.softplus(self.r))
        p, gains = q, []
        for _ in range(self.horizon):
            bp = self.b.T @ p
            gain = torch.cholesky_solve(bp @ self.a, torch.linalg.cholesky(r + bp @ self.b))
            p = q + self.a.T @ p @ (self.a - self.b @ gain)
            gains.insert(0, gain)
        controls = []
        for gain in gains:
            u = -x @ gain.T
            x = x @ self.a.T + u @ self.b.T
            controls.append(u)
        return torch.stack(controls, 1), x


class OptimalMatching(nn.Module):
    """SuperGlue's end (Sarlin et al. 2020): Sinkhorn in log space with dustbins, then mutual matches. (N, 4, A), (N, 4, B)."""

    def __init__(self, dim: int = 4, steps: int = 8) -> None:
        super().__init__()
        self.steps, self.project, self.bin = steps, nn.Conv1d(dim, dim, 1), nn.Parameter(torch.tensor(1.0))

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        scores = torch.einsum("bdn,bdm->bnm", self.project(first), self.project(second)) / first.size(1) ** 0.5
        b, m, n = scores.shape
        one = scores.new_tensor(1)
        ms, ns = (m * one).to(scores), (n * one).to(scores)
        right, below, corner = self.bin.expand(b, m, 1), self.bin.expand(b, 1, n), self.bin.expand(b, 1, 1)
        z = torch.cat([torch.cat([scores, right], -1), torch.cat([below, corner], -1)], 1)
        norm = -(ms + ns).log()
        mu = torch.cat([norm.expand(m), ns.log()[None] + norm])[None].expand(b, -1)
        nu = torch.cat([norm.expand(n), ms.log()[None] + norm])[None].expand(b, -1)
        u, v = torch.zeros_like(mu), torch.zeros_like(nu)
        for _ in range(self.steps):
            u = mu - torch.logsumexp(z + v.unsqueeze(1), dim=2)
            v = nu - torch.logsumexp(z + u.unsqueeze(2), dim=1)
        z = z + u.unsqueeze(2) + v.unsqueeze(1) - norm
        best0, best1 = z[:, :-1, :-1].max(2), z[:, :-1, :-1].max(1)
        i0, i1 = best0.indices, best1.indices
        mutual = torch.arange(m)[None] == i1.gather(1, i0)
        strength = torch.where(mutual, best0.values.exp(), best0.values.new_tensor(0))
        valid = mutual & (strength > 0.05)
        return {"matches": torch.where(valid, i0, i0.new_tensor(-1)), "scores": strength}


class Hamiltonian(nn.Module):
    """Greydanus et al. 2019: a learned energy whose symplectic gradient moves (q, p) by leapfrog steps. (N, 4)."""

    def __init__(self, dim: int = 4, steps: int = 3, dt: float = 0.1) -> None:
        super().__init__()
        self.steps, self.dt = steps, dt
        self.energy = nn.Sequential(nn.Linear(dim, 12), nn.Tanh(), nn.Linear(12, 1))

    @torch.enable_grad()
    def field(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if x.is_leaf else x
        g = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        dq, dp = g.chunk(2, dim=-1)
        return torch.cat([dp, -dq], -1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        for _ in range(self.steps):
            x = x + self.dt * self.field(x + 0.5 * self.dt * self.field(x))
        return x


class Lagrangian(nn.Module):
    """Cranmer et al. 2020: accelerations from a learned Lagrangian by Hessians and a pseudo-inverse. (N, 2) twice."""

    def __init__(self, dim: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * dim, 8), nn.Softplus(), nn.Linear(8, 1))

    def lagrangian(self, q: Tensor, v: Tensor) -> Tensor:
        return self.net(torch.cat([q, v])).squeeze(-1) + 0.5 * (v * v).sum()

    def forward(self, q: Tensor, v: Tensor) -> Tensor:
        def acceleration(q: Tensor, v: Tensor) -> Tensor:
            force = torch.func.grad(self.lagrangian, 0)(q, v)
            mass = torch.func.hessian(self.lagrangian, 1)(q, v)
            mixed = torch.func.jacrev(torch.func.grad(self.lagrangian, 1), 0)(q, v)
            return torch.linalg.pinv(mass) @ (force - mixed @ v)

        return torch.vmap(acceleration)(q, v)


class InnerLoop(nn.Module):
    """MAML (Finn et al. 2017): a step of gradient descent on the support set inside of the forward. (S, 3), (S,), (Q, 3)."""

    def __init__(self, dim: int = 3, hidden: int = 6, rate: float = 0.1) -> None:
        super().__init__()
        self.rate = rate
        self.w1, self.b1 = nn.Parameter(torch.randn(hidden, dim) / 2), nn.Parameter(torch.zeros(hidden))
        self.w2, self.b2 = nn.Parameter(torch.randn(1, hidden) / 2), nn.Parameter(torch.zeros(1))

    def run(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        return F.linear(F.relu(F.linear(x, weights[0], weights[1])), weights[2], weights[3]).squeeze(-1)

    def forward(self, support: Tensor, targets: Tensor, queries: Tensor) -> Tensor:
        weights = [self.w1, self.b1, self.w2, self.b2]
        with torch.enable_grad():
            for _ in range(2):
                loss = F.mse_loss(self.run(support, weights), targets)
                grads = torch.autograd.grad(loss, weights, create_graph=True)
                weights = [w - self.rate * g for w, g in zip(weights, grads, strict=True)]
        return self.run(queries, weights)


class GaussNewton(nn.Module):
    """BA-Net's step (Tang and Tan 2019): damped least squares on feature residuals, damping predicted. Points (N, P, 2) moved
    by a similarity onto targets (N, P, 2)."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps, self.damping = steps, nn.Sequential(nn.Linear(1, 4), nn.SELU(), nn.Linear(4, 1), nn.Softplus())

    def forward(self, points: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        n = points.size(0)
        theta = torch.zeros(n, 4, dtype=points.dtype)
        theta[:, 0] = 1
        x, y = points.unbind(-1)
        o, l = torch.zeros_like(x), torch.ones_like(x)
        jacobian = torch.stack([torch.stack([x, -y, l, o], -1), torch.stack([y, x, o, l], -1)], 2).flatten(1, 2)
        for _ in range(self.steps):
            residual = (targets.flatten(1) - torch.einsum("npk,nk->np", jacobian, theta)).unsqueeze(-1)
            lam = self.damping(residual.abs().mean((1, 2), keepdim=False)[:, None])
            a = torch.cat([jacobian, lam.sqrt().unsqueeze(-1) * torch.eye(4, dtype=x.dtype)], 1)
            b = torch.cat([residual, torch.zeros(n, 4, 1, dtype=x.dtype)], 1)
            theta = theta + torch.linalg.lstsq(a, b).solution.squeeze(-1)
        return theta, torch.linalg.vector_norm(residual, ord=2, dim=(1, 2))
