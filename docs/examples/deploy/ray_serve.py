"""A net behind HTTP by Ray Serve, which gathers requests into batches: `python ray_serve.py resnet18.needle --replicas 2`.

A request is `POST /` with an image's float32 numbers; the answer is the five best classes with their scores, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

import needle as ndl

IMAGE = (3, 224, 224)
BYTES = 4 * int(np.prod(IMAGE))
LARGEST = 8  # images of a batch


class Classifier:
    """One of these lives in every replica: the file is loaded and compiled once."""

    def __init__(self, path: str, threads: int) -> None:
        ndl.set_num_threads(threads)
        net = ndl.load(path)
        name = net.graph.inputs[0].target
        example = np.zeros((1, *IMAGE), "float32")
        # Plans for batches of every size, before the first request; weights are packed once for all.
        self.run: Any = ndl.compile(net, (example,), sizes={f"{name}.0": (1, LARGEST)})
        self.run(example)

    @serve.batch(max_batch_size=LARGEST, batch_wait_timeout_s=0.002)
    async def scores(self, images: list[np.ndarray]) -> list[np.ndarray]:
        # In a thread: needle holds no lock of Python's while it runs, so that the next batch gathers meanwhile.
        return list(await asyncio.to_thread(self.run, np.stack(images)))

    async def __call__(self, request: Request) -> JSONResponse:
        body = await request.body()
        if len(body) != BYTES:  # said here: in a batch, an image of a wrong size would fail the others, too
            return JSONResponse({"error": f"expects {BYTES} bytes, float32 of shape {IMAGE}, got {len(body)}"}, 422)
        scores = await self.scores(np.frombuffer(body, "<f4").reshape(IMAGE))
        best = np.argsort(-scores)[:5]
        return JSONResponse({"classes": best.tolist(), "scores": scores[best].tolist()})


def application(path: str, replicas: int, kind: type = Classifier) -> serve.Application:
    threads = max(1, ndl.get_num_threads() // replicas)  # so that all replicas together have as many as there are cores
    options: dict[str, Any] = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": threads}}
    return serve.deployment(**options, max_ongoing_requests=4 * LARGEST)(kind).bind(str(Path(path).resolve()), threads)


def start(path: str, replicas: int, port: int, kind: type = Classifier) -> None:
    ray.init(num_cpus=ndl.get_num_threads())
    serve.start(http_options={"port": port})
    serve.run(application(path, replicas, kind))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="what ndl.save or `torch2needle convert` wrote")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    start(args.model, min(args.replicas, ndl.get_num_threads()), args.port)
    print(f"serving on port {args.port}", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
