"""Normalisations and embeddings against torch: values and running statistics in both modes, gradients, compiled form."""

from __future__ import annotations

import copy
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
from conversion import Calls, close, converts
from gpu_devices import everywhere
from needle.autograd import Tensor
from needle.ops.common import vjp

MATRIX, ROWS, IMAGE, VOLUME = (5, 8), (3, 8, 5), (3, 8, 5, 7), (3, 8, 3, 2, 5)
NORMS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.BatchNorm1d(8), MATRIX),
    (lambda: nn.BatchNorm1d(8, eps=1e-2, momentum=0.4), ROWS),
    (lambda: nn.BatchNorm1d(8, momentum=None), MATRIX),
    (lambda: nn.BatchNorm1d(8, affine=False, track_running_stats=False), ROWS),
    (lambda: nn.BatchNorm2d(8, eps=1e-3, momentum=0.3), IMAGE),
    (lambda: nn.BatchNorm2d(8, affine=False), IMAGE),
    (lambda: nn.BatchNorm2d(8, momentum=None, affine=False), IMAGE),
    (lambda: nn.BatchNorm2d(8, track_running_stats=False), IMAGE),
    (lambda: nn.BatchNorm2d(8, momentum=None, track_running_stats=False), IMAGE),
    (lambda: nn.BatchNorm3d(8), VOLUME),
    (lambda: nn.BatchNorm3d(8, momentum=None), VOLUME),
    (lambda: nn.BatchNorm3d(1, affine=False), (2, 1, 3, 2, 16)),
    (lambda: nn.BatchNorm3d(8, track_running_stats=False), VOLUME),
    (lambda: nn.InstanceNorm1d(8), ROWS),
    (lambda: nn.InstanceNorm1d(8, eps=1e-2, affine=True), ROWS),
    (lambda: nn.InstanceNorm1d(8, momentum=0.4, affine=True, track_running_stats=True), ROWS),
    (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (3, 5)),
    (lambda: nn.InstanceNorm2d(8), IMAGE),
    (lambda: nn.InstanceNorm2d(8, affine=True), IMAGE),
    (lambda: nn.InstanceNorm2d(8, track_running_stats=True), IMAGE),
    (lambda: nn.InstanceNorm2d(8, momentum=None, track_running_stats=True), IMAGE),  # type: ignore[arg-type]
    (lambda: nn.InstanceNorm2d(3, affine=True), (3, 8, 5)),
    (lambda: nn.InstanceNorm3d(8, affine=True), VOLUME),
    (lambda: nn.InstanceNorm3d(8, affine=True, track_running_stats=True), VOLUME),
    (lambda: nn.LayerNorm(8), MATRIX),
    (lambda: nn.LayerNorm(5, eps=1e-2), ROWS),
    (lambda: nn.LayerNorm((5, 7)), IMAGE),
    (lambda: nn.LayerNorm([8, 5, 7], elementwise_affine=False), IMAGE),
    (lambda: nn.LayerNorm(7, bias=False), IMAGE),
    (lambda: nn.RMSNorm(8), MATRIX),
    (lambda: nn.RMSNorm((5, 7), eps=1e-2), IMAGE),
    (lambda: nn.RMSNorm(5, elementwise_affine=False), ROWS),
    (lambda: nn.GroupNorm(2, 8), MATRIX),
    (lambda: nn.GroupNorm(4, 8, eps=1e-2), ROWS),
    (lambda: nn.GroupNorm(1, 8), IMAGE),
    (lambda: nn.GroupNorm(8, 8, affine=False), IMAGE),
    (lambda: nn.GroupNorm(2, 8), VOLUME),
    (lambda: nn.LocalResponseNorm(2), IMAGE),
    (lambda: nn.LocalResponseNorm(5, alpha=0.3, beta=0.5, k=2.0), ROWS),
    (lambda: nn.LocalResponseNorm(11, alpha=0.3), VOLUME),
    (lambda: nn.BatchNorm1d(300), (130, 300)),
    (lambda: nn.BatchNorm1d(33), (67, 33, 3)),
]
V = torch.linspace(0.5, 1.5, 8)
PLANE: Any = (2, 3)
# f(x) of an input of shape IMAGE; whether it needs an example
FUNCTIONS: dict[str, tuple[Callable, bool]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (7,)) + F.layer_norm(x, [5, 7], eps=1e-2), False),
    "layer_norm_weights": (lambda x: F.layer_norm(x, (7,), V[1:], V[:7]) + F.layer_norm(x, (7,), bias=V[1:]), False),
    "layer_norm_of_a_size": (lambda x: F.layer_norm(x, x.shape[1:]), True),
    "torch.layer_norm": (lambda x: torch.layer_norm(x, (5, 7), None, None, 1e-3), False),
    "group_norm": (lambda x: F.group_norm(x, 4) + F.group_norm(x, num_groups=2, weight=V, bias=V, eps=1e-2), False),
    "group_norm_weight": (lambda x: F.group_norm(x, 4, V) + F.group_norm(x, 2, bias=V), False),
    "torch.group_norm": (lambda x: torch.group_norm(x, 4, V, None, 1e-3), False),
    "instance_norm": (lambda x: F.instance_norm(x) + F.instance_norm(x, weight=V, bias=V, eps=1e-2), False),
    "instance_norm_given": (lambda x: F.instance_norm(x, V, V, use_input_stats=False), False),
    "torch.instance_norm": (lambda x: torch.instance_norm(x, V, V, None, None, True, 0.1, 1e-3, False), False),
    "rms_norm": (lambda x: F.rms_norm(x, (7,)) + F.rms_norm(x, (5, 7), eps=1e-2), False),
    "torch.rms_norm": (lambda x: torch.rms_norm(x, (7,), V[1:], 1e-3), False),
    "batch_norm": (lambda x: F.batch_norm(x, V, V, V, V, eps=1e-2) + F.batch_norm(x, V, V), False),
    "batch_norm_of_the_batch": (lambda x: F.batch_norm(x, None, None, V, training=True), False),
    "batch_norm_alone": (lambda x: F.batch_norm(x, None, None, training=True), True),
    "torch.native_batch_norm": (lambda x: torch.native_batch_norm(x, V, None, V, V, False, 0.1, 1e-3)[0], False),
    "torch.batch_norm": (lambda x: torch.batch_norm(x, V, None, V, V, False, 0.1, 1e-3, False), False),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3, alpha=0.4, k=0.5), False),
    "normalize": (lambda x: F.normalize(x) + F.normalize(x, dim=-1) + F.normalize(x, dim=PLANE), False),
    "normalize_norms": (lambda x: F.normalize(x, p=1) + F.normalize(x, 3.5, 2) + F.normalize(x, float("inf")), False),
    "normalize_eps": (lambda x: F.normalize(x * 1e-3, eps=0.01), False),
}


