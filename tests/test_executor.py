"""compile: values, shapes, memory, threads, refreshed weights, kinds of arrays, errors."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import needle as ndl
import operator_fusion
from needle import nn
from needle.autograd import Spec
from needle.executor.memory import Lifetime, lower_bound, plan_offsets
from needle.graph import map_structure, symbolic, trace
from needle.nn.module import Parameter
from needle.ops.fused.layer import FusedLayer
from needle.ops.nn.conv import Conv2d
from needle.ops.nn.pool import MaxPool2d


def small_net(channels: int = 16) -> nn.Module:
    """Convolutions, batch norms, a residual add, a concat, pools and a linear layer: every path of the planner."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv(3, channels, 3, padding=1, layout="torch")
            self.bn1 = nn.BatchNorm2d(channels)
            self.conv2 = nn.Conv(channels, channels, 3, padding=1, layout="torch")
            self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
            self.last = nn.Conv(2 * channels, 10, 1, layout="torch")
            self.fc = nn.Linear(10, 7, layout="torch")

        def forward(self, x):
            a = ndl.ops.relu(self.bn1(self.conv1(x)))
            b = ndl.ops.relu(self.conv2(a) + a)
            up = self.up(ndl.ops.max_pool2d(b, 2))
            rows, columns = b.shape[2] - up.shape[2], b.shape[3] - up.shape[3]
            both = ndl.ops.concat((b, ndl.ops.pad(up, (0, columns, 0, rows))), 1)
            maps = ndl.ops.sigmoid(self.last(both))
            return maps, self.fc(ndl.ops.flatten(ndl.ops.adaptive_avg_pool2d(maps, 1), 1))

    np.random.seed(0)
    net = Net()
    net.bn1.running_mean.data = ndl.Tensor(np.random.rand(channels).astype("float32"))
    net.bn1.running_var.data = ndl.Tensor(np.random.rand(channels).astype("float32") + 0.5)
    return net.eval()


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, dtype="float32")


def close(got, want, tolerance: float = 2e-5) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("channels", [16, 24, 5])
@pytest.mark.parametrize("shape", [(1, 3, 16, 16), (3, 3, 17, 23), (2, 3, 9, 8)])
def test_compiled_equals_eager(shape: tuple[int, ...], channels: int) -> None:
    net, x = small_net(channels), image(*shape)
    exe = ndl.compile(net, (image(1, 3, 12, 12),))
    for got, want in zip(exe(x), net(ndl.Tensor(x)), strict=True):
        close(got, want.numpy())


