"""Models in TorchScript, and forwards that use vmap, functional calls or gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Highway(nn.Module):
    """Srivastava et al. 2015, in TorchScript's Python: annotated, with a loop over layers."""

    def __init__(self, dim: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Linear(dim, dim) for _ in range(layers)])
        self.lines = nn.ModuleList([nn.Linear(dim, dim) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for gate, line in zip(self.gates, self.lines):  # noqa: B905 - TorchScript knows no strict=
            g = torch.sigmoid(gate(x))
            x = g * F.relu(line(x)) + (1 - g) * x
        return x


class Recurrence(nn.Module):
    """Loops over the steps of the input and asks about its shape."""

    def __init__(self, dim: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(dim, hidden), hidden

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if state is None:
            state = torch.zeros(x.size(0), self.hidden)
        outputs: list[Tensor] = []
        for t in range(x.size(1)):
            state = self.cell(x[:, t], state)
            outputs.append(state)
        return torch.stack(outputs, dim=1), state


class ValueGate(nn.Module):
    """Branches on the input's values."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.abs().mean() > 2.0):
            return self.large(x)
        return self.small(x)


def ScriptedHighway() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(5, 8), Highway(), nn.Linear(8, 2)))


def ScriptedLoop() -> nn.Module:
    return torch.jit.script(Recurrence())


def ScriptedBranch() -> nn.Module:
    return torch.jit.script(ValueGate())


def TracedConvNet() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )
    return torch.jit.trace(model.eval(), torch.randn(2, 3, 16, 16))


@torch.jit.script
def fused_swiglu(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(x) * y


class ScriptedParts(nn.Module):
    """Python around a scripted module and a scripted function, as speed-minded authors leave them."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.highway = torch.jit.script(Highway(dim))
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.highway(x)
        return x + fused_swiglu(self.a(x), self.b(x))


class PerSampleKernels(nn.Module):
    """A kernel for each sample by vmap over inputs and kernels. (N, 3, H, W)."""

    def __init__(self, channels: int = 3, out: int = 4) -> None:
        super().__init__()
        self.make, self.shape = nn.Linear(channels, out * channels * 9), (out, channels, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.make(x.mean((2, 3))).view(-1, *self.shape)
        return torch.vmap(lambda image, kernel: F.conv2d(image[None], kernel, padding=1)[0])(x, kernels)


class PairwiseScores(nn.Module):
    """A score of every pair by nested vmap: axis 1 of one, none of the other. (N, L, 4), (M, 4)."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(dim, dim) / 2), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        def score(a: Tensor, b: Tensor) -> Tensor:
            return torch.tanh(a @ self.weight @ b + self.bias)

        every = torch.vmap(torch.vmap(score, in_dims=(None, 0)), in_dims=(0, None))
        return torch.vmap(every, in_dims=(1, None), out_dims=1)(x, keys)


class Ensemble(nn.Module):
    """Models as one, with torch.func: their weights stacked, functional_call under vmap. (N, 5)."""

    def __init__(self, members: int = 3) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))  # noqa: E731
        weights, _ = torch.func.stack_module_state([make() for _ in range(members)])
        self.weights = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in weights.items()})
        self.names, self.base = list(weights), [make()]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = {n: self.weights[n.replace(".", "_")] for n in self.names}
        y = torch.vmap(lambda w, v: torch.func.functional_call(self.base[0], w, (v,)), in_dims=(0, None))(weights, x)
        return y.mean(0), y.var(0)


class Forces(nn.Module):
    """Forces as the gradient of an energy, as potentials of molecules have them. Positions (N, A, 3)."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_(True)
            d = positions[:, :, None] - positions[:, None]
            distance = (d.pow(2).sum(-1, keepdim=True) + 1.0).sqrt()
            energy = self.net(distance).sum((1, 2, 3))
            forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        return energy, forces
