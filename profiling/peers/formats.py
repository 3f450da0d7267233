"""The benchmark's models and the files that the peers read. A format is one function in FORMATS; each runs in its own process."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .positional import Positional


# An output may be off by LIMIT (float32 gives 1e-6, a bfloat16 or float16 run 1e-3), or by FACTOR x float32 torch's own error.
LIMIT, FACTOR = 1e-4, 4


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
    """One model at one batch size: where its files lie and how many threads a peer may use.

    `model` is a key of MODELS or a name of the zoo's `sizes.py`, which has a slash.
    """

    folder: str
    model: str
    batch: int
    threads: int

    def path(self, name: str) -> str:
        return str(Path(self.folder) / name)

    def inputs(self) -> dict[str, np.ndarray]:
        """The fixed inputs by name, in the order of the model's arguments."""
        return dict(np.load(self.path("inputs.npz")))

    def limit(self) -> float:
        """The error against float64 torch that an output may have, relative to its largest value."""
        return max(LIMIT, FACTOR * float(np.load(self.path("torch_error.npy"))))

    def want(self) -> list[np.ndarray]:
        """The outputs of float64 torch."""
        return list(np.load(self.path("want.npz")).values())

    def model_and_inputs(self, weights: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """The model in evaluation mode, with seeded random weights if `weights`, and seeded inputs."""
        import torch

        if self.model not in MODELS:
            from zoo.build import allow_imports, build, evaluate, inputs
            from zoo.sizes import entry

            found = entry(self.model, self.batch)
            allow_imports()
            return build(found) if weights else evaluate(found["model"]).eval(), inputs(found)[0]
        from torch2needle import models

        own = MODELS[self.model]
        with torch.device("cpu" if weights else "meta"):  # no random weights just to replace them
            model = getattr(models, own.build)()
        x = torch.randn(self.batch, *own.sample, generator=torch.Generator().manual_seed(1))
        return (models.randomize(model, seed=0) if weights else model).eval(), {"x": x}

    def torch_model(self) -> Positional:
        """The model with the weights of format "torch", in evaluation mode; gradients are switched off."""
        import torch

        from .positional import Positional

        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        model, given = self.model_and_inputs(weights=False)
        model.load_state_dict(torch.load(self.path("weights.pt")), assign=True)
        return Positional(model, list(given)).eval()  # exporters take the mode of the whole


def flat(value: Any) -> list[Any]:
    """The arrays of a nested result in order; what is no array (a cache, None) is left out."""
    if isinstance(value, dict | list | tuple):
        return [leaf for v in (value.values() if isinstance(value, dict) else value) for leaf in flat(v)]
    return [value] if hasattr(value, "shape") else []


def compared(got: list[np.ndarray], want: list[np.ndarray]) -> dict[str, Any]:
    """`error`: the worst output's largest difference relative to its largest value, None with a `reason` where there is none."""
    if len(got) != len(want):
        return {"error": None, "reason": f"there are {len(got)} outputs, expects {len(want)}"}
    errors = []
    for g, w in zip(got, want, strict=True):
        if g.shape != w.shape:
            return {"error": None, "reason": f"output has shape {g.shape}, expects {w.shape}"}
        errors.append(float(np.abs(g.astype("float64") - w).max() / (np.abs(w).max() or 1.0)))
    if not all(map(math.isfinite, errors)):
        return {"error": None, "reason": "output is not finite"}
    return {"error": max(errors)}


def write_torch(task: Task) -> None:
    """weights.pt, inputs.npz, want.npz: the outputs of float64 torch, and torch_error.npy: how far off float32 torch is."""
    import torch

    torch.set_grad_enabled(False)
    model, given = task.model_and_inputs(weights=True)
    torch.save(model.state_dict(), task.path("weights.pt"))
    np.savez(task.path("inputs.npz"), **{k: v.numpy() for k, v in given.items()})
    own = [t.numpy() for t in flat(model(**given))]
    torch.set_default_dtype(torch.float64)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    want = [t.numpy() for t in flat(model.double()(**exact))]
    np.savez(task.path("want.npz"), *want)
    np.save(task.path("torch_error.npy"), compared(own, want)["error"] or 0.0)


def write_needle(task: Task) -> None:
    """fused.safetensors: the model converted and fused."""
    import torch

    import needle as ndl
    import operator_fusion
    import torch2needle

    given = {k: torch.from_numpy(v) for k, v in task.inputs().items()}
    net = torch2needle.convert(task.torch_model().model, given)
    ndl.save(operator_fusion.fuse(net), task.path("fused.safetensors"))


def write_onnx(task: Task) -> None:
    """model.onnx by the exporter that traces; by the one on torch.export where that fails."""
    import torch

    given = task.inputs()
    example = tuple(torch.from_numpy(v) for v in given.values())
    names = {"input_names": list(given), "output_names": [f"out{i}" for i in range(len(task.want()))]}
    model, path = task.torch_model(), task.path("model.onnx")
    try:
        torch.onnx.export(model, example, path, dynamo=False, **names)
    except Exception:
        torch.onnx.export(model, example, path, dynamo=True, external_data=False, **names)


def write_ncnn(task: Task) -> None:
    """ncnn.param and ncnn.bin by pnnx from TorchScript, float32. Images are converted one by one: ncnn has no batch axis."""
    import pnnx
    import torch

    given = [torch.from_numpy(v) for v in task.inputs().values()]
    given = [x[:1] if x.ndim == 4 else x for x in given]
    torch.jit.trace(task.torch_model(), tuple(given)).save(task.path("traced.pt"))
    kinds = {torch.float32: "f32", torch.int64: "i64"}
    shapes = ",".join(f"[{','.join(map(str, x.shape))}]{kinds[x.dtype]}" for x in given)
    files = {"ncnnparam": "ncnn.param", "ncnnbin": "ncnn.bin", "ncnnpy": "ncnn.py", "pnnxparam": "pnnx.param"}
    files |= {"pnnxbin": "pnnx.bin", "pnnxpy": "pnnx.py", "pnnxonnx": "pnnx.onnx"}
    command = [pnnx.EXEC_PATH, "traced.pt", f"inputshape={shapes}", "fp16=0", "device=cpu"]
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
