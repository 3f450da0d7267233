"""`torch2needle --version` and `info`: what is installed and what this machine has, without torch and without most of needle."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec
from typing import Any

LIBRARIES = ("torch", "numpy", "onnx", "onnxruntime", "apache-tvm", "matplotlib", "jinja2")


def alone(name: str) -> Any:
    """A module of needle that imports nothing else of it, without the package, which takes 0.4 s to import."""
    full = f"needle.{name}"
    package = find_spec("needle") if full not in sys.modules else None
    spec = PathFinder.find_spec(full, package.submodule_search_locations) if package else None
    if spec is None or spec.loader is None:
        return importlib.import_module(full)
    sys.modules[full] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version_line() -> str:
    return f"torch2needle {alone('facts').VERSION}"


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def gpus(core: Any, facts: Any) -> Iterator[tuple[str, str]]:
    """Devices, for which needle itself is asked where there is a library to open."""
    found = [n for n in ("cuda", "hip") if any((f / f"libneedle_{n}.so").exists() for f in facts.library_folders(core))]
    if not found:
        yield "GPUs", "no library of needle for them here (docs: GPUs)"
    for name in found:
        import needle

        device = getattr(needle, name)()
        why = device.missing()
        p = {} if why else device.properties()
        yield f"{name}()", why or f"{p['name']}, {p['units']} units, {p['memory'] / 1e9:.0f} GB"


def rows() -> Iterator[tuple[str, str]]:
    facts, core = alone("facts"), alone("_core")
    yield "torch2needle", facts.VERSION
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "CPU", facts.cpu_name()
    yield "kernels", core.isa()
    yield "threads", str(core.num_threads())
    yield from gpus(core.__file__, facts)
    for name in LIBRARIES:
        yield name, installed(name)
    cache = facts.cache_folder()
    yield "cache", f"{cache}{'' if cache.is_dir() else ' (nothing in it yet)'}"
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith("NEEDLE_")}
    yield "settings", ", ".join(f"{k}={v}" for k, v in settings.items()) or "none in the environment"


def info() -> str:
    return "\n".join(f"{name:<14}{text}" for name, text in rows())