def test_growing_concats_share_one_memory() -> None:
    """A list that grows by one convolution and is joined anew for each, as in a DenseNet: nothing is copied or reordered."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv(3, 32, 3, padding=1, layout="torch")
            for i in range(3):
                setattr(self, f"norm{i}", nn.BatchNorm2d(32 + 16 * i))
                setattr(self, f"conv{i}", nn.Conv(32 + 16 * i, 16, 3, padding=1, layout="torch"))

        def forward(self, x):
            parts = [self.stem(x)]
            for i in range(3):
                y = ndl.ops.relu(getattr(self, f"norm{i}")(ndl.ops.concat(parts, 1)))
                parts.append(getattr(self, f"conv{i}")(y))
            return ndl.ops.adaptive_avg_pool2d(ndl.ops.concat(parts, 1), 1), ndl.ops.concat(parts[:2], 1)

    np.random.seed(0)
    net = Dense().eval()
    for model in (net, operator_fusion.fuse(symbolic(net))):
        x = image(2, 3, 9, 7)
        exe = ndl.compile(model, (x,))
        for got, want in zip(exe(x), net(ndl.Tensor(x)), strict=True):
            close(got, want.numpy())
        assert "copy" not in exe.last.info.names
        assert exe.last.info.names.count("to_blocked") == 1


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["conv", "transposed", "linear", "linear-needle"])
def test_batch_norms_are_folded(kind: str, groups: int) -> None:
    layer, norm, x = {
        "conv": lambda: (nn.Conv(6, 8, 3, groups=groups, layout="torch"), nn.BatchNorm2d(8), image(2, 6, 7, 5)),
        "transposed": lambda: (
            nn.ConvTranspose2d(6, 8, 3, stride=2, groups=groups),
            nn.BatchNorm2d(8),
            image(2, 6, 7, 5),
        ),
        "linear": lambda: (nn.Linear(6, 8, layout="torch"), nn.BatchNorm1d(8), image(4, 6)),
        "linear-needle": lambda: (nn.Linear(6, 8), nn.BatchNorm1d(8), image(4, 6)),
    }[kind]()
    for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        t.data = ndl.Tensor(np.random.rand(8).astype("float32") + 0.5)
    net = nn.Sequential(layer, norm).eval()
    exe = ndl.compile(net, (x,))
    close(exe(x), net(ndl.Tensor(x)).numpy())
    assert "batch_norm" not in exe.plan.names


def test_inputs_of_any_stride_and_kind() -> None:
    net = small_net()
    x = image(16, 3, 18, 2)
    strided = x.transpose(3, 1, 0, 2)[:, :, :, ::-1]
    exe = ndl.compile(net, (strided,))
    want = net(ndl.Tensor(np.ascontiguousarray(strided)))
    got = exe(strided)
    assert isinstance(got[0], np.ndarray)
    close(got[0], want[0].numpy())
    assert isinstance(exe(ndl.Tensor(np.ascontiguousarray(strided)))[1], ndl.Tensor)
    torch = pytest.importorskip("torch")
    y = exe(torch.from_numpy(np.ascontiguousarray(strided)))
    assert isinstance(y[0], torch.Tensor)
    close(y[0].numpy(), want[0].numpy())


def test_run_into_writes_given_arrays() -> None:
    net, x = small_net(), image(2, 3, 16, 16)
    exe = ndl.compile(net, (x,))
    maps, scores = np.zeros((2, 10, 32, 16), "float32")[:, :, ::2], np.zeros((2, 7), "float32")
    exe.run_into((maps, scores), x)
    close(maps, exe(x)[0])
    close(scores, exe(x)[1])


def test_changed_parameters_are_packed_again() -> None:
    net, x = small_net(), image(1, 3, 16, 16)
    exe = ndl.compile(net, (x,))
    before = exe(x)[0].copy()
    opt = ndl.optim.SGD(net.parameters(), lr=0.5)
    net.train()
    (net(ndl.Tensor(x))[0] ** 2).sum().backward()
    opt.step()
    net.eval()
    after = exe(x)
    close(after[0], net(ndl.Tensor(x))[0].numpy())
    assert np.abs(after[0] - before).max() > 1e-4
    net.fc.weight.data = net.fc.weight.data * 2
    close(exe(x)[1], net(ndl.Tensor(x))[1].numpy())
    exported = np.from_dlpack(net.fc.bias.cached_data)
    with_write = exported if exported.flags.writeable else net.fc.bias.cached_data.numpy_view()
    with_write[...] = 3
    exe.refresh()
    close(exe(x)[1], net(ndl.Tensor(x))[1].numpy())


class Joined(ndl.nn.Module):
    """Two inputs, the second maybe none, and two results."""

    def forward(self, x, y=None):
        z = x * 2 if y is None else x * 2 + y
        return {"sum": z, "relu": (z.relu(),)}


def test_numpy_arrays_of_every_kind() -> None:
    """What goes to the plan as it is and what does not give the same."""
    net, (x, y) = Joined(), (image(3, 5), image(3, 5))
    exe = ndl.compile(net, (x, y))
    locked = x.copy()
    locked.flags.writeable = False
    shifted = np.frombuffer(b"." + x.tobytes(), "uint8")[1:].view("float32").reshape(3, 5)
    kinds = [
        x,
        locked,
        np.asfortranarray(x),
        image(3, 10)[:, ::2],
        x[::-1],
        shifted,
        x.astype(">f4"),
        np.array(x, "float64"),
    ]
    for a in kinds + kinds[::-1]:
        for b in (y, y.T.copy().T):
            out = exe(a, b)
            assert isinstance(out["sum"], np.ndarray) and isinstance(out["relu"][0], np.ndarray)
            close(out["sum"], np.array(a * 2 + b))
            close(out["relu"][0], np.maximum(np.array(a * 2 + b), 0))
    close(exe(x)["sum"], x * 2)
    close(exe(x[:2], y[:2])["sum"], x[:2] * 2 + y[:2])
    close(exe(x, y)["sum"], x * 2 + y)
    out = exe(x, y)["sum"]
    kept = out.copy()
    exe(y, x)
    assert np.array_equal(out, kept)  # results are the caller's
    close(exe(x, y=y)["sum"], x * 2 + y)
    with pytest.raises(TypeError, match=r"^\[executable\] got an unexpected keyword argument 'z'\.$"):
        exe(x, z=y)
    with pytest.raises(TypeError, match="positional arguments"):
        exe(x, y, x)


def test_no_python_inside_a_run() -> None:
    net, x = small_net(), image(1, 3, 32, 32)
    exe = ndl.compile(net, (x,))
    plan, events, runs = exe.plan.core, [], []
    inside = False

    def watch(frame, event, arg) -> None:
        nonlocal inside
        if event in ("c_call", "c_return") and getattr(arg, "__name__", "") in ("run_new", "run_numpy"):
            inside = event == "c_call"
            runs.append(arg.__name__)
        elif inside:
            events.append((event, frame.f_code.co_name))

    assert plan is not None
    sys.setprofile(watch)
    try:
        exe(x)
        exe(ndl.Tensor(x))
    finally:
        sys.setprofile(None)
    assert runs == ["run_numpy"] * 4 + ["run_new"] * 2  # the first way declines the tensor
    assert events == []


def test_the_gil_is_free_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a switch interval of days a waiting thread goes on only where the running one lets it."""
    net, x = small_net(64), image(1, 3, 256, 256)
    exe = ndl.compile(net, (x,))
    started, go, went = threading.Event(), threading.Lock(), []

    def wait() -> None:
        started.set()
        go.acquire()
        went.append(True)

    thread, before = threading.Thread(target=wait), sys.getswitchinterval()
    go.acquire()
    thread.start()
    started.wait()
    time.sleep(0.1)  # until it waits for the lock
    sys.setswitchinterval(1e5)
    try:
        go.release()
        for _ in range(1000):
            sum(range(1000))
        kept = not went
        for _ in range(200):
            exe(x)
            if went:
                break
        freed = bool(went)
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert kept and freed


