"""needle's kernels and torch's functions called from Relax, and the partition that sends fused layers to them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
torch = pytest.importorskip("torch")

from tvm import relax  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle.relax  # noqa: E402, F401  (registers torch's functions)
from needle import nn  # noqa: E402
from needle.tvm import build, target_of  # noqa: E402
from needle.tvm.vendor import call_packed, register, to_tvm_vendor  # noqa: E402

pytestmark = pytest.mark.skipif(ndl.default_device() == ndl.cpu_numpy(), reason="needle's kernels need NDArrays")


def random(*shape: int) -> np.ndarray:
    return np.random.standard_normal(shape).astype("float32")


def calls(module: Any) -> dict[str, int]:
    names = re.findall(r'"(env\.\w+)"', module["main"].script())
    return {n: names.count(n) for n in names}


def run(module: Any, *arrays: np.ndarray) -> np.ndarray:
    vm = relax.VirtualMachine(build(module, target_of()), tvm.cpu())
    return vm["main"](*map(tvm.runtime.tensor, arrays)).numpy()


# -- packed functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["env", "env.torch"])
def test_packed_functions(prefix: str) -> None:
    def check(name: str, want: torch.Tensor, *args: Any) -> None:
        out = tvm.runtime.empty(tuple(want.shape), "float32")
        given = [tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in args]
        tvm.get_global_func(f"{prefix}.{name}")(*given, out)
        np.testing.assert_allclose(out.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)

    x, w, b = random(5, 7), random(4, 7), random(4)
    tx, tw, tb = map(torch.from_numpy, (x, w, b))
    check("relu", tx.relu(), x)
    check("linear", torch.nn.functional.linear(tx, tw, tb), x, w, b)
    image, kernel = random(2, 4, 9, 8), random(6, 2, 3, 3)
    ti, tk = torch.from_numpy(image), torch.from_numpy(kernel)
    bias = random(6)
    want = torch.conv2d(torch.nn.functional.pad(ti, (2, 1, 1, 0)), tk, torch.from_numpy(bias), (2, 1), 0, (1, 2), 2)
    numbers = (2, 1, 1, 2, 0, 1, 1, 2, 2)  # stride, top left bottom right, dilation, groups
    check("conv2d", want, image, kernel, bias, *numbers)
    plain = random(6, 4, 3, 3)
    check("conv2d", torch.conv2d(ti, torch.from_numpy(plain), torch.from_numpy(bias)), image, plain, bias)
    if prefix == "env":
        check("linear_relu", torch.nn.functional.linear(tx, tw, tb).relu(), x, w, b)
        check("conv2d_relu", want.relu(), image, kernel, bias, *numbers)


def test_arrays_are_shared_not_copied() -> None:
    seen = []
    register("env.test_addresses", lambda x, n, out: seen.append((x.numpy_view().ctypes.data, n, out.numpy_view())))
    x, out = tvm.runtime.tensor(random(4)), tvm.runtime.empty((4,), "float32")
    tvm.get_global_func("env.test_addresses")(x, 3, out)
    assert seen[0][:2] == (x.data_ptr(), 3) and seen[0][2].ctypes.data == out.data_ptr()


def test_call_from_a_module() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 5), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(call_packed("env.relu", [x], (3, 5)))
            y = builder.emit_output(builder.emit(call_packed("env.torch.relu", [y], (3, 5))))
        builder.emit_func_output(y)
    a = random(3, 5)
    np.testing.assert_array_equal(run(builder.get(), a), np.maximum(a, 0))


# -- the partition -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """conv-bn-relu, conv-relu, a convolution read twice, one without ReLU, linear-relu and linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.conv3, self.conv4 = nn.Conv(8, 8, 3, stride=2), nn.Conv(8, 8, 3), nn.Conv(8, 8, 1)
        self.linear1, self.linear2 = nn.Linear(8 * 16, 10), nn.Linear(10, 4)
        self.relu, self.flat = nn.ReLU(), nn.Flatten()

    def forward(self, x: Any) -> Any:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.conv2(x))
        y = self.conv3(x)
        x = self.conv4(self.relu(y) + y)
        return self.linear2(self.relu(self.linear1(self.flat(x))))


def settled(net: nn.Module) -> nn.Module:
    """In evaluation mode, with running statistics that change something."""
    for m in net.modules() if hasattr(net, "modules") else ():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.data = ndl.Tensor(random(*m.running_mean.shape))
            m.running_var.data = ndl.Tensor(np.random.uniform(0.5, 2, m.running_var.shape).astype("float32"))
    return net.eval()


@pytest.mark.parametrize("fused", [False, True])
def test_partition(fused: bool) -> None:
    net = settled(Net())
    x = random(2, 3, 8, 8)
    want = net(ndl.Tensor(x)).numpy()
    model = operator_fusion.fuse(ndl.graph.symbolic(net)) if fused else net
    module = to_tvm_vendor(model, x)
    assert calls(module) == {"env.conv2d_relu": 2, "env.linear_relu": 1}
    others = " ".join(v.name_hint for v in module.get_global_vars())
    assert "conv" in others and ("matmul" in others or "linear" in others)  # conv3, conv4 and linear2 stay with TVM
    np.testing.assert_allclose(run(module, x), want, rtol=1e-4, atol=1e-5)


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="training mode"):
        to_tvm_vendor(Net().train(), random(2, 3, 8, 8))
