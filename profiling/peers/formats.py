"""The benchmark's models and the files that the peers read. A format is one function in FORMATS; each runs in its own process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch


class Model(NamedTuple):
    """A builder of `torch2needle.models`, the shape of one sample, and the batch unless `--batch` says otherwise."""

    title: str
    build: str
    sample: tuple[int, ...]
    batch: int = 1


MODELS = {
    "resnet18": Model("ResNet-18 @224", "resnet18", (3, 224, 224)),
    "resnet50": Model("ResNet-50 @224", "resnet50", (3, 224, 224)),
    "unet": Model("UNet 31 M @256", "unet", (3, 256, 256)),
    "vgg16": Model("VGG-16 @224", "vgg16", (3, 224, 224)),
    "resnet9_wide": Model("ResNet9 wide @32", "resnet9_wide", (3, 32, 32)),
    "mobilenet_v2": Model("MobileNetV2 @224", "mobilenet_v2", (3, 224, 224)),
    "efficientnet_b0": Model("EfficientNet-B0 @224", "efficientnet_b0", (3, 224, 224)),
    "densenet121": Model("DenseNet-121 @224", "densenet121", (3, 224, 224)),
    "mlp": Model("MLP 784-1024-1024-10", "mlp", (784,), 64),
}


@dataclass(frozen=True)
class Task:
    """One model at one batch size: where its files lie and how many threads a peer may use."""

    folder: str
    model: str
    batch: int
    threads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, *MODELS[self.model].sample)

    def path(self, name: str) -> str:
        return str(Path(self.folder) / name)

    def input(self) -> np.ndarray:
        return np.load(self.path("input.npy"))

    def torch_model(self) -> torch.nn.Module:
        """The model with the weights of format "torch", in evaluation mode; gradients are switched off."""
        import torch

        from torch2needle import models

        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        with torch.device("meta"):  # no random weights just to replace them
            model = getattr(models, MODELS[self.model].build)()
        model.load_state_dict(torch.load(self.path("weights.pt")), assign=True)
        return model.eval()


def write_torch(task: Task) -> None:
    """weights.pt, input.npy, and want.npy: the output of float64 torch."""
    import torch

    from torch2needle import models

    torch.set_grad_enabled(False)
    model = models.randomize(getattr(models, MODELS[task.model].build)(), seed=0).eval()
    torch.save(model.state_dict(), task.path("weights.pt"))
    x = torch.randn(*task.shape, generator=torch.Generator().manual_seed(1))
    np.save(task.path("input.npy"), x.numpy())
    np.save(task.path("want.npy"), model.double()(x.double()).numpy())


def write_needle(task: Task) -> None:
    """fused.safetensors: the model converted and fused."""
    import needle as ndl
    import operator_fusion
    import torch2needle

    fused = operator_fusion.fuse(torch2needle.convert(task.torch_model()))
    ndl.save(fused, task.path("fused.safetensors"))


def write_onnx(task: Task) -> None:
    import torch

    example = torch.from_numpy(task.input())
    torch.onnx.export(task.torch_model(), (example,), task.path("model.onnx"), dynamo=False)


def write_ncnn(task: Task) -> None:
    """ncnn.param and ncnn.bin by pnnx from TorchScript, float32. Images are converted one by one: ncnn has no batch axis."""
    import pnnx
    import torch

    example = torch.from_numpy(task.input())
    example = example[:1] if example.ndim == 4 else example
    torch.jit.trace(task.torch_model(), example).save(task.path("traced.pt"))
    shape = ",".join(map(str, example.shape))
    files = {"ncnnparam": "ncnn.param", "ncnnbin": "ncnn.bin", "ncnnpy": "ncnn.py", "pnnxparam": "pnnx.param"}
    files |= {"pnnxbin": "pnnx.bin", "pnnxpy": "pnnx.py", "pnnxonnx": "pnnx.onnx"}
    command = [pnnx.EXEC_PATH, "traced.pt", f"inputshape=[{shape}]", "fp16=0", "device=cpu"]
    done = subprocess.run([*command, *(f"{k}={v}" for k, v in files.items())], cwd=task.folder, check=False)
    if done.returncode or not Path(task.path("ncnn.param")).is_file():
        raise RuntimeError(f"[ncnn] pnnx wrote no model, got exit status {done.returncode}.")
    for name in ("traced.pt", "pnnx.param", "pnnx.bin", "pnnx.onnx"):
        Path(task.path(name)).unlink(missing_ok=True)  # as large as the weights, and nobody reads them


def write_mnn(task: Task) -> None:
    """model.mnn, by the converter's own extension module.

    The command `mnnconvert` is never run: it installs a package with whatever pip it finds and reports its use to a server.
    """
    import _tools  # MNN's

    command = ["mnnconvert", "-f", "ONNX", "--modelFile", task.path("model.onnx"), "--MNNModel", task.path("model.mnn")]
    _tools.mnnconvert([*command, "--bizCode", "bench"])
    if not Path(task.path("model.mnn")).is_file():
        raise RuntimeError("[mnn] the converter wrote no model.")


class Format(NamedTuple):
    """Writes a model's files; `needs` names the format whose files it reads."""

    write: Callable[[Task], None]
    needs: str = "torch"


FORMATS = {
    "torch": Format(write_torch, ""),
    "needle": Format(write_needle),
    "onnx": Format(write_onnx),
    "ncnn": Format(write_ncnn),
    "mnn": Format(write_mnn, "onnx"),
}