def with_threads(given: str) -> subprocess.CompletedProcess:
    code = "import needle; print(needle.get_num_threads())"
    env = {**os.environ, "NEEDLE_NUM_THREADS": given, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(("given", "want"), [("3", 3), (" 1", 1)])
def test_threads_by_environment(given: str, want: int) -> None:
    assert int(with_threads(given).stdout) == want
    assert int(with_threads("").stdout) >= 1


@pytest.mark.parametrize("given", ["four", "0", "-2", "2.5", "4x"])
def test_threads_by_environment_that_are_no_number(given: str) -> None:
    done = with_threads(given)
    assert done.returncode == 1
    want = f"RuntimeError: [needle] NEEDLE_NUM_THREADS expects a whole number of at least 1, got {given}."
    assert done.stderr.splitlines()[-1] == want


def test_runs_in_two_threads_agree() -> None:
    net, x = small_net(32), image(1, 3, 64, 64)
    exe = ndl.compile(net, (x,))
    want = exe(x)[0].copy()
    wrong = []

    def run() -> None:
        for _ in range(20):
            if not np.array_equal(exe(x)[0], want):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert exe.memory["arenas"] <= 3


def live_bytes(net: nn.Module, shape: tuple[int, ...]) -> int:
    """Largest sum of live bytes of the unaliased trace: every op's result has memory of its own until its last use."""
    graph = trace(net, Spec(shape))
    last = {used: i for i, n in enumerate(graph) for used in n.inputs()}
    change = [0] * (len(graph.nodes) + 1)
    for i, n in enumerate(graph):
        if n.kind == "op" and n in last:
            nbytes = 4 * int(np.prod(n.meta["spec"].shape))
            change[i] += nbytes
            change[last[n] + 1] -= nbytes
    return int(np.cumsum(change).max())


def test_arena_is_within_a_tenth_of_the_live_bytes() -> None:
    net, x = small_net(32), image(2, 3, 64, 64)
    exe = ndl.compile(net, (x,))
    assert exe.memory["arena"] <= 1.10 * live_bytes(net, x.shape)


def resident_kib() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))