@everywhere
@pytest.mark.parametrize(("make", "shape"), NORMS, ids=[f"{i}-{type(m()).__name__}" for i, (m, _) in enumerate(NORMS)])
def test_module(make: Callable, shape: tuple[int, ...]) -> None:
    one_sample = isinstance(make(), nn.InstanceNorm1d | nn.InstanceNorm2d) and shape[0] == make().num_features
    # Of a sample without a batch axis another size is another number of channels.
    converts(nn.Sequential(make()), shape, batch=not one_sample)


@everywhere
@pytest.mark.parametrize("example", [False, True], ids=["free", "example"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str, example: bool) -> None:
    f, needs_example = FUNCTIONS[name]
    if example or not needs_example:
        converts(Calls(f), IMAGE, example=example)
    else:
        with pytest.raises(torch2needle.ConversionError, match="pass example="):
            torch2needle.convert(Calls(f))


@everywhere
@pytest.mark.parametrize("shape", [MATRIX, ROWS, VOLUME], ids=["2d", "3d", "5d"])
def test_batch_norm_of_other_ranks(shape: tuple[int, ...]) -> None:
    converts(Calls(lambda x: F.batch_norm(x, V, V, V, V)), shape)
    converts(Calls(lambda x: F.batch_norm(x, V, V, V, V)), shape, example=True)


class Functional(nn.Module):
    """Functions that follow the module's own flag."""

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.instance_norm(x, self.mean, self.var, self.weight, None, self.training, 0.3)
        return y + torch.batch_norm(x, self.weight, None, self.mean, self.var, self.training, 0.1, 1e-5, False)


@everywhere
def test_functions_follow_the_flag() -> None:
    net = converts(Functional(), IMAGE)
    assert sum("norm" in line for line in net.report.follows_mode) == 2


def test_running_statistics_over_many_batches() -> None:
    """momentum=None gives the average of all batches; a number gives a moving one."""
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.ReLU(), nn.BatchNorm1d(4, momentum=0.2))
    net = torch2needle.convert(model.train(), torch.randn(6, 4))  # in the mode that it trains in
    net.train()
    for _ in range(4):
        x = torch.randn(6, 4) * 3 + 1
        close(net(x), model(x))
    for key, value in model.state_dict().items():
        close(net.state_dict()[key], value)
    assert net.state_dict()["0.num_batches_tracked"].item() == 4
    model.eval(), net.eval()
    close(net(x), model(x))


