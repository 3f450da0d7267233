"""needle.models: sizes, order of draws, values and gradients against torch, compiled and saved forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from gpu_devices import compiles, everywhere, need_executor
from needle import nn
from needle.autograd import Tensor
from needle.models import LanguageModel, MLPResNet, ResidualBlock, ResNet9, ResNet9Wide
from torch2needle.models import resnet9 as torch_resnet9
from torch2needle.models import resnet9_wide as torch_resnet9_wide

pytestmark = everywhere


def close(ours: Any, want: Any, tolerance: float = 1e-5) -> None:
    want = want.detach().numpy() if isinstance(want, torch.Tensor) else np.asarray(want)
    assert tuple(ours.shape) == want.shape
    assert np.abs(ours.numpy() - want).max() <= tolerance * max(np.abs(want).max(), 1e-2)


def size(model: nn.Module) -> int:
    return sum(p.size for p in model.parameters())


def to_torch(name: str, array: np.ndarray) -> torch.Tensor:
    """A parameter in torch's shape: kernels (k, k, I, O), linear weights (in, out), biases (1, out)."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim, (0,))
    array = array.transpose(axes)
    return torch.tensor((array.reshape(-1) if name.endswith("bias") else array).astype("float64"))


def copy_to(theirs: torch.nn.Module, ours: nn.Module) -> list[tuple[str, Any, torch.Tensor]]:
    named = dict(ours.named_parameters())
    assert list(named) == [k for k, _ in theirs.named_parameters()]
    for k, q in theirs.named_parameters():
        q.data = to_torch(k, named[k].numpy())
    return [(k, named[k], q) for k, q in theirs.named_parameters()]


def train_step(
    ours: nn.Module, theirs: torch.nn.Module, shape: tuple[int, ...], classes: int, tolerance: float
) -> None:
    pairs = copy_to(theirs.double(), ours)
    x, labels = np.random.randn(*shape).astype("float32"), np.random.randint(0, classes, shape[0])
    out, want = ours(Tensor(x)), theirs(torch.tensor(x.astype("float64")))
    close(out, want, tolerance)
    loss, want_loss = (
        nn.SoftmaxLoss()(out, Tensor(labels)),
        torch.nn.functional.cross_entropy(want, torch.tensor(labels)),
    )
    close(loss, want_loss, tolerance)
    loss.backward()
    want_loss.backward()
    top = max(q.grad.abs().max() for _, _, q in pairs)
    for name, p, q in pairs:
        got = to_torch(name, p.grad.numpy())
        assert (got - q.grad).abs().max() <= tolerance * max(q.grad.abs().max(), 1e-2 * top), name


