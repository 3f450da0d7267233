"""save and load: same results, nothing executed, and one-sentence errors for every kind of bad file."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import needle as ndl
from needle import nn
from needle.op import OPS
from needle.training.checkpoint import save_checkpoint
from test_executor import close, image, small_net
from values import Applied


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


# -- what save writes, load takes ----------------------------------------------------------------------------------------


class Writes(nn.Module):
    """A running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.layer = ndl.Tensor(np.zeros(3, "float32"), requires_grad=False), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        self.mean.data = self.mean * 0.5 + ndl.ops.mean(x, 0)
        return self.layer(x) + self.mean


class Holds(nn.Module):
    """Tensors in nested lists, tuples and dicts."""

    def __init__(self) -> None:
        super().__init__()
        made = iter(ndl.Tensor(np.full(3, float(i), "float32")) for i in range(1, 9))
        self.list, self.tuple = [next(made), [next(made)]], (next(made),)
        self.dict = {"a": next(made), 1: {"x.y": next(made)}, "layers": [(nn.Linear(3, 3), next(made))]}
        self._hidden, self._listed = next(made), [next(made)]

    def forward(self, x: Any) -> Any:
        layer, shift = self.dict["layers"][0]  # type: ignore[index]
        y = layer(x * self.list[0] + self.list[1][0]) + shift + self.tuple[0]  # type: ignore[index]
        return y * self.dict["a"] + self.dict[1]["x.y"] * self._hidden + self._listed[0]  # type: ignore[index]


def edited(layer: nn.Module, **changes: Any) -> nn.Module:
    for name, value in changes.items():
        setattr(layer, name, value)
    return nn.Sequential(layer)


SAVED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "buffer": (Writes, (2, 3)),
    "nested": (Holds, (2, 3)),
    "bias taken away": (lambda: edited(nn.Linear(3, 2), bias=None), (2, 3)),
    "bias added": (lambda: edited(nn.Linear(3, 2, bias=False), bias=nn.Parameter(np.ones((1, 2)))), (2, 3)),
    "weight of the same shape": (lambda: edited(nn.Linear(3, 2), weight=nn.Parameter(np.ones((3, 2)))), (2, 3)),
    "eps": (lambda: edited(nn.LayerNorm1d(3), eps=0.5), (2, 3)),
    "p": (lambda: edited(nn.Dropout(0.5), p=0.1).eval(), (2, 3)),
    "slope": (lambda: edited(nn.LeakyReLU(0.5), negative_slope=0.1), (2, 3)),
    "stride": (lambda: edited(nn.MaxPool2d(2), stride=1), (1, 1, 5, 5)),
    "float64": (lambda: nn.Sequential(nn.Linear(3, 2)).to("float64"), (2, 3)),
    "numpy's numbers": (lambda: Applied(lambda x: ndl.ops.leaky_relu(x, np.float32(0.25))), (2, 3)),
}


@pytest.mark.parametrize("name", SAVED)
def test_loaded_as_it_was(name: str, tmp_path: Path) -> None:
    make, shape = SAVED[name]
    model = make()
    dtype = "float64" if name == "float64" else "float32"
    xs = [ndl.Tensor(np.random.randn(*shape).astype(dtype)) for _ in range(2)]
    ndl.save(model, tmp_path / "net")
    again = ndl.load(tmp_path / "net")
    for x in xs:  # the second call reads what the first wrote
        close(again(x).numpy(), model(x).numpy(), 0)
    assert list(again.state_dict()) == list(model.state_dict())
    for key, value in model.state_dict().items():
        close(again.state_dict()[key].numpy(), value.numpy(), 0)


NOT_SAVED: dict[str, tuple[Any, str]] = {
    "weight of another shape": (
        lambda: edited(nn.Linear(3, 2), weight=nn.Parameter(np.ones((3, 4)))),
        r"layers as they were made, .* 0\.weight has shape \(3, 4\), the layer expects \(3, 2\)\.",
    ),
    "layout": (lambda: edited(nn.Linear(3, 3), _layout="torch"), r"got 0 \(Linear\) with another _layout\."),
    "forward": (lambda: edited(nn.ReLU(), forward=lambda x: -x), r"got 0 \(ReLU\) with another forward\."),
    "value": (lambda: Applied(lambda x: ndl.ops.leaky_relu(x, {1: 2})), "expects float as alpha"),
}


def hooked() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda m, args, out: out * 2.0)
    return nn.Sequential(layer)


@pytest.mark.parametrize("name", [*NOT_SAVED, "hook"])
def test_refused_by_save(name: str, tmp_path: Path) -> None:
    make, message = NOT_SAVED.get(name, (hooked, r"got 0 \(Linear\) with another hook\."))
    with pytest.raises(ValueError, match=r"\[save\] expects .*" + message):
        ndl.save(make(), tmp_path / "net")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_follow_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        ndl.save(small_net(), tmp_path / "net")
        optimizer = ndl.optim.SGD(small_net().parameters(), lr=0.1)
        save_checkpoint(tmp_path / "checkpoint", small_net(), optimizer, 1)
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == dict.fromkeys(
        ("net", "checkpoint"), 0o666 & ~mask
    )


def test_what_is_no_model_and_no_path(tmp_path: Path) -> None:
    for value in (5, ndl.Tensor([1.0]), nn.Linear):
        with pytest.raises(
            TypeError, match=r"^\[save\] expects a needle Module, such as torch2needle.convert gives, got .*\.$"
        ):
            ndl.save(value, tmp_path / "net.needle")
    for path in (5, None):
        with pytest.raises(TypeError, match=r"^\[load\] expects a path, got .*\.$"):
            ndl.load(path)
