"""The table of peers: what each needs, which file it reads, and a function that makes its call. A peer is one entry of PEERS."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .formats import Task

Call = Callable[[], np.ndarray]
OURS = "needle compiled"


class DoesNotApplyError(Exception):
    """The peer has no form for this model; the text says why."""


@dataclass(frozen=True)
class Peer:
    """`load(task)` reads the files of `format`, compiles, and returns a call from the fixed numpy input to a numpy output.

    `packages` are distributions that must be installed, `modules` what is imported before the clock of `load` starts.
    """

    name: str
    format: str
    load: Callable[[Task], Call]
    modules: tuple[str, ...]
    packages: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [p for p in self.packages if version(p) is None]


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_eager(task: Task) -> Call:
    import torch

    model, x = task.torch_model(), torch.from_numpy(task.input())
    return lambda: model(x).numpy()


def torch_channels_last(task: Task) -> Call:
    import torch

    if len(task.shape) != 4:
        raise DoesNotApplyError("channels_last is a layout of 4-d inputs")
    model = task.torch_model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.from_numpy(task.input()).contiguous(memory_format=torch.channels_last)
    return lambda: model(x).numpy()


def torch_inductor(task: Task) -> Call:
    import torch
    from torch._inductor import config

    config.freezing = True  # weights become constants, packed once; needs gradients off, as torch_model leaves them
    config.compile_threads = task.threads
    model, x = torch.compile(task.torch_model()), torch.from_numpy(task.input())
    return lambda: model(x).numpy()


def onnxruntime(task: Task) -> Call:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(task.path("model.onnx"), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: task.input()}
    return lambda: session.run(None, feed)[0]


def openvino(task: Task) -> Call:
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": task.threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.Core().compile_model(task.path("model.onnx"), "CPU", settings).create_infer_request()
    x = task.input()
    return lambda: request.infer({0: x}, share_inputs=True, share_outputs=True)[0]


def ncnn(task: Task) -> Call:
    """Images of a batch run one after another: ncnn has no batch axis."""
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = task.threads
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_packing_layout = net.opt.use_winograd_convolution = True
    if net.load_param(task.path("ncnn.param")) or net.load_model(task.path("ncnn.bin")):
        raise RuntimeError("[ncnn] the model does not load.")
    x = task.input()

    def one(image: np.ndarray) -> np.ndarray:
        extractor = net.create_extractor()
        extractor.input("in0", ncnn.Mat(image))  # refers to the array, copies nothing
        status, out = extractor.extract("out0")
        if status:
            raise RuntimeError(f"[ncnn] extract ended with status {status}.")
        return np.array(out)

    return (lambda: np.stack([one(image) for image in x])) if x.ndim == 4 else (lambda: one(x))


def mnn(task: Task, small_blocks: bool = False) -> Call:
    """`small_blocks`: Winograd's block size one step below the default, whose error on the UNet is 1e-3."""
    import MNN

    net = MNN.Interpreter(task.path("model.mnn"))
    if small_blocks:
        net.setSessionHint(3, 2)  # WINOGRAD_MEMORY_LEVEL, which has no name in Python; its default is 3
    session = net.createSession({"backend": "CPU", "precision": "high", "numThread": task.threads})
    source, target = net.getSessionInput(session), net.getSessionOutput(session)
    x, shape = task.input(), target.getShape()

    def host(array: np.ndarray) -> MNN.Tensor:
        return MNN.Tensor(array.shape, MNN.Halide_Type_Float, array, MNN.Tensor_DimensionType_Caffe)

    given, out = host(x), host(np.zeros(shape, "float32"))

    def call() -> np.ndarray:
        source.copyFrom(given)
        net.runSession(session)
        target.copyToHostTensor(out)
        return np.array(out.getNumpyData(), copy=True).reshape(shape)

    return call


def mnn_small_blocks(task: Task) -> Call:
    return mnn(task, small_blocks=True)


def needle_eager(task: Task) -> Call:
    """Converted where it runs, as for training; the other two read the saved model and import no torch."""
    import needle as ndl
    import torch2needle

    ndl.set_num_threads(task.threads)
    net, x = torch2needle.convert(task.torch_model()), task.input()
    return ndl.no_grad()(lambda: net(x).numpy())


