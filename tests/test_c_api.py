"""Exported models and `libneedle.so`: results bit for bit those of executables, programs in C and C++, files that are refused."""

from __future__ import annotations

import ctypes as c
import os
import shutil
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import nn, ops
from needle.autograd import Unsupported
from needle.backend_selection import BACKEND

if BACKEND == "np":
    pytest.skip("there is nothing to export", allow_module_level=True)

from c_library import FOLDER, Failed, Model, Tensor, addresses, check, library

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples" / "c"
rng = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype("float32")


def same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 33), nn.Linear(33, 5)

    def forward(self, x: Any, scale: Any = 2.0) -> Any:
        y = self.two(ops.relu(self.one(x)))
        return {"scores": y * scale, "best": ops.argmax(y, 1), "pair": (ops.tanh(y), x)}


def unet() -> tuple[Any, tuple]:
    torch = pytest.importorskip("torch")
    import torch2needle
    from torch2needle import models

    torch.manual_seed(0)
    model, x = models.UNet(3, 2, base=8).eval(), torch.randn(1, 3, 33, 46)
    return torch2needle.convert(model, (x,)), (x.numpy(),)


def transformer() -> tuple[Any, tuple]:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval(), (floats(2, 9, 16),)


def lstm() -> tuple[Any, tuple]:
    return nn.LSTM(6, 5, 2).eval(), (floats(4, 2, 6),)


CASES: dict[str, Callable[[], tuple[Any, tuple]]] = {
    "unet": unet,
    "transformer": transformer,
    "mlp": lambda: (Mlp().eval(), (floats(3, 7),)),
    "lstm": lstm,
    "of integers": lambda: (lambda ids, x: ops.reshape(x, (-1,))[ids], (np.array([3, 0, 5]), floats(2, 3))),
    "of float64": lambda: (lambda x: ops.exp(x) + x, (rng.standard_normal((3, 4)),)),
    "of nothing": lambda: (lambda x: ops.exp(x), (floats(0, 4),)),
    "of a number": lambda: (lambda x: ops.exp(x), (np.float32(0.5).reshape(()),)),
    "of its input": lambda: (lambda x: (x, ops.transpose(x)), (floats(2, 3),)),
}


def flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, dict):
        return [a for v in value.values() for a in flat(v)]
    return [a for v in value for a in flat(v)] if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_executable(name: str, tmp_path: Path) -> None:
    model, xs = CASES[name]()
    exe = ndl.compile(model, xs)
    wanted = flat(exe(*xs))
    exe.export(tmp_path / "model.ndlc")
    found = Model(tmp_path / "model.ndlc")
    assert (found.isa, found.plans) == (ndl.isa(), 1)
    for _ in range(2):
        assert all(same(a, b) for a, b in zip(found(*xs), wanted, strict=True))


def test_names_shapes_and_several_plans(tmp_path: Path) -> None:
    path, net = tmp_path / "model.ndlc", Mlp().eval()
    exe = ndl.compile(net, (floats(3, 7),))
    xs = [floats(n, 7) for n in (1, 3, 40)]
    exe.export(path, [(x,) for x in xs])
    model = Model(path)
    assert model.plans == 3
    for i, x in enumerate(xs):
        told = [(t.name.decode(), tuple(t.shape[: t.rank])) for t in model.tensors("output", i)]
        n = len(x)
        assert told == [("scores", (n, 5)), ("best", (n,)), ("pair.0", (n, 5)), ("pair.1", (n, 7))]
        assert [t.name for t in model.tensors("input", i)] == [b"x"]
        assert all(same(a, b) for a, b in zip(model(x, plan=i), flat(exe(x)), strict=True))
    one = path.stat().st_size
    exe.export(path, [(xs[0],)])
    assert path.stat().st_size > one / 2  # plans share their weights
    exe.export(path, [xs[0]])  # one argument alone, as `compile` takes it
    assert Model(path).plans == 1
    net.one.weight.data = net.one.weight * 2
    exe.export(path, [(xs[0],)])
    assert all(same(a, b) for a, b in zip(Model(path)(xs[0]), flat(exe(xs[0])), strict=True))


def test_inputs_have_their_places_as_names(tmp_path: Path) -> None:
    """Arguments that are no arrays are no inputs; a complex one is two."""

    def f(a: Any, flag: Any, rest: Any) -> Any:
        return a + rest["x"][1].real if flag else a

    z = (floats(3) + 1j * floats(3)).astype("complex64")
    ndl.compile(f, (floats(3), True, {"x": (2, z)})).export(tmp_path / "model.ndlc")
    model = Model(tmp_path / "model.ndlc")  # which the names live in
    names = [t.name.decode() for t in model.tensors("input")]
    assert names == ["a", "rest.x.1.real", "rest.x.1.imag"]


