"""Targets by name, and how wide their vectors are."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.target import codegen

from .pipeline import target_of

NARROWEST = 128  # bits of the vectors that every 64-bit CPU has


def as_target(target: Any, host: Any = "llvm") -> Any:
    """A Target from one, from a dict or from a kind; "llvm" alone is this machine's CPU."""
    if isinstance(target, tvm.target.Target):
        return target
    return target_of() if target == "llvm" else tvm.target.Target(target, host=as_target(host))


def lanes(target: Any) -> int:
    """float32 values in one vector of a CPU."""
    return max(int(codegen.llvm_get_vector_width(target)), NARROWEST) // 32
