"""Classes of a folder of pictures, by Ray Data: `python ray_data.py resnet18.needle pictures --out classes --workers 2`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data

import needle as ndl

SIZE = 224
MEAN = np.array([0.485, 0.456, 0.406], "float32").reshape(3, 1, 1)
SPREAD = np.array([0.229, 0.224, 0.225], "float32").reshape(3, 1, 1)


class Classify:
    """One of these lives in every worker: the file is loaded and compiled once, not once a batch."""

    def __init__(self, path: str, threads: int) -> None:
        ndl.set_num_threads(threads)
        self.run: Any = ndl.compile(ndl.load(path), (np.zeros((1, 3, SIZE, SIZE), "float32"),))

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = (batch["image"].transpose(0, 3, 1, 2) / np.float32(255) - MEAN) / SPREAD
        scores = self.run(x)  # the last batch may be smaller: a plan for each size that comes
        return {"path": batch["path"], "class": scores.argmax(1), "score": scores.max(1)}


def classes(path: str, pictures: str, workers: int, batch: int, kind: type = Classify) -> ray.data.Dataset:
    threads = max(1, ndl.get_num_threads() // workers)  # so that all workers together have as many as there are cores
    images = ray.data.read_images(pictures, size=(SIZE, SIZE), mode="RGB", include_paths=True)
    return images.map_batches(
        kind,
        fn_constructor_args=(str(Path(path).resolve()), threads),
        batch_size=batch,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=threads,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="what ndl.save or `torch2needle convert` wrote")
    parser.add_argument("pictures", help="a folder")
    parser.add_argument("--out", default="classes", help="a folder for Parquet files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args(argv)
    workers = min(args.workers, ndl.get_num_threads())
    ray.init(num_cpus=ndl.get_num_threads() + 1)  # workers take all cores; one more, or nobody would read pictures
    classes(args.model, args.pictures, workers, args.batch).write_parquet(str(Path(args.out).resolve()))


if __name__ == "__main__":
    main()
