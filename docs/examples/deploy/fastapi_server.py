"""A net behind HTTP in one file: `MODEL=resnet18.needle uvicorn fastapi_server:app --factory`.

A request is `POST /classify` with an image's float32 numbers; the answer is the five best classes with their scores. One process
runs as many requests at once as it has threads, each on one of them; `AT_ONCE=1` gives each request all threads. With
`--workers N` set `NEEDLE_NUM_THREADS` to the cores over N.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio.to_thread
import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request

import needle as ndl

IMAGE = (3, 224, 224)
BYTES = 4 * int(np.prod(IMAGE))


async def image(request: Request) -> np.ndarray:
    body = await request.body()
    if len(body) != BYTES:
        raise HTTPException(422, f"expects {BYTES} bytes, float32 of shape {IMAGE}, got {len(body)}")
    return np.frombuffer(body, "<f4").reshape(1, *IMAGE)


def server(run: Callable[[np.ndarray], np.ndarray], at_once: int) -> FastAPI:
    @asynccontextmanager
    async def limited(_: FastAPI) -> AsyncIterator[None]:
        """Requests beyond `at_once` wait; else 40 would run, each with memory of its own for its intermediates."""
        anyio.to_thread.current_default_thread_limiter().total_tokens = at_once
        yield

    api = FastAPI(title="classes of images", lifespan=limited)

    @api.post("/classify")
    def classify(x: Annotated[Any, Depends(image)]) -> dict[str, list]:  # a plain function: FastAPI runs it in a thread
        scores = run(x)[0]
        best = np.argsort(-scores)[:5]
        return {"classes": best.tolist(), "scores": scores[best].tolist()}

    return api


def app() -> FastAPI:
    cores = ndl.get_num_threads()
    at_once = int(os.environ.get("AT_ONCE", cores))
    ndl.set_num_threads(max(1, cores // at_once))
    example = np.zeros((1, *IMAGE), "float32")
    exe = ndl.compile(ndl.load(os.environ["MODEL"]), (example,))
    exe(example)
    return server(exe, at_once)
