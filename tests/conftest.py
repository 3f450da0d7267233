"""Fixtures: a fixed random stream for every test, devices, a resting collector for those that count live tensors, runs under
torch.compile, scripts' environment. The last lines of a run say for which devices no tests were made, and how many were
skipped for which reason."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu_devices import ABSENT, DEVICES, MODEL_DEVICES, gpu_device, parameters
from needle import backend_selection

pytest_plugins = ("gpu_libraries",)

# Tests of kernels are about needle's own; tests/test_gpu_vendor.py asks for vendors' libraries.
os.environ.setdefault("NEEDLE_GPU_VENDOR", "off")
os.environ.setdefault("NEEDLE_MEASURE", "0")  # the same algorithms on every machine; tests/test_tuner.py measures


@pytest.fixture(autouse=True)
def seed() -> None:
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_path() -> Iterator[None]:
    """What a command adds to the places that modules are searched in, for processes that later tests start, is taken away."""
    kept = sys.path[:]
    yield
    sys.path[:] = kept


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What earlier tests left is gone, and what a test makes must go without Python's search for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def without_rules() -> Iterator[None]:
    """Some of torch's functions without the rules that they have."""
    torch = pytest.importorskip("torch")
    from torch2needle.rules.registry import FUNCTION_RULES

    with pytest.MonkeyPatch.context() as patch:
        for name in ("renorm", "igamma", "igammac", "lu_unpack", "frexp"):
            for place in (torch, torch.Tensor):
                patch.delitem(FUNCTION_RULES, getattr(place, name, None), raising=False)
        yield


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What torch.compile knows of other tests is forgotten, and so is what its backend said."""
    torch = pytest.importorskip("torch")
    from torch2needle import dynamo

    torch._dynamo.reset()
    dynamo.SAID.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for every run of a graph of torch.compile by needle: which executable it was."""
    from torch2needle import dynamo

    made: list[int] = []
    executable = dynamo.executable

    def counted(*args: Any, **kwargs: Any) -> Any:
        exe = executable(*args, **kwargs)

        def run(*inputs: Any) -> Any:
            made.append(id(exe))
            return exe(*inputs)

        run._pool = exe._pool  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(dynamo, "executable", counted)
    return made


@pytest.fixture
def script_environment() -> dict[str, str]:
    """For subprocesses of profiling's scripts: its modules are importable under PYTHONSAFEPATH, too, as they are here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="module", params=parameters(DEVICES))
def gpu(request: pytest.FixtureRequest) -> Any:
    """Every GPU device that is here. Each array has memory of exactly its size, so that reading beyond its end shows."""
    device = gpu_device(request.param)
    device.limit_cache(0)
    yield device
    device.limit_cache(None)


@pytest.fixture(params=parameters(MODEL_DEVICES))
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The default device, which is every one that models run on in turn (gpu_devices.py)."""
    if request.param != "cpu":
        device = gpu_device(request.param)
        monkeypatch.setitem(backend_selection._DEFAULTS, backend_selection.BACKEND, lambda: device)
    return backend_selection.default_device()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", action="store_true", help="all tests of models in the emulation, too: hours")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "emulated: small enough to run in the emulation of GPUs")
    config.addinivalue_line("markers", "in_numpy: runs no kernel, so that one instruction set is enough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def kept(item: pytest.Item) -> bool:
        name = item.callspec.params.get("anywhere", "") if hasattr(item, "callspec") else ""
        return not name.startswith("emulation") or item.get_closest_marker("emulated") is not None

    if not config.getoption("emulate"):
        items[:] = filter(kept, items)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if ABSENT:
        terminalreporter.write_line(f"no tests for {', '.join(ABSENT)}: this machine has no such device.")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}.")