@everywhere
def test_sync_batch_norm_in_evaluation() -> None:
    converts(nn.Sequential(nn.SyncBatchNorm(8)), IMAGE, modes=(False,))


def test_cumulative_average_is_never_fused_silently() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
    fused = operator_fusion.fuse(torch2needle.convert(model))
    x = torch.randn(IMAGE)
    close(fused.eval()(x), model.eval()(x))
    fused.train(), model.train()
    try:
        got = fused(x)
    except ValueError as e:
        assert "momentum expects a number" in str(e)
    else:
        close(got, model(x))
        close(fused.state_dict()["1.running_mean"], model[1].running_mean)


def test_normalize_of_zeros_has_torchs_gradient() -> None:
    x = torch.randn(3, 4)
    x[1] = 0
    theirs, ours = x.clone().requires_grad_(), Tensor(x.numpy())
    F.normalize(theirs).sum().backward()
    ndl.ops.normalize(ours).sum().backward()
    close(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "rms_norm"])
def test_second_derivative(name: str) -> None:
    """The gradient of a squared gradient, in float64 against torch."""
    x, w = np.random.randn(3, 4, 5), np.random.rand(5) + 0.5
    ours, ow = (Tensor(a, device=ndl.cpu_numpy()) for a in (x, w))
    theirs, tw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    if name == "group_norm":
        ow, tw = ow[:4], tw[:4]
        got, want = ndl.ops.group_norm(ours, 2, ow), F.group_norm(theirs, 2, tw)
    else:
        got = getattr(ndl.ops, name)(ours, ow, eps=1e-5)
        want = getattr(F, name)(theirs, (5,), tw, eps=1e-5)
    one = Tensor(np.ones(x.shape), device=ndl.cpu_numpy(), requires_grad=True)
    (first,) = vjp(got * got * got, one, (ours,))
    (second,) = vjp((first * first).sum(), Tensor(np.array(1.0), device=ndl.cpu_numpy()), (ours,))
    (slope,) = torch.autograd.grad((want**3).sum(), theirs, create_graph=True)
    (curve,) = torch.autograd.grad((slope**2).sum(), theirs)
    np.testing.assert_allclose(second.numpy(), curve.numpy(), rtol=1e-8, atol=1e-8)


