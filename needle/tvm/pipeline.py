"""From an exported module to one that runs: Relax passes, targets, compilation."""

from __future__ import annotations

import re
from typing import Any

import tvm
from tvm import relax

from needle import _core

MODES = ("noopt", "fusion", "optimized")


def target_of(device: str = "cpu") -> Any:
    """TVM's target for this machine: "cpu" with the instructions that needle's kernels use here, or "cuda"."""
    if device == "cuda":
        if not tvm.cuda().exist:
            raise RuntimeError(
                "[tvm] device cuda expects an NVIDIA GPU and a TVM built for CUDA, got no device that TVM sees."
            )
        return tvm.target.Target.from_device(tvm.cuda())
    if device != "cpu":
        raise ValueError(f"[tvm] device expects cpu or cuda, got {device}.")
    level = {"avx512": "x86-64-v4", "avx2": "x86-64-v3"}.get(_core.isa(), "x86-64")
    return tvm.target.Target({"kind": "llvm", "mcpu": level, "num-cores": _core.num_threads()})


def fuse(module: Any) -> Any:
    """The module with neighbouring expressions fused into one function each: fused_te_matmul_te_broadcast_to_..."""
    passes = relax.transform
    return tvm.transform.Sequential(
        [passes.LegalizeOps(), passes.AnnotateTIROpPattern(), passes.FuseOps(), passes.FuseTIR()]
    )(module)


def functions(module: Any) -> list[str]:
    """Names of the tensor functions in the order in which `main` calls them, without the numbers that tell them apart."""
    names: list[str] = []
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            callee = getattr(binding.value, "args", [None])
            if len(callee) and isinstance(callee[0], tvm.ir.GlobalVar):
                names.append(re.sub(r"\d+(?=_|$)", "", callee[0].name_hint))
    return names


def scheduled(module: Any, target: Any) -> Any:
    """For a GPU, threads for every function that tuning did not schedule."""
    if str(target.kind) != "cuda":
        return module
    rules = tvm.s_tir.dlight.gpu
    with target:
        return tvm.s_tir.dlight.ApplyDefaultSchedule(
            rules.Matmul(), rules.Reduction(), rules.GeneralReduction(), rules.Fallback()
        )(module)


def build(module: Any, target: Any) -> Any:
    """A Relax executable."""
    legal = relax.transform.LegalizeOps()(module)
    return tvm.compile(scheduled(legal, target), target=target)