def test_a_second_run_grows_memory_by_less_than_a_mebibyte() -> None:
    net, x = small_net(32), image(1, 3, 256, 256)
    exe = ndl.compile(net, (x,))
    exe(x)
    gc.collect()
    before = resident_kib()
    for _ in range(10):
        exe(x)
    gc.collect()
    assert resident_kib() - before < 1024


def test_offsets_never_overlap() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        buffers = []
        for _ in range(rng.integers(1, 40)):
            first = int(rng.integers(0, 30))
            buffers.append(Lifetime(int(rng.integers(1, 5000)), first, first + int(rng.integers(0, 10))))
        offsets, total = plan_offsets(buffers)
        assert total >= lower_bound(buffers)
        for i, a in enumerate(buffers):
            assert offsets[i] + a.nbytes <= total
            for j, b in enumerate(buffers[:i]):
                if a.first <= b.last and b.first <= a.last:
                    assert offsets[i] + a.nbytes <= offsets[j] or offsets[j] + b.nbytes <= offsets[i]


def test_constant_outputs_and_outputs_that_are_inputs() -> None:
    weight = nn.Parameter(np.arange(4, dtype="float32"))
    exe = ndl.compile(lambda x: {"x": x, "w": weight * 2, "sum": [x + weight, x + weight]}, (image(2, 4),))
    out = exe(image(2, 4))
    close(out["x"], image(2, 4))
    close(out["w"], 2 * np.arange(4))
    close(out["sum"][1], image(2, 4) + np.arange(4))


class TestErrors:
    def test_training_mode(self) -> None:
        with pytest.raises(
            ValueError, match=r"\[compile\] 1 modules are in training mode \(first: bn1\); call net.eval\(\)."
        ):
            ndl.compile(small_net().train(), (image(1, 3, 8, 8),))

    def test_wrong_channels(self) -> None:
        exe = ndl.compile(small_net(), (image(1, 3, 8, 8),))
        with pytest.raises(ValueError, match=r"\[conv2d\] .*3.*4"):
            exe(image(1, 4, 8, 8))

    def test_wrong_rank(self) -> None:
        exe = ndl.compile(small_net(), (image(1, 3, 8, 8),))
        with pytest.raises(ValueError, match=r"\["):
            exe(image(3, 8))

    def test_wrong_dtype(self) -> None:
        exe = ndl.compile(small_net(), (image(1, 3, 8, 8),))
        with pytest.raises((TypeError, ValueError), match=r"\[.*\].*(float64|dtype)"):
            exe(image(1, 3, 8, 8).astype("float64"))

    def test_wrong_output(self) -> None:
        net, x = small_net(), image(1, 3, 8, 8)
        exe = ndl.compile(net, (x,))
        with pytest.raises(ValueError, match=r"\[executable\] output 0 expects"):
            exe.run_into((np.zeros((1, 10, 8, 9), "float32"), np.zeros((1, 7), "float32")), x)


