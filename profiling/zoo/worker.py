"""One model of the list, in a process of its own: `python -m zoo.worker NAME SECONDS STAGE ...` prints one JSON line per stage.

Stages: torch (float32 and float64 references), convert, plain, fused, compiled, free (the other inputs of the entry, plain
and compiled), altered (what `convert` makes of the model with a hook, or a layer without gradients: equal or refused); onnx
(the fused form as an ONNX file, in onnxruntime); fallback (converted with `fallback="torch"`), dynamo
(`torch.compile(backend="needle")`: its result, how many of its graphs ran in needle, and why the others did not); train (a
compiled step on one thread, `steps.py`).
"""

from __future__ import annotations

import json
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import needle as ndl
import operator_fusion
import torch2needle
from torch2needle import dynamo
from torch2needle.capture.calls import tensors
from torch2needle.tools.verify import Arrays, compare, leaves, map_structure, run_torch, to_needle

from .altered import CHANGES, middle, trained
from .build import build, entries, inputs
from .steps import train

MEMORY = 6 * 2**30  # bytes of private memory


def say(stage: str, **facts: Any) -> None:
    print(json.dumps({"stage": stage, **facts}), flush=True)


def one_line(e: BaseException) -> str:
    text = next((line.strip() for line in str(e).splitlines() if line.strip()), "no message")
    return f"{type(e).__name__}: {text}"[:300]


