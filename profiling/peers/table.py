"""The table of peers: what each needs, which file it reads, and a function that makes its call. A peer is one entry of PEERS."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .formats import Task, flat

if TYPE_CHECKING:
    import torch

Call = Callable[[], list[np.ndarray]]
OURS = "needle compiled"


class DoesNotApplyError(Exception):
    """The peer has no form for this model; the text says why."""


@dataclass(frozen=True)
class Peer:
    """`load(task)` reads the files of `format`, compiles, and returns a call from the fixed numpy inputs to numpy outputs.

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


def torch_call(model: Any, given: Iterable[torch.Tensor]) -> Call:
    held = tuple(given)
    return lambda: [t.numpy() for t in model(*held)]


def torch_inputs(task: Task) -> list[torch.Tensor]:
    import torch

    return [torch.from_numpy(v) for v in task.inputs().values()]


def torch_eager(task: Task) -> Call:
    return torch_call(task.torch_model(), torch_inputs(task))


def torch_channels_last(task: Task) -> Call:
    import torch

    given = torch_inputs(task)
    if all(x.ndim != 4 for x in given):
        raise DoesNotApplyError("channels_last is a layout of 4-d inputs")
    model = task.torch_model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return torch_call(model, [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in given])


def torch_inductor(task: Task) -> Call:
    import torch
    from torch._inductor import config

    config.freezing = True  # weights become constants, packed once; needs gradients off, as torch_model leaves them
    config.compile_threads = task.threads
    return torch_call(torch.compile(task.torch_model()), torch_inputs(task))


def onnxruntime(task: Task) -> Call:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(task.path("model.onnx"), options, providers=["CPUExecutionProvider"])
    taken = {i.name for i in session.get_inputs()}  # an exporter leaves out inputs that nothing reads
    feed = {k: v for k, v in task.inputs().items() if k in taken}
    return lambda: session.run(None, feed)


def openvino(task: Task) -> Call:
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": task.threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(task.path("model.onnx"), "CPU", settings)
    request, taken = compiled.create_infer_request(), {name for i in compiled.inputs for name in i.names}
    feed = {k: v for k, v in task.inputs().items() if k in taken}
    return lambda: list(request.infer(feed, share_inputs=True, share_outputs=True).values())


def ncnn(task: Task) -> Call:
    """Images of a batch run one after another: ncnn has no batch axis."""
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = task.threads
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_packing_layout = net.opt.use_winograd_convolution = True
    if net.load_param(task.path("ncnn.param")) or net.load_model(task.path("ncnn.bin")):
        raise RuntimeError("[ncnn] the model does not load.")
    given, shapes = list(task.inputs().values()), [w.shape for w in task.want()]
    # pnnx makes 32-bit integers of torch's 64-bit ones
    given = [x.astype("int32") if x.dtype == np.int64 else x for x in given]
    images = all(x.ndim == 4 for x in given)
    runs = list(zip(*given, strict=True)) if images else [tuple(given)]

    def one(arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
        extractor = net.create_extractor()
        for i, x in enumerate(arrays):
            extractor.input(f"in{i}", ncnn.Mat(x))  # refers to the array, copies nothing
        outs = []
        for i in range(len(shapes)):
            status, out = extractor.extract(f"out{i}")
            if status:
                raise RuntimeError(f"[ncnn] extract ended with status {status}.")
            outs.append(np.array(out))
        return outs

    def call() -> list[np.ndarray]:
        outs = [np.stack(parts) if images else parts[0] for parts in zip(*map(one, runs), strict=True)]
        # axes of size 1 are not kept
        return [o.reshape(s) if o.size == math.prod(s) else o for o, s in zip(outs, shapes, strict=True)]

    return call


def mnn(task: Task, small_blocks: bool = False) -> Call:
    """`small_blocks`: Winograd's block size one step below the default, whose error on the UNet is 1e-3."""
    import MNN

    net = MNN.Interpreter(task.path("model.mnn"))
    if small_blocks:
        net.setSessionHint(3, 2)  # WINOGRAD_MEMORY_LEVEL, which has no name in Python; its default is 3
    session = net.createSession({"backend": "CPU", "precision": "high", "numThread": task.threads})
    sources, targets = net.getSessionInputAll(session), net.getSessionOutputAll(session)
    kinds = {"float32": MNN.Halide_Type_Float, "int32": MNN.Halide_Type_Int}

    def host(array: np.ndarray) -> MNN.Tensor:
        return MNN.Tensor(array.shape, kinds[str(array.dtype)], array, MNN.Tensor_DimensionType_Caffe)

    arrays = {k: x.astype("int32") if x.dtype == np.int64 else x for k, x in task.inputs().items() if k in sources}
    given = [(sources[k], host(x)) for k, x in arrays.items()]
    named = [targets[f"out{i}"] for i in range(len(targets))]
    outs = [(t, host(np.zeros(t.getShape(), "float32"))) for t in named]

    def call() -> list[np.ndarray]:
        for source, x in given:
            source.copyFrom(x)
        net.runSession(session)
        for target, out in outs:
            target.copyToHostTensor(out)
        return [np.array(out.getNumpyData(), copy=True).reshape(t.getShape()) for t, out in outs]

    return call


def mnn_small_blocks(task: Task) -> Call:
    return mnn(task, small_blocks=True)


def needle_call(net: Any, task: Task) -> Call:
    import needle as ndl

    values = net.bind((), {k: ndl.Tensor(v) for k, v in task.inputs().items() if k in net.input_names})
    return ndl.no_grad()(lambda: [t.numpy() for t in flat(net(*values))])


def needle_eager(task: Task) -> Call:
    """Converted where it runs, as for training; the other two read the saved model and import no torch."""
    import needle as ndl
    import torch2needle

    ndl.set_num_threads(task.threads)
    model = task.torch_model()
    example = dict(zip(model.names, torch_inputs(task), strict=True))
    return needle_call(torch2needle.convert(model.model, example), task)


def needle_fused(task: Task) -> Call:
    import needle as ndl

    ndl.set_num_threads(task.threads)
    return needle_call(ndl.load(task.path("fused.safetensors")), task)


class NeedleCall:
    """An executable on its inputs; `layers` tells where a run's time goes."""

    def __init__(self, exe: Any, values: tuple) -> None:
        self.exe, self.values = exe, values

    def __call__(self) -> list[np.ndarray]:
        return flat(self.exe(*self.values))

    def layers(self) -> dict[str, Any]:
        """Peak rates, and for each step milliseconds and shares of FMA peak, memory bandwidth and roofline."""
        import needle as ndl

        found = ndl.profile(self.exe, self.values, rounds=20).to_dict()
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
    net = ndl.load(task.path("fused.safetensors"))
    values = tuple(net.bind((), {k: v for k, v in task.inputs().items() if k in net.input_names}))
    return NeedleCall(ndl.compile(net, values, memory=memory), values)


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
