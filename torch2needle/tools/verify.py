"""`verify`: a torch model against its needle form, outputs and layers, both held against torch in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import needle as ndl
from needle.autograd import Tensor
from needle.complex_numbers import is_complex, parts
from needle.executor import Executable
from needle.graph import GraphModule, Node, map_structure
from needle.graph.kept import state_kept
from needle.graph.narrow import is_narrow
from needle.graph.structure import is_record, members
from needle.nn.module import Module
from needle.shown import Shown

from ..capture.behaviour import first_line
from ..capture.calls import tensors
from ..capture.functions import as_module
from ..capture.guard import gradients_where_asked
from ..capture.structure import plain_result
from ..convert import example_by_name
from ..report import progress, reason_of, table
from .explain import source_line

# The bound: max(ABSOLUTE, FACTOR x torch's own float32 error), relative to the largest value.
ABSOLUTE, FACTOR = 1e-5, 4
Arrays = dict[str, np.ndarray]  # float64 leaves of a nested result, by place


@dataclass(frozen=True)
class Errors:
    """How one array differs from float64 torch. Errors are infinite where needle has a NaN or infinity and torch has none."""

    shape: tuple[int, ...]
    max_abs: float
    max_rel: float  # relative to the largest value
    torch_rel: float  # the same of float32 torch
    top1: float | None = None  # share of equal largest entries: over axis 1, or the last of three

    @property
    def limit(self) -> float:
        return max(ABSOLUTE, FACTOR * self.torch_rel) if np.isfinite(self.torch_rel) else ABSOLUTE

    @property
    def ok(self) -> bool:
        return self.max_rel <= self.limit

    @property
    def ratio(self) -> float:
        """needle's error over torch's own."""
        return self.max_rel / self.torch_rel if self.torch_rel else np.inf if self.max_rel else 1.0


@dataclass(frozen=True)
class Output:
    form: str  # eager or compiled
    name: str
    errors: Errors


@dataclass(frozen=True)
class Layer:
    """A layer's output in the needle graph against that of the torch module at the same path."""

    path: str
    node: str
    covers: list[str]  # nodes that a fused node stands for; it is compared where the last of them is a module's call
    kind: str
    source: str
    errors: Errors


@dataclass(repr=False)
class Verification(Shown):
    """True when every output is within bounds; `str` is a table. `layers` are in the graph's order."""

    outputs: list[Output] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mismatch: str = ""  # why outputs could not be compared

    @property
    def ok(self) -> bool:
        return not self.mismatch and all(o.errors.ok for o in self.outputs)

    @property
    def first_divergence(self) -> Layer | None:
        return next((layer for layer in self.layers if not layer.errors.ok), None)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = "agrees" if self.ok else "does not agree"
        rule = f"bound: max({ABSOLUTE:.0e}, {FACTOR} x torch's float32 error), relative to the largest value"
        head = ["form", "output", "shape", "max abs", "max rel", "torch's", "ratio", "top-1", ""]
        lines = [f"needle {verdict} with torch ({rule})"]
        lines += table(head, [row(o) for o in self.outputs]) if self.outputs else []
        lines += [self.mismatch] if self.mismatch else []
        first = self.first_divergence
        if first is not None:
            e = first.errors
            where = f", {first.source}" if first.source else ""
            fused = f", fused from {', '.join(first.covers)}" if first.covers else ""
            lines.append(
                f"first divergence: {first.path} ({first.kind}{fused}{where}): {e.max_rel:.1e} of {e.limit:.1e} allowed"
            )
        elif self.layers:
            lines.append(f"{len(self.layers)} layers agree")
        return "\n".join(lines + [f"note: {n}" for n in self.notes])


def row(o: Output) -> list[str]:
    e = o.errors
    top1 = "" if e.top1 is None else f"{100 * e.top1:.4g} %"
    numbers = [f"{e.max_abs:.1e}", f"{e.max_rel:.1e}", f"{e.torch_rel:.1e}", f"{e.ratio:.2g}"]
    return [o.form, o.name, str(e.shape), *numbers, top1, "ok" if e.ok else "out of bounds"]


# -- numbers -------------------------------------------------------------------------------------------------------------