def references(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> tuple[Arrays, Arrays, str]:
    """Outputs of torch in float32 and in float64; where it cannot run in float64, float32 twice and why."""
    own = run_torch(model, given, False, [], lambda *_: None)
    try:
        return own, run_torch(model, given, True, [], lambda *_: None), ""
    except RuntimeError as e:  # such as a forward that casts to float32 halfway
        return own, own, one_line(e)


def judge(got: Any, own: Arrays, exact: Arrays) -> dict[str, Any]:
    """The worst output's error against float64 torch, torch's own, and whether all are within the bound."""
    found = leaves(got)
    if len(found) != len(exact):
        return {"ok": False, "reason": f"torch gives {len(exact)} outputs, needle {len(found)}"}
    pairs = zip(found.values(), exact.items(), strict=True)
    errors = [compare(ours, want, own[place], top1=False) for ours, (place, want) in pairs]
    worst = max(errors, key=lambda e: e.max_rel / e.limit)
    if not np.isfinite(worst.max_rel):
        shapes = f"{list(worst.shape)} for {[list(w.shape) for w in exact.values()]}"
        return {"ok": False, "reason": f"shapes or finite values differ: {shapes}"[:300]}
    return {"ok": bool(worst.ok), "error": worst.max_rel, "torch_error": worst.torch_rel}


@contextmanager
def as_before(net: ndl.nn.Module) -> Iterator[None]:
    """Put back what a run writes into buffers, such as caches: every form starts from the state of the model in torch."""
    buffers = [t for _, t in net.named_tensors() if not isinstance(t, ndl.nn.Parameter)]
    kept = [(t, t.numpy().copy()) for t in buffers]
    try:
        yield
    finally:
        for t, a in kept:
            if not np.array_equal(t.numpy(), a, equal_nan=a.dtype.kind == "f"):
                t.data = ndl.Tensor(a, device=t.device, dtype=t.dtype, requires_grad=False)


class Dynamo(torch.nn.Module):
    """The model under `torch.compile(backend="needle")`; what became of its graphs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        graphs: list[Any] = []

        def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
            graphs.append(dynamo.backend(gm, example))
            return graphs[-1]

        self.backend, self.graphs = backend, graphs  # copies of the module call the same backend

    def forward(self, **given: Any) -> Any:
        return torch.compile(self.model, backend=self.backend)(**given)

    def facts(self) -> dict[str, Any]:
        native = sum(any(e.exe is not None for e in getattr(g, "entries", {}).values()) for g in self.graphs)
        return {"graphs": len(self.graphs), "native": native, "reasons": sorted(dynamo.SAID)}


class Timed:
    """Runs stages, those that are wanted: what one raises becomes its row, and the later ones are left out."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self.failed, self.wanted = False, wanted

    def __call__(self, stage: str, work: Any) -> Any:
        if stage not in self.wanted:
            return None
        start = time.perf_counter()
        try:
            facts, value = work()
        except torch2needle.ConversionError as e:
            rows = [{"op": r.op, "count": r.count, "reason": r.reason} for r in e.report.unsupported]
            facts, value = {"ok": False, "missing": rows}, None
        except Exception as e:
            facts, value = {"ok": False, "reason": one_line(e)}, None
        say(stage, **facts, seconds=round(time.perf_counter() - start, 2))
        self.failed |= not facts["ok"]
        return value


def through_onnx(net: ndl.nn.Module, values: tuple) -> list[np.ndarray]:
    """The results of onnxruntime, which reads the file that the net is written to."""
    import onnxruntime

    given: list[np.ndarray] = []
    map_structure(list(values), lambda v: given.append(v.numpy()) if isinstance(v, ndl.Tensor) else None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        ndl.to_onnx(net, path, *values)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return session.run(None, {i.name: a for i, a in zip(session.get_inputs(), given, strict=True)})


def main(name: str, seconds: int, stages: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    entry = next(e for e in entries() if e["name"] == name)
    stage = Timed(stages)

    def torch_side() -> Any:
        model = build(entry)
        every = inputs(entry)
        own, exact, note = references(model, every[0])
        facts: dict[str, Any] = {"ok": all(np.isfinite(v).all() for v in exact.values())}
        facts |= {"parameters": sum(p.numel() for p in model.parameters())} | ({"note": note} if note else {})
        return facts, (model, every, own, exact)

    def to_net(net: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
        named = {k: v for k, v in given.items() if k in net.input_names}
        return map_structure(named, lambda v: to_needle(v, None))

    def eager(net: Any, given: dict[str, torch.Tensor], own: Arrays, exact: Arrays) -> dict[str, Any]:
        with ndl.no_grad(), as_before(net):
            return judge(net(**to_net(net, given)), own, exact)

    made = stage("torch", torch_side)
    if made is None:
        return
    model, (given, *others), own, exact = made

    def fallback() -> Any:
        return eager(torch2needle.convert(model, given, fallback="torch"), given, own, exact), None

    def through_dynamo() -> Any:
        compiled = Dynamo(model)
        row = judge(run_torch(compiled, given, False, [], lambda *_: None), own, exact)
        return row | compiled.facts(), None

    stage("train", lambda: (train(model, others[0] if others else given), None))
    stage("fallback", fallback)
    stage("dynamo", through_dynamo)

    def convert() -> Any:
        net = torch2needle.convert(model, given)
        capture = net.report.capture.split(",")[0]
        return {"ok": True, "nodes": len(net.graph.nodes), "capture": capture}, net

    net = stage("convert", convert)
    if net is None:
        return
    stage("plain", lambda: (eager(net, given, own, exact), None))

    def fuse() -> Any:
        fused = operator_fusion.fuse(net)
        return eager(fused, given, own, exact), fused

    def run(executable: Any, given: dict[str, torch.Tensor], own: Arrays, exact: Arrays) -> dict[str, Any]:
        with as_before(executable.model):
            return judge(executable(*net.bind((), to_net(net, given))), own, exact)

    def compiled(fused: Any) -> Any:
        executable = ndl.compile(fused, tuple(net.bind((), to_net(net, given))))
        run(executable, given, own, exact)  # the first run packs weights
        return run(executable, given, own, exact), executable

    fused = stage("fused", fuse)
    executable = None if fused is None else stage("compiled", lambda: compiled(fused))

    def onnx() -> Any:
        values = tuple(net.bind((), to_net(net, given)))
        return judge(through_onnx(operator_fusion.fuse(net), values), own, exact), None

    stage("onnx", onnx)

    def free() -> Any:
        rows = []
        for other in others:
            own, exact, _ = references(model, other)
            try:
                row = eager(net, other, own, exact)
                if row["ok"] and executable is not None:
                    row = run(executable, other, own, exact)
            except Exception as e:
                refused = (
                    re.search(r"\] (input \S+ expects size .* in axis|the model holds for inputs)", str(e)) is not None
                )
                row = {"ok": False, "reason": one_line(e), **({"fixed": True} if refused else {})}
            rows.append({"shapes": [list(v.shape) for v in tensors(other)], **row})
        ok, fixed = all(r["ok"] for r in rows), all(r["ok"] or r.get("fixed") for r in rows)
        return {"ok": ok, "inputs": rows, **({"fixed": True} if fixed and not ok else {})}, None

    stage("free", free)
    net = fused = executable = None  # their weights' memory is for altered models

    def altered() -> Any:
        layer, rows = middle(model, given), {}
        if layer is None:
            return {"ok": True, "changes": rows}, None
        limit = max(1e-5, 10 * judge(own, own, exact)["torch_error"])  # of torch in float32, which takes less time
        for name, change in CHANGES.items():
            with change(layer):
                try:
                    net = torch2needle.convert(model, given)
                except torch2needle.ConversionError:
                    rows[name] = {"ok": True, "refused": True}
                    continue
                want = run_torch(model, given, False, [], lambda *_: None)
                row = eager(net, given, want, want)
                rows[name] = row | {"ok": row.get("error", np.inf) <= limit}
                if rows[name]["ok"] and trained(net, to_net(net, given)) != trained(model, given):
                    rows[name] = {"ok": False, "reason": "gradients pass to other parameters"}
        return {"ok": all(r["ok"] for r in rows.values()), "changes": rows}, None

    stage("altered", altered)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
