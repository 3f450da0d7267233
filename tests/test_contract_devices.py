"""Backends, devices and their backend functions as the framework's contract has them."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import backend_ndarray as nd
from needle.backend_selection import BACKEND
from values import made, same

on_nd = pytest.mark.skipif(BACKEND != "nd", reason="about the default backend nd")


def run_python(code: str, backend: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "NEEDLE_BACKEND": backend}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


# -- backends and devices ------------------------------------------------------------------------------------------------


def test_unknown_backend() -> None:
    done = run_python("import needle", "cupy")
    assert "RuntimeError: Unknown needle array backend cupy" in done.stderr


@pytest.mark.parametrize(("backend", "device"), [("nd", "cpu()"), ("np", "cpu_numpy()")])
def test_backends_pick_the_default_device(backend: str, device: str) -> None:
    code = "import needle as ndl, numpy as np; print(ndl.default_device(), ndl.Tensor([1, 2]).device, ndl.init.ones(2).device)"
    assert run_python(code, backend).stdout.split() == [device] * 3


def test_hip_imports_without_a_device_and_fails_at_first_use() -> None:
    done = run_python(
        "import needle as ndl; print(ndl.default_device(), ndl.hip().enabled()); ndl.Tensor([1.0])", "hip"
    )
    assert done.stdout.split()[0] == "hip()"
    if done.stdout.split()[1] == "False":
        assert "RuntimeError: [hip] this machine or build has no such device" in done.stderr


def test_devices() -> None:
    for name in ("cpu", "cuda", "hip", "cpu_numpy"):
        device = getattr(ndl, name)()
        assert str(device) == repr(device) == f"{name}()"
        assert device == getattr(nd, name)()
        assert device == type(device)(name, None)  # by name
        assert hash(device) == hash(getattr(nd, name)())
        assert isinstance(device.enabled(), bool)
        assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device
    assert ndl.cpu() != ndl.cuda()
    assert ndl.cpu() != "cpu()"
    assert ndl.cpu().enabled()
    assert ndl.cpu_numpy().enabled()


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_missing_hardware_is_an_error_at_use(name: str) -> None:
    device = getattr(ndl, name)()
    if device.enabled():
        pytest.skip("the device is here")
    with pytest.raises(RuntimeError, match=rf"\[{name}\] this machine or build has no such device"):
        ndl.Tensor([1.0], device=device)
    with pytest.raises(AttributeError, match=rf"\[{name}\] this machine"):
        _ = device.Array
    with pytest.raises(AttributeError, match=r"\[cpu\] there is no function ewise_nothing"):
        _ = ndl.cpu().ewise_nothing


def test_import_paths() -> None:
    import needle.backend_ndarray.ndarray
    import needle.backend_numpy
    import needle.backend_selection as selection

    assert needle.backend_ndarray.ndarray.NDArray is nd.NDArray
    assert selection.NDArray is (np.ndarray if BACKEND == "np" else nd.NDArray)
    assert selection.array_api is (np if BACKEND == "np" else nd)
    assert set(selection.all_devices()) == {nd.cpu(), nd.cuda(), nd.hip(), nd.cpu_numpy()}
    assert needle.backend_numpy.__device_name__ == "numpy"


@on_nd
def test_dtype_is_a_string() -> None:
    assert type(ndl.Tensor([1.0]).dtype) is str
    assert type(nd.array([1.0]).dtype) is str


# -- backend functions ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "cpu_numpy"])
def device(request: Any) -> Iterator[Any]:
    yield getattr(ndl, request.param)()


def flat(device: Any, a: np.ndarray) -> Any:
    out = device.Array(a.size)
    device.from_numpy(a, out)
    return out


def read(device: Any, a: Any, *shape: int) -> np.ndarray:
    return device.to_numpy(a, shape, [int(np.prod(shape[i + 1 :])) for i in range(len(shape))], 0)


def test_arrays(device: Any) -> None:
    a = device.Array(12)
    assert a.size == 12
    assert isinstance(a.ptr(), int)
    assert a.ptr() != device.Array(12).ptr()
    assert device.__tile_size__ == 8
    assert device.__device_name__ == {"cpu": "cpu", "cpu_numpy": "numpy"}[device.name]
    device.fill(a, 2.5)
    assert (read(device, a, 12) == 2.5).all()


def test_to_and_from_numpy(device: Any) -> None:
    x = np.arange(12, dtype="float32").reshape(3, 4)
    a = flat(device, x)
    assert (read(device, a, 3, 4) == x).all()
    assert (device.to_numpy(a, (4, 3), (1, 4), 0) == x.T).all()
    assert (device.to_numpy(a, (3, 2), (4, 2), 1) == x[:, 1::2]).all()
    assert (device.to_numpy(a, (3, 4), (-4, -1), 11) == x[::-1, ::-1]).all()
    out = device.to_numpy(a, (2,), (0,), 5)
    out[:] = 0
    assert (read(device, a, 3, 4) == x).all()
    for shape, strides, offset in (((4, 4), (4, 1), 0), ((2,), (-1,), 0)):
        with pytest.raises(ValueError, match="reaches outside its storage of 48 bytes"):
            device.to_numpy(a, shape, strides, offset)


def test_compact(device: Any) -> None:
    x = np.random.randn(3, 4, 5).astype("float32")
    a, out = flat(device, x), device.Array(60)
    device.compact(a, out, (5, 3, 4), (1, 20, 5), 0)
    assert (read(device, out, 5, 3, 4) == x.transpose(2, 0, 1)).all()
    device.compact(a, out, (3, 4, 5), (-20, 5, -1), 44)
    assert (read(device, out, 3, 4, 5) == x[::-1, :, ::-1]).all()


def test_setitem_functions(device: Any) -> None:
    x = np.random.randn(4, 6).astype("float32")
    part = np.random.randn(2, 3).astype("float32")
    a = flat(device, x)
    device.ewise_setitem(flat(device, part), a, (2, 3), (6, -2), 10)
    x[1:3, 4::-2] = part
    assert (read(device, a, 4, 6) == x).all()
    device.scalar_setitem(4, 7.0, a, (2, 2), (12, 3), 1)
    x[::2, 1::3] = 7
    assert (read(device, a, 4, 6) == x).all()


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "eq": lambda a, b: (a == b).astype("float32"),
    "ge": lambda a, b: (a >= b).astype("float32"),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions(device: Any, name: str) -> None:
    x, y = np.random.randn(2, 40).astype("float32")
    y[::3] = x[::3]
    a, b, out = flat(device, x), flat(device, y), device.Array(40)
    getattr(device, f"ewise_{name}")(a, b, out)
    same(read(device, out, 40), BINARY[name](x, y))
    value = float(x[3])
    getattr(device, f"scalar_{name}")(a, value, out)
    same(read(device, out, 40), BINARY[name](x, np.float32(value)))
    assert read(device, out, 40).dtype == "float32"


@pytest.mark.parametrize("name", ["log", "exp", "tanh"])
def test_unary_functions(device: Any, name: str) -> None:
    x = (np.random.rand(40) + 0.1).astype("float32")
    a, out = flat(device, x), device.Array(40)
    getattr(device, f"ewise_{name}")(a, out)
    same(read(device, out, 40), getattr(np, name)(x))
    device.scalar_power(a, 2.5, out)
    same(read(device, out, 40), x**2.5)


@pytest.mark.parametrize(("m", "n", "p"), [(8, 8, 8), (16, 24, 8), (5, 7, 3), (128, 128, 128)])
def test_matmul_functions(device: Any, m: int, n: int, p: int) -> None:
    x, y = np.random.randn(m, n).astype("float32"), np.random.randn(n, p).astype("float32")
    want = x.astype("float64") @ y
    out = device.Array(m * p)
    device.matmul(flat(device, x), flat(device, y), out, m, n, p)
    same(read(device, out, m, p), want, 1e-4)
    t = device.__tile_size__
    if m % t or n % t or p % t:
        with pytest.raises(ValueError, match=r"\[matmul_tiled\] expects multiples of 8, got 5, 7 and 3\."):
            device.matmul_tiled(flat(device, x), flat(device, y), out, m, n, p)
        return
    tile = lambda a: np.ascontiguousarray(a.reshape(a.shape[0] // t, t, a.shape[1] // t, t).swapaxes(1, 2))  # noqa: E731
    device.matmul_tiled(flat(device, tile(x)), flat(device, tile(y)), out, m, n, p)
    same(read(device, out, m // t, p // t, t, t), tile(want), 1e-4)


def test_reduction_functions(device: Any) -> None:
    x = np.random.randn(6, 50).astype("float32")
    a, out = flat(device, x), device.Array(6)
    device.reduce_sum(a, out, 50)
    same(read(device, out, 6), x.sum(1))
    device.reduce_max(a, out, 50)
    same(read(device, out, 6), x.max(1))


def test_backend_functions_make_an_array_class() -> None:
    """A course program's use of a device: handles of NDArrays in its functions, NDArrays over its handles."""
    x, a = made(3, 4)
    out = nd.NDArray.make((3, 4), device=nd.cpu())
    nd.cpu().ewise_mul(a._handle, a._handle, out._handle)
    same(out, x * x)
    handle = nd.cpu().Array(6)
    nd.cpu().fill(handle, 3.0)
    view = nd.NDArray.make((2, 2), strides=(3, -1), device=nd.cpu(), handle=handle, offset=1)
    same(view, np.full((2, 2), 3.0))
    view[0, 1] = 5.0
    assert nd.cpu().to_numpy(handle, (6,), (1,), 0).tolist() == [5, 3, 3, 3, 3, 3]


def test_course_modules_are_there_after_importing_needle() -> None:
    code = "import needle as ndl; ndl.ops.ops_mathematic.MatMul, ndl.nn.nn_basic.Linear, ndl.data.datasets, ndl.all_devices()"
    subprocess.run([sys.executable, "-c", code], check=True)
