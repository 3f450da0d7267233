"""Copies, pickles and files of converted models: independent, whole, or refused in one sentence."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import needle as ndl  # noqa: E402
import operator_fusion  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close  # noqa: E402
from needle.backend_selection import BACKEND  # noqa: E402
from torch2needle.models import randomize  # noqa: E402

IMAGE = (2, 4, 6, 5)

pytestmark = pytest.mark.skipif(BACKEND == "np", reason="copies are compiled, too, and numpy arrays can be pickled")


class Everything(nn.Module):
    """A tie, a constant, a buffer that is not saved, a flag in a function, norms that fusion takes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.conv2.bias = self.conv1.bias
        self.bn, self.plain = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.register_buffer("hidden", torch.rand(4, 1, 1), persistent=False)
        self.constant = torch.rand(4, 1, 1)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.bn(self.conv1(x))) * self.hidden + self.constant
        return F.relu(self.plain(self.conv2(F.dropout(x, 0.0, self.training))))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_deepcopy_is_independent(fused: bool) -> None:
    net = torch2needle.convert(randomize(Everything()).eval())
    net = operator_fusion.fuse(net) if fused else net
    x = torch.randn(IMAGE)
    twin, want = copy.deepcopy(net), net(x)
    close(twin(x), want, 0)
    assert list(twin.state_dict()) == list(net.state_dict())
    assert twin.get_tensor("conv1.bias") is twin.get_tensor("conv2.bias")
    assert not {id(t) for _, t in twin.named_tensors()} & {id(t) for _, t in net.named_tensors()}
    assert str(twin.report) == str(net.report)
    assert not fused or str(twin.fusion_report) == str(net.fusion_report)
    twin.train()  # the copy's modes and statistics are its own, also where the graph reads them
    assert not any(m.training for m in net.modules())
    twin(x)
    for p in twin.parameters():
        p.data = p.data * 2
    close(net(x), want, 0)
    close(ndl.compile(net, (x,))(x), want)
    changed = twin.eval()(x)
    assert abs(changed.numpy() - want.numpy()).max() > 1e-3
    close(ndl.compile(twin, (x,))(x), changed)


def test_pickling_is_refused(tmp_path: Any) -> None:
    net = torch2needle.convert(Everything().eval())
    x = torch.randn(IMAGE)
    exe = ndl.compile(net, (x,))
    for value in (net, operator_fusion.fuse(net), net.parameters()[0]):
        with pytest.raises(
            TypeError, match=r"^\[pickle\] .* not pickled; write a model with needle\.save\(net, path\)\.$"
        ):
            pickle.dumps(value)
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^\[compile\] an Executable is neither copied nor pickled"):
            act(exe)
    step = ndl.compile_step(net, lambda out: (out * out).mean(), ndl.optim.SGD(net.parameters(), lr=0.1), (x,))
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^\[compile\] a TrainingStep is neither copied nor pickled"):
            act(step)


def test_graph_names_are_unique() -> None:
    """The constants of a fused net are called constant, constant_1, ...; a second constant_1 must not replace the first."""
    graph = ndl.graph.Graph()
    names = [graph.add("param", "", (), name).name for name in ("c", "c_1", "c", "c", "c_1", "c.1")]
    assert len(set(names)) == 6
    net = torch2needle.convert(randomize(Everything()).eval())
    fused = operator_fusion.fuse(net)
    assert len({n.name for n in fused.graph}) == len(fused.graph.nodes)


def test_saved_constants_come_back(tmp_path: Any) -> None:
    net = operator_fusion.fuse(torch2needle.convert(randomize(Everything()).eval()))
    ndl.save(net, tmp_path / "net")
    loaded = ndl.load(tmp_path / "net")
    x = torch.randn(IMAGE)
    close(loaded(x), net(x), 0)
    assert list(loaded.state_dict()) == list(net.state_dict())
    ndl.save(loaded, tmp_path / "again")
    close(ndl.load(tmp_path / "again")(x), net(x), 0)
