"""Data-parallel training under Ray Train, which starts the processes and torch.distributed: `python ray_train.py`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import needle as ndl
import torch2needle
from needle.ops import cross_entropy  # as ndl.ops beside torch, Ray's pickling would look for torch.ops
from needle.training import save_checkpoint
from torch2needle.bridges.distributed import data_parallel

FEATURES, CLASSES, BATCH = 16, 4, 32


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Points, and which of four directions each is nearest to."""
    draw = np.random.RandomState(0)
    x = draw.randn(1024, FEATURES).astype("float32")
    return x, (x @ draw.randn(FEATURES, CLASSES)).argmax(1)


def train(config: dict[str, Any]) -> None:
    """What every process runs: steps on its part of each batch; the first one's model is saved."""
    here = ray.train.get_context()
    rank, count = here.get_world_rank(), here.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.ReLU(), torch.nn.Linear(32, CLASSES))
    net = torch2needle.convert(model).train()
    optimizer = ndl.optim.AdamW(net.parameters(), lr=0.01)
    x, y = (a[rank::count] for a in examples())
    size = BATCH // count
    step = data_parallel(ndl.compile_step(net, cross_entropy, optimizer, (x[:size], y[:size])))
    for epoch in range(config["epochs"]):
        losses = [float(step(x[i : i + size], y[i : i + size])) for i in range(0, len(x), size)]
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                save_checkpoint(Path(folder) / "model.safetensors", net, optimizer, epoch + 1)
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch + 1, "loss": float(np.mean(losses))}, checkpoint=checkpoint)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", default="ray_results", help="where Ray keeps results and checkpoints")
    args = parser.parse_args(argv)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        torch_config=TorchConfig(backend="gloo"),  # "nccl" on GPUs
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(storage_path=str(Path(args.folder).resolve())),
    )
    result = trainer.fit()
    print(f"epoch {result.metrics['epoch']}: loss {result.metrics['loss']:.3f}, saved in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