def leaves(value: Any, place: str = "") -> Arrays:
    """The tensors of a nested result as copies in float64 or complex128, by place: "", "0", "1.name"."""
    if isinstance(value, torch.Tensor):
        exact = torch.complex128 if value.is_complex() else torch.float64
        return {place: value.detach().cpu().to(exact, copy=True).resolve_conj().resolve_neg().numpy()}
    if is_complex(value):
        return {place: np.array(value, dtype="complex128")}
    if isinstance(value, ndl.TensorTuple):
        value = tuple(value)
    if is_record(value):
        value = members(value)
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        return {place: np.array(value, dtype="float64")} if hasattr(value, "shape") else {}
    found: Arrays = {}
    for k, v in items:
        found |= leaves(v, f"{place}.{k}" if place else str(k))
    return found


def difference(got: np.ndarray, want: np.ndarray, excused: np.ndarray | None = None) -> tuple[float, float]:
    """(largest difference, the same relative to the largest wanted value); equal NaNs and infinities are no difference."""
    if not want.size:
        return 0.0, 0.0
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    if excused is not None:
        same |= excused
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(got - want))
    largest = float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max())
    scale = float(np.abs(np.where(np.isfinite(want), want, 0.0)).max())
    return largest, largest / (scale or 1.0)


def classes(a: np.ndarray) -> np.ndarray:
    return a.argmax(-1 if a.ndim == 3 else 1)


def compare(got: np.ndarray, want: np.ndarray, own: np.ndarray, top1: bool = True) -> Errors:
    """Errors of `got` and of float32 torch's `own` against `want`. Where only float64 is finite, needle need not be."""
    if got.shape != want.shape:
        return Errors(got.shape, np.inf, np.inf, 0.0)
    overflown = ~np.isfinite(own)
    excused = overflown & ~np.isfinite(got)
    best = None
    if (
        top1
        and got.dtype == want.dtype == "float64"
        and got.ndim >= 2
        and got.size
        and got.shape[-1 if got.ndim == 3 else 1] > 1
    ):
        best = float((classes(got) == classes(want)).mean())
    return Errors(got.shape, *difference(got, want, excused), difference(own, want, overflown)[1], best)


# -- running -------------------------------------------------------------------------------------------------------------


def to_torch(x: Any, dtype: torch.dtype | None) -> Any:
    """A copy as a torch tensor, floats as `dtype` if one is given; what is no array stays."""
    if not hasattr(x, "shape"):
        return x
    t = x.detach().clone() if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x))
    if t.is_complex() and dtype is not None:
        return t.to(torch.complex128)
    return t.to(dtype) if dtype is not None and t.is_floating_point() else t


def to_needle(x: Any, device: Any) -> Any:
    if not hasattr(x, "shape"):
        return x
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        half = x.dtype in (torch.float16, torch.bfloat16)
        x = (x.float() if half else x.resolve_conj().resolve_neg()).numpy()
    a = np.array(x, "int32" if is_narrow(x) else None)
    made = lambda part: Tensor(part, device=device, dtype=str(part.dtype), requires_grad=False)  # noqa: E731
    return parts(a).map(made) if is_complex(a) else made(a)


@contextmanager
def torch_defaults(dtype: torch.dtype) -> Iterator[None]:
    """Factory functions of the forward make tensors of `dtype`; random streams go on afterwards as if nothing ran."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(before)


def computed(model: nn.Module) -> dict[int, torch.Tensor]:
    """Copies of tensors that modules hold and that have a graph behind them, as of weight norms, which torch does not copy."""
    held = (t for m in model.modules() for t in tensors(list(vars(m).values())) if not t.is_leaf)
    return {id(t): t.detach().clone() for t in held}


def run_torch(
    model: nn.Module, inputs: Any, exact: bool, paths: list[str], seen: Callable[[str, int, Any], None]
) -> Arrays:
    """Outputs of a copy of the model, in its own dtype or exact in float64. `seen(path, call, output)`: of each layer."""
    twin = copy.deepcopy(model, computed(model))
    dtype = torch.float64 if exact else None
    twin = twin.double() if exact else twin
    calls: dict[str, int] = {}

    def hook(path: str) -> Callable:
        def note(module: nn.Module, args: tuple, output: Any) -> None:
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors(output))):
                return  # inside of torch.vmap: a sample's
            call = calls[path] = calls.get(path, -1) + 1
            seen(path, call, output)

        return note

    for path in paths:
        twin.get_submodule(path).register_forward_hook(hook(path))

    def call() -> Arrays:
        calls.clear()
        values = map_structure(inputs, lambda x: to_torch(x, dtype))
        return leaves(plain_result(twin(**values) if isinstance(values, dict) else twin(*values)))

    with torch_defaults(torch.float64 if exact else torch.get_default_dtype()):
        return gradients_where_asked(call)


@contextmanager
def undisturbed(net: Any) -> Iterator[None]:
    """Run without a tape, so that fused kernels run; buffers and numpy's stream are put back."""
    state = np.random.get_state()
    try:
        with state_kept(net), ndl.no_grad():
            yield
    finally:
        np.random.set_state(state)


