"""`compile` and `Executable`: a model as planned kernel calls, one plan per input shape."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from needle import _core
from needle.autograd import Spec, Unsupported, uncollected
from needle.backend_ndarray import Device, NDArray, default_device
from needle.backend_ndarray.forks import KNOWN, PLANS, RUNS, fork_lock
from needle.backend_selection import BACKEND
from needle.complex_numbers import is_complex, parts
from needle.graph import GraphModule, map_structure
from needle.graph.report import FusionReport
from needle.interop import array_kind, as_ndarray, mirror, over_numpy
from needle.nn.functional import GuardError
from needle.nn.module import STRUCTURE, Module
from needle.shown import Shown

from .arguments import as_targets, check_model, example_call, names, positional, without_torch
from .builder import PlanInfo
from .compiled import CompiledPlan, answered
from .constants import Constant, ConstantPool, taken_back
from .exported import write
from .memory import MemoryReport
from .ranges import ranges_of
from .settings import DEFAULT, Choice
from .shapes import Shapes, ranks_of
from .split import SplitPlan
from .staged import Staged
from .tuner import step_times
from .watch import Watch

KEPT_BYTES = 128 << 20  # that plans may hold beyond twice the weights that the last one uses, before the oldest go
LOG = logging.getLogger("needle.compile")
STEP_BYTES = 8 << 10  # about what a step takes: its operands for the core, and what Python tells of it


def told_shapes(specs: Any) -> str:
    found: list[Spec] = []
    map_structure(list(specs), lambda s: found.append(s) if isinstance(s, Spec) else None)
    return ", ".join(f"{s.dtype} {list(s.shape)}" for s in found) or "no arrays"


def place_of(fn: Callable, inputs: list[NDArray]) -> Device:
    """Where a model runs: the device of its parameters and buffers, of a function the one of its inputs; the host's memory may
    be an input everywhere.
    """
    found = list(dict.fromkeys(t.device for _, t in fn.named_tensors())) if isinstance(fn, Module) else []
    host = default_device()
    found = found or [d for d in dict.fromkeys(a.device for a in inputs) if d != host] or [host]
    if len(found) > 1:
        raise ValueError(f"[compile] expects a model on one device, got {found[0]} and {found[1]}.")
    if not found[0].target:
        raise ValueError(f"[compile] expects a model on cpu() or a GPU, got {found[0]}.")
    return found[0]


def entered(inputs: Any) -> tuple[Any, list[NDArray], str]:
    """The inputs with a Spec for every array, the arrays, and the kind of the first."""
    arrays: list[NDArray] = []
    kind = "needle"

    def enter(x: Any) -> Any:
        nonlocal kind
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return x
        if is_complex(x):
            return map_structure(parts(x), enter)
        kind = kind if arrays else array_kind(x)
        arrays.append(as_ndarray(x))
        return Spec(arrays[-1].shape, arrays[-1].dtype)

    return map_structure(inputs, enter), arrays, kind


class Plans(Shown):
    """The plans of one function or module, one per shape of the inputs, and what they are made from."""

    kind = "an Executable"  # in messages

    def __init__(self, fn: Callable, choice: Choice = DEFAULT) -> None:
        self.model, self._pool = fn, ConstantPool()  # the Module or function that it runs
        self._choice = choice.check()
        self._plans: OrderedDict[Any, CompiledPlan] = OrderedDict()
        self._device: Device | None = None  # that of its first plan
        self._epoch = 0
        self._watch, self._changes = Watch(()), STRUCTURE.changes
        self._lock = fork_lock(KNOWN)  # of what is known
        self._planning = fork_lock(PLANS)  # of who changes it; taken before the other, and while a plan is made alone
        self._warned = False

    def __reduce__(self) -> Any:
        raise TypeError(f"[compile] {self.kind} is neither copied nor pickled; compile a copy of its model.")

    def _check_model(self) -> None:
        """Raise ValueError for a changed model that cannot be planned."""

    def _make(self, key: Any, specs: tuple, inputs: list[NDArray], device: Device) -> CompiledPlan:
        return CompiledPlan(self.model, specs, self._pool, self._choice, inputs, device)

    def _plan_for(self, key: Any, specs: tuple, inputs: list[NDArray]) -> CompiledPlan:
        """The plan of a key; where there is none it is made, meanwhile other threads run those that there are."""
        with self._lock:
            if self._epoch == _core.epoch() and key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
        with self._planning:
            with self._lock:
                if self._epoch != _core.epoch():
                    self._refresh()
                if key in self._plans:
                    self._plans.move_to_end(key)
                    return self._plans[key]
            device, start = self._device or place_of(self.model, inputs), time.perf_counter()
            with uncollected():
                plan = self._make(key, specs, inputs, device)
            if LOG.isEnabledFor(logging.INFO):
                steps, shapes = sum(len(i.names) for i in plan.infos), told_shapes(specs)
                ms = 1e3 * (time.perf_counter() - start)
                title = getattr(self.model, "_title", self.name)
                LOG.info("planned %s for %s on %s: %d steps, %.1f ms", title, shapes, device, steps, ms)
            with self._lock:
                self._keep(key, plan, device)
            return plan

    def _keep(self, key: Any, plan: CompiledPlan, device: Device) -> None:
        self._device = device
        self._plans[key] = plan
        whole = [self.model] if isinstance(self.model, Module) else []
        if not whole or not self._watch.state or self._changes != STRUCTURE.changes:  # a forward may set attributes
            self._watch = Watch(whole or [m for p in self._plans.values() for m in p.modules])
        self._changes = STRUCTURE.changes
        self._epoch = _core.epoch()
        if self._drop_oldest() or not plan.info.shared:
            self._drop_unused()

    def _drop_oldest(self) -> bool:
        """Forget the plans that were not used for longest, beyond the number or the bytes that are kept; whether there were."""
        newest = self.last.info.constants
        held, seen = -sum(c.array._handle.nbytes for c in newest), {id(c) for c in newest}
        most, kept = self._choice.max_plans or len(self._plans), 0
        for plan in reversed(self._plans.values()):
            shared = () if id(plan.info.shared) in seen else plan.info.shared
            seen.add(id(plan.info.shared))
            own = {id(c): c for c in (*shared, *plan.info.own) if c.source is None and id(c) not in seen}
            seen.update(own)
            held += len(plan.info.names) * STEP_BYTES + sum([c.array._handle.nbytes for c in own.values()])
            held += 0 if plan.device == default_device() else plan.info.arena_bytes  # each has its own there
            if kept and (kept == most or held > KEPT_BYTES):
                break
            kept += 1
        if kept == len(self._plans):
            return False
        while len(self._plans) > kept:
            self._plans.popitem(last=False)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"[compile] {self.name} was called with more than {kept} shapes, whose plans are thrown away by turns and made "
                "again; compile(max_plans=...) keeps more.",
                stacklevel=2,
            )
        return True

    def _refresh(self) -> None:
        epoch, changes = _core.epoch(), STRUCTURE.changes
        if self._changes != changes and not self._watch.holds():
            self._check_model()
            self._forget()
        elif self._pool.moved():
            self._forget()
        self._changes = changes
        if self._pool.refresh():
            for info in (info for plan in self._plans.values() for info in plan.infos):
                info.refresh()
            self._drop_unused()
        self._epoch = epoch

    def _forget(self) -> None:
        """The model is another one: plan it anew."""
        self._plans.clear()
        self._watch = Watch(())
        self._pool, self._device = ConstantPool(), None

    def _drop_unused(self) -> None:
        lists = {id(part): part for p in self._plans.values() for i in p.infos for part in (i.shared, i.own)}
        self._pool.drop_unused([c for part in lists.values() for c in part], self._needed())

    def _needed(self) -> Iterable[Constant]:
        """Constants that plans may come to use."""
        return ()

    @property
    def name(self) -> str:
        """The class of the module, or the name of the function, that was compiled."""
        return (
            type(self.model).__name__ if isinstance(self.model, Module) else getattr(self.model, "__name__", "function")
        )

    def __str__(self) -> str:
        if not self._plans:
            return f"{self.name} without a plan"
        return f"{self.name}: {self.plan}"

    @property
    def last(self) -> CompiledPlan:
        """The last used plan with what it was made from."""
        return next(reversed(self._plans.values()))

    @property
    def plan(self) -> PlanInfo | SplitPlan:
        return self.last.info

    @property
    def report(self) -> FusionReport:
        """What became one op or step in the last used plan, what nearly did and why not; `print` it, or `.explain(name)`."""
        return self.last.report

    @property
    def memory(self) -> MemoryReport:
        """The memory of the last used plan: its arena, the arena's lower bound, the packed weights, and every buffer."""
        plan = self.last
        info = plan.info
        sizes = {
            "arena": info.arena_bytes,
            "lower_bound": info.lower_bound,
            "constants": sum(c.array._handle.nbytes for c in info.constants),
            "arenas": info.core.arenas,
        }
        return MemoryReport(sizes, [b._replace(label=plan.node(b.label)) for b in info.buffers], len(info.names))