ERRORS: dict[str, tuple[Callable, str]] = {
    "layer_norm": (lambda x: ndl.ops.layer_norm(x, x), r"^\[layer_norm\] weight expects shape \(6,\), got \(4, 6\)\.$"),
    "axes": (
        lambda x: ndl.ops.layer_norm(x, axes=3),
        r"^\[layer_norm\] expects at least 3 axes, got shape \(4, 6\)\.$",
    ),
    "group_norm": (
        lambda x: ndl.ops.group_norm(x, 4),
        r"^\[group_norm\] groups expects a divisor of 6 channels, got 4\.$",
    ),
    "normalize": (lambda x: ndl.ops.normalize(x, 0.5), r"^\[normalize\] p expects a number of at least 1, got 0\.5\.$"),
    "dtype": (
        lambda x: ndl.ops.layer_norm(x, x[0].astype("float64")),
        r"^\[layer_norm\] weight expects the input's dtype float32, got float64\.$",
    ),
    "lrn": (
        lambda x: ndl.ops.local_response_norm(x[0], 2),
        r"^\[local_response_norm\] expects shape .*, got \(6,\)\.$",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    f, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        f(Tensor(np.ones((4, 6))))


def test_empty_batch() -> None:
    for make in (lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), lambda: nn.InstanceNorm1d(8)):
        model = nn.Sequential(make()).eval()
        net = torch2needle.convert(model)
        x = Tensor(np.zeros((0, 8, 8)))
        y = net(x)
        assert y.shape == (0, 8, 8)
        y.sum().backward()
        assert np.asarray(x.grad).shape == (0, 8, 8)


def test_saved_layers_are_the_same(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.InstanceNorm2d(8, affine=True),
        nn.GroupNorm(2, 8),
        nn.LocalResponseNorm(3, 0.2),
        nn.LayerNorm((5, 7), bias=False),
        nn.RMSNorm(7, eps=0.1),
        nn.PReLU(8),
        nn.Hardtanh(-0.5, 2.0),
        nn.Softplus(2.0, 3.0),
    ).eval()
    net = torch2needle.convert(model)
    ndl.save(net, tmp_path / "model.safetensors")
    x = torch.randn(IMAGE)
    again = ndl.load(tmp_path / "model.safetensors")
    assert list(again.state_dict()) == list(model.state_dict())
    close(again(x), model(x))


# -- embeddings ----------------------------------------------------------------------------------------------------------

WORDS = torch.tensor([[1, 5, 0], [6, 1, 1], [2, 2, 6]])
EMBEDDINGS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "module": (lambda: nn.Sequential(nn.Embedding(7, 5)), WORDS),
    "padding": (lambda: nn.Sequential(nn.Embedding(7, 33, padding_idx=1)), WORDS),
    "padding from the end": (lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=-1)), WORDS),
    "by frequency": (lambda: nn.Sequential(nn.Embedding(7, 5, scale_grad_by_freq=True)), WORDS),
    "by frequency, padding": (lambda: nn.Sequential(nn.Embedding(7, 4, 1, scale_grad_by_freq=True)), WORDS),
    "sparse": (lambda: nn.Sequential(nn.Embedding(7, 4, sparse=True)), WORDS),
    "one axis": (lambda: nn.Sequential(nn.Embedding(7, 4)), WORDS[0]),
    "int32": (lambda: nn.Sequential(nn.Embedding(7, 4)), WORDS.int()),
    "then linear": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)), WORDS),
    "function": (lambda: Calls(lambda x, m: F.embedding(x, m.weight), nn.Linear(4, 7)), WORDS),
    "function padding": (lambda: Calls(lambda x, m: F.embedding(x, m.weight, padding_idx=-6), nn.Linear(4, 7)), WORDS),
    "function by frequency": (
        lambda: Calls(lambda x, m: F.embedding(x, m.weight, scale_grad_by_freq=True), nn.Linear(4, 7)),
        WORDS,
    ),
    "torch": (lambda: Calls(lambda x, m: torch.embedding(m.weight, x), nn.Linear(4, 7)), WORDS),
    "torch padding": (lambda: Calls(lambda x, m: torch.embedding(m.weight, x, 6), nn.Linear(4, 7)), WORDS),
    "one_hot": (lambda: Calls(lambda x: F.one_hot(x, 7)), WORDS),
    "one_hot of one": (lambda: Calls(lambda x: F.one_hot(x, num_classes=9)), WORDS[1]),
}


@everywhere
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embedding(name: str) -> None:
    make, words = EMBEDDINGS[name]
    converts(make(), words)
    converts(make(), words, example=True)


