"""What a forward asks of sizes: torch.fx answers as on the example, and the net holds for inputs that answer alike."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import needle as ndl
import operator_fusion
import torch2needle
from needle.nn.functional import GuardError

T = torch.Tensor


class Asks(nn.Module):
    def __init__(self, step: Callable) -> None:
        super().__init__()
        self.conv, self.norm, self.step = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), step

    def forward(self, x: T) -> T:
        return self.step(self, self.norm(self.conv(x)))


def padded(self: Any, x: T) -> T:
    """Windows of four by four, as of Swin (Liu et al., 2021)."""
    _, _, h, w = x.shape
    if h % 4 != 0 or w % 4:
        x = F.pad(x, (0, -w % 4, 0, (4 - h % 4) % 4))
    return x.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).mean((2, 4))


def compared(self: Any, x: T) -> T:
    return x.mean((2, 3)) if x.shape[2] > max(6, x.shape[0]) and len(x.shape) == 4 else x.amax((2, 3))


def typed(self: Any, x: T) -> T:
    with torch.autocast(device_type=x.device.type, enabled=False):
        return x * 2 if x.dtype is torch.float32 and isinstance(x.shape[0], int) else x


def kinds(self: Any, x: T) -> T:
    """Python's types of what it computes of sizes."""
    h, w = x.shape[2], x.shape[3]
    told = [isinstance(n, int) for n in (h * 2, h / 2, h * 1.0, h**2, h // w, 2.0 // h, -h)]
    told += [isinstance(h / 2, float), isinstance(h > w, bool), isinstance(x.shape + x.shape, tuple)]
    return x * (sum(2**i for i, t in enumerate(told) if t) / 1024)


def kept(self: Any, x: T) -> T:
    """What one call keeps, the next one reads."""
    held, key = vars(self).setdefault("held", {}), str(x.device)
    if key not in held:
        held[key] = self.norm.weight.exp()
    return x * held[key][:, None, None]


def written(self: Any, x: T) -> T:
    x = x.clone()
    if x.shape[3] % 2 == 0:
        x[:, :, ::2] *= 2
    return x


CASES = {
    "padded": (padded, (2, 3, 8, 6), [(1, 3, 12, 5), (3, 3, 4, 9)], [(2, 3, 8, 8)]),
    "not padded": (padded, (1, 3, 8, 4), [(5, 3, 12, 16)], [(1, 3, 8, 6), (1, 3, 9, 4)]),
    "compared": (compared, (2, 3, 9, 5), [(6, 3, 8, 1), (1, 3, 50, 3)], [(2, 3, 6, 5), (9, 3, 9, 5)]),
    "typed": (typed, (2, 3, 5, 6), [(1, 3, 7, 1), (3, 3, 1, 2)], []),
    "kinds": (kinds, (2, 3, 5, 6), [(1, 3, 7, 1), (3, 3, 1, 2)], []),
    "kept": (kept, (2, 3, 5, 6), [(1, 3, 7, 1), (3, 3, 1, 2)], []),
    "written": (written, (2, 3, 5, 6), [(1, 3, 7, 2), (3, 3, 1, 8)], [(2, 3, 5, 5)]),
}


def made(name: str) -> Asks:
    torch.manual_seed(0)
    model = Asks(CASES[name][0])
    for _ in range(2):
        model(torch.randn(4, 3, 9, 9)) if name != "kept" else None
    return model.eval()


@pytest.mark.parametrize("how", ["eager", "fused", "compiled", "loaded", "compiled there"])
@pytest.mark.parametrize("name", CASES)
def test_sizes_that_answer_alike(name: str, how: str, tmp_path: Path) -> None:
    """One executable, or one for each size, beside torch; what answers otherwise is refused."""
    model, (_, shape, alike, otherwise) = made(name), CASES[name]
    net: Any = torch2needle.convert(model, torch.randn(shape))
    assert net.report.capture == "torch.fx"
    if how == "fused":
        net = operator_fusion.fuse(net)
    if how == "loaded":
        ndl.save(net, tmp_path / "net.ndl")
        net = ndl.load(tmp_path / "net.ndl")
    run = ndl.compile(operator_fusion.fuse(net), (np.zeros(shape, "float32"),)) if how == "compiled" else net
    for other in (shape, *alike, shape):
        x = torch.randn(other)
        if how == "compiled there":
            run = ndl.compile(net, (x.numpy(),))
        np.testing.assert_allclose(run(ndl.Tensor(x.numpy())).numpy(), model(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    for other in otherwise:
        with pytest.raises(GuardError, match="holds for inputs that answer"):
            run(np.zeros(other, "float32"))


@pytest.mark.parametrize("name", ["padded", "compared", "written"])
def test_gradients_behind_answers(name: str) -> None:
    """A compiled step updates as torch does, and refuses, before it writes anything, what answers otherwise."""
    model, (_, shape, alike, otherwise) = made(name), CASES[name]
    net = torch2needle.convert(model, torch.randn(shape))
    theirs, ours = torch.optim.SGD(model.parameters(), 1e-2), ndl.optim.SGD(net.parameters(), 1e-2)
    step = ndl.compile_step(net, lambda y, _: ndl.ops.mean(y * y), ours, (np.zeros(shape, "float32"),) * 2)
    for other in (shape, *alike, shape):
        x = torch.randn(other)
        theirs.zero_grad()
        model(x).square().mean().backward()
        theirs.step()
        step(x.numpy(), x.numpy())
    before = {k: v.numpy().copy() for k, v in net.state_dict().items()}
    for k, v in model.state_dict().items():
        np.testing.assert_allclose(before[k], v.numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(GuardError):
        step(*(np.zeros(otherwise[0], "float32"),) * 2)
    assert all((v.numpy() == before[k]).all() for k, v in net.state_dict().items())


@pytest.mark.parametrize("bound", [1, 2])
def test_sizes_of_none_and_one_are_asked_for_as_others(bound: int) -> None:
    """That a size of one gives the same says nothing of none, and the other way round."""

    class Sums(nn.Module):
        def forward(self, x: T) -> T:
            y = x[:, 2 - bound :]
            return y.sum(1) if y.shape[1] >= bound and x.shape[0] >= 2 else x.sum(0)

    net = torch2needle.convert(Sums(), torch.randn(3, 3, 4))
    assert net.report.capture == "torch.fx"
    for shape in itertools.product((0, 1, 2, 3, 5), (0, 1, 2, 3, 5), (4,)):
        x = torch.randn(shape)
        try:
            got = net(ndl.Tensor(x.numpy())).numpy()
        except GuardError:
            assert shape[0] < 2 or shape[1] - (2 - bound) < bound
            continue
        np.testing.assert_allclose(got, Sums()(x).numpy(), rtol=1e-5, atol=1e-6)


def test_ranks_are_the_examples() -> None:
    class Pools(nn.Module):
        def forward(self, x: T) -> T:
            return x.mean((2, 3)) if x.dim() == 4 and x.shape[2] > 1 else x

    net = torch2needle.convert(Pools(), torch.randn(2, 3, 4, 4))
    with pytest.raises(ValueError, match="input x expects"):
        net(np.zeros((2, 3), "float32"))


def test_rows_that_no_other_number_answers_go_another_way() -> None:
    """torch.export takes two rows for any number, torch.fx would take them for two alone."""

    class Rows(nn.Module):
        def forward(self, x: T) -> T:
            return x * 2 if x.shape[0] == 2 else x

    net = torch2needle.convert(Rows(), torch.randn(2, 3))
    assert net.report.capture.startswith("torch.export")
    with pytest.raises(ValueError, match="expects"):
        net(np.zeros((3, 3), "float32"))


def test_none_in_the_example_is_an_argument() -> None:
    class Masks(nn.Module):
        def forward(self, x: T, mask: T | None = None, scale: float = 2.0) -> T:
            return x * scale if mask is None else x * mask

    net, x = torch2needle.convert(Masks(), (torch.ones(2, 3), None)), np.ones((2, 3), "float32")
    assert (net(x, None).numpy() == 2).all() and (net(x).numpy() == 2).all()
    with pytest.raises(ValueError, match="mask is fixed to None"):
        net(x, x)


class Wrapped(nn.Module):
    def forward(self, x: T) -> T:
        return doubled(x) if x.shape[1] > 2 else x


@functools.wraps(torch.mul)
def doubled(x: T) -> T:
    return x + x if x.shape[1] % 2 else x * 3


torch.fx.wrap("doubled")


def test_functions_that_torch_fx_was_told_to_call_whole_are_followed() -> None:
    net = torch2needle.convert(Wrapped(), torch.randn(2, 3))
    assert net.report.capture == "torch.fx"
    x = torch.randn(4, 5)
    np.testing.assert_allclose(net(x.numpy()).numpy(), Wrapped()(x).numpy(), rtol=1e-6)
    with pytest.raises(GuardError):
        net(np.zeros((2, 4), "float32"))


@pytest.mark.parametrize("most", [9, None])
def test_a_file_of_free_batch_holds_for_all(most: int | None, tmp_path: Path) -> None:
    """A graph of ONNX asks nothing of sizes."""

    class Few(nn.Module):
        def forward(self, x: T) -> T:
            return x * 2 if x.shape[1 if most is None else 0] < (most or 9) else x

    net, x = torch2needle.convert(Few(), torch.ones(2, 4)), np.ones((2, 4), "float32")
    if most is None:
        ndl.to_onnx(net, tmp_path / "net.onnx", x, batch="free")
    else:
        with pytest.raises(torch2needle.Unsupported, match="takes no batch of 64"):
            ndl.to_onnx(net, tmp_path / "net.onnx", x, batch="free")


@pytest.mark.parametrize("compiled", [False, True])
def test_the_model_answers_other_sizes(compiled: bool) -> None:
    model = made("padded")
    net = torch2needle.convert(model, torch.randn(2, 3, 8, 6), on_guard="torch")
    run = ndl.compile(net, (np.zeros((2, 3, 8, 6), "float32"),)) if compiled else net
    for shape in ((2, 3, 8, 6), (2, 3, 8, 8), (1, 3, 7, 6), (3, 3, 4, 5)):
        x = torch.randn(shape)
        np.testing.assert_allclose(run(ndl.Tensor(x.numpy())).numpy(), model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_code_that_is_typed_in() -> None:
    """As at a prompt: no line of it is in a file."""
    code = """
import numpy as np, torch, torch2needle
class Asks(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[1] % 2 else x
net = torch2needle.convert(Asks(), torch.ones(2, 3))
assert net.report.capture == "torch.fx", net.report.capture
try:
    net(np.ones((2, 4), "float32"))
except ValueError as e:
    assert "a condition on sizes" in str(e)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-"], input=code, text=True, check=True)


def test_an_example_of_one_row_is_taken() -> None:
    """torch.export captures at two rows; where the graph holds for these alone, as of drawn rows, the example's count."""

    class Draws(nn.Module):
        def forward(self, x: T) -> T:
            x = x + torch.rand(x.shape[0], 1)
            return x * 2 if x.shape[0] > 2 else x

    net = torch2needle.convert(Draws(), torch.ones(1, 4))
    assert 1 <= net(np.ones((1, 4), "float32")).numpy().min() <= 2


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_as_before(training: bool, capfd: pytest.CaptureFixture) -> None:
    """Also what a forward and its layers write before they ask."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: T) -> T:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            x = self.norm(x)
            return self.linear(x) if x.shape[1] > 3 else x

    model = Counts().train(training)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch2needle.check(model, torch.randn(3, 4))
    assert capfd.readouterr() == ("", "")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_kinds_without_an_example() -> None:
    """What half a size is follows from the graph alone."""

    class Halves(nn.Module):
        def forward(self, x: T) -> T:
            return x * 2 if isinstance(x.shape[0] / 2, int) else x + 1

    np.testing.assert_array_equal(torch2needle.convert(Halves())(ndl.Tensor([1.0, 2.0])).numpy(), [2.0, 3.0])


@pytest.mark.parametrize("way", ["layer", "function"])
def test_pools_that_give_places_too(way: str) -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(2, return_indices=True)

        def forward(self, x: T) -> T:
            y: Any = self.pool(x) if way == "layer" else F.max_pool2d(x, 2, return_indices=True)
            return y[0] if isinstance(y, tuple) else y

    x = torch.randn(1, 2, 4, 4)
    got = torch2needle.convert(Pools())(ndl.Tensor(x.numpy()))
    np.testing.assert_array_equal(got.numpy(), F.max_pool2d(x, 2).numpy())
