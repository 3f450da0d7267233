"""The servers of docs/examples/deploy beside the same servers with torch: requests per second and waiting times.

`python profiling/serving.py [--servers fastapi ray] [--replicas 1 2] [--clients N] [--rounds N] [--seconds S] [--json F]`

Both engines are up at once, in processes of their own, and are asked in turns: in a round each answers N clients, who ask again
as soon as they are answered. All replicas together have as many threads as there are cores; clients and servers share the cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import needle as ndl
import operator_fusion
import torch2needle
from needle.profiler import cpu_name

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "docs" / "examples" / "deploy"
IMAGE = (3, 224, 224)
START = 120.0  # seconds that a server may take to answer first


def torch_model() -> Any:
    from torch2needle import models

    return models.randomize(models.resnet18(), seed=0).eval()


def torch_run(threads: int) -> Any:
    """What the examples call, with torch in needle's place."""
    import torch

    torch.set_num_threads(threads)
    model = torch_model()

    def run(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.from_numpy(x.copy() if not x.flags.writeable else x)).numpy()

    run(np.zeros((1, *IMAGE), "float32"))
    return run


def torch_app() -> Any:
    """docs/examples/deploy/fastapi_server.py's app, with torch."""
    import fastapi_server

    return fastapi_server.server(torch_run(ndl.get_num_threads()), at_once=1)


def torch_classifier() -> type:
    """docs/examples/deploy/ray_serve.py's class, with torch."""
    import ray_serve

    class Classifier(ray_serve.Classifier):
        def __init__(self, path: str, threads: int) -> None:
            self.run = torch_run(threads)

    return Classifier


# -- servers that are up -------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def fastapi_servers(path: str, replicas: int) -> Iterator[dict[str, tuple[int, str]]]:
    """The port and path of each engine's server; a replica is a process that answers one request at a time."""
    threads = max(1, ndl.get_num_threads() // replicas)
    env = os.environ | {"MODEL": path, "AT_ONCE": "1", "NEEDLE_NUM_THREADS": str(threads)}
    processes, places = [], {}
    try:
        for engine, app in (("needle", "fastapi_server:app"), ("torch", "serving:torch_app")):
            port = free_port()
            flags = ["--factory", "--workers", str(replicas), "--port", str(port), "--log-level", "warning"]
            command = [sys.executable, "-m", "uvicorn", app, *flags]
            processes.append(subprocess.Popen(command, env=env, start_new_session=True))
            places[engine] = port, "/classify"
        yield places
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


@contextmanager
def ray_servers(path: str, replicas: int) -> Iterator[dict[str, tuple[int, str]]]:
    """Two applications of one Ray Serve, which is told of cores for both: one of them rests at a time."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # Ray's own default is 15
    import ray
    import ray_serve
    from ray import serve

    port = free_port()
    ray.init(num_cpus=2 * ndl.get_num_threads(), log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        for engine, kind in (("needle", ray_serve.Classifier), ("torch", torch_classifier())):
            serve.run(ray_serve.application(path, replicas, kind), name=engine, route_prefix=f"/{engine}")
        yield {engine: (port, f"/{engine}") for engine in ("needle", "torch")}
    finally:
        serve.shutdown()
        ray.shutdown()


SERVERS = {"fastapi": fastapi_servers, "ray": ray_servers}


# -- clients -------------------------------------------------------------------------------------------------------------------


def ask(connection: http.client.HTTPConnection, path: str, image: bytes) -> dict[str, Any]:
    connection.request("POST", path, image)
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"[serving] expects an answer, got {answer.status}: {text[:200]!r}.")
    return json.loads(text)


def first_answer(port: int, path: str, image: bytes) -> dict[str, Any]:
    """When the server is up."""
    end = time.monotonic() + START
    while True:
        try:
            return ask(http.client.HTTPConnection("127.0.0.1", port, timeout=START), path, image)
        except ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def burst(port: int, path: str, images: list[bytes], seconds: float) -> list[float]:
    """How long each request waited; `len(images)` clients ask for so long."""
    waited: list[list[float]] = [[] for _ in images]
    failed: list[Exception] = []
    end = time.monotonic() + seconds

    def client(image: bytes, mine: list[float]) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START)
            while (start := time.monotonic()) < end:
                ask(connection, path, image)
                mine.append(time.monotonic() - start)
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=client, args=pair) for pair in zip(images, waited, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]
    return [w for mine in waited for w in mine]


def measure(server: str, path: str, replicas: int, args: argparse.Namespace) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    images = [draw.standard_normal(IMAGE).astype("float32").tobytes() for _ in range(args.clients)]
    with SERVERS[server](path, replicas) as places:
        answers = {engine: first_answer(*place, images[0]) for engine, place in places.items()}
        if not np.allclose(answers["needle"]["scores"], answers["torch"]["scores"], rtol=1e-3, atol=1e-3):
            raise RuntimeError(f"[serving] expects equal answers of both engines, got {answers}.")
        for place in places.values():
            burst(*place, images, args.seconds / 2)
        rates: dict[str, list[float]] = {engine: [] for engine in places}
        waited: dict[str, list[float]] = {engine: [] for engine in places}
        for i in range(args.rounds):
            for engine in list(places)[:: 1 if i % 2 else -1]:
                start = time.monotonic()
                found = burst(*places[engine], images, args.seconds)
                rates[engine].append(len(found) / (time.monotonic() - start))
                waited[engine] += found
    ratios = [n / t for n, t in zip(rates["needle"], rates["torch"], strict=True)]
    row: dict[str, Any] = {"server": server, "replicas": replicas, "threads": max(1, ndl.get_num_threads() // replicas)}
    for engine in places:
        ms = 1e3 * np.quantile(waited[engine], [0.5, 0.99])
        row[engine] = {"requests/s": rates[engine], "median ms": ms[0], "99 % ms": ms[1]}
        print(
            f"{server:8} {replicas} replicas of {row['threads']} threads  {engine:7}"
            f"{statistics.median(rates[engine]):7.1f} requests/s ({min(rates[engine]):.1f} to {max(rates[engine]):.1f}), "
            f"waited {ms[0]:.0f} ms, one of 100 {ms[1]:.0f} ms",
            flush=True,
        )
    row |= {"needle / torch": {"ratio": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}}
    print("{ratio:.2f} times torch's ({min:.2f} to {max:.2f})".format(**row["needle / torch"]), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each engine's part of a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folders = [str(EXAMPLES), str(HERE), *filter(None, sys.path)]
    sys.path[:], os.environ["PYTHONPATH"] = folders, os.pathsep.join(folders)  # of servers' processes, too
    print(f"{cpu_name()}, ResNet-18 @224, {args.clients} clients, {args.rounds} rounds of {args.seconds} s")
    with TemporaryDirectory() as folder:
        path = f"{folder}/resnet18.needle"
        ndl.save(operator_fusion.fuse(torch2needle.convert(torch_model())), path)
        results = [measure(server, path, n, args) for server in args.servers for n in args.replicas]
    if args.json:
        document = {"cpu": cpu_name(), "cores": ndl.get_num_threads(), "clients": args.clients}
        document |= {"rounds": args.rounds, "seconds": args.seconds, "results": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
