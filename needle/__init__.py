"""needle: arrays, autograd, layers, optimizers and a graph executor. See README.md."""

from __future__ import annotations

import logging as _logging
import os
from typing import Any

from . import autograd, backend_ndarray, backend_selection, init, interop, ops, optim
from . import graph, nn  # isort: skip - layers call ops and init
from . import executor, serialize, targets  # isort: skip - they need layers and graphs
from . import data, training  # isort: skip - training loops call layers and optimizers
from .nn import nn_basic as _nn_basic  # the course's import paths
from .ops import ops_mathematic as _ops_mathematic
from ._core import isa, set_num_threads
from ._core import num_threads as get_num_threads
from .autograd import Tensor, TensorTuple, Unsupported, no_grad
from .backend_ndarray import Device, NDArray, all_devices, cpu, cpu_numpy, cuda, emulation, hip
from .backend_selection import default_device
from .complex_numbers import Complex
from .facts import VERSION as __version__
from .executor import Executable, TrainingStep, compile, compile_step
from .init import manual_seed
from .interop import as_ndarray
from .ops import *  # noqa: F403
from .profiler import profile
from .serialize import load, save
from . import models  # isort: skip - models are made of layers


def from_dlpack(x: object) -> Tensor:
    """Zero-copy Tensor over the CPU memory of any object with `__dlpack__`, of any strides.

    TypeError for other objects and for dtypes other than float32, float64, int32, int64 and bool (`as_ndarray` copies those).
    """
    if not hasattr(x, "__dlpack_device__"):
        raise TypeError(f"[from_dlpack] expects an object with __dlpack__, got {type(x).__name__}.")
    return Tensor.make_const(backend_ndarray.from_dlpack(x))


def to_onnx(model: Any, path: str | os.PathLike[str], *args: Any, batch: str = "fixed") -> None:
    """`needle.onnx.to_onnx`, which needs the extra [onnx]; a method of modules, too."""
    from .onnx import to_onnx as write

    write(model, path, *args, batch=batch)


_logging.getLogger("needle").addHandler(_logging.NullHandler())  # who wants to read what is logged says so
nn.Module.to_onnx = to_onnx  # type: ignore[attr-defined]

__all__ = [n for n in dir() if not n.startswith("_") and n not in ("annotations", "os", "Any")]