def block(dim: int, hidden: int, norm: Any) -> torch.nn.Module:
    class Skip(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fn = torch.nn.Sequential(
                torch.nn.Linear(dim, hidden),
                norm(hidden),
                torch.nn.ReLU(),
                torch.nn.Dropout(0.0),
                torch.nn.Linear(hidden, dim),
                norm(dim),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fn(x) + x

    return torch.nn.Sequential(Skip(), torch.nn.ReLU())


# -- ResNet9 ---------------------------------------------------------------------------------------------------------------


def test_parameter_counts() -> None:
    assert size(ResNet9()) == 431_946
    wide = size(ResNet9Wide())
    assert wide == sum(p.numel() for p in torch_resnet9_wide().parameters()) and round(wide / 1e6, 1) == 6.6
    assert ResNet9(num_classes=7)(Tensor(np.zeros((1, 3, 32, 32), "float32"))).shape == (1, 7)


@pytest.mark.parametrize(
    "batch", [5, 9]
)  # its last batch norms see one pixel per image: few of them are ill-conditioned
def test_resnet9_trains_as_torchs(batch: int) -> None:
    train_step(ResNet9(), torch_resnet9(), (batch, 3, 32, 32), 10, 2e-4)


def test_resnet9_wide_trains_as_torchs() -> None:
    train_step(ResNet9Wide(), torch_resnet9_wide(), (2, 3, 16, 24), 10, 2e-4)


def test_resnet9_draws_in_the_order_of_its_layers() -> None:
    np.random.seed(8)
    model = ResNet9()
    np.random.seed(8)
    convs = [(3, 16, 7), (16, 32, 3), (32, 32, 3), (32, 32, 3), (32, 64, 3), (64, 128, 3), (128, 128, 3), (128, 128, 3)]
    drawn = [p for p in model.parameters() if p.ndim == 4]
    biases = [m.bias for _, m in model.named_modules() if isinstance(m, nn.Conv)]
    for (n_in, n_out, k), weight, bias in zip(convs, drawn, biases, strict=True):
        want = ndl.init.kaiming_uniform(n_in * k * k, n_out * k * k, shape=(k, k, n_in, n_out))
        np.testing.assert_array_equal(weight.numpy(), want.numpy())
        bound = 1 / np.sqrt(n_in * k * k)
        np.testing.assert_array_equal(bias.numpy(), ndl.init.rand(n_out, low=-bound, high=bound).numpy())
    np.testing.assert_array_equal(
        model.classifier.modules[1].weight.numpy(), ndl.init.kaiming_uniform(128, 128).numpy()
    )


@pytest.mark.parametrize("make", [ResNet9, lambda: MLPResNet(3 * 32 * 32, 17, 2)], ids=["resnet9", "mlp_resnet"])
def test_image_models_compiled_and_saved(make: Any, tmp_path: Any) -> None:
    model = make()
    shape = (3, 3, 32, 32) if isinstance(model, ResNet9) else (3, 3 * 32 * 32)
    model(Tensor(np.random.randn(*shape).astype("float32")))  # running statistics
    model.eval()
    x = np.random.randn(*shape).astype("float32")
    want = model(Tensor(x)).numpy()
    ndl.save(model, tmp_path / "model.st")
    np.testing.assert_allclose(ndl.load(tmp_path / "model.st")(Tensor(x)).numpy(), want, atol=1e-6)
    if compiles():
        np.testing.assert_allclose(ndl.compile(model, (x,))(x), want, rtol=1e-4, atol=1e-5)


# -- MLPResNet -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["BatchNorm1d", "LayerNorm1d"])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (33, 12)], ids=lambda s: "x".join(map(str, s)))
def test_residual_block_ends_in_relu_after_the_skip(sizes: tuple[int, int], norm: str) -> None:
    dim, hidden = sizes
    ours = ResidualBlock(dim, hidden, getattr(nn, norm), drop_prob=0.0)
    theirs = block(dim, hidden, torch.nn.BatchNorm1d if norm == "BatchNorm1d" else torch.nn.LayerNorm)
    x = Tensor(np.random.randn(5, dim).astype("float32"))
    assert (ours(x).numpy() >= 0).all()
    train_step(ours, theirs, (5, dim), dim, 1e-4)


@pytest.mark.parametrize("norm", ["BatchNorm1d", "LayerNorm1d"])
def test_mlp_resnet_trains_as_torchs(norm: str) -> None:
    ours = MLPResNet(13, 10, 3, 7, getattr(nn, norm), 0.0)
    theirs_norm = torch.nn.BatchNorm1d if norm == "BatchNorm1d" else torch.nn.LayerNorm
    theirs = torch.nn.Sequential(
        torch.nn.Linear(13, 10), torch.nn.ReLU(), *(block(10, 5, theirs_norm) for _ in range(3)), torch.nn.Linear(10, 7)
    )
    train_step(ours, theirs, (6, 13), 7, 1e-4)


def test_mlp_resnet_defaults_and_dropout() -> None:
    model = MLPResNet(20)
    assert [type(m).__name__ for m in model.modules] == ["Linear", "ReLU", *["Sequential"] * 3, "Linear"]
    assert model.modules[2].modules[0].fn.modules[3].p == 0.1
    assert model.modules[2].modules[0].fn.modules[0].weight.shape == (100, 50)
    assert size(model) == 20 * 100 + 100 + 3 * (100 * 50 + 50 + 100 + 50 * 100 + 100 + 200) + 100 * 10 + 10
    named = MLPResNet(dim=4, hidden_dim=6, num_blocks=1, num_classes=2, norm=lambda n: nn.LayerNorm1d(n), drop_prob=0.5)
    x = Tensor(np.random.randn(3, 4).astype("float32"))
    np.random.seed(1)
    first = named(x).numpy()
    assert np.random.get_state()[2] == 2 * 3 * 3  # 3 x 3 numbers of two words each
    np.random.seed(1)
    np.testing.assert_array_equal(named(x).numpy(), first)
    doubles = MLPResNet(4, 6, 1, 2, device=ndl.cpu_numpy(), dtype="float64")
    assert {t.dtype for _, t in doubles.named_tensors()} == {"float64"}


# -- LanguageModel ---------------------------------------------------------------------------------------------------------

WORDS = [(1, 1, 1, 1, 1, 1), (5, 3, 6, 11, 7, 2), (7, 2, 17, 33, 12, 1)]  # T, B, embedding, words, hidden, layers


@pytest.mark.parametrize("start", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("sizes", WORDS, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("kind", ["rnn", "lstm", "transformer"])
def test_language_model(kind: str, sizes: tuple[int, ...], start: bool) -> None:
    steps, batch, embedding, words, hidden, layers = sizes
    model = LanguageModel(embedding, words, hidden, layers, kind)
    numbers = np.random.randint(0, words, (steps, batch))
    state = [np.random.randn(layers, batch, hidden).astype("float32") for _ in range(1 + (kind == "lstm"))]
    h: Any = tuple(Tensor(s) for s in state) if kind == "lstm" else Tensor(state[0])
    out, last = model(Tensor(numbers.astype("float32")), h if start else None)
    assert out.shape == (steps * batch, words)
    out.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.shape == p.shape, name
    if kind == "transformer":
        assert last.shape == (steps, batch, embedding) and model.linear.weight.shape == (embedding, words)
        return
    theirs = (torch.nn.RNN if kind == "rnn" else torch.nn.LSTM)(embedding, hidden, layers).double()
    for k, cell in enumerate(model.sequence.cells):
        for ours, name in (
            ("W_ih", "weight_ih"),
            ("W_hh", "weight_hh"),
            ("bias_ih", "bias_ih"),
            ("bias_hh", "bias_hh"),
        ):
            getattr(theirs, f"{name}_l{k}").data = torch.tensor(getattr(cell, ours).numpy().T.astype("float64"))
    weights = {k: torch.tensor(p.numpy().astype("float64"), requires_grad=True) for k, p in model.named_parameters()}
    ht: Any = tuple(torch.tensor(s.astype("float64")) for s in state)
    ht = (ht if kind == "lstm" else ht[0]) if start else None
    hidden_states, want_last = theirs(weights["embedding.weight"][torch.tensor(numbers)], ht)
    want = hidden_states.reshape(steps * batch, hidden) @ weights["linear.weight"] + weights["linear.bias"]
    want.sum().backward()
    close(out, want)
    for a, b in zip(last if kind == "lstm" else [last], want_last if kind == "lstm" else [want_last], strict=True):
        close(a, b)
    for name in ("embedding.weight", "linear.weight", "linear.bias"):
        close(dict(model.named_parameters())[name].grad, weights[name].grad)


def test_language_model_draws_embedding_sequence_linear() -> None:
    np.random.seed(2)
    model = LanguageModel(3, 5, 4, 1, "lstm")
    np.random.seed(2)
    np.testing.assert_array_equal(model.embedding.weight.numpy(), np.random.randn(5, 3).astype("float32"))
    lstm = nn.LSTM(3, 4)
    for a, b in zip(model.sequence.parameters(), lstm.parameters(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    np.testing.assert_array_equal(model.linear.weight.numpy(), ndl.init.kaiming_uniform(4, 5).numpy())
    assert isinstance(LanguageModel(3, 5, 4).sequence, nn.RNN)


def test_language_model_transformer_sees_at_most_seq_len_words() -> None:
    model = LanguageModel(4, 5, 6, 1, "transformer", seq_len=3)
    assert model.sequence.positional_embedding.weight.shape == (3, 4)
    with pytest.raises(ValueError, match="at most 3 steps, got 4"):
        model(Tensor(np.zeros((4, 1), "float32")))
    with pytest.raises(ValueError, match=r"\[LanguageModel\] seq_model expects rnn, lstm or transformer, got gru\."):
        LanguageModel(4, 5, 6, 1, "gru")


@pytest.mark.parametrize("kind", ["rnn", "lstm", "transformer"])
def test_language_model_compiled(kind: str) -> None:
    need_executor()
    model = LanguageModel(6, 11, 7, 2, kind).eval()
    numbers = np.random.randint(0, 11, (5, 3)).astype("float32")
    want, h = model(Tensor(numbers))
    exe = ndl.compile(model, (numbers,))
    np.testing.assert_allclose(exe(numbers)[0], want.numpy(), atol=1e-5)
    again, _ = model(Tensor(numbers), h)
    np.testing.assert_allclose(ndl.compile(model, (numbers, h))(numbers, h)[0], again.numpy(), atol=1e-5)
