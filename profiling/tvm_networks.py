"""torch's networks through needle to TVM, beside torch: `python profiling/tvm_networks.py -m mlp [--trials N] [--json F] ...`.

Options as of `python -m needle.tvm.eval`, whose table this extends by torch eager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import needle as ndl
import torch2needle
from needle.tvm import eval as evaluation
from needle.tvm.command import exit_code
from torch2needle import models


class LanguageModel(torch.nn.Module):
    """Tokens (length, batch) to scores of the next one (length * batch, tokens), through two LSTM layers."""

    def __init__(self, tokens: int = 100, embedding: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, embedding)
        self.lstm = torch.nn.LSTM(embedding, hidden, num_layers=2)
        self.head = torch.nn.Linear(hidden, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0].flatten(0, 1))


# name -> (the network, its inputs for a batch, usual batch)
NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[int], torch.Tensor], int]] = {
    "mlp": (models.mlp, lambda batch: torch.randn(batch, 784), 64),
    "transformer": (models.transformer, lambda batch: torch.randint(0, 1000, (batch, 64)), 8),
    "conv": (models.resnet9, lambda batch: torch.randn(batch, 3, 32, 32), 8),
    "resnet18": (models.resnet18, lambda batch: torch.randn(batch, 3, 64, 64), 1),
    "unet": (lambda: models.unet(base=8), lambda batch: torch.randn(batch, 3, 64, 64), 1),
    "lstm": (LanguageModel, lambda batch: torch.randint(0, 100, (16, batch)), 8),
}


def prepared(name: str, batch: int) -> tuple[torch.nn.Module, torch.Tensor, Any, ndl.Tensor]:
    """The network and an input in torch, and the same in needle."""
    build, inputs, _ = NETWORKS[name]
    torch.manual_seed(0)
    model, given = models.randomize(build()).eval(), inputs(batch)
    x = ndl.Tensor(given.numpy(), dtype=str(given.numpy().dtype), requires_grad=False)
    return model, given, torch2needle.convert(model, (given,)).eval(), x


def main(arguments: Sequence[str] | None = None) -> int:
    options = evaluation.parser(NETWORKS).parse_args(arguments)
    options.batch = options.batch or NETWORKS[options.model][2]
    torch.set_num_threads(ndl.get_num_threads())
    model, given, net, x = prepared(options.model, options.batch)

    def eager() -> torch.Tensor:
        with torch.inference_mode():
            return model(given)

    return exit_code(lambda: evaluation.report(evaluation.evaluate(net, x, options, {"torch eager": eager}), options))


if __name__ == "__main__":
    sys.exit(main())
