"""Models that learn: real digits, and real English next to the same models in torch, step by step."""

from __future__ import annotations

import pydoc_data.topics
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from needle import data, nn, optim, training
from needle.models import LanguageModel

ON_NUMPY = ndl.default_device() == ndl.cpu_numpy()
MNIST = Path(__file__).parents[2] / "shared" / "data" / "mnist"
HALF = 8000  # the files hold 10,000 digits: so many to learn from, the rest to measure

# -- MNIST -----------------------------------------------------------------------------------------------------------


def digits(copies: int = 0) -> tuple[data.DataLoader, data.DataLoader]:
    """Loaders of the first and the last digits; `copies` of each of the first, moved at random, learn along."""
    files = [MNIST / f"t10k-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    if not all(f.is_file() for f in files):
        pytest.skip("no MNIST files beside the repository")
    ds, moved = data.MNISTDataset(*files), data.MNISTDataset(*files, transforms=[data.RandomCrop(2)])
    parts = [ds[:HALF], *(moved[:HALF] for _ in range(copies))]
    train = data.NDArrayDataset(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    test = data.NDArrayDataset(*ds[HALF:])
    return data.DataLoader(train, 100 if copies else 50, shuffle=True), data.DataLoader(test, 500)


def test_logistic_regression_on_mnist() -> None:
    train, test = digits()
    model = nn.Sequential(nn.Linear(784, 10))
    opt = optim.Adam(model.parameters(), lr=0.002)
    for _ in range(4 if ON_NUMPY else 8):
        training.epoch(train, model, opt)
    error, loss = training.epoch(test, model)
    print(f"logistic regression: accuracy {1 - error:.4f}, loss {loss:.4f}")
    assert 1 - error >= 0.92


@pytest.mark.skipif(ON_NUMPY, reason="too slow in numpy")
def test_mlp_on_mnist() -> None:
    train, test = digits(copies=3)  # without the shifted copies it stays at 95.8 %
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 100), nn.ReLU(), nn.Linear(100, 10)]
    model = nn.Sequential(*layers)
    opt = optim.Adam(model.parameters(), lr=0.001, weight_decay=0.0001)
    schedule = optim.CosineAnnealingLR(opt, 6)
    for _ in range(6):
        training.epoch(train, model, opt)
        schedule.step()
    error, loss = training.epoch(test, model)
    print(f"784-256-100-10: accuracy {1 - error:.4f}, loss {loss:.4f}")
    assert 1 - error >= 0.96


