"""Weights for tests: every parameter and statistic differs from the value that hides a mistake (0 or 1)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Seeded weights in place, and BatchNorm scales, shifts and running statistics that are not 0 and 1; returns the model."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(t: torch.Tensor, low: float, high: float) -> None:
        t.copy_(torch.rand(t.shape, generator=generator, dtype=torch.float64) * (high - low) + low)

    with torch.no_grad():
        for module in model.modules():
            for p in module.parameters(recurse=False):
                if p.ndim > 1:
                    bound = (3.0 / max(1, p[0].numel())) ** 0.5  # unit gain, so that deep models stay in range
                    uniform(p, -bound, bound)
                else:
                    uniform(p, -0.2, 0.2)
            if isinstance(module, _BatchNorm):
                if module.weight is not None:
                    uniform(module.weight, 0.5, 1.5)
                if module.running_mean is not None and module.running_var is not None:
                    uniform(module.running_mean, -0.3, 0.3)
                    uniform(module.running_var, 0.5, 1.5)
    return model