def torch_paths(model: nn.Module, net: Any) -> list[str]:
    """Paths of the needle graph's layers that the torch model has, too."""
    wanted = dict.fromkeys(n.meta["path"] for n in net.graph if "path" in n.meta) if net is not None else {}
    known = {p for p, _ in model.named_modules(remove_duplicate=False)}
    return [p for p in wanted if p in known]


def note_modes(model: nn.Module, net: Module, notes: list[str]) -> None:
    own = dict(net.named_modules())
    differ = [
        p for p, m in model.named_modules() if p in own and own[p].mode_dependent and own[p].training != m.training
    ]
    if differ:
        notes.append(
            f"{len(differ)} layers are in another mode than torch's (first: {differ[0]}); call train() or eval()"
        )


def verify(model: nn.Module, net: Any, x: Any, *, compiled: bool = True, layers: bool = True) -> Verification:
    """Compare `net` with the torch `model` on input x; both are left as they are, and disagreement raises nothing.

    model: a module, method or function, in evaluation or training; it runs in its own dtype and in float64, each on a copy
    net: what `convert` or `operator_fusion.fuse` gave (another needle Module has no layers to compare), or an Executable
    x: an input, or a tuple or dict of inputs: torch tensors or numpy arrays
    compiled: also run the compiled form; layers: also compare every layer that torch has under the same path, which keeps
        torch's outputs of them in memory, twice and as float64
    """
    result, model = Verification(), as_module(model)
    executable = net if isinstance(net, Executable) else None
    module = net if executable is None else executable.model
    if not isinstance(model, nn.Module) or (executable is None and not isinstance(module, Module)):
        raise TypeError(
            f"[verify] expects a torch module and a needle Module or Executable, got {type(model).__name__} "
            f"and {type(net).__name__}."
        )
    inputs = x if isinstance(x, dict) else tuple(x) if isinstance(x, tuple | list) else (x,)
    graph_module = module if layers and isinstance(module, GraphModule) else None
    if layers and graph_module is None:
        result.notes.append("layers are compared for GraphModules only")
    if isinstance(module, Module):
        note_modes(model, module, result.notes)
    paths = torch_paths(model, graph_module)
    with progress("verify", 2 * len(paths) + len(graph_module.graph.nodes if graph_module else ()) + 4) as bar:
        Run(model, module, executable, inputs, result, bar.update).all(graph_module, paths, compiled)
    if not result.ok:  # what conversion knew to differ, such as casts to 16 bits
        result.notes += getattr(getattr(module, "report", None), "notes", ())
    return result


