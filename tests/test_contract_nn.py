"""The contract of needle.nn: shapes, order of random draws bit for bit, values against torch and numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from gpu_devices import everywhere
from needle import init, nn
from needle.autograd import Tensor

pytestmark = everywhere


def close(ours: Any, want: Any, tolerance: float = 1e-5) -> None:
    want = want.detach().numpy() if isinstance(want, torch.Tensor) else np.asarray(want)
    assert tuple(ours.shape) == want.shape
    assert np.abs(ours.numpy() - want).max() <= tolerance * max(np.abs(want).max(), 1e-2)


def backward(ours: Tensor, theirs: torch.Tensor) -> None:
    """A weighted sum of both outputs, backwards, after holding them against each other."""
    close(ours, theirs)
    weight = np.random.randn(*theirs.shape)
    ours.backward(Tensor(weight.astype("float32")))
    theirs.backward(torch.tensor(weight))


def pair(*shape: int) -> tuple[Tensor, torch.Tensor]:
    """One random input for both libraries, float32 and float64."""
    a = np.random.randn(*shape).astype("float32")
    return Tensor(a), torch.tensor(a.astype("float64"), requires_grad=True)


def double(p: Any) -> torch.Tensor:
    return torch.tensor(p.numpy().astype("float64"), requires_grad=True)


# -- Linear ----------------------------------------------------------------------------------------------------------------


def test_linear_draws_weight_then_bias() -> None:
    np.random.seed(5)
    layer, after = nn.Linear(7, 5), np.random.rand()
    np.random.seed(5)
    weight = (np.random.rand(7, 5) * 2 * np.sqrt(6 / 7) - np.sqrt(6 / 7)).astype("float32")
    bias = (np.random.rand(5, 1) * 2 * np.sqrt(6 / 5) - np.sqrt(6 / 5)).astype("float32")
    np.testing.assert_allclose(layer.weight.numpy(), weight, rtol=0, atol=1e-7)
    np.testing.assert_allclose(layer.bias.numpy(), bias.reshape(1, 5), rtol=0, atol=1e-7)
    assert layer.bias.shape == (1, 5)
    assert after == np.random.rand()
    np.random.seed(5)
    np.testing.assert_array_equal(layer.weight.numpy(), init.kaiming_uniform(7, 5).numpy())
    np.testing.assert_array_equal(layer.bias.numpy(), init.kaiming_uniform(5, 1).numpy().reshape(1, 5))


@pytest.mark.parametrize("flat", [False, True], ids=["bias(1,out)", "bias(out,)"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 17), (2, 1, 3, 9)])
def test_linear_values_and_gradients(shape: tuple[int, ...], flat: bool) -> None:
    layer = nn.Linear(shape[-1], 11)
    if flat:
        layer.bias = nn.Parameter(np.random.randn(11).astype("float32"))
    weight, bias, (x, xt) = double(layer.weight), double(layer.bias), pair(*shape)
    backward(layer(x), xt @ weight + bias.reshape(-1))
    close(x.grad, xt.grad)
    close(layer.weight.grad, weight.grad)
    close(layer.bias.grad, bias.grad)


# -- Conv ------------------------------------------------------------------------------------------------------------------


def test_conv_draws_weight_then_bias() -> None:
    np.random.seed(6)
    layer = nn.Conv(3, 5, 3)
    np.random.seed(6)
    weight = init.kaiming_uniform(27, 45, shape=(3, 3, 3, 5))
    bias = init.rand(5, low=-1 / np.sqrt(27), high=1 / np.sqrt(27))
    assert layer.weight.shape == (3, 3, 3, 5) and layer.bias.shape == (5,)
    np.testing.assert_array_equal(layer.weight.numpy(), weight.numpy())
    np.testing.assert_array_equal(layer.bias.numpy(), bias.numpy())
    assert np.abs(layer.weight.numpy()).max() <= np.sqrt(6 / 27)
    assert nn.Conv(3, 5, 3, bias=False).bias is None


@pytest.mark.parametrize(
    ("n_in", "n_out", "kernel", "stride", "size", "bias"),
    [
        (1, 1, 1, 1, (1, 1), True),
        (3, 5, 3, 1, (7, 9), True),
        (4, 17, 3, 2, (14, 14), True),
        (3, 2, 7, 4, (32, 31), False),
    ],
)
def test_conv_is_torch_with_transposed_weight(
    n_in: int, n_out: int, kernel: int, stride: int, size: tuple[int, int], bias: bool
) -> None:
    layer = nn.Conv(n_in, n_out, kernel, stride, bias)
    (x, xt), weight = pair(2, n_in, *size), double(layer.weight)
    b = double(layer.bias) if layer.bias is not None else None
    backward(layer(x), torch.nn.functional.conv2d(xt, weight.permute(3, 2, 0, 1), b, stride, padding=(kernel - 1) // 2))
    close(x.grad, xt.grad)
    close(layer.weight.grad, weight.grad)
    if b is not None:
        close(layer.bias.grad, b.grad)


# -- norms -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer_type", "shape"), [(nn.BatchNorm1d, (5, 7)), (nn.BatchNorm1d, (2, 1)), (nn.BatchNorm2d, (3, 17, 5, 3))]
)
def test_batch_norm_follows_the_biased_variance(layer_type: Any, shape: tuple[int, ...]) -> None:
    layer = layer_type(shape[1], momentum=0.3)
    assert layer.weight.shape == layer.bias.shape == layer.running_mean.shape == layer.running_var.shape == shape[1:2]
    weight, bias, axes = double(layer.weight), double(layer.bias), tuple(i for i in range(len(shape)) if i != 1)
    mean, var = np.zeros(shape[1]), np.ones(shape[1])
    for _ in range(2):
        x, xt = pair(*shape)
        backward(layer(x), torch.nn.functional.batch_norm(xt, None, None, weight, bias, training=True))
        close(x.grad, xt.grad, 1e-4)
        close(layer.weight.grad, weight.grad, 1e-4)
        close(layer.bias.grad, bias.grad)
        weight.grad = bias.grad = layer.weight.grad = layer.bias.grad = None
        mean = 0.7 * mean + 0.3 * x.numpy().astype("float64").mean(axes)
        var = 0.7 * var + 0.3 * x.numpy().astype("float64").var(axes)
        close(layer.running_mean, mean)
        close(layer.running_var, var)
    layer.eval()
    x, xt = pair(*shape)
    rows = (1, shape[1]) + (1,) * (len(shape) - 2)
    backward(layer(x), (xt - torch.tensor(mean).reshape(rows)) / torch.tensor(var + 1e-5).sqrt().reshape(rows))
    close(x.grad, xt.grad)
    close(layer.running_var, var)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 33)])
def test_layer_norm1d(shape: tuple[int, ...]) -> None:
    layer = nn.LayerNorm1d(shape[1])
    assert layer.weight.shape == layer.bias.shape == (shape[1],)
    for p in layer.parameters():
        p.data = Tensor(np.random.randn(shape[1]).astype("float32"))
    (x, xt), weight, bias = pair(*shape), double(layer.weight), double(layer.bias)
    backward(layer(x), torch.nn.functional.layer_norm(xt, shape[1:], weight, bias, 1e-5))
    close(x.grad, xt.grad, 1e-4)
    close(layer.weight.grad, weight.grad)
    close(layer.bias.grad, bias.grad)


# -- the rest --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_keeps_where_rand_is_at_most_one_minus_p(p: float) -> None:
    layer, (x, _) = nn.Dropout(p), pair(5, 7)
    np.random.seed(2)
    first, second = layer(x), layer(x)
    first.backward()
    np.random.seed(2)
    masks = [np.where(np.random.rand(5, 7) <= 1 - p, 1 / (1 - p) if p < 1 else 0, 0) for _ in range(2)]
    if p == 1:
        masks = [np.zeros((5, 7))] * 2
    close(first, x.numpy() * masks[0])
    close(second, x.numpy() * masks[1])
    close(x.grad, masks[0])
    state = np.random.get_state()[2]
    np.testing.assert_array_equal(layer.eval()(x).numpy(), x.numpy())
    assert np.random.get_state()[2] == state


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 33)])
def test_softmax_loss(shape: tuple[int, int], dtype: str) -> None:
    labels = np.random.randint(0, shape[1], shape[0])
    x, xt = pair(*shape)
    loss = nn.SoftmaxLoss()(x, Tensor(labels.astype(dtype)))
    want = torch.nn.functional.cross_entropy(xt, torch.tensor(labels))
    loss.backward()
    want.backward()
    close(loss, want)
    close(x.grad, xt.grad)


@pytest.mark.parametrize("label", [-1, 3])
def test_losses_know_their_classes(label: int) -> None:
    with pytest.raises(IndexError, match=rf"\[cross_entropy\] index expects 0 to 2, got {label}\."):
        nn.SoftmaxLoss()(pair(2, 3)[0], Tensor(np.array([0, label]), dtype="int64"))
    with pytest.raises(
        ValueError, match=r"\[cross_entropy\] expects logits \(N, C\) and labels \(N,\), got \(2, 3\) and \(3,\)\."
    ):
        nn.SoftmaxLoss()(pair(2, 3)[0], Tensor(np.zeros(3), dtype="int64"))


LABELS: dict[str, Any] = {
    "torch": torch.tensor,
    "torch-int32": lambda y: torch.tensor(y, dtype=torch.int32),
    "torch-uint8": lambda y: torch.tensor(y, dtype=torch.uint8),
    "numpy": np.asarray,
    "numpy-int32": lambda y: np.asarray(y, "int32"),
    "numpy-float": lambda y: np.asarray(y, "float64"),
    "list": np.ndarray.tolist,
    "tensor": lambda y: Tensor(y, dtype="int64"),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "shape", [(4, 3), (4, 3, 5), (2, 5, 3, 4), (1, 1, 1), (0, 3, 2), (2, 3, 0), (2, 3, 1, 2, 2)], ids=str
)
@pytest.mark.parametrize("kind", LABELS)
def test_cross_entropy_of_labels_of_any_kind_and_logits_of_any_rank(kind: str, shape: Any, reduction: str) -> None:
    labels = np.random.randint(0, shape[1], (shape[0], *shape[2:]))
    if kind == "list" and not shape[0]:
        kind = "numpy"  # an empty list has one axis
    x, xt = pair(*shape)
    loss = ndl.ops.cross_entropy(x, LABELS[kind](labels), reduction=reduction)
    want = torch.nn.functional.cross_entropy(xt, torch.tensor(labels), reduction=reduction)
    assert tuple(loss.shape) == tuple(want.shape)
    loss.sum().backward(), want.sum().backward()
    np.testing.assert_allclose(loss.numpy(), want.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x.grad.numpy(), xt.grad.numpy(), rtol=1e-5, atol=1e-6)


BAD_LABELS: dict[str, tuple[Any, str]] = {
    "no class": ([0, 3], r"index expects 0 to 2, got 3"),
    "ignored by torch": (np.array([0, -100]), r"index expects 0 to 2, got -100"),
    "a fraction": ([0.0, 0.5], r"index expects whole numbers, got 0.5"),
    "nan": (np.array([0.0, np.nan]), r"index expects whole numbers, got nan"),
    "probabilities": (np.full((2, 3), 1 / 3), r"expects logits \(N, C\) and labels \(N,\), got \(2, 3\) and \(2, 3\)"),
    "text": (["a", "b"], r"labels expect class numbers, got <U1"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_what_is_no_label_is_refused(name: str) -> None:
    labels, text = BAD_LABELS[name]
    with pytest.raises((IndexError, ValueError, TypeError), match=rf"^\[cross_entropy\] {text}\.$"):
        nn.SoftmaxLoss()(pair(2, 3)[0], labels)
    with pytest.raises(ValueError, match=r"\[cross_entropy\] reduction expects mean, sum or none, got avg\."):
        ndl.ops.cross_entropy(pair(2, 3)[0], [0, 1], reduction="avg")


def test_residual_flatten_identity_sequential() -> None:
    x, xt = pair(3, 2, 5)
    inner = nn.Sequential(nn.Linear(10, 10), nn.Tanh())
    model = nn.Sequential(nn.Identity(), nn.Flatten(), nn.Residual(inner), nn.Sigmoid())
    assert [type(m).__name__ for m in model.modules] == ["Identity", "Flatten", "Residual", "Sigmoid"]
    assert model.modules[2].fn is inner
    linear = inner.modules[0]
    flat, weight, bias = xt.reshape(3, 10), double(linear.weight), double(linear.bias)
    backward(model(x), torch.sigmoid(torch.tanh(flat @ weight + bias) + flat))
    close(x.grad, xt.grad)
    close(linear.weight.grad, weight.grad)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 1)])
def test_embedding_takes_word_numbers_in_floats(shape: tuple[int, int]) -> None:
    np.random.seed(7)
    layer = nn.Embedding(11, 17)
    np.random.seed(7)
    np.testing.assert_array_equal(layer.weight.numpy(), np.random.randn(11, 17).astype("float32"))
    numbers = np.random.randint(0, 11, shape)
    weight = double(layer.weight)
    backward(layer(Tensor(numbers.astype("float32"))), weight[torch.tensor(numbers)])
    close(layer.weight.grad, weight.grad)
    with pytest.raises(IndexError, match="index expects 0 to 10, got 11"):
        layer(Tensor(np.array([11.0], "float32")))


@pytest.mark.parametrize("seed", [0, 4])
def test_a_seed_gives_the_same_network(seed: int) -> None:
    def run() -> list[np.ndarray]:
        np.random.seed(seed)
        model = nn.Sequential(
            nn.Conv(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(), nn.Linear(5 * 49, 3)
        )
        out = model(init.randn(2, 3, 7, 7, requires_grad=True))
        nn.SoftmaxLoss()(out, Tensor(np.array([0, 2]))).backward()
        return [
            out.numpy(),
            *(t.numpy() for _, t in model.named_tensors()),
            *(p.grad.numpy() for p in model.parameters()),
        ]

    for a, b in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(a, b)


EVERY = {
    "Identity": (),
    "Linear": (3, 4),
    "Flatten": (),
    "ReLU": (),
    "Tanh": (),
    "Sigmoid": (),
    "Sequential": (),
    "SoftmaxLoss": (),
    "BatchNorm1d": (3,),
    "BatchNorm2d": (3,),
    "LayerNorm1d": (3,),
    "Dropout": (0.5,),
    "Residual": (nn.Identity(),),
    "Conv": (3, 4, 3),
    "RNN": (3, 4),
    "RNNCell": (3, 4),
    "LSTM": (3, 4),
    "LSTMCell": (3, 4),
    "GRU": (3, 4),
    "GRUCell": (3, 4),
    "Embedding": (3, 4),
    "MultiHeadAttention": (),
    "AttentionLayer": (3, 2, 4),
    "TransformerLayer": (3, 2, 4, 5),
    "Transformer": (3, 4, 2),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_layer_takes_device_and_dtype(name: str) -> None:
    layer = getattr(nn, name)(*EVERY[name], device=ndl.cpu_numpy(), dtype="float64")
    assert isinstance(layer, nn.Module) and repr(layer).startswith(name)
    for path, t in layer.named_tensors():
        assert (t.device, t.dtype) == (ndl.cpu_numpy(), "float64"), path
