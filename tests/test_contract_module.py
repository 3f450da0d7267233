"""nn.Module: what it finds, hooks, `to`, state and its differences, text."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import needle as ndl
from needle import nn
from needle.autograd import Tensor
from needle.backend_selection import BACKEND


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.nested = {
            "a": [nn.Linear(3, 1), (nn.Dropout(0.2), {"b": nn.BatchNorm1d(4)})],
            "c": nn.Parameter(np.ones(5)),
        }
        self._hidden = [nn.Linear(1, 2)]
        self.tied = self.first.weight
        self.number = 3

    def forward(self, x: Tensor) -> Tensor:
        return self._hidden[0](self.nested["a"][0](self.first(x)))


NAMES = [
    "first.weight",
    "first.bias",
    "nested.a.0.weight",
    "nested.a.0.bias",
    "nested.a.1.1.b.weight",
    "nested.a.1.1.b.bias",
    "nested.c",
    "_hidden.0.weight",
    "_hidden.0.bias",
]


def test_everything_in_lists_tuples_and_dicts_is_found() -> None:
    net = Net()
    assert [n for n, _ in net.named_parameters()] == NAMES
    assert [id(p) for p in net.parameters()] == [id(p) for _, p in net.named_parameters()]
    assert [n for n, _ in net.named_buffers()] == ["nested.a.1.1.b.running_mean", "nested.a.1.1.b.running_var"]
    assert [id(t) for t in net.buffers()] == [id(t) for _, t in net.named_buffers()]
    assert list(net.state_dict())[-1] == "tied" and len(net.state_dict()) == len(NAMES) + 3
    assert [n for n, _ in net.named_children()] == [
        "first",
        "nested.a.0",
        "nested.a.1.0",
        "nested.a.1.1.b",
        "_hidden.0",
    ]
    assert [type(m).__name__ for m in net.children()] == ["Linear", "Linear", "Dropout", "BatchNorm1d", "Linear"]
    assert next(n for n, _ in net.named_modules()) == "" and len(list(net.modules())) == 6
    assert net.get_submodule("nested.a.1.1.b") is net.nested["a"][1][1]["b"]
    for mode in (False, True):
        assert net.train(mode) is net
        assert {m.training for _, m in net.named_modules()} == {mode}
    assert not net.eval().nested["a"][1][0].training


def test_apply_reaches_every_module() -> None:
    seen: list[str] = []
    net = Net()
    assert net.apply(lambda m: seen.append(type(m).__name__)) is net
    assert sorted(seen) == sorted(["Net", "Linear", "Linear", "Dropout", "BatchNorm1d", "Linear"])


def test_hidden_members_train_and_become_graphs(tmp_path: Any) -> None:
    net = Net()
    x = Tensor(np.random.randn(4, 2).astype("float32"))
    loss = ndl.summation(net(x))
    loss.backward()
    before = net._hidden[0].weight.numpy()
    ndl.optim.SGD(net.parameters(), lr=0.1).step()
    assert np.abs(net._hidden[0].weight.numpy() - before).max() > 0
    ndl.save(net, tmp_path / "net.st")
    np.testing.assert_array_equal(ndl.load(tmp_path / "net.st")(x).numpy(), net(x).numpy())


def test_layers_without_arguments_and_with_devices_are_saved(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4, device=ndl.Tensor(0.0).device), nn.ReLU(), nn.Tanh(), nn.Dropout(0.3)).eval()
    ndl.save(model, tmp_path / "model.st")
    x = Tensor(np.random.randn(2, 3).astype("float32"))
    np.testing.assert_array_equal(ndl.load(tmp_path / "model.st")(x).numpy(), model(x).numpy())


def test_forward_hooks_see_and_change() -> None:
    layer, x = nn.Linear(2, 3), Tensor(np.ones((1, 2), "float32"))
    calls: list[Any] = []
    plain = layer(x).numpy()
    looks = [
        layer.register_forward_pre_hook(lambda m, args: calls.append(("before", m, args))),
        layer.register_forward_hook(lambda m, args, out: calls.append(("after", m, args, out))),
    ]
    np.testing.assert_array_equal(layer(x).numpy(), plain)
    assert [c[0] for c in calls] == ["before", "after"] and calls[0][1] is layer and calls[0][2] == (x,)
    np.testing.assert_array_equal(calls[1][3].numpy(), plain)
    doubled = layer.register_forward_hook(lambda m, args, out: out * 2.0)
    shifted = layer.register_forward_pre_hook(lambda m, args: args[0] * 0.0)
    np.testing.assert_allclose(layer(x).numpy(), 2 * layer.bias.numpy())
    twin = copy.deepcopy(layer)
    for handle in (*looks, doubled, shifted):
        handle.remove()
    kept = layer.register_forward_hook(lambda m, args, out: out + 1.0)
    doubled.remove()  # again: takes nothing else off
    np.testing.assert_array_equal(layer(x).numpy(), plain + 1)
    kept.remove()
    count = len(calls)
    np.testing.assert_array_equal(layer(x).numpy(), plain)
    assert len(calls) == count
    np.testing.assert_allclose(twin(x).numpy(), 2 * layer.bias.numpy())
    assert nn.Linear(2, 3)._hooks == {} and list(layer.state_dict()) == ["weight", "bias"]


def test_hooks_run_in_graphs() -> None:
    layer = nn.Linear(2, 3)
    layer.register_forward_hook(lambda m, args, out: out * 2.0)
    net = ndl.graph.symbolic(nn.Sequential(layer, nn.ReLU()))
    x = Tensor(np.ones((1, 2), "float32"))
    want = np.maximum(2 * layer.forward(x).numpy(), 0)
    np.testing.assert_allclose(net(x).numpy(), want, rtol=1e-6)
    if BACKEND != "np":
        np.testing.assert_allclose(ndl.compile(net, (x,))(x).numpy(), want, rtol=1e-6)


class Noisy(nn.Module):
    """Layers that are one forward in evaluation and another in training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fc = how, nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if not self.training:
            return y
        return {"factor": lambda: y * 2.0, "outputs": lambda: (y, x), "calls": lambda: self.fc(x + 1.0)}[self.how]()


