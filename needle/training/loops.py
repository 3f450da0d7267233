"""One pass over the data, training or measuring. Each begins with `np.random.seed(4)`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from needle import nn
from needle.autograd import Tensor
from needle.backend_ndarray import Device
from needle.backend_selection import default_device
from needle.data import DataLoader, get_batch
from needle.op import no_grad
from needle.optim import Optimizer

SEED = 4  # the course's


def progress(items: Iterable[Any], label: str) -> Iterator[Any]:
    """The items with a bar, on terminals and once a second has passed."""
    return iter(tqdm(items, desc=label, delay=1.0, leave=False, disable=None))


def device_of(model: nn.Module) -> Device:
    parameters = model.parameters()
    return parameters[0].device if parameters else default_device()


def placed(x: Tensor, device: Device) -> Tensor:
    """x as a constant on `device`."""
    return x.detach() if x.device == device else Tensor(x, device=device, requires_grad=False)


@contextlib.contextmanager
def mode(model: nn.Module, opt: Optimizer | None) -> Iterator[None]:
    """Training mode with an optimizer; evaluation and no tape without."""
    model.train(opt is not None)
    with contextlib.nullcontext() if opt is not None else no_grad():
        yield


def update(loss: Tensor, opt: Optimizer, clip: float | None = None) -> None:
    """One step of the optimizer down the loss. clip: the largest norm of all gradients together."""
    opt.reset_grad()
    loss.backward()
    if clip is not None:
        opt.clip_grad_norm(clip)
    opt.step()
    opt.reset_grad()  # gradients keep the values that they come from: not into the next forward


def tally(
    answers: Iterable[tuple[Tensor, Tensor]], model: nn.Module, loss_fn: Any, opt: Optimizer | None, clip: float | None
) -> tuple[int, float, int]:
    """(right answers, summed loss, answers) of scores and class numbers, batch by batch, each made when it is asked for."""
    loss_fn = loss_fn() if isinstance(loss_fn, type) else loss_fn
    right, total, count = 0, 0.0, 0
    with mode(model, opt):
        for out, y in answers:
            loss = loss_fn(out, y)
            if opt is not None:
                update(loss, opt, clip)
            right += int((out.numpy().argmax(axis=1) == y.numpy()).sum())
            total += loss.item() * y.shape[0]
            count += y.shape[0]
    return right, total, count


def classify(
    label: str, loader: DataLoader, model: nn.Module, loss_fn: Any, opt: Optimizer | None
) -> tuple[int, float, int]:
    """(right answers, summed loss, samples) of one pass over batches (X, y)."""
    np.random.seed(SEED)
    device = device_of(model)
    answers = ((model(placed(X, device)), placed(y, device)) for X, y in progress(loader, label))
    right, total, count = tally(answers, model, loss_fn, opt, None)
    if not count:
        raise ValueError(f"[{label}] the data loader expects at least one batch, got none.")
    return right, total, count


def epoch(dataloader: DataLoader, model: nn.Module, opt: Optimizer | None = None) -> tuple[float, float]:
    """(error rate, mean loss over samples) of one pass; trains when there is an optimizer, else measures in evaluation mode."""
    right, total, count = classify("epoch", dataloader, model, nn.SoftmaxLoss(), opt)
    return (count - right) / count, total / count


def epoch_general_cifar10(
    dataloader: DataLoader, model: nn.Module, loss_fn: Any = nn.SoftmaxLoss, opt: Optimizer | None = None
) -> tuple[float, float]:
    """(accuracy, mean loss over samples) of one pass; trains when there is an optimizer, else measures in evaluation mode."""
    right, total, count = classify("epoch_general_cifar10", dataloader, model, loss_fn, opt)
    return right / count, total / count


def evaluate_cifar10(model: nn.Module, dataloader: DataLoader, loss_fn: Any = nn.SoftmaxLoss) -> tuple[float, float]:
    """(accuracy, mean loss over samples), in evaluation mode."""
    np.random.seed(SEED)
    return epoch_general_cifar10(dataloader, model, loss_fn)


def detached(h: Any) -> Any:
    """A hidden state, in nested tuples and lists, without its past."""
    if isinstance(h, tuple | list):
        return type(h)(detached(part) for part in h)
    return h.detach() if isinstance(h, Tensor) else h


def epoch_general_ptb(
    data: np.ndarray,
    model: nn.Module,
    seq_len: int = 40,
    loss_fn: Any = nn.SoftmaxLoss,
    opt: Optimizer | None = None,
    clip: float | None = None,
    device: Device | None = None,
    dtype: str = "float32",
) -> tuple[float, float]:
    """(accuracy, mean loss), both over tokens, of one pass over `batchify`'s array (nbatch, batch_size).

    The hidden state goes from piece to piece without its gradient. clip: the largest norm of all gradients together.
    """
    np.random.seed(SEED)
    if len(data) < 2:
        raise ValueError(f"[epoch_general_ptb] data expects at least 2 rows, got {len(data)}.")
    place = device or device_of(model)

    def answers() -> Iterator[tuple[Tensor, Tensor]]:
        h = None
        for i in progress(range(0, len(data) - 1, seq_len), "epoch_general_ptb"):
            X, y = get_batch(data, i, seq_len, device=place, dtype=dtype)
            out, h = model(X.detach(), h)
            h = detached(h)
            yield out, y.detach()

    right, total, count = tally(answers(), model, loss_fn, opt, clip)
    return right / count, total / count


def evaluate_ptb(
    model: nn.Module,
    data: np.ndarray,
    seq_len: int = 40,
    loss_fn: Any = nn.SoftmaxLoss,
    device: Device | None = None,
    dtype: str = "float32",
) -> tuple[float, float]:
    """(accuracy, mean loss), both over tokens, in evaluation mode; e to the loss is the perplexity."""
    np.random.seed(SEED)
    return epoch_general_ptb(data, model, seq_len, loss_fn, device=device, dtype=dtype)