def test_several_instruction_sets_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, (net, xs) = tmp_path / "model.ndlc", lstm()
    exe = ndl.compile(net, xs)
    exe.export(path, isas=("scalar", ndl.isa()))
    model = Model(path)
    assert model.isa == ndl.isa() and all(same(a, b) for a, b in zip(model(*xs), flat(exe(*xs)), strict=True))
    exe.export(path, isas=("scalar",))
    model = Model(path)
    assert model.isa == "scalar"  # whatever this process runs
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(model(*xs), flat(exe(*xs)), strict=True))
    for isas, why in (
        (("mmx",), "NEEDLE_ISA expects scalar"),
        ((), "isas expects names"),
        ("avx2", "isas expects names"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=why):
            exe.export(path, isas=isas)
    with pytest.raises(Unsupported, match="expects a Module to plan for"):
        other = "scalar" if ndl.isa() != "scalar" else "avx2"
        ndl.compile(ops.exp, (floats(3),)).export(path, isas=(other,))
    assert Model(path).isa == "scalar"  # what fails leaves the old file


def partly_in_torch() -> Any:
    torch = pytest.importorskip("torch")
    import torch2needle

    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nextafter(x, x + 1) * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ndl.compile(torch2needle.convert(Net().eval(), (torch.zeros(3, 4),), fallback="torch"), (floats(3, 4),))


def test_what_has_no_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.ndlc"
    x = floats(3)
    refused = {
        "that another library runs in part": partly_in_torch,
    }
    for why, make in refused.items():
        with pytest.raises(Unsupported, match=rf"^\[export\] .*{why}.*\.$"):
            make().export(path)
    net = nn.Linear(3, 2)
    step = ndl.compile_step(net, ops.mse_loss, ndl.optim.SGD(net.parameters(), lr=0.1), (floats(1, 3), floats(1, 2)))
    with pytest.raises(Unsupported, match="got a training step"):
        step.export(path)
    exe = ndl.compile(ops.exp, (x,))
    with pytest.raises(OSError, match=r"^\[export\] cannot write .*\.$"):
        exe.export(tmp_path / "missing" / "model.ndlc")
    with pytest.raises(ValueError, match="there is no plan"):
        exe.export(path, [])
    with pytest.raises(TypeError, match=r"^\[export\] .* a list of calls, got one array of shape \(3,\)\.$"):
        exe.export(path, x)
    assert not path.exists() and not list(tmp_path.iterdir())
    exe.export(path)
    with pytest.raises(ValueError, match=r"^\[load\] .* was exported for libneedle\.so; .*\.$"):
        ndl.load(path)


# -- programs ------------------------------------------------------------------------------------------------------------


def flags() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "needle.config", "--cflags", "--libs"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def built(tmp_path: Path, *command: str) -> Path:
    if not shutil.which(command[0]):
        pytest.skip(f"there is no {command[0]}")
    subprocess.run([*command, *flags(), "-o", tmp_path / "program"], check=True)
    return tmp_path / "program"


def test_c_program_names_the_classes_of_photographs(tmp_path: Path) -> None:
    """To 1e-5 torch's five best of ResNet-18, for the middle of scikit-learn's two photographs."""
    torch = pytest.importorskip("torch")
    photographs = pytest.importorskip("sklearn.datasets").load_sample_images()
    import torch2needle
    from torch2needle.models import resnet18

    program = built(
        tmp_path, "gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", str(EXAMPLES / "classify.c")
    )
    torch.manual_seed(0)
    model = resnet18().eval()
    exe = torch2needle.compile(model, (torch.zeros(1, 3, 224, 224),))
    exe.export(tmp_path / "resnet18.ndlc")
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for name, pixels in zip(photographs.filenames, photographs.images, strict=True):
        height, width, _ = pixels.shape
        picture = tmp_path / f"{Path(name).stem}.ppm"
        picture.write_bytes(b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes())
        done = subprocess.run(
            [program, tmp_path / "resnet18.ndlc", picture], capture_output=True, text=True, check=True
        )
        top, left = (height - 224) // 2, (width - 224) // 2
        x = torch.tensor(pixels[top : top + 224, left : left + 224].copy()) / 255
        x = ((x - mean) / deviation).permute(2, 0, 1)[None]
        with torch.no_grad():
            want = model(x)[0].topk(5)
        assert same(Model(tmp_path / "resnet18.ndlc")(x.numpy())[0], exe(x.numpy()))
        rows = [line.removeprefix("class ").split(": ") for line in done.stdout.splitlines()]
        assert [int(i) for i, _ in rows] == want.indices.tolist()
        assert np.abs(np.array([float(v) for _, v in rows]) - want.values.numpy()).max() <= 1e-5
    bad = subprocess.run([program, tmp_path / "none", picture], capture_output=True, text=True)
    assert bad.returncode == 1 and bad.stderr.startswith("[open] cannot read ")


def test_cpp_program_runs_in_four_threads(tmp_path: Path) -> None:
    program = built(
        tmp_path, "g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", str(EXAMPLES / "threads.cpp")
    )
    net, xs = lstm()
    ndl.compile(net, xs).export(tmp_path / "model.ndlc")
    done = subprocess.run([program, tmp_path / "model.ndlc", "4", "50"], capture_output=True, text=True)
    assert done.returncode == 0 and ", 0 wrong" in done.stdout, done.stdout + done.stderr


def test_forked_children_run(tmp_path: Path) -> None:
    """Of a program whose threads run the model at that moment: what they hold waits for nobody in the child."""
    program = built(tmp_path, "gcc", "-std=gnu11", "-pthread", str(Path(__file__).parent / "fork_race.c"))
    ndl.compile(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval(), (floats(2, 16),)).export(
        tmp_path / "model.ndlc"
    )
    subprocess.run([program, tmp_path / "model.ndlc", "600"], check=True)


@pytest.mark.skipif(not (FOLDER / "lib" / "pkgconfig").exists(), reason="the library was copied alone")
def test_cmake_and_pkg_config_find_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "needle.config", "--pkgconfig"], capture_output=True, text=True, check=True
    )
    if shutil.which("pkg-config"):
        environment = {**os.environ, "PKG_CONFIG_PATH": done.stdout.strip()}
        told = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "needle >= 0.1.0"], env=environment, capture_output=True, text=True
        )
        assert told.returncode == 0 and "-lneedle" in told.stdout, told.stderr
    if not shutil.which("cmake"):
        pytest.skip("there is no cmake")
    found = f"-Dneedle_DIR={FOLDER}/lib/cmake/needle"
    subprocess.run(["cmake", "-S", EXAMPLES, "-B", tmp_path, found], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path], check=True, capture_output=True)
    assert subprocess.run([tmp_path / "classify"], capture_output=True).returncode == 1


