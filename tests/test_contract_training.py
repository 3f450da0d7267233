"""Training loops to the contract: what they draw, return and weigh; checkpoints that resume bit for bit; the command line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

import needle as ndl
from datafiles import idx, write_mnist
from needle import autograd, data, nn, optim, training
from needle.training import train as training_train


@pytest.fixture
def seeds(monkeypatch: Any) -> list[int]:
    """Every seed given to numpy's global stream."""
    given: list[int] = []
    seed = np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda n=None: (given.append(n), seed(n))[1])
    return given


def classes(n: int = 50, d: int = 6) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.randn(n, d).astype("float32")
    return x, x[:, :3].argmax(1).astype("uint8")


# -- two layers by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_parse_mnist(tmp_path: Path, packed: bool) -> None:
    x = np.arange(60, dtype="uint8").reshape(3, 4, 5) * 4
    for name, content in (("x", idx(x)), ("y", idx(np.array([1, 0, 9], "uint8")))):
        (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    X, y = training.parse_mnist(str(tmp_path / "x"), str(tmp_path / "y"))
    assert X.shape == (3, 20) and X.dtype == np.float32 and y.dtype == np.uint8
    np.testing.assert_allclose(X, x.reshape(3, 20) / 255, rtol=1e-6)
    assert y.tolist() == [1, 0, 9]


def test_softmax_loss_and_loss_err() -> None:
    z, y = np.random.randn(9, 4).astype("float32"), np.random.randint(0, 4, 9).astype("uint8")
    Z, hot = ndl.Tensor(z), ndl.Tensor(np.eye(4, dtype="float32")[y])
    t = torch.tensor(z, requires_grad=True)
    want = torch.nn.functional.cross_entropy(t, torch.tensor(y.astype("int64")))
    want.backward()
    loss = training.softmax_loss(Z, hot)
    loss.backward()
    np.testing.assert_allclose(loss.numpy(), want.item(), rtol=1e-5)
    np.testing.assert_allclose(Z.grad.numpy(), t.grad.numpy(), atol=1e-6)
    np.testing.assert_allclose(hot.grad.numpy(), -z / 9, rtol=1e-5, atol=1e-7)
    got, error = training.loss_err(Z, y)
    np.testing.assert_allclose(got, want.item(), rtol=1e-5)
    assert error == np.mean(z.argmax(1) != y)
    uniform = training.softmax_loss(
        ndl.Tensor(np.zeros((5, 10), "float32")), ndl.Tensor(np.eye(10, dtype="float32")[:5])
    )
    np.testing.assert_allclose(uniform.numpy(), 2.3025850, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^\[softmax_loss\] y_one_hot expects shape \(9, 4\), got \(9,\)\.$"):
        training.softmax_loss(Z, ndl.Tensor(y.astype("float32")))


def test_nn_epoch_is_gradient_descent_in_order() -> None:
    x, y = classes()
    w1, w2 = np.random.randn(6, 8).astype("float32"), np.random.randn(8, 3).astype("float32")
    W1, W2 = ndl.Tensor(w1), ndl.Tensor(w2)
    a, b = training.nn_epoch(x, y, W1, W2, lr=0.5, batch=20)
    t1, t2 = torch.tensor(w1, requires_grad=True), torch.tensor(w2, requires_grad=True)
    for i in range(0, 50, 20):
        out = torch.relu(torch.tensor(x[i : i + 20]) @ t1) @ t2
        grads = torch.autograd.grad(
            torch.nn.functional.cross_entropy(out, torch.tensor(y[i : i + 20]).long()), (t1, t2)
        )
        with torch.no_grad():
            t1 -= 0.5 * grads[0]
            t2 -= 0.5 * grads[1]
    np.testing.assert_allclose(a.numpy(), t1.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(b.numpy(), t2.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(W1.numpy(), w1)
    assert a.requires_grad and a.is_leaf()


# -- passes over the data --------------------------------------------------------------------------------------------


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def test_epoch_weighs_by_samples_and_sets_modes(seeds: list[int]) -> None:
    x, y = classes()
    loader = data.DataLoader(data.NDArrayDataset(x, y), 16)
    model = small_model()
    before = [p.numpy() for p in model.parameters()]
    error, loss = training.epoch(loader, model)
    assert seeds == [4] and not any(m.training for _, m in model.named_modules())
    out = model(ndl.Tensor(x)).numpy().astype("float64")
    want = np.mean(np.log(np.exp(out).sum(1)) - out[np.arange(50), y])
    assert type(error) is float and type(loss) is float
    assert error == np.mean(out.argmax(1) != y) and loss == pytest.approx(want, rel=1e-5)
    for p, v in zip(model.parameters(), before, strict=True):
        np.testing.assert_array_equal(p.numpy(), v)
    training.epoch(loader, model, optim.SGD(model.parameters(), 0.1))
    assert seeds == [4, 4] and all(m.training for _, m in model.named_modules())
    assert not np.array_equal(before[0], model.parameters()[0].numpy())


def test_an_epoch_is_the_plain_loop() -> None:
    x, y = classes()
    results = []
    for by_hand in (False, True):
        np.random.seed(1)
        model = small_model()
        loader = data.DataLoader(data.NDArrayDataset(x, y), 16, shuffle=True)
        opt = optim.Adam(model.parameters(), lr=0.01)
        if by_hand:
            np.random.seed(4)
            losses, wrong = [], 0
            for X, Y in loader:
                opt.reset_grad()
                out = model(X)
                loss = nn.SoftmaxLoss()(out, Y)
                loss.backward()
                opt.step()
                losses += [loss.item()] * len(X)
                wrong += int((out.numpy().argmax(1) != Y.numpy()).sum())
            results.append((wrong / 50, np.mean(losses)))
        else:
            results.append(training.epoch(loader, model, opt))
        results.append(model.parameters()[0].numpy())
    assert results[0] == pytest.approx(results[2])
    np.testing.assert_array_equal(results[1], results[3])


@pytest.mark.usefixtures("no_collector")
def test_epochs_leave_no_tensors() -> None:
    loader = data.DataLoader(data.NDArrayDataset(*classes()), 16)
    model = small_model()
    opt = optim.Adam(model.parameters())
    training.epoch(loader, model, opt)
    before = autograd.TENSOR_COUNTER
    for _ in range(3):
        training.epoch(loader, model, opt)
        training.epoch(loader, model)
    assert autograd.TENSOR_COUNTER == before


def test_cifar10_passes_give_accuracy(seeds: list[int]) -> None:
    x, y = classes()
    loader = data.DataLoader(data.NDArrayDataset(x, y), 16, shuffle=True)
    model = small_model()
    accuracy, loss = training.evaluate_cifar10(model, loader)
    assert set(seeds) == {4}
    error, same = training.epoch(loader, model)
    assert accuracy == pytest.approx(1 - error) and loss == pytest.approx(same)
    assert training.epoch_general_cifar10(loader, model, nn.SoftmaxLoss()) == (accuracy, loss)
    del seeds[:]
    trained = training.train_cifar10(model, loader, 8, optimizer=optim.Adam, lr=0.02, weight_decay=0.0)
    assert seeds == [4] * 9 and trained[0] > accuracy and trained[1] < loss


def test_empty_data_is_one_sentence() -> None:
    loader = data.DataLoader(data.NDArrayDataset(np.zeros((0, 6), "float32"), np.zeros(0)), 4)
    with pytest.raises(ValueError, match=r"^\[epoch\] the data loader expects at least one batch, got none\.$"):
        training.epoch(loader, small_model())
    with pytest.raises(ValueError, match=r"^\[epoch_general_ptb\] data expects at least 2 rows, got 1\.$"):
        training.evaluate_ptb(small_model(), np.zeros((1, 4)))


class Spy(nn.Module):
    """A language model that guesses one word and shows what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(np.random.randn(1, 7).astype("float32"))
        self.seen: list[Any] = []

    def forward(self, x: Any, h: Any = None) -> Any:
        self.seen.append((x.numpy(), h, self.training))
        rows = x.shape[0] * x.shape[1]
        state = (self.scores * 2.0, [self.scores + float(len(self.seen))])
        return ndl.broadcast_to(self.scores, (rows, 7)), state


def test_ptb_pass_carries_detached_state_and_weighs_by_tokens(seeds: list[int]) -> None:
    tokens = data.batchify(np.random.randint(0, 7, 4 * 12).tolist(), 4)
    model = Spy()
    accuracy, loss = training.evaluate_ptb(model, tokens, seq_len=5)
    assert set(seeds) == {4}
    assert [x.shape for x, _, _ in model.seen] == [(5, 4), (5, 4), (1, 4)]
    np.testing.assert_array_equal(np.concatenate([x for x, _, _ in model.seen]), tokens[:11])
    assert model.seen[0][1] is None and not any(mode for _, _, mode in model.seen)
    targets = tokens[1:].reshape(-1).astype("int64")
    scores = model.scores.numpy()[0].astype("float64")
    assert loss == pytest.approx(np.mean(np.log(np.exp(scores).sum()) - scores[targets]), rel=1e-5)
    assert accuracy == np.mean(targets == scores.argmax())

    model.seen.clear()
    training.epoch_general_ptb(tokens, model, 5, opt=optim.SGD(model.parameters(), 0.1))
    assert all(mode for _, _, mode in model.seen)
    for _, h, _ in model.seen[1:]:
        assert isinstance(h, tuple) and isinstance(h[1], list)
        assert h[0].is_leaf() and h[1][0].is_leaf() and not h[0].requires_grad


def test_ptb_clips_gradients_together() -> None:
    tokens = data.batchify(np.random.randint(0, 3, 40).tolist(), 4)
    moved = []
    for clip in (None, 1e-3):
        np.random.seed(0)
        model = Spy()
        before = model.scores.numpy()
        training.train_ptb(model, tokens, 40, 1, lr=1.0, clip=clip)
        moved.append(float(np.linalg.norm(model.scores.numpy() - before)))
    assert moved[0] > 0.05 and moved[1] == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("kind", ["rnn", "lstm", "transformer"])
def test_ptb_trains_each_model(kind: str) -> None:
    from needle.models import LanguageModel

    tokens = data.batchify((list(range(7)) * 30)[:200], 4)
    model = LanguageModel(8, 7, 12, 1, seq_model=kind, seq_len=6)
    before = training.evaluate_ptb(model, tokens, 6)
    training.train_ptb(model, tokens, 6, 5, optimizer=optim.Adam, lr=0.01, clip=1.0)
    after = training.evaluate_ptb(model, tokens, 6)
    assert after[1] < before[1] - 0.5 and after[0] > 0.8


def test_train_mnist_is_seeded_and_shuffles(tmp_path: Path, seeds: list[int], monkeypatch: Any) -> None:
    loaders: list[Any] = []

    class Spied(data.DataLoader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            loaders.append(self)

    monkeypatch.setattr(training_train, "DataLoader", Spied)
    write_mnist(tmp_path)
    results = training.train_mnist(20, 3, optim.Adam, 0.01, 0.0, 16, str(tmp_path))
    assert seeds == [4] * 5 and [loader.shuffle for loader in loaders] == [True, False]
    assert len(results) == 4 and all(type(r) is float for r in results)
    np.random.seed(99)
    assert training.train_mnist(20, 3, optim.Adam, 0.01, 0.0, 16, str(tmp_path), workers=2) == results
    assert training.train_mnist(20, 3, optim.Adam, 0.01, 0.0, 16, tmp_path, split=40) != results
    with pytest.raises(ValueError, match=r"split expects 1 to 59, got 60\.$"):
        training.train_mnist(data_dir=tmp_path, split=60)


# -- checkpoints -----------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop_after(n: int) -> Callable[[int, Any], None]:
    def report(done: int, _: Any) -> None:
        if done == n:
            raise Stop

    return report


def same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (_, y) in zip(a.named_tensors(), b.named_tensors(), strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy(), err_msg=name)


def cosine(opt: optim.Optimizer) -> optim.Schedule:
    return optim.CosineAnnealingLR(opt, 5)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_a_resumed_run_equals_the_whole_one(name: str, tmp_path: Path) -> None:
    x, y = classes()
    loader = data.DataLoader(data.NDArrayDataset(x, y), 16, shuffle=True)
    whole = small_model()
    start = whole.state_dict()
    start = {k: v.numpy() for k, v in start.items()}
    options: dict[str, Any] = {"optimizer": getattr(optim, name), "lr": 0.02, "schedule": cosine}
    want = training.train_cifar10(whole, loader, 5, **options)
    after = np.random.rand()
    path = tmp_path / "state"
    stopped = small_model()
    stopped.load_state_dict(start)
    with pytest.raises(Stop):
        training.train_cifar10(stopped, loader, 5, checkpoint=path, report=stop_after(2), **options)
    resumed = small_model()
    np.random.seed(77)
    assert training.train_cifar10(resumed, loader, 5, checkpoint=path, resume=True, **options) == want
    assert np.random.rand() == after
    same(whole, resumed)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    again = small_model()
    assert training.train_cifar10(again, loader, 5, checkpoint=path, resume=True, **options) == want
    same(whole, again)


def test_mnist_and_ptb_resume(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    run = lambda **more: training.train_mnist(20, 3, hidden_dim=16, data_dir=tmp_path, **more)  # noqa: E731
    want = run()
    with pytest.raises(Stop):
        run(checkpoint=tmp_path / "m", report=stop_after(1))
    assert run(checkpoint=tmp_path / "m", resume=True) == want


def checkpoint(path: Path) -> tuple[nn.Module, optim.Optimizer]:
    model = small_model()
    opt = optim.Adam(model.parameters())
    training.save_checkpoint(path, model, opt, 3, (0.5, 1.0))
    return model, opt


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    with safe_open(path, framework="numpy") as f:
        arrays = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        document = json.loads(f.metadata()["needle_checkpoint"])
    change(arrays, document)
    save_file(arrays, path, metadata={"needle_checkpoint": json.dumps(document)})


BAD_CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "empty": lambda p: p.write_bytes(b""),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-5]),
    "other": lambda p: save_file({"a": np.zeros(3)}, p),
    "version": lambda p: rewritten(p, lambda a, d: d.update(version=9)),
    "no epochs": lambda p: rewritten(p, lambda a, d: d.pop("epochs")),
    "random": lambda p: rewritten(p, lambda a, d: a.update({"random/keys": np.zeros(3, "uint32")})),
    "schedule": lambda p: rewritten(p, lambda a, d: d.update(schedule={})),
    "optimizer": lambda p: rewritten(p, lambda a, d: d["optimizer"].update(kind="SGD")),
    "place": lambda p: rewritten(p, lambda a, d: a.update({"optimizer/x/mean": np.zeros(3)})),
    "slot": lambda p: rewritten(p, lambda a, d: a.update({"optimizer/0": np.zeros(3)})),
    "options": lambda p: rewritten(p, lambda a, d: d["optimizer"].pop("options")),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoints_are_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    model, opt = checkpoint(path)
    assert training.load_checkpoint(path, model, opt) == (3, [0.5, 1.0])
    BAD_CHECKPOINTS[name](path)
    with pytest.raises(ValueError, match=r"^\[\w+\] [^\n]*\.$"):
        training.load_checkpoint(path, model, opt)


def test_a_checkpoint_of_another_model_or_schedule(tmp_path: Path) -> None:
    path = tmp_path / "state"
    model, opt = checkpoint(path)
    with pytest.raises(ValueError, match=r"expect the same schedule, got a file with none\.$"):
        training.load_checkpoint(path, model, opt, cosine(opt))
    rewritten(path, lambda a, d: d.update(schedule={}))
    with pytest.raises(ValueError, match=r"^\[load_checkpoint\] the schedule in .* is not complete\.$"):
        training.load_checkpoint(path, model, opt, cosine(opt))
    model, opt = checkpoint(path)
    rewritten(path, lambda a, d: a.pop("model/0.weight"))
    with pytest.raises(ValueError, match=r"^\[load_state_dict\]"):
        training.load_checkpoint(path, model, opt)


def test_bad_arguments(tmp_path: Path) -> None:
    run = lambda **k: training.train_cifar10(small_model(), None, **k)  # type: ignore[arg-type] # noqa: E731
    with pytest.raises(ValueError, match=r"^\[training\] epochs expects at least 1, got 0\.$"):
        run(n_epochs=0)
    with pytest.raises(ValueError, match=r"^\[training\] resume expects checkpoint=PATH, got None\.$"):
        run(resume=True)
    with pytest.raises(FileNotFoundError, match=r"^\[load_checkpoint\] there is no file .*\.$"):
        run(checkpoint=tmp_path / "none", resume=True)
    model = small_model()
    with pytest.raises(FileNotFoundError, match=r"^\[save_checkpoint\] there is no folder .*\.$"):
        training.save_checkpoint(tmp_path / "no" / "file", model, optim.SGD(model.parameters()), 1)
    for what, given in (("epochs expects", (model,)), ("results expect", (1, model))):
        with pytest.raises(TypeError, match=rf"^\[save_checkpoint\] {what} .*\.$"):
            training.save_checkpoint(tmp_path / "file", model, optim.SGD(model.parameters()), *given)
