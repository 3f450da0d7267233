"""docs/examples/deploy: the servers and batch programs run as they stand, on a small net that they load from its file."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import nn
from needle.backend_selection import BACKEND

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples" / "deploy"
IMAGES = np.random.default_rng(0).standard_normal((6, 3, 224, 224)).astype("float32")

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="servers compile")


@pytest.fixture(scope="module")
def net() -> nn.Module:
    np.random.seed(0)
    layers = nn.Conv(3, 8, 3, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 28 * 28, 9)
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def model(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deploy") / "net.needle"
    ndl.save(net, path)
    return path


@pytest.fixture
def threads() -> Iterator[None]:
    before = ndl.get_num_threads()
    yield
    ndl.set_num_threads(before)


def example(path: Path) -> Any:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scores_of(net: nn.Module, images: np.ndarray) -> np.ndarray:
    """Eagerly, without a plan."""
    return net(ndl.Tensor(images.astype("float32"))).numpy()


def assert_best(answer: dict[str, list], scores: np.ndarray) -> None:
    assert answer["classes"] == np.argsort(-scores)[:5].tolist()
    np.testing.assert_allclose(answer["scores"], np.sort(scores)[::-1][:5], rtol=1e-5, atol=1e-5)


def test_fastapi(net: nn.Module, model: Path, monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    pytest.importorskip("fastapi"), pytest.importorskip("httpx")
    from fastapi.testclient import TestClient

    monkeypatch.setenv("MODEL", str(model))
    monkeypatch.setenv("AT_ONCE", "2")
    want = scores_of(net, IMAGES)
    with TestClient(example(EXAMPLES / "fastapi_server.py").app()) as client:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda x: client.post("/classify", content=x.tobytes()), IMAGES))
        for answer, scores in zip(answers, want, strict=True):
            assert answer.status_code == 200
            assert_best(answer.json(), scores)
        wrong = client.post("/classify", content=b"no image")
    assert wrong.status_code == 422 and "602112 bytes" in wrong.json()["detail"] and "got 8" in wrong.json()["detail"]


def test_profiling_script(tmp_path: Path, script_environment: dict[str, str]) -> None:
    """Both engines behind FastAPI in processes, with equal answers."""
    pytest.importorskip("torch"), pytest.importorskip("fastapi"), pytest.importorskip("uvicorn")
    file = tmp_path / "serving.json"
    quick = ["--servers", "fastapi", "--replicas", "1", "--clients", "2", "--rounds", "1", "--seconds", "0.2"]
    command = [sys.executable, str(ROOT / "profiling" / "serving.py"), *quick, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=script_environment, timeout=250)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["results"]
    assert row["needle"]["requests/s"][0] > 0 and row["torch"]["requests/s"][0] > 0


# -- Triton ----------------------------------------------------------------------------------------------------------------


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.array = name, array

    def as_numpy(self) -> np.ndarray:
        return self.array


class Response:
    def __init__(self, output_tensors: list[Tensor], error: Any = None) -> None:
        self.tensors, self.error = output_tensors, error


def backend_utils() -> Any:
    """What model.py takes of Triton's module, which exists in its server alone; a request is a dict of tensors."""
    made: Any = types.ModuleType("triton_python_backend_utils")
    made.Tensor, made.InferenceResponse, made.TritonError = Tensor, Response, RuntimeError
    made.get_input_tensor_by_name = dict.get
    return made


