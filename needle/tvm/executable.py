"""A model that TVM compiled: called like one of needle's executables, on arrays of any library, without copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from needle.backend_ndarray import NDArray, call
from needle.backend_ndarray import from_dlpack as needle_array
from needle.files import replacing
from needle.graph import map_structure
from needle.interop import array_kind, as_ndarray, mirror

from . import tuning
from .arrays import plain
from .export import to_tvm_tensor
from .pipeline import MODES, build, fuse, target_of

ALIGNMENT = 64  # bytes, which TVM expects of memory that it has not allocated


class TvmExecutable:
    """`module`: the Relax module that was built. Calling it gives what the model gives, in arrays of the inputs' library."""

    def __init__(self, module: Any, library: Any, device: str) -> None:
        self.module, self.device = module, device
        self.vm = relax.VirtualMachine(library, tvm.cuda() if device == "cuda" else tvm.cpu())
        self.expected = [(plain(p.ty.shape), str(p.ty.dtype)) for p in module["main"].params]

    def __call__(self, *args: Any) -> Any:
        given: list[Any] = []
        map_structure(list(args), lambda a: given.append(a) if hasattr(a, "shape") else None)
        kind = array_kind(given[0]) if given else "needle"
        arrays = [as_ndarray(a) for a in given]
        self._check(arrays)
        return self._leave(self.vm["main"](*map(self._enter, arrays)), kind)

    def _check(self, arrays: list[NDArray]) -> None:
        if len(arrays) != len(self.expected):
            raise ValueError(f"[tvm] the model expects {len(self.expected)} inputs, got {len(arrays)}.")
        for a, (shape, dtype) in zip(arrays, self.expected, strict=True):
            sizes = zip(a.shape, shape, strict=False)
            if a.ndim != len(shape) or a.dtype != dtype or any(isinstance(w, int) and w != s for s, w in sizes):
                raise ValueError(f"[tvm] an input expects {dtype} {shape}, got {a.dtype} {a.shape}.")

    def _enter(self, a: NDArray) -> Any:
        a = a.compact()
        if self.device == "cuda":
            return tvm.runtime.tensor(a.numpy_view(), tvm.cuda())
        if a.numpy_view().ctypes.data % ALIGNMENT:
            fresh = NDArray.empty(a.shape, a.dtype)
            call("copy", [fresh], x=a)
            a = fresh
        return tvm.runtime.from_dlpack(a)

    def _leave(self, out: Any, kind: str) -> Any:
        if not hasattr(out, "shape"):
            return tuple(self._leave(o, kind) for o in out)
        if self.device == "cuda":  # waits for the device
            return mirror(as_ndarray(out.numpy()), kind)
        return mirror(needle_array(out), kind)


def load_or_build(path: Path, make: Callable[[], Any], recompile: bool) -> Any:
    """The library at `path`, or what `make` builds, which is then kept there."""
    if path.exists() and not recompile:
        try:
            return tvm.runtime.load_module(str(path))
        except Exception as e:  # a file of another machine or half a file: anything TVM can raise
            warnings.warn(f"[tvm] {path} is built anew: {e}.", stacklevel=2)
    library = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            library.export_library(str(part))
    except (OSError, RuntimeError) as e:
        warnings.warn(f"[tvm] the compiled module is not kept: {e}.", stacklevel=2)
    return library


def compile(
    model: Any,
    example: Any,
    mode: str = "optimized",
    *,
    device: str = "cpu",
    trials: int = tuning.TRIALS,
    recompile: bool = False,
    symbolic_batch: bool = False,
) -> TvmExecutable:
    """`model` compiled by TVM for the shapes of `example`, a tuple of inputs.

    mode: "noopt" one function per op with the default schedule; "fusion" neighbouring ops fused; "optimized" fused, and
    the schedules tuned by `trials` measurements. Tuning records and compiled modules are kept in `$NEEDLE_CACHE` (else
    torch2needle in `$XDG_CACHE_HOME` or `~/.cache`); recompile: anew, the records of an "optimized" module, too.
    """
    if mode not in MODES:
        raise ValueError(f"[tvm] mode expects {', '.join(MODES)}, got {mode}.")
    target = target_of(device)
    example = example if isinstance(example, tuple) else (example,)
    module = to_tvm_tensor(model, *example, symbolic_batch=symbolic_batch)
    if mode != "noopt":
        module = fuse(module)
    folder = tuning.module_folder(module, target)
    weights = tuning.weights_digest(module)
    name = f"{mode}-{trials}-{weights}.so" if mode == "optimized" else f"{mode}-{weights}.so"

    def make() -> Any:
        if mode != "optimized":
            return build(module, target)
        if recompile:
            tuning.forget(module, target)
        tuning.tune(module, target, trials)
        return build(tuning.apply_records(module, target, folder), target)

    return TvmExecutable(module, load_or_build(folder / name, make, recompile), device)
