"""A trained network for Fashion-MNIST as a Relax module, built layer by layer in three forms.

python -m needle.course.tvm.fashion --weights FILE --data FOLDER [--show]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, topi

from needle.data.dataset import scaled
from needle.data.datasets import mnist_files, read_mnist
from needle.data.pickles import NUMBERS, read_pickle
from needle.files import existing
from needle.training.command import positive
from needle.tvm.command import exit_code
from needle.tvm.pipeline import build, fuse, target_of
from needle.tvm.relax_ops import sizes
from needle.tvm.vendor import call_packed

from .kernels import conv2d_te, matmul_te
from .schedules import schedule_conv2d, schedule_loops, schedule_matmul

CLASSES = (
    "T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
SIDE = 28  # pixels
SHOWN = 16  # images in the picture
Weights = dict[str, np.ndarray]

# -- files ---------------------------------------------------------------------------------------------------------------


def read_weights(path: str | os.PathLike) -> Weights:
    """The weight map in an npz file, or in a pickle of nothing but numpy arrays: conv2d, linear0, linear1; weight and bias."""
    name = existing("fashion", path)
    if zipfile.is_zipfile(path):
        try:
            with np.load(path, allow_pickle=False) as content:
                found: dict[str, Any] = dict(content)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
            raise ValueError(f"[fashion] {name} is no npz file of arrays, got: {e}.") from None
    else:
        found = {k.decode("latin-1"): v for k, v in read_pickle(path, NUMBERS).items()}
    return checked(name, found)


def checked(name: str, found: dict[str, Any]) -> Weights:
    """The map as float32 arrays whose shapes fit together."""
    ranks = {f"{layer}_{kind}": rank for layer, w in (("conv2d", 4), ("linear0", 2), ("linear1", 2))
             for kind, rank in (("weight", w), ("bias", 1))}  # fmt: skip
    for key, rank in ranks.items():
        value = found.get(key)
        if not isinstance(value, np.ndarray) or value.ndim != rank:
            got = f"shape {value.shape}" if isinstance(value, np.ndarray) else "no array" if key in found else "nothing"
            raise ValueError(f"[fashion] {name} expects an array {key} of {rank} axes, got {got}.")
    weights = {k: np.ascontiguousarray(found[k], "float32") for k in ranks}
    channels, depth, height, width = weights["conv2d_weight"].shape
    if depth != 1 or max(height, width) >= SIDE:
        raise ValueError(
            f"[fashion] conv2d_weight expects kernels of one channel, got {weights['conv2d_weight'].shape}."
        )
    pooled = channels * ((SIDE - height + 1) // 2) * ((SIDE - width + 1) // 2)
    hidden, classes = weights["linear0_weight"].shape[0], weights["linear1_weight"].shape[0]
    wanted = {
        "conv2d_bias": (channels,), "linear0_weight": (hidden, pooled), "linear0_bias": (hidden,),
        "linear1_weight": (classes, hidden), "linear1_bias": (classes,),
    }  # fmt: skip
    for key, shape in wanted.items():
        if weights[key].shape != shape:
            raise ValueError(f"[fashion] {key} expects shape {shape}, got {weights[key].shape}.")
    return weights


def read_images(folder: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 1, 28, 28) float32 in [0, 1] and class numbers, from the t10k files in a folder, gzip or plain."""
    x, y = read_mnist(*mnist_files(folder, "t10k"))
    if x.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"[fashion] images expect {SIDE} x {SIDE} pixels, got {x.shape[1]} x {x.shape[2]}.")
    return scaled(x[:, None]), y


# -- the network ---------------------------------------------------------------------------------------------------------