@everywhere
def test_tied_embedding() -> None:
    """The table as the weight of the last layer, as language models have it: one gradient, from both uses."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.table.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(words))

    assert len(converts(Tied(), WORDS).parameters()) == 1


def test_many_words_sum_exactly() -> None:
    """Rows of one number add up in order; the threads share columns, never rows."""
    words = torch.randint(0, 11, (4000,))
    grad = torch.randn(4000, 130)
    for dtype in ("int32", "int64"):
        table = Tensor(np.zeros((11, 130)))
        out = ndl.ops.embedding(Tensor(words.numpy(), dtype=dtype, requires_grad=False), table, 3)
        out.backward(Tensor(grad.numpy()))
        want = np.zeros((11, 130))
        np.add.at(want, words.numpy(), grad.double().numpy())
        want[3] = 0
        assert np.abs(np.asarray(table.grad) - want).max() <= 5e-6 * np.abs(want).max()


def test_gradient_of_an_embeddings_gradient() -> None:
    words = Tensor(WORDS.numpy(), device=ndl.cpu_numpy(), requires_grad=False)
    table = Tensor(np.random.randn(7, 3), device=ndl.cpu_numpy())
    seed = Tensor(np.random.randn(3, 3, 3), device=ndl.cpu_numpy())
    (grad,) = vjp(ndl.ops.embedding(words, table, 1), seed, (table,))
    (back,) = vjp((grad * grad).sum(), Tensor(np.array(1.0), device=ndl.cpu_numpy()), (seed,))
    np.testing.assert_allclose(back.numpy(), 2 * grad.numpy()[WORDS.numpy()] * (WORDS.numpy() != 1)[..., None])


@pytest.mark.parametrize("device", [ndl.cpu(), ndl.cpu_numpy()], ids=["cpu", "numpy"])
@pytest.mark.parametrize("bad", [7, -1])
def test_index_outside_of_the_table(device: Any, bad: int) -> None:
    words = Tensor(np.array([0, bad]), device=device, requires_grad=False)
    table = Tensor(np.ones((7, 3)), device=device, dtype="float32")
    with pytest.raises(IndexError, match=rf"^\[embedding\] index expects 0 to 6, got {bad}\.$"):
        ndl.ops.embedding(words, table)


def test_index_outside_of_the_table_compiled() -> None:
    net = torch2needle.convert(nn.Sequential(nn.Embedding(7, 3)).eval())
    exe = ndl.compile(net, (torch.tensor([1, 2]),))
    for index, bad in (([3, 10**9], 10**9), ([-1, 2], -1)):
        with pytest.raises(IndexError, match=rf"^\[gather\] index expects numbers from 0 to 6, got {bad}\.$"):
            exe(torch.tensor(index))
    assert torch.isfinite(exe(torch.tensor([6, 0]))).all()


def test_course_embedding_takes_floats() -> None:
    layer = ndl.nn.Embedding(7, 3)
    out = layer(Tensor(np.array([[1.0, 6.0]])))
    np.testing.assert_array_equal(out.numpy(), layer.weight.numpy()[[[1, 6]]])
    assert not ndl.nn.Embedding(7, 3, padding_idx=2).weight.numpy()[2].any()


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "max_norm writes to the weight": lambda: nn.Sequential(nn.Embedding(7, 3, max_norm=1.0)),
    "scale_grad_by_freq=True of bags": lambda: Calls(lambda x: F.embedding_bag(x, V[:, None], scale_grad_by_freq=True)),
    "num_classes=-1 depends": lambda: Calls(lambda x: F.one_hot(x)),
    "moves running statistics in evaluation": lambda: Calls(lambda x: F.batch_norm(x, V, V, training=True)),
    "use_input_stats=True moves": lambda: Calls(lambda x: F.instance_norm(x, V, V)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str) -> None:
    with pytest.raises(torch2needle.ConversionError, match=reason):
        torch2needle.convert(REFUSED[reason]())


def test_conversion_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Embedding(7, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(torch2needle.ConversionError):
        torch2needle.convert(nn.Sequential(model[0], nn.Embedding(3, 3, max_norm=1.0)))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
