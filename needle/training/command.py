"""Train a model on files of your own, with checkpoints. Exit codes: 0 done, 1 bad data, 2 bad usage, 130 stopped."""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from needle import backend_ndarray, optim
from needle.data import CIFAR10Dataset, Corpus, DataLoader, RandomCrop, RandomFlipHorizontal, batchify

from .loops import evaluate_cifar10, evaluate_ptb
from .train import Pair, train_cifar10, train_mnist, train_ptb

RULES = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax)
OPTIMIZERS = {rule.__name__.lower(): rule for rule in (*RULES, optim.NAdam, optim.RAdam, optim.Lion)}
DEVICES = {"cpu": backend_ndarray.cpu, "cuda": backend_ndarray.cuda, "hip": backend_ndarray.hip}
DEVICES["cpu_numpy"] = backend_ndarray.cpu_numpy


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help texts with their defaults, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def positive(text: str, least: int = 1) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"expects at least {least}, got {number}")
    return number


def count(text: str) -> int:
    return positive(text, 0)


def positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expects a positive number, got {text}")
    return number


def common(
    parser: argparse.ArgumentParser, *, optimizer: str, lr: float, decay: float, batch: int, epochs: int
) -> None:
    add = parser.add_argument
    add("--data", required=True, metavar="PATH", help="the folder with the files")
    add("--epochs", type=positive, default=epochs, help="epochs in all, resumed ones included")
    add("--batch-size", type=positive, default=batch, help="samples, or columns of text, in a step")
    add("--optimizer", choices=OPTIMIZERS, default=optimizer, help="rule of the steps")
    add("--lr", type=positive_float, default=lr, help="learning rate")
    add("--weight-decay", type=float, default=decay, help="times the weights, added to the gradient")
    add("--schedule", choices=("constant", "cosine"), default="constant", help="learning rate over the epochs")
    add("--checkpoint", metavar="FILE", help="write the state here after every epoch")
    add("--resume", action="store_true", help="go on from the state in --checkpoint")
    add("--device", choices=DEVICES, help="default: what NEEDLE_BACKEND says")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m needle.training", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="mnist|cifar10|ptb")

    mnist = tasks.add_parser("mnist", formatter_class=Help, help="MLPResNet on IDX files (gzip or plain)")
    mnist.description = "Train MLPResNet on a folder with train-images-idx3-ubyte[.gz], its labels and the t10k files."
    common(mnist, optimizer="adam", lr=0.001, decay=0.001, batch=100, epochs=10)
    mnist.add_argument("--hidden-dim", type=positive, default=100, help="width of the model")
    mnist.add_argument("--split", type=positive, help="train on so many of the t10k images, test on the rest")
    mnist.add_argument("--workers", type=count, default=0, help="threads that read ahead")

    cifar10 = tasks.add_parser("cifar10", formatter_class=Help, help="ResNet9 on CIFAR-10's python batches")
    cifar10.description = "Train ResNet9 on the folder cifar-10-batches-py."
    common(cifar10, optimizer="adam", lr=0.001, decay=0.001, batch=128, epochs=10)
    cifar10.add_argument(
        "--model", choices=("resnet9", "resnet9wide"), default="resnet9", help="432 thousand or 6.6 million weights"
    )
    cifar10.add_argument("--augment", action="store_true", help="random crops and flips")
    cifar10.add_argument("--workers", type=count, default=0, help="threads that read ahead")
    cifar10.add_argument("--seed", type=count, default=0, help="of the first weights")

    ptb = tasks.add_parser("ptb", formatter_class=Help, help="a language model on train.txt and test.txt")
    ptb.description = "Train a language model on a folder with train.txt and test.txt, words divided by spaces."
    common(ptb, optimizer="sgd", lr=4.0, decay=0.0, batch=16, epochs=10)
    ptb.add_argument("--model", choices=("rnn", "lstm", "transformer"), default="lstm", help="what reads the text")
    ptb.add_argument("--embedding-size", type=positive, default=100, help="length of a word's vector")
    ptb.add_argument("--hidden-size", type=positive, default=100, help="length of the hidden state")
    ptb.add_argument("--layers", type=positive, default=1, help="layers of the model that reads")
    ptb.add_argument("--seq-len", type=positive, default=40, help="words in a step, per column")
    ptb.add_argument("--clip", type=positive_float, help="largest norm of all gradients together")
    ptb.add_argument("--max-lines", type=positive, help="read so many lines of each file at most")
    ptb.add_argument("--seed", type=count, default=0, help="of the first weights")

    args = parser.parse_args(argv)
    if args.resume and not args.checkpoint:
        parser.error("--resume expects --checkpoint FILE")
    return args