class Executable(Plans):
    """Runs a model without Python inside a run. Takes torch, numpy or needle arrays and returns the same kind; has no gradient.
    Buffers that the forward writes, such as a decoder's cache, are written in place.

    On a GPU a run is work in the device's stream, for which only numpy results wait; from a shape's second run on it is one
    graph. Inputs may lie in the CPU's memory; results are on the device, numpy's excepted.
    `plan`: steps of the last used shape; `report`: what was fused and why; `memory`: its arena. A changed parameter is packed
    again before the next run.

    A call takes the model's arguments, in their dtypes. ValueError for shapes that the model refuses, TypeError for
    dtypes and for what is no array.
    """

    def __init__(self, fn: Callable, choice: Choice = DEFAULT) -> None:
        super().__init__(fn, choice)
        self._shapes = Shapes(choice)
        self._direct: CompiledPlan | None = None  # of the last call, if its arguments were the plan's inputs
        self._running = fork_lock(RUNS)  # of runs that write buffers

    def _check_model(self) -> None:
        if isinstance(self.model, Module):
            self.model.check_evaluation("executable")

    def _make(self, key: Any, specs: tuple, inputs: list[NDArray], device: Device) -> CompiledPlan:
        scratch = functools.partial(super()._make, key, specs, inputs, device)
        plan = self._shapes.find(specs, self._pool, scratch)
        plan.specs = specs
        return plan

    def _needed(self) -> Iterable[Constant]:
        return self._shapes.constants()

    def _forget(self) -> None:
        super()._forget()
        self._direct = None
        self._shapes = Shapes(self._choice, self._shapes.ranges, self._shapes.ranks)

    def plan_ahead(self, sizes: Mapping[str, Any], example: tuple) -> None:
        """Plans for the ranges of sizes that `compile` was told."""
        specs, _, _ = entered(self._bind(example, {}))
        self._shapes = Shapes(self._choice, ranges_of(sizes, self.model, specs), ranks_of(specs))
        self._prepare(example, {})
        for probe in self._shapes.unknown(specs):
            self._plan_for(repr(probe), probe, [])

    def _bind(self, args: tuple, kwargs: dict) -> tuple:
        bind = getattr(self.model, "bind", None)
        if bind is not None:
            return tuple(bind(args, kwargs))
        return positional(self.model, args, kwargs) if kwargs else args

    def _prepare(self, args: tuple, kwargs: dict) -> tuple[CompiledPlan, list[NDArray], str]:
        inputs = self._bind(args, kwargs)
        specs, arrays, kind = entered(inputs)
        same = arrays and (kwargs or len(args) == len(inputs)) and all(isinstance(s, Spec) for s in specs)
        plan = self._plan_for(repr(specs), specs, arrays)
        self._direct = plan if same and isinstance(plan.info, PlanInfo) else None
        return plan, arrays, kind

    def refresh(self) -> None:
        """Pack the parameters again; needed only after writing to them through an exported DLPack view."""
        with self._planning, self._lock:
            for c in self._pool.constants.values():
                c.stamp = None
            self._refresh()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._watch.lists_hold():
            STRUCTURE.changed()
        try:
            return self._call(args, kwargs)
        except GuardError as e:
            return answered(self.model, self._bind(args, kwargs), e)

    def _call(self, args: tuple, kwargs: dict) -> Any:
        if (direct := self._direct) is not None and not direct.writes:
            given, mirrors = over_numpy(self._bind(args, kwargs) if kwargs else args)
            try:
                found = direct.core.run_numpy(given, self._epoch)  # type: ignore[union-attr]
            except (IndexError, ValueError):
                found = None  # it is said below
            if found is not None:
                return direct.outputs(mirrors(direct.check_guards(found)))
        plan, arrays, kind = self._prepare(args, kwargs)
        with self._writing(plan):
            plan.check_inputs(arrays)
            results = plan.check_guards(plan.run_new(arrays))
        return plan.outputs([mirror(NDArray.wrap(r, plan.device), kind) for r in results])

    def run_into(self, outs: Any, *args: Any) -> None:
        """Run, writing the results into existing arrays (one array, or a flat sequence in the order of the outputs)."""
        if not self._watch.lists_hold():
            STRUCTURE.changed()
        plan, arrays, _ = self._prepare(args, {})
        if plan.guards:
            raise Unsupported("[run_into] a model that checks the values of its inputs gives its results by a call.")
        targets = as_targets(outs, arrays)
        if (parameter := self._pool.place(targets)) is not None:
            raise ValueError(f"[run_into] output {parameter} is a parameter or buffer of the model.")
        with self._writing(plan):
            plan.core.run([a._ref for a in targets], [a._ref for a in arrays])

    def export(self, path: Any, examples: Iterable[Any] | None = None, *, isas: Sequence[str] | None = None) -> None:
        """Write plans with their packed weights to a file that `libneedle.so` opens and runs without Python (`needle.h`).

        examples: arguments of calls, a tuple or dict for each plan; None: the shapes that there are plans for, in the order of
        their last use. isas: instruction sets to plan and pack for ("avx512", "avx2", "neon", "scalar"); None: the one running
        here. Others need a CPU that has them, and a model that `save` takes. Float16 inputs are float32 in the file, complex
        ones two arrays; conditions on values of inputs are checked there, too. Buffers that the model writes are state of the
        opened file and begin as they are now. Refused: plans on GPUs, and of models that run elsewhere in part.
        """
        if (shape := getattr(examples, "shape", None)) is not None:
            raise TypeError(f"[export] examples expects a list of calls, got one array of shape {tuple(shape)}.")
        if not self._watch.lists_hold():
            STRUCTURE.changed()
        if isinstance(examples, dict):
            raise TypeError(f"[export] examples expects a list of calls, got one with {', '.join(map(str, examples))}.")
        calls = [example_call(self.model, example) for example in examples or ()]
        found = None if examples is None else [self._prepare(args, {})[0] for args in calls]
        with self._running, self._planning, self._lock:  # no run writes buffers meanwhile
            if self._epoch != _core.epoch():
                self._refresh()
            write(path, self.model, list(self._plans.values()) if found is None else found, self._choice, isas)

    @contextmanager
    def _writing(self, plan: CompiledPlan) -> Iterator[None]:
        """Runs that write buffers come one after the other, and what they write is no news to the plans."""
        if not plan.writes:
            yield
            return
        with self._running:
            yield
            self._epoch = _core.epoch()

    def profile(self, *args: Any, rounds: int = 10, **kwargs: Any) -> list[tuple[str, str, float]]:
        """(kernel, node, median seconds) for every step of the call's plan; what the runs write is taken back."""
        plan, arrays, _ = self._prepare(args, kwargs)
        with self._writing(plan), taken_back(self._pool) if plan.writes else nullcontext():
            times = step_times(plan.info, arrays, rounds)
        return list(zip(plan.info.names, plan.info.labels, times, strict=True))