class Separable(nn.Module):
    """Layers that a depthwise convolution may follow, and what may come after it."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Conv(8, 32, 1, layout="torch")
        self.grouped = nn.Conv(32, 32, 3, padding=1, groups=2, layout="torch")
        self.dense = nn.Conv(32, 32, 3, padding=1, layout="torch")
        self.spatial = nn.Conv(32, 32, 3, padding=1, groups=32, layout="torch")
        self.tall = nn.Conv(32, 32, (128, 1), padding=(64, 0), groups=32, layout="torch")


PAIRS = {  # what runs -> whether the depthwise convolution is one step with the one before
    "alone": (lambda net, x: net.spatial(net.point(x)), True),
    "before a layer with a choice": (lambda net, x: net.dense(net.spatial(net.point(x))), True),
    "two readers": (lambda net, x: net.spatial(p := net.point(x)) + p, False),
    "an output, too": (lambda net, x: (net.spatial(p := net.point(x)), p), False),
    "a step between": (lambda net, x: net.spatial(ndl.ops.relu(net.point(x))), False),
    "groups": (lambda net, x: net.spatial(net.grouped(net.point(x))), False),
    "a layer with a choice": (lambda net, x: net.spatial(net.dense(net.point(x))), False),
    "too many rows at a time": (lambda net, x: net.tall(net.point(ndl.ops.concat((x,) * 4, 3))), False),
    "padding below zero": (
        lambda net, x: Conv2d(padding=(-1, -2, 0, 0), groups=32)(net.point(x), net.spatial.weight),
        False,
    ),
    "a slice of a concat": (lambda net, x: ndl.ops.concat((p := net.point(x), net.spatial(p)), 1), False),
}


POOLS = {  # a layer and what follows -> whether both are one step
    "relu": (FusedLayer(Conv2d(padding=(1,) * 4), "relu"), {"kernel_size": (2, 2), "stride": (2, 2)}, True),
    "no activation": (Conv2d(padding=(1,) * 4), {"kernel_size": (2, 2), "stride": (2, 2)}, True),
    "another activation": (
        FusedLayer(Conv2d(padding=(1,) * 4), "silu"),
        {"kernel_size": (2, 2), "stride": (2, 2)},
        False,
    ),
    "overlapping windows": (Conv2d(padding=(1,) * 4), {"kernel_size": (3, 3), "stride": (2, 2)}, False),
    "padding": (Conv2d(padding=(1,) * 4), {"kernel_size": (2, 2), "stride": (2, 2), "padding": (1, 1)}, False),
    "a last window of one row": (
        Conv2d(padding=(1,) * 4),
        {"kernel_size": (2, 2), "stride": (2, 2), "ceil_mode": True},
        False,
    ),
}


@pytest.mark.parametrize("case", POOLS)
def test_winograd_convolution_and_pool_as_one_step(case: str) -> None:
    conv, pool, merged = POOLS[case]
    weight, x = Parameter(image(32, 32, 3, 3)), image(2, 32, 27, 30)
    exe = ndl.compile(lambda v: MaxPool2d(**pool)(conv(v, weight)), (x,))
    alone = ndl.compile(lambda v: conv(v, weight), (x,))
    want = MaxPool2d(**pool)(ndl.Tensor(alone(x)))
    assert (exe(x) == want.numpy()).all()
    assert "conv2d_winograd_f4" in exe.plan.names
    assert ("max_pool2d" not in exe.plan.names) == merged
    (option,) = exe.plan.options
    assert exe.plan.names[option.step] == "conv2d_winograd_f4"


@pytest.mark.parametrize("case", PAIRS)
def test_convolution_and_depthwise_as_one_step(case: str) -> None:
    (run, merged), net, x = PAIRS[case], Separable().eval(), image(2, 8, 20, 20)
    exe = ndl.compile(lambda v: run(net, v), (x,))
    got, want = exe(x), run(net, ndl.Tensor(x))
    for g, w in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, want)), strict=True):
        close(g, w.numpy())
    assert ("conv2d_depthwise" in exe.plan.names) == merged
    assert "depthwise_blocked" in exe.plan.names or merged
    for option in exe.plan.options:
        assert exe.plan.names[option.step].startswith("conv2d_") and option.layer.startswith("conv 3x3")
        assert exe.plan.names[option.step] != "conv2d_depthwise"


def test_profile_names_every_step() -> None:
    net, x = small_net(), image(1, 3, 16, 16)
    exe = ndl.compile(net, (x,))
    rows = exe.profile(x, rounds=3)
    assert [r[0] for r in rows] == exe.plan.names
    assert all(seconds >= 0 for _, _, seconds in rows)
    assert "conv2d_blocked" in str(exe.plan)


def test_structure_of_outputs_survives() -> None:
    graph = trace(lambda a, b: {"s": (a + b, [a * b, None])}, ndl.Tensor(image(2, 2)), ndl.Tensor(image(2, 2)))
    names = map_structure(graph.output.args[0], lambda n: n if n is None else n.kind)
    assert names == {"s": ("op", ["op", None])}