def options(args: argparse.Namespace, text: Callable[[Pair], str]) -> dict[str, Any]:
    """What `fit` takes, from the common arguments."""
    made = {name: getattr(args, name) for name in ("lr", "weight_decay", "checkpoint", "resume")}
    made["optimizer"] = OPTIMIZERS[args.optimizer]
    made["report"] = lambda done, results: print(f"epoch {done}/{args.epochs}: {text(results)}", flush=True)
    if args.schedule == "cosine":
        made["schedule"] = functools.partial(optim.CosineAnnealingLR, T_max=args.epochs)
    return made


def device_of(args: argparse.Namespace) -> Any:
    return DEVICES[args.device]() if args.device else None


def error_text(results: Pair) -> str:
    return f"error {results[0]:.4f}, loss {results[1]:.4f}"


def accuracy_text(results: Pair) -> str:
    return f"accuracy {results[0]:.4f}, loss {results[1]:.4f}"


def perplexity_text(results: Pair) -> str:
    perplexity = math.exp(results[1]) if results[1] < 700 else math.inf
    return f"{accuracy_text(results)}, perplexity {perplexity:.2f}"


def run_mnist(args: argparse.Namespace) -> str:
    results = train_mnist(
        args.batch_size,
        args.epochs,
        hidden_dim=args.hidden_dim,
        data_dir=args.data,
        split=args.split,
        workers=args.workers,
        device=device_of(args),
        **options(args, error_text),
    )
    return error_text(results[2:])


def run_cifar10(args: argparse.Namespace) -> str:
    from needle.models import ResNet9, ResNet9Wide

    np.random.seed(args.seed)
    device = device_of(args)
    model = (ResNet9 if args.model == "resnet9" else ResNet9Wide)(device=device)
    transforms = [RandomCrop(4), RandomFlipHorizontal()] if args.augment else None
    shared: dict[str, Any] = {"workers": args.workers, "device": device}
    train = DataLoader(CIFAR10Dataset(args.data, True, transforms=transforms), args.batch_size, shuffle=True, **shared)
    test = DataLoader(CIFAR10Dataset(args.data, False), args.batch_size, **shared)
    train_cifar10(model, train, args.epochs, **options(args, accuracy_text))
    return accuracy_text(evaluate_cifar10(model, test))


def run_ptb(args: argparse.Namespace) -> str:
    from needle.models import LanguageModel

    np.random.seed(args.seed)
    device = device_of(args)
    corpus = Corpus(args.data, args.max_lines)
    train, test = batchify(corpus.train, args.batch_size), batchify(corpus.test, args.batch_size)
    sizes = (args.embedding_size, len(corpus.dictionary), args.hidden_size, args.layers)
    model = LanguageModel(*sizes, seq_model=args.model, seq_len=args.seq_len, device=device)
    train_ptb(model, train, args.seq_len, args.epochs, clip=args.clip, device=device, **options(args, perplexity_text))
    return perplexity_text(evaluate_ptb(model, test, args.seq_len, device=device))


RUNS = {"mnist": run_mnist, "cifar10": run_cifar10, "ptb": run_ptb}


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        print(f"test: {RUNS[args.task](args)}")
    except KeyboardInterrupt:
        print("Stopped; --checkpoint holds the last whole epoch." if args.checkpoint else "Stopped.", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError) as e:
        print(e, file=sys.stderr)
        return 1
    except (MemoryError, OverflowError) as e:
        print(f"[training] the sizes are too large: {e}.", file=sys.stderr)
        return 1
    return 0