def compile(
    model: Module | Callable,
    example: Any,
    *,
    winograd: str = "auto",
    memory: str = "normal",
    tune: bool = False,
    precision: str = "float32",
    disable: Sequence[str] = (),
    max_plans: int | None = None,
    sizes: Mapping[str, tuple[int, int]] | None = None,
) -> Executable | Staged:
    """An Executable of `model` (a Module in eval mode, or a function of tensors), planned for the shapes of `example` and the
    device of the model's parameters (a function's: of its inputs). example: an input, a tuple of them, or a dict by names.

    Other shapes get their own plan on first use, from the third on mostly without planning. A net in which values say how large
    some results are, as `nonzero` does, becomes a Staged: plans of what lies between. Raises ValueError when layers are in
    training mode.

    precision: on a GPU, what matrix products, convolutions and attention multiply in: "float32" exactly, or "tf32", "float16",
    "bfloat16": operands are rounded on their way in, sums and everything between layers stay float32 (so float16 overflows
    only beyond 65504 in an operand). Products of at most 8 rows, attention of at most 8 queries or of heads with more than 128
    features, depthwise convolutions and recurrent layers stay float32; `exe.plan` names the precision that each step was
    asked for. The CPU has "float32" alone; what follows is for the CPU.

    winograd: which layers may use algorithms with fewer multiplications: 3x3 convolutions of stride 1 Winograd's (Lavin and
    Gray, arXiv 1509.09308), linear layers one step of Strassen's (Numer. Math. 13, 1969). "auto": F(4x4, 3x3), F(2x2, 3x3),
    Strassen or none, by estimated time; each layer stays within 5e-6 of float64, relative to its largest value. "f2": at
    most F(2x2, 3x3), as accurate as a direct sum. "off": direct sums only. A NaN or infinity reaches every pixel of its
    tile, or a second row of results. Packed weights of F(4x4, 3x3) take 4 times, of the other two 1.8
    times the memory of plain ones. `exe.plan` shows the choice as the steps' kernels.

    memory: "low" lets a convolution take Winograd's algorithm only where it saves much time for each byte that its weights
    grow by, so packed weights take little more than plain ones; convolutions with many channels on small images become
    slower, a whole model mostly by a third or less. "normal" counts time alone. Results differ by rounding. A model from
    `load` keeps its own weights in the file's pages, which `compile` gives back, so that only packed weights stay.

    tune: choose every layer's algorithm by its time on this machine in place of an estimate: each allowed one runs in a plan
    of the whole model, with cold caches (a few seconds). The times are kept in `$NEEDLE_CACHE` (else `$XDG_CACHE_HOME` or
    `~/.cache`, folder torch2needle) for this CPU, instruction set and number of threads; known layers are not timed again.

    disable: names of rules that make one step of several, as `exe.report` shows them.

    max_plans: how many shapes' plans are kept, those used last. None: as many as fit into the size of the packed weights, which
    plans share, and 128 MiB; they also share the memory that they compute in. Mostly some hundred.

    sizes: sizes that inputs may have, `{"ids.1, mask.1": (1, 512)}`: axes as "input.axis", equal ones joined by commas, or a name
    that torch.export gave. They are planned for at once, so that calls do not plan; others are refused. On a GPU, and where
    planning needs a size itself, calls plan as they do without.
    """
    if BACKEND == "np":
        raise RuntimeError("[compile] the numpy backend has no executor; use NEEDLE_BACKEND=nd.")
    check_model(model)
    if isinstance(model, Module):
        model.check_evaluation("compile")
    choice = Choice(winograd, memory, tune, precision, names("disable", disable), max_plans)
    example = example_call(model, example)
    if isinstance(model, GraphModule) and any(n.kind == "op" and n.target.counts for n in model.graph):
        if sizes is not None:
            raise ValueError(
                "[compile] sizes expects a net whose results' sizes are known without values, got one that counts."
            )
        staged = Staged(model, lambda part: Executable(part, choice))
        staged.prepare(example)
        return staged
    exe = Executable(model, choice)
    if sizes is not None:
        exe.plan_ahead(sizes, example)
    with without_torch("compile"):
        exe._prepare(example, {})
    return exe