def test_threads_of_python_share_a_model(tmp_path: Path) -> None:
    """ctypes lets go of the lock, so that runs are side by side."""
    net, _ = lstm()
    xs = [floats(4, 2, 6) for _ in range(4)]
    exe = ndl.compile(net, (xs[0],))
    exe.export(tmp_path / "model.ndlc")
    model, wrong = Model(tmp_path / "model.ndlc"), []
    wanted = [flat(exe(x)) for x in xs]

    def work(i: int) -> None:
        for _ in range(50):
            wrong.extend(not same(a, b) for a, b in zip(model(xs[i]), wanted[i], strict=True))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(wrong) == 4 * 50 * len(wanted[0]) and not any(wrong)


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_files_that_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "model.ndlc"
    ndl.compile(Mlp().eval(), (floats(3, 7),)).export(path)
    data = path.read_bytes()
    first = (32 + int.from_bytes(data[16:24], "little") + 8 + 63) // 64 * 64  # the byte at which constants begin
    damaged = {
        "is no model that this library runs: it is none that exe.export wrote": b"PK\x03\x04" + data[4:],
        "it is cut off": data[:20],
        "this library reads 3": data[:8] + struct.pack("<I", 1) + data[12:],
        "bytes of": data[:-1],
        "its head does not fit into it": data[:16] + struct.pack("<Q", 1 << 40) + data[24:],
        "its head is damaged": data[:40] + bytes([data[40] ^ 1]) + data[41:],
        "constant [0-9]+ is damaged": data[:first] + bytes([data[first] ^ 1]) + data[first + 1 :],
        "it is empty": b"",
    }
    for why, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(Failed, match=rf"^\[open\] .*{why}.*\.$"):
            Model(path)
    with pytest.raises(Failed, match="No such file"):
        Model(tmp_path / "missing")
    with pytest.raises(Failed, match="it is no regular file"):
        Model(tmp_path)