class Run:
    """One verification: torch twice, needle eager with its layers watched, needle compiled."""

    def __init__(
        self, model: nn.Module, module: Any, executable: Any, inputs: Any, result: Verification, done: Callable
    ) -> None:
        self.model, self.module, self.executable, self.inputs = model, module, executable, inputs
        self.result, self.done = result, done
        self.exact: dict[tuple[str, int], Arrays] = {}  # float64 torch's outputs by layer and call
        self.own: dict[tuple[str, int], Arrays] = {}

    def all(self, graph_module: GraphModule | None, paths: list[str], compiled: bool) -> None:
        try:
            own = run_torch(self.model, self.inputs, False, paths, self.keep(self.own))
        except Exception as e:
            raise ValueError(f"[verify] expects inputs that the torch model takes: {first_line(e)}.") from e
        self.done()
        try:
            want = run_torch(self.model, self.inputs, True, paths, self.keep(self.exact))
        except RuntimeError as e:  # such as a forward that casts to float32 halfway
            self.result.notes.append(f"torch cannot run in float64 ({reason_of(e)}); compared with its own dtype")
            want, self.exact = own, self.own
        self.done()
        if self.module is not None:
            self.eager(graph_module, want, own)
        if self.executable is not None or compiled:
            self.compiled(want, own)

    def keep(self, table: dict[tuple[str, int], Arrays]) -> Callable[[str, int, Any], None]:
        def seen(path: str, call: int, output: Any) -> None:
            table[path, call] = leaves(output)
            self.done()

        return seen

    def needle_inputs(self, device: Any) -> tuple[tuple, dict]:
        """The inputs that the net has: those that conversion fixed are left out."""
        names = getattr(self.module, "input_names", None)
        values = map_structure(self.inputs, lambda v: to_needle(v, device))
        if names is None or (not isinstance(values, dict) and len(values) == len(names)):
            return ((), values) if isinstance(values, dict) else (values, {})
        return (), {k: v for k, v in example_by_name(self.model, values).items() if k in names}

    def eager(self, graph_module: GraphModule | None, want: Arrays, own: Arrays) -> None:
        if not isinstance(self.module, Module):  # an Executable of a function
            return
        device = device_of(self.module)
        args, kwargs = self.needle_inputs(device)
        with undisturbed(self.module):
            watched = {} if graph_module is None else {"watch": self.watch}
            got = (graph_module.run if graph_module else self.module)(*args, **kwargs, **watched)
        self.add_outputs("eager", got, want, own)
        self.done()

    def watch(self, node: Node, value: Any) -> None:
        key = node.meta.get("path"), node.meta.get("call")
        self.done()
        if key not in self.exact:
            return
        want, own, got = self.exact.pop(key), self.own.pop(key, None), leaves(value)  # type: ignore[arg-type]
        own = want if own is None else own  # one table, where float64 could not run
        for place in want:
            errors = compare(got[place], want[place], own[place], top1=False) if place in got else MISSING
            path = f"{key[0]}[{place}]" if place else str(key[0])
            kind = type(self.module.get_submodule(node.target)).__name__ if node.kind == "module" else node.target.name
            covers = list(node.meta.get("covers", ()))
            source = source_line(self.module, node)
            self.result.layers.append(Layer(path, node.name, covers, kind, source, errors))

    def compiled(self, want: Arrays, own: Arrays) -> None:
        training = [p or "the model" for p, m in modules(self.module) if m.mode_dependent and m.training]
        device = device_of(self.module)
        if training:
            self.result.notes.append(
                f"not compiled: {len(training)} layers are in training mode (first: {training[0]})"
            )
        elif device == ndl.cpu_numpy():
            self.result.notes.append("not compiled: the net is on cpu_numpy()")
        else:
            args, kwargs = self.needle_inputs(device)
            if self.executable is None:
                args, kwargs = (tuple(self.module.bind(args, kwargs)) if hasattr(self.module, "bind") else args), {}
                self.executable = ndl.compile(self.module, args)
            with undisturbed(self.module):
                got = self.executable(*args, **kwargs)
            self.add_outputs("compiled", got, want, own)
        self.done()

    def add_outputs(self, form: str, got: Any, want: Arrays, own: Arrays) -> None:
        found = leaves(got)
        if len(found) != len(want):
            self.result.mismatch = f"torch gives {len(want)} outputs, needle {len(found)} ({form})"
            return
        for place, ours in zip(want, found.values(), strict=True):
            errors = compare(ours, want[place], own[place])
            self.result.outputs.append(Output(form, place or "output", errors))


MISSING = Errors((), np.inf, np.inf, 0.0)


def device_of(module: Any) -> Any:
    tensors = module.named_tensors() if isinstance(module, Module) else ()
    return next((t.device for _, t in tensors), ndl.default_device())


def modules(module: Any) -> list[tuple[str, Module]]:
    return list(module.named_modules()) if isinstance(module, Module) else []