def config_of(text: str) -> dict[str, Any]:
    """A config.pbtxt as the JSON that a model is given: `name: value`, `name { ... }` and lists of both."""
    tokens = iter(re.findall(r'"[^"]*"|[\w.]+|[{}\[\]:,]', re.sub(r"#.*", "", text)))

    def value(token: str) -> Any:
        if token == "{":
            return message("}")
        if token == "[":
            return [value(t) for t in iter(lambda: next(tokens), "]") if t != ","]
        return token.strip('"') if not token.isdigit() else int(token)

    def message(end: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in iter(lambda: next(tokens, end), end):
            token = next(tokens)
            found[name] = value(next(tokens) if token == ":" else token)
        return found

    return message("")


def test_triton(net: nn.Module, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """In the order in which Triton calls it, with the config's own names and sizes."""
    folder = EXAMPLES / "triton" / "resnet18"
    config = config_of((folder / "config.pbtxt").read_text())
    assert config["backend"] == "python" and config["name"] == folder.name and config["max_batch_size"] == 8
    key, count = config["parameters"], config["instance_group"][0]["count"]
    config["parameters"] = {key["key"]: key["value"]}  # protobuf's map
    assert (key["key"], int(key["value"]["string_value"]) * count) == ("threads", 2)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend_utils())
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.needle").write_bytes(model.read_bytes())
    triton = example(folder / "1" / "model.py").TritonPythonModel()
    triton.initialize({"model_config": json.dumps(config), "model_repository": str(tmp_path), "model_version": "1"})
    assert ndl.get_num_threads() == 1

    def requests(*images: np.ndarray) -> list[dict[str, Tensor]]:
        return [{"image": Tensor("image", i)} for i in images]

    want = scores_of(net, IMAGES)
    for group in ([slice(0, 1)], [slice(0, 1), slice(1, 4), slice(4, 6)]):
        responses = triton.execute(requests(*(IMAGES[s] for s in group)))
        for response, s in zip(responses, group, strict=True):
            (tensor,) = response.tensors
            assert tensor.name == "scores" and response.error is None
            np.testing.assert_allclose(tensor.array, want[s], rtol=1e-5, atol=1e-5)
    (refused, again) = triton.execute(requests(IMAGES[:5], IMAGES[:5]))
    assert refused.tensors == again.tensors == [] and "expects 1 to 8" in str(refused.error)
    triton.finalize()


# -- Ray -------------------------------------------------------------------------------------------------------------------
# Drivers run in a folder of their own: Ray's workers import from there, and a checkout has no compiled core.


@pytest.fixture
def ray_environment(script_environment: dict[str, str]) -> dict[str, str]:
    pytest.importorskip("ray")
    return script_environment | {"RAY_USAGE_STATS_ENABLED": "0"}


def test_ray_data(net: nn.Module, model: Path, tmp_path: Path, ray_environment: dict[str, str]) -> None:
    pytest.importorskip("ray.data"), pytest.importorskip("PIL")
    from PIL import Image
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    pictures = np.random.default_rng(0).integers(0, 256, (5, 224, 224, 3), dtype="uint8")
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / "in" / f"{i}.png")
    script = [sys.executable, str(EXAMPLES / "ray_data.py"), str(model), str(tmp_path / "in")]
    command = [*script, "--out", str(tmp_path / "out"), "--batch", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=ray_environment, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr
    rows = {Path(r["path"]).stem: r for r in parquet.read_table(tmp_path / "out").to_pylist()}
    mean, spread = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    want = scores_of(net, ((pictures / 255 - mean) / spread).transpose(0, 3, 1, 2))
    assert [rows[str(i)]["class"] for i in range(5)] == want.argmax(1).tolist()
    np.testing.assert_allclose([rows[str(i)]["score"] for i in range(5)], want.max(1), rtol=1e-4, atol=1e-4)


def test_ray_serve(net: nn.Module, model: Path, tmp_path: Path, ray_environment: dict[str, str]) -> None:
    """Two replicas; requests that come together, one of them wrong, get each their own answer."""
    pytest.importorskip("ray.serve")
    httpx = pytest.importorskip("httpx")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / "ray_serve.py"), str(model), "--replicas", "2", "--port", str(port)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=ray_environment, cwd=tmp_path, start_new_session=True, **streams) as process:
        try:
            assert any(f"serving on port {port}" in line for line in process.stdout)

            async def ask(bodies: list[bytes]) -> list[Any]:
                async with httpx.AsyncClient(timeout=60) as client:
                    return await asyncio.gather(*(client.post(f"http://127.0.0.1:{port}/", content=b) for b in bodies))

            *answers, wrong = asyncio.run(ask([*(x.tobytes() for x in IMAGES), b"no image"]))
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.stdout.close()
            process.wait(60)
    assert wrong.status_code == 422 and "602112 bytes" in wrong.json()["error"]
    for answer, scores in zip(answers, scores_of(net, IMAGES), strict=True):
        assert answer.status_code == 200
        assert_best(answer.json(), scores)
