"""Layers: needle's conventions, and agreement with torch's layers in value, gradients and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle import nn
from needle.autograd import Tensor

BACKENDS = [pytest.param(ndl.cpu_numpy(), id="numpy"), pytest.param(ndl.cpu(), id="cpu")]

# name: (torch layer, needle layer, input shape); weights are copied by name
PAIRS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "linear": (lambda: torch.nn.Linear(7, 5), lambda d: nn.Linear(7, 5, layout="torch", device=d), (2, 3, 7)),
    "linear_no_bias": (
        lambda: torch.nn.Linear(7, 5, bias=False),
        lambda d: nn.Linear(7, 5, bias=False, layout="torch", device=d),
        (4, 7),
    ),
    "conv": (
        lambda: torch.nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2),
        lambda d: nn.Conv(4, 6, (3, 2), (2, 1), padding=(1, 0), dilation=(1, 2), groups=2, layout="torch", device=d),
        (2, 4, 7, 8),
    ),
    "conv_transpose2d": (
        lambda: torch.nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2),
        lambda d: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, device=d),
        (2, 4, 5, 4),
    ),
    "batch_norm2d": (
        lambda: torch.nn.BatchNorm2d(3, momentum=0.3),
        lambda d: nn.BatchNorm2d(3, momentum=0.3, unbiased=True, count_batches=True, device=d),
        (4, 3, 5, 6),
    ),
    "batch_norm2d_plain": (
        lambda: torch.nn.BatchNorm2d(3, affine=False, track_running_stats=False),
        lambda d: nn.BatchNorm2d(3, affine=False, track_running_stats=False, device=d),
        (4, 3, 5, 6),
    ),
    "batch_norm1d": (
        lambda: torch.nn.BatchNorm1d(5),
        lambda d: nn.BatchNorm1d(5, unbiased=True, count_batches=True, device=d),
        (6, 5),
    ),
    "layer_norm": (lambda: torch.nn.LayerNorm(9), lambda d: nn.LayerNorm1d(9, device=d), (4, 9)),
    "relu": (torch.nn.ReLU, lambda d: nn.ReLU(), (4, 9)),
    "relu6": (torch.nn.ReLU6, lambda d: nn.ReLU6(), (4, 9)),
    "leaky_relu": (lambda: torch.nn.LeakyReLU(0.1), lambda d: nn.LeakyReLU(0.1), (4, 9)),
    "sigmoid": (torch.nn.Sigmoid, lambda d: nn.Sigmoid(), (4, 9)),
    "tanh": (torch.nn.Tanh, lambda d: nn.Tanh(), (4, 9)),
    "silu": (torch.nn.SiLU, lambda d: nn.SiLU(), (4, 9)),
    "gelu": (torch.nn.GELU, lambda d: nn.GELU(), (4, 9)),
    "gelu_tanh": (lambda: torch.nn.GELU("tanh"), lambda d: nn.GELU("tanh"), (4, 9)),
    "hardswish": (torch.nn.Hardswish, lambda d: nn.Hardswish(), (4, 9)),
    "hardsigmoid": (torch.nn.Hardsigmoid, lambda d: nn.Hardsigmoid(), (4, 9)),
    "elu": (lambda: torch.nn.ELU(0.5), lambda d: nn.ELU(0.5), (4, 9)),
    "softmax": (lambda: torch.nn.Softmax(1), lambda d: nn.Softmax(1), (4, 9, 2)),
    "flatten": (torch.nn.Flatten, lambda d: nn.Flatten(), (4, 3, 2)),
    "max_pool2d": (lambda: torch.nn.MaxPool2d(3, 2, 1), lambda d: nn.MaxPool2d(3, 2, 1), (2, 3, 8, 7)),
    "avg_pool2d": (lambda: torch.nn.AvgPool2d(2), lambda d: nn.AvgPool2d(2), (2, 3, 8, 7)),
    "adaptive_avg_pool2d": (lambda: torch.nn.AdaptiveAvgPool2d(1), lambda d: nn.AdaptiveAvgPool2d(1), (2, 3, 8, 7)),
    "upsample": (
        lambda: torch.nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        lambda d: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        (2, 3, 5, 4),
    ),
}


def close(ours: Tensor, theirs: torch.Tensor) -> None:
    want = theirs.detach().numpy()
    assert tuple(ours.shape) == want.shape
    assert np.abs(ours.numpy() - want).max(initial=0) <= 1e-5 * max(np.abs(want).max(initial=0), 1e-2)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", PAIRS)
def test_layer_agrees_with_torch(name: str, device: Any) -> None:
    torch.manual_seed(0)
    make_theirs, make_ours, shape = PAIRS[name]
    theirs, ours = make_theirs(), make_ours(device)
    ours.load_state_dict({k: v.detach().numpy() for k, v in theirs.state_dict().items()})
    x = np.random.randn(*shape).astype("float32")
    for training in (True, False):
        theirs.train(training), ours.train(training)
        xt = torch.tensor(x, requires_grad=True)
        xo = Tensor(x, device=device)
        theirs.zero_grad(), ours.zero_grad()
        want, got = theirs(xt), ours(xo)
        close(got, want)
        weight = np.random.randn(*want.shape).astype("float32")
        (want * torch.tensor(weight)).sum().backward()
        got.backward(Tensor(weight, device=device))
        close(xo.grad, xt.grad)
        for (n, p), (m, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert n == m
            close(p.grad, q.grad)
        for k, v in theirs.state_dict().items():
            close(ours.get_tensor(k), v)


def test_needle_linear_shapes_and_draws() -> None:
    np.random.seed(3)
    layer = nn.Linear(6, 4)
    np.random.seed(3)
    weight = ndl.init.kaiming_uniform(6, 4)
    bias = ndl.init.kaiming_uniform(4, 1)
    assert layer.weight.shape == (6, 4)
    assert layer.bias.shape == (1, 4)
    np.testing.assert_array_equal(layer.weight.numpy(), weight.numpy())
    np.testing.assert_array_equal(layer.bias.numpy(), bias.numpy().reshape(1, 4))


@pytest.mark.parametrize("device", BACKENDS)
def test_needle_linear_takes_flat_bias_and_3d_input(device: Any) -> None:
    layer = nn.Linear(6, 4, device=device)
    layer.bias = nn.Parameter(np.arange(4, dtype="float32"), device=device)
    x = np.random.randn(2, 3, 6).astype("float32")
    want = x @ layer.weight.numpy() + np.arange(4)
    np.testing.assert_allclose(layer(Tensor(x, device=device)).numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
def test_needle_conv_is_torch_with_transposed_weight(device: Any) -> None:
    layer = nn.Conv(3, 5, 3, stride=2, device=device)
    assert layer.weight.shape == (3, 3, 3, 5)
    x = np.random.randn(2, 3, 8, 9).astype("float32")
    weight = torch.tensor(layer.weight.numpy()).permute(3, 2, 0, 1)
    want = torch.nn.functional.conv2d(torch.tensor(x), weight, torch.tensor(layer.bias.numpy()), 2, 1)
    close(layer(Tensor(x, device=device)), want)


def test_needle_batch_norm_follows_biased_variance() -> None:
    layer = nn.BatchNorm1d(3, device=ndl.cpu_numpy())
    x = np.random.randn(5, 3).astype("float32")
    layer(Tensor(x, device=ndl.cpu_numpy()))
    np.testing.assert_allclose(layer.running_var.numpy(), 0.9 + 0.1 * x.var(0), rtol=1e-5)


def test_dropout_draws_from_numpys_stream() -> None:
    layer = nn.Dropout(0.25)
    x = np.ones((40, 50), "float32")
    np.random.seed(1)
    got = layer(Tensor(x, device=ndl.cpu_numpy()))
    np.random.seed(1)
    np.testing.assert_allclose(got.numpy(), (np.random.rand(40, 50) <= 0.75) / 0.75, rtol=1e-6)
    assert (layer.eval()(Tensor(x, device=ndl.cpu_numpy())).numpy() == x).all()


def test_sequential_and_nested_containers_are_found() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Residual(nn.Linear(3, 3)))
            self.heads = {"a": [nn.Linear(3, 1)], "b": (nn.Linear(3, 2),)}

    net = Net()
    assert len(net.body.modules) == 3
    names = [n for n, _ in net.named_parameters()]
    assert names[:4] == ["body.0.weight", "body.0.bias", "body.2.fn.weight", "body.2.fn.bias"]
    assert names[4:] == ["heads.a.0.weight", "heads.a.0.bias", "heads.b.0.weight", "heads.b.0.bias"]
    assert not any(m.training for m in [m for _, m in net.eval().named_modules()])


def test_softmax_loss_agrees_with_torch() -> None:
    logits, labels = np.random.randn(6, 5).astype("float32"), np.array([0, 4, 2, 2, 1, 3])
    x = Tensor(logits, device=ndl.cpu_numpy())
    loss = nn.SoftmaxLoss()(x, Tensor(labels, device=ndl.cpu_numpy(), requires_grad=False))
    loss.backward()
    xt = torch.tensor(logits, requires_grad=True)
    want = torch.nn.functional.cross_entropy(xt, torch.tensor(labels))
    want.backward()
    assert loss.shape == ()
    close(loss, want)
    close(x.grad, xt.grad)


def test_sequential_is_a_list_of_its_modules() -> None:
    first, second, third = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    net = nn.Sequential(first, second)
    assert net.append(third) is net
    assert (len(net), net[0], net[-1], list(net)) == (3, first, third, [first, second, third])
    x = ndl.Tensor(np.ones((2, 4), "float32"))
    np.testing.assert_array_equal(net[:2](x).numpy(), second(first(x)).numpy())
    exe = ndl.compile(net, (x,))
    net[2] = nn.Linear(4, 3)  # another head: plans follow
    assert exe(x).shape == net(x).shape == (2, 3)
    assert [n for n, _ in net.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with pytest.raises(IndexError):
        net[3]
