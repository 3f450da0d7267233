"""Targets: what TVM compiles for."""

from __future__ import annotations

import os
from typing import Any

import tvm
from tvm.target import codegen

NARROWEST = 128  # bits of the narrowest vectors that any CPU here has


def host_target() -> Any:
    """This machine's CPU, its instruction set and number of cores included."""
    return tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": os.cpu_count() or 1})


def as_target(target: Any, host: Any = "llvm") -> Any:
    """A Target from one, from a dict or from a kind; "llvm" alone is this machine's CPU."""
    if isinstance(target, tvm.target.Target):
        return target
    if target == "llvm":
        return host_target()
    return tvm.target.Target(target, host=as_target(host))


def lanes(target: Any) -> int:
    """float32 values in one vector of a CPU."""
    return max(int(codegen.llvm_get_vector_width(target)), NARROWEST) // 32