@pytest.mark.skipif(ON_NUMPY, reason="convolutions in numpy are slow")
def test_cnn_on_digits() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    x, y = sklearn.load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 1, 8, 8)
    order = np.random.RandomState(0).permutation(len(x))
    x, y = x[order], y[order]
    train = data.DataLoader(data.NDArrayDataset(x[:1400], y[:1400]), 50, shuffle=True)
    test = data.DataLoader(data.NDArrayDataset(x[1400:], y[1400:]), 100)
    model = nn.Sequential(
        nn.Conv(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv(16, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    training.train_cifar10(
        model, train, 12, lr=0.005, weight_decay=0.0, schedule=lambda o: optim.OneCycleLR(o, 0.01, 12)
    )
    accuracy, loss = training.evaluate_cifar10(model, test)
    print(f"CNN on digits: accuracy {accuracy:.4f}, loss {loss:.4f}")
    assert accuracy >= 0.97


# -- language models on the manual that Python ships -------------------------------------------------------------------

BATCH, LENGTH, STEPS, EMBEDDING, HIDDEN, LAYERS = 8, 12, 50, 16, 24, 2
HEADS, HEAD = 8, 32  # nn.Transformer's own
RULES = {"rnn": ("SGD", 1.0), "lstm": ("SGD", 1.0), "transformer": ("Adam", 0.01)}


def corpus(folder: Path) -> data.Corpus:
    """The manual's topics as train.txt and test.txt: lower-case words, the 200 most frequent ones by name."""
    topics = pydoc_data.topics.topics
    lines = [re.findall(r"[a-z]+|[.,]", line.lower()) for name in sorted(topics) for line in topics[name].splitlines()]
    lines = [line for line in lines if len(line) > 3]
    count: dict[str, int] = {}
    for line in lines:
        for word in line:
            count[word] = count.get(word, 0) + 1
    known = set(sorted(count, key=lambda w: (-count[w], w))[:200])
    text = [" ".join(w if w in known else "<unk>" for w in line) for line in lines]
    (folder / "train.txt").write_text("\n".join(text[:2000]))
    (folder / "test.txt").write_text("\n".join(text[-200:]))
    return data.Corpus(folder)


class Losses(nn.Module):
    """The loss of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.values = nn.SoftmaxLoss(), []

    def forward(self, out: Any, y: Any) -> Any:
        loss = self.loss(out, y)
        self.values.append(loss.item())
        return loss


def tensor(p: Any) -> torch.Tensor:
    return torch.tensor(p.numpy())


class TorchModel(torch.nn.Module):
    """The same language model in torch, from the same weights."""

    def __init__(self, model: LanguageModel, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = torch.nn.Embedding.from_pretrained(tensor(model.embedding.weight), freeze=False)
        if kind == "transformer":
            self.positions = torch.nn.Parameter(tensor(model.sequence.positional_embedding.weight))
            self.layers = torch.nn.ModuleList([TorchLayer(layer) for layer in model.sequence.layers])
        else:
            self.recurrent = getattr(torch.nn, kind.upper())(EMBEDDING, HIDDEN, LAYERS)
            cells = model.sequence.rnn_cells if kind == "rnn" else model.sequence.lstm_cells
            for k, cell in enumerate(cells):
                for name, value in (("ih", cell.W_ih), ("hh", cell.W_hh)):
                    getattr(self.recurrent, f"weight_{name}_l{k}").data = tensor(value).T.contiguous()
                    getattr(self.recurrent, f"bias_{name}_l{k}").data = tensor(getattr(cell, f"bias_{name}"))
        self.weight = torch.nn.Parameter(tensor(model.linear.weight))
        self.bias = torch.nn.Parameter(tensor(model.linear.bias))

    def forward(self, x: torch.Tensor, h: Any) -> Any:
        e = self.embedding(x)
        if self.kind == "transformer":
            e = e.transpose(0, 1) + self.positions[: len(x)]
            for layer in self.layers:
                e = layer(e)
            e = e.transpose(0, 1)
        else:
            e, h = self.recurrent(e, h)
            h = tuple(s.detach() for s in h) if isinstance(h, tuple) else h.detach()
        return e.flatten(0, 1) @ self.weight + self.bias, h


class TorchLayer(torch.nn.Module):
    """The course's transformer layer: norms before projections without bias, before the two linear layers."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        a, ff = layer.attention, layer.feed_forward.modules
        norms = {"q": a.prenorm_q, "k": a.prenorm_k, "v": a.prenorm_v, "n": layer.norm}
        values = {f"scale_{k}": norm.weight for k, norm in norms.items()}
        values |= {f"shift_{k}": norm.bias for k, norm in norms.items()}
        values |= {k: getattr(a, f"{k}_projection").weight for k in ("q", "k", "v", "out")}
        values |= {"w1": ff[0].weight, "b1": ff[0].bias, "w2": ff[3].weight, "b2": ff[3].bias}
        self.p = torch.nn.ParameterDict({k: torch.nn.Parameter(tensor(v)) for k, v in values.items()})

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = self.p[f"scale_{name}"].reshape(-1), self.p[f"shift_{name}"].reshape(-1)
        return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = ((self.norm(x, n) @ self.p[n]).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for n in ("q", "k", "v"))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2) @ self.p["out"]
        return x + torch.relu(self.norm(x, "n") @ self.p["w1"] + self.p["b1"]) @ self.p["w2"] + self.p["b2"]


def torch_losses(model: TorchModel, tokens: np.ndarray, opt: Any, clip: float) -> list[float]:
    losses, h = [], None
    words = torch.tensor(tokens.astype("int64"))
    for i in range(0, len(words) - 1, LENGTH):
        n = min(LENGTH, len(words) - 1 - i)
        out, h = model(words[i : i + n], h)
        loss = torch.nn.functional.cross_entropy(out, words[i + 1 : i + 1 + n].flatten())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["rnn", "lstm", "transformer"])
def test_language_model_learns_as_in_torch(kind: str, tmp_path: Path) -> None:
    text = corpus(tmp_path)
    words = len(text.dictionary)
    tokens = data.batchify(text.train, BATCH)[: STEPS * LENGTH + 1]
    test = data.batchify(text.test, BATCH)
    model = LanguageModel(EMBEDDING, words, HIDDEN, LAYERS, seq_model=kind, seq_len=LENGTH)
    theirs = TorchModel(model, kind)
    before = training.evaluate_ptb(model, test, LENGTH)
    losses = Losses()
    rule, lr = RULES[kind]
    _, mean = training.train_ptb(model, tokens, LENGTH, optimizer=getattr(optim, rule), lr=lr, clip=1.0, loss_fn=losses)
    want = torch_losses(theirs, tokens, getattr(torch.optim, rule)(theirs.parameters(), lr), 1.0)
    assert len(losses.values) == STEPS == len(want)
    np.testing.assert_allclose(losses.values, want, atol=1e-3)
    assert mean == pytest.approx(np.mean(want), abs=1e-3)
    after = training.evaluate_ptb(model, test, LENGTH)
    print(f"{kind}: perplexity {np.exp(before[1]):.1f} before, {np.exp(after[1]):.1f} after {STEPS} steps")
    assert np.exp(after[1]) < words / 2 < np.exp(before[1])