def needle_fused(task: Task) -> Call:
    import needle as ndl

    ndl.set_num_threads(task.threads)
    net, x = ndl.load(task.path("fused.safetensors")), task.input()
    return ndl.no_grad()(lambda: net(x).numpy())


class NeedleCall:
    """An executable on its input; `layers` tells where a run's time goes."""

    def __init__(self, exe: Any, x: Any) -> None:
        self.exe, self.x = exe, x

    def __call__(self) -> Any:
        return self.exe(self.x)

    def layers(self) -> dict[str, Any]:
        """Peak rates, and for each step milliseconds and shares of FMA peak, memory bandwidth and roofline."""
        import needle as ndl

        found = ndl.profile(self.exe, (self.x,), rounds=20).to_dict()
        machine = {k: found["machine"][k] for k in ("peak_gflops", "bandwidth_gbs")}
        rows = []
        for r in found["rows"]:
            row = {"name": r["name"], "op": r["op"], "shape": r["shape"], "ms": round(r["ms"], 4)}
            row["fma_peak"] = round((r["gflops"] or 0.0) / machine["peak_gflops"], 3)
            row["bandwidth"] = round((r["gbs"] or 0.0) / machine["bandwidth_gbs"], 3)
            rows.append(row | {"roofline": r["roofline"] and round(r["roofline"], 3)})
        return {"machine": machine, "rows": rows}


def needle_compiled(task: Task, memory: str = "normal") -> Call:
    import needle as ndl

    ndl.set_num_threads(task.threads)
    x = task.input()
    exe = ndl.compile(ndl.load(task.path("fused.safetensors")), (x,), memory=memory)
    return NeedleCall(exe, x)


def needle_low(task: Task) -> Call:
    return needle_compiled(task, memory="low")


TORCH = ("torch", "torch2needle.models")
ONNX = ("torch", "onnx", "onnxscript")
PEERS = (
    Peer("torch eager", "torch", torch_eager, TORCH, ("torch",)),
    Peer("torch channels_last", "torch", torch_channels_last, TORCH, ("torch",)),
    Peer("torch inductor", "torch", torch_inductor, TORCH, ("torch",)),
    Peer("onnxruntime", "onnx", onnxruntime, ("onnxruntime",), ("onnxruntime", *ONNX)),
    Peer("openvino", "onnx", openvino, ("openvino",), ("openvino", *ONNX)),
    Peer("ncnn", "ncnn", ncnn, ("ncnn",), ("ncnn", "pnnx", "torch")),
    Peer("mnn", "mnn", mnn, ("MNN",), ("MNN", *ONNX)),
    Peer("mnn small blocks", "mnn", mnn_small_blocks, ("MNN",), ("MNN", *ONNX)),
    Peer("needle eager", "torch", needle_eager, TORCH, ("torch",)),
    Peer("needle fused", "needle", needle_fused, ("needle",), ("torch",)),
    Peer("needle low", "needle", needle_low, ("needle",), ("torch",)),
    Peer(OURS, "needle", needle_compiled, ("needle",), ("torch",)),
)


def table(extra: str | None = None) -> dict[str, Peer]:
    """All peers by name; `extra` is a Python file with more of them in its `PEERS`."""
    peers: Iterable[Peer] = PEERS
    if extra:
        spec = importlib.util.spec_from_file_location("extra_peers", extra)
        if spec is None or spec.loader is None:
            raise ValueError(f"[bench] --extra expects a Python file, got {extra}.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        peers = (*PEERS, *module.PEERS)
    return {p.name: p for p in peers}


def select(names: list[str] | None, peers: dict[str, Peer]) -> dict[str, Peer | None]:
    """The chosen peers, all without `names`; a first word ("torch") means every peer that starts with it.

    An unknown name maps to None. OURS is always there, since every ratio needs it.
    """
    chosen: dict[str, Peer | None] = {}
    for name in peers if names is None else names:
        fitting = [p for p in peers if name in (p, p.split()[0])]
        for found in fitting or [name]:
            chosen[found] = peers.get(found)
    chosen.setdefault(OURS, peers[OURS])
    return chosen