@pytest.mark.parametrize("how", ["factor", "outputs", "calls"])
def test_graphs_of_both_modes(how: str) -> None:
    """A forward that branches on the mode has a graph for each, where all of the net is in one."""
    net, x = Noisy(how), Tensor(np.ones((1, 2), "float32"))
    net.fc.eval()
    with pytest.raises(ndl.Unsupported, match="something else in training than in evaluation"):
        ndl.graph.symbolic(net)
    assert net.training and not net.fc.training
    made = ndl.graph.symbolic(net.train())
    for mode in (True, False, True):
        want, got = net.train(mode)(x), made.train(mode)(x)
        first = (t[0] if isinstance(t, tuple) else t for t in (want, got))
        np.testing.assert_array_equal(*(t.numpy() for t in first))


def test_hooks_of_the_root_run_in_graphs() -> None:
    net = nn.Sequential(nn.Linear(2, 3))
    net.register_forward_pre_hook(lambda m, args: args[0] + 1.0)
    net.register_forward_hook(lambda m, args, out: out * 2.0)
    x = Tensor(np.ones((1, 2), "float32"))
    np.testing.assert_allclose(ndl.graph.symbolic(net)(x).numpy(), net(x).numpy(), rtol=1e-6)


def test_to_moves_and_casts() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, count_batches=True))
    x = np.random.randn(5, 3).astype("float32")
    net(Tensor(x)).backward()
    parameters, want = net.parameters(), net.eval()(Tensor(x)).numpy()
    assert net.to(ndl.cpu_numpy(), "float64") is net
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    assert {t.device for _, t in net.named_tensors()} == {ndl.cpu_numpy()}
    dtypes = {n: t.dtype for n, t in net.named_tensors()}
    assert dtypes.pop("1.num_batches_tracked") == "int64" and set(dtypes.values()) == {"float64"}
    assert all((p.grad.device, p.grad.dtype) == (ndl.cpu_numpy(), "float64") for p in net.parameters())
    out = net(Tensor(x.astype("float64"), device=ndl.cpu_numpy()))
    assert out.dtype == "float64"
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=1e-6)
    net.to(device=ndl.Tensor(0.0).device, dtype="float32")
    np.testing.assert_allclose(net(Tensor(x)).numpy(), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"\[to\] dtype expects one of .*, got int64\."):
        net.to("int64")
    with pytest.raises(TypeError, match=r"\[to\] expects a device, the name of a dtype or a tensor, got int\."):
        net.to(3)
    if not ndl.cuda().enabled():
        with pytest.raises(RuntimeError, match="no such device"):
            net.to(ndl.cuda())


def test_load_state_dict_copies_and_tells_differences() -> None:
    net, other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    state = {k: v.numpy() + 1 for k, v in net.state_dict().items()}
    assert net.load_state_dict(state) == ([], [])
    for k, v in net.state_dict().items():
        np.testing.assert_array_equal(v.numpy(), state[k])
    state["0.weight"] = state["0.weight"].T
    state["extra"] = np.zeros(5)
    del state["2.bias"]
    with pytest.raises(ValueError) as e:
        net.load_state_dict(state)
    assert str(e.value).splitlines() == [
        "[load_state_dict] 3 of 5 names do not fit Sequential:",
        "  shape       0.weight is (3, 4), got (4, 3)",
        "  missing     2.bias (1, 2)",
        "  unexpected  extra (5,)",
    ]
    with pytest.raises(ValueError, match="1 of 5 names do not fit"):
        net.load_state_dict(state, strict=False)
    before = other.modules[0].weight.numpy()
    diff = other.load_state_dict({"0.weight": before * 2, "more": np.zeros(1)}, strict=False)
    assert diff.missing_keys == ["0.bias"] and diff.unexpected_keys == ["more"]
    np.testing.assert_array_equal(other.modules[0].weight.numpy(), before * 2)
    with pytest.raises(ValueError, match=r"and 5 more$"):
        nn.Identity().load_state_dict({str(i): np.zeros(1) for i in range(25)})


def test_a_failed_load_changes_nothing() -> None:
    net = nn.Linear(3, 4)
    before = net.weight.numpy()
    with pytest.raises(ValueError):
        net.load_state_dict({"weight": np.zeros((3, 4)), "bias": np.zeros(4)})
    np.testing.assert_array_equal(net.weight.numpy(), before)


def test_repr_is_a_tree() -> None:
    assert repr(nn.Sequential(nn.Linear(2, 3), nn.Residual(nn.Sequential(nn.ReLU(), nn.Dropout(0.1))))) == (
        "Sequential(\n"
        "  (0): Linear(2, 3, bias=True)\n"
        "  (1): Residual(\n"
        "    (fn): Sequential(\n"
        "      (0): ReLU()\n"
        "      (1): Dropout(p=0.1)\n"
        "    )\n"
        "  )\n"
        ")"
    )
    assert repr(nn.GRU(2, 3)) == "GRU(\n  2, 3, num_layers=1\n  (gru_cells.0): GRUCell(2, 3, bias=True)\n)"
