"""save and load: same results, nothing executed, and one-sentence errors for every kind of bad file."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import needle as ndl
from needle.op import OPS
from test_executor import close, image, small_net


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ndl.save(small_net(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_loaded_model_gives_the_same(saved: Path) -> None:
    net, x = small_net(), image(2, 3, 19, 16)
    again = ndl.load(saved)
    assert list(again.state_dict()) == list(ndl.graph.symbolic(net).state_dict())
    for a, b in zip(again(ndl.Tensor(x)), net(ndl.Tensor(x)), strict=True):
        close(a.numpy(), b.numpy(), 0)
    close(ndl.compile(again, (x,))(x)[0], net(ndl.Tensor(x))[0].numpy())


def test_runs_without_torch(saved: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, needle as ndl\n"
        f"net = ndl.load({str(saved)!r}); x = np.ones((1, 3, 16, 16), 'float32')\n"
        "print(ndl.compile(net, (x,))(x)[1].shape)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "(1, 7)"


def test_needle_alone_knows_every_op() -> None:
    """A file may hold any op, and `load` imports neither fusions nor rules."""
    known = subprocess.run(
        [sys.executable, "-c", "import needle.op; print(*needle.op.OPS)"], capture_output=True, text=True, check=True
    ).stdout.split()
    for module in pkgutil.iter_modules(ndl.ops.__path__, "needle.ops."):
        importlib.import_module(module.name)
    ops = {name for name, cls in OPS.items() if cls.__module__.startswith("needle.")}
    assert ops <= set(known)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"\[load\] there is no file"):
        ndl.load(tmp_path / "none")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_file(saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"\[load\]"):
        ndl.load(saved)


def test_trailing_bytes(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"x" * 64)
    with pytest.raises(ValueError, match=r"\[load\]"):
        ndl.load(saved)


def test_oversized_header(saved: Path) -> None:
    data = saved.read_bytes()
    saved.write_bytes((1 << 62).to_bytes(8, "little") + data[8:])
    with pytest.raises(ValueError, match=r"\[load\]"):
        ndl.load(saved)


def test_foreign_files(tmp_path: Path) -> None:
    for name, content in {"zip": b"PK\x03\x04" + b"\0" * 100, "text": b"hello world, no tensors here at all"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"\[load\]"):
            ndl.load(tmp_path / name)
    save_file({"a": np.zeros(3, "float32")}, tmp_path / "plain")
    with pytest.raises(ValueError, match="holds tensors but no needle graph"):
        ndl.load(tmp_path / "plain")


def test_newer_version(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, "float32")}, tmp_path / "f", metadata={"needle": json.dumps({"version": 99})})
    with pytest.raises(ValueError, match="expects format version 2, got 99"):
        ndl.load(tmp_path / "f")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_crash(saved: Path, data: st.DataObject) -> None:
    raw = bytearray(saved.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw) - 1, header + 64)))] = data.draw(st.integers(0, 255))
    path = saved.with_name("damaged")
    path.write_bytes(raw)
    try:
        ndl.load(path)
    except ValueError as e:
        assert str(e).startswith("[load]")