def test_outputs_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.ndlc"
    ndl.compile(lambda x, y: (x + y, x - y), (floats(4), floats(4))).export(path)
    model, memory = Model(path), np.zeros(16, "float32")
    at = memory.ctypes.data

    def run(*starts: int) -> None:
        places = [at + 4 * i for i in starts]
        check(library.needle_run(model.handle, 0, (c.c_void_p * 2)(*places[:2]), (c.c_void_p * 2)(*places[2:])))

    run(0, 0, 8, 12)  # inputs may share memory, and everything may touch
    for starts, why in {
        (0, 4, 8, 11): "output 1 expects memory of its own, got some of output 0",
        (0, 4, 12, 7): "output 1 expects memory of its own, got some of input 1",
        (0, 4, 1, 12): "output 0 expects memory of its own, got some of input 0",
    }.items():
        with pytest.raises(Failed, match=why):
            run(*starts)


def test_a_file_cut_at_any_byte_or_changed_there_runs_as_before_or_not_at_all(tmp_path: Path) -> None:
    path, x = tmp_path / "model.ndlc", floats(2, 4)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    ndl.compile(net, (x,)).export(path)
    data, wanted = path.read_bytes(), Model(path)(x)
    other, ran = tmp_path / "other.ndlc", 0
    for i in range(len(data)):
        other.write_bytes(data[:i])
        with pytest.raises(Failed, match=r"^\[open\] .*\.$"):
            Model(other)
        other.write_bytes(data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :])
        try:
            found = Model(other)
        except Failed as e:
            assert str(e).startswith("[open] ")
        else:  # between what counts
            assert same(found(x)[0], wanted[0])
            ran += 1
    assert ran < 4 * 64


def test_wrong_calls_are_sentences(tmp_path: Path) -> None:
    path = tmp_path / "model.ndlc"
    ndl.compile(ops.exp, (floats(3, 4),)).export(path)
    model, tensor, x = Model(path), Tensor(), np.zeros(16, "float32")
    place, null = addresses([x]), c.c_void_p()
    odd = (c.c_void_p * 1)(x.ctypes.data + 2)
    calls = {
        "expects a path": lambda: library.needle_open(None, c.byref(c.c_void_p())),
        r"^\[open\] cannot read /aa.* \.\.\. .*a: File name too long\.$": lambda: library.needle_open(
            b"/" + b"a" * 5000, c.byref(c.c_void_p())
        ),
        "expects a model, got NULL": lambda: library.needle_run(null, 0, place, place),
        "has 1 plans, got number 1": lambda: library.needle_run(model.handle, 1, place, place),
        "has 1 plans, got number -1": lambda: library.needle_input(model.handle, -1, 0, c.byref(tensor)),
        "has 1 inputs, got number 1": lambda: library.needle_input(model.handle, 0, 1, c.byref(tensor)),
        "has 1 outputs, got number -1": lambda: library.needle_output(model.handle, 0, -1, c.byref(tensor)),
        "expects a tensor to fill": lambda: library.needle_output(model.handle, 0, 0, None),
        "expects addresses of inputs": lambda: library.needle_run(model.handle, 0, None, place),
        r"output 0 expects float32 \(3, 4\) at a multiple of 4 bytes, got NULL": lambda: library.needle_run(
            model.handle, 0, place, (c.c_void_p * 1)()
        ),
        r"input 0 expects float32 \(3, 4\) at a multiple of 4 bytes, got an address 2 beyond one\.": lambda: (
            library.needle_run(model.handle, 0, odd, place)
        ),
        "output 0 expects memory of its own, got some of input 0": lambda: library.needle_run(
            model.handle, 0, place, (c.c_void_p * 1)(x.ctypes.data + 16)
        ),
        "expects 1 to 1024, got 0": lambda: library.needle_set_threads(0),
        "expects 1 to 1024, got 100000": lambda: library.needle_set_threads(100000),
    }
    for why, call in calls.items():
        with pytest.raises(Failed, match=why):
            status = call()
            assert status != 0
            raise Failed(library.needle_last_error().decode())
    assert library.needle_input_count(model.handle, 7) == -1 and library.needle_plan_count(null) == 0
    opened = c.c_void_p(1)
    assert library.needle_open(None, c.byref(opened)) != 0 and not opened  # nothing that needle_close would free
    library.needle_close(null)
    assert library.needle_threads() == ndl.get_num_threads()
    assert library.needle_version() == b"0.1.0"