class Expressions:
    """Layers as tensor expressions, every one a function of its own."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def conv2d(self, x: Any, weight: Any, bias: Any) -> Any:
        y = self.builder.emit_te(conv2d_te, x, weight, primfunc_name_hint="conv2d")
        column = self.builder.emit_te(topi.reshape, bias, (bias.ty.shape[0], 1, 1))
        return self.builder.emit_te(topi.add, y, column)

    def relu(self, x: Any) -> Any:
        return self.builder.emit_te(topi.nn.relu, x)

    def max_pool(self, x: Any) -> Any:
        pads = (0, 0, 0, 0)
        return self.builder.emit_te(topi.nn.pool2d, x, (2, 2), (2, 2), (1, 1), pads, "max", layout="NCHW")

    def flatten(self, x: Any) -> Any:
        return self.builder.emit_te(topi.nn.flatten, x)

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        y = self.builder.emit_te(matmul_te, x, weight, False, True, primfunc_name_hint="matmul")
        return self.builder.emit_te(topi.add, y, bias)


class VendorCalls(Expressions):
    """Convolution, linear layer and ReLU as calls of packed functions PREFIX.conv2d, PREFIX.linear and PREFIX.relu."""

    def __init__(self, builder: Any, prefix: str = "env") -> None:
        super().__init__(builder)
        self.prefix = prefix

    def conv2d(self, x: Any, weight: Any, bias: Any) -> Any:
        (n, _, height, width), (channels, _, kh, kw) = sizes(x), sizes(weight)
        shape = (n, channels, height - kh + 1, width - kw + 1)
        return self.builder.emit(call_packed(f"{self.prefix}.conv2d", [x, weight, bias], shape))

    def relu(self, x: Any) -> Any:
        return self.builder.emit(call_packed(f"{self.prefix}.relu", [x], sizes(x)))

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        shape = (sizes(x)[0], sizes(weight)[0])
        return self.builder.emit(call_packed(f"{self.prefix}.linear", [x, weight, bias], shape))


def network(weights: Weights, batch: int, make: Any = Expressions) -> Any:
    """IRModule with `main`: images (batch, 1, 28, 28) to logits (batch, classes). make: of a BlockBuilder, the layers."""
    builder = relax.BlockBuilder()
    layers = make(builder)
    w = {k: relax.const(v, "float32") for k, v in weights.items()}
    x = relax.Var("x", relax.TensorType((batch, 1, SIDE, SIDE), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = layers.relu(layers.conv2d(x, w["conv2d_weight"], w["conv2d_bias"]))
            y = layers.flatten(layers.max_pool(y))
            y = layers.relu(layers.linear(y, w["linear0_weight"], w["linear0_bias"]))
            y = builder.emit_output(layers.linear(y, w["linear1_weight"], w["linear1_bias"]))
        builder.emit_func_output(y)
    return builder.get()


def scheduled(module: Any, target: Any) -> Any:
    """The module of tensor expressions with everything but pooling and reshaping scheduled by hand."""
    made = tvm.IRModule(dict(module.functions_items()))
    for variable, function in module.functions_items():
        for name, schedule in SCHEDULES.items():
            if variable.name_hint.startswith(name):
                made.update_func(variable, schedule(function, target))
    return made


SCHEDULES = {"conv2d": schedule_conv2d, "matmul": schedule_matmul, "add": schedule_loops, "relu": schedule_loops}


FORMS = {
    "emit_te": lambda weights, batch: network(weights, batch),
    "vendor": lambda weights, batch: network(weights, batch, VendorCalls),
    "scheduled": lambda weights, batch: scheduled(network(weights, batch), target_of()),
}


class Predictor:
    """Logits of any number of images by a module for `batch` ones."""

    def __init__(self, module: Any, batch: int) -> None:
        self.batch, self.vm = batch, relax.VirtualMachine(build(module, target_of()), tvm.cpu())

    def __call__(self, images: np.ndarray) -> np.ndarray:
        parts = []
        for start in range(0, len(images), self.batch):
            part = images[start : start + self.batch]
            full = np.concatenate([part, np.zeros((self.batch - len(part), *part.shape[1:]), "float32")])
            parts.append(self.vm["main"](tvm.runtime.tensor(full)).numpy()[: len(part)])
        return np.concatenate(parts)


# -- the command ---------------------------------------------------------------------------------------------------------


def picture(images: np.ndarray, labels: np.ndarray, predicted: np.ndarray, path: str | os.PathLike) -> None:
    """A PNG of the first images with what they were taken for; mistakes are red and name the true class."""
    from matplotlib.figure import Figure

    from needle.profiler.plots import save

    count = min(SHOWN, len(images))
    figure = Figure(figsize=(8, 2.2 * -(-count // 4)), layout="constrained")
    for i, axes in enumerate(figure.subplots(-(-count // 4), 4, squeeze=False).flat):
        axes.axis("off")
        if i < count:
            right = predicted[i] == labels[i]
            text = class_name(predicted[i]) + ("" if right else f" (is {class_name(labels[i])})")
            axes.imshow(images[i, 0], cmap="gray_r")
            axes.set_title(text, fontsize=9, color="black" if right else "#b02020")
    save(figure, path)


def class_name(number: int) -> str:
    return CLASSES[number] if number < len(CLASSES) else str(number)


def show(weights: Weights, batch: int) -> None:
    translated = network(weights, batch)
    vendor, by_hand = network(weights, batch, VendorCalls), scheduled(translated, target_of())
    parts = {"translated": translated, "fused": fuse(translated), "vendor calls": vendor, "scheduled": by_hand}
    for title, module in parts.items():
        print(f"# {title}\n{module.script(show_meta=False)}\n")


def run(args: argparse.Namespace) -> None:
    weights = read_weights(args.weights)
    if args.show:
        show(weights, args.batch_size)
    images, labels = read_images(args.data)
    predicted = labels
    for name, make in FORMS.items():
        predictor = Predictor(make(weights, args.batch_size), args.batch_size)
        predictor(images[: args.batch_size])
        start = time.perf_counter()
        predicted = predictor(images).argmax(1)
        seconds = time.perf_counter() - start
        print(
            f"{name:<10} accuracy {np.mean(predicted == labels):.4f} on {len(images)} images, {seconds:.2f} s",
            flush=True,
        )
    try:
        picture(images, labels, predicted, args.picture)
        print(f"predictions: {args.picture}")
    except ImportError as e:
        print(
            f"No picture without matplotlib, which `pip install '.[report]'` brings in a checkout: {e}", file=sys.stderr
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m needle.course.tvm.fashion", description=__doc__)
    add = parser.add_argument
    add("--weights", required=True, metavar="FILE", help="the weight map, an npz file or a pickle of numpy arrays")
    add("--data", required=True, metavar="FOLDER", help="the t10k files of Fashion-MNIST")
    add("--show", action="store_true", help="print the module translated, fused, with vendor calls and scheduled")
    add("--batch-size", type=positive, default=100, help="images in a call (default 100)")
    add(
        "--picture", metavar="FILE", default="fashion.png", help="where the predictions are drawn (default fashion.png)"
    )
    args = parser.parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
